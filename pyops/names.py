"""Names of functions that are methods of arrays: pyops.add(x, y), F.add(x, y) and ndarray.add(x, y) call x.add(y).

The modules look them up here on first use, so that none of them is written twice.
"""

# methods of pyops/further_methods.py
_FURTHER = frozenset((
    'acosh addbmm addmv addr arccosh arcsinh arctanh asinh atanh baddbmm bitwise_and bitwise_left_shift bitwise_not '
    'bitwise_or bitwise_right_shift bitwise_xor copysign corrcoef cov cross deg2rad det diag_embed diagflat dsplit erfc '
    'exp2 fix fmax fmin ger heaviside histc hsplit index_put inverse is_complex is_floating_point is_nonzero is_same_size '
    'is_signed isneginf isposinf kron ldexp logaddexp2 logcumsumexp logdet masked_scatter matrix_power mode msort rad2deg '
    'rot90 scatter_reduce select_scatter sgn signbit sinc slice_scatter slogdet split_with_sizes unique_consecutive vdot '
    'vsplit clamp_max clamp_min').split())

# functions with the arguments and the results of the method
METHODS = _FURTHER | frozenset((
    'abs absolute acos add addcdiv addcmul addmm all allclose amax amin aminmax any arccos arcsin arctan arctan2 argmax '
    'argmin argsort argwhere asin atan atan2 bincount bmm broadcast_to ceil chunk clamp clip clone copy cos cosh '
    'count_nonzero cummax cummin cumprod cumsum diag diagonal diff dist div divide dot eq equal erf exp expand_dims expm1 '
    'flatten flip fliplr flipud float_power floor floor_divide fmod frac gather ge greater greater_equal gt hypot '
    'index_add index_copy index_fill index_select inner isclose isfinite isinf isnan kthvalue le lerp less less_equal log '
    'log10 log1p log2 log_softmax logaddexp logical_and logical_not logical_or logical_xor logit logsumexp lt masked_fill '
    'masked_select matmul max maximum mean min minimum mm moveaxis movedim mul multiply mv nan_to_num nanmean nansum '
    'narrow ne neg negative norm not_equal numel outer permute positive pow power prod ptp quantile ravel reciprocal relu '
    'remainder repeat_interleave reshape roll round rsqrt scatter scatter_add select sigmoid sign sin sinh softmax split '
    'sqrt square squeeze sub subtract sum swapaxes swapdims t take take_along_axis take_along_dim tan tanh tensor_split '
    'tile topk trace tril triu true_divide trunc unbind unflatten unique unsqueeze xlogy').split())

# methods with a twin that changes the array: x.add_(y) is x[...] = x.add(y)
IN_PLACE = (
    'abs absolute acos add addcdiv addcmul addmm asin atan ceil clamp clamp_max clamp_min clip cos cosh cumprod cumsum div '
    'divide eq erf exp expm1 float_power floor floor_divide fmod frac ge gt hypot index_add index_copy index_fill le lerp '
    'log log10 log1p log2 logical_and logical_not logical_or logical_xor logit lt masked_fill mul multiply nan_to_num ne '
    'neg negative pow reciprocal relu remainder round rsqrt scatter scatter_add sigmoid sign sin sinh sqrt square sub '
    'subtract tan tanh tril triu true_divide trunc xlogy acosh addbmm addmv addr arccos arccosh arcsin arcsinh arctan '
    'arctan2 arctanh asinh atan2 atanh baddbmm bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift '
    'bitwise_xor copysign deg2rad erfc exp2 fix greater greater_equal heaviside ldexp less less_equal masked_scatter '
    'not_equal rad2deg scatter_reduce sgn sinc').split()

# functions of other libraries by other names: the name -> the method
ALIASES = {'negate': 'neg', 'summation': 'sum', 'add_scalar': 'add', 'mul_scalar': 'mul', 'divide_scalar': 'div',
           'power_scalar': 'pow'}

# methods whose function is numpy's in pyops.ndarray, and PyTorch's in pyops.functional
NUMPYS = frozenset('median nonzero repeat sort std transpose var'.split())

# functions of pyops.functional that PyTorch has as torch.NAME, too: pyops.NAME
FUNCTIONAL = frozenset((
    'avg_pool1d cat column_stack concat conv1d conv2d cosine_similarity dropout embedding hstack layer_norm max_pool1d '
    'max_pool2d median meshgrid nonzero sort std tensordot transpose var var_mean vstack '
    'adaptive_avg_pool1d alpha_dropout atleast_1d atleast_2d atleast_3d bilinear binary_cross_entropy_with_logits block_diag '
    'broadcast_shapes broadcast_tensors bucketize cartesian_prod cdist celu celu_ chain_matmul channel_shuffle combinations '
    'conv3d conv_transpose1d conv_transpose2d conv_transpose3d cosine_embedding_loss ctc_loss cumulative_trapezoid dstack '
    'embedding_bag feature_alpha_dropout group_norm hardshrink hinge_embedding_loss is_tensor isin kl_div lp_pool1d '
    'margin_ranking_loss max_pool3d pairwise_distance pdist pixel_shuffle pixel_unshuffle poisson_nll_loss prelu relu_ '
    'rms_norm row_stack rrelu rrelu_ scalar_tensor searchsorted selu selu_ std_mean threshold threshold_ trapezoid trapz '
    'tril_indices triplet_margin_loss triu_indices vander').split())
