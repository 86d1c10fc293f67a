"""Data parallel programs: several processes (ranks) that a launcher such as mpirun starts, each with a share of every batch.

    distributed.init()                                  joins the ranks; nothing happens without a launcher
    distributed.rank(), distributed.size()              0 and 1 without a launcher
    distributed.average_gradients(model.parameters())   between backward() and optimizer.step()

Sums over ranks have a fixed order, so all ranks get the same bits.  docs/scaling.md explains how to start programs, and how a
run gets the same bits with any number of ranks.

mpi4py and NCCL are loaded by init() alone, and only if a launcher started more than one rank.
"""
from pyops.distributed.gradients import GradientSum, average_gradients  # noqa: F401
from pyops.distributed.shares import Shares, shard  # noqa: F401
from pyops.distributed.world import (  # noqa: F401
    agree,
    all_max,
    all_reduce,
    barrier,
    broadcast,
    can_overlap,
    default_parts,
    finalize,
    gather,
    hosts,
    init,
    is_first,
    largest,
    number_of_parts,
    on_first,
    on_gpus,
    rank,
    same_bits,
    share_cores,
    size,
    union,
)
