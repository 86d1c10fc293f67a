"""Convert a translation model that was trained with Marian, such as opus-mt-en-fr, to a checkpoint of this package.

    python -m transformer.from_marian FOLDER -o opus.safetensors
    python -m transformer.translate -c opus.safetensors "Go now."

FOLDER has either layout; docs/marian.md says where to get the files:

    Hugging Face    config.json, model.safetensors, vocab.json, source.spm, target.spm
    Marian          one .npz with the weights, vocab.json or one .vocab.yml, source.spm, target.spm
"""
import json
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from pyops import programs
from pyops.errors import UserError, exits_cleanly
from pyops.flags import ArgumentParser, fraction, int_up_to, output_file

PROGRAM = 'transformer.from_marian'
SUFFIX = '.safetensors'
# The names of the activations in both layouts.  Marian's gelu is x sigmoid(1.702 x), so only the first layout has one.
ACTIVATIONS = {'swish': 'silu', 'silu': 'silu', 'relu': 'relu', 'gelu': 'gelu'}
MASKED = -1e9           # the logit of a token that is never predicted

# Settings that this model requires: {name: (value, the value if absent)}.
OF_HUB = {'scale_embedding': (True, False), 'tie_word_embeddings': (True, True),
          'share_encoder_decoder_embeddings': (True, True), 'normalize_before': (False, False),
          'normalize_embedding': (False, False), 'add_final_layer_norm': (False, False),
          'static_position_embeddings': (True, True)}
OF_MARIAN = {'type': ('transformer', ''), 'tied-embeddings-all': ('true', 'false'), 'transformer-postprocess': ('dan', 'dan'),
             'transformer-preprocess': ('', ''), 'transformer-ffn-depth': ('2', '2'),
             'transformer-train-position-embeddings': ('false', 'false'), 'transformer-no-projection': ('false', 'false'),
             'transformer-decoder-autoreg': ('self-attention', 'self-attention')}


def parser():
    p = ArgumentParser(prog=programs.command(PROGRAM), docstring=__doc__,
                       description='Convert a translation model of Marian to a checkpoint.')
    group = p.group('conversion')
    group.add_argument('folder', help='the folder with the files of the model')
    group.add_argument('-o', '--output', type=output_file, required=True, metavar='FILE',
                       help='the checkpoint to write, a name that ends in .safetensors (required)')
    group.add_argument('--num-steps', type=int_up_to(1000), default=128, metavar='N',
                       help='tokens per sentence, end mark included; longer sentences are cut (default %(default)s)')
    group.add_argument('--hold-out', type=fraction, default=0.1, metavar='F',
                       help='the sentences that transformer.evaluate scores: those which a training run with this --hold-out '
                       'holds out (default %(default)s)')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    if not args.output.endswith(SUFFIX):
        raise UserError(f'--output {args.output}: expected a name that ends in {SUFFIX}')
    from pyops import checkpoint
    tensors, state = convert(args.folder, args.num_steps, args.hold_out)
    checkpoint.save(args.output, tensors, state)
    settings = state['settings']
    print(f'{sum(tensor.size for tensor in tensors.values()):,} parameters: {settings["layers"]} + '
          f'{settings["decoder_layers"]} layers of {settings["d_model"]} and {settings["d_ff"]}, {settings["activation"]}, '
          f'{len(tensors["parameter/output.bias"])} tokens')
    print(f'saved : {args.output}')


class Model(NamedTuple):
    """The files of a model, read.

    path: of the weights, for messages;  tensors: {name in the file: array};  names: {our name: (name in the file, whether it is
    transposed)} of all but the embedding and the bias of the output
    ids: {token: row of the embedding};  pad, start: rows of the padding and of the decoder's first token, None: zeros
    """
    path: Path
    sizes: dict
    tensors: dict
    names: dict
    embedding: str
    bias: str
    ids: dict
    eos: int
    pad: int | None
    start: int | None


