"""Layers against their twins in PyTorch, on Tensors and by hand; the tree of modules; names, seeds and flat buffers."""
import copy
import gc
import pickle
import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from arrays import close
from places import get, put
from small_models import shaken

import pyops
from pyops import functional as F
from pyops import init, ndarray, nn, ops, optim
from pyops.autograd import Tensor, apply, detect_anomaly, grad, no_grad
from pyops.backend import location
from pyops.params import generator, key
from pyops.plan import Plan

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def flat(value):
    return [one for part in value for one in flat(part)] if isinstance(value, tuple | list) else [value]


# ---- against PyTorch -------------------------------------------------------------------------------------------------

@dataclass
class Row:
    """A layer, its twin (torch.nn -> module), and inputs; options: of the call, given to both."""
    name: str
    make: Any
    twin: Any
    inputs: tuple
    options: dict = field(default_factory=dict)
    twin_inputs: Any = lambda *inputs: inputs
    twin_options: dict | None = None
    output: Any = lambda y: y               # what of the twin's output ours is
    no_gradient: tuple = ()                 # parameters whose gradient is 0


IDS, LABELS = np.array([[3, 1], [0, 3], [6, 6]], np.int32), np.array([2, 0, -100, 1], np.int32)
SIGNS = np.array([1, -1, -1, 1], np.int32)
MASK = np.tril(np.ones((5, 5), bool))
PADDING = np.array([[False] * 5, [False, False, False, True, True], [False] * 4 + [True]])
PROBABILITIES = np.exp(normal(4, 3))
PROBABILITIES /= PROBABILITIES.sum(1, keepdims=True)
TABLE = [
    Row('linear', lambda: nn.Linear(7, 5), lambda t: t.Linear(7, 5), (normal(4, 7),)),
    Row('linear-of-sequences', lambda: nn.Linear(7, 5), lambda t: t.Linear(7, 5), (normal(3, 4, 7),)),
    Row('linear-without-bias', lambda: nn.Linear(7, 5, bias=False), lambda t: t.Linear(7, 5, bias=False), (normal(4, 7),)),
    Row('relu', nn.ReLU, lambda t: t.ReLU(), (normal(4, 7),)),
    Row('silu', nn.SiLU, lambda t: t.SiLU(), (normal(4, 7),)), Row('gelu', nn.GELU, lambda t: t.GELU(), (normal(4, 7),)),
    Row('gelu-tanh', lambda: nn.GELU('tanh'), lambda t: t.GELU('tanh'), (normal(4, 7),)),
    Row('leaky_relu', lambda: nn.LeakyReLU(0.2, True), lambda t: t.LeakyReLU(0.2), (normal(4, 7),)),
    Row('relu-inplace', lambda: nn.ReLU(inplace=True), lambda t: t.ReLU(), (normal(4, 7),)),
    Row('log_softmax', lambda: nn.LogSoftmax(dim=1), lambda t: t.LogSoftmax(1), (normal(4, 7, 2),)),
    Row('tanh', nn.Tanh, lambda t: t.Tanh(), (normal(4, 7),)),
    Row('sigmoid', nn.Sigmoid, lambda t: t.Sigmoid(), (normal(4, 7),)),
    Row('softmax', nn.Softmax, lambda t: t.Softmax(-1), (normal(4, 7),)),
    *(Row(f'flatten{axes}', lambda axes=axes: nn.Flatten(*axes), lambda t, axes=axes: t.Flatten(*axes), (normal(4, 7, 2, 3),))
      for axes in ((), (2,), (0, 1), (-3, -2))),
    Row('identity', nn.Identity, lambda t: t.Identity(), (normal(4, 7),)),
    Row('dropout-0', lambda: nn.Dropout(0.0), lambda t: t.Dropout(0.0), (normal(4, 7),)),
    Row('layer_norm', lambda: nn.LayerNorm(9), lambda t: t.LayerNorm(9), (normal(3, 4, 9),)),
    Row('layer_norm_1d', lambda: nn.LayerNorm1d(9, eps=0.1), lambda t: t.LayerNorm(9, eps=0.1), (normal(4, 9),)),
    Row('layer_norm-several-axes', lambda: nn.LayerNorm((4, 9)), lambda t: t.LayerNorm((4, 9)), (normal(3, 4, 9),)),
    Row('layer_norm-no-bias', lambda: nn.LayerNorm(9, bias=False), lambda t: t.LayerNorm(9, bias=False), (normal(3, 4, 9),)),
    Row('layer_norm-not-affine', lambda: nn.LayerNorm([9], 0.1, False), lambda t: t.LayerNorm([9], 0.1, False),
        (normal(3, 4, 9),)),
    Row('group_norm', lambda: nn.GroupNorm(2, 6), lambda t: t.GroupNorm(2, 6), (normal(3, 6, 4, 5),)),
    Row('group_norm-not-affine', lambda: nn.GroupNorm(3, 6, 0.1, False), lambda t: t.GroupNorm(3, 6, 0.1, False),
        (normal(3, 6, 5),)),
    Row('batch_norm_1d', lambda: nn.BatchNorm1d(9), lambda t: t.BatchNorm1d(9), (normal(14, 9),)),
    Row('embedding', lambda: nn.Embedding(7, 5), lambda t: t.Embedding(7, 5), (IDS,)),
    *(Row(f'embedding_bag-{mode}', lambda mode=mode: nn.EmbeddingBag(7, 5, mode=mode),
          lambda t, mode=mode: t.EmbeddingBag(7, 5, mode=mode), inputs) for mode, inputs in (
        ('mean', (IDS,)), ('max', (IDS,)), ('sum', (np.arange(6, dtype=np.int32), np.array([0, 2, 2, 3], np.int32))),
        ('mean', (np.arange(6, dtype=np.int32), np.array([0, 2, 2, 3], np.int32))))),
    Row('embedding-padding', lambda: nn.Embedding(7, 5, -4), lambda t: t.Embedding(7, 5, -4), (IDS,)),
    Row('conv2d', lambda: nn.Conv2d(3, 4, 3), lambda t: t.Conv2d(3, 4, 3), (normal(2, 3, 6, 7),)),
    Row('conv2d-stride-padding-dilation', lambda: nn.Conv2d(3, 4, (2, 3), 2, (1, 2), 2, bias=False),
        lambda t: t.Conv2d(3, 4, (2, 3), 2, (1, 2), 2, bias=False), (normal(2, 3, 9, 8),)),
    Row('conv2d-groups', lambda: nn.Conv2d(4, 6, 3, padding='same', groups=2),
        lambda t: t.Conv2d(4, 6, 3, padding='same', groups=2), (normal(2, 4, 6, 7),)),
    Row('conv1d', lambda: nn.Conv1d(4, 6, 3, 2, 1, 2, 2, bias=False), lambda t: t.Conv1d(4, 6, 3, 2, 1, 2, 2, bias=False),
        (normal(2, 4, 9),)),
    Row('conv1d-same', lambda: nn.Conv1d(3, 5, 4, padding='same'), lambda t: t.Conv1d(3, 5, 4, padding='same'),
        (normal(2, 3, 9),)),
    Row('batch_norm_1d-sequences', lambda: nn.BatchNorm1d(9), lambda t: t.BatchNorm1d(9), (normal(4, 9, 5),)),
    Row('batch_norm_2d', lambda: nn.BatchNorm2d(3), lambda t: t.BatchNorm2d(3), (normal(4, 3, 5, 2),)),
    Row('max_pool2d', lambda: nn.MaxPool2d(3, 2, 1), lambda t: t.MaxPool2d(3, 2, 1), (normal(2, 3, 7, 8),)),
    Row('avg_pool2d', lambda: nn.AvgPool2d((3, 2), padding=1, count_include_pad=False),
        lambda t: t.AvgPool2d((3, 2), padding=1, count_include_pad=False), (normal(2, 3, 7, 8),)),
    Row('max_pool2d-ceil', lambda: nn.MaxPool2d(2, 3, 1, ceil_mode=True), lambda t: t.MaxPool2d(2, 3, 1, ceil_mode=True),
        (normal(2, 3, 6, 7),)),
    Row('avg_pool2d-ceil', lambda: nn.AvgPool2d((3, 2), 2, 1, True), lambda t: t.AvgPool2d((3, 2), 2, 1, True),
        (normal(2, 3, 6, 7),)),
    Row('avg_pool2d-ceil-no-padding', lambda: nn.AvgPool2d(3, 2, 1, True, False), lambda t: t.AvgPool2d(3, 2, 1, True, False),
        (normal(2, 3, 6, 7),)),
    Row('max_pool1d', lambda: nn.MaxPool1d(3, 2, 1, 2, ceil_mode=True), lambda t: t.MaxPool1d(3, 2, 1, 2, ceil_mode=True),
        (normal(2, 3, 10),)),
    Row('avg_pool1d', lambda: nn.AvgPool1d(3, padding=1, count_include_pad=False),
        lambda t: t.AvgPool1d(3, padding=1, count_include_pad=False), (normal(2, 3, 8),)),
    *(Row(f'adaptive_avg_pool2d-{size}', lambda size=size: nn.AdaptiveAvgPool2d(size),
          lambda t, size=size: t.AdaptiveAvgPool2d(size), (normal(2, 3, 6, 8),)) for size in (1, (3, 4), (4, 7), (9, 8))),
    Row('sequential', lambda: nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)),
        lambda t: t.Sequential(t.Linear(7, 6), t.Tanh(), t.BatchNorm1d(6), t.ReLU(), t.Linear(6, 3)), (normal(8, 7),)),
    Row('cross_entropy', nn.CrossEntropyLoss, lambda t: t.CrossEntropyLoss(), (normal(4, 3), LABELS)),
    *(Row(f'cross_entropy-{how}', lambda how=how: nn.CrossEntropyLoss(reduction=how, label_smoothing=0.1),
          lambda t, how=how: t.CrossEntropyLoss(reduction=how, label_smoothing=0.1), (normal(4, 3), LABELS))
      for how in ('sum', 'none')),
    *(Row(f'cross_entropy-probabilities-{how}', lambda how=how: nn.CrossEntropyLoss(reduction=how), lambda t, how=how:
          t.CrossEntropyLoss(reduction=how), (normal(4, 3), PROBABILITIES)) for how in ('mean', 'none')),
    Row('nll', nn.NLLLoss, lambda t: t.NLLLoss(), (normal(4, 3), LABELS)),
    Row('nll-sum', lambda: nn.NLLLoss(ignore_index=1, reduction='sum'), lambda t: t.NLLLoss(ignore_index=1, reduction='sum'),
        (normal(4, 3, 2), np.array([[0, 1], [2, 1], [2, 2], [0, 0]], np.int32))),
    Row('softmax_loss', nn.SoftmaxLoss, lambda t: t.CrossEntropyLoss(), (normal(4, 3), LABELS)),
    *(Row(f'{name}-{how}', lambda name=name, how=how: getattr(nn, name)(reduction=how),
          lambda t, name=name, how=how: getattr(t, name)(reduction=how), (normal(4, 3), normal(4, 3)))
      for name in ('MSELoss', 'L1Loss', 'HuberLoss', 'SmoothL1Loss', 'BCEWithLogitsLoss') for how in ('mean', 'none')),
    Row('huber-delta', lambda: nn.HuberLoss('sum', 0.3), lambda t: t.HuberLoss('sum', 0.3), (normal(4, 3), normal(4, 3))),
    Row('bce', nn.BCELoss, lambda t: t.BCELoss(), (PROBABILITIES, PROBABILITIES[::-1].copy())),
    Row('kl_div', lambda: nn.KLDivLoss(reduction='batchmean'), lambda t: t.KLDivLoss(reduction='batchmean'),
        (np.log(PROBABILITIES), PROBABILITIES[::-1].copy())),
    Row('elu', lambda: nn.ELU(0.5), lambda t: t.ELU(0.5), (normal(4, 7),)),
    Row('softplus', lambda: nn.Softplus(2.0, 1.0), lambda t: t.Softplus(2.0, 1.0), (normal(4, 7),)),
    *(Row(f'{name}{args}', lambda name=name, args=args: getattr(nn, name)(*args),
          lambda t, name=name, args=args: getattr(t, name)(*args), (3 * normal(2, 4, 6),)) for name, args in (
        ('CELU', (0.5,)), ('SELU', ()), ('Mish', ()), ('Hardtanh', (-0.5, 2.0)), ('ReLU6', ()), ('Hardsigmoid', ()),
        ('Hardswish', ()), ('Hardshrink', (0.3,)), ('Softshrink', ()), ('Tanhshrink', ()), ('Softsign', ()), ('LogSigmoid', ()),
        ('Threshold', (0.1, 7.0)), ('GLU', (1,)), ('Softmin', (1,)), ('PReLU', ()), ('PReLU', (4,)), ('RMSNorm', (6,)),
        ('RMSNorm', ((4, 6), 0.1)), ('InstanceNorm1d', (4,)), ('AdaptiveAvgPool1d', (3,)), ('AdaptiveMaxPool1d', (4,)),
        ('Upsample', (9,)), ('Upsample', (None, 1.7, 'linear')), ('ConstantPad1d', ((1, 2), 0.5)), ('ReflectionPad1d', (3,)),
        ('ReplicationPad1d', ((2, 4),)), ('CircularPad1d', ((2, 4),)), ('ZeroPad1d', (2,)), ('Unflatten', (2, (2, 3))),
        ('ConvTranspose1d', (4, 6, 3, 2, 1, 1, 2)), ('Dropout1d', (0.0,)))),
    *(Row(f'{name}{args}', lambda name=name, args=args: getattr(nn, name)(*args),
          lambda t, name=name, args=args: getattr(t, name)(*args), (normal(2, 4, 6, 5),)) for name, args in (
        ('InstanceNorm2d', (4, 0.1, 0.1, True)), ('AdaptiveMaxPool2d', (2,)), ('AdaptiveMaxPool2d', ((4, 3),)),
        ('AdaptiveAvgPool2d', ((None, 3),)), ('Upsample', ((7, 9), None, 'bilinear')), ('Upsample', (None, 2, 'nearest')),
        ('Upsample', (None, (1.5, 2.2), 'bilinear', True)), ('UpsamplingNearest2d', (None, 2)), ('PixelShuffle', (2,)),
        ('ChannelShuffle', (2,)), ('Softmax2d', ()),
        ('Unfold', ((3, 2), 1, 1, 2)), ('ConstantPad2d', ((1, 2, 0, 3), -1.0)), ('ReflectionPad2d', (2,)),
        ('ReplicationPad2d', (2,)), ('CircularPad2d', ((1, 2, 3, 0),)), ('ZeroPad2d', (1,)), ('Dropout2d', (0.0,)),
        ('ConvTranspose2d', (4, 3, 3)), ('ConvTranspose2d', (4, 6, (3, 2), (2, 3), 1, (1, 2), 2, False)),
        ('ConvTranspose2d', (4, 3, 2, 2, 0, 0, 1, True, 2)), ('Conv2d', (4, 6, 3, 2, 1, 1, 2, True, 'reflect')),
        ('Conv2d', (4, 6, (3, 4), 1, 'same', 1, 1, False, 'circular')))),
    Row('conv1d-replicate', lambda: nn.Conv1d(3, 5, 3, padding=2, padding_mode='replicate'),
        lambda t: t.Conv1d(3, 5, 3, padding=2, padding_mode='replicate'), (normal(2, 3, 9),)),
    Row('pixel_unshuffle', lambda: nn.PixelUnshuffle(2), lambda t: t.PixelUnshuffle(2), (normal(2, 3, 4, 6),)),
    Row('fold', lambda: nn.Fold((6, 5), (3, 2), 1, 1, 2), lambda t: t.Fold((6, 5), (3, 2), 1, 1, 2), (normal(2, 12, 9),)),
    Row('batch_norm_3d', lambda: nn.BatchNorm3d(3), lambda t: t.BatchNorm3d(3), (normal(4, 3, 2, 3, 2),)),
    Row('bilinear', lambda: nn.Bilinear(4, 3, 5), lambda t: t.Bilinear(4, 3, 5), (normal(6, 4), normal(6, 3))),
    *(Row(f'{name}-{how}', lambda name=name, options=options, how=how: getattr(nn, name)(**options, reduction=how),
          lambda t, name=name, options=options, how=how: getattr(t, name)(**options, reduction=how), inputs, no_gradient=none)
      for name, options, inputs, none in (
          ('CosineEmbeddingLoss', dict(margin=0.1), (normal(4, 3), normal(4, 3), SIGNS), ()),
          ('MarginRankingLoss', dict(margin=0.3), (normal(4), normal(4), SIGNS), ()),
          ('HingeEmbeddingLoss', dict(margin=0.7), (normal(4), SIGNS), ()),
          ('TripletMarginLoss', dict(p=2, swap=True), (normal(4, 3), normal(4, 3), normal(4, 3)), ()),
          ('SoftMarginLoss', {}, (normal(4), SIGNS), ()),
          ('MultiLabelSoftMarginLoss', {}, (normal(4, 3), (normal(4, 3) > 0).astype('f')), ()),
          ('MultiMarginLoss', dict(p=2), (normal(4, 3), np.array([2, 0, 0, 1], np.int32)), ()),
          ('GaussianNLLLoss', dict(full=True), (normal(4, 3), normal(4, 3), np.exp(normal(4, 3))), ()),
          ('PoissonNLLLoss', dict(full=True), (normal(4, 3), np.arange(12, dtype=np.int32).reshape(4, 3)), ()),
          ('PoissonNLLLoss', dict(log_input=False), (np.exp(normal(4, 3)), np.arange(12, dtype='f').reshape(4, 3)), ()))
      for how in ('mean', 'sum', 'none')),
    *(Row(name, lambda name=name: getattr(nn, name)(), lambda t, name=name: getattr(t, name)(), (normal(4, 3), normal(4, 3)))
      for name in ('CosineSimilarity', 'PairwiseDistance')),
    Row('rnn_cell', lambda: nn.RNNCell(4, 5), lambda t: t.RNNCell(4, 5), (normal(3, 4), normal(3, 5))),
    Row('rnn_cell-from-zeros', lambda: nn.RNNCell(4, 5), lambda t: t.RNNCell(4, 5), (normal(3, 4),),
        no_gradient=('weight_hh',)),
    Row('gru_cell', lambda: nn.GRUCell(4, 5), lambda t: t.GRUCell(4, 5), (normal(3, 4), normal(3, 5))),
    Row('gru_cell-from-zeros', lambda: nn.GRUCell(4, 5), lambda t: t.GRUCell(4, 5), (normal(3, 4),),
        no_gradient=('weight_hh',)),
    Row('lstm_cell', lambda: nn.LSTMCell(4, 5), lambda t: t.LSTMCell(4, 5), (normal(3, 4), normal(3, 5), normal(3, 5)),
        twin_inputs=lambda x, h, c: (x, (h, c))),
    Row('lstm_cell-from-zeros', lambda: nn.LSTMCell(4, 5), lambda t: t.LSTMCell(4, 5), (normal(3, 4),),
        no_gradient=('weight_hh',)),
    Row('rnn', lambda: nn.RNN(4, 5, 2), lambda t: t.RNN(4, 5, 2), (normal(6, 3, 4), normal(2, 3, 5))),
    Row('rnn-from-zeros', lambda: nn.RNN(4, 5), lambda t: t.RNN(4, 5), (normal(1, 3, 4),),
        no_gradient=('weight_hh_l0',)),
    Row('gru', lambda: nn.GRU(4, 5, 2), lambda t: t.GRU(4, 5, 2), (normal(6, 3, 4), normal(2, 3, 5))),
    Row('gru-from-zeros', lambda: nn.GRU(4, 5), lambda t: t.GRU(4, 5), (normal(1, 3, 4),),
        no_gradient=('weight_hh_l0',)),
    Row('lstm', lambda: nn.LSTM(4, 5, 2), lambda t: t.LSTM(4, 5, 2), (normal(6, 3, 4), normal(2, 3, 5), normal(2, 3, 5)),
        twin_inputs=lambda x, h, c: (x, (h, c))),
    Row('lstm-from-zeros', lambda: nn.LSTM(4, 5), lambda t: t.LSTM(4, 5), (normal(1, 3, 4),),
        no_gradient=('weight_hh_l0',)),
    Row('rnn_cell-relu-no-bias', lambda: nn.RNNCell(4, 5, False, 'relu'), lambda t: t.RNNCell(4, 5, False, 'relu'),
        (normal(3, 4), normal(3, 5))),
    Row('gru_cell-no-bias', lambda: nn.GRUCell(4, 5, False), lambda t: t.GRUCell(4, 5, False), (normal(3, 4), normal(3, 5))),
    Row('lstm_cell-no-bias', lambda: nn.LSTMCell(4, 5, False), lambda t: t.LSTMCell(4, 5, False),
        (normal(3, 4), normal(3, 5), normal(3, 5)), twin_inputs=lambda x, h, c: (x, (h, c))),
    Row('rnn-relu', lambda: nn.RNN(4, 5, 2, 'relu'), lambda t: t.RNN(4, 5, 2, 'relu'), (normal(6, 3, 4), normal(2, 3, 5))),
    *(Row(f'{name.lower()}-{words}', lambda name=name, options=options: getattr(nn, name)(4, 5, 2, **options),
          lambda t, name=name, options=options: getattr(t, name)(4, 5, 2, **options),
          (normal(6, 3, 4), *[normal(states, 3, 5)] * (1 + (name == 'LSTM'))),
          twin_inputs=lambda x, *states: (x, states if len(states) > 1 else states[0]))
      for name in ('RNN', 'LSTM', 'GRU')
      for words, states, options in (('no-bias', 2, dict(bias=False)), ('bidirectional', 4, dict(bidirectional=True)))),
    *(Row(f'{name.lower()}-batch-first', lambda name=name: getattr(nn, name)(4, 5, 2, batch_first=True, bidirectional=True),
          lambda t, name=name: getattr(t, name)(4, 5, 2, batch_first=True, bidirectional=True), (normal(3, 6, 4),))
      for name in ('RNN', 'LSTM', 'GRU')),
    Row('attention', lambda: nn.MultiHeadAttention(8, 2), lambda t: t.MultiheadAttention(8, 2),
        (normal(5, 3, 8), normal(6, 3, 8), normal(6, 3, 8)), output=lambda y: y[0]),
    Row('attention-masked', lambda: nn.MultiHeadAttention(8, 4, bias=False), lambda t: t.MultiheadAttention(8, 4, bias=False),
        (normal(5, 3, 8),), dict(attn_mask=MASK), lambda x: (x, x, x), dict(attn_mask=~MASK), lambda y: y[0]),
    Row('attention-weights', lambda: nn.MultiHeadAttention(8, 2), lambda t: t.MultiheadAttention(8, 2), (normal(5, 3, 8),),
        dict(need_weights=True, is_causal=True), lambda x: (x, x, x), dict(attn_mask=~MASK)),
    Row('torch-attention', lambda: nn.MultiheadAttention(8, 2), lambda t: t.MultiheadAttention(8, 2),
        (normal(5, 3, 8), normal(6, 3, 8), normal(6, 3, 8))),
    Row('torch-attention-batch-first', lambda: nn.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=7),
        lambda t: t.MultiheadAttention(8, 2, batch_first=True, kdim=6, vdim=7),
        (normal(3, 5, 8), normal(3, 6, 6), normal(3, 6, 7))),
    *(Row(f'torch-attention-{words}', lambda: nn.MultiheadAttention(8, 2), lambda t: t.MultiheadAttention(8, 2),
          (normal(5, 3, 8), normal(5, 3, 8), normal(5, 3, 8)), options, output=lambda y: y if y[1] is not None else y[0])
      for words, options in (('masked', dict(attn_mask=~MASK)), ('padding', dict(key_padding_mask=PADDING)),
                             ('per-head', dict(attn_mask=normal(6, 5, 5), average_attn_weights=False)),
                             ('added', dict(attn_mask=normal(5, 5), key_padding_mask=np.where(PADDING, -np.inf, 0.0))))),
    *(Row(f'encoder-{words}', lambda args=args, options=options: nn.TransformerEncoderLayer(8, 2, 12, 0.0, *args, **options),
          lambda t, args=args, options=options: t.TransformerEncoderLayer(8, 2, 12, 0.0, *args, **options), (normal(5, 3, 8),))
      for words, args, options in (('plain', (), {}), ('gelu-no-bias', ('gelu', 0.1), dict(bias=False)),
                                   ('batch-first', (), dict(batch_first=True)))),
    Row('encoder-silu', lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, F.silu),
        lambda t: t.TransformerEncoderLayer(8, 2, 12, 0.0, t.functional.silu), (normal(5, 3, 8),)),
    Row('encoder-norm-first', lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, norm_first=True),
        lambda t: t.TransformerEncoderLayer(8, 2, 12, 0.0, norm_first=True), (normal(5, 3, 8),),
        dict(is_causal=True), twin_options=dict(src_mask=~MASK)),
    Row('encoder-masked', lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0), lambda t: t.TransformerEncoderLayer(8, 2, 12, 0.0),
        (normal(5, 3, 8),), dict(src_mask=~MASK, src_key_padding_mask=PADDING)),
    Row('decoder', lambda: nn.TransformerDecoderLayer(8, 2, 12, 0.0), lambda t: t.TransformerDecoderLayer(8, 2, 12, 0.0),
        (normal(5, 3, 8), normal(4, 3, 8)), dict(tgt_is_causal=True), twin_options=dict(tgt_mask=~MASK)),
    Row('decoder-masked', lambda: nn.TransformerDecoderLayer(8, 2, 12, 0.0), lambda t: t.TransformerDecoderLayer(8, 2, 12, 0.0),
        (normal(5, 3, 8), normal(5, 3, 8)), dict(memory_mask=~MASK, tgt_key_padding_mask=PADDING, tgt_mask=~MASK,
                                                 memory_key_padding_mask=PADDING)),
    Row('encoders', lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, 0.0), 2, nn.LayerNorm(8)),
        lambda t: t.TransformerEncoder(t.TransformerEncoderLayer(8, 2, 12, 0.0), 2, t.LayerNorm(8), False),
        (normal(5, 3, 8),), dict(mask=~MASK, src_key_padding_mask=PADDING)),
    Row('decoders', lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 12, 0.0, norm_first=True), 2),
        lambda t: t.TransformerDecoder(t.TransformerDecoderLayer(8, 2, 12, 0.0, norm_first=True), 2),
        (normal(5, 3, 8), normal(4, 3, 8))),
    Row('transformer', lambda: nn.Transformer(8, 2, 1, 2, 12, 0.0, batch_first=True),
        lambda t: t.Transformer(8, 2, 1, 2, 12, 0.0, batch_first=True), (normal(3, 5, 8), normal(3, 4, 8)),
        dict(tgt_mask=~MASK[:4, :4], src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING)),
]


