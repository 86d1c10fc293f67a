"""Contests between translation models, in training steps and in greedy translation: data, our contestant, PyTorch's.

bench/seq2seq.py and bench/transformer.py supply the models.
"""
import functools
import json
from dataclasses import replace

import numpy as np

from bench.contest import BF16, FP8, RECOMPUTE
from pyops.errors import UserError


def planned_steps(model, pairs, lr, optimizer=None, set_rate=lambda: None):
    """Return SizedSteps of a translator's training step, with an entry in a log, as in training.

    optimizer: default Adam;  set_rate(): launches the kernel that sets the learning rate of the step
    """
    from pyops import plan
    from pyops.fit import History
    from pyops.optim import Adam
    from pyops.steps import SizedSteps
    optimizer, history = optimizer or Adam(model.params, lr, max_norm=1.0), History()

    def step(rows, *sizes):
        set_rate()
        model.params.zero_grads()
        loss, ctx = model.forward(pairs.batch(rows, *sizes), step=optimizer.count)
        plan.boundary()
        model.backward(ctx)
        optimizer.step(entry=history.entry(loss, None))
        return loss

    return SizedSteps(step, pairs.sizes, model.params, pairs.filled, **pairs.arrays(), **model.arrays(), **optimizer.arrays(),
                      **history.arrays())


def write_pairs(path, pairs, **more):
    """Write Pairs, and more arrays, to an .npz file."""
    np.savez(path, source=pairs.source.ids, source_starts=pairs.source.starts, labels=pairs.labels.ids,
             label_starts=pairs.labels.starts, **more)


def read_pairs(file, num_steps):
    """Return the Pairs in an open .npz file."""
    from pyops.text.pairs import Pairs, Ragged
    return Pairs(Ragged(file['source'], file['source_starts']), Ragged(file['labels'], file['label_starts']), num_steps)


def joined(pairs, length):
    """Return Pairs of `length` tokens each: the sentences of a corpus follow each other, so that no batch needs padding.

    A source and its labels are no translations of each other: for timing.
    """
    from pyops.text.pairs import Pairs, Ragged
    count = min(len(table.ids) for table in (pairs.source, pairs.labels)) // length
    starts = length * np.arange(count + 1)
    return Pairs(*(Ragged(table.ids[:starts[-1]], starts) for table in (pairs.source, pairs.labels)), length)


def flops_of(plan):
    """Return the number of floating-point operations in the matrix products of a plan, with the sizes of its last run."""
    from pyops.profile import operations
    return sum(operations(action, plan.argument) for action in plan.replayed)


def flops_of_step(steps, rows):
    """Return the number of operations in the products of a step on these rows, without fillers.  Runs it: its kernels count the
    tokens."""
    plan = steps.plan(rows)
    plan.run()
    return flops_of(plan)


def job(step, describe=lambda: {}):
    """Return turn(first, last), which calls step(k) -> loss for these batches, and a function that turns its result into the
    worker's answer, with the items of describe()."""
    def turn(first, last):
        for k in range(first, last):
            loss = step(k)
        return loss
    return turn, lambda loss: dict(loss=loss, **describe())


