"""The page of the translation server in a headless browser, on a stand-in server that answers from a table."""
import http.server
import json
import re
import threading
import urllib.parse

import numpy as np
import pytest
from browsing import Page
from conftest import ROOT

FILES = ROOT / 'pyops/serve/page'
KINDS = {'.html': 'text/html', '.js': 'text/javascript', '.css': 'text/css'}
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
          "form-action 'none'; frame-ancestors 'none'")
EVIL = '<img/src=x/onerror=window.hacked=1>'


def weights(rows, columns, seed=0):
    """Return attention weights: most of each row on one column, a little on the others."""
    values = np.random.default_rng(seed).random((rows, columns)) + 30 * (np.arange(columns) == np.arange(rows)[:, None])
    return (values / values.sum(1, keepdims=True)).round(4).tolist()


def found(text, score, source, tokens, seed=0, **fields):
    return {'text': text, 'score': score, 'source': source, 'tokens': tokens, 'unknown': [], 'cut': 0,
            'alignment': weights(len(tokens), len(source), seed)} | fields


CATS = 'The cats sleep in Zürich.'
PIECES = ['▁The', '▁c', 'ats', '▁sleep', '▁in', '▁Z', '\\xc3', '\\xbc', 'rich', '.', '<eos>']
WORDS = ['The', 'cats', 'sleep', 'in', 'Zürich', '.', 'end']
GROUPS = [[0], [1, 2], [3], [4], [5, 6, 7, 8], [9], [10]]           # the pieces of each word of the text
TARGETS = [[0], [1, 2], [3], [4], [5], [6], [7]]                    # and of the first translation
TABLE = {
    CATS: [found('Les chats dorment à Zurich.', -0.05, PIECES,
                 ['▁Les', '▁ch', 'ats', '▁dorment', '▁à', '▁Zurich', '.', '<eos>'], 1),
           found('Les chats dorment.', -0.5, PIECES, ['▁Les', '▁ch', 'ats', '▁dorment', '.', '<eos>'], 2),
           found('Le chat.', -1.5, PIECES, ['▁Le', '▁chat', '.', '<eos>'], 3)],
    'The zebra sees the okapi and the zebra.': [
        found('Le <unk> voit.', -0.3, ['the', '<unk>', 'sees', 'the', '<unk>', 'and', 'the'], ['le', '<unk>', 'voit', '.'],
              unknown=['zebra', 'okapi'], cut=3)],
    'I sleep.': [{'text': 'Je dors.', 'score': -0.1, 'source': ['i', 'sleep', '.', '<eos>'],
                  'tokens': ['je', 'dors', '.', '<eos>'], 'unknown': [], 'cut': 0}],
    EVIL: [found(EVIL, -0.1, [EVIL, '<unk>'], [EVIL, '<script>hacked=1</script>'], unknown=[EVIL], cut=1)] * 2,
}


def answer_for(text):
    """Return the translations of the table, else the text in upper case, and the first 150 words as tokens."""
    words = text.split()
    cut, words = max(0, len(words) - 150), words[:150]
    return TABLE.get(text) or [found(text.upper(), -0.2, words, [word.upper() for word in words], cut=cut)]


class StandIn(http.server.ThreadingHTTPServer):
    """A server with the interface of pyops.serve.

    texts: the texts of each request;  token: if it is set, required;  failure: None or a pair (status, body) for all requests
    refused: a text that is not accepted;  gates: Events that the next answers wait for;  model: of the answers
    """

    def __init__(self):
        super().__init__(('127.0.0.1', 0), Handler)
        self.texts, self.asked, self.token, self.failure, self.refused, self.gates = [], [], None, None, None, []
        self.model = {'kind': 'transformer', 'checkpoint': EVIL}
        self.url = f'http://127.0.0.1:{self.server_port}'

    def answer(self, request, authorization):
        self.asked.append(request)
        self.texts.append(request['texts'])
        if self.gates:
            assert self.gates.pop(0).wait(120)
        if self.token and authorization != f'Bearer {self.token}':
            return 401, json.dumps({'error': 'expected the header Authorization: Bearer TOKEN'})
        if self.failure:
            return self.failure
        if self.refused in request['texts']:
            line = f'texts[{request["texts"].index(self.refused)}]: expected at most 5 characters'
            return 413, json.dumps({'error': line})
        translations = [answer_for(text)[:request['nbest']] for text in request['texts']]
        return 200, json.dumps({'translations': translations, 'model': self.model, 'milliseconds': 12.3})

    def handle_error(self, request, client_address):
        """Ignore connections that the page aborted."""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = FILES / ('index.html' if self.path == '/' else self.path.removeprefix('/static/'))
        self.send(200, KINDS[path.suffix], path.read_text()) if path.is_file() else self.send_error(404)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
        assert (self.path, self.headers['Content-Type']) == ('/translate', 'application/json')
        status, body = self.server.answer(request, self.headers['Authorization'])
        self.send(status, 'application/json', body)

    def send(self, status, kind, body):
        self.send_response(status)
        for name, value in (('Content-Type', f'{kind}; charset=utf-8'), ('Content-Security-Policy', POLICY)):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def stand_in():
    with StandIn() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.01})
        thread.start()
        yield server
        for gate in server.gates:
            gate.set()
        server.shutdown()
        thread.join()


