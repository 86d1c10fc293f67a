"""Linear algebra on Tensors: names and arguments of torch.linalg.

norm, det, inv, solve and products have gradients.  Decompositions are numpy's, in float64, without a gradient: a TypeError for
a Tensor that requires one.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pyops import functional as F
from pyops.autograd import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyops.typing import Axis, Numbers


def _axes(dim: Axis) -> Any:
    return tuple(dim) if isinstance(dim, list) else dim


def vector_norm(x: Numbers, ord: float = 2, dim: Axis = None, keepdim: bool = False) -> Tensor:
    """Return (sum |x|^ord)^(1 / ord) over axes, None: over all elements."""
    x = F.tensor(x)
    if dim is None:
        y = F.norm(x.reshape(-1), ord)
        return y.reshape((1,) * x.ndim) if keepdim else y
    return F.norm(x, ord, _axes(dim), keepdim)


def matrix_norm(A: Numbers, ord: float | str = 'fro', dim: Sequence[int] = (-2, -1), keepdim: bool = False) -> Tensor:
    """Return the norms of matrices: 'fro', the root of the sum of squares; 1 and inf, the largest sum of |elements| of a column
    and of a row, -1 and -inf the smallest."""
    x, (rows, columns) = F.tensor(A), dim
    if ord == 'fro':
        return F.norm(x, 2, (rows, columns), keepdim)
    if not isinstance(ord, int | float) or abs(ord) not in (1, np.inf):
        raise ValueError(f"matrix_norm: ord: expected 'fro', 1, -1, inf or -inf, got {ord!r}")
    rows, columns = rows % x.ndim, columns % x.ndim
    first, second = (rows, columns) if abs(ord) == 1 else (columns, rows)
    sums = abs(x).sum(first, keepdims=True)
    y = sums.max(second, keepdims=True) if ord > 0 else sums.min(second, keepdims=True)
    return y if keepdim else y.squeeze((rows, columns))


def norm(A: Numbers, ord: float | str | None = None, dim: Axis = None, keepdim: bool = False) -> Tensor:
    """Return matrix_norm of two axes or, with an ord, of a matrix; else vector_norm."""
    x, axes = F.tensor(A), _axes(dim)
    if ord is not None and (isinstance(axes, tuple) and len(axes) == 2 or axes is None and x.ndim == 2):
        return matrix_norm(x, ord, axes or (-2, -1), keepdim)
    return vector_norm(x, 2 if ord is None else ord, axes, keepdim)             # type: ignore[arg-type]


def inv(A: Numbers) -> Tensor:
    """Return the inverses of matrices; see Tensor.inverse."""
    return F.tensor(A).inverse()


def det(A: Numbers) -> Tensor:
    """Return the determinants of matrices."""
    return F.tensor(A).det()


def slogdet(A: Numbers) -> tuple[Tensor, Tensor]:
    """Return the signs of the determinants of matrices, and the logarithms of their absolute values."""
    return F.tensor(A).slogdet()


def solve(A: Numbers, B: Numbers) -> Tensor:
    """Return X with A X = B;  A (..., n, n), B (..., n, k), or (n,), or (..., n) for as many matrices.

    It is computed in float64; two steps X + A^-1 (B - A X) then give first and second derivatives.
    """
    a, b = F.tensor(A), F.tensor(B)
    is_vector = b.ndim == 1 or b.ndim == a.ndim - 1 and b.shape == a.shape[:-1]
    b = b.unsqueeze(-1) if is_vector else b
    inverse = np.linalg.inv(a.numpy().astype(np.float64))
    x = Tensor(np.linalg.solve(a.numpy().astype(np.float64), b.numpy()).astype(b.dtype), device=b.device, dtype=b.dtype)
    near = Tensor(inverse.astype(a.dtype), device=a.device, dtype=a.dtype)
    for _ in range(2 if a.requires_grad or b.requires_grad else 0):
        x = x + near @ (b - a @ x)
    return x.squeeze(-1) if is_vector else x


def matrix_power(A: Numbers, n: int) -> Tensor:
    """Return the product of n equal matrices, of a negative n of their inverses."""
    return F.tensor(A).matrix_power(n)


def multi_dot(tensors: Sequence[Numbers]) -> Tensor:
    """Return the product of several matrices; the first and the last may be vectors."""
    return F.chain_matmul(*tensors)


def cross(x: Numbers, other: Numbers, *, dim: int = -1) -> Tensor:
    """Return the cross products of vectors of 3 elements along an axis."""
    return F.tensor(x).cross(other, dim)


def vecdot(x: Numbers, y: Numbers, *, dim: int = -1) -> Tensor:
    """Return the sums of products along an axis."""
    return (F.tensor(x) * y).sum(dim)


def diagonal(A: Numbers, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
    """Return the diagonals of matrices as the last axis."""
    return F.tensor(A).diagonal(offset, dim1, dim2)


matmul = F.matmul


# ---- numpy's, without a gradient ------------------------------------------------------------------------------------------

def _numpys(who: str, function: Callable[..., Any], *tensors: Any, **settings: Any) -> Any:
    """Return the results of numpy's function as Tensors of the dtype of the first."""
    given = [F.tensor(x) for x in tensors]
    if any(x.requires_grad for x in given):
        raise TypeError(f'linalg.{who}: expected Tensors that require no gradient, which it lacks; use detach()')

    def ours(value: Any) -> Tensor:
        found = np.asarray(value)
        return Tensor(found.astype(given[0].dtype if found.dtype.kind == 'f' else np.int32), device=given[0].device,
                      dtype=given[0].dtype if found.dtype.kind == 'f' else None)
    y = function(*(x.numpy().astype(np.float64) for x in given), **settings)
    return tuple(map(ours, y)) if isinstance(y, tuple) else ours(y)


