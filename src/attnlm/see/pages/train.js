"use strict";
/* The page that trains: a text, controls, one or two panes with a model each, and files of a trained model.

   For the console and for tests: attnlm.trainers has a trainer for each pane, and attnlm.trainer is the first one.
     start(), pause(), step()    train until `pause` or the last step; make one step
     reset({rung, seed, learningRate, text})
                                 begin again with new weights; what is left out stays unchanged
     state                       {rung, step, trainLoss, validationLoss, tokensPerSecond, isRunning}

   The functions return a promise of the next snapshot. They throw TextError for a text that is too short or has too many
   different characters. */

const MOST_CHARACTERS = 2 ** 20, LARGEST_VOCABULARY = 1000;
const MOST_PASSAGE = 32, SAMPLED = 400, SHOWN_NEXT = 5; // tokens
const CHART = {width: 480, left: 30, right: 472, top: 14, bottom: 268};
const written = JSON.parse(page.data.textContent), {rungs} = written.training;
const pristine = document.querySelector("main").innerHTML;
const workerCode = URL.createObjectURL(new Blob([...document.scripts]
  .filter(({dataset}) => ["model.js", "trainer.js", "train_worker.js"].includes(dataset.file))
  .map(({textContent}) => `${textContent}\n`), {type: "text/javascript"}));
const panes = [];
let corpus = null; // the text of all panes
let chosenStep = Infinity; // the slider's step; Infinity for the newest snapshot

/* A text with its vocabulary of characters, its ids, and the counts of its pairs of characters. */
class Corpus {
  constructor({name, train, validation, floor = null}) {
    const characters = [...new Set(train + validation)].sort((a, b) => a.codePointAt() - b.codePointAt());
    const V = characters.length, tokenizer = newTokenizer({kind: "char", characters: characters.join("")});
    if (V > LARGEST_VOCABULARY)
      throw new TextError(`The text has ${V} different characters; at most ${LARGEST_VOCABULARY} are possible.`);
    Object.assign(this, {name, train, validation, floor, characters, V, tokenizer});
    [this.trainIds, this.validationIds] = [train, validation].map((text) => Uint16Array.from(tokenizer.encode(text)));
    const needed = Math.max(...Object.values(rungs).map(({architecture}) => architecture.block_size)) + 1;
    if (this.validationIds.length < needed)
      throw new TextError(`The text is too short: use at least ${10 * needed} characters.`);
    this.baselines = [["uniform", Math.log(V)], ["counted bigram", this.countPairs()]];
    if (floor !== null) this.baselines.push(["floor", floor]);
  }

  /* Return a text whose last tenth is for validation. */
  static of(text, name = "your text") {
    const characters = [...text.slice(0, MOST_CHARACTERS)], cut = Math.floor(0.9 * characters.length);
    const [train, validation] = [characters.slice(0, cut), characters.slice(cut)].map((part) => part.join(""));
    return new Corpus({name, train, validation});
  }

  /* Count the pairs of the training split, and 1 for each possible pair. Return the loss on the validation split. */
  countPairs() {
    const {V, trainIds, validationIds} = this, counts_VV = new Float32Array(V * V).fill(1);
    for (let i = 1; i < trainIds.length; i++) counts_VV[trainIds[i - 1] * V + trainIds[i]]++;
    this.counted = this.characters.map((_, id) => {
      const counts_V = counts_VV.subarray(id * V, (id + 1) * V), total = counts_V.reduce((sum, count) => sum + count, 0);
      return counts_V.map((count) => count / total);
    });
    let loss = 0;
    for (let i = 1; i < validationIds.length; i++) loss -= Math.log(this.counted[validationIds[i - 1]][validationIds[i]]);
    return loss / (validationIds.length - 1);
  }
}