def run_twin(torch, row, module, training, dys):
    """-> outputs, gradients of the inputs, gradients of the parameters by name, buffers by name, all numpy."""
    twin = row.twin(torch.nn).double().train(training)
    missing = twin.load_state_dict({name: torch.tensor(a).double() for name, a in module.state_dict().items()}, strict=False)
    assert not missing.unexpected_keys and all('num_batches' in key for key in missing.missing_keys)
    module.load_state_dict(twin.state_dict())
    inputs = [torch.tensor(x, dtype=torch.float64, requires_grad=True) if x.dtype == np.float32 else torch.tensor(x).long()
              for x in row.inputs]
    options = {name: torch.tensor(a if a.dtype == bool else a.astype(np.float64)) if isinstance(a, np.ndarray) else a
               for name, a in (row.options if row.twin_options is None else row.twin_options).items()}
    ys = flat(row.output(twin(*row.twin_inputs(*inputs), **options)))
    torch.autograd.backward(ys, [torch.tensor(dy, dtype=torch.float64).reshape(y.shape) for dy, y in zip(dys, ys, strict=True)])
    return ([y.detach().numpy() for y in ys], [x.grad.numpy() for x in inputs if x.requires_grad],
            {name: p.grad.numpy() for name, p in twin.named_parameters()}, {n: b.numpy() for n, b in twin.named_buffers()})


