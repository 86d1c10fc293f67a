"""One contestant of bench.train, bench.translate or bench.quality: `python -m bench.worker PROGRAM JOB KIND FOLDER THREADS`
reads the numbers of a turn from a line of stdin and answers with a JSON line: seconds of the turn, CPU seconds of all threads,
peak memory of the process so far, and the job's own results."""
import contextlib
import importlib
import json
import resource
import signal
import sys
import time
from pathlib import Path

from bench.contest import BF16, FP8, RECOMPUTE, use_cores


def peak_mib(pid='self'):
    """Return the peak memory of a process in MiB, of this one by default.  Linux includes the peak of the parent process in
    ru_maxrss, which is used only if there is no /proc."""
    with contextlib.suppress(OSError):
        for line in Path(f'/proc/{pid}/status').read_text().splitlines():
            if line.startswith('VmHWM:'):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(program, job, kind, folder, threads):
    signal.signal(signal.SIGINT, signal.SIG_IGN)        # a terminal sends it to all processes; the parent ends this one
    contest = importlib.import_module(f'bench.{program}')
    who = kind.removesuffix(BF16).removesuffix(FP8).removesuffix(RECOMPUTE).partition('/')[0]
    if who in ('ours', 'command'):
        from pyops import backend
        backend.set_threads(int(threads))
        backend.HOST.precision = 'bf16' if kind.endswith((BF16, FP8)) else 'fp32'
        backend.HOST.fp8 = kind.endswith(FP8)
    elif who.startswith('jax'):
        use_cores(int(threads))
    elif who != 'ct2':                                  # CTranslate2 takes the number of threads in its constructor
        import torch
        torch.set_num_threads(int(threads))
    turn, describe = getattr(contest, job)(Path(folder), kind, *([int(threads)] if who == 'ct2' else []))
    print(json.dumps('ready'), flush=True)
    for line in sys.stdin:
        numbers = map(int, line.split())
        start, cpu = time.perf_counter(), time.process_time()
        result = turn(*numbers)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        answer = dict(seconds=seconds, cpu_seconds=round(cpu_seconds, 7), peak_mib=round(peak_mib(), 1))
        print(json.dumps(answer | describe(result)), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
