"""Bad arguments of the C library: every kernel accepts each number at its bound, and refuses the next with one line.

The kernels are called directly.  Every array that is not given has 16 MiB of zeros, which suffices for all sizes here.
"""
import re

import numpy as np
import pytest
from conftest import ROOT
from places import on_the_cpu

from pyops.backend import library

pytestmark = on_the_cpu
BYTES = 1 << 24
KINDS = {'float': 'f4', 'double': 'f8', 'int32_t': 'i4', 'int64_t': 'i8', 'uint8_t': 'u1', 'uint16_t': 'u2',
         'pyops_action': 'i8', 'pyops_value': 'i8', 'pyops_recording': 'i8', 'void': 'u1'}
NUMBERS = {'float': 0.5, 'double': 0.5, 'int32_t': 0, 'int64_t': 1, 'uint64_t': 0}
LARGEST = 2**31 - 1

ELEMENTS = {'R': 0}
WINDOWS = 'H>=1 W>=1 Ho>=1 Wo>=1 kh>=1 kw>=1 stride_h>=1 stride_w>=1 pad_h>=0 pad_w>=0'
DILATED = f'{WINDOWS} dilation_h>=1 dilation_w>=1'
POOLINGS = 'forward', 'backward', 'forward_double', 'backward_double'
SHAPE = 'ndim>=0 ndim<=8'
GRU = {'lengths': None, 'offsets': None, 'N': 0, 'B': 0}
RNN = {'c0': None, 'gates': None, 'lengths': None, 'B': 0}
ATTENTION = {'lengths': None, 'q_offsets': None, 'k_offsets': None, 'step': None, 'B': 0}
FORMAT = 'outer>=0 n>=0 inner>=0 block>=0 block<=4096 format>=0! format<=10'
BLOCKS = 'outer>=0 rows>=0 columns>=0 block_rows>=1 block_columns>=1 format>=0! format<=10'
E4M3 = {'format': 1, 'factor': None}
ROUNDED = E4M3 | {'step': None}
MLP = 'N>=0! B>=1 I>=0 I<=65535 H>=1 H<=128 C>=1 C<=128 scale=number'
ADAM = 'max_norm>0 beta1>=0 beta1<1 beta2>=0 beta2<1 weight_decay>=0'

