/* The page that trains, which see/train_page.py makes: a text, controls, one or two panes with a model each, and below
   them the first pane's model in the parts of ModelPage.

   For the console and for tests: attnlm.trainers has a trainer for each pane, and attnlm.trainer is the first one.
     start(), pause(), step()    train until `pause` or the last step; make one step
     reset({rung, seed, learningRate, text})
                                 begin again with new weights; what is left out stays unchanged
     state                       {rung, step, trainLoss, validationLoss, tokensPerSecond, isRunning}

   The functions return a promise of the next snapshot. They throw TextError for a text that is too short or has too
   many different characters. */

import {page, readData, withCommas} from "./components.js";
import {Corpus, MOST_CHARACTERS} from "./corpus.js";
import {darkness} from "./maps.js";
import {ModelPage} from "./model_page.js";
import {download, savedPage} from "./saved_files.js";
import {TextError} from "./tokenizers.js";
import {MOST_PASSAGE, Pane} from "./training_pane.js";
import {unpackModels} from "./unpack_models.js";

class TrainPage {
  panes = [];
  corpus = null; // the text of all panes
  chosenStep = Infinity; // the slider's step; Infinity for the newest snapshot
  workerUrl = URL.createObjectURL(workerCode());

  /* `rungs` are the models that a reader can choose, by name: {architecture, parameters, settings}. */
  constructor({rungs, rung, text}, models, prompt) {
    this.rungs = rungs;
    this.useCorpus(new Corpus(text, this.largestContext));
    this.addPane(rung);
    this.modelPage = new ModelPage([...models, this.panes[0].model], prompt);
    this.addListeners();
  }

  get largestContext() {
    return Math.max(...Object.values(this.rungs).map(({architecture}) => architecture.block_size));
  }

  addListeners() {
    const resetAll = () => this.panes.forEach((pane) => pane.reset());
    const showAll = () => this.panes.forEach((pane) => pane.show());
    page["train-controls"].addEventListener("submit", (event) => {
      event.preventDefault();
      this.startOrPause();
    });
    page["one-step"].addEventListener("click", () => this.panes.forEach((pane) => pane.step()));
    page.reset.addEventListener("click", resetAll);
    page["train-seed"].addEventListener("change", () => { if (page["train-seed"].reportValidity()) resetAll(); });
    page["at-step"].addEventListener("input", () => this.chooseStep(page["at-step"].valueAsNumber));
    page.passage.addEventListener("input", () => {
      page.prompt.value = page.passage.value;
      showAll();
    });
    page["use-text"].addEventListener("click", () => this.useOwnText(page["own-text"].value));
    page["own-file"].addEventListener("change", () => this.useFile(page["own-file"].files));
    page["save-page"].addEventListener("click", () => {
      download("trained.html", savedPage(this.panes[0], this.rungs));
    });
    for (const kind of ["dragover", "drop"]) {
      page.trainer.addEventListener(kind, (event) => {
        event.preventDefault();
        this.useFile(event.dataTransfer.files);
      });
    }
    page.compare.addEventListener("click", () => this.compare());
    darkness.addEventListener("change", showAll);
    this.modelPage.onIdle = () => this.follow(this.panes[0]);
    new IntersectionObserver(this.modelPage.onIdle).observe(page.models);
  }

  // --- The text -------------------------------------------------------------------------------------------------

  /* Train on another text: with `caller`, which begins again itself, and with all other panes. */
  useCorpus(corpus, caller) {
    const {name, size, V, validation} = corpus;
    this.corpus = corpus;
    page.passage.value = page.prompt.value = validation.trimStart().split("\n")[0].slice(0, MOST_PASSAGE - 4);
    page.corpus.textContent = `Text: ${name}, ${withCommas(size)} characters, ${V} different ones. `
      + "The last tenth is for validation.";
    this.panes.filter((pane) => pane !== caller).forEach((pane) => pane.reset());
  }

