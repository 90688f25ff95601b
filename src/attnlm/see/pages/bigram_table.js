/* The table of a bigram: the probability of each next token after each token. */

import {largestIndices, softmax, tensorRow} from "./arrays.js";
import {numberText, page, percent} from "./components.js";
import {firstReadable, tokenText} from "./labels.js";
import {labelledMap, tableCanvas} from "./maps.js";

const MOST_ROWS = 128;

/* Show the table, with the row of token `id` chosen. */
export function showTable(model, id) {
  const ids = firstReadable(model, MOST_ROWS);
  const tokens = ids.map((one) => tokenText(model, one));
  const logits = ids.map((one) => tensorRow(model.embeddings, one));
  const probabilities = logits.map((logits_V) => {
    const probabilities_V = softmax(logits_V);
    return ids.map((one) => probabilities_V[one]);
  });
  const textOf = (r, c) => `“${tokens[c]}” after “${tokens[r]}”: ${percent(probabilities[r][c])}, `
    + `logit ${numberText(logits[r][ids[c]])}`;
  const choose = (query, key) => {
    const canvas = tableCanvas(probabilities);
    page["table-cell"].textContent = textOf(query, key);
    page.table.replaceChildren(labelledMap({tokens, canvas, textOf, query, key, framed: ids.length, choose}));
  };
  const r = Math.max(0, ids.indexOf(id));
  choose(r, largestIndices(probabilities[r], 1)[0]);
}
