"""What is kept between runs: it comes back as it was or not at all, and nobody has to be able to keep it."""
import os
import subprocess
import sys

import pytest

from pyops import cache


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv('PYOPS_CACHE', str(tmp_path / 'cache'))
    return tmp_path / 'cache'


def only(place):
    (file,) = place.iterdir()
    return file


def test_what_is_written_is_read(place):
    assert cache.read('word', b'key') is None and cache.takes_files()
    cache.write('word', b'key', b'one', bytearray(b'two'))
    assert bytes(cache.read('word', b'key')) == b'onetwo'
    assert cache.read('word', b'another') is None and cache.read('other', b'key') is None
    cache.write('word', b'key', b'')
    assert cache.read('word', b'key') == b''
    assert only(place).stat().st_mode & 0o777 == 0o600 and place.stat().st_mode & 0o777 == 0o700


def test_what_is_read_can_be_written_and_the_file_keeps_what_it_has():
    cache.write('word', b'key', b'one')
    cache.read('word', b'key')[:] = b'two'
    assert cache.read('word', b'key') == b'one'


def test_a_key_that_has_the_file_of_another(place, monkeypatch):
    monkeypatch.setattr(cache, '_path', lambda place, kind, key: os.path.join(place, kind))
    cache.write('word', b'key', b'one')
    assert cache.read('word', b'yek') is None and cache.read('word', b'key1') is None and cache.read('word', b'ke') is None
    assert cache.read('word', b'key') == b'one'


def test_a_file_that_was_harmed_anywhere(place):
    cache.write('word', b'key', b'content')
    whole = only(place).read_bytes()
    for size in range(len(whole)):
        only(place).write_bytes(whole[:size])
        assert cache.read('word', b'key') is None
    for at in range(len(whole)):
        only(place).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1:])
        assert cache.read('word', b'key') is None
    only(place).write_bytes(whole + b'\0')
    assert cache.read('word', b'key') is None
    cache.write('word', b'key', b'content')
    assert cache.read('word', b'key') == b'content'


def test_what_others_could_have_written_is_not_read(place, monkeypatch):
    cache.write('word', b'key', b'content')
    for mode in (0o620, 0o602):
        only(place).chmod(mode)
        assert cache.read('word', b'key') is None
    only(place).chmod(0o600)
    assert cache.read('word', b'key') == b'content'
    monkeypatch.setattr(os, 'geteuid', lambda: -7)
    assert cache.read('word', b'key') is None


def test_something_else_of_that_name(place):
    cache.write('word', b'key', b'content')
    file = only(place)
    file.unlink()
    os.mkfifo(file)
    assert cache.read('word', b'key') is None
    cache.write('word', b'key', b'content')
    assert cache.read('word', b'key') == b'content'
    file.unlink()
    (file / 'folder').mkdir(parents=True)
    cache.write('word', b'key', b'content')
    assert cache.read('word', b'key') is None and list(place.iterdir()) == [file]


