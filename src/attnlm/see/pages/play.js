"use strict";
/* The page of models that compute (model.js): text, next tokens and generated texts before and after a change, attention,
   walkthrough, logit lens and embeddings.

   For the console and for tests: attnlm.models is a list. Each model has
     name                        the run's name
     encode(text)                returns ids
     decode(ids)                 returns a text
     logits(ids)                 returns Float32Array (V): the logits of the token after the last id
     attention(ids)              returns [layer][head] → Float32Array T × T
     added(ids, id)              returns [part, number]: what each part adds to the logit of `id`
     generate({ids, tokens, temperature, topK, topP, seed})
                                 returns a promise of the new ids
     silence(layer, head, isOff) switches a head off (default) or on

   A model reads only the last `architecture.block_size` ids. */

const MOST_MAP_TOKENS = 512;
const MOST_LENS_TOKENS = 24;
const MOST_EMBEDDINGS = 300;
const MOST_TABLE = 128; // rows of a bigram's table
const CANDIDATES = 6;
const DEBOUNCE = 60; // milliseconds while the user types
const FRAME = 80; // milliseconds between two updates during generation
const data = JSON.parse(page.data.textContent), models = unpackModels(data.models);
if (window.attnlm) models.push(attnlm.trainer.model); // of train.js
window.attnlm = {...window.attnlm, models};
page.prompt.value = data.prompt;

/* A model with the heads that are off and the sampling options at one time: its next token after the prompt, and its
   generated text. */
class Condition {
  constructor(model, {context = []} = {}) {
    Object.assign(this, {model, context, options: options(), cache: newCache(), probabilities_V: null});
    this.clear();
  }

  /* Remove the generated text. */
  clear() { Object.assign(this, {generated: [], extended: this.context, textCache: newCache(), random: null}); }

  /* Keep the heads that are off now, whatever is switched later. */
  freeze() {
    const {model} = this;
    this.model = Object.assign(Object.create(model), {silenced: new Set(model.silenced), cache: newCache()});
    return this;
  }

  /* Return what distinguishes this condition from another one. */
  nameBeside(other) {
    const offs = [this, other].map(({model}) => [...model.silenced].map((name) => headName(model, ...name.split(".").map(Number))));
    const parts = offs[0].join() === offs[1].join() ? [] : [offs[0].length ? `${offs[0].join(" and ")} off` : "all heads on"];
    for (const [key, name] of [["temperature", "temperature"], ["topK", "top-k"], ["topP", "top-p"]]) {
      if (this.options[key] !== other.options[key]) parts.push(`${name} ${this.options[key] ?? "off"}`);
    }
    return parts.join(", ");
  }
}

/* By model: the condition `after` the last change, and the one `before` it, or null. */
const states = models.map((model) => ({after: new Condition(model), before: null}));
let shown = models.length - 1; // the model whose heads are shown
let isEdited = true; // the prompt has changed since it was encoded
let isExtended = true; // tokens have been added: the last one becomes the chosen one
let generating = null; // {stopped}, during generation
let seed = null; // of the generated texts
let tokenRandom = null; // draws the tokens of “One token”
const view = new HeadsView({onHead: refresh, onToken: showTable, switchHead});

function tokenText(model, id) { return visible(model.decode([id])); }

function headName({depth}, layer, head) { return `${depth > 1 ? `layer ${layer + 1} ` : ""}head ${head + 1}`; }

function conditionsOf({before, after}) { return before ? [before, after] : [after]; }

function options() {
  const read = (input) => (input.value === "" || !input.validity.valid ? undefined : input.valueAsNumber);
  return {temperature: read(page.temperature) ?? 1, topK: read(page["top-k"]), topP: read(page["top-p"])};
}

/* Compute and show everything. A newer change stops the computation for an older one. */
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
  if (isEdited && !readPrompt()) return;
  for (const [number, state] of states.entries()) {
    for (const condition of conditionsOf(state)) {
      const logits_V = await pause.run(condition.model.computeLogits(condition.context, condition.cache), isStopped);
      if (logits_V === undefined) return;
      condition.probabilities_V = nextProbabilities(logits_V, condition.options);
    }
    if (isStopped()) return;
    showNextTokens(number);
  }
  await showHeads();
  showTable();
  await new Promise((resolve) => setTimeout(resolve, DEBOUNCE));
  for (const show of [showWalkthrough, showLens, showAdded, showEmbeddings]) {
    if (isStopped()) return;
    await show(isStopped);
    await eventLoop();
  }
}

