"""Tokenizers as llama.cpp reads them: a vocabulary and the name of a pre-tokenizer.

The pre-tokenizers, which split texts for BPE, are built into llama.cpp; a file can only name one.
Character and byte tokenizers become llama.cpp's RWKV tokenizer, which takes the longest matching
token at each place. It is the only tokenizer of llama.cpp without a default end-of-text id.
"""

from __future__ import annotations

import functools
from typing import Any

from attnlm.base.errors import AttnlmError
from attnlm.tokens import byte_characters, specs
from attnlm.tokens.tokenizer import BpeTokenizer, CharTokenizer, Tokenizer
from attnlm.tokens.tokenizer_json import check_equal, listed_pairs, pairs_tokenizer

_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # types of tokens
# gpt-4o is not O200K_PATTERN: it splits capitals and marks beyond ASCII differently.
_SPLITTERS = {
    specs.GPT2_PATTERN: "gpt-2",
    specs.CL100K_PATTERN: "llama-bpe",
    specs.LLAMA3_PATTERN: "llama-bpe",
    specs.SMOLLM_PATTERN: "smollm",
}
_TAKE_WORDS_WHOLE = ("llama-bpe",)  # pre-tokenizers that skip merges if the whole word is a token
_refused = functools.partial(
    AttnlmError,
    hint="use `to` hf, or prepare the text with `tokenizer` byte or bpe:N, and train again",
)
# Texts that llama.cpp reads as special tokens, whatever their type; some mean end of text.
_MARKS = (
    "<|endoftext|> <|eot_id|> <|im_end|> <|end|> <end_of_turn> <|end_of_text|> <EOT> _<EOT> [EOT] "
    "[EOS] <eos> </s> <end_of_utterance> <|eom_id|> <|return|> <|call|> <|calls|> <|flush|> "
    "<turn|> <|tool_response> [e~[ <|fim_prefix|> <fim-prefix> <fim_prefix> <PRE> <|code_prefix|> "
    "<|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> <SUF> <|code_suffix|> <|suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <MID> <|code_middle|> <|middle|> <|fim_pad|> "
    "<fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> "
    "<|file_sep|> <|channel|> <|message|> <|start|> <|constrain|>"
)


def vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the metadata of a GGUF file for a tokenizer: the values of keys `tokenizer.ggml.…`.

    Raises AttnlmError for a tokenizer that llama.cpp would read differently.
    """
    if isinstance(tokenizer, BpeTokenizer):
        adds = tokenizer.beginning is not None
        return {**_byte_pair_metadata(tokenizer), "add_bos_token": adds, "add_eos_token": False}
    if tokenizer.special:
        raise _refused(
            f"llama.cpp has no vocabulary like {tokenizer.name} with an end-of-text id, which "
            "follows the records of this data set",
            hint="use `to` hf, or prepare the text with `tokenizer` bpe:N, and train again",
        )
    if isinstance(tokenizer, CharTokenizer) and not tokenizer.characters.isascii():
        # It hangs on an unknown character that begins with the same bytes as a known one.
        char = next(c for c in tokenizer.characters if not c.isascii())
        raise _refused(
            f"llama.cpp cannot tokenize single characters outside of ASCII, such as {char!r}: it "
            "hangs at such a character that is not in the vocabulary"
        )
    plain = bytes(set(range(32, 127)) - {ord("\\")})  # it reads other bytes in hexadecimal
    tokens = [
        "".join(chr(byte) if byte in plain else f"\\x{byte:02x}" for byte in token)
        for token in tokenizer.tokens
    ]
    return {"model": "rwkv", "tokens": tokens, "token_type": [_NORMAL] * len(tokens)}


def _byte_pair_metadata(tokenizer: BpeTokenizer) -> dict[str, Any]:
    splitter = _SPLITTERS.get(tokenizer.pattern)
    if splitter is None:
        raise _refused(f"llama.cpp has no pre-tokenizer that is equal to that of {tokenizer.name}")
    if tokenizer.nfc:
        raise _refused(f"{tokenizer.name} normalises texts to NFC, which llama.cpp does not do")
    tokens = [byte_characters.to_text(token) for token in tokenizer.tokens]
    types = [_NORMAL] * len(tokens)
    if marks := set(_MARKS.split()).intersection(map(byte_characters.to_text, tokenizer.ranks)):
        raise _refused(
            f"{min(marks)!r} is an ordinary token of the vocabulary, but special in llama.cpp"
        )
    for i, token in enumerate(tokenizer.tokens):
        if not token:  # cannot collide: written tokens have no spaces
            tokens[i], types[i] = f"<unused {i}>", _UNUSED
    for text, i in tokenizer.special.items():
        tokens[i], types[i] = text, _CONTROL
    pairs = listed_pairs(tokenizer)
    check_equal(tokenizer, pairs_tokenizer(tokenizer, pairs, whole=splitter in _TAKE_WORDS_WHOLE))
    begin, end = tokenizer.beginning, tokenizer.end_of_text
    if end is None:
        # llama.cpp would end texts at id 11 by default. Byte 255 occurs in no text, so none ends.
        end = tokenizer.ranks.index(b"\xff")
        begin = tokenizer.newline if begin is None else begin
    return {
        "model": "gpt2",
        "pre": splitter,
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(pair) for pair in pairs],
        "bos_token_id": end if begin is None else begin,
        "eos_token_id": end,
    }
