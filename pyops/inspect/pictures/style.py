"""The style of all plots: palette, titles, axes placed in inches, PNG files marked as created by this program.

Colours are safe for colour-blind readers: the palette of Okabe and Ito, and colour maps of monotonic lightness, interpolated
in OKLab.  A format has the same colour in every plot and on the page.
"""
import contextlib
import functools
import math
import os
import re
import struct
import zlib
from typing import NamedTuple

import numpy as np

from pyops.errors import UserError
from pyops.files import write_atomically
from pyops.inspect import colours

INK, GREY, RULE, LIGHT, PAPER = '#222222', '#666666', '#b0b0b0', '#e6e6e6', '#ffffff'
PADDING, BROKEN = '#d9d9d9', '#d6008f'          # BROKEN: NaN and infinities
KINDS = {'activations': '#566578', 'weights': '#8b5a2b', 'gradients': '#6a4fb0'}        # none is the colour of a format
NAME_COLORS = ('#0072b2', '#d55e00', '#009e73', '#b8559a', '#e69f00', '#56b4e9', '#4d4d4d', '#8b5a2b', '#7a6cd0')
ELLIPSIS, MINUS, SQUARE = '\N{HORIZONTAL ELLIPSIS}', '\N{MINUS SIGN}', '\N{BLACK SQUARE}'

_BELOW = 10                 # subtracted from the zorder of what is below all Axes

SOFTWARE = 'pyops inspect draw'
_FONTS = ('DejaVu Sans', 'Noto Sans CJK SC', 'Noto Sans CJK JP', 'WenQuanYi Zen Hei', 'Noto Sans Arabic',
          'Noto Sans Devanagari')
_SETTINGS = {
    'font.size': 9, 'text.color': INK, 'text.parse_math': False, 'axes.linewidth': 0.7, 'axes.axisbelow': True,
    'legend.frameon': False, 'legend.fontsize': 8, 'figure.facecolor': PAPER, 'image.interpolation': 'nearest',
    'axes.xmargin': 0.02}


