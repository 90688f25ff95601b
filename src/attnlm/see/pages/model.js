"use strict";
/* The forward pass of every attnlm model, one token at a time. It follows the reference implementation in
   model/textbook.py.

   Axes: T tokens, V vocabulary, C embedding, H heads, K key and value heads, D head size, F hidden units of the MLP.
   A name ends with the axes of its array: scores_T has T numbers, weight_VC has V rows of C. */

class Model {
  /* name: the run's name. architecture: settings by the names of attnlm's options. weights: {name: {shape, values}}
     with Float32Arrays. tokenizer: {encode(text), decode(ids)}. first: the id that stands for an empty text. */
  constructor({name, architecture, weights, tokenizer, first}) {
    Object.assign(this, {name, architecture, weights, tokenizer, first});
    this.vocabSize = this.embeddings.shape[0];
    this.silenced = new Set(); // attention heads that are switched off, as "layer.head"
    this.angles = []; // rotary angles by position
    this.cache = newCache();
  }

  /* The embedding matrix, or the table of a bigram. */
  get embeddings() { return this.weights["token_embedding.weight"] ?? this.weights["table.weight"]; }

  encode(text) { return this.tokenizer.encode(text); }

  decode(ids) { return this.tokenizer.decode(ids); }

  /* Return the logits (V) of the token after the last of `block_size` ids or fewer; earlier ids are ignored. */
  logits(ids) { return resultOf(this.computeLogits(ids)); }

  /* Return [layer][head] → Float32Array T × T. Row t has the attention weights of query t over the keys 0 to t. */
  attention(ids) {
    const cache = newCache();
    resultOf(this.computeLogits(ids, cache));
    const T = cache.ids.length;
    return cache.layers.filter(([first]) => first.attention).map((layer_T) => layer_T[0].attention.map((_, head) => {
      const weights_TT = new Float32Array(T * T);
      layer_T.forEach(({attention}, t) => weights_TT.set(attention[head], t * T));
      return weights_TT;
    }));
  }

  /* Return sampled ids. Temperature 0 takes the likeliest. onToken(id, probabilities_V) returns false to stop. `random`
     returns the numbers that draw the ids; default: new ones from the seed. */
  async generate({ids, tokens = 100, temperature = 1, topK, topP, seed, onToken, cache = newCache(), random} = {}) {
    random ??= randomNumbers(seed ?? Math.floor(Math.random() * 2 ** 32));
    const sampled = [], pause = new Pause();
    let context = this.context(ids);
    while (sampled.length < tokens) {
      const logits_V = await pause.run(this.computeLogits(context, cache));
      const probabilities_V = nextProbabilities(logits_V, {temperature: temperature ?? 1, topK, topP});
      const id = draw(probabilities_V, random());
      sampled.push(id);
      context = this.extend(context, id);
      if (onToken?.(id, probabilities_V) === false) break;
    }
    return sampled;
  }

  /* Return the last `block_size` ids, the context. */
  context(ids) { return Array.from(ids).slice(-this.architecture.block_size); }

  /* Append an id to the context. A full context slides by one token in a model of one layer; a deeper model keeps the
     newer half, as `attnlm sample` does. */
  extend(context, id) {
    const {layers, positions, mlp, block_size} = this.architecture;
    if (context.length < block_size) return [...context, id];
    const slides = layers === 1 && positions !== "rotary" && mlp === "none";
    return [...context, id].slice(slides ? -block_size : -Math.max(1, Math.floor(block_size / 2)));
  }

  /* Switch an attention head off or on: its output is zero while it is off. Layers and heads count from 0. */
  silence(layer, head, isOff = true) {
    this.silenced[isOff ? "add" : "delete"](`${layer}.${head}`);
    this.cache = newCache();
  }

  /* Compute logits, reusing cached tokens. Generators yield after each block, so that the page stays responsive. */
  * computeLogits(ids, cache = this.cache) {
    const context = this.context(ids);
    let known = 0;
    while (known < context.length && cache.ids[known] === context[known]) known++;
    cache.ids.length = known;
    for (const id of context.slice(known)) yield* this.forward(id, cache);
    return this.readOut(streamOf(cache, context.length - 1));
  }

