"""Weights in int8, bfloat16 and packed float32 for inference: products against exact integers and the unpacked product,
embeddings, the largest logits, models."""
import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from backends import cpu_has
from conftest import ROOT, environment_without
from places import ON_GPU
from small_models import make_seq2seq, make_transformer, pairs

from pyops import backend
from pyops.backend import launch, work_size
from pyops.compute import Compute
from pyops.ops.compact import FORMATS, CompactWeight
from pyops.text.decoding import BeamDecoder, Search
from pyops.text.pairs import Sequences
from seq2seq.model import Config as Seq2SeqConfig
from seq2seq.model import Seq2Seq
from transformer.model import Config, Transformer

pytestmark = pytest.mark.skipif(ON_GPU, reason='compact weights are for the CPU: run it with --on cpu')
# groups of 64 rows, chunks of 512, quads of 4 terms, blocks of 256; at most 6 rows of x in a tile, 32 and 16 with AMX
SIZES = [(1, 1, 1), (2, 3, 4), (5, 64, 5), (6, 65, 256), (7, 130, 257), (13, 512, 63), (40, 600, 300), (0, 70, 8),
         (33, 70, 128), (51, 128, 64),
         (1, 600, 1000)]            # shared by threads because the weight is large
ISAS = 'generic', 'avx2', 'avx2_vnni', 'avx512', 'avx512_vnni', 'amx_int8'


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def packed(weight, bias, format):
    found = CompactWeight(['weight'], weight.shape, format, [] if bias is None else ['bias'])
    found.pack({'weight': weight, 'bias': bias})
    return found


def rounded(x):
    """Return the integers and scales of the rows of x, in float32 as pyops.h defines them."""
    most = np.abs(x).max(1)
    with np.errstate(divide='ignore', invalid='ignore'):
        q = np.rint(x * (np.float32(127) / most)[:, None])
    return np.where(most[:, None] > 0, q, 0).astype(np.int64), most / np.float32(127)


def expected(x, weight, bias):
    (q, s), (w, scales) = rounded(x), rounded(weight)
    y = (q @ w.T).astype(np.float32) * (scales * s[:, None]) + (0 if bias is None else bias)
    return y.astype(np.float32)


def to_bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


# ---- products --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('R,O,I', SIZES)
def test_a_product_in_int8_is_that_of_exact_integers_to_the_bit(R, O, I):
    x, weight, bias = normal(R, I), normal(O, I, seed=1) * np.linspace(0.1, 9, O, dtype='f')[:, None], normal(O, seed=2)
    for given in (bias, None):
        layer, want = packed(weight, given, 'int8'), expected(x, weight, given)
        assert layer.linear(x, 'y').tobytes() == want.tobytes()
        assert layer.linear(x, 'y', relu=True).tobytes() == np.maximum(want, 0).tobytes()
        before = normal(R, O, seed=3)
        y = before.copy()
        assert layer.linear(x, 'y', into=y) is y and y.tobytes() == (want + before).tobytes()


