"""The command line of the translators: translate text, evaluate a checkpoint, serve one.

Standard output has translations only, one line for each line of the input; all else is printed to standard error.
"""
import contextlib
import gc
import io
import json
import math
import select
import sys
import zlib
from typing import NamedTuple

from pyops.errors import UserError
from pyops.flags import use_device
from pyops.text.flags import LENGTH_PENALTY, serving_parser
from pyops.text.preprocess import tokenize

_CHUNK = 1 << 17        # most bytes read at once; more than the buffer of a file
_LONGEST = 1 << 20      # most bytes of a line
_WINDOW = 1 << 22       # most characters of a window; its last line may exceed them
_BLOCK = 4096           # bytes that a writer sends at once if it does not wait for an answer to each line
_PAUSE = 50             # milliseconds in which such a writer sends more
_GZIP = b'\x1f\x8b'
_WARNINGS = 10          # most lines that are named as too long


def translate(args, program):
    """Run `python -m PROGRAM.translate`: args are the flags of pyops.text.flags.serving_parser."""
    with _without_collections():
        use_device(args)
        translator, start = open_with_start(args, program)
    if args.max_len is not None and args.max_len > translator.num_steps:
        raise UserError(f'--max-len {args.max_len}: expected 1 to {translator.num_steps}, the length of sentences in training')
    if args.alignments and not translator.model.attends:
        raise UserError(f'--alignments: {translator.path} has no attention; leave it out, or train seq2seq with --attention 1')
    if args.test:
        print(f'loading from checkpoint : {translator.path}')
        return test(args, translator)
    if args.sentence not in ([], ['-']):
        output = Output(translator, args)
        output.write(args.sentence)
        return output.finish()
    run(args, translator, start)


