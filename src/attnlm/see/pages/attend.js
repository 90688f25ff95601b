"use strict";
/* Attention that was recorded: attend_page.py says what a page holds of it. */
const data = JSON.parse(page.data.textContent), count = data.tokens.length;

/* The rows (T) of maps: those of head n are n·T to n·T + T − 1. Some columns of each are held, in steps of 1/255;
   the rest of a row is divided among its other columns. */
function unpacked({least, counts, columns, steps}) {
  const perRow = new Uint16Array(bytesOf(counts).buffer), starts = new Uint32Array(perRow.length + 1);
  perRow.forEach((held, row) => { starts[row + 1] = starts[row] + held; });
  const columnOf = new Uint16Array(bytesOf(columns).buffer), stepsOf = bytesOf(steps);
  return (row, t) => {
    const [start, end] = [starts[row], starts[row + 1]], held = stepsOf.subarray(start, end);
    const rest = Math.max(0, 255 - held.reduce((total, x) => total + x, 0)), others = t + 1 - held.length;
    const weights_T = new Float32Array(t + 1).fill(others ? Math.min(rest / others, least - 0.5) / 255 : 0);
    held.forEach((x, i) => { weights_T[columnOf[start + i]] = x / 255; });
    return weights_T;
  };
}

/* The likeliest tokens after token t. A candidate is a token and its logit less the largest; the sums are over the
   whole vocabulary, one for each temperature. */
function showNext(t) {
  const at = Math.round(10 * page.temperature.valueAsNumber) - 1, temperature = data.next.temperatures[at];
  const found = data.next.candidates[t].map(([token, logit]) => [token, Math.exp(logit / temperature) / data.next.sums[t][at]]);
  const others = Math.max(0, found.reduce((left, [, share]) => left - share, 1));
  const left = data.next.vocabulary - found.length;
  page.next.replaceChildren(bars(left > 0 ? [...found, [`${left.toLocaleString("en")} others`, others]] : found));
  page["temperature-shown"].textContent = temperature.toFixed(1);
}

/* What each layer's stream is read as after token t, the likeliest first. */
function showReadings(t) {
  const {words, ids, percents, rows} = data.lens, most = ids.length / rows.length / count;
  page["lens-token"].textContent = `token ${t + 1}, ${data.tokens[t]}`;
  page["lens-at"].replaceChildren(element("tbody", {}, ...rows.map((name, row) => element("tr", {}, element("th", {scope: "row"}, name),
    ...Array.from({length: most}, (_, k) => (row * count + t) * most + k).map((at) => element("td", {style: {"--share": percents[at] / 100}},
      element("span", {}, words[ids[at]]), element("small", {}, `${percents[at]}%`)))))));
}

function showPlace(t) {
  showNext(t);
  if (data.lens?.rows.length) showReadings(t);
}

const rowOf = data.maps && unpacked(data.maps);
const view = new HeadsView({onToken: showPlace});
view.token = view.key = count - 1;
view.show({tokens: data.tokens, layers: data.layers, heads: data.heads,
  row: (layer, head, t) => rowOf((layer * data.heads + head) * count + t, t)});
page.temperature.addEventListener("input", () => showNext(view.token));
showPlace(view.token);
