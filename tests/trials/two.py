"""Two at once: two trainers of one run, two writers of one name, readers beside a writer."""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from pathlib import Path

import attnlm
from tests.trials.children import Child, in_child, in_own_process
from tests.trials.internals import Evaluated
from tests.trials.small import TEXT, prepared, same_run, settings_of
from tests.trials.trial import Tally, Trial


def _run(tally: Tally, folder: Path) -> None:
    data = prepared(folder / "given")
    whole = folder / "whole"
    in_child(lambda: _train(data, whole))
    kinds = (_two_trainers, _two_preparations, _readers)
    for case, generator in tally.drawn(tally.wanted):
        place = folder / "case"
        place.mkdir()
        kind = kinds[case % len(kinds)]
        tally.count(kind(data, whole, place, generator), kind.__name__)
        shutil.rmtree(place)


def _train(data: Path, runs: Path, **settings: object) -> None:
    attnlm.train(data, checkpoint_dir=runs, name="run", **settings_of("multi-head", **settings))


def _two_trainers(data: Path, whole: Path, place: Path, generator: random.Random) -> str | None:
    """The second is refused, while the first lives; a kill gives the run free."""
    reader, writer = os.pipe()
    waiting_reader, waiting_writer = os.pipe()
    stop = generator.choice((0, 4, 8, 12))
    killed = generator.random() < 0.5

    def wait(event: object) -> None:
        if isinstance(event, Evaluated) and event.record["step"] == stop:
            os.write(waiting_writer, b"!")
            os.read(reader, 1)

    first = Child(
        lambda: (
            attnlm.train(
                data, checkpoint_dir=place, name="run", on_event=wait, **settings_of("multi-head")
            )
            and None
        )
    )
    os.read(waiting_reader, 1)
    second = in_child(lambda: attnlm.train(resume=place / "run") and None)
    if killed:
        first.kill()
    os.write(writer, b"!")
    first_outcome = first.wait()
    for descriptor in (reader, writer, waiting_reader, waiting_writer):
        os.close(descriptor)
    if second.error != "AttnlmError: run is being trained by another process":
        return f"the second: {second}"
    if not killed and first_outcome.error:
        return f"the first: {first_outcome}"

    def check() -> str | None:
        attnlm.train(resume=place / "run")
        return same_run(attnlm.open_run(whole / "run"), attnlm.open_run(place / "run"))

    return in_child(check).failure


def _two_preparations(data: Path, whole: Path, place: Path, generator: random.Random) -> str | None:
    """Of one name, with `--force`, again and again, while somebody reads it."""
    texts = {}
    for letter in "ab":
        # Of one size and one set of characters, so that mixed files would not be noticed by it.
        texts[letter] = TEXT if letter == "a" else TEXT[::-1]
        (place / f"{letter}.txt").write_text(texts[letter])

    def write(letter: str) -> None:
        for _ in range(8):
            attnlm.prepare(place / f"{letter}.txt", data_dir=place, name="x", force=True)

    def read() -> str | None:
        for _ in range(60):
            opened = attnlm.open_dataset("x", data_dir=place)
            decoded = opened.tokenizer.decode([*opened.train, *opened.val])
            if decoded != texts[Path(opened.source).stem]:
                return "mixed files"
        return None

    attnlm.prepare(place / "a.txt", data_dir=place, name="x")
    children = [
        Child(lambda: write("a")),
        Child(lambda: write("b")),
        Child(read),
    ]
    for outcome in [*(child.wait() for child in children), in_child(read)]:
        if outcome.failure:
            return outcome.failure
    left = sorted(path.name for path in place.iterdir() if path.name.startswith("."))
    return f"leftovers: {', '.join(left)}" if left else None


def _readers(data: Path, whole: Path, place: Path, generator: random.Random) -> str | None:
    """`sample` and `eval` of a run that is being trained."""
    seed = generator.randrange(2**31)
    writer = Child(lambda: _train(data, place, steps=40, eval_every=1, seed=seed))
    while not (place / "run" / "last.safetensors").exists():
        time.sleep(0.001)

    def read() -> None:
        for which in ("best", "last") * 5:
            run = attnlm.open_run(place / "run")
            attnlm.evaluate(run, checkpoint=which, device="cpu")
            "".join(attnlm.sample(run, tokens=5, seed=1, checkpoint=which, device="cpu"))

    return in_child(read).failure or writer.wait().failure


TRIAL = Trial(
    name="two",
    promise="two at once on one run or one name: one is refused, no mixed files, readers read on",
    short=4,
    full=90,
    run=in_own_process(_run),
    skip=lambda: "Windows has no such locks" if sys.platform == "win32" else None,
)
