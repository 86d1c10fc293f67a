"""The files of llm.c (github.com/karpathy/llm.c), GPT-2's weights and tokens, and its training step as a contestant.

A file begins with 256 int32: magic, version, sizes.  The weights follow as float32, tensor by tensor, in the order of shapes();
tokens follow as uint16.  llm.c pads the vocabulary to a multiple of 128 rows of the embedding, which no token uses.
"""
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.results import ROOT
from pyops.errors import UserError

HEADER = 256                                    # int32 numbers
MODEL, MODEL_VERSION = 20240326, 3              # magic numbers of a file; version 3: float32, the vocabulary padded
TOKENS, TOKENS_VERSION = 20240520, 1
# train_gpt2 is built with these: llm.c's Makefile, with OpenMP.  clang is its default compiler.
FLAGS = ['-Ofast', '-Wno-unused-result', '-Wno-ignored-pragmas', '-Wno-unknown-attributes', '-march=native', '-fopenmp',
         '-DOMP']
GET = 'git clone https://github.com/karpathy/llm.c'


class Size(NamedTuple):
    """Sizes of a GPT-2.   The default has 124 million parameters"""
    positions: int = 1024
    words: int = 50257
    layers: int = 12
    heads: int = 12
    width: int = 768

    @property
    def padded(self):
        """The rows of the embedding in a file."""
        return -(-self.words // 128) * 128


def shapes(size):
    """Return {name: shape} of the tensors, in the order of a file.

    wte, wpe: embeddings of words and positions;  ln: layer norms;  last letter w: weight, b: bias
    """
    L, C = size.layers, size.width
    return {'wte': (size.padded, C), 'wpe': (size.positions, C), 'ln1w': (L, C), 'ln1b': (L, C), 'qkvw': (L, 3 * C, C),
            'qkvb': (L, 3 * C), 'attprojw': (L, C, C), 'attprojb': (L, C), 'ln2w': (L, C), 'ln2b': (L, C),
            'fcw': (L, 4 * C, C), 'fcb': (L, 4 * C), 'fcprojw': (L, C, 4 * C), 'fcprojb': (L, C), 'lnfw': (C,), 'lnfb': (C,)}


def random_tensors(size, seed=0):
    """Yield (name, values float32) of random weights as in GPT-2 (Radford et al. 2019).

    They are normal with deviation 0.02, of the layers that add to the residual sum 0.02 / sqrt(2 layers).  Weights of layer
    norms are 1, biases and padding 0.
    """
    rng = np.random.default_rng(seed)
    for name, shape in shapes(size).items():
        if name.endswith('b'):
            values = np.zeros(shape, np.float32)
        elif name.startswith('ln'):
            values = np.ones(shape, np.float32)
        else:
            values = rng.standard_normal(shape, np.float32)
            values *= np.float32(0.02 * (2 * size.layers) ** -0.5 if 'proj' in name else 0.02)
            if name == 'wte':
                values[size.words:] = 0
        yield name, values


def _header(*numbers):
    header = np.zeros(HEADER, np.int32)
    header[:len(numbers)] = numbers
    return header


def write_model(path, size, tensors):
    """Write a checkpoint.   tensors: (name, values) in the order of shapes().   ValueError for another name or shape"""
    with open(path, 'wb') as file:
        file.write(_header(MODEL, MODEL_VERSION, *size, size.padded))
        for (want, shape), (name, values) in zip(shapes(size).items(), tensors, strict=True):
            if (name, np.shape(values)) != (want, shape):
                raise ValueError(f'expected {want} {shape}, got {name} {np.shape(values)}')
            file.write(np.ascontiguousarray(values, np.float32))


def _read_header(file, path, magic, version, what):
    header = np.fromfile(file, np.int32, HEADER)
    if len(header) < HEADER or tuple(header[:2]) != (magic, version):
        raise UserError(f'{path}: not {what} of llm.c: expected {magic} and version {version}, got '
                        f'{" and ".join(map(str, header[:2])) or "an empty file"}; write it with the scripts of llm.c')
    return header


def read_size(path):
    """Return the Size of a checkpoint.   UserError for another file"""
    with open(path, 'rb') as file:
        header = _read_header(file, path, MODEL, MODEL_VERSION, 'a checkpoint')
    size = Size(*header[2:7].tolist())
    if min(size) < 1 or header[7] != size.padded:
        raise UserError(f'{path}: sizes {header[2:8].tolist()}: expected 1 or more, and a padded vocabulary of {size.padded}')
    return size


def read_model(path):
    """Yield (name, values) of a checkpoint, one at a time; of wte only the rows of words.   UserError for another file"""
    size = read_size(path)
    with open(path, 'rb') as file:
        file.seek(4 * HEADER)
        for name, shape in shapes(size).items():
            values = np.fromfile(file, np.float32, int(np.prod(shape)))
            if len(values) < np.prod(shape):
                raise UserError(f'{path}: ends inside {name}; copy the file again')
            values = values.reshape(shape)
            yield name, values[:size.words] if name == 'wte' else values


def write_tokens(path, ids):
    """Write token ids (N,), each below 65536."""
    ids = np.asarray(ids)
    if ids.size and not 0 <= ids.min() <= ids.max() < 2**16:
        raise ValueError(f'ids: expected 0 to 65535, got {ids.min()} to {ids.max()}')
    with open(path, 'wb') as file:
        file.write(_header(TOKENS, TOKENS_VERSION, ids.size))
        file.write(ids.astype(np.uint16))


def read_tokens(path):
    """Return the token ids (N,) int32 of a file.   UserError for another file"""
    with open(path, 'rb') as file:
        header = _read_header(file, path, TOKENS, TOKENS_VERSION, 'tokens')
        ids = np.fromfile(file, np.uint16)
    if len(ids) != header[2]:
        raise UserError(f'{path}: has {len(ids)} tokens, expected {header[2]}; copy the file again')
    return ids.astype(np.int32)


def build(checkout, folder):
    """Compile llm.c's training step with bench/llmc_worker.c.  Return the program.   UserError without sources or compiler

    The compiler is $CC, or else the first of clang and gcc that can build it.
    """
    checkout, program = Path(checkout), folder / 'llmc_worker'
    if not (checkout / 'train_gpt2.c').is_file():
        raise UserError(f'--llmc {checkout}: has no train_gpt2.c; get llm.c with: {GET}')
    failed = ''
    for compiler in [os.environ['CC']] if os.environ.get('CC') else ['clang', 'gcc']:
        command = [compiler, *FLAGS, f'-I{checkout.resolve()}', str(ROOT / 'bench/llmc_worker.c'), '-lm', '-o', str(program)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            failed = failed or f'{compiler} is not installed'
            continue
        if done.returncode == 0:
            return program
        failed = next((line for line in done.stderr.splitlines() if 'error' in line), f'status {done.returncode}')
    raise UserError(f'--llmc {checkout}: cannot be compiled ({failed}); set CC to a compiler with OpenMP')
