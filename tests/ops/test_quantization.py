"""Training with rounded operands: what is rounded along which axis, recipes, programs, checkpoints, a GPU.

The op table (tests/helpers/rows.py, rows `-in-products`) tests the ops with a recipe that rounds nothing.
"""
import itertools
import json
import re

import numpy as np
import pytest
from arrays import close
from places import get, on_both, put
from rows import (
    AttentionRow,
    FeedForwardRow,
    GRURow,
    InProductsRow,
    LinearCrossEntropyRow,
    LinearOfSequencesRow,
    PixelLinearRow,
    Run,
)
from small_models import digits, make_seq2seq, make_transformer, pairs
from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER, assert_same_training, newest, train_steps

import pyops
from mnist import train as mnist_train
from pyops import backend, formats, ops, quantization
from pyops.errors import UserError
from pyops.ops import rounding
from pyops.ops.attention import visible
from pyops.ops.elementwise import Sigmoid
from pyops.optim import Adam
from pyops.quantization import OPERANDS, Family, Recipe, family
from pyops.steps import SizedSteps
from seq2seq import model as seq2seq
from seq2seq import train as seq2seq_train
from seq2seq import translate as seq2seq_translate
from transformer import model as transformer
from transformer import train as transformer_train
from transformer import translate as transformer_translate

NAMES = ('hifp8', 'mxfp8', 'mxfp4', 'bf16', 'fp16')
# blocks, none, both at once, sums of other precision, and some operands that stay as they are
RECIPES = ('mxfp8', 'hifp8', 'mxfp4:scale=even:block=16', 'bf16:accumulate=24:promote=16',
           'fwd.x=mxfp4,dgrad.g=bf16,wgrad=mxfp8,qk.q=hifp8,pv=mxfp4,dk.ds=mxfp8,dv=fp16')


# ---- what is rounded, from what, along which axis ----------------------------------------------------------------------

class Rounded:
    """What an op rounds while it runs; a layer of it is what the formula rounds with.

    The formula names its float64 tensor, the operand and the axis, and gets the copy that the op made of that tensor, along
    that axis.  So a number that float32 rounds to the other side of a step is no difference.
    """

    def __init__(self, monkeypatch, recipe):
        self.recipe, self.made, self.used = recipe, [], set()

        def noting(x, fmt, axis, name, **more):
            y = formats.fake_quantize(x, fmt, axis, name=name, **more)
            assert fmt == recipe.formats['.'.join(name.split('.')[-2:])]
            self.made.append((name, get(x).astype(np.float64), axis % x.ndim, get(y).astype(np.float64)))
            return y
        monkeypatch.setattr(rounding, 'fake_quantize', noting)

    def layer(self, name, kind='linear'):
        def take(operand, x, axis):
            fmt = self.recipe.formats.get(operand)
            if fmt is None:
                return x
            # without blocks, the copy of another product of this tensor will do
            twins = [other for other in OPERANDS[kind] if other.split('.')[1] == operand.split('.')[1]
                     and self.recipe.formats.get(other) == fmt]
            names = [f'{name}.{other}' for other in ([operand] if fmt.is_block else twins)]
            for i, (made, source, along, y) in enumerate(self.made):
                if made not in names or source.shape != x.shape:
                    continue
                if np.abs(source - x).max() <= 1e-4 * np.abs(x).max() + 1e-30:
                    assert not fmt.is_block or along == axis, f'{made}: along {along}, want {axis}'
                    assert (y == formats.fake_quantize(source.astype(np.float32), fmt, axis)).all()
                    self.used.add(i)
                    return y
            raise AssertionError(f'{name}.{operand}: not made of this tensor; there are {[made for made, *_ in self.made]}')
        return take

    def all_used(self):
        assert self.made and self.used == set(range(len(self.made))), [
            made for i, (made, *_) in enumerate(self.made) if i not in self.used]


def run_quantized(monkeypatch, row, size, recipe):
    """-> the Run of a row's op with rounded operands, and what it rounds."""
    rounded = Rounded(monkeypatch, recipe)
    return Run(InProductsRow(row, recipe=recipe), size), rounded


def linear_backward(q, x, w, g):
    """-> dx, dw, with the operands of both products rounded, on rows."""
    return (q('dgrad.g', g, 1) @ q('dgrad.w', w, 0)), q('wgrad.g', g, 0).T @ q('wgrad.x', x, 0)


def check_gradients(run, **want):
    for name, gradient in want.items():
        close(run.grads[name], gradient.reshape(run.grads[name].shape), 5e-5)
    assert set(want) == set(run.grads)


@pytest.fixture(params=RECIPES, ids=lambda text: re.sub('[:,=].*', '', text) if text != RECIPES[-1] else 'mixed')
def recipe(request):
    return Recipe.parse(request.param)


def test_linear_rounds_its_operands_along_what_is_summed(monkeypatch, recipe):
    run, rounded = run_quantized(monkeypatch, LinearOfSequencesRow(), (5, 9, 37, 40), recipe)
    q, v = rounded.layer(run.op.name), run.variables()
    x, g = v['x'].reshape(45, 40), run.dy.reshape(45, 37).astype(np.float64)
    close(run.y.reshape(45, 37), q('fwd.x', x, 1) @ q('fwd.w', v['weight'], 1).T + v['bias'])
    dx, dw = linear_backward(q, x, v['weight'], g)
    check_gradients(run, x=dx, weight=dw, bias=g.sum(0))
    rounded.all_used()


