"use strict";
/* Shared by all pages: elements, token texts, probability bars, tooltips and attention maps. */

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((node) => [node.id, node]));

/* Create an HTML or SVG element. Attributes: `on…` for event listeners, `style` for CSS properties. */
function element(tag, attributes = {}, ...content) {
  const isSvg = ["svg", "path", "text", "title", "circle", "line", "g"].includes(tag);
  const node = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, x] of Object.entries(value)) node.style.setProperty(key, x);
    else if (value !== false && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...content);
  return node;
}

/* Return a token with symbols for spaces and line ends, and escapes for other invisible characters. */
function visible(text) {
  const symbols = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"};
  return [...text].map((character) => symbols[character]
    ?? (/[\p{C}\p{Z}\ufeff]/u.test(character) ? `\\u{${character.codePointAt(0).toString(16)}}` : character)).join("");
}

/* Return running text, in which only spaces, tabs and line ends remain invisible. */
function visibleText(text) { return text.replace(/[^\n\t ]+/g, visible); }

function bytesOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function percent(fraction) {
  if (fraction > 0 && fraction < 0.0005) return "< 0.1%";
  return `${(100 * fraction).toFixed(fraction < 0.0995 ? 1 : 0)}%`;
}

/* Return the indices of the `count` largest values, the largest first. */
function topK(values, count) {
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

/* Return bars for [token, probability], or [token, probability, probability before a change]. */
function bars(rows) {
  const bar = (name, fraction) => element("span", {class: name, style: {"--fraction": fraction.toFixed(4)}});
  return element("ol", {class: "next"}, ...rows.map(([token, probability, before]) => element("li", {},
    element("span", {class: "candidate", title: token}, token),
    ...(before === undefined ? [bar("bar", probability)] : [
      element("span", {class: "bars"}, bar("bar before", before), bar("bar", probability)),
      element("span", {class: "percent before"}, percent(before))]),
    element("span", {class: "percent"}, percent(probability)))));
}

/* Return a cell of a logit lens: the likeliest token, tinted by its probability. */
function lensCell(token, probability, probabilityText, isRight = false) {
  return element("td", {class: isRight ? "right" : "", style: {"--fraction": probability}},
    element("span", {}, token), element("small", {}, probabilityText));
}

/* A tooltip that follows the pointer, above all content. */
const tooltip = element("div", {class: "tooltip", hidden: true});
document.body.append(tooltip);

/* Add a tooltip: `textOf(event, x, y)` returns its text, or null; x and y are fractions of the node's size. */
function addTooltip(node, textOf) {
  node.addEventListener("pointermove", (event) => {
    const text = textOf(event, ...fractionsAt(event, node));
    tooltip.hidden = text === null;
    tooltip.textContent = text ?? "";
    const {clientWidth, clientHeight} = document.documentElement, {offsetWidth, offsetHeight} = tooltip;
    const isLow = event.clientY + 18 + offsetHeight > clientHeight;
    tooltip.style.left = `${Math.max(4, Math.min(event.clientX + 14, clientWidth - offsetWidth - 4))}px`;
    tooltip.style.top = `${event.clientY + (isLow ? -offsetHeight - 10 : 18)}px`;
  });
  node.addEventListener("pointerleave", () => { tooltip.hidden = true; });
  return node;
}

/* Return the horizontal and vertical position of an event in a node, as fractions of the node's size. */
function fractionsAt(event, node) {
  const {left, top, width, height} = node.getBoundingClientRect();
  return [(event.clientX - left) / width, (event.clientY - top) / height];
}

/* Arrow keys, Home and End choose one of a group of buttons in rows of `perRow()`. */
function chooseByKeys(group, current, choose, perRow = () => 1) {
  group.addEventListener("keydown", (event) => {
    const at = current(), last = group.children.length - 1, row = perRow();
    const moves = {ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - row, ArrowDown: at + row, Home: 0, End: last};
    const to = moves[event.key];
    if (to === undefined || to < 0 || to > last) return;
    event.preventDefault();
    choose(to);
    group.children[to].focus();
  });
}

/* Mark a button of a group as chosen or not. The Tab key reaches only the chosen button. */
function setChosen(button, isChosen) {
  button.setAttribute("aria-pressed", String(isChosen));
  button.tabIndex = isChosen ? 0 : -1;
}

/* Make the cells of a picture choosable by clicks and arrow keys, and give each a tooltip. */
function addCells(node, {rows, columns, current, choose, tooltipOf}) {
  const cellAt = (x, y) => [Math.floor(y * rows), Math.floor(x * columns)]
    .map((index, axis) => Math.max(0, Math.min([rows, columns][axis] - 1, index)));
  addTooltip(node, (event, x, y) => (x >= 0 && x < 1 && y >= 0 && y < 1 ? tooltipOf(...cellAt(x, y)) : null));
  node.addEventListener("click", (event) => choose(...cellAt(...fractionsAt(event, node))));
  node.addEventListener("keydown", (event) => {
    const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const [row, column] = current();
    choose(Math.min(Math.max(row + step[0], 0), rows - 1), Math.max(column + step[1], 0));
  });
}

/* Return a CSS colour variable as [red, green, blue]. */
function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/* Return the pixel (alpha, blue, green, red) of a colour between two. */
function mix(from, to, fraction) {
  const [red, green, blue] = from.map((x, i) => Math.round(x + (to[i] - x) * fraction));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/* Pixels for attention weights from 0 to 1: paper, tint, deep. They follow the root of a weight, so that small
   weights are visible. */
const SHADES = 1000, darkness = matchMedia("screen and (prefers-color-scheme: dark)");
let shades = null;
darkness.addEventListener("change", () => { shades = null; });

function shadeOf(weight) {
  shades ??= (([paper, tint, deep]) => Uint32Array.from({length: SHADES + 1}, (_, n) => (2 * n < SHADES
    ? mix(paper, tint, (2 * n) / SHADES)
    : mix(tint, deep, (2 * n) / SHADES - 1))))(["--paper", "--tint", "--deep"].map(colour));
  return shades[Math.min(SHADES, Math.round(SHADES * Math.sqrt(weight)))];
}

/* Draw pixels, in rows of `width`, on a canvas. */
function paint(canvas, pixels, width) {
  Object.assign(canvas, {width, height: pixels.length / width});
  canvas.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(pixels.buffer), width), 0, 0);
  return canvas;
}

