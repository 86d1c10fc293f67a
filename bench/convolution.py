"""Time convolutions, pooling, batch norm, softmax and a training step of ResNet9 against PyTorch: python -m bench.convolution

The contestants take turns, from the same weights.  On one thread, the default, a figure is the median of the CPU time of the
calling thread, so other processes disturb it little.  With --threads it is the median of the elapsed time, for an idle machine.
Results and gradients are compared before and after the timed turns: exit status 1 if they differ.
"""
import sys

import numpy as np

from bench.turns import Comparison, Layer, add_layer_flags, contest, give_weights, prepare, print_title
from pyops import nn, optim
from pyops.autograd import Tensor
from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser

PROGRAM = 'bench.convolution'
BATCH, LR = 128, 1e-3
RESNET = f'training step of ResNet9, batch {BATCH}'
LOSSES = 0.05           # tolerance of its losses: after hundreds of steps on one batch the weights differ by more than rounding

# name: (shape of x, layer): the layer by name and arguments, which PyTorch's has, too
LAYERS = {
    'conv 64 -> 64, 3 x 3': ((32, 64, 32, 32), 'Conv2d', (64, 64, 3), {}),
    'conv 64 -> 64, 3 x 3, padding 1': ((32, 64, 32, 32), 'Conv2d', (64, 64, 3), dict(padding=1)),
    'conv 16 -> 8, 3 x 3': ((10, 16, 32, 32), 'Conv2d', (16, 8, 3), {}),
    'conv 32 -> 32, 3 x 3, padding 1': ((128, 32, 4, 4), 'Conv2d', (32, 32, 3), dict(padding=1)),
    'conv 256 -> 256, 3 x 3, padding 1': ((8, 256, 14, 14), 'Conv2d', (256, 256, 3), dict(padding=1)),
    'conv 32 -> 64, 3 x 3, stride 2': ((32, 32, 32, 32), 'Conv2d', (32, 64, 3), dict(padding=1, stride=2)),
    'conv 64 -> 64, 1 x 1': ((16, 64, 32, 32), 'Conv2d', (64, 64, 1), {}),
    'conv 64 channels, depthwise': ((16, 64, 32, 32), 'Conv2d', (64, 64, 3), dict(padding=1, groups=64)),
    'conv1d 64 -> 64, 5': ((16, 64, 500), 'Conv1d', (64, 64, 5), dict(padding=2)),
    'batch norm': ((128, 32, 16, 16), 'BatchNorm2d', (32,), {}),
    'max pool 2 x 2': ((32, 64, 32, 32), 'MaxPool2d', (2,), {}),
    'max pool 3 x 3, stride 2': ((32, 64, 32, 32), 'MaxPool2d', (3, 2, 1), {}),
    'average pool 2 x 2': ((32, 64, 32, 32), 'AvgPool2d', (2,), {}),
    'softmax of rows of 31': ((128, 8, 31, 31), 'Softmax', (-1,), {}),
    'softmax over 8 channels': ((128, 8, 31, 31), 'Softmax', (1,), {}),
}


def resnet9(nn, residual):
    """Return ResNet9 in the layers of `nn`, of pyops or PyTorch.  residual(module): x + module(x)."""
    def block(inputs, outputs, window, stride):
        return nn.Sequential(nn.Conv2d(inputs, outputs, window, stride, (window - 1) // 2), nn.BatchNorm2d(outputs), nn.ReLU())
    return nn.Sequential(
        block(3, 16, 7, 4), block(16, 32, 3, 2), residual(nn.Sequential(block(32, 32, 3, 1), block(32, 32, 3, 1))),
        block(32, 64, 3, 2), block(64, 128, 3, 2), residual(nn.Sequential(block(128, 128, 3, 1), block(128, 128, 3, 1))),
        nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


class TrainingSteps:
    """Training steps of a net of either library on one batch: a call is a step, and returns the loss."""

    def __init__(self, model, optimizer, loss_of, images, labels):
        self.model, self.optimizer, self.loss_of, self.images, self.labels = model, optimizer, loss_of, images, labels

    def __call__(self):
        self.optimizer.zero_grad()
        loss = self.loss_of(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return loss

    def results(self):
        """Return the loss of one more step."""
        return [self()]


def resnets(torch, batch):
    """Return the training steps of ResNet9 in pyops and PyTorch, with its fused Adam, on images of CIFAR-10's shape, from the
    same weights."""
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((batch, 3, 32, 32), 'f'), rng.integers(0, 10, batch).astype(np.int32)
    model = resnet9(nn, nn.Residual)

    class Residual(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return x + self.module(x)
    twin = resnet9(torch.nn, Residual)
    give_weights(model, twin)
    return (TrainingSteps(model, optim.Adam(model.parameters(), lr=LR), nn.CrossEntropyLoss(), Tensor(x), Tensor(labels)),
            TrainingSteps(twin, torch.optim.Adam(twin.parameters(), lr=LR, fused=True), torch.nn.functional.cross_entropy,
                          torch.tensor(x), torch.tensor(labels).long()))


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    add_layer_flags(p)
    args = p.parse_args(argv)
    torch = prepare(args.threads)
    rng, comparison = np.random.default_rng(0), Comparison(PROGRAM)
    print_title(torch, args.threads)
    for name, (shape, layer, arguments, settings) in LAYERS.items():
        names = {f'{name}{", backward" * with_backward}': with_backward for with_backward in (False, True)}
        if not any(args.only in what for what in names):
            continue
        x = rng.standard_normal(shape, 'f')
        ours, theirs = (getattr(library, layer)(*arguments, **settings) for library in (nn, torch.nn))
        give_weights(ours, theirs)
        dy = rng.standard_normal(ours(Tensor(x)).shape, 'f')
        for what, with_backward in names.items():
            if args.only in what:
                contest(comparison, what, Layer(ours, Tensor(x, requires_grad=True), Tensor(dy) if with_backward else None),
                        Layer(theirs, torch.tensor(x, requires_grad=True), torch.tensor(dy) if with_backward else None),
                        args.seconds, args.threads)
    if args.only in RESNET:
        contest(comparison, RESNET, *resnets(torch, BATCH), args.seconds, args.threads, LOSSES)
    return comparison.status()


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
