"""Train a small residual network (He et al. 2015, arXiv:1512.03385) on CIFAR-10, or on drawn images of the same shape.

    python examples/residual_cnn.py                     ten classes of coloured stripes, a few seconds
    python examples/residual_cnn.py data -e 10          CIFAR-10, unpacked in the folder data
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))        # this source tree, from any current folder

from pyops import flags, nn, optim
from pyops import functional as F
from pyops.data import CIFAR10Dataset, DataLoader, RandomCrop, RandomFlipHorizontal
from pyops.errors import exits_cleanly
from pyops.nn.utils import accuracy


class Block(nn.Module):
    """y = relu(f(x) + shortcut(x)), f of two convolutions with batch norm; the shortcut changes channels and size."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images (N, 3, H, W) -> logits (N, 10).  Each stage after the first halves the size and doubles the channels."""

    def __init__(self, width=8, stages=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.ModuleList([Block(width, width, 1)])
        for i in range(1, stages):
            self.blocks.append(Block(width * 2 ** (i - 1), width * 2 ** i, 2))
        self.head = nn.Linear(width * 2 ** (stages - 1), 10)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def train(model, optimizer, batches):
    """Take a step per batch of (images, labels) and return the losses."""
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_optimizer(model, lr):
    return optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=0.0005, nesterov=True)


def stripes(n, seed):
    """Return n images of stripes (n, 3072) uint8, and labels (n,): class k has stripes at an angle of 18 k degrees."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n, dtype=np.uint8) % 10
    angles, phases = np.pi / 10 * labels[:, None, None], rng.uniform(0, 2 * np.pi, (n, 1, 1))
    y, x = np.mgrid[:32, :32]
    waves = np.cos(0.8 * (x * np.cos(angles) + y * np.sin(angles)) + phases)                # (n, 32, 32)
    colours = rng.uniform(30, 100, (n, 3, 1, 1))
    images = 128 + colours * waves[:, None] + rng.normal(0, 30, (n, 3, 32, 32))
    return images.clip(0, 255).astype(np.uint8).reshape(n, -1), labels


def datasets(folder):
    """Return the training and the test dataset: CIFAR-10 in `folder`, or stripes without one."""
    transforms = [RandomCrop(4)]
    if folder:
        transforms.append(RandomFlipHorizontal())
        return CIFAR10Dataset(folder, transforms=transforms), CIFAR10Dataset(folder, train=False)
    return CIFAR10Dataset.of(*stripes(1000, 0), transforms), CIFAR10Dataset.of(*stripes(200, 1))


def main(argv=None):
    p = flags.ArgumentParser(prog='residual_cnn.py', description='Train a small residual network on images.')
    p.add_argument('folder', nargs='?', help='the folder with CIFAR-10 (default: draw images)')
    p.add_argument('-e', '--epochs', type=flags.int_up_to(1000), default=2, metavar='N', help='default %(default)s')
    p.add_argument('-b', '--batch-size', type=flags.int_up_to(4096), default=50, metavar='N', help='default %(default)s')
    p.add_argument('-l', '--lr', type=flags.positive_float, default=0.05, help='learning rate (default %(default)s)')
    p.add_argument('--width', type=flags.int_up_to(512), default=8, metavar='N', help='channels of the first stage')
    args = p.parse_args(argv)
    training, test = datasets(args.folder)
    model = ResNet(args.width)
    optimizer, loader = make_optimizer(model, args.lr), DataLoader(training, args.batch_size, shuffle=True, num_workers=1)
    for epoch in range(args.epochs):
        loss = np.mean(train(model, optimizer, loader))
        print(f'epoch {epoch + 1} loss : {loss:.4f}  accuracy : {accuracy(model, DataLoader(test, 200)):.3f}', flush=True)


if __name__ == '__main__':
    with exits_cleanly('residual_cnn.py'):
        main()
