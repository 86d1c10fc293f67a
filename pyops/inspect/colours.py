"""The colour of every number format, the same in pictures and on the page.

The palette of Okabe and Ito, whose colours differ for all kinds of colour blindness, on white and on near black.
"""

FORMATS = {'fp32': '#7f7f7f', 'bf16': '#0072b2', 'fp16': '#56b4e9', 'hifp8': '#d55e00', 'mxfp8': '#009e73',
           'mxfp4': '#cc79a7', 'e4m3': '#009e73', 'e5m2': '#009e73', 'e2m1': '#cc79a7'}


def of(fmt):
    """Colour '#rrggbb' of a format, a name or a text such as 'mxfp8:scale=rceil'; grey for one that is not ours."""
    return FORMATS.get(str(fmt).partition(':')[0], FORMATS['fp32'])
