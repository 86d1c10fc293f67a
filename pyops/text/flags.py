"""Flags and settings that the translation programs share.  Imports nothing large, so that --help is quick."""
import sys

from pyops import programs
from pyops.errors import UserError
from pyops.flags import (
    ArgumentParser,
    add_compute_flag,
    add_finite_flags,
    add_gpu_flag,
    add_max_steps_flag,
    add_plan_flags,
    add_quant_flags,
    add_rank_flags,
    add_threads_flag,
    fraction,
    int_up_to,
    non_negative_float,
    non_negative_int,
    output_file,
    positive_float,
    positive_int,
)
from pyops.settings import add_preset_flag, add_setting

# Settings without a flag given, and without one in the checkpoint or the preset.  Programs add their own.
DEFAULTS = dict(batch_size=128, batch_tokens=0, accumulate=1, parts=None, seed=0, hold_out=None, exclude=None, tiny=0, pairs=0,
                tokenizer='word', min_count=3, vocabulary=12000, bpe_dropout=0.0, num_steps=9, smoothing=0.0, warmup=0,
                schedule='inverse-root', ema=0.0, quant='none', quant_layers='')
DEFAULTS_OF_BPE = dict(num_steps=64)
MOST_STEPS = 1000           # --num-steps at most
SCHEDULES = 'inverse-root', 'linear', 'cosine'
FIXED = 'seed', 'tiny', 'pairs', 'tokenizer', 'min_count', 'vocabulary', 'hold_out', 'ema'      # a resumed run keeps them
BEAM = 5                                                        # --beam
BATCH_SIZE = 64                                                 # texts of a batch of the server, and of scores
# Hypotheses of a batch in translation.  Each step costs about 0.5 ms in Python, as long as 30 rows, so more rows save time; the
# keys and values of more rows do not fit in the cache.
BATCH_ROWS = 320
LENGTH_PENALTY = 1.0                                            # --length-penalty
PROCESSES = 4                                                   # --processes, at most by default: each has the weights
WORTH = 2.0         # seconds of translating for which other processes are started: one takes about 0.3 s to start
LARGEST_PENALTY = 100       # 1000 tokens to this power, the divisor of a score, are a finite float64
LARGEST_BEAM = 32                                               # PYOPS_TOPK
NOTHING = 'none'                                                # --exclude
AVERAGED = 5                                                    # --last of the programs average
EMBEDDED_HOLD_OUT = 0.1                                         # --hold-out of the embedded corpus


