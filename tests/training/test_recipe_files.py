"""Recipes as files for TransformerEngine and torchao: the same rounding of each operand, or a line that it is lost."""
import dataclasses
import itertools
import re
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from pyops.formats import fake_quantize, parse
from pyops.ops.linear import OPERANDS
from pyops.recipe_files import PRODUCTS, torchao, torchao_has, transformer_engine, transformer_engine_has

LAYERS = [f'encoder.{i}.{name}' for i in range(3) for name in ('self_attention.q', 'feed_forward.w1')] + ['output', 'output2']
FP8 = [None, *map(parse, ('fp8:block=tensor', 'fp8:block=tensor:elem=e5m2', 'fp8:block=axis', 'mxfp4'))]
NATIVE = {'delayed': 'fp8:delayed=7:margin=1', 'mxfp8': 'mxfp8:scale=rceil'}
E5M2_OF_GRADIENTS = {'dgrad.g': 'e5m2', 'wgrad.g': 'e5m2'}


def random_layers(seed, formats):
    """Formats of the operands of LAYERS; often a whole product or layer has the same one."""
    rng, layers = np.random.default_rng(seed), {}
    for layer in LAYERS:
        fmts, of_layer = {}, formats[rng.integers(len(formats))]
        for operands in PRODUCTS.values():
            of_product = formats[rng.integers(len(formats))] if rng.random() < 0.3 else of_layer
            for operand in operands:
                fmts[operand] = formats[rng.integers(len(formats))] if rng.random() < 0.1 else of_product
        layers[layer] = {operand: fmt for operand, fmt in fmts.items() if fmt}
    return layers


def native(kind, hybrid):
    """{operand: Format} with which TransformerEngine multiplies in 8 bits."""
    return {operand: parse(NATIVE[kind], elem=E5M2_OF_GRADIENTS.get(operand, 'e4m3') if hybrid else 'e4m3')
            for operand in OPERANDS}


def nvfp4(has_hadamard, is_stochastic, is_square):
    """{operand: Format} of NVFP4BlockScaling, by its documentation."""
    transform, stochastic = (':hadamard=16' * has_hadamard, ':round=stochastic' * is_stochastic)
    weight = ':block=16x16' * is_square
    return {operand: parse(f'nvfp4{options}') for operand, options in {
        'fwd.x': '', 'fwd.w': weight, 'dgrad.g': stochastic, 'dgrad.w': weight, 'wgrad.g': stochastic + transform,
        'wgrad.x': transform}.items()}


def by_transformer_engine(document, recipe, layer):
    """{operand: Format} of a layer by the rules of the documentation of TransformerEngine's features."""
    sections = [section for section in document.values()
                if section['enabled'] and re.search(section['layers']['layer_name_regex_pattern'], layer)]
    assert len(sections) <= 1, layer                        # nvdlfw_inspect refuses a layer in two sections
    features = sections[0]['transformer_engine'] if sections else {}
    assert set(features) <= {'DisableFP8Layer', 'DisableFP8GEMM', 'FakeQuant'} and all(f['enabled'] for f in features.values())
    found = {}
    for product, gemm in (('fwd', 'fprop'), ('dgrad', 'dgrad'), ('wgrad', 'wgrad')):
        fakes = [one for one in features.get('FakeQuant', {}).get('gemms_struct', []) if one['gemm'] == gemm]
        if fakes:
            names = {'activation': 'x', 'weight': 'w', 'gradient': 'g'}
            found |= {f'{product}.{names[one["tensor"]]}': parse('fp8', elem=one['quant_format'][3:].lower(), block='tensor')
                      for one in fakes[0]['tensors_struct']}
        elif 'DisableFP8Layer' not in features and gemm not in features.get('DisableFP8GEMM', {}).get('gemms', []):
            assert recipe, f'{layer} {product}: would be rounded by a recipe that the file does not name'
            found |= {operand: recipe[operand] for operand in PRODUCTS[product]}
    return found


def recipe_of(text):
    """{operand: Format} of the recipe that a file names, None without one."""
    line = next((line for line in text.splitlines() if line.startswith('# recipe for autocast: ')), None)
    if line is None:
        return None
    if found := re.search(r'\.NVFP4BlockScaling\(disable_rht=(\w+), disable_stochastic_rounding=(\w+), '
                          r'disable_2d_quantization=(\w+)\)$', line):
        return nvfp4(*(text == 'False' for text in found.groups()))
    hybrid = 'fp8_format=Format.HYBRID' in line
    if line.endswith(f'.MXFP8BlockScaling(fp8_format=Format.{"HYBRID" if hybrid else "E4M3"})'):
        return native('mxfp8', hybrid)
    assert re.search(r"\.DelayedScaling\(margin=1, fp8_format=Format.\w+, amax_history_len=7, amax_compute_algo='max'\)$", line)
    return native('delayed', hybrid)


