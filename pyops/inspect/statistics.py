"""Statistics of a tensor, and of what a number format leaves of it.

All sums are float64 and over finite numbers; padding is excluded where a mask says what it is.  Work goes in chunks, so that
beside the tensor itself a few MiB are needed.
"""
import math

import numpy as np

_CHUNK = 1 << 16                    # numbers; 0.5 MiB of float64 stay in a cache


def describe(x, mask=None):
    """What a manifest says of a tensor: count, nan, inf, zeros, and of finite numbers amax, mean, mean_abs, rms, std, min, max.

    x: float32 of any shape.  mask: bool that broadcasts to it, False at padding.  None where no number is finite.
    """
    count = nan = inf = zeros = finite = 0
    total = total_abs = squares = 0.0
    least, most = math.inf, -math.inf
    for chunk in _chunks(x, mask):
        count += chunk.size
        zeros += chunk.size - int(np.count_nonzero(chunk))
        with np.errstate(invalid='ignore'):             # Inf - Inf
            one = float(chunk.sum())
        if not math.isfinite(one):
            bad = int(np.isnan(chunk).sum())
            nan, chunk, before = nan + bad, chunk[np.isfinite(chunk)], chunk.size
            inf += before - chunk.size - bad
            one = float(chunk.sum())
        if chunk.size:
            finite += chunk.size
            total += one
            total_abs += float(np.abs(chunk).sum())
            squares += float(np.dot(chunk, chunk))
            least, most = min(least, float(chunk.min())), max(most, float(chunk.max()))
    result = {'count': count, 'nan': nan, 'inf': inf, 'zeros': zeros}
    if not finite:
        return {**result, **dict.fromkeys(('amax', 'mean', 'mean_abs', 'rms', 'std', 'min', 'max'))}
    mean = total / finite
    return {**result, 'amax': max(-least, most), 'mean': mean, 'mean_abs': total_abs / finite,
            'rms': math.sqrt(squares / finite), 'std': math.sqrt(max(squares / finite - mean * mean, 0.0)),
            'min': least, 'max': most}


def _chunks(x, mask):
    """The numbers of x that are not padding, float64, in flat pieces."""
    flat = np.asarray(x).reshape(-1)
    keep = None if mask is None else np.broadcast_to(mask, np.shape(x)).reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start:start + _CHUNK].astype(np.float64)
        yield chunk if keep is None else chunk[keep[start:start + _CHUNK]]