# kernels, the arguments that differ from NUMBERS and zeros (None: NULL), and the bounds of the others.
# !: the bound itself is not tried, since it needs other arguments or too much memory
BOUNDS = [
    ('gemm', {}, 'M>=0 N>=0 K>=0 ldc>=1'),
    ('gemm_batched', {}, f'M>=0 N>=0 K>=0 ldc>=1 {SHAPE}'),
    ('gemm_narrow', {'bits': 14}, f'M>=0 N>=0 K>=0 ldc>=1 bits>=2 bits<=24 promote>=0 {SHAPE}'),
    ('matmul_double', {}, f'M>=0 N>=0 K>=0 ldy>=1 {SHAPE}'),
    ('linear_backward', {}, 'R>=0 O>=0 I>=0'),
    ('linear_activation linear_activation_backward', {}, 'R>=0 O>=0 I>=0 activation>=0 activation<=2'),
    ('linear_residual', {'step': None}, 'R>=0 O>=0 I>=0 p>=0 p<1'),
    ('linear_residual_norm', {'step': None}, 'R>=0 O>=1 I>=0 p>=0 p<1 eps>=0'),
    ('linear_pair linear_pair_backward', {}, 'R1>=0 R2>=0 O1>=0 O2>=0 I1>=0 I2>=0'),
    ('to_bf16', {}, 'R>=0 C>=0 ld>=1'),
    ('gemm_bf16', {}, 'M>=0 N>=0 K>=0 ldc>=1 lda>=1 ldb>=1'),
    ('convert', {}, 'R>=0 C>=0 ldy>=1 ldx>=1'),
    ('fill add_positions_backward', {}, 'n>=0'),
    ('column_sums', {}, 'R>=0 C>=0'),
    ('argmax', ELEMENTS, f'R>=0 C>=1 C<={LARGEST}'),
    ('argmax_double', ELEMENTS, 'R>=0 C>=1'),
    ('argsort_double', ELEMENTS, 'R>=0 C>=0'),
    ('strided_unary strided_unary_double', {}, f'op>=0 op<=25 {SHAPE}'),
    ('strided_unary_int32', {}, f'op>=0 op<=2 {SHAPE}'),
    ('strided_binary strided_binary_double strided_binary_int32 strided_scalar strided_scalar_int32', {},
     f'op>=0 op<=17 {SHAPE}'),
    ('strided_reduce strided_reduce_double strided_reduce_int32', {}, f'op>=0 op<=2 {SHAPE}'),
    ('strided_fill strided_fill_int32 strided_from_int32 strided_to_int32 strided_where strided_where_int32 '
     'strided_where_double strided_double_from_float strided_double_from_int32 strided_double_to_float '
     'strided_double_to_int32', {}, SHAPE),
    ('cumulate cumulate_int32 cumulate_double', {}, 'outer>=0 n>=0 inner>=0'),
    ('softmax_forward softmax_backward', {}, 'outer>=0 n>=0 inner>=0'),
    ('add_rows_double embedding_forward embedding_backward', ELEMENTS, 'R>=0 V>=0 E>=0'),
    ('embedding_positions_forward', ELEMENTS, 'R>=0 V>=0 E>=0 longest>=1 p>=0 p<1'),
    ('embedding_positions_backward', ELEMENTS, 'R>=0 V>=0 E>=0 p>=0 p<1'),
    ('embedding_linear_forward', {'context': None, 'offsets': None, 'N': 0, 'C': 0}, 'T>=0 B>=0 V>=1 E>=1 C>=0 O>=1'),
    ('embedding_linear_backward', {'context': None, 'dcontext': None, 'offsets': None, 'N': 0, 'C': 0},
     'T>=0 B>=0 V>=1 E>=1 C>=0 O>=1 ld>=1'),
    ('gather_pixels', {'B': 0}, 'N>=0 B>=0 C>=0'),
    ('gather_sequences', {'B': 0}, 'N>=0 B>=0 T>=0'),
    ('gather_rows', {'R': 0}, 'T>=0 N>=0 R>=0 C>=0'),
    ('scatter_rows', {'R': 0}, 'N>=0 R>=0 C>=0'),
    ('pack_sequences', {'B': 0, 'total': 0}, f'N>=0 B>=0 total>=0 total<={LARGEST}!'),
    ('pack_pairs', {'B': 0, 'source_total': 0, 'target_total': 0},
     f'N>=0 B>=0 source_total>=0 source_total<={LARGEST}! target_total>=0 target_total<={LARGEST}!'),
    ('pixel_linear_forward pixel_linear_backward', {'B': 0}, 'N>=0 B>=0 I>=0 I<=65535 O>=0 scale=number'),
    ('concat_context_forward concat_context_backward', {}, 'T>=0 B>=0 E>=0 H>=0'),
    ('dropout residual', {}, 'n>=0 p>=0 p<1'),
    ('add_positions_forward', {'positions': None, 'T': 0}, 'T>=0 B>=0 D>=0 longest>=0'),
    ('layer_norm_forward', {}, 'R>=0 C>=1 eps>=0'),
    ('layer_norm_backward', {}, 'R>=0 C>=1'),
    ('residual_norm_forward', {'step': None}, 'R>=0 C>=1 p>=0 p<1 eps>=0'),
    ('residual_norm_backward', {'step': None, 'dbranch': None}, 'R>=0 C>=1 p>=0 p<1'),
    ('batch_norm_forward', {}, 'R>=0 C>=0 P>=0 eps>=0'),
    ('batch_norm_backward', {}, 'R>=0 C>=0 P>=0'),
    ('conv2d_forward conv2d_backward_x conv2d_backward_weight conv2d_forward_double conv2d_backward_x_double '
     'conv2d_backward_weight_double', {}, f'N>=0 C>=1 O>=1 groups>=1 {DILATED}'),
    ('max_pool2d_forward max_pool2d_backward max_pool2d_forward_double max_pool2d_backward_double', {}, f'planes>=0 {DILATED}'),
    ('avg_pool2d_forward avg_pool2d_backward avg_pool2d_forward_double avg_pool2d_backward_double', {}, f'planes>=0 {WINDOWS}'),
    ('pad_rows', {'N': 0}, 'T>=1 B>=0 C>=0 ldx>=1'),
    ('unpad_rows', {'N': 0}, 'T>=1 B>=0 C>=0'),
    ('gru_forward', GRU | {'a': None, 'last': None}, 'T>=1 B>=0 I>=0! H>=1'),
    ('gru_backward', GRU, 'T>=1 B>=0 I>=0! H>=1'),
    ('gru_gates_forward gru_gates_backward', {}, 'B>=0 H>=1 stage>=0 stage<=2'),
    ('rnn_forward rnn_backward', RNN, 'T>=1 B>=0 I>=1 H>=1 cell>=0 cell<=2!'),
    ('attention_forward', ATTENTION, 'Tq>=0 Tk>=0 B>=0 heads>=1 C>=1 ldq>=1 ldk>=1 p>=0 p<1'),
    ('attention_backward', ATTENTION, 'Tq>=0 Tk>=0 B>=0 heads>=1 C>=1 ldq>=1 ldk>=1 lddq>=1 lddk>=1 p>=0 p<1'),
    ('attention_step', {'index': None, 'offsets': None, 'positions': None, 'M': 0},
     'R>=0 T>=1 M>=0 heads>=1 C>=1 ldq>=1 ldk>=1'),
    ('follow_parents', {'M': 0, 'R': 0}, 'T>=0 M>=0 N>=0 R>=0'),
    ('attention_softmax_forward', ATTENTION, 'Tq>=0 Tk>=0 B>=0 heads>=1 share>=0 share<1'),
    ('attention_softmax_backward', {}, 'Tq>=0 Tk>=0 B>=0 heads>=1 share>=0 share<1'),
    ('sequence_lengths', {'B': 0}, f'T>=0 T<={LARGEST}! B>=0'),
    ('cross_entropy_forward cross_entropy_backward', ELEMENTS, 'R>=0 C>=1 smoothing>=0 smoothing<1'),
    ('linear_cross_entropy', ELEMENTS, 'R>=0 D>=1 V>=1 smoothing>=0 smoothing<1'),
    ('linear_argmax_prepare', {}, 'D>=1 D<=131072 V>=1'),
    ('linear_argmax', {'prepared': None}, f'R>=0 D>=1 V>=1 V<={LARGEST}!'),
    ('log_softmax_topk', {'R': 0, 'C': 40}, f'R>=0 C>=1 C<={LARGEST} k>=1 k<=32'),
    ('linear_topk', {'R': 1, 'V': 40}, f'R>=0 D>=0 V>=1 V<={LARGEST}! k>=1 k<=32'),
    ('compact_weight', {}, 'O>=1 I>=1 I<=131072 format>=0 format<=2'),
    ('compact_linear compact_embedding', {}, 'R>=0 O>=1 I>=1 I<=131072 format>=0 format<=2'),
    ('compact_topk', {}, 'R>=0 O>=1 I>=1 I<=131072 k>=1 k<=1 format>=0 format<=2'),
    ('mlp_gradients', {}, MLP),
    ('mlp_step', {}, f'{MLP} K>=1 w1>=0 b1>=0 w2>=0 b2>=0 {ADAM}'),
    ('log_step', {}, 'steps>=1 steps<=1 capacity>=1'),
    ('grad_norm_logged', {}, 'n>=0 capacity>=1'),
    ('inverse_square_root', {}, 'warmup>=0'),
    ('decaying_rate', {}, 'warmup>=0 hold>=0 total>=0 decay>=0 decay<=1'),
    ('fake_quantize encode', ROUNDED | {'block': 4},
     f'{FORMAT} rounding>=0 rounding<=4! rule>=0 rule<=3 shift>=-256 shift<=256'),
    ('decode', E4M3 | {'block': 4}, FORMAT),
    ('scaled_quantize', ROUNDED, f'{BLOCKS} rounding>=0 rounding<=4! rule>=0 rule<=7! shift>=-256 shift<=256'),
    ('scaled_decode', E4M3, BLOCKS),
    ('fp8_encode', {'format': 1, 'ld': 16, 'transposed_ld': 16}, 'R>=0 C>=0 ldx>=1 format>=1 format<=2 blocks>=0 blocks<=2'),
    ('gemm_fp8', {'a_format': 1, 'b_format': 1, 'lda': 16, 'ldb': 16},
     'M>=0 N>=0 K>=0 ldc>=1 a_format>=1 a_format<=2 b_format>=1 b_format<=2 a_blocks>=0 a_blocks<=2 b_blocks>=0 b_blocks<=2'),
    ('amax_factor', {}, 'n>=0 target>0 target<=3.4028235e38'),
    ('delayed_factor', {}, 'n>=0 length>=1 target>0 target<=3.4028235e38'),
    ('advance_amax', {}, 'rows>=0 length>=1'),
    ('describe', {}, 'rows>=0 columns>=0'),
    ('error_sums', {'scales': None, 'each': None, 'valid': None}, 'outer>=0 n>=0 inner>=0 block>=1'),
    ('bin_counts', {'q': None, 'valid': None}, 'n>=0 bins>=1 bins<=256'),
    ('octave_counts', {'scales': None, 'each': None, 'valid': None}, 'outer>=0 n>=0 inner>=0 block>=1'),
    ('patch_extremes', {'minus': None, 'valid': None}, 'rows>=0 columns>=0 patch_rows>=1 patch_columns>=1'),
    ('hadamard', {}, 'outer>=0 n>=0 inner>=0 block>=1 block<=32'),
    ('clip', {}, 'n>=0 max_norm>0'),
    ('adam', {'step': [1]}, f'n>=0 {ADAM}'),
    ('sgd', {}, 'n>=0 max_norm>0 momentum>=0 momentum<1 dampening>=0 dampening<=1 weight_decay>=0'),
    ('ema', {}, 'n>=0 decay>=0 decay<1'),
    ('muon_momentum', {'n': 0}, 'count>=0 count<=65535 n>=0 max_norm>0 momentum>=0 momentum<1'),
    ('muon_polynomial', {'n': 0}, 'count>=0 count<=65535 n>=0'),
    ('muon_update', {'n': 0}, 'count>=0 count<=65535 n>=0 weight_decay>=0'),
    ('replay', {'from': 0, 'to': 0}, ''),
    *((name, {}, '') for name in ('run_recording', 'run_recording_1')),
]
WITHOUT_BOUNDS = {'increment', 'tick'}       # no argument can be wrong
OF_THE_STATE = {'set_threads', 'set_precision', 'set_exact'}        # tests/backend/test_kernels.py and test_exact.py


