"""Synthetic handwritten digits that require no file: 12,000 images, always the same.

Programs can train and be tested on them if no data was downloaded.  Each digit has several writing styles (a 7 with a
bar, an open and a closed 4, a 1 with and without a foot ...), each a few strokes through control points.  To draw an image,
the points of one style are jittered and joined by a smooth curve; the curve is rotated, slanted, stretched, bent by a smooth
displacement field, and drawn with a pen of varying pressure.  Size and position follow MNIST: the longer side fills
20 of 28 pixels, and the centre of mass is in the middle.
The random numbers come from a counter-based generator (Philox) with a fixed key, so the images depend only on VERSION.
"""
from __future__ import annotations

from functools import cache

import numpy as np

VERSION = 1             # increase it with every change to the images
TRAIN, TEST = 10_000, 2_000
SIDE = 28               # pixels
BOX = 20.0              # length of the longer side of a digit in pixels
POINTS = 72             # points per curve; curves have up to 60 pixels, so the points are closer than the pen is wide
_CHUNK = 256            # images drawn at once, so that the working set fits the cache

# Digit -> styles; a style is strokes, a stroke is control points x, y (y down) in the unit square.  A repeated point makes a
# corner.
_HANDS = {
    0: ('.54 .00  .24 .07  .08 .34  .08 .66  .24 .93  .50 1.0  .76 .93  .92 .66  .92 .34  .76 .07  .48 .01',
        '.72 .08  .44 .00  .18 .18  .08 .52  .18 .86  .44 1.0  .72 .88  .88 .58  .86 .24  .66 .03  .42 .08',
        '.42 .03  .22 .22  .14 .54  .22 .86  .44 1.0  .68 .88  .80 .56  .76 .22  .58 .02  .38 .05'),
    1: ('.50 .00  .50 .33  .50 .66  .50 1.0',
        '.25 .24  .40 .14  .55 .00  .55 .00  .54 .50  .54 1.0',
        '.26 .22  .42 .13  .54 .00  .54 .00  .54 .50  .53 .98 / .26 .99  .53 .98  .80 .98'),
    2: ('.12 .24  .28 .04  .60 .00  .82 .20  .72 .48  .40 .76  .10 .98  .10 .98  .50 .97  .90 .95',
        '.14 .20  .40 .00  .74 .08  .80 .34  .56 .66  .24 .93  .08 .90  .16 .76  .36 .82  .60 .97  .92 .90',
        '.10 .16  .45 .02  .80 .18  .70 .50  .35 .85  .12 1.0  .12 1.0  .46 .90  .88 1.0'),
    3: ('.14 .10  .46 .00  .78 .14  .70 .38  .40 .47  .40 .47  .76 .56  .84 .82  .52 1.0  .12 .90',
        '.14 .03  .46 .03  .80 .03  .80 .03  .60 .22  .42 .42  .42 .42  .74 .50  .84 .74  .60 .98  .14 .92',
        '.20 .14  .50 .00  .74 .16  .62 .40  .44 .46  .56 .45  .82 .62  .74 .90  .42 1.0  .16 .84'),
    4: ('.24 .00  .18 .30  .14 .56  .14 .56  .50 .56  .88 .53 / .72 .06  .70 .50  .68 1.0',
        '.66 .00  .40 .30  .08 .66  .08 .66  .50 .66  .94 .64 / .66 .00  .66 .50  .66 1.0',
        '.22 .02  .14 .34  .26 .52  .56 .50  .80 .30  .82 .02  .80 .30  .76 .66  .74 1.0'),
    5: ('.82 .02  .52 .03  .24 .04  .24 .04  .20 .24  .18 .46  .18 .46  .50 .37  .82 .54  .80 .84  .48 1.0  .12 .90',
        '.26 .04  .22 .25  .20 .45  .20 .45  .54 .38  .82 .60  .72 .90  .40 1.0  .12 .88 / .26 .05  .54 .04  .86 .01',
        '.88 .00  .55 .06  .34 .08  .26 .26  .24 .42  .52 .46  .74 .66  .60 .92  .30 1.0  .12 .94'),
    6: ('.74 .02  .42 .22  .20 .56  .22 .86  .50 1.0  .78 .84  .76 .58  .50 .50  .24 .68',
        '.56 .00  .30 .28  .18 .62  .28 .92  .54 .98  .72 .78  .58 .60  .36 .66  .24 .84',
        '.66 .00  .34 .18  .16 .52  .24 .88  .56 1.0  .84 .78  .68 .52  .36 .54  .20 .70'),
    7: ('.10 .06  .48 .04  .86 .03  .86 .03  .62 .46  .42 1.0',
        '.12 .06  .48 .04  .86 .04  .86 .04  .62 .46  .44 1.0 / .32 .50  .54 .49  .78 .47',
        '.10 .22  .12 .06  .12 .06  .48 .10  .86 .03  .86 .03  .66 .42  .56 1.0'),
    8: ('.74 .12  .46 .00  .22 .16  .34 .38  .62 .54  .80 .78  .54 1.0  .24 .86  .32 .60  .62 .42  .78 .20  .70 .08',
        '.50 .48  .26 .32  .30 .08  .52 .00  .74 .10  .72 .34  .50 .48  .24 .66  .26 .92  .52 1.0  .78 .90  .76 .64  '
        '.50 .48',
        '.80 .06  .42 .02  .28 .22  .50 .44  .74 .68  .62 .96  .34 .94  .32 .70  .58 .46  .84 .10'),
    9: ('.80 .20  .52 .00  .24 .14  .22 .40  .50 .50  .78 .34  .80 .14  .80 .14  .76 .56  .68 1.0',
        '.78 .14  .46 .02  .20 .24  .36 .48  .66 .40  .78 .14  .80 .50  .68 .86  .30 .98',
        '.74 .10  .44 .02  .26 .22  .40 .42  .66 .34  .74 .08  .74 .08  .70 .50  .70 1.0'),
}


