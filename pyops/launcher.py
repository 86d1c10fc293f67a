"""The environment variables of the commands that start a job of several processes."""
import os
import re
from typing import NamedTuple


class Launch(NamedTuple):
    """The place of this process in a job of several processes.   launcher: the command that started them"""
    rank: int
    size: int
    launcher: str


# launcher, rank, number of ranks, rank within its host.  A Slurm batch script has SLURM_PROCID and SLURM_NTASKS, too;
# only srun sets SLURM_STEP_NUM_TASKS.
_LAUNCHERS = (('mpirun', 'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK'),
              ('mpiexec', 'PMI_RANK', 'PMI_SIZE', 'MPI_LOCALRANKID'),
              ('srun', 'SLURM_PROCID', 'SLURM_STEP_NUM_TASKS', 'SLURM_LOCALID'),
              ('torchrun', 'RANK', 'WORLD_SIZE', 'LOCAL_RANK'))
_FIRST_PORT, _PORTS = 61440, 4096       # for jobs of Slurm: the end of the range, which few programs use


def launch():
    """Return the Launch that the variables of mpirun, mpiexec, srun or torchrun describe; None without them, and if
    $PYOPS_DISTRIBUTED is 0."""
    found = _find()
    return found and found[0]


def local_rank():
    """Return the number of this process within its host: 0 without a launcher, or if it does not say."""
    found = _find()
    text = os.environ.get(found[1], '') if found else ''
    return int(text) if text.isdecimal() else 0


def _find():
    """Return the Launch and the name of the variable of the local rank, or None."""
    if os.environ.get('PYOPS_DISTRIBUTED') == '0':
        return None
    for launcher, rank, size, local in _LAUNCHERS:
        values = os.environ.get(rank, ''), os.environ.get(size, '')
        if all(value.isdecimal() for value in values) and int(values[0]) < int(values[1]):
            return Launch(*map(int, values), launcher), local
    return None


def meeting_point():
    """Return HOST:PORT, where rank 0 can wait for the others before they have any other connection; '' if the launcher's
    variables name none.

    torchrun: the port after $MASTER_PORT, where torchrun itself listens.  srun: the first host of the step, and a port that
    follows from the number of the job.  $MASTER_ADDR and $MASTER_PORT take precedence there, too, as scripts set them.
    """
    address, port = os.environ.get('MASTER_ADDR', ''), os.environ.get('MASTER_PORT', '')
    if address and port.isdecimal() and int(port) < 65535:
        return f'{_bracketed(address)}:{int(port) + 1}'
    job = os.environ.get('SLURM_JOB_ID', '')
    address = first_host(os.environ.get('SLURM_STEP_NODELIST', '')) or os.environ.get('SLURM_LAUNCH_NODE_IPADDR', '')
    if not address or not job.isdecimal():
        return ''
    return f'{_bracketed(address)}:{_FIRST_PORT + int(job) % _PORTS}'


def first_host(hosts):
    """Return the first host of a list in Slurm's notation: a7 of 'a[7-9,12],b1'."""
    match = re.match(r'([^\[,]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)', hosts)
    return ''.join(part or '' for part in match.groups())


def _bracketed(address):
    """Return an address that a port may follow: IPv6 in brackets."""
    return f'[{address}]' if ':' in address and not address.startswith('[') else address