def require():
    """Raise UserError if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UserError('matplotlib is not installed; install it with: pip install matplotlib') from error


@contextlib.contextmanager
def look():
    """A context manager that applies this style to matplotlib and restores the previous settings."""
    import warnings

    import matplotlib
    from matplotlib import font_manager
    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = [font for font in _FONTS if font in installed] or ['sans-serif']
    with matplotlib.rc_context(_SETTINGS | {'font.family': fonts}), warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'Glyph .* missing')       # a letter without a glyph is drawn as a box
        yield


# ---- colours -----------------------------------------------------------------------------------------------------------

def color_of(fmt):
    """Return the colour of a format (a Format, its text, or 'fp32').  A format with options has a darker shade."""
    return colours.of(fmt)


@functools.lru_cache(256)
def ink_of(color):
    """Return the colour for small text about something drawn in a colour, with a contrast of at least 4.5 to white."""
    from matplotlib.colors import to_hex
    return colours.readable(to_hex(color))


def _oklab_map(name, stops, count=256):
    """Return a colour map through (position, #rrggbb) stops, interpolated in OKLab so that it is perceptually uniform.

    Source: https://bottosson.github.io/posts/oklab/
    """
    from matplotlib.colors import ListedColormap
    to_lms = np.array([[.4122214708, .5363325363, .0514459929], [.2119034982, .6806995451, .1073969566],
                       [.0883024619, .2817188376, .6299787005]])
    to_lab = np.array([[.2104542553, .7936177850, -.0040720468], [1.9779984951, -2.4285922050, .4505937099],
                       [.0259040371, .7827717662, -.8086757660]])
    positions = [position for position, _ in stops]
    rgb = np.array([[int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)] for _, color in stops])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    lab = np.cbrt(linear @ to_lms.T) @ to_lab.T
    between = np.stack([np.interp(np.linspace(0, 1, count), positions, channel) for channel in lab.T], 1)
    linear = ((between @ np.linalg.inv(to_lab).T) ** 3 @ np.linalg.inv(to_lms).T).clip(0, 1)
    rgb = np.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear ** (1 / 2.4) - 0.055)
    return ListedColormap(rgb.clip(0, 1), name=name)


@functools.cache
def diverging():
    """Blue below 0, white at 0, orange to red above."""
    return _oklab_map('pyops_diverging', [(0, '#08306b'), (0.25, '#3f86c4'), (0.5, '#f7f7f7'), (0.75, '#e0823d'),
                                          (1, '#7f2704')])


@functools.cache
def sequential():
    """White at 0, then green and blue, dark violet at 1."""
    return _oklab_map('pyops_sequential', [(0, '#fbfdfb'), (0.3, '#9bd3c4'), (0.65, '#2b7fae'), (1, '#2a1a5e')])


def kind_of(operation, name):
    """Return 'activations', 'weights' or 'gradients', a key of KINDS."""
    if operation == 'backward':
        return 'gradients'
    return 'weights' if name in ('weight', 'bias') else 'activations'


def readable_on(color):
    """Return INK or PAPER, the text colour with more contrast on the background (r, g, b, ...), each 0 to 1."""
    return INK if 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2] > 0.55 else PAPER


# ---- text --------------------------------------------------------------------------------------------------------------

def plain(text):
    """Return text from a dump without control characters, which fonts cannot draw."""
    return ''.join(c if c.isprintable() else '\N{REPLACEMENT CHARACTER}' for c in str(text))


def shortened(text, most):
    """Shorten a text to at most `most` characters.  The middle is cut, because layer names differ at their ends."""
    text = plain(text)
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return text[:head] + ELLIPSIS + text[len(text) - (most - 1 - head):]


def number(value, digits=3):
    """Format a number: 0.0123, 1.2e-7, nan, -inf; '' for None."""
    if value is None:
        return ''
    if not math.isfinite(value):
        return f'{value}'.replace('-', MINUS)
    text = f'{value or 0:.{digits}g}'           # `or 0` avoids -0
    mantissa, e, exponent = text.partition('e')
    return (f'{mantissa}e{int(exponent)}' if e else text).replace('-', MINUS)


def decibels(value):
    if value is None or math.isnan(value):
        return 'undefined'
    if value == -math.inf:
        return 'overflow'
    return 'exact' if value == math.inf else f'{value:.1f} dB'.replace('-', MINUS)


def percent(value):
    """Format a percentage."""
    if value is None or math.isnan(value):
        return MINUS
    return '0 %' if value == 0 else '<0.01 %' if value < 0.01 else f'{value:.2g} %' if value < 1 else f'{value:.1f} %'


def shape_text(shape):
    return ' \N{MULTIPLICATION SIGN} '.join(map(str, shape)) if shape else 'a scalar'


def power(exponent, base=2):
    """Format a power with Unicode superscripts, which are much faster than mathtext."""
    digits = str(round(exponent)).translate(str.maketrans('-0123456789', '\N{SUPERSCRIPT MINUS}'
        '\N{SUPERSCRIPT ZERO}\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT TWO}\N{SUPERSCRIPT THREE}\N{SUPERSCRIPT FOUR}'
        '\N{SUPERSCRIPT FIVE}\N{SUPERSCRIPT SIX}\N{SUPERSCRIPT SEVEN}\N{SUPERSCRIPT EIGHT}\N{SUPERSCRIPT NINE}'))
    return f'{base}{digits}'


class _Font:
    """DejaVu Sans in one size, as Pillow draws it.  px: pixels per em;  weight: 'normal' or 'bold'"""

    def __init__(self, px, weight):
        from matplotlib.font_manager import FontProperties, findfont
        from matplotlib.ft2font import FT2Font
        from PIL import ImageFont
        path = findfont(FontProperties(family=_FONTS[0], weight=weight))
        self.font = ImageFont.truetype(path, px, layout_engine=ImageFont.Layout.BASIC)
        font = FT2Font(path)
        self.letters = frozenset(font.get_charmap())
        metrics = font.get_sfnt_table('OS/2')                           # matplotlib aligns by these
        self.ascent, self.descent = (px * abs(metrics[name]) / font.units_per_EM
                                     for name in ('sTypoAscender', 'sTypoDescender'))

    def has(self, text):
        """Return whether all letters are in the font, and none depends on its neighbours."""
        codes = set(map(ord, text))
        return codes <= self.letters and all(32 <= code < 0x250 or 0x2000 <= code < 0x2c00 for code in codes)


@functools.cache
def _font(px, weight):
    """Return a _Font, or None if this Pillow has no fonts."""
    try:
        return _Font(px, weight)
    except (ImportError, OSError):
        return None


@functools.lru_cache(4096)
def _stamp(text, px, weight, rotation=0):
    """Return (picture of the coverage of pixels, centre, width, ascent, descent) of a text, None if the font lacks a letter.

    The centre is right of and above the start of the baseline.   rotation: degrees, about that start; width, ascent and descent
    belong to the text without it
    """
    from PIL import Image, ImageDraw
    font = _font(px, weight)
    if font is None or not font.has(text):
        return None
    left, top, right, bottom = font.font.getbbox(text, anchor='ls')
    image = Image.new('L', (max(right - left, 1), max(bottom - top, 1)))
    ImageDraw.Draw(image).text((-left, -top), text, fill=255, font=font.font, anchor='ls')
    centre = _turned((left + image.width / 2, -top - image.height / 2), rotation)
    if rotation:
        image = image.rotate(rotation, Image.Resampling.BICUBIC, expand=True)
    return image, centre, font.font.getlength(text), max(font.ascent, -top), max(font.descent, bottom)


def _turned(point, degrees):
    """Return (x, y) turned about (0, 0), counterclockwise."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return point[0] * cos - point[1] * sin, point[0] * sin + point[1] * cos


class Label(NamedTuple):
    """A text of a Sheet.   x, y: inches from the upper left corner;  size: points;  rotation: degrees

    ha, va: part of the text's box that is at x, y, as in matplotlib
    """
    x: float
    y: float
    text: str
    size: float = 9
    color: str = INK
    weight: str = 'normal'
    ha: str = 'left'
    va: str = 'baseline'
    rotation: float = 0
    rotation_mode: str = 'default'

    def stamp(self, dpi):
        """Return the result of _stamp, or None if matplotlib has to draw the text, which takes several times as long."""
        import matplotlib
        is_usual = matplotlib.rcParams['font.family'][0] == _FONTS[0]
        return _stamp(self.text, self.size * dpi / 72, self.weight, self.rotation) if is_usual else None

    def put(self, stamp, picture, dpi):
        """Draw the text on a picture of Pillow; what is beyond its edges is cut."""
        coverage, centre, width, ascent, descent = stamp
        corners = [(0, -descent), (width, -descent), (0, ascent), (width, ascent)]
        is_aligned_first = self.rotation_mode == 'anchor'
        (x0, x1), (y0, y1) = ((min(edges), max(edges)) for edges in zip(*(
            corners if is_aligned_first else (_turned(corner, self.rotation) for corner in corners)), strict=True))
        anchor = ({'left': x0, 'center': (x0 + x1) / 2, 'right': x1}[self.ha],
                  {'baseline': 0, 'bottom': y0, 'center': (y0 + y1) / 2, 'top': y1}[self.va])
        if is_aligned_first:
            anchor = _turned(anchor, self.rotation)
        row = round(self.y * dpi + anchor[1] - centre[1] - coverage.height / 2)
        column = round(self.x * dpi - anchor[0] + centre[0] - coverage.width / 2)
        picture.paste(_rgb(self.color), (column, row), coverage)

    def add_to(self, sheet):
        """Let matplotlib draw the text on a Sheet."""
        from matplotlib.text import Text
        sheet.add(Text(self.x, self.y, self.text, fontsize=self.size, color=self.color, fontweight=self.weight, ha=self.ha,
                       va=self.va, rotation=self.rotation, rotation_mode=self.rotation_mode))


@functools.cache
def _rgb(color):
    """Return a colour as three numbers from 0 to 255."""
    from matplotlib.colors import to_rgb
    return tuple(round(255 * part) for part in to_rgb(color))


@functools.cache
def _bare_axes():
    """Return a class like matplotlib's Axes, which never makes ticks and spines: they take half of the time of an Axes."""
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    none = {'majorTicks': (), 'minorTicks': ()} | dict.fromkeys(('get_major_ticks', 'get_minor_ticks'),
                                                                lambda self, numticks=None: [])
    without_ticks = [type(kind.__name__, (kind,), none) for kind in (XAxis, YAxis)]

    class Bare(Axes):
        def _init_axis(self):
            self.xaxis, self.yaxis = (kind(self, clear=False) for kind in without_ticks)

        def _gen_axes_spines(self, *_, **_unused):
            return {}

        def _update_patch_limits(self, patch):
            """Include the corners alone: no patch here has curves, and matplotlib's search for them takes 2 ms."""
            is_x, is_y = patch.get_transform().contains_branch_seperately(self.transData)
            if is_x or is_y:
                corners = (patch.get_transform() - self.transData).transform(patch.get_path().vertices)
                self.update_datalim(corners, updatex=is_x, updatey=is_y)

    return Bare


# ---- figures -----------------------------------------------------------------------------------------------------------

class Sheet:
    """A figure whose parts are placed in inches from its upper left corner.

    This is faster than a layout engine, and the layout is the same in all plots of a kind.  Texts, lines and maps belong to no
    Axes: each matplotlib Axes costs 5 ms and its ticks 3 ms.  `axes` adds an Axes for data with a scale, above them.
    """

    def __init__(self, width, height, title, subtitle=''):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.transforms import Affine2D
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height))
        FigureCanvasAgg(self.figure)
        # of inches from the upper left corner
        self.transform = Affine2D().scale(1, -1).translate(0, height) + self.figure.dpi_scale_trans
        self._lines, self._images, self.labels = [], [], []
        for text, y, size, color, weight in ((title, 0.34, 14, INK, 'bold'), (subtitle, 0.60, 9, GREY, 'normal')):
            # average letter widths of DejaVu Sans
            em = 0.69 if weight == 'bold' else 0.6
            size = max(min(size, (width - 0.7) * 72 / (em * max(len(text), 1))), 8)
            most = int((width - 0.7) * 72 / (em * size)) + 1
            self.text(0.35, y, shortened(text, most), fontsize=size, color=color, fontweight=weight)

    def text(self, x, y, text, **style):
        """Draw text whose baseline starts x, y inches from the upper left corner.  Coloured text is darkened to be legible."""
        if text and text != SQUARE and 'color' in style and style['color'] != PAPER:
            style['color'] = ink_of(style['color'])
        if text:
            names = {'fontsize': 'size', 'fontweight': 'weight'}
            self.labels.append(Label(x, y, text, **{names.get(name, name): value for name, value in style.items()}))

    def key(self, x, y, text, color, **style):
        """Draw an entry of a legend: a square in a colour, and a text."""
        self.text(x, y, SQUARE, color=color, **style)
        self.text(x + 0.16, y, text, **style)

    def line(self, x0, y0, x1, y1, color, width=0.7):
        self._lines.append((((x0, y0), (x1, y1)), color, width))

    def add(self, artist):
        """Draw an artist of matplotlib, which is placed in inches, below all Axes."""
        artist.set(transform=self.transform, zorder=artist.get_zorder() - _BELOW)
        self.figure.add_artist(artist)

    def image(self, x, y, width, height, colors):
        """Draw an image, uint8 (rows, columns, 4), at x, y in the given size, below everything else."""
        self._images.append((x, y, width, height, colors))

    def heading(self, x, y, width, title, note='', color=INK):
        """Draw a heading and a note above a part whose upper left corner is x, y."""
        self.text(x, y - 0.09, title, fontsize=9.5, color=color)
        self.text(x + width, y - 0.09, note, fontsize=7.5, color=GREY, ha='right')

    def axes(self, x, y, width, height, title='', note=''):
        """Return Axes with their upper left corner at x, y.  They have no ticks; `scale` draws them."""
        axes = self._axes(x, y, width, height)
        axes.inches = x, y, width, height
        axes.sheet = self
        self.heading(x, y, width, title, note)
        return axes

    def _axes(self, x, y, width, height):
        axes = self.figure.add_axes(_bare_axes()(
            self.figure, (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)))
        axes.patch.set_visible(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_visible(False)
        return axes

    def ticks(self, x, y, width, height, side, label, ticks, rotation=0, size=8):
        """Draw ticks and a label below ('x') or to the left ('y') of a part.

        ticks: [(position from 0 to 1, text)], counted from the left or from the top
        """
        is_x = side == 'x'
        corner = x, y + height
        self.line(*corner, *((x + width, y + height) if is_x else (x, y)), RULE, 0.8)
        for position, text in ticks:
            if is_x:
                at = x + position * width
                self.line(at, y + height, at, y + height + 0.04, RULE)
                style = {'ha': 'right', 'rotation': rotation, 'rotation_mode': 'anchor'} if rotation else {'ha': 'center'}
                self.text(at, y + height + 0.07, text, fontsize=size, color=GREY, va='top', **style)
            else:
                at = y + position * height
                self.line(x - 0.04, at, x, at, RULE)
                self.text(x - 0.07, at, text, fontsize=size, color=GREY, ha='right', va='center')
        if label:
            longest = max((len(text) for _, text in ticks), default=0) * 0.62 * size / 72
            if is_x:
                down = 0.24 + longest * abs(math.sin(math.radians(rotation))) if rotation else 0.14 + size / 72
                self.text(x + width / 2, y + height + down, label, fontsize=8.5, color=GREY, ha='center', va='top')
            else:
                self.text(x - 0.12 - longest, y + height / 2, label, fontsize=8.5, color=GREY, ha='right', va='center',
                          rotation=90)

    def pixels(self, dpi):
        """Draw the sheet and return its pixels, uint8 (rows, columns, 3)."""
        from PIL import Image
        self.figure.set_dpi(dpi)
        canvas = self.figure.canvas
        if self._lines:
            from matplotlib.collections import LineCollection
            segments, colors, widths = zip(*self._lines, strict=True)
            self.add(LineCollection(segments, colors=colors, linewidths=widths, zorder=2, clip_on=False))
            self._lines = []
        stamps = [(label, label.stamp(dpi)) for label in self.labels]
        for label, stamp in stamps:
            if stamp is None:
                label.add_to(self)
        self.labels = [label for label, stamp in stamps if stamp is not None]
        renderer = canvas.get_renderer()
        pixels = np.asarray(renderer.buffer_rgba())
        pixels.view(np.uint32)[...] = np.array([*_rgb(PAPER), 255], np.uint8).view(np.uint32)
        for image in self._images:
            _fill(pixels, dpi, *image)
        self.figure.patch.set_visible(False)
        self.figure.draw(renderer)
        picture = Image.fromarray(pixels).convert('RGB')
        for label, stamp in stamps:
            if stamp is not None:
                label.put(stamp, picture, dpi)
        return np.asarray(picture)

    def save(self, path, dpi):
        """Write a PNG atomically and return True.  A file not created by this program is not replaced: return False.

        UserError if the file cannot be written.
        """
        if os.path.lexists(path) and not is_ours(path):
            return False
        write_whole(path, _png(self.pixels(dpi), dpi, {'Software': SOFTWARE, 'Title': os.path.basename(path)}))
        return True


def _fill(pixels, dpi, x, y, width, height, colors):
    """Fill a rectangle of pixels (rows, columns, 4), given in inches, with an image: the nearest of its pixels each."""
    (top, bottom), (left, right) = ((round(start * dpi), max(round((start + size) * dpi), round(start * dpi) + 1))
                                    for start, size in ((y, height), (x, width)))
    rows, columns = (((np.arange(count) + 0.5) * parts / count).astype(np.intp)
                     for count, parts in ((bottom - top, colors.shape[0]), (right - left, colors.shape[1])))
    words = np.ascontiguousarray(colors).view(np.uint32)[..., 0]        # the four bytes of a pixel at once
    part = pixels.view(np.uint32)[top:bottom, left:right, 0]
    part[...] = words[rows[:len(part), None], columns[:part.shape[1]]]


def _png(pixels, dpi, texts):
    """Return a PNG of pixels (rows, columns, 3), with texts {keyword: value}.

    Rows are not filtered: pictures with areas of one colour become smaller than with the filters that Pillow chooses, in half
    of the time.
    """
    height, width, _ = pixels.shape
    rows = np.zeros((height, 1 + 3 * width), np.uint8)          # each begins with the number of its filter
    rows[:, 1:] = pixels.reshape(height, -1)
    per_metre = round(dpi / 0.0254)
    chunks = [(b'IHDR', struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)),
              *((b'tEXt', f'{name}\0{text}'.encode('latin-1', 'replace')) for name, text in texts.items()),
              (b'pHYs', struct.pack('>IIB', per_metre, per_metre, 1)), (b'IDAT', zlib.compress(rows, 1)), (b'IEND', b'')]
    return b'\x89PNG\r\n\x1a\n' + b''.join(
        struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data)) for kind, data in chunks)


