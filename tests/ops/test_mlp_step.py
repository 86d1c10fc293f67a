"""The training step of the digits' network as one op: against its parts on the CPU, and what it leaves alone.

Runs on the CPU, and with PYOPS_BACKEND=gpu on a GPU or its emulation.  At the end, the emulator's own: no bit of a result
depends on the order of threads or the number of multiprocessors.
"""
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from places import ON_GPU, get, launch, on_the_cpu, put

from mnist import train
from mnist.model import MLP, Config
from pyops import backend
from pyops.autograd import Tensor
from pyops.backend.kernels import KERNELS
from pyops.fit import History
from pyops.ndarray import as_ndarray
from pyops.optim import SGD, Adam
from pyops.params import Parameters, Spec
from pyops.steps import Steps

EMULATED = ROOT / 'pyops' / 'libpyops_emulated.so'
BUFFERS = 'values', 'grads', 'm', 'v'
# N, B, I, H, C
SIZES = (1, 1, 1, 1, 1), (9, 7, 17, 33, 5), (60, 33, 784, 30, 10), (6, 131, 9, 40, 17), (4, 3, 70, 128, 128)


def digits(N, I, C, seed=0):
    rng = np.random.default_rng(seed)
    images = (rng.integers(0, 256, (N, I)) * (rng.random((N, I)) < 0.3)).astype(np.uint8)
    return images, rng.integers(0, C, N).astype(np.int32)


def made(I, H, C, **settings):
    model = MLP(Config(I, H, C), seed=4)
    return model, Adam(model.params, 0.01, **settings)


def step_by_parts(model, adam, images, rows, labels):
    model.params.zero_grads()
    loss, _, ctx = model.forward(images, rows, labels[rows])
    model.backward(ctx)
    adam.step()
    return loss


def state(model, adam):
    return [get(getattr(model.params, name)).copy() for name in BUFFERS] + [get(adam.count).copy()]


# ---- the same numbers ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('max_norm, weight_decay', [(None, 0.0), (1e-2, 0.0), (1e3, 0.1)], ids=['never', 'clips', 'would'])
@pytest.mark.parametrize('size', SIZES)
def test_twenty_steps_equal_those_of_the_parts_on_the_cpu(size, max_norm, weight_decay):
    N, B, I, H, C = size
    settings = dict(max_norm=max_norm, weight_decay=weight_decay, beta1=0.8, beta2=0.95, eps=1e-4)
    images, labels = digits(N, I, C)
    rng = np.random.default_rng(1)
    model, adam = made(I, H, C, **settings)
    with backend.on(backend.HOST):
        twin, its_adam = made(I, H, C, **settings)
    here = put(images), put(labels)
    for k in range(20):
        rows = rng.integers(0, N, B)
        adam.lr = its_adam.lr = 0.02 / (k + 1)              # read from memory
        loss = get(model.step(here[0], put(rows), here[1], adam))[0]
        with backend.on(backend.HOST):
            want = step_by_parts(twin, its_adam, images, rows, labels)[0]
        assert abs(loss - want) <= 1e-5 * max(want, 1e-3)
        if max_norm and size != SIZES[0]:
            assert abs(get(adam.norm)[0] - its_adam.norm[0]) <= 1e-5 * its_adam.norm[0]
            assert adam.clipped() == its_adam.clipped() == (max_norm < 1)
    for name in BUFFERS:
        ours, theirs = get(getattr(model.params, name)), getattr(twin.params, name)
        assert np.abs(ours - theirs).max() <= 1e-5 * max(np.abs(theirs).max(), 1e-3), name
    assert get(adam.count)[0] == 20 and (max_norm or get(adam.norm)[0] == 0)


@on_the_cpu
def test_on_the_cpu_it_has_the_bits_of_its_parts():
    images, labels = digits(40, 784, 10)
    (model, adam), (twin, its_adam) = made(784, 30, 10), made(784, 30, 10)
    for k in range(5):
        rows = np.arange(10 * k, 10 * k + 10) % 40
        loss, whole = model.step(images, rows, labels, adam), twin.whole
        assert whole.gradients(images, rows, labels)[0] == loss[0]
        its_adam.step()
    assert all((a == b).all() for a, b in zip(state(model, adam), state(twin, its_adam), strict=True))


