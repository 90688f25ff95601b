"""`python -m tests.trials [NAME…] [--short] [--seed N] [--case N]`: makes trials, prints counts."""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.trials import TRIALS
from tests.trials.trial import SHORT_SEED


def main() -> int:
    """Returns 1 where any case failed, 2 where there is none of that number."""
    parser = argparse.ArgumentParser(prog="python -m tests.trials")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *TRIALS])
    parser.add_argument("--short", action="store_true", help="the short form, as in `make test`")
    parser.add_argument("--seed", type=int, help="default: the day's date; with --short, 1")
    parser.add_argument("--case", type=int, metavar="N", help="this case of one NAME alone")
    arguments = parser.parse_args()
    if arguments.case is not None and len(arguments.names) != 1:
        parser.error("--case needs the one NAME that it is of")
    seed = arguments.seed
    if seed is None:
        seed = SHORT_SEED if arguments.short else int(f"{datetime.now(UTC):%Y%m%d}")
    print(f"seed {seed}\n")
    failed = False
    print("| trial | promise | cases | failed | seconds |")
    print("| --- | --- | ---: | ---: | ---: |", flush=True)
    for name in arguments.names or TRIALS:
        trial = TRIALS[name]
        if (reason := trial.skip()) is not None:
            print(f"| {name} | {trial.promise} | 0 | skipped: {reason} | |", flush=True)
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            tally = trial.try_in(
                Path(folder), short=arguments.short, seed=seed, only=arguments.case
            )
        seconds = time.perf_counter() - began
        if not tally.cases:
            parser.error(f"{name} has no case {arguments.case}")
        count, bad = f"{tally.cases:,}", len(tally.failures)
        print(f"| {name} | {trial.promise} | {count} | {bad} | {seconds:.0f} |", flush=True)
        for failure in tally.failures[:20]:
            print(f"  {failure}", flush=True)
        if tally.failures:
            form = " --short" if arguments.short else ""
            print(f"  one alone: python -m tests.trials {name}{form} --seed {seed} --case N")
        failed |= bool(tally.failures)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
