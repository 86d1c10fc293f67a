"""Recipes for quantized training: the number format of each operand of each matrix product.

    recipe = Recipe.parse('fwd=mxfp8,dgrad.g=hifp8,attention=mxfp4:scale=even', layers='encoder.*')
    model = Transformer(Config(..., ops=family(recipe)))

docs/quantization.md describes the products, their operands and axes, and their rounding.
"""
import contextlib
import itertools
import os
import sys
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import NamedTuple

from pyops import FP8, backend, ops
from pyops.errors import UserError
from pyops.ops.attention import OPERANDS as ATTENTION_OPERANDS
from pyops.ops.linear import OPERANDS as LINEAR_OPERANDS

OPERANDS = {'linear': LINEAR_OPERANDS, 'attention': ATTENTION_OPERANDS}


def _products(operands):
    return tuple(dict.fromkeys(operand.partition('.')[0] for operand in operands))


_ALL = OPERANDS['linear'] + OPERANDS['attention']
_PRODUCTS = _products(_ALL)
_OF_ATTENTION = tuple(dict.fromkeys(operand.partition('.')[2] for operand in OPERANDS['attention']))
# selector in a recipe -> its operands
SELECTORS = (
    {'all': _ALL} | OPERANDS
    | {product: tuple(operand for operand in _ALL if operand.startswith(f'{product}.')) for product in _PRODUCTS}
    | {f'attn.{name}': tuple(operand for operand in OPERANDS['attention'] if operand.endswith(f'.{name}'))
       for name in _OF_ATTENTION}
    | {operand: (operand,) for operand in _ALL})

NONE = 'none'                           # instead of a format: do not round the operand
VARIABLE = 'CUSTOM_QUANT_TYPE'
# Of --precision fp8: E4M3, and E5M2 for gradients; scales as in DeepSeek-V3, whose output layer is not rounded either
# (arXiv:2412.19437).
FP8_RECIPE = ('linear=fp8,fwd.w=fp8:block=128x128,dgrad.w=fp8:block=128x128,dgrad.g=fp8:elem=e5m2,wgrad.g=fp8:elem=e5m2;'
              'none@output')


class Section(NamedTuple):
    """A part of a recipe for some layers.   formats: {operand: Format, or None for an operand that is not rounded}"""
    layers: tuple[str, ...]
    formats: MappingProxyType


@dataclass(frozen=True)
class Recipe:
    """formats: {operand: Format} of the rounded operands;  layers: patterns for layer names, () for all layers.
    sections: Sections that replace formats of some layers, in order"""
    formats: MappingProxyType = field(default_factory=lambda: MappingProxyType({}))
    layers: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()

    step, seed, fp8 = None, 0, False    # see Family: the key of the random numbers for round=stochastic

    @staticmethod
    def history(name, is_gradient):
        """Return None: without a Family there is no history for delayed scaling."""

    @classmethod
    def parse(cls, text, layers=''):
        """Parse a recipe: 'mxfp8' for all operands, or comma-separated selector=format; for an operand selected several times
        the last one counts, even if an earlier selector is narrower.  layers: comma-separated shell patterns.
        After ';' follow sections for some layers, 'fwd=mxfp4,wgrad=none@encoder.*,output', which replace what they select.

        UserError for an unknown selector or format, with the nearest names.
        """
        chosen, sections = {}, []
        for part in text.split(';'):
            body, at, names = part.rpartition('@')
            if not at:
                chosen |= _selected(part)
                _check_products(chosen)
                continue
            formats, patterns = _selected(body), _patterns(names)
            if not formats or not patterns:
                raise UserError(f'{part.strip()}: expected operands and layers, such as fwd=mxfp4@encoder.*')
            _check_products(chosen | formats)
            sections.append(Section(patterns, MappingProxyType({key: formats[key] for key in _ALL if key in formats})))
        return cls(MappingProxyType({operand: chosen[operand] for operand in _ALL if chosen.get(operand)}), _patterns(layers),
                   tuple(sections))

    @classmethod
    def of_layers(cls, formats):
        """Return the recipe of {layer: {operand: Format}}, with a section for all layers that have the same formats."""
        groups = {}
        for layer, chosen in formats.items():
            groups.setdefault(_terms(chosen), []).append(layer)
        return cls.parse(';'.join(f'{text}@{",".join(layers)}' for text, layers in groups.items() if text))

    def __hash__(self):
        return hash((str(self), self.layers))

    def __str__(self):
        """Return a short text that parse() converts to the same formats and sections; it does not contain `layers`."""
        texts = [_terms(self.formats), *(f'{_terms(section.formats)}@{",".join(section.layers)}' for section in self.sections)]
        return ';'.join(text.removeprefix('all=') for text in texts if text) or NONE

    @property
    def rounds(self):
        """Whether the recipe has any format."""
        return bool(self.formats) or any(fmt for section in self.sections for fmt in section.formats.values())

    def of(self, layer, kind):
        """Return {operand: Format} for a 'linear' or 'attention' layer.

        A pattern matches a layer by its name or by a prefix of whole parts: encoder.0 matches encoder.0.self_attention.q.
        """
        if self.layers and not matches(layer, self.layers):
            return {}
        found = dict(self.formats)
        for section in self.sections:
            if matches(layer, section.layers):
                found |= section.formats
        return {operand: found[operand] for operand in OPERANDS[kind] if found.get(operand)}


