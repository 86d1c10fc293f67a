"""Type annotations: what type checkers see of the package, and that no program imports them.  `make lint` checks them all."""
import ast
import subprocess
import sys

import pytest
from conftest import ROOT, environment_without

import pyops
import pyops.data

PROGRAM = '''
import numpy as np

import pyops
from pyops import data, formats, ndarray, nn
from pyops import functional as F
from pyops.autograd import Tensor
from pyops.optim import Adam


class Model(nn.Module):
    def __init__(self) -> None:
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.layers(x))


model = Model()
optimizer = Adam(model.parameters(), lr=0.1)
((model(Tensor(np.ones((2, 3)))) - 1) ** 2).mean().backward()
optimizer.step()
reveal_type(model.parameters()[0].grad)
reveal_type(next(model.parameters()).grad)
reveal_type(2 * pyops.Tensor([1.0]) @ pyops.Tensor([1.0]))
reveal_type(ndarray.zeros((2, 3)).sum(axis=0))
reveal_type(formats.parse('mxfp8'))
reveal_type(data.ArrayDataset(np.ones(3)))
translator = pyops.load('x')
reveal_type([translator.translate('a'), translator.translate(['a'])[0], next(translator.translate(iter('a')))])
reveal_type(translator.translate('a', nbest=2))
reveal_type(translator.translate(['a'], nbest=2))
reveal_type(translator.translate(iter('a'), 4, 4))
nn.Linear('3', 4)
F.softmax(Tensor([1.0]), axis='x')
ndarray.zeros(3).pixels
'''


def test_a_type_checker_knows_what_a_program_uses(tmp_path):
    pytest.importorskip('mypy', reason='mypy is not installed: pip install mypy')
    (tmp_path / 'program.py').write_text(PROGRAM)
    command = [sys.executable, '-m', 'mypy', str(tmp_path / 'program.py')]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = [line.partition(': ')[2] for line in done.stdout.splitlines()]
    assert found[:-1] == [
        'note: Revealed type is "pyops.autograd.tensor.Tensor | None"',
        'note: Revealed type is "pyops.autograd.tensor.Tensor | None"',
        'note: Revealed type is "pyops.autograd.tensor.Tensor"',
        'note: Revealed type is "pyops.ndarray.NDArray"',
        'note: Revealed type is "pyops.formats.Format"',
        'note: Revealed type is "pyops.data.datasets.ArrayDataset"',
        'note: Revealed type is "list[str]"',
        'note: Revealed type is "list[str]"',
        'note: Revealed type is "list[list[str]]"',
        'note: Revealed type is "typing.Iterator[list[str]]"',
        'error: Argument 1 to "Linear" has incompatible type "str"; expected "int"  [arg-type]',
        'error: Argument "axis" to "softmax" has incompatible type "str"; expected "int"  [arg-type]',
        'error: "NDArray" has no attribute "pixels"  [attr-defined]'], done.stdout + done.stderr


@pytest.mark.parametrize('module, names', [(pyops, pyops._FROM), (pyops.data, pyops.data._HOMES)], ids=['pyops', 'pyops.data'])
def test_type_checkers_see_the_names_that_are_imported_on_first_use(module, names):
    with open(module.__file__) as file:
        (block,) = [node for node in ast.parse(file.read()).body
                    if isinstance(node, ast.If) and ast.unparse(node.test) == 'TYPE_CHECKING']
    seen = {alias.name: line.module for line in block.body for alias in line.names}
    assert seen == {name: home if '.' in home else f'{module.__name__}.{home}' for name, home in names.items()}
    assert seen.keys() <= set(module.__all__)


def test_a_start_does_not_import_the_types(tmp_path):
    command = [sys.executable, '-X', 'importtime', '-m', 'mnist.train', '-e', '0']
    done = subprocess.run(command, cwd=tmp_path, env=environment_without(PYTHONPATH=str(ROOT)), capture_output=True, text=True)
    imported = {line.rpartition('|')[2].strip() for line in done.stderr.splitlines() if line.startswith('import time:')}
    assert done.returncode == 0 and {'pyops.ops', 'pyops.params'} <= imported, done.stderr
    assert not imported & {'pyops.typing', 'numpy.typing'}
