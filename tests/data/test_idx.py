"""Idx files: what is written is read again, and nothing but whole files of the right kind is."""
import gzip
import struct

import numpy as np
import pytest

from pyops.data import idx
from pyops.errors import UserError

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
LABELS = np.arange(5, dtype=np.uint8)
CONTENT = struct.pack('>4I', 2051, 5, 4, 3) + IMAGES.tobytes()
ZIPPED = gzip.compress(CONTENT)


def put(folder, content, name='file'):
    (folder / name).write_bytes(content)
    return folder / name


def error_of(*arguments):
    with pytest.raises(UserError) as caught:
        idx.read(*arguments)
    text = str(caught.value)
    assert '\n' not in text and str(arguments[0]) in text
    return text


@pytest.mark.parametrize('name', ['file', 'file.gz'])
@pytest.mark.parametrize('array', [IMAGES, LABELS, IMAGES[:0], LABELS[:0], np.full((300, 28, 28), 7, np.uint8)],
                         ids=lambda array: 'x'.join(map(str, array.shape)))
def test_what_is_written_is_read(tmp_path, array, name):
    idx.write(tmp_path / name, array)
    got = idx.read(tmp_path / name)
    assert got.dtype == np.uint8 and got.shape == array.shape and (got == array).all()
    assert got.flags.c_contiguous and got.flags.writeable
    assert ((tmp_path / name).read_bytes()[:2] == b'\x1f\x8b') == (name == 'file.gz')


def test_the_form_is_that_of_the_definition(tmp_path):
    idx.write(tmp_path / 'images', IMAGES)
    assert (tmp_path / 'images').read_bytes() == CONTENT
    idx.write(tmp_path / 'labels', LABELS)
    assert (tmp_path / 'labels').read_bytes() == bytes([0, 0, 8, 1, 0, 0, 0, 5, 0, 1, 2, 3, 4])


def test_content_and_not_the_name_says_whether_it_is_gzipped(tmp_path):
    assert (idx.read(put(tmp_path, ZIPPED, 'file')) == IMAGES).all()
    assert (idx.read(put(tmp_path, CONTENT, 'file.gz')) == IMAGES).all()


def test_files_longer_than_a_chunk(tmp_path):
    """Chunks end anywhere: in the header, between and within images; random bytes do not shrink."""
    for rows in (1, 255, 256, 257, 65536 - 16, 65536, 65537, 1 << 18):
        array = np.random.default_rng(rows).integers(0, 256, (1, rows, 2), np.uint8)
        for name in ('file', 'file.gz'):
            idx.write(tmp_path / name, array)
            assert (idx.read(tmp_path / name) == array).all()


def test_several_gzip_streams_in_a_row_are_one_file(tmp_path):
    parts = [CONTENT[:3], CONTENT[3:20], b'', CONTENT[20:]]
    assert (idx.read(put(tmp_path, b''.join(map(gzip.compress, parts)))) == IMAGES).all()


def test_a_gzip_header_with_a_name(tmp_path):
    with open(tmp_path / 'file', 'wb') as stream, gzip.GzipFile('train-images-idx3-ubyte', 'wb', fileobj=stream) as out:
        out.write(CONTENT)
    assert (idx.read(tmp_path / 'file') == IMAGES).all()


@pytest.mark.parametrize('pack', [bytes, gzip.compress], ids=['plain', 'gzip'])
@pytest.mark.parametrize('content, words', [
    (b'\0\0\x08\x02' + CONTENT[4:], 'magic number 2050, expected 2051 (images) or 2049 (labels)'),
    (b'\x03\x08\0\0' + CONTENT[4:], f'magic number {0x03080000}, expected'),
    (b'', 'magic number missing'),
    (CONTENT[:3], 'magic number missing'),
    (CONTENT[:15], 'its header has 15 bytes, expected 16'),
    (CONTENT[:16], '5 x 4 x 3 images are 60 bytes after the header, but the file is truncated'),
    (CONTENT[:-1], '60 bytes after the header, but the file is truncated'),
    (CONTENT + b'\0', '60 bytes after the header, but trailing bytes follow'),
    (struct.pack('>4I', 2051, 4, 4, 3) + IMAGES.tobytes(), 'trailing bytes'),
    (struct.pack('>4I', 2051, *[2**32 - 1] * 3) + IMAGES.tobytes(), 'but the file is truncated: it has'),
    (struct.pack('>4I', 2051, 10**9, 28, 28) + IMAGES.tobytes(), 'but the file is truncated: it has'),
    (struct.pack('>2I', 2049, 6) + LABELS.tobytes(), '6 labels are 6 bytes after the header'),
    (struct.pack('>2I', 2049, 0) + LABELS.tobytes(), 'trailing bytes'),
])
def test_content_that_is_not_whole(tmp_path, pack, content, words):
    assert words in error_of(put(tmp_path, pack(content)))


