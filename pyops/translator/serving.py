"""Inference with a trained checkpoint: one sentence, standard input, or held-out sentences.

Implements `python -m PROGRAM.translate` and `python -m PROGRAM.train -e 0`.
"""
from pyops.errors import UserError
from pyops.training import ArgumentParser, add_gpu_flag, add_quant_flags, add_threads_flag, positive_int, use_gpu


def parser(program):
    p = ArgumentParser(prog=f'python -m {program.name}.translate',
                       description='Translate English to French with a checkpoint.')
    group = p.group('translation')
    group.add_argument('sentence', nargs='*', help='a sentence to translate (default: read lines from standard input)')
    group.add_argument('-c', '--checkpoint', required=True, metavar='PATH',
                       help='a checkpoint, or a folder: its newest checkpoint (required)')
    group.add_argument('--test', type=positive_int, metavar='N',
                       help='translate N held-out sentences, then score all held-out sentences')
    group.add_argument('-f', '--corpus', metavar='FILE',
                       help='with --test: the corpus of the training run (default: fra-eng if found, else embedded)')
    group.add_argument('--data-dir', metavar='DIR',
                       help='with --test: search for fra-eng only in DIR (default: $PYOPS_DATA, then ./data)')
    add_threads_flag(p, 'translation')
    add_gpu_flag(p)
    add_quant_flags(p, 'as in the checkpoint')
    return p


def parse(program, argv=None):
    p = parser(program)
    args = p.parse_args(argv)
    if args.test and args.sentence:
        p.error(f'--test {args.test}: expected no sentence, got {args.sentence[0]!r}; it translates held-out sentences')
    return args


def main(program, argv=None):
    args = parse(program, argv)
    use_gpu(args)
    if args.threads:
        from pyops import backend
        backend.set_threads(args.threads)
    if args.test:
        return test(program, args)
    if not args.sentence:
        return serve(program, args.checkpoint, args)
    translator, _ = open_checkpoint(program, args.checkpoint, args)
    for sentence in args.sentence:
        for line in translator.answer(sentence):
            print(line)


def open_checkpoint(program, path, args=None):
    """Load the checkpoint that -c names, print lines about it, and return the Translator and the checkpoint's state.

    args: the parsed flags.  Quantization is as in the training run unless args has another --quant.
    """
    from pyops import checkpoint, fit, quantization
    from pyops.text.translation import Translator
    from pyops.text.vocabulary import Vocabulary

    if path is None:
        raise UserError('-e 0 serves a checkpoint: name it, or its folder, with -c')
    found = checkpoint.find(path, serving=True)
    print(found.line)
    tensors, state = program.load(found)
    vocabularies = [Vocabulary(state['vocabularies'][which]) for which in ('source', 'target')]
    architecture = program.architecture()
    settings = state['settings'] | quantization.resolve(args, state['settings'])
    config = architecture.configure(settings, *map(len, vocabularies))
    model = architecture.model(config, seed=None)           # skip initial values: restore() overwrites them
    if settings['quant'] != 'none':
        print(config.ops.check())
    fit.restore(model.params, None, tensors, found.path)
    print('loaded from checkpoint')
    return Translator(model, *vocabularies, config.num_steps, program.answer), state


def serve(program, path, args=None):
    """Translate standard input line by line until it ends."""
    from pyops.text.repl import serve as serve_lines
    translator, _ = open_checkpoint(program, path, args)
    print('serving mode', flush=True)
    serve_lines(translator.answer)


def test(program, args):
    """Translate and score the sentences held out from the checkpoint's training."""
    from pyops.text.split import hold_out
    from pyops.text.translation import Pairs, check_vocabularies, open_corpus
    translator, state = open_checkpoint(program, args.checkpoint, args)
    fraction = state['settings']['hold_out']
    if not fraction:
        raise UserError(f'{args.checkpoint}: nothing was held out of its training; train with --hold-out 0.1 to have a test')
    corpus, line = open_corpus(args.corpus, args.data_dir, state['settings'].get('tiny'))
    print(line)
    training, _, held_out = hold_out(corpus.first(state['settings'].get('pairs') or None), fraction)
    vocabularies = translator.source_vocabulary, translator.target_vocabulary
    check_vocabularies(args.checkpoint, state, corpus.vocabularies(state['settings'].get('min_count', 3)),
                       Pairs.encode(training, *vocabularies, translator.num_steps))
    score(translator, held_out, args.test)


def score(translator, test, show=0):
    """Translate all test sentences and print the share that is exactly right.  Also print `show` of them with their references,
    the number of references longer than an output can be, and BLEU if sacrebleu is installed."""
    from importlib.util import find_spec

    from pyops.text.score import bleu, exact_match
    from pyops.text.split import references
    known = references(test)
    outputs = dict(zip(known, translator.sentences(list(known)), strict=True))
    # Every k-th sentence, so that both short and long ones are shown.
    shown = list(known)[::max(1, len(known) // show)][:show] if show else []
    for source in shown:
        right = outputs[source] in known[source]
        print(f'{source}\n  -> {outputs[source]}' + ('' if right else f'\n  wrong, expected: {" | ".join(known[source])}'))
    if shown:
        print(f'{sum(outputs[source] in known[source] for source in shown)} of {len(shown)} unseen sentences are right')
    share = exact_match(list(outputs.values()), list(known.values()))
    lengths = [len(reference.split()) for references in known.values() for reference in references]
    longer = sum(length > translator.num_steps for length in lengths)
    note = f'; {longer} of {len(lengths)} references are longer than {translator.num_steps} tokens, the longest output'
    print(f'held-out test : {share:.1%} of {len(known)} unseen sentences translated exactly' + note * bool(longer), flush=True)
    if find_spec('sacrebleu'):
        print(f'BLEU : {bleu(list(outputs.values()), list(known.values())):.2f}', flush=True)
