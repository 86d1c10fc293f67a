"""Hooks that save the tensors of any PyTorch model in the format of pyops' own programs.

    with attach(model, 'tensor_logs', steps='0:100:10') as handle:
        for batch in batches:
            ...                         # forward, backward, optimiser
            handle.step(loss)           # optional: without it each forward pass counts as a step

Linear layers are nn.Linear and similar modules (Megatron's ColumnParallelLinear and RowParallelLinear).  Attention is
nn.MultiheadAttention, every call of scaled_dot_product_attention, and modules whose forward takes query, key and value with
four axes (Megatron's core attention).

Only the model itself has hooks at all times.  In a saved step every module has a forward pre-hook and a forward hook, and a
TorchFunctionMode intercepts the attention functions.  Results do not change by a bit.  Errors are printed once to stderr,
and training continues.

torch.compile would compile the hooks of a saved step, and recompile the model at every such step.  So compiled modules run
uncompiled in saved steps, and their compiled code is used again afterwards.
"""
from __future__ import annotations

import argparse
import atexit
import fnmatch
import inspect
import math
import os
import sys
import types
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

from pyops.errors import UserError
from pyops.inspect import choice
from pyops.inspect.flags import FOLDER, is_enabled

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from pyops.formats import Format
    from pyops.inspect.writer import WriterSummary
    from pyops.typing import PathLike

try:
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode
except ImportError as error:
    raise UserError('torch is not installed: install it with: pip install torch') from error

_OPERANDS = {'input', 'weight', 'query', 'key', 'value', 'weights', 'grad_output'}      # of matrix products, hence rounded
_INPUT_NAMES = 'input', 'input_', 'x', 'hidden_states'
_COMPILER = 'torch._dynamo'
_SDPA = 'query', 'key', 'value', 'attn_mask', 'dropout_p', 'is_causal'
_QKV = ('query', 'key', 'value'), ('query_layer', 'key_layer', 'value_layer'), ('q', 'k', 'v')


def attach(model: torch.nn.Module, folder: PathLike | None = None, *, layers: str = '*',
           steps: str | Container[int] = '0:100:10', save_max: int | str = '4G', as_: str = 'safetensors',
           fmt: str | Format | None = None, tokens: Callable[[int], dict[str, list[list[str]]]] | None = None,
           forwards_per_step: int = 1, batch_first: bool | None = None, program: str | None = None) -> Attachment:
    """Start saving tensors of `model`, an nn.Module, to `folder`.  Return an Attachment; its close() stops it.

    folder: None: as the environment selects: TENSOR_SAVE_DIR if TENSOR_SAVE_ENABLED is true, otherwise nothing is saved.
    TENSOR_SAVE_ENABLED=false also switches a given folder off
    layers: module name patterns separated by commas
    steps: '0:100:10', numbers separated by commas, a container of step numbers, or None for all
    save_max: limit in bytes, an int or a text such as '500M';  as_: 'safetensors' or 'pt'
    fmt: the number format to which the model rounds operands, recorded only; tensors are saved as the modules receive them.
    None: the format in CUSTOM_QUANT_TYPE, if it has one for all operands
    tokens: function of the step number, called before the step is saved; returns {'source': [[words] per sentence], ...}
    for attention plots and padding.  Attachment.batch is an alternative.
    forwards_per_step: forward passes per step; the first one is saved; 0: only step() ends a step
    batch_first: True for the layout (B, T, ...), False for (T, B, ...), None: deduced from the lengths of the sentences
    program: name for the manifest, default the class of the model
    UserError if the folder cannot be written, the model has no layer to save, or a pattern matches none.  Layers of other
    kinds, such as LSTM and Conv2d, are listed on stderr.
    """
    return Attachment(model, folder, layers, steps, save_max, as_, fmt, tokens, forwards_per_step, batch_first, program)


