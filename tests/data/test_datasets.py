"""Datasets and the random changes to images, all of them functions of (seed, epoch, number of the sample)."""
import numpy as np
import pytest

import pyops
from pyops import Tensor, params
from pyops.data import (
    ArrayDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    MNISTDataset,
    RandomCrop,
    RandomFlipHorizontal,
    Subset,
    TensorDataset,
    mnist,
    random_split,
)
from pyops.data.transforms import random_words
from pyops.philox import philox4x32

RNG = np.random.default_rng(0)
IMAGES = RNG.random((20, 6, 5, 2), np.float32)


def digits(n=23, transforms=()):
    rng = np.random.default_rng(1)
    return MNISTDataset.of(rng.integers(0, 256, (n, 784), np.uint8), rng.integers(0, 10, n, np.uint8), transforms)


# ---- random words ----------------------------------------------------------------------------------------------------

def test_random_words_are_those_of_philox():
    indices, key = np.array([0, 1, 77, 2**33 + 5]), params.key(3, 'transform.1')
    counter = [[i & 0xFFFFFFFF, i >> 32, 4, 0] for i in indices.tolist()]
    want = philox4x32(np.array(counter, np.uint32), (key & 0xFFFFFFFF, key >> 32))
    assert (random_words(3, 'transform.1', 4, indices) == want).all()
    for other in ((4, 'transform.1', 4), (3, 'transform.2', 4), (3, 'transform.1', 5)):
        assert (random_words(*other, indices) != want).all()


# ---- transforms ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('transform', [RandomFlipHorizontal(0.5), RandomCrop(2), RandomCrop(7)], ids=repr)
def test_a_batch_is_its_images_one_by_one(transform):
    words = random_words(1, 'a', 0, np.arange(20))
    batch = transform.batch(IMAGES, words)
    assert batch.shape == IMAGES.shape and batch.dtype == IMAGES.dtype
    for x, word, y in zip(IMAGES, words, batch, strict=True):
        assert (transform(x, word) == y).all()
    assert transform.batch(IMAGES[:0], words[:0]).shape == (0, 6, 5, 2)


def test_flips_mirror_left_and_right_with_their_probability():
    words = random_words(1, 'a', 0, np.arange(20))
    assert (RandomFlipHorizontal(1).batch(IMAGES, words) == IMAGES[:, :, ::-1]).all()
    assert (RandomFlipHorizontal(0).batch(IMAGES, words) == IMAGES).all()
    ramp = np.zeros((4000, 1, 2, 1), np.float32)
    ramp[:, 0, 1] = 1
    share = RandomFlipHorizontal(0.3).batch(ramp, random_words(1, 'a', 0, np.arange(4000)))[:, 0, 0, 0].mean()
    assert abs(share - 0.3) <= 5 * np.sqrt(0.21 / 4000)


def test_crops_shift_evenly_and_bring_zeros_in():
    n, p = 7000, 3
    x = np.zeros((n, 9, 8, 1), np.float32)
    x[:, 4, 4] = 1                          # far enough from the border to stay
    _, rows, columns, _ = np.nonzero(RandomCrop(p).batch(x, random_words(1, 'a', 0, np.arange(n))))
    for places in (rows, columns):
        counts = np.bincount(places - 1, minlength=7)
        assert len(places) == n and len(counts) == 7 and abs(counts - n / 7).max() <= 5 * np.sqrt(n * 6 / 49)
    assert abs(np.corrcoef(rows, columns)[0, 1]) < 0.05
    y = RandomCrop(1)(np.ones((3, 3, 1), np.float32), np.array([0, 2**32 - 1, 0, 0], np.uint32))     # up and to the right
    assert y[..., 0].tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 0]]


def test_an_image_alone_is_changed_at_random():
    x = RNG.random((8, 8, 1), np.float32)
    pyops.seed(1)
    first = [RandomCrop(3)(x).tobytes() for _ in range(30)]
    pyops.seed(1)
    again = [RandomCrop(3)(x).tobytes() for _ in range(30)]
    pyops.seed(0)
    assert first == again and first != [RandomCrop(3)(x).tobytes() for _ in range(30)]
    assert len(set(first)) > 5


