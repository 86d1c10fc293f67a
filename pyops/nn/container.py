"""Containers of modules.  Their manual backward calls the members in reverse order."""
from pyops import ops
from pyops.autograd import apply
from pyops.backend import empty_gradient, launch
from pyops.nn.module import Layer, Module


def _forward_arrays(module, *inputs):
    """Run a module on arrays.  A Layer's forward() adds the layer's name to errors; others only have forward_arrays()."""
    return module.forward(*inputs) if isinstance(module, Layer) else module.forward_arrays(*inputs)


def _module(module):
    if not isinstance(module, Module):
        raise TypeError(f'expected modules, one argument each, got {type(module).__name__}')
    return module


class Sequential(Layer):
    """Run modules in sequence; their names are '0', '1', ..."""
    seed = 0

    def __init__(self, *modules):
        self.layers = list(map(_module, modules))

    def members(self):
        for i, module in enumerate(self.layers):
            yield str(i), module

    def __len__(self):
        return len(self.layers)

    def __iter__(self):
        return iter(self.layers)

    def __getitem__(self, index):
        return self.layers[index]

    def forward_tensors(self, x):
        for module in self.layers:
            x = module(x)
        return x

    def forward_arrays(self, x):
        ctx = []
        for module in self.layers:
            x, c = _forward_arrays(module, x)
            ctx.append(c)
        return x, ctx

    def backward(self, dy, ctx):
        for module in reversed(self.layers):
            dy = module.backward(dy, ctx.pop())
        return dy


class Residual(Layer):
    """y = x + module(x)"""
    seed = 0

    def __init__(self, module):
        self.module = _module(module)

    def forward_tensors(self, x):
        return apply(self._op(), x, self.module(x))

    def _op(self):
        return ops.Residual(name=self._path or 'residual')

    def forward_arrays(self, x):
        branch, c = _forward_arrays(self.module, x)
        y, _ = self._op().forward(x, branch)
        return y, c

    def backward(self, dy, ctx):
        dbranch = self.module.backward(dy, ctx)
        dx = empty_gradient(dy.shape, f'{self._path or "residual"}.dx')
        launch('residual', dx, dy, dbranch, None, dx.size, 0.0, 0)
        return dx
