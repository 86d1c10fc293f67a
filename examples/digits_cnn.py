"""Train a small convolutional network on handwritten digits: 99 % of MNIST's test file after three epochs.

    python examples/digits_cnn.py                       the embedded digits, a few seconds
    python examples/digits_cnn.py data -e 3             MNIST in the folder data
"""
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))        # this source tree, from any current folder

from pyops import flags, nn, optim
from pyops import functional as F
from pyops.data import DataLoader, MNISTDataset
from pyops.errors import exits_cleanly
from pyops.nn.utils import accuracy


class ConvNet(nn.Module):
    """Images of 28 x 28 -> logits (N, 10): two convolutions of 5 x 5, each with the maximum of 2 x 2, and two layers."""

    def __init__(self, width=16, hidden=100):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 5)
        self.conv2 = nn.Conv2d(width, 2 * width, 5)
        self.linear1 = nn.Linear(2 * width * 16, hidden)
        self.linear2 = nn.Linear(hidden, 10)

    def forward(self, x):
        x = F.relu(F.max_pool2d(self.conv1(x.reshape(-1, 1, 28, 28)), 2))       # (N, width, 12, 12)
        x = F.relu(F.max_pool2d(self.conv2(x), 2))                              # (N, 2 width, 4, 4)
        return self.linear2(F.relu(self.linear1(x.flatten(1))))


def train(model, optimizer, batches, lr, steps):
    """Take a step per batch of (images, labels), with a learning rate that falls linearly to 0.  Return the losses."""
    losses = []
    for step, (images, labels) in enumerate(batches):
        optimizer.param_groups[0]['lr'] = lr * (1 - step / steps)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_optimizer(model, lr):
    return optim.Adam(model.parameters(), lr)


def main(argv=None):
    p = flags.ArgumentParser(prog='digits_cnn.py', description='Train a convolutional network on handwritten digits.')
    p.add_argument('folder', nargs='?', help='the folder with MNIST (default: the embedded digits)')
    p.add_argument('-e', '--epochs', type=flags.int_up_to(1000), default=1, metavar='N', help='default %(default)s')
    p.add_argument('-b', '--batch-size', type=flags.int_up_to(4096), default=100, metavar='N', help='default %(default)s')
    p.add_argument('-l', '--lr', type=flags.positive_float, default=0.003, help='learning rate (default %(default)s)')
    p.add_argument('-s', '--seed', type=flags.non_negative_int, default=0, help='of weights and order (default %(default)s)')
    args = p.parse_args(argv)
    training, test = (MNISTDataset(is_train, args.folder, embedded=not args.folder) for is_train in (True, False))
    model = ConvNet().reset_parameters(args.seed)
    loader = DataLoader(training, args.batch_size, shuffle=True, seed=args.seed)
    start = time.perf_counter()
    batches = (batch for _ in range(args.epochs) for batch in loader)
    losses = train(model, make_optimizer(model, args.lr), batches, args.lr, args.epochs * len(loader))
    print(f'{time.perf_counter() - start:.1f} s of training', file=sys.stderr)
    for epoch in range(args.epochs):
        print(f'epoch {epoch + 1} loss : {np.mean(losses[epoch * len(loader):(epoch + 1) * len(loader)]):.4f}')
    print(f'accuracy : {accuracy(model, DataLoader(test, 500)):.4f}')


if __name__ == '__main__':
    with exits_cleanly('digits_cnn.py'):
        main()