def elementwise():
    """Return the names of the kernels whose only number is n: they need no row."""
    return [name.removeprefix('pyops_') for name, function in library.cpu().functions.items()
            if function.result == 'pyops_status' and [a.name for a in function.arguments if not a.pointer] == ['n']]


ALL = {kernel: ({}, 'n>=0') for kernel in elementwise()}
ALL |= {kernel: (base, bounds) for kernels, base, bounds in BOUNDS for kernel in kernels.split()}
STRIDED = [kernel for kernel, (_, bounds) in ALL.items() if SHAPE in bounds]
ONE_SENTENCE = {'B': 1, 'N': 2, 'T': 3}
TWO_SENTENCES = {'N': 2, 'B': 2, 'starts': [0, 3, 5], 'rows': [0, 1], 'total': 5}
TWO_PAIRS = {'N': 2, 'B': 2, 'source_starts': [0, 3, 5], 'label_starts': [0, 1, 4], 'rows': [0, 1], 'source_total': 5,
             'target_total': 4}
LSTM = {'cell': 2, 'gates': [0]}
BIAS = {'rnn_forward': 'b_hh', 'rnn_backward': 'db_hh'}
IN_ROWS = {'index': [0], 'offsets': [0, 1, 2], 'R': 4, 'T': 2, 'W': 2, 'B': 2, 'M': 0}


