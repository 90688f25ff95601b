"use strict";
/* Training in a page: losses and gradients, AdamW, the schedule of the learning rate, and batches.

   BatchModel has the structure of Model (model.js), and replaces its operations on one token by operations on all tokens
   of a batch. Each operation puts a function on a tape, which adds to the gradients of the operation's inputs. The
   backward pass calls these functions in reverse order.

   Axes as in model.js. M is the number of tokens of a batch, B windows of T tokens. O is the number of outputs of a linear
   layer, I of its inputs. */

const ROWS = 16; // queries whose scores are computed together

class BatchModel extends Model {
  constructor({architecture, weights, windows}) {
    super({architecture, weights});
    Object.assign(this, {weights: {}, B: windows, T: architecture.block_size, tape: [], memory: [], used: 0});
    for (const [name, {shape, values}] of Object.entries(weights)) {
      const [gradient, mean, square] = Array.from({length: 3}, () => new Float32Array(values.length));
      const [rows, width] = shape.length > 1 ? shape : [1, ...shape];
      this.weights[name] = {shape, rows, width, values: values.slice(), gradient, mean, square};
    }
  }

  /* Return the mean loss of a batch, in nats per token. */
  loss(inputs_M, targets_M) {
    this.tape.length = this.used = 0;
    const cache = newCache();
    resultOf(this.forward(inputs_M, cache));
    return this.crossEntropy(this.readOut(streamOf(cache, 0)), targets_M);
  }

  /* Compute the gradient of the loss that was computed last. */
  backward() {
    for (const {gradient} of Object.values(this.weights)) gradient.fill(0);
    while (this.tape.length) this.tape.pop()();
  }

  /* Return zeros. Each step needs the same arrays in the same order, so the arrays of the step before are used again. */
  floats(size) {
    const number = this.used++;
    if (this.memory[number]?.length !== size) return (this.memory[number] = new Float32Array(size));
    return this.memory[number].fill(0);
  }

  /* Return a matrix of zeros with its gradient. */
  matrix(rows, width) { return {rows, width, values: this.floats(rows * width), gradient: this.floats(rows * width)}; }

  embed(ids_M) {
    const tables = [this.embeddings, this.weights["position_embedding.weight"]];
    return Object.assign(this.lookUp(...tables, ids_M), {tables, ids_M});
  }

  /* Return the sum of a row for each token's id and, if `position` exists, a row for its position. */
  lookUp(token, position, ids_M) {
    const {T} = this, {width} = token, M = ids_M.length, y = this.matrix(M, width);
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
    const weight = this.weights[`${name}.weight`], bias = this.weights[`${biasName}.bias`];
    const [token, position] = x.tables ?? [];
    if (token === undefined || token.rows + this.T > x.rows) return this.product(x, weight, bias);
    // W(e + p) = We + Wp: the vocabulary and the positions together have fewer rows than the batch.
    const ofTokens = this.product(token, weight, position ? undefined : bias);
    return this.lookUp(ofTokens, position && this.product(position, weight, bias), x.ids_M);
  }

  /* Return x Wᵀ, plus the bias if it exists. */
  product(x, weight, bias) {
    const {rows: M, width: I} = x, O = weight.rows, y = this.matrix(M, O);
    if (bias) for (let m = 0; m < M; m++) y.values.set(bias.values, m * O);
    const x_MI = [x.values, 0, I, 1], d_y_MO = [y.gradient, 0, O, 1], weight_OI = [weight.values, 0, I, 1];
    multiply([y.values, 0, O], x_MI, transposed(weight_OI), M, O, I);
    this.tape.push(() => {
      if (bias) for (let m = 0; m < M; m++) addTo(bias.gradient, 0, 1, y.gradient, m * O, O);
      multiply([x.gradient, 0, I], d_y_MO, weight_OI, M, I, O);
      multiply([weight.gradient, 0, I], transposed(d_y_MO), x_MI, O, I, M);
    });
    return y;
  }

  add(x, y) {
    const z = this.matrix(x.rows, x.width), size = z.values.length;
    for (const {values} of [x, y]) addTo(z.values, 0, 1, values, 0, size);
    this.tape.push(() => { for (const {gradient} of [x, y]) addTo(gradient, 0, 1, z.gradient, 0, size); });
    return z;
  }

