"""Subwords: learned by the library, applied as the library does, lossless, with dropout that can be repeated."""
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from pyops.data import locate
from pyops.errors import UserError
from pyops.text import embedded, subwords
from pyops.text.corpus import Corpus
from pyops.text.preprocess import normalize
from pyops.text.split import hold_out
from pyops.text.subwords import SMALLEST, Subwords, train
from pyops.text.tokenizer import of_corpus, restore, states
from pyops.text.vocabulary import BOS, EOS, PAD, SPECIALS, UNK, Vocabulary

tokenizers = pytest.importorskip('tokenizers', reason='tokenizers is not installed: pip install tokenizers')

ODD = ['Va\N{NARROW NO-BREAK SPACE}!', 'Ça\N{NO-BREAK SPACE}va\N{THIN SPACE}?', '«\N{NO-BREAK SPACE}Non\N{NO-BREAK SPACE}»',
       'Je t’aime 😀👩‍👩‍👧!', '你好，世界。', 'e\N{COMBINING ACUTE ACCENT}te\N{COMBINING ACUTE ACCENT}', 'हिन्दी में', '',
       ' ', '\t\n', '<eos> <pad> <unk>', '▁a Ġb', 'a\0b\x85c\u2028d', 'snake_case 3.14 1998 x² Ⅷ', 'x' * 10_000,
       "don't qu'est-ce-qu'on-a-dit", "'" * 100, '- -- --- -a- b-', '\u200b\xad', 'İstanbul ẞ', '١٢٣ 四']


@pytest.fixture(scope='module')
def pairs():
    return [text for pair in embedded.pairs()[:4000] for text in pair]


@pytest.fixture(scope='module')
def learned(pairs):
    return train(pairs, 700)


def rows(encoded):
    """The ids of each sentence as lists."""
    return [part.tolist() for part in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])]


# ---- text to ids and back ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize('text, want', [
    (' Va\N{NARROW NO-BREAK SPACE}!\n', 'Va !'), ('J’ai “dit” ‘oui’', 'J\'ai "dit" \'oui\''), ('« Non »', '« Non »'),
    ('e\N{COMBINING ACUTE ACCENT}', 'é'), ('İ ẞ', 'İ ẞ'), ('\t', '')])
def test_normalize(text, want):
    assert normalize(text) == want == normalize(want)


def test_every_text_comes_back_from_its_ids(learned, pairs):
    texts = [*ODD, *pairs, *(pair[::-1] for pair in pairs[:100])]
    encoded = learned.encode(texts)
    assert encoded.ids.dtype == encoded.lengths.dtype == np.int32 and encoded.ids.min() >= len(SPECIALS)
    assert [learned.decode(np.array(ids, np.int32)) for ids in rows(encoded)] == [normalize(text) for text in texts]
    assert len(encoded) == len(texts) and encoded.lengths[texts.index('')] == 0


def test_ids_are_those_of_the_library(learned, pairs):
    library = tokenizers.Tokenizer.from_str(learned.text)
    library.encode_special_tokens = True                    # text is never a mark
    texts = [*ODD, *pairs]
    assert rows(learned.encode(texts)) == [found.ids for found in library.encode_batch(texts)]


def test_a_sentence_is_encoded_alike_alone_and_among_others(learned, pairs):
    together = rows(learned.encode([*ODD, *pairs[:300]]))
    assert [learned.encode([text]).ids.tolist() for text in [*ODD, *pairs[:300]]] == together
    assert len(learned.encode([])) == 0 and learned.encode(['', '']).lengths.tolist() == [0, 0]
    assert learned.encode([['You', 'sleep.']]).ids.tolist() == learned.encode(['You  sleep.']).ids.tolist()


def test_marks_are_the_first_four_ids_and_never_in_text(learned):
    assert [PAD, EOS, UNK, BOS] == [0, 1, 2, 3] and learned.words(range(4)) == list(SPECIALS)
    ids = learned.encode(['<eos>']).ids
    assert learned.decode(np.array([BOS, *ids, EOS, PAD], np.int32)) == '<eos>' and not set(ids.tolist()) & {0, 1, 2, 3}
    ids, starts = learned.encode(['a b', 'a']).ended(3)
    assert ids[starts[1] + 1:].tolist() == [EOS] and ids.dtype == np.int32


def test_tokens_are_shown_with_their_spaces_and_bytes(learned):
    encoded = learned.encode(['You sleep 你.'])
    shown = learned.words(encoded.ids)
    assert len(shown) == len(encoded.ids) and shown[0] == '▁You' and shown[-4:] == ['\\xe4', '\\xbd', '\\xa0', '.']
    with pytest.raises(IndexError):
        learned.words([len(learned)])


