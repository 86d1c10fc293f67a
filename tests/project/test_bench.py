"""Contests of ours alone, the table of the README from made-up figures, and the GPU checks on the emulator."""
import argparse
import contextlib
import importlib
import json
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
from conftest import ROOT, environment_without
from ranks import needs_mpi

from bench import (
    contest,
    convolution,
    digits,
    eager,
    floor,
    formats,
    gpu_check,
    kills,
    links,
    recurrent,
    results,
    scaling,
    serve,
    table,
    train,
    translate,
    translation,
    turns,
)
from bench import files as bench_files
from bench.contest import NAMES
from bench.gpu_contest import Run
from bench.kernels import main as kernels_main
from bench.ndarray import main as ndarray_main
from pyops import Tensor, backend, quantization
from pyops.data import idx, mnist
from pyops.distributed import __main__ as command
from pyops.errors import UserError
from pyops.formats import ELEMENTS, FORMATS, MORE_FORMATS, parse
from pyops.inspect.products import PRODUCTS
from pyops.text.vocabulary import EOS, PAD
from transformer import train as transformer_train

PLACE = {'machine': 'a machine', 'cpu': '25.1.1', 'isa': 'avx2', 'threads': 2, 'torch': '9.9', 'commit': 'c'}


def timed(seconds, mib, **more):
    return {'p20_s': seconds, 'median_s': seconds, 'p80_s': seconds, 'peak_mib': mib} | more


def kernels(date, seconds, **place):
    return {'date': date, 'limits': {'avx2': {'1': [1e11, 1e10], '2': [2e11, 2e10]}}, 'cases': [
        {'name': 'gemm 1024 x 1024 x 1024', 'seconds': seconds, 'share': 0.9, 'rate': 180.0, 'unit': 'GFLOP/s', 'torch': 0.02,
         'numpy': 0.015}, {'name': 'not in the table', 'seconds': 1.0, 'share': 0.1}]} | PLACE | place


def step(program, date, ours, **place):
    contestants = {'ours': timed(ours, 300.0, flops=2e10), 'torch': timed(0.4, 700.4), 'torch-compile': timed(0.3, 900.0)}
    return {'date': date, 'program': program, 'batch_size': 128, 'contestants': contestants, 'runs': {}} | PLACE | place


