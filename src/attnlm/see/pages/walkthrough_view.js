/* The walkthrough of the chosen head: a step with its matrices, and the arithmetic of one number of its result. */

import {largestIndices} from "./arrays.js";
import {addCells, element, numberText, page} from "./components.js";
import {blend, colour, paint, shadeOf} from "./maps.js";
import {HeadWalkthrough} from "./walkthrough.js";

const MOST_COLUMNS = 96;
const MOST_NAMES = 32; // of rows
const MOST_TERMS = 64; // rows of the arithmetic
const WHITE = 6; // a score this far below the largest score of its row is white

export class WalkthroughView {
  steps = [];
  name = ""; // of the step that is shown
  cell = null; // the chosen [row, column] of its result
  figure = null; // of its result

  constructor(headsView) {
    this.headsView = headsView;
    page["previous-step"].addEventListener("click", () => this.moveTo(this.number - 1));
    page["next-step"].addEventListener("click", () => this.moveTo(this.number + 1));
  }

  /* The index of the step that is shown, or −1. */
  get number() { return this.steps.findIndex(({name}) => name === this.name); }

  /* Show the chosen head's steps, at the step that was shown before. */
  show({model, cache}) {
    this.steps = new HeadWalkthrough(model, cache, this.headsView.layer, this.headsView.head).steps;
    this.showStep(Math.max(0, this.number));
  }

  showStep(number) {
    const step = this.steps[number];
    const made = step.make();
    if (step.name !== this.name) {
      this.name = step.name;
      this.cell = null;
    }
    const figures = made.operands.map((matrix) => matrixFigure(matrix));
    const choose = (r, c) => this.chooseCell(made, figures, r, c);
    this.figure = matrixFigure(made.result, {choose, current: () => this.cell});
    this.showFlow(number);
    page.walkthrough.replaceChildren(
      element("div", {class: "operands"}, ...withSigns(figures, made.sign ?? "+")),
      element("div", {class: "becomes", "aria-hidden": "true"}),
      element("div", {class: "outcome"}, this.figure.node, page.explanation));
    choose(...this.initialCell(step.name, made.result));
  }

  /* Show the names of all steps, and the title of step `number`. */
  showFlow(number) {
    const {steps, headsView} = this;
    const last = steps.length - 1;
    page.flow.replaceChildren(...steps.map(({name}, other) => element("button", {
      type: "button",
      onclick: () => this.moveTo(other),
      "aria-current": other === number ? "step" : undefined,
      class: ["q", "k"].includes(name) ? "parallel" : "",
    }, name)));
    page["step-title"].textContent = `${number + 1} of ${steps.length}: ${steps[number].title}`;
    page["previous-step"].disabled = number === 0;
    page["next-step"].disabled = number === last && headsView.layer + 1 >= headsView.attention.layers;
  }

  /* Return the chosen cell if the result has it, or the largest number of the last row. */
  initialCell(name, {values, shading}) {
    const {cell} = this;
    if (cell && cell[1] < (values[cell[0]]?.length ?? 0)) return cell;
    const lastRow = values.length - 1;
    const shown = values[lastRow].subarray(0, MOST_COLUMNS);
    return [lastRow, largestIndices(shading || name === "logits" ? shown : shown.map(Math.abs), 1)[0]];
  }

  /* Show the arithmetic of a number of the result, and frame it and what it is made of. */
  chooseCell({result, at, explain}, figures, r, c) {
    this.cell = [r, c];
    const sources = at(r, c);
    figures.forEach((figure, n) => figure.frame(...(sources[n] ?? [-1])));
    this.figure.frame(r, c);
    showArithmetic(equation(result, r, c), explain(r, c));
  }

  /* Go to a step; after the last one, to the next layer. */
  moveTo(number) {
    const {steps, headsView} = this;
    if (number === steps.length) {
      this.name = "";
      headsView.chooseHead((headsView.layer + 1) * headsView.attention.heads + headsView.head);
      return;
    }
    this.showStep(number);
  }
}

/* Return the figures' elements, with a sign between two. */
function withSigns(figures, sign) {
  return figures.flatMap(({node}, n) => (n ? [element("p", {class: "sign"}, sign), node] : [node]));
}

/* Return a matrix as a picture with {node, name, frame(r, c)}. Its numbers can be chosen if there is a `choose`;
   `current()` is the chosen one. */
