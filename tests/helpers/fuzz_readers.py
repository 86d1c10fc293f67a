"""Readers for fuzzing that take files of other programs and caches: valid inputs, and functions that read an input."""
import functools
import importlib.util
import io
import json
import os
import pickle
import tempfile
import types
from dataclasses import fields
from pathlib import Path

import numpy as np
from mutators import folder_bytes, safetensors_file

from pyops import cache, formats, recipe_files
from pyops.data import cifar
from pyops.errors import UserError
from pyops.inspect.index import Index
from pyops.ops.linear import OPERANDS
from pyops.quantization import Recipe
from pyops.text.corpus import Corpus, parse
from pyops.text.testsets import TestSet
from transformer import from_marian
from transformer.model import Config, parameter_specs

# ---- models of Marian ----------------------------------------------------------------------------------------------------

_SIZES = dict(d_model=4, layers=1, decoder_layers=2, d_ff=4, heads=2, activation='silu')
_LETTERS = 'abcde'


def _pieces(side):
    """Return the content of a small .spm file: letters, and pairs of the first one."""
    import sentencepiece
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f'{letter} a{letter} {_LETTERS}' for letter in _LETTERS]), model_writer=model, vocab_size=14,
        bos_id=-1, minloglevel=2, normalization_rule_name='identity', hard_vocab_limit=False)
    return model.getvalue()


def marian_folders(folder):
    """Return a model in the layout of the hub, and with PyYAML also one in Marian's layout."""
    tokens = ['</s>', '<unk>', *(mark + letter for mark in ('', '▁') for letter in _LETTERS), '▁', '<pad>']
    config = Config(len(tokens), len(tokens), **_SIZES, tied=True, bias=True, halves=True, num_steps=8, positions=8)
    specs = {name: spec.shape for name, spec in parameter_specs(config).items()}
    layers = list(from_marian._layers(_SIZES))
    shared = {f'{side}.spm': _pieces(side) for side in ('source', 'target')}
    ids = {token: id for id, token in enumerate(tokens)}
    header, end = {}, 0
    for name, shape in {'model.shared.weight': (len(tokens), 4), 'final_logits_bias': (1, len(tokens)),
                        **{f'model.{side}.layers.{layer}.{hub}': specs[f'{side}.{layer}.{ours}']
                           for side, layer, ours, hub, _ in layers}}.items():
        header[name] = {'dtype': 'F32', 'shape': list(shape), 'data_offsets': [end, end + 4 * int(np.prod(shape))]}
        end += 4 * int(np.prod(shape))
    last = len(tokens) - 1
    settings = dict(model_type='marian', d_model=4, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=4, decoder_ffn_dim=4,
                    encoder_attention_heads=2, decoder_attention_heads=2, activation_function='swish', scale_embedding=True,
                    vocab_size=len(tokens), eos_token_id=0, pad_token_id=last, decoder_start_token_id=last)
    found = [shared | {'config.json': json.dumps(settings).encode(), 'vocab.json': json.dumps(ids).encode(),
                       'model.safetensors': safetensors_file(header, bytes(end))}]
    if importlib.util.find_spec('yaml'):
        del ids['<pad>']
        of_model = {'type': 'transformer', 'tied-embeddings-all': 'true', 'dim-emb': 4, 'transformer-dim-ffn': 4,
                    'transformer-heads': 2, 'enc-depth': 1, 'dec-depth': 2, 'transformer-ffn-activation': 'swish'}
        text = '\n'.join(f'{name}: {value}' for name, value in of_model.items()).encode() + b'\0'
        arrays = {'special:model.yml': np.frombuffer(text, np.int8), 'Wemb': np.zeros((len(ids), 4), np.float32),
                  'decoder_ff_logit_out_b': np.zeros((1, len(ids)), np.float32)}
        for side, layer, ours, _, marian in layers:
            shape = specs[f'{side}.{layer}.{ours}'][::-1]
            arrays[f'{side}_l{layer + 1}_{marian}'] = np.zeros(shape if len(shape) > 1 else (1, *shape), np.float32)
        out = io.BytesIO()
        np.savez(out, **arrays)
        found.append(shared | {'model.npz': out.getvalue(),
                               'opus.vocab.yml': ''.join(f'"{token}": {id}\n' for token, id in ids.items()).encode()})
    return [folder_bytes(files) for files in found]


def run_marian(folder):
    from pyops.text.tokenizer import restore
    tensors, state = from_marian.convert(folder, 8)
    settings = {name: state['settings'][name] for name in {field.name for field in fields(Config)} & state['settings'].keys()}
    rows = len(tensors['parameter/output.bias'])
    specs = parameter_specs(Config(rows, rows, **settings))
    assert {name.removeprefix('parameter/') for name in tensors} == specs.keys()
    assert all(tensors[f'parameter/{name}'].shape == spec.shape and tensors[f'parameter/{name}'].dtype == np.float32
               for name, spec in specs.items())
    source, _ = restore(json.loads(json.dumps(state['vocabularies'])))
    assert len(source) == rows and all(0 <= id < rows for id in source.encode(['abc eda']).ids)


# ---- data ----------------------------------------------------------------------------------------------------------------

def cifar_files(folder):
    """Return batches as bytes and pickles of two protocols."""
    images = np.arange(2 * cifar.PIXELS, dtype=np.uint8).reshape(2, -1)
    records = b''.join(bytes([label]) + image.tobytes() for label, image in zip((3, 9), images, strict=True))
    return [records, *(pickle.dumps({b'data': images[:1], b'labels': [label], b'batch_label': b'testing batch'}, protocol)
                       for label, protocol in ((7, 2), (0, 4)))]


