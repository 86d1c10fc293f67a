"""split_checkpoint.sh and restore_checkpoint.sh: byte for byte, nothing lost, every bad input one line; keep_training.sh."""
import hashlib
import os
import random
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

SCRIPTS = os.path.join(ROOT, 'scripts')


def run(script, *arguments, cwd=None, **environment):
    return subprocess.run([os.path.join(SCRIPTS, f'{script}_checkpoint.sh'), *map(str, arguments)], cwd=cwd,
                          capture_output=True, text=True, env={**os.environ, **environment})


def good(script, *arguments, **options):
    result = run(script, *arguments, **options)
    assert (result.returncode, result.stderr) == (0, ''), result.stderr
    return result.stdout


def bad(script, *arguments, **options):
    """The text of the one line of error that this call must end with."""
    result = run(script, *arguments, **options)
    assert (result.returncode, result.stdout) == (2, ''), (result.returncode, result.stdout, result.stderr)
    assert result.stderr.startswith(f'{script}_checkpoint.sh: error: ') and result.stderr.count('\n') == 1
    return result.stderr


def sha256(data):
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(params=['cp_loss_1_149', "a b $x'*"])
def file(request, tmp_path):
    path = tmp_path / 'my folder' / request.param
    path.parent.mkdir()
    path.write_bytes(random.Random(0).randbytes(100_003))
    return path


def part(file, suffix):
    return file.with_name(f'{file.name}_part_{suffix}')


def manifest(file):
    return file.with_name(f'{file.name}.sha256')


def test_two_parts_and_their_manifest(file):
    data = file.read_bytes()
    good('split', file)
    assert sorted(os.listdir(file.parent)) == sorted(
        [file.name, f'{file.name}.sha256', f'{file.name}_part_aa', f'{file.name}_part_ab'])
    parts = [part(file, suffix).read_bytes() for suffix in ('aa', 'ab')]
    assert b''.join(parts) == data and abs(len(parts[0]) - len(parts[1])) <= 1
    assert manifest(file).read_text() == ''.join(
        f'{sha256(content)}  {name}\n' for content, name in
        [(data, file.name), (parts[0], part(file, 'aa').name), (parts[1], part(file, 'ab').name)])
    if shutil.which('sha256sum'):
        subprocess.run(['sha256sum', '--quiet', '-c', manifest(file).name], cwd=file.parent, check=True)


@pytest.mark.parametrize('argument', ['', '_part', '_part_', '_part_aa', '_part_ab', '.sha256'])
def test_restored_from_any_of_its_names(file, argument):
    data = file.read_bytes()
    good('split', file)
    file.unlink()
    good('restore', f'{file}{argument}')
    assert file.read_bytes() == data
    assert len(os.listdir(file.parent)) == 4


@pytest.mark.parametrize('parts', [1, 3, 27])
def test_any_number_of_parts(file, parts):
    data = file.read_bytes()
    good('split', file, parts)
    names = sorted(name for name in os.listdir(file.parent) if '_part_' in name)
    assert len(names) == parts and {len(name.rsplit('_', 1)[1]) for name in names} == {2}
    assert b''.join((file.parent / name).read_bytes() for name in names) == data
    file.unlink()
    good('restore', file)
    assert file.read_bytes() == data


def test_three_letters_after_676_parts(tmp_path):
    file = tmp_path / 'f'
    file.write_bytes(bytes(677))
    good('split', file, 677)
    names = sorted(name for name in os.listdir(tmp_path) if '_part_' in name)
    assert len(names) == 677 and names[0] == 'f_part_aaa' and names[-1] == 'f_part_baa'
    good('restore', file, tmp_path / 'g')
    assert (tmp_path / 'g').read_bytes() == bytes(677)


@pytest.mark.parametrize('size', [1, 2, 5])
def test_parts_of_one_byte(tmp_path, size):
    file = tmp_path / 'f'
    file.write_bytes(b'\0\n\xff\r '[:size])
    good('split', file, size)
    good('restore', file, tmp_path / 'g')
    assert (tmp_path / 'g').read_bytes() == file.read_bytes()


def test_output_elsewhere_and_relative_names(file, tmp_path):
    good('split', file.name, cwd=file.parent)
    good('restore', file.name, tmp_path / 'other name', cwd=file.parent)
    assert (tmp_path / 'other name').read_bytes() == file.read_bytes()
    plain = tmp_path / 'plain'
    plain.touch()
    assert (tmp_path / 'other name').stat().st_mode == plain.stat().st_mode     # not private, as a temporary is


def test_a_name_that_begins_with_a_dash(tmp_path):
    (tmp_path / '-rf').write_bytes(b'12345')
    good('split', '--', '-rf', cwd=tmp_path)
    (tmp_path / '-rf').unlink()
    good('restore', '--', '-rf', cwd=tmp_path)
    assert (tmp_path / '-rf').read_bytes() == b'12345'


