"""MXFP8, MXFP4 and NVFP4 against torchao, whose code for them runs on a CPU: the same codes and scales, bit for bit.

pip install -e '.[all]' installs torchao; without it these tests are skipped."""
import numpy as np
import pytest

from pyops.formats import encode

torch = pytest.importorskip('torch', reason='torch is not installed: pip install torch')
mx = pytest.importorskip('torchao.prototype.mx_formats.mx_tensor', reason='torchao is not installed: pip install torchao')
nvfp4 = pytest.importorskip('torchao.prototype.mx_formats.nvfp4_tensor', reason='torchao is not installed')

ELEMENTS = {'e4m3': torch.float8_e4m3fn, 'e5m2': torch.float8_e5m2, 'e2m1': torch.float4_e2m1fn_x2}


def unpacked(codes, fmt):
    """The codes of torchao, uint8: two of 4 bits share a byte, the first one in the lower half."""
    bytes_ = codes.view(torch.uint8).numpy()
    return np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(len(bytes_), -1) if 'fp4' in fmt else bytes_


def blocks(rng, block):
    """Rows of whole blocks: all magnitudes of float32, sums of two powers of two, where rounding has ties, and zeros."""
    plain = rng.standard_normal((64, 256))
    wide = rng.standard_normal((64, 256)) * np.exp2(rng.uniform(-140, 120, (64, 256 // block)).repeat(block, 1))
    ties = np.exp2(rng.integers(-3, 4, (64, 256))) + rng.choice([0, 1], (64, 256)) * np.exp2(rng.integers(-6, 3, (64, 256)))
    ties *= np.exp2(rng.integers(-60, 60, (64, 256 // block)).repeat(block, 1)) * rng.choice([-1, 1], (64, 256))
    zeros = plain * (rng.random((64, 256 // block)) < 0.5).repeat(block, 1)
    with np.errstate(over='ignore', under='ignore'):
        return np.concatenate([plain, wide, ties, zeros]).astype(np.float32)


@pytest.mark.parametrize('fmt', [f'mxfp8:elem={elem}:scale={rule}' for elem in ('e4m3', 'e5m2') for rule in (
    'floor', 'rceil', 'ceil', 'even')] + [f'mxfp4:elem=e2m1:scale={rule}' for rule in ('floor', 'rceil', 'even')])
def test_mx_codes_and_scales_are_those_of_torchao(fmt):
    name, elem, rule = (part.rpartition('=')[2] for part in fmt.split(':'))
    x = blocks(np.random.default_rng(5), 32)
    scales, codes = mx.to_mx(torch.from_numpy(x), ELEMENTS[elem], 32, mx.ScaleCalculationMode[rule.upper()])
    ours = encode(x, fmt)
    np.testing.assert_array_equal(scales.view(torch.uint8).numpy(), ours.scales)
    # torchao divides by at least 2^-126, also where it stores the scale 2^-127
    compared = (np.asarray(ours.scales) > 0).repeat(32, 1) | (x == 0)
    np.testing.assert_array_equal(unpacked(codes, name)[compared], np.asarray(ours.codes)[compared])
    assert compared.mean() > 0.9 and len(np.unique(ours.scales)) > 200
    assert len(np.unique(ours.codes)) > (200 if name == 'mxfp8' else 14)


def test_nvfp4_is_that_of_torchao_where_it_does_not_bound_the_scales():
    # torchao keeps the scales of blocks at 2^-6 or more, E4M3's smallest normal number; ours may be subnormal or 0
    rng = np.random.default_rng(6)
    x = (rng.standard_normal((256, 256)) * np.exp2(rng.integers(-5, 6, (256, 16)).repeat(16, 1))).astype(np.float32)
    scale = nvfp4.per_tensor_amax_to_scale(torch.from_numpy(x).abs().max())
    scales, codes = nvfp4.nvfp4_quantize(torch.from_numpy(x), 16, scale)
    ours = encode(x, 'nvfp4')
    assert ours.scales.min() > 2.0 ** -6 and len(np.unique(ours.scales)) > 60
    np.testing.assert_array_equal(scales.float().numpy(), ours.scales.reshape(scales.shape))
    np.testing.assert_array_equal(unpacked(codes, 'nvfp4'), ours.codes)
    assert len(np.unique(ours.codes)) > 14