function matrixFigure(matrix, {choose, current = () => null} = {}) {
  const {name, axes, rows, values, count = rows.length} = matrix;
  const widest = Math.max(...values.map((x) => x.length), 1);
  const columns = Math.min(widest, MOST_COLUMNS);
  const exists = (r, c) => c < Math.min(columns, values[r].length);
  const label = `${name}${choose ? ": arrow keys move among its numbers" : ""}`;
  const picture = element("div",
    {class: "matrix", role: "img", tabindex: choose ? 0 : undefined, "aria-label": label},
    matrixCanvas(matrix, columns));
  addCells(picture, {
    rows: rows.length,
    columns,
    current,
    choose: (r, c) => { if (choose && exists(r, c)) choose(r, c); },
    tooltipOf: (r, c) => (exists(r, c) ? equation(matrix, r, c) : "masked: a later token"),
  });
  const isCut = count > rows.length || widest > columns;
  const size = `${axes} = ${count} × ${widest}${isCut ? ", a part" : ""}`;
  const node = element("figure",
    {class: "step", "data-name": name, style: {"--rows": rows.length, "--columns": columns}},
    element("figcaption", {}, element("strong", {}, name), " ", element("small", {}, size)),
    element("div", {class: "row-of"}, rowNames(rows), picture));
  return {node, name, frame: (r, c) => frameCell(picture, r, c, rows.length, columns)};
}

function rowNames(rows) {
  if (rows.length > MOST_NAMES) return "";
  return element("div", {class: "row-names", "aria-hidden": "true"},
    ...rows.map((text) => element("span", {}, text.replace(/^“|”$/g, ""))));
}

/* Frame number [r, c] of a picture, or row r if c is undefined; row −1 frames nothing. */
function frameCell(picture, r, c, rows, columns) {
  for (const old of picture.querySelectorAll(".highlight")) old.remove();
  if (r < 0 || r >= rows) return;
  const part = (index, all) => (index === undefined ? [0, 100] : [(100 * index) / all, 100 / all]).map((x) => `${x}%`);
  const [top, height] = part(r, rows);
  const [left, width] = part(c, columns);
  picture.append(element("div", {class: "highlight", style: {top, height, left, width}}));
}

function equation({name, rows, columnName, values}, r, c) {
  return `${name}[${rows[r]}, ${columnName(c)}] = ${numberText(values[r][c])}`;
}

function largestMagnitude(values) { return values.reduce((most, x) => Math.max(most, Math.abs(x)), 1e-30); }

/* Draw a matrix. Shares are tinted as in attention maps, scores by their distance from the largest of their row; other
   numbers are blue above zero and orange below, as strong as they are large. */
function matrixCanvas({values, shading}, columns) {
  const pixels = new Uint32Array(values.length * columns);
  const most = Math.max(...values.map(largestMagnitude));
  const [paper, above, below] = ["--shade", "--deep", "--training"].map(colour);
  values.forEach((x, r) => {
    const largest = x.reduce((a, b) => Math.max(a, b), -Infinity);
    x.subarray(0, columns).forEach((y, c) => {
      if (shading === "share") pixels[r * columns + c] = shadeOf(y);
      else if (shading === "below") pixels[r * columns + c] = shadeOf(Math.max(0, 1 - (largest - y) / WHITE) ** 2);
      else pixels[r * columns + c] = blend(paper, y < 0 ? below : above, Math.sqrt(Math.abs(y) / most));
    });
  });
  return paint(element("canvas"), pixels, columns);
}

/* Show how a number is computed, with the factors and products of each index in one row. */
function showArithmetic(title, {columns, rowNames: names, totals = [], marked}) {
  const length = columns[0]?.[1].length ?? 0;
  const first = Math.max(0, Math.min((marked ?? 0) - MOST_TERMS / 2, length - MOST_TERMS));
  const shown = [...Array(length).keys()].slice(first, first + MOST_TERMS);
  const terms = element("div", {class: "terms", tabindex: 0, role: "region", "aria-label": "arithmetic"},
    termTable(columns, shown, names, marked));
  page.explanation.replaceChildren(
    element("p", {}, element("strong", {}, title)),
    ...totals.map(([label, x]) => element("p", {class: "total"}, `${label}: `, element("strong", {}, numberText(x)))),
    ...(length ? [terms] : []),
    ...(length > shown.length ? [element("p", {class: "note"}, `${shown.length} of ${length} rows`)] : []));
  const row = terms.querySelector(".marked");
  if (row) terms.scrollTop = row.offsetTop - terms.clientHeight / 2;
}

/* Return a table of columns, [label, vector], with a row for each of the indices `shown`. */
function termTable(columns, shown, names, marked) {
  const most = columns.map(([, values]) => largestMagnitude(values));
  const cell = (value, largest) => element("td", {
    class: value < 0 ? "negative" : "",
    style: {"--fraction": (Math.abs(value) / largest).toFixed(3)},
  }, numberText(value));
  const rowOf = (i) => element("tr", {class: i === marked ? "marked" : ""},
    element("th", {scope: "row"}, names?.[i] ?? `${i + 1}`),
    ...columns.map(([, values], n) => cell(values[i], most[n])));
  const labels = columns.map(([label]) => element("th", {scope: "col"}, label));
  return element("table", {class: "arithmetic"},
    element("thead", {}, element("tr", {}, element("th"), ...labels)),
    element("tbody", {}, ...shown.map(rowOf)));
}
