"""The MLP of mnist/model.py on Tensors: autograd replaces its manual backward, with bit-identical gradients.

    python examples/mlp_on_tensors.py
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))        # this source tree, from any current folder
from mnist.model import MLP
from pyops import functional as F
from pyops import nn
from pyops.autograd import apply
from pyops.data import mnist
from pyops.data.batches import batches
from pyops.ops import PixelLinear
from pyops.optim import Adam


class MLPOnTensors(nn.Module):
    """784-30-10: two linear layers with a ReLU between, softmax cross entropy."""

    def __init__(self, manual):
        values = manual.params.arrays()                         # the same initial values
        self.w1, self.bias1 = nn.Parameter(values['w1']), nn.Parameter(values['bias1'])
        self.w2, self.bias2 = nn.Parameter(values['w2']), nn.Parameter(values['bias2'])

    def forward(self, images, rows, labels):
        h = F.relu(apply(PixelLinear, images, rows, weight=self.w1, bias=self.bias1))       # (B, 30)
        return F.cross_entropy(F.linear(h, self.w2, self.bias2), labels)                    # ()


digits = mnist.load(embedded=True)
images, labels = digits.train_images, digits.train_labels.astype(np.int32)
manual = MLP(seed=0)
on_tensors = MLPOnTensors(manual)
optimizers = Adam(manual.params, 0.001, max_norm=1.0), Adam(on_tensors.parameters(), 0.001, max_norm=1.0)

for step, rows in enumerate(batches(len(images), 100, seed=0, epoch=0), 1):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_manual, _, ctx = manual.forward(images, rows, labels[rows])
    manual.backward(ctx)
    loss = on_tensors(images, rows, labels[rows])
    loss.backward()
    for name, parameter in on_tensors.named_parameters():
        assert (parameter.grad.numpy() == manual.params[name].grad).all(), name
    for optimizer in optimizers:
        optimizer.step()
    if step in (1, 10, 100):
        print(f'step {step}: loss {loss.item():.6f} on Tensors, {loss_manual[0]:.6f} by hand')

for name, parameter in on_tensors.named_parameters():
    print(f'{name} {parameter.shape}: all {step} gradients have the same bits, and so has the parameter:',
          (parameter.numpy() == manual.params[name].value).all())