def write_whole(path, data):
    """Replace the file `path` by one with the bytes `data`, completely or not at all.  UserError if that fails."""
    try:
        write_atomically(path, data)
    except OSError as error:
        raise UserError(f'{path}: cannot be written ({error.strerror or error}); give a writable folder with enough free space'
                        ) from error


def is_ours(path, as_named=False):
    """Return whether a file was created by this program: a picture, a table or a page with our mark in its first bytes.

    as_named: a picture must also have its original name
    """
    try:
        with open(path, 'rb') as file:
            head = file.read(1024)
    except OSError:
        return False
    name = b'tEXtTitle\0' + os.path.basename(path).encode('latin-1', 'replace')
    is_page = head.startswith(b'<!doctype html>') and b'<meta name="generator" content="%s">' % SOFTWARE.encode() in head
    is_picture = head.startswith(b'\x89PNG') and b'tEXtSoftware\0' + SOFTWARE.encode() in head
    return not os.path.islink(path) and (head.startswith(SOFTWARE.encode()) or is_page or is_picture
                                         and (not as_named or name in head))


def painted(matrix, low, high, cmap, hidden=None):
    """Return the colours of a map as uint8 (rows, columns, 4).  NaN and infinities are BROKEN.

    hidden: 0 or False in cells that are shown; 2 in cells with the colour of the paper, else the colour of padding
    """
    from matplotlib.colors import to_rgba
    with np.errstate(invalid='ignore', over='ignore', divide='ignore'):
        position = (matrix.astype(np.float64) - low) / ((high - low) or 1.0)
    is_finite = np.isfinite(matrix)
    colors = (cmap(np.where(is_finite, position, 0).clip(0, 1)) * 255).round().astype(np.uint8)
    colors[~is_finite] = [round(255 * c) for c in to_rgba(BROKEN)]
    if hidden is not None:
        for kind, color in enumerate((PADDING, PAPER), 1):
            colors[hidden == kind] = [round(255 * c) for c in to_rgba(color)]
    return colors


