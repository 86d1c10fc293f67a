"""`python -m pyops`: the doctor, and the programs that it starts."""
import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from pyops import PRECISIONS, __version__, doctor, exact, examples
from pyops import __main__ as command_line
from pyops.__main__ import PROGRAMS, main
from pyops.backend.library import ABI_VERSION
from pyops.data import locate
from pyops.distributed import __main__ as distributed
from pyops.errors import UserError
from pyops.ops import elementwise


def outcome(*arguments, **environment):
    return subprocess.run([sys.executable, '-m', 'pyops', *arguments], cwd=ROOT, env=os.environ | environment, text=True,
                          capture_output=True)


# ---- doctor ----------------------------------------------------------------------------------------------------------

def test_the_doctor_describes_the_machine_and_finds_all_kernels_right(tmp_path):
    done = outcome('doctor', '--json', PYOPS_DATA=str(tmp_path), PYOPS_SERVE_TOKEN='a secret')
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert found['is_right'] and found['self-test']['gradients'].startswith('right for all')
    software = found['software']
    assert software['pyops'].startswith(__version__) and software['numpy'] == importlib.metadata.version('numpy')
    assert found['environment']['PYOPS_DATA'] == str(tmp_path) and 'a secret' not in done.stdout
    assert {name: text.startswith('not found; get it with: python -m pyops.data get') for name, text in found['data'].items()
            } == dict.fromkeys(locate.FILES, True)


def test_the_report_is_readable_and_wrong_kernels_give_status_1(capsys, monkeypatch):
    monkeypatch.setattr(elementwise.Tanh, 'backward', lambda dy, y: dy)
    monkeypatch.setattr('pyops.differences.every_op', lambda: [elementwise.Tanh, elementwise.Add])
    with pytest.raises(SystemExit) as left:
        main(['doctor'])
    lines = capsys.readouterr().out.splitlines()
    assert left.value.code == 1
    assert [line for line in lines if not line.startswith(' ')] == ['software:', 'environment:', 'machine:', 'data:', 'extras:',
                                                                    'self-test:']
    assert '  gradients       WRONG: Tanh' in lines and lines[-2].startswith('  matrix product  right, error ')
    assert re.match(r'  exact weights   (right, [0-9a-f]{16} after 100 steps|none, )', lines[-1])


@pytest.mark.skipif(platform.machine() != 'x86_64', reason='exact kernels need x86-64: run on a machine that has it')
def test_weights_other_than_those_of_every_machine_give_status_1(capsys, monkeypatch):
    monkeypatch.setattr('pyops.differences.every_op', lambda: [elementwise.Add])
    monkeypatch.setattr(exact, 'EXPECTED', 'a' * 16)
    with pytest.raises(SystemExit) as left:
        main(['doctor'])
    assert left.value.code == 1
    assert re.search(r'  exact weights   WRONG, [0-9a-f]{16} after 100 steps, expected a{16}\n$', capsys.readouterr().out)


def test_the_extras_are_those_of_pyproject_and_a_missing_or_old_package_has_a_remedy(monkeypatch):
    tomllib = pytest.importorskip('tomllib')
    declared = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
    assert set(doctor.extras()) == {name for name, texts in declared.items() if not any('pyops[' in text for text in texts)}
    monkeypatch.setattr(doctor, '_version', {'matplotlib': '3.8.1', 'plotly': '5.9.0'}.get)
    section = doctor.extras()
    remedy = section['pictures'].removeprefix('plotly 5.9.0; install with: ')
    assert shlex.split(remedy) == [sys.executable, '-m', 'pip', 'install', '-e', f'{ROOT}[pictures]']
    assert section['torch'].startswith('torch missing; ')


def test_a_bad_data_folder_does_not_hide_the_rest_of_the_report(monkeypatch):
    monkeypatch.setenv('PYOPS_DATA', '/nowhere')
    section = doctor.data_sets()
    assert section.keys() == set(locate.FILES)
    assert all(text.startswith('not searched: PYOPS_DATA=/nowhere: no such directory; ') for text in section.values())


def test_without_its_library_the_doctor_says_how_to_build_it():
    done = outcome('doctor', PYOPS_LIBRARY='/nowhere.so')
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith('pyops: error: /nowhere.so: the kernel library is not built; run `make`')


# ---- version and completion ------------------------------------------------------------------------------------------

def test_the_versions_are_printed_as_text_and_as_json():
    assert outcome('version').stdout == f'pyops {__version__}, ABI {ABI_VERSION}, Python {platform.python_version()}\n'
    assert json.loads(outcome('version', '--json').stdout) == {
        'pyops': __version__, 'abi': ABI_VERSION, 'python': platform.python_version()}


# The arguments are the words of a command line; the last one is completed.
BASH = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _pyops; printf "%s\\n" "${COMPREPLY[@]}"'
# compadd only exists while zsh completes
ZSH = """compadd() {
    local word
    for word in "${@[2,-1]}"; do [[ $word == $words[CURRENT]* ]] && print -r -- "$word"; done
    true
}
_files() { true }
words=("$@"); CURRENT=$#; _pyops"""


