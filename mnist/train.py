"""Train the MLP on handwritten digits: manual gradients, every step replayed from its plan.

    python -m mnist.train                           10 epochs on MNIST if found, else on the embedded digits
    python -m mnist.train --plan                    print every kernel of a training step
    python -m mnist.train --report out.png          also draw a picture of the results
    python -m mnist.train --hidden 256 -e 5 -l 0.003 --schedule linear --test           98 % of the test file
"""
import zlib

from pyops.errors import exits_cleanly
from pyops.flags import add_quant_flags, add_rank_flags
from pyops.inspect import flags as saving_flags

from . import program

PROGRAM = 'mnist.train'
MAX_NORM = 1.0          # gradients longer than this are clipped
AT_ONCE = 10            # steps per replay call on a CPU: launching a small step costs 10 % of it
AT_ONCE_ON_GPU = 100    # there they are one kernel
DECAYS = 'cosine', 'linear'
SMALL = 2**17           # hidden units times batch size up to which a CPU step is small: a few milliseconds


def parser():
    p = program.parser(PROGRAM, 'Train a 784-30-10 MLP on handwritten digits.', 30, 'units of the hidden layer', __doc__)
    p.group('training').add_argument('--schedule', choices=DECAYS, help='let the learning rate fall to 0 by the end of epoch '
                                     '-e, along a line or a cosine (default: constant)')
    p.group('output').add_argument('--test', action='store_true', help='classify the test file after the last epoch')
    add_rank_flags(p, '')
    add_quant_flags(p, '$CUSTOM_QUANT_TYPE, else none')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    wanted = saving_flags.wanted(args)
    digits = program.load(args, ranks=True)
    from pyops import backend, distributed, fit, quantization  # here, since --help needs no library
    from pyops.steps import Cut

    # model
    checks = args.check_finite is not None or args.max_skipped > 0     # within the plan of a single step, of several kernels
    (images, labels), evaluated = digits.parts()
    parts = distributed.number_of_parts(args.parts, args.reduce == 'fast', min(args.batch_size, len(images)))
    if distributed.size() > 1:
        distributed.agree(data=zlib.crc32(images) ^ zlib.crc32(labels), flags={
            name: value for name, value in vars(args).items() if name not in ('data_dir', 'threads', 'report')})
    vars(args).update(quantization.resolve(args))               # the manifest of saved tensors records the recipe
    family = quantization.family_of(vars(args))
    run = fit.Run(args.seed, args.batch_size)
    steps = args.epochs * -(-len(images) // args.batch_size)
    model, optimizer, whole_step, inputs = prepare(images, labels, args.hidden, args.seed, args.lr, family,
                                                   not wanted and not checks, args.shard_optimizer, args.schedule, steps)
    if isinstance(family, quantization.Family):
        print(family.check())
    evaluation = program.Evaluation(*evaluated, model.predict)

    # step
    history = fit.History()

    def logged_steps(rows):
        for losses, norms in whole_step.each(rows, args.batch_size):
            history.add(losses, None, norms)

    cut = Cut(parts, optimizer.count, fast=args.reduce == 'fast')

    def gradients_of_part(rows):
        cut.note(gradients(model, inputs['images'], inputs['label_table'], rows, cut.share))

    def update(loss):
        whole_step.update()
        history.add(loss, None, optimizer.norm)

    step, cut_arrays = (logged_steps, {}) if parts == 1 else (cut.step(gradients_of_part, update), cut.arrays())
    train_step = fit.training_step(args, step, model.params, fit.first_batch(run, len(images)), '-b or --hidden',
                                   **inputs, **cut_arrays, **optimizer.arrays(), **history.arrays())
    if train_step is None:
        return

    # loop
    trainer = fit.Trainer(run, len(images), args.epochs, optimizer, history, max_steps=args.max_steps,
                          chance_loss=program.CHANCE_LOSS, max_skipped=args.max_skipped)
    train_step = trainer.save_tensors(wanted, train_step, program.about(PROGRAM, args))
    on_host = backend.current_device().is_host
    is_large = on_host and args.hidden * args.batch_size > SMALL
    at_once = 1 if wanted or checks or is_large or parts > 1 else AT_ONCE if on_host else AT_ONCE_ON_GPU
    losses = []
    with trainer:
        for epoch in trainer.epochs():
            for rows in epoch.batches(at_once, unit='images', lines=0):
                train_step(rows)
            values = epoch.end(correct=evaluation.correct())
            losses.append(values['loss'])
            print(program.epoch_text(values, evaluation), flush=True)
    if args.test:
        print(program.test_text(program.Evaluation(*digits.test(), model.predict)), flush=True)
    if args.report and distributed.is_first():
        evaluation.draw_report(args.report, losses)
    trainer.leave()


def prepare(images, labels, hidden=30, seed=0, lr=0.001, layer_ops=None, as_one=True, sharded=False, schedule=None,
            total=0):
    """Return model, optimizer, a Step, and {name: array} of the plan inputs.

    images (N, 784) uint8, labels (N,) int32: numpy arrays.  layer_ops: source of the layers, pyops.ops or a
    pyops.quantization.Family.  as_one: allow the whole step to be one op; its layers take their names from the op.
    sharded: ranks share the moments of the optimizer.
    schedule: one of DECAYS lets the learning rate fall to 0 in `total` steps;  None: constant
    """
    from pyops import backend, distributed, ops
    from pyops.ops import MLPGradients
    from pyops.optim import Adam, decaying_rate

    from .model import MLP, Config

    images, labels = backend.put(images), backend.put(labels)
    label_table = labels.reshape(-1, 1)
    layer_ops = layer_ops or ops
    model = MLP(Config(hidden=hidden, ops=layer_ops), seed)
    if sharded:
        distributed.shard(model.params)
    optimizer = Adam(model.params, lr, max_norm=MAX_NORM)
    if layer_ops is not ops:
        layer_ops.attach(optimizer)

    def set_rate():
        if schedule:
            decaying_rate(optimizer, lr, 0, total, schedule)

    def update():
        set_rate()
        optimizer.step()

    def step(rows):
        loss = gradients(model, images, label_table, rows)
        update()
        return loss

    def step_of_one_op(rows):
        set_rate()
        return model.step(images, rows, labels, optimizer)

    def steps_of_one_op(rows):
        return model.steps(images, rows, labels, optimizer)

    # On a GPU, launching the kernels of a batch takes longer than running them.
    if (as_one and layer_ops is ops and not backend.current_device().is_host
            and max(hidden, model.config.classes) <= MLPGradients.MOST):
        step = Step(step_of_one_op, optimizer, update, None if schedule else steps_of_one_op)
    else:
        step = Step(step, optimizer, update)
    return model, optimizer, step, dict(images=images, label_table=label_table, one=model.one)


class Step:
    """Call it with the rows (B,) of a batch to run a training step; it returns the loss (1,)."""

    def __init__(self, step, optimizer, update, several=None):
        """update() sets the learning rate and updates the parameters.
        several(rows (K, B)) -> losses (K,), norms (K,) or None: runs K steps as one op;  None: there is no such op
        """
        self._step, self._optimizer, self.update, self._several = step, optimizer, update, several

    def __call__(self, rows):
        return self._step(rows)

    def each(self, rows, batch_size):
        """Run the batches in `rows`; the last may be smaller.  Yield losses (K,) and gradient norms (K,) of them."""
        from pyops.data.batches import split
        whole = len(rows) // batch_size * batch_size if self._several else 0
        if whole > batch_size:
            yield self._several(rows[:whole].reshape(-1, batch_size))
            rows = rows[whole:]
        for batch in split(rows, batch_size):
            yield self._step(batch), self._optimizer.norm


def gradients(model, images, label_table, rows, dloss=None):
    """Zero the gradients, add the gradients of a batch, and return its mean loss (1,).   dloss (1,): None for 1"""
    from pyops import plan, quantization
    from pyops.data.batches import gather
    model.params.zero_grads()
    with quantization.recording(model.config.ops):
        loss, _, ctx = model.forward(images, rows, gather(label_table, rows, name='labels').reshape(-1))
        plan.boundary()
        model.backward(ctx, dloss)
    return loss


if __name__ == '__main__':
    with exits_cleanly(PROGRAM, ranks=True):
        main()
