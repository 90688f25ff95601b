"""The built-in corpus: the same bytes everywhere, and a floor that is computed two ways."""

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, islice
from typing import NamedTuple

import pytest

from attnlm.text import tales
from attnlm.text.tales import PART, Grammar, Tales

GRAMMAR = tales.parse_grammar(tales.RULES)

SMALL = tales.parse_grammar(
    {
        "story": "2 <hero> lost <thing>. <end> | Here <hero> slept.",
        "hero/she": "3 Mia/she | Tom/he",
        "thing/it": "a hat/it | 2 two <colour> hats/them",
        "colour": "red | 4 blue",
        "end": "[She] found [it]. | <Thing> came back! | [Hero] wept.",
    }
)


class Choice(NamedTuple):
    """`<rule>`: writes one of the rule's alternatives, and remembers it."""

    rule: str
    capital: bool


class Repeat(NamedTuple):
    """`[form]`: writes what was remembered under this name."""

    form: str
    capital: bool


Part = str | Choice | Repeat


def parts_of(text: str) -> list[Part]:
    """Return what an alternative writes, piece by piece."""
    parts: list[Part] = []
    start = 0
    for found in [*PART.finditer(text), None]:
        if literal := text[start : found.start() if found else len(text)]:
            parts.append(literal)
        if found:
            kind, name = (Choice, found[1]) if found[1] else (Repeat, found[2])
            parts.append(kind(name.lower(), capital=name[0].isupper()))
            start = found.end()
    return parts


@pytest.fixture(scope="module")
def corpus() -> Tales:
    return tales.generate()


@pytest.fixture(scope="module")
def stories(corpus: Tales) -> list[tuple[str, float]]:
    """Each story with its nats, cut out of the corpus by what it says of itself."""
    starts = [*corpus.floor_nats, len(corpus.text)]
    floors = [*corpus.floor_nats.values(), 0.0]
    return [
        (corpus.text[starts[i] : starts[i + 1]], floors[i] - floors[i + 1])
        for i in range(len(corpus.floor_nats))
    ]


# --- The corpus ----------------------------------------------------------------------------------


def test_the_text_is_the_pinned_one(corpus: Tales) -> None:
    assert hashlib.sha256(corpus.text.encode("ascii")).hexdigest() == tales.SHA256
    assert 1_000_000 <= len(corpus.text) < 1_100_000
    assert len(set(corpus.text)) <= 65


def test_the_default_split_falls_between_two_stories(corpus: Tales) -> None:
    train_characters = 9 * len(corpus.text) // 10
    assert train_characters in corpus.floor_nats
    assert corpus.text[:train_characters].endswith(tales.STORY_END)


def test_stories_are_separated_by_one_blank_line(stories: list[tuple[str, float]]) -> None:
    for text, _ in stories:
        assert text.index("\n\n") == len(text) - 2


def test_quotes_close_on_the_line_they_open(corpus: Tales) -> None:
    assert all(line.count('"') % 2 == 0 for line in corpus.text.splitlines())


# --- Random choices ------------------------------------------------------------------------------


def test_random_words_are_the_bytes_of_shake_256() -> None:
    first_block = hashlib.shake_256(b"seed, block 0").digest(4096)
    second_block = hashlib.shake_256(b"seed, block 1").digest(4096)
    words = list(islice(tales.random_words("seed"), 1025))
    assert words[0] == int.from_bytes(first_block[:4], "little")
    assert words[1024] == int.from_bytes(second_block[:4], "little")


def test_a_choice_has_exactly_its_weight() -> None:
    weights = (3, 1, 2)
    # The last word is past the last multiple of 6 and would favour the first alternatives.
    words = iter([*range(6), 2**32 - 1, 5])
    choose = tales.weighted_choice(words)
    assert [choose(weights) for _ in range(6)] == [0, 0, 0, 1, 2, 2]
    assert choose(weights) == 2


def test_choices_are_as_frequent_as_their_weights() -> None:
    choose = tales.weighted_choice(tales.random_words("frequencies"))
    n, weights = 20_000, (1, 2, 7)
    counts = Counter(choose(weights) for _ in range(n))
    for i, weight in enumerate(weights):
        p = weight / sum(weights)
        assert abs(counts[i] - n * p) < 4 * math.sqrt(n * p * (1 - p))


# --- The notation --------------------------------------------------------------------------------


def test_an_alternative_with_a_form_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="'hero/she'"):
        tales.parse_grammar({"hero/she": "Mia/she | Tom"})


