"""inspect draw: the numbers behind every picture, pictures of all kinds of tensors, and a folder of them from one command."""
import collections
import contextlib
import dataclasses
import errno
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT
from dumps import make_dump, make_megatron_dump

from pyops import __main__ as program
from pyops import formats, training
from pyops.inspect import colours, statistics
from pyops.inspect.draw import FOLDERS, Options, _by_step, _choose, draw
from pyops.inspect.logs import Logs, curves
from pyops.inspect.pictures import attention, numbers, overview, style, tensors
from pyops.inspect.writer import Writer

RNG = np.random.default_rng(0)
ATTENTION, LINEAR = 'encoder.0.self_attention', 'encoder.0.self_attention.q'
DRAWN = 'input', 'weights', 'grad_weight'


@pytest.fixture(scope='module', autouse=True)
def matplotlib():
    return pytest.importorskip('matplotlib', reason='matplotlib is not installed: pip install matplotlib')


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """No time passes in the eyes of training.Progress, or a slow machine would print lines that others do not."""
    monkeypatch.setattr(training, 'time', SimpleNamespace(perf_counter=lambda: 0.0))


@pytest.fixture(scope='module')
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp('dump')
    make_dump(folder, layers=(LINEAR, ATTENTION))
    return folder


@pytest.fixture(scope='module')
def drawn(dump, tmp_path_factory):
    """-> the folder and the Summary of 6 tensors, 4 of them with pictures."""
    folder = tmp_path_factory.mktemp('drawn') / 'draw'
    return folder, draw(dump, folder, Options(names=DRAWN, limit=4, sentences=2, jobs=1, dpi=50, page=False))


def entry_of(shape, fmt=None, **more):
    return SimpleNamespace(**{'layer': LINEAR, 'layer_type': 'linear', 'operation': 'forward', 'name': 'input', 'step': 10,
                              'time': None, 'fmt': fmt and formats.parse(fmt), 'axis': -1, 'statistics': None, 'shape': shape,
                              'origin': 'pyops', 'mask': (), 'is_weights': False, 'place': '', **more})


def assert_picture(path):
    """A PNG of ours of a sane size that is neither blank nor cut off, with ink and colour."""
    from matplotlib.image import imread
    assert path.read_bytes().startswith(b'\x89PNG') and style.is_ours(path, as_named=True)
    pixels = imread(path)[..., :3]
    assert 100 < min(pixels.shape[:2]) and max(pixels.shape[:2]) < 4000
    assert np.ptp(pixels) > 0.6 and 0.002 < (pixels.min(-1) < 0.9).mean() < 0.95
    return pixels


def texts_of(sheet):
    from matplotlib.text import Text
    return [label.text for label in sheet.labels] + [text.get_text() for text in sheet.figure.findobj(Text) if text.get_text()]


# ---- numbers: distributions ------------------------------------------------------------------------------------------

def test_binades_are_exact_and_add_up():
    x = np.array([1, 1.99999988, 2, -0.5, -0.49999997, 0, -0.0, 1e-45, np.inf, -np.inf, np.nan, 3e38], np.float32)
    counts = numbers.binades(x)
    where = {(int(sign), int(e)): int(counts[sign, e]) for sign, e in np.argwhere(counts)}
    nan = (int(np.signbit(x[10])), 255)
    want = {(0, 127): 2, (0, 128): 1, (1, 126): 1, (1, 125): 1, (0, 0): 1, (0, 255): 1, (1, 255): 1, (0, 254): 1}
    want[nan] = want.get(nan, 0) + 1
    assert where == want
    assert numbers.span_of(counts) == (-127, 127) and numbers.span_of(numbers.binades(np.zeros(3, np.float32))) is None
    large = RNG.standard_normal((1 << 20) + 77).astype(np.float32)
    both = numbers.binades(large[:1000]) + numbers.binades(large[1000:])
    assert (numbers.binades(large) == both).all() and both.sum() == np.count_nonzero(large)
    exponents = np.frexp(large[large != 0])[1] - 1
    assert (both.sum(0)[numbers.span_of(both)[0] + 127:][:3] == np.bincount(exponents - exponents.min())[:3]).all()


def test_a_sample_is_fixed_and_takes_no_value_twice():
    values = np.arange(1_000_003, dtype=np.float32)
    picked = numbers.sample(values, 1000)
    assert len(picked) == len(set(picked)) == 1000 and (picked == numbers.sample(values, 1000)).all()
    assert (np.abs(picked - np.linspace(0, len(values), 1000)) < 2100).all()            # one from every stretch
    assert numbers.sample(values[:7], 1000) is not None and len(numbers.sample(values[:7], 1000)) == 7


def test_the_histogram_counts_every_finite_value():
    x = RNG.standard_normal(5000).astype(np.float32)
    x[:3] = np.nan, np.inf, -np.inf
    edges, counts = numbers.histogram(x)
    finite = x[3:].astype(np.float64)
    assert counts.sum() == 4997 and edges[0] == finite.min() and edges[-1] == finite.max() and len(counts) == 100
    assert (counts == np.histogram(finite, edges)[0]).all()
    assert numbers.histogram(x[:3]) is None
    for constant in (np.zeros(9), np.full(9, -0.3), np.full(9, 1e38)):
        edges, counts = numbers.histogram(constant.astype(np.float32))
        assert counts.tolist() == [9] and edges[0] < constant[0] < edges[1]
    assert numbers.histogram(np.array([-3e38, 3e38], np.float32))[1].sum() == 2         # their difference overflows float32


def test_normal_quantiles_lie_on_a_line_for_normal_values_alone():
    expected, observed = numbers.normal_quantiles(RNG.normal(3, 2, 60_000).astype(np.float32))
    middle = slice(20, -20)
    assert np.abs(expected - observed)[middle].max() < 0.3 and abs(expected.mean() - 3) < 0.1
    expected, observed = numbers.normal_quantiles(RNG.standard_t(2, 60_000).astype(np.float32))
    assert observed[-1] > 2 * expected[-1] and observed[0] < 2 * expected[0]             # heavy tails
    assert [len(side) for side in numbers.normal_quantiles(np.arange(5, dtype=np.float32))] == [5, 5]
    assert numbers.normal_quantiles(np.ones(50, np.float32)) is None is numbers.normal_quantiles(np.arange(2.0))


def test_boxes_are_quartiles_of_all_and_of_each_group():
    x = RNG.standard_normal((20, 30)).astype(np.float32)
    x[:, 25:] *= 100
    found = numbers.boxes(x)
    assert [box.label for box in found][:3] == ['all', '0–1', '2–4'] and len(found) == 13
    for box, part in ((found[0], x), (found[1], x[:, :2]), (found[-1], x[:, 27:])):
        assert np.allclose([box.q1, box.median, box.q3], np.quantile(part, [0.25, 0.5, 0.75]), rtol=1e-6)
        reach = 1.5 * (box.q3 - box.q1)
        inside = part[(part >= box.q1 - reach) & (part <= box.q3 + reach)]
        assert (box.low, box.high) == (inside.min(), inside.max())
        assert len(box.outliers) == min(part.size - inside.size, 60)
    heads = numbers.boxes(RNG.standard_normal((5, 3, 2, 8)).astype(np.float32), heads_axis=2)
    assert [box.label for box in heads] == ['all', '0', '1']
    mask = np.arange(20)[:, None] < 1
    assert numbers.boxes(x, mask)[0].median == np.median(x[0].astype(np.float64))
    assert numbers.boxes(np.full((3, 3), np.nan, np.float32)) == []


# ---- numbers: maps ---------------------------------------------------------------------------------------------------

