"""Changes of C sources are drawn, compiled and judged as `make source-mutants` states; that command tries hundreds."""
import collections
import fnmatch
import os
import re
import signal
import time
import types

import pytest
import source_mutants
from places import on_the_cpu
from source_mutants import Mutation, Result, mutations_of

from scripts.coverage import REASONS
from scripts.source_mutants import ELSEWHERE, EQUIVALENT, barrier_text, table

pytestmark = on_the_cpu
REQUIRE = 'REQUIRE(n >= 0, "n=%d, expected a + b", n + 1);'
TEXT = '''/* a < b + 1 */
#include <a+b.h>
static void scale(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        if (x[i] > 1.5f) continue;
        y[i] += 2 * x[i];
    }
    REQUIRE(n >= 0, "n=%d, expected a + b", n + 1);
}
'''


TEXT_OF_REGION = '''    #pragma omp parallel
    {
        #pragma omp barrier /* why */
        #pragma omp for schedule(static)
        for (int i = 0; i < n; i++) {
            y[i] = 0;
        }
        #pragma omp for nowait
        for (int i = 0; i < n; i++) x[i] = 0;
        #pragma omp single
        f();
        #pragma omp for
        for (int i = 0; i < n; i++)
            for (int j = 0; j < n; j++) z[i] = 0;
    }
'''


def changes(kind):
    return {(m.old.strip(), m.new.strip()) for m in mutations_of('some.c', TEXT) if m.kind == kind}


@pytest.mark.parametrize('kind,expected', [
    ('relation', {('<', '<='), ('>', '>='), ('>=', '>')}),
    ('arithmetic', {('*', '+')}),
    ('assignment', {('+=', '='), ('+=', '-=')}),
    ('bound', {('', '- 1'), ('', '+ 1')}),
    ('constant', {('0', '1'), ('2', '1'), ('2', '3'), ('1.5', '1.525')}),
    ('condition', {('x[i] > 1.5f', '1 || (x[i] > 1.5f)'), ('x[i] > 1.5f', '0 && (x[i] > 1.5f)')}),
    ('statement', {('continue;', ';'), ('y[i] += 2 * x[i];', ';'), (REQUIRE, ';')})])
def test_each_kind_of_change_is_found_and_comments_and_messages_stay(kind, expected):
    assert changes(kind) == expected


def test_a_change_replaces_only_its_own_characters_and_knows_its_line():
    for mutation in mutations_of('some.c', TEXT):
        changed = mutation.applied(TEXT)
        assert changed != TEXT and changed[:mutation.start] == TEXT[:mutation.start]
        assert changed[mutation.start + len(mutation.new):] == TEXT[mutation.end:]
        assert mutation.line == TEXT.count('\n', 0, mutation.start) + 1


def test_another_index_is_one_of_a_loop_around_the_line():
    text = 'void f(void) {\n    for (int i = 0; i < n; i++)\n        for (int j = 0; j < n; j++)\n            y[i] = x[j];\n}\n'
    assert [(m.old, m.new) for m in mutations_of('a.c', text) if m.kind == 'index'] == [('i', 'j'), ('j', 'i')]


def test_lines_that_change_only_the_time_are_left_out():
    assert mutations_of('a.c', '    if (n > PYOPS_SHARE_FLOATS) x = 1;\n') == []
    assert mutations_of('a.c', '    if (n > MOST) x = 1;\n') != []
    sizes = ('int64_t pyops_some_work(int64_t n) { return n + 1; }\n', 'int64_t pyops_some_work(int64_t n,\n'
             '                        int64_t m) {\n    return n + m;\n}\n')
    after = 'void f(int64_t n) {\n    x[n + 1] = 2 * n;\n}\n'
    for text in sizes:
        assert mutations_of('a.c', text) == []
        assert {m.line for m in mutations_of('a.c', text + after)} == {text.count('\n') + 2}


def test_real_sources_have_changes_of_every_kind():
    texts = {path.name: path.read_text() for path in (source_mutants.ROOT / 'csrc').glob('*.c')}
    kinds = collections.Counter(m.kind for name, text in texts.items() for m in mutations_of(name, text))
    assert set(kinds) == set(source_mutants.KINDS) - {'barrier'} and min(kinds.values()) > 20


@pytest.mark.parametrize('behaviour,expected', [
    (lambda name: True, ('survives', 'c')),
    (lambda name: name != 'b', ('test', 'b')),
    (lambda name: os.kill(os.getpid(), signal.SIGSEGV), ('crash', 'a')),
    (lambda name: name == 'a' or time.sleep(60), ('time', 'b'))], ids=['passes', 'fails', 'crashes', 'waits'])
def test_the_outcome_of_tests_in_a_child_process(monkeypatch, behaviour, expected):
    monkeypatch.setattr(source_mutants, '_passes', behaviour)
    monkeypatch.setattr(source_mutants, 'PATIENCE', 0.3)
    names = ['a', 'b', 'c']
    assert source_mutants.outcome({n: n for n in names}, names, dict.fromkeys(names, 0.001), lambda: None) == expected


