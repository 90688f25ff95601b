"""A text becomes a data set: read twice in a stream, encoded, and put in place whole."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from attnlm.base.commands import KINDS
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import explaining, file_hash, write_json
from attnlm.base.folders import delete_folder, exchange, workspace
from attnlm.base.names import check_name, is_safe_name, write_latest
from attnlm.base.readable import byte_size
from attnlm.config.settings import resolve
from attnlm.data import bins
from attnlm.data.dataset import (
    FORMAT,
    LONGEST_TEXT,
    SHARDED_FORMAT,
    Dataset,
    id_dtype,
    open_dataset,
    open_trusted,
    sampled_hash,
)
from attnlm.data.splits import Split, Text, TextChangedError, read_text
from attnlm.data.unfinished import DamagedLogError, Log, kept_folder, kept_folders
from attnlm.text.corpus import NEWLINES, Source, get_corpus, safe_name
from attnlm.tokens import byte_pairs as bpe
from attnlm.tokens.specs import PUBLISHED, bpe_size, canonical_spec
from attnlm.tokens.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, load, save


def prepare(
    source: Source | Iterable[Source] | None = None,
    *,
    tokenizer: str | Path = "char",
    val_fraction: float = 0.1,
    val_file: str | os.PathLike[str] | None = None,
    name: str | None = None,
    data_dir: str | Path = "data",
    encoding: str = "utf-8",
    newlines: str = "keep",
    column: str = "text",
    offline: bool = False,
    force: bool = False,
    on_event: OnEvent | None = None,
) -> Dataset:
    """Encodes a text as the data set `name` in `data_dir`, and makes it the latest.

        dataset = attnlm.prepare("my-novel.txt", tokenizer="bpe:512")

    `tokenizer` is a spec, or the folder of a run or data set, whose tokenizer is taken: the text's
    ids then mean what theirs do.

    `source`, one or several, is what `corpus.get_corpus` takes. The last `val_fraction` of its
    characters are the validation split; or, with `val_file`, the whole of that text. Line endings
    are kept, or CR LF and CR become LF with `newlines` "unix". `column` holds the text of records.
    A data set with the same content is unchanged, one with other content is replaced only with
    `force`.

    Records, and each of several files, are documents: the end-of-text id follows them where the
    tokenizer has one. A text over 1 GiB is encoded to shards of that size; what a process that was
    stopped has written of them stays, and the same call goes on from there.

    Raises UsageError for invalid arguments, AttnlmError for a text that can't be found, downloaded,
    read, split or encoded, and for files that can't be written. Existing files are then unchanged.
    """
    on_event = on_event or ignore
    spec = canonical_spec(str(tokenizer))
    try:
        bpe_size(spec)  # for its error
        taken = None
    except UsageError:
        if isinstance(tokenizer, str) and not Path(tokenizer).exists():
            tokenizer = _named(tokenizer, Path(data_dir))
        if (taken := _taken(Path(tokenizer))) is None:
            raise
    if newlines not in NEWLINES:
        raise UsageError(f"`newlines` can't be {newlines!r}", "give keep or unix")
    if not 0 < val_fraction < 1:
        raise UsageError(f"`val_fraction` can't be {val_fraction}", "it must be between 0 and 1")
    if name is not None:
        check_name(name)
    data_dir = Path(data_dir)
    hint = ", or name another `data_dir`"
    with explaining(data_dir, hint), workspace(data_dir) as work:

        def read(place: Source | Iterable[Source] | None) -> Text:
            corpus = get_corpus(
                place,
                encoding=encoding,
                newlines=newlines,
                column=column,
                marks_ends=taken.end_of_text is not None if taken else spec in PUBLISHED,
                offline=offline,
                spool=work,
                on_event=on_event,
            )
            return read_text(corpus, on_event)

        if val_file is not None and not os.fspath(val_file):
            raise UsageError("`val_file` can't be empty", "name a file, or leave it out")
        if val_file is None:
            split = Split(read(source), float(val_fraction), None)
        else:
            split = Split(read(source), None, read(Path(val_file)))
        named = Path(tokenizer).absolute().name
        kind = spec.replace(":", "") if taken is None else safe_name(named)
        name = name or f"{split.text.corpus.name}-{kind}"
        target, wanted = data_dir / name, taken or spec
        if _is_prepared(target, wanted, split, force):
            text_hash = f"{split.text.sha256[:12]}…"
            on_event(Note(f"{target} exists, prepared from the same text ({text_hash})"))
        else:
            if taken is not None:
                for text in filter(None, (split.text, split.val_text)):
                    taken.encode(text.distinct)  # for its error
            chosen = taken or _tokenizer(spec, split, work, offline, on_event)
            origin = None if taken is None else Path(tokenizer).absolute()
            if split.utf8_bytes > bins.SHARD_BYTES:
                _build_large(data_dir, work, name, split, chosen, origin, on_event)
            else:
                (work / "new").mkdir()
                _build(work / "new", name, split, chosen, origin, on_event)
            _install(work / "new", target, lambda: _is_prepared(target, wanted, split, force))
        write_latest(data_dir, name)
        _tell_kept(data_dir, on_event)
        dataset = open_trusted(target)
    most, usual = dataset.largest_block_size, resolve({}).model.block_size
    if most < usual:
        on_event(
            Note(
                f"{name} is too small for the default context of {usual} tokens: "
                f"train with `block_size` {most} or less, or prepare a longer text"
            )
        )
    return dataset


# --- The text, and where it is split --------------------------------------------------------------


def _named(tokenizer: str, data_dir: Path) -> str | Path:
    """The folder of the run or data set of that name, where there is one; the spec otherwise."""
    places = Path(KINDS["run"][1]) / tokenizer, data_dir / tokenizer
    is_name = is_safe_name(tokenizer)
    return next((p for p in places if is_name and (p / "tokenizer.json").is_file()), tokenizer)


def _taken(folder: Path) -> Tokenizer | None:
    """The tokenizer of the run or data set in a folder; None where there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = load(path)
    tokenizer.dataset = folder.absolute().name
    return tokenizer


