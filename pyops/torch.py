"""pyops kernels as operators of PyTorch, for float32 tensors on the CPU, with gradients and torch.compile.

    import pyops.torch as pt

    loss = pt.linear_cross_entropy(x, weight, labels, bias)         output layer and loss, without stored logits
    h = pt.gru(x, w_ih, w_hh, b_ih, b_hh)                           all steps of torch.nn.GRU
    y = pt.attention(q, k, v, heads=8, causal=True)
    y = pt.fake_quantize(x, 'mxfp8')

Each is a torch.library.custom_op with a formula for autograd and a shape function.  Kernels read and write the memory of the
tensors: only a tensor with other strides than a kernel takes is copied, and labels and lengths of int64 are converted to int32.
Second derivatives raise an error.  docs/torch.md has examples and limits.
"""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import backend, formats, ops
from pyops.errors import require
from pyops.params import Parameter

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyops.formats import Format
    from pyops.typing import Array

require('pyops.torch', 'torch', 'torch')
import torch  # noqa: E402  after the check that it is installed
from torch.library import custom_op  # noqa: E402

# ---- tensors and arrays ------------------------------------------------------------------------------------------------

def _operator(name: str, schema: str) -> Callable[[Any], Any]:
    """Register the decorated function as the operator pyops::name.  It runs with the CPU as the current device."""
    def register(function: Any) -> Any:
        @functools.wraps(function)
        def run(*arguments: Any) -> Any:
            if backend.is_recorded():
                raise RuntimeError(f'pyops.torch: {name}: a plan is recording, which cannot replay operators of PyTorch; '
                                   'use pyops.ops in a plan')
            if backend.current_device().is_host:
                return function(*arguments)
            with backend.on(backend.HOST):
                return function(*arguments)
        return custom_op(f'pyops::{name}', run, mutates_args=(), schema=schema)
    return register


def _checked(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return a float32 tensor on the CPU without its gradient function.  TypeError or ValueError otherwise."""
    if x.device.type != 'cpu':
        raise ValueError(f'{name}: tensor on {x.device}, expected one on the CPU; move it with .cpu()')
    if x.dtype != torch.float32:
        raise TypeError(f'{name}: {x.dtype}, expected torch.float32; convert it with .float()')
    return x.detach()


def _array(name: str, x: torch.Tensor) -> np.ndarray:
    """Return a C-contiguous array over the memory of a tensor; a copy only if its strides require one."""
    return _checked(name, x).contiguous().numpy()


def _ints(name: str, x: torch.Tensor | None) -> Any:
    """Return labels or lengths as int32, without a copy if they are int32 and contiguous; None for None."""
    if x is None:
        return None
    if x.device.type != 'cpu' or x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f'{name}: {x.dtype} on {x.device}, expected int32 or int64 on the CPU; convert it with .to()')
    return x.detach().to(torch.int32).contiguous().numpy()


def _parameter(name: str, value: np.ndarray, has_grad: bool) -> Parameter:
    """Return a Parameter with a gradient of zeros, or without one, for forward."""
    return Parameter(name, value, np.zeros_like(value) if has_grad else value)


def _tensors(*arrays: Array | None) -> tuple[torch.Tensor, ...]:
    """Return tensors over the memory of arrays; an empty tensor for None, since operators return only tensors."""
    return tuple(torch.empty(0) if a is None else torch.from_numpy(a) for a in arrays)


def _refuse_second_derivative(name: str, *gradients: torch.Tensor | None) -> None:
    """Raise RuntimeError if there is a gradient of a saved tensor, which is an output of its operator."""
    if any(gradient is not None for gradient in gradients):
        raise RuntimeError(f'pyops.torch.{name}: second derivatives are not implemented; use PyTorch functions for them')


# ---- number formats ----------------------------------------------------------------------------------------------------

def fake_quantize(x: torch.Tensor, fmt: str | Format, axis: int = -1, *, step: int = 0, seed: int = 0) -> torch.Tensor:
    """Round x to a number format of docs/formats.md, stored as float32.  The gradient is passed on unchanged.

    fmt: a name with options, such as 'mxfp4:scale=even';  axis: direction of the blocks
    step, seed: key of the random numbers for round=stochastic
    FormatError for an unknown format or option; ValueError for an axis outside x.
    """
    return _fake_quantize(x, str(fmt), axis, step, seed)


@_operator('fake_quantize', '(Tensor x, str fmt, int axis, int step, int seed) -> Tensor')
def _fake_quantize(x: torch.Tensor, fmt: str, axis: int, step: int, seed: int) -> torch.Tensor:
    rounded: Any = formats.fake_quantize(_array('x', x), fmt, axis, step=np.array([step], np.int64), seed=seed)
    return torch.from_numpy(rounded)


@_fake_quantize.register_fake
def _(x: torch.Tensor, fmt: str, axis: int, step: int, seed: int) -> torch.Tensor:
    return x.new_empty(x.shape)


_fake_quantize.register_autograd(lambda ctx, dy: (dy, None, None, None, None))


# ---- output layer and loss ---------------------------------------------------------------------------------------------

def linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None,
                         ignore_index: int = -100, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the mean cross entropy of the logits x weight' + bias, which are never stored: F.cross_entropy(F.linear(x, weight,
    bias), labels), a scalar.

    x (..., D);  weight (V, D);  bias (V,) or None;  labels (...) int32 or int64 in [0, V) or = ignore_index
    If all labels are ignored the loss is 0; PyTorch's is NaN.
    If a gradient is required, forward computes all gradients, and backward multiplies them by the upstream gradient.
    ValueError for a label outside [0, V) other than ignore_index, with its position.
    """
    if bias is None:
        bias = weight.new_zeros(weight.shape[0])
    is_differentiable = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad)
    return _linear_cross_entropy(x, weight, bias, labels, ignore_index, label_smoothing, is_differentiable)[0]


