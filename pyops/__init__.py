"""pyops: deep learning from the metal up.  Hand-written kernels, ops with explicit forward and backward."""

__version__ = '0.1.0'
PRECISIONS = 'fp32', 'tf32', 'bf16'     # of the factors of matrix products, in the order of pyops_set_precision
CPU_PRECISIONS = 'fp32', 'bf16'
FP8 = 'fp8'                             # of the linear layers of transformer.train: see pyops.ops.fp8
COMPUTE_TYPES = 'float32', 'bf16', 'int8'       # of inference: see pyops.compute

# name -> the module it is imported from on first use, so that `import pyops` itself is cheap
_FROM = {
    'all_devices': 'pyops.ndarray',
    'cpu': 'pyops.ndarray',
    'cuda': 'pyops.ndarray',
    'default_device': 'pyops.ndarray',
    'numpy_device': 'pyops.ndarray',
    'gpu': 'pyops.ndarray',
    'use_gpu': 'pyops.ndarray',
    'from_dlpack': 'pyops.ndarray',
    'Tensor': 'pyops.autograd',
    'apply': 'pyops.autograd',
    'grad': 'pyops.autograd',
    'no_grad': 'pyops.autograd',
    'gradcheck': 'pyops.differences',
    'load': 'pyops.text.translator',
    'seed': 'pyops.params',
    'set_exact': 'pyops.backend',
    **dict.fromkeys(('enable_grad', 'detect_anomaly', 'inference_mode', 'is_grad_enabled', 'set_grad_enabled'),
                    'pyops.autograd'),
    **dict.fromkeys(('arange', 'as_tensor', 'asarray', 'bernoulli', 'bool_', 'empty', 'empty_like', 'eye', 'float32', 'float64',
                     'from_numpy', 'full', 'full_like', 'int32', 'int64', 'linspace', 'logspace', 'manual_seed', 'multinomial',
                     'normal', 'ones', 'ones_like', 'rand', 'rand_like', 'randb', 'randint', 'randint_like', 'randn',
                     'randn_like', 'randperm', 'tensor', 'zeros', 'zeros_like'), 'pyops.creation'),
    **dict.fromkeys(('concatenate', 'stack', 'where', 'einsum'), 'pyops.autograd.tensor'),
}
# PyTorch's other names of dtypes; not in __all__, where they would hide the types of Python
_DTYPES = {'bool': 'bool_', 'float': 'float32', 'double': 'float64', 'int': 'int32', 'long': 'int64'}
# modules that `import pyops` alone makes available, imported on first use
_MODULES = frozenset(('autograd', 'backend', 'checkpoint', 'creation', 'data', 'differences', 'distributed', 'fit',
                      'formats', 'functional', 'init', 'linalg', 'ndarray', 'nn', 'ops', 'optim', 'params', 'plan',
                      'quantization', 'steps', 'training', 'utils'))


TYPE_CHECKING = False                   # typing's name, which type checkers take for True; importing typing takes time
if TYPE_CHECKING:                       # the names of _FROM
    from pyops.autograd import (
        Tensor,
        apply,
        detect_anomaly,
        enable_grad,
        grad,
        inference_mode,
        is_grad_enabled,
        no_grad,
        set_grad_enabled,
    )
    from pyops.autograd.tensor import concatenate, einsum, stack, where
    from pyops.backend import set_exact
    from pyops.creation import (
        arange,
        as_tensor,
        asarray,
        bernoulli,
        bool_,
        empty,
        empty_like,
        eye,
        float32,
        float64,
        from_numpy,
        full,
        full_like,
        int32,
        int64,
        linspace,
        logspace,
        manual_seed,
        multinomial,
        normal,
        ones,
        ones_like,
        rand,
        rand_like,
        randb,
        randint,
        randint_like,
        randn,
        randn_like,
        randperm,
        tensor,
        zeros,
        zeros_like,
    )
    from pyops.differences import gradcheck
    from pyops.ndarray import all_devices, cpu, cuda, default_device, from_dlpack, gpu, numpy_device, use_gpu
    from pyops.params import seed
    from pyops.text.translator import load

__all__ = ['PRECISIONS', 'Tensor', 'all_devices', 'apply', 'arange', 'as_tensor', 'asarray', 'bernoulli', 'bool_',
           'concatenate', 'cpu', 'cuda', 'default_device', 'detect_anomaly', 'einsum', 'empty', 'empty_like', 'enable_grad',
           'eye', 'float32', 'float64', 'from_dlpack', 'from_numpy', 'full', 'full_like', 'gpu', 'grad', 'gradcheck',
           'inference_mode', 'int32', 'int64', 'is_grad_enabled', 'linspace', 'load', 'logspace', 'manual_seed', 'multinomial',
           'no_grad', 'normal', 'numpy_device', 'ones', 'ones_like', 'rand', 'rand_like', 'randb', 'randint', 'randint_like',
           'randn', 'randn_like', 'randperm', 'seed', 'set_exact', 'set_grad_enabled', 'stack', 'tensor', 'use_gpu', 'where',
           'zeros', 'zeros_like']


def __getattr__(name):                  # without types: what it returns is Any
    name = _DTYPES.get(name, name)
    if name.startswith('_'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if name not in _FROM and name not in _MODULES:
        import pyops.names
        if name in pyops.names.METHODS | pyops.names.FUNCTIONAL or name[-1] == '_' and name[:-1] in pyops.names.IN_PLACE:
            import importlib
            return getattr(importlib.import_module('pyops.functional'), name)
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if name in _MODULES:                # __import__: `from pyops import nn` comes here, too, and importlib takes time
        import sys
        __import__(f'pyops.{name}')
        return sys.modules[f'pyops.{name}']         # not yet in globals() if it is being imported
    import importlib
    value = globals()[name] = getattr(importlib.import_module(_FROM[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM, *_DTYPES, *_MODULES})
