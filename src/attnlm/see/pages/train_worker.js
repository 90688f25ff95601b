/* The worker of a page that trains: it makes the steps, so that the page stays responsive.

   The page sends {command, run, ...}. A reset, with {architecture, parameters, training, vocabSize, train, validation},
   begins the run of this number; the others are start, pause, step, and evaluate, with {step, weights, silenced}. The
   worker sends {kind, run, ...}: a snapshot, with {step, trainLoss, validationLoss, weights, isRunning}; progress, with
   {step, trainLoss, tokensPerSecond, isRunning}; or an evaluation, with {step, loss, silenced}. `silenced` are pairs of
   a layer and a head. */

import {BatchModel} from "./batch_model.js";
import {Batches, windowsAt} from "./batches.js";
import {initialWeights} from "./initial_weights.js";
import {updateWeights} from "./optimizer.js";

const SLICE = 100; // milliseconds of training between two looks at the page's commands
const VALIDATION_TOKENS = 4096; // per evaluation, spread evenly over the split
const FIRST_SNAPSHOTS = [0, 1, 3, 10, 30, 100];
const SNAPSHOTS = 60; // later ones

class Trainer {
  step = 0;
  lossSum = 0; // of the steps since the last snapshot
  losses = 0; // their number

  constructor({architecture, parameters, training, vocabSize, train, validation}) {
    const T = architecture.block_size;
    const B = training.batch_size;
    const weights = initialWeights(parameters, vocabSize, training.seed);
    this.training = training;
    this.model = new BatchModel({architecture, windows: B, weights});
    this.batches = new Batches(train, T, B, training.seed);
    this.validation = validationBatches(validation, T, B);
  }

  get isDone() { return this.step >= this.training.steps; }

  get wantsSnapshot() {
    const interval = Math.ceil(this.training.steps / SNAPSHOTS);
    return FIRST_SNAPSHOTS.includes(this.step) || this.step % interval === 0 || this.isDone;
  }

  /* Make a step and return its loss. */
  makeStep() {
    const loss = this.model.loss(...this.batches.at(this.step));
    this.model.backward();
    updateWeights(this.model, this.step, this.training);
    this.step++;
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
    const {model, step} = this;
    const trainLoss = this.losses ? this.lossSum / this.losses : null;
    this.lossSum = 0;
    this.losses = 0;
    const copies = Object.entries(model.weights).map(([name, {shape, values}]) => (
      [name, {shape, values: values.slice()}]));
    return {step, trainLoss, validationLoss: this.validationLoss(), weights: Object.fromEntries(copies)};
  }

  /* Return the validation loss of other weights, with some heads switched off. */
  lossOf(weights, silenced) {
    const {architecture, B: windows} = this.model;
    const model = new BatchModel({architecture, weights, windows});
    for (const [layer, head] of silenced) model.silence(layer, head);
    return this.validationLoss(model);
  }
}

/* Return batches of B windows, spread evenly over the validation split. */
function validationBatches(ids, T, B) {
  const possible = Math.floor((ids.length - 1) / T);
  const groups = Math.max(1, Math.floor(Math.min(possible, VALIDATION_TOKENS / T) / B));
  const count = groups * B;
  const starts = Array.from({length: count}, (_, n) => Math.floor((n * possible) / count) * T);
  return Array.from({length: groups}, (_, n) => windowsAt(ids, starts.slice(n * B, (n + 1) * B), T));
}

/* Answers the page's commands. */
class Server {
  trainer = null;
  isRunning = false;
  number = 0; // of the reset
  timer = 0;

  send(kind, content) { postMessage({kind, run: this.number, ...content}); }

  sendSnapshot() { this.send("snapshot", {...this.trainer.snapshot(), isRunning: this.isRunning}); }

  /* Make steps for a while, and go on after the commands that have arrived. */
  run() {
    if (!this.isRunning) return;
    const {trainer} = this;
    const begin = performance.now();
    const first = trainer.step;
    let sum = 0;
    while (!trainer.isDone && performance.now() - begin < SLICE) {
      sum += trainer.makeStep();
      if (trainer.isDone) this.isRunning = false;
      if (trainer.wantsSnapshot) this.sendSnapshot();
    }
    const steps = trainer.step - first;
    if (steps) this.sendProgress(sum / steps, steps, (performance.now() - begin) / 1000);
    clearTimeout(this.timer); // of a training that was paused meanwhile
    this.timer = setTimeout(() => this.run());
  }

  sendProgress(trainLoss, steps, seconds) {
    const {trainer: {step, training, model}, isRunning} = this;
    const tokensPerSecond = (steps * training.batch_size * model.T) / seconds;
    this.send("progress", {step, trainLoss, tokensPerSecond, isRunning});
  }

  commands = {
    reset: ({run, ...options}) => {
      this.isRunning = false;
      this.number = run;
      this.trainer = new Trainer(options);
      this.sendSnapshot();
    },
    start: () => {
      if (this.isRunning) return;
      this.isRunning = !this.trainer.isDone;
      if (this.isRunning) this.run();
      else this.sendSnapshot();
    },
    pause: () => {
      this.isRunning = false;
      this.sendSnapshot();
    },
    step: () => {
      if (!this.trainer.isDone) this.trainer.makeStep();
      this.commands.pause();
    },
    evaluate: ({step, weights, silenced}) => {
      this.send("evaluation", {step, loss: this.trainer.lossOf(weights, silenced), silenced});
    },
  };
}

/* Answer the page's commands; called in the worker. */
export function serve() {
  const server = new Server();
  addEventListener("message", ({data: {command, ...options}}) => server.commands[command](options));
}
