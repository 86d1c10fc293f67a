"""Saving tensors: what is found in the plans of all programs, what a run writes, and that nothing that goes wrong ends it."""
import errno
import functools
import itertools
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from places import get, on_the_cpu, put
from safetensors import safe_open
from translation import assert_same_training, newest, packed_batch, random_batch

import bench.saving
import mnist.resnet
import mnist.train
import seq2seq.train
import transformer.train
from mnist.mlp_resnet import MLPResNet
from pyops import backend, nn, ops
from pyops import plan as plans
from pyops.autograd import Tensor
from pyops.backend import as_rows, gemm, launch
from pyops.backend.kernels import KERNELS, Kernel, Made, Slice
from pyops.data.batches import TokenBatches
from pyops.errors import Interrupted, UserError
from pyops.fit import Run, batches_of, steps_left
from pyops.formats import fake_quantize
from pyops.inspect import flags, writer
from pyops.inspect.find import find
from pyops.inspect.logs import Logs
from pyops.inspect.saving import Saving
from pyops.inspect.statistics import describe
from pyops.inspect.writer import HEADER, Writer
from pyops.ndarray import as_ndarray
from pyops.ops import rounding
from pyops.ops.linear import JoinedLinear, LinearPair
from pyops.ops.packed import lengths_of, padded
from pyops.optim import Adam
from pyops.params import Parameters, Spec
from pyops.plan import Plan
from pyops.quantization import Family, Recipe, family, recording
from pyops.steps import Steps
from pyops.text.training import side as side_of
from seq2seq.model import Config as Seq2SeqConfig
from seq2seq.model import Seq2Seq
from transformer import model as transformer_model
from transformer.model import Config as TransformerConfig
from transformer.model import Transformer

# ---- what is found in a plan, against the same step without one ------------------------------------------------------


def kept(array):
    return np.array(get(array), np.float32)


TOLD = 'want_dx', 'rows', 'reverse', 'q_rows', 'k_rows'     # arguments that the witness needs