def _tokenizer(spec: str, split: Split, spool: Path, offline: bool, on_event: OnEvent) -> Tokenizer:
    """The tokenizer of that spec: of the whole text for char, of the training split for bpe:N."""
    size = bpe_size(spec)
    if size is not None:
        return bpe.train(spec, size, split.train_sample(), on_event)
    if spec == "char":
        texts = filter(None, (split.text, split.val_text))
        return CharTokenizer("".join(sorted(set().union(*(text.distinct for text in texts)))))
    if spec == "byte":
        return ByteTokenizer()
    return bpe.published(spec, spool=spool, offline=offline, on_event=on_event)


def _build_large(
    data_dir: Path,
    work: Path,
    name: str,
    split: Split,
    tokenizer: Tokenizer,
    origin: Path | None,
    on_event: OnEvent,
) -> None:
    """Makes the folder `work`/new a data set of shards, some of which may be there from before."""
    texts = [text for text in (split.text, split.val_text) if text]
    facts = {
        "texts": [text.sha256 for text in texts],
        "train_characters": split.train_characters,
        "tokenizer": tokenizer.to_json(),
        "shard_bytes": bins.SHARD_BYTES,
        # A text that was changed and changed back may have been encoded in between.
        "files": [text.corpus.stamps(work) for text in texts],
    }
    with kept_folder(data_dir, facts) as folder:
        log = Log(folder)
        log.take_over(
            bins.shard_tokens(tokenizer.vocab_size),
            id_dtype(tokenizer.vocab_size).itemsize,
            {
                "train": split.train_characters,
                "val": split.characters - split.train_characters,
            },
        )
        if there := sum(map(len, log.shards.values())):
            on_event(Note(f"continuing after {there} shards that an earlier `prepare` wrote"))
        try:
            _build(folder, name, split, tokenizer, origin, on_event, log)
        except (TextChangedError, DamagedLogError):
            delete_folder(folder)
            raise
        log.finish(work / "new")


