"""Translate with a trained checkpoint: one sentence, standard input, or held-out sentences.

    python -m transformer.translate -c ckpt "Go now."           one sentence
    python -m transformer.translate -c ckpt                     standard input, line by line
    python -m transformer.translate -c ckpt --test 10           held-out sentences, with the share translated correctly
"""
from functools import partial

from pyops.errors import exits_cleanly
from pyops.translator import serving
from transformer.train import PROGRAM

parse, main = partial(serving.parse, PROGRAM), partial(serving.main, PROGRAM)

if __name__ == '__main__':
    with exits_cleanly('transformer.translate'):
        main()
