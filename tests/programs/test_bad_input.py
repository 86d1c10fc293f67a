"""What a hostile or a clumsy user meets: one line that names the thing, what was expected and what to do; status 2;
no traceback; and whatever was there before is still there, byte for byte."""
import contextlib
import errno
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from conftest import ROOT, environment_without

from pyops import checkpoint, fit
from pyops.data import __main__ as data
from pyops.errors import _DEPENDENCIES, UserError, exits_cleanly
from pyops.init import zeros
from pyops.optim import Adam
from pyops.params import Parameters, Spec
from pyops.text import embedded
from pyops.training import Metrics
from seq2seq import train, translate

SAVED = 'ckpt/checkpoint_20250101_000000_1.safetensors'
SIZES = ['--embedding', '16', '--hidden', '16', '-b', '16']
PROGRAMS = {'seq2seq.train': train.main, 'seq2seq.translate': translate.main, 'pyops.data': data.main}


def text_of(pairs):
    return ''.join(f'{source}\t{target}\n' for source, target in pairs).encode()


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A folder with two corpora and a checkpoint of one epoch on the first of them."""
    folder = tmp_path_factory.mktemp('trained')
    pairs = embedded.pairs()
    (folder / 'pairs.txt').write_bytes(text_of(pairs[:40]))
    (folder / 'other.txt').write_bytes(text_of(pairs[5000:5040]))
    train.main(['-e', '1', '-f', str(folder / 'pairs.txt'), '-c', str(folder / 'ckpt'), *SIZES])
    (saved,) = (folder / 'ckpt').glob('*.safetensors')
    saved.rename(folder / SAVED)
    return folder


@pytest.fixture
def place(trained, tmp_path, monkeypatch):
    """A copy of that folder, and the current directory: arguments and messages name files as a user would."""
    place = tmp_path / 'a place'
    shutil.copytree(trained, place)
    monkeypatch.chdir(place)
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    return place


# ---- the table -----------------------------------------------------------------------------------------------------

class Case(NamedTuple):
    name: str
    program: str
    arguments: str
    want: str               # a regular expression for the whole text behind `error: `
    prepare: object = None  # what to do in the folder first


def file(name, content):
    return lambda: Path(name).write_bytes(content)


def edited(change):
    """The checkpoint's bytes, changed, under a name of its own: x.safetensors."""
    return lambda: Path('x.safetensors').write_bytes(change(Path(SAVED).read_bytes()))


def flipped(content):
    """One bit of the last tensor, where only a checksum notices it."""
    return content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]


def damaged_zip():
    """One of an unusual method, whose errors are of a kind of their own."""
    with zipfile.ZipFile('bad.zip', 'w', zipfile.ZIP_LZMA) as archive:
        archive.write('pairs.txt')
    content = bytearray(Path('bad.zip').read_bytes())
    start = 30 + len('pairs.txt') + 4                       # behind the local header and the header of the method
    content[start:start + 5] = b'\xff' * 5
    Path('bad.zip').write_bytes(content)


def zip_of_two():
    with zipfile.ZipFile('two.zip', 'w') as archive:
        archive.write('pairs.txt', 'a/pairs.txt')
        archive.write('other.txt', 'b.txt')


def foreign():
    checkpoint.save('x.safetensors', {'w': np.zeros(3, np.float32)}, {'program': 'mnist'})


def restate(**values):
    kept, state = checkpoint.load(SAVED)
    checkpoint.save(SAVED, kept, state | values)


def resumed(flags):
    return f'-e 2 -c ckpt -f pairs.txt {flags}'


