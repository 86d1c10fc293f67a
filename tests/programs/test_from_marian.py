"""Models of Marian: converted, they compute the logits and translations of PyTorch's MarianMTModel; and what is refused.

The oracle is the library `transformers`, with weights made at random.
"""
import io
import json
import re
import shutil
import sys

import numpy as np
import pytest
from arrays import close

import pyops
from pyops import checkpoint
from pyops.backend import get
from pyops.errors import UserError, exits_cleanly
from pyops.text import decoding, embedded
from pyops.text.decoding import Beams, Search
from pyops.text.pairs import Sequences
from pyops.text.pieces import Pieces
from pyops.text.tokenizer import restore
from pyops.text.vocabulary import BOS, EOS, PAD, SPECIALS, UNK
from transformer import evaluate, from_marian, train, translate

sentencepiece = pytest.importorskip('sentencepiece', reason='sentencepiece is not installed: pip install sentencepiece')
transformers = pytest.importorskip('transformers', reason='transformers is not installed: pip install transformers')
torch = pytest.importorskip('torch', reason='torch is not installed: pip install torch')

D, F, HEADS, LAYERS, STEPS = 32, 48, 4, 2, 40
SENTENCES = ["Mary doesn't sleep.", 'The old house is red.', 'He sees 7 cats!', 'We are happy because the sun shines on us.',
             'No.']


