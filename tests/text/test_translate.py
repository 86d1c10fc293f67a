"""From raw text to raw text: pyops.load, translate, translations and score."""
import importlib
import itertools
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from places import ON_GPU, get, on_the_cpu
from translation import TINY_SEQ2SEQ, TINY_TRANSFORMER, small_corpus, train_steps

import pyops
from pyops import backend, checkpoint, ops, plan
from pyops.errors import UserError
from pyops.init import xavier_normal, zeros
from pyops.ops import Attention
from pyops.params import Parameters, Spec
from pyops.text import decoding
from pyops.text import translator as module
from pyops.text.pairs import Sequences
from pyops.text.translator import Translator
from pyops.text.vocabulary import BOS, EOS
from seq2seq.model import Config as Seq2SeqConfig
from seq2seq.model import Seq2Seq
from transformer.model import Config as TransformerConfig
from transformer.model import Transformer

KINDS = {'seq2seq': (Seq2Seq, Seq2SeqConfig, {}), 'seq2seq with attention': (Seq2Seq, Seq2SeqConfig, dict(attention=2)),
         'transformer': (Transformer, TransformerConfig, dict(heads=4, layers=2)),
         'pre-norm': (Transformer, TransformerConfig, dict(heads=2, layers=1, pre_norm=True))}


@pytest.fixture(scope='module', params=KINDS)
def trained(request):
    """A Translator of a model that was trained for a short time, on a GPU of random weights; and texts."""
    Model, Config, settings = KINDS[request.param]
    corpus, vocabularies, encoded = small_corpus(512)
    D = 8 if ON_GPU else 32
    sizes = dict(embedding=D, hidden=D) if Model is Seq2Seq else dict(d_model=D, d_ff=48)
    model = Model(Config(*map(len, vocabularies), dropout=0.0, **sizes, **settings), seed=1)
    if not ON_GPU:
        train_steps(model, encoded, 120, batch_size=32, lr=0.004)
    return Translator(model, *vocabularies), [text for text, _ in corpus.texts()][:12 if ON_GPU else 60]


# ---- texts -----------------------------------------------------------------------------------------------------------

@pytest.fixture
def one_thread():
    before = backend.threads()
    backend.set_threads(1)
    yield
    backend.set_threads(before)


@pytest.mark.parametrize('how', [{}, {'beam': 3, 'nbest': 2, 'alignments': True}, {'beam': 1, 'max_len': 4}])
def test_texts_that_arrive_while_others_are_translated_have_the_same_translations(trained, one_thread, how):
    translator, texts = trained
    texts = ['', *texts[:20], ' ', texts[0], *texts[20:30], texts[5] * 40]
    want = translator.translations(texts, **how)
    settings = {name: value for name, value in how.items() if name != 'alignments'}
    rng, rest, asked = np.random.default_rng(0), list(texts), []

    def arrived(most):
        asked.append(most)
        some = rest[:rng.integers(0 if len(asked) > 1 else 1, 4)][:most]            # none now and then
        del rest[:len(some)]
        return some
    done = []
    while rest:                                 # it ends if none arrives and none is left
        asked.clear()
        first = len(texts) - len(rest)
        done += [(first + n, found) for some in translator.arriving(arrived, translator.search(**settings), 6,
                                                                     how.get('alignments', False)) for n, found in some]
    assert sorted(n for n, _ in done) == [*range(len(texts))] and max(asked) <= 6
    assert ON_GPU or translator.joins == isinstance(translator.model, Transformer)
    assert how or not translator.joins or [n for n, _ in done] != [*range(len(texts))]
    for n, found in done:
        for one, other in zip(found, want[n], strict=True):
            assert one._replace(alignment=None, score=0) == other._replace(alignment=None, score=0)
            assert one.score == other.score if not ON_GPU else abs(one.score - other.score) <= 1e-5
            assert (one.alignment is None) == (other.alignment is None)
            assert one.alignment is None or np.allclose(one.alignment, other.alignment, rtol=1e-5, atol=1e-6)


def test_a_text_a_list_and_a_generator_have_the_same_translations_in_order(trained):
    translator, texts = trained
    texts = [texts[0], '', *texts[1:], ' \t\N{NO-BREAK SPACE}']
    whole = translator.translate(texts, beam=2)
    assert isinstance(whole, list) and len(whole) == len(texts) and whole[1] == whole[-1] == ''
    assert translator.translate(tuple(texts), 2) == whole == list(translator.translate(iter(texts), 2))
    if not ON_GPU:
        assert [translator.translate(text, beam=2) for text in texts] == whole and len(set(whole)) > 10
    assert translator.translate('') == '' and translator.translate([]) == [] and list(translator.translate(iter([]))) == []


