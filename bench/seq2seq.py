"""The contest of seq2seq training steps: what all contestants share, our step, PyTorch's step."""
import json
from dataclasses import asdict

import numpy as np

UNIT = 'pairs'
BATCH_SIZE = 128


def prepare(args, folder):
    """Write batches, configuration and initial weights.  -> a line about the data."""
    from pyops.data.batches import batches
    from pyops.text.translation import Pairs, open_corpus
    from seq2seq.model import Config, Seq2Seq
    corpus, _ = open_corpus(data_dir=args.data_dir)
    vocabularies = corpus.vocabularies()
    config = Config(*map(len, vocabularies), dropout=args.dropout)
    pairs = Pairs.encode(corpus, *vocabularies, config.num_steps)
    chosen, epoch = [], 0
    while len(chosen) < args.warmup + args.steps:
        chosen += [rows for rows in batches(len(pairs), args.batch_size, 0, epoch) if len(rows) == args.batch_size]
        epoch += 1
    rows = np.stack(chosen[:args.warmup + args.steps])
    model = Seq2Seq(config)
    np.savez(folder / 'data.npz', rows=rows, source=pairs.source, labels=pairs.labels)
    np.savez(folder / 'weights.npz', **{name: model.params[name].value for name in model.params})
    (folder / 'config.json').write_text(json.dumps(asdict(config)))
    return f'{config.num_steps} steps, vocabularies {config.source_size}/{config.target_size}, {len(pairs)} pairs'


def _load(folder):
    from seq2seq.model import Config
    with np.load(folder / 'data.npz') as file:
        return Config(**json.loads((folder / 'config.json').read_text())), {name: file[name] for name in file.files}


def make_ours(folder):
    """-> step(k): our training step on batch k, replayed from a plan as in seq2seq.train; returns its loss."""
    from pyops import plan
    from pyops.optim import Adam
    from pyops.text.translation import Pairs
    from seq2seq.model import Seq2Seq
    config, data = _load(folder)
    pairs = Pairs(data['source'], data['labels'])
    model = Seq2Seq(config)                         # the same seed as in prepare: the same weights
    optimizer = Adam(model.params, lr=0.005)

    def step(rows):
        model.params.zero_grads()
        loss, ctx = model.forward(*pairs.batch(rows), step=optimizer.count)
        model.backward(ctx)
        optimizer.step()
        return loss

    steps = plan.Steps(step, model.params, **pairs.arrays(), **optimizer.arrays())
    return lambda k: float(steps(data['rows'][k])[0])


def make_torch(folder, compiled):
    """-> step(k): PyTorch's, on the same batch from the same weights."""
    import torch

    from bench.torch_seq2seq import TorchSeq2Seq, make_step
    from pyops.text.translation import Pairs
    config, data = _load(folder)
    pairs = Pairs(data['source'], data['labels'])
    model = TorchSeq2Seq(config)
    with np.load(folder / 'weights.npz') as weights, torch.no_grad():
        for name, place in model.named().items():
            place.copy_(torch.from_numpy(weights[name]))
    run = make_step(torch.compile(model) if compiled else model, lr=0.005)
    batches = [[torch.from_numpy(ids).long() for ids in pairs.batch(rows)] for rows in data['rows']]     # not timed
    return lambda k: run(*batches[k]).item()
