"""The plan: what it records, that replay is the same step, what it tells, how it refuses."""
import gc
import importlib
import json
import pkgutil
import shutil
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from conftest import ROOT
from places import ON_GPU, get, on_the_cpu, put
from translation import batch_of

from pyops import backend, init, ops
from pyops.backend import library
from pyops.backend.kernels import KERNELS, Kernel, declare
from pyops.ops import Attention, CrossEntropy, Linear, ReLU
from pyops.optim import Adam, inverse_square_root
from pyops.params import Parameters, Spec
from pyops.plan import Plan, boundary
from pyops.profile import machine
from seq2seq.model import Config, Seq2Seq
from transformer.model import Config as TransformerConfig
from transformer.model import Transformer


def normal(generator, shape):
    return generator.standard_normal(shape).astype('f')


class Tiny:
    """Two linear layers and a loss: small enough to know every tensor of its plan."""

    def __init__(self, B=6, I=5, H=4, C=3, seed=0, prefix=''):
        self.params = Parameters({'w1': Spec((H, I), normal), 'bias1': Spec((H,), normal),
                                  'w2': Spec((C, H), normal), 'bias2': Spec((C,), normal)}, seed)
        self.adam = Adam(self.params, lr=0.01, max_norm=1.0)
        p = self.params
        self.first, self.second = Linear(p['w1'], p['bias1'], f'{prefix}layer1'), Linear(p['w2'], p['bias2'], f'{prefix}layer2')
        self.relu, self.loss = ReLU('relu'), CrossEntropy(name='loss')
        rng = np.random.default_rng(seed)
        self.x, self.labels = put(rng.standard_normal((B, I)).astype('f')), put(rng.integers(0, C, B).astype('i'))
        self.one = put(np.ones(1, 'f'))

    def step(self, boundary=lambda: None):
        self.params.zero_grads()
        a, c1 = self.first.forward(self.x)
        r, c2 = self.relu.forward(a)
        y, c3 = self.second.forward(r)
        loss, c4 = self.loss.forward(y, self.labels)
        boundary()
        dy = self.loss.backward(self.one, c4)
        dr = self.second.backward(dy, c3)
        da = self.relu.backward(dr, c2)
        self.first.backward(da, c1, want_dx=False)
        self.adam.step()
        return loss

    def record(self):
        plan = Plan(self.params, x=self.x, labels=self.labels, one=self.one, **self.adam.arrays())
        with plan:
            loss = self.step(plan.boundary)
        return plan, loss


def same(a, b):
    return (get(a) == get(b)).all()


def test_replay_equals_eager_execution_bit_for_bit():
    planned, eager, rng = Tiny(), Tiny(), np.random.default_rng(1)
    plan, loss = planned.record()
    assert same(loss, eager.step())
    for step in range(100):
        x, labels = rng.standard_normal(eager.x.shape).astype('f'), rng.integers(0, 3, eager.labels.size).astype('i')
        eager.x[...], eager.labels[...] = x, labels
        plan.feed(x=x, labels=labels)
        if step == 50:                          # what changes between steps lies in memory
            eager.adam.rate[0] = planned.adam.rate[0] = 0.001
        plan.run()
        assert same(loss, eager.step())
        assert same(planned.params.values, eager.params.values)
    assert same(planned.params.m, eager.params.m) and get(planned.adam.count)[0] == get(eager.adam.count)[0] == 101


@pytest.mark.parametrize('dropout', [0.0, 0.3])
def test_replay_of_seq2seq_equals_eager_execution_bit_for_bit(dropout):
    config = Config(40, 50, embedding=16, hidden=24, num_steps=5, dropout=dropout)
    models = [Seq2Seq(config, seed=2) for _ in range(2)]
    adams, rng = [Adam(m.params, 0.005, max_norm=1.0) for m in models], np.random.default_rng(3)
    inputs = {name: put(np.ones(5 * 9, np.int32)) for name in ('source', 'target', 'labels')}

    def step(model, adam, source, target, labels, boundary=lambda: None):
        model.params.zero_grads()
        loss, ctx = model.forward(batch_of(source, target, labels, 5), adam.count)
        boundary()
        model.backward(ctx)
        adam.step()
        return loss

    plan = Plan(models[0].params, **inputs, **adams[0].arrays())
    with plan:
        loss = step(models[0], adams[0], **inputs, boundary=plan.boundary)
    step(models[1], adams[1], **inputs)
    for _ in range(10 if ON_GPU else 100):
        batch = {name: put(rng.integers(0, 40, 5 * 9).astype(np.int32)) for name in inputs}
        plan.feed(**batch)
        plan.run()
        assert same(loss, step(models[1], adams[1], **batch))
    assert same(models[0].params.values, models[1].params.values)


