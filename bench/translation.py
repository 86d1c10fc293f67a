"""A contest of training steps between translation models: what all contestants share, our step, PyTorch's step.

bench/seq2seq.py and bench/transformer.py say whose.
"""
import json

import numpy as np


def planned_steps(model, pairs, lr):
    """-> plan.Steps of a translator's training step, as in training."""
    from pyops import plan
    from pyops.optim import Adam
    optimizer = Adam(model.params, lr, max_norm=1.0)

    def step(rows):
        model.params.zero_grads()
        loss, ctx = model.forward(*pairs.batch(rows), step=optimizer.count)
        plan.boundary()
        model.backward(ctx)
        optimizer.step()
        return loss

    return plan.Steps(step, model.params, **pairs.arrays(), **model.arrays(), **optimizer.arrays())


class Contest:
    """ours() -> Config, model class;  theirs() -> its twin's class;  lr: the learning rate of both.

    They are functions, so that a contestant loads no more than it needs: peak memory is one of the figures.
    """

    def __init__(self, ours, theirs, lr):
        self.ours, self.theirs, self.lr = ours, theirs, lr

    def prepare(self, args, folder):
        """Write batches, configuration and initial weights.  -> a line about the data."""
        from pyops.data.batches import batches
        from pyops.text.translation import Pairs, open_corpus
        Config, Model = self.ours()
        corpus, _ = open_corpus(data_dir=args.data_dir)
        vocabularies = corpus.vocabularies()
        config = Config(*map(len, vocabularies), dropout=args.dropout)
        pairs = Pairs.encode(corpus, *vocabularies, config.num_steps)
        chosen, epoch = [], 0
        while len(chosen) < args.warmup + args.steps:
            chosen += [rows for rows in batches(len(pairs), args.batch_size, 0, epoch) if len(rows) == args.batch_size]
            epoch += 1
        rows = np.stack(chosen[:args.warmup + args.steps])
        model = Model(config)
        np.savez(folder / 'data.npz', rows=rows, source=pairs.source, labels=pairs.labels)
        np.savez(folder / 'weights.npz', **model.params.arrays())
        (folder / 'config.json').write_text(json.dumps({name: value for name, value in vars(config).items() if name != 'ops'}))
        return f'{config.num_steps} steps, vocabularies {config.source_size}/{config.target_size}, {len(pairs)} pairs'

    def _load(self, folder):
        """-> configuration, pairs, rows of each batch."""
        from pyops.text.translation import Pairs
        Config, _ = self.ours()
        with np.load(folder / 'data.npz') as file:
            return (Config(**json.loads((folder / 'config.json').read_text())), Pairs(file['source'], file['labels']),
                    file['rows'])

    def make_ours(self, folder):
        """-> step(k): our training step on batch k, replayed from a plan as in training; returns its loss."""
        config, pairs, rows = self._load(folder)
        steps = planned_steps(self.ours()[1](config), pairs, self.lr)     # the same seed as in prepare: the same weights
        return lambda k: float(steps(rows[k])[0])

    def make_torch(self, folder, compiled):
        """-> step(k): PyTorch's, on the same batch from the same weights."""
        import torch

        from bench.torch_step import copy_weights, make_step
        config, pairs, rows = self._load(folder)
        with np.load(folder / 'weights.npz') as weights:
            model = copy_weights(self.theirs()(config), weights)
        run = make_step(torch.compile(model) if compiled else model, self.lr)
        batches = [[torch.from_numpy(ids).long() for ids in pairs.batch(indices)] for indices in rows]     # not timed
        return lambda k: run(*batches[k]).item()
