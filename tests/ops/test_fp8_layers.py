"""Linear layers whose products tensor cores compute in FP8, and the same layers with emulated rounding (--quant).

Runs on the emulation of a GPU too.
"""
import contextlib
import os

import numpy as np
import pytest
from places import ON_GPU, get, put
from translation import packed_batch, random_batch

from pyops import backend, formats
from pyops.errors import UserError
from pyops.ops import FeedForward, Linear
from pyops.ops.feed_forward_rounded import QuantizedFeedForward
from pyops.ops.fp8 import Fp8Products
from pyops.ops.linear import forward_each
from pyops.ops.linear_rounded import QuantizedLinear
from pyops.ops.rounding import LinearProducts
from pyops.optim import Adam
from pyops.params import Parameter
from pyops.plan import Plan
from pyops.quantization import FP8_RECIPE, Recipe, family
from transformer.model import Config, Transformer

R, O, I = 150, 70, 200                          # rows, outputs, inputs: no multiples of a block
HYBRID = 'fp8:block=tensor,dgrad.g=fp8:elem=e5m2:block=tensor,wgrad.g=fp8:elem=e5m2:block=tensor'
RECIPES = {'default': FP8_RECIPE.partition(';')[0], 'deepseek': 'linear=fp8,fwd.w=fp8:block=128x128,dgrad.w=fp8:block=128x128',
           'hybrid': HYBRID, 'forward only': 'fwd=fp8',
           'two formats': 'linear=fp8,wgrad.x=fp8:block=tensor,wgrad.g=fp8:elem=e5m2'}
U = 2.0**-24                                    # of a rounding to float32
ON_DEVICE = ON_GPU and not os.environ.get('PYOPS_EMULATE_CUDA')


