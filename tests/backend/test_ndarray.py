"""NDArray beside numpy: views that cost nothing, indexing, assignment, arithmetic, reductions, products, interchange, plans."""
import copy
import gc
import itertools
import os
import pickle
import subprocess
import sys
import threading
import types
import weakref

import numpy as np
import pytest
from conftest import ROOT
from places import ON_GPU, devices, on_the_cpu

import pyops
from pyops import backend, ndarray
from pyops.autograd import Tensor
from pyops.backend.device import Device
from pyops.ndarray import NDArray, array, concatenate, from_dlpack, from_numpy, live_buffers, pad, stack
from pyops.plan import Plan

pytestmark = pytest.mark.usefixtures('new_objects')      # tests count the live buffers

DEVICES = {name.removesuffix('_device'): device for name, device in devices().items()}
DTYPES = ('float32', 'int32')


@pytest.fixture(params=DEVICES, autouse=True)
def device(request):
    """Every test runs with each device as the current one."""
    device = DEVICES[request.param]()
    with backend.on(device):
        yield device


# of arrays that look at the memory of numpy's
of_the_host = on_the_cpu if ON_GPU else pytest.mark.parametrize('device', sorted({*DEVICES} - {'gpu'}), indirect=True)


def same(got, want):
    """The shape, the dtype and every number; NaN is NaN."""
    want = np.asarray(want)
    assert isinstance(got, NDArray) and got.shape == want.shape and got.dtype == want.dtype, (got, want)
    np.testing.assert_array_equal(got.numpy(), want)


def close(got, want, ulps=4):
    want = np.asarray(want)
    assert got.shape == want.shape
    np.testing.assert_allclose(got.numpy(), want, rtol=ulps * 1.2e-7, atol=1e-30)


def numbers(*shape, dtype='float32', seed=0):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(dtype)


def address(a):
    """Of the first element."""
    return a.location() if a.device.name == 'gpu' else pointer(a.numpy())


def pointer(x):
    return x.__array_interface__['data'][0]


def live_bytes():
    gc.collect()
    return sum(buffer.nbytes for buffer in live_buffers())


# ---- making ----------------------------------------------------------------------------------------------------------

def test_arrays_from_numbers_lists_and_arrays(device):
    for obj, dtype in ((3, 'int32'), (3.5, 'float32'), (np.float64(0.5), 'float32'), (np.int64(7), 'int32'),
                       ([1, 2], 'int32'), ([1, 2.5], 'float32'), ([[True], [False]], 'int32'), ([], 'float32'),
                       (np.arange(3, dtype='int32'), 'int32'), (np.ones((2, 3), 'f').T, 'float32')):
        a = array(obj)
        same(a, np.asarray(obj, dtype))
        assert a.device is device and a.is_compact()
    assert array(np.ones(4096, 'f')).buffer.address % backend.ALIGN == 0
    same(array([1.9, -1.9], dtype='int32'), np.array([1, -1], 'int32'))
    same(array(np.arange(3.0), dtype='float32'), np.arange(3, dtype='f'))
    b = array(a)
    assert address(b) != address(a)
    same(b, a.numpy())


@pytest.mark.parametrize('n', [1, 3, 64, 65])
@pytest.mark.parametrize('dtype', [None, 'int32', 'uint8', 'float32', 'float64', bool])
def test_a_list_becomes_what_a_numpy_array_of_it_becomes(device, n, dtype):
    """Short lists of ints and floats take their own way."""
    whole, real = [(7 * i - 5) % 11 for i in range(n)], np.random.default_rng(n).standard_normal(n).tolist()
    for values in (whole, real, whole[:-1] + real[:1], [True] * n, [*whole, True], [1e300, -0.0, np.inf], [2**31 - 1, -2**31]):
        made, want = array(values, dtype), array(np.array(values), dtype)
        assert made.dtype is want.dtype and made.is_mask == want.is_mask and made.device is device
        assert made.stored().tobytes() == want.stored().tobytes()
    for values in [2**31] * n, [*whole, -2**31 - 1]:
        with pytest.raises(OverflowError, match='out of bounds for int32'):
            array(values, 'int32')


def test_arange_of_ints_is_that_of_numpy(device):
    for arguments in ((0,), (12,), (-3,), (100,), (3, 9), (9, 3), (9, 3, -2), (0, 10, 3), (-5, 5, 4), (0, -2**31, -2**30)):
        same(ndarray.arange(*arguments), np.arange(*arguments, dtype='i'))
    assert ndarray.arange(3, dtype='float32').dtype == np.float32 and ndarray.arange(3, device=device).device is device
    for arguments in (2**31 - 1, 2**31 + 1), (-2**31 - 1, 0, 2**30):
        with pytest.raises(OverflowError, match='out of bounds for int32'):
            ndarray.arange(*arguments)
    with pytest.raises(ZeroDivisionError):
        ndarray.arange(0, 3, 0)


def test_a_mask_selects_rows_as_in_numpy(device):
    rng = np.random.default_rng(5)
    dtypes = [*DTYPES] if device.name == 'gpu' else [*DTYPES, 'float64']
    for shape, dtype, kept in itertools.product([(12,), (3, 4), (3, 4, 5)], dtypes, [0, 0.5, 1]):
        x, other = rng.integers(-9, 9, shape).astype(dtype), rng.random(shape[:2])
        for mask in [array(other, kind) > kept for kind in dtypes if kind != 'int32'] + [array(other > kept)]:
            for _ in range(2):
                same(array(x, dtype)[mask], x[mask.numpy()])
        of = array(other[..., 0] > kept) if other.ndim > 1 else array(other > kept)
        same(array(x, dtype)[of], x[of.numpy()])
        same(array(x, dtype)[::-1][of], x[::-1][of.numpy()])
    mask = array(np.ones(3)) > 0
    mask[1] = -0.0
    same(array([1, 2, 3])[mask], np.array([1, 3], 'i'))
    assert array([True, False, True])[mask].is_mask


def test_the_condition_of_where_may_be_of_int32(device):
    c, x = array([[0, 2**30, -1], [1, 0, 3]]), numbers(2, 3)
    for dtype in 'float32', 'float64':
        a = array(x, dtype)
        if dtype == 'float64' and device.name == 'gpu':
            with pytest.raises(TypeError, match='float64 is supported on the CPU only'):
                ndarray.where(c, a, -1.5)
            continue
        want = np.where(c.stored(), x, -1.5).astype(dtype)
        for _ in range(2):
            same(ndarray.where(c, a, -1.5), want)
            same(ndarray.where(c.T, a.T, -1.5), want.T)
            same(ndarray.where(c, a, c), np.where(c.stored(), x.astype(dtype), c.stored().astype(dtype)))
            same(ndarray.where(c, c, a), np.where(c.stored(), c.stored().astype(dtype), x.astype(dtype)))


def test_filled_arrays():
    same(ndarray.zeros((2, 3)), np.zeros((2, 3), 'f'))
    same(ndarray.ones(4, dtype='int32'), np.ones(4, 'i'))
    same(ndarray.full((), 7), np.array(7, 'i'))
    same(ndarray.full((2, 0), 1.5), np.full((2, 0), 1.5, 'f'))
    same(ndarray.arange(5), np.arange(5, dtype='i'))
    same(ndarray.arange(1, 2, 0.25), np.arange(1, 2, 0.25, dtype='f'))
    assert ndarray.empty((3, 1)).shape == (3, 1)


@pytest.mark.parametrize('make, text', [
    (lambda: array([1], dtype='complex64'), 'complex64: expected float32, float64, int32 or bool'),
    (lambda: array('text'), 'expected numbers'),
    (lambda: array([1j]), 'expected numbers, got complex128'),
    (lambda: ndarray.zeros(3, dtype='float16'), 'float16: arrays are float32, float64, int32 or bool'),
    (lambda: from_numpy([1, 2]), 'expected a numpy array, got list'),
    (lambda: from_numpy(np.arange(3)), 'expected float32, float64 or int32, got int64; copy it with array'),
    (lambda: from_numpy(np.ones(3, bool)), 'expected float32, float64 or int32, got bool; copy it with array'),
    (lambda: ndarray.zeros('ab'), "shape: expected integers, got 'ab'"),
    (lambda: ndarray.zeros(2.5), 'shape: expected integers, got 2.5'),
])
def test_other_kinds_of_numbers_are_refused(make, text):
    with pytest.raises(TypeError, match=text):
        make()


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match='negative'):
        ndarray.zeros((2, -1))
    with pytest.raises(ValueError, match='9 axes, expected at most 8'):
        ndarray.zeros((1,) * 9)
    with pytest.raises(OverflowError, match='3000000000 out of bounds for int32'):
        array([3_000_000_000])
    with pytest.raises(OverflowError, match='out of bounds for int32'):
        array(np.array([1]), dtype='int32') + 2**31


# ---- views cost nothing ----------------------------------------------------------------------------------------------

VIEWS = {
    'transpose': (lambda a: a.T, lambda x: x.T),
    'permute': (lambda a: a.permute((1, 2, 0)), lambda x: x.transpose(1, 2, 0)),
    'transpose(axes)': (lambda a: a.transpose(2, 0, 1), lambda x: x.transpose(2, 0, 1)),
    'swapaxes': (lambda a: a.swapaxes(0, -1), lambda x: x.swapaxes(0, -1)),
    'integers': (lambda a: a[1, -2], lambda x: x[1, -2]),
    'one element': (lambda a: a[1, -2, 3], lambda x: x[1, -2, 3, ...]),
    'slices': (lambda a: a[1:, ::2, -3:-1], lambda x: x[1:, ::2, -3:-1]),
    'negative steps': (lambda a: a[::-1, 3:0:-2], lambda x: x[::-1, 3:0:-2]),
    'ellipsis and None': (lambda a: a[None, ..., 2, None], lambda x: x[None, ..., 2, None]),
    'beyond the end': (lambda a: a[5:, :100], lambda x: x[5:, :100]),
    'reshape': (lambda a: a.reshape(6, 10), lambda x: x.reshape(6, 10)),
    'reshape(-1)': (lambda a: a.reshape(-1, 3), lambda x: x.reshape(-1, 3)),
    'reshape of a slice': (lambda a: a[:, :, :2].reshape((3, 2, 2, 2)), lambda x: x[:, :, :2].reshape((3, 2, 2, 2))),
    'reshape of a transpose': (lambda a: a.T.reshape(5, 2, 2, 3), lambda x: x.T.reshape(5, 2, 2, 3)),
    'broadcast_to': (lambda a: a.broadcast_to((2, 3, 4, 5)), lambda x: np.broadcast_to(x, (2, 3, 4, 5))),
    'broadcast_to of an axis of 1': (lambda a: a[:1].broadcast_to((7, 4, 5)), lambda x: np.broadcast_to(x[:1], (7, 4, 5))),
    'flip': (lambda a: a.flip(), np.flip),
    'flip of two axes': (lambda a: a.flip((0, 2)), lambda x: np.flip(x, (0, 2))),
    'as_strided': (lambda a: a.as_strided((4, 3), (5, 2), 20),
                   lambda x: np.lib.stride_tricks.as_strided(x[1], (4, 3), (20, 8))),
}


