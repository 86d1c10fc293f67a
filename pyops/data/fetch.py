"""Download data sets: try mirrors in turn, resume what was cut off, believe nothing but the checksum.

A data set is one file or several.  A file that mirrors pack differently (fra-eng comes in zips of several makes) is
checked by what is inside, and so is one that is gzipped.  Nothing gets its final name before it is checked.
"""
import contextlib
import gzip
import hashlib
import http.client
import os
import re
import sys
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from pyops.data import locate
from pyops.errors import UserError

TIMEOUT = 30.0                      # seconds without a byte before a mirror counts as dead
_CHUNK = 1 << 18


class File(NamedTuple):
    """One file of a data set, as it lies in a data directory after the download."""
    path: str                       # below the data directory
    sha256: str                     # of the file, or of the file inside the zip or gzip
    size: int                       # bytes of the same
    urls: tuple
    inner: str = ''                 # base name of the file inside, if `path` is a zip
    unpacked: tuple = ()            # where else it may lie, packed or not; it is kept if it does


class Dataset(NamedTuple):
    """A data set that can be fetched by name."""
    name: str
    title: str
    licence: str
    files: tuple


_MNIST_MIRRORS = (
    'https://ossci-datasets.s3.amazonaws.com/mnist/',
    'https://storage.googleapis.com/cvdf-datasets/mnist/',
    'http://yann.lecun.com/exdb/mnist/',
)
# SHA-256 and bytes of the idx files themselves, in the order of locate.FILES
_MNIST_CONTENTS = (
    ('ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db', 47_040_016),
    ('65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5', 60_008),
    ('0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7', 7_840_016),
    ('ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2', 10_008),
)

DATASETS = {dataset.name: dataset for dataset in (
    Dataset('fra-eng', '167,130 English-French sentence pairs of Tatoeba, file of 2019-04-07',
            'CC BY 2.0, Tatoeba (https://tatoeba.org) through https://www.manythings.org/anki/',
            (File('fra-eng.zip', '0bb85dbaa1c896844649094d7eaf2e34bee34e84fe362b26ce7e8f2e12aae104', 11_669_748,
                  ('http://d2l-data.s3-accelerate.amazonaws.com/fra-eng.zip',
                   'https://www.manythings.org/anki/fra-eng.zip'), inner='fra.txt',
                  unpacked=locate.CANDIDATES['fra-eng'][1:]),)),
    Dataset('mnist', '60,000 + 10,000 handwritten digits of 28 x 28 pixels in four idx files',
            'CC BY-SA 3.0, Y. LeCun, C. Cortes, C. J. C. Burges (http://yann.lecun.com/exdb/mnist/)',
            tuple(File(places[0], sha256, size,
                       tuple(mirror + places[0].rpartition('/')[2] for mirror in _MNIST_MIRRORS), unpacked=places[1:])
                  for places, (sha256, size) in zip(locate.FILES['mnist'], _MNIST_CONTENTS, strict=True))),
)}


class Rejected(Exception):
    """Why a mirror or a file is of no use, in a few words."""


def dataset(name):
    """Return the Dataset of this name.  UserError if there is none."""
    if name not in DATASETS:
        raise locate.unknown(name)
    return DATASETS[name]


def get(name, data_dir=None, mirrors=(), timeout=TIMEOUT, report=print):
    """Fetch all files of a data set and return their paths; a file that is there with the right checksum is kept.

    `data_dir` (made if missing) is by default $PYOPS_DATA, or else ./data.  `mirrors` are URLs to try first: of the
    file itself, or of the folder that holds it if the URL ends in a slash.  `report` gets a line for each file.
    UserError if no mirror has a file (with the reason for each mirror), a file cannot be written, or `data_dir` is empty.
    """
    wanted = dataset(name)
    if data_dir == '':
        raise UserError("data directory '': no such directory; give the name of one")
    directory = Path(data_dir or os.environ.get('PYOPS_DATA') or 'data')
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return [_get_file(wanted, file, directory, mirrors, timeout, report) for file in wanted.files]
    except OSError as error:
        raise UserError(f'{error.filename or directory}: cannot be written: {error.strerror or error}; '
                        'give another directory') from error