@pytest.fixture
def files(tmp_path):
    """-> README, results; the newest of each program counts, of the machine that was measured last."""
    scaling = {'date': '2030-01-02', 'program': 'seq2seq', 'scaling': {'2 threads': timed(0.1, 1), '1 thread': timed(0.19, 1)}}
    lines = {
        'kernels': [kernels('2030-01-01', 0.5), kernels('2030-01-02', 0.01)],
        'train': [step('seq2seq', '2030-01-01', 0.2), step('transformer', '2030-01-01', 0.15),
                  step('transformer', '2029-01-01', 0.001, isa='avx512'), step('seq2seq', '2031-01-01', 0.05, precision='bf16'),
                  step('seq2seq', '2030-01-02', 0.1), scaling | PLACE,
                  step('transformer', '2030-01-02', 0.2, preset='base', contestants={
                      'ours': timed(0.2, 300.0), 'torch': timed(0.4, 700.4), 'jax': timed(0.38, 600.0)}),
                  step('mnist', '2030-01-03', 0.000104) | {'runs': {'ours': 1.0, 'torch': 9.0, 'torch-compile': 12.5}}],
        'translate': [{'date': '2030-01-02', 'program': 'seq2seq', 'sentences': 1000, 'one': {
            'ours': timed(0.002, 150.0), 'torch': timed(0.01, 280.0)}, 'batches': {
            'ours': timed(0.5, 160.0, batch_size=128), 'torch': timed(1.25, 290.0, batch_size=256)}} | PLACE]}
    for name, of_name in lines.items():
        (tmp_path / f'{name}.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in of_name))
    readme = tmp_path / 'README.md'
    readme.write_text('before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n')
    return readme, tmp_path


def run(files, *flags):
    table.main(['--page', str(files[0]), '--results', str(files[1]), *flags])


def test_the_table(files):
    run(files)
    text = files[0].read_text()
    about = '2 threads of a machine, avx2 kernels, PyTorch 9.9; 2030-01-01 to 2030-01-03.'
    assert text.startswith(f'before\n<!-- bench -->\n{about}')
    assert 'the fastest of PyTorch eager, compiled, and JAX where it took part' in ' '.join(text.split())
    assert text.endswith('|\n\n<!-- /bench -->\nafter\n') and max(map(len, text.splitlines()[:6])) <= 128
    best, memory = '300 ms, PyTorch compiled', '300 MiB, 700 MiB |'
    assert [line for line in text.splitlines() if line.startswith('|')][2:] == [
        '| matrix product 1024 x 1024 x 1024 | 10.0 ms | 180 GFLOP/s | 90% | 15.0 ms, numpy | 1.50 x |  |',
        f'| seq2seq, training step, batch 128 | 100 ms | 200 GFLOP/s | 100% | {best} | 3.00 x | {memory}',
        f'| transformer, training step, batch 128 | 150 ms | 133 GFLOP/s | 67% | {best} | 2.00 x | {memory}',
        '| transformer `--preset base`, training step, batch 128 | 200 ms |  |  | 380 ms, JAX | 1.90 x | '
        '300 MiB, 700 MiB |',
        f'| mnist, training step, batch 128 | 104 us | 192308 GFLOP/s | 96154% | {best} | 2884.62 x | {memory}',
        '| mnist, whole run with start-up | 1.00 s |  |  | 9.00 s, PyTorch eager | 9.00 x |  |',
        '| seq2seq, greedy translation of one sentence | 2.00 ms |  |  | 10.0 ms, PyTorch eager | 5.00 x | 150 MiB, 280 MiB |',
        '| seq2seq, greedy translation of 1000 in batches | 500 ms | 2000 sentences/s |  | 1.25 s, PyTorch eager | 2.50 x | '
        '160 MiB, 290 MiB |',
        '| seq2seq, training step, 2 threads compared with 1 thread | 100 ms |  |  | 190 ms, pyops on 1 thread | 1.90 x |  |']


def test_a_check_passes_once_the_table_is_written(files):
    with pytest.raises(UserError, match=r'README.md: the text after <!-- bench --> is out of date; update it with: '
                                        'python -m bench.table'):
        run(files, '--check')
    assert 'old' in files[0].read_text()
    run(files)
    run(files, '--check')
    with open(files[1] / 'kernels.jsonl', 'a') as file:
        file.write(json.dumps(kernels('2030-01-04', 0.02)) + '\n')
    with pytest.raises(UserError, match='is out of date'):
        run(files, '--check')


@pytest.mark.parametrize('elsewhere', [{'machine': 'another'}, {'cpu': '25.17.1'}, {'isa': 'avx512'}, {'threads': 8},
                                       {'torch': '10.0'}])
def test_the_table_has_figures_of_one_machine_and_one_version_of_pytorch(elsewhere, files):
    """The machine is the one with the newest kernels, though figures of another are newer."""
    run(files)
    before = files[0].read_text()
    with open(files[1] / 'train.jsonl', 'a') as train_file, open(files[1] / 'translate.jsonl', 'a') as translate_file:
        for program in ('seq2seq', 'mnist', 'transformer'):
            train_file.write(json.dumps(step(program, '2031-01-01', 0.0123, **elsewhere)) + '\n')
        translate_file.write(json.dumps(json.loads((files[1] / 'translate.jsonl').read_text()) | elsewhere) + '\n')
    run(files, '--check')
    limits = {isa: {'1': [1e11, 1e10], '2': [2e11, 2e10], '8': [8e11, 8e10]} for isa in ('avx2', 'avx512')}
    with open(files[1] / 'kernels.jsonl', 'a') as file:
        file.write(json.dumps(kernels('2031-01-01', 0.02, **elsewhere) | {'limits': limits}) + '\n')
    run(files)
    after = files[0].read_text()
    assert 'training step, batch 128 | 12.3 ms |' in after and '100 ms' not in after and '12.3 ms' not in before
    (files[1] / 'kernels.jsonl').unlink()
    run(files)                                          # without kernels: the newest figures
    assert '12.3 ms' in files[0].read_text() and '100 ms' not in files[0].read_text()


def test_a_cpu_has_its_model_beside_its_name(monkeypatch, tmp_path):
    (tmp_path / 'cpuinfo').write_text('cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nstepping\t: 1\n')
    monkeypatch.setattr(results, 'Path', lambda path: tmp_path / 'cpuinfo')
    assert results.cpu_model() == '25.17.1'
    monkeypatch.setattr(results, 'Path', lambda path: tmp_path / 'nowhere')
    assert results.cpu_model() == ''


def test_the_table_of_the_readme_is_up_to_date():
    table.main(['--check'])


def test_what_it_cannot_work_on(files, tmp_path):
    with pytest.raises(UserError, match='nowhere.md: cannot be read .* name another file with --page'):
        table.main(['--page', str(tmp_path / 'nowhere.md')])
    with pytest.raises(UserError, match='there are no figures for a table; measure some with: make bench'):
        table.main(['--page', str(files[0]), '--results', str(tmp_path / 'none')])
    files[0].write_text('no marks')
    with pytest.raises(UserError, match='expected the lines <!-- bench --> and <!-- /bench -->; add them'):
        run(files)


def test_figures_are_appended_with_where_they_are_from(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(results, 'FOLDER', tmp_path / 'results')
    monkeypatch.setattr(results, 'ROOT', tmp_path)
    for n in (1, 2):
        results.save('some', {'n': n})
    lines = results.load('some', tmp_path / 'results')
    assert [line['n'] for line in lines] == [1, 2] and set(lines[0]) == {'date', 'commit', 'machine', 'cpu', 'torch', 'n'}
    assert capsys.readouterr().err.splitlines() == 2 * ['appended to results/some.jsonl']


# ---- the floor of matrix products ------------------------------------------------------------------------------------

FLOOR = ['projection', '--seconds', '0.01', '--threads', str(backend.threads())]


@pytest.mark.parametrize('isa, instruction, tile', [('generic', 'mulps', (4, 8, 4)), ('avx2', 'vfmadd', (6, 16, 8)),
                                                    ('avx512', 'vfmadd', (14, 32, 16))])
def test_the_loop_that_measures_the_limit_has_an_instruction_for_each_sum_that_it_counts(isa, instruction, tile):
    """A compiler that knows the terms leaves out a sum that stays 1, and the limit was 1/11 too high with AVX2."""
    path = ROOT / f'build/c/kernels/{isa}.o'
    if not path.exists() or not shutil.which('objdump') or platform.machine() not in ('x86_64', 'AMD64'):
        pytest.skip(f'needs {path.relative_to(ROOT)} for x86-64 and objdump: make, apt install binutils')
    code = subprocess.run(['objdump', '-d', '--no-show-raw-insn', path], text=True, capture_output=True, check=True).stdout
    made = code.partition('<row_fma_loop>:')[2].partition('\n\n')[0]
    rows, columns, lanes = tile
    assert made.count(f'\t{instruction}') >= rows * columns // lanes


def test_a_product_above_the_floor_passes_and_one_below_it_is_named_with_exit_status_1(monkeypatch, capsys):
    """The share is so low that every product reaches it, then higher than the limit."""
    monkeypatch.setattr(floor, 'limits', lambda: {backend.isa(): 1e11})
    assert floor.main([*FLOOR, '--share', '1e-6']) == 0
    captured = capsys.readouterr()
    assert re.search(r'^gemm projection 1152 x 256 x 256 +[0-9.]+ of +[0-9.]+ GFLOP/s +[0-9]+%$', captured.out, re.M)
    assert captured.err == ''
    assert floor.main([*FLOOR, '--share', '100']) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == 'bench.floor: gemm projection 1152 x 256 x 256: below 10000% of limit and numpy'


def test_a_slow_instruction_set_is_below_the_floor(monkeypatch, capsys):
    """Measured three times: other programs may have disturbed the first."""
    slow, measured = {'generic': 1e11, 'avx2': 3e11}, []
    monkeypatch.setattr(floor, 'limits', lambda: measured.append(slow) or slow)
    monkeypatch.setattr(backend, 'isa', lambda: 'generic')
    monkeypatch.setattr(floor, 'rates', lambda *_: (0.9, 1.0))
    assert floor.main(FLOOR) == 1
    assert capsys.readouterr().err == 'bench.floor: generic kernels; the fastest are avx2: below 60% of limit and numpy\n'
    assert len(measured) == floor.ATTEMPTS == 3


def test_a_disturbed_measurement_is_repeated(monkeypatch, capsys):
    limits, shares = iter([{'generic': 1e11, 'avx2': 3e11}, {'generic': 1e11, 'avx2': 1.1e11}]), iter([0.1, 0.5, 0.9])
    monkeypatch.setattr(floor, 'limits', lambda: next(limits))
    monkeypatch.setattr(backend, 'isa', lambda: 'generic')
    monkeypatch.setattr(floor, 'rates', lambda *_: (next(shares), 1.0))
    assert floor.main(FLOOR) == 0 and ' 90%' in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize('share, status', [(0.7, 0), (0.5, 1)])
def test_a_product_below_the_floor_is_compared_with_numpy(share, status, monkeypatch, capsys):
    """A busy hyperthread slows both products, but not the limit.  The limit is tried three times before."""
    shares = iter([0.1, 0.5, 0.4, share])
    monkeypatch.setattr(floor, 'limits', lambda: {backend.isa(): 1e11})
    monkeypatch.setattr(floor, 'rates', lambda *_: (next(shares), 1.0))
    assert floor.main(FLOOR) == status
    captured = capsys.readouterr()
    assert [line.split()[-1] for line in captured.out.splitlines()[-2:]] == ['40%', f'{share:.0%}']
    assert bool(captured.err) == bool(status)


def test_the_reference_of_the_floor_is_the_product_of_numpy():
    """The same operands, and its number of operations."""
    (_, run, flops, _, numpy_product), *_ = floor.cases([('gemm 4 x 5 x 6', (4, 5, 6), (True, False))])
    run()
    c = run.__defaults__[0]
    ours = c.copy()
    c[:] = np.nan
    assert numpy_product() == flops == 240
    np.testing.assert_allclose(c, ours, rtol=0, atol=1e-5)


def test_the_limits_of_instruction_sets_are_measured_by_processes_that_select_them():
    found = floor.limits()
    assert backend.isa() in found and found.keys() <= {'generic', 'avx2', 'avx512'} and min(found.values()) > 0


def test_bfloat16_factors_are_used_for_their_product_only(monkeypatch):
    monkeypatch.setattr(backend, 'bf16_isa', lambda: 'avx512_bf16')
    before, square = backend.HOST.precision, [('gemm 4 x 4 x 4', (4, 4, 4), (False, False))]
    assert [(name, factor, backend.HOST.precision) for name, _, _, factor, _ in floor.cases(square)] == [
        ('gemm 4 x 4 x 4', 1, before), ('gemm 4 x 4 x 4 in bfloat16', 2, 'bf16')]
    assert backend.HOST.precision == before


def test_an_unknown_product_is_refused_with_the_names_of_all():
    with pytest.raises(UserError, match='^seven: no product has such a name, expected words of: gemm 1024 x 1024 x 1024, gemm'):
        floor.main(['seven'])


# ---- contests, of ours alone -----------------------------------------------------------------------------------------

def test_the_contest_of_training_steps(capsys):
    train.main(['mnist', '--turns', '2', '--warmup', '1', '--json', '--threads', '1'])
    told = json.loads(capsys.readouterr().out)
    assert told['program'] == 'mnist' and told['steps'] == 100 and told['threads'] == 1 and 'vs' not in told
    assert 0 < told['p20_s'] <= told['median_s'] <= told['p80_s'] < 1 and told['peak_mib'] > 10


LOSSES = {'ours': [2.0, 1.0], 'torch': [2.02, 1.0], 'torch-compile': [1.0, 1.5]}


@pytest.mark.parametrize('flags, wrong', [
    (['mnist'], {'torch-compile': '16.67'}), (['seq2seq', '--dropout', '0'], {'torch-compile': '16.67'}),
    (['seq2seq'], {'torch-compile': '16.67'}), (['seq2seq', '--scaling'], {'torch': '0.67', 'torch-compile': '16.67'})])
def test_other_losses_after_the_timed_turns_fail_the_contest_and_are_not_saved(flags, wrong, monkeypatch, capsys):
    figures = {name: timed(0.1, 100.0) for name in LOSSES}
    monkeypatch.setattr(train, 'contest', lambda *_: ('data', figures, LOSSES))
    monkeypatch.setattr(results, 'save', lambda *_: pytest.fail('saved'))
    assert train.main([*flags, '--save']) == 1
    lines = [f'bench.train: {NAMES[name]}: its mean loss differs from the loss of pyops by {percent}%'
             for name, percent in wrong.items()]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_loss_that_is_no_number_fails_the_contest():
    args = train.parse(['transformer'])
    assert train.differences(args, {'ours': [1.0], 'torch': [float('nan')]}).keys() == {'torch'}
    assert train.differences(args, {'ours': [1.0], 'torch': [1.05]}) == {}
    assert train.differences(args, {'ours': [1.0], 'ours-recompute': [1.0 + 1e-7]}).keys() == {'ours-recompute'}


def test_the_operations_of_a_step_are_counted_after_a_run(monkeypatch):
    """Before it the number of tokens is 0, and the output layer has no operations."""
    plan = types.SimpleNamespace(runs=0)
    plan.run = lambda: setattr(plan, 'runs', plan.runs + 1)
    monkeypatch.setattr(translation, 'flops_of', lambda plan: 7 * plan.runs)
    assert translation.flops_of_step(types.SimpleNamespace(plan=lambda rows: plan), [0, 1]) == 7


# a small model with everything in which the base preset differs
BASE = dict(lr=0.0007, dropout=0.1, d_model=32, d_ff=64, heads=4, layers=2, num_steps=24, pre_norm=True, smoothing=0.1)


def test_the_contest_of_a_preset_has_recomputed_steps_and_its_name_in_the_figures(capsys, monkeypatch):
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    monkeypatch.setitem(transformer_train.PRESETS, 'base', BASE)
    flags = ['transformer', '--preset', 'base', '--recompute', '--turns', '2', '--warmup', '1', '--batch-size', '4']
    assert train.main([*flags, '--json']) == 0
    told = json.loads(capsys.readouterr().out)
    assert told['preset'] == 'base' and told['steps'] == 2 and set(told['vs']) == {'ours-recompute'}
    assert told['median_cpu_s'] > 0 and told['vs']['ours-recompute']['flops'] > told['flops'] > 0
    assert train.main(flags) == 0
    out = capsys.readouterr().out
    assert out.startswith('transformer base: 24 steps') and 'CPU time' in out
    assert re.search('^pyops recompute  .* ms', out, re.M)


def test_a_preset_with_long_sentences_has_no_padding(tmp_path, monkeypatch):
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    contest_of = importlib.import_module('bench.transformer').contest
    monkeypatch.setitem(transformer_train.PRESETS, 'base', BASE)
    given = argparse.Namespace(data_dir=None, warmup=1, steps=3, batch_size=5, dropout=None, preset='base')
    assert contest_of.prepare(given, tmp_path).endswith(' pairs of joined sentences')
    config, pairs, rows, lr = contest_of._load(tmp_path)
    assert (pairs.lengths == 24).all() and rows.shape == (4, 5) and lr == 0.0007
    assert {name: getattr(config, name) for name in BASE if name != 'lr'} == {k: v for k, v in BASE.items() if k != 'lr'}
    source, target, _ = pairs.padded(rows[0])
    assert (source != PAD).all() and (target != PAD).all() and (source == EOS).sum() > 0
    given.batch_size = 10**6
    with pytest.raises(UserError, match=r'^--batch-size 1000000: expected at most \d+, the number of pairs$'):
        contest_of.prepare(given, tmp_path)


def test_the_contest_of_eager_steps_compares_the_losses(torch, capsys, monkeypatch):
    small = ['--sizes', '20', '8', '4', '--batch-size', '5', '--turns', '1', '--threads', str(backend.threads())]
    assert eager.main(small) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith('20-8-4, batch 5, ') and [line.split('  ')[0] for line in lines] == ['pyops', 'PyTorch eager']
    monkeypatch.setattr(eager, 'theirs', lambda *given: lambda k: np.float64(3))
    assert eager.main(small) == 1
    assert re.fullmatch(r'(bench.eager: PyTorch eager: (before|after) the timed turns its results differ by \S+ of the largest '
                        r'number\n){2}', capsys.readouterr().err)


def test_one_size_is_no_net():
    with pytest.raises(UserError, match='^--sizes 5: expected at least two numbers, of the input and of a layer$'):
        eager.main(['--sizes', '5', '--no-torch'])


@pytest.mark.parametrize('main', [convolution.main, recurrent.main, kernels_main, ndarray_main])
def test_seconds_are_positive(main, capsys):
    for value in ('0', '-1', 'nan', 'some'):
        with pytest.raises(SystemExit, match='^2$'):
            main(['--seconds', value])
        assert '--seconds: expected a number from 1e-37 to 1e38, got ' in capsys.readouterr().err


def test_pytorch_is_refused_by_every_contest_of_layers_if_it_is_not_installed(monkeypatch):
    monkeypatch.setenv('GOMP_SPINCOUNT', '3000')
    monkeypatch.setattr(contest.importlib.util, 'find_spec', lambda name: None)
    for main in (convolution.main, recurrent.main, kernels_main):
        with pytest.raises(UserError, match='^torch is not installed; install it with: .* -m pip install torch$'):
            main([])


def test_results_that_differ_are_named_with_when_they_did(capsys):
    comparison = turns.Comparison('bench.some')
    comparison.compare('a layer', 'before', [np.ones(3), 2.0], [np.ones(3, 'f'), np.float32(2 + 1e-6)])
    assert comparison.status() == 0
    comparison.compare('a layer', 'before', [np.ones(3)], [np.full(3, 1.01)])
    comparison.compare('a layer', 'after', [np.array([1, np.nan])], [np.ones(2)])
    comparison.compare('another', 'after', [np.ones(3)], [np.ones(2)])
    assert comparison.status() == 1
    assert capsys.readouterr().err.splitlines() == [
        f'bench.some: {what} the timed turns its results differ by {away} of the largest number'
        for what, away in (('a layer: before', '9.90e-03'), ('a layer: after', 'inf'), ('another: after', 'inf'))]


QUICK = ['--seconds', '1e-9', '--threads', str(backend.threads())]


def test_contests_of_layers_compare_results_and_gradients(torch, capsys, monkeypatch):
    monkeypatch.setattr(turns.gc, 'freeze', lambda: None)
    monkeypatch.setattr(turns, 'keep_memory', lambda: None)
    monkeypatch.setattr(convolution, 'BATCH', 4)
    for main, only in ((convolution.main, 'conv 16 -> 8'), (convolution.main, 'ResNet9'), (recurrent.main, 'RNN 30')):
        assert main([*QUICK, '--only', only]) == 0
    assert [line.split('  ')[0] for line in capsys.readouterr().out.splitlines() if 'PyTorch' not in line] == [
        'conv 16 -> 8, 3 x 3', 'conv 16 -> 8, 3 x 3, backward', convolution.RESNET, 'RNN 30 -> 100, tanh']
    monkeypatch.setattr(convolution, 'give_weights', lambda ours, theirs: None)
    assert convolution.main([*QUICK, '--only', 'conv 16 -> 8']) == 1
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_kernels_have_the_results_of_pytorch_or_are_not_saved(torch, capsys, monkeypatch):
    from bench import kernels as bench_kernels
    monkeypatch.setenv('GOMP_SPINCOUNT', '3000')
    monkeypatch.setattr(turns.gc, 'freeze', lambda: None)
    monkeypatch.setattr(turns, 'keep_memory', lambda: None)
    monkeypatch.setattr(bench_kernels, 'T', 2)
    monkeypatch.setattr(bench_kernels, 'V', 50)
    monkeypatch.setattr(bench_kernels, 'PRODUCTS', [product for product in bench_kernels.PRODUCTS if 'digits' in product[0]])
    monkeypatch.setattr(bench_kernels, 'roofline', lambda n: {backend.isa(): {backend.threads(): (1e11, 1e10)}})
    monkeypatch.setattr(bench_kernels, 'pass_cases', lambda rng, torch: ())
    monkeypatch.setattr(bench_kernels, 'ROUNDED', (20, 300))
    saved = []
    monkeypatch.setattr(results, 'save', lambda *given: saved.append(given))
    words = ['gru', 'attention', 'layer norm', 'digits', 'likeliest', 'output layer', '32 MB', 'codes of']
    assert kernels_main([*words, *QUICK, '--save']) == 0 and len(saved) == 1
    timed = {case['name']: 'torch' in case for case in saved[0][1]['cases']}
    assert {name for name, has_torch in timed.items() if not has_torch} >= {'hifp8 and back, 32 MB', 'mxint8 and back, 32 MB'}
    assert all(timed[name] for name in ('e4m3 and back, 32 MB', 'fp8:block=tensor and back, 32 MB',
                                        'codes of e5m2, 32 to 8 MB'))
    with_8_bits = set(map(parse, bench_kernels.EIGHT_BITS))
    assert all(fmt.bits == 8 for fmt in with_8_bits)
    assert {fmt.name for fmt in with_8_bits} == {name for name in FORMATS + MORE_FORMATS + ELEMENTS if parse(name).bits == 8}
    monkeypatch.setattr(backend, 'gemm', lambda c, a, b: c.fill(0))
    assert kernels_main(['digits', *QUICK, '--save']) == 1 and len(saved) == 1
    assert [line.split(' by ')[0] for line in capsys.readouterr().err.splitlines()] == [
        f'bench.kernels: gemm digits 100 x 10 x 30, PyTorch: {when} the timed turns its results differ'
        for when in ('before', 'after')]


def test_whole_runs_use_the_given_threads_and_data_and_end_with_the_same_share_of_correct_answers(monkeypatch, capsys):
    ran, ends = [], {'mnist.train': 960, 'bench.torch_mnist': 955, 'bench.jax_mnist': 950}

    def timed_command(command, environment):
        ran.append((command[1:], {name: environment.get(name) for name in (
            'OMP_NUM_THREADS', 'PYOPS_DATA', 'MALLOC_MMAP_MAX_', 'JAX_ENABLE_COMPILATION_CACHE')},
            'JAX_COMPILATION_CACHE_DIR' in environment))
        return 1.0, 2.0, f'evaluating :  [9/1000] correct : 9\nevaluating :  [1000/1000] correct : {ends[command[1]]}\n'
    for name in ('MALLOC_MMAP_MAX_', 'JAX_COMPILATION_CACHE_DIR', 'JAX_ENABLE_COMPILATION_CACHE'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train, 'timed_command', timed_command)
    monkeypatch.setattr(train, 'require', lambda name: None)
    figures = {name: timed(0.1, 100.0) for name in ('ours', 'torch', 'jax')}
    monkeypatch.setattr(train, 'contest', lambda *_: ('data', figures, {name: [1.0] for name in figures}))
    monkeypatch.setattr(train, 'kinds_of', lambda *_: ['ours', 'torch'])
    saved = []
    monkeypatch.setattr(results, 'save', lambda *given: saved.append(given))
    flags = ['mnist', '--vs', 'torch', 'jax', '--threads', '1', '--data-dir', 'some', '--runs', '1', '--save']
    assert train.main(flags) == 0
    known = {'OMP_NUM_THREADS': '1', 'PYOPS_DATA': 'some', 'MALLOC_MMAP_MAX_': None, 'JAX_ENABLE_COMPILATION_CACHE': None}
    jax = ['bench.jax_mnist', '1']
    assert ran == [(jax, known, True), (['mnist.train', '--quiet'], known, False),
                   (['bench.torch_mnist'], known | {'MALLOC_MMAP_MAX_': '0'}, False),
                   (jax, known | {'JAX_ENABLE_COMPILATION_CACHE': 'false'}, False), (jax, known, True)]
    assert saved[0][1]['runs'] == dict.fromkeys(('ours', 'torch', 'jax', 'jax-cache'), 1.0)
    assert saved[0][1]['runs_cpu']['jax-cache'] == 2.0
    assert re.search(r'^JAX, cached +1.00 s +2.00 s +1.00x +95.00%$', capsys.readouterr().out, re.M)
    ends['bench.torch_mnist'] = 900
    assert train.main(flags) == 1 and len(saved) == 1
    assert capsys.readouterr().err == 'bench.train: PyTorch eager: 90.00% correct after a whole run, pyops 96.00%\n'


@pytest.mark.parametrize('package', ['jax', 'torch'])
def test_the_mnist_programs_of_peers_learn_the_digits(package, monkeypatch, capsys):
    pytest.importorskip(package, reason=f'{package} is not installed: pip install {package}')
    module = importlib.import_module(f'bench.{package}_mnist')
    monkeypatch.setattr(sys, 'argv', ['some'])
    few = mnist.load(embedded=True)
    few = few._replace(train_images=few.train_images[:2050], train_labels=few.train_labels[:2050])
    monkeypatch.setattr(mnist, 'load', lambda: few)
    module.main(epochs=3)
    count, correct = map(int, train.CORRECT.findall(capsys.readouterr().out)[-1])
    assert count == len(few.test_images) and correct > 0.7 * count


def test_make_bench_runs_commands_that_exist():
    done = subprocess.run(['make', '-n', 'bench', 'LLMC=/llm.c'], cwd=ROOT, capture_output=True, text=True, check=True)
    commands = [line.split(' -m bench.')[1].split() for line in done.stdout.splitlines() if ' -m bench.' in line]
    for name, *flags in commands:
        if name in ('train', 'gpt2'):
            importlib.import_module(f'bench.{name}').parse(flags)
    steps = [' '.join(flags) for name, *flags in commands if name == 'train']
    for words in ('mnist --vs torch jax', '--preset base', '--precision bf16'):
        assert any(words in flags for flags in steps), words
    assert ['gpt2', '--llmc', '/llm.c', '--save'] in commands


def test_jax_is_refused_if_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(contest.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match='^jax is not installed; install it with: .* -m pip install jax$'):
        train.main(['mnist', '--vs', 'jax'])


@pytest.mark.parametrize('program, preset', [('mnist', 'small'), ('seq2seq', 'small'), ('transformer', 'small'),
                                             ('transformer', 'base')])
def test_jax_has_the_losses_of_ours(program, preset, tmp_path, monkeypatch):
    """After six steps without dropout: step by step and, for mnist, in a scan."""
    pytest.importorskip('jax', reason='jax is not installed: pip install jax')
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    monkeypatch.setitem(transformer_train.PRESETS, 'base', BASE)
    module = importlib.import_module(f'bench.{program}')
    module.prepare(argparse.Namespace(data_dir=None, warmup=0, steps=6, batch_size=20, dropout=0.0, preset=preset), tmp_path)
    kinds = ['ours', 'jax'] + ['jax-scan'] * (program == 'mnist')
    last = [module.train(tmp_path, kind)[0](0, 6) for kind in kinds]
    assert max(last) - min(last) < 1e-3 * last[0], last


def test_the_peak_memory_of_a_contestant_excludes_its_parents():
    """The parent process has 300 MiB more when it starts the contestant."""
    child = 'from bench import worker; print(worker.peak_mib())'
    parent = ('import subprocess, sys; import numpy as np; held = np.ones(300 << 17)\n'
              f'print(subprocess.run([sys.executable, "-c", {child!r}], capture_output=True, text=True, check=True).stdout)')
    done = subprocess.run([sys.executable, '-c', parent], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 5 < float(done.stdout) < 200


def test_the_contest_of_steps_in_bfloat16_has_ours_in_float32_too(capsys, monkeypatch):
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    train.main(['transformer', '--precision', 'bf16', '--turns', '1', '--warmup', '0', '--json', '--batch-size', '8'])
    told = json.loads(capsys.readouterr().out)
    assert told['precision'] == 'bf16' and set(told['vs']) == {'ours'} and told['median_s'] > 0


def test_the_contest_of_steps_in_fp8_has_ours_in_bfloat16_and_in_float32_too(capsys, monkeypatch):
    monkeypatch.delenv('PYOPS_DATA', raising=False)
    turns = ['--turns', '1', '--warmup', '0', '--json', '--batch-size', '8']
    train.main(['transformer', '--precision', 'fp8', *turns, '--dropout', '0'])         # compares the losses
    told = json.loads(capsys.readouterr().out)
    assert told['precision'] == 'fp8' and set(told['vs']) == {'ours-bf16', 'ours'}
    assert told['flops'] == told['vs']['ours']['flops'] > 0


@pytest.mark.parametrize('flags', ['seq2seq', 'mnist', 'transformer --vs torch', 'transformer --scaling',
                                   'transformer --recompute'])
def test_fp8_is_refused_where_it_is_not_timed(flags):
    message = '--precision fp8: times ours in steps of transformer, without --vs, --scaling and --recompute; leave it out'
    with pytest.raises(UserError, match=f'^{message}$'):
        train.main([*flags.split(), '--precision', 'fp8'])


def test_processes_of_pytorch_keep_freed_memory_and_ours_have_the_defaults(monkeypatch):
    monkeypatch.delenv('MALLOC_MMAP_MAX_', raising=False)
    for kind in ('torch', 'torch-compile', 'torch-bf16'):
        assert contest.environment_of(kind)['MALLOC_MMAP_MAX_'] == '0' and 'PATH' in contest.environment_of(kind)
    for kind in ('ours', 'jax'):
        assert 'MALLOC_MMAP_MAX_' not in contest.environment_of(kind)
    monkeypatch.setenv('MALLOC_MMAP_MAX_', '65536')
    assert contest.environment_of('torch')['MALLOC_MMAP_MAX_'] == '65536'


def test_pytorch_trains_with_its_fused_adam(torch, monkeypatch):
    from bench.torch_step import make_step
    seen, adam = [], torch.optim.Adam
    monkeypatch.setattr(torch.optim, 'Adam', lambda *a, **named: seen.append(named['fused']) or adam(*a, **named))
    make_step(torch.nn.Linear(3, 4), 0.001)
    assert seen == [True]


def test_the_contest_in_bfloat16_times_pytorch_in_autocast(torch):
    from bench.torch_step import make_step

    class Model(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(y.dtype)
            return y.float().square().mean()
    seen = []
    for in_bf16 in (False, True):
        make_step(Model(3, 4), 0.001, in_bf16=in_bf16)(torch.ones(2, 3))
    assert seen == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize('flags', [['mnist'], ['seq2seq', '--scaling']])
def test_bfloat16_is_refused_where_it_is_not_timed(flags):
    message = '--precision bf16: times steps of seq2seq or transformer, without --scaling; leave it out'
    with pytest.raises(UserError, match=f'^{message}$'):
        train.main([*flags, '--precision', 'bf16'])


@pytest.mark.parametrize('flags, message', [
    (['mnist', '--preset', 'base'], '--preset base: mnist has no such preset; leave it out, or time transformer'),
    (['seq2seq', '--recompute'], '--recompute: times steps of transformer, without --scaling; leave it out'),
    (['transformer', '--recompute', '--scaling'],
     '--recompute: times steps of transformer, without --scaling; leave it out')])
def test_presets_and_recomputation_are_of_the_transformer(flags, message):
    with pytest.raises(UserError, match=f'^{message}$'):
        train.main(flags)


def test_the_contest_of_translation(capsys):
    translate.main(['transformer', '--no-torch', '--turns', '1', '--sentences', '3', '--json'])
    told = json.loads(capsys.readouterr().out)
    assert told['sentences'] == 3 and told['differ'] == {} and set(told['one']) == set(told['batches']) == {'ours'}
    assert 0 < told['one']['ours']['median_s'] < 10 and told['batches']['ours']['batch_size'] in translate.SIZES


def test_the_contest_of_compute_types(capsys):
    translate.main(['transformer', '--no-torch', '--turns', '1', '--sentences', '3', '--json', '--compute', 'bf16', 'int8'])
    found = json.loads(capsys.readouterr().out)
    assert list(found['one']) == ['ours', 'ours/bf16', 'ours/int8'] and set(found['differ']) == {'ours/bf16', 'ours/int8'}
    assert found['one']['ours/int8']['median_s'] > 0


def test_ctranslate2_takes_part_in_the_contest_of_the_transformer_only(monkeypatch):
    with pytest.raises(UserError, match='^--ctranslate2: has no model like seq2seq; leave it out, or time transformer$'):
        translate.main(['seq2seq', '--no-torch', '--ctranslate2', 'int8'])
    monkeypatch.setattr(translate.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match='^--ctranslate2: ctranslate2 is not installed; install it: .* install ctranslate2$'):
        translate.main(['transformer', '--no-torch', '--ctranslate2', 'int8'])


def test_the_contest_of_files_checks_lines_and_order(capsys, monkeypatch):
    pytest.importorskip('sacrebleu', reason='sacrebleu is not installed: pip install sacrebleu')
    from server import checkpoint
    monkeypatch.setattr(bench_files, 'SAMPLE', 5)
    monkeypatch.setattr(bench_files, 'LEAST', 2)
    flags = [checkpoint(), '-f', 'embedded', '--sentences', '1500', '--beam', '2', '1', '--no-ctranslate2', '--threads', '1',
             '--json']
    assert bench_files.main(flags) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told['beams']) == ['2', '1'] and told['sentences'] == 1500
    for figures in told['beams'].values():
        ours, program = figures['ours/float32'], figures['command/float32']
        for some in ours, program:
            assert some['turns'] >= 2 and min(some['per_s'], some['per_cpu_s'], some['peak_mib_few']) > 0
            assert some['peak_mib'] >= some['peak_mib_few'] and 0 <= some['bleu'] <= 100
        assert program['bleu'] == ours['bleu']
    lines = bench_files._lines
    monkeypatch.setattr(bench_files, '_lines', lambda path, count: [*lines(path, count)][::1 if 'sample' in path.name else -1])
    assert bench_files.main([*flags[:6], *flags[7:]]) == 1                  # the order of the translations is reversed
    assert 'have another translation alone' in capsys.readouterr().err


def test_ctranslate2_translates_a_file_as_we_do(capsys):
    for package in ('ctranslate2', 'sacrebleu'):
        pytest.importorskip(package, reason=f'{package} is not installed: pip install {package}')
    from server import checkpoint
    flags = [checkpoint(), '-f', 'embedded', '--sentences', '40', '--beam', '1', '--threads', '1', '--processes', '2']
    assert bench_files.main([*flags, '--json']) == 0
    figures = json.loads(capsys.readouterr().out)['beams']['1']
    ours, program, peer = (figures[f'{who}/float32'] for who in ('ours', 'command', 'ct2'))
    assert ours['bleu'] == program['bleu'] == peer['bleu'] > 0
    assert program['workers'] == 2 and program['peak_mib_few'] > 1.5 * ours['peak_mib_few']      # of both processes
    bench_files.print_table(1, figures, 40)
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.startswith('beam 1') and [row.split()[0] for row in rows] == ['pyops', 'translate', 'CTranslate2']


def test_a_contest_of_files_without_ctranslate2_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(contest.importlib.util, 'find_spec', lambda name: None if name == 'ctranslate2' else True)
    with pytest.raises(UserError, match='^ctranslate2 is not installed; install it with: .* -m pip install ctranslate2$'):
        bench_files.main(['ckpt'])


def test_the_load_of_the_server_compares_every_answer(capsys, monkeypatch):
    from server import checkpoint
    flags = [checkpoint(), '-f', 'embedded', '--seconds', '2', '--clients', '8', '--sentences', '100', '--json',
             '--compute', 'int8']
    assert serve.main(flags) == 0
    told = json.loads(capsys.readouterr().out)
    assert told['requests'] > 8 and told['errors'] == told['wrong'] == 0 and 0 < told['p50_ms'] <= told['p99_ms']
    assert told['texts_per_s'] > 0 and told['texts_per_batch'] >= 1 and told['compute'] == 'int8'
    assert len(told['file_texts_per_s']) == 2 and min(told['file_texts_per_s']) > 0         # before and after the load
    check = serve.Client.check
    monkeypatch.setattr(serve.Client, 'check', lambda self, wanted: check(self, [*wanted[1:], 'another']))
    assert serve.main(flags) == 1
    assert json.loads(capsys.readouterr().out)['wrong'] > 0


def test_scaling_is_of_ours_alone():
    with pytest.raises(UserError, match='--scaling times ours alone; leave out --vs'):
        train.main(['mnist', '--scaling', '--vs', 'torch'])


# ---- the checks that require a GPU, on the emulator ------------------------------------------------------------------

needs_emulation = pytest.mark.skipif(not (ROOT / 'pyops/libpyops_emulated.so').exists(),
                                     reason='pyops/libpyops_emulated.so is not built: make emulated')
# ---- number formats --------------------------------------------------------------------------------------------------

def test_the_recipes_of_the_table_of_formats_are_recipes_and_their_products_have_these_formats():
    assert len({recipe.name for recipe in formats.RECIPES}) == len({str(recipe) for recipe in formats.RECIPES}) >= 20
    for recipe in formats.RECIPES:
        parsed = quantization.Recipe.parse(str(recipe))
        for product, operands in PRODUCTS.items():
            wanted = [None if text == 'none' else parse(text) for text in recipe.formats(product)]
            assert [parsed.formats.get(f'{product}.{operand}') for operand in operands] == wanted, (recipe, product)


def test_the_table_of_formats_has_a_line_for_each_recipe():
    exact, hadamard = formats.RECIPES[0], next(recipe for recipe in formats.RECIPES if recipe.wgrad)
    lines = list(formats.table({exact: formats.Figures(1.25, dict.fromkeys(PRODUCTS, math.inf)),
                                hadamard: formats.Figures(1.5, dict(fwd=16.04, dgrad=15.0, wgrad=14.96))}))
    assert lines[2:] == ['| not rounded |  | 1.250 | exact | exact | exact |',
                         '| nvfp4, Hadamard in wgrad | `nvfp4,wgrad=nvfp4:hadamard=16` | 1.500 | 16.0 dB | 15.0 dB | 15.0 dB |']
    lines = list(formats.search_table({('not rounded', 0.0): [1.0, 2.0, 4.0], ('found', 0.625): [1.01, 2.04, 4.0]}))
    assert lines[2:] == ['| not rounded | 0 % | 1.000 | 2.000 | 4.000 | 0.00 % |',
                         '| found | 62 % | 1.010 | 2.040 | 4.000 | 1.00 % |']
    with pytest.raises(UserError, match='^--only nothing: no recipe has such a name; the names are not rounded; bf16; '):
        formats.main(['--only', 'nothing'])


def test_the_page_has_a_row_for_each_recipe_and_some_can_be_measured_again():
    page = formats.PAGE.read_text()
    old = page.partition('<!-- formats -->')[2].partition('<!-- /formats -->')[0].strip().splitlines()
    cells = [[cell.strip() for cell in row.split('|')[1:3]] for row in old[2:]]
    assert cells == [[recipe.name, f'`{recipe}`' if recipe.forward != 'none' else ''] for recipe in formats.RECIPES]
    second = formats.RECIPES[1]
    new = formats.merged(formats.table({second: formats.Figures(9.5, dict.fromkeys(PRODUCTS, 1.0))}), page)
    assert new[:3] == old[:3] and new[4:] == old[4:] and new[3] == '| bf16 | `bf16` | 9.500 | 1.0 dB | 1.0 dB | 1.0 dB |'
    assert formats.merged(old, '') == old                               # a page without rows gets those that were measured


CHECK = [sys.executable, '-m', 'bench.gpu_check', '--emulated']


def emulated(**values):
    return environment_without('PYOPS_BACKEND', 'PYOPS_CUDA_LIBRARY', PYOPS_EMULATE_CUDA='1', OMP_NUM_THREADS='1',
                               PYTHONPATH=str(ROOT), **values)


def checked(*arguments, cwd=ROOT, **values):
    """Run the check and return its exit status, its output, and its report."""
    report = ROOT / 'build' / f'gpu-check-of-{os.getpid()}.json'
    done = subprocess.run([*CHECK, *arguments, '--report', report], cwd=cwd, env=emulated(**values), capture_output=True,
                          text=True)
    try:
        return done.returncode, done.stdout + done.stderr, json.loads(report.read_text())
    finally:
        report.unlink(missing_ok=True)


def figures_of(report, part):
    return report['parts'][part]['steps'][0]['figures']['sections'][part]


def test_the_gpu_check_lists_its_parts(capsys):
    assert gpu_check.main([]) == 0
    listed = re.findall(r'^  (\w+) +(\d+) s  \S', capsys.readouterr().out, re.M)
    assert [name for name, _ in listed] == list(gpu_check.PARTS) and 'products' in gpu_check.PARTS
    assert all(int(limit) + gpu_check.BUILD_LIMIT < 600 for _, limit in listed)     # of one part with its build


def test_the_gpu_check_refuses_a_part_that_it_does_not_have():
    with pytest.raises(UserError, match='produkts: no such part; expected all or one of conformance, products, layers'):
        gpu_check.main(['produkts'])
    with pytest.raises(UserError, match='memcheck: needs compute-sanitizer and a GPU'):
        gpu_check.main(['memcheck', '--emulated'])


@needs_emulation
def test_the_gpu_check_passes_on_the_emulator_and_checks_again_after_timing():
    parts = 'conformance', 'ladder', 'layers', 'attention', 'fp8', 'memory', 'mnist', 'seq2seq', 'transformer', 'base', 'gpt2'
    status, out, report = checked(*parts, '--limit', '600')
    assert status == 0 and set(report['parts']) == {'build', *parts}, out
    for part in parts:
        assert report['parts'][part]['outcome'] == 'passed' and report['parts'][part]['seconds'] > 0
    for part in parts[2:]:
        for figure in figures_of(report, part):
            assert figure['ours_s'] > 0 and all(check['ok'] for check in figure['checks'].values())
            assert any('after timing' in name for name in figure['checks'])
            assert any('after timing' not in name for name in figure['checks'])
    for part in ('layers', 'seq2seq', 'transformer'):
        assert {figure['what'].split()[-1] for figure in figures_of(report, part)} == {'bf16', 'tf32', 'fp32'}
    layers = [figure['what'] for figure in figures_of(report, 'layers')]
    stored = {name for name in layers if name.endswith('stored as bf16')}
    assert {name.split()[0] for name in stored} == {'attention', 'gru', 'output', 'layer'}
    for part in ('seq2seq', 'transformer', 'base', 'gpt2'):
        for figure in figures_of(report, part):
            assert figure['flops_per_s'] == figure['flops'] / figure['ours_s'] > 0 and figure['memory']['ours'] > 0
    (decoder,) = figures_of(report, 'gpt2')
    assert decoder['tokens'] == decoder['batch'] * decoder['num_steps'] > 0
    assert decoder['tokens_per_s'] == {name: decoder['tokens'] / seconds for name, seconds in decoder['all_s'].items()}
    assert decoder['tokens_per_s']['ours'] == decoder['tokens'] / decoder['ours_s']
    activations = {part: {figure['what'].split()[-1]: figure['memory']['ours'] for figure in figures_of(report, part)}
                   for part in ('seq2seq', 'transformer')}
    assert all(activations[part]['bf16'] < activations[part]['fp32'] for part in activations)
    assert {'mlp_step', 'formats'} <= {name.split()[0] for name in layers}


@pytest.mark.slow
@needs_emulation
def test_a_broken_kernel_fails_the_gpu_check_in_a_copy_without_git(tmp_path):
    """wgmma stops before the end of K.  The copy has no repository, and git is not on the PATH."""
    tree = tmp_path / 'tree'
    for folder in ('csrc', 'cuda', 'pyops', 'bench', 'mnist', 'seq2seq', 'transformer', 'tests', 'build/c', 'build/emulated',
                   'build/emulator', 'build/conformance'):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns('asan', 'tsan', 'plain', '__pycache__'))
    shutil.copy2(ROOT / 'Makefile', tree)
    source = tree / 'cuda/hopper_gemm.cu'
    text = source.read_text()
    steps = 'const int all_steps = static_cast<int>(blocks_for<int64_t>(K, TK))'
    assert steps in text
    source.write_text(text.replace(steps, 'const int all_steps = static_cast<int>((K + 1) / TK + (K < TK))'))
    tools = tmp_path / 'tools'
    tools.mkdir()
    for tool in ('make', 'g++', 'gcc', 'awk', 'sh', 'uname', 'getconf', 'mkdir', 'rm', 'cp', 'touch', 'mv', 'as', 'ld', 'sort',
                 'grep'):
        if found := shutil.which(tool):
            (tools / tool).symlink_to(found)
    environment = emulated() | dict(PATH=str(tools), PYTHONPATH='', PYOPS_CACHE='0')
    report = tmp_path / 'report.json'
    command = ['make', 'gpu-check', 'PART=products', f'PYTHON={sys.executable}',
               f'FLAGS=--emulated --limit 600 --report {report}']
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    report = json.loads(report.read_text())
    built = report['parts']['build']['steps'][0]
    assert built['outcome'] == 'passed' and 'g++ build/emulated/hopper_gemm.o' in built['tail'], done.stdout + done.stderr
    assert done.returncode == 2 and 'Error 1' in done.stderr        # of make: the check's is 1
    assert report['parts']['products']['commit'] is None
    wrong = report['parts']['products']['steps'][0]['wrong']
    assert any('bf16 matrices' in line for line in wrong) and any('converted' in line and 'tf32' in line for line in wrong)
    assert not any('fp32' in line for line in wrong) and all(f'WRONG {line}' in done.stdout for line in wrong)


WRONG_LATER = """
import sys
import numpy as np
from bench import gpu
from pyops import backend
calls, gemm = [], backend.gemm

def wrong_from_the_sixth_call(c, *arguments):
    gemm(c, *arguments)
    calls.append(c)
    if len(calls) > 5:
        fives = backend.put(np.full(c.shape, 5, np.float32))
        backend.convert(c, fives) if c.dtype == backend.BF16 else backend.copy(c, fives)

backend.gemm = wrong_from_the_sixth_call
del gpu.TRIAL.products[1:]
sys.exit(gpu.main(['--only', 'products', '--trial', '--no-torch', '--json', sys.argv[1]]))
"""


@needs_emulation
def test_a_result_that_is_wrong_after_the_timed_loop_fails_the_gpu_benchmark(tmp_path):
    done = subprocess.run([sys.executable, '-c', WRONG_LATER, tmp_path / 'figures.json'], cwd=ROOT, env=emulated(),
                          capture_output=True, text=True)
    report = json.loads((tmp_path / 'figures.json').read_text())
    checks = report['sections']['products'][0]['checks']
    assert done.returncode == 1 and [check['ok'] for check in checks.values()] == [True, True, False], done.stdout
    assert list(checks)[2] == 'c after timing: changed elements' and report['wrong'][0].endswith('bound 0')


WITHOUT_TORCH = """
import sys
sys.modules['torch'] = None             # as if it were not installed
from bench import gpu
sys.exit(gpu.main([*'--only mnist --only seq2seq --only gpt2 --trial --json'.split(), sys.argv[1]]))
"""


@needs_emulation
def test_the_gpu_benchmark_of_training_steps_runs_without_torch(tmp_path):
    done = subprocess.run([sys.executable, '-c', WITHOUT_TORCH, tmp_path / 'figures.json'], cwd=ROOT, env=emulated(),
                          capture_output=True, text=True)
    assert done.returncode == 0 and 'torch is not installed: ours alone' in done.stderr, done.stderr
    report = json.loads((tmp_path / 'figures.json').read_text())
    assert report['torch'] is None and set(report['sections']) == {'mnist', 'seq2seq', 'gpt2'}
    for figures in report['sections'].values():
        assert figures and all('ours' in figure['all_s'] and 'best' not in figure for figure in figures)


@needs_emulation
def test_a_gpu_check_that_is_killed_leaves_its_figures(tmp_path):
    report = tmp_path / 'report.json'
    command = [*CHECK, 'products', '--report', report]
    with subprocess.Popen(command, cwd=ROOT, env=emulated(), stdout=subprocess.DEVNULL) as check:
        def products():
            with contextlib.suppress(FileNotFoundError, KeyError, TypeError):
                return figures_of(json.loads(report.read_text()), 'products')
        until = time.monotonic() + 120
        while len(products() or ()) < 3 and check.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        assert check.poll() is None
        check.kill()
    part = json.loads(report.read_text())['parts']['products']
    assert part['outcome'] == 'running' and part['steps'][0]['outcome'] == 'running'
    assert len(products()) >= 3 and products()[0]['checks'] and products()[0]['ours_s'] > 0


@needs_emulation
def test_a_limit_cuts_a_part_of_the_gpu_check_and_is_told_by_the_exit_status():
    status, out, report = checked('products', '--limit', '2')
    part = report['parts']['products']
    assert status == 3 and part['outcome'].startswith('cut'), out
    assert not part['steps'][0]['wrong']


def test_the_gpu_benchmark_begins_no_figure_after_its_limit(capsys):
    run = Run(None, None, None, {}, None, ends=0.0)
    run.section('some')
    assert run.figure('a kernel') is None and run.status() == 3
    assert run.report['left_out'] == ['some: a kernel']
    assert 'left out' in capsys.readouterr().out


TESTS = """
import numpy as np
import pytest

def test_right():
    pass

def test_wrong():
    assert 1 == 2

@pytest.mark.skip(reason='never')
def test_skipped():
    pass
"""


def test_a_step_whose_program_is_missing_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, 'FOLDER', tmp_path)
    part = gpu_check.Part('', lambda emulated: [gpu_check.Step([tmp_path / 'ladder'], {})])
    result = gpu_check.run_part('ladder', part, 10, True, lambda result: None)
    assert gpu_check.state(result) == 1 and result['outcome'] == f'failed: {tmp_path}/ladder: No such file or directory'


@pytest.mark.parametrize('deadline, count', [('60', {'passed': 1, 'failed': 1, 'skipped': 1}),
                                             ('0', {'left out': 2, 'skipped': 1})])
def test_every_test_is_recorded_and_none_begins_after_the_deadline(deadline, count, tmp_path):
    (tmp_path / 'test_some.py').write_text(TESTS)
    record = tmp_path / 'some.jsonl'
    environment = environment_without(PYTHONPATH=str(ROOT), GPU_CHECK_RECORD=str(record), GPU_CHECK_DEADLINE=deadline)
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'bench.deadline', '-p', 'no:cacheprovider']
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    figures, failed, left_out = gpu_check.read_figures(record)
    assert figures['count'] == count and left_out == count.get('left out', 0), done.stdout
    assert done.returncode == len(failed) == count.get('failed', 0) and all('test_wrong' in line for line in failed)


