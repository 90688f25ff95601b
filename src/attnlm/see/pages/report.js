"use strict";
// The replay: one slider moves the mark on the curve, the line that was said, and the head's map.
const slider = document.getElementById("snapshot");
const curve = document.getElementById("curve");
const film = document.getElementById("film");
const head = document.getElementById("head");
const rows = [...document.querySelectorAll("#lines tbody tr")];
const frames = film === null ? [] : [...document.querySelectorAll("#frames figure")];

function showSnapshot() {
  const at = slider.valueAsNumber;
  const snapshot = data.snapshots[at];
  const loss = snapshot.loss === null ? "" : `, loss ${snapshot.loss.toFixed(4)}`;
  const when = `step ${snapshot.step.toLocaleString("en")}${loss}`;
  slider.setAttribute("aria-valuetext", when);
  document.getElementById("when").textContent = when;
  document.getElementById("said").textContent = snapshot.text;
  if (curve !== null) document.getElementById("mark").style.setProperty("--at", snapshot.at);
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
slider.setAttribute("aria-valuetext", document.getElementById("when").textContent);
rows.forEach((row, number) => row.addEventListener("click", () => goTo(number)));
if (curve !== null) {
  curve.addEventListener("click", (event) => {
    const box = curve.querySelector("svg").getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width;
    const away = data.snapshots.map((snapshot) => Math.abs(snapshot.at - at));
    goTo(away.indexOf(Math.min(...away)));
  });
}
if (film !== null) {
  head.closest(".control").hidden = false;
  head.addEventListener("change", showHeadsFilm);
  frames.forEach((frame, number) => frame.addEventListener("click", () => goTo(number)));
}
