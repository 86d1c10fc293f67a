"""Shared by the GPU checks: a report that is written as it grows, timing in turns, and the PyTorch contestants."""
import contextlib
import gc
import json
import math
import sys
import time
from types import SimpleNamespace

import numpy as np

from pyops.errors import UserError
from pyops.files import write_atomically
from pyops.flags import select_storage

WRONG, CUT = 1, 3           # exit status: a result is wrong; the time limit left something out


class Run:
    """One section of the benchmark: its device, sizes and deadline, and the report.

    The report is written after every change, so that a killed process leaves its figures.  A figure is a dict with `what` and
    `checks`: {name: dict(error, bound, ok)}.
    """

    def __init__(self, gpu, torch, sizes, report, path=None, ends=math.inf):
        self.gpu, self.torch, self.sizes, self.path, self.ends = gpu, torch, sizes, path, ends
        self.report = report | dict(sections={}, wrong=[], left_out=[])
        self._section, self.kept = None, {}     # kept: for sections, between figures

    def section(self, name):
        self._section = name
        self.report['sections'][name] = []
        self.save()

    def save(self):
        if self.path:
            try:
                write_atomically(self.path, (json.dumps(self.report, indent=1) + '\n').encode())
            except OSError as error:
                raise UserError(f'{self.path}: cannot be written ({error.strerror}); name another file with --json') from error

    def is_over(self):
        return time.monotonic() >= self.ends

    def figure(self, what, **more):
        """Start a figure.  Return None, and report it as left out, if no time is left."""
        if self.is_over():
            self.report['left_out'].append(f'{self._section}: {what}')
            print(f'{what:58} left out: the time limit is over', flush=True)
            self.save()
            return None
        made = dict(what=what, checks={}, **more)
        self.report['sections'][self._section].append(made)
        return made

    def check(self, figure, name, error, bound=0.0):
        """Record an error and its bound.  NaN is an error."""
        ok = bool(error <= bound)
        figure['checks'][name] = dict(error=float(error), bound=float(bound), ok=ok)
        if not ok:
            self.report['wrong'].append(f'{self._section}: {figure["what"]}: {name}: error {error:.3g}, bound {bound:.3g}')
            print(f'WRONG {self.report["wrong"][-1]}', flush=True)
        self.save()

    def timed(self, figure, seconds, **more):
        """Record the seconds of contestants that took turns.  `ratio` is relative to the fastest PyTorch contestant so far."""
        figure.update(more, ours_s=seconds['ours'])
        figure.setdefault('all_s', {}).update(seconds)
        ratios = figure.setdefault('ratios', {})
        ratios.update({name: s / seconds['ours'] for name, s in seconds.items() if name != 'ours'})
        if ratios:
            figure['best'] = min(ratios, key=ratios.get)
            figure['ratio'] = ratios[figure['best']]
        self.save()

    def show(self, figure, note=''):
        """Print the line of a figure."""
        errors = [check['error'] / check['bound'] for check in figure['checks'].values() if check['bound']]
        ours = f'ours {1e3 * figure["ours_s"]:10.3f} ms' if 'ours_s' in figure else ''
        best = figure.get('best')
        versus = f'{best} {1e3 * figure["all_s"][best]:.3f} ms, {figure["ratio"]:.2f} x' if best else ''
        is_right = all(check['ok'] for check in figure['checks'].values())
        state = 'WRONG' if not is_right else f'right, {max(errors):4.0%} of the bound' if errors else 'right'
        print(f'{figure["what"]:48} {state:24} {ours} {note} {versus}'.rstrip(), flush=True)

    def status(self):
        return WRONG if self.report['wrong'] else CUT if self.report['left_out'] else 0


def compare(run, figure, results, references, tolerance, prefix=''):
    """Check float arrays {name: array} against references: the error relative to the norm, and the largest error."""
    for name, want in references.items():
        got, want = (np.asarray(x, np.float64).ravel() for x in (results[name], want))
        size = math.sqrt(np.mean(want**2)) or 1.0
        error = np.abs(got - want)
        run.check(figure, f'{prefix}{name} rms', math.sqrt(np.mean(error**2)) / size, tolerance)
        run.check(figure, f'{prefix}{name} largest', error.max(initial=0.0) / size, 25 * tolerance)