@pytest.fixture(scope='module', autouse=True)
def one_thread():
    """PyTorch's products are small here: two threads that wait for each other take longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope='module')
def spm(tmp_path_factory):
    """A folder with source.spm and target.spm, of 200 pieces each, and vocab.json, which joins them as Marian does."""
    folder, pieces = tmp_path_factory.mktemp('spm'), {}
    pairs = embedded.pairs()[::5]
    for side, texts in zip(('source', 'target'), zip(*pairs, strict=True), strict=True):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_writer=model, vocab_size=200,
                                                 character_coverage=1.0, bos_id=-1, minloglevel=2)
        (folder / f'{side}.spm').write_bytes(model.getvalue())
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        pieces |= dict.fromkeys(processor.id_to_piece(i) for i in range(len(processor)))
    tokens = ['</s>', '<unk>', *(piece for piece in pieces if piece not in ('</s>', '<unk>', '<s>')), '<pad>']
    (folder / 'vocab.json').write_text(json.dumps({token: id for id, token in enumerate(tokens)}))
    return folder


def make(folder, spm, activation='swish', dtype=torch.float32, **settings):
    """Write a model with random weights to a folder, as from the hub, and return PyTorch's model."""
    rows = len(json.loads((spm / 'vocab.json').read_text()))
    config = transformers.MarianConfig(**dict(
        vocab_size=rows, d_model=D, encoder_layers=LAYERS, decoder_layers=LAYERS + 1, encoder_ffn_dim=F, decoder_ffn_dim=F,
        encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, activation_function=activation, pad_token_id=rows - 1,
        eos_token_id=0, forced_eos_token_id=0, decoder_start_token_id=rows - 1, scale_embedding=True,
        max_position_embeddings=64) | settings)
    model = transformers.MarianMTModel(config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if 'embed_positions' not in name:
                noise = torch.randn(p.shape, generator=generator)
                p.copy_(1 + 0.2 * noise if 'norm.weight' in name else noise * (0.5 if 'shared' in name else 0.25))
        model.model.shared.weight[-1] = 0                       # the decoder's first embedding
        model.final_logits_bias.copy_(torch.randn(model.final_logits_bias.shape, generator=generator))
        model.final_logits_bias[0, 0] += 4                      # translations end
    model = model.to(dtype)
    model.save_pretrained(folder)
    for file in ('source.spm', 'target.spm', 'vocab.json'):
        shutil.copy(spm / file, folder)
    return model if dtype == torch.float32 else transformers.MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()


def learn(model, folder):
    """Train a model on 40 short pairs, so that its translations end and one word follows from another."""
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    sources, targets = zip(*sorted(embedded.pairs()[::25], key=lambda pair: sum(map(len, pair)))[:40], strict=True)
    batch = tokenizer(list(sources), text_target=list(targets), return_tensors='pt', padding=True)
    labels = batch.labels.masked_fill(batch.labels == model.config.pad_token_id, -100)
    torch.manual_seed(0)
    with torch.no_grad():
        model.final_logits_bias[...] = 0
        for name, p in model.named_parameters():
            if 'shared' in name:
                p[:-1].normal_(0, D ** -0.5)
            elif p.ndim == 2 and 'embed' not in name:
                torch.nn.init.xavier_uniform_(p)
    optimizer = torch.optim.Adam(model.parameters(), 0.004)
    for _ in range(200):
        rows = torch.randint(0, len(sources), (16,))
        loss = model(input_ids=batch.input_ids[rows], attention_mask=batch.attention_mask[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 2
    model.save_pretrained(folder)


@pytest.fixture(scope='module')
def converted(tmp_path_factory, spm):
    """A folder with a trained model, the model in PyTorch, and the path of its checkpoint."""
    folder = tmp_path_factory.mktemp('swish')
    model = make(folder, spm)
    learn(model, folder)
    from_marian.main([str(folder), '-o', str(folder / 'ckpt.safetensors'), '--num-steps', str(STEPS)])
    return folder, model, folder / 'ckpt.safetensors'


def open_translator(path):
    return pyops.load(str(path))


def order_of(tokens, ids):
    """Return for each of our tokens its id in vocab.json; <bos> is the padding."""
    theirs = dict(zip(SPECIALS, ('<pad>', '</s>', '<unk>', '<pad>'), strict=True))
    return np.array([ids[theirs.get(token, token)] for token in tokens])


def logits(translator, source, target):
    """Return the logits (T, V) after each token of target, arrays of ids, from the hidden states of our decoder."""
    model = translator.model
    memory, _ = model.encoder.forward(Sequences.of([source], STEPS))
    rows = Sequences.of([source], STEPS).rows
    h, _ = model.decoder.forward(Sequences.of([target], STEPS), memory, rows)
    p = model.params
    return get(h) @ get(p['embedding.weight'].value).T + get(p['output.bias'].value)


def compare_logits(translator, model, ids):
    """Compare the logits of three sentences with their unrelated target tokens."""
    order, rng = order_of(translator.source_vocabulary.words(range(len(ids) + 1)), ids), np.random.default_rng(0)
    for text in SENTENCES[:3]:
        source = np.append(translator.source_vocabulary.encode([text]).ids, EOS)
        target = np.append(BOS, rng.integers(4, len(ids), 9)).astype(np.int32)
        with torch.no_grad():
            want = model(input_ids=torch.tensor(order[source])[None],
                         decoder_input_ids=torch.tensor(order[target])[None]).logits
        got = logits(translator, source, target)
        seen = [id for id in range(len(order)) if id not in (PAD, BOS)]
        close(got[:, seen], want[0].numpy()[:, order[seen]], 5e-5, f'logits of {text}')
        assert np.ptp(want.numpy(), -1).min() > 5 and (got[:, [PAD, BOS]] < -1e8).all()


# ---- the same numbers ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('activation, dtype', [('swish', torch.float32), ('relu', torch.float32), ('gelu', torch.float32),
                                               ('silu', torch.float16)])
def test_the_logits_are_those_of_pytorch(tmp_path, spm, activation, dtype):
    model, path = make(tmp_path, spm, activation, dtype), tmp_path / 'ckpt.safetensors'
    from_marian.main([str(tmp_path), '-o', str(path), '--num-steps', str(STEPS)])
    translator = open_translator(path)
    config = translator.model.config
    assert (config.layers, config.decoder_layers, config.activation) == (2, 3, activation.replace('swish', 'silu'))
    compare_logits(translator, model, json.loads((tmp_path / 'vocab.json').read_text()))


def test_greedy_translations_are_those_of_pytorch(converted, monkeypatch):
    monkeypatch.setattr(decoding, 'REPEATS', STEPS + 1)         # PyTorch does not cut a repetition
    folder, model, path = converted
    translator, texts = open_translator(path), [source for source, _ in embedded.pairs()[30::500]] + SENTENCES
    ours = translator.translate(texts, beam=1)
    theirs, _ = generate(model, folder, texts, num_beams=1)
    assert len(set(theirs)) > 10
    assert ours == theirs


@pytest.mark.parametrize('length_penalty', [1.0, 0.6])
def test_beam_search_on_the_probabilities_of_pytorch_has_the_same_results(converted, length_penalty):
    """The search is ours, with a model of PyTorch."""
    folder, model, path = converted
    translator, search = open_translator(path), Search(STEPS, 4, 1, length_penalty)
    vocabulary, texts = translator.source_vocabulary, [source for source, _ in embedded.pairs()[30::1000]]
    order = order_of(vocabulary.words(range(len(vocabulary))), json.loads((folder / 'vocab.json').read_text()))
    for text in texts:
        source, beams = order[np.append(vocabulary.encode([text]).ids, EOS)], Beams(search, 1)
        seen = np.full((1, 1), BOS)                             # the tokens of each hypothesis
        while True:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor(source).expand(len(seen), -1),
                               decoder_input_ids=torch.tensor(order[seen])).logits[:, -1, order]
            logits[:, [PAD, BOS]] = -torch.inf
            logp, index = logits.log_softmax(-1).topk(4)
            beams.advance(index.numpy().astype(np.int32), logp.numpy())
            if not beams.sentences:
                break
            seen = np.concatenate([seen[beams.parents[:, 0]], beams.word], 1)
        (_, (want,)), = beams.take_results()
        (ours,) = translator.translations(text, beam=4, length_penalty=length_penalty)
        assert ours.text == vocabulary.decode(want.tokens), text
        assert abs(ours.score - want.score) <= 1e-5 * max(1, abs(ours.score)), text