@pytest.mark.parametrize('training', [True, False], ids=['train', 'eval'])
@pytest.mark.parametrize('row', TABLE, ids=lambda row: row.name)
def test_forward_and_all_gradients_equal_torch_both_ways(row, training, torch):
    module = shaken(row.make()).train(training)
    before = copy.deepcopy(module)
    leaves = [Tensor(x, requires_grad=x.dtype == np.float32) for x in row.inputs]
    y = module(*leaves, **row.options)
    dys = [normal(*one.shape) for one in flat(y)]
    want_y, want_dx, want_dp, want_buffers = run_twin(torch, row, before, training, dys)
    for one, want in zip(flat(y), want_y, strict=True):
        close(one.numpy(), want, 3e-5)
    total = sum((one * Tensor(dy)).sum() for one, dy in zip(flat(y), dys, strict=True))
    total.backward()
    for leaf, want in zip((leaf for leaf in leaves if leaf.requires_grad), want_dx, strict=True):
        close(leaf.grad.numpy(), want, 1e-4)
    grads = {name: p.grad.numpy().copy() for name, p in module.named_parameters()}
    assert set(grads) == set(want_dp)
    for name, want in want_dp.items():
        close(grads[name], want, 1e-4, name)
        assert np.abs(want).max() > 1e-4 or name in row.no_gradient, f'{name}: the check is vacuous'
    for name, buffer in module.named_buffers(persistent=True):
        close(buffer.numpy(), want_buffers[name], 3e-5, name)
    if not row.options:                     # by hand: the same bits, and parameter gradients add
        module = before
        module.zero_grad()
        y2, ctx = module.forward(*map(put, row.inputs))
        assert all((get(a) == b.numpy().reshape(a.shape)).all() for a, b in zip(flat(y2), flat(y), strict=True))
        shaped = [put(dy.reshape(a.shape)) for dy, a in zip(dys, flat(y2), strict=True)]
        dx = module.backward(nested(y2, iter(shaped)), ctx)
        for one, want in zip([d for d in flat(dx) if d is not None], want_dx, strict=True):
            close(get(one), want, 1e-4)
        for name, p in module.named_parameters():
            close(p.grad.numpy(), grads[name], 1e-6)
        _, ctx = module.forward(*map(put, row.inputs))
        module.backward(nested(y2, iter(shaped)), ctx)
        for name, p in module.named_parameters():
            close(p.grad.numpy(), 2 * grads[name], 1e-5)


def nested(like, values):
    return tuple(nested(one, values) for one in like) if isinstance(like, tuple) else next(values)


def test_residual_adds_what_its_module_makes(torch):
    block = shaken(nn.Residual(nn.Sequential(nn.Linear(6, 6), nn.Tanh())))
    inner, x, dy = block.module, normal(4, 6), normal(4, 6)
    leaf = Tensor(x, requires_grad=True)
    y = block(leaf)
    assert (y.numpy() == x + inner(Tensor(x)).numpy()).all()
    (y * Tensor(dy)).sum().backward()
    twin = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()).double()
    twin.load_state_dict({name: torch.tensor(a).double() for name, a in inner.state_dict().items()})
    t = torch.tensor(x).double().requires_grad_()
    ((t + twin(t)) * torch.tensor(dy)).sum().backward()
    close(leaf.grad.numpy(), t.grad.numpy(), 3e-5)
    y2, ctx = block.forward(put(x))
    assert (get(y2) == y.numpy()).all() and (get(block.backward(put(dy), ctx)) == leaf.grad.numpy()).all()


@pytest.mark.parametrize('is_causal', [False, True])
def test_attention_to_sentences_of_unlike_lengths(is_causal, torch):
    """With lengths, with the mask that says the same, and PyTorch's with padding."""
    layer, x = shaken(nn.MultiHeadAttention(8, 2)), normal(5, 3, 8)
    lengths = np.array([5, 2, 4], np.int32)
    seen = np.broadcast_to(np.arange(5) < lengths[:, None, None], (3, 5, 5))
    dy, found = normal(5, 3, 8), []
    for options in (dict(lengths=lengths), dict(attn_mask=seen)):
        leaf = Tensor(x, requires_grad=True)
        layer.zero_grad()
        y = layer(leaf, is_causal=is_causal, **options)
        (y * Tensor(dy)).sum().backward()
        found.append([y.numpy(), leaf.grad.numpy(), *(p.grad.numpy().copy() for p in layer.parameters())])
    twin = torch.nn.MultiheadAttention(8, 2).double()
    twin.load_state_dict({name: torch.tensor(value).double() for name, value in layer.state_dict().items()})
    t = torch.tensor(x).double().requires_grad_()
    y, _ = twin(t, t, t, key_padding_mask=torch.tensor(~seen[:, 0]), attn_mask=torch.tensor(~MASK) if is_causal else None)
    (y * torch.tensor(dy)).sum().backward()
    named = dict(twin.named_parameters())
    want = [y.detach().numpy(), t.grad.numpy(), *(named[name].grad.numpy() for name, _ in layer.named_parameters())]
    for one, other, right in zip(*found, want, strict=True):
        close(one, right, 1e-4)
        close(other, right, 1e-4)
    with pytest.raises(ValueError, match='expected lengths or attn_mask, got both'):
        layer(Tensor(x), lengths=lengths, attn_mask=MASK)
    y, weights = layer(Tensor(x), is_causal=is_causal, lengths=lengths, need_weights=True, average_attn_weights=False)
    close(y.numpy(), found[0][0], 1e-5)
    _, expected = twin(t, t, t, key_padding_mask=torch.tensor(~seen[:, 0]),
                       attn_mask=torch.tensor(~MASK) if is_causal else None, average_attn_weights=False)
    close(weights.numpy(), expected.detach().numpy(), 1e-5)


@pytest.mark.parametrize('make', [lambda: nn.MultiHeadAttention(8, 2, dropout=0.5), lambda: nn.GRU(8, 6, 2, dropout=0.5),
                                  lambda: nn.LSTM(8, 6, 2, dropout=0.5), lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.5)])
def test_layers_with_dropout_inside_drop_in_training_alone(make):
    layer, plain, x = make().reset_parameters(1), make().reset_parameters(1), Tensor(normal(5, 3, 8))
    first, second = (flat(layer(x))[0].numpy() for _ in range(2))
    still = flat(layer.eval()(x))[0].numpy()
    assert (first != second).any() and (first != still).any()
    assert (still == flat(layer(x))[0].numpy()).all() and (still == flat(plain.eval()(x))[0].numpy()).all()
    assert (flat(plain.train()(x))[0].numpy() == first).all()


