/* A report: recorded attention, and a replay of training. A slider moves the mark on the curve, and selects the
   generated text and the head's map. */

import {bytesOf} from "./arrays.js";
import {showAttention} from "./attend.js";
import {chooseByKeys, element, fractionsAt, page, readData, setChosen, withCommas} from "./components.js";
import {attentionMap, drawMap, SMALL_CELLS} from "./maps.js";

const FRAME = 500; // milliseconds of a snapshot in the film

class Replay {
  slider = page.snapshot;
  plot = page.curve?.querySelector("svg");
  rows = [...page.lines.querySelectorAll("tbody tr")];
  timer = null; // while the film plays

  constructor({snapshots, films, passage}) {
    this.snapshots = snapshots;
    this.passage = passage;
    this.films = films.map(({name, scores, maps}) => ({name, scores, maps: bytesOf(maps)}));
    this.slider.addEventListener("input", () => this.showSnapshot(this.number));
    this.rows.forEach((row, number) => row.addEventListener("click", () => this.showSnapshot(number)));
    if (this.plot) this.followClicks();
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

  /* Clicks on the curve choose the nearest snapshot. */
  followClicks() {
    page.mark.hidden = false;
    page.curve.addEventListener("click", (event) => {
      const [x] = fractionsAt(event, this.plot);
      const distances = this.snapshots.map((snapshot) => Math.abs(this.positionOf(snapshot) - x));
      this.showSnapshot(distances.indexOf(Math.min(...distances)));
    });
  }

  /* Return the horizontal position of a snapshot's step in the plot, whose x axis begins at step 0. */
  positionOf({step}) {
    const left = Number(this.plot.dataset.left);
    const right = Number(this.plot.dataset.right);
    return left + ((right - left) * step) / this.plot.dataset.end;
  }

  showSnapshot(number) {
    const snapshot = this.snapshots[number];
    const loss = snapshot.loss === null ? "" : `, loss ${snapshot.loss.toFixed(4)}`;
    const when = `${stepName(snapshot)}${loss}`;
    this.slider.value = number;
    this.slider.setAttribute("aria-valuetext", when);
    page.when.textContent = when;
    page.said.textContent = snapshot.text;
    if (this.plot) page.mark.style.setProperty("--at", this.positionOf(snapshot));
    this.rows.forEach((row, other) => row.classList.toggle("now", other === number));
    if (this.films.length) this.showMap(number);
  }

  showMap(number) {
    const {passage, film: {name, scores}} = this;
    const score = scores[number].toFixed(2);
    page["film-caption"].textContent = `${name}, ${stepName(this.snapshots[number])}: ${score} on the previous token`;
    const rowOf = (t) => this.weightsAt(number, t);
    page.film.replaceChildren(attentionMap({tokens: passage, query: passage.length - 1, rowOf}));
    [...page.frames.children].forEach((frame, other) => setChosen(frame, other === number));
  }

  /* Return the attention weights (t + 1) of token t in a snapshot, for the chosen head. */
  weightsAt(number, t) {
    const T = this.passage.length;
    const start = (number * T * (T + 1)) / 2 + (t * (t + 1)) / 2;
    return Float32Array.from(this.film.maps.subarray(start, start + t + 1), (step) => step / 255);
  }

  /* Show the maps of the chosen head in all snapshots. */
  showFilm() {
    const {scores} = this.film;
    page.frames.replaceChildren(...this.snapshots.map((snapshot, number) => {
      const rowOf = (t) => this.weightsAt(number, t);
      return element("button", {type: "button", onclick: () => this.showSnapshot(number)},
        drawMap(element("canvas"), this.passage.length, rowOf, SMALL_CELLS),
        element("span", {}, stepName(snapshot)), element("small", {}, scores[number].toFixed(2)));
    }));
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
showAttention(data);
new Replay(data);