def test_the_gpu_check_keeps_the_path_of_python_and_drops_the_flags_of_make(monkeypatch):
    monkeypatch.setenv('PYTHONPATH', '/wheels')
    monkeypatch.setenv('MAKEFLAGS', ' -j8 --jobserver-auth=3,4')
    made = gpu_check.environment({}, emulated=False)
    assert made['PYTHONPATH'].split(os.pathsep) == [str(ROOT), '/wheels'] and 'MAKEFLAGS' not in made
    assert 'PYOPS_EMULATE_CUDA' not in made and gpu_check.environment({}, emulated=True)['PYOPS_EMULATE_CUDA'] == '1'


def test_the_gpu_check_names_what_it_lacks(monkeypatch):
    monkeypatch.setattr(gpu_check, 'find_spec', lambda name: None if name in ('pycparser', 'torch') else name)
    monkeypatch.setattr(gpu_check, '_which', lambda tool: None if tool == 'nvidia-smi' else tool)
    told = list(gpu_check.problems(emulated=False))
    assert len(told) == 2 and told[0].startswith('nvidia-smi is not on the PATH')
    assert told[1].startswith('the Python package pycparser is not installed for ')


def test_the_gpu_check_runs_every_test_file_that_covers_the_library():
    commands = [str(word) for part in ('ops', 'plans', 'programs') for step in gpu_check.PARTS[part].steps(False)
                for word in step.command]
    for name in ('table', 'ops', 'kernels', 'strided', 'formats', 'bf16', 'packed_gru', 'scaled_formats', 'hadamard',
                 'narrow_sums', 'fp8', 'optim', 'plan', 'mlp_step', 'ndarray', 'gpu'):
        assert any(word.endswith(f'test_{name}.py') for word in commands), name
    plan = gpu_check.PARTS['plans'].steps(False)[0]
    assert plan.environment['PYOPS_SYNC'] == '1'        # a fault is raised by the call that caused it, as test_plan expects


