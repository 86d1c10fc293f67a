"""Ranks with emulated GPUs for tests: processes whose messages a stand-in for NCCL carries (nccl.c)."""
import shutil
import socket
import subprocess
import sys

import pytest
import ranks
from conftest import ROOT

EMULATED = ROOT / 'pyops' / 'libpyops_emulated.so'
needs_emulated_gpus = pytest.mark.skipif(not EMULATED.exists() or not shutil.which('gcc'),
                                         reason='needs the emulated CUDA library and gcc: make emulated; apt install gcc')


def build(folder):
    """Compile the stand-in for NCCL into a folder, and return its path."""
    path = folder / 'libnccl.so'
    subprocess.run(['gcc', '-O1', '-shared', '-fPIC', '-o', path, ROOT / 'tests/helpers/nccl.c', '-ldl'], check=True)
    return path


def environment(library, folder, **values):
    """Return the environment of a rank.   library: the stand-in;  folder: a new one for the job"""
    return ranks.environment(**dict(PYOPS_EMULATE_CUDA='1', EMU_DEVICES='2', EMU_LAZY='1', PYOPS_NCCL_LIBRARY=str(library),
                                    STANDIN_CUDA=str(EMULATED), STANDIN_FOLDER=str(folder), PYOPS_RANK_TIMEOUT='60') | values)


def as_torchrun(count, rank, port):
    """Return the variables that torchrun sets."""
    return dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))


def run(count, library, folder, *arguments, variables=as_torchrun, **values):
    """Run python with these arguments on so many ranks.  Return [(exit status, standard output, standard error)].

    variables(count, rank, port): set by the launcher
    """
    folder.mkdir()
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = min(free.getsockname()[1], 65533)
    processes = [subprocess.Popen([sys.executable, *map(str, arguments)], cwd=ROOT, text=True, stdin=subprocess.DEVNULL,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  env=environment(library, folder, **variables(count, rank, port) | values))
                 for rank in range(count)]
    outputs = [process.communicate(timeout=480) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]
