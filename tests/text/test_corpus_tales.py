"""The built-in corpus: the same bytes everywhere, and a floor that is computed two ways."""

import hashlib
import itertools
import math
import re
import statistics
from collections.abc import Iterator, Sequence

import pytest

from attnlm.text import corpus_tales

GRAMMAR = corpus_tales.parse_grammar(corpus_tales.RULES)


def parts_of(text: str) -> list[str]:
    """Return what an alternative writes, piece by piece: <choices>, [forms] and other text."""
    return re.findall(r"<\w+>|\[\w+\]|[^<\[]+", text)


def name_in(part: str) -> str:
    """Return the name of the rule or form; "" for other text."""
    return part[1:-1].lower() if part[0] in "<[" else ""


Corpus = tuple[str, dict[int, float]]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return corpus_tales.generate_tales()


@pytest.fixture(scope="module")
def stories(corpus: Corpus) -> list[tuple[str, float]]:
    """Return each story with its nats, cut out of the corpus by its floors."""
    text, floors = corpus
    ends = itertools.pairwise([*floors.items(), (len(text), 0.0)])
    return [(text[start:end], floor - rest) for (start, floor), (end, rest) in ends]


def test_the_text_is_the_pinned_one_and_its_default_split_is_between_two_stories(
    corpus: Corpus,
) -> None:
    text, floors = corpus
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == corpus_tales.SHA256
    assert 1_000_000 <= len(text) < 1_100_000
    assert len(set(text)) <= 65
    assert 9 * len(text) // 10 in floors


def test_a_choice_has_exactly_its_weight() -> None:
    grammar = corpus_tales.parse_grammar({"story": "3 a | b | 2 c"})
    # The last word but one is past the last multiple of 6 and would favour the first alternatives.
    words = iter([*range(6), 2**32 - 1, 5])
    assert "".join(corpus_tales.generate_story(grammar, words)[0] for _ in range(7)) == "aaabccc"


Reading = tuple[int, dict[str, str], float]


def read_rule(name: str, text: str, start: int, memory: dict[str, str]) -> Iterator[Reading]:
    """Yield the end, memory and nats of each way that the rule can have written the text."""
    names, weights, alternatives = GRAMMAR[name]
    for weight, (written, *others) in zip(weights, alternatives, strict=True):
        nats = -math.log(weight / sum(weights))
        for end, known, more in read_parts(parts_of(written), text, start, memory):
            forms = zip(names, (text[start:end], *others), strict=True)
            yield end, known | dict(forms), nats + more


def read_parts(
    parts: Sequence[str], text: str, start: int, memory: dict[str, str]
) -> Iterator[Reading]:
    if not parts:
        yield start, memory, 0.0
        return
    for middle, known, nats in read_part(parts[0], text, start, memory):
        for end, known_then, more in read_parts(parts[1:], text, middle, known):
            yield end, known_then, nats + more


def read_part(part: str, text: str, start: int, memory: dict[str, str]) -> Iterator[Reading]:
    name, is_capital = name_in(part), part[1:2].isupper()
    if part[0] == "<":
        if is_capital:
            text = text[:start] + text[start].lower() + text[start + 1 :]
        yield from read_rule(name, text, start, memory)
        return
    expected = memory[name] if name else part
    if name and is_capital:
        expected = expected[0].upper() + expected[1:]
    if text.startswith(expected, start):
        yield start + len(expected), memory, 0.0


def test_a_reader_finds_one_derivation_of_a_story_with_the_same_nats(
    stories: list[tuple[str, float]],
) -> None:
    for text, nats in stories[::8]:
        assert text.count(corpus_tales.STORY_END) == 1
        readings = [
            reading
            for reading in read_rule("story", text, 0, {})
            if text[reading[0] :] == corpus_tales.STORY_END
        ]
        assert len(readings) == 1
        assert readings[0][2] == pytest.approx(nats, abs=1e-6)


def entropy(name: str) -> float:
    """Return the expected nats of what the rule writes: its own choice, then those inside it."""
    _, weights, alternatives = GRAMMAR[name]
    expected = 0.0
    for weight, (text, *_) in zip(weights, alternatives, strict=True):
        p = weight / sum(weights)
        inside = [name_in(part) for part in parts_of(text) if part[0] == "<"]
        expected += p * (-math.log(p) + sum(map(entropy, inside)))
    return expected


def test_the_floor_of_the_corpus_agrees_with_the_entropy_of_its_grammar(
    stories: list[tuple[str, float]],
) -> None:
    nats = [nats for _, nats in stories]
    standard_error = statistics.stdev(nats) / math.sqrt(len(nats))
    assert abs(statistics.fmean(nats) - entropy("story")) < 3 * standard_error
