"""MLPGradients: an image classifier with one hidden layer, its loss and all gradients, or the complete training step, as one
op."""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyops.backend import (
    axes,
    check,
    check_parameter,
    empty,
    empty_gradient,
    get,
    launch,
    location,
    note_product,
    product,
    put,
    work,
)
from pyops.backend.kernels import Kernel, Made, Product, declare
from pyops.ops.cross_entropy import CrossEntropy
from pyops.ops.pixel_linear import PIXELS
from pyops.ops.relu import ReLU

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyops.optim import Adam
    from pyops.params import Parameter
    from pyops.typing import Argument, Array, Example, Normal, Sizes


class MLPGradients:
    """Apply two linear layers to rows of a table of pixels, and compute the softmax cross entropy with the labels of the rows.

    Shapes   images (N, I) uint8;  rows (B,) int64;  labels (N,) int32 in [0, C), of all images;  loss, dloss (1,)
             w1 (I, H), b1 (H,), w2 (C, H), b2 (C,);  B at least 1, H and C at most 128
    Forward  x = scale images[rows];  r = max(x w1 + b1, 0);  logits = r w2' + b2
             loss = mean over b of -log softmax(logits[b])[labels[rows[b]]]
    Backward dlogits = dloss / B * (softmax(logits) - onehot(labels[rows]));  da = dlogits w2 where r > 0, else 0
             dw2 += dlogits' r;  db2 += sum_b dlogits[b];  dw1 += x' da;  db1 += sum_b da[b];  pixels have no gradient: None
    Saves    the four gradients for dloss = 1, computed in forward; backward multiplies them by dloss and adds
    Errors   ValueError for a row outside [0, N) and for a label outside [0, C), with their positions
    Source   PixelLinear, ReLU, Linear and CrossEntropy fused: on a GPU a batch of digits takes less time than a kernel launch
    Notes    for training use gradients(), which needs no backward, or step(), which includes the optimizer step
    """

    MOST = 128          # limit of H and C

    class Ctx(NamedTuple):
        dw1: Array
        db1: Array
        dw2: Array
        db2: Array

    def __init__(self, w1: Parameter, b1: Parameter, w2: Parameter, b2: Parameter, scale: float = 1 / 255,
                 name: str | None = None) -> None:
        self.parameters, self.scale, self.name = (w1, b1, w2, b2), scale, name or w1.owner
        (I, H), (C, _) = axes(w1.name, w1.value, 'I H'), axes(w2.name, w2.value, 'C H')
        self.sizes = I, H, C
        for parameter, shape in zip(self.parameters, ((I, H), (H,), (C, H), (C,)), strict=True):
            check_parameter(parameter, shape)

    def forward(self, images: Array, rows: Array, labels: Array) -> tuple[Array, Ctx]:
        grads = [empty_gradient(p.value.shape, f'{self.name}.d{short}')
                 for p, short in zip(self.parameters, self.Ctx._fields, strict=True)]
        return self._run(images, rows, labels, grads), self.Ctx(*grads)

    def backward(self, dloss: Array, ctx: Ctx) -> None:
        check('dloss', dloss, (1,))
        for p, grad in zip(self.parameters, ctx, strict=True):
            launch('axpy', p.grad, grad, dloss, grad.size)

    def gradients(self, images: Array, rows: Array, labels: Array) -> Array:
        """Return the loss (1,).  OVERWRITES the gradients of the parameters, so they need not be zeroed first."""
        return self._run(images, rows, labels, [p.grad for p in self.parameters])

    def step(self, images: Array, rows: Array, labels: Array, adam: Adam) -> Array:
        """Return the loss (1,): run gradients() and adam.step() as one op.  adam: a pyops.optim.Adam over a Parameters with
        only the four parameters of this op."""
        return self._steps(images, rows, labels, adam, 1, rows.size)[0]

    def steps(self, images: Array, rows: Array, labels: Array, adam: Adam) -> tuple[Array, Array | None]:
        """Run step() on each row of `rows` (K, B) int64, one after the other, as one op.  Return losses (K,) and norms of the
        gradients (K,), None if adam.max_norm is None.  The products of the first step can be saved."""
        K, B = axes('rows', rows, 'K B')
        return self._steps(images, rows.reshape(-1), labels, adam, K, B)

    def _steps(self, images: Array, rows: Array, labels: Array, adam: Adam, K: int, B: int) -> tuple[Array, Array | None]:
        N, _, I, H, C = self._sizes(images, rows, labels)
        params, starts = adam.params, [location(p.value) for p in self.parameters]
        if params is None or sorted(location(params[name].value) for name in params) != sorted(starts):
            raise ValueError(f'{self.name}: expected an optimizer over Parameters that hold '
                             f'{", ".join(p.name for p in self.parameters)} of this op and no others')
        if not adam.is_one_kernel:
            raise TypeError(f'{self.name}: expected Adam, got {type(adam).__name__}; call step() of the optimizer instead')
        places = [(start - location(params.values)) // 4 for start in starts]
        loss, clips = empty(K, name=f'{self.name}.loss'), bool(adam.max_norm)
        norms = empty(K, name=f'{self.name}.norms') if clips and K > 1 else None
        launch('mlp_step', loss, adam.norm if clips else None, norms, adam.count,
               params.values, params.grads, params.m, params.v, images, rows, labels, adam.rate, work('mlp_step', B, I, H, C),
               N, K, B, I, H, C, *places, self.scale,
               adam.max_norm or 1.0, adam.beta1, adam.beta2, adam.eps, adam.weight_decay)
        self._note_products(*IN_STEP)
        return loss, norms if K > 1 or not clips else adam.norm

    def _run(self, images: Array, rows: Array, labels: Array, grads: Sequence[Array]) -> Array:
        N, B, I, H, C = self._sizes(images, rows, labels)
        loss = empty(1, name=f'{self.name}.loss')
        launch('mlp_gradients', loss, *grads, images, rows, labels, *(p.value for p in self.parameters),
               work('mlp_gradients', B, I, H, C), N, B, I, H, C, self.scale)
        self._note_products(*IN_GRADIENTS)
        return loss

    def _note_products(self, of_first: Sequence[Product], of_second: Sequence[Product]) -> None:
        w1, b1, w2, b2 = self.parameters
        for layer, products, weight, bias in (('w1', of_first, w1, b1), ('w2', of_second, w2, b2)):
            for one in products:
                note_product(self, one, layer, weight=weight, bias=bias)

    def _sizes(self, images: Array, rows: Array, labels: Array) -> tuple[int, int, int, int, int]:
        (I, H, C), (N, _), (B,) = self.sizes, axes('images', images, 'N I'), axes('rows', rows, 'B')
        check('images', images, (N, I), np.uint8)
        check('rows', rows, (B,), np.int64)
        check('labels', labels, (N,), np.int32)
        return N, B, I, H, C

    @staticmethod
    def reference(images: np.ndarray, rows: np.ndarray, labels: np.ndarray, w1: np.ndarray, b1: np.ndarray, w2: np.ndarray,
                  b2: np.ndarray, scale: float = 1 / 255) -> np.ndarray:
        r = np.maximum(scale * images[rows] @ w1 + b1, 0)
        return CrossEntropy.reference(r @ w2.T + b2, labels[rows])

    @staticmethod
    def example(normal: Normal) -> Example:
        images, rows = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10, np.array([2, 0, 2])
        return ([images, rows, np.array([1, 0, 2, 0], np.int32)],
                dict(w1=normal(6, 5), b1=normal(5), w2=normal(3, 5), b2=normal(3)))


# ---- the tensors of the two linear layers, which the kernels do not store: recomputed for dloss = 1 --------------------------

def inside(s: Sizes, array: Argument) -> dict[str, Array]:
    """Return a, r, dr, da (B, H) and logits, dlogits (B, C) by name."""
    N, B, I, H, C = (s[name] for name in 'NBIHC')
    w1, b1, w2, b2 = _values(s, array)
    a, relu, loss = empty((B, H)), ReLU(), CrossEntropy()
    launch('pixel_linear_forward', a, None, None, array('table'), array('rows'), w1, b1, N, B, I, H, s['scale'])
    r, c1 = relu.forward(a)
    logits = product(r, w2.T, b2)
    _, c2 = loss.forward(logits, put(get(array('labels'))[get(array('rows'))[:B]]))
    dlogits = loss.backward(put(np.ones(1, np.float32)), c2)
    dr = product(dlogits, w2)
    return dict(a=a, r=r, logits=logits, dlogits=dlogits, dr=dr, da=relu.backward(dr, c1))


def _values(s: Sizes, array: Argument) -> list[Array]:
    """Return w1, b1, w2 and b2: arguments of mlp_gradients, or slices of the flat buffer of mlp_step."""
    I, H, C = (s[name] for name in 'IHC')
    flat, shapes = array('param'), dict(w1=(I, H), b1=(H,), w2=(C, H), b2=(C,))
    if flat is None:
        return [array(name) for name in shapes]
    return [flat[s[name]:s[name] + math.prod(shape)].reshape(shape) for name, shape in shapes.items()]


def _made(name: str, columns: str) -> Made:
    return Made(lambda s: (s['B'], s[columns]), lambda s, array: inside(s, array)[name])


# the products of the first layer, and of the second
IN_GRADIENTS = ((Product('fwd', {'x': PIXELS, 'y': _made('a', 'H')}, axis=0),
                 Product('wgrad', {'g': _made('da', 'H')}, axis=0)),
                (Product('fwd', {'x': _made('r', 'H'), 'y': _made('logits', 'C')}),
                 Product('dgrad', {'g': _made('dlogits', 'C'), 'dx': _made('dr', 'H')})))
# mlp_step overwrites the parameters, so their values must be read before it runs
IN_STEP = tuple(tuple(one.replaced(before=True) for one in products) for products in IN_GRADIENTS)


def _flops(s: Sizes, array: Argument) -> int:
    return s['B'] * s['H'] * (4 * s['I'] + 6 * s['C'])


declare(mlp_gradients=Kernel(_flops, lambda s: s['B'] * (s['I'] + 12) + 8 * (s['H'] * (s['I'] + 1) + s['C'] * (s['H'] + 1))),
        mlp_step=Kernel(lambda s, array: s['K'] * _flops(s, array),
                        lambda s: s['K'] * (s['B'] * (s['I'] + 12) + 28 * (s['H'] * (s['I'] + 1) + s['C'] * (s['H'] + 1)))))