class ServePage(Page):
    """The page of the translation server at an address, with a text."""

    def __init__(self, browser, url, text, **options):
        super().__init__(browser, f'{url}/#{urllib.parse.urlencode({"text": text})}', **options)

    def type(self, text):
        self.tab.fill('#text', text)

    def shows(self, translation):
        """Wait until this is the whole translation, and is up to date."""
        self.until('[...document.querySelectorAll("#translation .line:not(.stale) > p:first-child")].map(p => p.textContent)'
                   '.join("\\n")', translation)

    def all(self, selector, what='textContent'):
        return self.ask(f'[...document.querySelectorAll({json.dumps(selector)})].map(node => node.{what})')

    def is_shown(self, selector):
        return self.tab.is_visible(selector)

    def cells(self):
        return np.array([[int(cell) for cell in self.all(f'#map tbody tr:nth-child({i + 1}) td')]
                         for i in range(len(self.all('#map tbody tr')))])


@pytest.fixture
def shown(browser, stand_in):
    """The page with CATS.  The test fails if the page raises an error, violates its policy, or uses another server."""
    page = ServePage(browser, stand_in.url, CATS)
    page.shows('Les chats dorment à Zurich.')
    yield page
    page.tab.close()
    # The browser itself logs a line for each request that fails.
    assert [line for line in page.failures if not line.startswith('Failed to load resource')] == []
    assert {urllib.parse.urlsplit(url).netloc for url in page.requests} == {urllib.parse.urlsplit(stand_in.url).netloc}


# ---- requests --------------------------------------------------------------------------------------------------------

def test_a_pause_in_typing_sends_one_request_for_the_new_text(shown, stand_in):
    shown.type('')
    stand_in.texts.clear()
    shown.tab.type('#text', 'We go', delay=5)
    shown.shows('WE GO')
    assert stand_in.texts == [['We go']]
    assert stand_in.asked[-1] | {'texts': []} == {'texts': [], 'beam': 5, 'nbest': 3, 'alignments': True}
    assert shown.text('#model') == f'12 ms · transformer · {EVIL}'


def test_the_answer_for_an_older_text_is_dropped_and_its_request_aborted(shown, stand_in):
    old, new = threading.Event(), threading.Event()
    stand_in.gates += [old, new]
    aborted = []
    shown.tab.on('requestfailed', lambda request: aborted.append(json.loads(request.post_data)['texts']))
    shown.type('older text')
    shown.until('busy.hidden', False)
    assert shown.all('.line.stale > p') == ['Les chats dorment à Zurich.'] and shown.tab.is_disabled('#copy')
    shown.type('newer text')
    for _ in range(200):
        if len(stand_in.texts) == 3:
            break
        shown.tab.wait_for_timeout(20)
    assert shown.text('#failure') == '' and stand_in.texts[1:] == [['older text'], ['newer text']]
    new.set()
    shown.shows('NEWER TEXT')
    old.set()
    shown.tab.wait_for_timeout(100)
    shown.shows('NEWER TEXT')
    assert aborted == [['older text']] and not shown.is_shown('#busy')


def test_only_changed_sentences_are_requested_in_groups_of_sixteen(shown, stand_in):
    texts = [f'sentence {i}' for i in range(35)]
    stand_in.texts.clear()
    shown.type('\n'.join([*texts, texts[0], '  ']))
    shown.shows('\n'.join([*texts, texts[0]]).upper())
    assert stand_in.texts == [texts[:16], texts[16:32], texts[32:]]
    shown.type('\n'.join(['changed', *texts]))
    shown.shows('\n'.join(['changed', *texts]).upper())
    assert stand_in.texts[3:] == [['changed']]


