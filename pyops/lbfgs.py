"""The parts of L-BFGS that know nothing of parameters: the direction of a step, and a line search for its length.

Liu and Nocedal 1989; the search is algorithms 3.5 and 3.6 of Nocedal and Wright, Numerical Optimization, with PyTorch's bounds,
so both visit the same points.  All numbers are float64 on the host.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

C1, C2 = 1e-4, 0.9              # Wolfe's conditions: a sufficient decrease, and a slope that is small enough
LEAST_CURVATURE = 1e-10         # pairs with less are not kept
LEAST_INTERVAL = 1e-9           # in the largest change of a parameter


class Point(NamedTuple):
    """A point of a line search: the step along the direction, the loss, the gradient and its product with the direction."""
    step: float
    loss: float
    gradient: np.ndarray
    slope: float


class Memory:
    """The last differences of parameters and of gradients, which approximate the inverse of the second derivative."""

    def __init__(self, size: int) -> None:
        self.size, self.scale = size, 1.0
        self.pairs: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, moved: np.ndarray, turned: np.ndarray) -> None:
        """Keep the difference of parameters and the difference of gradients of a step."""
        curvature = float(turned @ moved)
        if curvature > LEAST_CURVATURE:
            self.pairs = [*self.pairs, (moved, turned)][-self.size:] if self.size else []
            self.scale = curvature / float(turned @ turned)

    def direction(self, gradient: np.ndarray) -> np.ndarray:
        """Return minus the approximate inverse times the gradient."""
        q, shares = -gradient, []
        for moved, turned in reversed(self.pairs):
            shares.append(float(moved @ q) / float(turned @ moved))
            q = q - shares[-1] * turned
        q = q * self.scale
        for (moved, turned), share in zip(self.pairs, reversed(shares), strict=True):
            q = q + (share - float(turned @ q) / float(turned @ moved)) * moved
        return q


def strong_wolfe(evaluate: Callable[[float], Point], start: Point, step: float, extent: float, most: int) -> tuple[Point, int]:
    """Search a step that satisfies the strong Wolfe conditions.  Return the point and the number of evaluations.

    evaluate: returns the Point of a step;  start: the Point of step 0;  extent: the largest element of the direction;  most:
    the limit of evaluations, above which the best point is returned
    """
    def decreases(point: Point) -> bool:
        return point.loss <= start.loss + C1 * point.step * start.slope

    def is_flat(point: Point) -> bool:
        return abs(point.slope) <= -C2 * start.slope

    last, point, evaluations, tries = start, evaluate(step), 1, 0
    low, high = start, point                            # if the limit ends the first phase
    while tries < most:
        if not decreases(point) or tries > 1 and point.loss >= last.loss:
            low, high = last, point
            break
        if is_flat(point):
            return point, evaluations
        if point.slope >= 0:
            low, high = last, point
            break
        bounds = point.step + 0.01 * (point.step - last.step), point.step * 10
        last, point = point, evaluate(_cubic_minimum(last, point, *bounds))
        evaluations, tries = evaluations + 1, tries + 1
    if tries == most:
        low, high = start, point
    if high.loss < low.loss:
        low, high = high, low
    is_stuck = False
    while tries < most:
        left, right = sorted((low.step, high.step))
        if (right - left) * extent < LEAST_INTERVAL:
            break
        step = _cubic_minimum(*sorted((low, high), key=lambda point: point.step), left, right)
        margin = 0.1 * (right - left)
        if min(right - step, step - left) < margin:
            if is_stuck or step >= right or step <= left:
                step, is_stuck = (right - margin if abs(step - right) < abs(step - left) else left + margin), False
            else:
                is_stuck = True
        else:
            is_stuck = False
        point = evaluate(step)
        evaluations, tries = evaluations + 1, tries + 1
        if not decreases(point) or point.loss >= low.loss:
            high = point
            if high.loss < low.loss:
                low, high = high, low
            continue
        if is_flat(point):
            return point, evaluations
        if point.slope * (high.step - low.step) >= 0:
            high = low
        low = point
    return low, evaluations


def _cubic_minimum(a: Point, b: Point, least: float, most: float) -> float:
    """Return the minimum of the cubic polynomial with the losses and slopes of two points, limited to [least, most]."""
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if not square >= 0:
        return (least + most) / 2
    d2 = math.sqrt(square)
    found = b.step - (b.step - a.step) * ((b.slope + d2 - d1) / (b.slope - a.slope + 2 * d2))
    return min(max(found, least), most)