def test_the_first_tokens_of_a_sentence_are_shown_as_text(learned):
    words = learned.read(' You sleep\N{NO-BREAK SPACE}today. ')
    assert words == ['You', 'sleep', 'today.'] and learned.unknown(['Zzz']) == []


# ---- learning ----------------------------------------------------------------------------------------------------------

def test_a_vocabulary_has_the_wanted_size_or_says_when_it_ends(pairs):
    assert len(train(pairs, 300)) == 300 and len(train(pairs, SMALLEST)) == SMALLEST
    small = train(['ab', 'ab', 'abc'], 1000)
    assert len(small) == SMALLEST + 2 and len(train([], 300)) == SMALLEST       # ' a' or 'ab', and then ' ab'
    assert rows(small.encode(['ab', 'c'])) == [[SMALLEST + 1], rows(small.encode(['c']))[0]]
    with pytest.raises(UserError, match='^vocabulary of 259 subwords: expected 260 or more: 4 marks and 256 bytes$'):
        train(pairs, SMALLEST - 1)


def test_learning_is_the_same_with_any_number_of_threads_and_in_any_process(pairs, tmp_path):
    code = ('import hashlib\nfrom pyops.text import embedded\nfrom pyops.text.subwords import train\n'
            'text = train([text for pair in embedded.pairs()[:4000] for text in pair], 700).text\n'
            'print(hashlib.sha256(text.encode()).hexdigest())')
    digests = set()
    for number in ('1', '7'):
        varied = {'PYOPS_CACHE': '0', 'PYTHONHASHSEED': number, 'RAYON_NUM_THREADS': number}
        digests.add(subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True,
                                   env=os.environ | varied).stdout)
    assert len(digests) == 1


def test_what_was_learned_is_cached_and_not_for_other_text_or_sizes(pairs, tmp_path, monkeypatch):
    monkeypatch.setenv('PYOPS_CACHE', str(tmp_path))
    first = train(pairs, 400)
    with monkeypatch.context() as patch:
        patch.setattr(subwords, '_train', None)
        assert train(pairs, 400) == first
    assert len(train(pairs, 401)) == 401 and train(pairs[:-2], 400) != first


def test_words_of_a_large_text_are_cached(learned, pairs, tmp_path, monkeypatch):
    texts = [*pairs, *(f'{text} {n}' for n in range(30) for text in pairs[:600]), *ODD]
    want = rows(learned.encode(texts))
    monkeypatch.setenv('PYOPS_CACHE', str(tmp_path))
    monkeypatch.setattr(subwords, '_LARGE', 1000)
    for _ in range(2):
        assert rows(learned.encode(texts)) == want
    assert [path.name.split('-')[0] for path in tmp_path.iterdir()] == ['words']


def test_only_the_training_sentences_are_learned_from():
    corpus = embedded.corpus().first(600)
    source, target = of_corpus(corpus, dict(tokenizer='bpe', hold_out=0.1, vocabulary=400))
    training, _, _ = hold_out(corpus, 0.1)
    assert source is target == train([text for side in zip(*training.texts(), strict=True) for text in side], 400)
    assert source != train([text for side in zip(*corpus.texts(), strict=True) for text in side], 400)