@pytest.mark.parametrize('length_penalty', [0.0, 0.6])
def test_beam_search_finds_the_translations_and_scores_of_pytorch(converted, length_penalty):
    """Both divide by (tokens with the end mark) ** length_penalty.  PyTorch always extends four hypotheses, and we extend fewer
    once one is finished, so for a few sentences the results differ."""
    folder, model, path = converted
    translator, texts = open_translator(path), [source for source, _ in embedded.pairs()[30::500]]
    ours = [found[:2] for found, in translator.translations(texts, beam=4, length_penalty=length_penalty)]
    theirs = zip(*generate(model, folder, texts, num_beams=4, length_penalty=length_penalty, early_stopping='never'),
                 strict=True)
    same = [(score, want) for (text, score), (their_text, want) in zip(ours, theirs, strict=True) if text == their_text]
    assert len(same) >= 0.8 * len(texts), len(same)
    for score, want in same:
        assert abs(score - want) <= 1e-5 * max(1, abs(want))


def generate(model, folder, texts, **settings):
    """Return translations of MarianMTModel and their scores.  It predicts no padding, which has no share of probability."""
    tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    out = model.generate(**tokenizer(texts, return_tensors='pt', padding=True), bad_words_ids=[[model.config.pad_token_id]],
                         renormalize_logits=True, max_length=STEPS + 1, return_dict_in_generate=True, output_scores=True,
                         **settings)
    scores = out.sequences_scores.tolist() if settings['num_beams'] > 1 else None
    found = tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
    return [' '.join(text.split()) for text in found], scores          # it keeps several spaces in a row


def test_the_tokens_and_texts_are_those_of_the_tokenizer_of_transformers(converted):
    folder, _, path = converted
    translator, tokenizer = open_translator(path), transformers.MarianTokenizer.from_pretrained(folder)
    order = order_of(translator.source_vocabulary.words(range(len(translator.source_vocabulary))), tokenizer.encoder)
    texts = [*SENTENCES, ' two  spaces and\ta tab ', 'Ünknöwn 漢字 letters', 'a ▁ b', '', '>>fra<< Go.', 'œuf']
    for side, vocabulary in (('source', translator.source_vocabulary), ('target', translator.target_vocabulary)):
        encoded = vocabulary.encode([vocabulary.read(text) for text in texts])
        ends = np.cumsum(encoded.lengths)
        for text, end, length in zip(texts, ends, encoded.lengths, strict=True):
            ids = encoded.ids[end - length:end]
            theirs = tokenizer(**{'text' if side == 'source' else 'text_target': text})['input_ids']
            assert [*order[ids], 0] == theirs, text
            if UNK not in ids:
                assert vocabulary.decode(np.append(ids, EOS)) == tokenizer.decode(theirs, skip_special_tokens=True), text
        assert vocabulary.encode(['<pad> </s> <bos> <s>']).ids.min() >= UNK
    assert translator.target_vocabulary.decode(np.array([UNK, EOS, PAD])) == '<unk>'
    assert translator.source_vocabulary.unknown(['Mary', '漢', 'sees']) == ['漢']


