"""The reader of torch.save's files: both layouts, all types, without torch; damaged and hostile files are refused."""
import os
import pickle
import resource
import struct
import sys
import zipfile

import numpy as np
import pytest

from pyops.inspect.checks import Refused
from pyops.inspect.logs import LogError, Logs
from pyops.inspect.readers import list_tensors, read

NAME = '20250908_092156_0001_linear_L0_forward_fp32_input'


def samples(torch):
    """Return {key: tensor}: every type and layout that the reader accepts."""
    base = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    types = {str(dtype).removeprefix('torch.'): (4 * base).to(dtype) for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)}
    types |= {str(dtype).removeprefix('torch.'): base.abs().to(dtype) for dtype in (torch.uint8, torch.float8_e8m0fnu)}
    return types | {'transposed': base.t(), 'window': base[1:4, 2:], 'expanded': base[:, :1].expand(6, 7), 'scalar': base[2, 3],
                    'whole_expanded': torch.tensor(2.5).expand(300, 40), 'empty': base[:0], 'same': base,
                    'parameter': torch.nn.Parameter(base), 'five': base.reshape(1, 2, 3, 5, 1),
                    'negative': torch._neg_view(base)}


@pytest.mark.parametrize('is_zip', [True, False])
def test_every_type_and_layout_is_read_without_torch(tmp_path, torch, monkeypatch, is_zip):
    tensors = samples(torch)
    path = tmp_path / f'{NAME}.pt'
    torch.save(tensors, path, _use_new_zipfile_serialization=is_zip)
    monkeypatch.setitem(sys.modules, 'torch', None)                     # import torch raises ImportError
    found = {key: (shape, dtype) for key, shape, dtype, _ in list_tensors(str(path))}
    assert found == {key: (tuple(tensor.shape), str(tensor.dtype).removeprefix('torch.')) for key, tensor in tensors.items()}
    for key, tensor in tensors.items():
        array = read(str(path), key)
        assert array.dtype == np.float32 and array.flags.c_contiguous
        assert np.array_equal(array, tensor.detach().resolve_neg().float().numpy(), equal_nan=True), key


@pytest.mark.parametrize('is_zip', [True, False])
def test_pairs_of_4_bits_are_two_numbers(tmp_path, torch, monkeypatch, is_zip):
    if not hasattr(torch, 'float4_e2m1fn_x2'):
        pytest.skip('this PyTorch has no float4_e2m1fn_x2: pip install torch>=2.8')
    codes = np.random.default_rng(0).permutation(256).astype(np.uint8).reshape(4, 8, 8)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    want = values[np.stack([codes & 15, codes >> 4], -1)].reshape(4, 8, 16)
    saved = torch.from_numpy(codes).view(torch.float4_e2m1fn_x2)
    path = tmp_path / f'{NAME}.pt'
    tensors = {'whole': saved, 'turned': saved.transpose(1, 2), 'row': saved[1, 2]}
    torch.save(tensors, path, _use_new_zipfile_serialization=is_zip)
    monkeypatch.setitem(sys.modules, 'torch', None)
    assert {key: (shape, dtype) for key, shape, dtype, _ in list_tensors(str(path))} == {
        'whole': ((4, 8, 16), 'float4_e2m1fn'), 'turned': ((4, 16, 8), 'float4_e2m1fn'), 'row': ((16,), 'float4_e2m1fn')}
    for key, array in ('whole', want), ('turned', want.transpose(0, 2, 1)), ('row', want[1, 2]):
        got = read(str(path), key)
        assert np.array_equal(got, array) and got.dtype == np.float32 and got.flags.c_contiguous
        assert np.array_equal(np.signbit(got), np.signbit(array))
    entry, = (entry for entry in Logs(tmp_path).entries if entry.key == 'whole')
    assert np.array_equal(entry.load(), want)


