"""The pages: links lead somewhere, examples print what stands below them, flag tables match the programs."""
import argparse
import configparser
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from pyops.errors import UserError
from scripts import flag_tables, generated, name_table
from seq2seq.train import DEFAULTS as SEQ2SEQ
from transformer.train import DEFAULTS as TRANSFORMER

PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', ROOT / 'CHANGELOG.md', *sorted((ROOT / 'docs').glob('*.md'))]
INDEX = ROOT / 'docs' / 'README.md'
FENCE = re.compile(r'^```(\w*)\n(.*?)^```$', re.M | re.S)
# Packages that the examples of a page import and that the extra `test` does not install.
PACKAGES = {'docs/export.md': ['torch', 'ctranslate2', 'onnx', 'onnxruntime'], 'docs/torch.md': ['torch']}
NUMBER = re.compile(r'\d+(?:\.\d+)?(?:e[+-]?\d+)?')


def name_of(page):
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize('page', PAGES, ids=name_of)


# ---- links -----------------------------------------------------------------------------------------------------------

def anchors(page):
    """What `#...` may name in a page: its headings in lower case, hyphens for spaces, without punctuation."""
    titles = re.findall(r'^#+ +(.+)$', FENCE.sub('', page.read_text()), re.M)
    return [re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles]


@each_page
def test_links_and_anchors_lead_somewhere(page):
    text = re.sub(r'`[^`\n]*`', '', FENCE.sub('', page.read_text()))
    links = [link for link in re.findall(r'\]\(([^)\s]+)\)', text) if not re.match(r'https?://', link)]
    assert links
    for link in links:
        path, _, anchor = link.partition('#')
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), f'{name_of(page)}: {link}: there is no such file'
        if anchor:
            assert anchor in anchors(target), f'{name_of(page)}: {link}: {target.name} has no such heading'


def test_tests_that_a_page_names_exist():
    named = {(path, name) for page in PAGES for path, name in re.findall(r'`(tests/[\w/]+\.py)::(\w+)`', page.read_text())}
    assert len(named) > 10
    assert [(path, name) for path, name in sorted(named) if f'def {name}(' not in (ROOT / path).read_text()] == []


def test_attempts_have_different_numbers_and_readers_see_them():
    """Markdown shows the first number of a list and counts on.  A list with `)` is another one than a list with `.`."""
    attempts, seen = (ROOT / 'docs' / 'speed.md').read_text().partition('\n## Attempts\n')[2], []
    for group in attempts.split('\n### '):
        before = 0, ''
        for number, mark in re.findall(r'^(\d+)([.)]) \*\*', group, re.M):
            assert mark != before[1] or int(number) == before[0] + 1, f'{number}{mark} after {before[0]}: use another mark'
            before = int(number), mark
            seen.append(before[0])
    assert len(seen) > 100 and len(set(seen)) == len(seen), sorted(n for n in seen if seen.count(n) > 1)


def test_the_readme_links_to_the_folder_and_its_index_to_every_page():
    readme, index = (ROOT / 'README.md').read_text(), INDEX.read_text()
    assert len(readme.splitlines()) <= 300
    for target in ('docs', 'docs/README.md', 'CONTRIBUTING.md', 'CHANGELOG.md'):
        assert f'({target})' in readme
    missing = [page.name for page in INDEX.parent.glob('*.md') if page != INDEX and f'({page.name})' not in index]
    assert missing == []


# ---- examples --------------------------------------------------------------------------------------------------------

RUN = '''
import contextlib, io, json, sys
namespace, outputs = {'__name__': 'page'}, []
for block in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(block, namespace)
    outputs.append(output.getvalue())
json.dump(outputs, sys.stdout)
'''


def examples(page):
    """-> blocks of Python, and for each the text that it shall print: the ```text block right below, or ''."""
    text, blocks, wanted = page.read_text(), [], []
    for match in FENCE.finditer(text):
        if match[1] == 'python':
            blocks.append(match[2])
            below = re.compile(r'\n\n```text\n(.*?)^```$', re.M | re.S).match(text, match.end())
            wanted.append(below[1] if below else '')
    return blocks, wanted


def assert_same_output(got, want):
    """Words exactly, but for the space between them, and that with which numpy aligns an array; numbers to 1e-3, or both as
    small as a rounding error."""
    def words(text):
        return re.sub(r' ?([\[\],]) ?', r'\1', NUMBER.sub('#', ' '.join(text.split())))
    assert words(got) == words(want)
    for g, w in zip(NUMBER.findall(got), NUMBER.findall(want), strict=True):
        assert abs(float(g) - float(w)) <= 1e-3 * float(w) or max(float(g), float(w)) < 1e-5, f'{g}, want {w}, in:\n{got}'


