"""Random numbers that do not depend on the tests that ran before: they change with the order, as in workers of pytest-xdist."""
import sys

import numpy as np

import pyops

_noted = {}                 # module: [(bit generator, its state when it was noted)]


def note(module):
    """Remember the state of the generators of a module of tests, after its import."""
    _noted.setdefault(module, [(value.bit_generator, value.bit_generator.state) for value in vars(module).values()
                               if isinstance(value, np.random.Generator)])


def begin(module):
    """Let the test of a module that follows draw the same numbers each time."""
    pyops.seed(0)
    for generator, state in _noted[module]:
        generator.state = state
    if torch := sys.modules.get('torch'):
        torch.manual_seed(0)
