"use strict";
/* The forward pass of every attnlm model in plain JavaScript, one token at a time, with the parts, order and
   names of attnlm's textbook pass (model/textbook.py).

   Axes: T tokens, V vocabulary, C embedding, H heads, K key and value heads, D width of a head, F hidden
   units of the MLP. A name ends with the axes of its array: scores_T has T numbers, weight_VC has V rows of C. */

class Model {
  /* name: of the run. architecture: its settings, by the names of attnlm's options.
     weights: {name: {shape, values}}, a Float32Array each. tokenizer: {encode(text), decode(ids)}. */
  constructor({name, architecture, weights, tokenizer}) {
    Object.assign(this, {name, architecture, weights, tokenizer});
    const head = ["table", "token_embedding"].find((part) => `${part}.weight` in weights);
    this.vocabSize = weights[`${head}.weight`].shape[0];
    this.silenced = new Set(); // heads that are switched off, as "layer.head"
    this.angles = []; // of rotary positions, for each place
    this.cache = newCache();
  }

  encode(text) { return this.tokenizer.encode(text); }

  decode(ids) { return this.tokenizer.decode(this.checked(ids)); }

  /* The logits (V) of the token after the last id. Only the last `block_size` ids are seen. */
  logits(ids) { return finished(this.computeLogits(this.nonEmpty(ids))); }

  /* [layer][head] → Float32Array T × T: row t holds the weights of query t over the keys 0 to t. */
  attention(ids) {
    const cache = newCache();
    finished(this.computeLogits(this.nonEmpty(ids), cache));
    const T = cache.ids.length;
    return cache.layers.filter(([made]) => made.attention).map((made_T) => made_T[0].attention.map((_, head) => {
      const weights_TT = new Float32Array(T * T);
      made_T.forEach((made, t) => weights_TT.set(made.attention[head], t * T));
      return weights_TT;
    }));
  }

  /* The new ids after some, one after another; a temperature of 0 takes the likeliest.
     onToken(id, probability, probabilities_V) may return false to stop. */
  async generate({ids, tokens = 100, temperature = 1, topK, topP, seed, onToken, cache = newCache()} = {}) {
    const options = {tokens, temperature, topK, topP, seed};
    for (const name in options) if (options[name] != null) checkNumber(name, options[name], ...LIMITS[name]);
    const random = randomNumbers(seed ?? Math.floor(Math.random() * 2 ** 32));
    const made = [], pause = new Pause();
    let window = this.seen(this.nonEmpty(ids));
    while (made.length < tokens) {
      const logits_V = await pause.finish(this.computeLogits(window, cache));
      const probabilities_V = nextProbabilities(logits_V, {temperature: temperature ?? 1, topK, topP});
      const id = draw(probabilities_V, random());
      made.push(id);
      window = this.extended(window, id);
      if (onToken?.(id, probabilities_V[id], probabilities_V) === false) break;
    }
    return made;
  }

  /* The ids, or an error for what is no list of this model's ids. */
  checked(ids) {
    if (!Array.isArray(ids) && !ArrayBuffer.isView(ids)) throw new TypeError("ids must be a list of whole numbers");
    for (const id of ids) checkNumber("an id", id, 0, this.vocabSize - 1);
    return ids;
  }

  nonEmpty(ids) {
    if (this.checked(ids).length === 0) throw new RangeError("ids cannot be empty: a model continues at least one token");
    return ids;
  }

  /* The ids that the model sees of a text. */
  seen(ids) { return Array.from(ids).slice(-this.architecture.block_size); }

  /* The ids that the model sees when the next one comes. Where the context is full, a model of one layer
     slides by one token; a deeper one keeps the newer half, as `attnlm sample` does. */
  extended(window, id) {
    const {layers, positions, mlp, block_size} = this.architecture;
    if (window.length < block_size) return [...window, id];
    const slides = layers === 1 && positions !== "rotary" && mlp === "none";
    return [...window, id].slice(slides ? -block_size : -Math.max(1, Math.floor(block_size / 2)));
  }

  /* Switch a head off or on: its output is zero while it is off. Layers and heads count from 0. */
  silence(layer, head, isOff = true) {
    const {attention, embed_dim} = this.architecture;
    if (this.depth === 0 || attention === "none") throw new RangeError("this model has no heads");
    checkNumber("layer", layer, 0, this.depth - 1);
    checkNumber("head", head, 0, this.heads(embed_dim).H - 1);
    this.silenced[isOff ? "add" : "delete"](`${layer}.${head}`);
    this.cache = newCache();
  }

