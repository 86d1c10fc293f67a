"""Several runs side by side: where they part, as text, JSON and CSV, and on the page."""
import csv
import importlib.util
import json
import shutil
import struct
import sys

import numpy as np
import pytest
from dumps import LAYERS, make_dump
from safetensors.numpy import load_file, save_file

from pyops.__main__ import main
from pyops.errors import UserError
from pyops.inspect import pieces, runs
from pyops.inspect.runs import Named, Runs


def inspect(capsys, *arguments):
    """Return (exit status, standard output, standard error) of `pyops inspect`."""
    with pytest.raises(SystemExit) as left:
        main(['inspect', *map(str, arguments)])
    return left.value.code, *capsys.readouterr()


def change(folder, step, layer, name, edit):
    """Replace a saved tensor by edit(tensor), and return its relative path."""
    for line in map(json.loads, (folder / 'manifest.jsonl').read_text().splitlines()):
        if (line.get('step'), line.get('layer'), line.get('name')) == (step, layer, name):
            save_file({'tensor': edit(load_file(folder / line['file'])['tensor'])}, folder / line['file'])
            return line['file']
    raise AssertionError(f'{layer} {name} at step {step} is not in the dump')


@pytest.fixture
def pair(tmp_path):
    """Two equal dumps of three steps, a and b."""
    make_dump(tmp_path / 'a', steps=(0, 10, 20), formats=('mxfp8',))
    shutil.copytree(tmp_path / 'a', tmp_path / 'b')
    return tmp_path / 'a', tmp_path / 'b'


def test_equal_runs_do_not_part(pair, capsys):
    status, out, _ = inspect(capsys, 'runs', *pair, '--tolerance', 0)
    assert status == 0 and 'b: 75 tensors in both\n  settings  : the same\n  sentences : the same\n' in out
    assert '  loss      : within the tolerance at every step\n  tensors   : within the tolerance\n' in out
    document = json.loads(inspect(capsys, 'runs', *pair, '--json')[1])
    assert document['runs'][0]['first'] is None and document['runs'][0]['loss'] is None
    assert len(document['actions']) == 25 and {row['relative'] for row in document['actions']} == {0.0}


def test_the_first_action_beyond_the_tolerance_is_named(pair, capsys):
    small = np.float32(1 + 2 ** -10)
    change(pair[1], 10, LAYERS[0], 'output', lambda x: x * small)           # first, but small
    change(pair[1], 10, LAYERS[2], 'weight', lambda x: x * 3)
    change(pair[1], 20, LAYERS[0], 'weight', lambda x: -x)
    for tolerance, step, layer, name, relative in ((0, 10, LAYERS[0], 'output', 2 ** -10),
                                                   (0.01, 10, LAYERS[2], 'weight', 2), (2.5, None, None, None, None)):
        (found,) = json.loads(inspect(capsys, 'runs', *pair, '--json', '--tolerance', tolerance)[1])['runs']
        first = found['first'] or dict.fromkeys(('step', 'layer', 'name', 'relative'))
        assert (first['step'], first['layer'], first['name']) == (step, layer, name), tolerance
        assert relative is None or abs(first['relative'] - relative) <= 1e-6 * relative
    out = inspect(capsys, 'runs', *pair, '--tolerance', 0.01)[1]
    assert f'part at step 10, {LAYERS[2]} forward weight: 2.00e+00' in out
    table = out.split('action\n')[1].splitlines()
    assert [line.split()[-1] for line in table[:3]] == ['weight', 'weight', 'output']
    assert [line.split()[2:4] for line in table[:3]] == [['10', '10'], ['20', '20'], ['10', '-']]     # worst and first step
    ordered = inspect(capsys, 'runs', *pair, '--sort', 'order')[1].split('action\n')[1].splitlines()
    assert [line.split(maxsplit=5)[5] for line in ordered[:3]] == [f'{LAYERS[0]} forward {name}'
                                                                   for name in ('input', 'weight', 'bias')]


