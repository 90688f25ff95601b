/* Pictures of numbers: colours, attention maps and tables of probabilities. */

import {addCells, element, percent} from "./components.js";

export const SMALL_CELLS = 96;
const LARGE_CELLS = 512;

/* Return a CSS colour variable as [red, green, blue]. */
export function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/* Return the pixel (alpha, blue, green, red) of a colour between two. */
export function blend(from, to, fraction) {
  const [red, green, blue] = from.map((x, i) => Math.round(x + (to[i] - x) * fraction));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/* Pixels for attention weights from 0 to 1: paper, tint, deep. They follow the root of a weight, so that small
   weights are visible. They are null after a change between light and dark. */
const SHADES = 1000;
let shades = null;

/* The dark colour scheme; its event `change` comes when it begins or ends. */
export const darkness = matchMedia("screen and (prefers-color-scheme: dark)");
darkness.addEventListener("change", () => { shades = null; });

function newShades() {
  const [paper, tint, deep] = ["--paper", "--tint", "--deep"].map(colour);
  return Uint32Array.from({length: SHADES + 1}, (_, n) => {
    const fraction = (2 * n) / SHADES;
    return fraction < 1 ? blend(paper, tint, fraction) : blend(tint, deep, fraction - 1);
  });
}

export function shadeOf(weight) {
  shades ??= newShades();
  return shades[Math.min(SHADES, Math.round(SHADES * Math.sqrt(weight)))];
}

/* Draw pixels, in rows of `width`, on a canvas. */
export function paint(canvas, pixels, width) {
  canvas.width = width;
  canvas.height = pixels.length / width;
  canvas.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(pixels.buffer), width), 0, 0);
  return canvas;
}

/* Draw an attention map of at most `most` × `most` cells. A cell of a long text is a block of tokens, with the mean
   of its rows' sums. Masked cells stay transparent. */
export function drawMap(canvas, T, rowOf, most) {
  const cells = Math.min(T, most);
  const pixels = new Uint32Array(cells * cells);
  const sums = new Float32Array(cells * cells);
  const counts = new Uint16Array(cells);
  const cellOf = (t) => Math.floor((t * cells) / T);
  for (let query = 0; query < T; query++) {
    const row = cellOf(query);
    const weights_T = rowOf(query);
    counts[row]++;
    for (let key = 0; key <= query; key++) sums[row * cells + cellOf(key)] += weights_T[key];
  }
  for (let row = 0; row < cells; row++) {
    for (let cell = row * cells; cell <= row * cells + row; cell++) pixels[cell] = shadeOf(sums[cell] / counts[row]);
  }
  return paint(canvas, pixels, cells);
}

/* Draw a table of probabilities. */
export function tableCanvas(rows) {
  return paint(element("canvas"), Uint32Array.from(rows.flatMap((row) => Array.from(row, shadeOf))), rows[0].length);
}

/* Return a sentence about an attention weight. */
export function attentionText(tokens, query, key, weight) {
  return key > query ? `“${tokens[query]}” can't see “${tokens[key]}”, which comes later`
    : `“${tokens[query]}” gives ${percent(weight)} to “${tokens[key]}”`;
}

/* Return an attention map with its tokens on both axes. `choose` is called with a query and a key. */
export function attentionMap({tokens, rowOf, query, key, choose}) {
  return labelledMap({
    tokens,
    canvas: drawMap(element("canvas"), tokens.length, rowOf, LARGE_CELLS),
    textOf: (t, s) => attentionText(tokens, t, s, rowOf(t)[s]),
    query,
    key,
    framed: query + 1,
    choose,
  });
}

/* Return a map with its tokens on both axes, and a frame around the chosen cell and the first `framed` cells of its
   row. */
export function labelledMap({tokens, canvas, textOf, query, key = -1, framed, choose = () => {}}) {
  const T = tokens.length;
  const picture = element("div", {class: "picture", tabindex: 0, role: "img",
    "aria-label": "a row for each token: arrow keys move among the cells"}, canvas);
  addCells(picture, {
    rows: T,
    columns: T,
    current: () => [query, key],
    choose: (t, s) => choose(t, Math.min(s, T - 1)),
    tooltipOf: textOf,
  });
  const classOf = (t) => `${t === query ? "now" : ""} ${tokens[t].length > 1 ? "long" : ""}`;
  const axis = (name) => element("div", {class: name, "aria-hidden": "true"},
    ...tokens.map((token, t) => element("span", {class: classOf(t)}, token)));
  const places = {"--tokens": T, "--row": query, "--column": key, "--framed": framed};
  return element("div", {class: "labelled", style: places}, axis("columns"), axis("rows"), picture);
}