# ---- the layout of Marian --------------------------------------------------------------------------------------------

def to_npz(model, path, **settings):
    """Write the weights of PyTorch's model as Marian does: matrices transposed, vectors as rows, without padding."""
    state = {name: p.detach().numpy() for name, p in model.state_dict().items()}
    arrays = dict(Wemb=state['model.shared.weight'][:-1], decoder_ff_logit_out_b=state['final_logits_bias'][:, :-1])
    parts = {'fc1.weight': 'ffn_W1', 'fc1.bias': 'ffn_b1', 'fc2.weight': 'ffn_W2', 'fc2.bias': 'ffn_b2',
             'final_layer_norm.weight': 'ffn_ffn_ln_scale', 'final_layer_norm.bias': 'ffn_ffn_ln_bias'}
    for theirs, marian in (('self_attn', 'self'), ('encoder_attn', 'context')):
        parts |= {f'{theirs}.{name}_proj.{kind}': f'{marian}_{kind[0].replace("w", "W")}{name[0]}'
                  for name in ('q', 'k', 'v', 'out') for kind in ('weight', 'bias')}
        parts |= {f'{theirs}_layer_norm.weight': f'{marian}_Wo_ln_scale', f'{theirs}_layer_norm.bias': f'{marian}_Wo_ln_bias'}
    for name, value in state.items():
        if '.layers.' in name:
            _, side, _, layer, part = name.split('.', 4)
            arrays[f'{side}_l{int(layer) + 1}_{parts[part]}'] = value.T if value.ndim == 2 else value[None]
    config = model.config
    lines = {'type': 'transformer', 'dim-emb': D, 'dim-vocabs': f'\n  - {len(arrays["Wemb"])}\n  - {len(arrays["Wemb"])}',
             'enc-depth': config.encoder_layers, 'dec-depth': config.decoder_layers, 'transformer-heads': HEADS,
             'transformer-dim-ffn': F, 'transformer-ffn-activation': config.activation_function, 'tied-embeddings-all': 'true',
             'transformer-postprocess': 'dan', 'transformer-preprocess': '""', 'transformer-ffn-depth': 2,
             'transformer-train-position-embeddings': 'false'} | settings
    text = ''.join(f'{name}: {value}\n' for name, value in lines.items())
    np.savez(path, **arrays, **{'special:model.yml': np.frombuffer(text.encode() + b'\0', np.int8)})


@pytest.fixture
def marian(tmp_path, spm):
    """A folder in Marian's layout, and the same model in PyTorch."""
    pytest.importorskip('yaml', reason='PyYAML is not installed: pip install pyyaml')
    model, folder = make(tmp_path / 'hub', spm), tmp_path / 'marian'
    folder.mkdir()
    to_npz(model, folder / 'model.npz')
    for file in ('source.spm', 'target.spm'):
        shutil.copy(spm / file, folder)
    ids = json.loads((spm / 'vocab.json').read_text())
    del ids['<pad>']
    (folder / 'opus.vocab.yml').write_text(''.join(f'{json.dumps(token, ensure_ascii=False)}: {id}\n'
                                                   for token, id in ids.items()))
    return folder, model


def test_both_layouts_give_the_same_checkpoint(marian):
    folder, _ = marian
    tensors, state = from_marian.convert(folder.parent / 'hub')
    others, other_state = from_marian.convert(folder)
    assert state == other_state and set(tensors) == set(others) and len(tensors) == 2 + 2 * 16 + 3 * 26
    for name, tensor in tensors.items():
        assert tensor.dtype == np.float32 and tensor.flags.c_contiguous and np.array_equal(tensor, others[name]), name
    shutil.copy(folder.parent / 'hub' / 'vocab.json', folder)           # with the padding
    (folder / 'opus.vocab.yml').unlink()
    assert from_marian.convert(folder)[1] == state


