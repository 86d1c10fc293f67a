"""Ops for inference with weights in int8, bfloat16 or packed float32.  They have no backward; docs/compact.md has the formulas.

A CompactWeight is packed from the tensors of a checkpoint, and the float32 weight is then not needed.  pyops.compute creates
the ops, in place of the ones in pyops.ops.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pyops.backend import axes, check, empty, launch, work, work_size, zeros
from pyops.backend.kernels import Kernel, declare
from pyops.ops.activation import GELU, GELUTanh, SiLU
from pyops.ops.cross_entropy import CrossEntropy
from pyops.ops.gru import AFTER, BEFORE_1, BEFORE_2
from pyops.ops.join import ConcatContext
from pyops.ops.linear_cross_entropy import LinearCrossEntropy
from pyops.ops.packed import pad_rows, unpad_rows
from pyops.params import ALIGN

if TYPE_CHECKING:
    from pyops.ops.packed import Packed
    from pyops.ops.positions import Positions
    from pyops.params import Parameter, Parameters
    from pyops.typing import Array

FORMATS = 'int8', 'bf16', 'float32'         # of pyops_compact_format


class CompactWeight:
    """Rows of weights (O, I), and their biases, as products read them.

    names: the parameters, one below the other;  biases: theirs, or ();  part: the rows of a single parameter, None for all

    int8   a row w is q s: integers q = rint(w 127 / max |w|) and the scale s = max |w| / 127
    bf16   each element rounded to the nearest, ties to even
    The same rounding applies to the rows of x, in each call.  float32 rounds nothing: the weight is only packed, once
    """

    def __init__(self, names: Sequence[str], shape: tuple[int, int], format: str, biases: Sequence[str] = (),
                 part: slice | None = None) -> None:
        self.names, self.shape, self.part, self.biases = names, shape, part or slice(None), biases
        self.format = FORMATS.index(format)
        self.values: Array | None = None

    @property
    def size(self) -> int:
        """The number of floats that it takes when packed, a multiple of ALIGN."""
        return -(-work_size('compact_weight', *self.shape, self.format) // ALIGN) * ALIGN

    def pack(self, tensors: Mapping[str, np.ndarray], memory: Array | None = None) -> None:
        """Copy the weights and biases from {name of a parameter: float32 array}.   memory: for them, (size,) zeros"""
        def rows(names: Sequence[str]) -> np.ndarray | None:
            parts = [tensors[name][self.part] for name in names]
            return (np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)) if parts else None
        self.values = zeros(self.size) if memory is None else memory
        launch('compact_weight', self.values, rows(self.names), rows(self.biases), *self.shape, self.format)

    @property
    def nbytes(self) -> int:
        return 0 if self.values is None else self.values.nbytes

    def linear(self, x: Array, name: str, relu: bool = False, out: Array | None = None, into: Array | None = None) -> Array:
        """Return x weight' + bias, (..., O), for x (..., I); relu: then max(y, 0).

        out: the array to write to;  into: the array to add to
        """
        O, I = self.shape
        check('x', x, (*np.shape(x)[:-1], I))
        given = out if into is None else into
        R, y = math.prod(x.shape[:-1]), empty((*x.shape[:-1], O), name=name) if given is None else given
        check('y', y, (*x.shape[:-1], O))
        launch('compact_linear', y, x, self.values, work('compact_linear', R, I, self.format), R, O, I, self.format,
               into is not None, relu)
        return y

    def rows(self, ids: Array, name: str) -> Array:
        """Return the rows of the weight with these ids, (..., I)."""
        O, I = self.shape
        check('ids', ids, np.shape(ids), np.int32)
        y = empty((*ids.shape, I), name=name)
        launch('compact_embedding', y, self.values, ids, ids.size, O, I, self.format)
        return y

    def topk(self, x: Array, k: int, name: str) -> tuple[Array, Array]:
        """Return the indices (R, k) int32 of the k largest elements of each row of x weight' + bias, and their log softmax."""
        index, logp = empty((len(x), k), np.int32, f'{name}.indices'), empty((len(x), k), name=f'{name}.logp')
        self._topk(index, logp, x, k)
        return index, logp

    def argmax(self, x: Array, name: str) -> Array:
        """Return the index (R,) int32 of the largest element of each row of x weight' + bias."""
        index = empty(len(x), np.int32, f'{name}.index')
        self._topk(index, None, x, 1)
        return index

    def _topk(self, index: Array, logp: Array | None, x: Array, k: int) -> None:
        O, I = self.shape
        check('x', x, (len(x), I))
        launch('compact_topk', index, logp, x, self.values, work('compact_topk', len(x), O, I, k, self.format), len(x), O, I, k,
               self.format)


