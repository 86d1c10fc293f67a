"""Narrow number formats: rounding of float32 arrays to them, conversion to and from their codes, names and options.

    fake_quantize(x, 'mxfp8')                       round, and convert back to float32
    fake_quantize(x, 'mxfp4', axis=0, scale='even') with blocks along the first axis
    codes = encode(x, 'hifp8:round=hybrid')         options may be part of the name
    decode(codes)

A format is given as a name, a text 'name:option=value:option=value', or a Format.  docs/formats.md describes them all.
"""
from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from pyops import backend
from pyops.backend.kernels import Kernel, declare
from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyops.typing import Array, Numbers, Shape

FORMATS = ('hifp8', 'mxfp8', 'mxfp4', 'bf16', 'fp16')
MORE_FORMATS = ('mxfp6', 'mxint8', 'nvfp4', 'fp8', 'int8', 'int4')
ELEMENTS = ('e4m3', 'e5m2', 'e2m1', 'e3m2', 'e2m3')         # of block formats; on their own: casts without a scale

# in the order of pyops.h
_NUMBERS = ('hifp8', 'e4m3', 'e5m2', 'e2m1', 'bf16', 'fp16', 'e3m2', 'e2m3', 'mxint8', 'int8', 'int4')
_ROUNDINGS = ('rne', 'away', 'floor', 'stochastic', 'hybrid')
_RULES = ('floor', 'rceil', 'ceil', 'even')
_SCALE_FLOAT = 4
_E4M3_RULES = ('six', 'mse', 'mae')              # numbered after _SCALE_FLOAT
_MX = ('mxfp8', 'mxfp4', 'mxfp6', 'mxint8')                 # scales are powers of two
# the largest E4M3 scale times the largest E2M1; with a choice of scales 256, as 1.5 * 256 has to be a scale, too
_NVFP4_LARGEST = {'six': 448.0 * 6.0, 'mse': 256.0 * 6.0, 'mae': 256.0 * 6.0}
HADAMARD_BLOCKS = (16, 32)
DELAYED = 16                                    # length of an amax history, unless it is given

# aliases of formats
_ALIASES = {'hif8': 'hifp8', 'hifloat8': 'hifp8', 'bfloat16': 'bf16', 'float16': 'fp16', 'half': 'fp16', 'e4m3fn': 'e4m3',
            'mxfp8_e4m3': 'mxfp8', 'mxfp4_e2m1': 'mxfp4'}


class FormatError(UserError, ValueError):
    """An unknown format, option or option value; the message suggests the nearest names."""


class _Element(NamedTuple):
    """The range and precision of a number format; csrc/number_format.inc has the same table."""
    digits: int             # fraction bits
    bits: int
    max: float
    min_normal: float
    min_subnormal: float


_LIMITS = {
    'hifp8': _Element(3, 8, 2.0 ** 15, 2.0 ** -15, 2.0 ** -22),
    'e4m3': _Element(3, 8, 448.0, 2.0 ** -6, 2.0 ** -9),
    'e5m2': _Element(2, 8, 57344.0, 2.0 ** -14, 2.0 ** -16),
    'e2m1': _Element(1, 4, 6.0, 1.0, 0.5),
    'bf16': _Element(7, 16, 255 * 2.0 ** 120, 2.0 ** -126, 2.0 ** -133),
    'fp16': _Element(10, 16, 65504.0, 2.0 ** -14, 2.0 ** -24),
    'e3m2': _Element(2, 6, 28.0, 2.0 ** -2, 2.0 ** -4),
    'e2m3': _Element(3, 6, 7.5, 1.0, 2.0 ** -3),
    'mxint8': _Element(6, 8, 127 / 64, 1.0, 2.0 ** -6),
    'int8': _Element(6, 8, 127.0, 1.0, 1.0),
    'int4': _Element(2, 4, 7.0, 1.0, 1.0),
}


def _choice(*names: str) -> Callable[[Any], str]:
    def convert(value: Any) -> str:
        if value not in names:
            raise ValueError(_nearest(value, names))
        return value
    return convert


