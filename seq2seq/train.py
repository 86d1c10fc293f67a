"""Train the deep GRU on sentence pairs, go on with a checkpoint, or serve one.

    python -m seq2seq.train -e 50 -c ckpt           until 50 epochs are done; again after an interruption: goes on
    python -m seq2seq.train -e 0 -c ckpt            serve: translate what is typed
    python -m seq2seq.train -e 1 -t 1               a trial on 512 pairs
"""
import sys

from pyops.errors import UserError, exits_cleanly
from pyops.training import (
    ArgumentParser,
    add_plan_flags,
    asks_for_plan,
    fraction,
    int_up_to,
    non_negative_int,
    positive_float,
    positive_int,
)

PROGRAM = 'seq2seq.train'
# What a flag means that was not given; a resumed run takes the checkpoint's values first.
DEFAULTS = dict(batch_size=128, lr=0.005, dropout=0.2, seed=0, hold_out=None, tiny=0,
                embedding=256, hidden=256, layers=2, num_steps=9, reset_before=False)
EMBEDDED_HOLD_OUT = 0.1
MAX_NORM = 1.0          # gradients longer than this are clipped


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Train a deep GRU that translates English to French.')
    p.add_argument('-e', '--epochs', type=non_negative_int, default=50, metavar='N',
                   help='train until N epochs are done; 0 serves a checkpoint (default 50)')
    p.add_argument('-c', '--checkpoint', metavar='PATH',
                   help='a checkpoint, or a folder: its newest one is resumed, new ones go there '
                        '(without it: from scratch, into ./checkpoints)')
    p.add_argument('-f', '--corpus', metavar='FILE',
                   help="sentence pairs, one a line, tab between; .txt or .zip; 'embedded': the embedded ones")
    p.add_argument('--data-dir', metavar='DIR', help='where to look for fra-eng (default $PYOPS_DATA, then ./data)')
    p.add_argument('-b', '--batch-size', type=positive_int, metavar='N', help='pairs a step (default 128)')
    p.add_argument('-l', '--lr', type=positive_float, metavar='X', help='learning rate of Adam (default 0.005)')
    p.add_argument('-d', '--dropout', type=fraction, metavar='P', help='between layers (default 0.2)')
    p.add_argument('-t', '--tiny', type=int, choices=(0, 1), nargs='?', const=1,
                   help='1: only the first 512 pairs, for a trial')
    p.add_argument('--hold-out', type=fraction, metavar='F',
                   help='share of the sentences kept out for validation and test (default 0; embedded corpus 0.1)')
    p.add_argument('--seed', type=non_negative_int, metavar='N', help='of weights, dropout and data order (default 0)')
    p.add_argument('--threads', type=int_up_to(1024), metavar='N',
                   help='results do not depend on it (default: all cores)')
    p.add_argument('--save-every', type=positive_int, default=10, metavar='N', help='epochs between checkpoints (default 10)')
    p.add_argument('--embedding', type=int_up_to(65536), metavar='N', help='size of a word (default 256)')
    p.add_argument('--hidden', type=int_up_to(65536), metavar='N', help='size of a state (default 256)')
    p.add_argument('--layers', type=int_up_to(64), metavar='N', help='GRU layers, each side (default 2)')
    p.add_argument('--num-steps', type=int_up_to(1000), metavar='N',
                   help='tokens a sentence is cut or padded to (default 9)')
    p.add_argument('--reset-before', action='store_true', default=None,
                   help="the GRU's reset gate before the recurrent product, as first published")
    add_plan_flags(p)
    return p.parse_args(argv)


def resolve(args, state, path):
    """Flags that were given, then what the checkpoint says, then defaults -> dict.  Sizes and seed must agree."""
    from seq2seq.model import SIZES
    kept = state['settings'] if state else {}
    settings = {}
    for name, default in DEFAULTS.items():
        given = getattr(args, name)
        settings[name] = kept.get(name, default) if given is None else given
        if name in (*SIZES, 'seed', 'tiny') and name in kept and settings[name] != kept[name]:
            flag = '--' + name.replace('_', '-')
            raise UserError(f'{flag} {settings[name]}: {path} was trained with {kept[name]}; '
                            f'leave {flag} out, or give another folder with -c')
    return settings


def main(argv=None):
    args = parse(argv)
    from pyops import backend, checkpoint  # after parsing: --help needs no library
    if args.threads:
        backend.set_threads(args.threads)
    print(f'OMP_THREADS: {backend.threads()}')
    print(f'epochs : {args.epochs}')
    if args.epochs == 0:
        from seq2seq.translate import serve
        return serve(args.checkpoint)
    if args.checkpoint is not None:
        found = checkpoint.find(args.checkpoint)
    else:
        found = checkpoint.fresh('.' if asks_for_plan(args) else './checkpoints')
    train(args, found)


