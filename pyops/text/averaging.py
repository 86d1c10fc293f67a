"""The mean of several checkpoints of a run, as a checkpoint that translates."""
from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

import numpy as np

from pyops import checkpoint
from pyops.errors import UserError
from pyops.text.flags import AVERAGED, FIXED


def run(args: Namespace, program: str, sizes: Iterable[str]) -> None:
    """Run `python -m PROGRAM.average` with these flags.   program, sizes: as for average()"""
    if not args.output.endswith(checkpoint.SUFFIX):
        raise UserError(f'--output {args.output}: expected a name that ends in {checkpoint.SUFFIX}')
    paths = chosen(args.checkpoint, args.last)
    if any(os.path.exists(args.output) and os.path.samefile(path, args.output) for path in paths):
        raise UserError(f'--output {args.output}: is one of the checkpoints to average; give another name')
    tensors, state = average(paths, program, sizes)
    # Ordered as the oldest of them, so that a run in the same folder still resumes from its newest checkpoint.
    checkpoint.save(args.output, tensors, state, checkpoint.oldest_name(paths))
    for path in paths:
        print(f'averaged : {path}')
    print(f'saved : {args.output}')


def chosen(given: list[str], last: int | None = None) -> list[str]:
    """Return the paths of the checkpoints to average, the newest first if a folder is given.   last: as --last

    UserError if they are fewer than two, or fewer than `last`, or `last` is given without a folder.
    """
    if len(given) == 1 and os.path.isdir(given[0]):
        paths = checkpoint.newest_paths(given[0])
        if len(paths) < (last or 2):
            raise UserError(f'{given[0]}: expected {last or 2} checkpoints to average, found {len(paths)}; train with '
                            '--save-every 1 to have more')
        return paths[:last or AVERAGED]
    if last:
        raise UserError(f'--last {last}: expected one folder, got {given[0]}; give a folder, or leave --last out')
    if len(set(map(os.path.realpath, given))) < max(2, len(given)):
        raise UserError(f'{given[-1]}: expected two or more different checkpoints, or a folder of them; name each once')
    return given


def average(paths: list[str], program: str, sizes: Iterable[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return tensors and state of the checkpoint with the mean parameters, float32, summed in float64.

    program: 'seq2seq' or 'transformer';  sizes: names of the settings of its model
    The state is the first one's, without the progress of a run: an average has no moments of the optimizer to train on with.
    UserError if a checkpoint is of another program, model, vocabulary, corpus or seed than the first.
    """
    sums: dict[str, np.ndarray] = {}
    first: Any = None
    for path in paths:
        found = checkpoint.find(path, serving=True, parameters_only=True)
        checkpoint.check_program(found, program)
        state: Any = found.state
        first = first or state
        for facts, one, other in (((*sizes, *FIXED), first['settings'], state['settings']),
                                  (('vocabularies', 'pairs', 'excluded'), first, state)):
            if different := [fact for fact in facts if one.get(fact) != other.get(fact)]:
                raise UserError(f'{path}: {different[0].replace("_", "-")} differs from that of {paths[0]}; give '
                                'checkpoints of one run')
        for name, tensor in (found.tensors or {}).items():
            if name.startswith(checkpoint.PARAMETERS):
                sums[name] = sums[name] + tensor if name in sums else tensor.astype(np.float64)
    means = {name: (total / len(paths)).astype(np.float32) for name, total in sums.items()}
    state = {name: value for name, value in first.items() if name not in ('run', 'by_time')}
    return means, state | {'averaged': [os.path.basename(path) for path in paths]}