def packed(kernel):
    """Return the rows of a kernel of packed sentences whose numbers do not fit together."""
    given = ONE_SENTENCE
    return [(kernel, given | {'offsets': offsets}, text) for offsets, text in (
        ([1, 3], 'offsets[0]=1, expected 0'), ([-1, 1], 'offsets[0]=-1, expected 0'),
        ([0, -1], 'offsets[1] - offsets[0]=-1, expected 0 to 3'), ([0, 4], 'offsets[1] - offsets[0]=4, expected 0 to 3'),
        ([0, 1], 'offsets[1]=1, expected the number of rows, 2'), ([0, 3], 'offsets[1]=3, expected the number of rows, 2'))] + [
        (kernel, given | {'N': -1, 'offsets': [0, -1]}, 'N=-1 T=3 B=1, expected N from 0 to T * B and below 2^31'),
        (kernel, given | {'N': 4, 'offsets': [0, 4]}, 'N=4 T=3 B=1, expected N from 0 to T * B and below 2^31'),
        (kernel, given | {'N': LARGEST + 1, 'T': LARGEST, 'B': 2, 'offsets': [0]},
         f'N={LARGEST + 1} T={LARGEST} B=2, expected N from 0 to T * B and below 2^31')]


def attends(kernel):
    """Return the rows of a kernel of attention with lengths that cannot be."""
    return [(kernel, {'B': 1, 'Tk': 5, 'Tq': 3} | more, text) for more, text in (
        ({'lengths': [-1]}, 'lengths[0]=-1, expected 0 to 5'), ({'lengths': [6]}, 'lengths[0]=6, expected 0 to 5'),
        ({'lengths': [1], 'k_offsets': [0, 1]}, 'lengths and k_offsets, expected one of them to be NULL'),
        ({'q_offsets': [0, 4]}, 'q_offsets[1] - q_offsets[0]=4, expected 0 to 3'),
        ({'q_offsets': [1, 2]}, 'q_offsets[0]=1, expected 0'), ({'k_offsets': [1, 2]}, 'k_offsets[0]=1, expected 0'),
        ({'k_offsets': [0, 6]}, 'k_offsets[1] - k_offsets[0]=6, expected 0 to 5'),
        ({'k_offsets': [0, -1]}, 'k_offsets[1] - k_offsets[0]=-1, expected 0 to 5'))]


def outside(kernel, name, most, given, texts=None):
    """Return the rows of a kernel with an index below 0 and one above most, behind one that is accepted."""
    at = f'{texts or name}[1]='
    return [(kernel, given | {name: [most, bad]}, f'{at}{bad}, expected 0 to {most}') for bad in (-1, most + 1)]


