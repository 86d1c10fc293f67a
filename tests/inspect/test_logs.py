"""The reader of saved tensors: complete dumps, and untrusted files: only their safe parts are read."""
import dataclasses
import json
import os
import pickle
import random
import resource
import zipfile

import numpy as np
import pytest
from dumps import make_dump, make_megatron_dump
from safetensors.numpy import save_file

from pyops.__main__ import main
from pyops.errors import UserError, printable
from pyops.inspect.logs import LogError, Logs, curves, places
from pyops.inspect.writer import Writer

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def saved(folder, name='20250908_092156_0001_linear_L0_forward_fp32_input.safetensors', array=X):
    """Save a valid tensor, which must be found among invalid files, and return its file name."""
    save_file({'tensor': array}, os.path.join(folder, name))
    return name


def lines_of(folder):
    return [json.loads(line) for line in (folder / 'manifest.jsonl').read_text().splitlines()]


def reason_of(logs, file):
    return dict(logs.skipped)[file]


# ---- dumps of pyops ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('as_', ['safetensors', 'pt'])
def test_a_dump_is_read_bit_for_bit_with_or_without_its_manifest(tmp_path, as_, request):
    if as_ == 'pt':
        request.getfixturevalue('torch')
    arrays = make_dump(tmp_path, steps=(0, 3), formats=('fp32', 'mxfp8:scale=rceil'), as_=as_)
    logs = Logs(tmp_path)
    assert logs.skipped == [] and {entry.file for entry in logs.entries} == arrays.keys()
    assert [(entry.step, entry.counter) for entry in logs.entries] == sorted((e.step, e.counter) for e in logs.entries)
    assert {entry.origin for entry in logs.entries} == {'pyops'} and logs.run['settings']['quant'] == 'mxfp8:scale=rceil'
    assert [step['step'] for step in logs.steps] == [0, 1, 2, 3] * 2 and logs.steps[0]['loss'] == 7
    for entry in logs.entries:
        array = entry.load()
        assert array.dtype == np.float32 and array.flags.c_contiguous and np.array_equal(array, arrays[entry.file])
    os.unlink(tmp_path / 'manifest.jsonl')
    assert {bare(entry) for entry in Logs(tmp_path).entries} == {bare(entry) for entry in logs.entries}


def bare(entry):
    return dataclasses.replace(entry, run=0, training=0)


def test_an_entry_has_the_fields_of_its_manifest_line(tmp_path):
    make_dump(tmp_path, steps=(10,), formats=('mxfp8:scale=rceil',))
    logs = Logs(tmp_path)
    line = next(line for line in lines_of(tmp_path) if line.get('name') == 'value')
    entry = next(entry for entry in logs.entries if entry.name == 'value')
    for key in ('file', 'counter', 'layer', 'layer_type', 'index', 'operation', 'step', 'format', 'options', 'axis', 'dtype',
                'statistics'):
        assert getattr(entry, key) == line[key], key
    assert entry.shape == (5, 3, 2, 8) and entry.axis == 0 and entry.time is None and entry.key == 'tensor'
    assert str(entry.fmt) == 'mxfp8:scale=rceil' and next(e for e in logs.entries if e.name == 'bias').fmt is None
    assert entry.title == 'encoder.0.self_attention forward value, step 10, mxfp8'
    assert len({entry.stem for entry in logs.entries}) == len(logs.entries) and entry.stem + '.safetensors' == entry.file


def test_masks_are_true_where_there_is_a_word(tmp_path):
    make_dump(tmp_path, steps=(0,))
    logs = Logs(tmp_path)
    keep = np.arange(5)[:, None] < [4, 5, 2]
    by_name = {(entry.layer_type, entry.name): entry for entry in logs.entries}
    assert logs.mask(by_name['linear', 'weight']) is None
    assert np.array_equal(logs.mask(by_name['linear', 'input']), keep[:, :, None])
    assert np.array_equal(logs.mask(by_name['attention', 'query']), keep[:, :, None, None])
    assert np.array_equal(logs.mask(by_name['attention', 'weights'])[:, 0], keep.T[:, :, None] & keep.T[:, None, :])
    assert logs.tokens(by_name['attention', 'weights'], 0) == (['he', 'is', 'sleeping', '<eos>', ''],) * 2
    assert logs.tokens(by_name['attention', 'weights'], 3) is None and logs.tokens(by_name['linear', 'input'], 0) is None


