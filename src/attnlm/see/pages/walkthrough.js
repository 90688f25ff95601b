"use strict";
/* A walkthrough of one head, step by step: the operands of a step, its result, and the arithmetic of one number. */

const MOST_ROWS = 24; // tokens
const MOST_WEIGHTS = 64; // rows of a weight matrix
const MOST_COLUMNS = 96;
const MOST_NAMES = 32; // of rows
const MOST_TERMS = 64; // rows of the arithmetic
const WHITE = 6; // a score this far below the largest score of its row is white

/* A step has {name, title, make()}. `make` returns
     operands            matrices: {name, axes, rows, values, columnName}, with row labels and rows of numbers
     result              the matrix that the step computes
     sign                between the operands: × or +
     at(r, c)            for each operand, the [row, column] that number [r, c] of the result is made of
     explain(r, c)       the arithmetic: {columns, rowNames, totals, marked}, [label, vector] pairs and [label, number] pairs
   Matrices have a row for each token (T), an embedding (C), a head (D), the hidden units (F), or the vocabulary (V). */
class HeadWalkthrough {
  constructor(model, cache, layer, head) {
    const T = cache.ids.length, first = Math.max(0, T - MOST_ROWS);
    Object.assign(this, {model, cache, layer, head, first, steps: []});
    this.positions = Array.from({length: T - first}, (_, r) => first + r); // of the rows
    this.allTokens = cache.ids.map((id) => this.quoted(id));
    this.tokens = this.allTokens.slice(first);
    this.activations_T = cache.layers[layer];
    this.block = `blocks.${layer}.`;
    this.stream = layer ? `after layer ${layer}` : "embedding";
    if (model.depth) this.addLayer();
    else this.addTable();
  }

  quoted(id) { return `“${tokenText(this.model, id)}”`; }

  tensor(name) { return this.model.weights[name]; }

  /* Return a matrix with a row for each token. */
  ofTokens(name, axes, vectorOf, more) {
    return {name, axes, rows: this.tokens, values: this.positions.map(vectorOf), columnName: (c) => `${c + 1}`, ...more};
  }

  /* Return rows of a weight matrix. */
  ofWeights(name, axes, tensor, {start = 0, count = tensor.shape[0], rowName = (r) => `${r + 1}`} = {}) {
    const rowOf = (r) => row(tensor, start + r), shown = [...Array(Math.min(count, MOST_WEIGHTS)).keys()];
    return {name, axes, rowOf, count, rows: shown.map(rowName), values: shown.map(rowOf), columnName: (c) => `${c + 1}`};
  }

  add(name, title, make) { this.steps.push({name, title, make}); }

  /* Add a matmul: number [r, c] is the dot product of row r of one matrix and row c of the other. `then` returns what
     follows the sum, as [label, number] pairs. */
  addMatmul(name, title, make, then = () => []) {
    this.add(name, title, () => {
      const {operands, result, vectors} = make(), [left, right] = operands;
      const pair = vectors ?? ((r, c) => [left.values[r], right.rowOf ? right.rowOf(c) : right.values[c]]);
      return {operands, result, sign: "×", at: (r, c) => [[r], [c]], explain: (r, c) => {
        const [x, y] = pair(r, c), products = x.map((value, i) => value * y[i]), sum = products.reduce((a, b) => a + b, 0);
        return {columns: [[left.name, x], [`× ${right.name}`, y], ["= product", products]],
          rowNames: vectors && this.allTokens, totals: [["sum of the products", sum], ...then(sum, result.values[r][c], r, c)]};
      }};
    });
  }

