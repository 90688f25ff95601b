"use strict";
// A candidate is a token and its logit less the largest; `sums` are over the whole vocabulary, one
// for each temperature.
const temperature = document.getElementById("temperature");

function showNext() {
  const at = Math.round(10 * temperature.valueAsNumber) - 1;
  const [divisor, sum] = [data.next.temperatures[at], data.next.sums[chosen][at]];
  const likeliest = data.next.candidates[chosen].map(([token, logit]) => [
    token,
    Math.exp(logit / divisor) / sum,
  ]);
  const shown = likeliest.reduce((total, [, probability]) => total + probability, 0);
  [...document.querySelectorAll("#next li")].forEach((line, number) => {
    const [token, probability] = likeliest[number] ?? [null, Math.max(0, 1 - shown)];
    if (token !== null) line.querySelector(".candidate").textContent = token;
    line.querySelector(".bar").style.setProperty("--share", probability.toFixed(4));
    line.querySelector(".percent").textContent = `${(100 * probability).toFixed(1)}%`;
  });
  document.getElementById("temperature-shown").textContent = divisor.toFixed(1);
}

temperature.closest(".control").hidden = false;
temperature.addEventListener("input", showNext);
text.addEventListener("choose", showNext);