def test_a_contest_tells_the_share_of_the_peak_and_the_memory_of_a_step():
    from bench.gpu import peak_of, rate
    names = {'NVIDIA H100 80GB HBM3': 989e12, 'NVIDIA H100 PCIe': 756e12, 'NVIDIA A100-SXM4-80GB': 312e12,
             'emulated device': None}
    assert {name: peak_of(name) for name in names} == names and peak_of('emulated device', 100.0) == 1e14
    run = Run(None, None, None, dict(peak=1e15))
    figure = dict(what='a step bf16', flops=3e12, ours_s=0.01, memory={'ours': 3 * 2**20, 'torch eager': 2**22})
    assert rate(run, figure) == '300 TFLOP/s, 30.0% of the peak, ours 3 MiB, torch eager 4 MiB'
    assert figure['of_peak'] == 0.3
    assert rate(run, figure | dict(what='a step fp32')) == '300 TFLOP/s, ours 3 MiB, torch eager 4 MiB'


def test_a_tree_without_git_has_no_commit(monkeypatch):
    monkeypatch.setenv('PATH', '/nowhere')
    assert results.commit() == ''


def test_torch_gathers_inside_the_step_that_a_graph_captures(torch):
    from bench.gpu_contest import Torch
    table, seen = torch.arange(20), []
    contestants = Torch(True).contestants(lambda chosen: seen.append(table[chosen].tolist()),
                                          lambda: torch.tensor([[1, 2], [3, 4]]), 'fp32')
    run, _ = contestants['torch eager']
    seen.clear()
    run(2)
    assert seen == 2 * [[1, 2], [3, 4]]


