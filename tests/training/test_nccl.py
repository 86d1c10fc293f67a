"""Ranks with GPUs: the same training for any number of them, without MPI and with it, and what is refused.

The GPUs are emulated, and a stand-in for NCCL carries the messages.  tests/backend/test_gpu.py has a captured message, also for
a real GPU with NCCL.
"""
import json
import os
import subprocess
import sys

import gpu_ranks
import numpy as np
import pytest
import ranks
from conftest import ROOT
from gpu_ranks import needs_emulated_gpus
from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER, assert_same_training, newest

from pyops import launcher
from pyops.data import idx
from pyops.distributed import nccl
from pyops.errors import UserError

pytestmark = needs_emulated_gpus

PROGRAMS = '''
import json, sys
from pyops.errors import exits_cleanly
with exits_cleanly('test', ranks=True):
    from pyops.distributed import gradients
    gradients.BLOCK = 1000              # these models are small
    for name, argv in json.loads(sys.argv[1]):
        __import__(f'{name}.train')
        sys.modules[f'{name}.train'].main(argv)
'''
TRANSFORMER = [*TINY_TRANSFORMER, '-g', '1', '-b', '32', '-e', '1', '--max-steps', '4']
SEQ2SEQ = [*TINY_SEQ2SEQ, '-g', '1', '--embedding', '256', '-b', '20', '--accumulate', '2', '-e', '1', '--max-steps', '4',
           '--parts', '4', '--attention', '2']
MNIST = ['-g', '1', '-e', '1', '-b', '30', '--parts', '4', '--hidden', '10', '--max-steps', '4']


@pytest.fixture(scope='module')
def library(tmp_path_factory):
    return gpu_ranks.build(tmp_path_factory.mktemp('nccl'))


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    for name, n in (('train', 109), ('t10k', 10)):
        idx.write(tmp_path / f'{name}-images-idx3-ubyte', rng.integers(0, 256, (n, 28, 28)).astype(np.uint8))
        idx.write(tmp_path / f'{name}-labels-idx1-ubyte', rng.integers(0, 10, n).astype(np.uint8))
    return ['--data-dir', str(tmp_path)]


def results(out):
    return [line for line in out.splitlines() if line.startswith(('epoch : ', 'evaluating'))]


def test_the_programs_train_the_same_bits_on_1_and_2_gpus(library, tmp_path, data):
    def trained(count):
        folder = tmp_path / str(count)
        runs = [['transformer', [*TRANSFORMER, '--parts', '4', '-c', str(folder / 'transformer')]],
                ['seq2seq', [*SEQ2SEQ, '-c', str(folder / 'seq2seq')]], ['mnist', [*MNIST, *data]],
                ['mnist', [*MNIST, *data, '--shard-optimizer']]]           # one chunk: the share of rank 0 is empty
        (status, out, err), *others = gpu_ranks.run(count, library, tmp_path / f'job{count}', '-c', PROGRAMS, json.dumps(runs))
        assert (status, [other[:2] for other in others]) == (0, [(0, '')] * (count - 1)), (err, others)
        return folder, out
    (one, first), (two, second) = trained(1), trained(2)
    for name in ('transformer', 'seq2seq'):
        assert_same_training(newest(one / name), newest(two / name))
    assert results(first) == results(second) and len(results(first)) == 4
    assert second.count('parts : 4 of each batch, on 2 ranks on 1 host') == 4


def test_gpus_that_share_the_moments_train_the_same_bits_and_any_number_of_them_resumes(library, tmp_path):
    shared = '--shard-optimizer'

    def trained(folder, count, steps, *flags):
        job = tmp_path / f'job{len(list(tmp_path.iterdir()))}'
        runs = [[name, [*argv, '--parts', '4', '--max-steps', str(steps), '-c', str(tmp_path / folder / name), *flags]]
                for name, argv in (('transformer', TRANSFORMER), ('seq2seq', SEQ2SEQ))]
        (status, out, err), *others = gpu_ranks.run(count, library, job, '-c', PROGRAMS, json.dumps(runs), EMU_DEVICES='4')
        assert (status, [other[:2] for other in others]) == (0, [(0, '')] * (count - 1)), (err, others)
        return out

    trained('one', 1, 4)
    trained('several', 4, 1, shared)
    trained('several', 2, 1)
    out = trained('several', 2, 1, shared)
    trained('several', 1, 1)
    assert out.count('loaded from checkpoint') == 2
    for name in ('transformer', 'seq2seq'):
        assert_same_training(newest(tmp_path / 'one' / name), newest(tmp_path / 'several' / name))
    listed = trained('listed', 2, 1, shared, '--plan')
    actions = [(line.partition('Action')[0], line.rpartition('  ')[2]) for line in listed.splitlines()
               if line.endswith(('[on the host]', '[on a second stream]'))]
    queued = '[on a second stream]'
    assert actions == 2 * [('ReduceScatterSparse', '[on the host]'), ('ReduceScatter', queued), ('GatherNorms', queued),
                           ('AllGather', queued)]