def test_differences_equal_numpy_without_padding(pair, capsys):
    rng = np.random.default_rng(1)
    change(pair[1], 0, LAYERS[0], 'input', lambda x: x + rng.standard_normal(x.shape).astype(np.float32))
    together = Runs(runs.named(map(str, pair)))
    x, y = (next(entry for entry in together.entries if (entry.step, entry.layer, entry.name) == (0, LAYERS[0], 'input')
                 and runs.run_of(entry) == name) for name in 'ab')
    mask = np.broadcast_to(together.mask(x), x.shape)
    a, b = (entry.load().astype(np.float64)[mask] for entry in (x, y))
    (row,) = [row for row in runs.compare(together, together.entries)[0].rows() if row.worst.relative]
    assert abs(row.worst.relative - np.sqrt(((a - b) ** 2).sum() / (a ** 2).sum())) <= 1e-12
    assert abs(row.max_error - np.abs(a - b).max()) <= 1e-12
    change(pair[1], 0, LAYERS[0], 'input', lambda x: np.where(mask, x, 99))
    assert abs(runs.compare(together, together.entries)[0].rows()[0].worst.relative - row.worst.relative) <= 1e-12


@pytest.mark.parametrize('a, b, relative', [
    ([1, np.nan, 2], [1, np.nan, 2], 0), ([1, np.inf, 3], [1, np.inf, 4], 1 / np.sqrt(10)), ([1, np.inf], [1, -np.inf], np.inf),
    ([1, np.nan], [1, 2], np.inf), ([0, 0], [0, 1e-30], np.inf), ([0, 0], [0, -0.0], 0), ([], [], 0)])
def test_numbers_that_are_not_finite(a, b, relative):
    got = runs._distance([(np.array(a, np.float32), np.array(b, np.float32), None)])[0]
    assert got == relative or abs(got - relative) <= 1e-12


def test_large_tensors_are_compared_as_a_whole():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 70_000)).astype(np.float32)
    y = x.copy()
    y[1] += rng.standard_normal(70_000).astype(np.float32)
    got, largest = runs._distance([(x.reshape(-1), y.reshape(-1), None)])
    a, b = x.astype(np.float64), y.astype(np.float64)
    assert abs(got - np.sqrt(((a - b) ** 2).sum() / (a ** 2).sum())) <= 1e-12 and largest == np.abs(a - b).max()


def test_large_tensors_are_read_piece_by_piece(tmp_path, monkeypatch):
    rng = np.random.default_rng(2)
    for name in 'ab':
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / 'x.npy', rng.standard_normal((40, 3, 70)).astype(np.float32))
    together = Runs(runs.named(str(tmp_path / name) for name in 'ab'))
    pair, = runs.Pairing('a').add(together.entries)
    masks = [None] + [rng.random(shape) < 0.7 for shape in ((40, 3, 1), (3, 1), (40, 1, 1), (40, 3, 70), (1, 1, 1))]
    whole = [runs.difference(pair, mask) for mask in masks]
    assert len({one.relative for one in whole}) >= 5 and all(one.relative > 1 for one in whole[:5])
    monkeypatch.setattr(pieces, 'PIECE', 1000)
    monkeypatch.setattr(type(pair.reference), 'load', lambda entry: pytest.fail('the whole tensor was read'))
    for mask, want in zip(masks, whole, strict=True):
        got = runs.difference(pair, mask)
        assert abs(got.relative - want.relative) <= 1e-12 * want.relative and got.max_error == want.max_error


def test_loss_and_sentences_part(pair, capsys):
    manifest = pair[1] / 'manifest.jsonl'
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    for line in lines:
        if line['kind'] == 'step' and line['step'] in (7, 8):
            line['loss'] = line['loss'] * (1 + 1e-3) if line['step'] == 7 else None
        if line['kind'] == 'batch' and line['step'] == 20:
            line['tokens']['source'][0][0] = 'she'
        if line['kind'] == 'run':
            line['settings']['seed'] = 5
    manifest.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    out = inspect(capsys, 'runs', *pair)[1]
    assert '  settings  : seed 5\n  sentences : other ones from step 20 on\n' in out
    seven, eight = 7 * 0.97 ** 7, 7 * 0.97 ** 8
    assert f'loss      : parts at step 7: {seven:.7g} and {seven * 1.001:.7g}' in out
    assert f'loss      : parts at step 8: {eight:.7g} and not finite' in inspect(capsys, 'runs', *pair, '--tolerance', 0.01)[1]