def test_a_graph_of_torch_reads_the_rows_of_its_next_steps(torch, monkeypatch):
    """The streams and graphs of PyTorch are replaced: a replay reads what the captured steps were given."""
    from bench.gpu_contest import Torch
    given, replayed = [], []

    class Graph:
        def replay(self):
            replayed.append([rows.tolist() for rows in given[-2:]])

    class Stream:
        def wait_stream(self, other):
            pass

    for name, made in dict(Stream=Stream, current_stream=Stream, CUDAGraph=Graph, stream=contextlib.nullcontext,
                           graph=contextlib.nullcontext, synchronize=lambda: None).items():
        monkeypatch.setattr(torch.cuda, name, made)
    contestants, batches = Torch(True), iter([[i, i + 1], [i + 2, i + 3]] for i in range(0, 100, 4))
    contestants.has_gpu = True
    made = contestants.contestants(given.append, lambda: torch.tensor(next(batches)), 'fp32')
    assert set(made) == {'torch eager', 'torch eager graph'}
    replayed.clear()
    after = next(batches)[0][0]
    made['torch eager graph'][0](2)
    assert replayed == [[[after + 4, after + 5], [after + 6, after + 7]], [[after + 8, after + 9], [after + 10, after + 11]]]


# ---- several processes -------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@needs_mpi
def test_killed_ranks_leave_a_whole_checkpoint_and_no_process(capsys):
    kills.main(['--times', '3', '--most', '3'])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and lines[3].startswith('kills : 3, all processes ended within ')
    assert lines[4].endswith(' steps have the bits of an undisturbed process')