MODELS = {
    'seq2seq': lambda: Seq2Seq(Config(90, 70, embedding=20, hidden=16, num_steps=4, dropout=0.2), 2),
    'transformer': lambda: Transformer(TransformerConfig(90, 70, d_model=20, d_ff=8, num_steps=4), 2),
}


@pytest.mark.parametrize('name', MODELS)
def test_the_gradient_of_the_output_weight_is_added_where_it_is_computed(name):
    """A step has no second array of its size, and no launch that adds one."""
    model, batch = MODELS[name](), {name: put(np.ones(4 * 6, np.int32)) for name in ('source', 'target', 'labels')}
    with Plan(model.params, run=False, **batch, **model.arrays()) as plan:
        _, ctx = model.forward(batch_of(*batch.values(), 4))
        plan.boundary()
        model.backward(ctx)
    for parameter in ('weight', 'bias'):
        writers = [(action.kernel, argument) for action in plan.actions for argument, tensor in action.split()[1].items()
                   if tensor.name == f'output.{parameter}_grad']
        assert writers == [('linear_cross_entropy', f'd{parameter}')]
    known = {f'{name}{suffix}' for name in model.params for suffix in ('', '_grad')}
    used = {tensor for action in plan.actions for tensor in action.tensors.values()}
    assert not [str(t) for t in used if t.shape == model.params['output.weight'].value.shape and t.name not in known]


