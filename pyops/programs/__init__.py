"""The modules of the programs mnist, seq2seq and transformer.

In the source tree they are top-level packages: seq2seq.train.  A wheel has them in this folder, pyops.programs.seq2seq.train,
because their names are too common for site-packages (setup.py).  Within a program imports are relative.
"""
import os


def module(name: str) -> str:
    """Return the full name of a program's package or module.   name: as in the source tree, 'seq2seq' or 'seq2seq.train'"""
    package = name.partition('.')[0]
    return f'{__name__}.{name}' if os.path.isdir(os.path.join(os.path.dirname(__file__), package)) else name


def command(name: str) -> str:
    """Return the command that runs a program's package or module, such as `python -m seq2seq.train`."""
    return f'python -m {module(name)}'
