"""The colour of each number format, in pictures and on the page.

The Okabe-Ito palette: distinct under all kinds of colour blindness, on white and on a dark background.
"""

FORMATS = {'fp32': '#7f7f7f', 'bf16': '#0072b2', 'fp16': '#56b4e9', 'hifp8': '#d55e00', 'mxfp8': '#009e73',
           'mxfp4': '#cc79a7', 'e4m3': '#009e73', 'e5m2': '#009e73', 'e2m1': '#cc79a7'}


def of(fmt):
    """Return the colour '#rrggbb' of a Format or of its text, such as 'mxfp8:scale=rceil'; grey for an unknown format."""
    return FORMATS.get(str(fmt).partition(':')[0], FORMATS['fp32'])
