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
    this.cache = newCache();
  }

  encode(text) { return this.tokenizer.encode(text); }

  decode(ids) { return this.tokenizer.decode(ids); }

  /* The logits (V) of the token after the last id. Only the last `block_size` ids are seen. */
  logits(ids) { return finished(this.computeLogits(ids)); }

  /* [layer][head] → Float32Array T × T: row t holds the weights of query t over the keys 0 to t. */
  attention(ids) {
    const maps = [];
    finished(this.watch(ids, (part, layer, values, t) => {
      if (part !== "attention") return;
      const heads = (maps[layer] ??= values.map(() => new Float32Array(this.seen(ids).length ** 2)));
      values.forEach((weights_T, head) => heads[head].set(weights_T, t * this.seen(ids).length));
    }));
    return maps;
  }

  /* The new ids after some, one after another; a temperature of 0 takes the likeliest.
     onToken(id, probability, probabilities_V) may return false to stop. */
  async generate({ids, tokens = 100, temperature = 1, topK, topP, seed, onToken} = {}) {
    const random = randomNumbers(seed ?? Math.floor(Math.random() * 2 ** 32));
    const made = [], pause = new Pause();
    let window = this.seen(ids);
    while (made.length < tokens) {
      if (window.length > this.architecture.block_size) window = window.slice(-this.kept());
      const logits_V = await pause.finish(this.computeLogits(window));
      const probabilities_V = nextProbabilities(logits_V, {temperature, topK, topP});
      const id = draw(probabilities_V, random());
      made.push(id);
      window = [...window, id];
      if (onToken?.(id, probabilities_V[id], probabilities_V) === false) break;
    }
    return made;
  }

  /* The ids that the model sees of a text. */
  seen(ids) { return Array.from(ids).slice(-this.architecture.block_size); }

  /* How many tokens of a full context stay when the next one comes. A model of one layer slides by one
     token; a deeper one keeps the newer half, as `attnlm sample` does. */
  kept() {
    const {layers, positions, mlp, block_size} = this.architecture;
    const slides = layers === 1 && positions !== "rotary" && mlp === "none";
    return slides ? block_size : Math.max(1, Math.floor(block_size / 2));
  }

  /* Switch a head off or on: its output is zero while it is off. */
  silence(layer, head, isOff = true) {
    this.silenced[isOff ? "add" : "delete"](`${layer}.${head}`);
    this.cache = newCache();
  }

  /* What follows is computed in pieces: each function* yields where a page may answer its reader. */

  /* As `logits`. The tokens that begin as those of the last call did are not computed again. */
  * computeLogits(ids) {
    const seen = this.seen(ids), {cache} = this;
    let known = 0;
    while (known < seen.length && cache.ids[known] === seen[known]) known++;
    if (known === seen.length && known === cache.ids.length) return cache.logits_V;
    truncate(cache, Math.min(known, seen.length - 1));
    for (const id of seen.slice(cache.ids.length)) cache.x_C = yield* this.forward(id, cache);
    cache.logits_V = this.readOut(cache.x_C);
    return cache.logits_V;
  }

  /* The forward pass of all ids from the first. It tells `see(part, layer, values, t)` what it makes of each
     token: embedding, input, query, key, value, scores, attention, mixed, stream and logits. */
  * watch(ids, see) {
    const cache = newCache();
    let t = 0;
    for (const id of this.seen(ids)) {
      const x_C = yield* this.forward(id, cache, (part, layer, values) => see(part, layer, values, t));
      see("logits", null, this.readOut(x_C), t++);
    }
  }

  /* What the blocks make of the next token (C), which joins the cache. */
  * forward(id, cache, see = () => {}) {
    const a = this.architecture, t = cache.ids.length;
    cache.ids.push(id);
    if (a.embed_dim === undefined) return row(this.weights["table.weight"], id);
    let x_C = row(this.weights["token_embedding.weight"], id);
    if (a.positions === "learned") x_C = sum(x_C, row(this.weights["position_embedding.weight"], t));
    see("embedding", null, x_C);
    for (let layer = 0; layer < a.layers; layer++) {
      const block = `blocks.${layer}.`;
      if (a.attention !== "none") {
        const y_C = a.norm === "none" ? x_C : this.norm(`${block}attention_norm`, x_C);
        const mixed_C = this.attend(layer, y_C, cache, (part, values) => see(part, layer, values));
        x_C = a.residual ? sum(x_C, mixed_C) : mixed_C;
      }
      if (a.mlp !== "none") {
        const y_C = a.norm === "none" ? x_C : this.norm(`${block}mlp_norm`, x_C);
        const hidden_C = this.mlp(`${block}mlp.`, y_C);
        x_C = a.residual ? sum(x_C, hidden_C) : hidden_C;
      }
      see("stream", layer, x_C);
      yield;
    }
    return x_C;
  }

  /* The logits (V) that norm and LM head read in the stream (C). */
  readOut(x_C) {
    if (this.architecture.embed_dim === undefined) return x_C; // a row of the bigram's table
    return this.linear(this.head, this.headInput(x_C), "head");
  }

  headInput(x_C) { return this.architecture.norm === "none" ? x_C : this.norm("norm", x_C); }

  get head() { return this.architecture.tie_embeddings ? "token_embedding" : "head"; }

  /* How a score follows from a query and a key, for readers. */
  get scoreFormula() { return `q · k / √${this.architecture.head_size}`; }

  /* x Wᵀ, plus a bias where there is one. */
  linear(name, x_C, biased = name) {
    const y = product(this.weights[`${name}.weight`].values, x_C), bias = this.weights[`${biased}.bias`];
    return bias === undefined ? y : sum(y, bias.values);
  }

  /* RMS norm or layer norm. */
  norm(name, x_C) {
    const a = this.architecture, isLayer = a.norm === "layer";
    const mean = isLayer ? x_C.reduce((total, x) => total + x, 0) / x_C.length : 0;
    const y_C = scaled(x_C.map((x) => x - mean), this.weights[`${name}.gain`].values, a.norm_epsilon);
    return isLayer && a.bias ? sum(y_C, this.weights[`${name}.bias`].values) : y_C;
  }

  /* Causal attention of the newest token: (C) → (C), or (H·D) without a projection. */
  attend(layer, x_C, cache, see) {
    const a = this.architecture, name = `blocks.${layer}.attention.`;
    see("input", x_C);
    const {keys, values} = (cache.layers[layer] ??= {keys: [], values: []});
    if (a.attention !== "softmax") {
      // The tokens themselves are queries, keys and values of one head.
      keys.push(x_C);
      const weight = a.attention === "uniform" ? 0 : 1 / Math.sqrt(x_C.length);
      const scores_T = Float32Array.from(keys, (key_C) => weight * dot(x_C, 0, key_C, 0, x_C.length));
      const attention_T = softmax(scores_T), mixed_C = new Float32Array(x_C.length);
      if (!this.silenced.has(`${layer}.0`)) mix(attention_T, keys, 0, mixed_C, 0, x_C.length);
      see("scores", [scores_T]);
      see("attention", [attention_T]);
      see("mixed", mixed_C);
      return mixed_C;
    }
    const H = a.heads, K = a.kv_heads, D = a.head_size, t = keys.length;
    const query_HD = this.positioned(`${name}query`, x_C, t);
    keys.push(this.positioned(`${name}key`, x_C, t));
    values.push(this.linear(`${name}value`, x_C));
    const scores = [], attention = [], mixed_HD = new Float32Array(H * D);
    for (let head = 0; head < H; head++) {
      const group = Math.floor((head * K) / H) * D; // each key and value head serves H / K queries
      const scores_T = Float32Array.from(
        keys, (key_KD) => dot(query_HD, head * D, key_KD, group, D) / Math.sqrt(D));
      scores.push(scores_T);
      attention.push(softmax(scores_T));
      if (!this.silenced.has(`${layer}.${head}`)) mix(attention[head], values, group, mixed_HD, head * D, D);
    }
    see("query", query_HD);
    see("key", keys[t]);
    see("value", values[t]);
    see("scores", scores);
    see("attention", attention);
    see("mixed", mixed_HD);
    return a.projection ? this.linear(`${name}projection`, mixed_HD) : mixed_HD;
  }

  /* The queries or keys of the token at place t, normed and rotated where the model does that. */
  positioned(name, x_C, t) {
    const a = this.architecture, D = a.head_size, y = this.linear(name, x_C);
    for (let start = 0; start < y.length; start += D) {
      let y_D = y.subarray(start, start + D);
      if (a.query_key_norm) y_D.set(scaled(y_D, this.weights[`${name}_norm.gain`].values, a.norm_epsilon));
      if (a.positions === "rotary") y_D.set(this.rotated(y_D, t));
    }
    return y;
  }

  /* Rotary positions: number i of a head and number i + D/2 are rotated by the angle of place t. */
  rotated(x_D, t) {
    const a = this.architecture, half = x_D.length / 2, y_D = new Float32Array(x_D.length);
    for (let i = 0; i < half; i++) {
      let frequency = a.rotary_base ** (-i / half);
      if (a.rotary_factor !== undefined) {
        const turns = (frequency * (a.rotary_context ?? 0)) / (2 * Math.PI);
        const kept = Math.min(Math.max((turns - 1) / 3, 0), 1); // the faster ones stay as they are
        frequency = (frequency / a.rotary_factor) * (1 - kept) + frequency * kept;
      }
      const cosine = Math.cos(t * frequency), sine = Math.sin(t * frequency);
      y_D[i] = x_D[i] * cosine - x_D[i + half] * sine;
      y_D[i + half] = x_D[i + half] * cosine + x_D[i] * sine;
    }
    return y_D;
  }

  /* The MLP of a block, which looks at one token at a time. */
  mlp(name, x_C) {
    const kind = this.architecture.mlp, hidden_F = this.linear(`${name}up`, x_C);
    if (kind === "swiglu") {
      const gate_F = this.linear(`${name}gate`, x_C);
      for (const f of hidden_F.keys()) hidden_F[f] *= gate_F[f] / (1 + Math.exp(-gate_F[f]));
    } else {
      const activation = kind === "gelu" ? gelu : (x) => Math.max(x, 0) ** 2;
      for (const f of hidden_F.keys()) hidden_F[f] = activation(hidden_F[f]);
    }
    return this.linear(`${name}down`, hidden_F);
  }
}