def test_results_name_the_tokens_and_n_of_them_are_lists(trained):
    translator, texts = trained
    results = translator.translations([texts[0], '', texts[1]], beam=3, nbest=2)
    assert [len(found) for found in results] == [2, 1, 2] and results[1] == [('', 0.0, [], [], 0, (), None)]
    assert translator.translations(texts[0], beam=3, nbest=2)[0].tokens == results[0][0].tokens
    assert translator.translate([texts[0], '', texts[1]], beam=3, nbest=2) == [[one.text for one in some] for some in results]
    best = results[0][0]
    words = translator.source_vocabulary
    assert best.source == [*words.words(words.encode([words.read(texts[0])]).ids), '<eos>'] and best.cut == 0
    assert best.alignment is None


@pytest.mark.parametrize('settings', [dict(batch_size=3), dict(window=6), dict(window=6, batch_size=4)], ids=str)
def test_a_stream_reads_a_window_ahead_and_no_further(trained, monkeypatch, settings):
    translator, texts = trained
    monkeypatch.setattr(module, 'WINDOW', 2)
    taken = []

    def source():
        for text in itertools.cycle(texts):                     # it never ends
            taken.append(text)
            yield text
    stream = translator.translate(source(), beam=1, **settings)
    assert not taken, 'nothing is read before the first result is asked for'
    got = list(itertools.islice(stream, 6))
    assert len(taken) == 6
    got.append(next(stream))
    assert len(taken) == 12 and got == translator.translate(taken[:7], beam=1)


def test_settings_are_checked_when_translate_is_called_not_when_a_stream_is_read(trained):
    translator, texts = trained
    for settings, text in ((dict(beam=0), 'beam: expected 1 to 32, got 0'), (dict(max_len=10), 'max_len: expected 1 to 9'),
                           (dict(beam=2, nbest=3), 'nbest: expected 1 to the beam, 2, got 3'),
                           (dict(batch_size=0), 'batch_size: expected at least 1, got 0'),
                           (dict(window=0), 'window: expected at least 1, got 0')):
        for call in translator.translate, translator.translations:
            with pytest.raises(UserError, match=f'^{text}'):
                call(iter(texts), **settings)


@pytest.mark.parametrize('settings,text', [
    (dict(beam='5'), "beam: expected a whole number, got '5'"), (dict(beam=2.5), 'beam: expected a whole number, got 2.5'),
    (dict(nbest=1.0), 'nbest: expected a whole number, got 1.0'),
    (dict(max_len=1.5), 'max_len: expected a whole number, got 1.5'),
    (dict(length_penalty='1'), "length_penalty: expected a number, got '1'"),
    (dict(batch_size='8'), "batch_size: expected a whole number, got '8'"),
    (dict(window=2.5), 'window: expected a whole number, got 2.5')])
def test_settings_of_another_type_are_refused_in_one_line(trained, settings, text):
    translator, texts = trained
    for call in translator.translate, translator.translations:
        with pytest.raises(TypeError, match=f'^{re.escape(text)}$'):
            call(texts[:1], **settings)


def test_settings_may_be_numbers_of_numpy(trained):
    translator, texts = trained
    got = translator.translate(texts[:2], np.int64(2), np.int32(1), np.float32(1), np.int64(9), np.int16(1))
    assert got == translator.translate(texts[:2], 2)


def test_a_score_needs_batches_of_at_least_one_pair(trained):
    translator, texts = trained
    for sources in texts[0], texts[:2]:
        with pytest.raises(UserError, match='^batch_size: expected at least 1, got 0$'):
            translator.score(sources, sources, batch_size=0)


def test_half_of_a_surrogate_pair_is_an_error(trained):
    translator, texts = trained
    text = b'Caf\xe9.'.decode(errors='surrogateescape')
    for call in (lambda: translator.translate([texts[0], text]), lambda: translator.score([texts[0]] * 2, [texts[0], text])):
        with pytest.raises(UserError, match='^text 1: character 4 is half of a surrogate pair; give valid Unicode'):
            call()


