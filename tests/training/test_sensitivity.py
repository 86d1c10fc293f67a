"""python -m pyops inspect sensitivity: steps with one rounded operand, and the search for a recipe."""
import dataclasses
import json
import math
import re

import numpy as np
import pytest
from small_models import make_seq2seq, make_transformer, pairs
from translation import TINY_TRANSFORMER, train_steps

from pyops import __main__, formats
from pyops.checkpoint import find
from pyops.errors import UserError
from pyops.inspect.tables import worst_first
from pyops.optim import Adam
from pyops.quantization import OPERANDS, Recipe, family
from pyops.sensitivity import SORTS, Replay, Result, _Store, _Updates, _updates, search, singles
from pyops.text.translator import Translator, of_checkpoint
from transformer import train as transformer_train


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    transformer_train.main([*TINY_TRANSFORMER, '-e', '1', '-c', str(folder / 'ckpt')])
    return folder / 'ckpt'


@pytest.fixture(scope='module')
def replay():
    return replay_of(make_transformer)


def replay_of(make, store=None):
    model, (_, corpus) = make(), pairs()
    train_steps(model, corpus, 20)
    return Replay(Translator(model, [], []), corpus, store)


@pytest.fixture
def run(capsys):
    """run(arguments) -> exit status, standard output, standard error of the command."""
    def call(*arguments):
        with pytest.raises(SystemExit) as stop:
            __main__.main(['inspect', 'sensitivity', *map(str, arguments)])
        return stop.value.code or 0, *capsys.readouterr()
    return call


def of_encoder(replay):
    return [(layer, operand) for layer, operand in replay.operands if layer.startswith('encoder')]


def by_a_new_model(make, recipe):
    """The loss and the gradient of the step in a model that is built with a recipe."""
    trained, (_, corpus) = make(), pairs()
    train_steps(trained, corpus, 20)
    model = type(trained)(dataclasses.replace(trained.config, ops=family(recipe)), 3)
    model.params.values[...] = trained.params.values
    model.params.zero_grads()
    loss, ctx = model.forward(corpus.batch_of(np.arange(len(corpus))))
    model.backward(ctx)
    return float(loss[0]), model.params.grads.astype(np.float64)


def trained_on(make, recipe, batches, lr):
    """The loss after updates with Adam in a model that is built with a recipe: on the last of these batches."""
    trained, (_, corpus) = make(), pairs()
    train_steps(trained, corpus, 20)
    model = type(trained)(dataclasses.replace(trained.config, ops=family(recipe)), 3)
    model.params.values[...] = trained.params.values
    optimizer = Adam(model.params, lr, max_norm=1.0)
    for rows in batches[:-1]:
        model.params.zero_grads()
        _, ctx = model.forward(corpus.batch_of(rows))
        model.backward(ctx)
        optimizer.step()
    return float(model.forward(corpus.batch_of(batches[-1]))[0][0])


class _Part:
    """Some pairs of a corpus."""
    def __init__(self, corpus, rows):
        self.corpus, self.rows = corpus, rows

    def __len__(self):
        return len(self.rows)

    def batch_of(self, rows):
        return self.corpus.batch_of(self.rows[rows])


@pytest.mark.parametrize('make', [make_transformer, make_seq2seq], ids=['transformer', 'seq2seq'])
def test_replayed_steps_are_those_of_a_model_that_trains_with_the_recipe(make):
    _, corpus = pairs()
    rows = np.split(np.random.default_rng(1).permutation(len(corpus))[:120], 3)

    def replayed(count):
        model = make()
        train_steps(model, corpus, 20)
        updates = _Updates([_Part(corpus, part) for part in rows[1:count + 1]],
                           lambda params: (Adam(params, 0.01, max_norm=1.0), lambda: None))
        return Replay(Translator(model, [], []), _Part(corpus, rows[0]), None, updates if count else None)

    replay, one, none = replayed(2), replayed(1), replayed(0)
    key = next(key for key in replay.operands if key[1] == 'wgrad.g')
    chosen = {key: formats.parse('mxfp4')}
    recipe = Recipe.parse(f'wgrad.g=mxfp4@{key[0]}')
    for each, count in (replay, 2), (one, 1):
        assert each.replayed == trained_on(make, Recipe(), rows[:count + 1], 0.01)
        result = each.measure(chosen)
        assert result.replayed == trained_on(make, recipe, rows[:count + 1], 0.01) != each.replayed
        # an operand of backward changes the loss only by updates, and each trial begins with the same state
        assert result.loss == each.loss == none.loss and result.cosine == none.measure(chosen).cosine < 1
    again = replay.measure({replay.operands[0]: formats.parse('bf16')})
    replay._store.results.clear()
    assert replay.measure({replay.operands[0]: formats.parse('bf16')}) == again
    assert math.isnan(none.replayed) and math.isnan(none.measure(chosen).replayed)
    rows_of = singles(replay, [formats.parse('mxfp4')], [key])
    assert rows_of[0].statistics['replayed_pct'] == 100 * (replay.measure(chosen).replayed / replay.replayed - 1) != 0
    assert 'replayed_pct' not in singles(none, [formats.parse('mxfp4')], [key])[0].statistics


