/* Files of a trained model: its tensors, and the page with the model. */

import {element, page} from "./components.js";

const PRISTINE = document.querySelector("main").innerHTML; // before any model is shown

export function download(name, content) {
  element("a", {download: name, href: URL.createObjectURL(new Blob([content]))}).click();
}

/* Return a pane's model as a safetensors file, whose metadata has what `attnlm import` needs. */
export function tensorFile({run, rung, corpus, shown: {step, weights}}) {
  const {learning_rate, seed} = run.training;
  const settings = {...rung.settings, learning_rate, seed};
  const characters = corpus.characters.join("");
  const attnlm = JSON.stringify({settings, characters, step, text: corpus.name});
  const header = {__metadata__: {format: "pt", attnlm}};
  let end = 0;
  for (const [name, {shape, values}] of Object.entries(weights)) {
    const start = end;
    end += values.byteLength;
    header[name] = {dtype: "F32", shape, data_offsets: [start, end]};
  }
  const bytes = new TextEncoder().encode(JSON.stringify(header));
  const padding = " ".repeat((8 - (bytes.length % 8)) % 8);
  const length = new BigUint64Array([BigInt(bytes.length + padding.length)]);
  return new Blob([length, bytes, padding, ...Object.values(weights).map(({values}) => values)]);
}

/* Return this page with a pane's model, the text and the settings of training. */
export function savedPage({run, rung, corpus, model, shown}, rungs) {
  const {name, train, validation, floor} = corpus;
  const training = {
    rung: run.rung,
    rungs: {...rungs, [run.rung]: {...rung, training: run.training}},
    text: {name, train, validation, floor},
  };
  const data = {prompt: page.prompt.value, models: [packed(run.rung, model, corpus, shown)], training};
  const copy = document.documentElement.cloneNode(true);
  copy.querySelector("main").innerHTML = PRISTINE;
  copy.querySelector("body > .tooltip").remove();
  // Escaped, so that no text in the data can end its script element.
  copy.querySelector("#data").textContent = JSON.stringify(data).replaceAll("<", "\\u003c");
  return `<!doctype html>\n${copy.outerHTML}`;
}

/* Return the values of a model for unpackModels. */
function packed(rung, {architecture, first}, {characters}, {step, weights}) {
  const bytes = Object.values(weights).flatMap(({values}) => [...new Uint8Array(values.buffer)]);
  return {
    name: `${rung}, step ${step}`,
    architecture,
    type: "f32",
    first,
    shapes: Object.fromEntries(Object.entries(weights).map(([name, {shape}]) => [name, shape])),
    weights: btoa(bytes.map((byte) => String.fromCharCode(byte)).join("")),
    tokenizer: {kind: "char", characters: characters.join("")},
  };
}