@pytest.mark.parametrize('view', VIEWS)
@pytest.mark.parametrize('dtype', DTYPES)
def test_views_are_numpys_and_allocate_nothing(view, dtype, device):
    ours, theirs = VIEWS[view]
    x = numbers(3, 4, 5, dtype=dtype)
    a = from_numpy(x)
    before = live_bytes()
    got, want = ours(a), theirs(x)
    assert live_bytes() == before and got.buffer is a.buffer
    same(got, want)
    assert address(a) == pointer(x) or device.name == 'gpu'
    if want.size:
        assert address(got) - address(a) == pointer(want) - pointer(x)
    assert [4 * step for n, step in zip(got.shape, got.strides, strict=True) if n > 1 and got.size] == \
           [step for n, step in zip(want.shape, want.strides, strict=True) if n > 1 and want.size]
    assert got.is_compact() == want.flags.c_contiguous
    same(got.copy(), want)
    assert got.compact() is got or not got.is_compact()
    same(got.compact(), want)


def test_reshape_copies_only_where_strides_cannot_say_it():
    x = numbers(4, 6)
    for cut in (np.s_[:], np.s_[::2], np.s_[:, ::2], np.s_[::-1], np.s_[:, 1:4], np.s_[1:2], np.s_[:, :1], np.s_[:0]):
        for view in (x[cut], x[cut].T, x[cut][None, :, None]):
            for shape in itertools.product((1, 2, 3, 4, 6, 8), repeat=3):
                for to in {shape, shape[:2], shape[:1]}:
                    if np.prod(to) == view.size:
                        want = view.reshape(to)
                        a = from_numpy(view)
                        got = a.reshape(to)
                        same(got, want)
                        if view.size:
                            assert (address(got) == address(a)) == np.shares_memory(want, view), (view.shape, to)


def test_a_shape_is_set_as_numpys_and_no_attribute_can_leave_the_buffer():
    x, a = numbers(3, 4), array(numbers(3, 4))
    x.shape = a.shape = (2, -1)
    same(a, x)
    x.shape = a.shape = 12
    same(a[::-1], x[::-1])
    with pytest.raises(ValueError, match=r'cannot reshape array of shape \(12,\) into shape \(1000, 4\)'):
        a.shape = (1000, 4)
    with pytest.raises(AttributeError, match='cannot become .* in place; use reshape, which copies'):
        a.reshape(3, 4).T.shape = 12
    for name, value in (('strides', (100,)), ('offset', 100), ('dtype', np.dtype('float64')), ('buffer', None)):
        with pytest.raises(AttributeError, match=f'{name}: cannot be set; use as_strided'):
            setattr(a, name, value)
    with pytest.raises(AttributeError, match="'NDArray' object has no attribute 'shpe'"):
        a.shpe = (3, 4)
    same(a, x)


def test_writing_through_a_view_changes_the_array():
    x = numbers(4, 5)
    a = array(x)
    a.T[1:3].reshape(2, 4)[0] = 100
    x.T[1:3].reshape(2, 4)[0] = 100
    same(a, x)


@pytest.mark.parametrize('act, error, text', [
    (lambda a: a[3], IndexError, 'index 3 is out of bounds for axis 0 with size 3'),
    (lambda a: a[0, -5], IndexError, 'index -5 is out of bounds for axis 1 with size 4'),
    (lambda a: a[0, 0, 0], IndexError, r'too many indices for array of shape \(3, 4\): 3'),
    (lambda a: a[..., ...], IndexError, 'single ellipsis'),
    (lambda a: a[1.5], IndexError, 'only integers, slices.* got float'),
    (lambda a: a['x'], IndexError, 'got str'),
    (lambda a: a[np.array([0.5])], IndexError, 'arrays used as indices must be of integers, got float'),
    (lambda a: a[[0, 3]], IndexError, '3'),
    (lambda a: a.__setitem__(7, 1.0), IndexError, 'index 7 is out of bounds for axis 0 with size 3'),
    (lambda a: a.reshape(5, 2), ValueError, r'cannot reshape array of shape \(3, 4\) into shape \(5, 2\)'),
    (lambda a: a.reshape(-1, 5), ValueError, r'cannot reshape array of shape \(3, 4\) into shape \(-1, 5\)'),
    (lambda a: a.reshape(-1, -1), ValueError, 'cannot reshape'),
    (lambda a: a.reshape(-3, -4), ValueError, 'cannot reshape'),
    (lambda a: a.reshape(0, -1), ValueError, 'cannot reshape'),
    (lambda a: a.permute((0, 2)), ValueError, 'axis 2 is out of bounds for array of dimension 2'),
    (lambda a: a.permute((0,)), ValueError, r"axes \(0,\) don't match shape \(3, 4\)"),
    (lambda a: a.permute((0, 0)), ValueError, 'duplicate'),
    (lambda a: a.flip(2), IndexError, 'axis 2 is out of bounds for array of dimension 2'),
    (lambda a: a.broadcast_to((3, 5)), ValueError, r'from shape \(3, 4\) into shape \(3, 5\)'),
    (lambda a: a.broadcast_to((4,)), ValueError, r'from shape \(3, 4\) into shape \(4,\)'),
    (lambda a: a.as_strided((3, 5), (4, 1)), ValueError, 'cover elements 0 to 12, but the buffer has 12'),
    (lambda a: a.as_strided((2,), (-1,)), ValueError, 'cover elements -1 to 0'),
    (lambda a: a.as_strided((2,), (1, 1)), ValueError, 'expected equal lengths'),
    (lambda a: a.sum(2), IndexError, 'axis 2 is out of bounds for array of dimension 2'),
    (lambda a: a.sum((0, -3)), ValueError, 'axis -3 is out of bounds for array of dimension 2'),
    (lambda a: a.max((1, 1)), ValueError, 'duplicate'),
    (lambda a: a[:0].max(), ValueError, r'max of an array of shape \(0, 4\)'),
    (lambda a: a[:, :0].min(1), ValueError, 'it is undefined without elements'),
    (lambda a: a[:0].argmax(0), ValueError, 'it is undefined without elements'),
    (lambda a: a[:0].argmax(), ValueError, 'it is undefined without elements'),
    (lambda a: a + array([1.0, 2, 3]), ValueError, r'broadcast together with shapes \(3, 4\) \(3,\)'),
    (lambda a: a.maximum(array([1.0, 2, 3])), ValueError, r'shapes \(3, 4\) \(3,\)'),
    (lambda a: a.__iadd__(array([[[1.0]]])), ValueError, r'shape \(3, 4\): .* shape \(1, 1, 1\) has shape \(1, 3, 4\)'),
    (lambda a: a[0].__imul__(a), ValueError, r'non-broadcastable output operand with shape \(4,\)'),
    (lambda a: a.__setitem__(0, [1.0, 2]), ValueError, r'from shape \(2,\) into shape \(4,\)'),
    (lambda a: a.__setitem__(0, a), ValueError, r'from shape \(3, 4\) into shape \(4,\)'),
    (lambda a: a[0].broadcast_to((3, 4)).fill(1), ValueError, r'shape \(3, 4\): a broadcast view cannot be written to'),
    (lambda a: a[0].broadcast_to((3, 4)).__iadd__(1), ValueError, 'a broadcast view cannot be written to'),
    (lambda a: a @ a, ValueError, r'shapes \(3, 4\) and \(3, 4\) do not fit: 4 and 3'),
    (lambda a: a @ a[0, 0], ValueError, r'shapes \(3, 4\) and \(\): expected at least one axis each'),
    (lambda a: ndarray.ones((2, 3, 4)) @ ndarray.ones((3, 4, 3)), ValueError, r'\(2,\) \(3,\)'),
    (lambda a: a + None, TypeError, 'unsupported operand'),
    (lambda a: a @ 'x', TypeError, 'unsupported operand'),
    (lambda a: a.maximum('x'), TypeError, 'maximum: expected an array or a number, got str'),
    (lambda a: a + np.ones(4, complex), TypeError, 'expected numbers, got complex128'),
    (lambda a: a & a, TypeError, 'and: expected masks or int32 arrays, got float32; compare it first'),
    (lambda a: ~a, TypeError, '~: expected a mask or an int32 array, got float32'),
    (lambda a: float(a), ValueError, r'got shape \(3, 4\)'),
    (lambda a: bool(a), ValueError, r'truth value of an array of shape \(3, 4\)'),
    (lambda a: len(a[0, 0]), TypeError, r'len\(\) of an array of shape \(\)'),
    (lambda a: iter(a[0, 0]), TypeError, 'iteration'),
    (lambda a: [1, 2][a[0, 0]], TypeError, 'only an int32 array'),
    (lambda a: hash(a), TypeError, 'unhashable'),
    (lambda a: concatenate([a, a[0]]), ValueError, r'shapes \(3, 4\) and \(4,\) differ in another axis than 0'),
    (lambda a: concatenate([a, a[:2]], 1), ValueError, r'shapes \(3, 4\) and \(2, 4\) differ in another axis than 1'),
    (lambda a: concatenate([]), ValueError, 'expected at least one array'),
    (lambda a: concatenate([a], 2), IndexError, 'axis 2'),
    (lambda a: stack([a, a.T]), ValueError, r'shapes \(3, 4\) and \(4, 3\) differ'),
    (lambda a: stack([a], 4), IndexError, 'axis 4'),
    (lambda a: pad(a, -1), ValueError, 'expected 0 or more'),
    (lambda a: a[(None,) * 7], ValueError, '9 axes, expected at most 8'),
    (lambda a: a.astype('float16'), TypeError, 'float16: arrays are float32, float64, int32 or bool'),
    (lambda a: a.astype('int32').__iadd__(1.5), TypeError, 'an int32 array cannot hold the float32 result'),
    (lambda a: a.astype('int32').__iadd__(a), TypeError, 'an int32 array cannot hold the float32 result'),
    (lambda a: a.astype('int32').__itruediv__(2), TypeError, 'an int32 array cannot hold the float32 result'),
    (lambda a: a.astype('int32').__setitem__(0, 2**40), OverflowError, 'out of bounds for int32'),
    (lambda a: array([2, 3]) ** -1, ValueError, 'negative'),
    (lambda a: array([2, 3]) ** array([1, -1]), ValueError, 'negative'),
    (lambda a: a.T.add_at([0], 1.0), TypeError, 'expected a compact array of rows of floats'),
])
def test_bad_calls_say_what_is_wrong(act, error, text):
    a = array(numbers(3, 4))
    before = a.numpy().copy()
    with pytest.raises(error, match=text):
        act(a)
    same(a, before)


