"""Finding, fetching and ordering data.  The downloads come from a server in this process."""
import ast
import gzip
import hashlib
import http.server
import io
import re
import subprocess
import sys
import threading
import zipfile

import numpy as np
import pytest
from conftest import ROOT

from pyops.data import columns, fetch, locate, mnist
from pyops.data.__main__ import main
from pyops.data.batches import TokenBatches, batches, epoch_end, epoch_order, split
from pyops.errors import UserError
from pyops.text.translation import open_corpus

# ---- batches ---------------------------------------------------------------------------------------------------------


def test_epoch_order_is_a_permutation_and_a_function_of_its_arguments():
    order = epoch_order(1000, seed=7, epoch=3)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(1000))
    assert (order == epoch_order(1000, 7, 3)).all()
    for other in (epoch_order(1000, 7, 4), epoch_order(1000, 8, 3), epoch_order(1000, 3, 7), np.arange(1000)):
        assert (order == other).mean() < 0.05


def test_epoch_order_stays_the_same():
    """A checkpoint stores seed, epoch and position, and relies on the order that they stand for."""
    assert epoch_order(10, 0, 0).tolist() == [0, 7, 8, 6, 9, 5, 1, 3, 2, 4]


def test_batches_cover_an_epoch():
    got = list(batches(10, 4, seed=1, epoch=2))
    assert [len(batch) for batch in got] == [4, 4, 2]
    assert (np.concatenate(got) == epoch_order(10, 1, 2)).all()
    assert list(batches(0, 4, 1, 2)) == []


@pytest.mark.parametrize('start', [0, 4, 5, 9, 10])
def test_batches_resume_anywhere(start):
    order = epoch_order(10, 1, 2)
    got = list(batches(10, 4, 1, 2, start))
    assert np.concatenate([*got, np.empty(0, np.int64)]).tolist() == order[start:].tolist()
    assert [len(batch) for batch in got[:-1]] == [4] * (len(got) - 1)


@pytest.mark.parametrize('start, sizes', [(0, [4, 4]), (4, [4]), (3, [4]), (2, [4, 4]), (7, []), (8, []), (10, [])])
def test_batches_without_the_incomplete_one(start, sizes):
    got = list(batches(10, 4, 1, 2, start, drop_last=True))
    assert [len(batch) for batch in got] == sizes
    end = epoch_end(10, 4, start, drop_last=True)
    assert end == start + sum(sizes)
    assert np.concatenate([*got, np.empty(0, np.int64)]).tolist() == epoch_order(10, 1, 2)[start:end].tolist()