@contextlib.contextmanager
def _without_collections():
    """Pause the garbage collector: while modules and a checkpoint are loaded, it takes 10 ms to find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def serve(args, program):
    """Translate the standard input of a training program with -e 0, as PROGRAM.translate does with its defaults.  A line that
    is not UTF-8 does not end it."""
    if args.save_tensors is not None:
        raise UserError('--save-tensors: -e 0 serves and runs no training step whose tensors could be saved')
    if args.checkpoint is None:
        raise UserError('-e 0 serves a checkpoint: name it, or its folder, with -c')
    run(serving_parser(program).parse_args(['-c', '.', '--skip-bad']), *open_with_start(args, program))


def open_translator(args, program):
    """Return the Translator of the checkpoint that -c names, and print warnings about it on standard error.

    UserError if it belongs to another program.
    """
    return open_with_start(args, program)[0]


def open_with_start(args, program):
    """Return open_translator(args, program), and the Start of other processes that translate alike."""
    from pyops import checkpoint, quantization
    from pyops.text.processes import Start
    from pyops.text.translator import of_checkpoint
    found = checkpoint.find(args.checkpoint, serving=True, parameters_only=True)
    checkpoint.check_program(found, program)
    replaced = quantization.resolve(args, found.state['settings']) | {'compute': getattr(args, 'compute', None)}
    translator = of_checkpoint(found, replaced)
    if translator.rounding:
        print(translator.rounding, file=sys.stderr)
    return translator, Start.of(found.path, replaced, args)


def run(args, translator, start):
    """Translate --input or standard input, to its end; on a terminal, at a prompt.   start: of other processes"""
    if args.input in (None, '-'):
        if sys.stdin is None:                                   # closed by the parent process
            return
        if sys.stdin.isatty() and sys.stdout.isatty():
            from pyops.text.repl import serve as serve_terminal
            from pyops.text.session import Session
            session = Session(translator, args)
            return serve_terminal(session.answer, session.commands, session.words)
        return _translate_file(args, translator, start, sys.stdin.buffer, 'standard input')
    try:
        file = open(args.input, 'rb')
    except FileNotFoundError as error:
        raise UserError(f'{args.input}: no such file; give a text, or - for standard input') from error
    except OSError as error:
        raise UserError(f'{args.input}: cannot be read ({error.strerror or error}); give another text') from error
    with file:
        _translate_file(args, translator, start, file, args.input)


def _translate_file(args, translator, start, file, name):
    from pyops.training import Progress
    output = Output(translator, args)
    with divided(args, translator, start, output) as work, \
            contextlib.nullcontext() if sys.stderr.isatty() and sys.stdout.isatty() else Progress(
                None, 'lines', label='translated ', file=sys.stderr, after=2.0, every=5.0) as progress:
        def windows():
            for window in read_windows(file, name, work.window, args.skip_bad):
                if progress and output.number:
                    progress.update(output.number)
                yield window
        work.run(windows())
    output.finish()


def divided(args, translator, start, output, task=None):
    """Return the Divided that prints to an Output, in as many processes as the flags of a serving_parser ask.

    task: in place of `printed`
    """
    from pyops.text.divided import Divided
    from pyops.text.processes import default_number
    from pyops.text.translator import texts_per_batch
    return Divided(translator, task or printed, (args,), output.print, texts_per_batch(args.batch_size, args.beam), start,
                   args.processes or default_number(), at_once=args.processes is not None)


def read_windows(file, name, most, skip_bad=False):
    """Yield lists of at most `most` lines of a buffered binary file in UTF-8, which may be compressed with gzip.

    A list has as many lines as can be read without waiting.  So a pipe is answered line by line as long as its writer waits for
    the answers; a file is read in lists of `most` lines, fewer if they have more than _WINDOW characters.  An empty list comes
    before a read that may wait for the writer, and before an error: then print what you have.
    A byte order mark and line ends are removed.  Raises UserError for a line that is not UTF-8 or longer than _LONGEST bytes,
    after the lines before it; with skip_bad, it becomes '' after a warning on standard error.
    """
    window, size = [], 0
    try:
        for line in _lines(file, name, skip_bad):
            if line is not None:
                window.append(line)
                size += len(line)
            if window and (line is None or len(window) == most or size > _WINDOW):
                yield window
                window, size = [], 0
            if line is None:
                yield []
    except UserError:
        if window:
            yield window
        yield []
        raise
    if window:
        yield window


def _lines(file, name, skip_bad):
    """Yield the lines of a file as read_windows does, and None before a read that may wait for the writer."""
    number = 0
    for raw in _raw_lines(file, name):
        number += raw is not None
        try:
            text = None if raw is None else _decoded(raw, 'utf-8-sig' if number == 1 else 'utf-8')
        except ValueError as error:
            problem, remedy = error.args
            if not skip_bad:
                raise UserError(f'{name}: line {number}: {problem}; {remedy}, or give --skip-bad for a blank line in '
                                'its place') from None
            print(f'warning: {name}: line {number}: {problem}; its translation is blank', file=sys.stderr, flush=True)
            text = ''
        yield text


def _decoded(raw, encoding):
    """Return a line as text.   ValueError(problem, remedy)"""
    if len(raw) > _LONGEST:
        raise ValueError(f'longer than {_LONGEST} bytes', 'divide it into sentences')
    try:
        return raw.decode(encoding).rstrip('\r')
    except UnicodeDecodeError as error:
        raise ValueError(f'not UTF-8 (byte 0x{raw[error.start]:02x} at position {error.start + 1})', 'convert it') from None


def _raw_lines(file, name):
    """Yield the lines of a file as bytes, of a line longer than _LONGEST only its start, and None before a read that may wait.

    UserError if it cannot be read.
    """
    number, parts, size, chunk = 1, [], 0, b''                  # the parts of the line that has not ended
    try:
        file = _uncompressed(file)
        waits = _waiting(file)
        while True:
            if chunk and waits(len(chunk)):
                yield None
            chunk = file.read1(_CHUNK)
            if not chunk:
                break
            first, *others = chunk.split(b'\n')
            if size <= _LONGEST:                                # the rest of a longer one is dropped
                parts.append(first)
                size += len(first)
            if others:
                yield b''.join(parts)
                yield from others[:-1]
                number, parts, size = number + len(others), [others[-1]], len(others[-1])
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f'{name}: line {number}: cannot be read ({error}); get the file again') from error
    if size:
        yield b''.join(parts)


def _uncompressed(file):
    """Return a binary file, which may be compressed with gzip, as one that is not."""
    if file.peek(2)[:2] == _GZIP:
        import gzip
        return gzip.GzipFile(fileobj=file)
    return file


def _waiting(file):
    """Return waits(size), for a file whose last read returned `size` bytes: whether the next one waits for the writer.

    It returns False for a compressed file and one that is no file of the system, and, as poll does, for one on a disk.
    """
    try:
        number = file.fileno() if isinstance(file, io.BufferedReader) else None
    except OSError:
        number = None
    if number is None:
        return lambda size: False
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return lambda size: not poll.poll(_PAUSE if size >= _BLOCK else 0)


def printed(translator, texts, numbers, args):
    """Translate texts as the flags of a serving_parser ask.  Return for each its output, lines joined by line ends, and the end
    of a warning if it is too long, else None.   numbers: of the texts, from 0"""
    results = translator.translations(
        texts, args.beam, args.nbest, args.length_penalty, args.max_len, args.batch_size, alignments=args.alignments,
        scores=args.scores or args.json or args.nbest > 1)
    return [('\n'.join([as_json(text, found)] if args.json else lines(found, args, number)),
             found[0].too_long(text) if found[0].cut else None)
            for text, number, found in zip(texts, numbers, results, strict=True)]


class Output:
    """Prints translations as the flags of a serving_parser ask.   number: the texts so far"""

    def __init__(self, translator, args):
        self._translator, self._args, self.number, self._long = translator, args, 0, 0

    def write(self, texts):
        """Translate texts and print them."""
        self.print(printed(self._translator, texts, range(self.number, self.number + len(texts)), self._args))

    def print(self, results):
        """Print results of `printed`."""
        for text, too_long in results:
            print(text)
            self.number += 1
            if too_long:
                self._long += 1
                if self._long <= _WARNINGS:
                    print(f'warning: line {self.number}: {too_long}', file=sys.stderr, flush=True)
        sys.stdout.flush()

    def finish(self):
        """Print the number of the lines that were too long and have not been named."""
        if self._long > _WARNINGS:
            print(f'warning: {self._long - _WARNINGS} more lines are too long', file=sys.stderr, flush=True)


def lines(found, args, number=0):
    """Return the lines for the Translations of a text, in the form of Marian: [NUMBER ||| ]TEXT[ ||| ALIGNMENT][ ||| SCORE]."""
    result = []
    for some in found:
        fields = [str(number), some.text] if args.nbest > 1 else [some.text]
        if args.alignments:
            fields.append(pairs(some))
        if args.scores or args.nbest > 1:
            fields.append(f'{some.score:.4f}')
        result.append(' ||| '.join(fields))
    return result


def pairs(translation):
    """Return the source token with the largest weight for each output token, as SOURCE-OUTPUT, counted from 0."""
    return ' '.join(f'{weights.argmax()}-{i}' for i, weights in enumerate(translation.alignment))


def as_json(text, found):
    """Return the Translations of a text as one line of JSON."""
    first = found[0]
    outputs = [output_fields(some) for some in found]
    return json.dumps(dict(source=text, tokens=first.source, cut=first.cut, unknown=first.unknown, translations=outputs),
                      ensure_ascii=False, allow_nan=False)


def output_fields(translation):
    """Return text, score, tokens and, if there is one, the alignment of a Translation, for JSON.  JSON has neither NaN nor
    infinities, the scores of a model that has diverged: they become None."""
    fields = dict(text=translation.text, score=_rounded(translation.score, 6), tokens=translation.tokens)
    if translation.alignment is not None:
        fields['alignment'] = [[_rounded(float(weight), 4) for weight in row] for row in translation.alignment]
    return fields


def _rounded(number, digits):
    return round(number, digits) if math.isfinite(number) else None


def test(args, translator):
    """Translate and score the sentences held out from the checkpoint's training."""
    from pyops.text.split import hold_out
    trained = trained_corpus(args, translator)
    print(trained.line)
    _, _, held_out = hold_out(trained.corpus, trained.hold_out, trained.excluded)
    score(translator, translator.target_vocabulary.read_corpus(held_out), args.test, args.beam, args.length_penalty)