/* Draw an attention map of at most `most` × `most` cells. A cell of a long text is a block of tokens, with the mean
   of its rows' sums. Masked cells stay transparent. */
function drawMap(canvas, T, rowOf, most) {
  const cells = Math.min(T, most), pixels = new Uint32Array(cells * cells);
  const sums = new Float32Array(cells * cells), counts = new Uint16Array(cells);
  const cellOf = (t) => Math.floor((t * cells) / T);
  for (let query = 0; query < T; query++) {
    const row = cellOf(query), weights_T = rowOf(query);
    counts[row]++;
    for (let key = 0; key <= query; key++) sums[row * cells + cellOf(key)] += weights_T[key];
  }
  for (let row = 0; row < cells; row++) {
    for (let cell = row * cells; cell <= row * cells + row; cell++) pixels[cell] = shadeOf(sums[cell] / counts[row]);
  }
  return paint(canvas, pixels, cells);
}

/* Return a sentence about an attention weight. */
function attentionText(tokens, query, key, weight) {
  return key > query ? `“${tokens[query]}” can't see “${tokens[key]}”, which comes later`
    : `“${tokens[query]}” gives ${percent(weight)} to “${tokens[key]}”`;
}

/* Return a map with its tokens on both axes, and a frame around the chosen cell and the first `framed` cells of its row. */
function labelledMap({tokens, rowOf, query, key = -1, framed = query + 1, choose = () => {},
  canvas = drawMap(element("canvas"), tokens.length, rowOf, LARGE_CELLS),
  textOf = (t, s) => attentionText(tokens, t, s, rowOf(t)[s])}) {
  const T = tokens.length, picture = element("div", {class: "picture", tabindex: 0, role: "img",
    "aria-label": "a row for each token: arrow keys move among the cells"}, canvas);
  addCells(picture, {rows: T, columns: T, current: () => [query, key], choose: (t, s) => choose(t, Math.min(s, T - 1)), tooltipOf: textOf});
  const axis = (name) => element("div", {class: name, "aria-hidden": "true"}, ...tokens.map((token, t) =>
    element("span", {class: `${t === query ? "now" : ""} ${token.length > 1 ? "long" : ""}`}, token)));
  return element("div", {class: "labelled", style: {"--tokens": T, "--row": query, "--column": key, "--framed": framed}},
    axis("columns"), axis("rows"), picture);
}

/* Draw a table of probabilities. */
function tableCanvas(rows) {
  return paint(element("canvas"), Uint32Array.from(rows.flatMap((row) => Array.from(row, shadeOf))), rows[0].length);
}

