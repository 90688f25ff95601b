/* The steps of one head: the operands of each step, its result, and the arithmetic of each number. */

import {centre, dot, plus, softmax, tensorRow} from "./arrays.js";
import {tokenText} from "./labels.js";

const MOST_ROWS = 24; // tokens
const MOST_WEIGHTS = 64; // rows of a weight matrix
const MOST_LOGIT_TERMS = 2e7; // products for the logits of all tokens; above, only the last token has logits
const NO_TERMS = () => ({columns: []});

/* A step has {name, title, make()}. `make` returns
     operands            matrices: {name, axes, rows, values, columnName}, with row labels and rows of numbers
     result              the matrix that the step computes
     sign                between the operands: × or +
     at(r, c)            for each operand, the [row, column] that number [r, c] of the result is made of
     explain(r, c)       the arithmetic: {columns, rowNames, totals, marked}; columns are [label, vector] pairs, totals
                         are [label, number] pairs
   Matrices have a row for each token (T), an embedding (C), a head (D), the hidden units (F), or the vocabulary (V). */
export class HeadWalkthrough {
  steps = [];
  source = ""; // what queries, keys and values are made of

  constructor(model, cache, layer, head) {
    const T = cache.ids.length;
    this.model = model;
    this.cache = cache;
    this.layer = layer;
    this.head = head;
    this.first = Math.max(0, T - MOST_ROWS);
    this.positions = Array.from({length: T - this.first}, (_, r) => this.first + r); // of the rows
    this.allTokens = cache.ids.map((id) => this.quoted(id));
    this.tokens = this.allTokens.slice(this.first);
    this.activations_T = cache.layers[layer];
    this.block = `blocks.${layer}.`;
    if (model.depth) this.addLayer();
    else this.addTable();
  }

  quoted(id) { return `“${tokenText(this.model, id)}”`; }

  vocabulary() { return Array.from({length: this.model.vocabSize}, (_, id) => this.quoted(id)); }

  tensor(name) { return this.model.weights[name]; }

  /* Return a matrix with a row for each token. */
  ofTokens(name, axes, vectorOf, more) {
    return {name, axes, rows: this.tokens, values: this.positions.map(vectorOf), columnName: numberName, ...more};
  }

  /* Return rows of a weight matrix. */
  ofWeights(name, axes, tensor, {start = 0, count = tensor.shape[0], rowName = numberName} = {}) {
    const rowOf = (r) => tensorRow(tensor, start + r);
    const shown = [...Array(Math.min(count, MOST_WEIGHTS)).keys()];
    return {name, axes, rowOf, count, rows: shown.map(rowName), values: shown.map(rowOf), columnName: numberName};
  }

  /* Return the head's query, key, value or output (D) at position t. */
  vector(t, part) {
    const {D} = this.model.headSizes;
    const start = this.indexOf(part) * D;
    return this.activations_T[t][part].subarray(start, start + D);
  }

  /* Return the index of the head's query, key, value or output. Several heads may share a key and a value. */
  indexOf(part) { return part === "query" || part === "mixed" ? this.head : this.model.keyHeadOf(this.head); }

  /* Return the matrix of the head's queries, keys or values, or of the input if there are no projections. */
  ofHead(part) {
    const name = this.model.architecture.attention === "softmax" ? part[0] : this.source;
    return this.ofTokens(name, "T × D", (t) => this.vector(t, part));
  }

  /* Return the layer's input: the stream at position t. */
  input(t) { return this.layer ? this.cache.layers[this.layer - 1][t].stream : this.cache.embedded[t]; }

  // --- Kinds of steps -------------------------------------------------------------------------------------------

  add(name, title, make) { this.steps.push({name, title, make}); }