def test_arrays_of_two_devices_do_not_meet():
    a, b = array([1.0], device=pyops.cpu()), array([2.0], device=pyops.numpy_device())
    for act in (lambda: a + b, lambda: a.__iadd__(b), lambda: a @ b, lambda: concatenate([a, b]), lambda: stack([a, b]),
                lambda: a.__setitem__(0, b[0])):
        with pytest.raises(TypeError, match=r'two devices, pyops\.\w+\(\) and pyops\.\w+\(\)'):
            act()
    same(a + b.to(a.device), np.array([3], 'f'))
    assert b.to(b.device) is b


def test_using_freed_memory_is_an_error_that_names_the_shape():
    a = array(numbers(3, 4))
    view, keep = a.T[1:], a.numpy()
    a.buffer.free()
    for act in (lambda: view + 1, lambda: view.sum(), lambda: view.numpy(), lambda: view.__iadd__(1), lambda: view.fill(0),
                lambda: view @ view.T, lambda: view[[0]], lambda: view.__setitem__(0, view[1])):
        with pytest.raises(ValueError, match=r'array of shape \([34], ?[34]?\): its memory was freed|array of shape \(3,\)'):
            act()
    assert 'freed' in repr(view) and np.isfinite(keep).all()            # what numpy holds it keeps


# ---- assignment ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('index', [np.s_[:], np.s_[1], np.s_[..., 2], np.s_[::2, ::-1], np.s_[1:1], np.s_[0, 1, 2],
                                   np.s_[None, 1]])
def test_assignment_to_views(index, dtype):
    x = numbers(3, 4, 5, dtype=dtype)
    a = array(x)
    for value in (7, numbers(*x[index].shape, dtype=dtype, seed=1), numbers(*x[index].shape, dtype='int32', seed=2)):
        a[index] = value if isinstance(value, int) else array(value)
        x[index] = value
        same(a, x)
    if x[index].ndim:
        row = numbers(1, 1, x[index].shape[-1], dtype=dtype)            # leading axes of 1 fall away
        a[index] = array(row)
        x[index] = row
        same(a, x)
    a[index] = x[index]                                                 # numpy's own
    same(a, x)


def test_assignment_converts():
    a = ndarray.zeros(3, dtype='int32')
    a[:] = array([1.7, -1.7, 2])
    same(a, np.array([1, -1, 2], 'i'))
    a[0] = 5.9
    assert int(a[0]) == 5
    b = ndarray.zeros((2, 3))
    b[:] = a
    same(b, np.array([[5, -1, 2]] * 2, 'f'))
    with pytest.raises(ValueError, match='NaN'):
        a[0] = float('nan')


OVERLAPS = {
    'forwards': lambda a: a.__setitem__(np.s_[1:], a[:-1]),
    'backwards': lambda a: a.__setitem__(np.s_[:-1], a[1:]),
    'reversed': lambda a: a.__setitem__(np.s_[:], a[::-1]),
    'transposed': lambda a: a.__setitem__(np.s_[:], a.T),
    'one row over all': lambda a: a.__setitem__(np.s_[:], a[2]),
    'one column over all': lambda a: a.__setitem__(np.s_[:], a[:, 1:2]),
    'a += a.T': lambda a: a.__iadd__(a.T),
    'a *= a[::-1]': lambda a: a.__imul__(a[::-1]),
    'a -= a': lambda a: a.__isub__(a),
    'a -= a[0]': lambda a: a.__isub__(a[0]),
    'a[1:] += a[:-1]': lambda a: a[1:].__iadd__(a[:-1]),
    'a.T -= a': lambda a: a.T.__isub__(a),
}


@pytest.mark.parametrize('how', OVERLAPS)
@pytest.mark.parametrize('n', (5, 70))
def test_overlapping_source_and_destination(how, n):
    x = numbers(n, n)
    a = array(x)
    OVERLAPS[how](a)
    OVERLAPS[how](x)
    same(a, x)
    x = numbers(n, n)
    one, other = from_numpy(x), from_numpy(x)                           # two buffers over the same memory
    want = x.copy()
    want[1:] -= want[:-1]
    one[1:] -= other[:-1]
    same(one, want)


def test_in_place_operators_change_the_array_and_its_version():
    x = numbers(3, 4)
    a = array(x)
    version, place = a.buffer.version, address(a)
    a += 1
    a *= array(x)
    a -= array([1, 2, 3, 4])
    a /= 2
    a **= 2
    a[1] += a[0]
    a[0] = 3
    assert address(a) == place and a.buffer.version == version + 7      # a[1] += also assigns to itself, which is nothing
    x2 = (((x + 1) * x - np.array([1, 2, 3, 4], 'f')) / 2) ** 2
    x2[1] += x2[0]
    x2[0] = 3
    same(a, x2)
    _ = a + 1, a.T, a[0], a.sum()
    assert a.buffer.version == version + 7


# ---- arithmetic ------------------------------------------------------------------------------------------------------

OPERATORS = {
    '+': lambda a, b: a + b, '-': lambda a, b: a - b, '*': lambda a, b: a * b, '/': lambda a, b: a / b,
    '==': lambda a, b: a == b, '!=': lambda a, b: a != b, '<': lambda a, b: a < b, '<=': lambda a, b: a <= b,
    '>': lambda a, b: a > b, '>=': lambda a, b: a >= b,
    'maximum': lambda a, b: a.maximum(b) if isinstance(a, NDArray) else np.maximum(a, b),
    'minimum': lambda a, b: a.minimum(b) if isinstance(a, NDArray) else np.minimum(a, b),
}


def expected(op, a, b):
    """numpy's result in our dtypes: float32 as soon as one is, and for every division."""
    floats = op == '/' or any(getattr(x, 'dtype', np.asarray(x).dtype).kind == 'f' for x in (a, b))
    dtype = np.float32 if floats else np.int32
    with np.errstate(all='ignore'):
        return np.asarray(OPERATORS[op](np.asarray(a).astype(dtype), np.asarray(b).astype(dtype)), dtype)


BROADCASTS = (((), ()), ((3,), ()), ((2, 3), (3,)), ((2, 1), (1, 3)), ((4, 1, 3), (2, 1)), ((0, 3), (3,)), ((1, 0), (5, 1)),
              ((2, 3, 4), (2, 3, 4)), ((40, 70), (70,)), ((40, 70), (40, 1)))


@pytest.mark.parametrize('op', OPERATORS)
@pytest.mark.parametrize('dtype_a', DTYPES)
@pytest.mark.parametrize('dtype_b', DTYPES)
def test_operators_with_broadcasting(op, dtype_a, dtype_b):
    for shape_a, shape_b in (*BROADCASTS, *(pair[::-1] for pair in BROADCASTS)):
        x, z = numbers(*shape_a, dtype=dtype_a), numbers(*shape_b, dtype=dtype_b, seed=1)
        same(OPERATORS[op](array(x), array(z)), expected(op, x, z))
        same(OPERATORS[op](from_numpy(np.array(x, order='F')), array(z).flip()), expected(op, x, np.flip(z)))
        if op not in ('maximum', 'minimum'):
            same(OPERATORS[op](array(x), z), expected(op, x, z))        # numpy's array on either side
            same(OPERATORS[op](x, array(z)), expected(op, x, z))


@pytest.mark.parametrize('op', OPERATORS)
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('value', [3, -2.5, True, 0, np.float32(1.5), np.int64(4), np.float64(0.1)])
def test_operators_with_a_number(op, dtype, value):
    x = numbers(5, 7, dtype=dtype)
    for view in (x, x.T, x[::2, ::-1]):
        same(OPERATORS[op](from_numpy(view), value), expected(op, view, value))
        if op not in ('maximum', 'minimum'):
            same(OPERATORS[op](value, from_numpy(view)), expected(op, value, view))


def test_powers():
    x = np.abs(numbers(4, 5)) + 1
    for exponent in (2, 0.5, -1, 3, -2.5):
        close(array(x) ** exponent, x ** np.float32(exponent))
    close(2 ** array(x), 2 ** x)
    close(array(x) ** array(x.T).T, x ** x)
    z = numbers(4, 5, dtype='int32')
    same(array(z) ** 3, z ** 3)
    same(array(z) ** array(np.abs(z)), z ** np.abs(z))
    same((-2) ** array(np.abs(z)), (-2) ** np.abs(z))
    with np.errstate(all='ignore'):
        close(array(z) ** 0.5, z.astype('f') ** np.float32(0.5))


@pytest.mark.filterwarnings('ignore::RuntimeWarning')
def test_functions():
    x = np.concatenate([np.random.default_rng(0).standard_normal(50), [0.0, -0.0, np.inf, -np.inf, np.nan]]).astype('f')
    x = x.reshape(5, 11)
    exact = x.astype('d')
    for view in (np.s_[:], np.s_[::2, ::-1], np.s_[1]):
        a, e = from_numpy(x)[view].T, exact[view].T
        for got, want in ((a.exp(), np.exp(e)), (a.log(), np.log(e)), (a.tanh(), np.tanh(e)), (a.sqrt(), np.sqrt(e)),
                          (a.sigmoid(), 1 / (1 + np.exp(-e))), (abs(a), np.abs(e)), (a.abs(), np.abs(e)), (-a, -e), (+a, e)):
            close(got, want.astype('f'))
    z = numbers(6, dtype='int32')
    same(-array(z), -z)
    same(abs(array(z)), abs(z))
    close(array(z).exp(), np.exp(z.astype('f')))