def test_tests_of_a_line_are_those_that_reach_its_function_and_cheap_ones_come_first(tmp_path):
    path = tmp_path / 'reach.json'
    path.write_text('{"functions": [["a.c", 3], ["a.c", 9]], "tests": {"t[slow]": [2.0, [["a.c", 3]]], '
                    '"t[quick]": [0.1, [["a.c", 3]]], "u": [0.2, [["a.c", 3], ["a.c", 9]]]}}')
    reach = source_mutants.Reach(path)

    def at(line, text='\n' * 20):
        return reach.of(Mutation('a.c', line, 0, 0, '', '', 'constant'), text)
    assert at(4) == ['t[quick]', 'u', 't[slow]'] and at(12) == ['u']
    assert set(at(2, '#define A \\\n 1 + 2\n')) == {'t[quick]', 'u', 't[slow]'}     # a macro may be used by any function


def test_parameters_of_a_test_function_are_spread_evenly():
    class Item:
        def __init__(self, nodeid):
            self.nodeid = nodeid
    items = [Item(f'a[{i}]') for i in range(100)] + [Item('b')]
    first, rest = source_mutants.spread(items, 4)
    assert [item.nodeid for item in first] == ['a[0]', 'a[25]', 'a[50]', 'a[75]', 'b']
    assert {*first, *rest} == {*items} and len(first) + len(rest) == len(items)


def test_other_parameters_of_the_same_functions_come_with_the_same_row_first():
    names = ['t::a[gru-1]', 't::a[norm-1]', 't::a[gru-2]', 't::b[gru-1]']
    assert source_mutants.others(names, ['t::a[gru-1]']) == ['t::a[gru-2]', 't::a[norm-1]']


def test_explicit_barriers_and_those_of_loops_are_found():
    class Build:
        def texts(self):
            return {'a.c': TEXT_OF_REGION}
    assert [m.applied(TEXT_OF_REGION).splitlines()[m.line - 1] for m in source_mutants.barriers(Build())] == [
        ' /* why */', '        #pragma omp for schedule(static) nowait', '        #pragma omp single nowait']


def test_each_rule_about_survivors_and_branches_fits_a_line_of_today():
    sources = {str(path.relative_to(source_mutants.ROOT / 'csrc')): path.read_text().splitlines()
               for path in (source_mutants.ROOT / 'csrc').rglob('*.*')}
    for file, part, _, reason in EQUIVALENT + ELSEWHERE:
        assert any(part in line for name in fnmatch.filter(sources, file) for line in sources[name]), (file, part, reason)
    for files, part, reason in REASONS:
        assert any(re.search(part, line.strip()) for name in sources if re.match(files, name) for line in sources[name]), reason


def result_of(file, part, old, new, outcome):
    """The Result of a change of the first line of a file with a part."""
    lines = (source_mutants.ROOT / 'csrc' / file).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if part in text)
    return Result(Mutation(file, line, 0, 1, old, new, 'constant'), outcome)


def test_survivors_that_change_no_result_are_not_counted_against_the_tests():
    results = [result_of('rnn.c', 'if (p.whole) continue;', 'p.whole', 'x', 'survives'),
               result_of('linear_cross_entropy.c', 'failed', '0', '1', 'survives'),
               result_of('rnn.c', 'pyops_rnn_forward(', '0', '1', 'unreached'),
               *(result_of('gemm.c', 'bias_only', '0', str(new), 'test') for new in range(5)),
               result_of('gru.c', 'clear_rest', '0', '1', 'crash'), result_of('gru.c', 'multiply', '0', '1', 'invalid')]
    text = table(types.SimpleNamespace(seed=1, isa='avx2'), 3, {result.mutation: result for result in results}, 1000)
    words = ' '.join(text.split())
    assert '10 of 1000 possible changes (seed 1) of 3 files, on avx2: 0 give equal object code, 1 do not compile.' in words
    assert 'Of the other 9, 6 are killed: 5 by a test, 1 by a crash, 0 by the limit of time.' in words
    assert '3 survive, 1 of which alter no result; 1 are in functions that no recorded test runs.' in words
    assert 'So 66.7% of all are killed, and 75.0% of those that can alter a result.' in words
    parts = 'alter no result:', 'copies of rows', 'do not have:', 'without memory', 'without an explanation:', 'csrc/rnn.c:'
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    assert max(map(len, text.splitlines())) <= 128


def test_barriers_that_no_test_misses_are_listed_with_their_reason():
    kept = result_of('linear_cross_entropy.c', 'reads the same `failed`', '#pragma omp barrier', '', 'survives')
    found = [result_of('rnn.c', '#pragma omp barrier', '#pragma omp barrier', '', outcome) for outcome in ('test', 'invalid')]
    results = {number: result for number, result in enumerate([kept, found[0]])}
    assert barrier_text(results, 5).startswith('1 of 2 removed barriers are found; there are 5.\n\n- `linear_cross_entropy.c:')
    assert barrier_text(results, 2).startswith('1 of 2 removed barriers are found; these are all.\n')
    assert 'without memory' in barrier_text(results, 2) and 'not explained' in barrier_text({0: found[1]}, 1)
