/* The forward pass of every attnlm model, one token at a time. Axes as in model_structure.js. */

import {
  addWeightedRows, centre, dot, dotRows, gelu, plus, rmsNorm, softmax, tensorRow,
} from "./arrays.js";
import {ModelStructure, newCache, streamOf} from "./model_structure.js";
import {draw, nextProbabilities, randomNumbers} from "./sampling.js";
import {Pause, resultOf} from "./yield_to_event_loop.js";

export class Model extends ModelStructure {
  cache = newCache();

  /* name: the run's name. tokenizer: {encode(text), decode(ids)}. first: the id that stands for an empty text. */
  constructor({name, architecture, weights, tokenizer, first}) {
    super(architecture, weights);
    this.name = name;
    this.tokenizer = tokenizer;
    this.first = first;
    this.vocabSize = this.embeddings.shape[0];
  }

  encode(text) { return this.tokenizer.encode(text); }

  decode(ids) { return this.tokenizer.decode(ids); }

  /* Return the logits (V) of the token after the last of `block_size` ids or fewer; earlier ids are ignored. */
  logits(ids) { return resultOf(this.computeLogits(ids)); }

  /* Return [layer][head] → Float32Array T × T. Row t has the attention weights of query t over the keys 0 to t. */
  attention(ids) {
    const cache = newCache();
    resultOf(this.computeLogits(ids, cache));
    const layers = cache.layers.filter(([first]) => first.attention);
    return layers.map((layer_T) => layer_T[0].attention.map((_, head) => mapOf(layer_T, head)));
  }

