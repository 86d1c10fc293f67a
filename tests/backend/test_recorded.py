"""Operations of several kernels on small arrays: a run of a recording gives what the function gives without one."""
import gc
import threading

import numpy as np
import pytest
from places import ON_GPU

from pyops import backend, ndarray
from pyops.backend import library
from pyops.backend.host import HOST
from pyops.backend.recorded import MOST_RECORDINGS, recorded
from pyops.ndarray import NDArray, array
from pyops.plan import Plan

pytestmark = pytest.mark.skipif(ON_GPU or backend.current_device() is not HOST,
                                reason='only the CPU records: run without PYOPS_BACKEND')
FUNCTIONS = {**{name: getattr(NDArray, name) for name in ndarray._RECORDED}, 'einsum': ndarray.einsum,
             'pad_axes': ndarray.pad_axes, 'where': ndarray._where, 'index': ndarray._small_gathered,
             'concatenate': ndarray._two_concatenated, 'stack': ndarray._two_stacked}

IDS = array([2, 0, -1, 2, 1])
# name of the method -> calls of it on x (3, 4)
CALLS = {
    'round': (lambda x: x.round(), lambda x: x.round(1), lambda x: x.round(decimals=-1)), '__round__': (round,),
    'sign': (lambda x: x.sign(),), 'isfinite': (lambda x: x.isfinite(),), 'isinf': (lambda x: x.isinf(),),
    'ceil': (lambda x: x.ceil(),), 'clip': (lambda x: x.clip(-2, 3), lambda x: x.clip(min=-0.5), lambda x: x.clip(max=2)),
    'clamp': (lambda x: x.clamp(-1.5, 1.5),),
    'tril': (lambda x: x.tril(), lambda x: x.tril(-1)), 'triu': (lambda x: x.triu(k=1),),
    'mean': (lambda x: x.mean(), lambda x: x.mean(0), lambda x: x.mean((0, 1), keepdims=True), lambda x: x.mean(dim=-1)),
    'var': (lambda x: x.var(), lambda x: x.var(1, ddof=1)), 'std': (lambda x: x.std(axis=0), lambda x: x.std(unbiased=True)),
    'ptp': (lambda x: x.ptp(), lambda x: x.ptp(1, True)),
    'norm': (lambda x: x.norm(), lambda x: x.norm(1, axis=0), lambda x: x.norm(np.inf), lambda x: x.norm(p=3, dim=1)),
    'any': (lambda x: x.any(), lambda x: x.any(0, keepdims=True)), 'all': (lambda x: x.all(), lambda x: x.all((1,))),
    'argmax': (lambda x: x.argmax(), lambda x: x.argmax(0), lambda x: x.argmax(1, keepdims=True)),
    'argmin': (lambda x: x.argmin(), lambda x: x.argmin(0)),
    'logsumexp': (lambda x: x.logsumexp(), lambda x: x.logsumexp(0, keepdims=True), lambda x: x.logsumexp((0, 1))),
    'softmax': (lambda x: x.softmax(), lambda x: x.softmax(0), lambda x: x.softmax((0, 1))),
    'log_softmax': (lambda x: x.log_softmax(dim=0),),
    'argsort': (lambda x: x.argsort(), lambda x: x.argsort(0, descending=True)),
    'sort': (lambda x: x.sort(), lambda x: x.sort(0), lambda x: x.sort(None, descending=True)),
    'topk': (lambda x: x.topk(2), lambda x: x.topk(2, 0, largest=False)),
    'repeat': (lambda x: x.repeat(2), lambda x: x.repeat([2, 0, 1], axis=0), lambda x: x.repeat(3, axis=1)),
    'repeat_interleave': (lambda x: x.repeat_interleave(2, dim=1),),
    'tile': (lambda x: x.tile(2), lambda x: x.tile(2, 1, 3), lambda x: x.tile((3, 1))),
    'roll': (lambda x: x.roll(2), lambda x: x.roll(-1, 1)),
    'diagonal': (lambda x: x.diagonal(), lambda x: x.diagonal(1), lambda x: x.diagonal(-1, 1, 0)),
    'trace': (lambda x: x.trace(), lambda x: x.trace(-1)), 'pad': (lambda x: x.pad(1), lambda x: x.pad(((0, 1), (2, 0)), 5)),
    'prod': (lambda x: x.prod(), lambda x: x.prod(0, keepdims=True)), 'cumsum': (lambda x: x.cumsum(), lambda x: x.cumsum(0)),
    'cumprod': (lambda x: x.cumprod(1),), '_running': (lambda x: x._running('add', (1,)),),
    '_sorting': (lambda x: x._sorting(0, True),),
    'where': (lambda x: ndarray.where(x > 0, x, array([1, 2, 3, 4])), lambda x: ndarray.where(x > 1, x.astype('int32'), 2.5)),
    'concatenate': (lambda x: ndarray.concatenate([x, x[1:]]), lambda x: ndarray.concatenate((x, x.astype('int32')), -1)),
    'stack': (lambda x: ndarray.stack([x, x]), lambda x: ndarray.stack([x[0], x[2]], dim=1)),
    'take': (lambda x: x.take([0, -1], 1), lambda x: x.take(IDS)), 'index_select': (lambda x: x.index_select(1, IDS),),
    'index': (lambda x: x[IDS], lambda x: x[:, IDS], lambda x: x[..., [2, 0], None], lambda x: x[1:, IDS[::-1]]),
    'pad_axes': (lambda x: ndarray.pad_axes(x, 2, 1),),
    'einsum': (lambda x: ndarray.einsum('ij->ji', x + 0), lambda x: ndarray.einsum('ij,kj->ik', x, x),
               lambda x: ndarray.einsum('ij,ij', x, x), lambda x: ndarray.einsum('i...,ij,kj->k...', x, x, x)),
}
# the calls that give a view of x, or of all of it
VIEWS = {('einsum', 0)}
LAYOUTS = {'compact': lambda x: x, 'transposed': lambda x: x.reshape(4, 3).T, 'reversed': lambda x: x[::-1, ::-1],
           'a part': lambda x: array(np.tile(x.stored(), (2, 2)), x.dtype)[2:5, 1:5],
           'broadcast': lambda x: x[0].broadcast_to((3, 4)),
           'mask': lambda x: x > 0, 'a union of masks': lambda x: (x > 0) + (x < 2)}