def test_an_empty_alternative_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        tales.parse_grammar({"hero": "Mia | "})


def test_every_rule_of_the_grammar_is_used() -> None:
    used = {
        part.rule
        for rule in GRAMMAR.values()
        for alternative in rule.alternatives
        for part in parts_of(alternative.text)
        if isinstance(part, Choice)
    }
    assert GRAMMAR.keys() - used == {"story"}


def test_line_breaks_inside_an_alternative_are_kept_and_indentation_is_not() -> None:
    grammar = tales.parse_grammar({"story": "\n    One.\n    Two.\n  "})
    assert tales.tell(grammar, "story", lambda weights: 0).text == "One.\nTwo."


# --- The floor -----------------------------------------------------------------------------------


def every_story(grammar: Grammar, start: str) -> Iterator[tuple[str, float, Fraction]]:
    """All derivations: what is written, the nats the engine reports, the exact probability."""
    unexplored: list[tuple[int, ...]] = [()]
    while unexplored:
        path = unexplored.pop()
        taken: list[int] = []
        probability = [Fraction(1)]

        def choose(
            weights: Sequence[int],
            path: tuple[int, ...] = path,
            taken: list[int] = taken,
            probability: list[Fraction] = probability,
        ) -> int:
            if len(taken) < len(path):
                taken.append(path[len(taken)])
            else:
                unexplored.extend((*taken, i) for i in range(1, len(weights)))
                taken.append(0)
            probability[0] *= Fraction(weights[taken[-1]], sum(weights))
            return taken[-1]

        text, nats = tales.tell(grammar, start, choose)
        yield text, nats, probability[0]


def test_every_story_of_a_small_grammar_has_one_derivation_and_its_exact_nats() -> None:
    told = list(every_story(SMALL, "story"))
    texts = {text for text, _, _ in told}
    assert len(texts) == len(told)
    assert "Tom lost two red hats. He found them." in texts
    assert "Mia lost a hat. Two blue hats came back!" in texts
    assert sum(probability for _, _, probability in told) == 1
    for _, nats, probability in told:
        assert nats == pytest.approx(-math.log(probability), rel=1e-12)


def test_a_small_grammar_tells_stories_as_often_as_it_says() -> None:
    choose = tales.weighted_choice(tales.random_words("small"))
    n = 5_000
    counts = Counter(tales.tell(SMALL, "story", choose).text for _ in range(n))
    for text, _, probability in every_story(SMALL, "story"):
        p = float(probability)
        assert abs(counts[text] - n * p) < 4.5 * math.sqrt(n * p * (1 - p))


def openings(grammar: Grammar, parts: Sequence[Part]) -> set[str]:
    """The literals that the parts can begin with, whatever is remembered."""
    match parts[0]:
        case Choice(name, capital):
            found = {
                opening
                for alternative in grammar[name].alternatives
                for opening in openings(grammar, parts_of(alternative.text))
            }
        case Repeat(form, capital):
            found = set()
            for name, rule in grammar.items():
                if form == name:
                    found |= openings(grammar, [Choice(name, capital=False)])
                elif form in rule.forms:
                    place = rule.forms.index(form) - 1
                    found |= {other.other_forms[place] for other in rule.alternatives}
        case literal:
            return {literal}
    return {opening[0].upper() + opening[1:] if capital else opening for opening in found}


def only_alternatives_written_out(grammar: Grammar, parts: Sequence[Part]) -> list[Part]:
    """The parts without a choice that is none, at the start."""
    match parts:
        case [Choice(name, False), *rest] if len(grammar[name].alternatives) == 1:
            inner = parts_of(grammar[name].alternatives[0].text)
            return only_alternatives_written_out(grammar, [*inner, *rest])
    return list(parts)


def after_first_character(literal: str, rest: Sequence[Part]) -> list[Part]:
    return [literal[1:], *rest] if len(literal) > 1 else list(rest)


def differ_before_either_ends(
    grammar: Grammar, one_parts: Sequence[Part], other_parts: Sequence[Part]
) -> bool:
    """Whether no text of one is the beginning of a text of the other.

    What both start with, be it a choice, writes the same in both or makes the difference itself,
    so it is passed over. Then the literals that each can go on with must differ.
    """
    one = only_alternatives_written_out(grammar, one_parts)
    other = only_alternatives_written_out(grammar, other_parts)
    match one, other:
        case ([], _) | (_, []):
            return False
        case [str(a), *rest], [str(b), *other_rest] if a[0] == b[0]:
            return differ_before_either_ends(
                grammar, after_first_character(a, rest), after_first_character(b, other_rest)
            )
        case [a, *rest], [b, *other_rest] if a == b:
            return differ_before_either_ends(grammar, rest, other_rest)
    return not any(
        a.startswith(b) or b.startswith(a)
        for a in openings(grammar, one)
        for b in openings(grammar, other)
    )


