/* Products of matrices. A matrix is a view of an array: {values, start, down, across}, with the index of its first
   number, the distance of rows, and the distance of columns. */

import {dot} from "./arrays.js";

const ROWS = 16; // queries whose scores are computed together

export function view(values, start, down, across = 1) { return {values, start, down, across}; }

export function transposed({values, start, down, across}) { return view(values, start, across, down); }

/* Return the view of a matrix from this row and column on. */
function viewFrom({values, start, down, across}, row, column = 0) {
  return view(values, start + row * down + column * across, down, across);
}

/* Add a b to y, for a of M × K numbers and b of K × N. Two rows of a and four columns of b read each number once. */
export function multiply(y, a, b, M, N, K) {
  const pairs = M - (M % 2);
  const fours = N - (N % 4);
  for (let m = 0; m < pairs; m += 2) {
    for (let n = 0; n < fours; n += 4) multiplyTile(y, a, b, m, n, K);
  }
  for (let m = 0; m < M; m++) {
    for (let n = m < pairs ? fours : 0; n < N; n++) {
      let sum = 0;
      for (let k = 0; k < K; k++) {
        const left = a.values[a.start + m * a.down + k * a.across];
        sum += left * b.values[b.start + k * b.down + n * b.across];
      }
      y.values[y.start + m * y.down + n] += sum;
    }
  }
}

/* Add a b to rows m, m + 1 and columns n to n + 3 of y. */
function multiplyTile(y, a, b, m, n, K) {
  const {values: left, down: aDown, across: aAcross} = a;
  const {values: right, down: bDown, across: bAcross} = b;
  let s1 = 0;
  let s2 = 0;
  let s3 = 0;
  let s4 = 0;
  let t1 = 0;
  let t2 = 0;
  let t3 = 0;
  let t4 = 0;
  for (let k = 0, i = a.start + m * aDown, j = b.start + n * bAcross; k < K; k++, i += aAcross, j += bDown) {
    const s = left[i];
    const t = left[i + aDown];
    const b1 = right[j];
    const b2 = right[j + bAcross];
    const b3 = right[j + 2 * bAcross];
    const b4 = right[j + 3 * bAcross];
    s1 += s * b1;
    s2 += s * b2;
    s3 += s * b3;
    s4 += s * b4;
    t1 += t * b1;
    t2 += t * b2;
    t3 += t * b3;
    t4 += t * b4;
  }
  const at = y.start + m * y.down + n;
  const below = at + y.down;
  y.values[at] += s1;
  y.values[at + 1] += s2;
  y.values[at + 2] += s3;
  y.values[at + 3] += s4;
  y.values[below] += t1;
  y.values[below + 1] += t2;
  y.values[below + 2] += t3;
  y.values[below + 3] += t4;
}

/* Each of the three adds a b to y without most of the numbers that the causal mask makes zero. y has the scores of
   queries and keys, a mix of D numbers for each query, or a gradient of D numbers for each key. */

export function multiplyScores(y, a, b, T, D) {
  for (const [t, end] of blocksOf(T)) multiply(viewFrom(y, t), viewFrom(a, t), b, end - t, end, D);
}

export function multiplyMix(y, a, b, T, D) {
  for (const [t, end] of blocksOf(T)) multiply(viewFrom(y, t), viewFrom(a, t), b, end - t, D, end);
}

export function multiplyKeys(y, a, b, T, D) {
  for (const [t, end] of blocksOf(T)) multiply(viewFrom(y, t), viewFrom(a, t, t), viewFrom(b, t), end - t, D, T - t);
}

/* Return the first query of each block of ROWS queries, and the end of the block. */
function blocksOf(T) {
  return Array.from({length: Math.ceil(T / ROWS)}, (_, n) => [n * ROWS, Math.min((n + 1) * ROWS, T)]);
}

/* Replace scores by attention weights: the softmax of each row times `scale`, zero for later keys. */
export function causalSoftmax({values, start, down}, T, scale) {
  for (let t = 0; t < T; t++) {
    const row = start + t * down;
    const end = row + t + 1;
    let largest = -Infinity;
    let sum = 0;
    for (let i = row; i < end; i++) largest = Math.max(largest, values[i]);
    for (let i = row; i < end; i++) sum += values[i] = Math.exp(scale * (values[i] - largest));
    for (let i = row; i < end; i++) values[i] /= sum;
    values.fill(0, end, row + T);
  }
}

/* Replace the gradient of attention weights by the gradient of scores. */
export function softmaxGradient(gradient, weights, T, scale) {
  for (let t = 0; t < T; t++) {
    const row = gradient.start + t * gradient.down;
    const from = weights.start + t * weights.down;
    const mean = dot(gradient.values, row, weights.values, from, t + 1);
    for (let s = 0; s < T; s++) {
      gradient.values[row + s] = weights.values[from + s] * (gradient.values[row + s] - mean) * scale;
    }
  }
}
