"""Facts about kernels that are not in the header: costs and matrix products.  Ops declare them; tools read them.

The module that launches a kernel declares its costs, for pyops.profile:

    declare(gru_forward=Kernel(flops=...), gru_backward=Kernel(flops=...))

An op that launches a matrix product notes the product and its layer directly after the launch:

    gemm(as_rows(y), as_rows(x), self.weight.value.T, bias)
    note_product(self, FWD, weight=self.weight, bias=self.bias, rows=x.shape[:-1])

A recording plan stores the note with the action, and pyops.inspect uses it to find the tensors of the layer.  Without a plan
a note costs one function call.  The tests reject a plan with an undeclared kernel, or with a kernel that has products and
takes a parameter but has no note.
"""


class Kernel:
    """What tools need to know about a kernel.  s: the sizes and scalars of one call by the header's names.

    flops   flops(s, array) returns the operations of its matrix products, two for a multiply-add; array(name) returns an
            argument, None for NULL.  None: the kernel has no matrix product and is limited by memory bandwidth
    bytes   bytes(s) returns the bytes read and written.  None: each operand once
    rounds  the argument that the kernel rounds to a number format; the output is the rounded copy.  The scalars of the
            format are arguments with the names of formats.SCALARS.  None: the kernel is no rounding
    """

    def __init__(self, flops=None, bytes=None, rounds=None):
        self.flops, self.bytes, self.rounds = flops, bytes, rounds


class Product:
    """A matrix product of a layer, or several products in one kernel: the roles of the kernel's arguments.

    kind    linear layer    fwd: y = x w' + b;  dgrad: dx = g w;  wgrad: dw += g' x
                            matmul: fwd before the boundary of the plan; after it dgrad, with g for x and dx for y
            attention       qk: q k';  pv: y = p v;  dp: do v';  dv: p' do;  dq: ds k;  dk: ds' q
                            forward, backward, softmax, scale: other launches that read or write these tensors
    roles   {role: array};  an array is an argument name;  (argument, axes): the argument with its axes permuted;  a Slice of
            one;  or a Made.  In a linear layer, an argument name followed by ' means that the argument is the transpose of the
            array
    axis    the axis of the stored weight that the product sums over: 0 of (I, O), -1 of (O, I)
    names   {role: name of the saved tensor}, for names that differ from the default
    before  the kernel overwrites its inputs, so the arrays must be read before it runs
    """

    def __init__(self, kind, roles, axis=-1, names=None, before=False):
        self.kind, self.roles, self.axis, self.names, self.before = kind, roles, axis, names or {}, before

    def replaced(self, **settings):
        """Return a copy with other settings."""
        return Product(**vars(self) | settings)

    def part(self, i, n):
        """Return the Product of layer i of n that share x and dx, in one product of a weight (n O, I)."""
        axes = {'w': 0, 'y': -1, 'g': -1}
        return self.replaced(roles={role: Slice(source, axes[role], i, n) if role in axes else source
                                    for role, source in self.roles.items()})


class Slice:
    """Slice i of n equal ones of the array `source`, an argument name, along its first axis (0) or its last (-1)."""

    def __init__(self, source, axis, i, n):
        self.source, self.axis, self.i, self.n = source, axis, i, n

    def of(self, array):
        """Return the slice of this array, a view."""
        size = array.shape[self.axis] // self.n
        part = slice(self.i * size, (self.i + 1) * size)
        return array[part] if self.axis == 0 else array[..., part]


class Made:
    """A tensor that the kernel does not store, with a function that recomputes it.

    shape   shape(s) returns its shape
    make    make(s, array) returns the tensor; array(name) returns an argument, None for NULL
    """

    def __init__(self, shape, make):
        self.shape, self.make = shape, make


# the products of backend.gemm in a linear layer with weight (O, I); _INPUTS_FIRST: with weight (I, O)
FWD = Product('fwd', {'x': 'a', 'w': "b'", 'y': 'c'})
DGRAD = Product('dgrad', {'g': 'a', 'w': 'b', 'dx': 'c'})
WGRAD = Product('wgrad', {'g': "a'", 'x': 'b'})
FWD_INPUTS_FIRST = Product('fwd', {'x': 'a', 'w': 'b', 'y': 'c'}, axis=0)
DGRAD_INPUTS_FIRST = Product('dgrad', {'g': 'a', 'w': "b'", 'dx': 'c'}, axis=0)
WGRAD_INPUTS_FIRST = Product('wgrad', {'g': 'b', 'x': "a'"}, axis=0)


KERNELS = {}        # name without pyops_ -> Kernel, of all modules imported so far


def declare(**kernels):
    """Add kernels to KERNELS.  ValueError if a kernel is already declared."""
    for name, kernel in kernels.items():
        if name in KERNELS:
            raise ValueError(f'{name}: this kernel is declared twice; declare it in one module only')
        KERNELS[name] = kernel


def product_of_shape(s, array):
    """Return the number of operations of a product (M, K) (K, N)."""
    return 2 * s['M'] * s['N'] * s['K']


def products_of_shapes(s, array):
    """Return the number of operations of one product for each index of the leading axes."""
    count = 1
    for n in s['shape']:
        count *= n
    return count * product_of_shape(s, array)


# kernels that belong to no single op
declare(gemm=Kernel(product_of_shape), gemm_batched=Kernel(products_of_shapes), gemm_bf16=Kernel(product_of_shape),
        gemm_narrow=Kernel(products_of_shapes),
        to_bf16=Kernel(), convert=Kernel(), fill=Kernel(), axpy=Kernel(), scale=Kernel(), column_sums=Kernel(), argmax=Kernel(),
        softmax_forward=Kernel(), softmax_backward=Kernel(), gather_rows=Kernel(), scatter_rows=Kernel(), increment=Kernel(),
        tick=Kernel(), fma_loop=Kernel(),
        gather_pixels=Kernel(bytes=lambda s: s['B'] * s['C'] * 5 + s['B'] * 8),
        **{f'strided_{kind}{suffix}': Kernel() for kind in ('unary', 'binary', 'scalar', 'where', 'fill', 'reduce')
           for suffix in ('', '_int32')}, strided_from_int32=Kernel(), strided_to_int32=Kernel(),
        **{f'strided_{kind}': Kernel() for kind in ('unary_double', 'binary_double', 'where_double', 'reduce_double',
                                                    'double_from_float', 'double_from_int32', 'double_to_float',
                                                    'double_to_int32')},
        **{f'cumulate{suffix}': Kernel() for suffix in ('', '_int32', '_double')},
        matmul_double=Kernel(products_of_shapes), argmax_double=Kernel(), argsort_double=Kernel(), add_rows_double=Kernel())
