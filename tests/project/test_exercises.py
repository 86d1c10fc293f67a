"""python -m pyops exercises: the source of every op passes its exercise; the blank file and wrong gradients fail."""
import json
import shutil

import pytest
from conftest import ROOT

from pyops import exercises
from pyops.__main__ import main
from pyops.exercises import EXERCISES, checks_of, text_of

IN_PYTHON = [name for name, exercise in EXERCISES.items() if not exercise.kernels]
IN_C = [name for name, exercise in EXERCISES.items() if exercise.suffix == '.c']
has_compiler = pytest.mark.skipif(not any(map(shutil.which, ('gcc', 'clang', 'cc'))), reason='compiles C: install gcc or clang')

# The library's kernels need the rest of the library; these are plain loops.
SOLUTIONS = {
    'relu-c': ['for (int64_t i = 0; i < n; i++) y[i] = x[i] < 0.0f ? 0.0f : x[i];\n',
               'for (int64_t i = 0; i < n; i++) dx[i] = y[i] > 0.0f ? dy[i] : 0.0f;\n'],
    'softmax-c': ['''
    for (int64_t o = 0; o < outer; o++)
        for (int64_t c = 0; c < inner; c++) {
            const float *from = x + o * n * inner + c;
            float *to = y + o * n * inner + c, top = -INFINITY, sum = 0.0f;
            for (int64_t i = 0; i < n; i++) top = fmaxf(top, from[i * inner]);
            for (int64_t i = 0; i < n; i++) sum += expf(from[i * inner] - top);
            for (int64_t i = 0; i < n; i++) {
                const float d = from[i * inner] - top;
                to[i * inner] = log ? d - logf(sum) : expf(d) / sum;
            }
        }
''', '''
    for (int64_t o = 0; o < outer; o++)
        for (int64_t c = 0; c < inner; c++) {
            const int64_t at = o * n * inner + c;
            float sum = 0.0f;
            for (int64_t i = at; i < at + n * inner; i += inner) sum += log ? dy[i] : dy[i] * y[i];
            for (int64_t i = at; i < at + n * inner; i += inner) dx[i] = log ? dy[i] - expf(y[i]) * sum : y[i] * (dy[i] - sum);
        }
'''],
    'layer_norm-c': ['''
    for (int64_t r = 0; r < R; r++) {
        float sum = 0.0f, square = 0.0f;
        for (int64_t c = 0; c < C; c++) sum += x[r * C + c];
        mean[r] = sum / C;
        for (int64_t c = 0; c < C; c++) square += (x[r * C + c] - mean[r]) * (x[r * C + c] - mean[r]);
        rstd[r] = 1.0f / sqrtf(square / C + eps);
        for (int64_t c = 0; c < C; c++) y[r * C + c] = (x[r * C + c] - mean[r]) * rstd[r] * weight[c] + bias[c];
    }
''', '''
    for (int64_t r = 0; r < R; r++) {
        float a = 0.0f, b = 0.0f;
        for (int64_t i = r * C; i < (r + 1) * C; i++) {
            const float xhat = (x[i] - mean[r]) * rstd[r], g = dy[i] * weight[i - r * C];
            a += g / C;
            b += g * xhat / C;
            dweight[i - r * C] += dy[i] * xhat;
            dbias[i - r * C] += dy[i];
        }
        for (int64_t i = r * C; i < (r + 1) * C; i++) {
            const float xhat = (x[i] - mean[r]) * rstd[r], d = rstd[r] * (dy[i] * weight[i - r * C] - a - xhat * b);
            dx[i] = accumulate ? dx[i] + d : d;
        }
    }
''']}
WRONG = {'relu-c': ('y[i] > 0.0f', 'y[i] >= 0.0f'), 'softmax-c': ('(dy[i] - sum)', '(dy[i] - 1.1f * sum)'),
         'layer_norm-c': ('- xhat * b', '+ xhat * b')}

# appended to a solution: the first gradient of the op is 1 % too large
WRONG_GRADIENT = '''
_right = {op}.backward


def _wrong(*arguments):
    found = _right(*arguments)
    first = found[0] if isinstance(found, tuple) else found
    first *= 1.01
    return found


{op}.backward = _wrong
'''


def c_solution(name):
    text = text_of(name).replace('#include "pyops.h"', '#include <math.h>\n#include "pyops.h"')
    for body in SOLUTIONS[name]:
        text = text.replace('return PYOPS_DEVICE_ERROR;', body + '    return PYOPS_OK;', 1)
    return text


def checked(name, text, folder):
    path = folder / f'attempt{EXERCISES[name].suffix}'
    path.write_text(text)
    found = checks_of(name, path)
    return all(check.passed for check in found), '\n'.join(check.message for check in found)


@pytest.mark.parametrize('name', IN_PYTHON)
def test_the_source_of_an_op_passes_and_a_blank_or_wrong_one_fails(name, tmp_path):
    blank, solution = text_of(name), text_of(name, blank=False)
    assert checked(name, solution, tmp_path) == (True, '\n' * len(exercises.SEEDS))
    passed, message = checked(name, blank, tmp_path)
    assert not passed and message.startswith('not written yet (attempt.py, line ')
    passed, message = checked(name, solution + WRONG_GRADIENT.format(op=exercises._op_of(EXERCISES[name]).__name__), tmp_path)
    assert not passed and 'd x' in message and ', expected ' in message
    assert blank.count('raise NotImplementedError') == 2 and '"""' in blank.split('class ')[1]
    for answer in 'def reference', 'def backward_on_tensors', ' launch(', 'gemm(as_rows':
        assert answer not in blank


