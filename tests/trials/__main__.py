"""`python -m tests.trials [NAME…] [--short] [--seed N]`: makes the trials, prints their counts."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.trials import TRIALS


def main() -> int:
    """Returns 1 where any case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.trials")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *TRIALS])
    parser.add_argument("--short", action="store_true", help="the short form, as in `make test`")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    failed = False
    print("| trial | promise | cases | failed | seconds |")
    print("| --- | --- | ---: | ---: | ---: |", flush=True)
    for name in arguments.names or TRIALS:
        trial = TRIALS[name]
        if (reason := trial.skip()) is not None:
            print(f"| {name} | {trial.promise} | 0 | skipped: {reason} | |", flush=True)
            continue
        began = time.perf_counter()
        cases = trial.short if arguments.short else trial.full
        with tempfile.TemporaryDirectory() as folder:
            tally = trial.run(cases, arguments.seed, Path(folder))
        seconds = time.perf_counter() - began
        count, bad = f"{tally.cases:,}", len(tally.failures)
        print(f"| {name} | {trial.promise} | {count} | {bad} | {seconds:.0f} |", flush=True)
        for failure in tally.failures[:20]:
            print(f"  {failure}", flush=True)
        failed |= bool(tally.failures)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
