"""Ask `python -m pyops rewind` for random tensors of random steps, and compare their bits with those that the run saved.

    python -m scripts.rewind_questions --questions 100 --save      --save also writes the counts to docs/reliability.md
"""
import argparse
import contextlib
import io
import random
import sys
import tempfile
from pathlib import Path

from pyops.errors import exits_cleanly
from pyops.flags import ArgumentParser, non_negative_int, positive_int
from scripts.totals import PAGE, ROOT, write

PROGRAM = 'scripts.rewind_questions'
EPOCHS = 6


def trained(program, flags, folder, epochs):
    """Train with these flags, save all tensors of all steps, and return the entries of the dump and the number of steps."""
    from pyops.inspect.logs import Logs
    from pyops.steplog import Timeline
    with contextlib.redirect_stdout(io.StringIO()):
        program.main(['-e', str(epochs), '-c', str(folder / 'run'), *flags, '-d', '0.1', '--threads', '1', '--save-every', '2',
                      '--save-tensors', str(folder / 'tensors'), '--save-steps', ':', '--save-max', '1T'])
    return Logs(folder / 'tensors').entries, len(Timeline(folder / 'run'))


def key(entry):
    return entry.step, entry.layer, entry.operation, entry.name


def ask(entry, run, folder):
    """Ask for one saved tensor (an entry of Logs).   Return (whether its bits are equal, whether a checkpoint was used)"""
    from pyops import rewind
    from pyops.inspect.logs import Logs
    options = argparse.Namespace(folder=run, step=entry.step, show=[f'{entry.layer} {entry.operation}.{entry.name}'],
                                 save=folder, flags=[])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = rewind.rewind(options)
    again = [other for other in Logs(folder).entries if key(other) == key(entry)]
    is_equal = status == 0 and len(again) == 1 and again[0].shape == entry.shape and (
        again[0].load().tobytes() == entry.load().tobytes())
    return is_equal, 'from the start' not in out.getvalue()


def questions(count, seed=0, epochs=EPOCHS):
    """Ask half of the questions about a transformer, half about a seq2seq model.

    Return the texts of wrong answers, the number of steps and of tensors to choose from, and the number of answers from a
    checkpoint."""
    from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER

    import seq2seq.train
    import transformer.train
    rng, wrong, steps, tensors, resumed = random.Random(seed), [], 0, 0, 0
    for number, (program, flags) in enumerate([(transformer.train, TINY_TRANSFORMER), (seq2seq.train, TINY_SEQ2SEQ)]):
        with tempfile.TemporaryDirectory(prefix='pyops_questions_') as work:
            entries, length = trained(program, flags, Path(work), epochs)
            steps, tensors = steps + length, tensors + len(entries)
            for n in range((count + number) // 2):
                entry = rng.choice(entries)
                is_equal, is_resumed = ask(entry, Path(work) / 'run', Path(work) / f'answer_{n}')
                resumed += is_resumed
                if not is_equal:
                    wrong.append(f'{program.__name__}, step {entry.step}: {entry.layer} {entry.operation}.{entry.name}')
    return wrong, steps, tensors, resumed


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Compare tensors of past steps with those that a run saved.')
    p.add_argument('--questions', type=positive_int, default=100, metavar='N', help='default: %(default)s')
    p.add_argument('--seed', type=non_negative_int, default=0, metavar='N', help='other questions (default %(default)s)')
    p.add_argument('--save', action='store_true', help=f'write the counts to {PAGE.relative_to(ROOT)}')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    sys.path[:0] = [str(ROOT / 'tests' / name) for name in ('helpers', '')]
    wrong, steps, tensors, resumed = questions(args.questions, args.seed)
    for text in wrong:
        print(f'wrong : {text}')
    text = (f'{args.questions} questions (seed {args.seed}) about {tensors} tensors of {steps} steps, {resumed} answered from '
            f'a checkpoint and {args.questions - resumed} from the start: {len(wrong)} answers have other bits.\n')
    print(text, end='')
    if args.save:
        write('questions', text, f'python -m {PROGRAM} --save')
    return int(bool(wrong))


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        sys.exit(main())
