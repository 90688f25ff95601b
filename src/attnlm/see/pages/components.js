"use strict";
/* What the pages share: elements, tokens as text, probabilities as bars, and heads: thumbnails, one map with its
   tokens on both axes, arcs, and the text in the tint of what a token attends to. */

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((found) => [found.id, found]));

function element(tag, attributes = {}, ...content) {
  const isDrawing = ["svg", "path", "text", "title", "circle", "line", "g"].includes(tag);
  const found = isDrawing ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) found.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, x] of Object.entries(value)) found.style.setProperty(key, x);
    else if (value !== false && value !== undefined) found.setAttribute(name, value === true ? "" : value);
  }
  found.append(...content);
  return found;
}

/* A token as text that can be read: no invisible signs, none that change the direction of others. */
function visible(text) {
  const names = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"};
  return [...text].map((sign) => names[sign]
    ?? (/[\p{C}\p{Z}\ufeff]/u.test(sign) ? `\\u{${sign.codePointAt(0).toString(16)}}` : sign)).join("");
}

/* Running text as it is, but for signs that are invisible or change the direction of others. */
function displayed(text) {
  return [...text].map((sign) => (/[\n\t ]/.test(sign) ? sign : visible(sign))).join("");
}

function bytesOf(base64) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

function percent(share) {
  if (share > 0 && share < 0.0005) return "< 0.1%";
  return `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)}%`;
}

function numberText(x) { return Math.abs(x) >= 1000 || (x !== 0 && Math.abs(x) < 0.01) ? x.toExponential(1) : x.toFixed(2); }

/* The places of the largest values, the largest first. */
function largest(values, count) {
  const found = [];
  for (const [place, value] of values.entries()) {
    if (found.length === count && value <= values[found[count - 1]]) continue;
    let at = found.length;
    while (at > 0 && values[found[at - 1]] < value) at--;
    found.splice(at, 0, place);
    found.length = Math.min(found.length, count);
  }
  return found;
}

/* Bars for [name, share] pairs. */
function bars(named) {
  return element("ol", {class: "next"}, ...named.map(([name, share]) => element("li", {},
    element("span", {class: "candidate", title: name}, name),
    element("span", {class: "bar", style: {"--share": share.toFixed(4)}}),
    element("span", {class: "percent"}, percent(share)))));
}

/* A note beside the pointer, which follows it; nothing hides it. */
const tip = element("div", {class: "tip", hidden: true});
document.body.append(tip);

