"""The examples run as their head says, and show what they promise."""
import subprocess
import sys

from conftest import ROOT


def run(module):
    out = subprocess.run([sys.executable, '-m', module], cwd=ROOT, text=True, capture_output=True)
    assert out.returncode == 0, out.stderr
    return out.stdout.splitlines()


def test_every_example_is_run_here():
    assert [path.name for path in sorted((ROOT / 'examples').glob('*.py'))] == ['mlp_on_tensors.py']


def test_gradients_from_the_tape_are_those_by_hand_bit_for_bit():
    lines = run('examples.mlp_on_tensors')
    losses = [line.split() for line in lines if line.startswith('step')]
    assert [words[3] for words in losses] == [words[6] for words in losses] and float(losses[-1][3]) < 1 < float(losses[0][3])
    same = [line for line in lines if line.endswith('all 100 gradients have the same bits, and so has the parameter: True')]
    assert [line.split()[0] for line in same] == ['w1', 'bias1', 'w2', 'bias2']
