"""The picture of misread digits: it is drawn for any outcome, and its numbers are the right ones."""
import builtins
import subprocess
import sys

import numpy as np
import pytest

from mnist import report
from pyops.errors import UserError

RNG = np.random.default_rng(0)
LABELS = np.arange(200) % 10
IMAGES = RNG.integers(0, 256, (200, 784), np.uint8)


@pytest.fixture(scope='module', autouse=True)
def matplotlib():
    return pytest.importorskip('matplotlib', reason='matplotlib is not installed: pip install matplotlib')


@pytest.fixture
def texts(monkeypatch):
    """Draw, and return all text in the picture."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, 'savefig', lambda self, *a, **more: (figures.append(self), save(self, *a, **more)))

    def draw(*arguments, **more):
        report.draw(*arguments, **more)
        (figure,) = figures
        return [text.get_text() for text in figure.findobj(Text) if text.get_text()]
    return draw


def assert_picture(path):
    from matplotlib.image import imread
    assert path.read_bytes().startswith(b'\x89PNG')
    pixels = imread(path)
    assert min(pixels.shape[:2]) > 400 and np.ptp(pixels[..., 0]) > 0.5
    return pixels


def some_wrong(count):
    predictions = LABELS.copy()
    predictions[:count] = (predictions[:count] + 3) % 10
    return predictions


def test_confusion_counts():
    counts = report.confusion([0, 0, 2, 1, 0], np.array([0, 1, 2, 0, 1], np.uint8), 3)
    assert counts.tolist() == [[1, 2, 0], [1, 0, 0], [0, 0, 1]]
    assert report.confusion(np.full(300, 9, np.uint8), np.full(300, 9, np.uint8), 10)[9, 9] == 300    # no overflow
    assert report.confusion([], [], 4).tolist() == [[0] * 4] * 4


@pytest.mark.parametrize('wrong', [1, 10, 11, 39, 40, 41, 200])
def test_up_to_40_misread_digits(tmp_path, texts, wrong):
    shown = texts(tmp_path / 'out.png', [1.5, 0.5, 0.25], IMAGES, LABELS, some_wrong(wrong))
    assert_picture(tmp_path / 'out.png')
    pairs = [text for text in shown if '\N{RIGHTWARDS ARROW}' in text and 'misread' not in text]
    assert pairs == [f'{i % 10} \N{RIGHTWARDS ARROW} {(i + 3) % 10}' for i in range(min(wrong, 40))]
    (title,) = [text for text in shown if 'misread' in text]
    assert title.startswith(f'{wrong} misread') and (', the first 40 of them' in title) == (wrong > 40)
    assert f'{200 - wrong} of 200 correct ({1 - wrong / 200:.2%})' in shown
    assert '0.2500' in shown                                # the last loss
    assert {'true', 'predicted', 'epoch', 'loss'} <= set(shown)


def test_nothing_misread(tmp_path, texts):
    shown = texts(tmp_path / 'out.png', [0.1], IMAGES, LABELS, LABELS)
    assert_picture(tmp_path / 'out.png')
    assert 'Nothing was misread' in shown and '200 of 200 correct (100.00%)' in shown
    assert shown.count('20') == 10                          # the diagonal


def test_the_images_in_the_picture_are_the_misread_ones(tmp_path):
    """Black only where a misread digit is: its picture has much more ink."""
    images = np.zeros((200, 28, 28), np.uint8)
    images[5] = 255
    blank = LABELS.copy()
    blank[6] = 0
    report.draw(tmp_path / 'blank.png', [0.1], images, LABELS, blank)
    full = LABELS.copy()
    full[5] = 0
    report.draw(tmp_path / 'full.png', [0.1], images, LABELS, full)
    dark = [int((assert_picture(tmp_path / name)[..., :3].max(axis=2) < 0.1).sum())
            for name in ('blank.png', 'full.png')]
    assert dark[1] > dark[0] + 2000


@pytest.mark.parametrize('losses', [
    pytest.param([], id='none'),
    pytest.param([2.0], id='one'),
    pytest.param([np.nan, np.nan], id='nan'),
    pytest.param([1.0, np.inf], id='infinite'),
    pytest.param(np.float32([3, 2, 1]), id='array'),
    pytest.param(list(range(100)), id='many'),
])
@pytest.mark.filterwarnings('error')
def test_any_losses(tmp_path, losses):
    report.draw(tmp_path / 'out.png', losses, IMAGES, LABELS.astype(np.uint8), some_wrong(3).astype(np.int32))
    assert_picture(tmp_path / 'out.png')


def test_other_classes_and_no_images(tmp_path, texts):
    shown = texts(str(tmp_path / 'out'), [0.1], np.empty((0, 784), np.uint8), [], [], class_names=('cat', 'dog'))
    assert_picture(tmp_path / 'out')                        # PNG whatever the name
    assert {'cat', 'dog'} <= set(shown) and '9' not in shown and '0 of 0 correct' in shown


def test_lengths_that_differ(tmp_path):
    with pytest.raises(ValueError, match='200 images, 200 labels and 199 predictions'):
        report.draw(tmp_path / 'out.png', [0.1], IMAGES, LABELS, LABELS[1:])


@pytest.mark.parametrize('path, words', [('none/out.png', 'No such file or directory'), ('', 'Is a directory')])
def test_a_path_that_cannot_be_written(tmp_path, path, words):
    with pytest.raises(UserError) as caught:
        report.draw(tmp_path / path, [0.1], IMAGES, LABELS, some_wrong(3))
    text = str(caught.value)
    assert text.startswith(f'{tmp_path / path}: the picture cannot be written ({words})') and '\n' not in text


def test_without_matplotlib(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name.partition('.')[0] == 'matplotlib':
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
        return real(name, *arguments, **more)
    monkeypatch.setattr(builtins, '__import__', without)
    with pytest.raises(UserError) as caught:
        report.draw(tmp_path / 'out.png', [0.1], IMAGES, LABELS, LABELS)
    assert str(caught.value) == 'matplotlib is not installed: install it with: pip install matplotlib'


def test_importing_the_module_loads_no_matplotlib():
    program = 'import sys, mnist.report; sys.exit(any(name.startswith("matplotlib") for name in sys.modules))'
    assert subprocess.run([sys.executable, '-c', program], check=False).returncode == 0
