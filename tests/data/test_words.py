"""Corpora of words from files, and their pieces."""
import numpy as np
import pytest

from pyops.data import DataLoader, WordCorpus, WordDataset
from pyops.data.words import END, UNKNOWN, batchify
from pyops.errors import UserError

TRAIN, VALID = 'the cat sat\non the mat\n', 'the dog sat\n'


@pytest.mark.parametrize('beginning', ['', 'ptb.'])
def test_files_become_ids_of_words_with_ends_of_lines(beginning, tmp_path):
    (tmp_path / f'{beginning}train.txt').write_text(TRAIN)
    (tmp_path / f'{beginning}valid.txt').write_text(VALID)
    corpus = WordCorpus(tmp_path)
    assert corpus.words == ['the', 'cat', 'sat', END, 'on', 'mat', UNKNOWN] and len(corpus) == 7
    assert corpus.train.tolist() == [0, 1, 2, 3, 4, 0, 5, 3] and corpus.train.dtype == np.int32
    assert corpus.decode(corpus.valid) == ['the', UNKNOWN, 'sat', END] and not len(corpus.test)
    same = WordCorpus.of(TRAIN, VALID)
    assert same.words == corpus.words and (same.valid == corpus.valid).all() and corpus.encode(['dog']).tolist() == [6]
    assert WordCorpus(tmp_path, max_lines=1).train.tolist() == [0, 1, 2, 3]
    assert WordCorpus.of('a <unk> b').words == ['a', UNKNOWN, 'b', END]


def test_columns_of_a_text_continue_in_the_next_rows():
    rows = batchify(np.arange(11), 3)
    assert rows.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]] and rows.flags.c_contiguous
    for batch_size in (0, 12):
        with pytest.raises(ValueError, match='batchify: batch_size: expected 1 to 11, the length of the text, got'):
            batchify(np.arange(11), batch_size)


def test_pieces_of_a_text_and_the_words_after_them():
    dataset = WordDataset(np.arange(11), 3)
    assert len(dataset) == 3 and [part.tolist() for part in dataset[2]] == [[6, 7, 8], [7, 8, 9]]
    assert dataset[1:][1].tolist() == [[4, 5, 6], [7, 8, 9]] and len(WordDataset(np.arange(10), 3)) == 3
    (x, y), = DataLoader(dataset, 3, sampler=[2, 0])
    assert x.tolist() == [[6, 7, 8], [0, 1, 2]] and (y.numpy() == x.numpy() + 1).all() and x.dtype == np.int32
    with pytest.raises(ValueError, match='WordDataset: steps: expected 1 to 10, less than the length of the text, got 11'):
        WordDataset(np.arange(11), 11)


@pytest.mark.parametrize('files, error', [
    ({}, 'has no train.txt, nor another file that ends so; give the folder with it'),
    ({'train.txt': b'a', 'ptb.train.txt': b'a'}, 'has ptb.train.txt and train.txt, expected one of them; move the others away'),
    ({'train.txt': b'\xff'}, 'train.txt: cannot be read as UTF-8 text'),
])
def test_a_folder_without_a_text_is_refused(files, error, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=error):
        WordCorpus(tmp_path)
    with pytest.raises(UserError, match='none: no such directory; give the folder with train.txt'):
        WordCorpus(tmp_path / 'none')
