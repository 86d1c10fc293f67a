"""`make coverage` fails for a new branch that no test takes, unless it has a reason."""
import pytest

from scripts import coverage

PAGE = """- 3: made by the compiler, in `gru.c` (9)
- 5: without a reason, in `gemm.c` (2), `kernels/norm.inc`
  (3)
"""


def test_more_branches_of_a_file_than_the_page_says_are_found():
    assert coverage.more_than(PAGE, {'gemm.c': 2, 'kernels/norm.inc': 1}) == []
    assert coverage.more_than(PAGE, {'kernels/norm.inc': 4, 'gru.c': 1, 'gemm.c': 2}) == [
        ('gru.c', 1, 0), ('kernels/norm.inc', 4, 3)]


def test_a_page_lists_all_branches_without_a_reason(monkeypatch):
    monkeypatch.setattr(coverage, 'reason_of', lambda file, line: 'a reason' if line == 7 else None)
    branches = {(f'kernels/{name}.inc', line, 'f', 0): line % 2 for name in 'abcdefghijkl' for line in range(6)}
    branches |= {('gemm.c', 7, 'f', 0): 0}
    found = coverage.without_reason(branches)
    assert found == {f'kernels/{name}.inc': 3 for name in 'abcdefghijkl'}
    assert coverage.more_than(coverage.table({key[:2]: 1 for key in branches}, branches), found) == []


@pytest.mark.parametrize('count, status', [(2, 0), (3, 1)])
def test_the_command_fails_for_a_new_branch(monkeypatch, tmp_path, capsys, count, status):
    (tmp_path / 'gemm.gcda').touch()
    page = tmp_path / 'page.md'
    page.write_text(f'<!-- coverage -->\n{PAGE}<!-- /coverage -->\n')
    branches = {('gemm.c', line, 'f', 0): 0 for line in range(1, 1 + count)}
    monkeypatch.setattr(coverage, 'ROOT', tmp_path)
    monkeypatch.setattr(coverage, 'PAGE', page)
    monkeypatch.setattr(coverage, 'reason_of', lambda file, line: None)
    monkeypatch.setattr(coverage, 'source', lambda file, line: 'if (n)')
    monkeypatch.setattr(coverage, 'read', lambda counts: ({key[:2]: 1 for key in branches}, branches))
    assert coverage.main([str(tmp_path), '--check']) == status
    assert ('gemm.c: 3 branches are not taken and have no reason, 2 on page.md' in capsys.readouterr().out) == bool(status)
    assert coverage.main([str(tmp_path)]) == 0