def test_replayed_steps_equal_eager_ones_bit_for_bit():
    images, labels = digits(40, 50, 10)
    (model, adam), (twin, its_adam) = made(50, 11, 10, max_norm=0.1), made(50, 11, 10, max_norm=0.1)
    here = put(images), put(labels)
    planned = Steps(lambda rows: twin.step(here[0], rows, here[1], its_adam), twin.params,
                    images=here[0], labels=here[1], **its_adam.arrays())
    rng = np.random.default_rng(2)
    for k in range(12):
        rows = put(rng.integers(0, 40, 7 if k % 3 else 5))
        adam.lr = its_adam.lr = 0.01 / (k + 1)
        assert get(model.step(here[0], rows, here[1], adam))[0] == get(planned(rows))[0]
        assert get(adam.norm)[0] == get(its_adam.norm)[0]
    assert all((a == b).all() for a, b in zip(state(model, adam), state(twin, its_adam), strict=True))
    plan = planned.plans[7][0]
    assert [action.kernel for action in plan.actions] == ['mlp_step'] and 'Tensor(mlp.loss)(1)' in str(plan)
    arguments = plan.actions[0].scalars
    cost = KERNELS['mlp_step']
    assert cost.flops(arguments, None) == 7 * 11 * (4 * 50 + 6 * 10) and cost.bytes(arguments) > 28 * 11 * 50


@pytest.mark.parametrize('max_norm', (None, 0.05))
@pytest.mark.parametrize('size', SIZES)
def test_several_steps_at_once_have_the_bits_of_single_steps(size, max_norm):
    N, B, I, H, C = size
    images, labels = digits(N, I, C)
    here, K = (put(images), put(labels)), 4
    (model, adam), (twin, its_adam) = made(I, H, C, max_norm=max_norm), made(I, H, C, max_norm=max_norm)
    rows = np.random.default_rng(6).integers(0, N, (2, K, B))
    for group in rows:                                      # the second starts with the moments of the first
        losses, norms = model.steps(here[0], put(group), here[1], adam)
        for k, batch in enumerate(group):
            assert get(twin.step(here[0], put(batch), here[1], its_adam))[0] == get(losses)[k]
            assert max_norm is None or get(its_adam.norm)[0] == get(norms)[k]
        assert (norms is None) == (max_norm is None) and get(adam.norm)[0] == get(its_adam.norm)[0]
    assert all((a == b).all() for a, b in zip(state(model, adam), state(twin, its_adam), strict=True))


@pytest.mark.parametrize('max_norm', (None, 0.1))
def test_of_several_steps_those_before_a_missing_row_are_done(max_norm):
    images, labels = digits(40, 30, 10)
    (model, adam), (twin, its_adam) = made(30, 11, 10, max_norm=max_norm), made(30, 11, 10, max_norm=max_norm)
    here, rows = (put(images), put(labels)), np.arange(28).reshape(4, 7)
    for batch in rows[:2]:
        twin.step(here[0], put(batch), here[1], its_adam)
    rows[2, 3] = 40
    with pytest.raises(ValueError, match=r'mlp_step: rows\[17\]=40, expected 0 to 39'):
        model.steps(here[0], put(rows), here[1], adam)
        backend.current_device().synchronize()
    changed = [name for name, a, b in zip((*BUFFERS, 'count'), state(model, adam), state(twin, its_adam), strict=True)
               if (a != b).any()]
    assert changed in ([], ['grads']), changed
    with pytest.raises(ValueError, match='mlp_step: K=0, expected at least 1'):
        model.steps(here[0], put(rows[:0]), here[1], adam)