const SMALL_CELLS = 96, LARGE_CELLS = 512;
const ARC_STEP = 28; // pixels between two tokens

/* All heads over a text: the text, thumbnails of all heads, and one head as a map or arcs.

   `attention` is {tokens, layers, heads, row(layer, head, t), isOff(layer, head)}: texts, counts, the attention
   weights (t + 1) of token t, and whether a head is switched off. */
class HeadsView {
  constructor({onToken = () => {}, onHead = () => {}, switchHead} = {}) {
    Object.assign(this, {onToken, onHead, layer: 0, head: 0, token: 0, key: 0, arcs: false});
    page.switch.hidden = switchHead === undefined;
    page.switch.addEventListener("click", () => switchHead(this.layer, this.head));
    page["as-arcs"].addEventListener("click", () => {
      this.arcs = !this.arcs;
      page["as-arcs"].setAttribute("aria-pressed", String(this.arcs));
      this.showHead();
    });
    chooseByKeys(page.text, () => this.token, (t) => this.chooseToken(t));
    chooseByKeys(page.thumbnails, () => this.number, (n) => this.chooseHead(n), () => this.attention.heads);
    page.text.addEventListener("pointerover", (event) => {
      const t = [...page.text.children].indexOf(event.target.closest("button"));
      if (t >= 0 && t !== this.token && event.pointerType === "mouse") this.chooseToken(t);
    });
    darkness.addEventListener("change", () => this.attention && this.show(this.attention));
  }

  /* The index of the chosen head among the heads of all layers. */
  get number() { return this.layer * this.attention.heads + this.head; }

  get T() { return this.attention.tokens.length; }

  row(t) { return this.attention.row(this.layer, this.head, t); }

  async show(attention) {
    const {layers, heads} = attention;
    this.attention = {isOff: () => false, ...attention};
    this.token = Math.min(this.token, this.T - 1);
    this.layer = Math.min(this.layer, Math.max(0, layers - 1));
    this.head = Math.min(this.head, Math.max(0, heads - 1));
    page["heads-body"].hidden = page["head-bar"].hidden = layers === 0;
    this.showText();
    if (layers === 0) return;
    this.showHead();
    await this.showThumbnails();
  }

  chooseToken(t, key = t) {
    Object.assign(this, {token: t, key});
    this.showText();
    if (this.attention.layers) {
      this.showHead();
      this.showLargestWeights();
    }
    this.onToken(t);
  }

  chooseHead(number) {
    this.layer = Math.floor(number / this.attention.heads);
    this.head = number % this.attention.heads;
    [...page.thumbnails.children].forEach((button, other) => setChosen(button, other === number));
    this.showText();
    this.showHead();
    this.onHead(this.layer, this.head);
  }

  /* Show the tokens, tinted by the chosen token's attention. */
  showText() {
    const {tokens, layers} = this.attention, weights_T = layers ? this.row(this.token) : [];
    while (page.text.children.length > this.T) page.text.lastChild.remove();
    for (let t = page.text.children.length; t < this.T; t++) {
      page.text.append(element("button", {type: "button", onclick: () => this.chooseToken(t)}));
    }
    [...page.text.children].forEach((button, t) => {
      if (button.textContent !== tokens[t]) button.textContent = tokens[t];
      button.style.setProperty("--fraction", t <= this.token && layers ? weights_T[t].toFixed(3) : 0);
      setChosen(button, t === this.token);
    });
    page.chosen.textContent = `token ${this.token + 1} of ${this.T}, “${tokens[this.token]}”`;
  }

  async showThumbnails() {
    const {attention} = this, {layers, heads, row, isOff} = attention, pause = new Pause();
    for (const [name, count] of [["--heads", heads], ["--layers", layers]]) page.thumbnails.style.setProperty(name, count);
    if (page.thumbnails.children.length !== layers * heads) {
      page.thumbnails.replaceChildren(...Array.from({length: layers * heads}, (_, n) => element("button",
        {type: "button", onclick: () => this.chooseHead(n)},
        element("canvas", {width: 1, height: 1}), element("span"), element("small"))));
    }
    for (const [n, button] of [...page.thumbnails.children].entries()) {
      const layer = Math.floor(n / heads), head = n % heads, off = isOff(layer, head);
      setChosen(button, n === this.number);
      button.classList.toggle("off", off);
      button.children[1].textContent = `layer ${layer + 1} head ${head + 1}${off ? ", off" : ""}`;
      drawMap(button.children[0], this.T, (t) => row(layer, head, t), SMALL_CELLS);
      await pause.yieldIfDue();
      if (this.attention !== attention) return;
    }
    this.showLargestWeights();
  }

