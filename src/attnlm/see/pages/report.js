"use strict";
/* The replay: one slider moves the mark on the curve, and selects the sampled line and the head's map. */
const {snapshots, films} = data, slider = page.snapshot, plot = page.curve?.querySelector("svg");
const rows = [...page.lines.querySelectorAll("tbody tr")];
let playing = null; // a timer

/* Return the horizontal position of a snapshot's step in the picture of the curve, whose x axis begins at step 0. */
function across(snapshot) {
  const [left, right] = ["left", "right"].map((side) => Number(plot.dataset[side]));
  return left + ((right - left) * snapshot.step) / plot.dataset.end;
}

function goTo(at) {
  const snapshot = snapshots[at], loss = snapshot.loss === null ? "" : `, loss ${snapshot.loss.toFixed(4)}`;
  const step = `step ${snapshot.step.toLocaleString("en")}`;
  slider.value = at;
  slider.setAttribute("aria-valuetext", `${step}${loss}`);
  page.when.textContent = `${step}${loss}`;
  page.said.textContent = snapshot.text;
  if (plot) page.mark.style.setProperty("--at", across(snapshot));
  rows.forEach((one, number) => one.classList.toggle("now", number === at));
  if (films.length) showMap(at, step);
}

/* Return the attention weights (t + 1) of token t at a snapshot, for the chosen head. */
function rowIn(maps, at, t) {
  const T = data.passage.length, start = (at * T * (T + 1)) / 2 + (t * (t + 1)) / 2;
  return Float32Array.from(maps.subarray(start, start + t + 1), (step) => step / 255);
}

function showMap(at, step) {
  const {name, scores, maps} = films[page.head.value], query = data.passage.length - 1;
  page["film-caption"].textContent = `${name}, ${step}: ${scores[at].toFixed(2)} on the previous token`;
  page.film.replaceChildren(labelledMap({tokens: data.passage, query, rowOf: (t) => rowIn(maps, at, t), noteOf: (t, s) => s > t
    ? `“${data.passage[t]}” can't see “${data.passage[s]}”, which comes later`
    : `“${data.passage[t]}” gives ${percent(rowIn(maps, at, t)[s])} to “${data.passage[s]}”`}));
  [...page.frames.children].forEach((frame, number) => mark(frame, number === at));
}

function showFilm() {
  const {scores, maps} = films[page.head.value];
  page.frames.replaceChildren(...snapshots.map(({step}, at) => {
    const canvas = element("canvas", {width: 1, height: 1});
    drawMap(canvas, data.passage.length, (t) => rowIn(maps, at, t), SMALL_CELLS);
    return element("button", {type: "button", onclick: () => goTo(at)}, canvas,
      element("span", {}, `step ${step.toLocaleString("en")}`), element("small", {}, scores[at].toFixed(2)));
  }));
  goTo(slider.valueAsNumber);
}

/* Play from the first evaluation to the last, or stop. */
function play() {
  const isPlaying = playing !== null;
  clearInterval(playing);
  playing = null;
  page.play.textContent = isPlaying ? "Play" : "Stop";
  if (isPlaying) return;
  goTo(0);
  playing = setInterval(() => {
    if (slider.valueAsNumber < snapshots.length - 1) goTo(slider.valueAsNumber + 1);
    else play();
  }, 500);
}

slider.addEventListener("input", () => goTo(slider.valueAsNumber));
rows.forEach((row, number) => row.addEventListener("click", () => goTo(number)));
if (plot) {
  page.mark.hidden = false;
  page.curve.addEventListener("click", (event) => {
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
    const away = snapshots.map((snapshot) => Math.abs(across(snapshot) - at));
    goTo(away.indexOf(Math.min(...away)));
  });
}
if (films.length) {
  for (const film of films) film.maps = bytesOf(film.maps);
  page.head.addEventListener("change", showFilm);
  page.play.addEventListener("click", play);
  moveByKeys(page.frames, () => slider.valueAsNumber, goTo);
  showFilm();
} else goTo(slider.valueAsNumber);