@pytest.mark.parametrize('drop_last', [False, True])
@pytest.mark.parametrize('at_once', [1, 2, 3, 9])
def test_several_batches_as_one_array(at_once, drop_last):
    one_by_one = [batch.tolist() for batch in batches(23, 4, 1, 2, 1, drop_last)]
    several = list(batches(23, 4, 1, 2, 1, drop_last, at_once=at_once))
    assert [batch.tolist() for indices in several for batch in split(indices, 4)] == one_by_one
    assert len(several) == -(-len(one_by_one) // at_once) and split(np.arange(0), 4) == []


def test_the_end_of_an_epoch():
    assert epoch_end(167130, 128) == 167130 and epoch_end(167130, 128, drop_last=True) == 167040
    assert epoch_end(384, 128, drop_last=True) == 384 and epoch_end(100, 128, drop_last=True) == 0


def test_batches_reject_what_cannot_be():
    with pytest.raises(ValueError, match='batch_size'):
        list(batches(10, 0, 1, 2))
    for start in (-1, 11):
        with pytest.raises(ValueError, match='start'):
            list(batches(10, 4, 1, 2, start))


# ---- locate ----------------------------------------------------------------------------------------------------------

@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """An empty working directory, and no $PYOPS_DATA."""
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(path, content=b'x'):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def test_find_looks_in_the_given_directory_alone_else_in_the_environments_then_here(nowhere, monkeypatch):
    assert locate.find('fra-eng') is None
    here = put(nowhere / 'data/fra.txt')
    assert locate.find('fra-eng').resolve() == here
    environment = put(nowhere / 'environment/fra-eng/fra.txt').parents[1]
    monkeypatch.setenv('PYOPS_DATA', str(environment))
    assert locate.find('fra-eng') == environment / 'fra-eng/fra.txt'
    flag = put(nowhere / 'flag/fra-eng.zip')
    assert locate.find('fra-eng', nowhere / 'flag') == flag
    (nowhere / 'empty').mkdir()
    assert locate.find('fra-eng', 'empty') is None
    monkeypatch.setenv('PYOPS_DATA', 'empty')
    assert locate.find('fra-eng').resolve() == here


@pytest.mark.parametrize('directory, named', [('none', 'none'), ('', "''"), ('file', 'file')])
def test_find_rejects_a_directory_that_does_not_exist(nowhere, directory, named):
    put(nowhere / 'file')
    with pytest.raises(UserError, match=f'^data directory {named}: no such directory; make it or give another$'):
        locate.find('fra-eng', directory)


def test_find_rejects_a_name(nowhere):
    with pytest.raises(UserError, match='^data set deu-eng: no such data set; give one of fra-eng, mnist, tatoeba-test; '):
        locate.find('deu-eng')


def test_an_environment_that_names_no_directory_is_an_error_wherever_it_would_be_searched(nowhere, monkeypatch):
    put(nowhere / 'data/fra.txt', b'Go.\tVa !\n')
    monkeypatch.setenv('PYOPS_DATA', 'none')
    for search in (lambda: locate.find('fra-eng'), mnist.load, open_corpus, fetch.describe):
        with pytest.raises(UserError, match='^PYOPS_DATA=none: no such directory; make it, name another, or unset PYOPS_DATA$'):
            search()
    assert locate.find('fra-eng', 'data').name == 'fra.txt' and len(open_corpus('data/fra.txt')[0]) == 1
    assert mnist.load(embedded=True).name == 'embedded' and open_corpus('embedded')[0].name == 'embedded'


def test_a_given_directory_without_the_corpus_is_an_error_whatever_the_environment_has(nowhere, monkeypatch):
    (nowhere / 'a b').mkdir()
    monkeypatch.setenv('PYOPS_DATA', str(put(nowhere / 'full/fra.txt', b'Go.\tVa !\n').parent))
    assert open_corpus()[1] == f'corpus : {nowhere}/full/fra.txt'
    with pytest.raises(UserError, match="^data directory a b: holds no fra-eng; "
                                        "get it with: python -m pyops.data get fra-eng --data-dir 'a b'$"):
        open_corpus(data_dir='a b')


def test_no_error_of_the_library_names_a_flag_of_a_program():
    """Except commands that are the remedy.  Eight modules of pyops.text are parts of programs."""
    names = 'averaging', 'divided', 'flags', 'mapped', 'processes', 'serving', 'tokenizer', 'training'
    texts, parts = [], [ROOT / f'pyops/text/{name}.py' for name in names]
    assert all(path.exists() for path in parts)
    for path in sorted({*ROOT.glob('pyops/data/*.py'), *ROOT.glob('pyops/text/*.py')} - set(parts)):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and getattr(call.func, 'id', '') == 'UserError':
                texts += [part.value for part in ast.walk(call) if isinstance(getattr(part, 'value', None), str)]
    assert len(texts) > 50
    assert [text for text in texts if re.search(r'(?<![\w-])--?[a-z]', text) and 'python -m' not in text] == []


# ---- fetch -----------------------------------------------------------------------------------------------------------

TEXT = ''.join(f'I have {n} keys.\tJ’ai {n} clés.\n' for n in range(3000)).encode()


def packed(text, note='about', inner='fra-eng/fra.txt'):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr('__MACOSX/fra-eng/fra.txt', 'shadow')
        archive.writestr('_about.txt', note)
        archive.writestr(inner, text)
    return stream.getvalue()


GOOD = packed(TEXT)
BODIES = {
    'wrong': packed(b'Other\tAutre\n'),
    'page': b'<html>moved</html>',
    'noinner': packed(TEXT, inner='deu.txt'),
    'repacked': packed(TEXT, note='another note, so that every byte lies elsewhere'),
}

TEST_SET = ''.join(f'eng\tfra\tI have {n} keys.\tJ’ai {n} clés.\n' for n in range(3000)).encode()
TEST_GZ = gzip.compress(TEST_SET, mtime=0)
BODIES |= {
    'test': TEST_GZ,
    'damaged': TEST_GZ[:-100] + bytes(100),
    'plain': TEST_SET,
    'latin1': gzip.compress(TEST_SET + 'eng\tfra\tCoffee.\tCafé.\n'.encode('latin-1')),
    'two': gzip.compress(TEST_SET + b'Go.\tVa !\n'),
    'german': gzip.compress(TEST_SET.replace(b'fra', b'deu')),
    'hollow': gzip.compress(TEST_SET + b'eng\tfra\tGo.\t \n'),
    'nothing': gzip.compress(b'\n'),
}


class Handler(http.server.BaseHTTPRequestHandler):
    """The first part of the path says how the server behaves."""

    def do_GET(self):
        manner = self.path.split('/')[1]
        asked = self.headers.get('Range')
        self.server.asked.append((manner, asked))
        body = BODIES.get(manner, GOOD)
        if manner == 'missing':
            return self.send_error(404)
        start = int(asked[len('bytes='):-1]) if asked and manner != 'norange' else 0
        if start >= len(body):
            return self.send_error(416)
        self.send_response(206 if start else 200)
        if start:
            first = start + 1 if manner == 'elsewhere' else start
            self.send_header('Content-Range', f'bytes {first}-{len(body) - 1}/{len(body)}')
        if manner != 'nolength':
            self.send_header('Content-Length', str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:start + 5000] if manner in ('cut', 'silent') else body[start:])
        if manner == 'silent':
            self.server.over.wait(240)

    def log_message(self, *_):
        pass


