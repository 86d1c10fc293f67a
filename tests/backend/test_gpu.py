"""A GPU beside the CPU: the same training, plans that are graphs, a pool of memory, what is refused and how.

Where PYOPS_BACKEND is not gpu it is the emulation, so that all of this runs on any machine; `make emulated` builds it.
"""
import ctypes
import functools
import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys

import gpu_ranks
import numpy as np
import pytest
from conftest import ROOT, environment_without
from places import on_both
from small_models import digits, make_seq2seq, make_transformer, pairs
from translation import assert_same_training, newest, train_steps

import pyops
from mnist import train as mnist_train
from mnist.mlp_resnet import MLPResNet
from pyops import PRECISIONS, autograd, backend, fit, ndarray, nn
from pyops.autograd import Tensor
from pyops.backend import dlpack, get, gpu, library, put
from pyops.backend.arrays import to_bf16
from pyops.backend.calls import Queued
from pyops.distributed import nccl
from pyops.errors import UserError
from pyops.ndarray import array
from pyops.ops import GRU, Attention, Dropout, Linear, Residual
from pyops.optim import Adam, inverse_square_root
from pyops.params import Parameter
from pyops.philox import dropout_mask
from pyops.plan import Plan
from pyops.steps import SizedSteps
from pyops.text.pairs import Pairs, Ragged
from pyops.text.vocabulary import PAD
from seq2seq import train as seq2seq_train
from seq2seq import translate as seq2seq_translate
from seq2seq.model import Config as Seq2SeqConfig
from seq2seq.model import Seq2Seq
from transformer import train as transformer_train
from transformer import translate as transformer_translate

EMULATED = ROOT / 'pyops' / 'libpyops_emulated.so'
needs_emulation = pytest.mark.skipif(not (EMULATED.exists() or os.environ.get('PYOPS_CUDA_LIBRARY')),
                                     reason=f'{EMULATED} is not built: make emulated')


@pytest.fixture
def on_gpu(device):
    with backend.on(device):
        yield device
    device.precision = 'fp32'


@pytest.fixture
def calls(device, monkeypatch):
    """How often each function of the CUDA library was called since it was looked at last: calls() -> {name: n}."""
    counts, lib = {}, library.cuda().lib

    def counted(name, function, *arguments):
        counts[name] = counts.get(name, 0) + 1
        return function(*arguments)

    for name in library.functions((ROOT / 'cuda' / 'device.h').read_text()) | {'pyops_replay': None}:
        monkeypatch.setattr(lib, name, functools.partial(counted, name, getattr(lib, name)))

    def since():
        found = {name.removeprefix('pyops_'): n for name, n in counts.items()}
        counts.clear()
        return found
    return since


# ---- the same training -----------------------------------------------------------------------------------------------

def translator_losses(make, steps):
    return train_steps(make(), pairs()[1], steps, batch_size=16, lr=0.002)


def digit_losses(steps):
    rng = np.random.default_rng(1)
    *_, step, _ = mnist_train.prepare(*digits(), hidden=16, seed=2)
    return [float(get(step(put(rng.integers(0, 60, 20))))[0]) for _ in range(steps)]


def resnet_losses(steps):
    """The one that is trained by the tape."""
    rng, (images, labels) = np.random.default_rng(1), digits()
    model = MLPResNet(hidden=16, blocks=1, dropout=0.1).reset_parameters(2)
    optimizer, loss_of, losses = Adam(model.params, 0.001), nn.SoftmaxLoss(), []
    for _ in range(steps):
        rows = rng.integers(0, 60, 20)
        optimizer.zero_grad()
        loss = loss_of(model(Tensor(images[rows] / np.float32(255))), Tensor(labels[rows]))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


CURVES = {'mnist': digit_losses, 'resnet': resnet_losses,
          'seq2seq': functools.partial(translator_losses, make_seq2seq),
          'transformer': functools.partial(translator_losses, make_transformer)}


@functools.cache
def losses_on_gpu(name, precision, steps):
    pyops.gpu().precision = precision
    return np.array(CURVES[name](steps))


@pytest.mark.parametrize('name', CURVES)
def test_fifty_steps_have_the_losses_of_the_cpu(name, on_gpu):
    with backend.on(backend.HOST):
        ours = np.array(CURVES[name](50))
    assert ours[-5:].mean() < 0.95 * ours[:5].mean(), 'nothing was learned: the check is vacuous'
    assert np.abs(losses_on_gpu(name, 'fp32', 50) / ours - 1).max() <= 1e-3


# of a factor that is rounded to that format, relative
ROUNDING = {'tf32': 2**-11, 'bf16': 2**-9}


@pytest.mark.parametrize('precision', ROUNDING)
@pytest.mark.parametrize('name', ['resnet', 'seq2seq', 'transformer'])
def test_fewer_bits_change_losses_by_their_rounding(name, precision, on_gpu):
    """A product of rounded factors is off by twice the rounding at most, and some four of them lead to the first loss.

    Of later ones rounding is no measure: where it turns the sign of a gradient, or moves a sum over the kink of a rectifier,
    Adam sends a weight another way, and not by less.  They were off by 0.02; 0.05 is what is allowed.
    """
    plain, rounded = losses_on_gpu(name, 'fp32', 50)[:20], losses_on_gpu(name, precision, 20)
    assert (rounded != plain).any(), 'nothing was rounded'
    off = np.abs(rounded / plain - 1)
    assert off[0] <= 4 * 2 * ROUNDING[precision] and off.max() <= 0.05


@pytest.mark.parametrize('make', [make_seq2seq, make_transformer, mnist_train.prepare], ids=lambda make: make.__module__)
def test_weights_begin_with_the_bits_of_the_cpu(make, device):
    def values():
        model = make(*digits())[0] if make is mnist_train.prepare else make()
        return get(model.params.values)
    ours, theirs = on_both(device, values)
    assert ours.any() and (ours == theirs).all()


def test_dropout_masks_have_the_bits_of_the_cpu(device):
    def masks():
        ones, found = put(np.ones((3, 5, 67), 'f')), []
        for key in (1, 2**63 + 12345):
            for step in (0, 1, 3 << 32):
                number = put(np.array([step]))
                found.append(get(Dropout(0.3, key).forward(ones, number)[0]))
                found.append(get(Residual(0.3, key).forward(ones, ones, number)[0]))
        return found
    ours, theirs = on_both(device, masks)
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
    assert all(0.6 < (mask > 1).mean() < 0.8 for mask in ours)


def test_attention_drops_the_weights_that_it_drops_on_the_cpu(device):
    """With equal scores and values 1, 2, 4, ... in columns of their own, y shows every element of the mask."""
    q, k, v = np.zeros((6, 2, 14), 'f'), np.zeros((7, 2, 14), 'f'), np.tile(np.eye(7, dtype='f')[:, None], (1, 2, 2))
    ours, theirs = on_both(device, lambda: get(Attention(2, p=0.4, key=5).forward(
        *map(put, (q, k, v)), None, put(np.array([9])))[0]))
    assert ((ours == 0) == (theirs == 0)).all() and 0.2 < (ours == 0).mean() < 0.6


# ---- programs --------------------------------------------------------------------------------------------------------

