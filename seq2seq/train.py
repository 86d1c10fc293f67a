"""Train the deep GRU on sentence pairs, resume a checkpoint, or serve one.

    python -m seq2seq.train -e 50 -c ckpt           train until 50 epochs are done; the same command resumes
    python -m seq2seq.train -e 0 -c ckpt            serve: translate lines from standard input
    python -m seq2seq.train -e 1 -t 1               a trial on 512 pairs
"""
import math

from pyops.errors import exits_cleanly
from pyops.flags import int_up_to, non_negative_int, select_storage, use_device, use_ranks
from pyops.inspect import flags as saving_flags
from pyops.settings import add_setting, configure, resolve
from pyops.text import flags

PROGRAM = 'seq2seq.train'
DEFAULTS = flags.DEFAULTS | dict(lr=0.005, dropout=0.2, embedding=256, hidden=256, layers=2, reset_before=False, attention=0,
                                bidirectional=False)
# Found by search, docs/quality.md.  A name is the time on two cores with AVX512_BF16.
_SHARED = ('--precision bf16 --hold-out 0.02 --tokenizer bpe --vocabulary 8000 --batch-tokens 1024 --smoothing 0.1 '
           '--attention 1 --bidirectional --schedule linear --keep-best bleu -l 0.002 --warmup 400 --hidden 512 -d 0.2 ')
RECIPES = {'minutes-16': _SHARED + '-e 3', 'minutes-30': _SHARED + '-e 5', 'minutes-60': _SHARED + '-e 10'}


def parser():
    p = flags.parser(PROGRAM, 'Train a deep GRU that translates English to French.', DEFAULTS, 50, 'between the GRU layers',
                     RECIPES, docstring=__doc__)
    model = p.group('model')
    add_setting(model, DEFAULTS, '--embedding', type=int_up_to(65536), help='size of a word embedding')
    add_setting(model, DEFAULTS, '--hidden', type=int_up_to(65536), help='size of a hidden state')
    add_setting(model, DEFAULTS, '--layers', type=int_up_to(64), help='GRU layers, of the encoder and of the decoder')
    model.add_argument('--reset-before', action='store_true', default=None,
                       help='apply the reset gate before the recurrent product, as first published (default: after it)')
    add_setting(model, DEFAULTS, '--attention', type=non_negative_int, metavar='HEADS',
                help='heads of the attention of the decoder to all states of the encoder; 0: none')
    model.add_argument('--bidirectional', action='store_true', default=None,
                       help='half of the units of the bottom encoder layer read the sentence from its end (default: none)')
    return p


def main(argv=None):
    args = flags.parse_training(parser(), argv, RECIPES)
    wanted = saving_flags.wanted(args)
    use_device(args)
    use_ranks(args)
    from pyops.text import serving, training  # here, since --help needs no library
    if args.epochs == 0:
        return serving.serve(args, 'seq2seq')
    from pyops import backend, distributed, fit
    print(f'OMP_THREADS: {backend.threads()}\nepochs : {args.epochs}', flush=True)
    from pyops.text.translator import Translator

    from .model import OFF, SIZES, Config, Seq2Seq, parameter_specs

    # settings
    found = training.find_checkpoint(args, 'seq2seq')
    if found.state:
        found.state['settings'] = OFF | found.state['settings']
    settings = resolve(args, found, flags.defaults_of(args, found, DEFAULTS), SIZES, flags.FIXED)
    settings['exact'] = training.select_exact(args, found)
    configure(Config, settings, 1, 1)                           # report contradictions before minutes of loading
    print(f'dropout : {settings["dropout"]}\nlr : {settings["lr"]}\ntiny : {settings["tiny"]}', flush=True)

    # data
    data = training.Data.load(args, settings, state=found.state)
    pairs = data.train
    print(f'data loaded\n{found.line}', flush=True)

    # model
    config = configure(Config, settings, *map(len, data.vocabularies))
    select_storage(args, settings['quant'])
    fit.check_model_memory(parameter_specs(config), '--embedding, --hidden or --layers',
                           distributed.size() if args.shard_optimizer else 1)
    model = Seq2Seq(config, settings['seed'])
    if args.shard_optimizer:
        distributed.shard(model.params)
    optimizer = training.adam(model, settings)
    run = training.start_run(args, found, settings, data, model, optimizer, wanted)
    if run is None:
        return
    batches = training.batches(settings, pairs)
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

    # loop
    state = data.state('seq2seq', settings)
    saver = fit.Saver(found, model.params, optimizer, run, state, args.save_every, args.save_minutes,
                      validate.metric, args.keep, training.session(args, 'seq2seq'))
    trainer = fit.Trainer(run, batches, args.epochs, optimizer, history, saver=saver, max_steps=args.max_steps,
                          chance_loss=math.log(config.target_size), patience=args.patience,
                          max_skipped=args.max_skipped)
    train_step = trainer.save_tensors(wanted, train_step, dict(program='seq2seq', settings=settings),
                                      training.side, data.describe)
    with trainer:
        for epoch in trainer.epochs():
            data.start_epoch(settings, run)
            for rows in epoch.batches(unit='pairs'):
                train_step(rows)
            with optimizer.averaged():
                metrics = validate()
            values = epoch.end(**metrics)
            epoch.save()
            print(f'epoch {values["epoch"]} loss : {values["loss"]:.5f} emit_clip : {values["emit_clip"]}'
                  + validate.text(values), flush=True)
    if trainer.is_done and trainer.signal is None:
        training.score(saver, optimizer, translator, data.test)
    trainer.leave()


if __name__ == '__main__':
    with exits_cleanly(PROGRAM, ranks=True):
        main()
