"""The recipes of docs/recipes.md, followed to the letter in a copy of the tree: an op and a number format."""
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap

import pytest
from conftest import ROOT, environment_without

PAGE = ROOT / 'docs' / 'recipes.md'
AT_MOST = 6         # files of an op, and of a format
# item of a numbered list, whose first word is a file or a link to it; block of code in it
ITEM = re.compile(r'^\d+\. (?:\[[^\]]*\]\((?P<link>[^)]+)\)|`(?P<new>[^`]+)`):(?P<text>.*?)(?=^\d+\. |^\S|\Z)', re.M | re.S)
BLOCK = re.compile(r'^   ```(?P<kind>\S+)\n(?P<text>.*?)^   ```$', re.M | re.S)
COMMANDS = re.compile(r'^```sh\n(.*?)^```$', re.M | re.S)


def section(heading):
    return re.search(rf'^## {re.escape(heading)}\n(.*?)(?=^## |\Z)', PAGE.read_text(), re.M | re.S)[1]


def blocks(text):
    """Return (path, kind, code) of each block of a recipe, in order."""
    return [(item['new'] or os.path.normpath(f'docs/{item["link"]}'), block['kind'], textwrap.dedent(block['text']))
            for item in ITEM.finditer(text) for block in BLOCK.finditer(item['text'])]


def patched(text, diff):
    """Return `text` with a diff applied.  Its lines without + must occur once in the text; the last may be part of a line."""
    old, new = (''.join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in kinds).rstrip('\n')
                for kinds in (' -', ' +'))
    places = text.count(old)
    assert places == 1, f'{places} places instead of one have these lines: {old!r}'
    return text.replace(old, new)


def follow(tree, heading):
    """Follow a recipe in a tree.  Return the files that it changes, and its commands."""
    text, changed = section(heading), []
    for path, kind, code in blocks(text):
        file = tree / path
        if kind == 'diff':
            file.write_text(patched(file.read_text(), code))
        else:
            assert not file.exists(), f'{path}: this file exists'
            file.write_text(code)
        if path not in changed:
            changed.append(path)
    return changed, [line for found in COMMANDS.finditer(text) for line in found[1].splitlines()]


def run(tree, command):
    names = [name for name in os.environ if name.startswith(('PYTEST_', 'PYOPS_', 'PYTHONPATH'))]
    # optimisation takes minutes, and the new op needs no exact kernels
    environment = environment_without(*names, EXTRA_CFLAGS='-O0 -DPYOPS_WITHOUT_EXACT=1', EMULATED_FLAGS='-O0')
    words = [sys.executable if word == '.venv/bin/python' else word for word in shlex.split(command)]
    done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f'{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}'
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not all(map(shutil.which, ('git', 'make', 'gcc', 'g++'))), reason='install git, make, gcc and g++')
def test_the_recipes_of_an_op_and_of_a_format_work_to_the_letter(tmp_path):
    """One test: both recipes change the header, so a build for each would compile everything twice."""
    listed = subprocess.run(['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'], cwd=ROOT,
                            capture_output=True, text=True)
    if listed.returncode:
        pytest.skip('this tree is no git checkout: clone the repository')
    files = [path for path in listed.stdout.split('\0') if path and (ROOT / path).is_file()]
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, tmp_path / path)

    commands = []
    for heading in ('How to add an op', 'How to add a number format'):
        changed, its_commands = follow(tmp_path, heading)
        assert len(changed) == len(re.findall(r'^\d+\. ', section(heading), re.M)) <= AT_MOST, changed
        commands += its_commands
    assert [command for command in commands if '--on emulated' in command]
    for command in commands:
        output = run(tmp_path, command)
        if 'pytest' in command:
            assert int(re.search(r'(\d+) passed', output)[1]) >= 4, f'{command}\n{output}'
    run(tmp_path, f'{shlex.quote(sys.executable)} -m ruff check')


def test_a_diff_that_does_not_fit_names_its_lines():
    assert patched('a\nb\nc\n', ' a\n-b\n+B\n') == 'a\nB\nc\n'
    for text in ('', 'a\nb\na\nb\n'):
        with pytest.raises(AssertionError, match=r'[02] places instead of one have these lines: .a.nb'):
            patched(text, ' a\n-b\n+B\n')