  normHeads(name, x) { return this.norm(name, x); }

  /* Apply the RMS norm to groups of as many numbers as the gain has: rows, or heads. */
  norm(name, x) {
    const gain = this.weights[`${name}.gain`];
    const {values, gradient} = x, D = gain.width, y = this.matrix(x.rows, x.width), roots = this.floats(values.length / D);
    for (let n = 0, start = 0; start < values.length; n++, start += D) {
      roots[n] = Math.sqrt(dot(values, start, values, start, D) / D + this.architecture.norm_epsilon);
      for (let i = 0; i < D; i++) y.values[start + i] = (values[start + i] / roots[n]) * gain.values[i];
    }
    this.tape.push(() => {
      for (let n = 0, start = 0; start < values.length; n++, start += D) {
        const root = roots[n];
        let along = 0; // the part of the gradient in the direction of x
        for (let i = 0; i < D; i++) along += y.gradient[start + i] * gain.values[i] * values[start + i];
        along /= D * root * root;
        for (let i = 0; i < D; i++) {
          const d_y = y.gradient[start + i], x_i = values[start + i];
          gain.gradient[i] += (d_y * x_i) / root;
          gradient[start + i] += (d_y * gain.values[i] - along * x_i) / root;
        }
      }
    });
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
    const D = this.architecture.head_size, half = D / 2;
    for (let start = 0; start < x.length; start += D) {
      const t = Math.floor(start / width) % this.T, {cosines, sines} = (this.angles[t] ??= this.anglesAt(t, half));
      for (let i = start, n = 0; n < half; i++, n++) {
        const sine = direction * sines[n];
        y[i] += x[i] * cosines[n] - x[i + half] * sine;
        y[i + half] += x[i + half] * cosines[n] + x[i] * sine;
      }
    }
  }

  /* Return silu(gate) · up (SwiGLU). */
  activate(up, gate) {
    const y = this.matrix(up.rows, up.width), sigmoids = this.floats(up.values.length);
    for (let i = 0; i < sigmoids.length; i++) {
      sigmoids[i] = 1 / (1 + Math.exp(-gate.values[i]));
      y.values[i] = up.values[i] * gate.values[i] * sigmoids[i];
    }
    this.tape.push(() => {
      for (let i = 0; i < sigmoids.length; i++) {
        const d_y = y.gradient[i], g = gate.values[i], sigmoid = sigmoids[i];
        up.gradient[i] += d_y * g * sigmoid;
        gate.gradient[i] += d_y * up.values[i] * sigmoid * (1 + g * (1 - sigmoid));
      }
    });
    return y;
  }

  /* Return the concatenated outputs of all heads, M × H·D. */
  mix(layer, cache) {
    const {B, T} = this, {H, K, D} = this.headSizes, {query, key, value} = cache.layers[layer][0];
    const mixed = this.matrix(B * T, H * D), isUniform = this.architecture.attention === "uniform";
    const weights = this.floats(B * H * T * T), d_scores = this.floats(T * T), scale = D ** -0.5;
    for (let n = 0; n < B * H; n++) {
      const head = n % H, first = Math.floor(n / H) * T;
      if (this.silenced.has(`${layer}.${head}`)) continue;
      const at = first * H * D + head * D, shared = first * K * D + Math.floor((head * K) / H) * D;
      const weights_TT = [weights, n * T * T, T, 1], d_scores_TT = [d_scores, 0, T, 1];
      const [query_TD, d_query_TD, mixed_TD, d_mixed_TD] = [query.values, query.gradient, mixed.values, mixed.gradient]
        .map((values) => [values, at, H * D, 1]);
      const [key_TD, d_key_TD, value_TD, d_value_TD] = [key.values, key.gradient, value.values, value.gradient]
        .map((values) => [values, shared, K * D, 1]);
      if (!isUniform) multiplyCausal("scores", weights_TT, query_TD, transposed(key_TD), T, D);
      causalSoftmax(weights_TT, T, scale);
      multiplyCausal("mix", mixed_TD, weights_TT, value_TD, T, D);
      this.tape.push(() => {
        multiplyCausal("keys", d_value_TD, transposed(weights_TT), d_mixed_TD, T, D);
        if (isUniform) return;
        d_scores.fill(0);
        multiplyCausal("scores", d_scores_TT, d_mixed_TD, transposed(value_TD), T, D);
        softmaxGradient(d_scores_TT, weights_TT, T, scale);
        multiplyCausal("mix", d_query_TD, d_scores_TT, key_TD, T, D);
        multiplyCausal("keys", d_key_TD, transposed(d_scores_TT), query_TD, T, D);
      });
    }
    return mixed;
  }