  /* Add a linear layer: a matmul with a weight matrix, and a bias if it exists. */
  addLinear(name, title, {input, axes, tensor, matrix, start = 0, count, rowName, vectorOf, columnName, then = () => []}) {
    const bias = this.tensor(`${tensor.replace("token_embedding", "head")}.bias`);
    this.addMatmul(name, title, () => ({
      operands: [input(), this.ofWeights(matrix, axes[0], this.tensor(`${tensor}.weight`), {start, count, rowName})],
      result: this.ofTokens(name, axes[1], vectorOf, columnName && {columnName}),
    }), (sum, value, r, c) => [...(bias ? [["plus the bias", sum + bias.values[start + c]]] : []), ...then(value, r, c)]);
  }

  /* Add a sum of two or more matrices, number by number. */
  addSum(name, title, terms, vectorOf) {
    this.add(name, title, () => ({
      operands: terms.map(([term, of]) => this.ofTokens(term, "T × C", of)),
      result: this.ofTokens(name, "T × C", vectorOf),
      at: (r, c) => terms.map(() => [r, c]),
      explain: (r, c) => ({marked: c, columns: [
        ...terms.map(([term, of], n) => [n ? `+ ${term}` : term, of(this.positions[r])]),
        ["= sum", vectorOf(this.positions[r])]]}),
    }));
  }

  /* Add a softmax of each row: e to each number, divided by the sum. */
  addSoftmax(name, title, {input, axes, rowOf, columnName, rowNames}) {
    this.add(name, title, () => {
      const shown = (t) => rowOf(t).subarray(axes === "T × T" ? this.first : 0);
      const weights = (t) => softmax(rowOf(t)).subarray(axes === "T × T" ? this.first : 0);
      return {
        operands: [this.ofTokens(input, axes, shown, {columnName, shading: axes === "T × T" ? "below" : ""})],
        result: this.ofTokens(name, axes, weights, {columnName, shading: "share"}),
        at: (r) => [[r]],
        explain: (r, c) => {
          const x = Float64Array.from(rowOf(this.positions[r])), powers = x.map(Math.exp), sum = powers.reduce((a, b) => a + b, 0);
          return {columns: [[`${input} s`, x], ["eˢ", powers], ["÷ sum", powers.map((y) => y / sum)]], rowNames,
            totals: [["sum of eˢ", sum]], marked: axes === "T × T" ? this.first + c : c};
        },
      };
    });
  }

  addTable() {
    const table = this.model.embeddings, columnName = (id) => this.quoted(id);
    this.add("logits", "The row of each token in the table: the logits of the next token", () => ({
      operands: [{...this.ofWeights("table", "V × V", table, {rowName: columnName}), columnName}],
      result: this.ofTokens("logits", "T × V", (t) => this.cache.embedded[t], {columnName}),
      at: (r) => [[this.cache.ids[this.positions[r]]]],
      explain: (r, id) => ({columns: [[`row ${this.tokens[r]}`, this.cache.embedded[this.positions[r]]]], marked: id,
        rowNames: this.vocabulary()}),
    }));
    this.addProbabilities((t) => this.cache.embedded[t]);
  }

  vocabulary() { return Array.from({length: this.model.vocabSize}, (_, id) => this.quoted(id)); }

  addProbabilities(rowOf) {
    this.addSoftmax("probabilities", "Softmax turns logits into probabilities of the next token", {
      input: "logits", axes: "T × V", rowOf, columnName: (id) => this.quoted(id), rowNames: this.vocabulary()});
  }

  addLayer() {
    const {attention, norm, residual, mlp} = this.model.architecture, {activations_T, layer} = this;
    const input = (t) => this.input(t);
    if (layer) {
      this.add(this.stream, `The stream that layer ${layer} leaves to layer ${layer + 1}`, () => ({operands: [],
        result: this.ofTokens(this.stream, "T × C", input), at: () => [], explain: () => ({columns: []})}));
    } else this.addEmbedding();
    let [name, vectorOf] = [this.stream, input];
    if (attention !== "none") {
      if (norm !== "none") this.addNorm("input", name, vectorOf, `${this.block}attention_norm`);
      this.source = norm === "none" ? name : "input";
      if (attention === "softmax") this.addQueries();
      this.addAttention();
      const attended = (t) => activations_T[t].attended;
      if (residual) {
        const before = [name, vectorOf];
        vectorOf = mlp === "none" ? (t) => activations_T[t].stream : (t) => sum(input(t), attended(t));
        name = mlp === "none" ? `after layer ${layer + 1}` : "with attention";
        this.addSum(name, "The attention is added to the stream", [before, ["attention", attended]], vectorOf);
      } else [name, vectorOf] = ["attention", attended];
    }
    if (mlp !== "none") [name, vectorOf] = this.addMlp(name, vectorOf);
    if (layer === this.model.depth - 1) this.addLogits(name, vectorOf);
  }