@pytest.mark.parametrize('row', [row for row in TABLE if not row.options], ids=lambda row: row.name)
def test_a_call_with_arrays_gives_tensors_and_forward_the_protocol_by_hand(row):
    layer = shaken(row.make()).eval()
    want = flat(layer(*map(Tensor, row.inputs)))
    for inputs in (row.inputs, tuple(x.astype(np.float64) if x.dtype == np.float32 else x.astype(np.int64) for x in row.inputs),
                   tuple(x.tolist() for x in row.inputs), (Tensor(row.inputs[0]), *row.inputs[1:]),
                   tuple(ndarray.array(x) for x in row.inputs)):
        got = flat(layer(*inputs))
        assert all(isinstance(y, Tensor) and (y.numpy() == u.numpy()).all() for y, u in zip(got, want, strict=True))
    y, ctx = layer.forward(*map(put, row.inputs))
    assert all((get(a) == u.numpy().reshape(a.shape)).all() for a, u in zip(flat(y), want, strict=True))


def test_a_call_keeps_the_history_of_tensors_in_a_list():
    class Sum(nn.Layer):
        def forward_tensors(self, parts):
            return sum(parts[1:], parts[0])
    x = Tensor(normal(3), requires_grad=True)
    Sum()([x, 2 * x]).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]
    lstm, h = nn.LSTM(4, 5), Tensor(normal(1, 3, 5), requires_grad=True)
    y, _ = lstm(normal(2, 3, 4), [h, 2 * h])
    y.sum().backward()
    assert h.grad.numpy().all()


def test_a_call_without_an_array_says_what_it_takes():
    layer = nn.Linear(3, 2)
    for arguments, named, given in (((5,), {}, 'int'), ((), {}, 'nothing'), (('x',), {}, 'str'), ((None,), {}, 'NoneType')):
        with pytest.raises(TypeError, match=rf'^Linear\(3, 2\): expected a Tensor or an array, got {given}$'):
            layer(*arguments, **named)
    y = nn.MultiHeadAttention(4, 2)(query=Tensor(normal(3, 2, 4)))
    assert y.shape == (3, 2, 4)
    x = normal(4, 3)
    told = (r'^Linear\(3, 2\): got ndarray while a plan records, which would replay a copy of it; give '
            r'Tensor\(ndarray.from_numpy\(x\)\)')
    with Plan(x=put(x)), pytest.raises(TypeError, match=told):
        layer(x)


@pytest.mark.parametrize('options', [{}, dict(num_layers=2, batch_first=True, bidirectional=True)], ids=str)
@pytest.mark.parametrize('kind', ['RNN', 'LSTM', 'GRU'])
def test_recurrent_layers_take_sequences_of_unlike_lengths(torch, kind, options):
    layer, lengths = getattr(nn, kind)(4, 5, **options), [6, 1, 4]
    twin = getattr(torch.nn, kind)(4, 5, **options).double()
    twin.load_state_dict({name: torch.tensor(one).double() for name, one in layer.state_dict().items()})
    first = options.get('batch_first', False)
    x = normal(3, 6, 4) if first else normal(6, 3, 4)
    states = [normal(4 if options else 1, 3, 5) for _ in range(1 + (kind == 'LSTM'))]

    def program(nn, layer, tensor):
        leaves = [tensor(one) for one in (x, *states)]
        packed = nn.utils.rnn.pack_padded_sequence(leaves[0], lengths, batch_first=first, enforce_sorted=False)
        out, last = layer(packed, hx=leaves[1] if len(leaves) == 2 else tuple(leaves[1:]))
        y, found = nn.utils.rnn.pad_packed_sequence(out, batch_first=first, total_length=6)
        results = [y, *flat(last)]
        sum((one * (i + 1.0)).sum() for i, one in enumerate(results)).backward()
        return found.tolist(), [one.detach().numpy() for one in (*results, *(leaf.grad for leaf in leaves))], [
            p.grad.numpy() for p in layer.parameters()]

    ours = program(nn, layer, lambda one: Tensor(one, requires_grad=True))
    theirs = program(torch.nn, twin, lambda one: torch.tensor(one).double().requires_grad_())
    assert ours[0] == theirs[0] == lengths
    for got, want in zip((*ours[1], *ours[2]), (*theirs[1], *theirs[2]), strict=True):
        close(got, want)
    y = layer(Tensor(x), lengths=np.array(lengths))[0].numpy()
    assert not (y[1, 1:] if first else y[1:, 1]).any()
    for wrong in ([6, 0, 4], [6, 1, 7], [6, 1], [1.0, 2.0, 3.0]):
        with pytest.raises(ValueError, match=f'{kind}.*lengths: expected 3 whole numbers from 1 to 6, got'):
            layer(Tensor(x), lengths=wrong)
    with pytest.raises(TypeError, match='got a state and also hx'):
        layer(Tensor(x), None, hx=Tensor(states[0]))


def test_an_lstm_cell_takes_the_states_as_an_lstm_does():
    cell, x, h, c = shaken(nn.LSTMCell(4, 5)), normal(3, 4), normal(3, 5), normal(3, 5)
    want = [y.numpy() for y in cell(Tensor(x), Tensor(h), Tensor(c))]
    for states in (((h, c),), ((Tensor(h), Tensor(c)),), (h, c)):
        assert all((y.numpy() == u).all() for y, u in zip(cell(x, *states), want, strict=True))
    zeros = [y.numpy() for y in cell(x)]
    assert all((y.numpy() == u).all() for y, u in zip(cell(x, None), zeros, strict=True))
    lstm, sequence = nn.LSTM(4, 5), normal(2, 3, 4)
    for call in (lambda: cell(x, h), lambda: lstm(sequence, h[None])):
        with pytest.raises(TypeError, match=r'state: expected \(h, c\), got Tensor alone'):
            call()
    with pytest.raises(TypeError, match=r'GRUCell\(4, 5\): state: expected a Tensor of shape \(3, 5\), got tuple'):
        nn.GRUCell(4, 5)(x, (h, c))
    with pytest.raises(TypeError, match=r'GRU\(4, 5\): expected x and at most 1 state, got 2 states'):
        nn.GRU(4, 5)(sequence, h[None], c[None])


def test_ids_of_any_integers_find_their_rows():
    layer = nn.Embedding(7, 5)
    want = layer.weight.numpy()[IDS]
    for ids in (IDS.astype(dtype) for dtype in (np.int64, np.uint8, np.int16, np.uint64)):
        assert (layer(ids).numpy() == want).all() and (F.embedding(ids, layer.weight).numpy() == want).all()
        y, ctx = layer.forward(ids)
        assert (get(y) == want).all()
        layer.zero_grad()
        layer.backward(put(np.ones(y.shape, np.float32)), ctx)
        assert layer.weight.grad.numpy().sum(1).tolist() == (5 * np.bincount(IDS.reshape(-1), minlength=7)).tolist()
    for call in (layer, layer.forward, lambda ids: F.embedding(ids, layer.weight)):
        with pytest.raises(OverflowError, match='4294967297 out of bounds for int32'):
            call(np.array([1, 2**32 + 1]))
        with pytest.raises(ValueError, match=r'ids\[1\]=7, expected 0 to 6'):
            call(np.array([1, 7]))
        with pytest.raises(TypeError, match='ids: expected dtype int32, got float'):
            call(np.array([1.0, 2.0]))


def test_a_wrong_dtype_is_not_called_a_matter_of_strides():
    layer = nn.Linear(3, 2)
    with pytest.raises(TypeError, match=r'^Linear\(3, 2\): x: expected dtype float32 or bfloat16, got int32$'):
        layer(Tensor([[1, 2, 3]]))
    with pytest.raises(TypeError, match=r'^Linear\(3, 2\): x: expected a float32 or bfloat16 array, got list$'):
        layer.forward([[1.0, 2, 3]])
    with pytest.raises(TypeError, match=r'^Linear\(3, 2\): x: expected a C-contiguous array, got shape \(4, 3\) with '):
        layer.forward(put(normal(3, 4)).T)


# ---- dropout ---------------------------------------------------------------------------------------------------------

def test_dropout_is_another_mask_at_each_call_and_each_place():
    model = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3))
    one, other = model
    x = np.ones((200, 100), np.float32)
    y, again, elsewhere = one(Tensor(x)).numpy(), one(Tensor(x)).numpy(), other(Tensor(x)).numpy()
    for mask in (y, again, elsewhere):
        assert abs((mask > 0).mean() - 0.7) < 0.02 and (mask[mask > 0] == np.float32(1 / np.float32(0.7))).all()
    assert 0.5 < (y == again).mean() < 0.66 and 0.5 < (y == elsewhere).mean() < 0.66       # 0.58 if they are independent
    twin = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3))
    assert (get(twin[0].forward(put(x))[0]) == y).all() and (get(twin[0].forward(put(x))[0]) == again).all()
    assert (twin.reset_parameters(1)[0](Tensor(x)).numpy() != y).any()
    assert get(one.count)[0] == 2 and get(other.count)[0] == 1


def test_dropout_drops_the_same_of_the_gradient_even_if_it_ran_again():
    layer, x = nn.Dropout(0.5), np.ones((30, 40), np.float32)
    leaf = Tensor(x, requires_grad=True)
    first = layer(leaf)
    layer(leaf)
    first.sum().backward()
    assert (leaf.grad.numpy() == first.numpy()).all()
    y, ctx = layer.forward(put(x))
    layer.forward(put(x))
    assert (get(layer.backward(put(x), ctx)) == get(y)).all() and (get(y) != first.numpy()).any()


def test_a_generator_or_a_given_mask_decides_what_dropout_drops():
    x, layer = normal(30, 40), nn.Dropout(0.3, generator=np.random.default_rng(5))
    keep = np.random.default_rng(5).random((2, 30, 40)) >= 0.3
    leaf = Tensor(x, requires_grad=True)
    y = layer(leaf)
    y.sum().backward()
    scale = np.float32(1 / 0.7)
    assert (y.numpy() == x * (keep[0] * scale)).all() and (leaf.grad.numpy() == keep[0] * scale).all()
    z, ctx = layer.forward(put(x))
    assert (get(z) == x * (keep[1] * scale)).all() and (get(layer.backward(put(x), ctx)) == get(z)).all()
    for mask in (keep[1], Tensor(keep[1]), keep[1].astype(np.int64)):
        assert (nn.Dropout(0.3)(x, mask=mask).numpy() == get(z)).all()
    assert (layer.eval()(x, mask=keep[1]).numpy() == x).all() and get(layer.forward(put(x))[0]).tolist() == x.tolist()
    with pytest.raises(ValueError, match=r'^Dropout\(p=0.3\): mask: expected shape \(30, 40\), got \(40,\)$'):
        nn.Dropout(0.3)(x, mask=keep[0, 0])
    with pytest.raises(TypeError, match='^Dropout: generator: expected a numpy Generator, such as .*, got int$'):
        nn.Dropout(0.3, generator=3)
    with Plan(x=put(x)), pytest.raises(TypeError, match='got a mask or a generator while a plan records'):
        layer.train()(Tensor(ndarray.from_numpy(put(x)) if isinstance(put(x), np.ndarray) else put(x)))


def test_dropout_passes_everything_in_evaluation():
    layer, x = nn.Dropout(0.5).eval(), Tensor(normal(3, 4))
    assert layer(x) is x and layer.forward(put(x.numpy()))[0] is not None and get(layer.count)[0] == 0
    with pytest.raises(ValueError, match='Dropout: p: expected 0 <= p <= 1, got 1.5'):
        nn.Dropout(1.5)


def test_dropout_of_everything_leaves_zeros():
    layer, x = nn.Dropout(1.0), normal(3, 4)
    leaf = Tensor(x, requires_grad=True)
    for y in (layer(leaf), F.dropout(leaf, 1.0)):
        y.sum().backward()
        assert not y.numpy().any() and not leaf.grad.numpy().any()
    z, ctx = layer.forward(put(x))
    assert not get(z).any() and not get(layer.backward(put(x), ctx)).any() and layer.eval()(leaf) is leaf
    with pytest.raises(ValueError, match='dropout: expected a probability below 1 of dropping an attention weight, got 1'):
        nn.MultiHeadAttention(8, 2, dropout=1.0)(normal(2, 3, 8))


