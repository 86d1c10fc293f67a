"""The translator at the prompt: answers to lines, and commands that change the settings."""
import bisect
import functools
import sys
import time

from pyops.text import repl
from pyops.text.flags import LARGEST_BEAM
from pyops.text.vocabulary import SPECIALS, Vocabulary

_MOST = 40          # tokens of a row of the table of attention
_SPACE = '▁'        # in a subword that is shown


class Session:
    """Translates lines as the flags of a serving_parser ask.

    commands: {name: (function, help)} for pyops.text.repl.serve; a function takes the text after the name and yields lines
    """

    def __init__(self, translator, args):
        self._translator, self._args, self._shows_time = translator, args, False
        commands = {
            'beam': ('N', self._beam, f'search with N hypotheses, 1 to {LARGEST_BEAM}; 1 is greedy decoding'),
            'nbest': ('N', self._nbest, 'print the N best translations, at most the beam'),
            'score': ('on|off', self._score, 'print the score of each translation'),
            'attn': ('on|off', self._attention, 'print the attention of the output to the source in percent'),
            'time': ('on|off', self._time, 'print the time that each line takes'),
        }
        self.commands = {name: (function, f'{values:{repl.COLUMN - len(name)}}{text}')
                         for name, (values, function, text) in commands.items()}

    @functools.cached_property
    def _words(self):
        """The words to complete, sorted: a vocabulary's, or the subwords that begin a word and have letters alone."""
        vocabulary = self._translator.source_vocabulary
        tokens = vocabulary.words(range(len(SPECIALS), len(vocabulary)))
        if isinstance(vocabulary, Vocabulary):
            return sorted(tokens)
        return sorted(token[1:] for token in tokens if token[0] == _SPACE and len(token) > 2 and token[1:].isalpha())

    def words(self, prefix):
        """Return at most 100 words of the source language that begin with a prefix, in alphabetical order.

        With subwords: the words, and beginnings of longer ones, that are one subword, of both languages if they share the
        subwords.
        """
        if not prefix:
            return []
        first = bisect.bisect_left(self._words, prefix)
        return [word for word in self._words[first:first + 100] if word.startswith(prefix)]

    def answer(self, line):
        """Yield the lines to print for a line."""
        args, start = self._args, time.perf_counter()
        found = self._translator.translations(line, args.beam, args.nbest, args.length_penalty, args.max_len,
                                              alignments=args.alignments, scores=args.scores or args.nbest > 1)
        seconds = time.perf_counter() - start
        if found[0].unknown:
            yield f'unknown words : {" ".join(found[0].unknown)}'
        if found[0].cut:
            print(f'warning: {found[0].too_long(line)}', file=sys.stderr, flush=True)
        for some in found:
            yield some.text + (f'   {some.score:.4f}' if args.scores or args.nbest > 1 else '')
            if some.alignment is not None:
                yield from table(some)
        if self._shows_time:
            yield f'{1e3 * seconds:.1f} ms'

    def _beam(self, text):
        self._args.beam = self._number(text, 'beam', self._args.beam, LARGEST_BEAM)
        self._args.nbest = min(self._args.nbest, self._args.beam)
        yield f'beam : {self._args.beam}'

    def _nbest(self, text):
        self._args.nbest = self._number(text, 'nbest', self._args.nbest, self._args.beam)
        yield f'nbest : {self._args.nbest}'

    @staticmethod
    def _number(text, name, now, most):
        """Return the number in a text, or the present one without text.  ValueError with a line for the user."""
        if text and not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
            raise ValueError(f':{name}: expected a whole number from 1 to {most}, got {text}')
        return int(text or now)

    def _score(self, text):
        self._args.scores = self._switched(text, 'score', self._args.scores)
        yield f'score : {_state(self._args.scores)}'

    def _attention(self, text):
        if not self._translator.model.attends:
            raise ValueError(':attn: this model has no attention; train seq2seq with --attention 1')
        self._args.alignments = self._switched(text, 'attn', self._args.alignments)
        yield f'attn : {_state(self._args.alignments)}'

    def _time(self, text):
        self._shows_time = self._switched(text, 'time', self._shows_time)
        yield f'time : {_state(self._shows_time)}'

    @staticmethod
    def _switched(text, name, is_on):
        """Return the state that a text sets, or the other one without text.  ValueError with a line for the user."""
        if text not in ('', 'on', 'off'):
            raise ValueError(f':{name}: expected on or off, got {text}')
        return text == 'on' if text else not is_on


def _state(is_on):
    return 'on' if is_on else 'off'


def table(translation):
    """Return the lines of the alignment of a Translation in percent, rounded; 0 is left blank.  A row is an output token, a
    column a source token.  Of a long source, several tables with parts of it."""
    rows, lines = translation.tokens, []
    wide = max(map(len, rows), default=0)
    for first in range(0, len(translation.source), _MOST):
        columns = translation.source[first:first + _MOST]
        widths = [max(3, len(token)) for token in columns]
        lines.append(' ' * wide + ''.join(f'  {token:>{width}}' for token, width in zip(columns, widths, strict=True)))
        for token, weights in zip(rows, translation.alignment[:, first:first + _MOST], strict=True):
            cells = (f'  {round(100 * float(weight)) or "":>{width}}' for weight, width in zip(weights, widths, strict=True))
            lines.append(f'{token:{wide}}{"".join(cells)}'.rstrip())
    return lines
