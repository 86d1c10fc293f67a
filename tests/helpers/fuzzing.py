"""Fuzzing of the readers: targets, their valid inputs, and a search that keeps each input that reaches new lines.

An input is bytes, so that it can be saved as a file and run again.  A reader may return, or raise the errors of its target,
with one printable line.  Another exception, a longer time than SECONDS, or more memory than MEMORY is a failure.
"""
import argparse
import asyncio
import atexit
import bz2
import contextlib
import functools
import gzip
import importlib.util
import io
import itertools
import json
import lzma
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from conftest import ROOT
from fuzz_readers import (
    cifar_files,
    corpus_caches,
    indexes,
    marian_folders,
    recipes_of_layers,
    run_cifar,
    run_corpus_cache,
    run_index,
    run_marian,
    run_recipe_file,
    run_test_set,
)
from mutators import (
    LARGEST,
    any_of,
    changed_json,
    changed_lines,
    changed_npy,
    changed_pickle,
    changed_safetensors,
    folder_bytes,
    folder_files,
    in_folder,
    in_zip,
    safetensors_file,
    safetensors_parts,
    unpacked,
    words,
)
from probes import Probes

from pyops import action_file, checkpoint, formats, rewind
from pyops.backend import library
from pyops.data import idx
from pyops.errors import UserError
from pyops.inspect import logs
from pyops.inspect.checks import Refused
from pyops.inspect.readers import list_tensors, read
from pyops.quantization import Recipe
from pyops.steplog import Timeline
from pyops.text.corpus import Corpus
from pyops.text.mapped import Packed, pack

GOLDEN = ROOT / 'tests' / 'golden'
SECONDS = 10                # of processor time that an input may take; on the clock 12 times as many
MEMORY = 512 << 20          # bytes that an input may add to the memory of the process
SPACE = 4 << 30             # bytes of address space for it: an allocation of more raises MemoryError, a failure


class Target(NamedTuple):
    """seeds(folder) returns valid inputs; it may write in the folder.   mutate(rng, data) returns another input
    run(path) reads the input in a file, in a folder of its own; run(data) if in_memory;  errors: documented for bad input
    is_folder: an input is the files of a folder (mutators.folder_bytes), and path is the folder"""
    seeds: Callable[[Path], list[bytes]]
    mutate: Callable[[random.Random, bytes], bytes]
    run: Callable[[Path], object] | Callable[[bytes], object]
    errors: tuple[type[BaseException], ...] = (UserError,)
    suffix: str = ''
    in_memory: bool = False
    is_folder: bool = False

    def given(self, data, folder):
        """Return what `run` takes: the input, or where its files are now.   folder: an empty one, as a text"""
        if self.in_memory:
            return data
        if self.is_folder:
            for name, content in folder_files(data).items():
                _write(f'{folder}/{name}', content)
            return _path(folder)
        _write(path := f'{folder}/checkpoint_20260101_000000_1{self.suffix}', data)
        return _path(path)


_path = functools.lru_cache(32)(Path)       # the same ones for all inputs
_TIMES = itertools.count(10**18)            # nanoseconds


def _write(path, data):
    stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(stream, data)
        # Long ago, and never twice at the same time: a reader that reads a header once for all tensors of a file keeps it.
        os.utime(stream, ns=2 * (next(_TIMES),))
    finally:
        os.close(stream)


# ---- targets ------------------------------------------------------------------------------------------------------------

def _tensors():
    rng = np.random.default_rng(0)
    return {'parameter/a.weight': rng.standard_normal((2, 3)).astype(np.float32), 'm': np.zeros(4, np.float32),
            'count': np.array(3, np.int64), 'mask': np.array([True, False]), 'empty': np.zeros((0, 2), np.float16)}


def _checkpoints(folder):
    path, state = folder / 'seed.safetensors', {'program': 'seq2seq', 'settings': {'schedule': 'constant', 'seed': 1},
                                                'run': {'epoch': 3, 'id': 'a'}, 'vocabularies': ['<pad>', 'é'], 'by_time': True}
    found = []
    for tensors in (_tensors(), {}):
        checkpoint.save(path, tensors, state)
        header, rest = safetensors_parts(path.read_bytes())
        header['__metadata__'] = dict(sorted(header['__metadata__'].items()))           # the library writes any order
        found.append(safetensors_file(header, rest))
    return found