# kernel, arguments, a part of the message: what no single bound says
REFUSED = [
    *((kernel, {'ndim': 2, 'shape': [1, -1]}, 'shape[1]=-1, expected at least 0') for kernel in STRIDED),
    *((kernel, {'shape': [0], 'op': op}, 'no elements, expected at least one for a maximum or minimum')
      for kernel in ('strided_reduce', 'strided_reduce_double', 'strided_reduce_int32') for op in (1, 2)),
    *((kernel, {'op': 3}, 'int32 has no division, expected float32')
      for kernel in ('strided_binary_int32', 'strided_scalar_int32')),
    ('strided_binary_int32', {'op': 4, 'b': [-1]}, 'int32 to a negative power, expected exponents of at least 0 or float32'),
    ('strided_binary_int32', {'op': 4, 'ndim': 2, 'shape': [2, 2], 'strides': [2, 1, 0, 0, 0, 1], 'b': [3, -1]},
     'int32 to a negative power'),
    ('strided_scalar_int32', {'op': 4, 'value': -1}, 'strided_binary_int32: int32 to a negative power'),
    ('strided_scalar_int32', {'op': 4, 'reflected': 1, 'x': [-1], 'value': 2},
     'strided_binary_int32: int32 to a negative power'),
    ('strided_scalar_int32', {'op': 4, 'ndim': 9}, 'ndim=9, expected 0 to 8'),
    ('strided_binary_int32', {'op': 4, 'ndim': 9}, 'ndim=9, expected 0 to 8'),
    ('strided_scalar', {'op': 4, 'value': 2.0, 'ndim': 9}, 'ndim=9, expected 0 to 8'),
    *((kernel, {'op': op}, f'op={op}, expected PYOPS_OP_ADD or PYOPS_OP_MULTIPLY')
      for kernel in ('cumulate', 'cumulate_int32', 'cumulate_double') for op in (-1, 1, 3)),
    ('linear_backward', {'relu': 1, 'accumulate': 1}, 'relu=1 accumulate=1, expected dx, and one of the two at most'),
    ('linear_backward', {'relu': 1, 'dx': None}, 'relu=1 accumulate=0, expected dx'),
    *(row for kernel in ('add_rows_double', 'embedding_forward', 'embedding_backward', 'embedding_positions_forward',
                         'embedding_positions_backward') for row in outside(kernel, 'ids', 3, {'R': 2, 'V': 4})),
    *(row for kernel in ('embedding_linear_forward', 'embedding_linear_backward')
      for row in (*outside(kernel, 'ids', 3, {'T': 2, 'V': 4}), *packed(kernel),
                  *outside(kernel, 'ids', 3, ONE_SENTENCE | {'V': 4, 'offsets': [0, 2]}),
                  (kernel, {'C': 1}, 'C=1, expected 0 if context is NULL, else at least 1'),
                  (kernel, {'context': [0]}, 'C=0, expected 0 if context is NULL, else at least 1'),
                  (kernel, {'N': 1}, 'N=1 without offsets, expected 0'))),
    *outside('embedding_positions_forward', 'positions', 6, {'R': 2, 'longest': 7}),
    *outside('add_positions_forward', 'positions', 6, {'T': 2, 'longest': 7}),
    ('add_positions_forward', {'T': 4, 'longest': 3}, 'T=4, expected at most longest=3'),
    *outside('gather_pixels', 'rows', 4, {'N': 5, 'B': 2}),
    *outside('gather_sequences', 'rows', 4, {'N': 5, 'B': 2}),
    *outside('gather_rows', 'rows', 4, {'N': 5, 'R': 2}),
    *outside('scatter_rows', 'rows', 4, {'N': 5, 'R': 2}),
    *outside('pixel_linear_forward', 'rows', 4, {'N': 5, 'B': 2}),
    *outside('pixel_linear_backward', 'rows', 4, {'N': 5, 'B': 2}),
    *(('pixel_linear_forward', {name: None}, 'ink and places: expected both or neither') for name in ('ink', 'places')),
    *outside('pack_sequences', 'rows', 1, TWO_SENTENCES),
    *outside('pack_pairs', 'rows', 1, TWO_PAIRS),
    ('pack_sequences', TWO_SENTENCES | {'starts': [0, 3, 2]}, 'starts[1]=3, expected at most starts[2]=2'),
    ('pack_sequences', TWO_SENTENCES | {'total': 4}, 'total=4, expected the sum of the lengths, which is larger'),
    ('pack_sequences', TWO_SENTENCES | {'total': 6}, 'total=6, expected 5, the sum of the lengths'),
    ('pack_pairs', TWO_PAIRS | {'source_total': 4}, 'source_total=4, expected the sum of the lengths, which is larger'),
    ('pack_pairs', TWO_PAIRS | {'target_total': 3}, 'target_total=3, expected the sum of the lengths, which is larger'),
    ('pack_pairs', TWO_PAIRS | {'source_total': 6}, 'source_total=6, expected 5, the sum of the lengths'),
    ('pack_pairs', TWO_PAIRS | {'target_total': 5}, 'target_total=5, expected 4, the sum of the lengths'),
    ('residual_norm_backward', {'dbranch': [0]}, 'dbranch: expected NULL without dropout'),
    ('residual_norm_backward', {'dbranch': [0], 'step': [0], 'p': 0.0}, 'dbranch: expected NULL without dropout'),
    ('residual_norm_backward', {'step': [0]}, 'dbranch: expected an array with dropout'),
    *((kernel, {'training': 1}, 'R=1 P=1, expected at least 2 values per channel in training: one has no variance')
      for kernel in ('batch_norm_forward', 'batch_norm_backward')),
    *(('batch_norm_forward', {name: None}, 'running_mean or running_var is NULL, expected both outside training')
      for name in ('running_mean', 'running_var')),
    *((f'conv2d_{name}', sizes, f'groups=2, expected a divisor of C={sizes["C"]} and O={sizes["O"]}')
      for name in ('forward', 'backward_x', 'backward_weight', 'forward_double', 'backward_x_double', 'backward_weight_double')
      for sizes in ({'groups': 2, 'C': 3, 'O': 2}, {'groups': 2, 'C': 2, 'O': 3})),
    *((f'max_pool2d_{name}', {'planes': 0, 'H': 2**16, 'W': 2**15}, 'H=65536 W=32768, expected a product below 2^31')
      for name in POOLINGS),
    *((f'avg_pool2d_{name}', {'H': 2, 'W': 2, 'stride_h': 2, 'stride_w': 2} | more,
       f'Ho={more.get("Ho", 1)} Wo={more.get("Wo", 1)}, expected windows that start inside the padded plane of H=2 W=2')
      for name in POOLINGS for more in ({'Ho': 3}, {'Wo': 3})),
    *(row for kernel in ('pad_rows', 'unpad_rows') for row in (
        *packed(kernel), (kernel, {'offsets': None}, 'expected offsets'))),
    *(row for kernel in ('gru_forward', 'gru_backward') for row in (
        *packed(kernel),
        (kernel, {'x': None}, 'I=1, expected 0 if x is NULL, else at least 1'),
        (kernel, {'I': 0}, 'I=0, expected 0 if x is NULL, else at least 1'),
        (kernel, {'lengths': [1], 'offsets': [0, 0]}, 'lengths with offsets, expected NULL'),
        (kernel, {'reverse': 1}, 'reverse=1 without offsets, expected 0'),
        (kernel, {'N': 1}, 'N=1 without offsets, expected 0'),
        (kernel, {'B': 1, 'T': 2, 'lengths': [3]}, 'lengths[0]=3, expected 0 to 2'),
        (kernel, {'B': 2, 'T': 2, 'lengths': [2, -1]}, 'lengths[1]=-1, expected 0 to 2'),
        (kernel, {'B': 2**15, 'T': 2**16}, 'T=65536 B=32768, expected T * B < 2^31'))),
    ('gru_forward', {'a': [0]}, 'I=1, expected 0 if a is given, else at least 1'),
    ('gru_forward', {'x': None, 'I': 0}, 'I=0, expected 0 if a is given, else at least 1'),
    ('gru_forward', {'last': [0]}, 'last without offsets, expected NULL'),
    *(row for kernel in ('rnn_forward', 'rnn_backward') for row in (
        (kernel, {'cell': 2}, 'cell=2, expected gates with an LSTM, else NULL'),
        (kernel, {'gates': [0]}, 'cell=0, expected gates with an LSTM, else NULL'),
        (kernel, {'c0': [0], 'cell': 1}, 'cell=1 with c0, expected NULL without an LSTM'),
        (kernel, {BIAS[kernel]: None}, 'one of two biases, expected both or none'),
        (kernel, {BIAS[kernel].replace('hh', 'ih'): None}, 'one of two biases, expected both or none'),
        (kernel, {'B': 2, 'T': 2, 'lengths': [2, 3]}, 'lengths[1]=3, expected 0 to 2'),
        (kernel, {'B': 2, 'T': 2, 'lengths': [2, -1]}, 'lengths[1]=-1, expected 0 to 2'),
        (kernel, {'B': 2**15, 'T': 2**16}, 'T=65536 B=32768, expected T * B < 2^31'))),
    *(row for kernel in ('attention_forward', 'attention_backward', 'attention_softmax_forward') for row in attends(kernel)),
    *((kernel, {name: 5, 'heads': 2, 'C': 3} | {other: 6 for other in others.split() if other != name},
       f'{name}=5, expected at least heads * C = 6')
      for kernel, others in (('attention_forward', 'ldq ldk'), ('attention_backward', 'ldq ldk lddq lddk'),
                             ('attention_step', 'ldq ldk'))
      for name in others.split()),
    ('attention_softmax_forward', {'step': [0], 'w': None}, 'w is NULL, expected an array for the weights after dropout'),
    ('attention_step', {'R': 2}, 'R=2 W=1 M=0 T=1, expected R of at most W'),
    ('attention_step', {'R': 2, 'causal': 1}, 'R=2 W=1 M=0 T=1, expected R of at most W (with causal T)'),
    ('attention_step', {'M': 2, 'index': [0]}, 'M=2 T=1, expected R of at most W (with causal T), M from 0 to T'),
    ('attention_step', {'M': 1}, 'expected R of at most W (with causal T), M from 0 to T, and an index for M above 0'),
    ('attention_step', {'causal': 1, 'W': 2}, 'W=2 with causal, expected W=1 without index and offsets'),
    ('attention_step', {'causal': 1, 'index': [0]}, 'W=1 with causal, expected W=1 without index and offsets'),
    ('attention_step', {'causal': 1, 'offsets': [0, 1]}, 'W=1 with causal, expected W=1 without index and offsets'),
    ('attention_step', IN_ROWS | {'R': 3}, 'R=3 B=2 with offsets, expected R a multiple of B'),
    ('attention_step', IN_ROWS | {'B': 0}, 'R=4 B=0 with offsets, expected R a multiple of B'),
    ('attention_step', IN_ROWS | {'index': None, 'W': 3}, 'B=2 W=3 with offsets, expected B=W without an index'),
    ('attention_step', IN_ROWS | {'offsets': [0, 3, 3]}, 'offsets[1] - offsets[0]=3, expected 0 to 2'),
    *outside('attention_step', 'index', 1, IN_ROWS, 'ids'),
    *outside('attention_step', 'index', 1, {'R': 2, 'W': 2, 'M': 1}, 'ids'),
    ('attention_step', {'positions': [0], 'causal': 1}, 'positions with causal=1, expected causal=0, an index, and no offsets'),
    ('attention_step', {'positions': [0]}, 'positions with causal=0, expected causal=0, an index, and no offsets'),
    ('attention_step', {'positions': [1], 'index': [0]}, 'ids[0]=1, expected 0 to 0'),
    ('attention_step', {'positions': [0], 'index': [1]}, 'index[0,0]=1, expected 0 to 0'),
    ('scatter_rows', {'C': 2, 'ldy': 1}, 'expected N, R and C of at least 0, ldy and ldx of at least C'),
    ('follow_parents', {'M': 2, 'T': 1, 'before': [0]}, 'T=1 M=2'),
    ('follow_parents', {'M': 1, 'before': None}, 'and `before` for M above 0'),
    *outside('follow_parents', 'parents', 3, {'N': 4, 'R': 2}, 'ids'),
    *((kernel, {'R': 2, classes: 5, 'ignore': -3, 'labels': [-3, bad]}, f'labels[1]={bad}, expected 0 to 4 or -3 (ignored)')
      for kernel, classes in (('cross_entropy_forward', 'C'), ('linear_cross_entropy', 'V')) for bad in (-1, 5)),
    *(('linear_cross_entropy', {name: None}, 'dx, dweight and dbias: expected all or none')
      for name in ('dx', 'dweight', 'dbias')),
    ('linear_cross_entropy', {'dx': None, 'dweight': None, 'dbias': None},
     'dloss without dx, dweight and dbias, expected NULL'),
    ('linear_argmax', {'prepared': [0], 'D': 131073}, 'D=131073, expected at most 131072 if it is prepared'),
    *((kernel, {name: 3, 'k': 4}, 'k=4, expected 1 to 3') for kernel, name in (('log_softmax_topk', 'C'), ('linear_topk', 'V'),
                                                                              ('compact_topk', 'O'))),
    *outside('compact_embedding', 'ids', 3, {'R': 2, 'O': 4}),
    *((kernel, {'format': 2, 'compact': [2.0] * 99}, 'the weight was packed before set_exact changed its layout, expected a '
       'weight packed after it') for kernel in ('compact_linear', 'compact_embedding', 'compact_topk')),
    *(row for kernel in ('mlp_gradients', 'mlp_step') for row in (
        *outside(kernel, 'rows', 4, {'N': 5, 'B': 2}),
        *((kernel, {'N': 5, 'C': 4, 'rows': [2], 'labels': [9, 9, bad]}, f'labels[2]={bad}, expected 0 to 3')
          for bad in (-1, 4)))),
    ('mlp_step', {'step': [-1]}, 'step=0, expected at least 1'),
    ('adam', {'step': [0]}, 'step=0, expected at least 1'),
    ('sgd', {'velocity': None}, 'momentum=0.5, expected 0 if velocity is NULL'),
    *(row for kernel in ('fake_quantize', 'encode', 'scaled_quantize') for row in (
        (kernel, {'rounding': 4}, 'rounding=4, expected another rounding or format 0'),
        (kernel, {'rounding': 3}, 'step is NULL, expected an array for stochastic rounding'))),
    *((kernel, {'format': 0}, 'block=4, expected 0: format 0 has no blocks')
      for kernel in ('fake_quantize', 'encode', 'decode')),
    *((kernel, {'format': format}, f'format={format}, expected another: it has no blocks')
      for kernel in ('scaled_quantize', 'scaled_decode') for format in (0, 4, 5)),
    *(('scaled_quantize', {'rule': rule}, f'format=1, expected 3 with rule {rule}') for rule in (6, 7)),
    *(('hadamard', {'block': block}, f'block={block}, expected a power of two from 1 to 32') for block in (3, 12, 64)),
    ('linear_activation_backward', {'dx': None}, 'dx is NULL, expected an array'),
    ('fp8_encode', {'ld': 20}, 'ld=20, expected a multiple of 16 of at least 1, or 0, and codes aligned to 16 bytes'),
    ('fp8_encode', {'scales': None}, 'codes without scales, expected both'),
    *((name, {'recording': [0, 0, 0, 0, count]}, f'value_count={count}, expected 0 to')
      for name in ('run_recording', 'run_recording_1') for count in (-1, 10**6)),
    ('replay', {'to': 1, 'actions': [-1, 0]}, 'action 0: kernel=-1, expected 0 to'),
    ('replay', {'from': 1, 'to': 2, 'actions': [0, 0, 10**6, 0]}, 'action 1: kernel=1000000, expected 0 to'),
]
# kernel, arguments that are accepted though one of them alone is not
ACCEPTED = [
    ('gru_forward', {'x': None, 'I': 0, 'a': [0]}), ('gru_backward', {'x': None, 'I': 0}),
    ('gru_forward', ONE_SENTENCE | {'offsets': [0, 2], 'last': [0], 'reverse': 1}),
    ('gru_forward', {'B': 2, 'T': 2, 'lengths': [2, 0]}), ('gru_backward', {'B': 2, 'T': 2, 'lengths': [2, 0]}),
    ('rnn_forward', LSTM | {'c0': [0]}), ('rnn_backward', LSTM | {'c0': [0]}),
    ('rnn_forward', {'B': 2, 'T': 2, 'lengths': [2, 0]}), ('rnn_backward', {'B': 2, 'T': 2, 'lengths': [2, 0]}),
    ('rnn_forward', {'b_ih': None, 'b_hh': None}), ('rnn_backward', {'db_ih': None, 'db_hh': None}),
    ('batch_norm_forward', {'training': 1, 'R': 2}), ('batch_norm_backward', {'training': 1, 'P': 2}),
    ('batch_norm_forward', {'training': 1, 'R': 2, 'running_mean': None, 'running_var': None}),
    ('residual_norm_backward', {'dbranch': [0], 'step': [0]}), ('residual_norm_backward', {'step': [0], 'p': 0.0}),
    ('embedding_linear_forward', {'context': [0], 'C': 1}), ('embedding_linear_forward', ONE_SENTENCE | {'offsets': [0, 2]}),
    ('add_positions_forward', {'T': 3, 'longest': 3}),
    ('add_positions_forward', {'T': 3, 'longest': 1, 'positions': [0, 0, 0]}),
    ('max_pool2d_forward', {'planes': 0, 'H': LARGEST}),
    ('avg_pool2d_forward', {'H': 2, 'W': 2, 'stride_h': 2, 'stride_w': 2, 'Ho': 2, 'Wo': 2}),
    ('conv2d_forward', {'groups': 2, 'C': 4, 'O': 2}),
    ('pack_sequences', TWO_SENTENCES), ('pack_pairs', TWO_PAIRS), ('pixel_linear_forward', {'ink': None, 'places': None}),
    ('linear_backward', {'relu': 1}), ('linear_backward', {'accumulate': 1, 'dx': None}),
    ('attention_forward', {'B': 1, 'Tk': 5, 'lengths': [5]}), ('attention_forward', {'B': 1, 'Tk': 5, 'k_offsets': [0, 5]}),
    ('attention_step', {'M': 1, 'index': [0]}), ('attention_step', {'causal': 1}), ('attention_step', IN_ROWS),
    ('attention_step', IN_ROWS | {'index': None}), ('follow_parents', {'M': 1, 'T': 1, 'R': 1}),
    ('attention_softmax_forward', {'step': [0], 'B': 1}), ('attention_softmax_forward', {'w': None, 'B': 1}),
    ('linear_cross_entropy', {'dx': None, 'dweight': None, 'dbias': None, 'dloss': None}),
    ('linear_argmax', {'prepared': None, 'D': 131073}), ('linear_argmax', {'prepared': [0], 'R': 0, 'D': 131072}),
    ('compact_linear', {'format': 1, 'I': 131073}), ('sequence_lengths', {'T': 0, 'B': 1}),
    ('sgd', {'velocity': None, 'momentum': 0.0}), ('fake_quantize', {'format': 0, 'block': 0, 'rounding': 4}),
    ('fake_quantize', {'rounding': 3, 'step': [0]}), ('decode', {'format': 0, 'block': 0}),
    *(('scaled_quantize', {'format': 3, 'rule': rule}) for rule in range(8)),
    ('strided_reduce', {'shape': [0]}), ('strided_reduce_double', {'shape': [0]}), ('strided_reduce_int32', {'shape': [0]}),
    ('strided_binary_int32', {'op': 4, 'shape': [0], 'b': [-1]}), ('strided_scalar_int32', {'op': 4, 'value': 0}),
    *((kernel, {'op': 2}) for kernel in ('cumulate', 'cumulate_int32', 'cumulate_double')),
    *(('hadamard', {'block': 2**i}) for i in range(6)), ('mlp_step', {'step': [0], 'N': 1}),
]


