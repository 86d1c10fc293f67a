"""Train the MLP on handwritten digits; gradients by hand, every step replayed from its plan.

    python -m mnist.train                           10 epochs; MNIST where it is found, else the embedded digits
    python -m mnist.train --plan                    every kernel of a training step
    python -m mnist.train --report out.png          and draw what it got wrong
"""
from mnist import program
from pyops.errors import exits_cleanly

PROGRAM = 'mnist.train'
MAX_NORM = 1.0          # gradients longer than this are clipped
AT_ONCE = 10            # steps that a GPU is told as one: to tell it one takes longer than to do it


def parse(argv):
    p = program.parser(PROGRAM, 'Train a 784-30-10 MLP on handwritten digits.', 30, 'units of the hidden layer')
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    digits = program.load(args, 'mnist.model')
    model, optimizer, step, inputs = prepare(*digits.parts()[0], args.hidden, args.seed, args.lr)
    from pyops import backend
    at_once = 1 if backend.place() is backend.HOST else AT_ONCE
    program.train(args, digits, optimizer, model.params, step, model.predict, at_once=at_once, **inputs)


def prepare(images, labels, hidden=30, seed=0, lr=0.001):
    """images (N, 784) uint8, labels (N,) int32, of numpy -> model, optimizer, step(rows) -> loss, and what a plan of a step
    has to know by name."""
    from mnist.model import MLP, Config
    from pyops import backend, plan
    from pyops.data.batches import gather
    from pyops.ops import MLPGradients
    from pyops.optim import Adam

    images, labels = backend.put(images), backend.put(labels)
    label_table = labels.reshape(-1, 1)
    model = MLP(Config(hidden=hidden), seed)
    optimizer = Adam(model.params, lr, MAX_NORM)

    def step(rows):
        model.params.zero_grads()
        loss, _, ctx = model.forward(images, rows, gather(label_table, rows, name='labels').reshape(-1))
        plan.boundary()
        model.backward(ctx)
        optimizer.step()
        return loss

    def step_of_one_op(rows):
        return model.step(images, rows, labels, optimizer)

    # on a GPU the kernels of a batch take longer to start than to run
    if backend.place() is not backend.HOST and max(hidden, model.config.classes) <= MLPGradients.MOST:
        step = step_of_one_op
    return model, optimizer, step, dict(images=images, label_table=label_table, one=model.one)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