function showTip(event, text) {
  tip.hidden = text === null;
  tip.textContent = text ?? "";
  const {clientWidth, clientHeight} = document.documentElement;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, clientWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${event.clientY + 18 + tip.offsetHeight > clientHeight ? event.clientY - tip.offsetHeight - 10 : event.clientY + 18}px`;
}

/* Shows a note for each place of an element: `noteAt(across, down)` gets shares of its width and height, and
   returns the text, or null. */
function explain(found, noteAt) {
  found.addEventListener("pointermove", (event) => {
    const box = found.getBoundingClientRect();
    const across = (event.clientX - box.left) / box.width, down = (event.clientY - box.top) / box.height;
    showTip(event, across >= 0 && across < 1 && down >= 0 && down < 1 ? noteAt(across, down) : null);
  });
  found.addEventListener("pointerleave", (event) => showTip(event, null));
  return found;
}

/* Arrow keys, Home and End move among buttons in rows of so many. */
function moveByKeys(group, current, choose, perRow = () => 1) {
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

/* Arrow keys move by a row or a column. */
function onArrows(found, move) {
  found.addEventListener("keydown", (event) => {
    const by = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (by === undefined) return;
    event.preventDefault();
    move(...by);
  });
}

function colour(name) {
  const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/* Colours for shares from 0 to 1, as the numbers of a picture's pixels: paper, tint, deep. The place of a share is its
   root, so that small shares are seen. */
const SHADES = 1000, darkness = matchMedia("screen and (prefers-color-scheme: dark)");
let shades = null;
darkness.addEventListener("change", () => { shades = null; });

function shadeOf(share) {
  shades ??= (([paper, tint, deep]) => Uint32Array.from({length: SHADES + 1}, (_, n) =>
    (2 * n < SHADES ? mixed(paper, tint, (2 * n) / SHADES) : mixed(tint, deep, (2 * n) / SHADES - 1))))(["--paper", "--tint", "--deep"].map(colour));
  return shades[Math.min(SHADES, Math.round(SHADES * Math.sqrt(share)))];
}

/* A colour between two, as the number of a pixel: alpha, blue, green, red. */
function mixed(from, to, share) {
  const [red, green, blue] = from.map((x, i) => Math.round(x + (to[i] - x) * share));
  return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

/* A map as a picture. Tokens that come later stay transparent: the hatching behind them is the mask. Where tokens
   outnumber cells, a cell is a block of tokens, with the mean of its rows' sums. */
function drawMap(canvas, T, rowOf, most) {
  const cells = Math.min(T, most), context = canvas.getContext("2d");
  canvas.width = canvas.height = cells;
  const cellOf = (t) => Math.floor((t * cells) / T), sums = new Float32Array(cells * cells), rows = new Uint16Array(cells);
  for (let query = 0; query < T; query++) {
    const line = cellOf(query), weights_T = rowOf(query);
    rows[line]++;
    for (let key = 0; key <= query; key++) sums[line * cells + cellOf(key)] += weights_T[key];
  }
  const picture = context.createImageData(cells, cells), pixels = new Uint32Array(picture.data.buffer);
  for (let line = 0; line < cells; line++) {
    for (let cell = line * cells; cell <= line * cells + line; cell++) pixels[cell] = shadeOf(sums[cell] / rows[line]);
  }
  context.putImageData(picture, 0, 0);
}

/* A map with its tokens on both axes. A click, or the arrow keys, choose a cell. */
function labelledMap({tokens, rowOf, query, key = -1, noteOf, onCell = () => {}}) {
  const T = tokens.length, canvas = element("canvas", {width: 1, height: 1});
  drawMap(canvas, T, rowOf, LARGE_CELLS);
  const picture = element("div", {class: "picture", tabindex: 0, role: "img", "aria-label": "a row for each token that attends: arrow keys move among the cells"}, canvas);
  const label = (token, t) => element("span", {class: `${t === query ? "now" : ""} ${token.length > 1 ? "long" : ""}`}, token);
  const place = (share) => Math.max(0, Math.min(T - 1, Math.floor(share * T)));
  explain(picture, (across, down) => noteOf(place(down), place(across)));
  picture.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect(), row = place((event.clientY - box.top) / box.height);
    onCell(row, Math.min(row, place((event.clientX - box.left) / box.width)));
  });
  onArrows(picture, (down, across) => {
    const row = Math.min(Math.max(query + down, 0), T - 1);
    onCell(row, Math.min(Math.max(key + across, 0), row));
  });
  return element("div", {class: "labelled", style: {"--tokens": T, "--row": query, "--column": key}},
    element("div", {class: "columns", "aria-hidden": "true"}, ...tokens.map(label)),
    element("div", {class: "rows", "aria-hidden": "true"}, ...tokens.map(label)), picture);
}

const SMALL_CELLS = 96, LARGE_CELLS = 512;
const ARC_STEP = 28; // pixels between two tokens

/* All heads over a text. `given` is what a page shows at a time:
     tokens             texts
     layers, heads      how many
     row(l, h, t)       the weights (t + 1) of token t
     isOff(l, h)        whether a head is switched off
   The page hears of changes by onToken and onHead. */
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
    moveByKeys(page.text, () => this.token, (t) => this.chooseToken(t));
    moveByKeys(page.thumbnails, () => this.number, (n) => this.chooseNumber(n), () => this.given.heads);
    page.text.addEventListener("pointerover", (event) => {
      const t = [...page.text.children].indexOf(event.target.closest("button"));
      if (t >= 0 && t !== this.token && event.pointerType === "mouse") this.chooseToken(t);
    });
    darkness.addEventListener("change", () => this.show(this.given));
  }

  get number() { return this.layer * this.given.heads + this.head; }

  get T() { return this.given.tokens.length; }

  row(t) { return this.given.row(this.layer, this.head, t); }

  async show(given) {
    this.given = given;
    this.token = Math.min(this.token, this.T - 1);
    this.layer = Math.min(this.layer, Math.max(0, given.layers - 1));
    this.head = Math.min(this.head, Math.max(0, given.heads - 1));
    page["heads-body"].hidden = given.layers === 0;
    this.showText();
    if (given.layers === 0) return;
    this.showHead();
    await this.showThumbnails();
  }

  chooseToken(t, key = t) {
    Object.assign(this, {token: t, key});
    this.showText();
    if (this.given.layers) this.showHead();
    if (this.given.layers) this.showMost();
    this.onToken(t);
  }

  chooseNumber(n) {
    this.layer = Math.floor(n / this.given.heads);
    this.head = n % this.given.heads;
    [...page.thumbnails.children].forEach((button, other) => mark(button, other === n));
    this.showText();
    this.showHead();
    this.onHead(this.layer, this.head);
  }

  /* The text: the tint of a token is what the chosen one gives it. */
  showText() {
    const {tokens, layers} = this.given, weights_T = layers ? this.row(this.token) : [];
    if (page.text.children.length !== this.T) {
      page.text.replaceChildren(...tokens.map((_, t) => element("button", {type: "button", onclick: () => this.chooseToken(t)})));
    }
    [...page.text.children].forEach((button, t) => {
      if (button.textContent !== tokens[t]) button.textContent = tokens[t];
      button.style.setProperty("--share", t <= this.token && layers ? weights_T[t].toFixed(3) : 0);
      mark(button, t === this.token);
    });
    page.chosen.textContent = `token ${this.token + 1} of ${this.T}, “${tokens[this.token]}”`;
  }

  noteOf(query, key) {
    const {tokens} = this.given;
    if (key > query) return `“${tokens[query]}” can't see “${tokens[key]}”, which comes later`;
    return `“${tokens[query]}” gives ${percent(this.row(query)[key])} to “${tokens[key]}”`;
  }

  async showThumbnails() {
    const {layers, heads, isOff = () => false} = this.given, given = this.given, pause = new Pause();
    page.thumbnails.style.setProperty("--heads", heads);
    if (page.thumbnails.children.length !== layers * heads) {
      page.thumbnails.replaceChildren(...Array.from({length: layers * heads}, (_, n) => element("button",
        {type: "button", onclick: () => this.chooseNumber(n)}, element("canvas", {width: 1, height: 1}), element("span"), element("small"))));
    }
    for (const [n, button] of [...page.thumbnails.children].entries()) {
      const layer = Math.floor(n / heads), head = n % heads, off = isOff(layer, head);
      mark(button, n === this.number);
      button.classList.toggle("off", off);
      button.children[1].textContent = `layer ${layer + 1} head ${head + 1}${off ? ", off" : ""}`;
      drawMap(button.children[0], this.T, (t) => given.row(layer, head, t), SMALL_CELLS);
      await pause.rest();
      if (this.given !== given) return;
    }
    this.showMost();
  }

  /* What the chosen token attends to most, below each head. */
  showMost() {
    const {heads, tokens} = this.given;
    [...page.thumbnails.children].forEach((button, n) => {
      const weights_T = this.given.row(Math.floor(n / heads), n % heads, this.token), [most] = largest(weights_T, 1);
      button.children[2].textContent = `${percent(weights_T[most])} “${tokens[most]}”`;
    });
  }

  showHead() {
    const {tokens, isOff = () => false} = this.given, weights_T = this.row(this.token);
    const off = isOff(this.layer, this.head), most = largest(weights_T, 8).filter((key, n) => n === 0 || weights_T[key] >= 0.001);
    page["head-caption"].textContent = `Layer ${this.layer + 1}, head ${this.head + 1}${off ? " (its output is switched off)" : ""}: `
      + `“${tokens[this.token]}” attends to ` + most.slice(0, 3).map((key) => `${percent(weights_T[key])} “${tokens[key]}”`).join(", ");
    page.switch.setAttribute("aria-pressed", String(off));
    page.switch.textContent = off ? "Switch this head on" : "Switch this head off";
    page.large.replaceChildren(this.arcs ? this.arcsOf(weights_T) : this.labelledMap());
    if (this.arcs) page.large.scrollLeft = (this.token + 0.5) * ARC_STEP - page.large.clientWidth / 2;
    page.most.replaceChildren(bars(most.map((key) => [`${tokens[key]}`, weights_T[key]])));
  }

  labelledMap() {
    return labelledMap({
      tokens: this.given.tokens, rowOf: (t) => this.row(t), query: this.token, key: this.key, noteOf: (query, key) => this.noteOf(query, key),
      onCell: (query, key) => {
        this.chooseToken(query, key);
        page["head-caption"].textContent = this.noteOf(query, key);
        page.large.querySelector(".picture").focus();
      }});
  }

  /* Arcs from the chosen token to those that it attends to, as thick as their weights; to itself, a loop. */
  arcsOf(weights_T) {
    const {tokens} = this.given, width = this.T * ARC_STEP, at = (t) => (t + 0.5) * ARC_STEP;
    const shown = [...weights_T.entries()].filter(([, weight]) => weight >= 0.005);
    const rise = (key) => Math.min(240, 40 + 0.5 * Math.abs(at(this.token) - at(key))); // of the control points
    const height = 50 + 0.75 * Math.max(...shown.map(([key]) => rise(key))), line = height - 24, start = line - 16;
    const curves = shown.map(([key, weight]) => {
      const [from, to] = key === this.token ? [at(key) - 8, at(key) + 8] : [at(this.token), at(key)], top = start - rise(key);
      return element("path", {d: `M ${from} ${start} C ${from} ${top}, ${to} ${top}, ${to} ${start}`,
        "stroke-width": Math.max(0.5, 9 * weight), stroke: "var(--arc)", fill: "none"},
      element("title", {}, this.noteOf(this.token, key)));
    });
    const labels = tokens.map((token, t) => element("text", {x: at(t), y: line + 4, "text-anchor": "middle", fill: "currentColor",
      class: t === this.token ? "now" : "", onclick: () => this.chooseToken(t)}, token));
    return element("svg", {class: "arcs", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": page["head-caption"].textContent}, ...curves, ...labels);
  }
}

/* Of some buttons, the chosen one is in the order of the Tab key. */
function mark(button, isChosen) {
  button.setAttribute("aria-pressed", String(isChosen));
  button.tabIndex = isChosen ? 0 : -1;
}

/* Lets the page answer its reader when it has computed for some milliseconds. */
class Pause {
  constructor(milliseconds = 15) {
    this.milliseconds = milliseconds;
    this.since = performance.now();
  }

  async rest() {
    if (performance.now() - this.since <= this.milliseconds) return;
    await answered();
    this.since = performance.now();
  }

  /* The result of work in pieces; undefined if it is stopped between two. */
  async finish(work, isStopped = () => false) {
    for (let step = work.next(); ; step = work.next()) {
      if (step.done) return step.value;
      await this.rest();
      if (isStopped()) return undefined;
    }
  }
}

/* Waits until the page has answered its reader: a message comes after it, and sooner than a timer. */
function answered() {
  return new Promise((resolve) => {
    const {port1, port2} = new MessageChannel();
    port1.onmessage = () => { port1.close(); resolve(); };
    port2.postMessage(null);
  });
}