  /* What follows is computed in pieces: each function* yields where a page may answer its reader. */

  /* As `logits`. What the cache holds of the first tokens is not computed again. */
  * computeLogits(ids, cache = this.cache) {
    const seen = this.seen(ids);
    let known = 0;
    while (known < seen.length && cache.ids[known] === seen[known]) known++;
    cache.ids.length = known;
    for (const id of seen.slice(known)) yield* this.forward(id, cache);
    return this.readOut(streamOf(cache, seen.length - 1));
  }

  /* Compute all blocks for the next token, t. The cache then holds what was made of it: embedded[t], and for
     each layer layers[layer][t] = {input, query, key, value, attention, mixed, attended, hidden, stream}. */
  * forward(id, cache) {
    const a = this.architecture, t = cache.ids.length;
    let x_C = this.embed(id, t);
    cache.embedded[t] = x_C;
    for (let layer = 0; layer < this.depth; layer++) {
      const block = `blocks.${layer}.`, made_T = (cache.layers[layer] ??= []), made = (made_T[t] = {});
      if (a.attention !== "none") {
        made.input = a.norm === "none" ? x_C : this.norm(`${block}attention_norm`, x_C);
        made.attended = this.attend(layer, cache, t);
        x_C = a.residual ? sum(x_C, made.attended) : made.attended;
      }
      if (a.mlp !== "none") {
        const y_C = a.norm === "none" ? x_C : this.norm(`${block}mlp_norm`, x_C);
        made.hidden = this.mlp(`${block}mlp.`, y_C);
        x_C = a.residual ? sum(x_C, made.hidden) : made.hidden;
      }
      made.stream = x_C;
      yield;
    }
    cache.ids.push(id);
  }

  /* How many blocks there are: a bigram has none. */
  get depth() { return this.architecture.embed_dim === undefined ? 0 : this.architecture.layers; }

  /* The embedding (C) of a token at place t; of a bigram, its row of the table (V). */
  embed(id, t) {
    const a = this.architecture;
    if (a.embed_dim === undefined) return row(this.weights["table.weight"], id);
    const x_C = row(this.weights["token_embedding.weight"], id);
    return a.positions === "learned" ? sum(x_C, row(this.weights["position_embedding.weight"], t)) : x_C;
  }

  /* The logits (V) that norm and LM head read in the stream (C). */
  readOut(x_C) {
    if (this.architecture.embed_dim === undefined) return x_C; // a row of the bigram's table
    return this.linear(this.head, this.headInput(x_C), "head");
  }

  headInput(x_C) { return this.architecture.norm === "none" ? x_C : this.norm("norm", x_C); }

  get head() { return this.architecture.tie_embeddings ? "token_embedding" : "head"; }

  /* x Wᵀ, plus a bias where there is one. */
  linear(name, x_C, biased = name) {
    const {shape: [O], values} = this.weights[`${name}.weight`], bias = this.weights[`${biased}.bias`];
    const y = products(values, x_C, O);
    return bias === undefined ? y : sum(y, bias.values);
  }

  /* RMS norm or layer norm. */
  norm(name, x_C) {
    const a = this.architecture, gain_C = this.weights[`${name}.gain`].values;
    if (a.norm === "rms") return scaled(x_C, gain_C, a.norm_epsilon);
    const y_C = scaled(centred(x_C), gain_C, a.norm_epsilon);
    return a.bias ? sum(y_C, this.weights[`${name}.bias`].values) : y_C;
  }

  /* Causal attention of the token t: (C) → (C), or (H·D) without a projection. */
  attend(layer, cache, t) {
    const a = this.architecture, name = `blocks.${layer}.attention.`, made = cache.layers[layer][t], x_C = made.input;
    const {H, K, D} = this.heads(x_C.length), isSoftmax = a.attention === "softmax";
    // Without queries, keys and values, the tokens themselves are all three.
    made.query = isSoftmax ? this.positioned(`${name}query`, x_C, t) : x_C;
    made.key = isSoftmax ? this.positioned(`${name}key`, x_C, t) : x_C;
    made.value = isSoftmax ? this.linear(`${name}value`, x_C) : x_C;
    const {keys, values} = (cache.past[layer] ??= this.newPast(K * D));
    keys.set(made.key, t * K * D);
    values.set(made.value, t * K * D);
    made.attention = [];
    made.mixed = new Float32Array(H * D);
    for (let head = 0; head < H; head++) {
      const attention_T = softmax(this.scores(layer, cache, t, head));
      made.attention.push(attention_T);
      if (this.silenced.has(`${layer}.${head}`)) continue;
      const group = Math.floor((head * K) / H) * D; // each key and value head serves H / K queries
      addMixture(made.mixed, head * D, D, attention_T, values, K * D, group);
    }
    return isSoftmax && a.projection ? this.linear(`${name}projection`, made.mixed) : made.mixed;
  }

