"""Preprocessing, vocabularies, corpora, splits and scores, on small text and on the real corpus where it lies."""
import builtins
import bz2
import gzip
import io
import lzma
import os
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pyops.data import locate
from pyops.errors import UserError
from pyops.text import corpus as corpus_module
from pyops.text import embedded
from pyops.text.corpus import Corpus, tokenized
from pyops.text.decoding import greedy
from pyops.text.pairs import Ragged, Sequences
from pyops.text.preprocess import plain_quotes, preprocess, tokenize
from pyops.text.score import bleu, exact_match
from pyops.text.sentences import Sentences
from pyops.text.split import hold_out, references
from pyops.text.training import cut_line
from pyops.text.vocabulary import BOS, EOS, PAD, SPECIALS, UNK, Vocabulary

# ---- preprocess ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('text, want', [
    ('Go.', 'go .'),
    ('Cours\u202f!', 'cours !'),
    ('Ça\xa0va\xa0?', 'ça va ?'),
    ('Well, yes...', 'well , yes . . .'),
    ('No ! Not , so .', 'no ! not , so .'),
    ("J'ai 3,5 €; c'est tout:", "j'ai 3 ,5 €; c'est tout:"),
    ('A.\tB!\nC?', 'a .\tb !\nc ?'),
])
def test_preprocess(text, want):
    assert preprocess(text) == want


def test_plain_quotes():
    assert plain_quotes('‘can’t’ “you” «je» ‚a‘ „b“ ʼ ´ – …') == '\'can\'t\' "you" "je" \'a\' "b" \' \' – …'
    text = ''.join(map(chr, range(128)))
    assert plain_quotes(text) == text


def test_tokenize_splits_on_any_white_space():
    assert tokenize(' Hi,\tTom !\r\n\u2009Go.') == ['hi', ',', 'tom', '!', 'go', '.']
    assert tokenize(' \n') == []


# ---- Vocabulary ------------------------------------------------------------------------------------------------------

def test_vocabulary_orders_by_count_then_by_first_appearance():
    vocabulary = Vocabulary.build([['b', 'a', 'c'], ['c', 'a', 'b', 'c'], ['a', 'b', 'd', 'd']], min_count=3)
    assert vocabulary.tokens == [*SPECIALS, 'b', 'a', 'c']
    assert len(vocabulary) == 7
    assert Vocabulary.build([['x', 'x', 'y']], min_count=2).tokens == [*SPECIALS, 'x']


def test_vocabulary_takes_joined_sentences_too():
    assert Vocabulary.build(['a b', 'b'], 1) == Vocabulary.build([['a', 'b'], ['b']], 1)


def test_vocabulary_ids_words_and_unknown():
    vocabulary = Vocabulary([*SPECIALS, 'go', '.'])
    assert (PAD, EOS, UNK, BOS) == (0, 1, 2, 3)
    assert vocabulary.ids(['go', 'home', '.']) == [4, UNK, 5]
    assert vocabulary.words(np.array([BOS, 4, 5, EOS, PAD, UNK])) == ['<bos>', 'go', '.', '<eos>', '<pad>', '<unk>']
    assert vocabulary.unknown(['go', 'home', 'now', '.']) == ['home', 'now']
    with pytest.raises(IndexError):
        vocabulary.words([6])
    with pytest.raises(IndexError):
        vocabulary.words([-1])


def test_known_forms_differ_in_quotes_alone():
    vocabulary = Vocabulary([*SPECIALS, "can't", 'c’est', "c'est", 'j’ai', 'you', '."', "'", 'dogs', 'can’t'])
    same = [*SPECIALS, "can't", 'c’est', "c'est", 'j’ai', 'you', '."', "'", 'cat', '"you', "dogs'", '"', '“']
    assert [vocabulary.known_form(token) for token in same] == same
    forms = {'can’t': "can't", 'canʼt': "can't", 'cʼest': 'c’est', "j'ai": 'j’ai', '“you': 'you', '«you»': 'you', '.”': '."',
             '‘': "'", 'dogs’': 'dogs', '“can’t': "can't", '“cat”': '“cat”', '““': '““'}
    assert {token: vocabulary.known_form(token) for token in forms} == forms