def test_a_view_lays_out_each_kind_of_tensor():
    x = np.arange(5 * 3 * 2 * 4, dtype=np.float32).reshape(5, 3, 2, 4)
    view = numbers.view_of(x.shape, 'attention', 'query')
    assert view.matrix == (15, 8) and view.row_lines == (5, 10) and view.column_lines == (4,)
    assert view.of(x)[5 * 2 + 4, 4 * 1 + 3] == x[4, 2, 1, 3]
    p = np.arange(6 * 2 * 3 * 4, dtype=np.float32).reshape(6, 2, 3, 4)
    view = numbers.view_of(p.shape, 'attention', 'weights')
    assert view.matrix == (12, 8) and view.of(p)[3 * 3 + 2, 4 + 1] == p[3, 1, 2, 1] and 'first 4 of 6' in view.rows
    assert (view.of(np.ones((6, 1, 3, 4), bool))).all()                                 # what broadcasts, a mask, goes along
    tokens = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    assert numbers.view_of((3, 2, 4)).of(tokens)[3 + 2].tolist() == tokens[2, 1].tolist()
    view = numbers.view_of((3, 2, 4), batch=0)
    assert view.of(tokens)[2 + 1].tolist() == tokens[1, 1].tolist() and view.row_lines == (2, 4)
    assert numbers.view_of((3, 2, 4), batch=None).row_lines == () and 'token' not in numbers.view_of((3, 2, 4), batch=None).rows
    assert numbers.view_of((3, 2), name='weight').rows == 'output' == numbers.view_of((3, 2), name='weight', axis=0).columns
    bias = np.arange(70, dtype=np.float32)
    folded = numbers.view_of((70,)).of(bias)
    assert folded.shape == (3, 32) and folded[2, 5] == 69 and np.isnan(folded[2, 6:]).all() and not np.isnan(folded[:2]).any()
    assert numbers.view_of((2, 2, 2, 2, 3)).of(np.zeros((2, 2, 2, 2, 3))).shape == (16, 3)


def test_shrinking_keeps_outliers_with_their_sign():
    x = RNG.standard_normal((1000, 999)).astype(np.float32)
    x[500, 333], x[77, 77] = -100, 90
    small = numbers.shrink(x, 30, 40)
    assert small.shape == (30, 40) and small.min() == -100 and small.max() == 90
    row, column = np.argwhere(small == -100)[0]
    assert row == 500 * 30 // 1000 and column == 333 * 40 // 999
    assert np.abs(small).min() > 1.5                # of 825 normal numbers the largest
    x[3, 3] = np.nan
    assert np.isnan(numbers.shrink(x, 30, 40)[0, 0]) and np.isnan(numbers.shrink(x, 30, 40)).sum() == 1
    assert (numbers.shrink(x[:20, :20], 30, 40)[1:3] == x[1:3, :20]).all()


def test_limits_of_colours():
    x = RNG.standard_normal((100, 100)).astype(np.float32)
    low, high, beyond, signed = numbers.limits(x)
    assert (-low, high, beyond, signed) == (np.abs(x).max(), np.abs(x).max(), 0, True)
    x[0, 0] = 1000                                  # one outlier does not turn the rest white
    low, high, beyond, _ = numbers.limits(x)
    assert 2.5 < high == -low < 4 and 0 < beyond < 0.01
    assert numbers.limits(np.abs(x[1:]))[0] == 0 and not numbers.limits(np.abs(x[1:]))[3]
    assert numbers.limits(np.zeros((2, 2)))[:2] == (0, 0) == numbers.limits(np.full((2, 2), np.nan))[:2]


def test_limits_of_colours_by_the_root_mean_square():
    x = np.array([[0.5, -1, 100, 2]], np.float32)
    assert numbers.limits(x, 3.0) == (-12.0, 12.0, 0.25, True)
    assert numbers.limits(np.abs(x), 3.0) == (0.0, 12.0, 0.25, False)
    assert numbers.limits(x[:, :2], 3.0)[:2] == (-1.0, 1.0)                     # nothing is beyond
    assert numbers.limits(x, 0.0) == numbers.limits(x) and numbers.limits(x, math.nan) == numbers.limits(x)
    wide = np.full((20, 40), 1, np.float32)
    wide[3, 4:6] = 30, -40
    end = style.number(4 * float(np.sqrt((wide.astype(np.float64) ** 2).mean())))
    for is_rms in (False, True):
        sheet = tensors.draw_heatmap(tensors.analyse(entry_of(wide.shape), wide, None, [], is_rms=is_rms))
        assert (end in texts_of(sheet)) == is_rms


def test_the_window_shows_the_largest_value():
    x = RNG.standard_normal((300, 400))
    x[299, 399] = 50
    rows, columns = numbers.patch_of(x)
    assert x[rows, columns].shape == (24, 32) and x[rows, columns].max() == 50
    assert [side.start for side in numbers.patch_of(np.full((3, 3), np.nan))] == [0, 0]


def test_relative_errors():
    x = np.array([1, 1, 1, 1, 0, np.nan, 8], np.float32)
    q = np.array([1.26, 0.74, 1, 0, 5, 1, np.inf], np.float32)
    edges, shares = numbers.relative_errors(x, q)
    assert edges[0] == -24 and edges[-1] == 2
    at = {float(edges[i]): round(float(shares[i]) * 4) for i in np.flatnonzero(shares)}
    below = edges[np.searchsorted(edges, math.log2(0.26), 'right') - 1]
    zero = edges[np.searchsorted(edges, 0, 'right') - 1]
    assert at == {below: 2, zero: 1}


# ---- a tensor ----------------------------------------------------------------------------------------------------------

def test_analyse_knows_errors_scales_and_padding():
    x = RNG.standard_normal((4, 3, 64)).astype(np.float32)
    x[:, :, 32:] *= 2 ** -10
    mask = (np.arange(4)[:, None] < [4, 2, 1])[:, :, None]
    x[~np.broadcast_to(mask, x.shape)] = 1e6        # rubbish behind the ends of sentences must not be seen
    fmts = [formats.parse(text) for text in ('mxfp8', 'bf16', 'hifp8:amax_target=8', 'fp8:delayed:margin=1', 'fp8:factor=0.5')]
    tensor = tensors.analyse(entry_of(x.shape, 'mxfp8'), x, mask, fmts)
    values = x[np.broadcast_to(mask, x.shape)]
    assert tensor.statistics['count'] == values.size == tensor.counts.sum() == tensor.histogram[1].sum()
    assert tensor.statistics['amax'] == np.abs(values).max() == tensor.patch.max(initial=0) or tensor.patch.min() < 0
    padding = ~np.broadcast_to(mask, x.shape).transpose(1, 0, 2).reshape(12, 64)
    assert (tensor.cover == padding * numbers.PADDING).all() and not tensor.values[padding].any()
    for rounded, fmt in zip(tensor.rounded, fmts, strict=True):
        error = (formats.fake_quantize(x, fmt) - x).transpose(1, 0, 2).reshape(12, 64)
        assert (rounded.error == np.where(padding, 0, error)).all()
        assert rounded.statistics['sqnr_db'] == statistics.quantization(x, fmt, -1, mask)['sqnr_db']
    mx, bf16, target, delayed, fixed = tensor.rounded
    blocks = np.abs(x).transpose(1, 0, 2).reshape(12, 2, 32).max(2)
    want = np.floor(np.log2(blocks)).repeat(32, 1) - 8
    assert (mx.scales[~padding] == want[~padding]).all() and bf16.scales is None
    assert mx.exponents == tuple(np.quantile(want[~padding], (0, 0.5, 1)))
    assert target.exponents[1] == math.log2(1e6 / 8)
    assert delayed.exponents[1] == math.log2(1e6 / 224) and fixed.exponents[1] == 1
    assert tensor.kind == 'activations' and tensors.subtitle_of(entry_of((4, 3, 64), 'mxfp8')).endswith('trained with mxfp8')


EDGES = {
    'one': (np.array([1.5]), {}), 'scalar': (np.array(3.0), {}), 'zeros': (np.zeros((8, 16)), {}),
    'nan': (np.full((4, 4), np.nan), {}), 'inf': (np.array([[np.inf, -np.inf, 1], [np.nan, 0, -2]]), {}),
    'empty': (np.zeros((0, 5)), {}), 'subnormal': (np.full((2, 40), 1e-42), {}),
    'huge': (RNG.standard_normal((9, 9)) * 1e38, {}),
    'bias': (RNG.standard_normal(70), {'name': 'bias'}),
    'heads': (RNG.standard_normal((3, 2, 2, 8)), {'layer_type': 'attention', 'name': 'value', 'axis': 0}),
    'deep': (RNG.standard_normal((2, 3, 2, 2, 3)), {'layer': 'module.' * 60, 'operation': 'backward', 'name': 'grad_$x_1$'}),
}