@pytest.mark.parametrize('batch_size', (7, 20, 50))
def test_each_runs_all_batches_and_logs_as_single_steps(batch_size):
    images, labels = digits(50, 784, 10)
    (*_, step, _), (*_, its_step, _) = train.prepare(images, labels, 8), train.prepare(images, labels, 8)
    rows, history, its_history = np.arange(50), History(), History()
    for losses, norms in step.each(put(rows), batch_size):
        history.add(losses, None, norms)
    for first in range(0, 50, batch_size):
        its_history.add(its_step(put(rows[first:first + batch_size])), None, its_step._optimizer.norm)
    count = -(-50 // batch_size)
    assert history.read(count) == its_history.read(count) and get(history.written)[0] == count


@pytest.mark.skipif(not ON_GPU, reason='on the CPU the parts are as good: run with PYOPS_BACKEND=gpu')
def test_many_steps_and_their_log_are_two_launches():
    images, labels = digits(60, 784, 10)
    model, adam, step, inputs = train.prepare(images, labels)
    history = History()

    def logged(rows):
        for losses, norms in step.each(rows, 5):
            history.add(losses, None, norms)
    steps = Steps(logged, model.params, **inputs, **adam.arrays(), **history.arrays())
    assert [action.kernel for action in steps.plan(np.arange(60)).actions] == ['mlp_step', 'log_step']
    steps(np.arange(60))
    assert np.isfinite(history.read(12)).all() and get(adam.count)[0] == 12
    steps.close()


@pytest.mark.skipif(not ON_GPU, reason='on the CPU the parts are as good: run with PYOPS_BACKEND=gpu')
def test_the_program_trains_by_it_on_a_gpu():
    images, labels = digits(200, 784, 10)
    model, adam, step, _ = train.prepare(images, labels)
    with backend.on(backend.HOST):
        twin, its_adam, by_parts, _ = train.prepare(images, labels)
    rng, losses = np.random.default_rng(3), []
    for _ in range(50):
        rows = rng.integers(0, 200, 20)
        ours = get(step(put(rows)))[0]
        with backend.on(backend.HOST):
            losses.append((ours, by_parts(rows)[0]))
    ours, theirs = np.array(losses).T
    assert np.abs(ours - theirs).max() <= 1e-3 and ours[-5:].mean() < 0.8 * ours[:5].mean()


# ---- what it leaves alone, and what it passes on ------------------------------------------------------------------------

def raw(I, H, C, order=(2, 0, 3, 1), gap=3, seed=5):
    """Flat buffers with the four parameters in any order, at places of any alignment, and NaN around them."""
    rng, sizes, at, end = np.random.default_rng(seed), (I * H, H, C * H, C), [0] * 4, 1
    for i in order:
        at[i], end = end, end + sizes[i] + gap
    buffers = {name: np.full(end, np.nan, np.float32) for name in ('param', 'grad', 'm', 'v')}
    inside = np.zeros(end, bool)
    for start, size in zip(at, sizes, strict=True):
        inside[start:start + size] = True
        buffers['param'][start:start + size] = rng.standard_normal(size) / 4
        buffers['m'][start:start + size] = buffers['v'][start:start + size] = 0
    return buffers, at, inside


def launch_raw(buffers, at, images, rows, labels, I, H, C, step=0, norm=True, **more):
    """-> loss, norm, step after it."""
    given = dict(scale=1 / 255, max_norm=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0) | more
    loss, length = np.full(1, np.nan, np.float32), np.full(1, np.nan, np.float32)
    count, N, B = np.array([step]), len(images), len(rows)
    work = np.full(backend.work_size('mlp_step', B, I, H, C), np.nan, np.float32)
    launch('mlp_step', loss, length if norm else None, None, count, *buffers.values(), images, rows, labels,
           np.array([0.01], np.float32), work, N, 1, B, I, H, C, *at, *given.values())
    backend.current_device().synchronize()
    return loss[0], length[0], count[0]


@pytest.mark.parametrize('gap', (0, 1, 3))
@pytest.mark.parametrize('norm', (True, False))
def test_parameters_lie_anywhere_and_what_is_around_them_stays(gap, norm):
    I, H, C = 19, 6, 5
    images, labels = digits(8, I, C)
    results = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        buffers, at, inside = raw(I, H, C, (0, 1, 2, 3))
        moved, places, where = raw(I, H, C, order, gap)
        for a, b, n in zip(at, places, (I * H, H, C * H, C), strict=True):
            moved['param'][b:b + n] = buffers['param'][a:a + n]
        told = launch_raw(moved, places, images, np.arange(8), labels, I, H, C, norm=norm)
        assert all(np.isnan(buffer[~where]).all() and np.isfinite(buffer[where]).all() for buffer in moved.values())
        assert told[2] == 1 and np.isnan(told[1]) == (not norm)
        results.append([told[0], *(moved[name][b:b + n] for name in moved
                                   for b, n in zip(places, (I * H, H, C * H, C), strict=True))])
    assert all((a == b).all() for a, b in zip(*results, strict=True))


def test_a_norm_that_is_nan_clips_nothing_and_reaches_the_parameters():
    I, H, C = 19, 6, 5
    images, labels = digits(8, I, C)
    buffers, at, inside = raw(I, H, C)
    buffers['param'][at[3]] = np.nan
    loss, norm, count = launch_raw(buffers, at, images, np.arange(8), labels, I, H, C)
    assert np.isnan(loss) and np.isnan(norm) and count == 1
    assert np.isnan(buffers['param'][at[3]:at[3] + C]).all()


# ---- what is refused ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('spoil, text', [
    (lambda rows, labels, adam: rows.__setitem__(2, 40), r'rows\[2\]=40, expected 0 to 39'),
    (lambda rows, labels, adam: rows.__setitem__(2, -1), r'rows\[2\]=-1, expected 0 to 39'),
    (lambda rows, labels, adam: labels.__setitem__(3, 10), r'labels\[3\]=10, expected 0 to 9'),
    (lambda rows, labels, adam: labels.__setitem__(3, -1), r'labels\[3\]=-1, expected 0 to 9'),
    (lambda rows, labels, adam: adam.count.__setitem__(0, -1), 'step=0, expected at least 1'),
], ids=['row', 'negative-row', 'label', 'negative-label', 'step'])
@pytest.mark.parametrize('max_norm', (None, 0.1))
def test_data_that_is_wrong_moves_nothing_until_it_was_heard_of(spoil, text, max_norm):
    images, labels = digits(40, 30, 10)
    model, adam = made(30, 11, 10, max_norm=max_norm)
    rows, device = np.arange(7), backend.current_device()
    here = put(images), put(labels)
    model.step(here[0], put(rows), here[1], adam)
    bad_rows, bad_labels, good = rows.copy(), labels.copy(), get(adam.count).copy()
    spoil(bad_rows, bad_labels, adam)
    before = state(model, adam)
    with pytest.raises(ValueError, match=f'mlp_step: {text}'):
        model.step(here[0], put(bad_rows), put(bad_labels), adam)
        model.step(here[0], put(rows), here[1], adam)       # a GPU has not been asked yet
        device.synchronize()
    after = state(model, adam)
    assert all((a == b).all() for i, (a, b) in enumerate(zip(before, after, strict=True)) if BUFFERS[i:i + 1] != ('grads',))
    adam.count[...] = good
    model.step(here[0], put(rows), here[1], adam)
    assert get(adam.count)[0] == 2 and (get(model.params.values) != before[0]).any()