  /* Add a matmul: number [r, c] is the dot product of row r of one matrix and row c of the other. `then` returns what
     follows the sum, as [label, number] pairs. */
  addMatmul(name, title, make, then = () => []) {
    this.add(name, title, () => {
      const {operands, result, vectors} = make();
      const [left, right] = operands;
      const pair = vectors ?? ((r, c) => [left.values[r], right.rowOf ? right.rowOf(c) : right.values[c]]);
      const explain = (r, c) => {
        const [x, y] = pair(r, c);
        const products = x.map((value, i) => value * y[i]);
        const sum = total(products);
        return {
          columns: [[left.name, x], [`× ${right.name}`, y], ["= product", products]],
          rowNames: vectors && this.allTokens,
          totals: [["sum of the products", sum], ...then(sum, result.values[r][c], r, c)],
        };
      };
      return {operands, result, sign: "×", at: (r, c) => [[r], [c]], explain};
    });
  }

  /* Add a linear layer: a matmul with a weight matrix, and a bias if it exists. `tensor` is the layer's name in the
     model, `matrix` in the page; `axes` are the weights' and the result's. */
  addLinear(name, title, {input, axes, tensor, matrix, start = 0, count, rowName, vectorOf, more, then = () => []}) {
    const bias = this.tensor(`${tensor.replace("token_embedding", "head")}.bias`);
    const make = () => ({
      operands: [input(), this.ofWeights(matrix, axes[0], this.tensor(`${tensor}.weight`), {start, count, rowName})],
      result: this.ofTokens(name, axes[1], vectorOf, more),
    });
    this.addMatmul(name, title, make, (sum, value, r, c) => [
      ...(bias ? [["plus the bias", sum + bias.values[start + c]]] : []),
      ...then(value, r, c),
    ]);
  }

  /* Add a sum of two or more matrices, number by number. */
  addSum(name, title, terms, vectorOf) {
    this.add(name, title, () => ({
      operands: terms.map(([term, of]) => this.ofTokens(term, "T × C", of)),
      result: this.ofTokens(name, "T × C", vectorOf),
      at: (r, c) => terms.map(() => [r, c]),
      explain: (r, c) => ({
        marked: c,
        columns: [
          ...terms.map(([term, of], n) => [n ? `+ ${term}` : term, of(this.positions[r])]),
          ["= sum", vectorOf(this.positions[r])],
        ],
      }),
    }));
  }

  /* Add a softmax of each row: e to each number, divided by the sum. */
  addSoftmax(name, title, {input, axes, rowOf, columnName, rowNames}) {
    const overTokens = axes === "T × T";
    const first = overTokens ? this.first : 0;
    const scores = (t) => rowOf(t).subarray(first);
    const shares = (t) => softmax(rowOf(t)).subarray(first);
    this.add(name, title, () => ({
      operands: [this.ofTokens(input, axes, scores, {columnName, shading: overTokens ? "below" : ""})],
      result: this.ofTokens(name, axes, shares, {columnName, shading: "share"}),
      at: (r) => [[r]],
      explain: (r, c) => {
        const x = Float64Array.from(rowOf(this.positions[r]));
        const powers = x.map(Math.exp);
        const sum = total(powers);
        return {
          columns: [[`${input} s`, x], ["eˢ", powers], ["÷ sum", powers.map((y) => y / sum)]],
          rowNames,
          totals: [["sum of eˢ", sum]],
          marked: first + c,
        };
      },
    }));
  }

  addNorm(name, before, vectorOf, tensor) {
    const {norm, norm_epsilon, bias} = this.model.architecture;
    const isLayerNorm = norm === "layer";
    const normed = (t) => this.model.norm(tensor, vectorOf(t));
    const gain = this.tensor(`${tensor}.gain`).values;
    const shift = isLayerNorm && bias ? [["+ bias", this.tensor(`${tensor}.bias`).values]] : [];
    this.add(name, `${isLayerNorm ? "Layer" : "RMS"} norm: each row is scaled to the same size`, () => ({
      operands: [this.ofTokens(before, "T × C", vectorOf)],
      result: this.ofTokens(name, "T × C", normed),
      at: (r, c) => [[r, c]],
      explain: (r, c) => {
        const t = this.positions[r];
        const x = isLayerNorm ? centre(vectorOf(t)) : vectorOf(t);
        const size = Math.sqrt(dot(x, 0, x, 0, x.length) / x.length + norm_epsilon);
        return {
          marked: c,
          totals: [["size: √(mean of the squares)", size]],
          columns: [
            [isLayerNorm ? `${before} − mean` : before, x],
            ["÷ size", x.map((value) => value / size)],
            ["× gain", gain],
            ...shift,
            ["= number", normed(t)],
          ],
        };
      },
    }));
  }

