"""Types that several signatures use.  Modules import them for type checkers only, so this module costs a start nothing."""
from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from pyops.autograd import Tensor
    from pyops.ndarray import NDArray

Shape: TypeAlias = tuple[int, ...]
Axis: TypeAlias = int | Sequence[int] | None            # one axis, several, or all
PathLike: TypeAlias = str | os.PathLike[str]
Init: TypeAlias = Callable[[np.random.Generator, Shape], np.ndarray]        # the initial values of a parameter
# what becomes a Tensor or an array
Numbers: TypeAlias = 'Tensor | NDArray | np.ndarray | np.generic | Sequence[Any] | float'
Index: TypeAlias = Any                                  # ints, slices, ..., None, or an array: as numpy's


class Array(Protocol):
    """The common part of numpy arrays and NDArrays: an array of an op, on the CPU or on a GPU."""

    @property
    def shape(self) -> Shape: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def T(self) -> Any: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Index, /) -> Any: ...
    def __setitem__(self, index: Index, value: Any, /) -> None: ...
    @property
    def reshape(self) -> Callable[..., Any]: ...
    @property
    def transpose(self) -> Callable[..., Any]: ...


# ---- facts about ops, in pyops/ops -------------------------------------------------------------------------------------

Normal: TypeAlias = Callable[..., np.ndarray]           # normal(*shape) draws random numbers
Example: TypeAlias = tuple[list[Any], dict[str, Any]]   # inputs and named arguments
Sizes: TypeAlias = Mapping[str, Any]                    # sizes and scalars of a launch, by the header's names
Argument: TypeAlias = Callable[[str], Any]              # argument(name) returns an argument of a launch, None for NULL
TensorGradients: TypeAlias = 'tuple[tuple[Tensor | None, ...], dict[str, Tensor]]'     # of the inputs, of the parameters
