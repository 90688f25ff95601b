/* Long computations, which yield to the event loop so that the page stays responsive. */

const INTERVAL = 15; // milliseconds of computation between two yields

/* The time since a computation yielded last. */
export class Pause {
  since = performance.now();

  async yieldIfDue() {
    if (performance.now() - this.since <= INTERVAL) return;
    await eventLoop();
    this.since = performance.now();
  }

  /* Run a generator and return its result, or undefined if `isStopped()` becomes true. */
  async run(generator, isStopped = () => false) {
    for (let step = generator.next(); ; step = generator.next()) {
      if (step.done) return step.value;
      await this.yieldIfDue();
      if (isStopped()) return undefined;
    }
  }
}

/* Yield to the event loop. A message returns earlier than a timer. */
export function eventLoop() {
  return new Promise((resolve) => {
    const {port1, port2} = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

/* Run a generator without pauses and return its result. */
export function resultOf(generator) {
  for (;;) {
    const {done, value} = generator.next();
    if (done) return value;
  }
}
