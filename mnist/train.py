"""Train the MLP on handwritten digits: manual gradients, every step replayed from its plan.

    python -m mnist.train                           10 epochs on MNIST if found, else on the embedded digits
    python -m mnist.train --plan                    print every kernel of a training step
    python -m mnist.train --report out.png          also draw a picture of the results
"""
from mnist import program
from pyops.errors import exits_cleanly
from pyops.flags import add_quant_flags
from pyops.inspect import flags as saving_flags

PROGRAM = 'mnist.train'
MAX_NORM = 1.0          # gradients longer than this are clipped
AT_ONCE = 10            # steps per replay call: launching a step costs a GPU more than running it, a CPU 10 % of a small step
SMALL = 2**17           # hidden units times batch size up to which a CPU step is small: a few milliseconds


def parser():
    p = program.parser(PROGRAM, 'Train a 784-30-10 MLP on handwritten digits.', 30, 'units of the hidden layer')
    add_quant_flags(p, '$CUSTOM_QUANT_TYPE, else none')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    wanted = saving_flags.wanted(args)
    digits = program.load(args)
    from pyops import backend, fit, quantization  # here, since --help needs no library
    from pyops.data.batches import split

    # model
    (images, labels), evaluated = digits.parts()
    vars(args).update(quantization.resolve(args))               # the manifest of saved tensors records the recipe
    family = quantization.family_of(vars(args))
    model, optimizer, step, inputs = prepare(images, labels, args.hidden, args.seed, args.lr, family, not wanted)
    if isinstance(family, quantization.Family):
        print(family.check())
    evaluation = program.Evaluation(*evaluated, model.predict)

    # step
    history = fit.History()

    def logged_steps(rows):
        for batch in split(rows, args.batch_size):
            history.add(step(batch), None, optimizer.norm)

    run = fit.Run(args.seed, args.batch_size)
    train_step = fit.training_step(args, logged_steps, model.params, fit.first_batch(run, len(images)), '-b or --hidden',
                                   **inputs, **optimizer.arrays(), **history.arrays())
    if train_step is None:
        return

    # loop
    trainer = fit.Trainer(run, len(images), args.epochs, optimizer, history, max_steps=args.max_steps,
                          chance_loss=program.CHANCE_LOSS)
    train_step = trainer.save_tensors(wanted, train_step, program.about(PROGRAM, args))
    is_large = backend.current_device().is_host and args.hidden * args.batch_size > SMALL
    at_once = 1 if wanted or is_large else AT_ONCE
    losses = []
    with trainer:
        for epoch in trainer.epochs():
            for rows in epoch.batches(at_once, unit='images', lines=0):
                train_step(rows)
            values = epoch.end(correct=evaluation.correct())
            losses.append(values['loss'])
            print(program.epoch_text(values, evaluation), flush=True)
    if args.report:
        evaluation.draw_report(args.report, losses)
    trainer.leave()


def prepare(images, labels, hidden=30, seed=0, lr=0.001, layer_ops=None, as_one=True):
    """Return model, optimizer, step(rows) -> loss, and {name: array} of the plan inputs.

    images (N, 784) uint8, labels (N,) int32: numpy arrays.  layer_ops: source of the layers, pyops.ops or a
    pyops.quantization.Family.  as_one: allow the whole step to be one op; its layers take their names from the op.
    """
    from mnist.model import MLP, Config
    from pyops import backend, ops, plan
    from pyops.data.batches import gather
    from pyops.ops import MLPGradients
    from pyops.optim import Adam

    images, labels = backend.put(images), backend.put(labels)
    label_table = labels.reshape(-1, 1)
    layer_ops = layer_ops or ops
    model = MLP(Config(hidden=hidden, ops=layer_ops), seed)
    optimizer = Adam(model.params, lr, max_norm=MAX_NORM)
    if layer_ops is not ops:
        layer_ops.step = optimizer.count

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
    if (as_one and layer_ops is ops and not backend.current_device().is_host
            and max(hidden, model.config.classes) <= MLPGradients.MOST):
        step = step_of_one_op
    return model, optimizer, step, dict(images=images, label_table=label_table, one=model.one)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