# ---- the tree --------------------------------------------------------------------------------------------------------

class Net(nn.Module):
    def __init__(self, backwards=False, sizes=(6, 5, 4)):
        makers = {'first': lambda: nn.Linear(sizes[0], sizes[1]), 'norm': lambda: nn.BatchNorm1d(sizes[1]),
                  'blocks': lambda: [nn.Residual(nn.Linear(sizes[1], sizes[1])) for _ in range(11)],
                  'heads': lambda: {'a': nn.Linear(sizes[1], sizes[2]), 'b': nn.Linear(sizes[1], sizes[2])}}
        for name in reversed(makers) if backwards else makers:
            setattr(self, name, makers[name]())

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        for block in self.blocks:
            x = block(x)
        return self.heads['a'](x) + self.heads['b'](x)


def train(model, steps=5, make=lambda p: optim.Adam(p, 0.01, max_norm=1.0)):
    rng, optimizer, loss_of = np.random.default_rng(3), make(model.parameters()), nn.SoftmaxLoss()
    for _ in range(steps):
        x, labels = rng.standard_normal((7, 6)).astype(np.float32), rng.integers(0, 4, 7).astype(np.int32)
        optimizer.zero_grad()
        loss_of(model(Tensor(x)), Tensor(labels)).backward()
        optimizer.step()
    return model.state_dict()


def test_same_seed_layers_constructed_in_another_order_the_same_weights():
    one, other = Net(), Net(backwards=True)
    assert [name for name, _ in one.named_parameters()] != [name for name, _ in other.named_parameters()]
    first, second = one.state_dict(), other.state_dict()
    assert set(first) == set(second) and len(first) == 2 + 5 + 22 + 4
    for name, value in first.items():
        assert (value == second[name]).all(), name
    assert (first['blocks.0.module.weight'] != first['blocks.1.module.weight']).any()
    trained = train(one), train(other)
    for name, value in trained[0].items():
        assert (value == trained[1][name]).all(), name
        assert (value != first[name]).any(), name


def test_layers_made_and_even_used_before_the_tree_is_whole():
    def layers():
        return nn.Linear(4, 4), nn.Linear(4, 4)
    a, b = layers()
    want = nn.Sequential(a, b).state_dict()
    a, b = layers()
    assert (b.weight.numpy() != a.weight.numpy()).any() and a.weight.name == b.weight.name == 'weight'
    model = nn.Sequential(a, b)
    assert all((value == want[name]).all() for name, value in model.state_dict().items())
    assert [p.name for p in model.parameters()] == list(want)
    a, b = layers()
    trained = a.weight.numpy() + 1
    a.load_state_dict({'weight': trained, 'bias': np.ones(4)})
    state = nn.Sequential(a, b).state_dict()
    assert (state['0.weight'] == trained).all() and (state['1.weight'] == want['1.weight']).all()


def test_a_part_remembers_the_tree_that_it_was_made_in():
    weight = Net().first.weight                                     # nobody holds the Net any more
    assert (weight.numpy() == Net().state_dict()['first.weight']).all() and weight.name == 'first.weight'
    assert nn.Linear(3, 4).weight.numpy().shape == (4, 3)
    model = Net()
    model.parameters()
    gone = weakref.ref(model)
    del model
    assert gone() is None                                           # a built tree is freed at once, not by the collector


@pytest.fixture
def seeded():
    yield pyops.seed
    pyops.seed(0)


LONE = [lambda: nn.Linear(3, 3), lambda: nn.Embedding(4, 3), lambda: nn.Conv2d(2, 3, 3), lambda: nn.GRU(3, 4),
        lambda: nn.MultiHeadAttention(4, 2), lambda: nn.TransformerEncoderLayer(4, 2, 6)]


@pytest.mark.parametrize('make', LONE)
def test_layers_that_belong_to_no_module_differ_and_a_seed_repeats_them(make, seeded):
    class Plain:
        def __init__(self):
            self.layers = [make() for _ in range(3)]

    def values():
        return [{name: value for name, value in layer.state_dict().items() if value.std() > 0 and 'norm' not in name}
                for layer in Plain().layers]
    seeded(5)
    first = values()
    later = values()
    seeded(5)
    again = values()
    seeded(6)
    other = values()
    assert all(first[0]) and len(first[0]) >= 1
    for name in first[0]:
        drawn = [state[name].numpy().tobytes() for state in (*first, *later, *other)]
        assert len(set(drawn)) == 9, name
        assert [state[name].numpy().tobytes() for state in again] == drawn[:3]


def test_dropouts_that_belong_to_no_module_have_masks_of_their_own(seeded):
    x = np.ones((20, 30), np.float32)
    seeded(1)
    masks = [nn.Dropout(0.5)(x).numpy() for _ in range(3)]
    seeded(1)
    again = [nn.Dropout(0.5)(x).numpy() for _ in range(3)]
    assert all((a == b).all() for a, b in zip(masks, again, strict=True))
    assert all((masks[i] != masks[j]).any() for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_layer_alone_has_its_values_from_when_it_was_made(seeded):
    seeded(3)
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    want = one.weight.numpy().copy(), other.weight.numpy().copy()
    seeded(3)
    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    twin = copy.deepcopy(one)
    other.weight.numpy()                                            # used first
    Net().parameters()
    assert (one.weight.numpy() == want[0]).all() and (other.weight.numpy() == want[1]).all()
    assert (twin.weight.numpy() == want[0]).all()
    fixed = [nn.Linear(3, 3).reset_parameters(7).weight.numpy() for _ in range(2)]
    assert (fixed[0] == fixed[1]).all()


def test_values_in_a_tree_depend_on_nothing_but_seed_and_name(seeded):
    for seed in (0, 9):
        seeded(seed)
        nn.Linear(3, 3).parameters()
        tree = Net()
        for name, parameter in tree.named_parameters():
            want = parameter.init(generator(0, name), parameter.shape)
            assert (parameter.numpy() == want).all(), name
        model = nn.Sequential(nn.Dropout(0.5), nn.Residual(nn.Linear(3, 3)))
        want = init.kaiming_uniform()(generator(0, '1.module.weight'), (3, 3))
        assert (model[1].module.weight.numpy() == want).all()
        y = nn.Sequential(nn.Dropout(0.5))(np.ones((5, 4))).numpy()
        want, _ = ops.Dropout(0.5, key(0, '0')).forward(put(np.ones((5, 4), np.float32)), put(np.array([1])))
        assert (y == get(want)).all()


def test_initial_values_are_those_of_the_seed():
    a, b, c = (Net().reset_parameters(seed) for seed in (0, 1, 1))
    b.parameters()
    assert (a.first.weight.numpy() == Net().first.weight.numpy()).all()
    assert (a.first.weight.numpy() != b.first.weight.numpy()).any() and (b.first.weight.numpy() == c.first.weight.numpy()).all()
    a.reset_parameters(1)
    assert all((value == b.state_dict()[name]).all() for name, value in a.state_dict().items())
    bound = np.sqrt(6 / 100)
    weight, bias = (p.numpy() for p in nn.Linear(100, 200).parameters())
    assert 0.99 * bound < np.abs(weight).max() <= bound and not bias.any()


def test_all_parameters_and_their_gradients_lie_in_one_buffer():
    model = Net()
    params = model.params
    assert params.count() == sum(p.size for p in model.parameters()) and len(params) == len(model.parameters())
    for p in model.parameters():
        for tensor, whole in ((p, params.values), (p.grad, params.grads)):
            assert location(whole) <= tensor.array.location() < location(whole) + whole.nbytes
    nn.SoftmaxLoss()(model(Tensor(normal(7, 6))), Tensor(np.arange(7) % 4)).backward()
    assert all(p.grad.numpy().any() for n, p in model.named_parameters() if n != 'first.bias')     # the norm takes it away
    assert get(params.grads).any()
    model.zero_grad()
    assert not get(params.grads).any() and len(optim.SGD(model.parameters())._units) == 1
    used_before = nn.Linear(3, 3)
    used_before.parameters()
    with pytest.raises(ValueError, match='params: expected one buffer, got 2'):
        _ = nn.Sequential(used_before, nn.Linear(3, 3)).params


def test_a_parameter_in_two_places_is_one():
    class Tied(nn.Module):
        def __init__(self):
            self.embedding, self.out = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, ids):
            return self.out(self.embedding(ids))
    model, ids = Tied(), Tensor(np.array([3, 5]))
    assert [name for name, _ in model.named_parameters()] == ['embedding.weight']
    model(ids).sum().backward()
    e, w = np.zeros((9, 4)), model.embedding.weight.numpy().astype(np.float64)
    e += w[[3, 5]].sum(0)
    e[[3, 5]] += w.sum(0)
    close(model.embedding.weight.grad.numpy(), e, 3e-5)


def test_a_parameter_without_a_module_can_be_trained():
    given, drawn, other = nn.Parameter(np.arange(3)), nn.Parameter((3,), init.normal(1)), nn.Parameter((3,), init.normal(1))
    assert given.tolist() == [0, 1, 2] and given.grad.tolist() == [0, 0, 0] and given.name == 'parameter'
    before = drawn.numpy().copy()
    assert (before != other.numpy()).any()
    optimizer = optim.SGD([given, drawn], 0.5)
    ((given * given).sum() + drawn.sum()).backward()
    optimizer.step()
    assert given.tolist() == [0, 0, 0] and (drawn.numpy() == before - 0.5).all()

    class Holder(nn.Module):
        def __init__(self):
            self.given, self.drawn, self.other = given, drawn, other
    holder = Holder()
    want = init.normal(1)(generator(0, 'other'), (3,))
    assert [name for name, _ in holder.named_parameters()] == ['given', 'drawn', 'other']
    assert (drawn.numpy() == before - 0.5).all() and (other.numpy() == want).all() and other.name == 'other'


def test_values_assigned_to_a_parameter_are_copied_into_it():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    layer, rng = model[0], np.random.default_rng(3)
    weight, optimizer = layer.weight, optim.SGD(model.parameters(), 0.5, momentum=0.5)
    for values in (np.ones((2, 3)), Tensor(normal(2, 3)), Tensor(normal(2, 3), requires_grad=True), [[1, 2, 3], [4, 5, 6]],
                   ndarray.array(normal(2, 3))):
        layer.weight = values
        want = np.asarray(values, np.float32)
        assert layer.weight is weight and (weight.numpy() == want).all() and len(model.parameters()) == 4
        optimizer.zero_grad()
        model(rng.standard_normal((4, 3))).sum().backward()
        optimizer.step()
        assert (weight.numpy() != want).any()
    for value, error, text in ((np.ones(3), ValueError, r'^Linear.weight: expected shape \(2, 3\), got \(3,\)$'),
                               (3.0, ValueError, r'^Linear.weight: expected shape \(2, 3\), got \(\)$'),
                               ('x', TypeError, '^Linear.weight: expected real numbers, got str'),
                               (weight * 2, TypeError, '^Linear.weight: got the result of Multiply, whose history')):
        before = weight.numpy().copy()
        with pytest.raises(error, match=text):
            layer.weight = value
        assert layer.weight is weight and (weight.numpy() == before).all()
    layer.bias = None
    assert [name for name, _ in model.named_parameters()] == ['0.weight', '1.weight', '1.bias']


def test_values_can_be_assigned_before_the_tree_is_whole():
    class Identities(nn.Module):
        def __init__(self):
            self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
            self.one.weight = np.eye(2)

        def forward(self, x):
            return self.other(self.one(x))
    model = Identities()
    assert model.params.count() == 12 and model.one.weight.tolist() == [[1, 0], [0, 1]]
    assert copy.deepcopy(Identities()).one.weight.tolist() == [[1, 0], [0, 1]]
    for drawn in (model.reset_parameters(0), Identities().reset_parameters(0)):
        assert (drawn.one.weight.numpy() == init.kaiming_uniform()(generator(0, 'one.weight'), (2, 2))).all()


