"""The environment variables PYOPS_BACKEND and PYOPS_EXACT, which several modules read."""
import os

from pyops.errors import UserError

BACKENDS = 'cpu', 'numpy', 'gpu'


def backend_name():
    """Return $PYOPS_BACKEND, one of BACKENDS; 'cpu' if it is unset or empty.  UserError for any other value."""
    name = os.environ.get('PYOPS_BACKEND') or 'cpu'
    if name not in BACKENDS:
        raise UserError(f'PYOPS_BACKEND={name}: no such backend; set it to {", ".join(BACKENDS[:-1])} or {BACKENDS[-1]}, '
                        'or unset it')
    return name


def exact_by_default():
    """Return whether $PYOPS_EXACT is 1, not unset, empty or 0.  UserError for any other value."""
    value = os.environ.get('PYOPS_EXACT') or '0'
    if value not in ('0', '1'):
        raise UserError(f'PYOPS_EXACT={value}: expected 1, for the same bits on every instruction set, or 0; unset it')
    return value == '1'
