"""A model of the time of a training step on several ranks: computation, bytes, latency and bandwidth.

A rank computes its parts one after the other; a part costs a constant and a time for each sample.  The gradients of the parts
are added in passes over all of them.  The gradients are divided into several sums over ranks, each of log2(R) exchanges each
way.  An exchange of long messages takes the latency of the link three times.  All sums move 2 (R - 1) / R times the gradients.
Up to a share of the last part's time they are hidden behind backward, except for the last block.  Small messages and the update
follow.  All ranks are taken to be equally fast, and each to have a link of its own.
"""
from __future__ import annotations

import math
from typing import NamedTuple

from pyops.distributed.gradients import BLOCK

RANKS = tuple(2 ** i for i in range(11))        # of the table
EAGER = 2 ** 16         # bytes of a message that MPI sends at once; it announces a larger one, and waits for the answer
HANDSHAKE = 3           # latencies of a message that is announced
SMALL = 4               # latencies of small messages in a step, for each doubling of ranks: touched blocks, losses, signals
WORTH = 0.5             # speedup for each rank from which on more ranks are taken to pay


class Work(NamedTuple):
    """The costs of a training step on one rank, in seconds.  `python -m bench.scaling` measures them."""
    part: float         # of each part, whatever its size
    sample: float       # of each sample
    add: float          # of a pass that adds the gradients of two parts
    update: float       # the norm and the optimizer
    floats: float       # gradients that are sent: the dense ones and the touched blocks of the sparse ones
    hidden: float = 0.0         # share of the time of a part in which blocks of gradients are sent
    sums: int = 1               # sums over ranks that the gradients are divided into, one after the other


class Link(NamedTuple):
    """The connection of a rank to the others."""
    latency: float      # seconds of a message without content
    bandwidth: float    # bytes per second each way


def sum_seconds(work: Work, link: Link, ranks: int) -> float:
    """Return the seconds of the sums of the gradients over ranks, without overlap."""
    if ranks == 1:
        return 0.0
    share, exchanges = (ranks - 1) / ranks, 2 * math.ceil(math.log2(ranks)) * work.sums
    latencies = HANDSHAKE if 4 * work.floats / work.sums / 2 > EAGER else 1     # the first exchange has half of the elements
    return exchanges * latencies * link.latency + 8 * share * work.floats / link.bandwidth + share * work.add


def step_seconds(work: Work, link: Link, ranks: int, samples: float, parts: int = 1, sharded: bool = False) -> float:
    """Return the seconds of a step.

    samples: of the whole batch;  parts: of the whole batch, at least one for each rank;  sharded: --shard-optimizer
    """
    parts = max(parts, ranks)
    mine = parts / ranks
    part = work.part + work.sample * samples / parts
    update = work.update / ranks if sharded else work.update
    block = min(BLOCK, work.floats)
    last = work._replace(floats=block, add=work.add * block / work.floats, sums=1)
    visible = max(sum_seconds(work, link, ranks) - work.hidden * part, sum_seconds(last, link, ranks))
    small = SMALL * math.ceil(math.log2(ranks)) * link.latency
    return mine * part + (mine - 1) * work.add + visible + small + update


def most_ranks(work: Work, link: Link, samples: float, sharded: bool = False) -> int:
    """Return the largest number of ranks of RANKS that pays: it, and each smaller number, is at least WORTH times the ranks as
    fast as one rank."""
    alone, best = step_seconds(work, link, 1, samples), 1
    for ranks in RANKS[1:]:
        seconds = step_seconds(work, link, ranks, samples, sharded=sharded)
        if ranks > samples or alone / seconds < WORTH * ranks:
            break
        best = ranks
    return best


def table(work: Work, link: Link, samples: int, sharded: bool = False) -> str:
    """Return a table of steps on 1 to 1,024 ranks: of one batch that the ranks share, and with a batch for each rank."""
    lines = [f'{"":>6}  {"a batch of " + str(samples):^25}  {str(samples) + " for each rank":^25}',
             f'{"ranks":>6}  {"step":>10} {"speedup":>8}        {"step":>10} {"speedup":>8}']
    alone = step_seconds(work, link, 1, samples)
    for ranks in RANKS:
        wide = step_seconds(work, link, ranks, ranks * samples, sharded=sharded)
        shared = ''
        if ranks <= samples:
            seconds = step_seconds(work, link, ranks, samples, sharded=sharded)
            shared = f'{1e3 * seconds:7.2f} ms {alone / seconds:8.2f}'
        lines.append(f'{ranks:>6}  {shared:25}  {1e3 * wide:7.2f} ms {ranks * alone / wide:8.2f}'.rstrip())
    pays = most_ranks(work, link, samples, sharded)
    lines.append(f'a batch of {samples} pays up to {pays} rank{"s" * (pays > 1)}: speedup at least {WORTH:g} for each rank')
    return '\n'.join(lines)