  /* Return the mean loss, and set the gradient of the logits. */
  crossEntropy({rows: M, width: V, values, gradient}, targets_M) {
    let total = 0;
    for (let m = 0, start = 0; m < M; m++, start += V) {
      let largest = -Infinity, sum = 0;
      for (let i = start; i < start + V; i++) largest = Math.max(largest, values[i]);
      for (let i = start; i < start + V; i++) sum += gradient[i] = Math.exp(values[i] - largest);
      for (let i = start; i < start + V; i++) gradient[i] /= sum * M;
      gradient[start + targets_M[m]] -= 1 / M;
      total += Math.log(sum) + largest - values[start + targets_M[m]];
    }
    return total / M;
  }
}

/* Matrices are views of arrays: [values, the index of the first number, the distance of rows, the distance of columns]. */

function transposed([values, start, down, across]) { return [values, start, across, down]; }

function viewFrom([values, start, down, across], row, column = 0) {
  return [values, start + row * down + column * across, down, across];
}

/* Add a b to y, for a of M × K numbers and b of K × N. Two rows of a and four columns of b read each number once. */
function multiply([y, y0, yDown], [a, a0, aDown, aAcross], [b, b0, bDown, bAcross], M, N, K) {
  const pairs = M - (M % 2), fours = N - (N % 4);
  for (let m = 0; m < pairs; m += 2) {
    for (let n = 0; n < fours; n += 4) {
      let s1 = 0, s2 = 0, s3 = 0, s4 = 0, t1 = 0, t2 = 0, t3 = 0, t4 = 0;
      for (let k = 0, i = a0 + m * aDown, j = b0 + n * bAcross; k < K; k++, i += aAcross, j += bDown) {
        const s = a[i], t = a[i + aDown], b1 = b[j], b2 = b[j + bAcross], b3 = b[j + 2 * bAcross], b4 = b[j + 3 * bAcross];
        s1 += s * b1;
        s2 += s * b2;
        s3 += s * b3;
        s4 += s * b4;
        t1 += t * b1;
        t2 += t * b2;
        t3 += t * b3;
        t4 += t * b4;
      }
      const at = y0 + m * yDown + n, below = at + yDown;
      y[at] += s1;
      y[at + 1] += s2;
      y[at + 2] += s3;
      y[at + 3] += s4;
      y[below] += t1;
      y[below + 1] += t2;
      y[below + 2] += t3;
      y[below + 3] += t4;
    }
  }
  for (let m = 0; m < M; m++) {
    for (let n = m < pairs ? fours : 0; n < N; n++) {
      let sum = 0;
      for (let k = 0; k < K; k++) sum += a[a0 + m * aDown + k * aAcross] * b[b0 + k * bDown + n * bAcross];
      y[y0 + m * yDown + n] += sum;
    }
  }
}

/* Add a b to y without most of the numbers that the mask makes zero. `kind` says what y has: scores of
   queries and keys, a mix for each query, or a gradient for each key. */
function multiplyCausal(kind, y, a, b, T, D) {
  for (let t = 0; t < T; t += ROWS) {
    const end = Math.min(t + ROWS, T), rows = end - t;
    if (kind === "scores") multiply(viewFrom(y, t), viewFrom(a, t), b, rows, end, D);
    else if (kind === "mix") multiply(viewFrom(y, t), viewFrom(a, t), b, rows, D, end);
    else multiply(viewFrom(y, t), viewFrom(a, t, t), viewFrom(b, t), rows, D, T - t);
  }
}

