"""einsum by matrix products: for arrays and Tensors, whose methods it uses alone."""
from __future__ import annotations

import functools
import itertools
import math
from typing import Any

SEARCHED = 6            # operands whose orders are all compared: 3^6 / 2 products


def einsum(subscripts: str, *operands: Any) -> Any:
    """Return the sum of products of the operands over the letters that the result lacks, such as 'bij,bjk->bik'.

    Without -> the result has the letters that occur once, in alphabetical order.  '...' denotes leading axes, which broadcast.
    Two operands at a time are multiplied, as a batch of matrix products, in the order with the least multiply-adds; of equal
    ones, from the left.  Of more than 6 operands, the pair with the least multiply-adds is multiplied first.  ValueError for
    subscripts that do not fit.
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
    parts = []
    for i, (own, x) in enumerate(zip(named, operands, strict=True)):
        others = set(output).union(*named[:i], *named[i + 1:])
        x, own = _diagonals(x, own)
        x = x if all(sizes[c] == n for c, n in zip(own, x.shape, strict=True)) else x.broadcast_to(tuple(sizes[c] for c in own))
        gone = tuple(d for d, c in enumerate(own) if c not in others)
        parts.append((x.sum(gone), ''.join(c for c in own if c in others)) if gone else (x, own))
    result, term = _computed(_order(tuple(term for _, term in parts), output, tuple(sizes.items())), parts)
    return result.permute(tuple(map(term.index, output))) if term != output else result


@functools.lru_cache(256)
def _order(terms: tuple[str, ...], output: str, sizes: tuple[tuple[str, int], ...]) -> Any:
    """Return the products of all operands as a tree: the number of an operand, or (left, right, the letters needed later)."""
    size = dict(sizes)
    nodes: list[tuple[Any, frozenset[str]]] = [(i, frozenset(term)) for i, term in enumerate(terms)]

    def cost(a: Any, b: Any) -> int:
        return math.prod(size[c] for c in a[1] | b[1])

    def product(a: Any, b: Any, rest: list[Any]) -> tuple[Any, frozenset[str]]:
        needed = frozenset(output).union(*(letters for _, letters in rest))
        return (a[0], b[0], needed), (a[1] | b[1]) & needed

    while len(nodes) > SEARCHED:
        pair = min(itertools.combinations(nodes, 2), key=lambda pair: cost(*pair))
        rest = [node for node in nodes if node not in pair]
        nodes = [*rest, product(*pair, rest)]
    # the best order of each set of nodes, from the best orders of its two parts; bit i of a set is node i
    best = {1 << i: (0, node) for i, node in enumerate(nodes)}
    for every in range(1, 1 << len(nodes)):
        if every in best:
            continue
        options, part = [], (every - 1) & every
        while part:
            if part & every & -every:           # the part with the first node: each pair of parts once
                other = every ^ part
                total = best[part][0] + best[other][0] + cost(best[part][1], best[other][1])
                options.append((total, other.bit_count(), -other))
            part = (part - 1) & every
        total, _, other = min(options)
        rest = [node for i, node in enumerate(nodes) if not every >> i & 1]
        best[every] = total, product(best[every ^ -other][1], best[-other][1], rest)
    return best[(1 << len(nodes)) - 1][1][0]


def _computed(node: Any, parts: list[tuple[Any, str]]) -> tuple[Any, str]:
    """Return the value of a node of the tree of products, and its letters."""
    if isinstance(node, int):
        return parts[node]
    left, right, needed = node
    return _product(*_computed(left, parts), *_computed(right, parts), needed)


def _diagonals(x: Any, term: str) -> tuple[Any, str]:
    """Replace axes with the same letter by their diagonal."""
    for c in dict.fromkeys(term):
        while term.count(c) > 1:
            a, b = term.index(c), term.rindex(c)
            n, rest = x.shape[a], [d for d in range(x.ndim) if d not in (a, b)]
            flat = x.permute((a, b, *rest)).reshape(n * n, *(x.shape[d] for d in rest))
            x, term = flat[::n + 1], c + ''.join(term[d] for d in rest)
    return x, term


def _product(a: Any, of_a: str, b: Any, of_b: str, kept: frozenset[str]) -> tuple[Any, str]:
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
