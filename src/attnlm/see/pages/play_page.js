/* A page with models that compute, which see/model_page.py makes. */

import {readData} from "./components.js";
import {showModels} from "./model_page.js";

showModels(readData());
