/* Models that compute in a page: text, next tokens and generated texts before and after a change, attention,
   walkthrough and logit lens.

   For the console and for tests: attnlm.models is a list. Each model has
     name                        the run's name
     encode(text)                returns ids
     decode(ids)                 returns a text
     logits(ids)                 returns Float32Array (V): the logits of the token after the last id
     attention(ids)              returns [layer][head] → Float32Array T × T
     added(ids, id)              returns [part, number]: what each part adds to the logit of `id`
     generate({ids, tokens, temperature, topK, topP, seed})
                                 returns a promise of the new ids
     silence(layer, head, isOff) switches a head off (default) or on

   A model reads only the last `architecture.block_size` ids. */

import {largestIndices} from "./arrays.js";
import {showTable} from "./bigram_table.js";
import {addTooltip, bars, element, page, percent, visible, visibleText} from "./components.js";
import {Condition} from "./condition.js";
import {HeadsView} from "./heads_view.js";
import {tokenText} from "./labels.js";
import {darkness} from "./maps.js";
import {nextProbabilities, randomNumbers} from "./sampling.js";
import {showAdded, showLens} from "./stream_views.js";
import {TextError} from "./tokenizers.js";
import {unpackModels} from "./unpack_models.js";
import {WalkthroughView} from "./walkthrough_view.js";
import {eventLoop, Pause} from "./yield_to_event_loop.js";

const MOST_MAP_TOKENS = 512;
const CANDIDATES = 6;
const CHARACTER_TOKENS = 4; // a character has at most 4 bytes, and so tokens
const DEBOUNCE = 60; // milliseconds while the user types
const FRAME = 80; // milliseconds between two updates during generation
const SHARE = 9; // times that an update of a long text takes, before the next one

/* Show packed models, if there are any. */
export function showModels({models: packed, prompt}) {
  if (packed.length === 0) return;
  const models = unpackModels(packed);
  Object.assign(globalThis.attnlm, {models, modelPage: new ModelPage(models, prompt)});
}

export class ModelPage {
  isEdited = true; // the prompt has changed since it was encoded
  isExtended = true; // tokens have been added: the last one becomes the chosen one
  isBusy = false; // something is computed and shown
  isStale = false; // what is computed has changed since
  generation = null; // {isStopped}, during generation
  seed = null; // of the generated texts
  tokenRandom = null; // draws the tokens of “One token”
  onIdle = () => {}; // called when everything is shown

  constructor(models, prompt) {
    page.prompt.value = prompt;
    this.models = models;
    // By model: the condition `after` the last change, and the one `before` it, or null.
    this.states = models.map((model) => ({after: new Condition(model), before: null}));
    this.shown = models.length - 1; // the number of the model whose heads are shown
    this.headsView = new HeadsView({
      onHead: () => this.refresh(),
      onToken: () => this.showTable(),
      switchHead: (layer, head) => this.switchHead(layer, head),
    });
    this.walkthrough = new WalkthroughView(this.headsView);
    page.models.append(...models.map((model, number) => this.newSection(model, number)));
    this.addListeners();
    this.markShown();
    this.refresh();
  }

  /* The chosen model, and its condition after the last change. */
  get model() { return this.models[this.shown]; }

  get condition() { return this.states[this.shown].after; }

  get conditions() { return this.states.flatMap(conditionsOf); }

  addListeners() {
    page.controls.addEventListener("submit", (event) => {
      event.preventDefault();
      this.startOrStop();
    });
    page.again.addEventListener("click", () => this.startAgain());
    page.one.addEventListener("click", () => this.appendToken());
    page.prompt.addEventListener("input", () => {
      page.drawn.textContent = "";
      this.editPrompt();
    });
    page.seed.addEventListener("change", () => { this.tokenRandom = null; });
    for (const name of ["temperature", "top-k", "top-p"]) {
      page[name].addEventListener("change", () => this.change(this.states, () => {}));
    }
    page.present.addEventListener("click", () => {
      const isLarge = page.present.getAttribute("aria-pressed") !== "true";
      present(isLarge);
      if (isLarge) document.documentElement.requestFullscreen?.().catch(() => {});
      else if (document.fullscreenElement) document.exitFullscreen();
    });
    document.addEventListener("fullscreenchange", () => { if (!document.fullscreenElement) present(false); });
    darkness.addEventListener("change", () => this.refresh());
  }