def matches(layer, patterns):
    """Return whether a layer's name, or a prefix of whole parts of it, matches one of the patterns."""
    parts = layer.split('.')
    names = ['.'.join(parts[:n]) for n in range(1, len(parts) + 1)]
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names)


def _patterns(text):
    return tuple(filter(None, (pattern.strip() for pattern in text.split(','))))


def _selected(text):
    """Return {operand: Format or None} of comma-separated selector=format.   UserError for an unknown one"""
    chosen = {}
    for item in _patterns(text):
        selector, equals, fmt = item.partition('=')
        if not equals and selector.strip().lower() in SELECTORS:
            raise UserError(f'{item}: expected a format after it, such as {item}=mxfp8')
        if not equals or ':' in selector:           # a format alone, whose options contain =
            selector, fmt = 'all', item
        selector, fmt = selector.strip().lower(), fmt.strip()
        if selector not in SELECTORS:
            raise UserError(f'{selector or item}: no such operand; {_nearest(selector)}')
        chosen |= dict.fromkeys(SELECTORS[selector], _format(fmt))
    return chosen


def _terms(formats):
    """Return the text of {operand: Format or None}, with the widest selectors.  An operand that is missing is left out."""
    def terms(selector, parts):
        """Return `selector=format`, or the terms of its parts if their formats differ."""
        found = {formats.get(operand, '') for operand in SELECTORS[selector]}
        if found == {''}:
            return []
        if len(found) == 1:
            return [f'{selector}={found.pop() or NONE}']
        return [text for part, rest in parts.items() for text in terms(part, rest)]

    tree = {kind: {product: dict.fromkeys(SELECTORS[product], {}) for product in _products(operands)}
            for kind, operands in OPERANDS.items()}
    return ','.join(terms('all', tree))