  useText(text, caller, name) { this.useCorpus(Corpus.of(text, this.largestContext, name), caller); }

  /* Use a text that the reader pasted or dropped, or say why not. */
  useOwnText(text, name) {
    try {
      this.useText(text, null, name);
      const note = "Only the first million characters are used.";
      page["train-status"].textContent = text.length > MOST_CHARACTERS ? note : "";
    } catch (error) {
      if (!(error instanceof TextError)) throw error;
      page["train-status"].textContent = error.message;
    }
  }

  async useFile([file]) { if (file) this.useOwnText(await file.text(), file.name); }

  /* Return the ids of the text of the maps. Characters that the vocabulary lacks are left out. */
  passage() {
    const {tokenizer} = this.corpus;
    const known = [...page.passage.value].filter((character) => tokenizer.idOf.has(character));
    return tokenizer.encode(known.slice(0, MOST_PASSAGE).join(""));
  }

  // --- The panes ------------------------------------------------------------------------------------------------

  get isRunning() { return this.panes.some(({run}) => run.isRunning); }

  get newestStep() { return Math.max(0, ...this.panes.map(({run}) => run.snapshots.at(-1)?.step ?? 0)); }

  addPane(rung) {
    const pane = new Pane(this, this.workerUrl, rung);
    this.panes.push(pane);
    page.panes.append(pane.node);
  }

  /* Compare two models, or end the comparison. */
  compare() {
    if (this.panes.length === 1) this.addPane(this.panes[0].run.rung);
    else {
      const [pane] = this.panes.splice(1);
      pane.close();
    }
    this.panes[0].reset();
    page.compare.setAttribute("aria-pressed", String(this.panes.length === 2));
    page.panes.classList.toggle("two", this.panes.length === 2);
  }

  startOrPause() {
    const {isRunning} = this;
    for (const pane of this.panes) {
      if (isRunning) pane.pause();
      else pane.start();
    }
  }

  /* Show the models of a step; with the newest step, the models of later ones too. */
  chooseStep(step) {
    this.chosenStep = step >= this.newestStep ? Infinity : Math.max(0, step);
    this.showControls();
    this.panes.forEach((pane) => pane.show());
  }

  showNewest() {
    this.chosenStep = Infinity;
    this.showControls();
  }

  showControls() {
    const {panes, newestStep} = this;
    page.train.textContent = this.isRunning ? "Pause" : "Train";
    page.train.disabled = panes.length > 0 && panes.every(({run}) => run.made >= run.training.steps);
    page["train-end"].hidden = !page.train.disabled;
    page["at-step"].max = newestStep;
    page["at-step"].value = Math.min(this.chosenStep, newestStep);
  }

  /* Show a pane's model below, if it is the first pane's and in sight. While it trains, the parts below are shown to the
     end before a newer model takes their place. */
  follow(pane) {
    if (pane !== this.panes[0] || !pane.shown || pane.model === this.modelPage.models.at(-1)) return;
    const isOutOfSight = page.models.getBoundingClientRect().top > innerHeight;
    if (pane.run.isRunning && (isOutOfSight || this.modelPage.isBusy)) return;
    page["into-step"].textContent = `the model of step ${withCommas(pane.shown.step)}`;
    this.modelPage.replaceLastModel(pane.model);
  }
}

/* Return the code of the worker: the scripts that page.py marks for it, and a call. */
function workerCode() {
  const scripts = [...document.querySelectorAll("script[data-worker]")].map(({textContent}) => `${textContent}\n`);
  return new Blob([...scripts, 'attnlm.modules["train_worker.js"].serve();'], {type: "text/javascript"});
}

const {models: packed, prompt, training} = readData();
const trainPage = new TrainPage(training, unpackModels(packed), prompt);
const {panes, modelPage} = trainPage;
Object.assign(globalThis.attnlm, {models: modelPage.models, modelPage, trainPage, trainers: panes, trainer: panes[0]});
