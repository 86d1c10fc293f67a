"""Checkpoints: bit-exact round trips, every way a file can be bad, full disks, and kills in the middle of a save."""
import datetime
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from conftest import ROOT

from pyops import checkpoint
from pyops.errors import UserError
from pyops.files import open_atomically

NOON = datetime.datetime(2025, 3, 22, 12, 0, 0)
STATE = {'epoch': 3, 'vocabulary': ['<pad>', 'été', '"quoted"\n', '\ud800'], 'lr': 0.1 + 0.2, 'nested': {'seed': 2**63}}


def some_tensors():
    rng = np.random.default_rng(1)
    return {'weight': rng.standard_normal((3, 5)).astype(np.float32), 'moment': rng.standard_normal(7),
            'step': np.array(12, np.int64), 'empty': np.zeros((0, 4), np.float32), 'mask': np.array([True, False])}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for key in want:
        assert got[key].dtype == want[key].dtype and got[key].shape == want[key].shape, key
        assert got[key].tobytes() == want[key].tobytes(), key


def error_of(function, *args, **kwargs):
    with pytest.raises(UserError) as raised:
        function(*args, **kwargs)
    assert '\n' not in str(raised.value)
    return str(raised.value)


def run_child(code, *args, **kwargs):
    return subprocess.run([sys.executable, '-c', code, *map(str, args)], cwd=ROOT, capture_output=True, text=True,
                          **kwargs)


# ---- one file ------------------------------------------------------------------------------------------------------

def test_round_trip_is_bit_exact(tmp_path):
    path, tensors = tmp_path / 'a.safetensors', some_tensors()
    checkpoint.save(path, tensors, STATE)
    got, state = checkpoint.load(path)
    assert_same(got, tensors)
    assert state == STATE
    assert os.listdir(tmp_path) == ['a.safetensors']


def test_round_trip_of_odd_values(tmp_path):
    bits = np.array([0x80000000, 0x7fc00001, 0x7fa00000, 0xff800000, 0x00000001], np.uint32)    # -0, NaNs, -inf, 1e-45
    checkpoint.save(tmp_path / 'a.safetensors', {'x': bits.view(np.float32)}, {})
    got, _ = checkpoint.load(tmp_path / 'a.safetensors')
    assert (got['x'].view(np.uint32) == bits).all()


@pytest.mark.parametrize('view', [lambda a: a.T, lambda a: a[:, ::2], lambda a: a[::-1], lambda a: a[1:, 1:3],
                                  lambda a: np.broadcast_to(a[0], (4, 6)), lambda a: a.astype('>f4')])
def test_round_trip_of_views(tmp_path, view):
    array = view(np.arange(24, dtype=np.float32).reshape(4, 6))
    checkpoint.save(tmp_path / 'a.safetensors', {'x': array}, {})
    got, _ = checkpoint.load(tmp_path / 'a.safetensors')
    assert got['x'].shape == array.shape and (got['x'] == array).all()
    got['x'][...] = 0                                       # writable: training goes on in it


def test_the_file_is_plain_safetensors(tmp_path):
    from safetensors.numpy import load_file
    checkpoint.save(tmp_path / 'a.safetensors', some_tensors(), STATE)
    assert_same(load_file(tmp_path / 'a.safetensors'), some_tensors())


def test_state_that_json_cannot_say_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path / 'a.safetensors', {}, {'epoch': object()})
    assert os.listdir(tmp_path) == []


def test_save_replaces_a_file_whole(tmp_path):
    path = tmp_path / 'a.safetensors'
    checkpoint.save(path, {'x': np.zeros(1000)}, {'epoch': 1})
    checkpoint.save(path, {'x': np.ones(10)}, {'epoch': 2})
    got, state = checkpoint.load(path)
    assert state == {'epoch': 2} and (got['x'] == np.ones(10)).all()


def test_truncated_at_every_length(tmp_path):
    path = tmp_path / 'a.safetensors'
    checkpoint.save(path, {'x': np.arange(8, dtype=np.float32)}, {'epoch': 1})
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        message = error_of(checkpoint.load, path)
        assert 'truncated' in message and str(path) in message, (length, message)
    path.write_bytes(data + b'\0')
    assert 'damaged' in error_of(checkpoint.load, path)


def test_one_flipped_bit_is_noticed_wherever_it_is(tmp_path):
    path, rng = tmp_path / 'a.safetensors', random.Random(0)
    checkpoint.save(path, {'x': np.arange(8, dtype=np.float32), 'y': np.zeros((2, 1), np.int32)}, {'epoch': 1})
    data = path.read_bytes()
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << rng.randrange(8)
        path.write_bytes(flipped)
        error_of(checkpoint.load, path)
    flipped = bytearray(data)
    flipped[-1] ^= 64
    path.write_bytes(flipped)
    assert 'damaged' in error_of(checkpoint.load, path) and 'SHA-256' in error_of(checkpoint.load, path)


