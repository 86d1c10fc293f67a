"""The page of saved tensors in a headless browser, as a file and live, and its server."""
import base64
import csv
import http.client
import io
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import browsing
import numpy as np
import pytest
from conftest import ROOT
from dumps import make_dump, make_megatron_dump

pytest.importorskip('plotly', reason='plotly is not installed: pip install plotly')

from pyops.__main__ import main
from pyops.errors import UserError
from pyops.inspect import page, payload, serve, statistics
from pyops.inspect.draw import Summary
from pyops.inspect.logs import Logs
from pyops.inspect.runs import Named

ATTENTION = '<img src=x onerror=window.hacked=1>.attention'
LAYERS = 'encoder.0.self_attention.q', ATTENTION, 'encoder.0.feed_forward.in'
SCRIPT = '<script>hacked=1</script>'


@pytest.fixture(scope='module')
def dump(tmp_path_factory):
    """Three layers at three steps.  The name of one layer and one word would run code if they were inserted as HTML."""
    folder = tmp_path_factory.mktemp('dump') / 'logs'
    make_dump(folder, steps=(0, 10, 20), formats=('mxfp8',), layers=LAYERS)
    manifest = folder / 'manifest.jsonl'
    manifest.write_text(manifest.read_text().replace('"sleeping"', json.dumps(SCRIPT)))
    (folder / 'notes.txt').write_text('not a tensor')
    return folder


class Page(browsing.Page):
    """The page of saved tensors."""

    def drawn(self):
        """Wait until the page has been drawn."""
        self.until('document.documentElement.dataset.drawn !== undefined')

    def go(self, address):
        """Change the hash of the address and wait until the page has been drawn."""
        turn = self.ask('document.documentElement.dataset.drawn')
        self.ask(f'{{ location.hash = {json.dumps(address)} }}')
        self.until(f'document.documentElement.dataset.drawn !== {json.dumps(turn)}')

    def act(self, action):
        turn = self.ask('document.documentElement.dataset.drawn')
        action()
        self.until(f'document.documentElement.dataset.drawn !== {json.dumps(turn)}')

    def z(self, plot='map', trace=0):
        return self.ask(f'document.getElementById({json.dumps(plot)}).data[{trace}].z.map(line => Array.from(line))')

    def hash(self):
        return self.ask('Object.fromEntries(new URLSearchParams(location.hash.slice(1)))')


@pytest.fixture(scope='module')
def module_page(browser, dump, tmp_path_factory):
    path = page.write(Logs(dump), str(tmp_path_factory.mktemp('page')))
    shown = Page(browser, f'file://{path}#layer={LAYERS[2]}&step=10&format=bf16')
    shown.drawn()
    shown.linked_to = shown.text('#tensor-title'), shown.ask('document.getElementById("format").value')
    yield shown
    shown.tab.close()


@pytest.fixture
def shown(module_page):
    """The page as a file in its initial state.  The test fails if the page logs an error or sends a request."""
    if module_page.hash():
        module_page.go('')
    yield module_page
    assert module_page.failures == []
    assert [url for url in module_page.requests[1:] if not url.startswith('data:')] == []


def choose(shown, **values):
    for name, value in values.items():
        shown.act(lambda name=name, value=value: shown.tab.select_option(f'#{name}', value))


# ---- the page as a file ----------------------------------------------------------------------------------------------

def test_a_file_shows_a_tensor_of_the_newest_step_without_any_request(shown, dump):
    assert shown.text('#tensor-title') == f'{LAYERS[0]} forward input, step 20'
    assert shown.text('h1') == 'transformer: logs'
    assert shown.ask('document.getElementById("status").hidden')
    entry = next(entry for entry in Logs(dump).entries if (entry.step, entry.layer, entry.name) == (20, LAYERS[0], 'input'))
    x, mask = entry.load(), np.broadcast_to(Logs(dump).mask(entry), entry.shape)
    got = np.array([[np.nan if value is None else value for value in line] for line in shown.z()])
    np.testing.assert_allclose(got, np.where(mask, x, np.nan).reshape(got.shape), rtol=1e-3, atol=1e-7)
    assert 'Skipped files: 1' in shown.text('#skipped') and 'notes.txt' in shown.text('#skipped')
    assert len(shown.requests) == 1


def test_layer_role_step_and_format_change_what_is_shown(shown):
    seen = [shown.z()]
    choose(shown, layer=LAYERS[2], role='backward.grad_weight', step='10')
    assert shown.text('#tensor-title') == f'{LAYERS[2]} backward grad_weight, step 10'
    seen.append(shown.z())
    choose(shown, step='0')
    seen.append(shown.z())
    assert seen[0] != seen[1] != seen[2]
    before = shown.text('#tiles'), shown.ask('document.getElementById("exponents").data[0].y.join()')
    choose(shown, format='hifp8')
    assert 'SQNR in hifp8' in shown.text('#tiles') and 'hifp8' in shown.text('#statistics-title')
    assert before != (shown.text('#tiles'), shown.ask('document.getElementById("exponents").data[0].y.join()'))
    assert shown.hash() == {'layer': LAYERS[2], 'role': 'backward.grad_weight', 'step': '0', 'format': 'hifp8'}


def test_views_of_the_map(shown, dump):
    shown.go('format=mxfp4')
    values = shown.z()
    for view in ('rounded', 'error', 'scales'):
        shown.act(lambda view=view: shown.tab.click(f'[data-view={view}]'))
        assert shown.ask(f'document.querySelector("[data-view={view}]").ariaSelected') == 'true'
        if view == 'scales':
            break
        got = shown.z()
        assert len(got) == len(values) and got != values
    entry = next(entry for entry in Logs(dump).entries if (entry.step, entry.layer, entry.name) == (20, LAYERS[0], 'input'))
    largest = abs(entry.load()).reshape(15, 16).max(1)                             # of a block: a row of 16
    exponents = np.floor(np.log2(largest[largest > 0])) - 2
    np.testing.assert_array_equal(np.ravel(shown.z())[largest > 0], exponents)
    shown.go('format=hifp8')
    assert shown.ask('document.querySelector("[data-view=scales]").disabled')
    shown.go('format=hifp8&view=scales')
    assert 'no scales that are powers of two' in shown.text('#map')
    shown.go('')
    assert shown.z() == shown.z('map')