def test_another_model_translates_all_sentences_again(shown, stand_in, monkeypatch):
    stand_in.model = {'kind': 'seq2seq', 'checkpoint': 'new.safetensors'}
    monkeypatch.setitem(TABLE, CATS, [found('Chats !', -0.1, ['cats'], ['chats', '!'])])
    shown.type(CATS + '\nWe go')
    shown.shows('Chats !\nWE GO')
    assert stand_in.texts == [[CATS], ['We go'], [CATS, 'We go']]
    assert shown.text('#model') == '12 ms · seq2seq · new.safetensors'


def test_text_is_not_sent_while_an_input_method_composes_it(shown, stand_in):
    stand_in.texts.clear()
    compose = 'text.dispatchEvent(new %s)'
    shown.ask('{ text.value = "ni"; %s }' % (compose % 'InputEvent("input", {isComposing: true})'))
    shown.tab.wait_for_timeout(400)
    assert stand_in.texts == []
    shown.ask('{ text.value = "\u4f60"; %s }' % (compose % 'CompositionEvent("compositionend")'))
    shown.shows('\u4f60')


# ---- translations ----------------------------------------------------------------------------------------------------

def test_an_alternative_replaces_the_translation_the_copy_and_the_attention(shown, stand_in):
    assert shown.all('.choice > span:nth-child(2)') == [some['text'] for some in TABLE[CATS]]
    assert shown.all('.confidence') == ['High confidence', 'Medium confidence', 'Low confidence']
    assert not shown.is_shown('.score')
    shown.tab.check('#scores')
    assert shown.all('.score') == ['95\xa0% per token, score −0.050', '61\xa0% per token, score −0.500',
                                   '22\xa0% per token, score −1.500'] and shown.is_shown('.score')
    shown.tab.check('.choice:nth-child(2) input')
    shown.shows('Les chats dorment.')
    assert shown.all('#target > *') == ['Les', 'chats', 'dorment', '.', 'end']
    shown.tab.context.grant_permissions(['clipboard-read', 'clipboard-write'])
    shown.tab.click('#copy')
    shown.until('navigator.clipboard.readText()', 'Les chats dorment.')
    assert shown.text('#copy') == 'Copied'
    shown.until('copy.textContent', 'Copy')
    # The choice belongs to the sentence.
    shown.type('We go\n' + CATS)
    shown.shows('WE GO\nLes chats dorment.')


def test_text_can_be_copied_without_the_clipboard_api(shown):
    shown.ask('{ Object.defineProperty(navigator, "clipboard", {value: undefined}); '
              'document.addEventListener("copy", () => { window.copied = String(document.activeElement.value) }) }')
    shown.tab.click('#copy')
    shown.until('window.copied', 'Les chats dorment à Zurich.')
    assert shown.text('#copy') == 'Copied' and shown.ask('document.activeElement.id') == 'copy'


def test_lines_are_sentences_and_the_caret_or_a_click_selects_one(shown):
    shown.type('We go\n\n' + CATS)
    shown.shows('WE GO\nLes chats dorment à Zurich.')
    assert shown.all('[aria-pressed=true] > p') == ['Les chats dorment à Zurich.'] and len(shown.all('.choice')) == 3
    shown.ask('text.setSelectionRange(2, 2)')
    shown.until('document.querySelector("[aria-pressed=true]").textContent', 'WE GO')
    assert len(shown.all('.choice')) == 1 and shown.all('#target > *') == ['WE', 'GO']
    shown.tab.click('.line:nth-child(3)')
    assert len(shown.all('.choice')) == 3
    for key in ('Enter', ' '):
        shown.tab.focus(f'.line:nth-child({1 if key == "Enter" else 3})')
        shown.tab.keyboard.press(key)
        assert shown.all('[aria-pressed=true]') == ['WE GO' if key == 'Enter' else 'Les chats dorment à Zurich.']
    shown.tab.context.grant_permissions(['clipboard-read', 'clipboard-write'])
    shown.tab.click('#copy')
    shown.until('navigator.clipboard.readText()', 'WE GO\n\nLes chats dorment à Zurich.')


