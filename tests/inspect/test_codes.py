"""python -m pyops inspect compare --save-codes: files with codes and scales, their histograms and deviations."""
import json
import math

import numpy as np
import pytest
from dumps import make_dump

from pyops import __main__, formats
from pyops.inspect.codes import describe_codes, encode, shares, values
from pyops.inspect.logs import Logs
from pyops.inspect.readers import list_tensors, read
from pyops.inspect.statistics import rounded

FORMATS = ('mxfp8', 'mxfp4:block=16:scale=even', 'mxint8', 'nvfp4', 'fp8:block=tensor', 'int8', 'int4', 'hifp8', 'fp16', 'bf16',
           'mxfp4:block=4x4', 'mxfp6:hadamard=16', 'fp8:delayed')


@pytest.fixture
def run(capsys):
    """run(arguments) -> exit status, standard output, standard error of the command."""
    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            __main__.main(['inspect', 'compare', *map(str, arguments)])
        return stop.value.code or 0, *capsys.readouterr()
    return call


@pytest.mark.parametrize('fmt', FORMATS)
@pytest.mark.parametrize('axis', [-1, 0, 'tokens'])
def test_codes_and_scales_give_the_rounded_numbers_and_the_statistics(fmt, axis):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((5, 3, 40)) * np.exp2(rng.integers(-6, 7, (5, 3, 1)))).astype(np.float32)
    x[1, 2], x[3, :, 32:] = 0, 0
    mask = rng.random((5, 3, 1)) < 0.7
    codes = encode(x, fmt, axis)
    np.testing.assert_array_equal(np.asarray(formats.decode(codes)).reshape(x.shape), rounded(x, fmt, axis))
    for valid in (np.ones(x.shape, bool), np.broadcast_to(mask, x.shape)):
        if 'hadamard' in fmt and not valid.all():
            continue                                # padding spreads over a transform: test_statistics.py has the rule
        found = describe_codes(codes, x, axis, None if valid.all() else mask)
        chosen = np.asarray(codes.codes).reshape(x.shape)[valid]
        assert found.codes == {code: int((chosen == code).sum()) for code in np.unique(chosen)}
        assert found.code_std == pytest.approx(values(formats.parse(fmt))[chosen].std(), rel=1e-12)
        if codes.scales is None:
            assert found.scales == {} and math.isnan(found.scale_std)


@pytest.mark.parametrize('fmt', ['mxfp8', 'mxfp8:elem=e5m2', 'mxfp4', 'mxfp6', 'mxint8', 'nvfp4', 'fp8', 'int8', 'int4',
                                 'hifp8', 'fp8:delayed', 'e2m3', 'bf16', 'mxfp4:hadamard=16'])
def test_the_number_of_a_code_is_before_its_scale(fmt):
    f = formats.parse(fmt)
    table = values(f)
    assert len(table) == 1 << f.bits and (table == f.max).sum() == (table == -f.max).sum() == 1
    assert (table == f.min_subnormal).sum() == 1 and (table == -f.min_subnormal).sum() == 1 and (table == 0).sum() >= 1


def test_scales_of_padding_of_zeros_and_of_nan_are_left_out():
    x = np.ones((6, 8), np.float32) * np.exp2(np.arange(6, dtype=np.float32))[:, None]
    x[2], x[3, 1] = 0, math.nan
    x[4, 4:] = 2.0 ** 10
    mask = np.array([1, 1, 1, 1, 1, 0], bool)[:, None]
    for fmt, least in (('mxfp8:block=4', -8), ('fp8:block=4', None)):
        codes = encode(x, fmt)
        found = describe_codes(codes, x, -1, mask)
        # rows 0 and 1, the second half of row 3, and both of row 4
        want = [0, 0, 1, 1, 3, 4, 10]
        if least is not None:
            assert found.scales == {exponent + least: want.count(exponent) for exponent in want}
        else:
            assert list(found.scales.values()) == [2, 2, 1, 1, 1]
        assert found.scale_std == pytest.approx(np.std(want), rel=1e-6)
    empty = describe_codes(encode(x[:0], 'mxfp8'), x[:0])
    assert empty.codes == empty.scales == {} and math.isnan(empty.code_std) and math.isnan(empty.scale_std)


def test_shares_are_percentages_by_octave():
    f = formats.parse('mxfp4')
    codes = np.asarray(encode(np.array([0, 0.5, -1, 1.5, 3, -6, 6, 6], np.float32), 'e2m1').codes)
    histogram = {int(code): int((codes == code).sum()) for code in codes}
    assert shares(f, [histogram, histogram], True) == '0 12.5, 2^-1 12.5, 2^0 25.0, 2^1 12.5, 2^2 37.5'
    assert shares(f, [{-9: 1, -8: 2}, {-8: 1}], False) == '2^-9 25.0, 2^-8 75.0' and shares(f, [{}], False) == ''
    assert shares(f, [dict.fromkeys(range(20), 5)], False).endswith('2^11 5.0, others 40.0')
    assert shares(formats.parse('fp16'), [{0x7c00: 1}], True) == 'inf or NaN 100.0'