def test_several_runs_have_a_line_each_and_missing_tensors_are_counted(pair, tmp_path, capsys):
    make_dump(tmp_path / 'c', steps=(10, 30), formats=('fp32',), layers=LAYERS[:2], seed=3)
    document = json.loads(inspect(capsys, 'runs', pair[0], f'other={pair[1]}', tmp_path / 'c', '--json')[1])
    other, c = document['runs']
    assert (other['name'], other['first']) == ('other', None) and (c['name'], c['first']['step']) == ('c', 10)
    assert (c['only_in_reference'], c['only_in_run']) == (75 - 17, 17) and c['settings'] == {'quant': 'fp32', 'seed': 3}
    assert {row['run'] for row in document['actions']} == {'other', 'c'}


def test_csv_has_a_line_per_pair_in_the_order_of_the_reference(pair, tmp_path, capsys):
    file = change(pair[1], 10, LAYERS[1], 'weights', lambda x: x + 1)
    assert inspect(capsys, 'runs', *pair, '--csv', tmp_path / 'out.csv', '--top', 1)[0] == 0
    with open(tmp_path / 'out.csv', newline='') as lines:
        rows = list(csv.DictReader(lines))
    assert [row['step'] for row in rows] == ['0'] * 25 + ['10'] * 25 + ['20'] * 25
    assert [row['file'] for row in rows if row['beyond'] == '1'] == [f'a/{file}']
    status, _, error = inspect(capsys, 'runs', *pair, '--csv', tmp_path / 'none' / 'out.csv')
    assert status == 2 and len(error.splitlines()) == 1


def test_a_damaged_tensor_is_skipped_and_the_others_are_compared(pair, capsys):
    file = change(pair[1], 0, LAYERS[0], 'bias', lambda x: x)
    (pair[1] / file).write_bytes(b'\0' * (pair[1] / file).stat().st_size)
    status, out, error = inspect(capsys, 'runs', *pair)
    assert status == 0 and f'skipped: a/{file}: ' in error and 'b: 74 tensors' in out


def test_bad_runs_are_one_line(pair, tmp_path, capsys):
    make_dump(tmp_path / 'x' / 'a')
    make_dump(tmp_path / 'other', layers=('decoder.0.q',))
    make_dump(tmp_path / 'late', steps=(7,))
    shutil.copytree(pair[0], tmp_path / 'wide')
    manifest = tmp_path / 'wide' / 'manifest.jsonl'
    manifest.write_text(manifest.read_text().replace('"name": "weight", "step": 0', '"name": "bias", "step": 0'))
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'site').mkdir()
    (tmp_path / 'site' / 'index.html').write_text('mine')
    for arguments, message in (
            ([pair[0]], 'expected two or more runs to compare'),
            ([pair[0], pair[0]], 'both runs have the name a; name one of them, as in other=FOLDER'),
            ([pair[0], tmp_path / 'x' / 'a'], 'both runs have the name a'),
            ([pair[0], f'x/y={pair[1]}'], 'with a name without /'), ([pair[0], f'={pair[1]}'], 'expected a folder'),
            ([pair[0], tmp_path / 'none'], 'none: no such folder'), ([pair[0], tmp_path / 'empty'], 'contains no saved tensor'),
            ([pair[0], tmp_path / 'other'], 'no layer has the same tensor in both'),
            ([pair[0], tmp_path / 'wide'], 'compare runs of one model'),
            ([pair[0], tmp_path / 'late'], 'a has step 0, 10, 20 and late has step 7 of these tensors'),
            ([*pair, '--page', tmp_path / 'site'], 'exists and was not written by this program; name another'),
            ([*pair, '--tolerance', '-1'], '--tolerance: expected a finite number >= 0'),
            ([*pair, '--steps', '5'], 'saved steps: 0, 10, 20'), ([*pair, '--layers', 'nothing'], 'matches no saved tensor')):
        status, out, error = inspect(capsys, 'runs', *arguments)
        assert (status, out) == (2, '') and len(error.splitlines()) == 1 and message in error, error