def test_half_octaves_are_exact_around_powers_of_two_and_of_their_root_and_for_subnormal_numbers():
    edges = np.float32([2.0**k * root for k in range(-148, 127, 7) for root in (1, math.sqrt(2))])
    x = np.concatenate([edges, np.nextafter(edges, np.float32(0)), -np.nextafter(edges, np.float32(np.inf))])
    first, counts = payload._half_octaves(x)
    np.testing.assert_array_equal(np.repeat(first + np.arange(len(counts)), counts),
                                  np.sort(np.floor(2 * np.log2(abs(x.astype(np.float64))))))


def test_histograms_count_every_number_and_shade_the_range(shown):
    shown.go(f'layer={LAYERS[2]}&role=backward.grad_weight&format=fp16')
    total = 'document.getElementById("{}").data[{}].y.reduce((sum, count) => sum + count, 0)'
    assert [shown.ask(total.format('histogram', trace)) for trace in (0, 1)] == [256, 256]
    assert shown.ask(total.format('exponents', 0)) == 256
    ranges = shown.ask('document.getElementById("exponents").layout.shapes.map(shape => [shape.name, shape.x0, shape.x1])')
    assert [name for name, _, _ in ranges] == ['subnormal', 'normal'] and ranges[0][2] == ranges[1][1] == -14
    assert 'normal, 2\u207b\u00b9\u2074 to 65504' in shown.text('#ranges')
    axis = 'document.getElementById("histogram").layout.yaxis.type'
    assert shown.ask(axis) == 'log'
    shown.act(lambda: shown.tab.uncheck('#log-counts'))
    assert shown.ask(axis) != 'log'
    shown.act(lambda: shown.tab.check('#log-counts'))


def rows(shown, column):
    return shown.ask(f'[...document.querySelectorAll("#table tbody tr")].map(row => row.cells[{column}].textContent)')


def test_table_is_worst_first_and_sorts_by_any_column(shown, dump):
    shown.go('format=mxfp4')
    columns = shown.ask('[...document.querySelectorAll("#table th")].map(cell => cell.dataset.column)')
    count = len(Logs(dump).entries)
    assert shown.text('#count') == f'{count} tensors' and len(rows(shown, 0)) == count

    def numbers(column):
        return [float(text.replace('\u2212', '-')) for text in rows(shown, columns.index(column)) if text[-1].isdigit()]
    sqnr = numbers('sqnr_db')
    assert len(sqnr) > 60 and sqnr == sorted(sqnr)
    for column in columns:
        for order in ('ascending', 'descending')[:1 + (column in ('layer', 'rmse', 'sqnr_db'))]:
            shown.act(lambda column=column: shown.ask(f'document.querySelector("[data-column={column}] button").click()'))
            assert shown.ask(f'document.querySelector("th[data-column={column}]").ariaSort') == order
            if column not in ('layer', 'role', 'shape', 'used'):
                got = numbers(column)
                assert len(got) > 10 and got == sorted(got, reverse=order == 'descending'), column
            elif column == 'layer':
                assert rows(shown, 0) == sorted(rows(shown, 0), reverse=order == 'descending', key=str.casefold)


def test_table_is_searched_and_a_row_chooses_its_tensor(shown):
    shown.act(lambda: shown.tab.fill('#words', 'feed_forward grad_bias step:10'))
    assert rows(shown, 0) == [LAYERS[2]] and shown.text('#count').startswith('1 of ')
    shown.act(lambda: shown.tab.click('#table tbody tr'))
    assert shown.text('#tensor-title') == f'{LAYERS[2]} backward grad_bias, step 10'
    assert shown.ask('document.querySelector("#table tbody tr").ariaSelected') == 'true'
    shown.act(lambda: shown.tab.fill('#words', ''))


def test_attention_has_the_words_on_both_axes(shown):
    shown.go(f'layer={ATTENTION}'.replace('=x', '%3Dx').replace('=window', '%3Dwindow').replace('=1', '%3D1'))
    assert shown.text('#tensor-title').startswith(ATTENTION)
    axes = 'document.getElementById("weights").layout'
    escaped = ''.join(f'&#{ord(letter)};' if letter in '<>' else letter for letter in SCRIPT)
    for axis in ('xaxis', 'yaxis'):
        assert shown.ask(f'{axes}.{axis}.ticktext') == ['he', 'is', escaped, '<eos>'.translate({60: '&#60;', 62: '&#62;'}), '']
    assert SCRIPT in shown.ask('document.querySelector("#weights").textContent')
    first = shown.z('weights')
    assert first[4] == [None] * 5 and [line[4] for line in first] == [None] * 5         # padding
    assert all(abs(sum(line[:4]) - 1) < 1e-2 for line in first[:4])
    choose(shown, head='1')
    assert shown.z('weights') != first
    choose(shown, sentence='1')
    assert shown.ask(f'{axes}.yaxis.ticktext')[:2] == ['we', 'read']
    shown.act(lambda: shown.ask('{ document.getElementById("heads").pick([2, 1]) }'))
    assert shown.hash()['head'] == '0' if 'head' in shown.hash() else shown.text('#weights-title').find('head 0') > 0


def test_training_shows_loss_norm_and_gradient_flow(shown):
    for curve, last in (('loss', 7 * 0.97 ** 20), ('norm', 1 + 1 / 21)):
        x, y = shown.ask(f'[document.getElementById("{curve}").data[0].x, document.getElementById("{curve}").data[0].y]')
        assert x == list(range(21)) and abs(y[-1] - last) < 1e-4
    flow = 'document.getElementById("flow").data'
    assert shown.ask(f'{flow}.map(line => line.name)') == ['step 0', 'step 10', 'step 20']
    before = shown.ask(f'{flow}[0].y')
    assert len(before) == 2 and before[0] > shown.ask(f'{flow}[2].y')[0] > 0
    choose(shown, **{'flow-role': 'grad_output'})
    assert len(shown.ask(f'{flow}[0].y')) == 3
    shown.go('step=10')
    assert shown.ask('document.getElementById("loss").layout.shapes[0].x0') == 10


def test_address_is_a_link_and_the_back_button_goes_back(shown):
    assert shown.linked_to == (f'{LAYERS[2]} forward input, step 10', 'bf16')        # from the address it was opened with
    choose(shown, layer=LAYERS[2], step='10', format='bf16')
    title = shown.text('#tensor-title')
    choose(shown, layer=LAYERS[0])
    shown.act(shown.tab.go_back)
    assert shown.text('#tensor-title') == title
    shown.go('layer=nothing&role=x.y&step=zzz&format=none&view=values&sentence=99&head=-3&sort=nonsense')
    assert shown.text('#tensor-title').startswith(LAYERS[0])


