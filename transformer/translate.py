"""Translate with a trained checkpoint: one sentence, what is typed, or sentences that training never saw.

    python -m transformer.translate -c ckpt "Go now."           one sentence
    python -m transformer.translate -c ckpt                     what is typed or piped in, line by line
    python -m transformer.translate -c ckpt --test 10           held-out sentences, and how many are right
"""
from functools import partial

from pyops.errors import exits_cleanly
from pyops.translator import serving
from transformer.train import PROGRAM

parse, main = partial(serving.parse, PROGRAM), partial(serving.main, PROGRAM)

if __name__ == '__main__':
    with exits_cleanly('transformer.translate'):
        main()