def test_codes_of_8_bits_have_the_values_of_ml_dtypes(tmp_path):
    ml_dtypes = pytest.importorskip('ml_dtypes', reason='ml_dtypes is not installed: pip install ml_dtypes')
    import json
    for name, kind in (('F8_E4M3', 'float8_e4m3fn'), ('F8_E5M2', 'float8_e5m2'), ('F8_E4M3FNUZ', 'float8_e4m3fnuz'),
                       ('F8_E5M2FNUZ', 'float8_e5m2fnuz'), ('F8_E8M0', 'float8_e8m0fnu')):
        header = json.dumps({'tensor': {'dtype': name, 'shape': [256], 'data_offsets': [0, 256]}}).encode()
        path = tmp_path / f'{kind}.safetensors'
        path.write_bytes(len(header).to_bytes(8, 'little') + header + bytes(range(256)))
        expected = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, kind)).astype(np.float32)
        assert np.array_equal(read(str(path), 'tensor'), expected, equal_nan=True), name


def test_containers_of_any_kind_are_searched(tmp_path, torch):
    ones = torch.ones(2, 3)
    layer = torch.nn.Linear(3, 2)
    files = {'list.pth': [ones, 2 * ones], 'model.bin': layer.state_dict(), 'nested.pt': {'a': {'b': (ones,)}, 'text': 'c'},
             'alone.pt': ones, 'mixed.pt': {'x': ones, 'sparse': ones.to_sparse(), 'complex': ones.to(torch.complex64)}}
    for name, value in files.items():
        torch.save(value, tmp_path / name)
        torch.save(value, tmp_path / f'old_{name}', _use_new_zipfile_serialization=False)
    logs = Logs(tmp_path)
    assert logs.skipped == [(file, reason) for file in ('mixed.pt', 'old_mixed.pt') for reason in (
        'a sparse, quantized or meta tensor; expected a dense one',
        'complex: a tensor of complex64: expected floating-point numbers of 64 to 8 bits, integers or bool')]
    keys = {}
    for entry in logs.entries:
        keys.setdefault(entry.file, []).append(entry.key)
        assert entry.load().shape == entry.shape
    for name, expected in {'list.pth': ['0', '1'], 'model.bin': ['weight', 'bias'], 'nested.pt': ['a.b.0'], 'alone.pt': [''],
                           'mixed.pt': ['x']}.items():
        assert sorted(keys[name]) == sorted(keys[f'old_{name}']) == sorted(expected), name
    weight = next(entry for entry in logs.entries if (entry.file, entry.key) == ('model.bin', 'weight'))
    assert np.array_equal(weight.load(), layer.weight.detach().numpy())


def test_a_flipped_byte_in_a_zip_file_is_found(tmp_path, torch):
    path = tmp_path / f'{NAME}.pt'
    torch.save({'tensor': torch.arange(1000.0)}, path)
    data = path.read_bytes()
    at = data.index(struct.pack('<f', 500.0))
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1:])
    entry, = Logs(tmp_path).entries
    with pytest.raises(LogError, match='damaged: the checksum of the record data/0 differs'):
        entry.load()


class Attack:
    def __reduce__(self):
        return os.mkdir, ('/tmp/never',)


def pickled(*opcodes):
    """Return the bytes of the older layout, with these opcodes as the pickle of the object."""
    head = b''.join(pickle.dumps(value, 2) for value in (0x1950a86a20f9469cfc6c, 1001, {'little_endian': True}))
    return head + b'\x80\x02' + b''.join(opcodes) + b'.' + pickle.dumps([], 2)


