"""`python -m trials [NAME…] [--short] [--seed N] [--case N]`: makes trials, prints counts."""

from __future__ import annotations

import argparse
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from trials import TRIALS
from trials.trial import SHORT_SEED


def main() -> int:
    """Return 1 if any case failed, 2 if there is none of that number."""
    parser = argparse.ArgumentParser(prog="python -m trials")
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *TRIALS])
    parser.add_argument("--short", action="store_true", help="the short form, as in `make test`")
    parser.add_argument("--seed", type=int, help="default: the day's date; with --short, 1")
    parser.add_argument("--case", type=int, metavar="N", help="this case of one NAME alone")
    arguments = parser.parse_args()
    if arguments.case is not None and len(arguments.names) != 1:
        parser.error("--case needs the one NAME that it is of")
    seed, form, failed = arguments.seed, " --short" if arguments.short else "", False
    if seed is None:
        seed = SHORT_SEED if arguments.short else int(f"{datetime.now(UTC):%Y%m%d}")
    print(f"seed {seed}\n")
    print("| trial | promise | cases | failed | seconds |")
    print("| --- | --- | ---: | ---: | ---: |", flush=True)
    for name in arguments.names or TRIALS:
        trial = TRIALS[name]
        no_short = "it has no short form" if arguments.short and not trial.short else None
        if (reason := no_short or trial.skip()) is not None:
            print(f"| {name} | {trial.promise} | 0 | skipped: {reason} | |", flush=True)
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            tally = trial.try_in(place, short=arguments.short, seed=seed, only=arguments.case)
        seconds = time.perf_counter() - began
        if not tally.cases:
            parser.error(f"{name} has no case {arguments.case}")
        count, bad = f"{tally.cases:,}", len(tally.failures)
        print(f"| {name} | {trial.promise} | {count} | {bad} | {seconds:.0f} |", flush=True)
        for failure in tally.failures[:20]:
            print(f"  {failure}", flush=True)
        if tally.failures:
            print(f"  one alone: python -m trials {name}{form} --seed {seed} --case N")
        failed |= bool(tally.failures)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