  /* Add a step that shows its result without an arithmetic. */
  addGiven(name, title, makeResult) {
    this.add(name, title, () => ({operands: [], result: makeResult(), at: () => [], explain: NO_TERMS}));
  }

  // --- The steps of a bigram and of a layer ---------------------------------------------------------------------

  addTable() {
    const {cache} = this;
    const columnName = (id) => this.quoted(id);
    const logitsOf = (t) => cache.embedded[t];
    this.add("logits", "The row of each token in the table: the logits of the next token", () => ({
      operands: [{...this.ofWeights("table", "V × V", this.model.embeddings, {rowName: columnName}), columnName}],
      result: this.ofTokens("logits", "T × V", logitsOf, {columnName}),
      at: (r) => [[cache.ids[this.positions[r]]]],
      explain: (r, id) => ({
        columns: [[`row ${this.tokens[r]}`, logitsOf(this.positions[r])]],
        marked: id,
        rowNames: this.vocabulary(),
      }),
    }));
    this.addProbabilities(logitsOf);
  }

  addProbabilities(rowOf) {
    this.addSoftmax("probabilities", "Softmax turns logits into probabilities of the next token", {
      input: "logits",
      axes: "T × V",
      rowOf,
      columnName: (id) => this.quoted(id),
      rowNames: this.vocabulary(),
    });
  }

  /* Add all steps of the layer. [name, vectorOf] is the stream after the steps so far. */
  addLayer() {
    const {attention, mlp} = this.model.architecture;
    let stream = [this.layer ? `after layer ${this.layer}` : "embedding", (t) => this.input(t)];
    if (this.layer) {
      const title = `The stream that layer ${this.layer} leaves to layer ${this.layer + 1}`;
      this.addGiven(stream[0], title, () => this.ofTokens(stream[0], "T × C", (t) => this.input(t)));
    } else this.addEmbedding();
    if (attention !== "none") stream = this.addAttentionPart(...stream);
    if (mlp !== "none") stream = this.addMlp(...stream);
    if (this.layer === this.model.depth - 1) this.addLogits(...stream);
  }

  addEmbedding() {
    const {ids} = this.cache;
    const {embeddings: table} = this.model;
    const places = this.tensor("position_embedding.weight");
    const plusPosition = places ? ", plus the row of its position" : "";
    this.add("embedding", `The row of each token in the table of embeddings${plusPosition}`, () => ({
      operands: [
        this.ofWeights("token table", "V × C", table, {rowName: (id) => this.quoted(id)}),
        ...(places ? [this.ofWeights("positions", "T × C", places)] : []),
      ],
      result: this.ofTokens("embedding", "T × C", (t) => this.input(t)),
      at: (r) => [[ids[this.positions[r]]], [this.positions[r]]],
      explain: (r, c) => {
        const t = this.positions[r];
        const sum = places ? [[`+ position ${t + 1}`, tensorRow(places, t)], ["= sum", this.input(t)]] : [];
        return {marked: c, columns: [[`row ${this.tokens[r]}`, tensorRow(table, ids[t])], ...sum]};
      },
    }));
  }

  /* Add the norm, the attention and its sum with the stream. Return the stream after it. */
  addAttentionPart(before, beforeOf) {
    const {attention, norm, residual, mlp} = this.model.architecture;
    const {activations_T} = this;
    if (norm !== "none") this.addNorm("input", before, beforeOf, `${this.block}attention_norm`);
    this.source = norm === "none" ? before : "input";
    if (attention === "softmax") this.addQueries();
    this.addScores();
    this.addMix();
    this.addAttended();
    const attended = (t) => activations_T[t].attended;
    if (!residual) return ["attention", attended];
    const isLast = mlp === "none";
    const after = isLast ? `after layer ${this.layer + 1}` : "with attention";
    const afterOf = isLast ? (t) => activations_T[t].stream : (t) => plus(this.input(t), attended(t));
    const terms = [[before, beforeOf], ["attention", attended]];
    this.addSum(after, "The attention is added to the stream", terms, afterOf);
    return [after, afterOf];
  }

