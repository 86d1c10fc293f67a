"""Shared by the digit programs: flags, loading, evaluation.  Nothing large is imported before the flags are parsed."""
import math

from pyops import programs
from pyops.flags import (
    ArgumentParser,
    add_finite_flags,
    add_gpu_flag,
    add_max_steps_flag,
    add_plan_flags,
    add_threads_flag,
    int_up_to,
    non_negative_int,
    output_file,
    positive_float,
    positive_int,
    use_device,
    use_ranks,
)
from pyops.inspect.flags import add_saving_flags

CLASSES = 10
CHANCE_LOSS = math.log(CLASSES)         # of a model that gives all digits the same probability


def parser(program, description, hidden, hidden_help, docstring=None):
    """Return a parser with the flags that all digit programs share; `hidden` is the default of --hidden."""
    p = ArgumentParser(prog=programs.command(program), description=description, docstring=docstring)
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
    add_finite_flags(p)
    add_saving_flags(p)
    return p


def load(args, ranks=False):
    """Select the device, load the data, print a few lines about it, and return Digits.   ranks: join the ranks of a launcher"""
    use_device(args)
    if ranks:
        use_ranks(args)
    if args.report:
        from . import report
        report.check()
    from pyops.data import mnist
    digits = mnist.load(args.data_dir, args.embedded)
    print(f'{digits.line}\nimages magic : {digits.images_magic}\nlabel magic : {digits.labels_magic}\n'
          f'lables_num : {len(digits.train_labels)}\ndata loaded.', flush=True)
    return digits


def about(program, args):
    """Return {'program': ..., 'settings': ...} for the manifest of saved tensors."""
    return dict(program=program, settings={name: value for name, value in vars(args).items() if not name.startswith('save_')})


def epoch_text(values, evaluation):
    """Return the lines about an epoch.  values: those that pyops.fit.Epoch.end returns."""
    samples, evaluated = values['samples'], len(evaluation)
    return (f'epoch : {values["epoch"] - 1} [{samples}/{samples}] loss : {values["loss"]:.6f}\n'
            f'evaluating :  [{evaluated}/{evaluated}] correct : {values["correct"]}')


def test_text(evaluation):
    """Return the line about the test file."""
    return f'test :  [{len(evaluation)}/{len(evaluation)}] correct : {evaluation.correct()}'


class Evaluation:
    """Counts the images that a model classifies correctly.

    images (N, 784) uint8, labels (N,) int32: numpy arrays
    predict(images, classes): writes the class of each image into classes (N,) int32; both are on the device
    """

    def __init__(self, images, labels, predict):
        import numpy as np

        from pyops import backend
        self._images, self._labels, self._predict = backend.put(images), labels, predict
        self._classes = backend.zeros(len(images), np.int32)

    def __len__(self):
        return len(self._labels)

    def correct(self):
        """Return the number of images that are classified correctly."""
        return int((self._predictions() == self._labels).sum())

    def draw_report(self, path, losses):
        """Draw confusion matrix, loss of each epoch and misread digits into `path`, a PNG."""
        from pyops import backend

        from . import report
        report.draw(path, losses, backend.get(self._images), self._labels, self._predictions())
        print(f'report drawn : {path}')

    def _predictions(self):
        from pyops import backend
        self._predict(self._images, self._classes)
        return backend.get(self._classes)