@pytest.fixture
def yaml():
    return pytest.importorskip('yaml', reason='PyYAML is not installed: pip install pyyaml')


@pytest.mark.parametrize('kind', NATIVE)
@pytest.mark.parametrize('seed', range(12))
def test_transformer_engine_rounds_the_same_operands_but_those_that_are_listed(kind, seed, yaml):
    more = [parse(NATIVE[kind]), parse(NATIVE[kind], elem='e5m2')] if seed % 3 else []
    layers = random_layers(seed, FP8 + more)
    if seed % 3 == 2:                           # whole layers with the formats of a recipe
        layers |= {layer: native(kind, hybrid=seed > 5) for layer in LAYERS[:4]}
    text, lost = transformer_engine(layers, ['a title'])
    document, recipe = yaml.safe_load(text), recipe_of(text)
    assert (recipe is not None) == bool(seed % 3 == 2) or seed % 3 == 1
    got = {layer: by_transformer_engine(document, recipe, layer) for layer in layers}
    wanted = {(layer, operand): fmt for layer, fmts in layers.items() for operand, fmt in fmts.items()}
    rounded = {(layer, operand): fmt for layer, fmts in got.items() for operand, fmt in fmts.items()}
    assert rounded.items() <= wanted.items()
    assert sorted(lost) == sorted(f'{layer} {operand}={fmt}' for (layer, operand), fmt in wanted.items()
                                  if (layer, operand) not in rounded)
    assert all(f'#   {line}' in text.splitlines() for line in lost) and text.startswith('# a title\n')
    assert len(rounded) > 5
    for (layer, operand), fmt in wanted.items():                # nothing is lost that FakeQuant has
        is_fake = fmt.name == 'fp8' and fmt.option('block') == 'tensor' and not fmt.delayed
        assert not is_fake or (layer, operand) in rounded
    if seed % 3 == 2:
        assert all(got[layer] == layers[layer] for layer in LAYERS[:4])


@pytest.mark.parametrize('have', [*itertools.product((True, False), repeat=3)])
def test_layers_in_nvfp4_are_left_to_the_recipe_of_transformer_engine(have, yaml):
    layers = random_layers(5, FP8) | {layer: nvfp4(*have) for layer in LAYERS[:4]}
    if have[0]:
        layers[LAYERS[1]] |= {operand: parse('nvfp4', **fmt.options, signs=7) for operand, fmt in layers[LAYERS[1]].items()
                              if fmt.hadamard}
    layers[LAYERS[3]] = layers[LAYERS[3]] | {'dgrad.w': parse('mxfp4')}
    text, lost = transformer_engine(layers)
    document, recipe = yaml.safe_load(text), recipe_of(text)
    assert recipe == nvfp4(*have)
    assert all(by_transformer_engine(document, recipe, layer) == recipe for layer in LAYERS[:3])
    assert not any(line.startswith(tuple(f'{layer} ' for layer in LAYERS[:3])) for line in lost)
    kept = by_transformer_engine(document, recipe, LAYERS[3])
    assert kept == {operand: fmt for operand, fmt in recipe.items() if not operand.startswith('dgrad')}
    assert {f'{LAYERS[3]} {operand}={layers[LAYERS[3]][operand]}' for operand in PRODUCTS['dgrad']} <= set(lost)


def test_the_reader_of_transformer_engine_accepts_the_file(tmp_path, yaml):
    reason = 'nvdlfw-inspect is not installed: pip install nvdlfw-inspect'
    pytest.importorskip('nvdlfw_inspect.logging', reason=reason).initialize_logger(str(tmp_path))
    manager = pytest.importorskip('nvdlfw_inspect.config_manager', reason=reason).ConfigManager
    layers = random_layers(3, FP8) | {'output': {}}
    path = tmp_path / 'config.yaml'
    path.write_text(transformer_engine(layers).text)
    features = SimpleNamespace(features={name: None for name in ('DisableFP8Layer', 'DisableFP8GEMM', 'FakeQuant')})
    manager.reset()
    manager._load_config(path, {'transformer_engine': features, 'base': SimpleNamespace(features={})})
    found = {layer: manager.get_config_for_layer(layer)['transformer_engine'] for layer in layers}
    assert found['output'] == {'DisableFP8Layer': {'enabled': True}} and 'FakeQuant' in str(found)
    assert manager.get_config_for_layer('encoder.0') == {}
    manager.reset()


