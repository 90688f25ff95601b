"""`python -m benchmarks.hugging_face FOLDER [--prompt TEXT --tokens N]`: GPT-2 by `transformers`.

Without a prompt, saves a model of GPT-2's shape with random weights, and its tokenizer, in the
folder. With one, prints the speed of greedy generation and the text as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from attnlm.tokens.tokenizer import load_published
from attnlm.tokens.tokenizer_json import library_tokenizer


def main() -> None:
    """Save the model, or time it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt")
    parser.add_argument("--tokens", type=int)
    given = parser.parse_args()
    if given.prompt is None:
        torch.manual_seed(1)
        made: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        made.save_pretrained(given.folder)
        tokenizer = library_tokenizer(load_published("gpt2", spool=given.folder))
        (given.folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        return
    dtype = torch.float32
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(given.folder, dtype=dtype)
    reader: Any = transformers.AutoTokenizer.from_pretrained(given.folder)
    ids = reader(given.prompt, return_tensors="pt")
    how = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(**ids, max_new_tokens=2, **how)
    began = time.perf_counter()
    generated = model.generate(**ids, max_new_tokens=given.tokens, **how)
    seconds = time.perf_counter() - began
    text = reader.decode(generated[0])
    print(json.dumps({"tokens_per_second": given.tokens / seconds, "text": text}))


if __name__ == "__main__":
    main()
