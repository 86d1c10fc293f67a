"""The site of docs/: it is built without warnings, complete without a network, and can be searched from a disk."""
import html
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browsing import Page
from conftest import ROOT, made_once

for package in ('mkdocs', 'material', 'mkdocstrings_handlers.python'):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[site]'")


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    """The folder of the site, built with warnings as errors."""
    def build(folder):
        done = subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--strict', '-q', '-d', str(folder)], cwd=ROOT,
                              env=os.environ | {'NO_MKDOCS_2_WARNING': '1'}, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, '', '')
    return made_once(tmp_path_factory, 'site', build)


def test_the_navigation_has_the_order_of_the_index(site):
    listed = re.findall(r'^- \[.+?\]\((\w+)\.md\)', (ROOT / 'docs' / 'README.md').read_text(), re.M)
    menu = re.findall(r'<a href="(\w+)\.html" class="md-nav__link"', (site / 'index.html').read_text())
    assert len(listed) > 45 and menu == listed


def test_all_that_a_page_loads_and_all_that_it_links_to_is_in_the_site(site):
    pages = [*site.glob('*.html'), *site.glob('api/*.html')]
    assert len(pages) > 50
    for page in pages:
        if page.name == '404.html':         # its links begin with /, for a server
            continue
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img)[^>]* src="([^"]+)"|<link rel="stylesheet" href="([^"]+)"', text)
        loaded = [source or sheet for source, sheet in loaded]
        assert len(loaded) > 2
        assert [link for link in loaded if re.match(r'(https?:)?//', link)] == []
        for link in {*loaded, *re.findall(r'<a[^>]* href="([^"#]+)', text)}:
            if not link.startswith('http'):
                assert (page.parent / html.unescape(link).partition('?')[0]).exists(), f'{page.name}: {link}'


def test_a_link_to_a_source_leads_to_a_page_with_its_text(site):
    assert '<a href="repository/csrc/gemm.c.html">' in (site / 'linear.html').read_text()
    source = re.sub(r'<[^>]+>', '', (site / 'repository/csrc/gemm.c.html').read_text())
    for line in (ROOT / 'csrc/gemm.c').read_text().splitlines()[:20]:
        assert line in html.unescape(source)


def test_a_notebook_is_a_page_with_its_text_and_its_links(site):
    text = (site / 'repository/notebooks/fast_kernel.ipynb.html').read_text()
    assert '<h1 id="a-kernel-made-fast-in-five-steps">' in text and '<a href="../cuda/dev/ladder.cu.html">' in text


def test_the_api_has_signatures_and_docstrings_with_their_layout(site):
    text = html.unescape(re.sub(r'<[^>]+>', '', (site / 'api/pyops.nn.html').read_text()))
    from pyops import nn
    assert re.search(r'\bLinear\(\s*in_features: int, out_features: int, bias: bool = True\s*\)', text)
    rest = nn.MultiheadAttention.__doc__.split('\n\n', 1)[1].strip().splitlines()
    assert len(rest) > 2
    for line in rest:
        assert line.strip() in text


def test_the_search_works_from_a_disk_and_requests_nothing_else(site, browser):
    page = Page(browser, Path(site / 'gru.html').as_uri())
    found = '[...document.querySelectorAll(".md-search-result__link")].some(a => a.href.includes("/formats.html"))'
    end = time.monotonic() + 60
    while not page.ask(found) and time.monotonic() < end:           # a query before the index is ready may be lost
        page.tab.evaluate('document.activeElement.blur()')
        page.tab.fill('.md-search__input', 'HiFloat8')
        page.tab.focus('.md-search__input')
        page.tab.press('.md-search__input', 'End')
        time.sleep(2)
    assert page.ask(found)
    assert page.failures == [] and all(request.startswith('file:') for request in page.requests)


@pytest.mark.parametrize('scheme', ['light', 'dark'])
def test_pages_fit_a_phone_in_both_colour_schemes(site, browser, scheme):
    for name in ('index', 'api/pyops.nn') if scheme == 'light' else ('attention', 'programs'):
        page = Page(browser, Path(site / f'{name}.html').as_uri(), color_scheme=scheme, viewport={'width': 390, 'height': 800})
        assert page.ask('document.documentElement.scrollWidth') <= 390
        assert page.ask('document.body.dataset.mdColorScheme') == {'light': 'default', 'dark': 'slate'}[scheme]
        page.tab.close()