@pytest.fixture(scope='module')
def running():
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.daemon_threads = True
    server.over = threading.Event()
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def server(running, nowhere, monkeypatch):
    """The server, and a data set whose mirrors `use` sets to these manners of it."""
    running.asked.clear()
    running.url = f'http://127.0.0.1:{running.server_port}'

    def use(*manners):
        file = fetch.File('fra-eng.zip', hashlib.sha256(TEXT).hexdigest(), len(TEXT),
                          tuple(f'{running.url}/{manner}/fra-eng.zip' for manner in manners), 'fra.txt',
                          ('fra-eng/fra.txt', 'fra.txt'))
        monkeypatch.setitem(fetch.DATASETS, 'fra-eng', fetch.Dataset('fra-eng', 'pairs', 'CC BY 2.0', (file,)))

    running.use = use
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    return running


def get(**more):
    lines = []
    return fetch.get('fra-eng', 'to', report=lines.append, **more), lines


def assert_whole(paths, content=GOOD):
    (path,) = paths
    assert path.as_posix() == 'to/fra-eng.zip'
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == ['fra-eng.zip']


@pytest.mark.parametrize('manner', ['good', 'nolength'])
def test_a_whole_download(server, manner):
    server.use(manner)
    paths, lines = get()
    assert_whole(paths)
    assert lines == [f'to/fra-eng.zip: fetched from {server.url}/{manner}/fra-eng.zip, checksum right']
    assert server.asked == [(manner, None)]


def test_a_download_resumes_after_a_cut(server, nowhere):
    server.use('cut')
    with pytest.raises(UserError, match=f'cut off after 5000 of {len(GOOD)} bytes'):
        get()
    assert (nowhere / 'to/fra-eng.zip.part').read_bytes() == GOOD[:5000]
    assert not (nowhere / 'to/fra-eng.zip').exists()
    server.use('good')
    assert_whole(get()[0])
    assert server.asked == [('cut', None), ('good', 'bytes=5000-')]


def test_the_next_mirror_resumes_what_one_cut(server):
    server.use('cut', 'good')
    assert_whole(get()[0])
    assert server.asked == [('cut', None), ('good', 'bytes=5000-')]


def test_a_server_without_ranges_sends_all_again(server, nowhere):
    put(nowhere / 'to/fra-eng.zip.part', b'not even a zip')
    server.use('norange')
    assert_whole(get()[0])
    assert server.asked == [('norange', 'bytes=14-')]


def test_a_mirror_that_packs_otherwise_does_not_continue_another(server, nowhere):
    """Its bytes after the cut do not fit; the download begins anew, at the same mirror."""
    server.use('cut', 'repacked')
    (path,), _ = get()
    assert zipfile.ZipFile(path).read('fra-eng/fra.txt') == TEXT
    assert path.read_bytes() != GOOD
    assert server.asked == [('cut', None), ('repacked', 'bytes=5000-'), ('repacked', None)]


