"""Large tensors in inspect compare: read and measured by pieces, with the results of the whole tensor, in bounded memory."""
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from pyops import formats
from pyops.inspect import pieces
from pyops.inspect.compare import compare
from pyops.inspect.logs import LogError, Logs
from pyops.inspect.readers import flat, read

FORMATS = ('mxfp8', 'mxfp4:block=16:scale=even', 'mxfp6:hadamard=16', 'bf16:hadamard=32', 'hifp8', 'fp16', 'fp8', 'int8',
           'int4:block=24', 'mxfp8:block=4x4', 'fp8:block=16x16', 'int8:block=row', 'nvfp4', 'nvfp4:block=16x16:scale=mse',
           'nvfp4:hadamard=16', 'fp8:block=tensor', 'int8:block=tensor:hadamard=32', 'hifp8:amax_target=16', 'fp8:delayed',
           'fp8:factor=3')
WHOLE = 'int8:block=column', 'mxfp8:round=stochastic'


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, 'PIECE', 1000)


def same(got, want):
    """Counts and largest values are equal; what is made from sums is equal but for the order of the sums."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, dict) or name in ('overflow', 'poisoned', 'nan', 'inf', 'amax', 'max_abs_error', 'worst_block_db'):
            assert got[name] == value or math.isnan(value) and math.isnan(got[name]), name
        else:
            assert got[name] == pytest.approx(value, rel=1e-12, abs=1e-12, nan_ok=True), name


def by_whole(entry, fmt, axis, mask, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pieces, 'PIECE', 1 << 40)
        (row,), skipped = compare([entry], [formats.parse(fmt)], lambda entry: mask, axis)
    assert not skipped
    return row


@pytest.mark.parametrize('axis', [-1, 0, 1, 'tokens'])
@pytest.mark.parametrize('shape', [(70, 37), (3, 31, 48), (6000,), (1, 5000), (2, 3000, 1), (1, 900, 4)])
def test_pieces_have_the_measures_of_the_whole_tensor(tmp_path, shape, axis, small_pieces, monkeypatch):
    if axis == 1 and len(shape) == 1:
        axis = -1
    rng = np.random.default_rng(7)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))).astype(np.float32)
    flat_x = x.reshape(-1)
    flat_x[100], flat_x[1400], flat_x[2400], flat_x[40:90] = math.inf, math.nan, 1e30, 0
    np.save(tmp_path / 'x.npy', x)
    entry, = Logs(tmp_path).entries
    mask = rng.random((*shape[:-1], 1)) < 0.8 if len(shape) > 1 else None
    for fmt in FORMATS:
        for of in (None, mask):
            found = pieces.measure_in_pieces(entry, formats.parse(fmt), axis, of)
            layout = pieces.layout_of(shape, formats.parse(fmt), axis)
            assert (found is None) == (layout is None)
            if layout is None:
                assert 'x' in fmt.partition('block=')[2] or fmt.endswith('row')
                continue
            ranges = list(layout.pieces())
            assert [start for start, _, _ in ranges[1:]] == [stop for _, stop, _ in ranges[:-1]] and ranges[0][0] == 0
            assert ranges[-1][1] == x.size and (len(ranges) > 1 or layout.n_unit * layout.inner >= 1000 or not layout.n_unit)
            want = by_whole(entry, fmt, axis, of, monkeypatch)
            same(found[0], want.statistics)
            same(found[1], want.histograms)
            assert list(found[1]['exponents']) == list(want.histograms['exponents'])


def test_formats_that_need_the_whole_tensor_have_no_pieces(tmp_path, small_pieces, monkeypatch):
    np.save(tmp_path / 'x.npy', np.ones((70, 37), np.float32))
    entry, = Logs(tmp_path).entries
    for fmt in WHOLE:
        assert pieces.measure_in_pieces(entry, formats.parse(fmt), -1, None) is None
        assert compare([entry], [formats.parse(fmt)])[0][0].statistics['sqnr_db'] > 20
    assert pieces.measure_in_pieces(entry, formats.parse('mxfp8:block=4x4'), 0, None) is None
    monkeypatch.setattr(pieces, 'PIECE', 70 * 37)
    assert pieces.measure_in_pieces(entry, formats.parse('mxfp8'), -1, None) is None


def test_parts_of_a_file_are_those_of_the_tensor(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {'a': rng.integers(-9, 9, (3, 5)).astype(np.int16), 'b': rng.standard_normal((4, 6)), 'c': np.float32([[1], [2]]),
              'd': rng.random((2, 7)) < 0.5, 'e': rng.standard_normal((2, 9)).astype(np.float16)}
    for name, array in arrays.items():
        np.save(tmp_path / f'{name}.npy', array)
    header, data = {}, b''
    for name, (dtype, array) in {'x': ('BF16', np.arange(50, dtype='<u2') + 0x3f00), 'y': ('F32', np.arange(8, dtype='<f4')),
                                 'z': ('F8_E5M2', np.arange(256, dtype=np.uint8))}.items():
        header[name] = {'dtype': dtype, 'shape': [array.size], 'data_offsets': [len(data), len(data) + array.nbytes]}
        data += array.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / 'f.safetensors').write_bytes(len(text).to_bytes(8, 'little') + text + data)
    for path, key in [(f'{name}.npy', '') for name in arrays] + [('f.safetensors', key) for key in 'xyz']:
        file, whole = flat(str(tmp_path / path), key), read(str(tmp_path / path), key).reshape(-1)
        assert file.size == whole.size
        for start, stop in ((0, 1), (1, whole.size), (whole.size // 2, whole.size // 2 + 1), (0, whole.size)):
            np.testing.assert_array_equal(file.read(start, stop), whole[start:stop])
    assert flat(str(tmp_path / 'f.safetensors'), 'none') is None
    np.save(tmp_path / 'columns.npy', np.asfortranarray(arrays['b']))
    np.save(tmp_path / 'swapped.npy', arrays['b'].astype('>f8'))
    assert flat(str(tmp_path / 'columns.npy'), '') is None and flat(str(tmp_path / 'swapped.npy'), '') is None
    assert flat(str(tmp_path / 'x.pt'), '') is None


def test_a_file_that_was_cut_is_a_log_error(tmp_path, small_pieces):
    text = json.dumps({'tensor': {'dtype': 'F32', 'shape': [40, 100], 'data_offsets': [0, 16000]}}).encode()
    path = tmp_path / 'x.safetensors'
    path.write_bytes(len(text).to_bytes(8, 'little') + text + bytes(16000))
    entry, = Logs(tmp_path).entries
    assert pieces.measure_in_pieces(entry, formats.parse('bf16'), -1, None)[0]['sum_x2'] == 0
    os.truncate(path, 9000)
    with pytest.raises(LogError, match='x.safetensors: truncated or damaged'):
        pieces.measure_in_pieces(entry, formats.parse('bf16'), -1, None)
    rows, skipped = compare([entry], [formats.parse('bf16')])
    assert rows == [] and skipped[0][0] == 'x.safetensors' and 'truncated' in skipped[0][1]


def test_the_memory_does_not_grow_with_the_tensor(tmp_path):
    code = ('import sys\nfrom pyops import formats\nfrom pyops.inspect.compare import compare\n'
            'from pyops.inspect.logs import Logs\n'
            'rows, skipped = compare(Logs(sys.argv[1]).entries, [formats.parse(name) for name in ("mxfp8", "bf16", "nvfp4")])\n'
            'peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))\n'
            'print(peak, *[row.statistics["sqnr_db"] for row in rows])')
    x = np.random.default_rng(0).standard_normal((1, 1 << 21)).astype(np.float32)
    peaks, sqnr = [], []
    for megabytes in (16, 64):
        folder = tmp_path / str(megabytes)
        folder.mkdir()
        np.save(folder / 'x.npy', np.repeat(x, megabytes // 8, 0))
        done = subprocess.run([sys.executable, '-c', code, str(folder)], capture_output=True, text=True, cwd=ROOT, check=True)
        peak, *decibels = map(float, done.stdout.split())
        peaks.append(peak / 1024)
        sqnr.append(decibels)
    assert sqnr[1] == pytest.approx(sqnr[0], rel=1e-12) and len(sqnr[0]) == 3
    assert peaks[1] < peaks[0] + 12                 # MiB; the tensor alone would add 48