def foreign_files():
    from safetensors.numpy import save
    deep = b'[' * 100_000
    return {'text': (b'not a checkpoint at all, just text', 'not a safetensors file'),
            'zeros': (b'\0' * 100, 'not a safetensors file'),
            'zip': (b'PK\x03\x04' + bytes(range(256)), 'not a safetensors file'),
            'list': (struct.pack('<Q', 2) + b'[]', 'not a safetensors file'),
            'deep': (struct.pack('<Q', len(deep)) + deep, 'not a safetensors file'),
            'metadata': (struct.pack('<Q', 20) + b'{"__metadata__":[1]}', 'not a safetensors file'),
            'other': (save({'x': np.zeros(3)}), 'not a pyops checkpoint'),
            'torch': (save({'x': np.zeros(3)}, metadata={'format': 'pt'}), 'not a pyops checkpoint'),
            'no state': (save({}, metadata={'format': checkpoint.FORMAT, 'version': '1'}), 'damaged'),
            'no version': (save({}, metadata={'format': checkpoint.FORMAT, 'state': '{}'}), 'damaged'),
            'no checksum': (save({}, metadata={'format': checkpoint.FORMAT, 'version': '1', 'state': '{}'}), 'SHA-256'),
            'newer': (save({}, metadata={'format': checkpoint.FORMAT, 'version': '3', 'state': '{}'}), 'version 3')}


def signed(state, text):
    """Return a checkpoint without tensors whose state is this text of JSON, and whose SHA-256 belongs to `text`."""
    header = (f'{{"__metadata__": {{"format": "{checkpoint.FORMAT}", "version": "2", "state": {state}, "name": "", '
              f'"sha256": "{hashlib.sha256(text.encode()).hexdigest()}"}}}}').encode()
    return struct.pack('<Q', len(header)) + header


@pytest.mark.parametrize('mapped', [False, True])
@pytest.mark.parametrize('state, text, want', [
    ('[1]', '', 'not a safetensors file'), ('null', '', 'not a safetensors file'), (r'"\ud800"', '', 'damaged checkpoint'),
    ('"{"', '{', 'its state is no JSON'), (f'"{"[" * 100_000}"', '[' * 100_000, 'its state is no JSON')],
    ids=['list', 'null', 'surrogate', 'cut', 'deep'])
def test_a_state_that_is_no_text_or_no_json_is_damage(tmp_path, state, text, want, mapped):
    path = tmp_path / 'a.safetensors'
    path.write_bytes(signed(state, text))
    assert want in error_of(checkpoint.load, path, mapped=mapped)
    assert checkpoint.find(tmp_path).path is None
    path.write_bytes(signed('"[1]"', '[1]'))
    assert checkpoint.load(path, mapped) == ({}, [1])
    with pytest.raises(UserError, match='a checkpoint of None, not of transformer'):
        checkpoint.check_program(checkpoint.find(tmp_path), 'transformer')


@pytest.mark.parametrize('shape, offsets', [('[0,4611686018427387904]', '[0,0]'), ('[-1]', '[0,0]'), ('[0.5]', '[0,0]'),
                                            ('"0"', '[0,0]'), ('[0]', f'[{1 << 70},{1 << 70}]'), ('[0]', '[0,1e999]')])
def test_impossible_sizes_are_damage(tmp_path, shape, offsets):
    path = tmp_path / 'a.safetensors'
    checkpoint.save(path, {'key\x1b': np.zeros(0, np.float32)}, STATE)
    data = path.read_bytes()
    header = data[8:].replace(b'"shape":[0]', f'"shape":{shape}'.encode()).replace(
        b'"data_offsets":[0,0]', f'"data_offsets":{offsets}'.encode())
    assert header != data[8:]
    path.write_bytes(struct.pack('<Q', len(header)) + header)
    for mapped in (False, True):
        message = error_of(checkpoint.load, path, mapped=mapped)
        assert 'damaged' in message or 'truncated' in message
        assert message.isprintable()


@pytest.mark.parametrize('kind', foreign_files())
def test_foreign_files(tmp_path, kind):
    path = tmp_path / 'a.safetensors'
    data, want = foreign_files()[kind]
    path.write_bytes(data)
    message = error_of(checkpoint.load, path)
    assert want in message and str(path) in message


