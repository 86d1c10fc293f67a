"""python -m pyops inspect compare: every format on the tensors of a dump, ranked, summed and as JSON."""
import csv
import itertools
import json
import math
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from dumps import make_dump

from pyops import __main__, formats, training
from pyops.inspect import compare
from pyops.inspect.logs import Logs
from pyops.inspect.statistics import block_sqnr, quantization


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """No time passes in the eyes of training.Progress, or a slow machine would print lines that others do not."""
    monkeypatch.setattr(training, 'time', SimpleNamespace(perf_counter=lambda: 0.0))


@pytest.fixture(scope='module')
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp('logs')
    make_dump(folder, steps=(0, 10, 20))
    return folder


@pytest.fixture
def run(capsys, monkeypatch):
    """run(arguments) -> exit status, standard output, standard error of the command."""
    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            __main__.main(['inspect', 'compare', *map(str, arguments)])
        return stop.value.code or 0, *capsys.readouterr()
    return call


def test_json_has_every_tensor_in_every_format_and_sums_energies(dump, run):
    status, out, err = run(dump, '--json', '--formats', 'all,mxfp4:scale=even')
    document, logs = json.loads(out), Logs(dump)
    fmts = [*formats.FORMATS, 'mxfp4:scale=even']
    assert status == 0 and err == '' and document['formats'] == fmts and document['skipped'] == []
    assert len(document['tensors']) == 75 * 6 and len({(row['file'], row['format']) for row in document['tensors']}) == 75 * 6
    entries = {entry.file: entry for entry in logs.entries}
    energies = {}
    for row in document['tensors']:
        entry = entries[row['file']]
        want = quantization(entry.load(), row['format'], entry.axis, logs.mask(entry))
        assert {key: row[key] for key in want} == pytest.approx(want, nan_ok=True), row['file']
        assert ('row_sum_error' in row) == (entry.name == 'weights') and sum(row['exponents'].values()) > 0
        assert bool(row['scales']) == row['format'].startswith('mx') and bool(row['digits']) == (row['format'] == 'hifp8')
        blocks = block_sqnr(entry.load(), row['format'], entry.axis, logs.mask(entry))
        assert row['worst_block_db'] == pytest.approx(np.nanmin(blocks))
        assert (row['layer'], row['name'], row['step'], row['axis']) == (entry.layer, entry.name, entry.step, entry.axis)
        energies.setdefault(row['format'], []).append((row['sum_x2'], row['sum_e2']))
    order = [row['sqnr_db'] for row in document['tensors']]
    assert order == sorted(order)
    assert [total['format'] for total in document['totals']][:2] == ['mxfp4', 'mxfp4:scale=even']
    for total in document['totals']:
        x2, e2 = map(sum, zip(*energies[total['format']], strict=True))
        single = [row['sqnr_db'] for row in document['tensors'] if row['format'] == total['format']]
        assert total['tensors'] == 75 and total['sqnr_db'] == pytest.approx(10 * math.log10(x2 / e2))
        assert total['worst_db'] == min(single) and total['median_db'] == pytest.approx(np.median(single))
        assert abs(total['sqnr_db'] - np.mean(single)) > 0.05


def test_padding_counts_in_no_sum(tmp_path, run):
    arrays = make_dump(tmp_path, steps=(0,), layers=('encoder.0.self_attention.q',))
    before = json.loads(run(tmp_path, '--json', '--names', 'input')[1])['tensors']
    file, = (file for file in arrays if file.endswith('forward_fp32_input.safetensors'))
    logs = Logs(tmp_path)
    entry, = (entry for entry in logs.entries if entry.file == file)
    x = np.where(logs.mask(entry), arrays[file], 1000).astype('<f4')        # what stands at padding is of no interest
    data = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(data[:-x.nbytes] + x.tobytes())
    assert json.loads(run(tmp_path, '--json', '--names', 'input')[1])['tensors'] == before


