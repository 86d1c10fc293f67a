"""Adam with clipping by the global norm, one call over all parameters (Kingma and Ba 2014, arXiv:1412.6980), and a
schedule of its learning rate."""
import math

import numpy as np

from pyops import backend


class Adam:
    """Learning rate, step count and gradient norm lie in arrays of one element, where the kernels read them.

    step() clips the gradient to `max_norm` on the fly, updates params.values, m and v, and leaves params.grads.
    """

    def __init__(self, params, lr, max_norm=1.0, beta1=0.9, beta2=0.999, eps=1e-8):
        self.params, self.max_norm, self.beta1, self.beta2, self.eps = params, max_norm, beta1, beta2, eps
        self.lr = np.array([lr], np.float32)
        self.count = backend.zeros(1, np.int64)         # steps done
        self.norm = backend.zeros(1)                    # of the last gradient, before clipping
        self._work = backend.work('grad_norm', params.grads.size)

    def step(self):
        p, n = self.params, self.params.grads.size
        backend.launch('grad_norm', self.norm, p.grads, self._work, n)
        backend.launch('increment', self.count)
        backend.launch('adam', p.values, p.m, p.v, p.grads, self.norm, self.count, self.lr,
                       n, self.max_norm, self.beta1, self.beta2, self.eps)

    def arrays(self):
        """What it keeps from step to step, by name, for a plan."""
        return dict(lr=self.lr, step=self.count, norm=self.norm, norm_work=self._work)

    def clipped(self):
        """Whether the last step had to clip."""
        return bool(self.norm[0] > self.max_norm)


def inverse_square_root(lr, warmup, step):
    """The learning rate of step 1, 2, ...: it rises evenly to `lr` at step `warmup` and falls with the root of the step
    from there (Vaswani et al. 2017, arXiv:1706.03762, section 5.3, whose lr is (d_model * warmup) ** -0.5).

    warmup 0: `lr` at every step.
    """
    return lr * min(step / warmup, math.sqrt(warmup / step)) if warmup else lr
