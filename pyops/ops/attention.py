"""Attention: multi-head scaled dot-product attention, and the lengths of padded sequences."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import (
    REAL,
    as_float,
    axes,
    check,
    check_rows,
    empty,
    empty_gradient,
    gemm_batched,
    get,
    launch,
    note_product,
    permuted,
)
from pyops.backend.kernels import Kernel, Made, Product, declare
from pyops.ops.packed import Packed, lengths_of, packed, pad_rows, padded

if TYPE_CHECKING:
    from pyops.typing import Argument, Array, Example, Normal, Shape, Sizes

# product.operand, in the order of a training step: the operand names in a recipe (pyops/quantization.py)
OPERANDS = 'qk.q', 'qk.k', 'pv.p', 'pv.v', 'dp.do', 'dp.v', 'dv.p', 'dv.do', 'dq.ds', 'dq.k', 'dk.ds', 'dk.q'


class Attention:
    """Compute for each query the mean of the values, weighted by the softmax of the query's products with the keys.

    Shapes   q, dq, y, dy (Tq, B, D);  k, v, dk, dv (Tk, B, D);  D = heads * C, head h is columns [h*C, h*C + C)
             lengths (B,) int32 in [0, Tk], or None: all Tk keys are valid;  step (1,) int64 array, or None: no dropout
             q, k and v may be columns of larger arrays, k and v of arrays with equally many columns
             packed rows, without padding: with q_rows q, dq, y, dy are (N, D) and Tq is q_rows.longest; with k_rows k, dk,
             v, dv are (N, D), Tk is k_rows.longest and lengths is None
    Forward  for each sequence b and head h, with q, k, v (T, C) their slices for b and h:
             s[i, j] = q[i] . k[j] / sqrt(C)   for each key j visible to query i: j < lengths[b], and if causal j <= i + Tk - Tq
             (of packed rows, Tq and Tk are the numbers of queries and keys of sequence b)
             P[i] = softmax(s[i]) over these j;  W[i, j] = keep[i, j] / (1 - p) P[i, j];  y = W v
    Backward dsum[i] = dy[i] . y[i];  dS[i, j] = P[i, j] (keep[i, j] / (1 - p) dy[i] . v[j] - dsum[i])
             dq = dS k / sqrt(C);  dk = dS' q / sqrt(C);  dv = W' dy
    Saves    q, k, v, lengths, q_rows, k_rows, step, y, and stats (2, B, heads, Tq): the largest s[i, j], and the sum of
             exp(s[i, j] - largest) over j; backward recomputes P
    Errors   ValueError if D is not a multiple of heads, if not 0 <= p < 1, and for a length outside [0, Tk] or packed rows
             longer than `longest`, with the position; TypeError and ValueError naming the argument
    Source   Vaswani et al. 2017, arXiv:1706.03762; tiled: Dao et al. 2022, arXiv:2205.14135; docs/attention.md derives it
    Notes    a query with no visible key has y = 0 and passes no gradient back.  causal with Tq < Tk: the queries are the last
             Tq positions, as in incremental decoding.  keep is the mask of Dropout, different at each step; see pyops.h.
    """

    class Ctx(NamedTuple):
        q: Array
        k: Array
        v: Array
        lengths: Array | None
        q_rows: Packed | None
        k_rows: Packed | None
        step: Array | None
        y: Array
        stats: Array

    def __init__(self, heads: int, causal: bool = False, p: float = 0.0, key: int = 0, name: str = 'attention') -> None:
        self.heads, self.causal, self.p, self.key, self.name = heads, causal, p, key, name

    def forward(self, q: Array, k: Array, v: Array, lengths: Array | None = None, step: Array | None = None,
                q_rows: Packed | None = None, k_rows: Packed | None = None) -> tuple[Array, Ctx]:
        rows = self.check(q, k, v, lengths, step, q_rows, k_rows)
        sizes = Tq, _, B, *_ = self._sizes(q, k, q_rows, k_rows)
        y, stats = empty(q.shape, q.dtype, f'{self.name}.y'), empty((2, B, self.heads, Tq), name=f'{self.name}.stats')
        launch('attention_forward', y, stats, q, k, v, lengths, *offsets(q_rows, k_rows), step, *sizes, *rows,
               *self._settings())
        note_product(self, FORWARD, heads=self.heads)
        return y, self.Ctx(q, k, v, lengths, q_rows, k_rows, step, y, stats)

    def backward(self, dy: Array, ctx: Ctx, out: tuple[Array, Array, Array] | None = None) -> tuple[Array, Array, Array]:
        """Return dq, dk and dv.  out: the arrays to write them to, which may also be columns of larger arrays."""
        check('dy', dy, ctx.y.shape, ctx.y.dtype)
        q, k = ctx.q.shape, ctx.k.shape
        dq, dk, dv = self._gradients(q, k, dy.dtype) if out is None else out
        rows = *distances('', q, k, ctx.q, ctx.k, ctx.v), *distances('d', q, k, dq, dk, dv)
        launch('attention_backward', dq, dk, dv, dy, ctx.q, ctx.k, ctx.v, ctx.lengths, *offsets(ctx.q_rows, ctx.k_rows),
               ctx.step, ctx.y, ctx.stats, *self._sizes(ctx.q, ctx.k, ctx.q_rows, ctx.k_rows), *rows, *self._settings())
        note_product(self, BACKWARD)
        return dq, dk, dv

    def step(self, q: Array, k: Array, v: Array, tokens: int = 0, index: Array | None = None,
             rows: Packed | None = None, causal: bool = False, positions: Array | None = None) -> Array:
        """Return y (R, D) for a query of each hypothesis, q (R, D), without dropout; for inference on the CPU.

        rows: the keys and values k, v (N, D) are packed, and hypothesis r attends to sequence b = r % sentences, or with
        index (B,) int32 to sequence index[r % B]
        None: k, v are (T, W, D), W >= R, and hypothesis r attends to the first `tokens` tokens: row index[s, r] of token s if
        index (M, R) int32 has one, else row r.   follow_parents() returns an index
        positions (R,) int32: the numbers of tokens differ: hypothesis r attends to the tokens s up to positions[r] < tokens,
        each row index[s, r] of k and v as (T * W, D);  index (T, W) int32
        causal: W is 1, and the queries are the last R of `tokens` tokens of one hypothesis: each attends to the tokens up to
        its own, with the same bits as a step for it
        q, k and v may be columns of larger arrays, k and v of arrays with equally many columns.
        """
        R, D = axes('q', q, 'R D')
        between = distances('', q.shape, k.shape, q, k, v)
        C = D // self.heads
        if k.shape[-1] != D or k.ndim != (3 if rows is None else 2):
            raise ValueError(f'k: expected shape {("T", "W", D) if rows is None else ("N", D)}, got {k.shape}')
        shape: tuple[int, ...]
        if rows is not None:
            B, offsets = rows.sentences if index is None else len(index), rows.offsets
            sizes, shape = (rows.longest, 0, rows.sentences, B), (B,)
        elif 1 <= tokens <= len(k):
            M, offsets = 0 if index is None else len(index), None
            sizes, shape = (tokens, M, k.shape[1], 0), (M, R if positions is None else k.shape[1])
        else:
            raise ValueError(f'tokens: expected 1 to {len(k)}, got {tokens}')
        if index is not None:
            check('index', index, shape, np.int32)
        if positions is not None:
            check('positions', positions, (R,), np.int32)
        y = empty((R, D), name=f'{self.name}.y')
        launch('attention_step', y, q, k, v, index, offsets, positions, R, *sizes, self.heads, C, *between, causal)
        return y

    def weights(self, ctx: Ctx) -> Array:
        """Return the softmax before dropout, (B, heads, Tq, Tk), of a forward pass; 0 for masked keys and missing queries."""
        names = zip(('Tq', 'Tk', 'B', 'heads', 'C'), self._sizes(ctx.q, ctx.k, ctx.q_rows, ctx.k_rows), strict=True)
        q_offsets, k_offsets = offsets(ctx.q_rows, ctx.k_rows)
        arrays = ctx._asdict() | dict(q_offsets=q_offsets, k_offsets=k_offsets)
        return weights({**dict(names), 'causal': self.causal}, arrays.__getitem__)

    def _gradients(self, q: Shape, k: Shape, dtype: Any = np.float32) -> tuple[Array, Array, Array]:
        """Allocate dq, dk and dv, for q and k of these shapes."""
        dq, dk, dv = (empty_gradient(shape, f'{self.name}.{name}', dtype) for name, shape in (('dq', q), ('dk', k), ('dv', k)))
        return dq, dk, dv

    def check(self, q: Array, k: Array, v: Array, lengths: Array | None, step: Array | None, q_rows: Packed | None = None,
              k_rows: Packed | None = None) -> tuple[int, int]:
        """Check the arguments of forward.  Return the distance of rows of q, and of k and v."""
        q_axes, k_axes = 'Tq B D' if q_rows is None else 'Nq D', 'Tk B D' if k_rows is None else 'Nk D'
        *q_shape, D = axes('q', q, q_axes)
        k_shape = axes('k', k, k_axes)[:-1]
        B = q_shape[1] if q_rows is None else q_rows.sentences
        if D == 0 or D % self.heads:
            raise ValueError(f'q: expected shape ({q_axes.replace(" ", ", ")}) with D a multiple of {self.heads} heads, '
                             f'got {q.shape}')
        if k_rows is None:
            k_shape = k_shape[0], B
        rows = distances('', (*q_shape, D), (*k_shape, D), q, k, v)
        for name, packed_rows in (('q_rows', q_rows), ('k_rows', k_rows)):
            if packed_rows is not None:
                check(f'{name}.offsets', packed_rows.offsets, (B + 1,), np.int32)
        if lengths is not None:
            check('lengths', lengths, (B,), np.int32)
        if step is not None:
            check('step', step, (1,), np.int64)
        return rows

    def _sizes(self, q: Array, k: Array, q_rows: Packed | None, k_rows: Packed | None) -> tuple[int, ...]:
        """Return the sizes in the order of the header."""
        Tq, B = q.shape[:2] if q_rows is None else (q_rows.longest, q_rows.sentences)
        return Tq, len(k) if k_rows is None else k_rows.longest, B, self.heads, q.shape[-1] // self.heads

    def _settings(self) -> tuple[int | float, ...]:
        """Return the other scalars in the order of the header."""
        return self.causal, self.p, self.key

    @staticmethod
    def rounded() -> type[Attention]:
        """Return the op class with rounded operands."""
        from pyops.ops.attention_rounded import QuantizedAttention
        return QuantizedAttention

    @staticmethod
    def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, lengths: np.ndarray | None = None,
                  step: np.ndarray | None = None, q_rows: Packed | None = None, k_rows: Packed | None = None, *, heads: int,
                  causal: bool = False, p: float = 0.0, key: int = 0) -> np.ndarray:
        if q_rows is not None:
            q = padded(q, q_rows)
        if k_rows is not None:
            k, v, lengths = padded(k, k_rows), padded(v, k_rows), lengths_of(k_rows)
        (Tq, B, D), Tk = q.shape, len(k)
        q, k, v = (x.reshape(len(x), B, heads, D // heads).transpose(1, 2, 0, 3) for x in (q, k, v))
        queries = Tq if q_rows is None else lengths_of(q_rows)
        keys = Tk if k_rows is None else lengths
        scores = np.where(visible(Tq, Tk, np.full(B, Tk) if lengths is None else lengths, causal, keys - queries),
                          q @ k.swapaxes(2, 3) / np.sqrt(D // heads), -np.inf)
        top = scores.max(-1, keepdims=True, initial=-1e300)
        weights = np.exp(scores - top)
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)       # 0 in a row with no visible key
        if step is not None and p:
            weights = weights * dropout_factors(B, heads, Tq, Tk, p, int(step[0]), key)
        y = (weights @ v).transpose(2, 0, 1, 3).reshape(Tq, B, D)
        return y if q_rows is None else packed(y, q_rows)

    @staticmethod
    def example(normal: Normal) -> Example:
        return ([normal(3, 2, 4), normal(5, 2, 4), normal(5, 2, 4), np.array([5, 3], np.int32)],
                dict(heads=2, causal=True))


def distances(prefix: str, q_shape: Shape, k_shape: Shape, q: Array, k: Array, v: Array) -> tuple[int, int]:
    """Check q, k and v, or with the prefix 'd' their gradients; they may be columns of larger arrays.  Return the distance of
    rows of q, and of k and v, in elements."""
    of_q = check_rows(f'{prefix}q', q, q_shape, REAL)
    of_k, of_v = check_rows(f'{prefix}k', k, k_shape, q.dtype), check_rows(f'{prefix}v', v, k_shape, q.dtype)
    if of_k != of_v:
        raise ValueError(f'{prefix}v: expected the row distance of {prefix}k, {of_k} elements, got {of_v}; '
                         'copy one of them')
    return of_q, of_k


def follow_parents(before: Array | None, parents: Array, tokens: int, N: int, name: str = 'index') -> Array:
    """Return the index (tokens, R) int32 of Attention.step if hypothesis r continues hypothesis parents[r] of N.

    before: the index of these N, (M, N) int32 with M <= tokens, or None;  parents (R,) int32
    """
    M, R = 0 if before is None else len(before), len(parents)
    if before is not None:
        check('before', before, (M, N), np.int32)
    check('parents', parents, (R,), np.int32)
    index = empty((tokens, R), np.int32, name)
    launch('follow_parents', index, before, parents, tokens, M, N, R)
    return index


def append_rows(y: Array, x: Array, places: Array) -> None:
    """y[places[r]] = x[r]: the keys or values x (R, C) of the newest token of each hypothesis, in y (..., C).

    y and x may be columns of larger arrays.   places (R,) int32: rows of y
    """
    R, C = x.shape
    check('places', places, (R,), np.int32)
    launch('scatter_rows', y, x, places, math.prod(y.shape[:-1]), R, C, check_rows('y', y, (*y.shape[:-1], C)),
           check_rows('x', x, (R, C)))


def sequence_lengths(ids: Array, pad: int, name: str = 'lengths') -> Array:
    """Return the lengths (B,) int32 of the sequences in ids (T, B) int32 without trailing padding; 0 if all is padding."""
    T, B = axes('ids', ids, 'T B')
    check('ids', ids, (T, B), np.int32)
    lengths = empty(B, np.int32, name)
    launch('sequence_lengths', lengths, ids, T, B, pad)
    return lengths


def offsets(q_rows: Packed | None, k_rows: Packed | None) -> list[Array | None]:
    """Return q_offsets and k_offsets of the header."""
    return [None if rows is None else rows.offsets for rows in (q_rows, k_rows)]


def visible(Tq: int, Tk: int, lengths: np.ndarray, causal: bool, more: int | np.ndarray | None = None) -> np.ndarray:
    """Return a mask (B, 1, Tq, Tk) bool of the keys visible to each query, for the reference.

    more: number of keys minus number of queries, of each sequence in packed rows; default Tk - Tq
    """
    query, key = np.arange(Tq)[:, None], np.arange(Tk)
    last = query + np.reshape(Tk - Tq if more is None else more, (-1, 1, 1, 1))
    seen = key < lengths[:, None, None, None]
    return np.broadcast_to(seen & (key <= last) if causal else seen, (len(lengths), 1, Tq, Tk))


def dropout_factors(B: int, heads: int, Tq: int, Tk: int, p: float, step: int, key: int) -> np.ndarray:
    """Return the dropout factors (B, heads, Tq, Tk) of the weights.  The mask has Tk rounded up to a multiple of 4."""
    from pyops.philox import dropout_mask  # imported here because only references need it: programs start faster
    Tk4 = -(-Tk // 4) * 4
    mask = dropout_mask(B * heads * Tq * Tk4, p, step, key).reshape(B, heads, Tq, Tk4)[..., :Tk]
    return mask / (1 - np.float64(np.float32(p)))


def weights(s: Sizes, array: Argument) -> Array:
    """Return the softmax before dropout, (B, heads, Tq, Tk), recomputed from q and k: the kernel does not store it."""
    Tq, Tk, B, heads, C = (s[name] for name in ('Tq', 'Tk', 'B', 'heads', 'C'))
    q_offsets, k_offsets = array('q_offsets'), array('k_offsets')
    q, k = (x if of is None else pad_rows(x, Packed(of, T), x.shape)[0]
            for x, of, T in ((as_float(array('q'), 'q'), q_offsets, Tq), (as_float(array('k'), 'k'), k_offsets, Tk)))
    q, k = q.reshape(Tq, B, heads, C), k.reshape(Tk, B, heads, C)
    p = empty((B, heads, Tq, Tk))
    gemm_batched(p, permuted(q, (1, 2, 0, 3)), permuted(k, (1, 2, 3, 0)))
    launch('attention_softmax_forward', p, None, p, array('lengths'), q_offsets, k_offsets, None, Tq, Tk, B, heads,
           s['causal'], C ** -0.5, 0.0, 0)
    return p


WEIGHTS = Made(lambda s: (s['B'], s['heads'], s['Tq'], s['Tk']), weights)
FORWARD = Product('forward', {'q': 'q', 'k': 'k', 'v': 'v', 'y': 'y', 'p': WEIGHTS})
BACKWARD = Product('backward', {'do': 'dy', 'dq': 'dq', 'dk': 'dk', 'dv': 'dv'})


def _scores(s: Sizes, array: Argument) -> int:
    """Return the number of computed pairs of a query and a key, over all heads."""
    queries, all_keys = (T if x is None else np.diff(get(x))[:, None]
                         for x, T in ((array('q_offsets'), s['Tq']), (array('k_offsets'), s['Tk'])))
    keys, query = all_keys if array('lengths') is None else get(array('lengths'))[:, None], np.arange(s['Tq'])
    if s['causal']:
        keys = np.minimum(keys, np.maximum(query + 1 + all_keys - queries, 0))
    return int((np.broadcast_to(keys, (s['B'], s['Tq'])) * (query < queries)).sum()) * s['heads']


declare(attention_forward=Kernel(flops=lambda s, array: 4 * _scores(s, array) * s['C']),
        attention_backward=Kernel(flops=lambda s, array: 10 * _scores(s, array) * s['C']),
        attention_softmax_forward=Kernel(), attention_softmax_backward=Kernel(), sequence_lengths=Kernel(),
        attention_step=Kernel(), follow_parents=Kernel())