TRAIN, TRANSLATE, DATA = PROGRAMS
FRESH = ' '.join(['-e 1 -c new', *SIZES])
NUMBER = r'-?[\w.]+'
SEE = '; see --help'
CASES = [
    # exact kernels
    Case('exact in bfloat16', TRAIN, f'-f embedded --exact --precision bf16 {FRESH}',
         '--exact: expected --precision fp32, got bf16; give that, or --no-exact'),
    Case('exact on a GPU', TRAIN, f'-f embedded --exact -g 1 {FRESH}',
         '--exact: a GPU gives other bits; give -g 0 to run on the CPU, or --no-exact'),
    # the corpus
    Case('empty corpus', TRAIN, f'-f empty.txt {FRESH}',
         r'empty\.txt: no sentence pairs; give a file with one pair a line and a tab between its sentences',
         file('empty.txt', b'')),
    Case('blank corpus', TRAIN, f'-f blank.txt {FRESH}', r'blank\.txt: no sentence pairs; give .*',
         file('blank.txt', b'\n \n\n')),
    Case('line without a tab', TRAIN, f'-f bad.txt {FRESH}',
         r'bad\.txt: line 3: no tab; a line is two sentences with a tab between: correct or remove the line',
         file('bad.txt', b'Go.\tVa !\n\nHi.  Salut !\n')),
    Case('line without a second sentence', TRAIN, f'-f bad.txt {FRESH}',
         r'bad\.txt: line 1: an empty sentence; a line is two sentences .*: correct or remove the line',
         file('bad.txt', b'Go.\t\n')),
    Case('not UTF-8', TRAIN, f'-f bad.txt {FRESH}',
         r'bad\.txt: line 2: not UTF-8 text, byte 0xe9 at offset \d+; convert the file to UTF-8',
         file('bad.txt', b'Go.\tVa !\nRun.\tFuyez, caf\xe9 !\n')),
    Case('UTF-16', TRAIN, f'-f bad.txt {FRESH}', r'bad\.txt: line 1: not UTF-8 text, byte 0xff .*; convert .*',
         file('bad.txt', 'Go.\tVa !\n'.encode('utf-16-le').join([b'\xff\xfe', b'']))),
    Case('missing corpus', TRAIN, f'-f none.txt {FRESH}',
         r"none\.txt: no such file; give a \.txt or \.zip of sentence pairs, or fetch one with '.*'"),
    Case('folder for a corpus', TRAIN, f'-f ckpt {FRESH}', r'ckpt: cannot be read \(.*\); give another file of sentence pairs'),
    Case('broken zip', TRAIN, f'-f bad.zip {FRESH}', r'bad\.zip: truncated or damaged zip file \(.*\); get the file again',
         file('bad.zip', b'PK\3\4 and no more')),
    Case('damaged zip', TRAIN, f'-f bad.zip {FRESH}', r'bad\.zip: truncated or damaged zip file \(.*\); get the file again',
         damaged_zip),
    Case('zip of two texts', TRAIN, f'-f two.zip {FRESH}',
         r'two\.zip: holds 2 \.txt files, a/pairs\.txt, b\.txt; unpack it and give one of them', zip_of_two),
    Case('truncated gzip', TRAIN, f'-f pairs.txt.gz {FRESH}',
         r'pairs\.txt\.gz: truncated or damaged gzip file \(.*\); get the file again',
         lambda: Path('pairs.txt.gz').write_bytes(gzip.compress(Path('pairs.txt').read_bytes())[:-20])),
    Case('more columns than three', TRAIN, f'-f bad.txt {FRESH}',
         r'bad\.txt: more than three columns in line 2; .*: remove the other columns',
         file('bad.txt', b'Go.\tVa !\tCC-BY\nRun.\tCours !\tCC-BY\t7\n')),
    Case('no name for a corpus', TRAIN, f"-f '' {FRESH}", "corpus '': no such file; give a file or 'embedded'"),
    Case('data directory without a corpus', TRAIN, f'--data-dir ckpt {FRESH}',
         'data directory ckpt: holds no fra-eng; get it with: python -m pyops.data get fra-eng --data-dir ckpt'),
    Case('no such data directory', TRAIN, f'--data-dir none {FRESH}',
         'data directory none: no such directory; make it or give another'),
    Case('nothing left to train', TRAIN, f'-f pairs.txt --hold-out 0.9 {FRESH}',
         'held-out fraction 0.9: out of range; give 0 to 0.5, .*'),
    Case('nothing held out of so few', TRAIN, f'-f pairs.txt --hold-out 1e-9 {FRESH}',
         'held-out fraction 1e-09: of the .* distinct sources of pairs.txt, it leaves .*; '
         'give a larger fraction or more pairs'),

    Case('half of too few held out', TRAIN, f'-f two.txt --min-count 1 --hold-out 0.5 {FRESH}',
         r'held-out fraction 0\.5: of the 2 distinct sources of two\.txt, it leaves .*; give more pairs',
         file('two.txt', b'Go.\tVa !\nHi.\tSalut !\n')),
    Case('the best without held-out pairs', TRAIN, f'-f pairs.txt --keep-best loss {FRESH}',
         '--keep-best loss: nothing is held out to validate with; give --hold-out 0.02'),
    Case('patience without a value', TRAIN, f'-f none.txt --patience 3 {FRESH}',
         f'--patience 3: expected --keep-best bleu or loss, the value to wait for{SEE}'),

    # the test set
    Case('test set of other columns', TRAIN, f'-f pairs.txt --exclude bad.txt {FRESH}',
         r'bad\.txt: line 2: 3 columns; expected two language codes, a source and a target, with tabs between; correct or .*',
         file('bad.txt', b'eng\tfra\tGo.\tVa !\neng\tRun.\tCours !\n')),
    Case('test set that is not UTF-8', TRAIN, f'-f pairs.txt --exclude bad.txt {FRESH}',
         r'bad\.txt: line 1: not UTF-8 text, byte 0xe9 at offset \d+; convert the file to UTF-8',
         file('bad.txt', b'eng\tfra\tCoffee.\tCaf\xe9.\n')),
    Case('empty test set', TRAIN, f'-f pairs.txt --exclude empty.txt {FRESH}', r'empty\.txt: no sentence pairs; give a file .*',
         file('empty.txt', b'')),
    Case('test set that is the corpus', TRAIN, f'-f pairs.txt --exclude pairs.txt {FRESH}',
         r'--exclude pairs\.txt: all 40 pairs of pairs\.txt have a sentence of pairs\.txt; give another .*'),
    Case('test set of a run that had none', TRAIN, resumed('--exclude other.txt'),
         '--exclude other.txt: ckpt was trained with none; leave --exclude out, or give another folder with -c'),

    # the checkpoint
    Case('truncated', TRAIN, '-e 2 -c x.safetensors',
         r'x\.safetensors: truncated checkpoint: expected \d+ bytes, got \d+; take an older one',
         edited(lambda content: content[:len(content) // 2])),
    Case('truncated in its header', TRAIN, '-e 2 -c x.safetensors',
         r'x\.safetensors: truncated checkpoint \(50 bytes, not even its header\); take an older one',
         edited(lambda content: content[:50])),
    Case('flipped bit', TRAIN, '-e 2 -c x.safetensors',
         r'x\.safetensors: damaged checkpoint: .* SHA-256 .*; take an older one', edited(flipped)),
    Case('served flipped bit', TRAIN, '-e 0 -c x.safetensors',
         r'x\.safetensors: damaged checkpoint: .* SHA-256 .*; take an older one', edited(flipped)),
    Case('foreign file', TRAIN, '-e 2 -c pairs.txt', r'pairs\.txt: not a safetensors file; expected a checkpoint that .*'),
    Case('another program', TRAIN, '-e 2 -c x.safetensors',
         r'x\.safetensors: a checkpoint of mnist, not of seq2seq; give another with -c', foreign),
    Case('another program served', TRANSLATE, '-c x.safetensors Go.',
         r'x\.safetensors: a checkpoint of mnist, not of seq2seq; give another with -c', foreign),
    Case('another corpus', TRAIN, '-e 2 -c ckpt -f other.txt',
         rf'{SAVED}: its \w+ vocabulary of \d+ words differs from the corpus, \d+ words; '
         r'give the corpus it was trained on, .*/pairs\.txt, with -f, or start from scratch in another folder'),
    Case('another share held out', TRAIN, resumed('--hold-out 0.3'),
         f'--hold-out 0.3: {SAVED} was trained with 0.0; leave --hold-out out, or give another folder with -c'),
    Case('other pairs of the same words', TRAIN, resumed(''),
         rf'{SAVED}: was trained on other pairs .*; give the corpus it was trained on, .*/pairs\.txt, with -f, or start .*',
         lambda: restate(pairs='another digest')),
    Case('another size', TRAIN, resumed('--hidden 24'),
         f'--hidden 24: {SAVED} was trained with 16; leave --hidden out, or give another folder with -c'),
    Case('another form', TRAIN, resumed('--reset-before'), f'--reset-before: {SAVED} was trained without it; .*'),
    Case('another seed', TRAIN, resumed('--seed 7'),
         f'--seed 7: {SAVED} was trained with 0; leave --seed out, or give another folder with -c'),
    Case('another trial', TRAIN, resumed('-t 1'),
         f'--tiny 1: {SAVED} was trained with 0; leave --tiny out, or give another folder with -c'),
    Case('missing checkpoint', TRAIN, '-e 2 -c ckpt/none.safetensors',
         rf'ckpt/none\.safetensors: no such checkpoint; the newest one there is {SAVED}'),
    Case('missing checkpoint, none there', TRAIN, '-e 2 -c none.safetensors',
         r'none\.safetensors: no such checkpoint; name a folder to start from scratch'),
    Case('no name for a checkpoint', TRAIN, "-e 2 -c ''", "-c/--checkpoint: expected a checkpoint or a folder, got ''"),
    Case('served without a name', TRAIN, '-e 0', '-e 0 serves a checkpoint: name it, or its folder, with -c'),
    Case('served from an empty folder', TRAIN, '-e 0 -c empty',
         'empty: has no checkpoint; train first, or name another checkpoint',
         lambda: os.mkdir('empty')),
    Case('served from nowhere', TRANSLATE, '-c none Go.', 'none: no such folder; train first, or name .*'),
    Case('folder below a file', TRAIN, '-e 2 -c pairs.txt/ckpt -f pairs.txt',
         r'pairs\.txt/ckpt: cannot save checkpoints there \(.*\); name a folder that can be written with -c'),
    Case('folder where nobody may write', TRAIN, '-e 2 -c /proc/ckpt -f pairs.txt',
         r'/proc/ckpt: cannot save checkpoints there \(.*\); name a folder that can be written with -c'),
    Case('metrics that are a folder', TRAIN, resumed(''),
         r'ckpt/metrics\.jsonl: cannot write the metrics \(.*\); expected a file that can be written: move it away or .*',
         lambda: (os.unlink('ckpt/metrics.jsonl'), os.mkdir('ckpt/metrics.jsonl'))),
    Case('held-out test without any', TRANSLATE, '-c ckpt --test 3 -f pairs.txt',
         'ckpt: nothing was held out of its training; train with --hold-out 0.1 to have a test'),

    # flags
    Case('epochs', TRAIN, '-e -1', rf'-e/--epochs: expected a whole number >= 0, got -1{SEE}'),
    Case('rate of nothing', TRAIN, '-l 0', f'-l/--lr: expected a number from 1e-37 to 1e38, got 0{SEE}'),
    Case('rate that is none', TRAIN, '-l nan', f'-l/--lr: expected a number from 1e-37 to 1e38, got nan{SEE}'),
    Case('rate beyond float32', TRAIN, '-l 1e300', f'-l/--lr: expected a number from 1e-37 to 1e38, got 1e300{SEE}'),
    Case('rate that float32 calls zero', TRAIN, '-l 1e-300', f'-l/--lr: expected a number from .*, got 1e-300{SEE}'),
    Case('batch', TRAIN, '-b 0', f'-b/--batch-size: expected a whole number >= 1, got 0{SEE}'),
    Case('dropout', TRAIN, '-d 1', f'-d/--dropout: expected a number >= 0 and < 1, got 1{SEE}'),
    Case('no threads', TRAIN, '--threads 0', f'--threads: expected a whole number from 1 to 1024, got 0{SEE}'),
    Case('too many threads', TRANSLATE, '-c ckpt --threads 1025 Go.', f'--threads: expected .* to 1024, got 1025{SEE}'),
    Case('hold-out of all', TRAIN, '--hold-out 1', f'--hold-out: expected a number >= 0 and < 1, got 1{SEE}'),
    Case('layers', TRAIN, '--layers 99999999999999', f'--layers: expected a whole number from 1 to 64, got 9+{SEE}'),
    Case('steps', TRAIN, '--num-steps 1000000', f'--num-steps: expected a whole number from 1 to 1000, got 1000000{SEE}'),
    Case('a model larger than memory', TRAIN, '-f pairs.txt -c new --hidden 65536 --layers 64',
         r'the model needs [\d.]+ GiB of memory and this machine has [\d.]+; give a smaller --embedding, .*'),
    Case('unknown flag', TRAIN, '--epoch-count 5',
         r'unrecognized arguments: --epoch-count 5; did you mean --epochs\? See --help'),
    Case('unknown flag of translate', TRANSLATE, '-c ckpt --width 5', f'unrecognized arguments: --width.*{SEE}'),
    Case('translate without a checkpoint', TRANSLATE, 'Go.',
         f'the following arguments are required: -c/--checkpoint{SEE}'),
    Case('translate with none', TRANSLATE, "-c '' Go.", "-c/--checkpoint: expected a checkpoint or a folder, got ''"),
    Case('test of a sentence', TRANSLATE, "-c ckpt --test 5 'Go now.'",
         "--test 5: expected no sentence, got 'Go now\\.'; leave one of them out" + SEE),
    Case('test of nothing', TRANSLATE, '-c ckpt --test 0', f'--test: expected a whole number >= 1, got 0{SEE}'),
    Case('no data set', DATA, 'get', f'the following arguments are required: name{SEE}'),
    Case('unknown data set', DATA, 'get deu-eng',
         "data set deu-eng: no such data set; give one of fra-eng.*; 'python -m pyops.data list' describes them"),
    Case('unknown command', DATA, 'fetch', f"COMMAND: invalid choice: 'fetch' .*{SEE}"),
    Case('list of no directory', DATA, 'list --data-dir none',
         'data directory none: no such directory; make it or give another'),
    Case('data below a file', DATA, 'get fra-eng --data-dir pairs.txt/x',
         r'pairs\.txt/x: cannot be written: .*; give another directory'),
]


def contents(folder):
    """Return the bytes of all files below a folder by name, without the logs, to which training appends."""
    return {str(path): path.read_bytes() for path in sorted(folder.rglob('*'))
            if path.is_file() and path.name != 'metrics.jsonl' and not path.name.startswith('steps_')}


def leave(program, arguments, capsys):
    """Run a program's main as __main__ does -> exit status, what it wrote to stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as left, exits_cleanly(program):
        PROGRAMS[program](arguments)
    return left.value.code, capsys.readouterr().err


def assert_one_line(program, error, want):
    assert error.count('\n') == 1 and error.endswith('\n'), error
    match = re.fullmatch(rf'(python -m )?{re.escape(program)}( get| list)?: error: (.*)\n', error)
    assert match, error
    assert re.fullmatch(want, match[3]), f'want {want}\ngot  {match[3]}'


@pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
def test_bad_input_ends_with_one_line_and_loses_nothing(case, place, capsys):
    if case.prepare:
        case.prepare()
    before = contents(place)
    status, error = leave(case.program, shlex.split(case.arguments), capsys)
    assert status == 2
    assert_one_line(case.program, error, case.want)
    assert contents(place) == before


def test_a_case_has_a_name_of_its_own():
    assert len({case.name for case in CASES}) == len(CASES) and SAVED.endswith(checkpoint.SUFFIX)


# ---- training that goes wrong on the way ---------------------------------------------------------------------------

def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_last_checkpoint(place, capsys):
    before = contents(place)
    arguments = ['-e', '9', '-c', 'ckpt', '-f', 'pairs.txt', '-l', '1e38', '--save-every', '1']
    status, error = leave(TRAIN, arguments, capsys)
    assert status == 2
    assert_one_line(TRAIN, error, r'((the loss|the norm of the gradient) is (nan|inf) at \[\d+/40\] after \d epochs|'
                                  r'after \d epochs \d+ of \d+ tensors .*); lower the learning rate with -l.*; '
                                  rf'the last complete checkpoint is {SAVED}')
    assert contents(place) == before


@pytest.mark.parametrize('rate', ['30', '1e30'])
def test_a_loss_that_explodes_ends_the_run_and_keeps_the_last_checkpoint(rate, place, capsys):
    before = contents(place)
    arguments = ['-e', '90', '-c', 'ckpt', '-f', 'pairs.txt', '-l', rate, '--save-every', '1']
    status, error = leave(TRAIN, arguments, capsys)
    assert status == 2
    assert_one_line(TRAIN, error, r'the loss has exploded to [\d.e+]+ \(median of the last \d+ steps; an untrained model has '
                                  rf'[\d.]+\) at \[0/40\] after \d epochs; lower the learning rate with -l; '
                                  rf'the last complete checkpoint is {SAVED}')
    assert contents(place) == before


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    params = Parameters({'w': Spec((3,), zeros())})
    save = fit.Saver(checkpoint.fresh(tmp_path), params, Adam(params, 0.1), fit.Run(0, 1), {})
    whole = save()
    for value in (np.nan, np.inf):
        params['w'].value[1] = value
        with pytest.raises(UserError, match='1 of 4 tensors are no longer finite, such as parameter/w, .* -l; '
                                            f'.* checkpoint is {whole}'):
            save()
    assert list(map(str, tmp_path.iterdir())) == [whole]


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A folder with room for a few checkpoints: a tmpfs where one can be mounted, else a disk that says it is full."""
    folder, room = tmp_path / 'small', 1_600_000
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        if sys.platform == 'linux' and os.geteuid() == 0 and not subprocess.run(
                ['mount', '-t', 'tmpfs', '-o', f'size={room}', 'tmpfs', folder], capture_output=True).returncode:
            stack.callback(subprocess.run, ['umount', folder], check=True)
        else:
            write = checkpoint.write_atomically

            def limited(path, content, fsync):
                used = sum(file.stat().st_size for file in folder.iterdir())
                if Path(path).parent == folder and used + len(content) > room:
                    raise OSError(errno.ENOSPC, 'No space left on device')
                write(path, content, fsync=fsync)
            monkeypatch.setattr(checkpoint, 'write_atomically', limited)
        yield folder


def test_a_disk_that_fills_up_loses_no_epoch(place, small_disk, tmp_path, monkeypatch, capsys):
    rescue = tmp_path / 'rescue'
    rescue.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(rescue))
    flags = ['-f', 'pairs.txt', '--save-every', '1', *SIZES]
    status, error = leave(TRAIN, ['-e', '500', '-c', str(small_disk), *flags], capsys)
    (rescued,) = rescue.iterdir()
    assert status == 2
    assert_one_line(TRAIN, error, rf'{small_disk}/checkpoint_\w+\.safetensors: cannot save the checkpoint '
                                  r'\(No space left on device\): it needs \d+ bytes and \d+ are free; make room or .*; '
                                  rf'it was saved as {rescued} instead; resume with -c {rescued}')
    saved = sorted(checkpoint.load(path)[1]['run']['epoch'] for path in small_disk.glob('*.safetensors'))
    assert saved == list(range(1, len(saved) + 1)) and len(saved) > 1
    assert not list(small_disk.glob('.*'))                  # no half file
    assert checkpoint.load(rescued)[1]['run']['epoch'] == len(saved) + 1
    train.main(['-e', str(len(saved) + 2), '-c', str(rescued), *flags])
    assert len(list(rescue.glob('*.safetensors'))) == 2


def test_a_disk_without_room_for_a_checkpoint_is_noticed_before_training(place, monkeypatch, capsys):
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: shutil._ntuple_diskusage(1000, 900, 100))
    status, error = leave(TRAIN, ['-e', '1', '-f', 'pairs.txt', '-c', 'new', *SIZES], capsys)
    assert status == 2 and os.listdir('new') == []
    assert_one_line(TRAIN, error, r'new: a checkpoint needs \d+ bytes and 100 are free; make room or name another .*')


def test_exhausted_memory_is_one_line(capsys):
    with pytest.raises(SystemExit) as left, exits_cleanly('program'):
        raise MemoryError('Unable to allocate 14.0 TiB')
    assert left.value.code == 2
    assert_one_line('program', capsys.readouterr().err, r'not enough memory \(Unable to allocate 14.0 TiB\); give .*')


def test_two_runs_do_not_share_a_folder(place, capsys):
    before = contents(place)
    log = Path('ckpt/metrics.jsonl').read_bytes()
    arguments = ['-e', '2', '-c', 'ckpt', '-f', 'pairs.txt', '--save-every', '1']
    with checkpoint.claim('ckpt'):                          # as the other run does
        status, error = leave(TRAIN, arguments, capsys)
    assert status == 2
    assert_one_line(TRAIN, error, 'ckpt: another run is training into this folder; wait until it is done, or name .*')
    assert contents(place) == before and Path('ckpt/metrics.jsonl').read_bytes() == log
    train.main(arguments)                                   # it has let go
    assert len(list(Path('ckpt').glob('*.safetensors'))) == 2


def test_a_metrics_file_of_any_bytes_ends_no_training(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    odd = [b'[' * 200_000, b'9' * 9000, b'\0\xff', b'{"epoch": 1e400}', b'{"epoch": []}', b'']
    path.write_bytes(b'{"epoch": 1}\n' + b'\n'.join(odd))
    before = path.read_bytes()
    with Metrics(tmp_path, 1) as metrics:
        metrics.write(epoch=2)
    assert path.read_bytes() == b'{"epoch": 1}\n{"epoch": 2}\n'
    (kept,) = tmp_path.glob('metrics_*.jsonl')
    assert kept.read_bytes() == before


def test_another_batch_size_in_the_middle_of_an_epoch(place, capsys):
    """What is left of the epoch is seen once, in batches of the new size."""
    kept, state = checkpoint.load(SAVED)
    state['run'] |= {'epoch': 0, 'position': 16, 'loss_sum': 50.0, 'weight_sum': 10.0}
    checkpoint.save(SAVED, kept, state)
    train.main(['-e', '1', '-c', 'ckpt', '-f', 'pairs.txt', '-b', '7', '-l', '1e-4', '-d', '0.5'])
    newest, state = checkpoint.load(checkpoint.find('ckpt', serving=True).path)
    assert state['run']['epoch'] == 1 and state['run']['position'] == 0 and state['run']['batch_size'] == 7
    assert newest['step'][0] - kept['step'][0] == 4         # 24 pairs are left: 7 + 7 + 7 + 3


def test_a_folder_of_damaged_checkpoints_is_told_of_and_trained_into(place, capsys):
    Path(SAVED).write_bytes(Path(SAVED).read_bytes()[:-1])
    capsys.readouterr()
    train.main(['-e', '1', '-c', 'ckpt', '-f', 'pairs.txt', *SIZES])
    out, error = capsys.readouterr()
    assert 'ckpt : no checkpoint, starting from scratch' in out
    assert error.startswith(f'warning: passed over {SAVED}: truncated checkpoint') and error.count('\n') == 1


def test_a_damaged_newest_checkpoint_is_passed_over_when_a_run_goes_on_and_when_it_is_served(place, capsys):
    train.main(resumed('').split())
    (newest,) = Path('ckpt').glob('*_2.safetensors')
    newest.write_bytes(flipped(newest.read_bytes()))
    for program, arguments in ((TRAIN, resumed('')), (TRANSLATE, '-c ckpt Go.')):
        capsys.readouterr()
        PROGRAMS[program](arguments.split())
        out, error = capsys.readouterr()
        assert program == TRANSLATE or f'loading from checkpoint : {SAVED}\n' in out
        assert error.startswith(f'warning: passed over {newest}: damaged checkpoint: ') and error.count('\n') == 1
        for later in set(Path('ckpt').glob('*_2.safetensors')) - {newest}:
            later.unlink()


def test_a_renamed_checkpoint_is_resumed(place, capsys):
    os.rename(SAVED, 'ckpt/best.safetensors')
    train.main(resumed('').split())
    assert 'loading from checkpoint : ckpt/best.safetensors\n' in capsys.readouterr().out
    newest = checkpoint.find('ckpt')
    assert newest.path.endswith('_2.safetensors') and newest.state['run']['epoch'] == 2


def test_runs_without_a_folder_keep_each_others_metrics(place, capsys):
    """Both go to ./checkpoints; then the first of them goes on."""
    flags = ['-f', 'pairs.txt', *SIZES]

    def metrics(pattern):
        return [[(line['run'], line['epoch']) for line in map(json.loads, path.read_text().splitlines())]
                for path in sorted(Path('checkpoints').glob(pattern))]
    runs = []
    for epochs in ('2', '1'):
        train.main(['-e', epochs, *flags])
        runs.append(checkpoint.find('checkpoints', serving=True))
    first, second = (found.state['run']['id'] for found in runs)
    of_first, of_second = [(first, 1), (first, 2)], [(second, 1)]
    assert first != second and metrics('metrics_*') == [of_first] and metrics('metrics.jsonl') == [of_second]
    assert capsys.readouterr().out.count('that this run does not continue') == 1
    train.main(['-e', '3', '-c', runs[0].path, *flags])
    assert metrics('metrics_*') == [of_first, of_second] and metrics('metrics.jsonl') == [[(first, 3)]]


def test_a_trial_is_resumed_and_tested_as_a_trial(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train.main(['-e', '1', '-f', 'embedded', '-t', '1', '-c', 'ckpt', *SIZES])
    train.main(['-e', '2', '-f', 'embedded', '-c', 'ckpt'])
    translate.main(['-c', 'ckpt', '-f', 'embedded', '--test', '2'])
    assert 'of 2 unseen sentences are right' in capsys.readouterr().out


# ---- real processes ------------------------------------------------------------------------------------------------

def start(*arguments, tree=ROOT, **kwargs):
    """A Popen of `python ARGUMENTS` that finds the packages in `tree`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('PYOPS_', 'PYTHON'))}
    environment |= {'PYTHONPATH': str(tree), 'PYOPS_CACHE': os.environ['PYOPS_CACHE']} | kwargs.pop('environment', {})
    streams = {'stdin': subprocess.DEVNULL, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE} | kwargs
    return subprocess.Popen([sys.executable, *map(str, arguments)], env=environment, **streams)


def outcome(process):
    """-> exit status, standard output, standard error of a process that ends."""
    out, error = process.communicate(timeout=480)
    return process.returncode, (out or b'').decode(errors='surrogateescape'), (error or b'').decode()


def compiler():
    found = next(filter(None, map(shutil.which, ('gcc', 'clang', 'cc'))), None)
    return found or pytest.skip('no C compiler to build the library that this test needs')


def build_library(path, abi_version, isa='generic'):
    """A library that answers four questions and has no kernels."""
    source = path.with_suffix('.c')
    source.write_text(f'int pyops_abi_version(void) {{ return {abi_version}; }}\n'
                      f'const char *pyops_isa(void) {{ return "{isa}"; }}\n'
                      f'const char *pyops_bf16_isa(void) {{ return "{isa}"; }}\n'
                      f'const char *pyops_int8_isa(void) {{ return "{isa}"; }}\n')
    subprocess.run([compiler(), '-shared', '-fPIC', '-o', path, source], check=True)
    return path


SERVE = ['-m', 'seq2seq.train', '-e', '0', '-c', 'ckpt']


def test_bad_input_of_a_real_process(place):
    status, out, error = outcome(start('-m', 'seq2seq.train', '-e', '1', '-f', 'none.txt'))
    assert status == 2 and out.startswith('OMP_THREADS: ')
    assert_one_line(TRAIN, error, r'none\.txt: no such file; .*')
    status, out, error = outcome(start('-m', 'seq2seq.translate', '-c', 'none', 'Go.'))
    assert status == 2
    assert_one_line(TRANSLATE, error, 'none: no such folder; .*')


def test_an_unbuilt_library(place, tmp_path):
    tree = tmp_path / 'tree'
    for package in ('pyops', 'seq2seq'):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns('*.so', 'pyops.h', '__pycache__'))
    status, _, error = outcome(start(*SERVE, tree=tree))
    assert status == 2
    assert_one_line(TRAIN, error, rf'{tree}/pyops/libpyops\.so: the kernel library is not built; '
                                  r'run `make` in the source tree, or `pip install \.`')
    assert outcome(start('-m', 'seq2seq.train', '--help', tree=tree))[0] == 0


def test_a_library_of_another_version(place, tmp_path):
    library = build_library(tmp_path / 'old.so', abi_version=77)
    status, _, error = outcome(start(*SERVE, environment={'PYOPS_LIBRARY': str(library)}))
    assert status == 2
    assert_one_line(TRAIN, error, rf'{library}: ABI version 77, this Python side needs \d+; run `make` .*')


def test_a_file_that_is_no_library(place):
    status, _, error = outcome(start(*SERVE, environment={'PYOPS_LIBRARY': 'pairs.txt'}))
    assert status == 2
    assert_one_line(TRAIN, error, r'pairs\.txt: cannot be loaded \(.*\); run `make` .*')


def test_an_instruction_set_that_does_not_exist(place):
    status, _, error = outcome(start(*SERVE, environment={'PYOPS_ISA': 'nonsense'}))
    assert status == 2
    assert_one_line(TRAIN, error, r'PYOPS_ISA=nonsense: this CPU cannot run it or it is unknown \(generic, avx2, .*\); '
                                  'unset it to let the library choose')


def test_an_instruction_set_that_this_cpu_lacks(place, tmp_path):
    from pyops.backend.library import ABI_VERSION
    library = build_library(tmp_path / 'plain.so', ABI_VERSION, isa='generic')
    environment = {'PYOPS_LIBRARY': str(library), 'PYOPS_ISA': 'avx512'}
    status, _, error = outcome(start(*SERVE, environment=environment))
    assert status == 2
    assert_one_line(TRAIN, error, 'PYOPS_ISA=avx512: this CPU cannot run it or it is unknown .*; unset it .*')


@pytest.mark.parametrize('arguments', [
    f'-m seq2seq.train {FRESH} -f pairs.txt', '-m seq2seq.translate -c ckpt Go.',
    '-m transformer.train -e 1 -f pairs.txt -c new', '-m mnist.train --embedded -e 1',
    '-m mnist.resnet --embedded -e 1', '-m pyops gradcheck relu'])
def test_a_backend_that_does_not_exist(place, arguments):
    before = contents(place)
    status, _, error = outcome(start(*arguments.split(), environment={'PYOPS_BACKEND': 'cuda'}))
    assert status == 2 and contents(place) == before
    assert_one_line(arguments.split()[1], error,
                    'PYOPS_BACKEND=cuda: no such backend; set it to cpu, numpy or gpu, or unset it')


@pytest.mark.parametrize('program, arguments', [
    (TRAIN, f'{FRESH} -f pairs.txt'), (TRANSLATE, '-c ckpt Go.'), ('mnist.train', '--embedded -e 0 --quiet'),
    ('mnist.resnet', '--embedded -e 0 --quiet')])
def test_programs_obey_the_backend_of_the_environment_unless_a_flag_says_otherwise(place, program, arguments):
    wants = {'gpu': r'PYOPS_BACKEND=gpu: /nowhere\.so: the CUDA library is not built; .*',
             'numpy': 'PYOPS_BACKEND=numpy: training and translation need the kernels .*; set it to cpu or gpu, or unset it'}
    for name, want in wants.items():
        environment = {'PYOPS_BACKEND': name, 'PYOPS_CUDA_LIBRARY': '/nowhere.so'}
        status, out, error = outcome(start('-m', program, *arguments.split(), environment=environment))
        assert (status, out) == (2, '')
        assert_one_line(program, error, want)
        status, out, error = outcome(start('-m', program, '-g', '0', *arguments.split(), environment=environment))
        assert (status, error) == (0, '') and out
        shutil.rmtree('new', ignore_errors=True)


RUN_WITHOUT = """
import importlib.abc, runpy, sys
missing, program, *sys.argv[1:] = sys.argv[1:]
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == missing:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
sys.meta_path.insert(0, Missing())
runpy.run_module(program, run_name='__main__', alter_sys=True)
"""


@pytest.mark.parametrize('missing, program, arguments', [
    ('numpy', TRAIN, FRESH + ' -f pairs.txt'), ('numpy', TRANSLATE, '-c ckpt Go.'),
    ('cffi', TRAIN, FRESH + ' -f pairs.txt'), ('_cffi_backend', TRAIN, '-e 0 -c ckpt'),
    ('safetensors', TRAIN, FRESH + ' -f pairs.txt'),
    ('tqdm', DATA, 'list')])
def test_a_package_that_is_not_installed(place, missing, program, arguments):
    status, out, error = outcome(start('-c', RUN_WITHOUT, missing, program, *shlex.split(arguments),
                                       environment={'PYOPS_CACHE': '0'}))       # where a header was parsed by an earlier run
    name = missing.strip('_').removesuffix('_backend')
    assert status == 2
    assert_one_line(program, error, f'the Python package {name} is not installed; '
                                    f'install it with: .*python.* -m pip install {name}')
    assert 'epoch 1 ' not in out, 'it showed after an epoch of training'


def test_a_module_that_is_missing_otherwise_is_a_bug_and_keeps_its_traceback(place):
    status, _, error = outcome(start('-c', RUN_WITHOUT, 'pyops.text.split', TRAIN, '-e', '1', '-f', 'pairs.txt'))
    assert status == 1 and 'Traceback' in error


def test_every_dependency_of_the_package_is_known_by_name():
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    names = {re.match(r'[\w-]+', dependency)[0] for dependency in project['dependencies']}
    assert names <= set(_DEPENDENCIES.values())


def test_ctrl_c_while_loading_leaves_quietly(place):
    os.mkfifo('slow.txt')
    process = start('-m', 'seq2seq.train', '-e', '1', '-f', 'slow.txt', '-c', 'new')
    while True:                                             # until the program opens the corpus
        try:
            writer = os.open('slow.txt', os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:
            assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGINT)
    os.close(writer)                                        # ends a read that the signal came just too early to break
    status, _, error = outcome(process)
    assert (status, error) == (130, '')


def test_a_reader_that_goes_away_ends_a_program_quietly(place):
    reader, writer = os.pipe()
    os.close(reader)
    process = start('-m', 'seq2seq.translate', '-c', 'ckpt', 'Go.', stdout=writer)
    os.close(writer)
    assert outcome(process)[::2] == (141, '')


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='this system has no /dev/full')
@pytest.mark.parametrize('unbuffered', ['', '1'])
def test_an_output_that_is_full(place, unbuffered):
    with open('/dev/full', 'wb') as full:
        process = start('-m', 'seq2seq.train', '-e', '2', '-c', 'ckpt', '-f', 'pairs.txt', stdout=full,
                        environment={'PYTHONUNBUFFERED': unbuffered})
    status, _, error = outcome(process)
    assert status == 2
    assert_one_line(TRAIN, error, r'standard output: cannot be written \(No space left on device\); free some disk space or .*')
    checkpoint.load(SAVED)


def test_closed_streams(place):
    """`>&- 2>&- <&-`, as some supervisors start a program."""
    command = [sys.executable, '-m', 'seq2seq.train', '-e', '2', '-c', 'ckpt', '-f', 'pairs.txt', '--threads', '1']
    environment = os.environ | {'PYTHONPATH': str(ROOT)}
    done = subprocess.run(f'{shlex.join(command)} <&- >&- 2>&-', shell=True, env=environment)
    assert done.returncode == 0 and len(list(Path('ckpt').glob('*_2.safetensors'))) == 1


def test_an_encoding_without_accents_prints_a_question_mark(place):
    process = start('-m', 'seq2seq.translate', '-c', 'ckpt', '--json', 'Où ça ?', environment={'PYTHONIOENCODING': 'ascii'})
    status, out, error = outcome(process)
    assert (status, error) == (0, '') and json.loads(out)['source'] == 'O? ?a ?'


def test_a_name_that_is_no_text(place):
    """A folder whose name is not UTF-8 serves and resumes like any other."""
    name = b'caf\xe9'
    try:
        os.rename(b'ckpt', name)
    except OSError:
        pytest.skip('this file system has no such names')
    for arguments in ('-m seq2seq.train -e 2 -f pairs.txt -c', '-m seq2seq.translate Go. -c'):
        process = start(*arguments.split(), os.fsdecode(name), environment={'PYTHONIOENCODING': 'utf-8'})
        status, out, error = outcome(process)
        assert (status, error) == (0, '')
        assert 'translate' in arguments or f'loading from checkpoint : {os.fsdecode(name)}/checkpoint_' in out
    assert len([entry for entry in os.listdir(name) if entry.endswith(b'.safetensors')]) == 2


def test_odd_lines_are_answered(place):
    process = start(*SERVE, stdin=subprocess.PIPE)
    lines = [b'a\0b \0', b'w' * 1_000_000, b'word ' * 200_000, b'\xff', b'\x1b[2J', b'Go.']
    out, error = process.communicate(b'\n'.join(lines) + b'\n', timeout=480)
    assert process.returncode == 0 and error.count(b'\n') == 2
    assert b'warning: line 3: too long, only the first 9 of 200001 tokens, ' in error
    assert b'warning: standard input: line 4: not UTF-8 (byte 0xff at position 1); its translation is blank\n' in error
    answers = out.split(b'\n')
    assert len(answers) == 7 and [bool(answer) for answer in answers] == [True, True, True, False, True, True, False]


# ---- no compiler ---------------------------------------------------------------------------------------------------

TOOLS = ('make', 'sh', 'bash', 'mkdir', 'uname', 'cp', 'mv', 'rm', 'cat', 'grep', 'awk', 'touch', 'test', 'dirname', 'env')


@pytest.fixture
def bare(tmp_path):
    """A copy of the sources of the library, and a PATH with make and the tools of a shell but no compiler."""
    if not shutil.which('make'):
        pytest.skip('make is not installed')
    tools = tmp_path / 'tools'
    tools.mkdir()
    for tool in filter(shutil.which, TOOLS):
        (tools / tool).symlink_to(shutil.which(tool))
    tree = tmp_path / 'tree'
    tree.mkdir()
    packages = [path.parent.name for path in ROOT.glob('*/__init__.py')]
    for name in ('Makefile', 'setup.py', 'pyproject.toml', 'LICENSE', 'csrc', *packages):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    (tree / 'README.md').write_text('pyops\n')
    subprocess.run(['make', 'clean'], cwd=tree, capture_output=True, check=True)
    return tree, environment_without('CC', PATH=str(tools))


@pytest.mark.parametrize('arguments, named', [([], 'cc'), (['CC=nonsense'], 'nonsense'),
                                              (['CC=no such -O9'], 'no such -O9')])
def test_make_without_a_compiler(bare, arguments, named):
    tree, environment = bare
    done = subprocess.run(['make', *arguments], cwd=tree, env=environment, capture_output=True, text=True)
    line, makes_own = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == ''
    assert re.fullmatch(rf"make: error: no C compiler '{named}': install gcc, .*, or name one with make CC=.*", line)
    assert makes_own.startswith('make: ***')
    assert not (tree / 'pyops/libpyops.so').exists()


def test_make_with_a_compiler_that_has_no_openmp(bare):
    tree, environment = bare
    false = tree / 'false'
    false.write_text('#!/bin/sh\nexit 1\n')
    false.chmod(0o755)
    done = subprocess.run(['make', f'CC={false}'], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"make: error: '{false}' cannot build an OpenMP program: install its OpenMP library ")
    assert done.stderr.count('\n') == 2


def test_pip_waits_for_the_library(bare):
    """pip runs a make of its own in the same folder, so at the same time both would write the same objects."""
    tree, environment = bare
    compiler = tree / 'compiler'
    compiler.write_text('#!/bin/sh\nfor word; do if [ "$last" = -o ]; then : > "$word"; fi; last=$word; done\n')
    python = tree / 'python'        # makes an environment with itself as its Python; as pip, it expects the library
    python.write_text('#!/bin/sh\ncase "$*" in\n*venv*) mkdir -p .venv/bin && cp "$0" .venv/bin/python;;\n'
                      '*pip*) test -e pyops/libpyops.so;;\nesac\n')
    for program in (compiler, python):
        program.chmod(0o755)
    done = subprocess.run(['make', '-j2', f'CC={compiler}', f'PYTHON={python}', 'cpu', '.venv/ready'],
                          cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and (tree / '.venv/ready').exists(), done.stderr


@pytest.mark.parametrize('has_make', [True, False])
def test_pip_install_without_a_compiler(bare, tmp_path, has_make):
    pytest.importorskip('setuptools', '77', reason='setuptools is not installed: pip install setuptools')
    tree, environment = bare
    if not has_make:
        (Path(environment['PATH']) / 'make').unlink()
    target = tmp_path / 'target'
    done = subprocess.run([sys.executable, '-m', 'pip', 'install', '--no-build-isolation', '--no-deps', '--no-index',
                           '--disable-pip-version-check', '--target', target, '.'],
                          cwd=tree, env=environment, capture_output=True, text=True)
    if 'No module named pip' in done.stderr:
        pytest.skip('pip is not installed')
    output = done.stdout + done.stderr
    assert done.returncode != 0 and 'Traceback' not in output, output
    for line in ("make: error: no C compiler 'cc'", 'pyops: error: the kernel library was not built; the line above ') \
            if has_make else ('pyops: error: no `make`: install it',):
        assert line in output, output
    assert not target.exists() or not list(target.iterdir())