def test_gpus_send_the_marked_blocks_of_sparse_gradients_alone(library, tmp_path):
    code = """
import ctypes, sys
import numpy as np
from pyops.errors import exits_cleanly
with exits_cleanly('test', ranks=True):
    from pyops import backend, distributed as d, ndarray
    from pyops.backend.library import cpu
    from pyops.distributed import doctor, nccl
    from pyops.init import normal
    from pyops.params import Parameters, Spec
    ndarray.use_gpu()
    d.init()
    sent = ctypes.c_int64.in_dll(nccl.library(), 'standin_sent')
    params = Parameters({'dense': Spec((100,), normal(1)), 'table': Spec((1000, 256), normal(1), sparse=True),
                         'last': Spec((300,), normal(1))})
    gradients, marks = [], []
    for rank in range(d.size()):
        rng = np.random.default_rng(rank)
        params.grads[...], touched = 0, backend.get(params['table'].touched).copy()
        for name in ('dense', 'last'):
            params[name].grad[...] = rng.standard_normal(params[name].grad.shape).astype('f')
        rows = [5, 7 + rank, 990] if sys.argv[1] == 'some' else []
        for row in rows:
            params['table'].grad[row] = rng.standard_normal(256).astype('f')
        touched[rows] = cpu().lib.PYOPS_TOUCHED
        gradients.append(backend.get(params.grads).copy())
        marks.append(touched)
    params.grads[...] = gradients[d.rank()]
    params['table'].touched[...] = marks[d.rank()]
    if sys.argv[2] == 'shared':
        d.shard(params)
    before = sent.value
    d.GradientSum(params).over_ranks()
    mine = params.shares.mine if params.shares else slice(None)
    assert backend.get(params.grads)[mine].tobytes() == doctor.tree(gradients)[mine].tobytes()
    assert backend.get(params['table'].touched).tobytes() == np.maximum(*marks).tobytes()
    print(sent.value - before, params.grads.nbytes)     # get() has waited for the messages
"""
    def counted(rows, moments):
        (status, out, err), other = gpu_ranks.run(2, library, tmp_path / f'{rows} {moments}', '-c', code, rows, moments)
        assert (status, other) == (0, (0, '', '')), (err, other)
        return [int(word) for word in out.split()]
    (sent, gradients), (without, _) = counted('some', 'whole'), counted('none', 'whole')
    assert sent - without == 4 * 1024 and 0 < without < gradients / 50         # four rows of a block, two of them in each step
    assert counted('some', 'shared')[0] - counted('none', 'shared')[0] == 1024          # row 990 is in the share of rank 1


def test_fast_sums_train_about_the_same_and_a_message_is_an_action_on_the_second_stream(library, tmp_path):
    def trained(count, *flags):
        name = f'{count}{len(flags)}'
        outputs = gpu_ranks.run(count, library, tmp_path / f'job{name}', '-c', PROGRAMS, json.dumps(
            [['transformer', [*TRANSFORMER, '-c', str(tmp_path / name), '-v', *flags]]]))
        assert [status for status, _, _ in outputs] == [0] * count, outputs
        return newest(tmp_path / name)[0], outputs[0][1]
    (exact, _), (fast, out) = trained(1, '--parts', '2'), trained(2, '--reduce', 'fast')
    actions = [line for line in out.splitlines() if line.startswith('AllReduce')]
    assert [line.partition('Action: gradients ')[0] for line in actions] == ['AllReduceSparse', 'AllReduce']
    assert actions[0].endswith('[on the host]') and actions[1].endswith('[on a second stream]')
    for name, tensor in exact.items():
        # Adam's first steps divide by the size of each gradient, so the rounding of tiny ones shows: compare the others
        assert np.quantile(np.abs(fast[name].astype(np.float64) - tensor), 0.9) <= 1e-5, name


def test_a_rank_whose_last_part_is_empty_sends_zeros(library, tmp_path, data):
    flags = ['-g', '1', '-e', '1', '-b', '3', '--parts', '2', '--hidden', '10', *data]     # the last batch has one image

    def trained(count):
        outputs = gpu_ranks.run(count, library, tmp_path / f'job{count}', '-c', PROGRAMS, json.dumps([['mnist', flags]]))
        assert [status for status, _, _ in outputs] == [0] * count, outputs
        return results(outputs[0][1])
    assert trained(2) == trained(1) != []


