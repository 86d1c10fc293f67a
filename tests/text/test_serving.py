"""The command line of the translators: one line of output for each line of input, and nothing else on standard output."""
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from conftest import ROOT
from pids import children, has_ended, until
from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER

import pyops
from pyops.errors import UserError
from pyops.text import embedded, serving
from pyops.text.translator import Translation
from seq2seq import train as seq2seq_train
from seq2seq import translate as seq2seq_translate
from transformer import train as transformer_train
from transformer import translate as transformer_translate

TEXTS = ['Go now.', '', 'I sleep.', ' \t', 'They are very tired.', 'Tom!']


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """The folder of a checkpoint of a small transformer."""
    folder = tmp_path_factory.mktemp('serving') / 'ckpt'
    transformer_train.main(['-e', '15', '-c', str(folder), *TINY_TRANSFORMER, '-b', '16', '--d-model', '32', '-d', '0'])
    return str(folder)


def run(folder, *flags, data=b'', monkeypatch, capsys, program=transformer_translate):
    """Run a program with `data` on its standard input.  Return lines of standard output, and standard error."""
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BufferedReader(io.BytesIO(data))))
    capsys.readouterr()
    program.main(['-c', folder, *flags])
    out, error = capsys.readouterr()
    assert not out or out.endswith('\n')
    return out.split('\n')[:-1], error


@pytest.fixture
def translate(folder, monkeypatch, capsys):
    return lambda *flags, data=b'': run(folder, *flags, data=data, monkeypatch=monkeypatch, capsys=capsys)


# ---- lines -----------------------------------------------------------------------------------------------------------

def test_there_is_one_line_for_each_line_in_order_and_a_blank_one_for_a_blank_one(folder, translate):
    texts = [text for text, _ in embedded.pairs()[:300:3]]
    texts[5:5] = ['', '  ']
    lines, error = translate(data='\n'.join(texts).encode())                # the last line has no end
    assert lines == pyops.load(folder).translate(texts) and error == ''
    assert lines[5] == lines[6] == '' and len(set(lines)) > 5
    assert translate('--batch-size', '3', data='\n'.join([*texts, '']).encode()) == (lines, '')
    assert translate('--beam', '1', data=b'Go now.\n')[0] == [pyops.load(folder).translate('Go now.', beam=1)]


@pytest.mark.parametrize('data, texts', [
    (b'', []), (b'\n', ['']), (b'\n\n', ['', '']), (b'Go.\r\n\r\nTom!', ['Go.', '', 'Tom!']),
    (b'\xef\xbb\xbfGo.\n', ['Go.']), ('Où ?\x85a\u2028b\n'.encode(), ['Où ?\x85a\u2028b'])])
def test_ends_of_lines(data, texts, folder, translate):
    lines, error = translate('--json', data=data)
    assert [json.loads(line)['source'] for line in lines] == texts and error == ''


@pytest.mark.parametrize('name', ['in.txt', 'in.txt.gz', 'in'])
def test_a_file_may_be_compressed_whatever_its_name(name, translate, tmp_path):
    data = '\n'.join(TEXTS).encode()
    want, _ = translate('-', data=data)
    (tmp_path / name).write_bytes(data if name == 'in.txt' else gzip.compress(data))
    assert translate('-i', str(tmp_path / name)) == (want, '')
    assert translate('-i', '-', data=(tmp_path / name).read_bytes()) == (want, '') and len(want) == len(TEXTS)


def test_files_that_cannot_be_read_are_errors(translate, tmp_path):
    (tmp_path / 'cut.gz').write_bytes(gzip.compress('\n'.join(TEXTS * 99).encode())[:-9])
    for name, text in (('none', 'no such file; give a text, or - for standard input'),
                       ('.', r'cannot be read \(Is a directory\); give another text'),
                       ('cut.gz', r'line \d+: cannot be read \(.*\); get the file again')):
        with pytest.raises(UserError, match=f'^{tmp_path}/{name}: {text}$'):
            translate('-i', f'{tmp_path}/{name}')


def test_a_line_that_is_not_utf8_is_an_error_with_its_number_after_the_lines_before_it(folder, translate, capsys):
    data = b'Go now.\nTom!\ncaf\xe9\nI sleep.\n'
    with pytest.raises(UserError, match=r'^standard input: line 3: not UTF-8 \(byte 0xe9 at position 4\); convert it, or give '
                                        '--skip-bad for a blank line in its place$'):
        translate(data=data)
    want = pyops.load(folder).translate(['Go now.', 'Tom!', '', 'I sleep.'])
    assert capsys.readouterr().out.splitlines() == want[:2]
    assert translate('--skip-bad', data=data) == (
        want, 'warning: standard input: line 3: not UTF-8 (byte 0xe9 at position 4); its translation is blank\n')


