/* Batches as a function of the step. */

import {randomNumbers} from "./sampling.js";

/* An epoch uses windows of T tokens once each, in random order, and begins at a random place below T. */
export class Batches {
  epoch = -1; // of `phase` and `order`
  phase = 0; // the first place
  order = null; // the windows

  constructor(ids, T, B, seed) {
    this.ids = ids;
    this.T = T;
    this.B = B;
    this.seed = seed;
    this.phases = Math.min(T, ids.length - T);
    this.perEpoch = Math.floor((ids.length - T - this.phases) / T) + 1;
  }

  at(step) {
    const {ids, T, B} = this;
    return windowsAt(ids, Array.from({length: B}, (_, b) => this.start(step * B + b)), T);
  }

  /* Return the place of a window, counted over all epochs. */
  start(window) {
    const epoch = Math.floor(window / this.perEpoch);
    if (epoch !== this.epoch) this.begin(epoch);
    return this.phase + this.order[window % this.perEpoch] * this.T;
  }

  begin(epoch) {
    const random = randomNumbers((this.seed + epoch * 0x9e3779b1) % 2 ** 32);
    const order = Uint32Array.from({length: this.perEpoch}, (_, n) => n);
    this.epoch = epoch;
    this.phase = Math.floor(random() * this.phases);
    this.order = order;
    for (let n = order.length - 1; n > 0; n--) {
      const other = Math.floor(random() * (n + 1));
      [order[n], order[other]] = [order[other], order[n]];
    }
  }
}

/* Return inputs (M) and targets (M) of windows that begin at `starts`. */
export function windowsAt(ids, starts, T) {
  return [0, 1].map((shift) => Int32Array.from({length: starts.length * T},
    (_, m) => ids[starts[Math.floor(m / T)] + (m % T) + shift]));
}