@pytest.mark.parametrize('name', EDGES)
@pytest.mark.filterwarnings('error')
def test_any_tensor_is_drawn(name, tmp_path):
    x, more = EDGES[name]
    fmts = [formats.parse(text) for text in ('mxfp4:scale=even', 'hifp8', 'nvfp4:block=2x16')]
    tensor = tensors.analyse(entry_of(x.shape, **more), x.astype(np.float32), None, fmts)
    with style.look():
        for kind, function in tensors.DRAW.items():
            sheet = function(tensor)
            labels = sheet.labels
            assert sheet.save(tmp_path / f'{kind}.png', 50)
            for label in labels:                    # nothing runs out of the picture
                alone = style.Sheet(sheet.width + 2, sheet.height + 2, '')
                alone.labels = [label._replace(x=label.x + 1, y=label.y + 1)]
                rows, columns = np.nonzero((alone.pixels(50) < 255).any(-1))
                assert len(rows) and 47 < columns.min() and columns.max() < sheet.width * 50 + 53, (kind, label)
                assert 47 < rows.min() and rows.max() < sheet.height * 50 + 53, (kind, label)
            assert_picture(tmp_path / f'{kind}.png')


def pixels_of(sheet):
    """The colours of a Sheet, (rows, columns, 3)."""
    return sheet.pixels(100)


def test_cells_beyond_the_end_of_a_vector_and_scales_of_zero_blocks_are_blank():
    x = RNG.standard_normal(361).astype(np.float32)                 # folded into rows of 32
    x[64:128] = 0
    tensor = tensors.analyse(entry_of(x.shape, name='bias'), x, None, [formats.parse('mxfp8')])
    mx, = tensor.rounded
    rows = tensor.values.shape[0]
    assert tensor.values.size - 361 == (tensor.cover == numbers.MISSING).sum() > 0 and np.isfinite(tensor.values).all()
    blank = np.zeros(tensor.values.size, bool)
    blank[361:] = blank[64:128] = True
    assert ((mx.cover == numbers.MISSING).reshape(-1) == blank).all() and mx.scales[mx.cover == 0].min() > -20
    assert mx.exponents[0] > -20
    broken = [round(255 * part) for part in (0xd6 / 255, 0, 0x8f / 255)]
    with style.look():
        for function in tensors.DRAW.values():
            sheet = function(tensor)
            assert not (pixels_of(sheet) == broken).all(-1).any() and not any('NaN' in text for text in texts_of(sheet))
    padded = numbers.view_of((6, 2, 4)).cover((np.arange(6)[:, None] < [6, 3])[:, :, None])
    assert rows > 1 and padded.sum() == 3 * 4 * numbers.PADDING and numbers.view_of((64,)).cover(None) is None


def test_small_text_is_legible_and_the_colours_of_roles_are_of_no_format():
    names = [*colours.FORMATS, 'mxfp8:scale=rceil', 'mxfp4:block=16', 'unknown']
    for color in [*map(style.color_of, names), *style.KINDS.values(), *style.NAME_COLORS, style.GREY, style.BROKEN]:
        assert colours.contrast(style.ink_of(color)) >= 4.5, color
    assert all(colours.contrast(color) >= 4.5 for color in style.KINDS.values())
    assert not set(style.KINDS.values()) & {style.color_of(name) for name in names}
    assert colours.contrast('#000000') == pytest.approx(21) and colours.contrast('#ffffff') == pytest.approx(1)
    tensor = tensors.analyse(entry_of((40, 40), 'mxfp8'), RNG.standard_normal((40, 40)).astype(np.float32), None,
                             list(map(formats.parse, formats.FORMATS)))
    from matplotlib.colors import to_hex
    from matplotlib.text import Text
    with style.look():
        for function in tensors.DRAW.values():
            for text in function(tensor).figure.findobj(Text):
                assert not text.get_text().strip(style.SQUARE) or colours.contrast(to_hex(text.get_color())) >= 4.5, text


def test_boxes_stay_visible_beside_far_outliers():
    x = 1e-6 * RNG.standard_normal((64, 48)).astype(np.float32)
    x[3, 5], x[40, 30] = 0.05, -0.02                                # as in gradients
    tensor = tensors.analyse(entry_of(x.shape, name='grad_input', operation='backward'), x, None, [])
    with style.look():
        sheet = tensors.draw_distribution(tensor)
        texts = texts_of(sheet)
    from matplotlib.collections import PolyCollection
    (axes, bodies), = ((axes, part.get_paths()) for axes in sheet.figure.axes for part in axes.collections
                       if type(part) is PolyCollection)
    low, high = axes.get_ylim()
    assert all(np.ptp(path.vertices[:, 1]) > (high - low) / 60 for path in bodies) and len(bodies) == 13
    assert 'value, asinh scale' in texts and {'0.01', '0.0001'} <= set(texts)


def test_errors_of_a_coarse_format_do_not_hide_those_of_a_fine_one():
    x = RNG.standard_normal((24, 32)).astype(np.float32)
    tensor = tensors.analyse(entry_of(x.shape), x, None, [formats.parse('mxfp4'), formats.parse('bf16')])
    errors = [np.abs(rounded.patch - tensor.patch).max() for rounded in tensor.rounded]
    with style.look():
        texts = texts_of(tensors.draw_comparison(tensor))
    assert errors[0] > 20 * errors[1] and all(f'± {style.number(error)}' in texts for error in errors)


def test_pictures_of_a_dump_of_megatron_keep_ranks_samples_and_phases_apart(tmp_path, torch):
    arrays = make_megatron_dump(tmp_path / 'dump', iterations=(10,))
    summary = draw(tmp_path / 'dump', tmp_path / 'draw', Options(formats='mxfp8', limit=8, sentences=1, jobs=1, dpi=40,
                                                                 page=False))
    assert summary.tensors == len(arrays) == 32 and summary.skipped == []
    names = os.listdir(tmp_path / 'draw/attention_maps')
    assert sorted(names) == sorted(
        f'step000010_attention_L1_forward_attention_weights_post_FA_rank{rank:02d}_sample{sample:03d}_group000_sentence0.png'
        for rank in (0, 1) for sample in (0, 1))
    assert len(os.listdir(tmp_path / 'draw/heatmaps')) == 8
    layers = {name for name in os.listdir(tmp_path / 'draw/statistics') if name.startswith('layer')}
    assert len(layers) == 8 and 'layer_attention_L1_pre-FA-rank-0-sample-1.png' in layers
    table = (tmp_path / 'draw/tensor_stats.txt').read_text().splitlines()
    assert table[2].split()[:9] == ['step', 'layer', 'operation', 'tensor', 'phase', 'component', 'rank', 'sample', 'group']
    rows = [line.split()[:9] for line in table[3:35]]
    assert rows[0] == ['10', 'attention_L1', 'forward', 'query', 'pre', 'FA', '0', '0', '0']
    assert len(set(map(tuple, rows))) == 32


def test_each_run_has_a_curve_of_its_own(tmp_path):
    steps = [{'step': step, 'loss': 1.0 + run, 'norm': None, 'training': run, 'folder': ''}
             for run in range(3) for step in range(5)]
    with style.look():
        sheet = overview.draw_training(curves(steps))
    lines = [line for axes in sheet.figure.axes for line in axes.lines if len(line.get_xdata()) == 5]
    assert [line.get_ydata().tolist() for line in lines] == [[1.0] * 5, [2.0] * 5, [3.0] * 5]
    assert len({line.get_color() for line in lines}) == 3 and {'run 1', 'run 2', 'run 3'} <= set(texts_of(sheet))
    records = [record(losses={'mxfp8': {'sum_x2': 1.0, 'sum_e2': 0.1}}, step=step) for step in (0, 1)]
    ranks = [dataclasses.replace(one, place=f'rank {rank}') for one in records for rank in (0, 1)]
    with style.look():
        texts = texts_of(overview.draw_sqnr(ranks, ['mxfp8'])[0]) + texts_of(overview.draw_magnitudes(ranks)[0])
    assert texts.count('a  input  rank 0') == texts.count('a  input  rank 1') == 2


