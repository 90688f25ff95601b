/* What a model's residual stream says: after each layer (the logit lens), and by the parts that add to it. */

import {largestIndices, softmax} from "./arrays.js";
import {element, lensCell, page, percent} from "./components.js";
import {tokenText} from "./labels.js";
import {streamOf} from "./model_structure.js";
import {Pause} from "./yield_to_event_loop.js";

const MOST_LENS_TOKENS = 24;

/* Show the token that the LM head reads in the residual stream after each layer. */
export async function showLens({model, cache}, isStopped) {
  const isHidden = !model.depth || !model.architecture.residual;
  page["lens-section"].hidden = isHidden;
  if (isHidden) return;
  const {ids, embedded, layers} = cache;
  const positions = [...ids.keys()].slice(-MOST_LENS_TOKENS);
  const streams = [embedded, ...layers.map((layer_T) => layer_T.map(({stream}) => stream))];
  const pause = new Pause();
  const rows = [];
  for (const [layer, stream_TC] of streams.entries()) {
    const cells = [];
    for (const t of positions) {
      const probabilities_V = softmax(model.readOut(stream_TC[t]));
      const [id] = largestIndices(probabilities_V, 1);
      const probability = probabilities_V[id];
      cells.push(lensCell(tokenText(model, id), probability.toFixed(3), percent(probability), id === ids[t + 1]));
      await pause.yieldIfDue();
      if (isStopped()) return;
    }
    rows.push(element("tr", {}, element("th", {scope: "row"}, layer ? `layer ${layer}` : "embedding"), ...cells));
  }
  const tokens = positions.map((t) => element("th", {scope: "col"}, tokenText(model, ids[t])));
  page.lens.replaceChildren(
    element("thead", {}, element("tr", {}, element("th", {scope: "row"}, "after"), ...tokens)),
    element("tbody", {}, ...rows));
}

/* Show what the embedding, heads, MLPs and biases add to the logit of the likeliest next token. */
export function showAdded({model, context, cache}) {
  const [id] = largestIndices(model.readOut(streamOf(cache, cache.ids.length - 1)), 1);
  const parts = model.added(context, id, cache);
  const most = Math.max(...parts.map(([, logit]) => Math.abs(logit)));
  const bar = (logit) => element("span", {
    class: `bar ${logit < 0 ? "less" : ""}`,
    style: {"--fraction": (Math.abs(logit) / most).toFixed(4)},
  });
  page["added-section"].hidden = parts.length === 0;
  page["added-token"].textContent = tokenText(model, id);
  page["added-sum"].textContent = parts.reduce((sum, [, logit]) => sum + logit, 0).toFixed(3);
  page.added.replaceChildren(...parts.map(([part, logit]) => element("li", {},
    element("span", {class: "candidate"}, part), bar(logit), element("span", {class: "percent"}, logit.toFixed(3)))));
}
