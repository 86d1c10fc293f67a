"""python -m pyops inspect products: rounded products of saved operands against exact ones, every pair of formats."""
import itertools
import json

import numpy as np
import pytest
from dumps import make_dump

from pyops import __main__, backend, formats
from pyops.errors import UserError
from pyops.inspect import products
from pyops.inspect.logs import Entry, Logs
from pyops.inspect.writer import Writer
from pyops.quantization import Recipe

FORMATS = ['mxfp4', 'mxfp8:block=8', 'bf16', None]
LINEAR = ('encoder.0.self_attention.q', 'encoder.0.feed_forward.in')


@pytest.fixture(scope='module')
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp('logs')
    make_dump(folder, steps=(0, 10))
    return folder


@pytest.fixture
def run(capsys):
    """run(arguments) -> exit status, standard output, standard error of the command."""
    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            __main__.main(['inspect', 'products', *map(str, arguments)])
        return stop.value.code or 0, *capsys.readouterr()
    return call


def write_layer(folder, tensors, layer='layer', weight_axis=-1, uses=(), mask=(), lengths=None):
    """Write {name or (name, time): array} of a linear layer.  weight_axis: the axis of the weight that forward sums over"""
    with Writer(folder, run={'program': 'test'}) as writer:
        if lengths:
            writer.batch(0, lengths, {})
        for name, array in tensors.items():
            name, time = name if isinstance(name, tuple) else (name, None)
            writer.tensor(array, layer=layer, layer_type='linear', index=0, name=name, step=0, time=time, lengths=lengths,
                          operation='backward' if name.startswith('grad') else 'forward',
                          axis=weight_axis if name == 'weight' else -1, uses=uses if name == 'weight' else (),
                          mask=() if name == 'weight' else mask)


def of_layer(rng, rows=40, inputs=24, outputs=20):
    x, w, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))
    return {'input': x, 'weight': w, 'grad_output': g, 'grad_input': g @ w}


def rounded(x, fmt, axis):
    return np.asarray(x if fmt is None else formats.fake_quantize(x, fmt, axis), np.float64)


def by_definition(product, x, w, g, one, other):
    """The product of rounded matrices x (R, I), w (O, I), g (R, O), in float64."""
    if product == 'fwd':
        return rounded(x, one, 1) @ rounded(w, other, 1).T
    if product == 'dgrad':
        return rounded(g, one, 1) @ rounded(w, other, 0)
    return rounded(g, one, 0).T @ rounded(x, other, 0)


def measured(folder, fmts=FORMATS, rows=0, **more):
    """-> {(layer, step, product, format, format): statistics}, skipped"""
    logs = Logs(folder)
    pairs, missing = products.find_pairs(logs.entries)
    parsed = [fmt if fmt is None else formats.parse(fmt) for fmt in fmts]
    found, skipped = products.measure(pairs, parsed, rows, logs.mask, **more)
    return {(row.pair.entry.layer, row.pair.entry.step, row.pair.product, *(fmt and str(fmt) for fmt in row.formats)):
            row.statistics for row in found}, [*missing, *skipped]


def check(statistics, exact, q):
    error = q - exact
    assert statistics['sum_x2'] == pytest.approx((exact ** 2).sum()) and statistics['values'] == exact.size
    assert statistics['sqnr_db'] == pytest.approx(10 * np.log10((exact ** 2).sum() / (error ** 2).sum()), abs=1e-6)
    assert statistics['cosine'] == pytest.approx((exact * q).sum() / np.sqrt((exact ** 2).sum() * (q ** 2).sum()))
    assert statistics['max_abs_error'] == pytest.approx(np.abs(error).max())
    assert statistics['max_error_rms'] == pytest.approx(np.abs(error).max() / np.sqrt((exact ** 2).mean()))