def cholesky(A: Numbers) -> Tensor:
    """Return the lower triangular L with L L' = A.  LinAlgError if A is not positive definite."""
    return _numpys('cholesky', np.linalg.cholesky, A)


def qr(A: Numbers, mode: str = 'reduced') -> tuple[Tensor, Tensor]:
    """Return Q with orthonormal columns and the upper triangular R with Q R = A.   mode: 'reduced' or 'complete'"""
    return _numpys('qr', lambda a: tuple(np.linalg.qr(a, mode)), A)                     # type: ignore[call-overload]


def svd(A: Numbers, full_matrices: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, S and V' with U diag(S) V' = A, the singular values S falling."""
    return _numpys('svd', lambda a: tuple(np.linalg.svd(a, full_matrices)), A)


def svdvals(A: Numbers) -> Tensor:
    """Return the singular values of matrices, falling."""
    return _numpys('svdvals', np.linalg.svd, A, compute_uv=False)


def eigh(A: Numbers, UPLO: str = 'L') -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of symmetric matrices, rising, and the eigenvectors as columns."""
    return _numpys('eigh', lambda a: tuple(np.linalg.eigh(a, UPLO)), A)                 # type: ignore[arg-type]


def eigvalsh(A: Numbers, UPLO: str = 'L') -> Tensor:
    """Return the eigenvalues of symmetric matrices, rising."""
    return _numpys('eigvalsh', np.linalg.eigvalsh, A, UPLO=UPLO)


def pinv(A: Numbers) -> Tensor:
    """Return the pseudo-inverses of matrices."""
    return _numpys('pinv', np.linalg.pinv, A)


def matrix_rank(A: Numbers) -> Tensor:
    """Return the ranks of matrices, int32: the singular values above the rounding error of float32."""
    x = F.tensor(A)
    return _numpys('matrix_rank', np.linalg.matrix_rank, x, rtol=max(x.shape[-2:]) * np.finfo(x.dtype).eps)


def lstsq(A: Numbers, B: Numbers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return X with the least |A X - B|, the sums of squares of the rest, the rank of A, and its singular values."""
    return _numpys('lstsq', lambda a, b: tuple(np.linalg.lstsq(a, b, None)), A, B)


def solve_triangular(A: Numbers, B: Numbers, *, upper: bool, left: bool = True) -> Tensor:
    """Return X with A X = B, or with left=False X A = B, for triangular matrices; the other triangle is not read."""
    a, b = F.tensor(A), F.tensor(B)
    a = a.triu() if upper else a.tril()
    return solve(a, b) if left else solve(a.mT, b.mT).mT
