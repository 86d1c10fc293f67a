"""MLPGradients: a classifier of pixels with one hidden layer, its loss and all its gradients as one op, or its whole training
step."""
from typing import NamedTuple

import numpy as np

from pyops.backend import axes, check, check_parameter, empty, launch, location, work
from pyops.backend.kernels import Kernel, declare
from pyops.ops.cross_entropy import CrossEntropy


class MLPGradients:
    """Take rows of a table of pixels through two linear layers, and the softmax cross entropy with the labels of the rows.

    Shapes   images (N, I) uint8;  rows (B,) int64;  labels (N,) int32 in [0, C), of all images;  loss, dloss (1,)
             w1 (I, H), b1 (H,), w2 (C, H), b2 (C,);  B at least 1, H and C at most 128
    Forward  x = scale images[rows];  r = max(x w1 + b1, 0);  logits = r w2' + b2
             loss = mean over b of -log softmax(logits[b])[labels[rows[b]]]
    Backward dlogits = dloss / B * (softmax(logits) - onehot(labels[rows]));  da = dlogits w2 where r > 0, else 0
             dw2 += dlogits' r;  db2 += sum_b dlogits[b];  dw1 += x' da;  db1 += sum_b da[b];  pixels have no gradient: None
    Saves    the four gradients for dloss = 1, formed in forward; backward multiplies them with dloss and adds
    Errors   ValueError for a row outside the table and for a label outside the classes, with their positions
    Source   Linear, ReLU and CrossEntropy on PixelLinear in one: on a GPU a batch of digits is less work than the start of
             a kernel
    Notes    for training there are gradients(), which needs no backward, and step(), which needs no optimizer behind it.
    """

    MOST = 128          # of H and C

    class Ctx(NamedTuple):
        dw1: np.ndarray
        db1: np.ndarray
        dw2: np.ndarray
        db2: np.ndarray

    def __init__(self, w1, b1, w2, b2, scale=1 / 255, name=None):
        self.parameters, self.scale, self.name = (w1, b1, w2, b2), scale, name or w1.owner
        (I, H), (C, _) = axes(w1.name, w1.value, 'I H'), axes(w2.name, w2.value, 'C H')
        self.sizes = I, H, C
        for parameter, shape in zip(self.parameters, ((I, H), (H,), (C, H), (C,)), strict=True):
            check_parameter(parameter, shape)

    def forward(self, images, rows, labels):
        grads = [empty(p.value.shape, name=f'{self.name}.d{short}')
                 for p, short in zip(self.parameters, self.Ctx._fields, strict=True)]
        return self._run(images, rows, labels, grads), self.Ctx(*grads)

    def backward(self, dloss, ctx):
        check('dloss', dloss, (1,))
        for p, grad in zip(self.parameters, ctx, strict=True):
            launch('axpy', p.grad, grad, dloss, grad.size)

    def gradients(self, images, rows, labels):
        """-> loss (1,).  OVERWRITES the gradients of the parameters, which so need not be zeroed."""
        return self._run(images, rows, labels, [p.grad for p in self.parameters])

    def step(self, images, rows, labels, adam):
        """-> loss (1,): gradients() and adam.step() as one op.  adam: a pyops.optim.Adam over a Parameters that holds the
        four parameters of this op and no others."""
        N, B, I, H, C = self._sizes(images, rows, labels)
        params, starts = adam.params, [location(p.value) for p in self.parameters]
        if params is None or sorted(location(params[name].value) for name in params) != sorted(starts):
            raise ValueError(f'{self.name}: want an optimizer over Parameters that hold '
                             f'{", ".join(p.name for p in self.parameters)} of this op and no others')
        places = [(start - location(params.values)) // 4 for start in starts]
        loss = empty(1, name=f'{self.name}.loss')
        launch('mlp_step', loss, adam.norm if adam.max_norm else None, adam.count,
               params.values, params.grads, params.m, params.v, images, rows, labels, adam.lr, work('mlp_step', B, I, H, C),
               N, B, I, H, C, *places, self.scale,
               adam.max_norm or 1.0, adam.beta1, adam.beta2, adam.eps, adam.weight_decay)
        return loss

    def _run(self, images, rows, labels, grads):
        N, B, I, H, C = self._sizes(images, rows, labels)
        loss = empty(1, name=f'{self.name}.loss')
        launch('mlp_gradients', loss, *grads, images, rows, labels, *(p.value for p in self.parameters),
               work('mlp_gradients', B, I, H, C), N, B, I, H, C, self.scale)
        return loss

    def _sizes(self, images, rows, labels):
        (I, H, C), (N, _), (B,) = self.sizes, axes('images', images, 'N I'), axes('rows', rows, 'B')
        check('images', images, (N, I), np.uint8)
        check('rows', rows, (B,), np.int64)
        check('labels', labels, (N,), np.int32)
        return N, B, I, H, C

    @staticmethod
    def reference(images, rows, labels, w1, b1, w2, b2, scale=1 / 255):
        r = np.maximum(scale * images[rows] @ w1 + b1, 0)
        return CrossEntropy.reference(r @ w2.T + b2, labels[rows])

    @staticmethod
    def example(normal):
        images, rows = np.arange(24, dtype=np.uint8).reshape(4, 6) * 10, np.array([2, 0, 2])
        return ([images, rows, np.array([1, 0, 2, 0], np.int32)],
                dict(w1=normal(6, 5), b1=normal(5), w2=normal(3, 5), b2=normal(3)))


def _flops(s, array):
    return s['B'] * s['H'] * (4 * s['I'] + 6 * s['C'])


declare(mlp_gradients=Kernel(_flops, lambda s: s['B'] * (s['I'] + 12) + 8 * (s['H'] * (s['I'] + 1) + s['C'] * (s['H'] + 1))),
        mlp_step=Kernel(_flops, lambda s: s['B'] * (s['I'] + 12) + 28 * (s['H'] * (s['I'] + 1) + s['C'] * (s['H'] + 1))))
