"""The loader: order of the samples, samplers, threads, and batches of any samples."""
import threading
import time
from collections import namedtuple

import numpy as np
import pytest

from pyops.autograd import Tensor
from pyops.data import (
    ArrayDataset,
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    MNISTDataset,
    RandomCrop,
    RandomFlipHorizontal,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from pyops.data.batches import epoch_order
from pyops.plan import Plan

RNG = np.random.default_rng(0)
IMAGES = RNG.random((20, 6, 5, 2), np.float32)


def digits(n=23, transforms=()):
    rng = np.random.default_rng(1)
    return MNISTDataset.of(rng.integers(0, 256, (n, 784), np.uint8), rng.integers(0, 10, n, np.uint8), transforms)


def loader(**more):
    return DataLoader(digits(transforms=[RandomFlipHorizontal(0.5), RandomCrop(3)]), 5, seed=3, arrays=True, **more)


def test_an_epoch_shows_every_sample_once():
    numbers = ArrayDataset(IMAGES, np.arange(20))
    for shuffle in (False, True):
        seen = [rows for _, rows in DataLoader(numbers, 6, shuffle, seed=2, arrays=True)]
        order = epoch_order(20, 2, 0) if shuffle else np.arange(20)
        assert [len(rows) for rows in seen] == [6, 6, 6, 2] and np.concatenate(seen).tolist() == order.tolist()
    drops = DataLoader(numbers, 6, drop_last=True, arrays=True)
    assert len(drops) == len(list(drops)) == 3 and len(DataLoader(numbers, 6)) == 4
    with pytest.raises(ValueError, match='batch_size: expected 1 or more, got 0'):
        DataLoader(numbers, 0)


def test_epochs_differ_and_a_run_repeats_them():
    first, again = loader(shuffle=True), loader(shuffle=True)
    epochs = [np.concatenate([images for images, _ in first]) for _ in range(3)]
    for epoch in epochs:
        assert (epoch == np.concatenate([images for images, _ in again])).all()
    assert not (epochs[0] == epochs[1]).all()
    in_order = loader()
    a, b = (np.concatenate([images for images, _ in in_order]) for _ in range(2))
    assert (a == b).all((1, 2, 3)).mean() < 0.2         # the same images, shifted and flipped otherwise


@pytest.mark.parametrize('start', [0, 3, 20])
def test_a_run_goes_on_in_the_middle_of_an_epoch(start):
    whole = loader(shuffle=True)
    list(whole)
    want = np.concatenate([images for images, _ in whole])
    resumed = loader(shuffle=True)
    resumed.epoch, resumed.start, resumed.batch_size = 1, start, 4
    got = np.concatenate([images for images, _ in resumed])
    assert (got == want[start:]).all() and (resumed.epoch, resumed.start) == (2, 0)


def test_batches_are_tensors():
    images, labels = next(iter(DataLoader(ArrayDataset(IMAGES.astype(np.float64), np.arange(20)), 4)))
    assert images.shape == (4, 6, 5, 2) and images.dtype == np.float32 and labels.dtype == np.int32
    assert (images.numpy() == IMAGES[:4]).all() and labels.numpy().tolist() == [0, 1, 2, 3]


# ---- order -----------------------------------------------------------------------------------------------------------

NUMBERS = ArrayDataset(np.arange(20))


def rows_of(loader):
    return [batch[0].tolist() for batch in loader]


def test_a_sampler_decides_which_samples_are_shown():
    for sampler in ([7, 3, 3, 19, 0], np.array([7, 3, 3, 19, 0])):
        loader = DataLoader(NUMBERS, 2, sampler=sampler, arrays=True)
        assert rows_of(loader) == rows_of(loader) == [[7, 3], [3, 19], [0]] and len(loader) == 3
    loader = DataLoader(NUMBERS, 2, sampler=[7, 3, 3, 19, 0], drop_last=True, arrays=True)
    assert rows_of(loader) == [[7, 3], [3, 19]] and len(loader) == 2
    loader.start = 3
    assert rows_of(loader) == [[19, 0]]
    endless = DataLoader(NUMBERS, 2, sampler=iter([1, 2, 3]), arrays=True)
    assert rows_of(endless) == [[1, 2], [3]]
    with pytest.raises(TypeError, match='has no len'):
        len(endless)


def test_a_batch_sampler_decides_which_samples_are_a_batch():
    loader = DataLoader(NUMBERS, batch_sampler=[[1, 2, 3], [7], np.array([19, 0])], arrays=True)
    assert rows_of(loader) == rows_of(loader) == [[1, 2, 3], [7], [19, 0]] and len(loader) == 3
    loader.start = 2
    assert rows_of(loader) == [[3], [7], [19, 0]]
    loader.start = 4
    assert rows_of(loader) == [[19, 0]]


def test_a_generator_shuffles_every_epoch_in_another_order():
    loader = DataLoader(NUMBERS, 6, True, generator=np.random.default_rng(4), arrays=True)
    rng = np.random.default_rng(4)
    first, second = (rng.permutation(20).tolist() for _ in range(2))
    assert sum(rows_of(loader), []) == first != second
    loader.start = 6
    assert sum(rows_of(loader), []) == second[6:] and len(loader) == 4


# ---- samples ---------------------------------------------------------------------------------------------------------

Pair = namedtuple('Pair', 'x y')


class Foreign:
    """A dataset of another library: only a length and samples."""

    def __init__(self, *samples):
        self.all = samples

    def __len__(self):
        return len(self.all)

    def __getitem__(self, index):
        return self.all[index]


def test_any_object_with_a_length_and_samples_is_a_dataset():
    samples = [({'x': np.full(2, i), 'text': f't{i}'}, [i, float(i)], Pair(Tensor([1.0 * i]), i % 2 == 0)) for i in range(3)]
    for loader in (DataLoader(Foreign(*samples), 2), DataLoader(samples, 2)):
        (named, (i, f), pair), last = loader
        assert named['x'].tolist() == [[0, 0], [1, 1]] and named['text'] == ['t0', 't1'] and isinstance(named['x'], Tensor)
        assert (i.tolist(), f.tolist(), i.dtype, f.dtype) == ([0, 1], [0.0, 1.0], np.int32, np.float32)
        assert isinstance(pair, Pair) and pair.x.tolist() == [[0.0], [1.0]] and pair.y.tolist() == [True, False]
        assert last[0]['text'] == ['t2']
    assert [batch.tolist() for batch in DataLoader([1, 2, 3], 2)] == [[1, 2], [3]]
    assert type(next(iter(DataLoader([1, 2, 3], 2, arrays=True)))) is np.ndarray


def test_samples_that_do_not_fit_together_are_refused():
    for samples, error, text in (
            ([np.zeros(2), np.zeros(3)], ValueError, r'samples: expected equal shapes, got \[\(2,\), \(3,\)\]; pass'),
            ([(1, 2), (1,)], ValueError, r'samples: expected equal numbers of elements, got \[1, 2\]; pass collate_fn'),
            ([object(), object()], TypeError, 'samples: expected numbers, arrays, texts, .* got object; pass collate_fn')):
        with pytest.raises(error, match=text):
            list(DataLoader(Foreign(*samples), 2))


def test_collate_fn_makes_the_batch():
    ragged = Foreign(np.zeros(2), np.zeros(3), np.zeros(1))
    assert list(DataLoader(ragged, 2, collate_fn=lambda samples: list(map(len, samples)))) == [[2, 3], [1]]
    whole = digits(transforms=[RandomCrop(2)])
    for dataset in (whole, Squares([lambda x: x + 1, RandomCrop(1)])):
        plain = DataLoader(dataset, 4, seed=2, arrays=True)
        collated = DataLoader(dataset, 4, seed=2, collate_fn=default_collate)
        for _ in range(2):
            for (x, y), (u, v) in zip(plain, collated, strict=True):
                assert (x == u).all() and (y == v).all()


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return np.full((2, 2, 1), index, np.float32), index ** 2


# ---- threads ---------------------------------------------------------------------------------------------------------

class Slow(Dataset):
    """Samples that take longer the earlier they are, and notice the threads that make them."""

    def __init__(self, bad=None):
        super().__init__()
        self.bad, self.threads, self.made = bad, set(), []

    def __len__(self):
        return 12

    def __getitem__(self, index):
        self.threads.add(threading.get_ident())
        self.made.append(index)
        time.sleep(0.002 * (12 - index))
        if index == self.bad:
            raise KeyError(f'sample {index} is broken')
        return np.float32(index), index


@pytest.mark.parametrize('shuffle', [False, True])
def test_batches_do_not_depend_on_the_number_of_workers(shuffle):
    want = [rows_of(DataLoader(Slow(), 2, shuffle, seed=3, arrays=True))]
    for workers in (1, 3):
        dataset = Slow()
        assert [rows_of(DataLoader(dataset, 2, shuffle, num_workers=workers, seed=3, arrays=True))] == want
        assert 1 <= len(dataset.threads) <= workers and threading.get_ident() not in dataset.threads
    augmented = [loader(shuffle=shuffle, num_workers=workers) for workers in (0, 2)]
    for _ in range(2):
        for (x, y), (u, v) in zip(*augmented, strict=True):
            assert (x == u).all() and (y == v).all()


def test_an_error_in_a_worker_reaches_the_loop_at_its_batch():
    for workers in (0, 2):
        seen = []
        with pytest.raises(KeyError, match='sample 7 is broken'):
            for batch, _ in DataLoader(Slow(bad=7), 2, num_workers=workers, arrays=True):
                seen.append(batch.tolist())
        assert seen == [[0, 1], [2, 3], [4, 5]]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith('pyops-loader')]


