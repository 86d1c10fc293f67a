"""One plan for batches of all sizes: the results of a plan recorded for each size, bit for bit."""
import numpy as np
import pytest
from places import get, put

from pyops import backend, init
from pyops.backend.calls import Calls
from pyops.data.batches import gather
from pyops.ops import CrossEntropy, Embedding, Linear, ReLU
from pyops.optim import Adam
from pyops.params import Parameters, Spec
from pyops.steps import SizedSteps


class Classifier:
    """Classifies tokens and rows of tables by an embedding and a hidden layer."""

    def __init__(self):
        self.params = Parameters({'embedding.weight': Spec((20, 8), init.normal(0.5)),
                                  'hidden.weight': Spec((8, 8), init.normal(0.5)), 'hidden.bias': Spec((8,), init.zeros()),
                                  'output.weight': Spec((5, 8), init.normal(0.5))})
        self.embedding, self.relu, self.loss = Embedding(self.params['embedding.weight']), ReLU(), CrossEntropy()
        self.hidden = Linear(self.params['hidden.weight'], self.params['hidden.bias'])
        self.output, self.adam = Linear(self.params['output.weight']), Adam(self.params, 0.1, max_norm=1.0)
        rng = np.random.default_rng(0)
        self.words, self.classes = (put(rng.integers(0, n, (100, 1)).astype(np.int32)) for n in (20, 5))
        self.one = put(np.ones(1, np.float32))

    def inputs(self):
        return dict(words=self.words, classes=self.classes, one=self.one, **self.adam.arrays())

    def step(self, rows, count, tokens):
        """Train on these rows of the tables, and on their first `tokens` rows."""
        self.params.zero_grads()
        rows = rows[:count]
        first = self.words.reshape(1, -1)[:, :tokens], self.classes.reshape(-1)[:tokens]
        chosen = gather(self.words, rows), gather(self.classes, rows).reshape(-1)
        losses = []
        for ids, labels in (first, chosen):
            x, c1 = self.embedding.forward(ids)
            h, c2 = self.hidden.forward(x)
            h, c3 = self.relu.forward(h)
            y, c4 = self.output.forward(h)
            loss, c5 = self.loss.forward(y.reshape(-1, 5), labels)
            losses.append(loss)
            dh = self.output.backward(self.loss.backward(self.one, c5).reshape(y.shape), c4)
            self.embedding.backward(self.hidden.backward(self.relu.backward(dh, c3), c2), c1)
        self.adam.step()
        return losses


SIZES = [(4, 20), (2, 12), (4, 24), (3, 18), (9, 50), (1, 2), (9, 54), (1, 1)]


def test_one_plan_for_all_sizes_has_the_results_of_a_step_without_a_plan():
    eager, planned = Classifier(), Classifier()
    order, tokens = np.random.default_rng(1).permutation(100), 0
    steps, recordings = SizedSteps(planned.step, lambda rows: (len(rows), tokens), planned.params, **planned.inputs()), set()
    for count, tokens in SIZES:
        rows = order[:count]
        losses = [float(get(loss)[0]) for loss in eager.step(put(rows), count, tokens)]
        assert losses == [float(get(loss)[0]) for loss in steps(rows)]
        recordings.add(id(steps._sized[2]))
    assert (get(eager.params.values) == get(planned.params.values)).all()
    assert get(eager.adam.count)[0] == len(SIZES)
    assert len(recordings) < len(SIZES), 'smaller batches must not be recorded again'


def test_batches_of_equal_sizes_keep_the_arguments(monkeypatch):
    model, changes, change = Classifier(), [], Calls.change
    monkeypatch.setattr(Calls, 'change', lambda self, *arguments: changes.append(1) or change(self, *arguments))
    steps = SizedSteps(model.step, lambda rows: (len(rows), 2 * len(rows)), model.params, **model.inputs())
    for count, total in ((6, 1), (6, 1), (5, 2), (5, 2), (6, 3)):
        steps(np.arange(count))
        assert len(changes) == total


def test_the_plan_of_a_batch_has_its_sizes():
    model = Classifier()
    steps = SizedSteps(model.step, lambda rows: (len(rows), 2 * len(rows)), model.params, **model.inputs())
    steps(np.arange(20))
    listing = steps.plan(np.arange(3)).listing()
    assert 'Tensor(INT32)(words_view)(1, 6)' in listing, listing


@pytest.mark.parametrize('step, problem', [
    (lambda x, rows, n: backend.launch('scale', x, x, put(np.ones(1, np.float32)), n * n), 'scale: n is not linear'),
    (lambda x, rows, n: backend.launch('fill', x, 4, 1.0 / n), 'fill: value is not linear'),
    (lambda x, rows, n: [backend.launch('fill', x, 4, 1.0) for _ in range(n)], 'makes other launches with sizes'),
    (lambda x, rows, n: [backend.empty(4, name='more') for _ in range(40 - n)], r'more \(4,\): the plan has no memory'),
])
def test_a_step_that_one_plan_cannot_run_is_refused(step, problem):
    x = put(np.zeros(400, np.float32))
    steps = SizedSteps(lambda rows, n: step(x, rows, n), lambda rows: (8,), None, x=x)
    with pytest.raises(ValueError, match=problem):
        steps(np.arange(3))


def test_a_batch_of_several_parts_has_a_plan_for_each_number_of_parts():
    eager, planned = Classifier(), Classifier()

    def make_step(model):
        def step(rows, *sizes):
            first, losses = 0, []
            for count, tokens in zip(sizes[::2], sizes[1::2], strict=True):
                losses += model.step(rows[first:first + count], count, tokens)
                first += count
            return losses
        return step

    def sizes(rows):
        return tuple(size for part in np.array_split(rows, max(1, len(rows) // 5)) for size in (len(part), 3 * len(part)))
    steps, plain = SizedSteps(make_step(planned), sizes, planned.params, **planned.inputs()), make_step(eager)
    for count in (10, 3, 11, 17, 14, 10):
        rows = np.random.default_rng(count).permutation(100)[:count]
        losses = [float(get(loss)[0]) for loss in plain(put(rows), *sizes(rows))]
        assert losses == [float(get(loss)[0]) for loss in steps(rows)]
    assert sorted(steps._sized) == [2, 4, 6]
    assert (get(eager.params.values) == get(planned.params.values)).all()