def test_bytes_from_another_place_are_refused(server, nowhere):
    put(nowhere / 'to/fra-eng.zip.part', GOOD[:5000])
    server.use('elsewhere', 'good')
    assert_whole(get()[0])
    assert server.asked == [('elsewhere', 'bytes=5000-'), ('good', 'bytes=5000-')]


def test_a_part_that_was_whole_already_is_taken(server, nowhere):
    put(nowhere / 'to/fra-eng.zip.part', GOOD)
    server.use('good')
    assert_whole(get()[0])
    assert server.asked == [('good', f'bytes={len(GOOD)}-')]


def test_a_part_longer_than_the_file_is_dropped(server, nowhere):
    put(nowhere / 'to/fra-eng.zip.part', bytes(len(GOOD) + 1))
    server.use('good')
    assert_whole(get()[0])
    assert [asked for _, asked in server.asked] == [f'bytes={len(GOOD) + 1}-', None]


@pytest.mark.parametrize('manner', ['wrong', 'page', 'noinner', 'missing'])
def test_a_bad_mirror_leads_to_the_next(server, manner):
    server.use(manner, 'good')
    assert_whole(get()[0])
    assert server.asked == [(manner, None), ('good', None)]


def test_a_silent_mirror_is_left(server):
    server.use('silent')
    with pytest.raises(UserError, match='silent/fra-eng.zip: silent for 0.5 s'):
        get(timeout=0.5)
    server.use('good')
    assert_whole(get()[0])
    assert server.asked == [('silent', None), ('good', 'bytes=5000-')]


def test_all_mirrors_dead(server, nowhere):
    server.use('missing', 'wrong', 'noinner', 'page')
    dead = 'http://127.0.0.1:1/fra-eng.zip'
    with pytest.raises(UserError) as caught:
        get(mirrors=[dead, 'nonsense'])
    text = str(caught.value)
    assert '\n' not in text
    for words in (f'{dead}: ', 'refused', "nonsense: unknown url type: 'nonsense'", '/missing/fra-eng.zip: HTTP 404',
                  '/wrong/fra-eng.zip: wrong checksum: SHA-256 of fra.txt (12 bytes)', 'the zip holds no fra.txt',
                  '/page/fra-eng.zip: not a whole zip file', 'the URL of another mirror'):
        assert words in text
    assert list((nowhere / 'to').iterdir()) == []


def test_mirrors_that_are_given_come_first(server):
    server.use('missing')
    assert_whole(get(mirrors=[f'{server.url}/good/'])[0])          # a folder
    assert server.asked == [('good', None)]


def test_a_file_that_is_there_is_checked_and_kept(server, nowhere):
    server.use('good')
    for name, content in (('fra-eng.zip', GOOD), ('fra-eng/fra.txt', TEXT), ('fra.txt', TEXT)):
        path = put(nowhere / 'to' / name, content)
        paths, lines = get()
        assert [found.resolve() for found in paths] == [path]
        assert lines == [f'to/{name}: already there, checksum right']
        path.unlink()
    assert server.asked == []


def test_a_file_that_is_there_but_spoiled_is_replaced(server, nowhere):
    put(nowhere / 'to/fra-eng.zip', GOOD[:-100])
    server.use('good')
    paths, lines = get()
    assert_whole(paths)
    assert 'not a whole zip file' in lines[0]


def test_a_spoiled_file_survives_when_nothing_better_comes(server, nowhere):
    spoiled = put(nowhere / 'to/fra-eng.zip', GOOD[:-100])
    server.use('missing')
    with pytest.raises(UserError):
        get()
    assert spoiled.read_bytes() == GOOD[:-100]


def test_a_directory_that_cannot_be_made(server, nowhere):
    put(nowhere / 'to')
    server.use('good')
    with pytest.raises(UserError, match='cannot be written: .*; give another directory$'):
        get()


