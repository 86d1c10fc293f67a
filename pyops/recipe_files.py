"""A recipe as a file for another library: the debug features of TransformerEngine, or Float8LinearConfig of torchao.

    transformer_engine({'output': {'fwd.x': Format, ...}, ...}) -> Translated: the text of a YAML file, and what it lacks
    torchao({...}) -> Translated: the text of a Python module

Only formats with the same rounding there are translated; docs/quantization.md lists them.
"""
from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from pyops.formats import parse
from pyops.ops.linear import OPERANDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pyops.formats import Format

    Layers = Mapping[str, Mapping[str, Format]]         # layer -> operand -> Format, of all linear layers

PRODUCTS = {product: tuple(operands) for product, operands in itertools.groupby(OPERANDS, lambda name: name.partition('.')[0])}
ELEMENTS = {'e4m3': 'E4M3', 'e5m2': 'E5M2'}


def nvfp4_training(has_hadamard: bool = True, is_stochastic: bool = True, is_square: bool = True) -> dict[str, Format]:
    """Return {operand: Format} of NVIDIA's recipe for training in NVFP4 (arXiv:2509.25149).

    has_hadamard: random Hadamard transforms in wgrad;  is_stochastic: stochastic rounding of gradients;  is_square: weights in
    blocks of 16 x 16
    """
    found = {}
    for operand in OPERANDS:
        product, _, tensor = operand.partition('.')
        found[operand] = parse('nvfp4', hadamard=16 if has_hadamard and product == 'wgrad' else 0,
                               round='stochastic' if is_stochastic and tensor == 'g' else 'rne',
                               block='16x16' if is_square and tensor == 'w' else 16)
    return found


def _is(fmt: Format | None, wanted: Format) -> bool:
    """Return whether a format is the wanted one.  The libraries draw the signs of a Hadamard transform themselves."""
    return fmt is not None and (parse(fmt, signs=0) if fmt.hadamard else fmt) == wanted


class Translated(NamedTuple):
    """text: of the file;  lost: 'layer operand=format' of each operand that has no equivalent, and stays unrounded"""
    text: str
    lost: list[str]


def _grouped(settings: Mapping[str, Any]) -> list[tuple[Any, list[str]]]:
    """Return (setting, layers) for all layers that have the same setting."""
    groups: dict[str, tuple[Any, list[str]]] = {}
    for layer, setting in settings.items():
        groups.setdefault(repr(setting), (setting, []))[1].append(layer)
    return list(groups.values())