def test_the_pictures_say_what_they_show():
    x = RNG.standard_normal((300, 500)).astype(np.float32)
    tensor = tensors.analyse(entry_of(x.shape, 'mxfp8', name='weight'), x, None,
                             [formats.parse('mxfp8'), formats.parse('bf16')])
    with style.look():
        texts = {kind: ' '.join(texts_of(function(tensor))) for kind, function in tensors.DRAW.items()}
    for text in texts.values():
        assert f'{LINEAR}  ·  weight' in text and 'step 10  ·  forward  ·  300 × 500  ·  trained with mxfp8' in text
    assert 'of a sample of 65,536 values' in texts['distributions'] and '150,000' in texts['distributions']
    assert 'each cell shows the largest magnitude of 2 × 2' in texts['heatmaps'] and 'blocks of 32' in texts['heatmaps']
    noise = statistics.quantization(x, 'mxfp8')
    assert all(f'{noise["sqnr_db"]:.1f} dB' in texts[kind] for kind in ('heatmaps', 'comparisons'))
    assert f'{noise["cosine"]:.6f}' in texts['comparisons']


# ---- attention ---------------------------------------------------------------------------------------------------------

def test_attention_maps_have_the_words_of_the_sentence(dump):
    logs = Logs(dump)
    (entry,) = [entry for entry in logs.entries if entry.name == 'weights' and entry.step == 10]
    x, mask = entry.load(), logs.mask(entry)
    maps, words, padding = attention.heads_of(x, mask, 2, logs.tokens(entry, 2))
    assert maps.shape == (2, 4, 4) and padding == (3, 3)                                # 2 words, 2 of 3 positions of padding
    assert words == (['no', '<eos>', '', ''],) * 2
    assert (maps == x[2, :, :4, :4]).all() and np.allclose(maps[:, :2, :2].sum(-1), 1)
    maps, words, padding = attention.heads_of(x[:, 0], None, 0)
    assert maps.shape == (1, 5, 5) and words[0] == ['0', '1', '2', '3', '4'] and padding == (0, 0)
    with style.look():
        sheet = attention.draw_maps('a', 'b', *attention.heads_of(x, mask, 0, logs.tokens(entry, 0)))
    texts = texts_of(sheet)
    # a row's and two columns' labels
    assert texts.count('sleeping') == 1 + 2 and {'head 0', 'head 1', '<eos>'} <= set(texts)
    assert any('padding (1 queries, 1 keys)' in text for text in texts)


@pytest.mark.parametrize('heads,size,labels', [(1, 1, 1), (3, 30, 30), (2, 500, 36), (40, 3, 3)])
def test_attention_maps_of_any_length(heads, size, labels, tmp_path):
    maps = RNG.random((heads, size, size)).astype(np.float32)
    words = ['internationalisation' if i == 1 else f'$w_{i}\x1b' for i in range(size)]
    with style.look():
        sheet = attention.draw_maps('a', 'b', maps, (words, words), (0, 0))
        assert sheet.save(tmp_path / 'map.png', 50)
    assert_picture(tmp_path / 'map.png')
    rows = [text for text in texts_of(sheet) if text.startswith('$w_') and text.endswith('�')]
    assert len(rows) <= labels * 2 * min(heads, 32) and len(set(rows)) >= min(labels, 30) - 1
    assert heads <= 32 or any('heads 0 to 31 of 40' in text for text in texts_of(sheet))


# ---- the whole ---------------------------------------------------------------------------------------------------------

def record(layer='a', name='input', step=0, rms=1.0, count=4, losses=None, operation='forward', **more):
    described = {'count': count, 'nan': 0, 'inf': 0, 'zeros': 1, 'amax': 2 * rms, 'mean': 0.0, 'mean_abs': rms, 'rms': rms,
                 'std': rms,
                 'min': -rms, 'max': rms}
    return overview.Record(layer, 'linear', operation, name, step, None, 'fp32', (count,), 'file', described | more,
                           numbers.binades(np.full(count, rms, np.float32)), losses or {})


def test_sums_over_tensors():
    one = {'mxfp8': {'sum_x2': 100.0, 'sum_e2': 1.0}}
    two = {'mxfp8': {'sum_x2': 1.0, 'sum_e2': 1.0}, 'bf16': {'sum_x2': 1.0, 'sum_e2': 0.0}}
    records = [record(losses=one), record(losses=two, rms=3.0, count=12)]
    assert overview.sqnr(records, 'mxfp8') == 10 * math.log10(101 / 2) and overview.sqnr(records, 'bf16') == math.inf
    assert overview.sqnr(records, 'fp16') is None
    assert overview.rms(records) == math.sqrt((4 * 1 + 12 * 9) / 16) and overview.amax(records) == 6
    assert overview.rms([]) is None is overview.amax([])
    counts, values, zeros, nan, inf = overview.totals([*records, record(operation='backward'), record(name='weight', nan=2)])
    assert {kind: int(count.sum()) for kind, count in counts.items()} == {'activations': 16, 'weights': 4, 'gradients': 4}
    assert (values, zeros, nan, inf) == (24, 4, 2, 0)
    assert overview.shares(records + [record(layer='b')], lambda r: r.layer) == [('a', 2), ('b', 1)]
    assert overview.some_steps(list(range(0, 1000, 10))) == [0, 200, 400, 590, 790, 990] and overview.some_steps([]) == []


def test_gradients_flow_through_layers_in_order_of_the_forward_pass():
    records = [record('a'), record('b'), record('b', 'grad_output', 5, 2.0, operation='backward'),
               record('b', 'grad_query', 5, 3.0, operation='backward'), record('b', 'grad_key', 5, 4.0, operation='backward'),
               record('a', 'grad_weight', 7, 0.5, operation='backward')]
    layers, steps, flows = overview.gradient_flow(records)
    assert layers == ['a', 'b'] and steps == [5, 7]
    assert flows['at the output'][1, 0] == 2 and flows['at the input'][1, 0] == math.sqrt((9 + 16) / 2)
    assert flows['of the weight'][0, 1] == 0.5 and np.isnan(flows['of the weight'][1]).all()


def test_a_layer_at_one_step_and_over_several():
    losses = {'mxfp8': {'sum_x2': 100.0, 'sum_e2': 0.1}, 'bf16': {'sum_x2': 100.0, 'sum_e2': 0.0}}
    records = [record('a.b', name, step, losses=losses) for name in ('input', 'weight') for step in (0, 10)]
    with style.look():
        one = texts_of(overview.draw_layer('a.b', records[::2], ['mxfp8', 'bf16']))
        two = texts_of(overview.draw_layer('a.b', records, ['mxfp8', 'bf16']))
    assert {'a.b', 'linear  ·  step 0', 'input', 'weight', '■', 'mxfp8', 'bf16'} <= set(one)
    assert {'a.b', 'linear  ·  2 steps, 0 to 10', 'SQNR of input', 'SQNR of weight', '■', 'mxfp8', 'bf16'} <= set(two)


def test_statistics_of_many_layers_come_in_pages(tmp_path):
    losses = {'mxfp8': {'sum_x2': 100.0, 'sum_e2': 0.1}}
    records = [record(f'decoder.layers.{i}.self_attention.a_long_name_of_a_projection', name, step, 10.0 ** -i, losses=losses,
                      operation='backward' if name.startswith('grad') else 'forward')
               for i in range(24) for name in ('input', 'grad_output') for step in range(0, 90, 10)]
    with style.look():
        pages = {'flow': overview.draw_gradient_flow(records), 'sizes': overview.draw_magnitudes(records),
                 'sqnr': overview.draw_sqnr(records, ['mxfp8'])}
        assert {name: len(sheets) for name, sheets in pages.items()} == {'flow': 1, 'sizes': 2, 'sqnr': 2}
        assert any('6 of 9 steps' in text for text in texts_of(pages['flow'][0]))
        assert any('tensors 41 to 48 of 48' in text for text in texts_of(pages['sizes'][1]))
        assert '30.0' in texts_of(pages['sqnr'][0])
        pages['sizes'][1].save(tmp_path / 'page.png', 50)
    assert_picture(tmp_path / 'page.png')


