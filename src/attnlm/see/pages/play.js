"use strict";
/* What a reader sees and does: the text, the next token, attention, one head's way, the lens. model.js computes.

   For the console and for tests: attnlm.models is a list. Each model has
     name                        of its run
     encode(text)                the ids of a text
     decode(ids)                 their text
     logits(ids)                 Float32Array (V): the logits of the token after the last id
     attention(ids)              [layer][head] → Float32Array T × T
     generate({ids, tokens, temperature, topK, topP, seed})
                                 a promise of the new ids
   A model sees the last `architecture.block_size` ids only. */

const LARGEST_TEXT = 512; // tokens whose attention is shown
const CANDIDATES = 10;
const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((found) => [found.id, found]));
const models = unpackModels(JSON.parse(page.data.textContent));
window.attnlm = {models};

const shown = {model: 0, layer: 0, head: 0, token: 0, arcs: false};
const made = models.map(() => []); // by generation: {id, probability} of each new token, after `prompt`
let typed = null; // the text that was computed last
let generating = null; // {stopped}, while tokens are generated
let seen = null; // what the chosen model made of the text: tokens, maps, streams and parts of each token

function element(tag, attributes = {}, ...content) {
  const namespace = ["svg", "path", "text", "circle", "g", "rect"].includes(tag) ? "http://www.w3.org/2000/svg" : null;
  const found = namespace ? document.createElementNS(namespace, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, x] of Object.entries(value)) found.style.setProperty(key, x);
    else if (value !== false && value !== undefined) found.setAttribute(name, value === true ? "" : value);
  }
  found.append(...content);
  return found;
}

/* Tokens as text that can be read: no invisible signs, none that change the direction of others. */
function visible(text) {
  const names = {" ": "␣", "\n": "⏎", "\t": "⇥"};
  if (/^ +$/.test(text)) return "␣".repeat(text.length);
  return [...text].map((sign) => names[sign] && text.length === 1 ? names[sign]
    : sign === "\n" ? "⏎" : /[\p{C}\p{Zl}\p{Zp}\ufeff]/u.test(sign) ? `\\u{${sign.codePointAt(0).toString(16)}}` : sign).join("");
}

const tokenText = (model, id) => visible(model.decode([id]));
const percent = (probability) => `${(100 * probability).toFixed(probability < 0.0995 ? 1 : 0)}%`;
const numberText = (x) => (Math.abs(x) >= 1000 || (x !== 0 && Math.abs(x) < 0.01) ? x.toExponential(1) : x.toFixed(2));

function options() {
  const given = (input) => (input.value === "" ? undefined : input.valueAsNumber);
  return {
    tokens: given(page.tokens) ?? 200,
    temperature: given(page.temperature) ?? 1,
    topK: given(page["top-k"]),
    topP: given(page["top-p"]),
    seed: given(page.seed),
  };
}

/* The ids of the text: those that were generated stay as they are, however their text would be encoded. */
function idsOf(number) {
  const model = models[number];
  const ids = model.encode(page.prompt.value);
  const all = [...ids, ...made[number].map(({id}) => id)];
  return all.length ? all : [model.first];
}

/* Compute and show, after a change. What is still computed for an older text ends. */
let newest = 0;
async function refresh() {
  const turn = ++newest, pause = new Pause();
  try {
    for (const [number, model] of models.entries()) {
      const logits_V = await pause.finish(model.computeLogits(idsOf(number)));
      if (turn !== newest) return;
      showNext(number, logits_V);
    }
    page.told.textContent = "";
  } catch (error) {
    if (!(error instanceof TextError)) throw error;
    page.told.textContent = error.message;
    return;
  }
  const model = models[shown.model], ids = model.seen(idsOf(shown.model)).slice(-LARGEST_TEXT);
  const found = {ids, tokens: ids.map((id) => tokenText(model, id)), maps: [], streams: [], parts: [], logits: []};
  const T = ids.length;
  await pause.finish(model.watch(ids, (part, layer, values, t) => {
    if (part === "attention") {
      const heads = (found.maps[layer] ??= values.map(() => new Float32Array(T * T)));
      values.forEach((weights_T, head) => heads[head].set(weights_T, t * T));
    } else if (part === "logits") found.logits[t] = values;
    else if (part === "embedding" || part === "stream") (found.streams[layer === null ? 0 : layer + 1] ??= [])[t] = values;
    else ((found.parts[layer] ??= {})[part] ??= [])[t] = values;
  }));
  if (turn !== newest) return;
  seen = found;
  shown.token = Math.min(shown.token, T - 1);
  if (shown.follows !== false) shown.token = T - 1;
  showText();
  showThumbnails();
  showHead();
  await answered();
  if (turn !== newest) return;
  showLens();
  showEmbeddings();
}