/* A model in training, with its worker and all that the page shows about it. */
class Pane {
  constructor(rung) {
    this.node = page["pane-template"].content.firstElementChild.cloneNode(true);
    const named = [...this.node.querySelectorAll("[data-part]")].map((node) => [node.dataset.part, node]);
    const parts = this.parts = Object.fromEntries(named);
    Object.assign(this, {rung, runs: 0, waiting: []});
    parts.rung.append(...Object.keys(rungs).map((name) => element("option", {}, name)));
    parts.rung.addEventListener("change", () => this.reset({rung: parts.rung.value}));
    parts.rate.addEventListener("change", () => parts.rate.reportValidity() && this.reset({learningRate: +parts.rate.value}));
    parts.save.addEventListener("click", () => download(`${this.rung}.safetensors`, tensorFile(this)));
    parts.switch.addEventListener("click", () => this.switchHead());
    parts.chart.addEventListener("click", (event) => {
      const {width, left, right} = CHART, [x] = fractionsAt(event, parts.chart);
      chooseStep(((x * width - left) / (right - left)) * this.training.steps);
    });
    chooseByKeys(parts.heads, () => this.number, (number) => this.chooseHead(number), () => this.model.headSizes.H);
    this.worker = new Worker(workerCode);
    this.worker.addEventListener("message", ({data: {kind, run, ...message}}) => run === this.runs && this[kind](message));
    this.reset();
  }

  get state() {
    const {rung, made: step, trainLoss, validationLoss, tokensPerSecond, isRunning} = this;
    return {rung, step, trainLoss, validationLoss, tokensPerSecond, isRunning};
  }

  send(command, options) {
    this.worker.postMessage({command, run: this.runs, ...options});
    return new Promise((resolve) => { this.waiting.push(resolve); });
  }

  start() { return this.send("start"); }
  pause() { return this.send("pause"); }
  step() { return this.send("step"); }

  reset({rung = this.rung, seed = page["train-seed"].valueAsNumber || 0, learningRate, text} = {}) {
    const {architecture, training} = rungs[rung], known = rung === this.rung ? this.training?.learning_rate : undefined;
    learningRate ??= known ?? training.learning_rate;
    if (text !== undefined) useCorpus(Corpus.of(text), this);
    const {V: vocabSize, trainIds: train, validationIds: validation} = corpus;
    Object.assign(this, {rung, training: {...training, learning_rate: learningRate, seed}, runs: this.runs + 1});
    Object.assign(this, {made: 0, trainLoss: null, validationLoss: null, tokensPerSecond: 0, isRunning: false});
    Object.assign(this, {layer: 0, head: 0, snapshots: [], points: [], cost: null});
    this.model = this.modelOf(initialWeights(architecture, vocabSize, seed));
    [this.parts.rung.value, this.parts.rate.value, page["train-seed"].value] = [rung, learningRate, seed];
    chosenStep = Infinity;
    showControls();
    return this.send("reset", {architecture, training: this.training, vocabSize, train, validation});
  }

  modelOf(weights) {
    const {architecture} = rungs[this.rung], {tokenizer, characters} = corpus, first = Math.max(0, characters.indexOf("\n"));
    return new Model({name: "trained here", architecture, weights, tokenizer, first});
  }

  /* The worker's messages: snapshot, progress, and evaluation of a model without some heads. */
  snapshot({isRunning, ...snapshot}) {
    snapshot.trainLoss ??= this.trainLoss;
    if (this.snapshots.at(-1)?.step === snapshot.step) this.snapshots.pop();
    this.snapshots.push(snapshot);
    const {step: made, validationLoss, trainLoss} = snapshot;
    Object.assign(this, {made, validationLoss, trainLoss, isRunning});
    for (const resolve of this.waiting.splice(0)) resolve(this.state);
    showControls();
    if (chosenStep === Infinity) this.show();
    else this.showChart();
  }

  progress({step: made, trainLoss, tokensPerSecond, isRunning}) {
    Object.assign(this, {made, trainLoss, tokensPerSecond, isRunning});
    this.points.push([made, trainLoss]);
    this.showChart();
    showControls();
  }

  evaluation({loss, silenced}) {
    this.cost = loss - this.shown.validationLoss;
    const names = silenced.map((name) => headName(this.model, ...name.split(".").map(Number))).join(" and ");
    this.parts.cost.textContent = `Validation loss without ${names}: ${loss.toFixed(2)}, not ${this.shown.validationLoss.toFixed(2)}`;
  }

  /* The snapshot at the slider's step or the last one before it. */
  get shown() { return this.snapshots.findLast(({step}) => step <= chosenStep) ?? this.snapshots[0]; }

  get number() { return this.layer * this.model.headSizes.H + this.head; }