def check(path, file):
    """Raise Rejected unless the file at `path`, packed or unpacked, is the one that `file` describes."""
    digest, size = hashlib.sha256(), 0
    inner = '' if path.name == file.inner else file.inner
    try:
        for chunk in _chunks(path, inner):
            digest.update(chunk)
            size += len(chunk)
    except (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise Rejected(f'not a whole {"zip" if inner else "gzip"} file ({error})') from error
    if digest.hexdigest() != file.sha256:
        raise Rejected(f'wrong checksum: SHA-256 of {file.inner or file.path} ({size} bytes) is '
                       f'{digest.hexdigest()[:12]}..., want {file.sha256[:12]}... ({file.size} bytes)')


def _chunks(path, inner):
    if not inner:
        with open(path, 'rb') as file:
            gzipped = file.read(2) == b'\x1f\x8b'
            file.seek(0)
            with gzip.open(file) if gzipped else contextlib.nullcontext(file) as stream:
                while chunk := stream.read(_CHUNK):
                    yield chunk
        return
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist()
                 if name.rpartition('/')[2] == inner and not name.startswith('__MACOSX/')]
        if not names:
            raise Rejected(f'the zip holds no {inner}')
        with archive.open(names[0]) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk


def _get_file(wanted, file, directory, mirrors, timeout, report):
    for here in (directory / place for place in (file.path, *file.unpacked)):
        if here.is_file():
            try:
                check(here, file)
            except Rejected as reason:
                report(f'{here}: {reason}; fetching {file.path} again')
            else:
                report(f'{here}: already there, checksum right')
                return here
    path = directory / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + '.part')
    given = [mirror + path.name if mirror.endswith('/') else mirror for mirror in mirrors]
    failures = []
    for url in [*given, *file.urls]:
        try:
            _download_checked(url, part, file, timeout)
        except Rejected as reason:
            failures.append(f'{url}: {reason}')
            continue
        os.replace(part, path)
        report(f'{path}: fetched from {url}, checksum right')
        return path
    raise UserError(f'{wanted.name}: no mirror has {file.path}: {"; ".join(failures)}; '
                    'try again later, or give the URL of another mirror')


def _download_checked(url, part, file, timeout):
    """Bring the file to `part` and check it.  What a resumed download spoiled gets a second chance from its start."""
    resumed = part.exists() and part.stat().st_size > 0
    _download(url, part, timeout)
    try:
        check(part, file)
    except Rejected:
        part.unlink()                                       # the next mirror must not build upon it
        if not resumed:
            raise
        _download_checked(url, part, file, timeout)


def _download(url, part, timeout):
    """Append to `part` what it lacks of the file at `url`.  Rejected if the mirror fails; `part` keeps what came."""
    have = part.stat().st_size if part.exists() else 0
    with _blaming_the_mirror(timeout):
        request = urllib.request.Request(url, headers={'User-Agent': 'pyops', 'Accept-Encoding': 'identity'})
        if have:
            request.add_header('Range', f'bytes={have}-')
        try:
            response = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            error.close()
            if have and error.code == 416:                  # nothing lies beyond: whole already, or another file
                return
            raise
    with response:
        # Without a 206 that begins where we asked, the server sends the file from its start.
        start = re.match(r'bytes (\d+)-', response.headers.get('Content-Range', ''))
        resumes = response.status == 206
        if resumes and not (start and int(start[1]) == have):
            raise Rejected(f'sent bytes from another place than {have}')
        length = response.headers.get('Content-Length', '')
        rest = int(length) if length.isdecimal() else None
        came, have = 0, have if resumes else 0
        with open(part, 'ab' if resumes else 'wb') as stream, \
                tqdm(desc=part.stem, initial=have, total=None if rest is None else have + rest, unit='B',
                     unit_scale=True, disable=not sys.stderr.isatty()) as progress:
            while True:
                with _blaming_the_mirror(timeout):
                    chunk = response.read1(_CHUNK)
                if not chunk:
                    break
                stream.write(chunk)
                came += len(chunk)
                progress.update(len(chunk))
    if rest is not None and came < rest:
        raise Rejected(f'cut off after {came} of {rest} bytes')


@contextlib.contextmanager
def _blaming_the_mirror(timeout):
    """Turn what goes wrong on the network into Rejected; an error of the disk is not the mirror's, and goes on."""
    try:
        yield
    except urllib.error.HTTPError as error:
        raise Rejected(f'HTTP {error.code} {error.reason}') from error
    except urllib.error.URLError as error:
        raise Rejected(f'{error.reason}') from error
    except TimeoutError as error:
        raise Rejected(f'silent for {timeout:g} s') from error
    except (OSError, http.client.HTTPException, ValueError) as error:   # ValueError: `unknown url type`
        raise Rejected(str(error) or type(error).__name__) from error


def describe(data_dir=None):
    """Return lines that say what can be fetched, under which licence, and where it lies already."""
    lines = []
    for wanted in DATASETS.values():
        place = locate.find(wanted.name, data_dir)
        lines += [f'{wanted.name}: {wanted.title}', f'    licence: {wanted.licence}',
                  f'    {f"found: {place}" if place else f"not here: python -m pyops.data get {wanted.name}"}']
    return lines