def test_choices_of_tensors(dump, run):
    def rows(*arguments):
        return json.loads(run(dump, '--json', '--formats', 'mxfp4', *arguments)[1])['tensors']

    def those(key, *arguments):
        return {row[key] for row in rows(*arguments)}

    assert those('layer', '--layers', '*.q,*attention') == {'encoder.0.self_attention.q', 'encoder.0.self_attention'}
    assert those('layer', '--layers', 'linear_L1') == {'encoder.0.feed_forward.in'}
    assert those('name', '--names', 'grad_*,key') == {'key', 'grad_output', 'grad_input', 'grad_weight', 'grad_bias',
                                                      'grad_query', 'grad_key', 'grad_value'}
    assert those('step', '--steps', '0:20:10') == {0, 10} and those('step', '--steps', '20') == {20}
    assert len(rows('--top', '7')) == 7 and rows('--top', '7') == rows()[:7]
    for sort, (_, key, largest, _) in compare.SORTS.items():
        values = [row[key] for row in rows('--sort', sort)]
        assert values == sorted(values, reverse=largest) and len(set(values)) > 3 * (sort not in ('overflow', 'poisoned')), sort
    by_axis = {axis: {row['file']: row['worst_block_db'] for row in rows('--axis', axis, '--names', 'input')}
               for axis in ('-1', '0', 'tokens')}
    logs = Logs(dump)
    for entry in logs.entries:
        if entry.name == 'input':
            x, keep = entry.load(), logs.mask(entry)
            for axis in ('-1', '0', 'tokens'):
                want = np.nanmin(block_sqnr(x, 'mxfp4', axis if axis == 'tokens' else int(axis), keep))
                assert by_axis[axis][entry.file] == pytest.approx(want)


def test_overflow_is_worst_and_has_a_column(tmp_path, run):
    rng = np.random.default_rng(0)
    np.save(tmp_path / 'some.npy', np.where(np.arange(4096) % 2, 1e6, rng.standard_normal(4096)).astype(np.float32))
    np.save(tmp_path / 'all.npy', np.full(4096, -1e6, np.float32))
    np.save(tmp_path / 'none.npy', rng.standard_normal(4096).astype(np.float32))
    for sort in compare.SORTS:
        _, out, _ = run(tmp_path, '--formats', 'fp16,mxfp4', '--sort', sort)
        lines = [line.split() for line in out.splitlines()]
        assert 'overflow' in lines[2] and [line[-1] for line in lines[3:5]] == ['all', 'some'], sort
        assert lines[3][0] == lines[4][0] == '-inf' and '4096' in lines[3] and '2048' in lines[4]
    assert lines[-2][:2] == ['fp16', '-inf'] and lines[-2][-3:] == ['all,', 'step', '0']         # the totals
    document = json.loads(run(tmp_path, '--formats', 'fp16', '--json')[1])
    assert {row['name']: row['overflow'] for row in document['tensors']} == {'all': 4096, 'some': 2048, 'none': 0}
    assert 'overflow' not in run(tmp_path, '--formats', 'mxfp4,bf16')[1].splitlines()[2]


def test_blocks_with_an_infinity_rank_first_and_are_counted(tmp_path, run):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, 4, 32)).astype(np.float32)
    rows[0, :, 5] = rows[1, 0, 5] = np.inf
    for name, x in zip(('all', 'some', 'none'), rows, strict=True):
        np.save(tmp_path / f'{name}.npy', x)
    _, out, _ = run(tmp_path, '--formats', 'mxfp8,bf16')
    lines = [line.split() for line in out.splitlines()]
    assert 'poisoned' in lines[2] and [line[-1] for line in lines[3:5]] == ['all', 'some']
    assert lines[3][0] == 'NaN' and '124' in lines[3] and '31' in lines[4]
    (mxfp8, bf16), titles = lines[-2:], lines[-3]
    assert titles[6:8] == ['worst', 'poisoned'] and mxfp8[0] == 'mxfp8' and mxfp8[6] == '155' and bf16[6] == '0'
    document = json.loads(run(tmp_path, '--formats', 'mxfp8', '--json')[1])
    assert [row['poisoned'] for row in document['tensors']] == [124, 31, 0] and document['totals'][0]['poisoned'] == 155
    assert 'poisoned' not in run(tmp_path, '--formats', 'bf16')[1]


