"""pyops: deep learning from the metal up.  Hand-written kernels, ops with explicit forward and backward."""

__version__ = '0.1.0'
PRECISIONS = 'fp32', 'tf32', 'bf16'     # of the factors of matrix products, in the order of pyops_set_precision
CPU_PRECISIONS = 'fp32', 'bf16'

# name -> the module it is imported from on first use, so that `import pyops` itself is cheap
_FROM = {
    'cpu': 'pyops.ndarray',
    'numpy_device': 'pyops.ndarray',
    'gpu': 'pyops.ndarray',
    'use_gpu': 'pyops.ndarray',
    'Tensor': 'pyops.autograd',
    'apply': 'pyops.autograd',
    'grad': 'pyops.autograd',
    'no_grad': 'pyops.autograd',
    'gradcheck': 'pyops.differences',
    'load': 'pyops.text.translator',
    'seed': 'pyops.params',
}

TYPE_CHECKING = False                   # typing's name, which type checkers take for True; importing typing takes time
if TYPE_CHECKING:                       # the names of _FROM
    from pyops.autograd import Tensor, apply, grad, no_grad
    from pyops.differences import gradcheck
    from pyops.ndarray import cpu, gpu, numpy_device, use_gpu
    from pyops.params import seed
    from pyops.text.translator import load

__all__ = ['PRECISIONS', 'Tensor', 'apply', 'cpu', 'gpu', 'grad', 'gradcheck', 'load', 'no_grad', 'numpy_device', 'seed',
           'use_gpu']


def __getattr__(name: str) -> object:
    if name not in _FROM:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    import importlib
    value = globals()[name] = getattr(importlib.import_module(_FROM[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM})