@pytest.mark.parametrize('max_norm, weight_decay', [(0.5, 0.0), (None, 0.0), (0.5, 0.1)])
@pytest.mark.parametrize('name', MODELS)
def test_sparse_gradients_of_embeddings_are_dense_training_bit_for_bit(name, max_norm, weight_decay):
    """Two replayed plans, one of them of a model whose blocks all count as touched; words are absent for long, and the rate
    follows a schedule."""
    models, rng, losses, plans = [MODELS[name]() for _ in range(2)], np.random.default_rng(5), [], []
    models[1].params.touched[...] = library.cpu().lib.PYOPS_DENSE
    for model in models:
        adam = Adam(model.params, 0.01, max_norm=max_norm, weight_decay=weight_decay)
        batch = {name: put(np.ones(4 * 6, np.int32)) for name in ('source', 'target', 'labels')}
        with Plan(model.params, run=False, **batch, **adam.arrays(), **model.arrays()) as plan:
            inverse_square_root(adam, 0.02, 10)
            model.params.zero_grads()
            loss, ctx = model.forward(batch_of(*batch.values(), 4), step=adam.count)
            model.backward(ctx)
            adam.step()
        plans.append(plan)
        losses.append(loss)
    few = 0
    for step in range(12 if ON_GPU else 120):
        first = 2 + 40 * (step // 10 % 2)           # the words of either half come for ten steps, and stay away for ten
        words = rng.integers(first, first + 28, (3, 4 * 6)).astype(np.int32)
        for plan in plans:
            plan.feed(source=words[0], target=words[1], labels=words[2])
            plan.run()
        assert same(*losses)
        few += (get(models[0].params.touched) == 0).any()
    for array in ('values', 'm', 'v', 'grads'):
        assert same(*(getattr(model.params, array) for model in models)), array
    assert few and (get(models[1].params.touched) != 0).all()


def test_a_plan_tells_what_is_touched_of_sparse_gradients():
    model = Seq2Seq(Config(400, 300, embedding=256, hidden=8, num_steps=3))
    adam, words = Adam(model.params, 0.01, max_norm=1.0), put(np.array([2, 3, 2] * 3, np.int32))
    with Plan(model.params, words=words, **adam.arrays(), **model.arrays()) as plan:
        model.params.zero_grads()
        _, ctx = model.forward(batch_of(words, words, words, 3))
        model.backward(ctx)
        adam.step()
    n, touched = model.params.values.size, model.params.touched.size
    listing = plan.listing()
    assert f'ZeroTouchedAction: -> grad Tensor(all_grad)({n}), touched Tensor(INT32)(touched)({touched})  [n={n}]' in listing
    assert 'touched Tensor(INT32)(decoder.embedding.weight_touched)(300)' in listing
    assert plan.memory().gradients == 4 * (n + touched)
    rows = {row.name: row for row in plan.profile(runs=2).rows()}
    read = 4 * (n - 256 * (400 - 2) - 256 * (300 - 2))              # of the gradient: two words of either side
    for name, bytes_ in (('zero_touched -> all_grad', read + 4 * touched), ('grad_norm -> norm', read + 4 * (touched + 1)),
                         ('adam -> parameters', read + 4 * (3 * n + touched + 4))):
        assert rows[name].bandwidth * rows[name].seconds == pytest.approx(bytes_), name


@pytest.mark.parametrize('masked', [True, False])
def test_replay_of_attention_equals_eager_execution_bit_for_bit(masked):
    """lengths and step are read anew; where they are None they stay out of the plan."""
    rng, op = np.random.default_rng(2), Attention(2, causal=True, p=0.3, key=7)
    arrays = {name: put(rng.standard_normal((9, 3, 8)).astype('f')) for name in ('q', 'k', 'v', 'dy')}
    if masked:
        arrays |= dict(lengths=put(np.array([9, 0, 5], 'i')), step=put(np.array([1])))

    def run(q, k, v, dy, lengths=None, step=None):
        y, ctx = op.forward(q, k, v, lengths, step)
        return y, *op.backward(dy, ctx)

    with Plan(**arrays) as plan:
        planned = run(**arrays)
    for step in range(2, 5):
        for name in ('q', 'dy'):
            arrays[name][...] = rng.standard_normal((9, 3, 8)).astype('f')
        if masked:
            arrays['lengths'][...], arrays['step'][0] = rng.integers(0, 10, 3).astype('i'), step
        plan.run()
        eager = run(**arrays)
        assert all(same(a, b) for a, b in zip(planned, eager, strict=True)) and get(eager[1]).any()
    assert {'attention.dq', 'attention.dk', 'attention.dv'} <= {t.name for a in plan.actions for t in a.tensors.values()
                                                               if t.kind == 'gradient'}


def test_the_printed_plan_names_every_tensor_with_its_shape():
    plan, _ = Tiny().record()
    lines = str(plan).splitlines()
    want = {'x': '(6, 5)', 'w1': '(4, 5)', 'bias1': '(4)', 'layer1.y': '(6, 4)', 'relu.y': '(6, 4)', 'w2': '(3, 4)',
            'bias2': '(3)', 'layer2.y': '(6, 3)', 'loss.loss': '(1)', 'loss.stats': '(2, 6)', 'loss.dx': '(6, 3)',
            'layer2.dx': '(6, 4)', 'relu.dx': '(6, 4)', 'w1_grad': '(4, 5)', 'bias1_grad': '(4)', 'w2_grad': '(3, 4)',
            'bias2_grad': '(3)', 'norm': '(1)', 'lr': '(1)', 'one': '(1)',
            'w1_view': '(5, 4)', 'w2_view': '(4, 3)'}       # transposed
    found = {t.name: str(t)[len(f'Tensor({t.name})'):] for t in plan.tensors() if t.dtype == np.float32}
    for name, shape in want.items():
        assert found[name] == shape, name
    assert set(found) - set(want) <= {'all_grad', 'parameters', 'all_adam_m', 'all_adam_v', 'norm_work'}
    assert '\tTensor(INT32)(labels)(6)' in lines
    for title in ('Tensors:', 'Tensor Views:', 'Grad Tensors:', 'Actions:'):
        assert title in lines
    assert '\tTensor(w1_view)(5, 4) of Tensor(w1)(4, 5)' in lines
    gradients = lines[lines.index('Grad Tensors:') + 1:lines.index('Actions:')]
    assert '\tTensor(w1_grad)(4, 5)' in gradients and '\tTensor(relu.dx)(6, 4)' in gradients
    assert not any('Tensor(relu.y)' in line for line in gradients)
    boundary = next(i for i, line in enumerate(lines) if 'BoundaryAction' in line)
    kernels = [line.split('Action:')[0] for line in lines]
    assert kernels[boundary - 1] == 'CrossEntropyForward' and kernels[boundary + 1] == 'CrossEntropyBackward'
    assert [k for k in kernels if k.startswith('[once]')] == ['[once]Init'] * 4
    gemm = next(line for line in lines if line.startswith('GemmAction'))
    assert gemm == ('GemmAction: a Tensor(x)(6, 5), b Tensor(w1_view)(5, 4), bias Tensor(bias1)(4) -> c Tensor(layer1.y)(6, 4)'
                    '  [M=6 N=4 K=5 ldc=4 a_row=5 a_col=1 b_row=1 b_col=5 accumulate=0 relu=0]')


def test_a_view_is_named_after_its_tensor():
    x, one = put(np.arange(12, dtype='f').reshape(3, 4)), put(np.ones(1, 'f'))
    with Plan(x=x) as plan:
        y = backend.empty((3, 4), name='op.y')
        backend.launch('scale', y, x, one, 12)
        backend.launch('fill', y[1], 4, 0.0)
    assert '\tTensor(op.y_view)(4) of Tensor(op.y)(3, 4)' in str(plan).splitlines()


def test_an_array_over_several_parameters_has_their_names():
    params = Parameters({f'layer.{name}.weight': Spec((4, 4), init.ones()) for name in 'abc'})
    whole, one = params.joined(['layer.a.weight', 'layer.b.weight']), put(np.ones(1, 'f'))
    with Plan(params, one=one) as plan:
        backend.launch('scale', whole.grad, whole.value, one, 32)
        backend.launch('scale', params.grads, params.values, one, 48)
    first, second = ({name: (tensor.name, tensor.kind) for name, tensor in action.tensors.items()} for action in plan.actions)
    assert first == {'y': ('layer.a.weight_grad+b.weight_grad', 'gradient'), 'x': ('layer.a.weight+b.weight', 'parameter'),
                     'alpha': ('one', 'input')}
    assert second == {'y': ('all_grad', 'gradient'), 'x': ('parameters', 'parameter'), 'alpha': ('one', 'input')}


def test_actions_marked_once_run_once():
    count, table = put(np.zeros(1, np.int64)), put(np.zeros(4, 'f'))
    with Plan(count=count) as plan:
        with plan.once():
            backend.launch('fill', table, 4, 2.0)
            kept = backend.empty(4, name='kept')
            backend.launch('fill', kept, 4, 3.0)
            address = backend.location(kept)
            del kept
        later = backend.empty(4, name='later')
        backend.launch('increment', count)
    assert backend.location(later) != address, 'what was computed once was given away'
    table[...] = 0
    plan.run()
    plan.run()
    assert get(count)[0] == 3 and (get(table) == 0).all()
    assert str(plan).count('[once]FillAction') == 2


def test_memory_of_dead_arrays_is_handed_out_again():
    with Plan() as plan:
        first = backend.empty((100, 100), name='a')
        address = backend.location(first)
        view = first[3:]
        del first
        second = backend.empty((100, 100), name='b')
        assert backend.location(second) != address            # a view still holds the first
        del view
        third = backend.empty((90, 100), name='c')
        assert backend.location(third) == address
        small = backend.empty(10, name='d')             # a block much too large is not taken
    memory = plan.memory()
    assert memory.intermediates == 2 * 40000 // 64 * 64 + 64 and memory.saved_by_reuse == 36032
    del second, third, small


def test_memory_adds_up():
    tiny = Tiny(B=50, I=300, H=200, C=10)
    plan, _ = tiny.record()
    memory = plan.memory()
    nbytes = tiny.params.values.nbytes
    assert memory[:3] == (nbytes, nbytes, 2 * nbytes)
    assert memory.peak == sum(memory[:5])
    arrays = [(50, 200), (50, 200), (50, 10), (50, 10), (50, 200), (50, 200)]       # y, relu, y, dx, dx, dx
    assert memory.intermediates + memory.saved_by_reuse >= 4 * sum(a * b for a, b in arrays)
    assert memory.saved_by_reuse == 0 or memory.intermediates < 4 * sum(a * b for a, b in arrays) + 4096


PEAK = '''
import gc, resource, sys
import numpy as np
from pyops import backend
from pyops.optim import Adam
from pyops.plan import Plan
from pyops.text.pairs import Batch, Sequences
from seq2seq.model import Config, Seq2Seq

def resident():
    return next(int(line.split()[1]) * 1024 for line in open('/proc/self/status') if line.startswith('VmRSS'))

backend.launch('gemm', *np.zeros((3, 300, 300), 'f'), None, 300, 300, 300, 300, 300, 1, 300, 1, 0, 0)      # packing buffers
before = resident()
model = Seq2Seq(Config(3000, 5000, embedding=256, hidden=256))
adam = Adam(model.params, 0.005, max_norm=1.0)
sentences, labels = Sequences.of([np.ones(9, np.int32)] * 128, 9), np.ones(9 * 128, np.int32)
with Plan(model.params, ids=sentences.ids, labels=labels, **adam.arrays()) as plan:
    model.params.zero_grads()
    loss, ctx = model.forward(Batch(sentences, sentences, labels), adam.count)
    model.backward(ctx)
    adam.step()
for _ in range(3):
    plan.run()
gc.collect()
print(plan.memory().peak, resident() - before)
'''


@on_the_cpu
@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='reads /proc: run on Linux')
def test_peak_memory_is_what_the_operating_system_sees():
    out = subprocess.run([sys.executable, '-c', PEAK], cwd=ROOT, text=True, capture_output=True)
    assert out.returncode == 0, out.stderr
    plan, system = map(int, out.stdout.split())
    assert abs(plan - system) <= 0.1 * system, (plan, system)


