/* A pane: a model in training, with its worker and all that the page shows about it. */

import {drawChart, stepAt} from "./chart.js";
import {chooseByKeys, element, page, setChosen, visibleText, withCommas} from "./components.js";
import {initialWeights} from "./initial_weights.js";
import {headName, headNames, tokenText} from "./labels.js";
import {attentionMap, drawMap} from "./maps.js";
import {Model} from "./model.js";
import {download, tensorFile} from "./saved_files.js";

export const MOST_PASSAGE = 32; // tokens of the maps
const SAMPLED = 400; // tokens

/* What a pane knows of a run: the training of a model from new weights. */
class PaneRun {
  made = 0; // steps
  trainLoss = null;
  validationLoss = null;
  tokensPerSecond = 0;
  isRunning = false;
  snapshots = [];
  points = []; // pairs of a step and a training loss

  constructor(number, rung, training) {
    this.number = number;
    this.rung = rung;
    this.training = training;
  }
}

export class Pane {
  run = null;
  model = null; // the one that the pane shows
  layer = 0; // of the head that it shows
  head = 0;
  cost = null; // of the heads that are off: what the validation loss increases by
  waiting = []; // functions that resolve at the next snapshot

  /* `trainPage` has the rungs, the corpus and the step that all panes share. */
  constructor(trainPage, workerUrl, rung) {
    this.trainPage = trainPage;
    this.node = page["pane-template"].content.firstElementChild.cloneNode(true);
    const named = [...this.node.querySelectorAll("[data-part]")].map((node) => [node.dataset.part, node]);
    this.parts = Object.fromEntries(named);
    this.worker = new Worker(workerUrl);
    this.worker.addEventListener("message", ({data}) => this.receive(data));
    this.addListeners();
    this.reset({rung});
  }

  addListeners() {
    const {parts} = this;
    parts.rung.append(...Object.keys(this.trainPage.rungs).map((name) => element("option", {}, name)));
    parts.rung.addEventListener("change", () => this.reset({rung: parts.rung.value}));
    parts.rate.addEventListener("change", () => {
      if (parts.rate.reportValidity()) this.reset({learningRate: parts.rate.valueAsNumber});
    });
    parts.save.addEventListener("click", () => download(`${this.run.rung}.safetensors`, tensorFile(this)));
    parts.switch.addEventListener("click", () => this.switchHead());
    parts.chart.addEventListener("click", (event) => {
      this.trainPage.chooseStep(stepAt(event, parts.chart, this.run.training.steps));
    });
    chooseByKeys(parts.heads, () => this.number, (number) => this.chooseHead(number), () => this.model.headSizes.H);
  }

  get corpus() { return this.trainPage.corpus; }

  get rung() { return this.trainPage.rungs[this.run.rung]; }

  get state() {
    const {rung, made: step, trainLoss, validationLoss, tokensPerSecond, isRunning} = this.run;
    return {rung, step, trainLoss, validationLoss, tokensPerSecond, isRunning};
  }

  /* The snapshot at the chosen step or the last one before it. */
  get shown() {
    const {snapshots} = this.run;
    return snapshots.findLast(({step}) => step <= this.trainPage.chosenStep) ?? snapshots[0];
  }

  /* The index of the shown head among the heads of all layers. */
  get number() { return this.layer * this.model.headSizes.H + this.head; }

  // --- The worker -----------------------------------------------------------------------------------------------

  post(command, options) { this.worker.postMessage({command, run: this.run.number, ...options}); }

  /* Send a command that the worker answers with a snapshot; return a promise of the state then. */
  send(command, options) {
    this.post(command, options);
    return new Promise((resolve) => { this.waiting.push(resolve); });
  }

  /* Resolve the promises of all commands so far. */
  settle() { for (const resolve of this.waiting.splice(0)) resolve(this.state); }

  close() {
    this.worker.terminate();
    this.settle();
    this.node.remove();
  }

  start() { return this.send("start"); }

  pause() { return this.send("pause"); }

  step() { return this.send("step"); }

  /* Begin a run. The learning rate of the run before is kept if the rung is. */
  reset({rung = this.run.rung, seed = page["train-seed"].valueAsNumber || 0, learningRate, text} = {}) {
    const {trainPage} = this;
    const {architecture, parameters, settings: training} = trainPage.rungs[rung];
    const known = rung === this.run?.rung ? this.run.training.learning_rate : undefined;
    const rate = learningRate ?? known ?? training.learning_rate;
    if (text !== undefined) trainPage.useText(text, this);
    const {V: vocabSize, trainIds: train, validationIds: validation} = this.corpus;
    this.run = new PaneRun((this.run?.number ?? 0) + 1, rung, {...training, learning_rate: rate, seed});
    this.model = this.modelOf(initialWeights(parameters, vocabSize, seed));
    this.layer = 0;
    this.head = 0;
    this.cost = null;
    this.parts.rung.value = rung;
    this.parts.rate.value = rate;
    page["train-seed"].value = seed;
    trainPage.showNewest();
    return this.send("reset",
      {architecture, parameters, training: this.run.training, vocabSize, train, validation});
  }

  /* Take a message of the worker, unless it is about an earlier run. */
  receive({kind, run, ...message}) {
    if (run !== this.run.number) return;
    if (kind === "snapshot") this.takeSnapshot(message);
    else if (kind === "progress") this.takeProgress(message);
    else this.takeEvaluation(message);
  }