def _sign(header, rest):
    """Make the checksums of a checkpoint right."""
    metadata, tensors = header['__metadata__'].copy(), {}       # the mutators keep the one of the input
    for key, tensor in header.items():
        if key != '__metadata__':
            first, end = tensor['data_offsets']             # numpy.ndarray(buffer=..., offset=...) takes a negative offset
            tensors[key] = np.frombuffer(rest[first:end], checkpoint._DTYPES[tensor['dtype']]).reshape(tensor['shape'])
    text = metadata['state'] + metadata.get('name', '')
    metadata['sha256'] = checkpoint._digest(tensors, text)
    metadata['parameters_sha256'] = checkpoint._digest(checkpoint._parameters(tensors), text)
    header['__metadata__'] = metadata


def _run_checkpoint(path):
    found, errors = [], []
    for mapped in (False, True):
        for parameters_only in (False, True):
            try:
                found.append(checkpoint.load(path, mapped, parameters_only))
            except UserError as error:
                errors.append(error)
    for tensors, state in found:
        assert repr(state) == repr(found[0][1])
        assert all(tensors[key].tobytes() == found[0][0][key].tobytes() for key in tensors)
    checkpoint.check_program(checkpoint.find(path.parent, serving=True), 'seq2seq')
    if errors:
        raise errors[0]


def _idx_files(folder):
    found = []
    for name, array in (('a', np.arange(24, dtype=np.uint8).reshape(2, 3, 4)), ('b', np.arange(5, dtype=np.uint8))):
        for suffix in ('', '.gz'):
            idx.write(folder / f'{name}{suffix}', array)
            found.append((folder / f'{name}{suffix}').read_bytes())
    return found


def _run_idx(path):
    array = idx.read(path)
    idx.write(path, array)
    assert np.array_equal(idx.read(path, idx._MAGIC[array.ndim]), array)


TEXT = 'Go now.\tVa maintenant.\nHe “sleeps”.\tIl dort.\tCC-BY\n\nCan\u2019t we go?\tNe pouvons-nous pas y aller ?\n'.encode()
TEST_SET = b'eng\tfra\tHe sings.\tIl chante.\n\neng\tfra\tHe sings.\tIl est chanteur.\neng\tfra\tGo now.\tVa !\n'


def _corpora(folder):
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('fra.txt', TEXT)
        archive.writestr('_about.txt', b'a note')
    return [TEXT, gzip.compress(TEXT, mtime=0), bz2.compress(TEXT), lzma.compress(TEXT), out.getvalue()]


def _run_corpus(path):
    corpus = Corpus.load(path)
    assert len(corpus.texts()) == len(corpus.raw()) == len(corpus) > 0
    for vocabulary, side in zip(corpus.vocabularies(1), (corpus.sources, corpus.targets), strict=True):
        assert len(vocabulary.encode(side)) == len(corpus)


def _folders(path):
    """Return the bytes of the files in a folder."""
    return folder_bytes({file.name: file.read_bytes() for file in path.iterdir()})


def _packed_folders(folder):
    text, found = folder / 'text', []
    text.write_bytes(TEXT)
    for tokenizer in ('word', 'bpe') if importlib.util.find_spec('tokenizers') else ('word',):
        pack(str(text), str(folder / tokenizer), dict(tokenizer=tokenizer, min_count=1, vocabulary=265, num_steps=8),
             str(text) if tokenizer == 'bpe' else None)
        found.append(_folders(folder / tokenizer))
    return found


def _run_packed(folder):
    packed = Packed(str(folder))
    source, target = packed.vocabularies()
    for part in ('train', 'validation'):
        pairs = packed.pairs(part)
        for ragged, tokenizer in ((pairs.source, source), (pairs.labels, target)):
            assert sum(len(ragged[number]) for number in range(len(ragged))) == len(ragged.ids)
            assert not len(tokenizer) or tokenizer.words([0])
        pairs.digest()


