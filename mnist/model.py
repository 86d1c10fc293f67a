"""784-30-10: two linear layers with a rectifier between, softmax cross entropy; gradients by hand.

Forward is a list of calls, backward the same list reversed.  The images stay bytes in one table; a batch is the numbers
of its rows.
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
    ops: object = ops           # what has matrix products is made from it: pyops.ops, or a family of pyops.quantization


def parameter_specs(config):
    """name -> shape and initial value; sigma = 1 / sqrt(inputs), so that a layer's outputs begin with variance 1."""
    I, H, C = config.pixels, config.hidden, config.classes
    return {'w1': Spec((I, H), init.normal(I ** -0.5)), 'bias1': Spec((H,), init.zeros()),
            'w2': Spec((C, H), init.normal(H ** -0.5)), 'bias2': Spec((C,), init.zeros())}


class MLP:
    """forward(images, rows, labels) -> loss (1,), logits (B, 10), ctx;  backward(ctx) adds to params.grads.

    images (N, 784) uint8, rows (B,) int64: the batch;  labels (B,) int32.
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
        """-> loss (1,): zero_grads, forward, backward and adam.step() as one op, on labels (N,) of all images; it rounds
        nothing, whatever the layers are made from."""
        return self.whole.step(images, rows, labels, adam)

    def predict(self, images, classes):
        """Write the class of each image, (N,) int32, into `classes`."""
        a, _ = self.linear1.forward(images, backend.put(np.arange(len(images))), gradients=False)
        y, _ = self.linear2.forward(self.relu.forward(a)[0])
        launch('argmax', classes, y, len(y), self.config.classes)

    def backward(self, ctx):
        dy = self.loss.backward(self.one, ctx.pop())
        dr = self.linear2.backward(dy, ctx.pop())
        da = self.relu.backward(dr, ctx.pop())
        self.linear1.backward(da, ctx.pop())