def test_a_search_keeps_the_limit_after_replayed_steps(replay):
    operands = of_encoder(replay)
    measured = dict.fromkeys(operands, 1.0) | {operands[3]: 1.5}        # after updates; the step itself shows nothing

    class Recorded:
        loss, replayed, updates, costs = 1.0, 1.0, object(), {}

        def measure(self, chosen):
            return Result(1.0, 1.0, max((measured[key] for key in chosen), default=1.0))
    recorded = Recorded()
    rows = singles(recorded, [formats.parse('mxfp4')], operands)
    assert set(search(recorded, rows, 10.0, 0.9).chosen) == {*operands} - {operands[3]}
    assert set(search(recorded, rows, 60.0, 0.9).chosen) == {*operands}
    recorded.updates = None
    assert set(search(recorded, singles(recorded, [formats.parse('mxfp4')], operands), 10.0, 0.9).chosen) == {*operands}


@pytest.mark.parametrize('make', [make_transformer, make_seq2seq], ids=['transformer', 'seq2seq'])
def test_a_replay_is_the_step_of_a_model_with_the_recipe(make):
    replay = replay_of(make)
    all_layers = {layer for layer, _ in replay.operands}
    assert len(replay.operands) == sum(len(OPERANDS[kind]) for _, kind in replay.trial.given) and len(all_layers) > 5
    loss, gradient = by_a_new_model(make, Recipe.parse('bf16,fwd=mxfp4'))
    chosen = {(layer, operand): formats.parse('mxfp4' if operand.startswith('fwd.') else 'bf16')
              for layer, operand in replay.operands}
    result = replay.measure(chosen)
    _, exact = by_a_new_model(make, Recipe())
    assert result.loss == loss != replay.loss
    assert result.cosine == pytest.approx(gradient @ exact / np.linalg.norm(gradient) / np.linalg.norm(exact), abs=1e-6)
    assert result.cosine < 0.9999
    again = replay_of(make)
    assert again.loss == replay.loss and again.measure(chosen) == result


def test_each_operand_has_its_own_effect(replay):
    rows = singles(replay, [formats.parse('mxfp4'), formats.parse('bf16')], of_encoder(replay))
    assert len(rows) == 2 * 48
    for row in rows:
        is_forward = row.operand.partition('.')[0] in ('fwd', 'qk', 'pv')
        # backward reads the rounded copy of no forward operand, and dropout is off: only forward operands change the loss
        assert (row.statistics['loss'] != replay.loss) <= is_forward and 0 < row.statistics['cosine'] < 1 + 1e-6
    cosines = {str(fmt): [row.statistics['cosine'] for row in rows if str(row.format) == fmt] for fmt in ('mxfp4', 'bf16')}
    assert np.mean(cosines['mxfp4']) < np.mean(cosines['bf16']) and min(cosines['mxfp4']) < min(cosines['bf16']) < 1
    alone = next(row for row in rows if row.layer.endswith('self_attention.q') and row.operand == 'fwd.x')
    loss, _ = by_a_new_model(make_transformer, Recipe.parse(f'fwd.x=mxfp4@{alone.layer}'))
    assert loss == alone.statistics['loss']


