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
     silence(layer, head, isOff) switch a head off (default) or on
   Numbers and ids out of range throw a RangeError. A model sees the last `architecture.block_size` ids only. */

const LARGEST_TEXT = 512; // tokens whose attention is shown
const LARGEST_LENS = 24; // tokens that have a column in the lens
const LARGEST_PLANE = 300; // tokens whose embeddings are shown
const CANDIDATES = 8;
const REST = 60; // milliseconds after a change, before numbers, lens and embeddings follow
const BETWEEN_FRAMES = 80; // milliseconds, while tokens are generated
const given = JSON.parse(page.data.textContent), models = unpackModels(given.models);
window.attnlm = {models};
page.prompt.value = given.prompt;

/* Of each model: the ids that it sees, what was made of them, and the tokens that it generated, with probabilities. */
const states = models.map(() => ({window: [], cache: newCache(), made: [], probabilities_V: null}));
let shown = models.length - 1; // the model whose heads are shown
let isEdited = true; // the text is another than that of the windows
let isLonger = true; // tokens came since heads were shown: the last one is chosen then
let generating = null; // {stopped}, while tokens are generated
const view = new HeadsView({onHead: refresh, switchHead});

const tokenText = (model, id) => visible(model.decode([id]));

function options() {
  const read = (input) => (input.value === "" || !input.validity.valid ? undefined : input.valueAsNumber);
  return {
    tokens: read(page.tokens) ?? 200,
    temperature: read(page.temperature) ?? 1,
    topK: read(page["top-k"]),
    topP: read(page["top-p"]),
    seed: read(page.seed),
  };
}

/* Compute and show, after a change. A newer change ends what is computed for an older one. */
let isBusy = false, isStale = false;
async function refresh() {
  isStale = true;
  if (isBusy || generating) return;
  isBusy = true;
  while (isStale && !generating) {
    isStale = false;
    await computeAndShow(() => isStale || generating);
  }
  isBusy = false;
}

async function computeAndShow(isStopped) {
  const pause = new Pause();
  if (isEdited && !readText()) return;
  for (const [number, model] of models.entries()) {
    const state = states[number];
    const logits_V = await pause.finish(model.computeLogits(state.window, state.cache), isStopped);
    if (logits_V === undefined) return;
    state.probabilities_V = nextProbabilities(logits_V, options());
    showNext(number);
  }
  await showHeads();
  await new Promise((done) => setTimeout(done, REST)); // who types fast waits for nothing else
  for (const part of [showWay, showLens, showEmbeddings]) {
    if (isStopped()) return;
    await part(isStopped);
    await answered();
  }
}

/* Encode the text for every model; false if a vocabulary lacks one of its characters. */
function readText() {
  try {
    const encoded = models.map((model) => model.encode(page.prompt.value));
    states.forEach((state, number) => {
      state.window = models[number].seen(encoded[number].length ? encoded[number] : [models[number].first]);
      state.made = [];
    });
    isLonger = true;
  } catch (error) {
    if (!(error instanceof TextError)) throw error;
    page.told.textContent = error.message;
    return false;
  }
  page.told.textContent = "";
  isEdited = false;
  return true;
}

/* The likeliest next tokens of a model, and what it has generated. */
function showNext(number) {
  const model = models[number], {probabilities_V, made} = states[number], part = page.models.children[number];
  const likeliest = largest(probabilities_V, CANDIDATES).filter((id) => probabilities_V[id] > 0);
  const list = bars(likeliest.map((id) => [tokenText(model, id), probabilities_V[id]]));
  part.querySelector(".next").replaceWith(list);
  const text = part.querySelector(".generated"), last = made.at(-1);
  if (made.length < text.children.length) text.replaceChildren();
  text.append(...made.slice(text.children.length).map(({id, probability}) => element("span",
    {"data-note": `“${tokenText(model, id)}” had ${percent(probability)}`, class: "made", style: {"--share": probability.toFixed(3)}},
    displayed(model.decode([id])))));
  if (last) text.scrollTop = text.scrollHeight;
  part.querySelector(".last").textContent = last
    ? `last token: “${tokenText(model, last.id)}”, which had ${percent(last.probability)}`
    : "Nothing generated yet.";
}

/* The tokens that the chosen model sees: at most the last LARGEST_TEXT of those that were computed. */
function seenTokens() {
  const {ids} = states[shown].cache, first = Math.max(0, ids.length - LARGEST_TEXT);
  return {first, ids: ids.slice(first), tokens: ids.slice(first).map((id) => tokenText(models[shown], id))};
}

