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
const LARGEST_WAY = 24; // tokens whose numbers are shown, and columns of the lens
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
  text.scrollTop = text.scrollHeight;
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

/* The way through one head: matrices with a row for each token, and what makes a chosen number. */
let ways = 0;
async function showWay() {
  if (generating) return;
  const turn = ++ways, pause = new Pause(), steps = stepsOfHead(), matrices = [];
  for (const [n, step] of steps.entries()) {
    matrices.push(matrix(step, (row, column) => showMaking(steps, n, row, column)));
    await pause.rest();
    if (turn !== ways) return;
  }
  page.way.replaceChildren(...matrices);
  page["made-of"].replaceChildren(element("p", {class: "note"}, "Click a number, or move to one with Tab and the arrow keys, to see what makes it."));
}

/* The steps: names, axes, numbers, and for one number its making: words, the vectors, and where these lie. */
function stepsOfHead() {
  const model = models[shown], a = model.architecture, {cache} = states[shown], {layer, head} = view;
  const T = cache.ids.length, first = Math.max(0, T - LARGEST_WAY), rows = Array.from({length: T - first}, (_, r) => first + r);
  const token = (t) => `“${tokenText(model, cache.ids[t])}”`, weight = (name, index) => row(model.weights[name], index);
  const steps = [], at = {};
  const add = (name, formula, axes, vectors, making) => {
    at[name] = steps.length;
    steps.push({name, formula, axes, rows: rows.map(token), values: vectors, columnName: (i) => `${i + 1}`, making});
    return steps.at(-1);
  };
  if (!model.depth) {
    add("logits", "each token’s row of the table", "T × V", rows.map((t) => cache.embedded[t]), (r, id) => ({
      words: `the score of ${visible(model.decode([id]))} after ${token(rows[r])}: a number of the table`, vectors: []})).columnName = (id) => tokenText(model, id);
    return steps;
  }
  const made_T = cache.layers[layer], before = (t) => (layer ? cache.layers[layer - 1][t].stream : cache.embedded[t]);
  const stream = layer ? `stream after layer ${layer}` : "embedding";
  add(stream, layer ? "" : a.positions === "learned" ? "token + position" : "of each token", "T × C", rows.map(before), (r, c) => layer
    ? {words: `number ${c + 1} of the stream of ${token(rows[r])}`, vectors: []}
    : {words: `number ${c + 1} of the embedding of ${token(rows[r])}${a.positions === "learned" ? `, plus that of place ${rows[r] + 1}` : ""}`,
      vectors: [["token embedding", weight("token_embedding.weight", cache.ids[rows[r]])],
        ...(a.positions === "learned" ? [[`position embedding of place ${rows[r] + 1}`, weight("position_embedding.weight", rows[r])]] : [])]});
  if (a.attention !== "none") {
    const isSoftmax = a.attention === "softmax", {H, K, D} = model.heads(made_T[0].input.length);
    const group = Math.floor((head * K) / H), own = (values, number) => values.subarray(number * D, (number + 1) * D);
    let source = stream;
    if (a.norm !== "none") {
      source = "input";
      add(source, `${a.norm === "rms" ? "RMS" : "layer"} norm`, "T × C", rows.map((t) => made_T[t].input), (r) => ({
        words: "the row before the norm, divided by the size of its numbers, times the gain",
        vectors: [["before the norm", before(rows[r])]], lights: [[at[stream], r]]}));
    }
    const changed = [a.query_key_norm && "normed", a.positions === "rotary" && "rotated by its place"].filter(Boolean).join(" and ");
    for (const [name, part, number] of isSoftmax ? [["q", "query", head], ["k", "key", group], ["v", "value", group]] : []) {
      const then = changed && part !== "value" ? `, then ${changed}` : "";
      add(name, `${source} · W${{q: "q", k: "k", v: "v"}[name]}ᵀ`, "T × D", rows.map((t) => own(made_T[t][part], number)), (r, i) => ({
        words: `the sum of the products of two rows${then}`,
        vectors: [[`${source} of ${token(rows[r])}`, made_T[rows[r]].input],
          [`row ${number * D + i + 1} of the ${part} matrix`, weight(`blocks.${layer}.attention.${part}.weight`, number * D + i)]],
        isProduct: true, lights: [[at[source], r]]}));
    }
    const [q, k, v] = isSoftmax ? ["q", "k", "v"] : [source, source, source];
    const part = (t, name, number) => own(made_T[t][name], isSoftmax ? number : 0);
    const scores = rows.map((t) => model.scores(made_T, t, head).subarray(first));
    const formula = isSoftmax ? `${model.scoreFormula}, masked` : a.attention === "uniform" ? "0: all alike" : `${q} · ${k} / √${D}, masked`;
    add("scores", formula, "T × T", scores, (r, s) => ({
      words: a.attention === "uniform" ? "always 0: the mean of the past" : `the sum of the products of two rows, divided by √${D}`,
      vectors: [[`${q} of ${token(rows[r])}`, part(rows[r], "query", head)], [`${k} of ${token(rows[s])}`, part(rows[s], "key", group)]],
      isProduct: a.attention !== "uniform", lights: [[at[q], r], [at[k], s]]})).columnName = (s) => token(rows[s]);
    const weights = rows.map((t) => made_T[t].attention[head].subarray(first));
    add("weights", "softmax of each row", "T × T", weights, (r) => ({
      words: "e to the score, divided by the sum of these over the row", vectors: [["scores", scores[r]]], lights: [[at.scores, r]],
    })).columnName = (s) => token(rows[s]);
    add("mix", `weights · ${v}`, "T × D", rows.map((t) => own(made_T[t].mixed, head)), (r, i) => ({
      words: "the sum of the products of a row and a column",
      vectors: [[`weights of ${token(rows[r])}`, weights[r]],
        [`column ${i + 1} of ${v}`, Float32Array.from(weights[r], (_, s) => part(rows[s], "value", group)[i])]],
      isProduct: true, lights: [[at.weights, r], [at[v], undefined, i]]}));
    if (isSoftmax && a.projection) {
      add("attended", `all ${H} mixes · Wᵀ`, "T × C", rows.map((t) => made_T[t].attended), (r, c) => ({
        words: "the sum of the products of two rows",
        vectors: [[`mixes of all heads for ${token(rows[r])}`, made_T[rows[r]].mixed],
          [`row ${c + 1} of the projection`, weight(`blocks.${layer}.attention.projection.weight`, c)]],
        isProduct: true, lights: [[at.mix, r]]}));
    }
  }
  const parts = [a.residual && [stream, before], a.attention !== "none" && ["attention", (t) => made_T[t].attended],
    a.mlp !== "none" && ["MLP", (t) => made_T[t].hidden]].filter(Boolean);
  const isSum = a.residual && parts.length > 1, after = `after layer ${layer + 1}`;
  add(after, isSum ? parts.map(([name]) => name).join(" + ") : a.mlp !== "none" ? "the MLP’s output" : "the attention’s output", "T × C",
    rows.map((t) => made_T[t].stream), (r, c) => ({
      words: isSum ? "the sum of these numbers" : `number ${c + 1} of what the layer passes on`,
      vectors: isSum ? parts.map(([name, of]) => [name, of(rows[r])]) : []}));
  const isLast = layer === model.depth - 1, V = model.vocabSize, few = V * made_T[0].stream.length * rows.length < 2e7;
  if (isLast) {
    const logits = rows.map((t) => (few || t === T - 1 ? model.readOut(made_T[t].stream) : new Float32Array()));
    add("logits", "LM head", "T × V", logits, (r, id) => ({
      words: "the sum of the products of two rows",
      vectors: [[`${a.norm === "none" ? after : "the stream after the last norm"}, ${token(rows[r])}`, model.headInput(made_T[rows[r]].stream)],
        [`row “${tokenText(model, id)}” of the LM head`, weight(`${model.head}.weight`, id)]],
      isProduct: true, lights: [[at[after], r]]})).columnName = (id) => `“${tokenText(model, id)}”`;
  }
  return steps;
}