def test_the_found_recipe_keeps_the_limits_and_is_cheaper_with_wider_limits(replay):
    operands, narrow = of_encoder(replay), {}
    rows = singles(replay, [formats.parse('mxfp4'), formats.parse('mxfp8')], operands)
    for most, least in ((0.04, 0.99999), (0.05, 0.9999), (100.0, 0.0)):
        found = search(replay, rows, most, least)
        assert found.result.loss <= replay.loss * (1 + most / 100) and found.result.cosine >= least
        shares = replay.bits(found.chosen)
        assert sum(shares.values()) == pytest.approx(1) and set(shares) <= {4, 8, 32}
        narrow[most] = sum(fmt.bits == 4 for fmt in found.chosen.values())
        recipe = replay.recipe(found.chosen)
        again = Recipe.parse(str(recipe))
        for layer, kind in replay.trial.given:
            want = {operand: fmt for (of, operand), fmt in found.chosen.items() if of == layer and operand in OPERANDS[kind]}
            assert again.of(layer, kind) == want
    assert narrow[0.04] < narrow[0.05] < narrow[100.0] == len(operands)


def test_costs_are_the_operations_of_the_products(replay):
    (_, corpus), config = pairs(), replay.model.config
    source, target = corpus.lengths.sum(0)
    for layer, rows, sizes in (('encoder.0.self_attention.q', source, 16 * 16), ('decoder.0.feed_forward.w1', target, 16 * 24),
                               ('output', target, 16 * config.target_size)):
        for product in ('fwd', 'dgrad', 'wgrad'):
            assert replay.costs[layer, product] == 2 * rows * sizes
    assert all(replay.costs['encoder.0.self_attention', product] > 0 for product in ('qk', 'pv', 'dp', 'dv', 'dq', 'dk'))


def test_results_are_kept_and_continued(tmp_path):
    path = tmp_path / 'results.jsonl'
    first = replay_of(make_transformer, _Store(path, 'one'))
    chosen = [{(layer, operand): formats.parse('mxfp4')} for layer, operand in first.operands[:4]]
    results = [first.measure(one) for one in chosen]
    with open(path, 'ab') as file:
        file.write(b'{"recipe": "fwd.x=mxf')              # the process ended while it wrote a line
    store = _Store(path, 'one')
    second = replay_of(make_transformer, store)
    assert [second.measure(one) for one in chosen] == results and second.steps == 1
    second.measure({second.operands[5]: formats.parse('mxfp4')})
    assert second.steps == 2 and len(_Store(path, 'one').results) == 5
    with pytest.raises(UserError, match='results.jsonl: has the results of another checkpoint, of other pairs or of other '
                                        'replayed steps; name another'):
        _Store(path, 'two')
    path.write_text('[1\n')
    with pytest.raises(UserError, match='results.jsonl: not a file of results; name another file with --results'):
        _Store(path, 'one')


def test_the_command_ranks_operands_and_writes_a_recipe_that_trains(checkpoint, run, tmp_path):
    flags = checkpoint, '-f', 'embedded', '--pairs', '20', '--layers', 'encoder.0,output', '--results', tmp_path / 'results'
    status, out, _ = run(*flags, '--formats', 'mxfp4,mxfp8', '--json')
    document = json.loads(out, parse_constant=pytest.fail)
    assert status == 0 and document['pairs'] == 20 and document['search'] is None
    cosines = [row['cosine'] for row in document['steps']]
    assert cosines == sorted(cosines) and {row['format'] for row in document['steps']} == {'mxfp4', 'mxfp8'}
    assert all(row['layer'].startswith(('encoder.0', 'output')) for row in document['steps'])
    lines = run(*flags, '--top', '3')[1].splitlines()
    assert lines[0].startswith(f'{len(cosines)} steps of') and lines[3].split() == 'cosine loss % format operand layer'.split()
    for line, row in zip(lines[4:7], document['steps'], strict=False):
        assert line.split() == [f'{row["cosine"]:.6f}', f'{row["loss_pct"]:+.4f}', row['format'], row['operand'], row['layer']]
    assert lines[7] == f'... and {len(cosines) - 3} more (--top {len(cosines)} shows all)'
    losses = [row['loss_pct'] for row in json.loads(run(*flags, '--json', '--sort', 'loss')[1])['steps']]
    assert losses == sorted(losses, reverse=True)
    path = tmp_path / 'recipe.txt'
    status, out, _ = run(*flags, '--search', '1', '--recipe', path)
    recipe = out.splitlines()[-1].removeprefix('--quant ')
    assert status == 0 and path.read_text().startswith('# of checkpoint_') and 'search : ' in out
    parsed = transformer_train.parser().parse_args(['--quant', f'@{path}']).quant
    assert parsed == recipe != 'none'
    transformer_train.main([*TINY_TRANSFORMER, '-c', str(tmp_path / 'new'), '--quant', f'@{path}', '--max-steps', '2'])