def evaluate(args, program):
    """Run `python -m PROGRAM.evaluate`: translate held-out sentences or a test set and print the scores, as the flags of
    pyops.text.flags.evaluation_parser ask."""
    from pyops.text import evaluation
    from pyops.text.testsets import open_test_set
    from pyops.training import Progress
    evaluation.check()
    use_device(args)
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        tests = None if args.test_set is None else open_test_set(args.test_set, args.data_dir)
        translator = open_translator(args, program)
        print(f'loading from checkpoint : {translator.path}')
        if tests:
            sources, references, left_out = _unseen(args, translator, tests)
        else:
            trained = trained_corpus(args, translator)
            print(trained.line)
            sources, references, left_out = evaluation.test_set(trained.corpus, trained.hold_out, args.part, trained.excluded)
            print(f'{args.part} : {len(sources)} sentences; {left_out} more have a translation that occurs in training',
                  flush=True)
    sources, references = sources[:args.first], references[:args.first]
    outputs = []
    with Progress(len(sources), 'sentences', label='translated ', file=sys.stderr, after=2.0, every=5.0) as progress:
        for found in translator.translations(iter(sources), args.beam, args.nbest, args.length_penalty, None, args.batch_size,
                                             scores=args.scores):
            outputs.append(found)
            progress.update(len(outputs))
    if args.output:
        with open(args.output, 'w', encoding='utf-8') as file:
            for source, found, some in zip(sources, outputs, references, strict=True):
                for translation in found:
                    print(source, translation.text, *([f'{translation.score:.4f}'] if args.scores else []), *some, sep='\t',
                          file=file)
    report = dict(beam=args.beam, length_penalty=args.length_penalty,
                  test_set=tests and dict(path=tests.path, sha256=tests.sha256), left_out=left_out)
    report |= evaluation.evaluate([best.text for best, *_ in outputs], sources, references)
    print(json.dumps(report) if args.json else evaluation.text(report))