/* The likeliest next tokens of a model, and what it has generated. */
function showNext(number, logits_V) {
  const model = models[number], {temperature, topK, topP} = options();
  const probabilities_V = nextProbabilities(logits_V, {temperature, topK, topP});
  const likeliest = largest(probabilities_V, CANDIDATES);
  const bars = likeliest.filter((id) => probabilities_V[id] > 0).map((id) => element("li", {},
    element("span", {class: "candidate"}, tokenText(model, id)),
    element("span", {class: "bar", style: {"--share": probabilities_V[id].toFixed(4)}}),
    element("span", {class: "percent"}, percent(probabilities_V[id]))));
  const text = made[number].map(({id, probability}) => element("span",
    {title: `${tokenText(model, id)}: ${percent(probability)}`, class: "made", style: {"--share": probability.toFixed(3)}},
    displayed(model.decode([id]))));
  const part = element("section", {"data-model": number},
    ...(models.length > 1 ? [element("h3", {}, model.name)] : []),
    element("ol", {class: "next"}, ...bars),
    ...(text.length ? [element("pre", {class: "generated", "aria-label": `generated by ${model.name}`}, ...text)] : []));
  const before = page.models.querySelector(`[data-model="${number}"]`);
  if (before) before.replaceWith(part);
  else page.models.append(part);
}

/* Text as it is, but for signs that are invisible or change the direction of others. */
function displayed(text) {
  return [...text].map((sign) => (sign === "\n" || sign === "\t" || sign === " " ? sign : visible(sign))).join("");
}

function largest(values, count) {
  const found = [];
  for (const [id, value] of values.entries()) {
    if (found.length === count && value <= values[found[count - 1]]) continue;
    let at = found.length;
    while (at > 0 && values[found[at - 1]] < value) at--;
    found.splice(at, 0, id);
    found.length = Math.min(found.length, count);
  }
  return found;
}

function map() { return seen.maps[shown.layer]?.[shown.head]; }

/* The text, with the tint of what the chosen token attends to. */
function showText() {
  const T = seen.ids.length, weights = map();
  const focused = page.text.contains(document.activeElement);
  page.text.replaceChildren(...seen.tokens.map((token, t) => element("button", {
    type: "button",
    "aria-pressed": String(t === shown.token),
    tabindex: t === shown.token ? 0 : -1,
    title: weights && t <= shown.token ? weightText(shown.token, t) : token,
    style: {"--share": weights && t <= shown.token ? weights[shown.token * T + t].toFixed(3) : 0},
    onclick: () => chooseToken(t),
  }, token)));
  if (focused) page.text.children[shown.token]?.focus();
}

function weightText(query, key) {
  const weight = map()[query * seen.ids.length + key];
  return `“${seen.tokens[query]}” gives ${percent(weight)} to “${seen.tokens[key]}”`;
}

function chooseToken(t) {
  shown.token = t;
  shown.follows = t === seen.ids.length - 1;
  showText();
  showHead();
}

function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/* A map as a picture, a pixel for each weight: its tint is as strong as the root of the weight, so that small ones are
   seen. Tokens that come later stay transparent: the hatching behind them is the mask. */