@pytest.mark.parametrize('more, text', [
    (dict(max_norm=0.0), 'max_norm=0, expected max_norm > 0'), (dict(max_norm=float('nan')), 'max_norm='),
    (dict(beta1=1.0), 'beta1=1 beta2=0.999, expected 0 <= beta < 1'),
    (dict(beta2=-0.5), 'beta2=-0.5, expected 0 <= beta < 1'),
    (dict(weight_decay=-1.0), 'weight_decay=-1, expected at least 0'), (dict(scale=float('nan')), 'scale is NaN'),
])
def test_settings_that_are_wrong_are_refused(more, text):
    buffers, at, _ = raw(19, 6, 5)
    before = {name: buffer.copy() for name, buffer in buffers.items()}
    with pytest.raises(ValueError, match=f'mlp_step: .*{text}'):
        launch_raw(buffers, at, *digits(8, 19, 5)[:1], np.arange(8), digits(8, 19, 5)[1], 19, 6, 5, **more)
    with pytest.raises(ValueError, match='mlp_step: w1=1 b1=-4 w2=2 b2=3, expected offsets of at least 0'):
        launch_raw(buffers, (1, -4, 2, 3), *digits(8, 19, 5)[:1], np.arange(8), digits(8, 19, 5)[1], 19, 6, 5)
    with pytest.raises(ValueError, match='mlp_step: .*B=0.*, expected B >= 1'):
        launch_raw(buffers, at, *digits(8, 19, 5)[:1], np.arange(0), digits(8, 19, 5)[1], 19, 6, 5)
    assert all(np.array_equal(buffers[name], before[name], equal_nan=True) for name in before)