def test_a_loop_that_is_left_ends_its_threads():
    dataset = Slow()
    for _ in DataLoader(dataset, 1, num_workers=2, prefetch_factor=1):
        break
    assert not [thread for thread in threading.enumerate() if thread.name.startswith('pyops-loader')]
    assert len(dataset.made) <= 4


def test_a_plan_does_not_record_the_batches_of_workers():
    loader = iter(DataLoader(digits(40), 2, num_workers=1, prefetch_factor=8, arrays=True))
    first, _ = next(loader)
    with Plan(x=first) as plan:
        later = [images for images, _ in loader]
    assert len(later) == 19 and not plan.actions
    assert all((images == digits(40).batch(np.array([2 * i + 2, 2 * i + 3]))[0]).all() for i, images in enumerate(later))


# ---- arguments -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('options, error, text', [
    (dict(dataset=object()), TypeError, 'dataset: expected an object with __len__ and __getitem__, got object; ArrayDataset'),
    (dict(batch_size=0), ValueError, 'batch_size: expected 1 or more, got 0'),
    (dict(num_workers=-1), ValueError, 'num_workers: expected 0 or more, got -1'),
    (dict(prefetch_factor=0), ValueError, 'prefetch_factor: expected 1 or more, got 0'),
    (dict(sampler=5), TypeError, 'sampler: expected an iterable of indices, got int'),
    (dict(sampler=[1], shuffle=True), ValueError, 'sampler: expected None with shuffle=True'),
    (dict(batch_sampler=[[1]], batch_size=2), ValueError, 'batch_sampler: expected no batch_size, shuffle, sampler or'),
    (dict(generator=3), TypeError, 'generator: expected a numpy Generator, such as .*, got int'),
])
def test_a_loader_refuses_what_does_not_fit(options, error, text):
    with pytest.raises(error, match=f'^DataLoader: {text}'):
        DataLoader(**dict(dataset=NUMBERS) | options)