function drawMap(canvas, weights, T) {
  const paper = colour("--paper"), tint = colour("--tint"), context = canvas.getContext("2d");
  canvas.width = canvas.height = T;
  const picture = context.createImageData(T, T);
  for (let query = 0; query < T; query++) {
    for (let key = 0; key <= query; key++) {
      const cell = query * T + key, strength = Math.sqrt(weights[cell]);
      for (let i = 0; i < 3; i++) picture.data[4 * cell + i] = paper[i] + (tint[i] - paper[i]) * strength;
      picture.data[4 * cell + 3] = 255;
    }
  }
  context.putImageData(picture, 0, 0);
}

function showThumbnails() {
  const model = models[shown.model];
  page["heads-section"].hidden = seen.maps.length === 0;
  const buttons = seen.maps.flatMap((heads, layer) => heads.map((weights, head) => {
    const canvas = element("canvas", {width: 1, height: 1});
    drawMap(canvas, weights, seen.ids.length);
    const isOff = model.silenced.has(`${layer}.${head}`);
    return element("button", {
      type: "button",
      "aria-pressed": String(layer === shown.layer && head === shown.head),
      class: isOff ? "off" : "",
      onclick: () => chooseHead(layer, head),
    }, canvas, `layer ${layer + 1} head ${head + 1}${isOff ? ", off" : ""}`);
  }));
  const focused = [...page.thumbnails.children].indexOf(document.activeElement);
  page.thumbnails.replaceChildren(...buttons);
  if (focused >= 0) buttons[focused]?.focus();
}

function chooseHead(layer, head) {
  Object.assign(shown, {layer, head});
  showThumbnails();
  showText();
  showHead();
}

function showHead() {
  const weights = map();
  if (!weights) {
    showWay();
    return;
  }
  const T = seen.ids.length, query = shown.token;
  const row = weights.subarray(query * T, query * T + query + 1);
  const most = largest(row, 3).map((key) => `${percent(row[key])} “${seen.tokens[key]}”`).join(", ");
  page["head-caption"].textContent = `Layer ${shown.layer + 1}, head ${shown.head + 1}: “${seen.tokens[query]}” attends to ${most}`;
  const isOff = models[shown.model].silenced.has(`${shown.layer}.${shown.head}`);
  page.switch.setAttribute("aria-pressed", String(isOff));
  page.switch.textContent = isOff ? "Switch this head on" : "Switch this head off";
  page.large.replaceChildren(shown.arcs ? arcs(weights, T) : labelledMap(weights, T));
  showWay();
}

/* The map with its tokens on both axes. */
function labelledMap(weights, T) {
  const canvas = element("canvas", {width: 1, height: 1, role: "img", "aria-label": page["head-caption"].textContent});
  drawMap(canvas, weights, T);
  const picture = element("div", {class: "picture"}, canvas);
  const label = (token, t) => element("span", {class: t === shown.token ? "now" : ""}, token);
  picture.addEventListener("pointermove", (event) => {
    const [query, key] = [event.offsetY / canvas.clientHeight, event.offsetX / canvas.clientWidth].map((x) => Math.floor(x * T));
    if (query < 0 || query >= T || key < 0 || key >= T) return;
    picture.title = key > query ? `“${seen.tokens[query]}” comes before “${seen.tokens[key]}”` : weightText(query, key);
  });
  picture.addEventListener("click", (event) => chooseToken(Math.min(T - 1, Math.floor((event.offsetY / canvas.clientHeight) * T))));
  return element("div", {class: "labelled", style: {"--tokens": T, "--row": shown.token}},
    element("div", {class: "columns"}, ...seen.tokens.map(label)),
    element("div", {class: "rows"}, ...seen.tokens.map(label)), picture);
}

