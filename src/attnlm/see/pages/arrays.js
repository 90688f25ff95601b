/* Arithmetic on arrays of numbers. Loops replace `map` and `reduce`, which are several times slower.

   A tensor is {shape, values}, its rows one after another. */

export function tensorRow({shape, values}, index) {
  return values.slice(index * shape[1], (index + 1) * shape[1]);
}

/* Return x + y, number by number. */
export function plus(x, y) {
  const z = new Float32Array(x.length);
  for (let i = 0; i < x.length; i++) z[i] = x[i] + y[i];
  return z;
}

/* Return the dot product of x from index x0 and y from index y0, over `count` numbers. */
export function dot(x, x0, y, y0, count) {
  let total = 0;
  for (let i = 0; i < count; i++) total += x[x0 + i] * y[y0 + i];
  return total;
}

/* Return the dot products of x (I) and `count` rows of a matrix, from index `start` on, `width` apart. Four rows
   together read x once, and their sums are independent. */
export function dotRows(matrix, x, count, width = x.length, start = 0) {
  const I = x.length;
  const y = new Float32Array(count);
  const whole = count - (count % 4);
  for (let o = 0; o < whole; o += 4) {
    const row1 = start + o * width;
    const row2 = row1 + width;
    const row3 = row2 + width;
    const row4 = row3 + width;
    let sum1 = 0;
    let sum2 = 0;
    let sum3 = 0;
    let sum4 = 0;
    for (let i = 0; i < I; i++) {
      const value = x[i];
      sum1 += matrix[row1 + i] * value;
      sum2 += matrix[row2 + i] * value;
      sum3 += matrix[row3 + i] * value;
      sum4 += matrix[row4 + i] * value;
    }
    y[o] = sum1;
    y[o + 1] = sum2;
    y[o + 2] = sum3;
    y[o + 3] = sum4;
  }
  for (let o = whole; o < count; o++) y[o] = dot(matrix, start + o * width, x, 0, I);
  return y;
}

/* Add Σ weight · row of a matrix (as in `dotRows`) to `count` numbers of y from index `at` on. */
export function addWeightedRows(y, at, count, weights, matrix, width, start) {
  const whole = weights.length - (weights.length % 4);
  for (let o = 0; o < whole; o += 4) {
    const row1 = start + o * width;
    const row2 = row1 + width;
    const row3 = row2 + width;
    const row4 = row3 + width;
    const weight1 = weights[o];
    const weight2 = weights[o + 1];
    const weight3 = weights[o + 2];
    const weight4 = weights[o + 3];
    for (let i = 0; i < count; i++) {
      y[at + i] += weight1 * matrix[row1 + i] + weight2 * matrix[row2 + i]
        + weight3 * matrix[row3 + i] + weight4 * matrix[row4 + i];
    }
  }
  for (let o = whole; o < weights.length; o++) addTo(y, at, weights[o], matrix, start + o * width, count);
}

/* Compute y += weight · x over `count` numbers, from index y0 of y and x0 of x. */
export function addTo(y, y0, weight, x, x0, count) {
  for (let i = 0; i < count; i++) y[y0 + i] += weight * x[x0 + i];
}

/* Return x minus its mean. */
export function centre(x) {
  const y = new Float32Array(x.length);
  let total = 0;
  for (let i = 0; i < x.length; i++) total += x[i];
  for (let i = 0; i < x.length; i++) y[i] = x[i] - total / x.length;
  return y;
}

/* Return x / √(mean x² + ε) · gain. */
export function rmsNorm(x, gain, epsilon) {
  const y = new Float32Array(x.length);
  const root = Math.sqrt(dot(x, 0, x, 0, x.length) / x.length + epsilon);
  for (let i = 0; i < x.length; i++) y[i] = (x[i] / root) * gain[i];
  return y;
}

export function gelu(x) {
  return 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
}

export function softmax(scores, temperature = 1) {
  const probabilities = new Float32Array(scores.length);
  let largest = -Infinity;
  let total = 0;
  for (let i = 0; i < scores.length; i++) largest = Math.max(largest, scores[i]);
  for (let i = 0; i < scores.length; i++) total += probabilities[i] = Math.exp((scores[i] - largest) / temperature);
  for (let i = 0; i < scores.length; i++) probabilities[i] /= total;
  return probabilities;
}

/* Return the indices of the `count` largest values, the largest first. */
export function largestIndices(values, count) {
  const indices = [];
  for (const [index, value] of values.entries()) {
    if (indices.length === count && value <= values[indices[count - 1]]) continue;
    let at = indices.length;
    while (at > 0 && values[indices[at - 1]] < value) at--;
    indices.splice(at, 0, index);
    indices.length = Math.min(indices.length, count);
  }
  return indices;
}

/* Return the bytes of a base64 string. */
export function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}
