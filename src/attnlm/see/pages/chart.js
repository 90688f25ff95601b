/* Losses by steps, tokens or seconds, as an SVG image. */

import {element, fractionsAt, withCommas} from "./components.js";

const WIDTH = 480; // of the image's coordinates
const LEFT = 30;
const RIGHT = 472;
const TOP = 14;
const BOTTOM = 268;
const LARGEST_LOSS = 20; // higher losses do not stretch the axis
const TICKS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5]; // possible distances between two losses on the axis
const MOST_TICKS = 6;

/* Return the number at which an event is on an axis from 0 to `end`. */
export function stepAt(event, chart, end) {
  const [x] = fractionsAt(event, chart);
  return ((x * WIDTH - LEFT) / (RIGHT - LEFT)) * end;
}

/* Draw curves. `lines` have {name, points, colour, band, shares}: `points` are pairs of x and a loss, `band` has [x,
   lowest, highest] of several seeds, and `shares` are pairs of x and the share of right answers. Without a colour, the
   name is a class of the stylesheet. `baselines` are pairs of a name and a loss; `marked` is the x that the page shows.
   The axis ends at `end`, or else at the last x; it begins at 0 unless it is logarithmic. */
export function drawChart(chart, {x = "step", isLogarithmic = false, end, baselines, lines, marked}) {
  const all = lines.flatMap(({points}) => points);
  const last = end ?? Math.max(...all.map(([place]) => place));
  const first = isLogarithmic ? Math.min(...all.map(([place]) => place).filter((place) => place > 0)) : 0;
  const highest = Math.max(...baselines.map(([, loss]) => loss), ...all.map(([, loss]) => Math.min(LARGEST_LOSS, loss)));
  const most = 1.04 * highest;
  const fraction = (place) => (isLogarithmic ? Math.log(Math.max(place, first) / first) / Math.log(last / first)
    : place / last);
  const xOf = (place) => LEFT + (RIGHT - LEFT) * (fraction(place) || 0);
  const yOf = (loss) => BOTTOM - (BOTTOM - TOP) * Math.min(1, Math.max(0, loss) / most);
  const place = ([at, loss]) => `${xOf(at).toFixed(1)} ${yOf(loss).toFixed(1)}`;
  const path = (name, places, style = {}) => (
    element("path", {class: name, style, d: places.length ? `M${places.map(place).join("L")}` : ""}));
  const tick = TICKS.find((distance) => most / distance <= MOST_TICKS) ?? 5;
  const ticks = Array.from({length: Math.floor(most / tick) + 1}, (_, n) => n * tick);
  chart.replaceChildren(
    ...baselines.map(([, loss]) => path("baseline", [[first, loss], [last, loss]])),
    path("axis", [[first, 0], [last, 0]]),
    ...ticks.map((loss) => label(`${Number(loss.toFixed(2))}`, LEFT - 4, yOf(loss) + 4, "end")),
    label(`${x} ${withCommas(first)}`, LEFT, BOTTOM + 16, "start"),
    label(`${withCommas(last)}${isLogarithmic ? ", logarithmic" : ""}`, RIGHT, BOTTOM + 16, "end"),
    ...(marked === undefined ? [] : [path("mark", [[marked, 0], [marked, most]])]),
    ...lines.flatMap(({name, points, colour, band = [], shares = []}, n) => [
      path("band", [...band.map(([at, low]) => [at, low]), ...band.map(([at, , high]) => [at, high]).reverse()],
        {fill: colour}),
      path("shares", shares.map(([at, share]) => [at, share * most]), colour && {stroke: colour}),
      path(colour ? `curve dash-${n % 3}` : name, points, colour && {stroke: colour}),
    ]),
    ...baselines.map(([name, loss]) => label(`${name} ${loss.toFixed(2)}`, RIGHT, yOf(loss) - 4, "end")));
  if (lines.some(({shares}) => shares?.length)) chart.append(label("100% right (dotted)", RIGHT, TOP - 2, "end"));
}

/* Return the names of curves with their colours and last losses, from high to low. */
export function legend(lines) {
  const sorted = lines.filter(({points}) => points.length).sort((a, b) => b.points.at(-1)[1] - a.points.at(-1)[1]);
  return element("ul", {class: "legend"}, ...sorted.map(({name, colour, points}) => element("li", {},
    element("span", {class: "dot", style: {background: colour}}), `${name} ${points.at(-1)[1].toFixed(3)}`)));
}

function label(text, x, y, anchor) { return element("text", {x, y, "text-anchor": anchor}, text); }