  /* Compute all blocks for the next token, t. Add its activations to the cache: embedded[t], and for each layer
     layers[layer][t] = {input, query, key, value, attention, mixed, attended, hidden, stream}. */
  * forward(id, cache) {
    const a = this.architecture, t = cache.ids.length;
    let x_C = this.embed(id, t);
    cache.embedded[t] = x_C;
    for (let layer = 0; layer < this.depth; layer++) {
      const block = `blocks.${layer}.`, activations = {};
      (cache.layers[layer] ??= [])[t] = activations;
      if (a.attention !== "none") {
        activations.input = a.norm === "none" ? x_C : this.norm(`${block}attention_norm`, x_C);
        activations.attended = this.attend(layer, cache, t);
        x_C = a.residual ? this.add(x_C, activations.attended) : activations.attended;
      }
      if (a.mlp !== "none") {
        const y_C = a.norm === "none" ? x_C : this.norm(`${block}mlp_norm`, x_C);
        activations.hidden = this.mlp(`${block}mlp.`, y_C);
        x_C = a.residual ? this.add(x_C, activations.hidden) : activations.hidden;
      }
      activations.stream = x_C;
      yield;
    }
    cache.ids.push(id);
  }

  add(x_C, y_C) { return sum(x_C, y_C); }

  /* The number of blocks; 0 for a bigram. */
  get depth() { return this.architecture.embed_dim === undefined ? 0 : this.architecture.layers; }

  /* Return the embedding (C) of a token at position t; for a bigram, the token's row of the table (V). */
  embed(id, t) {
    const x_C = row(this.embeddings, id);
    return this.depth && this.architecture.positions === "learned" ? sum(x_C, row(this.weights["position_embedding.weight"], t)) : x_C;
  }

  /* Return the logits (V) of the stream (C), after the last norm and the LM head. A bigram's stream is the logits. */
  readOut(x_C) { return this.depth ? this.linear(this.lmHead, this.lastNorm(x_C), "head") : x_C; }

  /* Return pairs of a part and what it adds to the logit of `id` after the last of `ids`: embedding, heads, MLPs and
     biases. The last norm divides each part by the size of the whole stream, so that the sum is the logit. The list
     is empty for a model without a residual stream. */
  added(ids, id, cache = newCache()) {
    const a = this.architecture, {H, D} = this.headSizes, isLayerNorm = a.norm === "layer";
    resultOf(this.computeLogits(ids, cache));
    if (!this.depth || !a.residual) return [];
    const t = cache.ids.length - 1, parts = [["embedding", cache.embedded[t]]];
    for (const [layer, layer_T] of cache.layers.entries()) {
      const {mixed, hidden} = layer_T[t], name = `layer ${layer + 1}`;
      const projection = `blocks.${layer}.attention.projection`, bias = this.weights[`${projection}.bias`];
      for (let head = 0; mixed && head < H; head++) {
        const alone = new Float32Array(H * D), start = head * D, isWhole = a.attention !== "softmax";
        alone.set(mixed.subarray(start, start + D), start);
        const added_C = a.projection && !isWhole ? this.linear(projection, alone, "no bias") : alone;
        parts.push([isWhole ? `${name} attention` : `${name} head ${head + 1}`, added_C]);
      }
      if (bias) parts.push([`${name} attention bias`, bias.values]);
      if (hidden) parts.push([`${name} MLP`, hidden]);
    }
    const centred = (x_C) => (isLayerNorm ? centre(x_C) : x_C), C = a.embed_dim, stream_C = centred(streamOf(cache, t));
    const size = a.norm === "none" ? 1 : Math.sqrt(dot(stream_C, 0, stream_C, 0, C) / C + a.norm_epsilon);
    const head_C = row(this.weights[`${this.lmHead}.weight`], id), gain_C = this.weights["norm.gain"]?.values;
    const read_C = head_C.map((x, c) => (x * (gain_C?.[c] ?? 1)) / size), shift_C = this.weights["norm.bias"]?.values;
    const constant = (this.weights["head.bias"]?.values[id] ?? 0) + (shift_C ? dot(shift_C, 0, head_C, 0, C) : 0);
    const logits = parts.map(([name, x_C]) => [name, dot(centred(x_C), 0, read_C, 0, C)]);
    return constant ? [...logits, ["biases", constant]] : logits;
  }

