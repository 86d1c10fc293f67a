"""Averages of checkpoints: against numpy, as a checkpoint that translates and is not trained further, and bad input."""
import os
import shutil

import numpy as np
import pytest
from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER

import pyops
import seq2seq.average
import seq2seq.train
import transformer.average
import transformer.train
from pyops import checkpoint
from pyops.errors import UserError
from pyops.text import averaging

PROGRAMS = {'seq2seq': (seq2seq.train, seq2seq.average, TINY_SEQ2SEQ),
            'transformer': (transformer.train, transformer.average, TINY_TRANSFORMER)}


@pytest.fixture(scope='module', params=PROGRAMS)
def trained(request, tmp_path_factory):
    """The name of a program, the folder of a run of three epochs, and the flags that resume it."""
    folder = tmp_path_factory.mktemp(request.param)
    train, _, flags = PROGRAMS[request.param]
    flags = [*flags, '-c', str(folder), '--save-every', '1']
    train.main([*flags, '-e', '3'])
    return request.param, folder, flags


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained[1], tmp_path / 'run')


def mean_of(paths):
    tensors = [checkpoint.load(path, parameters_only=True)[0] for path in paths]
    return {name: np.mean([some[name].astype(np.float64) for some in tensors], 0).astype('f') for name in tensors[0]}


def test_an_average_is_the_mean_that_numpy_computes_and_translates(trained, tmp_path, capsys):
    program, folder, _ = trained
    average, output = PROGRAMS[program][1], str(tmp_path / 'average.safetensors')
    epochs = checkpoint.newest_paths(folder)
    assert [checkpoint.load(path)[1]['run']['epoch'] for path in epochs] == [3, 2, 1]
    for arguments, paths in (([str(folder)], epochs), ([str(folder), '--last', '2'], epochs[:2]), (epochs[1:], epochs[1:])):
        average.main([*arguments, '-o', output])
        assert capsys.readouterr().out == ''.join(f'averaged : {path}\n' for path in paths) + f'saved : {output}\n'
        tensors, state = checkpoint.load(output)
        want = mean_of(paths)
        assert set(tensors) == set(want) and all(tensors[name].tobytes() == want[name].tobytes() for name in want)
        assert state['averaged'] == [os.path.basename(path) for path in paths]
    model = pyops.load(output)
    params = model.model.params
    assert all((params[name].value == want[f'parameter/{name}']).all() for name in params)
    assert isinstance(model.translate('I sleep.'), str)


def test_an_average_in_the_folder_of_a_run_does_not_change_where_it_resumes(trained, copy):
    program, _, flags = trained
    train, average, _ = PROGRAMS[program]
    output = copy / 'a.safetensors'
    average.main([str(copy), '-o', str(output)])
    average.main([str(copy), '-o', str(output)])            # the first one is not averaged, and replaced
    assert len(checkpoint.load(output)[1]['averaged']) == 3
    assert checkpoint.find(copy).path == checkpoint.newest_paths(copy)[0]
    with pytest.raises(UserError, match=f'^{output}: was averaged and cannot be trained further; give another folder with -c, '
                                        'or -e 0 to serve it$'):
        train.main([*flags, '-e', '4', '-c', str(output)])


def test_checkpoints_that_cannot_be_averaged_are_one_line(trained, copy, tmp_path):
    program, _, _ = trained
    average, other = (PROGRAMS[name][1] for name in (program, *(PROGRAMS.keys() - {program})))
    newest, second, _ = checkpoint.newest_paths(copy)
    state, changed, output = checkpoint.load(newest)[1], str(tmp_path / 'x.safetensors'), str(tmp_path / 'y.safetensors')

    def refused(*arguments, to=output, by=average):
        with pytest.raises(UserError) as error:
            by.main([*map(str, arguments), '-o', str(to)])
        assert not os.path.exists(output)
        return str(error.value)
    assert refused(copy, to=tmp_path / 'x') == f'--output {tmp_path}/x: expected a name that ends in .safetensors'
    assert refused(newest, second, to=newest) == (
        f'--output {newest}: is one of the checkpoints to average; give another name')
    assert refused(newest, newest).startswith(f'{newest}: expected two or more different checkpoints, or a folder of them; ')
    assert refused(newest) == refused(newest, newest)
    assert refused(copy, '--last', '4') == (
        f'{copy}: expected 4 checkpoints to average, found 3; train with --save-every 1 to have more')
    assert refused(newest, second, '--last', '2').startswith(f'--last 2: expected one folder, got {newest}; ')
    assert refused(newest, second, by=other).startswith(f'{newest}: a checkpoint of {program}, not of ')
    tensors = checkpoint.load(newest)[0]
    for change, name in ((dict(pairs='other'), 'pairs'), (dict(settings=state['settings'] | dict(layers=7)), 'layers'),
                         (dict(settings=state['settings'] | dict(seed=7)), 'seed')):
        checkpoint.save(changed, tensors, state | change)
        assert refused(newest, changed) == f'{changed}: {name} differs from that of {newest}; give checkpoints of one run'
    checkpoint.save(changed, tensors, state | dict(settings=state['settings'] | dict(lr=7.0)))
    assert averaging.average([newest, changed], program, ['layers'])[1]['averaged'] == [
        os.path.basename(newest), 'x.safetensors']          # another learning rate is no other run
