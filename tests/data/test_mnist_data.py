"""MNIST: found, checked and fetched as four files that belong together."""
import gzip
import hashlib
import http.server
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from pyops.data import MNISTDataset, digits, fetch, idx, locate, mnist
from pyops.data.__main__ import main
from pyops.errors import UserError

NAMES = ('train-images-idx3-ubyte', 'train-labels-idx1-ubyte', 't10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte')
RNG = np.random.default_rng(0)
ARRAYS = (RNG.integers(0, 256, (30, 28, 28), np.uint8), RNG.integers(0, 10, 30, np.uint8),
          RNG.integers(0, 256, (20, 28, 28), np.uint8), RNG.integers(0, 10, 20, np.uint8))


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """An empty working directory, and no $PYOPS_DATA."""
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(folder, arrays=ARRAYS, ending='.gz', leave_out=()):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(NAMES, arrays, strict=True):
        if name not in leave_out:
            idx.write(folder / (name + ending), array)
    return folder


def error_of(*arguments, **more):
    with pytest.raises(UserError) as caught:
        mnist.load(*arguments, **more)
    assert '\n' not in str(caught.value)
    return str(caught.value)


# ---- load ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('ending', ['', '.gz'])
@pytest.mark.parametrize('folder', ['data/mnist', 'data'])
def test_load_finds_four_files(nowhere, folder, ending):
    put(nowhere / folder, ending=ending)
    got = mnist.load()
    assert Path(got.name) == Path(folder) and got.line == f'mnist : {folder}'
    assert (got.images_magic, got.labels_magic) == (2051, 2049)
    for array, want in zip(got[1:5], ARRAYS, strict=True):
        assert array.dtype == np.uint8
        assert (array == (want.reshape(-1, 784) if want.ndim == 3 else want)).all()


def test_load_looks_where_other_data_sets_are_looked_for(nowhere, monkeypatch):
    put(nowhere / 'flag/mnist')
    put(nowhere / 'environment')
    put(nowhere / 'data')
    assert mnist.load('flag').name == 'flag/mnist'
    monkeypatch.setenv('PYOPS_DATA', 'environment')
    assert mnist.load().name == 'environment'
    monkeypatch.delenv('PYOPS_DATA')
    assert mnist.load().name == 'data'


def test_copies_are_not_mixed(nowhere, monkeypatch):
    """A directory that lacks a file is passed over for one that has all, not filled up from it."""
    put(nowhere / 'part', leave_out=NAMES[:1])
    put(nowhere / 'data')
    monkeypatch.setenv('PYOPS_DATA', 'part')
    assert mnist.load().name == 'data'
    assert [path.parent for path in locate.find_files('mnist')] == [Path('data')] * 4


@pytest.mark.parametrize('name', NAMES)
def test_one_of_four_is_missing(nowhere, name):
    put(nowhere / 'data/mnist', leave_out=[name])
    assert locate.find('mnist') is None and locate.find_files('mnist') is None
    text = error_of()
    assert f'data: mnist is incomplete, {name}.gz missing; get it with' in text
    assert 'python -m pyops.data get mnist --data-dir data' in text
    put(nowhere / 'other', leave_out=[name])
    assert f'other: mnist is incomplete, {name}.gz missing' in error_of('other')
    assert len(mnist.load(embedded=True).train_images) == digits.TRAIN


def test_a_given_directory_without_mnist(nowhere):
    put(nowhere / 'data')
    want = 'data directory .: holds no mnist; get it with: python -m pyops.data get mnist --data-dir .'
    assert error_of('.') == want
    with pytest.raises(UserError, match=want):
        MNISTDataset(data_dir='.')
    assert 'data directory none: no such directory' in error_of('none')
    assert mnist.load('.', embedded=True).name == 'embedded'


def test_without_data_the_embedded_digits_are_announced(nowhere):
    got = mnist.load()
    assert got.name == 'embedded' and (got.images_magic, got.labels_magic) == (2051, 2049)
    assert got.line == ('no MNIST found, using the embedded digits : 10000 train, 2000 test; '
                        'get the real one with: python -m pyops.data get mnist')
    assert [array.shape for array in got[1:5]] == [(10000, 784), (10000,), (2000, 784), (2000,)]
    put(nowhere / 'data')
    assert mnist.load().name == 'data'
    forced = mnist.load(embedded=True)
    assert forced.name == 'embedded' and forced.line == 'embedded digits : 10000 train, 2000 test'