def test_the_same_tensor_twice_in_a_step_is_paired_in_order(tmp_path):
    for name in 'ab':
        make_dump(tmp_path / name, steps=(0,))
        manifest = tmp_path / name / 'manifest.jsonl'
        lines = [json.loads(line) for line in manifest.read_text().splitlines()]
        for line in lines:
            line['name'] = 'input' if line.get('name') == 'output' else line.get('name')
        manifest.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    together = Runs([Named(name, str(tmp_path / name)) for name in 'ab'])
    partings, found, pairing, _ = runs.compare(together, together.entries)
    assert len(found) == 25 and not partings.first and pairing.unpaired('b') == (0, 0)


def test_pairs_are_found_while_runs_grow(pair):
    together = Runs([Named(name, str(folder)) for name, folder in zip('ab', pair, strict=True)])
    pairing, seen = runs.Pairing('a'), []
    for entry in sorted(together.entries, key=lambda entry: hash(entry.file)):
        seen += pairing.add([entry])
    assert len(seen) == len(set(seen)) == 75
    with pytest.raises(UserError, match='both runs'):
        runs.named(['a', 'x/a'])


# ---- TensorBoard -----------------------------------------------------------------------------------------------------

def scalars(folder):
    """Return {tag: {step: value}} of the only event file in a folder: records of a length, data and two checksums."""
    from tensorboardX.proto.event_pb2 import Event
    (path,) = folder.iterdir()
    data, place, found = path.read_bytes(), 0, {}
    while place < len(data):
        (length,) = struct.unpack_from('<Q', data, place)
        event = Event.FromString(data[place + 12:place + 12 + length])
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
        place += 16 + length
    return found


def test_event_files_have_the_losses_and_the_statistics_of_each_run(pair, tmp_path, capsys):
    pytest.importorskip('tensorboardX', reason="tensorboardX is not installed: pip install 'pyops[tensorboard]'")
    change(pair[1], 10, LAYERS[0], 'output', lambda x: x * np.float32(3))
    change(pair[1], 20, LAYERS[0], 'output', lambda x: np.full_like(x, np.nan))
    assert inspect(capsys, 'runs', *pair, '--tensorboard', tmp_path / 'events')[0] == 0
    ours, theirs = (scalars(tmp_path / 'events' / name) for name in 'ab')
    recorded = [json.loads(line) for line in (pair[0] / 'manifest.jsonl').read_text().splitlines()]
    losses = {line['step']: line['loss'] for line in recorded if 'loss' in line}
    assert losses and ours['loss'] == theirs['loss'] == {step: float(np.float32(loss)) for step, loss in losses.items()}
    source = Runs([Named('a', str(pair[0]))])
    (tag,) = [tag for tag in ours if tag.startswith(f'{LAYERS[0]}_') and tag.endswith('_forward_output/amax')]
    for entry in source.entries:
        if (entry.layer, entry.operation, entry.name) == (LAYERS[0], 'forward', 'output'):
            x = entry.load()[np.broadcast_to(source.mask(entry), entry.shape)]          # without padding
            assert 0 < x.size < np.prod(entry.shape) and ours[tag][entry.step] == np.abs(x).max()
            assert abs(ours[tag.replace('amax', 'rms')][entry.step] - np.sqrt((x.astype('d') ** 2).mean())) <= 1e-6
    assert set(ours[tag]) == {0, 10, 20} and set(theirs[tag]) == {0, 10}                # no number at the step of the NaN
    assert theirs[tag.replace('amax', 'nan')][20] == x.size and theirs[tag][10] == np.float32(3) * np.float32(ours[tag][10])
    status, out, error = inspect(capsys, 'runs', *pair, '--tensorboard', tmp_path / 'events')
    assert status == 2 and 'is not empty' in error and error.count('\n') == 1


def test_one_run_is_enough_for_event_files_and_the_package_has_a_remedy(pair, tmp_path, capsys, monkeypatch):
    if importlib.util.find_spec('tensorboardX'):
        assert inspect(capsys, 'runs', pair[0], '--tensorboard', tmp_path / 'one')[:2] == (0, '')
        assert 'loss' in scalars(tmp_path / 'one/a')
    monkeypatch.setitem(sys.modules, 'tensorboardX', None)
    status, _, error = inspect(capsys, 'runs', pair[0], '--tensorboard', tmp_path / 'two')
    assert status == 2 and error.endswith("tensorboardX is not installed; install it with: pip install 'pyops[tensorboard]'\n")