  /* Show a snapshot: losses, a sample, and maps or tables. */
  show() {
    if (!this.shown) return;
    this.model = Object.assign(this.modelOf(this.shown.weights), {silenced: this.model.silenced});
    this.showChart();
    this.showSample();
    [this.parts.tables.hidden, this.parts.inside.hidden] = [this.model.depth > 0, this.model.depth === 0];
    if (this.model.depth) this.showHeads();
    else this.showTables();
    if (this === panes[0]) followInPlay();
  }

  showChart() {
    const {snapshots, points, training: {steps}, tokensPerSecond} = this, {left, right, top, bottom} = CHART;
    const {step, validationLoss, trainLoss} = this.isRunning && chosenStep === Infinity ? this.state : this.shown ?? {step: 0};
    const most = 1.04 * Math.max(corpus.baselines[0][1], Math.min(20, Math.max(...snapshots.map((one) => one.validationLoss))));
    const x = (made) => left + ((right - left) * made) / steps, y = (loss) => bottom - (bottom - top) * Math.min(1, loss / most);
    const place = ([made, loss]) => `${x(made).toFixed(1)} ${y(loss).toFixed(1)}`;
    const line = (name, ...places) => element("path", {class: name, d: places.length ? `M${places.map(place).join("L")}` : ""});
    const label = (text, at, height, anchor) => element("text", {x: at, y: height, "text-anchor": anchor}, text);
    this.parts.chart.replaceChildren(
      ...corpus.baselines.flatMap(([name, loss]) => [line("baseline", [0, loss], [steps, loss]),
        label(`${name} ${loss.toFixed(2)}`, right, y(loss) - 4, "end")]),
      line("axis", [0, 0], [steps, 0]), label("0", left - 4, bottom + 4, "end"), label("step 0", left, bottom + 16, "start"),
      label(steps.toLocaleString("en"), right, bottom + 16, "end"), line("mark", [step, 0], [step, most]),
      line("train", ...points), line("validation", ...snapshots.map((one) => [one.step, one.validationLoss])));
    this.parts.losses.textContent = [`step ${step.toLocaleString("en")}`, validationLoss && `validation ${validationLoss.toFixed(2)}`,
      trainLoss && `training ${trainLoss.toFixed(2)}`, this.isRunning && `${Math.round(tokensPerSecond).toLocaleString("en")} tokens/s`]
      .filter(Boolean).join(" · ");
  }

  async showSample() {
    const {model} = this, start = passage(), ids = start.length ? start.slice(0, 1) : [model.first];
    const tokens = this.isRunning ? model.architecture.block_size - 1 : SAMPLED; // a full context is computed again
    const made = await model.generate({ids, tokens, seed: this.training.seed, onToken: () => model === this.model});
    if (model === this.model) this.parts.sample.textContent = visibleText(model.decode([...ids, ...made]));
  }

  /* Show the probabilities of a bigram and the counted ones. */
  showTables() {
    const {tables} = this.parts, {V, counted, characters} = corpus;
    const learned = characters.map((_, id) => softmax(row(this.model.embeddings, id)));
    const sentence = (r, c) => `“${visible(characters[c])}” after “${visible(characters[r])}”: `
      + `learned ${percent(learned[r][c])}, counted ${percent(counted[r][c])}`;
    const note = element("p", {class: "note", "aria-live": "polite"}, "A row for each character, a column for the next one.");
    tables.replaceChildren(...[["learned", learned], ["counted in the text", counted]].map(([name, rows]) => {
      const table = element("div", {class: "table", role: "img", tabindex: 0, "aria-label": `probabilities, ${name}`},
        tableCanvas(rows));
      let cell = [0, 0];
      addCells(table, {rows: V, columns: V, current: () => cell, tooltipOf: sentence, choose: (r, c) => {
        cell = [r, Math.min(c, V - 1)];
        note.textContent = sentence(...cell);
      }});
      return element("figure", {}, table, element("figcaption", {}, name));
    }), note);
  }