@pytest.mark.parametrize('number, array, words', [
    (0, ARRAYS[0][:29], 'train-images-idx3-ubyte.gz: has 29 images, but {}/train-labels-idx1-ubyte.gz 30 labels'),
    (1, ARRAYS[1][:7], 'train-images-idx3-ubyte.gz: has 30 images, but {}/train-labels-idx1-ubyte.gz 7 labels'),
    (3, ARRAYS[1], 't10k-images-idx3-ubyte.gz: has 20 images, but {}/t10k-labels-idx1-ubyte.gz 30 labels'),
    (2, ARRAYS[2][:, :27], 't10k-images-idx3-ubyte.gz: has 20 x 27 x 28 pixels, expected images of 28 x 28'),
    (2, ARRAYS[2].reshape(20, 14, 56), 't10k-images-idx3-ubyte.gz: has 20 x 14 x 56 pixels'),
    (1, np.where(np.arange(30) == 11, 10, ARRAYS[1]).astype(np.uint8),
     'train-labels-idx1-ubyte.gz: has a label 10, expected 0 to 9'),
    (0, ARRAYS[1], 'train-images-idx3-ubyte.gz: magic number 2049, expected 2051 (images)'),
    (3, ARRAYS[2], 't10k-labels-idx1-ubyte.gz: magic number 2051, expected 2049 (labels)'),
])
def test_files_that_do_not_go_together(nowhere, number, array, words):
    put(nowhere / 'data/mnist', [*ARRAYS[:number], array, *ARRAYS[number + 1:]])
    assert words.format('data/mnist') in error_of()


def test_no_images_at_all(nowhere):
    put(nowhere / 'data', [ARRAYS[0][:0], ARRAYS[1][:0], *ARRAYS[2:]])
    assert 'data/train-images-idx3-ubyte.gz: has 0 x 28 x 28 pixels' in error_of()


@pytest.mark.parametrize('name', NAMES)
def test_a_file_cut_short(nowhere, name):
    path = put(nowhere / 'data') / f'{name}.gz'
    path.write_bytes(path.read_bytes()[:-9])
    assert f'data/{name}.gz: the gzip stream is truncated' in error_of()


# ---- fetch -----------------------------------------------------------------------------------------------------------

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = self.server.bodies.get(self.path)
        if body is None:
            return self.send_error(404)
        asked = self.headers.get('Range')
        start = int(asked[len('bytes='):-1]) if asked else 0
        self.server.asked.append((self.path.rpartition('/')[2], start))
        self.send_response(206 if start else 200)
        if start:
            self.send_header('Content-Range', f'bytes {start}-{len(body) - 1}/{len(body)}')
        self.send_header('Content-Length', str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start:])

    def log_message(self, *_):
        pass


@pytest.fixture
def mirror(nowhere, monkeypatch):
    """A server with four small files, and the table's row for mnist with their checksums and no mirror but this one."""
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    server.daemon_threads = True
    folder = put(nowhere / 'served')
    server.bodies = {f'/mnist/{path.name}': path.read_bytes() for path in folder.iterdir()}
    server.asked = []
    server.url = f'http://127.0.0.1:{server.server_port}/mnist/'
    row = fetch.DATASETS['mnist']
    contents = (gzip.decompress(server.bodies[f'/{file.path}']) for file in row.files)
    files = tuple(file._replace(sha256=hashlib.sha256(content).hexdigest(), urls=())
                  for file, content in zip(row.files, contents, strict=True))
    monkeypatch.setitem(fetch.DATASETS, 'mnist', row._replace(files=files))
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_get_brings_what_load_reads(mirror, capsys):
    main(['get', 'mnist', '--mirror', mirror.url])
    assert capsys.readouterr().out.count('checksum right') == 4
    assert sorted(os.listdir('data/mnist')) == sorted(f'{name}.gz' for name in NAMES)
    got = mnist.load()
    assert got.name == 'data/mnist' and (got.test_labels == ARRAYS[3]).all()
    main(['list'])
    assert 'found: data/mnist\n' in capsys.readouterr().out


