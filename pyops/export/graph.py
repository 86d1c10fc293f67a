"""ONNX graphs, node by node, and the layers that both programs have."""
import numpy as np
from onnx import TensorProto, checker, helper, numpy_helper

from pyops.errors import UserError

OPSET = 17              # the first with LayerNormalization
IR_VERSION = 8          # of the files: the one of that opset, which onnxruntime reads since 1.12
_TYPES = {'int64': TensorProto.INT64, 'float32': TensorProto.FLOAT}
_LARGEST = (1 << 31) - (1 << 24)                # bytes of the weights in a file, which protobuf limits to 2 GB
_LOWEST = float(np.finfo(np.float32).min)       # the score of a masked key: no NaN, even if all are masked


class Graph:
    """A graph that is being built.

    A value in it is a str.  Where a method takes a value it also takes a constant: a number, a list or an array; whole numbers
    become int64, others float32.
    weights: {name: float32 array}; those that are used become initializers
    """
    INT32 = TensorProto.INT32           # for Cast

    def __init__(self, name, weights):
        self._name, self._weights = name, weights
        self._nodes, self._inputs, self._outputs = [], [], []
        self._initializers, self._constants = {}, {}            # by name, and the names of constants
        self._bytes = 0                                         # of all initializers

    def input(self, name, dtype, *shape):
        """Declare an input and return it.  shape: sizes, or names of sizes that may vary"""
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], shape))
        return name

    def output(self, name, value, dtype, *shape):
        """Declare a value as the output with this name."""
        self._nodes.append(helper.make_node('Identity', [value], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, _TYPES[dtype], shape))

    def node(self, op, *inputs, outputs=1, **attributes):
        """Add a node of the operator `op` and return its output, or the list of its `outputs`.  An input may be None."""
        names = [f'{op}_{len(self._nodes)}_{i}' for i in range(outputs)]
        inputs = ['' if value is None else value if isinstance(value, str) else self.constant(value) for value in inputs]
        self._nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value):
        """Return an initializer with this value; equal ones are the same."""
        array = np.asarray(value)
        array = array.astype(np.int64 if array.dtype.kind == 'i' else np.float32)
        name = self._constants.setdefault((array.dtype, array.shape, array.tobytes()), f'constant_{len(self._constants)}')
        return self._initializer(name, array)

    def weight(self, name):
        """Return a weight as it is stored."""
        return self._initializer(name, self._weights[name])

    def _initializer(self, name, array):
        if name not in self._initializers:
            self._bytes += array.nbytes
            if self._bytes > _LARGEST:
                raise UserError(f'the {self._name} has more than {_LARGEST / 1e9:.1f} GB of weights, the most in an ONNX file; '
                                'use `export torch`')
            self._initializers[name] = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        return name

    def model(self):
        """Return the onnx.ModelProto."""
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, list(self._initializers.values()))
        model = helper.make_model(graph, producer_name='pyops', ir_version=IR_VERSION,
                                  opset_imports=[helper.make_opsetid('', OPSET)])
        checker.check_model(model, full_check=True)
        return model

    # ---- layers ------------------------------------------------------------------------------------------------------

    def linear(self, x, weight, bias=None):
        """Return x (..., I) times the transposed weight (O, I), plus the bias: (..., O)."""
        y = self.node('MatMul', x, self._initializer(f'{weight}.T', self._weights[weight].T))
        return self.node('Add', y, self.weight(bias)) if bias else y

    def layer_norm(self, x, prefix, epsilon):
        return self.node('LayerNormalization', x, self.weight(f'{prefix}.weight'), self.weight(f'{prefix}.bias'), axis=-1,
                         epsilon=epsilon)

    def mask(self, source, pad):
        """Return which tokens of source (B, S) are not padding, (B, 1, 1, S) bool."""
        return self.node('Unsqueeze', self.node('Not', self.node('Equal', source, pad)), [1, 2])

    def split_heads(self, x, heads, width):
        """Return x (B, T, heads * width) as (B, heads, T, width)."""
        return self.node('Transpose', self.node('Reshape', x, [0, 0, heads, width]), perm=[0, 2, 1, 3])

    def attend(self, q, k, v, mask, width):
        """Return the attention of q (B, heads, Tq, width) to k, v (B, heads, T, width) as (B, Tq, heads * width).

        mask: (B, 1, 1, T) bool, or None
        """
        scores = self.node('MatMul', self.node('Mul', q, width ** -0.5), self.node('Transpose', k, perm=[0, 1, 3, 2]))
        if mask:
            scores = self.node('Where', mask, scores, _LOWEST)
        y = self.node('MatMul', self.node('Softmax', scores, axis=-1), v)
        return self.node('Reshape', self.node('Transpose', y, perm=[0, 2, 1, 3]), [0, 0, -1])

    def stacked(self, values):
        """Return values of equal shape as one with a new first axis."""
        return self.node('Concat', *(self.node('Unsqueeze', value, [0]) for value in values), axis=0)

    def size(self, x, axis):
        """Return the size of an axis of x, (1,) int64."""
        return self.node('Gather', self.node('Shape', x), [axis])