def test_entropy_is_a_table_of_heads_at_the_first_and_the_last_step(tmp_path):
    records = [dataclasses.replace(record('a.attention', 'weights', step), entropy=(0.25, 0.5 + step / 100, math.nan))
               for step in (0, 10, 20)]
    records += [dataclasses.replace(record('b.attention', 'weights', 20), entropy=(1.0,)), record('b.q')]
    with style.look():
        first, last = overview.draw_entropy(records)
        texts, after = texts_of(first), texts_of(last)
        last.save(tmp_path / 'page.png', 50)
    assert {'0.25', '0.50', style.MINUS, 'head 2', 'a.attention'} <= set(texts) and 'b.attention' not in texts
    assert {'0.25', '0.70', '1.00', 'head 2', 'b.attention'} <= set(after) and after.count(style.MINUS) == 3
    assert any('step 0; 0: one key' in text for text in texts) and any('step 20; 0: one key' in text for text in after)
    assert_picture(tmp_path / 'page.png')
    assert overview.draw_entropy([record()]) == []


def test_nan_and_infinities_are_a_table_of_layers_and_steps_from_the_first_on(tmp_path):
    records = [record(layer, name, step, nan=nan, inf=inf) for layer, name, step, nan, inf in (
        ('a', 'input', 0, 0, 0), ('b', 'input', 0, 0, 0), ('a', 'input', 10, 0, 0), ('b', 'input', 10, 2, 1),
        ('b', 'output', 10, 1, 0), ('a', 'input', 20, 1234, 0), ('c', 'input', 20, 0, 0), ('b', 'input', 20, 9, 0))]
    with style.look():
        sheet, = overview.draw_broken(records)
        texts = texts_of(sheet)
        sheet.save(tmp_path / 'page.png', 50)
    assert 'c' not in texts and texts.index('b') < texts.index('a') and {'4', '9', '1,234', 'step 10'} <= set(texts)
    assert texts.count('0') == 3 and any('first in step 10, b forward input' in text for text in texts)
    assert_picture(tmp_path / 'page.png')
    assert overview.draw_broken(records[:3]) == []
    many = [record('a', 'input', step, nan=int(step == 7)) for step in range(100)]
    with style.look():
        columns = {text for text in texts_of(overview.draw_broken(many)[0]) if text.startswith('step ')}
    assert len(columns) == 12 and {'step 0', 'step 7', 'step 99'} <= columns


def test_the_first_nan_and_the_first_overflow_of_each_format_are_reported(tmp_path):
    def losses(overflow):
        return {'fp16': {'sum_x2': 1.0, 'sum_e2': math.inf, 'overflow': overflow},
                'bf16': {'sum_x2': 1.0, 'sum_e2': 0.0, 'overflow': 0}}
    records = [record('a', losses=losses(0)), record('b', 'grad_output', 3, operation='backward', losses=losses(2), count=9),
               record('b', 'weight', 3, losses=losses(5)), record('c', step=4, nan=1, inf=2), record('d', step=5, nan=7)]
    assert overview.first_losses(records, ['fp16', 'bf16']) == [
        'first NaN or infinity: step 4, c forward input: 1 NaN and 2 infinities in 4 values',
        'first overflow in fp16: step 3, b backward grad_output: 2 of 9 values']
    assert overview.first_losses(records[:1], ['fp16', 'bf16']) == []
    (tmp_path / 'logs').mkdir()
    for counter, values in enumerate(([1, 2], [7e4, np.nan])):
        name = f'20250908_092156_000{counter}_linear_L0_forward_fp32_{"io"[counter]}.npy'
        np.save(tmp_path / 'logs' / name, np.array(values, 'f4'))
    summary = draw(tmp_path / 'logs', tmp_path / 'draw', Options(formats='fp16,bf16', jobs=1, dpi=60, page=False))
    lines = ['first NaN or infinity: step 0, linear_L0 forward o: 1 NaN and 0 infinities in 2 values',
             'first overflow in fp16: step 0, linear_L0 forward o: 1 of 2 values']
    assert summary.notes == lines and set(lines) <= set((tmp_path / 'draw/tensor_stats.txt').read_text().splitlines())
    assert_picture(tmp_path / 'draw/statistics/broken.png')


def test_the_quick_analysis_has_bars_with_numbers_and_shares():
    records = [dataclasses.replace(record(f'{i}', count=2), format=fmt) for i, fmt in enumerate(['mxfp8'] * 3 + ['fp32'])]
    with style.look():
        texts = texts_of(overview.draw_quick_analysis(records, 'Quick analysis', ''))
    assert {'Tensors by format', 'mxfp8', 'fp32', '3  75 %', '1  25 %', '4  100 %'} <= set(texts)


def test_the_last_and_the_first_step_come_first():
    entries = [SimpleNamespace(step=step) for step in (0, 10, 20, 30, 40, 40)]
    assert [entry.step for entry in _by_step(entries)] == [40, 40, 0, 20, 10, 30]


def test_pictures_are_spread_over_what_there_is():
    entries = [SimpleNamespace(step=step, layer=layer, operation='forward', name='input', time=time)
               for step in (0, 10, 20) for time in (0, 1, 2) for layer in 'abcd']

    def chosen(limit):
        return [(entry.step, entry.layer, entry.time) for entry in _choose(entries, limit)]
    assert chosen(2) == [(20, 'a', 0), (20, 'c', 0)]
    assert chosen(6) == [(20, layer, 0) for layer in 'abcd'] + [(20, 'a', 1), (20, 'c', 1)]
    assert {step for step, _, _ in chosen(12)} == {20} and {step for step, _, _ in chosen(13)} == {0, 20}
    assert len(set(chosen(36))) == len(chosen(100)) == 36


# ---- a folder ----------------------------------------------------------------------------------------------------------

def test_every_promised_file_is_there(dump, drawn):
    folder, summary = drawn
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob('*.png'))
    stem = 'step000010_encoder.0.self_attention'
    names = [f'{stem}.q_forward_input', f'{stem}_forward_weights', f'{stem}.q_backward_grad_weight']
    assert all(f'{kind}/{name}.png' in found for kind in FOLDERS[:3] for name in names)
    assert [len([name for name in found if name.startswith(kind + '/')]) for kind in FOLDERS] == [4, 4, 4, 4, 8]
    assert [name.partition('/')[2] for name in found if name.startswith('statistics/')] == [
        'attention_entropy_001.png', 'attention_entropy_002.png', 'gradient_flow.png', 'layer_encoder.0.self_attention.png',
        'layer_encoder.0.self_attention.q.png', 'magnitudes.png', 'sqnr.png', 'training.png']
    assert {f'attention_maps/{step}_encoder.0.self_attention_forward_weights_sentence{i}.png'
            for step in ('step000000', 'step000010') for i in (0, 1)} <= set(found) and 'quick_analysis.png' in found
    assert summary.pictures == len(found) and summary.tensors == 6 and not summary.skipped and not summary.foreign
    assert not list(folder.rglob('.*'))             # nothing half written
    for name in found:
        assert_picture(folder / name)


def test_what_was_left_out_is_said(drawn):
    _, summary = drawn
    assert summary.notes == [
        'pictures of 4 of 6 tensors (--limit 4), of steps 0, 10; draw others with --steps, --layers, --names, or all with '
        '--limit 0', 'attention maps of 4 of 6 sentences (--sentences 2 of each batch)']


def test_the_table_has_every_tensor_and_its_numbers(dump, drawn):
    folder, summary = drawn
    lines = (folder / 'tensor_stats.txt').read_text().splitlines()
    title, rows = lines[2].split(), lines[3:9]
    assert title[:7] == ['step', 'layer', 'operation', 'tensor', 'format', 'shape', 'count'] and lines[9:11] == ['',
                                                                                                                 'skipped: 0']
    (row,) = [row.split() for row in rows if row.split()[:4] == ['10', LINEAR, 'forward', 'input']]
    logs = Logs(dump)
    (entry,) = [entry for entry in logs.entries if (entry.step, entry.layer, entry.name) == (10, LINEAR, 'input')]
    described = statistics.describe(entry.load(), logs.mask(entry))
    assert row[4:7] == ['fp32', '5x3x16', f'{described["count"]}'] and row[10] == f'{described["amax"]:.4g}'
    for fmt, cell in zip(formats.FORMATS, row[-5:], strict=True):
        assert cell == f'{statistics.quantization(entry.load(), fmt, entry.axis, logs.mask(entry))["sqnr_db"]:.2f}'
    assert all(note in lines for note in summary.notes)