def numbers(seed, dtype, special=True):
    """Numbers with equal ones, halves and, for floats, all special values."""
    x = np.random.default_rng(seed).integers(-9, 10, 12) / (2 if dtype != 'int32' else 1)
    if dtype != 'int32' and special:
        x[np.random.default_rng(seed).permutation(12)[:5]] = [np.nan, np.inf, -np.inf, -0.0, 0.0]
    return x.astype(dtype).reshape(3, 4)


def forget():
    for function in FUNCTIONS.values():
        function.recordings.clear()


def outcome(call, x):
    """Return what is to be equal: bits, shape, dtype and whether they are a mask; or the error."""
    try:
        found = call(x)
    except Exception as error:
        return type(error), str(error)
    return [(y.stored().tobytes(), y.shape, y.dtype, y.is_mask, y.buffer.mask is None)
            for y in (found if isinstance(found, tuple) else (found,))]


def is_recorded(function):
    return any(type(call) is tuple for call in function.recordings.values())


@pytest.mark.parametrize('name', CALLS)
@pytest.mark.parametrize('layout', LAYOUTS)
def test_a_recorded_operation_gives_the_same_bits(name, layout):
    for dtype in 'float32', 'int32', 'float64':
        for call in CALLS[name]:
            want = []
            for seed in range(6):
                forget()                        # so that the function itself runs
                want.append(outcome(call, LAYOUTS[layout](array(numbers(seed, dtype, seed % 2), dtype))))
            forget()
            got = [outcome(call, LAYOUTS[layout](array(numbers(seed, dtype, seed % 2), dtype))) for seed in range(6)]
            assert got == want, (dtype, call)


