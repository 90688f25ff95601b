"""Byte-pair vocabularies: trained on a text, or published with a language model."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from attnlm.base.errors import AttnlmError
from attnlm.base.events import Note, OnEvent, ignore
from attnlm.base.files import file_hash
from attnlm.text.download import fetch_cached
from attnlm.tokens.tokenizer import BYTES, BpeTokenizer, safe_blocks

# The notation of GPT-2 and `tokenizers` for bytes: each byte is one visible character.
_VISIBLE = [byte for byte in range(256) if chr(byte).isprintable() and chr(byte) != " "]
_OTHERS = [byte for byte in range(256) if byte not in _VISIBLE]
BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}
"""The byte of each character, in the order of GPT-2's ids."""
_CHARACTER_OF = {byte: character for character, byte in BYTE_OF.items()}

_BLOBS = "https://openaipublic.blob.core.windows.net/"


# For each vocabulary, the URL and the hash of its token file, its end-of-text id and its size.
_PUBLISHED = {
    "gpt2": (
        _BLOBS + "gpt-2/encodings/main/vocab.bpe",
        "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        50256,
        50257,
    ),
    "cl100k_base": (
        _BLOBS + "encodings/cl100k_base.tiktoken",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
        100257,
        100277,
    ),
    "o200k_base": (
        _BLOBS + "encodings/o200k_base.tiktoken",
        "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d",
        199999,
        200019,
    ),
}
# Characters given to the trainer at a time. Its time grows with the square of a word's length, and
# a text without spaces is one word.
_TRAINING_PIECE = 2**10


def visible(token: bytes) -> str:
    """Return the bytes of a token as visible characters."""
    return "".join(_CHARACTER_OF[byte] for byte in token)


def token_bytes(shown: str) -> bytes:
    """Return the bytes of a token that `visible` shows. Raises KeyError for other characters."""
    return bytes(BYTE_OF[character] for character in shown)


def train_vocabulary(
    name: str,
    size: int,
    sample: Sequence[str],
    on_event: OnEvent = ignore,
    *,
    has_end: bool = False,
) -> BpeTokenizer:
    """Return a vocabulary of `size` ids: the 256 bytes, then the most frequent merges of `sample`.

    If `has_end` is set, the id of "<|endoftext|>" follows, as one more. If the sample has too few
    pairs to merge, the vocabulary is smaller, and a Note says so.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(safe_blocks(sample, _TRAINING_PIECE), trainer)
    id_of: dict[str, int] = trained.get_vocab()
    # Two merges of the trainer may make the same bytes. Both have the id of the first merge, since
    # ranks have one id for each token.
    merged = map(token_bytes, sorted(id_of, key=id_of.__getitem__)[256:])
    ranks = [*BYTES, *merged]
    if len(ranks) < size:
        on_event(Note(f"the text is too short for {size:,} ids; {len(ranks):,} were made"))
    end = len(ranks) if has_end else None
    return BpeTokenizer(name, ranks, vocab_size=len(ranks) + has_end, end_of_text=end)


def load_published(
    name: str, *, spool: Path, offline: bool = False, on_event: OnEvent = ignore
) -> BpeTokenizer:
    """Return gpt2, cl100k_base or o200k_base from the cache of tiktoken or attnlm, or the network.

    A download that can't be kept in attnlm's cache is left in the folder `spool`.
    """
    url, sha256, end_of_text, vocab_size = _PUBLISHED[name]
    path = Path(os.environ.get("TIKTOKEN_CACHE_DIR", ""), hashlib.sha1(url.encode()).hexdigest())
    if not path.is_file() or file_hash(path) != sha256:
        try:
            path = fetch_cached(
                url, url.rpartition("/")[2], sha256, spool, offline=offline, on_event=on_event
            )
        except AttnlmError as error:
            raise AttnlmError(
                error.message,
                "use `tokenizer` bpe:1024, which needs no network, or set TIKTOKEN_CACHE_DIR to a "
                "copy of tiktoken's cache",
            ) from error
    lines = path.read_text(encoding="utf-8").splitlines()
    if name == "gpt2":  # a line with the version, then a merge in each line
        merges = [token_bytes(merge.replace(" ", "")) for merge in lines[1:]]
        ranks = [*(bytes([byte]) for byte in BYTE_OF.values()), *merges]
    else:  # in each line a token in base64, and its rank
        ranks = [base64.b64decode(line.split()[0]) for line in lines]
    return BpeTokenizer(name, ranks, vocab_size=vocab_size, end_of_text=end_of_text)