def run_cifar(path):
    ending = '' if path.read_bytes()[:1] == b'\x80' else '.bin'
    path.rename(path.with_name(f'test_batch{ending}'))
    images, labels = cifar.load(path.parent, train=False)
    assert images.dtype == labels.dtype == np.uint8 and images.shape == (len(labels), cifar.PIXELS) and len(labels)
    assert labels.max() < len(cifar.CLASSES)


def run_test_set(path):
    tests = TestSet.load(path)
    assert len(tests.sources) == len(set(tests.sources)) == len(tests.references) > 0
    assert all(some and len(set(some)) == len(some) for some in tests.references)
    corpus = _corpus()
    seen = tests.occurs_in(corpus)
    assert seen.shape == (len(corpus),)
    sources, references, left_out = tests.unseen(corpus)
    assert len(sources) == len(references) == len(tests.sources) - left_out > 0
    assert not left_out or seen.any()


@functools.cache
def _corpus():
    text = b'Go now.\tVa maintenant.\nWho is he?\tQui est-il ?\n'
    return Corpus('a corpus', *parse(text, 'a corpus'), None)


# ---- recipes for other libraries -----------------------------------------------------------------------------------------

def recipes_of_layers(folder):
    """Return {layer: recipe} as JSON."""
    return [json.dumps(layers).encode() for layers in (
        {'encoder.0.q': 'fp8:block=tensor', 'output': 'fwd=fp8:block=axis,wgrad.x=fp8:block=axis:elem=e5m2'},
        {'a': 'fp8:delayed=16', 'b': 'fp8:delayed=16,dgrad.g=fp8:delayed=16:elem=e5m2', 'c': 'mxfp8:scale=rceil', 'd': 'none'},
        {'a.b': 'fwd=mxfp8,wgrad=fp8:block=tensor'})]


def run_recipe_file(data):
    """Write the files of both libraries; they are YAML and Python with the names of the layers."""
    try:
        layers = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f'not JSON: {ascii(error)}') from error
    if not isinstance(layers, dict) or not all(name.isprintable() and isinstance(text, str) for name, text in layers.items()):
        raise UserError('expected {layer: recipe}, with printable names')
    chosen = {layer: {operand: fmt for operand, fmt in Recipe.parse(text).formats.items() if operand in OPERANDS}
              for layer, text in layers.items()}
    for write, has in ((recipe_files.transformer_engine, recipe_files.transformer_engine_has),
                       (recipe_files.torchao, recipe_files.torchao_has)):
        text, lost = write(chosen, ['a title'])
        operands = [f'{layer} {operand}={fmt}' for layer, fmts in chosen.items() for operand, fmt in fmts.items()]
        assert set(lost) <= set(operands)
        assert all(f'{layer} {operand}={fmt}' in lost for layer, fmts in chosen.items() for operand, fmt in fmts.items()
                   if not has(fmt))
        if write is recipe_files.torchao:
            compile(text, 'recipe', 'exec')
        elif importlib.util.find_spec('yaml'):
            import yaml
            yaml.load(text, getattr(yaml, 'CSafeLoader', yaml.SafeLoader))
    for fmt in {fmt for fmts in chosen.values() for fmt in fmts.values()}:
        assert formats.parse(str(fmt)) == fmt


# ---- caches --------------------------------------------------------------------------------------------------------------

_LINES = b'Go now.\tVa maintenant.\nHe sleeps.\tIl dort.\n'


def _cached():
    """Return the Corpus of _LINES, from the cache if it has it."""
    return Corpus.cached('lines', io.BytesIO(_LINES), lambda: parse(_LINES, 'lines'), None)


def _in_folder(path, function):
    before = os.environ.get('PYOPS_CACHE')
    os.environ['PYOPS_CACHE'] = str(path)
    try:
        return function()
    finally:
        os.environ.pop('PYOPS_CACHE')
        if before is not None:
            os.environ['PYOPS_CACHE'] = before


@functools.cache
def _file_of_cache():
    """Return the name and the content of the file that a cache of _LINES has."""
    with tempfile.TemporaryDirectory() as folder:
        _in_folder(folder, _cached)
        (file,) = Path(folder).iterdir()
        return file.name, file.read_bytes()


def corpus_caches(folder):
    return [_file_of_cache()[1]]


def run_corpus_cache(path):
    """A damaged cache changes nothing."""
    data = path.read_bytes()
    path.unlink()
    file = path.with_name(_file_of_cache()[0])
    file.write_bytes(data)
    file.chmod(0o600)
    found, expected = _in_folder(path.parent, _cached), _corpus_of_lines()
    for side in ('sources', 'targets'):
        one, other = getattr(found, side), getattr(expected, side)
        assert list(one.tokens) == list(other.tokens) and np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.lengths, other.lengths)
    if file.read_bytes() != data:               # it was written again
        raise UserError('damaged')


@functools.cache
def _corpus_of_lines():
    return _in_folder('0', _cached)


def indexes(folder):
    """Return the content of indexes of a folder."""
    return [json.dumps(files).encode() for files in ({}, {'a': [[3, 5], {'x': 1.5, 'y': [1, None]}], 'b': [[0, 0], {}]})]


def run_index(path):
    """Read a file of the cache whose checksum is right: it has an item, or none."""
    data = path.read_bytes()
    path.unlink()

    def run():
        index = Index(path.parent, 'measures')
        cache.write('measures', index._key, data)
        status = types.SimpleNamespace(st_size=3, st_mtime_ns=5)
        index.find('a', status, 'x')
        assert index.find('nothing', status, 'x') is None
        for file in ('a', 'b', 'c'):
            index.add(file, status, 'z', 7)
            assert index.find(file, status, 'z') == 7
        index._new = 1000
        index.save()
    _in_folder(path.parent / '..' / 'cache', run)