@cache
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return train images uint8 (10000, 784), their labels uint8 (10000,), test images (2000, 784) and their labels.

    0 is paper, 255 is ink; rows run from top to bottom.  Each digit occurs 1,000 times in training and 200 times in the test.
    The arrays are shared and read-only.  The first call draws them, in less than a second.
    """
    labels = _labels()
    images = _draw(labels)
    for array in (images, labels):
        array.flags.writeable = False
    return images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:]


def _rng(stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([VERSION, stream], np.uint64)))


def _labels() -> np.ndarray:
    """Return labels in random order, with every digit equally often in training and in the test."""
    rng = _rng(0)
    return np.concatenate([rng.permutation(n) % 10 for n in (TRAIN, TEST)]).astype(np.uint8)


# ---- curves ----------------------------------------------------------------------------------------------------------

def _catmull_rom(n: int, samples: int) -> np.ndarray:
    """Return the matrix (samples, n) of a smooth curve through n control points, sampled at equal parameter steps."""
    t = np.linspace(0, n - 1, samples)
    i = np.minimum(t.astype(int), n - 2)
    u = t - i
    weights = np.stack([-u + 2*u**2 - u**3, 2 - 5*u**2 + 3*u**3, u + 4*u**2 - 3*u**3, u**3 - u**2], axis=1) / 2
    matrix = np.zeros((samples, n))
    for offset in range(4):                                 # the end points are repeated
        np.add.at(matrix, (np.arange(samples), np.clip(i + offset - 1, 0, n - 1)), weights[:, offset])
    return matrix


def _hand(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the control points (C, 2) of a style and the matrix (POINTS, C) that maps them to points of its curve."""
    strokes = [np.array(stroke.split(), float).reshape(-1, 2) for stroke in text.split('/')]
    fine = [_catmull_rom(len(stroke), 512) for stroke in strokes]
    along = [np.concatenate([[0], np.hypot(*np.diff(matrix @ stroke, axis=0).T).cumsum()])
             for matrix, stroke in zip(fine, strokes, strict=True)]
    shares = np.array([length[-1] for length in along])
    shares = np.maximum(np.round(POINTS * shares / shares.sum()), 2).astype(int)
    shares[shares.argmax()] += POINTS - shares.sum()
    control = np.concatenate(strokes)
    matrix = np.zeros((POINTS, len(control)))
    row = column = 0
    for rows, length, spread, stroke in zip(shares, along, fine, strokes, strict=True):
        at = np.searchsorted(length, np.linspace(0, length[-1], rows)).clip(0, len(length) - 1)
        matrix[row:row + rows, column:column + len(stroke)] = spread[at]     # points at equal distances
        row, column = row + rows, column + len(stroke)
    return control, matrix


