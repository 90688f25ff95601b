"""Generate text from a run: the functions `sample` and `samples`."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attnlm.base.errors import UsageError
from attnlm.base.events import Note, OnEvent
from attnlm.base.setting_fields import describe_settings, fields_of, quoted
from attnlm.base.suggestions import suggestion
from attnlm.generation.sampler import load_sampler
from attnlm.generation.sampling_config import SAMPLING, SamplingConfig, draw_seed
from attnlm.runs.run import Run


def sample(
    run: str | Path | Run | None = None,
    *,
    prompt: str = "",
    checkpoint: str = "auto",
    device: str = "auto",
    on_event: OnEvent | None = None,
    **settings: Any,
) -> Iterator[str]:
    """Generate one text from a trained run (by default the last trained), piece by piece.

    Yields the prompt, and then its continuation while it is generated:

        for piece in attnlm.sample(run, tokens=100, prompt="Once ", seed=1):
            print(piece, end="", flush=True)

    `"".join(…)` gives the whole text. `samples` returns several texts, and takes several prompts.

    The text ends after `tokens` tokens, or earlier: before the first of the texts in `stop` (a text
    or a list of texts) or, unless `ignore_eos` is set, before the tokenizer's end-of-text token.
    Without `seed`, a seed is drawn and reported as a Note. Raises AttnlmError (UsageError for
    invalid arguments) at the call, before the first piece.
    """
    if not isinstance(prompt, str):
        hint = "it must be a text; attnlm.samples takes a list of texts"
        raise UsageError(f"invalid value for `prompt`: {quoted(prompt)}", hint)
    config = _sampling_config(settings, on_event)
    if config.num_samples != 1:
        raise UsageError(
            f"sample yields one text, but num_samples is {config.num_samples}",
            "for several texts, call attnlm.samples(run, num_samples=N)",
        )
    sampler = load_sampler(run, checkpoint=checkpoint, device=device, on_event=on_event)
    pieces = sampler.stream(sampler.prompt_ids(prompt), config)
    return itertools.chain([prompt] if prompt else [], pieces)


def samples(
    run: str | Path | Run | None = None,
    *,
    prompt: str | Sequence[str] = "",
    checkpoint: str = "auto",
    device: str = "auto",
    on_event: OnEvent | None = None,
    **settings: Any,
) -> list[str]:
    """Return several whole texts from a trained run (by default the last trained).

        for text in attnlm.samples(run, num_samples=3, tokens=100, prompt="Once ", seed=1):
            print(text, end="\\n---\\n")

    Each text begins with the prompt and ends as in `sample`; the first one is the text of `sample`
    for the same seed. `prompt` can be a list:

        texts = attnlm.samples(run, prompt=["Once ", "A fox "], tokens=100, seed=1)

    The result then has `num_samples` texts for each prompt, in the order of the prompts. They are
    generated together, whatever the lengths of the prompts. Each prompt gets the same texts as
    alone with this seed, except where rounding depends on the number of texts: on a GPU, and
    without the kernels in C.

    Without `seed`, a seed is drawn and reported as a Note. Raises AttnlmError (UsageError for
    invalid arguments).
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, Sequence) or not all(isinstance(text, str) for text in prompts):
        hint = "it must be a text or a list of texts"
        raise UsageError(f"invalid value for `prompt`: {quoted(prompt)}", hint)
    config = _sampling_config(settings, on_event)
    sampler = load_sampler(run, checkpoint=checkpoint, device=device, on_event=on_event)
    return prepend_prompts(prompts, sampler.samples(sampler.encode_prompts(prompts), config)[0])


for _function in (sample, samples):
    _function.__doc__ = f"""{inspect.cleandoc(_function.__doc__ or "")}

Settings:

{describe_settings(SAMPLING, with_defaults=True)}
"""


def _sampling_config(settings: dict[str, Any], on_event: OnEvent | None) -> SamplingConfig:
    """Return the settings of `sample` or `samples`; draw a seed and report it if there is none."""
    names = fields_of(SamplingConfig)
    for name in settings:
        if name not in names:
            hint = suggestion(name, names, f"the settings are {', '.join(names)}")
            raise UsageError(f"unknown setting {name!r}", hint)
    seed = settings.pop("seed", None)
    config = SamplingConfig(**settings, seed=draw_seed() if seed is None else seed)
    if seed is None and on_event is not None:
        on_event(Note(f"seed {config.seed}"))
    return config


def prepend_prompts(prompts: Sequence[str], continued: Sequence[str]) -> list[str]:
    """Return whole texts. Each prompt has the same number of continuations."""
    num_samples = len(continued) // max(1, len(prompts))
    return [prompts[number // num_samples] + text for number, text in enumerate(continued)]
