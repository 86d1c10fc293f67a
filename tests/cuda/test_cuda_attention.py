"""Attention in bfloat16 by wgmma (cuda/attention_hopper.cu), and of bfloat16 arrays by mma.sync (cuda/attention.cu), on the
emulator, against float64 with the same operands."""
import numpy as np
import pytest
from emulated import BF16, FP32, LIBRARY, call, library

from bench.gpu_attention import FLOAT, TINY, UNIT, reference
from bench.gpu_products import rounded
from pyops.ops.attention import dropout_factors, visible

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason='make emulated')

BY_SIZE, MMA, WGMMA = range(3)                          # of pyops_set_attention
STEP, KEY = 7, 11


@pytest.fixture(autouse=True)
def in_bf16():
    library().pyops_set_precision(BF16)
    yield
    library().pyops_set_precision(FP32)
    library().pyops_set_attention(BY_SIZE)


def aligned(*shape):
    """An array of NaN at a multiple of 16 bytes."""
    count = int(np.prod(shape))
    memory = np.full(count + 4, np.nan, np.float32)
    return memory[-memory.ctypes.data % 16 // 4:][:count].reshape(shape)


class Call:
    """Random inputs, and the results of forward and backward.  columns: q, k, v are columns of one array, as are dq, dk, dv."""

    def __init__(self, Tq, Tk, B, heads, C, causal=False, lengths=None, p=0.0, columns=False):
        self.sizes, self.causal, self.p = (Tq, Tk, B, heads, C), causal, p
        rng, D = np.random.default_rng([Tq, Tk, C]), heads * C
        self.offsets = None, None                       # of packed rows: set by pack()
        self.lengths = None if lengths is None else np.array(lengths, np.int32)
        if columns:
            self.q, self.k, self.v = np.split(aligned(Tq, B, 3 * D), 3, -1)
            self.grads = np.split(aligned(Tq, B, 3 * D), 3, -1)
        else:
            self.q, self.k, self.v = (aligned(T, B, D) for T in (Tq, Tk, Tk))
            self.grads = [aligned(T, B, D) for T in (Tq, Tk, Tk)]
        self.y, self.dy, self.stats = aligned(Tq, B, D), aligned(Tq, B, D), np.full((2, B, heads, Tq), np.nan, np.float32)
        for x in (self.q, self.k, self.v, self.dy):
            x[...] = rng.standard_normal(x.shape)
        self.step = np.array([STEP]) if p else None

    def pack(self, queries, keys):
        """Return a call of the first queries[b] queries and keys[b] keys of each sequence, in packed rows."""
        made = Call(*self.sizes, self.causal, p=self.p)
        made.offsets = tuple(np.array([0, *np.cumsum(counts)], np.int32) for counts in (queries, keys))
        for name, counts in dict(q=queries, dy=queries, k=keys, v=keys).items():
            rows = [getattr(self, name)[:count, b] for b, count in enumerate(counts)]
            packed = aligned(sum(counts) + 1, 1, rows[0].shape[-1])                     # the last row stays NaN
            packed[:-1, 0] = np.concatenate(rows)
            setattr(made, name, packed)
        made.y, made.grads = (np.full_like(made.q, 7.0), [np.full_like(x, 7.0) for x in (made.q, made.k, made.v)])
        return made

    def forward(self, which=WGMMA):
        library().pyops_set_attention(which)
        call('attention_forward', self.y, self.stats, self.q, self.k, self.v, self.lengths, *self.offsets, self.step,
             *self.sizes, self.q.strides[1] // 4, self.k.strides[1] // 4, self.causal, self.p, KEY)
        return self.y.copy()

    def backward(self, which=WGMMA):
        library().pyops_set_attention(which)
        distances = [x.strides[1] // 4 for x in (self.q, self.k, self.grads[0], self.grads[1])]
        call('attention_backward', *self.grads, self.dy, self.q, self.k, self.v, self.lengths, *self.offsets, self.step,
             self.y, self.stats, *self.sizes, *distances, self.causal, self.p, KEY)
        return [x.copy() for x in self.grads]

    def check(self):
        """Compare y, stats, dq, dk, dv of every head with float64 results of the rounded operands."""
        Tq, Tk, B, heads, C = self.sizes
        seen = visible(Tq, Tk, np.full(B, Tk) if self.lengths is None else self.lengths, self.causal).sum(-1)   # (B, 1, Tq)
        factors = dropout_factors(B, heads, Tq, Tk, self.p, STEP, KEY) if self.p else None
        for b, h in np.ndindex(B, heads):
            columns = slice(h * C, h * C + C)
            given = [x[:, b, columns] for x in (self.q, self.k, self.v, self.dy)]
            made, *stats = reference(*given, seen[b, 0], None if factors is None else factors[b, h])
            for (name, (value, bound)), found in zip(made.items(), [self.y, *self.grads], strict=True):
                found = found[:, b, columns]
                beyond = np.abs(found - value) - bound
                assert (beyond <= TINY).all(), f'{name}: an error is {beyond.max():.3g} larger than its bound'
                assert not found[bound == 0].any(), f'{name}: not 0 where nothing is seen'
            for found, want in zip(self.stats[:, b, h], stats, strict=True):
                assert np.allclose(found, want, rtol=FLOAT, atol=FLOAT)


@pytest.mark.parametrize('C', [32, 64, 128])
@pytest.mark.parametrize('Tq,Tk,causal', [(128, 128, False), (130, 200, False), (129, 129, True), (70, 300, True),
                                          (300, 70, True), (1, 1, False), (3, 257, False)])
def test_wgmma_attention_has_the_results_of_float64(Tq, Tk, C, causal):
    attention = Call(Tq, Tk, 2, 2, C, causal)
    attention.forward()
    attention.backward()
    attention.check()


@pytest.mark.parametrize('shift', [-65, -64, -63, -2, -1, 1, 2, 62, 63, 64, 65])
def test_wgmma_attention_has_its_diagonal_anywhere_in_a_tile(shift):
    attention = Call(199 - min(shift, 0), 199 + max(shift, 0), 1, 1, 32, True)
    attention.forward()
    attention.backward()
    attention.check()


@pytest.mark.parametrize('C,causal', [(32, True), (64, False), (128, True)])
def test_wgmma_attention_drops_the_weights_of_the_definition(C, causal):
    attention = Call(150, 171, 1, 2, C, causal, p=0.3)
    attention.forward()
    attention.backward()
    attention.check()


@pytest.mark.parametrize('T', [140, 520], ids=['float32 rows', 'converted rows'])
@pytest.mark.parametrize('causal', [False, True])
def test_wgmma_attention_reads_nothing_beyond_a_length(T, causal):
    attention = Call(T, T, 5, 1, 64, causal, [T, 0, 1, 65, 128], 0.1)
    for b, length in enumerate(attention.lengths):
        attention.k[length:, b] = attention.v[length:, b] = np.nan
    attention.forward()
    attention.backward()
    for b, length in enumerate(attention.lengths):
        attention.k[length:, b] = attention.v[length:, b] = 0
    attention.check()


def test_wgmma_attention_takes_columns_of_one_array():
    attention, alone = Call(130, 130, 2, 2, 64, True, columns=True), Call(130, 130, 2, 2, 64, True)
    for name in 'q', 'k', 'v', 'dy':
        getattr(alone, name)[...] = getattr(attention, name)
    assert (attention.forward() == alone.forward()).all()
    for ours, theirs in zip(attention.backward(), alone.backward(), strict=True):
        assert (ours == theirs).all()
    attention.check()


def test_wgmma_attention_has_the_same_bits_twice_and_in_every_batch():
    attention = Call(200, 190, 3, 2, 64, True, [190, 60, 133])
    first = [attention.forward(), *attention.backward()]
    assert all((a == b).all() for a, b in zip(first, [attention.forward(), *attention.backward()], strict=True))
    for b in range(3):
        alone = Call(200, 190, 1, 2, 64, True, attention.lengths[b:b + 1])
        for name in 'q', 'k', 'v', 'dy':
            getattr(alone, name)[...] = getattr(attention, name)[:, b:b + 1]
        for ours, theirs in zip(first, [alone.forward(), *alone.backward()], strict=True):
            assert (ours[:, b:b + 1] == theirs).all()


@pytest.mark.parametrize('T', [512, 256], ids=['forward', 'backward'])
def test_converted_rows_give_the_bits_of_rows_that_are_rounded_while_they_are_copied(T):
    """From T queries on, the rows are converted in advance.  One query less changes no bit of the others."""
    converted, copied = Call(T, 530, 1, 1, 64), Call(T - 1, 530, 1, 1, 64)
    for name in 'q', 'k', 'v', 'dy':
        getattr(copied, name)[...] = getattr(converted, name)[:len(getattr(copied, name))]
    assert (converted.forward()[:-1] == copied.forward()).all()
    assert (converted.backward()[0][:-1] == copied.backward()[0]).all()


def test_heads_that_do_not_fit_in_the_workspace_together_are_converted_in_parts():
    attention = Call(512, 8192, 1, 16, 128, lengths=[70])
    attention.forward()
    attention.backward()
    for gradient in attention.grads[1:]:
        assert not gradient[70:].any()
    short = Call(512, 70, 1, 16, 128)
    for name in 'q', 'k', 'v', 'y', 'dy':
        rows = getattr(short, name)
        rows[...] = getattr(attention, name)[:len(rows)]
    short.stats, short.grads = attention.stats, [attention.grads[0], *(gradient[:70] for gradient in attention.grads[1:])]
    short.check()


@pytest.mark.parametrize('C', [32, 64, 128])
def test_packed_rows_have_the_bits_of_padded_ones(C):
    """Also with dropout: the mask depends on the longest length of a call, not on the others."""
    queries, keys = [140, 3, 0, 129, 5, 0], [200, 1, 70, 128, 0, 0]
    padded = Call(150, 210, 6, 2, C, lengths=keys, p=0.2)
    for b, count in enumerate(queries):
        padded.dy[count:, b] = 0
    packed = padded.pack(queries, keys)
    want, found = [padded.forward(), *padded.backward()], [packed.forward(), *packed.backward()]
    for ours, theirs, counts in zip(found, want, [queries, queries, keys, keys], strict=True):
        assert (ours[:-1, 0] == np.concatenate([theirs[:count, b] for b, count in enumerate(counts)])).all()
        assert (ours[-1] == 7).all(), 'wrote beyond the rows'
    for b, count in enumerate(queries):
        assert (packed.stats[:, b, :, :count] == padded.stats[:, b, :, :count]).all()
        assert np.isnan(packed.stats[:, b, :, count:]).all()


def test_each_packed_sentence_has_the_bits_of_a_call_of_its_own_and_its_own_diagonal():
    queries, keys = [140, 3, 129, 70], [200, 130, 128, 1]
    padded = Call(150, 210, 4, 2, 64, True)
    packed = padded.pack(queries, keys)
    results = [packed.forward(), *packed.backward()]
    for b in range(4):
        alone = Call(queries[b], keys[b], 1, 2, 64, True)
        for name in 'q', 'k', 'v', 'dy':
            getattr(alone, name)[...] = getattr(padded, name)[:len(getattr(alone, name)), b:b + 1]
        for ours, theirs, offsets in zip(results, [alone.forward(), *alone.backward()], [0, 0, 1, 1], strict=True):
            first = packed.offsets[offsets][b]
            assert (ours[first:first + len(theirs)] == theirs).all()


def test_offsets_out_of_order_are_reported_by_wgmma_attention():
    for queries, keys, message in (([3, 151], [1, 1], r'q_offsets\[2\] - q_offsets\[1\]=151, expected 0 to 150'),
                                   ([3, 3], [-1, 1], r'k_offsets\[1\] - k_offsets\[0\]=-1, expected 0 to 150')):
        attention = Call(150, 150, 2, 1, 64).pack([150, 150], [150, 150])
        attention.offsets = tuple(np.array([0, *np.cumsum(counts)], np.int32) for counts in (queries, keys))
        attention.forward()
        with pytest.raises(ValueError, match=f'attention_forward: {message}'):
            call('stream_synchronize')


class Halves:
    """A call whose activations are bfloat16 arrays, with the numbers of another call, which must be bfloat16 numbers."""

    def __init__(self, other):
        self.other = other
        self.arrays = {name: self.halves(getattr(other, name)) for name in ('q', 'k', 'v', 'dy')}

    @staticmethod
    def halves(x):
        memory = np.zeros(x.size + 8, np.uint16)
        array = memory[-memory.ctypes.data % 16 // 2:][:x.size].reshape(x.shape)
        array[...] = np.ascontiguousarray(x).view(np.uint32) >> 16
        return array

    @staticmethod
    def floats(array):
        return (array.astype(np.uint32) << 16).view(np.float32)

    def run(self, which):
        """Return y, dq, dk, dv as floats."""
        other, mark = self.other, 1 << 63               # of the address of a bfloat16 array: see `real` in pyops.h
        library().pyops_set_attention(which)
        given = {name: mark + x.ctypes.data for name, x in self.arrays.items()}
        y, *grads = (np.zeros_like(self.arrays[name]) for name in ('q', 'q', 'k', 'v'))
        D = self.arrays['q'].shape[-1]
        call('attention_forward', mark + y.ctypes.data, other.stats, given['q'], given['k'], given['v'], other.lengths,
             *other.offsets, other.step, *other.sizes, D, D, other.causal, other.p, KEY)
        call('attention_backward', *(mark + x.ctypes.data for x in grads), given['dy'], given['q'], given['k'], given['v'],
             other.lengths, *other.offsets, other.step, mark + y.ctypes.data, other.stats, *other.sizes, D, D, D, D,
             other.causal, other.p, KEY)
        return [self.floats(x) for x in (y, *grads)]


@pytest.mark.parametrize('C', [32, 64, 128])
@pytest.mark.parametrize('precision', [FP32, BF16], ids=['fp32', 'bf16'])
def test_wgmma_attention_reads_and_writes_bfloat16_arrays(C, precision):
    """y and dv have the bits of a call with float32 arrays, rounded once.  dq and dk depend on the rounded y."""
    library().pyops_set_precision(precision)            # bfloat16 arrays are multiplied in bfloat16 with any precision
    attention = Call(150, 171, 2, 2, C, True, [171, 60], p=0.2)
    for name in 'q', 'k', 'v', 'dy':
        getattr(attention, name)[...] = rounded(getattr(attention, name), 'bf16')
    y, *found = Halves(attention).run(WGMMA)
    library().pyops_set_precision(BF16)
    assert (y == rounded(attention.forward(), 'bf16')).all()
    attention.y[...] = y
    for ours, theirs in zip(found, attention.backward(), strict=True):
        assert (ours == rounded(theirs, 'bf16')).all()


def test_wgmma_attention_of_packed_bfloat16_rows():
    queries, keys = [140, 3, 0, 129], [200, 1, 70, 128]
    packed = Call(150, 210, 4, 2, 64).pack(queries, keys)
    for name in 'q', 'k', 'v', 'dy':
        getattr(packed, name)[...] = rounded(getattr(packed, name), 'bf16')
    y, *found = Halves(packed).run(WGMMA)
    assert (y[:-1] == rounded(packed.forward()[:-1], 'bf16')).all()
    packed.y[...] = y
    for ours, theirs in zip(found, packed.backward(), strict=True):
        assert (ours[:-1] == rounded(theirs[:-1], 'bf16')).all() and not ours[-1].any()


def of_halves_and_floats(attention):
    """Return y, dq, dk, dv of bfloat16 arrays, and of float32 arrays with the same numbers, rounded once.

    mma.sync gets the same operands in both, from tiles of bfloat16 and from tiles of floats that are rounded in registers.
    """
    for name in 'q', 'k', 'v', 'dy':
        getattr(attention, name)[...] = rounded(getattr(attention, name), 'bf16')
    halves = Halves(attention).run(MMA)
    y = attention.forward(MMA)
    attention.y[...] = halves[0]                        # several tiles of keys: dq and dk depend on the y that was stored
    floats = [y, *attention.backward(MMA)]
    attention.y[...] = y
    return halves, [rounded(x, 'bf16') for x in floats]


@pytest.mark.parametrize('Tq,Tk,C,causal,p', [
    (9, 9, 64, True, 0.2), (16, 16, 32, False, 0.0), (3, 14, 20, False, 0.3), (17, 17, 64, True, 0.0), (33, 64, 64, False, 0.2),
    (64, 64, 40, True, 0.1), (70, 30, 64, False, 0.0), (65, 127, 64, True, 0.2), (127, 127, 32, False, 0.1),
    (100, 90, 20, True, 0.0), (20, 70, 72, True, 0.1), (127, 65, 136, False, 0.0)])
def test_tiles_of_bfloat16_give_the_bits_of_rounded_tiles_of_floats(Tq, Tk, C, causal, p):
    attention = Call(Tq, Tk, 2, 2, C, causal, [Tk, Tk // 2], p)
    for ours, theirs in zip(*of_halves_and_floats(attention), strict=True):
        assert (ours == theirs).all()
    attention.backward(MMA)
    attention.check()


def test_tiles_of_bfloat16_read_nothing_beyond_a_length():
    attention = Call(60, 60, 4, 2, 64, True, [60, 0, 1, 33], 0.1)
    results = []
    for value in (np.nan, 0):
        for b, length in enumerate(attention.lengths):
            attention.k[length:, b] = attention.v[length:, b] = value
        results.append(Halves(attention).run(MMA))
    assert all((ours == theirs).all() for ours, theirs in zip(*results, strict=True))       # NaN equals nothing


@pytest.mark.parametrize('longest', [15, 40, 100])
def test_packed_rows_in_tiles_of_bfloat16(longest):
    queries, keys = [longest, 3, 0, longest - 6], [longest - 2, 1, 7, longest]
    packed = Call(longest, longest, 4, 2, 64, p=0.2).pack(queries, keys)
    for ours, theirs in zip(*of_halves_and_floats(packed), strict=True):
        assert (ours[:-1] == theirs[:-1]).all() and not ours[-1].any()


def test_forward_and_backward_of_attention_may_use_different_kernels():
    for first, second in ((WGMMA, MMA), (MMA, WGMMA)):
        attention = Call(140, 150, 2, 1, 64, True, p=0.1)
        attention.forward(first)
        attention.backward(second)
        attention.check()


def test_large_scores_have_the_weights_of_their_differences_in_wgmma_attention():
    """Scores near 10,000 whose differences are a few units: the weights depend on the differences."""
    attention = Call(128, 128, 1, 1, 64)
    attention.q[...], attention.k[...] = 0, 0
    attention.q[..., 0], attention.k[..., 0] = 256, 312                 # 256 * 312 / 8 = 9984
    attention.q[..., 1], attention.k[:, 0, 1] = 8, np.arange(128) % 4   # + 0 to 3
    attention.forward()
    attention.backward()
    weights = np.exp(np.arange(128) % 4.0)
    values = rounded(attention.v[:, 0], 'bf16').astype(np.float64)
    want, size = weights @ values / weights.sum(), weights @ np.abs(values) / weights.sum()
    assert (np.abs(attention.y[:, 0] - want) <= 2 * UNIT * size).all()
    assert (attention.stats[0] == 9987).all()
    dv = np.outer(weights / weights.sum(), rounded(attention.dy[:, 0], 'bf16').astype(np.float64).sum(0))
    bound = np.outer(weights / weights.sum(), np.abs(attention.dy[:, 0]).sum(0))
    assert (np.abs(attention.grads[2][:, 0] - dv) <= 2 * UNIT * bound).all()


def test_wgmma_attention_passes_nan_on():
    for name in 'q', 'k', 'v':
        attention = Call(130, 130, 1, 2, 64)
        getattr(attention, name)[5, 0, 3] = np.nan
        y = attention.forward()
        assert np.isnan(y[5, 0, :64]).any() and not np.isnan(y[..., 64:]).any()
        if name == 'q':
            assert not np.isnan(np.delete(y, 5, 0)).any()


def test_sizes_choose_the_kernels_of_attention():
    for T, chosen, other in ((128, WGMMA, MMA), (127, MMA, WGMMA)):
        attention = Call(T, T, 1, 1, 64, p=0.2)
        y = attention.forward(BY_SIZE)
        assert (y == attention.forward(chosen)).all() and (y != attention.forward(other)).any()
    library().pyops_set_precision(FP32)
    attention = Call(128, 128, 1, 1, 64)
    assert (attention.forward(BY_SIZE) == attention.forward(MMA)).all()
    assert (attention.forward(WGMMA) == attention.forward(MMA)).all(), 'wgmma rounds operands: only in bfloat16'


def test_heads_and_rows_that_wgmma_does_not_support_take_the_other_kernels():
    for C in (48, 66, 256):
        attention = Call(130, 130, 1, 1, C)
        assert (attention.forward(WGMMA) == attention.forward(MMA)).all()
    attention = Call(130, 130, 1, 1, 64)
    attention.q = np.full((130, 1, 65), 0.5, np.float32)[..., 1:]
    assert (attention.forward(WGMMA) == attention.forward(MMA)).all()


def test_a_length_beyond_the_keys_is_reported_by_wgmma_attention():
    attention = Call(130, 130, 2, 1, 64, lengths=[3, 131])
    attention.forward()
    with pytest.raises(ValueError, match=r'attention_forward: lengths\[1\]=131, expected 0 to 130'):
        call('stream_synchronize')


def test_kernels_of_attention_that_do_not_exist_are_refused():
    assert library().pyops_set_attention(3)
    assert library().pyops_last_error() == b'set_attention: kernels=3, expected 0 (by size), 1 (mma.sync) or 2 (wgmma)'