def test_keys_go_through_steps_layers_formats_and_views(shown):
    def press(key):
        shown.act(lambda: shown.tab.keyboard.press(key))
    shown.ask('{ document.activeElement.blur() }')
    press('ArrowLeft')
    assert shown.hash()['step'] == '10'
    press('ArrowLeft')
    press('ArrowRight')
    assert shown.hash()['step'] == '10'
    press('ArrowDown')
    assert shown.hash()['layer'] == ATTENTION
    press('ArrowUp')
    press('f')
    press('r')
    press('v')
    press('h')
    assert shown.hash() == {'layer': LAYERS[0], 'step': '10', 'format': 'mxfp4', 'role': 'forward.weight', 'view': 'rounded',
                            'head': '1'}
    shown.tab.keyboard.press('?')
    assert shown.ask('document.getElementById("help").open')
    shown.tab.keyboard.press('Escape')
    shown.tab.focus('#words')
    shown.act(lambda: shown.tab.keyboard.type('f'))
    assert shown.hash()['format'] == 'mxfp4' and shown.hash()['words'] == 'f'


def test_names_and_words_are_text_and_run_nothing(shown):
    for word in ('x', 'step:10'):
        shown.go(f'words=%3Cimg src%3Dx onerror%3Dhacked%3D1%3E{word}&sort=%3Cscript%3E')
    shown.ask('{ document.body.append(Object.assign(document.createElement("script"), {textContent: "window.hacked = 2"})) }')
    assert shown.ask('window.hacked === undefined') and shown.ask('document.querySelectorAll("img").length') == 0
    assert len(shown.failures) == 1 and 'Content Security Policy' in shown.failures.pop()


@pytest.mark.parametrize('width, scheme', [(1280, 'dark'), (768, 'light'), (360, 'dark')])
def test_every_width_and_scheme(shown, width, scheme):
    shown.tab.set_viewport_size({'width': width, 'height': 900})
    shown.tab.emulate_media(color_scheme=scheme)
    shown.go(f'format=bf16&head=1&step={width}')
    assert shown.ask('document.documentElement.scrollWidth <= innerWidth')
    luminance = 'getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).reduce((sum, part) => sum + Number(part), 0)'
    assert (shown.ask(luminance) < 150) == (scheme == 'dark')
    shown.until('[...document.querySelectorAll(".plot svg.main-svg")].every(svg => svg.clientWidth <= innerWidth)')
    shown.tab.emulate_media(color_scheme='light')
    shown.tab.set_viewport_size({'width': 1280, 'height': 900})


def test_every_control_and_plot_has_an_accessible_name(shown):
    assert shown.ask('[...document.querySelectorAll("select, input")].filter(item => !item.labels.length).length') == 0
    assert shown.ask('[...document.querySelectorAll("button")].filter(item => !item.textContent.trim() && '
                     '!item.dataset.title && !item.ariaLabel).length') == 0
    assert shown.ask('[...document.querySelectorAll(".plot")].filter(item => !item.ariaLabel).length') == 0
    assert shown.ask('document.documentElement.lang') == 'en'


# ---- data of the page ------------------------------------------------------------------------------------------------

def numbers_of(packed):
    return np.frombuffer(base64.b64decode(packed['values']), '<f2').astype(np.float64) * packed['scale']


def test_a_cell_is_the_extreme_of_its_patch():
    x = np.random.default_rng(0).standard_normal((7, 301)).astype(np.float32)
    x[3, 4], x[6, 300], x[2, 100] = -50, np.nan, np.inf
    mask = np.ones(x.shape, bool)
    mask[:, 200:] = False
    mask[6, 300] = True
    detail = payload.detail(x, mask, -1, ('mxfp8',), side=64)
    cells, patch = numbers_of(detail['values']).reshape(detail['values']['shape']), detail['values']['patch']
    assert patch == [1, 5] and cells.shape == (7, 61)
    for row in range(7):
        for column in range(61):
            part, valid = x[row, 5 * column:5 * column + 5], mask[row, 5 * column:5 * column + 5]
            if not valid.any():
                assert np.isnan(cells[row, column])
            elif not np.isfinite(part[valid]).all():
                assert cells[row, column] == np.inf
            else:
                assert abs(cells[row, column] - max(part[valid], key=abs)) <= 50 * 2.0 ** -11
    assert detail['range'] == [-50.0, pytest.approx(float(x[mask & np.isfinite(x)].max()), rel=1e-5)]
    assert sum(detail['counts']) == np.isfinite(x[mask]).sum()
    window = payload.detail(x, mask, -1, ('mxfp8',), side=64, window=(2, 4, 0, 63))['values']
    assert window['origin'] == [2, 0] and window['shape'] == [3, 64]
    np.testing.assert_allclose(numbers_of(window).reshape(3, 64)[1], x[3, :64], atol=64 * 2.0 ** -11)


@pytest.mark.parametrize('axis', [-1, 0, 1, 'tokens'])
def test_magnitudes_of_block_formats_are_relative_to_the_block_scale(axis):
    x = np.random.default_rng(1).standard_normal((6, 7, 40)).astype(np.float32)
    x[0, 0, :3] = 0, np.nan, 1e-30
    detail = payload.detail(x, None, axis, ('mxfp4',))['formats']['mxfp4']
    flat, along = (x.reshape(42, 40), 0) if axis == 'tokens' else (x, axis)
    scales = np.nan_to_num(statistics.block_scales(x, 'mxfp4', axis))
    scales = np.repeat(scales, 32, along).take(range(flat.shape[along]), along)
    counted = np.isfinite(flat) & (flat != 0)
    expected = np.floor(2 * np.log2(np.abs(flat[counted].astype(np.float64)))) / 2 - scales[counted]
    counts = detail['exponents']['counts']
    got = np.repeat(detail['exponents']['first'] + np.arange(len(counts)) / 2, counts)
    np.testing.assert_array_equal(got, np.sort(expected))


@pytest.mark.parametrize('scale', [1e-40, 1.0, 1e37])
def test_a_histogram_counts_as_numpy_does(scale):
    values = np.random.default_rng(3).standard_normal(10_000).astype(np.float32) * np.float32(scale)
    limits = payload._limits(values)
    counts = payload._histogram(values, limits)
    want, edges = np.histogram(values.astype(np.float64), payload.BINS, limits)
    close = np.abs(values[:, None] - edges).min(1) <= 1e-12 * (limits[1] - limits[0])     # may be counted on either side
    assert sum(counts) == 10_000 and np.abs(np.cumsum(counts) - np.cumsum(want)).max() <= close.sum()
    beyond = payload._histogram(np.array([limits[0] * 2, limits[1] * 2], np.float32), limits)
    assert (beyond[0], beyond[-1], sum(beyond)) == (1, 1, 2)