def small(**more):
    return Options(**{'names': ('bias',), 'steps': [10], 'formats': 'bf16', 'jobs': 1, 'dpi': 40, 'page': False, **more})


def test_a_second_run_replaces_its_own_files_and_no_others(dump, tmp_path):
    folder = tmp_path / 'draw'
    draw(dump, folder, small())
    stem = 'step000010_encoder.0.self_attention.q'
    own, copied = folder / 'heatmaps' / f'{stem}_forward_bias.png', folder / 'heatmaps' / 'kept copy.png'
    shutil.copy(own, copied)
    foreign = {folder / 'distributions' / f'{stem}_backward_grad_bias.png': b'not a picture',
               folder / 'tensor_stats.txt': b'my own table'}
    for path, content in {**foreign, folder / 'heatmaps' / 'notes.txt': b'mine'}.items():
        path.write_bytes(content)
    whole = folder / 'quick_analysis.png'
    before = whole.stat().st_mtime_ns
    summary = draw(dump, folder, small(names=('grad_bias',)))
    assert sorted(summary.foreign) == sorted(str(path) for path in foreign)
    assert all(path.read_bytes() == content for path, content in foreign.items())
    assert summary.removed == 3 and not own.exists()                                    # the bias' pictures are old now
    assert copied.exists() and (folder / 'heatmaps' / 'notes.txt').read_text() == 'mine'
    assert whole.stat().st_mtime_ns > before and (folder / 'heatmaps' / f'{stem}_backward_grad_bias.png').exists()


def test_a_format_of_the_run_comes_first_and_two_runs_have_pictures_of_their_own(tmp_path, monkeypatch):
    make_dump(tmp_path / 'dump', steps=(0,), formats=('hifp8', 'mxfp4:scale=even'), layers=(LINEAR,))
    seen = []
    analyse = tensors.analyse
    monkeypatch.setattr(tensors, 'analyse', lambda entry, x, mask, wanted, *more: (seen.append([str(f) for f in wanted]),
                                                                                  analyse(entry, x, mask, wanted, *more))[1])
    summary = draw(tmp_path / 'dump', tmp_path / 'draw', Options(names=('weight',), formats='bf16,hifp8', jobs=1, dpi=40,
                                                                 page=False))
    assert seen == [['hifp8', 'bf16'], ['mxfp4:scale=even', 'bf16', 'hifp8']] and summary.tensors == 2
    assert len(os.listdir(tmp_path / 'draw' / 'heatmaps')) == 2


def test_several_processes_draw_the_same(dump, tmp_path):
    options = {'names': ('input', 'weight', 'bias', 'grad_output'), 'limit': 1}
    one, two = (draw(dump, tmp_path / str(jobs), small(**options, jobs=jobs)) for jobs in (1, 2))
    assert one == two and one.tensors == 5
    for path in sorted((tmp_path / '1').rglob('*.*')):
        assert path.read_bytes() == (tmp_path / '2' / path.relative_to(tmp_path / '1')).read_bytes(), path.name


def test_processes_also_draw_the_pictures_of_layers(dump, tmp_path, monkeypatch):
    from pyops.inspect import draw as module
    calls, workers = [], module.workers

    @contextlib.contextmanager
    def noting(processes, tasks):
        with workers(processes, tasks) as work:
            yield lambda function, jobs: (calls.append((function.__name__, len(jobs))), work(function, jobs))[1]
    monkeypatch.setattr(module, 'workers', noting)
    draw(dump, tmp_path, small(names=('weight', 'grad_weight'), limit=1, jobs=2))
    pictures = [tmp_path / 'quick_analysis.png', *tmp_path.glob('statistics/*.png')]
    assert [name for name, _ in calls] == ['_draw_tensor', '_draw_sheets'] and calls[1][1] == len(pictures) > 4
    assert all(path.stat().st_size > 1000 for path in pictures)


def test_a_dump_of_other_programs(tmp_path):
    (tmp_path / 'dump').mkdir()
    for i, shape in enumerate([(), (7,), (3, 4, 5)]):
        np.save(tmp_path / 'dump' / f'20250908_092156_{i:04d}_linear_L{i}_forward_hifp8_input.npy', RNG.standard_normal(shape))
    summary = draw(tmp_path / 'dump', tmp_path / 'draw', Options(formats='mxfp8', limit=1, jobs=1, dpi=40, page=False))
    assert summary.tensors == 3 and (tmp_path / 'draw/heatmaps/step000000_linear_L0_forward_input.png').exists()


def test_a_dump_of_a_torch_model(tmp_path, torch):
    from pyops.inspect.torch import attach
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    words = [['the', 'cat', 'sleeps'], ['no']]
    with attach(model, tmp_path / 'dump', batch_first=True, tokens=lambda step: {'source': words}):
        model(torch.randn(2, 3, 16)).sum().backward()
    entries = Logs(tmp_path / 'dump').entries
    (entry,) = [entry for entry in entries if entry.name == 'input' and entry.layer.endswith('linear1')]
    tensor = tensors.analyse(entry, entry.load(), Logs(tmp_path / 'dump').mask(entry), [])
    assert (tensor.cover == numbers.PADDING).all(1).tolist() == [False, False, False, False, True, True]
    assert tensor.view.row_lines == (3,)
    summary = draw(tmp_path / 'dump', tmp_path / 'draw', Options(names=('weights',), formats='mxfp8', jobs=1, dpi=40,
                                                                 page=False))
    assert summary.tensors == 1 and len(os.listdir(tmp_path / 'draw' / 'attention_maps')) == 2


def test_the_page_comes_with_the_pictures(dump, tmp_path, monkeypatch):
    pytest.importorskip('plotly', reason='plotly is not installed: pip install plotly')
    from pyops.inspect import page
    seen = []
    monkeypatch.setattr(page, 'render', lambda data, blobs, script: (seen.append((data, list(blobs))), ['<!doctype html>'])[1])
    options = small(names=('bias', 'weights'), limit=1, sentences=0, page=True)
    summary = draw(dump, tmp_path / 'draw', options)
    ((data, blobs),) = seen
    assert summary.page == str(tmp_path / 'draw' / 'index.html') and (tmp_path / 'draw' / 'index.html').exists()
    assert [name for name, _ in blobs] == ['t0', 't1', 'catalogue'] and [fmt['name'] for fmt in data['formats']] == ['bf16']
    summary = draw(dump, tmp_path / 'draw', options)        # what stands there now bears no mark of ours
    assert summary.page == '' and summary.foreign == [str(tmp_path / 'draw' / 'index.html')] and len(seen) == 1
    monkeypatch.setitem(sys.modules, 'plotly.offline', None)
    summary = draw(dump, tmp_path / 'draw', options)
    assert [note for note in summary.notes if 'index.html' in note][0].endswith('pip install plotly')


def test_slow_drawing_shows_its_progress_on_stderr(dump, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training, 'time', SimpleNamespace(perf_counter=itertools.count(0.0, 1.5).__next__))
    summary = draw(dump, tmp_path / 'draw', small(names=('*',), steps=None, limit=1, page=True))
    out, err = capsys.readouterr()
    shown = [re.fullmatch(r'(pictures|statistics) \[(\d+)/(\d+)\] \([\d.]+ (tensors|pictures)/s, \d\d:\d\d left\)',
                          line) for line in err.splitlines()]
    assert out == '' and all(shown) and {(match[1], match[4]) for match in shown} == {
        ('pictures', 'tensors'), ('statistics', 'pictures')}
    assert {int(match[3]) for match in shown if match[4] == 'tensors'} == {summary.tensors}
    assert all(int(match[2]) < int(match[3]) for match in shown)