def convert(folder, num_steps=128, hold_out=0.1):
    """Return tensors and state of a checkpoint (pyops.checkpoint) of the transformer, from the folder of a Marian model.

    UserError if a file is missing or damaged, or the model is of another kind.
    """
    import numpy as np

    from pyops.text import tokenizer
    from pyops.text.vocabulary import BOS, EOS, PAD, SPECIALS, UNK

    from .model import Config, parameter_specs
    from .train import DEFAULTS
    model = read(Path(folder))
    if '<unk>' not in model.ids:
        raise UserError(f'{folder}: the vocabulary has no token <unk>; get the files of the model again')
    special = {PAD: model.pad, EOS: model.eos, UNK: model.ids['<unk>'], BOS: model.start}
    others = sorted((id, token) for token, id in model.ids.items() if id not in special.values())
    # Row -1 of the embedding, which is appended, is zeros: Marian decodes from an embedding of zeros.
    order = np.array([-1 if special[id] is None else special[id] for id in range(len(SPECIALS))] + [id for id, _ in others])
    sizes = model.sizes | dict(tied=True, bias=True, halves=True, num_steps=num_steps, positions=num_steps)
    config = Config(len(order), len(order), **sizes)

    tensors, used = {}, {model.embedding, model.bias}
    for name, spec in parameter_specs(config).items():
        if name == 'embedding.weight':
            rows = _tensor(model, model.embedding, (len(model.ids), config.d_model))
            tensor = np.concatenate([rows, np.zeros_like(rows[:1])])[order]
        elif name == 'output.bias':
            bias = _tensor(model, model.bias, (1, len(model.ids)))[0]
            tensor = np.append(bias, np.float32(0))[order]
            tensor[[PAD, BOS]] = MASKED
        else:
            theirs, transposed = model.names[name]
            used.add(theirs)
            shape = spec.shape[::-1] if transposed else spec.shape
            tensor = _tensor(model, theirs, (1, *shape) if len(shape) == 1 and transposed else shape)
            tensor = np.ascontiguousarray(tensor.T).reshape(spec.shape) if transposed else tensor
        tensors[f'parameter/{name}'] = tensor
    if extra := sorted(set(model.tensors) - used):
        raise UserError(f'{model.path}: holds {extra[0]}, which this model does not have; expected a model like opus-mt-en-fr')

    tokens = [*SPECIALS, *(token for _, token in others)]
    tokenizers = tuple(_pieces(Path(folder) / f'{side}.spm', tokens) for side in ('source', 'target'))
    known = {field.name for field in fields(Config)} - {'ops', 'source_size', 'target_size'}
    settings = DEFAULTS | {name: getattr(config, name) for name in known} | dict(tokenizer='marian', hold_out=hold_out)
    return tensors, dict(program='transformer', settings=settings, pairs=None, corpus=None,
                         vocabularies=tokenizer.states(tokenizers))


def _tensor(model, name, shape):
    """Return a tensor of a model as float32.  UserError unless it has this shape."""
    import numpy as np
    if name not in model.tensors or model.tensors[name].shape != shape:
        got = model.tensors[name].shape if name in model.tensors else 'none'
        raise UserError(f'{model.path}: {name}: expected shape {shape}, got {got}; get all files from the same model')
    if model.tensors[name].dtype.kind not in 'fiub':
        raise UserError(f'{model.path}: {name}: expected numbers, got {model.tensors[name].dtype}; get the file again')
    return model.tensors[name].astype(np.float32)


def _pieces(path, tokens):
    from pyops.text.pieces import Pieces
    try:
        return Pieces(_bytes(path), tokens)
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f'{path}: {error}') from error


# ---- files -----------------------------------------------------------------------------------------------------------

def read(folder):
    """Return the Model in a folder of either layout."""
    if not folder.is_dir():
        raise UserError(f'{folder}: expected a folder with the files of a model; docs/marian.md says where to get them')
    archives = sorted(folder.glob('*.npz'))
    if (folder / 'config.json').exists() or not archives:
        return _read_hub(folder)
    if len(archives) > 1:
        raise UserError(f'{folder}: holds {len(archives)} .npz files, {archives[0].name} and {archives[1].name}; '
                        'leave only the one to convert')
    return _read_marian(folder, archives[0])


def _read_hub(folder):
    from safetensors import SafetensorError
    from safetensors.numpy import load_file
    at = folder / 'config.json'
    config = _json(at)
    if config.get('model_type') != 'marian':
        raise UserError(f"{at}: model_type {_shown(config.get('model_type'))}: expected 'marian'; give the folder of a Marian "
                        'model')
    _check(at, config, OF_HUB)
    sizes = dict(d_model=_of(at, config, 'd_model'), layers=_of(at, config, 'encoder_layers'),
                 decoder_layers=_of(at, config, 'decoder_layers'), d_ff=_of(at, config, 'encoder_ffn_dim'),
                 heads=_of(at, config, 'encoder_attention_heads'),
                 activation=_activation(at, 'activation_function', config.get('activation_function'), ACTIVATIONS))
    for size, name in (('d_ff', 'decoder_ffn_dim'), ('heads', 'decoder_attention_heads')):
        if _of(at, config, name) != sizes[size]:
            raise UserError(f'{at}: {name} {config[name]}: expected {sizes[size]}, as in the encoder')
    ids = _vocabulary(folder / 'vocab.json', _json(folder / 'vocab.json'), _of(at, config, 'vocab_size'))
    eos, pad, start = (_of(at, config, name, len(ids)) for name in ('eos_token_id', 'pad_token_id', 'decoder_start_token_id'))

    path = folder / 'model.safetensors'
    if not path.exists() and (folder / 'pytorch_model.bin').exists():
        raise UserError(f'{path}: no such file, only pytorch_model.bin; convert it with: python -c "from transformers import '
                        f"MarianMTModel as M; M.from_pretrained('{folder}').save_pretrained('{folder}')\"")
    _must_exist(path)
    try:
        tensors = load_file(path)
        if any(tensor.dtype.name == 'bfloat16' for tensor in tensors.values()):     # if ml_dtypes is imported
            raise TypeError('bfloat16')
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{path}: cannot be read ({error}); expected tensors of float32 or float16: save them so, '
                        'or get the file again') from error
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith('embed_positions.weight')}
    tensors.setdefault('final_logits_bias', _zeros(1, len(ids)))
    _check_layers(path, sizes, tensors)
    names = {}
    for side, layer, ours, theirs, _ in _layers(sizes):
        names[f'{side}.{layer}.{ours}'] = f'model.{side}.layers.{layer}.{theirs}', False
    return Model(path, sizes, tensors, names, _embedding(path, tensors), 'final_logits_bias', ids, eos, pad, start)