  lastNorm(x_C) { return this.architecture.norm === "none" ? x_C : this.norm("norm", x_C); }

  /* The name of the LM head's matrix. */
  get lmHead() { return this.architecture.tie_embeddings ? "token_embedding" : "head"; }

  /* Return x Wᵀ, plus the bias if it exists. */
  linear(name, x_C, biasName = name) {
    const {shape: [O], values} = this.weights[`${name}.weight`], bias = this.weights[`${biasName}.bias`];
    const y = dotRows(values, x_C, O);
    return bias === undefined ? y : sum(y, bias.values);
  }

  /* Apply the RMS norm or the layer norm. */
  norm(name, x_C) {
    const a = this.architecture, gain_C = this.weights[`${name}.gain`].values;
    if (a.norm === "rms") return rmsNorm(x_C, gain_C, a.norm_epsilon);
    const y_C = rmsNorm(centre(x_C), gain_C, a.norm_epsilon);
    return a.bias ? sum(y_C, this.weights[`${name}.bias`].values) : y_C;
  }

  /* Compute causal attention of token t: (C) → (C), or (H·D) without a projection. */
  attend(layer, cache, t) {
    const a = this.architecture, name = `blocks.${layer}.attention.`, activations = cache.layers[layer][t];
    const x_C = activations.input, isSoftmax = a.attention === "softmax";
    // Other attention has no projections: the input itself is query, key and value.
    activations.query = isSoftmax ? this.project(`${name}query`, x_C, t) : x_C;
    activations.key = isSoftmax ? this.project(`${name}key`, x_C, t) : x_C;
    activations.value = isSoftmax ? this.linear(`${name}value`, x_C) : x_C;
    activations.mixed = this.mix(layer, cache, t);
    return isSoftmax && a.projection ? this.linear(`${name}projection`, activations.mixed) : activations.mixed;
  }

  /* Return the concatenated outputs (H·D) of all heads for token t. Record its attention weights. */
  mix(layer, cache, t) {
    const a = this.architecture, activations = cache.layers[layer][t], {H, K, D} = this.headSizes;
    const mixed = new Float32Array(H * D), {keys, values} = (cache.past[layer] ??= newPast(a.block_size * K * D));
    keys.set(activations.key, t * K * D);
    values.set(activations.value, t * K * D);
    activations.attention = [];
    for (let head = 0; head < H; head++) {
      const attention_T = softmax(this.scores(layer, cache, t, head));
      activations.attention.push(attention_T);
      if (this.silenced.has(`${layer}.${head}`)) continue;
      const group = Math.floor((head * K) / H) * D; // H / K heads share keys and values
      addWeightedRows(mixed, head * D, D, attention_T, values, K * D, group);
    }
    return mixed;
  }

  /* The numbers of heads and of key and value heads, and the head size. */
  get headSizes() {
    const {attention, heads, kv_heads, head_size, embed_dim} = this.architecture;
    return attention === "softmax" ? {H: heads, K: kv_heads, D: head_size} : {H: 1, K: 1, D: embed_dim};
  }

  /* Return the scores of token t over the tokens 0 to t: q · k / √D. */
  scores(layer, cache, t, head) {
    const {query} = cache.layers[layer][t], {H, K, D} = this.headSizes;
    if (this.architecture.attention === "uniform") return new Float32Array(t + 1);
    const query_D = query.slice(head * D, (head + 1) * D), group = Math.floor((head * K) / H) * D;
    const scores_T = dotRows(cache.past[layer].keys, query_D, t + 1, K * D, group);
    for (let s = 0; s <= t; s++) scores_T[s] /= Math.sqrt(D);
    return scores_T;
  }

  /* Return queries or keys at position t, with the model's norm and rotation. */
  project(name, x_C, t) {
    const {query_key_norm, positions} = this.architecture;
    let y = this.linear(name, x_C);
    if (query_key_norm) y = this.normHeads(`${name}_norm`, y);
    return positions === "rotary" ? this.rotateHeads(y, t) : y;
  }

  normHeads(name, y) {
    const {head_size, norm_epsilon} = this.architecture, gain_D = this.weights[`${name}.gain`].values;
    return inHeads(y, head_size, (y_D) => rmsNorm(y_D, gain_D, norm_epsilon));
  }

