"""Beam search: against a search in float64 that computes every prefix anew, and all sequences; batches of any size.

Runs with a tiny model in numpy and with both translators.
"""
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from places import ON_GPU, get, on_the_cpu, put
from translation import small_corpus, train_steps

from pyops.errors import UserError
from pyops.text import decoding
from pyops.text.decoding import REPEATS, BeamDecoder, Beams, Decoder, Search
from pyops.text.flags import LARGEST_PENALTY
from pyops.text.pairs import Ragged, Sequences
from pyops.text.translator import Translator
from pyops.text.vocabulary import BOS, EOS
from seq2seq.model import Config as Seq2SeqConfig
from seq2seq.model import Seq2Seq
from transformer.model import Config as TransformerConfig
from transformer.model import Transformer

# ---- the reference ---------------------------------------------------------------------------------------------------

def repeats(tokens):
    """Whether the tokens end in REPEATS copies of an n-gram."""
    return any(tokens[-n:] * REPEATS == tokens[-n * REPEATS:] for n in range(1, len(tokens) // REPEATS + 1))


def reference(log_probabilities, search, eos=EOS):
    """Search with log_probabilities(prefix) -> (V,), to the end.  Return [(tokens, score, is_cut)], the best first."""
    live, finished = [((), 0.0)], []
    for length in range(1, search.max_len + 1):
        candidates = [((*tokens, v), total + logp) for tokens, total in live
                      for v, logp in enumerate(log_probabilities(tokens))]
        candidates.sort(key=lambda candidate: -candidate[1])
        live = []
        for tokens, total in candidates[:search.beam - len(finished)]:
            is_cut = tokens[-1] != eos and repeats(tokens)
            if tokens[-1] == eos or is_cut or length == search.max_len:
                finished.append((tokens, total / length ** search.length_penalty, is_cut))
            else:
                live.append((tokens, total))
    return sorted(finished, key=lambda found: (found[2], -found[1]))[:search.nbest]


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def assert_same(found, want):
    assert [tuple(hypothesis.tokens) for hypothesis in found] == [tokens for tokens, _, _ in want]
    for hypothesis, (_, score, is_cut) in zip(found, want, strict=True):
        assert abs(hypothesis.score - score) <= 1e-5 * (1 + abs(score)) and hypothesis.is_cut == is_cut


# ---- a tiny recurrent model in numpy --------------------------------------------------------------------------------

class Tiny:
    """h = tanh(W h + embedding[word] + source embedding), logits = U h; in float64, and topk like LinearCrossEntropy."""

    free_rows = not ON_GPU

    def __init__(self, V, seed, D=6, gain=3.0):
        rng = np.random.default_rng(seed)
        self.config, self.output = SimpleNamespace(target_size=V), self
        self.embedding, self.source = rng.standard_normal((max(V, BOS + 1), D)), rng.standard_normal((50, D))
        self.W, self.U = rng.standard_normal((D, D)), gain * rng.standard_normal((V, D))
        self.steps = 0

    def start(self, source):
        return self.source[get(source.ids)]

    def next(self, word, state, parents=None, sources=None):
        self.steps += 1
        h = state if parents is None else state[get(parents)]
        h = np.tanh(h @ self.W + self.embedding[get(word)])
        return h, h

    def prepare(self):
        return None

    def topk(self, h, k):
        logits = h @ self.U.T
        logp = np.array([log_softmax(row) for row in logits]).reshape(logits.shape)
        index = np.argsort(-logits, axis=1, kind='stable')[:, :k].astype(np.int32)
        return put(index), put(np.take_along_axis(logp, index, 1).astype('f'))

    def predict(self, h, prepared):
        return put((h @ self.U.T).argmax(1).astype(np.int32))

    def log_probabilities(self, source):
        def of(prefix):
            h = self.source[source]
            for word in (BOS, *prefix):
                h = np.tanh(h @ self.W + self.embedding[word])
            return log_softmax(self.U @ h)
        return of


def sources(n):
    return Sequences.of(np.arange(n).reshape(-1, 1), 1)


@pytest.mark.parametrize('alpha', [0.0, 0.6, 1.0, 2.5])
@pytest.mark.parametrize('beam,nbest', [(1, 1), (2, 1), (3, 3), (5, 2), (8, 8)])
def test_beam_search_finds_what_a_search_without_states_finds(alpha, beam, nbest):
    model, search = Tiny(9, seed=beam), Search(7, beam, nbest, alpha)
    found = BeamDecoder(model, search)(sources(40))
    for b, hypotheses in enumerate(found):
        assert_same(hypotheses, reference(model.log_probabilities(b), search))
    assert len({tuple(hypotheses[0].tokens) for hypotheses in found}) > 10


def test_greedy_decoding_cuts_a_repetition_as_a_beam_of_1_does_and_computes_no_further_step():
    model, search = Tiny(9, seed=1), Search(40, 1, 1, 1.0)
    want = [reference(model.log_probabilities(b), search) for b in range(40)]
    cut = [b for b, ((_, _, is_cut),) in enumerate(want) if is_cut]
    assert 5 < len(cut) < 40
    greedy = Decoder(model, 40)(sources(40))
    for b, ((tokens, _, _),) in enumerate(want):
        assert greedy[:len(tokens), b].tolist() == list(tokens) and not greedy[len(tokens):, b].any()
    for b, (found,) in enumerate(BeamDecoder(model, search)(sources(40))):
        assert_same([found], want[b])
    model.steps = 0
    Decoder(model, 40)(Sequences.of([np.array([cut[0]])], 1))
    assert model.steps == len(want[cut[0]][0][0])


@pytest.mark.parametrize('alpha', [0.0, 0.6, 1.0])
def test_a_beam_as_wide_as_all_sequences_finds_the_best_of_all(alpha):
    """3 words and 4 tokens: 31 sequences."""
    model, search = Tiny(3, seed=1, gain=1.0), Search(4, 32, 32, alpha)
    found = BeamDecoder(model, search)(sources(20))
    for b, hypotheses in enumerate(found):
        logp, everything = model.log_probabilities(b), []
        for length in range(1, 5):
            for tokens in itertools.product(range(3), repeat=length):
                if EOS in tokens[:-1] or (length < 4 and tokens[-1] != EOS):
                    continue
                total = sum(logp(tokens[:i])[token] for i, token in enumerate(tokens))
                everything.append((tokens, total / length ** alpha, repeats(tokens) and tokens[-1] != EOS))
        assert len(everything) == 31
        assert_same(hypotheses, sorted(everything, key=lambda entry: (entry[2], -entry[1])))


def test_a_search_stops_when_nothing_better_can_follow():
    """The reference never stops early and finds the same; here the number of steps is smaller."""
    model, search = Tiny(9, seed=3, gain=8.0), Search(40, 4, 1, 0.6)
    for b in range(20):
        model.steps = 0
        (found,) = BeamDecoder(model, search)(Sequences.of([np.array([b])], 1))
        assert_same(found, reference(model.log_probabilities(b), search))
        if len(found[0].tokens) < 10:
            assert model.steps < 40
    beams = Beams(Search(30, 2, 1, 1.0), 1)
    beams.advance(np.array([[EOS, 5]]), np.log([[0.9, 0.1]]))        # -0.105, and at best -2.3 / 30
    assert beams.sentences == 1
    beams = Beams(Search(30, 2, 1, 0.6), 1)
    beams.advance(np.array([[EOS, 5]]), np.log([[0.9, 0.1]]))        # -0.105, and at best -2.3 / 7.7
    assert beams.sentences == 0 and beams.take_results()[0][1][0].tokens.tolist() == [EOS]


def test_a_repetition_ends_a_hypothesis_and_comes_after_all_others():
    def fixed(t):                                               # 5 and 6 alternate, or the end; the end is unlikely
        return np.array([[5 + t % 2, EOS]]), np.log([[0.99, 0.01]])
    beams = Beams(Search(50, 2, 2, 1.0), 1)
    for t in range(20):
        if not beams.sentences:
            break
        index, logp = fixed(t)
        W = beams.sums.shape[0]
        beams.advance(np.repeat(index, W, 0), np.repeat(logp, W, 0))
    (_, (first, second)), = beams.take_results()
    assert second.is_cut and second.tokens.tolist() == [5, 6] * REPEATS and beams.lengths.tolist() == [2 * REPEATS]
    assert not first.is_cut and first.tokens[-1] == EOS and first.score < second.score
    for tokens, is_cut in (([7] * 4, True), ([7] * 3, False), ([4, 5, 6] * 4, True), ([4, 5, 6] * 3 + [4, 5, 7], False)):
        assert repeats(tuple(tokens)) == is_cut
        beams = Beams(Search(50, 2, 1, 1.0), 1)
        for token in tokens:
            W = beams.sums.shape[0]
            beams.advance(np.repeat([[token, 8]], W, 0), np.repeat(np.log([[0.999, 0.001]]), W, 0))
        assert any(entry[0] for entry in beams.finished[0]) == is_cut


def test_equal_hypotheses_keep_the_order_of_their_parents_and_tokens():
    beams = Beams(Search(2, 3, 3, 0.0), 1)
    beams.advance(np.array([[4, 5, 6]]), np.log([[0.25] * 3]))
    assert beams.word.ravel().tolist() == [4, 5, 6]
    beams.advance(np.array([[4, 5, 6]] * 3), np.log([[0.25] * 3] * 3))
    assert [found.tokens.tolist() for found in beams.take_results()[0][1]] == [[4, 4], [4, 5], [4, 6]]


def test_nan_and_impossible_tokens_do_not_end_a_search():
    for value in (np.nan, -np.inf):
        beams = Beams(Search(3, 2, 2, 1.0), 2)
        logp = np.log(np.array([[0.5, 0.25], [0.5, 0.25]]))
        logp[0] = value
        for _ in range(3):
            W = beams.sums.shape[0]
            beams.advance(np.tile([[4, 5]], (2 * W, 1)), np.tile(logp, (W, 1)))
        (_, spoiled), (_, clean) = beams.take_results()
        assert len(spoiled) == 2 and spoiled[0].score == -np.inf and spoiled[0].tokens.tolist() == [4, 4, 4]
        assert clean[0].tokens.tolist() == [4, 4, 4] and abs(clean[0].score - np.log(0.5)) <= 1e-12


@pytest.mark.parametrize('settings,text', [
    (dict(beam=0), 'beam: expected 1 to 32, got 0'), (dict(beam=33), 'beam: expected 1 to 32, got 33'),
    (dict(beam=3, nbest=4), 'nbest: expected 1 to the beam, 3, got 4'),
    (dict(nbest=0), 'nbest: expected 1 to the beam, 5, got 0'),
    (dict(length_penalty=-0.1), 'length_penalty: expected a number from 0 to 100, got -0.1'),
    (dict(length_penalty=float('nan')), 'length_penalty: expected a number from 0 to 100, got nan'),
    (dict(length_penalty=101), 'length_penalty: expected a number from 0 to 100, got 101'),
    (dict(max_len=0), 'max_len: expected at least 1, got 0')])
def test_settings_out_of_range_are_refused_in_one_line(settings, text):
    with pytest.raises(UserError, match=f'^{text}$'):
        Search(**(dict(max_len=9) | settings))


def test_a_score_is_finite_with_the_largest_length_penalty_and_the_most_tokens():
    assert -1e-200 < Search(max_len=1000, length_penalty=LARGEST_PENALTY).score(-5.0, 1000) < 0


# ---- the translators ----------------------------------------------------------------------------------------------

def make(kind, pairs=512, steps=120):
    """Return a Translator whose model was trained for a short time, and the corpus.  On a GPU, which may be emulated, it has
    random weights instead."""
    corpus, vocabularies, encoded = small_corpus(pairs)
    sizes, D = tuple(map(len, vocabularies)), 8 if ON_GPU else 32
    if kind == 'seq2seq':
        model = Seq2Seq(Seq2SeqConfig(*sizes, embedding=D, hidden=D + 8, dropout=0.0), seed=1)
    else:
        model = Transformer(TransformerConfig(*sizes, d_model=D, d_ff=48, heads=4, layers=2, dropout=0.0,
                                              pre_norm=kind == 'pre-norm'), seed=1)
    if not ON_GPU:
        train_steps(model, encoded, steps, batch_size=32, lr=0.004)
    return Translator(model, *vocabularies), corpus


@pytest.fixture(scope='module', params=['seq2seq', 'transformer'] + ['pre-norm'] * (not ON_GPU))
def trained(request):
    return make(request.param)


def source_of(translator, corpus, rows):
    texts = list(corpus.sources)
    return Sequences.of(list(Ragged.of(translator.source_vocabulary.encode([texts[i] for i in rows]), 9)), 9)


def forward_log_probabilities(model, source, b):
    """Return log_probabilities(prefix) by a forward pass over the whole prefix, without caches."""
    offsets = get(source.rows.offsets)
    source = Sequences.of([get(source.ids)[offsets[b]:offsets[b + 1]]], 9)
    weight, bias = (get(model.params[f'output.{name}'].value) for name in ('weight', 'bias'))
    if isinstance(model, Seq2Seq):
        _, last, _ = model.encoder.forward(source.ids, rows=source.rows)
    else:
        memory, _ = model.encoder.forward(source)

    def of(prefix):
        target = Sequences.of([np.array([BOS, *prefix])], 10)
        h = (model.decoder.forward(target.ids, last[-1], last, rows=target.rows) if isinstance(model, Seq2Seq) else
             model.decoder.forward(target, memory, source.rows))[0]
        return log_softmax(get(h)[-1] @ weight.T + bias)
    return of


@pytest.mark.parametrize('beam,nbest,alpha', [(2, 1, 0.6), (4, 4, 1.0), (5, 1, 0.0)])
def test_a_translator_searches_as_the_reference_does_on_whole_prefixes(trained, beam, nbest, alpha):
    translator, corpus = trained
    search, n = Search(9, beam, nbest, alpha), 6
    source = source_of(translator, corpus, range(0, 60, 10))
    decode = BeamDecoder(translator.model, search)
    first = decode(source)
    for b in range(n):
        assert_same(first[b], reference(forward_log_probabilities(translator.model, source, b), search))
    for _ in range(2):                                          # recorded, replayed
        for one, other in zip(decode(source), first, strict=True):
            assert [(found.tokens.tolist(), found.score) for found in one] == [(f.tokens.tolist(), f.score) for f in other]


def test_beam_1_is_greedy_decoding(trained):
    translator, corpus = trained
    source = source_of(translator, corpus, range(0, 512, 100 if ON_GPU else 8))
    greedy = Decoder(translator.model, 9)(source)
    for b, (found,) in enumerate(BeamDecoder(translator.model, Search(9, beam=1))(source)):
        said = greedy[:, b]
        assert found.tokens.tolist() == said[:len(found.tokens)].tolist() and not said[len(found.tokens):].any()
    texts = [text for text, _ in corpus.texts()][:5 if ON_GPU else 50]
    scored, plain = (translator.translations(texts, beam=1, scores=scores) for scores in (True, False))
    assert [found.text for found, in scored] == [found.text for found, in plain] == translator.translate(texts, beam=1)
    assert all(found.score is None for found, in plain) and all(found.score < 0 for found, in scored)


def test_the_plans_of_the_latest_sizes_are_kept_up_to_a_number_of_tokens(trained, monkeypatch):
    translator, corpus = trained
    monkeypatch.setattr(decoding._PlansBySize, 'TOKENS', 24)
    monkeypatch.setattr(decoding._SizedSteps, 'LEAST', 100)     # no model uses its plan
    decode = BeamDecoder(translator.model, Search(9, 2))

    def sizes(rows):
        """Search for these sentences; return the sizes that have plans."""
        decode(source_of(translator, corpus, rows))
        return list(decode._plans._plans)

    small, other, large = [0], [0, 10], range(0, 60, 5)
    size_of = {len(rows): (len(rows), len(source_of(translator, corpus, rows).ids)) for rows in (small, other, large)}
    tokens = [size_of[n][1] for n in (1, 2, 12)]
    assert tokens[0] + tokens[1] <= 24 < tokens[2]
    assert sizes(small) == [] and sizes(small) == [size_of[1]]
    assert sizes(other) == [size_of[1]] and sizes(other) == [size_of[1], size_of[2]]
    assert sizes(small) == [size_of[2], size_of[1]]
    for _ in range(3):
        assert sizes(large) == [size_of[2], size_of[1]], 'larger than all plans may be'
    monkeypatch.setattr(decoding._PlansBySize, 'TOKENS', tokens[1])
    assert sizes(other) == [size_of[2]]


@on_the_cpu                     # a GPU has plans for each size
def test_several_sentences_have_no_plans_for_their_size_if_the_model_has_a_plan_for_any_size(trained):
    translator, corpus = trained
    beam, greedy = BeamDecoder(translator.model, Search(9, 2)), Decoder(translator.model, 9)
    source = source_of(translator, corpus, [0, 10])
    for _ in range(3):
        beam(source), greedy(source)
    assert bool(beam._plans._plans) == bool(greedy._plans._plans) == isinstance(translator.model, Seq2Seq)


def translations_agree(translator, texts, **how):
    """Translate in batches of several sizes and orders; require the same texts and the same bits of scores."""
    def translate(texts, batch_size):
        return [[(found.text, found.score) for found in some]
                for some in translator.translations(texts, batch_size=batch_size, **how)]
    whole = translate(texts, 64)
    rng = np.random.default_rng(0)
    for batch_size in (1, 7, 64):
        order = rng.permutation(len(texts))
        found = translate([texts[i] for i in order], batch_size)
        assert [found[i] for i in np.argsort(order)] == whole, batch_size
    return whole


def test_every_batch_of_a_gpu_has_the_same_number_of_sentences(trained, monkeypatch):
    """So that its products always have the same sizes."""
    translator, corpus = trained
    computed = []

    def stream(source, more):
        computed.append(source.rows.sentences)
        yield [(b, np.array([EOS], np.int32)) for b in range(source.rows.sentences)]
    monkeypatch.setattr(type(translator.model), 'decoding', lambda self, num_steps: SimpleNamespace(stream=stream))
    monkeypatch.setattr(Translator, '_workers', lambda *_: 1)
    fresh = Translator(translator.model, translator.source_vocabulary, translator.target_vocabulary)
    texts = [text for text, _ in corpus.texts()][:70]
    for batch_size, sizes in ((1, [1] * 70), (7, [7] * 10), (64, [6, 64])):
        computed.clear()
        assert fresh.translate(texts, beam=1, batch_size=batch_size) == [''] * 70
        assert set(computed) == {64} if ON_GPU else computed == sizes[::-1]


@on_the_cpu
@pytest.mark.parametrize('beam', [1, 2, 5])
def test_a_sentence_has_the_same_translation_and_score_in_any_batch(trained, beam):
    translator, corpus = trained
    texts = [text for text, _ in corpus.texts()][:90]
    found = translations_agree(translator, texts, beam=beam, nbest=min(beam, 2))
    assert len({text for (text, _), *_ in found}) > 20
    if beam == 1:
        translations_agree(translator, texts, beam=1, scores=False)


@on_the_cpu
@pytest.mark.slow
@pytest.mark.parametrize('kind', ['seq2seq', 'transformer'])
def test_2000_sentences_have_the_same_translations_in_any_batch(kind):
    translator, corpus = make(kind, 2000, steps=400)
    texts = [text for text, _ in corpus.texts()][:2000]
    assert len(texts) == 2000
    for how in (dict(beam=5), dict(beam=1), dict(beam=1, scores=False)):
        translations_agree(translator, texts, **how)


@on_the_cpu                     # a GPU computes all rows to the end
@pytest.mark.parametrize('sentences', [40, 12])
def test_rows_of_finished_hypotheses_are_not_computed_and_nothing_changes(trained, monkeypatch, sentences):
    translator, corpus = trained
    source = source_of(translator, corpus, range(0, 13 * sentences, 13))
    model, sizes, predict, topk = translator.model, [], translator.model.output.predict, translator.model.output.topk

    def found():
        sizes.clear()
        beam, greedy = BeamDecoder(model, Search(9, 3, 2)), Decoder(model, 9)
        return [([[(one.tokens.tolist(), one.score) for one in some] for some in beam(source)], greedy(source).tolist())
                for _ in range(3)]                  # the second time plans are recorded and left, the third time replayed
    monkeypatch.setattr(decoding._PlansBySize, 'LARGEST', 1000)
    monkeypatch.setattr(decoding._SizedSteps, 'LEAST', 100)     # no model uses its plan
    monkeypatch.setattr(model.output, 'predict', lambda h, prepared: sizes.append(len(h)) or predict(h, prepared))
    monkeypatch.setattr(model.output, 'topk', lambda h, k: sizes.append(len(h)) or topk(h, k))
    first, *others = found()
    assert len(set(sizes)) > 6 and any(size % sentences for size in sizes)
    monkeypatch.setattr(type(model), 'free_rows', False)
    assert found() == [first, *others] and others == [first, first]
    assert set(sizes) == {sentences, 3 * sentences}


@on_the_cpu                     # on a GPU a plan has a fixed number of rows
@pytest.mark.parametrize('beam', [1, 3])
def test_one_plan_runs_the_steps_of_all_searches_and_is_recorded_again_for_more_rows(trained, monkeypatch, beam):
    translator, corpus = trained
    model, search, recorded, learn = translator.model, Search(9, beam), [], decoding.SizedPlan.learn_sizes
    sources = [source_of(translator, corpus, np.arange(n) * 11 % 500) for n in (30, 2, 32, 120, 35)]
    monkeypatch.setattr(model, '_reserved', (None, (0, 0, 0)), raising=False)
    monkeypatch.setattr(decoding.SizedPlan, 'learn_sizes', lambda plan, *sizes: recorded.append(sizes) or learn(plan, *sizes))

    def found(decode, greedy):
        return [([[(one.tokens.tolist(), one.score) for one in some] for some in decode(source)], greedy(source).tolist())
                for source in sources]
    got = found(BeamDecoder(model, search), Decoder(model, 9))
    assert len(recorded) == (0 if isinstance(model, Seq2Seq) else 8), 'two plans of each decoder, and again for 120 sentences'
    monkeypatch.setattr(decoding._SizedSteps, 'LEAST', 100)     # it is not used
    assert found(BeamDecoder(model, search), Decoder(model, 9)) == got


@on_the_cpu
@pytest.mark.parametrize('part', [1, 3, 7])
def test_sentences_that_join_a_search_have_the_hypotheses_and_scores_of_a_search_without_them(trained, monkeypatch, part):
    """There is little room, so that places of keys are used again, and sources are moved."""
    translator, corpus = trained
    model, search, rows = translator.model, Search(9, 3, 2), np.arange(60) * 7 % 500
    monkeypatch.setattr(model, '_reserved', (None, (0, 0, 0)), raising=False)
    waiting, taken = list(rows[7:]), []

    def take(room, tokens):
        assert room >= part
        new = source_of(translator, corpus, waiting[:part]) if waiting else None
        if new is None or len(new.ids) > tokens:
            return None
        del waiting[:part]
        taken.append(new.rows.sentences)
        return new
    want = [BeamDecoder(model, search)(source_of(translator, corpus, [row])) for row in rows]
    greedy = [Decoder(model, 9)(source_of(translator, corpus, [row]))[:, 0] for row in rows]
    first, supply = source_of(translator, corpus, rows[:7]), decoding.Supply(12, 100, part, take)
    def ended(decoder):
        return dict(pair for pairs in decoder.stream(first, supply) for pair in pairs)
    found = ended(BeamDecoder(model, search))
    if isinstance(model, Seq2Seq):                  # it has no plan for any size
        assert [*found] == [*range(7)] and not taken
        return
    assert sum(taken) == 53 and [*found] != sorted(found)
    for b, (one,) in enumerate(want):
        other = found.pop(b)
        assert [(h.tokens.tolist(), h.score) for h in one] == [(h.tokens.tolist(), h.score) for h in other]
    waiting[:] = rows[7:]
    assert not found
    found = ended(Decoder(model, 9))
    assert len(found) == 60 and all(found[b].tolist() == tokens.tolist() for b, tokens in enumerate(greedy))


@on_the_cpu                     # a GPU copies
def test_keys_that_are_copied_give_the_hypotheses_of_keys_that_are_indexed(trained, monkeypatch):
    """Copies are for a GPU and for rounded attention."""
    translator, corpus = trained
    source, search = source_of(translator, corpus, range(0, 512, 13)), Search(9, 4, 2)
    indexed = BeamDecoder(translator.model, search)(source)
    monkeypatch.setattr('transformer.model.has_step', lambda attention: False)
    for one, other in zip(BeamDecoder(translator.model, search)(source), indexed, strict=True):
        assert [found.tokens.tolist() for found in one] == [found.tokens.tolist() for found in other]
        assert np.allclose([found.score for found in one], [found.score for found in other], rtol=1e-5)


def test_translate_returns_the_n_best_texts_in_the_order_of_the_sentences(trained):
    translator, corpus = trained
    texts = [text for text, _ in corpus.texts()][:20]
    found = translator.translations([texts[0], '', *texts[1:]], beam=4, nbest=3, length_penalty=1.0)
    assert found[1] == [('', 0.0, [], [], 0, (), None)] and len(found) == 21
    assert (translator.translate([texts[0], '', *texts[1:]], beam=4, nbest=3, length_penalty=1.0) ==
            [[one.text for one in some] for some in found])
    assert all(len(some) == 3 for some in found[:1] + found[2:])
    if not ON_GPU:                                              # random weights repeat tokens, and cut hypotheses come last
        assert all(a.score >= b.score for some in found for a, b in itertools.pairwise(some))
    assert found[0][0].text == translator.translate(texts[:1], beam=4, length_penalty=1.0)[0]
    assert translator.translate([]) == []
    short = translator.translate(texts, beam=3, max_len=2)
    assert all(len(text.split()) <= 3 for text in short)
    with pytest.raises(UserError, match='^max_len: expected 1 to 9, the length of sentences in training, got 10$'):
        translator.translate(texts, max_len=10)


def test_the_scores_are_the_log_probabilities_divided_by_the_length(trained):
    translator, corpus = trained
    source = source_of(translator, corpus, [3, 40])
    for alpha in (0.0, 0.6, 1.0):
        for b, (found,) in enumerate(BeamDecoder(translator.model, Search(9, 4, 1, alpha))(source)):
            logp = forward_log_probabilities(translator.model, source, b)
            total = sum(logp(tuple(found.tokens[:i]))[token] for i, token in enumerate(found.tokens))
            assert abs(found.score - total / len(found.tokens) ** alpha) <= 1e-5
    assert decoding.LENGTH_PENALTY >= 0