@pytest.mark.parametrize('make, text', [
    (lambda: RandomFlipHorizontal(1.5), 'p: expected 0 <= p <= 1, got 1.5'),
    (lambda: RandomCrop(-1), 'padding: expected 0 or more, got -1'),
    (lambda: RandomCrop(1)(np.zeros((3, 3))), r'expected an image \(H, W, C\), got shape \(3, 3\)'),
    (lambda: ArrayDataset(np.zeros((2, 3, 3)), transforms=[RandomCrop(1)]).batch(np.arange(2)),
     r'RandomCrop\(padding=1\): expected images \(B, H, W, C\), got shape \(2, 3, 3\)')])
def test_transforms_say_what_they_want(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# ---- datasets --------------------------------------------------------------------------------------------------------

class Squares(Dataset):
    """Samples that are made one by one."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return np.full((2, 2, 1), index, np.float32), index ** 2


def test_a_dataset_of_single_samples_makes_batches():
    images, squares = Squares().batch(np.array([3, 1]))
    assert images.shape == (2, 2, 2, 1) and images[:, 0, 0, 0].tolist() == [3, 1] and squares.tolist() == [9, 1]
    images, _ = Squares([lambda x: x + 1, RandomFlipHorizontal(1)]).batch(np.array([3, 1]))
    assert images[:, 0, 0, 0].tolist() == [4, 2]
    for method in (lambda d: len(d), lambda d: d[0]):
        with pytest.raises(NotImplementedError, match='Dataset.__'):
            method(Dataset())


class Bare(Dataset):
    """One that does not call __init__, and whose samples are given."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return self.sample


def test_samples_are_tuples():
    assert Bare((1.0, 2)).batch(np.arange(2))[1].tolist() == [2, 2]
    with pytest.raises(TypeError, match=r'Bare\[1\]: expected a tuple such as \(image, label\), got ndarray'):
        Bare(np.zeros(2)).batch(np.array([1]))
    with pytest.raises(OverflowError, match='1099511627776 out of bounds for int32'):
        next(iter(DataLoader(Bare((1.0, 2**40)))))


def test_arrays_make_a_dataset():
    dataset = ArrayDataset(IMAGES, np.arange(20), transforms=[RandomFlipHorizontal(1)])
    images, numbers = dataset.batch(np.array([4, 2]))
    assert (images == IMAGES[[4, 2], :, ::-1]).all() and numbers.tolist() == [4, 2] and len(dataset) == 20
    with pytest.raises(ValueError, match=r'equal length, got \[\(20, 6, 5, 2\), \(3,\)\]'):
        ArrayDataset(IMAGES, np.arange(3))


@pytest.mark.parametrize('make', [lambda *t: ArrayDataset(IMAGES, np.arange(20), transforms=t), lambda *t: digits(20, t)],
                         ids=['arrays', 'digits'])
def test_a_single_sample_is_that_of_a_batch_with_its_transforms(make):
    plain, changed = make(), make(RandomCrop(2), RandomFlipHorizontal(0.5), lambda x: x * 2)
    images, labels = changed.batch(np.arange(20))
    assert (images != plain.batch(np.arange(20))[0]).any()
    for i in (0, 3, 19, -1, np.int64(4)):
        image, label = changed[i]
        assert image.shape == images.shape[1:] and (image == images[i]).all() and label == labels[i]
        assert (plain[i][0] == plain.batch(np.array([i % 20]))[0][0]).all()
    for index in (slice(2, 9, 3), [5, -1, 5], labels > 7):
        found, numbers = changed[index]
        assert (found == images[index]).all() and (numbers == labels[index]).all()
    for index in (20, -21):
        with pytest.raises(IndexError, match=f'Dataset: index {index} is out of bounds for 20 samples'):
            changed[index]


def test_files_are_not_taken_for_the_choice_of_training_or_test():
    with pytest.raises(TypeError, match="^MNISTDataset: train: expected True or False, got 'a.gz'; data_dir names the folder, "
                                        r'and MNISTDataset.of\(images, labels\) takes arrays of other files$'):
        MNISTDataset('a.gz', 'b.gz')


def test_digits_are_images_from_0_to_1():
    dataset = digits()
    images, labels = dataset.batch(np.array([5, 5, 22]))
    assert images.shape == (3, 28, 28, 1) and images.dtype == np.float32 and labels.dtype == np.int32
    close = np.abs(images.reshape(3, -1) - dataset.images[[5, 5, 22]] / 255).max()
    assert close <= 1e-7 and (labels == dataset.labels[[5, 5, 22]]).all()
    image, label = dataset[-1]
    assert image.shape == (28, 28, 1) and (image == images[2]).all() and label == labels[2]
    for index in (23, -24):
        with pytest.raises(IndexError, match='MNISTDataset: index .* is out of bounds for 23 samples'):
            dataset[index]


def test_mnist_or_the_embedded_digits():
    train, test = MNISTDataset(embedded=True), MNISTDataset(train=False, embedded=True)
    assert len(train) == 10_000 and len(test) == 2_000
    assert (train.images == mnist.load(embedded=True).train_images).all()


def test_the_parts_of_mnist():
    images = np.zeros((mnist.TRAINED + 7, 1), np.uint8)
    labels = np.arange(len(images)) % 10
    whole = mnist.Digits('x', images, labels.astype(np.uint8), images[:3], labels[:3].astype(np.uint8))
    (a, b), (c, d) = whole.parts()
    assert len(a) == len(b) == mnist.TRAINED and len(c) == len(d) == 7 and b.dtype == d.dtype == np.int32
    assert np.concatenate([b, d]).tolist() == labels.tolist()
    small = whole._replace(train_images=images[:5], train_labels=labels[:5])
    assert [len(part) for pair in small.parts() for part in pair] == [5, 5, 3, 3]


@pytest.mark.parametrize('make', [lambda: digits(20, [RandomCrop(2)]), lambda: Squares([lambda x: x + 1])],
                         ids=['digits', 'squares'])
def test_a_subset_has_the_samples_of_its_indices(make):
    whole = make()
    for indices, want in ((slice(2, 9, 3), [2, 5, 8]), ([5, -1, 5], [5, len(whole) - 1, 5])):
        part = Subset(whole, indices)
        assert len(part) == 3
        for given, expected in zip(part.batch(np.array([2, 0]), 3, 4), whole.batch(np.array([want[2], want[0]]), 3, 4),
                                   strict=True):
            assert (given == expected).all()
        sample, (image, number) = part.samples(np.array([1]), 3, 4)[0], whole.batch(np.array([want[1]]), 3, 4)
        assert (sample[0] == image[0]).all() and sample[1] == number[0]
        assert (part[-1][0] == part.batch(np.array([2]))[0][0]).all()
    with pytest.raises(IndexError):
        Subset(whole, [99])


def test_tensors_make_a_dataset_as_in_torch(torch):
    x, y = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8)
    dataset, twin = TensorDataset(Tensor(x), y), torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    assert len(dataset) == len(twin) == 8 and [one.tolist() for one in dataset[3]] == [one.tolist() for one in twin[3]]
    assert all(isinstance(one, Tensor) for one in dataset[3])
    for ours, theirs in zip(DataLoader(dataset, 3), torch.utils.data.DataLoader(twin, 3), strict=True):
        assert [one.tolist() for one in ours] == [one.tolist() for one in theirs]
    seen = []
    list(DataLoader(dataset, 3, collate_fn=lambda samples: seen.extend(samples) or samples))
    assert all(isinstance(one, Tensor) for sample in seen for one in sample) and len(seen) == 8