function showHeads() {
  const model = models[shown], {cache} = states[shown], {first, tokens} = seenTokens();
  if (isLonger) view.token = tokens.length - 1;
  isLonger = false;
  const attentive = cache.layers.length && cache.layers[0][0].attention ? cache.layers : [];
  page["no-heads"].hidden = attentive.length > 0;
  page["heads-note"].hidden = page.chosen.hidden = attentive.length === 0;
  page["way-title"].textContent = attentive.length ? "The way through one head" : "The way to the next token";
  return view.show({
    tokens,
    layers: attentive.length,
    heads: attentive.length ? attentive[0][0].attention.length : 0,
    row: (layer, head, t) => cache.layers[layer][first + t].attention[head].subarray(first),
    isOff: (layer, head) => model.silenced.has(`${layer}.${head}`),
  });
}

function switchHead(layer, head) {
  const model = models[shown];
  model.silence(layer, head, !model.silenced.has(`${layer}.${head}`));
  states[shown].cache = newCache();
  refresh();
}

async function showLens(isStopped) {
  const model = models[shown], {cache} = states[shown], T = cache.ids.length, width = streamOf(cache, 0).length;
  const streams = [["embedding", cache.embedded], ...cache.layers.map((made_T, n) => [`layer ${n + 1}`, made_T.map(({stream}) => stream)])];
  const rows = model.depth ? streams.filter(([, stream_TC]) => stream_TC[0].length === width) : [];
  page["lens-section"].hidden = rows.length < 2;
  if (rows.length < 2) return;
  const places = Array.from({length: T}, (_, t) => t).slice(-LARGEST_LENS), next = (t) => cache.ids[t + 1];
  const pause = new Pause(), lines = [];
  for (const [name, stream_TC] of rows) {
    const line = element("tr", {}, element("th", {scope: "row"}, name));
    lines.push(line);
    for (const t of places) {
      const probabilities_V = softmax(model.readOut(stream_TC[t])), [id] = largest(probabilities_V, 1);
      line.append(element("td", {class: id === next(t) ? "right" : "", style: {"--share": probabilities_V[id].toFixed(3)}},
        element("span", {}, tokenText(model, id)), element("small", {}, percent(probabilities_V[id]))));
      await pause.rest();
      if (isStopped()) return;
    }
  }
  const head = element("tr", {}, element("th", {scope: "row"}, "after"), ...places.map((t) => element("th", {scope: "col"}, tokenText(model, cache.ids[t]))));
  page.lens.replaceChildren(element("thead", {}, head), element("tbody", {}, ...lines));
}

/* The tokens' embeddings along the two directions in which they differ most. */
async function plane(model, ids) {
  const {shape: [, C], values} = model.weights["token_embedding.weight"] ?? model.weights["table.weight"];
  const mean_C = new Float32Array(C);
  for (const id of ids) for (let c = 0; c < C; c++) mean_C[c] += values[id * C + c] / ids.length;
  const centred = ids.map((id) => Float32Array.from(mean_C, (mean, c) => values[id * C + c] - mean));
  const random = randomNumbers(1), directions = [], pause = new Pause();
  for (let n = 0; n < 2; n++) {
    let direction = Float32Array.from(mean_C, () => random() - 0.5);
    for (let turn = 0; turn < 60; turn++) { // the power method
      const next = new Float32Array(C);
      for (const x_C of centred) addTo(next, 0, dot(x_C, 0, direction, 0, C), x_C, 0, C);
      for (const other of directions) addTo(next, 0, -dot(next, 0, other, 0, C), other, 0, C);
      const length = Math.sqrt(dot(next, 0, next, 0, C)) || 1;
      direction = next.map((x) => x / length);
      await pause.rest();
    }
    directions.push(direction);
  }
  return centred.map((x_C) => directions.map((direction) => dot(x_C, 0, direction, 0, C)));
}

const drawnPlanes = new Map();
async function showEmbeddings() {
  const model = models[shown], inText = new Set(states[shown].cache.ids);
  if (!drawnPlanes.has(model)) drawnPlanes.set(model, await drawnPlane(model));
  page.embeddings.replaceChildren(drawnPlanes.get(model));
  page.embeddings.querySelectorAll("[data-id]").forEach((label) => label.classList.toggle("now", inText.has(+label.dataset.id)));
}

