"""The GRU of the CUDA library, on the emulator: blocks exchange the results of a step as a cluster, or through memory."""
import ctypes
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulated import BF16, FP32, LIBRARY, TF32, call, library, real

from pyops.backend import to_bf16
from pyops.backend.arrays import from_bf16

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason='make emulated')

BY_DEVICE, GLOBAL = range(2)                            # of pyops_set_exchange


@pytest.fixture(autouse=True)
def defaults():
    yield
    library().pyops_set_precision(FP32)
    library().pyops_set_exchange(BY_DEVICE)


class Gru:
    """Random inputs of a GRU without an input product, and the results of forward and backward.

    lengths: of the sequences, in packed rows; None: T steps each.   stored: whether activations are bfloat16
    """

    def __init__(self, T, B, H, before=False, h0=True, lengths=None, reverse=False, stored=False):
        rng = np.random.default_rng([T, B, H, before])
        self.offsets = None if lengths is None else np.array([0, *np.cumsum(lengths)], np.int32)
        N = 0 if lengths is None else sum(lengths)
        self.sizes, self.flags, rows = (T, B, N, 0, H), (before, reverse), N or T * B

        def random(*shape):
            return rng.standard_normal(shape).astype(np.float32)
        self.a, self.w, self.bias = random(rows, 3 * H), random(3 * H, H) / np.float32(np.sqrt(H)), random(3 * H)
        self.h0 = random(B, H) if h0 else None
        self.dh, self.dh_last = random(rows, H), random(B, H)
        self.rows, self.stored = rows, stored
        if stored:
            self.a, self.w, self.dh = map(to_bf16, (self.a, self.w, self.dh))

    def run(self, exchange):
        """Return h, gates, last, dgates, dh0, dw_hh and db_hh, and for both directions whether counters were used."""
        library().pyops_set_exchange(exchange)
        T, B, _, _, H = self.sizes
        h, gates, dgates = (np.full((self.rows, n * H), np.nan, np.float32) for n in (1, 4, 4))
        if self.stored:
            h, gates, dgates = map(to_bf16, (h, gates, dgates))
        last, dh0 = (np.full((B, H), np.nan, np.float32) if given is not None else None for given in (self.offsets, self.h0))
        dw, db = np.zeros((3 * H, H), np.float32), np.zeros(3 * H, np.float32)
        used = []
        for name in 'forward', 'backward':
            size = getattr(library(), f'pyops_gru_{name}_work')
            size.argtypes, size.restype = [ctypes.c_int64] * 5, ctypes.c_int64
            work = np.zeros(size(*self.sizes), np.float32)
            if name == 'forward':
                call('gru_forward', real(h), real(gates), last, None, real(self.a), self.h0, None, self.offsets, None,
                     real(self.w), None, self.bias, work, *self.sizes, *self.flags)
                first = 2 * B * H if self.stored else 0
            else:
                call('gru_backward', None, dh0, None, dw, None, db, real(dgates), real(self.dh), self.dh_last, None, self.h0,
                     None, self.offsets, None, real(self.w), real(h), real(gates), work, *self.sizes, *self.flags)
                first = self.rows * H + B * H
            used.append(bool(work[first:].view(np.uint32).any()))
        if self.stored:
            h, gates, dgates = map(from_bf16, (h, gates, dgates))
        return [x for x in (h, gates, last, dgates, dh0, dw, db) if x is not None], used


def check_equal_bits(gru, *, as_cluster=True):
    """Require finite results with the same bits by both exchanges; only the one through memory uses counters."""
    by_device, used = gru.run(BY_DEVICE)
    assert used == [not as_cluster] * 2
    through_memory, used = gru.run(GLOBAL)
    assert used == [True, True]
    for ours, theirs in zip(by_device, through_memory, strict=True):
        assert np.isfinite(theirs).all()
        assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


# (T, B, H): a team of 2 or 4 blocks with one chunk of rows, ragged rows and units, and several chunks; the device has 4
# multiprocessors
@pytest.mark.parametrize('before', (False, True), ids=('reset after', 'reset before'))
@pytest.mark.parametrize('p,stored', ((FP32, False), (TF32, False), (BF16, False), (BF16, True)),
                         ids=('fp32', 'tf32', 'bf16', 'stored as bf16'))
@pytest.mark.parametrize('T,B,H', [(4, 8, 32), (3, 5, 30), (5, 3, 16), (4, 45, 29)])
def test_a_cluster_computes_the_bits_of_blocks_that_exchange_through_memory(T, B, H, p, stored, before):
    library().pyops_set_precision(p)
    check_equal_bits(Gru(T, B, H, before, h0=T != 4, stored=stored))


@pytest.mark.parametrize('before,h0,reverse,stored', list(itertools.product((False, True), repeat=4)))
def test_a_cluster_computes_packed_rows_of_any_length(before, h0, reverse, stored):
    lengths = [4, 1, 3, 0, 2, 4, 1, 1, *[1] * 8, *[2, 5, 3] * 8, 0, 1]         # teams of 5, 5 and fewer steps, several chunks
    check_equal_bits(Gru(5, len(lengths), 30, before, h0, lengths, reverse, stored))
    check_equal_bits(Gru(5, 3, 30, before, h0, [0, 5, 1], reverse, stored))


@pytest.mark.parametrize('capability', ('9.0', '8.0'))
def test_eight_blocks_are_a_cluster_on_hopper_only(capability):
    code = f'''
import test_cuda_gru as here
for before in False, True:
    here.check_equal_bits(here.Gru(3, 20, 61, before), as_cluster={capability == '9.0'})
    here.check_equal_bits(here.Gru(2, 9, 80, before), as_cluster=False)        # a team of 10
'''
    paths = (Path(__file__).parent, Path(__file__).parents[1] / 'helpers', Path(__file__).parents[1], Path(__file__).parents[2])
    environment = {**os.environ, 'EMU_CAPABILITY': capability, 'EMU_MULTIPROCESSORS': '24',
                   'PYTHONPATH': os.pathsep.join([*map(str, paths), os.environ.get('PYTHONPATH', '')])}
    done = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_unknown_exchange_is_an_error():
    assert library().pyops_set_exchange(2)
    assert library().pyops_last_error() == b'set_exchange: exchange=2, expected 0 (by device and size) or 1 (global memory)'