def test_masks_of_two_sides_and_of_one_time_step(tmp_path):
    cross = np.zeros((2, 1, 4, 3), np.float32)
    line = {'kind': 'tensor', 'counter': 1, 'layer': 'decoder.0.attention', 'layer_type': 'attention', 'index': 0,
            'operation': 'forward', 'name': 'weights', 'step': 0, 'format': 'fp32', 'shape': [2, 1, 4, 3],
            'mask': [{'time': 2, 'batch': 0, 'of': 'target'}, {'time': 3, 'batch': 0, 'of': 'source'}],
            'file': saved(tmp_path, '20250908_092156_0001_attention_L0_forward_fp32_weights.safetensors', cross)}
    gru = {**line, 'layer_type': 'linear', 'name': 'input', 'time': 2, 'shape': [2, 5],
           'mask': [{'time': None, 'batch': 0, 'of': 'source'}],
           'file': saved(tmp_path, '20250908_092156_0002_linear_L0_forward_fp32_input_t2.safetensors', np.ones((2, 5), 'f4'))}
    batch = {'kind': 'batch', 'step': 0, 'lengths': {'source': [3, 2], 'target': [1, 4]},
             'tokens': {'source': [['a', 'b', 'c'], ['d', 'e']], 'target': [['x'], ['p', 'q', 'r', 's']]}}
    write_manifest(tmp_path, batch, line, gru)
    logs = Logs(tmp_path)
    weights, step = logs.entries
    assert logs.mask(weights)[0, 0].tolist() == [[True] * 3] + [[False] * 3] * 3
    assert logs.mask(weights)[1, 0].tolist() == [[True, True, False]] * 4
    assert logs.tokens(weights, 0) == (['x', '', '', ''], ['a', 'b', 'c'])
    assert logs.mask(step).tolist() == [[True], [False]] and step.title.endswith('step 0, t 2')
    write_manifest(tmp_path, line)                      # without the batch line the padding is unknown
    with pytest.raises(LogError, match='no lengths of the 2 target sentences at step 0'):
        logs = Logs(tmp_path)
        logs.mask(logs.entries[0])
    assert logs.tokens(logs.entries[0], 0) is None