def test_replayed_steps_continue_the_training_and_are_kept(checkpoint, run, tmp_path):
    flags = checkpoint, '-f', 'embedded', '--pairs', '20', '--layers', 'encoder.0.feed_forward.w1', '--replayed-steps', '2'
    status, out, _ = run(*flags, '--results', tmp_path / 'results', '--sort', 'replayed', '--json')
    document = json.loads(out, parse_constant=pytest.fail)
    rises = [row['replayed_pct'] for row in document['steps']]
    assert status == 0 and document['replayed_steps'] == 2 and rises == sorted(rises, reverse=True) and len(set(rises)) > 3
    for row in document['steps']:
        assert row['replayed_pct'] == 100 * (row['replayed'] / document['replayed'] - 1)
    lines = (tmp_path / 'results').read_bytes().splitlines(True)
    (tmp_path / 'results').write_bytes(b''.join(lines[:4]) + lines[4][:20])          # the process ended while it wrote a line
    assert run(*flags, '--results', tmp_path / 'results', '--sort', 'replayed', '--json')[1] == out
    assert (tmp_path / 'results').read_bytes() == b''.join(lines)
    text = run(*flags, '--top', '1', '--sort', 'replayed', '--search', '1')[1].splitlines()
    assert re.search(r'after 2 updates \d', text[1])
    assert text[3].split() == 'cosine loss % replayed % format operand layer'.split()
    assert text[4].split()[2] == f'{rises[0]:+.4f}' and re.search(r', after updates [\d.]+ \([+-]', '\n'.join(text))
    still = json.loads(run(*flags, '--lr', '1e-30', '--json')[1])
    assert all(row['replayed_pct'] == 0 for row in still['steps'] if not row['operand'].startswith('fwd'))
    assert still['replayed'] != document['replayed'] and still['loss'] == document['loss']
    status, _, err = run(*flags[:-1], '1', '--results', tmp_path / 'results')
    assert status == 2 and 'of other replayed steps; name another file with --results' in err


def test_updates_begin_with_the_moments_and_the_rate_of_the_training(checkpoint):
    found = find(checkpoint, serving=True)
    model = of_checkpoint(found, {}).model
    settings, step = found.state['settings'], int(found.tensors['step'][0])
    settings['warmup'] = 2
    assert step > 2
    falling = settings['lr'] * min((step + 1) / settings['warmup'], (settings['warmup'] / (step + 1)) ** 0.5)
    for lr, schedule, want in ((0.25, 'inverse-root', 0.25), (None, 'inverse-root', falling), (None, 'cosine', settings['lr'])):
        found.state['settings']['schedule'] = schedule
        adam, set_rate = _updates(found, [], lr).optimizer(model.params)
        set_rate()
        assert adam.count[0] == step and adam.rate[0] == pytest.approx(want, rel=1e-6)
        for name in model.params:
            np.testing.assert_array_equal(model.params.view(model.params.m, name), found.tensors[f'adam_m/{name}'])
            np.testing.assert_array_equal(model.params.view(model.params.v, name), found.tensors[f'adam_v/{name}'])
        assert np.abs(model.params.m).max() > 0


def test_a_recipe_is_written_for_other_libraries(checkpoint, run, tmp_path):
    te, ao = tmp_path / 'te.yaml', tmp_path / 'ao.py'
    flags = checkpoint, '-f', 'embedded', '--pairs', '20', '--layers', 'encoder.0,output', '--search', '1'
    status, out, err = run(*flags, '--formats', 'fp8:block=tensor', '--recipe-te', te, '--recipe-torchao', ao)
    assert status == 0 and re.search(r'^search : \d+ of \d+ operands rounded', out, re.M)
    layers = {layer: {operand: fmt for operand, fmt in Recipe.parse(out.splitlines()[-1].removeprefix('--quant ')).of(
        layer, 'linear').items()} for layer in ('encoder.0.self_attention.q', 'encoder.0.feed_forward.w1', 'output')}
    assert all(fmts for fmts in layers.values())
    texts = te.read_text(), ao.read_text()
    for text in texts:
        assert text.startswith('# of checkpoint_') and '# search : ' in text
        assert re.search(r'^# (\d+) operands of attention are rounded in pyops alone$', text, re.M)
    assert r'"^(?:' in texts[0] and r'encoder\\.0\\.feed_forward\\.w1' in texts[0] and 'quant_format: FP8E4M3' in texts[0]
    assert "        'encoder.0.feed_forward.w1'" in texts[1] and compile(texts[1], ao, 'exec')
    told = re.findall(r'^\S+: (\d+) of \d+ rounded operands have no equivalent in (\w+), and stay unrounded there$', err, re.M)
    assert [library for _, library in told] == ['TransformerEngine', 'torchao'] and int(told[0][0]) > 0


