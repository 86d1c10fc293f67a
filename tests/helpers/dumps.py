"""A small dump of a transformer's step, written without training one and without pyops' writer: a reader can be held to it."""
import json
import os

import numpy as np
from safetensors.numpy import save_file

from pyops.inspect.statistics import describe

LAYERS = ('encoder.0.self_attention.q', 'encoder.0.self_attention', 'encoder.0.feed_forward.in')
OPERANDS = {'input', 'weight', 'grad_output', 'query', 'key', 'value', 'weights'}       # what a product takes, and rounds
SENTENCES = ('he is sleeping', 'we read it now', 'no')
HEADS, WIDTH = 2, 8                                     # of the attention, of a head


def make_dump(folder, steps=(0, 10), formats=('fp32',), layers=LAYERS, seed=0, tokens=True, as_='safetensors'):
    """Write the tensors of `layers` at each of `steps`, once for each of `formats` (texts of formats.parse, or fp32).

    Sentences of 4, 5 and 2 words with their ends, padded to 5: (T, B) = (5, 3), 16 features.
    -> {file: float32 array}
    """
    os.makedirs(folder, exist_ok=True)
    words = [[*sentence.split(), '<eos>'] for sentence in SENTENCES]
    lengths = [len(sentence) for sentence in words]
    arrays, lines, counter = {}, [], 0
    for run, text in enumerate(formats):
        lines.append({'kind': 'run', 'version': 1, 'program': 'transformer', 'origin': 'pyops',
                      'started': f'2026112{run}_120000', 'settings': {'quant': text, 'seed': seed}})
        for step in range(max(steps) + 1):
            if step in steps:
                lines.append({'kind': 'batch', 'step': step, 'lengths': {'source': lengths},
                              'tokens': {'source': words} if tokens else {}})
                for fields, array in _tensors(np.random.default_rng((seed, step)), step, lengths, layers):
                    counter += 1
                    line = _line(f'2026112{run}_1200{step % 60:02d}', counter, fields, array, step, text, lengths)
                    line['file'] += '.' + as_
                    _write(os.path.join(folder, line['file']), array, line, as_)
                    lines.append(line)
                    arrays[line['file']] = array
            lines.append({'kind': 'step', 'step': step, 'loss': 7 * 0.97 ** step, 'norm': 1 + 1 / (1 + step)})
        lines.append({'kind': 'end', 'steps': max(steps) + 1, 'tensors': len(arrays),
                      'bytes': sum(array.nbytes for array in arrays.values())})
    with open(os.path.join(folder, 'manifest.jsonl'), 'a') as file:
        file.writelines(json.dumps(line) + '\n' for line in lines)
    return arrays


def _tensors(rng, step, lengths, layers):
    """((layer, layer_type, index, operation, name, axis, padded axes), array) of one step, forward then backward."""
    T, B, I = max(lengths), len(lengths), HEADS * WIDTH
    keep = np.arange(T)[:, None] < lengths                                              # (T, B)
    x = rng.standard_normal((T, B, I)) * keep[:, :, None]
    wide = np.exp(rng.standard_normal(I))                                               # some features are larger
    q, k, v = (rng.standard_normal((T, B, HEADS, WIDTH)) * keep[:, :, None, None] for _ in range(3))
    scores = np.einsum('tbhc,sbhc->bhts', q, k) / np.sqrt(WIDTH) - 1e9 * ~keep.T[:, None, None, :]
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    small = 1e-3 / (1 + step)                                                           # gradients
    weight, bias, dy = rng.standard_normal((I, I)) / 4, rng.standard_normal(I) / 9, small * rng.standard_normal((T, B, I))
    dy *= keep[:, :, None]
    do, dq, dk, dv = (small * rng.standard_normal(q.shape) * keep[:, :, None, None] for _ in range(4))
    rows, square = ((0, 1),), ((2, 0), (3, 0))                                          # (time, batch) axes of padding
    linear = {'forward': [('input', x * wide, -1, rows), ('weight', weight, -1, ()), ('bias', bias, -1, ()),
                          ('output', (x * wide) @ weight.T + bias, -1, rows)],
              'backward': [('grad_output', dy, -1, rows), ('grad_input', dy @ weight, -1, rows),
                           ('grad_weight', np.einsum('tbo,tbi->oi', dy, x), -1, ()), ('grad_bias', dy.sum((0, 1)), -1, ())]}
    attention = {'forward': [('query', q, -1, rows), ('key', k, -1, rows), ('value', v, 0, rows), ('weights', p, -1, square),
                             ('output', np.einsum('bhts,sbhc->tbhc', p, v), -1, rows)],
                 'backward': [('grad_output', do, -1, rows), ('grad_query', dq, -1, rows), ('grad_key', dk, -1, rows),
                              ('grad_value', dv, -1, rows)]}
    kinds = [('attention', attention) if layer.endswith('attention') else ('linear', linear) for layer in layers]
    indices = [[kind for kind, _ in kinds[:place]].count(kind) for place, (kind, _) in enumerate(kinds)]
    for operation in ('forward', 'backward'):
        order = list(zip(layers, kinds, indices, strict=True))
        for layer, (kind, tensors), index in order if operation == 'forward' else reversed(order):
            for name, array, axis, padded in tensors[operation]:
                yield (layer, kind, index, operation, name, axis, padded), array.astype(np.float32)