def test_a_mapped_checkpoint_has_the_same_bits_and_damage_is_found(tmp_path):
    path, tensors = tmp_path / 'a.safetensors', some_tensors()
    checkpoint.save(path, tensors, STATE)
    got, state = checkpoint.load(path, mapped=True)
    assert_same(got, tensors)
    assert state == STATE and not any(tensor.flags.writeable for tensor in got.values())
    assert_same(checkpoint.find(tmp_path, serving=True).tensors, tensors)
    data = path.read_bytes()
    for changed in (data[:-5] + bytes([data[-5] ^ 1]) + data[-4:], data.replace(b'"F64"', b'"F32"'),
                    data.replace(b'[3,5]', b'[3,4]')):
        assert changed != data
        (tmp_path / 'b.safetensors').write_bytes(changed)
        assert 'damaged checkpoint' in error_of(checkpoint.load, tmp_path / 'b.safetensors', mapped=True)


def test_a_tensor_that_numpy_cannot_map_is_copied(tmp_path, monkeypatch):
    path, tensors = tmp_path / 'a.safetensors', some_tensors()
    checkpoint.save(path, tensors, STATE)
    monkeypatch.setattr(checkpoint, '_DTYPES', {})
    assert_same(checkpoint.load(path, mapped=True)[0], tensors)


def test_a_checkpoint_of_format_1_is_read(tmp_path):
    """It has no name, and its SHA-256 is taken without one."""
    from safetensors.numpy import save
    tensors, text = some_tensors(), json.dumps(STATE)
    (tmp_path / 'a.safetensors').write_bytes(save(tensors, metadata={
        'format': checkpoint.FORMAT, 'version': '1', 'state': text, 'sha256': checkpoint._digest(tensors, text)}))
    got, state = checkpoint.load(tmp_path / 'a.safetensors')
    assert_same(got, tensors)
    assert state == STATE


def test_load_what_is_not_a_file(tmp_path):
    assert 'no such checkpoint' in error_of(checkpoint.load, tmp_path / 'none.safetensors')
    assert 'cannot read' in error_of(checkpoint.load, tmp_path)


# ---- a disk that fails ---------------------------------------------------------------------------------------------

def test_full_disk_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    path = tmp_path / 'a.safetensors'
    checkpoint.save(path, {'x': np.zeros(10)}, {'epoch': 1})

    def full(_):
        raise OSError(errno.ENOSPC, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', full)
    message = error_of(checkpoint.save, path, {'x': np.zeros(1000)}, {'epoch': 2})
    needed = int(message.split(' bytes')[0].split()[-1])
    assert needed > 8000 and 'No space left' in message and 'are free' in message and str(path) in message
    assert os.listdir(tmp_path) == ['a.safetensors']
    assert checkpoint.load(path)[1] == {'epoch': 1}


def test_interrupt_in_a_save_leaves_the_old_file(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt
    path = tmp_path / 'a.safetensors'
    checkpoint.save(path, {'x': np.zeros(10)}, {'epoch': 1})
    monkeypatch.setattr(os, 'replace', interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, {'x': np.zeros(10)}, {'epoch': 2})
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ['a.safetensors'] and checkpoint.load(path)[1] == {'epoch': 1}


@pytest.mark.parametrize('number, want', [
    (errno.EACCES, r'\(Permission denied\); make the folder writable or name another folder with -c'),
    (errno.EROFS, r'\(Read-only file system\); make the folder writable or name another folder with -c'),
    (errno.EFBIG, r'\(File too large\): it needs \d+ bytes; raise the limit on the size of a file \(ulimit -f\) or name .*'),
    (errno.ENOSPC, r'\(No space left on device\): it needs \d+ bytes and \d+ are free; make room or name another .*'),
    (errno.EIO, r'\(Input/output error\); mend the folder or name another folder with -c')])
def test_the_remedy_goes_with_the_reason(tmp_path, number, want, monkeypatch):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))
    monkeypatch.setattr(checkpoint, 'write_atomically', fail)
    message = error_of(checkpoint.save, tmp_path / 'a.safetensors', {}, {})
    assert re.fullmatch(rf'{tmp_path}/a\.safetensors: cannot save the checkpoint {want}', message), message


def test_folder_that_vanished(tmp_path):
    message = error_of(checkpoint.save, tmp_path / 'gone' / 'a.safetensors', {}, {})
    assert 'No such file' in message


LIMITED = '''
import resource, signal, sys, numpy as np
from pyops import checkpoint
from pyops.errors import UserError
if sys.argv[2] == 'killed':
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
checkpoint.save(sys.argv[1] + '/checkpoint_20250322_120000_1.safetensors', {'x': np.zeros(1000)}, {'epoch': 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    checkpoint.save(sys.argv[1] + '/checkpoint_20250322_120001_2.safetensors', {'x': np.zeros(1000_000)}, {'epoch': 2})
except UserError as error:
    print(error)
'''


