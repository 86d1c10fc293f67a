// The page of saved tensors.  The location hash holds the selection, and everything on the screen is derived from it.
// A page in a file contains its data (pyops/inspect/page.py); a live page fetches them from a server (pyops/inspect/serve.py).
// Names and words come from untrusted files: they enter the document as text only, and Plotly through `escaped`.
'use strict';
(() => {

const $ = id => document.getElementById(id);
const head = JSON.parse($('data').textContent);
const NEWEST = '';
const ROWS = 250;                       // table rows before "Show more"
const POLL = 1000;                      // ms between requests to the server

// ---- utilities ------------------------------------------------------------------------------------------------------

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

// Escape text for Plotly, which interprets some HTML.
const escaped = text => String(text).replace(/[&<>"']/g, letter => `&#${letter.charCodeAt(0)};`);

const number = value => value === 'inf' ? Infinity : value === '-inf' ? -Infinity : value;

function shown(value, digits = 4) {
  value = number(value);
  if (value === null || value === undefined || Number.isNaN(value)) return '\u2013';
  if (value === Infinity) return '\u221e';
  if (value === -Infinity) return '\u2212\u221e';
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return String(value).replace('-', '\u2212');
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(digits - 2) : String(+value.toPrecision(digits));
  return text.replaceAll('-', '\u2212');
}

// Format a power of two, with a superscript exponent if that is shorter.
function power(value) {
  const exponent = Math.log2(value);
  if (Math.abs(exponent) < 5) return shown(value);
  const superscript = {'-': '\u207b', 0: '\u2070', 1: '\u00b9', 2: '\u00b2', 3: '\u00b3', 4: '\u2074', 5: '\u2075', 6: '\u2076',
                       7: '\u2077', 8: '\u2078', 9: '\u2079'};
  return '2' + [...String(Math.round(exponent))].map(letter => superscript[letter]).join('');
}

function bytesOf(text) {
  return Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
}

// Decode base64 of little-endian float16 and multiply by the scale.
function floats({values, scale}) {
  const bytes = bytesOf(values), result = new Float32Array(bytes.length / 2);
  for (let i = 0; i < result.length; i++) {
    const word = bytes[2 * i] | bytes[2 * i + 1] << 8, exponent = word >> 10 & 31, fraction = word & 1023;
    const size = exponent === 31 ? (fraction ? NaN : Infinity)
      : exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24;
    result[i] = (word & 0x8000 ? -size : size) * scale;
  }
  return result;
}

function matrix(numbers, rows, columns, start = 0) {
  return Array.from({length: rows}, (_, row) => numbers.subarray(start + row * columns, start + (row + 1) * columns));
}

async function inflate(text) {
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream('deflate'));
  return JSON.parse(await new Response(stream).text());
}

// ---- data -----------------------------------------------------------------------------------------------------------

// tensors: by id;  tree: layer -> role -> step -> [tensors];  quality: format -> id -> error measures
// serial: identifies the folder that the server reads;  edition: number of updates
const data = {run: {}, steps: [], skipped: [], formats: head.formats, omissions: [], serial: '', edition: 0};

function clear() {
  Object.assign(data, {tensors: [], tree: new Map(), quality: new Map(), pictured: null, pending: 0, waiting: '',
                       hasRuns: false, partings: null, partingsKey: ''});
}

const roleOf = tensor => `${tensor.operation}.${tensor.name}`;

function branch(map, key, make) {
  if (!map.has(key)) map.set(key, make());
  return map.get(key);
}

// nth: number of earlier tensors with the same properties
function add(tensor) {
  data.tensors[tensor.id] = tensor;
  data.hasRuns ||= tensor.run > 0;
  const roles = branch(data.tree, tensor.layer, () => new Map());
  const steps = branch(roles, roleOf(tensor), () => new Map());
  const copies = branch(steps, tensor.step, () => []);
  tensor.nth = copies.filter(other => instanceOf(other) === instanceOf(tensor)).length;
  copies.push(tensor);
}

function addQuality(format, id, numbers) {
  branch(data.quality, format, () => new Map()).set(id, numbers);
}

const qualityOf = (tensor, format) => data.quality.get(format)?.get(tensor.id);
const measure = (numbers, name) => numbers ? number(numbers[head.quality.indexOf(name)]) : undefined;
const statistic = (tensor, name) => tensor.statistics ? number(tensor.statistics[head.description.indexOf(name)]) : undefined;

// The data embedded in a file.
const embedded = {
  async start() {
    const all = await inflate($('catalogue').textContent);
    clear();
    const {run, steps, skipped, omissions, tensors, quality, partings} = all;
    Object.assign(data, {run, steps, skipped, omissions, partings, pictured: new Set(all.pictured)});
    tensors.forEach(add);
    for (const format in quality) quality[format].forEach((numbers, id) => addQuality(format, id, numbers));
    redraw();
  },
  async detail(tensor) {
    const part = $(`t${tensor.id}`);
    return part ? inflate(part.textContent) : null;
  },
  async attention(tensor) {
    return (await cached(tensor)).attention;
  },
};

// The data of a server, polled.
const live = {
  version: 0,
  async start() {
    clear();
    for (;;) {
      let wait = POLL;
      try {
        wait = await this.ask();
        connection(true);
      } catch {
        connection(false);
      }
      await new Promise(resolve => setTimeout(resolve, wait));
    }
  },
  async get(path, query) {
    const signal = AbortSignal.timeout(30000);
    const answer = await fetch(`${path}?${new URLSearchParams(query)}`, {cache: 'no-store', signal});
    if (!answer.ok) throw new Error((await answer.text()).trim() || answer.statusText);
    return answer.json();
  },
  async ask() {
    const news = await this.get('changes', {serial: data.serial, after: this.version, format: choice().format,
                                            partings: data.partingsKey});
    if (news.serial !== data.serial) {          // the server was restarted or the folder was replaced
      clear();
      details.clear();
      data.serial = news.serial;
      delete document.documentElement.dataset.drawn;
    }
    const rows = news.tensors.length || news.quality.length || news.formats.length !== data.formats.length
      || news.waiting !== data.waiting;
    const curves = JSON.stringify(news.steps) !== JSON.stringify(data.steps);
    this.version = news.version;
    const {run, steps, skipped, formats, pending, waiting} = news;
    Object.assign(data, {run, steps, skipped, formats, pending, waiting});
    news.tensors.forEach(add);
    for (const [format, id, numbers, statistics] of news.quality) {
      addQuality(format, id, numbers);
      data.tensors[id].statistics ??= statistics;
    }
    if (news.partings) Object.assign(data, {partings: news.partings, partingsKey: news.partings.key});
    data.edition++;
    if (rows || news.partings || !document.documentElement.dataset.drawn) redraw();
    else if (curves) drawTraining(choice(), resolve(choice()));
    return news.more ? 0 : POLL;
  },
  detail(tensor, format) {
    return this.get('detail', {serial: data.serial, id: tensor.id, format});
  },
  window(tensor, format, corners) {
    return this.get('detail', {serial: data.serial, id: tensor.id, format, window: corners.join(',')});
  },
  attention(tensor, sentence) {
    return this.get('attention', {serial: data.serial, id: tensor.id, sentence});
  },
};

const source = head.live ? live : embedded;

// A cache of recent details, as promises.
const details = new Map();

function cached(tensor, format = '', name = 'detail', ...more) {
  const key = [tensor.id, head.live ? format : '', name, ...(head.live ? more : [])].join();
  if (!details.has(key)) {
    const promise = Promise.resolve(name === 'detail' ? source.detail(tensor, format) : source[name](tensor, ...more));
    promise.catch(() => details.delete(key));
    details.set(key, promise);
    if (details.size > 24) details.delete(details.keys().next().value);
  }
  return details.get(key);
}

function connection(works) {
  const status = $('status');
  const text = works ? data.waiting || (data.pending ? `live, ${data.pending} tensors not measured yet` : 'live')
    : 'connection lost; retrying';
  status.hidden = false;
  status.classList.toggle('lost', !works);
  if (status.textContent !== text) status.textContent = text;
}

// ---- selection ------------------------------------------------------------------------------------------------------

// The values of an empty hash; `resolve` replaces missing and invalid values.
const DEFAULTS = {layer: '', role: '', step: NEWEST, copy: '', format: '', view: 'values', flow: '', attention: '',
                  sentence: '0', head: '0', sort: 'sqnr_db', order: 'ascending', words: '', stat: 'rms', counts: 'log'};

function choice() {
  const given = new URLSearchParams(location.hash.slice(1)), result = {...DEFAULTS};
  for (const key in DEFAULTS) if (given.has(key)) result[key] = given.get(key);
  if (!data.formats.some(format => format.name === result.format)) result.format = preferred();
  return result;
}

// The format that the run used, or the first one.
function preferred() {
  const used = (data.tensors ?? []).find(tensor => tensor && tensor.format !== 'fp32');
  return (data.formats.find(format => format.name === used?.format) ?? data.formats[0]).name;
}

// Change the selection.  replace: add no entry to the browser history.
function choose(changes, replace = false) {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const key in changes) {
    if (changes[key] === DEFAULTS[key]) given.delete(key);
    else given.set(key, changes[key]);
  }
  const hash = `#${given}`;
  if (hash === (location.hash || '#')) return;
  if (replace) {
    history.replaceState(null, '', hash);
    redraw();
  } else {
    location.hash = hash;
  }
}

const sortedSteps = steps => [...steps.keys()].sort((a, b) => a - b);

// Return the selected tensor and the options of all controls.
function resolve(chosen) {
  const layers = [...data.tree.keys()];
  if (!layers.length) return null;
  const layer = data.tree.has(chosen.layer) ? chosen.layer : layers[0];
  const roles = [...data.tree.get(layer).keys()];
  const [operation] = chosen.role.split('.');
  const role = roles.includes(chosen.role) ? chosen.role : roles.find(name => name.split('.')[0] === operation) ?? roles[0];
  const steps = sortedSteps(data.tree.get(layer).get(role));
  // if the tensor was not saved at this step: the last step before it
  const limit = chosen.step === NEWEST ? Infinity : Number(chosen.step);
  const step = steps.findLast(value => value <= limit) ?? steps[0];
  const copies = data.tree.get(layer).get(role).get(step);
  const tensor = copies.find(item => copyOf(item) === chosen.copy) ?? copies.find(item => runOf(item) === runOf(copies.at(-1)));
  return {layers, layer, roles, role, steps, step, copies, tensor};
}

// Several tensors can share layer, role and step: time steps of a GRU, runs saved to one folder, ranks in subfolders or names.
const runOf = tensor => `${tensor.folder}.${tensor.run}`;
const instanceOf = tensor => [runOf(tensor), tensor.place, tensor.time ?? ''].join('.');

function copyOf(tensor) {
  const {place, time, nth} = tensor, last = time === null ? `n${nth}` : nth ? `t${time}.${nth}` : `t${time}`;
  return [runOf(tensor), ...place ? [place] : [], last].join('.');
}

// The subfolder, the run if there are several, and the tags of a tensor.
function placeOf(tensor) {
  return [tensor.folder, data.hasRuns ? `run ${tensor.run + 1}` : '', tensor.placeInFolder].filter(Boolean).join(', ');
}

function copyLabel(tensor, _, copies) {
  const isAlone = copies.filter(other => instanceOf(other) === instanceOf(tensor)).length < 2;
  const time = tensor.time === null ? '' : `time step ${tensor.time}`, place = placeOf(tensor);
  return [time, isAlone && (time || place) ? '' : `number ${tensor.counter}`, place].filter(Boolean).join(', ');
}

function fill(select, options, value) {
  const same = select.options.length === options.length
    && options.every(([key, label], i) => select.options[i].value === key && select.options[i].text === label);
  if (!same) select.replaceChildren(...options.map(([key, label]) => new Option(label, key)));
  select.value = value;
}

const roleLabel = role => role.replace('.', ' \u00b7 ');

function drawControls(chosen, found) {
  for (const id of ['layer', 'role', 'step', 'format']) $(id).disabled = !found;
  $('copies').hidden = !found || found.copies.length < 2;
  fill($('format'), data.formats.map(format => [format.name, format.name]), chosen.format);
  if (!found) return;
  fill($('layer'), found.layers.map(layer => [layer, layer]), found.layer);
  fill($('role'), found.roles.map(role => [role, roleLabel(role)]), found.role);
  const newest = found.steps.at(-1);
  fill($('step'), [[NEWEST, `newest (${newest})`], ...found.steps.map(step => [String(step), String(step)]).reverse()],
       chosen.step === NEWEST ? NEWEST : String(found.step));
  fill($('copy'), found.copies.map((tensor, ...rest) => [copyOf(tensor), copyLabel(tensor, ...rest)]), copyOf(found.tensor));
}

// ---- plots ----------------------------------------------------------------------------------------------------------

const dark = matchMedia('(prefers-color-scheme: dark)');
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const CONFIG = {displaylogo: false, responsive: true, modeBarButtonsToRemove: ['lasso2d', 'select2d', 'autoScale2d']};

// Colour scales: diverging blue to orange for signed values, background to blue for shares, else Plotly's Cividis.
// Lightness alone distinguishes the values, for colour-blind readers.
const signed = () => dark.matches
  ? [[0, '#a8dcff'], [0.25, '#2f86c9'], [0.5, '#161a20'], [0.75, '#c4681f'], [1, '#ffd9a8']]
  : [[0, '#08427d'], [0.25, '#5fa2d6'], [0.5, '#ffffff'], [0.75, '#e58a3c'], [1, '#7a2f00']];

const shares = () => dark.matches
  ? [[0, '#161a20'], [0.35, '#1f4f7a'], [0.7, '#5fb0ea'], [1, '#f0f9ff']]
  : [[0, '#ffffff'], [0.35, '#9ecae9'], [0.7, '#2f7fc1'], [1, '#08306b']];

// '#rrggbb' with an opacity
const faint = (rgb, share) => `rgba(${[1, 3, 5].map(at => parseInt(rgb.slice(at, at + 2), 16)).join()},${share})`;

// Ticks of a logarithmic axis: powers of ten; over few decades also 2 and 5 times those, or Plotly's own choice.
function logAxis(values) {
  const sizes = values.filter(value => value > 0);
  const largest = Math.max(...sizes), decades = sizes.length ? Math.log10(largest / Math.min(...sizes)) : 0;
  const numbers = {nticks: 4, tickformat: largest < 0.01 ? '.2~e' : '.3~g'};
  const ticks = decades > 1.5 ? {dtick: 1, exponentformat: 'power'} : decades > 0.5 ? {...numbers, dtick: 'D2'} : numbers;
  return {type: 'log', ...ticks};
}

// Axis options for counts.  A logarithmic axis begins slightly below 1.
const COUNTS = {title: {text: 'elements'}, automargin: false};

function logCounts(counts) {
  return {...logAxis([1, ...counts]), range: [-0.2, Math.log10(Math.max(2, ...counts)) + 0.1]};
}

function layout(more = {}) {
  const axis = {gridcolor: colour('grid'), zerolinecolor: colour('line'), linecolor: colour('line'), automargin: true,
                title: {standoff: 6}};
  const {xaxis, yaxis, ...rest} = more;
  return {
    autosize: true, margin: {l: 52, r: 14, t: 12, b: 38}, paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: {family: 'system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif', size: 12, color: colour('text')},
    modebar: {bgcolor: colour('card'), color: colour('soft'), activecolor: colour('accent')},
    hoverlabel: {bgcolor: colour('card'), bordercolor: colour('line'), font: {color: colour('text')}}, showlegend: false,
    xaxis: {...axis, ...xaxis}, yaxis: {...axis, ...yaxis}, ...rest,
  };
}

// Draw a plot.  label: the description for screen readers.
function plot(id, traces, format, label) {
  const node = $(id);
  node.querySelector('.empty')?.remove();
  node.setAttribute('aria-label', label);
  if (node.getAttribute('role') !== 'tabpanel') node.setAttribute('role', 'img');
  return Plotly.react(node, traces, layout(format), CONFIG);
}

// Draw a plot unless it is up to date.  inputs: all values that it depends on.
const drawnKeys = new Map();

function show(id, inputs, draw) {
  const key = [data.serial, dark.matches, ...inputs].join();
  if (drawnKeys.get(id) === key) return;
  drawnKeys.set(id, key);
  draw();
}

// Replace a plot by the reason for its absence.
function empty(id, reason) {
  const node = $(id);
  if (node.data) Plotly.purge(node);            // also removes its listeners
  node.listens = false;
  drawnKeys.delete(id);
  node.setAttribute('aria-label', reason);
  node.replaceChildren(element('p', {className: 'empty', textContent: reason}));
}

// The subfolder and the training of a tensor, as the steps name them; '' if there is one run.
const runLabel = tensor => [tensor.folder, data.hasRuns ? `run ${tensor.run + 1}` : ''].filter(Boolean).join(', ');

// The colour of a run is the same in all plots.
function runLine(label) {
  const labels = [...new Set([...data.steps.map(point => point[3]), ...data.tensors.map(runLabel)])].filter(Boolean).sort();
  const i = Math.max(0, labels.indexOf(label));
  return {color: i ? RUNS[(i - 1) % RUNS.length] : colour('accent'), width: 1.8, dash: i <= RUNS.length ? 'solid' : 'dot'};
}

const LEGEND = {orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0, font: {size: 11}};
const RUNS = ['#d55e00', '#009e73', '#b8559a', '#b08000', '#2f9fd0', '#7f7f7f'];         // colours of the second run and so on

function drawCurve(id, column, name, chosenStep) {
  const points = data.steps.filter(point => typeof point[column] === 'number');
  const runs = [...new Set(points.map(point => point[3]))];
  if (!points.length) return empty(id, head.live ? `No ${name} yet.` : `No ${name} was recorded.`);
  const last = points.at(-1);
  const logarithmic = column === 2 && points.every(point => point[2] > 0);
  const traces = runs.map(run => {
    const own = points.filter(point => point[3] === run);
    return {
      type: 'scatter', mode: own.length < 40 ? 'lines+markers' : 'lines', name: escaped(run), x: own.map(point => point[0]),
      y: own.map(point => point[column]), marker: {size: 5}, line: runLine(run),
      hovertemplate: `step %{x}<br>%{y:.5g}<extra>${escaped(run)}</extra>`,
    };
  });
  const values = points.map(point => point[column]);
  plot(id, traces, {
    xaxis: {title: {text: 'step'}}, yaxis: logarithmic ? logAxis(values) : {exponentformat: 'power'}, uirevision: 'constant',
    showlegend: runs.length > 1, legend: LEGEND, shapes: stepLine(chosenStep),
  }, `${name} over ${points.length} steps${runs.length > 1 ? ` of ${runs.length} runs` : ''}; ${shown(last[column])} at step `
     + `${last[0]}`);
}

// A vertical line at the chosen step.
const stepLine = step => step === undefined ? [] : [{
  type: 'line', xref: 'x', yref: 'paper', x0: step, x1: step, y0: 0, y1: 1,
  line: {color: colour('soft'), width: 1.2, dash: 'dot'},
}];

// rms of a gradient in every layer: one line per step, or a map if there are many steps
function drawFlow(chosen, found) {
  // of one run and rank: the one of the selected tensor
  const isOurs = tensor => !found || runOf(tensor) === runOf(found.tensor) && tensor.rank === found.tensor.rank;
  const gradients = data.tensors.filter(tensor => tensor.operation === 'backward' && isOurs(tensor));
  const roles = [...new Set(gradients.map(tensor => tensor.name))];
  const role = roles.includes(chosen.flow) ? chosen.flow : roles.find(name => name === 'grad_weight') ?? roles[0];
  fill($('flow-role'), roles.map(name => [name, name]), role);
  $('flow-role').hidden = !role;
  if (!role) return empty('flow', head.live ? 'No gradients yet.' : 'No gradients were saved.');
  const layers = [...data.tree].filter(([, all]) => all.has(`backward.${role}`)).map(([layer]) => layer);
  const steps = sortedSteps(new Map(layers.flatMap(layer => [...data.tree.get(layer).get(`backward.${role}`)])));
  // several tensors of one layer and step, such as the time steps of a GRU: the root mean square of their rms
  const rms = (layer, step) => {
    const all = (data.tree.get(layer).get(`backward.${role}`).get(step) ?? []).filter(isOurs)
      .map(tensor => statistic(tensor, 'rms')).filter(value => Number.isFinite(value));
    return all.length ? Math.sqrt(all.reduce((sum, value) => sum + value * value, 0) / all.length) : null;
  };
  const names = layers.map(escaped), label = `rms of ${role} in ${layers.length} layers at ${steps.length} steps`;
  const labelled = range(layers.length).filter(i => i % Math.ceil(layers.length / 12) === 0);
  const ticks = {tickvals: labelled, ticktext: labelled.map(i => escaped(briefLayer(layers[i], 16))), tickfont: {size: 10}};
  const z = layers.map(layer => steps.map(step => rms(layer, step)));
  if (steps.length <= 6) {
    plot('flow', steps.map((step, i) => ({
      type: 'scatter', mode: 'lines+markers', name: `step ${step}`, x: names.map((_, k) => k), y: z.map(line => line[i]),
      customdata: names, hovertemplate: `%{customdata}<br>step ${step}: %{y:.4g}<extra></extra>`,
      line: {color: shade(steps.length > 1 ? i / (steps.length - 1) : 1), width: 1.8}, marker: {size: 6, symbol: i},
    })), {
      xaxis: {...ticks, tickangle: layers.length > 3 ? -32 : 0, automargin: false}, yaxis: logAxis(z.flat()),
      showlegend: steps.length > 1, legend: {orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0, font: {size: 11}},
      margin: {l: 52, r: 14, t: 8, b: layers.length > 3 ? 66 : 30}, uirevision: role,
    }, label);
  } else {
    plot('flow', [{
      type: 'heatmap', x: steps.map(String), y: names.map((_, i) => i), colorscale: 'Cividis',
      z: z.map(line => line.map(value => value > 0 ? Math.log10(value) : null)), customdata: z,
      text: names.map(name => steps.map(() => name)), hovertemplate: '%{text}<br>step %{x}: %{customdata:.4g}<extra></extra>',
      colorbar: {thickness: 10, outlinewidth: 0, title: {text: 'log10', side: 'right'}},
    }], {
      xaxis: {type: 'category', title: {text: 'step'}, nticks: 8},
      yaxis: {...ticks, autorange: 'reversed'},
      margin: {l: 40, r: 6, t: 8, b: 38}, uirevision: role,
    }, label);
  }
}

// Steps from first to last: from pale to saturated.
const shade = part => dark.matches ? `hsl(205 75% ${40 + 38 * part}%)` : `hsl(205 85% ${72 - 42 * part}%)`;
const brief = (text, most) => text.length <= most ? text
  : `${text.slice(0, Math.floor(most / 2) - 1)}\u2026${text.slice(text.length - Math.ceil(most / 2))}`;

// Shorten the longest parts of a layer name: encoder.0.self_attention.q becomes encoder.0.self.q
function briefLayer(layer, most) {
  const parts = layer.split('.');
  while (parts.join('.').length > most) {
    const longest = parts.reduce((one, other) => other.length > one.length ? other : one);
    if (longest.length <= 3) break;
    parts[parts.indexOf(longest)] = longest.slice(0, -1);
  }
  return brief(parts.length > 1 ? parts.join('.') : layer, most);
}

function drawTraining(chosen, found) {
  show('loss', [data.edition, found?.step], () => drawCurve('loss', 1, 'loss', found?.step));
  show('norm', [data.edition, found?.step], () => drawCurve('norm', 2, 'gradient norm', found?.step));
  show('flow', [data.edition, chosen.flow, found && [runOf(found.tensor), found.tensor.rank]], () => drawFlow(chosen, found));
}

// Plotly traces of a map, with a separate trace for infinite cells, and hover texts with the elements of each cell.
function heat(map, name) {
  const [rows, columns] = map.shape, z = matrix(floats(map), rows, columns);
  const span = (i, axis) => {
    const first = map.origin[axis] + i * map.patch[axis];
    const last = Math.min(first + map.patch[axis], axis ? map.columns : map.rows) - 1;
    return last > first ? `${first}\u2013${last}` : `${first}`;
  };
  const across = Array.from({length: columns}, (_, i) => `column ${span(i, 1)}`);
  const text = z.map((_, i) => across.map(column => `row ${span(i, 0)}, ${column}`));
  const coordinates = (axis) => ({start: map.origin[axis] + (map.patch[axis] - 1) / 2, step: map.patch[axis]});
  const x = coordinates(1), y = coordinates(0);
  let largest = 0, hasInfinite = false;
  for (const line of z) for (const value of line) {
    if (Math.abs(value) === Infinity) hasInfinite = true;
    else if (Math.abs(value) > largest) largest = Math.abs(value);
  }
  const shared = {type: 'heatmap', x0: x.start, dx: x.step, y0: y.start, dy: y.step, hoverongaps: false, text};
  const mapped = convert => z.map(line => Array.from(line, convert));
  const traces = [{
    ...shared, z: mapped(value => Number.isFinite(value) ? value : null),
    hovertemplate: `%{text}<br>${name} %{z:.4~g}<extra></extra>`,
    colorbar: {thickness: 12, outlinewidth: 0, exponentformat: 'power'},
  }];
  if (hasInfinite) {
    traces.push({
      ...shared, z: mapped(value => Math.abs(value) === Infinity ? 1 : null), showscale: false,
      colorscale: [[0, '#ff00c8'], [1, '#ff00c8']], hovertemplate: '%{text}<br>infinite or NaN<extra></extra>',
    });
  }
  return {traces, largest, hasInfinite};
}

// ---- over steps -----------------------------------------------------------------------------------------------------

// A curve of one statistic of the selected layer and role, one line per run.
function drawOver(chosen, found) {
  const names = [...head.description, ...head.quality], stat = names.includes(chosen.stat) ? chosen.stat : DEFAULTS.stat;
  fill($('stat'), names.map(name => [name, name.replaceAll('_', ' ')]), stat);
  $('stat').disabled = !found;
  $('curve-of').textContent = found ? `of ${found.layer} ${roleLabel(found.role)}` + (head.quality.includes(stat)
    ? `, in ${chosen.format}` : '') : '';
  if (!found) return empty('curve', 'No tensor yet.');
  const value = tensor => head.description.includes(stat) ? statistic(tensor, stat)
    : measure(qualityOf(tensor, chosen.format), stat);
  const place = tensor => [tensor.place, tensor.time ?? ''].join('.'), runs = new Map();
  for (const copies of data.tree.get(found.layer).get(found.role).values()) {
    for (const tensor of copies) {
      const y = value(tensor);
      if (place(tensor) !== place(found.tensor) || !Number.isFinite(y)) continue;
      branch(runs, runLabel(tensor), () => []).push([tensor.step, y]);
    }
  }
  const all = [...runs.values()].flat().map(([, y]) => y);
  if (!all.length) return empty('curve', head.live ? 'Not measured yet.' : 'No finite value.');
  const byName = ([one], [other]) => one < other ? -1 : 1;
  const traces = [...runs].sort(byName).map(([run, points]) => {
    points.sort(([a], [b]) => a - b);
    return {type: 'scatter', mode: points.length < 40 ? 'lines+markers' : 'lines', name: escaped(run),
            x: points.map(([x]) => x), y: points.map(([, y]) => y), line: runLine(run), marker: {size: 6},
            hovertemplate: `step %{x}<br>%{y:.6g}<extra>${escaped(run)}</extra>`};
  });
  const isLog = all.every(y => y > 0) && Math.max(...all) > 30 * Math.min(...all);
  plot('curve', traces, {
    xaxis: {title: {text: 'step'}}, yaxis: isLog ? logAxis(all) : {exponentformat: 'power'}, showlegend: runs.size > 1,
    legend: LEGEND, shapes: stepLine(found.step), uirevision: `${found.layer} ${found.role} ${stat}`,
  }, `${stat} of ${found.layer} ${found.role} over ${new Set(traces.flatMap(trace => trace.x)).size} steps, ${runs.size} runs`);
}

const PANELS = 6;

// rms of a gradient by layer and step, a map per run with one colour scale.
function drawLayers(found) {
  const role = $('flow-role').value;
  const gradients = data.tensors.filter(tensor => tensor.operation === 'backward' && tensor.name === role);
  const all = [...new Set(gradients.map(runLabel))].sort(), labels = all.slice(0, PANELS);
  $('layers-card').hidden = all.length < 2;
  if (all.length < 2) return empty('layers', 'There is one run.');
  const layers = [...new Set(gradients.map(tensor => tensor.layer))], place = new Map(layers.map((layer, i) => [layer, i]));
  $('layers-title').textContent = `Gradients through the layers: rms of ${role} in ${layers.length} layers`;
  $('layers-note').textContent = all.length > PANELS ? `the first ${PANELS} of ${all.length} runs` : '';
  const traces = [], axes = {}, titles = [], wide = 1 / labels.length;
  labels.forEach((label, i) => {
    const own = gradients.filter(tensor => runLabel(tensor) === label), suffix = i ? String(i + 1) : '';
    const steps = [...new Set(own.map(tensor => tensor.step))].sort((a, b) => a - b);
    // several tensors of one layer and step, such as the time steps of a GRU: the root mean square of their rms
    const sums = layers.map(() => steps.map(() => [0, 0])), column = new Map(steps.map((value, k) => [value, k]));
    for (const tensor of own) {
      const rms = statistic(tensor, 'rms'), cell = sums[place.get(tensor.layer)][column.get(tensor.step)];
      if (Number.isFinite(rms)) { cell[0] += rms * rms; cell[1]++; }
    }
    const z = sums.map(line => line.map(([sum, count]) => count ? Math.sqrt(sum / count) : null));
    traces.push({
      type: 'heatmap', x: steps.map(String), y: range(layers.length),
      z: z.map(line => line.map(value => value > 0 ? Math.log10(value) : null)),
      customdata: z, text: layers.map(name => steps.map(() => escaped(name))), coloraxis: 'coloraxis', xaxis: `x${suffix}`,
      yaxis: `y${suffix}`, hovertemplate: `%{text}<br>step %{x}: %{customdata:.4g}<extra>${escaped(label)}</extra>`,
    });
    const labelled = range(layers.length).filter(k => k % Math.ceil(layers.length / 14) === 0);
    const domain = [i * wide + (i ? 0.012 : 0), (i + 1) * wide - (i < labels.length - 1 ? 0.012 : 0)];
    axes[`xaxis${suffix}`] = {type: 'category', domain, anchor: `y${suffix}`, nticks: 8, title: {text: 'step'},
                              gridcolor: colour('grid')};
    axes[`yaxis${suffix}`] = {
      anchor: `x${suffix}`, autorange: 'reversed', tickvals: labelled, automargin: !i, showticklabels: !i,
      ...(i ? {matches: 'y'} : {}),
      ticktext: labelled.map(k => escaped(briefLayer(layers[k], 24))), tickfont: {size: 10}, gridcolor: colour('grid'),
    };
    titles.push({
      text: escaped(brief(label, Math.floor(90 / labels.length))), x: (domain[0] + domain[1]) / 2, y: 1.01, xref: 'paper',
      yref: 'paper', xanchor: 'center', yanchor: 'bottom', showarrow: false, font: {size: 12, color: colour('text')},
    });
  });
  plot('layers', traces, {
    ...axes, annotations: titles, margin: {l: 60, r: 10, t: 26, b: 40}, uirevision: role,
    coloraxis: {colorscale: 'Cividis', colorbar: {thickness: 10, outlinewidth: 0, title: {text: 'log10', side: 'right'}}},
  }, `rms of ${role} in ${layers.length} layers, a map of layers by steps for each of ${labels.length} runs; step `
     + `${found?.step ?? 0} is selected`);
}

// The attention weights of one sentence and head at several steps, a row per run.
async function drawGrowth(chosen, found, isStale) {
  const weights = found && resolveAttention(chosen, found);
  const steps = weights ? data.tree.get(weights.layer).get(roleOf(weights.tensor)) : new Map(), sorted = sortedSteps(steps);
  const same = (one, other) => one.rank === other.rank && one.sample === other.sample && one.place === other.place;
  const has = tensor => !data.pictured || data.pictured.has(tensor.id);
  const labels = [...new Set([...steps.values()].flat().map(runLabel))].sort().slice(0, 4);
  const at = (label, step) => steps.get(step)
    .find(tensor => runLabel(tensor) === label && same(tensor, weights.tensor) && has(tensor));
  const usable = sorted.filter(step => labels.some(label => at(label, step)));
  const count = Math.min(PANELS, usable.length);
  const chosenSteps = [...new Set(range(count).map(i => usable[Math.round(i * (usable.length - 1) / Math.max(1, count - 1))]))];
  const cells = labels.flatMap((label, row) => chosenSteps.map((step, column) => ({row, column, tensor: at(label, step)})))
    .filter(cell => cell.tensor);
  $('growth-card').hidden = cells.length < 2;
  if (cells.length < 2) return empty('growth', 'There are no weights of several steps.');
  const sentence = Math.max(0, Math.trunc(chosen.sentence) || 0), chosenHead = Math.max(0, Math.trunc(chosen.head) || 0);
  const maps = await Promise.all(cells.map(async cell => {
    try {
      const all = await cached(cell.tensor, '', 'attention', Math.min(sentence, cell.tensor.shape[0] - 1));
      const index = Math.min(sentence, all.first + all.maps.length - 1), [rows, columns] = all.shape;
      const start = Math.min(chosenHead, all.heads - 1) * rows * columns;
      return matrix(floats(all.maps[index - all.first]), rows, columns, start).map(finite);
    } catch {
      return null;
    }
  }));
  if (isStale()) return;
  const known = maps.filter(Boolean);
  if (!known.length) return empty('growth', 'The attention weights cannot be read.');
  $('growth-title').textContent = `Attention over training: ${weights.layer}, sentence ${sentence}, head ${chosenHead}`;
  $('growth-note').textContent = [`a row per run${labels.some(Boolean) ? `: ${labels.join(', ')}` : ''}`, 'a column per step',
                                  'each step has its own batch', 'click: show this step'].join(' \u00b7 ');
  show('growth', [...cells.map(cell => cell.tensor.id), sentence, chosenHead, weights.tensor.id],
       () => drawPanels(cells, maps, chosenSteps, labels, weights.tensor));
}

function drawPanels(cells, maps, steps, labels, selected) {
  const rows = Math.max(...maps.map(map => map?.length ?? 0)), columns = Math.max(...maps.map(map => map?.[0].length ?? 0));
  const beside = Math.max(1, Math.round(columns / 12)), above = Math.max(1, Math.round(rows / 5));      // gaps, in cells
  const z = Array.from({length: labels.length * (rows + above)}, () => Array(steps.length * (columns + beside)).fill(null));
  const corner = cell => [cell.row * (rows + above) + above, cell.column * (columns + beside)];
  cells.forEach((cell, i) => maps[i]?.forEach((line, row) => line.forEach((value, column) => {
    z[corner(cell)[0] + row][corner(cell)[1] + column] = value;
  })));
  const axis = {visible: false, constrain: 'domain', fixedrange: true, automargin: false}, node = $('growth');
  plot('growth', [{type: 'heatmap', z, colorscale: shares(), zmin: 0, zmax: 1, showscale: false, hoverongaps: false,
                   hovertemplate: '%{z:.3f}<extra></extra>'}], {
    margin: {l: 8, r: 8, t: 8, b: 8}, xaxis: {...axis, constraintoward: 'left'},
    yaxis: {...axis, autorange: 'reversed', scaleanchor: 'x', constraintoward: 'top'},
    annotations: cells.map(cell => ({
      x: corner(cell)[1] - 0.5, y: corner(cell)[0] - 0.5, xanchor: 'left', yanchor: 'bottom', showarrow: false, borderpad: 1,
      text: cell.row ? escaped(brief(labels[cell.row], 12)) : `step ${steps[cell.column]}`, font: {size: 11},
    })),
    shapes: cells.map((cell, i) => ({
      type: 'rect', x0: corner(cell)[1] - 0.5, x1: corner(cell)[1] + (maps[i]?.[0].length ?? 0) - 0.5,
      y0: corner(cell)[0] - 0.5, y1: corner(cell)[0] + (maps[i]?.length ?? 0) - 0.5, fillcolor: colour('hole'), layer: 'below',
      line: cell.tensor === selected ? {width: 2.5, color: colour('accent')} : {width: 1, color: colour('line')},
    })),
  }, `Attention weights of one head at steps ${steps.join(', ')}, ${labels.length} runs`);
  node.pick = ([row, column]) => {
    const cell = cells.find(one => one.row === Math.floor((row - above) / (rows + above))
                                   && one.column === Math.floor(column / (columns + beside)));
    if (cell) choose({step: String(steps[cell.column])});
  };
  if (!node.listens) node.on('plotly_click', event => node.pick([event.points[0].y, event.points[0].x]));
  node.listens = true;
}

// ---- differences of runs ---------------------------------------------------------------------------------------------

const DIFFERENCES = ['run', 'layer', 'role', 'action', 'worst relative difference', 'at step', 'largest difference',
                     'first step beyond the tolerance'];

// A difference as text; null means a number that is not finite.
const distance = value => value === null ? '\u221e' : shown(value, 4);

function drawPartings() {
  const {partings} = data;
  $('differences-part').hidden = !partings?.rows.length;
  if (!partings) return $('partings').replaceChildren();
  const {reference, names, first, losses, tolerance, settings} = partings;
  $('partings').replaceChildren(...names.slice(1).map(name => {
    const one = first[name], loss = losses[name], parts = [];
    const given = Object.entries(settings[name] ?? {}).filter(([, value]) => isPlain(value));
    if (given.length) parts.push(given.map(([key, value]) => `${key} ${value}`).join(', '));
    parts.push(one ? `the first tensor beyond the tolerance is ${one.action} at step ${one.step}: `
                     + (one.reason || distance(one.relative)) : 'no tensor is beyond the tolerance');
    parts.push(loss ? `the loss parts at step ${loss[0]}: ${shown(loss[1], 6)}, ${shown(loss[2], 6)}` : 'the losses agree');
    const item = element('li', {textContent: `${name} and ${reference}: ${parts.join('; ')}`});
    if (one) {
      const link = element('button', {type: 'button', className: 'small', textContent: 'show'});
      link.addEventListener('click', () => showTensor(one.layer, `${one.operation}.${one.name}`, one.step));
      item.append(' ', link);
    }
    return item;
  }));
  const pending = partings.pending ? `, ${partings.pending} pairs not compared yet` : '';
  $('differences-title').textContent = `Differences from ${reference}: ${partings.rows.length} actions, `
    + `${partings.compared} pairs of tensors, tolerance ${tolerance}${pending}`;
  const table = $('differences'), isText = i => i < 4, hidden = [1, 2];
  const heading = (label, i) => element('th', {scope: 'col', className: isText(i) ? 'text' : ''},
                                        element('span', {className: 'cell', textContent: label}));
  table.tHead.replaceChildren(element('tr', {}, ...DIFFERENCES.map(heading).filter((_, i) => !hidden.includes(i))));
  table.tBodies[0].replaceChildren(...partings.rows.slice(0, ROWS).map((row, at) => {
    const line = element('tr', {tabIndex: -1}, ...row.flatMap((value, i) => hidden.includes(i) ? [] : [element('td', {
      className: isText(i) ? 'text' : '',
      textContent: isText(i) ? value : i === 7 ? value ?? '\u2013' : i === 5 ? value : distance(value)})]));
    line.dataset.at = at;
    return line;
  }));
}

function showTensor(layer, role, step) {
  choose({layer, role, step: String(step), copy: '', attention: ''});
  jump('tensor');
}

function pickDifference(line) {
  if (!line) return;
  const row = data.partings.rows[line.dataset.at];
  showTensor(row[1], row[2], row[7] ?? row[5]);
}

function drawSteps(chosen, found, isStale) {
  show('partings', [data.partings?.key, data.edition], drawPartings);
  const selected = found && [found.layer, found.role, found.step, copyOf(found.tensor)];
  show('curve', [data.edition, chosen.stat, chosen.format, selected], () => drawOver(chosen, found));
  show('layers', [data.edition, $('flow-role').value, found?.step], () => drawLayers(found));
  return drawGrowth(chosen, found, isStale);
}

const VIEWS = {values: 'value', rounded: 'rounded', error: 'rounded \u2212 value', scales: 'log2 scale'};

function drawMap(tensor, chosen, detail, zoomed = null) {
  const {view, format} = chosen, rounded = detail.formats[format];
  const map = view === 'values' ? detail.values : rounded[view];
  if (!map) return empty('map', `${format} has no scales that are powers of two.`);
  if (!map.shape[0] || !map.shape[1]) return empty('map', 'The tensor is empty.');
  const {traces, largest, hasInfinite} = heat(map, VIEWS[view]);
  if (view === 'scales') traces[0].colorscale = 'Cividis';
  else Object.assign(traces[0], {colorscale: signed(), zmid: 0, zmin: -(largest || 1), zmax: largest || 1});
  const bare = {showgrid: false, zeroline: false};
  const [across, down] = zoomed?.map(ends => ({range: ends, autorange: false})) ?? [];
  plot('map', traces, {
    plot_bgcolor: colour('hole'), margin: {l: 52, r: 8, t: 8, b: 38}, uirevision: `${tensor.id} ${view}`,
    xaxis: {...bare, title: {text: view === 'scales' ? 'block' : 'last axis'}, ...(across ?? {autorange: true})},
    yaxis: {...bare, title: {text: 'other axes'}, ...(down ?? {autorange: 'reversed'})},
  }, `${VIEWS[view]} of a ${map.rows} by ${map.columns} matrix; largest magnitude ${shown(largest)}`);
  if (!$('map').listens) $('map').on('plotly_relayout', event => refine(event).catch(() => {}));
  $('map').listens = true;
  const [rows, columns] = map.patch, parts = [`${map.rows} \u00d7 ${map.columns}`];
  if (rows > 1 || columns > 1) {
    parts.push(`each cell shows the largest magnitude of ${rows} \u00d7 ${columns} elements`);
    if (head.live && view !== 'scales') parts.push('zoom in for details');
  }
  parts.push(view === 'scales' ? 'grey: blocks of zeros' : 'grey: padding');
  if (hasInfinite) parts.push('magenta: infinite or NaN');
  $('map-note').textContent = parts.join(' \u00b7 ');
}

// Fetch the visible part of a zoomed map from the server if its cells cover more than one element.
async function refine(event) {
  const chosen = choice(), found = resolve(chosen);
  if (!head.live || !found || chosen.view === 'scales') return;
  const whole = await cached(found.tensor, chosen.format);
  if (event['xaxis.autorange'] || event['yaxis.autorange']) return drawMap(found.tensor, chosen, whole);
  const map = chosen.view === 'values' ? whole.values : whole.formats[chosen.format][chosen.view];
  if (map.patch[0] * map.patch[1] === 1) return;
  const {xaxis, yaxis} = $('map').layout, ranges = [xaxis.range.slice(), yaxis.range.slice()];
  const inside = (ends, size) => [Math.max(0, Math.round(Math.min(...ends))),
                                  Math.min(size - 1, Math.round(Math.max(...ends)))];
  const corners = [...inside(ranges[1], map.rows), ...inside(ranges[0], map.columns)];
  if (corners[0] > corners[1] || corners[2] > corners[3]) return;
  const part = await cached(found.tensor, chosen.format, 'window', chosen.format, corners);
  if (location.hash === drawnHash) drawMap(found.tensor, chosen, part, ranges);
}

function drawHistogram(detail, format) {
  const [low, high] = detail.range.map(number), bins = detail.counts.length, width = (high - low) / bins;
  const x = detail.counts.map((_, i) => low + (i + 0.5) * width), after = detail.formats[format.name].counts;
  const logarithmic = choice().counts === 'log';
  const bars = (y, name, marker) => ({
    type: 'bar', x, y, width, name: escaped(name), marker, hovertemplate: `%{x:.4g}: %{y}<extra>${escaped(name)}</extra>`,
  });
  plot('histogram', [
    bars(detail.counts, 'as saved', {color: colour('hole')}),
    bars(after, `in ${format.name}`, {color: faint(format.colour, 0.3), line: {color: format.colour, width: 1.2}}),
  ], {
    bargap: 0, barmode: 'overlay', showlegend: true, legend: {orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0},
    xaxis: {title: {text: 'value'}, exponentformat: 'power'},
    yaxis: {...COUNTS, ...(logarithmic ? logCounts([...detail.counts, ...after]) : {tickformat: '~s'})},
  }, `Histogram of values from ${shown(low)} to ${shown(high)}, as saved and rounded to ${format.name}`);
}

// The ranges of a format on the axis of log2 |x|, with the error measure that counts the values of each.
function rangesOf(format) {
  const [smallest, normal, largest] = [format.min_subnormal, format.min_normal, format.max].map(Math.log2);
  const fill = (rgb, share) => faint(rgb, dark.matches ? 0.8 * share + 0.05 : share);
  return [
    {name: 'too small', from: -Infinity, to: smallest, fill: fill('#78828f', 0.3), text: `below ${power(format.min_subnormal)}`,
     share: 'underflow_pct', suffix: 'underflow to 0'},
    {name: 'subnormal', from: smallest, to: normal, fill: fill('#e69f00', 0.3), text: `from ${power(format.min_subnormal)}`,
     share: 'subnormal_pct', suffix: ''},
    {name: 'normal', from: normal, to: largest, fill: fill('#0072b2', 0.16),
     text: `${power(format.min_normal)} to ${shown(format.max)}`},
    {name: 'too large', from: largest, to: Infinity, fill: fill('#d53e4f', 0.3), text: `above ${shown(format.max)}`,
     share: 'saturation_pct', suffix: ''},
  ];
}

function drawExponents(detail, format, numbers) {
  const {first, counts} = detail.formats[format.name].exponents;
  const unit = format.block || format.scaled ? '|x| / block scale' : '|x|';
  $('exponents-title').textContent = `Magnitudes: log2 ${unit}, with the range of ${format.name}`;
  const ranges = rangesOf(format);
  $('ranges').replaceChildren(...ranges.map(range => {
    const box = element('i');
    box.style.background = range.fill;
    const share = range.share === undefined ? undefined : measure(numbers, range.share);
    const percent = share === undefined || share === null ? '' : `: ${shown(share, 3)} % ${range.suffix}`;
    return element('li', {}, box, `${range.name}, ${range.text}${percent}`);
  }));
  if (!counts.length) return empty('exponents', 'All values are zero or not finite.');
  const x = counts.map((_, i) => first + i / 2 + 0.25);
  // the range of the data, extended to limits of the format close to it
  const last = first + counts.length / 2, ends = [format.min_normal, format.max].map(Math.log2);
  const near = ends.filter(end => end > first - 6 && end < last + 6);
  const low = Math.min(first, ...near) - 1, high = Math.max(last, ...near) + 1;
  plot('exponents', [{
    type: 'bar', x, y: counts, width: 0.5, marker: {color: format.colour, line: {width: 0.5, color: colour('card')}},
    hovertemplate: '2^%{x:.2f}: %{y}<extra></extra>',
  }], {
    bargap: 0, xaxis: {range: [low, high], title: {text: `log2 ${unit}`}, showgrid: false, zeroline: false},
    yaxis: {...COUNTS, tickformat: '~s'},
    shapes: ranges.filter(range => range.to > low && range.from < high).map(range => ({
      type: 'rect', xref: 'x', yref: 'paper', x0: Math.max(range.from, low), x1: Math.min(range.to, high), y0: 0, y1: 1,
      fillcolor: range.fill, line: {width: 0}, layer: 'below', name: range.name,
    })),
  }, `Histogram of log2 ${unit} from ${first} to ${last}; normal range of ${format.name}: `
     + `${shown(format.min_normal)} to ${shown(format.max)}`);
}

function drawTiles(tensor, format, numbers) {
  const tile = (label, value, title = label) => element(
    'div', {title}, element('span', {textContent: label}), element('b', {textContent: value}));
  const of = name => shown(statistic(tensor, name));
  const quality = (name, unit = '', digits = 4) => numbers ? shown(measure(numbers, name), digits) + unit : '\u2026';
  const tiles = [
    tile(`SQNR in ${format.name}`, quality('sqnr_db', ' dB'), 'signal-to-quantization-noise ratio'),
    tile('largest error', quality('max_abs_error')), tile('cosine', quality('cosine', '', 6)),
    tile('underflow', quality('underflow_pct', ' %', 3), 'nonzero values that become 0'),
    tile('subnormal', quality('subnormal_pct', ' %', 3)),
    tile('too large', quality('saturation_pct', ' %', 3), 'above the largest value of the format'),
    tile('overflow', quality('overflow'), 'finite values that become infinite or NaN'),
    tile('largest |x|', of('amax')), tile('rms', of('rms')), tile('mean', of('mean')),
    tile('zeros, NaN, infinite', ['zeros', 'nan', 'inf'].map(of).join(', ')),
  ];
  tiles[0].classList.add('first');
  tiles[0].style.setProperty('--format', format.colour);
  $('tiles').replaceChildren(...tiles);
}

function drawFacts(tensor) {
  const use = ([product, operand, format, axis]) => `${product}.${operand} ${format} (axis ${axis})`;
  $('facts').textContent = [
    tensor.shape.length ? `shape ${tensor.shape.join(' \u00d7 ')}` : 'scalar', tensor.dtype,
    `${tensor.type} layer ${tensor.index}`,
    `number ${tensor.counter}`, tensor.folder && `in ${tensor.folder}`, tensor.placeInFolder,
    tensor.format === 'fp32' ? 'not rounded when used' : `rounded to ${tensor.format} when used`,
    `blocks along axis ${tensor.axis}`, tensor.uses.length && `used as ${tensor.uses.map(use).join(', ')}`,
  ].filter(Boolean).join(' \u00b7 ');
}

const VIEW_IDS = ['map', 'histogram', 'exponents'];

async function drawTensor(chosen, found, isStale) {
  for (const tab of document.querySelectorAll('[data-view]')) {
    tab.setAttribute('aria-selected', String(tab.dataset.view === chosen.view));
  }
  if (!found) {
    $('tensor-title').textContent = 'Tensor';
    $('facts').textContent = $('map-note').textContent = '';
    $('tiles').replaceChildren();
    $('ranges').replaceChildren();
    return VIEW_IDS.forEach(id => empty(id, id === 'map' && data.waiting || 'No tensor yet.'));
  }
  const {tensor} = found, format = data.formats.find(item => item.name === chosen.format);
  const numbers = qualityOf(tensor, chosen.format), time = tensor.time === null ? '' : `, time step ${tensor.time}`;
  $('tensor-title').textContent = `${tensor.layer} ${tensor.operation} ${tensor.name}, step ${tensor.step}${time}`;
  drawFacts(tensor);
  drawTiles(tensor, format, numbers);
  const detail = await picture(tensor, VIEW_IDS, isStale, chosen.format);
  if (!detail || isStale()) return;
  document.querySelector('[data-view=scales]').disabled = !detail.formats[chosen.format].scales;
  const inputs = [tensor.id, chosen.format];
  show('map', [...inputs, chosen.view], () => drawMap(tensor, chosen, detail));
  $('log-counts').checked = chosen.counts === 'log';
  show('histogram', [...inputs, chosen.counts], () => drawHistogram(detail, format));
  show('exponents', [...inputs, numbers !== undefined], () => drawExponents(detail, format, numbers));
}

// Return the result of `cached`, or null after writing the reason into the elements `ids`.
async function picture(tensor, ids, isStale, ...request) {
  let reason = 'The page has no plots of this step, to limit its size; see the note at the top.';
  if (!data.pictured || data.pictured.has(tensor.id)) {
    try {
      return await cached(tensor, ...request);
    } catch (error) {
      reason = `No plot: ${error.message}`;
    }
  }
  if (!isStale()) ids.forEach(id => empty(id, reason));
  return null;
}

// ---- attention ------------------------------------------------------------------------------------------------------

// Select the attention weights: of the layer chosen in this section, else of the page's layer, else of the first layer with
// weights; at the page's step.
function resolveAttention(chosen, found) {
  const roleIn = layer => [...data.tree.get(layer)].find(([, steps]) => [...steps.values()][0][0].maps)?.[0];
  const layers = [...data.tree.keys()].filter(roleIn);
  if (!layers.length) return null;
  const isPart = (one, other) => one === other || one.startsWith(`${other}.`);
  const near = layers.find(layer => isPart(layer, found.layer) || isPart(found.layer, layer));
  const layer = layers.includes(chosen.attention) ? chosen.attention : near ?? layers[0];
  const steps = data.tree.get(layer).get(roleIn(layer)), sorted = sortedSteps(steps);
  const step = sorted.findLast(value => value <= found.step) ?? sorted[0];
  // of the same run, rank and sample as the tensor; the phase may differ
  const copies = steps.get(step), source = copy => [runOf(copy), copy.rank, copy.sample].join();
  const tensor = copies.find(item => source(item) === source(found.tensor)) ?? copies.at(-1);
  return {layers, layer, tensor};
}

async function drawAttention(chosen, found, isStale) {
  const weights = found && resolveAttention(chosen, found);
  $('attention').hidden = document.querySelector('[data-part=attention]').hidden = !weights;
  if (!weights) return;
  const {layers, layer, tensor} = weights, sentence = within(chosen.sentence, tensor.shape[0]);
  fill($('attention-layer'), layers.map(name => [name, name]), layer);
  const all = await picture(tensor, ['weights', 'heads'], isStale, '', 'attention', sentence);
  if (!all || isStale()) return;
  const available = head.live ? all.sentences : all.maps.length, index = Math.min(sentence, available - 1);
  const {words, ...packed} = all.maps[index - all.first], [rows, columns] = all.shape, numbers = floats(packed);
  const chosenHead = within(chosen.head, all.heads);
  fill($('sentence'), range(available).map(i => [String(i), sentenceLabel(i, all.maps[i - all.first]?.words)]), String(index));
  fill($('head'), range(all.heads).map(i => [String(i), String(i)]), String(chosenHead));
  $('weights-title').textContent = `Weights of ${layer}, head ${chosenHead}, step ${tensor.step}`;
  const maps = range(all.heads).map(i => matrix(numbers, rows, columns, i * rows * columns));
  const inputs = [tensor.id, index, chosenHead];
  show('weights', inputs, () => drawWeights(maps[chosenHead], words, all.patch, chosenHead));
  show('heads', inputs, () => drawHeads(maps, chosenHead));
  const parts = ['grey: padding'];
  if (!words) parts.push('the words were not saved');
  if (all.patch.some(size => size > 1)) parts.push(`each cell shows the largest of ${all.patch.join(' \u00d7 ')} weights`);
  if (available < all.sentences) parts.push(`the page has sentences 0 to ${available - 1} of ${all.sentences}`);
  $('weights-note').textContent = parts.join(' \u00b7 ');
}

const range = count => [...Array(count).keys()];
const within = (text, count) => Math.min(Math.max(Math.trunc(text) || 0, 0), count - 1);
const finite = line => Array.from(line, value => Number.isFinite(value) ? value : null);

function drawWeights(z, words, patch, chosenHead) {
  const [down, across] = [0, 1].map(side => axisLabels(words?.[side], patch[side], side ? z[0].length : z.length));
  const gap = z.length < 40 ? 1 : 0, bare = {showgrid: false, zeroline: false, constrain: 'domain', automargin: false};
  const margin = (words, base) => base + Math.min(120, 7 * Math.max(...words.map(word => word.length)));
  // many words share small weights: the colour is the square root
  const isLarge = Math.max(z.length, z[0].length) > 40, weights = z.map(finite);
  const root = value => value === null ? null : Math.sqrt(value), marks = [0, 0.01, 0.05, 0.2, 0.5, 1];
  plot('weights', [{
    type: 'heatmap', z: isLarge ? weights.map(line => line.map(root)) : weights, customdata: weights, colorscale: shares(),
    zmin: 0, zmax: 1, hoverongaps: false, xgap: gap, ygap: gap,
    text: z.map((line, i) => range(line.length).map(k => `${down.full[i]} \u2192 ${across.full[k]}`)),
    hovertemplate: '%{text}<br>weight %{customdata:.3f}<extra></extra>',
    colorbar: {thickness: 12, outlinewidth: 0, title: {text: 'weight', side: 'right'},
               ...(isLarge ? {tickvals: marks.map(Math.sqrt), ticktext: marks.map(String)} : {})},
  }], {
    plot_bgcolor: colour('hole'), margin: {l: margin(down.words, 30), r: 8, t: 8, b: margin(across.words, 40)},
    xaxis: {...bare, tickvals: across.at, ticktext: across.short, tickangle: -40, title: {text: 'key'}},
    yaxis: {...bare, tickvals: down.at, ticktext: down.short, autorange: 'reversed', scaleanchor: 'x', title: {text: 'query'}},
  }, `Attention weights of head ${chosenHead}: ${z.length} words attend to ${z[0].length}`);
}

// All heads side by side in one map with gaps.  A click selects a head.
function drawHeads(maps, chosenHead) {
  const rows = maps[0].length, columns = maps[0][0].length;
  const beside = Math.max(1, Math.round(columns / 12)), above = Math.max(1, Math.round(rows / 5));      // gaps, in cells
  const wide = Math.ceil(Math.sqrt(maps.length * (rows + above) / (columns + beside) * 1.2));
  const high = Math.ceil(maps.length / wide);
  const z = Array.from({length: high * (rows + above)}, () => Array(wide * (columns + beside)).fill(null));
  const corner = i => [Math.floor(i / wide) * (rows + above) + above, i % wide * (columns + beside)];
  maps.forEach((map, i) => map.forEach((line, row) => finite(line).forEach((value, column) => {
    z[corner(i)[0] + row][corner(i)[1] + column] = value;
  })));
  const axis = {visible: false, constrain: 'domain', fixedrange: true, automargin: false};
  const node = $('heads');
  plot('heads', [{type: 'heatmap', z, colorscale: shares(), zmin: 0, zmax: 1, showscale: false, hoverongaps: false,
                  hovertemplate: '%{z:.3f}<extra></extra>'}], {
    margin: {l: 8, r: 8, t: 8, b: 8}, xaxis: {...axis, constraintoward: 'left'},
    yaxis: {...axis, autorange: 'reversed', scaleanchor: 'x', constraintoward: 'top'},
    annotations: maps.map((_, i) => ({
      x: corner(i)[1] - 0.5, y: corner(i)[0] - 0.5, xanchor: 'left', yanchor: 'bottom', showarrow: false, borderpad: 1,
      text: i === chosenHead ? `<b>head ${i}</b>` : `head ${i}`, font: {size: 11},
    })),
    shapes: maps.map((_, i) => ({
      type: 'rect', x0: corner(i)[1] - 0.5, y0: corner(i)[0] - 0.5, x1: corner(i)[1] + columns - 0.5,
      y1: corner(i)[0] + rows - 0.5,
      fillcolor: colour('hole'), layer: 'below',
      line: i === chosenHead ? {width: 2.5, color: colour('accent')} : {width: 1, color: colour('line')},
    })),
  }, `Attention weights of all ${maps.length} heads of this sentence`);
  node.pick = ([row, column]) => {
    const i = Math.floor((row - above) / (rows + above)) * wide + Math.floor(column / (columns + beside));
    if (maps[i]) choose({head: String(i)});
  };
  if (!node.listens) node.on('plotly_click', event => node.pick([event.points[0].y, event.points[0].x]));
  node.listens = true;
}

function sentenceLabel(i, words) {
  const text = words ? `${i}: ${words[0].filter(Boolean).join(' ')}` : String(i);
  return text.length <= 60 ? text : `${text.slice(0, 59)}\u2026`;
}

// Axis labels: the word of each cell, or its position if the words are unknown.
function axisLabels(all, patch, cells) {
  const known = patch === 1 && all, name = i => known ? all[i] ?? '' : String(i * patch);
  const at = range(cells).filter(i => i % Math.ceil(cells / 64) === 0), words = at.map(i => brief(name(i), 28));
  const full = range(cells).map(i => escaped(known && all[i] || `position ${i * patch}`));
  return {at, words, short: words.map(escaped), full};
}

// ---- table ----------------------------------------------------------------------------------------------------------

// [name, heading, is text, tooltip, function (tensor, error measures) => value]
const COLUMNS = [
  ['layer', 'layer', true, '', tensor => tensor.layer],
  ['role', 'role', true, 'operation and name',
   tensor => roleLabel(roleOf(tensor)) + (tensor.time === null ? '' : ` t${tensor.time}`)],
  ['instance', 'instance', true, 'subfolder, run, phase and component, rank, sample, group', placeOf],
  ['step', 'step', false, 'training step', tensor => tensor.step],
  ['shape', 'shape', true, '', tensor => tensor.shape.join('\u00d7')],
  ['used', 'used as', true, 'format to which the run rounded the tensor', tensor => tensor.format],
  ...[
    ['sqnr_db', 'SQNR dB', 'signal-to-quantization-noise ratio: 10 log10(sum x\u00b2 / sum error\u00b2)'],
    ['max_abs_error', 'largest error', 'largest |rounded - x|'],
    ['rmse', 'rms error', 'root mean square of rounded - x'],
    ['cosine', 'cosine', 'cosine similarity of x and rounded x'],
    ['mean_relative_error', 'mean relative error', 'mean of |error / x| over nonzero x'],
    ['underflow_pct', '% underflow', 'nonzero values that become 0'],
    ['subnormal_pct', '% subnormal', 'nonzero values below the smallest normal value of the format'],
    ['saturation_pct', '% too large', 'values above the largest value of the format'],
    ['overflow', 'overflow', 'finite values that become infinite or NaN'],
  ].map(([name, label, title]) => [name, label, false, title, (tensor, numbers) => measure(numbers, name)]),
  ...[
    ['amax', 'largest |x|'], ['rms', 'rms'], ['mean', 'mean'], ['zeros', 'zeros'],
  ].map(([name, label]) => [name, label, false, 'of the saved values', tensor => statistic(tensor, name)]),
  ['nonfinite', 'NaN, inf', false, 'number of NaN and infinite elements',
   tensor => tensor.statistics ? statistic(tensor, 'nan') + statistic(tensor, 'inf') : undefined],
];
let rowsShown = ROWS;

function ordered(tensors, chosen) {
  const column = key => COLUMNS.find(([name]) => name === key);
  const [, , isText, , value] = column(chosen.sort) ?? column(DEFAULTS.sort);
  const sign = chosen.order === 'descending' ? -1 : 1;
  const keyed = tensors.map(tensor => [value(tensor, qualityOf(tensor, chosen.format)), tensor]);
  const compare = isText ? (a, b) => sign * a.localeCompare(b, undefined, {numeric: true}) : (a, b) => sign * (a - b);
  const isKnown = ([key]) => key !== undefined && key !== null, known = keyed.filter(isKnown);
  // compare equal values first: Infinity - Infinity is NaN
  known.sort(([a, one], [b, other]) => (a === b ? 0 : compare(a, b)) || one.id - other.id);
  return [...known, ...keyed.filter(pair => !isKnown(pair))].map(([, tensor]) => tensor);
}

function matches(tensor, words) {
  const {layer, operation, name, step, format, type} = tensor;
  const text = `${layer} ${operation} ${name} step:${step} ${format} ${type} ${placeOf(tensor)}`.toLowerCase();
  return words.every(word => word.startsWith('step:') ? text.split(' ').includes(word) : text.includes(word));
}

// The tensors that the words of the filter select.
function matching(chosen) {
  const words = chosen.words.toLowerCase().split(/\s+/).filter(Boolean);
  return data.tensors.filter(tensor => matches(tensor, words));
}

function drawTable(chosen, found) {
  const table = $('table'), format = data.formats.find(item => item.name === chosen.format);
  const focused = document.activeElement.closest('#table tr')?.dataset.id;
  const columns = COLUMNS.filter(([name]) => name !== 'instance' || data.tensors.some(placeOf));
  table.tHead.replaceChildren(element('tr', {}, ...columns.map(([name, label, isText, title]) => {
    const button = element('button', {type: 'button', textContent: label, title: title || label});
    const cell = element('th', {scope: 'col', className: isText ? 'text' : ''}, button);
    cell.dataset.column = name;
    if (name === chosen.sort) cell.setAttribute('aria-sort', chosen.order);
    return cell;
  })));
  const rows = ordered(matching(chosen), chosen);
  const lines = rows.slice(0, rowsShown).map(tensor => drawRow(columns, tensor, format, tensor === found?.tensor));
  table.tBodies[0].replaceChildren(...lines);
  lines.find(line => line.dataset.id === focused)?.focus({preventScroll: true});
  $('statistics-title').textContent = `Statistics in ${chosen.format}`;
  const part = rows.length === data.tensors.length ? '' : `${rows.length} of `;
  $('count').textContent = `${part}${data.tensors.length} tensors`;
  $('more').hidden = rows.length <= rowsShown;
}

function drawRow(columns, tensor, format, isChosen) {
  const numbers = qualityOf(tensor, format.name), line = element('tr', {tabIndex: -1});
  line.dataset.id = tensor.id;
  line.setAttribute('aria-selected', String(isChosen));
  for (const [name, , isText, , value] of columns) {
    const given = value(tensor, numbers), text = isText ? given : given === undefined ? '\u2026' : shown(given);
    const cell = element('td', {className: isText ? 'text' : '', textContent: text});
    if (name === 'layer') {
      cell.classList.add('name');
      cell.title = given;
    } else if (name === 'sqnr_db' && given !== undefined && given !== null) {
      cell.classList.add('meter');                                          // the bar is full at 60 dB
      cell.style.setProperty('--part', `${Math.min(100, Math.max(0, given / 0.6))}%`);
      cell.style.setProperty('--format', format.colour);
    }
    line.append(cell);
  }
  return line;
}

// ---- files -----------------------------------------------------------------------------------------------------------

function save(name, type, content) {
  const link = element('a', {href: URL.createObjectURL(new Blob([content], {type})), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const fileName = (...parts) => parts.join('_').replace(/[^A-Za-z0-9_.-]+/g, '_');

// Add buttons that save a plot as SVG and as PNG, in its colours and with the size on the screen.
function addExports(node) {
  const caption = node.closest('figure').querySelector('figcaption'), box = element('span', {className: 'exports'});
  for (const format of ['svg', 'png']) {
    const button = element('button', {type: 'button', className: 'small', textContent: format.toUpperCase(),
                                      title: `save this plot as ${format.toUpperCase()}`});
    button.dataset.export = format;
    button.setAttribute('aria-label', `save the plot ${node.id} as ${format.toUpperCase()}`);
    button.addEventListener('click', async () => {
      if (!node.data) return;
      const figure = {data: node.data, layout: {...node.layout, paper_bgcolor: colour('card')}, config: {}};
      const url = await Plotly.toImage(figure, {format, width: node.clientWidth, height: node.clientHeight, scale: 2});
      const text = url.slice(url.indexOf(',') + 1), found = resolve(choice());
      const name = fileName(node.id, ...found ? [found.layer, found.tensor.name, `step${found.step}`] : []);
      save(`${name}.${format}`, `image/${format === 'svg' ? 'svg+xml' : 'png'}`,
           format === 'svg' ? decodeURIComponent(text) : bytesOf(text));
    });
    box.append(button);
  }
  caption.append(box);
}

// Quote a field for CSV.  A name that begins like a formula gets an apostrophe, so that no spreadsheet computes it.
function field(value) {
  if (value === null || value === undefined) return '';
  const text = typeof value === 'string' ? value.replace(/^(?=[=+@\t\r-])/, "'") : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const lines = rows => rows.map(row => row.map(field).join(',')).join('\r\n') + '\r\n';

// All rows of a table in the order on the screen, with unrounded numbers.
function csvOf(table) {
  if (table === 'differences') {
    const isError = i => i === 4 || i === 6;
    const numbers = row => row.map((value, i) => isError(i) && value === null ? Infinity : value);
    return lines([DIFFERENCES, ...data.partings.rows.map(numbers)]);
  }
  const chosen = choice(), rows = ordered(matching(chosen), chosen);
  return lines([COLUMNS.map(([name]) => name), ...rows.map(tensor => COLUMNS.map(
    ([, , , , value]) => value(tensor, qualityOf(tensor, chosen.format))))]);
}

function saveTable(table) {
  save(fileName(table, table === 'statistics' ? choice().format : data.partings.reference) + '.csv', 'text/csv', csvOf(table));
}

// ---- page -----------------------------------------------------------------------------------------------------------

const isPlain = value => ['string', 'number', 'boolean'].includes(typeof value) && value;

function drawHead() {
  const {run} = data;
  $('title').textContent = run.program ? `${run.program}: ${head.title}` : head.title;
  document.title = `${$('title').textContent} \u2013 tensors`;
  const settings = Object.entries(run.settings ?? {}).filter(([, value]) => isPlain(value)).slice(0, 16);
  $('run').textContent = [run.started, ...settings.map(([key, value]) => `${key} ${value}`)].filter(isPlain).join(' \u00b7 ');
  $('notice').hidden = !data.omissions.length;
  $('notice').textContent = data.omissions.join(' ');
  $('skipped').hidden = !data.skipped.length;
  $('skipped').querySelector('summary').textContent = `Skipped files: ${data.skipped.length}`;
  const lines = data.skipped.map(([file, reason]) => element('li', {textContent: `${file}: ${reason}`}));
  $('skipped').querySelector('ul').replaceChildren(...lines);
}

let drawing = 0, drawnHash = '';

function redraw() {
  const turn = ++drawing, isStale = () => turn !== drawing;
  const chosen = choice(), found = resolve(chosen);
  drawnHash = location.hash;
  drawHead();
  drawControls(chosen, found);
  drawTraining(chosen, found);
  drawTable(chosen, found);
  const parts = [drawSteps, drawTensor, drawAttention].map(draw => draw(chosen, found, isStale));
  return Promise.all(parts).then(() => { if (!isStale()) document.documentElement.dataset.drawn = String(turn); });
}

function jump(part) {
  $(part).scrollIntoView({block: 'start'});
}

// Select the previous or the next option.
function step(id, by, wrap = false) {
  const select = $(id), count = select.options.length;
  if (!count || select.closest('[hidden]')) return;
  const next = select.selectedIndex + by, index = wrap ? (next + count) % count : Math.min(count - 1, Math.max(0, next));
  if (index === select.selectedIndex) return;
  select.selectedIndex = index;
  select.dispatchEvent(new Event('change'));
}

// Go to another step.  Not through `step`: the select lists the steps in descending order after the entry "newest".
function otherStep(by) {
  const found = resolve(choice());
  const index = found ? found.steps.indexOf(found.step) + by : -1;
  if (found && index >= 0 && index < found.steps.length) choose({step: String(found.steps[index])});
}

function nextView() {
  const tabs = [...document.querySelectorAll('[data-view]:not(:disabled)')];
  const index = tabs.findIndex(tab => tab.dataset.view === choice().view);
  choose({view: tabs[(index + 1) % tabs.length].dataset.view});
}

const KEYS = {
  ArrowLeft: () => otherStep(-1), ArrowRight: () => otherStep(1),
  ArrowUp: () => step('layer', -1), ArrowDown: () => step('layer', 1),
  r: () => step('role', 1, true), f: () => step('format', 1, true), v: nextView,
  t: () => step('stat', 1, true), s: () => step('sentence', 1, true), h: () => step('head', 1, true),
  '?': () => $('help').showModal(),
};

function listen() {
  const sets = {layer: 'layer', role: 'role', step: 'step', copy: 'copy', format: 'format', 'flow-role': 'flow',
                'attention-layer': 'attention', sentence: 'sentence', head: 'head', stat: 'stat'};
  for (const id in sets) $(id).addEventListener('change', event => choose({[sets[id]]: event.target.value}));
  $('controls').addEventListener('submit', event => event.preventDefault());
  $('log-counts').addEventListener('change', event => choose({counts: event.target.checked ? 'log' : 'linear'}));
  $('words').value = choice().words;
  $('words').addEventListener('input', event => {
    rowsShown = ROWS;
    choose({words: event.target.value}, true);
  });
  $('more').addEventListener('click', () => { rowsShown += ROWS; redraw(); });
  $('keys').addEventListener('click', () => $('help').showModal());
  for (const tab of document.querySelectorAll('[data-view]')) {
    tab.addEventListener('click', () => choose({view: tab.dataset.view}));
  }
  for (const link of document.querySelectorAll('[data-part]')) {
    link.addEventListener('click', event => { event.preventDefault(); jump(link.dataset.part); });
  }
  $('table').tHead.addEventListener('click', event => {
    const column = event.target.closest('th')?.dataset.column, chosen = choice();
    if (!column) return;
    choose({sort: column, order: column === chosen.sort && chosen.order === 'ascending' ? 'descending' : 'ascending'});
  });
  $('table').tBodies[0].addEventListener('click', event => pick(event.target.closest('tr')));
  $('differences').tBodies[0].addEventListener('click', event => pickDifference(event.target.closest('tr')));
  $('scroll').addEventListener('keydown', event => moveInTable(event, 'table', pick));
  $('differences-scroll').addEventListener('keydown', event => moveInTable(event, 'differences', pickDifference));
  for (const button of document.querySelectorAll('[data-table]')) {
    button.addEventListener('click', () => saveTable(button.dataset.table));
  }
  for (const node of document.querySelectorAll('.plot')) addExports(node);
  document.addEventListener('keydown', event => {
    const isTyped = event.target.closest('input, select, textarea, dialog, .scroll');
    if (isTyped || event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(KEYS, event.key)) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  addEventListener('hashchange', () => {
    const {words} = choice();
    if ($('words').value !== words) $('words').value = words;
    redraw();
  });
  dark.addEventListener('change', redraw);
}

function pick(line) {
  if (!line) return;
  const tensor = data.tensors[line.dataset.id], role = roleOf(tensor);
  const copy = data.tree.get(tensor.layer).get(role).get(tensor.step).length > 1 ? copyOf(tensor) : '';
  choose({layer: tensor.layer, role, step: String(tensor.step), copy, attention: ''});
  jump('tensor');
}

// Arrow keys move between rows, Enter selects the tensor.
function moveInTable(event, table, pick) {
  const lines = [...$(table).tBodies[0].rows], index = lines.indexOf(document.activeElement.closest('tr'));
  if (event.key === 'Enter' && index >= 0) pick(lines[index]);
  else if (event.key === 'ArrowDown') lines[Math.min(lines.length - 1, index + 1)]?.focus();
  else if (event.key === 'ArrowUp') lines[Math.max(0, index - 1)]?.focus();
  else return;
  event.preventDefault();
}

clear();
listen();
source.start().catch(error => {
  $('notice').hidden = false;
  $('notice').textContent = `The data of this page cannot be read (${error.message}); use a browser from 2023 or later.`;
});

})();