def test_an_optimizer_of_something_else_is_refused():
    images, labels = digits(8, 12, 3)
    (model, adam), (_, other) = made(12, 4, 3), made(12, 4, 3)
    larger = Parameters({name: Spec((3,), lambda generator, shape: np.zeros(shape, np.float32)) for name in 'abcde'})
    tensors = Adam([Tensor(as_ndarray(put(np.zeros(3, np.float32))), requires_grad=True)])
    for wrong, error, text in ((other, ValueError, 'mlp: expected an optimizer over Parameters that hold w1, bias1, w2, bias2'),
                               (Adam(larger), ValueError, 'this op and no others'), (tensors, ValueError, 'no others'),
                               (SGD(model.params), AttributeError, "'SGD' object has no attribute")):
        with pytest.raises(error, match=text):
            model.step(put(images), put(np.arange(8)), put(labels), wrong)
    model.step(put(images), put(np.arange(8)), put(labels), adam)


# ---- the emulator's own ---------------------------------------------------------------------------------------------------

BITS = '''
import hashlib, numpy as np
from mnist.model import MLP, Config
from pyops import optim
N, B, I, H, C = 12, 41, 50, 33, 10
rng = np.random.default_rng(0)
images = (rng.integers(0, 256, (N, I)) * (rng.random((N, I)) < 0.3)).astype(np.uint8)
labels = rng.integers(0, C, N).astype(np.int32)
found = hashlib.sha256()
for max_norm in (None, 0.05):
    model = MLP(Config(I, H, C), seed=1)
    adam = optim.Adam(model.params, 0.01, max_norm=max_norm)
    for k in range(3):
        found.update(model.step(images, rng.integers(0, N, B), labels, adam))
    found.update(model.steps(images, rng.integers(0, N, (4, B)), labels, adam)[0])
    for array in (model.params.values, model.params.grads, model.params.m, model.params.v, adam.norm, adam.count):
        found.update(array)
print(found.hexdigest())
'''


@pytest.mark.skipif(not EMULATED.exists(), reason='make emulated')
def test_no_bit_depends_on_the_order_of_threads_or_the_number_of_multiprocessors():
    environment = {name: value for name, value in os.environ.items()
                   if name not in ('PYOPS_BACKEND', 'PYOPS_ISA') and not name.startswith('EMU_')}
    found = {}
    for order, multiprocessors in (('forward', 4), ('reverse', 4), ('3', 4), ('forward', 1), ('5', 3), ('reverse', 132)):
        out = subprocess.run([sys.executable, '-c', BITS], cwd=ROOT, text=True, capture_output=True, check=True,
                             env=environment | {'PYOPS_LIBRARY': str(EMULATED), 'EMU_ORDER': order,
                                                'EMU_MULTIPROCESSORS': str(multiprocessors)})
        found[order, multiprocessors] = out.stdout.strip()
    assert len(set(found.values())) == 1 and len(found['forward', 4]) == 64, found