/* Replace scores by attention weights: the softmax of each row times `scale`, zero for later keys. */
function causalSoftmax([values, start, width], T, scale) {
  for (let t = 0; t < T; t++) {
    const row = start + t * width, end = row + t + 1;
    let largest = -Infinity, sum = 0;
    for (let i = row; i < end; i++) largest = Math.max(largest, values[i]);
    for (let i = row; i < end; i++) sum += values[i] = Math.exp(scale * (values[i] - largest));
    for (let i = row; i < end; i++) values[i] /= sum;
    values.fill(0, end, row + T);
  }
}

/* Replace the gradient of attention weights by the gradient of scores. */
function softmaxGradient([gradient, start, width], [weights, first], T, scale) {
  for (let t = 0; t < T; t++) {
    const row = start + t * width, from = first + t * width, mean = dot(gradient, row, weights, from, t + 1);
    for (let s = 0; s < T; s++) gradient[row + s] = weights[from + s] * (gradient[row + s] - mean) * scale;
  }
}

/* Make the update after `step` earlier ones by AdamW (Loshchilov and Hutter, 2019). */
function updateWeights(model, step, training) {
  const {beta1, beta2, gradient_clip, weight_decay, weight_decay_on} = training, epsilon = 1e-8;
  const rate = learningRate(step + 1, training), weights = Object.values(model.weights);
  const norm = Math.sqrt(weights.reduce((sum, {gradient}) => sum + dot(gradient, 0, gradient, 0, gradient.length), 0));
  const clip = gradient_clip == null ? 1 : Math.min(1, gradient_clip / (norm + 1e-6));
  const correction1 = 1 - beta1 ** (step + 1), correction2 = Math.sqrt(1 - beta2 ** (step + 1));
  for (const {shape, values, gradient, mean, square} of weights) {
    const decays = shape.length > 1 || weight_decay_on === "all", kept = 1 - rate * (decays ? weight_decay : 0);
    for (let i = 0; i < values.length; i++) {
      const g = clip * gradient[i];
      mean[i] += (1 - beta1) * (g - mean[i]);
      square[i] = beta2 * square[i] + (1 - beta2) * g * g;
      values[i] = kept * values[i] - ((rate / correction1) * mean[i]) / (Math.sqrt(square[i]) / correction2 + epsilon);
    }
  }
}

/* Return the rate of the update that leads to `step`, as in training/schedule.py. */
function learningRate(step, {learning_rate, min_learning_rate, warmup, cooldown, schedule, steps}) {
  const made = Math.max(0, step - 1);
  if (made < warmup) return (learning_rate * (made + 1)) / (warmup + 1);
  const left = schedule === "constant" ? 1 : (steps - made) / (cooldown * (steps - warmup));
  if (left >= 1) return learning_rate;
  const lowest = min_learning_rate / learning_rate;
  const height = schedule === "linear" ? left : (1 - Math.cos(Math.PI * left)) / 2;
  return learning_rate * (lowest + (1 - lowest) * height);
}

/* Batches as a function of the step. An epoch uses windows of T tokens once each, in random order, and begins at a random
   place below T. */
class Batches {
  constructor(ids, T, B, seed) {
    Object.assign(this, {ids, T, B, seed, epoch: -1});
    this.phases = Math.min(T, ids.length - T);
    this.perEpoch = Math.floor((ids.length - T - this.phases) / T) + 1;
  }

  start(window) {
    const epoch = Math.floor(window / this.perEpoch);
    if (epoch !== this.epoch) {
      const random = randomNumbers((this.seed + epoch * 0x9e3779b1) % 2 ** 32);
      this.epoch = epoch;
      this.phase = Math.floor(random() * this.phases);
      this.order = Uint32Array.from({length: this.perEpoch}, (_, n) => n);
      for (let n = this.perEpoch - 1; n > 0; n--) {
        const other = Math.floor(random() * (n + 1));
        [this.order[n], this.order[other]] = [this.order[other], this.order[n]];
      }
    }
    return this.phase + this.order[window % this.perEpoch] * this.T;
  }

  at(step) {
    const {ids, T, B} = this;
    return windowsAt(ids, Array.from({length: B}, (_, b) => this.start(step * B + b)), T);
  }
}

/* Return inputs (M) and targets (M) of windows that begin at `starts`. */
function windowsAt(ids, starts, T) {
  return [0, 1].map((shift) => Int32Array.from({length: starts.length * T},
    (_, m) => ids[starts[Math.floor(m / T)] + (m % T) + shift]));
}