PROGRAMS = {
    'seq2seq': (seq2seq_train, seq2seq_translate, ['--embedding', '12', '--hidden', '16']),
    'transformer': (transformer_train, transformer_translate,
                    ['--d-model', '16', '--d-ff', '24', '--heads', '2', '--layers', '1', '--warmup', '4']),
}
SMALL = ['-f', 'embedded', '--pairs', '150', '-b', '32', '--num-steps', '6', '--save-every', '1']


def run(main, *arguments):
    """The program, whose -g is for this call alone."""
    with backend.on(backend.HOST):
        main([str(argument) for argument in arguments])


@pytest.fixture(scope='module', params=PROGRAMS)
def trained(request, device, tmp_path_factory):
    """Folders with two epochs of a program on the CPU and on the GPU, a checkpoint after each."""
    folder, (train, translate, flags) = tmp_path_factory.mktemp(request.param), PROGRAMS[request.param]
    for g in (0, 1):
        run(train.main, '-g', g, '-e', 2, '-c', folder / str(g), *flags, *SMALL)
    return folder, train, translate, [*flags, *SMALL]


def story(folder):
    return [json.loads(line) for line in (folder / 'metrics.jsonl').read_text().splitlines()]


def assert_nearly_same_training(one, other):
    (tensors, state), (other_tensors, other_state) = one, other
    assert set(tensors) == set(other_tensors) and state['vocabularies'] == other_state['vocabularies']
    assert tensors['step'][0] == other_tensors['step'][0] > 0 and state['run']['epoch'] == other_state['run']['epoch']
    for name, tensor in tensors.items():
        scale = np.abs(tensor).max()
        assert np.abs(tensor - other_tensors[name]).max() <= 1e-2 * scale, name


def test_a_program_tells_the_same_story_on_a_gpu(trained):
    folder, *_ = trained
    ours, theirs = story(folder / '0'), story(folder / '1')
    assert [line['epoch'] for line in theirs] == [1, 2] and ours[1]['loss'] < ours[0]['loss']
    for one, other in zip(ours, theirs, strict=True):
        for name in ('loss', 'validation'):
            assert other[name] == pytest.approx(one[name], rel=1e-3)
        assert one['emit_clip'] == other['emit_clip']
    assert_nearly_same_training(newest(folder / '0'), newest(folder / '1'))


@pytest.mark.parametrize('first, then', [(0, 1), (1, 0), (1, 1)])
def test_a_checkpoint_is_resumed_elsewhere(trained, first, then, tmp_path):
    folder, train, _, flags = trained
    (saved,) = (folder / str(first)).glob('*_1.safetensors')
    shutil.copy(saved, tmp_path)
    run(train.main, '-g', then, '-e', 2, '-c', tmp_path, *flags)
    resumed, whole = newest(tmp_path), newest(folder / str(first))
    assert_nearly_same_training(resumed, whole)
    if first == then:
        assert_same_training(resumed, whole)


@pytest.mark.parametrize('flags', [('--batch-tokens', 200, '--accumulate', 2),
                                   ('--tokenizer', 'bpe', '--vocabulary', 270, '--bpe-dropout', 0.2, '--num-steps', 20)])
def test_batches_of_parts_and_new_encodings_are_filled_alike_in_every_epoch(device, flags, tmp_path):
    main, _, small = PROGRAMS['transformer']
    for g in (0, 1):
        run(main.main, '-g', g, '-e', 2, '-c', tmp_path / str(g), *small, *SMALL, *flags)
    ours, theirs = ([line['loss'] for line in story(tmp_path / str(g))] for g in (0, 1))
    assert len(ours) == 2 and ours[1] < ours[0] and ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize('flags, same_as', [((), 1), (('-g', 0), 0)])
def test_the_environment_chooses_the_gpu_and_the_flag_wins(trained, flags, same_as, tmp_path, monkeypatch):
    folder, train, _, shared = trained
    monkeypatch.setenv('PYOPS_BACKEND', 'gpu')
    run(train.main, *flags, '-e', 2, '-c', tmp_path, *shared)
    assert_same_training(newest(tmp_path), newest(folder / str(same_as)))
    tensors, others = (newest(folder / name)[0] for name in '01')
    assert any(tensors[name].tobytes() != others[name].tobytes() for name in tensors), 'the check is vacuous'


def test_a_checkpoint_translates_alike_on_both(trained, capsys):
    folder, _, translate, _ = trained
    said = []
    for g in (0, 1):
        run(translate.main, '-g', g, '-c', folder / '1', '-f', 'embedded', '--test', 5)
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].count('->') == 5


def test_digits_are_read_alike_on_both(device, capsys):
    """An epoch of ten steps."""
    found = []
    for g in (0, 1):
        run(mnist_train.main, '-e', 1, '-b', 800, '-l', 0.01, '--embedded', '--quiet', '--hidden', 8, '-g', g)
        out = capsys.readouterr().out
        found.append([float(number) for number in re.findall(r'(?:loss|correct) : ([\d.]+)', out)])
    (loss, correct), other = found
    assert other[0] == pytest.approx(loss, rel=1e-3) and abs(other[1] - correct) <= 5 and correct > 500


# ---- plans -----------------------------------------------------------------------------------------------------------

class Training:
    """Steps of a model on rows of the pairs; the history of the steps is on the GPU."""

    def __init__(self, make=make_seq2seq):
        self.model, self.pairs, self.history = make(), pairs()[1], fit.History()
        self.optimizer = Adam(self.model.params, 0.01, max_norm=1.0)

    def step(self, rows, sizes):
        """Run a step without a plan."""
        self._step(put(rows), *sizes)

    def _step(self, rows, *sizes):
        inverse_square_root(self.optimizer, 0.01, 3)
        self.model.params.zero_grads()
        loss, ctx = self.model.forward(self.pairs.batch(rows, *sizes), step=self.optimizer.count)
        valid = self.model.valid(ctx)
        self.model.backward(ctx)
        self.optimizer.step()
        self.history.add(loss, valid, self.optimizer.norm)

    def planned(self):
        return SizedSteps(self._step, self.pairs.sizes, self.model.params, self.pairs.filled, **self.pairs.arrays(),
                          **self.model.arrays(), **self.optimizer.arrays(), **self.history.arrays())

    def state(self):
        return [get(one) for one in (self.model.params.values, self.model.params.v, self.optimizer.rate, self.optimizer.count)]


