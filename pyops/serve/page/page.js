// The page of the translation server (python -m pyops serve): translate while typing, and show the attention.
// Text and the server's answers enter the document as text only, never as HTML.
'use strict';
(() => {

const $ = id => document.getElementById(id);
const DELAY = 250;              // ms from the last key to the request
const BEAM = 5, NBEST = 3;
const TEXTS = 16;               // sentences per request, so that the first translations of a long text appear early
const CACHED = 1000;            // sentences whose translations are kept
const LARGEST = 100;            // words per sentence in the links and the heat map
const VISIBLE = 0.03;           // smallest weight that is drawn as a line
const NAMED = 0.005;            // smallest weight that is named
const EMPTY = '(empty translation)';
const QUOTED = 200;             // characters of unread text that are quoted

// ---- utilities ------------------------------------------------------------------------------------------------------

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

const percent = weight => `${Math.round(100 * weight)}\u00a0%`;
const isBlank = text => !text.trim();
const same = (a, b) => a && b && a.length === b.length && a.every((value, i) => Object.is(value, b[i]));

// The token of a server that requires one.  Storage may be disabled: then the token lasts until the page is left.
let token = '';
try { token = sessionStorage.getItem('token') ?? ''; } catch { /* disabled */ }

function keepToken(value) {
  token = value;
  try { value ? sessionStorage.setItem('token', value) : sessionStorage.removeItem('token'); } catch { /* disabled */ }
}

// ---- server ---------------------------------------------------------------------------------------------------------

class Failure extends Error {
  constructor(line, status = 0) {
    super(line);
    this.status = status;
  }
}

// Return the server's answer for a list of texts.  Failure with one line for the user.
async function ask(texts, signal) {
  const headers = {'Content-Type': 'application/json'};
  if (token) headers.Authorization = `Bearer ${token}`;
  const body = JSON.stringify({texts, beam: BEAM, nbest: NBEST, alignments: true});
  let response, answer = null;
  try {
    response = await fetch('translate', {method: 'POST', headers, body, signal, cache: 'no-store'});
    answer = await response.json();
  } catch {
    if (!response) throw new Failure('The server cannot be reached. Check that it is running, then try again.');
  }
  const {ok, status} = response, line = answer?.error;
  if (status === 401) {
    throw new Failure(token ? 'The server did not accept the access token.' : 'The server requires an access token.', status);
  }
  if (!ok) throw new Failure(typeof line === 'string' ? line : `The server failed with status ${status}.`, status);
  if (!isAnswer(answer, texts.length)) throw new Failure('The answer of the server cannot be read. Try again.');
  return answer;
}

function isAnswer(answer, size) {
  return Array.isArray(answer?.translations) && answer.translations.length === size && answer.translations.every(found =>
    Array.isArray(found) && found.length && found.every(some => typeof some?.text === 'string'
      && Array.isArray(some.source) && Array.isArray(some.tokens)
      && (!some.alignment || some.alignment.length === some.tokens.length
          && some.alignment.every(row => row?.length === some.source.length))));
}

// ---- sentences ------------------------------------------------------------------------------------------------------

// lines: a sentence per line of the text: {text, found: its translations, refusal: why there are none, isStale: the
// translations belong to an earlier text}
// selected: the line whose alternatives and attention are shown
let lines = [], selected = 0;
const cache = new Map();        // text -> {found} or {refusal}
const choices = new Map();      // text -> number of the chosen alternative
let pending = null;             // AbortController of the request in progress
let model = '';                 // of the last answer, as JSON
let timer = 0, busyTimer = 0;

const chosen = line => line.found && Math.min(choices.get(line.text) ?? 0, line.found.length - 1);
const translationOf = line => line.found?.[chosen(line)];

// Read the text, show the translations that are known, and request the others.
function read(delay = DELAY) {
  const texts = $('text').value.split('\n'), old = lines.length === texts.length ? lines : [];
  lines = texts.map((text, i) => isBlank(text) ? {text} : cache.has(text) ? {text, ...cache.get(text)}
    : {text, found: old[i]?.found, isStale: true});
  pending?.abort();
  pending = null;
  busy(false);
  follow();
  clearTimeout(timer);
  timer = setTimeout(() => { keepAddress(); translate(); }, delay);
}

async function translate() {
  const texts = [...new Set(lines.filter(line => line.isStale).map(line => line.text))], queue = [];
  for (let i = 0; i < texts.length; i += TEXTS) queue.push(texts.slice(i, i + TEXTS));
  pending?.abort();
  clearTimeout(timer);
  if (!queue.length) return fail(null);
  const controller = pending = new AbortController();
  let failure = null;
  busy(true);
  while (queue.length && !failure) {
    const some = queue.shift();
    try {
      const answer = await ask(some.map(text => text.toWellFormed?.() ?? text), controller.signal);
      const isSame = !model || model === JSON.stringify(answer.model);
      model = JSON.stringify(answer.model);
      if (!isSame && pending === controller) {            // the server has another model now
        cache.clear();
        return read(0);
      }
      some.forEach((text, i) => cache.set(text, {found: answer.translations[i]}));
      $('model').textContent = [`${Math.round(answer.milliseconds)} ms`, answer.model?.kind, answer.model?.checkpoint]
        .filter(part => part).join(' \u00b7 ');
    } catch (error) {
      // Too many or too long texts: find the sentence that the server does not accept, and translate the others.
      if (![413, 422].includes(error.status)) failure = error;
      else if (some.length > 1) queue.unshift(...some.map(text => [text]));
      else cache.set(some[0], {refusal: error.message.replace('texts[0]: ', '')});
    }
    if (pending !== controller) return;                   // the text has changed
    lines = lines.map(line => line.isStale && cache.has(line.text) ? {text: line.text, ...cache.get(line.text)} : line);
    show();
  }
  pending = null;
  busy(false);
  fail(failure);
  if (!failure) speak();
  trim();
}

function trim() {
  if (cache.size <= CACHED) return;
  const texts = new Set(lines.map(line => line.text));
  for (const text of cache.keys()) {
    if (texts.has(text)) continue;
    cache.delete(text);
    choices.delete(text);
  }
}

function busy(isBusy) {
  clearTimeout(busyTimer);
  if (isBusy) busyTimer = setTimeout(() => { $('busy').hidden = false; }, 300);
  else $('busy').hidden = true;
}

function fail(error) {
  if (error && !(error instanceof Failure)) throw error;
  $('failure').textContent = error?.message ?? '';
  const hadFocus = document.activeElement.closest('#login, #retry');
  $('login').hidden = error?.status !== 401;
  $('retry').hidden = !error || error.status === 401;
  if (hadFocus?.hidden) $('text').focus();
  if (error?.status === 401) keepToken('');
}

// Announce the result to screen readers.
function speak() {
  const sentences = lines.filter(line => !isBlank(line.text)), [line] = sentences;
  const found = sentences.filter(some => some.found).length;
  $('spoken').textContent = sentences.length > 1 ? `${found} of ${sentences.length} sentences are translated.`
    : ['Translation:', translationOf(line)?.text, ...notes(line).map(note => note.textContent)].join(' ');
}

// Select the line of the caret, or, if it is blank, the nearest sentence before or after it.
function follow() {
  const at = $('text').value.slice(0, $('text').selectionStart).split('\n').length - 1;
  const isSentence = line => line && !isBlank(line.text);
  const before = lines.findLastIndex((line, i) => i <= at && isSentence(line));
  selected = before >= 0 ? before : Math.max(0, lines.findIndex(isSentence));
  show();
}

// ---- address --------------------------------------------------------------------------------------------------------

const textOfAddress = () => new URLSearchParams(location.hash.slice(1)).get('text') ?? '';

function keepAddress() {
  const text = $('text').value;
  if (text === textOfAddress()) return;
  const address = text ? `#${new URLSearchParams({text})}` : location.pathname + location.search;
  try { history.replaceState(null, '', address); } catch { /* Safari allows 100 changes in 30 s */ }
}

function loadAddress() {
  $('text').value = textOfAddress();
  read(0);
}

// ---- tokens ---------------------------------------------------------------------------------------------------------

const END = '<eos>', UNKNOWN = '<unk>', SPACE = '\u2581';

// Return the unknown words of a text in their order, with repetitions.  Tokenizers read words either as they are or in lower
// case with punctuation set apart.
function unknownWords(text, unknown) {
  for (const words of [text.toLowerCase().replace(/[,.!?]/g, ' $& '), text]) {
    const found = words.split(/\s+/).filter(word => unknown.includes(word));
    if (found.length) return found;
  }
  return [];
}

// A byte that is not UTF-8 by itself is a token like \xe2.
const joinBytes = text => text.replace(/(?:\\x[89a-f][0-9a-f])+/g, run =>
  new TextDecoder().decode(Uint8Array.from(run.slice(2).split('\\x'), byte => parseInt(byte, 16))));

// Return the units to show for a list of tokens: {text, kind, tokens: their numbers}.  A unit is a word, or a token if
// `isSplit`.  In a list with pieces, a piece that starts a word has the mark SPACE; punctuation after a word is a unit.
function units(tokens, hasPieces, isSplit, unknown) {
  const groups = [];
  tokens.forEach((text, i) => {
    const isStart = !hasPieces || isSplit || text.startsWith(SPACE) || text === END || !groups.length;
    isStart ? groups.push([i]) : groups.at(-1).push(i);
  });
  const isPunctuation = i => /^[.,;:!?\u2026'")\]\u00bb\u2019\u201d\u060c\u061f\u3001\u3002]+$/.test(tokens[i]);
  const names = [...unknown];
  const parts = groups.flatMap(group => {
    const end = group.findLastIndex(i => !isPunctuation(i) && tokens[i] !== SPACE) + 1;
    return end && end < group.length ? [group.slice(0, end), group.slice(end)] : [group];
  });
  return parts.map(group => {
    const text = group.map(i => tokens[i]).join('');
    if (text === END) return {text: 'end', kind: 'mark', tokens: group};
    if (text.includes(UNKNOWN)) return {text: names.shift() ?? text.replace(SPACE, ''), kind: 'unknown', tokens: group};
    return {text: isSplit || !hasPieces ? text : joinBytes(text).replaceAll(SPACE, '') || '\u2423', kind: '', tokens: group};
  });
}

const hasPieces = some => [...some.source, ...some.tokens].some(token => token.includes(SPACE));

// Return the part of a text that the model did not read; null if it cannot be determined.
function unread(text, some) {
  const squash = part => part.replace(/\s+/g, '').replace(/[\u2018\u2019\u02bc]/g, "'").replace(/[\u201c\u201d]/g, '"')
    .toLowerCase();
  const words = units(some.source, hasPieces(some), false, unknownWords(text, some.unknown ?? []));
  const whole = text.normalize('NFC'), start = squash(words.map(word => word.text).join(''));
  let seen = '', end = 0;
  for (const letter of whole) {
    if (seen.length >= start.length) break;
    seen += squash(letter);
    end += letter.length;
  }
  return seen === start ? whole.slice(end).trim() : null;
}

// Return the weights (words of the translation, words of the text): the mean over the pieces of a word of the translation,
// the sum over the tokens of a word of the text, so that rows still sum to 1.
function joinWeights(alignment, targets, sources) {
  return targets.map(target => sources.map(source => {
    let sum = 0;
    for (const i of target.tokens) for (const j of source.tokens) sum += alignment[i][j];
    return sum / target.tokens.length;
  }));
}

// ---- translations ---------------------------------------------------------------------------------------------------

function show() {
  const output = $('translation'), isSingle = lines.length === 1;
  while (output.children.length > lines.length) output.lastChild.remove();
  while (output.children.length < lines.length) output.append(element('div', {className: 'line'}));
  lines.forEach((line, i) => {
    const node = output.children[i], state = [line.text, line.found, chosen(line), line.isStale, isSingle, i === selected];
    if (!same(node.state, state)) showLine(node, line, i, isSingle);
    node.state = state;
  });
  if (isSingle && isBlank(lines[0].text)) {
    output.firstChild.replaceChildren(element('p', {className: 'none', textContent: 'The translation appears here.'}));
  }
  $('clear').hidden = $('link').hidden = !$('text').value;
  $('copy').hidden = !lines.some(line => line.found);
  $('copy').disabled = lines.some(line => line.isStale);
  showAlternatives(lines[selected]);
  showAttention(lines[selected]);
}

function showLine(node, line, i, isSingle) {
  node.replaceChildren();
  node.className = `line${isSingle ? ' single' : ''}${line.isStale ? ' stale' : ''}`;
  const isButton = !isSingle && !isBlank(line.text);
  for (const [name, value] of [['role', 'button'], ['tabindex', '0'], ['aria-pressed', String(i === selected)]]) {
    isButton ? node.setAttribute(name, value) : node.removeAttribute(name);
  }
  if (!line.found) return node.append(...notes(line));
  const {text} = translationOf(line), sentence = element('p', {dir: 'auto', lang: ''});
  text.split(UNKNOWN).forEach((part, n) => {
    if (n) sentence.append(element('mark', {className: 'unknown', title: 'unknown word', textContent: UNKNOWN}));
    sentence.append(part);
  });
  if (!text) sentence.append(element('span', {className: 'none', textContent: EMPTY}));
  node.append(sentence, ...(line.isStale ? [] : notes(line)));
}

// Return lines about unknown words, text that was not read, and a text that the server did not accept.
function notes(line) {
  const some = translationOf(line), result = [];
  if (line.refusal) result.push(element('p', {className: 'note bad', textContent: `Not translated: ${line.refusal}`}));
  if (some?.unknown?.length) {
    const words = some.unknown.map(word => element('bdi', {className: 'unknown', textContent: word}));
    result.push(element('p', {className: 'note'}, 'Unknown to the model: ',
                        ...words.flatMap((word, i) => i ? [', ', word] : [word])));
  }
  if (some?.cut) {
    const rest = unread(line.text, some), note = element('p', {className: 'note'});
    const start = 'Too long for the model, which did not read';
    if (rest) note.append(`${start}: `, element('s', {dir: 'auto', textContent: quoted(rest)}));
    else if (rest === null) note.append(`${start} the last ${some.cut} tokens.`);
    else note.append('This sentence is as long as the model can read.');
    result.push(note);
  }
  return result;
}

const quoted = text => text.length > QUOTED ? `${text.slice(0, QUOTED)}\u2026` : text;

// Describe a score, the mean log probability of the tokens.
function confidence(score) {
  const probability = Math.min(1, Math.exp(score));
  const level = probability >= 0.8 ? 'high' : probability >= 0.5 ? 'medium' : 'low';
  return {level, full: {high: 3, medium: 2, low: 1}[level], text: `${level[0].toUpperCase()}${level.slice(1)} confidence`,
          numbers: `${percent(probability)} per token, score ${score.toFixed(3).replace('-', '\u2212')}`};
}

function showAlternatives(line) {
  const node = $('alternatives'), found = line.found ?? [];
  node.hidden = !found.some(some => some.tokens.length);
  node.className = line.isStale ? 'stale' : '';
  if (node.hidden) return;
  if (node.found !== found) {
    node.found = found;
    $('choices').replaceChildren(...found.map((some, i) => choiceOf(some, i)));
  }
  $('choices').querySelectorAll('input').forEach((input, i) => {
    input.checked = i === chosen(line);
    input.disabled = Boolean(line.isStale);
  });
}

function choiceOf(some, i) {
  const label = element('label', {className: 'choice'}, element('input', {type: 'radio', name: 'choice', value: i}),
                        element('span', {dir: 'auto', lang: '', textContent: some.text || EMPTY}));
  if (typeof some.score === 'number') {
    const {level, full, text, numbers} = confidence(some.score), dots = [0, 1, 2].map(n =>
      element('i', {className: n < full ? 'full' : ''}));
    label.append(element('span', {className: `confidence ${level}`}, ...dots, text),
                 element('span', {className: 'score', textContent: numbers}));
  }
  return label;
}

// ---- attention ------------------------------------------------------------------------------------------------------

// view: what the attention section shows: {source, target: the words, weights, nodes: {source, target}, paths, rows, columns}
// active: the word whose links are shown, {side, i} or null
let view = null, active = null;

function showAttention(line) {
  const some = translationOf(line), section = $('attention');
  section.hidden = !some?.tokens.length || !some.source.length;
  section.classList.toggle('stale', Boolean(line.isStale));
  if (section.hidden || section.state?.some === some && section.state.isSplit === $('pieces').checked) return;
  const pieces = hasPieces(some), isSplit = pieces && $('pieces').checked;
  section.state = {some, isSplit: $('pieces').checked};
  $('pieces-label').hidden = !pieces;
  $('numbers-label').hidden = $('views').hidden = !some.alignment;
  if (!some.alignment) {
    $('attention-note').textContent = 'This model has no attention to show.';
    return;
  }
  const source = units(some.source, pieces, isSplit, unknownWords(line.text, some.unknown ?? [])).slice(0, LARGEST);
  const target = units(some.tokens, pieces, isSplit, []).slice(0, LARGEST);
  const isCut = source.at(-1).tokens.at(-1) < some.source.length - 1 || target.at(-1).tokens.at(-1) < some.tokens.length - 1;
  $('attention-note').textContent = 'How much each word of the translation attends to each word of the text.'
    + (isCut ? ` Only the first ${LARGEST} words of each sentence are shown.` : '');
  view = {source, target, weights: joinWeights(some.alignment, target, source), nodes: {}};
  active = null;
  showWords();
  showMap();
  layOut();
  mark();
}

// Return [{i, weight}] of the words on the other side, the largest weight first.
function linksOf(side, i) {
  const weights = side === 'target' ? view.weights[i] : view.weights.map(row => row[i]);
  return weights.map((weight, n) => ({i: n, weight})).filter(link => link.weight >= NAMED).sort((a, b) => b.weight - a.weight);
}

const otherSide = side => side === 'source' ? 'target' : 'source';
const wordOf = ({text, kind}) => kind === 'mark' ? '(end)' : text;

function describe(side, i) {
  const links = linksOf(side, i).slice(0, 4).map(link => `${wordOf(view[otherSide(side)][link.i])} ${percent(link.weight)}`);
  const word = wordOf(view[side][i]) + (view[side][i].kind === 'unknown' ? ', unknown word' : '');
  return `${word}: ${links.join(', ') || 'no connection'}`;
}

function showWords() {
  for (const side of ['source', 'target']) {
    view.nodes[side] = view[side].map((unit, i) => {
      const node = element('span', {className: unit.kind, textContent: unit.text, tabIndex: i ? -1 : 0});
      if (unit.text.length > 20) node.title = unit.text;
      node.setAttribute('role', 'option');
      node.setAttribute('aria-selected', 'false');
      node.setAttribute('aria-label', describe(side, i));
      return node;
    });
    $(side).replaceChildren(...view.nodes[side]);
  }
  view.paths = [];
  view.weights.forEach((row, target) => row.forEach((weight, source) => {
    if (weight < VISIBLE) return;
    const path = document.createElementNS('http://www.w3.org/2000/svg', 'path');
    path.setAttribute('stroke-width', (1 + 3 * weight).toFixed(2));
    path.setAttribute('stroke-opacity', (0.12 + 0.88 * weight).toFixed(3));
    view.paths.push({path, source, target});
  }));
  $('lines').replaceChildren(...view.paths.map(({path}) => path));
}

// Place one sentence above the other if both fit, with the heat map beside or below them, else side by side.  Draw the lines
// between their words.
function layOut() {
  if (!view || $('attention').hidden) return;
  const box = $('links');
  const arrange = (isPair, isAcross) => {
    $('views').classList.toggle('pair', isPair);
    box.classList.toggle('across', isAcross);
    box.classList.toggle('down', !isAcross);
    for (const side of ['source', 'target']) $(side).ariaOrientation = isAcross ? 'horizontal' : 'vertical';
    return ['source', 'target'].every(side => $(side).offsetWidth <= box.clientWidth);
  };
  const isAcross = arrange(true, true) || arrange(false, true);
  if (!isAcross) arrange(view.source.length <= 20, false);
  const origin = box.getBoundingClientRect();
  const boxes = side => view.nodes[side].map(node => node.getBoundingClientRect());
  const from = boxes('source'), to = boxes('target');
  for (const {path, source, target} of view.paths) {
    const a = from[source], b = to[target];
    if (isAcross) {
      const x = [a, b].map(rect => rect.left + rect.width / 2 - origin.left), y = [a.bottom - origin.top, b.top - origin.top];
      const half = (y[0] + y[1]) / 2;
      path.setAttribute('d', `M${x[0]} ${y[0]}C${x[0]} ${half} ${x[1]} ${half} ${x[1]} ${y[1]}`);
    } else {
      const x = [a.right - origin.left, b.left - origin.left];
      const y = [a, b].map(rect => rect.top + rect.height / 2 - origin.top), half = (x[0] + x[1]) / 2;
      path.setAttribute('d', `M${x[0]} ${y[0]}C${half} ${y[0]} ${half} ${y[1]} ${x[1]} ${y[1]}`);
    }
  }
}

function showMap() {
  const {source, target, weights} = view, map = $('map');
  view.columns = source.map(unit => element('th', {scope: 'col', className: unit.kind},
                                            element('span', {dir: 'auto', textContent: unit.text})));
  view.rows = target.map((unit, i) => {
    const row = element('tr', {}, element('th', {scope: 'row', dir: 'auto', className: unit.kind, textContent: unit.text}));
    for (const weight of weights[i]) {
      const number = element('span', {textContent: String(Math.round(100 * weight))});
      const cell = element('td', {className: weight < NAMED ? 'zero' : ''}, number);
      cell.style.setProperty('--weight', percent(weight).replace('\u00a0', ''));
      row.append(cell);
    }
    return row;
  });
  map.replaceChildren(element('thead', {}, element('tr', {}, element('td'), ...view.columns)),
                      element('tbody', {}, ...view.rows));
  map.style.setProperty('--columns', source.length);
}

// Show the links of the active word in the lines, the heat map and the caption.
function mark() {
  const links = active ? linksOf(active.side, active.i) : [], other = active && otherSide(active.side);
  const linked = new Set(links.filter(link => link.weight >= VISIBLE).map(link => link.i));
  const isOn = (side, i) => active && (side === active.side ? i === active.i : linked.has(i));
  $('links').classList.toggle('active', Boolean(active));
  for (const side of ['source', 'target']) {
    view.nodes[side].forEach((node, i) => {
      node.classList.toggle('on', Boolean(isOn(side, i)));
      node.setAttribute('aria-selected', String(Boolean(active && side === active.side && i === active.i)));
    });
  }
  for (const {path, ...ends} of view.paths) path.classList.toggle('on', Boolean(active && ends[active.side] === active.i));
  view.columns.forEach((node, i) => node.classList.toggle('on', Boolean(isOn('source', i))));
  view.rows.forEach((node, i) => node.firstChild.classList.toggle('on', Boolean(isOn('target', i))));
  const caption = $('caption');
  if (!active) {
    caption.textContent = 'Point at a word, or select it, to see its connections.';
    return;
  }
  caption.replaceChildren(element('b', {}, element('bdi', {textContent: wordOf(view[active.side][active.i])})), ': ',
    ...links.slice(0, 6).flatMap((link, n) => [n ? ', ' : '', element('bdi', {textContent: wordOf(view[other][link.i])}),
                                               ` ${percent(link.weight)}`]), links.length ? '' : 'no connection');
}

function activate(side, i) {
  active = side ? {side, i} : null;
  mark();
}

const focused = () => {
  for (const side of ['source', 'target']) {
    const i = view?.nodes[side].indexOf(document.activeElement) ?? -1;
    if (i >= 0) return [side, i];
  }
  return [];
};

// ---- events ---------------------------------------------------------------------------------------------------------

for (const side of ['source', 'target']) {
  const box = $(side), at = event => view.nodes[side].indexOf(event.target);
  box.addEventListener('pointerover', event => { if (at(event) >= 0) activate(side, at(event)); });
  box.addEventListener('pointerleave', () => activate(...focused()));
  box.addEventListener('focusin', event => {
    view.nodes[side].forEach((node, i) => { node.tabIndex = i === at(event) ? 0 : -1; });
    activate(side, at(event));
  });
  box.addEventListener('focusout', () => activate(null));
  box.addEventListener('keydown', event => {
    const nodes = view.nodes[side], i = at(event), isRightToLeft = getComputedStyle(box).direction === 'rtl';
    const step = {ArrowDown: 1, ArrowUp: -1, ArrowRight: isRightToLeft ? -1 : 1, ArrowLeft: isRightToLeft ? 1 : -1}[event.key];
    const next = event.key === 'Home' ? 0 : event.key === 'End' ? nodes.length - 1 : step && i + step;
    if (next === undefined) return;
    event.preventDefault();
    nodes[next]?.focus();
  });
}

$('map').addEventListener('pointerover', event => {
  const i = view.rows.indexOf(event.target.closest('tr'));
  activate(...(i >= 0 ? ['target', i] : []));
});
$('map').addEventListener('pointerleave', () => activate(...focused()));

$('text').addEventListener('input', event => { if (!event.isComposing) read(); });
$('text').addEventListener('compositionend', () => read());
document.addEventListener('selectionchange', () => {
  if (document.activeElement === $('text') && lines.length > 1 && $('text').value.split('\n').length === lines.length) follow();
});

function select(node) {
  selected = [...$('translation').children].indexOf(node);
  show();
}
$('translation').addEventListener('click', event => {
  const node = event.target.closest('[role=button]');
  if (node) select(node);
});
$('translation').addEventListener('keydown', event => {
  if (event.target.role !== 'button' || !['Enter', ' '].includes(event.key)) return;
  event.preventDefault();
  select(event.target);
});

$('choices').addEventListener('change', event => {
  choices.set(lines[selected].text, Number(event.target.value));
  show();
});
$('pieces').addEventListener('change', show);
$('numbers').addEventListener('change', () => $('map').classList.toggle('numbered', $('numbers').checked));
$('retry').addEventListener('click', translate);
$('clear').addEventListener('click', () => { $('text').value = ''; read(0); $('text').focus(); });
$('login').addEventListener('submit', event => {
  event.preventDefault();
  const value = $('token').value.trim();
  $('token').value = '';
  if (!/^[\x21-\x7e]+$/.test(value)) {
    return fail(new Failure('The token is not valid: it must have ASCII characters only, without spaces.', 401));
  }
  keepToken(value);
  translate();
});

// Copy text.  Pages without HTTPS have no clipboard API, except on localhost.
async function copy(text, button) {
  const label = button.dataset.label ??= button.textContent;
  let isCopied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element('textarea', {value: text, className: 'unseen'});
    document.body.append(area);
    area.select();
    isCopied = document.execCommand('copy');
    area.remove();
    button.focus();
  }
  button.textContent = $('spoken').textContent = isCopied ? 'Copied' : 'Copying failed';
  setTimeout(() => { button.textContent = label; }, 1500);
}
$('copy').addEventListener('click', event => copy(lines.map(line => translationOf(line)?.text ?? '').join('\n'), event.target));
$('link').addEventListener('click', event => { keepAddress(); copy(location.href, event.target); });

let width = 0;
new ResizeObserver(([{contentRect}]) => {
  if (contentRect.width === width) return;
  width = contentRect.width;
  requestAnimationFrame(layOut);
}).observe($('views'));
addEventListener('hashchange', () => { if (textOfAddress() !== $('text').value) loadAddress(); });
loadAddress();

})();