@pytest.mark.parametrize('I', [3, 1000, 131072])
def test_sums_of_the_largest_integers_do_not_overflow(I):
    x = np.full((3, I), 2.0, np.float32)
    x[1] *= -1
    x[2, ::2] *= -1
    weight = np.full((2, I), -0.5, np.float32)
    weight[1, I // 2:] *= -1
    assert packed(weight, None, 'int8').linear(x, 'y').tobytes() == expected(x, weight, None).tobytes()
    assert abs(expected(x, weight, None)[0, 0]) == pytest.approx(I)


def test_sums_that_do_not_fit_in_16_bits_are_divided():
    """AVX2 adds four products in 16 bits, but not if their four numbers of x add up to more than 128."""
    sums = np.array([0, 127, 128, 129, 251, 252, 253, 254, 381, 508] * 8)
    x = np.zeros((80, 264), np.float32)
    x[:, 259] = 127                     # so the integers are the numbers
    for i, row in enumerate(x):
        for first in (0, 8, 248)[:1 + i % 3]:
            row[first + 2 * (i // 10 % 2) + np.array([0, 1, 4, 5])] = (sums[i] + np.arange(4)) // 4
    x[20:40] *= -1
    x[40:, :8] *= np.random.default_rng(0).choice([-1, 1], (40, 8))
    weight = np.random.default_rng(1).choice([-127, 127], (70, 264)).astype('f')
    weight[:2] = [[127], [-127]]
    assert packed(weight, None, 'int8').linear(x, 'y').tobytes() == expected(x, weight, None).tobytes()


def test_rows_of_zeros_nan_and_infinity():
    x, weight = normal(6, 20), normal(70, 20, seed=1)
    x[1], x[2, 3], x[3, 4], x[4] = 0, np.nan, np.inf, 1e-31
    weight[5], weight[6, 7], weight[69, 0] = 0, np.nan, -np.inf
    y = packed(weight, np.ones(70, 'f'), 'int8').linear(x, 'y')
    assert np.isnan(y[2:4]).all() and np.isnan(y[:, [6, 69]]).all()
    fine = np.ones(70, bool)
    fine[[6, 69]] = False
    assert (y[1][fine] == 1).all() and (y[4][fine] == 1).all() and (y[[0, 5], 5] == 1).all()
    good = expected(x[[0, 5]], weight[fine], np.ones(68, 'f'))
    assert y[[0, 5]][:, fine].tobytes() == good.tobytes()
    assert np.isnan(packed(weight, None, 'int8').linear(x[2:3], 'y', relu=True)).all()


@pytest.mark.parametrize('R,O,I', SIZES)
def test_a_product_in_bfloat16_is_that_of_rounded_factors(R, O, I):
    x, weight, bias = normal(R, I), normal(O, I, seed=1), normal(O, seed=2)
    want = to_bf16(x).astype('d') @ to_bf16(weight).astype('d').T + bias
    y = packed(weight, bias, 'bf16').linear(x, 'y')
    assert np.abs(y - want).max(initial=0) <= 2e-6 * np.sqrt(I) * 4
    assert (packed(weight, bias, 'bf16').linear(x, 'y', relu=True) == np.maximum(y, 0)).all()
    before = normal(R, O, seed=3)
    assert np.allclose(packed(weight, bias, 'bf16').linear(x, 'y', into=before.copy()), before + y, atol=1e-5)


@pytest.mark.parametrize('R,O,I', SIZES)
def test_a_product_in_packed_float32_has_the_bits_of_the_unpacked_product(R, O, I):
    x, weight, bias, want = normal(R, I), normal(O, I, seed=1), normal(O, seed=2), np.empty((R, O), np.float32)
    for given in (bias, None):
        layer = packed(weight, given, 'float32')
        for relu in (False, True):
            backend.gemm(want, x, weight.T, given, relu=relu)
            assert layer.linear(x, 'y', relu=relu).tobytes() == want.tobytes()
    y = normal(R, O, seed=3)
    want = y + layer.linear(x, 'y')
    assert layer.linear(x, 'y', into=y) is y and np.allclose(y, want, atol=1e-5)


def test_packed_float32_ignores_the_precision_of_products():
    x, layer = normal(20, 40), packed(normal(50, 40, seed=1), None, 'float32')
    want = layer.linear(x, 'y')
    try:
        backend.HOST.precision = 'bf16'
        assert layer.linear(x, 'y').tobytes() == want.tobytes()
        assert packed(normal(50, 40, seed=1), None, 'float32').values.tobytes() == layer.values.tobytes()
    finally:
        backend.HOST.precision = 'fp32'


@pytest.mark.skipif(backend.HOST.exact, reason='exact kernels are in use: run without PYOPS_EXACT')
def test_a_weight_packed_in_float32_is_refused_by_kernels_with_another_layout():
    """With AMX the layout of exact kernels differs; elsewhere it is the same."""
    weight, x = normal(130, 140), normal(3, 140, seed=1)
    layer = packed(weight, None, 'float32')
    try:
        backend.HOST.exact = True
    except ValueError as error:
        pytest.skip(f'{error}: run on x86-64 with a library that has exact kernels')
    try:
        if backend.float32_isa() == 'amx_bf16':
            with pytest.raises(ValueError, match='compact_linear: the weight was packed before set_exact changed its layout'):
                layer.linear(x, 'y')
            layer = packed(weight, None, 'float32')
        assert np.allclose(layer.linear(x, 'y'), x @ weight.T, rtol=1e-5, atol=1e-5)
    finally:
        backend.HOST.exact = False


@pytest.mark.parametrize('format', FORMATS)
def test_a_row_has_the_same_bits_for_any_number_of_rows_and_threads(format):
    x, weight = normal(150, 300), normal(1300, 300, seed=1)
    layer, before = packed(weight, normal(1300, seed=2), format), backend.threads()
    whole = layer.linear(x, 'y')
    index, logp = layer.topk(x, 5, 'topk')
    try:
        for threads in (1, 3):
            backend.set_threads(threads)
            again = packed(weight, normal(1300, seed=2), format)
            assert again.values.tobytes() == layer.values.tobytes()
            assert layer.linear(x, 'y').tobytes() == whole.tobytes()
            for n in (1, 2, 7, 11):
                assert layer.linear(x[:n], 'y').tobytes() == whole[:n].tobytes()
                found = layer.topk(x[:n], 5, 'topk')
                assert found[0].tobytes() == index[:n].tobytes() and found[1].tobytes() == logp[:n].tobytes()
    finally:
        backend.set_threads(before)


@pytest.mark.parametrize('format', FORMATS)
def test_nothing_beyond_the_result_is_written(format):
    guard, weight = np.float32(7.5), normal(70, 9)
    memory = np.full(100 + 3 * 70 + 100, guard)
    y = memory[100:310].reshape(3, 70)
    assert packed(weight, None, format).linear(normal(3, 9), 'y', out=y) is y
    assert (memory[:100] == guard).all() and (memory[310:] == guard).all() and (y != guard).all()


def test_layers_with_one_input_are_one_product():
    parts, biases = [normal(n, 20, seed=n) for n in (5, 70)], [normal(n, seed=9) for n in (5, 70)]
    joined = CompactWeight(['a', 'b'], (75, 20), 'int8', ['c', 'd'])
    joined.pack(dict(zip('abcd', (*parts, *biases), strict=True)))
    x = normal(3, 20)
    want = np.concatenate([expected(x, *one) for one in zip(parts, biases, strict=True)], 1)
    assert joined.linear(x, 'y').tobytes() == want.tobytes()


# ---- embeddings and logits -------------------------------------------------------------------------------------------

@pytest.mark.parametrize('V,E', [(1, 1), (70, 5), (600, 300), (1030, 257)])
def test_an_embedding_is_a_row_of_the_rounded_weight(V, E):
    weight, ids = normal(V, E), np.random.default_rng(0).integers(0, V, (3, 50)).astype(np.int32)
    q, scales = rounded(weight)
    want = scales[:, None] * q.astype('f')
    assert (packed(weight, None, 'int8').rows(ids, 'y') == want[ids]).all()
    assert (packed(weight, None, 'bf16').rows(ids, 'y') == to_bf16(weight)[ids]).all()
    assert (packed(weight, None, 'float32').rows(ids, 'y') == weight[ids]).all()


@pytest.mark.parametrize('format', FORMATS)
@pytest.mark.parametrize('R,V,D,k', [(1, 1, 3, 1), (3, 70, 20, 5), (140, 1300, 33, 32)])
def test_the_largest_logits_are_those_of_the_product(R, V, D, k, format):
    x, layer = normal(R, D), packed(normal(V, D, seed=1), normal(V, seed=2), format)
    logits = layer.linear(x, 'y')
    want = np.argsort(-logits, 1, kind='stable')[:, :k]
    index, logp = layer.topk(x, k, 'topk')
    assert (index == want).all() and (layer.argmax(x, 'topk') == want[:, 0]).all()
    shifted = logits.astype('d') - logits.max(1, keepdims=True)
    all_logp = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    assert np.abs(logp - np.take_along_axis(all_logp, want, 1)).max() <= 1e-5


def test_the_first_of_equal_logits_and_nan_come_first():
    weight = np.ones((1030, 4), np.float32)
    layer = packed(weight, None, 'int8')
    assert layer.topk(normal(2, 4), 3, 'topk')[0].tolist() == [[0, 1, 2]] * 2
    weight[700, 1] = np.nan
    assert packed(weight, None, 'int8').argmax(normal(2, 4), 'topk').tolist() == [700, 700]


# ---- instruction sets ------------------------------------------------------------------------------------------------

CODE = '''
import sys; sys.path.insert(0, 'tests/helpers')
import numpy as np
from pyops import backend
from pyops.ops.compact import CompactWeight
rng, parts = np.random.default_rng(5), []
for R, O, I in (1, 64, 256), (5, 100, 37), (49, 700, 300):
    layer = CompactWeight(['weight'], (O, I), 'int8', ['bias'])
    layer.pack({'weight': rng.standard_normal((O, I), 'f'), 'bias': rng.standard_normal(O, 'f')})
    x = rng.standard_normal((R, I), 'f')
    parts += [layer.linear(x, 'y'), layer.linear(x, 'y', relu=True), layer.argmax(x, 'k'),
              layer.rows(np.arange(O, dtype='i'), 'e')]
print(backend.int8_isa(), __import__('hashlib').sha256(b''.join(part.tobytes() for part in parts)).hexdigest())
'''


def test_all_instruction_sets_give_the_same_bits():
    found = {}
    for isa in filter(cpu_has, ISAS):
        out = subprocess.run([sys.executable, '-c', CODE], cwd=ROOT, text=True, capture_output=True, check=False,
                             env=environment_without('PYOPS_LIBRARY', PYOPS_ISA=isa))
        used, found[isa] = out.stdout.split() or (out.stderr, None)
        assert used == isa
    assert 'generic' in found and len(set(found.values())) == 1


def test_the_fastest_instructions_for_int8_are_used():
    if os.environ.get('PYOPS_ISA') or os.environ.get('PYOPS_LIBRARY'):
        pytest.skip('an instruction set or a library was requested: run it without PYOPS_ISA and PYOPS_LIBRARY')
    best = [isa for isa in ISAS if cpu_has(isa)][-1]
    assert backend.int8_isa() == best


# ---- arguments -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('sizes,text', [
    ((3, 4, 3), r'format=3, expected 0 \(int8\), 1 \(bf16\) or 2 \(float32\)'), ((0, 4, 0), 'O=0 I=4, expected .* at least 1'),
    ((1, 131073, 0), 'I=131073, expected at most 131072 in int8')])
def test_impossible_sizes_are_refused(sizes, text):
    O, I, format = sizes
    with pytest.raises(ValueError, match=text):
        launch('compact_weight', np.zeros(1, 'f'), np.zeros(1, 'f'), None, O, I, format)


def test_ids_and_k_out_of_range_are_refused():
    layer = packed(normal(5, 3), None, 'int8')
    with pytest.raises(ValueError, match=r'compact_embedding: ids\[1\]=5, expected 0 to 4'):
        layer.rows(np.array([0, 5], 'i'), 'y')
    with pytest.raises(ValueError, match='compact_topk: k=6, expected 1 to 5'):
        layer.topk(normal(1, 3), 6, 'y')
    with pytest.raises(ValueError, match='x: expected shape'):
        layer.linear(normal(1, 4), 'y')
    assert work_size('compact_weight', 5, 3, 0) * 4 == layer.nbytes


def test_int8_takes_a_quarter_of_the_memory_of_float32_and_bfloat16_half():
    for format, share in (('int8', 0.25), ('bf16', 0.5)):
        assert share <= packed(normal(640, 512), None, format).nbytes / (4 * 640 * 512) <= 1.03 * share


# ---- models ----------------------------------------------------------------------------------------------------------

def compact(plain, Model, Config_, format):
    """Return a model with the weights of `plain` in a compact format."""
    family = Compute(format)
    model = Model(Config_(**{**vars(plain.config), 'ops': family}), seed=None)
    tensors = {name: value.copy() for name, value in plain.params.arrays().items()}
    kept = set(tensors) - (family.names if family.rounds else set())
    for name in kept:
        model.params[name].value[...] = tensors[name]
    family.pack(model.params, tensors)
    assert set(model.params) == kept and family.nbytes > 0
    return model


def gru_with(**options):
    sizes, _ = pairs()
    return Seq2Seq(Seq2SeqConfig(*sizes, embedding=12, hidden=16, num_steps=6, **options), seed=3)


MODELS = {'seq2seq': (make_seq2seq, Seq2Seq, Seq2SeqConfig),
          'reset before': (lambda: gru_with(reset_before=True), Seq2Seq, Seq2SeqConfig),
          'attention': (lambda: gru_with(attention=2, bidirectional=True), Seq2Seq, Seq2SeqConfig),
          'transformer': (make_transformer, Transformer, Config)}


@pytest.mark.parametrize('format,share', [('bf16', 0.02), ('int8', 0.06)])
@pytest.mark.parametrize('name', MODELS)
def test_a_compact_model_is_near_the_model_in_float32(name, format, share):
    make, *classes = MODELS[name]
    plain, (_, data) = make(), pairs()
    model, source = compact(plain, *classes, format), Sequences.of([data.source[row] for row in range(20)], 6)
    target = Sequences.of([np.arange(4, 4 + n, dtype=np.int32) for n in np.arange(20) % 6 + 1], 6)
    h, want = model.forced(source, target)[0], plain.forced(source, target)[0]
    assert ((h - want) ** 2).mean() <= share ** 2 * (want ** 2).mean()
    labels = np.arange(len(h), dtype=np.int32) % 20
    loss, ctx = model.output.forward(h, labels)
    assert abs(float(loss[0]) - float(plain.output.forward(want, labels, gradients=False)[0][0])) < share
    assert int(ctx.valid[0]) == (labels != 0).sum()


@pytest.mark.parametrize('name', MODELS)
def test_a_packed_model_has_the_bits_of_the_model_in_float32(name):
    make, *classes = MODELS[name]
    plain, (_, data) = make(), pairs()
    model, source = compact(plain, *classes, 'float32'), Sequences.of([data.source[row] for row in range(20)], 6)
    target = Sequences.of([np.arange(4, 4 + n, dtype=np.int32) for n in np.arange(20) % 6 + 1], 6)
    assert model.forced(source, target)[0].tobytes() == plain.forced(source, target)[0].tobytes()
    assert model.translate(source).tobytes() == plain.translate(source).tobytes()
    search = Search(6, 3, 2)
    for one, other in zip(BeamDecoder(model, search)(source), BeamDecoder(plain, search)(source), strict=True):
        assert [(found.tokens.tolist(), found.score) for found in one] == [
            (found.tokens.tolist(), found.score) for found in other]


@pytest.mark.parametrize('name', MODELS)
def test_a_compact_model_decodes_step_by_step_as_in_one_pass(name):
    """In int8 a step has the bits of the whole pass up to attention, whose sums have another order."""
    make, *classes = MODELS[name]
    _, data = pairs()
    model = compact(make(), *classes, 'bf16')
    source = Sequences.of([data.source[row] for row in range(8)], 6)
    words = np.random.default_rng(0).integers(4, 20, (5, 8)).astype(np.int32)
    state, steps = model.start(source), []
    for word in words:
        h, state = model.next(word, state)
        steps.append(h)
    whole = model.forced(source, Sequences.of(list(words.T), 5))[0].reshape(8, 5, -1).swapaxes(0, 1)
    assert np.abs(np.array(steps) - whole).max() <= 0.02 * np.abs(whole).max()
    assert len({hashlib.sha256(h.tobytes()).digest() for h in steps}) == 5