def test_unknown_words_and_unread_text_are_marked(shown):
    text = 'The zebra sees the okapi and the zebra.'
    shown.type(text)
    shown.shows('Le <unk> voit.')
    assert shown.all('.note') == ['Unknown to the model: zebra, okapi', 'Too long for the model, which did not read: zebra.']
    assert shown.all('#source > *') == ['the', 'zebra', 'sees', 'the', 'okapi', 'and', 'the']
    assert shown.all('#source > .unknown') == ['zebra', 'okapi'] and shown.all('p > mark') == ['<unk>']
    assert shown.all('.note s') == ['zebra.']
    assert 'Unknown to the model: zebra, okapi' in shown.text('#spoken')


@pytest.mark.parametrize('source, cut, note', [
    (['▁Go', '▁ho'], 3, 'Too long for the model, which did not read: me now.'),
    (['▁Go', '▁home', '▁now', '.'], 1, 'This sentence is as long as the model can read.'),
    (['▁Go', '<unk>'], 4, 'Too long for the model, which did not read the last 4 tokens.')])
def test_the_part_that_was_not_read_is_quoted_if_it_is_certain(shown, monkeypatch, source, cut, note):
    monkeypatch.setitem(TABLE, 'Go home now.', [found('Va.', -0.1, source, ['▁Va', '.'], cut=cut)])
    shown.type('Go home now.')
    shown.shows('Va.')
    assert shown.all('.note') == [note]


def test_without_words_or_attention_the_sections_say_so_or_are_hidden(shown, monkeypatch):
    shown.type('I sleep.')
    shown.shows('Je dors.')
    assert shown.text('#attention-note') == 'This model has no attention to show.'
    assert not shown.is_shown('#views') and not shown.is_shown('#numbers') and shown.is_shown('#alternatives')
    shown.type(CATS)
    shown.shows('Les chats dorment à Zurich.')
    assert shown.is_shown('#views')
    monkeypatch.setitem(TABLE, '...', [found('', 0.0, [], [])])
    shown.type('...')
    shown.shows('(empty translation)')
    assert not shown.is_shown('#attention') and not shown.is_shown('#alternatives')
    for text in ('', ' \n '):
        shown.type(text)
        shown.until('translation.textContent', '' if text else 'The translation appears here.')
        assert not shown.is_shown('#attention') and not shown.is_shown('#copy')


# ---- attention -------------------------------------------------------------------------------------------------------

def joined(some, targets, sources):
    """Return the weights of words: the mean over the pieces of a target, the sum over the pieces of a source."""
    return np.array([[np.mean([sum(some['alignment'][i][j] for j in source) for i in target]) for source in sources]
                     for target in targets])


def test_pieces_are_joined_into_words_or_shown_as_they_are(shown):
    some = TABLE[CATS][0]
    assert shown.all('#source > *') == shown.all('#map thead th') == WORDS
    assert shown.all('#target > *') == shown.all('#map tbody th') == ['Les', 'chats', 'dorment', 'à', 'Zurich', '.', 'end']
    expected = joined(some, TARGETS, GROUPS)
    np.testing.assert_allclose(expected.sum(1), 1, atol=1e-3)
    np.testing.assert_allclose(shown.cells(), 100 * expected, atol=0.51)
    shown.tab.check('#pieces')
    assert shown.all('#source > *') == [*PIECES[:-1], 'end']
    np.testing.assert_allclose(shown.cells(), 100 * np.array(some['alignment']), atol=0.51)
    shown.tab.uncheck('#pieces')
    assert shown.all('#source > *') == WORDS
    shown.type('We go')
    shown.shows('WE GO')
    assert not shown.is_shown('#pieces')


def test_a_word_has_the_pieces_up_to_the_next_space_and_punctuation_is_a_word(shown, monkeypatch):
    for i, (pieces, words) in enumerate((
            (['▁', 'gar', 'den', '.'], ['garden', '.']), (['▁', '.', '.', '<eos>'], ['..', 'end']),
            (['▁He', '"', '.'], ['He', '".']),
            (['▁l', "'", 'eau', '!', '?'], ["l'eau", '!?']), (['▁', '\\xf0', '\\x9f', '\\x98', '\\x80'], ['\U0001f600']),
            (['▁', '<unk>', '▁go'], ['<unk>', 'go']), (['Go', '▁3', '.', '1', '4'], ['Go', '3.14']),
            (['▁', '▁'], ['\u2423', '\u2423']))):
        monkeypatch.setitem(TABLE, f'pieces {i}', [found(f'x{i}', -0.1, pieces, ['▁x'])])
        shown.type(f'pieces {i}')
        shown.shows(f'x{i}')
        assert shown.all('#source > *') == words