def test_write_that_fails_in_the_middle(tmp_path):
    result = run_child(LIMITED, tmp_path, 'refused')
    assert result.returncode == 0 and 'File too large' in result.stdout, result.stderr
    assert os.listdir(tmp_path) == ['checkpoint_20250322_120000_1.safetensors']


def test_killed_in_the_middle_of_a_write(tmp_path):
    result = run_child(LIMITED, tmp_path, 'killed')
    assert result.returncode == -signal.SIGXFSZ
    left = [name for name in os.listdir(tmp_path) if name.endswith('.tmp')]
    assert len(left) == 1 and os.path.getsize(tmp_path / left[0]) == 1_000_000      # the kill came in the middle
    found = checkpoint.find(tmp_path)
    assert checkpoint.load(found.path)[1] == {'epoch': 1} and found.warnings == ()
    assert os.listdir(tmp_path) == ['checkpoint_20250322_120000_1.safetensors']


@pytest.mark.parametrize('where', ['fsync', 'replace'])
def test_killed_before_the_rename(tmp_path, where):
    code = ('import os, signal, sys, numpy as np\nfrom pyops import checkpoint\n'
            f'os.{where} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n'
            "checkpoint.save(sys.argv[1] + '/checkpoint_20250322_120001_2.safetensors', {'x': np.zeros(9)}, {})")
    checkpoint.save(tmp_path / checkpoint.name(1, NOON), {}, {'epoch': 1})
    assert run_child(code, tmp_path).returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    assert checkpoint.load(checkpoint.find(tmp_path).path)[1] == {'epoch': 1}
    assert os.listdir(tmp_path) == [checkpoint.name(1, NOON)]


SAVER = '''
import glob, os, sys, numpy as np
from pyops import checkpoint
folder = sys.argv[1]
found = checkpoint.find(folder)
epoch = checkpoint.load(found.path)[1]['epoch'] if found.path else 0
while True:
    epoch += 1
    tensors = {name: np.full(1_000_000, epoch, np.float32) for name in ('parameters', 'moment')}
    path = checkpoint.save_or_rescue(folder, epoch, tensors, {'epoch': epoch})
    print(epoch, flush=True)
    for old in glob.glob(glob.escape(folder) + '/checkpoint_*'):
        if old != path:
            os.unlink(old)
'''