def test_get_brings_what_is_missing_or_spoiled_and_resumes(mirror, nowhere):
    """What is there stays, packed by whom or unpacked: the checksum is of the idx file inside."""
    folder = nowhere / 'data/mnist'
    put(folder, ending='', leave_out=NAMES[1:])
    (folder / f'{NAMES[1]}.gz').write_bytes(mirror.bodies[f'/mnist/{NAMES[1]}.gz'][:-5])
    part = mirror.bodies[f'/mnist/{NAMES[2]}.gz'][:1000]
    (folder / f'{NAMES[2]}.gz.part').write_bytes(part)
    (folder / f'{NAMES[3]}.gz').write_bytes(gzip.compress(gzip.decompress(mirror.bodies[f'/mnist/{NAMES[3]}.gz']), 1))
    lines = []
    paths = fetch.get('mnist', mirrors=[mirror.url], report=lines.append)
    assert [path.name for path in paths] == [NAMES[0]] + [f'{name}.gz' for name in NAMES[1:]]
    assert mirror.asked == [(f'{NAMES[1]}.gz', 0), (f'{NAMES[2]}.gz', 1000)]
    assert 'not a whole gzip file' in lines[1]
    assert all((array.reshape(want.shape) == want).all() for array, want in zip(mnist.load()[1:5], ARRAYS, strict=True))


def test_get_believes_no_other_content(mirror):
    path = f'/mnist/{NAMES[0]}.gz'
    mirror.bodies[path] = gzip.compress(gzip.decompress(mirror.bodies[path])[:-1] + b'\x80')
    with pytest.raises(UserError, match='mnist: no mirror has mnist/train-images-idx3-ubyte.gz: .*wrong checksum'):
        fetch.get('mnist', mirrors=[mirror.url], report=lambda line: None)
    assert os.listdir('data/mnist') == []


def test_the_table_has_the_sizes_of_the_published_files():
    row = fetch.DATASETS['mnist']
    assert 'CC BY-SA 3.0' in row.licence and 'LeCun' in row.licence
    assert [file.path for file in row.files] == [f'mnist/{name}.gz' for name in NAMES]
    assert [file.size for file in row.files] == [16 + 60000 * 784, 8 + 60000, 16 + 10000 * 784, 8 + 10000]
    for file in row.files:
        assert len(file.urls) == 3 and all(url.endswith(file.path.partition('/')[2]) for url in file.urls)


# ---- the real files --------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def real():
    """The files in $PYOPS_DATA."""
    folder = os.environ.get('PYOPS_DATA')
    if not folder or locate.find_files('mnist', folder) is None:
        pytest.skip('needs MNIST: python -m pyops.data get mnist, and set PYOPS_DATA to its folder')
    return mnist.load(folder)


def test_the_real_digits(real):
    assert [array.shape for array in real[1:5]] == [(60000, 784), (60000,), (10000, 784), (10000,)]
    assert real.train_labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert np.bincount(real.test_labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert abs(real.train_images.mean() - 33.32) < 0.01 and abs(real.test_images.mean() - 33.79) < 0.01
    # a digit lies in the middle: rows and columns were not exchanged with images
    assert real.train_images.reshape(-1, 28, 28)[:, 10:18, 10:18].mean() > 80
    assert real.train_images.reshape(-1, 28, 28)[:, :, :2].mean() < 1


def test_the_real_labels_have_the_checksums_of_the_table(real):
    paths = locate.find_files('mnist', os.environ['PYOPS_DATA'])
    for path, file in list(zip(paths, fetch.DATASETS['mnist'].files, strict=True))[1::2]:
        fetch.check(path, file)


def test_the_embedded_digits_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv('PYOPS_CACHE', str(tmp_path))
    drawn = mnist.load(embedded=True)
    monkeypatch.setattr(digits, 'digits', None)
    kept = mnist.load(embedded=True)
    for one, other in zip(drawn[1:5], kept[1:5], strict=True):
        assert one.dtype == other.dtype and (one == other).all() and not other.flags.writeable
