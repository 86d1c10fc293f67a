"""Random chains of views, slices, broadcasts, assignments, arithmetic and reductions, on NDArray and numpy side by side.

A chain is a list of numbers, from which each step draws what it does; so hypothesis can make a failing chain short.  Both
sides keep all their arrays, and every one is compared after every write: a view that should have been a copy, or the other
way round, shows.  PYOPS_CHAINS says how many chains to run on each device (2000).
"""
import os
import random

import numpy as np
import pytest
from places import devices

pytest.importorskip('hypothesis', reason='hypothesis is not installed: pip install hypothesis')
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from pyops.ndarray import NDArray, array, concatenate, from_numpy, pad, stack  # noqa: E402

CHAINS = int(os.environ.get('PYOPS_CHAINS') or 2000)
SIZES = (0, 1, 1, 2, 3, 3, 4, 5, 17)
EXACT = 2**11           # whole numbers up to here have sums and products that float32 holds


class Pair:
    """An array on both sides."""

    def __init__(self, ours, theirs):
        self.ours, self.theirs = ours, theirs

    def check(self, story):
        theirs, ours = self.theirs, self.ours
        assert isinstance(ours, NDArray) and ours.shape == theirs.shape and ours.dtype == theirs.dtype, story
        got = ours.numpy()
        assert ((got == theirs) | ((got != got) & (theirs != theirs))).all(), (story, got, theirs)


def made(ours, theirs):
    """A Pair of a new array; ours are always compact, numpy's may lie in another order.

    A mask is turned into numbers: masks have an arithmetic of their own, which test_ndarray.py compares with numpy's.
    """
    return Pair(ours.astype(theirs.dtype) if ours.is_mask else ours, np.array(theirs, order='C'))


def shape(r, axes=4, elements=400):
    while True:
        found = tuple(r.choice(SIZES) for _ in range(r.randrange(axes + 1)))
        if np.prod(found) <= elements:
            return found


def fresh(r, device, of=None, dtype=None):
    """New numbers, in memory of any layout."""
    of = shape(r) if of is None else of
    dtype = dtype or r.choice(('float32', 'int32'))
    x = np.random.default_rng(r.randrange(2**32)).integers(-9, 10, of).astype(dtype)
    if dtype == 'float32' and x.size and r.random() < 0.1:
        x.reshape(-1)[r.randrange(x.size)] = r.choice((np.nan, np.inf, -np.inf, -0.0))
    how = r.randrange(4)
    if how == 0:
        return Pair(array(x, device=device), x)
    if how == 1:
        x = np.array(x, order='F')
    elif how == 2 and x.ndim:
        x = np.repeat(x, 2, -1)[..., ::2]
    elif x.ndim:
        x = np.flip(np.flip(x).copy())
    return Pair(from_numpy(twin(x), device), x)


def twin(x):
    """A copy with the same strides, in memory of its own."""
    if not x.size:
        return x.copy()
    back = sum((n - 1) * -step for n, step in zip(x.shape, x.strides, strict=True) if step < 0)
    y = np.ndarray(x.shape, x.dtype, np.zeros(8 * x.size, np.uint8), back, x.strides)
    y[...] = x
    return y


def flip(x, axes=None):
    """numpy's makes a number of a single element; here it stays a view."""
    return np.flip(x, axes) if x.ndim else x


def index(r, of):
    """A random index: integers, slices with any step, at times Ellipsis and None."""
    items = []
    for n in of[:r.randrange(len(of) + 1)]:
        if n and r.random() < 0.3:
            items.append(r.randrange(-n, n))
        else:
            bound = [None, *range(-n - 2, n + 3)]
            items.append(slice(r.choice(bound), r.choice(bound), r.choice((None, 1, 2, 3, -1, -2))))
    if r.random() < 0.2:
        items.insert(r.randrange(len(items) + 1), None)
    if r.random() < 0.3:
        # what stands behind it belongs to the last axes
        place = r.randrange(len(items) + 1)
        if all(item is None for item in items[place:]):
            items.insert(place, Ellipsis)
    return tuple(items)