def fill_with_nan(steps):
    """Overwrite the memory of all intermediate arrays of SizedSteps."""
    for plan in steps._sized.values():
        for block in plan._blocks:
            plan._device.lease(block, block.nbytes // 4, np.float32, None).fill(np.nan)


@pytest.mark.parametrize('make', [make_seq2seq, make_transformer])
def test_a_graph_takes_the_steps_that_python_takes_to_the_bit(make, on_gpu, calls):
    """Dropout, clipping, a rate that rises and falls, rows with another number of valid words: all is read anew."""
    eager, graph, rng = Training(make), Training(make), np.random.default_rng(4)
    planned, seen, sizes_seen = graph.planned(), [], set()
    for count in (30, 16, 16, 30, 16, 30, 16, 16):             # the plan has room for all of them
        rows, sizes = graph.pairs.filled(chosen := rng.integers(0, 128, count))
        calls()
        planned(chosen)
        assert calls().get('graph_launch', 0) == (sizes in sizes_seen), 'the first step of its sizes runs, others are a graph'
        sizes_seen.add(sizes)
        eager.step(rows, sizes)
        (loss, valid, norm), = graph.history.read(1)
        assert [loss, valid, norm] == eager.history.read(1)[0] and norm > 0
        for one, other in zip(graph.state(), eager.state(), strict=True):
            assert (one == other).all()
        seen.append((loss, valid, float(get(graph.optimizer.rate)[0])))
    assert all(len(set(values)) >= 4 for values in zip(*seen, strict=True)), 'something does not change between steps'
    assert 1 < len(sizes_seen) < 8


def make_attentive_seq2seq():
    sizes, _ = pairs()
    return Seq2Seq(Seq2SeqConfig(*sizes, embedding=12, hidden=16, num_steps=6, attention=2, bidirectional=True), seed=3)


@pytest.mark.parametrize('make, precision', [(make_seq2seq, 'fp32'), (make_attentive_seq2seq, 'fp32'),
                                             (make_transformer, 'fp32'), (make_transformer, 'bf16')])
def test_batches_of_few_sizes_have_the_losses_of_exact_ones_and_are_captured_once_for_each_size(make, precision, on_gpu, calls,
                                                                                                monkeypatch):
    """The memory of the plan is NaN before each step, so the fillers must be computed like other rows."""
    on_gpu.precision = precision
    monkeypatch.setattr(on_gpu, 'storage', precision)
    exact, filled, rng = Training(make), Training(make), np.random.default_rng(7)
    planned, batches = filled.planned(), [rng.permutation(128)[:count] for count in (16, 30, 7, 16, 2, 30)]
    calls()
    for number, rows in enumerate(3 * batches):
        fill_with_nan(planned)
        planned(rows)
        exact.step(rows, exact.pairs.sizes(rows))
        found, want = filled.history.read(1)[0], exact.history.read(1)[0]
        assert found == pytest.approx(want, rel=1e-3) and found[1] == want[1] == filled.pairs.sizes(rows)[2]
        if number == 0:
            ours, theirs = get(filled.model.params.grads), get(exact.model.params.grads)
            assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    sizes = [filled.pairs.filled(rows)[1] for rows in batches]
    assert 3 <= len(set(sizes)) < len(sizes) and len(planned._sized) == 1
    assert calls()['graph_begin'] == planned._sized[3]._calls.captures == len(set(sizes))


def test_the_graphs_of_the_most_recently_used_sizes_are_kept(on_gpu, calls, monkeypatch):
    monkeypatch.setattr(gpu.Graph, 'LARGEST', 2)
    x, y, half = put(np.ones(40, 'f')), put(np.zeros(40, 'f')), put(np.array([0.5], 'f'))
    steps = SizedSteps(lambda rows, n: backend.launch('scale', y, x, half, n), lambda rows: (len(rows),), None, x=x, y=y)
    steps(np.arange(30))                                        # the plan has room for all sizes
    graph = steps._sized[1]._calls
    calls()
    for n, captured, launched, freed in ((9, 0, 0, 0), (9, 1, 1, 0), (5, 0, 0, 0), (5, 1, 1, 0), (9, 0, 1, 0), (7, 0, 0, 1),
                                         (9, 0, 1, 0), (7, 1, 1, 0), (5, 0, 0, 1), (7, 0, 1, 0)):
        y.fill(0)
        calls()
        steps(np.arange(n))
        found = calls()
        assert [found.get(name, 0) for name in ('graph_begin', 'graph_launch', 'graph_free')] == [captured, launched, freed], n
        assert (get(y) == 0.5 * (np.arange(40) < n)).all()
    assert graph.captures == 3
    steps.close()
    assert calls()['graph_free'] == 1                           # of 7; 5 has run once


@pytest.mark.parametrize('longest', [1, 3, 9, 16, 64])
def test_the_sizes_of_a_filled_batch_are_multiples_and_its_fillers_are_padding(longest, on_gpu):
    rng = np.random.default_rng(longest)
    tables = []
    for _ in range(2):
        lengths = rng.integers(1, longest + 1, 200)
        tables.append(Ragged(rng.integers(4, 50, lengths.sum()).astype(np.int32), np.concatenate([[0], lengths.cumsum()])))
    made = Pairs(*tables, longest)
    for count in (1, 15, 16, 64, 77, 199):
        rows = rng.permutation(200)[:count]
        chosen, (pairs_, source, target) = made.filled(rows)
        assert (chosen[:count] == rows).all() and len(chosen) == pairs_
        assert pairs_ % 16 == source % 64 == target % 64 == 0
        batch, exact = made.batch(put(chosen), pairs_, source, target), made.batch_of(rows)
        for ours, theirs in ((batch.source, exact.source), (batch.target, exact.target)):
            n, offsets = len(theirs.ids), get(ours.rows.offsets)
            assert (get(ours.ids)[:n] == get(theirs.ids)).all() and (get(ours.positions)[:n] == get(theirs.positions)).all()
            assert (offsets[:count + 1] == get(theirs.rows.offsets)).all() and offsets[-1] == len(ours.ids) < n + 64
            assert 0 <= np.diff(offsets[count:]).min() and np.diff(offsets[count:]).max() <= min(longest, 16)
        assert (get(batch.labels)[:len(exact.labels)] == get(exact.labels)).all()
        assert (get(batch.labels)[len(exact.labels):] == PAD).all()


def test_what_a_step_reads_can_be_changed_between_replays(on_gpu):
    x, lr, count = put(np.ones(40, 'f')), put(np.ones(1, 'f')), put(np.zeros(1, np.int64))
    with Plan(x=x, lr=lr, count=count) as plan:
        y = backend.empty(40, name='y')
        backend.launch('scale', y, x, lr, 40)
        backend.launch('increment', count)
    for n in range(1, 6):
        plan.feed(x=np.full(40, n, 'f'))
        lr[0] = 0.5 / n
        plan.run()
        assert (get(y) == np.float32(0.5 / n) * np.float32(n)).all() and get(count)[0] == n + 1
    count[0] = 2**40
    plan.run()
    assert get(count)[0] == 2**40 + 1


def test_each_replay_drops_something_else(on_gpu):
    """What the counter says, of the step that is read from memory."""
    x, count, drop = put(np.ones(1001, 'f')), put(np.zeros(1, np.int64)), Dropout(0.4, 77)
    with Plan(x=x, count=count) as plan:
        backend.launch('increment', count)
        y, _ = drop.forward(x, count)
    masks = []
    for step in range(2, 7):
        plan.run()
        masks.append(get(y) > 0)
        assert (masks[-1] == dropout_mask(1001, 0.4, step, 77)).all()
    assert len({mask.tobytes() for mask in masks}) == 5


def test_nothing_crosses_the_bus_but_what_is_asked_for(on_gpu, calls):
    training = Training()
    planned, batches = training.planned(), np.random.default_rng(5).permutation(128).reshape(8, 16)
    for rows in [*batches, *batches]:
        planned(rows)
    training.history.read(16)
    calls()
    for rows in batches:
        planned(rows)
    found = calls()
    assert found == {'graph_launch': 8, 'device_upload': 8}, 'a step is its graph, and the rows that come to it'
    assert len(training.history.read(8)) == 8
    assert calls() == {'device_download': 1}


def test_an_epoch_of_a_program_looks_at_its_log_alone(device, calls, monkeypatch, tmp_path):
    monkeypatch.setattr(fit, 'POLL_EVERY', 1e9)
    looked, sizes = [], []
    monkeypatch.setattr(fit.History, 'read', lambda self, n, read=fit.History.read: (looked.append((n, calls())),
                                                                                    read(self, n))[1])

    def filled(self, rows, filled=Pairs.filled):
        if not sizes:
            calls()                                             # forget those before the epoch
        sizes.append(filled(self, rows)[1])
        return filled(self, rows)
    monkeypatch.setattr(Pairs, 'filled', filled)
    run(seq2seq_train.main, '-g', 1, '-e', 1, '-c', tmp_path, *PROGRAMS['seq2seq'][2], *SMALL, '--hold-out', 0)
    (n, before), = looked
    assert n == len(sizes) == 5                                 # 150 pairs, in batches of 32 and one of 22
    assert before.get('device_download', 0) == 0 and before['graph_launch'] == 5 - len(set(sizes)) > 0


def test_an_id_outside_the_vocabulary_is_reported_when_the_log_is_read(on_gpu):
    training = Training()
    planned, rows, words = training.planned(), np.arange(3), pairs()[0][0]
    table = training.pairs.arrays()['source_table']
    for step in range(3):
        table[0] = words if step == 2 else 5
        try:
            planned(rows)
        except ValueError:                                      # at once with PYOPS_SYNC=1, where it is no graph
            break
    with pytest.raises(ValueError, match=rf'ids\[0\]={words}, expected 0 to {words - 1}'):
        training.history.read(3)
    table[0] = 5
    planned(rows)                                               # reported once: the device goes on
    assert np.isfinite(training.history.read(1)).all()


@pytest.fixture
def network(on_gpu, tmp_path, monkeypatch):
    """The messages of a single rank, by NCCL, or on the emulated GPU by its stand-in."""
    if library.is_emulated():
        if not shutil.which('gcc'):
            pytest.skip('the stand-in for NCCL needs gcc: apt install gcc')
        for name, value in dict(PYOPS_NCCL_LIBRARY=gpu_ranks.build(tmp_path), STANDIN_FOLDER=tmp_path,
                                STANDIN_CUDA=os.environ.get('PYOPS_CUDA_LIBRARY') or EMULATED).items():
            monkeypatch.setenv(name, str(value))
    nccl.library.cache_clear()
    try:
        nccl.library()
    except UserError:
        pytest.skip('needs NCCL: pip install nvidia-nccl-cu12')
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        monkeypatch.setenv('NCCL_COMM_ID', f'127.0.0.1:{free.getsockname()[1]}')
    messages = nccl.Nccl(on_gpu, 0, 1)
    messages.connect(messages)
    yield messages
    messages.finalize()
    nccl.library.cache_clear()


def test_a_graph_replays_messages_and_additions_on_the_second_stream(network, on_gpu, calls):
    rng = np.random.default_rng(0)
    x, y, two, one = put(np.zeros(1000, 'f')), put(np.zeros(1000, 'f')), put(np.array([2], 'f')), put(np.ones(1, 'f'))

    def messages():
        network.fork()
        network.exchange(0, x[:600], y[400:], False)            # from this rank to itself
        network.sum_in_any_order(y[:400])
        network.add(y[:400], x[:400])
        network.join()

    with Plan(run=False, x=x, y=y) as plan:
        backend.launch('scale', x, x, two, 1000)
        backend.call('messages', Queued(messages), {'x': x}, {'y': y})
        backend.launch('axpy', y, x, one, 1000)
    assert str(plan.actions[1]).endswith('[on a second stream]') and len(plan.actions) == 3
    queued = []
    for _ in range(4):
        given = rng.standard_normal((2, 1000)).astype('f')
        x[...], y[...] = put(given[0]), put(given[1])
        calls()
        plan.run()
        queued.append(calls().get('graph_launch', 0))
        doubled = 2 * given[0]
        expected = np.concatenate([given[1][:400] + doubled[:400], doubled[:600]]) + doubled
        assert get(y).tobytes() == expected.tobytes() and get(x).tobytes() == doubled.tobytes()
    assert queued == [0, 1, 1, 1] and plan._calls.captures == 1
    if library.is_emulated():
        in_library = [ctypes.c_int64.in_dll(nccl.library(), f'standin_{name}').value for name in ('queued', 'run')]
        assert in_library == [2 * 2, 2 * 4], 'the messages are queued in the first run and in the capture alone'
    plan.close()


def test_a_python_function_divides_a_plan_into_graphs(on_gpu, calls):
    x, two, seen = put(np.ones(10, 'f')), put(np.array([2], 'f')), []
    with Plan(run=False, x=x) as plan:
        backend.launch('scale', x, x, two, 10)
        backend.call('look', lambda: seen.append(float(get(x)[0])), {'x': x}, {'x': x})
        backend.launch('scale', x, x, two, 10)
        backend.launch('scale', x, x, two, 10)
    found = []
    for _ in range(3):
        calls()
        plan.run()
        found.append(calls().get('graph_launch', 0))
    assert found == [0, 2, 2] and plan._calls.captures == 2 and seen == [2, 16, 128] and (get(x) == 8 ** 3).all()
    plan.close()


def test_a_section_that_runs_repeatedly_is_a_graph_of_its_own(on_gpu, calls):
    x, two = put(np.ones(10, 'f')), put(np.array([2], 'f'))
    with Plan(run=False, x=x) as plan:
        for _ in range(4):
            backend.launch('scale', x, x, two, 10)
    found = []
    for section in [(0, 2), (0, 2), (2, None), (2, None), (0, 2), (0, None)]:
        calls()
        plan.run(*section, repeated=True)
        found.append(calls().get('graph_launch', 0))
    assert found == [0, 1, 0, 1, 1, 0] and plan._calls.captures == 2 and (get(x) == 2 ** (2 * 5 + 4)).all()
    calls()
    plan.run(1, 2)
    assert 'graph_launch' not in calls(), 'a run of some actions alone is not captured'
    plan.close()
    assert calls()['graph_free'] == 2


def test_gathered_values_and_bits_of_one_rank_pass_through_device_memory(network):
    value = {'text': 'x' * 1000, 'number': 3}
    assert network.gather(value) == [value] and network.broadcast(value) == value and network.largest(-5) == -5
    bits = np.array([[1, 2], [4, 8]], np.int32)
    network.union(bits)
    network.barrier()
    assert bits.tolist() == [[1, 2], [4, 8]]
    for values in (np.array([0, 2, 3], np.int32), np.array([0, -1.5, 2], np.float32)):
        x = put(values)
        network.fork()
        network.largest_of_each(x)
        network.join()
        assert get(x).tolist() == values.tolist()
    with pytest.raises(TypeError, match='^largest_of_each: expected float32 or int32 between GPUs, got int64$'):
        network.largest_of_each(put(np.array([1])))


# ---- memory ----------------------------------------------------------------------------------------------------------

def test_memory_that_was_given_back_is_handed_out_again(on_gpu, calls):
    pool = on_gpu._pool
    first = backend.empty((300, 1000))
    used, address = pool.used, backend.location(first)
    view = first[10:]
    del first
    assert pool.used == used                                    # a view still looks at it
    del view
    assert pool.used < used
    calls()
    again = backend.empty((1000, 300))
    assert backend.location(again) == address and pool.used == used and 'device_malloc' not in calls()


def test_the_peak_of_a_call_is_the_most_memory_that_it_has_at_once(on_gpu):
    before, MIB = backend.empty(2**18), 2**20

    def call():
        for _ in range(3):
            backend.empty((2, 2**18))                           # given back at once
        return backend.empty(2**18)
    kept, needed = on_gpu.with_peak(call)
    assert before.nbytes == kept.nbytes == MIB and needed == 2 * MIB
    assert on_gpu.with_peak(lambda: None) == (None, 0)
    del kept


@pytest.mark.parametrize('how', ['python', 'plan', 'tape'])
def test_a_hundred_steps_need_no_more_memory_than_three(how, on_gpu):
    pool, loss_of = on_gpu._pool, nn.SoftmaxLoss()
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Dropout(0.1), nn.Linear(7, 3))
    x, labels, one = put(np.ones((6, 5), 'f')), put(np.array([0, 1, 2, 2, 1, 0], 'i')), put(np.ones(1, 'f'))
    optimizer = Adam(model.params, max_norm=1.0)

    def by_hand():
        optimizer.zero_grad()
        y, ctx = model.forward(x)
        _, loss_ctx = loss_of.forward(y, labels)
        model.backward(loss_of.backward(one, loss_ctx), ctx)
        optimizer.step()

    def taped():
        optimizer.zero_grad()
        loss_of(model(Tensor(ndarray.as_ndarray(x))), Tensor(ndarray.as_ndarray(labels))).backward()
        optimizer.step()

    step = taped if how == 'tape' else by_hand
    if how == 'plan':
        with Plan(model.params, x=x, labels=labels, one=one, **optimizer.arrays()) as plan:
            by_hand()
        step = plan.run
    gc.collect()
    seen = []
    for _ in range(100):
        step()
        seen.append((pool.used, pool.reserved))
    assert set(seen[3:]) == {seen[3]}


