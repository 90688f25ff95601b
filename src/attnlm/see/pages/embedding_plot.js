/* The embeddings of a model's tokens in two dimensions. */

import {addTo, dot} from "./arrays.js";
import {element} from "./components.js";
import {firstReadable, tokenText} from "./labels.js";
import {randomNumbers} from "./sampling.js";
import {Pause} from "./yield_to_event_loop.js";

const MOST_EMBEDDINGS = 300;
const ITERATIONS = 60; // of the power method
const WIDTH = 1000;
const HEIGHT = 520;
const MIDDLE_X = WIDTH / 2;
const MIDDLE_Y = HEIGHT / 2;

/* Return an SVG image. The label of a token has its id as data-id. */
export async function embeddingPlot(model) {
  const ids = firstReadable(model, MOST_EMBEDDINGS);
  const points = await principalComponents(model.embeddings, ids);
  const [mostX, mostY] = [0, 1].map((axis) => (
    points.reduce((most, point) => Math.max(most, Math.abs(point[axis])), 1e-30)));
  const labelOf = ([x, y], n) => element("text", {
    "data-id": ids[n],
    x: MIDDLE_X + (x / mostX) * (MIDDLE_X - 24),
    y: MIDDLE_Y - (y / mostY) * (MIDDLE_Y - 16) + 5,
    "text-anchor": "middle",
  }, tokenText(model, ids[n]));
  return element("svg",
    {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", class: "plane",
      "aria-label": "token embeddings in two dimensions"},
    element("line", {x1: 0, x2: WIDTH, y1: MIDDLE_Y, y2: MIDDLE_Y}),
    element("line", {x1: MIDDLE_X, x2: MIDDLE_X, y1: 0, y2: HEIGHT}),
    element("text", {class: "axis", x: WIDTH, y: MIDDLE_Y - 6, "text-anchor": "end"}, "first direction →"),
    element("text", {class: "axis", x: MIDDLE_X + 8, y: 14}, "↑ second direction"),
    ...points.map(labelOf));
}

/* Return the first two principal components of the embeddings of some ids, by the power method. */
async function principalComponents({shape: [, C], values}, ids) {
  const mean_C = new Float32Array(C);
  for (const id of ids) for (let c = 0; c < C; c++) mean_C[c] += values[id * C + c] / ids.length;
  const centred = ids.map((id) => mean_C.map((mean, c) => values[id * C + c] - mean));
  const random = randomNumbers(1);
  const pause = new Pause();
  const directions = [];
  for (let n = 0; n < 2; n++) {
    let direction = mean_C.map(() => random() - 0.5);
    for (let iteration = 0; iteration < ITERATIONS; iteration++) {
      const next = new Float32Array(C);
      for (const x_C of centred) addTo(next, 0, dot(x_C, 0, direction, 0, C), x_C, 0, C);
      for (const other of directions) addTo(next, 0, -dot(next, 0, other, 0, C), other, 0, C);
      const length = Math.sqrt(dot(next, 0, next, 0, C)) || 1;
      direction = next.map((x) => x / length);
      await pause.yieldIfDue();
    }
    directions.push(direction);
  }
  return centred.map((x_C) => directions.map((direction) => dot(x_C, 0, direction, 0, C)));
}
