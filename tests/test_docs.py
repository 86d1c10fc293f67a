"""README.md and docs/: links lead somewhere, examples print what stands below them, flags are those of the programs."""
import importlib
import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT

from pyops import training

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
INDEX = ROOT / 'docs' / 'README.md'
FENCE = re.compile(r'^```(\w*)\n(.*?)^```$', re.M | re.S)
NUMBER = re.compile(r'\d+(?:\.\d+)?(?:e[+-]?\d+)?')
# sections of README.md with the flags that several programs share
SHARED_FLAGS = 'Look into a step', 'Flags of both translators', 'On a GPU', 'Look inside'


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


def test_the_readme_links_to_the_folder_and_its_index_to_every_page():
    assert '(docs)' in PAGES[0].read_text()
    assert [page.name for page in PAGES[1:] if page != INDEX and f'({page.name})' not in INDEX.read_text()] == []


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
    """-> blocks of Python, and for each the text that it shall print: that of the ```text block right below, or ''."""
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
SAMPLES = [('README.md', 'mnist.train --quiet -e 2', True), ('README.md', 'mnist.train --embedded --plan', True),
           ('README.md', 'mnist.train --embedded --profile', False),
           ('docs/plan.md', 'seq2seq.train -f embedded --profile', False)]


def sample(page, command):
    """The lines of the block below the first mention of a command, without those that say that something is left out."""
    text = (ROOT / page).read_text()
    start = text.index(f'python -m {command}')
    block = next(match[2] for match in FENCE.finditer(text) if match.start() > start)
    return [line for line in block.splitlines() if line != '...']


def assert_printed(output, lines, decimals):
    """The lines are among those of the output, in their order: words, whole numbers and, if wanted, decimals."""
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


def test_a_sample_that_is_stale_is_noticed():
    output = ['fill -> y 1.5 2.5%', 'gemm -> y  0.1', '16 actions, 0.119 ms', 'loss : 1.2334', 'peak 8,592,268 bytes']
    assert_printed(output, ['gemm -> y 7.25', '16 actions, 1.00 ms'], False)
    assert_printed(output, ['fill -> y 1.5 2.5%', 'loss : 1.2335', 'peak  8,592,268 bytes'], True)
    for stale, decimals in (['15 actions, 0.119 ms'], False), (['gemm -> y 0.1', 'fill -> y 1.5 2.5%'], False), \
            (['loss : 1.2434'], True), (['peak 8,592,000 bytes'], True), (['gelu -> y 0.1'], False):
        with pytest.raises(AssertionError):
            assert_printed(output, stale, decimals)


# ---- flags -----------------------------------------------------------------------------------------------------------

def flag_rows(text):
    """{flag: last cell of its row} of the first table of flags in the text; a row may name several."""
    table = re.search(r'^\| flag .*\n\|[-|]+\n((?:\|.*\n)+)', text, re.M)
    rows = [row.split('|')[1:-1] for row in table[1].splitlines()]
    return {flag: last for first, *_, last in rows for flag in re.findall(r'(?<![\w-])--?[a-z][a-z-]*', first)}


@pytest.mark.parametrize('program', ['mnist.train', 'mnist.resnet', 'seq2seq.train', 'transformer.train', 'seq2seq.translate'])
def test_flag_tables_are_those_of_the_programs(program, monkeypatch):
    class Declared(Exception):
        pass

    def stop(self, argv):
        raise Declared(self)
    monkeypatch.setattr(training.ArgumentParser, 'parse_args', stop)
    with pytest.raises(Declared) as declared:
        importlib.import_module(program).parse([])
    (parser,) = declared.value.args
    readme = PAGES[0].read_text()
    heading, own = re.search(rf'^Flags of `python -m {re.escape(program)}`(.*?):\n\n(.*)', readme, re.M | re.S).groups()
    rows = flag_rows(own)
    for title in (title for title in SHARED_FLAGS if f'(#{title.lower().replace(" ", "-")})' in heading):
        shared = flag_rows(readme[readme.index(f'# {title}\n'):])
        assert len(shared) >= 3 and not set(shared) & set(rows)
        rows |= shared
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    assert set(rows) == set(actions) - {'-h', '--help', '--version'}
    for flag, cell in rows.items():             # a default that is a number
        default = re.search(r'\(default ([\d.]+)\b', actions[flag].help or '')
        assert not default or default[1] in re.findall(r'[\d.]+', cell), f'{flag}: {cell}, want {default[1]}'
