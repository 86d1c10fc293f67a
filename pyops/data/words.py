"""Text for word-level language models, such as the Penn Treebank (Mikolov et al. 2010), from files on disk."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pyops.autograd import Tensor
from pyops.backend import get
from pyops.data.datasets import Dataset
from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import DTypeLike

    from pyops.backend.device import Device
    from pyops.typing import PathLike

END, UNKNOWN = '<eos>', '<unk>'
SPLITS = 'train', 'valid', 'test'


class WordCorpus:
    """Training, validation and test text as ids of words, with an end mark after each line.

    folder: has train.txt and, if wanted, valid.txt and test.txt, UTF-8; also with another beginning, as in ptb.train.txt.
    Words are separated by white space.
    max_lines: number of lines of each file to read; None: all.

    words           the distinct words of the training text in the order of their first occurrence, END and UNKNOWN among them
    train, valid, test      int32 ids, empty without a file; words that the training text does not have become UNKNOWN
    UserError for a missing folder or training file, several candidates, or text that is not UTF-8.
    """
    words: list[str]
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray

    def __init__(self, folder: PathLike, max_lines: int | None = None) -> None:
        if not Path(folder).is_dir():
            raise UserError(f'{folder}: no such directory; give the folder with train.txt')
        texts = {}
        for split in SPLITS:
            found = sorted(path for pattern in (f'{split}.txt', f'*.{split}.txt') for path in Path(folder).glob(pattern))
            if len(found) > 1:
                raise UserError(f'{folder}: has {" and ".join(path.name for path in found)}, expected one of them; move the '
                                'others away')
            if not found and split == 'train':
                raise UserError(f'{folder}: has no train.txt, nor another file that ends so; give the folder with it')
            try:
                texts[split] = found[0].read_text('utf-8') if found else ''
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f'{found[0]}: cannot be read as UTF-8 text ({error}); give a text file') from error
        self._set(texts, max_lines)

    @classmethod
    def of(cls, train: str, valid: str = '', test: str = '', max_lines: int | None = None) -> Self:
        """Return the corpus of these texts."""
        corpus = cls.__new__(cls)
        corpus._set(dict(train=train, valid=valid, test=test), max_lines)
        return corpus

    def _set(self, texts: dict[str, str], max_lines: int | None) -> None:
        tokens = {split: [word for line in text.splitlines()[:max_lines] for word in (*line.split(), END)]
                  for split, text in texts.items()}
        self.words = list(dict.fromkeys([*tokens['train'], END, UNKNOWN]))
        self._ids = {word: i for i, word in enumerate(self.words)}
        for split, words in tokens.items():
            setattr(self, split, self.encode(words))

    def encode(self, words: Iterable[str]) -> np.ndarray:
        """Return the ids of words, int32."""
        unknown = self._ids[UNKNOWN]
        return np.array([self._ids.get(word, unknown) for word in words], np.int32)

    def decode(self, ids: Iterable[int]) -> list[str]:
        """Return the words of ids."""
        return [self.words[i] for i in ids]

    def __len__(self) -> int:
        """Return the number of distinct words."""
        return len(self.words)


def batchify(ids: np.ndarray, batch_size: int) -> np.ndarray:
    """Cut a text into batch_size columns of equal length, (steps, batch_size); what remains at the end is left out.

    Rows t to t + T of the result are T steps of batch_size texts, and the next rows continue the same texts.
    """
    if not 1 <= batch_size <= len(ids):
        raise ValueError(f'batchify: batch_size: expected 1 to {len(ids)}, the length of the text, got {batch_size}')
    steps = len(ids) // batch_size
    return np.ascontiguousarray(ids[:steps * batch_size].reshape(batch_size, steps).T)


def get_batch(batches: np.ndarray, i: int, bptt: int, device: Device | None = None,
              dtype: DTypeLike = np.int32) -> tuple[Tensor, Tensor]:
    """Return bptt rows of a text from batchify, from row i on, or fewer at its end, (T, batch_size), and the words that follow
    them (T batch_size,): the needle course's function."""
    steps = min(bptt, len(batches) - 1 - i)
    if not (0 <= i and steps > 0):
        raise ValueError(f'get_batch: i: expected 0 to {len(batches) - 2}, before the last row, got {i}')
    found = np.asarray(batches)[i:i + steps + 1].astype(np.int32)
    return (Tensor(found[:-1], device=device, dtype=dtype),
            Tensor(found[1:].reshape(-1), device=device, dtype=dtype))


class WordDataset(Dataset):
    """Pieces of a text: sample i is (ids[i T : (i + 1) T], the ids one later), both (T,) int32, with T = steps."""

    def __init__(self, ids: np.ndarray, steps: int) -> None:
        super().__init__()
        if not 1 <= steps < len(ids):
            raise ValueError(f'WordDataset: steps: expected 1 to {len(ids) - 1}, less than the length of the text, got {steps}')
        self.ids, self.steps = np.asarray(ids, np.int32), steps

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.steps

    def __getitem__(self, index: Any) -> Any:
        return self.at(index)

    def batch(self, rows: np.ndarray, seed: int = 0, epoch: int = 0) -> tuple[Any, ...]:
        places = get(rows)[:, None] * self.steps + np.arange(self.steps)
        return self.ids[places], self.ids[places + 1]