  showHeads() {
    const {model, parts, layer, head} = this, {H} = model.headSizes, {silenced} = model;
    const ids = model.context(passage().length ? passage() : [model.first]), tokens = ids.map((id) => tokenText(model, id));
    const [off_V, on_V] = [silenced, new Set()].map((some) => softmax(Object.assign(model, {silenced: some, cache: newCache()}).logits(ids)));
    const likeliest = topK(on_V.map((x, id) => Math.max(x, off_V[id])), SHOWN_NEXT).filter((id, n) => n === 0 || on_V[id] + off_V[id] >= 0.001);
    parts.next.replaceChildren(element("h3", {}, silenced.size ? "Next token: all heads on → heads off" : "Next token"),
      bars(likeliest.map((id) => [tokenText(model, id), off_V[id], silenced.size ? on_V[id] : undefined])));
    const {layers} = model.cache, rowOf = (l, h) => (t) => layers[l][t].attention[h];
    Object.assign(model, {silenced, cache: newCache()});
    if (parts.heads.children.length !== layers.length * H) {
      parts.heads.replaceChildren(...Array.from({length: layers.length * H}, (_, n) => element("button",
        {type: "button", onclick: () => this.chooseHead(n)}, element("canvas"), element("span"))));
    }
    [...parts.heads.children].forEach((button, n) => {
      const [l, h] = [Math.floor(n / H), n % H];
      drawMap(button.firstChild, ids.length, rowOf(l, h), MOST_PASSAGE);
      button.lastChild.textContent = headName(model, l, h);
      button.classList.toggle("off", silenced.has(`${l}.${h}`));
      setChosen(button, n === this.number);
    });
    const isOff = silenced.has(`${layer}.${head}`);
    parts.map.replaceChildren(labelledMap({tokens, rowOf: rowOf(layer, head), query: ids.length - 1}));
    parts.switch.textContent = `Switch ${headName(model, layer, head)} ${isOff ? "on" : "off"}`;
    parts.switch.setAttribute("aria-pressed", String(isOff));
    if (silenced.size === 0) parts.cost.textContent = "";
    else this.send("evaluate", {weights: this.shown.weights, silenced: [...silenced]});
  }

  chooseHead(number, {H} = this.model.headSizes) {
    Object.assign(this, {layer: Math.floor(number / H), head: number % H});
    this.showHeads();
  }

  switchHead() {
    this.model.silence(this.layer, this.head, !this.model.silenced.has(`${this.layer}.${this.head}`));
    this.showHeads();
    if (this === panes[0]) followInPlay();
  }
}

/* Return the ids of the text of the maps. Characters that the vocabulary lacks are left out. */
function passage() {
  const {tokenizer} = corpus, known = [...page.passage.value].filter((character) => tokenizer.idOf.has(character));
  return tokenizer.encode(known.slice(0, MOST_PASSAGE).join(""));
}

/* Train on another text: with `caller`, which begins again itself, and with all other panes. */
function useCorpus(changed, caller) {
  corpus = changed;
  const {name, train, validation, V} = corpus, size = (train.length + validation.length).toLocaleString("en");
  page.passage.value = page.prompt.value = validation.trimStart().split("\n")[0].slice(0, MOST_PASSAGE - 4);
  page.corpus.textContent = `Text: ${name}, ${size} characters, ${V} different ones. The last tenth is for validation.`;
  panes.filter((pane) => pane !== caller).forEach((pane) => pane.reset());
}

/* Use a text that the reader pasted or dropped, or say why not. */
function useOwnText(text, name) {
  try {
    useCorpus(Corpus.of(text, name));
    page["train-status"].textContent = text.length > MOST_CHARACTERS ? "Only the first million characters are used." : "";
  } catch (error) {
    if (!(error instanceof TextError)) throw error;
    page["train-status"].textContent = error.message;
  }
}

async function useFile([file]) { if (file) useOwnText(await file.text(), file.name); }

function newestStep() { return Math.max(0, ...panes.map(({snapshots}) => snapshots.at(-1)?.step ?? 0)); }

/* Show the models of a step; with the newest step, the models of later ones too. */
function chooseStep(step) {
  chosenStep = step >= newestStep() ? Infinity : Math.max(0, step);
  showControls();
  panes.forEach((pane) => pane.show());
}

function showControls() {
  page.train.textContent = panes.some(({isRunning}) => isRunning) ? "Pause" : "Train";
  page.train.disabled = panes.length > 0 && panes.every(({made, training}) => made >= training.steps);
  page["train-end"].hidden = !page.train.disabled;
  Object.assign(page["at-step"], {max: newestStep(), value: Math.min(chosenStep, newestStep())});
}

/* Show the first pane's model in the part of the page below (play.js). */
function followInPlay() {
  const isOutOfSight = panes[0].isRunning && page.models.getBoundingClientRect().top > innerHeight;
  if (isOutOfSight || typeof models === "undefined") return; // play.js has not begun yet
  page["into-step"].textContent = `the model of step ${panes[0].shown.step.toLocaleString("en")}`;
  replaceLastModel(panes[0].model);
}

