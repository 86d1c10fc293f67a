"""The mnist program in idiomatic PyTorch: contestant in the benchmarks, reference in the tests.

    python -m bench.torch_mnist [--compile]         10 epochs, the lines of mnist.train
"""
import sys

import torch
from torch import nn

from bench.torch_step import make_step


class TorchMLP(nn.Module):
    def __init__(self, hidden=30):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(784, hidden), nn.Linear(hidden, 10)

    def forward(self, x, labels):
        """x (B, 784) float, labels (B,) int64 -> mean loss."""
        return nn.functional.cross_entropy(self.logits(x), labels)

    def logits(self, x):
        return self.linear2(torch.relu(self.linear1(x)))

    def named(self):
        """Return {our parameter name: this module's parameter}, in our layout."""
        return {'w1': self.linear1.weight.T, 'bias1': self.linear1.bias, 'w2': self.linear2.weight, 'bias2': self.linear2.bias}


def main(epochs=10, batch_size=100):
    from pyops.data import mnist
    torch.manual_seed(0)
    digits = mnist.load()
    (x, labels), (others, classes) = ((torch.tensor(images).float() / 255, torch.tensor(of_images).long())
                                      for images, of_images in digits.parts())
    model = TorchMLP()
    step = make_step(torch.compile(model) if '--compile' in sys.argv else model, lr=0.001)
    for epoch in range(epochs):
        loss_sum, order = 0.0, torch.randperm(len(x))
        for rows in order.split(batch_size):
            loss_sum += step(x[rows], labels[rows]).item() * len(rows)
        with torch.no_grad():
            correct = (model.logits(others).argmax(1) == classes).sum().item()
        print(f'epoch : {epoch} [{len(x)}/{len(x)}] loss : {loss_sum / len(x):.6f}\n'
              f'evaluating :  [{len(others)}/{len(others)}] correct : {correct}', flush=True)


if __name__ == '__main__':
    main()
