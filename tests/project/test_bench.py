"""Contests of ours alone, and the table of the README, from figures that are made up."""
import json

import pytest

from bench import results, table, train, translate
from pyops.errors import UserError

PLACE = {'machine': 'a machine', 'isa': 'avx2', 'threads': 2, 'torch': '9.9', 'commit': 'c'}


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
                  step('transformer', '2029-01-01', 0.001, isa='avx512'), step('seq2seq', '2030-01-02', 0.1), scaling | PLACE,
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
    assert text.endswith('|\n\n<!-- /bench -->\nafter\n') and max(map(len, text.splitlines()[:6])) <= 128
    best, memory = '300 ms, PyTorch compiled', '300 MiB, 700 MiB |'
    assert [line for line in text.splitlines() if line.startswith('|')][2:] == [
        '| matrix product 1024 x 1024 x 1024 | 10.0 ms | 180 GFLOP/s | 90% | 15.0 ms, numpy | 1.50 x |  |',
        f'| seq2seq, training step, batch 128 | 100 ms | 200 GFLOP/s | 100% | {best} | 3.00 x | {memory}',
        f'| transformer, training step, batch 128 | 150 ms | 133 GFLOP/s | 67% | {best} | 2.00 x | {memory}',
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
    assert [line['n'] for line in lines] == [1, 2] and set(lines[0]) == {'date', 'commit', 'machine', 'torch', 'n'}
    assert capsys.readouterr().err.splitlines() == 2 * ['appended to results/some.jsonl']


# ---- contests, of ours alone -----------------------------------------------------------------------------------------

def test_the_contest_of_training_steps(capsys):
    train.main(['mnist', '--turns', '2', '--warmup', '1', '--json', '--threads', '1'])
    told = json.loads(capsys.readouterr().out)
    assert told['program'] == 'mnist' and told['steps'] == 100 and told['threads'] == 1 and 'vs' not in told
    assert 0 < told['p20_s'] <= told['median_s'] <= told['p80_s'] < 1 and told['peak_mib'] > 10


def test_the_contest_of_translation(capsys):
    translate.main(['transformer', '--no-torch', '--turns', '1', '--sentences', '3', '--json'])
    told = json.loads(capsys.readouterr().out)
    assert told['sentences'] == 3 and told['differ'] == {} and set(told['one']) == set(told['batches']) == {'ours'}
    assert 0 < told['one']['ours']['median_s'] < 10 and told['batches']['ours']['batch_size'] in translate.SIZES


def test_scaling_is_of_ours_alone():
    with pytest.raises(UserError, match='--scaling times ours alone; leave out --vs'):
        train.main(['mnist', '--scaling', '--vs', 'torch'])
