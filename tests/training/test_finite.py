"""Steps whose loss or gradient is not finite: skipped, named, saved, and replayed from the file."""
import json
import re

import numpy as np
import pytest
from arrays import gathered
from places import get, put
from random_programs import Program, Training
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from translation import TINY_TRANSFORMER, assert_same_training, newest

import mnist.train
import transformer.train
from pyops import action_file, fit, init, ops
from pyops.__main__ import main
from pyops.data.batches import gather
from pyops.errors import UserError
from pyops.finite import FiniteSteps, divide, first_not_finite
from pyops.optim import Adam, AdamW, Muon
from pyops.params import Parameters, Spec
from pyops.quantization import Recipe, family
from pyops.steps import SizedSteps, Steps

SAMPLES = 12


class Net:
    """Two linear layers; a row of the table x for each sample.   has_entry: the optimizer logs the step, before the update"""

    def __init__(self, optimizer=Adam, max_norm=1.0, has_entry=False):
        self.has_entry = has_entry
        self.params = Parameters({'hidden.weight': Spec((6, 5), init.normal(0.5)), 'hidden.bias': Spec((6,), init.zeros()),
                                  'output.weight': Spec((3, 6), init.normal(0.5))})
        p, rng = self.params, np.random.default_rng(0)
        self.layers = [ops.Linear(p['hidden.weight'], p['hidden.bias'], 'hidden'),
                       ops.Linear(p['output.weight'], None, 'output')]
        self.relu, self.loss = ops.ReLU('relu'), ops.CrossEntropy(name='loss')
        self.optimizer, self.history = optimizer(self.params, 0.1, max_norm=max_norm), fit.History()
        self.x = put(rng.standard_normal((SAMPLES, 5)).astype(np.float32))
        self.numbers = put(np.arange(SAMPLES, dtype=np.int32).reshape(-1, 1))
        self.labels, self.one = put(rng.integers(0, 3, (SAMPLES, 1)).astype(np.int32)), put(np.ones(1, np.float32))

    def step(self, rows):
        self.params.zero_grads()
        h, c1 = self.layers[0].forward(gathered(self.x, self.numbers, rows))
        a, c2 = self.relu.forward(h)
        y, c3 = self.layers[1].forward(a)
        loss, c4 = self.loss.forward(y, gather(self.labels, rows).reshape(-1))
        dy = self.layers[1].backward(self.loss.backward(self.one, c4), c3)
        self.layers[0].backward(self.relu.backward(dy, c2), c1)
        if self.has_entry:
            return self.optimizer.step(entry=self.history.entry(loss, None))
        self.optimizer.step()
        self.history.add(loss, None, self.optimizer.norm)

    def planned(self, sized=False):
        inputs = dict(x=self.x, numbers=self.numbers, labels=self.labels, one=self.one,
                      **self.optimizer.arrays(), **self.history.arrays())
        if sized:
            return SizedSteps(lambda rows, n: self.step(rows[:n]), lambda rows: (len(rows),), self.params, **inputs)
        return Steps(self.step, self.params, **inputs)

    def state(self):
        return [get(array).copy() for array in (self.params.values, self.params.m, self.params.v, self.optimizer.count)]


BATCHES = [np.arange(4), np.arange(4, 8), np.arange(2, 5), np.arange(8, 12)]


@pytest.mark.parametrize('sized', [False, True])
@pytest.mark.parametrize('optimizer', [Adam, AdamW, Muon])
@pytest.mark.parametrize('max_norm', [1.0, None])
@pytest.mark.parametrize('has_entry', [False, True])
def test_finite_steps_have_the_bits_of_plain_ones(sized, optimizer, max_norm, has_entry, tmp_path):
    plain, checked = Net(optimizer, max_norm), Net(optimizer, max_norm, has_entry)
    steps, checks = plain.planned(sized), FiniteSteps(checked.planned(sized), checked.optimizer.count, tmp_path)
    for rows in BATCHES:
        steps(rows)
        checks(rows)
    for one, other in zip(plain.state(), checked.state(), strict=True):
        assert one.tobytes() == other.tobytes()
    assert plain.history.read(4) == checked.history.read(4) and not list(tmp_path.iterdir())