def windows(data, most, **flags):
    """The windows that have lines."""
    return list(filter(None, serving.read_windows(io.BufferedReader(io.BytesIO(data)), 'name', most, **flags)))


def test_windows_of_a_file_are_full_and_those_of_a_pipe_have_the_lines_that_are_there(tmp_path, monkeypatch):
    data = ''.join(f'{n}\n' for n in range(10)).encode() + b'x'
    want = [[*map(str, range(first, first + 4))] for first in (0, 4)] + [['8', '9', 'x']]
    monkeypatch.setattr(serving, '_CHUNK', 5)                       # a window has lines of several reads
    assert windows(data, 4) == want == windows(gzip.compress(data), 4) and windows(b'', 4) == []
    for name, content in ('plain', data), ('compressed', gzip.compress(data)):
        (tmp_path / name).write_bytes(content)
        with open(tmp_path / name, 'rb') as file:
            assert list(serving.read_windows(file, 'name', 4)) == want
    reader, writer = os.pipe()
    with open(reader, 'rb') as file, open(writer, 'wb', buffering=0) as pipe:
        found = serving.read_windows(file, 'name', 4)
        for sent, read in ((b'a\nb', ['a']), (b'c\nd\n', ['bc', 'd']), (b'\n', [''])):
            pipe.write(sent)
            assert next(found) == read and next(found) == []        # the next read may wait
        pipe.write(data)
        assert next(found) == want[0]
        pipe.close()
        assert list(found) == want[1:]
    found = serving.read_windows(io.BufferedReader(io.BytesIO(b'a\n\xe9\n')), 'name', 4)
    assert next(found) == ['a'] and next(found) == []               # before the error
    with pytest.raises(UserError, match='^name: line 2: not UTF-8'):
        next(found)


def test_a_writer_that_sends_blocks_fills_windows(monkeypatch):
    """Each block is there before the poll for it ends, which waits for a writer of blocks alone."""
    waits = []

    class Poll:
        def register(self, number, events):
            pass

        def poll(self, milliseconds):
            waits.append(milliseconds)
            if milliseconds and len(waits) < 4:
                os.write(writer, b'a' * 4999 + b'\n')
                return [(reader, 1)]
            return []
    monkeypatch.setattr(serving.select, 'poll', Poll)
    reader, writer = os.pipe()
    with open(reader, 'rb') as file, open(writer, 'wb', buffering=0) as pipe:
        found = serving.read_windows(file, 'name', 100)
        pipe.write(b'b\n')
        assert next(found) == ['b'] and next(found) == [] and waits == [0]
        pipe.write(b'a' * 4999 + b'\n')
        assert next(found) == ['a' * 4999] * 3 and waits == [0, serving._PAUSE, serving._PAUSE, serving._PAUSE]


def test_windows_of_long_lines_have_fewer(monkeypatch):
    monkeypatch.setattr(serving, '_WINDOW', 10)
    assert windows(b'abcdef\n' * 5 + b'a\n' * 3, 4) == [['abcdef'] * 2, ['abcdef'] * 2, ['abcdef', 'a', 'a', 'a']]


def test_a_line_without_end_is_refused_with_its_number_and_not_stored(monkeypatch, capsys):
    """It has 64 MB, which once were copied for each part that was read."""
    class Endless(io.RawIOBase):
        left = 1 << 26

        def readable(self):
            return True

        def readinto(self, buffer):
            size = min(len(buffer), self.left)
            buffer[:size] = b'a' * size
            self.left -= size
            return size
    tracemalloc.start()
    found = list(serving.read_windows(io.BufferedReader(Endless()), 'name', 4, skip_bad=True))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [['']] and peak < 1 << 22
    line = f'name: line 1: longer than {1 << 20} bytes; '
    assert capsys.readouterr().err == f'warning: {line}its translation is blank\n'
    monkeypatch.setattr(serving, '_LONGEST', 5)
    assert windows(b'abcde\nabcdef\nabc', 4, skip_bad=True) == [['abcde', '', 'abc']]
    with pytest.raises(UserError, match='^name: line 3: longer than 5 bytes; divide it into sentences, or give --skip-bad for '
                                        'a blank line in its place$'):
        windows(b'abcde\n\nabcdef\nabc', 4)


def test_lines_that_are_too_long_are_named_the_first_ten_of_them(translate):
    lines, error = translate(data=('Go.\n' + 'tom ' * 10_000 + '\n' + 'a b c d e f g h i j\n' * 15).encode())
    warnings = error.splitlines()
    assert len(lines) == 17 and len(warnings) == 11 and warnings[-1] == 'warning: 6 more lines are too long'
    assert warnings[0].startswith('warning: line 2: too long, only the first 9 of 10001 tokens, end mark included, are read: ')
    assert translate(*['a b c d e f g h i j'] * 12)[1].splitlines()[-1] == 'warning: 2 more lines are too long'
    assert warnings[1] == ('warning: line 3: too long, only the first 9 of 11 tokens, end mark included, are read: '
                           "'a b c d e f g h i j'")