def test_feed_forward_is_two_linear_layers(monkeypatch, recipe):
    run, rounded = run_quantized(monkeypatch, FeedForwardRow(), (5, 9, 37, 40), recipe)
    q1, q2, v = rounded.layer(f'{run.op.name}.w1'), rounded.layer(f'{run.op.name}.w2'), run.variables()
    x, g = v['x'].reshape(45, 37), run.dy.reshape(45, 37).astype(np.float64)
    h = np.maximum(q1('fwd.x', x, 1) @ q1('fwd.w', v['w1'], 1).T + v['b1'], 0)
    close(run.y.reshape(45, 37), q2('fwd.x', h, 1) @ q2('fwd.w', v['w2'], 1).T + v['b2'])
    dh, dw2 = linear_backward(q2, h, v['w2'], g)
    da = dh * (h > 0)
    dx, dw1 = linear_backward(q1, x, v['w1'], da)
    check_gradients(run, x=dx, w1=dw1, b1=da.sum(0), w2=dw2, b2=g.sum(0))
    rounded.all_used()


def test_pixels_are_rounded_as_floats(monkeypatch, recipe):
    run, rounded = run_quantized(monkeypatch, PixelLinearRow(), (40, 35, 70, 30), recipe)
    q, v = rounded.layer(run.op.name), run.variables()
    x = run.built.constants['table'][run.built.constants['rows']] / np.float64(255)
    close(run.y, q('fwd.x', x, 1) @ q('fwd.w', v['weight'], 0) + v['bias'])
    check_gradients(run, weight=q('wgrad.x', x, 0).T @ q('wgrad.g', run.dy.astype(np.float64), 0), bias=run.dy.sum(0))
    rounded.all_used()


def test_the_output_layer_rounds_the_gradients_of_its_logits(monkeypatch, recipe):
    run, rounded = run_quantized(monkeypatch, LinearCrossEntropyRow(), (5, 9, 40, 70), recipe)
    q, v = rounded.layer(run.op.name), run.variables()
    x, labels = v['x'].reshape(45, 40), run.built.constants['labels'].reshape(-1)
    logits = q('fwd.x', x, 1) @ q('fwd.w', v['weight'], 1).T + v['bias']
    close(run.y, ops.CrossEntropy.reference(logits, labels, 0))
    p = np.exp(logits - logits.max(1, keepdims=True))
    valid = labels != 0
    g = (p / p.sum(1, keepdims=True) - np.eye(70)[labels]) * valid[:, None] / valid.sum() * run.dy[0]
    dx, dw = linear_backward(q, x, v['weight'], g)
    check_gradients(run, x=dx, weight=dw, bias=g.sum(0))
    rounded.all_used()
    word = get(run.op.predict(put(x.astype(np.float32))))
    assert (word == get(run.ctx.logits).argmax(1)).all()
    index, logp = map(get, run.op.topk(put(x.astype(np.float32)), 3))
    want = np.log(p / p.sum(1, keepdims=True))
    assert (index == np.argsort(-get(run.ctx.logits), axis=1, kind='stable')[:, :3]).all()
    close(logp, np.take_along_axis(want, index, 1))


@pytest.mark.parametrize('row', [AttentionRow(), AttentionRow(True, 0.3, 'any')], ids=lambda row: row.name)
def test_attention_rounds_its_operands_within_heads(monkeypatch, recipe, row):
    Tq, Tk, B, heads, C = size = (35, 41, 2, 2, 20)
    run, rounded = run_quantized(monkeypatch, row, size, recipe)
    q_, v_ = rounded.layer(run.op.name, 'attention'), run.variables()

    def by_head(x):                                                     # (T, B, D) -> (T, B, heads, C), as it is rounded
        return x.reshape(len(x), B, heads, C)

    def b(x):                                                           # -> (B, heads, T, C), as it is multiplied
        return x.transpose(1, 2, 0, 3)

    q, k, v, do = (by_head(x) for x in (v_['q'], v_['k'], v_['v'], run.dy.astype(np.float64)))
    lengths = run.built.constants.get('lengths', np.full(B, Tk))
    seen = visible(Tq, Tk, lengths, run.op.causal)
    keep = row.keep(Tq, Tk, B, heads)
    s = np.where(seen, b(q_('qk.q', q, 3)) @ b(q_('qk.k', k, 3)).swapaxes(2, 3) / np.sqrt(C), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True, initial=-1e300))
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    w = p * keep
    close(by_head(run.y), (q_('pv.p', w, 3) @ b(q_('pv.v', v, 0))).transpose(2, 0, 1, 3))
    dw = b(q_('dp.do', do, 3)) @ b(q_('dp.v', v, 3)).swapaxes(2, 3)
    ds = p * (keep * dw - (w * dw).sum(-1, keepdims=True))
    dv = q_('dv.p', w, 2).swapaxes(2, 3) @ b(q_('dv.do', do, 0))
    dq = q_('dq.ds', ds, 3) @ b(q_('dq.k', k, 0)) / np.sqrt(C)
    dk = q_('dk.ds', ds, 2).swapaxes(2, 3) @ b(q_('dk.q', q, 0)) / np.sqrt(C)
    check_gradients(run, **{name: d.transpose(2, 0, 1, 3) for name, d in (('q', dq), ('k', dk), ('v', dv))})
    rounded.all_used()