def test_tokens_that_yaml_reads_as_numbers_and_booleans_stay_text(marian):
    folder, _ = marian
    at = folder / 'opus.vocab.yml'
    lines = at.read_text().splitlines()
    for name, at_line in (('no', 5), ('12', 6), ('~', 7)):
        lines[at_line] = f'{name}: {at_line}'
    at.write_text('\n'.join(lines))
    tokens = from_marian.convert(folder)[1]['vocabularies']['source']['tokens']
    assert {'no', '12', '~'} < set(tokens)


# ---- the programs ----------------------------------------------------------------------------------------------------

def test_a_converted_model_translates_serves_and_is_scored(converted, tmp_path, capsys, monkeypatch):
    pytest.importorskip('sacrebleu', reason='sacrebleu is not installed: pip install sacrebleu')
    path = str(converted[2])
    want = open_translator(path).translate(SENTENCES[0])
    capsys.readouterr()
    translate.main(['-c', path, SENTENCES[0]])
    assert capsys.readouterr().out == f'{want}\n'
    monkeypatch.setattr('sys.stdin', io.TextIOWrapper(io.BufferedReader(io.BytesIO(f'{SENTENCES[0]}\n'.encode()))))
    train.main(['-e', '0', '-c', path])
    assert capsys.readouterr().out == f'{want}\n'
    evaluate.main(['-c', path, '-f', 'embedded', '--first', '20', '--json', '--beam', '1'])
    report = json.loads(capsys.readouterr().out)
    assert report['sentences'] == 20 and 0 < report['one_reference']['chrf'] < 100
    translate.main(['-c', path, '-f', 'embedded', '--test', '2', '--beam', '1'])
    assert 'held-out test : ' in capsys.readouterr().out
    tests = tmp_path / 'tests.txt'
    tests.write_text(''.join(f'eng\tfra\t{source}\t{target}\n' for source, target in embedded.pairs()[:2000:400]))
    evaluate.main(['-c', path, '--test-set', str(tests), '--beam', '1', '--json'])
    told = capsys.readouterr()
    assert (f'test set : {tests}, 5 sentences; none is left out: the training corpus of a converted checkpoint is not known\n'
            in told.err and 'corpus :' not in told.err)
    report = json.loads(told.out)
    assert report['sentences'] == 5 and report['left_out'] == 0 and report['test_set']['path'] == str(tests)
    with pytest.raises(UserError, match=r'ckpt.safetensors: was converted by transformer.from_marian and cannot be trained '
                                        'further; give another folder with -c, or -e 0 to serve it$'):
        train.main(['-e', '1', '-c', path, '-f', 'embedded'])


def test_the_tokenizers_are_stored_in_the_checkpoint(converted):
    _, state = checkpoint.load(converted[2])
    source, target = restore(json.loads(json.dumps(state['vocabularies'])))
    assert isinstance(source, Pieces) and source != target and repr(source) == f'Pieces({len(target)} tokens)'
    assert restore(state['vocabularies']) == (source, target)
    for damage, want in ((dict(spm='x'), 'pieces: damaged tokenizer'), (dict(spm=''), 'not a SentencePiece model'),
                         (dict(tokens=['a']), 'pieces: expected a vocabulary that starts with <pad> <eos> <unk> <bos>')):
        with pytest.raises(UserError, match=want):
            restore({'source': state['vocabularies']['source'] | damage, 'target': None})


def test_a_missing_library_is_named(converted, monkeypatch):
    monkeypatch.setitem(sys.modules, 'sentencepiece', None)
    with pytest.raises(UserError, match='sentencepiece, .* is not installed: install it with: pip install sentencepiece'):
        open_translator(converted[2])


# ---- what is refused -------------------------------------------------------------------------------------------------

def edit_json(path, **changes):
    value = json.loads(path.read_text())
    path.write_text(json.dumps(value | changes))


def without_a_token(folder):
    ids = json.loads((folder / 'vocab.json').read_text())
    ids.pop('<pad>')
    (folder / 'vocab.json').write_text(json.dumps(ids))


def with_tensors(change):
    def apply(folder):
        from safetensors.numpy import load_file, save_file
        tensors = load_file(folder / 'model.safetensors')
        change(tensors)
        save_file(tensors, folder / 'model.safetensors')
    return apply


