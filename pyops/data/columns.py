"""Text in columns: UTF-8, and the four columns of the test files of the Tatoeba Challenge."""
from __future__ import annotations

COLUMNS = 4         # of a test file: languages of source and target, source, target


def decode(content: bytes) -> str:
    """Return UTF-8 text without a byte order mark.  ValueError names the first line that is not UTF-8."""
    try:
        return content.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        offset = len(content) - len(error.object) + error.start         # error.object is without the byte order mark
        line = content.count(b'\n', 0, offset) + 1
        raise ValueError(f'line {line}: not UTF-8 text, byte 0x{content[offset]:02x} at offset {offset}') from error


def is_test_file(text: str) -> bool:
    """Return whether the first line that is not blank has the columns of a test file."""
    return next((line.count('\t') + 1 == COLUMNS for line in text.split('\n') if line.strip()), False)


def language_pairs(text: str, languages: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Return the (source, target) pairs of a test file, raw text.  Blank lines are ignored.

    languages: the codes of source and target that each line must have; (): any
    ValueError, which names the line, if a line has other columns or an empty one; or if there is no line.
    """
    pairs = []
    # Not splitlines: some sentences contain exotic line separators.
    for number, line in enumerate(text.split('\n'), 1):
        if not line.strip():
            continue
        columns = [column.strip() for column in line.split('\t')]
        if len(columns) != COLUMNS or not all(columns):
            got = 'an empty column' if len(columns) == COLUMNS else f'{len(columns)} columns'
            raise ValueError(f'line {number}: {got}; expected two language codes, a source and a target, with tabs between')
        *codes, source, target = columns
        if languages and tuple(codes) != languages:
            raise ValueError(f'line {number}: languages {" and ".join(codes)}; expected {" and ".join(languages)}')
        pairs.append((source, target))
    if not pairs:
        raise ValueError('no sentences; expected lines of two language codes, a source and a target, with tabs between')
    return pairs