def parser(program, description, defaults, epochs, dropped, recipes, presets=None, docstring=None, fp8=False):
    """Return the parser of a training program without the flags of its model; use it with `parse_training`.

    defaults: the program's settings;  epochs: default of -e;  dropped: where dropout is applied, for --help;  docstring: of the
    program, with its examples;  fp8: as in add_gpu_flag
    """
    p = ArgumentParser(prog=programs.command(program), description=description, docstring=docstring)
    training, checkpoints, data = map(p.group, ('training', 'checkpoints', 'data'))
    training.add_argument('-e', '--epochs', type=non_negative_int, default=epochs, metavar='N',
                          help='train until N epochs are done; 0 serves a checkpoint (default %(default)s)')
    add_setting(training, defaults, '-b', '--batch-size', type=positive_int, help='sentence pairs per step')
    add_setting(training, defaults, '--batch-tokens', type=non_negative_int,
                help='as many pairs per step as have at most N tokens on either side; 0: --batch-size pairs')
    add_setting(training, defaults, '--accumulate', type=int_up_to(64),
                help='batches per step: their gradients are added, as if they were one batch, in less memory')
    add_setting(training, defaults, '-l', '--lr', type=positive_float, metavar='X', help='learning rate of Adam')
    add_setting(training, defaults, '--seed', type=non_negative_int, help='seed of weights, dropout and data order')
    add_max_steps_flag(p)
    add_threads_flag(p)
    checkpoints.add_argument('-c', '--checkpoint', metavar='PATH',
                             help='a checkpoint to resume; or a folder: resume its newest checkpoint, and write new ones '
                             'there (default: start from scratch, write to ./checkpoints)')
    checkpoints.add_argument('--save-every', type=positive_int, default=10, metavar='N',
                             help='epochs between checkpoints (default %(default)s)')
    checkpoints.add_argument('--save-minutes', type=non_negative_float, default=10, metavar='M',
                             help='also save when the last checkpoint is M minutes old; the next one replaces it; 0 '
                             'disables this (default %(default)s)')
    checkpoints.add_argument('--keep', type=positive_int, metavar='N',
                             help='keep only the newest N checkpoints of the run (default: all)')
    checkpoints.add_argument('--keep-best', choices=('bleu', 'loss'),
                             help='also keep the checkpoint with the best validation BLEU or loss, as best.safetensors; '
                             'translation prefers it (default: do not)')
    checkpoints.add_argument('--patience', type=positive_int, metavar='N',
                             help='end the run after N epochs without a better value of --keep-best (default: do not)')
    data.add_argument('-f', '--corpus', metavar='FILE',
                      help='sentence pairs, one per line, separated by a tab: a text, or a .zip, .gz, .bz2 or .xz file '
                      "of one; a folder of 'python -m pyops.data pack'; or 'embedded' (default: fra-eng if found, else "
                      'embedded)')
    data.add_argument('--data-dir', metavar='DIR',
                      help='search for fra-eng and tatoeba-test only in DIR (default: $PYOPS_DATA, then ./data)')
    data.add_argument('-t', '--tiny', type=int, choices=(0, 1), nargs='?', const=1,
                      help=f'1: use only the first 512 pairs and their words, for a trial (default {defaults["tiny"]})')
    data.add_argument('--pairs', type=positive_int, metavar='N',
                      help='train on the first N pairs only, with the vocabularies of all (default: all)')
    data.add_argument('--tokenizer', choices=('word', 'bpe'),
                      help='word: lower-case words, a vocabulary per language; bpe: subwords with case, one vocabulary for '
                      f'both, needs tokenizers (default {defaults["tokenizer"]})')
    add_setting(data, defaults, '--min-count', type=positive_int, help='word: treat words that occur less often as unknown')
    add_setting(data, defaults, '--vocabulary', type=int_up_to(65536), help='bpe: number of subwords')
    add_setting(data, defaults, '--bpe-dropout', type=fraction, metavar='P',
                help='bpe: skip merges with this probability, differently in each epoch')
    data.add_argument('--hold-out', type=fraction, metavar='F',
                      help='share of the sentences that is held out for validation and test '
                      f'(default 0; embedded corpus {EMBEDDED_HOLD_OUT})')
    data.add_argument('--exclude', metavar='FILE',
                      help='leave pairs with a sentence of this test set out of training and validation: tatoeba-test, or a '
                      f'file; {NOTHING}: train on all pairs (default: tatoeba-test if it is found and the corpus is fra-eng, '
                      f'else {NOTHING})')
    data.add_argument('--num-steps', type=int_up_to(MOST_STEPS), metavar='N',
                      help='tokens per sentence, end mark included; longer sentences are cut '
                      f'(default {defaults["num_steps"]}; bpe {DEFAULTS_OF_BPE["num_steps"]})')
    add_setting(p.group('model'), defaults, '-d', '--dropout', type=fraction, metavar='P', help=f'dropout rate, {dropped}')
    if presets:
        add_preset_flag(p.group('presets'), presets)
    training.add_argument('--recipe', choices=list(recipes), metavar='NAME',
                          help='flags found by search for this time on two cores (docs/quality.md); flags given besides take '
                          f'precedence (default: none; names: {", ".join(recipes)})')
    _add_schedule_flags(p.group('schedule'), defaults)
    add_gpu_flag(p, fp8)
    add_quant_flags(p, 'as in the checkpoint, in a new run $CUSTOM_QUANT_TYPE, else none')
    add_rank_flags(p, 'as in the checkpoint, in a new run ')
    add_plan_flags(p)
    add_finite_flags(p)
    from pyops.inspect.flags import add_saving_flags  # not at the top: only training saves tensors
    add_saving_flags(p)
    return p


def parse_training(parser, argv, recipes):
    """Return the parsed flags of a training program, and as `argv` the text of all; its --recipe is read before other flags.

    recipes: {name: flags, one text}
    """
    argv = sys.argv[1:] if argv is None else argv
    name = parser.parse_args(argv).recipe
    args = parser.parse_args([*recipes[name].split(), *argv] if name else argv)
    if args.patience and not args.keep_best:
        parser.error(f'--patience {args.patience}: expected --keep-best bleu or loss, the value to wait for')
    args.argv = list(argv)
    return args


