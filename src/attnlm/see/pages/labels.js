/* What a page calls the tokens and heads of a model. */

import {visible} from "./components.js";

export function tokenText(model, id) { return visible(model.decode([id])); }

export function headName({depth}, layer, head) { return `${depth > 1 ? `layer ${layer + 1} ` : ""}head ${head + 1}`; }

/* Return the names of heads, pairs of a layer and a head. */
export function headNames(model, heads) {
  return heads.map(([layer, head]) => headName(model, layer, head)).join(" and ");
}

/* Return the first ids whose tokens are whole characters, and no control characters but line ends and tabs. */
export function firstReadable(model, most) {
  const ids = [];
  for (let id = 0; id < model.vocabSize && ids.length < most; id++) {
    if (!/\ufffd|[^\P{C}\n\t]/u.test(model.decode([id]))) ids.push(id);
  }
  return ids;
}
