"""Shared by the digit programs: flags, loading, training with a plan, progress lines, evaluation and the report.

A program supplies a training step and a predict function.  Nothing large is imported before the flags are parsed.
"""
import math

from pyops.inspect import flags
from pyops.training import (
    ArgumentParser,
    Progress,
    add_gpu_flag,
    add_max_steps_flag,
    add_plan_flags,
    add_threads_flag,
    asks_for_plan,
    int_up_to,
    non_negative_int,
    output_file,
    positive_float,
    positive_int,
    say,
    use_gpu,
)

MODULES = 'pyops.quantization', 'pyops.plan', 'pyops.fit', 'pyops.optim', 'numpy.random'    # used by `train`
CLASSES = 10


def parser(program, description, hidden, hidden_help):
    """Return a parser with the flags that all digit programs share; `hidden` is the default of --hidden."""
    p = ArgumentParser(prog=f'python -m {program}', description=description)
    p.set_defaults(program=program)
    training, data, output = map(p.group, ('training', 'data', 'output'))
    training.add_argument('-e', '--epochs', type=non_negative_int, default=10, metavar='N',
                          help='number of epochs (default %(default)s)')
    training.add_argument('-l', '--lr', type=positive_float, default=0.001, metavar='X',
                          help='learning rate of Adam (default %(default)s)')
    training.add_argument('-b', '--batch-size', type=positive_int, default=100, metavar='N',
                          help='images per step (default %(default)s)')
    add_max_steps_flag(p)
    training.add_argument('--seed', type=non_negative_int, default=0, metavar='N',
                          help='seed of all random numbers (default %(default)s)')
    add_threads_flag(p)
    p.group('model').add_argument('--hidden', type=int_up_to(65536), default=hidden, metavar='N',
                                  help=f'{hidden_help} (default %(default)s)')
    data.add_argument('--data-dir', metavar='DIR', help='search for MNIST only in DIR (default: $PYOPS_DATA, then ./data)')
    data.add_argument('--embedded', action='store_true', help='use the embedded digits even if MNIST is found')
    output.add_argument('--report', type=output_file, metavar='FILE',
                        help='draw confusion matrix, loss curve and misread digits into FILE, a PNG; needs matplotlib')
    output.add_argument('--quiet', dest='listing', action='store_const', const='nothing', default='summary',
                        help='print no summary of the training step')
    add_gpu_flag(p)
    add_plan_flags(p)
    flags.add_saving_flags(p)
    return p


def load(args, module):
    """Load the data, print a few lines about it and return Digits.  Meanwhile, import `module` and its dependencies."""
    flags.wanted(args)                  # report bad flags before anything is loaded
    use_gpu(args)
    if args.report:
        from mnist import report
        report.check()

    import importlib

    from pyops.data import mnist

    # zlib releases the GIL: the images are decompressed while numpy, the modules and the library are loaded.
    loaded = _meanwhile(mnist.load, args.data_dir, args.embedded)
    for name in (module, *MODULES):
        importlib.import_module(name)
    from pyops import backend
    backend.isa()
    if args.threads:
        backend.set_threads(args.threads)
    digits = loaded()
    print(f'{digits.line}\nimages magic : {digits.images_magic}\nlabel magic : {digits.labels_magic}\n'
          f'lables_num : {len(digits.train_labels)}\ndata loaded.', flush=True)
    return digits


def _meanwhile(function, *arguments):
    """Call a function in a thread.  Return wait(), which returns its result or raises its exception.

    concurrent.futures does the same but takes 5 ms to import.
    """
    import threading
    outcome = {}

    def call():
        try:
            outcome['value'] = function(*arguments)
        except BaseException as error:
            outcome['error'] = error

    def wait():
        thread.join()
        if 'error' in outcome:
            raise outcome['error']
        return outcome['value']

    thread = threading.Thread(target=call)
    thread.start()
    return wait


def train(args, digits, optimizer, params, step, predict, prepare=None, at_once=1, **inputs):
    """Train and evaluate, or describe the step if the flags ask for that.  Return whether all epochs were done.

    step(rows) -> loss array: one training step, which a plan can record; `inputs` names the arrays that outlive it
    predict(images, classes): write the class of each image, (N, 784) uint8, into classes (N,) int32
    prepare(rows, epoch): called before each step and not recorded
    at_once: steps per replay call
    Raises Interrupted if a signal ended the training.
    """
    import contextlib

    import numpy as np

    from pyops import backend, fit, plan
    from pyops.data.batches import epoch_order, split

    (images, _), (evaluated, labels) = digits.parts()
    run, losses, history = fit.Run(args.seed, args.batch_size), [], fit.History()
    evaluated, predictions = backend.put(evaluated), backend.zeros(len(evaluated), np.int32)
    first_batch = epoch_order(len(images), args.seed, 0)[:args.batch_size]

    def noted_step(rows):
        for batch in split(rows, args.batch_size):
            history.add(step(batch), None, optimizer.norm)

    planned = plan.Steps(noted_step, params, **inputs, **optimizer.arrays(), **history.arrays())
    if asks_for_plan(args):
        plan.describe(args, planned.plan(first_batch))
        return False
    run_step = noted_step if args.no_plan else planned

    def train_step(rows):
        if prepare:
            prepare(rows, run.epoch)
        run_step(rows)

    def results(sizes):
        return [(loss, size, optimizer.clips(norm))
                for size, (loss, _, norm) in zip(sizes, history.read(len(sizes)), strict=True)]

    def validate():
        predict(evaluated, predictions)
        return {'correct': int((backend.get(predictions) == labels).sum())}

    def progress(epoch, total, initial):
        return Progress(total, 'images', initial, lines=0)

    def epoch_line(values):
        losses.append(values['loss'])
        return (f'epoch : {values["epoch"] - 1} [{len(images)}/{len(images)}] loss : {values["loss"]:.6f}\n'
                f'evaluating :  [{len(predictions)}/{len(predictions)}] correct : {values["correct"]}')

    if not args.no_plan:
        say(plan.before_training(args, planned.plan(first_batch)))
    saving, wanted = None, flags.wanted(args)
    if wanted:
        from pyops.inspect.saving import Saving
        settings = {name: value for name, value in vars(args).items() if name != 'program' and not name.startswith('save_')}
        steps = fit.steps_left(run, len(images), args.epochs, max_steps=args.max_steps)
        saving = Saving(wanted, planned, first_batch, 0, steps, dict(program=args.program, settings=settings))
        run_step, history.on_read = saving.step, saving.note
    with saving or contextlib.nullcontext():
        ended = fit.fit(run, len(images), args.epochs, train_step, results, validate=validate, line=epoch_line,
                        progress=progress, at_once=at_once, max_steps=args.max_steps, chance_loss=math.log(CLASSES))
    if args.report:
        from mnist import report
        if not losses:
            validate()
        report.draw(args.report, losses, *map(backend.get, (evaluated, labels, predictions)))
        print(f'report drawn : {args.report}')
    if saving:
        saving.check()
    ended.leave()
    return ended.done
