"""The built-in corpus: the same bytes everywhere, and a floor that is computed two ways."""

import hashlib
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, islice

import pytest

from attnlm.text import tales
from attnlm.text.tales import Grammar, Tales

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


def parts_of(text: str) -> list[str]:
    """Return what an alternative writes, piece by piece: <choices>, [forms] and other text."""
    return re.findall(r"<\w+>|\[\w+\]|[^<\[]+", text)


def name_in(part: str) -> str:
    """Return the name of the rule or form; "" for other text."""
    return part[1:-1].lower() if part[0] in "<[" else ""


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


# --- The notation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "says"),
    [({"hero/she": "Mia/she | Tom"}, "'hero/she'"), ({"hero": "Mia | "}, "empty")],
)
def test_alternatives_that_lack_something_are_refused(rules: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tales.parse_grammar(rules)


def test_every_rule_of_the_grammar_is_used() -> None:
    used = {
        name_in(part)
        for rule in GRAMMAR.values()
        for alternative in rule.alternatives
        for part in parts_of(alternative.text)
        if part[0] == "<"
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


def openings(grammar: Grammar, parts: Sequence[str]) -> set[str]:
    """The literals that the parts can begin with, whatever is remembered."""
    if not (name := name_in(parts[0])):
        return {parts[0]}
    found = set()
    for rule in grammar.values():
        if name == rule.forms[0]:
            for alternative in rule.alternatives:
                found |= openings(grammar, parts_of(alternative.text))
        elif name in rule.forms:
            place = rule.forms.index(name) - 1
            found |= {alternative.other_forms[place] for alternative in rule.alternatives}
    is_capital = parts[0][1].isupper()
    return {word[0].upper() + word[1:] if is_capital else word for word in found}


def only_alternatives_written_out(grammar: Grammar, parts: Sequence[str]) -> list[str]:
    """The parts without a choice that is none, at the start."""
    match parts:
        case [first, *rest] if first[0] == "<" and first[1].islower():
            if len(alternatives := grammar[name_in(first)].alternatives) == 1:
                inner = parts_of(alternatives[0].text)
                return only_alternatives_written_out(grammar, [*inner, *rest])
    return list(parts)


def differ_before_either_ends(
    grammar: Grammar, one_parts: Sequence[str], other_parts: Sequence[str]
) -> bool:
    """Whether no text of one is the beginning of a text of the other.

    What both start with, be it a choice, writes the same in both or makes the difference itself,
    so it is passed over. Then the literals that each can go on with must differ.
    """
    one = only_alternatives_written_out(grammar, one_parts)
    other = only_alternatives_written_out(grammar, other_parts)
    if not one or not other:
        return False
    if one[0] == other[0]:
        return differ_before_either_ends(grammar, one[1:], other[1:])
    if one[0][0] == other[0][0] and not name_in(one[0]):
        ends = ([part for part in (side[0][1:], *side[1:]) if part] for side in (one, other))
        return differ_before_either_ends(grammar, *ends)
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
        inside = [name_in(part) for part in parts_of(alternative.text) if part[0] == "<"]
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