@pytest.mark.parametrize('row', [GRURow(False, True), GRURow(False, False), GRURow(True, True)], ids=lambda row: row.name)
def test_gru_rounds_a_product_a_step_and_its_weights_once(monkeypatch, recipe, row):
    T, B, I, H = size = (4, 11, 40, 21)
    run, rounded = run_quantized(monkeypatch, row, size, recipe)
    ih, hh, v = rounded.layer(f'{run.op.name}.ih'), rounded.layer(f'{run.op.name}.hh'), run.variables()
    w, before, rz, n_ = v['w_hh'], row.reset_before, slice(0, 2 * H), slice(2 * H, 3 * H)
    x, h, dh = v['x'].reshape(T * B, I), v.get('h0', np.zeros((B, H))), run.dy.astype(np.float64)
    a = (ih('fwd.x', x, 1) @ ih('fwd.w', v['w_ih'], 1).T + v['b_ih']).reshape(T, B, 3, H)
    qw, states, gates = hh('fwd.w', w, 1), [], []
    for t in range(T):
        states.append(h)
        product = hh('fwd.x', h, 1) @ qw.T + v['b_hh']
        r, z = (Sigmoid.reference(a[t, :, gate] + product[:, gate * H:gate * H + H]) for gate in (0, 1))
        u = r * h if before else product[:, n_]
        n = np.tanh(a[t, :, 2] + (hh('fwd.x', u, 1) @ qw[n_].T + v['b_hh'][n_] if before else r * u))
        h = (1 - z) * n + z * h
        gates.append((r, z, n, u))
        close(run.y[t], h, 5e-5)

    def weight(rows):               # of a part of the product, which sums over its rows alone
        fmt = recipe.formats.get('dgrad.w')
        return hh('dgrad.w', w[rows], 0) if fmt and fmt.is_block else hh('dgrad.w', w, 0)[rows]
    carry, back = np.zeros((B, H)), []
    for t in reversed(range(T)):
        (r, z, n, u), d = gates[t], carry + dh[t]
        dn, dz, carry = d * (1 - z) * (1 - n**2), d * (states[t] - n) * z * (1 - z), d * z
        if before:
            du = hh('dgrad.g', dn, 1) @ weight(n_)
            dr, carry = du * states[t] * r * (1 - r), carry + du * r
            g = np.concatenate([dr, dz], 1)
        else:
            dr = dn * u * r * (1 - r)
            g = np.concatenate([dr, dz, dn * r], 1)
        if t or row.with_h0:
            carry = carry + hh('dgrad.g', g, 1) @ weight(rz if before else slice(None))
        back.insert(0, (np.concatenate([dr, dz, dn], 1), g, dn))
    da, g, dn = (np.concatenate(part) for part in zip(*back, strict=True))
    dx, dw_ih = linear_backward(ih, x, v['w_ih'], da)
    dw_hh, db_hh = hh('wgrad.g', g, 0).T @ hh('wgrad.x', np.concatenate(states), 0), g.sum(0)
    if before:
        u = np.concatenate([gate[3] for gate in gates])
        dw_hh, db_hh = np.concatenate([dw_hh, hh('wgrad.g', dn, 0).T @ hh('wgrad.x', u, 0)]), np.concatenate([db_hh, dn.sum(0)])
    want = dict(x=dx, w_ih=dw_ih, w_hh=dw_hh, b_ih=da.sum(0), b_hh=db_hh)
    check_gradients(run, **want | ({'h0': carry} if row.with_h0 else {}))
    rounded.all_used()
    assert sum(name == 'w_ih.hh.fwd.w' for name, *_ in rounded.made) <= 1


@pytest.mark.parametrize('row,size,once,each', [
    (LinearOfSequencesRow(), (2, 3, 5, 7), 3, 6), (FeedForwardRow(), (2, 3, 4, 7), 6, 12),
    (AttentionRow(), (3, 5, 2, 2, 4), 6, 12),
    (GRURow(False, True), (2, 3, 4, 5), 3 + 1 + 2 * 2 + 2, 6 + 2 + 2 * 2 + 2)], ids=lambda value: getattr(value, 'name', None))
def test_a_copy_that_serves_two_products_is_made_once(monkeypatch, row, size, once, each):
    """Without blocks; of a GRU's single steps the copies are others than of all steps together."""
    for name, want in (('bf16', once), ('mxfp8', each)):
        _, rounded = run_quantized(monkeypatch, row, size, Recipe.parse(name))
        assert len(rounded.made) == want, [name for name, *_ in rounded.made]


def test_gradients_pass_numbers_that_were_cut_off(monkeypatch):
    """Straight through: y is flat where x is beyond the largest number, and dx is not 0 for it."""
    run, _ = run_quantized(monkeypatch, LinearOfSequencesRow(), (2, 3, 5, 7), Recipe.parse('fwd.x=e2m1'))
    x = run.built.inputs['x'] * 1e6
    y, ctx = run.op.forward(put(x))
    further, _ = run.op.forward(put(2 * x))
    assert (get(y) == get(further)).mean() > 0.9, 'nothing was cut off: the check is vacuous'
    dx = get(run.op.backward(put(run.dy), ctx))
    close(dx, run.dy.astype(np.float64) @ run.built.params['weight'])


def test_stochastic_rounding_goes_with_the_step_and_each_array_has_numbers_of_its_own():
    x = np.full((64, 64), 1.03, np.float32)
    clock = np.zeros(1, np.int64)

    def rounded(seed=0):
        made = Family(Recipe.parse('mxfp8:round=stochastic'), seed)
        made.step = clock
        rounds = rounding.Rounding(made, 'layer', 'linear')
        return [rounds(operand, x, 1, time) for operand, time in (('fwd.x', 0), ('fwd.x', 1), ('wgrad.x', 0))]
    first = [*rounded(), *rounded(1)]
    clock[0] = 1
    second = rounded()
    for a, b in itertools.combinations([*first, *second], 2):
        assert 0.1 < (a != b).mean() < 0.9
    clock[0] = 0
    assert all((a == b).all() for a, b in zip(rounded(), first, strict=False))


# ---- recipes -----------------------------------------------------------------------------------------------------------

LINEAR, ATTENTION = OPERANDS['linear'], OPERANDS['attention']


