"""The spool: one file with the text of a corpus, whatever its sources are."""

from __future__ import annotations

import codecs
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, Progress
from attnlm.base.formatting import listed
from attnlm.text.corpus import Corpus
from attnlm.text.text_files import BLOCK, COMPRESSED, END, NotTextError, check_size


def is_own_spool(corpus: Corpus) -> bool:
    """Return True if a corpus is one file that is like its spool: UTF-8 without documents."""
    file = corpus.files[0]
    if corpus.has_documents or file.stream or file.encoding != "utf-8":
        return False
    if file.path.suffix.lower() in COMPRESSED:
        return False
    with file.path.open("rb") as opened:
        return opened.read(3) != codecs.BOM_UTF8


def write_spool(corpus: Corpus, path: Path, on_event: OnEvent) -> None:
    """Write the text of a corpus to the new file `path`, in UTF-8, with 0xFF behind each document.

    Files of folders that are no text, and empty files, are left out with a Note. Raises AttnlmError
    as `Corpus.texts` does, and if the text is too long, or the disk almost full.
    """
    not_text: list[str] = []
    empty: list[str] = []
    told = 0
    with path.open("wb") as spool:
        for file in corpus.files:
            begin = spool.tell()
            may_have_nuls = not file.optional or file.encoding.startswith(("utf-16", "utf-32"))
            try:
                if file.optional and not file.path.is_file():
                    raise NotTextError(file.shown, "is not a file", "leave it out")
                for text in corpus.texts(file):
                    if "\0" in text and not (may_have_nuls or file.is_records):
                        raise NotTextError(file.shown, "has NUL characters", "leave it out")
                    spool.write(text.encode(errors="surrogateescape"))
                    if spool.tell() >= told + BLOCK:
                        told = spool.tell()
                        check_size(told, corpus.max_bytes, path.parent, corpus.shown)
                        on_event(Progress("copy", told, None, "B"))
            except NotTextError as error:
                if not file.optional:
                    raise
                spool.seek(begin)
                spool.truncate()
                not_text.append(f"{file.shown} ({error.place})" if error.place else file.shown)
                continue
            if spool.tell() == begin:
                empty.append(file.shown)
            elif corpus.has_documents and not file.is_records:
                spool.write(END.encode(errors="surrogateescape"))
    kept = len(corpus.files) - len(not_text) - len(empty)
    if not kept and corpus.files[0].optional:
        raise AttnlmError(
            f"no {corpus.encoding} text in {corpus.shown} ({len(corpus.files)} files were checked, "
            f"{len(empty)} of them empty)",
            "name a folder or a pattern of text files, or set their `encoding`",
        )
    for names, reason in ((not_text, f"not {corpus.encoding} text"), (empty, "empty")):
        if names and kept:
            left_out = f"left out {len(names)} of {len(corpus.files)} files because they are"
            on_event(Note(f"{left_out} {reason}: {listed(names, 10)}"))