def at(x, where):
    """x[where], of a single element too as a view."""
    return x[where if Ellipsis in where else (*where, Ellipsis)]


def axes(r, ndim):
    return None if r.random() < 0.3 else tuple(r.sample(range(ndim), r.randrange(ndim + 1)))


def small(x):
    """Whether sums of products of these numbers are exact."""
    return bool(np.isfinite(x).all() and (np.abs(x.astype('d')) <= EXACT / 64).all() and (x == np.trunc(x)).all())


def promoted(*arrays):
    """numpy's operands in our dtypes."""
    return arrays if len({a.dtype for a in arrays}) == 1 else tuple(a.astype('float32') for a in arrays)


# ---- steps: (random, pool of Pairs, device) -> a new Pair, or None after a write --------------------------------------------

def view_step(r, pool, device):
    a = r.choice(pool)
    ours, theirs = a.ours, a.theirs
    how = r.randrange(6)
    if how == 0:
        order = r.sample(range(theirs.ndim), theirs.ndim)
        return Pair(ours.permute(order), theirs.transpose(order))
    if how == 1:
        flipped = axes(r, theirs.ndim)
        return Pair(ours.flip(flipped), flip(theirs, flipped))
    if how == 2 and theirs.size:
        parts, rest = [], theirs.size
        while rest > 1 and len(parts) < 5:
            parts.append(r.choice([n for n in range(1, rest + 1) if rest % n == 0]))
            rest //= parts[-1]
        to = tuple(parts + [rest])
        return Pair(ours.reshape(to), theirs.reshape(to))
    if how == 3 and theirs.ndim < 5:
        to = tuple(r.choice((1, 2, 3)) for _ in range(r.randrange(2))) + tuple(
            r.choice((1, 3, 4)) if n == 1 else n for n in theirs.shape)
        if np.prod(to) <= 2000:
            # numpy's is read-only; ours refuses to be written to
            return Pair(ours.broadcast_to(to), np.broadcast_to(theirs, to))
    where = index(r, theirs.shape)
    return Pair(ours[where], at(theirs, where))


def writable(a):
    return a.theirs.flags.writeable


def assign_step(r, pool, device):
    a = r.choice(pool)
    where = index(r, a.theirs.shape)
    target = at(a.theirs, where)
    if not writable(a):
        if target.size > 1 and 0 in target.strides and any(n > 1 and not s for n, s in zip(target.shape, target.strides,
                                                                                            strict=True)):
            with pytest.raises(ValueError, match='broadcast view'):
                a.ours[where] = 1
        return None
    how, value = r.randrange(3), r.choice((0, 5, -3))
    if how == 0:
        a.ours[where] = value
        target[...] = value
        return None
    b = r.choice(pool) if how == 1 else None
    if b is None or np.issubdtype(a.theirs.dtype, np.integer) and b.theirs.dtype.kind == 'f' and not small(b.theirs):
        b = fresh(r, device, target.shape[r.randrange(target.ndim + 1):], str(target.dtype))
    try:
        target[...] = b.theirs
    except ValueError:
        with pytest.raises(ValueError, match='could not broadcast'):
            a.ours[where] = b.ours
        return None
    a.ours[where] = b.ours
    return None


BINARY = {'add': '__add__', 'subtract': '__sub__', 'multiply': '__mul__', 'maximum': 'maximum', 'minimum': 'minimum',
          'equal': '__eq__', 'less': '__lt__', 'greater_equal': '__ge__', 'divide': '__truediv__'}


def other_operand(r, pool, device, a):
    if r.random() < 0.4:
        return r.choice(pool)
    of = a.theirs.shape[r.randrange(a.theirs.ndim + 1):]
    return fresh(r, device, tuple(1 if r.random() < 0.3 else n for n in of))