def as_bfloat16(folder):
    from safetensors.torch import load_file, save_file
    tensors = load_file(folder / 'model.safetensors')
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / 'model.safetensors')


def pickled(folder):
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


@pytest.mark.parametrize('change, want', [
    *((lambda folder, file=file: (folder / file).unlink(), f'{file}: no such file; docs/marian.md lists the files of a model')
      for file in ('config.json', 'model.safetensors', 'vocab.json', 'target.spm')),
    (pickled, 'model.safetensors: no such file, only pytorch_model.bin; convert it with: python -c '),
    (lambda folder: edit_json(folder / 'config.json', model_type='bart'),
     "config.json: model_type 'bart': expected 'marian'; give the folder of a Marian model"),
    (lambda folder: edit_json(folder / 'config.json', activation_function='tanh'),
     "config.json: activation_function 'tanh': expected one of swish, silu, relu, gelu"),
    (lambda folder: edit_json(folder / 'config.json', scale_embedding=False),
     'config.json: scale_embedding False: expected True; other kinds of models cannot be converted'),
    (lambda folder: edit_json(folder / 'config.json', decoder_ffn_dim=64),
     'config.json: decoder_ffn_dim 64: expected 48, as in the encoder'),
    (lambda folder: edit_json(folder / 'config.json', d_model='large'),
     "config.json: d_model 'large': expected a whole number of at least 1 and below 1000000000000; get the file again"),
    (lambda folder: edit_json(folder / 'config.json', pad_token_id=9999),
     'config.json: pad_token_id 9999: expected a whole number of at least 0 and below '),
    (lambda folder: edit_json(folder / 'config.json', d_model=64), 'model.shared.weight: expected shape .* 64.*, got '),
    (lambda folder: edit_json(folder / 'config.json', encoder_attention_heads=5, decoder_attention_heads=5),
     '--heads 5: expected a divisor of --d-model 32'),
    (lambda folder: (folder / 'config.json').write_text('{'), 'config.json: not JSON .*; get the file again'),
    (lambda folder: (folder / 'vocab.json').write_text('[' * 200_000), 'vocab.json: not JSON .*recursion.*; get the file'),
    (lambda folder: edit_json(folder / 'config.json', activation_function=['relu']),
     'config.json: activation_function of type list: expected one of swish, silu, relu, gelu'),
    (lambda folder: edit_json(folder / 'config.json', encoder_layers=10 ** 9),
     r'model.safetensors: 1000000003 layers and \d+ tensors: expected several tensors a layer'),
    (lambda folder: edit_json(folder / 'vocab.json', **{'<pad>': float('inf')}), 'vocab.json: expected one number per token'),
    (without_a_token, r'vocab.json: holds \d+ tokens, and the embedding has \d+ rows; get all files from the same model'),
    (lambda folder: edit_json(folder / 'vocab.json', **{'<pad>': 3}), r'vocab.json: expected the ids 0 to \d+, each once'),
    (lambda folder: (folder / 'source.spm').write_bytes(b'text'),
     'source.spm: not a SentencePiece model; get the .spm file again'),
    (lambda folder: (folder / 'model.safetensors').write_bytes(b'text'),
     'model.safetensors: cannot be read .* expected tensors of float32 or float16'),
    (as_bfloat16, 'model.safetensors: cannot be read .* expected tensors of float32 or float16'),
    (with_tensors(lambda tensors: tensors.pop('model.encoder.layers.1.fc1.bias')),
     r'model.encoder.layers.1.fc1.bias: expected shape \(48,\), got none; get all files from the same model'),
    (with_tensors(lambda tensors: tensors.update({'model.encoder.layer_norm.bias': np.zeros(32, np.float32)})),
     'holds model.encoder.layer_norm.bias, which this model does not have; expected a model like opus-mt-en-fr'),
    (with_tensors(lambda tensors: tensors.update({'lm_head.weight': tensors['model.shared.weight'] + 1})),
     'lm_head.weight differs from model.shared.weight: expected one matrix for both embeddings and the output layer')])
def test_what_is_refused_of_the_layout_of_the_hub(tmp_path, spm, change, want, capsys):
    make(tmp_path, spm)
    change(tmp_path)
    refused(tmp_path, want, capsys)