def test_every_pair_of_formats_is_compared_with_the_exact_product_without_padding(dump):
    found, skipped = measured(dump)
    assert len(found) == 2 * 2 * 3 * 15 and skipped == []
    logs = Logs(dump)
    for layer, step in itertools.product(LINEAR, (0, 10)):
        saved = {entry.name: entry for entry in logs.entries if (entry.layer, entry.step) == (layer, step)}
        x, w, g = (saved[name].load() for name in ('input', 'weight', 'grad_output'))
        x, g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        words = np.broadcast_to(logs.mask(saved['input']), saved['input'].shape)[..., 0].reshape(-1)
        assert 0 < words.sum() < len(words)
        for product, one, other in itertools.product(products.PRODUCTS, FORMATS, FORMATS):
            if (one, other) == (None, None):
                continue
            rows = slice(None) if product == 'wgrad' else words
            exact, q = (by_definition(product, x, w, g, *pair)[rows] for pair in ((None, None), (one, other)))
            statistics = found[layer, step, product, one, other]
            check(statistics, exact, q)
            worst = statistics['worst']
            whole = by_definition(product, x, w, g, one, other)
            assert worst['rounded'] == pytest.approx(whole[worst['row'], worst['column']])
            assert abs(worst['rounded'] - worst['exact']) == pytest.approx(statistics['max_abs_error'])


def test_a_result_in_tiles_is_the_same(dump, monkeypatch):
    whole, _ = measured(dump)
    monkeypatch.setattr(products, '_TILE', 64)
    tiled, _ = measured(dump)
    assert whole.keys() == tiled.keys()
    for key, one in whole.items():
        other = tiled[key]
        assert {name: one[name] for name in one if name != 'worst'} == pytest.approx(
            {name: other[name] for name in other if name != 'worst'})
        assert one['worst']['exact'] == pytest.approx(other['worst']['exact'])


