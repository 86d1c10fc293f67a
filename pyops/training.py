"""Shared by all training programs: signals, output that may fail, a log of metrics, progress, flags.

Independent of any model.  The loop of a program looks like this:

    with Output(), Interrupt() as stop, Metrics(folder, epochs_done) as metrics:
        with Progress(len(pairs), unit='pairs') as progress:
            for batch in ...:
                loss = step(batch)
                progress.update(done, loss=loss)
                if stop:
                    save and leave
        metrics.write(epoch=epoch, loss=loss)
"""
import argparse
import contextlib
import datetime
import errno
import json
import math
import os
import re
import signal
import stat
import sys
import time

from pyops import PRECISIONS, __version__
from pyops.environment import backend_name
from pyops.errors import UserError
from pyops.files import write_atomically


class Interrupt:
    """Context manager that turns the first SIGINT (Ctrl-C), SIGTERM or SIGHUP (closed terminal) into a flag.

    Programs read the flag at the end of a step.  It is true once a signal has arrived; `signal` is then the
    signal.Signals (None before).  A later Ctrl-C raises KeyboardInterrupt at once; later SIGTERMs and SIGHUPs change
    nothing: supervisors often send two.  SIGHUP stays ignored if it is on entry (nohup).  The previous handlers are
    restored on exit.  Enter it in the main thread: Python allows signal handlers only there.
    saves: whether the program saves before it leaves; the printed line mentions it.
    """

    def __init__(self, saves=True):
        self.signal, self._promise = None, b', then saving' if saves else b''

    def __bool__(self):
        return self.signal is not None

    def __enter__(self):
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)   # None: not set from Python

    def _handle(self, number, _frame):
        if self:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.signal = signal.Signals(number)
        # os.write: a handler that interrupts a print may not call print.  OSError: the terminal is gone.
        with contextlib.suppress(OSError):
            below_the_bar = b'\n' if os.isatty(2) else b''
            os.write(2, below_the_bar + b'finishing this step' + self._promise + b' (Ctrl-C again leaves at once)\n')


class Output:
    """Context manager that keeps a failing standard output or standard error from interrupting a training run.

    After a terminal is closed, every write to it fails with EIO.  Such a stream is redirected to /dev/null and the run
    continues: SIGHUP decides whether it ends.  Any other failed write to standard output (a reader of a pipe that is
    gone, a full disk) is stored as `failure`, an OSError, and later output is dropped; the program saves, leaves, and
    raises it.  A failed write to standard error is ignored.
    """

    def __enter__(self):
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = map(_Stream, self._before)
        self._out = sys.stdout
        return self

    def __exit__(self, *_):
        sys.stdout, sys.stderr = self._before

    @property
    def failure(self):
        return self._out.failure


class _Stream:
    """A text stream whose write and flush raise no OSError."""

    def __init__(self, stream):
        self._stream, self.failure = stream, None

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        self._attempt('write', text)
        return len(text)

    def flush(self):
        self._attempt('flush')

    def _attempt(self, method, *arguments):
        if self.failure:
            return
        try:
            getattr(self._stream, method)(*arguments)
        except OSError as error:
            if error.errno == errno.EIO and stat.S_ISCHR(os.fstat(self._stream.fileno()).st_mode):  # no isatty: it is gone
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
            else:
                self.failure = error


