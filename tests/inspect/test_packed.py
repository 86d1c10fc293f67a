"""Quantized checkpoints of other programs: weights are dequantized, their codes and scales are tensors of their own.

The files are written here in the layouts of DeepSeek-V3, compressed-tensors, ModelOpt and gpt-oss, and by torchao itself.
Expected weights are sums over single codes, with the values of ml_dtypes.
"""
import json
import math

import numpy as np
import pytest

from pyops import formats
from pyops.inspect.logs import LogError, Logs
from pyops.inspect.readers import flat, list_file, read

ml_dtypes = pytest.importorskip('ml_dtypes', reason='ml_dtypes is not installed: pip install ml_dtypes')

DTYPES = {'U8': np.uint8, 'I8': np.int8, 'I32': np.int32, 'I64': np.int64, 'F32': np.float32, 'F16': np.float16,
          'BF16': ml_dtypes.bfloat16, 'F8_E4M3': ml_dtypes.float8_e4m3fn, 'F8_E5M2': ml_dtypes.float8_e5m2,
          'F8_E8M0': ml_dtypes.float8_e8m0fnu}
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)


def write(path, metadata=None, **tensors):
    """Write a safetensors file.  tensors: {key: (dtype of the header, array)}"""
    header, at, parts = {'__metadata__': metadata} if metadata else {}, 0, []
    for key, (dtype, array) in tensors.items():
        data = np.asarray(array).astype(DTYPES[dtype]).tobytes()
        header[key] = {'dtype': dtype, 'shape': np.shape(array), 'data_offsets': [at, at + len(data)]}
        at += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, 'little') + text + b''.join(parts))


def named(logs):
    return {f'{entry.layer}.{entry.name}': entry for entry in logs.entries}


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def floats(rng, shape, dtype='F8_E4M3'):
    """Return random values of an 8-bit type, without NaN and infinities."""
    kind = DTYPES[dtype]
    return np.clip(rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, shape), -400, 400).astype(kind).astype(np.float32)


def scales(rng, shape, dtype='F32'):
    return (2.0 ** rng.integers(-6, 3, shape) * rng.uniform(1, 2, shape)).astype(DTYPES[dtype]).astype(np.float32)