def call(kernel, **given):
    """Call a kernel with the arguments of its row of BOUNDS; return its status and its message."""
    ffi, lib, functions = library.cpu()
    base = ALL[kernel][0] | given
    kept, values = [], []
    for argument in functions[f'pyops_{kernel}'].arguments:
        value = base.pop(argument.name, [] if argument.pointer else NUMBERS[argument.type])
        if argument.name == 'stream' or value is None:
            values.append(ffi.NULL)
        elif argument.pointer:
            array = np.zeros(BYTES, np.uint8)
            content = np.array(value or ([1] * 8 if argument.name == 'shape' else []), KINDS[argument.type])
            array[:content.nbytes] = np.frombuffer(content.tobytes(), np.uint8)
            kept.append(array)
            values.append(ffi.cast('void *', array.ctypes.data))
        else:
            values.append(value)
    assert not base, f'{kernel} has no argument {min(base)}'
    status = getattr(lib, f'pyops_{kernel}')(*values)
    return status, ffi.string(lib.pyops_last_error()).decode() if status else ''


def type_of(kernel, name):
    return next(argument.type for argument in library.cpu().functions[f'pyops_{kernel}'].arguments if argument.name == name)


def tried(kernel):
    """Return [(name, value, whether it is accepted)] of the bounds of a kernel."""
    found = []
    for name, relation, bound, is_bound_left_out in re.findall(r'(\w+)(>=|<=|<|>|=)([^\s!]+)(!?)', ALL[kernel][1]):
        if type_of(kernel, name) == 'float':
            found.append((name, float('nan'), False))
            if relation == '=':
                continue
            at = np.float32(bound)
            beyond, inside = (np.float32(sign * np.inf) for sign in ((-1, 1) if '>' in relation else (1, -1)))
            with np.errstate(over='ignore'):
                last, refused = (at, np.nextafter(at, beyond)) if '=' in relation else (np.nextafter(at, inside), at)
            last, refused = float(last), float(refused)
        else:
            last = int(bound)
            refused = last - 1 if relation == '>=' else last + 1
        found.append((name, refused, False))
        if not is_bound_left_out:
            found.append((name, last, True))
    return found