@pytest.mark.parametrize('sized', [False, True])
@pytest.mark.parametrize('optimizer', [Adam, AdamW, Muon])
@pytest.mark.parametrize('folder', [False, True])
@pytest.mark.parametrize('max_norm, has_entry', [(1.0, False), (1.0, True), (None, True)])
def test_a_step_that_is_not_finite_changes_nothing_but_the_step_count(sized, optimizer, folder, max_norm, has_entry, tmp_path,
                                                                      capsys):
    net = Net(optimizer, max_norm, has_entry)
    steps = FiniteSteps(net.planned(sized), net.optimizer.count, tmp_path if folder else None)
    steps(BATCHES[0])
    before = net.state()
    net.x[5, 2] = np.inf                        # a sample of the second batch
    steps(BATCHES[1])
    *after, count = net.state()
    for one, other in zip(before, after, strict=False):
        assert one.tobytes() == other.tobytes()
    assert count[0] == before[-1][0] + 1
    first, second = net.history.read(2)
    assert np.isfinite(first).all() and not np.isfinite(second).all()
    found = tmp_path / 'not_finite_step_1.safetensors'
    if folder:
        assert found.exists() and 'step 1 : batch: kernel embedding_forward' in capsys.readouterr().err
    steps(BATCHES[1])                           # the log has a row that is not finite, and the reason is still found
    assert not np.isfinite(net.history.read(1)).all()
    assert not folder or 'step 2 : batch: kernel embedding_forward' in capsys.readouterr().err
    steps(BATCHES[3])
    assert net.state()[0].tobytes() != before[0].tobytes() and np.isfinite(net.history.read(1)).all()


def test_a_skipped_step_does_not_change_amax_histories(tmp_path):
    class Rounded(Net):
        def __init__(self):
            super().__init__()
            self.family, p = family(Recipe.parse('fp8:delayed=3')), self.params
            self.layers = [self.family.Linear(p['hidden.weight'], p['hidden.bias'], 'hidden'),
                           self.family.Linear(p['output.weight'], None, 'output')]
            self.family.attach(self.optimizer)

        def step(self, rows):
            with self.family.recording():
                super().step(rows)

    net = Rounded()
    steps, histories = FiniteSteps(net.planned(), net.optimizer.count), net.optimizer.histories
    for rows in BATCHES[:2]:
        steps(rows)
    before = get(histories.history).copy()
    assert before[:, :2].any(1).sum() > 4 and not get(histories.amax).any()
    net.x[8:] *= 100                            # also larger than before
    net.x[9, 2] = np.nan
    steps(BATCHES[3])
    assert get(histories.history).tobytes() == before.tobytes() and not get(histories.amax).any()
    net.x[9, 2] = 0
    steps(BATCHES[3])
    assert (get(histories.history)[:, 1:] == before[:, :-1]).all()


def test_a_step_that_is_not_finite_does_not_spoil_the_statistics_of_a_batch_norm():
    program = Program((5,), [('Linear', 5, 4, True), ('BatchNorm1d', 4), ('Linear', 4, 3)], 3, ('Adam', dict(lr=0.01)), [])
    training = Training(program)
    steps = FiniteSteps(training.steps(), training.optimizer.count)
    steps(put(np.arange(4)))
    before = training.state()
    training.x[5, 0] = np.nan
    steps(put(np.arange(4, 8)))
    after = training.state()
    assert {name for name in before if before[name] != after[name]} == {'losses'} and len(before) >= 6


@pytest.mark.parametrize('sized', [False, True])
def test_the_kernel_that_computed_the_first_such_value_is_named_and_replayed_from_its_file(sized, tmp_path, capsys):
    net = Net()
    steps = FiniteSteps(net.planned(sized), net.optimizer.count, tmp_path, lambda rows: [f'sample {row}' for row in rows])
    steps(BATCHES[0])
    net.params['hidden.weight'].value[...] = 3e38       # finite, and its product with x is not
    steps(BATCHES[2])
    path = tmp_path / 'not_finite_step_1.safetensors'
    text, *lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r'step 1 : hidden: kernel gemm, action \d+ of \d+, computed the first values that are not finite; '
                        rf'its inputs are saved, run it again with python -m pyops replay {path}', text)
    assert [line.strip() for line in lines] == ['sample 2', 'sample 3', 'sample 4']
    with pytest.raises(SystemExit) as left:
        main(['replay', str(path)])
    assert left.value.code == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith('hidden: kernel gemm, step 1; saved on ')
    assert out[1:4] == ['  sample 2', '  sample 3', '  sample 4']
    assert '  input   a (3, 5) largest magnitude ' in '\n'.join(out)
    assert re.search(r'  result  c \(3, 6\) \d+ of 18 values are not finite, the first is -?(inf|nan) at \[', out[-1])
    _, inputs, results = action_file.replay(path)
    assert (inputs['a'] == get(net.x)[2:5]).all() and inputs['b'].shape == (5, 6) and (inputs['b'] == np.float32(3e38)).all()


@pytest.mark.parametrize('has_entry, logs', [(False, {'grad_norm.norm', 'log_step.log'}), (True, {
    'grad_norm_logged.norm', 'grad_norm_logged.step', 'grad_norm_logged.log', 'grad_norm_logged.written'})])