  /* Return sampled ids. Temperature 0 takes the likeliest. onToken(id, probabilities_V) returns false to stop. `random`
     returns the numbers that draw the ids; default: new ones from the seed. */
  async generate({ids, tokens = 100, temperature = 1, topK, topP, seed, onToken, cache = newCache(), random} = {}) {
    const numbers = random ?? randomNumbers(seed ?? Math.floor(Math.random() * 2 ** 32));
    const pause = new Pause();
    const sampled = [];
    let context = this.context(ids);
    while (sampled.length < tokens) {
      const logits_V = await pause.run(this.computeLogits(context, cache));
      const probabilities_V = nextProbabilities(logits_V, {temperature: temperature ?? 1, topK, topP});
      const id = draw(probabilities_V, numbers());
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

  silence(layer, head, isOff = true) {
    super.silence(layer, head, isOff);
    this.cache = newCache(); // the old one was computed with other heads
  }

  /* Return a model with the same weights in which only `heads`, pairs of a layer and a head, are switched off. */
  withSilenced(heads) {
    const model = new Model(this);
    for (const [layer, head] of heads) model.silence(layer, head);
    return model;
  }

  /* Compute logits, reusing cached tokens. The generator yields after each block. */
  * computeLogits(ids, cache = this.cache) {
    const context = this.context(ids);
    let known = 0;
    while (known < context.length && cache.ids[known] === context[known]) known++;
    cache.ids.length = known;
    for (const id of context.slice(known)) yield* this.forward(id, cache);
    return this.readOut(streamOf(cache, context.length - 1));
  }

  /* Return pairs of a part and what it adds to the logit of `id` after the last of `ids`: embedding, heads, MLPs and
     biases. Their sum is the logit. The list is empty for a model without a residual stream. */
  added(ids, id, cache = newCache()) {
    resultOf(this.computeLogits(ids, cache));
    if (!this.depth || !this.architecture.residual) return [];
    const t = cache.ids.length - 1;
    const {logitOf, constant} = this.readOutOf(id, streamOf(cache, t));
    const parts = [["embedding", cache.embedded[t]]];
    cache.layers.forEach((layer_T, layer) => parts.push(...this.contributions(layer, layer_T[t])));
    const logits = parts.map(([name, x_C]) => [name, logitOf(x_C)]);
    return constant ? [...logits, ["biases", constant]] : logits;
  }

  /* Return pairs of a part of a layer and what it adds to the residual stream (C) of a token. */
  contributions(layer, {mixed, hidden}) {
    const name = `layer ${layer + 1}`;
    const bias = this.weights[`blocks.${layer}.attention.projection.bias`];
    const parts = mixed ? this.headContributions(layer, mixed) : [];
    if (bias) parts.push([`${name} attention bias`, bias.values]);
    if (hidden) parts.push([`${name} MLP`, hidden]);
    return parts;
  }

  headContributions(layer, mixed) {
    const {attention, projection} = this.architecture;
    const {H, D} = this.headSizes;
    // Attention without softmax has one head, as wide as the stream, and no projection.
    if (attention !== "softmax") return [[`layer ${layer + 1} attention`, mixed]];
    return Array.from({length: H}, (_, head) => {
      const alone = new Float32Array(H * D); // this head's output, and zeros for the other heads
      alone.set(mixed.subarray(head * D, (head + 1) * D), head * D);
      const added_C = projection ? this.linear(`blocks.${layer}.attention.projection`, alone, null) : alone;
      return [`layer ${layer + 1} head ${head + 1}`, added_C];
    });
  }

  /* Return how the last norm and the LM head make the logit of `id` of a stream: {logitOf(part_C), constant}. The norm
     divides each part by the size of the whole stream, so that the parts' logits and the constant sum to the logit. */
  readOutOf(id, stream_C) {
    const {norm, norm_epsilon, embed_dim: C} = this.architecture;
    const centred = (x_C) => (norm === "layer" ? centre(x_C) : x_C);
    const whole_C = centred(stream_C);
    const size = norm === "none" ? 1 : Math.sqrt(dot(whole_C, 0, whole_C, 0, C) / C + norm_epsilon);
    const head_C = tensorRow(this.weights[`${this.lmHead}.weight`], id);
    const gain_C = this.weights["norm.gain"]?.values;
    const shift_C = this.weights["norm.bias"]?.values;
    const read_C = head_C.map((x, c) => (x * (gain_C?.[c] ?? 1)) / size);
    const bias = this.weights["head.bias"]?.values[id] ?? 0;
    return {
      logitOf: (x_C) => dot(centred(x_C), 0, read_C, 0, C),
      constant: bias + (shift_C ? dot(shift_C, 0, head_C, 0, C) : 0),
    };
  }

  /* Return the embedding (C) of a token at position t; for a bigram, the token's row of the table (V). */
  embed(id, t) {
    const x_C = tensorRow(this.embeddings, id);
    const positions = this.weights["position_embedding.weight"];
    return positions ? plus(x_C, tensorRow(positions, t)) : x_C;
  }

  add(x_C, y_C) { return plus(x_C, y_C); }

  linear(name, x_C, biasName = name) {
    const {shape: [O], values} = this.weights[`${name}.weight`];
    const bias = this.weights[`${biasName}.bias`];
    const y = dotRows(values, x_C, O);
    return bias ? plus(y, bias.values) : y;
  }

  norm(name, x_C) {
    const {norm, norm_epsilon, bias} = this.architecture;
    const gain_C = this.weights[`${name}.gain`].values;
    if (norm === "rms") return rmsNorm(x_C, gain_C, norm_epsilon);
    const y_C = rmsNorm(centre(x_C), gain_C, norm_epsilon);
    return bias ? plus(y_C, this.weights[`${name}.bias`].values) : y_C;
  }

  normHeads(name, x) {
    const {head_size, norm_epsilon} = this.architecture;
    const gain_D = this.weights[`${name}.gain`].values;
    return changeHeads(x, head_size, (x_D) => rmsNorm(x_D, gain_D, norm_epsilon));
  }

  rotateHeads(x, t) { return changeHeads(x, this.architecture.head_size, (x_D) => this.rotate(x_D, t)); }

  /* Rotate the pair i and i + D/2 of a head by the angle of position t. */
  rotate(x_D, t) {
    const half = x_D.length / 2;
    const {cosines, sines} = this.anglesAt(t, half);
    const y_D = new Float32Array(x_D.length);
    for (let i = 0; i < half; i++) {
      y_D[i] = x_D[i] * cosines[i] - x_D[i + half] * sines[i];
      y_D[i + half] = x_D[i + half] * cosines[i] + x_D[i] * sines[i];
    }
    return y_D;
  }

  /* Return the concatenated outputs (H·D) of all heads for token t. Record its attention weights. */
  mix(layer, cache, t) {
    const {H, K, D} = this.headSizes;
    const activations = cache.layers[layer][t];
    const {keys, values} = (cache.past[layer] ??= newPast(this.architecture.block_size * K * D));
    keys.set(activations.key, t * K * D);
    values.set(activations.value, t * K * D);
    activations.attention = [];
    const mixed = new Float32Array(H * D);
    for (let head = 0; head < H; head++) {
      const attention_T = softmax(this.scores(layer, cache, t, head));
      activations.attention.push(attention_T);
      if (this.isSilenced(layer, head)) continue;
      addWeightedRows(mixed, head * D, D, attention_T, values, K * D, this.keyHeadOf(head) * D);
    }
    return mixed;
  }

  /* Return the scores of token t over the tokens 0 to t: q · k / √D. */
  scores(layer, cache, t, head) {
    if (this.architecture.attention === "uniform") return new Float32Array(t + 1);
    const {K, D} = this.headSizes;
    const query_D = cache.layers[layer][t].query.slice(head * D, (head + 1) * D);
    const scores_T = dotRows(cache.past[layer].keys, query_D, t + 1, K * D, this.keyHeadOf(head) * D);
    for (let s = 0; s <= t; s++) scores_T[s] /= Math.sqrt(D);
    return scores_T;
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

/* Return the attention weights of a head as T × T numbers, from the activations of each token. */
function mapOf(layer_T, head) {
  const T = layer_T.length;
  const weights_TT = new Float32Array(T * T);
  layer_T.forEach(({attention}, t) => weights_TT.set(attention[head], t * T));
  return weights_TT;
}

/* Return memory for the keys and values of a layer, token after token. */
function newPast(size) { return {keys: new Float32Array(size), values: new Float32Array(size)}; }

/* Change the part (D) of each head in x. */
function changeHeads(x, D, change) {
  for (let start = 0; start < x.length; start += D) {
    const x_D = x.subarray(start, start + D);
    x_D.set(change(x_D));
  }
  return x;
}
