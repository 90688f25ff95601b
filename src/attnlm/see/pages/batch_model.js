/* Losses and gradients of a model over a batch.

   Each operation of BatchModel puts a function on a tape, which adds to the gradients of the operation's inputs. The
   backward pass calls these functions in reverse order.

   Axes as in model_structure.js. M is the number of tokens of a batch, B windows of T tokens. O is the number of
   outputs of a linear layer, I of its inputs. */

import {addTo, dot} from "./arrays.js";
import {
  causalSoftmax, multiply, multiplyKeys, multiplyMix, multiplyScores, softmaxGradient, transposed, view,
} from "./matmul.js";
import {ModelStructure, newCache, streamOf} from "./model_structure.js";
import {resultOf} from "./yield_to_event_loop.js";

export class BatchModel extends ModelStructure {
  tape = [];
  memory = []; // arrays of the step before, in the order in which it needed them
  used = 0; // of these

  constructor({architecture, weights, windows}) {
    super(architecture, {});
    this.B = windows;
    this.T = architecture.block_size;
    for (const [name, tensor] of Object.entries(weights)) this.weights[name] = trainable(tensor);
  }

  /* Return the mean loss of a batch, in nats per token. */
  loss(inputs_M, targets_M) {
    this.tape.length = 0;
    this.used = 0;
    const cache = newCache();
    resultOf(this.forward(inputs_M, cache));
    return crossEntropy(this.readOut(streamOf(cache, 0)), targets_M);
  }

  /* Compute the gradient of the loss that was computed last. */
  backward() {
    for (const {gradient} of Object.values(this.weights)) gradient.fill(0);
    while (this.tape.length) this.tape.pop()();
  }

  /* Return zeros. Each step needs the same arrays in the same order, so it uses the arrays of the step before again. */
  floats(size) {
    const number = this.used++;
    if (this.memory[number]?.length !== size) {
      this.memory[number] = new Float32Array(size);
      return this.memory[number];
    }
    return this.memory[number].fill(0);
  }

  /* Return a matrix of zeros with its gradient. */
  matrix(rows, width) { return {rows, width, values: this.floats(rows * width), gradient: this.floats(rows * width)}; }

  embed(ids_M) {
    const tables = [this.embeddings, this.weights["position_embedding.weight"]];
    return {...this.lookUp(...tables, ids_M), tables, ids_M};
  }

  /* Return the sum of a row for each token's id and, if `position` exists, a row for its position. */
  lookUp(token, position, ids_M) {
    const {T} = this;
    const {width} = token;
    const M = ids_M.length;
    const y = this.matrix(M, width);
    for (let m = 0; m < M; m++) {
      addTo(y.values, m * width, 1, token.values, ids_M[m] * width, width);
      if (position) addTo(y.values, m * width, 1, position.values, (m % T) * width, width);
    }
    this.tape.push(() => {
      for (let m = 0; m < M; m++) {
        addTo(token.gradient, ids_M[m] * width, 1, y.gradient, m * width, width);
        if (position) addTo(position.gradient, (m % T) * width, 1, y.gradient, m * width, width);
      }
    });
    return y;
  }

  linear(name, x, biasName = name) {
    const weight = this.weights[`${name}.weight`];
    const bias = this.weights[`${biasName}.bias`];
    const [token, position] = x.tables ?? [];
    if (token === undefined || token.rows + this.T > x.rows) return this.product(x, weight, bias);
    // W(e + p) = We + Wp: the vocabulary and the positions together have fewer rows than the batch.
    const ofTokens = this.product(token, weight, position ? undefined : bias);
    return this.lookUp(ofTokens, position && this.product(position, weight, bias), x.ids_M);
  }