/* Encode the prompt for every model, and remove the generated texts. Return false if a vocabulary lacks a character. */
function readPrompt() {
  try {
    const encoded = models.map((model) => model.encode(page.prompt.value));
    states.forEach((state, number) => {
      const model = models[number], ids = encoded[number].length ? encoded[number] : [model.first];
      if (model.silenced.size === 0) state.before = null;
      for (const condition of conditionsOf(state)) {
        condition.context = model.context(ids);
        condition.clear();
      }
    });
  } catch (error) {
    if (!(error instanceof TextError)) throw error;
    page.status.textContent = error.message;
    return false;
  }
  page.status.textContent = "";
  isExtended = true;
  [isEdited, tour.cell] = [false, null];
  showTexts();
  return true;
}

/* Show the likeliest next tokens of a model, before and after the last change. */
function showNextTokens(number) {
  const model = models[number], {before, after} = states[number], section = page.models.children[number];
  const largest_V = after.probabilities_V.map((x, id) => Math.max(x, before?.probabilities_V[id] ?? 0));
  const likeliest = topK(largest_V, CANDIDATES).filter((id) => largest_V[id] > 0);
  section.querySelector(".next").replaceWith(
    bars(likeliest.map((id) => [tokenText(model, id), after.probabilities_V[id], before?.probabilities_V[id]])));
  section.querySelector(".change").replaceChildren(...(before ? [element("span", {class: "before"}, before.nameBeside(after)), " → ",
    element("span", {class: "after"}, after.nameBeside(before))] : []));
  if (number === shown) page["after-text"].textContent = visible(model.decode(after.context)).slice(-16);
}

/* Show the texts of all models. */
function showTexts() {
  states.forEach((state, number) => {
    const {before, after} = state, boxes = page.models.children[number].querySelectorAll(".written");
    [before, after].forEach((condition, side) => {
      const [note, text] = boxes[side].children, generated = condition?.generated ?? [];
      boxes[side].hidden = generated.length === 0;
      if (generated.length < text.children.length) text.replaceChildren();
      text.append(...generated.slice(text.children.length).map(({id, probability}) => element("span",
        {"data-note": `“${tokenText(condition.model, id)}” had ${percent(probability)}`, class: "sampled",
          style: {"--fraction": probability.toFixed(3)}}, visibleText(condition.model.decode([id])))));
      text.scrollTop = text.scrollHeight;
      note.textContent = [`seed ${seed}`, before && condition?.nameBeside(side ? before : after)].filter(Boolean).join(": ");
    });
  });
}

/* Show the heads of the chosen model, for at most the last MOST_MAP_TOKENS computed tokens. */
function showHeads() {
  const model = models[shown], {ids, layers} = states[shown].after.cache, first = Math.max(0, ids.length - MOST_MAP_TOKENS);
  const tokens = ids.slice(first).map((id) => tokenText(model, id)), heads = layers[0]?.[0].attention?.length ?? 0;
  if (isExtended) view.token = tokens.length - 1;
  isExtended = false;
  page["heads-title"].textContent = heads ? "What each token attends to" : "This model has no attention";
  page["heads-note"].hidden = heads === 0;
  page["walkthrough-title"].textContent = heads ? "The way through one head" : "The way to the next token";
  return view.show({
    tokens, heads,
    layers: heads ? layers.length : 0,
    row: (layer, head, t) => layers[layer][first + t].attention[head].subarray(first),
    isOff: (layer, head) => model.silenced.has(`${layer}.${head}`),
  });
}