def same_bits(run, figure, results, before):
    """Check that results {name: array} have not changed a bit since `before`."""
    for name, array in results.items():
        now, then = (np.asarray(x).view(f'u{x.dtype.itemsize}') for x in (array, before[name]))
        run.check(figure, f'{name} after timing: changed elements', np.count_nonzero(now != then))


@contextlib.contextmanager
def precision_of(name, stores_bf16=False):
    """Inside the block the GPU computes as a program does with this --precision.  stores_bf16: whether it then also stores
    activations as bfloat16 (pyops.flags.select_storage)."""
    from pyops.ndarray import use_gpu
    device = use_gpu(name)
    if stores_bf16:
        select_storage(SimpleNamespace(precision=name))
    try:
        yield device
    finally:
        use_gpu()


# ---- timing ----------------------------------------------------------------------------------------------------------

def median_seconds(contestants, turns, seconds):
    """Time contestants {name: (run(n), wait())}: n repetitions, and synchronisation.  Return {name: seconds per repetition}.

    turns: turns per contestant; seconds: duration of a turn.
    """
    repeats, measured = {}, {name: [] for name in contestants}
    for name, (run, wait) in contestants.items():
        run(3)                                          # warm up: compile, capture, load
        wait()
        start = time.perf_counter()
        run(3)
        wait()
        one = (time.perf_counter() - start) / 3
        repeats[name] = max(1, math.ceil(seconds / max(one, 1e-6)))
    for _ in range(turns):
        for name, (run, wait) in contestants.items():
            start = time.perf_counter()
            run(repeats[name])
            wait()
            measured[name].append((time.perf_counter() - start) / repeats[name])
    return {name: float(np.median(s)) for name, s in measured.items()}


def repeated(call):
    """Return run(n), which calls call() n times."""
    def run(n):
        for _ in range(n):
            call()
    return run


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

class Torch:
    """The PyTorch contestants; false if PyTorch is not used."""

    def __init__(self, wanted):
        self.torch = None
        if wanted:
            import torch
            self.torch, self.has_gpu = torch, torch.cuda.is_available()
            self.device = 'cuda' if self.has_gpu else 'cpu'

    def __bool__(self):
        return self.torch is not None

    def wait(self):
        if self.has_gpu:
            self.torch.cuda.synchronize()

    def start_peak(self):
        """Forget the most memory of tensors in use so far, and return the bytes in use; 0 without a GPU."""
        if not self.has_gpu:
            return 0
        gc.collect()
        self.torch.cuda.reset_peak_memory_stats()
        return self.torch.cuda.memory_allocated()

    def peak(self):
        """Return the most bytes of tensors in use since start_peak()."""
        return self.torch.cuda.max_memory_allocated()

    def put(self, array):
        return self.torch.tensor(array, device=self.device)

    @contextlib.contextmanager
    def precision(self, name):
        """Inside the block, float32 products have the precision of ours; bf16 means autocast."""
        torch = self.torch
        torch.set_float32_matmul_precision('highest' if name == 'fp32' else 'high')
        torch.backends.cudnn.allow_tf32 = name != 'fp32'
        with torch.autocast(self.device, torch.bfloat16) if name == 'bf16' else contextlib.nullcontext():
            yield

    def contestants(self, step, rows, precision, kind='eager'):
        """Return {name: (run, wait)}: a step called directly, and, on a GPU, captured in a CUDA graph.

        step(rows) trains on the samples with these indices, and gathers them itself, so that the graph contains the gather, as
        ours does.  rows() -> indices (k, B) of the next k steps, k constant: a graph holds k steps.  A repetition is k steps.
        """
        made = {}
        kinds = {f'torch {kind}': self._plain} | ({f'torch {kind} graph': self._graph} if self.has_gpu else {})
        for name, make in kinds.items():
            try:
                made[name] = make(step, rows, precision), self.wait
            except Exception as error:                  # report and leave out a contestant that fails
                print(f'{name}: left out ({" ".join(str(error).split())[:200]})', file=sys.stderr)
        return made

    def _plain(self, step, rows, precision):
        def run(n):
            with self.precision(precision):
                for _ in range(n):
                    for batch in rows():
                        step(batch)
        run(2)
        return run

    def _graph(self, step, rows, precision):
        torch = self.torch
        place = rows().clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), self.precision(precision):
            for _ in range(3):
                step(place[0])
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), self.precision(precision):
            for batch in place:
                step(batch)

        def run(n):
            for _ in range(n):
                place.copy_(rows())
                graph.replay()
        run(2)
        return run
