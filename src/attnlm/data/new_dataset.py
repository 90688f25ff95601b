"""A new data set: what it is made of, its tokenizer, and the folder that it may replace."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from attnlm.base.atomic_folders import exchange
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent
from attnlm.base.files import file_hash, write_json
from attnlm.base.folders import KINDS, is_safe_name
from attnlm.data.bin_files import WrittenBins
from attnlm.data.dataset import FORMAT, ExampleFacts, Meta, id_dtype, open_dataset
from attnlm.text.corpus import Corpus
from attnlm.tokens import byte_pairs as bpe
from attnlm.tokens.specs import bpe_size, canonical_spec
from attnlm.tokens.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, load


def origin_of(tokenizer: str | Path, data_dir: Path) -> Path | None:
    """Return the folder of the run or data set that `tokenizer` names, or None for a spec."""
    try:
        bpe_size(canonical_spec(str(tokenizer)))
    except UsageError:
        places = [Path(tokenizer)]
        if is_safe_name(str(tokenizer)):
            places += [Path(KINDS["run"][1]) / tokenizer, data_dir / tokenizer]
        for place in places:
            if (place / "tokenizer.json").is_file():
                return place.absolute()
        raise
    return None


def taken_tokenizer(origin: Path | None) -> Tokenizer | None:
    """Return the tokenizer of the run or data set in the folder `origin`, if any."""
    if origin is None:
        return None
    taken = load(origin / "tokenizer.json")
    taken.dataset = origin.name
    return taken


def new_tokenizer(
    spec: str,
    new: NewDataset,
    spool: Path,
    offline: bool,
    on_event: OnEvent,
) -> Tokenizer:
    """Return the tokenizer of a spec, for a new data set."""
    size = bpe_size(spec)
    if size is not None:
        return bpe.train(spec, size, new.sample(), on_event, has_end=new.has_ends)
    if spec == "char":
        return CharTokenizer("".join(sorted(set().union(*new.distinct))), has_end=new.has_ends)
    if spec == "byte":
        return ByteTokenizer(has_end=new.has_ends)
    return bpe.load_published(spec, spool=spool, offline=offline, on_event=on_event)


class Content(NamedTuple):
    """The text of a data set and its split, as meta.json records them. Equal contents give equal
    files, if the tokenizers are equal too."""

    source_sha256: str
    val_source_sha256: str | None
    train_characters: int
    split: str | None
    split_seed: int | None


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """The properties of a data set that are known when its ids are written; see `Facts`."""

    bins: WrittenBins
    floor: float | None
    documents: int
    val_fraction: float | None
    characters: int
    val_characters: int
    records_on_stdin: bool = False
    examples: ExampleFacts | None = None


@dataclass(frozen=True)
class NewDataset:
    """What a data set is made of, before its tokenizer is known."""

    corpus: Corpus
    val_corpus: Corpus | None
    """the source of the validation split, if it has one of its own"""
    content: Content
    distinct: Sequence[str]
    """texts that together have every character"""
    sample: Callable[[], list[str]]
    """returns texts of the training split, to train a tokenizer on"""
    has_ends: bool
    """set if the tokenizer needs an end-of-text id, which follows records and answers"""
    build: Callable[[Path, Tokenizer], Encoded]
    """writes the files of ids to a folder"""


def write_dataset(
    folder: Path, name: str, new: NewDataset, tokenizer: Tokenizer, origin: Path | None
) -> None:
    """Write all files of a data set to `folder`; meta.json is the last one."""
    encoded = new.build(folder, tokenizer)
    bins = encoded.bins
    write_json(folder / "tokenizer.json", tokenizer.to_json())
    meta = Meta(
        name=name,
        source=new.corpus.source,
        sources=new.corpus.sources,
        val_source=new.val_corpus.source if new.val_corpus else None,
        encoding=new.corpus.encoding,
        newlines=new.corpus.newlines,
        column=new.corpus.column,
        tokenizer=tokenizer.name,
        tokenizer_from=None if origin is None else str(origin),
        tokenizer_sha256=file_hash(folder / "tokenizer.json"),
        vocab_size=tokenizer.vocab_size,
        dtype=id_dtype(tokenizer.vocab_size).name,
        train_tokens=bins.train.tokens,
        train_sha256=bins.train.sha256,
        train_sampled_sha256=bins.train.sampled_sha256,
        val_tokens=bins.val.tokens,
        val_sha256=bins.val.sha256,
        val_sampled_sha256=bins.val.sampled_sha256,
        val_bytes=bins.val_bytes,
        val_parts=bins.val_parts,
        bigram_loss=bins.bigram_loss,
        floor=encoded.floor,
        documents=encoded.documents,
        val_fraction=encoded.val_fraction,
        characters=encoded.characters,
        val_characters=encoded.val_characters,
        records_on_stdin=encoded.records_on_stdin,
        examples=encoded.examples,
        **new.content._asdict(),
    )
    write_json(folder / "meta.json", {"format": FORMAT, **asdict(meta)})


def is_prepared(target: Path, tokenizer: str | Tokenizer, content: Content, force: bool) -> bool:
    """Return True if `target` has this content and tokenizer, False if it is to be written.

    Raises AttnlmError if `target` exists but is not a data set. If `force` is false, raises it also
    if `target` is damaged or has other content.
    """
    if not os.path.lexists(target):
        return False
    if not (target / "meta.json").is_file():
        raise AttnlmError(f"{target} exists and is not a data set", "choose another `name`")
    if force:
        return False
    hint = "`force` replaces it, another `name` keeps it"
    try:
        existing = open_dataset(target)
    except AttnlmError as error:
        raise AttnlmError(f"{target} exists, and {error}", hint) from None
    if isinstance(tokenizer, str):
        has_tokenizer = existing.tokenizer.name == tokenizer
    else:
        has_tokenizer = existing.tokenizer.to_json() == tokenizer.to_json()
    existing_content = Content(*(getattr(existing, name) for name in Content._fields))
    if not has_tokenizer or existing_content != content:
        raise AttnlmError(f"{target} exists with other content", hint)
    return True


def install(new: Path, target: Path, is_prepared: Callable[[], bool]) -> None:
    """Move the folder `new` to `target`, unless another process has put the same data there."""
    if not os.path.lexists(target):
        new.rename(target)
    elif not is_prepared():
        exchange(new, target)