def test_the_table(dump, run):
    status, out, err = run(dump, '--formats', 'mxfp4,bf16', '--top', '4', '--steps', '10,20')
    lines = out.splitlines()
    assert status == 0 and err == ''
    assert lines[0] == f'50 tensors of {dump}, 2 steps from 10 to 20; worst first by SQNR dB'
    assert lines[2].split() == 'SQNR dB cosine max error under % satur % block dB format step tensor'.split()
    rows = json.loads(run(dump, '--formats', 'mxfp4,bf16', '--steps', '10,20', '--json')[1])['tensors']
    for line, row in zip(lines[3:7], rows, strict=False):
        assert line.split() == [
            f'{row["sqnr_db"]:.2f}', f'{row["cosine"]:.5f}', f'{row["max_abs_error"]:.2e}', f'{row["underflow_pct"]:.2f}',
            f'{row["saturation_pct"]:.2f}', f'{row["worst_block_db"]:.2f}', 'mxfp4', str(row['step']),
            row['layer'], row['name']]
    assert lines[7] == '... and 96 more (--top 100 shows all)' and lines[9].startswith('format  SQNR dB')
    assert [line.split()[0] for line in lines[10:]] == ['mxfp4', 'bf16']


@pytest.mark.parametrize('width', [60, 80, 100, 120, 300])
def test_the_table_fits_a_terminal(dump, width):
    logs = Logs(dump)
    rows, _ = compare.compare(logs.entries[:25], [formats.parse('mxfp8:elem=e5m2'), formats.parse('bf16')], logs.mask)
    options = type('Options', (), {'logs': '/logs', 'sort': 'error', 'save_codes': None})
    table = list(compare._table(options, rows, compare.ranked(rows, 'error')[:9], width))
    assert all(len(line) <= width or width == 60 for line in table)
    assert ('block dB' in table[2]) == (width >= 120) and 'max error' in table[2]      # it is what they are sorted by
    assert any('encoder.0.self_attention.q input' in line for line in table) == (width >= 120)
    assert all(line.startswith(' ') and line.split()[-1] for line in table[3:12])


def test_a_line_for_each_block(dump, run, tmp_path):
    path = tmp_path / 'blocks.csv'
    status, *_ = run(dump, '--names', 'value', '--steps', '0', '--formats', 'mxfp8:block=2,bf16', '--per-block', path)
    lines = list(csv.DictReader(path.open(newline='')))
    assert status == 0 and len(lines) == (3 + 1) * 3 * 2 * 8            # (5, 3, 2, 8) in blocks along the first axis
    logs = Logs(dump)
    entry, = (entry for entry in logs.entries if entry.name == 'value' and entry.step == 0)
    want = block_sqnr(entry.load(), 'mxfp8:block=2', 0, logs.mask(entry))
    for line in lines:
        leading, last = int(line['row']), int(line['column'])           # of the first element
        block = [int(part) for part in line['block'].split(':')]
        size = 2 if line['format'] == 'mxfp8:block=2' else 32
        assert np.ravel_multi_index((block[0] * size, *block[1:]), (5, 3, 2, 8)) == leading * 8 + last
        if line['format'] == 'mxfp8:block=2':
            place = tuple(map(int, line['block'].split(':')))
            assert float(line['sqnr_db']) == pytest.approx(want[place], rel=1e-4, nan_ok=True)
            assert float(line['log2_scale']) == int(line['log2_scale'])
        else:
            assert line['log2_scale'] == ''


