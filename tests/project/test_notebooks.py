"""The notebooks run from their own folder, like in Jupyter, and are stored without outputs."""
import json
import os
import re

import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))
# the end of what each prints; their own assertions check the rest
LAST = {'attention': '[0.5  0.15 0.23 0.12]]', 'fast_kernel': 'c[0,0] is', 'format_microscope': 'fp16   0.0003',
        'gradients_by_hand': 'of the points are right', 'op_to_c_loop': 'Action: x Tensor(x)(9) -> y Tensor(relu.y)(9)',
        'plan_of_a_step': 'digraph plan {'}
# kernels that a notebook needs and `make cpu` does not build
NEEDS = {'fast_kernel': 'build/emulated/ladder'}
each_notebook = pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)


def cells(path, kind):
    return [cell for cell in json.loads(path.read_text())['cells'] if cell['cell_type'] == kind]


@each_notebook
def test_a_notebook_is_stored_without_outputs(path):
    for cell in cells(path, 'code'):
        assert cell['outputs'] == [] and cell['execution_count'] is None
    for cell in cells(path, 'markdown') + cells(path, 'code'):
        assert max(len(line.rstrip('\n')) for line in cell['source']) <= 128


def test_all_notebooks_begin_with_the_same_setup():
    setups = {''.join(cells(path, 'code')[0]['source']) for path in NOTEBOOKS}
    assert len(NOTEBOOKS) == 6 and len(setups) == 1


@each_notebook
def test_links_of_a_notebook_lead_to_files(path):
    links = re.findall(r'\]\(([^)\s#]+)', ''.join(line for cell in cells(path, 'markdown') for line in cell['source']))
    assert links and [link for link in links if not (path.parent / link).exists()] == []


@each_notebook
def test_a_notebook_runs_in_a_kernel(path, monkeypatch):
    client = pytest.importorskip('nbclient', reason="nbclient is not installed: pip install -e '.[notebooks]'")
    nbformat = pytest.importorskip('nbformat')
    pytest.importorskip('ipykernel', reason="ipykernel is not installed: pip install -e '.[notebooks]'")
    needed = NEEDS.get(path.stem)
    if needed and not (ROOT / needed).exists():
        pytest.skip(f'{needed} is not built: run `make {needed}`')
    for name in [name for name in os.environ if name.startswith('PYOPS_') and name != 'PYOPS_CACHE']:
        monkeypatch.delenv(name)
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    notebook = nbformat.read(path, 4)
    folder = {'metadata': {'path': str(path.parent)}}
    client.NotebookClient(notebook, timeout=300, kernel_name='python3', resources=folder).execute()
    printed = ''.join(output.get('text', '') for cell in notebook.cells if cell.cell_type == 'code' for output in cell.outputs)
    assert LAST[path.stem] in printed
