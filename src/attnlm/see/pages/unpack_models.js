/* The models of a page, which see/model_page.py packs. */

import {bytesOf} from "./arrays.js";
import {Model} from "./model.js";
import {newTokenizer} from "./tokenizers.js";

/* Return the models of a page. A model's tensors are concatenated in one base64 string. */
export function unpackModels(described) {
  return described.map(({name, architecture, first, shapes, type, weights, tokenizer}) => {
    const {buffer} = bytesOf(weights);
    const numbers = type === "f16" ? fromHalves(new Uint16Array(buffer)) : new Float32Array(buffer);
    const tensors = {};
    let start = 0;
    for (const [parameter, shape] of Object.entries(shapes)) {
      const end = start + shape.reduce((count, size) => count * size, 1);
      tensors[parameter] = {shape, values: numbers.subarray(start, end)};
      start = end;
    }
    return new Model({name, architecture, first, weights: tensors, tokenizer: newTokenizer(tokenizer)});
  });
}

/* Convert finite IEEE 754 half-precision numbers (sign, 5 bits of exponent, 10 of fraction) to float32. */
function fromHalves(halves) {
  const valueOf = Float32Array.from({length: 2 ** 16}, (_, half) => {
    const sign = half >> 15 ? -1 : 1;
    const exponent = (half >> 10) & 31;
    const fraction = (half & 1023) / 1024;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
  });
  const values = new Float32Array(halves.length);
  for (let i = 0; i < values.length; i++) values[i] = valueOf[halves[i]];
  return values;
}
