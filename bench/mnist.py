"""The contest of mnist training steps: data, our step, the steps of PyTorch and JAX."""
import numpy as np

from bench.translation import job

UNIT = 'images'


def prepare(args, folder):
    """Write images, labels, batches and initial weights.  Return a line about the data."""
    from mnist.model import MLP
    from pyops.data import mnist
    from pyops.data.batches import epoch_order
    digits = mnist.load(args.data_dir)
    n = min(len(digits.train_images), 50_000)
    steps = args.warmup + args.steps
    order = np.concatenate([epoch_order(n, 0, epoch) for epoch in range(-(-steps * args.batch_size // n))])
    model = MLP()
    np.savez(folder / 'data.npz', rows=order[:steps * args.batch_size].reshape(steps, -1),
             images=digits.train_images[:n], labels=digits.train_labels[:n].astype(np.int32))
    np.savez(folder / 'weights.npz', **model.params.arrays())
    return f'784-30-10, {n} images'


def train(folder, kind):
    """Return turn and describe of a contestant in training steps; see bench.translation.job."""
    if kind.startswith('jax'):
        return make_jax(folder, kind)
    return job(make_ours(folder) if kind == 'ours' else make_torch(folder, kind == 'torch-compile'))


def make_ours(folder):
    """Return step(k): our training step on batch k, replayed from a plan as in mnist.train; it returns the loss."""
    from mnist import train
    from pyops.steps import Steps
    with np.load(folder / 'data.npz') as file:
        data = {name: file[name] for name in file.files}
    model, optimizer, step, inputs = train.prepare(data['images'], data['labels'])
    steps = Steps(step, model.params, **inputs, **optimizer.arrays())
    return lambda k: float(steps(data['rows'][k])[0])


def make_torch(folder, compiled):
    """Return step(k): PyTorch's step on the same batch from the same weights, with all images converted to float first."""
    import torch

    from bench.torch_mnist import TorchMLP
    from bench.torch_step import copy_weights, make_step
    with np.load(folder / 'weights.npz') as weights:
        model = copy_weights(TorchMLP(), weights)
    with np.load(folder / 'data.npz') as file:
        images, labels = torch.from_numpy(file['images']).float() / 255, torch.from_numpy(file['labels']).long()
        rows = torch.from_numpy(file['rows'])
    run = make_step(torch.compile(model) if compiled else model, lr=0.001)
    return lambda k: run(images[rows[k]], labels[rows[k]]).item()


def make_jax(folder, kind):
    """Return the job of a contestant in JAX: 'jax', one call for each step, or 'jax-scan', one call for the steps of a turn."""
    from bench.jax_models import Training, mnist_loss
    with np.load(folder / 'weights.npz') as weights, np.load(folder / 'data.npz') as file:
        training, rows = Training(mnist_loss, dict(weights), 0.001), file['rows']
        same = training.put(file['images'].astype(np.float32) / 255, file['labels'])
    if kind == 'jax':
        return job(lambda k: training.step(*same, rows[k]))
    return (lambda first, last: float(training.several_steps((rows[first:last],), *same)[-1])), lambda loss: dict(loss=loss)
