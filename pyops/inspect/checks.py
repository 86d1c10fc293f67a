"""Checks shared by the readers of saved tensors.  The files may come from anyone, so nothing in them is trusted."""
from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import os

AXES_LIMIT = 32                     # numpy 1 supports no more
_SETTLED = 2_000_000_000            # nanoseconds
_LARGEST = (1 << 63) // 8           # elements: numpy refuses more bytes, and does not count sizes of 0


class Refused(Exception):
    """The reason for skipping a file or a line."""


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object and return the dict.  NaN and infinities become None."""
    try:
        line = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:           # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise Refused('not valid JSON') from error
    if not isinstance(line, dict):
        raise Refused('not a JSON object')
    return line


def is_count(value: object) -> TypeGuard[int]:
    """Return whether `value` is an integer from 0 to 2^53 - 1, which is exact in every JSON parser."""
    return type(value) is int and 0 <= value < 1 << 53      # bool is a subclass of int


def is_shape(value: tuple[object, ...] | list[object]) -> TypeGuard[tuple[int, ...] | list[int]]:
    """Return whether numpy has arrays with these sizes."""
    sizes = [size for size in value if is_count(size)]
    return len(sizes) == len(value) <= AXES_LIMIT and math.prod(filter(None, sizes)) < _LARGEST


def is_settled(status: os.stat_result) -> bool:
    """Return whether size and modification time identify the content of a file: it did not change in the last two seconds.
    Two changes within the resolution of the clock have the same time."""
    return time.time_ns() - status.st_mtime_ns > _SETTLED