def test_how_much_came_before_the_cut(tmp_path):
    assert 'truncated after 59;' in error_of(put(tmp_path, CONTENT[:-1]))


def test_a_file_of_the_other_kind(tmp_path):
    images, labels = tmp_path / 'images', tmp_path / 'labels'
    idx.write(images, IMAGES)
    idx.write(labels, LABELS)
    assert idx.read(images, idx.IMAGES_MAGIC).shape == (5, 4, 3) and idx.read(labels, idx.LABELS_MAGIC).shape == (5,)
    assert 'magic number 2051, expected 2049 (labels);' in error_of(images, idx.LABELS_MAGIC)
    assert 'magic number 2049, expected 2051 (images);' in error_of(labels, idx.IMAGES_MAGIC)


def test_a_gzip_stream_cut_anywhere(tmp_path):
    for size in range(2, len(ZIPPED)):
        assert 'truncated' in error_of(put(tmp_path, ZIPPED[:size]))
    assert 'magic number missing' in error_of(put(tmp_path, ZIPPED[:1]))


@pytest.mark.parametrize('position', [2, 3, -5, -1])
def test_a_spoiled_gzip_stream(tmp_path, position):
    """Its method, its flags, its CRC, its size."""
    spoiled = bytearray(ZIPPED)
    spoiled[position] ^= 0xE4
    assert 'gzip stream is damaged' in error_of(put(tmp_path, spoiled))


def test_bytes_behind_the_gzip_stream(tmp_path):
    assert 'trailing bytes after the end of the gzip stream' in error_of(put(tmp_path, ZIPPED + b'more bytes'))
    assert 'trailing bytes follow' in error_of(put(tmp_path, ZIPPED + ZIPPED))      # two files in one
    assert 'truncated' in error_of(put(tmp_path, ZIPPED + ZIPPED[:9]))


def test_a_header_that_promises_much_is_refused_before_memory_is_asked_for(tmp_path, monkeypatch):
    path = put(tmp_path, gzip.compress(struct.pack('>4I', 2051, 10**6, 28, 28)))
    monkeypatch.setattr(np, 'empty', lambda *_: pytest.fail('memory was asked for'))
    assert 'but the file is truncated: it has' in error_of(path)


def test_a_file_that_cannot_be_read(tmp_path):
    assert 'no such file' in error_of(tmp_path / 'none')
    assert 'cannot be read (Is a directory)' in error_of(tmp_path)


@pytest.mark.parametrize('array', [IMAGES[0], IMAGES.astype(np.int32), np.uint8(3)], ids=['2-d', 'int32', '0-d'])
def test_write_takes_images_and_labels_only(tmp_path, array):
    with pytest.raises(ValueError, match='expected uint8'):
        idx.write(tmp_path / 'file', np.asarray(array))


def test_a_large_gzipped_file_is_inflated_once(tmp_path, monkeypatch):
    monkeypatch.setenv('PYOPS_CACHE', str(tmp_path / 'cache'))
    images = np.random.default_rng(0).integers(0, 256, (3, 1000, 1000), np.uint8)
    idx.write(tmp_path / 'file.gz', images)
    assert (idx.read(tmp_path / 'file.gz') == images).all()
    with monkeypatch.context() as patch:
        patch.setattr(idx, '_inflate', None)                        # whoever calls it fails
        kept = idx.read(tmp_path / 'file.gz')
        assert (kept == images).all() and kept.flags.writeable and kept.flags.c_contiguous
        kept[:] = 0
        assert (idx.read(tmp_path / 'file.gz', idx.IMAGES_MAGIC) == images).all()
        assert 'expected 2049 (labels)' in error_of(tmp_path / 'file.gz', idx.LABELS_MAGIC)
    images[1, 2, 3] ^= 1
    idx.write(tmp_path / 'file.gz', images)
    assert (idx.read(tmp_path / 'file.gz') == images).all(), 'what was kept of another file was taken'
    for file in (tmp_path / 'cache').iterdir():
        with open(file, 'r+b') as stream:
            stream.seek(-1, 2)
            stream.write(b'\x99')
    assert (idx.read(tmp_path / 'file.gz') == images).all(), 'what was kept and then harmed was taken'