  /* Show the largest attention weight of the chosen token, below each head. */
  showLargestWeights() {
    const {heads, tokens, row} = this.attention;
    [...page.thumbnails.children].forEach((button, n) => {
      const weights_T = row(Math.floor(n / heads), n % heads, this.token), [key] = topK(weights_T, 1);
      button.children[2].textContent = `${percent(weights_T[key])} “${tokens[key]}”`;
    });
  }

  showHead() {
    const {tokens, isOff} = this.attention, weights_T = this.row(this.token), off = isOff(this.layer, this.head);
    const keys = topK(weights_T, 8).filter((key, n) => n === 0 || weights_T[key] >= 0.001);
    const largest = keys.slice(0, 3).map((key) => `${percent(weights_T[key])} “${tokens[key]}”`).join(", ");
    page["head-caption"].textContent = `Layer ${this.layer + 1}, head ${this.head + 1}`
      + `${off ? " (switched off)" : ""}: “${tokens[this.token]}” attends to ${largest}`;
    page.switch.setAttribute("aria-pressed", String(off));
    page.switch.textContent = off ? "Switch this head on" : "Switch this head off";
    page.large.replaceChildren(this.arcs ? this.arcsOf(weights_T) : this.map());
    if (this.arcs) page.large.scrollLeft = (this.token + 0.5) * ARC_STEP - page.large.clientWidth / 2;
    page.most.replaceChildren(bars(keys.map((key) => [tokens[key], weights_T[key]])));
  }

  map() {
    const {tokens} = this.attention;
    return labelledMap({tokens, rowOf: (t) => this.row(t), query: this.token, key: this.key, choose: (query, cell) => {
      const key = Math.min(query, cell);
      this.chooseToken(query, key);
      page["head-caption"].textContent = attentionText(tokens, query, key, this.row(query)[key]);
      page.large.querySelector(".picture").focus();
    }});
  }

  /* Return arcs from the chosen token to the keys, as thick as the attention weights; to itself, a loop. */
  arcsOf(weights_T) {
    const {tokens} = this.attention, width = this.T * ARC_STEP, at = (t) => (t + 0.5) * ARC_STEP;
    const keys = [...weights_T.keys()].filter((key) => weights_T[key] >= 0.005);
    const rise = (key) => Math.min(240, 40 + 0.5 * Math.abs(at(this.token) - at(key))); // of the control points
    const height = 50 + 0.75 * Math.max(...keys.map(rise)), line = height - 24, start = line - 16;
    const curves = keys.map((key) => {
      const [from, to] = key === this.token ? [at(key) - 8, at(key) + 8] : [at(this.token), at(key)];
      const weight = weights_T[key], top = start - rise(key);
      return element("path", {d: `M ${from} ${start} C ${from} ${top}, ${to} ${top}, ${to} ${start}`,
        "stroke-width": Math.max(0.5, 9 * weight), stroke: "var(--arc)", fill: "none"},
      element("title", {}, attentionText(tokens, this.token, key, weight)));
    });
    const labels = tokens.map((token, t) => element("text", {x: at(t), y: line + 4, "text-anchor": "middle",
      fill: "currentColor", class: t === this.token ? "now" : "", onclick: () => this.chooseToken(t)}, token));
    return element("svg", {class: "arcs", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": page["head-caption"].textContent}, ...curves, ...labels);
  }
}

/* Lets a long computation yield to the event loop, so that the page stays responsive. */
class Pause {
  constructor(milliseconds = 15) { Object.assign(this, {milliseconds, since: performance.now()}); }

  async yieldIfDue() {
    if (performance.now() - this.since <= this.milliseconds) return;
    await eventLoop();
    this.since = performance.now();
  }

  /* Run a generator and return its result, or undefined if `isStopped()` becomes true. */
  async run(generator, isStopped = () => false) {
    for (let step = generator.next(); ; step = generator.next()) {
      if (step.done) return step.value;
      await this.yieldIfDue();
      if (isStopped()) return undefined;
    }
  }
}

/* Yield to the event loop. A message returns earlier than a timer. */
function eventLoop() {
  return new Promise((resolve) => {
    const {port1, port2} = new MessageChannel();
    port1.onmessage = () => { port1.close(); resolve(); };
    port2.postMessage(null);
  });
}
