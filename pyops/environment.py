"""The environment variable PYOPS_BACKEND, which several modules read."""
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