def text_of(value):
    """As printf's %lld and %g"""
    return f'{value:g}' if isinstance(value, float) else str(value)


@pytest.mark.parametrize('kernel', ALL)
def test_numbers_at_their_bounds_are_accepted_and_the_next_are_refused(kernel):
    assert call(kernel) == (0, '')
    for name, value, is_accepted in tried(kernel):
        status, message = call(kernel, **{name: value})
        if is_accepted:
            assert (status, message) == (0, ''), (name, value)
        else:
            assert status == 1, (name, value)
            assert message.startswith(f'{kernel}: ') and 'expected ' in message and '\n' not in message, message
            assert text_of(value) in message.lower(), message


def name_of(row):
    return f'{row[0]}-' + '-'.join(f'{name}={value}' for name, value in row[1].items())


@pytest.mark.parametrize('row', REFUSED, ids=name_of)
def test_arguments_that_do_not_fit_together_are_refused_with_the_reason(row):
    kernel, given, text = row
    status, message = call(kernel, **given)
    assert status == 1 and (text in message), (status, message)
    assert message.startswith((f'{kernel}: ', 'strided_binary_int32: '))


@pytest.mark.parametrize('row', ACCEPTED, ids=name_of)
def test_arguments_that_fit_together_are_accepted(row):
    kernel, given = row
    assert call(kernel, **given) == (0, '')