def test_a_batch_of_another_shape_is_refused():
    plan, _ = Tiny().record()
    with pytest.raises(TypeError, match='labels: expected int32, got float64'):
        plan.feed(labels=np.zeros(6))
    with pytest.raises(ValueError, match=r'x: this plan was recorded with shape \(6, 5\), got \(7, 5\); record another'):
        plan.feed(x=np.zeros((7, 5), 'f'))


def test_a_plan_keeps_what_it_needs_alive_and_says_when_it_was_closed():
    tiny = Tiny()
    other = Tiny()
    plan, loss = tiny.record()
    other.step()
    del tiny
    gc.collect()
    junk = [np.full(50, np.nan, 'f') for _ in range(1000)]
    plan.run()
    assert same(loss, other.step())
    blocks = [weakref.ref(block) for block in plan._blocks]
    plan.close()
    gc.collect()
    assert len(blocks) > 3 and [block() is None for block in blocks].count(False) == 1      # the loss, held here
    with pytest.raises(RuntimeError, match='closed'):
        plan.run()
    assert len(junk) == 1000


def test_a_plan_that_holds_the_results_of_its_step_is_freed_with_its_last_reference():
    plan, plan.result = Tiny().record()
    blocks, gone = [weakref.ref(block) for block in plan._blocks], weakref.ref(plan)
    assert len(blocks) > 3
    del plan
    gc.collect()
    assert gone() is None and not any(block() for block in blocks)