def write_manifest(folder, *lines):
    (folder / 'manifest.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


def test_refresh_reads_what_was_added_and_half_a_line_when_it_is_whole(tmp_path):
    source, live = tmp_path / 'source', tmp_path / 'live'
    arrays = make_dump(source, steps=(0, 1))
    live.mkdir()
    with pytest.raises(UserError, match='contains no saved tensor .it is empty.'):
        Logs(live)
    logs = Logs(live, empty=True)
    assert logs.refresh() == [] and logs.entries == []
    text = (source / 'manifest.jsonl').read_bytes()
    seen = []
    for start in range(0, len(text), 3001):             # pieces that end within a line
        for line in text[start:start + 3001].split(b'\n'):
            for file in [json.loads(line)['file']] if line.startswith(b'{"kind": "tensor"') and line.endswith(b'}') else []:
                os.link(source / file, live / file)
        with open(live / 'manifest.jsonl', 'ab') as file:
            file.write(text[start:start + 3001])
        seen += logs.refresh()
    for file in arrays.keys() - {entry.file for entry in seen}:         # files whose lines were split
        os.link(source / file, live / file)
    seen += logs.refresh()
    assert sorted(entry.file for entry in seen) == sorted(arrays) and logs.refresh() == [] and logs.skipped == []
    assert [entry.file for entry in logs.entries] == [entry.file for entry in Logs(source).entries]
    assert len(logs.steps) == 2


def test_thousands_of_files_are_listed_without_being_opened(tmp_path):
    name, lines = '20250908_092156_{:04d}_linear_L0_forward_fp32_input.safetensors', []
    make_dump(tmp_path, steps=(0,), layers=('encoder.0.self_attention.q',))
    line = next(line for line in lines_of(tmp_path) if line.get('name') == 'input')
    for i in range(1000, 4000):
        lines.append({**line, 'file': name.format(i), 'counter': i})
        os.mknod(tmp_path / name.format(i))
        os.truncate(tmp_path / name.format(i), 4096)
    write_manifest(tmp_path, *lines)
    logs = Logs(tmp_path)
    assert len(logs.entries) == 3000 + 8 and logs.skipped == []
    with pytest.raises(LogError, match='_1000_.*truncated|_1000_.*JSON'):
        next(entry for entry in logs.entries if entry.counter == 1000).load()


# ---- dumps of other programs ---------------------------------------------------------------------------------------

def test_names_of_other_programs_are_read(tmp_path):
    for name in ('0001_attention_L0_forward_hifp8_query', '0010_linear_L1_backward_hifp8_output',
                 '0011_attention_L2_forward_pre_FA_mxfp8_value', '0012_linear_forward_bfloat16_input_t3'):
        np.save(tmp_path / f'20250908_092156_{name}.npy', X)
    np.save(tmp_path / 'my weight.npy', X)
    np.save(tmp_path / 'grads.npy', X)
    logs = Logs(tmp_path)
    assert logs.skipped == [] and all(np.array_equal(entry.load(), X) and entry.origin == 'file' for entry in logs.entries)
    found = [(entry.layer, entry.layer_type, entry.index, entry.operation, entry.format, entry.name, entry.time, entry.counter)
             for entry in logs.entries]
    assert found == [('grads', 'other', 0, 'backward', 'fp32', 'grads', None, 0),
                     ('my weight', 'other', 0, 'forward', 'fp32', 'my weight', None, 0),
                     ('attention_L0', 'attention', 0, 'forward', 'hifp8', 'query', None, 1),
                     ('linear_L1', 'linear', 1, 'backward', 'hifp8', 'output', None, 10),
                     ('attention_L2', 'attention', 2, 'forward', 'mxfp8', 'value', None, 11),
                     ('linear', 'linear', 0, 'forward', 'bf16', 'input', 3, 12)]
    assert logs.entries[0].timestamp == '' and logs.entries[2].timestamp == '20250908_092156'
    assert logs.entries[4].axis == 0 and logs.entries[1].stem.startswith('my_weight-')


def test_dumps_of_transformer_engine_are_read_and_their_products_compared(tmp_path, torch, capsys):
    """Files as DumpTensors writes them, with the types of two ranks: {high_precision: tensor, and parts of the rounded one}."""
    normal, arrays = np.random.default_rng(0).standard_normal, {}
    for rank in range(2):
        folder = tmp_path / 'tensor_dumps' / f'rank_{rank}'
        folder.mkdir(parents=True)
        for name, shape in (('activation', (32, 64)), ('weight', (96, 64)), ('gradient', (32, 96)), ('output', (32, 96)),
                            ('dgrad', (32, 64)), ('wgrad', (96, 64))):
            arrays[rank, name] = normal(shape).astype('f')
            torch.save({'high_precision': torch.from_numpy(arrays[rank, name]).bfloat16(),
                        'scale_inv': torch.ones(1)}, folder / f'decoder.layers.1.mlp.fc1_{name}_iter_000120.pt')
    logs = Logs(tmp_path / 'tensor_dumps')
    assert logs.skipped == [] and len(logs.entries) == 24
    whole = {(entry.rank, entry.operation, entry.name): entry for entry in logs.entries if 'scale_inv' not in entry.name}
    assert {(entry.layer, entry.layer_type, entry.step) for entry in logs.entries} == {
        ('decoder.layers.1.mlp.fc1', 'linear', 120)}
    for rank in range(2):
        for theirs, ours in (('activation', ('forward', 'input')), ('weight', ('forward', 'weight')),
                             ('output', ('forward', 'output')), ('gradient', ('backward', 'grad_output')),
                             ('dgrad', ('backward', 'grad_input')), ('wgrad', ('backward', 'grad_weight'))):
            error = np.abs(whole.pop((rank, *ours)).load() - arrays[rank, theirs])
            assert error.max() <= 2 ** -8 * np.abs(arrays[rank, theirs]).max()
    assert not whole
    with pytest.raises(SystemExit) as left:
        main(['inspect', 'products', str(tmp_path / 'tensor_dumps'), '--formats', 'none,mxfp8', '--json'])
    found = json.loads(capsys.readouterr().out)
    assert not left.value.code and {row['product'] for row in found['products']} == {'fwd', 'dgrad', 'wgrad'}
    with pytest.raises(SystemExit):
        main(['inspect', 'products', str(tmp_path / 'tensor_dumps'), '--formats', 'mxfp8'])
    assert {line.partition('rank_')[2] for line in capsys.readouterr().out.splitlines() if 'rank' in line} == {
        f'{rank}/decoder.layers.1.mlp.fc1 {product}' for rank in range(2) for product in ('fwd', 'dgrad', 'wgrad')}
    assert set(places(logs.entries)) == {'rank_0', 'rank_1'}
    assert all(f'rank {entry.rank}' in entry.title for entry in logs.entries)


@pytest.mark.parametrize('naming', ['te', 'megatron'])
def test_exported_tensors_are_read_as_dumps_of_other_programs(tmp_path, torch, capsys, naming):
    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(['inspect', 'export', *map(str, arguments)])
        return left.value.code or 0, *capsys.readouterr()
    make_dump(tmp_path / 'logs', steps=(0, 120), formats=('mxfp8',))
    status, out, err = run(tmp_path / 'logs', tmp_path / 'out', '--naming', naming)
    source, found = Logs(tmp_path / 'logs').entries, Logs(tmp_path / 'out')
    if naming == 'te':
        wanted = [entry for entry in source if entry.layer_type == 'linear' and entry.name not in ('bias', 'grad_bias')]
        keys = [(entry.layer, entry.operation, entry.name, entry.step) for entry in wanted]
        got = {(entry.layer, entry.operation, entry.name, entry.step): entry for entry in found.entries}
        assert all(entry.relative_path.startswith('rank_0/') and entry.rank == 0 for entry in found.entries)
        assert err.count('TransformerEngine has names only for tensors of linear layers') == 5
    else:
        wanted = source
        keys = [(entry.layer_type, entry.index, entry.operation, entry.name, entry.step, entry.format) for entry in wanted]
        got = {(entry.layer_type, entry.index, entry.operation, entry.name, entry.step, entry.format): entry
               for entry in found.entries}
        assert err == ''
    assert status == 0 and f'{len(wanted)} of 50 tensors written to ' in out and found.skipped == []
    assert len(wanted) == len(found.entries) == len(got) > 10
    for key, entry in zip(keys, wanted, strict=True):
        assert np.array_equal(got[key].load(), entry.load()), key
    status, out, err = run(tmp_path / 'logs', tmp_path / 'out', '--naming', naming)
    assert status == 2 and err.count('\n') == 1 and 'exists; name another folder, or remove it' in err
    for arguments, want in ((('logs', 'logs/x'), 'is in the folder of the tensors'),
                            (('nowhere', 'o'), 'nowhere: no such folder'),
                            (('logs', 'o', '--names', 'no'), 'no: matches no saved tensor')):
        status, out, err = run(*(tmp_path / one if one[0] != '-' and one != 'no' else one for one in arguments))
        assert status == 2 and err.count('\n') == 1 and want in err


def test_tensors_of_a_checkpoint_in_several_files_have_the_layers_of_its_names(tmp_path):
    names = 'model.layers.0.q_proj.weight', 'model.layers.0.q_proj.bias', 'model.norm.weight', 'scale'
    for number, part in enumerate((names[:2], names[2:]), 1):
        save_file({name: X + number for name in part}, tmp_path / f'model-{number:05}-of-00002.safetensors')
    (tmp_path / 'model.safetensors.index.json').write_text('{}')
    logs = Logs(tmp_path)
    assert {(entry.layer, entry.name) for entry in logs.entries} == {
        ('model.layers.0.q_proj', 'weight'), ('model.layers.0.q_proj', 'bias'), ('model.norm', 'weight'),
        ('model-00002-of-00002', 'scale')}
    assert not logs.skipped             # the index belongs to them
    assert all(np.array_equal(entry.load(), X + int(entry.file[6:11])) for entry in logs.entries)


def test_files_of_torch_save_are_read(tmp_path, torch):
    name = '20250908_092156_{:04d}_linear_L1_backward_hifp8_{}.pt'
    t = torch.from_numpy(X)
    torch.save(t, tmp_path / name.format(1, 'bare'))
    torch.save({'tensor': t.half(), 'pyops': None}, tmp_path / name.format(2, 'one'))
    torch.save({'a': t.double(), 'b': t.bfloat16().t(), 'c': t.int(), 'd': 'text'}, tmp_path / name.format(3, 'several'))
    torch.save(torch.nn.Parameter(t[:, :2]), tmp_path / os.fsdecode(b'a\xff b.pt'))
    torch.save({'tensor': t, 'tensor_info': {'shape': [3, 4]}, 'metadata': {     # as a fork of Megatron writes them
        'layer_type': 'attention', 'operation': 'forward', 'quant_type': 'mxfp4', 'tensor_name': 'key', 'layer_idx': 7,
        'phase': 'pre', 'component': 'FA', 'iteration': 20}}, tmp_path / 'whatever.pt')
    logs = Logs(tmp_path)
    assert logs.skipped == []
    found = {entry.name: entry for entry in logs.entries}
    assert sorted(found) == ['a\udcff b', 'bare', 'key', 'one', 'several.a', 'several.b', 'several.c']
    for name, entry in found.items():
        expected = X[:, :2] if 'ff b' in entry.title else X.T if name == 'several.b' else X         # several.c: integers
        assert np.array_equal(entry.load(), expected) and entry.shape == expected.shape
        assert entry.title.isprintable()
    assert [found[name].dtype for name in ('bare', 'one', 'several.a', 'several.b')] == \
        ['float32', 'float16', 'float64', 'bfloat16']
    key = found['key']
    assert (key.layer, key.operation, key.format, key.index, key.step) == ('attention_L7', 'forward', 'mxfp4', 7, 20)
    assert len({entry.stem for entry in logs.entries}) == 7 and all(entry.stem.isascii() for entry in logs.entries)


@pytest.mark.parametrize(('is_zip', 'metadata'), [(False, True), (True, True), (False, False)])
def test_a_dump_of_megatron_keeps_rank_sample_phase_component_and_group(tmp_path, torch, is_zip, metadata):
    arrays = make_megatron_dump(tmp_path, is_zip=is_zip, metadata=metadata)
    logs = Logs(tmp_path)
    assert logs.skipped == [] and len(logs.entries) == len(arrays) == 64
    for entry in logs.entries:
        assert np.array_equal(entry.load(), arrays[entry.file])
        for part in (f'iter{entry.step:03d}', f'_{entry.phase}_{entry.component}_', f'rank{entry.rank:02d}',
                     f'sample{entry.sample:03d}', f'group{entry.group:03d}_{entry.name}.pt'):
            assert part in entry.file
        assert (entry.layer, entry.operation, entry.format) == (f'{entry.layer_type}_L1', 'forward', 'mxfp8')
        assert entry.is_weights == (entry.name == 'attention_weights')
    assert len({entry.title for entry in logs.entries}) == 64
    first = logs.entries[0]
    assert first.title == 'attention_L1 forward query, step 0, pre FA, rank 0, sample 0, group 0, mxfp8'
    assert first.place == 'pre FA, rank 0, sample 0, group 0'
    assert places(logs.entries)[0] == 'pre FA, rank 0, sample 0'                    # the group is the same everywhere
    some = [entry for entry in logs.entries if entry.rank == 1 and entry.sample == 0]
    assert set(places(some)) == {'pre FA', 'post FA', 'pre linear', 'post linear'}


def test_an_array_without_axes_is_written_and_read(tmp_path):
    with Writer(tmp_path) as writer:
        writer.tensor(np.float32(3), layer='a', layer_type='linear', index=0, operation='forward', name='input', step=0)
    entry, = Logs(tmp_path).entries
    assert entry.shape == () and entry.load() == 3


def test_several_trainings_in_one_folder_are_separate_and_a_resumed_run_continues_its_own(tmp_path, capsys):
    line = {'kind': 'tensor', 'counter': 1, 'layer': 'a', 'layer_type': 'linear', 'index': 0, 'operation': 'forward',
            'name': 'input', 'format': 'fp32', 'shape': [3, 4]}
    lines = []
    for run, steps in enumerate((range(3), range(3, 6), range(4))):         # a run, its continuation, another run
        lines.append({'kind': 'run', 'version': 1, 'program': 'p'})
        for step in steps:
            name = f'20250908_09215{run}_{step:04d}_linear_L0_forward_fp32_input.safetensors'
            lines += [{**line, 'step': step, 'file': saved(tmp_path, name)}, {'kind': 'step', 'step': step, 'loss': 1.0 + run}]
    write_manifest(tmp_path, *lines)
    logs = Logs(tmp_path)
    found = curves(logs.steps)
    assert {name: [step['step'] for step in steps] for name, steps in found.items()} == {
        'run 1': [0, 1, 2, 3, 4, 5], 'run 2': [0, 1, 2, 3]}
    assert {(entry.run, entry.training) for entry in logs.entries} == {(0, 0), (1, 0), (2, 1)}
    assert dict(zip([entry.training for entry in logs.entries], places(logs.entries), strict=True)) == {0: 'run 1', 1: 'run 2'}
    with pytest.raises(SystemExit, match='^0$'):
        main(['inspect', 'compare', str(tmp_path), '--formats', 'mxfp4'])
    table, total = capsys.readouterr().out.split('\n\n')[1:]
    names = sorted(line.split('  ')[-1] for line in table.splitlines()[1:])
    assert names == 6 * ['a input, run 1'] + 4 * ['a input, run 2']
    assert 'a input, run 1, step ' in total


def test_floating_point_and_integer_dtypes_are_widened_and_others_refused(tmp_path):
    header = {'half': {'dtype': 'F16', 'shape': [2], 'data_offsets': [0, 4]},
              'brain': {'dtype': 'BF16', 'shape': [2], 'data_offsets': [4, 8]},
              'double': {'dtype': 'F64', 'shape': [2], 'data_offsets': [8, 24]},
              'whole': {'dtype': 'I32', 'shape': [1], 'data_offsets': [24, 28]}}
    values = np.array([1.5, -2.25])
    raw = values.astype('<f2').tobytes() + (values.astype('<f4').view('<u4') >> 16).astype('<u2').tobytes() + \
        np.array([1e300, 0.1]).tobytes() + bytes(4)
    write_safetensors(tmp_path / 'kinds.safetensors', header, raw)
    np.save(tmp_path / 'big-endian.npy', values.astype('>f4'))
    np.save(tmp_path / 'whole.npy', np.arange(3))
    np.save(tmp_path / 'truth.npy', np.ones(3, bool))
    np.save(tmp_path / 'complex.npy', np.ones(3, complex))
    write_safetensors(tmp_path / 'all_whole.safetensors', {'a': {'dtype': 'I8', 'shape': [1], 'data_offsets': [0, 1]}}, b'1')
    logs = Logs(tmp_path)
    found = {entry.name: entry for entry in logs.entries}
    assert sorted(found) == ['a', 'big-endian', 'brain', 'double', 'half', 'truth', 'whole']
    for name in ('half', 'brain', 'big-endian'):
        assert np.array_equal(found[name].load(), values) and found[name].load().dtype == np.float32
    assert found['double'].load().tolist() == [np.inf, np.float32(0.1)] and found['double'].dtype == 'float64'
    assert found['whole'].load().tolist() == [0, 1, 2] and found['whole'].dtype == 'int64'
    assert found['truth'].load().tolist() == [1, 1, 1] and found['a'].load().tolist() == [ord('1')]
    assert {file: reason for file, reason in logs.skipped} == {
        'complex.npy': 'a tensor of complex128: expected floating-point numbers of 64 to 8 bits, integers or bool'}


def write_safetensors(path, header, raw):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, 'little') + text + raw)


