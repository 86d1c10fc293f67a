"""Repeat steps of a training run from its checkpoints: `python -m pyops rewind`, `bisect` and `branch`.

The newest checkpoint before the step is copied to a temporary folder, and the program trains from there with the flags of the
run.  Training has the same bits every time (docs/determinism.md), and the losses that the run recorded prove it.
"""
from __future__ import annotations

import contextlib
import importlib
import io
import operator
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import checkpoint, programs
from pyops.action_file import describe
from pyops.errors import UserError, printable
from pyops.steplog import Session, Timeline

if TYPE_CHECKING:
    from argparse import Namespace

# flags that do not change the bits of a run, and select what is saved and where: with a value, with an optional one, without
OF_ONE_START = ('-c', '--checkpoint', '--max-steps', '--save-tensors', '--save-layers', '--save-steps', '--save-max',
                '--save-as')
WITH_VALUE = *OF_ONE_START, '--save-every', '--save-minutes', '--keep', '--keep-best', '--patience'
WITHOUT_VALUE = '--no-plan', '-v', '--verbose'
OPTIONAL_VALUE = '--check-finite', '--profile'
NEVER = 10**9
RECORDED = 'seq2seq', 'transformer'         # the programs that write the files of a StepLog
OPERANDS = {'fwd.x': 'input', 'fwd.w': 'weight', 'fwd.y': 'output', 'dgrad.g': 'grad_output', 'dgrad.w': 'weight',
            'dgrad.dx': 'grad_input', 'wgrad.g': 'grad_output', 'wgrad.x': 'input', 'qk.q': 'query', 'qk.k': 'key',
            'pv.p': 'weights', 'pv.v': 'value', 'pv.y': 'output'}
COMPARE = {'>=': operator.ge, '<=': operator.le, '>': operator.gt, '<': operator.lt}


def kept_flags(flags: list[str], dropped: tuple[str, ...] = WITH_VALUE) -> list[str]:
    """Return the flags of a run without those that select files, tensors to save and the end of the run.
    dropped: the flags with a value that are left out"""
    kept, rest = [], list(flags)
    while rest:
        flag = rest.pop(0)
        name = flag.partition('=')[0]
        if name in WITHOUT_VALUE or re.fullmatch('-c.+', flag) or name in (*dropped, *OPTIONAL_VALUE) and '=' in flag:
            continue
        if name in dropped or name in OPTIONAL_VALUE and rest and not rest[0].startswith('-'):
            del rest[:1]
        elif name not in OPTIONAL_VALUE:
            kept.append(flag)
    return kept


def checkpoint_before(timeline: Timeline, step: int) -> tuple[int, Path | None]:
    """Return the newest intact checkpoint with at most `step` steps: its number of steps and its path; (0, None) for the start
    of the run.   UserError if the run did not start in this folder and no checkpoint is left"""
    for done, path in reversed(timeline.saved):
        if done <= step:
            try:
                checkpoint.load(path, mapped=True)
            except UserError as error:
                print(f'warning: passed over {error}')
                continue
            return done, path
    if timeline.sessions[0].first:
        remedy = f'a step from {timeline.saved[0][0]} on' if timeline.saved else 'the folder in which it started'
        raise UserError(f'{timeline.folder}: has no checkpoint from before step {step}, and the run did not start in this '
                        f'folder; give {remedy}')
    return 0, None


def check_facts(session: Session) -> None:
    """Raise UserError unless the record of a start of training has the program, the flags and the folder."""
    program, flags, folder = (session.facts.get(name) for name in ('program', 'flags', 'folder'))
    if program not in RECORDED or not isinstance(folder, str) or '\0' in folder or not (
            isinstance(flags, list) and all(isinstance(flag, str) for flag in flags)):
        raise UserError(f'the record of the start of training at step {session.first} (steps_RUN.jsonl) is damaged; expected '
                        f'the program ({" or ".join(RECORDED)}), its flags and its folder')


def train(session: Session, flags: list[str]) -> None:
    """Run the training program of a session with its flags and these, in this process, without its output."""
    check_facts(session)
    program = importlib.import_module(programs.module(f'{session.facts["program"]}.train'))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(contextlib.chdir(session.facts['folder']))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        program.main([*kept_flags(session.facts['flags']), *flags])


