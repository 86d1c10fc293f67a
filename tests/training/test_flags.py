"""Flags: argument types, errors of one line, the programs of a package, commands of a tool."""
import argparse
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import pyops
from pyops import flags


def parser():
    parser = flags.ArgumentParser(prog='python -m program')
    parser.add_argument('-e', '--epochs', type=flags.non_negative_int, default=50)
    parser.add_argument('-b', '--batch-size', type=flags.positive_int)
    parser.add_argument('-l', '--lr', type=flags.positive_float)
    parser.add_argument('-d', '--dropout', type=flags.fraction)
    parser.add_argument('-g', '--gain', type=flags.non_negative_float)
    return parser


@pytest.mark.parametrize('arguments, want', [
    (['-e', '-1'], '-e/--epochs: expected a whole number >= 0, got -1; see --help'),
    (['-e-1'], '-e/--epochs: expected a whole number >= 0, got -1; see --help'),
    (['--epochs=-1'], '-e/--epochs: expected a whole number >= 0, got -1; see --help'),
    (['-e', '1.5'], '-e/--epochs: expected a whole number >= 0, got 1.5; see --help'),
    (['-e', 'ten'], '-e/--epochs: expected a whole number >= 0, got ten; see --help'),
    (['-e', ''], "-e/--epochs: expected a whole number >= 0, got ''; see --help"),
    (['-e', '1_0'], '-e/--epochs: expected a whole number >= 0, got 1_0; see --help'),
    (['-e', '9' * 19], f'-e/--epochs: expected a whole number from 0 to {"9" * 18}, got {"9" * 19}; see --help'),
    (['-e', '9' * 5000], f'-e/--epochs: expected a whole number from 0 to {"9" * 18}, got {"9" * 5000}; see --help'),
    (['-b', '-' + '9' * 19], f'-b/--batch-size: expected a whole number >= 1, got -{"9" * 19}; see --help'),
    (['-e'], '-e/--epochs: expected one argument; see --help'),
    (['-b', '0'], '-b/--batch-size: expected a whole number >= 1, got 0; see --help'),
    (['-l', '0'], '-l/--lr: expected a number from 1e-37 to 1e38, got 0; see --help'),
    (['-l', '-1e-3'], '-l/--lr: expected a number from 1e-37 to 1e38, got -1e-3; see --help'),
    (['-l', '-inf'], '-l/--lr: expected a number from 1e-37 to 1e38, got -inf; see --help'),
    (['-l', 'inf'], '-l/--lr: expected a number from 1e-37 to 1e38, got inf; see --help'),
    (['-l', 'nan'], '-l/--lr: expected a number from 1e-37 to 1e38, got nan; see --help'),
    (['-d', '1'], '-d/--dropout: expected a number >= 0 and < 1, got 1; see --help'),
    (['-d', '-.5'], '-d/--dropout: expected a number >= 0 and < 1, got -.5; see --help'),
    (['-g', '-0.1'], '-g/--gain: expected a finite number >= 0, got -0.1; see --help'),
    (['--unknown'], 'unrecognized arguments: --unknown; see --help'),
    (['-x', '5'], 'unrecognized arguments: -x 5; see --help'),
    (['--epcohs', '5'], 'unrecognized arguments: --epcohs 5; did you mean --epochs? See --help'),
    (['--epoch-count=5'], 'unrecognized arguments: --epoch-count=5; did you mean --epochs? See --help'),
    (['--ep', '5'], 'unrecognized arguments: --ep 5; did you mean --epochs? See --help'),       # no abbreviations
    (['two\nlines'], 'unrecognized arguments: two lines; see --help')])
def test_a_bad_flag_is_one_line(arguments, want, capsys):
    with pytest.raises(SystemExit) as left:
        parser().parse_args(arguments)
    out, error = capsys.readouterr()
    assert (left.value.code, out, error) == (2, '', f'python -m program: error: {want}\n')


def run_subcommand(arguments):
    whole = flags.ArgumentParser(prog='python -m tools', description='Tools.')
    commands = whole.add_commands()
    for name in ('draw', 'serve'):
        command = commands.add_parser(name, help=f'to {name}')
        command.add_argument('--port')
        command.set_defaults(run=lambda options, name=name: f'{name} {options.port}')
    options = whole.parse_args(arguments)
    return options.run(options)


def test_without_a_command_the_commands_are_listed_with_status_2(capsys):
    assert run_subcommand(['serve', '--port', '3']) == 'serve 3'
    with pytest.raises(SystemExit) as left:
        run_subcommand([])
    out, error = capsys.readouterr()
    assert (left.value.code, out) == (2, '') and error.startswith('usage: python -m tools ') and 'Tools.' in error
    assert re.search('draw +to draw\n +serve +to serve', error)


def test_an_unknown_flag_of_a_command_is_reported_under_its_name(capsys):
    with pytest.raises(SystemExit) as left:
        run_subcommand(['draw', '--prot', '3'])
    assert left.value.code == 2
    assert capsys.readouterr().err == ('python -m tools draw: error: unrecognized arguments: --prot 3; did you mean --port? '
                                       'See --help\n')


@pytest.mark.parametrize('typed, near', [('dras', 'draw'), ('Server', 'serve'), ('unrelated', None)])
def test_an_unknown_command_is_reported_with_the_nearest_one(typed, near, capsys):
    with pytest.raises(SystemExit) as left:
        run_subcommand([typed])
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.startswith(f"python -m tools: error: COMMAND: invalid choice: '{typed}' (choose")
    assert error.endswith(f'); did you mean {near}? See --help\n' if near else '); see --help\n') and error.count('\n') == 1