/* A matrix as a picture: blue above zero, orange below, as strong as the number is large. */
function matrix(step, choose) {
  const {name, formula, axes, rows, values} = step, widest = Math.max(...values.map((x) => x.length)), columns = Math.min(widest, 96);
  const canvas = element("canvas", {width: columns, height: rows.length}), context = canvas.getContext("2d");
  const picture = context.createImageData(columns, rows.length), most = values.reduce((so, x) => x.reduce((m, y) => Math.max(m, Math.abs(y)), so), 1e-30);
  const [paper, tint, below] = ["--shade", "--deep", "--training"].map(colour);
  values.forEach((x, r) => {
    for (let c = 0; c < Math.min(columns, x.length); c++) {
      const strength = Math.sqrt(Math.abs(x[c]) / most), to = x[c] < 0 ? below : tint;
      picture.data.set([...paper.map((from, i) => from + (to[i] - from) * strength), 255], 4 * (r * columns + c));
    }
  });
  context.putImageData(picture, 0, 0);
  const cell = rows.length <= 12 ? 14 : 8, size = {width: `${columns * (columns <= 32 ? cell : 6)}px`, height: `${rows.length * cell}px`};
  const sized = element("div", {class: "matrix", tabindex: 0, role: "img", "aria-label": `${name}: arrow keys move among its numbers`, style: size}, canvas);
  const place = (share, count) => Math.min(count - 1, Math.floor(share * count));
  const exists = (r, c) => c >= 0 && r >= 0 && r < rows.length && c < Math.min(columns, values[r].length);
  explain(sized, (across, down) => {
    const r = place(down, rows.length), c = place(across, columns);
    return exists(r, c) ? `${name}[${rows[r]}, ${step.columnName(c)}] = ${numberText(values[r][c])}` : "masked: a later token";
  });
  step.chosen = [rows.length - 1, -1];
  const go = (r, c) => {
    if (!exists(r, c)) return;
    step.chosen = [r, c];
    choose(r, c);
  };
  sized.addEventListener("click", (event) => {
    const box = sized.getBoundingClientRect();
    go(place((event.clientY - box.top) / box.height, rows.length), place((event.clientX - box.left) / box.width, columns));
  });
  sized.addEventListener("keydown", (event) => {
    const [down, across] = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    go(step.chosen[0] + down, Math.max(0, step.chosen[1] + across));
  });
  step.light = (row, column) => sized.append(element("div", {class: "light", style: {
    left: `${(100 * (column ?? 0)) / columns}%`, width: `${100 / (column === undefined ? 1 : columns)}%`,
    top: `${(100 * (row ?? 0)) / rows.length}%`, height: `${100 / (row === undefined ? 1 : rows.length)}%`}}));
  const labels = element("div", {class: "row-names", "aria-hidden": "true", style: {height: size.height, "font-size": `${Math.min(cell + 1, 11)}px`}},
    ...rows.map((text) => element("span", {}, text.slice(1, -1))));
  const shape = `${axes} = ${rows.length} × ${widest}${widest > columns ? `, the first ${columns}` : ""}`;
  return element("figure", {class: "step"}, element("figcaption", {}, element("strong", {}, name), " ", element("span", {}, formula), element("small", {}, shape)),
    element("div", {class: "row-of"}, labels, sized));
}