def test_a_place_that_takes_nothing(tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('')
    for place in ('file', 'file/below', '/proc/nowhere'):
        monkeypatch.setenv('PYOPS_CACHE', str(tmp_path / place))
        cache.write('word', b'key', b'content')
        assert cache.read('word', b'key') is None
        assert not cache.takes_files() or place.startswith('/proc')      # where root may write, it is told
    assert (tmp_path / 'file').read_text() == ''


def test_the_newest_stay_and_what_a_dead_process_left_goes(place):
    place.mkdir()
    left, running, foreign = place / '.word-0.1.tmp', place / '.word-0.2.tmp', place / 'something'
    for file in (left, running, foreign):
        file.write_text('')
        os.utime(file, (0, 0))
    os.utime(running)
    for i in range(cache.KEPT + 2):
        cache.write('word', b'%d' % i, b'content')
        os.utime(cache._path(str(place), 'word', b'%d' % i), (i, i))
    cache.write('other', b'key', b'content')
    assert [cache.read('word', b'%d' % i) is not None for i in range(cache.KEPT + 2)] == [False] * 2 + [True] * cache.KEPT
    assert cache.read('other', b'key') is not None and foreign.exists() and running.exists() and not left.exists()


def test_the_folder_is_chosen_or_of_the_user(monkeypatch, tmp_path):
    assert cache.folder() == str(tmp_path / 'cache')
    for off in ('0', ''):
        monkeypatch.setenv('PYOPS_CACHE', off)
        assert cache.folder() is None and not cache.takes_files()
        cache.write('word', b'key', b'content')
        assert cache.read('word', b'key') is None
    monkeypatch.delenv('PYOPS_CACHE')
    monkeypatch.setenv('HOME', '/home/somebody')
    monkeypatch.setenv('XDG_CACHE_HOME', '/elsewhere')
    assert cache.folder() == '/elsewhere/pyops'
    for ignored in ('', 'relative'):
        monkeypatch.setenv('XDG_CACHE_HOME', ignored)
        assert cache.folder() == '/home/somebody/.cache/pyops'


def test_a_digest_changes_with_the_file_and_with_the_code(tmp_path, monkeypatch):
    file, code = tmp_path / 'file', tmp_path / 'code.py'
    monkeypatch.setitem(sys.modules, 'some.code', type('Module', (), {'__file__': str(code)}))

    def digest(text, source):
        file.write_text(text)
        code.write_text(source)
        with open(file, 'rb') as stream:
            return cache.digest(stream, 'some.code')

    assert digest('a', 'b') == digest('a', 'b')
    assert len({digest('a', 'b'), digest('b', 'b'), digest('a', 'a'), digest('', 'ab')}) == 4
    code.unlink()
    with open(file, 'rb') as stream:
        assert cache.digest(stream, 'some.code') is None


READ = 'from pyops.backend import library as l; print(l.cpu().lib.pyops_abi_version(), len(l.cpu().functions))'


def test_the_parsed_header_is_kept_and_says_the_same(place):
    from pyops.backend import library
    header = (library.PACKAGE / 'pyops.h').read_text()
    parsed, known = library._parsed(header)
    assert only(place).name.startswith('header-')
    kept, known_again = library._parsed(header)
    assert type(kept).__module__ != type(parsed).__module__, 'it was parsed again'
    assert known_again == known == library.functions(header)
    path = str(library.PACKAGE / 'libpyops.so')
    ours, theirs = parsed.dlopen(path), kept.dlopen(path)
    for name in known:
        signature, again = parsed.typeof(getattr(ours, name)), kept.typeof(getattr(theirs, name))
        assert signature.result.cname == again.result.cname
        assert [argument.cname for argument in signature.args] == [argument.cname for argument in again.args]
    constants = [name for name in dir(theirs) if name.startswith('PYOPS_')]
    assert constants and all(getattr(ours, name) == getattr(theirs, name) for name in constants)
    for name in ('pyops_value', 'pyops_action'):
        assert parsed.sizeof(name) == kept.sizeof(name)
        assert [(field, at.offset, at.type.cname) for field, at in parsed.typeof(name).fields] == [
            (field, at.offset, at.type.cname) for field, at in kept.typeof(name).fields]


def test_another_header_is_parsed_anew(place):
    from pyops.backend import library
    header = (library.PACKAGE / 'pyops.h').read_text()
    library._parsed(header)
    another = header.replace('pyops_status pyops_fill(', 'pyops_status pyops_filled(')
    assert another != header
    assert set(library._parsed(another)[1]) ^ set(library._parsed(header)[1]) == {'pyops_fill', 'pyops_filled'}


@pytest.mark.parametrize('chosen', ['0', '/proc/nowhere'])
def test_a_library_is_opened_without_a_cache(chosen):
    with_it, without = (subprocess.run([sys.executable, '-c', READ], env=os.environ | more, capture_output=True, text=True,
                                       check=True).stdout for more in ({}, {'PYOPS_CACHE': chosen}))
    assert with_it == without != ''
