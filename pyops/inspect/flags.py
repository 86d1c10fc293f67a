"""Flags that select the tensors to save during training, and the environment variables that replace missing flags."""
from __future__ import annotations

import difflib
import fnmatch
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from pyops.errors import UserError
from pyops.inspect.choice import StepRanges, patterns, size, steps

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping

LIMIT = '4G'
STEPS = '0:100:10'
FOLDER = './tensor_logs'


class UnknownLayer(UserError):
    """A pattern fits no layer.   pattern: of the flag;  found: the rest of the text, with names that are near"""

    def __init__(self, pattern: str, found: str) -> None:
        super().__init__(f'--save-layers {pattern}: {found}')
        self.pattern, self.found = pattern, found


class Wanted(NamedTuple):
    """Tensors to save: folder, layer name patterns, steps, limit in bytes (and as given), file format."""
    folder: str
    patterns: tuple[str, ...]
    steps: StepRanges
    limit: int
    limit_text: str
    as_: str

    def choose(self, names: list[str]) -> list[str]:
        """Return the layer names that match a pattern, in their order.  UnknownLayer if a pattern matches none."""
        chosen = set()
        for pattern in self.patterns:
            fits = fnmatch.filter(names, pattern)
            if not fits:
                parts = [f'{pattern}.*'] if any(name.startswith(f'{pattern}.') for name in names) else []
                near = parts + (difflib.get_close_matches(pattern, names, 3, 0.3) or names[:3])
                raise UnknownLayer(pattern, f'fits none of the {len(names)} layers; '
                                   f'there are, among others, {", ".join(near)}')
            chosen.update(fits)
        return [name for name in names if name in chosen]


def add_saving_flags(parser: Any) -> None:
    """Add --save-tensors DIR and the flags that modify it."""
    group = parser.group('saved tensors', 'See docs/saving.md.')
    group.add_argument('--save-tensors', metavar='DIR',
                       help='while training, save tensors of linear layers and attention in DIR, forward and backward '
                       f'(default: off; with TENSOR_SAVE_ENABLED=true $TENSOR_SAVE_DIR, else {FOLDER})')
    group.add_argument('--save-layers', type=patterns, metavar='PATTERN',
                       help="save layers with these names: *, ? and [...] as in a shell, several separated by commas, such "
                       "as 'encoder.*,output' (default *)")
    group.add_argument('--save-steps', type=steps, metavar='A:B:S',
                       help="save at the steps of Python's range(A, B, S), where A, B or S may be missing; or numbers and "
                       f'ranges separated by commas (default {STEPS})')
    group.add_argument('--save-max', type=_size, metavar='SIZE',
                       help=f'stop saving before SIZE bytes are exceeded: 500M (500 million), 2G (default {LIMIT})')
    group.add_argument('--save-as', choices=('safetensors', 'pt'),
                       help='file format; pt is for torch.load(weights_only=True) (default safetensors)')


def wanted(args: Namespace, environment: Mapping[str, str] = os.environ) -> Wanted | None:
    """Return a Wanted, or None if nothing is to be saved.  UserError if a flag modifies --save-tensors, which is off."""
    folder = args.save_tensors
    if folder is None and is_enabled(environment):
        folder = environment.get('TENSOR_SAVE_DIR') or FOLDER
    if folder is None:
        for name in ('save_layers', 'save_steps', 'save_max', 'save_as'):
            if getattr(args, name) is not None:
                raise UserError(f'--{name.replace("_", "-")}: nothing is saved without --save-tensors DIR, or '
                                'TENSOR_SAVE_ENABLED=true')
        return None
    if not folder:
        raise UserError("--save-tensors: expected a folder, got ''")
    if args.no_plan:
        raise UserError('--no-plan: tensors are taken from the plan of a step; leave it out, or save none')
    limit, text = args.save_max or _size(LIMIT)
    return Wanted(folder, args.save_layers or ('*',), args.save_steps or steps(STEPS), limit, text,
                  args.save_as or 'safetensors')


def is_enabled(environment: Mapping[str, str], default: bool = False) -> bool:
    """Return the value of TENSOR_SAVE_ENABLED, or the default if it is unset or empty.  UserError for another text."""
    text = environment.get('TENSOR_SAVE_ENABLED', '')
    if not text:
        return default
    if text.lower() in ('true', '1', 'yes', 'on'):
        return True
    if text.lower() in ('false', '0', 'no', 'off'):
        return False
    raise UserError(f'TENSOR_SAVE_ENABLED={text}: expected true or false')


def _size(text: str) -> tuple[int, str]:
    """Return (number of bytes, text)."""
    return size(text), text