@pytest.mark.parametrize('page', [page for page in PAGES if examples(page)[0]], ids=name_of)
def test_examples_print_what_stands_below_them(page):
    for package in PACKAGES.get(name_of(page), ()):
        pytest.importorskip(package, reason=f'{package} is not installed: pip install {package}')
    blocks, wanted = examples(page)
    assert any(wanted)
    out = subprocess.run([sys.executable, '-c', RUN], input=json.dumps(blocks), cwd=ROOT, text=True, capture_output=True)
    assert out.returncode == 0, out.stderr
    for got, want in zip(json.loads(out.stdout), wanted, strict=True):
        assert_same_output(got, want)


def test_outputs_are_compared_by_words_and_numbers():
    assert_same_output('dx 1e-10  largest 1.5501', 'dx  9e-11 largest 1.55\n')
    for got in ('dx 1e-10 largest 1.56', 'dy 1e-10 largest 1.55', 'dx 1e-3 largest 1.55', 'dx 1e-10 largest -1.55', 'dx 1e-10'):
        with pytest.raises(AssertionError):
            assert_same_output(got, 'dx 9e-11 largest 1.55')


# ---- what commands print ---------------------------------------------------------------------------------------------

DECIMAL = re.compile(r'\d+\.\d+(e[+-]?\d+)?%?(?=\s|$)')


def without_decimals(line):
    return ' '.join(DECIMAL.sub('#', line).split())


# page, command, whether its decimals are compared (losses to 1e-3), and not times and rates of a machine
SAMPLES = [('README.md', 'mnist.train --quiet -e 2', True), ('docs/programs.md', 'mnist.train --embedded --plan', True),
           ('docs/programs.md', 'mnist.train --embedded --profile', False),
           ('docs/plan.md', 'seq2seq.train -f embedded --profile', False)]


def sample(page, command):
    """The lines of the block below the first mention of a command, without those that say that something is left out."""
    text = (ROOT / page).read_text()
    start = text.index(f'python -m {command}')
    block = next(match[2] for match in FENCE.finditer(text) if match.start() > start)
    return [line for line in block.splitlines() if line != '...']


def assert_printed(output, lines, decimals):
    """The lines occur in the output, in their order: words, whole numbers and, if wanted, decimals."""
    rest = iter(output)
    for want in lines:
        got = next((line for line in rest if without_decimals(line) == without_decimals(want)), None)
        assert got is not None, f'not in the output, or not at this place: {want}'
        if decimals:
            assert_same_output(got, want)