def train(args, found):
    from pyops import checkpoint, fit, plan
    from pyops.data.batches import epoch_order
    from pyops.optim import Adam
    from pyops.text.split import hold_out
    from pyops.text.translation import EMBEDDED, Pairs, Translator, check_vocabularies, open_corpus
    from seq2seq.model import SIZES, Config, Seq2Seq, parameter_specs

    for warning in found.warnings:
        print(warning, file=sys.stderr)
    kept, state = checkpoint.load(found.path) if found.path else (None, None)
    if state and state.get('program') != 'seq2seq':
        raise UserError(f'{found.path}: a checkpoint of {state.get("program")}, not of seq2seq; give another with -c')
    settings = resolve(args, state, found.path)
    print(f'dropout : {settings["dropout"]}\nlr : {settings["lr"]}\ntiny : {settings["tiny"]}')

    # data
    corpus, line = open_corpus(args.corpus, args.data_dir, settings['tiny'])
    if line:
        print(line)
    if settings['hold_out'] is None:
        settings['hold_out'] = EMBEDDED_HOLD_OUT if corpus.name == EMBEDDED else 0.0
    vocabularies = corpus.vocabularies()
    training, validation, test = hold_out(corpus, settings['hold_out'])
    pairs = Pairs.encode(training, *vocabularies, settings['num_steps'])
    held_out = Pairs.encode(validation, *vocabularies, settings['num_steps'])
    print('data loaded', flush=True)

    # model
    config = Config(*map(len, vocabularies), dropout=settings['dropout'], **{name: settings[name] for name in SIZES})
    fit.needs_memory(parameter_specs(config))
    model = Seq2Seq(config, settings['seed'])
    optimizer = Adam(model.params, settings['lr'], MAX_NORM)
    run = fit.Run(settings['seed'], settings['batch_size'])
    print(found.line)
    if state:
        check_vocabularies(found.path, state, vocabularies, pairs)
        fit.restore(model.params, optimizer, kept, found.path)
        run = fit.Run(**(state['run'] | {'batch_size': settings['batch_size']}))
        print('loaded from checkpoint')
        if run.epoch >= args.epochs and not asks_for_plan(args):
            print(f'all {args.epochs} epochs are done ({run.epoch} in {found.path}); '
                  f'-e {run.epoch + 10} trains on, -e 0 serves')
            return

    # training
    state = dict(program='seq2seq', settings=settings, pairs=pairs.digest(), corpus=corpus.name,
                 vocabularies=dict(zip(('source', 'target'), (v.tokens for v in vocabularies), strict=True)))

    def step(rows):
        model.params.zero_grads()
        loss, ctx = model.forward(*pairs.batch(rows), step=optimizer.count)
        valid = model.valid(ctx)
        plan.boundary()
        model.backward(ctx)
        optimizer.step()
        return loss, valid

    planned = plan.Steps(step, model.params, **pairs.arrays(), **model.arrays(), **optimizer.arrays())
    if asks_for_plan(args):
        return plan.tell(args, planned.plan(epoch_order(len(pairs), run.seed, run.epoch)[:run.batch_size]))
    run_step = step if args.no_plan else planned
    checkpoint.needs_room(found.folder, fit.room(model.params))
    def train_step(rows):
        loss, valid = run_step(rows)
        return float(loss[0]), int(valid[0]), optimizer.clipped()

    def validate():
        return {'validation': evaluate(model, held_out, run.batch_size)} if len(held_out) else {}

    done = fit.fit(run, len(pairs), args.epochs, train_step, found.folder,
                   fit.saver(found.folder, model.params, optimizer, run, state), args.save_every, validate)
    if done and len(test):
        from seq2seq.translate import score
        score(Translator(model, *vocabularies, settings['num_steps']), test)


def evaluate(model, pairs, batch_size):
    """Mean loss over the valid tokens of all pairs, without dropout."""
    import numpy as np
    loss_sum = tokens = 0
    for first in range(0, len(pairs), batch_size):
        indices = np.arange(first, min(first + batch_size, len(pairs)))
        loss, ctx = model.forward(*pairs.batch(indices), gradients=False)
        valid = int(model.valid(ctx)[0])
        loss_sum += float(loss[0]) * valid
        tokens += valid
    return loss_sum / tokens


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