def test_a_line_per_weight_joins_two_words(shown):
    expected = joined(TABLE[CATS][0], TARGETS, GROUPS)
    drawn = sorted(weight for weight in expected.flat if weight >= 0.03)
    for name, least, factor in (('stroke-opacity', 0.12, 0.88), ('stroke-width', 1, 3)):
        values = sorted(float(value) for value in shown.all('#lines path', f'getAttribute("{name}")'))
        np.testing.assert_allclose(values, [least + factor * weight for weight in drawn], atol=0.01)
    # The strongest line starts at the middle of a word of the text, and ends at the middle of one of the translation.
    ends = shown.ask("""(() => {
      const paths = [...lines.querySelectorAll("path")], of = path => Number(path.getAttribute("stroke-opacity"));
      const path = paths.reduce((a, b) => of(a) > of(b) ? a : b), {left} = lines.getBoundingClientRect();
      const word = (side, {x}) => [...document.getElementById(side).children].findIndex(node => {
        const box = node.getBoundingClientRect();
        return Math.abs(box.left + box.width / 2 - left - x) < 1;
      });
      return [word("target", path.getPointAtLength(path.getTotalLength())), word("source", path.getPointAtLength(0))];
    })()""")
    assert tuple(ends) == np.unravel_index(expected.argmax(), expected.shape)


def test_hover_and_keys_show_the_links_of_a_word(shown):
    def active():
        return shown.all('#links [aria-selected=true]')
    assert active() == [] and shown.text('#caption').startswith('Point at a word')
    shown.tab.hover('#source > :nth-child(5)')
    assert active() == ['Zürich'] and shown.text('#caption').startswith('Zürich: ')
    assert len(shown.all('#links.active path.on')) >= 1 and 'on' in shown.all('#map thead th', 'className')[4]
    shown.tab.hover('h1')
    assert active() == [] and shown.all('path.on') == []
    shown.tab.hover('#map tbody tr:nth-child(2) td:nth-child(3)')
    assert active() == ['chats']
    shown.tab.hover('h1')
    shown.tab.focus('#source > [tabindex="0"]')
    seen = [*active()]
    for key in ('ArrowRight', 'ArrowDown', 'ArrowLeft', 'ArrowUp', 'ArrowUp', 'End', 'ArrowRight', 'Home'):
        shown.tab.keyboard.press(key)
        seen += active()
    assert seen == ['The', 'cats', 'sleep', 'cats', 'The', 'The', 'end', 'end', 'The']
    shown.tab.keyboard.press('Tab')
    assert active() == ['Les']
    largest = shown.cells()[0].max()
    assert shown.ask('document.activeElement.ariaLabel').startswith(f'Les: The {largest}\xa0%')
    assert len(shown.all('#links [tabindex="0"]')) == 2


def test_a_tap_shows_the_links_of_a_word(browser, stand_in):
    page = ServePage(browser, stand_in.url, CATS, has_touch=True, viewport={'width': 360, 'height': 800})
    page.shows('Les chats dorment à Zurich.')
    for i, word in ((2, 'cats'), (4, 'in')):
        page.tab.locator(f'#source > :nth-child({i})').tap()
        assert page.all('#links [aria-selected=true]') == [word]
    page.tab.close()


def test_percentages_are_shown_on_demand(shown):
    size = 'document.querySelector("#map td:not(.zero) span").offsetWidth'
    assert shown.ask(size) == 1
    shown.tab.check('#numbers')
    assert shown.ask(size) > 5


@pytest.mark.parametrize('text', ['word ' * 300, 'W' * 10_000, 'go ' * 3333 + '.'])
def test_a_long_text_is_translated_and_its_attention_limited(shown, text):
    shown.type(text)
    shown.shows(text.upper())
    words = min(100, len(text.split()))
    assert len(shown.all('#source > *')) == len(shown.all('#map tbody tr')) == words
    assert ('Only the first 100 words' in shown.text('#attention-note')) == (words == 100)
    assert shown.ask('document.documentElement.scrollWidth <= innerWidth')
    assert shown.ask('decodeURIComponent(location.hash).length') > len(text)
    rest = ' '.join(text.split()[150:])
    assert shown.all('.note s') == ([f'{rest[:200]}…'] if rest else [])


