"""One contestant of bench.train: `python -m bench.worker KIND FOLDER THREADS` reads a batch number a line from stdin and
answers each with a JSON line: seconds of the training step, its loss, peak memory of the process so far."""
import json
import resource
import sys
import time
from pathlib import Path

import numpy as np


def make_ours(folder, config, threads):
    from pyops import backend
    from pyops.optim import Adam
    from seq2seq.model import Config, Seq2Seq
    backend.set_threads(threads)
    model = Seq2Seq(Config(**config))               # the same seed as bench.train's: the same weights
    optimizer = Adam(model.params, lr=0.005)

    def step(source, target, labels):
        model.params.zero_grads()
        loss, ctx = model.forward(source, target, labels, optimizer.count)
        model.backward(ctx)
        optimizer.step()
        return float(loss[0])
    return step, lambda array: array


def make_torch(folder, config, threads, compiled=False):
    import torch

    from bench.torch_seq2seq import TorchSeq2Seq, make_step
    from seq2seq.model import Config
    torch.set_num_threads(threads)
    model = TorchSeq2Seq(Config(**config))
    with np.load(folder / 'weights.npz') as weights, torch.no_grad():
        for name, place in model.named().items():
            place.copy_(torch.from_numpy(weights[name]))
    run = make_step(torch.compile(model) if compiled else model, lr=0.005)
    return lambda *batch: run(*batch).item(), lambda array: torch.from_numpy(array).long()


def main(kind, folder, threads):
    folder = Path(folder)
    config = json.loads((folder / 'config.json').read_text())
    if kind == 'ours':
        step, convert = make_ours(folder, config, int(threads))
    else:
        step, convert = make_torch(folder, config, int(threads), compiled=kind == 'torch-compile')
    with np.load(folder / 'batches.npz') as file:
        batches = {name: convert(file[name]) for name in file.files}
    print(json.dumps('ready'), flush=True)
    for line in sys.stdin:
        batch = [batches[f'{int(line)}.{name}'] for name in ('source', 'target', 'labels')]
        start = time.perf_counter()
        loss = step(*batch)
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(dict(seconds=seconds, loss=loss, peak_mib=round(peak, 1))), flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