def test_files_beside_the_table(tmp_path, run):
    logs, folder = tmp_path / 'logs', tmp_path / 'codes'
    make_dump(logs, steps=(0,), layers=('encoder.0.self_attention.q',))
    flags = logs, '--names', 'input,weight', '--formats', 'mxfp4,nvfp4,fp16', '--save-codes', folder
    status, out, err = run(*flags, '--json')
    document, entries = json.loads(out, parse_constant=pytest.fail), {entry.name: entry for entry in Logs(logs).entries}
    assert status == 0 and err == '' and len(list(folder.iterdir())) == len(document['tensors']) == 6
    for row in document['tensors']:
        entry = entries[row['name']]
        x = entry.load()
        codes = encode(x, row['format'], row['axis'])
        path, = (path for path in folder.iterdir() if entry.stem in path.name and f'.{row["format"]}.' in path.name)
        tensors = {key: (shape, dtype) for key, shape, dtype, _ in list_tensors(str(path))}
        metadata = json.loads(list_tensors(str(path))[0][3]['codes'])
        assert tensors['codes'] == (x.shape, 'uint16' if row['format'] == 'fp16' else 'uint8')
        assert (metadata['format'], metadata['axis'], metadata['file']) == (row['format'], row['axis'], entry.file)
        np.testing.assert_array_equal(read(str(path), 'codes'), np.asarray(codes.codes).reshape(x.shape))
        want = {'mxfp4': {'scales': 'float8_e8m0fnu'}, 'nvfp4': {'scales': 'float32', 'factor': 'float32'}, 'fp16': {}}
        assert {key: dtype for key, (_, dtype) in tensors.items() if key != 'codes'} == want[row['format']]
        if row['format'] == 'mxfp4':
            np.testing.assert_array_equal(read(str(path), 'scales'), np.exp2(np.asarray(codes.scales) - 127.0))
        if row['format'] == 'nvfp4':
            np.testing.assert_array_equal(read(str(path), 'scales'), codes.scales)
            np.testing.assert_array_equal(read(str(path), 'factor'), codes.factor)
        assert (row['scale_std'] is None) == (row['format'] == 'fp16') and row['code_std'] > 0
        valid = Logs(logs).mask(entry)
        assert sum(row['codes'].values()) == (x.size if valid is None else np.broadcast_to(valid, x.shape).sum())
    lines = run(*flags)[1].splitlines()
    assert lines[2].split()[-7:] == 'code std scale std format step tensor'.split()
    blank = [n for n, line in enumerate(lines) if not line]
    assert lines[blank[2] + 1].split(maxsplit=1)[1] == 'codes, % by octave'
    assert lines[blank[3] + 1].split(maxsplit=1)[1] == 'scales, % of blocks by octave' and lines[-1].split() == ['fp16', '-']
    shown = lines[blank[2] + 2:blank[3]]
    assert [line.split()[0] for line in shown] == ['mxfp4', 'nvfp4', 'fp16']
    total = sum(float(part.split()[-1]) for part in shown[0].split(maxsplit=1)[1].split(', '))
    assert total == pytest.approx(100, abs=0.5)


def test_safetensors_reads_the_files(tmp_path, run):
    load = pytest.importorskip('safetensors.numpy', reason='the oracle of safetensors files').load_file
    np.save(tmp_path / 'x.npy', np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32))
    (tmp_path / 'logs').mkdir()
    (tmp_path / 'x.npy').rename(tmp_path / 'logs/x.npy')
    run(tmp_path / 'logs', '--formats', 'nvfp4', '--save-codes', tmp_path / 'codes')
    path, = (tmp_path / 'codes').iterdir()
    codes = encode(np.load(tmp_path / 'logs/x.npy'), 'nvfp4')
    loaded = load(path)
    np.testing.assert_array_equal(loaded['codes'], codes.codes)
    np.testing.assert_array_equal(loaded['scales'], codes.scales)
    np.testing.assert_array_equal(loaded['factor'], codes.factor)


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path, run):
    (tmp_path / 'logs').mkdir()
    np.save(tmp_path / 'logs/x.npy', np.array([1, math.nan], np.float32))
    (tmp_path / 'file').write_text('')
    for folder, want in ((tmp_path / 'logs', 'is in the folder of saved tensors'),
                         (tmp_path / 'logs/codes', 'is in the folder of saved tensors'),
                         (tmp_path / 'file', 'cannot be written (File exists); name another folder')):
        status, out, err = run(tmp_path / 'logs', '--save-codes', folder)
        assert status == 2 and out == '' and err.count('\n') == 1 and '--save-codes' in err and want in err
    status, out, err = run(tmp_path / 'logs', '--formats', 'e2m1,fp16', '--save-codes', tmp_path / 'codes', '--json')
    document = json.loads(out, parse_constant=pytest.fail)
    assert status == 0 and [row['code_std'] is None for row in document['tensors']].count(True) == 1
    assert 'e2m1 has no code for infinities and NaN' in err and 'e2m1' in document['skipped'][0]['reason']
