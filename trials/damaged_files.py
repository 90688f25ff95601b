"""Bits flip and files end too soon: what is read back is what was written, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from trials import small_projects
from trials.trial import Tally, Trial

_Reader = Callable[[], str]


@Trial("damage", short=100, full=10_000)
def _damage(tally: Tally, folder: Path) -> None:
    """A flipped bit or a file cut short is refused by name, never read as something else.

    As many flipped bits as are wanted, each file with a hash as often as the others; and as many
    ends. A file may end at each byte; of a checkpoint, within its header. As promised is a refusal
    that names the file, or that all which is read back is the same: a digit of a hash in capitals,
    or another line's end; and the beginning of a ticker, since a line that a crash cut short is
    left out. The lines of metrics and ticker have no hash.
    `latest` could name another run by a flipped bit; but here there is none.
    """
    small_projects.make_all(folder)
    files = list(_files(folder))
    hashed = [(path, read) for path, read in files if path.suffix != ".jsonl"]
    before = {read: read() for _, read in files}

    def try_damaged(path: Path, read: _Reader, content: bytes, how: str) -> None:
        found: list[str] = []
        whole = path.read_bytes()
        path.write_bytes(content)
        refused, fault = small_projects.refusal(lambda: found.append(read()))
        if fault is None and refused is not None and path.name not in refused:
            fault = f"refused without its name: {refused}"
        if fault is None and refused is None and not before[read].startswith(found[0]):
            fault = "read back as something else"
        tally.count(fault, f"{path.relative_to(folder)} {how}")
        path.write_bytes(whole)

    ends = [(path, read, end) for path, read in files for end in _ends(path)]
    for (path, read, end), _ in tally.chosen(ends, tally.wanted):
        try_damaged(path, read, path.read_bytes()[:end], f"cut off at byte {end}")
    for case, generator in tally.drawn(tally.wanted, len(ends)):
        path, read = hashed[case % len(hashed)]
        content = bytearray(path.read_bytes())
        place, bit = generator.randrange(len(content)), generator.randrange(8)
        content[place] ^= 1 << bit
        try_damaged(path, read, bytes(content), f"with bit {bit} of byte {place} flipped")


def _files(folder: Path) -> Iterator[tuple[Path, _Reader]]:
    """Yield each file that is read back, and the function that reads it."""
    for place, opens, names in (
        ("data", small_projects.open_data, (small_projects.CHAR, small_projects.BPE)),
        ("checkpoints", small_projects.open_the_run, (small_projects.RUN,)),
    ):
        for name in names:
            read = partial(opens, folder, name)
            for path in small_projects.read_back(folder / place / name):
                if path.name == "config.json":
                    continue  # people edit it
                is_ticker = path.name == "ticker.jsonl"
                yield path, partial(small_projects.open_ticker, folder, name) if is_ticker else read
        yield folder / place / "latest", partial(opens, folder, None)


def _ends(path: Path) -> range:
    if path.suffix == ".safetensors":
        return range(8 + int.from_bytes(path.read_bytes()[:8], "little") + 1)
    return range(path.stat().st_size)