  rotateHeads(y, t) { return inHeads(y, this.architecture.head_size, (y_D) => this.rotate(y_D, t)); }

  /* Rotate the pair i and i + D/2 of a head by the angle of position t. */
  rotate(x_D, t) {
    const half = x_D.length / 2, y_D = new Float32Array(x_D.length);
    const {cosines, sines} = (this.angles[t] ??= this.anglesAt(t, half));
    for (let i = 0; i < half; i++) {
      y_D[i] = x_D[i] * cosines[i] - x_D[i + half] * sines[i];
      y_D[i + half] = x_D[i + half] * cosines[i] + x_D[i] * sines[i];
    }
    return y_D;
  }

  anglesAt(t, half) {
    const a = this.architecture;
    const angles = Float64Array.from({length: half}, (_, i) => {
      const frequency = a.rotary_base ** (-i / half);
      if (a.rotary_factor === undefined) return t * frequency;
      const turns = (frequency * (a.rotary_context ?? 0)) / (2 * Math.PI);
      const kept = Math.min(Math.max((turns - 1) / 3, 0), 1); // high frequencies stay unchanged
      return t * ((frequency / a.rotary_factor) * (1 - kept) + frequency * kept);
    });
    return {cosines: angles.map(Math.cos), sines: angles.map(Math.sin)};
  }

  /* Apply a block's MLP to a token. */
  mlp(name, x_C) {
    const hidden_F = this.linear(`${name}up`, x_C);
    const gate_F = this.architecture.mlp === "swiglu" ? this.linear(`${name}gate`, x_C) : undefined;
    return this.linear(`${name}down`, this.activate(hidden_F, gate_F));
  }

  activate(hidden_F, gate_F) {
    const isGelu = this.architecture.mlp === "gelu";
    for (let f = 0; f < hidden_F.length; f++) {
      if (gate_F) hidden_F[f] *= gate_F[f] / (1 + Math.exp(-gate_F[f]));
      else hidden_F[f] = isGelu ? gelu(hidden_F[f]) : Math.max(hidden_F[f], 0) ** 2;
    }
    return hidden_F;
  }
}

function newCache() { return {ids: [], embedded: [], layers: [], past: []}; }

/* Return memory for the keys and values of a layer, token after token. */
function newPast(size) { return {keys: new Float32Array(size), values: new Float32Array(size)}; }

/* Return the stream (C) of token t after the last layer. */
function streamOf({embedded, layers}, t) { return layers.length ? layers.at(-1)[t].stream : embedded[t]; }

function row({shape, values}, index) { return values.slice(index * shape[1], (index + 1) * shape[1]); }

/* Below, loops replace `map` and `reduce`, which are several times slower. */

/* Change the part (D) of each head in y. */
function inHeads(y, D, change) {
  for (let start = 0; start < y.length; start += D) {
    const y_D = y.subarray(start, start + D);
    y_D.set(change(y_D));
  }
  return y;
}

function sum(x, y) {
  const z = new Float32Array(x.length);
  for (let i = 0; i < x.length; i++) z[i] = x[i] + y[i];
  return z;
}

/* Return the dot product of x from index x0 and y from index y0, over `count` numbers. */
function dot(x, x0, y, y0, count) {
  let total = 0;
  for (let i = 0; i < count; i++) total += x[x0 + i] * y[y0 + i];
  return total;
}

/* Return the dot products of x (I) and `count` rows of a matrix, from index `start` on, `width` apart. Four rows
   together read x once, and their sums are independent. */
function dotRows(matrix, x, count, width = x.length, start = 0) {
  const I = x.length, y = new Float32Array(count), whole = count - (count % 4);
  for (let o = 0; o < whole; o += 4) {
    const a = start + o * width, b = a + width, c = b + width, d = c + width;
    let first = 0, second = 0, third = 0, fourth = 0;
    for (let i = 0; i < I; i++) {
      const value = x[i];
      first += matrix[a + i] * value;
      second += matrix[b + i] * value;
      third += matrix[c + i] * value;
      fourth += matrix[d + i] * value;
    }
    y[o] = first;
    y[o + 1] = second;
    y[o + 2] = third;
    y[o + 3] = fourth;
  }
  for (let o = whole; o < count; o++) y[o] = dot(matrix, start + o * width, x, 0, I);
  return y;
}

