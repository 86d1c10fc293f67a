"""Translate with a trained checkpoint: one sentence, standard input, or held-out sentences.

    python -m seq2seq.translate -c ckpt "Go now."           one sentence
    python -m seq2seq.translate -c ckpt                     standard input, line by line
    python -m seq2seq.translate -c ckpt --test 10           held-out sentences, with the share translated correctly
"""
from pyops.errors import exits_cleanly
from pyops.text.flags import parse_serving, serving_parser

PROGRAM = 'seq2seq.translate'


def parser():
    return serving_parser(PROGRAM)


def main(argv=None):
    args = parse_serving(parser(), argv)
    from pyops.text import serving
    serving.translate(args, open_checkpoint)


def open_checkpoint(path, args=None):
    """Load a checkpoint, print lines about it, and return the Translator and the checkpoint's state."""
    from pyops.text import serving
    return serving.load(path, 'seq2seq', build, lines, args)


def build(settings, source_size, target_size):
    from pyops.settings import configure
    from seq2seq.model import Config, Seq2Seq
    return Seq2Seq(configure(Config, settings, source_size, target_size), seed=None)        # restoring overwrites all values


def lines(read, output):
    """Return the lines to print for a sentence: the tokens read and the tokens of the translation, both with <eos>."""
    return ' '.join(read), f'translate res : {" ".join(output)}'


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
