"""Inference with a trained checkpoint: sentences, standard input, or held-out sentences.

A program calls these functions with its own function open_checkpoint(path, args) -> Translator, state.
"""
from pyops.errors import UserError
from pyops.flags import use_device
from pyops.text.preprocess import tokenize

_BATCHES = 16       # translated together by evaluate(), sorted by length


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
    args: the parsed flags.  Quantization is as in the training run unless args has another --quant.  Decoding is greedy unless
    args has the flags of beam search.
    """
    from pyops import checkpoint, fit, quantization
    from pyops.text import tokenizer
    from pyops.text.decoding import Search
    from pyops.text.training import check_program
    from pyops.text.translation import Translator

    if path is None:
        raise UserError('-e 0 serves a checkpoint: name it, or its folder, with -c')
    found = checkpoint.find(path, serving=True)
    print(found.line)
    check_program(found, program)
    state = found.state
    vocabularies = tokenizer.restore(state['vocabularies'])
    settings = state['settings'] | quantization.resolve(args, state['settings'])
    model = build(settings, *map(len, vocabularies))
    if settings['quant'] != 'none':
        print(model.config.ops.check())
    fit.restore(model.params, None, found.tensors, found.path)
    print('loaded from checkpoint')
    search = Search(model.config.num_steps, args.beam, args.nbest, args.length_penalty) if hasattr(args, 'beam') else None
    return Translator(model, *vocabularies, model.config.num_steps, lines, search, getattr(args, 'scores', False)), state


def serve(args, open_checkpoint):
    """Translate standard input line by line until it ends."""
    if getattr(args, 'save_tensors', None) is not None:         # a flag of training programs, which serve with -e 0
        raise UserError('--save-tensors: -e 0 serves and runs no training step whose tensors could be saved')
    from pyops.text.repl import serve as serve_lines
    translator, _ = open_checkpoint(args.checkpoint, args)
    print('serving mode', flush=True)
    serve_lines(translator.answer)


def test(args, translator, state):
    """Translate and score the sentences held out from the checkpoint's training."""
    from pyops.text.split import hold_out
    corpus, fraction, line = trained_corpus(args, translator, state)
    print(line)
    score(translator, translator.target_vocabulary.read_corpus(hold_out(corpus, fraction)[2]), args.test)


def evaluate(args, open_checkpoint):
    """Translate held-out sentences and print their scores, as the flags of pyops.text.flags.evaluation_parser ask."""
    import contextlib
    import json
    import sys

    from pyops.text import evaluation
    from pyops.training import Progress
    evaluation.check()
    use_device(args)
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        translator, state = open_checkpoint(args.checkpoint, args)
        corpus, fraction, line = trained_corpus(args, translator, state)
        print(line)
        sources, references, left_out = evaluation.test_set(corpus, fraction, args.part)
        print(f'{args.part} : {len(sources)} sentences; {left_out} more have a translation that occurs in training', flush=True)
    sources, references = sources[:args.first], references[:args.first]
    outputs, at_once = [], _BATCHES * args.batch_size
    with Progress(len(sources), 'sentences', label='translated ', file=sys.stderr, after=2.0, every=5.0) as progress:
        for first in range(0, len(sources), at_once):
            outputs += translator.translate(sources[first:first + at_once], args.batch_size, args.beam, args.nbest,
                                            args.length_penalty, scores=args.scores)
            progress.update(len(outputs))
    if args.output:
        with open(args.output, 'w', encoding='utf-8') as file:
            for source, found, some in zip(sources, outputs, references, strict=True):
                for text, score in found:
                    print(source, text, *([f'{score:.4f}'] if args.scores else []), *some, sep='\t', file=file)
    report = dict(beam=args.beam, length_penalty=args.length_penalty) | evaluation.evaluate(
        [text for (text, _), *_ in outputs], sources, references)
    print(json.dumps(report) if args.json else evaluation.text(report))


def trained_corpus(args, translator, state):
    """Return the corpus on which a checkpoint was trained, the fraction held out of it, and a line that names the corpus.

    A converted checkpoint (transformer.from_marian) was trained on none: then it is the corpus that the flags select.
    UserError if nothing was held out, or the corpus is another one.
    """
    from pyops.text import tokenizer
    from pyops.text.pairs import Pairs
    from pyops.text.split import hold_out
    from pyops.text.translation import check_vocabularies, open_corpus
    settings = dict(tokenizer='word', min_count=3) | state['settings']      # older checkpoints lack some
    if not settings['hold_out']:
        raise UserError(f'{args.checkpoint}: nothing was held out of its training; train with --hold-out 0.1 to have a test')
    whole, line = open_corpus(args.corpus, args.data_dir, settings.get('tiny'))
    if state['pairs'] is None:
        return whole, settings['hold_out'], line
    corpus = whole.first(settings.get('pairs') or None)
    training, _, _ = hold_out(corpus, settings['hold_out'])
    vocabularies = translator.source_vocabulary, translator.target_vocabulary
    check_vocabularies(args.checkpoint, state, tokenizer.of_corpus(whole, settings, vocabularies),
                       Pairs.encode(vocabularies[0].read_corpus(training), *vocabularies, translator.num_steps))
    return corpus, settings['hold_out'], line


def score(translator, test, show=0):
    """Translate all test sentences and print the share that is exactly right.  Also print `show` of them with their references,
    the number of references longer than an output can be, and BLEU of lower-case words if sacrebleu is installed."""
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
    lengths = translator.lengths([reference for references in known.values() for reference in references])
    longer = int((lengths > translator.num_steps).sum())
    note = f'; {longer} of {len(lengths)} references are longer than {translator.num_steps} tokens, the longest output'
    print(f'held-out test : {share:.1%} of {len(known)} unseen sentences translated exactly' + note * bool(longer), flush=True)
    if find_spec('sacrebleu'):
        score = bleu([_tokenized(output) for output in outputs.values()],
                     [[_tokenized(reference) for reference in some] for some in known.values()])
        print(f'BLEU : {score:.2f}', flush=True)


def _tokenized(text):
    """Return a text as lower-case tokens joined by spaces, so that BLEU is comparable between tokenizers."""
    return ' '.join(tokenize(text))
