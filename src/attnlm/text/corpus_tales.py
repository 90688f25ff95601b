"""The built-in corpus: short stories from a small grammar, and their exact probability.

Every choice of the grammar has a known probability, and every text has one derivation, so the
probability of the text is the product of the probabilities of its choices. The negative
logarithm of this probability is the loss of the generator itself, a floor: a model's loss falls
below it only by luck.

A text has one derivation because choices are made in the order in which they appear in the text,
and the texts of two alternatives of a rule always differ at some character before either ends (so
"tea" and "teapot" can't both be alternatives). A reader who knows the grammar can name each choice
from left to right. A test reads a quarter of the corpus in this way.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterator, Mapping
from itertools import accumulate, count
from typing import NamedTuple

SEED = "attnlm tales 6"
MINIMUM_CHARACTERS = 1_000_000
SHA256 = "e8fd317621cd324db2042fdc4a94b6308621679ad2f9e160ad375f98c1113555"
STORY_END = "\n\n"
PART = re.compile(r"<(\w+)>|\[(\w+)\]")
"""A part to fill in: <rule> by a new choice, [form] by the text remembered under this name."""


class Rule(NamedTuple):
    """A choice between alternatives with weights.

    An alternative has a text for each of `forms`. If the alternative is chosen, its first text is
    written, with its parts filled in; all texts are remembered under the names of their forms.
    """

    forms: tuple[str, ...]
    weights: tuple[int, ...]
    alternatives: tuple[tuple[str, ...], ...]


Grammar = Mapping[str, Rule]


def parse_grammar(rules: Mapping[str, str]) -> Grammar:
    """Return the grammar of `rules`, which are in the notation of `RULES`. The first form of a rule
    is the rule's key in the grammar."""
    grammar = {}
    for heading, source in rules.items():
        lines = "\n".join(map(str.strip, source.split("\n")))
        alternatives = re.findall(r"\s*(?:(\d+) )?([^|]*[^|\s])", lines)
        forms = tuple(heading.split("/"))
        grammar[forms[0]] = Rule(
            forms,
            tuple(int(weight or 1) for weight, _ in alternatives),
            tuple(tuple(text.split("/")) for _, text in alternatives),
        )
    return grammar


def generate_story(grammar: Grammar, words: Iterator[int]) -> tuple[str, float]:
    """Return one story, chosen by the uniform 32-bit integers `words`, and −ln of its
    probability."""
    memory: dict[str, str] = {}
    nats: list[float] = []

    def write(name: str) -> str:
        forms, weights, alternatives = grammar[name]
        total = sum(weights)
        point = random_below(words, total)
        chosen = next(i for i, bound in enumerate(accumulate(weights)) if point < bound)
        nats.append(math.log(total / weights[chosen]))
        text, *others = alternatives[chosen]
        text = PART.sub(write_part, text)
        memory.update(zip(forms, (text, *others), strict=True))
        return text

    def write_part(part: re.Match[str]) -> str:
        name = part[1] or part[2]
        text = write(name.lower()) if part[1] else memory[name.lower()]
        return text[0].upper() + text[1:] if name[0].isupper() else text

    return write("story"), math.fsum(nats)


def uniform_words(seed: str) -> Iterator[int]:
    """Yield uniformly distributed 32-bit integers without end, the same on every machine."""
    # A standard defines the output of SHAKE-256, unlike the output of Python's `random`.
    blocks = (hashlib.shake_256(f"{seed}, block {i}".encode()).digest(4096) for i in count())
    return (word for block in blocks for word in struct.unpack("<1024I", block))


def random_below(words: Iterator[int], n: int) -> int:
    """Return an integer below n; the next of the 32-bit integers `words` decides."""
    # Words above the last whole multiple of n would favour small integers.
    return next(word for word in words if word < 2**32 - 2**32 % n) % n


def generate_tales() -> tuple[str, dict[int, float]]:
    """Generate the corpus: the same text on every machine, a little over 1,000,000 characters.

    Returns the text, and a mapping from the character offset at which each story begins to −ln p of
    the text from this offset to the end. Stories are added until the text is long enough and a
    story begins at nine tenths of the text's characters, rounded down. The default split is at
    this character, so it falls between two stories.
    """
    words = uniform_words(SEED)
    grammar = parse_grammar(RULES)
    text = ""
    nats_from = dict[int, float]()
    while len(text) < MINIMUM_CHARACTERS or 9 * len(text) // 10 not in nats_from:
        story, nats_from[len(text)] = generate_story(grammar, words)
        text += story + STORY_END
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == SHA256
    floors = reversed([*accumulate(reversed(nats_from.values()))])
    return text, dict(zip(nats_from, floors, strict=True))