def test_the_scale_of_a_block_of_zeros_is_blank_and_widens_no_colour_scale():
    x = np.random.default_rng(2).standard_normal((4, 96)).astype(np.float32)
    x[1, 32:64] = 0
    x[2, 70] = np.nan
    x[3, :32] = 2.0 ** -120                                 # a real block with a small scale
    scales = numbers_of(payload.detail(x, None, -1, ('mxfp8',))['formats']['mxfp8']['scales']).reshape(4, 3)
    assert np.isnan(scales[1, 1]) and np.isinf(scales[2, 2]) and scales[3, 0] == -127
    assert (np.abs(scales[0]) < 12).all() and np.isnan(scales).sum() == 1


def test_runs_ranks_and_samples_are_apart_on_the_page(tmp_path, browser, torch):
    arrays = make_megatron_dump(tmp_path / 'logs', iterations=(3,))
    with open(tmp_path / 'logs/manifest.jsonl', 'w') as file:
        for run in range(3):
            file.write(json.dumps({'kind': 'run', 'version': 1, 'program': 'gpt'}) + '\n')
            file.writelines(json.dumps({'kind': 'step', 'step': step, 'loss': 1.0 + run}) + '\n' for step in range(4))
    shown = Page(browser, f'file://{page.write(Logs(tmp_path / "logs"), str(tmp_path), ("mxfp8",))}#layer=attention_L1')
    shown.drawn()
    assert shown.ask('document.getElementById("loss").data.map(trace => [trace.name, trace.y.join()])') == [
        ['run 1', '1,1,1,1'], ['run 2', '2,2,2,2'], ['run 3', '3,3,3,3']]
    assert shown.ask('new Set(document.getElementById("loss").data.map(trace => trace.line.color)).size') == 3
    labels = shown.ask('[...document.getElementById("copy").options].map(option => option.text)')
    assert labels == [f'run 3, pre FA, rank {rank}, sample {sample}, group 0' for rank in (0, 1) for sample in (0, 1)]
    assert 'instance' in shown.ask('[...document.querySelectorAll("th")].map(cell => cell.dataset.column)')
    shown.act(lambda: shown.ask('{ const copy = document.getElementById("copy"); copy.selectedIndex = 3;'
                                ' copy.dispatchEvent(new Event("change")) }'))
    assert 'pre FA, rank 1, sample 1, group 0' in shown.text('#facts')
    weights = np.array(shown.z('weights'))                  # attention_weights of the same rank and sample
    rank1 = next(array for file, array in arrays.items() if 'rank01_sample001_group000_attention_weights' in file)
    np.testing.assert_allclose(weights, rank1[0, 0], atol=1e-3)
    shown.tab.close()


@pytest.mark.parametrize('shape', [(), (0,), (5,), (1, 1), (3, 0), (2, 3, 4, 5)])
def test_tensors_of_any_shape_have_a_detail(shape):
    for fill in (0.0, 3.0, np.nan, 1e38, 1e-44):
        detail = payload.detail(np.full(shape, fill, np.float32), None, -1, ('mxfp8', 'hifp8', 'nvfp4:block=2x16', 'int8',
                                                                                 'fp8:delayed'))
        json.dumps(detail, allow_nan=False)
        assert sum(detail['counts']) == (np.prod(shape) if np.isfinite(fill) else 0)


def test_long_curves_are_thinned_and_keep_their_ends_and_peaks():
    steps = [{'step': i, 'loss': 1.0 + i % 7 / 100, 'norm': None} for i in range(50001)]
    steps[12345]['loss'], steps[31] = 99.0, {'step': 31, 'loss': None, 'norm': 2.0}
    thin = payload.thin_steps(steps)
    assert len(thin) <= 2000 and thin[0][0] == 0 and thin[-1][0] == 50000 and [12345, 99.0, None, ''] in thin
    assert [line[0] for line in thin] == sorted({line[0] for line in thin})
    assert payload.thin_steps(steps[:100]) == [[line['step'], line['loss'], line['norm'], ''] for line in steps[:100]]
    two = payload.thin_steps([line | {'training': run} for run in (0, 1) for line in steps])
    assert {row[3] for row in two} == {'run 1', 'run 2'} and 1900 < len(two) <= 2000


def catalogue(path):
    """Return the catalogue of a page, read without a browser."""
    text = re.search(r'id="catalogue">([^<]*)</script>', Path(path).read_text(encoding='utf-8'))[1]
    return json.loads(zlib.decompress(base64.b64decode(text)))


def test_page_max_bounds_the_page_and_the_page_lists_the_omissions(tmp_path):
    make_dump(tmp_path / 'logs', steps=range(0, 40, 5))
    logs = Logs(tmp_path / 'logs')
    plotly = len(page.script())
    seen = []
    for limit in (64_000_000, 2_000_000, 1_000_000, 400_000, 60_000):
        path = page.write(logs, str(tmp_path / 'page'), page_max=limit)
        assert os.path.getsize(path) < plotly + 80_000 + limit
        entries, pictured, sides, omissions = page.plan(logs.entries, payload.used_formats(logs.entries, page.FORMATS), limit)
        data = catalogue(path)
        assert (len(data['tensors']), data['pictured'], data['omissions']) == (len(entries), sorted(pictured), omissions)
        seen.append((len(entries), len(pictured), *sides))
        assert bool(omissions) == (limit < 64_000_000)
    assert seen == sorted(seen, reverse=True) and len(set(seen)) == 5 and seen[0] == (200, 200, 128, 64)
    assert {entry.step for entry in entries} == {35} and 0 < len(entries) < 25      # some tensors of one step
    assert omissions[0] == f'This page has {len(entries)} of 200 tensors, from 1 of 8 steps.'
    assert '--page-max above 60.0 KB' in omissions[-1]


def test_every_prefix_of_the_step_order_is_spread_evenly():
    assert page._spread([]) == [] and page._spread([7]) == [7]
    assert page._spread(list(range(0, 90, 10)))[:5] == [80, 0, 40, 20, 60]
    assert sorted(page._spread(list(range(1000)))) == list(range(1000))


