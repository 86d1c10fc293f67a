"""python -m pyops export: PyTorch, CTranslate2 and onnxruntime compute what pyops computes; and what is refused."""
import contextlib
import dataclasses
import io
import json
import os
import sys
from importlib import util

import numpy as np
import pytest

import pyops
from pyops import checkpoint
from pyops.__main__ import main
from pyops.backend import get
from pyops.export.trained import Trained
from pyops.text import decoding, embedded, tokenizer
from pyops.text.pairs import Sequences
from pyops.text.pieces import Pieces
from pyops.text.vocabulary import BOS, EOS, PAD, SPECIALS, Vocabulary
from seq2seq import model as seq2seq
from seq2seq import train as seq2seq_train
from transformer import model as transformer
from transformer import train as transformer_train

STEPS = 8
SIZES = {'transformer': dict(d_model=16, d_ff=24, heads=2, layers=2), 'seq2seq': dict(embedding=12, hidden=16, layers=2)}
TRANSFORMERS = {
    'post-norm': {}, 'pre-norm, tied': dict(pre_norm=True, tied=True, decoder_layers=1),
    'gelu': dict(activation='gelu', pre_norm=True),
    'gelu_tanh': dict(activation='gelu_tanh'),
    'silu, as in Marian': dict(activation='silu', tied=True, bias=True, halves=True)}
GRUS = {'context': {}, 'attention': dict(attention=2, bidirectional=True), 'one layer': dict(layers=1, bidirectional=True)}
MODELS = [('transformer', options) for options in TRANSFORMERS.values()] + [('seq2seq', options) for options in GRUS.values()]
NAMES = [*TRANSFORMERS, *GRUS]
each_model = pytest.mark.parametrize('program, options', MODELS, ids=NAMES)


@pytest.fixture
def uncut(monkeypatch):
    """Let greedy decoding repeat itself to the end, as other programs do: random weights repeat tokens."""
    monkeypatch.setattr(decoding, 'REPEATS', STEPS + 1)


def write_checkpoint(path, program, options):
    """Write a checkpoint of a model with random weights, and return its path.   options: settings of the model"""
    tokens = [[*SPECIALS, *(f'{letter}{n}' for n in range(20 + 7 * side))] for side, letter in enumerate('ab')]
    source, target = map(Vocabulary, tokens)
    target = source if options.get('tied') else target
    defaults, module = ((transformer_train.DEFAULTS, transformer) if program == 'transformer' else
                        (seq2seq_train.DEFAULTS, seq2seq))
    settings = defaults | dict(num_steps=STEPS) | SIZES[program] | options
    known = {field.name for field in dataclasses.fields(module.Config)}
    config = module.Config(len(source), len(target), **{name: settings[name] for name in known & set(settings)})
    rng = np.random.default_rng(7)
    tensors = {f'parameter/{name}': ((('norm.weight' in name) + (0.2 if 'norm' in name else 0.5) *
                                      rng.standard_normal(spec.shape)).astype('f'))
               for name, spec in module.parameter_specs(config).items()}
    checkpoint.save(path, tensors, dict(program=program, settings=settings, pairs=None, corpus=None,
                                        vocabularies=tokenizer.states((source, target))))
    return str(path)


def sentences(rng, words, count=5, longest=STEPS):
    """Return arrays of ids with an end mark, of lengths 2, ..., longest."""
    lengths = np.linspace(2, longest, count).astype(int) if count > 1 else [longest]
    return [np.append(rng.integers(len(SPECIALS), words, length - 1), EOS) for length in lengths]


