"""Train the MLP on handwritten digits; gradients by hand, every step replayed from its plan.

    python -m mnist.train                           10 epochs; MNIST where it is found, else the embedded digits
    python -m mnist.train --plan                    every kernel of a training step
    python -m mnist.train --report out.png          and draw what it got wrong
"""
from pyops.errors import exits_cleanly
from pyops.training import (
    ArgumentParser,
    Progress,
    add_gpu_flag,
    add_plan_flags,
    asks_for_plan,
    check_gpu,
    int_up_to,
    non_negative_int,
    positive_float,
    positive_int,
)

PROGRAM = 'mnist.train'
MAX_NORM = 1.0          # gradients longer than this are clipped


def parse(argv):
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Train a 784-30-10 MLP on handwritten digits.')
    p.add_argument('-e', '--epochs', type=non_negative_int, default=10, metavar='N', help='epochs (default 10)')
    p.add_argument('-l', '--lr', type=positive_float, default=0.001, metavar='X', help='learning rate of Adam (default 0.001)')
    p.add_argument('-b', '--batch-size', type=positive_int, default=100, metavar='N', help='images a step (default 100)')
    add_gpu_flag(p)
    p.add_argument('--hidden', type=int_up_to(65536), default=30, metavar='N', help='units of the hidden layer (default 30)')
    p.add_argument('--seed', type=non_negative_int, default=0, metavar='N', help='of weights and data order (default 0)')
    p.add_argument('--threads', type=int_up_to(1024), metavar='N', help='results do not depend on it (default: all cores)')
    p.add_argument('--data-dir', metavar='DIR', help='where to look for MNIST (default $PYOPS_DATA, then ./data)')
    p.add_argument('--embedded', action='store_true', help='the embedded digits even where MNIST is found')
    p.add_argument('--report', metavar='FILE', help='draw confusion matrix, loss curve and misread digits as FILE (PNG)')
    p.add_argument('--quiet', action='store_true', help='do not list the actions')
    add_plan_flags(p)
    return p.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    check_gpu(args)
    if args.report:
        from mnist import report
        report.check(args.report)

    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from pyops.data import mnist

    # zlib lets other threads run: the images are inflated while modules and the library are loaded
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(mnist.load, args.data_dir, args.embedded)
        from mnist.model import MLP, Config
        from pyops import backend, fit, plan
        from pyops.data.batches import epoch_order, gather
        from pyops.optim import Adam
        backend.isa()

    if args.threads:
        backend.set_threads(args.threads)

    # data
    digits = loading.result()
    if digits.line:
        print(digits.line)
    print(f'images magic : {digits.images_magic}\nlabel magic : {digits.labels_magic}\n'
          f'lables_num : {len(digits.train_labels)}\ndata loaded.', flush=True)
    (images, labels), evaluated = digits.parts()
    label_table = labels.reshape(-1, 1)

    # model
    model = MLP(Config(hidden=args.hidden), args.seed)
    optimizer = Adam(model.params, args.lr, MAX_NORM)
    run = fit.Run(args.seed, args.batch_size)
    losses, predictions = [], np.zeros(len(evaluated[0]), np.int32)

    # training
    def step(rows):
        model.params.zero_grads()
        loss, _, ctx = model.forward(images, rows, gather(label_table, rows, name='labels').reshape(-1))
        plan.boundary()
        model.backward(ctx)
        optimizer.step()
        return loss

    first_batch = epoch_order(len(images), args.seed, 0)[:args.batch_size]
    planned = plan.Steps(step, model.params, images=images, label_table=label_table, one=model.one, **optimizer.arrays())
    if asks_for_plan(args):
        return plan.tell(args, planned.plan(first_batch))
    run_step = step if args.no_plan else planned

    def train_step(rows):
        return float(run_step(rows)[0]), len(rows), optimizer.clipped()

    def validate():
        model.predict(evaluated[0], predictions)
        return {'correct': int((predictions == evaluated[1]).sum())}

    def progress(epoch, total, initial):
        return Progress(total, 'images', initial, lines=0)

    def epoch_line(values):
        losses.append(values['loss'])
        return (f'epoch : {values["epoch"] - 1} [{len(images)}/{len(images)}] loss : {values["loss"]:.6f}\n'
                f'evaluating :  [{len(predictions)}/{len(predictions)}] correct : {values["correct"]}')

    if not (args.quiet or args.no_plan):
        print(planned.plan(first_batch).listing())
    fit.fit(run, len(images), args.epochs, train_step, validate=validate, line=epoch_line, progress=progress)
    if args.report:
        if not losses:
            validate()
        report.draw(args.report, losses, evaluated[0], evaluated[1], predictions)
        print(f'report drawn : {args.report}')


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
