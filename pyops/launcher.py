"""The environment variables of the commands that start a job of several processes."""
import os
from typing import NamedTuple


class Launch(NamedTuple):
    """The place of this process in a job of several processes.   launcher: the command that started them"""
    rank: int
    size: int
    launcher: str


# launcher, rank, number of ranks.  A Slurm batch script has SLURM_PROCID and SLURM_NTASKS, too; only srun sets
# SLURM_STEP_NUM_TASKS.
_LAUNCHERS = (('mpirun', 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE'), ('mpiexec', 'PMI_RANK', 'PMI_SIZE'),
              ('srun', 'SLURM_PROCID', 'SLURM_STEP_NUM_TASKS'), ('torchrun', 'RANK', 'WORLD_SIZE'))


def launch():
    """Return the Launch that the variables of mpirun, mpiexec, srun or torchrun describe; None without them, and if
    $PYOPS_DISTRIBUTED is 0."""
    if os.environ.get('PYOPS_DISTRIBUTED') == '0':
        return None
    for launcher, rank, size in _LAUNCHERS:
        values = os.environ.get(rank, ''), os.environ.get(size, '')
        if all(value.isdecimal() for value in values) and int(values[0]) < int(values[1]):
            return Launch(*map(int, values), launcher)
    return None