def _tell_kept(data_dir: Path, on_event: OnEvent) -> None:
    for folder, size in kept_folders(data_dir).items():
        on_event(
            Note(
                f"{folder} has {byte_size(size)} of a preparation that was stopped: "
                "prepare the same again to go on with it, or delete the folder"
            )
        )


def _build(
    folder: Path,
    name: str,
    split: Split,
    tokenizer: Tokenizer,
    origin: Path | None,
    on_event: OnEvent,
    log: Log | None = None,
) -> None:
    """Makes `folder` a whole data set, with meta.json as its last file."""
    made = bins.write_bins(folder, split, tokenizer, on_event, log)
    save(tokenizer, folder / "tokenizer.json")
    text, val_text, val_tokens = split.text, split.val_text, made["val"].tokens
    floor_nats = None
    if text.corpus.floor_nats and not val_text:
        floor_nats = text.corpus.floor_nats.get(split.train_characters)
    meta = {
        "format": SHARDED_FORMAT if log else FORMAT,
        "name": name,
        "source": text.corpus.source[:LONGEST_TEXT],
        "sources": text.corpus.sources,
        "source_sha256": text.sha256,
        "val_source": val_text.corpus.source[:LONGEST_TEXT] if val_text else None,
        "val_source_sha256": val_text.sha256 if val_text else None,
        "encoding": text.corpus.encoding,
        "newlines": text.corpus.newlines,
        "column": text.corpus.column,
        "documents": text.documents + (val_text.documents if val_text else 0),
        "val_fraction": split.val_fraction,
        "characters": split.characters,
        "train_characters": split.train_characters,
        "val_characters": split.characters - split.train_characters,
        "val_bytes": made["val"].utf8_bytes,
        "tokenizer": tokenizer.name,
        "tokenizer_from": None if origin is None else str(origin),
        "tokenizer_sha256": file_hash(folder / "tokenizer.json"),
        "vocab_size": tokenizer.vocab_size,
        "dtype": id_dtype(tokenizer.vocab_size).name,
        "bigram_loss": bins.bigram_loss(made["train"], made["val"]),
        "floor": None if floor_nats is None else floor_nats / val_tokens,
    }
    for key, written in made.items():
        meta[f"{key}_tokens"] = written.tokens
        meta[f"{key}_sha256"] = written.sha256
        meta[f"{key}_sampled_sha256"] = sampled_hash(*written.paths)
        if log:
            meta[f"{key}_shards"] = list(written.hashes)
            meta["shard_tokens"] = bins.shard_tokens(tokenizer.vocab_size)
    write_json(folder / "meta.json", meta)


# --- Where the folder goes ------------------------------------------------------------------------


def _is_prepared(target: Path, wanted: str | Tokenizer, split: Split, force: bool) -> bool:
    """Whether what is at `target` can stay; False means that it may be replaced, or is nothing.

    Raises AttnlmError when it is something else, and without `force` also when it is a data set
    that is damaged or has other content.
    """
    if not os.path.lexists(target):
        return False
    if not (target / "meta.json").is_file():
        raise AttnlmError(f"{target} exists and is not a data set", "choose another `name`")
    if force:
        return False
    hint = "`force` replaces it, another `name` keeps it"
    try:
        there = open_dataset(target)
    except AttnlmError as error:
        raise AttnlmError(f"{target} exists, and {error}", hint) from None
    if isinstance(wanted, str):
        is_alike = there.tokenizer.name == wanted
    else:
        is_alike = there.tokenizer.to_json() == wanted.to_json()
    if (
        is_alike
        and there.source_sha256 == split.text.sha256
        and there.val_source_sha256 == (split.val_text.sha256 if split.val_text else None)
        and there.train_characters == split.train_characters
    ):
        return True
    raise AttnlmError(f"{target} exists with other content", hint)


def _install(new: Path, target: Path, is_prepared: Callable[[], bool]) -> None:
    """Moves the folder `new` to `target`, unless `is_prepared` what is there by then."""
    while True:
        try:
            if not os.path.lexists(target):
                new.rename(target)
            elif not is_prepared():
                exchange(new, target)
            return
        except OSError as error:
            # Somebody else put theirs there in this moment, or took it away: look at that.
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT) or not new.is_dir():
                raise