  /* Return x Wᵀ, plus the bias if it exists. */
  product(x, weight, bias) {
    const {rows: M, width: I} = x;
    const O = weight.rows;
    const y = this.matrix(M, O);
    const x_MI = view(x.values, 0, I);
    const weight_OI = view(weight.values, 0, I);
    if (bias) for (let m = 0; m < M; m++) y.values.set(bias.values, m * O);
    multiply(view(y.values, 0, O), x_MI, transposed(weight_OI), M, O, I);
    this.tape.push(() => {
      const d_y_MO = view(y.gradient, 0, O);
      if (bias) for (let m = 0; m < M; m++) addTo(bias.gradient, 0, 1, y.gradient, m * O, O);
      multiply(view(x.gradient, 0, I), d_y_MO, weight_OI, M, I, O);
      multiply(view(weight.gradient, 0, I), transposed(d_y_MO), x_MI, O, I, M);
    });
    return y;
  }

  add(x, y) {
    const z = this.matrix(x.rows, x.width);
    const size = z.values.length;
    for (const {values} of [x, y]) addTo(z.values, 0, 1, values, 0, size);
    this.tape.push(() => { for (const {gradient} of [x, y]) addTo(gradient, 0, 1, z.gradient, 0, size); });
    return z;
  }

  normHeads(name, x) { return this.norm(name, x); }

  /* Apply the RMS norm to groups of as many numbers as the gain has: rows, or heads. */
  norm(name, x) {
    const gain = this.weights[`${name}.gain`];
    const D = gain.width;
    const y = this.matrix(x.rows, x.width);
    const roots = this.floats(x.values.length / D);
    for (let n = 0; n < roots.length; n++) {
      const start = n * D;
      roots[n] = Math.sqrt(dot(x.values, start, x.values, start, D) / D + this.architecture.norm_epsilon);
      for (let i = 0; i < D; i++) y.values[start + i] = (x.values[start + i] / roots[n]) * gain.values[i];
    }
    this.tape.push(() => { for (let n = 0; n < roots.length; n++) addNormGradient(x, y, gain, n * D, roots[n]); });
    return y;
  }

  rotateHeads(x) {
    const y = this.matrix(x.rows, x.width);
    this.addRotated(y.values, x.values, x.width, 1);
    this.tape.push(() => this.addRotated(x.gradient, y.gradient, x.width, -1));
    return y;
  }

  /* Add x to y, rotated by the angles of the positions (direction 1) or back (−1). */
  addRotated(y, x, width, direction) {
    const D = this.architecture.head_size;
    const half = D / 2;
    for (let start = 0; start < x.length; start += D) {
      const {cosines, sines} = this.anglesAt(Math.floor(start / width) % this.T, half);
      for (let i = start, n = 0; n < half; i++, n++) {
        const sine = direction * sines[n];
        y[i] += x[i] * cosines[n] - x[i + half] * sine;
        y[i + half] += x[i + half] * cosines[n] + x[i] * sine;
      }
    }
  }

  /* Return silu(gate) · up (SwiGLU). */
  activate(up, gate) {
    const y = this.matrix(up.rows, up.width);
    const sigmoids = this.floats(up.values.length);
    for (let i = 0; i < sigmoids.length; i++) {
      sigmoids[i] = 1 / (1 + Math.exp(-gate.values[i]));
      y.values[i] = up.values[i] * gate.values[i] * sigmoids[i];
    }
    this.tape.push(() => {
      for (let i = 0; i < sigmoids.length; i++) {
        const d_y = y.gradient[i];
        const g = gate.values[i];
        const sigmoid = sigmoids[i];
        up.gradient[i] += d_y * g * sigmoid;
        gate.gradient[i] += d_y * up.values[i] * sigmoid * (1 + g * (1 - sigmoid));
      }
    });
    return y;
  }