function download(name, content) {
  const link = element("a", {download: name, href: URL.createObjectURL(new Blob([content]))});
  link.click();
}

/* Return a model as a safetensors file, whose metadata has what `attnlm import` needs. */
function tensorFile({shown: {step, weights}, rung, training: {learning_rate, seed}}) {
  const settings = {...rungs[rung].settings, learning_rate, seed}, characters = corpus.characters.join("");
  const header = {__metadata__: {format: "pt", attnlm: JSON.stringify({settings, characters, step, text: corpus.name})}};
  let end = 0;
  for (const [name, {shape, values}] of Object.entries(weights)) {
    header[name] = {dtype: "F32", shape, data_offsets: [end, end += values.byteLength]};
  }
  const bytes = new TextEncoder().encode(JSON.stringify(header)), padding = " ".repeat((8 - (bytes.length % 8)) % 8);
  const length = new BigUint64Array([BigInt(bytes.length + padding.length)]);
  return new Blob([length, bytes, padding, ...Object.values(weights).map(({values}) => values)]);
}

/* Return this page with the first pane's model and the text. */
function savedPage() {
  const {rung, model, shown: {step, weights}, training} = panes[0], {name, train, validation, floor, characters} = corpus;
  const parts = Object.values(weights).flatMap(({values}) => [...new Uint8Array(values.buffer)]);
  const saved = {name: `${rung}, step ${step}`, architecture: model.architecture, type: "f32", first: model.first,
    shapes: Object.fromEntries(Object.entries(weights).map(([key, {shape}]) => [key, shape])),
    weights: btoa(parts.map((byte) => String.fromCharCode(byte)).join("")),
    tokenizer: {kind: "char", characters: characters.join("")}};
  const copy = document.documentElement.cloneNode(true), text = {name, train, validation, floor};
  const offered = {rung, rungs: {...rungs, [rung]: {...rungs[rung], training}}, text};
  copy.querySelector("main").innerHTML = pristine;
  copy.querySelector("body > .tooltip").remove();
  copy.querySelector("#data").textContent = JSON.stringify({prompt: page.prompt.value, models: [saved], training: offered})
    .replaceAll("<", "\\u003c");
  return `<!doctype html>\n${copy.outerHTML}`;
}

function addPane(rung) {
  panes.push(new Pane(rung));
  page.panes.append(panes.at(-1).node);
}

useCorpus(new Corpus(written.training.text));
addPane(written.training.rung);
window.attnlm = {trainers: panes, trainer: panes[0]};

page["train-controls"].addEventListener("submit", (event) => {
  event.preventDefault();
  const command = panes.some(({isRunning}) => isRunning) ? "pause" : "start";
  panes.forEach((pane) => pane[command]());
});
page["one-step"].addEventListener("click", () => panes.forEach((pane) => pane.step()));
page.reset.addEventListener("click", () => panes.forEach((pane) => pane.reset()));
page["train-seed"].addEventListener("change", () => page["train-seed"].reportValidity() && panes.forEach((pane) => pane.reset()));
page["at-step"].addEventListener("input", () => chooseStep(page["at-step"].valueAsNumber));
page.passage.addEventListener("input", () => {
  page.prompt.value = page.passage.value;
  panes.forEach((pane) => pane.show());
});
page["use-text"].addEventListener("click", () => useOwnText(page["own-text"].value));
page["own-file"].addEventListener("change", () => useFile(page["own-file"].files));
page["save-page"].addEventListener("click", () => download("trained.html", savedPage()));
for (const kind of ["dragover", "drop"]) page.trainer.addEventListener(kind, (event) => {
  event.preventDefault();
  useFile(event.dataTransfer.files);
});
page.compare.addEventListener("click", () => {
  if (panes.length === 1) addPane(panes[0].rung);
  else {
    const [pane] = panes.splice(1);
    pane.worker.terminate();
    pane.node.remove();
  }
  panes[0].reset();
  page.compare.setAttribute("aria-pressed", String(panes.length === 2));
  page.panes.classList.toggle("two", panes.length === 2);
});
darkness.addEventListener("change", () => panes.forEach((pane) => pane.show()));
