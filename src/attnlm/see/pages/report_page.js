/* A report: a replay of training, and the model, or recorded attention if a page cannot run it. A slider moves the mark
   on the curve, and selects the line of generated text and the head's map. */

import {bytesOf} from "./arrays.js";
import {drawChart, legend, stepAt} from "./chart.js";
import {chooseByKeys, element, page, readData, setChosen, withCommas} from "./components.js";
import {showRecordedAttention, weightsAt} from "./heads_view.js";
import {attentionMap, drawMap, SMALL_CELLS} from "./maps.js";
import {showModels} from "./model_page.js";

const FRAME = 500; // milliseconds of a snapshot in the film

class Replay {
  slider = page.snapshot;
  rows = [...page.lines.querySelectorAll("tbody tr")];
  timer = null; // while the film plays

  constructor({snapshots, films, passage, curve}) {
    this.snapshots = snapshots;
    this.passage = passage;
    this.curve = curve;
    this.films = films.map(({name, scores, maps}) => ({name, scores, maps: bytesOf(maps)}));
    this.slider.addEventListener("input", () => this.showSnapshot(this.number));
    this.rows.forEach((row, number) => row.addEventListener("click", () => this.showSnapshot(number)));
    if (curve) page.curve.addEventListener("click", (event) => this.chooseNearest(stepAt(event, page.curve, this.end)));
    if (films.length) {
      page.head.addEventListener("change", () => this.showFilm());
      page.play.addEventListener("click", () => this.playOrStop());
      chooseByKeys(page.frames, () => this.number, (number) => this.showSnapshot(number));
      this.showFilm();
    } else this.showSnapshot(this.number);
  }

  /* The number of the chosen snapshot. */
  get number() { return this.slider.valueAsNumber; }

  /* The film of the chosen head. */
  get film() { return this.films[page.head.value]; }

  /* The last step of the curve. */
  get end() { return this.curve.lines[0].points.at(-1)[0]; }

  chooseNearest(wanted) {
    const distances = this.snapshots.map(({step}) => Math.abs(step - wanted));
    this.showSnapshot(distances.indexOf(Math.min(...distances)));
  }

  showSnapshot(number) {
    const snapshot = this.snapshots[number];
    const loss = snapshot.loss === null ? "" : `, loss ${snapshot.loss.toFixed(4)}`;
    const when = `${stepName(snapshot)}${loss}`;
    this.slider.value = number;
    this.slider.setAttribute("aria-valuetext", when);
    if (this.curve) drawChart(page.curve, {...this.curve, marked: snapshot.step});
    this.rows.forEach((row, other) => row.classList.toggle("now", other === number));
    const box = page.lines.parentElement;
    box.scrollTop = this.rows[number].offsetTop - box.clientHeight / 2;
    if (this.films.length) this.showMap(number);
  }

  showMap(number) {
    const {passage, film: {name, scores}} = this;
    const score = scores[number].toFixed(2);
    page["film-caption"].textContent = `${name}, ${stepName(this.snapshots[number])}: ${score} on the previous token`;
    page.film.replaceChildren(attentionMap({tokens: passage, query: passage.length - 1, rowOf: this.rowsOf(number)}));
    [...page.frames.children].forEach((frame, other) => setChosen(frame, other === number));
  }

  /* Return a function from a token to its attention weights in a snapshot, for the chosen head. */
  rowsOf(number) { return (t) => weightsAt(this.film.maps, number, this.passage.length, t); }

  /* Show the maps of the chosen head in all snapshots. */
  showFilm() {
    const {scores} = this.film;
    page.frames.replaceChildren(...this.snapshots.map((snapshot, number) => (
      element("button", {type: "button", onclick: () => this.showSnapshot(number)},
        drawMap(element("canvas"), this.passage.length, this.rowsOf(number), SMALL_CELLS),
        element("span", {}, stepName(snapshot)), element("small", {}, scores[number].toFixed(2))))));
    this.showSnapshot(this.number);
  }

  /* Play from the first snapshot to the last, or stop. */
  playOrStop() {
    const isPlaying = this.timer !== null;
    clearInterval(this.timer);
    this.timer = null;
    page.play.textContent = isPlaying ? "Play" : "Stop";
    if (isPlaying) return;
    this.showSnapshot(0);
    this.timer = setInterval(() => {
      if (this.number < this.snapshots.length - 1) this.showSnapshot(this.number + 1);
      else this.playOrStop();
    }, FRAME);
  }
}

function stepName({step}) { return `step ${withCommas(step)}`; }

const data = readData();
if (data.curve) {
  drawChart(page.curve, data.curve);
  page.curve.after(legend(data.curve.lines));
}
if (data.snapshots.length) new Replay(data);
if (data.attention) showRecordedAttention(data.attention);
showModels(data);