def _saved_safetensors(folder):
    kinds = {'F64': 8, 'F32': 4, 'F16': 2, 'BF16': 2, 'F8_E4M3': 1, 'F8_E5M2': 1, 'I64': 8, 'U8': 1, 'BOOL': 1}
    header, end = {'__metadata__': {'pyops': '{"kind": "tensor"}'}}, 0
    for kind, item in kinds.items():
        header[kind] = {'dtype': kind, 'shape': [2, 3], 'data_offsets': [end, end + 6 * item]}
        end += 6 * item
    return [safetensors_file(header, bytes(range(256))[:end]), _quantized_weights()]


def _quantized_weights():
    """Return a checkpoint with weights in the layouts of packed.py."""
    about = {'_type': 'NVFP4Tensor', '_data': {'block_size': 16, 'is_swizzled_scales': True},
             '_tensor_data_names': ['qdata', 'scale']}
    header, end = {'__metadata__': {'t.weight': json.dumps(about), 'tensor_names': '["t.weight"]'}}, 0
    for key, dtype, item, shape in (
            ('d.weight', 'F8_E4M3', 1, [3, 4]), ('d.weight_scale_inv', 'F32', 4, [1, 1]), ('i.weight', 'I8', 1, [2, 4]),
            ('i.weight_scale', 'F32', 4, [2, 2]), ('i.weight_zero_point', 'I8', 1, [2, 2]),
            ('n.weight_packed', 'U8', 1, [2, 8]),
            ('n.weight_scale', 'F8_E4M3', 1, [2, 1]), ('n.weight_global_scale', 'F32', 4, [1]),
            ('p.weight_packed', 'I32', 4, [2, 1]), ('p.weight_scale', 'BF16', 2, [2]), ('p.weight_shape', 'I64', 8, [2]),
            ('g_blocks', 'U8', 1, [2, 1, 16]), ('g_scales', 'U8', 1, [2, 1]), ('t._weight_qdata', 'U8', 1, [2, 8]),
            ('t._weight_scale', 'F8_E4M3', 1, [32, 16])):
        size = item * math.prod(shape)
        header[key] = {'dtype': dtype, 'shape': shape, 'data_offsets': [end, end + size]}
        end += size
    data = bytearray(bytes(range(256)) * 3)[:end]
    at = header['p.weight_shape']['data_offsets'][0]
    data[at:at + 16] = np.array([2, 7], '<i8').tobytes()
    return safetensors_file(header, bytes(data))


def _saved_npy(folder):
    found, table = [], np.arange(6.0).reshape(2, 3)
    for array in (table, table.T.astype('>f4'), np.array(3, np.int16), np.ones(0, bool)):
        np.save(folder / 'a.npy', array)
        found.append((folder / 'a.npy').read_bytes())
    return found


def _legacy(kind, number, offset, shape, strides, dtype=''):
    """Return the opcodes of a tensor in a pickle of torch.save."""
    def of(value):
        return pickle.dumps(value, 2)[2:-1]
    storage = b'(' + of('storage') + b'ctorch\n' + kind.encode() + b'\n' + of(number) + of('cpu') + of(6) + b'tQ'
    function, last = (b'_rebuild_tensor_v3', b'ctorch\n' + dtype.encode() + b'\n') if dtype else (b'_rebuild_tensor_v2', b'')
    return (b'ctorch._utils\n' + function + b'\n(' + storage + of(offset) + of(shape) + of(strides)
            + b'\x89ccollections\nOrderedDict\n)R' + last + b'tR')


