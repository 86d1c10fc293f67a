"""Tensors of any PyTorch model, saved as pyops' own programs save theirs, through hooks.

    with attach(model, 'tensor_logs', steps='0:100:10') as handle:
        for batch in batches:
            ...                         # forward, backward, optimiser
            handle.step(loss)           # or nothing: each forward pass counts as a step

Linear layers are nn.Linear and what looks like it (Megatron's ColumnParallelLinear and RowParallelLinear).  Attention is
nn.MultiheadAttention, every call of scaled_dot_product_attention, and modules that are called with query, key and value of
four axes (Megatron's core attention).

Outside the steps that are saved there is one hook, on the model.  In one that is, every module has two, and a
TorchFunctionMode sees the calls inside them.  Nothing is computed differently for it, and whatever goes wrong is said
once on stderr while training goes on.
"""
import argparse
import atexit
import fnmatch
import inspect
import math
import sys
import types
from contextlib import contextmanager

from pyops.errors import UserError
from pyops.inspect import choice

try:
    import torch
    from torch.nn import functional as F
    from torch.overrides import TorchFunctionMode
except ImportError as error:
    raise UserError('torch is not installed: install it with: pip install torch') from error

_OPERANDS = {'input', 'weight', 'query', 'key', 'value', 'weights', 'grad_output'}      # of products, so rounded by a format
_NAMES_OF_INPUT = 'input', 'input_', 'x', 'hidden_states'
_SDPA = 'query', 'key', 'value', 'attn_mask', 'dropout_p', 'is_causal'
_QKV = ('query', 'key', 'value'), ('query_layer', 'key_layer', 'value_layer'), ('q', 'k', 'v')


def attach(model, folder, *, layers='*', steps='0:100:10', save_max='4G', as_='safetensors', fmt=None, tokens=None,
           forwards_per_step=1, batch_first=None, program=None):
    """Begin to save tensors of `model`, an nn.Module, to `folder`.  -> Attachment, whose close() ends it

    layers: patterns of modules' names with commas between.  steps: '0:100:10', numbers with commas between, anything that
    has `in`, or None for all.  save_max: bytes or text such as '500M', after which nothing is saved any more.
    as_: 'safetensors' or 'pt'.  fmt: the number format that the model rounds operands to, for the record; what is saved is
    what a module gets.
    forwards_per_step: how many forward passes make a step, the first of which is saved; 0: step() alone ends one.
    tokens: called with the step before it is saved -> {'source': [[words] for each sentence], ...}, for the pictures of
    attention and to know padding; Attachment.batch is another way.
    batch_first: where axes of batch and time are, (B, T, ...) if True; None: as modules say, or as lengths of sentences tell.
    UserError where the folder cannot be written, no layer is there, or a pattern fits none.
    """
    return Attachment(model, folder, layers, steps, save_max, as_, fmt, tokens, forwards_per_step, batch_first, program)