def test_every_kernel_of_a_step_has_the_same_results_from_a_file(has_entry, logs, tmp_path):
    net = Net(has_entry=has_entry)
    plan = net.planned().plan(BATCHES[0])
    seen = set()
    for number, action in enumerate(plan.replayed):
        memory = action_file.memory_of(plan, action)
        path = action_file.save(tmp_path / 'action.safetensors', action, memory, {})
        plan.run(number, number + 1)
        _, _, results = action_file.replay(path)
        for name, array in results.items():
            seen.add(f'{action.kernel}.{name}')
            assert array.tobytes() == get(plan.argument(action, name)).tobytes(), (action.kernel, name)
    assert {'gemm.c', 'adam.param'} | logs <= seen, seen


@pytest.mark.parametrize('has_entry', [False, True])
def test_a_finite_step_has_no_action_to_name(has_entry):
    net = Net(has_entry=has_entry)
    net.history.log[5] = np.nan                 # of a skipped step
    plan = net.planned().plan(BATCHES[0])
    assert first_not_finite(plan, divide(plan).end) == ('loss or gradient was not finite, but all results are finite when the '
                                                        'step is repeated')


def test_parameters_that_were_not_finite_are_named(tmp_path, capsys):
    net = Net()
    net.params['output.weight'].value[1, 1] = np.nan
    FiniteSteps(net.planned(), net.optimizer.count, tmp_path)(BATCHES[0])
    assert capsys.readouterr().err.splitlines()[0] == 'step 0 : parameter output.weight was not finite before the step'
    assert not list(tmp_path.iterdir())


def test_a_step_without_an_update_or_a_log_is_refused():
    net = Net()
    steps = Steps(lambda rows: net.optimizer.step(), net.params, **net.optimizer.arrays())
    with pytest.raises(ValueError, match='needs an update, and one entry in a log, got 0'):
        FiniteSteps(steps, net.optimizer.count)(BATCHES[0])


@pytest.mark.parametrize('content, problem', [
    (b'no tensors', 'cannot be read .*; expected a file that --check-finite saved'), (None, 'got another file of tensors'),
    ({'version': '99', 'call': '{}'}, 'format version 99, and this program reads 1; update pyops'),
    ({'version': '1', 'call': json.dumps(dict(kernel='gone', values=[], arrays={}, ranges=[], about={}, device='', isa=''))},
     'has no kernel gone with 0 ')])
def test_a_file_that_is_no_call_is_refused(content, problem, tmp_path):
    path = tmp_path / 'file.safetensors'
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        save_file({'x': np.zeros(1)}, path, content and {'format': action_file.FORMAT, **content})
    with pytest.raises(UserError, match=f'{path}: .*{problem}'):
        action_file.replay(path)


def changed_call(tmp_path, change):
    """Write the call of a matrix product after change(call), and return the path."""
    net = Net()
    plan = net.planned().plan(BATCHES[0])
    action = next(action for action in plan.replayed if action.kernel == 'gemm')
    path = action_file.save(tmp_path / 'action.safetensors', action, action_file.memory_of(plan, action), {})
    with safe_open(path, 'numpy') as file:
        metadata = file.metadata()
    call = json.loads(metadata['call'])
    call = change(call) or call
    save_file(load_file(path), path, metadata | {'call': call if isinstance(call, str) else json.dumps(call)})
    return path


CHANGES = {
    'no call': lambda call: [1], 'deep': lambda call: '[' * 100_000, 'no JSON': lambda call: '{',
    'no kernel': lambda call: call.update(kernel=['gemm']), 'about': lambda call: call.update(about='text'),
    'device': lambda call: call.pop('device') and None, 'ranges': lambda call: call.update(ranges={}),
    'negative range': lambda call: call['ranges'].append(-1), 'large range': lambda call: call['ranges'].append(1 << 62),
    'other range': lambda call: call['ranges'].insert(0, 4), 'arrays': lambda call: call.update(arrays=[]),
    'place': lambda call: call['arrays'].update(a=0), 'array': lambda call: call['arrays'].pop('a') and None,
    'number': lambda call: call['arrays']['a'].update(range=99), 'bool': lambda call: call['arrays']['a'].update(range=True),
    'offset': lambda call: call['arrays']['a'].update(offset=1 << 20),
    'odd': lambda call: call['arrays']['a'].update(offset=1), 'back': lambda call: call['arrays']['a'].update(strides=[-20, 4]),
    'stride': lambda call: call['arrays']['a'].update(strides=[1 << 12, 4]),
    'shape': lambda call: call['arrays']['a'].update(shape=[1000, 1000]),
    'empty': lambda call: call['arrays']['a'].update(shape=[0, 1 << 46, 1 << 46], strides=[4, 4, 4]),
    'axes': lambda call: call['arrays']['a'].update(shape=[1]),
    'objects': lambda call: call['arrays']['a'].update(dtype='object'),
    'values': lambda call: call.update(values=3), 'text': lambda call: call['values'].__setitem__(-1, 'a'),
    'host': lambda call: call['values'].__setitem__(0, {'host': [1 << 70]})}