# ---- forms -----------------------------------------------------------------------------------------------------------

def test_scores_and_n_best_lists_have_the_form_of_marian(folder, translate):
    data = '\n'.join(TEXTS).encode()
    results = pyops.load(folder).translations(TEXTS, beam=4, nbest=3)
    lines, _ = translate('--beam', '4', '--nbest', '3', data=data)
    assert lines == [f'{i} ||| {one.text} ||| {one.score:.4f}' for i, some in enumerate(results) for one in some]
    assert len(lines) == 4 * 3 + 2 and lines[3] == '1 |||  ||| 0.0000'
    lines, _ = translate('--beam', '4', '--scores', data=data)
    best = pyops.load(folder).translations(TEXTS, beam=4)
    assert lines == [f'{one.text} ||| {one.score:.4f}' for one, in best]
    assert translate('--max-len', '2', 'Go now.')[0] == [pyops.load(folder).translate('Go now.', max_len=2)]


def test_alignments_name_the_source_token_of_each_output_token(folder, translate):
    ((found,),) = pyops.load(folder).translations(['They are very tired.'], alignments=True)
    pairs = ' '.join(f'{int(weights.argmax())}-{i}' for i, weights in enumerate(found.alignment))
    assert translate('--alignments', 'They are very tired.', '')[0] == [f'{found.text} ||| {pairs}', ' ||| ']
    lines, _ = translate('--alignments', '--scores', 'They are very tired.')
    assert lines == [f'{found.text} ||| {pairs} ||| {found.score:.4f}']


def test_json_has_an_object_for_each_line(folder, translate):
    data = '\n'.join([*TEXTS, 'Qwerty ' * 12]).encode()
    results = pyops.load(folder).translations([*TEXTS, 'Qwerty ' * 12], nbest=2, alignments=True)
    for flags, keys in (([], {'text', 'score', 'tokens'}), (['--alignments'], {'text', 'score', 'tokens', 'alignment'})):
        lines, _ = translate('--json', '--nbest', '2', *flags, data=data)
        objects = [json.loads(line) for line in lines]
        assert [some['source'] for some in objects] == [*TEXTS, 'Qwerty ' * 12]
        for some, found in zip(objects, results, strict=True):
            first = found[0]
            assert (some['tokens'], some['cut'], some['unknown']) == (first.source, first.cut, list(first.unknown))
            for one, want in zip(some['translations'], found, strict=True):
                assert set(one) == keys and one['text'] == want.text and one['tokens'] == want.tokens
                assert one['score'] == round(want.score, 6)
                rows = [[round(float(x), 4) for x in row] for row in want.alignment]
                assert one.get('alignment', rows) == rows
    assert objects[-1]['unknown'] == ['qwerty'] and objects[-1]['cut'] == 4 and objects[1]['translations'][0]['text'] == ''


@pytest.mark.parametrize('score', [-np.inf, np.nan])
def test_json_of_a_model_that_diverged_has_null_for_numbers_that_are_not_finite(score):
    found = Translation('Va.', score, ['go', '.'], ['va', '.'], alignment=np.full((2, 2), np.nan, 'f'))

    def constant(name):
        raise AssertionError(name)
    (one,) = json.loads(serving.as_json('Go.', [found]), parse_constant=constant)['translations']
    assert one == dict(text='Va.', score=None, tokens=['va', '.'], alignment=[[None] * 2] * 2)


def test_seq2seq_without_attention_refuses_alignments(tmp_path, monkeypatch, capsys):
    flags = dict(monkeypatch=monkeypatch, capsys=capsys, program=seq2seq_translate)
    seq2seq_train.main(['-e', '1', '-c', str(tmp_path / 'plain'), *TINY_SEQ2SEQ])
    with pytest.raises(UserError, match='--alignments: .* has no attention; leave it out, or train seq2seq with --attention 1'):
        run(str(tmp_path / 'plain'), '--alignments', 'Go.', **flags)
    seq2seq_train.main(['-e', '1', '-c', str(tmp_path / 'attention'), *TINY_SEQ2SEQ, '--attention', '1'])
    (line,), _ = run(str(tmp_path / 'attention'), '--alignments', 'Go.', **flags)
    assert len(line.split(' ||| ')) == 2


@pytest.mark.parametrize('flags, text', [
    (['-i', 'x', 'Go.'], "--input x: expected no sentence, got 'Go.'; leave one of them out"),
    (['-i', ''], "--input '': expected a file, or - for standard input"),
    (['--test', '3', '-i', 'x'], '--test 3: expected no --input; it translates held-out sentences')])
