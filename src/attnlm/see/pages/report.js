"use strict";
/* A replay of training: a slider moves the mark on the curve, and selects the generated text and the head's map. */
const {snapshots, films} = data, slider = page.snapshot, plot = page.curve?.querySelector("svg");
const rows = [...page.lines.querySelectorAll("tbody tr")];
let timer = null; // while playing

/* Return the horizontal position of a snapshot's step in the plot, whose x axis begins at step 0. */
function positionOf({step}) {
  const left = Number(plot.dataset.left), right = Number(plot.dataset.right);
  return left + ((right - left) * step) / plot.dataset.end;
}

function showSnapshot(at) {
  const snapshot = snapshots[at], loss = snapshot.loss === null ? "" : `, loss ${snapshot.loss.toFixed(4)}`;
  const step = `step ${snapshot.step.toLocaleString("en")}`;
  slider.value = at;
  slider.setAttribute("aria-valuetext", `${step}${loss}`);
  page.when.textContent = `${step}${loss}`;
  page.said.textContent = snapshot.text;
  if (plot) page.mark.style.setProperty("--at", positionOf(snapshot));
  rows.forEach((row, number) => row.classList.toggle("now", number === at));
  if (films.length) showMap(at, step);
}

/* Return the attention weights (t + 1) of token t at a snapshot, for the chosen head. */
function weightsAt(maps, at, t) {
  const T = data.passage.length, start = (at * T * (T + 1)) / 2 + (t * (t + 1)) / 2;
  return Float32Array.from(maps.subarray(start, start + t + 1), (step) => step / 255);
}

function showMap(at, step) {
  const {name, scores, maps} = films[page.head.value], tokens = data.passage;
  page["film-caption"].textContent = `${name}, ${step}: ${scores[at].toFixed(2)} on the previous token`;
  page.film.replaceChildren(labelledMap({tokens, query: tokens.length - 1, rowOf: (t) => weightsAt(maps, at, t)}));
  [...page.frames.children].forEach((frame, number) => setChosen(frame, number === at));
}

function showFilm() {
  const {scores, maps} = films[page.head.value];
  page.frames.replaceChildren(...snapshots.map(({step}, at) => {
    const canvas = drawMap(element("canvas"), data.passage.length, (t) => weightsAt(maps, at, t), SMALL_CELLS);
    return element("button", {type: "button", onclick: () => showSnapshot(at)}, canvas,
      element("span", {}, `step ${step.toLocaleString("en")}`), element("small", {}, scores[at].toFixed(2)));
  }));
  showSnapshot(slider.valueAsNumber);
}

/* Play from the first snapshot to the last, or stop. */
function play() {
  const isPlaying = timer !== null;
  clearInterval(timer);
  timer = null;
  page.play.textContent = isPlaying ? "Play" : "Stop";
  if (isPlaying) return;
  showSnapshot(0);
  timer = setInterval(() => {
    if (slider.valueAsNumber < snapshots.length - 1) showSnapshot(slider.valueAsNumber + 1);
    else play();
  }, 500);
}

slider.addEventListener("input", () => showSnapshot(slider.valueAsNumber));
rows.forEach((row, number) => row.addEventListener("click", () => showSnapshot(number)));
if (plot) {
  page.mark.hidden = false;
  page.curve.addEventListener("click", (event) => {
    const [x] = fractionsAt(event, plot);
    const distances = snapshots.map((snapshot) => Math.abs(positionOf(snapshot) - x));
    showSnapshot(distances.indexOf(Math.min(...distances)));
  });
}
if (films.length) {
  for (const film of films) film.maps = bytesOf(film.maps);
  page.head.addEventListener("change", showFilm);
  page.play.addEventListener("click", play);
  chooseByKeys(page.frames, () => slider.valueAsNumber, showSnapshot);
  showFilm();
} else showSnapshot(slider.valueAsNumber);