  /* Heads, key and value heads, and the width of a head. */
  heads(width) {
    const {attention, heads, kv_heads, head_size} = this.architecture;
    return attention === "softmax" ? {H: heads, K: kv_heads, D: head_size} : {H: 1, K: 1, D: width};
  }

  /* The keys and values of a layer, of all tokens one after another. */
  newPast(width) {
    const size = this.architecture.block_size * width;
    return {keys: new Float32Array(size), values: new Float32Array(size)};
  }

  /* The scores of token t over the tokens up to it: q · k / √D. */
  scores(layer, cache, t, head) {
    const {query, input} = cache.layers[layer][t], {H, K, D} = this.heads(input.length);
    if (this.architecture.attention === "uniform") return new Float32Array(t + 1);
    const query_D = query.slice(head * D, (head + 1) * D), group = Math.floor((head * K) / H) * D;
    const scores_T = products(cache.past[layer].keys, query_D, t + 1, K * D, group);
    for (let s = 0; s <= t; s++) scores_T[s] /= Math.sqrt(D);
    return scores_T;
  }

  /* The queries or keys of the token at place t, normed and rotated where the model does that. */
  positioned(name, x_C, t) {
    const a = this.architecture, D = a.head_size, y = this.linear(name, x_C);
    if (!a.query_key_norm && a.positions !== "rotary") return y;
    for (let start = 0; start < y.length; start += D) {
      let y_D = y.subarray(start, start + D);
      if (a.query_key_norm) y_D.set(scaled(y_D, this.weights[`${name}_norm.gain`].values, a.norm_epsilon));
      if (a.positions === "rotary") y_D.set(this.rotated(y_D, t));
    }
    return y;
  }

  /* Rotary positions: number i of a head and number i + D/2 are rotated by the angle of place t. */
  rotated(x_D, t) {
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
      const kept = Math.min(Math.max((turns - 1) / 3, 0), 1); // the faster ones stay as they are
      return t * ((frequency / a.rotary_factor) * (1 - kept) + frequency * kept);
    });
    return {cosines: angles.map(Math.cos), sines: angles.map(Math.sin)};
  }

  /* The MLP of a block, which looks at one token at a time. */
  mlp(name, x_C) {
    const kind = this.architecture.mlp, hidden_F = this.linear(`${name}up`, x_C), F = hidden_F.length;
    if (kind === "swiglu") {
      const gate_F = this.linear(`${name}gate`, x_C);
      for (let f = 0; f < F; f++) hidden_F[f] *= gate_F[f] / (1 + Math.exp(-gate_F[f]));
    } else {
      for (let f = 0; f < F; f++) hidden_F[f] = kind === "gelu" ? gelu(hidden_F[f]) : Math.max(hidden_F[f], 0) ** 2;
    }
    return this.linear(`${name}down`, hidden_F);
  }
}

/* The lowest and the highest value of each option, and its kind. The limits are those of `attnlm sample`, but a
   seed has 32 bits. */
const LIMITS = {
  tokens: [0, Number.MAX_SAFE_INTEGER],
  temperature: [0, Number.MAX_VALUE, "number"],
  topK: [1, Number.MAX_SAFE_INTEGER],
  topP: [Number.MIN_VALUE, 1, "number"],
  seed: [0, 2 ** 32 - 1],
};

/* Throw a RangeError for a value that is not a number of this kind within its limits. */
function checkNumber(name, value, least, most, kind = "whole number") {
  const fits = kind === "number" ? typeof value === "number" : Number.isSafeInteger(value);
  if (!(fits && value >= least && value <= most))
    throw new RangeError(`invalid value for ${name}: ${String(value)}; it must be a ${kind} from ${least} to ${most}`);
}

function newCache() { return {ids: [], embedded: [], layers: [], past: []}; }

