"""The built-in corpus `names`: names made of syllables, one on each line, no name twice."""

from __future__ import annotations

from collections.abc import Iterator

from attnlm.text.corpus_tales import uniform_words

COUNT = 12_000
_SEED = "attnlm names 1"
# Parts of names; a part that is written more often is chosen more often.
_STARTS = (
    "a a a e e i o u b br d d dr f fl g gr h j j k k kr l l l m m m n n p pr r r s s sh st t t th "
    "tr v w y z"
)
_MIDDLES = "l l l ll m m n n nn r r r rr s ss t tt v d d b k g nd rd lm rl nt st th sh ck"
_VOWELS = "a a a a a e e e e i i i i o o u ia ea ie ai au"
_ENDS_AFTER_VOWELS = "n n n l l s s r r th m h d ne lle tte nna ra na la"
_OTHER_ENDS = "a a a a e e i o ia ie ey y en in on an el us er"
_SYLLABLES = (1, 1, 2, 2, 2, 3)


def generate_names() -> str:
    """Generate the corpus: the same text on every machine."""
    words = uniform_words(_SEED)
    names: dict[str, None] = {}
    while len(names) < COUNT:
        names[_generate_name(words)] = None
    return "\n".join(names) + "\n"


def _generate_name(words: Iterator[int]) -> str:
    def one_of(parts: str) -> str:
        choices = parts.split()
        return choices[next(words) % len(choices)]

    start = one_of(_STARTS)
    name = start if start[-1] in "aeiou" else start + one_of(_VOWELS)
    for _ in range(_SYLLABLES[next(words) % len(_SYLLABLES)] - 1):
        name += one_of(_MIDDLES) + one_of(_VOWELS)
    if next(words) % 2:
        return name + one_of(_ENDS_AFTER_VOWELS)
    return name + one_of(_MIDDLES) + one_of(_OTHER_ENDS)
