"""The same as `python -m pyops inspect`."""
import sys

from pyops.__main__ import main

if __name__ == '__main__':
    main(['inspect', *sys.argv[1:]])