/* Arcs from the chosen token to those that it attends to: as thick as their weights. */
function arcs(weights, T) {
  const width = 28, height = Math.min(260, 30 + T * 8), line = height - 20, at = (t) => (t + 0.5) * width;
  const curves = [];
  for (let key = 0; key <= shown.token; key++) {
    const weight = weights[shown.token * T + key];
    if (weight < 0.005) continue;
    const [from, to] = [at(shown.token), at(key)], top = line - 20 - ((line - 30) * Math.abs(from - to)) / (T * width);
    const path = element("path", {
      d: `M ${from} ${line - 12} C ${from} ${top}, ${to} ${top}, ${to} ${line - 12}`,
      "stroke-width": Math.max(0.5, 8 * weight), stroke: "var(--tint)", fill: "none", "stroke-opacity": 0.85});
    path.append(document.createElementNS("http://www.w3.org/2000/svg", "title"));
    path.firstChild.textContent = weightText(shown.token, key);
    curves.push(path);
  }
  const labels = seen.tokens.map((token, t) => element("text", {
    x: at(t), y: line + 4, "text-anchor": "middle", "font-weight": t === shown.token ? 700 : 400, fill: "currentColor",
    onclick: () => chooseToken(t)}, token));
  return element("svg", {class: "arcs", width: T * width, height, viewBox: `0 0 ${T * width} ${height}`, role: "img",
    "aria-label": page["head-caption"].textContent}, ...curves, ...labels);
}

/* One head, step by step, for the chosen token: names, shapes and numbers. */
function showWay() {
  page.way.replaceChildren(...stepsOfHead().map(({name, axes, values, factors}) => {
    const shownNumbers = strip(values, (at) => showFactors(name, at, values[at], factors?.(at)));
    return element("div", {}, element("h3", {}, name, " ", element("small", {}, `(${axes} = ${values.length})`)), shownNumbers);
  }));
  page["made-of"].replaceChildren();
}

/* The steps: each with its numbers and, for one of them, the two vectors whose products it adds up. */
function stepsOfHead() {
  const model = models[shown.model], a = model.architecture, t = shown.token, {layer, head} = shown;
  const last = seen.streams.at(-1)?.[t], token = (place) => `“${seen.tokens[place]}”`;
  if (last === undefined) return [{name: `row ${token(t)} of the table: logits`, axes: "V", values: seen.logits[t]}];
  const steps = [], parts = seen.parts[layer];
  const rowOf = (name, index) => row(model.weights[name], index);
  const add = (name, axes, values, factors) => values && steps.push({name, axes, values, factors});
  add(a.positions === "learned" ? "token embedding + position embedding" : "token embedding", "C", seen.streams[0][t]);
  if (parts) {
    const isSoftmax = a.attention === "softmax", D = isSoftmax ? a.head_size : parts.input[t].length;
    const group = isSoftmax ? Math.floor((head * a.kv_heads) / a.heads) : 0;
    const own = (values, number) => (isSoftmax ? values?.slice(number * D, (number + 1) * D) : values);
    const queries = isSoftmax ? parts.query : parts.input, keys = isSoftmax ? parts.key : parts.input;
    const values = isSoftmax ? parts.value : parts.input;
    const changed = [a.query_key_norm && "norm", a.positions === "rotary" && "rotation"].filter(Boolean).join(" and ");
    if (a.norm !== "none") add(`input of the attention, after ${a.norm === "rms" ? "RMS" : "layer"} norm`, "C", parts.input[t]);
    for (const [part, number, letter] of isSoftmax ? [["query", head, "q"], ["key", group, "k"], ["value", group, "v"]] : []) {
      const name = changed && part !== "value" ? `${part} ${letter}, after ${changed}` : `${part} ${letter}`;
      add(name, "D", own(parts[part][t], number), (at) => [
        [`row ${number * D + at + 1} of the ${part} matrix`, rowOf(`blocks.${layer}.attention.${part}.weight`, number * D + at)],
        ["input", parts.input[t]]]);
    }
    if (a.attention !== "uniform") {
      add(`scores: ${model.scoreFormula}, of the tokens up to this one`, "T", parts.scores[t][head], (at) => [
        [`q of ${token(t)}`, own(queries[t], head)], [`k of ${token(at)}`, own(keys[at], group)]]);
    }
    const weights = Float32Array.from({length: t + 1}, (_, key) => map()[t * seen.ids.length + key]);
    add("attention weights: softmax of the scores", "T", weights);
    add("mix: the values, each times its weight", "D", own(parts.mixed[t], head), (at) => [
      ["attention weights", weights],
      [`number ${at + 1} of each token’s value`, Float32Array.from(weights, (_, key) => own(values[key], group)[at])]]);
    const rest = [a.projection && "projection", a.residual && "sum", a.mlp !== "none" && "MLP"].filter(Boolean);
    add(`stream after layer ${layer + 1}${rest.length ? ` (${rest.join(", ")})` : ""}`, "C", seen.streams[layer + 1][t]);
  }
  add("logits", "V", seen.logits[t], (id) => [
    [`row “${tokenText(model, id)}” of the LM head`, rowOf(`${model.head}.weight`, id)],
    [a.norm === "none" ? "stream" : "stream, after the last norm", model.headInput(last)]]);
  return steps;
}

