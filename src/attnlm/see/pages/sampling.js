/* The choice of the next token, as in generation/, and the random numbers of a seed. */

import {softmax} from "./arrays.js";

/* Return the probabilities (V) to sample from, limited to the topK likeliest tokens and to the smallest set of
   tokens with the total probability topP. */
export function nextProbabilities(logits_V, {temperature = 1, topK, topP} = {}) {
  const V = logits_V.length;
  const kept_V = new Float32Array(V);
  if (temperature === 0) {
    kept_V[logits_V.indexOf(logits_V.reduce((a, b) => Math.max(a, b)))] = 1;
    return kept_V;
  }
  const all_V = softmax(logits_V, temperature);
  if ((topK ?? V) >= V && (topP ?? 1) >= 1) return all_V;
  const sorted = Array.from(logits_V.keys()).sort((a, b) => logits_V[b] - logits_V[a] || a - b);
  const likeliest = sorted.slice(0, topK ?? V);
  const total = likeliest.reduce((sum, id) => sum + all_V[id], 0);
  let before = 0; // the sum of larger probabilities
  for (const id of likeliest) {
    if (before >= (topP ?? 1) * total) break;
    before += kept_V[id] = all_V[id];
  }
  return kept_V.map((probability) => probability / before);
}

/* Return the first id whose cumulative probability exceeds `number`, from 0 to 1. */
export function draw(probabilities_V, number) {
  let left = number;
  let last = 0;
  for (let id = 0; id < probabilities_V.length; id++) {
    if (probabilities_V[id] === 0) continue;
    last = id;
    left -= probabilities_V[id];
    if (left < 0) break;
  }
  return last;
}

/* Return a generator of random numbers from 0 to 1 (mulberry32). */
export function randomNumbers(seed) {
  let state = Number(seed) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let bits = Math.imul(state ^ (state >>> 15), state | 1);
    bits ^= bits + Math.imul(bits ^ (bits >>> 7), bits | 61);
    return ((bits ^ (bits >>> 14)) >>> 0) / 2 ** 32;
  };
}