@_operator('linear_cross_entropy', '(Tensor x, Tensor weight, Tensor bias, Tensor labels, int ignore_index, '
           'float label_smoothing, bool gradients) -> (Tensor, Tensor, Tensor, Tensor)')
def _linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor, ignore_index: int,
                          label_smoothing: float, gradients: bool) -> tuple[torch.Tensor, ...]:
    op = ops.LinearCrossEntropy(_parameter('weight', _array('weight', weight), False),
                                _parameter('bias', _array('bias', bias), False), ignore_index, label_smoothing)
    # without gradients the op would also leave out the smoothing
    loss, ctx = op.forward(_array('x', x), _ints('labels', labels), gradients or label_smoothing != 0)
    return torch.from_numpy(loss)[0].clone(), *_tensors(*((ctx.dx, ctx.dweight, ctx.dbias) if gradients else (None,) * 3))


@_linear_cross_entropy.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, labels: torch.Tensor, ignore_index: int,
      label_smoothing: float, gradients: bool) -> tuple[torch.Tensor, ...]:
    return x.new_empty(()), *(t.new_empty(t.shape if gradients else 0) for t in (x, weight, bias))


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx: Any, dloss: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    _refuse_second_derivative('linear_cross_entropy', *others)
    return *(dloss * gradient for gradient in ctx.saved_tensors), None, None, None, None


_linear_cross_entropy.register_autograd(_scale_gradients, setup_context=_save_gradients)


# ---- GRU ---------------------------------------------------------------------------------------------------------------

