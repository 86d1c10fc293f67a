"""Train a small vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929) on handwritten digits.

    python examples/vision_transformer.py               the embedded digits, a few seconds
    python examples/vision_transformer.py data -e 5     MNIST in the folder data
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))        # this source tree, from any current folder

from pyops import flags, nn, optim
from pyops import functional as F
from pyops.data import DataLoader, MNISTDataset
from pyops.errors import exits_cleanly
from pyops.nn.utils import accuracy


class VisionTransformer(nn.Module):
    """Images of 28 x 28 -> logits (N, 10): 16 patches of 7 x 7, a transformer over them, the mean of its outputs."""

    def __init__(self, width=32, heads=4, layers=2):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, 7)
        self.positions = nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, 'gelu', batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        tokens = self.patches(images.reshape(-1, 1, 28, 28)).flatten(2).transpose(1, 2)            # (N, 16, width)
        return self.head(self.encoder(tokens + self.positions.weight).mean(1))


def train(model, optimizer, batches, lr, warmup=20):
    """Take a step per batch of (images, labels), with a learning rate that rises for `warmup` steps.  Return the losses."""
    losses = []
    for step, (images, labels) in enumerate(batches, 1):
        optimizer.param_groups[0]['lr'] = lr * min(step / warmup, 1)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def make_optimizer(model, lr):
    return optim.AdamW(model.parameters(), lr, weight_decay=0.01)


def main(argv=None):
    p = flags.ArgumentParser(prog='vision_transformer.py', description='Train a vision transformer on handwritten digits.')
    p.add_argument('folder', nargs='?', help='the folder with MNIST (default: the embedded digits)')
    p.add_argument('-e', '--epochs', type=flags.int_up_to(1000), default=1, metavar='N', help='default %(default)s')
    p.add_argument('-b', '--batch-size', type=flags.int_up_to(4096), default=50, metavar='N', help='default %(default)s')
    p.add_argument('-l', '--lr', type=flags.positive_float, default=0.003, help='learning rate (default %(default)s)')
    p.add_argument('--width', type=flags.int_up_to(4096), default=32, metavar='N', help='size of a token')
    args = p.parse_args(argv)
    training, test = (MNISTDataset(is_train, args.folder, embedded=not args.folder) for is_train in (True, False))
    model = VisionTransformer(args.width)
    loader = DataLoader(training, args.batch_size, shuffle=True, drop_last=True)
    losses = train(model, make_optimizer(model, args.lr), (batch for _ in range(args.epochs) for batch in loader), args.lr)
    for step in range(49, len(losses), 50):
        print(f'step {step + 1} loss : {np.mean(losses[step - 49:step + 1]):.4f}')
    print(f'accuracy : {accuracy(model, DataLoader(test, 500)):.3f}')


if __name__ == '__main__':
    with exits_cleanly('vision_transformer.py'):
        main()