def binary_step(r, pool, device):
    a = r.choice(pool)
    b = other_operand(r, pool, device, a)
    name = r.choice(tuple(BINARY))
    x, z = promoted(a.theirs, b.theirs)
    if name == 'divide':
        x, z = x.astype('f'), z.astype('f')
    with np.errstate(all='ignore'):
        try:
            want = np.asarray(getattr(np, name)(x, z))
        except ValueError:
            with pytest.raises(ValueError, match='could not be broadcast'):
                getattr(a.ours, BINARY[name])(b.ours)
            return None
    if want.size > 5000 or want.ndim > 7:
        return None
    return made(getattr(a.ours, BINARY[name])(b.ours), want.astype(x.dtype))


def scalar_step(r, pool, device):
    a, name, value = r.choice(pool), r.choice(tuple(BINARY)), r.choice((2, -1, 0, 0.5))
    x = a.theirs.astype('f') if name == 'divide' or isinstance(value, float) else a.theirs
    with np.errstate(all='ignore'):
        return made(getattr(a.ours, BINARY[name])(value), np.asarray(getattr(np, name)(x, x.dtype.type(value)), x.dtype))


def unary_step(r, pool, device):
    a = r.choice(pool)
    how = r.randrange(4)
    if how == 0:
        return made(-a.ours, -a.theirs)
    if how == 1:
        return made(abs(a.ours), abs(a.theirs))
    if how == 2:
        with np.errstate(all='ignore'):
            return made(a.ours.sqrt(), np.sqrt(a.theirs.astype('f')))
    if a.theirs.dtype == 'int32' or small(a.theirs):
        dtype = 'float32' if a.theirs.dtype == 'int32' else 'int32'
        return made(a.ours.astype(dtype), a.theirs.astype(dtype))
    return made(a.ours.copy(), a.theirs.copy())


def in_place_step(r, pool, device):
    a = r.choice(pool)
    b, name = other_operand(r, pool, device, a), r.choice(('add', 'subtract', 'multiply'))
    if not writable(a) or a.theirs.dtype == 'int32' and b.theirs.dtype == 'float32':
        return None
    act = getattr(a.ours, BINARY[name].replace('__', '__i', 1))
    with np.errstate(all='ignore'):
        try:
            getattr(np, name)(a.theirs, b.theirs.astype(a.theirs.dtype), out=a.theirs)
        except ValueError:
            with pytest.raises(ValueError, match='broadcast'):
                act(b.ours)
            return None
    act(b.ours)
    return None


def overlap_step(r, pool, device):
    """Source and destination in the same memory."""
    a = r.choice(pool)
    if not writable(a) or not a.theirs.size:
        return None
    shifted, order = r.randrange(2), r.sample(range(a.theirs.ndim), a.theirs.ndim)
    ours, theirs = a.ours, a.theirs
    if a.theirs.ndim and r.random() < 0.7:              # a part that begins one further, from one that ends one earlier
        cut = [(slice(1, None), slice(None, -1))[:: r.choice((1, -1))] for _ in range(r.randrange(1, a.theirs.ndim + 1))]
        to, source = (tuple(one[side] for one in cut) for side in (0, 1))
    else:
        to, source = (), ()
    flipped = [d for d in range(a.theirs.ndim) if r.random() < 0.3]
    x, z = ours[to], ours[source].flip(tuple(flipped))
    want, other = at(theirs, to), flip(at(theirs, source), tuple(flipped))
    if len({want.shape[d] for d in range(want.ndim)}) == 1:
        z, other = z.permute(order), other.transpose(order)
    if shifted:
        x += z
        np.add(want, other, out=want)
    else:
        x[...] = z
        want[...] = other
    return None