class Attachment:
    """The hooks on a model and their writer.  A context manager, created by attach().

    number: number of the current step, from 0
    """

    def __init__(self, model, folder, layers, steps, save_max, as_, fmt, tokens, forwards_per_step, batch_first, program):
        from pyops import formats
        from pyops.inspect.writer import Writer
        self.number, self.model = 0, model
        self._patterns = _parsed(choice.patterns, layers, 'layers')
        self._steps = _parsed(choice.steps, steps, 'steps') if isinstance(steps, str) else steps
        self._format = _format_of_environment() if fmt is None else formats.parse(fmt)
        self._tokens, self.batch_first, self._per_step = tokens, batch_first, forwards_per_step
        if as_ not in ('safetensors', 'pt'):
            raise UserError(f"as_={as_!r}: expected 'safetensors' or 'pt'")
        self._forwards, self._depth, self._recorder, self._sentences = 0, 0, None, None
        self._indices, self._warned, self._parameter_hooks, self._hooks, self._stance = {}, set(), [], [], None
        self._compiled_call = None
        self._check_patterns()
        is_on = is_enabled(os.environ, folder is not None)
        self._is_closed, self._writer = not is_on, None
        if not is_on:
            return
        folder = folder or os.environ.get('TENSOR_SAVE_DIR') or FOLDER
        self._writer = Writer(folder, limit=_parsed(choice.size, save_max, 'save_max'), as_=as_, run={
            'program': program or type(model).__name__, 'origin': 'torch',
            'settings': {'layers': layers, 'steps': str(steps), 'format': str(self._format or 'fp32')}})
        self._skips_eval = model.training               # a model attached in eval mode has its eval passes saved
        if getattr(model, '_compiled_call_impl', None) is not None:     # model.compile() compiles the hooks as well
            self._compiled_call = model._compiled_call_impl
            model._compiled_call_impl = self._call
        else:
            self._hooks = [model.register_forward_pre_hook(_Hook(self._before), prepend=True, with_kwargs=True),
                           model.register_forward_hook(_Hook(self._after), with_kwargs=True, always_call=True)]
        atexit.register(self.close)                     # finish writing before the interpreter exits

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def step(self, loss: Any = None, norm: Any = None) -> None:
        """End a training step.  loss, norm: numbers, or tensors with one element, to record for the step."""
        with self.guarded():
            if self._writer is not None and (loss is not None or norm is not None):
                values = (value.detach() if isinstance(value, torch.Tensor) else value for value in (loss, norm))
                self._writer.steps([(self.number, *(None if value is None else float(value) for value in values))])
        self.number += 1
        self._forwards, self._per_step = 0, 0

    def batch(self, lengths: dict[str, Sequence[int]] | None = None, tokens: dict[str, list[list[str]]] | None = None) -> None:
        """Describe the sentences of the next forward pass.

        tokens: {'source': [[words] per sentence], ...};  lengths: {'source': [length of each sentence]}, default from tokens
        """
        tokens = {side: [list(map(str, words)) for words in sentences] for side, sentences in (tokens or {}).items()}
        lengths = lengths or {side: [len(words) for words in sentences] for side, sentences in tokens.items()}
        self._sentences = {side: [int(n) for n in side_lengths] for side, side_lengths in lengths.items()}, tokens

    def close(self) -> WriterSummary | None:
        """Remove all hooks and wait until everything is written.  Return the WriterSummary, or None if writing failed or the
        environment switched saving off.

        May be called again, with the same result.
        """
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close)
            self._end_recording()
            self._remove_parameter_hooks()
            for hook in self._hooks:
                hook.remove()
            if self.model._compiled_call_impl == self._call and self._compiled_call is not None:
                self.model._compiled_call_impl = self._compiled_call
        summary = None
        with self.guarded():
            summary = self._writer.close() if self._writer is not None else None
        if summary and not summary.tensors:
            self.warn(f'no tensor was saved in {summary.folder}: no selected layer ran in any of the selected steps')
        return summary

    # ---- the forward pass of the model -------------------------------------------------------------------------------

    def _call(self, *args, **kwargs):
        """Call a model on which compile() was called, with _before and _after outside of the compiled code."""
        changed = self._before(self.model, args, kwargs)
        args, kwargs = changed or (args, kwargs)
        output = None
        try:
            output = (self.model._call_impl if self._recorder is not None else self._compiled_call)(*args, **kwargs)
            return output
        finally:
            self._after(self.model, args, kwargs, output)

    def _before(self, module, args, kwargs):
        self._depth += 1
        if self._depth > 1 or self._is_closed or self._skips_eval and not module.training:
            return None
        with self.guarded():
            if self._per_step and self._forwards >= self._per_step:
                self.number, self._forwards = self.number + 1, 0
            self._forwards += 1
            if self._forwards == 1 and (self._steps is None or self.number in self._steps) and not self._writer.is_full:
                self._remove_parameter_hooks()
                self._begin_recording()
                return self._recorder.before(module, args, kwargs)
        return None

    def _after(self, module, args, kwargs, output):
        self._depth -= 1
        if not self._depth and self._recorder is not None:
            self._recorder.after(module, args, kwargs, output)
            self._end_recording()

    def _begin_recording(self):
        if self._tokens is not None:
            self.batch(tokens=self._tokens(self.number))
        sentences, self._sentences = self._sentences or ({}, {}), None
        if any(sentences):
            self._writer.batch(self.number, *sentences)
        if _COMPILER in sys.modules and hasattr(torch.compiler, 'set_stance'):          # torch 2.6 and newer
            self._stance = torch.compiler.set_stance('force_eager')
        self._recorder = _Recorder(self, self.number, sentences[0])

    def _end_recording(self):
        if self._recorder is not None:
            self._recorder, recorder = None, self._recorder
            with self.guarded():
                recorder.end()
        if self._stance is not None:
            self._stance, stance = None, self._stance
            with self.guarded():
                stance.__exit__(None, None, None)

    # ---- saving ------------------------------------------------------------------------------------------------------

    def layer_index(self, layer, layer_type):
        """Return the index of a layer among the layers of its type, in order of the forward pass."""
        return self._indices.setdefault((layer_type, layer), sum(kind == layer_type for kind, _ in self._indices))

    def selects(self, layer):
        return any(fnmatch.fnmatchcase(layer, pattern) for pattern in self._patterns)

    def write(self, tensor, layer, layer_type, operation, name, step, mask=(), lengths=None):
        """Save the current values of a tensor."""
        if self._is_closed or self._writer.is_full:
            return
        tensor = tensor.to_local() if hasattr(tensor, 'to_local') else tensor           # this rank's shard of a DTensor
        f = self._format if name in _OPERANDS else None
        accepted = self._writer.tensor(
            tensor.detach().cpu().float().numpy(), layer=layer, layer_type=layer_type,
            index=self.layer_index(layer, layer_type), operation=operation, name=name, step=step,
            format=f.name if f else 'fp32', options=dict(f.options) if f else {},
            quant_type=self._format and self._format.name,
            axis=0 if layer_type == 'attention' and name == 'value' else -1, mask=mask, lengths=lengths)
        if not accepted:
            self.warn('save_max is reached; no more tensors are saved, and training goes on')

    def remaining_bytes(self):
        """Return the number of bytes that may still be saved."""
        return self._writer.limit - self._writer.taken

    def on_gradient(self, tensor, save):
        """Call save(gradient) when the gradient of a tensor is computed for the first time."""
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return
        is_saved = False                    # backward may run twice on one graph

        def hook(gradient):
            nonlocal is_saved
            with self.guarded():
                if not is_saved:
                    is_saved = True
                    save(gradient)
        handle = tensor.register_hook(hook)
        if tensor.is_leaf:                  # a parameter: its hook must be removed after the step
            self._parameter_hooks.append(handle)

    def _remove_parameter_hooks(self):
        for hook in self._parameter_hooks:
            hook.remove()
        self._parameter_hooks.clear()

    # ---- errors ------------------------------------------------------------------------------------------------------

    @contextmanager
    def guarded(self):
        """Turn any exception into a warning, so that saving never ends training."""
        try:
            yield
        except Exception as error:
            self.warn(f'tensors cannot be saved ({type(error).__name__}: {error}); training goes on')

    def warn(self, text):
        """Print a warning, each text once."""
        if text not in self._warned:
            self._warned.add(text)
            print(f'warning: pyops.inspect.torch: {" ".join(text.split())}', file=sys.stderr, flush=True)

    def _check_patterns(self):
        modules = {name or 'model': module for name, module in self.model.named_modules()}
        layers = [name for name, module in modules.items() if _is_linear(module) or _is_attention(module)]
        layers += [f'{name}{part}' for name, module in modules.items() if isinstance(module, torch.nn.MultiheadAttention)
                   for part in ('', '.in_proj')]
        others = Counter(type(module).__name__ for module in modules.values() if _has_unseen_product(module))
        if not layers and not any(_may_call_attention(module) for module in modules.values()):
            raise UserError(f'{type(self.model).__name__}: has no linear layer and no attention'
                            + (f', only {_listed(others)}' if others else '') + '; attach to a model with nn.Linear, '
                            'nn.MultiheadAttention or calls of scaled_dot_product_attention')
        if others:
            self.warn(f'not saved: {_listed(others)}; only linear layers and attention are saved')
        for pattern in self._patterns:
            # any module may call scaled_dot_product_attention
            if not fnmatch.filter([*layers, *modules], pattern):
                raise UserError(f'layers={pattern!r}: matches none of the {len(layers)} layers; the names include '
                                f'{", ".join(layers[:3])}')


