"""The built-in corpus: short stories from a small grammar, and exactly how predictable they are.

Every choice the grammar makes has a known probability, and every text has one derivation, so the
probability of the text is the product of the probabilities of its choices. Its negative logarithm
is the loss of the generator itself: a floor below which a model goes only by luck.

One derivation, because a choice is written where it is made, and what the alternatives of a rule
write always differs at some character before either ends. Whoever reads the text from left to
right, knowing the grammar, can name each choice. The tests check this of every pair of
alternatives.
"""

import hashlib
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import NamedTuple

from attnlm.text.tales_grammar import RULES

SEED = "attnlm tales 6"
MINIMUM_CHARACTERS = 1_000_000
SHA256 = "e8fd317621cd324db2042fdc4a94b6308621679ad2f9e160ad375f98c1113555"
STORY_END = "\n\n"


@dataclass(frozen=True)
class Tales:
    """The corpus: its text, and the floor at each place where a story starts.

    `floor_nats` maps the character offset of a story's first character to −ln p of all the text
    from there to the end.
    """

    text: str
    floor_nats: Mapping[int, float]


class Story(NamedTuple):
    """A text, and −ln of its probability, which is the product of its choices' probabilities."""

    text: str
    nats: float


# --- The grammar: see `tales_grammar` for the notation -------------------------------------------


@dataclass(frozen=True)
class Choice:
    """`<rule>`: writes one of the rule's alternatives, and remembers it."""

    rule: str
    capital: bool


@dataclass(frozen=True)
class Repeat:
    """`[form]`: writes what the latest choice remembered under this name."""

    form: str
    capital: bool


Part = str | Choice | Repeat


@dataclass(frozen=True)
class Alternative:
    """One thing a rule can write, how often (weight / total), and its other forms."""

    weight: int
    parts: tuple[Part, ...]
    other_forms: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """A choice between alternatives; `forms` names what is remembered, the written text first."""

    forms: tuple[str, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def weights(self) -> tuple[int, ...]:
        """The alternatives' weights, in their order."""
        return tuple(alternative.weight for alternative in self.alternatives)


Grammar = Mapping[str, Rule]


def parse_grammar(rules: Mapping[str, str]) -> Grammar:
    """Reads the notation of `tales_grammar.RULES`; a rule is called by the first of its forms.

    Raises ValueError for an alternative that is empty or does not have all forms of its rule.
    """
    grammar = {}
    for heading, source in rules.items():
        forms = tuple(heading.split("/"))
        alternatives = tuple(_parse_alternative(text) for text in source.split("|"))
        if any(len(alternative.other_forms) != len(forms) - 1 for alternative in alternatives):
            raise ValueError(f"an alternative of {heading!r} has too many or too few forms")
        grammar[forms[0]] = Rule(forms, alternatives)
    return grammar


def _parse_alternative(source: str) -> Alternative:
    lines = "\n".join(line.strip() for line in source.strip().splitlines())
    weighted = re.fullmatch(r"(?:(\d+) )?(.+)", lines, re.DOTALL)
    if weighted is None:
        raise ValueError("an alternative is empty")
    written, *other_forms = weighted[2].split("/")
    return Alternative(int(weighted[1] or 1), tuple(_parse_parts(written)), tuple(other_forms))


def _parse_parts(text: str) -> Iterator[Part]:
    for rule, form, literal in re.findall(r"<(\w+)>|\[(\w+)\]|([^<\[]+|.)", text):
        if rule:
            yield Choice(rule.lower(), capital=rule[0].isupper())
        elif form:
            yield Repeat(form.lower(), capital=form[0].isupper())
        else:
            yield literal


# --- Writing -------------------------------------------------------------------------------------


@dataclass
class Writer:
    """Writes one story; `choose` is given the weights of a rule and returns an index."""

    grammar: Grammar
    choose: Callable[[Sequence[int]], int]
    memory: dict[str, str] = field(default_factory=dict)
    nats: list[float] = field(default_factory=list)

    def write(self, name: str) -> str:
        """Writes one alternative of the rule, remembers its forms and counts its nats."""
        rule = self.grammar[name]
        weights = rule.weights
        alternative = rule.alternatives[self.choose(weights)]
        self.nats.append(math.log(sum(weights) / alternative.weight))
        text = "".join(map(self._write_part, alternative.parts))
        self.memory.update(zip(rule.forms, (text, *alternative.other_forms), strict=True))
        return text

    def _write_part(self, part: Part) -> str:
        match part:
            case Choice(rule, capital):
                return _capitalised(self.write(rule), capital)
            case Repeat(form, capital):
                return _capitalised(self.memory[form], capital)
            case _:
                return part


def _capitalised(text: str, capital: bool) -> str:
    return text[0].upper() + text[1:] if capital else text


def tell(grammar: Grammar, start: str, choose: Callable[[Sequence[int]], int]) -> Story:
    """Writes one story from the rule `start`, with nothing remembered from another."""
    writer = Writer(grammar, choose)
    return Story(writer.write(start), math.fsum(writer.nats))


# --- Random choices ------------------------------------------------------------------------------


def random_words(seed: str) -> Iterator[int]:
    """Uniform 32-bit integers without end: the bytes of SHAKE-256, block by block.

    A hash function's output is fixed by its standard; that of `random` is not.
    """
    for block in count():
        stream = hashlib.shake_256(f"{seed}, block {block}".encode()).digest(4096)
        yield from struct.unpack("<1024I", stream)


def weighted_choice(words: Iterator[int]) -> Callable[[Sequence[int]], int]:
    """A `choose` that returns index i with probability weights[i] / sum(weights), exactly."""

    def choose(weights: Sequence[int]) -> int:
        total = sum(weights)
        # Words past the last whole multiple of the total would favour the first alternatives.
        fair = 2**32 - 2**32 % total
        point = next(word for word in words if word < fair) % total
        return next(i for i, bound in enumerate(accumulate(weights)) if point < bound)

    return choose


# --- The corpus ----------------------------------------------------------------------------------


def generate() -> Tales:
    """Generates the corpus: the same text on every machine, a little over 1,000,000 characters.

    It ends at the first story after which nine tenths of the characters, rounded down, are whole
    stories, so that the default split falls between two.
    """
    grammar = parse_grammar(RULES)
    choose = weighted_choice(random_words(SEED))
    texts: list[str] = []
    nats_from: dict[int, float] = {}
    length = 0
    while length < MINIMUM_CHARACTERS or 9 * length // 10 not in nats_from:
        story = tell(grammar, "story", choose)
        texts.append(story.text + STORY_END)
        nats_from[length] = story.nats
        length += len(texts[-1])
    text = "".join(texts)
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == SHA256
    floors = list(accumulate(reversed(nats_from.values())))
    return Tales(text, dict(zip(nats_from, reversed(floors), strict=True)))