class Metrics:
    """Appends one JSON object a line to `metrics.jsonl` in `folder`: numbers and strings by name.

    The file holds the epochs of one run.  run: its id, written to each line as "run"; epoch: number of epochs it has done
    (0: from scratch).  Lines count epochs done, so the first has "epoch" 1.  Opening the file keeps the lines that the run
    continues: whole ones of epochs up to `epoch`, with the same id or, from older versions, without one.  If there are
    others, of another run or of later epochs that will be trained again, the old file is copied to
    metrics_DATE_TIME.jsonl first, and one line is printed.  Half lines, left by a kill or a full disk, are dropped.

    UserError if the file cannot be opened or the copy cannot be written.  A line that later cannot be written causes one
    warning: the training is worth more than its log.
    """

    def __init__(self, folder, epoch=0, run=''):
        self.path = os.path.join(folder, 'metrics.jsonl')
        self._run = {'run': run} if run else {}
        self._is_whole = True               # the file ends with a whole line
        self._warned = False
        try:
            self._keep_own_lines(epoch)
            self._file = open(self.path, 'ab', buffering=0)
        except OSError as error:
            raise UserError(f'{self.path}: cannot write the metrics ({error.strerror}); '
                            'expected a file that can be written: move it away or name another folder') from error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def write(self, **values):
        """Append one line.  A value is a str, int, float, None or numpy scalar; JSON has no NaN: it becomes null."""
        line = json.dumps({key: _plain(value) for key, value in (values | self._run).items()}).encode() + b'\n'
        if not self._is_whole:
            line = b'\n' + line
        try:
            self._is_whole = self._file.write(line) == len(line)
            problem = None if self._is_whole else 'disk full'
        except OSError as error:
            problem = error.strerror
        if problem and not self._warned:
            self._warned = True
            print(f'warning: {self.path}: cannot write the metrics ({problem}); training goes on', file=sys.stderr)

    def close(self):
        self._file.close()

    def _keep_own_lines(self, epoch):
        try:
            with open(self.path, 'rb') as file:
                before = file.read()
        except FileNotFoundError:
            return
        own, others = b'', 0
        for line in before.split(b'\n'):
            kind = self._kind(line, epoch)
            own += line + b'\n' if kind == 'own' else b''
            others += kind == 'other'
        if others:
            now = datetime.datetime.now()
            while True:
                aside = f'{self.path.removesuffix(".jsonl")}_{now:%Y%m%d_%H%M%S}.jsonl'
                try:
                    _write_new(aside, before)
                    break
                except FileExistsError:
                    now += datetime.timedelta(seconds=1)
            lines = '1 line' if others == 1 else f'{others} lines'
            print(f'{self.path}: has {lines} that this run does not continue; the old file is kept as {aside}', flush=True)
        if own != before:
            write_atomically(self.path, own)

    def _kind(self, line, epoch):
        """Classify a line of metrics.jsonl (bytes): 'own', 'other', or 'half' (a partial line, or nothing)."""
        if not line.strip(b'\0 \t\r'):
            return 'half'
        try:
            values = json.loads(line)
            is_own = 1 <= values['epoch'] <= epoch and values.get('run') in (None, *self._run.values())
            return 'own' if is_own else 'other'
        except ValueError:
            return 'half' if line.startswith(b'{"') else 'other'
        except (KeyError, AttributeError, TypeError, RecursionError):
            return 'other'


def _write_new(path, content):
    """Write a file that does not exist yet, durably or not at all."""
    with open(path, 'xb') as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(path)
            raise


