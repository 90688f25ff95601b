/* The page of a comparison: charts, and the models to try. */

import {drawChart, legend} from "./chart.js";
import {readData} from "./components.js";
import {showModels} from "./model_page.js";

const {charts, ...models} = readData();
document.querySelectorAll("svg.chart").forEach((chart, n) => {
  drawChart(chart, charts[n]);
  chart.after(legend(charts[n].lines));
});
showModels(models);