def refused(folder, want, capsys):
    """Require a line with the text, exit status 2, and no checkpoint."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended, exits_cleanly(from_marian.PROGRAM):
        from_marian.main([str(folder), '-o', str(folder / 'new.safetensors')])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count('\n') == 1 and re.search(want, error), error
    assert not (folder / 'new.safetensors').exists()


@pytest.mark.parametrize('settings, want', [
    ({'transformer-ffn-activation': 'gelu'}, "transformer-ffn-activation 'gelu': expected one of swish, relu"),
    ({'transformer-preprocess': 'n'}, "transformer-preprocess 'n': expected ''; other kinds of models cannot be converted"),
    ({'tied-embeddings-all': 'false'}, "tied-embeddings-all 'false': expected 'true'"),
    ({'dim-emb': 64}, r'Wemb: expected shape \(353, 64\), got \(353, 32\)'),
    ({'enc-depth': 1}, 'holds encoder_l2_.*, which this model does not have'),
    ({'enc-depth': 'x'}, "enc-depth 'x': expected a whole number of at least 1")])
def test_what_is_refused_of_the_layout_of_marian(marian, settings, want, capsys):
    folder, model = marian
    to_npz(model, folder / 'model.npz', **settings)
    refused(folder, want, capsys)


@pytest.mark.parametrize('loader', ['CBaseLoader', 'BaseLoader'])
def test_a_yaml_text_of_deep_or_repeated_lists_is_refused_with_a_short_line(loader, monkeypatch):
    yaml = pytest.importorskip('yaml')
    monkeypatch.setattr(yaml, 'CBaseLoader', getattr(yaml, loader), raising=False)
    with pytest.raises(UserError, match='file: damaged YAML .*depth'):
        from_marian._yaml('file', 'a: ' + '[' * 20_000)
    text = 'a0: &a0 [x, x]\n' + ''.join(f'a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n' for n in range(1, 60)) + 'type: *a59'
    with pytest.raises(UserError, match="^file: type of type list: expected 'transformer'"):
        from_marian._check('file', from_marian._yaml('file', text), from_marian.OF_MARIAN)


def test_files_that_are_not_a_model_are_refused(marian, capsys):
    folder, _ = marian
    shutil.copy(folder / 'model.npz', folder / 'other.npz')
    refused(folder, 'holds 2 .npz files, model.npz and other.npz; leave only the one to convert', capsys)
    (folder / 'other.npz').unlink()
    shutil.copy(folder / 'opus.vocab.yml', folder / 'other.vocab.yml')
    refused(folder, 'expected vocab.json or one .vocab.yml, got 2', capsys)
    (folder / 'other.vocab.yml').write_text('- a')
    (folder / 'opus.vocab.yml').unlink()
    refused(folder, 'expected a YAML mapping, got list', capsys)
    (folder / 'model.npz').write_bytes(b'text')
    refused(folder, 'model.npz: not the weights of a Marian model', capsys)


def test_copies_of_the_embedding_stored_positions_and_a_missing_bias_are_accepted(tmp_path, spm):
    make(tmp_path, spm)
    tensors, _ = from_marian.convert(tmp_path)

    def as_older_files(tensors):
        tensors['lm_head.weight'] = tensors['model.decoder.embed_tokens.weight'] = tensors['model.shared.weight']
        tensors['model.encoder.embed_positions.weight'] = np.zeros((64, D), np.float32)
        del tensors['final_logits_bias']
    with_tensors(as_older_files)(tmp_path)
    others, _ = from_marian.convert(tmp_path)
    bias = others.pop('parameter/output.bias')
    assert all(np.array_equal(other, tensors[name]) for name, other in others.items())
    assert (bias[[PAD, BOS]] == from_marian.MASKED).all() and not np.delete(bias, [PAD, BOS]).any()


def test_a_folder_and_a_name_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(UserError, match='nowhere: expected a folder with the files of a model; docs/marian.md says'):
        from_marian.main([str(tmp_path / 'nowhere'), '-o', str(tmp_path / 'a.safetensors')])
    with pytest.raises(UserError, match='--output .*/a.npz: expected a name that ends in .safetensors'):
        from_marian.main([str(tmp_path), '-o', str(tmp_path / 'a.npz')])