def test_text_never_becomes_a_control_token():
    vocabulary = Vocabulary.build([['<pad>', '<eos>', 'a']] * 3)
    assert vocabulary.tokens == [*SPECIALS, 'a']
    assert vocabulary.ids(['<eos>', '<pad>', 'a']) == [UNK, UNK, 4]
    assert vocabulary.unknown(['<eos>']) == ['<eos>']


def test_vocabulary_is_restored_from_its_tokens():
    vocabulary = Vocabulary.build([['a', 'b', 'a']], 1)
    assert Vocabulary(vocabulary.tokens) == vocabulary
    assert vocabulary != Vocabulary([*SPECIALS, 'b', 'a'])
    assert vocabulary != vocabulary.tokens


@pytest.mark.parametrize('tokens, complaint', [
    ([], 'got nothing'),
    (['a', 'b'], 'got a b'),
    (['<eos>', '<pad>', '<unk>', '<bos>', 'a'], 'expected it to start with <pad> <eos> <unk> <bos>'),
    ([*SPECIALS, 'a', 'b', 'a'], "got 'a' 2 times"),
])
def test_vocabulary_rejects_other_lists(tokens, complaint):
    with pytest.raises(UserError, match=complaint):
        Vocabulary(tokens)


# ---- Corpus ----------------------------------------------------------------------------------------------------------

TEXT = 'Go.\tVa !\nGo.\tMarche.\r\n\nI try.\tJ’essaye\u202f!\tCC-BY 2.0\n'


def write_zip(path, members):
    with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_corpus_loads_text(tmp_path):
    path = tmp_path / 'pairs.txt'
    path.write_bytes(TEXT.encode())
    corpus = Corpus.load(path)
    assert corpus.name == str(path)
    assert len(corpus) == 3
    assert corpus.sources == ['go .', 'go .', 'i try .']
    assert corpus.targets == ['va !', 'marche .', 'j’essaye !']


def test_corpus_loads_the_text_inside_a_zip(tmp_path):
    path = write_zip(tmp_path / 'fra-eng.zip', {
        'fra-eng/': '', 'fra-eng/_about.txt': 'about', '__MACOSX/fra-eng/._fra.txt': 'x', '__MACOSX/fra-eng/a.txt': 'x',
        'fra-eng/fra.txt': TEXT})
    assert Corpus.load(str(path)).targets == ['va !', 'marche .', 'j’essaye !']


def test_a_zip_with_several_texts_is_refused_by_their_names(tmp_path):
    members = {'_about.txt': 'x', 'a.txt': TEXT, 'deep/b.txt': TEXT}
    with pytest.raises(UserError, match=r'two.zip: holds 2 .txt files, a.txt, deep/b.txt; unpack it and give one of them$'):
        Corpus.load(write_zip(tmp_path / 'two.zip', members))
    with pytest.raises(UserError, match=r'holds 7 .txt files, 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 2 more; '):
        Corpus.load(write_zip(tmp_path / 'many.zip', {f'{n}.txt': TEXT for n in range(7)}))