def test_int32_wraps_around():
    x = np.array([2**31 - 1, -2**31, 12345678], 'i')
    with np.errstate(over='ignore'):
        same(array(x) + 1, x + np.int32(1))
        same(array(x) * array(x), x * x)
        same(-array(x), -x)
        same(array(x).sum(), x.sum(dtype='i'))


def test_zeros_keep_their_signs():
    a = array([0.0, -0.0])
    for got, want in ((-a, [-0.0, 0.0]), (a * -1, [-0.0, 0.0]), (a + 0, [0.0, 0.0]), (a.copy(), [0.0, -0.0]),
                      (a.sqrt(), [0.0, -0.0]), (a.tanh(), [0.0, -0.0])):
        assert np.signbit(got.numpy()).tolist() == np.signbit(want).tolist()


def test_numbers_and_texts():
    a = array(numbers(2, 3))
    assert float(a[0, 0]) == a.numpy()[0, 0] and int(a[1, 2]) == int(a.numpy()[1, 2]) and isinstance(a[0, 0].item(), float)
    assert a.tolist() == a.numpy().tolist() and len(a) == 2 and a.ndim == 2 and a.size == 6 and a.nbytes == 24
    assert [row.tolist() for row in a] == a.tolist()
    assert bool(array([[1]])) and not bool(array(0.0))
    assert [10, 20, 30][array(1)] == 20 and list(range(3))[array(1):] == [1, 2]
    device = '' if a.device is pyops.cpu() else f', device=pyops.{a.device.name}()'
    assert repr(array([[1, 2], [3, 4.5]])) == f'NDArray([[1. , 2. ],\n         [3. , 4.5]], dtype=float32{device})'
    assert repr(ndarray.zeros((0, 3), 'int32')) == f'NDArray([], shape=(0, 3), dtype=int32{device})'
    assert str(array([1, 2])) == '[1 2]'
    assert (a == None).__class__ is bool and (a != 'x') is True         # noqa: E711  no array, no number: not equal


# ---- reductions ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('shape', [(), (1,), (7,), (3, 4), (2, 1, 5), (2, 3, 4, 5), (0, 3), (3, 0)])
@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('keepdims', (False, True))
def test_reductions(shape, dtype, keepdims):
    x = numbers(*shape, dtype=dtype)
    axes = [None, *range(-len(shape), len(shape))]
    axes += [axis for n in range(len(shape) + 1) for axis in itertools.permutations(range(len(shape)), n)]
    for view in (x, x.T, x[..., ::-1] if shape else x):
        a = from_numpy(view)
        for axis in axes:
            same(a.sum(axis, keepdims), view.sum(axis, dtype=dtype, keepdims=keepdims))
            if view.sum(axis).size and 0 in shape:
                continue
            same(a.max(axis, keepdims), view.max(axis, keepdims=keepdims))
            same(a.min(axis=axis, keepdims=keepdims), view.min(axis, keepdims=keepdims))
            close(a.mean(axis, keepdims), view.mean(axis, dtype='f', keepdims=keepdims))
            if axis is None or isinstance(axis, int):
                same(a.argmax(axis, keepdims), view.argmax(axis, keepdims=keepdims).astype('i'))


def test_nan_in_reductions():
    x = numbers(4, 5)
    x[1, 2] = np.nan
    a = array(x)
    same(a.max(0), x.max(0))
    same(a.min(), x.min())
    same(a.argmax(1), x.argmax(1).astype('i'))
    same(a.maximum(0), np.maximum(x, 0))
    same(array([1.0]).minimum(np.nan), np.array([np.nan], 'f'))
    assert np.isnan(float(ndarray.zeros((0,)).mean()))


@pytest.mark.parametrize('axis', [0, 1, -1, (0, 2), (1, 2), (2, 0), None], ids=str)
def test_softmax_along_any_axes_of_any_view(axis):
    x = np.random.default_rng(3).standard_normal((20, 7, 18)).astype('f')
    axes = tuple(range(3)) if axis is None else axis
    for view in (x, x.transpose(2, 0, 1), x[:, ::-2, 1:4]):
        a = array(x).permute((2, 0, 1)) if view.shape[0] == 18 else array(view) if view is x else array(x)[:, ::-2, 1:4]
        e = np.exp(view.astype('d') - view.max(axes, keepdims=True))
        want = e / e.sum(axes, keepdims=True)
        y, log_y, dy = a.softmax(axis), a.log_softmax(axis), array(view) * 2 + 1
        assert np.allclose(y.numpy(), want, 1e-5, 1e-7) and np.allclose(log_y.numpy(), np.log(want), 1e-5, 1e-5)
        d = dy.numpy().astype('d')
        assert np.allclose(y.softmax_gradient(dy, axis).numpy(), want * (d - (d * want).sum(axes, keepdims=True)), 1e-4, 1e-6)
        dx = log_y.softmax_gradient(dy, axis, log=True).numpy()
        assert np.allclose(dx, d - want * d.sum(axes, keepdims=True), 1e-4, 1e-4)
    assert array([1, 2]).softmax().dtype == np.float32 and array(x)[:0].softmax(0).shape == (0, 7, 18)


def test_int32_argmax_tells_large_numbers_apart():
    x = np.array([[2**30, 2**30 + 1, 2**30 + 1], [-2**31, -2**31, -2**31]], 'i')
    same(array(x).argmax(1), x.argmax(1).astype('i'))


# ---- products, joining, gathering -----------------------------------------------------------------------------------------

@pytest.mark.parametrize('shape_a, shape_b', [
    ((3, 4), (4, 5)), ((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)),
    ((3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2)), ((2, 3, 4), (4,)), ((4,), (2, 4, 3)), ((0, 4), (4, 3)), ((3, 0), (0, 2)),
    ((2, 3, 0), (0, 4)), ((1, 1), (1, 1)), ((30, 40), (40, 20)), ((6, 3, 4), (1, 4, 5)), ((0, 3, 4), (4, 2))])
@pytest.mark.parametrize('dtype', DTYPES)
def test_matmul(shape_a, shape_b, dtype):
    x, z = numbers(*shape_a, dtype=dtype), numbers(*shape_b, dtype=dtype, seed=1)
    want = np.asarray(np.matmul(x, z), dtype)
    same(array(x) @ array(z), want)
    same(array(x) @ z, want)
    same(x @ array(z), want)
    same(from_numpy(np.asfortranarray(x)) @ from_numpy(np.flip(np.flip(z).copy())), want)
    same(array(x).astype('float32') @ array(z).astype('int32'), want.astype('f'))


def test_joining():
    x, z = numbers(2, 3, 4), numbers(2, 3, 4, dtype='int32', seed=1)
    for axis in range(-3, 3):
        same(concatenate([array(x), array(x).flip()[:, :, :]], axis), np.concatenate([x, np.flip(x)], axis))
        same(concatenate([array(x), array(z)], axis), np.concatenate([x, z], axis).astype('f'))
    same(concatenate([array(z)[:, :0], z], 1), z)
    for axis in range(-4, 4):
        same(stack([array(x), array(x).flip(), x], axis), np.stack([x, np.flip(x), x], axis))
    same(stack([1, 2]), np.array([1, 2], 'i'))
    same(pad(array(x), 1), np.pad(x, 1))
    same(pad(array(z), ((0, 1), (2, 0), (0, 0)), -7), np.pad(z, ((0, 1), (2, 0), (0, 0)), constant_values=-7))
    same(pad(array(x)[0], (1, 2), 0.5), np.pad(x[0], (1, 2), constant_values=0.5))


@pytest.mark.parametrize('dtype', DTYPES)
def test_gathering_rows(dtype):
    x = numbers(5, 3, 2, dtype=dtype)
    for ids in ([0, 4, -1, 4], np.array([[1, 2], [3, -5]]), array([2, 2]), [], np.array([], 'i')):
        want = x[np.asarray(ids).astype(int)]
        same(array(x)[ids], want)
        same(from_numpy(np.asfortranarray(x)).take(ids, 0), want)
    same(array(x)[:, 0, 0][[1, 1]], x[:, 0, 0][[1, 1]])
    for bad, index in (([5], 5), ([-6], -6), ([0, 7], 7), (np.array([[1], [-11]]), -11)):
        with pytest.raises(IndexError, match=f'index {index} is out of bounds for axis 0 with size 5'):
            array(x).take(bad, 0)
        with pytest.raises(IndexError, match=f'index {index} is out of bounds for axis 0 with size 5'):
            Tensor(x)[bad]                                              # -6 is not the last row but one


@pytest.mark.parametrize('dtype', DTYPES)
def test_a_mask_as_an_index_selects_as_numpys(dtype):
    x = numbers(5, 3, 2, dtype=dtype)
    a = array(x)
    row, pair, whole = x[:, 0, 0] > 0, x[..., 1] > 2, x < 0
    for mask in (row, pair, whole, np.zeros(5, bool), np.ones((5, 3), bool)):
        assert mask.shape == (5,) or mask.any()
        for index in (mask, mask.tolist(), array(mask), array(mask.tolist()), array(mask.astype(int), 'float32') == 1):
            same(a[index], x[mask])
            same(from_numpy(np.asfortranarray(x))[index], x[mask])
    same(a[a < 0], x[whole])
    same(a[a[:, 0, 0] > 0], x[row])
    same(a[:0][np.zeros(0, bool)], x[:0])
    ids = array(x[:, 0, 0].astype('int32'))
    same(ids[ids > 0], x[row, 0, 0].astype('int32'))