def test_a_refused_action_is_named():
    table, rows, y = put(np.zeros((4, 3), np.uint8)), put(np.array([0, 3])), put(np.empty((2, 3), 'f'))
    with Plan(rows=rows) as plan:
        backend.launch('fill', y, 6, 0.0)
        backend.launch('gather_pixels', y, table, rows, 4, 2, 3, 1.0)
    rows[1] = 4
    with pytest.raises(ValueError, match=r'action 1, gather_pixels: gather_pixels: rows\[1\]=4, expected 0 to 3'):
        plan.run()
    rows[1] = 2
    plan.run()


def test_check_names_the_action_that_made_nan():
    tiny = Tiny()
    plan, _ = tiny.record()
    plan.check()
    tiny.params['w2'].value[0, 0] = np.nan
    with pytest.raises(FloatingPointError, match=r'GemmAction: .*Tensor\(layer2.y\)\(6, 3\).* c is not finite'):
        plan.check()


def test_a_plan_records_once_and_a_failed_recording_leaves_no_hook():
    plan = Plan()
    with pytest.raises(ZeroDivisionError), plan:
        backend.launch('fill', put(np.zeros(3, 'f')), 3, 1.0)
        raise ZeroDivisionError
    assert len(plan.actions) == 1
    backend.launch('fill', put(np.zeros(3, 'f')), 3, 1.0)
    assert len(plan.actions) == 1
    with pytest.raises(RuntimeError, match='records only once'), plan:
        pass


