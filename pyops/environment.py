"""The environment variables PYOPS_BACKEND, PYOPS_EXACT and PYOPS_EARLY_START."""
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


def is_on(name, effect):
    """Return whether the environment variable is 1, not unset, empty or 0.  effect: of 1.  UserError for any other value."""
    value = os.environ.get(name) or '0'
    if value not in ('0', '1'):
        raise UserError(f'{name}={value}: expected 1, {effect}, or 0; unset it')
    return value == '1'


def exact_by_default():
    """Return whether $PYOPS_EXACT is 1.  UserError for values other than 0 and 1."""
    return is_on('PYOPS_EXACT', 'for the same bits on every instruction set')


def early_start_by_default():
    """Return whether $PYOPS_EARLY_START is 1, as the CUDA library reads it.  UserError for values other than 0 and 1."""
    return is_on('PYOPS_EARLY_START', 'for kernels that may start before the last one has ended')
