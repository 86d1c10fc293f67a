"""`make buggify` and `make schedules` run tests once for each seed and count those that fail."""
import subprocess

import pytest

from pyops.errors import UserError
from scripts import seeds

REPORT = '<testsuites><testsuite tests="7" skipped="2" failures="{}" errors="{}"><testcase/></testsuite></testsuites>'


@pytest.fixture
def runs(monkeypatch):
    """The (environment, arguments) of the runs of pytest, which fail once with seed 5 and without a report with seed 6."""
    found = []

    def run(command, cwd, env):
        found.append((env, command))
        seed = env['PYOPS_SCHEDULE']
        path = next(word.partition('=')[2] for word in command if word.startswith('--junitxml='))
        if seed != '6':
            with open(path, 'w') as file:
                file.write(REPORT.format(int(seed == '5'), 0))
        return subprocess.CompletedProcess(command, 2 if seed == '6' else int(seed == '5'))
    monkeypatch.setattr(subprocess, 'run', run)
    return found


@pytest.mark.parametrize('given, status, text', [
    (['3'], 0, '5 tests with seed 3: 0 failed.'),
    (['3', '5', '4'], 1, '5 tests with seeds 3, 5, 4: 1 with seed 5 failed.')])
def test_tests_run_once_for_each_seed_and_a_failure_is_counted(runs, capsys, given, status, text):
    assert seeds.main(['schedules', *given, '--pytest', '-k', 'not torch', 'tests/ops']) == status
    assert capsys.readouterr().out == f'{text}\n'
    assert [env['PYOPS_SCHEDULE'] for env, _ in runs] == given
    assert all(env['PYOPS_BUGGIFY'] == '0' and command[-3:] == ['-k', 'not torch', 'tests/ops'] for env, command in runs)


def test_errors_before_the_tests_are_no_result(runs):
    with pytest.raises(UserError, match='pytest ended with status 2 before its tests did'):
        seeds.main(['schedules', '3', '6', '--pytest', 'tests/ops'])


def test_skipped_tests_do_not_count_and_errors_do(tmp_path):
    path = tmp_path / 'report.xml'
    path.write_text(REPORT.format(2, 1))
    assert seeds.counts(path) == (5, 3)
    assert seeds.text_of({0: (5, 0), 1: (7, 3)}) == '5 to 7 tests with seeds 0, 1: 3 with seed 1 failed.\n'
