"""Draw a picture of a training run: loss curve, confusion matrix and misclassified digits."""
import math

import numpy as np

from pyops.errors import UserError

SHEET = 40              # maximum number of misclassified digits shown
_COLUMNS = 10
_ARROW = '\N{RIGHTWARDS ARROW}'
_BLUE, _RED, _GREY = '#2a6fbb', '#c0392b', '#777777'


def check():
    """Raise UserError if matplotlib, which draw() needs, is missing: call it before training."""
    _matplotlib()


def _matplotlib():
    """Return FigureCanvasAgg and Figure.  Not pyplot: it selects a GUI backend and keeps every figure alive."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError('matplotlib is not installed: install it with: pip install matplotlib') from error
    return FigureCanvasAgg, Figure


def draw(path, losses, images, labels, predictions, class_names='0123456789'):
    """Write one PNG with the confusion matrix, the loss curve and misclassified digits.

    losses: mean loss of each epoch, (epochs,).  images: (N, 784) or (N, 28, 28), 0 (paper) to 255 (ink).
    labels, predictions: (N,), indices into `class_names`.
    Raises UserError if matplotlib is missing or the file cannot be written.
    """
    labels, predictions = np.asarray(labels, np.int64), np.asarray(predictions, np.int64)
    if not len(images) == len(labels) == len(predictions):
        raise ValueError(f'{len(images)} images, {len(labels)} labels and {len(predictions)} predictions')
    FigureCanvasAgg, Figure = _matplotlib()
    misread = np.flatnonzero(labels != predictions)
    rows = math.ceil(min(len(misread), SHEET) / _COLUMNS)
    heights = 5, 0.3 + 1.2 * rows                           # inches
    figure = Figure(figsize=(12, sum(heights) + 0.7), layout='constrained')
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=heights)
    _draw_confusion(figure.add_subplot(grid[0, 0]), confusion(labels, predictions, len(class_names)), class_names)
    _draw_losses(figure.add_subplot(grid[0, 1]), losses)
    _draw_sheet(figure.add_subplot(grid[1, :]), np.asarray(images).reshape(len(images), 28, 28), labels, predictions,
                misread, class_names)
    correct = len(labels) - len(misread)
    share = f' ({correct / len(labels):.2%})' if len(labels) else ''
    figure.suptitle(f'{correct} of {len(labels)} correct{share}', fontsize=14)
    try:
        figure.savefig(path, dpi=100, format='png')
    except OSError as error:
        raise UserError(f'{path}: the picture cannot be written ({error.strerror or error}); '
                        'expected the path of a file, such as report.png, in a folder that exists') from error


def confusion(labels, predictions, classes):
    """Return counts[true, predicted], int64 (classes, classes)."""
    counts = np.bincount(np.asarray(labels, np.int64) * classes + np.asarray(predictions, np.int64),
                         minlength=classes * classes)
    return counts.reshape(classes, classes)


def _draw_confusion(axes, counts, class_names):
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)                              # the diagonal would dominate the color scale
    largest = max(wrong.max(), 1)
    axes.imshow(np.sqrt(wrong / largest), cmap='Reds', vmin=0, vmax=1.15)
    for (row, column), count in np.ndenumerate(counts):
        if row == column:
            axes.add_patch(_square(row))
        if count:
            dark = row != column and count > 0.45 * largest
            axes.text(column, row, count, ha='center', va='center', fontsize=9,
                      color=_GREY if row == column else 'white' if dark else 'black')
    ticks = range(len(class_names))
    axes.set_xticks(ticks, class_names)
    axes.set_yticks(ticks, class_names)
    axes.set_xlabel('predicted')
    axes.set_ylabel('true')
    axes.set_title('Confusion matrix')
    axes.tick_params(length=0)


def _square(index):
    from matplotlib.patches import Rectangle
    return Rectangle((index - 0.5, index - 0.5), 1, 1, color='#eeeeee', linewidth=0)


def _draw_losses(axes, losses):
    from matplotlib.ticker import MaxNLocator
    axes.plot(range(len(losses)), losses, color=_BLUE, marker='o', markersize=4)
    if len(losses):
        axes.annotate(f'{losses[-1]:.4f}', (len(losses) - 1, losses[-1]), (0, 8), textcoords='offset points',
                      ha='center', color=_BLUE)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.5, max(len(losses), 1) - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(color='#dddddd', linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel('epoch')
    axes.set_ylabel('loss')
    axes.set_title('Training loss')


def _draw_sheet(axes, images, labels, predictions, misread, class_names):
    axes.axis('off')
    if not len(misread):
        axes.set_title('Nothing was misread')
        return
    shown = misread[:SHEET]
    rest = f', the first {len(shown)} of them' if len(shown) < len(misread) else ''
    axes.set_title(f'{len(misread)} misread{rest}: true {_ARROW} predicted')
    # One image for all digits: an Axes per digit would take seconds.
    side, pitch_x, pitch_y = images.shape[1], 40, 41
    rows = math.ceil(len(shown) / _COLUMNS)
    sheet = np.zeros((rows * pitch_y, _COLUMNS * pitch_x), images.dtype)
    for place, index in enumerate(shown):
        row, column = divmod(place, _COLUMNS)
        x, y = column * pitch_x + (pitch_x - side) // 2, (row + 1) * pitch_y - side
        sheet[y:y + side, x:x + side] = images[index]
        axes.text(x + side / 2, y - 1, f'{class_names[labels[index]]} {_ARROW} {class_names[predictions[index]]}',
                  ha='center', va='bottom', fontsize=11, color=_RED)
    axes.imshow(sheet, cmap='gray_r', vmin=0, vmax=255, interpolation='nearest')
