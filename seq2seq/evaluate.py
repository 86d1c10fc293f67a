"""Score a trained checkpoint on held-out sentences: BLEU and chrF on raw text, against one reference and against all.

    python -m seq2seq.evaluate -c ckpt                 the test sentences
    python -m seq2seq.evaluate -c ckpt --json          the scores as JSON
"""
from pyops.errors import exits_cleanly
from pyops.text.flags import evaluation_parser, parse_evaluation

PROGRAM = 'seq2seq.evaluate'


def parser():
    return evaluation_parser(PROGRAM, __doc__)


def main(argv=None):
    args = parse_evaluation(parser(), argv)
    from pyops.text import serving
    serving.evaluate(args, 'seq2seq')


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