  // --- The models -----------------------------------------------------------------------------------------------

  /* Return the part of the page with a model's next tokens and texts. */
  newSection(model, number) {
    const choose = element("button", {type: "button", onclick: () => this.showModel(number)}, model.name);
    return element("section", {"aria-label": `next token of ${model.name}`},
      ...(this.models.length > 1 ? [element("h3", {}, choose)] : []),
      element("p", {class: "change", "aria-live": "polite"}), element("ol", {class: "next"}),
      element("div", {class: "texts-of"}, newTextBox(model), newTextBox(model)));
  }

  markShown() {
    [...page.models.children].forEach((section, number) => {
      section.classList.toggle("shown", number === this.shown);
      section.querySelector("h3 button")?.setAttribute("aria-pressed", String(number === this.shown));
    });
  }

  showModel(number) {
    this.shown = number;
    this.headsView.layer = 0;
    this.headsView.head = 0;
    this.isExtended = true;
    this.markShown();
    this.refresh();
  }

  /* Show another model in place of the last one. */
  replaceLastModel(model) {
    this.stopGeneration();
    this.models.splice(-1, 1, model);
    const state = this.states.at(-1);
    state.after = new Condition(model);
    state.before = null;
    this.isEdited = true; // the vocabulary may have changed
    this.refresh();
  }

  // --- The prompt and changes of it -----------------------------------------------------------------------------

  /* Compute and show everything. A newer change stops the computation for an older one. */
  async refresh() {
    this.isStale = true;
    if (this.isBusy || this.generation) return;
    this.isBusy = true;
    try {
      while (this.isStale && !this.generation) {
        this.isStale = false;
        await this.computeAndShow(() => this.isStale || this.generation !== null);
      }
    } finally {
      this.isBusy = false; // also after an error in a view, or nothing would be shown again
    }
    if (!this.generation) this.onIdle();
  }

  async computeAndShow(isStopped) {
    const pause = new Pause();
    if (this.isEdited && !this.readPrompt()) return;
    for (const [number, state] of this.states.entries()) {
      for (const condition of conditionsOf(state)) {
        const {model, context, cache} = condition;
        const logits_V = await pause.run(model.computeLogits(context, cache), isStopped);
        if (logits_V === undefined) return;
        condition.probabilities_V = nextProbabilities(logits_V, condition.options);
      }
      if (isStopped()) return;
      this.showNextTokens(number);
    }
    await this.showHeads();
    this.showTable();
    await new Promise((resolve) => { setTimeout(resolve, DEBOUNCE); });
    const parts = [
      () => this.showWalkthrough(),
      () => showLens(this.condition, isStopped),
      () => showAdded(this.condition),
    ];
    for (const show of parts) {
      if (isStopped()) return;
      await show();
      await eventLoop();
    }
  }

  /* Encode the prompt for every model, and remove the generated texts. Return false if a vocabulary lacks a
     character. */
  readPrompt() {
    let encoded;
    try {
      encoded = this.models.map((model) => model.encode(page.prompt.value));
    } catch (error) {
      if (!(error instanceof TextError)) throw error;
      page.status.textContent = error.message;
      for (const section of page.models.children) section.querySelector(".next").replaceChildren();
      page["after-text"].textContent = "";
      return false;
    }
    this.states.forEach((state, number) => {
      const model = this.models[number];
      const ids = encoded[number].length ? encoded[number] : [model.first];
      if (model.silencedHeads.length === 0) state.before = null;
      for (const condition of conditionsOf(state)) {
        condition.context = model.context(ids);
        condition.clear();
      }
    });
    page.status.textContent = "";
    this.isExtended = true;
    this.isEdited = false;
    this.walkthrough.cell = null;
    this.showTexts();
    return true;
  }

  editPrompt() {
    this.stopGeneration();
    this.isEdited = true;
    this.refresh();
  }