def test_a_large_file_of_blocks_is_announced(dump, run, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, '_MUCH', 1000)
    path = tmp_path / 'blocks.csv'
    status, _, err = run(dump, '--names', 'weight,value', '--steps', '0', '--formats', 'mxfp8,bf16', '--axis', 'tokens',
                         '--per-block', path)
    size = 250 * (len(path.read_text().splitlines()) - 1)
    assert status == 0 and err == (f'--per-block: {path} will have about {size / 1000:.1f} KB; choose fewer tensors with '
                                   '--layers, --names or --steps, or fewer formats\n')


def test_what_cannot_be_read_is_said_and_the_rest_compared(tmp_path, run):
    arrays = make_dump(tmp_path, steps=(0,))
    cut, *_ = sorted(arrays)
    data = (tmp_path / cut).read_bytes()
    (tmp_path / cut).write_bytes(b'\xff' * len(data))                   # of the right size, so found when it is read
    (tmp_path / 'notes.txt').write_text('x')
    status, out, err = run(tmp_path, '--formats', 'fp16', '-o', tmp_path / 'table.txt')
    assert status == 0 and out == '' and (tmp_path / 'table.txt').read_text().startswith('24 tensors of')
    assert err.splitlines()[0] == 'skipped: notes.txt: not a tensor file; expected .safetensors, .pt, .pth, .bin, .npy'
    assert cut in err.splitlines()[1]
    document = json.loads(run(tmp_path, '--formats', 'fp16', '--json')[1])
    assert [line['file'] for line in document['skipped']] == ['notes.txt', 'table.txt', cut]


def test_numbers_that_json_has_not(tmp_path, run):
    np.save(tmp_path / 'zeros.npy', np.zeros((2, 40), np.float32))
    np.save(tmp_path / 'nothing.npy', np.full(3, np.nan, np.float32))
    np.save(tmp_path / 'a\udcff\x1b[31m.npy', np.ones((), np.float32))
    status, out, _ = run(tmp_path, '--formats', 'mxfp8', '--json')
    rows = {row['name']: row for row in json.loads(out, parse_constant=pytest.fail)['tensors']}
    assert rows['zeros']['sqnr_db'] is rows['nothing']['sqnr_db'] is None
    assert rows['zeros']['sum_e2'] == 0 and rows['nothing']['nan'] == 3 and status == 0
    status, out, _ = run(tmp_path, '--formats', 'mxfp8')
    assert status == 0 and ' exact ' in out and '\x1b' not in out and r'a\udcff\x1b[31m' in out


def test_every_format_is_tried(tmp_path, run):
    np.save(tmp_path / 'x.npy', np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32))
    document = json.loads(run(tmp_path, '--formats', 'every', '--json')[1], parse_constant=pytest.fail)
    assert document['formats'] == [*formats.FORMATS, *formats.MORE_FORMATS, *formats.ELEMENTS]
    assert len(document['formats']) == 16 == len(formats._OPTIONS)
    measured = {row['format']: row['sqnr_db'] for row in document['tensors']}
    assert measured.keys() == {*document['formats']} and all(6 < decibels < 90 for decibels in measured.values())
    assert json.loads(run(tmp_path, '--json')[1])['formats'] == list(formats.FORMATS)


def test_a_tensor_without_finite_numbers_says_so(tmp_path, run):
    for name, array in (('nan', [math.nan] * 40), ('both', [math.inf, math.nan] * 20), ('inf', [-math.inf] * 40), ('empty', []),
                        ('some', [math.nan, *range(39)])):
        np.save(tmp_path / f'{name}.npy', np.array(array, np.float32))
    lines = run(tmp_path, '--formats', 'bf16')[1].splitlines()
    shown = {line.split()[-1]: line.split()[:6] for line in lines[3:8]}
    assert {shown[name][0] for name in ('nan', 'both')} == {'NaN'} and shown['inf'][0] == 'inf' and shown['empty'][0] == '-'
    assert shown['nan'][1] == shown['nan'][2] == 'NaN' and shown['some'][0] == 'exact'


