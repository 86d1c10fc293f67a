"""The expected results of each wrapper of gpu.cuh and hopper.cuh (cuda/common), as formulas; the kernels are in
cuda/test/conformance.cu.

    python tests/cuda/conformance.py LIBRARY [LIBRARY]

runs every case of the first library (build/conformance/cuda.so on a machine with a GPU) on random numbers and on small
integers, against the formulas and against the second library (build/conformance/emulated.so), and prints a table.  It needs
numpy only.
"""
import ctypes
import re
import sys

import numpy as np

# ---- numbers as the device rounds them ----


def bits(x):
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def bf16(x):
    """To the nearest bfloat16, ties to even."""
    u = bits(x).astype(np.uint64)
    return ((u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000).astype(np.uint32).view(np.float32)


def tf32(x):
    """To the nearest TF32, ties away from zero."""
    rounded = ((bits(x).astype(np.uint64) + 0x1000) & 0xffffe000).astype(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7fffffff), rounded).view(np.float32)


def tf32_cut(x):
    return (bits(x) & 0xffffe000).view(np.float32)


# The numbers of FP8 that are not negative, in the order of their codes.
def fp8_numbers(fraction_bits, smallest, count):
    code = np.arange(count)
    exponent, fraction = code >> fraction_bits, code % 2**fraction_bits
    significand = np.where(exponent, 2**fraction_bits + fraction, fraction)
    return significand * 2.0**(smallest - fraction_bits + np.maximum(exponent - 1, 0))


FP8 = {'e4m3': fp8_numbers(3, -6, 0x7f), 'e5m2': fp8_numbers(2, -14, 0x7c)}


def fp8_codes(form):
    """The code of the nearest number, of two that are equally near the even one."""
    def codes(x):
        numbers, size = FP8[form], np.minimum(np.abs(x.astype(np.float64)), FP8[form][-1])
        above = np.searchsorted(numbers, np.nan_to_num(size))
        below = np.maximum(above - 1, 0)
        down, up = size - numbers[below], numbers[above] - size
        code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below) + 128 * np.signbit(x)
        return np.where(np.isnan(x), np.nan, code)
    return codes


def fp8(form):
    def rounded(x):
        code = fp8_codes(form)(x).astype(int)
        return np.where(code < 128, 1, -1) * FP8[form][code % 128]
    return rounded


# ---- the formula of each case: an array of numbers to an array of numbers ----
def shared(x):
    return [x[::-1], np.tile(np.arange(32), 2), 4 * np.arange(64)]


def flags(x):
    total = np.float32(0)
    for value in x:
        total = np.float32(np.float32(total * np.float32(0.5)) + value)
    return [total, 4]


def async_copies(x):
    thread = np.arange(16)
    ok = thread % 3 != 0
    part = np.arange(4) < (thread % 5)[:, None]
    return [x[:16] * ok, x[16:48] * np.repeat(ok, 2), x[48:112] * np.repeat(ok, 4), x[112:] * part.ravel()]


def mma(rounded, depth):
    def formula(x):
        a, b, d = np.split(x, [16 * depth, 24 * depth])
        a, b = rounded(a).reshape(16, depth), rounded(b).reshape(depth, 8)
        return [d.reshape(16, 8) + a.astype(np.float64) @ b.astype(np.float64)]
    return formula


def ldmatrix(trans):
    """Lane l holds the elements (l / 4, 2 (l % 4)) and the next of each matrix: its elements in order, two for each lane."""
    def formula(x):
        matrices = bf16(x).reshape(-1, 8, 8)
        return [matrices.transpose(0, 2, 1) if trans else matrices]
    return formula