def test_flags_that_exclude_each_other_are_refused(flags, text, capsys):
    with pytest.raises(SystemExit):
        transformer_translate.main(['-c', 'nowhere', *flags])
    assert capsys.readouterr().err == f'python -m transformer.translate: error: {text}; see --help\n'


def test_a_length_above_that_of_training_is_refused_by_the_name_of_its_flag(translate):
    with pytest.raises(UserError, match='^--max-len 10: expected 1 to 9, the length of sentences in training$'):
        translate('--max-len', '10', 'Go.')


# ---- processes -------------------------------------------------------------------------------------------------------

def test_two_processes_print_the_lines_of_one(folder, translate):
    """Blank lines, lines that are too long, lines that are not UTF-8; columns with line numbers, scores and alignments."""
    texts = [text.encode() for text, _ in embedded.pairs()[:120:2]]
    texts[5:5] = [b'', b'  ', b'a b c d e f g h i j', b'caf\xe9', b'qwerty']
    data = b'\n'.join(texts)
    flags = '--skip-bad', '--nbest', '2', '--beam', '2', '--alignments', '-b', '8'
    want = translate(*flags, '--processes', '1', data=data)
    assert translate(*flags, '--processes', '2', data=data) == want and len(want[0]) > 120
    assert sum('warning: ' in line for line in want[1].splitlines()) == 2


def test_a_bad_line_is_an_error_after_the_lines_before_it_in_any_process(folder, translate, capsys):
    data = b'Go now.\n' * 30 + b'caf\xe9\nI sleep.\n'
    with pytest.raises(UserError, match='^standard input: line 31: not UTF-8'):
        translate('-b', '2', '--processes', '2', data=data)
    assert capsys.readouterr().out.splitlines() == pyops.load(folder).translate(['Go now.'] * 30)


def start(folder, *flags, **streams):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('PYOPS_', 'PYTHON'))}
    streams = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE} | streams
    return subprocess.Popen([sys.executable, '-m', 'transformer.translate', '-c', folder, *flags], cwd=ROOT, env=environment,
                            process_group=0, **streams)


def is_quiet(child):
    """Whether a process printed nothing but progress on standard error: on a slow machine it does after 2 seconds."""
    return all(line.startswith(b'translated [') for line in child.stderr.read().splitlines())


@pytest.mark.parametrize('number', [1, 2])
def test_each_line_is_answered_before_the_next_one_is_sent_and_ctrl_c_ends_with_status_130(number, folder):
    want = pyops.load(folder).translate(TEXTS)
    with start(folder, *['--processes', '2'] * (number - 1)) as child:
        for text, answer in zip(TEXTS, want, strict=True):
            child.stdin.write(f'{text}\n'.encode())
            child.stdin.flush()
            assert child.stdout.readline().decode() == f'{answer}\n'
        others = children(child.pid)
        assert len(others) == number - 1
        os.killpg(child.pid, signal.SIGINT)                     # as a terminal does
        assert child.wait(240) == 130 and child.stdout.read() == b'' and is_quiet(child)
        until(lambda: all(map(has_ended, others)))


@pytest.mark.parametrize('number', [1, 2])
def test_a_reader_that_leaves_after_a_line_ends_it_quietly(number, folder, tmp_path):
    (tmp_path / 'in.txt').write_text('They are very tired.\n' * 8000)
    flags = '-i', str(tmp_path / 'in.txt'), '-b', '16', '--beam', '1', '--processes', str(number)
    with start(folder, *flags, stdin=subprocess.DEVNULL) as child:
        assert child.stdout.readline().endswith(b'\n')
        others = children(child.pid)
        assert len(others) == number - 1
        child.stdout.close()
        assert child.wait(480) == 141 and is_quiet(child)
        until(lambda: all(map(has_ended, others)))


def test_a_long_input_is_read_while_it_is_translated_and_progress_is_printed_on_standard_error(folder, monkeypatch, capsys):
    """The clock advances by 3 seconds each time it is read."""
    clock = [0.0]
    monkeypatch.setattr(time, 'perf_counter', lambda: clock.__setitem__(0, clock[0] + 3) or clock[0])

    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BufferedReader(io.BytesIO(b'Go now.\n' * 320))))
    capsys.readouterr()
    transformer_translate.main(['-c', folder, '--beam', '1', '-b', '2', '--processes', '1'])
    out, error = capsys.readouterr()
    assert out.splitlines() == pyops.load(folder).translate(['Go now.'] * 320, beam=1)
    assert all(line.startswith('translated [') and line.endswith(' lines/s)') for line in error.splitlines())
    assert len(error.splitlines()) > 3 and 'left' not in error