def test_a_gradient_can_be_assigned_to_a_parameter():
    weight = nn.Linear(3, 2).weight
    for value in (np.ones((2, 3)), Tensor(normal(2, 3)), [[1.0, 2, 3], [4, 5, 6]]):
        weight.grad = value
        assert (weight.grad.numpy() == np.asarray(value, np.float32)).all()
    weight.grad = None
    assert weight.grad.tolist() == [[0, 0, 0], [0, 0, 0]]
    for value in (np.ones(3), Tensor([[1, 2, 3], [4, 5, 6]])):
        with pytest.raises(ValueError, match=r'^grad: expected shape \(2, 3\) and float32, got \(.*\) and (float|int)32$'):
            weight.grad = value


def test_parameters_of_given_values():
    class Scale(nn.Module):
        def __init__(self):
            self.factor = nn.Parameter([1.5, 2.5])

        def forward(self, x):
            return x * self.factor
    model = Scale()
    assert model(Tensor([[2.0, 4.0]])).tolist() == [[3.0, 10.0]]
    y, ctx = model.forward_arrays(put(np.ones((2, 2), np.float32)))
    assert y.tolist() == [[1.5, 2.5]] * 2
    assert model.backward(put(np.array([[1, 2], [3, 4]], np.float32)), ctx).tolist() == [[1.5, 5.0], [4.5, 10.0]]
    assert model.factor.grad.tolist() == [4.0, 6.0] and model.factor.name == 'factor'


def test_the_padding_of_an_embedding_starts_as_zeros_and_stays_so(torch):
    layer = nn.Embedding(7, 5, padding_idx=3)
    optimizer = optim.SGD(layer.parameters(), 0.5)
    for _ in range(2):
        assert not layer.weight.numpy()[3].any() and layer.weight.numpy()[[0, 1, 2, 4, 5, 6]].all()
        optimizer.zero_grad()
        layer(IDS).sum().backward()
        optimizer.step()
    assert (layer.reset_parameters(4).weight.numpy()[3] == 0).all()
    layer.weight.grad = np.ones((7, 5))                     # of another use of the weight, which may reach the row
    layer(IDS).sum().backward()
    assert layer.weight.grad.numpy()[:, 0].tolist() == [2, 2, 1, 1, 1, 1, 3]
    with pytest.raises(ValueError, match='Embedding: padding_idx: expected one of 7 rows, got 7'):
        nn.Embedding(7, 5, 7)
    x = Tensor(normal(7, 5), requires_grad=True)            # second derivatives, and float64
    for weight in (x, x.double()):
        y = F.embedding(IDS, weight, padding_idx=-4)
        first, = grad((y * y * y).sum(), [x], create_graph=True)
        second, = grad(first.sum(), [x])
        want = 6 * x.numpy() * np.bincount(IDS.reshape(-1), minlength=7)[:, None]
        want[3] = 0
        close(second.numpy(), want, 1e-5)


def test_lists_and_dicts_of_modules_are_members():
    class Blocks(nn.Module):
        def __init__(self):
            self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            self.heads = nn.ModuleDict({'a': nn.Linear(3, 2)})

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.heads['a'](x)
    model = Blocks()
    model.blocks.append(nn.Linear(3, 3)).extend([nn.ReLU()]).insert(0, nn.Tanh())
    model.heads['b'] = nn.Linear(3, 1)
    model.heads.update({'c': nn.ReLU()})
    names = [name for name, _ in model.named_parameters()]
    assert names == [f'{name}.{kind}' for name in ('blocks.1', 'blocks.2', 'blocks.3', 'heads.a', 'heads.b')
                     for kind in ('weight', 'bias')]
    assert model(normal(4, 3)).shape == (4, 2) and model.blocks[1].weight.name == 'blocks.1.weight'
    assert (len(model.blocks), len(model.heads), list(model.heads)) == (5, 3, ['a', 'b', 'c'])
    assert [type(one).__name__ for one in model.blocks[3:]] == ['Linear', 'ReLU'] and 'c' in model.heads
    model.blocks[1] = nn.Identity()
    del model.blocks[0]
    assert isinstance(model.blocks.pop(), nn.ReLU) and isinstance(model.heads.pop('c'), nn.ReLU)
    del model.heads['b']
    assert [name for name, _ in model.named_parameters()] == [
        f'{name}.{kind}' for name in ('blocks.1', 'blocks.2', 'heads.a') for kind in ('weight', 'bias')]
    assert dict(model.heads.items()) == {'a': model.heads['a']} and list(model.heads.keys()) == ['a']
    assert [name for name, _ in model.named_children()] == ['blocks', 'heads'] and len(model.heads.values()) == 1
    seen = []
    assert model.apply(lambda module: seen.append(type(module).__name__)) is model
    assert seen == ['Identity', 'Linear', 'Linear', 'ModuleList', 'Linear', 'ModuleDict', 'Blocks']
    assert not any(parameter.requires_grad for parameter in model.requires_grad_(False).parameters())
    for wrong, error in ((lambda: model.blocks.append(3), TypeError), (lambda: nn.ModuleDict({'a.b': nn.ReLU()}), ValueError),
                         (lambda: nn.ModuleDict({'a': 3}), TypeError)):
        with pytest.raises(error):
            wrong()
    model = nn.Sequential(nn.Linear(3, 3)).append(nn.ReLU())
    assert model(normal(2, 3)).numpy().min() >= 0 and repr(nn.ModuleList([nn.ReLU()])) == 'ModuleList(\n  (0): ReLU()\n)'


def test_train_and_eval_reach_every_module():
    model = Net()
    assert model.eval() is model and not any(module.training for module in model.modules())
    assert len(model.modules()) == 1 + 2 + 22 + 2
    assert all(module.training for module in model.train().modules())


def test_state_goes_out_and_in():
    trained = Net()
    state = train(trained)
    assert 'norm.running_mean' in state and state['norm.running_mean'].any()
    fresh = Net(backwards=True)
    fresh.load_state_dict(state)
    x = Tensor(normal(3, 6))
    assert (fresh.eval()(x).numpy() == trained.eval()(x).numpy()).all()
    state['first.bias'][...] = 7
    assert not (trained.first.bias.numpy() == 7).any()              # it was a copy
    for change, error, text in (({'x.y': 0}, KeyError, 'x.y: the module has no such parameter'),
                                ({'first.bias': np.zeros(9)}, ValueError, r'first.bias: expected shape \(5,\), got \(9,\)'),
                                ({'norm.running_mean': state['norm.running_mean'].numpy() * 1j}, TypeError,
                                 'norm.running_mean: expected float32, got complex64')):
        with pytest.raises(error, match=text):
            fresh.load_state_dict(state | change)
    del state['heads.b.bias']
    with pytest.raises(KeyError, match='heads.b.bias: missing in the state'):
        fresh.load_state_dict(state)
    assert not (fresh.first.bias.numpy() == 7).any()                # nothing was changed
    fresh.load_state_dict({'first.bias': np.full(5, 7), 'x.y': 0, 'norm.num_batches_tracked': 3}, strict=False)
    assert (fresh.first.bias.numpy() == 7).all()


def test_a_copy_of_a_model_is_a_model_of_its_own():
    model = Net()
    train(model)
    for twin in (copy.deepcopy(model), copy.deepcopy(Net())):
        assert twin.root() is twin and twin.blocks[3].root() is twin
    twin = copy.deepcopy(model)
    before = model.state_dict()
    assert all((value == before[name]).all() for name, value in twin.state_dict().items())
    train(twin)
    assert all((value == before[name]).all() for name, value in model.state_dict().items())
    assert (twin.first.weight.numpy() != before['first.weight']).any() and len(twin.params) == len(model.params)


def test_a_module_is_pickled_with_its_values_and_its_ties():
    model, x = Net(), normal(3, 4)
    for _ in range(2):                          # before and after its first use
        twin = pickle.loads(pickle.dumps(model))
        assert all((value == twin.state_dict()[name]).all() for name, value in model.state_dict().items())
    assert twin.root() is twin and len(twin.params) == len(model.params)
    part = pickle.loads(pickle.dumps(model.first))
    assert part.root() is part and (part.weight.numpy() == model.first.weight.numpy()).all()
    one = nn.Linear(4, 4)
    tied = nn.Sequential(one, nn.ReLU(), one, nn.Dropout(0.5), nn.TransformerEncoderLayer(4, 2, 3))
    tied[0].weight.requires_grad_(False)
    twin = pickle.loads(pickle.dumps(tied.eval()))
    assert (twin(x[None]).numpy() == tied(x[None]).numpy()).all()
    assert twin[0] is twin[2] and not twin[0].weight.requires_grad and not twin.training


def test_modules_are_printed_as_a_tree():
    assert repr(nn.Sequential(nn.Linear(3, 4, bias=False), nn.Residual(nn.ReLU()), nn.Dropout(0.1))) == '''Sequential(
  (0): Linear(3, 4, bias=False)
  (1): Residual(
    (module): ReLU()
  )
  (2): Dropout(p=0.1)
)'''
    assert repr(nn.Conv2d(1, 2, 3, padding=(1, 1))) == 'Conv2d(1, 2, kernel_size=(3, 3), padding=(1, 1))'


@pytest.mark.parametrize('call', [lambda model, x: model(Tensor(x)), lambda model, x: model.forward(put(x))],
                         ids=['tensors', 'by hand'])
@pytest.mark.parametrize('model, shape, error, text', [
    (lambda: nn.Sequential(nn.ReLU(), nn.Linear(7, 5)), (4, 8), ValueError,
     r'^1: Linear\(7, 5\): x: expected shape \(4, 7\), got \(4, 8\)'),
    (lambda: nn.Linear(7, 5), (4, 8), ValueError, r'^Linear\(7, 5\): x: expected shape'),
    (lambda: nn.BatchNorm1d(7), (4, 8), ValueError, r'^BatchNorm1d\(7\): x: expected shape \(4, 7\), got \(4, 8\)'),
    (lambda: nn.BatchNorm1d(7), (1, 7), ValueError, r'^BatchNorm1d\(7\): .*R=1 P=1, expected at least 2 values per channel'),
    (lambda: nn.LayerNorm(7), (4, 8), ValueError, r'^LayerNorm\(7\): x: expected shape'),
    (lambda: nn.GRU(7, 5), (3, 4, 8), ValueError, r'^GRU\(7, 5\): x: expected shape \(T, B, 7\) with T >= 1, got \(3, 4, 8\)'),
    (lambda: nn.LSTM(7, 5), (0, 4, 7), ValueError, r'^LSTM\(7, 5\): x: expected shape'),
    (lambda: nn.MultiHeadAttention(8, 2), (3, 4, 9), ValueError, r'^MultiHeadAttention\(8, 2\): query: .* shape \(T, 4, 8\)'),
    (lambda: nn.RNNCell(7, 5), (6,), ValueError, r'^RNNCell\(7, 5\): x: expected shape \(B, 7\), got \(6,\)'),
    (lambda: nn.GRUCell(7, 5), (3, 8), ValueError, r'^GRUCell\(7, 5\): x: expected shape \(B, 7\), got \(3, 8\)'),
    (lambda: nn.Flatten(), (), ValueError, r'^Flatten\(\): x: expected shape \(B, \.\.\.\), got \(\)'),
    (lambda: nn.Conv2d(3, 4, 3), (2, 5, 6, 6), ValueError,
     r'^Conv2d\(3, 4, kernel_size=\(3, 3\)\): x: expected shape \(2, 3, 6, 6\), got \(2, 5, 6, 6\)'),
    (lambda: nn.Conv2d(3, 4, 3), (2, 3, 2, 6), ValueError, r'^Conv2d\(.*: a window of \(3, 3\) .* does not fit into \(2, 6\)'),
    (lambda: nn.Conv1d(3, 4, 3), (2, 3, 6, 6), ValueError, r'^Conv1d\(3, 4, kernel_size=\(3,\)\): conv1d: expected x '),
    (lambda: nn.BatchNorm2d(3), (2, 3, 6), ValueError, r'^BatchNorm2d\(3\): x: expected 4 axes, got shape \(2, 3, 6\)'),
    (lambda: nn.MaxPool2d(3), (2, 3, 2, 6), ValueError, r'^MaxPool2d\(kernel_size=3\): .*a window of \(3, 3\) .* does not fit'),
    (lambda: nn.AvgPool2d(2), (2, 3), ValueError,
     r'^AvgPool2d\(kernel_size=2\): x: expected shape \(N, C, H, W\), got \(2, 3\)'),
])
def test_errors_name_the_layer(call, model, shape, error, text):
    with pytest.raises(error, match=text):
        call(model(), normal(*shape))