  /* Return the layer's input: the stream at position t. */
  input(t) { return this.layer ? this.cache.layers[this.layer - 1][t].stream : this.cache.embedded[t]; }

  addEmbedding() {
    const {ids} = this.cache, {embeddings: table} = this.model, places = this.tensor("position_embedding.weight");
    const hasPositions = this.model.architecture.positions === "learned";
    this.add("embedding", `The row of each token in the table of embeddings${hasPositions ? ", plus the row of its position" : ""}`, () => ({
      operands: [this.ofWeights("token table", "V × C", table, {rowName: (id) => this.quoted(id)}),
        ...(hasPositions ? [this.ofWeights("positions", "T × C", places)] : [])],
      result: this.ofTokens("embedding", "T × C", (t) => this.input(t)),
      at: (r) => [[ids[this.positions[r]]], [this.positions[r]]],
      explain: (r, c) => {
        const t = this.positions[r];
        return {marked: c, columns: [[`row ${this.tokens[r]}`, row(table, ids[t])],
          ...(hasPositions ? [[`+ position ${t + 1}`, row(places, t)], ["= sum", this.input(t)]] : [])]};
      },
    }));
  }

  addNorm(name, before, vectorOf, tensor) {
    const {norm, norm_epsilon, bias} = this.model.architecture, isLayer = norm === "layer", normed = (t) => this.model.norm(tensor, vectorOf(t));
    this.add(name, `${isLayer ? "Layer" : "RMS"} norm: each row is scaled to the same size`, () => ({
      operands: [this.ofTokens(before, "T × C", vectorOf)],
      result: this.ofTokens(name, "T × C", normed),
      at: (r, c) => [[r, c]],
      explain: (r, c) => {
        const t = this.positions[r], x = isLayer ? centre(vectorOf(t)) : vectorOf(t);
        const size = Math.sqrt(dot(x, 0, x, 0, x.length) / x.length + norm_epsilon);
        return {marked: c, totals: [["size: √(mean of the squares)", size]], columns: [
          [isLayer ? `${before} − mean` : before, x], ["÷ size", x.map((value) => value / size)],
          ["× gain", this.tensor(`${tensor}.gain`).values], ...(isLayer && bias ? [["+ bias", this.tensor(`${tensor}.bias`).values]] : []),
          ["= number", normed(t)]]};
      },
    }));
  }

  /* Return the index of the head's query, key, value or output. Several heads may share a key and a value. */
  indexOf(part) {
    const {H, K} = this.model.headSizes;
    return part === "query" || part === "mixed" ? this.head : Math.floor((this.head * K) / H);
  }

  /* Return the head's query, key, value or output (D) at position t. */
  vector(t, part) {
    const {D} = this.model.headSizes, start = this.indexOf(part) * D;
    return this.activations_T[t][part].subarray(start, start + D);
  }

  /* Return the matrix of the head's queries, keys or values, or of the input if there are no projections. */
  ofHead(part) {
    const name = this.model.architecture.attention === "softmax" ? part[0] : this.source;
    return this.ofTokens(name, "T × D", (t) => this.vector(t, part));
  }