  addQueries() {
    const {query_key_norm, positions, head_size} = this.model.architecture;
    const changes = [query_key_norm && "normed", positions === "rotary" && "rotated by its position"].filter(Boolean);
    const titles = {
      query: "Queries: what each token looks for",
      key: "Keys: what each token can be found by",
      value: "Values: what each token passes on",
    };
    for (const [part, title] of Object.entries(titles)) {
      const isChanged = changes.length && part !== "value";
      this.addLinear(part[0], title, {
        input: () => this.ofTokens(this.source, "T × C", (t) => this.activations_T[t].input),
        axes: ["D × C", "T × D"],
        tensor: `${this.block}attention.${part}`,
        matrix: `W${part[0]}`,
        start: this.indexOf(part) * head_size,
        count: head_size,
        vectorOf: (t) => this.vector(t, part),
        then: (value) => (isChanged ? [[changes.join(" and "), value]] : []),
      });
    }
  }

  addScores() {
    const {model, tokens, head, first} = this;
    const columnName = (s) => tokens[s];
    const scores = (t) => model.scores(this.layer, this.cache, t, head);
    const look = {columnName, shading: "below"};
    const table = () => this.ofTokens("scores", "T × T", (t) => scores(t).subarray(first), look);
    if (model.architecture.attention === "uniform") {
      this.addGiven("scores", "All scores are 0, and later tokens are masked", table);
    } else {
      const make = () => ({operands: [this.ofHead("query"), this.ofHead("key")], result: table()});
      const then = (_, value) => [[`÷ √${model.headSizes.D}`, value]];
      this.addMatmul("scores", "Each query meets each key; later tokens are masked", make, then);
    }
    this.addSoftmax("weights", "Softmax turns each row of scores into shares that sum to 1", {
      input: "scores",
      axes: "T × T",
      rowOf: scores,
      columnName,
      rowNames: this.allTokens,
    });
  }

  addMix() {
    const {activations_T, positions, tokens, head, first} = this;
    const {D} = this.model.headSizes;
    const isOff = this.model.isSilenced(this.layer, head);
    const columnName = (s) => tokens[s];
    const weights = (t) => activations_T[t].attention[head];
    const valueColumn = (t, d) => Float32Array.from(weights(t), (_, s) => this.vector(s, "value")[d]);
    const title = isOff ? "The head is switched off: its mix is 0" : "Each row becomes a mixture of the values";
    this.addMatmul("mix", title, () => {
      const {name, values} = this.ofHead("value");
      const columns = Array.from({length: D}, (_, d) => Float32Array.from(values, (x) => x[d]));
      const rows = columns.map((_, d) => numberName(d));
      return {
        operands: [
          this.ofTokens("weights", "T × T", (t) => weights(t).subarray(first), {columnName, shading: "share"}),
          {name: `${name} transposed`, axes: "D × T", rows, values: columns, columnName},
        ],
        result: this.ofTokens("mix", "T × D", (t) => this.vector(t, "mixed")),
        vectors: (r, d) => [weights(positions[r]), valueColumn(positions[r], d)],
      };
    }, () => (isOff ? [["the head is off", 0]] : []));
  }

  /* Add the output of the attention: the mixes of all heads, projected if there is a projection. */
  addAttended() {
    const {attention, projection} = this.model.architecture;
    const {activations_T, positions, head} = this;
    const {H, D} = this.model.headSizes;
    const attended = (t) => activations_T[t].attended;
    if (projection && attention === "softmax") {
      this.addLinear("attention", `The mixes of all ${H} heads, projected to the width of the stream`, {
        input: () => this.ofTokens(H > 1 ? "all mixes" : "mix", "T × H·D", (t) => activations_T[t].mixed),
        axes: ["C × H·D", "T × C"],
        tensor: `${this.block}attention.projection`,
        matrix: "W",
        vectorOf: attended,
      });
      return;
    }
    const title = H > 1 ? `The mixes of all ${H} heads, one after another` : "The mix is the output of the attention";
    this.add("attention", title, () => ({
      operands: [this.ofTokens("mix", "T × D", (t) => this.vector(t, "mixed"))],
      result: this.ofTokens("attention", H > 1 ? "T × H·D" : "T × C", attended),
      at: (r, c) => [Math.floor(c / D) === head ? [r, c % D] : [-1]],
      explain: (r, c) => {
        const vector = attended(positions[r]);
        const source = `number ${(c % D) + 1} of head ${Math.floor(c / D) + 1}`;
        return {marked: c, columns: [["attention", vector]], totals: [[source, vector[c]]]};
      },
    }));
  }