class Witness:
    """Wraps the ops that have products, and writes down what goes in and comes out of them in a step without a plan."""

    def __init__(self, monkeypatch):
        self.told, self.gradients = {}, []
        for op in (ops.Linear, LinearPair, ops.FeedForward, ops.Attention, ops.GRU, ops.EmbeddingGRU, ops.LinearCrossEntropy,
                   ops.PixelLinear):
            for way in ('forward', 'backward'):
                self._wrap(monkeypatch, op, way, getattr(self, f'{op.__name__}_{way}'))

    @staticmethod
    def _wrap(monkeypatch, op, way, tell):
        plain = getattr(op, way)

        @functools.wraps(plain)                             # with its signature, at which the tape looks
        def told(self, *arguments, **named):
            wanted = {name: value for name, value in named.items() if name in TOLD}
            tell(self, *arguments, **wanted)                # before: an `into` may be the gradient itself
            result = plain(self, *arguments, **named)
            tell(self, *arguments, **wanted, result=result)
            return result
        monkeypatch.setattr(op, way, told)

    def tell(self, layer, operation, **tensors):
        for name, array in tensors.items():
            if array is not None:
                self.told[layer, operation, name, None] = kept(array)

    def parameters(self, layer, **parameters):
        for name, parameter in parameters.items():
            if parameter:
                self.tell(layer, 'forward', **{name: parameter.value})
                self.gradients.append((layer, name, parameter))

    def finish(self, params):
        """When backward is done."""
        for layer, name, parameter in self.gradients:
            self.tell(layer, 'backward', **{f'grad_{name}': params[parameter.name].grad})

    def Linear_forward(self, op, x, result=None):
        if result and isinstance(op, JoinedLinear):
            for layer, y in zip(op.layers, op.split(result[0]), strict=True):
                self.Linear_forward(layer, x, (y, None))
        elif result:
            self.parameters(op.name, weight=op.weight, bias=op.bias)
            self.tell(op.name, 'forward', input=x, output=self.product_of(result[0], x, op.weight, op.bias))

    @staticmethod
    def product_of(y, x, weight, bias):
        """Return the product of a layer whose result is y, or more than that, as in the sublayers of a transformer on a GPU."""
        return backend.product(as_rows(x), weight.value.T, bias and bias.value) if isinstance(y, tuple) else y

    def Linear_backward(self, op, dy, ctx, want_dx=None, result=None):
        if result is None and isinstance(op, JoinedLinear):
            for layer, its_dy in zip(op.layers, op.split(dy), strict=True):
                self.Linear_backward(layer, put(np.ascontiguousarray(get(its_dy))), None)
        elif result is None:
            self.tell(op.name, 'backward', grad_output=dy)
            if want_dx is not False:
                self.product(op.name, dy, op.weight)

    def LinearPair_forward(self, op, *xs, result=None):
        if result:
            for layer, x, y in zip(op.layers, xs, result[0], strict=True):
                self.Linear_forward(layer, x, (y, None))

    def LinearPair_backward(self, op, *arguments, result=None):
        if result is None:
            for layer, dy in zip(op.layers, arguments, strict=False):
                self.Linear_backward(layer, dy, None)

    def product(self, layer, dy, weight):
        dx = backend.empty((*dy.shape[:-1], weight.value.shape[1]))
        gemm(as_rows(dx), as_rows(dy), weight.value)
        self.tell(layer, 'backward', grad_input=dx)
        return dx

    def FeedForward_forward(self, op, x, *into, result=None):
        if result:
            y, ctx = result
            self.parameters(f'{op.name}.w1', weight=op.w1, bias=op.b1)
            self.parameters(f'{op.name}.w2', weight=op.w2, bias=op.b2)
            self.tell(f'{op.name}.w1', 'forward', input=x, output=ctx.h if ctx.a is None else ctx.a)
            self.tell(f'{op.name}.w2', 'forward', input=ctx.h, output=self.product_of(y, ctx.h, op.w2, op.b2))

    def FeedForward_backward(self, op, dy, ctx, *into, result=None):
        if result is None:
            self.tell(f'{op.name}.w2', 'backward', grad_output=dy)
            dh = self.product(f'{op.name}.w2', dy, op.w2)
            launch(f'{op.activation}_backward', dh, dh, (ctx.h if ctx.a is None else ctx.a).reshape(dh.shape), dh.size)
            self.tell(f'{op.name}.w1', 'backward', grad_output=dh)
            self.product(f'{op.name}.w1', dh, op.w1)

    def Attention_forward(self, op, q, k, v, lengths=None, step=None, q_rows=None, k_rows=None, result=None):
        if result:
            q, k, v, y = (self.by_head(op, x) for x in (q, k, v, result[0]))
            if q_rows is None:
                weights = softmax(q, k, None if lengths is None else get(lengths), op.causal)
            else:                                       # each query sees all keys of its sentence, or those before it
                q_rows, k_rows = (rows._replace(offsets=get(rows.offsets)) for rows in (q_rows, k_rows))
                weights = softmax(padded(q, q_rows), padded(k, k_rows), lengths_of(k_rows), op.causal)
                weights *= (np.arange(q_rows.longest) < lengths_of(q_rows)[:, None])[:, None, :, None]
            self.tell(op.name, 'forward', query=q, key=k, value=v, output=y, weights=weights)

    def Attention_backward(self, op, dy, ctx, result=None):
        if result:
            dy, dq, dk, dv = (self.by_head(op, x) for x in (dy, *result))
            self.tell(op.name, 'backward', grad_output=dy, grad_query=dq, grad_key=dk, grad_value=dv)

    @staticmethod
    def by_head(op, x):
        *rows, D = x.shape
        return get(x).reshape(*rows, op.heads, D // op.heads)

    def GRU_forward(self, op, x, h0=None, lengths=None, rows=None, reverse=False, result=None):
        if not result:
            return
        h, ctx = result
        if rows is not None:
            states = self.states(get(h), h0, get(rows.offsets), reverse)
            self.parameters(f'{op.name}.ih', weight=op.w_ih, bias=op.b_ih)
            self.parameters(f'{op.name}.hh', weight=op.w_hh, bias=op.b_hh)
            self.tell(f'{op.name}.ih', 'forward', input=x)
            self.tell(f'{op.name}.hh', 'forward', input=states)
            self.later(op, None, 'forward', ['output'], ['output'])
            return
        states = np.concatenate([np.zeros((1, *h.shape[1:]), 'f') if h0 is None else get(h0)[None], get(h)[:-1]])
        self.parameters(f'{op.name}.ih', weight=op.w_ih, bias=op.b_ih)
        self.parameters(f'{op.name}.hh', weight=op.w_hh, bias=op.b_hh)
        for t in range(len(states)):
            self.told[f'{op.name}.ih', 'forward', 'input', t] = kept(x)[t]
            self.told[f'{op.name}.hh', 'forward', 'input', t] = states[t]
            self.later(op, t, 'forward', ['output'], ['output'])

    @staticmethod
    def states(h, h0, offsets, reverse):
        """Return the state before each step of packed rows."""
        before = np.zeros_like(h)
        for b, (start, end) in enumerate(itertools.pairwise(offsets)):
            order = np.arange(start, end)[::-1 if reverse else 1]
            before[order[1:]] = h[order[:-1]]
            if h0 is not None and len(order):
                before[order[0]] = get(h0)[b]
        return before

    def GRU_backward(self, op, dh, ctx, dh_last=None, result=None):
        if result and ctx.rows is not None:
            self.tell(f'{op.name}.ih', 'backward', grad_input=result[0])
            self.later(op, None, 'backward', ['grad_output'], ['grad_output', 'grad_input'])
        elif result:
            for t, dx in enumerate(kept(result[0])):
                self.told[f'{op.name}.ih', 'backward', 'grad_input', t] = dx
                self.later(op, t, 'backward', ['grad_output'], ['grad_output', 'grad_input'])

    def EmbeddingGRU_forward(self, op, ids, context=None, h0=None, lengths=None, rows=None, reverse=False, result=None):
        if result:
            x = get(op.table.value)[get(ids)]
            if context is not None:
                shape = len(x), *context.shape
                of_rows = np.broadcast_to(get(context), shape) if rows is None else np.repeat(
                    get(context), np.diff(get(rows.offsets)), 0)
                x = np.concatenate([x, of_rows], -1)
            self.GRU_forward(op, x, h0, lengths, rows, reverse, result)

    def EmbeddingGRU_backward(self, op, dh, ctx, dh_last=None, result=None):
        if result:
            for t in range(len(ctx.ids)) if ctx.rows is None else [None]:
                self.later(op, t, 'backward', ['grad_output', 'grad_input'], ['grad_output', 'grad_input'])

    def later(self, op, t, operation, of_ih, of_hh):
        """What a test of its own looks at."""
        for layer, names in ('ih', of_ih), ('hh', of_hh):
            for name in names:
                self.told[f'{op.name}.{layer}', operation, name, t] = None

    def LinearCrossEntropy_forward(self, op, x, labels, *gradients, result=None):
        if result:
            self.parameters(op.name, weight=op.weight, bias=op.bias)
            self.tell(op.name, 'forward', input=x)

    def LinearCrossEntropy_backward(self, op, dloss, ctx, result=None):
        if result is not None:
            self.tell(op.name, 'backward', grad_input=result)

    def PixelLinear_forward(self, op, table, rows, result=None):
        if result:
            pixels = get(table)[get(rows)] * np.float32(op.scale)
            self.parameters(op.name, weight=op.weight, bias=op.bias)
            self.tell(op.name, 'forward', input=pixels, output=result[0])

    def PixelLinear_backward(self, op, dy, ctx, result=None):
        self.tell(op.name, 'backward', grad_output=dy)


def same(a, b):
    a, b = get(a), get(b)
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def softmax(q, k, lengths, causal):
    """(B, heads, Tq, Tk) in float64"""
    (Tq, B, _, C), Tk = q.shape, len(k)
    scores = np.einsum('ibhc,jbhc->bhij', q.astype('d'), k.astype('d')) / C ** 0.5
    sees = np.arange(Tk) < (np.full(B, Tk) if lengths is None else lengths)[:, None, None, None]
    if causal:
        sees = sees & (np.arange(Tk) <= np.arange(Tq)[:, None] + Tk - Tq)
    scores = np.exp(scores - scores.max(-1, keepdims=True)) * sees
    return scores / np.maximum(scores.sum(-1, keepdims=True), 1e-300)


def look_at(plan, side=None):
    """Run a plan as a step that is saved -> {(layer, operation, name, time): (Tensor, array)}"""
    done, found = 0, {}
    looks = [(look, [tensor.rounded() for tensor in look.tensors]) for look in find(plan, side)]
    for look, tensors in looks:
        plan.run(done, look.at)
        done = look.at
        for tensor, array in zip(tensors, look.arrays(), strict=True):
            key = tensor.layer, tensor.operation, tensor.name, tensor.time
            assert key not in found and array.shape == tensor.shape and array.dtype == np.float32, key
            found[key] = tensor, array.copy()
    plan.run(done, len(plan.replayed))
    return found


def translation(model, B=5):
    """A step of a translation model, its params and inputs."""
    batch = packed_batch(*random_batch(model.config, B))
    adam, source = Adam(model.params, 0.01, max_norm=1.0), model.config.ops
    if isinstance(source, Family):
        source.attach(adam)

    def step():
        model.params.zero_grads()
        with recording(source):
            loss, ctx = model.forward(batch, step=adam.count)
            plans.boundary()
            model.backward(ctx)
    return step, adam, model.params, dict(source=batch.source.ids, target=batch.target.ids, labels=batch.labels,
                                          **model.arrays())


def of_transformer(**settings):
    sizes = dict(d_model=24, d_ff=20, heads=3, num_steps=7)
    return translation(Transformer(TransformerConfig(20, 21, **sizes | settings), 3))


def of_joined_products(**settings):
    """The transformer with one product for q, k and v of a sequence, and one for k and v of another sequence, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_model, 'joins_products', lambda: True)
        return of_transformer(**settings)


def of_seq2seq(**settings):
    return translation(Seq2Seq(Seq2SeqConfig(20, 21, embedding=10, hidden=12, num_steps=6, **settings), 3))


def of_mnist(layer_ops=None):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (40, 784)).astype(np.uint8), rng.integers(0, 10, 40).astype(np.int32)
    images[:, ::2] = 0
    model, adam, _, inputs = mnist.train.prepare(images, labels, hidden=16, layer_ops=layer_ops, as_one=False)
    rows, batch = put(np.arange(3, 20)), put(labels[3:20])

    def step():
        model.params.zero_grads()
        with recording(model.config.ops):
            _, _, ctx = model.forward(inputs['images'], rows, batch)
            plans.boundary()
            model.backward(ctx)
    return step, adam, model.params, dict(inputs, rows=rows, labels=batch)


def of_resnet():
    model = MLPResNet(20, 12, 2, norm='layer')
    model.reset_parameters(0)
    model.eval()                            # no dropout, whose masks count the steps
    rng, loss_of = np.random.default_rng(0), nn.SoftmaxLoss()
    x, labels = put(rng.standard_normal((9, 20)).astype('f')), put(rng.integers(0, 10, 9).astype('i'))
    one = put(np.ones((), 'f'))

    def step():
        model.params.zero_grads()
        loss = loss_of(model(Tensor(as_ndarray(x))), Tensor(as_ndarray(labels)))
        plans.boundary()
        loss.backward(Tensor(as_ndarray(one)))
    return step, Adam(model.params, 0.01), model.params, dict(x=x, labels=labels, one=one)


def make_biases_nonzero(params):
    noise = np.random.default_rng(0).standard_normal(params.values.size).astype('f')
    params.values[...] = put(get(params.values) + 0.01 * noise)


MODELS = {'transformer': of_transformer, 'pre_norm': lambda: of_transformer(pre_norm=True, layers=1),
          'joined products': of_joined_products, 'silu': lambda: of_transformer(activation='silu', bias=True, layers=1),
          'joined biases': lambda: of_joined_products(d_model=48, bias=True, layers=1), 'seq2seq': of_seq2seq,
          'reset_before': lambda: of_seq2seq(reset_before=True, layers=1), 'mnist': of_mnist, 'resnet': of_resnet}


@pytest.mark.parametrize('name', MODELS)
def test_all_tensors_of_all_programs_are_those_of_the_step_without_a_plan(name, monkeypatch):
    step, adam, params, inputs = MODELS[name]()
    make_biases_nonzero(params)
    with monkeypatch.context() as patch:
        witness = Witness(patch)
        step()
        witness.finish(params)
    with Plan(params, run=False, **inputs, **adam.arrays()) as plan:
        step()
        adam.step()
    before = kept(params.values)
    found = look_at(plan)
    assert not same(params.values, before), 'the step was done to its end'
    told = witness.told
    assert set(found) == set(told)
    for key, (_, array) in found.items():
        if told[key] is None:
            continue
        if key[2] == 'weights':
            np.testing.assert_allclose(array, told[key], rtol=1e-4, atol=1e-6, err_msg=str(key))
        else:
            assert same(array, told[key]), key
        assert np.any(array) or key[2:] == ('input', 0), key            # a state before the first is zeros


@pytest.mark.parametrize('reset_before', [False, True])
@pytest.mark.parametrize('context_size', [None, 0, 2])
def test_the_time_steps_of_a_gru_are_those_of_two_linear_layers_in_torch(torch, reset_before, context_size):
    """context_size None: a GRU whose input is an array;  else one that reads words, beside so large a context."""
    rng, (T, B, I, H) = np.random.default_rng(0), (4, 3, 5, 6)

    def normal(*shape):
        return rng.standard_normal(shape).astype('f')
    shapes = {'gru.w_ih': (3 * H, I), 'gru.w_hh': (3 * H, H), 'gru.b_ih': (3 * H,), 'gru.b_hh': (3 * H,)}
    x, h0, dh, dh_last = normal(T, B, I), normal(B, H), normal(T, B, H), normal(B, H)
    if context_size is None:
        inputs, op_of = dict(x=x, h0=h0), ops.GRU
    else:
        ids, op_of = rng.integers(0, 4, (T, B)).astype(np.int32), ops.EmbeddingGRU
        inputs = dict(ids=ids, context=normal(B, context_size) if context_size else None, h0=h0)
        shapes = {'embedding.weight': (4, I - context_size)} | shapes
    params = Parameters({name: Spec(shape, lambda g, shape: normal(*shape)) for name, shape in shapes.items()})
    if context_size is not None:
        x = get(params['embedding.weight'].value)[ids]
        if context_size:
            x = np.concatenate([x, np.broadcast_to(inputs['context'], (T, B, context_size))], -1)
    op = op_of(*(params[name] for name in params), reset_before)
    inputs = {name: array if array is None else put(array) for name, array in inputs.items()}
    dh_, dh_last_ = put(dh), put(dh_last)
    arrays = {name: array for name, array in inputs.items() if array is not None}
    with Plan(params, run=False, dh=dh_, dh_last=dh_last_, **arrays) as plan:
        params.zero_grads()
        _, ctx = op.forward(*inputs.values())
        plan.boundary()
        op.backward(dh_, ctx, dh_last_)
    found = look_at(plan)

    w_ih, w_hh, b_ih, b_hh = (torch.tensor(get(params[f'gru.{name}'].value), dtype=torch.float64)
                              for name in ('w_ih', 'w_hh', 'b_ih', 'b_hh'))
    h, told, losses = torch.tensor(h0, dtype=torch.float64, requires_grad=True), {}, []
    for t in range(T):
        before = h * 1.0                                        # what these products alone make of the gradient
        xt = torch.tensor(x[t], dtype=torch.float64, requires_grad=True)
        a = xt @ w_ih.T + b_ih
        p_rz = before @ w_hh[:2 * H].T + b_hh[:2 * H]
        r, z = torch.sigmoid(a[:, :2 * H] + p_rz).chunk(2, 1)
        gate = r.detach() if reset_before else 1.0              # the gate's own gradient goes another way
        p_n = (gate * before) @ w_hh[2 * H:].T + b_hh[2 * H:]
        if reset_before:
            n = torch.tanh(a[:, 2 * H:] + p_n + ((r - r.detach()) * h.detach()) @ w_hh[2 * H:].T)
        else:
            n = torch.tanh(a[:, 2 * H:] + r * p_n)
        h = (1 - z) * n + z * h
        for one in (before, xt, a, p_rz, p_n):
            one.retain_grad()
        told[t] = before, xt, a, p_rz, p_n
        losses.append((h * torch.tensor(dh[t])).sum())
    (sum(losses) + (h * torch.tensor(dh_last)).sum()).backward()

    def check(layer, operation, name, t, want):
        np.testing.assert_allclose(found[f'gru.{layer}', operation, name, t][1], want.detach().numpy(), rtol=2e-4, atol=2e-5,
                                   err_msg=f'{layer} {operation} {name} {t}')
    for t, (before, xt, a, *p) in told.items():
        for layer, x_, y_ in (('ih', xt, [a]), ('hh', before, p)):
            check(layer, 'forward', 'input', t, x_)
            check(layer, 'forward', 'output', t, torch.cat(y_, 1))
            check(layer, 'backward', 'grad_output', t, torch.cat([part.grad for part in y_], 1))
            check(layer, 'backward', 'grad_input', t, x_.grad)
    assert len(found) == 2 * (4 * T + 4)


@pytest.mark.parametrize('cell', ['lstm', 'tanh', 'relu'])
def test_the_time_steps_of_an_lstm_or_rnn_are_those_of_two_linear_layers_in_torch(torch, cell):
    rng, (T, B, I, H) = np.random.default_rng(0), (4, 3, 5, 6)
    rows, states = (4 * H, 2) if cell == 'lstm' else (H, 1)
    shapes = {'rnn.w_ih': (rows, I), 'rnn.w_hh': (rows, H), 'rnn.b_ih': (rows,), 'rnn.b_hh': (rows,)}
    params = Parameters({name: Spec(shape, lambda g, shape: rng.standard_normal(shape).astype('f'))
                         for name, shape in shapes.items()})
    weights = [params[name] for name in shapes]
    op = ops.LSTM(*weights) if cell == 'lstm' else ops.RNN(*weights, nonlinearity=cell)
    x, h0, c0, dy = (rng.standard_normal(shape).astype('f') for shape in ((T, B, I), (B, H), (B, H), (states, T, B, H)))
    arrays = dict(x=put(x), h0=put(h0)) | (dict(c0=put(c0)) if states == 2 else {})
    upstream = put(dy if states == 2 else dy[0])
    with Plan(params, run=False, dy=upstream, **arrays) as plan:
        params.zero_grads()
        _, ctx = op.forward(*arrays.values())
        plan.boundary()
        op.backward(upstream, ctx)
    found = look_at(plan)

    w_ih, w_hh, b_ih, b_hh = (torch.tensor(get(p.value), dtype=torch.float64) for p in weights)
    h, c = (torch.tensor(state, dtype=torch.float64, requires_grad=True) for state in (h0, c0))
    steps, loss = [], 0
    for t in range(T):
        before, xt = h * 1.0, torch.tensor(x[t], dtype=torch.float64, requires_grad=True)
        of_x, of_h = xt @ w_ih.T + b_ih, before @ w_hh.T + b_hh
        if cell == 'lstm':
            i, f, g, o = (of_x + of_h).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            loss = loss + (c * torch.tensor(dy[1, t])).sum()
        else:
            h = getattr(torch, cell)(of_x + of_h)
        loss = loss + (h * torch.tensor(dy[0, t])).sum()
        for one in (before, xt, of_x, of_h):
            one.retain_grad()
        steps.append((('ih', xt, of_x), ('hh', before, of_h)))
    loss.backward()
    for t, layers in enumerate(steps):
        for layer, of, y in layers:
            for operation, name, want in (('forward', 'input', of), ('forward', 'output', y),
                                          ('backward', 'grad_output', y.grad), ('backward', 'grad_input', of.grad)):
                np.testing.assert_allclose(found[f'rnn.{layer}', operation, name, t][1], want.detach().numpy(), rtol=2e-4,
                                           atol=2e-5, err_msg=f'{layer} {operation} {name} {t}')
    assert len(found) == 2 * (4 * T + 4)


@pytest.mark.parametrize('way', ['step', 'gradients', 'forward'])
def test_the_layers_of_a_network_that_is_one_op_are_those_of_its_parts(way):
    step, adam, params, inputs = of_mnist()
    make_biases_nonzero(params)
    with Plan(params, run=False, **inputs, **adam.arrays()) as parts:
        step()
    want = {('mlp.w' + layer[-1], *rest): array for (layer, *rest), (_, array) in look_at(parts).items()}
    images, labels, _ = (inputs.pop(name) for name in ('images', 'labels', 'rows'))
    table = np.zeros(len(images), np.int32)
    table[3:20] = get(labels)
    table, rows, one = put(table), put(np.arange(3, 20)), put(np.ones(1, np.float32))
    params.m[...], params.v[...] = 0, 0
    op = ops.MLPGradients(*(params[name] for name in params), name='mlp')
    with Plan(params, run=False, images=images, labels=table, rows=rows, one=one, **adam.arrays()) as plan:
        if way == 'step':
            op.step(images, rows, table, adam)
        elif way == 'gradients':
            op.gradients(images, rows, table)
        else:
            params.zero_grads()
            _, ctx = op.forward(images, rows, table)
            plan.boundary()
            op.backward(one, ctx)
    found = {key: array for key, (_, array) in look_at(plan).items()}
    assert set(found) == set(want) and len(want) == 15
    for key, array in want.items():
        assert np.abs(found[key] - array).max() <= 1e-6 * np.abs(array).max() and np.any(array), key


def test_a_plan_with_a_convolution_has_the_tensors_of_its_other_layers():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Flatten(), nn.Linear(36, 2)), put(np.ones((2, 3, 5, 5), 'f'))
    with Plan(model.params, x=x) as plan:
        y, ctx = model.forward(x)
        plan.boundary()
        model.backward(y, ctx)
    assert {layer for layer, *_ in look_at(plan)} == {'2'} and not plan.undeclared()


def test_a_plan_reports_products_of_parameters_that_no_op_declares(monkeypatch):
    params = Parameters({'a.weight': Spec((3, 4), lambda g, shape: np.ones(shape, np.float32))})
    weight, x, y = params['a.weight'].value, put(np.ones((2, 4), 'f')), put(np.zeros((2, 3), 'f'))
    plan = Plan(params, x=x)
    monkeypatch.setattr(plan, 'undeclared', lambda: [])             # which the fixture asks of each plan of a test
    with plan:
        gemm(y, x, weight.T)
        launch('relu_forward', y, weight, 6)
    monkeypatch.undo()
    assert plan.undeclared() == ['action 0, gemm: takes a.weight_view, and its product is not declared; the op must call '
                                 'note_product after the launch']
    monkeypatch.delitem(KERNELS, 'relu_forward')
    assert 'action 1, relu_forward: takes a.weight, and the kernel is not declared' in plan.undeclared()[1]


def test_steps_that_are_not_saved_are_whole_replays(tmp_path, monkeypatch):
    step, adam, params, inputs = of_mnist()
    rows = inputs.pop('rows')
    steps = Steps(lambda rows: step(), params, **inputs)
    saving = Saving(flags.Wanted(str(tmp_path), ('*',), flags.StepRanges('1', (range(1, 2),)), 10**8, '100M', 'safetensors'),
                    steps, rows, 0, 3, {})
    run, ran = Plan.run, []
    monkeypatch.setattr(Plan, 'run', lambda self, first=0, last=None: (ran.append((first, last)), run(self, first, last)))
    for number in range(3):
        saving.step(rows)
        pieces, whole = list(ran), (0, None)
        ran.clear()
        assert (pieces == [whole]) == (number != 1)
        if number == 1:             # no action is left out and none is done twice
            assert [first for first, _ in pieces[1:]] == [last for _, last in pieces[:-1]]
            assert (pieces[0][0], pieces[-1][1]) == (0, len(steps.plan(rows).replayed))
    assert saving.writer.close().tensors == 15


# ---- with rounded operands: what is saved is what was not rounded yet ------------------------------------------------------

RECIPE = ('fwd=mxfp8:block=4,dgrad=mxfp4:block=8:scale=even,wgrad.g=mxfp8:block=7,wgrad.x=mxfp8:elem=e5m2:block=3,'
          'attention=mxfp8:block=5,dq=bf16,dk=bf16,dv.p=mxfp4:block=7')
TRANSFORMED = ('fwd=mxfp4:hadamard=16,dgrad=int4:hadamard=16:signs=5,wgrad=hifp8:hadamard=32,attention=nvfp4:hadamard=16,'
               'dq=bf16:hadamard=32:signs=1')
SCALED = 'fwd.x=nvfp4:block=3,fwd.w=mxfp8:block=2x3,dgrad.g=int8,dgrad.w=fp8:block=2x2,wgrad=int4,attention=mxfp6:block=3'
DELAYED = 'fwd=fp8:delayed=2,dgrad=fp8:elem=e5m2:delayed=1:margin=1,wgrad=int8:delayed,attention=fp8:delayed,qk=fp8:factor=3.7'
QUANTIZED = {
    'transformer': lambda made: of_transformer(ops=made),
    'no_dropout': lambda made: of_transformer(ops=made, dropout=0.0, layers=1),
    'joined products': lambda made: of_joined_products(ops=made, layers=1),
    'seq2seq': lambda made: of_seq2seq(ops=made, layers=1),
    'reset_before': lambda made: of_seq2seq(ops=made, reset_before=True),
    'mnist': lambda made: of_mnist(layer_ops=made)}


@pytest.mark.parametrize('recipe', [RECIPE, 'hifp8', SCALED, TRANSFORMED, DELAYED])
@pytest.mark.parametrize('name', QUANTIZED)
def test_every_rounded_operand_can_be_made_again_from_what_was_saved(name, recipe, monkeypatch):
    made = []           # (layer, product, operand, Format, rounded)

    def told(x, fmt, axis=-1, *, name, **how):
        y = fake_quantize(x, fmt, axis, name=name, **how)
        made.append((*name.rsplit('.', 2), fmt, kept(y)))
        return y
    step, adam, params, inputs = QUANTIZED[name](Family(Recipe.parse(recipe)))
    if adam.histories and name != 'mnist':              # of mnist the first step, which has no history
        step()
        adam.histories.advance()
    with monkeypatch.context() as patch:
        patch.setattr(rounding, 'fake_quantize', told)
        step()
    with Plan(params, run=False, **inputs, **adam.arrays()) as plan:
        step()
    found = look_at(plan)
    assert len(made) > 5
    uses = {}           # (layer, product, operand) -> [(use, array of all time steps or of one)]
    for (layer, *_), (tensor, array) in found.items():
        for use in tensor.uses:
            uses.setdefault((layer, use['product'], use['operand']), []).append((use, tensor, array))
    for layer, product, operand, fmt, want in made:
        names = layer, f'{layer}.0', f'{layer}.24'              # with reset_before: rows of one weight
        layers = [key for key in uses if key[0] in names and key[1:] == (product, operand)]
        assert layers, (layer, product, operand)
        candidates = [one for key in layers for one in uses[key]]
        has_past = fmt.delayed and get(adam.histories.history).any()
        assert all('factor=' in use['format'] if has_past else use['format'] == str(fmt) for use, _, _ in candidates)
        rounded = []
        for use, tensor, array in candidates:
            if tensor.time is not None and array.size != want.size:         # rounded for all time steps at once
                array = np.stack([one for _, (its, one) in sorted(found.items(), key=lambda item: item[0][3] or 0)
                                  if its[:5] == tensor[:5]])
            rows = array.reshape(-1, array.shape[-1]) if use['axis'] == 'tokens' else array
            rounded.append(fake_quantize(rows, use['format'], 0 if use['axis'] == 'tokens' else use['axis']))
        if len(layers) > 1 and operand == 'w':
            rounded.append(np.concatenate(rounded))
        assert any(same(one.reshape(-1), want.reshape(-1)) for one in rounded), (layer, product, operand, fmt)


def found_in(plan):
    return [(look.at, tensor) for look in find(plan) for tensor in look.tensors]


def shared_inputs(tensors):
    """The layers whose tensor has the content of an earlier one.   tensors: of found_in"""
    seen, layers = set(), []
    for _, tensor in tensors:
        if tensor.content in seen:
            layers.append(f'{tensor.layer} {tensor.name}')
        seen |= {tensor.content} - {None}
    return layers


@pytest.mark.parametrize('recipe', ['none', 'mxfp8'])
@pytest.mark.parametrize('name', QUANTIZED)
def test_what_is_found_does_not_depend_on_the_names_of_arrays(name, recipe):
    """Ops give them to arrays for people to read."""
    step, adam, params, inputs = QUANTIZED[name](family(Recipe.parse(recipe)))
    plans_of = []
    for rename in (lambda name: name, lambda name: 'x'):
        with Plan(params, run=False, **inputs, **adam.arrays()) as plan, \
                backend.hooks(lambda shape, dtype, name, kind, plan=plan, rename=rename:
                              plan._allocate(shape, dtype, rename(name), kind)):
            step()
        plans_of.append(plan)
    assert 'Tensor(x)' in plans_of[1].listing() and plans_of[0].listing() != plans_of[1].listing()
    one, other = map(found_in, plans_of)
    assert shared_inputs(one) == shared_inputs(other)
    assert [(at, tensor._replace(content=None)) for at, tensor in one] == [
        (at, tensor._replace(content=None)) for at, tensor in other] != []


@pytest.mark.parametrize('recipe', ['none', 'mxfp8'])
@pytest.mark.parametrize('name', QUANTIZED)
def test_a_plan_lists_every_gradient_as_one(name, recipe):
    step, adam, params, inputs = QUANTIZED[name](family(Recipe.parse(recipe)))
    with Plan(params, run=False, **inputs, **adam.arrays()) as plan:
        step()
    written = [(action.kernel, argument, tensor) for action in plan.actions for argument, tensor in action.split()[1].items()
               if argument.startswith('d')]                             # the header's names: dx, dweight, dgates, ...
    def argument(source):
        source = source.source if isinstance(source, Slice) else source
        return source[0] if isinstance(source, tuple) else source.removesuffix("'")

    operands = [(action.kernel, role, action.tensors[argument(source)])
                for action in plan.actions for note in action.notes for role, source in note.product.roles.items()
                if role in (*rounding.GRADIENTS, 'dx', 'dq', 'dk', 'dv') and not isinstance(source, Made)]
    assert written and [one for one in written + operands if one[-1].kind != 'gradient'] == []


def test_a_rounded_operand_is_recognised_by_the_declaration_of_the_kernel(monkeypatch):
    step, adam, params, inputs = QUANTIZED['mnist'](family(Recipe.parse('mxfp8')))
    with Plan(params, run=False, **inputs, **adam.arrays()) as plan:
        step()
    assert {use['format'] for _, tensor in found_in(plan) for use in tensor.uses} == {'mxfp8'}
    monkeypatch.setitem(KERNELS, 'fake_quantize', Kernel())
    assert not any(tensor.uses for _, tensor in found_in(plan))


# ---- what a run writes ----------------------------------------------------------------------------------------------------

NAME = re.compile(r'\d{8}_\d{6}_\d{4}_(linear|attention)_L\d+_(forward|backward)_(fp32|hifp8)_[a-z_]+(_t\d+)?'
                  r'\.(safetensors|pt)')
TRANSLATE = ['-f', 'embedded', '-t', '1', '-b', '100', '--num-steps', '7']
TRANSFORMER = [*TRANSLATE, '--d-model', '16', '--d-ff', '8', '--layers', '1']
SEQ2SEQ = [*TRANSLATE, '--embedding', '8', '--hidden', '10', '--layers', '1']
DIGITS = ['--embedded', '--quiet', '-b', '1000', '-e', '1', '--hidden', '12']


def lines(folder, kind=None):
    told = [json.loads(line) for line in (Path(folder) / 'manifest.jsonl').read_text().splitlines()]
    return told if kind is None else [line for line in told if line['kind'] == kind]


def files(folder):
    return sorted(name for name in os.listdir(folder) if name != 'manifest.jsonl')


@on_the_cpu
def test_the_folder_of_a_run(tmp_path, capsys):
    dump = tmp_path / 'dump'
    flags = ['-e', '2', '-c', str(tmp_path / 'saved'), *TRANSFORMER]
    transformer.train.main([*flags, '--save-tensors', str(dump), '--save-steps', '1:100:3'])
    out = capsys.readouterr().out.splitlines()
    transformer.train.main(['-e', '2', '-c', str(tmp_path / 'plain'), *TRANSFORMER])
    assert_same_training(newest(tmp_path / 'saved'), newest(tmp_path / 'plain'))

    tensors = lines(dump, 'tensor')
    assert [line['counter'] for line in tensors] == list(range(1, len(tensors) + 1))
    assert sorted(line['file'] for line in tensors) == files(dump) and all(map(NAME.fullmatch, files(dump)))
    assert {line['step'] for line in tensors} == {1, 4, 7}                      # of 2 epochs of 4 batches
    assert {line['layer_type'] for line in tensors} == {'linear', 'attention'}
    assert [line['step'] for line in lines(dump, 'step')] == list(range(8))
    assert all(line['loss'] > 0 and line['norm'] > 0 for line in lines(dump, 'step'))
    (first,), (end,) = lines(dump, 'run'), lines(dump, 'end')
    assert (first['program'], first['origin'], first['version']) == ('transformer', 'pyops', 1)
    assert first['settings']['d_model'] == 16
    nbytes = sum({os.stat(dump / name).st_ino: os.path.getsize(dump / name) for name in files(dump)}.values())
    assert end == {'kind': 'end', 'steps': 8, 'tensors': len(tensors), 'bytes': nbytes}
    assert f'tensors saved : {len(tensors)} ({writer.size_text(nbytes)}) in {dump}' in out
    (said,) = [line for line in out if line.startswith('saving tensors : ')]
    first_of = {os.stat(dump / line['file']).st_ino: line for line in reversed(tensors)}        # the others are links
    promised = len(tensors) * HEADER + sum(4 * np.prod(line['shape']) for line in first_of.values())
    assert said == (f'saving tensors : {len({line["layer"] for line in tensors})} layers, {len(tensors) // 3} tensors and '
                    f'{writer.size_text(promised / 3)} a step, 3 steps from 1 to 7, {writer.size_text(promised)} in {dump}')
    assert nbytes < promised

    logs = Logs(dump)
    assert not logs.skipped and len(logs.entries) == len(tensors)
    for entry in logs.entries:
        array, mask = entry.load(), logs.mask(entry)
        with safe_open(entry.path, 'np') as file:
            assert json.loads(file.metadata()['pyops'])['file'] == first_of[os.stat(entry.path).st_ino]['file']
            assert list(file.keys()) == ['tensor']
        assert entry.statistics == describe(array, mask), entry.title
        sides = [part['of'] for part in entry.mask]
        if entry.name in ('weight', 'bias', 'grad_weight', 'grad_bias'):
            assert sides == []
        elif entry.name == 'weights':
            assert sides == ['source' if 'encoder' in entry.layer else 'target',
                             'target' if 'decoder.0.self' in entry.layer else 'source']
            query, key = logs.tokens(entry, 0)
            assert (query[0] == '<bos>') == (sides[0] == 'target') and ('<eos>' in key) == (sides[1] == 'source')
            valid = np.broadcast_to(mask, array.shape)      # 0 in the rows and columns beyond a sentence
            np.testing.assert_allclose(array.sum(-1), valid.any(-1), atol=1e-5)
            assert not array[~valid].any()
        else:
            of_memory = entry.layer.endswith(('cross_attention.k', 'cross_attention.v')) or (
                entry.layer.endswith('cross_attention') and entry.name.endswith(('key', 'value')))
            side = 'source' if 'encoder' in entry.layer or of_memory else 'target'
            (batch,) = (line for line in lines(dump, 'batch') if line['step'] == entry.step)
            assert sides == [] and len(array) == sum(batch['lengths'][side]), entry.title
    links = {line['layer']: first_of[os.stat(dump / line['file']).st_ino]['layer'] for line in tensors
             if line['name'] == 'input' and line['step'] == 4}
    assert {layer: first for layer, first in links.items() if layer != first} == {
        f'{attention}.{one}': f'{attention}.{first}' for attention, first, others in (
            ('encoder.0.self_attention', 'q', 'kv'), ('decoder.0.self_attention', 'q', 'kv'),
            ('decoder.0.cross_attention', 'k', 'v')) for one in others}
    assert len(first_of) == len(tensors) - 3 * 5
    batches = lines(dump, 'batch')
    kinds = [(line['kind'], line.get('step')) for line in lines(dump)]
    for line in batches:
        assert kinds.index(('batch', line['step'])) < kinds.index(('tensor', line['step']))
        for side in ('source', 'target'):
            assert list(map(len, line['tokens'][side])) == line['lengths'][side] and len(line['lengths'][side]) == 100


@on_the_cpu
def test_a_recurrent_run_resumed_goes_on_in_the_same_folder(tmp_path, capsys):
    dump, flags = tmp_path / 'dump', ['-c', str(tmp_path / 'ckpt'), *SEQ2SEQ]
    save = ['--save-tensors', str(dump), '--save-layers', 'encoder.*,output', '--save-steps', '0,6']
    seq2seq.train.main(['-e', '1', *flags, *save])
    seq2seq.train.main(['-e', '2', *flags, *save])
    seq2seq.train.main(['-e', '2', '-c', str(tmp_path / 'plain'), *SEQ2SEQ])
    assert_same_training(newest(tmp_path / 'ckpt'), newest(tmp_path / 'plain'))
    assert [line['step'] for line in lines(dump, 'step')] == list(range(10))
    assert len(lines(dump, 'run')) == 2 and {line['step'] for line in lines(dump, 'tensor')} == {0, 6}
    tensors = [line for line in lines(dump, 'tensor') if line['step'] == 6]
    (batch,) = (line for line in lines(dump, 'batch') if line['step'] == 6)
    for suffix in ('ih', 'hh'):
        for name in ('input', 'output', 'grad_output', 'grad_input'):
            (line,) = [line for line in tensors if line['layer'] == f'encoder.rnn.0.{suffix}' and line['name'] == name]
            assert line['time'] is None and line['mask'] == [] and line['file'].endswith(f'_{name}.safetensors')
            assert line['shape'][0] == sum(batch['lengths']['source'])          # all tokens of all sentences
    assert {line['layer'] for line in tensors} == {'encoder.rnn.0.ih', 'encoder.rnn.0.hh', 'output'}


@on_the_cpu
@pytest.mark.parametrize('main', [mnist.train.main, mnist.resnet.main])
def test_digits(main, tmp_path, capsys, torch):
    main([*DIGITS, '--save-tensors', str(tmp_path), '--save-steps', '2', '--save-as', 'pt'])
    saved = capsys.readouterr().out.splitlines()
    main(DIGITS)
    plain = capsys.readouterr().out.splitlines()
    assert [line for line in saved if 'tensors' not in line] == plain
    assert len(lines(tmp_path, 'step')) == 10 and not lines(tmp_path, 'batch') and all(map(NAME.fullmatch, files(tmp_path)))
    for line in lines(tmp_path, 'tensor'):
        kept = torch.load(tmp_path / line['file'], weights_only=True)
        assert json.loads(kept['pyops']) == line and kept['tensor'].dtype == torch.float32
        assert list(kept['tensor'].shape) == line['shape'] and line['mask'] == []
        assert line['statistics'] == describe(kept['tensor'].numpy())
    axes = {line['axis'] for line in lines(tmp_path, 'tensor') if (line['name'], line['index']) == ('weight', 0)}
    assert axes == ({0} if main is mnist.train.main else {-1})


@on_the_cpu
def test_a_run_with_rounded_operands_says_so(tmp_path, capsys):
    transformer.train.main(['-e', '1', '-c', str(tmp_path / 'c'), *TRANSFORMER, '--quant', 'hifp8', '--save-steps', '3',
                            '--save-tensors', str(tmp_path / 'dump'), '--save-layers', '*self_attention*'])
    tensors = {(line['layer'], line['name']): line for line in lines(tmp_path / 'dump', 'tensor')}
    one = tensors['encoder.0.self_attention.q', 'input']
    assert one['format'] == 'hifp8' and '_forward_hifp8_input' in one['file'] and one['options'] == {}
    assert [list(use.values()) for use in one['uses']] == [['fwd', 'x', 'hifp8', -1], ['wgrad', 'x', 'hifp8', -1]]
    assert tensors['encoder.0.self_attention.q', 'output']['format'] == 'fp32'
    assert all('_hifp8_' in line['file'] for line in tensors.values())          # what all of it was calculated with
    np.testing.assert_allclose(Logs(tmp_path / 'dump').entries[0].load().std(), one['statistics']['std'], rtol=0.5)


# ---- how much, which, when ------------------------------------------------------------------------------------------------

@on_the_cpu
def test_at_the_cap_saving_ends_and_training_goes_on(tmp_path, capsys):
    flags = ['-e', '2', *TRANSFORMER, '--save-layers', 'output', '--save-steps', '::2']
    transformer.train.main([*flags, '-c', str(tmp_path / 'c'), '--save-tensors', str(tmp_path / 'd'), '--save-max', '0.3M'])
    out = capsys.readouterr().out
    each = re.search(r'tensors and ([\d.]+) KB a step, 4 steps from 0 to 6, [\d.]+ KB in .*; --save-max 0.3M ends it '
                     'after 2 steps', out)
    assert 100 < float(each[1]) <= 150
    assert 'saving of tensors ended before step 4 : --save-max 0.3M is reached; training goes on\n' in out
    assert {line['step'] for line in lines(tmp_path / 'd', 'tensor')} == {0, 2}
    assert sum(os.path.getsize(tmp_path / 'd' / name) for name in files(tmp_path / 'd')) < 300_000
    assert len(lines(tmp_path / 'd', 'step')) == 8 and newest(tmp_path / 'c')[0]['step'][0] == 8


@on_the_cpu
def test_max_steps_ends_a_run_that_goes_on_later(tmp_path, capsys):
    for steps, saved in ((3, 3), (4, 7), (1, 8)):           # in an epoch; behind the next one's begin; at its end
        transformer.train.main(['-e', '9', '-c', str(tmp_path / 'parts'), *TRANSFORMER, '--max-steps', str(steps)])
        assert newest(tmp_path / 'parts')[0]['step'][0] == saved
    transformer.train.main(['-e', '2', '-c', str(tmp_path / 'whole'), *TRANSFORMER])
    assert_same_training(newest(tmp_path / 'parts'), newest(tmp_path / 'whole'))
    mnist.train.main([*DIGITS, '--max-steps', '4', '--save-tensors', str(tmp_path / 'd')])
    assert [line['step'] for line in lines(tmp_path / 'd', 'step')] == [0, 1, 2, 3]


def test_steps_left():
    run = Run(0, 100, epoch=1, position=250)
    assert steps_left(run, batches_of(run, 451), 3) == 3 + 5
    assert steps_left(run, batches_of(run, 451, drop_last=True), 3) == 2 + 4
    assert steps_left(run, batches_of(run, 451), 3, max_steps=7) == 7 and steps_left(run, batches_of(run, 451), 1) == 0
    tokens = TokenBatches(np.full((10, 2), 5), 20)
    assert steps_left(Run(0, 1), tokens, 2) == 3 + 3 and steps_left(Run(0, 1, position=4), tokens, 1) == 2


def test_the_environment_asks_for_saving_and_flags_win():
    def wanted(argv, **environment):
        parser = mnist.train.program.parser('mnist.train', '', 30, '')
        return flags.wanted(parser.parse_args(argv), environment)
    assert wanted([]) is None and wanted([], TENSOR_SAVE_ENABLED='off', TENSOR_SAVE_DIR='d') is None
    for on in ('true', '1', 'Yes', 'ON'):
        assert wanted([], TENSOR_SAVE_ENABLED=on).folder == './tensor_logs'
    it = wanted(['--save-max', '1.5g'], TENSOR_SAVE_ENABLED='1', TENSOR_SAVE_DIR='d')
    assert (it.folder, it.patterns, it.limit, it.as_) == ('d', ('*',), 1_500_000_000, 'safetensors')
    assert wanted(['--save-tensors', 'f'], TENSOR_SAVE_ENABLED='1', TENSOR_SAVE_DIR='d').folder == 'f'
    assert list(it.steps.within(0, 45)) == [0, 10, 20, 30, 40] and list(it.steps.within(15, 1000)) == list(range(20, 100, 10))
    steps = wanted(['--save-tensors', 'f', '--save-steps', '5,3:,3::4,7:9']).steps
    assert 2 not in steps and 3 in steps and 10**9 in steps and list(steps.within(0, 6)) == [3, 4, 5]


BAD = {
    'layers': (['--save-layers', 'encoder.0.self_atention'], 'fits none of the 20 layers; there are, among others, '
               'encoder.0.self_attention,'),
    'what has parts': (['--save-layers', 'encoder.0'], 'there are, among others, encoder.0.*, '),
    'one of several': (['--save-layers', 'encoder.*,x'], '--save-layers x: fits none of the 20 layers'),
    'too large a step': (['--save-max', '1K'], r'--save-max 1K: one step is .* of 20 layers; give a larger size, or fewer'),
    'no plan': (['--no-plan'], '--no-plan: tensors are taken from the plan of a step; leave it out, or save none'),
    'serving': (['-e', '0'], '--save-tensors: -e 0 serves'),
}


@on_the_cpu
@pytest.mark.parametrize('name', BAD)
def test_what_cannot_be_saved_is_said_before_training(name, tmp_path, capsys):
    argv, text = BAD[name]
    with pytest.raises(UserError, match=text) as raised:
        transformer.train.main(['-e', '1', '-c', str(tmp_path / 'c'), *TRANSFORMER, '--save-tensors', str(tmp_path / 'd'),
                                *argv])
    assert '\n' not in str(raised.value) and not (tmp_path / 'd').exists()
    assert not any(name.endswith('.safetensors') for _, _, names in os.walk(tmp_path) for name in names)


@pytest.mark.parametrize('argv, text', [
    (['--save-steps', '0:10'], '--save-steps: nothing is saved without --save-tensors DIR, or TENSOR_SAVE_ENABLED=true'),
    (['--save-as', 'pt'], '--save-as: nothing is saved without'),
    (['--save-tensors', ''], "--save-tensors: expected a folder, got ''")])
def test_flags_that_say_how_and_not_that(argv, text):
    with pytest.raises(UserError, match=re.escape(text)):
        transformer.train.main(argv)


def test_an_environment_that_says_neither_yes_nor_no(monkeypatch):
    monkeypatch.setenv('TENSOR_SAVE_ENABLED', 'maybe')
    for main in (transformer.train.main, mnist.train.main):
        with pytest.raises(UserError, match='^TENSOR_SAVE_ENABLED=maybe: expected true or false$'):
            main([])


@pytest.mark.parametrize('flag, value', [
    ('--save-steps', ''), ('--save-steps', '1:2:3:4'), ('--save-steps', 'a'), ('--save-steps', '5:5'), ('--save-steps', '::0'),
    ('--save-steps', '-1:3'), ('--save-steps', '1,,2'), ('--save-max', '0'), ('--save-max', '2X'), ('--save-max', ''),
    ('--save-layers', ''), ('--save-layers', 'a,,b'), ('--save-as', 'npy'), ('--max-steps', '0')])
def test_a_malformed_flag(flag, value, capsys):
    with pytest.raises(SystemExit) as left:
        seq2seq.train.main(['--save-tensors', 'd', f'{flag}={value}'])
    error = capsys.readouterr().err
    assert left.value.code == 2 and flag in error and error.count('\n') == 1, error


@on_the_cpu
def test_a_folder_that_cannot_be_made_and_torch_that_is_missing(tmp_path, capsys, monkeypatch):
    (tmp_path / 'file').write_text('')
    argv = ['-e', '1', '-c', str(tmp_path / 'c'), *TRANSFORMER, '--save-tensors']
    with pytest.raises(UserError, match='file/d: cannot save tensors there .*; name a folder that can be written$'):
        transformer.train.main([*argv, str(tmp_path / 'file' / 'd')])
    monkeypatch.setitem(sys.modules, 'torch', None)
    with pytest.raises(UserError, match='^--save-as pt: torch is not installed: install it with: pip install torch$'):
        transformer.train.main([*argv, str(tmp_path / 'd'), '--save-as', 'pt'])


@on_the_cpu
def test_a_disk_with_too_little_room_is_said_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shutil, 'disk_usage', lambda folder: Namespace(free=2 * 10**6))
    with pytest.raises(UserError, match=r'd: [\d.]+ MB of tensors will be saved and 2.0 MB are free; make room, or save less'):
        transformer.train.main(['-e', '1', '-c', str(tmp_path / 'c'), *TRANSFORMER, '--save-tensors', str(tmp_path / 'd')])


@on_the_cpu
def test_a_run_that_would_save_nothing_ends_before_the_training(tmp_path, capsys):
    run = ['-e', '1', '-c', str(tmp_path / 'c'), *TRANSFORMER]
    argv = [*run, '--save-tensors', str(tmp_path / 'd'), '--save-steps', '50:60']
    with pytest.raises(UserError, match='^--save-steps 50:60: contains none of the steps 0 to 3 of this run; give some of th'):
        transformer.train.main(argv)
    assert not list((tmp_path / 'c').glob('*.npz')) and not (tmp_path / 'd').exists()
    transformer.train.main(run)
    assert newest(tmp_path / 'c')[0]['step'][0] == 4
    with pytest.raises(UserError, match=r'd: no tensor was saved: all 1 epochs are done \(1 in .*\); -e 11 trains on'):
        transformer.train.main(argv)


# ---- when it goes wrong in the middle -------------------------------------------------------------------------------------

@on_the_cpu
def test_a_disk_that_fills_up_ends_no_training(tmp_path, capsys, monkeypatch):
    write, written = writer.write_atomically, []

    def full(path, *parts):
        written.append(path)
        if len(written) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, *parts)
    monkeypatch.setattr(writer, 'write_atomically', full)
    transformer.train.main(['-e', '1', '-c', str(tmp_path / 'c'), *TRANSFORMER, '--save-tensors', str(tmp_path / 'd'),
                            '--save-steps', '0,2'])
    out, err = capsys.readouterr()
    saved, lost = (len(lines(tmp_path / 'd', kind)) for kind in ('tensor', 'lost'))
    assert saved >= 20 and lost > len(written) - 20 > 0                 # also links to files that are lost
    assert err.count('warning: ') == 1 and 'cannot write a tensor (No space left on device); training goes on' in err
    assert re.search(rf'tensors saved : {saved} \([\d.]+ KB\) in .*, {lost} LOST \(No space left on device\)\n', out)
    assert len(files(tmp_path / 'd')) == saved
    assert len({os.stat(tmp_path / 'd' / file).st_ino for file in files(tmp_path / 'd')}) == 20
    assert {line['reason'] for line in lines(tmp_path / 'd', 'lost')} == {'No space left on device'}
    assert newest(tmp_path / 'c')[0]['step'][0] == 4


def numbers(n):
    return dict(layer='a', layer_type='linear', index=0, operation='forward', name='input', step=n)


@pytest.fixture
def smallest_files():
    """No file may grow beyond 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_the_system_refuses_is_lost_and_the_rest_is_written(tmp_path, capsys, smallest_files):
    with Writer(tmp_path, as_='safetensors') as one:
        for n in range(4):
            one.tensor(np.full(100 if n % 2 else 20_000, n, np.float32), **numbers(n))
    summary = one.close()
    assert summary[1:] == (2, summary.bytes, 2, {'File too large': 2})
    assert [line['step'] for line in lines(tmp_path, 'tensor')] == [1, 3]
    assert [line['step'] for line in lines(tmp_path, 'lost')] == [0, 2] and len(files(tmp_path)) == 2
    assert capsys.readouterr().err.count('\n') == 1
    assert str(summary).endswith('2 LOST (File too large)')


def test_a_manifest_that_cannot_be_written_for_a_while(tmp_path, capsys, monkeypatch):
    with Writer(tmp_path) as one:
        file = one._manifest

        class Full:
            left = 25                   # bytes that it takes yet: half a line

            def write(self, data):
                if not self.left:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                n = file.write(data[:self.left])
                self.left -= n
                return n

            close, fileno = file.close, file.fileno
        one._manifest = full = Full()
        for n in range(3):
            one.tensor(np.full(3, n, np.float32), **numbers(n))
        wait(lambda: one.tensors == 3)
        full.left = 10**6               # there is room again
        one.steps([(0, float('nan'), None)])
    told = []
    for line in (tmp_path / 'manifest.jsonl').read_text().splitlines():
        try:
            told.append(json.loads(line))
        except ValueError:
            told.append(line)
    assert [line['kind'] if isinstance(line, dict) else len(line) for line in told] == [
        'run', 25, 'tensor', 'tensor', 'tensor', 'step', 'end']
    assert told[5] == {'kind': 'step', 'step': 0, 'loss': None, 'norm': None}
    assert len(Logs(tmp_path).entries) == 3 and not one.close().lost
    assert capsys.readouterr().err == (f'warning: {tmp_path / "manifest.jsonl"}: cannot write the manifest (disk full); '
                                       'training goes on\n')


def wait(condition):
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError('it never came')


def test_two_writers_at_once_do_not_share_a_folder(tmp_path):
    with Writer(tmp_path) as one:
        with pytest.raises(UserError, match='another run is saving tensors there; wait until it is done, or name another f'):
            Writer(tmp_path)
        one.tensor(np.zeros(3, np.float32), **numbers(0))
    with Writer(tmp_path) as two:
        two.tensor(np.zeros(3, np.float32), **numbers(0))
    kinds = [json.loads(line)['kind'] for line in (tmp_path / 'manifest.jsonl').read_text().splitlines()]
    assert kinds == ['run', 'tensor', 'end'] * 2 and len(list(tmp_path.glob('*.safetensors'))) == 2


def test_a_bug_in_the_writer_thread_is_raised_in_the_caller(tmp_path, monkeypatch):
    one = Writer(tmp_path)
    monkeypatch.setattr(one, '_write', lambda *_: 1 / 0)
    with pytest.raises(RuntimeError, match='the tensor writer thread failed') as raised:
        for _ in range(500):
            one.tensor(np.zeros(3, np.float32), **numbers(0))
            time.sleep(0.01)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    with pytest.raises(RuntimeError, match='failed'):
        one.close()


def test_a_writer_that_is_ahead_of_the_disk_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, 'QUEUE_LIMIT', 1000)
    write, most = Writer._write, []
    with Writer(tmp_path) as one:
        monkeypatch.setattr(one, '_write', lambda *job: (time.sleep(0.01), most.append(one._queued_bytes), write(one, *job)))
        for n in range(8):
            one.tensor(np.zeros(100, np.float32), **numbers(n))
    assert one.close().tensors == 8 and max(most) <= 1400