# ---- torchao -----------------------------------------------------------------------------------------------------------

CASTS = {'fwd.x': 'input', 'wgrad.x': 'input_for_grad_weight', 'fwd.w': 'weight', 'dgrad.w': 'weight_for_grad_input',
         'dgrad.g': 'grad_output', 'wgrad.g': 'grad_output_for_grad_weight'}


class Recorded(SimpleNamespace):
    """Stands for a class of torchao: keeps its arguments."""


def modules():
    """Modules with the names that a file for torchao imports."""
    names = {'torch': dict(float8_e4m3fn='e4m3', float8_e5m2='e5m2'), 'torchao': {},
             'torchao.float8': dict(CastConfig=Recorded, Float8LinearConfig=Recorded, convert_to_float8_training=None,
                                    ScalingType=SimpleNamespace(DISABLED='disabled')),
             'torchao.float8.config': dict(ScalingGranularity=SimpleNamespace(TENSORWISE='tensor', AXISWISE='axis'))}
    made = {}
    for name, content in names.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(content)
    return made


def casts_of(config):
    """{operand: Format} of a Float8LinearConfig that modules() made, after the checks of the class."""
    casts = {operand: getattr(config, f'cast_config_{name}') for operand, name in CASTS.items()}
    is_off = {operand: getattr(cast, 'scaling_type', None) == 'disabled' for operand, cast in casts.items()}
    for one, other in PRODUCTS.values():
        assert is_off[one] == is_off[other]
    for one, other in (('fwd.x', 'wgrad.x'), ('fwd.w', 'dgrad.w'), ('dgrad.g', 'wgrad.g')):
        assert casts[one].target_dtype == casts[other].target_dtype
    return {operand: parse('fp8', elem=cast.target_dtype, block=cast.scaling_granularity)
            for operand, cast in casts.items() if not is_off[operand]}


@pytest.mark.parametrize('seed', range(12))
def test_torchao_rounds_the_same_operands_but_those_that_are_listed(seed, monkeypatch):
    layers = random_layers(seed, FP8)
    text, lost = torchao(layers, ['a title'])
    for name, module in modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    program = {}
    exec(text, program)
    names = [name for _, names in program['CONFIGS'] for name in names]
    assert len(names) == len(set(names)) and set(names) <= set(LAYERS)
    rounded = {(layer, operand): fmt for config, names in program['CONFIGS'] for layer in names
               for operand, fmt in casts_of(config).items()}
    wanted = {(layer, operand): fmt for layer, fmts in layers.items() for operand, fmt in fmts.items()}
    assert rounded.items() <= wanted.items() and len(rounded) > 4
    assert sorted(lost) == sorted(f'{layer} {operand}={fmt}' for (layer, operand), fmt in wanted.items()
                                  if (layer, operand) not in rounded)
    for layer, fmts in layers.items():          # a layer that torchao has loses nothing
        if set(fmts) == set(OPERANDS) and len({str(fmt) for fmt in fmts.values()}) == 1 and 'mxfp4' not in str(fmts):
            assert all((layer, operand) in rounded for operand in OPERANDS)


def test_layers_in_nvfp4_have_the_training_config_of_torchao(monkeypatch):
    whole = nvfp4(True, True, True)
    layers = {'a': whole, 'b': whole | {'fwd.w': parse('nvfp4')}, 'c': dict.fromkeys(OPERANDS, parse('fp8:block=axis')),
              'd': {operand: parse('nvfp4', **fmt.options, **({'signs': 3} if fmt.hadamard else {})) for operand, fmt in
                    whole.items()}}
    text, lost = torchao(layers)
    assert sorted(lost) == sorted(f'b {operand}={fmt}' for operand, fmt in layers['b'].items())
    config, chosen = object(), {}

    def take(kind):
        return lambda model, *given, **named: chosen.setdefault(kind, []).append((given, [
            name for name in layers if (named.get('module_filter_fn') or named['filter_fn'])(None, name)]))
    given = modules()
    given['torchao.float8'].convert_to_float8_training = take('float8')
    for name, content in {'torchao.quantization': dict(quantize_=take('nvfp4')), 'torchao.prototype': {},
                          'torchao.prototype.moe_training': {}, 'torchao.prototype.moe_training.nvfp4_training': {},
                          'torchao.prototype.moe_training.nvfp4_training.nvfp4_training': dict(
                              NVFP4TrainingConfig=lambda: config)}.items():
        given[name] = ModuleType(name)
        vars(given[name]).update(content)
    for name, module in given.items():
        monkeypatch.setitem(sys.modules, name, module)
    program = {}
    exec(text, program)
    program['convert'](None)
    assert chosen == {'float8': [((), ['c'])], 'nvfp4': [((config,), ['a', 'd'])]}