def _add_schedule_flags(group, defaults):
    """Add the flags of the schedule of the learning rate, of label smoothing and of averages."""
    add_setting(group, defaults, '--smoothing', type=fraction, metavar='P',
                help='label smoothing: the share of a label that is spread over all words')
    add_setting(group, defaults, '--warmup', type=non_negative_int,
                help='steps in which the learning rate rises')
    add_setting(group, defaults, '--schedule', choices=SCHEDULES,
                help='then the rate falls with the square root of the step (without --warmup: constant), or along a line or a '
                     'cosine to 0 at the end of epoch -e')
    add_setting(group, defaults, '--ema', type=fraction, metavar='D',
                help='validate and translate with a moving average of the weights that keeps the share D per step; 0: none')


def defaults_of(args, found, defaults):
    """Return `defaults` changed for the tokenizer that the flags or the checkpoint found select.

    UserError if a flag was given that only the other tokenizer has.
    """
    if found.state:
        found.state['settings'].setdefault('tokenizer', 'word')         # checkpoints from before there were subwords
    tokenizer = args.tokenizer or (found.state['settings'] if found.state else defaults)['tokenizer']
    for name, only in (('min_count', 'word'), ('vocabulary', 'bpe'), ('bpe_dropout', 'bpe')):
        if (value := getattr(args, name)) is not None and tokenizer != only:
            flag = f'--{name.replace("_", "-")}'
            raise UserError(f'{flag} {value}: requires --tokenizer {only}, and this run has {tokenizer}; leave {flag} out')
    return defaults | (DEFAULTS_OF_BPE if tokenizer == 'bpe' else {})


def serving_parser(program, docstring=None):
    """Return the parser of a program that translates with a checkpoint; use it with `parse_serving`."""
    p = ArgumentParser(prog=programs.command(program), description='Translate English to French with a checkpoint.',
                       docstring=docstring)
    group = p.group('translation')
    group.add_argument('sentence', nargs='*', help='a sentence to translate; -: standard input (default)')
    group.add_argument('-c', '--checkpoint', required=True, metavar='PATH',
                       help='a checkpoint, or a folder: its best or newest checkpoint (required)')
    group.add_argument('-i', '--input', metavar='FILE',
                       help='translate the lines of a text in UTF-8, which may be compressed with gzip; -: standard input '
                       '(default)')
    group.add_argument('--skip-bad', action='store_true',
                       help='print a blank line for a line that is not UTF-8 or longer than 1 MiB, with a warning (default: '
                       'end with an error)')
    group.add_argument('--max-len', type=positive_int, metavar='N',
                       help='tokens of a translation, end mark included, at most (default: --num-steps of the training run)')
    group.add_argument('-b', '--batch-size', type=positive_int, metavar='N',
                       help='sentences per batch; sentences of similar length are translated together '
                       f'(default: {BATCH_ROWS} divided by --beam)')
    group.add_argument('--alignments', action='store_true',
                       help='also print which source token each token attends to most, as SOURCE-OUTPUT pairs; with --json '
                       'all weights')
    group.add_argument('--json', action='store_true', help='print a JSON object for each line')
    group.add_argument('--test', type=positive_int, metavar='N',
                       help='translate N held-out sentences, then score all held-out sentences')
    group.add_argument('-f', '--corpus', metavar='FILE',
                       help='with --test: the corpus of the training run (default: fra-eng if found, else embedded)')
    group.add_argument('--data-dir', metavar='DIR',
                       help='with --test: search for fra-eng and tatoeba-test only in DIR (default: $PYOPS_DATA, then ./data)')
    _add_search_flags(p, 'print')
    add_threads_flag(p, 'translation')
    add_processes_flag(group, 'only this one', f'one for each thread, at most {PROCESSES}, for a text that takes more than '
                       f'{WORTH:g} s; else, and on a GPU, 1')
    add_gpu_flag(p)
    add_quant_flags(p, 'as in the checkpoint')
    add_compute_flag(p)
    return p


def add_processes_flag(group, one, default):
    """--processes N.   one: which process translates with N = 1;  default: for --help"""
    group.add_argument('--processes', type=int_up_to(64), metavar='N',
                       help='processes that translate, each with its part of the threads and its own copy of the weights; '
                       f'1: {one} (default: {default})')