class CompactWeights:
    """The compact weights of a model: its layers request them, and pack() fills them.

    format      'int8', 'bf16' or 'float32'
    rounds      whether the weights are rounded.  If they are not, a model returns the same bits as with pyops.ops and keeps its
                parameters; after changing them, call pack() again
    """
    is_compact = True

    def __init__(self, format: str) -> None:
        self.format, self.rounds = format, format != 'float32'
        self._weights: dict[tuple[Any, ...], CompactWeight] = {}

    def weight(self, weight: Parameter, bias: Parameter | None = None, part: slice | None = None) -> CompactWeight:
        """Return the CompactWeight of (a part of) a parameter: one for all layers that share it."""
        O, I = weight.value.shape
        rows = range(O)[part or slice(None)]
        key = weight.name, None if part is None else rows.start
        if key not in self._weights:
            self._weights[key] = CompactWeight([weight.name], (len(rows), I), self.format, part=part)
        if bias is not None:
            self._weights[key].biases = [bias.name]
        return self._weights[key]

    def joined(self, weights: Sequence[Parameter], biases: Sequence[Parameter]) -> CompactWeight:
        """Return a CompactWeight of parameters with equally long rows, one below the other."""
        names = [weight.name for weight in weights]
        shape = sum(len(weight.value) for weight in weights), weights[0].value.shape[1]
        return self._weights.setdefault(tuple(names), CompactWeight(names, shape, self.format, [bias.name for bias in biases]))

    @property
    def names(self) -> set[str]:
        """The names of the parameters that are packed, weights and biases."""
        return {name for found in self._weights.values() for name in (*found.names, *found.biases)}

    @property
    def nbytes(self) -> int:
        """The bytes of all compact weights."""
        return sum(found.nbytes for found in self._weights.values())

    def pack(self, params: Parameters, tensors: Mapping[str, np.ndarray] | None = None) -> None:
        """Pack {name of a parameter: values}, by default the values of params.

        If the weights are rounded, drop their parameters from params: the layers do not read them.
        """
        values: Mapping[str, Any] = params.arrays() if tensors is None else tensors
        sizes = [weight.size for weight in self._weights.values()]
        # One block for all: the system backs a large one with huge pages, which halves the time to fill it.
        memory, start = zeros(sum(sizes)), 0
        for weight, size in zip(self._weights.values(), sizes, strict=True):
            weight.pack(values, memory[start:start + size])
            start += size
        if self.rounds:
            params.drop(self.names)


class CompactLinear:
    """Linear with a compact weight.   x (..., I) -> y (..., O)"""

    def __init__(self, weight: Parameter, bias: Parameter | None = None, name: str | None = None, *,
                 family: CompactWeights) -> None:
        self.name, self.compact = name or weight.owner, family.weight(weight, bias)

    def forward(self, x: Array, out: Array | None = None, into: Array | None = None) -> tuple[Array, None]:
        """Return y, which is `out` if it is given, and None.   into: add y to this array, and return it"""
        return self.compact.linear(x, f'{self.name}.y', out=out, into=into), None


class CompactProjections:
    """Linear layers with one input as one product.   x (N, I) -> a list of arrays (N, O), columns of one array"""

    def __init__(self, weights: Sequence[Parameter], biases: Sequence[Parameter], name: str, *, family: CompactWeights) -> None:
        self.name, self.layers, self.compact = name, len(weights), family.joined(weights, biases)

    def forward(self, x: Array, out: Array | None = None) -> tuple[list[Array], None]:
        return self.split(self.product(x, out)), None

    def product(self, x: Array, out: Array | None = None) -> Array:
        """Return the results of all layers side by side, in `out` if it is given."""
        return self.compact.linear(x, f'{self.name}.y', out=out)

    def split(self, y: Array) -> list[Array]:
        """Return the columns of each layer."""
        O = y.shape[-1] // self.layers
        return [y[..., i * O:(i + 1) * O] for i in range(self.layers)]


