"""Translate text with a checkpoint: one line of output for each line of input.

    python -m seq2seq.translate -c ckpt < in.txt > out.txt
    python -m seq2seq.translate -c ckpt -i in.txt.gz --json
    python -m seq2seq.translate -c ckpt "Go now."
    python -m seq2seq.translate -c ckpt                      at a terminal: a prompt
    python -m seq2seq.translate -c ckpt --test 10            held-out sentences, with the share translated correctly
"""
from pyops.errors import exits_cleanly
from pyops.text.flags import parse_serving, serving_parser

PROGRAM = 'seq2seq.translate'


def parser():
    return serving_parser(PROGRAM, __doc__)


def main(argv=None):
    args = parse_serving(parser(), argv)
    from pyops.text import serving
    serving.translate(args, 'seq2seq')


def build(settings, source_size, target_size):
    """Return the model for the settings of a checkpoint; pyops.text.translator calls it."""
    from pyops.settings import configure

    from .model import Config, Seq2Seq
    return Seq2Seq(configure(Config, settings, source_size, target_size), seed=None)    # restoring overwrites all values


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
