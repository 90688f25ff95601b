/* A text with its vocabulary of characters, its ids, and the counts of its pairs of characters. */

import {newTokenizer, TextError} from "./tokenizers.js";

export const MOST_CHARACTERS = 2 ** 20;
const LARGEST_VOCABULARY = 1000;
const TRAINING_SHARE = 0.9;

export class Corpus {
  /* `floor` is the lowest possible loss, if it is known. `context` is the largest context of the models. Throw
     TextError if the text is too short for it, or has too many different characters. */
  constructor({name, train, validation, floor = null}, context) {
    const characters = [...new Set(train + validation)].sort((a, b) => a.codePointAt() - b.codePointAt());
    const V = characters.length;
    if (V > LARGEST_VOCABULARY)
      throw new TextError(`The text has ${V} different characters; at most ${LARGEST_VOCABULARY} are possible.`);
    this.name = name;
    this.train = train;
    this.validation = validation;
    this.floor = floor;
    this.characters = characters;
    this.V = V;
    this.tokenizer = newTokenizer({kind: "char", characters: characters.join("")});
    this.trainIds = Uint16Array.from(this.tokenizer.encode(train));
    this.validationIds = Uint16Array.from(this.tokenizer.encode(validation));
    const needed = context + 1;
    if (this.validationIds.length < needed)
      throw new TextError(`The text is too short: use at least ${10 * needed} characters.`);
    this.counted = this.countPairs();
    this.baselines = [["uniform", Math.log(V)], ["counted bigram", this.bigramLoss()]];
    if (floor !== null) this.baselines.push(["floor", floor]);
  }

  /* Return a text whose last tenth is for validation. */
  static of(text, context, name = "your text") {
    const characters = [...text.slice(0, MOST_CHARACTERS)];
    const cut = Math.floor(TRAINING_SHARE * characters.length);
    const train = characters.slice(0, cut).join("");
    const validation = characters.slice(cut).join("");
    return new Corpus({name, train, validation}, context);
  }

  get size() { return this.train.length + this.validation.length; }

  /* Count the pairs of the training split, and 1 for each possible pair. Return the probabilities (V) of the next
     character after each character. */
  countPairs() {
    const {V, trainIds} = this;
    const counts_VV = new Float32Array(V * V).fill(1);
    for (let i = 1; i < trainIds.length; i++) counts_VV[trainIds[i - 1] * V + trainIds[i]]++;
    return this.characters.map((_, id) => {
      const counts_V = counts_VV.subarray(id * V, (id + 1) * V);
      const total = counts_V.reduce((sum, count) => sum + count, 0);
      return counts_V.map((count) => count / total);
    });
  }

  /* Return the loss of the counted probabilities on the validation split. */
  bigramLoss() {
    const {validationIds, counted} = this;
    let loss = 0;
    for (let i = 1; i < validationIds.length; i++) loss -= Math.log(counted[validationIds[i - 1]][validationIds[i]]);
    return loss / (validationIds.length - 1);
  }
}