class CompactFeedForward:
    """FeedForward with compact weights.   x, y (..., D)"""

    def __init__(self, w1: Parameter, b1: Parameter, w2: Parameter, b2: Parameter, name: str | None = None,
                 activation: str = 'relu', *, family: CompactWeights) -> None:
        self.name, self.first, self.second = name or w1.owner, family.weight(w1, b1), family.weight(w2, b2)
        self.activation = {'relu': None, 'silu': SiLU(), 'gelu': GELU(), 'gelu_tanh': GELUTanh()}[activation]

    def forward(self, x: Array, into: Array | None = None) -> tuple[Array, None]:
        """Return y.   into: add y to this array, and return it"""
        h = self.first.linear(x, f'{self.name}.h', relu=self.activation is None)
        if self.activation is not None:
            h, _ = self.activation.forward(h)
        return self.second.linear(h, f'{self.name}.y', into=into), None


class CompactEmbeddingPositions:
    """EmbeddingPositions with a compact weight, for inference: no dropout.

    ids (N,) int32, positions (N,) int32, or None: `first` for all rows -> y (N, E)
    """

    def __init__(self, weight: Parameter, encoding: Positions, p: float = 0.0, key: int = 0, name: str | None = None, *,
                 family: CompactWeights) -> None:
        self.name, self.compact, self.encoding = name or weight.owner, family.weight(weight), encoding

    def forward(self, ids: Array, positions: Array | None = None, step: Array | None = None,
                first: int = 0) -> tuple[Array, None]:
        x = self.compact.rows(ids, f'{self.name}.y')
        if positions is None:
            return self.encoding.forward(x[None], first)[0][0], None
        return self.encoding.forward(x, first, positions)[0], None


class CompactLinearCrossEntropy:
    """The output layer, LinearCrossEntropy, with a compact weight; the loss is for evaluation only."""

    def __init__(self, weight: Parameter, bias: Parameter, ignore: int = -1, smoothing: float = 0.0,
                 name: str | None = None, *, family: CompactWeights) -> None:
        self.name, self.compact, self.loss = name or weight.owner, family.weight(weight, bias), CrossEntropy(ignore)

    def forward(self, x: Array, labels: Array, gradients: bool = False) -> tuple[Array, CrossEntropy.Ctx]:
        """Return the mean loss of x (R, D) and labels (R,), and a ctx with the number of valid rows."""
        return self.loss.forward(self.compact.linear(x, f'{self.name}.logits'), labels)

    def prepare(self) -> None:
        """Return what predict() takes: nothing, since the weight is packed already."""

    def predict(self, x: Array, prepared: None = None) -> Array:
        """Return the index (B,) int32 of the largest logit for each row of x (B, D)."""
        return self.compact.argmax(x, self.name)

    def topk(self, x: Array, k: int) -> tuple[Array, Array]:
        """As LinearCrossEntropy.topk."""
        return self.compact.topk(x, k, self.name)


class PackedLinearCrossEntropy(LinearCrossEntropy):
    """LinearCrossEntropy whose topk() reads a packed float32 weight, with the same result."""

    def __init__(self, weight: Parameter, bias: Parameter, ignore: int = -1, smoothing: float = 0.0,
                 name: str | None = None, *, family: CompactWeights) -> None:
        super().__init__(weight, bias, ignore, smoothing, name)
        self.compact = family.weight(weight, bias)

    def topk(self, x: Array, k: int) -> tuple[Array, Array]:
        return self.compact.topk(x, k, self.name)


