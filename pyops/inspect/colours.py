"""The colour of each number format, in pictures and on the page.

The Okabe-Ito palette: distinct under all kinds of colour blindness, on white and on a dark background.
"""
import zlib

FORMATS = {'fp32': '#7f7f7f', 'bf16': '#0072b2', 'fp16': '#56b4e9', 'hifp8': '#d55e00', 'mxfp8': '#009e73',
           'mxfp4': '#cc79a7', 'e4m3': '#009e73', 'e5m2': '#009e73', 'e2m1': '#cc79a7', 'e3m2': '#e69f00', 'e2m3': '#e69f00',
           'mxfp6': '#e69f00', 'mxint8': '#a08a3c', 'nvfp4': '#b5379a', 'fp8': '#2ca58d', 'int8': '#a0522d',
           'int4': '#c0504d'}


def of(fmt):
    """Return the colour '#rrggbb' of a Format or of its text, such as 'mxfp8:scale=rceil'; grey for an unknown format.

    A format with options has a darker shade.
    """
    name, _, options = str(fmt).partition(':')
    share = 0.8 - 0.4 * (zlib.crc32(options.encode()) % 12) / 11 if options else 1.0          # deterministic, unlike hash()
    return _scaled(FORMATS.get(name, FORMATS['fp32']), share)


def readable(colour):
    """Return a colour for small text on white: the given one, darkened to a contrast of at least 4.5 (WCAG 2.1, AA)."""
    share = 1.0
    while contrast(_scaled(colour, share)) < 4.5:
        share -= 0.02
    return _scaled(colour, share)


def contrast(colour):
    """Return the contrast ratio of '#rrggbb' to white, from 1 to 21."""
    parts = [part / 255 for part in _rgb(colour)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 1.05 / (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05)


def _rgb(colour):
    return [int(colour[i:i + 2], 16) for i in (1, 3, 5)]


def _scaled(colour, share):
    return '#' + ''.join(f'{round(part * share):02x}' for part in _rgb(colour))