async function drawnPlane(model) {
  const ids = firstReadable(model), places = await plane(model, ids), [width, height] = [1000, 520];
  const most = [0, 1].map((axis) => places.reduce((so, place) => Math.max(so, Math.abs(place[axis])), 1e-30));
  return element("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "token embeddings in two dimensions", class: "plane"},
    element("line", {x1: 0, x2: width, y1: height / 2, y2: height / 2}),
    element("line", {x1: width / 2, x2: width / 2, y1: 0, y2: height}),
    element("text", {class: "axis", x: width, y: height / 2 - 6, "text-anchor": "end"}, "first direction →"),
    element("text", {class: "axis", x: width / 2 + 8, y: 14}, "↑ second direction"),
    ...places.map(([x, y], n) => element("text", {"data-id": ids[n], x: width / 2 + (x / most[0]) * (width / 2 - 24),
      y: height / 2 - (y / most[1]) * (height / 2 - 16) + 5, "text-anchor": "middle"}, tokenText(model, ids[n]))));
}

/* The first ids whose tokens are text: no part of a character, no control character but line ends and tabs. */
function firstReadable(model) {
  const ids = [];
  for (let id = 0; id < model.vocabSize && ids.length < LARGEST_PLANE; id++) {
    if (!/\ufffd|[^\P{C}\n\t]/u.test(model.decode([id]))) ids.push(id);
  }
  return ids;
}

/* Generation: all models go on side by side, each from the same text, and attention follows. */
async function generateTokens(count) {
  if (generating) return;
  const turn = generating = {stopped: false};
  while (isBusy) await answered();
  if (isEdited) turn.stopped = !readText();
  page.run.textContent = "Stop";
  let wroteAt = performance.now(), drewAt = wroteAt;
  const chosen = options();
  if (!turn.stopped) await Promise.all(models.map((model, number) => {
    const state = states[number], seed = chosen.seed === undefined ? undefined : (chosen.seed + state.made.length) % 2 ** 32;
    return model.generate({...chosen, seed, tokens: count, ids: state.window, cache: state.cache, onToken: (id, probability, probabilities_V) => {
      state.made.push({id, probability});
      state.window = model.extended(state.window, id);
      state.probabilities_V = probabilities_V;
      isLonger = true;
      if (performance.now() - wroteAt > BETWEEN_FRAMES) {
        states.forEach(({made}, other) => made.length && showNext(other));
        wroteAt = performance.now();
      }
      // Only the cache of this model is whole now: others may wait in the middle of a token.
      if (number === shown && performance.now() - drewAt > BETWEEN_FRAMES) {
        showHeads();
        drewAt = performance.now();
      }
      return !turn.stopped;
    }});
  }));
  generating = null;
  page.run.textContent = "Generate";
  refresh();
}

page.controls.addEventListener("submit", (event) => {
  event.preventDefault();
  if (generating) generating.stopped = true;
  else generateTokens(options().tokens);
});
page.one.addEventListener("click", () => generateTokens(1));
page.prompt.addEventListener("input", () => {
  if (generating) generating.stopped = true;
  isEdited = true;
  refresh();
});
for (const name of ["temperature", "top-k", "top-p"]) page[name].addEventListener("input", refresh);

/* Large type in full screen, for a projector; leaving full screen ends it. */
function present(isLarge) {
  document.documentElement.classList.toggle("presenting", isLarge);
  page.present.setAttribute("aria-pressed", String(isLarge));
}
page.present.addEventListener("click", () => {
  const isLarge = page.present.getAttribute("aria-pressed") !== "true";
  present(isLarge);
  if (isLarge) document.documentElement.requestFullscreen?.().catch(() => {});
  else if (document.fullscreenElement) document.exitFullscreen();
});
document.addEventListener("fullscreenchange", () => { if (!document.fullscreenElement) present(false); });

page.models.append(...models.map((model) => element("section", {"aria-label": `next token of ${model.name}`},
  ...(models.length > 1 ? [element("h3", {}, model.name)] : []), element("ol", {class: "next"}),
  element("div", {}, element("p", {class: "last note", "aria-live": "polite"}),
    explainMade(element("pre", {class: "generated", tabindex: 0, role: "region", "aria-label": `generated by ${model.name}`}))))));

function explainMade(text) {
  text.addEventListener("pointerover", (event) => showTip(event, event.target.dataset.note ?? null));
  text.addEventListener("pointerleave", (event) => showTip(event, null));
  return text;
}

if (models.length > 1) {
  page.tabs.append(...models.map((model, number) => {
    const button = element("button", {type: "button", onclick: () => showModel(number)}, model.name);
    mark(button, number === shown);
    return button;
  }));
  moveByKeys(page.tabs, () => shown, showModel);
}

darkness.addEventListener("change", showWay);

function showModel(number) {
  shown = number;
  Object.assign(view, {layer: 0, head: 0});
  isLonger = true;
  [...page.tabs.children].forEach((tab, other) => mark(tab, other === number));
  refresh();
}

refresh();