  takeSnapshot({step, trainLoss, validationLoss, weights, isRunning}) {
    const {run, trainPage} = this;
    const snapshot = {step, trainLoss: trainLoss ?? run.trainLoss, validationLoss, weights};
    if (run.snapshots.at(-1)?.step === step) run.snapshots.pop();
    run.snapshots.push(snapshot);
    run.made = step;
    run.trainLoss = snapshot.trainLoss;
    run.validationLoss = validationLoss;
    run.isRunning = isRunning;
    this.settle();
    trainPage.showControls();
    if (trainPage.chosenStep === Infinity) this.show();
    else this.showChart();
  }

  takeProgress({step, trainLoss, tokensPerSecond, isRunning}) {
    const {run} = this;
    run.made = step;
    run.trainLoss = trainLoss;
    run.tokensPerSecond = tokensPerSecond;
    run.isRunning = isRunning;
    run.points.push([step, trainLoss]);
    this.showChart();
    this.trainPage.showControls();
  }

  /* Show the loss without some heads and, of the same snapshot, with all heads. */
  takeEvaluation({step, loss, silenced}) {
    const {model, run} = this;
    if (String(silenced) !== String(model.silencedHeads)) return; // switched in the meantime
    const {validationLoss} = run.snapshots.find((snapshot) => snapshot.step === step);
    const names = headNames(model, silenced);
    this.cost = loss - validationLoss;
    this.parts.cost.textContent = `Validation loss without ${names}: ${loss.toFixed(2)}, `
      + `not ${validationLoss.toFixed(2)}`;
  }

  // --- What the pane shows --------------------------------------------------------------------------------------

  modelOf(weights) {
    const {tokenizer, characters} = this.corpus;
    const first = Math.max(0, characters.indexOf("\n"));
    return new Model({name: "trained here", architecture: this.rung.architecture, weights, tokenizer, first});
  }

  /* Show a snapshot: losses, a sample, and maps. */
  show() {
    if (!this.shown) return;
    this.model = this.modelOf(this.shown.weights).withSilenced(this.model.silencedHeads);
    this.showChart();
    this.showSample();
    this.parts.inside.hidden = this.model.depth === 0;
    if (this.model.depth) this.showHeads();
    this.trainPage.follow(this);
  }

  showChart() {
    const {run, corpus} = this;
    const isNewest = run.isRunning && this.trainPage.chosenStep === Infinity;
    const {step, validationLoss, trainLoss} = isNewest ? this.state : this.shown ?? {step: 0};
    drawChart(this.parts.chart, {
      end: run.training.steps,
      baselines: corpus.baselines,
      lines: [
        {name: "train", points: run.points},
        {name: "validation", points: run.snapshots.map((snapshot) => [snapshot.step, snapshot.validationLoss])},
      ],
      marked: step,
    });
    this.parts.losses.textContent = [
      `step ${withCommas(step)}`,
      validationLoss && `validation ${validationLoss.toFixed(2)}`,
      trainLoss && `training ${trainLoss.toFixed(2)}`,
      run.isRunning && `${withCommas(Math.round(run.tokensPerSecond))} tokens/s`,
    ].filter(Boolean).join(" · ");
  }

  async showSample() {
    const {model} = this;
    const passage = this.trainPage.passage();
    const ids = passage.length ? passage.slice(0, 1) : [model.first];
    const tokens = this.run.isRunning ? model.architecture.block_size - 1 : SAMPLED; // a full context is computed again
    const onToken = () => model === this.model;
    const sampled = await model.generate({ids, tokens, seed: this.run.training.seed, onToken});
    if (model === this.model) this.parts.sample.textContent = visibleText(model.decode([...ids, ...sampled]));
  }

  showHeads() {
    const {model, parts, layer, head} = this;
    const passage = this.trainPage.passage();
    const ids = model.context(passage.length ? passage : [model.first]);
    const tokens = ids.map((id) => tokenText(model, id));
    const allOn = model.withSilenced([]);
    allOn.logits(ids);
    const {layers} = allOn.cache;
    const rowOf = (l, h) => (t) => layers[l][t].attention[h];
    this.showThumbnails(layers.length, ids.length, rowOf);
    parts.map.replaceChildren(attentionMap({tokens, rowOf: rowOf(layer, head), query: ids.length - 1}));
    const isOff = model.isSilenced(layer, head);
    parts.switch.textContent = `Switch ${headName(model, layer, head)} ${isOff ? "on" : "off"}`;
    parts.switch.setAttribute("aria-pressed", String(isOff));
    const silenced = model.silencedHeads;
    if (silenced.length === 0) parts.cost.textContent = "";
    else this.post("evaluate", {step: this.shown.step, weights: this.shown.weights, silenced});
  }

  /* Show the maps of all heads. `rowOf(layer, head)` returns a function from a token to its attention weights. */
  showThumbnails(layers, T, rowOf) {
    const {model, parts} = this;
    const {H} = model.headSizes;
    if (parts.heads.children.length !== layers * H) {
      const newButton = (n) => element("button", {type: "button", onclick: () => this.chooseHead(n)},
        element("canvas"), element("span"));
      parts.heads.replaceChildren(...Array.from({length: layers * H}, (_, n) => newButton(n)));
    }
    [...parts.heads.children].forEach((button, n) => {
      const layer = Math.floor(n / H);
      const head = n % H;
      drawMap(button.firstChild, T, rowOf(layer, head), MOST_PASSAGE);
      button.lastChild.textContent = headName(model, layer, head);
      button.classList.toggle("off", model.isSilenced(layer, head));
      setChosen(button, n === this.number);
    });
  }

  chooseHead(number) {
    const {H} = this.model.headSizes;
    this.layer = Math.floor(number / H);
    this.head = number % H;
    this.showHeads();
  }

  switchHead() {
    const {model, layer, head} = this;
    model.silence(layer, head, !model.isSilenced(layer, head));
    this.showHeads();
    this.trainPage.follow(this);
  }
}
