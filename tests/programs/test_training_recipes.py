"""--recipe of the translation programs: sets of flags."""
import json

import pytest
from translation import assert_same_training, newest

import seq2seq.train
import transformer.train
from pyops.errors import UserError
from pyops.text import flags

ALL = [pytest.param(program, name, id=f'{program.__name__.partition(".")[0]} {name}')
       for program in (seq2seq.train, transformer.train) for name in program.RECIPES]
pytestmark = pytest.mark.usefixtures('float32')


@pytest.fixture
def float32():
    """Return to float32 products after a test: a program selects the precision for the process."""
    from pyops.backend import HOST
    yield
    HOST.precision = 'fp32'


@pytest.mark.parametrize('program, name', ALL)
def test_the_flags_of_a_recipe_are_those_written_out_and_flags_given_besides_take_precedence(program, name):
    def parse(*argv):
        return vars(flags.parse_training(program.parser(), argv, program.RECIPES)) | dict(argv=None)

    written = program.RECIPES[name].split()
    assert parse('--recipe', name) == parse(*written) | dict(recipe=name)
    other = dict(epochs=3, vocabulary=77)
    assert parse('--recipe', name, '-e', '3', '--vocabulary', '77') == parse(*written) | dict(recipe=name) | other
    assert parse('-e', '3', '--recipe', name)['epochs'] == 3            # wherever they are


@pytest.mark.parametrize('program', [seq2seq.train, transformer.train])
def test_a_run_with_a_recipe_can_be_repeated_bit_for_bit_and_resumed(program, tmp_path, capsys):
    small = ['--recipe', 'minutes-60', '-f', 'embedded', '--pairs', '300', '--vocabulary', '400', '--batch-tokens', '400',
             '--warmup', '2', '--layers', '1']
    for folder in ('once', 'again'):
        program.main([*small, '-e', '1', '-c', str(tmp_path / folder)])
    assert_same_training(newest(tmp_path / 'once'), newest(tmp_path / 'again'))
    assert ' bleu : ' in capsys.readouterr().out
    program.main([*small, '-e', '2', '-c', str(tmp_path / 'once')])
    lines = (tmp_path / 'once' / 'metrics.jsonl').read_text().splitlines()
    assert [json.loads(line)['epoch'] for line in lines] == [1, 2]


def test_a_resumed_run_refuses_a_recipe_with_another_model(tmp_path):
    folder = ['-c', str(tmp_path), '-f', 'embedded', '--pairs', '300', '-e', '1']
    transformer.train.main([*folder, '--d-model', '32'])
    with pytest.raises(UserError, match='was trained with'):
        transformer.train.main([*folder, '--recipe', 'minutes-30', '-e', '2'])
