/* All heads over a text: the text, thumbnails of all heads, and the map of one head. */

import {bytesOf, largestIndices} from "./arrays.js";
import {bars, chooseByKeys, element, page, percent, setChosen} from "./components.js";
import {attentionMap, attentionText, darkness, drawMap, SMALL_CELLS} from "./maps.js";
import {Pause} from "./yield_to_event_loop.js";

const MOST_KEYS = 8; // whose attention weights are bars
const NAMED_KEYS = 3; // in the caption

/* `attention` is {tokens, layers, heads, row(layer, head, t), isOff(layer, head)}: texts, counts, the attention
   weights (t + 1) of token t, and whether a head is switched off. */
export class HeadsView {
  attention = null;
  layer = 0;
  head = 0;
  token = 0;
  key = 0;

  /* The functions are called with a chosen token, after the choice of a head, and with a head to switch off or on. */
  constructor({onToken = () => {}, onHead = () => {}, switchHead} = {}) {
    this.onToken = onToken;
    this.onHead = onHead;
    page.switch.hidden = switchHead === undefined;
    page.switch.addEventListener("click", () => switchHead(this.layer, this.head));
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
    this.token = t;
    this.key = key;
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
    this.onHead();
  }

  /* Show the tokens, tinted by the chosen token's attention. */
  showText() {
    const {tokens, layers} = this.attention;
    const weights_T = layers ? this.row(this.token) : [];
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
    const {attention} = this;
    const {layers, heads, row, isOff} = attention;
    const pause = new Pause();
    page.thumbnails.style.setProperty("--heads", heads);
    page.thumbnails.style.setProperty("--layers", layers);
    if (page.thumbnails.children.length !== layers * heads) {
      page.thumbnails.replaceChildren(...Array.from({length: layers * heads}, (_, n) => this.newThumbnail(n)));
    }
    for (const [n, button] of [...page.thumbnails.children].entries()) {
      const layer = Math.floor(n / heads);
      const head = n % heads;
      const off = isOff(layer, head);
      setChosen(button, n === this.number);
      button.classList.toggle("off", off);
      button.children[1].textContent = `layer ${layer + 1} head ${head + 1}${off ? ", off" : ""}`;
      drawMap(button.children[0], this.T, (t) => row(layer, head, t), SMALL_CELLS);
      await pause.yieldIfDue();
      if (this.attention !== attention) return;
    }
    this.showLargestWeights();
  }

  newThumbnail(n) {
    return element("button", {type: "button", onclick: () => this.chooseHead(n)},
      element("canvas", {width: 1, height: 1}), element("span"), element("small"));
  }

  /* Show the largest attention weight of the chosen token, below each head. */
  showLargestWeights() {
    const {heads, tokens, row} = this.attention;
    [...page.thumbnails.children].forEach((button, n) => {
      const weights_T = row(Math.floor(n / heads), n % heads, this.token);
      const [key] = largestIndices(weights_T, 1);
      button.children[2].textContent = `${percent(weights_T[key])} “${tokens[key]}”`;
    });
  }

  showHead() {
    const {tokens, isOff} = this.attention;
    const weights_T = this.row(this.token);
    const off = isOff(this.layer, this.head);
    const keys = largestIndices(weights_T, MOST_KEYS).filter((key, n) => n === 0 || weights_T[key] >= 0.001);
    const largest = keys.slice(0, NAMED_KEYS).map((key) => `${percent(weights_T[key])} “${tokens[key]}”`).join(", ");
    page["head-caption"].textContent = `Layer ${this.layer + 1}, head ${this.head + 1}`
      + `${off ? " (switched off)" : ""}: “${tokens[this.token]}” attends to ${largest}`;
    page.switch.setAttribute("aria-pressed", String(off));
    page.switch.textContent = off ? "Switch this head on" : "Switch this head off";
    page.large.replaceChildren(this.map());
    page.most.replaceChildren(bars(keys.map((key) => [tokens[key], weights_T[key]])));
  }

  map() {
    const {tokens} = this.attention;
    const choose = (query, cell) => {
      const key = Math.min(query, cell);
      this.chooseToken(query, key);
      page["head-caption"].textContent = attentionText(tokens, query, key, this.row(query)[key]);
      page.large.querySelector(".picture").focus();
    };
    return attentionMap({tokens, rowOf: (t) => this.row(t), query: this.token, key: this.key, choose});
  }
}

/* Return the attention weights (t + 1) of token t in map n of maps of T tokens, which attend.py packs. */
export function weightsAt(maps, n, T, t) {
  const start = (n * T * (T + 1)) / 2 + (t * (t + 1)) / 2;
  return Float32Array.from(maps.subarray(start, start + t + 1), (step) => step / 255);
}

/* Show attention that attend.py packed. */
export function showRecordedAttention({tokens, layers, heads, maps}) {
  const bytes = bytesOf(maps);
  const view = new HeadsView();
  view.token = tokens.length - 1;
  view.key = view.token;
  view.show({tokens, layers, heads, row: (layer, head, t) => weightsAt(bytes, layer * heads + head, tokens.length, t)});
}