def test_what_numpy_gives_bools_for_is_a_mask():
    x, z = numbers(4, 3, dtype='int32'), numbers(4, 3, dtype='int32', seed=1)
    a, b = array(x), array(z)
    assert (x > 0).any() and (x <= 0).any()
    for mask, want in (((a > 0) * (b > 0), (x > 0) & (z > 0)), ((a > 0).maximum(b > 0), (x > 0) | (z > 0)),
                       ((a > 0) == (b > 0), (x > 0) == (z > 0)), ((a > 0) == 0, x <= 0), ((a > 0).T.copy().T, x > 0),
                       (-1 < a, x > -1), (stack([a > 0, b > 0])[1], z > 0), (concatenate([(a > 0)[:2], (b > 0)[2:]]),
                       np.concatenate([x[:2] > 0, z[2:] > 0])), (pad((a > 0)[1:, 1:], ((1, 0), (1, 0))),
                       np.pad(x[1:, 1:] > 0, ((1, 0), (1, 0)))), ((a > 0)[[3, 1, 2, 0]], (x > 0)[[3, 1, 2, 0]]),
                       (pickle.loads(pickle.dumps(a > 0)), x > 0), (abs(a > 0), x > 0), ((a > 0) + (b > 0),
                       (x > 0) + (z > 0)), (ndarray.full((4, 3), True), x == x)):
        assert mask.is_mask and mask.numpy().dtype == bool and mask.tolist() == want.tolist()
        same(a[mask], x[want])
    same(a[(a > 0).max(1)], x[(x > 0).any(1)])
    same(a[(a > -9).min(1)], x[(x > -9).all(1)])
    assert (a > 0)[0, 0].item() is bool(x[0, 0] > 0) and x[a > 0].tolist() == x[x > 0].tolist()       # numpy's array, our mask
    assert repr((a > 0)[0]).startswith(f'NDArray({np.array2string(x[0] > 0, separator=", ")}, mask of int32')
    assert not (a + 0).is_mask and not ((a > 0) * 2).is_mask


def test_a_mask_stays_one_while_truth_values_are_written_to_it():
    x = numbers(6, dtype='int32')
    for value in (0, 1, True, np.array([True, False]), array([True, False]), [False, True]):
        mask, want = array(x) > 0, x > 0
        mask[1:3] = value
        want[1:3] = value if not isinstance(value, NDArray) else value.numpy()
        same(array(x)[mask], x[want])


def test_an_index_that_may_be_a_mask_or_row_numbers_is_refused():
    x = numbers(6, dtype='int32')
    a, changed = array(x), array(x) > 0
    changed[0] = 5
    for index in (changed, changed[::-1], changed.reshape(2, 3).reshape(6)):
        with pytest.raises(IndexError, match=r'the index of shape \(6,\) is a mask into which numbers were written.* '
                                             r'x\[index != 0\] to select, x\[index \* 1\] for row numbers'):
            a[index]
        same(a[index != 0], x[index.numpy() != 0])
        same(a[index * 1], x[index.numpy()])
    same(a[(a > 0).astype('int32')], x[(x > 0).astype('int32')])
    same(a[array([True, False], 'int32')], x[[1, 0]])
    for index in (a[:1] > 0, [[True] * 6], ndarray.full((6, 1), True)):
        with pytest.raises(IndexError, match='boolean index did not match indexed array|too many indices'):
            a[index]
        with pytest.raises(IndexError, match='boolean index did not match indexed array|too many indices'):
            a[index] = 0
    with pytest.raises(TypeError, match=r'only an int32 array of shape \(\) is an index, got mask of int32 \(\)'):
        [1, 2][(a > 0)[0]]


@pytest.mark.parametrize('device', [name for name in DEVICES if name != 'numpy'], indirect=True)
def test_a_plan_replays_an_index_of_one_array_and_refuses_several(device):
    x = numbers(3, 4, 2)
    a, ids = array(x), array([3, 0, 3])
    with Plan(a=a, ids=ids) as plan:
        y = a[:, ids] * 2
        z = a[..., ids[:2] * 0] + 1
        a[[0, 2], 1] = 7.0
        with pytest.raises(RuntimeError, match='an index with several arrays cannot be recorded by a plan'):
            a[ids, ids * 0]
    a[...] = x + 1
    ids[...] = [1, 2, 0]
    plan.run()
    same(y, (x + 1)[:, [1, 2, 0]] * 2)
    same(z, (x + 1)[..., [0, 0]] + 1)
    changed = x + 1
    changed[[0, 2], 1] = 7
    same(a, changed)


@pytest.mark.parametrize('device', [name for name in DEVICES if name != 'numpy'], indirect=True)
def test_a_plan_does_not_record_a_number_of_rows_that_depends_on_data():
    x = array(numbers(6))
    with Plan(run=False), pytest.raises(RuntimeError, match=r'a mask of shape \(6,\) cannot select rows while a plan records'):
        x[x > 0]
    with Plan():
        y = x[np.arange(6) < 3]                                         # known before: as constant as a slice
    same(y, x.numpy()[:3])


def test_adding_to_rows_that_repeat():
    x, rows = numbers(5, 3), numbers(4, 3, seed=1)
    a = array(x)
    a.add_at([0, 2, 0, 4], array(rows))
    np.add.at(x, [0, 2, 0, 4], rows)
    a.add_at(array([[1], [1]]), 0.5)
    x[1] += 1
    same(a, x)
    if a.device is not pyops.numpy_device():
        with pytest.raises(IndexError, match='expected 0 to 4'):
            a.add_at([5], 1.0)
            a.numpy()                                                   # a GPU tells by then


# ---- numpy and DLPack ---------------------------------------------------------------------------------------------------

@of_the_host
def test_numpys_memory_without_a_copy():
    x = numbers(4, 6)
    for view in (x, x.T, x[::-1], x[1:3, ::-2], x[:, 2], x[1, 1, None], np.broadcast_to(x, (2, 4, 6)), x[:0]):
        if not view.flags.writeable:
            with pytest.raises(ValueError, match='read-only'):
                from_numpy(view)
            continue
        a = from_numpy(view)
        same(a, view)
        if view.size:
            assert address(a) == pointer(view) and np.shares_memory(a.numpy(), x)
            a += 1
            same(a, view)
    a = from_numpy(x)
    for back in (a.numpy(), np.asarray(a), np.asarray(a, dtype='float32'), np.array(a, copy=False)):
        assert np.shares_memory(back, x)
    assert not np.shares_memory(np.array(a), x) and np.asarray(a, dtype='float64').dtype == np.float64
    with pytest.raises(ValueError, match='avoid copy'):
        np.asarray(a, dtype='float64', copy=False)
    struct = np.zeros(3, [('a', 'i1'), ('b', 'f4')])
    with pytest.raises(ValueError, match='multiples of the element size'):
        from_numpy(struct['b'])
    same(np.float32(2) * a, 2 * x)
    same(x - a, x - x)


def test_memory_lives_as_long_as_somebody_uses_it():
    before = live_bytes()
    a = array(numbers(100, 100))
    assert live_bytes() == before + 40_000
    view = a.T[3:, ::-1]
    x = view.numpy()
    want = x.copy()
    del a
    assert live_bytes() == before + 40_000
    del view
    assert live_bytes() == before
    np.testing.assert_array_equal(x, want)                              # numpy keeps what it looks at


@of_the_host
def test_the_array_interface_describes_any_view_and_outlives_a_free():
    x = numbers(4, 6)
    a = from_numpy(x)
    for view, want in ((a, x), (a.T, x.T), (a[::-1, ::2], x[::-1, ::2]), (a[1, 2], x[1, 2]), (a[:0], x[:0])):
        described = view.__array_interface__
        assert described['shape'] == want.shape and described['typestr'] == '<f4' and not described['data'][1]
        assert not want.size or described['data'][0] == address(view)
        np.testing.assert_array_equal(np.asarray(view), want)
    mask = a > 0
    assert not hasattr(mask, '__array_interface__') and np.asarray(mask).dtype == bool
    b = array(numbers(1000, 50))
    kept = np.asarray(b)
    want = kept.copy()
    b.buffer.free()
    others = [array(np.full((1000, 50), i, 'f')) for i in range(5)]             # would get the freed memory
    np.testing.assert_array_equal(kept, want)
    del others
    with pytest.raises(ValueError, match='was freed'):
        np.asarray(b)


@of_the_host
def test_dlpack_both_ways_with_numpy():
    a = array(numbers(3, 4))
    x = np.from_dlpack(a)
    assert pointer(x) == address(a)
    x = numbers(4, 5)
    b = from_dlpack(x[:, 1:3])
    assert address(b) == pointer(x[:, 1:3])
    b += 1
    same(b, x[:, 1:3])


@of_the_host
def test_dlpack_both_ways_with_torch(torch):
    a = array(numbers(3, 4))
    for view in (a, a.T, a[1:, ::2]):
        t = torch.from_dlpack(view)
        assert t.data_ptr() == address(view) and tuple(t.shape) == view.shape and t.stride() == view.strides
        t += 1
        same(view, t.numpy())
    assert torch.asarray(a).data_ptr() == address(a)
    t = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    for view in (t, t.T, t[:, 1]):
        b = from_dlpack(view)
        assert address(b) == view.data_ptr()
        b *= 2
        same(b, view.numpy())


def test_dlpack_refuses_negative_strides():
    a = array(numbers(3, 4))
    with pytest.raises(BufferError, match=r'negative strides, got \(-4, 1\).*copy'):
        from_dlpack(a[::-1])
    same(from_dlpack(a[::-1].copy()), a.numpy()[::-1])
    assert from_dlpack(a[:0, ::-1]).shape == (0, 4)


def test_copies_and_pickles_are_arrays_of_their_own(device):
    a = array(numbers(3, 4)).T[::-1]
    for twin in (copy.copy(a), copy.deepcopy(a), pickle.loads(pickle.dumps(a))):
        same(twin, a.numpy())
        assert twin.buffer is not a.buffer and twin.device is device and twin.dtype is a.dtype
        same(twin + a, 2 * a.numpy())


def test_one_number_is_formatted_as_a_number():
    assert f'{array(3.14159):.2f} {array(7):03d} {array(2.5)} {array([1, 2])}' == '3.14 007 2.5 [1 2]'
    with pytest.raises(TypeError, match='format'):
        f'{array([1.0]):.2f}'


def test_what_is_no_real_number_or_no_axis_is_refused():
    a = array(numbers(3, 4))
    for act in (lambda: a + np.complex64(1j), lambda: a.__setitem__(0, np.complex128(1j)), lambda: a.__iadd__(np.complex64(1))):
        with pytest.raises(TypeError, match='expected numbers, got complex'):
            act()
    a.sum(1)
    with pytest.raises(TypeError, match='integer'):
        a.sum(1.0)


# ---- plans --------------------------------------------------------------------------------------------------------------

def step(x, w):
    """Something of everything: views, broadcasting, products, reductions, assignment, constants."""
    h = (x @ w + x.sum(1, keepdims=True) * 0.5).tanh()
    h[1:] += h[:-1]
    pieces = concatenate([h.T[::-1], pad(h.T, ((0, 0), (0, 0)))], 0)
    weights = array([1.0, 2, 3], device=x.device)[:, None] * stack([pieces[0], pieces[1], 2 * pieces[2]]).maximum(0)
    norm = (weights * weights).sum().sqrt() + 1
    batch = stack([h, h.flip()]) @ w.T
    return (batch / norm).max(0).sum(0), h.argmax(1), h.astype('int32').sum(0) * 2