def test_draw_bounds_its_page(tmp_path, dump, monkeypatch):
    seen = []
    monkeypatch.setattr('pyops.inspect.draw.draw', lambda *arguments: seen.append(arguments[-1].page_max) or Summary())
    draw = ['inspect', 'draw', '--tensor-dir', str(dump), '--output-dir', str(tmp_path)]
    for more, page_max in ([], page.PAGE_MAX), (['--page-max', '2.5M'], 2_500_000):
        with pytest.raises(SystemExit):
            main([*draw, *more])
        assert seen.pop() == page_max
    with pytest.raises(SystemExit):
        main([*draw, '--page-max', 'much'])
    assert not seen


def test_a_page_that_cannot_be_written_is_a_user_error(tmp_path, dump, monkeypatch):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match='the page cannot be written'):
        page.write(Logs(dump), str(tmp_path / 'file'))

    def full(*_):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'replace', full)
    with pytest.raises(UserError, match='No space left'):
        page.write(Logs(dump), str(tmp_path), formats=('bf16',))
    assert [path.name for path in tmp_path.iterdir()] == ['file']
    monkeypatch.setitem(sys.modules, 'plotly.offline', None)
    with pytest.raises(UserError, match='pip install plotly'):
        page.write(Logs(dump), str(tmp_path))


def test_a_damaged_tensor_is_named_and_the_others_are_shown(tmp_path):
    make_dump(tmp_path / 'logs', steps=(0,))
    logs = Logs(tmp_path / 'logs')
    victim = logs.entries[3]
    (tmp_path / 'logs' / victim.file).write_bytes(b'\0' * os.path.getsize(tmp_path / 'logs' / victim.file))
    data = catalogue(page.write(logs, str(tmp_path / 'page'), formats=('bf16',)))
    assert victim.file in data['skipped'][0][0] and len(data['skipped']) == 1
    assert [row is None for row in data['quality']['bf16']] == [number == 3 for number in range(len(logs.entries))]
    assert data['pictured'] == [number for number in range(len(logs.entries)) if number != 3]


# ---- the server ------------------------------------------------------------------------------------------------------

@pytest.fixture
def server(dump):
    source = serve.Source(Named('', dump))
    with serve.open_server(source, 'void 0', '127.0.0.1', 0) as server:
        source.refresh()
        thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, path, method='GET', **headers):
    connection = http.client.HTTPConnection('127.0.0.1', server.server_port, timeout=120)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_server_answers_four_paths_and_nothing_else(server):
    status, text = get(server, '/')
    assert status == 200 and text.startswith('<!doctype html>') and "connect-src 'self'" in text
    news = json.loads(get(server, '/changes?format=bf16')[1])
    assert len(news['tensors']) == news['pending'] == 75 and news['run']['program'] == 'transformer' and news['waiting'] == ''
    serial = news['serial']
    assert server.source._measure()
    later = json.loads(get(server, f'/changes?format=bf16&serial={serial}&after={news["version"]}')[1])
    assert later['tensors'] == [] and [line[:2] for line in later['quality']] == [['bf16', 74]] and later['pending'] == 74
    detail = json.loads(get(server, f'/detail?serial={serial}&id=3&format=bf16')[1])
    assert list(detail['formats']) == ['bf16'] and detail['values']['rows'] == 15
    part = json.loads(get(server, f'/detail?serial={serial}&id=3&format=bf16&window=1,2,0,3')[1])
    assert part['values']['shape'] == [2, 4]
    weights = next(row for row in news['tensors'] if row['name'] == 'weights')
    maps = json.loads(get(server, f'/attention?serial={serial}&id={weights["id"]}&sentence=2')[1])['maps']
    assert len(maps) == 1 and maps[0]['words'][0][:2] == ['no', '<eos>']
    known = f'/detail?serial={serial}'
    for path, code in (('/etc/passwd', 404), ('/../manifest.jsonl', 404), ('/..%2f..%2fetc/passwd', 404), ('/logs', 404),
                       ('//x', 404), ('/detail', 400), ('/detail?id=0', 404), (f'{known}&id=75&format=bf16', 404),
                       (f'{known}&id=-1&format=bf16', 400), (f'{known}&id=0&format=fp7', 404),
                       (f'{known}&id=0&format=bf16&window=0,99,0,3', 400), (f'/attention?serial={serial}&id=0&sentence=0', 404),
                       (f'/attention?serial={serial}&id={weights["id"]}&sentence=3', 404), ('/changes?' + 'a=1&' * 50, 400)):
        status, text = get(server, path)
        assert status == code and len(text) < 80 and 'root' not in text, path
    for method in ('POST', 'PUT', 'DELETE', 'OPTIONS'):
        assert get(server, '/', method)[0] == 501


def test_server_refuses_host_headers_that_dns_rebinding_could_send(server):
    port = server.server_port
    for host in (f'localhost:{port}', f'127.0.0.1:{port}', '[::1]', '192.168.1.2:80', 'LOCALHOST'):
        assert get(server, '/changes', Host=host)[0] == 200, host
    for host in ('evil.example', f'evil.example:{port}', '127.0.0.1.evil.example', '', 'localhost.evil.example', '[::1', 'a@b'):
        status, text = get(server, '/changes', Host=host)
        assert (status, text) == (403, f'open {server.url} instead\n'), host


def test_the_cache_of_responses_is_bounded(server, monkeypatch):
    source = server.source
    made = []
    monkeypatch.setattr(payload, 'detail', lambda *arguments, **_: made.append(1) or {'x': 'y' * 1000})
    monkeypatch.setattr(serve, '_CACHE', 3000)
    for _ in range(2):
        for number in range(2):
            get(server, f'/detail?serial={source.serial}&id={number}&format=bf16')
    assert len(made) == 2
    for number in range(9):
        get(server, f'/detail?serial={source.serial}&id={number}&format=bf16')
    assert source._size == sum(map(len, source._responses.values())) <= 3000 and len(source._responses) == 2


def test_a_replaced_folder_is_read_from_the_start(tmp_path):
    source = serve.Source(Named('', tmp_path / 'logs'))
    source.refresh()
    assert source.waiting.endswith('waiting for this folder to be created')
    make_dump(tmp_path / 'logs', steps=(0,))
    source.refresh()
    first = source.serial
    assert source.waiting == '' and len(source.changes({})['tensors']) == 25
    source.refresh()
    assert source.serial == first
    shutil.rmtree(tmp_path / 'logs')
    source.refresh()
    assert 'waiting' in source.waiting and source.changes({'serial': first, 'after': '25'})['tensors'] == []
    make_dump(tmp_path / 'logs', steps=(0, 1))
    source.refresh()
    assert source.serial != first and len(source.changes({'serial': first, 'after': '25'})['tensors']) == 50