  /* Return the concatenated outputs of all heads, M × H·D. */
  mix(layer, cache) {
    const {B, T} = this;
    const {H, D} = this.headSizes;
    const {query, key, value} = cache.layers[layer][0];
    const mixed = this.matrix(B * T, H * D);
    const weights = this.floats(B * H * T * T);
    const d_scores = this.floats(T * T);
    for (let n = 0; n < B * H; n++) {
      const head = n % H;
      if (this.isSilenced(layer, head)) continue;
      const firstRow = Math.floor(n / H) * T;
      this.mixHead({
        query: headOf(query, firstRow, head, D),
        key: headOf(key, firstRow, this.keyHeadOf(head), D),
        value: headOf(value, firstRow, this.keyHeadOf(head), D),
        mixed: headOf(mixed, firstRow, head, D),
        weights_TT: view(weights, n * T * T, T),
        d_scores_TT: view(d_scores, 0, T),
      }, D);
    }
    return mixed;
  }

  /* Compute the output of a head for one window. `query`, `key`, `value` and `mixed` are its matrices (T × D). */
  mixHead({query, key, value, mixed, weights_TT, d_scores_TT}, D) {
    const {T} = this;
    const scale = D ** -0.5;
    const isUniform = this.architecture.attention === "uniform";
    if (!isUniform) multiplyScores(weights_TT, query.values_TD, transposed(key.values_TD), T, D);
    causalSoftmax(weights_TT, T, scale);
    multiplyMix(mixed.values_TD, weights_TT, value.values_TD, T, D);
    this.tape.push(() => {
      multiplyKeys(value.gradient_TD, transposed(weights_TT), mixed.gradient_TD, T, D);
      if (isUniform) return;
      d_scores_TT.values.fill(0); // all heads share this array
      multiplyScores(d_scores_TT, mixed.gradient_TD, transposed(value.values_TD), T, D);
      softmaxGradient(d_scores_TT, weights_TT, T, scale);
      multiplyMix(query.gradient_TD, d_scores_TT, key.values_TD, T, D);
      multiplyKeys(key.gradient_TD, transposed(d_scores_TT), query.values_TD, T, D);
    });
  }
}

/* Return a copy of a tensor as a matrix with its gradient and AdamW's averages. A vector is one row. */
function trainable({shape, values}) {
  const [rows, width] = shape.length > 1 ? shape : [1, ...shape];
  return {
    shape,
    rows,
    width,
    values: values.slice(),
    gradient: new Float32Array(values.length),
    mean: new Float32Array(values.length),
    square: new Float32Array(values.length),
  };
}

/* Return views of a head's numbers and of their gradients, from row `firstRow` on. */
function headOf({values, gradient, width}, firstRow, head, D) {
  const start = firstRow * width + head * D;
  return {values_TD: view(values, start, width), gradient_TD: view(gradient, start, width)};
}

/* Add to the gradients of x and of the gain, for the group that begins at `start`. */
function addNormGradient(x, y, gain, start, root) {
  const D = gain.width;
  let along = 0; // the part of the gradient in the direction of x
  for (let i = 0; i < D; i++) along += y.gradient[start + i] * gain.values[i] * x.values[start + i];
  along /= D * root * root;
  for (let i = 0; i < D; i++) {
    const d_y = y.gradient[start + i];
    const x_i = x.values[start + i];
    gain.gradient[i] += (d_y * x_i) / root;
    x.gradient[start + i] += (d_y * gain.values[i] - along * x_i) / root;
  }
}

/* Return the mean loss, and set the gradient of the logits. */
function crossEntropy({rows: M, width: V, values, gradient}, targets_M) {
  let total = 0;
  for (let m = 0; m < M; m++) {
    const start = m * V;
    const end = start + V;
    const target = start + targets_M[m];
    let largest = -Infinity;
    let sum = 0;
    for (let i = start; i < end; i++) largest = Math.max(largest, values[i]);
    for (let i = start; i < end; i++) sum += gradient[i] = Math.exp(values[i] - largest);
    for (let i = start; i < end; i++) gradient[i] /= sum * M;
    gradient[target] -= 1 / M;
    total += Math.log(sum) + largest - values[target];
  }
  return total / M;
}