def gru(x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor, b_hh: torch.Tensor,
        h0: torch.Tensor | None = None, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Return the states h (T, B, H) of a gated recurrent unit: the first result of one layer of torch.nn.GRU.

    x (T, B, I);  w_ih (3H, I), w_hh (3H, H), b_ih (3H,), b_hh (3H,): as in torch.nn.GRU, gates in the order r, z, n
    h0 (B, H), zeros if None;  lengths (B,) int32 or int64, T if None: after the end of a sequence h is 0
    The last state is h[-1] without lengths.  ValueError for a length outside [0, T] and for shapes that do not fit.
    """
    return _gru(x, w_ih, w_hh, b_ih, b_hh, h0, lengths)[0]


_GRU_INPUTS = 'Tensor x, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor? h0, Tensor? lengths'
_WEIGHTS = 'w_ih', 'w_hh', 'b_ih', 'b_hh'


def _gru_of(weights: tuple[torch.Tensor, ...], has_grad: bool) -> ops.GRU:
    w_ih, w_hh, b_ih, b_hh = (_parameter(name, _array(name, w), has_grad) for name, w in zip(_WEIGHTS, weights, strict=True))
    return ops.GRU(w_ih, w_hh, b_ih, b_hh)


@_operator('gru', f'({_GRU_INPUTS}) -> (Tensor, Tensor)')
def _gru(x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor, b_hh: torch.Tensor,
         h0: torch.Tensor | None, lengths: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    op = _gru_of((w_ih, w_hh, b_ih, b_hh), False)
    h, ctx = op.forward(_array('x', x), None if h0 is None else _array('h0', h0), _ints('lengths', lengths))
    return _tensors(h, ctx.gates)


@_gru.register_fake
def _(x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor, b_hh: torch.Tensor,
      h0: torch.Tensor | None, lengths: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    T, B, _ = x.shape
    H = w_hh.shape[1]
    return x.new_empty(T, B, H), x.new_empty(T, B, 4 * H)


@_operator('gru_backward', f'(Tensor dh, {_GRU_INPUTS}, Tensor h, Tensor gates) -> '
           '(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)')
def _gru_backward(dh: torch.Tensor, x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor,
                  b_hh: torch.Tensor, h0: torch.Tensor | None, lengths: torch.Tensor | None, h: torch.Tensor,
                  gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
    op = _gru_of((w_ih, w_hh, b_ih, b_hh), True)
    ctx = op.Ctx(_array('x', x), None if h0 is None else _array('h0', h0), _ints('lengths', lengths), _array('h', h),
                 _array('gates', gates), None, None, False)
    dx, dh0 = op.backward(_array('dh', dh), ctx)
    return _tensors(dx, *(p.grad for p in (op.w_ih, op.w_hh, op.b_ih, op.b_hh)), dh0)


@_gru_backward.register_fake
def _(dh: torch.Tensor, x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor, b_hh: torch.Tensor,
      h0: torch.Tensor | None, lengths: torch.Tensor | None, h: torch.Tensor,
      gates: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *(t.new_empty(t.shape) for t in (x, w_ih, w_hh, b_ih, b_hh)), x.new_empty(0 if h0 is None else h0.shape)


def _save_all(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save all tensors; the numbers behind them are for the operator of the backward pass, too."""
    ctx.set_materialize_grads(False)
    tensors = [x for x in inputs if x is None or isinstance(x, torch.Tensor)]
    ctx.settings = inputs[len(tensors):]
    ctx.save_for_backward(*tensors, *output)


def _differentiate_gru(ctx: Any, dh: torch.Tensor, dgates: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    _refuse_second_derivative('gru', dgates)
    *gradients, dh0 = _gru_backward(dh, *ctx.saved_tensors)
    return *gradients, None if ctx.saved_tensors[5] is None else dh0, None


_gru.register_autograd(_differentiate_gru, setup_context=_save_all)


# ---- attention ---------------------------------------------------------------------------------------------------------

def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, lengths: torch.Tensor | None = None,
              causal: bool = False) -> torch.Tensor:
    """Return multi-head scaled dot-product attention (Tq, B, D), time first.  Head h is the D / heads columns from h D / heads.

    q (Tq, B, D);  k, v (Tk, B, D): also columns of one product, such as (x @ w.T).chunk(3, -1), without a copy
    lengths (B,) int32 or int64: the number of valid keys of each sequence;  causal: query i sees the keys up to i + Tk - Tq
    A query without a visible key has y = 0 and passes no gradient back.
    ValueError if D is not a multiple of heads, and for a length outside [0, Tk].
    """
    return _attention(q, k, v, lengths, heads, causal)[0]


_ATTENTION_INPUTS = 'Tensor q, Tensor k, Tensor v, Tensor? lengths'


def _has_rows(x: torch.Tensor) -> bool:
    """Return whether the rows of x (T, B, D) are contiguous and at equal distances, as the kernels require."""
    return x.ndim == 3 and x.stride(2) == 1 and x.stride(1) >= x.shape[2] and x.stride(0) == x.shape[1] * x.stride(1)


def _qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return arrays over the memory of q, k and v; copies only if the rows of one are not at equal distances."""
    q, k, v = (_checked(name, x) for name, x in (('q', q), ('k', k), ('v', v)))
    q = q if _has_rows(q) else q.contiguous()
    if not (_has_rows(k) and _has_rows(v) and k.stride() == v.stride()):
        k, v = k.contiguous(), v.contiguous()
    return q.numpy(), k.numpy(), v.numpy()


@_operator('attention', f'({_ATTENTION_INPUTS}, int heads, bool causal) -> (Tensor, Tensor)')
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None, heads: int,
               causal: bool) -> tuple[torch.Tensor, ...]:
    y, ctx = ops.Attention(heads, causal).forward(*_qkv(q, k, v), lengths=_ints('lengths', lengths))
    return _tensors(y, ctx.stats)


@_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None, heads: int,
      causal: bool) -> tuple[torch.Tensor, ...]:
    return q.new_empty(q.shape), q.new_empty(2, q.shape[1], heads, q.shape[0])


@_operator('attention_backward', f'(Tensor dy, {_ATTENTION_INPUTS}, Tensor y, Tensor stats, int heads, bool causal) -> '
           '(Tensor, Tensor, Tensor)')
def _attention_backward(dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None,
                        y: torch.Tensor, stats: torch.Tensor, heads: int, causal: bool) -> tuple[torch.Tensor, ...]:
    op = ops.Attention(heads, causal)
    ctx = op.Ctx(*_qkv(q, k, v), lengths=_ints('lengths', lengths), q_rows=None, k_rows=None, step=None, y=_array('y', y),
                 stats=_array('stats', stats))
    return _tensors(*op.backward(_array('dy', dy), ctx))


@_attention_backward.register_fake
def _(dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None, y: torch.Tensor,
      stats: torch.Tensor, heads: int, causal: bool) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _differentiate_attention(ctx: Any, dy: torch.Tensor, dstats: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    _refuse_second_derivative('attention', dstats)
    return *_attention_backward(dy, *ctx.saved_tensors, *ctx.settings), None, None, None


_attention.register_autograd(_differentiate_attention, setup_context=_save_all)
