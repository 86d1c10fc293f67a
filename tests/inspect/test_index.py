"""The index of a folder: files and tensors that have not changed are neither listed nor measured again."""
import json
import os

import numpy as np
import pytest
from dumps import make_dump
from safetensors.numpy import save_file

from pyops import __main__, cache, formats
from pyops.inspect import index, logs, payload, serve, statistics
from pyops.inspect import known as known_measures
from pyops.inspect.compare import compare
from pyops.inspect.known import Known
from pyops.inspect.logs import Logs
from pyops.inspect.runs import Named

PAST = 1_600_000_000                # a time of change that is over


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv('PYOPS_CACHE', str(tmp_path / 'cache'))
    monkeypatch.setattr(index, 'WORTH', 1)
    return tmp_path / 'cache'


def settle(*paths):
    for path in paths:
        os.utime(path, (PAST, PAST))


def checkpoint(folder, count=3):
    """Write files of another program, which no manifest lists."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(count)
    for i in range(count):
        path = folder / f'20250908_092156_{i:04d}_linear_L{i}_forward_fp32_input.safetensors'
        save_file({'tensor': rng.standard_normal((4, 32)).astype(np.float32)}, path, {'layer_idx': '7', 'format': 'np'})
        settle(path)
    return sorted(folder.iterdir())


@pytest.fixture
def listed(monkeypatch):
    """The files that were listed."""
    found = []
    monkeypatch.setattr(logs, 'list_file', lambda path, real=logs.list_file: found.append(os.path.basename(path)) or real(path))
    return found


def test_files_are_listed_once_and_again_after_a_change(tmp_path, listed, place):
    files = checkpoint(tmp_path / 'logs')
    first = Logs(tmp_path / 'logs')
    assert listed == [path.name for path in files] and len(list(place.iterdir())) == 1
    listed.clear()
    again = Logs(tmp_path / 'logs')
    assert again.entries == first.entries and again.skipped == first.skipped == [] and listed == []
    assert all(np.array_equal(one.load(), other.load()) for one, other in zip(first.entries, again.entries, strict=True))
    save_file({'tensor': np.ones((2, 2), 'f4'), 'other': np.ones(3, 'f4')}, files[1])          # another size
    settle(files[1])
    os.utime(files[2], (PAST + 1, PAST + 1))                                                   # another time
    files[0].unlink()
    changed = Logs(tmp_path / 'logs')
    assert listed == [files[1].name, files[2].name]
    assert sorted(entry.shape for entry in changed.entries) == [(2, 2), (3,), (4, 32)]
    listed.clear()
    assert Logs(tmp_path / 'logs').entries == changed.entries and listed == []
    kept, = place.iterdir()
    assert files[0].name.encode() not in kept.read_bytes() and files[1].name.encode() in kept.read_bytes()


def test_a_file_that_may_still_change_is_listed_again(tmp_path, listed):
    path, = checkpoint(tmp_path / 'logs', 1)
    os.utime(path)
    for _ in range(2):
        Logs(tmp_path / 'logs')
    assert listed == [path.name] * 2


@pytest.mark.parametrize('damage', ['bytes', 'none', 'off', 'code'])
def test_without_an_intact_index_everything_is_read(tmp_path, listed, place, monkeypatch, damage):
    checkpoint(tmp_path / 'logs')
    first = Logs(tmp_path / 'logs')
    kept, = place.iterdir()
    if damage == 'bytes':
        data = bytearray(kept.read_bytes())
        data[-9] ^= 1
        kept.write_bytes(data)
    elif damage == 'none':
        kept.unlink()
    elif damage == 'off':
        monkeypatch.setenv('PYOPS_CACHE', '0')
    else:
        monkeypatch.setattr(cache, 'digest', lambda *_, real=cache.digest: real(*_)[::-1])      # as after a change of the code
    listed.clear()
    assert Logs(tmp_path / 'logs').entries == first.entries and len(listed) == 3


def test_few_files_make_no_index_and_nothing_is_written_into_the_folder(tmp_path, place, monkeypatch):
    files = checkpoint(tmp_path / 'logs')
    Logs(tmp_path / 'logs')
    assert sorted((tmp_path / 'logs').iterdir()) == files
    monkeypatch.setattr(index, 'WORTH', 4)
    checkpoint(tmp_path / 'others')
    Logs(tmp_path / 'others')
    assert len(list(place.iterdir())) == 1


def test_refused_parts_of_a_file_stay_refused(tmp_path, listed):
    (tmp_path / 'logs').mkdir()
    path = tmp_path / 'logs' / 'a.safetensors'
    save_file({'fine': np.ones(3, 'f4'), 'x_packed': np.ones((2, 2), 'u1')}, path)
    settle(path)
    lines = [Logs(tmp_path / 'logs').skipped for _ in range(2)]
    assert listed == ['a.safetensors'] and lines[0] == lines[1] == [
        ('a.safetensors', 'x_packed: the checkpoint has no x_scale')]


# ---- measures --------------------------------------------------------------------------------------------------------

@pytest.fixture
def dump(tmp_path):
    """A dump whose files are settled, with attention weights, padding and a tensor with overflow and NaN."""
    make_dump(tmp_path / 'logs', steps=(0,))
    path = tmp_path / 'logs' / 'broken.npy'
    np.save(path, np.array([[1e38, np.nan, np.inf, 1, 0, -3]], np.float32))
    settle(*(tmp_path / 'logs').iterdir())
    return tmp_path / 'logs'


def rows_of(folder, fmts, known, axis=None):
    source = Logs(folder)
    rows, skipped = compare(source.entries, fmts, source.mask, axis, known=known)
    assert not skipped
    return {(row.entry.relative_path, row.entry.key, str(row.format)): repr((row.statistics, row.histograms)) for row in rows}


@pytest.fixture
def loaded(monkeypatch):
    found = []
    monkeypatch.setattr(logs.Entry, 'load', lambda entry, real=logs.Entry.load: found.append(entry.file) or real(entry))
    return found


def test_measures_are_computed_once_and_equal_to_the_last_bit(dump, loaded):
    fmts = [formats.parse(text) for text in ('mxfp4', 'hifp8', 'fp16', 'nvfp4')]
    want = rows_of(dump, fmts, None)
    known = Known(dump)
    assert rows_of(dump, fmts[:3], known) == {key: text for key, text in want.items() if key[2] != 'nvfp4'}
    known.save()
    loaded.clear()
    assert rows_of(dump, fmts[:3], Known(dump)) == {key: text for key, text in want.items() if key[2] != 'nvfp4'}
    assert loaded == []
    assert rows_of(dump, fmts, Known(dump)) == want and len(loaded) == 26           # one format is new
    assert rows_of(dump, fmts[:1], Known(dump), 'tokens') != rows_of(dump, fmts[:1], None)
    loaded.clear()
    np.save(dump / 'broken.npy', np.array([[1, 2, 3, 4, 5, 6]], np.float32))        # the same size
    assert [text for key, text in rows_of(dump, fmts[:1], Known(dump)).items() if text != want[key]] != []
    assert loaded == ['broken.npy']


def test_padding_belongs_to_the_measures(dump, loaded):
    fmts = [formats.parse('mxfp8')]
    known = Known(dump)
    padded = rows_of(dump, fmts, known)
    rows, _ = compare(Logs(dump).entries, fmts, known=known)                        # without masks
    whole = {(row.entry.relative_path, row.entry.key, str(row.format)): repr((row.statistics, row.histograms)) for row in rows}
    assert whole.keys() == padded.keys() and {key for key in whole if whole[key] != padded[key]}
    assert rows_of(dump, fmts, known) == padded


def test_the_command_keeps_measures_also_when_it_is_interrupted(dump, loaded, capsys, monkeypatch):
    def run():
        with pytest.raises((SystemExit, KeyboardInterrupt)):
            __main__.main(['inspect', 'compare', str(dump), '--formats', 'mxfp4', '--json'])
        return capsys.readouterr().out
    real, interrupted = logs.Entry.load, []

    def stop(entry):
        interrupted.append(entry.file)
        if len(interrupted) == 10:
            raise KeyboardInterrupt
        return real(entry)
    monkeypatch.setattr(logs.Entry, 'load', stop)
    run()
    first = run()
    assert len(interrupted) == 26 + 1                       # nine of them were kept
    assert run() == first and len(interrupted) == 27 and len(json.loads(first)['tensors']) == 26


def test_the_server_shows_the_measures_of_earlier_commands(dump, loaded, monkeypatch):
    def measured():
        source = serve.Source(Named('', str(dump)))
        source.refresh()
        source.changes({'format': 'mxfp8'})
        while source._measure():
            pass
        source.save()
        changes = source.changes({'format': 'mxfp8', 'serial': source.serial, 'after': '0'})
        assert changes['pending'] == 0 and len(changes['quality']) == 26
        return {(fmt, source._entries[number].file): [repr(values), repr(statistics)]
                for fmt, number, values, statistics in changes['quality']}
    first = measured()
    assert len(loaded) == 26
    source = Logs(dump)
    for entry in source.entries:
        mask = source.mask(entry)
        assert first['mxfp8', entry.file] == [
            repr(payload.quality_of(statistics.quantization(entry.load(), 'mxfp8', entry.axis, mask))),
            repr(None if entry.statistics else payload.describe(entry.load(), mask))]
    loaded.clear()
    assert measured() == first and loaded == []
    monkeypatch.setattr(known_measures.library, 'build', lambda: 'another build of the kernels')
    assert measured() == first and len(loaded) == 26


def document(capsys, *arguments):
    """Return what `pyops inspect ... --json` prints."""
    with pytest.raises(SystemExit):
        __main__.main(['inspect', *map(str, arguments), '--json'])
    return json.loads(capsys.readouterr().out)


def test_products_are_computed_once_until_one_of_their_files_changes(dump, loaded, capsys):
    def found(*more):
        return document(capsys, 'products', dump, '--formats', 'mxfp4,none', *more)
    first = found()
    assert len(loaded) == 12 and len(first['products']) == 18          # both operands of three products of two layers
    loaded.clear()
    assert found() == first and loaded == []
    assert found('--rows', '3') != first and len(loaded) == 12
    loaded.clear()
    weight = next(path for path in dump.iterdir() if path.name.endswith('_weight.safetensors'))
    os.utime(weight, (PAST + 1, PAST + 1))
    assert found() == first and len(loaded) == 4                       # fwd and dgrad of this layer


def test_differences_of_runs_are_computed_once_until_one_of_their_files_changes(dump, tmp_path, loaded, capsys):
    make_dump(tmp_path / 'other', steps=(0,), seed=1)
    settle(*(tmp_path / 'other').iterdir())
    first = document(capsys, 'runs', dump, tmp_path / 'other')
    assert len(loaded) == 50
    loaded.clear()
    assert document(capsys, 'runs', dump, tmp_path / 'other') == first and loaded == []
    changed = next(path for path in (tmp_path / 'other').iterdir() if path.name.endswith('_weight.safetensors'))
    os.utime(changed, (PAST + 1, PAST + 1))
    assert document(capsys, 'runs', dump, tmp_path / 'other') == first and len(loaded) == 2


def test_draw_reads_only_what_has_pictures_when_the_rest_is_known(dump, tmp_path, loaded):
    pytest.importorskip('matplotlib', reason='matplotlib is not installed: pip install matplotlib')
    from pyops.inspect.draw import Options, draw
    options = Options(formats='mxfp4,hifp8', limit=1, sentences=0, jobs=1, dpi=40, page=False)
    first = draw(dump, tmp_path / 'first', options)
    assert len(loaded) == 26
    loaded.clear()
    assert draw(dump, tmp_path / 'second', options) == first and len(loaded) == 1
    for path in sorted((tmp_path / 'first').rglob('*.*')):
        assert path.read_bytes() == (tmp_path / 'second' / path.relative_to(tmp_path / 'first')).read_bytes(), path.name
    loaded.clear()
    draw(dump, tmp_path / 'first', Options(formats='mxfp8', limit=1, sentences=0, jobs=1, dpi=40, page=False))
    assert len(loaded) == 26
