"""Download data sets: try mirrors in turn, resume partial downloads, verify checksums.

A data set consists of one or more files.  If mirrors pack a file differently (there are several zips of fra-eng), or if it
is gzipped, the checksum covers the content.  A file without a recorded checksum is verified by its form.  A file gets its
final name only after it was verified.
"""
from __future__ import annotations

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
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from pyops.data import columns, locate
from pyops.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyops.typing import PathLike

TIMEOUT = 30.0                      # seconds without data before a mirror is given up
_CHUNK = 1 << 18
_GZIP = b'\x1f\x8b'                  # first bytes of a gzip file


class File(NamedTuple):
    """One file of a data set."""
    path: str                       # relative to the data directory
    sha256: str                     # of the file, or of its content if it is a zip or gzip; '': not recorded
    size: int                       # of the same, in bytes; 0 if not recorded
    urls: tuple
    inner: str = ''                 # base name of the content, if `path` is a zip
    unpacked: tuple = ()            # other accepted paths, packed or not; a valid file there is kept
    languages: tuple = ()           # without sha256: the two language codes of each line of a test file, which is gzipped


class Dataset(NamedTuple):
    """A data set that can be downloaded."""
    name: str
    title: str
    licence: str
    files: tuple


_MNIST_MIRRORS = (
    'https://ossci-datasets.s3.amazonaws.com/mnist/',
    'https://storage.googleapis.com/cvdf-datasets/mnist/',
    'http://yann.lecun.com/exdb/mnist/',
)
# SHA-256 and size of the uncompressed idx files, in the order of locate.FILES
_MNIST_CONTENTS = (
    ('ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db', 47_040_016),
    ('65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5', 60_008),
    ('0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7', 7_840_016),
    ('ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2', 10_008),
)
# the branch, and a commit that has the file
_TATOEBA_MIRRORS = tuple(
    f'https://raw.githubusercontent.com/Helsinki-NLP/Tatoeba-Challenge/{tree}/data/release/test/v2021-08-07/'
    for tree in ('master', 'f559ddf01cf3bfcc32cddf7e940218eaebe7158a'))
(_TATOEBA_TEST,) = locate.FILES['tatoeba-test']

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
    Dataset('tatoeba-test', 'English sentences with French translations: test set v2021-08-07 of the Tatoeba Challenge',
            'CC BY 2.0, Tatoeba (https://tatoeba.org) through https://github.com/Helsinki-NLP/Tatoeba-Challenge',
            # Its checksum is not recorded: the file could not be fetched when it was added.
            (File(_TATOEBA_TEST[0], '', 0, tuple(mirror + _TATOEBA_TEST[0] for mirror in _TATOEBA_MIRRORS),
                  unpacked=_TATOEBA_TEST[1:], languages=('eng', 'fra')),)),
)}


class Rejected(Exception):
    """A mirror or a file was rejected; the text is the reason."""


def dataset(name: str) -> Dataset:
    """Return the Dataset of this name.  UserError if there is none."""
    if name not in DATASETS:
        raise locate.unknown(name)
    return DATASETS[name]


