"use strict";
/* The page of models that compute (model.js): text, next tokens, attention, walkthrough, logit lens and embeddings.

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

   Numbers and ids out of range throw a RangeError. A model reads only the last `architecture.block_size` ids. */

const MOST_MAP_TOKENS = 512;
const MOST_LENS_TOKENS = 24;
const MOST_EMBEDDINGS = 300;
const CANDIDATES = 8;
const DEBOUNCE = 60; // milliseconds while the user types
const FRAME = 80; // milliseconds between two updates during generation
const data = JSON.parse(page.data.textContent), models = unpackModels(data.models);
if (window.attnlm) models.push(attnlm.trainer.model); // of train.js
window.attnlm = {...window.attnlm, models};
page.prompt.value = data.prompt;

/* By model: its context, the cached activations, the generated tokens, and the probabilities of the next token. */
const states = models.map(() => ({context: [], cache: newCache(), generated: [], probabilities_V: null}));
let shown = models.length - 1; // the model whose heads are shown
let isEdited = true; // the prompt has changed since it was encoded
let isExtended = true; // tokens have been added: the last one becomes the chosen one
let generating = null; // {stopped}, during generation
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
  for (const [number, model] of models.entries()) {
    const state = states[number];
    const logits_V = await pause.run(model.computeLogits(state.context, state.cache), isStopped);
    if (logits_V === undefined) return;
    state.probabilities_V = nextProbabilities(logits_V, options());
    showNextTokens(number);
  }
  await showHeads();
  await new Promise((resolve) => setTimeout(resolve, DEBOUNCE));
  for (const show of [showWalkthrough, showLens, showAdded, showEmbeddings]) {
    if (isStopped()) return;
    await show(isStopped);
    await eventLoop();
  }
}

/* Encode the prompt for every model. Return false if a vocabulary lacks one of its characters. */
function readPrompt() {
  try {
    const encoded = models.map((model) => model.encode(page.prompt.value));
    models.forEach((model, number) => {
      const ids = encoded[number].length ? encoded[number] : [model.first];
      Object.assign(states[number], {context: model.context(ids), generated: []});
    });
  } catch (error) {
    if (!(error instanceof TextError)) throw error;
    page.status.textContent = error.message;
    return false;
  }
  page.status.textContent = "";
  isExtended = true;
  isEdited = false;
  return true;
}

/* Show the likeliest next tokens of a model, and its generated text. */
function showNextTokens(number) {
  const model = models[number], {probabilities_V, generated} = states[number], section = page.models.children[number];
  const likeliest = topK(probabilities_V, CANDIDATES).filter((id) => probabilities_V[id] > 0);
  section.querySelector(".next").replaceWith(bars(likeliest.map((id) => [tokenText(model, id), probabilities_V[id]])));
  const text = section.querySelector(".generated"), last = generated.at(-1);
  if (generated.length < text.children.length) text.replaceChildren();
  text.append(...generated.slice(text.children.length).map(({id, probability}) => element("span",
    {"data-note": `“${tokenText(model, id)}” had ${percent(probability)}`, class: "sampled",
      style: {"--fraction": probability.toFixed(3)}}, visibleText(model.decode([id])))));
  if (last) text.scrollTop = text.scrollHeight;
  section.querySelector(".last").textContent = last
    ? `last token: “${tokenText(model, last.id)}”, which had ${percent(last.probability)}`
    : "Nothing generated yet.";
}

/* Show the heads of the chosen model, for at most the last MOST_MAP_TOKENS computed tokens. */
function showHeads() {
  const model = models[shown], {ids, layers} = states[shown].cache, first = Math.max(0, ids.length - MOST_MAP_TOKENS);
  const tokens = ids.slice(first).map((id) => tokenText(model, id)), heads = layers[0]?.[0].attention?.length ?? 0;
  if (isExtended) view.token = tokens.length - 1;
  isExtended = false;
  page["no-heads"].hidden = heads > 0;
  page["heads-note"].hidden = page.chosen.hidden = heads === 0;
  page["walkthrough-title"].textContent = heads ? "The way through one head" : "The way to the next token";
  return view.show({
    tokens, heads,
    layers: heads ? layers.length : 0,
    row: (layer, head, t) => layers[layer][first + t].attention[head].subarray(first),
    isOff: (layer, head) => model.silenced.has(`${layer}.${head}`),
  });
}

function switchHead(layer, head) {
  const model = models[shown];
  model.silence(layer, head, !model.silenced.has(`${layer}.${head}`));
  states[shown].cache = newCache();
  refresh();
}

