"use strict";
/* The way through one head: each step of the forward pass as a matrix with a row for each token, and what makes a
   number that a reader chooses. */

const LARGEST_WAY = 24; // tokens whose numbers are shown
const MOST_COLUMNS = 96;

class Way {
  constructor(model, cache, layer, head) {
    const T = cache.ids.length, first = Math.max(0, T - LARGEST_WAY);
    Object.assign(this, {model, cache, layer, head, first, steps: []});
    this.places = Array.from({length: T - first}, (_, r) => first + r); // of the rows
    this.tokens = this.places.map((t) => this.named(cache.ids[t]));
    this.made_T = cache.layers[layer];
    this.stream = layer ? `stream after layer ${layer}` : "embedding";
    if (!model.depth) this.addTable();
    else this.addLayer();
  }

  named(id) { return `“${tokenText(this.model, id)}”`; }

  /* Words for a bias that is added to products, if there is one. */
  bias(name) { return `${name}.bias` in this.model.weights ? ", plus a bias" : ""; }

  weight(name, index) { return row(this.model.weights[name], index); }

  /* A step: `vectorOf(t)` is the row of place t, `making(r, i)` tells what makes number i of row r: words, vectors that
     are shown with their names, whether these are multiplied (isProduct), and lights: [step, row, column], framed. */
  add(name, formula, axes, vectorOf, making, columnName = (i) => `${i + 1}`) {
    this.steps.push({name, formula, axes, rows: this.tokens, values: this.places.map(vectorOf), making, columnName});
  }

  addTable() {
    this.add("logits", "each token’s row of the table", "T × V", (t) => this.cache.embedded[t], (r, id) => ({
      words: `the score of ${this.named(id)} after ${this.tokens[r]}: a number of the table`}), (id) => this.named(id));
  }

  addLayer() {
    const {attention, norm} = this.model.architecture;
    if (this.layer) {
      this.add(this.stream, "", "T × C", (t) => this.before(t), (r, c) => ({
        words: `number ${c + 1} of the stream of ${this.tokens[r]}`}));
    } else this.addEmbedding();
    if (attention !== "none") {
      this.source = norm === "none" ? this.stream : "input";
      if (norm !== "none") this.addNorm(norm);
      if (attention === "softmax") this.addQueries();
      this.addAttention();
    }
    this.addSum();
    if (this.layer === this.model.depth - 1) this.addLogits();
  }

  /* The stream that the layer reads. */
  before(t) { return this.layer ? this.cache.layers[this.layer - 1][t].stream : this.cache.embedded[t]; }

  addEmbedding() {
    const hasPlaces = this.model.architecture.positions === "learned";
    this.add(this.stream, hasPlaces ? "token + position" : "of each token", "T × C", (t) => this.before(t), (r, c) => {
      const t = this.places[r], words = `number ${c + 1} of the embedding of ${this.tokens[r]}`;
      const vectors = [["token embedding", this.weight("token_embedding.weight", this.cache.ids[t])]];
      if (!hasPlaces) return {words, vectors};
      const place = [`position embedding of place ${t + 1}`, this.weight("position_embedding.weight", t)];
      return {words: `${words}, plus that of place ${t + 1}`, vectors: [...vectors, place]};
    });
  }

  addNorm(norm) {
    this.add(this.source, norm === "rms" ? "RMS norm" : "layer norm", "T × C", (t) => this.made_T[t].input, (r) => ({
      words: "the row before the norm, divided by the size of its numbers, times the gain",
      vectors: [["before the norm", this.before(this.places[r])]], lights: [[this.stream, r]]}));
  }

  /* The number of the head among the queries, keys, values or mixes: some queries share keys and values. */
  headOf(part) {
    const {H, K} = this.model.heads(this.made_T[0].input.length);
    return part === "query" || part === "mixed" ? this.head : Math.floor((this.head * K) / H);
  }

  /* The numbers (D) of the head at place t. */
  own(t, part) {
    const {D} = this.model.heads(this.made_T[0].input.length), start = this.headOf(part) * D;
    return this.made_T[t][part].subarray(start, start + D);
  }

  addQueries() {
    const a = this.model.architecture, matrices = `blocks.${this.layer}.attention.`;
    const changes = [a.query_key_norm && "normed", a.positions === "rotary" && "rotated by its place"].filter(Boolean);
    for (const part of ["query", "key", "value"]) {
      const name = part[0], start = this.headOf(part) * a.head_size;
      const then = changes.length && part !== "value" ? `, then ${changes.join(" and ")}` : "";
      this.add(name, `${this.source} · W${name}ᵀ`, "T × D", (t) => this.own(t, part), (r, i) => ({
        words: `the sum of the products of two rows${this.bias(matrices + part)}${then}`,
        vectors: [[`${this.source} of ${this.tokens[r]}`, this.made_T[this.places[r]].input],
          [`row ${start + i + 1} of the ${part} matrix`, this.weight(`${matrices}${part}.weight`, start + i)]],
        isProduct: true, lights: [[this.source, r]]}));
    }
  }