def get(name: str, data_dir: PathLike | None = None, mirrors: Sequence[str] = (), timeout: float = TIMEOUT,
        report: Callable[[str], Any] = print) -> list[Path]:
    """Download all files of a data set and return their paths; files that are there and pass `check` are kept.

    data_dir is created if missing; default: $PYOPS_DATA, else ./data.  mirrors: URLs to try first, of the file itself or,
    with a slash at the end, of its folder.  report is called with a line per file.
    UserError if no mirror has a file (with the reason for each mirror), a file cannot be written, or data_dir is ''.
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


def check(path: Path, file: File) -> str:
    """Raise Rejected unless the file at `path`, packed or unpacked, has the content that `file` describes.

    Return the text for the user about the check.  Without a recorded checksum it has the checksum of the content.
    """
    digest, size = hashlib.sha256(), 0
    inner = '' if path.name == file.inner else file.inner
    content = []
    try:
        for chunk in _chunks(path, inner):
            digest.update(chunk)
            size += len(chunk)
            if not file.sha256:
                content.append(chunk)
    except (zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise Rejected(f'not a whole {"zip" if inner else "gzip"} file ({error})') from error
    if not file.sha256:
        _check_form(path, b''.join(content), file.languages)
        return f'SHA-256 {digest.hexdigest()}; none is recorded, so only the form was checked'
    if digest.hexdigest() != file.sha256:
        raise Rejected(f'wrong checksum: SHA-256 of {file.inner or file.path} ({size} bytes) is '
                       f'{digest.hexdigest()[:12]}..., expected {file.sha256[:12]}... ({file.size} bytes)')
    return 'checksum right'


def _check_form(path: Path, content: bytes, languages: tuple[str, ...]) -> None:
    """Raise Rejected unless the file at `path` with this content, unpacked, is a whole test file of these languages."""
    with open(path, 'rb') as file:
        # Plain text is accepted only under its own name: a download that was cut off would not be noticed.
        if path.suffix != '.txt' and file.read(2) != _GZIP:
            raise Rejected('not a gzip file')
    try:
        columns.language_pairs(columns.decode(content), languages)
    except ValueError as error:
        raise Rejected(str(error)) from error


def _chunks(path: Path, inner: str) -> Iterator[bytes]:
    if not inner:
        with open(path, 'rb') as file:
            gzipped = file.read(2) == _GZIP
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


def _get_file(wanted: Dataset, file: File, directory: Path, mirrors: Sequence[str], timeout: float,
              report: Callable[[str], Any]) -> Path:
    for here in (directory / place for place in (file.path, *file.unpacked)):
        if here.is_file():
            try:
                checked = check(here, file)
            except Rejected as reason:
                report(f'{here}: {reason}; fetching {file.path} again')
            else:
                report(f'{here}: already there, {checked}')
                return here
    path = directory / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + '.part')
    given = [mirror + path.name if mirror.endswith('/') else mirror for mirror in mirrors]
    failures = []
    for url in [*given, *file.urls]:
        try:
            checked = _download_checked(url, part, file, timeout)
        except Rejected as reason:
            failures.append(f'{url}: {reason}')
            continue
        os.replace(part, path)
        report(f'{path}: fetched from {url}, {checked}')
        return path
    raise UserError(f'{wanted.name}: no mirror has {file.path}: {"; ".join(failures)}; '
                    'try again later, or give the URL of another mirror')


def _download_checked(url: str, part: Path, file: File, timeout: float) -> str:
    """Download the file to `part` and return the text of `check`.  If a resumed download fails the check, start once more from
    scratch."""
    resumed = part.exists() and part.stat().st_size > 0
    _download(url, part, timeout)
    try:
        return check(part, file)
    except Rejected:
        part.unlink()                                       # the next mirror must not resume it
        if not resumed:
            raise
        return _download_checked(url, part, file, timeout)


def _download(url: str, part: Path, timeout: float) -> None:
    """Append the missing rest of the file at `url` to `part`.  If the mirror fails, raise Rejected but keep `part`."""
    have = part.stat().st_size if part.exists() else 0
    with _blaming_the_mirror(timeout):
        request = urllib.request.Request(url, headers={'User-Agent': 'pyops', 'Accept-Encoding': 'identity'})
        if have:
            request.add_header('Range', f'bytes={have}-')
        try:
            response = urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            error.close()
            if have and error.code == 416:                  # no more bytes: complete, or another file
                return
            raise
    with response:
        # Without a 206 that starts at our offset, the server sends the whole file.
        start = re.match(r'bytes (\d+)-', response.headers.get('Content-Range', ''))
        resumes = response.status == 206
        if resumes and not (start and int(start[1]) == have):
            raise Rejected(f'sent bytes from another offset than {have}')
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
def _blaming_the_mirror(timeout: float) -> Iterator[None]:
    """Convert network errors to Rejected; disk errors are not the mirror's fault and propagate."""
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


def describe(data_dir: PathLike | None = None) -> list[str]:
    """Return lines about each data set: its title, licence, and path if it was found."""
    lines = []
    for wanted in DATASETS.values():
        place = locate.find(wanted.name, data_dir)
        lines += [f'{wanted.name}: {wanted.title}', f'    licence: {wanted.licence}',
                  f'    {f"found: {place}" if place else f"not here: python -m pyops.data get {wanted.name}"}']
    return lines