/* Show the logit lens: the token that the LM head reads in the stream after each layer, if the model has streams. */
async function showLens(isStopped) {
  const model = models[shown], {ids, embedded, layers} = states[shown].cache, pause = new Pause();
  const streams = [embedded, ...layers.map((layer_T) => layer_T.map(({stream}) => stream))]
    .map((stream_TC, layer) => [layer ? `layer ${layer}` : "embedding", stream_TC])
    .filter(([, stream_TC]) => stream_TC[0].length === streamOf(states[shown].cache, 0).length);
  page["lens-section"].hidden = model.depth === 0 || streams.length < 2;
  if (page["lens-section"].hidden) return;
  const positions = [...ids.keys()].slice(-MOST_LENS_TOKENS), rows = [];
  for (const [name, stream_TC] of streams) {
    const cells = [];
    for (const t of positions) {
      const probabilities_V = softmax(model.readOut(stream_TC[t])), [id] = topK(probabilities_V, 1);
      const probability = probabilities_V[id];
      cells.push(lensCell(tokenText(model, id), probability.toFixed(3), percent(probability), id === ids[t + 1]));
      await pause.yieldIfDue();
      if (isStopped()) return;
    }
    rows.push(element("tr", {}, element("th", {scope: "row"}, name), ...cells));
  }
  const tokens = positions.map((t) => element("th", {scope: "col"}, tokenText(model, ids[t])));
  page.lens.replaceChildren(
    element("thead", {}, element("tr", {}, element("th", {scope: "row"}, "after"), ...tokens)),
    element("tbody", {}, ...rows));
}

/* Show what the embedding, heads, MLPs and biases add to the logit of the likeliest next token. */
function showAdded() {
  const model = models[shown], {context, cache} = states[shown];
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
  const model = models[shown], ids = new Set(states[shown].cache.ids);
  if (!plots.has(model)) plots.set(model, await embeddingPlot(model));
  page.embeddings.replaceChildren(plots.get(model));
  for (const label of page.embeddings.querySelectorAll("[data-id]")) label.classList.toggle("now", ids.has(+label.dataset.id));
}

async function embeddingPlot(model) {
  const ids = firstReadable(model), points = await principalComponents(model.embeddings, ids), [width, height] = [1000, 520];
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
function firstReadable(model) {
  const ids = [];
  for (let id = 0; id < model.vocabSize && ids.length < MOST_EMBEDDINGS; id++) {
    if (!/\ufffd|[^\P{C}\n\t]/u.test(model.decode([id]))) ids.push(id);
  }
  return ids;
}

/* Generate tokens with all models concurrently, each from its own context. Show attention after some of them. */
async function generateTokens(tokens) {
  if (generating) return;
  const job = generating = {stopped: false};
  while (isBusy) await eventLoop();
  if (isEdited) job.stopped = !readPrompt();
  page.run.textContent = "Stop";
  const throttledHeads = throttle(showHeads), throttledTokens = throttle(() => states.forEach(
    ({generated}, number) => generated.length && showNextTokens(number)));
  if (!job.stopped) await Promise.all(models.map((model, number) => {
    const state = states[number], {seed, ...others} = options();
    const onToken = (id, probabilities_V) => {
      state.generated.push({id, probability: probabilities_V[id]});
      state.context = model.extend(state.context, id);
      state.probabilities_V = probabilities_V;
      isExtended = true;
      throttledTokens();
      if (number === shown) throttledHeads(); // the caches of other models may be incomplete
      return !job.stopped;
    };
    return model.generate({...others, seed: seed === undefined ? undefined : (seed + state.generated.length) % 2 ** 32,
      tokens, ids: state.context, cache: state.cache, onToken});
  }));
  generating = null;
  page.run.textContent = "Generate";
  refresh();
}

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

/* Show large type in full screen, for a projector, until full screen ends. */
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
  element("div", {}, element("p", {class: "last note", "aria-live": "polite"}), addTooltip(element("pre",
    {class: "generated", tabindex: 0, role: "region", "aria-label": `generated by ${model.name}`}),
  (event) => event.target.dataset.note ?? null)))));

if (page.tabs) {
  page.tabs.append(...models.map((model, number) => {
    const button = element("button", {type: "button", onclick: () => showModel(number)}, model.name);
    setChosen(button, number === shown);
    return button;
  }));
  chooseByKeys(page.tabs, () => shown, showModel);
}

darkness.addEventListener("change", showWalkthrough);

function showModel(number) {
  shown = number;
  Object.assign(view, {layer: 0, head: 0});
  isExtended = true;
  [...page.tabs.children].forEach((tab, other) => setChosen(tab, other === number));
  refresh();
}

refresh();