def test_hostile_pickles_are_refused_without_effect_and_without_memory(tmp_path, torch):
    deep = b'(' * 50_000 + b't' * 50_000                                    # a tuple nested 50,000 times
    laughs = b']q\0' + b''.join(b']' + b'h' + bytes([i]) * 1 + b'a' + (b'h' + bytes([i]) + b'a') * 9 + b'q' + bytes([i + 1])
                                for i in range(20))                         # 10^20 lists by references
    hostile = {
        'call': b'cos\nmkdir\n(X\x0a\0\0\0/tmp/nevertR', 'import': b'cos\nsystem\n', 'stack': b'\x8c\x02os\x8c\x05mkdir\x93',
        'instance': b'(i__main__\nAttack\n', 'object': b'cos\nmkdir\n)\x81',
        'default': b'ctorch._utils\n_rebuild_tensor_v2\n}b',
        'long text': b'\x8d' + (1 << 60).to_bytes(8, 'little'), 'long bytes': b'\x96' + (1 << 40).to_bytes(8, 'little'),
        'memo': b'Nr\xff\xff\xff\xff0', 'key': b'}' + deep + b'Ns', 'laughs': laughs, 'pop': b'0' * 3, 'no mark': b't',
        'huge tensor': b'', 'extension': b'\x82\x01', 'persistent': b'Pabc\n', 'digits': b'I' + b'9' * 100_000 + b'\n'}
    storage = torch.ones(4)
    torch.save(storage, tmp_path / 'good.pt', _use_new_zipfile_serialization=False)
    good = (tmp_path / 'good.pt').read_bytes()
    for name, opcodes in hostile.items():
        (tmp_path / f'{name}.pt').write_bytes(pickled(opcodes))
    (tmp_path / 'huge tensor.pt').write_bytes(good.replace(b'K\x04\x85', b'J\xff\xff\xff\x7f\x85'))
    (tmp_path / 'cut.pt').write_bytes(good[:-3])
    (tmp_path / 'object in dict.pt').write_bytes(pickle.dumps({'tensor': Attack()}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    logs = Logs(tmp_path)
    assert [entry.file for entry in logs.entries if _loads(entry)] == ['good.pt']
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10           # KiB
    assert not os.path.exists('/tmp/never')
    assert {file for file, _ in logs.skipped} >= {f'{name}.pt' for name in hostile if name != 'huge tensor'}
    assert all(reason.isprintable() and len(reason) < 200 for _, reason in logs.skipped)


def _loads(entry):
    try:
        entry.load()
    except LogError:
        return False
    return True


def test_a_record_of_the_zip_cannot_claim_more_bytes_than_the_file(tmp_path, torch):
    torch.save(torch.ones(1000), tmp_path / 'a.pt')
    with zipfile.ZipFile(tmp_path / 'a.pt') as reader, zipfile.ZipFile(tmp_path / 'b.pt', 'w') as writer:
        for record in reader.infolist():
            if not record.filename.endswith('data/0'):
                writer.writestr(record.filename, reader.read(record))
    assert list_tensors(str(tmp_path / 'b.pt'))[0][1] == (1000,)
    with pytest.raises(Refused, match='truncated: a storage is missing'):
        read(str(tmp_path / 'b.pt'), '')


@pytest.mark.parametrize('values, old, new, problem', [
    (np.arange(6.0), b'\x80\x02]q', pickle.dumps([], 2) + b'\x80\x02]q', 'truncated: a storage is missing'),
    (np.empty((0, 3, 1)), b'K\0K\x03K\x01\x87', b'(K\0' + 2 * (b'\x8a\x06' + (1 << 40).to_bytes(6, 'little')) + b't',
     'a tensor of shape'),
    (np.arange(3, dtype=np.uint8), b')Rq\tt', b')Rq\tctorch\nfloat32\nt', 'a storage of 3 bytes, which are no whole elements')],
    ids=['order', 'empty', 'bytes'])
def test_a_storage_that_does_not_suit_its_tensor_is_refused(tmp_path, torch, values, old, new, problem):
    path = tmp_path / 'a.pt'
    torch.save(torch.from_numpy(values), path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    assert data.count(old) == 1
    function = b'_rebuild_tensor_v3' if b'float32' in new else b'_rebuild_tensor_v2'
    path.write_bytes(data.replace(old, new).replace(b'_rebuild_tensor_v2', function))
    with pytest.raises(Refused, match=problem):
        read(str(path), list_tensors(str(path))[0][0])
