"""From the tokens of a French sentence to text, by rule: the inverse of preprocess, as far as the tokens determine it."""
import re

_ATTACHED = re.compile(r' (?=[,.])')
_BEGIN = re.compile(r"((?:^|[.!?]\s)[\W_]*)(\w)")


def detokenize(words):
    """Return words, in lower case and with punctuation set apart, as a sentence: commas and full stops follow the word before
    them, a space stays before ! and ?, as in French, and sentences begin with a capital letter.

    Capital letters within a sentence, as in names, are lost.
    """
    text = _ATTACHED.sub('', ' '.join(words))
    return _BEGIN.sub(lambda match: match[1] + match[2].upper(), text)