def test_killed_at_random_moments(tmp_path):
    rng, epoch, in_a_save = random.Random(2), 0, 0
    for attempt in range(10):
        with subprocess.Popen([sys.executable, '-c', SAVER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as child:
            announced = child.stdout.readline()             # it saves by now
            time.sleep(rng.uniform(0, 0.15))
            deadline = time.monotonic() + 10
            while attempt % 2 and time.monotonic() < deadline:          # every other kill seeks out a write under way
                if any(name.endswith('.tmp') for name in os.listdir(tmp_path)):
                    break
            child.kill()
            announced += child.stdout.read()
        in_a_save += any(name.endswith('.tmp') for name in os.listdir(tmp_path))
        found = checkpoint.find(tmp_path)
        tensors, state = checkpoint.load(found.path)
        assert found.warnings == ()
        assert state['epoch'] >= int(announced.split()[-1]) > epoch     # nothing that was announced is lost
        epoch = state['epoch']
        assert all((tensor == epoch).all() and tensor.size == 1_000_000 for tensor in tensors.values())
        assert not any(name.endswith('.tmp') for name in os.listdir(tmp_path))
    assert in_a_save > 0                                                # or these kills tried nothing


# ---- rescue --------------------------------------------------------------------------------------------------------

def refuse(monkeypatch, *folders):
    """Make every write into these folders fail as on a full disk, after half of the bytes."""
    def limited(path, data, fsync):
        with open_atomically(path, fsync=fsync) as file:
            if os.path.dirname(path) in map(str, folders):
                file.write(data[:len(data) // 2])
                raise OSError(errno.ENOSPC, 'No space left on device')
            file.write(data)
    monkeypatch.setattr(checkpoint, 'write_atomically', limited)


@pytest.fixture
def rescue(tmp_path, monkeypatch):
    folder = tmp_path / 'rescue'
    folder.mkdir()
    monkeypatch.setattr(tempfile, 'tempdir', str(folder))
    return folder


def test_a_full_disk_is_rescued(tmp_path, rescue, monkeypatch):
    folder = tmp_path / 'ckpt'
    folder.mkdir()
    refuse(monkeypatch, folder)
    message = error_of(checkpoint.save_or_rescue, str(folder), 4, some_tensors(), STATE, NOON)
    path = rescue / checkpoint.name(4, NOON)
    assert f'-c {path}' in message and str(folder) in message
    assert_same(checkpoint.load(path)[0], some_tensors())
    assert os.listdir(folder) == [] and os.listdir(rescue) == [path.name]


def test_a_full_disk_and_no_rescue(tmp_path, rescue, monkeypatch):
    folder = str(tmp_path)
    first = checkpoint.save_or_rescue(folder, 1, {}, {'epoch': 1}, NOON)
    refuse(monkeypatch, folder, rescue)
    message = error_of(checkpoint.save_or_rescue, folder, 2, some_tensors(), STATE, NOON, first)
    assert f'the last complete checkpoint is {first}' in message and str(rescue) in message
    assert sorted(os.listdir(tmp_path)) == sorted([os.path.basename(first), 'rescue']) and os.listdir(rescue) == []
    assert 'no earlier checkpoint' in error_of(checkpoint.save_or_rescue, folder, 2, {}, {}, NOON)


def test_a_real_full_disk(tmp_path, rescue):
    folder = tmp_path / 'small'
    folder.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(folder)], capture_output=True) \
        if sys.platform == 'linux' and os.geteuid() == 0 else None
    if mounted is None or mounted.returncode:
        pytest.skip('cannot mount a small tmpfs here')
    try:
        message = error_of(checkpoint.save_or_rescue, folder, 1, {'x': np.ones(500_000, np.float32)}, {'epoch': 1})
        assert 'No space left' in message and os.listdir(folder) == []
        free = os.statvfs(folder)
        assert f'and {free.f_bavail * free.f_frsize} are free' in message
        assert (checkpoint.load(message.rsplit('-c ')[-1])[0]['x'] == 1).all()
        assert 'are free' in error_of(checkpoint.check_free_space, folder, 2_000_000)
        checkpoint.check_free_space(folder, 500_000)
    finally:
        subprocess.run(['umount', str(folder)], check=True)


def test_check_free_space(tmp_path):
    checkpoint.check_free_space(tmp_path, 1)
    assert str(2**62) in error_of(checkpoint.check_free_space, tmp_path, 2**62)
    assert 'none' in error_of(checkpoint.check_free_space, tmp_path / 'none', 1)


# ---- names and folders ---------------------------------------------------------------------------------------------

def test_name():
    assert checkpoint.name(10, datetime.datetime(2025, 3, 22, 8, 59, 20)) == 'checkpoint_20250322_085920_10.safetensors'
    assert checkpoint._NAME.fullmatch(checkpoint.name(0))


def test_saves_within_one_second_do_not_overwrite(tmp_path):
    paths = [checkpoint.save_or_rescue(tmp_path, epoch, {}, {'n': n}, NOON)
             for n, epoch in enumerate([1, 1, 2, 2, 1, 10, 9])]
    assert len(set(paths)) == len(paths)
    for n, path in enumerate(paths):
        assert checkpoint.load(path)[1] == {'n': n}
    assert checkpoint.find(tmp_path).path == paths[-1]


def test_a_clock_that_was_set_back(tmp_path):
    checkpoint.save_or_rescue(tmp_path, 1, {}, {}, NOON)
    later = checkpoint.save_or_rescue(tmp_path, 2, {}, {}, NOON - datetime.timedelta(hours=1))
    assert checkpoint.find(tmp_path).path == later


@pytest.mark.parametrize('names', [
    ['checkpoint_20250322_085920_10', 'checkpoint_20250322_085921_9'],          # time before epoch
    ['checkpoint_20250322_085920_9', 'checkpoint_20250322_085920_10'],          # epochs as numbers
    ['checkpoint_20241231_235959_50', 'checkpoint_20250101_000000_1']])
def test_find_takes_the_newest(tmp_path, names):
    for name in reversed(names):
        checkpoint.save(tmp_path / f'{name}.safetensors', {}, {})
    found = checkpoint.find(tmp_path)
    assert found.path == str(tmp_path / f'{names[-1]}.safetensors') and found.folder == str(tmp_path)
    assert found.line == f'loading from checkpoint : {found.path}' and found.warnings == ()


def test_find_passes_over_what_is_incomplete(tmp_path):
    paths = [str(tmp_path / f'checkpoint_20250322_08592{n}_{n}.safetensors') for n in range(5)]
    for path in paths:
        checkpoint.save(path, {'x': np.zeros(100)}, {})
    os.truncate(paths[4], 500)
    os.truncate(paths[3], 0)
    with open(paths[2], 'wb') as file:
        file.write(b'something else altogether')
    found = checkpoint.find(tmp_path)
    assert found.path == paths[1]
    assert [path in warning and '\n' not in warning
            for path, warning in zip(paths[:1:-1], found.warnings, strict=True)] == [True] * 3
    assert all(os.path.exists(path) for path in paths)                      # nothing of the user's is removed


def flip(path):
    """One bit of the last tensor, which only the SHA-256 notices."""
    content = bytearray(open(path, 'rb').read())
    content[-1] ^= 1
    with open(path, 'wb') as file:
        file.write(content)


@pytest.mark.parametrize('serving', [False, True])
def test_find_passes_over_a_flipped_bit(tmp_path, serving):
    paths = [checkpoint.save_or_rescue(tmp_path, n, {'x': np.full(100, n)}, {'epoch': n}, NOON) for n in range(3)]
    flip(paths[2])
    found = checkpoint.find(tmp_path, serving)
    assert found.path == paths[1] and found.state == {'epoch': 1} and (found.tensors['x'] == 1).all()
    (warning,) = found.warnings
    assert warning.startswith(f'warning: passed over {paths[2]}: damaged checkpoint: ') and 'SHA-256' in warning


@pytest.mark.parametrize('mapped', [False, True])
def test_a_program_that_translates_reads_and_checks_the_parameters_alone(tmp_path, mapped):
    tensors = {'adam_m/w': np.full(9, 2.0), 'parameter/b': np.arange(3.0), 'parameter/w': np.ones(9), 'trained/w': np.ones(9)}
    path, state = tmp_path / checkpoint.name(1, NOON), {'epoch': 1}
    checkpoint.save(path, tensors, state)
    parameters = {name: tensors[name] for name in ('parameter/b', 'parameter/w')}
    whole = path.read_bytes()
    for name, is_parameter in [*((name, name in parameters) for name in tensors), ('"epoch": 1', True)]:
        damaged = bytearray(whole)
        if name in tensors:
            header = json.loads(whole[8:8 + int.from_bytes(whole[:8], 'little')])
            damaged[8 + int.from_bytes(whole[:8], 'little') + header[name]['data_offsets'][0]] ^= 1
        else:
            damaged[whole.index(b'epoch')] ^= 1
        path.write_bytes(damaged)
        assert 'SHA-256' in error_of(checkpoint.load, path, mapped)
        if is_parameter:
            assert 'SHA-256' in error_of(checkpoint.load, path, mapped, True)
        else:
            found, kept = checkpoint.load(path, mapped, True)
            assert_same(found, parameters)
            assert kept == state
            assert_same(checkpoint.find(tmp_path, serving=True, parameters_only=True).tensors, parameters)


def test_a_mapped_checkpoint_is_read_without_the_library_safetensors(tmp_path):
    checkpoint.save(tmp_path / 'a.safetensors', some_tensors(), STATE)
    code = ('import sys; from pyops import checkpoint\ntensors, _ = checkpoint.load(sys.argv[1], mapped=True)\n'
            'print(len(tensors), "safetensors" in sys.modules)')
    assert run_child(code, tmp_path / 'a.safetensors').stdout == f'{len(some_tensors())} False\n'


def test_a_checkpoint_with_one_checksum_is_checked_whole(tmp_path):
    path = tmp_path / checkpoint.name(1, NOON)
    checkpoint.save(path, {'moment': np.ones(3)}, {})
    assert b'parameters_sha256' not in path.read_bytes()
    assert set(checkpoint.load(path, parameters_only=True)[0]) == {'moment'}
    flip(path)
    assert 'SHA-256' in error_of(checkpoint.load, path, False, True)


def test_a_damaged_file_that_was_named_is_an_error_with_the_newest_intact_one(tmp_path):
    paths = [checkpoint.save_or_rescue(tmp_path, n, {'x': np.full(100, n)}, {}, NOON) for n in range(4)]
    flip(paths[3])
    flip(paths[2])
    for damage in (lambda: None, lambda: os.truncate(paths[3], 300), lambda: os.truncate(paths[3], 0)):
        damage()
        for serving in (False, True):
            message = error_of(checkpoint.find, paths[3], serving)
            assert message.startswith(paths[3]) and message.endswith(f'; the newest intact one there is {paths[1]}')
            assert message.count('; ') == 1
    for path in paths[:2]:
        os.unlink(path)
    assert error_of(checkpoint.find, paths[3]).endswith('; take an older one')


def test_a_renamed_or_copied_checkpoint_keeps_its_place(tmp_path):
    """By the name under which it was saved, whenever it was copied."""
    def names():
        return checkpoint.find(tmp_path).path.removeprefix(f'{tmp_path}/')
    first, second, third = (checkpoint.save_or_rescue(tmp_path, n, {'x': np.full(100, n)}, {}, NOON) for n in range(3))
    os.rename(second, tmp_path / 'best.safetensors')
    assert names() == os.path.basename(third)
    shutil.copyfile(first, tmp_path / 'start.safetensors')
    assert names() == os.path.basename(third)
    os.unlink(third)
    assert names() == 'best.safetensors'
    later = checkpoint.save_or_rescue(tmp_path, 0, {}, {}, NOON - datetime.timedelta(days=1))
    assert names() == os.path.basename(later)           # a save is later than all there, renamed ones included
    flip(later)
    assert names() == 'best.safetensors'


def test_a_checkpoint_without_a_name_of_ours_is_ordered_by_its_change(tmp_path):
    for path, when in (('run 1.safetensors', 2), ('run 2.safetensors', 3), ('run 3.safetensors', 1)):
        checkpoint.save(tmp_path / path, {}, {})
        os.utime(tmp_path / path, ((NOON + datetime.timedelta(hours=when)).timestamp(),) * 2)
    assert checkpoint.find(tmp_path).path == str(tmp_path / 'run 2.safetensors')
    checkpoint.save(tmp_path / checkpoint.name(1, NOON), {}, {})
    assert checkpoint.find(tmp_path).path == str(tmp_path / 'run 2.safetensors')
    checkpoint.save(tmp_path / checkpoint.name(1, NOON + datetime.timedelta(hours=4)), {}, {})
    assert checkpoint.find(tmp_path).path.endswith(checkpoint.name(1, NOON + datetime.timedelta(hours=4)))
    for name in ('checkpoint_20991301_000000_1', 'checkpoint_2099_1'):          # no date: no name of ours
        checkpoint.save(tmp_path / f'{name}.safetensors', {}, {})
        os.utime(tmp_path / f'{name}.safetensors', (0, 0))
    assert checkpoint.find(tmp_path).path.endswith(checkpoint.name(1, NOON + datetime.timedelta(hours=4)))


def test_files_of_other_programs_are_worth_a_line_only_without_a_checkpoint(tmp_path):
    from safetensors.numpy import save
    for n in range(5):
        (tmp_path / f'{n}.safetensors').write_bytes(save({'x': np.zeros(3)}))
    os.mkdir(tmp_path / 'folder.safetensors')
    found = checkpoint.find(tmp_path)
    assert found.path is None and found.line.endswith('no checkpoint, starting from scratch')
    assert [warning.partition(': a safe')[0] for warning in found.warnings[:3]] == [
        f'warning: passed over {tmp_path}/{n}.safetensors' for n in (4, 3, 2)]
    assert found.warnings[3:] == ('warning: passed over 2 more of that kind',)
    assert '4.safetensors: a safetensors file, but not a pyops checkpoint' in error_of(checkpoint.find, tmp_path, serving=True)
    checkpoint.save(tmp_path / checkpoint.name(1, NOON), {}, {})
    assert checkpoint.find(tmp_path).warnings == ()


def test_the_parts_of_a_split_checkpoint_are_worth_a_line(tmp_path):
    for part in ('aa', 'ab'):
        (tmp_path / f'{checkpoint.name(1, NOON)}_part_{part}').write_bytes(b'x')
    (warning,) = checkpoint.find(tmp_path).warnings
    assert warning == (f'warning: passed over {tmp_path}/{checkpoint.name(1, NOON)}_part_aa: a part of a split file; '
                       'put all 2 together with scripts/restore_checkpoint.sh')


def deny(monkeypatch, folder):
    """Make reading this folder fail as one of mode 000 does, which root can read."""
    scandir = os.scandir

    def denied(path='.'):
        if os.fspath(path) == str(folder):
            raise PermissionError(errno.EACCES, 'Permission denied')
        return scandir(path)
    monkeypatch.setattr(os, 'scandir', denied)


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / checkpoint.name(1, NOON), {}, {})
    want = f'{tmp_path}: cannot read the folder (Permission denied); make it readable, or name another with -c'
    if os.geteuid():
        tmp_path.chmod(0)
        try:
            assert error_of(checkpoint.find, tmp_path, serving=True) == want
            assert 'cannot be reached (Permission denied)' in error_of(checkpoint.find, tmp_path / 'ckpt', serving=True)
        finally:
            tmp_path.chmod(0o700)
    deny(monkeypatch, tmp_path)
    for serving in (False, True):
        assert error_of(checkpoint.find, tmp_path, serving) == want


def test_a_path_that_cannot_be_reached_is_not_a_new_one(tmp_path, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, 'Permission denied')
    monkeypatch.setattr(os, 'lstat', denied)
    for path in (tmp_path / 'ckpt', tmp_path / 'a.safetensors'):
        assert error_of(checkpoint.find, path, serving=True) == (
            f'{path}: cannot be reached (Permission denied); make the folders on the way there readable, '
            'or name another with -c')


def test_find_does_not_pass_over_a_newer_format(tmp_path):
    from safetensors.numpy import save
    checkpoint.save(tmp_path / checkpoint.name(1, NOON), {}, {})
    newer = tmp_path / checkpoint.name(2, NOON)
    newer.write_bytes(save({}, metadata={'format': checkpoint.FORMAT, 'version': '7', 'state': '{}'}))
    assert str(newer) in error_of(checkpoint.find, tmp_path)


def test_find_a_file(tmp_path, monkeypatch):
    path = tmp_path / 'mine.bin'
    checkpoint.save(path, {}, {})
    assert checkpoint.find(path) == checkpoint.Found(str(path), str(tmp_path), f'loading from checkpoint : {path}')
    monkeypatch.chdir(tmp_path)
    assert checkpoint.find('mine.bin').folder == '.'


def test_find_a_missing_file(tmp_path):
    missing = tmp_path / 'checkpoint_20250322_085920_10.safetensors'
    assert 'start from scratch' in error_of(checkpoint.find, missing)
    there = tmp_path / checkpoint.name(1, NOON)
    checkpoint.save(there, {}, {})
    message = error_of(checkpoint.find, missing)
    assert str(missing) in message and f'newest one there is {there}' in message
    assert 'no such checkpoint' in error_of(checkpoint.find, tmp_path / 'nofolder' / 'a.safetensors')
    assert not (tmp_path / 'nofolder').exists()


def test_find_a_folder_without_any(tmp_path):
    new = tmp_path / 'a' / 'b'
    found = checkpoint.find(new)
    assert found.path is None and found.folder == str(new) and new.is_dir()
    assert found.line == f'{new} : new folder, starting from scratch'
    assert checkpoint.find(new).line == f'{new} : no checkpoint, starting from scratch'
    assert os.listdir(new) == []


def test_find_for_serving_only_reads(tmp_path):
    new = tmp_path / 'new'
    assert error_of(checkpoint.find, new, serving=True) == f'{new}: no such folder; train first, or name another checkpoint'
    assert not new.exists()
    stale = tmp_path / '.a.safetensors.999999999.tmp'
    stale.write_bytes(b'x')
    bad = tmp_path / checkpoint.name(1, NOON)
    bad.write_bytes(b'x')
    assert str(bad) in error_of(checkpoint.find, tmp_path, serving=True)
    good = tmp_path / checkpoint.name(1, NOON - datetime.timedelta(1))
    checkpoint.save(good, {}, {})
    assert checkpoint.find(tmp_path, serving=True).path == str(good) and stale.exists()


def test_find_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / 'file').write_bytes(b'')
    assert 'cannot save checkpoints there' in error_of(checkpoint.find, tmp_path / 'file' / 'ckpt')
    if os.path.isdir('/proc/self'):                                         # not even root writes there
        assert 'cannot save checkpoints there' in error_of(checkpoint.find, '/proc/self')
    if os.geteuid():
        (tmp_path / 'locked').mkdir(0o500)
        assert 'cannot save checkpoints there' in error_of(checkpoint.find, tmp_path / 'locked')


