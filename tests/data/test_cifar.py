"""CIFAR-10 from files of both versions, and what is refused."""
import pickle

import numpy as np
import pytest
from cifar_files import images_of, write_binary, write_pickled

from pyops.data import CIFAR10Dataset, DataLoader, RandomFlipHorizontal, cifar
from pyops.errors import UserError


@pytest.mark.parametrize('write', [write_binary, write_pickled])
@pytest.mark.parametrize('inside', cifar.FOLDERS)
def test_both_versions_are_read_from_their_folder_or_the_one_above(write, inside, tmp_path):
    write(tmp_path / inside, 4)
    for train, seeds in ((True, range(5)), (False, [5])):
        dataset = CIFAR10Dataset(tmp_path, train)
        images, labels = (np.concatenate(column) for column in zip(*(images_of(seed, 4) for seed in seeds), strict=True))
        assert len(dataset) == len(images) and (dataset.images == images).all() and (dataset.labels == labels).all()
        image, label = dataset[3]
        assert image.shape == (3, 32, 32) and image.dtype == np.float32 and label == labels[3]
        assert np.abs(image.reshape(-1) - images[3] / 255).max() <= 1e-7
    assert (dataset[1:3][0] == dataset.batch(np.array([1, 2]))[0]).all() and len(cifar.CLASSES) == 10


def test_the_folder_of_the_environment_is_searched(tmp_path, monkeypatch):
    write_binary(tmp_path / 'cifar-10-batches-bin', 2)
    monkeypatch.setenv('PYOPS_DATA', str(tmp_path))
    assert len(CIFAR10Dataset()) == 10


def test_transforms_see_images_with_the_channels_last():
    seen = []
    dataset = CIFAR10Dataset.of(*images_of(0, 6), transforms=[RandomFlipHorizontal(1), lambda x: seen.append(x.shape) or x])
    plain = CIFAR10Dataset.of(images_of(0, 6)[0].reshape(6, 3, 32, 32), images_of(0, 6)[1])
    (images, labels), = DataLoader(dataset, 6, arrays=True)
    assert (images == plain.batch(np.arange(6))[0][..., ::-1]).all() and images.flags.c_contiguous
    assert set(seen) == {(32, 32, 3)} and (labels == plain.labels).all() and labels.dtype == np.int32


class Opened:
    """Its pickle would call a function of its writer's choice."""

    def __reduce__(self):
        return print, ('opened',)


def test_a_pickle_with_anything_but_arrays_is_not_opened(tmp_path, capsys):
    write_pickled(tmp_path, 2)
    (tmp_path / 'test_batch').write_bytes(pickle.dumps({b'data': Opened(), b'labels': [1]}))
    with pytest.raises(UserError, match='test_batch: is no pickled batch of CIFAR-10 .it refers to .*print.; get the'):
        CIFAR10Dataset(tmp_path, train=False)
    assert capsys.readouterr().out == ''


def test_a_pickled_dtype_whose_state_is_damaged_is_refused(tmp_path):
    """numpy itself ends the process when it unpickles this one."""
    array = pickle.dumps(np.zeros((1, 3072), np.uint8), 2)
    state = array.index(b'(K\x03X\x01\x00\x00\x00|q')
    end = array.index(b'b', state)
    damaged = array[:state] + b'(K\x03X\x01\x00\x00\x00|NJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb' + array[end + 1:]
    assert array[state:end].count(b'N') == 3
    (tmp_path / 'batch').write_bytes(damaged)
    with pytest.raises(UserError, match='batch: is no pickled batch of CIFAR-10'):
        cifar.read_pickled(tmp_path / 'batch')
    (tmp_path / 'batch').write_bytes(pickle.dumps({'data': np.zeros(3, object), 'labels': [1]}))
    with pytest.raises(UserError, match='batch: is no pickled batch of CIFAR-10 .it has an array of O8.; get'):
        cifar.read_pickled(tmp_path / 'batch')


def test_arrays_of_any_integers_pickled_by_any_protocol_are_read(tmp_path):
    images, labels = images_of(0, 2)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        for pixels, kind in ((images, '>i2'), (np.asfortranarray(images), 'i8'), (images, 'u1')):
            (tmp_path / 'batch').write_bytes(pickle.dumps({'data': pixels, 'labels': labels.astype(kind)}, protocol))
            found = cifar.read_pickled(tmp_path / 'batch')
            assert (found[0] == images).all() and (found[1] == labels).all() and found[1].dtype == np.uint8


@pytest.mark.parametrize('change, error', [
    (lambda folder: (folder / 'data_batch_3.bin').unlink(), 'incomplete, data_batch_3.bin missing; unpack its archive'),
    (lambda folder: (folder / 'data_batch_3.bin').write_bytes(b'x' * 3072), 'data_batch_3.bin: has 3072 bytes, expected'),
    (lambda folder: (folder / 'data_batch_3.bin').write_bytes(b''), 'data_batch_3.bin: has 0 bytes, expected records of 3073'),
    (lambda folder: (folder / 'data_batch_3.bin').write_bytes(b'\x0a' * 3073), 'data_batch_3.bin: has a label 10, exp'),
    (lambda folder: (folder / 'data_batch_1').write_bytes(b'x'), 'CIFAR-10 is incomplete, data_batch_2, .* missing'),
    (lambda folder: [(folder / name).write_bytes(b'x') for name in cifar.TRAIN], 'data_batch_1: is no pickled batch'),
    (lambda folder: [(folder / name).write_bytes(pickle.dumps({'data': np.zeros((2, 5), np.uint8), 'labels': [1, 2]}))
                     for name in cifar.TRAIN], r'data_batch_1: has images \(2, 5\) of uint8 and labels \(2,\) of int64, exp'),
    *((lambda folder, labels=labels: [(folder / name).write_bytes(pickle.dumps(
        {'data': np.zeros((len(labels), 3072), np.uint8), 'labels': labels})) for name in cifar.TRAIN], f'_1: {error}')
      for labels, error in (([1, 256], 'has a label 256, expected 0 to 9'), ([3, -1], 'has a label -1, expected'),
                            ([1.5], r'has images .* labels \(1,\) of float64, expected .* of integers'),
                            ([], r'has images \(0, 3072\) of uint8'))),
])
def test_damaged_files_are_named(change, error, tmp_path):
    write_binary(tmp_path, 2)
    change(tmp_path)
    with pytest.raises(UserError, match=error):
        CIFAR10Dataset(tmp_path)


def test_a_missing_data_set_says_where_to_get_it(tmp_path):
    with pytest.raises(UserError, match=f'CIFAR-10: data_batch_1 not found in {tmp_path}; unpack cifar-10-python.tar.gz'):
        CIFAR10Dataset(tmp_path)
    with pytest.raises(UserError, match='no such directory'):
        CIFAR10Dataset(tmp_path / 'none')
    with pytest.raises(TypeError, match="CIFAR10Dataset: train: expected True or False, got 'x'"):
        CIFAR10Dataset(tmp_path, 'x')