def color_bar(sheet, x, y, width, cmap, low, high, is_beyond, label=None):
    """Draw a colour bar with labels at its ends and middle.

    is_beyond: values exceed the scale; the ends of the bar are pointed then.  label: function that formats a number
    """
    from matplotlib.patches import Polygon
    sheet.image(x, y, width, 0.09, (cmap(np.linspace(0, 1, 256))[None] * 255).round().astype(np.uint8))
    if is_beyond:
        ends = [(((x + width, y), (x + width + 0.11, y + 0.045), (x + width, y + 0.09)), 1.0)]
        ends += [(((x, y), (x - 0.11, y + 0.045), (x, y + 0.09)), 0.0)] if low < 0 else []
        for corners, position in ends:
            sheet.add(Polygon(corners, facecolor=cmap(position), linewidth=0))
    label = label or number
    marks = [low, (low + high) / 2, high] if high > low else [low]
    if label is power:                          # integer exponents
        marks = [low, round((low + high) / 2), high] if high - low >= 2 else [low, high]
    if sum(len(label(mark)) for mark in marks) * 0.07 > width + 0.2:
        marks = [marks[0], marks[-1]]
    for mark in dict.fromkeys(marks):
        sheet.text(x + width * ((mark - low) / (high - low) if high > low else 0.5), y + 0.22, label(mark), fontsize=7.5,
                   color=GREY,
                   ha='center')