def test_a_missing_library_is_an_error_only_when_subwords_are_learned(learned, pairs, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tokenizers', None)
    want = '^tokenizers, which learns subwords, is not installed: install it with: pip install tokenizers$'
    with pytest.raises(UserError, match=want):
        train(pairs, 400)
    assert Subwords(learned.text).encode(['Go.']).ids.tolist() == learned.encode(['Go.']).ids.tolist()


# ---- in a checkpoint ---------------------------------------------------------------------------------------------------

def test_tokenizers_are_restored_from_json(learned):
    kept = json.loads(json.dumps(states((learned, learned))))
    source, target = restore(kept)
    assert source is target and source == learned and kept['target'] is None
    words = Vocabulary([*SPECIALS, 'a']), Vocabulary([*SPECIALS, 'b'])
    assert restore(json.loads(json.dumps(states(words)))) == words
    assert states(words) == dict(source=[*SPECIALS, 'a'], target=[*SPECIALS, 'b'])      # as in older checkpoints
    assert learned != words[0] and learned != train(['a a'], 300)


@pytest.mark.parametrize('change', [
    lambda model: model.pop('merges'), lambda model: model['vocab'].pop('<eos>'), lambda model: model['vocab'].pop('a'),
    lambda model: model['merges'].append(['a', 'zzz']), lambda model: model['vocab'].update({'再': len(model['vocab'])})])
def test_another_tokenizer_is_not_restored(learned, change):
    content = json.loads(learned.text)
    change(content['model'])
    with pytest.raises(UserError, match='^subwords: not a byte-level BPE of tokenizers .*; train it from its corpus again$'):
        Subwords(json.dumps(content))
    with pytest.raises(UserError, match='^subwords: not a byte-level BPE'):
        Subwords('{}')


# ---- dropout -----------------------------------------------------------------------------------------------------------

def test_dropout_changes_the_tokens_and_not_the_text(learned, pairs):
    texts = [*ODD, *pairs[:500]]
    plain, dropped = rows(learned.encode(texts)), learned.encode_epoch(texts, 0.2, 5, 0)
    assert [learned.decode(np.array(ids, np.int32)) for ids in rows(dropped)] == [normalize(text) for text in texts]
    assert len(dropped.ids) > 1.05 * sum(map(len, plain)) and rows(learned.encode_epoch(texts, 0.0, 5, 0)) == plain
    assert len(learned.encode_epoch(['', ''], 0.2, 5, 0).ids) == len(learned.encode_epoch([], 0.2, 5, 0)) == 0


def test_dropout_depends_on_seed_epoch_and_stream_alone(learned, pairs):
    texts = pairs[:500]
    first = rows(learned.encode_epoch(texts, 0.1, 5, 3))
    assert rows(Subwords(learned.text).encode_epoch(texts, 0.1, 5, 3)) == first
    for other in ((0.1, 5, 4), (0.1, 6, 3), (0.1, 5, 3, 1), (0.2, 5, 3)):
        assert rows(learned.encode_epoch(texts, *other)) != first
    assert rows(learned.encode_epoch(texts, 0.1, 2**64 - 1, 2**64 - 1)) != first


def test_a_merge_is_skipped_with_the_given_probability():
    one = train(['ab ab'], 300)                             # ' a' or 'ab', and then ' ab'
    counts = [len(one.encode_epoch(['ab'], 0.3, 1, epoch).ids) for epoch in range(2000)]
    # One token: both merges at the first try, 0.7 * 0.7.  Two: the second merge was skipped.  Three: the first was.
    assert [round(counts.count(n) / 2000, 1) for n in (1, 2, 3)] == [0.5, 0.2, 0.3]


def with_dropout(word, ranks, p, rng):
    """Algorithm 1 of Provilkov et al. 2020 on the characters of a word; ranks: {pair: order of its merge}."""
    parts = list(word)
    while True:
        found = [(ranks[pair], i) for i, pair in enumerate(zip(parts, parts[1:], strict=False)) if pair in ranks]
        found = [merge for merge in found if rng.random() >= p]
        if not found:
            return parts
        _, i = min(found)
        parts[i:i + 2] = [parts[i] + parts[i + 1]]


def test_dropout_gives_as_many_tokens_as_the_published_algorithm(learned):
    words = sorted({word for pair in embedded.pairs()[:4000] for text in pair for word in text.split() if word.isascii()})
    merges = json.loads(learned.text)['model']['merges']
    ranks, rng = {tuple(pair): rank for rank, pair in enumerate(merges)}, np.random.default_rng(0)
    for p in (0.1, 0.5):
        want = [len(with_dropout(f'Ġ{word}', ranks, p, rng)) for word in words if word.isalpha() for _ in range(20)]
        got = learned.encode_epoch([word for word in words if word.isalpha() for _ in range(20)], p, 0, 0).lengths
        assert len(want) > 4000 and abs(np.mean(got) / np.mean(want) - 1) < 0.02


def test_occurrences_of_a_word_are_segmented_differently(learned):
    (once,) = {tuple(ids) for ids in rows(learned.encode(['sleeping'] * 500))}
    variants = {tuple(ids) for ids in rows(learned.encode_epoch(['sleeping'] * 500, 0.3, 0, 0))}
    assert once in variants and len(variants) > 5


# ---- the real corpus ---------------------------------------------------------------------------------------------------

def test_every_sentence_of_the_real_corpus_comes_back():
    path = locate.find('fra-eng', os.environ.get('PYOPS_DATA'))
    if path is None:
        pytest.skip('needs the fra-eng corpus: python -m pyops.data get fra-eng, or set PYOPS_DATA to its folder')
    whole = Corpus.load(path).raw()
    training, _, _ = hold_out(whole, 0.1)
    learned = train([*training.sources, *training.targets], 12_000)
    assert len(learned) == 12_000
    for side, most in ((whole.sources, 7.7), (whole.targets, 8.4)):
        encoded = learned.encode(side)
        assert len(encoded.ids) / len(side) < most          # tokens per sentence
        assert [learned.decode(np.array(ids, np.int32)) for ids in rows(encoded)] == list(map(normalize, side))