def test_delayed_scaling_is_tried_with_the_amax_of_the_step(replay):
    key = replay.operands[0]
    assert key[1] == 'fwd.x' and replay.measure({key: formats.parse('fp8:delayed')}).cosine < 0.99999999
    assert replay.measure({key: formats.parse('fp8:delayed=3')}) == replay.measure({key: formats.parse('fp8:delayed')})


def test_bad_input_is_one_line_that_names_the_remedy(checkpoint, run, tmp_path):
    (tmp_path / 'norun').mkdir()
    remedy = 'give a checkpoint of a translator, or the folder of its training run'
    for arguments, want in (
            ((tmp_path / 'nowhere',), f'nowhere: no such folder; {remedy}'),
            ((tmp_path / 'norun',), f'norun: has no checkpoint; {remedy}'),
            ((tmp_path / 'norun' / 'a.safetensors',), f'a.safetensors: no such checkpoint; {remedy}'),
            (('',), "CKPT: expected a checkpoint of a translator, or the folder of its training run, got ''"),
            ((checkpoint, '--formats', 'mxfp7'), 'mxfp7: no such number format'),
            ((checkpoint, '--formats', 'none'), '--formats none: expected formats; none is the step that'),
            ((checkpoint, '--layers', 'zzz'), '--layers zzz: no layer has that name; there are'),
            ((checkpoint, '--operands', 'bwd'), '--operands bwd: no such operand'),
            ((checkpoint, '--operands', 'qk', '--layers', 'output'), 'have none of these operands'),
            ((checkpoint, '--recipe', tmp_path / 'r'), '--recipe: has no effect without --search PERCENT; add it'),
            ((checkpoint, '--recipe-te', tmp_path / 'r'), '--recipe-te: has no effect without --search PERCENT; add it'),
            ((checkpoint, '--search', '1', '--recipe-torchao', tmp_path / 'r'),
             '--formats mxfp4,mxfp8: torchao has none of these, so --recipe-torchao would have an empty recipe; add one that'),
            ((checkpoint, '--lr', '1'), '--lr: has no effect without --replayed-steps K; add it'),
            ((checkpoint, '--sort', 'replayed'), '--sort replayed: has no effect without --replayed-steps K; add it'),
            ((checkpoint, '--replayed-steps', '-1'), '--replayed-steps: expected'),
            ((checkpoint, '--replayed-steps', '2', '--lr', '1e38'), 'the loss after the replayed steps is nan '
             'without rounding; give a smaller --lr'),
            ((checkpoint, '--search', '-1'), '--search: expected a finite number >= 0'),
            ((checkpoint, '--search', '1', '--formats', 'mxfp4:hadamard=16,mxfp8'), 'a search needs formats with the same')):
        status, out, err = run(*arguments, '-f', 'embedded', '--pairs', '4')
        assert status == 2 and out == '' and err.count('\n') == 1 and want in err, (arguments, err)


def test_overflow_is_worst_and_is_not_chosen():
    model, (_, corpus) = make_transformer(), pairs()
    model.params['encoder.0.self_attention.q.weight'].value[0, 0] = 1e6         # infinite in fp16
    replay = Replay(Translator(model, [], []), corpus)
    operands = [('encoder.0.self_attention.q', 'fwd.x'), ('encoder.0.self_attention.q', 'fwd.w')]
    rows = singles(replay, [formats.parse('fp16')], operands)
    assert [bool(row.statistics['overflow']) for row in rows] == [False, True] and not math.isfinite(rows[1].statistics['loss'])
    assert [row.operand for row in worst_first(rows, SORTS['loss'])] == ['fwd.w', 'fwd.x']
    assert operands[1] not in search(replay, rows, 1000.0, 0.0).chosen
