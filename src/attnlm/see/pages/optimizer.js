/* AdamW and its learning rate, as in training/optimizer.py and training/learning_rate.py. */

import {dot} from "./arrays.js";

const EPSILON = 1e-8;

/* Make the update after `step` earlier ones by AdamW (Loshchilov and Hutter, 2019). */
export function updateWeights(model, step, training) {
  const {beta1, beta2, gradient_clip, weight_decay, weight_decay_on} = training;
  const weights = Object.values(model.weights);
  const rate = learningRate(step + 1, training);
  const norm = Math.sqrt(weights.reduce((sum, {gradient}) => sum + dot(gradient, 0, gradient, 0, gradient.length), 0));
  const clip = gradient_clip == null ? 1 : Math.min(1, gradient_clip / (norm + 1e-6));
  const correction1 = 1 - beta1 ** (step + 1);
  const correction2 = Math.sqrt(1 - beta2 ** (step + 1));
  for (const {shape, values, gradient, mean, square} of weights) {
    const decays = shape.length > 1 || weight_decay_on === "all";
    const kept = 1 - rate * (decays ? weight_decay : 0);
    for (let i = 0; i < values.length; i++) {
      const g = clip * gradient[i];
      mean[i] += (1 - beta1) * (g - mean[i]);
      square[i] = beta2 * square[i] + (1 - beta2) * g * g;
      values[i] = kept * values[i] - ((rate / correction1) * mean[i]) / (Math.sqrt(square[i]) / correction2 + EPSILON);
    }
  }
}

/* Return the rate of the update that leads to `step`. */
export function learningRate(step, {learning_rate, min_learning_rate, warmup, cooldown, schedule, steps}) {
  const made = Math.max(0, step - 1);
  if (made < warmup) return (learning_rate * (made + 1)) / (warmup + 1);
  const left = schedule === "constant" ? 1 : (steps - made) / (cooldown * (steps - warmup));
  if (left >= 1) return learning_rate;
  const lowest = min_learning_rate / learning_rate;
  const height = schedule === "linear" ? left : (1 - Math.cos(Math.PI * left)) / 2;
  return learning_rate * (lowest + (1 - lowest) * height);
}