def _lost(layers: Layers, kept: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the text of the operands that are not kept.   kept: layer -> operands"""
    return [f'{layer} {operand}={fmt}' for layer, fmts in layers.items() for operand, fmt in fmts.items()
            if operand not in kept[layer]]


def _comments(title: Iterable[str], lost: list[str]) -> list[str]:
    lines = [*title, *(['no equivalent, so not rounded:', *(f'  {text}' for text in lost)] if lost else [])]
    return [f'# {line}' for line in lines]


# ---- TransformerEngine -------------------------------------------------------------------------------------------------

_GEMMS = {'fwd': 'fprop', 'dgrad': 'dgrad', 'wgrad': 'wgrad'}
_TENSORS = {'x': 'activation', 'w': 'weight', 'g': 'gradient'}


class _Native(NamedTuple):
    """A recipe of TransformerEngine, with which it multiplies operands of 8 or 4 bits.

    formats: of the operands;  text: the call of its class"""
    formats: Mapping[str, Format]
    text: str

    def has(self, operand: str, fmt: Format | None) -> bool:
        return _is(fmt, self.formats[operand])


def _native_of(base: Format, hybrid: bool) -> _Native:
    """Return the recipe with this format of all operands; hybrid: gradients are E5M2, all other operands E4M3."""
    formats = {operand: parse(base, elem='e5m2' if hybrid and operand.endswith('.g') else 'e4m3') for operand in OPERANDS}
    fp8_format = f'fp8_format=Format.{"HYBRID" if hybrid else "E4M3"}'
    if base.name == 'mxfp8':
        return _Native(formats, f'MXFP8BlockScaling({fp8_format})')
    return _Native(formats, f'DelayedScaling(margin={base.option("margin")}, {fp8_format}, amax_history_len={base.delayed}, '
                   "amax_compute_algo='max')")


def _nvfp4_natives() -> list[_Native]:
    """Return the recipes of TransformerEngine for NVFP4, the default one first."""
    return [_Native(nvfp4_training(*have), 'NVFP4BlockScaling(' + ', '.join(
        f'disable_{name}={not has}' for name, has in zip(('rht', 'stochastic_rounding', '2d_quantization'), have, strict=True))
        + ')') for have in itertools.product((True, False), repeat=3)]


def transformer_engine_has(fmt: Format) -> bool:
    """Return whether a file for TransformerEngine can express this format of an operand."""
    return (_fake_quant(fmt) is not None or _native_base(fmt) is not None
            or any(native.has(operand, fmt) for native in _nvfp4_natives() for operand in OPERANDS))


def _fake_quant(fmt: Format | None) -> str | None:
    """Return the quant_format of the feature FakeQuant, None if it has none for this format."""
    found = {parse('fp8', elem=elem, block='tensor'): f'FP8{name}' for elem, name in ELEMENTS.items()}
    return found.get(fmt) if fmt else None


def _native_base(fmt: Format) -> Format | None:
    """Return the `base` of the _Native with this format of an operand, None if there is none."""
    base = parse(fmt, elem='e4m3') if 'elem' in fmt.options else fmt
    is_delayed = fmt.delayed and base == parse('fp8', delayed=fmt.delayed, margin=fmt.option('margin'))
    return base if is_delayed or base == parse('mxfp8', scale='rceil') else None


def _native_products(layers: Layers, native: _Native | None) -> set[tuple[str, str]]:
    """Return the (layer, product) whose operands both have the formats of a recipe."""
    return {(layer, product) for layer, fmts in layers.items() for product, operands in PRODUCTS.items()
            if native and all(native.has(operand, fmts.get(operand)) for operand in operands)}


def transformer_engine(layers: Layers, title: Iterable[str] = ()) -> Translated:
    """Return a YAML file for nvdlfw_inspect with the features of each linear layer.   title: lines for its comment

    A product whose operands both have the formats of a recipe of TransformerEngine is left to that recipe, which the comment
    names: one for the whole model, with which most products agree.  Operands in fp8:block=tensor are FakeQuant.  All other
    products are in high precision.
    """
    bases = {base for fmts in layers.values() for fmt in fmts.values() if (base := _native_base(fmt))}
    natives = [_native_of(base, hybrid) for base in sorted(bases, key=str) for hybrid in (True, False)] + _nvfp4_natives()
    native = max(natives, key=lambda one: len(_native_products(layers, one)), default=None)
    left = _native_products(layers, native)
    settings, kept = {}, {}
    for layer, fmts in layers.items():
        fake = {product: {operand: name for operand in operands if (name := _fake_quant(fmts.get(operand)))}
                for product, operands in PRODUCTS.items() if (layer, product) not in left}
        kept[layer] = {operand for product, operands in PRODUCTS.items()
                       for operand in (operands if (layer, product) in left else fake[product])}
        settings[layer] = {product: fake[product] for product in fake}
    lost = _lost(layers, kept)
    use = [f'recipe for autocast: transformer_engine.common.recipe.{native.text}' if native and left else
           'without autocast: no product runs in 8 or 4 bits, they only have rounded operands',
           'in the training program, with layers of these names: nvdlfw_inspect.api.initialize(config_file=this file, '
           'feature_dirs=...)']
    lines = _comments([*title, *use], lost)
    for number, (setting, names) in enumerate(_grouped(settings)):
        if setting:
            lines += ['', *_section(number, names, setting)]
    return Translated('\n'.join(lines) + '\n', lost)


def _section(number: int, names: list[str], setting: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield the lines of a section.   setting: product without a recipe -> operand -> quant_format"""
    off = [_GEMMS[product] for product, fake in setting.items() if not fake]
    yield f'layers_{number}:'
    yield '  enabled: True'
    yield '  layers:'
    yield f'    layer_name_regex_pattern: {json.dumps("^(?:" + "|".join(map(re.escape, names)) + ")$")}'
    yield '  transformer_engine:'
    if len(off) == len(PRODUCTS):
        yield from ('    DisableFP8Layer:', '      enabled: True')
        return
    if off:
        yield from ('    DisableFP8GEMM:', '      enabled: True', f'      gemms: [{", ".join(off)}]')
    if len(off) == len(setting):
        return
    yield from ('    FakeQuant:', '      enabled: True', '      gemms_struct:')
    for product, fake in setting.items():
        if fake:
            yield from (f'      - gemm: {_GEMMS[product]}', '        tensors_struct:')
        for operand, name in fake.items():
            yield from (f'        - tensor: {_TENSORS[operand[-1]]}', f'          quant_format: {name}')


# ---- torchao -----------------------------------------------------------------------------------------------------------

_CASTS = {'fwd.x': 'input', 'wgrad.x': 'input_for_grad_weight', 'fwd.w': 'weight', 'dgrad.w': 'weight_for_grad_input',
          'dgrad.g': 'grad_output', 'wgrad.g': 'grad_output_for_grad_weight'}
_PAIRS = (('fwd.x', 'wgrad.x'), ('fwd.w', 'dgrad.w'), ('dgrad.g', 'wgrad.g'))       # one tensor in two products
_PROGRAM = '''\
import torch
from torchao.float8 import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training
from torchao.float8.config import ScalingGranularity


def cast(granularity=None, dtype=None):
    if granularity is None:
        return CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=dtype)
    return CastConfig(scaling_granularity=granularity, target_dtype=dtype)


TENSOR, AXIS = ScalingGranularity.TENSORWISE, ScalingGranularity.AXISWISE
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONFIGS = [         # (config, names of linear layers)
{configs}
]

NVFP4 = [           # names of linear layers, for a GPU with NVFP4: bfloat16, all sizes multiples of 128
{nvfp4}]


def convert(model):
    """Replace the linear layers of a PyTorch model that have these names, in place, and return the model."""
    for config, names in CONFIGS:
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name, names=names: name in names)
    if NVFP4:
        from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig
        from torchao.quantization import quantize_
        quantize_(model, NVFP4TrainingConfig(), filter_fn=lambda module, name: name in NVFP4)
    return model
'''


def torchao_has(fmt: Format) -> bool:
    """Return whether a file for torchao can express this format of an operand."""
    return _cast(fmt) is not None or any(_is(fmt, wanted) for wanted in nvfp4_training().values())


def _cast(fmt: Format | None) -> tuple[str, str] | None:
    """Return the arguments of cast() in _PROGRAM for a format, None if there are none."""
    found = {parse('fp8', elem=elem, block=block): (name, upper) for elem, upper in ELEMENTS.items()
             for block, name in (('tensor', 'TENSOR'), ('axis', 'AXIS'))}
    return found.get(fmt) if fmt else None


def torchao(layers: Layers, title: Iterable[str] = ()) -> Translated:
    """Return a Python module with a Float8LinearConfig for each linear layer, and convert(model).
    title: lines for its comment

    A layer with all formats of nvfp4_training() has NVFP4TrainingConfig.  In others both operands of a product are rounded or
    none; a tensor has the same element in both of its products; otherwise products stay unrounded.
    """
    settings, kept, nvfp4 = {}, {}, []
    for layer, fmts in layers.items():
        if all(_is(fmts.get(operand), wanted) for operand, wanted in nvfp4_training().items()):
            kept[layer] = set(OPERANDS)
            nvfp4.append(layer)
            continue
        casts = {operand: cast for operand in OPERANDS if (cast := _cast(fmts.get(operand)))}
        for operands in PRODUCTS.values():
            if not all(operand in casts for operand in operands):
                casts = {operand: cast for operand, cast in casts.items() if operand not in operands}
        for one, other in _PAIRS:               # the product in the second place stays unrounded
            if one in casts and other in casts and casts[one][1] != casts[other][1]:
                casts = {operand: cast for operand, cast in casts.items() if operand not in PRODUCTS[other.partition('.')[0]]}
        kept[layer] = set(casts)
        if casts:
            elements = {operand: casts[name][1] for pair in _PAIRS for operand in pair for name in pair if name in casts}
            settings[layer] = {operand: casts.get(operand) or (None, elements.get(operand)) for operand in _CASTS}
    lost = _lost(layers, kept)
    configs = []
    for setting, names in _grouped(settings):
        arguments = [f'cast_config_{_CASTS[operand]}=cast({", ".join(map(str, cast))})' for operand, cast in setting.items()]
        listed = ',\n'.join(f'        {name!r}' for name in names)
        configs += ['    (Float8LinearConfig(\n        ' + ',\n        '.join(arguments) + f'), [\n{listed}]),']
    listed = ''.join(f'    {name!r},\n' for name in nvfp4)
    program = _PROGRAM.replace('{configs}', '\n'.join(configs)).replace('{nvfp4}', listed)
    text = '\n'.join([*_comments(title, lost), program])
    return Translated(text, lost)