def test_a_plan_that_is_closed_gives_its_memory_back(on_gpu):
    gc.collect()
    pool, x = on_gpu._pool, put(np.ones(100_000, 'f'))
    before = pool.used
    with Plan(x=x) as plan:
        y = backend.empty(100_000, name='y')
        backend.launch('scale', y, x, put(np.ones(1, 'f')), x.size)
        z = backend.empty(50_000, name='z')
        backend.launch('fill', z, z.size, 1.0)
    for _ in range(3):
        plan.run()
    assert pool.used >= before + 600_000
    del y, z
    plan.close()
    gc.collect()
    assert pool.used == before


def python(code, **environment):
    """Run it in a process of its own with the emulation."""
    environment = os.environ | {'PYOPS_EMULATE_CUDA': '1', 'PYOPS_BACKEND': 'gpu'} | environment
    return subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=environment, capture_output=True, text=True)


EXHAUSTED = '''
import numpy as np
from pyops import backend, ndarray
kept = backend.empty(10_000_000)
gone = backend.empty(25_000_000)
del gone
other = backend.empty(30_000_000)       # fits where the pool gives back what nobody uses
try:
    backend.empty(50_000_000)
except MemoryError as error:
    print(error)
print(ndarray.ones(3).sum())
'''


@needs_emulation
def test_exhausted_memory_says_how_much_was_asked_for_and_is_free():
    out = python(EXHAUSTED, EMU_MEMORY='240000000')
    text, rest = out.stdout.splitlines()
    found = re.fullmatch(r'GPU: 200,000,000 bytes were asked for, ([\d,]+) of 240,000,000 are free, ([\d,]+) are in use by '
                         'this program', text)
    free, used = (int(number.replace(',', '')) for number in found.groups())
    assert 160_000_000 <= used <= 163_000_000 and free <= 240_000_000 - used and rest == '3.0', out.stderr