@pytest.mark.parametrize('name', CALLS)
def test_each_of_these_operations_is_recorded(name):
    """A recording never starts unless the function runs on a Recorder; without one the operation would only be slow."""
    assert CALLS.keys() == FUNCTIONS.keys()
    for i, call in enumerate(CALLS[name]):
        x = array(numbers(1, 'float32'))
        forget()
        for _ in range(2):
            call(x)
        assert is_recorded(FUNCTIONS[name]) == ((name, i) not in VIEWS), i


@pytest.mark.parametrize('n', [50, 900])
def test_intermediate_results_of_any_size_have_memory(n):
    """Few bytes of them are on the stack of pyops_run_recording_1, more are allocated."""
    x = array(np.random.default_rng(n).permutation(n))
    forget()
    for _ in range(4):
        assert x.sort().tolist() == list(range(n))
    call, = NDArray.sort.recordings.values()
    lib = library.cpu().lib
    assert call[1] == (lib.pyops_run_recording_1 if n == 50 else lib.pyops_run_recording)


def test_results_are_new_memory_and_operands_do_not_change():
    x = array(numbers(1, 'float32'))
    before = x.stored().tobytes()
    for name, calls in CALLS.items():
        for call in calls:
            made = [call(x) for _ in range(4)][2:]
            ys = [y for found in made for y in (found if isinstance(found, tuple) else (found,))]
            if name != 'einsum':
                places = {y.location() for y in ys}
                assert len(places) == len(ys) and x.location() not in places, name
                for y in ys:
                    y.fill(0)
            assert x.stored().tobytes() == before and x.buffer.version == 0, name


def test_arrays_given_by_position_and_by_name_stay_apart():
    run = recorded(NDArray, lambda x, axis, low: x.sum(axis) - low.sum(axis) * 3)
    x, low = array(np.arange(12, dtype='f').reshape(3, 4)), array(np.ones((3, 4), 'f'))
    found = [run(x, 0, low=low).tolist() for _ in range(4)]
    assert found == [[3.0, 6.0, 9.0, 12.0]] * 4 and any(type(one) is tuple for one in run.recordings.values())


def test_arguments_that_are_equal_but_of_another_type_are_other_arguments():
    x = array(numbers(2, 'float32', False))
    for _ in range(3):
        assert x.mean(1).shape == (3,) and x.mean(1, True).shape == (3, 1)
        with pytest.raises(TypeError, match='integer'):
            x.mean(1.0)
        assert x.clip(0.0, 2.0).stored().tobytes() == x.maximum(0.0).minimum(2.0).stored().tobytes()
    zero = array(np.zeros(1, 'f'))
    for value in (0.0, -0.0) * 3:
        assert np.signbit(ndarray.pad_axes(zero, 1, value).stored()).tolist() == [np.signbit(value), False, np.signbit(value)]
    ints = array([1, 2, 3])
    for high, dtype in ((2, np.int32), (2.0, np.float32)) * 3:
        assert ints.clip(0, high).dtype == dtype


def test_errors_are_those_of_the_function_each_time():
    x = array(numbers(0, 'float32'))
    for call, error in ((lambda: x.topk(9), ValueError), (lambda: x.mean(2), IndexError), (lambda: x.clip(), ValueError),
                        (lambda: ndarray.einsum('ij->k', x), ValueError), (lambda: x.mean(axis=0, dim=0), TypeError),
                        (lambda: x[:, :0].argmax(1), ValueError), (lambda: x.var(no=1), TypeError)):
        texts = set()
        for _ in range(4):
            with pytest.raises(error) as found:
                call()
            texts.add(str(found.value))
        assert len(texts) == 1