def test_the_array_may_change_when_it_was_taken_and_a_full_writer_takes_none(tmp_path):
    with Writer(tmp_path, limit=2 * HEADER + 100) as one:
        x = np.arange(10, dtype=np.float32).reshape(2, 5).T             # not contiguous
        assert one.tensor(x, **numbers(0))
        x[...] = -1
        assert not one.tensor(np.zeros(100, np.float32), **numbers(1)) and one.is_full
        assert not one.tensor(np.zeros(1, np.float32), **numbers(2))
    (entry,) = Logs(tmp_path).entries
    np.testing.assert_array_equal(entry.load(), np.arange(10).reshape(2, 5).T)
    with pytest.raises(RuntimeError, match='the writer is closed'):
        one.steps([])


@pytest.mark.parametrize('has_links', [True, False])
def test_the_same_tensor_in_two_layers_is_written_once(tmp_path, monkeypatch, has_links):
    def refuse(*names):
        raise PermissionError(1, 'Operation not permitted')
    if not has_links:
        monkeypatch.setattr(os, 'link', refuse)
    with Writer(tmp_path, limit=3 * HEADER + 400) as one:
        x = np.arange(100, dtype=np.float32)
        first = one.tensor(x, **numbers(0))
        second = one.tensor(x, **numbers(1) | {'layer': 'second', 'index': 3}, same=first)
        assert one.tensor(x, **numbers(2)) is None
    summary = one.close()
    assert summary.tensors == 2 and (summary.bytes == os.path.getsize(tmp_path / first['file'])) == has_links
    assert (os.stat(tmp_path / first['file']).st_nlink == 2) == has_links and second['statistics'] == first['statistics']
    for known in (True, False):                                 # with and without the manifest
        entries = Logs(tmp_path).entries
        assert [entry.layer for entry in entries] == [numbers(0)['layer'], 'second' if known else 'linear_L3']
        assert [entry.counter for entry in entries] == [1, 2] and all(np.array_equal(entry.load(), x) for entry in entries)
        (tmp_path / 'manifest.jsonl').unlink(missing_ok=True)