FULL_WHEN_OPENED = '''
import ctypes
from pyops.backend import library
lib, address = library.cuda().lib, ctypes.c_uint64()
assert not lib.pyops_device_malloc(ctypes.byref(address), 60_000_000)
print(lib.pyops_device_open(0) != 0, lib.pyops_last_error().decode())
assert not lib.pyops_device_zero(address, 4, None)      # reports no error of the failed allocation
assert not lib.pyops_device_free(address)
print(lib.pyops_device_open(0))
'''


@needs_emulation
def test_a_device_without_room_for_the_workspace_can_be_opened_when_there_is_room():
    out = python(FULL_WHEN_OPENED, EMU_MEMORY='100000000')
    first, second = out.stdout.splitlines()
    assert re.fullmatch(r'True device_open: .* has less than 64 MiB of free memory', first) and second == '0', out.stderr


# ---- what is refused -------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def another_version(tmp_path_factory):
    """A library of another version of the ABI."""
    compiler = shutil.which('gcc') or shutil.which('cc')
    if not compiler:
        pytest.skip('no C compiler: install gcc')
    library = tmp_path_factory.mktemp('library') / 'old.so'
    subprocess.run([compiler, '-shared', '-fPIC', '-x', 'c', '-', '-o', library], check=True, text=True,
                   input='int pyops_abi_version(void) { return 3; }')
    return library


NONE = 'no GPU can be used: no CUDA-capable device is detected; train on the CPU with -g 0'
OLD = ('emulated device has compute capability 7.5, and this library was not built for it; it is too old, 8.0 is the least: '
       'train on the CPU with -g 0')
NOT_BUILT = ('/nowhere.so: the CUDA library is not built; run `make emulated` in the source tree, or unset PYOPS_EMULATE_CUDA')
REFUSED = {
    'no device': (dict(EMU_DEVICES='0'), NONE),
    'no driver': (dict(EMU_DEVICES='-1'), 'no GPU can be used: CUDA driver version is insufficient for CUDA runtime version; '
                  'train on the CPU with -g 0'),
    'an old device': (dict(EMU_CAPABILITY='7.5'), OLD),
    'not built': (dict(PYOPS_CUDA_LIBRARY='/nowhere.so'), NOT_BUILT),
    'no library': (dict(PYOPS_CUDA_LIBRARY='{no_library}'), '{no_library}: cannot be loaded ({no_library}: file too short); '
                   'run `make emulated` in the source tree, or unset PYOPS_EMULATE_CUDA'),
    'another version': (dict(PYOPS_CUDA_LIBRARY='{another_version}'), '{another_version}: ABI version 3, this Python side '
                        f'needs {library.ABI_VERSION}; run `make emulated` in the source tree, or unset PYOPS_EMULATE_CUDA'),
}


@pytest.fixture
def libraries(another_version, tmp_path):
    no_library = tmp_path / 'text.so'
    no_library.write_text('no library')
    return dict(another_version=another_version, no_library=no_library)