def test_large_keys_pass_through_replay():
    """A uint64 beyond 2^63 by value."""
    x, step, key = put(np.ones(100, 'f')), put(np.array([3])), 2**63 + 12345
    with Plan(x=x, step=step) as plan:
        y = backend.empty(100, name='y')
        backend.launch('dropout', y, x, step, 100, 0.5, key)
    before = get(y).copy()
    y[...] = 0
    plan.run()
    assert same(y, before) and before.any()


def test_the_summary_counts_the_kernels_of_each_part_and_the_memory():
    tiny = Tiny()
    plan, _ = tiny.record()
    # zero_grads, 2 products, relu, loss; loss, 1 for each layer with parameters, relu; norm, count, Adam
    peak = f'peak memory {plan.memory().peak / 2**20:.1f} MiB'
    assert plan.summary() == f'step : {len(plan.actions)} kernels (5 forward, 4 backward, 3 update), {peak}'
    with Plan(tiny.params) as whole:                    # without a boundary, as where a step is one kernel
        tiny.params.zero_grads()
        with whole.once():
            tiny.params.zero_grads()
    assert whole.summary().startswith('step : 1 kernel, peak memory ')
    with Plan(tiny.params) as forward:                  # without an update
        tiny.first.forward(tiny.x)
        forward.boundary()
    assert forward.summary().startswith('step : 1 kernel (1 forward, 0 backward, 0 update), ')


# ---- profile, trace, graph --------------------------------------------------------------------------

def test_profile_measures_every_action():
    tiny = Tiny(B=64, I=300, H=200)
    plan, _ = tiny.record()
    profile = plan.profile(runs=3)
    rows = profile.rows()
    assert len(rows) == len(plan.actions) and abs(sum(row.share for row in rows) - 1) <= 1e-9
    gemm = next(row for row in rows if row.name == 'gemm -> layer1.y')
    assert gemm.flops == pytest.approx(2 * 64 * 300 * 200 / gemm.seconds)
    assert gemm.bandwidth == pytest.approx(4 * (64 * 300 + 300 * 200 + 200 + 64 * 200) / gemm.seconds)
    assert gemm.of_peak == pytest.approx(gemm.flops / machine(backend.current_device()).flops)
    text = str(profile)
    assert text.splitlines()[0].split() == ['action', 'time/us', 'share', 'GFLOP/s', 'GB/s', 'of', 'peak']
    assert 'gemm -> layer1.y' in text and 'this machine: ' in text and 'a replay of all: ' in text and 'medians of 3' in text


@pytest.mark.parametrize('width, most', [(80, 80), (100, 100), (72, 72), (20, 72), (1000, 200)])
def test_the_table_of_a_profile_is_as_wide_as_the_terminal_at_most(width, most):
    plan, _ = Tiny(prefix='decoder.13.cross_attention.output.').record()
    profile = plan.profile(runs=1)
    head, *lines, total, machine_ = profile.table(width).splitlines()
    assert {len(line) for line in (head, *lines)} == {len(head)} and len(head) <= most and len(lines) == len(plan.actions)
    assert max(len(total), len(machine_)) <= 80
    if width <= 80:
        assert '\N{HORIZONTAL ELLIPSIS}' in ''.join(lines)
        (product,) = [line.split('  ')[0] for line in lines if line.startswith('gemm -> ') and '.layer2.y' in line]
        assert product.startswith('gemm -> decoder.13.cr') or width < 80    # both ends of the name
    else:
        assert '\N{HORIZONTAL ELLIPSIS}' not in ''.join(lines) or width == 100