@pytest.mark.parametrize('name', ['RNN', 'LSTM', 'GRU', 'RNNCell', 'LSTMCell', 'GRUCell'])
def test_recurrent_parameters_have_the_names_shapes_and_order_of_torch(torch, name):
    is_cell = name.endswith('Cell')
    for options in (dict(bias=False), {}) + ((dict(num_layers=2, bidirectional=True),) if not is_cell else ()):
        ours, theirs = getattr(nn, name)(4, 5, **options), getattr(torch.nn, name)(4, 5, **options)
        assert [(key, value.shape) for key, value in ours.state_dict().items()] == [
            (key, tuple(value.shape)) for key, value in theirs.state_dict().items()]


def test_recurrent_layers_check_and_print_their_arguments():
    for make in (nn.GRU, nn.LSTM):
        told = f'{make.__name__}: bias: expected True or False, got 0.5; pass later arguments by name'
        with pytest.raises(TypeError, match=told):
            make(8, 6, 2, 0.5)
    with pytest.raises(TypeError, match='RNNCell: bias: expected True or False'):
        nn.RNNCell(8, 6, 'relu')
    for make in (nn.RNN, nn.RNNCell):
        with pytest.raises(ValueError, match=f"{make.__name__}: nonlinearity: 'gelu', expected 'tanh' or 'relu'"):
            make(8, 6, nonlinearity='gelu')
    with pytest.raises(ValueError, match=r'x: expected shape \(B, T, 4\) with T >= 1, got \(3, 0, 4\)'):
        nn.LSTM(4, 5, batch_first=True)(normal(3, 0, 4))
    with pytest.raises(ValueError, match=r'state: expected shape \(4, 3, 5\), got \(2, 3, 5\)'):
        nn.GRU(4, 5, 2, bidirectional=True)(normal(6, 3, 4), normal(2, 3, 5))
    assert repr(nn.RNN(4, 5, 2, 'relu', batch_first=True)) == "RNN(4, 5, num_layers=2, nonlinearity='relu', batch_first=True)"
    assert repr(nn.LSTM(4, 5, bias=False, bidirectional=True)) == 'LSTM(4, 5, bias=False, bidirectional=True)'
    assert repr(nn.GRUCell(4, 5, False)) == 'GRUCell(4, 5, bias=False)'


def test_states_of_a_cell_are_not_stretched():
    with pytest.raises(ValueError, match=r'LSTMCell\(7, 5\): state: expected shape \(3, 5\), got \(1, 5\)'):
        nn.LSTMCell(7, 5)(Tensor(normal(3, 7)), Tensor(normal(3, 5)), Tensor(normal(1, 5)))


def test_other_errors_name_what_is_wrong():
    with pytest.raises(TypeError, match='expected modules, one argument each, got list'):
        nn.Sequential([nn.ReLU()])
    for shape in ((0, 3), (3, -1)):
        with pytest.raises(ValueError, match=r'Parameter: shape .* expected sizes of 1 or more'):
            nn.Linear(*shape)
    with pytest.raises(ValueError, match=r'Embedding\(7, 5\): .*ids\[1\]=9, expected 0 to 6'):
        nn.Embedding(7, 5)(Tensor(np.array([3, 9])))
    with pytest.raises(ValueError, match='embed_dim 8 must be a multiple of num_heads 3'):
        nn.MultiHeadAttention(8, 3)
    for make, error, text in (
            (lambda: nn.GroupNorm(4, 6), ValueError, 'GroupNorm: num_groups: expected a divisor of 6 channels, got 4'),
            (lambda: nn.GroupNorm(2, 6)(normal(3, 5, 2)), ValueError, r'x: expected shape \(N, 6, ...\), got \(3, 5, 2\)'),
            (lambda: nn.LayerNorm((4, 9))(normal(3, 9)), ValueError, r'x: expected shape \(..., 4, 9\), got \(3, 9\)'),
            (lambda: nn.GELU('erf'), ValueError, "GELU: approximate: expected 'none' or 'tanh', got 'erf'"),
            (lambda: F.cross_entropy(normal(4, 3), LABELS, ignore_index=normal(3)), TypeError, 'ignore_index: expected'),
            (lambda: F.cross_entropy(normal(4, 3), LABELS, -1), TypeError, r'weight: .* got -1; pass ignore_index by name'),
            (lambda: nn.CrossEntropyLoss(0), TypeError, 'CrossEntropyLoss: weight: .* got 0; pass ignore_index by name'),
            (lambda: nn.NLLLoss(reduction='max'), ValueError, "NLLLoss: reduction: expected .* or 'none', got 'max'"),
            (lambda: nn.MSELoss(reduction='foo'), ValueError, "MSELoss: reduction: .*, 'sum' or 'none', got 'foo'"),
            (lambda: nn.KLDivLoss(reduction='foo'), ValueError, "expected 'mean', 'sum', 'none' or 'batchmean', got 'foo'"),
            (lambda: nn.HuberLoss(delta=0), ValueError, 'HuberLoss: delta: expected a positive number, got 0'),
            (lambda: nn.SmoothL1Loss(beta=-1), ValueError, 'SmoothL1Loss: beta: expected 0 or more, got -1'),
            (lambda: nn.Tanh(3, 4), TypeError, 'Tanh: too many positional arguments'),
            (lambda: nn.Flatten(2, 1)(normal(2, 3, 4)), ValueError, r'Flatten.*: expected start_dim at or before end_dim'),
            (lambda: F.scaled_dot_product_attention(*[normal(4, 3)] * 3, None, True), ValueError, 'pass is_causal by name'),
            (lambda: F.cross_entropy(normal(4, 3), normal(4, 2)), TypeError, r'labels: .* have the shape of x, \(4, 3\)'),
            (lambda: F.cross_entropy(normal(4, 3), normal(4, 3), ignore_index=0), ValueError, 'none with probabilities'),
            (lambda: F.cross_entropy(normal(4, 3), LABELS, reduction='max'), ValueError, "reduction: expected 'mean', 'sum'"),
            (lambda: nn.CrossEntropyLoss(label_smoothing=2)(normal(4, 3), LABELS), ValueError, 'label_smoothing: expected 0'),
            (lambda: nn.MaxPool3d(2, return_indices=True)(normal(1, 1, 2, 2, 2)), ValueError, 'return_indices: expected False'),
            (lambda: nn.Conv3d(1, 1, (2, 2)), ValueError, 'Conv3d: kernel_size: .* or three, got .2, 2.'),
            (lambda: nn.MultiheadAttention(8, 2, 0.0, True, True), ValueError, 'add_bias_kv and add_zero_attn: expected False'),
            (lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, True), TypeError, 'activation: expected a name or a function'),
            (lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, 'elu'), ValueError, "activation: expected one of .*, got 'elu'"),
            (lambda: nn.TransformerEncoder(nn.Linear(8, 8), 2), TypeError, 'expected a TransformerEncoderLayer, got Linear')):
        with pytest.raises(error, match=text):
            make()
    with pytest.raises(ValueError, match='num_layers: expected 1 or more, got 0'):
        nn.GRU(3, 4, 0)
    with pytest.raises(ValueError, match=r'GRU\(3, 4\): state: expected shape \(1, 5, 4\), got \(5, 4\)'):
        nn.GRU(3, 4)(Tensor(normal(2, 5, 3)), Tensor(normal(5, 4)))
    with pytest.raises(ValueError, match=r'MSELoss\(\): target: expected shape \(3,\), got \(1,\)'):
        nn.MSELoss()(Tensor(normal(3)), Tensor(normal(1)))
    with pytest.raises(NotImplementedError, match=r'Module.forward\(x\)'):
        nn.Module()(Tensor(normal(3)))
    with pytest.raises(TypeError, match='on arrays, arguments are positional, got keyword is_causal'):
        nn.TransformerEncoderLayer(8, 2).forward(put(normal(3, 2, 8)), is_causal=True)


# ---- optimisers on Tensors -------------------------------------------------------------------------------------------

OPTIMISERS = [(lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
               lambda t, p: t.SGD(p, 0.1, 0.9, weight_decay=0.01), None),
              (lambda p: optim.Adam(p, 0.01, weight_decay=0.01), lambda t, p: t.Adam(p, 0.01, weight_decay=0.01), None),
              (lambda p: optim.Adam(p, 0.01, max_norm=0.1), lambda t, p: t.Adam(p, 0.01), 0.1)]


@pytest.mark.parametrize('which', ['module', 'part', 'frozen', 'alone'])
@pytest.mark.parametrize('make, twin, max_norm', OPTIMISERS, ids=['sgd', 'adam', 'adam-clipped'])
def test_optimisers_train_tensors_as_torch_does(make, twin, max_norm, which, torch):
    """All of a module, one layer of it, all but a frozen one, and Tensors that belong to no module, one without a gradient."""
    rng = np.random.default_rng(5)
    start = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (('0.weight', (5, 6)), ('0.bias', (5,)),
                                                                                      ('1.weight', (4, 5)), ('1.bias', (4,)))}
    theirs = {name: torch.tensor(value).double().requires_grad_() for name, value in start.items()}
    if which == 'alone':
        ours = {name: Tensor(value, requires_grad=True) for name, value in start.items()}
        trained, expected = [*ours.values(), Tensor(normal(3), requires_grad=True)], [*theirs.values()]
    else:
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4))
        model.load_state_dict(start)
        ours = dict(model.named_parameters())
        if which == 'frozen':
            ours['1.weight'].requires_grad_(False)
            theirs['1.weight'].requires_grad_(False)
        trained = model[1].parameters() if which == 'part' else model.parameters()
        expected = [theirs[name] for name in ours if which != 'part' or name[0] == '1']
        expected = [one for one in expected if one.requires_grad]
    optimizer, reference = make(trained), twin(torch.optim, expected)
    for _ in range(5):
        x, dy = rng.standard_normal((7, 6)).astype(np.float32), rng.standard_normal((7, 4)).astype(np.float32)
        optimizer.zero_grad()
        y = (Tensor(x) @ ours['0.weight'].T + ours['0.bias']).tanh() @ ours['1.weight'].T + ours['1.bias']
        (y * Tensor(dy)).sum().backward()
        optimizer.step()
        reference.zero_grad()
        hidden = torch.tanh(torch.tensor(x).double() @ theirs['0.weight'].T + theirs['0.bias'])
        y = hidden @ theirs['1.weight'].T + theirs['1.bias']
        (y * torch.tensor(dy)).sum().backward()
        if max_norm:
            norm = torch.nn.utils.clip_grad_norm_(expected, max_norm)
            close(get(optimizer.norm), norm.reshape(1).numpy(), 3e-5)
        reference.step()
    for name, one in theirs.items():
        assert np.abs(ours[name].numpy() - one.detach().numpy()).max() <= 2e-5, name
        assert (ours[name].numpy() != start[name]).any() == (any(one is other for other in expected))