def train(folder, *flags, **environment):
    return subprocess.run([sys.executable, '-m', 'seq2seq.train', '-f', 'embedded', '-c', str(folder), *SMALL[2:], *flags],
                          cwd=ROOT, env=os.environ | {'PYOPS_EMULATE_CUDA': '1', 'PYOPS_BACKEND': ''} | environment,
                          capture_output=True, text=True)


@needs_emulation
@pytest.mark.parametrize('case', REFUSED)
def test_a_gpu_that_cannot_be_used_is_one_line(case, libraries, tmp_path):
    environment, text = REFUSED[case]
    environment = {name: value.format(**libraries) for name, value in environment.items()}
    out = train(tmp_path / 'new', '-e', '1', '-g', '1', **environment)
    assert (out.returncode, out.stdout) == (2, '') and not (tmp_path / 'new').exists()
    assert out.stderr == f'seq2seq.train: error: -g 1: {text.format(**libraries)}\n'


CALLS = """
import ctypes
import numpy as np
import pyops
from pyops import backend
from pyops.backend import library
from pyops.errors import UserError

with backend.on(pyops.gpu()):
    x, y = backend.put(np.array([-1, 2], 'f')), backend.empty(2)
    backend.launch('relu_forward', y, x, 2)
    print(backend.get(y).tolist())
    try:
        backend.launch('square_forward', y, x, 2)
    except UserError as error:
        print(error)
lib, at = library.cuda().lib, ctypes.c_int64()
action = (ctypes.c_int64 * 2)(lib.pyops_kernel_number(b'pyops_square_forward'), 0)
print(lib.pyops_replay(action, None, None, ctypes.byref(at), 0, 1, None), lib.pyops_last_error().decode())
"""


@needs_emulation
@pytest.mark.skipif(not (ROOT / 'build/emulated/common/replay.o').exists(), reason='build/emulated is empty: make emulated')
def test_a_kernel_that_the_library_lacks_is_an_error_of_its_call_alone(tmp_path):
    """A prototype is added to the header, and no file of cuda/ implements it: the library links, loads and runs the rest."""
    tree = tmp_path / 'tree'
    for folder in ('csrc', 'cuda', 'pyops', 'build/c', 'build/emulated', 'build/emulator'):
        shutil.copytree(ROOT / folder, tree / folder)           # with the times of the files, so that make compiles little
    shutil.copy2(ROOT / 'Makefile', tree)
    header = tree / 'csrc/pyops.h'
    text, before = header.read_text(), header.stat()
    first = 'PYOPS_API pyops_status pyops_fill('
    assert first in text
    header.write_text(text.replace(first, 'PYOPS_API pyops_status pyops_square_forward(float *y, const float *x, int64_t n, '
                                          f'void *stream);\n{first}'))
    shutil.copy(header, tree / 'pyops')
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    (tree / 'csrc/replay.awk').touch()                          # the one thing that make has to bring up to date
    environment = environment_without('PYOPS_LIBRARY', 'PYOPS_CUDA_LIBRARY', 'PYOPS_BACKEND', PYOPS_EMULATE_CUDA='1',
                                      PYOPS_CACHE='0')
    built = subprocess.run(['make', 'pyops/libpyops_emulated.so'], cwd=tree, env=environment, capture_output=True, text=True)
    assert built.returncode == 0 and 'warning' not in built.stderr, built.stdout + built.stderr
    assert 'replay.o' in built.stdout and 'libpyops_emulated.so' in built.stdout
    done = subprocess.run([sys.executable, '-c', CALLS], cwd=tree, env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        '[0.0, 2.0]',
        'pyops_square_forward: libpyops_emulated.so has no such function: it is older than pyops.h, or cuda/ does not '
        'implement it; run `make emulated` in the source tree, or unset PYOPS_EMULATE_CUDA',
        '3 pyops_square_forward: the CUDA library has no such kernel'], done.stdout + done.stderr


def test_a_plan_takes_kernel_numbers_from_the_library_that_replays_it(on_gpu, monkeypatch):
    """The CUDA library may be older than the CPU library and number its kernels differently."""
    monkeypatch.setattr(library.cuda().lib, 'pyops_kernel_number', lambda name: 12_345)
    with Plan(None) as plan:
        backend.launch('fill', backend.empty(3), 3, 1.0)
    with pytest.raises(ValueError, match='replay: action 0: kernel=12345, expected 0 to'):
        plan.run()


@needs_emulation
def test_a_gpu_by_the_environment_that_cannot_be_used_is_one_line():
    out = subprocess.run([sys.executable, '-m', 'pyops', 'gradcheck', 'relu'], cwd=ROOT, capture_output=True, text=True,
                         env=os.environ | {'PYOPS_EMULATE_CUDA': '1', 'PYOPS_BACKEND': 'gpu', 'EMU_DEVICES': '0'})
    assert (out.returncode, out.stdout) == (2, '')
    assert out.stderr == f'pyops: error: PYOPS_BACKEND=gpu: {NONE}, or unset PYOPS_BACKEND\n'


@needs_emulation
def test_early_starts_are_on_or_off():
    out = python('from pyops import ndarray; ndarray.ones(3)', PYOPS_EARLY_START='yes')
    assert out.returncode and ('PYOPS_EARLY_START=yes: expected 1, for kernels that may start before the last one has ended, '
                               'or 0; unset it') in out.stderr


@needs_emulation
def test_a_model_that_a_gpu_has_no_memory_for(tmp_path):
    for memory, want in (('360000000', r'not enough memory \(GPU: [\d,]+ bytes were asked for, [\d,]+ of 360,000,000 are free, '
                          r'[\d,]+ are in use by this program\); give smaller sizes or a smaller batch, or end other programs'),
                         ('70000000', r'the model needs 0\.3 GiB of memory and the GPU has 0\.1; give a smaller --.*')):
        out = train(tmp_path, '-e', '1', '-g', '1', '--embedding', '800', '--hidden', '800', EMU_MEMORY=memory)
        assert out.returncode == 2 and re.fullmatch(f'seq2seq.train: error: {want}\n', out.stderr), out.stderr


def test_the_cpu_does_not_care_about_a_broken_cuda_library(libraries, tmp_path):
    flags = ['-e', '1', '--embedding', '8', '--hidden', '8']
    out = train(tmp_path, *flags, '-g', '0', PYOPS_CUDA_LIBRARY=str(libraries['no_library']), EMU_DEVICES='0')
    assert (out.returncode, out.stderr) == (0, '') and 'checkpoint saved' in out.stdout


@pytest.mark.parametrize('main', [seq2seq_train.main, seq2seq_translate.main, transformer_train.main, mnist_train.main])
def test_the_precision_tf32_needs_a_gpu(main):
    flags = ['-c', 'nowhere'] if main is seq2seq_translate.main else []
    with pytest.raises(UserError, match='^--precision tf32: needs a GPU; give -g 1, or --precision fp32 or bf16$'):
        run(main, '--precision', 'tf32', *flags)


def test_another_precision_is_refused(on_gpu):
    with pytest.raises(ValueError, match=f"precision: expected {', '.join(PRECISIONS)}, got 'fp16'"):
        on_gpu.precision = 'fp16'
    assert on_gpu.precision == 'fp32'