@pytest.mark.parametrize('name', CHANGES)
def test_a_call_of_another_structure_is_refused(name, tmp_path):
    path = changed_call(tmp_path, CHANGES[name])
    with pytest.raises(UserError, match='cannot be read .*; expected a file that --check-finite saved'):
        action_file.load(path)


@pytest.mark.parametrize('change, problem', [
    (lambda call: call.update(kernel='set_threads', values=[]), 'has no kernel set_threads with 0 arguments'),
    (lambda call: call.update(kernel='\x1b[2J'), r'has no kernel \\x1b\[2J with'),
    (lambda call: call['values'].__setitem__(0, 3), 'the value of c does not suit the kernel gemm'),
    (lambda call: call['values'].__setitem__(0, {'host': [1]}), 'the value of c does not suit'),
    (lambda call: call['arrays']['c'].update(dtype='int32'), 'the value of c does not suit'),
    (lambda call: call['values'].__setitem__(-1, None), 'the value of .* does not suit')])
def test_a_value_that_does_not_suit_the_kernel_is_refused(change, problem, tmp_path):
    path = changed_call(tmp_path, change)
    action_file.load(path)
    with pytest.raises(UserError, match=problem):
        action_file.replay(path)


# ---- programs --------------------------------------------------------------------------------------------------------

SHORT = ['-e', '1', '--max-steps', '4', *TINY_TRANSFORMER]


def test_a_checked_run_of_the_transformer_has_the_bits_of_a_plain_one(tmp_path, capsys):
    transformer.train.main([*SHORT, '-c', str(tmp_path / 'plain')])
    transformer.train.main([*SHORT, '-c', str(tmp_path / 'checked'), '--check-finite', str(tmp_path / 'found'),
                            '--max-skipped', '3'])
    assert_same_training(newest(tmp_path / 'plain'), newest(tmp_path / 'checked'))
    assert not (tmp_path / 'found').exists() and 'skipped' not in capsys.readouterr().out


def test_a_run_skips_steps_names_their_sentences_and_ends_after_the_number_allowed(tmp_path, capsys, monkeypatch):
    build, read, captured = fit.training_step, fit.History.read, {}

    def capture(args, step, params, /, *rest, **inputs):
        captured['params'] = params
        return build(args, step, params, *rest, **inputs)

    def read_and_spoil(self, n):
        rows = read(self, n)
        captured['params']['output.weight'].value[...] = 3e38
        return rows
    monkeypatch.setattr(fit, 'training_step', capture)
    monkeypatch.setattr(fit.History, 'read', read_and_spoil)
    with pytest.raises(UserError, match=r'(loss|gradient) is (nan|inf) at .*, skip more steps with --max-skipped, or find the'):
        transformer.train.main([*SHORT, '-c', str(tmp_path), '--check-finite', str(tmp_path / 'found'), '--max-skipped', '1'])
    out, err = capsys.readouterr()
    assert 'step skipped : the ' in out and '; 1 of at most 1' in out
    first = err.splitlines()[0]
    assert re.match(r'step \d : \S+: kernel \w+, action \d+ of \d+, computed the first values that are not finite;', first)
    assert '\t' in err.splitlines()[1] and re.fullmatch(r'  and \d+ more', err.splitlines()[5])
    assert load_file(first.rpartition(' ')[2]) and not list(tmp_path.glob('*.safetensors'))


@pytest.mark.parametrize('flags, flag', [(['--check-finite', '--no-plan'], '--check-finite'),
                                         (['--max-skipped', '2', '--parts', '2'], '--max-skipped 2')])
def test_flags_that_divide_a_step_otherwise_are_refused(flags, flag, tmp_path):
    with pytest.raises(UserError, match=f'{flag}: a step is checked within its plan, as a whole; leave out --no-plan, --parts'):
        transformer.train.main([*SHORT, '-c', str(tmp_path), *flags])


def test_digits_are_trained_with_the_same_bits_when_they_are_checked(tmp_path, capsys):
    texts = []
    for flags in ([], ['--check-finite', str(tmp_path), '--max-skipped', '1']):
        mnist.train.main(['--embedded', '-e', '1', '--quiet', *flags])
        texts.append(capsys.readouterr().out.splitlines()[-2:])
    assert texts[0] == texts[1]