def test_a_file_without_a_zip_around_it(server, nowhere, monkeypatch):
    """Data sets of several files name each with its own checksum."""
    digest = hashlib.sha256(GOOD).hexdigest()
    urls = (f'{server.url}/wrong/x', f'{server.url}/good/x')
    files = tuple(fetch.File(f'many/{name}.gz', digest, len(GOOD), urls) for name in 'ab')
    monkeypatch.setitem(fetch.DATASETS, 'many', fetch.Dataset('many', 'two files', 'none', files))
    paths = fetch.get('many', 'to', report=lambda line: None)
    assert [path.as_posix() for path in paths] == ['to/many/a.gz', 'to/many/b.gz']
    assert [path.read_bytes() for path in paths] == [GOOD, GOOD]


# ---- a file without a recorded checksum ------------------------------------------------------------------------------

FORM = f'SHA-256 {hashlib.sha256(TEST_SET).hexdigest()}; none is recorded, so only the form was checked'


@pytest.fixture
def fetched(server, monkeypatch):
    """A function that replaces the mirrors of tatoeba-test by these manners of the server and fetches it: paths and lines."""
    def get_it(*manners):
        data_set = fetch.DATASETS['tatoeba-test']
        (file,) = data_set.files
        urls = tuple(f'{server.url}/{manner}/{file.path}' for manner in manners)
        monkeypatch.setitem(fetch.DATASETS, 'tatoeba-test', data_set._replace(files=(file._replace(urls=urls),)))
        lines = []
        return fetch.get('tatoeba-test', 'to', report=lines.append, timeout=0.5), lines
    return get_it


def test_a_file_without_a_recorded_checksum_is_checked_by_its_form_and_its_checksum_is_printed(server, fetched):
    (path,), lines = fetched('test')
    assert path.as_posix() == 'to/tatoeba-test-v2021-08-07.eng-fra.txt.gz' and path.read_bytes() == TEST_GZ
    assert lines == [f'{path}: fetched from {server.url}/test/{path.name}, {FORM}']
    assert locate.find('tatoeba-test', 'to') == path
    assert fetched('test') == ([path], [f'{path}: already there, {FORM}'])
    path.unlink()
    unpacked = put(path.with_suffix(''), TEST_SET)
    assert fetched('test') == ([unpacked], [f'{unpacked}: already there, {FORM}'])
    assert server.asked == [('test', None)]


@pytest.mark.parametrize('manner, reason', [
    ('damaged', 'not a whole gzip file'), ('plain', 'not a gzip file'), ('page', 'not a gzip file'),
    ('latin1', 'line 3001: not UTF-8 text, byte 0xe9 at offset'),
    ('two', 'line 3001: 2 columns; expected two language codes, a source and a target, with tabs between'),
    ('german', 'line 1: languages eng and deu; expected eng and fra'),
    ('hollow', 'line 3001: an empty column; expected two'),
    ('nothing', 'no sentences; expected lines of two language codes'), ('missing', 'HTTP 404')])
def test_a_mirror_with_another_form_leads_to_the_next(server, fetched, nowhere, manner, reason):
    with pytest.raises(UserError, match=f'^tatoeba-test: no mirror has .*/{manner}/[^ ]*: {reason}'):
        fetched(manner)
    assert list((nowhere / 'to').iterdir()) == []
    (path,), _ = fetched(manner, 'test')
    assert path.read_bytes() == TEST_GZ and server.asked[1:] == [(manner, None), ('test', None)]


def test_a_download_without_a_recorded_checksum_is_resumed_and_a_cut_file_is_fetched_again(server, fetched, nowhere):
    assert len(TEST_GZ) > 5000
    path = put(nowhere / 'to/tatoeba-test-v2021-08-07.eng-fra.txt.gz', TEST_GZ[:-9])
    put(path.with_name(path.name + '.part'), TEST_GZ[:5000])
    _, lines = fetched('test')
    assert re.search('to/.*: not a whole gzip file .*; fetching .* again', lines[0]) and FORM in lines[1]
    assert path.read_bytes() == TEST_GZ and server.asked == [('test', 'bytes=5000-')]


def test_the_offset_of_a_byte_that_is_not_utf_8_counts_the_byte_order_mark():
    with pytest.raises(ValueError, match='^line 2: not UTF-8 text, byte 0xff at offset 5$'):
        columns.decode(b'\xef\xbb\xbfa\n\xff')