def scale(axes, side, label='', ticks=None, labels=None, most=6, grid=True, rotation=0, size=8):
    """Draw ticks, grid and label on one side of axes, 'x' (below) or 'y' (left), within their current limits.

    ticks: values of the ticks, default about `most` round numbers, or powers of ten on a logarithmic scale
    """
    is_x = side == 'x'
    limits = axes.get_xlim() if is_x else axes.get_ylim()
    low, high = sorted(limits)
    is_log = (axes.get_xscale() if is_x else axes.get_yscale()) == 'log'
    if ticks is None:
        ticks, labels = (_decades if is_log else _round_numbers)(low, high, most)
    elif labels is None:
        labels = [number(tick, 6) for tick in ticks]
    (axes.set_xlim if is_x else axes.set_ylim)(limits)
    inside = [(tick, text) for tick, text in zip(ticks, labels, strict=True)
              if low - 1e-9 * (high - low) <= tick <= high + 1e-9 * (high - low)]
    start, end, transform = (*map(math.log, limits), math.log) if is_log else (*limits, float)
    positions = [((transform(tick) - start) / (end - start), text) for tick, text in inside]
    x, y, width, height = axes.inches
    for position, _ in positions if grid else ():
        at = x + position * width if is_x else y + (1 - position) * height
        axes.sheet.line(*((at, y, at, y + height) if is_x else (x, at, x + width, at)), LIGHT, 0.6)
    axes.sheet.ticks(*axes.inches, side, label, [(p if is_x else 1 - p, text) for p, text in positions], rotation, size)


