/* What all pages show: elements, token texts, numbers, probability bars, tooltips, and the choice by keys. */

/* The elements of the page by id. */
export const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((node) => [node.id, node]));

/* Create an HTML or SVG element. Attributes: `on…` for event listeners, `style` for CSS properties. */
export function element(tag, attributes = {}, ...content) {
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

/* Return the JSON values that Python wrote into the page. */
export function readData() { return JSON.parse(page.data.textContent); }

/* Return a token with symbols for spaces and line ends, and escapes for other invisible characters. */
export function visible(text) {
  const symbols = {" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"};
  return [...text].map((character) => symbols[character]
    ?? (/[\p{C}\p{Z}\ufeff]/u.test(character) ? `\\u{${character.codePointAt(0).toString(16)}}` : character)).join("");
}

/* Return running text, in which only spaces, tabs and line ends remain invisible. */
export function visibleText(text) { return text.replace(/[^\n\t ]+/g, visible); }

export function percent(fraction) {
  if (fraction > 0 && fraction < 0.0005) return "< 0.1%";
  return `${(100 * fraction).toFixed(fraction < 0.0995 ? 1 : 0)}%`;
}

export function numberText(x) {
  return Math.abs(x) >= 1000 || (x !== 0 && Math.abs(x) < 0.01) ? x.toExponential(1) : x.toFixed(2);
}

/* Return a whole number with commas between its thousands. */
export function withCommas(x) { return x.toLocaleString("en"); }

/* Return bars for [token, probability], or [token, probability, probability before a change]. */
export function bars(rows) {
  const bar = (name, fraction) => element("span", {class: name, style: {"--fraction": fraction.toFixed(4)}});
  return element("ol", {class: "next"}, ...rows.map(([token, probability, before]) => element("li", {},
    element("span", {class: "candidate", title: token}, token),
    ...(before === undefined ? [bar("bar", probability)] : [
      element("span", {class: "bars"}, bar("bar before", before), bar("bar", probability)),
      element("span", {class: "percent before"}, percent(before))]),
    element("span", {class: "percent"}, percent(probability)))));
}

/* Return a cell of a logit lens: the likeliest token, tinted by its probability. */
export function lensCell(token, probability, probabilityText, isRight = false) {
  return element("td", {class: isRight ? "right" : "", style: {"--fraction": probability}},
    element("span", {}, token), element("small", {}, probabilityText));
}

/* A tooltip that follows the pointer, above all content. */
const tooltip = element("div", {class: "tooltip", hidden: true});
document.body.append(tooltip);

/* Add a tooltip: `textOf(event, x, y)` returns its text, or null; x and y are fractions of the node's size. */
export function addTooltip(node, textOf) {
  node.addEventListener("pointermove", (event) => {
    const text = textOf(event, ...fractionsAt(event, node));
    tooltip.hidden = text === null;
    tooltip.textContent = text ?? "";
    const {clientWidth, clientHeight} = document.documentElement;
    const {offsetWidth, offsetHeight} = tooltip;
    const isLow = event.clientY + 18 + offsetHeight > clientHeight;
    tooltip.style.left = `${Math.max(4, Math.min(event.clientX + 14, clientWidth - offsetWidth - 4))}px`;
    tooltip.style.top = `${event.clientY + (isLow ? -offsetHeight - 10 : 18)}px`;
  });
  node.addEventListener("pointerleave", () => { tooltip.hidden = true; });
  return node;
}

/* Return the horizontal and vertical position of an event in a node, as fractions of the node's size. */
export function fractionsAt(event, node) {
  const {left, top, width, height} = node.getBoundingClientRect();
  return [(event.clientX - left) / width, (event.clientY - top) / height];
}

/* Arrow keys, Home and End choose one of a group of buttons in rows of `perRow()`. */
export function chooseByKeys(group, current, choose, perRow = () => 1) {
  group.addEventListener("keydown", (event) => {
    const at = current();
    const last = group.children.length - 1;
    const row = perRow();
    const moves = {ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - row, ArrowDown: at + row, Home: 0, End: last};
    const to = moves[event.key];
    if (to === undefined || to < 0 || to > last) return;
    event.preventDefault();
    choose(to);
    group.children[to].focus();
  });
}

/* Mark a button of a group as chosen or not. The Tab key reaches only the chosen button. */
export function setChosen(button, isChosen) {
  button.setAttribute("aria-pressed", String(isChosen));
  button.tabIndex = isChosen ? 0 : -1;
}

/* Make the cells of a picture choosable by clicks and arrow keys, and give each a tooltip. */
export function addCells(node, {rows, columns, current, choose, tooltipOf}) {
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