def test_every_kernel_has_a_row():
    kernels = {name.removeprefix('pyops_') for name, function in library.cpu().functions.items()
               if function.result == 'pyops_status'}
    assert kernels == {*ALL, *WITHOUT_BOUNDS, *OF_THE_STATE}


def test_a_recorded_kernel_has_a_number_up_to_the_last():
    last = int(re.fullmatch(r'.* expected 0 to (\d+)', call('replay', to=1, actions=[-1, 0])[1])[1])
    assert call('replay', to=1, actions=[last + 1, 0])[1] == f'replay: action 0: kernel={last + 1}, expected 0 to {last}'
    ffi, lib, functions = library.cpu()
    numbers = sorted(lib.pyops_kernel_number(name.encode()) for name in functions)
    assert numbers[-1] == last and lib.pyops_kernel_number(b'pyops_none') == -1


def test_every_message_of_the_c_library_is_one_that_a_row_brings_about():
    """Except the messages about threads, precision and exact kernels, which have their own tests."""
    formats = [''.join(re.findall(r'"((?:[^"\\]|\\.)*)"', found)) for path in sorted((ROOT / 'csrc').rglob('*.*'))
               if path.suffix in ('.c', '.h', '.inc') and path.name != 'dispatch.c'
               for found in re.findall(r'(?<!define )PYOPS_REQUIRE\([^"]*((?:"(?:[^"\\]|\\.)*"\s*)+)', path.read_text())]
    assert len(formats) > 120
    messages = {call(kernel, **{name: value})[1] for kernel in ALL for name, value, is_accepted in tried(kernel)
                if not is_accepted}
    messages |= {call(kernel, **given)[1] for kernel, given, _ in REFUSED}
    printed = {'lld': r'-?\d+', 'd': r'-?\d+', 'g': r'\S+', 's': '.+'}
    missing = []
    for text in formats:
        parts = re.split(r'%(lld|d|g|s)', text)
        pattern = re.compile(''.join(printed[part] if i % 2 else re.escape(part) for i, part in enumerate(parts)))
        if not any(pattern.fullmatch(message) for message in messages):
            missing.append(text)
    assert missing == []