class Attachment:
    """Hooks on a model and the writer behind them.  A context manager; made by attach().

    number: of the current step, from 0.
    """

    def __init__(self, model, folder, layers, steps, save_max, as_, fmt, tokens, forwards_per_step, batch_first, program):
        from pyops import formats
        from pyops.inspect.writer import Writer
        self.number, self.model = 0, model
        self._patterns = _parsed(choice.patterns, layers, 'layers')
        self._steps = _parsed(choice.steps, steps, 'steps') if isinstance(steps, str) else steps
        self._format = None if fmt is None else formats.parse(fmt)
        self._tokens, self.batch_first, self._per_step = tokens, batch_first, forwards_per_step
        if as_ not in ('safetensors', 'pt'):
            raise UserError(f"as_={as_!r}: want 'safetensors' or 'pt'")
        self._check_patterns()
        self._writer = Writer(folder, limit=_parsed(choice.size, save_max, 'save_max'), as_=as_, run={
            'program': program or type(model).__name__, 'origin': 'torch',
            'settings': {'layers': layers, 'steps': str(steps), 'format': str(self._format or 'fp32')}})
        self._forwards, self._depth, self._watch, self._sentences = 0, 0, None, None
        self._numbers, self._said, self._parameter_hooks, self._is_closed = {}, set(), [], False
        self._follows_training = model.training         # else every pass is one, such as of a model that only generates
        self._hooks = [model.register_forward_pre_hook(_Hook(self._before), prepend=True, with_kwargs=True),
                       model.register_forward_hook(_Hook(self._after), with_kwargs=True, always_call=True)]
        atexit.register(self.close)                     # the writer's thread does not outlive the program

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def step(self, loss=None, norm=None):
        """End a training step: the next forward pass is of the next one.  loss, norm: numbers to draw, or tensors of one."""
        with self.harmless():
            if loss is not None or norm is not None:
                values = (value.detach() if isinstance(value, torch.Tensor) else value for value in (loss, norm))
                self._writer.steps([(self.number, *(None if value is None else float(value) for value in values))])
        self.number += 1
        self._forwards, self._per_step = 0, 0

    def batch(self, lengths=None, tokens=None):
        """What the sentences of the next forward pass are.  tokens: {'source': [[words] for each sentence], ...};
        lengths: {'source': [words of each sentence]}, by default those of tokens.
        """
        tokens = {side: [list(map(str, words)) for words in sentences] for side, sentences in (tokens or {}).items()}
        lengths = lengths or {side: [len(words) for words in sentences] for side, sentences in tokens.items()}
        self._sentences = {side: [int(n) for n in of] for side, of in lengths.items()}, tokens

    def close(self):
        """Take all hooks away, wait until all is written.  -> Summary of the writer, None where that failed; a second time
        the same again.
        """
        if not self._is_closed:
            self._is_closed = True
            atexit.unregister(self.close)
            self._end_watch()
            self._forget_parameters()
            for hook in self._hooks:
                hook.remove()
        summary = None
        with self.harmless():
            summary = self._writer.close()
        if summary and not summary.tensors:
            self.say(f'no tensor was saved in {summary.folder}: no step that was asked for had a forward pass of a layer')
        return summary

    # ---- the forward pass of the model -------------------------------------------------------------------------------

    def _before(self, module, args, kwargs):
        self._depth += 1
        if self._depth > 1 or self._is_closed or self._follows_training and not module.training:
            return None
        with self.harmless():
            if self._per_step and self._forwards >= self._per_step:
                self.number, self._forwards = self.number + 1, 0
            self._forwards += 1
            if self._forwards == 1 and (self._steps is None or self.number in self._steps) and not self._writer.is_full:
                self._forget_parameters()
                self._begin_watch()
                return self._watch.before(module, args, kwargs)
        return None

    def _after(self, module, args, kwargs, output):
        self._depth -= 1
        if not self._depth and self._watch is not None:
            self._watch.after(module, args, kwargs, output)
            self._end_watch()

    def _begin_watch(self):
        if self._tokens is not None:
            self.batch(tokens=self._tokens(self.number))
        sentences, self._sentences = self._sentences or ({}, {}), None
        if any(sentences):
            self._writer.batch(self.number, *sentences)
        self._watch = _Watch(self, self.number, sentences[0])

    def _end_watch(self):
        if self._watch is not None:
            self._watch, watch = None, self._watch
            with self.harmless():
                watch.end()

    # ---- what is saved -----------------------------------------------------------------------------------------------

    def place(self, layer, layer_type):
        """The number of a layer among those of its type, in order of the forward pass."""
        return self._numbers.setdefault((layer_type, layer), sum(kind == layer_type for kind, _ in self._numbers))

    def wants(self, layer):
        return any(fnmatch.fnmatchcase(layer, pattern) for pattern in self._patterns)

    def write(self, tensor, layer, layer_type, operation, name, step, mask=(), lengths=None):
        """Save a tensor as it is now."""
        if self._is_closed or self._writer.is_full:
            return
        tensor = tensor.to_local() if hasattr(tensor, 'to_local') else tensor           # a DTensor's share of this rank
        f = self._format if name in _OPERANDS else None
        taken = self._writer.tensor(
            tensor.detach().cpu().float().numpy(), layer=layer, layer_type=layer_type, index=self.place(layer, layer_type),
            operation=operation, name=name, step=step, format=f.name if f else 'fp32', options=dict(f.options) if f else {},
            quant_type=self._format and self._format.name,
            axis=0 if layer_type == 'attention' and name == 'value' else -1, mask=mask, lengths=lengths)
        if not taken:
            self.say('save_max is reached; no more tensors are saved, and training goes on')

    def room(self):
        """How many bytes may still be saved."""
        return self._writer.limit - self._writer.taken

    def on_gradient(self, tensor, save):
        """Call save(gradient) once, when the gradient of a tensor is known; nothing where it has none."""
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return
        is_due = [True]                     # a graph may be gone through twice

        def hook(gradient):
            with self.harmless():
                if is_due:
                    is_due.clear()
                    save(gradient)
        handle = tensor.register_hook(hook)
        if tensor.is_leaf:                  # a parameter, which outlives the step
            self._parameter_hooks.append(handle)

    def _forget_parameters(self):
        for hook in self._parameter_hooks:
            hook.remove()
        self._parameter_hooks.clear()

    # ---- what goes wrong ---------------------------------------------------------------------------------------------

    @contextmanager
    def harmless(self):
        """Training goes on, whatever saving runs into."""
        try:
            yield
        except Exception as error:
            self.say(f'tensors cannot be saved ({type(error).__name__}: {error}); training goes on')

    def say(self, text):
        if text not in self._said:
            self._said.add(text)
            print(f'warning: pyops.inspect.torch: {" ".join(text.split())}', file=sys.stderr, flush=True)

    def _check_patterns(self):
        every = {name or 'model': module for name, module in self.model.named_modules()}
        layers = [name for name, module in every.items() if _is_linear(module) or _is_attention(module)]
        layers += [f'{name}{part}' for name, module in every.items() if isinstance(module, torch.nn.MultiheadAttention)
                   for part in ('', '.in_proj')]
        if not layers and not any(True for _ in self.model.parameters()):
            raise UserError(f'{type(self.model).__name__}: has neither linear layers nor attention; want a model that has')
        for pattern in self._patterns:
            # any module may call scaled_dot_product_attention
            if not fnmatch.filter([*layers, *every], pattern):
                raise UserError(f'layers={pattern!r}: fits none of the {len(layers)} layers; there are, among others, '
                                f'{", ".join(layers[:3])}')