@pytest.mark.parametrize('text,want', [
    ('', {}), ('none', {}), ('mxfp8', dict.fromkeys(LINEAR + ATTENTION, 'mxfp8')),
    (' HiF8 ', dict.fromkeys(LINEAR + ATTENTION, 'hifp8')), ('linear=bf16', dict.fromkeys(LINEAR, 'bf16')),
    ('attention=mxfp4:scale=even', dict.fromkeys(ATTENTION, 'mxfp4:scale=even')),
    ('mxfp4:scale=even:block=16,attention=none', dict.fromkeys(LINEAR, 'mxfp4:scale=even:block=16')),
    ('fwd=mxfp8,dgrad.g=hifp8', {'fwd.x': 'mxfp8', 'fwd.w': 'mxfp8', 'dgrad.g': 'hifp8'}),
    ('attn.k=fp16,pv.p=bf16', {'qk.k': 'fp16', 'dq.k': 'fp16', 'pv.p': 'bf16'}),
    ('fwd.x=bf16,fwd=mxfp8', {'fwd.x': 'mxfp8', 'fwd.w': 'mxfp8'}),                 # the last one counts
    ('attn.do=hifp8,dp=mxfp8', {'dv.do': 'hifp8', 'dp.do': 'mxfp8', 'dp.v': 'mxfp8'})])
def test_a_recipe_and_its_text(text, want):
    recipe = Recipe.parse(text)
    assert {operand: str(fmt) for operand, fmt in recipe.formats.items()} == want
    assert Recipe.parse(str(recipe)) == recipe and len({recipe, Recipe.parse(text)}) == 1


@pytest.mark.parametrize('text,want', [
    ('none', 'none'), ('linear=mxfp8,attention=mxfp8', 'mxfp8'), ('all=bf16,attention=none', 'linear=bf16'),
    ('fwd.w=hifp8,fwd.x=hifp8,pv.v=bf16', 'fwd=hifp8,pv.v=bf16')])
def test_the_text_of_a_recipe_is_short(text, want):
    assert str(Recipe.parse(text)) == want


def test_sections_replace_the_formats_of_some_layers():
    text = 'mxfp8,dgrad.g=hifp8;none@output;fwd=mxfp4,attention=bf16@encoder.0,*.hh;fwd.w=none@encoder.0.ff'
    recipe = Recipe.parse(text)

    def of(layer, kind='linear'):
        return {operand: str(fmt) for operand, fmt in recipe.of(layer, kind).items()}

    base = dict.fromkeys(LINEAR, 'mxfp8') | {'dgrad.g': 'hifp8'}
    assert of('decoder.0.q') == base and of('output') == {}
    assert of('encoder.0.q') == of('decoder.rnn.0.hh') == base | {'fwd.x': 'mxfp4', 'fwd.w': 'mxfp4'}
    assert of('encoder.0.ff.w1') == {operand: fmt for operand, fmt in (base | {'fwd.x': 'mxfp4'}).items() if operand != 'fwd.w'}
    assert of('encoder.0.self_attention', 'attention') == dict.fromkeys(ATTENTION, 'bf16')
    assert Recipe.parse(str(recipe)) == recipe and ';none@output;' in str(recipe) and len({recipe, Recipe.parse(text)}) == 1
    assert Recipe.parse(text, layers='decoder').of('encoder.0.q', 'linear') == {}
    only = Recipe.parse('fwd=bf16@output')
    assert str(only) == 'fwd=bf16@output' and isinstance(family(only), Family) and not only.of('encoder.0.q', 'linear')
    assert family(Recipe.parse('none@output')) is ops


def test_a_recipe_is_read_from_a_file(tmp_path, capsys):
    path = tmp_path / 'recipe.txt'
    path.write_text('# found by search\n\nmxfp8      # all\nfwd=mxfp4@encoder.*,output\n')
    read = transformer_train.parser().parse_args(['--quant', f'@{path}']).quant
    assert read == 'mxfp8;fwd=mxfp4@encoder.*,output'
    for name, data, want in (('none.txt', None, 'No such file or directory'), ('image.png', b'\x89PNG', 'not UTF-8')):
        if data:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(SystemExit):
            transformer_train.parser().parse_args(['--quant', f'@{tmp_path / name}'])
        line, = capsys.readouterr().err.splitlines()
        assert f'{name}: cannot be read ({want}); name a file with a recipe' in line


@pytest.mark.parametrize('text,want', [
    ('fwd=mxfp8@', 'fwd=mxfp8@: expected operands and layers, such as fwd=mxfp4@encoder.*'),
    ('mxfp8;@output', '@output: expected operands and layers.*'),
    ('fwd.x=mxfp4:hadamard=16;fwd.w=mxfp4@output', 'fwd.x=mxfp4:hadamard=16 and fwd.w=mxfp4: the operands of a product have.*'),
    ('mxfp9', 'mxfp9: no such number format; did you mean mxfp8 or mxfp6 or mxfp4.*'),
    ('fdw=mxfp8', 'fdw: no such operand; did you mean fwd .*'),
    ('fwd=mxfp8:scal=even', 'scal: mxfp8 has no such option; did you mean scale.*'),
    ('fwd', 'fwd: expected a format after it, such as fwd=mxfp8'),
    ('mxfp8,,fwd.y=bf16', 'fwd.y: no such operand; did you mean .*'),
    ('=bf16', '=bf16: no such operand; expected all, linear.*')])
def test_what_is_no_recipe_gets_the_nearest_names(text, want, capsys):
    with pytest.raises(UserError, match=f'^{want}'):
        Recipe.parse(text)
    with pytest.raises(SystemExit) as left:
        transformer_train.parser().parse_args(['--quant', text])
    assert left.value.code == 2
    assert re.fullmatch(f'python -m transformer.train: error: --quant: {want}; see --help\n', capsys.readouterr().err)


