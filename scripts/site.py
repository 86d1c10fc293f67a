"""The hooks of mkdocs.yml: the navigation of docs/README.md, a page for each source that is linked, and the API reference.

Pages of docs/ link to files of the repository, such as ../csrc/gemm.c.  The site has a page for each of them in repository/,
so that the site is complete without a network.
"""
from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r'^( *)(`{3,}).*?^\1\2$', re.M | re.S)
LINK = re.compile(r'(\]\()([^)\s:#]+)((?:#[^)\s]*)?\))')
SECTION = re.compile(r'^## (.+)$|^- \[(.+?)\]\((\w+\.md|\.\./notebooks/\w+\.ipynb)\)', re.M)
LANGUAGES = {'.py': 'python', '.c': 'c', '.h': 'c', '.inc': 'c', '.cu': 'cuda', '.cuh': 'cuda', '.cpp': 'c++', '.awk': 'awk',
             '.sh': 'sh', '.toml': 'toml', '.js': 'js', '.css': 'css', '.html': 'html', '.jsonl': 'json', '.yaml': 'yaml'}
MODULES = ['pyops', *(f'pyops.{name}' for name in ('nn', 'functional', 'optim', 'data', 'autograd', 'plan', 'formats'))]
ROOT_PAGES = ['README.md', 'CONTRIBUTING.md', 'CHANGELOG.md']
NUMBERED = re.compile(r'^\d+\. .*\n(?:(?:   .*)?\n)*', re.M)
NOT_SEARCHED = '---\nsearch:\n  exclude: true\n---\n'


def navigation():
    """Return mkdocs' nav: the sections and pages of docs/README.md in their order, then the API and the pages of the root."""
    nav = [{'Documentation': 'README.md'}]
    for section, title, page in SECTION.findall((ROOT / 'docs' / 'README.md').read_text()):
        if section:
            nav.append({section: []})
        else:
            next(iter(nav[-1].values())).append({title: in_site(posixpath.normpath(f'docs/{page}'))})
    nav.append({'API': [{module: f'api/{module}.md'} for module in MODULES]})
    nav.append({'Project': [{Path(name).stem.capitalize(): f'repository/{name}'} for name in ROOT_PAGES]})
    return nav


def in_repository(uri):
    """Return the path in the repository of a page of the site."""
    inside = re.fullmatch(r'repository/(.*?)(?:/index)?(\.md)?', uri)
    return inside[1] + ('.md' if inside[1] + '.md' in ROOT_PAGES else '') if inside else f'docs/{uri}'


def in_site(path):
    """Return the page or picture of the site for a path in the repository."""
    if path.startswith('docs/'):
        return path.removeprefix('docs/')
    if path == 'docs':
        return 'README.md'
    if (ROOT / path).is_dir():
        return f'repository/{path}/index.md'
    return f'repository/{path}' + ('' if path in ROOT_PAGES else '.md')


def resolve(link, page):
    """Return the path in the repository that a link of a page leads to, or None if there is no such file."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository(page)), link))
    return path if not path.startswith('..') and (ROOT / path).exists() else None


def with_links(text, change):
    """Return Markdown with change(link) for each link outside of code blocks."""
    parts, end = [], 0
    for fence in [*FENCE.finditer(text), None]:
        start = fence.start() if fence else len(text)
        parts.append(LINK.sub(lambda match: match[1] + change(match[2]) + match[3], text[end:start]))
        if fence:
            parts.append(fence[0])
            end = fence.end()
    return ''.join(parts)


def source_page(path):
    """Return the Markdown page of a source file, or of a folder with its files."""
    target = ROOT / path
    if path in ROOT_PAGES:
        return target.read_text()
    if target.suffix == '.ipynb':
        return '\n\n'.join(map(cell_text, json.loads(target.read_text())['cells'])) + '\n'
    if target.is_dir():
        names = sorted(name for name in os.listdir(target) if not name.startswith(('.', '__pycache__')))
        return NOT_SEARCHED + f'# {path}\n\n' + ''.join(f'- `{name}`\n' for name in names if is_source(target / name))
    return NOT_SEARCHED + f'# {path}\n\n````{LANGUAGES.get(target.suffix, "text")}\n{target.read_text()}````\n'


def cell_text(cell):
    text = ''.join(cell['source'])
    return text if cell['cell_type'] == 'markdown' else f'```python\n{text}\n```'


def is_source(path):
    return path.is_dir() or path.suffix in (*LANGUAGES, '.md', '.ipynb')


def linked(pages):
    """Return the pages of all files outside of docs/ that pages link to, {path: Markdown}.   pages: {uri: Markdown}"""
    found = {path: source_page(path) for path in ROOT_PAGES}
    waiting = [*pages.items(), *((in_site(path), text) for path, text in found.items())]
    for uri, text in waiting:               # grows
        def add(link, uri=uri):
            path = resolve(link, uri)
            if path and not path.startswith('docs') and path not in found:
                found[path] = source_page(path)
                waiting.append((in_site(path), found[path]))
            return link
        with_links(text, add)
    return found


def four_spaces(text):
    """Return Markdown whose numbered items are indented by four spaces, as Python-Markdown requires; GitHub takes three."""
    return NUMBERED.sub(lambda item: re.sub(r'^   ', '    ', item[0], flags=re.M), text)


class Docstrings(griffe.Extension):
    """Keep the layout of docstrings, which are plain text: the first paragraph is prose, the rest a block."""

    def on_object(self, *, obj, loader, **options):
        if obj.docstring:
            first, _, rest = obj.docstring.value.partition('\n\n')
            first = re.sub(r'([\\*_<>#\[\]])', r'\\\1', first)
            obj.docstring.value = first + (f'\n\n````text\n{rest}\n````' if rest else '')


# ---- called by mkdocs ------------------------------------------------------------------------------------------------

def on_config(config):
    config.nav = navigation()


def on_files(files, config):
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for path, text in sorted(linked(pages).items()):
        files.append(File.generated(config, in_site(path), content=text))
    for module in MODULES:
        files.append(File.generated(config, f'api/{module}.md', content=f'# {module}\n\n::: {module}\n'))
    return files


def on_page_markdown(text, page, config, files):
    uri = page.file.src_uri

    def change(link):
        path = resolve(link, uri)
        return posixpath.relpath(in_site(path), posixpath.dirname(uri) or '.') if path else link
    return with_links(four_spaces(text), change)


@event_priority(-100)       # after the plugin `search`
def on_post_build(config):
    """Write the search index as a script, too: a browser loads no JSON from a disk."""
    folder = Path(config.site_dir) / 'search'
    (folder / 'search_index.js').write_text(f'var __index = {(folder / "search_index.json").read_text()}')