/* The stream (C) of token t after the last layer. */
function streamOf({embedded, layers}, t) { return layers.length ? layers.at(-1)[t].stream : embedded[t]; }

function row({shape, values}, index) { return values.slice(index * shape[1], (index + 1) * shape[1]); }

/* Loops below say what `map` and `reduce` would, and are several times as fast. */

function sum(x, y) {
  const z = new Float32Array(x.length);
  for (let i = 0; i < x.length; i++) z[i] = x[i] + y[i];
  return z;
}

/* The numbers of x from `x0` on times those of y from `y0` on, added up. */
function dot(x, x0, y, y0, count) {
  let total = 0;
  for (let i = 0; i < count; i++) total += x[x0 + i] * y[y0 + i];
  return total;
}

/* The products of x (I) with `count` rows of a matrix. The rows are `width` numbers apart, and the first begins at
   `start`. Four rows at a time read each number of x once, and four sums do not wait for each other. */
function products(matrix, x, count, width = x.length, start = 0) {
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

/* Add a mixture of the rows of a matrix (as in `products`) to the `count` numbers of y from `at` on. */
function addMixture(y, at, count, weights, matrix, width, start) {
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

/* Add a weight times the numbers of x from `x0` on to those of y from `y0` on. */
function addTo(y, y0, weight, x, x0, count) {
  for (let i = 0; i < count; i++) y[y0 + i] += weight * x[x0 + i];
}

/* x less its mean. */
function centred(x) {
  const y = new Float32Array(x.length);
  let total = 0;
  for (let i = 0; i < x.length; i++) total += x[i];
  for (let i = 0; i < x.length; i++) y[i] = x[i] - total / x.length;
  return y;
}

/* x divided by the root of its mean square, times the gain. */
function scaled(x, gain, epsilon) {
  const y = new Float32Array(x.length), root = Math.sqrt(dot(x, 0, x, 0, x.length) / x.length + epsilon);
  for (let i = 0; i < x.length; i++) y[i] = (x[i] / root) * gain[i];
  return y;
}

function gelu(x) { return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))); }

function softmax(scores, temperature = 1) {
  const weights = new Float32Array(scores.length);
  let largest = -Infinity, total = 0;
  for (let i = 0; i < scores.length; i++) largest = Math.max(largest, scores[i]);
  for (let i = 0; i < scores.length; i++) total += weights[i] = Math.exp((scores[i] - largest) / temperature);
  for (let i = 0; i < scores.length; i++) weights[i] /= total;
  return weights;
}

/* Probabilities (V) to draw from: of the topK likeliest tokens, and of the fewest that have topP together. */
function nextProbabilities(logits_V, {temperature = 1, topK, topP} = {}) {
  const V = logits_V.length, kept_V = new Float32Array(V);
  if (temperature === 0) {
    kept_V[logits_V.indexOf(logits_V.reduce((a, b) => Math.max(a, b)))] = 1;
    return kept_V;
  }
  const all_V = softmax(logits_V, temperature);
  if ((topK ?? V) >= V && (topP ?? 1) >= 1) return all_V;
  const first = Array.from(logits_V.keys()).sort((a, b) => logits_V[b] - logits_V[a] || a - b).slice(0, topK ?? V);
  const total = first.reduce((so, id) => so + all_V[id], 0);
  let before = 0; // the probability of the likelier ones, of those that topK leaves
  for (const id of first) {
    if (before >= (topP ?? 1) * total) break;
    before += kept_V[id] = all_V[id];
  }
  return kept_V.map((probability) => probability / before);
}

/* The id whose part of the probabilities, laid end to end, holds a number from 0 to 1. */
function draw(probabilities_V, number) {
  let last = 0;
  for (let id = 0; id < probabilities_V.length; id++) {
    if (probabilities_V[id] === 0) continue;
    last = id;
    if ((number -= probabilities_V[id]) < 0) break;
  }
  return last;
}

/* Random numbers from 0 to 1, by a seed (mulberry32). */
function randomNumbers(seed) {
  let state = Number(seed) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let bits = Math.imul(state ^ (state >>> 15), state | 1);
    bits ^= bits + Math.imul(bits ^ (bits >>> 7), bits | 61);
    return ((bits ^ (bits >>> 14)) >>> 0) / 2 ** 32;
  };
}

function finished(work) {
  let step = work.next();
  while (!step.done) step = work.next();
  return step.value;
}