/* Numbers in a row, blue above zero and orange below, each a button. */
function strip(values, choose) {
  const shownValues = Array.from(values.slice(0, 64)), most = Math.max(...shownValues.map(Math.abs), 1e-30);
  const cells = shownValues.map((value, at) => element(choose ? "button" : "span", {
    ...(choose ? {type: "button", onclick: () => choose(at)} : {}),
    title: `number ${at + 1}: ${numberText(value)}`,
    class: value < 0 ? "number negative" : "number",
    style: {"--share": (Math.abs(value) / most).toFixed(3)},
  }, values.length <= 16 ? numberText(value) : ""));
  const rest = values.length - cells.length;
  return element("div", {class: "numbers"}, ...cells, ...(rest > 0 ? [element("span", {class: "note"}, `… ${rest} more`)] : []));
}

/* The two vectors that make a number: it is the sum of their products. */
function showFactors(name, at, value, factors) {
  const parts = (factors ?? []).flatMap(([label, values]) => [element("h3", {}, label), strip(values)]);
  const products = factors ? `: the sum of ${factors[0][1].length} products, ${numberText(dot(factors[0][1], 0, factors[1][1], 0, factors[0][1].length))}` : "";
  page["made-of"].replaceChildren(element("p", {}, element("strong", {}, `Number ${at + 1} of “${name}” = ${numberText(value)}`), products), ...parts);
}

function showLens() {
  const model = models[shown.model], width = seen.streams.at(-1)?.[0].length;
  const rows = seen.streams.map((stream, n) => ({name: n ? `layer ${n}` : "embedding", stream}))
    .filter(({stream}) => stream[0].length === width);
  page["lens-section"].hidden = rows.length < 2;
  if (rows.length < 2) return;
  const first = Math.max(0, seen.ids.length - 24);
  const line = ({name, stream}) => element("tr", {}, element("th", {scope: "row"}, name),
    ...stream.slice(first).map((x_C) => {
      const probabilities_V = softmax(model.readOut(x_C)), [id] = largest(probabilities_V, 1);
      return element("td", {style: {"--share": probabilities_V[id].toFixed(3)}}, tokenText(model, id), element("small", {}, percent(probabilities_V[id])));
    }));
  const head = element("tr", {}, element("th", {}, "after"), ...seen.tokens.slice(first).map((token) => element("th", {scope: "col"}, token)));
  page.lens.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows.map(line)));
}

/* The tokens' embeddings along the two directions in which they differ most. */
const planes = new Map();
function plane(model) {
  if (planes.has(model)) return planes.get(model);
  const {shape: [V, C], values} = model.weights["token_embedding.weight"] ?? model.weights["table.weight"];
  const count = Math.min(V, 500), mean_C = new Float64Array(C);
  for (let id = 0; id < count; id++) for (let c = 0; c < C; c++) mean_C[c] += values[id * C + c] / count;
  const centred = Array.from({length: count}, (_, id) => Float64Array.from(mean_C, (mean, c) => values[id * C + c] - mean));
  const random = randomNumbers(1), directions = [];
  for (let n = 0; n < 2; n++) {
    let direction = Float64Array.from(mean_C, () => random() - 0.5);
    for (let turn = 0; turn < 60; turn++) { // the power method
      const next = new Float64Array(C);
      for (const x_C of centred) {
        const along = dot(x_C, 0, direction, 0, C);
        for (let c = 0; c < C; c++) next[c] += along * x_C[c];
      }
      for (const other of directions) {
        const along = dot(next, 0, other, 0, C);
        for (let c = 0; c < C; c++) next[c] -= along * other[c];
      }
      const length = Math.sqrt(dot(next, 0, next, 0, C)) || 1;
      direction = next.map((x) => x / length);
    }
    directions.push(direction);
  }
  planes.set(model, centred.map((x_C) => directions.map((direction) => dot(x_C, 0, direction, 0, C))));
  return planes.get(model);
}