  addAttention() {
    const a = this.model.architecture, {H, D} = this.model.heads(this.made_T[0].input.length);
    const [q, k, v] = a.attention === "softmax" ? ["q", "k", "v"] : [this.source, this.source, this.source];
    const {made_T, places, tokens, head, first} = this, isUniform = a.attention === "uniform";
    const scores = (t) => this.model.scores(this.layer, this.cache, t, head);
    const weights = (t) => made_T[t].attention[head];
    const formula = isUniform ? "0: all alike" : `${q} · ${k} / √${D}, masked`;
    this.add("scores", formula, "T × T", (t) => scores(t).subarray(first), (r, s) => ({
      words: isUniform ? "always 0: the mean of the past" : `the sum of the products of two rows, divided by √${D}`,
      vectors: [[`${q} of ${tokens[r]}`, this.own(places[r], "query")],
        [`${k} of ${tokens[s]}`, this.own(places[s], "key")]],
      isProduct: !isUniform, lights: [[q, r], [k, s]]}), (s) => tokens[s]);
    this.add("weights", "softmax of each row", "T × T", (t) => weights(t).subarray(first), (r) => ({
      words: "e to the score, divided by the sum of these over the row",
      vectors: [["scores", scores(places[r])]], lights: [["scores", r]]}), (s) => tokens[s]);
    const isOff = this.model.silenced.has(`${this.layer}.${head}`);
    this.add("mix", `weights · ${v}`, "T × D", (t) => this.own(t, "mixed"), (r, i) => (isOff ? {
      words: "0, because this head is switched off"} : {
      words: "the sum of the products of a row and a column",
      vectors: [[`weights of ${tokens[r]}`, weights(places[r])],
        [`column ${i + 1} of ${v}`, Float32Array.from(weights(places[r]), (_, s) => this.own(s, "value")[i])]],
      isProduct: true, lights: [["weights", r], [v, undefined, i]]}));
    if (!a.projection || a.attention !== "softmax") return;
    const projection = `blocks.${this.layer}.attention.projection`;
    this.add("attended", `all ${H} mixes · Wᵀ`, "T × C", (t) => made_T[t].attended, (r, c) => ({
      words: `the sum of the products of two rows${this.bias(projection)}`,
      vectors: [[`mixes of all heads for ${tokens[r]}`, made_T[places[r]].mixed],
        [`row ${c + 1} of the projection`, this.weight(`${projection}.weight`, c)]],
      isProduct: true, lights: [["mix", r]]}));
  }

  /* The stream after the layer. */
  addSum() {
    const {residual, attention, mlp} = this.model.architecture, {made_T, places} = this;
    const parts = [
      residual && [this.stream, (t) => this.before(t)],
      attention !== "none" && ["attention", (t) => made_T[t].attended],
      mlp !== "none" && ["MLP", (t) => made_T[t].hidden],
    ].filter(Boolean);
    const isSum = residual && parts.length > 1, only = `the ${parts.at(-1)[0]}’s output`;
    this.add(`after layer ${this.layer + 1}`, isSum ? parts.map(([name]) => name).join(" + ") : only, "T × C",
      (t) => made_T[t].stream, (r, c) => ({
        words: isSum ? "the sum of these numbers" : `number ${c + 1} of what the layer passes on`,
        vectors: isSum ? parts.map(([name, of]) => [name, of(places[r])]) : []}));
  }

  /* The logits; of a large vocabulary, those of the last token only. */
  addLogits() {
    const {model, made_T, places, tokens} = this, after = `after layer ${model.depth}`, last = places.at(-1);
    const isSmall = model.vocabSize * made_T[0].stream.length * places.length < 2e7;
    const logitsAt = (t) => (isSmall || t === last ? model.readOut(made_T[t].stream) : new Float32Array());
    const read = model.architecture.norm === "none" ? after : "the stream after the last norm";
    this.add("logits", "LM head", "T × V", logitsAt, (r, id) => ({
      words: `the sum of the products of two rows${this.bias("head")}`,
      vectors: [[`${read}, ${tokens[r]}`, model.headInput(made_T[places[r]].stream)],
        [`row ${this.named(id)} of the LM head`, this.weight(`${model.head}.weight`, id)]],
      isProduct: true, lights: [[after, r]]}), (id) => this.named(id));
  }
}

/* Show the matrices of a way; a newer call ends an older one. */
let ways = 0;
async function showWay() {
  if (generating) return;
  const turn = ++ways, pause = new Pause(), matrices = [];
  const {steps} = new Way(models[shown], states[shown].cache, view.layer, view.head);
  for (const step of steps) {
    matrices.push(matrix(step, (row, column) => showMaking(steps, step, row, column)));
    await pause.rest();
    if (turn !== ways) return;
  }
  page.way.replaceChildren(...matrices);
  page["made-of"].replaceChildren(element("p", {class: "note"},
    "Click a number, or move to one with Tab and the arrow keys, to see what makes it."));
}