def test_a_file_that_cannot_be_linked_or_copied_is_lost(tmp_path, monkeypatch, capsys):
    with Writer(tmp_path) as one:
        first = one.tensor(np.zeros(3, np.float32), **numbers(0))
        assert one.tensor(np.zeros(3, np.float32), **numbers(1), same=first | {'file': 'missing'})
    assert one.close().lost == 1 and 'cannot write a tensor (No such file or directory)' in capsys.readouterr().err


def test_buffers_are_used_again_only_when_their_tensor_is_written(tmp_path, monkeypatch):
    write, buffers = Writer._write, []
    with Writer(tmp_path) as one:
        monkeypatch.setattr(one, '_write', lambda entry, array, is_buffer: (
            time.sleep(0.002), buffers.append(array.ctypes.data), write(one, entry, array, is_buffer)))
        x = np.empty((30, 7), np.float32)
        for n in range(40):
            x[...] = n
            one.tensor(x if n % 3 else x.T, **numbers(n))
            time.sleep(0.004 * (n % 2))
    found = Logs(tmp_path).entries
    assert [set(entry.load().ravel().tolist()) for entry in found] == [{float(n)} for n in range(40)]
    assert [entry.statistics['max'] for entry in found] == list(range(40))
    assert len(set(buffers)) < 40 and one._free_bytes == sum(a.nbytes for free in one._free.values() for a in free)


