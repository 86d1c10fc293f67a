"""Attention maps: the weights P of every head for one sentence, with its words on both axes."""
import math

import numpy as np

from pyops.inspect.pictures import numbers, style

_HEADS = 32                 # that a picture shows
_CELLS = 400                # of a map, at most, in each direction
_LONGEST = 14               # letters of a word that are shown
_EVERY_WORD = 36            # positions up to which each has its word


def heads_of(weights, mask, sentence, words=None):
    """What one picture shows -> (P (heads, Tq, Tk), (query words, key words), (query padding, key padding)).

    weights: (B, heads, Tq, Tk), or of one head a (B, Tq, Tk).  mask: as of logs.Logs.mask, or None.  words: as of
    logs.Logs.tokens, or None: positions are counted instead.  Of padding two positions are kept, so that it is seen and does
    not fill the picture; the two numbers say how many there are.
    """
    one = weights[sentence] if weights.ndim == 4 else weights[sentence][None]
    seen = np.ones(one.shape[1:], bool)
    if mask is not None:
        full = np.broadcast_to(mask, weights.shape)[sentence]
        seen = full[0] if weights.ndim == 4 else full
    lengths = int(seen.any(1).sum()), int(seen.any(0).sum())
    padding = tuple(size - length for size, length in zip(one.shape[1:], lengths, strict=True))
    kept = [length + min(left, 2) for length, left in zip(lengths, padding, strict=True)]
    words = words or tuple([str(i) for i in range(size)] for size in one.shape[1:])
    words = tuple([word if i < length else '' for i, word in enumerate(side[:keep])]
                  for side, length, keep in zip(words, lengths, kept, strict=True))
    return one[:, :kept[0], :kept[1]], words, padding


def draw_maps(title, subtitle, maps, words, padding):
    """The three of heads_of -> Sheet with a map for each head, up to _HEADS of them, all in the same colours."""
    if len(maps) > _HEADS:
        subtitle += f'  \N{MIDDLE DOT}  heads 0 to {_HEADS - 1} of {len(maps)}'
        maps = maps[:_HEADS]
    heads, rows, columns = maps.shape
    lengths = [sum(1 for _ in side) - min(left, 2) for side, left in zip(words, padding, strict=True)]
    longest = max(rows, columns, 1)
    cell = float(np.clip(2.6 / longest, 0.125, 0.32)) if longest <= _EVERY_WORD else 4.5 / longest
    width, height = max(columns * cell, 0.9), max(rows * cell, 0.9)
    labels = [[style.plain(word)[:_LONGEST - 1] + style.ELLIPSIS if len(word) > _LONGEST else style.plain(word)
               for word in side] for side in words]
    size = min(max(cell * 72 * 0.78, 6.5), 9.5)
    # left of a row, below a column
    room = [max((_ems(word) for word in side), default=1) * size / 72 + 0.15 for side in labels]
    across = max(1, min(heads, int((15 - room[0]) / (width + 0.3)), math.ceil(math.sqrt(heads * 2))))
    across = math.ceil(heads / math.ceil(heads / across))                               # as many in every row
    down = math.ceil(heads / across)
    below = 0.9 * room[1] + 0.1         # words stand at 60 degrees
    pitch = height + below + 0.4
    left, top = 0.5 + room[0], 1.15
    sheet = style.Sheet(max(left + across * (width + 0.3) + 0.1, 6.2), top + down * pitch + 0.3, title, subtitle)
    cmap = style.sequential()
    finite = maps[np.isfinite(maps)]
    high = min(max(float(finite.max(initial=0)), 1e-6), 1.0) if finite.size else 1.0
    hidden = np.ones((rows, columns), bool)
    hidden[:lengths[0], :lengths[1]] = False
    small = numbers.reduced(np.logical_and, hidden, _CELLS, _CELLS)
    for head in range(heads):
        row, column = divmod(head, across)
        x, y = left + column * (width + 0.3), top + row * pitch
        sheet.heading(x, y, width, f'head {head}')
        sheet.image(x, y, width, height, style.painted(numbers.shrink(maps[head], _CELLS, _CELLS), 0, high, cmap, small))
        if longest <= 40:           # paper between the cells
            for i in range(1, columns):
                sheet.line(x + width * i / columns, y, x + width * i / columns, y + height, style.PAPER, 0.4)
            for i in range(1, rows):
                sheet.line(x, y + height * i / rows, x + width, y + height * i / rows, style.PAPER, 0.4)
        sheet.ticks(x, y, width, height, 'x', '', _words(labels[1], cell), rotation=60, size=size)
        sheet.ticks(x, y, width, height, 'y', '', _words(labels[0] if column == 0 else [''] * rows, cell), size=size)
        # the key that each query looks at most
        best = np.where(np.isfinite(maps[head]), maps[head], -1)[:lengths[0], :lengths[1]]
        if longest <= 40 and best.size:
            sheet.page.plot(x + (best.argmax(1) + 0.5) * width / columns, y + (np.arange(len(best)) + 0.5) * height / rows,
                            linestyle='', marker='o', markersize=cell * 72 * 0.22, color='#ffb000', markeredgewidth=0, zorder=3)
    y = top + down * pitch - 0.2
    style.color_bar(sheet, 0.5, y, 2.0, cmap, 0, high, bool((finite > high).any()))
    remark = f'grey: padding ({padding[0]} queries, {padding[1]} keys)' if any(padding) else 'no padding'
    remark += '   \N{MIDDLE DOT}   dot: the largest of a row' if longest <= 40 else ''
    sheet.text(2.85, y + 0.06, 'rows: queries, columns: keys; a row adds up to 1', fontsize=7.5, color=style.GREY)
    sheet.text(2.85, y + 0.22, remark, fontsize=7.5, color=style.GREY)
    return sheet


def _ems(text):
    """The width of a text in letter heights: a letter outside the Latin ones and their like may be square."""
    return sum(0.6 if ord(letter) < 0x1100 else 1.0 for letter in text)


def _words(labels, cell):
    """Each word at its place; where cells are narrower than letters, every second or fewer."""
    every = 1 if len(labels) <= _EVERY_WORD else math.ceil(0.125 / cell)
    return [((i + 0.5) / len(labels), label) for i, label in enumerate(labels) if i % every == 0]
