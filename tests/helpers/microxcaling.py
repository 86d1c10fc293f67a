"""Write tests/golden/microxcaling.npz: numbers rounded to the MX formats by Microsoft's emulation, which needs PyTorch only.

    git clone https://github.com/microsoft/microxcaling
    PYTHONPATH=microxcaling python tests/helpers/microxcaling.py        # commit 7bc4195
"""
from pathlib import Path

import numpy as np

PATH = Path(__file__).resolve().parents[1] / 'golden' / 'microxcaling.npz'
ELEMENTS = {'mxfp8': 'fp8_e4m3', 'mxfp8:elem=e5m2': 'fp8_e5m2', 'mxfp6': 'fp6_e3m2', 'mxfp6:elem=e2m3': 'fp6_e2m3',
            'mxfp4': 'fp4_e2m1', 'mxint8': 'int8'}                          # our format -> its element
ROUNDINGS = {'rne': 'even', 'away': 'nearest', 'floor': 'floor'}            # ours -> its name


def numbers():
    """Rows of two blocks and a shorter one: magnitudes of any float32, ties, zeros, infinities and NaN, (40, 70) float32."""
    rng = np.random.default_rng(11)
    exponents = np.repeat(rng.integers(-140, 120, (40, 3)), (32, 32, 6), axis=1)
    x = np.exp2(exponents) * rng.standard_normal((40, 70))
    x[20:30] = np.exp2(exponents[20:30]) * rng.integers(-64, 65, (10, 70)) / 32            # ties
    x[10:12] *= rng.random((2, 70)) < 0.5
    x[12, :32], x[13, 3], x[14, 40], x[15, 69] = 0, np.inf, np.nan, -np.inf
    with np.errstate(over='ignore', under='ignore'):
        return x.astype(np.float32)


if __name__ == '__main__':
    import torch
    from mx.mx_ops import _quantize_mx

    x = numbers()
    found = {f'{fmt} {rounding}': _quantize_mx(torch.from_numpy(x.copy()), 8, element, axes=[-1], block_size=32,
                                               round=name).numpy()
             for fmt, element in ELEMENTS.items() for rounding, name in ROUNDINGS.items()}
    np.savez_compressed(PATH, x=x, **found)