class Contest:
    """ours() -> Config, model class;  theirs() -> its twin's class;  jax_loss() -> the loss of its twin in JAX;  lr: learning
    rate of all;  preset(name) -> settings of the program's preset, if it has any, whose learning rate goes before lr.

    They are functions so that a contestant imports only its own modules: peak memory is one of the figures.
    """

    def __init__(self, ours, theirs, jax_loss, lr, preset=lambda name: {}):
        self.ours, self.theirs, self.jax_loss, self.lr, self.preset = ours, theirs, jax_loss, lr, preset

    def prepare(self, args, folder):
        """Write batches, configuration, initial weights and learning rate.  Return a line about the data.

        args.preset: its name.  If it sets num_steps, the sentences of the corpus are joined to that length
        args.dropout: None for the default of the program or the preset
        UserError for a batch size above the number of pairs
        """
        from pyops.data.batches import batches
        from pyops.settings import configure
        from pyops.text.pairs import Pairs
        from pyops.text.translation import open_corpus
        Config, Model = self.ours()
        corpus, _ = open_corpus(data_dir=args.data_dir)
        vocabularies = corpus.vocabularies()
        preset = self.preset(args.preset)
        settings = {'lr': self.lr} | preset | ({} if args.dropout is None else {'dropout': args.dropout})
        config = configure(Config, settings, *map(len, vocabularies))
        pairs = Pairs.encode(corpus, *vocabularies, config.num_steps)
        if 'num_steps' in preset:
            pairs = joined(pairs, config.num_steps)
        if args.batch_size > len(pairs):
            raise UserError(f'--batch-size {args.batch_size}: expected at most {len(pairs)}, the number of pairs')
        chosen, epoch = [], 0
        while len(chosen) < args.warmup + args.steps:
            chosen += [rows for rows in batches(len(pairs), args.batch_size, 0, epoch) if len(rows) == args.batch_size]
            epoch += 1
        rows = np.stack(chosen[:args.warmup + args.steps])
        write_pairs(folder / 'data.npz', pairs, rows=rows, lr=settings['lr'])
        self.write_model(folder, config, Model(config))
        return (f'{config.num_steps} steps, vocabularies {config.source_size}/{config.target_size}, {len(pairs)} pairs'
                + ' of joined sentences' * ('num_steps' in preset))

    @staticmethod
    def write_model(folder, config, model):
        """Write the configuration and the weights of a model."""
        np.savez(folder / 'weights.npz', **model.params.arrays())
        (folder / 'config.json').write_text(json.dumps({name: value for name, value in vars(config).items() if name != 'ops'}))

    def _load(self, folder):
        """Return the configuration, the pairs, the rows of each batch, and the learning rate."""
        config = self.config(folder)
        with np.load(folder / 'data.npz') as file:
            return config, read_pairs(file, config.num_steps), file['rows'], float(file['lr'])

    def config(self, folder):
        """Return the configuration that write_model wrote."""
        return self.ours()[0](**json.loads((folder / 'config.json').read_text()))

    def train(self, folder, kind):
        """Return turn and describe of a contestant in training steps: step k uses batch k, from the same weights."""
        config, pairs, rows, lr = self._load(folder)
        who = kind.removesuffix(BF16).removesuffix(FP8)
        if kind.endswith(FP8):
            from pyops.quantization import FP8_RECIPE, family_of
            config = replace(config, ops=family_of({'quant': FP8_RECIPE}))
        if who in ('ours', 'ours' + RECOMPUTE):
            # replayed from a plan as in training; the same seed as in prepare, so the same weights
            again = dict(recompute=True) if who.endswith(RECOMPUTE) else {}
            steps = planned_steps(self.ours()[1](config, **again), pairs, lr)
            return job(lambda k: float(steps(rows[k])[0]), lambda: dict(flops=flops_of_step(steps, rows[0])))
        if who == 'jax':
            from bench.jax_models import Training
            with np.load(folder / 'weights.npz') as weights:
                training = Training(functools.partial(self.jax_loss(), config=config), dict(weights), lr)
            batches = [[np.ascontiguousarray(ids.T) for ids in pairs.padded(indices)] for indices in rows]
            return job(lambda k: training.step(*batches[k]))
        import torch

        from bench.torch_step import make_step
        model = self.twin(config, folder)
        run = make_step(torch.compile(model) if who == 'torch-compile' else model, lr, in_bf16=kind.endswith(BF16))
        batches = [[torch.from_numpy(ids).long() for ids in pairs.padded(indices)] for indices in rows]     # not timed
        return job(lambda k: run(*batches[k]).item())

    def twin(self, config, folder):
        """Return the PyTorch twin with the weights that write_model wrote."""
        from bench.torch_step import copy_weights
        with np.load(folder / 'weights.npz') as weights:
            return copy_weights(self.theirs()(config), weights)

    # ---- translation

    def prepare_sentences(self, args, folder):
        """Write sentences of the corpus, configuration and initial weights.  Return a line about the data."""
        from pyops.text.pairs import Pairs
        from pyops.text.translation import open_corpus
        Config, Model = self.ours()
        corpus, _ = open_corpus(data_dir=args.data_dir)
        vocabularies = corpus.vocabularies()
        config = Config(*map(len, vocabularies))
        pairs = Pairs.encode(corpus, *vocabularies, config.num_steps)
        chosen = np.random.default_rng(0).integers(0, len(pairs), args.sentences)
        np.savez(folder / 'data.npz', source=np.ascontiguousarray(pairs.source.padded(config.num_steps)[chosen].T))
        self.write_model(folder, config, Model(config))
        return f'{config.num_steps} steps, vocabularies {config.source_size}/{config.target_size}'

    def translate(self, folder, kind, threads=1):
        """Return turn(first, last, size), which translates these sentences, `size` at a time, and a function that turns its
        result into the worker's answer: the tokens.  Our plans persist between turns, as when sentences are served."""
        from pyops.text import decoding
        from pyops.text.pairs import Sequences
        from pyops.text.vocabulary import PAD
        config = self.config(folder)
        decoding.REPEATS = config.num_steps + 1             # the others do not cut a repetition, and untrained weights repeat
        with np.load(folder / 'data.npz') as file:
            source = file['source']
        who, _, compute = kind.partition('/')
        if who == 'ours':
            decode = self._model(config, folder, compute).decoding()
        elif who == 'ct2':
            return self._ctranslate2(config, folder, compute, source, threads)
        else:
            import torch
            model, source = self.twin(config, folder).eval(), torch.from_numpy(source).long()
            decode = torch.inference_mode()(lambda source: model.translate(source, config.num_steps).numpy())
            if kind == 'torch-compile':
                model.translate = torch.compile(model.translate)

        def packed(part):
            return Sequences.of([ids[ids != PAD] for ids in part.T], config.num_steps)

        def turn(first, last, size):
            parts = (source[:, at:min(at + size, last)] for at in range(first, last, size))
            return [decode(packed(part) if who == 'ours' else part.contiguous()) for part in parts]
        return turn, lambda outputs: dict(words=[column.tolist() for tokens in outputs for column in tokens.T])

    def _model(self, config, folder, compute):
        """Return our model with the initial weights, in a compute type as pyops.load creates it; '': float32."""
        from pyops.compute import Compute
        model = self.ours()[1](replace(config, ops=Compute(compute or 'float32')))
        with np.load(folder / 'weights.npz') as weights:
            model.config.ops.pack(model.params, weights)
        return model

    @staticmethod
    def _ctranslate2(config, folder, compute, source, threads):
        """The same for CTranslate2, which gets the tokens as texts."""
        import importlib

        import ctranslate2

        from pyops.text.vocabulary import EOS, PAD, SPECIALS
        tokens = [[*SPECIALS, *(str(i) for i in range(len(SPECIALS), n))] for n in (config.source_size, config.target_size)]
        with np.load(folder / 'weights.npz') as weights:
            spec = importlib.import_module('transformer.export').ctranslate2_spec(config, dict(weights), tokens)
        spec.validate()
        spec.optimize()
        path = folder / f'ct2-{compute}'
        path.mkdir()
        spec.save(str(path))
        translator = ctranslate2.Translator(str(path), compute_type=compute, inter_threads=1, intra_threads=threads)
        texts = [[tokens[0][i] for i in ids if i not in (PAD, EOS)] for ids in source.T]        # it adds the end mark itself
        numbers = {token: i for i, token in enumerate(tokens[1])}

        def turn(first, last, size):
            return translator.translate_batch(texts[first:last], beam_size=1, max_batch_size=size,
                                              max_decoding_length=config.num_steps)

        def describe(results):
            words = [[numbers[token] for token in result.hypotheses[0]] for result in results]
            ended = [ids + [EOS] * (len(ids) < config.num_steps) for ids in words]
            longest = max(map(len, ended))
            return dict(words=[ids + [PAD] * (longest - len(ids)) for ids in ended])
        return turn, describe
