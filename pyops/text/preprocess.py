"""From raw text to tokens: lower case, punctuation set apart, split on white space.  `normalize`: text as subwords read it."""
import re
import unicodedata

_UNSPACED_PUNCTUATION = re.compile('(?<! )(?=[,.!?])')
_PLAIN_QUOTES = str.maketrans(dict.fromkeys('‘’‚‛ʼʹ′´＇‹›', "'") | dict.fromkeys('“”„‟″＂«»', '"'))
_CURLY = str.maketrans(dict.fromkeys('‘’ʼ', "'") | dict.fromkeys('“”', '"'))


def preprocess(text):
    """Return `text` in lower case, with no-break spaces as spaces, and a space before each of , . ! ? that lacks one.

    U+202F and U+00A0 (used before ! and ? in French) become a space.  All other characters, including line ends and tabs,
    are unchanged, so that a whole file can be preprocessed in one call.
    """
    return _UNSPACED_PUNCTUATION.sub(' ', text.replace('\u202f', ' ').replace('\xa0', ' ').lower())


def plain_quotes(text):
    """Return `text` with typographic apostrophes and quotation marks as ' and "."""
    return text.translate(_PLAIN_QUOTES)


def normalize(text):
    """Return `text` in NFC, with curly quotes straight, each run of white space as one space, and none at the ends.

    Unlike plain_quotes, it keeps « and », with which French quotes.
    """
    return ' '.join(unicodedata.normalize('NFC', text).translate(_CURLY).split())


def tokenize(text):
    """Return the tokens of one sentence: preprocess, then split at white space."""
    return preprocess(text).split()
