"""The flag --exact of the programs: equal runs on every instruction set, and runs that are resumed with another setting."""
import platform
import subprocess
import sys

import pytest
from backends import cpu_has
from conftest import ROOT, environment_without
from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER, assert_same_training, newest

from pyops.backend import HOST
from pyops.errors import UserError
from seq2seq import train as seq2seq
from transformer import train as transformer

pytestmark = pytest.mark.skipif(platform.machine() != 'x86_64', reason='--exact needs x86-64: run on a machine that has it')
BEST = next(isa for isa in ('avx512', 'avx2', 'generic') if cpu_has(isa))
needs_two = pytest.mark.skipif(BEST == 'generic', reason='compares two instruction sets: run on a CPU with AVX2')
TINY = {'seq2seq': TINY_SEQ2SEQ, 'transformer': TINY_TRANSFORMER}


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.delenv('PYOPS_EXACT', raising=False)
    yield
    HOST.exact = False
    HOST.precision = 'fp32'


def run(program, *flags, isa):
    """Return the output of a program on an instruction set."""
    clean = environment_without('PYOPS_LIBRARY', 'PYOPS_BACKEND', 'PYOPS_EXACT', PYOPS_ISA=isa)
    done = subprocess.run([sys.executable, '-m', f'{program}.train', *flags], cwd=ROOT, env=clean, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_two
@pytest.mark.parametrize('program,more', [
    ('seq2seq', ['--layers', '2', '--attention', '2']),
    ('transformer', ['--preset', 'base', '--layers', '1', '--num-steps', '12', '--warmup', '7'])])
def test_a_translator_trains_the_same_bits_on_two_instruction_sets(program, more, tmp_path):
    flags = '-e', '12', *TINY[program], *more
    for isa in ('generic', BEST):
        run(program, '--exact', '-c', str(tmp_path / isa), *flags, isa=isa)
    assert newest(tmp_path / BEST)[1]['settings']['exact'] is True
    assert_same_training(newest(tmp_path / 'generic'), newest(tmp_path / BEST))
    run(program, '-c', str(tmp_path / 'default'), *flags, isa=BEST)
    with pytest.raises(AssertionError):
        assert_same_training(newest(tmp_path / 'generic'), newest(tmp_path / 'default'))


@needs_two
def test_digits_are_learned_with_the_same_loss_on_two_instruction_sets():
    flags = '-e', '2', '--embedded', '--quiet'
    lines = {(isa, exact): [line for line in run('mnist', *flags, *exact, isa=isa).splitlines() if 'loss' in line]
             for isa in ('generic', BEST) for exact in ((), ('--exact',))}
    assert len(lines['generic', ('--exact',)]) == 2 and lines['generic', ('--exact',)] == lines[BEST, ('--exact',)]


@pytest.mark.parametrize('program', [seq2seq, transformer], ids=['seq2seq', 'transformer'])
def test_a_resumed_run_stays_exact_unless_a_flag_says_otherwise(program, tmp_path, capsys):
    flags = ['-c', str(tmp_path), *TINY[program.__name__.partition('.')[0]]]
    program.main(['-e', '1', '--exact', *flags])
    assert HOST.exact and newest(tmp_path)[1]['settings']['exact'] is True
    program.main(['-e', '2', *flags])
    assert HOST.exact and 'was trained with' not in capsys.readouterr().out
    with pytest.raises(UserError, match=r'was trained with --exact; --exact: expected --precision fp32, got bf16; give that, '
                                        r'or --no-exact$'):
        program.main(['-e', '3', '--precision', 'bf16', *flags])
    program.main(['-e', '3', '--no-exact', *flags])
    assert not HOST.exact and newest(tmp_path)[1]['settings']['exact'] is False
    assert 'was trained with --exact, and is now trained without it\n' in capsys.readouterr().out
    program.main(['-e', '4', '--exact', *flags])
    assert 'was trained without --exact, and is now trained with it\n' in capsys.readouterr().out


def test_the_variable_is_the_default_of_the_flag(tmp_path, monkeypatch):
    monkeypatch.setenv('PYOPS_EXACT', '1')
    for more, want in ([], True), (['--no-exact'], False):
        transformer.main(['-e', '1', '--max-steps', '1', '-c', str(tmp_path / f'{want}'), *TINY_TRANSFORMER, *more])
        assert HOST.exact is want and newest(tmp_path / f'{want}')[1]['settings']['exact'] is want