def test_a_checkpoint_goes_through(tmp_path):
    np = pytest.importorskip('numpy')
    from pyops import checkpoint
    path = tmp_path / checkpoint.name(10)
    checkpoint.save(path, {'x': np.arange(1000)}, {'epoch': 10})
    good('split', path)
    path.unlink()
    assert checkpoint.find(tmp_path).path is None           # parts and manifest are no checkpoints
    good('restore', path)
    assert checkpoint.load(path)[1] == {'epoch': 10}


# ---- nothing is overwritten ----------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', ['_part_aa', '_part_ab', '.sha256'])
def test_split_overwrites_only_with_force(file, name):
    there = file.with_name(file.name + name)
    there.write_bytes(b'precious')
    assert str(there) in bad('split', file) and '--force' in bad('split', file)
    assert there.read_bytes() == b'precious' and len(os.listdir(file.parent)) == 2
    good('split', file, '--force')
    assert there.read_bytes() != b'precious'
    good('restore', file, '--force')


def test_restore_overwrites_only_with_force(file):
    data = file.read_bytes()
    good('split', file)
    file.write_bytes(b'precious')
    assert str(file) in bad('restore', file) and '--force' in bad('restore', file)
    assert file.read_bytes() == b'precious'
    good('restore', '--force', file)
    assert file.read_bytes() == data


def test_restore_never_writes_on_what_it_reads(file):
    good('split', file)
    for name in (part(file, 'ab'), manifest(file)):
        before = name.read_bytes()
        assert str(name) in bad('restore', file, name, '--force')
        assert name.read_bytes() == before


def test_split_again_into_fewer_parts(file):
    good('split', file, 5)
    good('split', file, 2, '--force')
    data = file.read_bytes()
    good('restore', file, '--force')
    assert file.read_bytes() == data


# ---- damage --------------------------------------------------------------------------------------------------------

def test_missing_and_damaged_parts_are_named(file):
    good('split', file, 4)
    file.unlink()
    part(file, 'ab').unlink()
    with open(part(file, 'ad'), 'r+b') as damaged:
        byte = damaged.read(1)
        damaged.seek(0)
        damaged.write(bytes([byte[0] ^ 1]))
    message = bad('restore', file)
    assert f'missing: {part(file, "ab")};' in message and f'damaged: {part(file, "ad")};' in message
    assert str(part(file, 'aa')) not in message and str(part(file, 'ac')) not in message
    assert not file.exists() and len(os.listdir(file.parent)) == 4


@pytest.mark.parametrize('change', [lambda data: data[:-1], lambda data: data + b'\0', lambda data: b''])
def test_part_of_another_length(file, change):
    good('split', file)
    file.unlink()
    part(file, 'aa').write_bytes(change(part(file, 'aa').read_bytes()))
    assert f'damaged: {part(file, "aa")}' in bad('restore', file)
    assert not file.exists()


def test_parts_that_are_right_but_in_another_order(file):
    good('split', file)
    file.unlink()
    lines = manifest(file).read_text().splitlines()
    manifest(file).write_text('\n'.join([lines[0], lines[2], lines[1]]) + '\n')
    assert 'SHA-256' in bad('restore', file)
    assert not file.exists() and len(os.listdir(file.parent)) == 3


@pytest.mark.parametrize('text', ['', 'hello\n', 'f' * 63 + '  x\n', 'f' * 64 + '  ../x\n', 'f' * 64 + '  x\n', '\0'])
def test_damaged_manifest(file, text):
    good('split', file)
    file.unlink()
    manifest(file).write_text(text)
    message = bad('restore', file)
    assert 'damaged manifest' in message and str(manifest(file)) in message


def test_manifest_that_went_through_windows(file):
    data = file.read_bytes()
    good('split', file)
    file.unlink()
    manifest(file).write_bytes(manifest(file).read_bytes().replace(b'\n', b'\r\n'))
    good('restore', file)
    assert file.read_bytes() == data


@pytest.mark.skipif(sys.platform != 'linux' or os.geteuid() != 0, reason='mounting a small tmpfs needs root on Linux')
@pytest.mark.parametrize('script', ['split', 'restore'])
def test_full_disk(tmp_path, script):
    small = tmp_path / 'small'
    small.mkdir()
    if subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=256k', 'tmpfs', str(small)], capture_output=True).returncode:
        pytest.skip('cannot mount a tmpfs here')
    try:
        file = small / 'f'
        file.write_bytes(random.Random(1).randbytes(150_000))
        if script == 'restore':
            file = shutil.move(file, tmp_path / 'f')
            good('split', file)
            shutil.copy(file, small / 'taken')
            assert 'free some space' in bad('restore', file, small / 'f')
            assert os.listdir(small) == ['taken']
        else:
            assert 'cannot be written: free at least' in bad('split', file)
            assert os.listdir(small) == ['f']
    finally:
        subprocess.run(['umount', str(small)], check=True)


