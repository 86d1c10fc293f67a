"""Ranks on one machine that are connected by links with a bandwidth and a delay.  Linux, root, ip and tc.

Each rank is in a network namespace of its own, with a link to a bridge in another one.  A queue (tbf) at each end of a link
limits its bandwidth.  A link without a delay is a pair of veth devices.  A link with a delay is a pair of tap devices, between
which a process carries packets: the queue netem, which delays packets, is missing in some kernels.
"""
import collections
import contextlib
import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from pyops.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
NETWORK = '10.77.0.'            # ranks are 1, 2, ..., the bridge is 254
LARGEST = 60_000                # bytes of a packet, so that it fits into one read with its header
PACKET_SECONDS = 2.5e-4         # of a packet on the link, at most, unless it has the usual 1,500 bytes
BURST_SECONDS = 2e-3            # of a link's bandwidth that may leave at once
AT_ONCE = 32                    # packets that are read before others are written
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 2, 0x1000       # of linux/if_tun.h


class Network(NamedTuple):
    """How to start ranks over links.

    launcher, rank: what precedes the command of mpirun, and the command of each rank;  variables: environment of both
    """
    launcher: tuple[str, ...] = ()
    rank: tuple[str, ...] = ()
    variables: dict[str, str] = {}


MEMORY = Network()              # messages in memory


@contextlib.contextmanager
def connected(ranks, gbit, delay=0.0):
    """Yield the Network of so many ranks.

    gbit: bandwidth of each link in Gbit/s, each way; None: messages in memory;  delay: seconds between two ranks
    """
    if gbit is None:
        yield MEMORY
        return
    if os.geteuid() or not (shutil.which('ip') and shutil.which('tc')):
        raise UserError('--gbit: needs root, ip and tc (Linux, package iproute2); leave --gbit out')
    name = f'pyops{os.getpid()}'
    hub, spaces = f'{name}-hub', [f'{name}-{rank}' for rank in range(ranks)]
    with contextlib.ExitStack() as stack:
        for space in (hub, *spaces):
            _run('ip', 'netns', 'add', space)
            stack.callback(_run, 'ip', 'netns', 'del', space)
            _run('ip', '-n', space, 'link', 'set', 'lo', 'up')
        _run('ip', '-n', hub, 'link', 'add', 'hub', 'type', 'bridge')
        if delay:
            stack.enter_context(_delayed(hub, spaces, delay / 2))           # each message takes two links
        for rank, space in enumerate(spaces):
            if not delay:
                _run('ip', '-n', hub, 'link', 'add', f'rank{rank}', 'type', 'veth', 'peer', 'name', 'link', 'netns', space)
            _run('ip', '-n', hub, 'link', 'set', 'dev', f'rank{rank}', 'master', 'hub')
            _run('ip', '-n', space, 'address', 'add', f'{NETWORK}{rank + 1}/24', 'dev', 'link')
            for owner, device in ((hub, f'rank{rank}'), (space, 'link')):
                _limit(owner, device, gbit)
        _run('ip', '-n', hub, 'address', 'add', f'{NETWORK}254/24', 'dev', 'hub')
        _run('ip', '-n', hub, 'link', 'set', 'hub', 'up')
        yield Network(('ip', 'netns', 'exec', hub),
                      ('sh', '-c', f'exec ip netns exec {name}-$OMPI_COMM_WORLD_RANK "$@"', 'sh'),
                      dict(OMPI_MCA_pml='ob1', OMPI_MCA_btl='self,tcp', OMPI_MCA_btl_tcp_if_include='link',
                           PMIX_MCA_ptl_base_if_include='hub', PMIX_MCA_ptl_base_remote_connections='1'))


def _limit(space, device, gbit):
    """Limit the packets that leave a device, and start it."""
    rate = gbit * 1e9 / 8                                                   # bytes per second
    packet = int(min(max(rate * PACKET_SECONDS, 1500), LARGEST))
    _run('ip', '-n', space, 'link', 'set', 'dev', device, 'mtu', str(packet), 'up')
    _run('tc', '-n', space, 'qdisc', 'add', 'dev', device, 'root', 'tbf', 'rate', f'{int(8 * rate)}bit', 'burst',
         str(int(max(rate * BURST_SECONDS, 2 * packet))), 'latency', '200ms')


@contextlib.contextmanager
def _delayed(hub, spaces, delay):
    """Create the devices of links with a delay, in seconds, and carry packets between them within this context."""
    pairs = []
    try:
        for rank, space in enumerate(spaces):
            pairs.append((_tap(hub, f'rank{rank}'), _tap(space, 'link')))
        flat = [file for pair in pairs for file in pair]
        process = subprocess.Popen([sys.executable, '-m', 'bench.links', str(delay), *map(str, flat)], cwd=ROOT, pass_fds=flat,
                                   stdin=subprocess.PIPE)
    finally:
        for pair in pairs:
            for file in pair:
                os.close(file)
    with process:                           # it ends when its standard input is closed
        yield


def _tap(space, name):
    """Return the file of a new tap device with this name in a namespace."""
    try:
        file = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
        made = fcntl.ioctl(file, TUNSETIFF, struct.pack('16sH22x', b'pyops%d', IFF_TAP | IFF_NO_PI))
    except OSError as error:
        raise UserError(f'--delay-ms: needs /dev/net/tun and tap devices ({error}); leave --delay-ms out') from error
    _run('ip', 'link', 'set', made[:16].rstrip(b'\0').decode(), 'netns', space, 'name', name)
    return file


def carry(delay, pairs, until):
    """Carry packets between the devices of each pair of files, `delay` seconds later, until the file `until` has ended."""
    other = {one: two for pair in pairs for one, two in (pair, pair[::-1])}
    under_way = collections.deque()         # (time of arrival, file, packet)
    while True:
        wait = max(under_way[0][0] - time.monotonic(), 0) if under_way else None
        ready, _, _ = select.select([*other, until], [], [], wait)
        if until in ready:
            return
        for file in ready:
            with contextlib.suppress(BlockingIOError):
                for _ in range(AT_ONCE):
                    under_way.append((time.monotonic() + delay, other[file], os.read(file, 65_536)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, file, packet = under_way.popleft()
            with contextlib.suppress(OSError):                              # the device is not up yet
                os.write(file, packet)


def _run(*words):
    found = subprocess.run(words, text=True, capture_output=True)
    if found.returncode:
        raise UserError(f'{" ".join(words)}: {" ".join(found.stderr.split())}; use a kernel with network namespaces, bridges, '
                        'veth devices and the queue tbf, or leave --gbit out')


if __name__ == '__main__':
    with contextlib.suppress(OSError):      # it must not wait for the ranks, which use all cores
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    files = list(map(int, sys.argv[2:]))
    carry(float(sys.argv[1]), list(zip(files[::2], files[1::2], strict=True)), sys.stdin.fileno())