def test_a_kernel_that_fails_in_a_recording_raises_the_error_of_the_function():
    power = recorded(NDArray, lambda x, y: (x ** y) + 0)
    for exponents in ([1, 2], [0, 1], [3, 1]):
        assert power(array([2, 3]), array(exponents)).tolist() == [2 ** exponents[0], 3 ** exponents[1]]
    assert is_recorded(power)
    with pytest.raises(ValueError) as want:
        array([2, 3]) ** array([1, -1])
    with pytest.raises(ValueError) as got:
        power(array([2, 3]), array([1, -1]))
    assert str(got.value) == str(want.value)


@pytest.mark.parametrize('function', [
    lambda x: array(x.numpy() * 2), lambda x: x, lambda x: x.T, lambda x: x.fill(1) or x + 1, lambda x: x + x.sum().item(),
    lambda x: x[x > 0], lambda x: (x + 1, x + 2, x + 3), lambda x: 3, lambda x: array([1.0, 2.0]),
    lambda x: x.broadcast_to((1000, *x.shape)).copy()],
    ids=['values', 'the operand', 'a view', 'change', 'a number', 'mask', 'three results', 'no array', 'a constant', 'large'])
def test_what_cannot_be_recorded_runs_each_time(function):
    run = recorded(NDArray, function)
    for seed in range(5):
        x, y = (array(numbers(seed, 'float32', False)) for _ in range(2))
        got, want = run(x), function(y)
        for one, other in zip(got if isinstance(got, tuple) else (got,), want if isinstance(want, tuple) else (want,),
                              strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert not is_recorded(run)


def test_freed_memory_and_other_devices_run_the_function():
    for _ in range(3):
        x = array(numbers(0, 'float32'))
        x.mean(), x.sort()
    for call in (lambda x: x.mean(), lambda x: x.sort()):
        x = array(numbers(0, 'float32'))
        x.buffer.free()
        with pytest.raises(ValueError, match='its memory was freed'):
            call(x)
    other = array(numbers(0, 'float32', False), device=ndarray.numpy_device())
    for _ in range(3):
        assert other.mean().device is ndarray.numpy_device() and other.topk(2)[1].device is ndarray.numpy_device()


def test_a_plan_records_the_kernels_of_an_operation_that_was_recorded_before():
    x = numbers(0, 'float32', False)
    for _ in range(3):
        ndarray.from_numpy(x).logsumexp(1)
    with Plan(x=x) as plan:
        y = ndarray.from_numpy(x).logsumexp(1)
    later = numbers(3, 'float32', False)
    x[...] = later
    plan.run()
    assert len(plan.actions) > 3
    assert y.numpy().tobytes() == array(later).logsumexp(1).numpy().tobytes()


def test_threads_share_recordings():
    wrong, function = [], recorded(NDArray, lambda x: (x * 2 + 1).exp().sum(0) - x.max(0))

    def work(number):
        for i in range(200):
            x = array(numbers(number * 1000 + i, 'float32', False) / 8)
            want = (x * 2 + 1).exp().sum(0) - x.max(0)
            if function(x).numpy().tobytes() != want.numpy().tobytes():
                wrong.append((number, i))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and is_recorded(function)


def test_the_number_of_recordings_is_limited_and_a_recorder_leaves_no_arrays():
    function = recorded(NDArray, lambda x, k: x * 2 + k)
    x = array(numbers(0, 'float32', False))
    for k in range(2 * MOST_RECORDINGS):
        function(x, k)
    assert 0 < len(function.recordings) <= MOST_RECORDINGS
    gc.collect()
    gc.disable()
    try:
        before = len(ndarray.live_buffers())
        for _ in range(3):
            x.std(1)
            ndarray.einsum('ij,kj->ik', x, x)
        assert len(ndarray.live_buffers()) <= before
    finally:
        gc.enable()