@pytest.mark.parametrize('bad, text', [
    ([b'Go.'], 'text 0: expected str, got bytes'), (['Go.', None], 'text 1: expected str, got NoneType'),
    (np.array([['Go.']]), 'text 0: expected str, got ndarray'),
    (b'Go.', 'texts: expected a str or an iterable of them, got bytes'),
    (None, 'texts: expected a str or an iterable of them, got NoneType')])
def test_a_text_that_is_not_a_str_is_an_error(trained, bad, text):
    for call in trained[0].translate, trained[0].translations, lambda bad: trained[0].score(bad, bad):
        with pytest.raises(TypeError, match=f'^{text}$'):
            call(bad)


def test_an_array_of_texts_has_a_list_of_translations(trained):
    translator, texts = trained
    assert translator.translate(np.array(texts[:3]), 2) == translator.translate(texts[:3], 2)
    assert translator.score(np.array(texts[:3]), np.array(['va .'] * 3)) == translator.score(texts[:3], ['va .'] * 3)


def test_a_text_of_10000_words_is_cut_to_the_length_in_training(trained):
    translator, texts = trained
    (found,) = translator.translations('tom ' * 10_000, beam=2)
    assert len(found.source) == 9 and found.cut == 10_001 - 9 and 1 <= len(found.tokens) <= 9


def test_unknown_words_are_named_once(trained):
    (found,) = trained[0].translations('Qwerty i Qwerty asdf.', beam=1)
    assert found.unknown == ('qwerty', 'asdf')


def test_new_weights_are_used_after_reset(trained):
    translator, texts = trained
    before = translator.translate(texts[:4], beam=1)
    bias = translator.model.params['output.bias']
    kept = get(bias.value).copy()
    try:
        bias.value[...] = backend.put(np.where(np.arange(len(kept)) == EOS, 1e4, 0).astype(np.float32))
        translator.reset()
        assert translator.translate(texts[:4], beam=1) == [''] * 4
    finally:
        bias.value[...] = backend.put(kept)
        translator.reset()
    assert translator.translate(texts[:4], beam=1) == before != [''] * 4


@on_the_cpu                     # what is tested is independent of the device
def test_the_decoders_of_the_last_searches_are_kept_and_no_more(trained):
    translator, texts = trained
    translator.reset()
    want = translator.translate(texts[:3], beam=2)
    for n in range(2 * module.DECODERS):
        translator.translate(texts[0], beam=2, length_penalty=n + 2.0)
        assert translator.translate(texts[:3], beam=2) == want          # used again each time, so it is kept
    assert len(translator._decoders) == module.DECODERS
    kept = [search.length_penalty for search, *_ in translator._decoders]
    assert kept[-1] == 1.0 and kept[:-1] == [n + 2.0 for n in range(module.DECODERS + 1, 2 * module.DECODERS)]


# ---- threads ---------------------------------------------------------------------------------------------------------

@on_the_cpu                     # on a GPU the last bits depend on the batch
def test_answers_belong_to_their_questions_in_every_thread(trained):
    translator, texts = trained
    want = {beam: translator.translate(texts, beam) for beam in (1, 3)}
    scores, failures = translator.score(texts, want[3], cut=True), []
    start = threading.Barrier(6)

    def ask(number):
        rng = np.random.default_rng(number)
        start.wait()
        for _ in range(6):
            some, beam = rng.integers(0, len(texts), rng.integers(1, 9)), int(rng.choice([1, 3]))
            if translator.translate([texts[i] for i in some], beam) != [want[beam][i] for i in some]:
                failures.append(f'thread {number}: translate')
            got = translator.score([texts[i] for i in some], [want[3][i] for i in some], cut=True)
            if not np.allclose(got, [scores[i] for i in some], rtol=1e-6, atol=1e-7):
                failures.append(f'thread {number}: score')
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(480)
    assert failures == [] and not any(thread.is_alive() for thread in threads)


@pytest.fixture
def decoders(trained, monkeypatch):
    """A list of (thread, threads of its kernels) of each batch that is decoded; it begins without decoders."""
    translator, made, decoded = trained[0], trained[0]._make_decoder, []

    def watched(*arguments):
        decode = made(*arguments)

        def noted(source, more):
            decoded.append((threading.get_ident(), backend.threads()))
            return decode(source, more)
        return noted
    translator.reset()
    monkeypatch.setattr(translator, '_make_decoder', watched)
    threads = backend.threads()
    yield decoded
    backend.set_threads(threads)
    translator.reset()


