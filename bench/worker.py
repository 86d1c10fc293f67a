"""One contestant of bench.train: `python -m bench.worker PROGRAM KIND FOLDER THREADS` reads the number of a batch a line
from stdin and answers each with a JSON line: seconds of the training step, its loss, peak memory of the process so far."""
import importlib
import json
import resource
import sys
import time
from pathlib import Path


def main(program, kind, folder, threads):
    contest = importlib.import_module(f'bench.{program}')
    if kind == 'ours':
        from pyops import backend
        backend.set_threads(int(threads))
        step = contest.make_ours(Path(folder))
    else:
        import torch
        torch.set_num_threads(int(threads))
        step = contest.make_torch(Path(folder), compiled=kind == 'torch-compile')
    print(json.dumps('ready'), flush=True)
    for line in sys.stdin:
        first, last = map(int, line.split())
        start = time.perf_counter()
        for k in range(first, last):
            loss = step(k)
        seconds = (time.perf_counter() - start) / (last - first)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(dict(seconds=seconds, loss=loss, peak_mib=round(peak, 1))), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