@pytest.mark.parametrize('pattern,chosen', [
    ('', 'encoder.0.ff.w1 encoder.0.attention.q encoder.1.rnn.hh output'),
    ('encoder.0', 'encoder.0.ff.w1 encoder.0.attention.q'), ('*.q, output', 'encoder.0.attention.q output'),
    ('encoder.*.rnn.hh', 'encoder.1.rnn.hh'), ('*.attention', 'encoder.0.attention.q')])
def test_patterns_choose_layers_and_what_is_part_of_them(pattern, chosen):
    recipe = Recipe.parse('mxfp8', layers=pattern)
    names = 'encoder.0.ff.w1', 'encoder.0.attention.q', 'encoder.1.rnn.hh', 'output'
    assert [name for name in names if recipe.of(name, 'linear')] == chosen.split()


# ---- models ------------------------------------------------------------------------------------------------------------

def small(make, layer_ops):
    """Return a small model of tests/helpers/small_models.py whose layers come from layer_ops."""
    config = make().config
    module = seq2seq.Seq2Seq if make is make_seq2seq else transformer.Transformer
    return module(type(config)(**vars(config) | {'ops': layer_ops}), seed=3)


MODELS = pytest.mark.parametrize('make', [make_seq2seq, make_transformer], ids=['seq2seq', 'transformer'])


@MODELS
@pytest.mark.parametrize('name', NAMES)
def test_models_learn_with_every_format(make, name):
    layer_ops = family(Recipe.parse(name))
    losses = train_steps(small(make, layer_ops), pairs()[1], 60, 16, 0.005)
    plain = train_steps(small(make, ops), pairs()[1], 60, 16, 0.005)
    assert losses != plain and np.abs(np.array(losses[:10]) / plain[:10] - 1).max() < 0.05
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])
    assert all(layer_ops.layers.values()) and layer_ops.check().startswith(f'quantised : {name} in ')


@pytest.mark.parametrize('name', NAMES)
def test_digits_are_learned_with_every_format(name):
    rng, curves = np.random.default_rng(1), []
    batches = [rng.integers(0, 60, 20) for _ in range(60)]
    for layer_ops in (family(Recipe.parse(name)), ops):
        model, _, step, _ = mnist_train.prepare(*digits(), hidden=16, seed=2, lr=0.005, layer_ops=layer_ops)
        curves.append([float(get(step(put(rows)))[0]) for rows in batches])
    losses, plain = curves
    assert losses != plain and np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])
    classes = np.empty(60, np.int32)
    family_model, *_ = mnist_train.prepare(*digits(), hidden=16, seed=2, layer_ops=family(Recipe.parse(name)))
    family_model.predict(digits()[0], classes)
    assert len(set(classes)) > 1


@MODELS
def test_layers_of_which_a_recipe_says_nothing_are_the_plain_ones(make):
    assert family(Recipe()) is ops is make().config.ops
    layer_ops = Family(Recipe.parse('linear=mxfp8', layers='output'))
    model = small(make, layer_ops)
    assert type(model.output) is ops.LinearCrossEntropy.rounded()
    assert [name for name, rounds in layer_ops.layers.items() if rounds] == ['output']
    if make is make_transformer:
        block = model.encoder.blocks[0]
        assert {type(op) for op in (block.attention.q, block.attention.attention, block.feed_forward)} == {
            ops.Linear, ops.Attention, ops.FeedForward}
        only = small(make, Family(Recipe.parse('qk=bf16'))).encoder.blocks[0].attention
        assert type(only.q) is ops.Linear and type(only.attention) is ops.Attention.rounded()
    else:
        assert {type(layer) for layer in model.encoder.layers} == {ops.EmbeddingGRU, ops.GRU}
        with pytest.raises(UserError, match='^--quant qk=bf16: rounds nothing in this model'):
            layer_ops = Family(Recipe.parse('qk=bf16'))
            small(make, layer_ops)
            layer_ops.check()


def test_a_pattern_without_a_layer_is_refused():
    for pattern, remedy in (('zzz', 'there are 20, from encoder.0.self_attention.q, '),
                            ('encodr.0.feed_forward', 'did you mean encoder.0.feed_forward.w2 or ')):
        layer_ops = Family(Recipe.parse('mxfp8', layers=f'output,{pattern}'))
        small(make_transformer, layer_ops)
        with pytest.raises(UserError, match=f'^--quant-layers {pattern}: no layer has that name; {remedy}'):
            layer_ops.check()
        layer_ops = Family(Recipe.parse(f'mxfp8;fwd=none@output,{pattern}'))
        small(make_transformer, layer_ops)
        with pytest.raises(UserError, match=f'^--quant ...@{pattern}: no layer has that name; {remedy}'):
            layer_ops.check()


@MODELS
@pytest.mark.parametrize('text', ['none', 'mxfp8:round=stochastic,dgrad=hifp8', 'fp8:delayed=3'])
def test_a_plan_replays_the_bits_of_single_steps(make, text):
    """A step that rounds at random reads the count of steps from memory."""
    (_, corpus), values = pairs(), []
    for planned in (False, True):
        model = small(make, family(Recipe.parse(text)))
        optimizer = Adam(model.params, 0.005, max_norm=1.0)
        if model.config.ops is not ops:
            model.config.ops.attach(optimizer)

        def step(rows, *sizes, model=model, optimizer=optimizer):
            model.params.zero_grads()
            with quantization.recording(model.config.ops):
                loss, ctx = model.forward(corpus.batch(rows, *sizes), step=optimizer.count)
                model.backward(ctx)
            optimizer.step()
            return loss
        steps = SizedSteps(step, corpus.sizes, model.params, **corpus.arrays(), **model.arrays(), **optimizer.arrays())
        rng, run = np.random.default_rng(0), steps if planned else lambda rows, step=step: step(rows, *corpus.sizes(rows))
        losses = [float(run(rng.integers(0, len(corpus), 16))[0]) for _ in range(5)]
        values.append((losses, model.params.values.tobytes(), {
            name: array.tobytes() for name, array in optimizer.arrays().items() if 'amax' in name}))
        listing = steps.plan(np.arange(16)).listing()
        assert ('FakeQuantize' in listing) == (text != 'none') == ('AttentionSoftmax' in listing or 'GruGates' in listing)
    assert values[0] == values[1]


