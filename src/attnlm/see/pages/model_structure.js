/* The structure of every model, as in model/textbook.py: which operations follow each other.

   A subclass computes the operations: Model on the arrays of one token, BatchModel on the matrices of all tokens of a
   batch. The values x, y below are such arrays or matrices. A subclass defines
     embed(input, t)            the embeddings of `input`: of a token's id at position t, or of the ids of a batch
     add(x, y)                  x + y
     linear(name, x, biasName)  x Wᵀ, plus the bias if it exists
     norm(name, x)              the RMS norm or the layer norm
     normHeads(name, x)         the RMS norm of each head
     rotateHeads(x, t)          each head rotated by the angles of its position
     mix(layer, cache, t)       the concatenated outputs of all heads
     activate(hidden, gate)     the activation of the MLP

   Axes: T tokens, V vocabulary, C embedding, H heads, K key and value heads, D head size, F hidden units of the MLP.
   A name ends with the axes of its array: scores_T has T numbers, weight_VC has V rows of C. */

export class ModelStructure {
  angles = []; // rotary angles by position
  silenced = new Set(); // the heads that are switched off, as layer · H + head

  /* architecture: settings by the names of attnlm's options. weights: tensors by name. */
  constructor(architecture, weights) {
    this.architecture = architecture;
    this.weights = weights;
  }

  /* The embedding matrix, or the table of a bigram. */
  get embeddings() { return this.weights["token_embedding.weight"] ?? this.weights["table.weight"]; }

  /* The number of blocks; 0 for a bigram. */
  get depth() { return this.architecture.embed_dim === undefined ? 0 : this.architecture.layers; }

  /* The numbers of heads and of key and value heads, and the head size. */
  get headSizes() {
    const {attention, heads, kv_heads, head_size, embed_dim} = this.architecture;
    return attention === "softmax" ? {H: heads, K: kv_heads, D: head_size} : {H: 1, K: 1, D: embed_dim};
  }

  /* The name of the LM head's matrix. */
  get lmHead() { return this.architecture.tie_embeddings ? "token_embedding" : "head"; }

  /* Return the key and value head that a head reads: H / K heads share one. */
  keyHeadOf(head) {
    const {H, K} = this.headSizes;
    return Math.floor((head * K) / H);
  }

  /* Switch an attention head off or on: its output is zero while it is off. Layers and heads count from 0. */
  silence(layer, head, isOff = true) {
    const number = layer * this.headSizes.H + head;
    if (isOff) this.silenced.add(number);
    else this.silenced.delete(number);
  }

  isSilenced(layer, head) { return this.silenced.has(layer * this.headSizes.H + head); }

  /* The heads that are switched off, as pairs of a layer and a head. */
  get silencedHeads() {
    const {H} = this.headSizes;
    return [...this.silenced].map((number) => [Math.floor(number / H), number % H]);
  }

  /* Compute all blocks for the next token, t, or for a batch, whose t is 0. Add the activations to the cache:
     embedded[t], and for each layer layers[layer][t] = {input, query, key, value, attention, mixed, attended, hidden,
     stream}. The generator yields after each block. */
  * forward(input, cache) {
    const {attention, mlp, norm, residual} = this.architecture;
    const t = cache.ids.length;
    let x = this.embed(input, t);
    cache.embedded[t] = x;
    for (let layer = 0; layer < this.depth; layer++) {
      const block = `blocks.${layer}.`;
      const activations = {};
      (cache.layers[layer] ??= [])[t] = activations;
      if (attention !== "none") {
        activations.input = norm === "none" ? x : this.norm(`${block}attention_norm`, x);
        activations.attended = this.attend(layer, cache, t);
        x = residual ? this.add(x, activations.attended) : activations.attended;
      }
      if (mlp !== "none") {
        const y = norm === "none" ? x : this.norm(`${block}mlp_norm`, x);
        activations.hidden = this.mlp(`${block}mlp.`, y);
        x = residual ? this.add(x, activations.hidden) : activations.hidden;
      }
      activations.stream = x;
      yield;
    }
    cache.ids.push(input);
  }

  /* Return the logits of the stream, after the last norm and the LM head. A bigram's stream is the logits. */
  readOut(x) { return this.depth ? this.linear(this.lmHead, this.lastNorm(x), "head") : x; }

  lastNorm(x) { return this.architecture.norm === "none" ? x : this.norm("norm", x); }

  /* Compute causal attention: (C) → (C), or (H·D) without a projection. */
  attend(layer, cache, t) {
    const {attention, projection} = this.architecture;
    const name = `blocks.${layer}.attention.`;
    const activations = cache.layers[layer][t];
    const x = activations.input;
    const isSoftmax = attention === "softmax";
    // Other attention has no projections: the input itself is query, key and value.
    activations.query = isSoftmax ? this.project(`${name}query`, x, t) : x;
    activations.key = isSoftmax ? this.project(`${name}key`, x, t) : x;
    activations.value = isSoftmax ? this.linear(`${name}value`, x) : x;
    activations.mixed = this.mix(layer, cache, t);
    return isSoftmax && projection ? this.linear(`${name}projection`, activations.mixed) : activations.mixed;
  }

  /* Return queries or keys, with the model's norm and rotation. */
  project(name, x, t) {
    const {query_key_norm, positions} = this.architecture;
    let y = this.linear(name, x);
    if (query_key_norm) y = this.normHeads(`${name}_norm`, y);
    return positions === "rotary" ? this.rotateHeads(y, t) : y;
  }

  /* Apply a block's MLP. */
  mlp(name, x) {
    const hidden = this.linear(`${name}up`, x);
    const gate = this.architecture.mlp === "swiglu" ? this.linear(`${name}gate`, x) : undefined;
    return this.linear(`${name}down`, this.activate(hidden, gate));
  }

  /* Return the cosines and sines of the rotary angles at position t, for half of a head. */
  anglesAt(t, half) { return (this.angles[t] ??= rotaryAngles(this.architecture, t, half)); }
}

/* The activations of the tokens so far, and the keys and values of each layer in `past`. */
export function newCache() { return {ids: [], embedded: [], layers: [], past: []}; }

/* Return the stream of token t, or of a batch, after the last layer. */
export function streamOf({embedded, layers}, t) { return layers.length ? layers.at(-1)[t].stream : embedded[t]; }

function rotaryAngles({rotary_base, rotary_factor, rotary_context = 0}, t, half) {
  const angles = Float64Array.from({length: half}, (_, i) => {
    const frequency = rotary_base ** (-i / half);
    if (rotary_factor === undefined) return t * frequency;
    const turns = (frequency * rotary_context) / (2 * Math.PI);
    const kept = Math.min(Math.max((turns - 1) / 3, 0), 1); // high frequencies stay unchanged
    return t * ((frequency / rotary_factor) * (1 - kept) + frequency * kept);
  });
  return {cosines: angles.map(Math.cos), sines: angles.map(Math.sin)};
}
