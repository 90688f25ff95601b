"use strict";
/* A walkthrough of one head: each step of the forward pass as a matrix with a row per token. A click on a number
   shows how it is computed. */

const MOST_ROWS = 24; // tokens
const MOST_COLUMNS = 96;

class HeadWalkthrough {
  constructor(model, cache, layer, head) {
    const T = cache.ids.length, first = Math.max(0, T - MOST_ROWS);
    Object.assign(this, {model, cache, layer, head, first, steps: []});
    this.positions = Array.from({length: T - first}, (_, r) => first + r); // of the rows
    this.tokens = this.positions.map((t) => this.quoted(cache.ids[t]));
    this.activations_T = cache.layers[layer];
    this.stream = layer ? `stream after layer ${layer}` : "embedding";
    if (model.depth) {
      this.sizes = model.headSizes;
      this.addLayer();
    } else this.addTable();
  }

  quoted(id) { return `“${tokenText(this.model, id)}”`; }

  weight(name, index) { return row(this.model.weights[name], index); }

  /* Add a step: `vectorOf(t)` returns the row of position t. `explain(r, c)` returns how a number is computed:
     {text, vectors, highlights}, with [label, vector] pairs and [step, row, column] to frame. */
  add(name, formula, axes, vectorOf, explain, columnName = (c) => `${c + 1}`) {
    this.steps.push({name, formula, axes, rows: this.tokens, values: this.positions.map(vectorOf), explain, columnName});
  }

  /* Add a matmul: `left(r)` and `right(c)` return the [label, vector] pairs whose dot product is a number. */
  addMatmul(name, formula, axes, vectorOf, {left, right, highlights, text = "the dot product of two rows"}, columnName) {
    this.add(name, formula, axes, vectorOf, (r, c) => ({
      text, vectors: [left(r, c), right(c, r)], isMatmul: true, highlights: highlights(r, c)}), columnName);
  }

  /* Return the text for a linear layer, with its bias if it has one. */
  linearText(name) { return `the dot product of two rows${`${name}.bias` in this.model.weights ? ", plus a bias" : ""}`; }

  addTable() {
    this.add("logits", "each token’s row of the table", "T × V", (t) => this.cache.embedded[t], (r, id) => ({
      text: `the logit of ${this.quoted(id)} after ${this.tokens[r]}: a number of the table`}), (id) => this.quoted(id));
  }