def _saved_pt(folder):
    """Files as torch.save writes them, in both layouts, without torch."""
    def of(value):
        return pickle.dumps(value, 2)[2:-1]
    items = [of('a') + _legacy('FloatStorage', '0', 0, (2, 3), (3, 1)),
             of('b') + _legacy('HalfStorage', '1', 1, (2, 2), (1, 2)),
             of('c') + _legacy('ByteStorage', '2', 0, (6,), (1,), 'float8_e5m2'), of('metadata') + of({'rank': 1}),
             of('d') + b'(' + of('text') + _legacy('FloatStorage', '0', 5, (1, 300), (0, 0)) + b't']
    payload = b'\x80\x02}(' + b''.join(items) + b'u.'
    storages = {'0': np.arange(6, dtype='<f4').tobytes(), '1': np.arange(6, dtype='<f2').tobytes(), '2': bytes(range(6))}
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w') as archive:
        for name, content in {'data.pkl': payload, 'byteorder': b'little', 'version': b'3\n',
                              **{f'data/{key}': content for key, content in storages.items()}}.items():
            archive.writestr(f'archive/{name}', content)
    head = b''.join(pickle.dumps(value, 2) for value in (0x1950a86a20f9469cfc6c, 1001, {'little_endian': True}))
    return [out.getvalue(), head + payload + pickle.dumps(list(storages), 2)
            + b''.join((6).to_bytes(8, 'little') + content for content in storages.values())]


def _run_saved(path):
    found = list_tensors(str(path))
    for key, shape, _, _ in found[:20]:
        array = read(str(path), key)
        assert array.shape == tuple(shape) and array.dtype == np.float32


def _run_logs(folder):
    found = logs.Logs(folder, empty=True)
    for file, reason in found.skipped:
        assert (file + reason).isprintable() and len(reason) < 1000, reason
    for entry in found.entries:
        assert entry.title.isprintable() and entry.place.isprintable() and re.fullmatch(r'[A-Za-z0-9_.-]*', entry.stem)
        for call in (entry.load, lambda entry=entry: found.mask(entry), lambda entry=entry: found.tokens(entry, 0)):
            with contextlib.suppress(UserError):
                call()
        assert entry.fmt is None or entry.fmt.name == entry.format.partition(':')[0]
    logs.places(found.entries)
    assert all(name.isprintable() for name in logs.curves(found.steps))
    found.refresh()


def _run_steps(folder):
    timeline = Timeline(folder)
    for start, end in ((0, len(timeline)), (3, 7)):
        assert all(start <= first < stop <= end for _, first, stop in timeline.parts(start, end))
    for step in (timeline.first, len(timeline) - 1, 1 << 60):
        with contextlib.suppress(UserError):
            timeline.check(step)
            rewind.checkpoint_before(timeline, step)


def _step_logs(folder):
    found = {file.name: file.read_bytes() for file in (GOLDEN / 'checkpoint_2').glob('steps_*')}
    lines = (b'{"session": 0, "flags": ["-e", "1"], "program": "mnist", "folder": "."}\n'
             b'\n{"saved": "a", "step": 3}\n{"session": 3}\n')
    return [folder_bytes(found), folder_bytes({'steps_x.jsonl': lines, 'steps_x.f32': bytes(range(60)), 'a': b''})]


def _run_header(data):
    for name, function in library.functions(data.decode(errors='replace')).items():
        assert name.startswith('pyops_') and all(argument.name.isidentifier() or not argument.name.isascii() or
                                                 argument.name[0].isdigit() for argument in function.arguments)


def _headers(folder):
    """The header, a few prototypes at a time: a whole one would take most of the time."""
    text = (ROOT / 'csrc' / 'pyops.h').read_bytes()
    return [text[start:start + 1000] for start in range(0, len(text), 4000)]


RECIPES = ('mxfp8', 'fwd=mxfp8,dgrad.g=hifp8,attention=mxfp4:scale=even', 'fwd=mxfp4,wgrad=none@encoder.*,output;all=e4m3@*',
           'hifp8:round=stochastic', 'int8:block=32x32', 'nvfp4:hadamard=16:signs=3', 'linear=bf16;attn.q=fp16@decoder', 'none',
           'mxfp8:elem=e5m2:scale=rceil:block=16', 'loss > 10', 'norm is not finite', 'loss <= 1e-3')


def _run_text(data):
    """Read a text as a number format, as a recipe and as a condition; what is read has a text that means the same."""
    text, errors = data.decode(errors='surrogateescape'), []
    for run in (_run_format, _run_recipe, rewind.condition):
        try:
            run(text)
        except UserError as error:
            errors.append(error)
    if len(errors) == 3:
        raise errors[0]
    for error in errors:
        check_line(error)