def _curves(labels: np.ndarray, extent: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return a curve per label: x and y, (2, N, POINTS), in pixels relative to the mean of its points.

    extent (N, 1): the longer side of the bounding box in pixels.
    """
    n = len(labels)
    points = np.empty((2, n, POINTS))
    pick = rng.random(n)
    for digit, hands in _HANDS.items():
        which = (pick * len(hands)).astype(int)
        for number, text in enumerate(hands):
            chosen = np.flatnonzero((labels == digit) & (which == number))
            control, matrix = _hand(text)
            jitter = rng.normal(0, 0.028, (len(chosen), *control.shape))
            # the two copies of a corner point must move together
            same = np.flatnonzero((np.diff(control, axis=0) == 0).all(axis=1))
            jitter[:, same + 1] = jitter[:, same]
            points[:, chosen] = np.moveaxis(matrix @ (control + jitter - 0.5), 2, 0)
    x, y = points

    # elastic: displace each curve by a field of a few long waves
    for _ in range(3):
        wave_x, wave_y = rng.normal(0, 3.2, (2, n, 1))      # radians for each side of the square
        shift = np.sin(x * wave_x + y * wave_y + rng.uniform(0, 2 * np.pi, (n, 1)))
        for coordinate, amplitude in zip((x, y), rng.normal(0, 0.042, (2, n, 1)), strict=True):
            coordinate += amplitude * shift

    # affine: stretch, slant, rotate; then scale to the bounding box
    turn, slant = rng.normal(0, 0.12, (n, 1)), rng.normal(0.14, 0.19, (n, 1))
    x = x * np.exp(rng.normal(-0.24, 0.16, (n, 1))) - y * slant
    points = np.stack([x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)])
    points *= extent / np.ptp(points, axis=2).max(axis=0)[:, None]
    return points - points.mean(axis=2, keepdims=True)


# ---- ink -------------------------------------------------------------------------------------------------------------

def _draw(labels: np.ndarray) -> np.ndarray:
    rng = _rng(1)
    n = len(labels)
    pen = np.clip(np.exp(rng.normal(0.22, 0.26, (n, 1))), 0.75, 2.1)         # pen radius in pixels
    points = _curves(labels, BOX * rng.uniform(0.85, 1.02, (n, 1)) - 2 * pen, rng)
    points += (SIDE - 1) / 2 + rng.normal(0, 0.35, (2, n, 1))
    # pressure: the radius varies along the stroke in a slow wave
    phase = rng.uniform(2, 9, (n, 1)) * np.linspace(0, 1, POINTS) + rng.uniform(0, 2 * np.pi, (n, 1))
    radius = pen * (1 + 0.16 * np.sin(phase))
    softness = rng.uniform(0.9, 1.7, n)                     # width of the edge in pixels
    darkness = rng.uniform(219, 270, n).astype(np.float32)  # above 255: saturated ink
    images = np.empty((n, SIDE, SIDE), np.uint8)
    for first in range(0, n, _CHUNK):
        part = slice(first, first + _CHUNK)
        ink = _ink(points[:, part], radius[part], softness[part]) * darkness[part]
        ink *= 1 - np.float32(0.2) * rng.random(ink.shape, dtype=np.float32)               # paper is uneven
        images[part] = (np.minimum(ink, 255) + 0.5).astype(np.uint8).transpose(2, 0, 1)
    return images.reshape(n, -1)


def _ink(points: np.ndarray, radius: np.ndarray, softness: np.ndarray) -> np.ndarray:
    """Return ink from 0 to 1, float32 (SIDE, SIDE, N), from the distance of each pixel to the curve.

    A curve is a row of discs: points (2, N, POINTS) in pixels, radius (N, POINTS), softness (N,) of the edge.  The
    power distances |pixel - point|^2 - radius^2 are compared, so that each pixel needs only one square root; they are in 16-bit
    fixed point, with a resolution of 1/24 square pixel, which halves the time.
    """
    scale, largest = 24, 2**15 - 1                          # the sum of two fits uint16
    x, y, radius = (np.ascontiguousarray(array.T) for array in (*points, radius))     # images last: long inner loops
    mean, most = radius.mean(axis=0), radius.max(axis=0)
    grid = np.arange(SIDE)[:, None]
    nearest = np.full((SIDE, SIDE, len(mean)), 2 * largest, np.uint16)
    distance = np.empty_like(nearest)
    dx2 = np.minimum(scale * (grid - x[:, None])**2, largest).astype(np.uint16)
    dy2 = np.minimum(scale * ((grid - y[:, None])**2 + (most**2 - radius**2)[:, None]), largest).astype(np.uint16)
    for column, row in zip(dx2, dy2, strict=True):          # one per point
        np.add(row[:, None], column[None], out=distance)
        np.minimum(nearest, distance, out=nearest)
    squared = nearest * np.float32(1 / scale) + (mean**2 - most**2).astype(np.float32)     # for a pen of mean radius
    edge = mean.astype(np.float32) - np.sqrt(np.maximum(squared, 0, out=squared), out=squared)
    return np.clip(edge / softness.astype(np.float32) + np.float32(0.5), 0, 1)