/* What makes a number: it, and the row and the column that it comes from, are framed. */
function showMaking(steps, n, row, column) {
  for (const light of page.way.querySelectorAll(".light")) light.remove();
  const step = steps[n], {words, vectors, isProduct, lights = []} = step.making(row, column);
  step.light(row, column);
  for (const [other, ...place] of lights) steps[other].light(...place);
  const parts = vectors.map(([label, values]) => [label, strip(values, isProduct ? -1 : column)]);
  if (isProduct) {
    const products = vectors[0][1].map((x, i) => x * vectors[1][1][i]), total = products.reduce((a, b) => a + b, 0);
    parts.push([`their products: ${numberText(total)} together`, strip(products, -1)]);
  }
  page["made-of"].replaceChildren(
    element("p", {}, element("strong", {}, `${step.name}[${step.rows[row]}, ${step.columnName(column)}] = ${numberText(step.values[row][column])}`), `: ${words}.`),
    ...parts.map(([label, numbers]) => element("div", {}, element("h3", {}, label), numbers)));
}

/* Numbers in a row; those below zero are orange and underlined. */
function strip(values, marked) {
  const some = Array.from(values.slice(0, 64)), most = Math.max(...some.map(Math.abs), 1e-30), rest = values.length - some.length;
  return element("div", {class: "numbers"}, ...some.map((value, i) => element("span", {
    class: `number${value < 0 ? " negative" : ""}${i === marked ? " marked" : ""}`,
    style: {"--share": (Math.abs(value) / most).toFixed(3)}}, numberText(value))),
  ...(rest > 0 ? [element("span", {class: "note"}, `… ${rest} more`)] : []));
}