  addLayer() {
    const {attention, norm} = this.model.architecture;
    if (this.layer) {
      this.add(this.stream, "", "T × C", (t) => this.input(t), (r, c) => ({
        text: `number ${c + 1} of the stream of ${this.tokens[r]}`}));
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

  /* Return the layer's input: the stream at position t. */
  input(t) { return this.layer ? this.cache.layers[this.layer - 1][t].stream : this.cache.embedded[t]; }

  addEmbedding() {
    const hasPositions = this.model.architecture.positions === "learned";
    this.add(this.stream, hasPositions ? "token + position" : "of each token", "T × C", (t) => this.input(t), (r, c) => {
      const t = this.positions[r], text = `number ${c + 1} of the embedding of ${this.tokens[r]}`;
      const vectors = [["token embedding", this.weight("token_embedding.weight", this.cache.ids[t])]];
      if (!hasPositions) return {text, vectors};
      vectors.push([`position embedding ${t + 1}`, this.weight("position_embedding.weight", t)]);
      return {text: `${text}, plus position embedding ${t + 1}`, vectors};
    });
  }

  addNorm(norm) {
    this.add(this.source, norm === "rms" ? "RMS norm" : "layer norm", "T × C", (t) => this.activations_T[t].input, (r) => ({
      text: "the row before the norm, divided by the size of its numbers, times the gain",
      vectors: [["before the norm", this.input(this.positions[r])]], highlights: [[this.stream, r]]}));
  }

  /* Return the index of the head's query, key, value or output. Several heads may share a key and a value. */
  indexOf(part) {
    const {H, K} = this.sizes;
    return part === "query" || part === "mixed" ? this.head : Math.floor((this.head * K) / H);
  }

  /* Return the head's query, key, value or output (D) at position t. */
  vector(t, part) {
    const {D} = this.sizes, start = this.indexOf(part) * D;
    return this.activations_T[t][part].subarray(start, start + D);
  }

  addQueries() {
    const {query_key_norm, positions, head_size} = this.model.architecture;
    const changes = [query_key_norm && "normed", positions === "rotary" && "rotated by its position"].filter(Boolean);
    for (const part of ["query", "key", "value"]) {
      const projection = `blocks.${this.layer}.attention.${part}`, start = this.indexOf(part) * head_size;
      const then = changes.length && part !== "value" ? `, then ${changes.join(" and ")}` : "";
      this.addMatmul(part[0], `${this.source} · W${part[0]}ᵀ`, "T × D", (t) => this.vector(t, part), {
        text: `${this.linearText(projection)}${then}`,
        left: (r) => [`${this.source} of ${this.tokens[r]}`, this.activations_T[this.positions[r]].input],
        right: (c) => [`row ${start + c + 1} of the ${part} matrix`, this.weight(`${projection}.weight`, start + c)],
        highlights: (r) => [[this.source, r]]});
    }
  }

  addAttention() {
    const {attention, projection} = this.model.architecture, {activations_T, positions, tokens, head, first, source} = this;
    const [q, k, v] = attention === "softmax" ? ["q", "k", "v"] : [source, source, source];
    const scores = (t) => this.model.scores(this.layer, this.cache, t, head);
    const weights = (t) => activations_T[t].attention[head];
    const column = (s) => tokens[s];
    if (attention === "uniform") {
      this.add("scores", "0: all alike", "T × T", (t) => scores(t).subarray(first), () => ({
        text: "always 0: the mean of the past"}), column);
    } else {
      const root = `√${this.sizes.D}`;
      this.addMatmul("scores", `${q} · ${k} / ${root}, masked`, "T × T", (t) => scores(t).subarray(first), {
        text: `the dot product of two rows, divided by ${root}`,
        left: (r) => [`${q} of ${tokens[r]}`, this.vector(positions[r], "query")],
        right: (s) => [`${k} of ${tokens[s]}`, this.vector(positions[s], "key")],
        highlights: (r, s) => [[q, r], [k, s]]}, column);
    }
    this.add("weights", "softmax of each row", "T × T", (t) => weights(t).subarray(first), (r) => ({
      text: "e to the score, divided by the sum of these over the row",
      vectors: [["scores", scores(positions[r])]], highlights: [["scores", r]]}), column);
    const mix = ["mix", `weights · ${v}`, "T × D", (t) => this.vector(t, "mixed")];
    if (this.model.silenced.has(`${this.layer}.${head}`)) {
      this.add(...mix, () => ({text: "0, because this head is switched off"}));
    } else {
      this.addMatmul(...mix, {
        text: "the dot product of a row and a column",
        left: (r) => [`weights of ${tokens[r]}`, weights(positions[r])],
        right: (c, r) => [`column ${c + 1} of ${v}`,
          Float32Array.from(weights(positions[r]), (_, s) => this.vector(s, "value")[c])],
        highlights: (r, c) => [["weights", r], [v, undefined, c]]});
    }
    if (projection && attention === "softmax") this.addProjection(`blocks.${this.layer}.attention.projection`);
  }

  addProjection(name) {
    const {activations_T, positions, tokens, sizes} = this;
    this.addMatmul("attended", `all ${sizes.H} mixes · Wᵀ`, "T × C", (t) => activations_T[t].attended, {
      text: this.linearText(name),
      left: (r) => [`mixes of all heads for ${tokens[r]}`, activations_T[positions[r]].mixed],
      right: (c) => [`row ${c + 1} of the projection`, this.weight(`${name}.weight`, c)],
      highlights: (r) => [["mix", r]]});
  }

  /* Add the stream after the layer. */
  addSum() {
    const {residual, attention, mlp} = this.model.architecture, {activations_T, positions} = this;
    const terms = [
      residual && [this.stream, (t) => this.input(t)],
      attention !== "none" && ["attention", (t) => activations_T[t].attended],
      mlp !== "none" && ["MLP", (t) => activations_T[t].hidden],
    ].filter(Boolean);
    const isSum = residual && terms.length > 1, only = `the ${terms.at(-1)[0]}’s output`;
    this.add(`after layer ${this.layer + 1}`, isSum ? terms.map(([name]) => name).join(" + ") : only, "T × C",
      (t) => activations_T[t].stream, (r, c) => ({
        text: isSum ? "the sum of these numbers" : `number ${c + 1} of the layer’s output`,
        vectors: isSum ? terms.map(([name, vectorOf]) => [name, vectorOf(positions[r])]) : []}));
  }

  /* Add the logits; with a large vocabulary, only the last token's. */
  addLogits() {
    const {model, activations_T, positions, tokens} = this, after = `after layer ${model.depth}`, last = positions.at(-1);
    const isSmall = model.vocabSize * activations_T[0].stream.length * positions.length < 2e7;
    const logits = (t) => (isSmall || t === last ? model.readOut(activations_T[t].stream) : new Float32Array());
    const input = model.architecture.norm === "none" ? after : "the stream after the last norm";
    this.addMatmul("logits", "LM head", "T × V", logits, {
      text: this.linearText("head"),
      left: (r) => [`${input}, ${tokens[r]}`, model.lastNorm(activations_T[positions[r]].stream)],
      right: (id) => [`row ${this.quoted(id)} of the LM head`, this.weight(`${model.lmHead}.weight`, id)],
      highlights: (r) => [[after, r]]}, (id) => this.quoted(id));
  }
}

/* Show the matrices of a walkthrough. A newer call ends an older one. */
let walkthroughs = 0;
async function showWalkthrough() {
  if (generating) return;
  const number = ++walkthroughs, pause = new Pause(), matrices = [];
  const {steps} = new HeadWalkthrough(models[shown], states[shown].cache, view.layer, view.head);
  for (const step of steps) {
    matrices.push(matrix(step, (row, column) => showExplanation(steps, step, row, column)));
    await pause.yieldIfDue();
    if (number !== walkthroughs) return;
  }
  page.walkthrough.replaceChildren(...matrices);
  page.explanation.replaceChildren(element("p", {class: "note"},
    "Click a number, or move to one with Tab and the arrow keys, to see what makes it."));
}

/* Return a matrix as a picture: blue above zero, orange below, as strong as the number is large. */
function matrix(step, choose) {
  const {name, formula, axes, rows, values} = step, widest = Math.max(...values.map((x) => x.length));
  const columns = Math.min(widest, MOST_COLUMNS), isShort = rows.length <= 12;
  const height = isShort ? 14 : 10, width = columns > 32 ? 6 : isShort ? 14 : 8; // of a cell, in pixels
  const size = {width: `${columns * width}px`, height: `${rows.length * height}px`};
  const picture = element("div", {class: "matrix", tabindex: 0, role: "img", style: size,
    "aria-label": `${name}: arrow keys move among its numbers`}, matrixCanvas(values, columns));
  const exists = (r, c) => c < Math.min(columns, values[r].length);
  let chosen = [rows.length - 1, -1];
  addCells(picture, {rows: rows.length, columns, current: () => chosen,
    choose: (r, c) => { if (exists(r, c)) choose(...(chosen = [r, c])); },
    tooltipOf: (r, c) => (exists(r, c) ? equation(step, r, c) : "masked: a later token")});
  step.highlight = (r, c) => picture.append(element("div", {class: "highlight", style: {
    ...(c === undefined ? {left: 0, width: "100%"} : {left: `${c * width}px`, width: `${width}px`}),
    ...(r === undefined ? {top: 0, height: "100%"} : {top: `${r * height}px`, height: `${height}px`})}}));
  const labels = element("div", {class: "row-names", "aria-hidden": "true", style: {height: size.height}},
    ...rows.map((text) => element("span", {}, text.slice(1, -1))));
  const shape = `${axes} = ${rows.length} × ${widest}${widest > columns ? `, the first ${columns}` : ""}`;
  const caption = [element("strong", {}, name), " ", element("span", {}, formula), element("small", {}, shape)];
  return element("figure", {class: "step"}, element("figcaption", {}, ...caption),
    element("div", {class: "row-of"}, labels, picture));
}

function equation({name, rows, columnName, values}, r, c) {
  return `${name}[${rows[r]}, ${columnName(c)}] = ${numberText(values[r][c])}`;
}

function numberText(x) {
  return Math.abs(x) >= 1000 || (x !== 0 && Math.abs(x) < 0.01) ? x.toExponential(1) : x.toFixed(2);
}

function largestMagnitude(values) { return values.reduce((most, x) => Math.max(most, Math.abs(x)), 1e-30); }

function matrixCanvas(values, columns) {
  const pixels = new Uint32Array(values.length * columns), most = Math.max(...values.map(largestMagnitude));
  const [paper, above, below] = ["--shade", "--deep", "--training"].map(colour);
  values.forEach((x, r) => x.subarray(0, columns).forEach((y, c) => {
    pixels[r * columns + c] = mix(paper, y < 0 ? below : above, Math.sqrt(Math.abs(y) / most));
  }));
  return paint(element("canvas"), pixels, columns);
}

/* Show how a number is computed. Frame the number and its operands. */
function showExplanation(steps, step, row, column) {
  for (const node of page.walkthrough.querySelectorAll(".highlight")) node.remove();
  const {text, vectors = [], isMatmul, highlights = []} = step.explain(row, column);
  step.highlight(row, column);
  for (const [name, ...cell] of highlights) steps.find((other) => other.name === name).highlight(...cell);
  const parts = vectors.map(([label, values]) => [label, numbers(values, isMatmul ? -1 : column)]);
  if (isMatmul) {
    const products = vectors[0][1].map((x, i) => x * vectors[1][1][i]), sum = products.reduce((a, b) => a + b, 0);
    parts.push([`their products, with the sum ${numberText(sum)}`, numbers(products, -1)]);
  }
  page.explanation.replaceChildren(element("p", {}, element("strong", {}, equation(step, row, column)), `: ${text}.`),
    ...parts.map(([label, list]) => element("div", {}, element("h3", {}, label), list)));
}

/* Return a vector as a list of numbers; numbers below zero are orange and underlined. */
function numbers(values, marked) {
  const shown = Array.from(values.slice(0, 64)), most = largestMagnitude(shown);
  const nodes = shown.map((value, i) => element("span", {
    class: `number${value < 0 ? " negative" : ""}${i === marked ? " marked" : ""}`,
    style: {"--fraction": (Math.abs(value) / most).toFixed(3)}}, numberText(value)));
  if (values.length > 64) nodes.push(element("span", {class: "note"}, `… ${values.length - 64} more`));
  return element("div", {class: "numbers"}, ...nodes);
}
