"""pyops.files: a file is replaced, and a folder created, completely or not at all."""
import errno
import os
import stat

import numpy as np
import pytest

from pyops.backend.host import aligned
from pyops.files import BLOCK, new_folder, open_atomically, write_atomically, write_past_cache


def test_the_parts_are_written_in_order_and_counted(tmp_path):
    path = tmp_path / 'file'
    values = np.arange(100_000, dtype='<f4').reshape(100, 1000)         # larger than the file's buffer
    assert write_atomically(path, b'head', values, np.zeros((0, 3)), bytearray(b'tail')) == 8 + values.nbytes
    assert path.read_bytes() == b'head' + values.tobytes() + b'tail'
    assert os.listdir(tmp_path) == ['file']


def test_the_previous_file_stays_until_the_block_ends(tmp_path):
    path = tmp_path / 'file'
    path.write_bytes(b'old')
    with open_atomically(path) as file:
        file.write(b'new')
        file.flush()
        assert path.read_bytes() == b'old'
    assert path.read_bytes() == b'new'


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_keeps_the_previous_file_and_removes_the_temporary_one(tmp_path, error):
    path = tmp_path / 'file'
    path.write_bytes(b'old')
    with pytest.raises(error):
        with open_atomically(path) as file:
            file.write(b'new')
            assert len(os.listdir(tmp_path)) == 2, 'the check is vacuous'
            raise error
    assert os.listdir(tmp_path) == ['file'] and path.read_bytes() == b'old'


def test_a_rename_that_fails_removes_the_temporary_file(tmp_path):
    (tmp_path / 'folder').mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / 'folder', b'new')
    assert os.listdir(tmp_path) == ['folder']


def test_a_missing_directory_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / 'missing' / 'file', b'new')


def test_the_umask_and_the_mode_set_the_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / 'shared', b'')
        write_atomically(tmp_path / 'private', b'', mode=0o600)
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ('shared', 'private')] == [0o640, 0o600]


def test_a_temporary_file_of_a_killed_process_with_our_id_is_replaced(tmp_path):
    left = tmp_path / f'.file.{os.getpid()}.tmp'
    left.write_bytes(b'longer than the new content')
    left.chmod(0o444)
    assert write_atomically(tmp_path / 'file', b'new') == 3
    assert os.listdir(tmp_path) == ['file'] and (tmp_path / 'file').read_bytes() == b'new'


@pytest.mark.parametrize('name', ['x' * 255, 'ü' * 127])
def test_a_name_of_the_largest_length_can_be_written(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_atomically(name, b'new')                                      # relative, without a directory
    assert os.listdir() == [name]


def test_fsync_flushes_the_data_before_the_rename_and_the_directory_after_it(tmp_path, monkeypatch):
    calls, replace = [], os.replace

    def record_fsync(descriptor):
        status = os.fstat(descriptor)
        calls.append('directory' if stat.S_ISDIR(status.st_mode) else status.st_size)

    def record_replace(*paths):
        calls.append('rename')
        replace(*paths)
    monkeypatch.setattr(os, 'fsync', record_fsync)
    monkeypatch.setattr(os, 'replace', record_replace)
    write_atomically(tmp_path / 'file', b'data')
    assert calls == ['rename']
    calls.clear()
    write_atomically(tmp_path / 'file', b'longer data', fsync=True)
    assert calls == [11, 'rename', 'directory']


# ---- new folders -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('is_there', [False, True], ids=['new', 'empty'])
def test_a_new_folder_appears_when_the_block_ends(tmp_path, is_there):
    path = tmp_path / 'folder'
    if is_there:
        path.mkdir()
    with new_folder(f'{path}/') as folder:
        (tmp_path / folder / 'file').write_bytes(b'x')
        assert not path.exists() or not os.listdir(path)
    assert os.listdir(tmp_path) == ['folder'] and os.listdir(path) == ['file']


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_an_exception_removes_the_temporary_folder(tmp_path, error):
    with pytest.raises(error):
        with new_folder(tmp_path / 'folder') as folder:
            (tmp_path / folder / 'file').write_bytes(b'x')
            raise error
    assert os.listdir(tmp_path) == []


def test_a_folder_with_files_and_a_file_are_not_replaced(tmp_path):
    (tmp_path / 'file').write_bytes(b'old')
    for path in (tmp_path, tmp_path / 'file'):
        with pytest.raises(FileExistsError), new_folder(path):
            pytest.fail('the block was entered')
    assert os.listdir(tmp_path) == ['file'] and (tmp_path / 'file').read_bytes() == b'old'


@pytest.mark.parametrize('size', [0, 5000, 100_000], ids=['empty', 'small', 'large'])
@pytest.mark.parametrize('head', [b'', b'head', b'h' * BLOCK, b'h' * 3 * BLOCK], ids=len)
def test_a_file_past_the_cache_has_the_same_bytes(tmp_path, head, size):
    values = aligned(np.empty, (size,), np.float32, BLOCK)
    values[:] = np.arange(size)
    for array in (values, values[1:]):                      # the second is not aligned
        assert write_past_cache(tmp_path / 'file', head, array) == len(head) + array.nbytes
        assert (tmp_path / 'file').read_bytes() == head + array.tobytes()
    assert os.listdir(tmp_path) == ['file']


def test_blocks_are_written_by_direct_io_and_the_rest_through_the_cache(tmp_path, monkeypatch):
    values = aligned(np.zeros, (BLOCK + 1,), np.float32, BLOCK)
    calls, write = [], os.pwritev
    monkeypatch.setattr(os, 'pwritev', lambda fd, parts, at: calls.append(sum(map(len, parts))) or write(fd, parts, at))
    assert write_past_cache(tmp_path / 'file', b' ' * BLOCK, values) == 5 * BLOCK + 4
    assert calls == [5 * BLOCK]


@pytest.mark.parametrize('done', [0, BLOCK, 2 * BLOCK + 17])
def test_after_a_part_of_the_blocks_the_rest_follows(tmp_path, monkeypatch, done):
    values, head = np.arange(3 * BLOCK, dtype=np.uint8), b'h' * BLOCK

    def pwritev(fd, parts, at):
        if not done:
            raise OSError(errno.EINVAL, 'no direct I/O')
        return os.pwrite(fd, b''.join(map(bytes, parts))[:done], at)
    monkeypatch.setattr(os, 'pwritev', pwritev)
    monkeypatch.setattr(os, 'O_DIRECT', os.O_NONBLOCK)      # a flag that any file system takes
    assert write_past_cache(tmp_path / 'file', head, values) == 4 * BLOCK
    assert (tmp_path / 'file').read_bytes() == head + values.tobytes()