@ranks.needs_mpi
def test_under_mpirun_mpi_sends_the_identity_of_the_job_and_nccl_the_gradients(library, tmp_path, data):
    one = gpu_ranks.run(1, library, tmp_path / 'job1', '-m', 'mnist.train', *MNIST, *data)[0]
    (tmp_path / 'job2').mkdir()
    status, out, err = ranks.run_ranks(2, '-m', 'mnist.train', *MNIST, *data, **{
        name: value for name, value in gpu_ranks.environment(library, tmp_path / 'job2').items()
        if name.startswith(('PYOPS_', 'EMU_', 'STANDIN_'))})
    assert (one[0], status) == (0, 0), (one, err)
    assert results(out) == results(one[1]) != [] and 'on 2 ranks' in out
    files = [path.name for path in (tmp_path / 'job2').iterdir()]
    assert len(files) == 1 and files[0].startswith('random-')           # not an address: no variable named one


def test_the_doctor_compares_sums_on_3_gpus_that_slurm_started(library, tmp_path):
    def as_slurm(count, rank, port):
        return dict(SLURM_PROCID=str(rank), SLURM_STEP_NUM_TASKS=str(count), SLURM_LOCALID=str(rank), SLURM_JOB_ID='4097',
                    SLURM_STEP_NODELIST='localhost,other', EMU_DEVICES='3')
    (status, out, err), *others = gpu_ranks.run(3, library, tmp_path / 'job', '-m', 'pyops.distributed', 'doctor', '-g', '1',
                                                variables=as_slurm)
    assert status == 0 and [other[0] for other in others] == [0, 0], (err, others)
    assert out.startswith('launcher : srun\nranks : 3\n') and 'NCCL 2.28.3' in out and 'MPI not started' in out
    assert 'gpu of each rank : emulated device\n' in out and out.count('sums : the same bits on all ranks') == 1
    assert [path.name for path in (tmp_path / 'job').iterdir()] == ['localhost:61441']


OPERATIONS = '''
import numpy as np
from pyops.errors import exits_cleanly
with exits_cleanly('test', ranks=True):
    from pyops import backend, distributed as d, ndarray
    ndarray.use_gpu()
    d.init()
    terms = np.random.default_rng(0).standard_normal((2, 3, 50)).astype('f')
    for place in (backend.put, np.copy):            # arrays on the device and on the host
        assert (backend.get(d.all_reduce(place(terms[d.rank()]))) == terms[0] + terms[1]).all()
        assert (backend.get(d.all_reduce(place(terms[d.rank()]), fast=True)) == terms[0] + terms[1]).all()
        assert (backend.get(d.all_max(place(terms[d.rank()]))) == terms.max(0)).all()
    assert d.union(np.array([1 << d.rank(), 4])).tolist() == [3, 4] and d.largest(d.rank()) == 1
    assert d.gather('x' * d.rank()) == ['', 'x'] and d.broadcast([d.rank()] * 1000) == [0] * 1000 and len(d.hosts()) == 2
    d.agree(size=d.size())
    d.same_bits(d.all_reduce(backend.put(terms[d.rank()])), 'the sum')
    try:
        d.all_reduce(np.arange(3))
    except TypeError as error:
        print(error)
    d.finalize()
    print(d.size())
'''


def test_the_operations_of_all_ranks_take_arrays_of_gpu_and_host(library, tmp_path):
    (status, out, err), other = gpu_ranks.run(2, library, tmp_path / 'job', '-c', OPERATIONS)
    assert (status, other) == (0, (0, '', '')), (err, other)
    assert out == 'all_reduce: expected float32 between GPUs, got int64\n1\n'


# ---- what is refused --------------------------------------------------------------------------------------------------------

def refused(library, tmp_path, *arguments, **values):
    """Return the line with which rank 0 of two ends."""
    outputs = gpu_ranks.run(2, library, tmp_path / 'job', '-m', 'mnist.train', '--embedded', '-g', '1', *arguments, **values)
    assert [status for status, _, _ in outputs] == [2, 2], outputs
    line, = outputs[0][2].splitlines()
    assert outputs[1][2].startswith(f'rank 1 on {os.uname().nodename}: {line[:60]}')
    return line


@pytest.mark.parametrize('arguments, values, expected', [
    ((), {'EMU_DEVICES': '1'}, 'two ranks use the same GPU (NCCL: ncclCommInitRank: invalid usage: '
     'Duplicate GPU detected : rank'),
    ((), {'PYOPS_NCCL_LIBRARY': '/nowhere/libnccl.so'}, 'several GPUs need NCCL, which is not installed or cannot be used '
     '(/nowhere/libnccl.so: cannot open shared object file: No such file or directory); install it with: '
     f'{sys.executable} -m pip install nvidia-nccl-cu12 (nvidia-nccl-cu13 for CUDA 13), or set PYOPS_NCCL_LIBRARY'),
    ((), {'STANDIN_VERSION': '21210'}, 'has version 2.12.10, expected 2.13.0 or newer'),
    ((), {'MASTER_ADDR': ''}, 'the launcher names no address at which the ranks can meet; set MASTER_ADDR'),
    ((), {'NCCL_COMM_ID': 'nonsense'}, 'the ranks cannot connect at nonsense: NCCL: ncclGetUniqueId: an error: Invalid')])
