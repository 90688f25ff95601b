"use strict";
/* The worker of a page that trains: it makes the steps, so that the page stays responsive.

   The page sends {command, run, ...}. A reset, with {architecture, training, vocabSize, train, validation}, begins the run
   of this number; the others are start, pause, step, and evaluate, with {weights, silenced}. The worker sends
   {kind, run, ...}: a snapshot, with {step, trainLoss, validationLoss, weights, isRunning}; progress, with {step,
   trainLoss, tokensPerSecond, isRunning}; or an evaluation, with {loss, silenced}. */

const SLICE = 100; // milliseconds of training between two looks at the page's commands
const VALIDATION_TOKENS = 4096; // per evaluation, spread evenly over the split
const FIRST_SNAPSHOTS = [0, 1, 3, 10, 30, 100], SNAPSHOTS = 60;

class Trainer {
  constructor({architecture, training, vocabSize, train, validation, weights}) {
    const T = architecture.block_size, B = training.batch_size, possible = Math.floor((validation.length - 1) / T);
    Object.assign(this, {training, step: 0, lossSum: 0, losses: 0});
    this.model = new BatchModel({architecture, windows: B,
      weights: weights ?? initialWeights(architecture, vocabSize, training.seed)});
    this.batches = new Batches(train, T, B, training.seed);
    const groups = Math.max(1, Math.floor(Math.min(possible, VALIDATION_TOKENS / T) / B)), count = groups * B;
    const starts = Array.from({length: count}, (_, n) => Math.floor((n * possible) / count) * T);
    this.validation = Array.from({length: groups}, (_, n) => windowsAt(validation, starts.slice(n * B, (n + 1) * B), T));
  }

  get isDone() { return this.step >= this.training.steps; }

  get wantsSnapshot() {
    const {step} = this;
    return FIRST_SNAPSHOTS.includes(step) || step % Math.ceil(this.training.steps / SNAPSHOTS) === 0 || this.isDone;
  }

  /* Make a step and return its loss. */
  makeStep(batch = this.batches.at(this.step)) {
    const loss = this.model.loss(...batch);
    this.model.backward();
    updateWeights(this.model, this.step++, this.training);
    this.lossSum += loss;
    this.losses++;
    return loss;
  }

  /* Return the mean loss of a model over the windows of the validation split. */
  validationLoss(model = this.model) {
    return this.validation.reduce((sum, batch) => sum + model.loss(...batch), 0) / this.validation.length;
  }

  /* Return the losses and a copy of the weights. The training loss is the mean since the snapshot before. */
  snapshot() {
    const trainLoss = this.losses ? this.lossSum / this.losses : null, {model, step} = this;
    this.lossSum = this.losses = 0;
    const weights = Object.entries(model.weights).map(([name, {shape, values}]) => [name, {shape, values: values.slice()}]);
    return {step, trainLoss, validationLoss: this.validationLoss(), weights: Object.fromEntries(weights)};
  }

  /* Return the validation loss of other weights, with some heads switched off. */
  lossOf(weights, silenced) {
    const {architecture, B: windows} = this.model, model = new BatchModel({architecture, weights, windows});
    return this.validationLoss(Object.assign(model, {silenced: new Set(silenced)}));
  }
}