/* Show a bigram's table: the probability of each next token after each token. */
function showTable() {
  const model = models[shown], {ids: read} = states[shown].after.cache;
  page["table-section"].hidden = model.depth > 0;
  if (model.depth) return;
  const ids = firstReadable(model, MOST_TABLE), tokens = ids.map((id) => tokenText(model, id));
  const rows = ids.map((id) => softmax(row(model.embeddings, id))), T = ids.length;
  const textOf = (r, c) => `“${tokens[c]}” after “${tokens[r]}”: ${percent(rows[r][ids[c]])}, `
    + `logit ${numberText(row(model.embeddings, ids[r])[ids[c]])}`;
  const choose = (query, key) => {
    page["table-cell"].textContent = textOf(query, key);
    page.table.replaceChildren(labelledMap({tokens, query, key, framed: T, textOf, choose,
      canvas: tableCanvas(ids.map((_, r) => ids.map((id) => rows[r][id])))}));
  };
  const r = Math.max(0, ids.indexOf(read[Math.max(0, read.length - MOST_MAP_TOKENS) + view.token]));
  choose(r, topK(ids.map((id) => rows[r][id]), 1)[0]);
}

/* Change some models or options. The conditions until now are kept beside the new ones. If they have generated texts, the
   new ones continue the same prompt with the same seed. */
async function change(affected, apply) {
  if (generating) generating.stopped = true;
  while (generating) await eventLoop();
  for (const state of affected) state.before = state.after.freeze();
  apply();
  const changed = affected.map((state) => (state.after = new Condition(models[states.indexOf(state)], state.before)));
  showTexts();
  await refresh();
  const length = Math.max(...affected.map(({before}) => before?.generated.length ?? 0));
  if (length && affected.every(({after}, n) => after === changed[n])) generateTokens(length, changed);
}

function switchHead(layer, head) {
  const model = models[shown];
  change([states[shown]], () => model.silence(layer, head, !model.silenced.has(`${layer}.${head}`)));
}

/* Show the logit lens: the token that the LM head reads in the residual stream after each layer. */
async function showLens(isStopped) {
  const model = models[shown], {ids, embedded, layers} = states[shown].after.cache, pause = new Pause();
  page["lens-section"].hidden = !model.depth || !model.architecture.residual;
  if (page["lens-section"].hidden) return;
  const positions = [...ids.keys()].slice(-MOST_LENS_TOKENS), rows = [];
  const streams = [embedded, ...layers.map((layer_T) => layer_T.map(({stream}) => stream))];
  for (const [layer, stream_TC] of streams.entries()) {
    const cells = [];
    for (const t of positions) {
      const probabilities_V = softmax(model.readOut(stream_TC[t])), [id] = topK(probabilities_V, 1);
      const probability = probabilities_V[id];
      cells.push(lensCell(tokenText(model, id), probability.toFixed(3), percent(probability), id === ids[t + 1]));
      await pause.yieldIfDue();
      if (isStopped()) return;
    }
    rows.push(element("tr", {}, element("th", {scope: "row"}, layer ? `layer ${layer}` : "embedding"), ...cells));
  }
  const tokens = positions.map((t) => element("th", {scope: "col"}, tokenText(model, ids[t])));
  page.lens.replaceChildren(
    element("thead", {}, element("tr", {}, element("th", {scope: "row"}, "after"), ...tokens)),
    element("tbody", {}, ...rows));
}

/* Show what the embedding, heads, MLPs and biases add to the logit of the likeliest next token. */
function showAdded() {
  const model = models[shown], {context, cache} = states[shown].after;
  const [id] = topK(model.readOut(streamOf(cache, cache.ids.length - 1)), 1);
  const parts = model.added(context, id, cache), most = Math.max(...parts.map(([, logit]) => Math.abs(logit)));
  page["added-section"].hidden = parts.length === 0;
  page["added-token"].textContent = tokenText(model, id);
  page["added-sum"].textContent = parts.reduce((sum, [, logit]) => sum + logit, 0).toFixed(3);
  page.added.replaceChildren(...parts.map(([part, logit]) => element("li", {},
    element("span", {class: "candidate"}, part),
    element("span", {class: `bar ${logit < 0 ? "less" : ""}`, style: {"--fraction": (Math.abs(logit) / most).toFixed(4)}}),
    element("span", {class: "percent"}, logit.toFixed(3)))));
}

