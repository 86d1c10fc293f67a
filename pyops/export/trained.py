"""A trained model, read from a checkpoint to be written in another format."""
import dataclasses
import importlib
import json
import sys
from typing import NamedTuple

import numpy as np

from pyops import backend, checkpoint, programs
from pyops.errors import UserError
from pyops.text.tokenizer import states
from pyops.text.translator import of_checkpoint


class Trained(NamedTuple):
    """A trained model.

    program: 'seq2seq' or 'transformer';  path: of the checkpoint
    config: the Config of the program;  weights: {name of a parameter: float32 array}
    tokenizers: of sources and targets
    """
    program: str
    path: str
    config: object
    weights: dict[str, np.ndarray]
    tokenizers: tuple

    @property
    def module(self):
        """The program's module `export`."""
        return importlib.import_module(programs.module(f'{self.program}.export'))

    def settings(self):
        """Return the program, the sizes and settings of the model, and the ids of special tokens as a dict for JSON."""
        from pyops.text.vocabulary import BOS, EOS, PAD, UNK
        sizes = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config)
                 if field.name not in ('ops', 'dropout', 'smoothing', 'sigmoid_gain', 'tanh_gain')}     # of training
        return dict(program=self.program, pad=PAD, eos=EOS, unk=UNK, bos=BOS) | sizes

    def tokens(self):
        """Return the tokens of sources and of targets in the order of their ids, two lists of distinct strings."""
        return tuple(_tokens(tokenizer.state()) for tokenizer in self.tokenizers)

    def tokenizer_files(self):
        """Return {file name: content} of the files with which other programs split raw text into these tokens.

        tokenizer.json for the library `tokenizers`; source.spm and target.spm for SentencePiece; none for words.
        """
        source, target = (tokenizer.state() for tokenizer in self.tokenizers)
        if isinstance(source, list):
            return {}
        if 'spm' in source:
            import base64
            return {f'{side}.spm': base64.b64decode(state['spm']) for side, state in (('source', source), ('target', target))}
        return {'tokenizer.json': source['bpe'].encode()}

    def vocabularies(self):
        """Return the tokenizers as the JSON value that checkpoints have."""
        return states(self.tokenizers)


def read(path, unrounded=False):
    """Return the Trained of a checkpoint, or of the best or newest one of a folder, and print warnings to standard error.

    unrounded: accept a model that rounds its operands (--quant), and drop the rounding
    UserError if there is no such checkpoint, or it rounds its operands.
    """
    found = checkpoint.find(path, serving=True, parameters_only=True)
    settings = found.state.get('settings', {}) if isinstance(found.state, dict) else {}
    quant = settings.get('quant', 'none')
    if quant != 'none' and not unrounded:
        raise UserError(f'{found.path}: trained with --quant {quant}, which other programs cannot repeat; '
                        'give --unrounded to export the weights without rounding')
    translator = of_checkpoint(found, {'quant': 'none'})
    for line in found.warnings:
        print(line, file=sys.stderr)
    weights = {name: backend.get(value) for name, value in translator.model.params.arrays().items()}
    return Trained(found.state['program'], found.path, translator.model.config, weights,
                   (translator.source_vocabulary, translator.target_vocabulary))


def _tokens(state):
    """Return the tokens of a tokenizer's state()."""
    if isinstance(state, list):
        return state
    if 'spm' in state:
        return state['tokens']
    ids = json.loads(state['bpe'])['model']['vocab']
    return sorted(ids, key=ids.__getitem__)