@pytest.mark.slow
@needs_mpi
def test_measured_costs_are_flags_of_the_model(capsys):
    scaling.main(['measure', 'mnist', '--steps', '5'])
    flags = capsys.readouterr().out.split()
    command.main(['model', *flags, '--gbit', '1'])
    assert capsys.readouterr().out.splitlines()[-1].startswith('a batch of 128 pays up to ')
    scaling.main(['check', 'mnist', '--steps', '5', '-n', '2'])
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_a_link_without_root_or_without_a_bandwidth_is_refused(monkeypatch):
    monkeypatch.setattr(os, 'geteuid', lambda: 1000)
    with pytest.raises(UserError, match='^--gbit: needs root, ip and tc'), links.connected(2, 1):
        pass
    with pytest.raises(UserError, match='^--delay-ms: needs a link; give its bandwidth with --gbit'):
        scaling.main(['overlap', 'mnist', '--delay-ms', '0', '1'])


def test_packets_pass_a_link_with_a_delay_both_ways_in_order():
    ends, inner = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(4)), strict=True)
    files, (until, close) = [one.fileno() for one in inner], os.pipe()
    for one in inner:
        one.setblocking(False)
    carrier = threading.Thread(target=links.carry, args=(0.001, [files[:2], files[2:]], until))
    carrier.start()
    for end in ends:
        end.settimeout(60)
    for first in range(0, 40, 8):                               # a socket of Linux holds ten packets
        for number in range(first, first + 8):
            for i, end in enumerate(ends):
                end.send(b'%d %d' % (i, number))
        for i, end in enumerate(ends):
            assert [end.recv(100) for _ in range(8)] == [b'%d %d' % (i ^ 1, n) for n in range(first, first + 8)]
    os.close(close)
    carrier.join(240)
    assert not carrier.is_alive()
    os.close(until)
    for one in (*ends, *inner):
        one.close()