def confusable(grammar: Grammar) -> list[tuple[str, int, int]]:
    """Rules with two alternatives that may not differ before either ends."""
    return [
        (name, i, j)
        for name, rule in grammar.items()
        for i, j in combinations(range(len(rule.alternatives)), 2)
        if not differ_before_either_ends(
            grammar, parts_of(rule.alternatives[i].text), parts_of(rule.alternatives[j].text)
        )
    ]


def test_no_two_alternatives_of_a_rule_can_be_confused() -> None:
    assert confusable(SMALL) == []
    assert confusable(GRAMMAR) == []


@pytest.mark.parametrize(
    "alternatives",
    ["tea | teapot", "tea | tea", "<a> | tea", "one <a> | one tea", "[a] x | tea y", "<a> | <a> x"],
)
def test_alternatives_that_can_be_confused_are_seen(alternatives: str) -> None:
    grammar = tales.parse_grammar({"story": alternatives, "a": "tea | cake"})
    assert confusable(grammar) == [("story", 0, 1)]


Reading = tuple[int, dict[str, str], float]


def read_rule(name: str, text: str, start: int, memory: dict[str, str]) -> Iterator[Reading]:
    """Every way that the rule can have written the text from `start`: its end, memory and nats."""
    rule = GRAMMAR[name]
    for alternative in rule.alternatives:
        nats = -math.log(alternative.weight / sum(rule.weights))
        for end, known, more in read_parts(parts_of(alternative.text), text, start, memory):
            forms = zip(rule.forms, (text[start:end], *alternative.other_forms), strict=True)
            yield end, known | dict(forms), nats + more


def read_parts(
    parts: Sequence[Part], text: str, start: int, memory: dict[str, str]
) -> Iterator[Reading]:
    if not parts:
        yield start, memory, 0.0
        return
    for middle, known, nats in read_part(parts[0], text, start, memory):
        for end, known_then, more in read_parts(parts[1:], text, middle, known):
            yield end, known_then, nats + more


def read_part(part: Part, text: str, start: int, memory: dict[str, str]) -> Iterator[Reading]:
    if isinstance(part, Choice):
        if part.capital:
            text = text[:start] + text[start].lower() + text[start + 1 :]
        yield from read_rule(part.rule, text, start, memory)
        return
    expected = memory[part.form] if isinstance(part, Repeat) else part
    if isinstance(part, Repeat) and part.capital:
        expected = expected[0].upper() + expected[1:]
    if text.startswith(expected, start):
        yield start + len(expected), memory, 0.0


def test_a_reader_finds_one_derivation_of_each_story_with_the_same_nats(
    stories: list[tuple[str, float]],
) -> None:
    for text, nats in stories[::5]:
        readings = [
            reading
            for reading in read_rule("story", text, 0, {})
            if text[reading[0] :] == tales.STORY_END
        ]
        assert len(readings) == 1
        assert readings[0][2] == pytest.approx(nats, abs=1e-6)


def entropy(grammar: Grammar, name: str) -> float:
    """The expected nats of what the rule writes: its own choice, then those inside it."""
    rule = grammar[name]
    expected = 0.0
    for alternative in rule.alternatives:
        p = alternative.weight / sum(rule.weights)
        inside = [part.rule for part in parts_of(alternative.text) if isinstance(part, Choice)]
        expected += p * (-math.log(p) + sum(entropy(grammar, name) for name in inside))
    return expected


def test_the_expected_nats_of_the_small_grammar_are_its_entropy() -> None:
    expected = sum(float(p) * -math.log(p) for _, _, p in every_story(SMALL, "story"))
    assert entropy(SMALL, "story") == pytest.approx(expected, rel=1e-12)


def test_the_floor_of_the_corpus_agrees_with_the_entropy_of_its_grammar(
    stories: list[tuple[str, float]],
) -> None:
    nats = [nats for _, nats in stories]
    standard_error = statistics.stdev(nats) / math.sqrt(len(nats))
    assert abs(statistics.fmean(nats) - entropy(GRAMMAR, "story")) < 3 * standard_error