def test_serve_opens_a_browser_only_with_the_flag(dump, monkeypatch, capsys):
    def interrupted(server):
        raise KeyboardInterrupt
    opened = []
    monkeypatch.setattr(serve._Server, 'serve_forever', interrupted)
    monkeypatch.setattr('webbrowser.open', opened.append)
    for flag in (False, True):
        with pytest.raises(KeyboardInterrupt):
            serve.run(SimpleNamespace(logs=[str(dump)], host='127.0.0.1', port=0, open=flag))
    (url,) = opened
    assert capsys.readouterr().out.splitlines()[1] == f'serving {dump} at {url} (Ctrl-C ends)'


def test_bad_input_of_serve_is_one_line(tmp_path, capsys):
    (tmp_path / 'file').touch()
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in (
                (['logs', '--port', port], f'--port {port}: already in use by another program; stop it, or give'),
                (['logs', '--port', '70000'], '--port: expected a whole number from 0 to 65535'),
                (['logs', '--port', '-1'], '--port: expected a whole number from 0 to 65535'),
                ([tmp_path / 'file'], 'file: is a file; give the folder of saved tensors'),
                (['logs', '--host', 'no such host'], '--host no such host: unknown address'),
                (['logs', '--host', '8.8.8.8'], '--host 8.8.8.8: cannot listen there')):
            with pytest.raises(SystemExit) as exit:
                main(['inspect', 'serve', *map(str, arguments)])
            out, err = capsys.readouterr()
            assert (exit.value.code, out) == (2, '') and len(err.splitlines()) == 1 and message in err


# ---- live ------------------------------------------------------------------------------------------------------------

class Run:
    """A simulated training run: copies a finished dump to a folder step by step."""

    def __init__(self, finished, folder):
        self.finished, self.folder = finished, folder
        self.lines = (finished / 'manifest.jsonl').read_text().splitlines(keepends=True)

    def write_to(self, step):
        """Copy the files and manifest lines of all steps up to this one."""
        self.folder.mkdir(exist_ok=True)
        while self.lines and json.loads(self.lines[0]).get('step', 0) <= step:
            line = self.lines.pop(0)
            if (file := json.loads(line).get('file')):
                shutil.copy(self.finished / file, self.folder / file)
            with open(self.folder / 'manifest.jsonl', 'a') as manifest:
                manifest.write(line)


def start(folder, port=0):
    """Return the server process and its first line."""
    server = subprocess.Popen([sys.executable, '-m', 'pyops', 'inspect', 'serve', folder, '--port', str(port)], cwd=ROOT,
                              text=True, stdout=subprocess.PIPE)
    return server, server.stdout.readline()


def test_live_page_follows_a_run_and_outlives_its_server(dump, tmp_path, browser):
    run = Run(dump, tmp_path / 'logs')
    server, line = start(run.folder)
    waits = f'{run.folder}: waiting for this folder to be created'
    shown = None
    try:
        url = line.split(' at ')[1].split()[0]
        assert line == f'serving {run.folder} at {url} (Ctrl-C ends)\n' and url.startswith('http://127.0.0.1:')
        assert server.stdout.readline() == waits + '\n'
        shown = Page(browser, url)
        shown.until('document.getElementById("status").textContent', waits)
        shown.ask('{ window.marker = true }')
        run.write_to(0)
        shown.until('document.getElementById("tensor-title").textContent', f'{LAYERS[0]} forward input, step 0')
        shown.until('document.getElementById("count").textContent', '25 tensors')
        shown.until('document.querySelectorAll("#table td.meter").length > 20')      # measured
        run.write_to(9)
        shown.until('document.getElementById("loss").data[0].x.length', 10)
        shown.until('document.getElementById("norm").data[0].y.length', 10)
        run.write_to(10)
        shown.until('document.getElementById("tensor-title").textContent', f'{LAYERS[0]} forward input, step 10')
        shown.until('document.getElementById("count").textContent', '50 tensors')
        assert len(shown.requests) > 5 and {url.split('?')[0] for url in shown.requests} == {
            f'{url}/', f'{url}/changes', f'{url}/detail', f'{url}/attention'} and shown.failures == []
        server.send_signal(signal.SIGINT)
        assert server.wait(120) == 130
        shown.until('document.getElementById("status").textContent', 'connection lost; retrying')
        assert 'step 10' in shown.text('#tensor-title')
        run.write_to(20)
        server, again = start(run.folder, url.split(':')[-1])
        assert again == line
        shown.until('document.getElementById("tensor-title").textContent', f'{LAYERS[0]} forward input, step 20')
        shown.until('document.getElementById("count").textContent', '75 tensors')
        assert shown.ask('document.getElementById("status").textContent').startswith('live')
        assert shown.ask('window.marker === true')                                   # the page was not reloaded
        # the first server may have ended in the middle of an answer
        assert all(re.search('ERR_(CONNECTION|CONTENT_LENGTH)_', failure) for failure in shown.failures), shown.failures
    finally:
        server.kill()
        server.wait()
        if shown:
            shown.tab.close()