def test_each_tensor_is_read_once_for_its_pictures_and_the_page(dump, tmp_path, monkeypatch):
    from pyops.inspect import page
    from pyops.inspect.logs import Entry
    loads, load = collections.Counter(), Entry.load
    monkeypatch.setattr(Entry, 'load', lambda entry: (loads.update([entry.file]), load(entry))[1])
    summary = draw(dump, tmp_path / 'draw', small(names=('*',), steps=None, limit=2, jobs=1, page=True))
    assert summary.tensors == len(loads) > 20 and set(loads.values()) == {1}
    alone = page.write(Logs(dump), str(tmp_path / 'alone'), small().formats.split(','))
    assert (tmp_path / 'draw' / 'index.html').read_bytes() == Path(alone).read_bytes()


@pytest.mark.parametrize('axis', [-1, 0])
def test_a_large_tensor_is_measured_in_pieces_and_drawn_from_some_of_its_rows(axis, tmp_path, monkeypatch):
    from pyops.inspect import draw as module
    from pyops.inspect import pieces
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((900, 70)) * np.exp2(rng.integers(-6, 6, (900, 1)))).astype(np.float32)
    x[5, 3], x[77, 2], x[400:440] = np.nan, np.inf, 0
    with Writer(tmp_path / 'logs', run={'program': 'test'}) as writer:
        writer.tensor(x, layer='big', layer_type='linear', index=0, operation='forward', name='weight', step=0, axis=axis)
    options = {'formats': 'mxfp8,nvfp4,fp8:block=16x16' if axis else 'mxfp8,nvfp4', 'jobs': 1, 'dpi': 50}
    whole = draw(tmp_path / 'logs', tmp_path / 'whole', Options(**options))
    monkeypatch.setattr(module, 'LARGE', 1000)
    monkeypatch.setattr(pieces, 'PIECE', 8000)
    monkeypatch.setattr('pyops.inspect.logs.Entry.load', lambda entry: pytest.fail('the whole tensor was read'))
    part = draw(tmp_path / 'logs', tmp_path / 'part', Options(**options))
    assert part.pictures == whole.pictures and part.notes == whole.notes and part.skipped == []
    one, other = ((tmp_path / name / 'tensor_stats.txt').read_text() for name in ('whole', 'part'))
    assert one == other
    for kind in FOLDERS[:3]:
        picture, = (tmp_path / 'part' / kind).iterdir()
        assert_picture(picture)
        assert picture.read_bytes() != (tmp_path / 'whole' / kind / picture.name).read_bytes()
    entry, = Logs(tmp_path / 'logs').entries
    rows, mask, along = pieces.some_rows(entry, [formats.parse('mxfp8')], axis, None)
    assert mask is None and along == axis % 2 and len(rows) == 8000 // 70 // (1 if axis else 32) * (1 if axis else 32)
    described = pieces.describe_in_pieces(entry, None)
    assert described == pytest.approx(statistics.describe(x), rel=1e-12)


@pytest.mark.parametrize('rotation,mode', [(0, 'default'), (90, 'default'), (35, 'default'), (35, 'anchor'), (60, 'anchor')])
def test_labels_have_the_place_and_the_size_that_matplotlib_gives_them(rotation, mode):
    with style.look():
        for text, weight in (('value per bin', 'normal'), ('jp\N{SUPERSCRIPT TWO} \N{MINUS SIGN}4.5', 'bold')):
            for ha in ('left', 'center', 'right'):
                for va in ('baseline', 'top', 'bottom', 'center')[rotation > 0 and mode == 'default':]:
                    label, boxes = style.Label(2, 1, text, 11, 'black', weight, ha, va, rotation, mode), []
                    for draw in (lambda sheet, label: sheet.labels.append(label),
                                 lambda sheet, label: label.add_to(sheet)):
                        sheet = style.Sheet(4, 2, '')
                        draw(sheet, label)
                        rows, columns = np.nonzero((pixels_of(sheet) < 128).any(-1))
                        boxes.append([rows.min(), rows.max(), columns.min(), columns.max()])
                    assert np.abs(np.subtract(*boxes)).max() <= 2, (text, ha, va, boxes)


def test_a_label_at_the_edge_is_cut_and_one_outside_leaves_no_trace():
    with style.look():
        for x, y, is_seen in ((-0.1, 0.5, True), (1.9, 0.5, True), (1, 0.05, True), (1, 1.05, True), (-5, 0.5, False),
                              (9, 0.5, False), (1, -3, False), (1, 9, False)):
            sheet = style.Sheet(2, 1, '')
            sheet.text(x, y, 'mnop', fontsize=20)
            assert (pixels_of(sheet) < 128).any() == is_seen, (x, y)


def test_lines_and_areas_in_inches_are_below_all_axes():
    from matplotlib.patches import Polygon
    with style.look():
        sheet = style.Sheet(2, 1, '')
        axes = sheet.axes(1, 0, 1, 1)
        axes.fill([0, 1, 1, 0], [0, 0, 1, 1], color='#00ff00', linewidth=0)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        sheet.add(Polygon([(0, 0.1), (2, 0.1), (2, 0.3), (0, 0.3)], facecolor='#ff0000', linewidth=0))
        sheet.line(0, 0.8, 2, 0.8, '#0000ff', 4)
        pixels = pixels_of(sheet)
    assert [pixels[row, 50].tolist() for row in (20, 50, 80)] == [[255, 0, 0], [255, 255, 255], [0, 0, 255]]
    assert (pixels[:, 150] == [0, 255, 0]).all()


def test_a_text_that_pillow_cannot_draw_is_drawn_by_matplotlib():
    with style.look():
        assert style._stamp('abc', 12.0, 'normal') is not None
        assert style._stamp('\N{HEBREW LETTER ALEF}', 12.0, 'normal') is None
        sheet = style.Sheet(2, 1, '')
        sheet.text(0.5, 0.5, '\N{HEBREW LETTER ALEF}\N{HEBREW LETTER BET}', fontsize=20)
        assert (pixels_of(sheet) < 128).any()


def test_an_image_has_the_nearest_of_its_pixels_everywhere(tmp_path):
    from matplotlib.image import imread
    colors = RNG.integers(0, 256, (3, 5, 4), np.uint8)
    with style.look():
        sheet = style.Sheet(2, 1.5, '')
        sheet.image(0.5, 0.25, 1, 0.6, colors)
        sheet.image(1.9, 1.4, 1, 1, colors)                            # beyond the edges
        assert sheet.save(tmp_path / 'page.png', 100)
    pixels = np.rint(255 * imread(tmp_path / 'page.png')).astype(np.uint8)
    assert (pixels[25:85, 50:150] == colors[..., :3].repeat(20, 0).repeat(20, 1)).all()
    assert (pixels[140:, 190:] == colors[0, 0, :3]).all()


# ---- bad input ---------------------------------------------------------------------------------------------------------

def fails(capsys, *arguments):
    """The text of the one line of error that the command must end with."""
    with pytest.raises(SystemExit) as left:
        program.main(['inspect', 'draw', *map(str, arguments)])
    out, err = capsys.readouterr()
    assert left.value.code == 2 and out == '' and err.count('\n') == 1 and ': error: ' in err, (out, err)
    return err


@pytest.mark.parametrize('flags,says', [
    (['--formats', 'mxfp9'], 'mxfp8'), (['--layers', 'decoder.*'], 'decoder.*: matches no saved tensor'),
    (['--names', 'inputs'], 'input'), (['--steps', '3:9'], 'saved steps: 0, 10'), (['--steps', 'x'], 'expected a number'),
    (['--dpi', '4000'], 'from 40 to 400'), (['--limit', '-1'], 'expected a whole number'),
    (['--jobs', 'all'], 'expected a whole number')])
def test_flags_that_make_no_sense(flags, says, dump, tmp_path, capsys):
    assert says in fails(capsys, '--tensor-dir', dump, '--output-dir', tmp_path / 'draw', *flags)
    assert not (tmp_path / 'draw').exists()