@pytest.mark.parametrize('page, command, decimals', SAMPLES, ids=[command for _, command, _ in SAMPLES])
def test_samples_are_what_the_command_prints(page, command, decimals, tmp_path):
    lines = sample(page, command)
    assert len(lines) >= 7
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('PYOPS_', 'COLUMNS'))}
    threads = re.search(r'on (\d+) threads?$', lines[-1])
    done = subprocess.run([sys.executable, '-m', *command.split()], cwd=tmp_path, text=True, capture_output=True,
                          env=environment | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': threads[1] if threads else '2'})
    assert done.returncode == 0, done.stderr
    assert_printed(done.stdout.splitlines(), lines, decimals)


def blocks_below(page, heading):
    """The blocks without a language of a section, as lists of lines."""
    section = (ROOT / page).read_text().partition(f'\n## {heading}\n')[2].partition('\n## ')[0]
    return [match[2].splitlines() for match in FENCE.finditer(section) if not match[1]]


def test_the_way_of_an_op_to_its_instructions_is_quoted_from_the_sources():
    op, plan, shared, row, instructions, gpu = blocks_below('docs/one_call.md', 'One op down to its instructions')
    for lines, path in ((op, 'pyops/ops/relu.py'), (shared, 'csrc/small.c'), (row, 'csrc/kernels/elementwise.inc'),
                        (gpu, 'cuda/small.cu')):
        assert '\n'.join(lines) + '\n' in (ROOT / path).read_text(), path
    command = [sys.executable, '-m', 'mnist.resnet', '--embedded', '--plan']
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert plan[0] in done.stdout.splitlines(), done.stderr
    assert len(instructions) == 7


def test_the_instructions_of_an_op_are_those_that_gcc_12_makes():
    path = ROOT / 'build/c/kernels/avx2.o'
    if not path.exists() or not shutil.which('objdump'):
        pytest.skip('needs build/c/kernels/avx2.o and objdump: make, apt install binutils')
    comment = subprocess.run(['objdump', '-s', '-j', '.comment', path], text=True, capture_output=True).stdout
    compiler = ''.join(line[-16:] for line in comment.splitlines())        # the column of text
    if not re.search(r'GCC: .* 12\.\d\.\d', compiler):
        pytest.skip('the page shows the instructions of gcc 12: make clean, then make CC=gcc-12')
    code = subprocess.run(['objdump', '-d', '--no-show-raw-insn', path], text=True, capture_output=True).stdout
    code = code.partition('<row_relu_back>:')[2].partition('\n\n')[0]
    made = [line.partition('\t')[2].strip() for line in code.splitlines()]
    *_, instructions, _ = blocks_below('docs/one_call.md', 'One op down to its instructions')
    first = next(number for number, line in enumerate(made) if line.startswith('vcmpltps') and 'ymm' in line)
    for got, line in zip(made[first:], instructions, strict=False):
        assert ' '.join(got.split()).startswith(' '.join(line.partition('#')[0].split())), (got, line)


def test_a_sample_that_is_stale_is_noticed():
    output = ['fill -> y 1.5 2.5%', 'gemm -> y  0.1', '16 actions, 0.119 ms', 'loss : 1.2334', 'peak 8,592,268 bytes']
    assert_printed(output, ['gemm -> y 7.25', '16 actions, 1.00 ms'], False)
    assert_printed(output, ['fill -> y 1.5 2.5%', 'loss : 1.2335', 'peak  8,592,268 bytes'], True)
    for stale, decimals in (['15 actions, 0.119 ms'], False), (['gemm -> y 0.1', 'fill -> y 1.5 2.5%'], False), \
            (['loss : 1.2434'], True), (['peak 8,592,000 bytes'], True), (['gelu -> y 0.1'], False):
        with pytest.raises(AssertionError):
            assert_printed(output, stale, decimals)


# ---- flags -----------------------------------------------------------------------------------------------------------

PARSERS = flag_tables.parsers()
each_program = pytest.mark.parametrize('program', PARSERS)


def actions_of(program):
    actions = [action for action in PARSERS[program]._actions if not isinstance(action, flag_tables.COMMON)]
    return {flag: action for action in actions for flag in action.option_strings or [action.metavar or action.dest]}


def flag_rows(program):
    """{flag: (meaning, default)} of a program in docs/programs.md: the rows of the tables whose section names the program."""
    page, rows = (ROOT / 'docs' / 'programs.md').read_text(), {}
    for section in re.split(r'^### Flags: ', page[page.index('<!-- flags -->'):], flags=re.M)[1:]:
        title, _, rest = section.partition('\n')
        before, _, table = rest.partition('\n| flag')
        named = re.search(r'^For (.*)', before, re.M)
        programs = re.findall('`(.+?)`', named[1]) if named else re.sub(r'^\w+ of ', '', title).split(' and ')
        if program not in programs:
            continue
        for line in table.splitlines()[2:]:
            if line.startswith('|'):
                names, meaning, default = [cell.strip() for cell in re.split(r'(?<!\\)\|', line)[1:-1] + [''] * 2][:3]
                for name in re.findall(r'`\[?(.+?)`', names):
                    name = re.split(r'[ ]', name)[0].lower()
                    assert name not in rows, f'{name} is in two tables of {program}'
                    rows[name] = meaning, default
    return rows


def default_of(cell, program):
    """The part of a cell 'program, program: default; program: default' that is of the program."""
    for part in cell.split('; '):
        programs, colon, default = part.partition(': ')
        if colon and program in programs.split(', '):
            return default
    return cell


def test_the_flag_tables_are_up_to_date(tmp_path):
    flag_tables.main(['--check'])
    page, stale = ROOT / 'docs' / 'programs.md', tmp_path / 'programs.md'
    stale.write_text(page.read_text().replace('seq2seq.train: 0.005', 'seq2seq.train: 0.006'))
    with pytest.raises(UserError, match='is out of date; update it with: python -m scripts.flag_tables'):
        flag_tables.main(['--check', '--page', str(stale)])
    flag_tables.main(['--page', str(stale)])
    assert stale.read_text() == page.read_text()


def test_the_table_of_names_is_up_to_date(torch, tmp_path):
    name_table.main(['--check'])
    page, stale = ROOT / 'docs' / 'names.md', tmp_path / 'names.md'
    assert len(page.read_text().splitlines()) > 120
    stale.write_text(page.read_text().replace('| `cumsum` |', '| `cumulated` |'))
    with pytest.raises(UserError, match='is out of date; update it with: python -m scripts.name_table'):
        name_table.main(['--check', '--page', str(stale)])


@each_program
def test_every_flag_of_a_program_is_in_the_tables_with_its_default(program):
    rows, actions = flag_rows(program), {flag.lower(): action for flag, action in actions_of(program).items()}
    assert set(rows) == set(actions)
    settings = {'seq2seq.train': SEQ2SEQ, 'transformer.train': TRANSFORMER}.get(program, {})
    for flag, (meaning, cell) in rows.items():
        action = actions[flag]
        assert len(meaning.split()) >= 2
        shown = default_of(cell, program)
        default = action.default if action.default is not None else settings.get(action.dest)
        if isinstance(default, bool) or default is None or action.dest == 'listing':
            continue
        if action.dest == 'pairs':
            default = 'all' if default == 0 else default
        if isinstance(default, (int, float)):
            assert shown.split(';')[0] == str(default), f'{flag}: {shown}, want {default}'
        elif isinstance(default, str) and default not in ('', 'none'):
            assert shown == default, f'{flag}: {shown}, want {default}'


@each_program
def test_flags_of_long_programs_are_in_groups(program):
    untitled = [action for group in PARSERS[program]._action_groups if group.title in flag_tables.UNTITLED
                for action in group._group_actions if not isinstance(action, flag_tables.COMMON)]
    assert not untitled or program.startswith('pyops')


def test_groups_that_differ_in_defaults_alone_share_a_table():
    one, other = argparse.ArgumentParser(), argparse.ArgumentParser()
    for parser, default in ((one, 1), (other, 2)):
        group = parser.add_argument_group('sizes')
        group.add_argument('--size', metavar='N', default=default, help='a size | of --all $PYOPS_DATA (default %(default)s)')
    rows = [flag_tables.groups(parser)[0].rows[0] for parser in (one, other)]
    assert rows[0] == ('`--size N`', 'a size | of --all $PYOPS_DATA', '1')
    assert flag_tables.merged(rows, ['one', 'other']).default == 'one: 1; other: 2'
    assert list(flag_tables.table(rows[:1]))[2:] == ['| `--size N` | a size \\| of `--all` `$PYOPS_DATA` | 1 |']


def test_generated_text_is_wrapped_between_words():
    text = generated.paragraph(', '.join(f'`some-file_{n}.c` ({n})' for n in range(40)), '- ')
    lines = text.splitlines()
    assert len(lines) > 3 and max(map(len, lines)) <= 128 and lines[0].startswith('- `some-file_0.c` (0), ')
    assert all(line.startswith('  ') for line in lines[1:]) and text.count('`some-file_') == 40
    assert generated.paragraph('one line') == 'one line'


def test_a_page_without_marks_is_refused(tmp_path):
    (tmp_path / 'page.md').write_text('<!-- flags -->\n')
    with pytest.raises(UserError, match='page.md: expected the lines <!-- flags --> and <!-- /flags -->'):
        generated.update(tmp_path / 'page.md', 'flags', 'text', 'command')


# ---- .editorconfig ---------------------------------------------------------------------------------------------------

TEXTS = ('*.py', '*.c', '*.h', '*.inc', '*.cu', '*.cuh', '*.cpp', '*.md', '*.sh', '*.css', '*.html', '*.js', '*.awk', '*.toml')
FOLDERS = 'bench', 'csrc', 'cuda', 'docs', 'examples', 'mnist', 'pyops', 'scripts', 'seq2seq', 'tests', 'transformer'


def test_the_tree_obeys_editorconfig():
    config = configparser.ConfigParser()
    config.read_string('[top]\n' + (ROOT / '.editorconfig').read_text())
    everywhere = config['*']
    assert everywhere['insert_final_newline'] == everywhere['trim_trailing_whitespace'] == 'true'
    files = [path for pattern in TEXTS for folder in FOLDERS for path in (ROOT / folder).rglob(pattern)]
    files += [path for pattern in ('Makefile', '*.md', '*.toml', '*.py') for path in ROOT.glob(pattern)]
    assert len(files) > 200
    for path in files:
        text = path.read_bytes().decode(everywhere['charset'])
        assert '\r' not in text and (not text or text.endswith('\n')), path
        is_tabbed = path.name == 'Makefile' and config['Makefile']['indent_style'] == 'tab'
        longest = int(config['*.py']['max_line_length']) if path.suffix == '.py' else sys.maxsize
        for number, line in enumerate(text.splitlines(), 1):
            assert line == line.rstrip() and (is_tabbed or '\t' not in line) and len(line) <= longest, f'{path}:{number}'
