/* A page of recorded attention. */

import {showAttention} from "./attend.js";
import {readData} from "./components.js";

showAttention(readData());
