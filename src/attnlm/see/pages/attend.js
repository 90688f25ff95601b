"use strict";
// Weights lie row after row, layer by layer and head by head: row t has t + 1 bytes, 255 for all.
const data = JSON.parse(document.getElementById("data").textContent);
const weights = Uint8Array.from(atob(data.weights), (character) => character.charCodeAt(0));
const count = data.tokens.length;
const perHead = (count * (count + 1)) / 2;
const text = document.getElementById("text");
const buttons = [...text.querySelectorAll("button")];
const heads = [...document.querySelectorAll(".head")].map((head) => ({
  most: head.querySelector(".most"),
  spans: [...head.querySelectorAll(".looked span")],
}));
let chosen = count - 1;

function choose(place) {
  buttons[chosen].setAttribute("aria-pressed", "false");
  buttons[chosen].tabIndex = -1;
  chosen = place;
  buttons[chosen].setAttribute("aria-pressed", "true");
  buttons[chosen].tabIndex = 0;
  document.getElementById("chosen").textContent = `token ${place + 1}, ${data.tokens[place]}`;
  heads.forEach((head, number) => showHead(head, number * perHead + (place * (place + 1)) / 2));
  text.dispatchEvent(new Event("choose"));
}

function showHead(head, start) {
  const row = weights.subarray(start, start + chosen + 1);
  head.spans.forEach((span, place) => {
    span.style.setProperty("--share", place <= chosen ? (row[place] / 255).toFixed(3) : 0);
  });
  const order = [...row.keys()].sort((one, other) => row[other] - row[one]).slice(0, 2);
  const shares = order.map((place) => `${data.tokens[place]} ${Math.round(row[place] / 2.55)}%`);
  head.most.textContent = shares.join(", ");
}

function placeOf(event) {
  const button = event.target.closest("button[data-place]");
  return button === null ? null : Number(button.dataset.place);
}

for (const kind of ["pointerover", "focusin", "click"]) {
  text.addEventListener(kind, (event) => {
    const place = placeOf(event);
    if (place !== null && place !== chosen) choose(place);
  });
}

text.addEventListener("keydown", (event) => {
  const moves = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: count - 1 };
  const place = moves[event.key];
  if (place === undefined) return;
  event.preventDefault();
  if (place >= 0 && place < count) buttons[place].focus();
});