def test_bad_ranks_are_refused_with_one_line(arguments, values, expected, library, tmp_path):
    line = refused(library, tmp_path, *arguments, **values)
    assert line.startswith('mnist.train: error: ') and expected in line


def test_more_ranks_than_gpus_of_a_host_are_refused(library, tmp_path):
    outputs = gpu_ranks.run(1, library, tmp_path / 'job', '-m', 'mnist.train', '--embedded', '-g', '1', WORLD_SIZE='3',
                            LOCAL_RANK='2')
    assert outputs == [(2, '', 'mnist.train: error: -g 1: this host has 2 GPUs, and the launcher started rank 3 here; start at '
                        'most one rank for each GPU of a host\n')]


def test_a_rank_that_fails_ends_with_its_status(library, tmp_path):
    code = ('from pyops.errors import UserError, exits_cleanly\n'
            'with exits_cleanly("test", ranks=True):\n'
            '    from pyops import distributed, ndarray\n'
            '    ndarray.use_gpu(); distributed.init()\n'
            '    raise UserError("a problem")\n')
    outputs = gpu_ranks.run(2, library, tmp_path / 'job', '-c', code)
    assert [(status, err.endswith('test: error: a problem\n')) for status, _, err in outputs] == [(2, True)] * 2


# ---- the library, and the address -------------------------------------------------------------------------------------------

def test_the_library_of_a_wheel_is_found_before_that_of_the_loader(tmp_path, monkeypatch):
    file = tmp_path / 'nvidia' / 'nccl' / 'lib' / 'libnccl.so.2'
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv('PYOPS_NCCL_LIBRARY', raising=False)
    for name in [name for name in sys.modules if name.partition('.')[0] == 'nvidia']:
        monkeypatch.delitem(sys.modules, name)
    assert list(nccl._candidates())[0] == str(file) and list(nccl._candidates())[-1] == 'libnccl.so.2'
    monkeypatch.setenv('PYOPS_NCCL_LIBRARY', 'mine.so')
    assert list(nccl._candidates()) == ['mine.so']


@pytest.mark.parametrize('variables, expected', [
    (dict(MASTER_ADDR='10.0.0.1', MASTER_PORT='29500'), '10.0.0.1:29501'),
    (dict(MASTER_ADDR='fe80::1', MASTER_PORT='1'), '[fe80::1]:2'),
    (dict(MASTER_ADDR='a', MASTER_PORT='65535'), ''), (dict(MASTER_ADDR='a'), ''), ({}, ''),
    (dict(SLURM_JOB_ID='4097', SLURM_STEP_NODELIST='a[07-09,12],b1'), 'a07:61441'),
    (dict(SLURM_JOB_ID='3', SLURM_STEP_NODELIST='n1-x,n2'), 'n1-x:61443'),
    (dict(SLURM_JOB_ID='3', SLURM_STEP_NODELIST='n[3]-x'), 'n3-x:61443'),
    (dict(SLURM_JOB_ID='3', SLURM_LAUNCH_NODE_IPADDR='10.0.0.2'), '10.0.0.2:61443'),
    (dict(SLURM_JOB_ID='3', SLURM_STEP_NODELIST='a', MASTER_ADDR='b', MASTER_PORT='7'), 'b:8')])
def test_the_address_of_rank_0_comes_from_the_variables_of_the_launcher(variables, expected, monkeypatch):
    for name in ('MASTER_ADDR', 'MASTER_PORT', 'SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_LAUNCH_NODE_IPADDR'):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher.meeting_point() == expected


def test_the_stand_in_has_no_warnings(tmp_path):
    subprocess.run(['gcc', '-Wall', '-Wextra', '-Werror', '-shared', '-fPIC', '-o', tmp_path / 'x.so',
                    ROOT / 'tests/helpers/nccl.c', '-ldl'], check=True)


def test_an_unknown_status_has_the_texts_of_nccl(library, monkeypatch):
    monkeypatch.setenv('PYOPS_NCCL_LIBRARY', str(library))
    nccl.library.cache_clear()
    try:
        assert nccl.version_text(nccl.version(nccl.library())) == '2.28.3'
        monkeypatch.setenv('PYOPS_NCCL_LIBRARY', '/nowhere.so')
        nccl.library.cache_clear()
        with pytest.raises(UserError, match='^several GPUs need NCCL'):
            nccl.library()
    finally:
        nccl.library.cache_clear()