def _run_format(text):
    found = formats.parse(text)
    assert formats.parse(str(found)) == found


def _run_recipe(text):
    found = Recipe.parse(text)
    again = Recipe.parse(str(found))
    assert (again.formats, again.sections) == (found.formats, found.sections)


# ---- requests ----------------------------------------------------------------------------------------------------------

REQUESTS = [f'{line} HTTP/1.1\r\nHost: x\r\n{head}\r\n{body}'.encode() for line, head, body in (
    ('POST /translate', 'Content-Type: application/json\r\n', '{"text": "Go now."}'),
    ('POST /translate', 'Authorization: Bearer token\r\nExpect: 100-continue\r\nContent-Length: 99\r\n',
     '{"texts": ["He is sleeping.", "No."], "beam": 2, "nbest": 2, "length_penalty": 0.5, "max_len": 5, "alignments": true}'),
    ('GET /health', '', ''), ('GET /metrics', 'Authorization: Bearer token\r\n', ''), ('GET /openapi.json', '', ''),
    ('GET /', 'Sec-Fetch-Site: cross-site\r\n', ''), ('GET /static/page.js', '', ''), ('HEAD /docs', '', ''))]
_FIELDS = ('text', 'texts', 'beam', 'nbest', 'length_penalty', 'max_len', 'alignments', 'POST', 'GET', '/translate',
           '/static/..', 'Content-Length', 'Authorization', '1e999', '"beam": 9', '"nbest": 0', '"max_len": -1')


def _changed_body(rng, data):
    head, end, body = data.partition(b'\r\n\r\n')
    return head + end + any_of(changed_json, words(*_FIELDS))(rng, body)


@functools.cache
def _applications():
    """Return the applications of a small transformer, without and with a token."""
    from server import model

    from pyops.serve.api import Limits
    from pyops.serve.application import Application, Settings
    from pyops.serve.batching import Batcher
    from pyops.serve.metrics import Metrics
    from pyops.serve.workers import Local
    limits = Limits(body=20_000, texts=8, characters=300)
    counters = Metrics()
    batcher = Batcher([Local(model())], counters, 16, wait=0.0)
    settings = [Settings(limits=limits, token=token, quiet=True) for token in (None, 'token')]
    return [Application(model().about, batcher, counters, each) for each in settings]


def _run_request(data):
    head, _, body = data.partition(b'\r\n\r\n')
    first, *lines = head.split(b'\r\n')
    method, target, *_ = [*first.split(b' '), b'', b'']
    headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b':') for line in lines)]
    place, _, query = target.partition(b'?')
    scope = {'type': 'http', 'asgi': {'version': '3.0'}, 'http_version': '1.1', 'method': method.decode('latin-1'),
             'path': place.decode(errors='replace'), 'raw_path': target, 'query_string': query, 'headers': headers,
             'client': ('127.0.0.1', 1), 'server': ('127.0.0.1', 80), 'scheme': 'http', 'root_path': ''}
    loop = _loop()
    try:
        for application in _applications():
            loop.run_until_complete(_answer(application, dict(scope), body))
    finally:
        for task in asyncio.all_tasks(loop):        # of a request that was refused or left
            task.cancel()