/* Return the first two principal components of embeddings, by the power method. */
async function principalComponents({shape: [, C], values}, ids) {
  const mean_C = new Float32Array(C);
  for (const id of ids) for (let c = 0; c < C; c++) mean_C[c] += values[id * C + c] / ids.length;
  const centred = ids.map((id) => mean_C.map((mean, c) => values[id * C + c] - mean));
  const random = randomNumbers(1), directions = [], pause = new Pause();
  for (let n = 0; n < 2; n++) {
    let direction = mean_C.map(() => random() - 0.5);
    for (let iteration = 0; iteration < 60; iteration++) {
      const next = new Float32Array(C);
      for (const x_C of centred) addTo(next, 0, dot(x_C, 0, direction, 0, C), x_C, 0, C);
      for (const other of directions) addTo(next, 0, -dot(next, 0, other, 0, C), other, 0, C);
      const length = Math.sqrt(dot(next, 0, next, 0, C)) || 1;
      direction = next.map((x) => x / length);
      await pause.yieldIfDue();
    }
    directions.push(direction);
  }
  return centred.map((x_C) => directions.map((direction) => dot(x_C, 0, direction, 0, C)));
}

const plots = new Map(); // by model
async function showEmbeddings() {
  const model = models[shown], ids = new Set(states[shown].after.cache.ids);
  if (!plots.has(model)) plots.set(model, await embeddingPlot(model));
  page.embeddings.replaceChildren(plots.get(model));
  for (const label of page.embeddings.querySelectorAll("[data-id]")) label.classList.toggle("now", ids.has(+label.dataset.id));
}

async function embeddingPlot(model) {
  const ids = firstReadable(model, MOST_EMBEDDINGS), points = await principalComponents(model.embeddings, ids), [width, height] = [1000, 520];
  const most = [0, 1].map((axis) => points.reduce((max, point) => Math.max(max, Math.abs(point[axis])), 1e-30));
  return element("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", class: "plane",
    "aria-label": "token embeddings in two dimensions"},
  element("line", {x1: 0, x2: width, y1: height / 2, y2: height / 2}),
  element("line", {x1: width / 2, x2: width / 2, y1: 0, y2: height}),
  element("text", {class: "axis", x: width, y: height / 2 - 6, "text-anchor": "end"}, "first direction →"),
  element("text", {class: "axis", x: width / 2 + 8, y: 14}, "↑ second direction"),
  ...points.map(([x, y], n) => element("text", {"data-id": ids[n], x: width / 2 + (x / most[0]) * (width / 2 - 24),
    y: height / 2 - (y / most[1]) * (height / 2 - 16) + 5, "text-anchor": "middle"}, tokenText(model, ids[n]))));
}

/* Return the first ids whose tokens are whole characters, and no control characters but line ends and tabs. */
function firstReadable(model, most) {
  const ids = [];
  for (let id = 0; id < model.vocabSize && ids.length < most; id++) {
    if (!/\ufffd|[^\P{C}\n\t]/u.test(model.decode([id]))) ids.push(id);
  }
  return ids;
}

/* Continue the texts of all conditions, or of those in `chosen`. All begin with the same seed. */
async function generateTokens(tokens, chosen) {
  if (generating) return;
  const job = generating = {stopped: false};
  while (isBusy) await eventLoop();
  if (isEdited) job.stopped = !readPrompt();
  page.run.textContent = "Stop";
  const throttled = throttle(showTexts);
  if (!job.stopped) await Promise.all((chosen ?? states.flatMap(conditionsOf)).map((condition) => {
    const {model, generated} = condition, onToken = (id, probabilities_V) => {
      generated.push({id, probability: probabilities_V[id]});
      condition.extended = model.extend(condition.extended, id);
      throttled();
      return !job.stopped;
    };
    condition.random ??= randomNumbers(seed ??= newSeed());
    return model.generate({...condition.options, tokens, ids: condition.extended, cache: condition.textCache,
      random: condition.random, onToken});
  }));
  generating = null;
  page.run.textContent = "Generate";
  showTexts();
  refresh();
}

/* Return the seed that the reader chose, or a random one. */
function newSeed() {
  const {value, validity, valueAsNumber} = page.seed;
  return value !== "" && validity.valid ? valueAsNumber : Math.floor(Math.random() * 10000);
}

/* Remove all generated texts, and generate from the prompt, by default with the seed of the texts before. */
function startAgain() {
  if (page.seed.value !== "") seed = newSeed();
  states.flatMap(conditionsOf).forEach((condition) => condition.clear());
  generateTokens(numberOfTokens());
}

