"""MLPResNet: linear layers with residual connections.  Modules on Tensors; autograd computes the gradients."""
from pyops import nn

NORMS = {'batch': nn.BatchNorm1d, 'layer': nn.LayerNorm1d}


class Branch(nn.Module):
    """The branch of a residual block: linear, norm, ReLU, dropout, linear, norm;  x, y (B, hidden), half as wide inside."""

    def __init__(self, hidden, norm, dropout):
        between = max(hidden // 2, 1)
        self.linear1, self.norm1, self.relu = nn.Linear(hidden, between), NORMS[norm](between), nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.linear2, self.norm2 = nn.Linear(between, hidden), NORMS[norm](hidden)

    def forward(self, x):
        h = self.dropout(self.relu(self.norm1(self.linear1(x))))
        return self.norm2(self.linear2(h))


class MLPResNet(nn.Module):
    """A linear layer, blocks of relu(x + branch(x)), a linear layer;  x (B, ...) of `pixels` values each -> (B, classes)."""

    def __init__(self, pixels=784, hidden=100, blocks=3, classes=10, norm='batch', dropout=0.1):
        self.flatten, self.linear1, self.relu = nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU()
        self.blocks = [nn.Sequential(nn.Residual(Branch(hidden, norm, dropout)), nn.ReLU()) for _ in range(blocks)]
        self.linear2 = nn.Linear(hidden, classes)

    def forward(self, x):
        h = self.relu(self.linear1(self.flatten(x)))
        for block in self.blocks:
            h = block(h)
        return self.linear2(h)
