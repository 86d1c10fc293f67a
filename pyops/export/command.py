"""python -m pyops export torch|ctranslate2|onnx CKPT OUT: the command line.

Packages and the library are imported when it runs, so --help is quick.
"""
import json
import os

from pyops.errors import UserError, printable, require
from pyops.files import new_folder, write_atomically

_SUFFIX = '.safetensors'


def add_commands(parser):
    """Declare the formats as subcommands of an ArgumentParser."""
    commands = parser.add_commands()
    file, folder = f'the file to write, a new name that ends in {_SUFFIX}', 'the folder to write, which must be new or empty'
    for name, text, metavar, help, run in (
            ('torch', 'a state_dict for PyTorch', 'FILE', file, to_torch),
            ('ctranslate2', 'a model of CTranslate2, of the transformer only', 'DIR', folder, to_ctranslate2),
            ('onnx', 'ONNX graphs of the encoder and of one decoder step', 'DIR', folder, to_onnx)):
        command = commands.add_parser(name, help=text)
        command.add_argument('checkpoint', metavar='CKPT', help='a checkpoint, or a folder: its best or newest checkpoint')
        command.add_argument('output', metavar=metavar, help=help)
        command.add_argument('--unrounded', action='store_true',
                             help='export a model that was trained with --quant, without its rounding')
        command.set_defaults(run=run)


def to_torch(options):
    """Write a state_dict as safetensors, with the settings of the model in the metadata."""
    path = options.output
    if not path.endswith(_SUFFIX):
        raise UserError(f'{printable(path)}: expected a name that ends in {_SUFFIX}')
    if os.path.lexists(path):                   # it may be the checkpoint itself
        raise UserError(f'{printable(path)}: exists; name a new file')
    if not os.path.isdir(os.path.dirname(path) or '.'):
        raise UserError(f'{printable(path)}: cannot be written; name a file in a folder that exists')
    trained = _read(options)
    from safetensors.numpy import save
    tensors = _converted(trained, 'torch_state', trained.config, trained.weights)
    metadata = {'format': 'pt', 'settings': json.dumps(trained.settings()), 'vocabularies': json.dumps(trained.vocabularies())}
    try:
        write_atomically(path, save(tensors, metadata))
    except OSError as error:
        raise _unwritable(path, error) from error
    return _saved(path)


def to_ctranslate2(options):
    """Write a folder for ctranslate2.Translator, with the files of the tokenizers."""
    def write(folder, trained):
        spec = _converted(trained, 'ctranslate2_spec', trained.config, trained.weights, trained.tokens())
        spec.validate()
        spec.optimize()
        spec.save(folder)
    return _write_folder(options, write, 'ctranslate2')


def to_onnx(options):
    """Write a folder with encoder.onnx, decoder_step.onnx, config.json, the vocabularies, and the files of the tokenizers."""
    def write(folder, trained):
        for name, model in _converted(trained, 'onnx_models', trained.config, trained.weights).items():
            _write(folder, f'{name}.onnx', model.SerializeToString())
        for side, tokens in zip(('source', 'target'), trained.tokens(), strict=True):
            _write(folder, f'{side}_vocabulary.json', json.dumps(tokens, ensure_ascii=False, indent=0).encode())
        _write(folder, 'config.json', json.dumps(trained.settings(), indent=2).encode())
    return _write_folder(options, write, 'onnx')


def _write_folder(options, write, package):
    """Call write(folder, trained) on a new folder, and add the files of the tokenizers."""
    path = options.output
    require('export', package, 'export')
    try:
        with new_folder(path) as folder:
            trained = _read(options)
            write(folder, trained)
            for name, content in trained.tokenizer_files().items():
                _write(folder, name, content)
    except FileExistsError as error:
        raise UserError(f'{printable(path)}: exists; name a new folder') from error
    except OSError as error:
        raise _unwritable(path, error) from error
    return _saved(path)


def _read(options):
    from pyops.export.trained import read
    return read(options.checkpoint, options.unrounded)


def _converted(trained, name, *arguments):
    """Return the result of a function of the program's module `export`.  UserError, which names the checkpoint, if the program
    lacks it, or the function refuses the model."""
    try:
        convert = getattr(trained.module, name, None)
        if convert is None:
            raise UserError(f'a model of {trained.program}, which this format cannot express; use `export onnx`')
        return convert(*arguments)
    except UserError as error:
        raise UserError(f'{trained.path}: {error}') from error


def _write(folder, name, content):
    with open(os.path.join(folder, name), 'wb') as file:
        file.write(content)


def _unwritable(path, error):
    return UserError(f'{printable(path)}: cannot be written ({error.strerror}); name another place, or free some disk space')


def _saved(path):
    print(f'saved : {printable(path)}')
    return 0