  /* Change some models or options. The conditions until now are kept beside the new ones. If they have generated texts,
     the new ones continue the same prompt with the same seed. */
  async change(affected, apply) {
    await this.endGeneration();
    for (const state of affected) state.before = state.after.freeze();
    apply();
    for (const state of affected) {
      state.after = new Condition(this.models[this.states.indexOf(state)], state.before.context);
    }
    const changed = affected.map(({after}) => after);
    this.showTexts();
    await this.refresh();
    const length = Math.max(...affected.map(({before}) => before?.generated.length ?? 0));
    const isNewest = affected.every(({after}, n) => after === changed[n]);
    if (length && isNewest) this.generateTokens(length, changed);
  }

  switchHead(layer, head) {
    const {model} = this;
    this.change([this.states[this.shown]], () => model.silence(layer, head, !model.isSilenced(layer, head)));
  }

  // --- Generation -----------------------------------------------------------------------------------------------

  startOrStop() {
    if (this.generation) {
      this.stopGeneration();
      return;
    }
    if (this.states.every(({after}) => after.generated.length === 0)) this.seed = newSeed();
    this.generateTokens(numberOfTokens());
  }

  stopGeneration() { if (this.generation) this.generation.isStopped = true; }

  async endGeneration() {
    this.stopGeneration();
    while (this.generation) await eventLoop();
  }

  /* Continue the texts of some conditions; default: of all. All begin with the same seed. */
  async generateTokens(tokens, chosen) {
    if (this.generation) return;
    const generation = {isStopped: false};
    this.generation = generation;
    while (this.isBusy) await eventLoop();
    if (this.isEdited) generation.isStopped = !this.readPrompt();
    page.run.textContent = "Stop";
    const show = throttle(() => this.showTexts());
    if (!generation.isStopped) {
      const conditions = chosen ?? this.conditions;
      await Promise.all(conditions.map((condition) => this.continueText(condition, tokens, generation, show)));
    }
    this.generation = null;
    page.run.textContent = "Generate";
    this.showTexts();
    this.refresh();
  }

  /* Continue the text of a condition; call `show` after each token. */
  continueText(condition, tokens, generation, show) {
    const {model, generated, options, extended, textCache} = condition;
    this.seed ??= newSeed();
    condition.random ??= randomNumbers(this.seed);
    const onToken = (id, probabilities_V) => {
      generated.push({id, probability: probabilities_V[id]});
      condition.extended = model.extend(condition.extended, id);
      show();
      return !generation.isStopped;
    };
    const {random} = condition;
    return model.generate({...options, tokens, ids: extended, cache: textCache, random, onToken});
  }

  /* Remove all generated texts, and generate from the prompt, by default with the seed of the texts before. */
  async startAgain() {
    await this.endGeneration();
    if (page.seed.value !== "") this.seed = newSeed();
    for (const condition of this.conditions) condition.clear();
    this.generateTokens(numberOfTokens());
  }

  /* Append to the prompt a token of the chosen model, or the tokens of a whole character. */
  async appendToken() {
    if (this.generation || (this.isEdited && !this.readPrompt())) return;
    const {model, context, options} = this.condition;
    const ids = [];
    let probability = 0;
    const onToken = (id, probabilities_V) => { probability = probabilities_V[id]; };
    this.tokenRandom ??= randomNumbers(newSeed());
    const random = this.tokenRandom;
    do {
      ids.push(...await model.generate({...options, ids: [...context, ...ids], tokens: 1, random, onToken}));
    } while (ids.length < CHARACTER_TOKENS && model.decode(ids).endsWith("\ufffd"));
    page.prompt.value += model.decode(ids);
    page.drawn.textContent = `“${tokenText(model, ids.at(-1))}” had ${percent(probability)}`;
    this.editPrompt();
  }

  // --- What the page shows --------------------------------------------------------------------------------------

  /* Show the likeliest next tokens of a model, before and after the last change. */
  showNextTokens(number) {
    const model = this.models[number];
    const {before, after} = this.states[number];
    const section = page.models.children[number];
    const largest_V = after.probabilities_V.map((x, id) => Math.max(x, before?.probabilities_V[id] ?? 0));
    const likeliest = largestIndices(largest_V, CANDIDATES).filter((id) => largest_V[id] > 0);
    section.querySelector(".next").replaceWith(bars(likeliest.map((id) => (
      [tokenText(model, id), after.probabilities_V[id], before?.probabilities_V[id]]))));
    section.querySelector(".change").replaceChildren(...(before ? [
      element("span", {class: "before"}, before.nameBeside(after)), " → ",
      element("span", {class: "after"}, after.nameBeside(before))] : []));
    if (number === this.shown) page["after-text"].textContent = visible(model.decode(after.context)).slice(-16);
  }