# ---- bad input -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('arguments, want', [
    ([], 'FILE'), (['none'], 'none: no such file'), (['.'], '.: expected a regular file'), (['f', '0'], 'PARTS'),
    (['f', '-1'], '-1: unknown flag'), (['f', '2.5'], 'PARTS'), (['f', 'two'], 'PARTS'), (['f', '6'], 'at most 5'),
    (['f', '08'], 'PARTS'), (['f', '99999999999999999999'], 'PARTS'), (['f', '2', '3'], '3: expected'),
    (['--forse', 'f'], '--forse'), (['empty', '1'], 'at most 0'), (['empty'], 'at most 0'),
    (['/dev/null'], 'expected a regular file')])
def test_split_bad_input(tmp_path, arguments, want):
    (tmp_path / 'f').write_bytes(b'12345')
    (tmp_path / 'empty').touch()
    assert want in bad('split', *arguments, cwd=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ['empty', 'f']


@pytest.mark.parametrize('arguments, want', [
    ([], 'FILE'), (['none'], 'none.sha256: no such manifest'), (['none.sha256'], 'none.sha256: no such manifest'),
    (['none_part_aa'], 'none.sha256: no such manifest'), (['f', '.'], 'is a folder'), (['f', 'g', 'h'], 'h: expected'),
    (['f', 'none/g'], 'none: expected a folder'), (['-x'], '-x: unknown flag')])
def test_restore_bad_input(tmp_path, arguments, want):
    (tmp_path / 'f').write_bytes(b'12345')
    good('split', 'f', cwd=tmp_path)
    (tmp_path / 'f').unlink()
    assert want in bad('restore', *arguments, cwd=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ['f.sha256', 'f_part_aa', 'f_part_ab']


def test_split_into_a_folder_that_cannot_be_written():
    if not os.path.exists('/proc/self/status'):
        pytest.skip('no /proc here, the one folder that not even root can write')
    assert '/proc/self: expected a folder that can be written' in bad('split', '/proc/self/exe')


@pytest.mark.parametrize('script', ['split', 'restore'])
def test_help(script):
    assert good(script, '--help').startswith(f'usage: {script}_checkpoint.sh ') and good(script, '-h')


# ---- tools ---------------------------------------------------------------------------------------------------------

def test_shasum_where_there_is_no_sha256sum(file, tmp_path):
    """As on macOS: a PATH with all that the scripts need but sha256sum."""
    if not shutil.which('shasum'):
        pytest.skip('no shasum here')
    tools = tmp_path / 'tools'
    tools.mkdir()
    for tool in ('bash', 'basename', 'cat', 'chmod', 'dirname', 'env', 'head', 'mktemp', 'mv', 'perl', 'rm', 'shasum',
                 'tail', 'tr', 'wc'):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    data = file.read_bytes()
    good('split', file, PATH=str(tools))
    assert manifest(file).read_text().startswith(sha256(data))
    file.unlink()
    good('restore', file, PATH=str(tools))
    assert file.read_bytes() == data


@pytest.mark.skipif(not shutil.which('shellcheck'), reason='shellcheck is not installed')
@pytest.mark.parametrize('script', ['split', 'restore'])
def test_shellcheck(script):
    subprocess.run(['shellcheck', os.path.join(SCRIPTS, f'{script}_checkpoint.sh')], check=True)


# ---- keep_training.sh ------------------------------------------------------------------------------------------------------

def kept(folder, program):
    """Return the result of keep_training.sh for a run that executes these lines of sh in the folder."""
    command = [os.path.join(SCRIPTS, 'keep_training.sh'), str(folder), 'sh', '-c', f'echo run >> runs; {program}']
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=os.environ | {'KEEP_TRAINING_PAUSE': '0'})
    return result.returncode, result.stderr, (folder / 'runs').read_text().count('run')


def test_a_run_that_fails_is_started_again_until_it_is_done(tmp_path):
    program = 'n=$(wc -l < runs); [ $n -ge 8 ] && exit 0; [ $((n % 3)) -ne 0 ] || echo > $n.safetensors; exit 137'
    status, err, runs = kept(tmp_path, program)         # every third run saves a checkpoint
    assert (status, runs) == (0, 8) and err == 'keep_training.sh: status 137; starting again\n' * 7


def test_a_run_that_saves_no_checkpoint_is_given_up_after_three_failures(tmp_path):
    status, err, runs = kept(tmp_path, '[ $(wc -l < runs) -eq 1 ] && echo > a.safetensors; exit 2')
    assert (status, runs) == (2, 4)
    assert err.splitlines()[-1] == ('keep_training.sh: error: status 2, and the last 3 runs saved no checkpoint in '
                                    f'{tmp_path}; see their messages above')


@pytest.mark.parametrize('signal', [1, 2, 15])
def test_a_run_that_a_user_stops_is_not_started_again(signal, tmp_path):
    assert kept(tmp_path, f'exit {128 + signal}') == (128 + signal, '', 1)


def test_keep_training_without_a_command_prints_its_usage(tmp_path):
    result = subprocess.run([os.path.join(SCRIPTS, 'keep_training.sh'), str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.startswith('usage: keep_training.sh FOLDER COMMAND')
