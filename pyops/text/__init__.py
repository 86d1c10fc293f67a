"""Text for translation: corpora, vocabularies, splits, scores."""
from pyops.text.corpus import Corpus, encode
from pyops.text.preprocess import preprocess, tokenize
from pyops.text.vocabulary import BOS, EOS, PAD, SPECIALS, UNK, Vocabulary

__all__ = ['BOS', 'EOS', 'PAD', 'SPECIALS', 'UNK', 'Corpus', 'Vocabulary', 'encode', 'preprocess',
           'tokenize']