function newCache() { return {ids: [], layers: [], logits_V: null, x_C: null}; }

function truncate(cache, length) {
  cache.ids.length = length;
  for (const {keys, values} of cache.layers) {
    keys.length = Math.min(keys.length, length);
    values.length = Math.min(values.length, length);
  }
}

function row({shape, values}, index) { return values.slice(index * shape[1], (index + 1) * shape[1]); }

function sum(x, y) { return x.map((value, i) => value + y[i]); }

/* The numbers of x from `x0` on times those of y from `y0` on, added up. */
function dot(x, x0, y, y0, count) {
  let total = 0;
  for (let i = 0; i < count; i++) total += x[x0 + i] * y[y0 + i];
  return total;
}

/* A matrix (O, I) times a vector (I). Four rows at a time read each number of x once. */
function product(weight_OI, x_I) {
  const I = x_I.length, O = weight_OI.length / I, y_O = new Float32Array(O);
  let o = 0;
  for (; o + 4 <= O; o += 4) {
    const a = o * I, b = a + I, c = b + I, d = c + I;
    let first = 0, second = 0, third = 0, fourth = 0;
    for (let i = 0; i < I; i++) {
      const x = x_I[i];
      first += weight_OI[a + i] * x;
      second += weight_OI[b + i] * x;
      third += weight_OI[c + i] * x;
      fourth += weight_OI[d + i] * x;
    }
    y_O.set([first, second, third, fourth], o);
  }
  for (; o < O; o++) y_O[o] = dot(weight_OI, o * I, x_I, 0, I);
  return y_O;
}

