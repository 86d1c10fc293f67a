"""Train a network on Tensors with several processes: each computes the gradients of its share of every batch.

    python examples/data_parallel.py
    mpirun -n 2 python examples/data_parallel.py
"""
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))        # this source tree, from any current folder
from pyops import distributed, nn
from pyops import functional as F
from pyops.autograd import Tensor
from pyops.errors import exits_cleanly
from pyops.optim import Adam

SAMPLES, BATCH, STEPS = 512, 64, 101


def main():
    distributed.init()
    rng = np.random.default_rng(0)                                  # the same numbers on all ranks
    x = rng.standard_normal((SAMPLES, 8)).astype(np.float32)
    y = ((x ** 2).sum(1) > 8).astype(np.int32)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = Adam(model.parameters(), 0.01, max_norm=1.0)
    for step in range(STEPS):
        rows = rng.permutation(SAMPLES)[:BATCH]
        mine = rows[distributed.rank()::distributed.size()]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(Tensor(x[mine])), Tensor(y[mine]))
        loss.backward()
        distributed.average_gradients(model.parameters())
        optimizer.step()
        if step % 20 == 0:
            losses = distributed.gather(loss.item())
            print(f'step {step}: loss {sum(losses) / len(losses):.4f}', flush=True)
    for parameter in model.parameters():
        distributed.same_bits(parameter.numpy(), parameter.name)
    print('all ranks have the same parameters')


if __name__ == '__main__':
    with exits_cleanly('data_parallel', ranks=True):                # only rank 0 prints
        main()