def packed(codes):
    """Return codes below 16 in bytes, the first of two in the low bits."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def test_blocks_of_deepseek_are_multiplied_also_at_the_edges(tmp_path, rng):
    for dtype in 'F32', 'BF16':
        codes, scale = floats(rng, (200, 300)), scales(rng, (2, 3), dtype)
        write(tmp_path / 'model.safetensors', **{
            'model.layers.0.mlp.down_proj.weight': ('F8_E4M3', codes),
            'model.layers.0.mlp.down_proj.weight_scale_inv': (dtype, scale), 'model.norm.weight': ('BF16', np.ones(8))})
        logs = Logs(tmp_path)
        entries, layer = named(logs), 'model.layers.0.mlp.down_proj'
        assert logs.skipped == [] and entries.keys() == {f'{layer}.weight', f'{layer}.weight_codes',
                                                         f'{layer}.weight_scale_inv', 'model.norm.weight'}
        want = np.array([[codes[i, j] * scale[i // 128, j // 128] for j in range(300)] for i in range(200)])
        assert np.array_equal(entries[f'{layer}.weight'].load(), want) and want.dtype == np.float32
        assert np.array_equal(entries[f'{layer}.weight_codes'].load(), codes)
        assert np.array_equal(entries[f'{layer}.weight_scale_inv'].load(), scale)
        assert entries[f'{layer}.weight'].dtype == 'float8_e4m3fn' and entries['model.norm.weight'].load().sum() == 8
        assert flat(entries[f'{layer}.weight'].path, f'{layer}.weight') is None        # pieces of a file are codes
        stored = flat(entries[f'{layer}.weight'].path, f'{layer}.weight_scale_inv')
        assert stored.read(0, 6).tolist() == scale.reshape(-1).tolist()


@pytest.mark.parametrize('lead', [(), (3,)])
def test_pairs_of_four_bit_codes(tmp_path, rng, lead):
    codes = rng.integers(0, 16, (*lead, 6, 96), np.uint8)
    byte, block = rng.integers(0, 255, (*lead, 6, 3), np.uint8), floats(rng, (*lead, 6, 6))
    overall = np.float32(1234.5)
    exponents = np.exp2(byte.astype(np.float64) - 127)
    write(tmp_path / 'a.safetensors', **{
        'a.nvfp4.weight_packed': ('U8', packed(codes)), 'a.nvfp4.weight_scale': ('F8_E4M3', block),
        'a.nvfp4.weight_global_scale': ('F32', [overall]), 'a.nvfp4.input_global_scale': ('F32', [3]),
        'b.mxfp4.weight_packed': ('U8', packed(codes)), 'b.mxfp4.weight_scale': ('U8', byte),
        'c.mlp1_blocks': ('U8', packed(codes).reshape(*lead, 6, 3, 16)), 'c.mlp1_scales': ('U8', byte),
        'd.modelopt.weight': ('U8', packed(codes)), 'd.modelopt.weight_scale': ('F8_E4M3', block),
        'd.modelopt.weight_scale_2': ('F32', np.float32(0.01)), 'd.modelopt.input_scale': ('F32', np.float32(2))})
    logs = Logs(tmp_path)
    entries = named(logs)
    values = E2M1[codes]
    with np.errstate(over='ignore'):
        mx = (values * exponents.repeat(32, -1)).astype(np.float32)
    wants = {'a.nvfp4.weight': values * (block / overall).repeat(16, -1), 'b.mxfp4.weight': mx, 'c.mlp1': mx,
             'd.modelopt.weight': values * (block * np.float32(0.01)).repeat(16, -1)}
    assert logs.skipped == [] and not any(name.endswith(('_packed', '_blocks')) for name in entries)
    for name, want in wants.items():
        found = entries[name].load()
        assert np.array_equal(found, want) and found.dtype == np.float32 and entries[name].dtype == 'float4_e2m1fn', name
        assert np.array_equal(entries[f'{name}_codes'].load(), values), name
    assert np.array_equal(entries['b.mxfp4.weight_scale'].load(), exponents.astype(np.float32))
    assert np.array_equal(entries['c.mlp1_scales'].load(), exponents.astype(np.float32))
    assert entries['b.mxfp4.weight_scale'].dtype == 'float8_e8m0fnu'


def test_our_own_codes_in_the_layout_of_gpt_oss_are_decoded_bit_for_bit(tmp_path, rng):
    x = (rng.standard_normal((8, 64)) * np.exp2(rng.integers(-9, 9, (8, 64)))).astype(np.float32)
    codes = formats.encode(x, 'mxfp4')
    write(tmp_path / 'a.safetensors', **{'w_blocks': ('U8', packed(np.asarray(codes.codes)).reshape(8, 2, 16)),
                                         'w_scales': ('U8', np.asarray(codes.scales))})
    assert np.array_equal(read(str(tmp_path / 'a.safetensors'), 'w'), formats.decode(codes))


@pytest.mark.parametrize(('bits', 'columns'), [(4, 64), (4, 61), (8, 64), (8, 62)])
def test_integers_packed_into_words(tmp_path, rng, bits, columns):
    rows, each, group = 5, 32 // bits, 2 if columns % 2 == 0 else 1
    values = rng.integers(-1 << bits - 1, 1 << bits - 1, (rows, columns))
    words = np.zeros((rows, -(-columns // each)), np.int64)
    for i in range(rows):
        for j in range(columns):
            words[i, j // each] |= int(values[i, j] + (1 << bits - 1)) << bits * (j % each)
    scale = scales(rng, (rows, group), 'BF16')
    write(tmp_path / 'a.safetensors', **{
        'q.weight_packed': ('I32', words.astype(np.uint32).view(np.int32)), 'q.weight_scale': ('BF16', scale),
        'q.weight_shape': ('I64', [rows, columns])})
    entries = named(Logs(tmp_path))
    assert np.array_equal(entries['q.weight'].load(), values.astype(np.float32) * scale.repeat(columns // group, 1))
    assert np.array_equal(entries['q.weight_codes'].load(), values) and entries['q.weight'].dtype == f'int{bits}'


def test_scales_of_a_tensor_of_rows_and_of_groups_and_zero_points(tmp_path, rng):
    values, whole = floats(rng, (6, 64)), rng.integers(-128, 128, (6, 64))
    row, zeros = scales(rng, 6), rng.integers(-9, 9, (6, 1))
    group, exponents = scales(rng, (6, 4)), rng.integers(110, 140, (6, 2))
    cases = {'one': (values, 'F8_E5M2', np.float32(0.25), 'F32', None),
             'single': (values, 'F8_E4M3', [np.float32(3)], 'F32', None),
             'row': (values, 'F8_E4M3', row, 'F32', None), 'column': (values, 'F8_E4M3', row[:, None], 'F32', None),
             'group': (values, 'F8_E4M3', group, 'F32', None), 'mxfp8': (values, 'F8_E4M3', exponents, 'U8', None),
             'int8': (whole, 'I8', row[:, None], 'F32', None), 'zeros': (whole, 'I8', row[:, None], 'F32', zeros)}
    tensors = {}
    for name, (codes, kind, scale, dtype, zero) in cases.items():
        tensors |= {f'{name}.weight': (kind, codes), f'{name}.weight_scale': (dtype, scale)}
        tensors |= {} if zero is None else {f'{name}.weight_zero_point': ('I8', zero)}
    write(tmp_path / 'a.safetensors', **tensors)
    entries = named(Logs(tmp_path))
    for name, (codes, kind, scale, dtype, zero) in cases.items():
        scale = np.exp2(np.float32(scale) - 127) if dtype == 'U8' else np.asarray(scale, np.float32)
        if scale.shape == (6,):
            scale = scale[:, None]
        if scale.ndim == 2 and scale.shape[1] > 1:
            scale = scale.repeat(64 // scale.shape[1], 1)
        codes = codes.astype(DTYPES[kind]).astype(np.float32)
        want = (codes - (0 if zero is None else zero)).astype(np.float32) * scale
        assert np.array_equal(entries[f'{name}.weight'].load(), want), name


def test_a_number_without_a_scale_is_what_it_is_and_one_with_a_scale_of_its_own_is_a_tensor(tmp_path, rng):
    values = floats(rng, (4, 4))
    write(tmp_path / 'a.safetensors', **{'plain.weight': ('F8_E4M3', values), 'clip.logit': ('F32', values),
                                         'clip.logit_scale': ('F32', np.float32(4)), 'x.bytes': ('U8', [1, 2]),
                                         'x.bytes_scale': ('F32', [1.0])})
    logs = Logs(tmp_path)
    entries = named(logs)
    assert logs.skipped == []
    assert entries.keys() == {'plain.weight', 'clip.logit', 'clip.logit_scale', 'x.bytes', 'x.bytes_scale'}
    assert np.array_equal(entries['plain.weight'].load(), values) and np.array_equal(entries['clip.logit'].load(), values)
    assert entries['x.bytes'].load().tolist() == [1, 2]


def test_weights_with_an_unknown_layout_are_refused_with_a_line_and_the_others_read(tmp_path, rng):
    codes, byte = floats(rng, (10, 64)), rng.integers(0, 16, (10, 32))
    tensors = {'fine.weight': ('F8_E4M3', codes), 'fine.weight_scale': ('F32', np.float32(1))}
    reasons = {
        'blocks.weight': ('F8_E4M3', codes, {'weight_scale_inv': ('F32', np.ones((3, 3)))}, 'the blocks are unknown'),
        'alone.weight_packed': ('U8', byte, {}, 'the checkpoint has no alone.weight_scale'),
        'half.weight_packed': ('U8', byte, {'weight_scale': ('F8_E4M3', np.ones((10, 4)))},
                               'the checkpoint has no half.weight_global_scale'),
        'two.weight_packed': ('U8', byte, {'weight_scale': ('F8_E4M3', np.ones((10, 4))),
                                           'weight_global_scale': ('F32', [1, 2])}, 'expected one number'),
        'whole.weight': ('F8_E4M3', codes, {'weight_scale': ('I32', np.ones((10, 1)))}, 'expected floating-point scales'),
        'order.weight_packed': ('I32', byte, {'weight_scale': ('F32', np.ones((10, 1))), 'weight_shape': ('I64', [10, 256]),
                                              'weight_g_idx': ('I32', np.zeros(256))}, 'are not supported'),
        'size.weight_packed': ('I32', byte, {'weight_scale': ('F32', np.ones((10, 1))), 'weight_shape': ('I64', [10, 99])},
                               'expected eight or four of them per int32'),
        'shape.weight_packed': ('I32', byte, {'weight_scale': ('F32', np.ones((10, 1))),
                                              'weight_shape': ('F32', [10, math.nan])}, 'expected two integers'),
        'zeros.weight': ('I8', codes // 4, {'weight_scale': ('F32', np.ones((10, 1))), 'weight_zero_point': ('I8', [1, 2])},
                         'but the scales have'),
        'gpt_blocks': ('U8', byte, {}, ''),
        'oss_blocks': ('U8', byte, {'scales': ('U8', np.ones((9,)))}, 'expected one uint8 for each row')}
    for number, (key, (dtype, array, more, _)) in enumerate(reasons.items()):
        stem = key.rpartition('.')[0] + '.' if '.' in key else key.removesuffix('blocks')
        write(tmp_path / f'{number}.safetensors', **tensors, **{key: (dtype, array)},
              **{stem + name: value for name, value in more.items()})
    logs = Logs(tmp_path)
    skipped = dict(logs.skipped)
    for number, (key, (_, _, _, reason)) in enumerate(reasons.items()):
        line = skipped.get(f'{number}.safetensors', '')
        assert bool(line) == bool(reason) and reason in line and line.startswith(key if reason else ''), (key, line)
        assert '\n' not in line and len(line) < 300
        names = {entry.key for entry in logs.entries if entry.file == f'{number}.safetensors'}
        assert {'fine.weight', 'fine.weight_codes'} <= names and (key in names) == (not reason), key
    assert len(logs.skipped) == sum(bool(reason) for *_, reason in reasons.values())
    with pytest.raises(LogError, match='the blocks are unknown'):
        entry = next(entry for entry in logs.entries if entry.file == '0.safetensors' and entry.key == 'fine.weight')
        vars(entry)['key'] = 'blocks.weight'
        entry.load()


def test_only_the_first_of_many_refused_tensors_are_listed(tmp_path):
    write(tmp_path / 'a.safetensors', fine=('F32', [1]), **{f'{i}.weight_packed': ('U8', [[i]]) for i in range(9)})
    assert [reason.partition(':')[0] for _, reason in Logs(tmp_path).skipped] == [
        *(f'{i}.weight_packed' for i in range(3)), '6 more of its tensors cannot be read']


def test_a_scale_in_another_file_of_the_checkpoint(tmp_path, rng):
    codes, scale = floats(rng, (5, 64)), scales(rng, (5, 1))
    first, second = 'model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors'
    write(tmp_path / first, **{'a.weight': ('F8_E4M3', codes), 'b.weight': ('F8_E4M3', codes)})
    write(tmp_path / second, **{'a.weight_scale': ('F32', scale)})
    index = tmp_path / 'model.safetensors.index.json'
    names = {'a.weight': first, 'b.weight': first, 'a.weight_scale': second}
    index.write_text(json.dumps({'weight_map': names}))
    entries = named(Logs(tmp_path))
    assert np.array_equal(entries['a.weight'].load(), codes * scale) and np.array_equal(entries['b.weight'].load(), codes)
    assert np.array_equal(entries['a.weight_scale'].load(), scale)
    outside = tmp_path.parent / f'{tmp_path.name}-2.safetensors'
    outside.write_bytes((tmp_path / second).read_bytes())
    (tmp_path / 'link.safetensors').symlink_to(outside)
    for other in ('gone.safetensors', f'../{outside.name}', 'link.safetensors', str(outside)):
        index.write_text(json.dumps({'weight_map': names | {'a.weight_scale': other}}))
        logs = Logs(tmp_path)
        assert (first, f'a.weight: a.weight_scale cannot be read from {other[:80]}') in logs.skipped
        assert 'a.weight' not in named(logs) and np.array_equal(named(logs)['b.weight'].load(), codes)
    for text in '{', '[]', '{"weight_map": 3}':
        index.write_text(text)
        assert np.array_equal(named(Logs(tmp_path))['a.weight'].load(), codes)         # nothing says that there is a scale


# ---- torchao ---------------------------------------------------------------------------------------------------------

def by_torchao(torch, x):
    """Return {name of a layer: (tensor of torchao, its weight)}."""
    pytest.importorskip('torchao', reason='torchao is not installed: pip install torchao')
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, PerRow, PerTensor
    from torchao.quantization.quantize_.workflows.intx.intx_unpacked_to_int8_tensor import IntxUnpackedToInt8Tensor
    tensors = {
        'rows': Float8Tensor.from_hp(x, granularity=PerRow()), 'one': Float8Tensor.from_hp(x, granularity=PerTensor()),
        'mxfp8': MXTensor.to_mx(x, torch.float8_e4m3fn), 'mxfp4': MXTensor.to_mx(x, torch.float4_e2m1fn_x2),
        'nvfp4': NVFP4Tensor.to_nvfp4(x), 'tiled': NVFP4Tensor.to_nvfp4(x, is_swizzled_scales=True),
        'mxtiles': MXTensor.to_mx(x, torch.float8_e4m3fn, is_swizzled_scales=True),
        'scaled': NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())),
        'int4': IntxUnpackedToInt8Tensor.from_hp(x, (1, 32), torch.int4)}
    return {name: (tensor, tensor.dequantize(torch.float32) if name != 'int4' else tensor.dequantize())
            for name, tensor in tensors.items()}


def test_files_of_torchao_are_dequantized_as_torchao_does(tmp_path, torch, rng):
    from safetensors.torch import save_file
    x = torch.from_numpy((rng.standard_normal((200, 320)) * np.exp2(rng.integers(-5, 5, (200, 1)))).astype(np.float32))
    tensors = by_torchao(torch, x)
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    data, metadata = flatten_tensor_state_dict(
        {f'net.{name}.weight': tensor for name, (tensor, _) in tensors.items()} | {'net.plain.bias': x[0].clone()})
    save_file(data, tmp_path / 'model.safetensors', metadata)
    logs = Logs(tmp_path)
    entries = named(logs)
    assert logs.skipped == [] and np.array_equal(entries['net.plain.bias'].load(), x[0])
    for name, (_, want) in tensors.items():
        found, want = entries[f'net.{name}.weight'].load(), want.float().numpy()
        assert np.array_equal(found, want), name
        assert 0 < np.abs(found - x.numpy()).max() <= 0.3 * np.abs(x.numpy()).max()
        assert entries[f'net.{name}._weight_scale'].load().size > 0 and f'net.{name}._weight_qdata' not in entries


def test_classes_of_torchao_with_other_layouts_are_refused(tmp_path, rng):
    def described(kind, names=('qdata', 'scale'), **data):
        return json.dumps({'_type': kind, '_data': data, '_tensor_data_names': names})
    codes, pairs = ('F8_E4M3', floats(rng, (4, 32))), ('U8', np.ones((4, 32)))
    tensors = {f'{name}._weight_{part}': value for name in 'abcd' for part, value in (
        ('qdata', pairs if name == 'b' else codes), ('scale', ('F32', np.ones((4, 1)))))}
    del tensors['c._weight_scale']
    metadata = {'a.weight': described('Int4TilePackedTo4dTensor'),
                'b.weight': described('NVFP4Tensor', is_swizzled_scales=True, block_size=16),
                **{f'{name}.weight': described('Float8Tensor') for name in 'cde'},
                'f.weight': '{', 'tensor_names': json.dumps([f'{name}.weight' for name in 'abcdef'])}
    write(tmp_path / 'a.safetensors', metadata, **tensors)
    found = list_file(str(tmp_path / 'a.safetensors'))
    assert {key for key, *_ in found.tensors} == {'d.weight', 'd.weight_codes', 'd._weight_scale'}
    text = '\n'.join(map(': '.join, found.refused))
    assert 'a._weight_qdata: a Int4TilePackedTo4dTensor of torchao; supported: Float8Tensor' in text
    assert 'b._weight_qdata: b._weight_scale has the shape (4, 1) for a weight of shape (4, 64), in the order of' in text
    assert 'c._weight_qdata: the checkpoint has no c._weight_scale' in text and len(found.refused) == 5


@pytest.mark.parametrize('scale', [(), (1,), (1, 1)])
def test_an_empty_weight(tmp_path, scale):
    write(tmp_path / 'a.safetensors', **{'a.weight': ('F8_E4M3', np.ones((0, 4))), 'a.weight_scale': ('F32', np.ones(scale)),
                                         'b.weight': ('F8_E4M3', np.ones((0, 4))), 'b.weight_scale': ('F32', np.ones((2, 1)))})
    logs = Logs(tmp_path)
    assert named(logs)['a.weight'].load().shape == (0, 4) and 'b.weight: ' in logs.skipped[0][1]
