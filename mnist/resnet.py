"""Train an MLPResNet on handwritten digits: modules on Tensors, gradients by autograd, every step replayed from its plan.

    python -m mnist.resnet                          10 epochs on MNIST if found, else on the embedded digits
    python -m mnist.resnet --norm layer --hidden 150 --augment crop
    python -m mnist.resnet --plan                   print every kernel of a training step
"""
import argparse

from pyops.errors import UserError, exits_cleanly
from pyops.flags import fraction, int_up_to, non_negative_float
from pyops.inspect import flags as saving_flags

from . import program

PROGRAM = 'mnist.resnet'
AUGMENTATIONS = 'flip', 'crop'
PADDING = 3             # largest shift of --augment crop, in pixels
CHUNK = 1000            # images per evaluation batch


def augmentations(text):
    """argparse type: comma-separated names from AUGMENTATIONS."""
    names = text.split(',')
    if not set(names) <= set(AUGMENTATIONS) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f'expected {" or ".join(AUGMENTATIONS)}, or both with a comma between, got {text!r}')
    return names


def parser():
    p = program.parser(PROGRAM, 'Train an MLPResNet on handwritten digits.', 100,
                       'units between blocks; a block has half as many inside', __doc__)
    model, regularization = p.group('model'), p.group('regularization')
    model.add_argument('--blocks', type=int_up_to(1000), default=3, metavar='N',
                       help='number of residual blocks (default %(default)s)')
    model.add_argument('--norm', choices=('batch', 'layer'), default='batch',
                       help='normalization after each linear layer (default %(default)s)')
    regularization.add_argument('--dropout', type=fraction, default=0.1, metavar='P',
                                help='dropout rate inside a block (default %(default)s)')
    regularization.add_argument('--weight-decay', type=non_negative_float, default=0.0001, metavar='X',
                                help='L2 penalty: X times each parameter is added to its gradient (default %(default)s)')
    regularization.add_argument('--augment', type=augmentations, default=[], metavar='NAMES',
                                help='change training images at random: flip, crop or flip,crop (default: none)')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    wanted = saving_flags.wanted(args)
    digits = program.load(args)

    import numpy as np

    from pyops import backend, fit, nn, plan, quantization
    from pyops.autograd import Tensor, no_grad
    from pyops.backend import launch
    from pyops.data import MNISTDataset, RandomCrop, RandomFlipHorizontal
    from pyops.data.batches import gather, gather_pixels
    from pyops.ndarray import as_ndarray
    from pyops.optim import Adam

    from .mlp_resnet import MLPResNet

    quantization.ignore_environment(f'the layers of {PROGRAM} round nothing, unlike those in mnist.train')

    # data
    (images, labels), evaluated = digits.parts()
    if args.norm == 'batch' and 1 in (args.batch_size, len(images) % args.batch_size):
        raise UserError(f'-b {args.batch_size}: leaves a batch of one image of {len(images)}, and one has no variance; '
                        'give another size, or --norm layer')
    images_here, label_table = backend.put(images), backend.put(labels.reshape(-1, 1))
    transforms = {'flip': RandomFlipHorizontal(0.5), 'crop': RandomCrop(PADDING)}
    dataset = MNISTDataset.of(images, labels, [transforms[name] for name in args.augment])
    changed = backend.zeros((min(args.batch_size, len(images)), images.shape[1]))               # an augmented batch

    # model
    model = MLPResNet(images.shape[1], args.hidden, args.blocks, norm=args.norm, dropout=args.dropout)
    model.reset_parameters(args.seed)
    loss_of, one = nn.SoftmaxLoss(), backend.put(np.ones((), np.float32))
    optimizer = Adam(model.params, args.lr, weight_decay=args.weight_decay)

    # step
    history = fit.History()

    def step(rows):
        model.params.zero_grads()
        x = changed[:len(rows)] if args.augment else gather_pixels(images_here, rows)
        y = gather(label_table, rows, name='labels').reshape(-1)
        loss = loss_of(model(Tensor(as_ndarray(x))), Tensor(as_ndarray(y)))
        plan.boundary()
        loss.backward(Tensor(as_ndarray(one)))
        optimizer.step(entry=history.entry(loss.device.kernel_array(loss.array).reshape(1), None))

    def predict(images, classes):
        model.eval()
        with no_grad():
            for first in range(0, len(images), CHUNK):
                rows = backend.put(np.arange(first, min(first + CHUNK, len(images))))
                logits = model(Tensor(as_ndarray(gather_pixels(images, rows)))).array
                launch('argmax', classes[first:first + CHUNK], logits, *logits.shape)
        model.train()

    run = fit.Run(args.seed, args.batch_size)
    train_step = fit.training_step(args, step, model.params, fit.first_batch(run, len(images)), '-b, --hidden or --blocks',
                                   images=images_here, label_table=label_table, one=one,
                                   **dict(changed=changed) if args.augment else {}, **model.buffer_arrays(),
                                   **optimizer.arrays(), **history.arrays())
    if train_step is None:
        return

    # loop
    evaluation, losses = program.Evaluation(*evaluated, predict), []
    trainer = fit.Trainer(run, len(images), args.epochs, optimizer, history, max_steps=args.max_steps,
                          chance_loss=program.CHANCE_LOSS, max_skipped=args.max_skipped)
    train_step = trainer.save_tensors(wanted, train_step, program.about(PROGRAM, args))
    with trainer:
        for epoch in trainer.epochs():
            for rows in epoch.batches(unit='images', lines=0):
                if args.augment:
                    changed[:len(rows)] = dataset.batch(backend.get(rows), args.seed, epoch.number)[0].reshape(len(rows), -1)
                train_step(rows)
            values = epoch.end(correct=evaluation.correct())
            losses.append(values['loss'])
            print(program.epoch_text(values, evaluation), flush=True)
    if args.report:
        evaluation.draw_report(args.report, losses)
    trainer.leave()
    if trainer.is_done and len(digits.train_images) > len(images):      # real MNIST: its test file is still unused
        test = program.Evaluation(digits.test_images, digits.test_labels, predict)
        print(f'test file :  [{len(test)}/{len(test)}] correct : {test.correct()}')


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
