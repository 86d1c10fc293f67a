"""Average the parameters of several checkpoints of a run: the result may translate better than each of them.

    python -m seq2seq.average ckpt -o average.safetensors              of the newest checkpoints of a folder
    python -m seq2seq.average a.safetensors b.safetensors -o average.safetensors
"""
from pyops.errors import exits_cleanly
from pyops.text.flags import averaging_parser

PROGRAM = 'seq2seq.average'


def parser():
    return averaging_parser(PROGRAM, __doc__)


def main(argv=None):
    args = parser().parse_args(argv)
    from pyops.text import averaging  # here, since --help needs no library

    from .model import SIZES
    averaging.run(args, 'seq2seq', SIZES)


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