def _unseen(args, translator, tests):
    """Return sources, references and the number left out of the TestSet, without the sentences that occur in the training of a
    checkpoint, and print lines about them."""
    if translator.state['pairs'] is None:
        print(f'test set : {tests.path}, {len(tests.sources)} sentences; none is left out: the training corpus of a converted '
              'checkpoint is not known', flush=True)
        return tests.sources, tests.references, 0
    trained = trained_corpus(args, translator, is_scored=False)
    print(trained.line)
    sources, references, left_out = tests.unseen(trained.training)
    print(f'test set : {tests.path}, {len(sources)} sentences; {left_out} more occur in training', flush=True)
    return sources, references, left_out


class Trained(NamedTuple):
    """The corpus that a checkpoint was trained on.

    corpus: before it was divided;  hold_out: share that was held out;  excluded: pairs excluded from training, as in
    pyops.text.split.hold_out;  training: the pairs it was trained on, None if they are not known;  line: names the corpus
    """
    corpus: object
    hold_out: float
    excluded: object
    training: object
    line: str


def trained_corpus(args, translator, is_scored=True):
    """Return the Trained of a checkpoint.

    The training corpus of a converted checkpoint (transformer.from_marian) is not known: it is the one that the flags select.
    is_scored: whether held-out sentences of the corpus are required
    UserError if they are and nothing was held out, or the corpus or the test set excluded from training is another one.
    """
    from pyops.text import tokenizer
    from pyops.text.pairs import Pairs
    from pyops.text.split import hold_out
    from pyops.text.testsets import open_excluded
    from pyops.text.translation import check_vocabularies, open_corpus
    state = translator.state
    settings = dict(tokenizer='word', min_count=3) | state['settings']      # older checkpoints lack some
    if is_scored and not settings['hold_out']:
        raise UserError(f'{args.checkpoint}: nothing was held out of its training; train with --hold-out 0.1 to have a test')
    whole, line = open_corpus(args.corpus, args.data_dir, settings.get('tiny'))
    if state['pairs'] is None:
        return Trained(whole, settings['hold_out'], None, None, line)
    recorded, excluded = state.get('excluded'), None
    if recorded:
        excluded = open_excluded(args.checkpoint, recorded, args.data_dir).occurs_in(whole)
    corpus = whole.first(settings.get('pairs') or None)
    of_chosen = excluded if excluded is None else excluded[:len(corpus)]
    training, _, _ = hold_out(corpus, settings['hold_out'], of_chosen)
    vocabularies = translator.source_vocabulary, translator.target_vocabulary
    check_vocabularies(args.checkpoint, state, tokenizer.of_corpus(whole, settings, vocabularies, excluded),
                       Pairs.encode(vocabularies[0].read_corpus(training), *vocabularies, translator.num_steps))
    return Trained(corpus, settings['hold_out'], of_chosen, training, line)


def score(translator, test, show=0, beam=1, length_penalty=LENGTH_PENALTY):
    """Translate all test sentences and print the share that is exactly right.  Also print `show` of them with their references,
    the number of references longer than an output can be, and BLEU of lower-case words if sacrebleu is installed."""
    from importlib.util import find_spec

    from pyops.text.score import bleu, exact_match
    from pyops.text.split import references
    known = references(test)
    outputs = dict(zip(known, translator.sentences(list(known), beam=beam, length_penalty=length_penalty), strict=True))
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
