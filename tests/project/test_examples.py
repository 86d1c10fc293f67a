"""Every example runs in each way, and prints what it promises."""
import os
import subprocess
import sys

import pytest
from conftest import ROOT

EXAMPLES = [path.stem for path in sorted((ROOT / 'examples').glob('*.py'))]
# arguments of python for the example {}, and the current folder
WAYS = {'module': (['-m', 'examples.{}'], ROOT), 'file': (['examples/{}.py'], ROOT),
        'its folder': (['{}.py'], ROOT / 'examples'), 'another folder': (['../examples/{}.py'], ROOT / 'docs')}


def run(name, way='module'):
    arguments, folder = WAYS[way]
    environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    out = subprocess.run([sys.executable, *(argument.format(name) for argument in arguments)], cwd=folder, text=True,
                         capture_output=True, env=environment)
    assert out.returncode == 0, out.stderr
    return out.stdout.splitlines()


@pytest.mark.parametrize('way', [way for way in WAYS if way != 'module'])
@pytest.mark.parametrize('name', EXAMPLES)
def test_every_example_runs_from_any_folder_as_a_file_and_as_a_module(name, way):
    assert run(name, way) == run(name) != []


def test_every_example_has_a_test_below():
    assert EXAMPLES == ['mlp_on_tensors']


def test_gradients_from_the_tape_are_those_by_hand_bit_for_bit():
    lines = run('mlp_on_tensors')
    losses = [line.split() for line in lines if line.startswith('step')]
    assert [words[3] for words in losses] == [words[6] for words in losses] and float(losses[-1][3]) < 1 < float(losses[0][3])
    same = [line for line in lines if line.endswith('all 100 gradients have the same bits, and so has the parameter: True')]
    assert [line.split()[0] for line in same] == ['w1', 'bias1', 'w2', 'bias2']