def _round_numbers(low, high, most):
    from matplotlib.ticker import MaxNLocator
    ticks = MaxNLocator(most, steps=(1, 2, 2.5, 5, 10)).tick_values(low, high)
    ticks = [float(tick) for tick in ticks if low - 1e-9 * (high - low) <= tick <= high + 1e-9 * (high - low)]
    step = min((b - a for a, b in zip(ticks, ticks[1:], strict=False)), default=abs(high - low) or 1)
    largest = max(map(abs, ticks), default=0)
    digits = max(1, math.ceil(math.log10(largest / step)) + 2) if largest and step else 3
    return ticks, [number(0.0 if abs(tick) < step * 1e-6 else tick, min(digits, 7)) for tick in ticks]


def _decades(low, high, most):
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    decades = list(range(first, last + 1, max(1, math.ceil((last - first + 1) / most))))
    return [10.0 ** d for d in decades], [str(10 ** d) if 0 <= d <= 3 else power(d, 10) for d in decades]


def slug(text, most=150):
    """Return text as a safe part of a file name: letters, digits, `.`, `_`, `-`.  A long one ends in a checksum."""
    safe = re.sub(r'[^A-Za-z0-9._-]+', '-', text).strip('.-') or 'tensor'
    if len(safe) > most:
        safe = f'{safe[:most - 9]}-{zlib.crc32(text.encode("utf-8", "surrogatepass")):08x}'
    return safe