# ---- delayed scaling -----------------------------------------------------------------------------------------------------

DELAYED = 'fp8:delayed=3:margin=1,wgrad.g=fp8:elem=e5m2:delayed=2,dgrad.g=fp8:elem=e5m2:delayed=2,pv=mxfp8'


@MODELS
def test_delayed_scaling_uses_the_amax_of_past_training_steps_alone(make, monkeypatch):
    """Each operand has a history of its own; calls of one step share its scale; inference neither reads nor changes it."""
    (_, corpus), made = pairs(), []

    def noting(x, fmt, axis, name, **more):
        x, y = get(x).copy(), formats.fake_quantize(x, fmt, axis, name=name, **more)
        made.append((name, fmt, x, get(y)))
        return y
    monkeypatch.setattr(rounding, 'fake_quantize', noting)
    layer_ops, rng = family(Recipe.parse(DELAYED)), np.random.default_rng(0)
    model = small(make, layer_ops)
    optimizer = Adam(model.params, 0.05, max_norm=1.0)
    layer_ops.attach(optimizer)
    past, largest, calls = {}, np.float32(0), 0
    for _ in range(6):
        made.clear()
        model.params.zero_grads()
        batch = corpus.batch_of(rng.integers(0, len(corpus), 16))
        with layer_ops.recording():
            _, ctx = model.forward(batch, step=optimizer.count)
            model.backward(ctx)
        current = {}
        for name, fmt, x, y in made:
            if not fmt.delayed:
                continue
            amax = np.abs(x).max()
            used = max(past.get(name, [])[-fmt.delayed:], default=np.float32(0)) or amax
            scale = np.float32(fmt.target) / used if used else np.float32(1)
            want = formats.fake_quantize(x * scale, fmt.element, overflow='saturate') / scale
            assert want.tobytes() == y.tobytes(), name
            current[name], calls = max(current.get(name, np.float32(0)), amax), calls + 1
            largest = max(largest, used and amax / used)
        made.clear()
        model.forward(corpus.batch_of(np.arange(4)), gradients=False)           # in between: the amax of the tensor itself
        for _, fmt, x, y in made:
            assert y.tobytes() == formats.fake_quantize(x, fmt).tobytes() or not fmt.delayed
        optimizer.step()
        for name, amax in current.items():
            past.setdefault(name, []).append(amax)
        for name, history in optimizer.histories.tensors().items():
            values = past.get(name, [])[:-len(history) - 1:-1]
            assert get(history).tolist() == values + [0] * (len(history) - len(values)), name
    assert calls > 6 * len(past) / 2 > 30 and largest > 1.01        # a tensor that exceeds its history saturates


def test_a_training_step_without_the_history_is_refused():
    layer_ops, batch = family(Recipe.parse('fp8:delayed')), pairs()[1].batch_of(np.arange(4))
    model = small(make_transformer, layer_ops)
    _, ctx = model.forward(batch)
    with pytest.raises(ValueError, match=r'^output.\w+.g: delayed scaling needs the amax of past steps; call attach'):
        model.backward(ctx)
    with pytest.raises(ValueError, match='^encoder.0.self_attention.q.fwd.x: delayed scaling needs'), layer_ops.recording():
        model.forward(batch)


@pytest.mark.parametrize('train, tiny', [(seq2seq_train, TINY_SEQ2SEQ), (transformer_train, TINY_TRANSFORMER)])
def test_a_resumed_run_continues_the_amax_histories(train, tiny, tmp_path, capsys):
    flags = ['--quant', 'fp8:delayed=5,wgrad.g=int8:delayed=2', *tiny, '--max-steps']
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    train.main(['-e', '2', '-c', str(whole), '--no-plan', *flags, '7'])
    train.main(['-e', '2', '-c', str(parts), *flags, '4'])
    (path,) = parts.iterdir() if len(list(parts.glob('*.safetensors'))) == 0 else parts.glob('*.safetensors')
    middle, _ = newest(parts)
    train.main(['-e', '2', '-c', str(parts), *tiny, '--max-steps', '3'])
    assert 'amax histories' not in capsys.readouterr().out
    assert_same_training(newest(whole), newest(parts))
    after, _ = newest(whole)
    histories = {name: tensor for name, tensor in after.items() if name.startswith('amax/')}
    used = [name for name, tensor in histories.items() if tensor.any()]
    assert len(used) > 10 and {tensor.shape for tensor in histories.values()} == {(5,), (2,)}
    assert any((after[name] != middle[name]).any() for name in used)
    assert all(after[name][3] == middle[name][0] for name in used if len(after[name]) == 5)     # three steps later

    train.main(['-e', '2', '-c', str(path), *tiny, '--quant', 'fp8:delayed=4,wgrad=mxfp8', '--max-steps', '1'])
    out = capsys.readouterr().out
    assert re.search(r'^amax histories : (\d+) of \1 operands have none in the checkpoint; they begin empty$', out, re.M)


