"""Train the MLP on handwritten digits; gradients by hand, every step replayed from its plan.

    python -m mnist.train                           10 epochs; MNIST where it is found, else the embedded digits
    python -m mnist.train --plan                    every kernel of a training step
    python -m mnist.train --report out.png          and draw what it got wrong
"""
from mnist import program
from pyops.errors import exits_cleanly
from pyops.inspect import flags
from pyops.training import add_quant_flags

PROGRAM = 'mnist.train'
MAX_NORM = 1.0          # gradients longer than this are clipped
AT_ONCE = 10            # steps that are told as one: telling takes a GPU longer than doing, the CPU a tenth of a small one
SMALL = 2**17           # hidden units times images up to which a step is small on the CPU: it takes a few milliseconds


def parser():
    p = program.parser(PROGRAM, 'Train a 784-30-10 MLP on handwritten digits.', 30, 'units of the hidden layer')
    add_quant_flags(p, '$CUSTOM_QUANT_TYPE, else none')
    return p


def parse(argv):
    return parser().parse_args(argv)


def main(argv=None):
    args = parse(argv)
    digits = program.load(args, 'mnist.model')
    from pyops import backend, quantization
    vars(args).update(quantization.resolve(args))       # so that the manifest of saved tensors names the recipe that was used
    made_from, saves = quantization.family_of(vars(args)), bool(flags.wanted(args))
    model, optimizer, step, inputs = prepare(*digits.parts()[0], args.hidden, args.seed, args.lr, made_from, not saves)
    if isinstance(made_from, quantization.Family):
        print(made_from.check())
    is_large = backend.place() is backend.HOST and args.hidden * args.batch_size > SMALL
    at_once = 1 if saves or is_large else AT_ONCE
    program.train(args, digits, optimizer, model.params, step, model.predict, at_once=at_once, **inputs)


def prepare(images, labels, hidden=30, seed=0, lr=0.001, made_from=None, as_one=True):
    """images (N, 784) uint8, labels (N,) int32, of numpy -> model, optimizer, step(rows) -> loss, and what a plan of a step
    has to know by name.  made_from: what its layers are made from, pyops.ops or a pyops.quantization.Family.
    as_one: the step may be one op.  Its tensors can be saved, too, but it takes the names of its layers from the op."""
    from mnist.model import MLP, Config
    from pyops import backend, ops, plan
    from pyops.data.batches import gather
    from pyops.ops import MLPGradients
    from pyops.optim import Adam

    images, labels = backend.put(images), backend.put(labels)
    label_table = labels.reshape(-1, 1)
    made_from = made_from or ops
    model = MLP(Config(hidden=hidden, ops=made_from), seed)
    optimizer = Adam(model.params, lr, max_norm=MAX_NORM)
    if made_from is not ops:
        made_from.step = optimizer.count

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
    if (as_one and made_from is ops and backend.place() is not backend.HOST
            and max(hidden, model.config.classes) <= MLPGradients.MOST):
        step = step_of_one_op
    return model, optimizer, step, dict(images=images, label_table=label_table, one=model.one)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