def test_an_optimiser_says_when_there_is_nothing_to_train():
    model = nn.Linear(3, 4)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match='optimizer: got 2 parameters, and none requires a gradient'):
        optim.SGD(model.parameters())
    assert model.weight.grad is None
    with pytest.raises(TypeError, match='optimizer: expected contiguous Tensors of float32 or float64'):
        optim.SGD([Tensor(normal(4, 4), requires_grad=True).detach().T.requires_grad_()])


@pytest.mark.parametrize('make, error, text', [
    (lambda x: optim.Adam(x), TypeError, r'expected several Tensors, got one of shape \(2,\); pass a list'),
    (lambda x: optim.Adam(nn.Linear(2, 2)), TypeError, r'expected Tensors, got Linear; pass its parameters\(\)'),
    (lambda x: optim.Adam([x * 2]), ValueError, r'a tensor of shape \(2,\) is the result of an op'),
    (lambda x: optim.SGD([x], -0.1), ValueError, 'SGD: lr: expected 0 <= lr < inf, got -0.1'),
    (lambda x: optim.SGD([x], float('nan')), ValueError, 'SGD: lr: expected 0 <= lr < inf, got nan'),
    (lambda x: optim.SGD([x], momentum=-1), ValueError, 'SGD: momentum: expected 0 <= momentum < inf, got -1'),
    (lambda x: optim.Adam([x], weight_decay=-1), ValueError, 'Adam: weight_decay: expected 0 <= weight_decay < inf, got -1'),
    (lambda x: optim.Adam([x], beta2=1), ValueError, 'Adam: beta2: expected 0 <= beta2 < 1, got 1'),
    (lambda x: optim.Adam([x], max_norm=-1), ValueError, 'Adam: max_norm: expected 0 <= max_norm < inf, got -1'),
    (lambda x: optim.Adam([x], 0.01, 0.9, 0.999), TypeError, r'betas: expected two numbers, such as .*, got 0.9'),
    (lambda x: optim.Adam([x], betas=0.9), TypeError, r'Adam: betas: expected two numbers, such as \(0.9, 0.999\), got 0.9'),
    (lambda x: optim.Adam([x], betas=(0.9, 0.99), beta2=0.9), TypeError, 'Adam: got betas and also beta1 or beta2'),
    (lambda x: optim.Adam([x], betas=(0.9, 1)), ValueError, 'Adam: beta2: expected 0 <= beta2 < 1, got 1'),
    (lambda x: optim.Adam([x], (0.9, 0.999)), TypeError, 'Adam: lr: expected a number, got tuple'),
])
def test_an_optimiser_refuses_what_it_cannot_train_with(make, error, text):
    with pytest.raises(error, match=text):
        make(Tensor(normal(2), requires_grad=True))


def test_betas_are_beta1_and_beta2():
    x, y = (Tensor([1.0, -2.0], requires_grad=True) for _ in range(2))
    one, other = optim.Adam([x], 0.1, betas=(0.5, 0.6)), optim.Adam([y], 0.1, beta1=0.5, beta2=0.6)
    assert (one.beta1, one.beta2, other.beta1, other.beta2) == (0.5, 0.6, 0.5, 0.6)
    assert (optim.Adam([x]).beta1, optim.Adam([x]).beta2, optim.Adam([x]).max_norm) == (0.9, 0.999, None)
    for factor in (1.0, 3.0):
        for tensor, optimizer in ((x, one), (y, other)):
            optimizer.zero_grad()
            (tensor * tensor * factor).sum().backward()
            optimizer.step()
    assert x.tolist() == y.tolist() != [1.0, -2.0]


def test_the_learning_rate_can_be_set():
    x = Tensor([1.0], requires_grad=True)
    optimizer = optim.SGD([x], 0.1)
    rate = optimizer.rate
    assert optimizer.lr == 0.1 and f'{optimizer.lr:.3f}' == '0.100' and str(optimizer.lr) == '0.1'
    optimizer.lr = 0.5
    x.backward(np.ones(1, np.float32))
    optimizer.step()
    assert rate is optimizer.rate and rate[0] == 0.5 and x.tolist() == [0.5]


def test_an_optimiser_notices_that_a_parameter_was_switched_off_since():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = optim.Adam(model.parameters())
    model(Tensor(normal(3, 2))).sum().backward()
    optimizer.step()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.numpy().copy()
    with pytest.raises(RuntimeError, match='requires_grad of 0.weight was switched off later'):
        optimizer.step()
    optim.Adam(model.parameters()).step()
    assert (model[0].weight.numpy() == before).all()


def test_an_old_graph_notices_that_an_optimiser_changed_its_parameters():
    model = nn.Linear(3, 4)
    x = Tensor(normal(2, 3), requires_grad=True)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    optim.SGD(model.parameters()).step()
    with pytest.raises(RuntimeError, match='changed in place after'):
        loss.backward()


def test_no_graph_is_kept_without_gradients():
    model = Net().eval()
    with no_grad():
        assert not model(Tensor(normal(3, 6))).requires_grad


def test_gradients_of_parameters_can_be_asked_for_and_differentiated_again():
    class Square(nn.Module):
        def __init__(self):
            self.w = nn.Parameter([3.0, -2.0])

        def forward(self, x):
            return (x * self.w * self.w * self.w).sum()
    model = Square()
    first, = grad(model(Tensor([1.0, 2.0])), [model.w], create_graph=True)
    assert first.tolist() == [27.0, 24.0] and not model.w.grad.numpy().any()
    second, = grad(first.sum(), [model.w])
    assert second.tolist() == [18.0, -24.0]


def test_backward_by_hand_without_any_gradient_returns_none():
    class Square(nn.Module):
        def forward(self, x):
            return x * x
    model = Square()
    _, ctx = model.forward_arrays(put(np.ones((2, 2), np.float32)))
    assert model.backward(None, ctx) is None


# ---- ops that are kept between calls ---------------------------------------------------------------------------------

def squares(y, weight, weight_first):
    """A loss that uses the weight of a layer a second time, before or after the layer's result."""
    terms = (y * y).sum(), (weight * weight).sum()
    return terms[1] + terms[0] if weight_first else terms[0] + terms[1]


def plain_gradients(layer, x, weight_first):
    """Return the gradients of squares() for leaves that belong to no module."""
    weight, bias = (Tensor(p.numpy(), requires_grad=True) for p in (layer.weight, layer.bias))
    y = F.linear(F.linear(x, weight, bias), weight, bias)
    squares(y, weight, weight_first).backward()
    return weight.grad.numpy(), bias.grad.numpy()


@pytest.mark.parametrize('weight_first', [False, True])
@pytest.mark.parametrize('how', ['backward', 'create_graph', 'grad', 'twice', 'hook', 'frozen bias', 'anomaly'])
def test_parameters_of_a_layer_get_the_gradients_of_plain_leaves(how, weight_first):
    layer, x = nn.Linear(3, 3), Tensor(normal(4, 3))
    layer(x)                                                    # keeps the op
    dweight, dbias = plain_gradients(layer, x, weight_first)
    if how == 'frozen bias':
        layer.bias.requires_grad_(False)
        dbias = np.zeros_like(dbias)
    if how == 'hook':
        layer.weight.register_hook(lambda gradient: gradient * 3)
        dweight = 3 * dweight
    loss = squares(layer(layer(x)), layer.weight, weight_first)
    if how == 'grad':
        found = [g.numpy() for g in grad(loss, [layer.weight, layer.bias])]
        assert not layer.weight.grad.numpy().any() and not layer.bias.grad.numpy().any()
    else:
        with detect_anomaly(how == 'anomaly'):
            loss.backward(create_graph=how == 'create_graph', retain_graph=how == 'twice' or None)
            if how == 'twice':
                loss.backward()
                dweight, dbias = 2 * dweight, 2 * dbias
        found = [get(p.flat_parameter().grad) for p in (layer.weight, layer.bias)]
    for got, expected in zip(found, (dweight, dbias), strict=True):
        close(got, expected)


def test_the_op_of_a_layer_is_kept_until_a_setting_or_a_parameter_changes():
    layer, x = nn.LayerNorm(4), Tensor(normal(3, 4))

    def kept():
        y = layer(x)
        close(y.numpy(), ops.LayerNorm.reference(x.numpy(), layer.weight.numpy(), layer.bias.numpy(), layer.eps))
        return layer.weight._calls[ops.LayerNorm]
    first = kept()
    assert kept() is first
    layer.eps = 1.0
    second = kept()
    assert second is not first and kept() is second
    layer.bias = normal(4)                                      # copied into the same memory
    assert kept() is second
    layer.bias = nn.Parameter(normal(4))
    assert kept() is not second


def test_an_op_without_parameters_is_kept_for_equal_settings_of_one_type():
    def op_of(rows, **settings):
        return F.cross_entropy(rows, labels, **settings).origin[0].op
    rows, labels = Tensor(normal(4, 3), requires_grad=True), Tensor(np.array([0, 2, 1, 1], np.int32))
    first = op_of(rows)
    assert op_of(rows) is first and op_of(rows * 2) is first
    other = op_of(rows, ignore_index=1)
    assert other is not first and other.one.ignore == 1 and first.one.ignore == -100
    as_int, as_bool = (apply(ops.CrossEntropy, rows, labels, smoothing=s).origin[0].op.one for s in (0, False))
    assert as_int is not as_bool and (type(as_int.smoothing), type(as_bool.smoothing)) == (int, bool)


def test_a_setting_of_an_equal_number_of_another_type_makes_another_op():
    weight = nn.Parameter(normal(5, 4))
    for padding_idx in 1, True, 1.0:
        apply(ops.Embedding, Tensor(IDS[:1, :1]), weight=weight, padding_idx=padding_idx)
        assert type(weight._calls[ops.Embedding].settings['padding_idx']) is type(padding_idx)


def test_a_layer_goes_with_its_last_reference_after_a_step():
    gc.collect()
    gc.disable()
    try:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        model(Tensor(normal(2, 3))).sum().backward()
        watched = [weakref.ref(p) for p in model.parameters()]
        del model
        assert [watch() for watch in watched] == [None] * 4
    finally:
        gc.enable()


def test_two_tensors_over_the_same_memory_have_gradients_of_their_own():
    x = Tensor(normal(2, 3), requires_grad=True)
    y = apply(ops.Residual(), x, x.detach())
    first, = grad(y.sum(), x)
    assert (y.numpy() == 2 * x.numpy()).all() and (first.numpy() == 1).all()
def test_accuracy_is_the_fraction_of_right_predictions_in_evaluation_mode():
    class Noted(nn.Module):
        def __init__(self):
            self.frozen = nn.Dropout(0.9).eval()
            self.dropout = nn.Dropout(0.9)

        def forward(self, x):
            assert not self.training and not self.dropout.training
            y = self.dropout(x * 1)
            assert not y.requires_grad
            return y
    model, logits, labels = Noted(), normal(50, 7), np.arange(50, dtype=np.int32) % 7
    batches = [(Tensor(logits[i:i + 20], requires_grad=True), Tensor(labels[i:i + 20])) for i in range(0, 50, 20)]
    assert nn.utils.accuracy(model, batches) == (logits.argmax(1) == labels).mean()
    assert model.training and model.dropout.training and not model.frozen.training
    with pytest.raises(ValueError, match='accuracy: expected batches of inputs and labels, got none'):
        nn.utils.accuracy(model, [])
    with pytest.raises(TypeError):
        nn.utils.accuracy(model, [(None, None)])
    assert model.training
