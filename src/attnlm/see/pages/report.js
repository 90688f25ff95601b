"use strict";
// The replay: one slider moves the mark on the curve, the line that was said, and the head's map.
const slider = document.getElementById("snapshot");
const curve = document.getElementById("curve");
const plot = curve && curve.querySelector("svg");
const film = document.getElementById("film");
const head = document.getElementById("head");
const rows = [...document.querySelectorAll("#lines tbody tr")];
const frames = film === null ? [] : [...document.querySelectorAll("#frames figure")];

// Where a snapshot's step lies across the picture of the curve, whose x axis begins at step 0.
function across(snapshot) {
  const [left, right] = ["left", "right"].map((side) => Number(plot.dataset[side]));
  return left + ((right - left) * snapshot.step) / plot.dataset.end;
}

function showSnapshot() {
  const at = slider.valueAsNumber;
  const snapshot = data.snapshots[at];
  const loss = snapshot.loss === null ? "" : `, loss ${snapshot.loss.toFixed(4)}`;
  const when = `step ${snapshot.step.toLocaleString("en")}${loss}`;
  slider.setAttribute("aria-valuetext", when);
  document.getElementById("when").textContent = when;
  document.getElementById("said").textContent = snapshot.text;
  if (curve !== null) document.getElementById("mark").style.setProperty("--at", across(snapshot));
  for (const marked of [rows, frames]) {
    marked.forEach((one, number) => one.classList.toggle("now", number === at));
  }
  if (film !== null) showLarge(at);
}

function showLarge(at) {
  const { name, scores } = data.films[head.value];
  document.getElementById("large").style.setProperty("--frame", at);
  const step = data.snapshots[at].step.toLocaleString("en");
  document.getElementById("large-caption").textContent =
    `${name}, step ${step}: ${scores[at].toFixed(2)} on the previous token`;
}

function showHeadsFilm() {
  const { strip, scores } = data.films[head.value];
  film.style.setProperty("--strip", `url(${strip})`);
  frames.forEach((frame, number) => {
    frame.querySelector("b").textContent = scores[number].toFixed(2);
  });
  showLarge(slider.valueAsNumber);
}

function goTo(number) {
  slider.value = number;
  showSnapshot();
}

slider.closest(".control").hidden = false;
slider.addEventListener("input", showSnapshot);
rows.forEach((row, number) => row.addEventListener("click", () => goTo(number)));
if (curve !== null) {
  document.getElementById("mark").hidden = false;
  curve.addEventListener("click", (event) => {
    const box = plot.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width;
    const away = data.snapshots.map((snapshot) => Math.abs(across(snapshot) - at));
    goTo(away.indexOf(Math.min(...away)));
  });
}
if (film !== null) {
  head.closest(".control").hidden = false;
  head.addEventListener("change", showHeadsFilm);
  frames.forEach((frame, number) => frame.addEventListener("click", () => goTo(number)));
}
showSnapshot();