# --- The grammar ----------------------------------------------------------------------------------
# A rule is a name and its alternatives, separated by `|`. A line break inside an alternative is
# written to the story. A number before an alternative is its weight, which is 1 by default. The
# probability of an alternative is its weight / the sum of the rule's weights.
#
#     <rule>   chooses one of the rule's alternatives, writes it and remembers it
#     [form]   writes the remembered text; <Rule> and [Form] write its first letter as a capital
#
# A rule with slashes in its name remembers several forms together: <hero/she/her> may write
# "Finn", and from then on [hero] is "Finn", [she] is "he" and [her] is "his".

RULES = {
    "story": """
        4 <opening>
        <loss>
        <ending>
      | 4 <opening>
        <find>
        <ending>
      | 3 <opening>
        <journey>
        <ending>
      | 3 <opening>
        <birthday>
        <ending>
      | 3 <opening>
        <night>
        <ending>
      | 2 <opening>
        <riddle_game>
        <ending>
    """,
    "opening": """
        3 Once there was a <trait> <kind> named <hero>.
      | 2 There once lived a <trait> <kind> whose name was <hero>.
      | 2 Long ago a <trait> <kind> named <hero> lived <place>.
      | 3 <hero> was a <trait> <kind> who lived <place>.
      | 2 In a house <place> lived <hero>, a <trait> <kind>.
    """,
    "ending": """
        2 And from that day on, [hero] and [helper] were friends.
      | 2 Then [she] went home to [her] <supper> and [her] <colour> bed.
      | 2 That night [hero] dreamed of <trifle> and of [helper].
      | 2 "What a <trait> [kind] you are, [hero]," <said> [helper].
      | 2 "What a <grand> day, [helper]," <said> [hero], and <waved>.
    """,
    # A thing is lost and found again.
    "loss": """
        <one_day> [she] lost [her] <colour> <thing>.
        [She] looked <place>, but found only <trifle>.
        "<have_you_seen> my [thing], <helper>?" <asked> [hero].
        "<hint>, [hero]," <said> [helper].
        <found>
    """,
    "have_you_seen": "3 Have you seen | 2 Who has hidden | Have you found",
    "hint": "3 [It] [is] <place> | 2 Look <place> | 2 The rain left [them] <place>",
    "found": """
        3 [She] <went> there, and there [it] [was]!
      | 2 And [place] [she] found [her] [thing].
      | 2 "[This] [is] my [thing], [helper]!" <said> [hero], and <waved>.
    """,
    # A thing is found and brought back.
    "find": """
        <one_day> [she] found somebody's <colour> <thing> <place>.
        "[Is] [this] your [thing], <helper>?" <asked> [hero].
        "Alas, no, [hero]," <said> [helper]. "Ask the <owner>."
        So [she] <went> to the [owner] with the [thing].
        "<thanks>, [hero]!" <said> the [owner].
    """,
    "thanks": "3 Thank you | 2 Oh, my [thing] | 2 Take some <supper> | I had looked <place>",
    # The hero sets out to a wish and reaches it.
    "journey": """
        <one_day> [she] set out to <wish>, with [her] <colour> <thing>.
        "Where are you going, [hero]?" <asked> <helper>.
        "To [wish], [helper]," <said> [hero]. "<invitation>."
        So [hero] and [helper] <went> on, and <in_time> they [wished].
    """,
    "invitation": "3 Walk with me | 2 Take my [thing] | 2 Have some <supper> | It is not far",
    # A present is made and given.
    "birthday": """
        <one_day> [she] met <helper> <place>.
        "It is my birthday, [hero]!" <said> [helper].
        "Then take my <colour> <thing>, [helper]," <said> [hero].
        [Helper] <thanked> the [thing] and gave [hero] some <supper>.
    """,
    "thanked": "2 took | admired | loved | kissed | laughed at | danced with",
    # Somebody is awake.
    "night": """
        Late one <gloom> night [she] heard a <noise> <place>.
        "Who is there?" <asked> [hero].
        "Only me, [hero]," <said> <helper>. "I am <pastime>."
        "Why, [helper]?" <asked> [hero]. "<reason>, [hero]," <said> [helper].
        So [hero] and [helper] [did] <until>.
    """,
    "reason": "3 I cannot sleep | 2 I have lost my <thing> | 2 It is so [gloom]",
    "until": "2 until <dawn> | all night | with <trifle>",
    # A riddle has to be answered.
    "riddle_game": """
        <one_day> [she] met <helper> <place>.
        "<riddle>, [hero]?" <asked> [helper].
        "Is it <trifle>, [helper]?" <asked> [hero]. "It is not, [hero]," <said> [helper].
        "Then it is [answer]!" <said> [hero], and [helper] <nodded>.
    """,
    "riddle/answer": """
        What wears a white hat and never feels cold/the mountain
      | What runs past the mill and never grows tired/the stream
      | What has a hundred leaves and no roots/a book
      | What grows shorter the longer it shines/a candle
      | What follows you all day and hides at night/my shadow
      | What has an iron tongue and sings from a tower/the bell
      | What knocks on the window and has no hands/the rain
      | What stands on one leg and wears a red cap/a mushroom
      | What climbs the hill and never moves/the path
      | What has four legs and cannot walk/the table
    """,
    # Characters. No two names begin with the same letter, and no sentence begins with the first
    # letter of a name, so one letter identifies the character.
    "hero/she/her": """
        Ella/she/her | Rosa/she/her | Una/she/her | Zoe/she/her
      | Finn/he/his | Gus/he/his | Pip/he/his | Victor/he/his
    """,
    "kind": "3 mouse | 2 rabbit | 2 hedgehog | fox | frog | lamb | kitten | mole | bear | duck",
    "trait": """
        4 little | 2 brave | 2 clever | curious | shy | merry | sleepy | gentle | hungry | proud
    """,
    "helper": "Badger | Crow | Dove | Jackdaw | King | Moon | Newt | Queen",
    "owner": "2 baker | 2 miller | shepherd | fiddler | tailor | gardener",
    # What.
    "thing/it/is/was/this/them": """
        button/it/is/was/this/it | drum/it/is/was/this/it | kite/it/is/was/this/it
      | lantern/it/is/was/this/it | whistle/it/is/was/this/it | gloves/they/are/were/these/them
      | marbles/they/are/were/these/them | pearls/they/are/were/these/them
      | ribbons/they/are/were/these/them | shells/they/are/were/these/them
    """,
    "colour": "red | blue | green | yellow | silver | golden | striped | purple | white",
    "trifle": "<number> <tiny> <small_thing>",
    "tiny": "tiny | white | round | bright | lost | fine | old",
    "number": "two | 2 three | five | 2 seven | nine | some",
    "small_thing": "feathers | acorns | bees | crumbs | leaves | stars | ants | pebbles | apples",
    "supper": "<flavour> <dish>",
    "flavour": "plum | honey | apple | nut | cherry | pumpkin | barley | onion",
    "dish": "soup | cake | bread | pie | jam | tea",
    "noise": "knock | splash | sneeze | soft song | creak | cough | bump | whisper",
    # Where and when.
    "place": "<beside> the <old> <bridge>",
    "beside": "3 under | 2 behind | beside | near | 2 by",
    "old": "3 old | mossy | crooked | broken | quiet | empty | tall | 2 little",
    "bridge": "2 bridge | 2 mill | well | oak | barn | gate | tower | garden wall | hay cart | inn",
    "one_day": """
        3 One <weather> <hour> | 2 On a <weather> <hour> | 2 One <hour>, when it was <weather>,
    """,
    "weather": "windy | rainy | snowy | misty | sunny | frosty | warm | cold | bright | stormy",
    "grand": "2 grand | funny | long | lovely | strange | happy",
    "gloom": "2 dark | windy | rainy | snowy | misty | frosty | cold | quiet",
    "hour": "3 morning | 2 evening | afternoon | day",
    "in_time": "2 at last | by evening | 2 before dark | by moonlight | at noon | before the rain",
    "dawn": "2 dawn | the sun rose | the stars went out | it snowed",
    # Did.
    "said": "4 said | whispered | laughed | sighed | sang | cried",
    "asked": "3 asked | whispered | called | wondered",
    "went": "3 ran | 2 walked | skipped | hurried | marched | wandered | hopped | danced",
    "waved": "2 waved | bowed | 2 smiled | went away | began to sing | fell asleep",
    "nodded": "2 nodded | bowed | laughed | smiled",
    "pastime/did": """
        counting the stars/counted the stars | mending a net/mended the net
      | learning to dance/danced | painting the gate/painted the gate
      | waiting for snow/waited for snow | singing to the fish/sang to the fish
      | sweeping the path/swept the path | knitting a sock/knitted the sock
      | drawing a map/drew the map | telling a story/told stories
    """,
    "wish/wished": """
        2 see the sea/saw the sea | hear the nightingale/heard the nightingale
      | ring the great bell/rang the great bell | climb the white hill/climbed the white hill
      | find the rainbow/found the rainbow | ask the king a question/asked the king a question
      | catch a cloud/caught a cloud | touch the snow/touched the snow
      | ride the ferry/rode the ferry
    """,
}
