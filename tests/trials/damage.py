"""Bits flip and files end too soon: what is read back is what was written, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tests.trials import opening
from tests.trials.trial import Tally, Trial


def _damage(tally: Tally, folder: Path) -> None:
    """So many flipped bits, each file as often as the others; then as many ends, or all there are.

    A file may end at each byte; of a checkpoint, within its header. As promised is a refusal that
    names the file, and also that all which is read back is the same: a digit of a hash in
    capitals, say, or another line's end; and of the ticker its beginning, since a line that a
    crash cut short is left out. That `latest` names another run that is there can't be
    told from a wish; but here there is none.
    """
    opening.make_all(folder)
    files = list(_files(folder))
    before = {read: read() for _, read in files}

    def try_damaged(
        path: Path, read: Callable[[], str], content: bytes | bytearray, how: str
    ) -> None:
        found: list[str] = []
        path.write_bytes(content)
        refused, fault = opening.refusal(lambda: found.append(read()))
        if fault is None and refused is not None and path.name not in refused:
            fault = f"refused without its name: {refused}"
        if fault is None and refused is None and not before[read].startswith(found[0]):
            fault = "read back as something else"
        tally.count(fault, f"{path.relative_to(folder)} {how}")

    ends = [(path, read, end) for path, read in files for end in _ends(path)]
    for (path, read, end), _ in tally.chosen(ends, tally.wanted):
        whole = path.read_bytes()
        try_damaged(path, read, whole[:end], f"cut off at byte {end}")
        path.write_bytes(whole)
    for case, generator in tally.drawn(tally.wanted, len(ends)):
        path, read = files[case % len(files)]
        whole = path.read_bytes()
        place, bit = generator.randrange(len(whole)), generator.randrange(8)
        changed = bytearray(whole)
        changed[place] ^= 1 << bit
        try_damaged(path, read, changed, f"with bit {bit} of byte {place} flipped")
        path.write_bytes(whole)


def _files(folder: Path) -> Iterator[tuple[Path, Callable[[], str]]]:
    """Every file that is read back, and what reads it."""
    readers = {
        "data": opening.open_data,
        "checkpoints": opening.open_the_run,
    }
    for place, name in (
        ("data", opening.CHAR),
        ("data", opening.BPE),
        ("checkpoints", opening.RUN),
    ):
        read = _reader(readers[place], folder, name)
        for path in opening.read_back(folder / place / name):
            if path.name == "ticker.jsonl":
                yield path, _reader(opening.open_ticker, folder, name)
            else:
                yield path, read
    for place, opens in readers.items():
        yield folder / place / "latest", _reader(opens, folder, None)


def _reader(
    opens: Callable[[Path, str | None], str], folder: Path, name: str | None
) -> Callable[[], str]:
    return lambda: opens(folder, name)


def _ends(path: Path) -> range:
    size = path.stat().st_size
    if path.suffix == ".safetensors":
        size = 8 + int.from_bytes(path.read_bytes()[:8], "little") + 1
    return range(size)


TRIAL = Trial(
    "damage",
    "a flipped bit or a file cut short is refused by name, never read as something else",
    short=300,
    full=10_000,
    run=_damage,
)