def _flag(value: Any) -> bool:
    if value in (True, False, 0, 1):
        return bool(value)
    if str(value).lower() not in ('true', 'false', '1', '0'):
        raise ValueError('expected true or false')
    return str(value).lower() in ('true', '1')


def _whole(least: int, most: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        try:
            number = int(value)
        except (ValueError, TypeError):
            number = None
        if number is None or isinstance(value, float) and value != number or not least <= number <= most:
            raise ValueError(f'expected a whole number from {least} to {most}')
        return number
    return convert


def _blocks(*names: str) -> Callable[[Any], int | str]:
    """Return a converter of block sizes: a number, 'RxC' for two dimensions, or one of the names."""
    def convert(value: Any) -> int | str:
        text = str(value).strip().lower()
        if text in names:
            return text
        parts = text.split('x')
        sizes = [int(part) for part in parts if part.isascii() and part.isdigit() and len(part) < 6]
        if len(sizes) != len(parts) or len(sizes) > 2 or not all(1 <= size <= 4096 for size in sizes):
            raise ValueError('expected a whole number from 1 to 4096, two of them such as 32x32'
                             + (f', or {", ".join(names)}' if names else ''))
        return sizes[-1] if len(sizes) == 1 or sizes[0] == 1 else f'{sizes[0]}x{sizes[1]}'
    return convert


def _hadamard_block(value: Any) -> int:
    if str(value) not in ('0', *map(str, HADAMARD_BLOCKS)):
        raise ValueError(f'expected {" or ".join(map(str, HADAMARD_BLOCKS))}, or 0 for no transform')
    return int(value)


def _sum_bits(value: Any) -> int:
    return 0 if str(value) == '0' else _whole(2, 24)(value)


def _target(value: Any) -> float:
    try:
        number = float(value)
    except (ValueError, TypeError):
        number = math.nan
    if not 0 < np.float32(number) < math.inf:
        raise ValueError('expected a number above 0')
    return number


def _history_length(value: Any) -> int:
    return DELAYED if value is True or value == 'true' else _whole(0, 4096)(value)


# options of a format: name -> (default, function that converts a value or text)
_Options: TypeAlias = 'dict[str, tuple[Any, Callable[[Any], Any]]]'
_ON_NUMBERS: _Options = {'round': ('rne', _choice(*_ROUNDINGS[:-1])), 'overflow': ('inf', _choice('inf', 'saturate'))}
_ON_BLOCKS: _Options = {
    'elem': ('e4m3', _choice('e4m3', 'e5m2')), 'scale': ('floor', _choice(*_RULES)),
    'round': ('rne', _choice(*_ROUNDINGS[:-1])), 'block': (32, _blocks()), 'shift': (0, _whole(-256, 256)),
    'flush_subnormal_blocks': (False, _flag),
}
_ON_SCALED: _Options = {'round': _ON_BLOCKS['round'], 'block': ('axis', _blocks('axis', 'row', 'column', 'tensor')),
                        'delayed': (0, _history_length), 'margin': (0, _whole(-64, 64)), 'factor': (None, _target)}
_OPTIONS: dict[str, _Options] = {
    'hifp8': _ON_NUMBERS | {'round': ('away', _choice(*_ROUNDINGS)), 'overflow': ('saturate', _ON_NUMBERS['overflow'][1]),
                            'amax_target': (None, _target)},
    'mxfp8': _ON_BLOCKS,
    'mxfp4': _ON_BLOCKS | {'elem': ('e2m1', _choice('e2m1'))},
    'mxfp6': _ON_BLOCKS | {'elem': ('e3m2', _choice('e3m2', 'e2m3'))},
    'mxint8': {name: option for name, option in _ON_BLOCKS.items() if name != 'elem'},
    'nvfp4': {'scale': ('six', _choice(*_E4M3_RULES)), 'round': _ON_BLOCKS['round'], 'block': (16, _blocks())},
    'fp8': {'elem': _ON_BLOCKS['elem']} | _ON_SCALED | {'block': (128, _ON_SCALED['block'][1])},
    'int8': _ON_SCALED,
    'int4': _ON_SCALED,
    'bf16': _ON_NUMBERS,
    'fp16': _ON_NUMBERS,
} | {name: _ON_NUMBERS | {'overflow': ('saturate', _ON_NUMBERS['overflow'][1])} for name in ELEMENTS}
_ON_PRODUCTS: _Options = {'hadamard': (0, _hadamard_block), 'signs': (0, _whole(0, 2**31 - 1)),
                          'accumulate': (0, _sum_bits), 'promote': (0, _whole(0, 2**31 - 1))}
_OPTIONS = {name: options | _ON_PRODUCTS for name, options in _OPTIONS.items()}


def _nearest(name: object, names: Sequence[str]) -> str:
    """Return the end of an error message for a name that is not in `names`."""
    import difflib  # not at the top: needed only for an error
    close = difflib.get_close_matches(str(name).lower(), names, 3, 0.5)
    return (f'did you mean {" or ".join(close)}? ' if close else '') + f'expected one of: {", ".join(names)}'


@dataclass(frozen=True)
class Format:
    """A number format with its options, created by parse().  str() returns a text that parse() accepts."""
    name: str
    options: MappingProxyType = field(default_factory=lambda: MappingProxyType({}))     # options that differ from their default

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[Any, ...]:           # a MappingProxyType cannot be pickled
        return parse, (str(self),)

    def __str__(self) -> str:
        return ':'.join([self.name, *(f'{key}={_text(value)}' for key, value in self.options.items())])

    def option(self, name: str) -> Any:
        """Return the value of an option, or its default."""
        return self.options.get(name, _OPTIONS[self.name].get(name, (None,))[0])

    @property
    def element(self) -> str:
        """The format of a single element: 'e4m3' for mxfp8."""
        return self.option('elem') or ('e2m1' if self.name == 'nvfp4' else self.name)

    @property
    def is_block(self) -> bool:
        """Whether blocks along one axis have a power of two as scale."""
        return self.name in _MX and isinstance(self.option('block'), int)

    @property
    def is_scaled(self) -> bool:
        """Whether blocks in one or two dimensions have a float as scale, which may be rounded to E4M3 or a power of two."""
        return not self.is_block and not self.has_factor and (
            self.name in _MX or self.name in ('nvfp4', 'fp8', 'int8', 'int4'))

    @property
    def delayed(self) -> int:
        """Number of past steps whose amax values determine the scale of the whole tensor; 0: the tensor itself does."""
        return int(self.option('delayed') or 0)

    @property
    def target(self) -> float | None:
        """The number to which a factor scales the amax of the tensor, or of past steps, before rounding; None without one."""
        return self.max * 2.0 ** -self.option('margin') if self.delayed else self.option('amax_target')

    @property
    def has_factor(self) -> bool:
        """Whether the tensor is multiplied by one factor before rounding, and divided by it afterwards."""
        return bool(self.delayed or self.option('amax_target') or self.option('factor'))

    @property
    def depends_on_axis(self) -> bool:
        """Whether the result depends on the axis."""
        return self.is_block or self.hadamard > 0 or (
            self.is_scaled and (isinstance(self.option('block'), int) or self.option('block') == 'axis'))

    @property
    def hadamard(self) -> int:
        """Number of elements along the axis that are transformed together before rounding; 0: no transform."""
        return int(self.option('hadamard'))

    @property
    def sums(self) -> dict[str, int]:
        """How products with this format are summed, as arguments of backend.gemm_narrow; {}: in float32."""
        bits = self.option('accumulate')
        return {'bits': bits, 'promote': self.option('promote')} if bits else {}

    @property
    def without_hadamard(self) -> Format:
        """The format to which the transformed numbers are rounded."""
        return parse(self, hadamard=0, signs=0)

    @property
    def block(self) -> int:
        """Number of elements along the axis that share a power of two as scale; 0 for other formats."""
        return self.option('block') if self.is_block else 0

    @property
    def is_stochastic(self) -> bool:
        return self.option('round') == 'stochastic'

    bits = property(lambda self: _LIMITS[self.element].bits, doc='bits per element, without the scale')
    max = property(lambda self: _LIMITS[self.element].max, doc='largest finite number, before scaling')
    min_normal = property(lambda self: _LIMITS[self.element].min_normal, doc='smallest normal number')
    min_subnormal = property(lambda self: _LIMITS[self.element].min_subnormal, doc='smallest subnormal number')

    def scalars(self) -> tuple[int, int, int, bool, int, int, bool]:
        """Return block, format, rounding, saturate, rule, shift, flush: the arguments of pyops_fake_quantize."""
        return (self.block, _NUMBERS.index(self.element), _ROUNDINGS.index(self.option('round')),
                self.option('overflow') != 'inf', _RULES.index(self.option('scale') or 'floor'),
                self.option('shift') or 0, bool(self.option('flush_subnormal_blocks')))


    def scaled_scalars(self) -> tuple[int, int, int, int, bool]:
        """Return format, rounding, rule, shift, flush: the arguments of pyops_scaled_quantize."""
        rule = (_SCALE_FLOAT + 1 + _E4M3_RULES.index(self.option('scale')) if self.name == 'nvfp4' else
                _RULES.index(self.option('scale')) if self.name in _MX else _SCALE_FLOAT)
        return (_NUMBERS.index(self.element), _ROUNDINGS.index(self.option('round')), rule, self.option('shift') or 0,
                bool(self.option('flush_subnormal_blocks')))

    def grid(self, shape: Shape, axis: int) -> tuple[int, int, int, int, int]:
        """Return outer, rows, columns, block_rows, block_columns of pyops_scaled_quantize for an array of this shape."""
        outer, n, inner = _layout(shape, axis % max(len(shape), 1))
        rows, columns, block = math.prod(shape[:-1]), shape[-1] if shape else 1, self.option('block')
        if block == 'tensor':
            return 1, 1, outer * n * inner, 1, max(outer * n * inner, 1)
        if block == 'row':
            return 1, rows, columns, 1, max(columns, 1)
        if block == 'column':
            return 1, rows, columns, max(rows, 1), 1
        if block == 'axis' or isinstance(block, int):
            length = max(n, 1) if block == 'axis' else block
            return (1, outer, n, 1, length) if inner == 1 else (outer, n, inner, length, 1)
        down, across = map(int, block.split('x'))
        return 1, rows, columns, down, across


SCALARS = 'block', 'format', 'rounding', 'saturate', 'rule', 'shift', 'flush'       # names of Format.scalars() in pyops.h


def of_scalars(block: int, number: int, rounding: int, saturate: bool, rule: int, shift: int, flush: bool,
               target: float | None = None) -> Format:
    """Return the Format with these `scalars`.  target: the amax_target option."""
    element, round = _NUMBERS[number], _ROUNDINGS[rounding]
    if target and element != 'hifp8':
        return of_delayed(number, rounding, target, 1)
    if block:
        return _mx(element, scale=_RULES[rule], round=round, block=block, shift=shift, flush_subnormal_blocks=flush)
    scaled = {} if target is None else {'amax_target': target}
    return parse(element, round=round, overflow='saturate' if saturate else 'inf', **scaled)


def of_delayed(number: int, rounding: int, target: float, length: int) -> Format:
    """Return the Format with delayed scaling of `pyops_delayed_factor` with this target and this length of the history."""
    margin = round(math.log2(_LIMITS[_NUMBERS[number]].max / target))
    return of_tensor(number, rounding, delayed=length, margin=margin)


def of_factor(fmt: str | Format, amax: float) -> Format:
    """Return the format with delayed scaling in a step whose history has this maximum, as a format with a fixed factor; fmt
    itself if it is 0: then the amax of each tensor determines its factor."""
    f = parse(fmt)
    if not amax:
        return f
    with np.errstate(over='ignore'):
        factor = np.float32(f.target) / np.float32(amax)
    return parse(f, delayed=0, margin=0, factor=factor if 0 < factor < math.inf else 1.0)


def of_tensor(number: int, rounding: int, **options: Any) -> Format:
    """Return the format with one scale for the whole tensor that has this element."""
    element = _NUMBERS[number]
    name, elem = (element, {}) if element in ('int8', 'int4') else ('fp8', {'elem': element})
    return parse(name, round=_ROUNDINGS[rounding], block='tensor', **elem, **options)


def of_grid(grid: tuple[int, int, int, int, int], shape: Shape, number: int, rounding: int, rule: int, shift: int,
            flush: bool) -> tuple[Format, int | str]:
    """Return a Format and an axis that round an array of this shape as pyops_scaled_quantize does with these arguments."""
    outer, rows, columns, down, across = grid
    axis: int | str = -1
    block: int | str = f'{down}x{across}'
    has_names = rule == _SCALE_FLOAT                        # other formats accept neither block=tensor nor block=axis
    if has_names and outer == rows == 1 and across == columns == math.prod(shape):
        block = 'tensor'
    elif across == 1 and outer * rows > 1:
        fits = [i for i in range(len(shape)) if shape[i] == rows and math.prod(shape[i + 1:]) == columns]
        block, axis = 'axis' if has_names and down == rows else down, fits[0] if fits else 'tokens'
    elif down == 1:
        block = 'axis' if has_names and across == columns else across
    element, round = _NUMBERS[number], _ROUNDINGS[rounding]
    if rule > _SCALE_FLOAT:
        return parse('nvfp4', scale=_E4M3_RULES[rule - _SCALE_FLOAT - 1], round=round, block=block), axis
    if rule == _SCALE_FLOAT:
        name, options = (element, {}) if element in ('int8', 'int4') else ('fp8', {'elem': element})
        return parse(name, round=round, block=block, **options), axis
    return _mx(element, scale=_RULES[rule], round=round, block=block, shift=shift, flush_subnormal_blocks=flush), axis


def _mx(element: str, **options: Any) -> Format:
    """Return the format with powers of two as scales that has this element."""
    name = {'e2m1': 'mxfp4', 'e3m2': 'mxfp6', 'e2m3': 'mxfp6', 'mxint8': 'mxint8'}.get(element, 'mxfp8')
    return parse(name, **options, **({} if name == 'mxint8' else {'elem': element}))


def _text(value: Any) -> str:
    if isinstance(value, float):
        short = f'{value:g}'
        return short if np.float32(short) == np.float32(value) else str(np.float32(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.lru_cache(512)
def _parse(text: str) -> tuple[str, dict[str, Any]]:
    name, *settings = text.split(':')
    options = {}
    for setting in settings:
        key, equals, value = setting.partition('=')
        options[key.strip()] = value.strip() if equals else 'true'
    return name, options


def parse(fmt: str | Format, **options: Any) -> Format:
    """Return the Format for a name, a text such as 'mxfp8:scale=rceil:block=16', or a Format, with further options.

    FormatError for an unknown format, option or value; TypeError if fmt is something else.
    """
    if isinstance(fmt, Format):
        name, given = fmt.name, dict(fmt.options)
    elif isinstance(fmt, str):
        name, given = _parse(fmt.strip())
    else:
        raise TypeError(f'fmt: expected the name of a number format, got {type(fmt).__name__}')
    name = _ALIASES.get(name.strip().lower(), name.strip().lower())
    if name not in _OPTIONS:
        raise FormatError(f'{name or "(nothing)"}: no such number format; {_nearest(name, FORMATS + MORE_FORMATS + ELEMENTS)}')
    known, wanted, named = _OPTIONS[name], {}, given | options
    for key, value in named.items():
        if key == 'saturate' and 'overflow' in known:           # an alias of overflow
            key, value = 'overflow', 'saturate' if _convert(name, key, _flag, value) else 'inf'
        if key not in known:
            raise FormatError(f'{key}: {name} has no such option; {_nearest(key, tuple(known))}')
        default, convert = known[key]
        value = default if value is None else _convert(name, key, convert, value)
        if value != default:
            wanted[key] = value
    if 'signs' in wanted and 'hadamard' not in wanted:
        raise FormatError(f'{name}: signs={wanted["signs"]}: expected hadamard=16 or hadamard=32 with it, the transform that '
                          'uses the signs; add one or leave signs out')
    if 'promote' in wanted and 'accumulate' not in wanted:
        raise FormatError(f'{name}: promote={wanted["promote"]}: expected accumulate with it, the bits of the sums that are '
                          'promoted; add accumulate=14 or leave promote out')
    if 'margin' in wanted and 'delayed' not in wanted:
        raise FormatError(f'{name}: margin={wanted["margin"]}: expected delayed with it, the scaling that uses the margin; add '
                          'delayed or leave margin out')
    if 'delayed' in wanted or 'factor' in wanted:               # one scale for the whole tensor
        if 'delayed' in wanted and 'factor' in wanted:
            raise FormatError(f'{name}: delayed={wanted["delayed"]} and factor={_text(wanted["factor"])}: expected one of them')
        block = wanted.get('block', known['block'][0])
        if 'block' in named and block != 'tensor':
            raise FormatError(f'{name}: block={block}: expected block=tensor, as the whole tensor has one scale with '
                              f'{"delayed" if "delayed" in wanted else "factor"}; leave block out')
        wanted['block'] = 'tensor'
    return Format(name, MappingProxyType({key: wanted[key] for key in known if key in wanted}))


def _convert(name: str, key: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except ValueError as error:
        raise FormatError(f'{name}: {key}={_text(value)}: {error}') from None


class Codes(NamedTuple):
    """Numbers encoded in a format, with its option `hadamard` transformed numbers.

    codes (shape of x): uint8, or uint16 for formats of 16 bits.  scales: uint8, the codes of the blocks' scales, in the shape
    of x with one element per block along `axis`; None without blocks.  If Format.is_scaled, they are float32 numbers, (outer,
    blocks down, blocks across) of Format.grid.  factor: float32 (1,), by which x was multiplied, or the scales of nvfp4; or
    None.
    """
    codes: Array
    scales: Array | None
    format: Format
    axis: int
    factor: Array | None = None


def fake_quantize(x: Numbers | Array, fmt: str | Format, axis: int = -1, *, name: str = 'fake_quantized',
                  kind: str = 'intermediate', step: Array | None = None, seed: int = 0,
                  history: tuple[Array, Array] | None = None, **options: Any) -> Array:
    """Round x to a number format.  Return a float32 array of x's shape, on x's device.

    x: float32, or anything numpy can convert to float32 (float64 is rounded twice).
    axis: direction of the blocks, the contraction axis of the product that reads x; ignored by formats without blocks.
    step (1,) int64 and seed: key of the random numbers for round=stochastic; default step: 0.
    name, kind: name and kind of the new array in a plan (backend.empty).
    history: for delayed scaling, the amax of past steps (delayed,) and of this step so far (1,), on x's device; the second is
    updated.  None: the amax of x determines its scale.
    FormatError for an unknown format or option; ValueError for an axis outside x.
    """
    f = parse(fmt, **options)
    kernel_array: Any = backend.as_kernel_array(x)
    if kernel_array is not x:                       # an NDArray in host memory
        from pyops.ndarray import array
        rounded: Any = fake_quantize(kernel_array, f, axis, step=step, seed=seed)
        return array(rounded, device=x.device)          # type: ignore[union-attr, arg-type]
    values, layout, axis = _prepared(x, axis)
    y = _empty(values, values.shape, np.float32, name, kind)
    if f.hadamard:                                  # the transform, the rounding and the inverse transform are in place
        _transform(y, values, layout, f)
        values = y
    factor = _factor(values, f, history)
    if f.is_scaled:
        _launch_scaled(y, None, values, factor, f, axis, step, seed)
    else:
        backend.launch('fake_quantize', y, values, factor, _step(values, f, step), *layout, *f.scalars(), seed)
    if f.hadamard:
        _transform(y, y, layout, f, inverse=True)
    return y


def hadamard(x: Numbers | Array, block: int, axis: int = -1, *, signs: int = 0, inverse: bool = False) -> Array:
    """Multiply blocks along an axis by random signs and by the orthogonal Hadamard matrix.  Return a float32 array.

    x: as for fake_quantize;  block: 1, 2, 4, 8, 16 or 32; the end of the axis after the last whole block is cut into powers of
    two, the largest first;  signs: the seed of the signs, from 0 to 2^64 - 1, which are the same for all blocks
    inverse: undo the transform instead: first the matrix, then the signs.   ValueError for another block or axis.
    """
    values, layout, _ = _prepared(x, axis)
    y = _empty(values, values.shape, np.float32, 'transformed')
    backend.launch('hadamard', y, values, *layout, block, inverse, signs)
    return y


def hadamard_lengths(n: int, block: int) -> list[int]:
    """Return the lengths of the parts of an axis of n elements that `hadamard` transforms, in order."""
    powers = [1 << i for i in reversed(range(block.bit_length() - 1))]
    return [block] * (n // block) + [length for length in powers if n % block & length]


def _transform(y: Array, x: Array, layout: tuple[int, int, int], f: Format, inverse: bool = False) -> None:
    backend.launch('hadamard', y, x, *layout, f.hadamard, inverse, f.option('signs'))


def encode(x: Numbers | Array, fmt: str | Format, axis: int = -1, *, step: Array | None = None, seed: int = 0,
           **options: Any) -> Codes:
    """Return x as Codes of a number format: numpy arrays, or NDArrays on a GPU.  Arguments and errors as for fake_quantize.

    ValueError if x contains an infinity or NaN and the format is E2M1, E3M2 or E2M3 without blocks, which cannot encode them.
    """
    f = parse(fmt, **options)
    values, layout, axis = _prepared(x, axis)
    if f.name in ('e2m1', 'e3m2', 'e2m3') and not np.isfinite(backend.get(values)).all():
        raise ValueError(f'x: {f.name} has no code for infinities and NaN; encode blocks of it: {_mx(f.name).name}')
    shape = values.shape
    if f.hadamard:
        transformed = _empty(values, shape, np.float32, 'transformed')
        _transform(transformed, values, layout, f)
        values = transformed
    codes = _empty(values, shape, np.uint16, 'codes')
    scales: Array | None
    if f.is_scaled:
        factor = _factor(values, f)
        scales = _launch_scaled(None, codes, values, factor, f, axis, step, seed)
        return Codes(codes.astype(np.uint8) if isinstance(codes, np.ndarray) else codes, scales, f, axis, factor)
    blocks = -(-shape[axis] // f.block) if f.is_block and shape else 1
    scales = _empty(values, (*shape[:axis], blocks, *shape[axis + 1:]), np.uint8, 'scales') if f.is_block else None
    factor = _factor(values, f)
    backend.launch('encode', codes, scales, values, factor, _step(values, f, step), *layout, *f.scalars(), seed)
    return Codes(codes.astype(np.uint8) if isinstance(codes, np.ndarray) and f.bits <= 8 else codes, scales, f, axis, factor)


def decode(codes: Codes) -> Array:
    """Return the float32 numbers for Codes: the result of fake_quantize."""
    words = codes.codes.astype(np.uint16) if isinstance(codes.codes, np.ndarray) else codes.codes
    layout = _layout(words.shape, codes.axis)
    y = _empty(words, words.shape, np.float32, 'decoded')
    if codes.format.is_scaled:
        backend.launch('scaled_decode', y, words, codes.scales, codes.factor, *codes.format.grid(words.shape, codes.axis),
                       codes.format.scaled_scalars()[0])
    else:
        backend.launch('decode', y, words, codes.scales, codes.factor, *layout, *codes.format.scalars()[:2])
    if codes.format.hadamard:
        _transform(y, y, layout, codes.format, inverse=True)
    return y


def element_scales(x: Numbers | Array, fmt: str | Format, axis: int = -1) -> np.ndarray:
    """Return the scale of each element, float32 in x's shape, of a format with Format.is_scaled; NaN in a broken block.

    With the option `hadamard` they are the scales of the transformed elements."""
    f = parse(fmt)
    values, layout, axis = _prepared(x, axis)
    y = _empty(values, values.shape, np.float32, 'rounded')
    if f.hadamard:
        _transform(y, values, layout, f)
        values = y
    factor = _factor(values, f)
    scales: Any = np.asarray(backend.get(_launch_scaled(y, None, values, factor, f, axis, None, 0)))
    if factor is not None:
        scales = scales / np.asarray(backend.get(factor))
    shape = np.shape(x)
    _, rows, columns, down, across = f.grid(shape, axis)
    scales = scales.repeat(down, 1)[:, :rows].repeat(across, 2)[:, :, :columns]
    return scales.reshape(shape)


def _launch_scaled(y: Any, codes: Any, x: Array, factor: Array | None, f: Format, axis: int, step: Array | None,
                   seed: int) -> Array:
    """Round x, an array of _prepared, into y or codes.  Return the scales of the blocks."""
    outer, rows, columns, down, across = grid = f.grid(x.shape, axis)
    scales = _empty(x, (outer, -(-rows // down), -(-columns // across)), np.float32, 'scales')
    backend.launch('scaled_quantize', y, codes, scales, x, factor, _step(x, f, step), *grid, *f.scaled_scalars(), seed)
    return scales           # type: ignore[no-any-return]


def _prepared(x: Any, axis: int) -> tuple[Any, tuple[int, int, int], int]:
    """Return x as a compact float32 array, its layout (outer, n, inner), and axis >= 0."""
    try:
        axis = operator.index(axis)
    except TypeError:
        raise TypeError(f'axis: expected an integer, got {axis!r}') from None
    if type(x).__module__.partition('.')[0] == 'torch':             # numpy converts neither bfloat16 nor tensors with gradients
        x = x.detach().cpu().float().numpy()
    x = backend.as_kernel_array(x)
    if not isinstance(x, backend.Array):
        if np.iscomplexobj(x):
            raise TypeError('x: expected real numbers, got complex ones; round x.real and x.imag')
        x = np.ascontiguousarray(x, np.float32).reshape(np.shape(x))       # keeps shape () of a number
    elif x.dtype != np.float32:
        raise TypeError(f'x: expected float32, got {x.dtype}')
    else:
        x = x.compact()         # type: ignore[attr-defined]
    rank = max(x.ndim, 1)
    if not -rank <= axis < rank:
        raise ValueError(f'axis {axis} is out of bounds for an array of {x.ndim} dimensions')
    return x, _layout(x.shape, axis % rank), axis % rank


def _layout(shape: Shape, axis: int) -> tuple[int, int, int]:
    return (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1:])) if shape else (1, 1, 1)


def _empty(x: Array, shape: Shape, dtype: Any, name: str, kind: str = 'intermediate') -> Any:
    """Allocate an array on x's device, in the memory of a plan if one records there."""
    return backend.device_of(x).empty_array(shape, dtype, name, kind)


def _factor(x: Array, f: Format, history: tuple[Array, Array] | None = None) -> Array | None:
    target, fixed = _NVFP4_LARGEST[f.option('scale')] if f.name == 'nvfp4' else f.target, f.option('factor')
    if not target and not fixed:
        return None
    factor = _empty(x, (1,), np.float32, 'factor')
    if fixed:
        backend.launch('fill', factor, 1, fixed)
    elif f.delayed and history is not None:
        past, amax = history
        if np.shape(past) != (f.delayed,) or np.shape(amax) != (1,):
            raise ValueError(f'history: expected shapes ({f.delayed},) and (1,) for {f}, got {np.shape(past)} and '
                             f'{np.shape(amax)}')
        backend.launch('delayed_factor', factor, amax, past, x, x.size, f.delayed, target)
    else:
        backend.launch('amax_factor', factor, x, x.size, target)
    return factor


def _step(x: Array, f: Format, step: Array | None) -> Array | None:
    if not f.is_stochastic:
        return None
    return step if step is not None else backend.device_of(x).zero_array(1, np.int64)


declare(fake_quantize=Kernel(rounds='x'), encode=Kernel(), decode=Kernel(), amax_factor=Kernel(),
        delayed_factor=Kernel(), advance_amax=Kernel(),
        scaled_quantize=Kernel(rounds='x'), scaled_decode=Kernel(), hadamard=Kernel())