def test_live_zoom_fetches_the_visible_part_and_time_steps_are_instances(tmp_path, browser):
    from safetensors.numpy import save_file
    x = np.random.default_rng(0).standard_normal((300, 500)).astype(np.float32)
    save_file({'tensor': x}, tmp_path / '20260101_000000_0001_linear_L0_forward_fp32_weight.safetensors')
    for t in range(3):
        name = f'20260101_000000_000{2 + t}_linear_L1_forward_fp32_input_t{t}.safetensors'
        save_file({'tensor': x[t:t + 1, :7]}, tmp_path / name)
    source = serve.Source(Named('', tmp_path))
    source.refresh()
    with serve.open_server(source, page.script(), '127.0.0.1', 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
        thread.start()
        shown = Page(browser, server.url)
        shown.drawn()
        assert np.shape(shown.z()) == (100, 125) and '3 \u00d7 4' in shown.text('#map-note')
        zoom = '{{ Plotly.relayout("map", {}) }}'
        shown.ask(zoom.format('{"xaxis.range": [100, 139], "yaxis.range": [59, 20]}'))
        shown.until('document.getElementById("map").data[0].z.length', 40)
        np.testing.assert_allclose(shown.z(), x[20:60, 100:140], atol=8 * 2.0 ** -11)
        assert shown.ask('document.getElementById("map").layout.xaxis.range') == [100, 139]
        shown.ask(zoom.format('{"xaxis.autorange": true, "yaxis.autorange": "reversed"}'))
        shown.until('document.getElementById("map").data[0].z.length', 100)
        assert shown.ask('document.getElementById("copies").hidden')
        shown.go('layer=linear_L1')
        assert shown.text('#copies select') == 'time step 0time step 1time step 2'
        assert shown.text('#tensor-title').endswith('time step 0')
        choose(shown, copy='.0.t1')
        np.testing.assert_allclose(shown.z(), x[1:2, :7], rtol=1e-3)
        assert shown.failures == []
        shown.tab.close()
        server.shutdown()
        thread.join()


# ---- several runs ----------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def two_runs(tmp_path_factory):
    """Two runs, first and second: the loss parts at step 4, the tensors at step 10 in the weights of the attention."""
    folder = tmp_path_factory.mktemp('runs')
    make_dump(folder / 'first', steps=(0, 10, 20), layers=LAYERS)
    shutil.copytree(folder / 'first', folder / 'second')
    manifest = folder / 'second' / 'manifest.jsonl'
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    from safetensors.numpy import load_file, save_file
    for line in lines:
        if line['kind'] == 'step' and line['step'] >= 4:
            line['loss'] += 0.5
        elif line['kind'] == 'tensor' and line['step'] >= 10 and line['name'] == 'weight':
            x = load_file(folder / 'second' / line['file'])['tensor'] * np.float32(1.5)
            save_file({'tensor': x}, folder / 'second' / line['file'])
            line['statistics'] = statistics.describe(x)
        elif line['kind'] == 'run':
            line['settings']['quant'] = SCRIPT
    manifest.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return folder / 'first', folder / 'second'


@pytest.fixture(scope='module')
def runs_page(browser, two_runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs_page')
    with pytest.raises(SystemExit) as left:
        main(['inspect', 'runs', *map(str, two_runs), '--page', str(folder), '-o', str(folder / 'out.txt')])
    assert left.value.code == 0
    shown = Page(browser, f'file://{folder / "index.html"}')
    shown.drawn()
    yield shown
    shown.tab.close()


@pytest.fixture
def both(runs_page):
    """The page of two runs in its initial state."""
    if runs_page.hash():
        runs_page.go('')
    yield runs_page
    assert runs_page.failures == []


def lines_of(shown, plot):
    return shown.ask(f'document.getElementById("{plot}").data.map(line => [line.name, Array.from(line.x), Array.from(line.y), '
                     'line.line.color])')


def test_runs_are_side_by_side(both, two_runs):
    loss, curve = lines_of(both, 'loss'), lines_of(both, 'curve')
    assert [line[0] for line in loss] == [line[0] for line in curve] == ['first', 'second']
    assert [line[3] for line in loss] == [line[3] for line in curve] and loss[0][3] != loss[1][3]
    both.go(f'layer={LAYERS[0]}&role=forward.weight&stat=amax')
    entries = [[entry for entry in Logs(folder).entries if (entry.layer, entry.name) == (LAYERS[0], 'weight')]
               for folder in two_runs]
    for line, own in zip(lines_of(both, 'curve'), entries, strict=True):
        assert line[1] == [0, 10, 20]
        np.testing.assert_allclose(line[2], [abs(entry.load()).max() for entry in own], rtol=1e-5)
    both.go(f'layer={LAYERS[0]}&role=forward.weight&stat=sqnr_db&format=mxfp4')
    for line, own in zip(lines_of(both, 'curve'), entries, strict=True):
        np.testing.assert_allclose(line[2], [statistics.quantization(entry.load(), 'mxfp4')['sqnr_db'] for entry in own],
                                   rtol=1e-5)
    names = both.ask('[...document.getElementById("stat").options].map(option => option.value)')
    assert names == [*payload.DESCRIPTION, *payload.QUALITY]


def test_gradients_of_each_run_have_one_colour_scale(both, two_runs):
    choose(both, **{'flow-role': 'grad_output'})
    maps = both.ask('document.getElementById("layers").data.map(map => [map.x, map.customdata, map.coloraxis])')
    assert [x for x, _, _ in maps] == [['0', '10', '20']] * 2 and {axis for _, _, axis in maps} == {'coloraxis'}
    rms = {(entry.layer, entry.step): entry.statistics['rms'] for entry in Logs(two_runs[0]).entries
           if entry.name == 'grad_output'}
    layers = both.ask('document.getElementById("layers").data[0].text.map(line => line[0])')
    assert len(layers) == 3
    np.testing.assert_allclose(maps[0][1], [[rms[LAYERS[i], step] for step in (0, 10, 20)] for i in (
        LAYERS.index(name) if name in LAYERS else LAYERS.index(ATTENTION) for name in layers)], rtol=1e-5)


def test_attention_is_shown_over_training(both, two_runs):
    assert [note['text'] for note in both.ask('document.getElementById("growth").layout.annotations')] == [
        'step 0', 'step 10', 'step 20', *['second'] * 3]
    big = both.z('growth')
    weights = [entry.load() for entry in Logs(two_runs[0]).entries if entry.name == 'weights']
    for i, x in enumerate(weights):                         # sentence 0, head 0: 4 words of 5
        part = [line[i * 6:i * 6 + 4] for line in big[1:5]]
        np.testing.assert_allclose(part, x[0, 0, :4, :4], atol=1e-3)
    both.go('sentence=1&head=1')
    np.testing.assert_allclose([line[:5] for line in both.z('growth')[1:6]], weights[0][1, 1], atol=1e-3)
    both.act(lambda: both.ask('{ document.getElementById("growth").pick([2, 7]) }'))
    assert both.hash()['step'] == '10'


def test_the_page_names_the_first_tensor_that_differs(both):
    text = both.text('#partings li')
    assert text.startswith(f'second and first: quant {SCRIPT}; the first tensor beyond the tolerance is {LAYERS[0]} forward '
                           'weight at step 10: 0.5; the loss parts at step 4: ')
    assert 'Differences from first: 25 actions, 75 pairs of tensors' in both.text('#differences-title')
    first = both.ask('[...document.querySelector("#differences tbody tr").cells].map(cell => cell.textContent)')
    assert first == ['second', f'{LAYERS[0]} forward weight', '0.5', '10', *first[4:5], '10']
    both.act(lambda: both.tab.click('#partings button'))
    assert both.text('#tensor-title') == f'{LAYERS[0]} forward weight, step 10'
    both.go('')
    both.act(lambda: both.tab.click('#differences tbody tr:nth-child(2)'))
    assert both.text('#tensor-title') == f'{LAYERS[2]} forward weight, step 10'
    assert both.ask('document.getElementById("layers-card").hidden') is False


def test_the_link_restores_the_view(both, browser):
    choose(both, layer=LAYERS[2], role='forward.weight', stat='max_abs_error', format='mxfp4')
    both.act(lambda: both.tab.uncheck('#log-counts'))
    both.act(lambda: both.tab.fill('#words', 'feed_forward'))
    second = Page(browser, both.tab.url)
    second.drawn()
    for question in ('document.getElementById("tensor-title").textContent', 'document.getElementById("stat").value',
                     'document.getElementById("log-counts").checked', 'document.getElementById("count").textContent',
                     'Array.from(document.getElementById("curve").data[1].y)'):
        assert second.ask(question) == both.ask(question)
    assert second.ask('document.getElementById("stat").value') == 'max_abs_error'
    assert second.ask('document.getElementById("log-counts").checked') is False
    second.tab.close()
    both.act(lambda: both.tab.fill('#words', ''))


def saved(shown, selector):
    """Click a button that saves a file, and return its name and its bytes."""
    with shown.tab.expect_download() as download:
        shown.tab.click(selector)
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_tables_are_saved_as_csv(both):
    both.go('words=feed_forward&sort=step&order=descending&format=bf16')
    name, content = saved(both, '[data-table=statistics]')
    rows = list(csv.DictReader(io.StringIO(content.decode(), newline='')))
    assert name == 'statistics_bf16.csv' and len(rows) == 48 and {row['layer'] for row in rows} == {LAYERS[2]}
    assert [int(row['step']) for row in rows] == sorted([0, 10, 20] * 16, reverse=True)
    assert [row['instance'] for row in rows[:1]] == ['first'] and all(float(row['rms']) > 0 for row in rows)
    name, content = saved(both, '[data-table=differences]')
    rows = list(csv.DictReader(io.StringIO(content.decode(), newline='')))
    assert name == 'differences_first.csv' and len(rows) == 25
    assert [row['action'] for row in rows[:2]] == [f'{layer} forward weight' for layer in (LAYERS[0], LAYERS[2])]
    assert {row['layer'] for row in rows} == set(LAYERS) and abs(float(rows[0]['worst relative difference']) - 0.5) <= 1e-6


def test_every_plot_is_saved_as_svg_and_png(both):
    from PIL import Image
    plots = both.ask('[...document.querySelectorAll(".plot")].map(plot => plot.id)')
    assert len(plots) == 11
    for plot in plots:
        button = f'figure:has(#{plot}) [data-export={{}}]'
        name, content = saved(both, button.format('svg'))
        assert name.startswith(plot) and name.endswith('.svg') and ElementTree.fromstring(content).tag.endswith('svg')
    name, content = saved(both, 'figure:has(#curve) [data-export=png]')
    width, height = both.ask('[document.getElementById("curve").clientWidth, document.getElementById("curve").clientHeight]')
    with Image.open(io.BytesIO(content)) as picture:
        assert picture.size == (2 * width, 2 * height) and name.endswith('_step20.png')
        assert len(picture.convert('RGB').getcolors(1 << 20)) > 20


def test_a_name_like_a_formula_is_text_in_a_csv_file(tmp_path, browser):
    make_dump(tmp_path / 'logs', steps=(0,), layers=('=SUM(1,2)', '-"x"'))
    shown = Page(browser, f'file://{page.write(Logs(tmp_path / "logs"), str(tmp_path), ("bf16",))}')
    shown.drawn()
    rows = list(csv.DictReader(io.StringIO(saved(shown, '[data-table=statistics]')[1].decode(), newline='')))
    assert {row['layer'] for row in rows} == {"'=SUM(1,2)", "'-\"x\""} and shown.failures == []
    shown.tab.close()


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_runs_fit_on_a_small_screen(both, scheme):
    both.tab.set_viewport_size({'width': 360, 'height': 900})
    both.tab.emulate_media(color_scheme=scheme)
    both.go('stat=max')
    both.until('document.documentElement.scrollWidth <= innerWidth')        # plots are resized after the page
    both.tab.emulate_media(color_scheme='light')
    both.tab.set_viewport_size({'width': 1280, 'height': 900})
    both.ask('{ document.activeElement.blur() }')
    both.act(lambda: both.tab.keyboard.press('t'))
    assert both.hash()['stat'] == payload.QUALITY[0]        # after max, the last statistic of the values


def test_the_server_compares_runs_and_starts_over_when_one_is_replaced(two_runs, tmp_path):
    run = Run(two_runs[1], tmp_path / 'second')
    source = serve.Source(Named('first', str(two_runs[0])), Named('second', str(run.folder)))
    source.refresh()
    assert source.waiting == f'{run.folder}: waiting for this folder to be created'
    run.write_to(9)
    source.refresh()
    news = source.changes({})
    assert (source.waiting, len(news['tensors']), news['partings']['pending']) == ('', 100, 25)
    while source._compare():
        pass
    news = source.changes({})
    assert (news['partings']['compared'], news['partings']['pending'], news['partings']['first']) == (25, 0, {})
    assert news['partings']['losses']['second'][0] == 4
    known = {'serial': news['serial'], 'after': str(news['version']), 'partings': news['partings']['key']}
    assert source.changes(known)['partings'] is None
    run.write_to(20)
    source.refresh()
    while source._compare():
        pass
    first = source.changes(known)['partings']['first']['second']
    assert (first['step'], first['layer'], first['name'], round(first['relative'], 6)) == (10, LAYERS[0], 'weight', 0.5)
    shutil.rmtree(run.folder)
    source.refresh()
    assert source.serial != news['serial'] and source.waiting.endswith('waiting for this folder to be created')


def test_live_runs_are_side_by_side(two_runs, browser):
    runs = [two_runs[0], f'other={two_runs[1]}', '--port', '0']
    server = subprocess.Popen([sys.executable, '-m', 'pyops', 'inspect', 'serve', *runs], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE)
    shown = None
    try:
        line = server.stdout.readline()
        assert line.startswith(f'serving {two_runs[0]}, {two_runs[1]} at http://127.0.0.1:')
        shown = Page(browser, line.split(' at ')[1].split()[0])
        shown.until('document.querySelectorAll("#differences tbody tr").length', 25)
        shown.until('document.getElementById("differences-title").textContent.includes("75 pairs")')
        shown.until('document.querySelector("#partings li").textContent.startsWith("other and first: ")')
        assert [line[0] for line in lines_of(shown, 'loss')] == ['first', 'other']
        shown.until('document.getElementById("growth").layout?.annotations?.length', 6)
        assert shown.failures == []
    finally:
        server.kill()
        server.wait()
        if shown:
            shown.tab.close()
