"""Names of functions that are methods of arrays: pyops.add(x, y), F.add(x, y) and ndarray.add(x, y) call x.add(y).

The modules look them up here on first use, so that none of them is written twice.
"""

# functions with the arguments and the results of the method
METHODS = frozenset((
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

# functions of other libraries by other names: the name -> the method
ALIASES = {'negate': 'neg', 'summation': 'sum', 'add_scalar': 'add', 'mul_scalar': 'mul', 'divide_scalar': 'div',
           'power_scalar': 'pow'}

# methods whose function is numpy's in pyops.ndarray, and PyTorch's in pyops.functional
NUMPYS = frozenset('median nonzero repeat sort std transpose var'.split())

# functions of pyops.functional that PyTorch has as torch.NAME, too: pyops.NAME
FUNCTIONAL = frozenset((
    'avg_pool1d cat column_stack concat conv1d conv2d cosine_similarity dropout embedding hstack layer_norm max_pool1d '
    'max_pool2d median meshgrid nonzero sort std tensordot transpose var var_mean vstack').split())