def _line(timestamp, counter, fields, array, step, text, lengths):
    layer, kind, index, operation, name, axis, padded = fields
    fmt = text if name in OPERANDS else 'fp32'
    quant_type, *settings = fmt.split(':')
    mask = np.ones((1,) * array.ndim, bool)
    for time, batch in padded:
        along = [np.arange(array.shape[i]) if i == time else np.zeros(1, int) for i in range(array.ndim)]
        ends = np.array(lengths).reshape([-1 if i == batch else 1 for i in range(array.ndim)])
        mask = mask & (np.meshgrid(*along, indexing='ij', sparse=True)[time] < ends)
    return {'kind': 'tensor', 'file': f'{timestamp}_{counter:04d}_{kind}_L{index}_{operation}_{quant_type}_{name}',
            'counter': counter, 'layer': layer, 'layer_type': kind, 'index': index, 'operation': operation, 'name': name,
            'step': step, 'time': None, 'shape': list(array.shape), 'dtype': 'float32', 'format': quant_type,
            'options': dict(setting.split('=') for setting in settings), 'axis': axis,
            'uses': [] if fmt == 'fp32' else [{'product': 'fwd', 'operand': name, 'format': fmt, 'axis': axis}],
            'mask': [{'time': time, 'batch': batch, 'of': 'source'} for time, batch in padded],
            'statistics': describe(array, mask)}


def _write(path, array, line, as_):
    if as_ == 'pt':
        import torch
        torch.save({'tensor': torch.from_numpy(array), 'pyops': json.dumps(line)}, path)
    else:
        save_file({'tensor': np.ascontiguousarray(array)}, path, {'pyops': json.dumps(line)})


def make_megatron_dump(folder, ranks=2, iterations=(0, 1), is_zip=False, metadata=True):
    """Write the files of a fork of Megatron whose saver uses torch.save, by default in its layout before torch 1.6.

    -> {file: float32 array}
    """
    import torch
    os.makedirs(folder, exist_ok=True)
    rng, arrays, counter = np.random.default_rng(5), {}, 0
    T, B = 6, 2
    tensors = [('attention', 'FA', 'pre', name, (T, B, HEADS, WIDTH)) for name in ('query', 'key', 'value')]
    tensors += [('attention', 'FA', 'post', 'attention_weights', (B, HEADS, T, T)),
                ('attention', 'FA', 'post', 'output', (T, B, HEADS * WIDTH)),
                ('linear', 'linear', 'pre', 'input', (T, B, 16)), ('linear', 'linear', 'pre', 'weight', (24, 16)),
                ('linear', 'linear', 'post', 'output', (T, B, 24))]
    for iteration in iterations:
        for rank in range(ranks):
            for sample in range(2):
                for kind, component, phase, name, shape in tensors:
                    counter += 1
                    array = rng.standard_normal(shape).astype(np.float32)
                    if name == 'attention_weights':
                        array = np.exp(array) / np.exp(array).sum(-1, keepdims=True)
                    file = (f'20250908_092156_{counter:04d}_iter{iteration:03d}_{kind}_L1_forward_{phase}_{component}_mxfp8_'
                            f'rank{rank:02d}_sample{sample:03d}_group000_{name}.pt')
                    payload = {'tensor': torch.from_numpy(array)}
                    if metadata:
                        payload['metadata'] = {
                            'layer_type': kind, 'operation': 'forward', 'quant_type': 'mxfp8', 'tensor_name': name,
                            'layer_idx': 1, 'phase': phase, 'component': component, 'rank': rank, 'iteration': iteration}
                    torch.save(payload, os.path.join(folder, file), _use_new_zipfile_serialization=is_zip)
                    arrays[file] = array
    return arrays