def test_samplers_draw_the_indices_of_an_epoch(torch):
    words, rng = list('abcdefgh'), np.random.default_rng(0)
    drawn = list(RandomSampler(words, generator=rng))
    assert sorted(drawn) == list(SequentialSampler(words)) == list(range(8)) != drawn
    assert len(list(RandomSampler(words, num_samples=20))) == 20 and set(RandomSampler(words, True, 99)) == set(range(8))
    assert sorted(SubsetRandomSampler([5, 2, 7])) == [2, 5, 7]
    counts = np.bincount(list(WeightedRandomSampler([1, 0, 3], 4000)), minlength=3) / 4000
    assert abs(counts - [0.25, 0, 0.75]).max() < 0.05 and sorted(WeightedRandomSampler([1, 0, 3], 2, False)) == [0, 2]
    for drop in (False, True):
        ours, theirs = BatchSampler(range(8), 3, drop), torch.utils.data.BatchSampler(range(8), 3, drop)
        assert list(ours) == list(theirs) and len(ours) == len(theirs)
    assert list(DataLoader(words, batch_sampler=BatchSampler([3, 0, 1], 2))) == [['d', 'a'], ['b']]
    assert list(DataLoader(words, 2, False, SequentialSampler(words), None, 0, None, True, True, 0, persistent_workers=True,
                           prefetch_factor=None))[0] == ['a', 'b']
    for call, text in ((lambda: RandomSampler([]), 'RandomSampler: num_samples: expected 1 or more, got 0'),
                       (lambda: WeightedRandomSampler([0, 0], 1), 'expected numbers of at least 0, not all 0'),
                       (lambda: WeightedRandomSampler([1, 0], 2, False), 'at most the 1 weights above 0, got 2'),
                       (lambda: BatchSampler([1], 0), 'BatchSampler: batch_size: expected 1 or more')):
        with pytest.raises(ValueError, match=text):
            call()


def test_an_iterable_dataset_is_read_in_order():
    class Lines(IterableDataset):
        def __iter__(self):
            return ((np.full(2, i), i) for i in range(5))

    loader = DataLoader(Lines(), 2)
    for _ in range(2):
        assert [(x.shape, y.tolist()) for x, y in loader] == [((2, 2), [0, 1]), ((2, 2), [2, 3]), ((1, 2), [4])]
    assert len(list(DataLoader(Lines(), 2, drop_last=True, collate_fn=len))) == 2
    with pytest.raises(ValueError, match='DataLoader: expected no shuffle'):
        DataLoader(Lines(), 2, shuffle=True)
    with pytest.raises(TypeError, match='Lines has no length'):
        len(loader)


def test_a_loader_without_a_batch_size_yields_samples():
    pairs = TensorDataset(np.arange(5), 2 * np.arange(5))
    found = list(DataLoader(pairs, batch_size=None))
    assert [(x.item(), y.item()) for x, y in found] == [(i, 2 * i) for i in range(5)] and found[0][0].shape == ()
    assert len(DataLoader(pairs, batch_size=None)) == 5
    assert list(DataLoader(['a', 'b'], batch_size=None)) == ['a', 'b']
    assert [one['a'].item() for one in DataLoader([{'a': 1}, {'a': 2}], batch_size=None)] == [1, 2]
    assert list(DataLoader([1, 2], batch_size=None, collate_fn=lambda one: one + 1)) == [2, 3]
    with pytest.raises(ValueError, match='batch_size: expected a number with batch_sampler or drop_last, got None'):
        DataLoader(pairs, batch_size=None, drop_last=True)