@pytest.mark.parametrize('name, compress', [('gzip', gzip.compress), ('bz2', bz2.compress), ('xz', lzma.compress)])
def test_corpus_loads_compressed_text_by_its_first_bytes(tmp_path, name, compress):
    path, packed = tmp_path / 'pairs.txt', compress(TEXT.encode())
    path.write_bytes(packed)
    assert Corpus.load(path).targets == ['va !', 'marche .', 'j’essaye !']
    for damaged in (packed[:len(packed) // 2], packed[:-9], packed[:len(packed) // 2] + b'x' + packed[len(packed) // 2 + 1:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf'pairs.txt: truncated or damaged {name} file \(.*\); get the file again$'):
            Corpus.load(path)
    path.write_bytes(compress(b'Go.'))
    with pytest.raises(UserError, match=r'pairs.txt: line 1: no tab'):
        Corpus.load(path)


def test_corpus_names_an_archive_that_it_cannot_read(tmp_path):
    path, stream = tmp_path / 'pairs.tar.gz', io.BytesIO()
    (tmp_path / 'pairs.txt').write_text(TEXT)
    with tarfile.open(fileobj=stream, mode='w:gz') as archive:
        archive.add(tmp_path / 'pairs.txt', 'pairs.txt')
    for content, kind in ((stream.getvalue(), 'tar'), (gzip.decompress(stream.getvalue()), 'tar'),
                          (b'\x28\xb5\x2f\xfd and so on', 'zstd')):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f'holds a {kind} archive, which cannot be read; unpack it and give the text$'):
            Corpus.load(path)


def test_corpus_passes_over_a_byte_order_mark_and_keeps_exotic_line_ends_inside_a_line(tmp_path):
    path = tmp_path / 'pairs.txt'
    path.write_bytes('\ufeffGo\u2028now.\tVa\x85vite.'.encode())
    corpus = Corpus.load(path)
    assert (corpus.sources, corpus.targets) == (['go now .'], ['va vite .'])


def test_corpus_first():
    corpus = Corpus('x', ['a', 'b', 'c'], ['A', 'B', 'C'])
    assert corpus.first(2).targets == ['A', 'B']
    assert len(corpus.first(9)) == 3
    with pytest.raises(UserError, match='got 0'):
        corpus.first(0)


def test_corpus_wants_as_many_targets_as_sources():
    with pytest.raises(ValueError, match='1 sources and 0 targets'):
        Corpus('x', ['a'], [])


@pytest.mark.parametrize('content, complaint', [
    (b'', 'no sentence pairs'),
    (b'\n \n', 'no sentence pairs'),
    (b'Go.\tVa !\n\nGo on.\n', r'line 3: .*no tab'),
    (b'Go.\tVa !\nGo.\t \n', r'line 2: an empty sentence'),
    (b'\tVa !\n', r'line 1: an empty sentence'),
    (b'Go.\tVa !\nNo.\t\xc7a non.\n', r'line 2: not UTF-8 text, byte 0xc7 at offset 13'),
    (b'a\tb\n' + b'a\tb\tc\td\n' * 3 + b'a\tb\tc\n\n' + b'a\tb\t\t\n' * 4,
     'more than three columns in line 2, 3, 4, 7, 8 and 2 more; '),
])
def test_corpus_names_what_is_wrong_in_a_text(tmp_path, content, complaint):
    path = tmp_path / 'pairs.txt'
    path.write_bytes(content)
    with pytest.raises(UserError, match=complaint) as caught:
        Corpus.load(path)
    assert str(path) in str(caught.value)


def test_corpus_names_what_is_wrong_with_a_file(tmp_path):
    with pytest.raises(UserError, match=r'nothing.txt: no such file'):
        Corpus.load(tmp_path / 'nothing.txt')
    with pytest.raises(UserError, match='no such file'):
        Corpus.load(tmp_path / 'nothing.zip')
    with pytest.raises(UserError, match='cannot be read'):
        Corpus.load(tmp_path)
    (tmp_path / 'broken.zip').write_bytes(b'PK\x03\x04 and so on')
    with pytest.raises(UserError, match=r'broken.zip: truncated or damaged zip file'):
        Corpus.load(tmp_path / 'broken.zip')
    with pytest.raises(UserError, match=r'other.zip: holds no .txt file of sentence pairs, only 2 other files'):
        Corpus.load(write_zip(tmp_path / 'other.zip', {'_about.txt': 'x', 'a.csv': 'x'}))
    whole = write_zip(tmp_path / 'spoiled.zip', {'fra.txt': TEXT * 50}).read_bytes()
    (tmp_path / 'spoiled.zip').write_bytes(whole[:60] + bytes(8) + whole[68:])
    with pytest.raises(UserError, match=r'spoiled.zip: truncated or damaged zip file'):
        Corpus.load(tmp_path / 'spoiled.zip')


# ---- encode ----------------------------------------------------------------------------------------------------------

def test_encode_cuts_sentences_and_ends_shorter_ones():
    vocabulary = Vocabulary([*SPECIALS, 'a', 'b'])
    got = Ragged.of(vocabulary.encode(['a', 'a b', 'a b a', 'a b a b', 'a x b a b']), 4)
    assert got.ids.dtype == np.int32 and got.lengths.tolist() == [2, 3, 4, 4, 4]
    assert [ids.tolist() for ids in got] == [[4, EOS], [4, 5, EOS], [4, 5, 4, EOS], [4, 5, 4, 5], [4, UNK, 5, 4]]
    assert got.padded(4).tolist() == [[4, EOS, PAD, PAD], [4, 5, EOS, PAD], [4, 5, 4, EOS], [4, 5, 4, 5], [4, UNK, 5, 4]]
    assert [ids.tolist() for ids in vocabulary.encode([['a', 'b']]).ended(3)] == [[4, 5, EOS], [0, 3]]
    assert [ids.tolist() for ids in vocabulary.encode([]).ended(3)] == [[], [0]]
    with pytest.raises(UserError, match='num_steps'):
        vocabulary.encode(['a']).ended(0)


# ---- hold_out and references -----------------------------------------------------------------------------------------

def numbered(count, references=2):
    """A corpus of `count` sources with `references` targets each; the targets of one source are far apart."""
    return Corpus('numbers', [f'source {n}' for _ in range(references) for n in range(count)],
                  [f'target {n} {k}' for k in range(references) for n in range(count)])


def test_hold_out_separates_sources():
    corpus = numbered(2000)
    parts = hold_out(corpus, 0.2)
    sources = [set(part.sources) for part in parts]
    assert sum(map(len, sources)) == len(set.union(*sources)) == 2000
    assert sorted(pair for part in parts for pair in zip(part.sources, part.targets, strict=True)) == sorted(
        zip(corpus.sources, corpus.targets, strict=True))
    for part, want in zip(parts, (1600, 200, 200), strict=True):
        assert abs(len(set(part.sources)) - want) < 60      # 4 sigma of a fair draw
        assert len(part) == 2 * len(set(part.sources))      # no reference is torn from its source


def test_hold_out_depends_on_the_text_alone():
    corpus = numbered(1000)
    backwards = Corpus('other', corpus.sources[::-1], corpus.targets[::-1])
    half = Corpus('half', corpus.sources[:500], corpus.targets[:500])
    for part, mirrored, halved in zip(hold_out(corpus, 0.3), hold_out(backwards, 0.3), hold_out(half, 0.3),
                                      strict=True):
        assert set(part.sources) == set(mirrored.sources)
        assert set(halved.sources) == set(part.sources) & set(half.sources)
    assert set(hold_out(corpus, 0.1)[2].sources) < set(hold_out(corpus, 0.3)[2].sources)


def test_hold_out_nothing():
    train, validation, test = hold_out(numbered(3), 0)
    assert (len(train), len(validation), len(test)) == (6, 0, 0)


@pytest.mark.parametrize('fraction', [-0.1, 0.51, float('nan')])
def test_hold_out_rejects_a_fraction(fraction):
    with pytest.raises(UserError, match='held-out fraction .*: out of range; give 0 to 0.5'):
        hold_out(numbered(10), fraction)


def test_hold_out_rejects_a_part_without_sentences():
    with pytest.raises(UserError, match='held-out fraction 0.001: of the 10 distinct sources'):
        hold_out(numbered(10), 0.001)


def test_references():
    corpus = Corpus('x', ['a', 'b', 'a', 'a'], ['A2', 'B', 'A1', 'A2'])
    assert references(corpus) == {'a': ['A2', 'A1'], 'b': ['B']}


# ---- scores ----------------------------------------------------------------------------------------------------------

def test_exact_match():
    assert exact_match(['a b', 'c', 'd'], [['x', 'a b'], ['c d'], ['d']]) == pytest.approx(2 / 3)
    with pytest.raises(UserError, match='^no sentences to score; hold some out of training'):
        exact_match([], [])
    with pytest.raises(ValueError, match='2 hypotheses and 1 lists'):
        exact_match(['a', 'b'], [['a']])
    with pytest.raises(ValueError, match='no reference'):
        exact_match(['a'], [[]])


def test_bleu():
    pytest.importorskip('sacrebleu', reason="needs sacrebleu: pip install sacrebleu")
    sentence, other = 'le chat noir dort ici .', 'je ne sais pas quoi faire'
    assert bleu([sentence, other], [['non', sentence], [other]]) == pytest.approx(100)
    assert bleu([sentence], [[other]]) < 1
    # One token of six differs, the last: 5/6 of the tokens, 4/5 of the pairs, 3/4, 2/3 of the fours are right.
    want = 100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25
    assert bleu(['le chat noir dort ici !'], [[sentence]]) == pytest.approx(want)


def test_bleu_names_the_extra_that_is_missing(monkeypatch):
    real = builtins.__import__

    def without_sacrebleu(name, *arguments, **more):
        if name == 'sacrebleu':
            raise ImportError(name)
        return real(name, *arguments, **more)

    monkeypatch.setattr(builtins, '__import__', without_sacrebleu)
    with pytest.raises(UserError, match=r"sacrebleu is not installed: install it with: pip install sacrebleu"):
        bleu(['a'], [['a']])


# ---- the same as arrays, and kept ------------------------------------------------------------------------------------

# tokens of other spaces, specials as text, a letter whose lower case is two, and counts that are equal
ODD = [('b a', 'x'), ('a\u2028b <eos>', 'y x'), ('İ <pad> a', 'y . !'), ('c c c c c c c c c c', 'z'), ('b a', 'x y')]


def as_lists(corpus):
    return Corpus(corpus.name, list(corpus.sources), list(corpus.targets))


def assert_same(corpus, listed):
    """In all that programs do with a corpus."""
    for n in (1, 2, 3, 1500, None):
        one, other = corpus.first(n), listed.first(n)
        assert one.sources == other.sources and one.targets == other.targets
        assert one.sources[-1] == other.sources[-1] and one.sources[::2] == other.sources[::2]
        for min_count in (1, 2, 3):
            vocabularies = one.vocabularies(min_count)
            assert vocabularies == other.vocabularies(min_count)
            for side in ('sources', 'targets'):
                for num_steps in (1, 4, 9, 12):
                    got, want = (vocabularies[side == 'targets'].encode(getattr(c, side)) for c in (one, other))
                    got, want = (Ragged.of(encoded, num_steps).padded(num_steps) for encoded in (got, want))
                    assert got.dtype == want.dtype and got.shape == want.shape and (got == want).all()
    for fraction in (0, 0.5):
        for part, wanted in zip(hold_out(corpus, fraction), hold_out(listed, fraction), strict=True):
            assert part.sources == wanted.sources and part.targets == wanted.targets
            assert part.vocabularies(1) == wanted.vocabularies(1)
        assert references(part) == references(wanted)


def test_a_corpus_as_arrays_is_the_same():
    pairs = ODD * 30 + [(f'{n} {n % 7} {n % 3}', f'{n % 11}') for n in range(2000)]
    assert_same(Corpus('x', *map(Sentences.of, tokenized(pairs))), Corpus('x', *tokenized(pairs)))


def test_sentences():
    sentences = Sentences.of(['a b', [], ['b', 'c'], 'a'])
    assert list(sentences) == ['a b', '', 'b c', 'a'] == sentences and len(sentences) == 4
    assert sentences != ['a b'] and sentences != ['a b', '', 'b c', 'b'] and sentences[1:3] == ['', 'b c']
    assert sentences[-1] == 'a' and sentences.take(np.array([3, 0])) == ['a', 'a b']
    assert list(sentences[2:].counts().items()) == [('b', 1), ('c', 1), ('a', 1)]
    assert list(sentences.take(np.array([3, 2])).counts().items()) == [('a', 1), ('b', 1), ('c', 1)]
    assert list(sentences[::-1]) == ['a', 'b c', '', 'a b'] and sentences[:0].counts() == {}
    with pytest.raises(IndexError):
        sentences[4]
    assert list(Sentences.of(str(n) for n in range(70_000))[69_998:]) == ['69998', '69999']


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A file that is large enough to be kept, and a folder that takes it."""
    monkeypatch.setenv('PYOPS_CACHE', str(tmp_path / 'cache'))
    path = tmp_path / 'pairs.txt'
    path.write_text(''.join(f'{a}\t{b}\n' for a, b in ODD) + ''.join(f'Go {n} {n % 7}.\tVa {n} !\n' for n in range(5000)))
    return path


def test_what_is_kept_of_a_corpus_is_the_same(large, monkeypatch):
    parsed = Corpus.load(large)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, 'parse', None)                # whoever calls it fails
        kept = Corpus.load(large)
    monkeypatch.setenv('PYOPS_CACHE', '0')
    without = as_lists(Corpus.load(large))
    assert without.sources[:2] == ['b a', 'a b <eos>'] and parsed.sources == without.sources
    assert_same(kept, without)


def test_another_corpus_is_read_anew(large, monkeypatch):
    first = Corpus.load(large)
    text = large.read_text()
    large.write_text(text.replace('Va 7 !', 'Va 8 !'))
    assert Corpus.load(large).targets[12] == 'va 8 !' != first.targets[12]
    large.write_text(text.replace('Va 7 !', ''))
    with pytest.raises(UserError, match='line 13: an empty sentence'):
        Corpus.load(large)
    archive = write_zip(large.with_name('pairs.zip'), {'pairs.txt': text})
    with zipfile.ZipFile(archive, 'a', zipfile.ZIP_STORED) as file:
        file.writestr('more', os.urandom(1 << 17))
    assert Corpus.load(archive).targets == Corpus.load(archive).targets == first.targets
    assert Corpus.load(archive.rename(large.with_name('zip.txt'))).targets == first.targets


def test_other_code_makes_a_corpus_anew(large, monkeypatch, tmp_path):
    Corpus.load(large)
    for module in ('corpus', 'preprocess', 'sentences'):
        with monkeypatch.context() as patch:
            module = sys.modules[f'pyops.text.{module}']
            changed = tmp_path / 'changed.py'
            changed.write_text(Path(module.__file__).read_text() + '#')
            patch.setattr(module, '__file__', str(changed))
            patch.setattr(corpus_module, 'parse', lambda raw, name: (['parsed'], ['anew']))
            assert Corpus.load(large).sources == ['parsed']


def test_a_corpus_whose_cache_was_harmed_is_read_anew(large):
    want = as_lists(Corpus.load(large))
    (file,) = (large.parent / 'cache').iterdir()
    whole = file.read_bytes()
    for harmed in (b'', whole[:100], whole[:-1], whole[:5000] + b'x' + whole[5001:], whole + b'x'):
        file.write_bytes(harmed)
        assert Corpus.load(large).sources == want.sources
        assert file.read_bytes() == whole, 'it was not written again'


def test_the_embedded_corpus_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv('PYOPS_CACHE', '0')
    without = embedded.corpus()
    monkeypatch.setenv('PYOPS_CACHE', str(tmp_path))
    assert embedded.corpus().sources == without.sources
    monkeypatch.setattr(embedded, '_collect', None)
    assert embedded.corpus().sources == without.sources and embedded.corpus().targets == without.targets


# ---- the real corpus -------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def real():
    path = locate.find('fra-eng', os.environ.get('PYOPS_DATA'))
    if path is None:
        pytest.skip('needs the fra-eng corpus: python -m pyops.data get fra-eng, or set PYOPS_DATA to its folder')
    return Corpus.load(path)


def test_real_corpus_has_its_published_sizes(real):
    source, target = real.vocabularies()
    assert len(real) == 167_130
    assert (len(source), len(target)) == (7939, 13_387)
    valid = [Ragged.of(vocabulary.encode(sentences), 9).lengths.mean()
             for sentences, vocabulary in ((real.sources, source), (real.targets, target))]
    assert [round(float(mean), 2) for mean in valid] == [7.56, 7.66]
    assert (real.sources[0], real.targets[0]) == ('go .', 'va !')


def test_the_real_vocabularies_read_plain_text_as_it_is(real):
    """Of all tokens of the corpus, only those with typographic quotes have another form than themselves."""
    for side, vocabulary in zip((real.sources, real.targets), real.vocabularies(), strict=True):
        changed = [token for token in side.tokens if vocabulary.known_form(token) != token]
        assert changed and all(plain_quotes(token) != token for token in changed)


def test_real_corpus_cut_to_nine(real):
    source, target = real.vocabularies()
    line = cut_line(source.encode(real.sources), target.encode(real.targets), 9)
    assert line == ('cut to --num-steps 9 tokens, end mark included : 40600 sources, 51304 targets, '
                    '58834 of 167130 pairs (35.2%); a larger --num-steps cuts fewer')


def test_real_corpus_has_many_references_a_source(real):
    # 116,830 distinct sentences as written; three pairs of them differ in capitals or spaces only.
    found = references(real)
    assert len(found) == 116_827
    assert max(map(len, found.values())) == 32


def test_real_corpus_as_lists_is_the_same(real):
    listed = as_lists(real)
    vocabularies = real.vocabularies()
    assert vocabularies == listed.vocabularies()
    for side, vocabulary in zip(('sources', 'targets'), vocabularies, strict=True):
        for one, other in zip(*(vocabulary.encode(getattr(c, side)).ended(9) for c in (real, listed)), strict=True):
            assert (one == other).all()


def test_real_corpus_splits_by_source(real):
    parts = [set(part.sources) for part in hold_out(real, 0.1)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 116_827
    assert [round(len(part) / 116_827, 2) for part in parts] == [0.9, 0.05, 0.05]


# ---- decoding --------------------------------------------------------------------------------------------------------

class Scripted:
    """A model that says the columns of `script`, (T, B), whatever the source; its state is how many it has said."""
    free_rows = False

    def __init__(self, script):
        self.script, self.heard, self.output = np.array(script), [], self

    def start(self, source):
        self.source = source
        return 0

    def next(self, word, state, parents=None, sources=None):
        assert parents is sources is None and word.dtype == np.int32
        self.heard.append(word.tolist())
        return self.script[state].astype(np.float32)[:, None], state + 1

    def prepare(self):
        return 'prepared'

    def predict(self, h, prepared):
        assert prepared == 'prepared'
        return h[:, 0].astype(np.int32)


def sentences_of(B):
    return Sequences.of([np.full(5, 4)] * B, 5)


def test_greedy_decoding_hears_its_own_words_and_pads_what_follows_the_end():
    model, source = Scripted([[7, 5, EOS], [6, EOS, 9], [EOS, 8, 9], [4, 4, 4]]), sentences_of(3)
    said = greedy(model, source, 9)
    assert said.dtype == np.int32 and said.tolist() == [[7, 5, EOS], [6, EOS, PAD], [EOS, PAD, PAD]]
    assert model.source is source and model.heard == [[BOS] * 3, [7, 5, EOS], [6, EOS, 9]]      # and then it stops


def test_greedy_decoding_stops_after_num_steps():
    assert greedy(Scripted([[7, EOS], [6, 6], [5, 5]]), sentences_of(2), 2).tolist() == [[7, EOS], [6, PAD]]
