"""Inference with a trained checkpoint: sentences, standard input, or held-out sentences.

A program calls these functions with its own function open_checkpoint(path, args) -> Translator, state.
"""
from pyops.errors import UserError
from pyops.flags import use_device


def translate(args, open_checkpoint):
    """Do what the flags of pyops.text.flags.serving_parser ask: translate sentences or standard input, or run the test."""
    use_device(args)
    if args.test:
        return test(args, *open_checkpoint(args.checkpoint, args))
    if not args.sentence:
        return serve(args, open_checkpoint)
    translator, _ = open_checkpoint(args.checkpoint, args)
    for sentence in args.sentence:
        for line in translator.answer(sentence):
            print(line)


def load(path, program, build, lines, args=None):
    """Load the checkpoint that -c names, print lines about it, and return the Translator and the checkpoint's state.

    build(settings, source_size, target_size): returns the model;  lines: as for Translator
    args: the parsed flags.  Quantization is as in the training run unless args has another --quant.
    """
    from pyops import checkpoint, fit, quantization
    from pyops.text.training import check_program
    from pyops.text.translation import Translator
    from pyops.text.vocabulary import Vocabulary

    if path is None:
        raise UserError('-e 0 serves a checkpoint: name it, or its folder, with -c')
    found = checkpoint.find(path, serving=True)
    print(found.line)
    check_program(found, program)
    state = found.state
    vocabularies = [Vocabulary(state['vocabularies'][which]) for which in ('source', 'target')]
    settings = state['settings'] | quantization.resolve(args, state['settings'])
    model = build(settings, *map(len, vocabularies))
    if settings['quant'] != 'none':
        print(model.config.ops.check())
    fit.restore(model.params, None, found.tensors, found.path)
    print('loaded from checkpoint')
    return Translator(model, *vocabularies, model.config.num_steps, lines), state


def serve(args, open_checkpoint):
    """Translate standard input line by line until it ends."""
    if getattr(args, 'save_tensors', None) is not None:         # a flag of training programs, of which -e 0 serves
        raise UserError('--save-tensors: -e 0 serves and runs no training step whose tensors could be saved')
    from pyops.text.repl import serve as serve_lines
    translator, _ = open_checkpoint(args.checkpoint, args)
    print('serving mode', flush=True)
    serve_lines(translator.answer)


def test(args, translator, state):
    """Translate and score the sentences held out from the checkpoint's training."""
    from pyops.text.split import hold_out
    from pyops.text.translation import Pairs, check_vocabularies, open_corpus
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