def test_a_folder_for_each_rank(tmp_path):
    for rank in ('rank 0', 'rank1'):
        make_dump(tmp_path / rank, steps=(0,), seed=len(rank))
    (tmp_path / 'pictures' / 'deeper').mkdir(parents=True)
    (tmp_path / 'pictures' / 'a.png').write_bytes(b'png')
    saved(tmp_path / 'pictures' / 'deeper')                             # two levels deep: not read
    logs = Logs(tmp_path)
    assert len(logs.entries) == 50 and logs.skipped == [] and logs.run
    assert {os.path.dirname(entry.relative_path) for entry in logs.entries} == {'rank 0', 'rank1'}
    assert len({entry.stem for entry in logs.entries}) == 50
    for entry in logs.entries:
        assert entry.load().shape == entry.shape
        assert (logs.mask(entry) is None) == (not entry.mask)           # uses the lengths of the entry's own folder
    assert logs.refresh() == []


# ---- untrusted files -----------------------------------------------------------------------------------------------

def test_an_empty_tensor_with_sizes_that_numpy_refuses_is_damaged(tmp_path):
    write_safetensors(tmp_path / 'a.safetensors', {'a': {'dtype': 'F32', 'shape': [0, 1 << 40, 1 << 40],
                                                         'data_offsets': [0, 0]}}, b'')
    saved(tmp_path, 'b.safetensors')
    logs = Logs(tmp_path)
    assert len(logs.entries) == 1 and reason_of(logs, 'a.safetensors') == 'the header is damaged at a'