@pytest.mark.parametrize('device', [name for name in DEVICES if name != 'numpy'], indirect=True)
@pytest.mark.parametrize('run', (True, False))
def test_a_plan_that_records_array_operations_replays_them_to_the_bit(run):
    rng = np.random.default_rng(3)
    x, w = (backend.put(rng.standard_normal(shape).astype('f')) for shape in ((5, 4), (4, 6)))
    with Plan(run=run, x=x, w=w) as plan:
        results = step(ndarray.as_ndarray(x), ndarray.as_ndarray(w))
    for _ in range(20):
        plan.feed(x=rng.standard_normal((5, 4)), w=rng.standard_normal((4, 6)))
        plan.run()
        for got, want in zip(results, step(array(x), array(w)), strict=True):
            assert got.dtype == want.dtype and (got.numpy().view('i') == want.numpy().view('i')).all()
    plan.check()
    text = str(plan)
    assert 'StridedBinaryAction: a Tensor(matmul)(5, 6), b Tensor(multiply)(5, 1) -> y Tensor(add)(5, 6)  ' \
           '[shape=(5, 6) strides=(6, 1, 6, 1, 1, 0) ndim=2 op=0]' in text
    assert 'GemmBatchedAction' in text
    rows = plan.profile(runs=2).rows()
    assert next(row for row in rows if row.name.startswith('gemm_batched')).flops > 0
    assert plan.memory().saved_by_reuse > 0


def test_an_unknown_backend_is_a_clear_error():
    out = subprocess.run([sys.executable, '-c', 'from pyops import ndarray; ndarray.zeros(3)'], cwd=ROOT, text=True,
                         env=os.environ | {'PYOPS_BACKEND': 'tpu'}, capture_output=True)
    assert 'PYOPS_BACKEND=tpu: no such backend; set it to cpu, numpy or gpu, or unset it' in out.stderr


def test_every_device_implements_the_whole_protocol(device):
    methods = {name: method for name, method in vars(Device).items() if isinstance(method, types.FunctionType)}
    required = [name for name, method in methods.items() if 'NotImplementedError' in method.__code__.co_names]
    assert {'new', 'put', 'converter', 'synchronize', 'lease', 'calls', 'matmul'} <= {*required}, 'the check is vacuous'
    assert [name for name in required if getattr(type(device), name) is getattr(Device, name)] == []
    assert backend.current_device() is device and type(device).launch is Device.launch


def test_every_device_allocates_copies_launches_records_and_replays(device):
    x, two = backend.put(np.arange(4, dtype='f')), backend.put(np.full(1, 2, 'f'))
    with Plan(x=x) as plan:
        y = backend.empty(4, name='y')
        backend.launch('scale', y, x, two, 4)
    device.synchronize()
    assert backend.get(y).tolist() == [0, 2, 4, 6] and backend.device_of(y).is_host == device.is_host
    plan.feed(x=np.full(4, 5, 'f'))
    plan.run()
    assert backend.get(y).tolist() == [10] * 4 and plan.memory().intermediates == 64
    assert backend.get(device.new(3, np.int64)).shape == (3,)
    assert backend.get(device.zero_array((2, 1), np.uint8)).tolist() == [[0], [0]]


def test_the_oracle_needs_no_kernels():
    code = 'from pyops import ndarray; a = ndarray.arange(6).reshape(2, 3); print((a @ a.T + 1).sum(), repr(a.device))'
    out = subprocess.run([sys.executable, '-c', code], cwd=ROOT, text=True, capture_output=True,
                         env=os.environ | {'PYOPS_BACKEND': 'numpy', 'PYOPS_LIBRARY': '/nowhere'})
    assert out.stdout == '87 pyops.numpy_device()\n', out.stderr


# ---- memory of small arrays --------------------------------------------------------------------------------------------

HOLDERS = {
    'numpy': lambda a: a.numpy(), 'part of numpy': lambda a: a.numpy()[3:30], 'view': lambda a: a[3:30], 'T': lambda a: a.T,
    'memoryview': lambda a: memoryview(a.numpy()), 'dlpack': lambda a: np.from_dlpack(a),
    'kernel array': lambda a: a.kernel_view(),
    'tensor': lambda a: Tensor(a), 'bits': lambda a: a.bits_of(), 'owner': lambda a: a.buffer.owner,
    'pointer': lambda a: a.buffer.pointer, 'view of the owner': lambda a: a.buffer.owner[3:30].view(np.int32),
}


@pytest.mark.parametrize('name', HOLDERS)
def test_memory_of_a_small_array_is_not_reused_while_anything_refers_to_it(name):
    device = ndarray.cpu()
    for n in (37, 300):
        a, threes = (array(np.full(n, value, np.float32), device=device) for value in (7, 3))
        a = a.copy()                                        # in memory of the device
        place, held = a.location(), HOLDERS[name](a)
        del a
        later = [threes.copy() for _ in range(40)]
        assert all(x.location() != place for x in later)
        if name != 'pointer':
            values = np.asarray(held.array if name == 'tensor' else held)
            assert (values.view(np.float32) == 7).all()
        del held


def test_memory_of_a_small_array_is_freed_with_the_last_reference():
    device = ndarray.cpu()
    for dtype in ('float32', 'int32', 'float64'):
        a = ndarray.empty(37, dtype, device)
        memory = weakref.ref(a.buffer.pointer)
        part, whole = a[2:], a.numpy()
        del a
        assert memory() is not None
        del part
        assert memory() is not None and whole.shape == (37,)
        del whole
        assert memory() is None


def test_threads_do_not_share_the_memory_of_small_arrays():
    device, wrong = ndarray.cpu(), []

    def work(number):
        for i in range(300):
            x = array(np.full(40, number * 1000 + i, np.float32), device=device)
            y = (x + x) * 0.5 - x
            if not ((x.numpy() == number * 1000 + i).all() and not y.numpy().any()):
                wrong.append((number, i))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ---- operations on small arrays ----------------------------------------------------------------------------------------

def python_calls(run):
    """Return the names of the Python functions that run() calls."""
    found = []
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_name) if event == 'call' else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found[1:]


@of_the_host
def test_an_operation_on_small_arrays_is_a_few_calls_of_python(device):
    """Speed, without a clock: the general path takes two to six times as many calls."""
    a, b = (array(numbers(3, 4), device=ndarray.cpu()) for _ in range(2))
    x, ids, mask = numbers(3, 4), array([0, 2, 1, 1], device=ndarray.cpu()), a > 0
    cases = {'a + b': (lambda: a + b, 5), 'a * 2': (lambda: a * 2, 5), 'a > b': (lambda: a > b, 5), '-a': (lambda: -a, 6),
             'a + b[0]': (lambda: a + b[0], 10), 'a.sum(1)': (lambda: a.sum(1), 9), 'a += b': (lambda: a.__iadd__(b), 3),
             'a @ b.T': (lambda: a @ b.T, 9), 'where': (lambda: ndarray.where(a, b, 0.0), 7), 'exp': (lambda: a.exp(), 6),
             'a + ids': (lambda: a + ids, 8), 'ids / 2': (lambda: ids / 2, 7),
             'zeros': (lambda: ndarray.zeros((3, 4), device=ndarray.cpu()), 6),
             'array': (lambda: array(x, device=ndarray.cpu()), 16), 'concatenate': (lambda: concatenate([a, b], 1), 6),
             'stack': (lambda: stack([a, b]), 6), 'a[[0, 2]]': (lambda: a[[0, 2]], 10), 'a[mask]': (lambda: a[mask], 10)}
    for name, (run, most) in cases.items():
        for _ in range(2):                              # some operations are recorded the second time
            run()
        assert len(python_calls(run)) <= most, (name, python_calls(run))


@of_the_host
def test_small_operations_on_freed_memory_raise(device):
    operations = (lambda a, b: a + b, lambda a, b: b + a, lambda a, b: a * 2, lambda a, b: -a, lambda a, b: a.sum(),
                  lambda a, b: a @ b, lambda a, b: a.__iadd__(b), lambda a, b: b.__iadd__(a), lambda a, b: a.copy(),
                  lambda a, b: a.astype('int32'), lambda a, b: ndarray.where(b, a, b), lambda a, b: a.argmax(),
                  lambda a, b: b.__setitem__(..., a), lambda a, b: a + array([1, 2, 3]), lambda a, b: array([1, 2, 3]) * a,
                  lambda a, b: concatenate([b, a]), lambda a, b: stack([a, b]), lambda a, b: a[[0, 2]],
                  lambda a, b: b[a > 0])
    for run in operations:
        run(array(np.eye(3, dtype='f')), array(np.eye(3, dtype='f')))       # the call is prepared
        a, b = array(np.eye(3, dtype='f')), array(np.eye(3, dtype='f'))
        a.buffer.free()
        with pytest.raises(ValueError, match='its memory was freed'):
            run(a, b)


def test_small_operations_in_place_on_overlapping_views():
    x = numbers(9)
    for change in (lambda a: a[1:].__iadd__(a[:-1]), lambda a: a[:-1].__imul__(a[1:]), lambda a: a.__isub__(a[::-1]),
                   lambda a: a.__setitem__(slice(1, None), a[:-1]), lambda a: a.__iadd__(a)):
        a, want = array(x), x.copy()
        version = a.buffer.version
        change(a)
        change(want)
        same(a, want)
        assert a.buffer.version > version


def test_small_operations_keep_the_rules_of_int32():
    a = array([[1, 2], [3, 2**31 - 1]], device=ndarray.cpu())
    for _ in range(2):                                                      # before and after the call is prepared
        same(a + 1, np.array([[2, 3], [4, -2**31]], 'i'))
        same(a * 0.5, np.array([[0.5, 1], [1.5, 2.0**30]], 'f'))
        same(a / 2, np.array([[0.5, 1], [1.5, 2.0**30]], 'f'))
        assert (a > 2).is_mask and (a > 2).tolist() == [[False, False], [True, True]]
        same(a & 1, np.array([[1, 0], [1, 1]], 'i'))
        with pytest.raises(OverflowError, match='Python integer 2147483648 out of bounds for int32'):
            a + 2**31
        with pytest.raises(ValueError, match='int32 to a negative power'):
            a ** -1
        with pytest.raises(TypeError, match='an int32 array cannot hold the float32 result'):
            a += 0.5
        with pytest.raises(ValueError, match='could not be broadcast together'):
            a + array([1, 2, 3], device=ndarray.cpu())