/* Add the values of all tokens, each times its weight, to `mixed` from `to` on. */
function mix(attention_T, values, from, mixed, to, count) {
  for (const [t, value] of values.entries()) {
    for (let i = 0; i < count; i++) mixed[to + i] += attention_T[t] * value[from + i];
  }
}

/* x by the root of its mean square, times the gain. */
function scaled(x, gain, epsilon) {
  const root = Math.sqrt(dot(x, 0, x, 0, x.length) / x.length + epsilon);
  return x.map((value, i) => (value / root) * gain[i]);
}

function gelu(x) { return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3))); }

function softmax(scores) {
  const largest = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = scores.map((score) => Math.exp(score - largest));
  const total = weights.reduce((a, b) => a + b, 0);
  return weights.map((weight) => weight / total);
}

/* Probabilities (V) to draw from: of the topK likeliest tokens, and of the fewest that have topP together. */
function nextProbabilities(logits_V, {temperature = 1, topK, topP} = {}) {
  const ranked = Array.from(logits_V.keys());
  const isCut = (topK ?? logits_V.length) < logits_V.length || (topP ?? 1) < 1;
  if (isCut) ranked.sort((a, b) => logits_V[b] - logits_V[a] || a - b);
  if (temperature === 0) {
    const likeliest = logits_V.indexOf(logits_V.reduce((a, b) => Math.max(a, b), -Infinity));
    return logits_V.map((_, id) => (id === likeliest ? 1 : 0));
  }
  const all_V = softmax(logits_V.map((logit) => logit / temperature));
  if (!isCut) return all_V;
  const kept_V = new Float32Array(logits_V.length), first = ranked.slice(0, topK ?? logits_V.length);
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
  for (const [id, probability] of probabilities_V.entries()) {
    if (probability > 0) last = id;
    if ((number -= probability) < 0 && probability > 0) return id;
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

/* Lets the page answer its reader when it has computed for some milliseconds. */
class Pause {
  constructor(milliseconds = 15) {
    this.milliseconds = milliseconds;
    this.since = performance.now();
  }

  async finish(work) {
    for (let step = work.next(); ; step = work.next()) {
      if (performance.now() - this.since > this.milliseconds) {
        await answered();
        this.since = performance.now();
      }
      if (step.done) return step.value;
    }
  }
}

/* Waits until the page has answered its reader: a message comes after it, and sooner than a timer. */
function answered() {
  return new Promise((resolve) => {
    const {port1, port2} = new MessageChannel();
    port1.onmessage = () => { port1.close(); resolve(); };
    port2.postMessage(null);
  });
}