def _read_marian(folder, path):
    import numpy as np
    try:
        with np.load(path) as archive:
            tensors = dict(archive)
        if other := next((name for name, tensor in tensors.items() if not isinstance(tensor, np.ndarray)), None):
            raise ValueError(f'{other} is no array')
        text = bytes(tensors.pop('special:model.yml').astype(np.uint8)).rstrip(b'\0').decode()
    except Exception as error:          # numpy parses the headers with Python's tokenizer, which raises its own errors
        raise UserError(f'{path}: not the weights of a Marian model ({type(error).__name__}: {error}); '
                        'get the file again') from error
    config = _yaml(path, text)
    _check(path, config, OF_MARIAN)
    sizes = {ours: _of(path, config, theirs) for ours, theirs in (
        ('d_model', 'dim-emb'), ('d_ff', 'transformer-dim-ffn'), ('heads', 'transformer-heads'), ('layers', 'enc-depth'),
        ('decoder_layers', 'dec-depth'))}
    sizes['activation'] = _activation(path, 'transformer-ffn-activation', config.get('transformer-ffn-activation'),
                                      {name: ACTIVATIONS[name] for name in ('swish', 'relu')})
    lists = sorted(folder.glob('*.vocab.yml'))
    if (folder / 'vocab.json').exists() or len(lists) != 1:
        at = folder / 'vocab.json'
        if not at.exists():
            raise UserError(f'{folder}: expected vocab.json or one .vocab.yml, got {len(lists)}; get all files of the model')
        found = _json(at)
    else:
        at, found = lists[0], _yaml(lists[0], _bytes(lists[0]).decode(errors='replace'))
    rows = len(tensors['Wemb']) if 'Wemb' in tensors and tensors['Wemb'].ndim else 0
    found = {token: id for token, id in found.items() if not (token == '<pad>' and id == rows)}      # added by Hugging Face
    ids = _vocabulary(at, found, rows)
    if '</s>' not in ids:
        raise UserError(f'{at}: has no token </s>; get the files of the model again')
    _check_layers(path, sizes, tensors)
    names = {}
    for side, layer, ours, _, theirs in _layers(sizes):
        names[f'{side}.{layer}.{ours}'] = f'{side}_l{layer + 1}_{theirs}', True
    return Model(path, sizes, tensors, names, 'Wemb', 'decoder_ff_logit_out_b', ids, ids['</s>'], None, None)


def _layers(sizes):
    """Yield (side, layer, our name, the name of Hugging Face, the name of Marian) of each parameter of a layer."""
    parts = [('feed_forward.w1', 'fc1.weight', 'ffn_W1'), ('feed_forward.b1', 'fc1.bias', 'ffn_b1'),
             ('feed_forward.w2', 'fc2.weight', 'ffn_W2'), ('feed_forward.b2', 'fc2.bias', 'ffn_b2'),
             ('feed_forward.norm.weight', 'final_layer_norm.weight', 'ffn_ffn_ln_scale'),
             ('feed_forward.norm.bias', 'final_layer_norm.bias', 'ffn_ffn_ln_bias')]
    for ours, theirs, marian in (('self_attention', 'self_attn', 'self'), ('cross_attention', 'encoder_attn', 'context')):
        for name in ('q', 'k', 'v', 'out'):
            parts += [(f'{ours}.{name}.weight', f'{theirs}.{name}_proj.weight', f'{marian}_W{name[0]}'),
                      (f'{ours}.{name}.bias', f'{theirs}.{name}_proj.bias', f'{marian}_b{name[0]}')]
        parts += [(f'{ours}.norm.weight', f'{theirs}_layer_norm.weight', f'{marian}_Wo_ln_scale'),
                  (f'{ours}.norm.bias', f'{theirs}_layer_norm.bias', f'{marian}_Wo_ln_bias')]
    for side, layers in (('encoder', sizes['layers']), ('decoder', sizes['decoder_layers'])):
        for layer in range(layers):
            for part in parts:
                if side == 'decoder' or not part[0].startswith('cross_attention'):
                    yield side, layer, *part