@functools.cache
def _loop():
    """Return the event loop of all requests: a new one for each takes longer than most answers."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


async def _answer(application, scope, body):
    """Send a request, and check the answer."""
    parts, sent = [body[:len(body) // 2], body[len(body) // 2:]], []

    async def receive():
        if not parts:
            await asyncio.Event().wait()                    # the client waits for the answer
        part = parts.pop(0)
        return {'type': 'http.request', 'body': part, 'more_body': bool(parts)}

    async def send(message):
        sent.append(message)
    await application(scope, receive, send)
    status, content = sent[0]['status'], b''.join(message.get('body', b'') for message in sent[1:])
    assert status in (200, 307) or 400 <= status < 499, (status, content[:300])     # 307: a / too many at the end
    if status >= 400 and scope['method'] != 'HEAD':
        line = json.loads(content)['error']
        assert line.isprintable() and len(line) <= 400, line
    elif status == 200 and scope['path'] == '/translate':
        assert isinstance(json.loads(content, parse_constant=_no_number)['translations'], list)


def _no_number(name):
    raise ValueError(f'{name} in an answer')


# ---- command lines -------------------------------------------------------------------------------------------------------

@functools.cache
def _parsers():
    from scripts import flag_tables, soak
    return {**flag_tables.parsers(), 'scripts.soak': soak.parser()}


def _options(parser):
    return [action for action in parser._actions
            if not isinstance(action, (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction))]


def _command_lines(folder):
    """A line for each flag of each program, with a value that may be valid."""
    found = []
    for name, parser in _parsers().items():
        found.append([name])
        for action in _options(parser):
            value = [] if action.nargs == 0 else [str((list(action.choices or ()) or [action.default or 1])[0])]
            found.append([name, *action.option_strings[-1:], *value])
    return ['\0'.join(line).encode(errors='replace') for line in found]


_FLAG_VALUES = '1', '0', '-1', '1e-3', 'nan', 'a,b', '0-3', '1:2', '--', '-', '', '1e999', 'mxfp8', '\x1b[2J'


def _changed_line(rng, data):
    line = data.decode(errors='surrogateescape').split('\0')
    options = [text for action in _options(_parsers()[line[0]]) for text in action.option_strings]
    for _ in range(rng.choice((1, 1, 2, 4))):
        place, kind = rng.randrange(1, len(line) + 1), rng.randrange(6)
        if kind == 0:
            line.insert(place, rng.choice(options or ['--help']))
        elif kind == 1 and place < len(line):
            del line[place]
        elif kind == 2 and place < len(line):
            changed = words()(rng, line[place].encode(errors='replace'))
            line[place] = changed.decode(errors='surrogateescape').replace('\0', ' ')
        elif kind == 3:
            line.insert(place, rng.choice(_FLAG_VALUES))
        elif kind == 4 and options:
            line.insert(place, rng.choice(options) + '=' + rng.choice(('1', '', 'x', '-1', '9' * 30, '\n')))
        else:
            line[0] = rng.choice(sorted(_parsers()))
    return '\0'.join(line).encode(errors='surrogatepass')


def _run_line(data):
    program, *arguments = data.decode(errors='surrogateescape').split('\0')
    if program not in _parsers():
        return
    try:
        _parsers()[program].parse_args(arguments)
    except SystemExit as left:
        text = sys.stderr.getvalue()
        assert left.code == 0 or left.code == 2 and 'error: ' in text, (left.code, text)
        if left.code:
            line, = text.splitlines()
            raise UserError(line) from left


TARGETS = {
    'checkpoint': Target(_checkpoints, any_of(functools.partial(changed_safetensors, sign=_sign, texts=('state',))),
                         _run_checkpoint, suffix='.safetensors'),
    'idx': Target(_idx_files, any_of(unpacked(words())), _run_idx),
    'corpus': Target(_corpora, any_of(unpacked(words('\t', '\n', '.')), in_zip(words('\t', '\n'))), _run_corpus),
    'packed': Target(_packed_folders, any_of(in_folder({'.json': changed_json, '.npy': any_of(changed_npy)})),
                     _run_packed, is_folder=True),
    'safetensors': Target(_saved_safetensors, any_of(changed_safetensors), _run_saved, (Refused, OSError), '.safetensors'),
    'npy': Target(_saved_npy, any_of(changed_npy), _run_saved, (Refused, OSError), '.npy'),
    'pt': Target(_saved_pt, any_of(in_zip(changed_pickle), changed_pickle), _run_saved, (Refused, OSError), '.pt'),
    'manifest': Target(lambda folder: [_folders(GOLDEN / 'dump_1')],
                       any_of(in_folder({'.jsonl': any_of(changed_lines), '': any_of(changed_safetensors)})),
                       _run_logs, is_folder=True),
    'steps': Target(_step_logs, any_of(in_folder({'.jsonl': any_of(changed_lines), '': any_of()})), _run_steps, is_folder=True),
    'action': Target(lambda folder: [(GOLDEN / 'action_1.safetensors').read_bytes()],
                     any_of(functools.partial(changed_safetensors, texts=('call',))), action_file.load),
    'header': Target(_headers, any_of(words('PYOPS_API', 'const', 'pyops_real', 'void', 'float', '*', '(', ');', '/*', '*/')),
                     _run_header, (ValueError,), in_memory=True),
    'recipe': Target(lambda folder: [text.encode() for text in RECIPES],
                     any_of(words(*formats.FORMATS, 'fwd', 'wgrad', 'attn.q', 'round', 'scale', 'block', 'hadamard', '1x32')),
                     _run_text, in_memory=True),
    'recipe_file': Target(recipes_of_layers, any_of(changed_json, words(*formats.FORMATS, 'fwd', 'dgrad.g', 'delayed', 'elem')),
                          run_recipe_file, in_memory=True),
    'marian': Target(marian_folders,
                     any_of(in_folder({'.json': any_of(changed_json), '.safetensors': any_of(changed_safetensors),
                                       '.npz': in_zip(changed_npy, words('type', ': ', '[', '*a', '&a')),
                                       '.yml': words('"', ': ', '[', '*a', '&a', '\n'), '': any_of()})),
                     run_marian, is_folder=True),
    'cifar': Target(cifar_files, any_of(changed_pickle), run_cifar),
    'test_set': Target(lambda folder: [*_corpora(folder), TEST_SET, gzip.compress(TEST_SET, mtime=0)],
                       any_of(unpacked(words('\t', '\n', 'eng', 'fra')), in_zip(words('\t', '\n'))), run_test_set),
    'index': Target(indexes, any_of(changed_json), run_index),
    'cache': Target(corpus_caches, any_of(), run_corpus_cache),
    'request': Target(lambda folder: _applications() and REQUESTS, any_of(_changed_body, _changed_body, words(*_FIELDS)),
                      _run_request, in_memory=True),
    'command': Target(_command_lines, any_of(_changed_line), _run_line, in_memory=True)}


# ---- running an input ----------------------------------------------------------------------------------------------------

_TIMERS = {signal.SIGPROF: (signal.ITIMER_PROF, SECONDS), signal.SIGALRM: (signal.ITIMER_REAL, 12 * SECONDS)}
_most = sys.maxsize         # bytes of memory of the process at which an input is a failure
PROBES = Probes(ROOT / 'pyops')


class Hang(BaseException):
    """An input took longer than SECONDS."""


class Failure(NamedTuple):
    """kind: the same for inputs with the same cause"""
    kind: str
    text: str


def check_line(error):
    text = str(error)
    assert text.isprintable() and text, f'not one printable line: {text[:300]!r}'


@contextlib.contextmanager
def limits(folder):
    """Inside the block, an input that takes too long raises Hang, and one that takes too much memory MemoryError.

    folder: a path; inputs run in a new folder there, the current one inside the block
    """
    def stop(*_):
        raise Hang(f'longer than {SECONDS} seconds')
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    before, home = {number: signal.signal(number, stop) for number in _TIMERS}, os.getcwd()
    os.makedirs(place := os.path.join(folder, 'input'))
    os.chdir(place)
    resource.setrlimit(resource.RLIMIT_AS, (used + SPACE, hard))
    measure_memory()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        os.chdir(home)
        shutil.rmtree(place)
        for number, handler in before.items():
            signal.signal(number, handler)


def measure_memory():
    """Let inputs add MEMORY to what the process has now.  Inside limits(), from time to time: a cache may grow."""
    global _most
    with contextlib.suppress(OSError):
        Path('/proc/self/clear_refs').write_text('5')       # resets the largest memory
    used = int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()
    _most = max(used + MEMORY, _largest_memory())           # larger if this process was started by a larger one


def _largest_memory():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def outcome(target, data):
    """Run an input inside limits().   Return None if the reader returned, the name of its error, or a Failure."""
    outputs, sys.stdout = (sys.stdout, sys.stderr), io.StringIO()
    sys.stderr = sys.stdout
    try:
        given = target.given(data, os.getcwd())
        try:
            for timer, seconds in _TIMERS.values():
                signal.setitimer(timer, seconds)
            try:
                target.run(given)
            finally:
                for timer, _ in _TIMERS.values():
                    signal.setitimer(timer, 0)
            found = None
        except target.errors as error:
            found = type(error).__name__
            try:
                check_line(error)
            except AssertionError as other:
                found = _failure(other.with_traceback(error.__traceback__))
        except (Exception, Hang, SystemExit) as error:
            found = _failure(error)
    finally:
        sys.stdout, sys.stderr = outputs
        for name in os.listdir():
            os.unlink(name)
    if (used := _largest_memory()) > _most:
        used -= _most - MEMORY
        measure_memory()
        return found if isinstance(found, Failure) else Failure('memory', f'{used >> 20} MiB of memory')
    return found


def _failure(error):
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(ROOT))]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    name = type(error).__name__
    return Failure(f'{name} {Path(last.filename).name}:{last.lineno}',
                   ' '.join(f'{name} at {last.filename}:{last.lineno}: {ascii(str(error))[:300]}'.split()))


BLOCK = 1000                # inputs after which the memory is measured again
_REPEATED = 100             # draws without an input that is new; then one is run again
_NOTED = 1 << 20            # inputs that are compared with the next ones
_CHANGES = 4, 16, 32        # new inputs in a row that are changes of the same one: mutators keep its parts


def fuzz(name, seed, folder, before=lambda data: None, corpus=None):
    """Run inputs of a target without end, and yield (input, outcome) for each: the valid ones, then changed ones.

    before(data) is called before each.   The inputs depend on the name, the seed, the corpus, and the lines that they reach.
    corpus: a list of inputs of other runs, which run first and are not yielded unless they fail; afterwards it has those that
            reach lines that no other one before reaches
    """
    target, rng, corpus = TARGETS[name], random.Random(f'{name} {seed}'), [] if corpus is None else corpus
    (seeds := folder / 'seeds').mkdir()
    pool, noted = target.seeds(seeds), set()
    found_earlier, corpus[:] = list(corpus), []

    def run(data):
        """Return the outcome of an input, and whether it reaches a new line."""
        before(data)
        found = outcome(target, data)
        return found, PROBES.has_new()
    PROBES.install()
    try:
        with limits(folder):
            for number, data in enumerate(pool):
                found, _ = run(data)
                assert found is None or name == 'command', f'input {number} of {name} is not valid: {found}'
                yield data, found
            PROBES.thin()                       # also finds what the valid inputs have imported
            measure_memory()
            for data in found_earlier:
                found, is_new = run(data)
                if isinstance(found, Failure):
                    yield data, found
                elif is_new:
                    corpus.append(data)
            pool += corpus
            number = left = 0
            while True:
                if not left:
                    one, left = rng.choice(pool), rng.choice(_CHANGES)
                left -= 1
                for repeated in range(_REPEATED):
                    data = rng.choice(pool) if repeated else one
                    for _ in range(rng.choice((1, 1, 2, 4))):
                        data = target.mutate(rng, data)[:LARGEST]
                    if hash(data) not in noted:
                        break
                if len(noted) == _NOTED:
                    noted.clear()
                noted.add(hash(data))
                found, is_new = run(data)
                if is_new:
                    pool.append(data)
                    if not isinstance(found, Failure):
                        corpus.append(data)
                yield data, found
                number += 1
                if number % BLOCK == 0:
                    if number // BLOCK in (1, 10, 100):
                        PROBES.thin()
                    measure_memory()
    finally:
        PROBES.remove()


def shortened(data, fails, tries=300):
    """Return a part of an input that also fails."""
    size = max(len(data) // 2, 1)
    while size and tries > 0:
        start = 0
        while start < len(data) and tries > 0:
            part, tries = data[:start] + data[start + size:], tries - 1
            if fails(part):
                data = part
            else:
                start += size
        size //= 2
    return data