@pytest.mark.parametrize('shell, start, program', [('bash', 'true', BASH), ('zsh', 'compdef() { true }', ZSH)],
                         ids=['bash', 'zsh'])
def test_the_shell_completes_commands_programs_flags_and_values(shell, start, program):
    if not shutil.which(shell):
        pytest.skip(f'{shell} is not installed: apt install {shell}')
    script = outcome('completion', shell).stdout

    def completions(*words):
        done = subprocess.run([shell, '-c', f'{start}\n{script}\n{program}', shell, 'pyops', *words], capture_output=True,
                              text=True)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout.split()
    assert {'doctor', 'train', 'completion'} <= set(completions(''))
    assert completions('tr') == ['train', 'translate']
    assert completions('train', 'm') == ['mnist'] and completions('evaluate', '') == [
        'seq2seq', 'transformer', '--help', '--version']
    assert completions('train', 'mnist', '--ep') == ['--epochs']
    assert completions('train', 'seq2seq', '-e', '3', '--bid') == ['--bidirectional']
    assert completions('translate', 'seq2seq', '-c', 'ckpt', '--precision', '') == list(PRECISIONS)
    assert completions('data', 'g') == ['get'] and completions('data', 'get', '--mi') == ['--mirror']
    assert completions('exercises', 'start', 'relu') == ['relu', 'relu-c']
    assert completions('serve', 'no-such-') == []                       # the shell completes file names


# ---- programs --------------------------------------------------------------------------------------------------------

def test_it_starts_every_program_with_its_flags(capsys, monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['pyops'])          # its arguments are changed
    for name, program in PROGRAMS.items():
        for package in program.packages:
            with pytest.raises(SystemExit) as left:
                main([name, package, '--help'])
            assert left.value.code == 0 and f'usage: python -m {package}.{program.name} ' in capsys.readouterr().out
    assert {path.parent.name for path in ROOT.glob('*/train.py')} - {'bench'} == set(PROGRAMS['train'].packages)


@pytest.mark.parametrize('arguments, status, text', [
    (['data', 'list'], 0, 'fra-eng: '),
    (['plan', 'mnist', '--embedded'], 0, 'saved by reuse'),
    (['plan', 'mnist', '--dot'], 2, 'mnist.train: error: --dot: expected one argument'),
    (['bench', 'table', '--check'], 2, "pyops bench: error: NAME: invalid choice: 'table' (choose from "),
    (['bench', 'floor', '--share', 'x'], 2, 'bench.floor: error: --share: expected a number'),
    (['data', 'get', 'nothing'], 2, 'pyops.data: error: data set nothing: no such data set'),
    (['train', 'mnist', '-e', 'many'], 2, 'mnist.train: error: -e/--epochs: expected a whole number >= 0, got many'),
    (['train', 'nothing'], 2, "pyops train: error: PROGRAM: invalid choice: 'nothing' (choose from "),
    (['train'], 2, 'pyops train: error: the following arguments are required: PROGRAM')])
def test_errors_are_those_of_the_program(arguments, status, text):
    done = outcome(*arguments)
    assert done.returncode == status and text in done.stdout + done.stderr
    assert status == 0 or (not done.stdout and done.stderr.count('\n') == 1)


def test_an_installed_package_has_no_measurements(monkeypatch, tmp_path):
    monkeypatch.setattr(command_line, '__file__', str(tmp_path / 'pyops/__main__.py'))
    with pytest.raises(UserError, match=r'^bench: measurements are no part of an installed package; run them in a copy of the'):
        command_line.run(['bench', 'kernels'])


# ---- examples of --help ----------------------------------------------------------------------------------------------

def leaves(parser):
    """Yield each parser without subcommands."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for command in action.choices.values():
            yield from leaves(command)


def test_every_command_shows_examples_that_it_accepts():
    from mnist import resnet  # not at the top: another test runs the programs as modules
    from transformer import from_marian
    known = set()
    parsers = [command_line.parser(), *command_line.parsers_of_programs().values(), distributed.parser(), resnet.parser(),
               from_marian.parser()]
    for parser in itertools.chain.from_iterable(map(leaves, parsers)):
        if parser.prog.endswith('pyops data'):              # it has commands of its own
            continue
        shown = parser.format_help().partition('\nexamples:\n')[2]
        found = examples.of(parser.prog, parser.docstring)
        assert found and shown.count('\n') == len(found), parser.prog
        known.add(parser.prog.split('pyops', 1)[-1].lstrip(' .'))
        for arguments, _ in found:
            assert f'  {parser.prog} {arguments}'.rstrip() in shown
            words = shlex.split(arguments.partition('<')[0])
            options = parser.parse_args(words)              # exits if it does not accept them
            if getattr(options, 'program', None) in ('mnist', 'seq2seq', 'transformer'):
                command_line.parsers_of_programs()[f'{parser.prog.split()[-1]} {options.program}'].parse_args(options.flags)
    assert set(examples.COMMANDS) <= known                  # none of a command that is gone