def _embedding(path, tensors):
    """Return the name of the embedding, and remove its copies from the tensors.  UserError if copies differ."""
    import numpy as np
    names = ['model.shared.weight', 'model.encoder.embed_tokens.weight', 'model.decoder.embed_tokens.weight', 'lm_head.weight']
    kept, *copies = [name for name in names if name in tensors] or names[:1]
    for name in copies:
        if not np.array_equal(tensors.pop(name), tensors[kept]):
            raise UserError(f'{path}: {name} differs from {kept}: expected one matrix for both embeddings and the output layer')
    return kept


def _check(path, config, required):
    for name, (value, absent) in required.items():
        if (got := config.get(name, absent)) != value:
            raise UserError(f'{path}: {name} {_shown(got)}: expected {value!r}; other kinds of models cannot be converted')


def _of(path, config, name, below=None):
    """Return a setting, a whole number: at least 1, or from 0 on below a bound."""
    value = config.get(name)
    if isinstance(value, str) and re.fullmatch('[0-9]{1,9}', value):
        value = int(value)
    least, most = (1, 10**12) if below is None else (0, below)
    if not isinstance(value, int) or value < least or value >= most:
        upper = f' and below {most}' + ', the size of the vocabulary' * (below is not None)
        raise UserError(f'{path}: {name} {_shown(value)}: expected a whole number of at least {least}{upper}; '
                        'get the file again')
    return value


def _activation(path, name, value, known):
    if not isinstance(value, str) or value not in known:
        raise UserError(f'{path}: {name} {_shown(value)}: expected one of {", ".join(known)}')
    return known[value]


def _shown(value):
    """Return the text of a setting for a message.  The text of a list may be endless: aliases of YAML repeat parts of it."""
    return repr(value)[:100] if isinstance(value, str | int | float | None) else f'of type {type(value).__name__}'


def _check_layers(path, sizes, tensors):
    """Raise UserError for more layers than tensors: a number of a damaged file would take hours."""
    if (layers := sizes['layers'] + sizes['decoder_layers']) > len(tensors):
        raise UserError(f'{path}: {layers} layers and {len(tensors)} tensors: expected several tensors a layer; get all files '
                        'from the same model')


def _vocabulary(path, ids, rows):
    """Return {token: row of the embedding}.  UserError unless there is one token for each row."""
    try:
        ids = {token: int(id) for token, id in ids.items()}
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f'{path}: expected one number per token ({error}); get the file again') from error
    if len(ids) != rows:
        raise UserError(f'{path}: holds {len(ids)} tokens, and the embedding has {rows} rows; '
                        'get all files from the same model')
    if sorted(ids.values()) != list(range(rows)):
        raise UserError(f'{path}: expected the ids 0 to {rows - 1}, each once; get the file again')
    return ids


def _zeros(*shape):
    import numpy as np
    return np.zeros(shape, np.float32)


def _must_exist(path):
    if not path.exists():
        raise UserError(f'{path}: no such file; docs/marian.md lists the files of a model')


def _bytes(path):
    _must_exist(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f'{path}: cannot be read ({os.strerror(error.errno)}); '
                        'give a folder of files that can be read') from error


def _json(path):
    try:
        value = json.loads(_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f'{path}: not JSON ({error}); get the file again') from error
    if not isinstance(value, dict):
        raise UserError(f'{path}: expected a JSON object, got {type(value).__name__}; get the file again')
    return value


def _yaml(path, text):
    """Return the mapping in a YAML text.  All scalars stay text, since `no` and `12` are tokens of a vocabulary."""
    try:
        import yaml
    except ImportError as error:
        raise UserError(f'{path}: contains YAML, and PyYAML is not installed: install it with: pip install pyyaml') from error
    try:
        value = yaml.load(text, getattr(yaml, 'CBaseLoader', yaml.BaseLoader))
    except (yaml.YAMLError, RecursionError) as error:      # without libyaml, deep nesting ends in a RecursionError
        raise UserError(f'{path}: damaged YAML ({error}); get the file again') from error
    if not isinstance(value, dict):
        raise UserError(f'{path}: expected a YAML mapping, got {type(value).__name__}; get the file again')
    return value


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
