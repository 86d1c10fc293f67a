"""The mnist program in idiomatic JAX: contestant in the benchmarks.

    python -m bench.jax_mnist [THREADS]             10 epochs, the lines of mnist.train

An epoch is one compiled call, a scan over its steps.  JAX keeps compiled code if JAX_COMPILATION_CACHE_DIR is set.
"""
import os
import sys

import numpy as np

from bench.contest import use_cores


def main(epochs=10, batch_size=100, hidden=30):
    """Train and print.  Images that do not fill the last batch of an epoch wait for the next one."""
    use_cores(int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count())
    import jax

    from bench.jax_models import Training, mnist_logits, mnist_loss
    from pyops.data import mnist
    digits, rng = mnist.load(), np.random.default_rng(0)
    (images, labels), (others, classes) = ((x.astype(np.float32) / 255, of_x) for x, of_x in digits.parts())

    def layer(inputs, outputs):
        """Return weight (outputs, inputs) and bias, uniform within 1 / sqrt(inputs)."""
        bound = inputs ** -0.5
        return [rng.uniform(-bound, bound, shape).astype(np.float32) for shape in ((outputs, inputs), outputs)]
    (w1, bias1), (w2, bias2) = layer(images.shape[1], hidden), layer(hidden, 10)
    training = Training(mnist_loss, dict(w1=w1.T.copy(), bias1=bias1, w2=w2, bias2=bias2), 0.001)
    same, evaluated = training.put(images, labels), training.put(others, classes)
    count_correct = jax.jit(lambda params, images, labels: (mnist_logits(params, images).argmax(-1) == labels).sum())
    for epoch in range(epochs):
        rows = rng.permutation(len(images)).astype(np.int32)
        rows = rows[:len(rows) // batch_size * batch_size].reshape(-1, batch_size)
        loss = training.several_steps((rows,), *same).mean()
        correct = int(count_correct(training.state[0], *evaluated))
        print(f'epoch : {epoch} [{rows.size}/{len(images)}] loss : {loss:.6f}\n'
              f'evaluating :  [{len(others)}/{len(others)}] correct : {correct}', flush=True)


if __name__ == '__main__':
    main()
