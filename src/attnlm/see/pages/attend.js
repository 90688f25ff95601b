/* Recorded attention over a text, which see/attend_page.py packs. */

import {bytesOf} from "./arrays.js";
import {bars, element, lensCell, page, withCommas} from "./components.js";
import {HeadsView} from "./heads_view.js";

const STEPS = 255; // of a stored weight, from 0 to 1

/* Show the recorded attention, and what comes after the chosen token. */
export function showAttention({tokens, layers, heads, maps, next, lens}) {
  const T = tokens.length;
  const rowOf = maps && unpackMaps(maps);
  const showToken = (t) => {
    showNextTokens(next, t);
    if (lens?.rows.length) showLens(lens, tokens, t);
  };
  const view = new HeadsView({onToken: showToken});
  view.token = T - 1;
  view.key = T - 1;
  view.show({tokens, layers, heads, row: (layer, head, t) => rowOf((layer * heads + head) * T + t, t)});
  page.temperature.addEventListener("input", () => showNextTokens(next, view.token));
  showToken(view.token);
}

/* Return a function from a row of a map to its weights (t + 1). Head n has the rows n·T to n·T + T − 1. Stored
   weights are in steps of 1/255; the rest of a row is divided equally among its other columns. */
function unpackMaps({least, counts, columns, steps}) {
  const countOf = new Uint16Array(bytesOf(counts).buffer);
  const columnOf = new Uint16Array(bytesOf(columns).buffer);
  const stepsOf = bytesOf(steps);
  const starts = new Uint32Array(countOf.length + 1);
  countOf.forEach((count, row) => { starts[row + 1] = starts[row] + count; });
  return (row, t) => {
    const start = starts[row];
    const stored = stepsOf.subarray(start, starts[row + 1]);
    const others = t + 1 - stored.length;
    const rest = Math.max(0, STEPS - stored.reduce((sum, x) => sum + x, 0));
    const weights_T = new Float32Array(t + 1).fill(others ? Math.min(rest / others, least - 0.5) / STEPS : 0);
    stored.forEach((x, i) => { weights_T[columnOf[start + i]] = x / STEPS; });
    return weights_T;
  };
}

/* Show the likeliest tokens after token t. A candidate is a token and its logit minus the largest; the sums are over
   the whole vocabulary, one per temperature. */
function showNextTokens({candidates, sums, temperatures, vocabulary}, t) {
  const index = Math.round(10 * page.temperature.valueAsNumber) - 1;
  const temperature = temperatures[index];
  const pairs = candidates[t].map(([token, logit]) => [token, Math.exp(logit / temperature) / sums[t][index]]);
  const others = vocabulary - pairs.length;
  const rest = pairs.reduce((left, [, probability]) => left - probability, 1);
  if (others > 0) pairs.push([`${withCommas(others)} others`, Math.max(0, rest)]);
  page.next.replaceChildren(bars(pairs));
  page["temperature-shown"].textContent = temperature.toFixed(1);
}

/* Show the likeliest tokens that the LM head reads in each layer's stream after token t. */
function showLens({words, ids, percents, rows}, tokens, t) {
  const T = tokens.length;
  const K = ids.length / rows.length / T;
  const cell = (layer, k) => {
    const at = (layer * T + t) * K + k;
    return lensCell(words[ids[at]], percents[at] / 100, `${percents[at]}%`);
  };
  page["lens-token"].textContent = `token ${t + 1}, ${tokens[t]}`;
  page["lens-at"].replaceChildren(element("tbody", {}, ...rows.map((name, layer) => element("tr", {},
    element("th", {scope: "row"}, name), ...Array.from({length: K}, (_, k) => cell(layer, k))))));
}
