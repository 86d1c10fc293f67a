"""Checks shared by the readers of saved tensors, whose files may come from anywhere."""
import json

AXES_LIMIT = 32                     # numpy's own in version 1


class Refused(Exception):
    """Why a file or a line is skipped."""


def printable(text):
    """`text` in one line that a terminal shows as it is: control characters and broken encodings as \\x1b and the like."""
    return ''.join(letter if letter.isprintable() else letter.encode('unicode_escape', 'surrogatepass').decode()
                   for letter in str(text))


def parse_json(text):
    """-> dict.  What is not finite becomes None."""
    try:
        line = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:           # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise Refused('not a line of JSON') from error
    if not isinstance(line, dict):
        raise Refused('not a JSON object')
    return line


def is_whole(value):
    return type(value) is int and 0 <= value < 1 << 53      # bool is an int too
