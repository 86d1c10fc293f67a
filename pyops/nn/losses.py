"""Losses.  Each compares outputs of a model with a target.  Names and arguments are PyTorch's, without the deprecated
size_average and reduce.  Arguments that PyTorch has behind those two are given by name."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyops import functional as F
from pyops import ops
from pyops.autograd import Tensor
from pyops.nn.module import FunctionLayer, Layer

if TYPE_CHECKING:
    from pyops.typing import Array, Numbers


class _ClassLoss(Layer):
    """Base of the losses of labels."""

    def __init__(self, weight: Numbers | None = None, *, ignore_index: int = -100, reduction: str = 'mean') -> None:
        name = type(self).__name__
        F.check_class_weight(name, weight)
        F.check_ignore_index(name, ignore_index)
        F.check_reduction(name, reduction)
        self.ignore_index, self.reduction = ignore_index, reduction
        self.weight = None if weight is None else Tensor(weight)


class CrossEntropyLoss(_ClassLoss):
    """Return the mean of -log softmax(x)[label] over rows whose label is not ignore_index;  x (..., C), labels (...) int32.

    weight (C,), reduction and label_smoothing: as in F.cross_entropy, which also takes x (N, C, ...), and probabilities of the
    classes in place of labels.
    On arrays, x is (R, C) and the loss (1,); backward(dloss (1,), ctx) returns dx, with probabilities (dx, dprobabilities).
    """

    def __init__(self, weight: Numbers | None = None, *, ignore_index: int = -100, reduction: str = 'mean',
                 label_smoothing: float = 0.0) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction)
        F.check_label_smoothing(type(self).__name__, label_smoothing)
        self.label_smoothing = label_smoothing

    def forward_tensors(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(x, labels, self.weight, ignore_index=self.ignore_index, reduction=self.reduction,
                               label_smoothing=self.label_smoothing)

    def forward_arrays(self, x: Array, labels: Array) -> tuple[Array, Any]:
        if self.weight is not None or self.reduction != 'mean' or self.label_smoothing or labels.dtype.kind == 'f':
            return Layer.forward_arrays(self, x, labels)
        op = ops.CrossEntropy(self.ignore_index, name=self._path or 'loss')
        loss, ctx = op.forward(x, labels)
        return loss, (op, ctx)

    def backward(self, dy: Array, ctx: Any) -> Array:
        if not isinstance(ctx[0], ops.CrossEntropy):
            return Layer.backward(self, dy, ctx)
        op, ctx = ctx
        return self._naming(op.backward, dy, ctx)


class SoftmaxLoss(CrossEntropyLoss):
    """CrossEntropyLoss under the name that the needle course uses."""


class NLLLoss(_ClassLoss):
    """Return the mean of -x[label] over rows whose label is not ignore_index, for logarithms x of probabilities, such as those
    of LogSoftmax.  Shapes, weight and reduction as in F.cross_entropy."""

    def forward_tensors(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.nll_loss(x, labels, self.weight, ignore_index=self.ignore_index, reduction=self.reduction)


class _Difference(Layer):
    """A loss of x and a target of the same shape.   reduction: 'mean' or 'sum' (shape ()), or 'none' (the shape of x)"""

    REDUCTIONS: tuple[str, ...] = ('mean', 'sum', 'none')

    def __init__(self, *, reduction: str = 'mean') -> None:
        F.check_reduction(type(self).__name__, reduction, self.REDUCTIONS)
        self.reduction = reduction

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        raise NotImplementedError

    def forward_tensors(self, x: Tensor, target: Tensor) -> Tensor:
        if x.shape != target.shape:
            raise ValueError(f'target: expected shape {x.shape}, got {target.shape}')
        return self.losses(x, target)


class MSELoss(_Difference):
    """Return the mean squared difference of x and target."""

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(x, target, self.reduction)


class L1Loss(_Difference):
    """Return the mean absolute difference of x and target."""

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(x, target, self.reduction)


class HuberLoss(_Difference):
    """Return the mean of d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2), for d = x - target."""

    def __init__(self, reduction: str = 'mean', delta: float = 1.0) -> None:
        super().__init__(reduction=reduction)
        if not delta > 0:
            raise ValueError(f'HuberLoss: delta: expected a positive number, got {delta}')
        self.delta = delta

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        return F.huber_loss(x, target, self.reduction, self.delta)


class SmoothL1Loss(_Difference):
    """Return HuberLoss / beta, with delta = beta; L1Loss if beta is 0."""

    def __init__(self, *, reduction: str = 'mean', beta: float = 1.0) -> None:
        super().__init__(reduction=reduction)
        if not beta >= 0:
            raise ValueError(f'SmoothL1Loss: beta: expected 0 or more, got {beta}')
        self.beta = beta

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        return F.smooth_l1_loss(x, target, self.reduction, self.beta)


class BCELoss(_Difference):
    """Return the mean of -(target log x + (1 - target) log(1 - x)), for probabilities x.   weight: a factor per element"""

    def __init__(self, weight: Numbers | None = None, *, reduction: str = 'mean') -> None:
        super().__init__(reduction=reduction)
        self.weight = None if weight is None else Tensor(weight)

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy(x, target, self.weight, self.reduction)


class BCEWithLogitsLoss(_Difference):
    """Return BCELoss of sigmoid(x), which is finite for every logit x.   pos_weight: factor of the terms of positive targets"""

    def __init__(self, weight: Numbers | None = None, *, reduction: str = 'mean', pos_weight: Numbers | None = None) -> None:
        super().__init__(reduction=reduction)
        self.weight, self.pos_weight = (None if one is None else Tensor(one) for one in (weight, pos_weight))

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(x, target, self.weight, self.reduction, self.pos_weight)


class KLDivLoss(_Difference):
    """Return the mean of target (log target - x), for logarithms x of probabilities.   reduction: also 'batchmean'"""

    REDUCTIONS = 'mean', 'sum', 'none', 'batchmean'

    def __init__(self, *, reduction: str = 'mean', log_target: bool = False) -> None:
        super().__init__(reduction=reduction)
        self.log_target = log_target

    def losses(self, x: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(x, target, self.reduction, self.log_target)


class CTCLoss(FunctionLayer, function=F.ctc_loss, blank=0, reduction='mean', zero_infinity=False):
    """Return the loss of connectionist temporal classification, called with log_probs (T, N, C), targets (N, S), input_lengths
    and target_lengths (N,); see F.ctc_loss."""


# ---- distances and margins ---------------------------------------------------------------------------------------------

class CosineSimilarity(FunctionLayer, function=F.cosine_similarity, dim=1, eps=1e-8):
    """Return the cosine of the angle between vectors x1 and x2 along an axis."""


class PairwiseDistance(FunctionLayer, function=F.pairwise_distance, p=2.0, eps=1e-6, keepdim=False):
    """Return the p-norm of x1 - x2 + eps along the last axis."""


class CosineEmbeddingLoss(FunctionLayer, function=F.cosine_embedding_loss, margin=0.0, reduction='mean'):
    """Return the mean of 1 - cos(x1, x2) for target 1, and of max(0, cos(x1, x2) - margin) for target -1."""


class MarginRankingLoss(FunctionLayer, function=F.margin_ranking_loss, margin=0.0, reduction='mean'):
    """Return the mean of max(0, margin - target (x1 - x2)), for targets 1 and -1."""


class HingeEmbeddingLoss(FunctionLayer, function=F.hinge_embedding_loss, margin=1.0, reduction='mean'):
    """Return the mean of x for target 1, and of max(0, margin - x) for target -1."""


class TripletMarginLoss(FunctionLayer, function=F.triplet_margin_loss, margin=1.0, p=2.0, eps=1e-6, swap=False,
                        reduction='mean'):
    """Return the mean of max(0, d(anchor, positive) - d(anchor, negative) + margin), for d = PairwiseDistance."""


class SoftMarginLoss(FunctionLayer, function=F.soft_margin_loss, reduction='mean'):
    """Return the mean of log(1 + e^(-target x)), for targets 1 and -1."""


class MultiLabelSoftMarginLoss(FunctionLayer, function=F.multilabel_soft_margin_loss, weight=None, reduction='mean'):
    """Return BCEWithLogitsLoss, the mean over classes, then over rows; x and target (..., C)."""


class MultiMarginLoss(FunctionLayer, function=F.multi_margin_loss, p=1, margin=1.0, weight=None, reduction='mean'):
    """Return the mean of sum_c max(0, margin - x[label] + x[c])^p / C over the classes c other than the label."""


class MultiLabelMarginLoss(FunctionLayer, function=F.multilabel_margin_loss, reduction='mean'):
    """Return the mean of sum max(0, 1 - x[right] + x[other]) / C over pairs of a right and another class."""


class TripletMarginWithDistanceLoss(FunctionLayer, function=F.triplet_margin_with_distance_loss, distance_function=None,
                                    margin=1.0, swap=False, reduction='mean'):
    """Return the mean of max(0, d(anchor, positive) - d(anchor, negative) + margin) for a distance d of rows."""


class GaussianNLLLoss(FunctionLayer, function=F.gaussian_nll_loss, full=False, eps=1e-6, reduction='mean'):
    """Return the mean of (log var + (x - target)^2 / var) / 2, called with x, target and var.   full: add log(2 pi) / 2"""


class PoissonNLLLoss(FunctionLayer, function=F.poisson_nll_loss, log_input=True, full=False, eps=1e-8, reduction='mean'):
    """Return the mean of e^x - target x, or of x - target log(x + eps) without log_input."""