  addQueries() {
    const {query_key_norm, positions, head_size} = this.model.architecture;
    const changes = [query_key_norm && "normed", positions === "rotary" && "rotated by its position"].filter(Boolean);
    const titles = {query: "Queries: what each token looks for", key: "Keys: what each token can be found by",
      value: "Values: what each token passes on"};
    for (const part of ["query", "key", "value"]) {
      this.addLinear(part[0], titles[part], {
        input: () => this.ofTokens(this.source, "T × C", (t) => this.activations_T[t].input), axes: ["D × C", "T × D"],
        tensor: `${this.block}attention.${part}`, matrix: `W${part[0]}`, start: this.indexOf(part) * head_size, count: head_size,
        vectorOf: (t) => this.vector(t, part),
        then: (value) => (changes.length && part !== "value" ? [[changes.join(" and "), value]] : []),
      });
    }
  }

  addAttention() {
    const {attention, projection} = this.model.architecture, {activations_T, positions, tokens, head, first} = this;
    const {H, D} = this.model.headSizes, columnName = (s) => tokens[s];
    const scores = (t) => this.model.scores(this.layer, this.cache, t, head);
    const weights = (t) => activations_T[t].attention[head];
    const scoreTable = () => this.ofTokens("scores", "T × T", (t) => scores(t).subarray(first), {columnName, shading: "below"});
    const masked = "later tokens are masked";
    if (attention === "uniform") {
      this.add("scores", `All scores are 0, and ${masked}`, () => ({
        operands: [], result: scoreTable(), at: () => [], explain: () => ({columns: []})}));
    } else {
      this.addMatmul("scores", `Each query meets each key; ${masked}`, () => ({
        operands: [this.ofHead("query"), this.ofHead("key")], result: scoreTable()}),
      (_, value) => [[`÷ √${D}`, value]]);
    }
    this.addSoftmax("weights", "Softmax turns each row of scores into shares that sum to 1", {
      input: "scores", axes: "T × T", rowOf: scores, columnName, rowNames: this.allTokens});
    const isOff = this.model.silenced.has(`${this.layer}.${head}`);
    this.addMatmul("mix", isOff ? "The head is switched off: its mix is 0" : "Each row becomes a mixture of the values", () => {
      const v = this.ofHead("value"), columns = Array.from({length: D}, (_, d) => Float32Array.from(v.values, (x) => x[d]));
      const column = (t, d) => Float32Array.from(weights(t), (_, s) => this.vector(s, "value")[d]);
      return {
        operands: [this.ofTokens("weights", "T × T", (t) => weights(t).subarray(first), {columnName, shading: "share"}),
          {name: `${v.name} transposed`, axes: "D × T", rows: columns.map((_, d) => `${d + 1}`), values: columns, columnName}],
        result: this.ofTokens("mix", "T × D", (t) => this.vector(t, "mixed")),
        vectors: (r, d) => [weights(positions[r]), column(positions[r], d)],
      };
    }, () => (isOff ? [["the head is off", 0]] : []));
    if (projection && attention === "softmax") {
      this.addLinear("attention", `The mixes of all ${H} heads, projected to the width of the stream`, {
        input: () => this.ofTokens(H > 1 ? "all mixes" : "mix", "T × H·D", (t) => activations_T[t].mixed), axes: ["C × H·D", "T × C"],
        tensor: `${this.block}attention.projection`, matrix: "W", vectorOf: (t) => activations_T[t].attended});
    } else {
      this.add("attention", H > 1 ? `The mixes of all ${H} heads, one after another` : "The mix is the output of the attention", () => ({
        operands: [this.ofTokens("mix", "T × D", (t) => this.vector(t, "mixed"))],
        result: this.ofTokens("attention", H > 1 ? "T × H·D" : "T × C", (t) => activations_T[t].attended),
        at: (r, c) => [Math.floor(c / D) === head ? [r, c % D] : [-1]],
        explain: (r, c) => ({marked: c, columns: [["attention", activations_T[positions[r]].attended]],
          totals: [[`number ${(c % D) + 1} of head ${Math.floor(c / D) + 1}`, activations_T[positions[r]].attended[c]]]})}));
    }
  }