class _Hook:
    """A hook that stays behind when its model is copied or pickled: there it does nothing."""

    def __init__(self, call=None):
        self._call = call

    def __call__(self, *args):
        return self._call(*args) if self._call else None

    def __reduce__(self):
        return _Hook, ()


# ---- one forward pass ----------------------------------------------------------------------------------------------

def _is_linear(module):
    """Whether a module is a linear layer: of torch, or named so, with a weight that is a matrix (or comes with each call)."""
    if isinstance(module, torch.nn.Linear):
        return True
    name, weight = type(module).__name__.lower(), getattr(module, 'weight', ())
    # a norm before the product, or two inputs, make a layer's input another thing than the product's operand
    if 'linear' not in name or 'norm' in name or 'bilinear' in name:
        return False
    return weight is None or isinstance(weight, torch.Tensor) and weight.dim() == 2


def _is_attention(module):
    """Whether a module is attention alone: its forward takes query, key and value, and there is nothing to be learnt."""
    if any(True for _ in module.parameters()):
        return False
    try:
        parameters = tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return False
    return parameters[:3] in _QKV


class _Watch(TorchFunctionMode):
    """Sees one forward pass of a model: hooks on all modules inside, and this mode for the calls that they make.

    before, after: hooks of the model itself, whose pass has begun when this is made.
    """

    def __init__(self, owner, step, lengths):
        super().__init__()
        self._owner, self._step, self._lengths = owner, step, lengths
        self._stack = []                    # names of the modules that are running
        self._uses = {}                     # (type, name) -> how often it ran in this pass
        self._seen = set()                  # ids of weights that are saved
        self._attention = []                # of those running modules that are attention alone: how to save what is in it
        self._hooks = []
        self.before, self.after = self._hooks_of(owner.model, 'model')
        for name, module in owner.model.named_modules():
            if module is not owner.model:
                try:
                    before, after = self._hooks_of(module, name)
                    self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                    self._hooks.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
                except RuntimeError:        # a compiled module may refuse hooks
                    owner.say(f'{name}: takes no hooks, so nothing inside it is saved')
        self.__enter__()

    def end(self):
        self.__exit__(None, None, None)
        for hook in self._hooks:
            hook.remove()

    def _hooks_of(self, module, name):
        kind = 'linear' if _is_linear(module) else 'attention' if _is_attention(module) else 'other'
        states = []                         # one for each time that it is running, since it may call itself

        def before(module, args, kwargs):
            self._stack.append(name)
            states.append(state := {})
            with self._owner.harmless():
                if kind == 'linear':
                    state['input'], args, kwargs = _with_alias(args, kwargs, _NAMES_OF_INPUT)
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
            with self._owner.harmless():
                output = output[0] if isinstance(output, (tuple, list)) and output else output
                if not isinstance(output, torch.Tensor):            # of a forward that failed, None
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
        """base: the same numbers as y, where a hook on those hears of the gradient and on y it may not."""
        layer = self._named(name, 'linear')
        if not self._owner.wants(layer):
            return
        rows = self._rows_mask(x.shape)
        self._save(x, layer, 'linear', 'input', mask=rows)
        for role, parameter in (('weight', weight), ('bias', bias)):
            # one that several layers share is saved with the first, and so is the sum of its gradients
            if isinstance(parameter, torch.Tensor) and id(parameter) not in self._seen:
                if parameter.is_leaf:
                    self._seen.add(id(parameter))
                self._save(parameter, layer, 'linear', role)
        self._save(y, layer, 'linear', 'output', mask=rows, base=base)

    def _rows_mask(self, shape):
        """Which axes of a linear layer's input are time and batch, as in a manifest; () where that is not known."""
        if len(shape) != 3:
            return ()
        time, batch = (1, 0) if self._is_batch_first(shape) else (0, 1)
        side = self._side(shape[time], shape[batch])
        return ({'time': time, 'batch': batch, 'of': side},) if side else ()

    # ---- attention ---------------------------------------------------------------------------------------------------

    def _begin_attention(self, name, operands):
        """Save query, key and value of a module that is attention alone.  -> how to save the rest"""
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
        """-> save(role, tensor) of an attention layer; arrange makes (T, B, heads, C) of all but the weights"""
        layer = self._named(name, 'attention')
        sides = {}

        def save(role, tensor):
            if not self._owner.wants(layer):
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
            with self._owner.harmless():
                function = self._spied(function, args, kwargs)
        return function(*args, **kwargs)

    def _scaled_dot_product(self, function, args, kwargs):
        save = None
        with self._owner.harmless():
            given = dict(zip(_SDPA, args, strict=False)) | kwargs
            operands = {role: _alias(given[role]) for role in ('query', 'key', 'value')}
            if self._attention:             # the module around it is what has been saved
                self._weights(self._attention[-1], given)
            else:
                save = self._attention_saver(self._stack[-1] if self._stack else 'model', _heads_second)
                for role, tensor in operands.items():
                    save(role, tensor)
                self._weights(save, given)
                args, kwargs = (), {**given, **operands}
        output = function(*args, **kwargs)
        if save:
            with self._owner.harmless():
                save('output', output)
        return output

    def _weights(self, save, given):
        """Compute what scaled_dot_product_attention keeps to itself: softmax(q k^T scale + mask), without dropout."""
        query, key, mask = given['query'].detach(), given['key'].detach(), given.get('attn_mask')
        shape = *query.shape[:-1], key.shape[-2]
        if 4 * math.prod(shape) > self._owner.room():
            return
        with torch.no_grad():
            if given.get('enable_gqa'):
                key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            if given.get('is_causal'):
                mask = torch.ones(shape[-2:], dtype=torch.bool, device=query.device).tril()
            if mask is None:
                mask = torch.ones((), dtype=torch.bool, device=query.device)
            scale = query.shape[-1] ** -0.5 if given.get('scale') is None else given['scale']
            # one sentence at a time: a device that is full of training has little room for float32 scores
            parts = [_softmax(*operands, scale).cpu() for operands in zip(
                *(_sentences(tensor) for tensor in (query, key, mask.detach().expand(shape))), strict=True)]
            save('weights', torch.stack(parts))

    def _spied(self, function, args, kwargs):
        """-> multi_head_attention_forward, whose inner calls tell what they get.

        It is the same code over other names: nothing global changes, and nothing is computed differently.
        """
        given = inspect.signature(function).bind(*args, **kwargs).arguments
        name, heads, at = self._stack[-1], given['num_heads'], {}

        def arrange(tensor):                # q, k, v (T, B, E); the output (T*B, E)
            return tensor.reshape(-1, at['batch'], heads, tensor.shape[-1] // heads)

        save = self._attention_saver(name, arrange)

        def linear_of(layer):
            def linear(x, weight, bias=None):
                x = _alias(x)
                with self._owner.harmless():
                    if layer == 'out_proj':
                        save('output', x)
                y = F.linear(x, weight, bias)
                with self._owner.harmless():
                    self._linear(f'{name}.{layer}', x, weight, bias, y)
                return y
            return linear

        def projected(project):
            project = _with_names(project, linear=linear_of('in_proj'))

            def projection(*args):
                q, k, v = project(*args)
                with self._owner.harmless():
                    at['batch'] = q.shape[1]
                    for role, tensor in ('query', q), ('key', k), ('value', v):
                        save(role, tensor)
                return q, k, v
            return projection

        def softmax(x, dim=None, **options):
            p = F.softmax(x, dim=dim, **options)
            with self._owner.harmless():
                save('weights', p.reshape(-1, heads, *p.shape[-2:]))
            return p

        def attention(*args, **kwargs):
            with self._owner.harmless():
                self._weights(save, dict(zip(_SDPA, args, strict=False)) | kwargs)
            return F.scaled_dot_product_attention(*args, **kwargs)

        return _with_names(function, linear=linear_of('out_proj'), softmax=softmax, scaled_dot_product_attention=attention,
                           _in_projection_packed=projected(F._in_projection_packed),
                           _in_projection=projected(F._in_projection))

    # ---- both --------------------------------------------------------------------------------------------------------

    def _named(self, name, layer_type):
        """The name of a layer: name@1 for the second time that a module runs."""
        use = self._uses[layer_type, name] = self._uses.get((layer_type, name), -1) + 1
        layer = f'{name}@{use}' if use else name
        self._owner.place(layer, layer_type)            # counted, whether it is wanted or not
        return layer

    def _save(self, tensor, layer, layer_type, role, arrange=lambda tensor: tensor, mask=(), base=None):
        """Save a tensor now and its gradient when there is one."""
        def write(tensor, operation, name):
            self._owner.write(arrange(tensor.detach()), layer, layer_type, operation, name, self._step, mask, self._lengths)

        write(tensor, 'forward', role)
        if role != 'weights':               # which a fused attention has not, so neither has its gradient
            shape = tensor.shape
            self._owner.on_gradient(tensor if base is None else base,
                                    lambda gradient: write(gradient.reshape(shape), 'backward', f'grad_{role}'))

    def _is_batch_first(self, shape):
        """Whether (B, T, ...) and not (T, B, ...): as attach() was told, or as the lengths of sentences tell."""
        if self._owner.batch_first is not None:
            return self._owner.batch_first
        return bool(self._side(shape[1], shape[0])) and not self._side(shape[0], shape[1])

    def _side(self, time, batch):
        """Whose sentences lie along an axis: 'source', ..., or None where none or several could."""
        fits = [side for side in self._lengths if self._fits(side, time, batch)]
        exact = [side for side in fits if max(self._lengths[side], default=0) == time]
        return exact[0] if len(exact) == 1 else fits[0] if len(fits) == 1 else None

    def _fits(self, side, time, batch):
        return len(self._lengths[side]) == batch and max(self._lengths[side], default=0) <= time


def _alias(tensor):
    """The same numbers with a gradient of their own: of this use of them, not of all uses."""
    return tensor.view_as(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def _base(output):
    """What F.linear made, of more than two axes a view of a matrix.  A hook on the view is deaf once a rectifier has changed
    it in place; one on the matrix is not."""
    base = output._base
    return base if base is not None and base.numel() == output.numel() and base.requires_grad else output


def _with_alias(args, kwargs, names):
    """-> the first argument, or one of these names, as an alias; the arguments with it"""
    if args and isinstance(args[0], torch.Tensor):
        alias = _alias(args[0])
        return alias, (alias, *args[1:]), kwargs
    for name in names:
        if isinstance(kwargs.get(name), torch.Tensor):
            alias = _alias(kwargs[name])
            return alias, args, {**kwargs, name: alias}
    return None, args, kwargs


def _with_operands(module, args, kwargs):
    """-> {'query': alias, 'key': ..., 'value': ...} or None where they have not 3 or 4 axes; the arguments with them"""
    names = tuple(inspect.signature(module.forward).parameters)[:3]
    given = [args[place] if place < len(args) else kwargs.get(name) for place, name in enumerate(names)]
    if not all(isinstance(tensor, torch.Tensor) and tensor.dim() in (3, 4) for tensor in given):
        return None, args, kwargs
    aliases = [_alias(tensor) for tensor in given]
    args = (*aliases[:len(args)], *args[3:])
    kwargs = {**kwargs, **{name: alias for name, alias in zip(names, aliases, strict=True) if name in kwargs}}
    return dict(zip(('query', 'key', 'value'), aliases, strict=True)), args, kwargs


def _sentences(tensor):
    """(..., heads, T, C), or without heads, as (B, heads, T, C)"""
    return tensor.reshape(-1, *tensor.shape[-3:]) if tensor.dim() > 3 else tensor.reshape(-1, 1, *tensor.shape[-2:])


def _softmax(query, key, mask, scale):
    scores = query.float() @ key.float().transpose(-2, -1) * scale
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    # rows that see nothing have no weights, where softmax says NaN
    return scores.softmax(-1).masked_fill(scores.isneginf().all(-1, keepdim=True), 0)


def _heads_second(tensor):
    """(..., heads, T, C), or without heads -> (T, B, heads, C)"""
    return _sentences(tensor).permute(2, 0, 1, 3)


def _with_names(function, **names):
    """A function with other things behind some of the global names that it uses."""
    copy = types.FunctionType(function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
                              function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _parsed(parse, value, name):
    try:
        return parse(value)
    except argparse.ArgumentTypeError as error:
        raise UserError(f'{name}={value!r}: {error}') from error