def _plain(value):
    value = value.item() if hasattr(value, 'item') else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Progress:
    """The progress of an epoch, or of other work: on a terminal a bar with the rate, the time left and the running loss;
    redirected, plain lines at even distances: `[50048/167130] loss : 4.12345 (431 pairs/s, 04:31 left)`.

    total: number of `unit` in an epoch; initial: how many of them an earlier run did; label: the text before the numbers;
    lines: the number of plain lines, 0 for none; at_end: whether the last one, for the whole total, is printed too.
    file: standard output unless given.  after: print nothing in the first `after` seconds, then a plain line at most every
    `every` seconds instead of `lines`, and none at the end.
    """

    def __init__(self, total, unit='pairs', initial=0, label='', lines=10, at_end=True, file=None, after=0.0, every=0.0):
        self.total, self.unit, self.label, self.lines, self.at_end = total, unit, label, lines, at_end and not every
        self._file, self._every = file or sys.stdout, every
        self._start, self._initial = time.perf_counter(), initial
        self._next = self._start + after            # time of the next plain line, with `every`
        self._printed, self._last = self._lines_by(initial), None       # plain lines, and what is done in the last one
        self._bar = None
        if self._file.isatty():
            from tqdm import tqdm
            has_width = False
            with contextlib.suppress(OSError):          # a terminal that was just closed
                has_width = os.get_terminal_size(self._file.fileno()).columns > 0     # a bare pseudo-terminal reports 0
            self._bar = tqdm(total=total, initial=initial, unit=f' {unit}', desc=label, file=self._file, delay=after,
                             leave=False, miniters=1, dynamic_ncols=has_width, ncols=None if has_width else 80,
                             bar_format='{desc}[{n_fmt}/{total_fmt}] {percentage:3.0f}%|{bar}| '
                                        '{rate_noinv_fmt}, {remaining} left{postfix}')

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def update(self, done, **values):
        """Show that `done` of the total are done (not: more); values, such as loss=1.5, are shown with five decimals."""
        if self._bar is not None:
            self._bar.set_postfix_str(_shown(values), refresh=False)
            self._bar.update(done - self._bar.n)
        elif self.is_due(done) and (done < self.total or self.at_end):
            self._printed, self._last, self._next = self._lines_by(done), done, time.perf_counter() + self._every
            rate = (done - self._initial) / max(time.perf_counter() - self._start, 1e-9)
            minutes, seconds = divmod(round(max(self.total - done, 0) / rate), 60)
            timing = f'({rate:.{0 if rate >= 10 else 1}f} {self.unit}/s, {minutes:02d}:{seconds:02d} left)'
            print(f'{self.label}[{done}/{self.total}]', *filter(None, [_shown(values)]), timing, file=self._file, flush=True)

    def is_due(self, done):
        """Return whether a plain line is due when so many are done: a bar may skip some values, a line may not."""
        if self._bar is not None:
            return False
        return time.perf_counter() >= self._next if self._every else self._lines_by(done) > self._printed

    def stopped(self, done, **values):
        """Print a last line, unless update() just did: the work ended early, after `done` of the total."""
        self.close()
        if done != self._last:
            print(f'{self.label}[{done}/{self.total}]', *filter(None, [_shown(values)]), file=self._file, flush=True)

    def print(self, line):
        """Print another line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(line, file=self._file)
        else:
            print(line, file=self._file, flush=True)

    def close(self):
        """Remove the bar; printed lines stay."""
        if self._bar is not None:
            self._bar.close()

    def _lines_by(self, done):
        return self.lines * done // max(self.total, 1)


def watch(items, total, label, unit='tensors'):
    """Yield the items; if that takes longer than two seconds, show on standard error how many of the total are done."""
    with Progress(total, unit, label=f'{label} ', file=sys.stderr, after=2.0, every=5.0) as progress:
        for done, item in enumerate(items, 1):
            yield item
            progress.update(done)


def _shown(values):
    return ' '.join(f'{key} : {value:.5f}' for key, value in values.items())


def say(text):
    """Print the text, unless it is empty or None."""
    if text:
        print(text, flush=True)


# ---- flags ---------------------------------------------------------------------------------------------------------

class ArgumentParser(argparse.ArgumentParser):
    """argparse with --version and without abbreviated flags, since a flag that is added later may change their meaning.

    An error is one line, `PROGRAM: error: -e/--epochs: expected ..., got -1; see --help`, and exit status 2.  For an unknown
    flag it names the nearest ones.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)
        # So that `-l -1e-3` is a flag with a bad value and not two flags; argparse itself knows only -1 and -1.5.
        self._negative_number_matcher = re.compile(r'-(\d|\.\d|inf|nan)')
        self.add_argument('--version', action='version', version=f'pyops {__version__}', help='print the version and exit')

    def parse_known_args(self, args=None, namespace=None):
        """Like argparse's, but unknown arguments are an error here: a subcommand reports them under its own name."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f'unrecognized arguments: {" ".join(unknown)}{self._nearest_flags(unknown)}')
        return namespace, unknown

    def _nearest_flags(self, unknown):
        typed = next((text.partition('=')[0] for text in unknown if re.match('--[a-z]', text)), None)
        if typed is None:
            return ''
        import difflib  # not at the top: needed only for an error
        flags = [flag for action in self._actions for flag in action.option_strings]
        alike = [flag for flag in flags if flag.startswith(typed[:6])]          # the same first four letters
        near = difflib.get_close_matches(typed, alike, 3, 0) or difflib.get_close_matches(typed, flags, 1, 0.75)
        return f'; did you mean {" or ".join(near)}?' if near else ''

    def error(self, message):
        message = ' '.join(message.removeprefix('argument ').split())
        self.exit(2, f'{self.prog}: error: {message}{" See" if message.endswith("?") else "; see"} --help\n')

    def group(self, title, description=None):
        """Return the argument group with this title, made on first use.  --help and docs/programs.md list flags by group."""
        found = next((group for group in self._action_groups if group.title == title), None)
        return found or self.add_argument_group(title, description)

    def add_commands(self):
        """Return the object to which subcommands are added.  Each sets `run` with set_defaults(); without a subcommand `run`
        prints the help and exits with status 2."""
        def no_command(_):
            self.print_help(sys.stderr)
            self.exit(2)
        self.set_defaults(run=no_command)
        return self.add_subparsers(title='commands', metavar='COMMAND')


def list_programs(package, description, programs, arguments=None):
    """Run `python -m PACKAGE` for a package that only contains programs: print a usage that lists them, and exit with status 2,
    or 0 for --help.

    programs: {name: one line}, for `python -m PACKAGE.NAME`.
    """
    wide = max(map(len, programs))
    lines = [f'  python -m {package}.{name:{wide}}  {text}' for name, text in programs.items()]
    parser = ArgumentParser(prog=f'python -m {package}', usage=f'python -m {package}.PROGRAM [FLAGS]',
                            description='\n'.join([description, '', *lines]),
                            epilog=f'python -m {package}.PROGRAM --help lists the flags of a program.',
                            formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in ('-h', '--help', '--version'):
        parser.parse_args(arguments[:1])
    parser.print_help(sys.stderr)
    parser.exit(2)


def add_gpu_flag(parser):
    """-g, --gpu 1 or 0; --precision."""
    group = parser.group('GPU')
    group.add_argument('-g', '--gpu', type=int, choices=(0, 1), nargs='?', const=1,
                       help='1, or no value: run on a GPU, or on the emulator with PYOPS_EMULATE_CUDA=1; 0: run on the CPU, '
                       'whatever PYOPS_BACKEND is (default 0, or 1 if PYOPS_BACKEND=gpu)')
    group.add_argument('--precision', choices=PRECISIONS, help='on a GPU, round the factors of matrix products to this '
                       f'precision; everything else stays float32 (default {PRECISIONS[0]})')


def use_gpu(args):
    """Select the device from the flags of `add_gpu_flag`, else from $PYOPS_BACKEND, and set args.gpu to 0 or 1.

    UserError if there is no GPU, --precision is given without one, or $PYOPS_BACKEND is unknown or, without -g, numpy.
    """
    name, source = backend_name(), 'PYOPS_BACKEND=gpu' if args.gpu is None else '-g 1'
    if args.gpu is None:
        if name == 'numpy':
            raise UserError('PYOPS_BACKEND=numpy: training and translation need the kernels of the library; '
                            'set it to cpu or gpu, or unset it')
        args.gpu = int(name == 'gpu')
    elif not args.gpu and name != 'cpu':
        os.environ['PYOPS_BACKEND'] = 'cpu'             # -g 0 wins; pyops.ndarray reads the variable when it is imported
        from pyops import backend
        backend.use(backend.HOST)
    if args.gpu:
        from pyops.ndarray import use_gpu
        try:
            use_gpu(args.precision or PRECISIONS[0])
        except UserError as error:
            raise UserError(f'{source}: {error}') from error
    elif args.precision:
        raise UserError(f'--precision {args.precision}: the CPU calculates in float32; leave it out, or give -g 1')


def add_quant_flags(parser, default):
    """--quant, --quant-layers: which operands of matrix products are rounded to which number format (pyops.quantization).
    default: the recipe without --quant, for --help."""
    group = parser.group('number formats')
    group.add_argument('--quant', type=_recipe, metavar='RECIPE',
                       help='quantize the operands of matrix products to hifp8, mxfp8, mxfp4, bf16 or fp16; or some '
                       'operands, as operand=format separated by commas: fwd=mxfp8,dgrad.g=hifp8,attention=none; see '
                       f'docs/quantization.md (default: {default})')
    group.add_argument('--quant-layers', metavar='PATTERN',
                       help="quantize only layers with these names, such as 'encoder.*,output' "
                       f"(default: {'as in the checkpoint, else ' * ('checkpoint' in default)}all)")


def _recipe(text):
    """An argparse type: the text of a pyops.quantization.Recipe."""
    from pyops.quantization import Recipe
    try:
        return str(Recipe.parse(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_threads_flag(parser, group='training'):
    """--threads N, for pyops.backend.set_threads."""
    parser.group(group).add_argument('--threads', type=int_up_to(1024), metavar='N',
                                     help='number of threads; results do not depend on it (default: all cores)')


def add_max_steps_flag(parser):
    """--max-steps N, of pyops.fit."""
    parser.group('training').add_argument('--max-steps', type=positive_int, metavar='N',
                                          help='stop after N training steps, with exit status 0 (default: no limit)')


def add_plan_flags(parser):
    """--plan, --profile [FILE], --dot FILE: describe the training step instead of training;  -v: list its kernels first;
    --no-plan: train without a plan.

    args.listing: 'kernels' with -v, 'summary' without it; a program may add flags with other values, and the last one counts.
    """
    group = parser.group('training step', 'With --plan, --profile or --dot the program describes a training step and exits.')
    group.add_argument('--plan', action='store_true', help='print every tensor, every kernel and the memory of a step')
    group.add_argument('--profile', nargs='?', const=False, type=output_file, metavar='FILE',
                       help='time every kernel of a step; FILE: also write a Chrome trace, for chrome://tracing or Perfetto')
    group.add_argument('--dot', type=output_file, metavar='FILE', help='write the step as a graph for Graphviz')
    exclusive = group.add_mutually_exclusive_group()
    exclusive.add_argument('-v', '--verbose', dest='listing', action='store_const', const='kernels', default='summary',
                           help='list every kernel of a step, then train')
    exclusive.add_argument('--no-plan', action='store_true',
                           help='train, but run every step from Python: slower, same numbers')


def asks_for_plan(args):
    """Return whether the flags of `add_plan_flags` ask for a description of the step instead of training."""
    return bool(args.plan or args.profile is not None or args.dot is not None)


def output_file(text):
    """An argparse type: a file that can be written, checked before the work that produces its content.  An existing file is
    not changed."""
    if not text:
        raise argparse.ArgumentTypeError("expected the name of a file, got ''")
    if not os.path.exists(text) or os.path.isfile(text) or os.path.isdir(text):     # not a pipe, whose reader would notice
        is_new = not os.path.exists(text)
        try:
            with open(text, 'ab'):
                pass
            if is_new:
                os.unlink(os.path.realpath(text))
        except OSError as error:
            raise argparse.ArgumentTypeError(f'{text}: cannot be written ({error.strerror}); '
                                             'name a file in a folder that exists') from None
    return text


LARGEST_INT = 10**18 - 1        # fits C's int64_t


def positive_int(text):
    """An argparse type: a whole number >= 1."""
    return _int(text, 1)


def non_negative_int(text):
    """An argparse type: a whole number >= 0."""
    return _int(text, 0)


def int_up_to(most):
    """Return an argparse type: a whole number from 1 to `most`, for sizes where a typing error asks for too much memory."""
    return lambda text: _int(text, 1, most)


def positive_float(text):
    """An argparse type: a number > 0 that is neither zero nor infinite as float32, which kernels calculate in."""
    return _float(text, 'a number from 1e-37 to 1e38', lambda value: 1e-37 <= value <= 1e38)


def non_negative_float(text):
    """An argparse type: a finite number >= 0."""
    return _float(text, 'a finite number >= 0', lambda value: 0 <= value < math.inf)


def fraction(text):
    """An argparse type: a number with 0 <= number < 1, as for a share held out or dropped."""
    return _float(text, 'a number >= 0 and < 1', lambda value: 0 <= value < 1)


def _int(text, least, most=LARGEST_INT):
    if re.fullmatch(r'[+-]?[0-9]{1,18}', text) and least <= int(text) <= most:
        return int(text)
    has_bound = most < LARGEST_INT or re.fullmatch(r'\+?[0-9]{19,}', text)     # else it is no part of the problem
    raise _unexpected(text, f'a whole number from {least} to {most}' if has_bound else f'a whole number >= {least}')


def _float(text, expected, is_good):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not is_good(value):
        raise _unexpected(text, expected)
    return value


def _unexpected(text, expected):
    return argparse.ArgumentTypeError(f'expected {expected}, got ' + (text or "''"))
