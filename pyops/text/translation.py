"""Shared by the translation programs: choosing a corpus, and comparing it with the one of a checkpoint."""
from pathlib import Path

from pyops.data import locate
from pyops.errors import UserError
from pyops.text.corpus import Corpus
from pyops.text.tokenizer import restore

TINY = 512              # pairs
EMBEDDED = 'embedded'   # instead of a file name


def open_corpus(path=None, data_dir=None, tiny=False):
    """Return a Corpus and a line for the user that names it: the file `path` ('embedded': the embedded corpus), else fra-eng
    if `locate` finds it, else the embedded corpus.  tiny: only its first 512 pairs.

    UserError if the file cannot be read, `path` is empty, data_dir is given and does not hold fra-eng, or $PYOPS_DATA is not
    a directory.
    """
    if path == '':
        raise UserError("corpus '': no such file; give a file or 'embedded'")
    chosen = path or locate.find('fra-eng', data_dir) or EMBEDDED
    if chosen == EMBEDDED:
        if data_dir is not None and not path:
            raise locate.missing('fra-eng', data_dir)
        from pyops.text import embedded
        corpus = embedded.corpus()
        line = f'embedded corpus : {len(corpus)} pairs'
        if not path:
            line = f'no corpus found, using the {line}; get the real one with: python -m pyops.data get fra-eng'
    else:
        line, corpus = f'corpus : {chosen}', Corpus.load(chosen)
    return (corpus.first(TINY) if tiny else corpus), line


def is_fra_eng(corpus):
    """Return whether a corpus was read from a file with the name of fra-eng."""
    return Path(corpus.name).name in {Path(place).name for place in locate.CANDIDATES['fra-eng']}


def check_vocabularies(path, state, vocabularies, pairs, alternative=''):
    """Raise UserError unless the checkpoint `path` was trained with these tokenizers and on these pairs.

    alternative: end of the message, behind the remedy
    """
    remedy = f'give the corpus it was trained on, {state["corpus"]}, with -f{alternative}'
    for which, vocabulary, trained in zip(('source', 'target'), vocabularies, restore(state['vocabularies']), strict=True):
        if trained != vocabulary:
            raise UserError(f'{path}: its {which} vocabulary of {len(trained)} words differs from the corpus, '
                            f'{len(vocabulary)} words; {remedy}')
    if state['pairs'] != pairs.digest():
        raise UserError(f'{path}: was trained on other pairs than the corpus has; {remedy}')
