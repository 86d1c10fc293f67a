"""Functions that are called in backward passes, in calls of modules and in steps of optimizers, until they are removed."""
from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_numbers = itertools.count()


class Hook:
    """A registered hook of a tensor, a module or an optimizer; remove() ends its calls."""

    def __init__(self, hooks: dict[int, Any], hook: Callable[..., Any]) -> None:
        self._hooks, self._number = hooks, next(_numbers)
        hooks[self._number] = hook

    def remove(self) -> None:
        """Call the hook no more."""
        self._hooks.pop(self._number, None)
