/* New weights, with the distributions that see/train_page.py takes from the modules. */

import {randomNumbers} from "./sampling.js";

/* Return the weights of a seed. `parameters` are {name, shape} with a distribution: the std of `normal`, the limit of
   `uniform`, or `constant`. A size "V" is that of the vocabulary. */
export function initialWeights(parameters, vocabSize, seed) {
  const random = randomNumbers(seed);
  return Object.fromEntries(parameters.map(({name, shape: described, ...distribution}) => {
    const shape = described.map((size) => (size === "V" ? vocabSize : size));
    const length = shape.reduce((product, size) => product * size, 1);
    return [name, {shape, values: Float32Array.from({length}, drawOf(distribution, random))}];
  }));
}

/* Return a function that draws from a distribution; a normal one by the Box-Muller transform. */
function drawOf({normal, uniform, constant}, random) {
  if (normal !== undefined) {
    return () => normal * Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
  }
  return uniform !== undefined ? () => uniform * (2 * random() - 1) : () => constant;
}
