/* A model under the conditions of one time: the heads that are off, and the sampling options. */

import {page} from "./components.js";
import {headNames} from "./labels.js";
import {newCache} from "./model_structure.js";

const OPTION_NAMES = {temperature: "temperature", topK: "top-k", topP: "top-p"};

export class Condition {
  options = samplingOptions();
  cache = newCache(); // of the context
  probabilities_V = null; // of the next token after the context
  generated = []; // {id, probability} of each generated token
  extended = []; // the context with the generated tokens
  textCache = newCache(); // of the extended context
  random = null; // draws the generated tokens

  constructor(model, context = []) {
    this.model = model;
    this.context = context;
    this.clear();
  }

  /* Remove the generated text. */
  clear() {
    this.generated = [];
    this.extended = this.context;
    this.textCache = newCache();
    this.random = null;
  }

  /* Keep the heads that are off now, whatever is switched later. */
  freeze() {
    this.model = this.model.withSilenced(this.model.silencedHeads);
    return this;
  }

  /* Return what distinguishes this condition from another one. */
  nameBeside(other) {
    const [off, otherOff] = [this, other].map(({model}) => headNames(model, model.silencedHeads));
    const parts = off === otherOff ? [] : [off ? `${off} off` : "all heads on"];
    for (const [option, name] of Object.entries(OPTION_NAMES)) {
      if (this.options[option] !== other.options[option]) parts.push(`${name} ${this.options[option] ?? "off"}`);
    }
    return parts.join(", ");
  }
}

function samplingOptions() {
  const read = (input) => (input.value === "" || !input.validity.valid ? undefined : input.valueAsNumber);
  return {temperature: read(page.temperature) ?? 1, topK: read(page["top-k"]), topP: read(page["top-p"])};
}
