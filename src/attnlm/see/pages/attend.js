"use strict";
// The text, the grid of all heads, and the chosen head: its map, and its tint on the text.
// attend_page.py says what a page holds of the maps: some columns of each row, in steps of 1/255.
const data = JSON.parse(document.getElementById("data").textContent);
const count = data.tokens.length;
const text = document.getElementById("text");
const buttons = [...text.querySelectorAll("button")];
const headButtons = [...document.querySelectorAll("#overview button")];
const map = document.getElementById("map");
const maps = data.maps === null ? null : unpacked(data.maps);
const smallCells = Math.min(count, 48);
const largeCells = Math.min(count, 256);
let chosen = count - 1;
let chosenHead = 0;

function bytes(base64) {
  const characters = atob(base64);
  const found = new Uint8Array(characters.length);
  for (let i = 0; i < found.length; i++) found[i] = characters.charCodeAt(i);
  return found;
}

function unpacked({ least, counts, columns, steps }) {
  const perRow = new Uint16Array(bytes(counts).buffer);
  const starts = new Uint32Array(perRow.length + 1);
  for (let row = 0; row < perRow.length; row++) starts[row + 1] = starts[row] + perRow[row];
  const held = { columns: new Uint16Array(bytes(columns).buffer), steps: bytes(steps) };
  return { starts, ...held, mostOfOthers: least - 0.5 };
}

// Where the shares of a head's row lie, and what each of its other tokens has, in steps of 1/255.
function rowOf(head, place) {
  const [start, end] = [maps.starts[head * count + place], maps.starts[head * count + place + 1]];
  let rest = 255;
  for (let i = start; i < end; i++) rest -= maps.steps[i];
  const others = place + 1 - (end - start);
  const each = others === 0 ? 0 : Math.min(Math.max(0, rest) / others, maps.mostOfOthers);
  return [start, end, each];
}

function sharesOf(head, place) {
  const [start, end, each] = rowOf(head, place);
  const shares = new Float32Array(place + 1).fill(each / 255);
  for (let i = start; i < end; i++) shares[maps.columns[i]] = maps.steps[i] / 255;
  return shares;
}

// A head's map in cells: of as many tokens each that there are few enough, rows as their mean.
function inCells(head, cells) {
  const edges = Array.from({ length: cells + 1 }, (_, cell) => Math.ceil((cell * count) / cells));
  const cellOf = Uint16Array.from({ length: count }, (_, place) => (place * cells) / count);
  const shares = new Float32Array(cells * cells);
  for (let place = 0; place < count; place++) {
    const [start, end, each] = rowOf(head, place);
    const line = cellOf[place];
    const weight = 1 / 255 / (edges[line + 1] - edges[line]);
    for (let cell = 0; cell <= line; cell++) {
      const columns = Math.min(edges[cell + 1], place + 1) - edges[cell];
      shares[line * cells + cell] += weight * each * columns;
    }
    for (let i = start; i < end; i++) {
      shares[line * cells + cellOf[maps.columns[i]]] += weight * (maps.steps[i] - each);
    }
  }
  return shares;
}

function tint() {
  const hex = getComputedStyle(document.documentElement).getPropertyValue("--tint").trim();
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// The square root of a share is how opaque a cell is, so that small shares can be seen.
function draw(canvas, head, cells, [red, green, blue]) {
  canvas.width = canvas.height = cells;
  const context = canvas.getContext("2d");
  const picture = context.createImageData(cells, cells);
  const pixels = picture.data;
  const shares = inCells(head, cells);
  for (let cell = 0; cell < shares.length; cell++) {
    pixels[4 * cell] = red;
    pixels[4 * cell + 1] = green;
    pixels[4 * cell + 2] = blue;
    pixels[4 * cell + 3] = Math.round(255 * Math.sqrt(Math.max(0, shares[cell])));
  }
  context.putImageData(picture, 0, 0);
}

function drawAll() {
  const colour = tint();
  draw(map, chosenHead, largeCells, colour);
  headButtons.forEach((button, head) => draw(button.firstChild, head, smallCells, colour));
}

// In words, the tokens of a row with the largest shares, as many as `most`.
function mostOf(head, place, most) {
  const [start, end, each] = rowOf(head, place);
  const largest = [];
  for (let i = start; i < end; i++) {
    const before = largest.findIndex((other) => maps.steps[i] > maps.steps[other]);
    largest.splice(before < 0 ? largest.length : before, 0, i);
    largest.length = Math.min(largest.length, most);
  }
  if (largest.length === 0) return `${(each / 2.55).toFixed(1)}% each`;
  const inWords = (i) => `${Math.round(maps.steps[i] / 2.55)}% ${data.tokens[maps.columns[i]]}`;
  return largest.map(inWords).join(", ");
}

function nameOf(head) {
  return `layer ${Math.floor(head / data.heads) + 1} head ${(head % data.heads) + 1}`;
}

function press(from, to) {
  from.setAttribute("aria-pressed", "false");
  from.tabIndex = -1;
  to.setAttribute("aria-pressed", "true");
  to.tabIndex = 0;
}

function showRow() {
  const shares = sharesOf(chosenHead, chosen);
  buttons.forEach((button, place) => {
    button.style.setProperty("--share", place <= chosen ? shares[place].toFixed(3) : 0);
  });
  map.parentElement.style.setProperty("--row", chosen);
  document.getElementById("head-caption").textContent =
    `${nameOf(chosenHead)}: token ${chosen + 1}, ${data.tokens[chosen]}, ` +
    `attends to: ${mostOf(chosenHead, chosen, 3)}`;
}

// What the chosen token attends to: in the chosen head, and at most in every head.
function showPlace() {
  showRow();
  headButtons.forEach((button, head) => {
    button.lastChild.textContent = mostOf(head, chosen, 1);
  });
}

function choose(place) {
  press(buttons[chosen], buttons[place]);
  chosen = place;
  document.getElementById("chosen").textContent = `token ${place + 1}, ${data.tokens[place]}`;
  if (maps !== null) showPlace();
  text.dispatchEvent(new Event("choose"));
}

function chooseHead(head) {
  press(headButtons[chosenHead], headButtons[head]);
  chosenHead = head;
  draw(map, head, largeCells, tint());
  showRow();
}

// Pointing, clicking and the keys choose one of some buttons, in rows of so many.
function listen(element, choices, kinds, perRow, current, pick) {
  for (const kind of kinds) {
    element.addEventListener(kind, (event) => {
      const number = choices.indexOf(event.target.closest("button"));
      if (number >= 0 && number !== current()) pick(number);
    });
  }
  element.addEventListener("keydown", (event) => {
    const [at, last] = [current(), choices.length - 1];
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last };
    if (perRow !== null) Object.assign(moves, { ArrowUp: at - perRow, ArrowDown: at + perRow });
    const to = moves[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to <= last) choices[to].focus();
  });
}

listen(text, buttons, ["pointerover", "focusin", "click"], null, () => chosen, choose);
if (maps !== null) {
  const overview = document.getElementById("overview");
  listen(overview, headButtons, ["focusin", "click"], data.heads, () => chosenHead, chooseHead);
  map.addEventListener("click", (event) => {
    const place = Math.floor((event.offsetY / map.clientHeight) * count);
    choose(Math.max(0, Math.min(place, count - 1)));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
  showPlace();
}