def test_the_exchange_of_a_gru_can_be_chosen_and_gives_the_same_bits(on_gpu):
    rng = np.random.default_rng(0)
    shapes = (96, 5), (96, 32), (96,), (96,)
    gru = GRU(*(Parameter(f'p{i}', put(rng.standard_normal(shape, np.float32)), put(np.zeros(shape, np.float32)))
                for i, shape in enumerate(shapes)))
    x = put(rng.standard_normal((3, 9, 5), np.float32))

    def states(exchange):
        on_gpu.exchange = exchange
        return get(gru.forward(x)[0])
    try:
        assert np.array_equal(states('by device'), states('global memory'))
        with pytest.raises(ValueError, match="exchange: expected by device, global memory, got 'registers'"):
            on_gpu.exchange = 'registers'
        assert on_gpu.exchange == 'global memory'
    finally:
        on_gpu.exchange = 'by device'


def test_sharing_loads_by_multicast_can_be_chosen_and_gives_the_same_bits(on_gpu):
    rng = np.random.default_rng(0)
    a, b = put(rng.standard_normal((1020, 200), np.float32)), put(rng.standard_normal((200, 1024), np.float32))

    def product(multicast):
        on_gpu.multicast = multicast
        return get(a @ b)
    try:
        on_gpu.precision = 'bf16'
        by_size = product('by size')
        assert np.array_equal(by_size, product('never')) and np.array_equal(by_size, product('always')) and by_size.any()
        with pytest.raises(ValueError, match="multicast: expected by size, never, always, got 'sometimes'"):
            on_gpu.multicast = 'sometimes'
        assert on_gpu.multicast == 'always'
    finally:
        on_gpu.multicast, on_gpu.precision = 'by size', 'fp32'


def test_an_early_start_of_kernels_can_be_chosen_and_gives_the_same_bits(on_gpu):
    rng = np.random.default_rng(0)
    a, b = (put(rng.standard_normal((100, 100), np.float32)) for _ in range(2))

    def chain(early_start):
        on_gpu.early_start = early_start
        x = a
        for _ in range(3):
            x = (x @ b).sum(axis=0) * a
        return get(x)
    try:
        never = chain('never')
        assert never.any() and np.array_equal(never, chain('always')) and np.array_equal(never, chain('by environment'))
        with pytest.raises(ValueError, match="early_start: expected by environment, never, always, got 'sometimes'"):
            on_gpu.early_start = 'sometimes'
    finally:
        on_gpu.early_start = 'by environment'


def test_the_kernels_of_attention_can_be_chosen_and_others_are_refused(on_gpu):
    q = put(np.random.default_rng(0).standard_normal((130, 1, 64)).astype('f'))

    def weighted(kernels):
        on_gpu.attention = kernels
        return get(Attention(1, p=0.2).forward(q, q, q, None, put(np.array([1])))[0])
    try:
        on_gpu.precision = 'bf16'
        mma, wgmma = weighted('mma'), weighted('wgmma')
        assert np.abs(mma - wgmma).max() < 0.05 and np.abs(mma).max() > 1
        with pytest.raises(ValueError, match="attention: expected by size, mma, wgmma, got 'flash'"):
            on_gpu.attention = 'flash'
        assert on_gpu.attention == 'wgmma'
    finally:
        on_gpu.attention, on_gpu.precision = 'by size', 'fp32'


# ---- arrays of the host and of the GPU -------------------------------------------------------------------------------

HOST_ARRAY = ': is in host memory, but other arguments are on the GPU; copy it there with pyops.backend.put'


def test_a_kernel_that_is_given_arrays_of_both_names_one(on_gpu):
    x, y = np.ones(4, 'f'), put(np.ones(4, 'f'))
    for values, name in (((y, x, y, 4), 'x'), ((x, y, y, 4), 'y'), ((y, y, x, 4), 'alpha')):
        with pytest.raises(TypeError, match=f'scale: {name}{HOST_ARRAY}'):
            backend.launch('scale', *values)
    weight = Parameter('weight', *(put(np.ones((3, 4), 'f')) for _ in range(2)))
    with pytest.raises(TypeError, match=f'gemm: a{HOST_ARRAY}'):
        Linear(weight).forward(np.ones((2, 4), 'f'))


def test_arrays_of_host_and_gpu_do_not_meet(on_gpu):
    host, there = array([1.0, 2], device=pyops.cpu()), array([1.0, 2])
    for call in (lambda: host + there, lambda: there.__iadd__(host), lambda: there @ host, lambda: Tensor(host) * Tensor(there),
                 lambda: autograd.apply(Residual(), Tensor(there), Tensor(host))):
        with pytest.raises(TypeError, match=r'devices?,.* pyops\.(cpu|gpu)\(\) and pyops\.(cpu|gpu)\(\)'):
            call()
    assert (there + host.to(on_gpu)).tolist() == [2, 4] and (there.to(host.device) + host).tolist() == [2, 4]


def test_arrays_of_the_host_are_calculated_with_there(on_gpu):
    """Wherever others are made."""
    x, y = np.arange(4, dtype='f'), np.empty(4, 'f')
    backend.launch('scale', y, x, np.full(1, 2, 'f'), 4)
    assert y.tolist() == [0, 2, 4, 6]
    a = ndarray.from_numpy(x, pyops.cpu())
    a += 1
    assert x.tolist() == [1, 2, 3, 4] and (a * 2).tolist() == [2, 4, 6, 8]


def test_a_plan_refuses_a_kernel_on_another_device(on_gpu):
    """Its replay would pass host addresses to the GPU, or the reverse."""
    host, there = np.ones(4, 'f'), put(np.ones(4, 'f'))
    with pytest.raises(RuntimeError, match=r'fill: runs on pyops.cpu\(\), but the plan records on pyops.gpu\(\)'), Plan():
        backend.launch('fill', host, 4, 2.0)
    with (backend.on(backend.HOST), Plan() as plan,
          pytest.raises(RuntimeError, match=r'fill: runs on pyops.gpu\(\), but the plan records on pyops.cpu\(\)')):
        backend.launch('fill', there, 4, 2.0)
    assert not plan.actions and (host == 1).all() and (get(there) == 1).all()


def test_a_plan_allocates_only_on_the_device_that_it_records_on(on_gpu):
    with backend.on(backend.HOST), Plan() as plan:
        there, here = ndarray.empty(4, device=on_gpu), backend.empty(4)
    assert there.device is on_gpu and type(here) is np.ndarray and plan.memory().intermediates == 64


def test_numpy_has_copies_of_what_lies_on_a_gpu(on_gpu):
    x = np.arange(6, dtype='f').reshape(2, 3)
    a = ndarray.from_numpy(x.T)
    x[...] = 0
    for copy in (a.numpy(), np.asarray(a), np.from_dlpack(a, device='cpu')):
        copy[...] = 7
    assert a.T.tolist() == [[0, 1, 2], [3, 4, 5]] and repr(a[0]) == 'NDArray([0., 3.], dtype=float32, device=pyops.gpu())'
    assert not hasattr(a, '__array_interface__')


# ---- DLPack: both sides are pyops, since no other library knows the emulator's memory -----------------------------------

