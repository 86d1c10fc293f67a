"""Train the MLP on handwritten digits: manual gradients, every step replayed from its plan.

    python -m mnist.train                           10 epochs on MNIST if found, else on the embedded digits
    python -m mnist.train --plan                    print every kernel of a training step
    python -m mnist.train --report out.png          also draw a picture of the results
"""
from mnist import program
from pyops.errors import exits_cleanly
from pyops.inspect import flags
from pyops.training import add_quant_flags

PROGRAM = 'mnist.train'
MAX_NORM = 1.0          # gradients longer than this are clipped
AT_ONCE = 10            # steps per replay call: launching a step costs a GPU more than running it, a CPU 10 % of a small step
SMALL = 2**17           # hidden units times batch size up to which a CPU step is small: a few milliseconds


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
    vars(args).update(quantization.resolve(args))       # the manifest of saved tensors records the recipe
    made_from, saves = quantization.family_of(vars(args)), bool(flags.wanted(args))
    model, optimizer, step, inputs = prepare(*digits.parts()[0], args.hidden, args.seed, args.lr, made_from, not saves)
    if isinstance(made_from, quantization.Family):
        print(made_from.check())
    is_large = backend.place() is backend.HOST and args.hidden * args.batch_size > SMALL
    at_once = 1 if saves or is_large else AT_ONCE
    program.train(args, digits, optimizer, model.params, step, model.predict, at_once=at_once, **inputs)


def prepare(images, labels, hidden=30, seed=0, lr=0.001, made_from=None, as_one=True):
    """Return model, optimizer, step(rows) -> loss, and {name: array} of the plan inputs.

    images (N, 784) uint8, labels (N,) int32: numpy arrays.  made_from: source of the layers, pyops.ops or a
    pyops.quantization.Family.  as_one: allow the whole step to be one op; its layers take their names from the op.
    """
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

    # On a GPU, launching the kernels of a batch takes longer than running them.
    if (as_one and made_from is ops and backend.place() is not backend.HOST
            and max(hidden, model.config.classes) <= MLPGradients.MOST):
        step = step_of_one_op
    return model, optimizer, step, dict(images=images, label_table=label_table, one=model.one)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