can_link = os.geteuid() == 0 and os.path.exists('/dev/net/tun') and shutil.which('tc') and shutil.which('ip')


@pytest.mark.slow
@needs_mpi
@pytest.mark.skipif(not can_link, reason='needs root, tap devices and iproute2: run as root on Linux; apt install iproute2')
def test_ranks_train_over_links_that_leave_nothing_behind(capsys):
    def spaces():
        return subprocess.run(['ip', 'netns', 'list'], text=True, capture_output=True, check=True).stdout.split()
    before = spaces()
    scaling.main(['check', 'mnist', '--steps', '2', '-n', '2', '--gbit', '1', '--delay-ms', '0', '1'])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[1:]] == [['2', '1', 'Gbit/s,', delay, 'ms'] for delay in '01']
    assert spaces() == before


def test_small_operations_are_those_of_numpy():
    from bench.ndarray import SMALL, TENSORS, small_names
    ours, theirs = small_names(np.random.default_rng(0))
    for texts in (*SMALL, *[texts for texts in TENSORS if 'dropout' not in texts[0]]):      # whose masks differ
        mine, other = texts if isinstance(texts, tuple) else (texts, texts)
        for _ in range(3):                              # the third time some are recorded
            got, want = eval(f'({mine})', ours), eval(f'({other})', theirs)
        assert isinstance(got, tuple) == (type(want) in (tuple, list) and type(got) is not list), mine
        assert (got is None) == (want is None), mine
        got = got.detach() if isinstance(got, Tensor) else got
        pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [] if got is None else [(got, want)]
        for one, expected in pairs:
            np.testing.assert_allclose(np.asarray(one), expected, rtol=1e-5, atol=1e-6, err_msg=mine)
        np.testing.assert_array_equal(ours['c'].numpy(), theirs['c'], err_msg=mine)