# ---- failures --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize('status, body, line', [
    (503, '{"error": "The queue is full. Try again in 1 s."}', 'The queue is full. Try again in 1 s.'),
    (400, f'{{"error": "{EVIL}"}}', EVIL),
    (502, '<html>', 'The server failed with status 502.'),
    (200, '{}', 'The answer of the server cannot be read. Try again.'),
    (200, '{"translations": [[{"text": "x", "source": [], "tokens": ["a"], "alignment": []}]]}',
     'The answer of the server cannot be read. Try again.')])
def test_a_failure_is_one_line_and_the_text_stays(shown, stand_in, status, body, line):
    stand_in.failure = status, body
    shown.type('We go')
    shown.until('failure.textContent', line)
    assert shown.tab.input_value('#text') == 'We go' and shown.ask('failure.getAttribute("role")') == 'alert'
    assert shown.all('.line.stale > p') == ['Les chats dorment à Zurich.'] and shown.tab.is_disabled('#copy')
    stand_in.failure = None
    shown.tab.click('#retry')
    shown.shows('WE GO')
    assert shown.text('#failure') == '' and not shown.is_shown('#retry') and shown.ask('document.activeElement.id') == 'text'


def test_a_server_that_cannot_be_reached_is_named(shown):
    shown.tab.route('**/translate', lambda route: route.abort('connectionrefused'))
    shown.type('We go')
    shown.until('failure.textContent', 'The server cannot be reached. Check that it is running, then try again.')
    shown.tab.unroute('**/translate')
    shown.type('We go home')
    shown.shows('WE GO HOME')
    assert shown.text('#failure') == ''


def test_a_sentence_that_the_server_refuses_leaves_the_others(shown, stand_in):
    stand_in.refused = 'too long'
    shown.type('We go\ntoo long\nWe sleep')
    shown.until('document.querySelectorAll(".line.stale").length', 0)
    assert shown.all('.line') == ['WE GO', 'Not translated: expected at most 5 characters', 'WE SLEEP']
    assert shown.text('#failure') == '' and shown.text('#spoken') == '2 of 3 sentences are translated.'
    sent = len(stand_in.texts)
    shown.type('We go\ntoo long\nWe walk')
    shown.until('document.querySelectorAll(".line.stale").length', 0)
    assert stand_in.texts[sent:] == [['We walk']]


def test_a_token_is_requested_and_kept_for_the_session(shown, stand_in):
    stand_in.token = 'secret'
    shown.type('We go')
    shown.until('failure.textContent', 'The server requires an access token.')
    assert shown.is_shown('#login') and not shown.is_shown('#retry')
    for wrong, line in (('wrong', 'The server did not accept the access token.'),
                        ('sécret', 'The token is not valid: it must have ASCII characters only, without spaces.')):
        shown.tab.fill('#token', wrong)
        shown.tab.keyboard.press('Enter')
        shown.until('failure.textContent', line)
        assert shown.ask('sessionStorage.length') == 0 and shown.is_shown('#login')
    shown.tab.fill('#token', 'secret')
    shown.tab.click('#login button')
    shown.shows('WE GO')
    assert not shown.is_shown('#login') and shown.ask('document.activeElement.id') == 'text'
    assert shown.ask('sessionStorage.token') == 'secret' and shown.ask('localStorage.length') == 0
    shown.tab.reload()
    shown.shows('WE GO')


def test_text_and_answers_are_never_html(shown):
    shown.type(EVIL)
    shown.shows(EVIL)
    assert shown.ask('document.querySelectorAll("img, main script").length') == 0 and shown.ask('window.hacked === undefined')
    assert shown.all('#source > *') == [EVIL, EVIL] and shown.all('#target > *')[1] == '<script>hacked=1</script>'
    shown.ask('{ document.body.append(Object.assign(document.createElement("script"), {textContent: "window.hacked = 2"})) }')
    assert shown.ask('window.hacked === undefined')
    assert len(shown.failures) == 2 and all('Content Security Policy' in line for line in shown.failures)    # header and page
    shown.failures.clear()


def test_the_page_carries_its_own_policy_and_no_inline_code():
    html = (FILES / 'index.html').read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', html)[1]
    assert ' '.join(policy.split()) == POLICY.replace("; frame-ancestors 'none'", '')       # has no effect in a page
    assert not re.search(r'<style|style=|\son\w+=|javascript:', html)
    script = (FILES / 'page.js').read_text()
    assert not re.search(r'innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(', script)