  /* Add the norm, both linear layers and the sum of the MLP. Return the name and the vectors of the stream after it. */
  addMlp(before, beforeOf) {
    const {norm, mlp, residual} = this.model.architecture, {model, block, activations_T} = this, isGated = mlp === "swiglu";
    const name = norm === "none" ? before : "MLP input", tensor = `${block}mlp_norm`, F = model.weights[`${block}mlp.up.weight`].shape[0];
    const inputOf = (t) => (norm === "none" ? beforeOf(t) : model.norm(tensor, beforeOf(t)));
    const gateOf = (t) => (isGated ? model.linear(`${block}mlp.gate`, inputOf(t)) : undefined);
    const hiddenOf = (t) => model.activate(model.linear(`${block}mlp.up`, inputOf(t)), gateOf(t));
    if (norm !== "none") this.addNorm(name, before, beforeOf, tensor);
    this.addLinear("hidden", `The MLP: ${F} hidden units read each token alone`, {
      input: () => this.ofTokens(name, "T × C", inputOf), axes: ["F × C", "T × F"], tensor: `${block}mlp.up`, matrix: "W up",
      vectorOf: hiddenOf,
      then: (value, r, c) => (isGated ? [["gate g", gateOf(this.positions[r])[c]], ["× g / (1 + e⁻ᵍ)", value]]
        : [[mlp === "gelu" ? "after GELU" : "after the square of its positive part", value]])});
    this.addLinear("MLP", "The hidden units write to the stream", {
      input: () => this.ofTokens("hidden", "T × F", hiddenOf), axes: ["C × F", "T × C"], tensor: `${block}mlp.down`,
      matrix: "W down", vectorOf: (t) => activations_T[t].hidden});
    if (!residual) return ["MLP", (t) => activations_T[t].hidden];
    const after = `after layer ${this.layer + 1}`, afterOf = (t) => activations_T[t].stream;
    this.addSum(after, "The MLP is added to the stream", [[before, beforeOf], ["MLP", (t) => activations_T[t].hidden]], afterOf);
    return [after, afterOf];
  }

  /* Add the last norm, the logits and the probabilities; with a large vocabulary, only the last token's. */
  addLogits(before, beforeOf) {
    const {model, positions} = this, last = positions.at(-1), hasNorm = model.architecture.norm !== "none";
    const isSmall = model.vocabSize * beforeOf(last).length * positions.length < 2e7, columnName = (id) => this.quoted(id);
    const logitsOf = (t) => (isSmall || t === last ? model.readOut(beforeOf(t)) : new Float32Array());
    if (hasNorm) this.addNorm("last norm", before, beforeOf, "norm");
    this.addLinear("logits", "The LM head: a logit for each token of the vocabulary", {
      input: () => this.ofTokens(hasNorm ? "last norm" : before, "T × C", (t) => model.lastNorm(beforeOf(t))), axes: ["V × C", "T × V"],
      tensor: model.lmHead, matrix: "LM head", rowName: columnName, vectorOf: logitsOf, columnName});
    this.addProbabilities(logitsOf);
  }
}

/* The walkthrough of the chosen head: the step that is shown, and the chosen number of its result. */
const tour = {steps: [], name: "", cell: null, figure: null};

function showWalkthrough() {
  if (generating) return;
  tour.steps = new HeadWalkthrough(models[shown], states[shown].after.cache, view.layer, view.head).steps;
  showStep();
}

