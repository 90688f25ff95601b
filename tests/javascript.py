"""The names that a JavaScript module imports, exports, declares and uses.

This reads the part of the language that our modules use. A name that is declared anywhere in a
module counts as declared in all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_KEYWORDS = set(
    re.findall(
        r"\w+",
        """
    async await break case catch class const continue do else export extends false finally for
    from function get if import in instanceof let new null of return static super switch this
    throw true try typeof undefined while yield
        """,
    )
)
_COMMENT = r"(?ms)^ */\*.*?\*/$|^ *//.*?$| // [^\n]*$"
_TEMPLATE = r"`(?:[^`\\$]|\\.|\$(?!\{)|\$\{(?:[^`{}]|\{[^`{}]*\})*\})*`"
_VALUE = r"\$\{((?:[^`{}]|\{[^`{}]*\})*)\}"  # in a template
_REGEX = r"(?<=[(\[,=:?!&|]) ?/(?! )(?:[^/\\\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*"
_STRING = r'"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'"
_TOKEN = r"[A-Za-z_$][\w$]*|\d[\w.]*|=>|\?\.|\?\?=?|\.\.\.|[=!]==?|[<>]=|\S"
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_TEXT = " 0 "  # stands for a string or a regular expression


@dataclass(frozen=True)
class Module:
    """The names of a module; `imports` has the module of each imported name."""

    imports: dict[str, str]
    exports: set[str]
    declared: set[str]
    """names of variables, functions, classes, parameters and imports"""
    used: set[str]
    """names in an expression, but no properties, keys and methods"""
    most_declared: int
    """the largest number of variables that one statement declares, where a pattern is one"""


def read(source: str) -> Module:
    """Return the names of a module."""
    source = re.sub(_COMMENT, "", source)
    imported = re.findall(r'(?m)^import \{([^}]*)\} from "\./([\w.]+)";$', source)
    imports = {name: file for names, file in imported for name in re.findall(r"\w+", names)}
    exports = re.findall(r"(?m)^export (?:async )?(?:class|const|function\*?) (\w+)", source)
    body = re.sub(r'(?m)^import \{[^}]*\} from "[^"]*";$', "", source)
    tokens = re.findall(_TOKEN, _without_texts(body))
    declaring = set(_declarations(tokens))
    names = [i for i, token in enumerate(tokens) if re.match(r"[A-Za-z_$]", token)]
    used = {tokens[i] for i in names if i not in declaring and _is_variable(tokens, i)}
    declared = {tokens[i] for i in declaring}
    return Module(imports, set(exports), declared | imports.keys(), used, _most_declared(tokens))


def _without_texts(source: str) -> str:
    """Replace strings and regular expressions, and templates by the values in them."""
    source = re.sub(f"{_STRING}|{_REGEX}", _TEXT, source)
    while "`" in source:
        shorter = re.sub(
            _TEMPLATE,
            lambda found: f"({' , '.join(re.findall(_VALUE, found[0])) or '0'})",
            source,
            flags=re.DOTALL,
        )
        assert shorter != source, "a template that this does not read"
        source = shorter
    return source


def _end(tokens: Sequence[str], start: int) -> int:
    """Return the index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(tokens)):
        depth += (tokens[i] in _CLOSING) - (tokens[i] in _CLOSING.values())
        if depth == 0:
            return i
    raise AssertionError("a bracket is not closed")


def _declarations(tokens: Sequence[str]) -> Iterator[int]:
    """Yield the indices of names where they are declared."""
    for i, token in enumerate(tokens):
        following = tokens[i + 1] if i + 1 < len(tokens) else ""
        if token in ("const", "let"):
            for start in _declarators(tokens, i):
                yield from _pattern(tokens, start, _pattern_end(tokens, start))
        elif token in ("class", "function") and re.match(r"\w", following):
            yield i + 1
        elif following == "=>" and token != ")":
            yield i
        elif token == "(":
            after = tokens[_end(tokens, i) + 1 : _end(tokens, i) + 2]
            is_method = after == ["{"] and tokens[i - 1] not in ("if", "for", "while", "switch")
            if after == ["=>"] or is_method:
                yield from _pattern(tokens, i + 1, _end(tokens, i))


def _pattern_end(tokens: Sequence[str], start: int) -> int:
    """Return the index after a name or pattern that `const` or `let` declares."""
    return _end(tokens, start) + 1 if tokens[start] in _CLOSING else start + 1


def _pattern(tokens: Sequence[str], start: int, end: int) -> Iterator[int]:
    """Yield the indices of the names that a pattern or a list of parameters declares."""
    i = start
    while i < end:
        token = tokens[i]
        if token == "=":  # a default value
            depth = 0
            while i < end and not (depth == 0 and tokens[i] in (",", "}", "]", ")")):
                depth += (tokens[i] in _CLOSING) - (tokens[i] in _CLOSING.values())
                i += 1
            continue
        is_key = tokens[i + 1] == ":" and tokens[i - 1] in ("{", ",")
        if re.match(r"[A-Za-z_$]", token) and not is_key:
            yield i
        i += 1


def _is_variable(tokens: Sequence[str], i: int) -> bool:
    """Return True unless a name is a keyword, a property, a key, a field or a method."""
    before = tokens[i - 1] if i else ""
    after = tokens[i + 1] if i + 1 < len(tokens) else ""
    if tokens[i] in _KEYWORDS or before in (".", "?."):
        return False
    if after == ":" and before in ("{", ","):
        return False
    if after == "=" and before in ("{", "}", ";") and _is_in_class(tokens, i):
        return False
    if after != "(":
        return True
    body = _end(tokens, i + 1) + 1
    return tokens[body : body + 1] != ["{"]


def _is_in_class(tokens: Sequence[str], i: int) -> bool:
    """Return True if the innermost bracket around a token is the body of a class."""
    depth = 0
    for at in range(i - 1, -1, -1):
        depth += (tokens[at] in _CLOSING.values()) - (tokens[at] in _CLOSING)
        if depth < 0:
            return tokens[at] == "{" and "class" in (tokens[at - 2], tokens[max(0, at - 4)])
    return False


def _most_declared(tokens: Sequence[str]) -> int:
    """Return the most variables that a `const` or `let` declares, outside of the head of a loop."""
    return max(
        len(_declarators(tokens, i)) if token in ("const", "let") and tokens[i - 1] != "(" else 0
        for i, token in enumerate(tokens)
    )


def _declarators(tokens: Sequence[str], i: int) -> list[int]:
    """Return where each name or pattern begins that the `const` or `let` at `i` declares."""
    starts, depth = [i + 1], 0
    for at in range(i + 1, len(tokens)):
        depth += (tokens[at] in _CLOSING) - (tokens[at] in _CLOSING.values())
        if depth < 0 or (depth == 0 and tokens[at] in (";", "of")):
            break
        if depth == 0 and tokens[at] == ",":
            starts.append(at + 1)
    return starts