# ---- address ---------------------------------------------------------------------------------------------------------

def test_the_address_keeps_the_text_so_that_a_link_can_be_shared(shown, browser, stand_in):
    text = 'We go & 50 % #1+2=3?\n\u05e9\u05dc\u05d5\u05dd \U0001f600'
    shown.type(text)
    shown.shows(text.upper())
    shown.tab.context.grant_permissions(['clipboard-read', 'clipboard-write'])
    shown.tab.click('#link')
    link = shown.ask('navigator.clipboard.readText()')
    assert link == shown.tab.url
    other = Page(browser, link)
    other.until('translation.children.length', 2)
    assert other.tab.input_value('#text') == text
    other.tab.close()
    shown.tab.goto(f'{stand_in.url}/#text=We+sleep')
    shown.shows('WE SLEEP')
    shown.tab.click('#clear')
    shown.until('location.href', f'{stand_in.url}/')
    assert shown.tab.input_value('#text') == '' and shown.ask('document.activeElement.id') == 'text'
    assert not shown.is_shown('#clear') and not shown.is_shown('#link')


def test_half_a_surrogate_pair_is_sent_as_valid_unicode(shown, stand_in):
    shown.ask('{ text.value = "go \\ud83d"; text.dispatchEvent(new InputEvent("input")) }')
    shown.shows('GO \ufffd')
    assert stand_in.texts[-1] == ['go \ufffd']


# ---- what a person sees ----------------------------------------------------------------------------------------------

# The smallest contrast of the visible text with the background, and that text.
CONTRAST = '''(() => {
  const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = color => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = color;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [[.2126, r], [.7152, g], [.0722, b]].reduce((sum, [factor, value]) =>
    sum + factor * (value <= 10 ? value / 255 / 12.92 : ((value / 255 + .055) / 1.055) ** 2.4), 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const color = rgba(getComputedStyle(node).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255];
  };
  const results = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.offsetWidth <= 1 || node.disabled) continue;
    const [a, b] = [light(rgba(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
    results.push([(a + .05) / (b + .05), walker.currentNode.data]);
  }
  return [results.length, ...results.sort((a, b) => a[0] - b[0])[0]];
})()'''


@pytest.mark.parametrize('width, scheme', [(320, 'light'), (360, 'dark'), (768, 'light'), (1280, 'dark'), (1920, 'light')])
def test_every_width_and_scheme_fits_and_has_contrast(shown, stand_in, width, scheme):
    shown.tab.set_viewport_size({'width': width, 'height': 800})
    shown.tab.emulate_media(color_scheme=scheme)
    long = 'word ' * 40 + 'W' * 60
    stand_in.refused = 'too long'
    shown.type(f'{long}\ntoo long\nThe zebra sees the okapi and the zebra.\nThe cats sleep in Zürich.')
    shown.until('document.querySelectorAll(".line:not(.stale)").length', 4)
    shown.tab.check('#scores')
    shown.tab.check('#numbers')
    fits = 'document.documentElement.scrollWidth <= innerWidth'
    for line in (1, 3, 4):
        shown.tab.click(f'.line:nth-child({line})')
        shown.tab.hover('#target > :nth-child(2)')
        count, contrast, text = shown.ask(CONTRAST)
        assert count > 20 and contrast >= 4.5, text
        assert shown.ask(fits)
        # The sentences, and the lines between them, do not overlap.
        a, b = (shown.tab.locator(f'#{side}').bounding_box() for side in ('source', 'target'))
        assert a['y'] + a['height'] < b['y'] or a['x'] + a['width'] < b['x']
    stand_in.token = 'secret'
    shown.type('We go')
    shown.until('login.hidden', False)
    count, contrast, text = shown.ask(CONTRAST)
    assert contrast >= 4.5 and shown.ask(fits), text
    background = shown.ask('getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)')
    assert (sum(background) < 150) == (scheme == 'dark')