function showEmbeddings() {
  const model = models[shown.model], places = plane(model), inText = new Set(seen.ids);
  const most = places.reduce((so, [x, y]) => Math.max(so, Math.abs(x), Math.abs(y)), 1e-30);
  const [width, height] = [640, 420];
  const labels = places.map(([x, y], id) => element("text", {
    x: width / 2 + (x / most) * (width / 2 - 24), y: height / 2 - (y / most) * (height / 2 - 16),
    "text-anchor": "middle", "font-size": 13, "font-weight": inText.has(id) ? 700 : 400,
    fill: "currentColor", "fill-opacity": inText.has(id) ? 1 : 0.55}, tokenText(model, id)));
  page.embeddings.replaceChildren(element("svg", {viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": "token embeddings in two dimensions", class: "plane"}, ...labels));
}

/* Generation: all models go on side by side, each from the same text, and attention follows. */
async function generateTokens(count) {
  if (generating) return;
  generating = {stopped: false};
  const turn = generating;
  page.run.textContent = "Stop";
  try {
    await Promise.all(models.map(async (model, number) => {
      await model.generate({...options(), tokens: count, ids: idsOf(number), onToken: (id, probability) => {
        made[number].push({id, probability});
        if (made[number].length % (count > 20 ? 8 : 1) === 0) requestAnimationFrame(() => { if (!turn.stopped) refresh(); });
        return !turn.stopped;
      }});
    }));
  } catch (error) {
    if (!(error instanceof TextError)) throw error;
    page.told.textContent = error.message;
  } finally {
    generating = null;
    page.run.textContent = "Generate";
    refresh();
  }
}

page.controls.addEventListener("submit", (event) => {
  event.preventDefault();
  if (generating) generating.stopped = true;
  else generateTokens(options().tokens);
});
page.one.addEventListener("click", () => generateTokens(1));
page.prompt.addEventListener("input", () => {
  if (generating) generating.stopped = true;
  for (const list of made) list.length = 0;
  shown.follows = true;
  refresh();
});
for (const name of ["temperature", "top-k", "top-p"]) page[name].addEventListener("input", refresh);
page["as-arcs"].addEventListener("click", () => {
  shown.arcs = !shown.arcs;
  page["as-arcs"].setAttribute("aria-pressed", String(shown.arcs));
  showHead();
});
page.switch.addEventListener("click", () => {
  const model = models[shown.model];
  model.silence(shown.layer, shown.head, !model.silenced.has(`${shown.layer}.${shown.head}`));
  refresh();
});
page.present.addEventListener("click", () => {
  const isLarge = document.documentElement.classList.toggle("presenting");
  page.present.setAttribute("aria-pressed", String(isLarge));
  if (isLarge) document.documentElement.requestFullscreen?.().catch(() => {});
  else if (document.fullscreenElement) document.exitFullscreen();
});
page.text.addEventListener("keydown", (event) => {
  const last = seen.ids.length - 1;
  const to = {ArrowLeft: shown.token - 1, ArrowRight: shown.token + 1, Home: 0, End: last}[event.key];
  if (to === undefined || to < 0 || to > last) return;
  event.preventDefault();
  page.text.children[shown.token].focus();
  chooseToken(to);
  page.text.children[to].focus();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
if (page.tabs) {
  page.tabs.append(...models.map((model, number) => element("button", {type: "button", role: "tab", "aria-selected": String(number === 0),
    onclick: (event) => {
      Object.assign(shown, {model: number, layer: 0, head: 0, follows: true});
      for (const tab of page.tabs.children) tab.setAttribute("aria-selected", String(tab === event.target));
      refresh();
    }}, model.name)));
}
refresh();