def reduce_step(r, pool, device):
    a = r.choice(pool)
    over, keepdims, name = axes(r, a.theirs.ndim), r.random() < 0.5, r.choice(('sum', 'max', 'min', 'argmax'))
    if name == 'argmax':
        over = None if not a.theirs.ndim or r.random() < 0.3 else r.randrange(-a.theirs.ndim, a.theirs.ndim)
    elif name == 'sum' and a.theirs.dtype == 'float32' and not small(a.theirs):
        return None
    how = {'dtype': a.theirs.dtype} if name == 'sum' else {}
    try:
        want = getattr(a.theirs, name)(over, keepdims=keepdims, **how)
    except ValueError:
        with pytest.raises(ValueError, match='without elements'):
            getattr(a.ours, name)(over, keepdims)
        return None
    return made(getattr(a.ours, name)(over, keepdims), np.asarray(want).astype('int32' if name == 'argmax' else want.dtype))


def join_step(r, pool, device):
    a = r.choice(pool)
    how = r.randrange(4)
    if how == 0 and a.theirs.ndim:
        axis = r.randrange(-a.theirs.ndim, a.theirs.ndim)
        part = (slice(None),) * (axis % a.theirs.ndim) + (slice(r.randrange(3)),)
        return made(concatenate([a.ours, a.ours[part].flip()], axis), np.concatenate([a.theirs, np.flip(a.theirs[part])], axis))
    if how == 1 and a.theirs.ndim < 6:
        axis = r.randrange(-a.theirs.ndim - 1, a.theirs.ndim + 1)
        return made(stack([a.ours, -a.ours], axis), np.stack([a.theirs, -a.theirs], axis))
    if how == 2:
        widths = tuple((r.randrange(3), r.randrange(3)) for _ in a.theirs.shape)
        return made(pad(a.ours, widths, 2), np.pad(a.theirs, widths, constant_values=2) if widths else a.theirs.copy())
    if a.theirs.ndim and a.theirs.shape[0]:
        n = a.theirs.shape[0]
        ids = np.array([r.randrange(-n, n) for _ in range(r.randrange(4))], 'i')
        return made(a.ours[ids], a.theirs[ids])
    return None


def mask_step(r, pool, device):
    a = r.choice(pool)
    if not a.theirs.ndim:
        return None
    of, value = a.theirs[(...,) + (0,) * r.randrange(a.theirs.ndim)] if a.theirs.size else a.theirs, r.choice((-1, 0, 2))
    mask = of > value
    given = mask if r.random() < 0.3 else array(mask, device=device) if r.random() < 0.3 else array(
        of, a.theirs.dtype, device) > value
    return made(a.ours[given], a.theirs[mask])


def matmul_step(r, pool, device):
    a = r.choice([p for p in pool if small(p.theirs)] or [fresh(r, device, (3, 4), 'int32')])
    if not a.theirs.ndim or a.theirs.ndim > 4:
        return None
    b = fresh(r, device, (*a.theirs.shape[:-2][r.randrange(3):], a.theirs.shape[-1], r.choice((1, 2, 5))), 'int32')
    x, z = promoted(a.theirs, b.theirs)
    return made(a.ours @ b.ours, np.matmul(x, z))


STEPS = (view_step, view_step, view_step, assign_step, assign_step, overlap_step, binary_step, scalar_step, unary_step,
         in_place_step, reduce_step, reduce_step, join_step, mask_step, matmul_step)


def run_chain(seeds, device):
    pool, story = [fresh(random.Random(seeds[0]), device)], []
    for seed in seeds[1:]:
        r = random.Random(seed)
        if r.random() < 0.15:
            pool.append(fresh(r, device))
        step = r.choice(STEPS)
        story.append(step.__name__)
        new = step(r, pool, device)
        if new is None:
            for pair in pool:
                pair.check(story)
        elif new.theirs.size <= 5000 and new.theirs.ndim <= 6:
            new.check(story)
            pool.append(new)
    for pair in pool:
        pair.check(story)


@pytest.mark.filterwarnings('ignore::RuntimeWarning')
@pytest.mark.parametrize('device', devices())
def test_chains_end_as_numpys(device):
    device = devices()[device]()

    @settings(max_examples=CHAINS, derandomize=True, deadline=None, database=None,
              suppress_health_check=list(HealthCheck))
    @given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=16))
    def chain(seeds):
        run_chain(seeds, device)

    chain()
