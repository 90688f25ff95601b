/* The card of an exam: recorded attention over a question. */

import {readData} from "./components.js";
import {showRecordedAttention} from "./heads_view.js";

const {attention} = readData();
if (attention) showRecordedAttention(attention);