def test_folders_that_cannot_be(dump, tmp_path, capsys):
    def text(logs, folder):
        return fails(capsys, '--tensor-dir', logs, '--output-dir', folder)
    assert 'no such folder' in text(tmp_path / 'nowhere', tmp_path / 'draw')
    (tmp_path / 'empty').mkdir()
    assert 'contains no saved tensor' in text(tmp_path / 'empty', tmp_path / 'draw')
    (tmp_path / 'foreign').mkdir()
    (tmp_path / 'foreign' / 'readme.txt').write_text('?')
    (tmp_path / 'foreign' / 'x.safetensors').write_bytes(b'\xff' * 100)
    assert 'readme.txt' in text(tmp_path / 'foreign', tmp_path / 'draw')
    assert not (tmp_path / 'draw').exists()
    (tmp_path / 'file').write_text('')
    assert 'is a file' in text(dump, tmp_path / 'file')
    assert 'cannot be made' in text(dump, tmp_path / 'file' / 'draw')
    for inside in (dump, dump / 'draw', dump / '..' / dump.name / 'x' / 'y'):
        assert 'in the folder of the tensors' in text(dump, inside)
    (tmp_path / 'draw').mkdir()
    (tmp_path / 'draw' / 'heatmaps').write_text('mine')
    assert 'heatmaps: is a file' in text(dump, tmp_path / 'draw')


def test_a_full_disk(dump, tmp_path, capsys, monkeypatch):
    replace, left = os.replace, [4]

    def full(*paths):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*paths)
    monkeypatch.setattr(os, 'replace', full)
    folder = tmp_path / 'draw'
    err = fails(capsys, '--tensor-dir', dump, '--output-dir', folder, '--names', 'bias', '--jobs', 1, '--dpi', 40)
    assert 'No space left on device' in err and 'draw/' in err
    written = [path for path in folder.rglob('*') if path.is_file()]
    assert len(written) == 4 and all(style.is_ours(path, as_named=True) for path in written)


def test_damaged_files_are_named_and_the_rest_is_drawn(tmp_path, capsys):
    arrays = make_dump(tmp_path / 'dump', steps=(0,), layers=(LINEAR,))
    damaged = next(file for file in arrays if file.endswith('forward_fp32_bias.safetensors'))
    content = (tmp_path / 'dump' / damaged).read_bytes()
    # as long as ever: seen when it is read
    (tmp_path / 'dump' / damaged).write_bytes(content[:8] + b'x' * (len(content) - 8))
    (tmp_path / 'dump' / 'x.pt').write_bytes(b'cos\nsystem\n(S"true"\ntR.')
    with pytest.raises(SystemExit) as left:
        program.main(['inspect', 'draw', '--tensor-dir', str(tmp_path / 'dump'), '--output-dir', str(tmp_path / 'draw'),
                      '--names',
                      '*bias', '--jobs', '1', '--dpi', '40', '--formats', 'bf16', '--no-page'])
    out, err = capsys.readouterr()
    assert left.value.code == 0 and err == ''
    assert f'skipped: {damaged}: ' in out and 'skipped: x.pt: ' in out and out.splitlines()[-1].endswith('quick_analysis.png')
    table = (tmp_path / 'draw' / 'tensor_stats.txt').read_text()
    assert 'skipped: 2\n' in table and f'  {damaged}: ' in table and '  x.pt: ' in table
    fails(capsys, '--tensor-dir', tmp_path / 'dump', '--output-dir', tmp_path / 'draw', '--names', 'bias')


def test_without_matplotlib(dump, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    assert 'pip install matplotlib' in fails(capsys, '--tensor-dir', dump, '--output-dir', tmp_path / 'draw')


# ---- the script ----------------------------------------------------------------------------------------------------------

SCRIPT = ROOT / 'scripts' / 'one_click_visualize.sh'


def run_script(*arguments, cwd=None, script=SCRIPT, **environment):
    return subprocess.run([script, *map(str, arguments)], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, 'PYTHON': sys.executable, **environment})


def fake_python(path, has_packages):
    """A Python that has all packages or none, and prints its own path in place of drawing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" != -c ] || exit {int(not has_packages)}\necho "{path}"\n')
    path.chmod(0o755)
    return path


def test_one_click_takes_the_first_python_that_has_what_it_needs(tmp_path):
    tree = tmp_path / 'a tree'
    (tree / 'logs').mkdir(parents=True)
    script = shutil.copy(SCRIPT, (tree / 'scripts').mkdir() or tree / 'scripts')
    active, own, on_path = tmp_path / 'active env', tree / '.venv', tmp_path / 'on path'

    def chosen(**more):
        done = run_script(tree / 'logs', script=script, PYTHON='', VIRTUAL_ENV=str(active),
                          PATH=f'{on_path}:/usr/bin:/bin', **more)
        return done.stdout.strip() if done.returncode == 0 else done
    pythons = [fake_python(path, True) for path in (active / 'bin/python3', own / 'bin/python3', on_path / 'python3',
                                                    on_path / 'python')]
    for python in pythons:
        assert chosen() == str(python)
        fake_python(python, False)
    failed = chosen()
    packages = 'numpy cffi safetensors tqdm matplotlib'
    assert failed.returncode == 2 and failed.stderr == (
        f'one_click_visualize.sh: error: no Python 3.11 or newer with {packages} was found; install them with '
        f"'{pythons[0]} -m pip install {packages}', or name another Python with PYTHON=...\n")
    shutil.rmtree(active)                                   # VIRTUAL_ENV may name one that is gone
    fake_python(pythons[1], True)
    assert chosen() == str(pythons[1])
    assert run_script(tree / 'logs', script=script, PYTHON=str(pythons[2])).stdout.strip() == str(pythons[2])      # as told
    done = run_script(tree / 'logs', script=script, PYTHON='no such python')
    assert done.returncode == 2 and 'error: no such python: no such program; install Python 3.11' in done.stderr


def test_one_click_has_a_python_with_these_packages(tmp_path):
    """The question that the script asks is one that this Python can answer."""
    (tmp_path / 'logs').mkdir()
    bin_ = tmp_path / 'env' / 'bin'
    bin_.mkdir(parents=True)
    (bin_ / 'python3').write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (bin_ / 'python3').chmod(0o755)
    result = run_script(tmp_path / 'logs', PYTHON='', VIRTUAL_ENV=str(tmp_path / 'env'), PATH='/usr/bin:/bin')
    assert result.returncode == 2 and 'python -m pyops: error: ' not in result.stderr and 'pip install' not in result.stderr
    assert result.stderr.startswith('pyops: error: ')       # it got as far as an empty folder


def test_one_click(dump, tmp_path):
    logs = tmp_path / 'my logs'
    shutil.copytree(dump, logs)
    few = '--names', 'bias', '--steps=10', '--formats', 'bf16', '--dpi', 40
    result = run_script(logs, 'a draw', *few, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert_picture(tmp_path / 'a draw' / 'quick_analysis.png')
    assert (tmp_path / 'a draw' / 'index.html').read_text().startswith('<!doctype html>')
    assert result.stdout.splitlines()[-1] == 'a draw: 8 pictures of 1 tensors; begin with a draw/index.html'
    result = run_script('--no-page', logs, 'no page', *few, cwd=tmp_path)           # a flag without a value
    assert result.returncode == 0 and not (tmp_path / 'no page' / 'index.html').exists(), result.stderr


@pytest.mark.parametrize('arguments,says', [
    (['nowhere'], 'nowhere: there is no such folder'), (['a', 'b', 'c'], 'c: expected at most'), (['-x'], '-x: unknown flag'),
    (['--steps'], '--steps: expected a value'), ([''], 'got an empty one')])
def test_one_click_with_bad_input(arguments, says, tmp_path):
    result = run_script(*arguments, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, '') and result.stderr.count('\n') == 1
    assert result.stderr.startswith('one_click_visualize.sh: error: ') and says in result.stderr


def test_one_click_help():
    result = run_script('--help')
    assert result.returncode == 0 and result.stdout.startswith('usage: one_click_visualize.sh [LOGS [DRAW]]')


@pytest.mark.skipif(not shutil.which('shellcheck'), reason='shellcheck is not installed')
def test_one_click_shellcheck():
    subprocess.run(['shellcheck', SCRIPT], check=True)