def averaging_parser(program, docstring=None):
    """Return the parser of a program that averages checkpoints."""
    p = ArgumentParser(prog=programs.command(program), docstring=docstring,
                       description='Write a checkpoint whose parameters are the means over several checkpoints.')
    group = p.group('average')
    group.add_argument('checkpoint', nargs='+', help='two or more checkpoints of a run; or its folder: its newest ones')
    group.add_argument('-o', '--output', type=output_file, required=True, metavar='FILE',
                       help='the checkpoint to write, a name that ends in .safetensors (required)')
    group.add_argument('--last', type=int_up_to(1000), metavar='N',
                       help=f'of a folder: average its newest N checkpoints (default {AVERAGED}, or all if there are fewer)')
    return p


def evaluation_parser(program, docstring=None):
    """Return the parser of a program that evaluates a checkpoint; use it with `parse_evaluation`."""
    p = ArgumentParser(prog=programs.command(program), docstring=docstring,
                       description='Score the translations of held-out sentences or of a test set: BLEU, chrF.')
    group = p.group('evaluation')
    group.add_argument('-c', '--checkpoint', required=True, metavar='PATH',
                       help='a checkpoint, or a folder: its best or newest checkpoint (required)')
    group.add_argument('-f', '--corpus', metavar='FILE',
                       help='the corpus of the training run (default: fra-eng if found, else embedded)')
    group.add_argument('--data-dir', metavar='DIR',
                       help='search for fra-eng and tatoeba-test only in DIR (default: $PYOPS_DATA, then ./data)')
    group.add_argument('--test-set', metavar='FILE',
                       help='score the sentences of tatoeba-test or of a file that do not occur in training '
                       '(default: the held-out sentences)')
    group.add_argument('--part', choices=('test', 'validation'), default='test',
                       help='which held-out sentences (default %(default)s)')
    group.add_argument('--first', type=positive_int, metavar='N', help='only the first N of them (default: all)')
    group.add_argument('-b', '--batch-size', type=positive_int, default=128, metavar='N',
                       help='sentences per batch (default %(default)s)')
    group.add_argument('--json', action='store_true', help='print the scores as one line of JSON, and nothing else')
    group.add_argument('-o', '--output', type=output_file, metavar='FILE',
                       help='write source, translation and references of each sentence, separated by tabs')
    _add_search_flags(p, 'with --output: write')
    add_threads_flag(p, 'evaluation')
    add_gpu_flag(p)
    add_quant_flags(p, 'as in the checkpoint')
    add_compute_flag(p)
    return p


def _add_search_flags(parser, output):
    """Add the flags of beam search; output: what --nbest and --scores do with their results."""
    group = parser.group('search')
    group.add_argument('--beam', type=int_up_to(LARGEST_BEAM), default=BEAM, metavar='N',
                       help='hypotheses per sentence; 1: greedy decoding (default %(default)s)')
    group.add_argument('--nbest', type=int_up_to(LARGEST_BEAM), default=1, metavar='N',
                       help=f'{output} the N best translations of each sentence, at most --beam (default %(default)s)')
    group.add_argument('--length-penalty', type=non_negative_float, default=LENGTH_PENALTY, metavar='X',
                       help='divide the log probability of a translation by its length to the power of X (default %(default)s)')
    group.add_argument('--scores', action='store_true', help=f'{output} the score of each translation')


def _check_search(parser, args):
    if args.nbest > args.beam:
        parser.error(f'--nbest {args.nbest}: expected at most --beam {args.beam}; lower --nbest or raise --beam')


def parse_evaluation(parser, argv):
    """Return the parsed flags of an `evaluation_parser`."""
    args = parser.parse_args(argv)
    _check_search(parser, args)
    if args.test_set is not None and args.part != 'test':
        parser.error(f'--test-set {args.test_set}: expected no --part {args.part}; leave one of them out')
    for flag, given in ((f'--nbest {args.nbest}', args.nbest > 1), ('--scores', args.scores)):
        if given and not args.output:
            parser.error(f'{flag}: expected --output FILE, the file to write to')
    return args


def parse_serving(parser, argv):
    """Return the parsed flags of a `serving_parser`."""
    args = parser.parse_args(argv)
    _check_search(parser, args)
    for flag, given in ((f'--test {args.test}', args.test), (f'--input {args.input}', args.input is not None)):
        if given and args.sentence:
            parser.error(f'{flag}: expected no sentence, got {args.sentence[0]!r}; leave one of them out')
    if args.input == '':
        parser.error("--input '': expected a file, or - for standard input")
    if args.test and args.input is not None:
        parser.error(f'--test {args.test}: expected no --input; it translates held-out sentences')
    return args