def swizzle(box):
    """The number of a row, modulo 8, is xored with the number of each 16-byte piece in it."""
    rows, columns = box.shape
    pieces = box.reshape(rows, columns // 4, 4)
    moved = np.empty_like(pieces)
    for row in range(rows):
        moved[row, np.arange(columns // 4) ^ row % 8] = pieces[row]
    return moved.reshape(rows, columns)


ROWS, COLUMNS, STRIDE, BOX, BOX_ROWS = 20, 39, 48, 32, 16


def bulk_loads(swizzled):
    def formula(x):
        matrix = x.reshape(ROWS, STRIDE)[:, :COLUMNS]
        wide = np.pad(matrix, 128)
        boxes = [wide[128 + row:128 + row + BOX_ROWS, 128 + column:128 + column + BOX]
                 for column, row in ((3, 2), (16, 12), (-7, -4), (-100, 0))]
        return [swizzle(box) if swizzled else box for box in boxes]
    return formula


def bulk_stores(swizzled):
    def formula(x):
        matrix = np.zeros((ROWS, STRIDE), np.float32)
        for box, (column, row) in zip(x.reshape(2, BOX_ROWS, BOX), ((0, 0), (23, 12)), strict=True):
            box = swizzle(box) if swizzled else box             # xor is its own inverse
            inside = box[:ROWS - row, :COLUMNS - column]
            matrix[row:row + inside.shape[0], column:column + inside.shape[1]] = inside
        return [matrix]
    return formula


def pieces(rounded):
    def formula(x):
        matrix = np.zeros((20, 152), np.float32)
        matrix[8:, :150] = rounded(x).reshape(16, 192)[:12, :150]
        return [matrix]
    return formula


def wgmma(form, n):
    formats = form.removesuffix('_ra').split('_')
    if formats[0] in FP8:
        of_a, of_b, depth = fp8(formats[0]), fp8(formats[-1]), 128
    else:
        of_a, depth = (tf32_cut, 32) if 'tf32' in form else (bf16, 64)
        of_b = of_a

    def formula(x):
        a, b = of_a(x[:64 * depth]).astype(np.float64), of_b(x[64 * depth:]).astype(np.float64)
        a = a.reshape(depth, 64).T if form in ('bf16_trans_a', 'bf16_trans_both') else a.reshape(64, depth)
        trans_b = form in ('bf16_trans_b', 'bf16_trans_both', 'bf16_ra_trans_b')
        b = b.reshape(depth, n) if trans_b else b.reshape(n, depth).T
        return [2 * (a @ b)]
    return formula


def written_operands(x):
    a, b = bf16(x).astype(np.float64).reshape(2, 64, 64)
    return [a @ b.T, a @ b]


def clusters(x):
    blocks = x.reshape(2, 4, 32)
    total = np.zeros((2, 32))
    for rank in range(4):
        total = 2 * total + blocks[:, rank]
    return [total[:, None, :] + 1000 * np.arange(4)[None, :, None]]


def cluster_stores(stored):
    def run(x):
        value, ranks = x.reshape(2, 4, 32).astype(np.float32), np.arange(4, dtype=np.float32)[:, None]
        for _ in range(2):
            total = np.zeros((2, 4, 32), np.float32)                            # cluster, receiving block
            for rank in range(4):
                total = 2 * total + np.roll(stored(value[:, rank, None] + ranks), -1, axis=-1)
            value = total
        return [value + ranks]
    return run


def multicast(x):
    rows = x.reshape(2, 4, 2, 32)                               # cluster, rank, round
    rank = np.arange(4)
    last = np.stack([np.where(((rank == block) | ((rank + 1) % 4 == block))[:, None], rows[:, :, 1], rows[:, :, 0])
                     for block in range(4)], axis=1)
    first = np.broadcast_to(rows[:, None, :, 0], last.shape)
    return [np.stack([first, last], axis=2)]                    # cluster, block, round, slot


FORMULAS = {
    'shared': shared,
    'named_barriers': lambda x: [x[::-1]],
    'grid_barrier': lambda x: [2 * np.roll(x, -64)],
    'early_start': lambda x: [2 * np.roll(x, -64)],
    'early_cluster': lambda x: [2 * x.reshape(2, 2, 64)[:, ::-1]],
    'flags': flags,
    'loads': lambda x: [x],
    'exp2': lambda x: [np.exp2(x.astype(np.float64))],
    'async_copies': async_copies,
    'tf32_bits': lambda x: [tf32(x)],
    'mma_tf32': mma(tf32, 8),
    'mma_tf32_unrounded': mma(tf32_cut, 8),
    'mma_bf16': mma(bf16, 16),
    'arrivals': lambda x: [np.roll(x, -21)],
    'bulk_loads': bulk_loads(False),
    'bulk_loads_swizzled': bulk_loads(True),
    'bulk_stores': bulk_stores(False),
    'bulk_stores_swizzled': bulk_stores(True),
    'pieces_float': pieces(lambda x: x),
    'pieces_bf16': pieces(bf16),
    'written_operands_mma': written_operands,
    'registers': lambda x: [x[:128] + 1, 2 * x[128:]],
    'clusters': clusters,
    'cluster_stores': cluster_stores(lambda x: x),
    'cluster_stores_bf16': cluster_stores(bf16),
    'multicast': multicast,
    **{f'fp8_codes_{form}': lambda x, form=form: [fp8_codes(form)(x)] for form in FP8},
    **{f'{kind}matrix{trans}_{count}': ldmatrix(bool(trans))
       for kind, counts in (('ld', (1, 2, 4)), ('st', (2, 4))) for trans in ('', '_trans') for count in counts},
}


def formula(name):
    kind, _, rest = name.partition('_')
    if kind != 'wgmma':
        return FORMULAS[name]
    form, _, n = rest.rpartition('_')
    return wgmma(form, int(n))


# ---- running the cases ----
class Library:
    def __init__(self, path):
        self.loaded = ctypes.CDLL(str(path))
        self.loaded.conformance_case.restype = self.loaded.conformance_run.restype = ctypes.c_char_p
        self.cases = {}                         # name: (number, how many numbers go in, how many come out)
        device = self.loaded.conformance_capability()
        self.emulated = bool(self.loaded.conformance_emulated())
        for i in range(self.loaded.conformance_count()):
            sizes = [ctypes.c_int() for _ in range(3)]
            name = self.loaded.conformance_case(i, *map(ctypes.byref, sizes)).decode()
            taken, given, capability = (size.value for size in sizes)
            if capability < 90 or device == 90:
                self.cases[name] = i, taken, given

    def run(self, name, x):
        i, inputs, outputs = self.cases[name]
        assert x.shape == (inputs,) and x.dtype == np.float32
        y = np.full(outputs, np.nan, np.float32)
        pointer = ctypes.POINTER(ctypes.c_float)
        error = self.loaded.conformance_run(i, x.ctypes.data_as(pointer), y.ctypes.data_as(pointer))
        if error:
            raise RuntimeError(f'{name}: {error.decode()}')
        return y


def inputs(name, count, kind, seed=0):
    """Random numbers, or integers so small that every product and sum of them is exact in any order."""
    random = np.random.default_rng([seed, *name.encode()])
    x = (random.integers(-4, 5, count) if kind == 'integers' else random.standard_normal(count)).astype(np.float32)
    if name == 'tf32_bits' and kind != 'integers':              # all exponents, ties, zeros, infinities and NaN
        x = random.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
        special = [0, 0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0x3f801000, 0x3f803000, 1]
        x[:8] = np.array(special, np.uint32).view(np.float32)
    if name.startswith('fp8_codes') and kind != 'integers':     # ties, numbers of all exponents, zeros, infinities and NaN
        numbers = FP8[name.rpartition('_')[2]]
        ties = (numbers[1:] + numbers[:-1]) / 2
        x *= np.exp2(random.integers(-20, 18, count)).astype(np.float32)
        x[:len(ties)] = ties * random.choice([-1, 1], len(ties))
        x[-8:] = [0, -0.0, np.inf, -np.inf, np.nan, 448, -57344, 1e-30]
    return x


def expected(name, x):
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in formula(name)(x)])


def difference(found, wanted):
    """The largest, 0 where both are the same infinity or NaN."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    with np.errstate(invalid='ignore'):
        gaps = np.where(same, 0.0, np.abs(found - wanted))
    return np.inf if np.isnan(gaps).any() else gaps.max()


# sums of up to 64 products of normal numbers, added in any order
TOLERANCE = 2e-4
# A device aligns the 32 products of FP8 and the sum so far to the largest, and cuts them: about 13 bits remain below its first
# (DeepSeek-V3, arXiv:2412.19437, section 3.5.2).  For 8 sums of 33 numbers up to 64; a wrong layout gives differences of 20.
CUT = 8 * 33 * 64 * 2.0**-13


def allowed(name, kind, emulated):
    if not emulated and kind != 'integers' and re.match('wgmma_e[45]m', name):
        return CUT
    if name == 'exp2':                          # relative errors of 2^-22 of results up to 2^5
        return 2.0**-17
    return TOLERANCE if kind != 'integers' and ('mma' in name or name in ('flags', 'clusters', 'cluster_stores')) else 0.0


def main(paths):
    first, *others = map(Library, paths)
    bad = 0
    print(f'{"case":26} {"numbers":10} {"formula":>10} {"other":>10}')
    for name, (_, count, _) in first.cases.items():
        for kind in ('integers', 'normal'):
            x = inputs(name, count, kind)
            try:
                y = first.run(name, x)
                gaps = [difference(y, expected(name, x)), *(difference(y, other.run(name, x)) for other in others)]
            except RuntimeError as error:
                gaps = [np.inf]
                print(error)
            ok = all(gap <= allowed(name, kind, first.emulated) for gap in gaps)
            bad += not ok
            print(f'{name:26} {kind:10} ' + ' '.join(f'{gap:10.3g}' for gap in gaps) + ('' if ok else '  BAD'))
    print(f'{bad} bad' if bad else 'all as they should be')
    return bad != 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