/* A matrix as a picture: blue above zero, orange below, as strong as the number is large. */
function matrix(step, choose) {
  const {name, formula, axes, rows, values} = step, widest = Math.max(...values.map((x) => x.length));
  const columns = Math.min(widest, MOST_COLUMNS);
  const isShort = rows.length <= 12, height = isShort ? 14 : 10; // of a cell, in pixels
  const width = columns > 32 ? 6 : isShort ? 14 : 8;
  const size = {width: `${columns * width}px`, height: `${rows.length * height}px`};
  const sized = element("div", {class: "matrix", tabindex: 0, role: "img", style: size,
    "aria-label": `${name}: arrow keys move among its numbers`}, drawnMatrix(values, columns));
  const place = (share, count) => Math.min(count - 1, Math.floor(share * count));
  const exists = (r, c) => c >= 0 && r >= 0 && r < rows.length && c < Math.min(columns, values[r].length);
  explain(sized, (across, down) => {
    const r = place(down, rows.length), c = place(across, columns);
    return exists(r, c) ? equation(step, r, c) : "masked: a later token";
  });
  let chosen = [rows.length - 1, -1];
  const go = (r, c) => {
    if (exists(r, c)) choose(...(chosen = [r, c]));
  };
  sized.addEventListener("click", (event) => {
    const box = sized.getBoundingClientRect(), across = (event.clientX - box.left) / box.width;
    go(place((event.clientY - box.top) / box.height, rows.length), place(across, columns));
  });
  onArrows(sized, (down, across) => go(chosen[0] + down, Math.max(0, chosen[1] + across)));
  step.light = (r, c) => sized.append(element("div", {class: "light", style: {
    ...(c === undefined ? {left: 0, width: "100%"} : {left: `${c * width}px`, width: `${width}px`}),
    ...(r === undefined ? {top: 0, height: "100%"} : {top: `${r * height}px`, height: `${height}px`})}}));
  const labels = element("div", {class: "row-names", "aria-hidden": "true",
    style: {height: size.height}},
  ...rows.map((text) => element("span", {}, text.slice(1, -1))));
  const shape = `${axes} = ${rows.length} × ${widest}${widest > columns ? `, the first ${columns}` : ""}`;
  const caption = [element("strong", {}, name), " ", element("span", {}, formula), element("small", {}, shape)];
  return element("figure", {class: "step"}, element("figcaption", {}, ...caption),
    element("div", {class: "row-of"}, labels, sized));
}

function equation({name, rows, columnName, values}, r, c) {
  return `${name}[${rows[r]}, ${columnName(c)}] = ${numberText(values[r][c])}`;
}

function drawnMatrix(values, columns) {
  const canvas = element("canvas", {width: columns, height: values.length}), context = canvas.getContext("2d");
  const picture = context.createImageData(columns, values.length), pixels = new Uint32Array(picture.data.buffer);
  const most = values.reduce((so, x) => x.reduce((m, y) => Math.max(m, Math.abs(y)), so), 1e-30);
  const [paper, above, below] = ["--shade", "--deep", "--training"].map(colour);
  values.forEach((x, r) => x.subarray(0, columns).forEach((y, c) => {
    pixels[r * columns + c] = mixed(paper, y < 0 ? below : above, Math.sqrt(Math.abs(y) / most));
  }));
  context.putImageData(picture, 0, 0);
  return canvas;
}

/* What makes a number: it, and the row and the column that it comes from, are framed. */
function showMaking(steps, step, row, column) {
  for (const light of page.way.querySelectorAll(".light")) light.remove();
  const {words, vectors = [], isProduct, lights = []} = step.making(row, column);
  step.light(row, column);
  for (const [name, ...place] of lights) steps.find((other) => other.name === name).light(...place);
  const parts = vectors.map(([label, values]) => [label, strip(values, isProduct ? -1 : column)]);
  if (isProduct) {
    const products = vectors[0][1].map((x, i) => x * vectors[1][1][i]), total = products.reduce((a, b) => a + b, 0);
    parts.push([`their products: ${numberText(total)} together`, strip(products, -1)]);
  }
  page["made-of"].replaceChildren(element("p", {}, element("strong", {}, equation(step, row, column)), `: ${words}.`),
    ...parts.map(([label, numbers]) => element("div", {}, element("h3", {}, label), numbers)));
}

/* Numbers in a row; those below zero are orange and underlined. */
function strip(values, marked) {
  const some = Array.from(values.slice(0, 64)), most = Math.max(...some.map(Math.abs), 1e-30);
  const numbers = some.map((value, i) => element("span", {
    class: `number${value < 0 ? " negative" : ""}${i === marked ? " marked" : ""}`,
    style: {"--share": (Math.abs(value) / most).toFixed(3)}}, numberText(value)));
  if (values.length > 64) numbers.push(element("span", {class: "note"}, `… ${values.length - 64} more`));
  return element("div", {class: "numbers"}, ...numbers);
}
