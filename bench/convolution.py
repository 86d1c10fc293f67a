"""Time convolutions, pooling, batch norm, softmax and a training step of ResNet9 against PyTorch: python -m bench.convolution

The contestants take turns.  On one thread, the default, a figure is the median of the CPU time of the calling thread, so other
processes disturb it little.  With --threads it is the median of the elapsed time, for an idle machine.
"""
import gc
import time

import numpy as np

from pyops import backend, nn, optim
from pyops.autograd import Tensor
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, positive_int

PROGRAM = 'bench.convolution'

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


def medians(runs, seconds, clock=time.thread_time):
    """Return the median time in seconds of each function, taking turns for about `seconds`, at least three times each.

    clock: by default the CPU time of the calling thread.
    """
    times = [[] for _ in runs]
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[0]) < 3:
        for run, found in zip(runs, times, strict=True):
            start = clock()
            run()
            found.append(clock() - start)
    return [float(np.median(found)) for found in times]


def forward_and_backward(layer, x, dy, with_backward):
    """Return a function that runs a layer of pyops on Tensors."""
    x, dy = Tensor(x, requires_grad=True), Tensor(dy)

    def run():
        y = layer(x)
        if with_backward:
            y.backward(dy)
    return run


def of_torch(torch, layer, x, dy, with_backward):
    """Return a function that runs a layer of PyTorch."""
    x, dy = torch.tensor(x, requires_grad=True), torch.tensor(dy)

    def run():
        y = layer(x)
        if with_backward:
            y.backward(dy)
    return run


def training_steps(torch, batch):
    """Return the training steps of ResNet9 in pyops and PyTorch on images of CIFAR-10's shape."""
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((batch, 3, 32, 32), 'f'), rng.integers(0, 10, batch).astype(np.int32)
    model, loss_of = resnet9(nn, nn.Residual), nn.CrossEntropyLoss()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    images, classes = Tensor(x), Tensor(labels)

    def ours():
        optimizer.zero_grad()
        loss_of(model(images), classes).backward()
        optimizer.step()

    class Residual(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return x + self.module(x)
    twin = resnet9(torch.nn, Residual)
    adam = torch.optim.Adam(twin.parameters(), lr=1e-3)
    twin_images, twin_classes = torch.tensor(x), torch.tensor(labels).long()

    def theirs():
        adam.zero_grad()
        torch.nn.functional.cross_entropy(twin(twin_images), twin_classes).backward()
        adam.step()
    return ours, theirs


def line(name, ours, theirs):
    print(f'{name:46}{1e3 * ours:9.2f} ms{1e3 * theirs:9.2f} ms{theirs / ours:8.2f} x', flush=True)


def main(argv=None):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description=__doc__.splitlines()[0])
    p.add_argument('--seconds', type=float, default=2.0, metavar='S', help='for each line (default 2)')
    p.add_argument('--only', default='', metavar='TEXT', help='only lines whose name contains this text')
    p.add_argument('--threads', type=positive_int, default=1, metavar='N', help='of both (default 1)')
    args = p.parse_args(argv)
    try:
        import torch
    except ImportError:
        raise UserError(f'{PROGRAM} compares with PyTorch, which is not installed: pip install torch') from None
    gc.collect()
    gc.freeze()             # the garbage collector would visit PyTorch's modules again and again
    torch.set_num_threads(args.threads)
    backend.set_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    threads = f'{args.threads} thread{"s" * (args.threads > 1)}'
    rng = np.random.default_rng(0)
    about = f'{backend.isa()}, PyTorch {torch.__version__}, {threads}'
    print(f'{about:46}{"pyops":>12}{"PyTorch":>12}{"ratio":>10}')
    for name, (shape, layer, arguments, settings) in LAYERS.items():
        x = rng.standard_normal(shape, 'f')
        ours, theirs = (getattr(library, layer)(*arguments, **settings) for library in (nn, torch.nn))
        dy = rng.standard_normal(ours(Tensor(x)).shape, 'f')
        for with_backward in (False, True):
            what = f'{name}{", backward" if with_backward else ""}'
            if args.only in what:
                line(what, *medians([forward_and_backward(ours, x, dy, with_backward),
                                     of_torch(torch, theirs, x, dy, with_backward)], args.seconds, clock))
    if args.only in 'training step of ResNet9':
        line('training step of ResNet9, batch 128', *medians(training_steps(torch, 128), args.seconds, clock))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