def test_rows_are_evenly_spaced_among_those_that_are_no_padding(tmp_path):
    tensors = of_layer(np.random.default_rng(1), rows=60)
    tensors = {name: x if name == 'weight' else x.reshape(20, 3, -1) for name, x in tensors.items()}
    write_layer(tmp_path, tensors, lengths={'source': [20, 4, 16]}, mask=[{'time': 0, 'batch': 1, 'of': 'source'}])
    found, _ = measured(tmp_path, ['mxfp4'], rows=8)
    valid = [t * 3 + b for t in range(20) for b in range(3) if t < (20, 4, 16)[b]]
    rows = [valid[i * len(valid) // 8] for i in range(8)]
    x, w, g = tensors['input'].reshape(60, -1), tensors['weight'], tensors['grad_output'].reshape(60, -1)
    for product in ('fwd', 'dgrad'):
        exact, q = (by_definition(product, x, w, g, fmt, fmt)[rows] for fmt in (None, 'mxfp4'))
        check(found['layer', 0, product, 'mxfp4', 'mxfp4'], exact, q)
        assert found['layer', 0, product, 'mxfp4', 'mxfp4']['worst']['row'] in rows
    exact, q = (by_definition('wgrad', x, w, g, fmt, fmt)[[i * 20 // 8 for i in range(8)]] for fmt in (None, 'mxfp4'))
    check(found['layer', 0, 'wgrad', 'mxfp4', 'mxfp4'], exact, q)


@pytest.mark.parametrize('recorded', ['axis', 'uses', 'shape'])
def test_a_weight_may_be_stored_with_inputs_first(tmp_path, recorded):
    tensors = of_layer(np.random.default_rng(2), inputs=20, outputs=24 if recorded == 'shape' else 20)
    x, w, g = (tensors[name] for name in ('input', 'weight', 'grad_output'))
    uses = [{'product': 'dgrad', 'operand': 'w', 'format': 'mxfp4', 'axis': 1}] if recorded == 'uses' else ()
    write_layer(tmp_path, tensors | {'weight': w.T.copy()}, weight_axis=0 if recorded == 'axis' else -1, uses=uses)
    found, _ = measured(tmp_path, ['mxfp4'])
    for product in products.PRODUCTS:
        exact, q = (by_definition(product, x, w, g, fmt, fmt) for fmt in (None, 'mxfp4'))
        check(found['layer', 0, product, 'mxfp4', 'mxfp4'], exact, q)


def test_time_steps_of_a_recurrent_layer_are_one_product(tmp_path):
    tensors = of_layer(np.random.default_rng(3), rows=44)
    weight = {'weight': tensors.pop('weight')}
    steps = {(name, t): x.reshape(11, 4, -1)[t] for t in reversed(range(11)) for name, x in tensors.items()}
    tensors |= weight
    write_layer(tmp_path, weight | steps)
    found, skipped = measured(tmp_path, ['mxfp4'])
    assert len(found) == 3 and skipped == []
    for product in products.PRODUCTS:
        operands = [tensors[name] for name in ('input', 'weight', 'grad_output')]
        exact, q = (by_definition(product, *operands, fmt, fmt) for fmt in (None, 'mxfp4'))
        check(found['layer', 0, product, 'mxfp4', 'mxfp4'], exact, q)


def test_numbers_that_a_format_represents_are_exact(tmp_path, run):
    tensors = {name: np.round(4 * x) / 4 for name, x in of_layer(np.random.default_rng(4)).items()}
    write_layer(tmp_path, tensors)
    found, _ = measured(tmp_path, ['bf16'])
    assert len(found) == 3 and all(one['sqnr_db'] == np.inf and one['max_abs_error'] == 0 for one in found.values())
    _, out, _ = run(tmp_path, '--formats', 'bf16')
    document = json.loads(run(tmp_path, '--formats', 'bf16', '--json')[1])
    assert out.count('exact') == 6 and document['totals'][0]['sqnr_db'] is None


def test_overflow_is_worst_and_what_is_not_finite_is_counted_apart(tmp_path, run):
    tensors = of_layer(np.random.default_rng(5))
    tensors['input'][3, 5], tensors['input'][7, 2] = 1e6, np.nan
    write_layer(tmp_path, tensors)
    found, _ = measured(tmp_path, ['fp16', 'bf16'])
    fwd = found['layer', 0, 'fwd', 'fp16', 'bf16']
    assert fwd['overflow'] == 20 and fwd['not_finite'] == 20 and fwd['sqnr_db'] == -np.inf and fwd['worst']['row'] == 3
    other = found['layer', 0, 'fwd', 'bf16', 'fp16']
    assert other['overflow'] == 0 and other['not_finite'] == 20 and other['sqnr_db'] > 40
    lines = run(tmp_path, '--formats', 'fp16,bf16')[1].splitlines()
    assert 'overflow' in lines[2] and '-inf' in lines[3] and 'fwd.x=fp16' in ''.join(lines[3:5])
    document = json.loads(run(tmp_path, '--formats', 'fp16,bf16', '--json')[1], parse_constant=pytest.fail)
    assert document['products'][0]['overflow'] >= document['products'][1]['overflow'] > 0


def test_the_table_ranks_products_and_sums_layers(dump, run):
    status, out, err = run(dump, '--formats', 'mxfp4,bf16,none', '--top', '5')
    lines = out.splitlines()
    assert status == 0 and err == '' and lines[0] == f'12 products of {dump}, 2 steps from 0 to 10; worst first by SQNR dB'
    assert lines[2].split() == 'SQNR dB cosine max err/rms worst element formats step product'.split()
    document = json.loads(run(dump, '--formats', 'mxfp4,bf16,none', '--json')[1])
    order = [row['sqnr_db'] for row in document['products']]
    assert order == sorted(order) and len(order) == 12 * 8
    for line, row in zip(lines[3:8], document['products'], strict=False):
        worst = row['worst']
        assert line.split() == [
            f'{row["sqnr_db"]:.2f}', f'{row["cosine"]:.5f}', f'{row["max_error_rms"]:.2e}',
            f'[{worst["row"]},{worst["column"]}]', f'{worst["exact"]:.3g}', '>', f'{worst["rounded"]:.3g}', row['recipe'],
            str(row['step']), row['layer'], row['product']]
        assert row['recipe'].startswith(f'{row["product"]}.')
    assert lines[8] == '... and 91 more (--top 96 shows all)'
    for product, (one, other) in {'fwd': 'xw', 'dgrad': 'gw', 'wgrad': 'gx'}.items():
        start = lines.index(f'{product}: SQNR dB of all layers; down: {one}, across: {other}')
        assert lines[start + 1].split() == ['mxfp4', 'bf16', 'none']
        cells = {(cells[0], name): cell for cells in (line.split() for line in lines[start + 2:start + 5])
                 for name, cell in zip(['mxfp4', 'bf16', 'none'], cells[1:], strict=True)}
        assert cells['none', 'none'] == '-'
        for total in document['totals']:
            if total['product'] == product:
                of = [row for row in document['products'] if (row['product'], row['formats']) == (product, total['formats'])]
                want = 10 * np.log10(sum(row['sum_x2'] for row in of) / sum(row['sum_e2'] for row in of))
                assert total['count'] == 4 and total['sqnr_db'] == pytest.approx(want)
                assert cells[tuple(total['formats'])] == f'{want:.2f}'
    for sort, key, sign in (('cosine', 'cosine', 1), ('error', 'max_error_rms', -1)):
        rows = json.loads(run(dump, '--formats', 'mxfp4,bf16', '--json', '--sort', sort)[1])['products']
        assert [row[key] for row in rows] == sorted((row[key] for row in rows), key=lambda value: sign * value)


def test_a_choice_of_products_layers_and_steps(dump, run):
    def rows(*arguments):
        return json.loads(run(dump, '--json', '--formats', 'mxfp4', *arguments)[1])['products']

    assert {row['product'] for row in rows('--products', 'wgrad,fwd')} == {'fwd', 'wgrad'}
    assert {row['layer'] for row in rows('--layers', '*.in')} == {LINEAR[1]}
    assert {row['step'] for row in rows('--steps', '10')} == {10} and len(rows('--top', '2')) == 2


def test_only_pairs_that_a_recipe_can_have_are_ranked(dump, run):
    texts = 'nvfp4:hadamard=16', 'nvfp4', 'none'
    document = json.loads(run(dump, '--formats', ','.join(texts), '--json')[1])
    pairs = {tuple(row['formats']) for row in document['products']}
    assert pairs == {*itertools.product(texts, texts)} - {texts[:2], texts[1::-1], ('none', 'none')}
    assert all(Recipe.parse(row['recipe']).rounds for row in document['products'])
    with pytest.raises(UserError, match='have different Hadamard transforms'):
        Recipe.parse('fwd.x=nvfp4:hadamard=16,fwd.w=nvfp4')
    lines = run(dump, '--formats', ','.join(texts[:2]))[1].splitlines()
    start = lines.index('fwd: SQNR dB of all layers; down: x, across: w')
    assert [line.split()[1:].count('-') for line in lines[start + 2:start + 4]] == [1, 1]


def test_large_operands_are_read_in_rows_with_the_same_result(tmp_path, run, monkeypatch):
    rng = np.random.default_rng(9)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (
        ('input', (300, 64)), ('weight', (70, 64)), ('grad_output', (300, 70)), ('grad_input', (300, 64)))}
    write_layer(tmp_path, tensors)
    text = 'none,mxfp8,int8,nvfp4,fp8:hadamard=16,mxfp8:block=32x32,mxfp4:round=stochastic,hifp8:amax_target=224'
    monkeypatch.setenv('PYOPS_CACHE', '0')
    whole = json.loads(run(tmp_path, '--formats', text, '--json')[1])['products']
    loaded, load = [], Entry.load
    monkeypatch.setattr(products, 'PIECE', 100)
    monkeypatch.setattr(products, '_TILE', 1 << 12)
    monkeypatch.setattr(Entry, 'load', lambda entry: loaded.append(entry.name) or load(entry))
    parts = json.loads(run(tmp_path, '--formats', text, '--json')[1])['products']
    keys = 'product', 'formats', 'overflow', 'values'
    whole, parts = (sorted(rows, key=lambda row: str([row[key] for key in keys])) for rows in (whole, parts))
    for one, other in zip(whole, parts, strict=True):
        assert [one[key] for key in keys] == [other[key] for key in keys]
        assert abs(one['sqnr_db'] - other['sqnr_db']) < 1e-9 and one['worst'] == pytest.approx(other['worst'], rel=1e-9)
    assert sorted(set(loaded)) == ['grad_output', 'input', 'weight'] and len(loaded) == 3       # dgrad.w; wgrad.g, wgrad.x


def test_sums_of_few_bits_are_those_of_training():
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 50), (50, 5)))
    want = np.empty((6, 5), np.float32)
    backend.gemm_narrow(want, a, b, bits=8, promote=16)
    got = products.multiply(a.astype(np.float64), b.astype(np.float64), products.Accumulation(8, 16))
    assert got.dtype == np.float64 and (got == want).all() and np.abs(got - a @ b).max() > 1e-3
    assert (products.multiply(a[:, :0], b[:0], products.Accumulation(8)) == 0).all()


def test_a_format_has_sums_of_its_own(tmp_path, run):
    write_layer(tmp_path, of_layer(np.random.default_rng(8)))
    found = {}
    for text in ('fp8', 'fp8:accumulate=6', 'fp8:accumulate=6,none'):
        document = json.loads(run(tmp_path, '--formats', text, '--json', '--products', 'fwd')[1])
        found |= {tuple(row['formats']): row['sqnr_db'] for row in document['products']}
    assert found['fp8:accumulate=6', 'fp8:accumulate=6'] < found['fp8', 'fp8'] - 2
    assert found['fp8:accumulate=6', 'none'] < found['fp8', 'fp8'] - 2


def test_promotion_limits_the_error_of_long_sums(tmp_path, run):
    rng = np.random.default_rng(7)
    tensors = {'input': rng.random((16, 2048), np.float32), 'weight': rng.random((8, 2048), np.float32)}
    write_layer(tmp_path, tensors)
    decibels = {}
    for text in ('14', '14:128'):
        document = json.loads(run(tmp_path, '--formats', 'none,fp8', '--json', '--accumulate', text)[1])
        assert document['accumulate'] == [int(n) for n in text.split(':')]
        decibels[text] = {tuple(row['formats']): row['sqnr_db'] for row in document['products']}
        assert len(decibels[text]) == 4
    assert decibels['14:128']['none', 'none'] > decibels['14']['none', 'none'] + 15
    assert decibels['14:128']['fp8', 'fp8'] > decibels['14']['fp8', 'fp8'] + 5


def test_missing_operands_are_reported_and_the_rest_is_compared(tmp_path, run):
    tensors = of_layer(np.random.default_rng(6))
    write_layer(tmp_path / 'a', {name: tensors[name] for name in ('input', 'weight')}, 'output')
    write_layer(tmp_path / 'b', {name: x for name, x in tensors.items() if name != 'grad_input'}, 'first')
    write_layer(tmp_path / 'c', tensors | {'weight': tensors['weight'][:, :5]}, 'odd')
    status, out, err = run(tmp_path, '--formats', 'mxfp4', '--json')
    document = json.loads(out)
    assert status == 0 and {(row['layer'], row['product']) for row in document['products']} == {
        ('output', 'fwd'), ('first', 'fwd'), ('first', 'wgrad'), ('odd', 'dgrad'), ('odd', 'wgrad')}
    reasons = {line['file']: line['reason'] for line in document['skipped']}
    assert reasons['output dgrad'] == reasons['output wgrad'] == 'no grad_output is saved'
    assert sum('of odd are not the operands of' in reason for reason in reasons.values()) > 0
    assert 'skipped: output dgrad: no grad_output is saved' in err


def test_bad_input_is_one_line_that_names_the_remedy(dump, run, tmp_path):
    make_dump(tmp_path / 'attention', steps=(0,), layers=('encoder.0.self_attention',))
    for arguments, want in (
            ((tmp_path / 'nowhere',), 'nowhere: no such folder'),
            ((tmp_path / 'attention',), 'no linear layer has the operands of fwd, dgrad, wgrad; save input, weight and'),
            ((dump, '--formats', 'mxfp7'), 'mxfp7: no such number format; did you mean mxfp8'),
            ((dump, '--formats', 'none'), '--formats none: rounds nothing; give a format, such as mxfp8'),
            ((dump, '--products', 'bwd'), "--products: expected some of fwd, dgrad, wgrad, separated by commas, got 'bwd'"),
            ((dump, '--accumulate', '14:0'), "--accumulate: expected 2 to 24 significant bits and a number of terms, such as"),
            ((dump, '--accumulate', '53'), "such as 14:128, got '53'"),
            ((dump, '--rows', '-1'), "--rows: expected a whole number from 0 to 1000000, got '-1'"),
            ((dump, '--layers', 'enconder.*'), 'enconder.*: matches no saved tensor'),
            ((dump, '-o', '/no/x'), '/no/x: cannot be written (No such file or directory)')):
        status, out, err = run(*arguments)
        assert status == 2 and out == '' and err.count('\n') == 1 and want in err, (arguments, err)