class _Hook:
    """A hook whose copies, in a copied or unpickled model, do nothing."""

    def __init__(self, call=None):
        # torch.compiler.disable would import the compiler, which takes a second, in programs that do not use it
        self._call = torch.compiler.disable(call) if call and _COMPILER in sys.modules else call

    def __call__(self, *args):
        return self._call(*args) if self._call else None

    # torch.compile calls it, but does not compile it
    __call__._torchdynamo_disable = True        # type: ignore[attr-defined]

    def __reduce__(self):
        return _Hook, ()


# ---- one forward pass ----------------------------------------------------------------------------------------------

def _is_linear(module):
    """Return whether a module is nn.Linear, or is named so and has a weight matrix or receives one per call."""
    if isinstance(module, torch.nn.Linear):
        return True
    name, weight = type(module).__name__.lower(), getattr(module, 'weight', ())
    # with a fused norm or two inputs, the input of the module is not the operand of the product
    if 'linear' not in name or 'norm' in name or 'bilinear' in name:
        return False
    return weight is None or isinstance(weight, torch.Tensor) and weight.dim() == 2


def _has_unseen_product(module):
    """Return whether a module multiplies by a matrix of its own that is not saved: LSTM, Conv2d and the like."""
    name = type(module).__name__.lower()
    if _is_linear(module) or isinstance(module, torch.nn.MultiheadAttention) or 'embedding' in name or 'norm' in name:
        return False
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _may_call_attention(module):
    """Return whether a module that is not torch's own may call scaled_dot_product_attention, by the text of its file."""
    source = sys.modules.get(type(module).__module__)
    if type(module).__module__.startswith(('torch.nn.', 'torch._dynamo.')):
        return False
    try:
        return 'scaled_dot_product_attention' in inspect.getsource(source)
    except (OSError, TypeError):
        return True


