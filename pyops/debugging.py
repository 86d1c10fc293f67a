"""Flags of `python -m pyops` rewind, bisect, branch and replay.  Imports nothing large, so that --help is quick."""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pyops.flags import non_negative_int

if TYPE_CHECKING:
    from collections.abc import Callable


def add_replay_flags(parser: Any) -> None:
    parser.add_argument('file', metavar='FILE', help='a file that --check-finite saved')
    parser.set_defaults(run=_later('pyops.action_file', 'run'))


def add_rewind_flags(parser: Any) -> None:
    parser.add_argument('folder', metavar='RUN', help='folder of a run, as given to -c')
    parser.add_argument('--step', type=non_negative_int, required=True, metavar='N', help='number of a step, from 0 (required)')
    parser.add_argument('--show', action='append', default=[], metavar='NAME',
                        help="print this tensor of the step: layer and tensor, such as 'encoder.0.self_attention.q "
                        "grad_output' or 'encoder.0.self_attention.q wgrad.g'; can be repeated (default: list the tensors)")
    parser.add_argument('--save', metavar='DIR', help='also save the tensors in DIR, as --save-tensors does (default: do not)')
    parser.set_defaults(run=_later('pyops.rewind', 'rewind'))


def add_bisect_flags(parser: Any) -> None:
    parser.add_argument('folder', metavar='RUN', help='folder of a run, as given to -c')
    parser.add_argument('condition', metavar='CONDITION',
                        help="of a step: 'loss > 10', 'norm >= 100', 'loss < 2', 'loss is not finite' or 'norm is not finite'")
    parser.set_defaults(run=_later('pyops.rewind', 'bisect'))


def add_branch_flags(parser: Any) -> None:
    parser.add_argument('folder', metavar='RUN', help='folder of a run, as given to -c')
    parser.add_argument('--step', type=non_negative_int, required=True, metavar='N',
                        help='train on from the state after N steps (required)')
    parser.add_argument('--to', metavar='DIR', help='folder of the new run (default: RUN_step_N)')
    parser.epilog = 'All other flags are given to the program and replace the flags of the run: -l 0.0005'
    parser.others = 'flags'
    parser.set_defaults(run=_later('pyops.rewind', 'branch'), flags=[])


def _later(module: str, function: str) -> Callable[[Any], Any]:
    """Return a function that imports this one when it is called."""
    return lambda options: getattr(importlib.import_module(module), function)(options)