def normal(shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def parameter(name, value):
    return Parameter(f'layer.{name}', put(value.copy()), put(np.zeros_like(value)))


def linear(recipe, fp8, weight, bias):
    return QuantizedLinear(parameter('weight', weight), parameter('bias', bias), recipe=family(Recipe.parse(recipe), fp8=fp8))


def host(x):
    return np.asarray(get(x)).copy()


def passes(layer, x, dy, into=None):
    """Return y, dx, dweight and dbias of one forward and one backward."""
    y, ctx = layer.forward(put(x))
    dx = layer.backward(put(dy), ctx, into=into)
    return dict(y=host(y), dx=host(dx), dweight=host(layer.weight.grad), dbias=host(layer.bias.grad))


def bounds(recipe, x, w, dy):
    """How far the results of both layers may be apart: docs/cuda.md#fp8 derives it.  On a GPU a sum
    of 128 terms has four times 33 addends of 14 bits."""
    def q(operand, matrix, axis):
        fmt = Recipe.parse(recipe).formats.get(operand)
        return abs(np.asarray(matrix if fmt is None else host(formats.fake_quantize(put(matrix), fmt, axis)), np.float64))
    operands = dict(y=(q('fwd.x', x, 1), q('fwd.w', w, 1).T), dx=(q('dgrad.g', dy, 1), q('dgrad.w', w, 0)),
                    dweight=(q('wgrad.g', dy, 0).T, q('wgrad.x', x, 0)))
    of_sums = 4 * 33 * 2.0**-13 if ON_DEVICE else 0
    return {name: ((a.shape[1] + a.shape[1] / 128 + 134) * U + of_sums) * (a @ b) for name, (a, b) in operands.items()}


def check(got, want, recipe, x, w, dy):
    for name, allowed in bounds(recipe, x, w, dy).items():
        assert (abs(got[name].astype(np.float64) - want[name]) <= allowed).all(), name
        assert np.abs(allowed).max() < 0.1 * np.abs(want[name]).max()           # the bound says something
    assert np.abs(got['dbias'] - want['dbias']).max() <= 1e-4


@pytest.mark.parametrize('recipe', RECIPES.values(), ids=RECIPES)
def test_a_layer_in_fp8_has_the_results_of_its_emulation_within_the_bound(recipe):
    x, w, b, dy = normal((R, I), 0), normal((O, I), 1), normal(O, 2), normal((R, O), 3)
    got, want = (passes(linear(recipe, fp8, w, b), x, dy) for fp8 in (True, False))
    check(got, want, recipe, x, w, dy)
    plain = passes(Linear(parameter('weight', w), parameter('bias', b)), x, dy)
    assert np.abs(got['y'] - plain['y']).max() > 10 * bounds(recipe, x, w, dy)['y'].max()


@pytest.mark.parametrize('recipe', [RECIPES['deepseek'], RECIPES['hybrid']], ids=['deepseek', 'hybrid'])
def test_training_in_fp8_agrees_with_emulated_training_step_by_step(recipe):
    """The witness of the emulated formats: least squares by gradient descent.  Each step begins with the same weights, since
    the last digit of a weight can decide its code; then two runs alone end with losses that agree to three digits."""
    x, start, b = normal((R, I), 0), normal((O, I), 4) / 16, np.zeros(O, np.float32)
    w = start
    target, rate = x @ normal((O, I), 1).T / I ** 0.5, np.float32(0.3)

    def gradient(y):
        return ((y - target) / R).astype(np.float32)

    losses, alone = [], {}
    for _ in range(4):
        layers = {fp8: linear(recipe, fp8, w, b) for fp8 in (True, False)}
        dy = gradient(host(layers[True].forward(put(x))[0]))
        results = {fp8: passes(layer, x, dy) for fp8, layer in layers.items()}
        check(results[True], results[False], recipe, x, w, dy)
        losses.append(float(np.square(results[True]['y'] - target).mean()))
        w, b = w - rate * results[True]['dweight'], b - rate * results[True]['dbias']
    assert losses[-1] < 0.5 * losses[0]
    for fp8 in (True, False):
        w, b = start, np.zeros(O, np.float32)
        for _ in range(4):
            layer = linear(recipe, fp8, w, b)
            y, ctx = layer.forward(put(x))
            layer.backward(put(gradient(host(y))), ctx, want_dx=False)
            alone[fp8] = float(np.square(host(y) - target).mean())
            w, b = w - rate * host(layer.weight.grad), b - rate * host(layer.bias.grad)
    assert alone[True] == pytest.approx(losses[-1], rel=1e-6) and alone[False] == pytest.approx(losses[-1], rel=1e-3)


def transformer(ops, layers=1):
    """Return a small transformer whose layers come from `ops`, and a batch."""
    config = Config(20, 21, d_model=16, d_ff=24, heads=2, layers=layers, num_steps=6, dropout=0.1, ops=ops)
    return Transformer(config, seed=3), packed_batch(*random_batch(config, 5))


class Witness:
    """Computes each product of FP8 layers also by the emulation, from the same operands, and compares within the bound."""

    def __init__(self, recipe, monkeypatch):
        self.recipe, self.inputs, self.compared, self.rounded = recipe, {}, [], []
        self.ours = Fp8Products.forward, Fp8Products.backward
        monkeypatch.setattr(Fp8Products, 'forward', lambda products, *given, **named: self.forward(products, *given, **named))
        monkeypatch.setattr(Fp8Products, 'backward', lambda products, *given, **named: self.backward(products, *given, **named))

    def emulated(self, products):
        weight = Parameter(products.weight.name, products.weight.value, put(host(products.weight.grad)))
        return LinearProducts(Recipe.parse(self.recipe), products.name, weight, products.bias)

    def near(self, name, got, want, allowed):
        assert (abs(host(got).astype(np.float64) - host(want)) <= allowed + 4 * U * abs(host(want))).all(), name
        self.compared.append(name)

    def forward(self, products, y, x, relu=False, copies=None):
        kept, want = self.ours[0](products, y, x, relu, copies), backend.empty(y.shape)
        self.emulated(products).forward(want, x, relu)
        rows, w = (host(array).reshape(-1, array.shape[-1]) for array in (x, products.weight.value))
        self.inputs[products.name] = x
        allowed = bounds(self.recipe, rows, w, np.zeros((len(rows), len(w)), np.float32))['y']
        self.near(f'{products.name}.fwd', y, want, allowed)
        if not relu:
            plain = rows @ w.T + (0 if products.bias is None else host(products.bias.value))
            self.rounded.append((abs(host(want) - plain) > allowed).mean())
        return kept

    def backward(self, products, g, kept, dx=None, accumulate=False):
        x, emulated = self.inputs.pop(products.name), self.emulated(products)
        want = put(host(dx)) if accumulate else backend.empty(dx.shape)
        its_kept = emulated.forward(backend.empty(g.shape), x)
        emulated.backward(g, its_kept, want, accumulate)
        self.ours[1](products, g, kept, dx, accumulate)
        rows, w, of_rows = (host(array).reshape(-1, array.shape[-1]) for array in (x, products.weight.value, g))
        allowed = bounds(self.recipe, rows, w, of_rows)
        self.near(f'{products.name}.wgrad', products.weight.grad, emulated.weight.grad, allowed['dweight'])
        self.near(f'{products.name}.dgrad', dx, want, allowed['dx'])


def test_training_steps_of_a_transformer_agree_with_their_emulation_in_each_product(monkeypatch):
    losses = {}

    def train(ops):
        model, batch, found = *transformer(ops), []
        optimizer = Adam(model.params, 0.005)
        for _ in range(2):
            model.params.zero_grads()
            loss, ctx = model.forward(batch, step=optimizer.count)
            model.backward(ctx)
            optimizer.step()
            found.append(float(get(loss)[0]))
        return np.array(found)

    losses['emulated'], losses['plain'] = (train(family(Recipe.parse(recipe))) for recipe in (FP8_RECIPE, 'none'))
    witness = Witness(FP8_RECIPE.partition(';')[0], monkeypatch)
    losses['fp8'] = train(family(Recipe.parse(FP8_RECIPE), fp8=True))
    assert len(witness.compared) == 2 * 3 * (4 + 2 + 8 + 2) and not witness.inputs
    assert ON_DEVICE or np.mean(witness.rounded) > 0.9          # the emulation is no plain product
    assert (abs(losses['fp8'] / losses['emulated'] - 1) <= 1e-3).all() and (losses['fp8'] != losses['plain']).all()


def encoded(plan):
    """Return the names of the tensors that a plan encodes."""
    return [action.tensors['x'].name for action in plan.actions if action.kernel == 'fp8_encode']


def test_layers_with_one_input_encode_it_once_for_all_with_the_same_formats():
    x, w, b, dy = normal((R, I), 0), normal((O, I), 1), normal(O, 2), normal((R, O), 3)
    given, recipes = put(x), (RECIPES['deepseek'], RECIPES['deepseek'], RECIPES['two formats'], 'none')
    layers = [Linear(parameter('weight', w), parameter('bias', b)) if recipe == 'none' else linear(recipe, True, w, b)
              for recipe in recipes]
    with Plan(x=given) as plan:
        results = forward_each(layers, given)
    assert encoded(plan).count('x') == 2
    for (y, ctx), layer, recipe in zip(results, layers, recipes, strict=True):
        dx = layer.backward(put(dy), ctx)
        if recipe != 'none':
            alone = passes(linear(recipe, True, w, b), x, dy)
            for name, got in dict(y=y, dx=dx, dweight=layer.weight.grad).items():
                assert np.array_equal(host(got), alone[name]), name


def test_a_transformer_encodes_each_tensor_once_in_a_step():
    model, batch = transformer(family(Recipe.parse(FP8_RECIPE), fp8=True), layers=2)
    with Plan(model.params, **model.arrays()) as plan:
        _, ctx = model.forward(batch)
        model.backward(ctx)
    names, inputs = encoded(plan), 2 * (1 + 1 + 2) + 2 * (1 + 1 + 1 + 1 + 2) + 1        # the last one: the memory
    assert len(names) == len(set(names)) == 32 + 32 + inputs       # weights, gradients, inputs


def test_passes_with_the_same_weights_encode_them_once_and_have_the_same_bits():
    found = {}
    for shares in (True, False):
        layers = family(Recipe.parse(FP8_RECIPE), fp8=True)
        model, batch = transformer(layers)
        with Plan(model.params, **model.arrays()) as plan, layers.same_weights() if shares else contextlib.nullcontext():
            for _ in range(2):
                _, ctx = model.forward(batch)
                model.backward(ctx)
        assert layers.weights is None
        first = host(model.params.grads)
        model.params.zero_grads()
        plan.run()
        assert np.array_equal(host(model.params.grads), first)
        found[shares] = len(encoded(plan)), first
    assert found[False][0] - found[True][0] == 16 and np.array_equal(found[True][1], found[False][1])


def test_a_gradient_of_the_input_is_added_or_left_out():
    recipe, x, w, b, dy = RECIPES['deepseek'], normal((R, I), 0), normal((O, I), 1), normal(O, 2), normal((R, O), 3)
    plain, before = passes(linear(recipe, True, w, b), x, dy), normal((R, I), 4)
    added = passes(linear(recipe, True, w, b), x, dy, into=put(before.copy()))
    assert np.abs(added['dx'] - (plain['dx'] + before)).max() <= 4 * U * np.abs(plain['dx'] + before).max()
    layer = linear(recipe, True, w, b)
    assert layer.backward(put(dy), layer.forward(put(x))[1], want_dx=False) is None
    assert np.array_equal(host(layer.weight.grad), plain['dweight'])


def test_feed_forward_multiplies_both_layers_in_fp8():
    recipe, D, F = RECIPES['deepseek'], 70, 150
    values = dict(w1=normal((F, D), 0), b1=normal(F, 1), w2=normal((D, F), 2), b2=normal(D, 3))
    x, dy, made = normal((R, D), 4), normal((R, D), 5), {}
    for fp8 in (True, False):
        layer = QuantizedFeedForward(*(parameter(name, value) for name, value in values.items()),
                                     recipe=family(Recipe.parse(recipe), fp8=fp8))
        y, ctx = layer.forward(put(x))
        dx = layer.backward(put(dy), ctx)
        made[fp8] = dict(y=host(y), dx=host(dx), w1=host(layer.w1.grad), b2=host(layer.b2.grad))
    for name, want in made[False].items():              # the last digit of h can decide its code: one of 16 steps of a number
        error = np.linalg.norm(made[True][name] - want) / np.linalg.norm(want)
        assert error <= 2.0**-8, name
    plain = FeedForward(*(parameter(name, value) for name, value in values.items())).forward(put(x))[0]
    assert np.linalg.norm(made[True]['y'] - host(plain)) > 2.0**-8 * np.linalg.norm(host(plain))


@pytest.mark.skipif(not ON_GPU, reason='the CPU library stores float32: run it with --on emulated')
def test_activations_stored_as_bfloat16_give_the_numbers_of_float32():
    recipe, w, b = RECIPES['deepseek'], normal((O, I), 1), normal(O, 2)
    results = {}
    x, dy = (host(as_bf16(normal(shape, seed))) for shape, seed in (((R, I), 0), ((R, O), 3)))
    for name, stored in (('fp32', put), ('bf16', as_bf16)):
        layer = linear(recipe, True, w, b)
        y, ctx = layer.forward(stored(x))
        dx = layer.backward(stored(dy), ctx)
        results[name] = host(y), host(dx), host(layer.weight.grad)
    for got, want in zip(results['bf16'], results['fp32'], strict=True):
        assert (abs(got - want) <= 2.0**-8 * abs(want)).all()
    assert np.array_equal(results['bf16'][2], results['fp32'][2])


def as_bf16(x):
    y = backend.empty(x.shape, backend.BF16)
    backend.convert(y, put(x))
    return y


def test_a_plan_replays_a_layer_in_fp8_with_the_same_bits():
    x, w, b, dy = normal((R, I), 0), normal((O, I), 1), normal(O, 2), normal((R, O), 3)
    layer, given = linear(RECIPES['deepseek'], True, w, b), (put(x), put(dy))
    with Plan() as plan:
        y, ctx = layer.forward(given[0])
        dx = layer.backward(given[1], ctx)
    first = host(y), host(dx), host(layer.weight.grad)
    assert [action.kernel for action in plan.actions] == [
        'fp8_encode', 'fp8_encode', 'gemm_fp8', 'column_sums', 'fp8_encode', 'gemm_fp8', 'gemm_fp8']
    layer.weight.grad[...] = np.zeros((O, I), np.float32)
    plan.run()
    for got, want in zip((y, dx, layer.weight.grad), first, strict=True):
        assert np.array_equal(host(got), want)


def test_layers_that_fp8_cannot_multiply_are_errors():
    weights = parameter('weight', normal((O, I), 1)), parameter('bias', normal(O, 2))
    of_all = family(Recipe.parse('fp8'), fp8=True)
    for make, name in ((lambda: of_all.LinearCrossEntropy(*weights, name='output'), 'output'),
                       (lambda: of_all.Attention(2, name='attention'), 'attention')):
        with pytest.raises(UserError, match=f'^--quant fp8: {name} is no linear layer that can multiply in FP8'):
            make()
    assert type(of_all.Linear(*weights)) is QuantizedLinear
    with pytest.raises(UserError, match='tensor cores multiply fp8 or fp8:elem=e5m2'):
        family(Recipe.parse('linear=mxfp8'), fp8=True).Linear(*weights)
    default = family(Recipe.parse(FP8_RECIPE), fp8=True)
    assert type(default.LinearCrossEntropy(*weights, name='output')).__name__ == 'LinearCrossEntropy'