def test_slow_work_shows_its_progress_on_stderr(dump, run, monkeypatch):
    quick = run(dump, '--formats', 'bf16')
    assert quick[2] == ''
    monkeypatch.setattr(training, 'time', SimpleNamespace(perf_counter=itertools.count(0.0, 0.25).__next__))
    status, out, err = run(dump, '--formats', 'bf16')
    assert (status, out) == quick[:2] and len(err.splitlines()) > 3
    assert all(re.fullmatch(r'compare \[\d+/75\] \([\d.]+ tensors/s, \d\d:\d\d left\)', line) for line in err.splitlines())


@pytest.mark.parametrize('command', ['compare', 'products'])
def test_processes_have_the_same_results(dump, command, capsys, monkeypatch):
    def document():
        with pytest.raises(SystemExit):
            __main__.main(['inspect', command, str(dump), '--formats', 'mxfp4,bf16', '--json'])
        return capsys.readouterr().out
    monkeypatch.setenv('PYOPS_CACHE', '0')
    one, pools = document(), []
    monkeypatch.setattr('os.sched_getaffinity', lambda process: {0, 1}, raising=False)
    monkeypatch.setattr('pyops.inspect.workers._START', 0)
    real = ProcessPoolExecutor
    monkeypatch.setattr('concurrent.futures.ProcessPoolExecutor', lambda *given: pools.append(given[0]) or real(*given))
    assert document() == one and pools == [2]


def test_bad_input_is_one_line_that_says_what_to_do(dump, run, tmp_path):
    for arguments, want in (
            ((tmp_path / 'nowhere',), 'nowhere: no such folder; give the folder of saved tensors'),
            ((tmp_path,), 'contains no saved tensor (it is empty)'),
            ((dump, '--formats', 'mxfp7'), 'mxfp7: no such number format; did you mean mxfp8'),
            ((dump, '--formats', 'mxfp8:scal=even'), 'scal: mxfp8 has no such option; did you mean scale'),
            ((dump, '--layers', 'enconder.*'), 'enconder.*: matches no saved tensor; the names include encoder.0'),
            ((dump, '--names', 'inputs'), 'inputs: matches no saved tensor; the names include input'),
            ((dump, '--steps', '5'), 'no saved tensor is of the given steps; saved steps: 0, 10, 20'),
            ((dump, '--steps', 'x'), '--steps: expected a number, A:B:S, or'),
            ((dump, '--top', '0'), "--top: expected a whole number from 1 to 1000000, got '0'"),
            ((dump, '--axis', 'x'), "--axis: expected a number, such as -1, or tokens, got 'x'"),
            ((dump, '--axis', '7'), 'and no axis 7; leave --axis out'),
            ((dump, '--sort', 'x'), "invalid choice: 'x'"),
            ((dump, '-o', '/no/x'), 'error: -o/--output: /no/x: cannot be written (No such file or directory); name a file'),
            ((dump, '--per-block', '/no/x'), 'error: --per-block: /no/x: cannot be written (No such file or directory); name'),
            ((dump, '--per-block', '/dev/full', '--steps', '0'), '/dev/full: cannot be written (No space left on device)')):
        status, out, err = run(*arguments)
        assert status == 2 and out == '' and err.count('\n') == 1 and want in err, (arguments, err)


@pytest.mark.parametrize('command', ['compare', 'products', 'sensitivity'])
def test_help_needs_nothing_that_it_does_not_print(command):
    code = (f'import sys; from pyops.__main__ import main\ntry: main(["inspect", "{command}", "--help"])\n'
            'except SystemExit: print(sorted({"numpy", "matplotlib", "torch"} & set(sys.modules)))')
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == '[]', done.stderr