def test_datasets_side_by_side_and_one_after_the_other_are_torchs(torch):
    import pyops.utils.data as ours
    theirs = torch.utils.data
    words, numbers = list('abcdef'), list(range(6))

    def found(data):
        class Counted(data.IterableDataset):
            def __iter__(self):
                return iter(range(3))

            def __len__(self):
                return 3
        stack, by_name = data.StackDataset(words, numbers), data.StackDataset(word=words, number=numbers)
        chain, part = Counted() + data.ChainDataset([Counted()]), data.Subset(words, [4, 1])
        joined = data.ConcatDataset([words, numbers]) + words
        parts = data.random_split(words, [2, 4])
        return (stack[2], stack[-1], len(stack), by_name[3], list(data.DataLoader(by_name, 4)), [*chain], len(chain),
                part.indices, [part[i] for i in range(2)], len(joined), joined[13], type(joined) is data.ConcatDataset,
                [type(part.indices) for part in parts], sorted(parts[0].indices + parts[1].indices), data.get_worker_info(),
                [*data.DataLoader(chain, 4)], data.default_convert([np.ones(2), ('a', 1), {'b': np.zeros(1)}]))

    def plain(value):
        if isinstance(value, dict):
            return {name: plain(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [plain(one) for one in value]
        return value.tolist() if hasattr(value, 'tolist') else value
    assert plain(found(ours)) == plain(found(theirs))


def test_what_cannot_be_joined_is_refused():
    from pyops.data import ChainDataset, StackDataset
    for call, error, text in (
            (lambda: StackDataset([1], [1, 2]), ValueError, 'expected datasets of equal length, got .1, 2.'),
            (lambda: StackDataset(), ValueError, 'by position or by name, got none'),
            (lambda: StackDataset([1], a=[1]), ValueError, 'got both'),
            (lambda: StackDataset([1, 2])[2], IndexError, 'index 2 is out of bounds for 2 samples'),
            (lambda: ChainDataset([[1]]), TypeError, 'expected IterableDatasets, got list; ConcatDataset')):
        with pytest.raises(error, match=text):
            call()
    # samples of a dataset with transforms, whose indices can be set later
    part = Subset(Squares([lambda x: x + 1]), slice(2, 5))
    assert part.indices == slice(2, 5) and StackDataset(part, 'abc')[1][0][0][0, 0, 0] == 4
    part.indices = [1]
    assert len(part) == 1 and part[0][1] == 1


def test_any_sequences_are_divided_and_joined(torch):
    words = list('abcdefghij')
    part = Subset(words, [7, 0, -1])
    assert [part[i] for i in range(3)] == ['h', 'a', 'j'] and part[:2] == ['h', 'a']
    assert list(DataLoader(part, 2)) == [['h', 'a'], ['j']]
    both = ConcatDataset([words, part, Squares([lambda x: x + 1])])
    assert len(both) == 10 + 3 + len(Squares()) and (both[3], both[11], both[13][1], both[-1][1]) == ('d', 'a', 0, 81)
    assert both[13][0][0, 0, 0] == 1 and list(DataLoader(Subset(both, [1, 12]), 2)) == [['b', 'j']]
    images, squares = next(iter(DataLoader(Subset(both, [14, 13]), 2)))
    assert images[:, 0, 0, 0].tolist() == [2, 1] and squares.tolist() == [1, 0]
    for lengths in ([3, 7], [0.25, 0.25, 0.5]):
        parts = random_split(words, lengths, np.random.default_rng(1))
        want = torch.utils.data.random_split(words, lengths)
        assert [len(one) for one in parts] == [len(one) for one in want]
        assert sorted(word for one in parts for word in one) == words
    assert [*random_split(words, [5, 5])[0]] != [*random_split(words, [5, 5])[0]]
    for call, error, text in ((lambda: both[len(both)], IndexError, 'ConcatDataset: index 23 is out of bounds for 23 samples'),
                              (lambda: ConcatDataset([]), ValueError, 'expected at least one dataset'),
                              (lambda: random_split(words, [3, 3]), ValueError, 'expected numbers with sum 10')):
        with pytest.raises(error, match=text):
            call()