class CompactGRU:
    """GRU with compact weights.   x (T, B, I) or packed (N, I) -> h (T, B, H) or (N, H);  ctx.last (B, H) with rows"""

    class Ctx(NamedTuple):
        last: Array | None

    def __init__(self, w_ih: Parameter, w_hh: Parameter, b_ih: Parameter, b_hh: Parameter, reset_before: bool = False,
                 name: str | None = None, *, family: CompactWeights) -> None:
        self.name, self.reset_before = name or w_ih.owner, reset_before
        self.H = H = axes(w_hh.name, w_hh.value, '3H H')[1]
        self.ih, parts = family.weight(w_ih, b_ih), (slice(2 * H), slice(2 * H, None)) if reset_before else (None,)
        self.hh = [family.weight(w_hh, b_hh, part) for part in parts]

    def forward(self, x: Array, h0: Array | None = None, lengths: None = None, rows: Packed | None = None,
                reverse: bool = False) -> tuple[Array, Ctx]:
        a = self.ih.linear(x, f'{self.name}.ih.y')
        return self.recur(self.padded(a, rows, reverse), h0, rows, reverse, len(x))

    def padded(self, x: Array, rows: Packed | None, reverse: bool) -> Array:
        return x if rows is None else pad_rows(x, rows, x.shape, reverse, name=f'{self.name}.padded')[0]

    def recur(self, a: Array, h0: Array | None, rows: Packed | None, reverse: bool, N: int) -> tuple[Array, Ctx]:
        """Run the steps for the input products a (T, B, 3H).   N: the number of packed rows, with rows"""
        (T, B, _), H = a.shape, self.H
        states, gates = empty((T, B, H), name=f'{self.name}.h'), empty((B, 4 * H), name=f'{self.name}.gates')
        if h0 is None:
            h0 = empty((B, H), name=f'{self.name}.h0')
            launch('fill', h0, B * H, 0.0)
        h = h0
        for t in range(T):
            product = self.hh[0].linear(h, f'{self.name}.hh.y')
            if self.reset_before:
                u = empty((B, H), name=f'{self.name}.u')
                launch('gru_gates_forward', u, gates, a[t], product, h, B, H, BEFORE_1)
                product = self.hh[1].linear(u, f'{self.name}.hn.y')
            launch('gru_gates_forward', states[t], gates, a[t], product, h, B, H, BEFORE_2 if self.reset_before else AFTER)
            h = states[t]
        if rows is None:
            return states, self.Ctx(None)
        packed, last = unpad_rows(states, rows, N, reverse, h0, f'{self.name}.packed')
        return packed, self.Ctx(last)


class CompactEmbeddingGRU(CompactGRU):
    """EmbeddingGRU with compact weights.   ids (T, B) or packed (N,)"""

    def __init__(self, table: Parameter, *arguments: Any, family: CompactWeights, **named: Any) -> None:
        super().__init__(*arguments, family=family, **named)
        self.table, self.concat = family.weight(table), ConcatContext()

    def forward(self, ids: Array, context: Array | None = None, h0: Array | None = None, lengths: None = None,
                rows: Packed | None = None, reverse: bool = False) -> tuple[Array, CompactGRU.Ctx]:
        x = self.table.rows(ids, f'{self.name}.x')
        if context is None:
            return super().forward(x, h0, lengths, rows, reverse)
        x, _ = self.concat.forward(self.padded(x, rows, reverse), context)
        return self.recur(self.ih.linear(x, f'{self.name}.ih.y'), h0, rows, reverse, len(ids))


# {name of an op in pyops.ops: its replacement}.  PACKED is for float32, with the same bits: embeddings read single rows, and a
# GRU packs its weights once for all steps of a sequence, so it has neither.
PACKED = {'Linear': CompactLinear, 'Projections': CompactProjections, 'FeedForward': CompactFeedForward,
          'LinearCrossEntropy': PackedLinearCrossEntropy}
CLASSES = {'Linear': CompactLinear, 'Projections': CompactProjections, 'FeedForward': CompactFeedForward,
           'EmbeddingPositions': CompactEmbeddingPositions, 'GRU': CompactGRU, 'EmbeddingGRU': CompactEmbeddingGRU,
           'LinearCrossEntropy': CompactLinearCrossEntropy}


declare(compact_weight=Kernel(), compact_embedding=Kernel(),
        compact_linear=Kernel(flops=lambda s, array: 2 * s['R'] * s['O'] * s['I']),
        compact_topk=Kernel(flops=lambda s, array: 2 * s['R'] * s['O'] * s['I']))