def test_small_operations_keep_the_rules_of_masks():
    x = numbers(3, 4)
    a = array(x)
    for _ in range(2):
        mask, other = a > 0, a < 5
        assert mask.is_mask and mask.copy().is_mask and abs(mask).is_mask and mask.max(0).is_mask and mask.any().is_mask
        assert (mask & other).is_mask and (mask * other).is_mask and (mask & other).dtype == mask.dtype
        np.testing.assert_array_equal((mask ^ other).numpy(), (x > 0) ^ (x < 5))
        assert not (mask * 1).is_mask and not (mask + 1).is_mask and not (1 - mask).is_mask and not mask.exp().is_mask
        np.testing.assert_array_equal((mask + other).numpy(), (x > 0) + (x < 5))
        union = mask.copy()
        union += a < -5
        assert union.is_mask and union.tolist() == ((x > 0) | (x < -5)).tolist()
        for call in (lambda: -mask, lambda: mask - other, lambda: mask.__isub__(other)):        # noqa: B023
            with pytest.raises(TypeError, match=r'^-: .*mask.*astype\(int\)'):
                call()
        assert mask.sum().dtype == 'int32' and mask.sum().item() == (x > 0).sum()
        mask[0] = 3.0
        assert not mask.is_mask and not mask.copy().is_mask
        np.testing.assert_array_equal(ndarray.where(a > 0, a < 5, a > 7).numpy(), np.where(x > 0, x < 5, x > 7))
        assert ndarray.where(a > 0, a < 5, a > 7).is_mask


@pytest.mark.parametrize('kinds', [*itertools.product(('float32', 'int32', 'float64'), repeat=2)], ids='-'.join)
def test_small_operations_on_two_dtypes(kinds):
    if 'float64' in kinds and ON_GPU:
        pytest.skip('float64 arrays are on the CPU only: run the tests without --on gpu or emulated')
    x, z = (numbers(3, 4, dtype=kind, seed=seed) for seed, kind in enumerate(kinds))
    z[z == 0] = 1
    one = np.result_type(*('float32' if kind == 'int32' else kind for kind in kinds))
    a, b = array(x, x.dtype), array(z, z.dtype)
    for _ in range(2):                                                      # before and after the call is prepared
        same(a / b, (x / z).astype(one))
        same(a[1:, ::2] / b[0, ::2], (x[1:, ::2] / z[0, ::2]).astype(one))
        same(a.T + b.T, (x.T + z.T).astype('int32' if kinds == ('int32', 'int32') else one))
        assert (a <= b).is_mask and ((a <= b).numpy() == (x <= z)).all()
        assert ((a > 0) * (b > 0)).is_mask and ((a > 0) + (b > 0)).is_mask


def test_small_arrays_are_filled():
    for _ in range(2):
        for shape in (3, (3,), (2, 0), (), (2, 3, 4), [2, 3], (np.int64(2), 3)):
            for value, dtype, want in ((0, None, 'i4'), (7, None, 'i4'), (0, 'float32', 'f4'), (-0.0, None, 'f4'),
                                       (2.5, None, 'f4'), (2.5, 'int32', 'i4'), (True, 'float32', 'f4'),
                                       (np.float32(0.5), None, 'f4')):
                got = ndarray.full(shape, value, dtype)
                same(got, np.full(shape, value, want))
                assert np.signbit(got.numpy()).all() == np.signbit(np.full(shape, value, want)).all() and not got.is_mask
            assert ndarray.full(shape, True).is_mask and ndarray.full(shape, 2.0, bool).is_mask
            np.testing.assert_array_equal(ndarray.full(shape, 2.0, bool).numpy(), np.ones(shape, bool))
        for shape, error in (((2.0, 3), TypeError), ((-1, 3), ValueError), ((1,) * 9, ValueError)):
            with pytest.raises(error):
                ndarray.zeros(shape)
        with pytest.raises(OverflowError, match='Python integer 4294967296 out of bounds for int32'):
            ndarray.full((2, 3), 2**32)


@of_the_host
def test_small_arrays_of_float64_are_filled(device):
    for value in (0, 1, -0.0, 0.1, True):
        same(ndarray.full((2, 3), value, 'float64'), np.full((2, 3), value, 'f8'))


def test_small_arrays_are_copies_of_the_numbers():
    for _ in range(2):
        for x in (np.arange(6).reshape(2, 3)[:, ::-1], np.float32(1.5), np.array([1e300, -1e300, np.nan]),
                  np.ones(3, 'f4')[::2]):
            dtype = np.float32 if x.dtype.kind == 'f' else np.int32
            got, before = array(x), np.array(x)
            with np.errstate(over='ignore'):
                same(got, x.astype(dtype))
            got += 1
            np.testing.assert_array_equal(x, before)
        assert array([True, False]).is_mask and array([1, 0], bool).is_mask and not array([True, False], 'float32').is_mask
        with pytest.raises(OverflowError, match='Python integer 4294967296 out of bounds for int32'):
            array([1, 2**32])


def test_small_arrays_are_joined():
    x, z = numbers(2, 3), numbers(2, 3, seed=1)
    a, b = array(x), array(z)
    for _ in range(2):
        for axis in (0, 1, -1, -2):
            same(concatenate([a, b], axis), np.concatenate([x, z], axis))
            same(concatenate([a, b[:, :2].copy()], 1), np.concatenate([x, z[:, :2]], 1))
            same(concatenate([a.T, b.T[::-1], a.T[:0]], 0), np.concatenate([x.T, z.T[::-1]], 0))
        for axis in (0, 1, 2, -1, -3):
            same(stack([a, b[::-1]], axis), np.stack([x, z[::-1]], axis))
        assert concatenate([a > 0, b > 0]).is_mask and stack([a > 0, b > 0], 1).is_mask
        assert not concatenate([a > 0, b]).is_mask and concatenate([a, array([[1, 2, 3]])]).dtype == 'float32'
        for call, error in ((lambda: concatenate([a, b], 2), np.exceptions.AxisError), (lambda: stack([a, b], -4), ValueError),
                            (lambda: concatenate([a, b], 'x'), TypeError), (lambda: concatenate([]), ValueError),
                            (lambda: concatenate([a, b[:, :2]]), ValueError), (lambda: stack([a, b.T]), ValueError)):
            with pytest.raises(error):
                call()


@pytest.mark.parametrize('dtype', ['float32', 'int32', *['float64'] * (not ON_GPU)])
def test_rows_of_small_arrays(dtype):
    x = numbers(4, 3, dtype=dtype)
    a, ids = array(x, dtype), np.array([3, -4, 0, 0])
    for _ in range(2):
        for index in (ids, ids.tolist(), ids.astype('i4'), [1], np.array([], 'i8'), [[0, 1], [-1, 2]]):
            same(a[index], x[index])
        same(a[1][[0, -1]], x[1][[0, -1]])
        same(a[array(ids, 'int32')], x[ids])
        same(a[:, ::-1][array(ids, 'int32')], x[:, ::-1][ids])
        for mask in (x > 0, x[:, 0] > 0, x > 99, np.ones((4, 3), bool)):
            same(a[mask], x[mask])
            same(a[array(mask)], x[mask])
        same(a[[True, False, True, True]], x[[True, False, True, True]])
        assert (a > 0)[ids].is_mask and not a[ids].is_mask
        for index in ([4], [-5], [0, 4, 2**20], np.array([0, -5]), [0.5], np.ones((3, 4), bool), [True, False]):
            with pytest.raises(IndexError):
                a[index]
        mask = a > 0
        mask += 1
        with pytest.raises(IndexError, match='it could be a mask or row numbers'):
            a[mask]


@pytest.mark.parametrize('dtype', ['float32', 'int32', *['float64'] * (not ON_GPU)])
@pytest.mark.parametrize('shape', [(3, 4), (2, 3, 4), (), (70, 1, 65), (2, 0, 3)], ids=str)
def test_running_sums_and_products(shape, dtype):
    x = numbers(*shape, dtype=dtype) / np.array(4 if dtype != 'int32' else 1, dtype)
    for z in (x.astype(dtype), x.astype(dtype)[::-1].T if x.ndim else x.astype(dtype)):
        a, tolerance = from_numpy(z.copy())[::1].T if z.ndim > 1 else array(z, dtype), 0 if dtype == 'int32' else 1e-5
        z = z.T if z.ndim > 1 else z
        for _ in range(2):                                                  # before and after the call is prepared
            for axis in (None, *range(-1, z.ndim)):
                if axis is not None and not z.ndim:
                    continue
                for got, want in ((a.cumsum(axis), z.cumsum(axis, dtype)), (a.cumprod(axis), z.cumprod(axis, dtype))):
                    assert got.shape == want.shape and got.dtype == want.dtype
                    np.testing.assert_allclose(got.numpy(), want, tolerance, tolerance)
                for keepdims in (False, True):
                    got, want = a.prod(axis, keepdims), z.prod(axis, dtype, keepdims=keepdims)
                    assert got.shape == np.shape(want) and got.dtype == dtype
                    np.testing.assert_allclose(got.numpy(), want, tolerance, tolerance)
            if z.ndim == 3:
                for got, want in ((a.prod((2, 0)), z.prod((2, 0), dtype)),
                                  (a.prod((0, 1), True), z.prod((0, 1), dtype, keepdims=True))):
                    assert got.shape == want.shape
                    np.testing.assert_allclose(got.numpy(), want, tolerance, tolerance)


def test_running_sums_of_masks_count_and_int32_wraps_around():
    x = numbers(3, 4)
    for _ in range(2):
        same((array(x) > 0).cumsum(1), (x > 0).cumsum(1, 'i4'))
        same((array(x) > 0).prod(0), (x > 0).astype('i4').prod(0, 'i4'))
        big = np.array([2**30, 2**30, 2**30, 3], 'i4')
        same(array(big).cumsum(), big.cumsum(dtype='i4'))
        same(array(big).cumprod(), big.cumprod(dtype='i4'))


def test_long_running_sums_lose_no_digits():
    x = np.full(300_000, 0.1, 'f')
    np.testing.assert_allclose(array(x).cumsum().numpy()[-1], 0.1 * 300_000, 1e-6)