@pytest.mark.parametrize('Tq,Tk,causal', [(4, 6, False), (4, 6, True), (6, 4, True)])
def test_the_cost_of_attention_is_that_of_the_scores_it_needs(Tq, Tk, causal):
    lengths = np.array([0, 3, Tk], 'i')
    sizes = dict(Tq=Tq, Tk=Tk, B=3, heads=2, C=5, causal=causal)
    for given in (None, lengths):
        scores = sum(j < (Tk if given is None else given[b]) and (not causal or j <= i + Tk - Tq)
                     for b in range(3) for i in range(Tq) for j in range(Tk))
        for kernel, products in (('attention_forward', 2), ('attention_backward', 5)):
            assert KERNELS[kernel].flops(sizes, dict(lengths=given).get) == products * 2 * scores * 2 * 5


def test_every_kernel_of_the_header_is_declared():
    for module in ('fit', 'optim', 'formats', 'data.batches', 'inspect.payload', 'inspect.statistics',
                   *(f'ops.{m.name}' for m in pkgutil.iter_modules(ops.__path__))):
        importlib.import_module(f'pyops.{module}')                      # which declares the kernels that it launches
    kernels = {name.removeprefix('pyops_') for name, function in library.cpu().functions.items()
               if function.arguments and function.arguments[-1].name == 'stream'}
    assert set(KERNELS) == kernels - {'replay'}
    with pytest.raises(ValueError, match='dropout: this kernel is declared twice'):
        declare(dropout=Kernel())
    assert machine().flops > 1e8 and machine().bandwidth > 1e8


def test_a_python_function_between_kernels_is_recorded_replayed_and_timed(tmp_path):
    x, y, two, seen = put(np.ones(4, 'f')), put(np.zeros(4, 'f')), put(np.full(1, 2, 'f')), []

    def function():
        seen.append(get(y).tolist())
        x[...] = get(y) + 1

    plan = Plan(run=False, x=x, y=y)
    with plan:
        backend.launch('scale', y, x, two, 4)
        backend.call('sum_somewhere', function, {'y': y}, {'x': x})
        backend.launch('scale', y, x, two, 4)
    assert seen == []
    plan.run()
    assert seen == [[2] * 4] and get(y).tolist() == [6] * 4
    plan.run(2, 3)
    assert len(seen) == 1
    plan.run(0, 2)
    assert seen[1] == [6] * 4 and get(x).tolist() == [7] * 4
    plan.check()
    assert str(plan).endswith('SumSomewhereAction: y Tensor(y)(4) -> x Tensor(x)(4)  [on the host]\n' + str(plan.actions[2]))
    profile = plan.profile(runs=2)
    assert [row.name for row in profile.rows()] == ['scale -> y', 'sum_somewhere -> x', 'scale -> y']
    assert (profile.times > 0).all() and [one for one, _ in plan.timed(1, 3)] == plan.actions[1:]
    plan.dot(tmp_path / 'plan.dot')
    assert '"sum_somewhere"' in (tmp_path / 'plan.dot').read_text() and plan.undeclared() == []
    backend.call('sum_somewhere', function, {'y': y}, {'x': x})         # without a plan, now
    assert seen[-1] == get(y).tolist()


def test_the_trace_is_what_chrome_reads(tmp_path):
    plan, _ = Tiny().record()
    plan.profile(runs=2).trace(tmp_path / 'trace.json')
    events = json.loads((tmp_path / 'trace.json').read_text())['traceEvents']
    assert [e['name'] for e in events] == [a.kernel for a in plan.actions]
    for before, after in zip(events, events[1:], strict=False):
        assert before['ph'] == 'X' and after['ts'] >= before['ts'] + before['dur'] - 1e-6