def read_recipe(path):
    """Return the text of a recipe in a file: lines are joined by ';', and # begins a comment.

    UserError if the file cannot be read.
    """
    try:
        with open(path, encoding='utf-8') as file:
            lines = [line.partition('#')[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'{path}: cannot be read ({getattr(error, "strerror", None) or "not UTF-8"}); name a file with a '
                        'recipe, such as one of `inspect sensitivity`') from error
    return ';'.join(filter(None, lines))


# options that the operands of a product have in common -> what differs otherwise
_OF_PRODUCTS = {('hadamard', 'signs'): 'Hadamard transforms', ('accumulate', 'promote'): 'sums'}


def can_multiply(one, other):
    """Return whether the operands of a product may have these formats (None: not rounded): if both are rounded, their Hadamard
    transforms are the same, so that they cancel in the product, and so is the precision of the sums."""
    return not _difference(one, other)


def _difference(one, other):
    """Return the options that differ, though the operands of a product need the same; () if there are none."""
    return next((names for names in _OF_PRODUCTS
                 if one and other and any(one.option(name) != other.option(name) for name in names)), ())


def _check_products(chosen):
    """UserError if the rounded operands of a product have options that do not go together.
    chosen: {operand: Format or None}"""
    rounded = {id(fmt): fmt for fmt in chosen.values() if fmt}          # few: a term gives its operands the same one
    options = [name for names in _OF_PRODUCTS for name in names]
    if len({tuple(map(fmt.option, options)) for fmt in rounded.values()}) < 2:
        return
    for product in _PRODUCTS:
        found = [(operand, chosen[operand]) for operand in SELECTORS[product] if chosen.get(operand)]
        for one, other in zip(found, found[1:], strict=False):
            if names := _difference(one[1], other[1]):
                raise UserError(f'{one[0]}={one[1]} and {other[0]}={other[1]}: the operands of a product have different '
                                f'{_OF_PRODUCTS[names]}; expected the same {"= and ".join(names)}= in both')


def _format(text):
    if text.lower() == NONE:
        return None
    from pyops import formats  # not at the top: most runs do not quantize
    return formats.parse(text)


def _nearest(name):
    import difflib  # not at the top: needed only for an error
    close = difflib.get_close_matches(name, SELECTORS, 3, 0.5)
    return (f'did you mean {" or ".join(close)}? ' if close else '') + (
        f'expected all, linear, attention, a product ({", ".join(_PRODUCTS)}), product.operand such as fwd.x, '
        f'or {", ".join(f"attn.{operand}" for operand in _OF_ATTENTION)}')


def from_environment():
    """Return the text of the recipe in CUSTOM_QUANT_TYPE, NONE if it is unset or empty.  UserError if it is invalid."""
    text = os.environ.get(VARIABLE, '')
    try:
        return str(Recipe.parse(text))
    except UserError as error:
        raise UserError(f'{VARIABLE}={text}: {error}') from None


def ignore_environment(reason, recipe=NONE):
    """Print that CUSTOM_QUANT_TYPE is ignored, and the reason, if it is set to anything but `recipe`, which is used instead."""
    try:
        is_another = from_environment() not in (NONE, recipe)
    except UserError:               # invalid, but unused
        is_another = True
    if is_another:
        print(f'{VARIABLE}={os.environ[VARIABLE]}: ignored, since {reason}', file=sys.stderr)


def resolve(args=None, kept=None):
    """Return the settings `quant` and `quant_layers` of a run: from its flags (pyops.flags.add_quant_flags), else from the
    checkpoint (kept: its settings, None without one), else from CUSTOM_QUANT_TYPE.

    With --precision fp8 the default is FP8_RECIPE.

    UserError if CUSTOM_QUANT_TYPE is used and invalid, if layers are given but no recipe, or with --precision fp8 for a recipe
    with other formats than FP8 hardware has.
    """
    given, only = (getattr(args, name, None) for name in ('quant', 'quant_layers'))
    if given is not None:
        quant = given
    elif kept is None:
        quant = from_environment()
    else:
        quant = kept.get('quant', NONE)
        ignore_environment(f'the checkpoint was trained with --quant {quant}; give --quant to change that', quant)
    if getattr(args, 'precision', None) == FP8:
        quant = _of_fp8(quant, is_given=given is not None)
    layers = (kept or {}).get('quant_layers', '') if only is None else only
    if quant == NONE and only:
        raise UserError(f'--quant-layers {only}: expected a recipe too; add one such as --quant mxfp8')
    return {'quant': quant, 'quant_layers': layers}


def _of_fp8(quant, is_given):
    """Return the recipe of --precision fp8.   UserError if tensor cores cannot multiply with its formats
    is_given: whether --quant is given"""
    from pyops.ops.fp8 import check_format  # not at the top: most runs do not quantize
    if quant == NONE and is_given:
        raise UserError(f'--quant {NONE}: --precision fp8 needs formats of linear layers; leave out --quant, or give '
                        '--precision bf16')
    recipe = Recipe.parse(FP8_RECIPE if quant == NONE else quant)
    for operand, fmt in itertools.chain(recipe.formats.items(), *(section.formats.items() for section in recipe.sections)):
        if fmt:
            check_format(operand, fmt)
    return str(recipe)


class AmaxHistories:
    """The largest magnitudes of operands in past steps, which determine their scales in delayed scaling: state of a training
    run, in its checkpoints and plans.

    lengths: {operand, such as 'encoder.0.feed_forward.w1.fwd.x': number of past steps}
    """

    def __init__(self, lengths):
        self.lengths, self._rows = lengths, {name: row for row, name in enumerate(lengths)}
        self.history = backend.zeros((len(lengths), max(lengths.values())))     # of a row: the last step first
        self.amax = backend.zeros(len(lengths))                                 # of the step that runs

    def of(self, name):
        """Return the past amax of an operand, the last step first, (length,), and its amax in this step, (1,)."""
        row = self._rows[name]
        return self.history[row, :self.lengths[name]], self.amax[row:row + 1]

    def tensors(self):
        """Return {operand: its past amax (length,)}."""
        return {name: self.of(name)[0] for name in self.lengths}

    def arrays(self):
        """Return {name: array} for a plan."""
        return dict(amax_history=self.history, amax=self.amax)

    def advance(self):
        """Append the amax of this step to the histories; the optimizer calls it at the end of a step."""
        backend.launch('advance_amax', self.history, self.amax, *self.history.shape)


class Family:
    """A replacement for pyops.ops from which a model creates its layers.  Ops with products round their operands as the recipe
    specifies; ops without rounded operands come from pyops.ops.

    step: int64 array (1,) that counts training steps, for the random numbers of round=stochastic; None: the same every step.
    fp8: whether the products of linear layers with such formats are computed by tensor cores in FP8 (pyops.ops.fp8), on the CPU
    by their definition, instead of emulated in float32.  UserError, when a layer is created, if they cannot be

        family.attach(optimizer)                after the model is created: its steps are counted, its histories are saved
        with family.recording():                forward and backward of a training step: delayed scaling reads and extends the
            ...                                 histories; elsewhere a tensor is scaled by its own amax
    """

    def __init__(self, recipe, seed=0, fp8=False):
        self.recipe, self.seed, self.fp8, self.step = recipe, seed, fp8, None
        self.weights = None             # inside same_weights(): the weights in FP8, by layer
        self.layers = {}                # layers created by the model -> whether any of their operands is rounded
        self._lengths, self._histories, self._is_recording = {}, None, False    # of the operands with delayed scaling

    def of(self, layer, kind):
        found = self.recipe.of(layer, kind)
        self.layers[layer] = bool(found)
        self._lengths |= {f'{layer}.{operand}': fmt.delayed for operand, fmt in found.items() if fmt.delayed}
        return found

    def attach(self, optimizer):
        """Count the steps of an optimizer, and make the amax histories part of its state."""
        self.step = optimizer.count
        if self._lengths:
            self._histories = optimizer.histories = AmaxHistories(dict(self._lengths))

    @contextlib.contextmanager
    def recording(self):
        """Within this context delayed scaling reads and extends the amax histories."""
        before, self._is_recording = self._is_recording, True
        try:
            yield
        finally:
            self._is_recording = before

    @contextlib.contextmanager
    def same_weights(self):
        """Within this context layers that multiply in FP8 encode their weights once, for several forward passes."""
        before, self.weights = self.weights, {}
        try:
            yield
        finally:
            self.weights = before

    def history(self, name, is_gradient):
        """Return the history of an operand, None outside recording().   ValueError in a training step without recording() or
        attach()"""
        if self._is_recording and self._histories is not None:
            return self._histories.of(name)
        if self._is_recording or is_gradient:
            raise ValueError(f'{name}: delayed scaling needs the amax of past steps; call attach(optimizer) of the Family '
                             'after the model is created, and run forward and backward within its recording()')
        return None

    def check(self):
        """Return a line about the rounded layers.  Call it after creating the model.

        UserError if a pattern matches no layer, or nothing is rounded.
        """
        for pattern in self.recipe.layers:
            alone = replace(self.recipe, layers=(pattern,))
            if not any(alone.of(layer, kind) for layer in self.layers for kind in OPERANDS):
                raise self._no_layer(f'--quant-layers {pattern}', pattern)
        for pattern in itertools.chain(*(section.layers for section in self.recipe.sections)):
            if not any(matches(layer, (pattern,)) for layer in self.layers):
                raise self._no_layer(f'--quant ...@{pattern}', pattern)
        if not any(self.layers.values()):
            raise UserError(f'--quant {self.recipe}: rounds nothing in this model; select operands of its layers')
        how = ', multiplied in FP8' * self.fp8
        return f'quantised : {self.recipe} in {sum(self.layers.values())} of {len(self.layers)} layers{how}'

    def _no_layer(self, flag, pattern):
        import difflib  # not at the top: needed only for an error
        close = difflib.get_close_matches(pattern, self.layers, 3, 0.3)
        first, last = list(self.layers)[:3], list(self.layers)[-1]
        remedy = (f'did you mean {" or ".join(close)}?' if close else
                  f'there are {len(self.layers)}, from {", ".join(first)} to {last}')
        return UserError(f'{flag}: no layer has that name; {remedy}')

    def __getattr__(self, name):
        plain = getattr(ops, name)
        if not hasattr(plain, 'rounded'):
            return plain

        def make(*arguments, **named):
            op, rounded = plain(*arguments, **named), plain.rounded()
            rounds = [self.of(layer, kind) for layer, kind in rounded.layers(op.name)]
            if any(rounds) and self.fp8 and not hasattr(rounded, 'has_fp8'):
                raise UserError(f'--quant {self.recipe}: {op.name} is no linear layer that can multiply in FP8; '
                                f'leave its operands unrounded, as in --quant "{FP8_RECIPE}"')
            return rounded(*arguments, **named, recipe=self) if any(rounds) else op
        return make


def recording(source):
    """Return the context for forward and backward of a training step of a model whose layers come from `source`, a Family or
    another source of layers, for which it does nothing."""
    return source.recording() if isinstance(source, Family) else contextlib.nullcontext()


def same_weights(source):
    """Return the context for forward passes with the same weights; as recording()."""
    return source.same_weights() if isinstance(source, Family) else contextlib.nullcontext()


def family(recipe, seed=0, fp8=False):
    """Return the source of a model's layers: a Family, or pyops.ops itself if the recipe rounds nothing.   fp8: as in Family"""
    return Family(recipe, seed, fp8) if recipe.rounds else ops


def family_of(settings):
    """Return the family for a program's settings `quant`, `quant_layers` and `seed`, all optional.  With --precision fp8, the
    `fp8` of the device, linear layers multiply in FP8."""
    return family(Recipe.parse(settings.get('quant', NONE), settings.get('quant_layers', '')), settings.get('seed', 0),
                  backend.current_device().fp8)
