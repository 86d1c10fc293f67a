"""What surrounds a training loop: signals, output that may fail, a log of metrics, progress.

Independent of any model; pyops.fit.Trainer puts them around the loop of a program.
"""
import contextlib
import datetime
import errno
import json
import math
import os
import signal
import stat
import sys
import time

from pyops.errors import UserError
from pyops.files import write_atomically


class Interrupt:
    """Context manager that turns the first SIGINT (Ctrl-C), SIGTERM or SIGHUP (closed terminal) into a flag.

    Programs read the flag at the end of a step.  It is true once a signal has arrived; `signal` is then the
    signal.Signals (None before).  A later Ctrl-C raises KeyboardInterrupt at once; later SIGTERMs and SIGHUPs change
    nothing: supervisors often send two.  SIGHUP stays ignored if it is on entry (nohup).  The previous handlers are
    restored on exit.  Enter it in the main thread: Python allows signal handlers only there.
    saves: whether the program saves before it leaves; the printed line mentions it.  prints: whether it is printed
    """

    def __init__(self, saves=True, prints=True):
        self.signal, self._promise, self._prints = None, b', then saving' if saves else b'', prints

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
        if not self._prints:
            return
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

    total: number of `unit` in an epoch, None if it is unknown (then give `every`); initial: how many of them an earlier run
    did; label: the text before the numbers;
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
                             bar_format='{desc}[{n_fmt}] {rate_noinv_fmt}{postfix}' if total is None else
                                        '{desc}[{n_fmt}/{total_fmt}] {percentage:3.0f}%|{bar}| '
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
        elif self.is_due(done) and (self.total is None or done < self.total or self.at_end):
            self._printed, self._last, self._next = self._lines_by(done), done, time.perf_counter() + self._every
            rate = (done - self._initial) / max(time.perf_counter() - self._start, 1e-9)
            timing = f'{rate:.{0 if rate >= 10 else 1}f} {self.unit}/s'
            if self.total is not None:
                minutes, seconds = divmod(round(max(self.total - done, 0) / rate), 60)
                timing += f', {minutes:02d}:{seconds:02d} left'
            print(f'{self.label}[{done}{"" if self.total is None else f"/{self.total}"}]', *filter(None, [_shown(values)]),
                  f'({timing})', file=self._file, flush=True)

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
        return self.lines * done // max(self.total or 1, 1)


def watch(items, total, label, unit='tensors'):
    """Yield the items; if that takes longer than two seconds, show on standard error how many of the total are done."""
    with Progress(total, unit, label=f'{label} ', file=sys.stderr, after=2.0, every=5.0) as progress:
        for done, item in enumerate(items, 1):
            yield item
            progress.update(done)


def _shown(values):
    return ' '.join(f'{key} : {value:.5f}' for key, value in values.items())
