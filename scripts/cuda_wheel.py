"""Put a CUDA library into a wheel of its own, pyops_cuda-VERSION-py3-none-PLATFORM.whl, for `make cuda-wheel`.

    python -m scripts.cuda_wheel build/cuda-wheel/libpyops_cuda.so dist

It contains the package pyops_cuda: the library and device.h.  pyops.backend.library finds it there.
"""
import base64
import hashlib
import os
import sysconfig
import tomllib
import zipfile
from pathlib import Path

from pyops import __version__
from pyops.backend import library
from pyops.errors import UserError, exits_cleanly
from pyops.files import open_atomically
from pyops.flags import ArgumentParser

PROGRAM = 'scripts.cuda_wheel'
ROOT = Path(__file__).resolve().parents[1]
NAME = 'pyops_cuda'


def parser():
    p = ArgumentParser(prog=f'python -m {PROGRAM}', description='Put a CUDA library into a wheel of its own.')
    p.add_argument('library', metavar='LIBRARY', help='the library, built by `make cuda`')
    p.add_argument('folder', metavar='FOLDER', help='folder for the wheel; it is created')
    return p


def main(argv=None):
    args = parser().parse_args(argv)
    check(args.library)
    try:
        print(write(Path(args.library), Path(args.folder)))
    except OSError as error:
        raise UserError(f'{args.folder}: cannot write the wheel ({error.strerror}); name another folder') from error


def check(path):
    """UserError unless the file is a CUDA library for this version of pyops."""
    os.environ['PYOPS_CUDA_LIBRARY'] = os.path.abspath(path)
    try:
        _ = library.cuda().lib.pyops_device_count       # no function of the CPU library
    finally:
        del os.environ['PYOPS_CUDA_LIBRARY']


def write(path, folder):
    """Write the wheel of the library `path` into a folder and return its path.  The same library gives the same bytes."""
    tag, info = f'py3-none-{sysconfig.get_platform().replace("-", "_").replace(".", "_")}', f'{NAME}-{__version__}.dist-info'
    contents = {
        f'{NAME}/__init__.py': b'"""The CUDA library of pyops, which pyops.backend.library opens."""\n',
        f'{NAME}/libpyops_cuda.so': path.read_bytes(),
        f'{NAME}/device.h': (ROOT / 'cuda/device.h').read_bytes(),
        f'{info}/licenses/LICENSE': (ROOT / 'LICENSE').read_bytes(),
        f'{info}/METADATA': metadata().encode(),
        f'{info}/WHEEL': f'Wheel-Version: 1.0\nGenerator: {PROGRAM}\nRoot-Is-Purelib: false\nTag: {tag}\n'.encode()}
    record = ''.join(f'{name},sha256={_digest(content)},{len(content)}\n' for name, content in contents.items())
    contents[f'{info}/RECORD'] = f'{record}{info}/RECORD,,\n'.encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f'{NAME}-{__version__}-{tag}.whl'
    with open_atomically(wheel) as file, zipfile.ZipFile(file, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents.items():
            entry = zipfile.ZipInfo(name)           # its date is always 1980-01-01
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o100644 << 16
            archive.writestr(entry, content)
    return wheel


def metadata():
    """Return the text of METADATA, with the fields of pyproject.toml that hold for both wheels."""
    with open(ROOT / 'pyproject.toml', 'rb') as file:
        project = tomllib.load(file)['project']
    fields = {'Metadata-Version': '2.4', 'Name': NAME.replace('_', '-'), 'Version': __version__,
              'Summary': f'The CUDA library of pyops {__version__}', 'Author': project['authors'][0]['name'],
              'License-Expression': project['license'], 'License-File': 'LICENSE',
              'Requires-Python': project['requires-python'], 'Requires-Dist': f'pyops=={__version__}'}
    return ''.join(f'{name}: {value}\n' for name, value in fields.items())


def _digest(content):
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()


if __name__ == '__main__':
    with exits_cleanly(PROGRAM):
        main()
