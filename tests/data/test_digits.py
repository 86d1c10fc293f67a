"""The embedded digits: the same ones everywhere, of the form of MNIST, and neither trivial nor impossible to learn."""
import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from pyops.data import digits


@pytest.fixture(scope='module')
def drawn():
    return digits.digits()


def test_form_and_balance(drawn):
    train, train_labels, test, test_labels = drawn
    assert train.shape == (10000, 784) and test.shape == (2000, 784)
    assert all(array.dtype == np.uint8 for array in drawn)
    assert np.bincount(train_labels).tolist() == [1000] * 10
    assert np.bincount(test_labels).tolist() == [200] * 10
    # no batch of one digit: what a program that does not shuffle would see
    assert min(len(set(train_labels[i:i + 100])) for i in range(0, 10000, 100)) >= 9


def test_calls_share_arrays_that_nobody_can_spoil(drawn):
    assert all(a is b or a.base is b.base for a, b in zip(drawn, digits.digits(), strict=True))
    for array in drawn:
        with pytest.raises(ValueError, match='read-only'):
            array[0] = 0


def test_the_digits_stay_the_same(drawn):
    """Labels to the bit.  Pixels may differ in a rounding where sines and roots differ in their last bit."""
    train, train_labels, test, test_labels = drawn
    assert hashlib.sha256(train_labels.tobytes() + test_labels.tobytes()).hexdigest()[:16] == 'a2ade1bd1c8e4c5f'
    assert train_labels[:10].tolist() == [7, 3, 8, 8, 5, 7, 2, 1, 2, 6]
    assert abs(train.mean() - 26.518) < 0.01 and abs(test.mean() - 26.787) < 0.01
    assert abs(train[0].mean() - 25.42) < 0.1
    means = [train[train_labels == digit].mean() for digit in range(10)]
    assert np.allclose(means, [30.9, 17.06, 28.03, 27.44, 25.91, 27.43, 27.66, 23.1, 31.43, 26.21], rtol=0, atol=0.05)
    # the centres of mass of some of them, x and y: whatever moves a stroke moves these
    images = train[:6].reshape(-1, 28, 28).astype(np.float64)
    centres = np.stack([images.sum(axis=1) @ np.arange(28), images.sum(axis=2) @ np.arange(28)])
    want = [[13.296, 14.46], [13.104, 14.412], [13.368, 13.953], [13.161, 14.806], [12.727, 12.919], [14.165, 14.888]]
    assert np.allclose((centres / images.sum(axis=(1, 2))).T, want, rtol=0, atol=0.004)


def test_another_process_draws_the_same(drawn):
    program = ('import hashlib; from pyops.data.digits import digits\n'
               'print(hashlib.sha256(b"".join(array.tobytes() for array in digits())).hexdigest())')
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True,
                          env=os.environ | {'PYTHONHASHSEED': '7', 'OMP_NUM_THREADS': '1'})
    assert done.stdout.strip() == hashlib.sha256(b''.join(array.tobytes() for array in drawn)).hexdigest()


def test_they_are_placed_and_inked_as_mnist(drawn):
    images = drawn[0].reshape(-1, 28, 28).astype(np.float64)
    assert 20 < images.mean() < 45                          # MNIST: 33.3
    assert 0.15 < (images > 0).mean() < 0.25                # MNIST: 0.19
    assert (images.max(axis=(1, 2)) > 150).all()
    mass = images.sum(axis=(1, 2))
    grid = np.arange(28)
    for axis in (1, 2):
        middle = (images.sum(axis=3 - axis) @ grid) / mass
        assert abs(middle.mean() - 13.5) < 0.2 and np.abs(middle - 13.5).max() < 4
        dark = images.max(axis=3 - axis) > 40
        extent = 28 - dark[:, ::-1].argmax(axis=1) - dark.argmax(axis=1)
        assert extent.max() <= 26
        if axis == 1:
            assert 16 < extent.mean() < 22                  # a digit is higher than wide, and fills the box
    assert images[:, 0].mean() < 1 and images[:, :, 0].mean() < 1 and images[:, 27].mean() < 1


def test_no_two_are_alike(drawn):
    images = np.concatenate([drawn[0], drawn[2]])
    assert len({image.tobytes() for image in images}) == len(images)


def test_a_row_is_a_row(drawn):
    """A 7 has its bar above, and what ink it has below stands on one foot: neither flipped nor transposed."""
    sevens = drawn[0][drawn[1] == 7].reshape(-1, 28, 28).mean(axis=0)
    wide = (sevens > 40).sum(axis=1)
    assert wide[5:10].max() >= wide[17:23].max() + 4


def nearest_mean(train, train_labels, test, test_labels):
    means = np.stack([train[train_labels == digit].mean(axis=0) for digit in range(10)])
    scores = test.astype(np.float64) @ means.T - (means ** 2).sum(axis=1) / 2
    return (scores.argmax(axis=1) == test_labels).mean()


def test_they_are_neither_trivial_nor_impossible(drawn):
    """The nearest mean image is right for 82 % of MNIST's test."""
    assert 0.55 < nearest_mean(*drawn) < 0.90


@pytest.fixture
def one_thread(torch):
    """So small a network is slowed down by more, and by far where other programs run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures('one_thread')
def test_a_small_network_learns_them(drawn, torch):
    """784-30-10 in 10 epochs, as the mnist program has it: about 95 %."""
    train, train_labels, test, test_labels = (torch.from_numpy(array.astype(np.int64)) for array in drawn)
    train, test = train.float() / 255, test.float() / 255
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(784, 30), torch.nn.ReLU(), torch.nn.Linear(30, 10))
    adam = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(10):
        for batch in torch.randperm(len(train)).split(100):
            loss = torch.nn.functional.cross_entropy(model(train[batch]), train_labels[batch])
            adam.zero_grad()
            loss.backward()
            adam.step()
    correct = (model(test).argmax(1) == test_labels).float().mean().item()
    assert 0.92 < correct < 0.98
