"""The options of `prepare`, with the help of their command-line options."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from attnlm.base.setting_fields import setting


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What `prepare` makes of a source. None stands for the default."""

    tokenizer: str = setting(
        "char|byte|bpe:N|gpt2|cl100k_base|o200k_base, or the name or path of a run or data set, to "
        "use its tokenizer",
        default="char",
    )
    val_fraction: float | None = setting(
        "fraction of the text for the validation split; default: 0.1", above=0, below=1
    )
    val_file: str | None = setting(
        "a source for the validation split; all of SOURCE is then for training"
    )
    split: str | None = setting(
        "validation split: the tail of the text, or some of its documents (records or files), "
        "chosen at random; default: documents if there are at least 10 for each split, else tail",
        choices=("tail", "documents"),
    )
    encoding: str = setting("character encoding of the text", default="utf-8")
    column: str | None = setting(
        "column with the text, in .jsonl, .json, .csv and .parquet files, hf: data, and "
        "JSON lines or CSV on stdin; default: text"
    )
    prompt_column: str | None = setting(
        "make a data set of questions and answers: name of the column with the questions; without "
        "a column of answers, it has lists of messages, each with a role and a content"
    )
    answer_column: str | None = setting("name of the column with the answers")
    max_bytes: int | None = setting(
        "the most bytes of text to read from a source; a longer one is an error", at_least=1
    )
    vocab_size: int | None = setting(
        "SOURCE is a file of ids below this number, which are no text: .npy, or .bin without a "
        "header",
        at_least=1,
        at_most=2**21,
    )
    dtype: str | None = setting(
        "type of the ids in a .bin file, little-endian; default: uint16",
        choices=("uint16", "uint32"),
    )
    examples: int | None = setting(
        "number of training examples of a task; default: 20,000", at_least=1, at_most=1_000_000
    )
    length: int | None = setting(
        "length of a task's questions, in letters, bits, brackets, pairs or names; default: 2 to 16"
    )
    digits: int | None = setting("digits of the numbers of addition; default: 3")

    @property
    def fraction(self) -> Fraction:
        """Return the share of the text or of the documents that is for validation."""
        # The digits as written count: the double 0.9 exceeds 9/10, which would cost a character.
        return Fraction(str(float(0.1 if self.val_fraction is None else self.val_fraction)))