def test_the_graph_is_what_graphviz_reads(tmp_path):
    plan, _ = Tiny().record()
    plan.dot(tmp_path / 'plan.dot')
    text = (tmp_path / 'plan.dot').read_text()
    assert text.count('shape=box') == len(plan.actions) and 'layer1.y' in text
    if not shutil.which('dot'):
        pytest.skip('Graphviz is not installed: apt install graphviz')
    subprocess.run(['dot', '-Tsvg', tmp_path / 'plan.dot', '-o', tmp_path / 'plan.svg'], check=True)
    assert '<svg' in (tmp_path / 'plan.svg').read_text()


def test_kernel_numbers_are_those_of_the_header():
    ffi, lib, functions = library.cpu()
    kernels = [name for name, f in functions.items() if f.arguments and f.arguments[-1].name == 'stream']
    numbers = [lib.pyops_kernel_number(name.encode()) for name in kernels if name != 'pyops_replay']
    assert numbers == list(range(len(kernels) - 1))
    assert lib.pyops_kernel_number(b'pyops_nonsense') == -1


def test_a_plan_can_be_recorded_without_running():
    """Then it knows tensors and memory before the first step, and its first run is the first step."""
    planned, eager = Tiny(), Tiny()
    before = get(planned.params.values).copy()
    plan = Plan(planned.params, run=False, x=planned.x, labels=planned.labels, one=planned.one, **planned.adam.arrays())
    with plan:
        loss = planned.step(plan.boundary)
    assert same(planned.params.values, before) and get(planned.adam.count)[0] == 0
    assert plan.memory() == Tiny().record()[0].memory()
    plan.run()
    assert same(loss, eager.step()) and same(planned.params.values, eager.params.values)


def test_the_kind_of_an_array_does_not_depend_on_its_name():
    arrays = dict(name='x.data', kind='intermediate'), dict(name='work', kind='intermediate'), \
        dict(name='slope', kind='gradient'), dict(name='y.dx', kind='scratch')
    with Plan(run=False) as plan:
        held = [backend.empty(2, **array) for array in arrays] + [backend.empty_gradient(2, 'slopes')]
        for array in held:
            backend.launch('fill', array, 2, 0.0)
    want = {array['name']: array['kind'] for array in arrays} | {'slopes': 'gradient'}
    assert {tensor.name: tensor.kind for tensor in plan.tensors()} == want
    lines = str(plan).splitlines()
    assert lines[lines.index('Grad Tensors:') + 1:lines.index('Actions:')] == ['\tTensor(slope)(2)', '\tTensor(slopes)(2)']


# ---- threads ---------------------------------------------------------------------------------------------------------

def fill(array, value):
    backend.launch('fill', array, array.size, value)


def test_two_threads_record_one_after_the_other():
    mine, other, inside, may_leave = backend.zeros(8), backend.zeros(8), threading.Event(), threading.Event()
    plans = Plan(), Plan()

    def record():
        with plans[1]:
            inside.set()
            fill(other, 1.0)
            may_leave.wait(240)
            fill(other, 2.0)
    thread = threading.Thread(target=record)
    with plans[0]:
        fill(mine, 3.0)
        thread.start()
        inside.wait(0.2)                # it never is, since this thread records
        fill(mine, 4.0)
        may_leave.set()
    thread.join(240)
    assert [[action.kernel for action in one.actions] for one in plans] == [['fill'] * 2] * 2
    for array in mine, other:
        fill(array, 0.0)
    for one in plans:
        one.run()
    assert get(mine).tolist() == [4.0] * 8 and get(other).tolist() == [2.0] * 8


def test_another_thread_may_run_ops_and_calls_while_a_plan_records():
    mine, other, inside, may_leave = backend.zeros(8), backend.zeros(8), threading.Event(), threading.Event()

    def function():
        inside.set()
        may_leave.wait(240)
        fill(other, 1.0)

    def run():
        boundary()
        fill(other, 2.0)
        backend.call('wait', function, {}, {'other': other})
    thread = threading.Thread(target=run)
    with Plan() as recorded:
        fill(mine, 3.0)
        thread.start()
        assert inside.wait(240)          # of a call in the other thread
        fill(mine, 4.0)
        may_leave.set()
        thread.join(240)
        fill(mine, 5.0)
    assert [action.kernel for action in recorded.actions] == ['fill'] * 3 and recorded._boundary is None
    assert get(other).tolist() == [1.0] * 8