@has_compiler
@pytest.mark.parametrize('name', IN_C)
def test_kernels_in_c_pass_and_blank_or_wrong_ones_fail(name, tmp_path):
    solution = c_solution(name)
    assert checked(name, solution, tmp_path) == (True, '\n' * len(exercises.SEEDS))
    passed, message = checked(name, text_of(name), tmp_path)
    assert not passed and '_forward returned 3, expected PYOPS_OK' in message
    right, wrong = WRONG[name]
    assert right in solution
    passed, message = checked(name, solution.replace(right, wrong), tmp_path)
    assert not passed and 'd x' in message
    assert checked('relu', text_of('relu', blank=False), tmp_path)[0]              # the library's kernels are back


@pytest.mark.skipif(not (ROOT / 'build/emulated/cross_entropy.o').exists() or not shutil.which('make'),
                    reason='links the objects of the emulated library: run `make emulated`')
def test_a_file_in_cuda_replaces_the_original_in_the_emulated_library(tmp_path):
    def outcome(text):
        path = tmp_path / 'cross_entropy.cu'
        path.write_text(text)
        found = exercises.kernel_checks_of('cross_entropy-cuda', path)
        return all(check.passed for check in found), '\n'.join(check.message for check in found)
    original, blank = (ROOT / 'cuda/cross_entropy.cu').read_text(), text_of('cross_entropy-cuda')
    assert outcome(original) == (True, '\n' * len(exercises.SEEDS))
    passed, message = outcome(blank)
    assert not passed and 'RuntimeError: cross_entropy_forward: not written yet' in message and '__global__' not in blank
    assert original.count('masked ? 0.0f : factor') == 1
    passed, message = outcome(original.replace('masked ? 0.0f : factor', 'masked ? 0.0f : 1.01f * factor'))
    assert not passed and 'd x' in message
    passed, message = outcome(blank.replace('return pyops_fail', 'return nothing + pyops_fail', 1))
    assert not passed and message.startswith('cross_entropy.cu:') and 'nothing' in message


def test_a_gradient_that_is_overwritten_and_a_changed_dy_are_found(tmp_path):
    wrapped = text_of('linear', blank=False) + '\n_right = Linear.backward\n\n\ndef _wrong(self, dy, ctx):\n    WRONG\n' \
        '    return _right(self, dy, ctx)\n\n\nLinear.backward = _wrong\n'
    passed, message = checked('linear', wrapped.replace('WRONG', 'self.weight.grad[...] = 0'), tmp_path)
    assert not passed and message.strip() == 'weight: backward must add to the gradient of a parameter, not overwrite it'
    passed, message = checked('linear', wrapped.replace('WRONG', 'dy += 0.5'), tmp_path)
    assert not passed and message.endswith('dy: backward must not change it')


def test_errors_in_the_file_are_failed_checks_with_their_line(tmp_path):
    unclosed = "SyntaxError: '(' was never closed (attempt.py, line 2)"
    assert checked('relu', 'class ReLU:\n    x = (\n', tmp_path) == (False, unclosed)
    assert checked('relu', 'pass\n', tmp_path) == (False, 'TypeError: the file has no class ReLU')
    blank = text_of('relu').replace('raise NotImplementedError', 'return undefined', 1)
    line = blank[:blank.index('return undefined')].count('\n') + 1
    assert f"NameError: name 'undefined' is not defined (attempt.py, line {line})" in checked('relu', blank, tmp_path)[1]


@has_compiler
def test_a_compiler_error_and_a_crash_are_failed_checks(tmp_path, capsys):
    blank = text_of('relu-c')
    passed, message = checked('relu-c', blank.replace('return PYOPS_DEVICE_ERROR', 'return nothing', 1), tmp_path)
    assert not passed and 'nothing' in message and '\n' not in message
    (tmp_path / 'relu.c').write_text(blank.replace('return PYOPS_DEVICE_ERROR', '*(volatile int *)0 = 1; return 0', 1))
    with pytest.raises(SystemExit) as left:
        main(['exercises', 'check', 'relu-c', str(tmp_path)])
    assert left.value.code == 1 and 'the kernels crashed: SIGSEGV' in capsys.readouterr().out


def test_the_command_lists_starts_and_checks(tmp_path, capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as left:
            main(['exercises', *map(str, arguments)])
        printed = capsys.readouterr()
        return left.value.code or 0, printed.out, printed.err
    code, out, _ = run('list')
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(EXERCISES)
    folder = tmp_path / 'new'
    code, _, err = run('check', 'relu', folder)
    assert code == 2 and err.endswith(f'there is no such file; write it with: python -m pyops exercises start relu {folder}\n')
    assert run('start', 'relu', folder)[0] == 0 and (folder / 'relu.py').read_text() == text_of('relu')
    code, _, err = run('start', 'relu', folder)
    assert code == 2 and 'relu.py: exists; name another folder, or remove it' in err
    code, out, _ = run('check', 'relu', folder)
    assert code == 1 and out.startswith('WRONG  values and gradients, example 1\n       not written yet (relu.py, line ')
    (folder / 'relu.py').write_text(text_of('relu', blank=False))
    code, out, _ = run('check', 'relu', folder, '--json')
    found = json.loads(out)
    assert code == 0 and found['passed'] and [check['passed'] for check in found['checks']] == [True] * 3
    code, _, err = run('start', 'gelu', folder)
    assert code == 2 and 'gelu' in err
