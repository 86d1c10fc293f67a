"""Checks of the ranks of a job: what they are, whether their sums have the same bits, and how long these take."""
from __future__ import annotations

import importlib.metadata
import platform
import time
from collections import Counter

import numpy as np

from pyops import __version__, backend, distributed, launcher
from pyops.distributed import nccl
from pyops.distributed.world import WITH_MPI
from pyops.errors import UserError

SIZES = (2 ** 10, 100), (2 ** 18, 20), (2 ** 22, 4)         # floats, sums


def run(on_gpus: bool = False) -> None:
    """Print what is found; only rank 0 does.   on_gpus: each rank uses a GPU
    UserError if ranks cannot start, differ in versions, or get different sums."""
    place = launcher.launch()
    if on_gpus:
        from pyops.ndarray import use_gpu  # here, since it is needed on a GPU only
        try:
            use_gpu()
        except UserError as error:
            raise UserError(f'-g 1: {error}') from error
    distributed.init()
    distributed.agree(mpi4py=_version('mpi4py'), nccl=_nccl(), numpy=np.__version__, python=platform.python_version())
    hosts = Counter(distributed.hosts())
    threads = distributed.gather(distributed.share_cores())
    print(f'launcher : {place.launcher if place else "none"}')
    print(f'ranks : {distributed.size()}')
    for host, count in hosts.items():
        mine = [n for n, name in zip(threads, distributed.hosts(), strict=True) if name == host]
        print(f'host {host} : {count} rank{"s" * (count > 1)}, threads of each : {" ".join(map(str, mine))}')
    print(f'versions : pyops {__version__}, Python {platform.python_version()}, numpy {np.__version__}, '
          f'mpi4py {_version("mpi4py") or "not installed"}, {_library()}, NCCL {_nccl() or "not installed"}')
    if on_gpus:
        print(f'gpu of each rank : {backend.current_device().model}')
    print(f'instructions : {backend.isa()}, bfloat16 {backend.bf16_isa()}', flush=True)
    if distributed.size() == 1:
        print('one rank : nothing to compare; start several with: mpirun -n 2 python -m pyops.distributed doctor')
        return
    compare()
    print('sums : the same bits on all ranks, and as on one rank')
    for size, repeats in SIZES:
        print(f'{size * 4 / 1024:g} KiB : ' + ', '.join(
            f'{name} {seconds * 1e6:.0f} us' + f' ({size * 4 / seconds / 1e9:.2f} GB/s)' * (size > 2 ** 16)
            for name, seconds in ((name, _seconds(size, repeats, name == 'fast')) for name in ('exact', 'fast'))), flush=True)


def compare(n: int = 100_003) -> None:
    """Raise UserError, on all ranks, if a sum over ranks has other bits than the same sum on one rank.   n: floats"""
    terms = [np.random.Generator(np.random.Philox(key=rank)).standard_normal(n).astype(np.float32)
             for rank in range(distributed.size())]
    found = backend.put(terms[distributed.rank()].copy())
    distributed.all_reduce(found)
    wrong = distributed.gather(backend.get(found).tobytes() != tree(terms).tobytes())
    if any(wrong):
        rank = wrong.index(True)
        raise UserError(f'rank {rank} on {distributed.hosts()[rank]}: a sum over ranks has other bits than on one rank: a '
                        'defect of MPI, of NCCL, of a network or of memory; leave this host out')


def tree(terms: list[np.ndarray]) -> np.ndarray:
    """Return the sum of arrays in the order of all_reduce: arrays beyond a power of two are added first, then neighbours,
    then pairs of neighbours, and so on."""
    paired = 1 << (len(terms).bit_length() - 1)
    terms = [*(one + other for one, other in zip(terms, terms[paired:], strict=False)), *terms[len(terms) - paired:paired]]
    while len(terms) > 1:
        terms = [one + other for one, other in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _seconds(size: int, repeats: int, fast: bool) -> float:
    """Return the median time of a sum over ranks."""
    x, times = backend.put(np.ones(size, np.float32)), []
    for _ in range(repeats + 1):
        distributed.barrier()
        start = time.perf_counter()
        distributed.all_reduce(x, fast)
        backend.current_device().synchronize()
        times.append(time.perf_counter() - start)
        x[...] = 1
    return sorted(times[1:])[repeats // 2]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ''


def _nccl() -> str:
    """Return the version of NCCL, '' without a library that can be used."""
    try:
        return nccl.version_text(nccl.version(nccl.library()))
    except UserError:
        return ''


def _library() -> str:
    place = launcher.launch()
    if distributed.size() == 1 or distributed.on_gpus() and place is not None and place.launcher not in WITH_MPI:
        return 'MPI not started'
    from mpi4py import MPI
    return MPI.Get_library_version().partition(',')[0].partition('\n')[0]
