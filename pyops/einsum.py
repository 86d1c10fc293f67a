"""einsum by matrix products: for arrays and Tensors, whose methods it uses alone."""
from __future__ import annotations

import math
from typing import Any


def einsum(subscripts: str, *operands: Any) -> Any:
    """Return the sum of products of the operands over the letters that the result lacks, such as 'bij,bjk->bik'.

    Without -> the result has the letters that occur once, in alphabetical order.  '...' denotes leading axes, which broadcast.
    Two operands at a time are multiplied, from the left, as a batch of matrix products.  ValueError for subscripts that do not
    fit.
    """
    inputs, arrow, output = subscripts.replace(' ', '').partition('->')
    terms = inputs.split(',')
    if len(terms) != len(operands):
        raise ValueError(f'einsum: expected as many operands as in {subscripts!r}, {len(terms)}, got {len(operands)}')
    ellipsis = max((x.ndim - len(term.replace('...', '')) for term, x in zip(terms, operands, strict=True) if '...' in term),
                   default=0)
    used = set(subscripts)
    extra = [c for c in 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz' if c not in used][:ellipsis]
    named = []
    for term, x in zip(terms, operands, strict=True):
        count = x.ndim - len(term.replace('...', ''))
        term = term.replace('...', ''.join(extra[len(extra) - count:]) if count else '')
        if len(term) != x.ndim or not (term.isalpha() or not term):
            raise ValueError(f'einsum: subscripts {subscripts!r} do not fit an operand of shape {x.shape}')
        named.append(term)
    if arrow:
        output = output.replace('...', ''.join(extra))
    else:
        letters = ''.join(named)
        output = ''.join(extra) + ''.join(sorted(c for c in set(letters) - set(extra) if letters.count(c) == 1))
    sizes: dict[str, int] = {}
    for term, x in zip(named, operands, strict=True):
        for c, n in zip(term, x.shape, strict=True):
            if sizes.setdefault(c, n) != n and 1 not in (n, sizes[c]):
                raise ValueError(f'einsum: {subscripts!r}: {c} has the sizes {sizes[c]} and {n}')
            sizes[c] = max(sizes[c], n) if n != 0 and sizes[c] != 0 else 0
    if set(output) - set(''.join(named)) or len(set(output)) < len(output):
        raise ValueError(f'einsum: {subscripts!r}: each letter of the result must occur in an operand, and once in the result')
    result, term = None, ''
    for i, (own, x) in enumerate(zip(named, operands, strict=True)):
        later = set(output).union(*named[i + 1:])
        x, own = _diagonals(x, own)
        x = x if all(sizes[c] == n for c, n in zip(own, x.shape, strict=True)) else x.broadcast_to(tuple(sizes[c] for c in own))
        result, term = (x, own) if result is None else _product(result, term, x, own, later)
        gone = tuple(d for d, c in enumerate(term) if c not in later)
        if gone:
            result, term = result.sum(gone), ''.join(c for c in term if c in later)
    assert result is not None
    return result.permute(tuple(map(term.index, output))) if term != output else result


def _diagonals(x: Any, term: str) -> tuple[Any, str]:
    """Replace axes with the same letter by their diagonal."""
    for c in dict.fromkeys(term):
        while term.count(c) > 1:
            a, b = term.index(c), term.rindex(c)
            n, rest = x.shape[a], [d for d in range(x.ndim) if d not in (a, b)]
            flat = x.permute((a, b, *rest)).reshape(n * n, *(x.shape[d] for d in rest))
            x, term = flat[::n + 1], c + ''.join(term[d] for d in rest)
    return x, term


def _product(a: Any, of_a: str, b: Any, of_b: str, kept: set[str]) -> tuple[Any, str]:
    """Return the product of two operands as a batch of matrix products, and its letters."""
    batch = [c for c in of_a if c in of_b and c in kept]
    inner = [c for c in of_a if c in of_b and c not in kept]
    rows, columns = [c for c in of_a if c not in of_b], [c for c in of_b if c not in of_a]
    size = dict(zip(of_a + of_b, a.shape + b.shape, strict=True))

    def shaped(x: Any, term: str, *groups: list[str]) -> Any:
        order = tuple(term.index(c) for group in groups for c in group)
        return x.permute(order).reshape(tuple(math.prod(size[c] for c in group) for group in groups))
    y = shaped(a, of_a, batch, rows, inner) @ shaped(b, of_b, batch, inner, columns)
    letters = batch + rows + columns
    return y.reshape(tuple(size[c] for c in letters)), ''.join(letters)