def repeat(timeline: Timeline, start: int, path: Path | None, end: int, folder: Path,
           last_step: list[str] | None = None) -> None:
    """Train the steps start, ..., end - 1 of a run again, from the checkpoint `path` or from scratch, and save the result in
    `folder`.   last_step: more flags for the part with the last of these steps"""
    folder = folder.resolve()
    if path:
        (folder / path.name).symlink_to(path.resolve())
    parts = timeline.parts(start, end)
    for session, first, stop in parts:
        train(session, ['-c', str(folder), '--max-steps', str(stop - first), '--save-minutes', '0', '--save-every', str(NEVER),
                        *(last_step or [] if stop == end else [])])


def bits(value: np.float32) -> str:
    return f'{np.float32(value).view(np.uint32):08x}'


def proof(timeline: Timeline, again: Timeline, start: int, end: int) -> tuple[str, bool]:
    """Compare the losses of the steps start, ..., end - 1 with the repeated losses.  Return text and whether all bits are
    equal."""
    one, other = timeline.values[start:end], again.values[start:end]
    recorded = one.any(1)
    differs = recorded & (one.view(np.uint32) != other.view(np.uint32)).any(1)
    step = start + int(np.argmax(differs)) if differs.any() else end - 1
    loss, new = timeline.values[step, 0], again.values[step, 0]
    if not differs.any():
        return (f'step {step} : loss {loss:.6f} (float32 bits {bits(loss)}) as recorded; the losses and gradient norms of '
                f'{int(recorded.sum())} steps, {start} to {end - 1}, have the recorded bits'), True
    was, now = (max(line.parts(step, step + 1), key=lambda part: part[1])[0].facts for line in (timeline, again))
    changed = [f'{name} {was.get(name)}, now {now.get(name)}' for name in ('isa', 'device', 'precision', 'exact', 'version')
               if was.get(name) != now.get(name)]
    return (f'step {step} : loss {new:.6f} (float32 bits {bits(new)}) differs from the recorded {loss:.6f} ({bits(loss)}); '
            + (', '.join(changed) or 'the data, the program or the library has changed')), False


# ---- rewind ----------------------------------------------------------------------------------------------------------

def rewind(options: Namespace) -> int:
    """Repeat a step, print its tensors, and return the exit status: 1 if a loss differs from the recorded one."""
    from pyops.inspect.flags import UnknownLayer
    from pyops.inspect.logs import Logs
    timeline = Timeline(options.folder)
    timeline.check(options.step)
    names = [_name(text) for text in options.show]
    start, path = checkpoint_before(timeline, options.step)
    with tempfile.TemporaryDirectory(prefix='pyops_rewind_') as work:
        dump, run = Path(options.save or Path(work) / 'tensors').resolve(), Path(work) / 'run'
        run.mkdir()
        layers = ['--save-layers', ','.join(dict.fromkeys(layer for layer, _ in names))] if names else []
        try:
            repeat(timeline, start, path, options.step + 1, run,
                   ['--save-tensors', str(dump), '--save-steps', str(options.step), '--save-max', '1T', *layers])
        except UnknownLayer as error:
            text = next((text for text in options.show if text.startswith(error.pattern)), error.pattern)
            raise UserError(f"--show '{text}': {error.pattern} {error.found}") from None
        text, is_equal = proof(timeline, Timeline(run), start, options.step + 1)
        print(f'from {path or "the start of the run"}\n{text}')
        entries = [entry for entry in Logs(dump).entries if entry.step == options.step]
        for layer, name in names:
            chosen = [entry for entry in entries
                      if entry.layer == layer and name in (entry.name, f'{entry.operation}.{entry.name}')]
            if not chosen:
                near = ', '.join(dict.fromkeys(f"'{entry.layer} {entry.name}'" for entry in entries if entry.layer == layer))
                raise UserError(f"--show '{layer} {name}': no such tensor; the layer has {near}")
            for entry in chosen:
                _print(entry)
        if not names:
            print('\n'.join(dict.fromkeys(printable(f'{entry.layer} {entry.name} {entry.shape}') for entry in entries)))
    return int(not is_equal)