/* Show a step, by default the one that was shown before. */
function showStep(number = Math.max(0, tour.steps.findIndex(({name}) => name === tour.name))) {
  const {steps} = tour, step = steps[number], {operands, result, sign = "+", at, explain} = step.make();
  if (step.name !== tour.name) Object.assign(tour, {name: step.name, cell: null});
  const choose = (r, c) => {
    tour.cell = [r, c];
    [...figures, tour.figure].forEach((figure, n) => figure.frame(...(n === figures.length ? [r, c] : at(r, c)[n] ?? [-1])));
    showArithmetic(result, r, c, explain(r, c));
  };
  const figures = operands.map((matrix) => matrixFigure(matrix));
  tour.figure = matrixFigure(result, choose);
  page.flow.replaceChildren(...steps.map(({name}, other) => element("button", {type: "button", onclick: () => moveTo(other),
    "aria-current": other === number ? "step" : undefined, class: ["q", "k"].includes(name) ? "parallel" : ""}, name)));
  page["step-title"].textContent = `${number + 1} of ${steps.length}: ${step.title}`;
  page["previous-step"].disabled = number === 0;
  page["next-step"].disabled = number === steps.length - 1 && view.layer + 1 >= view.attention.layers;
  page.walkthrough.replaceChildren(
    element("div", {class: "operands"}, ...figures.flatMap(({node}, n) => (n ? [element("p", {class: "sign"}, sign), node] : [node]))),
    element("div", {class: "becomes", "aria-hidden": "true"}),
    element("div", {class: "outcome"}, tour.figure.node, page.explanation));
  const lastRow = result.values.length - 1, isChosen = tour.cell && tour.cell[1] < (result.values[tour.cell[0]]?.length ?? 0);
  const shownRow = result.values[lastRow].subarray(0, MOST_COLUMNS);
  choose(...(isChosen ? tour.cell : [lastRow, topK(result.shading || step.name === "logits" ? shownRow : shownRow.map(Math.abs), 1)[0]]));
}

/* Go to a step. The result of the step before moves to its place among the operands. */
function moveTo(number) {
  const {figure, steps} = tour;
  if (number === steps.length) {
    tour.name = "";
    view.chooseHead((view.layer + 1) * view.attention.heads + view.head);
    return;
  }
  if (!document.startViewTransition || matchMedia("(prefers-reduced-motion: reduce)").matches) {
    showStep(number);
    return;
  }
  figure.node.style.viewTransitionName = "moved";
  let moved;
  document.startViewTransition(() => {
    showStep(number);
    moved = [...page.walkthrough.querySelectorAll(".operands figure")].find(({dataset}) => dataset.name === figure.name);
    if (moved) moved.style.viewTransitionName = "moved";
  }).finished.then(() => { if (moved) moved.style.viewTransitionName = ""; });
}

page["previous-step"].addEventListener("click", () => moveTo(tour.steps.findIndex(({name}) => name === tour.name) - 1));
page["next-step"].addEventListener("click", () => moveTo(tour.steps.findIndex(({name}) => name === tour.name) + 1));

/* Return a matrix as a picture with {node, name, frame(r, c)}; its numbers can be chosen if `choose` is given. */
function matrixFigure(matrix, choose) {
  const {name, axes, rows, values, count = rows.length} = matrix, widest = Math.max(...values.map((x) => x.length), 1);
  const columns = Math.min(widest, MOST_COLUMNS), exists = (r, c) => c < Math.min(columns, values[r].length);
  const picture = element("div", {class: "matrix", role: "img", tabindex: choose ? 0 : undefined,
    "aria-label": `${name}${choose ? ": arrow keys move among its numbers" : ""}`}, matrixCanvas(matrix, columns));
  addCells(picture, {rows: rows.length, columns, current: () => tour.cell,
    choose: (r, c) => { if (choose && exists(r, c)) choose(r, c); },
    tooltipOf: (r, c) => (exists(r, c) ? equation(matrix, r, c) : "masked: a later token")});
  const labels = rows.length > MOST_NAMES ? "" : element("div", {class: "row-names", "aria-hidden": "true"},
    ...rows.map((text) => element("span", {}, text.replace(/^“|”$/g, ""))));
  const size = `${axes} = ${count} × ${widest}`, isCut = count > rows.length || widest > columns;
  const caption = element("figcaption", {}, element("strong", {}, name), " ", element("small", {}, isCut ? `${size}, a part` : size));
  const node = element("figure", {class: "step", "data-name": name, style: {"--rows": rows.length, "--columns": columns}},
    caption, element("div", {class: "row-of"}, labels, picture));
  const frame = (r, c) => {
    for (const old of picture.querySelectorAll(".highlight")) old.remove();
    if (r < 0 || r >= rows.length) return;
    const part = (index, all) => (index === undefined ? [0, 100] : [(100 * index) / all, 100 / all]).map((x) => `${x}%`);
    const [[top, height], [left, width]] = [part(r, rows.length), part(c, columns)];
    picture.append(element("div", {class: "highlight", style: {top, height, left, width}}));
  };
  return {node, name, frame};
}

