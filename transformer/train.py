"""Train the transformer on sentence pairs, resume a checkpoint, or serve one.

    python -m transformer.train -e 10 -c ckpt           train until 10 epochs are done; the same command resumes
    python -m transformer.train -e 0 -c ckpt            serve: translate lines from standard input
    python -m transformer.train --preset base           the size and schedule of the paper (Vaswani et al. 2017)
"""
import math
from argparse import BooleanOptionalAction

from pyops.errors import UserError, exits_cleanly
from pyops.flags import int_up_to, select_storage, use_device, use_ranks
from pyops.inspect import flags as saving_flags
from pyops.settings import add_setting, configure, resolve
from pyops.text import flags

PROGRAM = 'transformer.train'
DEFAULTS = flags.DEFAULTS | dict(lr=0.001, dropout=0.2, d_model=256, d_ff=64, heads=4, layers=2, decoder_layers=0,
                                 positions=1000, pre_norm=False, tied=False, activation='relu')
PRESETS = {'small': {},
           'base': dict(lr=0.0007, dropout=0.1, d_model=512, d_ff=2048, heads=8, layers=6, num_steps=64, pre_norm=True,
                        smoothing=0.1, warmup=4000)}
# Found by search, docs/quality.md.  A name is the time on two cores with AVX512_BF16.
_SHARED = ('--precision bf16 --hold-out 0.02 --tokenizer bpe --vocabulary 8000 --batch-tokens 2048 --smoothing 0.1 --pre-norm '
           '--tied --schedule linear --keep-best bleu ')
RECIPES = {'minutes-16': _SHARED + '-e 4 -l 0.002 --warmup 400 --layers 3 --d-ff 1024 -d 0.1',
           'minutes-30': _SHARED + '-e 8 -l 0.002 --warmup 400 --layers 3 --d-ff 1024 -d 0.1',
           'minutes-60': _SHARED + '-e 16 -l 0.002 --warmup 400 --layers 3 --d-ff 1024 -d 0.1',
           'overnight': _SHARED + '-e 32 -l 0.001 --warmup 2000 --layers 4 --d-model 512 --d-ff 1024 --heads 8 -d 0.3'}


def parser():
    p = flags.parser(PROGRAM, 'Train a transformer that translates English to French.', DEFAULTS, 10,
                     'of embeddings, attention weights and the outputs of sublayers', RECIPES, PRESETS, __doc__, fp8=True)
    model = p.group('model')
    add_setting(model, DEFAULTS, '--d-model', type=int_up_to(65536), help='size of a word embedding and of a hidden state')
    add_setting(model, DEFAULTS, '--d-ff', type=int_up_to(65536), help='inner size of a feed-forward layer')
    add_setting(model, DEFAULTS, '--heads', type=int_up_to(1024), help='attention heads; d-model is divided among them')
    add_setting(model, DEFAULTS, '--layers', type=int_up_to(64), help='blocks of the encoder')
    add_setting(model, DEFAULTS, '--decoder-layers', type=int_up_to(64), help='blocks of the decoder; 0: as many as --layers')
    add_setting(model, DEFAULTS, '--positions', type=int_up_to(1000), help='encoded positions: the largest num-steps')
    add_setting(model, DEFAULTS, '--activation', metavar='NAME',
                help='function between the two products of a feed-forward layer: relu, silu, gelu or gelu_tanh')
    model.add_argument('--pre-norm', action=BooleanOptionalAction,
                       help='apply layer norm before each sublayer instead of after its sum (default: after)')
    model.add_argument('--tied', action=BooleanOptionalAction,
                       help='use one matrix for both embeddings and the output layer (default: three)')
    model.add_argument('--recompute', action='store_true',
                       help='compute the activations of each block again in the backward pass instead of keeping them: less '
                       'memory, more time, same numbers')
    return p