def test_an_optimizer_copies_its_amax_histories():
    batch, states = pairs()[1].batch_of(np.arange(4)), []
    for _ in range(2):
        layer_ops = family(Recipe.parse('int8:delayed=2'))
        model = small(make_transformer, layer_ops)
        optimizer = Adam(model.params, 0.01)
        layer_ops.attach(optimizer)
        if states:
            optimizer.load_state_dict(states[0])
        else:
            with layer_ops.recording():
                model.backward(model.forward(batch, step=optimizer.count)[1])
            optimizer.step()
        states.append(optimizer.state_dict())
    one, other = (state['state']['amax_history'] for state in states)
    assert one.tobytes() == other.tobytes() and one.any()


def test_arrays_are_named_after_layer_product_and_operand():
    names = set()
    with backend.hooks(lambda shape, dtype, name, kind: names.add(name) or np.empty(shape, dtype)):
        for make in (make_seq2seq, make_transformer):
            train_steps(small(make, family(Recipe.parse('mxfp8'))), pairs()[1], 1, 16)
    for want in ('encoder.rnn.0.ih.fwd.x', 'decoder.rnn.1.hh.dgrad.w', 'encoder.0.self_attention.q.wgrad.g', 'output.fwd.w',
                 'decoder.0.cross_attention.dk.ds', 'encoder.0.feed_forward.w2.wgrad.x'):
        assert want in names


# ---- programs ----------------------------------------------------------------------------------------------------------

PROGRAMS = pytest.mark.parametrize('train,translate,tiny', [(seq2seq_train, seq2seq_translate, TINY_SEQ2SEQ),
                                                            (transformer_train, transformer_translate, TINY_TRANSFORMER)],
                                   ids=['seq2seq', 'transformer'])
RECIPE = ['--quant', 'mxfp8,dgrad.g=hifp8', '--quant-layers', 'encoder.*,output']


@PROGRAMS
def test_a_resumed_and_a_served_model_are_the_one_that_was_trained(train, translate, tiny, tmp_path, capsys, monkeypatch):
    whole, parts = tmp_path / 'whole', tmp_path / 'parts'
    train.main(['-e', '2', '-c', str(whole), '--no-plan', *tiny, *RECIPE])
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith('quantised : '))
    rounds = 'fwd=mxfp8,dgrad.g=hifp8,dgrad.w=mxfp8,wgrad=mxfp8,attention=mxfp8'
    assert re.fullmatch(rf'quantised : {rounds} in \d+ of \d+ layers', line)
    train.main(['-e', '1', '-c', str(parts), *tiny, *RECIPE])
    monkeypatch.setenv('CUSTOM_QUANT_TYPE', 'bf16')
    capsys.readouterr()
    train.main(['-e', '2', '-c', str(parts), *tiny])
    told = capsys.readouterr()
    assert line in told.out
    assert re.fullmatch(r'CUSTOM_QUANT_TYPE=bf16: ignored, .* was trained with --quant \S+; .*\n', told.err)
    monkeypatch.delenv('CUSTOM_QUANT_TYPE')
    assert_same_training(newest(whole), newest(parts))

    translator = pyops.load(whole)
    assert translator.rounding == line and type(translator.model.output) is ops.LinearCrossEntropy.rounded()
    assert translator.state['settings']['quant_layers'] == 'encoder.*,output'
    capsys.readouterr()
    translate.main(['-c', str(whole), 'I sleep.'])
    assert capsys.readouterr() == (f'{translator.translate("I sleep.")}\n', f'{line}\n')
    plain = pyops.load(whole, quant='none')
    assert plain.rounding is None and not isinstance(plain.model.output, ops.LinearCrossEntropy.rounded())
    translate.main(['-c', str(whole), '--quant', 'none', 'I sleep.'])
    assert capsys.readouterr() == (f'{plain.translate("I sleep.")}\n', '')


def test_without_a_recipe_nothing_changes(tmp_path, capsys, monkeypatch):
    train = transformer_train
    train.main(['-e', '1', '-c', str(tmp_path / 'unset'), *TINY_TRANSFORMER])
    monkeypatch.setenv('CUSTOM_QUANT_TYPE', 'none')
    train.main(['-e', '1', '-c', str(tmp_path / 'none'), *TINY_TRANSFORMER, '--quant', ''])
    assert_same_training(newest(tmp_path / 'unset'), newest(tmp_path / 'none'))
    assert newest(tmp_path / 'unset')[1]['settings']['quant'] == 'none' and 'quantised' not in capsys.readouterr().out


def test_what_a_run_rounds_is_the_flag_then_the_checkpoint_then_the_environment(monkeypatch, capsys):
    parse = transformer_train.parser().parse_args

    def quant(flags='', kept=None):
        return tuple(quantization.resolve(parse(flags.split()), kept).values())
    assert quant() == ('none', '')
    monkeypatch.setenv('CUSTOM_QUANT_TYPE', 'mxfp4:scale=even')
    assert quant() == ('mxfp4:scale=even', '') and quant('--quant-layers output') == ('mxfp4:scale=even', 'output')
    assert quant('--quant fwd=bf16') == ('fwd=bf16', '') and quant('--quant none') == ('none', '')
    kept = {'quant': 'hifp8', 'quant_layers': 'output'}
    assert quant('', kept) == ('hifp8', 'output') and quant('--quant bf16', kept) == ('bf16', 'output')
    assert quant('--quant-layers encoder', kept) == ('hifp8', 'encoder')
    assert capsys.readouterr().err.count('CUSTOM_QUANT_TYPE=mxfp4:scale=even: ignored, since') == 2
    assert quant('', {}) == ('none', '')                                    # a checkpoint of before there was a recipe
    monkeypatch.setenv('CUSTOM_QUANT_TYPE', '')
    assert quant() == ('none', '')
    with pytest.raises(UserError, match='^--quant-layers output: expected a recipe too; add one such as --quant'):
        quant('--quant-layers output')
    monkeypatch.setenv('CUSTOM_QUANT_TYPE', 'mxfp5')
    with pytest.raises(UserError, match='^CUSTOM_QUANT_TYPE=mxfp5: mxfp5: no such number format; did you mean mxfp8 or mxfp6 '):
        quant()
    assert quant('--quant none') == ('none', '') and quant('', kept) == ('hifp8', 'output')        # where it is not used
    assert 'CUSTOM_QUANT_TYPE=mxfp5: ignored, since the checkpoint was trained with --quant hifp8' in capsys.readouterr().err


