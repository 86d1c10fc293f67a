"""Which operand of which product is rounded to which number format while a network trains.

    recipe = Recipe.parse('fwd=mxfp8,dgrad.g=hifp8,attention=mxfp4:scale=even', layers='encoder.*')
    model = Transformer(Config(..., ops=family(recipe)))

docs/quantization.md has the products, their operands and axes, and what is rounded where.
"""
import difflib
import os
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import MappingProxyType

from pyops import ops
from pyops.errors import UserError
from pyops.ops.attention import OPERANDS as ATTENTION_OPERANDS
from pyops.ops.linear import OPERANDS as LINEAR_OPERANDS

OPERANDS = {'linear': LINEAR_OPERANDS, 'attention': ATTENTION_OPERANDS}


def _products(operands):
    return tuple(dict.fromkeys(operand.partition('.')[0] for operand in operands))


_ALL = OPERANDS['linear'] + OPERANDS['attention']
_PRODUCTS = _products(_ALL)
_OF_ATTENTION = tuple(dict.fromkeys(operand.partition('.')[2] for operand in OPERANDS['attention']))
# what a recipe's text may name -> the operands that it means
SELECTORS = (
    {'all': _ALL} | OPERANDS
    | {product: tuple(operand for operand in _ALL if operand.startswith(f'{product}.')) for product in _PRODUCTS}
    | {f'attn.{name}': tuple(operand for operand in OPERANDS['attention'] if operand.endswith(f'.{name}'))
       for name in _OF_ATTENTION}
    | {operand: (operand,) for operand in _ALL})

NONE = 'none'                           # in place of a format: the operand stays as it is
VARIABLE = 'CUSTOM_QUANT_TYPE'


@dataclass(frozen=True)
class Recipe:
    """formats: operand -> Format of those that are rounded;  layers: patterns of the names of layers, () for all."""
    formats: MappingProxyType = field(default_factory=lambda: MappingProxyType({}))
    layers: tuple[str, ...] = ()

    step, seed = None, 0                # of the random numbers of round=stochastic: see Family

    @classmethod
    def parse(cls, text, layers=''):
        """text: 'mxfp8' for all operands, or selector=format with commas between; of those that name the same operand the
        last one counts, however special they are.  layers: patterns as in a shell, commas between.

        UserError for a selector or a format that does not exist, with the nearest names.
        """
        chosen = {}
        for item in filter(None, (part.strip() for part in text.split(','))):
            selector, equals, fmt = item.partition('=')
            if not equals and selector.strip().lower() in SELECTORS:
                raise UserError(f'{item}: want a format behind it, as in {item}=mxfp8')
            if not equals or ':' in selector:           # a format alone, whose options have = in them
                selector, fmt = 'all', item
            selector, fmt = selector.strip().lower(), fmt.strip()
            if selector not in SELECTORS:
                raise UserError(f'{selector or item}: no such operand; {_nearest(selector)}')
            chosen |= dict.fromkeys(SELECTORS[selector], _format(fmt))
        return cls(MappingProxyType({operand: chosen[operand] for operand in _ALL if chosen.get(operand)}),
                   tuple(filter(None, (pattern.strip() for pattern in layers.split(',')))))

    def __hash__(self):
        return hash((str(self), self.layers))

    def __str__(self):
        """A short text that parse() makes these formats of; the layers are apart."""
        def told(selector, parts):
            """`selector`, or its parts where they differ."""
            found = {self.formats.get(operand) for operand in SELECTORS[selector]}
            if found == {None}:
                return []
            if len(found) == 1:
                return [f'{selector}={found.pop()}']
            return [text for part, rest in parts.items() for text in told(part, rest)]

        tree = {kind: {product: dict.fromkeys(SELECTORS[product], {}) for product in _products(operands)}
                for kind, operands in OPERANDS.items()}
        return ','.join(told('all', tree)).removeprefix('all=') or NONE

    def of(self, layer, kind):
        """-> operand: Format, of a 'linear' or an 'attention' layer.  A pattern is for a layer of that name and for all that
        are parts of something of that name: encoder.0 for encoder.0.self_attention.q."""
        parts = layer.split('.')
        names = ['.'.join(parts[:n]) for n in range(1, len(parts) + 1)]
        if self.layers and not any(fnmatchcase(name, pattern) for pattern in self.layers for name in names):
            return {}
        return {operand: self.formats[operand] for operand in OPERANDS[kind] if operand in self.formats}


def _format(text):
    if text.lower() == NONE:
        return None
    from pyops import formats  # not above: most runs round nothing
    return formats.parse(text)


