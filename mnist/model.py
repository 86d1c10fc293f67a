"""A 784-30-10 MLP: two linear layers with a ReLU between, softmax cross entropy; manual gradients.

forward() is a list of calls; backward() is the same list reversed.  All images are resident as bytes in one table; a batch
is given as row indices.
"""
from dataclasses import dataclass

import numpy as np

from pyops import backend, init, ops
from pyops.backend import launch
from pyops.ops import CrossEntropy, MLPGradients, ReLU
from pyops.params import Parameters, Spec


@dataclass(frozen=True)
class Config:
    pixels: int = 784
    hidden: int = 30
    classes: int = 10
    ops: object = ops           # source of the op classes with matrix products: pyops.ops or a quantization.Family


def parameter_specs(config):
    """Return {name: Spec}.  sigma = 1 / sqrt(inputs), so that the outputs of a layer start with variance 1."""
    I, H, C = config.pixels, config.hidden, config.classes
    return {'w1': Spec((I, H), init.normal(I ** -0.5)), 'bias1': Spec((H,), init.zeros()),
            'w2': Spec((C, H), init.normal(H ** -0.5)), 'bias2': Spec((C,), init.zeros())}


class MLP:
    """forward(images, rows, labels) returns loss (1,), logits (B, 10) and ctx; backward(ctx) adds to params.grads.

    images (N, 784) uint8; rows (B,) int64: indices of the batch; labels (B,) int32.
    """

    def __init__(self, config=None, seed=0):
        self.config = config or Config()
        self.params = p = Parameters(parameter_specs(self.config), seed)
        self.linear1 = self.config.ops.PixelLinear(p['w1'], p['bias1'], name='linear1')
        self.relu = ReLU()
        self.linear2 = self.config.ops.Linear(p['w2'], p['bias2'], name='linear2')
        self.loss = CrossEntropy(name='loss')
        self.whole = MLPGradients(p['w1'], p['bias1'], p['w2'], p['bias2'], name='mlp')
        self.one = backend.put(np.ones(1, np.float32))           # the gradient of the loss

    def forward(self, images, rows, labels):
        a,    c1 = self.linear1.forward(images, rows)           # (B, 30)
        r,    c2 = self.relu.forward(a)                         # (B, 30)
        y,    c3 = self.linear2.forward(r)                      # (B, 10)
        loss, c4 = self.loss.forward(y, labels)                 # (1,)
        return loss, y, [c1, c2, c3, c4]

    def step(self, images, rows, labels, adam):
        """Run zero_grads, forward, backward and adam.step() as one op and return the loss (1,).

        labels (N,) int32 of all images.  Always float32, whatever quantization config.ops applies.
        """
        return self.whole.step(images, rows, labels, adam)

    def steps(self, images, rows, labels, adam):
        """Run step() on each row of `rows` (K, B) as one op and return losses (K,), and norms (K,) or None."""
        return self.whole.steps(images, rows, labels, adam)

    def predict(self, images, classes):
        """Write the class of each image into `classes` (N,) int32."""
        a, _ = self.linear1.forward(images, backend.put(np.arange(len(images))), gradients=False)
        y, _ = self.linear2.forward(self.relu.forward(a)[0])
        launch('argmax', classes, y, len(y), self.config.classes)

    def backward(self, ctx, dloss=None):
        """Add to params.grads.   dloss (1,): the gradient of the loss, None for 1"""
        dy = self.loss.backward(self.one if dloss is None else dloss, ctx.pop())
        dr = self.linear2.backward(dy, ctx.pop())
        da = self.relu.backward(dr, ctx.pop())
        self.linear1.backward(da, ctx.pop())