@PROGRAMS
def test_a_variable_that_is_no_recipe_stops_no_checkpoint_from_serving(train, translate, tiny, tmp_path, capsys, monkeypatch):
    train.main(['-e', '1', '-c', str(tmp_path), *tiny])
    monkeypatch.setenv('CUSTOM_QUANT_TYPE', 'rubbish')
    capsys.readouterr()
    translate.main(['-c', str(tmp_path), 'I sleep.'])
    told = capsys.readouterr()
    assert told.err == ('CUSTOM_QUANT_TYPE=rubbish: ignored, since the checkpoint was trained with --quant none; '
                        'give --quant to change that\n')
    assert told.out == pyops.load(tmp_path).translate('I sleep.') + '\n'
    with pytest.raises(UserError, match='^CUSTOM_QUANT_TYPE=rubbish: rubbish: no such number format'):
        train.main(['-e', '1', '-c', str(tmp_path / 'new'), *tiny])       # here it is used


def test_help_names_the_default_of_quant(capsys):
    texts = {}
    for program in (mnist_train, seq2seq_train, seq2seq_translate):
        with pytest.raises(SystemExit):
            program.parser().parse_args(['--help'])
        text = ' '.join(capsys.readouterr().out.split())
        texts[re.search('usage: python -m (\\S+)', text)[1]] = re.search(r'docs/quantization.md \(default: (.*?)\)', text)[1]
    assert texts == {'mnist.train': '$CUSTOM_QUANT_TYPE, else none', 'seq2seq.translate': 'as in the checkpoint',
                     'seq2seq.train': 'as in the checkpoint, in a new run $CUSTOM_QUANT_TYPE, else none'}


@pytest.mark.parametrize('environment, flags, quant', [('hifp8', [], 'hifp8'), ('hifp8', ['--quant', 'mxfp4'], 'mxfp4'),
                                                       ('', [], 'none')])
def test_the_manifest_of_mnist_names_the_recipe_that_was_used(environment, flags, quant, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv('CUSTOM_QUANT_TYPE', environment)
    mnist_train.main(['--embedded', '-e', '1', '--max-steps', '1', '--quiet', '--save-tensors', str(tmp_path), *flags])
    first = json.loads((tmp_path / 'manifest.jsonl').read_text().splitlines()[0])
    assert (first['kind'], first['settings']['quant'], first['settings']['quant_layers']) == ('run', quant, '')


def test_mnist_rounds_what_its_flags_and_the_environment_say(monkeypatch, capsys):
    arguments = ['--embedded', '-e', '1', '-b', '500', '--quiet']
    lines = []
    for environment, flags in (('', []), ('mxfp4', []), ('', ['--quant', 'mxfp4', '--no-plan']), ('bf16', ['--quant', 'mxfp4']),
                               ('', ['--quant', 'mxfp4', '--quant-layers', 'linear2'])):
        monkeypatch.setenv('CUSTOM_QUANT_TYPE', environment)
        mnist_train.main([*arguments, *flags])
        out = capsys.readouterr().out.splitlines()
        lines.append([line for line in out if line.startswith(('quantised', 'epoch'))])
    plain, *same, last = lines
    assert len(plain) == 1 and [same[0][0], last[0]] == [f'quantised : mxfp4 in {n} of 2 layers' for n in (2, 1)]
    assert same[0] == same[1] == same[2] and len({lines[-1] for lines in (plain, same[0], last)}) == 3


@pytest.mark.parametrize('main', [mnist_train.main, seq2seq_train.main, transformer_train.main])
def test_flags_that_are_refused(main, tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        main(['--quant', 'mxfp7'])
    assert left.value.code == 2
    assert re.fullmatch('.*: error: --quant: mxfp7: no such number format; .*\n', capsys.readouterr().err)
    given = ['-c', str(tmp_path), '-f', 'embedded'] if main != mnist_train.main else ['--embedded']
    with pytest.raises(UserError, match='^--quant-layers linear3: no layer has that name; '):
        main(['-e', '1', *given, '--quant', 'mxfp8', '--quant-layers', 'linear3'])


# ---- a GPU -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('make', [make_seq2seq, make_transformer, None], ids=['seq2seq', 'transformer', 'mnist'])
def test_a_run_on_a_gpu_has_the_losses_of_the_cpu(make, device):
    """A number that is rounded to the other side of a step moves a loss by less than this."""
    def losses():
        layer_ops = family(Recipe.parse('mxfp8,dgrad.g=hifp8'))
        if make:
            return train_steps(small(make, layer_ops), pairs()[1], 5, 16, 0.002)
        *_, step, _ = mnist_train.prepare(*digits(), hidden=16, seed=2, layer_ops=layer_ops)
        return [float(get(step(put(np.arange(i, i + 20))))[0]) for i in range(5)]
    ours, theirs = map(np.array, on_both(device, losses))
    assert np.abs(theirs / ours - 1).max() <= 2e-3