def test_a_manifest_is_printed_without_control_characters(tmp_path):
    name = saved(tmp_path)
    line = {'kind': 'tensor', 'counter': 1, 'layer': 'a', 'layer_type': 'linear', 'index': 0, 'operation': 'forward',
            'name': 'input', 'format': 'fp32', 'step': 0, 'file': name}
    write_manifest(tmp_path, {'kind': 'run', 'version': '\x1b[2J' * 100}, {**line, 'shape': [0, 1 << 40, 1 << 40]})
    reasons = [reason for file, reason in Logs(tmp_path).skipped if file.startswith('manifest.jsonl:')]
    assert reasons == ['unsupported version \\x1b[2J\\x1b[2J\\x1b[2; expected at most 1; update pyops',
                       'shape is [0, 1099511627776, 1099511627776]; expected at most 32 axes and less than 2^63 bytes']


class Attack:
    """An object whose pickle creates a directory when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_code_in_a_file_is_never_run(tmp_path, torch):
    folder, proof = tmp_path / 'logs', tmp_path / 'proof'
    folder.mkdir()
    good = saved(folder)
    attack = Attack(proof)
    torch.save({'tensor': torch.ones(3), 'more': attack}, folder / 'zip.pt')
    torch.save(attack, folder / 'old.pt', _use_new_zipfile_serialization=False)
    (folder / 'raw.pt').write_bytes(pickle.dumps(attack))
    (folder / 'raw.npy').write_bytes(pickle.dumps(attack))
    np.save(folder / 'objects.npy', np.array([attack], object), allow_pickle=True)
    line = {'kind': 'tensor', 'counter': 2, 'layer': 'a', 'layer_type': 'linear', 'index': 0, 'operation': 'forward',
            'name': 'input', 'step': 0, 'format': 'fp32', 'shape': [3]}
    torch.save({'tensor': torch.ones(3), 'more': attack}, folder / 'named.pt')
    write_manifest(folder, {**line, 'file': 'named.pt'})                # even if the manifest lists the file
    logs = Logs(folder)
    named, = (entry for entry in logs.entries if entry.file == 'named.pt')
    with pytest.raises(LogError, match='named.pt: contains Python objects, which could run code'):
        named.load()
    assert [entry.file for entry in logs.entries if entry is not named] == [good]
    assert sorted(file for file, _ in logs.skipped) == ['objects.npy', 'old.pt', 'raw.npy', 'raw.pt', 'zip.pt']
    assert 'could run code' in reason_of(logs, 'zip.pt') and not proof.exists()
    pickle.loads(pickle.dumps(attack))
    assert proof.exists(), 'the check is vacuous'


def test_headers_larger_than_their_file_allocate_nothing(tmp_path, torch):
    good = saved(tmp_path)
    for name, shape, offsets in (('huge', [1 << 20, 1 << 20], [0, 1 << 42]), ('negative', [-4, -4], [0, 64]),
                                 ('backwards', [4], [16, 0]), ('truth', [True], [0, 4]), ('axes', [1] * 99, [0, 4])):
        header = {'tensor': {'dtype': 'F32', 'shape': shape, 'data_offsets': offsets}}
        write_safetensors(tmp_path / f'{name}.safetensors', header, bytes(64))
    write_safetensors(tmp_path / 'list.safetensors', {'tensor': [1, 2]}, bytes(64))
    write_safetensors(tmp_path / 'deep.safetensors', b'[' * 100_000, b'')
    write_safetensors(tmp_path / 'noise.safetensors', b'\xff\xfe{', b'')
    (tmp_path / 'long.safetensors').write_bytes((1 << 62).to_bytes(8, 'little') + b'{}')
    (tmp_path / 'short.safetensors').write_bytes(b'123')
    (tmp_path / 'nothing.safetensors').write_bytes(b'')
    (tmp_path / 'nothing.pt').write_bytes(b'')
    (tmp_path / 'nothing.npy').write_bytes(b'')
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1048576, 1048576), }"
    (tmp_path / 'huge.npy').write_bytes(b'\x93NUMPY\x01\x00' + len(header).to_bytes(2, 'little') + header + bytes(64))
    torch.save({'tensor': torch.ones(1000)}, tmp_path / 'whole.pt')
    repack(tmp_path / 'whole.pt', tmp_path / 'huge.pt', zipfile.ZIP_STORED, b'M\xe8\x03', b'J\x00\x00\x00\x70')
    repack(tmp_path / 'whole.pt', tmp_path / 'packed.pt', zipfile.ZIP_DEFLATED)
    torch.save(torch.ones(1).expand(1 << 20, 1 << 20), tmp_path / 'expanded.pt')
    (tmp_path / 'cut.pt').write_bytes((tmp_path / 'whole.pt').read_bytes()[:3000])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    logs = Logs(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10           # KiB
    assert {entry.file for entry in logs.entries} == {good, 'whole.pt'}
    skipped = dict(logs.skipped)
    assert skipped.keys() == set(os.listdir(tmp_path)) - {good, 'whole.pt'}
    assert all(reason and '\n' not in reason and len(reason) < 200 for reason in skipped.values())
    assert 'truncated' in skipped['huge.safetensors'] and 'a file of' in skipped['expanded.pt']


def repack(source, target, compression, old=b'', new=b''):
    """Rewrite a file of torch.save with another compression, or with `new` in place of `old` in its pickle."""
    with zipfile.ZipFile(source) as reader, zipfile.ZipFile(target, 'w', compression) as writer:
        for record in reader.infolist():
            data = reader.read(record)
            if old and record.filename.endswith('data.pkl'):
                assert old in data
                data = new.join(data.rsplit(old, 1))
            writer.writestr(record.filename, data)


def test_files_with_changed_bytes_cause_no_other_error_than_logerror(tmp_path, torch):
    """A few wrong bytes cause a LogError or an item of `skipped`; a tensor that can be read has the listed shape."""
    blobs, rng = {}, random.Random(0)
    for as_ in 'safetensors', 'pt':
        make_dump(tmp_path / as_, steps=(0,), layers=('encoder.0.self_attention.q',), as_=as_)
        blobs |= {path.name: path.read_bytes() for path in sorted((tmp_path / as_).iterdir())}
    np.save(tmp_path / 'x.npy', X)
    blobs['x.npy'] = (tmp_path / 'x.npy').read_bytes()
    outcomes = {'loaded': 0, 'refused': 0, 'skipped': 0}
    for trial in range(150):
        folder = tmp_path / str(trial)
        folder.mkdir()
        (folder / 'good.npy').write_bytes(blobs['x.npy'])
        for name in {*rng.sample(sorted(blobs), 4), 'manifest.jsonl'}:
            data = bytearray(blobs[name])
            for _ in range(rng.choice((0, 1, 3, 20))):
                at = rng.randrange(rng.choice((len(data), min(len(data), 1000))))
                length, new = rng.choice((0, 1, 1, 9)), rng.choice((b'9', b'-', b'[', b'"', b'null', b'\0', b'\xff', b''))
                data[at:at + length] = new
            (folder / name).write_bytes(data)
        logs = Logs(folder)
        logs.refresh()
        for entry in logs.entries:
            try:
                x, mask = entry.load(), logs.mask(entry)
                assert x.dtype == np.float32 and x.shape == entry.shape and entry.title.isprintable()
                assert mask is None or np.broadcast_to(mask, x.shape).any() in (True, False)
                logs.tokens(entry, 0)
                outcomes['loaded'] += 1
            except LogError:
                outcomes['refused'] += 1
        assert all(file.isprintable() and reason.isprintable() for file, reason in logs.skipped)
        outcomes['skipped'] += len(logs.skipped)
        assert 'good.npy' in {entry.file for entry in logs.entries}
    assert min(outcomes.values()) > 50, outcomes


def test_invalid_manifest_lines_are_refused_and_the_others_read(tmp_path):
    good = saved(tmp_path)
    line = {'kind': 'tensor', 'counter': 1, 'layer': 'a', 'layer_type': 'linear', 'index': 0, 'operation': 'forward',
            'name': 'input', 'step': 0, 'format': 'fp32', 'shape': [3, 4], 'file': good}
    secret = tmp_path.parent / 'secret.npy'
    np.save(secret, X)
    bad = [{'file': '../secret.npy'}, {'file': str(secret)}, {'file': 'a.py'}, {'file': None}, {'shape': [-3, 4]},
           {'shape': '3x4'}, {'shape': [1] * 40}, {'step': 1.5}, {'counter': True}, {'format': 'int7'},
           {'format': 'bf16', 'options': {'blok': 3}}, {'axis': 2}, {'axis': 'rows'}, {'operation': 'sideways'}, {'mask': [3]},
           {'mask': [{'time': 5, 'batch': 0, 'of': 'source'}]}, {'layer': 7}, {'time': -1}, {'uses': 'all'}]
    text = ''.join(json.dumps({**line, **change}) + '\n' for change in bad)
    text += '{"kind": "tensor"\n[]\n\n"text"\n{"kind":"future"}\n{"kind":"step","step":"x"}\n'
    text += json.dumps({'kind': 'batch', 'step': 0, 'lengths': {'source': [1, 'x']}}) + '\n' + '[' * 50_000 + '\n'
    (tmp_path / 'manifest.jsonl').write_text(text + json.dumps({**line, 'statistics': {'amax': 'x'}}) + '\n{"kind":"tens')
    logs = Logs(tmp_path)
    entry, = logs.entries
    assert entry.load().tolist() == X.tolist() and entry.statistics is None
    wrong = [number for number in range(1, len(bad) + 9) if number not in (len(bad) + 3, len(bad) + 5)]
    assert [file for file, _ in logs.skipped] == [f'manifest.jsonl:{number}' for number in wrong]
    assert 'in the folder of the manifest' in logs.skipped[0][1] and all(reason.isprintable() for _, reason in logs.skipped)
    (tmp_path / 'manifest.jsonl').write_text('x\n' * 5000 + json.dumps(line) + '\n')
    assert len(Logs(tmp_path).skipped) == 100


def test_links_out_of_the_folder_are_refused(tmp_path):
    folder, outside = tmp_path / 'logs', tmp_path / 'outside'
    folder.mkdir()
    outside.mkdir()
    good = saved(folder)
    np.save(outside / 'secret.npy', X)
    (folder / 'out.npy').symlink_to(outside / 'secret.npy')
    (folder / 'rank0').symlink_to(outside)
    (folder / 'dangling.pt').symlink_to(folder / 'nowhere.pt')
    (folder / 'again.safetensors').symlink_to(good)
    (folder / 'loop.npy').symlink_to('loop.npy')
    os.mkfifo(folder / 'pipe.npy')
    (folder / 'notes.txt').write_text('x')
    logs = Logs(folder)
    assert [entry.file for entry in logs.entries] == ['again.safetensors', good]
    out = 'a link that leads out of the folder'
    assert dict(logs.skipped) == {
        'out.npy': out, 'rank0': out, 'dangling.pt': 'cannot be read (No such file or directory)',
        'loop.npy': reason_of(logs, 'loop.npy'), 'pipe.npy': 'not a tensor file; expected .safetensors, .pt, .pth, .bin, .npy',
        'notes.txt': 'not a tensor file; expected .safetensors, .pt, .pth, .bin, .npy'}
    assert len(Logs(make_link(tmp_path / 'by link', folder)).entries) == 2          # the folder itself may be a link


def make_link(link, target):
    link.symlink_to(target)
    return link


def test_files_that_change_after_they_were_listed(tmp_path):
    make_dump(tmp_path, steps=(0,), layers=('encoder.0.self_attention.q',))
    files = sorted(file for file in os.listdir(tmp_path) if file != 'manifest.jsonl')
    os.unlink(tmp_path / files[0])
    os.truncate(tmp_path / files[1], 200)
    logs = Logs(tmp_path)
    assert len(logs.entries) == len(files) - 2
    assert reason_of(logs, files[0]) == 'the manifest lists this file, but it does not exist'
    assert reason_of(logs, files[1]).startswith('truncated: 200 bytes for a tensor of shape')
    first, second, third = logs.entries[:3]
    os.unlink(first.path)
    os.truncate(second.path, 100)
    save_file({'tensor': np.ones((2, 2), np.float32)}, third.path)
    for entry, reason in (first, 'the file no longer exists'), (second, 'truncated'), (third, 'but the manifest lists'):
        with pytest.raises(LogError, match=f'{entry.file}: .*{reason}.*') as error:
            entry.load()
        assert '\n' not in str(error.value)


def test_a_truncated_file_is_read_again_when_it_has_grown(tmp_path):
    saved(tmp_path)
    np.save(tmp_path / 'whole.npy', X)
    data = (tmp_path / 'whole.npy').read_bytes()
    (tmp_path / 'late.npy').write_bytes(data[:100])
    logs = Logs(tmp_path)
    assert 'late.npy' in dict(logs.skipped)
    (tmp_path / 'late.npy').write_bytes(data)
    assert [entry.file for entry in logs.refresh()] == ['late.npy'] and logs.skipped == []


def test_a_missing_folder_and_one_without_tensors_are_user_errors(tmp_path):
    with pytest.raises(UserError, match='nowhere: no such folder; give the folder of saved tensors'):
        Logs(tmp_path / 'nowhere')
    (tmp_path / 'notes.txt').write_text('x')
    with pytest.raises(UserError, match=r'contains no saved tensor \(notes.txt: not a tensor file; expected'):
        Logs(tmp_path)


def test_control_characters_of_names_are_escaped():
    assert printable('a\x1b[31m\n\udcff\u202eb é') == r'a\x1b[31m\n\udcff\u202eb é'
