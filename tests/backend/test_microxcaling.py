"""The MX formats against the numbers of Microsoft's emulation, microxcaling: tests/helpers/microxcaling.py has their origin."""
import microxcaling
import numpy as np
import pytest
from places import get, put

from pyops.formats import decode, encode, fake_quantize

FOUND = np.load(microxcaling.PATH)


@pytest.mark.parametrize('rounding', microxcaling.ROUNDINGS)
@pytest.mark.parametrize('fmt', microxcaling.ELEMENTS)
def test_mx_formats_have_the_numbers_of_microxcaling(fmt, rounding):
    x, want = FOUND['x'], FOUND[f'{fmt} {rounding}']
    for given, axis in ((x, -1), (x.T.copy(), 0)):
        y = np.asarray(get(fake_quantize(put(given), fmt, axis, round=rounding)))
        np.testing.assert_array_equal(y if axis else y.T, want)
        decoded = np.asarray(get(decode(encode(put(given), fmt, axis, round=rounding))))
        np.testing.assert_array_equal(decoded, y)
    assert np.isnan(want).sum() == 32 + 32 + 6 and (want == 0).sum() > 32 and len(np.unique(want)) > 100


def test_the_logarithm_of_an_amax_just_below_a_power_of_two_is_exact():
    """microxcaling's float32 logarithm of 31.999998 is 5, so its scale is twice as large and the result 32."""
    x = np.zeros(32, np.float32)
    x[0] = np.nextafter(np.float32(32), np.float32(0))
    assert np.asarray(get(fake_quantize(put(x), 'mxfp4')))[0] == 24
    assert np.asarray(get(fake_quantize(put(x), 'mxfp8')))[0] == 28
