"use strict";
/* A page of recorded attention, whose data attend_page.py packs. */
const data = JSON.parse(page.data.textContent), T = data.tokens.length;

/* Return a function from a row of a map to its weights (t + 1). Head n has the rows n·T to n·T + T − 1. Stored
   weights are in steps of 1/255; the rest of a row is divided equally among its other columns. */
function unpackMaps({least, counts, columns, steps}) {
  const countOf = new Uint16Array(bytesOf(counts).buffer), starts = new Uint32Array(countOf.length + 1);
  countOf.forEach((count, row) => { starts[row + 1] = starts[row] + count; });
  const columnOf = new Uint16Array(bytesOf(columns).buffer), stepsOf = bytesOf(steps);
  return (row, t) => {
    const start = starts[row], stored = stepsOf.subarray(start, starts[row + 1]), others = t + 1 - stored.length;
    const rest = Math.max(0, 255 - stored.reduce((sum, x) => sum + x, 0));
    const weights_T = new Float32Array(t + 1).fill(others ? Math.min(rest / others, least - 0.5) / 255 : 0);
    stored.forEach((x, i) => { weights_T[columnOf[start + i]] = x / 255; });
    return weights_T;
  };
}

/* Show the likeliest tokens after token t. A candidate is a token and its logit minus the largest; the sums are over
   the whole vocabulary, one per temperature. */
function showNextTokens(t) {
  const {candidates, sums, temperatures, vocabulary} = data.next;
  const index = Math.round(10 * page.temperature.valueAsNumber) - 1, temperature = temperatures[index];
  const pairs = candidates[t].map(([token, logit]) => [token, Math.exp(logit / temperature) / sums[t][index]]);
  const others = vocabulary - pairs.length, rest = pairs.reduce((left, [, probability]) => left - probability, 1);
  if (others > 0) pairs.push([`${others.toLocaleString("en")} others`, Math.max(0, rest)]);
  page.next.replaceChildren(bars(pairs));
  page["temperature-shown"].textContent = temperature.toFixed(1);
}

/* Show the likeliest tokens that the LM head reads in each layer's stream after token t. */
function showLens(t) {
  const {words, ids, percents, rows} = data.lens, K = ids.length / rows.length / T;
  page["lens-token"].textContent = `token ${t + 1}, ${data.tokens[t]}`;
  page["lens-at"].replaceChildren(element("tbody", {}, ...rows.map((name, layer) => element("tr", {},
    element("th", {scope: "row"}, name), ...Array.from({length: K}, (_, k) => {
      const at = (layer * T + t) * K + k;
      return lensCell(words[ids[at]], percents[at] / 100, `${percents[at]}%`);
    })))));
}

function showToken(t) {
  showNextTokens(t);
  if (data.lens?.rows.length) showLens(t);
}

const rowOf = data.maps && unpackMaps(data.maps);
const view = new HeadsView({onToken: showToken});
view.token = view.key = T - 1;
view.show({tokens: data.tokens, layers: data.layers, heads: data.heads,
  row: (layer, head, t) => rowOf((layer * data.heads + head) * T + t, t)});
page.temperature.addEventListener("input", () => showNextTokens(view.token));
showToken(view.token);