def test_the_benchmark_of_small_operations_marks_what_takes_longer(monkeypatch, capsys):
    from bench import ndarray
    found = iter([(3.5e-6, 1e-6), (2.5e-6, 1e-6), (2e-6, 1e-6), (1e-6, 2e-6)])
    monkeypatch.setattr(ndarray.backend, 'set_threads', lambda n: None)
    monkeypatch.setattr(ndarray, 'SMALL', ('a + b', 'a * 2'))
    monkeypatch.setattr(ndarray, 'TENSORS', ())
    monkeypatch.setattr(ndarray, 'BATCHES', (((2, 3, 4), (2, 4, 3)),))
    monkeypatch.setattr(ndarray, 'cpu_times', lambda runs: [run() is None for run in runs] and next(found))
    ndarray.main(['--small'])
    assert [line.split()[-1] == '*' for line in capsys.readouterr().out.splitlines()[1:]] == [True, False, True, False]


# ---- time to quality -------------------------------------------------------------------------------------------------

def test_whole_commands_are_timed_until_they_have_classified_the_test_file(tmp_path, capsys, monkeypatch):
    embedded = mnist.load(embedded=True)
    names = ('train-images-idx3-ubyte', 'train-labels-idx1-ubyte', 't10k-images-idx3-ubyte', 't10k-labels-idx1-ubyte')
    for name, array in zip(names, embedded[1:5], strict=True):
        idx.write(tmp_path / name, array[:500].reshape(-1, 28, 28) if array.ndim == 2 else array[:500])
    command = ['--data-dir', str(tmp_path), '--seeds', '2', '--threads', '1']
    monkeypatch.setattr(results, 'save', lambda *_: pytest.fail('saved'))
    assert digits.main([*command, '--json', '--save']) == 1             # 500 images are too few
    captured = capsys.readouterr()
    assert re.fullmatch(r'bench.digits: 98 %: missed, \S+% of .*\nbench.digits: 99 %: missed, .*\n', captured.err)
    found = json.loads(captured.out)
    assert set(found['programs']) == {'98', '99'} and found['seeds'] == 2
    for one in found['programs'].values():
        assert 0 < one['mean_cpu_s'] and one['mean_s'] <= one['longest_s']
        assert .3 < one['least_correct'] <= one['mean_correct'] < 1
    monkeypatch.setitem(digits.PROGRAMS, 98, ['-m', 'mnist.train', '-x'])
    with pytest.raises(UserError, match='exit status 2: .*-x'):
        digits.main([*command, '--percent', '98'])
