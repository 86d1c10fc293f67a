"""A short training run whose weights have the same bits on every machine with x86-64: the check of pyops.set_exact.

Beside kernels it uses only integers, and products of numbers with few bits: no function of libm or numpy whose last bit differs
between machines.  So the initial values come from Philox, not from numpy's generators.  docs/determinism.md has the guarantee.
"""
from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from pyops import backend, nn, optim
from pyops import functional as F
from pyops.philox import philox4x32
from pyops.text import embedded

if TYPE_CHECKING:
    from pyops.autograd import Tensor

STEPS, LENGTH, WINDOWS = 100, 24, 16        # of a run; letters in a window; windows in a batch
SYMBOLS, SIZE = 128, 32                     # letters of ASCII; size of a hidden state
EXPECTED = '0cfb48d617cd76e3'               # the first digits of digest(), on every machine


class _Model(nn.Module):
    """A language model of letters: a GRU, a block of a transformer, an output layer;  ids (T, B) -> logits (T, B, SYMBOLS)."""

    def __init__(self) -> None:
        self.embedding = nn.Embedding(SYMBOLS, SIZE)
        self.gru = nn.GRU(SIZE, SIZE)
        self.block = nn.TransformerEncoderLayer(SIZE, 4, 2 * SIZE, dropout=0.1)
        self.output = nn.Linear(SIZE, SYMBOLS)
        shapes = {name: parameter.shape for name, parameter in self.named_parameters()}
        self.load_state_dict({name: _initial(shape, number) for number, (name, shape) in enumerate(shapes.items())})

    def forward(self, ids: np.ndarray) -> Tensor:
        h, _ = self.gru(self.embedding(ids))
        return self.output(self.block(h, is_causal=True))


def _initial(shape: tuple[int, ...], number: int) -> np.ndarray:
    """Return float32 multiples of 2^-10, uniform in [-1/4, 1/4).   number: of the parameter"""
    n = int(np.prod(shape))
    counter = np.zeros((-(-n // 4), 4), np.uint64)
    counter[:, 0] = np.arange(len(counter))
    words = philox4x32(counter, (number, 0)).reshape(-1)[:n]
    return ((words >> np.uint32(23)).astype(np.float32) / 1024 - 0.25).reshape(shape)


def digest(steps: int = STEPS) -> str:
    """Train on the embedded corpus with exact kernels, and return the SHA-256 of the weights in hexadecimal.

    It runs on the CPU in float32, and leaves these settings as they were.
    ValueError if the library has no exact kernels, or if the precision is bf16
    """
    was = backend.HOST.exact
    backend.HOST.exact = True
    try:
        with backend.on(backend.HOST):
            return _train(steps)
    finally:
        backend.HOST.exact = was


def _train(steps: int) -> str:
    text = '\n'.join(english for english, _ in embedded.pairs()[:3000]).encode('ascii', 'replace')
    letters = np.frombuffer(text, np.uint8).astype(np.int32)
    model, count = _Model(), LENGTH * WINDOWS
    optimizer = optim.AdamW(model.parameters(), 1 / 256, max_norm=1.0)
    for step in range(steps):
        batch = letters[step * count:(step + 1) * count + 1]
        ids, labels = (part.reshape(WINDOWS, LENGTH).T.copy() for part in (batch[:-1], batch[1:]))
        optimizer.zero_grad()
        F.cross_entropy(model(ids).reshape(count, SYMBOLS), labels.reshape(-1)).backward()
        optimizer.step()
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.numpy().astype('<f4').tobytes())
    return found.hexdigest()
