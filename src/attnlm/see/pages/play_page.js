/* A page with models that compute, which see/model_page.py makes. */

import {readData} from "./components.js";
import {ModelPage} from "./model_page.js";
import {unpackModels} from "./unpack_models.js";

const {models: packed, prompt} = readData();
const models = unpackModels(packed);
const modelPage = new ModelPage(models, prompt);
Object.assign(globalThis.attnlm, {models, modelPage});