/* Append to the prompt a token of the chosen model, or the tokens of a whole character. */
async function appendToken() {
  if (generating || (isEdited && !readPrompt())) return;
  const {model, context, options: chosen} = states[shown].after, ids = [];
  let probability = 0;
  tokenRandom ??= randomNumbers(newSeed());
  do {
    ids.push(...await model.generate({...chosen, ids: [...context, ...ids], tokens: 1, random: tokenRandom,
      onToken: (id, probabilities_V) => { probability = probabilities_V[id]; }}));
  } while (ids.length < 4 && model.decode(ids).endsWith("\ufffd"));
  page.prompt.value += model.decode(ids);
  page.drawn.textContent = `“${tokenText(model, ids.at(-1))}” had ${percent(probability)}`;
  editPrompt();
}

function editPrompt() {
  if (generating) generating.stopped = true;
  isEdited = true;
  refresh();
}

function numberOfTokens() { return page.tokens.validity.valid && page.tokens.value !== "" ? page.tokens.valueAsNumber : 200; }

/* Return a function that calls `show`, but not within FRAME after the last call. */
function throttle(show) {
  let last = performance.now();
  return () => {
    if (performance.now() - last <= FRAME) return;
    show();
    last = performance.now();
  };
}

page.controls.addEventListener("submit", (event) => {
  event.preventDefault();
  if (generating) {
    generating.stopped = true;
    return;
  }
  if (states.every(({after}) => after.generated.length === 0)) seed = newSeed();
  generateTokens(numberOfTokens());
});
page.again.addEventListener("click", async () => {
  if (generating) generating.stopped = true;
  while (generating) await eventLoop();
  startAgain();
});
page.one.addEventListener("click", appendToken);
page.prompt.addEventListener("input", () => {
  page.drawn.textContent = "";
  editPrompt();
});
page.seed.addEventListener("change", () => { tokenRandom = null; });
for (const name of ["temperature", "top-k", "top-p"]) page[name].addEventListener("change", () => change(states, () => {}));

/* Show large type in full screen, for a projector, until full screen ends. */
function present(isLarge) {
  document.documentElement.classList.toggle("presenting", isLarge);
  page.present.setAttribute("aria-pressed", String(isLarge));
  if (page.about) page.about.open = false;
}
page.present.addEventListener("click", () => {
  const isLarge = page.present.getAttribute("aria-pressed") !== "true";
  present(isLarge);
  if (isLarge) document.documentElement.requestFullscreen?.().catch(() => {});
  else if (document.fullscreenElement) document.exitFullscreen();
});
document.addEventListener("fullscreenchange", () => { if (!document.fullscreenElement) present(false); });

const newWritten = (model) => element("div", {class: "written", hidden: true}, element("p", {class: "note"}), addTooltip(element("pre",
  {class: "generated", tabindex: 0, role: "region", "aria-label": `generated by ${model.name}`}),
(event) => event.target.dataset.note ?? null));

page.models.append(...models.map((model, number) => element("section", {"aria-label": `next token of ${model.name}`},
  ...(models.length > 1 ? [element("h3", {}, element("button", {type: "button", onclick: () => showModel(number)}, model.name))] : []),
  element("p", {class: "change", "aria-live": "polite"}), element("ol", {class: "next"}),
  element("div", {class: "texts-of"}, newWritten(model), newWritten(model)))));

function markShown() {
  [...page.models.children].forEach((section, other) => {
    section.classList.toggle("shown", other === shown);
    section.querySelector("h3 button")?.setAttribute("aria-pressed", String(other === shown));
  });
}

function showModel(number) {
  shown = number;
  Object.assign(view, {layer: 0, head: 0});
  isExtended = true;
  markShown();
  refresh();
}

/* Show another model in place of the last one. */
function replaceLastModel(model) {
  if (generating) generating.stopped = true;
  plots.delete(models.splice(-1, 1, model)[0]);
  Object.assign(states.at(-1), {after: new Condition(model), before: null});
  isEdited = true; // the vocabulary may have changed
  refresh();
}

darkness.addEventListener("change", refresh);

markShown();
refresh();