def _name(text: str) -> tuple[str, str]:
    layer, space, name = text.rpartition(' ')
    if not space:
        raise UserError(f"--show '{text}': expected a layer and a tensor separated by a space, such as 'encoder.rnn.0.hh "
                        "input'; without --show all are listed")
    return layer, OPERANDS.get(name, name)


def _print(entry: Any) -> None:
    array = entry.load()
    print(f'{entry.title} {array.shape} : {describe(array)}')
    print(np.array2string(array, threshold=50, precision=7))


# ---- bisect ----------------------------------------------------------------------------------------------------------

def condition(text: str) -> tuple[int, Any]:
    """Return the column of Timeline.values that a condition tests, and the function that tests it."""
    match = re.fullmatch(r'\s*(loss|norm)\s*(?:(is not finite)|(>=|<=|>|<)\s*(\S+))\s*', text)
    try:
        if not match:
            raise ValueError
        column = ('loss', 'norm').index(match[1])
        if match[2]:
            return column, lambda values: ~np.isfinite(values)
        compare, number = COMPARE[match[3]], float(match[4])
        return column, lambda values: compare(values, number)
    except ValueError:
        raise UserError(f"CONDITION '{text}': expected loss or norm, then >, >=, < or <= and a number, or 'is not "
                        "finite'") from None


def bisect(options: Namespace) -> int:
    """Print the first step that meets a condition; for values that are not finite also the kernel that computed the first one.
    Return the exit status: 1 if no step meets it."""
    timeline = Timeline(options.folder)
    column, test = condition(options.condition)
    with np.errstate(invalid='ignore'):
        met = test(timeline.values[:, column]) & timeline.values.any(1)
    if not met.any():
        print(f'no step of {timeline.first} to {len(timeline) - 1} has {options.condition}')
        return 1
    step = int(np.argmax(met))
    for number in range(max(step - 3, timeline.first), min(step + 2, len(timeline))):
        loss, norm = timeline.values[number]
        print(f'step {number} : loss {loss:.6g} norm {norm:.6g}'
              + f'    <- the first with {options.condition}' * (number == step))
    start, path = checkpoint_before(timeline, step)
    print(f'{len(met[met])} of {len(timeline)} steps; {path or "the start of the run"} is {step - start} steps before it')
    if not np.isfinite(timeline.values[step]).all():
        with tempfile.TemporaryDirectory(prefix='pyops_bisect_') as work:
            run = Path(work) / 'run'
            run.mkdir()
            repeat(timeline, start, path, step + 1, run, ['--check-finite', os.getcwd(), '--max-skipped', str(NEVER)])
    return 0


# ---- branch ----------------------------------------------------------------------------------------------------------

def branch(options: Namespace) -> int:
    """Restore the state after N steps in another folder, and train on from there with other flags."""
    timeline = Timeline(options.folder)
    if not 0 < options.step <= len(timeline):
        raise UserError(f'--step {options.step}: {timeline.folder} has {len(timeline)} steps; give a number from 1 to '
                        f'{len(timeline)}')
    to = Path(options.to or f'{str(options.folder).rstrip("/")}_step_{options.step}')
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f'{to}: already exists; give a new folder with --to')
    to.mkdir(parents=True, exist_ok=True)
    start, path = checkpoint_before(timeline, options.step)
    if path and start == options.step:
        shutil.copyfile(path, to / path.name)
    else:
        repeat(timeline, start, path, options.step, to)
        text, is_equal = proof(timeline, Timeline(to), start, options.step)
        print(text, flush=True)
        if not is_equal:
            return 1
        if path:
            (to / path.name).unlink(missing_ok=True)        # the link to the checkpoint of the first run
    session = timeline.parts(options.step - 1, options.step)[0][0]
    check_facts(session)
    program = importlib.import_module(programs.module(f'{session.facts["program"]}.train'))
    flags = [*kept_flags(session.facts['flags'], OF_ONE_START), '-c', str(to.resolve()), *options.flags]
    with contextlib.suppress(OSError):
        os.chdir(session.facts['folder'])
    program.main(flags)
    return 0