def padded(sequences):
    """Return ids (B, T) int64 with padding at the end."""
    ids = np.full((len(sequences), max(map(len, sequences))), PAD, np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[:len(sequence)] = sequence
    return ids


def our_logits(model, sources, targets):
    """Return the logits at each position of the targets: a list of arrays (T, V)."""
    h, _ = model.forced(Sequences.of(sources, STEPS), Sequences.of(targets, STEPS))
    logits = get(h) @ get(model.output.weight.value).T + get(model.output.bias.value)
    return np.split(logits, np.cumsum([len(target) for target in targets])[:-1])


def assert_close(got, want):
    """Logits agree to rounding.   got: (B, T, V);  want: a list of arrays (T, V)"""
    assert max(np.abs(logits).max() for logits in want) > 1
    for b, logits in enumerate(want):
        assert np.abs(got[b, :len(logits)] - logits).max() <= 2e-5 * np.abs(logits).max()


def needs(*packages):
    """Skip a test without these packages.  torch: `export torch` needs no package"""
    for package in packages:
        if package != 'torch':
            pytest.importorskip(package, reason=f'{package} is not installed: pip install {package}')


def export(target, path, output, *flags):
    """Run the command in this process and return its status."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as end:
        main(['export', target, str(path), str(output), *flags])
    assert end.value.code or out.getvalue() == f'saved : {output}\n'
    return end.value.code or 0


# ---- PyTorch -----------------------------------------------------------------------------------------------------

@each_model
def test_pytorch_computes_the_same_logits_from_the_state_dict(torch, program, options, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import load_model

    from bench.torch_seq2seq import TorchSeq2Seq
    from bench.torch_transformer import TorchTransformer
    path, file = write_checkpoint(tmp_path / 'x.safetensors', program, options), tmp_path / 'model.safetensors'
    assert export('torch', path, file) == 0
    with safe_open(file, 'np') as opened:
        metadata = opened.metadata()
    settings = json.loads(metadata['settings'])
    Config, Twin = ((transformer.Config, TorchTransformer) if program == 'transformer' else (seq2seq.Config, TorchSeq2Seq))
    config = Config(**{name: value for name, value in settings.items() if name not in ('program', 'pad', 'eos', 'unk', 'bos')})
    assert (settings['program'], settings['bos']) == (program, BOS)
    twin = Twin(config).eval()
    load_model(twin, file)                                      # UserWarning or RuntimeError for a missing or extra name
    translator, rng = pyops.load(path), np.random.default_rng(1)
    assert tokenizer.restore(json.loads(metadata['vocabularies'])) == (translator.source_vocabulary,
                                                                       translator.target_vocabulary)
    sources, targets = sentences(rng, config.source_size), sentences(rng, config.target_size)[::-1]
    source, target = (torch.from_numpy(padded(some)) for some in (sources, targets))
    with torch.no_grad():
        if program == 'transformer':
            got = twin.output(twin.decode(target, *twin.encode(source)))
        else:
            encoded = twin.encode(source.T)
            got = twin.output(twin.decode(target.T, encoded, encoded[1])[0]).transpose(0, 1)
    assert_close(got.numpy(), our_logits(translator.model, sources, targets))


def test_a_matrix_that_is_used_three_times_is_stored_once(tmp_path):
    path, file = write_checkpoint(tmp_path / 'x.safetensors', 'transformer', dict(tied=True)), tmp_path / 'model.safetensors'
    assert export('torch', path, file) == 0
    from safetensors.numpy import load_file
    assert {'source_embedding.weight', 'target_embedding.weight', 'output.weight'} & set(load_file(file)) == {
        'source_embedding.weight'}


# ---- ONNX --------------------------------------------------------------------------------------------------------

class Session:
    """The graphs of a folder in onnxruntime."""

    def __init__(self, folder):
        runtime = pytest.importorskip('onnxruntime', reason='onnxruntime is not installed: pip install onnxruntime')
        options = runtime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 2
        self.graphs = {name: runtime.InferenceSession(folder / f'{name}.onnx', options, ['CPUExecutionProvider'])
                       for name in ('encoder', 'decoder_step')}

    def run(self, name, state):
        """Return the state with the outputs of a graph."""
        graph = self.graphs[name]
        outputs = graph.run(None, {value.name: state[value.name] for value in graph.get_inputs()})
        return state | {value.name.removeprefix('next_'): array for value, array in
                        zip(graph.get_outputs(), outputs, strict=True)}


@pytest.mark.usefixtures('uncut')
@pytest.mark.parametrize('program, options', [*MODELS, ('seq2seq', dict(reset_before=True))], ids=[*NAMES, 'reset before'])
def test_onnxruntime_computes_the_same_logits_and_translations(program, options, tmp_path):
    needs('onnx')
    path, folder = write_checkpoint(tmp_path / 'x.safetensors', program, options), tmp_path / 'onnx'
    assert export('onnx', path, folder) == 0
    translator, rng, session = pyops.load(path), np.random.default_rng(1), Session(folder)
    config = json.loads((folder / 'config.json').read_text())
    assert (config['program'], config['num_steps'], config['eos']) == (program, STEPS, EOS)
    for side, vocabulary in (('source', translator.source_vocabulary), ('target', translator.target_vocabulary)):
        assert json.loads((folder / f'{side}_vocabulary.json').read_text()) == vocabulary.tokens
    for count, longest in ((5, STEPS), (1, 3)):                 # batches and lengths of any size
        sources = sentences(rng, config['source_size'], count, longest)
        targets = sentences(rng, config['target_size'], count, longest)[::-1]
        start, target, got = session.run('encoder', {'source': padded(sources)}), padded(targets), []
        state = start
        for t in range(longest):
            state = session.run('decoder_step', state | {'token': target[:, t]})
            got.append(state['logits'])
        assert_close(np.stack(got, 1), our_logits(translator.model, sources, targets))

        state, word, words, done = start, np.full(count, BOS), [], np.zeros(count, bool)
        while len(words) < STEPS and not done.all():
            state = session.run('decoder_step', state | {'token': word})
            word = np.where(done, PAD, state['logits'].argmax(1))
            words.append(word)
            done = done | (word == EOS)
        assert (np.stack(words) == translator.model.translate(Sequences.of(sources, STEPS))).all()


# ---- CTranslate2 -------------------------------------------------------------------------------------------------

def peer(folder, compute='default'):
    """Return the ctranslate2.Translator of a folder."""
    ctranslate2 = pytest.importorskip('ctranslate2', reason='ctranslate2 is not installed: pip install ctranslate2')
    return ctranslate2.Translator(str(folder), compute_type=compute, inter_threads=1, intra_threads=1)


@pytest.mark.usefixtures('uncut')
@pytest.mark.parametrize('options', TRANSFORMERS.values(), ids=TRANSFORMERS)
def test_ctranslate2_computes_the_same_scores_translations_and_alignments(options, tmp_path):
    needs('ctranslate2')
    path, folder = write_checkpoint(tmp_path / 'x.safetensors', 'transformer', options), tmp_path / 'ct2'
    assert export('ctranslate2', path, folder) == 0
    translator, rng, theirs = pyops.load(path), np.random.default_rng(1), peer(folder)
    source, target = ([vocabulary.words(ids[:-1]) for ids in sentences(rng, len(vocabulary), 6)]
                      for vocabulary in (translator.source_vocabulary, translator.target_vocabulary))
    texts, references = ([' '.join(words) for words in some] for some in (source, target[::-1]))
    scores = [sum(result.log_probs) for result in theirs.score_batch(source, target[::-1])]
    assert np.allclose(scores, translator.score(texts, references), rtol=1e-5) and max(scores) < -3

    results = theirs.translate_batch(source, beam_size=1, max_decoding_length=STEPS, min_decoding_length=0,
                                     return_attention=True)
    for (ours,), found in zip(translator.translations(texts, beam=1, alignments=True), results, strict=True):
        count = len(ours.tokens) - (ours.tokens[-1] == SPECIALS[EOS])
        assert found.hypotheses[0] == ours.tokens[:count]
        weights = np.reshape(found.attention[0], (-1, len(ours.source) - 1))[:count]
        assert np.allclose(weights, ours.alignment[:count, :-1], atol=1e-5)


PAIRS = embedded.pairs()[:240:12]
TEXTS = [source for source, _ in PAIRS]


SUBWORDS = ['--tokenizer', 'bpe', '--vocabulary', '600', '--tied', '--pre-norm']


@pytest.mark.parametrize('flags', [[], SUBWORDS], ids=['words', 'subwords'])
def test_ctranslate2_translates_raw_text_as_we_do(flags, tmp_path):
    """Greedy and beam search of a model that has learned some pairs by heart; raw text is split by the exported tokenizer.
    In int8 the two round at different places, so a few texts may differ."""
    needs('ctranslate2')
    if flags:
        tokenizers = pytest.importorskip('tokenizers', reason='tokenizers is not installed: pip install tokenizers')
    (tmp_path / 'pairs.txt').write_text(''.join(f'{source}\t{target}\n' for source, target in PAIRS * 4))
    with contextlib.redirect_stdout(io.StringIO()):
        transformer_train.main(['-f', str(tmp_path / 'pairs.txt'), '-c', str(tmp_path / 'ckpt'), '-e', '40', '-b', '8',
                                '--d-model', '32', '-d', '0', '-l', '0.003', '--hold-out', '0', '--num-steps', '24', *flags])
    assert export('ctranslate2', tmp_path / 'ckpt', tmp_path / 'ct2') == 0
    translator = pyops.load(tmp_path / 'ckpt')
    if flags:
        split = tokenizers.Tokenizer.from_file(str(tmp_path / 'ct2/tokenizer.json'))
        tokens = [split.encode(text).tokens for text in TEXTS]
    else:
        tokens = [translator.source_vocabulary.read(text) for text in TEXTS]
    for compute, least in ('float32', len(TEXTS)), ('int8', 0.8 * len(TEXTS)):
        ours, theirs = pyops.load(tmp_path / 'ckpt', compute=compute), peer(tmp_path / 'ct2', compute)
        assert theirs.compute_type.startswith(compute)
        for beam in (1, 4):
            found = theirs.translate_batch(tokens, beam_size=beam, max_decoding_length=translator.num_steps)
            if flags:
                texts = [split.decode([split.token_to_id(token) for token in result.hypotheses[0]]).strip() for result in found]
            else:
                vocabulary = translator.target_vocabulary
                texts = [vocabulary.decode(np.array(vocabulary.ids(result.hypotheses[0]))) for result in found]
            assert sum(map(str.__eq__, texts, ours.translate(TEXTS, beam=beam))) >= least
        assert len(set(texts) & {target for _, target in PAIRS}) > len(PAIRS) / 2


def test_the_models_of_sentencepiece_are_written_as_they_are():
    sentencepiece = pytest.importorskip('sentencepiece', reason='sentencepiece is not installed: pip install sentencepiece')
    models, tokens = [], [*SPECIALS, '\u2581a', '\u2581b']
    for texts in zip(*PAIRS, strict=True):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, vocab_size=40, bos_id=-1,
                                                 hard_vocab_limit=False, minloglevel=2)
        models.append(model.getvalue())
    found = Trained('transformer', 'x', None, {}, tuple(Pieces(model, tokens) for model in models))
    assert found.tokenizer_files() == {'source.spm': models[0], 'target.spm': models[1]} and models[0] != models[1]
    assert found.tokens() == (tokens, tokens)


# ---- bad input ---------------------------------------------------------------------------------------------------

def refused(capsys, target, *arguments):
    """Return the line of an export that fails with status 2."""
    with pytest.raises(SystemExit) as end:
        main(['export', target, *map(str, arguments)])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out and err.count('\n') == 1, err
    return err.removeprefix('pyops: error: ').rstrip('\n')


@pytest.fixture
def stored(tmp_path):
    """A function that writes a checkpoint with these settings into an empty folder, and checks that nothing else is there."""
    (tmp_path / 'in').mkdir()
    (tmp_path / 'out').mkdir()
    yield lambda program='transformer', **options: write_checkpoint(tmp_path / 'in/x.safetensors', program, options)
    assert os.listdir(tmp_path / 'out') == [] and set(os.listdir(tmp_path / 'in')) <= {'x.safetensors'}


FOLDERS = ['ctranslate2', 'onnx']
REMEDY = 'name another place, or free some disk space'


def test_what_a_format_cannot_express_is_refused_with_one_line(capsys, stored, tmp_path):
    path, out = stored('seq2seq', reset_before=True), tmp_path / 'out'
    assert refused(capsys, 'torch', path, out / 'x.safetensors') == (
        f'{path}: trained with --reset-before: torch.nn.GRU applies the reset gate after the recurrent product; use `export '
        'onnx`, or train without --reset-before')
    needs('ctranslate2')
    assert refused(capsys, 'ctranslate2', path, out / 'x') == (
        f'{path}: a model of seq2seq, which this format cannot express; use `export onnx`')


def test_a_model_that_is_too_large_for_an_onnx_file_is_refused(capsys, stored, tmp_path, monkeypatch):
    needs('onnx')
    from pyops.export import graph
    monkeypatch.setattr(graph, '_LARGEST', 60_000)
    path = stored()
    assert refused(capsys, 'onnx', path, tmp_path / 'out/x') == (
        f'{path}: the encoder has more than 0.0 GB of weights, the most in an ONNX file; use `export torch`')


@pytest.mark.parametrize('target', ['torch', *FOLDERS])
def test_rounding_is_dropped_only_on_request(capsys, target, tmp_path):
    needs(target)
    path, out = write_checkpoint(tmp_path / 'x.safetensors', 'transformer', dict(quant='mxfp8')), tmp_path / 'out.safetensors'
    assert refused(capsys, target, path, out) == (
        f'{path}: trained with --quant mxfp8, which other programs cannot repeat; give --unrounded to export the weights '
        'without rounding')
    assert os.listdir(tmp_path) == ['x.safetensors']
    assert export(target, path, out, '--unrounded') == 0
    assert set(os.listdir(tmp_path)) == {'x.safetensors', 'out.safetensors'}


@pytest.mark.parametrize('target', ['torch', *FOLDERS])
def test_a_checkpoint_that_is_missing_or_of_another_program(capsys, target, stored, tmp_path):
    needs(target)
    out = tmp_path / 'out/x.safetensors'
    assert refused(capsys, target, tmp_path / 'none', out).startswith(f'{tmp_path / "none"}: no such folder; train first')
    checkpoint.save(tmp_path / 'in/x.safetensors', {'w': np.zeros(3, 'f')}, {'program': 'mnist'})
    assert refused(capsys, target, tmp_path / 'in/x.safetensors', out).endswith(
        'a checkpoint of mnist; expected one of seq2seq or transformer')


def test_a_place_that_cannot_be_written(capsys, stored, tmp_path):
    path = stored()
    before = checkpoint.load(path)[1]
    assert refused(capsys, 'torch', path, path) == f'{path}: exists; name a new file'
    assert checkpoint.load(path)[1] == before
    assert refused(capsys, 'torch', path, tmp_path / 'none/x.safetensors') == (
        f'{tmp_path / "none/x.safetensors"}: cannot be written; name a file in a folder that exists')
    assert refused(capsys, 'torch', path, tmp_path / 'out/x.pt') == (
        f'{tmp_path / "out/x.pt"}: expected a name that ends in .safetensors')
    needs(*FOLDERS)
    for target in FOLDERS:
        assert refused(capsys, target, path, tmp_path / 'in') == f'{tmp_path / "in"}: exists; name a new folder'
        assert refused(capsys, target, path, path) == f'{path}: exists; name a new folder'
        assert refused(capsys, target, path, tmp_path / 'none/x') == (
            f'{tmp_path / "none/x"}: cannot be written (No such file or directory); {REMEDY}')


@pytest.mark.parametrize('target', FOLDERS)
def test_a_failure_in_the_middle_leaves_nothing(capsys, target, stored, tmp_path, monkeypatch):
    needs(target)

    def fail(self):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(Trained, 'tokenizer_files', fail)
    assert refused(capsys, target, stored(), tmp_path / 'out/x') == (
        f'{tmp_path / "out/x"}: cannot be written (No space left on device); {REMEDY}')


@pytest.mark.parametrize('target', FOLDERS)
def test_without_its_package_it_names_the_extra(capsys, target, monkeypatch):
    find_spec = util.find_spec
    monkeypatch.setattr(util, 'find_spec', lambda name: None if name == target else find_spec(name))
    assert refused(capsys, target, 'x', 'y') == (
        f"export: the Python package {target} is not installed; install it with: {sys.executable} -m pip install "
        "'pyops[export]' (in the source tree: '.[export]')")