function equation({name, rows, columnName, values}, r, c) {
  return `${name}[${rows[r]}, ${columnName(c)}] = ${numberText(values[r][c])}`;
}

function numberText(x) {
  return Math.abs(x) >= 1000 || (x !== 0 && Math.abs(x) < 0.01) ? x.toExponential(1) : x.toFixed(2);
}

function largestMagnitude(values) { return values.reduce((most, x) => Math.max(most, Math.abs(x)), 1e-30); }

/* Draw a matrix. Shares are tinted as in attention maps, scores by their distance from the largest of their row; other
   numbers are blue above zero and orange below, as strong as they are large. */
function matrixCanvas({values, shading}, columns) {
  const pixels = new Uint32Array(values.length * columns), most = Math.max(...values.map(largestMagnitude));
  const [paper, above, below] = ["--shade", "--deep", "--training"].map(colour);
  values.forEach((x, r) => {
    const largest = x.reduce((a, b) => Math.max(a, b), -Infinity);
    x.subarray(0, columns).forEach((y, c) => {
      if (shading === "share") pixels[r * columns + c] = shadeOf(y);
      else if (shading === "below") pixels[r * columns + c] = shadeOf(Math.max(0, 1 - (largest - y) / WHITE) ** 2);
      else pixels[r * columns + c] = mix(paper, y < 0 ? below : above, Math.sqrt(Math.abs(y) / most));
    });
  });
  return paint(element("canvas"), pixels, columns);
}

/* Show how a number is computed, with the factors and products of each index in one row. */
function showArithmetic(result, r, c, {columns, rowNames, totals = [], marked}) {
  const length = columns[0]?.[1].length ?? 0, first = Math.max(0, Math.min((marked ?? 0) - MOST_TERMS / 2, length - MOST_TERMS));
  const shown = [...Array(length).keys()].slice(first, first + MOST_TERMS), most = columns.map(([, values]) => largestMagnitude(values));
  const cell = (value, largest) => element("td", {class: value < 0 ? "negative" : "",
    style: {"--fraction": (Math.abs(value) / largest).toFixed(3)}}, numberText(value));
  const table = element("table", {class: "arithmetic"},
    element("thead", {}, element("tr", {}, element("th"), ...columns.map(([label]) => element("th", {scope: "col"}, label)))),
    element("tbody", {}, ...shown.map((i) => element("tr", {class: i === marked ? "marked" : ""},
      element("th", {scope: "row"}, rowNames?.[i] ?? `${i + 1}`),
      ...columns.map(([, values], n) => cell(values[i], most[n]))))));
  const more = length > shown.length ? [element("p", {class: "note"}, `${shown.length} of ${length} rows`)] : [];
  const box = element("div", {class: "terms", tabindex: 0, role: "region", "aria-label": "arithmetic"}, table);
  page.explanation.replaceChildren(element("p", {}, element("strong", {}, equation(result, r, c))),
    ...totals.map(([label, number]) => element("p", {class: "total"}, `${label}: `, element("strong", {}, numberText(number)))),
    ...(length ? [box] : []), ...more);
  const row = box.querySelector(".marked");
  if (row) box.scrollTop = row.offsetTop - box.clientHeight / 2;
}
