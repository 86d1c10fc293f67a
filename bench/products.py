"""Shared by bench.kernels and bench.floor: matrix products at the programs' shapes."""
import numpy as np

ISAS = 'generic', 'avx2', 'avx512'
T, B, D, V, HEADS = 9, 128, 256, 13387, 4           # of the translators: steps, batch, width, French vocabulary, heads
# name, (M, N, K), whether a and b are transposed views
PRODUCTS = (('gemm 1024 x 1024 x 1024', (1024, 1024, 1024), (False, False)),
            ('gemm logits 1152 x 13387 x 256', (T * B, V, D), (False, True)),
            ('gemm dx 1152 x 256 x 13387', (T * B, D, V), (False, False)),
            ('gemm dweight 13387 x 256 x 1152', (V, D, T * B), (True, False)),
            ('gemm projection 1152 x 256 x 256', (T * B, D, D), (False, True)),
            ('gemm step 128 x 768 x 256', (B, 3 * D, D), (False, True)),
            ('gemm digits 100 x 10 x 30', (100, 10, 30), (False, True)),
            ('gemm one word 1 x 13387 x 256', (1, V, D), (False, True)))


def operands(rng, sizes, turned):
    """Return random factors a (M, K) and b (K, N) of a product; turned: whether each is a transposed view."""
    M, N, K = sizes
    a = rng.standard_normal((K, M) if turned[0] else (M, K), np.float32)
    b = rng.standard_normal((N, K) if turned[1] else (K, N), np.float32)
    return a.T if turned[0] else a, b.T if turned[1] else b
