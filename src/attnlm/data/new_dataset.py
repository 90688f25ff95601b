"""A new data set: what it is made of, its tokenizer, and the folder that it may replace."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnlm.base.atomic_folders import exchange_folders
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.events import OnEvent
from attnlm.base.files import file_hash, write_json
from attnlm.base.folders import KINDS, is_safe_name
from attnlm.data.dataset import FORMAT, Meta, id_dtype, open_dataset
from attnlm.text.corpus import Corpus, safe_name
from attnlm.tokens import byte_pairs as bpe
from attnlm.tokens.specs import PUBLISHED, bpe_size, canonical_spec
from attnlm.tokens.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, load_tokenizer

_CONTENT = ("source_sha256", "val_source_sha256", "train_characters", "split")
"""The fields of Meta that say what text a data set has, and so, with the tokenizer, its ids."""


@dataclass(frozen=True)
class UnencodedDataset:
    """A new data set before its tokenizer is known."""

    corpus: Corpus
    val_corpus: Corpus | None
    """the source of the validation split, if it has one of its own"""
    facts: Mapping[str, Any]
    """the fields of Meta that are known from the text, among them _CONTENT"""
    alphabet: str
    """the distinct characters of both splits, sorted"""
    sample: Callable[[], list[str]]
    """returns texts of the training split, to train a tokenizer on"""
    has_ends: bool
    """set if the tokenizer needs an end-of-text id, which follows records and answers"""
    encode: Callable[[Path, Tokenizer], Mapping[str, Any]]
    """writes the files of ids to a folder, and returns the fields of Meta that are known then"""


@dataclass(frozen=True)
class TokenizerOrigin:
    """The origin of a new data set's tokenizer: a spec, or a run or another data set."""

    spec: str
    folder: Path | None = None
    """the folder of the run or data set; None for a spec"""
    existing: Tokenizer | None = None
    """the tokenizer of the run or data set"""

    @property
    def label(self) -> str:
        """Return the last part of the data set's default name."""
        return self.spec.replace(":", "") if self.folder is None else safe_name(self.folder.name)

    @property
    def marks_ends(self) -> bool | None:
        """Return whether an end-of-text id will follow each document; None: only each record."""
        if self.existing is not None:
            return self.existing.end_of_text is not None
        return True if self.spec in PUBLISHED else None

    def load_or_train(
        self, unencoded: UnencodedDataset, spool: Path, offline: bool, on_event: OnEvent
    ) -> Tokenizer:
        """Return the tokenizer, trained or downloaded if needed. It has every character."""
        if self.existing is not None:
            self.existing.check(unencoded.alphabet)
            return self.existing
        size = bpe_size(self.spec)
        has_end = unencoded.has_ends
        if size is not None:
            return bpe.train_vocabulary(
                self.spec, size, unencoded.sample(), on_event, has_end=has_end
            )
        if self.spec == "char":
            return CharTokenizer(unencoded.alphabet, has_end=has_end)
        if self.spec == "byte":
            return ByteTokenizer(has_end=has_end)
        return bpe.load_published(self.spec, spool=spool, offline=offline, on_event=on_event)

    def matches(self, tokenizer: Tokenizer) -> bool:
        """Return True if `tokenizer`, of a data set with the same content, has this origin."""
        if self.existing is None:
            return tokenizer.name == self.spec
        return tokenizer.to_json() == self.existing.to_json()


def find_tokenizer(tokenizer: str | Path, data_dir: Path) -> TokenizerOrigin:
    """Return the origin that `tokenizer` names: a spec, a run or a data set. Raises UsageError."""
    spec = canonical_spec(str(tokenizer))
    try:
        bpe_size(spec)
    except UsageError:
        folders = [Path(tokenizer)]
        if is_safe_name(str(tokenizer)):
            folders += [Path(KINDS["run"][1]) / tokenizer, data_dir / tokenizer]
        for folder in folders:
            if (folder / "tokenizer.json").is_file():
                existing = load_tokenizer(folder / "tokenizer.json")
                existing.dataset = folder.absolute().name
                return TokenizerOrigin(spec, folder.absolute(), existing)
        raise
    return TokenizerOrigin(spec)


def write_dataset(
    folder: Path,
    name: str,
    unencoded: UnencodedDataset,
    tokenizer: Tokenizer,
    tokenizer_folder: Path | None,
) -> None:
    """Write all files of a data set to the new folder `folder`; meta.json is the last one."""
    folder.mkdir()
    encoded = unencoded.encode(folder, tokenizer)
    write_json(folder / "tokenizer.json", tokenizer.to_json())
    meta = Meta(
        name=name,
        source=unencoded.corpus.source,
        sources=unencoded.corpus.sources,
        val_source=unencoded.val_corpus.source if unencoded.val_corpus else None,
        encoding=unencoded.corpus.encoding,
        column=unencoded.corpus.column,
        records_on_stdin=unencoded.corpus.has_records_on_stdin,
        tokenizer_name=tokenizer.name,
        tokenizer_from=None if tokenizer_folder is None else str(tokenizer_folder),
        vocab_size=tokenizer.vocab_size,
        dtype=id_dtype(tokenizer.vocab_size).name,
        **unencoded.facts,
        **encoded,
        files={path.name: file_hash(path) for path in sorted(folder.iterdir())},
    )
    write_json(folder / "meta.json", {"format": FORMAT, **asdict(meta)})


def is_prepared(
    target: Path, origin: TokenizerOrigin, facts: Mapping[str, Any], force: bool
) -> bool:
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
    is_same = all(getattr(existing, name) == facts[name] for name in _CONTENT)
    if not (is_same and origin.matches(existing.tokenizer)):
        raise AttnlmError(f"{target} exists with other content", hint)
    return True


def install_dataset(new: Path, target: Path, is_prepared: Callable[[], bool]) -> None:
    """Move the folder `new` to `target`, unless another process has put the same data there."""
    if not os.path.lexists(target):
        new.rename(target)
    elif not is_prepared():
        exchange_folders(new, target)