def main(argv=None):
    args = flags.parse_training(parser(), argv, RECIPES)
    wanted = saving_flags.wanted(args)
    if wanted and args.recompute:
        raise UserError('--recompute: computes each layer twice, so tensors cannot be saved; leave it out')
    use_device(args)
    use_ranks(args)
    from pyops.text import serving, training  # here, since --help needs no library
    if args.epochs == 0:
        return serving.serve(args, 'transformer')
    from pyops import distributed, fit
    from pyops.text.translator import Translator
    from pyops.text.vocabulary import BOS, EOS, PAD

    from .model import SIZES, Config, Transformer, parameter_specs

    # settings
    found = training.find_checkpoint(args, 'transformer')
    if found.state:
        found.state['settings'].setdefault('activation', 'relu')        # older checkpoints
    settings = resolve(args, found, flags.defaults_of(args, found, DEFAULTS), SIZES, flags.FIXED, PRESETS)
    settings['exact'] = training.select_exact(args, found)
    configure(Config, settings, 1, 1)                           # report contradictions before minutes of loading

    # data
    data = training.Data.load(args, settings, least=settings['batch_size'], state=found.state)
    pairs = data.train
    config = configure(Config, settings, *map(len, data.vocabularies))
    print(f'epochs : {args.epochs}\nbatch_size : {settings["batch_size"]}\ngpu : {args.gpu}\n'
          f'learning rate : {settings["lr"]}\ncheckpoint : {found.path or "none"}\n'
          f'enc_vocab_size : {config.source_size}\ndec_vocab_size : {config.target_size}\n'
          f'bos_id : {BOS}\neos_id : {EOS}\nsrc_pad_id : {PAD}\ntgt_pad_id : {PAD}', flush=True)

    # model
    select_storage(args, settings['quant'])
    fit.check_model_memory(parameter_specs(config), '--d-model, --d-ff or --layers',
                           distributed.size() if args.shard_optimizer else 1)
    model = Transformer(config, settings['seed'], recompute=args.recompute)
    if args.shard_optimizer:
        distributed.shard(model.params)
    optimizer = training.adam(model, settings)
    run = training.start_run(args, found, settings, data, model, optimizer, wanted)
    if run is None:
        return
    batches = training.batches(settings, pairs, drop_last=True)
    parts = training.parts(args, settings, pairs, batches, optimizer.count)
    translator = Translator(model, *data.vocabularies)
    validate = training.Validation(model, data, args, translator)
    history = fit.History()

    # step
    schedule = training.Schedule.of_run(settings, optimizer, run, batches, args.epochs)

    def gradients(rows, *sizes):
        model.params.zero_grads()
        return parts.gradients(model, rows, sizes)

    def update(loss):
        schedule.set_rate()
        optimizer.step(entry=history.entry(loss, parts.tokens))

    first_batch = fit.first_batch(run, batches)
    train_step = fit.training_step(args, parts.step(gradients, update), model.params, first_batch, '-b or --num-steps',
                                   parts.sizes, parts.filled, data.lines, **pairs.arrays(), **parts.arrays(), **model.arrays(),
                                   **optimizer.arrays(), **history.arrays())
    if train_step is None:
        return
    if not args.no_plan:
        print(train_step.plan(first_batch).memory().line(), flush=True)

    # loop
    state = data.state('transformer', settings)
    saver = fit.Saver(found, model.params, optimizer, run, state, args.save_every, args.save_minutes,
                      validate.metric, args.keep, training.session(args, 'transformer'))
    trainer = fit.Trainer(run, batches, args.epochs, optimizer, history, saver=saver, max_steps=args.max_steps,
                          chance_loss=math.log(config.target_size), patience=args.patience,
                          max_skipped=args.max_skipped)
    train_step = trainer.save_tensors(wanted, train_step, dict(program='transformer', settings=settings),
                                      training.side, data.describe)
    with trainer:
        for epoch in trainer.epochs():
            data.start_epoch(settings, run)
            for rows in epoch.batches(unit='pairs', label=f'epoch {epoch.number} :  ', at_end=False):
                train_step(rows)
            with optimizer.averaged():
                metrics = validate()
            values = epoch.end(**metrics)
            print(f'epoch {epoch.number} :  [{epoch.samples}/{epoch.samples}] loss : {values["loss"]:.5f}'
                  + validate.text(values), flush=True)
    if trainer.is_done and trainer.signal is None:
        training.score(saver, optimizer, translator, data.test)
    trainer.leave()


if __name__ == '__main__':
    with exits_cleanly(PROGRAM, ranks=True):
        main()