@of_the_host
def test_running_sums_of_bad_sizes_are_refused(device):
    x = np.ones((2, 3), 'f')
    for sizes, text in (((-1, 3, 1, 0, 0), 'outer=-1'), ((1, 3, 1, 7, 0), 'op=7')):
        with pytest.raises(ValueError, match=text):
            backend.launch('cumulate', x.copy(), x, *sizes)


@pytest.mark.parametrize('dtype', ['float32', 'int32', *['float64'] * (not ON_GPU)])
def test_small_arrays_are_sorted(dtype):
    x = numbers(3, 7, dtype=dtype)
    if dtype != 'int32':
        x[1, 2] = np.nan
    for z, a in ((x, array(x, dtype)), (x.T, array(x, dtype).T), (x[:, ::2], array(x, dtype)[:, ::2])):
        for _ in range(2):
            for axis in (0, 1, -1):
                same(a.argsort(axis), z.argsort(axis, kind='stable').astype('i4'))
                same(a.sort(axis), np.sort(z, axis))
            down = (-z.astype('f8')).argsort(-1, kind='stable')
            same(a.argsort(descending=True), down.astype('i4'))
            same(a.topk(2)[0], np.take_along_axis(z, down, -1)[..., :2])


@pytest.mark.parametrize('dtype', ['float32', 'int32', *['float64'] * (not ON_GPU)])
def test_any_index_of_small_arrays(dtype):
    x, mask, ids = numbers(3, 4, dtype=dtype), numbers(3, 4, seed=2) > 0, np.array([2, 0, -1])
    indices = (mask, (slice(None), ids), (ids, 1), (ids, ids), (ids[:, None], ids), (..., ids), (None, ids), (mask[:, 0], 2),
               (slice(None, None, -1), [0, -2]), ([], [1]), ([0, 1], slice(1, 3)))
    for _ in range(2):
        for index in indices:
            ours = tuple(array(i) if isinstance(i, np.ndarray) else i for i in index) if type(index) is tuple else array(index)
            for z, a in ((x, array(x, dtype)), (x[:, ::-1], array(x, dtype)[:, ::-1])):
                same(a[index], z[index])
                same(a[ours], z[index])
                for value in (7, 2.5, np.asarray(z[index]) + 1):
                    got, want, version = a.copy(), z.copy(), 0
                    version = got.buffer.version
                    got[ours], want[index] = value, value
                    same(got, want)
                    assert got.buffer.version > version
                view, want = a.copy(), z.copy()
                view.T[::-1][mask.T] = 5
                want.T[::-1][mask.T] = 5
                same(view, want)
        a = array(x, dtype)
        for index in ((ids, 4), ([3], 0), mask[:2], (mask, 0), ([0.5], 1)):
            with pytest.raises(IndexError):
                a[index]
            with pytest.raises(IndexError):
                a[index] = 1
        with pytest.raises(ValueError, match='a broadcast view cannot be written to'):
            a[0].broadcast_to(3, 4)[mask] = 1
        truth = a > 0
        truth[mask] = True
        assert truth.is_mask and (truth.numpy() == ((x > 0) | mask)).all()


@pytest.mark.parametrize('dtype', ['float32', 'int32', 'float64'])
@of_the_host
def test_the_indices_of_elements_that_are_not_0(dtype, device):
    rng = np.random.default_rng(0)
    for shape in ((7,), (3, 4), (2, 3, 4), (1, 1), (0, 3), (2, 2, 1, 3, 2), (30, 80)):
        for share in (0.0, 0.4, 1.0):
            x = (rng.random(shape) < share) * rng.integers(1, 5, shape).astype(dtype)
            if x.size and dtype != 'int32':
                x.reshape(-1)[::3] = np.resize([np.nan, -0.0, 1e-45, np.inf], x.reshape(-1)[::3].shape)
            elif x.size:
                x.reshape(-1)[::3] = -2**31
            for view in (lambda x: x, lambda x: x.T, lambda x: x[::-1]):
                found = view(array(x, dtype)).nonzero()
                assert [(one.tolist(), one.dtype) for one in found] == [(one.tolist(), np.int32) for one in np.nonzero(view(x))]
    with pytest.raises(ValueError, match='freed'):
        freed = array(np.ones(3, dtype))
        freed.buffer.free()
        freed.nonzero()


@pytest.mark.parametrize('dtype', ['float32', 'int32', 'float64'])
@of_the_host
def test_a_number_where_a_mask_is_true(dtype, device):
    for view in (lambda x: x, lambda x: x.T, lambda x: x[::-1, 1:]):
        for value, kind in ((7, dtype), (-1.5 if dtype != 'int32' else -3, 'int32'), (0, 'float64'), (True, 'float32')):
            ours, theirs = array(numbers(3, 4), dtype), numbers(3, 4).astype(dtype)
            part, of_numpy = view(ours), view(theirs)
            mask, version = part.astype(kind) > 0, ours.buffer.version
            assert mask.dtype == kind
            part[mask] = value
            of_numpy[of_numpy > 0] = value
            np.testing.assert_array_equal(ours.numpy(), theirs)
            assert ours.buffer.version == version + 1 and ours.dtype == dtype
    x, mask = array(numbers(3, 4), dtype), array(numbers(3, 4), dtype) > 0
    for bad, error in ((lambda: x.__setitem__(mask[:2], 1), IndexError),
                       (lambda: x[0].broadcast_to((3, 4)).__setitem__(mask, 1), ValueError)):
        with pytest.raises(error):
            bad()
    mask[mask] = 0                                      # the same memory
    assert not mask.numpy().any() and mask.is_mask
    x[x == 2**30] = 1.5                                 # no element
    if dtype == 'int32':
        with pytest.raises(OverflowError):
            x[x < 99] = 2**40


@of_the_host
def test_one_element_as_a_number_of_python(device):
    for dtype, value in (('float32', 0.1), ('float64', 0.1), ('int32', -7)):
        x = array(np.array([[1, value], [3, 4]], dtype), dtype)
        for one in (x[0, 1], x.T[1, 0], x[:1, 1:], x.numpy()[0, 1]):
            assert one.item() == np.array(value, dtype).item() and type(one.item()) is type(value)
    assert (x == -7)[0, 1].item() is True and (x == -7)[0, 0].item() is False
    with pytest.raises(ValueError, match='size 1'):
        x.item()
    x.buffer.free()
    with pytest.raises(ValueError, match='its memory was freed'):
        x[0, 0].item()


@pytest.mark.parametrize('shapes', [((5, 3, 4), (5, 4, 2)), ((5, 3, 4), (4, 2)), ((3, 4), (5, 4, 2)), ((2, 1, 3, 4), (5, 4, 2)),
                                    ((4,), (5, 4, 2)), ((5, 3, 4), (4,)), ((300, 4, 4), (300, 4, 4)), ((2, 3, 0), (2, 0, 4)),
                                    ((0, 3, 4), (4, 2)), ((1, 2, 9, 17), (3, 1, 17, 9))])
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@of_the_host
def test_products_of_many_small_matrices(shapes, dtype, device):
    a, b = (np.random.default_rng(0).integers(-9, 10, shape).astype(dtype) for shape in shapes)
    for ours, theirs in ((lambda x: x, lambda x: x), (lambda x: x[..., ::-1].copy()[..., ::-1],) * 2,
                         (lambda x: x.swapaxes(0, -1).copy().swapaxes(0, -1),) * 2):
        x, y = ours(array(a, dtype)), ours(array(b, dtype))
        want = theirs(a) @ theirs(b)
        for _ in range(2):
            got = x @ y
            np.testing.assert_array_equal(got.numpy(), want)
            assert got.dtype == dtype and got.is_compact()
    if a.size:
        free = array(a, dtype)
        free.buffer.free()
        with pytest.raises(ValueError, match='its memory was freed'):
            free @ array(b, dtype)
    with pytest.raises(ValueError, match='do not fit|broadcast'):
        array(a, dtype) @ array(np.ones((7, 9, 2)), dtype)


@pytest.mark.parametrize('device', sorted({*DEVICES} & {'cpu'}), indirect=True)         # numpy's sums may have another order
@pytest.mark.parametrize('sizes', [(4, 4, 4), (3, 1, 3), (1, 1, 64), (16, 16, 16), (9, 33, 20), (8, 3, 300), (20, 5, 7),
                                   (1, 15, 2), (1, 1, 1), (1, 1, 7), (1, 1, 1500)])
def test_a_product_in_a_batch_has_the_bits_of_a_single_one(sizes, device):
    """Also products of a row and a column, which run several at a time."""
    M, N, K = sizes
    rng, count = np.random.default_rng(0), 37 if M == N == 1 else 6
    a, b = rng.standard_normal((count, M, K), 'f'), rng.standard_normal((count, K, N), 'f')
    for view in (lambda x: x, lambda x: x.mT.copy().mT, lambda x: x[:, ::-1, ::-1].copy()[:, ::-1, ::-1]):
        x, y = (view(array(part)) for part in (a, b))
        together = (x @ y).numpy()
        for i in range(count):
            assert together[i].tobytes() == (x[i] @ y[i]).numpy().tobytes(), i
        pairs = x[:36].reshape(2, 18, M, K) @ y[:36].reshape(18, 2, K, N).swapaxes(0, 1) if count == 37 else None
        for i, j in itertools.product(range(2), range(18)) if pairs is not None else ():
            assert pairs[i, j].numpy().tobytes() == (x[18 * i + j] @ y[2 * j + i]).numpy().tobytes(), (i, j)
        assert (x[0] @ y).numpy().tobytes() == np.stack([(x[0] @ one).numpy() for one in y]).tobytes()


@pytest.mark.parametrize('device', sorted({*DEVICES} & {'cpu'}), indirect=True)         # the oracle has no kernels to record
def test_a_plan_records_an_operation_that_ran_before(device):
    x = np.ones((3, 4), 'f')

    def compute(a):
        y = ((a + a) * 2 - a.sum(0)).exp()
        y += a
        return ndarray.where(y > 3, y, 0.0) @ a.T
    want = compute(from_numpy(x)).numpy()
    with Plan(x=x) as plan:
        y = compute(from_numpy(x))
    x[...] = 0.5
    plan.run()
    assert not np.array_equal(y.numpy(), want) and len(plan.actions) >= 7
    np.testing.assert_allclose(y.numpy(), compute(from_numpy(x)).numpy(), rtol=1e-6)
