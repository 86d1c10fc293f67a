"""Pieces: the tokens of a SentencePiece model, with the ids of a separate vocabulary, as models trained with Marian have them.

A model has two files of SentencePiece, for the sources and for the targets, and one vocabulary, which joins their pieces.
"""
import numpy as np

from pyops.errors import UserError
from pyops.text.vocabulary import EOS, PAD, SPECIALS, UNK, Encoded

_SPACE = '▁'        # in a piece; U+2581


class Pieces:
    """A Tokenizer (pyops.text.tokenizer) whose tokens are pieces of text, chosen by a SentencePiece model (Kudo 2018).

    Sentences are raw text.  A language code such as >>fra<< at the start of a sentence is one token.
    model: the content of an .spm file;  tokens: the pieces in the order of their ids, the first four are SPECIALS
    UserError if `sentencepiece` is not installed, or the model or the tokens are not valid.
    """

    def __init__(self, model, tokens):
        self._model, self._tokens = model, list(tokens)
        if tuple(self._tokens[:len(SPECIALS)]) != SPECIALS:
            raise UserError(f'pieces: expected a vocabulary that starts with {" ".join(SPECIALS)}; convert the model again')
        self._ids = {token: id for id, token in enumerate(self._tokens) if id >= len(SPECIALS)}
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise UserError('sentencepiece, which splits text into pieces, is not installed: '
                            'install it with: pip install sentencepiece') from error
        self._processor = SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except (RuntimeError, OSError) as error:
            raise UserError('not a SentencePiece model; get the .spm file again') from error

    @classmethod
    def restore(cls, state):
        """Return the tokenizer with this state().  UserError if it is damaged."""
        import base64  # not at the top: other tokenizers do not need it
        try:
            model, tokens = base64.b64decode(state['spm'], validate=True), state['tokens']
        except (KeyError, TypeError, ValueError) as error:      # binascii.Error is a ValueError
            raise UserError(f'pieces: damaged tokenizer ({type(error).__name__}: {error}); convert the model again') from error
        return cls(model, tokens)

    def __len__(self):
        return len(self._tokens)

    def __eq__(self, other):
        return isinstance(other, Pieces) and (self._model, self._tokens) == (other._model, other._tokens)

    __hash__ = None

    def __repr__(self):
        return f'Pieces({len(self)} tokens)'

    def state(self):
        """Return a JSON value from which pyops.text.tokenizer.restore makes an equal Pieces."""
        import base64
        return {'spm': base64.b64encode(self._model).decode(), 'tokens': self._tokens}

    def read(self, text):
        """Return the words of a raw text, separated by white space."""
        return text.split()

    def read_corpus(self, corpus):
        """Return the corpus whose sentences `encode` expects: raw text."""
        return corpus.raw()

    def unknown(self, words):
        """Return the words of a sentence that contain an unknown piece."""
        encoded = self.encode(words)
        has_unknown = np.zeros(len(words), bool)
        has_unknown[np.repeat(np.arange(len(words)), encoded.lengths)[encoded.ids == UNK]] = True
        return [word for word, is_unknown in zip(words, has_unknown, strict=True) if is_unknown]

    def encode(self, sentences):
        """Return the Encoded of a list of sentences of raw text, each a string or a list of words."""
        split = [_split_code(text if isinstance(text, str) else ' '.join(text)) for text in sentences]
        pieces = self._processor.encode([text for _, text in split], out_type=str) if split else []
        pieces = [[*code, *some] for (code, _), some in zip(split, pieces, strict=True)]
        get = self._ids.get
        return Encoded(np.array([get(piece, UNK) for some in pieces for piece in some], np.int32),
                       np.array([len(some) for some in pieces], np.int32))

    def sentence(self, ids):
        """Return the text of an array of ids, without padding and end mark; an unknown piece is <unk>."""
        pieces = (f' {SPECIALS[UNK]} ' if id == UNK else self._tokens[id] for id in ids.tolist() if id not in (PAD, EOS))
        return ' '.join(''.join(pieces).replace(_SPACE, ' ').split())

    decode = sentence

    def words(self, ids):
        """Return the piece of each id as text to show; a space is ▁."""
        return [self._tokens[id] for id in map(int, ids)]


def _split_code(text):
    """Return the language code at the start of a text as a list of at most one token, and the rest."""
    end = text.find('<<') + 2
    return ([text[:end]], text[end:]) if text.startswith('>>') and end > 2 else ([], text)