@on_the_cpu
def test_ctrl_c_in_the_middle_leaves_a_whole_dump(tmp_path, capsys, monkeypatch):
    step = Saving.step

    def struck(self, rows):
        step(self, rows)
        if self.next == 3:
            os.kill(os.getpid(), signal.SIGINT)
    monkeypatch.setattr(Saving, 'step', struck)
    with pytest.raises(Interrupted):
        transformer.train.main(['-e', '50', '-c', str(tmp_path / 'c'), *TRANSFORMER, '--save-tensors', str(tmp_path / 'd'),
                                '--save-steps', '0:100:2', '--save-layers', 'output'])
    out, err = capsys.readouterr()
    assert 'checkpoint saved : ' in out and 'tensors saved : ' in out
    assert [line['step'] for line in lines(tmp_path / 'd', 'step')] == [0, 1, 2]
    assert {line['step'] for line in lines(tmp_path / 'd', 'tensor')} == {0, 2} and lines(tmp_path / 'd')[-1]['kind'] == 'end'
    assert newest(tmp_path / 'c')[0]['step'][0] == 3


@on_the_cpu
def test_the_benchmark(tmp_path, capsys):
    bench.saving.main(['mnist', '--turns', '1', '--steps', '20', '--folder', str(tmp_path), '--json'])
    told = json.loads(capsys.readouterr().out)
    assert (told['program'], told['layers'], told['tensors_a_turn']) == ('mnist', 2, 30) and told['plain_s'] > 0
    assert not os.listdir(tmp_path)


# ---- which sentences a tensor has rows for --------------------------------------------------------------------------------

@pytest.mark.parametrize('layer, name, side', [
    ('encoder.0.self_attention', 'key', 'source'), ('encoder.rnn.1.hh', 'input', 'source'), ('output', 'input', 'target'),
    ('decoder.0.cross_attention.k', 'output', 'source'), ('decoder.0.cross_attention.v', 'input', 'source'),
    ('decoder.0.cross_attention.q', 'input', 'target'), ('decoder.0.cross_attention', 'query', 'target'),
    ('decoder.0.cross_attention', 'value', 'source'), ('decoder.0.cross_attention', 'output', 'target'),
    ('decoder.0.self_attention', 'key', 'target')])
def test_the_side_of_a_tensor(layer, name, side):
    assert side_of(layer, name) == side
