/* The losses of a run by step, as an SVG image. */

import {element, fractionsAt, withCommas} from "./components.js";

const WIDTH = 480; // of the image's coordinates
const LEFT = 30;
const RIGHT = 472;
const TOP = 14;
const BOTTOM = 268;
const LARGEST_LOSS = 20; // higher validation losses do not stretch the axis

/* Return the step at which an event is in the chart. */
export function stepAt(event, chart, steps) {
  const [x] = fractionsAt(event, chart);
  return ((x * WIDTH - LEFT) / (RIGHT - LEFT)) * steps;
}

/* Draw a run of `steps` steps. `baselines` are pairs of a name and a loss; `training` and `validation` are pairs of a
   step and a loss; `marked` is the step that the page shows. */
export function drawChart(chart, {steps, baselines, training, validation, marked}) {
  const [[, uniform]] = baselines;
  const most = 1.04 * Math.max(uniform, Math.min(LARGEST_LOSS, Math.max(...validation.map(([, loss]) => loss))));
  const xOf = (step) => LEFT + ((RIGHT - LEFT) * step) / steps;
  const yOf = (loss) => BOTTOM - (BOTTOM - TOP) * Math.min(1, loss / most);
  const place = ([step, loss]) => `${xOf(step).toFixed(1)} ${yOf(loss).toFixed(1)}`;
  const line = (name, ...places) => (
    element("path", {class: name, d: places.length ? `M${places.map(place).join("L")}` : ""}));
  chart.replaceChildren(
    ...baselines.flatMap(([name, loss]) => [
      line("baseline", [0, loss], [steps, loss]),
      label(`${name} ${loss.toFixed(2)}`, RIGHT, yOf(loss) - 4, "end"),
    ]),
    line("axis", [0, 0], [steps, 0]),
    label("0", LEFT - 4, BOTTOM + 4, "end"),
    label("step 0", LEFT, BOTTOM + 16, "start"),
    label(withCommas(steps), RIGHT, BOTTOM + 16, "end"),
    line("mark", [marked, 0], [marked, most]),
    line("train", ...training),
    line("validation", ...validation));
}

function label(text, x, y, anchor) { return element("text", {x, y, "text-anchor": anchor}, text); }