def test_the_tab_key_visits_every_control_once_and_shows_the_focus(shown):
    shown.type('We go\n' + CATS)
    shown.shows('WE GO\nLes chats dorment à Zurich.')
    shown.tab.focus('#text')
    seen = []
    for _ in range(30):
        shown.tab.keyboard.press('Tab')
        name, outline, ring = shown.ask(
            '(() => { const node = document.activeElement, of = some => getComputedStyle(some); return ['
            'node.id || node.name || node.parentElement.id || "body", of(node).outlineStyle, '
            'of(node.closest(".choice") ?? node).outlineStyle]; })()')
        seen.append(name)
        assert name == 'body' or 'solid' in (outline, ring), name
        if name == 'body':
            break
    assert seen == ['copy', 'translation', 'translation', 'scores', 'choice', 'pieces', 'numbers', 'source', 'target',
                    'map-view', 'body']
    for _ in range(2):
        shown.tab.keyboard.press('Shift+Tab')
    shown.tab.focus('#text')
    assert shown.ask('getComputedStyle(text.closest(".card")).boxShadow') != 'none'
    shown.tab.keyboard.press('Shift+Tab')
    assert shown.ask('document.activeElement.id') == 'clear'


def test_everything_has_a_name_and_results_are_announced(shown):
    assert shown.ask('[...document.querySelectorAll("textarea, input")].filter(node => !node.labels.length).length') == 0
    assert shown.ask('[...document.querySelectorAll("button")].filter(node => !node.textContent.trim()).length') == 0
    regions = ['Words of the text', 'Words of the translation', 'Heat map']
    assert shown.all('[role=listbox], [role=region]', 'ariaLabel') == regions
    assert None not in shown.all('[role=option]', 'ariaLabel') and len(shown.all('[role=option]')) == 14
    assert shown.all('#map thead th', 'scope') == ['col'] * 7 and shown.all('#map tbody th', 'scope') == ['row'] * 7
    assert shown.ask('lines.getAttribute("aria-hidden")') == 'true'
    assert shown.ask('[spoken.ariaLive, document.documentElement.lang, document.title].join()') == 'polite,en,Translate'
    assert shown.text('#spoken').strip() == 'Translation: Les chats dorment à Zurich.'
    shown.type('We go\nWe sleep')
    shown.until('spoken.textContent', '2 of 2 sentences are translated.')


def test_motion_depends_on_the_preference(shown):
    duration = 'getComputedStyle(document.querySelector("#lines path")).transitionDuration'
    assert shown.ask(duration) == '0s'
    shown.tab.emulate_media(reduced_motion='no-preference')
    assert shown.ask(duration) == '0.12s'


def test_right_to_left_text_and_emoji_keep_their_direction(shown, monkeypatch):
    text = '\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \U0001f468\u200d\U0001f469\u200d\U0001f467'
    shown.type(text)
    shown.shows(text)
    assert shown.all('#source > *') == text.split()
    for selector in ('#text', '#source', '#translation p'):
        assert shown.ask(f'getComputedStyle(document.querySelector("{selector}")).direction') == 'rtl'
    first, second = (shown.tab.locator(f'#source > :nth-child({i})').bounding_box()['x'] for i in (1, 2))
    assert first > second
    shown.tab.focus('#source > :first-child')
    shown.tab.keyboard.press('ArrowLeft')
    assert shown.all('[aria-selected=true]') == [text.split()[1]]


# ---- the server of the package ---------------------------------------------------------------------------------------

def test_the_page_translates_with_the_server_of_the_package(browser):
    pytest.importorskip('pyops.serve.application', reason='pyops.serve cannot be imported: pip install pyops[serve]')
    from server import running
    with running() as server:
        translate_with(browser, f'http://127.0.0.1:{server.port}')


def translate_with(browser, url):
    page = ServePage(browser, url, 'I sleep now.\n<b>zzz</b>')
    page.until('document.querySelectorAll("#translation .line:not(.stale) > p:first-child").length', 2)
    assert page.all('#failure') == [''] and page.all('.note.bad') == []
    assert page.text('#model').split(' · ')[0].endswith(' ms')
    page.tab.click('.line:first-child')
    assert len(page.all('.choice')) == 3 and len(page.all('.confidence')) == 3
    rows = page.cells()
    assert rows.shape == (len(page.all('#target > *')), len(page.all('#source > *'))) and abs(rows.sum(1) - 100).max() < 10
    assert page.failures == []
    page.tab.close()


def test_the_files_of_the_page_are_small_and_need_nothing_else():
    assert sorted(path.name for path in FILES.iterdir()) == ['index.html', 'page.css', 'page.js']
    assert sum(path.stat().st_size for path in FILES.iterdir()) < 60_000
    assert not re.search(r'https?://(?!www\.w3\.org)', ''.join(path.read_text() for path in FILES.iterdir()))