/* Answer the page's commands in a worker. */
function serve() {
  let trainer = null, isRunning = false, number = 0; // of the reset
  const send = (kind, content) => postMessage({kind, run: number, ...content});
  const sendSnapshot = () => send("snapshot", {...trainer.snapshot(), isRunning});
  const run = () => {
    if (!isRunning) return;
    const begin = performance.now(), first = trainer.step, {batch_size} = trainer.training;
    let sum = 0;
    while (!trainer.isDone && performance.now() - begin < SLICE) {
      sum += trainer.makeStep();
      if (trainer.isDone) isRunning = false;
      if (trainer.wantsSnapshot) sendSnapshot();
    }
    const steps = trainer.step - first, seconds = (performance.now() - begin) / 1000;
    const tokensPerSecond = (steps * batch_size * trainer.model.T) / seconds;
    if (steps) send("progress", {step: trainer.step, trainLoss: sum / steps, tokensPerSecond, isRunning});
    setTimeout(run);
  };
  const commands = {
    reset({run: newest, ...options}) {
      [isRunning, number] = [false, newest];
      trainer = new Trainer(options);
      sendSnapshot();
    },
    start() {
      if (isRunning) return;
      isRunning = !trainer.isDone;
      (isRunning ? run : sendSnapshot)();
    },
    pause() {
      isRunning = false;
      sendSnapshot();
    },
    step() {
      if (!trainer.isDone) trainer.makeStep();
      commands.pause();
    },
    evaluate({weights, silenced}) {
      send("evaluation", {loss: trainer.lossOf(weights, silenced), silenced});
    },
  };
  addEventListener("message", ({data: {command, ...options}}) => commands[command](options));
}

if (typeof document === "undefined") serve();

/* Return new weights with the distributions of language_model.py, attention.py and layers.py. */
function initialWeights(a, V, seed) {
  if (a.embed_dim === undefined) return {"table.weight": {shape: [V, V], values: new Float32Array(V * V)}};
  const random = randomNumbers(seed), weights = {}, {embed_dim: C, head_size: D, mlp_width: F} = a;
  const normal = (std) => () => std * Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
  const uniform = (limit) => () => limit * (2 * random() - 1), zero = () => 0, one = () => 1;
  const add = (name, shape, draw) => {
    weights[name] = {shape, values: Float32Array.from({length: shape.reduce((x, y) => x * y)}, draw)};
  };
  const addLinear = (name, O, I, draw, hasBias, drawBias = zero) => {
    add(`${name}.weight`, [O, I], draw);
    if (hasBias) add(`${name}.bias`, [O], drawBias);
  };
  // The last layer of a residual branch is zero at first.
  const addLast = (name, O, I, draw = a.residual ? zero : uniform(I ** -0.5)) => addLinear(name, O, I, draw, a.bias, draw);
  const std = a.residual ? (a.tie_embeddings ? 0.02 : 0.3) : 1, usual = normal(C ** -0.5);
  const isSoftmax = a.attention === "softmax", width = isSoftmax ? a.heads * D : C, hasNorm = a.norm !== "none";
  add("token_embedding.weight", [V, C], normal(std));
  if (a.positions === "learned") add("position_embedding.weight", [a.block_size, C], normal(a.residual ? std : 0.5));
  for (let layer = 0; layer < a.layers; layer++) {
    const block = `blocks.${layer}.`, attention = `${block}attention.`;
    if (isSoftmax) {
      const sharp = a.residual ? usual : normal(0.35 * C ** -0.5);
      for (const part of ["query", "key", "value"]) {
        const isValue = part === "value", O = part === "query" ? width : a.kv_heads * D;
        addLinear(attention + part, O, C, isValue ? usual : sharp, a.qkv_bias);
        if (a.query_key_norm && !isValue) add(`${attention}${part}_norm.gain`, [D], one);
      }
      if (a.projection) addLast(`${attention}projection`, C, width);
    }
    if (hasNorm && a.attention !== "none") add(`${block}attention_norm.gain`, [C], one);
    if (a.mlp === "none") continue;
    for (const part of ["gate", "up"]) addLinear(`${block}mlp.${part}`, F, C, usual, a.bias);
    addLast(`${block}mlp.down`, C, F);
    if (hasNorm) add(`${block}mlp_norm.gain`, [C], one);
  }
  const last = isSoftmax && !a.projection ? width : C;
  if (hasNorm) add("norm.gain", [last], one);
  if (!a.tie_embeddings) add("head.weight", [V, last], zero);
  if (a.head_bias) add("head.bias", [V], zero);
  return weights;
}