class WithoutVersions:
    """A producer with the signature of DLPack before 1.0."""

    def __init__(self, array):
        self.array, self.streams = array, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.array.__dlpack__(stream=stream)


@pytest.mark.parametrize('wrap', [lambda a: a, WithoutVersions], ids=['versioned', 'without versions'])
def test_dlpack_shares_the_memory_of_a_gpu_and_keeps_strides(on_gpu, wrap):
    a = ndarray.array(np.arange(24, dtype='f').reshape(4, 6))
    for view in (a, a.T, a[1:, ::2], a[2], a[1, 2], a[:0], a[:, None].broadcast_to((4, 3, 6))):
        assert view.__dlpack_device__() == (2, 0)
        b = pyops.from_dlpack(wrap(view))
        assert b.device is on_gpu and b.shape == view.shape and b.strides == view.strides and b.dtype is view.dtype
        np.testing.assert_array_equal(b.numpy(), view.numpy())
        if view.size:
            assert b.location() == view.location() and b.buffer is not view.buffer
    b = pyops.from_dlpack(wrap(a[1:, ::2]))
    b += 100
    assert a[1].tolist() == [106, 7, 108, 9, 110, 11]


@pytest.mark.parametrize('dtype', ['float32', 'int32', 'int64', 'uint8', 'bfloat16'])
def test_dlpack_keeps_every_dtype_of_a_gpu(on_gpu, dtype):
    x = np.array([1.5, 2, 250], 'f')
    a = on_gpu.put(to_bf16(x) if dtype == 'bfloat16' else x.astype(dtype))
    b = pyops.from_dlpack(a)
    assert b.dtype == a.dtype and b.location() == a.location()
    np.testing.assert_array_equal(b.numpy(), x if dtype == 'bfloat16' else x.astype(dtype))


def test_the_memory_of_a_dlpack_capsule_lives_as_long_as_its_consumer(on_gpu):
    before = on_gpu._pool.used
    a = ndarray.full((300, 100), 2.0)
    held = on_gpu._pool.used
    b = pyops.from_dlpack(a)
    del a
    assert on_gpu._pool.used == held and b.numpy().sum() == 60_000
    del b
    assert on_gpu._pool.used == before
    capsules = [ndarray.full((300, 100), 2.0).__dlpack__(), ndarray.full((300, 100), 2.0).__dlpack__(max_version=(1, 1))]
    assert on_gpu._pool.used > held and [repr(c).split('"')[1] for c in capsules] == ['dltensor', 'dltensor_versioned']
    del capsules                                                # unused: the capsule itself frees the memory
    assert on_gpu._pool.used == before


def test_dlpack_on_a_gpu_copies_only_on_request(on_gpu):
    a = ndarray.array([1.0, 2.0])
    with pytest.raises(BufferError, match='needs a copy, but copy is False'):
        np.from_dlpack(a, device='cpu', copy=False)
    with pytest.raises(BufferError, match='negative strides'):
        a[::-1].__dlpack__()

    class Copied(WithoutVersions):
        def __dlpack__(self, stream=None, max_version=None):
            return self.array.__dlpack__(stream=stream, max_version=max_version, copy=True)
    b = pyops.from_dlpack(Copied(a))
    b += 1
    assert a.tolist() == [1, 2] and b.tolist() == [2, 3]
    on_cpu = pyops.from_dlpack(a, pyops.cpu())
    assert on_cpu.device is pyops.cpu() and on_cpu.tolist() == [1, 2]


def test_from_dlpack_passes_the_stream_and_refuses_a_used_capsule(on_gpu):
    a = WithoutVersions(ndarray.array([1.0]))
    capsule = a.__dlpack__(stream=-1)
    pyops.from_dlpack(a)
    assert a.streams == [-1, on_gpu.stream]

    class Again(WithoutVersions):
        def __dlpack__(self, stream=None):
            return capsule
    pyops.from_dlpack(Again(a.array))
    with pytest.raises(BufferError, match='that no library has used'):
        pyops.from_dlpack(Again(a.array))


@pytest.mark.parametrize('field,value,error,message', [
    ('device_id', 1, BufferError, r'device \(2, 1\): expected the first GPU'),
    ('lanes', 4, TypeError, 'type code 2 of 32 bits, 4 lanes: expected .*bfloat16; convert'),
    ('code', 5, TypeError, 'type code 5 of 32 bits, 1 lanes'),
    ('byte_offset', 2, ValueError, 'multiple of the element size, 4')])
def test_from_dlpack_refuses_what_ndarrays_cannot_hold(on_gpu, field, value, error, message):
    class Changed(WithoutVersions):
        def __dlpack__(self, stream=None, max_version=None):
            capsule = self.array.__dlpack__(max_version=max_version)
            managed = next(reversed(dlpack._exported.values()))[0]
            setattr(managed.tensor, field, value)
            return capsule
    before = len(dlpack._exported)
    with pytest.raises(error, match=message):
        pyops.from_dlpack(Changed(ndarray.array([1.0])))
    assert len(dlpack._exported) == before                      # the deleter was called


def test_the_library_tells_what_device_it_uses(device):
    lib, numbers = library.cuda().lib, [ctypes.c_int32() for _ in range(3)]
    assert not lib.pyops_device_properties(*map(ctypes.byref, numbers))
    free, total = gpu.memory_info()
    assert numbers[0].value >= 8 and numbers[2].value >= 1 and 0 < free <= total and device.model
    assert device.memory() == total


def test_an_array_of_the_cpu_is_not_assigned_to_one_on_a_gpu(on_gpu):
    y, x = ndarray.zeros(3), array([1, 2, 3], 'float32', pyops.cpu())
    with pytest.raises(TypeError, match=r'arrays on two devices, pyops.gpu\(\) and pyops.cpu\(\)'):
        y[...] = x
    assert y.tolist() == [0, 0, 0]


def test_a_pool_is_trimmed_while_memory_of_another_size_comes_back(on_gpu, monkeypatch):
    pool, late = on_gpu._pool, []
    pool.take(1000)
    late.append(pool.take(12_345))
    pool._free.pop(late[0].size, None)
    call = gpu._call
    monkeypatch.setattr(gpu, '_call', lambda *given: (late.clear(), call(*given)))
    pool.trim()
    assert late == []


def test_a_plan_on_a_gpu_is_fed_numbers_of_a_smaller_kind(on_gpu):
    rows = backend.zeros(3, np.int64)
    with Plan(None, run=False, rows=rows) as plan:
        pass
    plan.feed(rows=np.array([4, 5, 6], np.int32))
    assert get(rows).tolist() == [4, 5, 6]


def test_a_plan_that_is_a_graph_follows_the_precision(on_gpu):
    a = put(np.random.default_rng(0).standard_normal((64, 64)).astype('f'))
    with Plan(None, a=a) as plan:
        c = backend.empty((64, 64))
        backend.gemm(c, a, a)

    def product(precision):
        on_gpu.precision = precision
        plan.run()
        return get(c)

    try:
        plain, again, rounded = product('fp32'), product('fp32'), product('bf16')
        assert (plain == again).all() and (plain != rounded).any()
        assert (product('bf16') == rounded).all() and (product('fp32') == plain).all()
    finally:
        on_gpu.precision = 'fp32'