  /* Add the norm, both linear layers and the sum of the MLP. Return the stream after it. */
  addMlp(before, beforeOf) {
    const {norm, mlp, residual} = this.model.architecture;
    const {model, block, activations_T} = this;
    const hasNorm = norm !== "none";
    const name = hasNorm ? "MLP input" : before;
    const F = this.tensor(`${block}mlp.up.weight`).shape[0];
    const inputOf = (t) => (hasNorm ? model.norm(`${block}mlp_norm`, beforeOf(t)) : beforeOf(t));
    const gateOf = (t) => (mlp === "swiglu" ? model.linear(`${block}mlp.gate`, inputOf(t)) : undefined);
    const hiddenOf = (t) => model.activate(model.linear(`${block}mlp.up`, inputOf(t)), gateOf(t));
    const activation = mlp === "gelu" ? "after GELU" : "after the square of its positive part";
    if (hasNorm) this.addNorm(name, before, beforeOf, `${block}mlp_norm`);
    this.addLinear("hidden", `The MLP: ${F} hidden units read each token alone`, {
      input: () => this.ofTokens(name, "T × C", inputOf),
      axes: ["F × C", "T × F"],
      tensor: `${block}mlp.up`,
      matrix: "W up",
      vectorOf: hiddenOf,
      then: (value, r, c) => (mlp === "swiglu"
        ? [["gate g", gateOf(this.positions[r])[c]], ["× g / (1 + e⁻ᵍ)", value]]
        : [[activation, value]]),
    });
    this.addLinear("MLP", "The hidden units write to the stream", {
      input: () => this.ofTokens("hidden", "T × F", hiddenOf),
      axes: ["C × F", "T × C"],
      tensor: `${block}mlp.down`,
      matrix: "W down",
      vectorOf: (t) => activations_T[t].hidden,
    });
    const outputOf = (t) => activations_T[t].hidden;
    if (!residual) return ["MLP", outputOf];
    const after = `after layer ${this.layer + 1}`;
    const afterOf = (t) => activations_T[t].stream;
    this.addSum(after, "The MLP is added to the stream", [[before, beforeOf], ["MLP", outputOf]], afterOf);
    return [after, afterOf];
  }

  /* Add the last norm, the logits and the probabilities; with a large vocabulary, only the last token's. */
  addLogits(before, beforeOf) {
    const {model, positions} = this;
    const last = positions.at(-1);
    const hasNorm = model.architecture.norm !== "none";
    const isSmall = model.vocabSize * beforeOf(last).length * positions.length < MOST_LOGIT_TERMS;
    const columnName = (id) => this.quoted(id);
    const logitsOf = (t) => (isSmall || t === last ? model.readOut(beforeOf(t)) : new Float32Array());
    if (hasNorm) this.addNorm("last norm", before, beforeOf, "norm");
    this.addLinear("logits", "The LM head: a logit for each token of the vocabulary", {
      input: () => this.ofTokens(hasNorm ? "last norm" : before, "T × C", (t) => model.lastNorm(beforeOf(t))),
      axes: ["V × C", "T × V"],
      tensor: model.lmHead,
      matrix: "LM head",
      rowName: columnName,
      vectorOf: logitsOf,
      more: {columnName},
    });
    this.addProbabilities(logitsOf);
  }
}

/* Return the name of a row or column by its index. */
function numberName(index) { return `${index + 1}`; }

function total(x) { return x.reduce((a, b) => a + b, 0); }
