"""Attention maps: the weights of every head for one sentence, with its words on both axes."""
import math

import numpy as np

from pyops.inspect.pictures import numbers, style

_MAX_HEADS = 32             # per picture
_MAX_CELLS = 400            # per axis of a map
_MAX_LETTERS = 14           # per word
_MAX_LABELS = 36            # positions up to which every word is labelled


def heads_of(weights, mask, sentence, words=None):
    """Return the data of one picture: weights (heads, Tq, Tk), (query words, key words), (query padding, key padding).

    weights: (B, heads, Tq, Tk), or (B, Tq, Tk) for a single head;  mask: as of logs.Logs.mask, or None
    words: as of logs.Logs.tokens, or None to label positions by number
    At most two positions of padding remain on each axis; the two counts are those before the cut.
    """
    one = weights[sentence] if weights.ndim == 4 else weights[sentence][None]
    valid = np.ones(one.shape[1:], bool)
    if mask is not None:
        full = np.broadcast_to(mask, weights.shape)[sentence]
        valid = full[0] if weights.ndim == 4 else full
    lengths = int(valid.any(1).sum()), int(valid.any(0).sum())
    padding = tuple(size - length for size, length in zip(one.shape[1:], lengths, strict=True))
    sizes = [length + min(n, 2) for length, n in zip(lengths, padding, strict=True)]
    words = words or tuple([str(i) for i in range(size)] for size in one.shape[1:])
    words = tuple([word if i < length else '' for i, word in enumerate(side[:size])]
                  for side, length, size in zip(words, lengths, sizes, strict=True))
    return one[:, :sizes[0], :sizes[1]], words, padding


def draw_maps(title, subtitle, maps, words, padding):
    """Return a Sheet with a map of each head, up to _MAX_HEADS, on one colour scale; arguments from heads_of."""
    from matplotlib.lines import Line2D
    if len(maps) > _MAX_HEADS:
        subtitle += f'  \N{MIDDLE DOT}  heads 0 to {_MAX_HEADS - 1} of {len(maps)}'
        maps = maps[:_MAX_HEADS]
    heads, rows, columns = maps.shape
    lengths = [len(side) - min(n, 2) for side, n in zip(words, padding, strict=True)]
    longest = max(rows, columns, 1)
    cell = float(np.clip(2.6 / longest, 0.125, 0.32)) if longest <= _MAX_LABELS else 4.5 / longest
    width, height = max(columns * cell, 0.9), max(rows * cell, 0.9)
    labels = [[style.plain(word)[:_MAX_LETTERS - 1] + style.ELLIPSIS if len(word) > _MAX_LETTERS else style.plain(word)
               for word in side] for side in words]
    size = min(max(cell * 72 * 0.78, 6.5), 9.5)
    # widths of the labels left of the rows and below the columns
    margins = [max((_ems(word) for word in side), default=1) * size / 72 + 0.15 for side in labels]
    across = max(1, min(heads, int((15 - margins[0]) / (width + 0.3)), math.ceil(math.sqrt(heads * 2))))
    across = math.ceil(heads / math.ceil(heads / across))                               # balance the rows
    down = math.ceil(heads / across)
    below = 0.9 * margins[1] + 0.1      # labels are rotated by 60 degrees
    pitch = height + below + 0.4
    left, top = 0.5 + margins[0], 1.15
    sheet = style.Sheet(max(left + across * (width + 0.3) + 0.1, 6.2), top + down * pitch + 0.3, title, subtitle)
    cmap = style.sequential()
    is_large = longest > 40             # no lines between the cells; weights are small, so their square roots are drawn
    finite = maps[np.isfinite(maps)]
    high = min(max(float(finite.max(initial=0)), 1e-6), 1.0) if finite.size else 1.0
    hidden = np.ones((rows, columns), bool)
    hidden[:lengths[0], :lengths[1]] = False
    small = numbers.reduced(np.logical_and, hidden, _MAX_CELLS, _MAX_CELLS)
    for head in range(heads):
        row, column = divmod(head, across)
        x, y = left + column * (width + 0.3), top + row * pitch
        sheet.heading(x, y, width, f'head {head}')
        cells = numbers.shrink(maps[head], _MAX_CELLS, _MAX_CELLS)
        with np.errstate(invalid='ignore'):
            cells = np.sqrt(cells) if is_large else cells
        sheet.image(x, y, width, height, style.painted(cells, 0, math.sqrt(high) if is_large else high, cmap, small))
        if not is_large:            # white lines between the cells
            for i in range(1, columns):
                sheet.line(x + width * i / columns, y, x + width * i / columns, y + height, style.PAPER, 0.4)
            for i in range(1, rows):
                sheet.line(x, y + height * i / rows, x + width, y + height * i / rows, style.PAPER, 0.4)
        sheet.ticks(x, y, width, height, 'x', '', _words(labels[1], cell), rotation=60, size=size)
        sheet.ticks(x, y, width, height, 'y', '', _words(labels[0] if column == 0 else [''] * rows, cell), size=size)
        # mark the largest weight of each query
        best = np.where(np.isfinite(maps[head]), maps[head], -1)[:lengths[0], :lengths[1]]
        if not is_large and best.size:
            sheet.add(Line2D(x + (best.argmax(1) + 0.5) * width / columns, y + (np.arange(len(best)) + 0.5) * height / rows,
                             linestyle='', marker='o', markersize=cell * 72 * 0.22, color='#ffb000', markeredgewidth=0,
                             zorder=3))
    y = top + down * pitch - 0.2
    style.color_bar(sheet, 0.5, y, 2.0, cmap, 0, math.sqrt(high) if is_large else high, bool((finite > high).any()),
                    _squared if is_large else None)
    remark = f'grey: padding ({padding[0]} queries, {padding[1]} keys)' if any(padding) else 'no padding'
    remark += '   \N{MIDDLE DOT}   ' + ('colour: square root of the weight' if is_large else 'dot: largest weight of the row')
    sheet.text(2.85, y + 0.06, 'rows: queries, columns: keys; each row sums to 1', fontsize=7.5, color=style.GREY)
    sheet.text(2.85, y + 0.22, remark, fontsize=7.5, color=style.GREY)
    return sheet


def _squared(value):
    return style.number(value * value)


def _ems(text):
    """Return the width of a text in em: 0.6 per Latin letter, 1 per letter of scripts such as Chinese."""
    return sum(0.6 if ord(letter) < 0x1100 else 1.0 for letter in text)


def _words(labels, cell):
    """Return (position, label) of the labels; if the cells are narrower than letters, of every n-th label only."""
    every = 1 if len(labels) <= _MAX_LABELS else math.ceil(0.125 / cell)
    return [((i + 0.5) / len(labels), label) for i, label in enumerate(labels) if i % every == 0]