def _nearest(name):
    close = difflib.get_close_matches(name, SELECTORS, 3, 0.5)
    return (f'did you mean {" or ".join(close)}? ' if close else '') + (
        f'want all, linear, attention, a product ({", ".join(_PRODUCTS)}), product.operand such as fwd.x, '
        f'or {", ".join(f"attn.{operand}" for operand in _OF_ATTENTION)}')


def from_environment():
    """Return the text of the recipe in CUSTOM_QUANT_TYPE, NONE if it is not set or empty.  UserError if it is no recipe."""
    text = os.environ.get(VARIABLE, '')
    try:
        return str(Recipe.parse(text))
    except UserError as error:
        raise UserError(f'{VARIABLE}={text}: {error}') from None


def ignore_environment(reason, recipe=NONE):
    """Print that CUSTOM_QUANT_TYPE is ignored, and why, if it is set to anything but `recipe`, which is used instead."""
    try:
        is_another = from_environment() not in (NONE, recipe)
    except UserError:               # no recipe, which is no error where it is not used
        is_another = True
    if is_another:
        print(f'{VARIABLE}={os.environ[VARIABLE]}: ignored, since {reason}', file=sys.stderr)


def resolve(args=None, kept=None):
    """Return the settings `quant` and `quant_layers` of a run: those of its flags (pyops.training.add_quant_flags), else of the
    checkpoint (kept: its settings, None without one), else of CUSTOM_QUANT_TYPE.

    UserError if CUSTOM_QUANT_TYPE is used and is no recipe, or if layers are named and nothing is rounded.
    """
    given, only = (getattr(args, name, None) for name in ('quant', 'quant_layers'))
    if given is not None:
        quant = given
    elif kept is None:
        quant = from_environment()
    else:
        quant = kept.get('quant', NONE)
        ignore_environment(f'the checkpoint was trained with --quant {quant}; give --quant to change that', quant)
    layers = (kept or {}).get('quant_layers', '') if only is None else only
    if quant == NONE and only:
        raise UserError(f'--quant-layers {only}: nothing is rounded there; say to what with --quant, as in --quant mxfp8')
    return {'quant': quant, 'quant_layers': layers}


class Family:
    """The names of pyops.ops, where ops that have products round their operands as a recipe says: what a model makes its layers
    from.  Ops of which the recipe says nothing are the plain ones.

    step: an int64 array (1,) that counts training steps, for the random numbers of round=stochastic, or None: always the same.
    """

    def __init__(self, recipe, seed=0):
        self.recipe, self.seed, self.step = recipe, seed, None
        self.layers = {}                # every layer that a model asked for -> whether any of its operands is rounded

    def of(self, layer, kind):
        found = self.recipe.of(layer, kind)
        self.layers[layer] = bool(found)
        return found

    def check(self):
        """-> a line about what is rounded where, once a model was made; UserError where a pattern fits no layer of it, or
        nothing is rounded in any."""
        for pattern in self.recipe.layers:
            alone = Recipe(self.recipe.formats, (pattern,))
            if not any(alone.of(layer, kind) for layer in self.layers for kind in OPERANDS):
                close = difflib.get_close_matches(pattern, self.layers, 3, 0.3)
                first, last = list(self.layers)[:3], list(self.layers)[-1]
                remedy = (f'did you mean {" or ".join(close)}?' if close else
                          f'there are {len(self.layers)}, from {", ".join(first)} to {last}')
                raise UserError(f'--quant-layers {pattern}: no layer of that name; {remedy}')
        if not any(self.layers.values()):
            raise UserError(f'--quant {self.recipe}: rounds nothing in this model; want operands of layers that it has')
        return f'quantised : {self.recipe} in {sum(self.layers.values())} of {len(self.layers)} layers'

    def __getattr__(self, name):
        plain = getattr(ops, name)
        if not hasattr(plain, 'rounded'):
            return plain

        def make(*arguments, **named):
            op, rounded = plain(*arguments, **named), plain.rounded()
            rounds = [self.of(layer, kind) for layer, kind in rounded.layers(op.name)]
            return rounded(*arguments, **named, recipe=self) if any(rounds) else op
        return make


def family(recipe, seed=0):
    """-> what a model makes its layers from: a Family, or pyops.ops itself where the recipe rounds nothing."""
    return Family(recipe, seed) if recipe.formats else ops


def family_of(settings):
    """The family of a program's settings `quant`, `quant_layers` and `seed`; they may lack them all."""
    return family(Recipe.parse(settings.get('quant', NONE), settings.get('quant_layers', '')), settings.get('seed', 0))