def run_program(program, *arguments):
    """-> exit status, standard output, standard error; the output ends with whether numpy was imported."""
    code = ('import runpy, sys\nprogram, *sys.argv[1:] = sys.argv[1:]\n'
            'try:\n    runpy.run_module(program, None, "__main__", True)\nfinally:\n    print("numpy" in sys.modules)')
    done = subprocess.run([sys.executable, '-c', code, program, *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


PACKAGES = {'mnist': ['train', 'resnet'], 'seq2seq': ['train', 'translate', 'evaluate', 'average'],
            'transformer': ['train', 'translate', 'evaluate', 'average', 'from_marian']}
PROGRAMS = [f'{package}.{name}' for package, names in PACKAGES.items() for name in names]
TOOLS = ['pyops', 'pyops.data', 'pyops.inspect']


@pytest.mark.parametrize('program', [*PROGRAMS, *PACKAGES, *TOOLS])
def test_every_program_prints_its_version_without_numpy(program):
    assert run_program(program, '--version') == (0, f'pyops {pyops.__version__}\nFalse\n', '')


@pytest.mark.parametrize('package', PACKAGES)
def test_a_package_of_programs_lists_them(package):
    lines = []
    for arguments, want in ([], 2), (['-e', '3'], 2), (['train'], 2), (['--help'], 0):
        status, out, error = run_program(package, *arguments)
        assert status == want and out.endswith('False\n') and 'Traceback' not in error
        lines.append((error if want else out.removesuffix('False\n')).splitlines())
        assert lines[-1][0] == f'usage: python -m {package}.PROGRAM [FLAGS]' and max(map(len, lines[-1])) <= 80
    assert lines[0] == lines[1] == lines[2] == lines[3]
    modules = [path.stem for path in Path(ROOT, package).glob('*.py') if "__name__ == '__main__'" in path.read_text()]
    assert sorted(modules) == sorted(['__main__', *PACKAGES[package]])          # all programs that there are
    listed = [line.split()[2] for line in lines[0] if line.startswith('  python -m ')]
    assert listed == [f'{package}.{name}' for name in PACKAGES[package]]


@pytest.mark.parametrize('program, words', [
    ('pyops', ['doctor', 'train', 'plan', 'translate', 'evaluate', 'average', 'data', 'gradcheck', 'inspect', 'serve', 'replay',
               'rewind', 'bisect', 'branch', 'bench', 'exercises', 'export', 'version', 'completion']),
    ('pyops.data', ['list', 'get', 'pack']),
    ('pyops.inspect', ['draw', 'serve', 'compare', 'products', 'runs', 'export', 'sensitivity'])])
def test_a_tool_without_a_command_lists_its_commands(program, words):
    status, out, error = run_program(program)
    assert (status, out) == (2, 'False\n') and error.startswith('usage: python -m ')
    assert [line.split()[0] for line in error.splitlines() if re.match(' {4}[a-z]', line)] == words


def test_inspect_is_a_program_and_a_command():
    assert run_program('pyops.inspect', 'draw', '--help') == run_program('pyops', 'inspect', 'draw', '--help')


def test_every_program_of_training_refuses_abbreviated_flags(capsys):
    without = 'from_marian', 'average'          # they have no --threads
    for program in (program for program in PROGRAMS if not program.endswith(without)):
        required = ['-c', 'x'] if program.endswith(('translate', 'evaluate')) else []
        with pytest.raises(SystemExit):
            importlib.import_module(program).parser().parse_args([*required, '--thread', '1'])
        assert re.search(r'error: unrecognized arguments: --thread( 1)?; did you mean --threads\? See', capsys.readouterr().err)


@pytest.mark.parametrize('name, problem', [('no/such/file', 'No such file or directory'), ('folder', 'Is a directory'),
                                           ('/proc/1/x', '.*')])
def test_an_output_that_cannot_be_written_is_refused_when_flags_are_read(name, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir('folder')
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        flags.output_file(name)
    assert re.fullmatch(rf'{name}: cannot be written \({problem}\); name a file in a folder that exists', str(refused.value))
    assert os.listdir() == ['folder']


def test_an_output_that_can_be_written_is_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'there').write_text('precious')
    os.symlink('new target', 'link')
    os.mkfifo('pipe')                                       # opened, it would wait for a reader
    for name in ('there', 'new', 'link', 'pipe', os.devnull):
        assert flags.output_file(name) == name
    assert sorted(os.listdir()) == ['link', 'pipe', 'there'] and (tmp_path / 'there').read_text() == 'precious'
    with pytest.raises(argparse.ArgumentTypeError, match="expected the name of a file, got ''"):
        flags.output_file('')


def test_two_processes_may_check_the_same_output_file(tmp_path, monkeypatch):
    unlink = os.unlink

    def deleted_by_both(path):
        unlink(path)
        unlink(path)
    monkeypatch.setattr(flags.os, 'unlink', deleted_by_both)
    name = str(tmp_path / 'trace.json')
    assert flags.output_file(name) == name and not os.path.exists(name)


def test_good_flags():
    flags = parser().parse_args(['-e', '0', '-b', '128', '-l', '5e-3', '--dropout=.2', '-g', '0'])
    assert vars(flags) == {'epochs': 0, 'batch_size': 128, 'lr': 0.005, 'dropout': 0.2, 'gain': 0.0}
    assert type(flags.epochs) is int and parser().parse_args([]).epochs == 50