@on_the_cpu
def test_batches_are_decoded_at_the_same_time_with_the_same_results(trained, decoders):
    """One of the texts has no words, and the last search is repeated with its decoders."""
    translator, texts = trained
    texts, found = [*texts[:30], '', *texts[30:]] * 4, {}
    for threads in 1, 2, 3, 9:
        backend.set_threads(threads)
        for beam, size in (1, None), (3, None), (3, 9), (1, 50), (3, None):
            decoders.clear()
            got = translator.translations(texts, beam, batch_size=size)
            assert found.setdefault((beam, size), got) == got == found[beam, None]
            assert {own for _, own in decoders} == {max(1, threads // 4)}
            assert (threading.get_ident() in dict(decoders)) is (threads == 1)
    assert backend.threads() == 9


@on_the_cpu
def test_few_texts_are_one_batch_of_all_threads(trained, decoders):
    translator, texts = trained
    backend.set_threads(2)
    translator.translate(texts[:2 * module._WORKER_ROWS - 1], beam=1)
    assert decoders == [(threading.get_ident(), 2)]
    decoders.clear()
    enough = texts[:2 * module._WORKER_ROWS]
    translator.translate(enough, beam=1)
    assert [own for _, own in decoders] == [1, 1]
    decoders.clear()
    translator.translate(enough, beam=1, batch_size=len(enough))
    assert decoders == [(threading.get_ident(), 2)]


@on_the_cpu
def test_an_error_in_a_batch_ends_the_others_and_the_next_call_is_right(trained, monkeypatch):
    translator, texts = trained
    want, decoded, threads = translator.translate(texts, beam=2), [], backend.threads()

    def failing(model, search, is_greedy):
        def decode(source, more):
            decoded.append(source)
            raise MemoryError('no memory')
        return decode
    backend.set_threads(2)
    translator.reset()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(translator, '_make_decoder', failing)
            with pytest.raises(MemoryError, match='no memory'):
                translator.translate(texts, beam=2, batch_size=2)
        assert 1 <= len(decoded) <= 2
        translator.reset()
        assert translator.translate(texts, beam=2) == want
    finally:
        backend.set_threads(threads)
        translator.reset()


@on_the_cpu                     # on a GPU the last bits depend on the batch
def test_other_threads_may_run_ops_and_record_plans_meanwhile(trained):
    """Each translator is new, so that it records plans; so does a model in another thread."""
    translator, texts = trained
    want = [translator.translate(texts[:n], 2) for n in (1, 2, 3)]
    failures, done, layer = [], threading.Event(), ops.Linear(Parameters(
        {'weight': Spec((5, 7), xavier_normal()), 'bias': Spec((5,), zeros())})['weight'])
    x = backend.put(np.random.default_rng(0).standard_normal((3, 7), 'f'))
    y = get(layer.forward(x)[0]).copy()

    def work():
        try:
            while not done.is_set():
                with plan.Plan() as recorded:
                    found, _ = layer.forward(x)
                recorded.run()
                if not (np.array_equal(get(found), y) and np.array_equal(get(layer.forward(x)[0]), y)):
                    raise ValueError(f'{len(recorded.actions)} actions')
        except Exception as error:
            failures.append(repr(error))
    thread, interval = threading.Thread(target=work), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)                                 # the threads interrupt each other within recordings
    thread.start()
    try:
        for _ in range(3):
            fresh = Translator(translator.model, translator.source_vocabulary, translator.target_vocabulary)
            for n in 1, 2, 3, 1, 2, 3:                          # a size has plans from its second time on
                if fresh.translate(texts[:n], 2) != want[n - 1]:
                    failures.append(f'{n} texts')
    finally:
        done.set()
        thread.join(240)
        sys.setswitchinterval(interval)
    assert failures == []


def test_another_thread_can_translate_while_a_stream_is_half_read(trained, monkeypatch):
    translator, texts = trained
    monkeypatch.setattr(module, 'WINDOW', 1)
    stream, got = translator.translate(iter(texts[:6]), beam=1, batch_size=2), []
    first = next(stream)
    thread = threading.Thread(target=lambda: got.append(translator.translate(texts[0], beam=1)), daemon=True)
    thread.start()
    thread.join(240)
    assert got == [first]


# ---- scores ----------------------------------------------------------------------------------------------------------

def forced_log_probabilities(translator, source, output):
    """Return the log probability of each token of an output, (n,), in float64 from the states of the model."""
    model = translator.model
    h, _ = model.forced(Sequences.of([source], 9), Sequences.of([np.array([BOS, *output[:-1]])], 9))
    weight, bias = (get(model.params[f'output.{name}'].value).astype(np.float64) for name in ('weight', 'bias'))
    logits = get(h).astype(np.float64) @ weight.T + bias
    logits -= logits.max(-1, keepdims=True)
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[np.arange(len(output)), output]


def test_scores_are_the_sums_of_the_log_probabilities_of_the_tokens_and_the_end_mark(trained):
    translator, texts = trained
    sources, targets = texts[:10], [*translator.translate(texts[:7], beam=1), 'Je dors.', '', 'Qwerty']
    got = translator.score(sources, targets, batch_size=3, cut=True)
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        ids = [np.append(words.encode([words.read(text)]).ids, EOS)[:9].astype(np.int32) for words, text in
               ((translator.source_vocabulary, source), (translator.target_vocabulary, target))]
        want = forced_log_probabilities(translator, *ids).sum()
        assert abs(got[i] - want) <= 1e-5 * max(1, abs(want)) and want < 0, (source, target)
    assert abs(translator.score(sources[7], targets[7]) - got[7]) <= 1e-5 * abs(got[7])
    assert translator.score([], []) == []
    for bad in ((texts, texts[:2]), (texts[0], texts[:1])):
        with pytest.raises(ValueError, match='^score: expected a text and its translation, or as many targets as sources$'):
            translator.score(*bad)


def test_a_target_that_is_too_long_is_an_error_unless_it_may_be_cut(trained):
    translator, texts = trained
    fits, long = ' '.join(['je'] * 8), ' '.join(['je'] * 9)
    line = 'expected at most 9 tokens, end mark included, got 10; shorten it, or give cut=True to score its first 9$'
    for sources, targets, number in (texts[0], long, 0), (texts[:3], [fits, long, long * 2], 1):
        with pytest.raises(UserError, match=f'^target {number}: {line}'):
            translator.score(sources, targets)
    assert translator.score(texts[0], fits) == translator.score(texts[0], fits, cut=True)
    assert translator.score(texts[0], long, cut=True) == translator.score(texts[0], f'{long} tu', cut=True) < 0


@on_the_cpu                     # random weights end no sentence
@pytest.mark.parametrize('length_penalty', [0.0, 1.0])
def test_scores_are_those_of_beam_search(trained, length_penalty):
    translator, texts = trained
    compared = 0
    for text, some in zip(texts, translator.translations(texts, 4, 3, length_penalty), strict=True):
        for found in some:
            words = translator.target_vocabulary
            ids = words.encode([words.read(found.text)]).ids
            if [*words.words(ids), '<eos>'] != found.tokens:            # such as <unk>, which no text has
                continue
            want = found.score * len(found.tokens) ** length_penalty
            assert abs(translator.score(text, found.text) - want) <= 2e-5 * max(1, abs(want))
            compared += 1
    assert compared > 50


# ---- alignments ------------------------------------------------------------------------------------------------------

def softmax_rows(q, k, heads):
    """Return the softmax of the products of queries (n, D) and keys (m, D) for each head, (heads, n, m), in float64."""
    n, m = len(q), len(k)
    q, k = (x.astype(np.float64).reshape(len(x), heads, -1).transpose(1, 0, 2) for x in (q, k))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    assert weights.shape == (heads, n, m)
    return weights / weights.sum(-1, keepdims=True)


def test_alignments_are_the_mean_weights_of_the_attention_to_the_source(trained, monkeypatch):
    """The softmax is computed in numpy from the queries and keys of the last attention of each forced pass."""
    translator, texts = trained
    seen, forward = [], Attention.forward

    def noting(self, q, k, v, lengths=None, step=None, q_rows=None, k_rows=None):
        if q_rows is not None and k_rows is not None:
            seen.append((self.heads, get(q).copy(), get(k).copy(), get(q_rows.offsets), get(k_rows.offsets)))
        return forward(self, q, k, v, lengths, step, q_rows, k_rows)
    monkeypatch.setattr(Attention, 'forward', noting)
    results = translator.translations([*texts[:5], ''], beam=2, nbest=2, batch_size=1, alignments=True)
    if not translator.model.attends:
        assert all(found.alignment is None for some in results for found in some) and not seen
        return
    flat = [found for some in results[:5] for found in some]
    assert results[5][0].alignment.shape == (0, 0) and len(flat) == 10
    matched = 0
    for found in flat:
        assert found.alignment.shape == (len(found.tokens), len(found.source)) and found.alignment.dtype == np.float32
        assert np.abs(found.alignment.sum(1) - 1).max() <= 1e-5
        candidates = [softmax_rows(q[q_starts[b]:q_starts[b + 1]], k[k_starts[b]:k_starts[b + 1]], heads).mean(0)
                      for heads, q, k, q_starts, k_starts in seen for b in range(len(q_starts) - 1)
                      if q_starts[b] < q_starts[b + 1] and k_starts[b] < k_starts[b + 1]]       # else a plan was recorded
        matched += any(weights.shape == found.alignment.shape and np.abs(weights - found.alignment).max() <= 1e-5
                       for weights in candidates)
    assert matched == len(flat)
    whole = translator.translations(texts[:5], beam=2, nbest=2, alignments=True)
    for some, others in zip(whole, results, strict=False):
        for one, other in zip(some, others, strict=True):
            assert one.tokens == other.tokens and np.abs(one.alignment - other.alignment).max() <= 1e-5


def test_batches_of_alignments_are_bounded_by_the_size_of_their_weights(trained, monkeypatch):
    translator, texts = trained
    if not translator.model.attends:
        return
    whole = translator.translations(texts, beam=1, alignments=True)
    sizes, forced = [], type(translator.model).forced
    monkeypatch.setattr(type(translator.model), 'forced', lambda self, source, target, align: (
        sizes.append(source.rows.sentences * source.rows.longest * target.rows.longest) or forced(self, source, target, align)))
    monkeypatch.setattr(module, '_WEIGHTS', 200)
    for one, other in zip(whole, translator.translations(texts, beam=1, alignments=True), strict=True):
        assert one[0].text == other[0].text and np.abs(one[0].alignment - other[0].alignment).max() <= 1e-5
    assert len(sizes) > 2 and max(sizes) <= 200


@on_the_cpu
def test_the_weights_of_quantized_attention_are_those_of_its_rounded_operands():
    from pyops import quantization
    corpus, vocabularies, _ = small_corpus(100)
    sizes, results = dict(d_model=16, d_ff=16, heads=2, layers=1, dropout=0.0), []
    for quant in 'none', 'mxfp8':
        family = quantization.family_of(dict(quant=quant, quant_layers='', seed=0))
        config = TransformerConfig(*map(len, vocabularies), **sizes, ops=family)
        translator = Translator(Transformer(config, seed=1), *vocabularies)
        ((found,),) = translator.translations([corpus.texts()[0][0]], beam=1, alignments=True)
        assert np.abs(found.alignment.sum(1) - 1).max() <= 1e-5
        results.append(found)
    plain, rounded = (found.alignment[0] for found in results)
    assert (plain != rounded).any() and np.abs(plain - rounded).max() < 0.1


# ---- load ------------------------------------------------------------------------------------------------------------

@on_the_cpu
@pytest.mark.parametrize('program, flags', [('seq2seq', TINY_SEQ2SEQ), ('transformer', TINY_TRANSFORMER)])
def test_load_finds_the_program_of_a_checkpoint_and_prints_nothing(program, flags, tmp_path, capsys, monkeypatch):
    importlib.import_module(f'{program}.train').main(['-e', '1', '-c', str(tmp_path), *flags])
    capsys.readouterr()
    translator = pyops.load(tmp_path)
    assert type(translator.model).__name__.lower() == program and translator.state['program'] == program
    assert translator.warnings == () and translator.rounding is None and program in repr(translator).lower()
    rounded = pyops.load(translator.path, quant='mxfp8')
    assert rounded.translate('I sleep.') and 'mxfp8' in rounded.rounding and translator.translate(['Go.'])
    with pytest.raises(UserError, match='^--quant-layers nowhere: no layer has that name'):
        pyops.load(tmp_path, quant='mxfp8', quant_layers='nowhere')
    assert capsys.readouterr() == ('', '')


@on_the_cpu
def test_load_refuses_other_checkpoints_and_names_damaged_ones(tmp_path):
    path = tmp_path / 'x.safetensors'
    checkpoint.save(str(path), {'w': np.zeros(3, np.float32)}, {'program': 'mnist'})
    with pytest.raises(UserError, match='x.safetensors: a checkpoint of mnist; expected one of seq2seq or transformer$'):
        pyops.load(path)
    with pytest.raises(UserError, match='none: no such folder; train first, or name another checkpoint$'):
        pyops.load(tmp_path / 'none')
    path.unlink()
    for epochs in '1', '2':
        importlib.import_module('seq2seq.train').main(['-e', epochs, '-c', str(tmp_path), *TINY_SEQ2SEQ])
    (newest,) = tmp_path.glob('*_2.safetensors')
    newest.write_bytes(newest.read_bytes()[:-10])
    translator = pyops.load(tmp_path)
    (warning,) = translator.warnings
    assert translator.path.endswith('_1.safetensors') and str(newest) in warning


@on_the_cpu
@pytest.mark.parametrize('workers', [1, 2])
def test_a_batch_has_fewer_texts_if_they_are_long_and_all_of_a_worker_use_the_same_memory(trained, monkeypatch, workers):
    translator, texts = trained
    translator.reset()
    expected, batches, of, rooms = translator.translate(texts, beam=2), [], Sequences.of, []
    translator.reset()
    if hasattr(translator.model, 'room'):
        room = translator.model.room
        monkeypatch.setattr(translator, '_models', [translator.model])
        monkeypatch.setattr(translator.model, '_reserved', (None, (0, 0, 0)))
        monkeypatch.setattr(translator.model, 'room', lambda *sizes: rooms.append(sizes) or room(*sizes), raising=False)
    monkeypatch.setattr(module, '_TOKENS', 20)
    monkeypatch.setattr(translator, '_workers', lambda texts, search: workers)
    monkeypatch.setattr(Sequences, 'of', lambda some, longest: batches.append([len(ids) for ids in some]) or of(some, longest))
    assert translator.translate(texts, beam=2, batch_size=5) == expected
    if workers == 1:
        batches.reverse()                                               # the longest are the first
        lengths = [length for some in batches for length in some]
        assert lengths == sorted(lengths)
    assert sum(map(len, batches)) == len(texts) and all(some == sorted(some) for some in batches)
    assert all(sum(some) <= 20 and len(some) <= 5 for some in batches)
    assert len(rooms) == workers * hasattr(translator.model, 'room')
    assert len({len(some) for some in batches}) > 1
    translator.reset()


# ---- compute types ---------------------------------------------------------------------------------------------------

@pytest.fixture(scope='module', params=[('transformer', TINY_TRANSFORMER), ('seq2seq', TINY_SEQ2SEQ)], ids=lambda some: some[0])
def kept(request, tmp_path_factory):
    """The folder of a trained checkpoint, and some of its sources."""
    program, flags = request.param
    folder = tmp_path_factory.mktemp(program)
    importlib.import_module(f'{program}.train').main([*flags, '-e', '15', '-l', '0.01', '-d', '0', '-c', str(folder)])
    corpus, _, _ = small_corpus(512)
    return folder, [text for text, _ in corpus.texts()][:150]


@on_the_cpu
@pytest.mark.parametrize('compute', ['bf16', 'int8'])
def test_a_compact_model_translates_nearly_as_in_float32_and_the_same_in_every_batch(kept, compute):
    folder, texts = kept
    model, plain = pyops.load(folder, compute=compute), pyops.load(folder)
    found, want = model.translate(texts, beam=1), plain.translate(texts, beam=1)
    assert sum(a == b for a, b in zip(found, want, strict=True)) >= (0.9 if compute == 'bf16' else 0.7) * len(texts)
    assert len(set(found)) > 30
    assert [model.translate(text, beam=1) for text in texts[:20]] == found[:20] == model.translate(texts[:20], 1, batch_size=3)
    best = model.translations(texts[:20], beam=3)
    scores = model.score(texts[:20], [some[0].text for some in best])
    for some, score in zip(best, scores, strict=True):
        assert abs(some[0].score * len(some[0].tokens) - score) <= 0.02 * abs(score) + 0.02 or some[0].tokens[-1] != '<eos>'
    with pytest.raises(KeyError):
        model.model.params['output.weight']


@on_the_cpu
def test_a_translator_in_float32_packs_its_weights_and_reset_packs_them_again(kept, monkeypatch):
    folder, texts = kept
    model = pyops.load(folder)
    monkeypatch.setattr('pyops.compute.family', lambda *_: None)
    plain = pyops.load(folder)
    assert model.model.config.ops.nbytes > 0 and plain.model.config.ops is pyops.ops

    def found():
        results = [[one.translate(texts, beam=1), one.translations(texts[:30], beam=3)] for one in (model, plain)]
        assert results[0] == results[1]
        return results[0]
    before = found()
    for one in model, plain:
        one.model.params['output.weight'].value[5:] *= -1
        one.reset()
    assert found() != before


@on_the_cpu
def test_a_sentence_alone_is_decoded_with_a_draft_whatever_its_tokens_are(kept, monkeypatch):
    """The draft has the tokens of the int8 model, others from a place on, no end, or none of the right ones."""
    folder, texts = kept
    model, texts = pyops.load(folder), [text for text in texts if text]
    want, checked, drafted = model.translate(texts, beam=1), [], decoding.Decoder.__call__
    check = decoding._Draft._check
    monkeypatch.setattr(decoding._Draft, '_check', lambda *sizes: checked.append(1) or check(*sizes))
    rng = np.random.default_rng(0)

    def changed(tokens, change):
        tokens = tokens.copy()
        n = int(rng.integers(len(tokens)))
        if change == 'other':
            tokens[n:] = rng.integers(EOS + 1, 50, tokens[n:].shape)
        if change == 'shorter':
            tokens = tokens[:n + 1]
            tokens[n] = EOS
        if change == 'longer':
            more = rng.integers(EOS + 1, 50, (model.num_steps - len(tokens) + 1, 1))
            tokens = np.concatenate([tokens[:-1], more], dtype=np.int32)
        return tokens
    for change in ('none', 'other', 'shorter', 'longer'):
        monkeypatch.setattr(decoding._Draft, 'LEAST', 10**9)

        def decode(decoder, source, change=change):
            tokens = drafted(decoder, source)
            return changed(tokens, change) if getattr(decoder.model.config.ops, 'rounds', False) else tokens
        monkeypatch.setattr(decoding.Decoder, '__call__', decode)
        model.reset()
        assert [model.translate(text, beam=1) for text in texts] == want, change
    assert bool(checked) == hasattr(model.model, 'draft')


@on_the_cpu
def test_a_draft_that_is_mostly_wrong_is_not_used_any_longer(kept, monkeypatch):
    folder, texts = kept
    model = pyops.load(folder)
    if not hasattr(model.model, 'draft'):
        assert model.translate(texts[1], beam=1) == model.translate(texts[:3], beam=1)[1]
        return
    draft, calls, decode = model.model.draft(), [], decoding._Draft.decode
    draft.output.compact.values[...] = 0                        # then all logits are equal, and token 0 is the first
    monkeypatch.setattr(model.model, 'draft', lambda: draft, raising=False)
    monkeypatch.setattr(decoding._Draft, 'decode', lambda self, source: calls.append(1) or decode(self, source))
    want = model.translate(texts, beam=1)
    assert [model.translate(text, beam=1) for text in texts] == want
    assert 0 < len(calls) <= -(-decoding._Draft.LEAST // decoding.REPEATS) < len(texts)     # a draft ends as a repetition


@on_the_cpu
def test_a_compute_type_that_is_unknown_or_impossible_is_one_line(kept, monkeypatch):
    folder, _ = kept
    with pytest.raises(UserError, match='^compute: expected float32, bf16 or int8, got fp8$'):
        pyops.load(folder, compute='fp8')
    with pytest.raises(UserError, match='^compute type int8: expected a model without quantization, got --quant hifp8; add '
                                        '--quant none$'):
        pyops.load(folder, quant='hifp8', compute='int8')
    monkeypatch.setattr('pyops.compute.current_device', lambda: SimpleNamespace(is_host=False))
    with pytest.raises(UserError, match='^compute type bf16: runs on the CPU only; give --compute float32, or run on the CPU '
                                        'with -g 0$'):
        pyops.load(folder, compute='bf16')


@on_the_cpu
def test_the_programs_take_the_compute_type(kept, capsys):
    folder, texts = kept
    program = checkpoint.find(folder, serving=True).state['program']
    importlib.import_module(f'{program}.translate').main(['-c', str(folder), '--compute', 'int8', '--beam', '1', *texts[:9]])
    assert capsys.readouterr().out.splitlines() == pyops.load(folder, compute='int8').translate(texts[:9], beam=1)
    importlib.import_module(f'{program}.evaluate').main(
        ['-c', str(folder), '-f', 'embedded', '--compute', 'bf16', '--beam', '1', '--first', '5', '--json'])
    assert '"sentences": 5' in capsys.readouterr().out