  /* Show the texts of all models. */
  showTexts() {
    this.states.forEach(({before, after}, number) => {
      const boxes = page.models.children[number].querySelectorAll(".written");
      const isChanged = before !== null;
      this.showText(boxes[0], before, isChanged && after);
      this.showText(boxes[1], after, isChanged && before);
    });
  }

  /* Show the text of a condition, or of null, and how the condition differs from the `other` one, if there is one. */
  showText(box, condition, other) {
    const [note, text] = box.children;
    const generated = condition?.generated ?? [];
    box.hidden = generated.length === 0;
    if (generated.length < text.children.length) text.replaceChildren();
    text.append(...generated.slice(text.children.length).map(({id, probability}) => element("span", {
      "data-note": `“${tokenText(condition.model, id)}” had ${percent(probability)}`,
      class: "sampled",
      style: {"--fraction": probability.toFixed(3)},
    }, visibleText(condition.model.decode([id])))));
    text.scrollTop = text.scrollHeight;
    const name = other && condition.nameBeside(other);
    note.textContent = [`seed ${this.seed}`, name].filter(Boolean).join(": ");
  }

  /* Show the heads of the chosen model, for at most the last MOST_MAP_TOKENS computed tokens. */
  showHeads() {
    const {model} = this;
    const {ids, layers} = this.condition.cache;
    const first = Math.max(0, ids.length - MOST_MAP_TOKENS);
    const tokens = ids.slice(first).map((id) => tokenText(model, id));
    const heads = layers[0]?.[0].attention?.length ?? 0;
    if (this.isExtended) this.headsView.token = tokens.length - 1;
    this.isExtended = false;
    page["heads-title"].textContent = heads ? "What each token attends to" : "This model has no attention";
    page["heads-note"].hidden = heads === 0;
    page["walkthrough-title"].textContent = heads ? "The way through one head" : "The way to the next token";
    return this.headsView.show({
      tokens,
      heads,
      layers: heads ? layers.length : 0,
      row: (layer, head, t) => layers[layer][first + t].attention[head].subarray(first),
      isOff: (layer, head) => model.isSilenced(layer, head),
    });
  }

  /* Show a bigram's table, at the row of the chosen token. */
  showTable() {
    const {model} = this;
    const {ids} = this.condition.cache;
    page["table-section"].hidden = model.depth > 0;
    if (model.depth) return;
    showTable(model, ids[Math.max(0, ids.length - MOST_MAP_TOKENS) + this.headsView.token]);
  }

  showWalkthrough() { if (!this.generation) this.walkthrough.show(this.condition); }
}

function conditionsOf({before, after}) { return before ? [before, after] : [after]; }

function newTextBox(model) {
  const text = element("pre",
    {class: "generated", tabindex: 0, role: "region", "aria-label": `generated by ${model.name}`});
  addTooltip(text, (event) => event.target.dataset.note ?? null);
  return element("div", {class: "written", hidden: true}, element("p", {class: "note"}), text);
}

/* Return the seed that the reader chose, or a random one. */
function newSeed() {
  const {value, validity, valueAsNumber} = page.seed;
  return value !== "" && validity.valid ? valueAsNumber : Math.floor(Math.random() * 10000);
}

function numberOfTokens() {
  const {value, validity, valueAsNumber} = page.tokens;
  return value !== "" && validity.valid ? valueAsNumber : 200;
}

/* Return a function that calls `show`, but not within FRAME after the last call, and at most a tenth of the time. */
function throttle(show) {
  let last = performance.now();
  let wait = FRAME;
  return () => {
    const now = performance.now();
    if (now - last <= wait) return;
    show();
    last = performance.now();
    wait = Math.max(FRAME, SHARE * (last - now));
  };
}

/* Show large type in full screen, for a projector, until full screen ends. */
export function present(isLarge) {
  document.documentElement.classList.toggle("presenting", isLarge);
  page.present.setAttribute("aria-pressed", String(isLarge));
  if (page.about) page.about.open = false;
}