# ---- python -m pyops.data --------------------------------------------------------------------------------------------

def test_get_goes_to_the_environments_directory_or_here(server, nowhere, monkeypatch, capsys):
    server.use('good')
    main(['get', 'fra-eng'])
    assert (nowhere / 'data/fra-eng.zip').read_bytes() == GOOD
    monkeypatch.setenv('PYOPS_DATA', 'elsewhere')
    main(['get', 'fra-eng'])
    assert (nowhere / 'elsewhere/fra-eng.zip').read_bytes() == GOOD
    assert 'checksum right' in capsys.readouterr().out


def test_list_says_licence_and_place(nowhere, capsys):
    main(['list'])
    out = capsys.readouterr().out
    assert 'fra-eng: 167,130 ' in out and 'CC BY 2.0' in out and 'not here: python -m pyops.data get fra-eng' in out
    assert 'tatoeba-test: English sentences' in out and 'not here: python -m pyops.data get tatoeba-test' in out
    put(nowhere / 'data/fra.txt')
    put(nowhere / 'data/tatoeba-test-v2021-08-07.eng-fra.txt')
    main(['list'])
    out = capsys.readouterr().out
    assert 'found: data/fra.txt' in out and 'found: data/tatoeba-test-v2021-08-07.eng-fra.txt' in out


@pytest.mark.parametrize('arguments, words', [
    (['get', 'deu-eng'], 'data set deu-eng: no such data set; give one of fra-eng'),
    (['list', '--data-dir', 'none'], 'data directory none: no such directory'),
    (['get', 'fra-eng', '--data-dir', ''], "data directory '': no such directory"),
    (['get', 'fra-eng', '--mirror', 'nonsense'], 'nonsense: unknown url type'),
])
def test_bad_input_is_one_line_and_status_2(server, capsys, arguments, words):
    server.use('missing')
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.count('\n') == 1 and error.startswith('pyops.data: error: ') and words in error


def test_the_module_runs():
    done = subprocess.run([sys.executable, '-m', 'pyops.data', 'list'], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith('fra-eng: ')


def test_the_table_agrees_with_where_programs_look():
    assert set(fetch.DATASETS) == set(locate.CANDIDATES)
    for name, dataset in fetch.DATASETS.items():
        for file in dataset.files:
            assert set(locate.CANDIDATES[name]) >= {file.path, *file.unpacked}
            assert file.urls and len(file.sha256) == (0 if name == 'tatoeba-test' else 64)
            assert bool(file.sha256) != bool(file.languages)


def test_the_real_file_has_the_checksum_of_the_table():
    path = locate.find('fra-eng')
    if path is None:
        pytest.skip('needs the fra-eng corpus: python -m pyops.data get fra-eng, or set PYOPS_DATA to its folder')
    fetch.check(path, fetch.DATASETS['fra-eng'].files[0])


def test_a_batch_of_tokens_has_as_many_sentences_as_fit_on_both_sides():
    lengths = np.random.default_rng(0).integers(1, 30, (500, 2))
    one = TokenBatches(lengths, 100)
    batches_ = list(one.batches(3, 1))
    assert (np.concatenate(batches_) == epoch_order(500, 3, 1)).all()
    for rows, following in zip(batches_, batches_[1:], strict=False):
        assert (lengths[rows].sum(0) <= 100).all()
        assert (lengths[[*rows, following[0]]].sum(0) > 100).any(), 'one more sentence fits'
    done = sum(map(len, batches_[:4]))
    assert [rows.tolist() for rows in one.batches(3, 1, done)] == [rows.tolist() for rows in batches_[4:]]
    assert one.count(3, 1, done) == len(batches_) - 4 and one.end(done) == 500


def test_a_sentence_longer_than_a_batch_of_tokens_is_a_batch_of_its_own():
    lengths = np.array([[3, 3], [200, 1], [3, 3], [1, 200]])
    sizes = [lengths[rows].tolist() for rows in TokenBatches(lengths, 10).batches(0, 0)]
    assert all(len(batch) == 1 or max(max(pair) for pair in batch) <= 10 for batch in sizes)
    assert sum(map(len, sizes)) == 4
    with pytest.raises(ValueError, match='tokens: expected 1 or more, got 0'):
        TokenBatches(lengths, 0)
