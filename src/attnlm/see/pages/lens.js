"use strict";
// What each layer's state of the chosen token is read as: report_page.py says how `ids` lie.
const readings = [...document.querySelectorAll("#lens-at tbody tr")].map((row) =>
  [...row.querySelectorAll("td")],
);

function showLens() {
  document.getElementById("lens-token").textContent = `token ${chosen + 1}, ${data.tokens[chosen]}`;
  readings.forEach((cells, layer) => {
    cells.forEach((cell, number) => {
      const at = (layer * count + chosen) * data.lens.count + number;
      const percent = data.lens.percents[at];
      cell.style.setProperty("--share", percent / 100);
      cell.firstChild.textContent = data.lens.words[data.lens.ids[at]];
      cell.lastChild.textContent = percent;
    });
  });
}

text.addEventListener("choose", showLens);