def test_find_odd_paths(tmp_path):
    assert '-c' in error_of(checkpoint.find, '')
    assert 'neither' in error_of(checkpoint.find, '/dev/null')
    (tmp_path / 'dangling').symlink_to(tmp_path / 'nowhere')
    assert 'neither' in error_of(checkpoint.find, tmp_path / 'dangling')


def test_stale_temporaries(tmp_path):
    with subprocess.Popen(['sleep', '60']) as alive:
        kept = {f'.checkpoint_1.safetensors.{alive.pid}.tmp', '.notes.tmp', 'a.safetensors.1.tmp'}
        with subprocess.Popen(['true']) as dead:
            dead.wait()
        stale = {f'.checkpoint_1.safetensors.{dead.pid}.tmp', f'.x.safetensors.{os.getpid()}.tmp',
                 '.x.safetensors.99999999999999999999.tmp'}
        for name in kept | stale:
            (tmp_path / name).write_bytes(b'x')
        checkpoint.find(tmp_path)
        alive.kill()
    assert set(os.listdir(tmp_path)) == kept


def test_find_reads_the_newest_checkpoint_once_and_no_older_one(tmp_path, monkeypatch):
    paths = [checkpoint.save_or_rescue(tmp_path, n, {'x': np.full(9, n)}, {}, NOON) for n in range(3)]
    read, hashed = [], []
    read_header, digest = checkpoint._read_header, checkpoint._digest
    monkeypatch.setattr(checkpoint, '_read_header', lambda path: read.append(path) or read_header(path))
    monkeypatch.setattr(checkpoint, '_digest', lambda *content: hashed.append(content) or digest(*content))
    assert checkpoint.find(tmp_path).path == paths[2]
    assert read == [paths[2]] and len(hashed) == 1