def test_torchao_replaces_layers_in_nvfp4(torch):
    name = 'torchao.prototype.moe_training.nvfp4_training.nvfp4_training'
    library = pytest.importorskip(name, reason='torchao 0.18 is not installed: pip install torchao')
    program = {}
    exec(torchao({'0': nvfp4(True, True, True)}).text, program)
    model = program['convert'](torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)))
    assert type(model[0]) is library.NVFP4Linear and type(model[1]) is torch.nn.Linear


def test_formats_that_the_libraries_have():
    for text, te, ao in (('fp8:block=tensor', True, True), ('fp8:block=axis', False, True), ('fp8', False, False),
                         ('fp8:delayed', True, False), ('fp8:block=tensor:round=away', False, False), ('mxfp8', False, False),
                         ('mxfp8:scale=rceil:elem=e5m2', True, False), ('nvfp4', True, True),
                         ('nvfp4:hadamard=16:signs=4', True, True), ('nvfp4:scale=mse', False, False),
                         ('nvfp4:block=32', False, False), ('mxfp4', False, False),
                         ('fp8:delayed:round=stochastic', False, False), ('fp8:block=tensor:hadamard=16', False, False),
                         ('int8:delayed', False, False), ('fp8:factor=2', False, False)):
        assert (transformer_engine_has(parse(text)), torchao_has(parse(text))) == (te, ao), text


@pytest.mark.parametrize('formats', [
    dict.fromkeys(OPERANDS, 'fp8:block=tensor') | dict.fromkeys(E5M2_OF_GRADIENTS, 'fp8:block=tensor:elem=e5m2'),
    dict.fromkeys(OPERANDS, 'fp8:block=axis'),
    dict.fromkeys(PRODUCTS['fwd'], 'fp8:block=tensor')])
def test_torchao_accepts_the_file_and_has_the_products_of_pyops(formats, torch, monkeypatch):
    float8 = pytest.importorskip('torchao.float8', reason='torchao is not installed: pip install torchao')
    formats = {operand: parse(fmt) for operand, fmt in formats.items()}
    program = {}
    text, lost = torchao({'0': formats, '1': {}})
    assert not lost
    exec(text, program)
    program['CONFIGS'][:] = [(dataclasses.replace(config, emulate=True), names) for config, names in program['CONFIGS']]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False), torch.nn.Linear(48, 32))
    w = model[0].weight.detach().numpy().copy()
    assert program['convert'](model) is model
    assert type(model[0]).__module__.startswith(float8.__name__) and type(model[1]) is torch.nn.Linear
    x, g = torch.randn(80, 64, requires_grad=True), torch.randn(80, 48)
    y = model[0](x)
    y.backward(g)
    x_, g_ = x.detach().numpy(), g.numpy()

    def q(operand, array, axis):
        return fake_quantize(array, formats[operand], axis) if operand in formats else array
    products = {'fwd': (y, q('fwd.x', x_, 1) @ q('fwd.w', w, 1).T, x_ @ w.T),
                'dgrad': (x.grad, q('dgrad.g', g_, 1) @ q('dgrad.w', w, 0), g_ @ w),
                'wgrad': (model[0].weight.grad, q('wgrad.g', g_, 0).T @ q('wgrad.x', x_, 0), g_.T @ x_)}
    for product, (got, want, exact) in products.items():
        got, size, rounding = got.detach().numpy(), np.linalg.norm(exact), np.linalg.norm(want - exact)
        assert (rounding > 0.01 * size) == (PRODUCTS[product][0] in formats)
        # the libraries compute the scale in another order, so that a few numbers are rounded to the other side
        assert np.linalg.norm(got - want) <= 0.1 * rounding + 1e-5 * size, product