def _listed(counts):
    return ', '.join(f'{count} {name}' for name, count in counts.most_common(5)) + (', ...' if len(counts) > 5 else '')


def _format_of_environment():
    """Return the Format in CUSTOM_QUANT_TYPE, None if it has none or different ones for different operands."""
    from pyops.quantization import Recipe, from_environment
    found = set(Recipe.parse(from_environment()).formats.values())
    return found.pop() if len(found) == 1 else None


def _is_attention(module):
    """Return whether a module is a pure attention function: no parameters, and forward takes query, key and value."""
    if any(True for _ in module.parameters()):
        return False
    try:
        parameters = tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return False
    return parameters[:3] in _QKV


class _Recorder(TorchFunctionMode):
    """Saves one forward pass of a model by hooks on all its modules, and intercepts their calls of attention functions.

    before, after: the hooks for the model itself, which are called by its Attachment because the pass has already begun
    """

    def __init__(self, owner, step, lengths):
        super().__init__()
        self._owner, self._step, self._lengths = owner, step, lengths
        self._stack = []                    # names of the running modules
        self._uses = {}                     # (type, name) -> number of earlier uses in this pass
        self._saved_parameters = set()      # ids
        self._attention = []                # the save functions of the running pure attention modules
        self._hooks = []
        self.before, self.after = self._hooks_of(owner.model, 'model')
        for name, module in owner.model.named_modules():
            name = '.'.join(part for part in name.split('.') if part != '_orig_mod') or 'model'      # of compiled modules
            if module is not owner.model:
                try:
                    before, after = self._hooks_of(module, name)
                    self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                    self._hooks.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
                except RuntimeError:        # some compiled modules do not support hooks
                    owner.warn(f'{name}: does not support hooks, so nothing inside it is saved')
        self.__enter__()

    def end(self):
        self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()

    def _hooks_of(self, module, name):
        kind = 'linear' if _is_linear(module) else 'attention' if _is_attention(module) else 'other'
        states = []                         # one per active call, since a module may call itself

        def before(module, args, kwargs):
            self._stack.append(name)
            states.append(state := {})
            with self._owner.guarded():
                if kind == 'linear':
                    state['input'], args, kwargs = _with_alias(args, kwargs, _INPUT_NAMES)
                    return args, kwargs
                if kind == 'attention' and not self._attention:
                    operands, args, kwargs = _with_operands(module, args, kwargs)
                    if operands:
                        state['save'] = self._begin_attention(name, operands)
                        return args, kwargs
            return None

        def after(module, args, kwargs, output):
            self._stack.pop()
            state = states.pop()
            if 'save' in state:
                self._attention.pop()
            with self._owner.guarded():
                output = output[0] if isinstance(output, (tuple, list)) and output else output
                if not isinstance(output, torch.Tensor):            # None if forward raised an exception
                    return
                if state.get('input') is not None:
                    weight = kwargs['weight'] if kwargs.get('weight') is not None else module.weight
                    self._linear(name, state['input'], weight, getattr(module, 'bias', None), output,
                                 _base(output) if isinstance(module, torch.nn.Linear) else output)
                elif 'save' in state:
                    state['save']('output', output)
                elif self._attention and 'softmax' in type(module).__name__.lower():
                    self._attention[-1]('weights', output)
        return before, after

    # ---- linear layers -----------------------------------------------------------------------------------------------

    def _linear(self, name, x, weight, bias, y, base=None):
        """Save the tensors of a linear layer.  base: the tensor for the hook on the gradient of y; see _base."""
        layer = self._layer_name(name, 'linear')
        if not self._owner.selects(layer):
            return
        rows = self._rows_mask(x.shape)
        self._save(x, layer, 'linear', 'input', mask=rows)
        for role, parameter in (('weight', weight), ('bias', bias)):
            # a shared parameter is saved with its first layer, and its gradient is the sum over all layers
            if isinstance(parameter, torch.Tensor) and id(parameter) not in self._saved_parameters:
                if parameter.is_leaf:
                    self._saved_parameters.add(id(parameter))
                self._save(parameter, layer, 'linear', role)
        self._save(y, layer, 'linear', 'output', mask=rows, base=base)

    def _rows_mask(self, shape):
        """Return the mask entry, as in a manifest, with the time and batch axes of a linear layer's input; () if unknown."""
        if len(shape) != 3:
            return ()
        time, batch = (1, 0) if self._is_batch_first(shape) else (0, 1)
        side = self._side(shape[time], shape[batch])
        return ({'time': time, 'batch': batch, 'of': side},) if side else ()

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _begin_attention(self, name, operands):
        """Save query, key and value of a pure attention module.  Return the function that saves its other tensors."""
        query, value = operands['query'], operands['value']
        heads = query.shape[-2] if query.dim() == 4 else 1
        batch_first = self._is_batch_first(query.shape)

        def arrange(tensor):
            tensor = tensor.reshape(*tensor.shape[:2], -1, value.shape[-1]) if tensor.dim() == 3 and heads > 1 else \
                tensor.unsqueeze(2) if tensor.dim() == 3 else tensor
            return tensor.transpose(0, 1) if batch_first else tensor

        save = self._attention_saver(name, arrange)
        for role, tensor in operands.items():
            save(role, tensor)
        self._attention.append(save)
        return save

    def _attention_saver(self, name, arrange):
        """Return save(role, tensor) for an attention layer.

        arrange: converts a tensor, except the weights, to (T, B, heads, C)
        """
        layer = self._layer_name(name, 'attention')
        sides = {}

        def save(role, tensor):
            if not self._owner.selects(layer):
                return
            if role == 'weights':           # (B, heads, Tq, Tk)
                mask = [{'time': axis, 'batch': 0, 'of': sides[side]} for axis, side in ((2, 'query'), (3, 'key'))
                        if sides.get(side) and self._fits(sides[side], tensor.shape[axis], tensor.shape[0])]
                self._save(tensor, layer, 'attention', role, mask=mask)
                return
            time, batch = arrange(tensor).shape[:2]
            sides[role] = sides['query'] if role == 'output' else self._side(time, batch)
            mask = ({'time': 0, 'batch': 1, 'of': sides[role]},) if sides[role] else ()
            self._save(tensor, layer, 'attention', role, arrange, mask)
        return save

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._scaled_dot_product(function, args, kwargs)
        if function is F.multi_head_attention_forward:
            with self._owner.guarded():
                function = self._instrumented(function, args, kwargs)
        return function(*args, **kwargs)

    def _scaled_dot_product(self, function, args, kwargs):
        save = None
        with self._owner.guarded():
            arguments = dict(zip(_SDPA, args, strict=False)) | kwargs
            operands = {role: _alias(arguments[role]) for role in ('query', 'key', 'value')}
            if self._attention:             # the operands are saved with the surrounding module
                self._save_weights(self._attention[-1], arguments)
            else:
                save = self._attention_saver(self._stack[-1] if self._stack else 'model', _time_first)
                for role, tensor in operands.items():
                    save(role, tensor)
                self._save_weights(save, arguments)
                args, kwargs = (), {**arguments, **operands}
        output = function(*args, **kwargs)
        if save:
            with self._owner.guarded():
                save('output', output)
        return output

    def _save_weights(self, save, arguments):
        """Recompute the weights of scaled_dot_product_attention, softmax(q k^T scale + mask) without dropout, and save them."""
        query, key, mask = arguments['query'].detach(), arguments['key'].detach(), arguments.get('attn_mask')
        shape = *query.shape[:-1], key.shape[-2]
        if 4 * math.prod(shape) > self._owner.remaining_bytes():
            return
        with torch.no_grad():
            if arguments.get('enable_gqa'):
                key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            if arguments.get('is_causal'):
                mask = torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
            if mask is None:
                mask = torch.ones((), dtype=torch.bool, device=query.device)
            scale = query.shape[-1] ** -0.5 if arguments.get('scale') is None else arguments['scale']
            # one sequence at a time, since training may leave little device memory for float32 scores
            parts = [_softmax(*operands, scale).cpu() for operands in zip(
                *(_with_batch(tensor) for tensor in (query, key, mask.detach().expand(shape))), strict=True)]
            save('weights', torch.stack(parts))

    def _instrumented(self, function, args, kwargs):
        """Return multi_head_attention_forward with inner functions that save their operands.

        The copy runs the same code with other globals, so torch itself is not patched and the results are the same.
        """
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        name, heads, batch = self._stack[-1], arguments['num_heads'], None

        def arrange(tensor):                # q, k, v (T, B, E); the output (T*B, E)
            return tensor.reshape(-1, batch, heads, tensor.shape[-1] // heads)

        save = self._attention_saver(name, arrange)

        def linear_of(layer):
            def linear(x, weight, bias=None):
                x = _alias(x)
                with self._owner.guarded():
                    if layer == 'out_proj':
                        save('output', x)
                y = F.linear(x, weight, bias)
                with self._owner.guarded():
                    self._linear(f'{name}.{layer}', x, weight, bias, y)
                return y
            return linear

        def projected(project):
            project = _with_globals(project, linear=linear_of('in_proj'))

            def projection(*args):
                nonlocal batch
                q, k, v = project(*args)
                with self._owner.guarded():
                    batch = q.shape[1]
                    for role, tensor in ('query', q), ('key', k), ('value', v):
                        save(role, tensor)
                return q, k, v
            return projection

        def softmax(x, dim=None, **options):
            p = F.softmax(x, dim=dim, **options)
            with self._owner.guarded():
                save('weights', p.reshape(-1, heads, *p.shape[-2:]))
            return p

        def attention(*args, **kwargs):
            with self._owner.guarded():
                self._save_weights(save, dict(zip(_SDPA, args, strict=False)) | kwargs)
            return F.scaled_dot_product_attention(*args, **kwargs)

        return _with_globals(function, linear=linear_of('out_proj'), softmax=softmax, scaled_dot_product_attention=attention,
                           _in_projection_packed=projected(F._in_projection_packed),
                           _in_projection=projected(F._in_projection))

    # ---- shared ------------------------------------------------------------------------------------------------------

    def _layer_name(self, name, layer_type):
        """Return the name of a layer, which is name@1 when a module runs for the second time."""
        use = self._uses[layer_type, name] = self._uses.get((layer_type, name), -1) + 1
        layer = f'{name}@{use}' if use else name
        self._owner.layer_index(layer, layer_type)      # layers that are not selected are counted too
        return layer

    def _save(self, tensor, layer, layer_type, role, arrange=lambda tensor: tensor, mask=(), base=None):
        """Save a tensor now and its gradient in the backward pass."""
        def write(tensor, operation, name):
            self._owner.write(arrange(tensor.detach()), layer, layer_type, operation, name, self._step, mask, self._lengths)

        write(tensor, 'forward', role)
        if role != 'weights':               # recomputed weights are not part of the graph
            shape = tensor.shape
            self._owner.on_gradient(tensor if base is None else base,
                                    lambda gradient: write(gradient.reshape(shape), 'backward', f'grad_{role}'))

    def _is_batch_first(self, shape):
        """Return whether the layout is (B, T, ...): the argument of attach(), or deduced from the lengths of the sentences."""
        if self._owner.batch_first is not None:
            return self._owner.batch_first
        return bool(self._side(shape[1], shape[0])) and not self._side(shape[0], shape[1])

    def _side(self, time, batch):
        """Return the side ('source', ...) whose sentences fit a time and batch size, or None if not exactly one fits."""
        fits = [side for side in self._lengths if self._fits(side, time, batch)]
        exact = [side for side in fits if max(self._lengths[side], default=0) == time]
        return exact[0] if len(exact) == 1 else fits[0] if len(fits) == 1 else None

    def _fits(self, side, time, batch):
        return len(self._lengths[side]) == batch and max(self._lengths[side], default=0) <= time


def _alias(tensor):
    """Return a view of the tensor with its own gradient: from this use only, not summed over all uses."""
    return tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def _base(output):
    """Return the tensor on which to hook the gradient of F.linear's output.

    An output with more than two axes is a view of a matrix.  A hook on the view is lost when an in-place ReLU modifies it,
    a hook on the matrix is not.
    """
    base = output._base
    return base if base is not None and base.numel() == output.numel() and base.requires_grad else output


def _with_alias(args, kwargs, names):
    """Alias the first positional argument or the first of `names`.  Return (alias, args, kwargs with the alias)."""
    if args and isinstance(args[0], torch.Tensor):
        alias = _alias(args[0])
        return alias, (alias, *args[1:]), kwargs
    for name in names:
        if isinstance(kwargs.get(name), torch.Tensor):
            alias = _alias(kwargs[name])
            return alias, args, {**kwargs, name: alias}
    return None, args, kwargs


def _with_operands(module, args, kwargs):
    """Alias query, key and value.  Return ({role: alias}, args, kwargs with the aliases).

    The dict is None unless all three are tensors with 3 or 4 axes.
    """
    names = tuple(inspect.signature(module.forward).parameters)[:3]
    tensors = [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() in (3, 4) for tensor in tensors):
        return None, args, kwargs
    aliases = [_alias(tensor) for tensor in tensors]
    args = (*aliases[:len(args)], *args[3:])
    kwargs = {**kwargs, **{name: alias for name, alias in zip(names, aliases, strict=True) if name in kwargs}}
    return dict(zip(('query', 'key', 'value'), aliases, strict=True)), args, kwargs


def _with_batch(tensor):
    """Reshape (..., heads, T, C), or the same without heads, to (B, heads, T, C)."""
    return tensor.reshape(-1, *tensor.shape[-3:]) if tensor.dim() > 3 else tensor.reshape(-1, 1, *tensor.shape[-2:])


def _softmax(query, key, mask, scale):
    scores = query.float() @ key.float().transpose(-2, -1) * scale
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    # the weights of a fully masked row are 0, where softmax returns NaN
    return scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)


def _time_first(tensor):
    """Convert (..., heads, T, C), or the same without heads, to (T, B, heads, C)."""
    return _with_batch(tensor).permute(2, 0, 1, 3)


def _with_globals(function, **names):
    """Return a copy of a function with some of its globals replaced."""
    copy = types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
                              function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _parsed(parse, value, name):
    try:
        return parse(value)
    except argparse.ArgumentTypeError as error:
        raise UserError(f'{name}={value!r}: {error}') from error