async function showLens(isStopped) {
  const model = models[shown], {cache} = states[shown], T = cache.ids.length, width = streamOf(cache, 0).length;
  const streams = [["embedding", cache.embedded], ...cache.layers.map((made_T, n) => [`layer ${n + 1}`, made_T.map(({stream}) => stream)])];
  const rows = model.depth ? streams.filter(([, stream_TC]) => stream_TC[0].length === width) : [];
  page["lens-section"].hidden = rows.length < 2;
  if (rows.length < 2) return;
  const places = Array.from({length: T}, (_, t) => t).slice(-LARGEST_WAY), next = (t) => cache.ids[t + 1];
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
function plane(model) {
  const {shape: [V, C], values} = model.weights["token_embedding.weight"] ?? model.weights["table.weight"];
  const count = Math.min(V, 500), mean_C = new Float64Array(C);
  for (let id = 0; id < count; id++) for (let c = 0; c < C; c++) mean_C[c] += values[id * C + c] / count;
  const centred = Array.from({length: count}, (_, id) => Float64Array.from(mean_C, (mean, c) => values[id * C + c] - mean));
  const random = randomNumbers(1), directions = [];
  for (let n = 0; n < 2; n++) {
    let direction = Float64Array.from(mean_C, () => random() - 0.5);
    for (let turn = 0; turn < 60; turn++) { // the power method
      const next = new Float64Array(C);
      for (const x_C of centred) addTo(next, 0, dot(x_C, 0, direction, 0, C), x_C, 0, C);
      for (const other of directions) addTo(next, 0, -dot(next, 0, other, 0, C), other, 0, C);
      const length = Math.sqrt(dot(next, 0, next, 0, C)) || 1;
      direction = next.map((x) => x / length);
    }
    directions.push(direction);
  }
  return centred.map((x_C) => directions.map((direction) => dot(x_C, 0, direction, 0, C)));
}

const drawnPlanes = new Map();
function showEmbeddings() {
  const model = models[shown], inText = new Set(states[shown].cache.ids);
  if (!drawnPlanes.has(model)) drawnPlanes.set(model, drawnPlane(model));
  page.embeddings.replaceChildren(drawnPlanes.get(model));
  page.embeddings.querySelectorAll("text").forEach((label, id) => label.classList.toggle("now", inText.has(id)));
}

function drawnPlane(model) {
  const places = plane(model), [width, height] = [640, 420];
  const most = [0, 1].map((axis) => places.reduce((so, place) => Math.max(so, Math.abs(place[axis])), 1e-30));
  return element("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "token embeddings in two dimensions", class: "plane"},
    element("line", {x1: 0, x2: width, y1: height / 2, y2: height / 2}), element("line", {x1: width / 2, x2: width / 2, y1: 0, y2: height}),
    ...places.map(([x, y], id) => element("text", {x: width / 2 + (x / most[0]) * (width / 2 - 24),
      y: height / 2 - (y / most[1]) * (height / 2 - 16) + 5, "text-anchor": "middle"}, tokenText(model, id))));
}

/* Generation: all models go on side by side, each from the same text, and attention follows. */
async function generateTokens(count) {
  if (generating) return;
  const turn = generating = {stopped: false};
  while (isBusy) await answered();
  if (isEdited) turn.stopped = !readText();
  page.run.textContent = "Stop";
  let framed = performance.now();
  const chosen = options();
  if (!turn.stopped) await Promise.all(models.map((model, number) => {
    const state = states[number], seed = chosen.seed === undefined ? undefined : chosen.seed + state.made.length;
    return model.generate({...chosen, seed, tokens: count, ids: state.window, cache: state.cache, onToken: (id, probability, probabilities_V) => {
      state.made.push({id, probability});
      state.window = model.extended(state.window, id);
      state.probabilities_V = probabilities_V;
      isLonger = true;
      if (performance.now() - framed > BETWEEN_FRAMES) {
        states.forEach(({made}, other) => made.length && showNext(other));
        if (states[shown].made.length) showHeads();
        framed = performance.now();
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

function showModel(number) {
  shown = number;
  Object.assign(view, {layer: 0, head: 0});
  isLonger = true;
  [...page.tabs.children].forEach((tab, other) => mark(tab, other === number));
  refresh();
}

refresh();