/* Add Σ weight · row of a matrix (as in `dotRows`) to `count` numbers of y from index `at` on. */
function addWeightedRows(y, at, count, weights, matrix, width, start) {
  const whole = weights.length - (weights.length % 4);
  for (let o = 0; o < whole; o += 4) {
    const a = start + o * width, b = a + width, c = b + width, d = c + width;
    const first = weights[o], second = weights[o + 1], third = weights[o + 2], fourth = weights[o + 3];
    for (let i = 0; i < count; i++) {
      y[at + i] += first * matrix[a + i] + second * matrix[b + i] + third * matrix[c + i] + fourth * matrix[d + i];
    }
  }
  for (let o = whole; o < weights.length; o++) addTo(y, at, weights[o], matrix, start + o * width, count);
}

/* Compute y += weight · x over `count` numbers, from index y0 of y and x0 of x. */
function addTo(y, y0, weight, x, x0, count) {
  for (let i = 0; i < count; i++) y[y0 + i] += weight * x[x0 + i];
}

/* Return x minus its mean. */
function centre(x) {
  const y = new Float32Array(x.length);
  let total = 0;
  for (let i = 0; i < x.length; i++) total += x[i];
  for (let i = 0; i < x.length; i++) y[i] = x[i] - total / x.length;
  return y;
}

/* Return x / √(mean x² + ε) · gain. */
function rmsNorm(x, gain, epsilon) {
  const y = new Float32Array(x.length), root = Math.sqrt(dot(x, 0, x, 0, x.length) / x.length + epsilon);
  for (let i = 0; i < x.length; i++) y[i] = (x[i] / root) * gain[i];
  return y;
}

function gelu(x) { return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))); }

function softmax(scores, temperature = 1) {
  const probabilities = new Float32Array(scores.length);
  let largest = -Infinity, total = 0;
  for (let i = 0; i < scores.length; i++) largest = Math.max(largest, scores[i]);
  for (let i = 0; i < scores.length; i++) total += probabilities[i] = Math.exp((scores[i] - largest) / temperature);
  for (let i = 0; i < scores.length; i++) probabilities[i] /= total;
  return probabilities;
}

/* Return the probabilities (V) to sample from, limited to the topK likeliest tokens and to the smallest set of
   tokens with the total probability topP. */
function nextProbabilities(logits_V, {temperature = 1, topK, topP} = {}) {
  const V = logits_V.length, kept_V = new Float32Array(V);
  if (temperature === 0) {
    kept_V[logits_V.indexOf(logits_V.reduce((a, b) => Math.max(a, b)))] = 1;
    return kept_V;
  }
  const all_V = softmax(logits_V, temperature);
  if ((topK ?? V) >= V && (topP ?? 1) >= 1) return all_V;
  const first = Array.from(logits_V.keys()).sort((a, b) => logits_V[b] - logits_V[a] || a - b).slice(0, topK ?? V);
  const total = first.reduce((sum, id) => sum + all_V[id], 0);
  let before = 0; // the sum of larger probabilities
  for (const id of first) {
    if (before >= (topP ?? 1) * total) break;
    before += kept_V[id] = all_V[id];
  }
  return kept_V.map((probability) => probability / before);
}

/* Return the first id whose cumulative probability exceeds `number`, from 0 to 1. */
function draw(probabilities_V, number) {
  let last = 0;
  for (let id = 0; id < probabilities_V.length; id++) {
    if (probabilities_V[id] === 0) continue;
    last = id;
    if ((number -= probabilities_V[id]) < 0) break;
  }
  return last;
}

/* Return a generator of random numbers from 0 to 1 (mulberry32). */
function randomNumbers(seed) {
  let state = Number(seed) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let bits = Math.imul(state ^ (state >>> 15), state | 1);
    bits ^= bits + Math.imul(bits ^ (bits >>> 7), bits | 61);
    return ((bits ^ (bits >>> 14)) >>> 0) / 2 ** 32;
  };
}

/* Run a generator without pauses. */
function resultOf(generator) {
  for (;;) {
    const {done, value} = generator.next();
    if (done) return value;
  }
}
