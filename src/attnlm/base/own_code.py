"""The user's own code: a class or function in a Python file, named as in `mine.py:Temperature`.

A file runs only if it was named or passed in this process, or if its SHA-256 is in a list that this
user's own folder keeps: of files with which the user has trained, or which the user has accepted.
What a run's folder says never makes code run, since the folder may come from somebody else. Nor
does it choose what in an accepted file is called: that is a module which the file defines, or what
the user has named, or has trained with the same arguments.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import json
import linecache
import os
import symtable
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.suggestions import suggestion

ANY_MODULE = "*"
"""in place of a name: any torch.nn.Module that the file defines"""
_CONTENTS: dict[str, bytes] = {}
"""files that were named or passed in this process, by their SHA-256"""
_CALLS: dict[str, set[str]] = {}
"""what may be called of these files, by their SHA-256: names, or ANY_MODULE"""
_MODULES: dict[str, ModuleType] = {}
"""files that ran in this process, by their SHA-256"""
_PASSED: dict[tuple[str, str], Callable[..., Any]] = {}
"""classes and functions that were passed in Python, by SHA-256 and name"""


class OwnCode(str):
    """The name of own code, as in `mine.py:Temperature`, with the path and hash of its file."""

    path: Path
    sha256: str

    def __new__(cls, name: str, path: Path = Path(), sha256: str = "") -> OwnCode:
        self = super().__new__(cls, name)
        self.path, self.sha256 = path, sha256
        return self

    @property
    def file(self) -> str:
        """Return the name of the file, without its folder."""
        return self.rpartition(":")[0]

    @property
    def name(self) -> str:
        """Return the name of the class or function."""
        return self.rpartition(":")[2]

    def content(self) -> bytes:
        """Return the file's content. Raises AttnlmError if it is not what the run recorded."""
        if self.sha256 in _CONTENTS:
            return _CONTENTS[self.sha256]
        content = files.read_bytes(self.path)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise AttnlmError(
                f"{self.path} has changed since the run began: its SHA-256 is another",
                f"restore the file, or name the original with `code`: {self.file}",
            )
        return content

    def check_accepted(self) -> None:
        """Raise CodeNotAcceptedError unless the file may run."""
        if self.sha256 not in _CONTENTS and not _accepted_calls(self.sha256):
            raise CodeNotAcceptedError(self)

    def check_call(self, arguments: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the class or function. Raises CodeNotAcceptedError unless it may be called."""
        found = self.load()
        accepted = _accepted_calls(self.sha256)
        if (self.sha256, self.name) in _PASSED or not accepted.isdisjoint(
            (self.name, self._call(arguments))
        ):
            return found
        from torch import nn

        is_module = isinstance(found, type) and issubclass(found, nn.Module)
        home = getattr(_MODULES.get(self.sha256), "__name__", None)
        if ANY_MODULE in accepted and is_module and found.__module__ == home:
            return found
        raise CodeNotAcceptedError(self, is_call=True)

    def _call(self, arguments: Mapping[str, Any]) -> str:
        """Return the SHA-256 of the name and the arguments."""
        call = json.dumps([self.name, dict(arguments)], sort_keys=True)
        return hashlib.sha256(call.encode()).hexdigest()

    def load(self) -> Callable[..., Any]:
        """Return the class or function, after running its file once in this process."""
        if (self.sha256, self.name) in _PASSED:
            return _PASSED[self.sha256, self.name]
        content = self.content()
        self.check_accepted()
        if self.sha256 not in _MODULES:
            _MODULES[self.sha256] = _run_file(self.path, content, self.sha256)
        class_or_function = getattr(_MODULES[self.sha256], self.name, None)
        if not callable(class_or_function):
            module = vars(_MODULES[self.sha256])
            home = module["__name__"]
            names = [n for n, v in module.items() if getattr(v, "__module__", None) == home]
            raise AttnlmError(
                f"{self.file} has no class or function called {self.name}",
                suggestion(self.name, names, f"it defines {', '.join(names) or 'none'}"),
            )
        return class_or_function  # type: ignore[no-any-return]

    def remember(self, arguments: Mapping[str, Any]) -> None:
        """Add this call to the list of what this user lets run."""
        _append_to_list(self.sha256, self._call(arguments), self.file)


class CodeNotAcceptedError(AttnlmError):
    """Raised when a run needs code that this user has neither trained with nor accepted."""

    def __init__(self, code: OwnCode, is_call: bool = False) -> None:
        self.path = code.path
        self.accepts = f"{code.path}:{code.name}" if is_call else str(code.path)
        message = f"this run needs code of its own: {code.path} (sha256 {code.sha256})"
        if is_call:
            message = f"this run calls {code.name} of {code.path}, with which you have not trained"
        elif any(name == code.file for name in _NAMED):
            message = f"the file that `code` names differs from {code.path}, which this run needs"
        super().__init__(message, f"read it, then accept it: attnlm.accept_code({self.accepts!r})")


_NAMED: list[str] = []
"""names of the files that were accepted in this process"""


def accept_code(path: str | Path) -> None:
    """Let the code in a Python file run, now and later, wherever a run needs exactly this file.

        attnlm.accept_code("mine.py")

    Runs may call the modules that the file defines. With `mine.py:NAME` they may call NAME alone,
    which may also be a function. Read the file first: it can do whatever you can do. Raises
    AttnlmError if it can't be read.
    """
    file, colon, name = str(path).rpartition(":")
    if not (colon and file.endswith(".py") and name.isidentifier()):
        file, name = str(path), ANY_MODULE
    content = files.read_bytes(Path(file))
    sha256 = allow_call(content, name)
    _NAMED.append(Path(file).name)
    _append_to_list(sha256, name, Path(file).name)


def named_code(text: str) -> OwnCode:
    """Return the code that the user named, as in `mine.py:Temperature`, with a path to the file.

    Raises UsageError if the text does not name code, AttnlmError if the file can't be read.
    """
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"{text!r} does not name code", "write FILE.py:NAME, as in mine.py:MyHead")
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise AttnlmError(f"there is no file {file}", "check the path; the name follows after `:`")
    sha256 = allow_call(files.read_bytes(path), name)
    return OwnCode(f"{path.name}:{name}", path, sha256)


def is_code_name(value: object) -> bool:
    """Return True for a text that can only be meant as the name of own code."""
    return isinstance(value, str) and (value.endswith(".py") or ".py:" in value)


def allow_call(content: bytes, name: str) -> str:
    """Let a file run, and `name` of it be called, in this process; return the file's SHA-256."""
    sha256 = hashlib.sha256(content).hexdigest()
    _CONTENTS[sha256] = content
    _CALLS.setdefault(sha256, set()).add(name)
    return sha256


def _run_file(path: Path, content: bytes, sha256: str) -> ModuleType:
    """Run a file as a module of its own, without the working directory on the path."""
    lines = files.decode_utf8(content, str(path)).splitlines(keepends=True)
    module = ModuleType(f"attnlm_own_{sha256[:16]}")
    module.__file__ = str(path)
    here = {"", str(Path.cwd()), str(path.parent)}
    before = sys.path
    sys.path = [entry for entry in before if entry not in here]
    sys.modules[module.__name__] = module  # dataclasses look their module up
    _FILES.add(str(path))
    try:
        linecache.cache[str(path)] = (len(content), None, lines, str(path))
        with contextlib.redirect_stdout(sys.stderr):  # results alone go to stdout
            exec(compile(content, str(path), "exec", dont_inherit=True), vars(module))
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        if (path.parent / f"{name}.py").exists() or (path.parent / name).is_dir():
            raise AttnlmError(
                f"{path.name} imports {name}, a file next to it: a run keeps one file",
                f"move what it needs from {name} into {path.name}",
            ) from None
        raise AttnlmError(
            f"{path.name} needs the module {error.name}, which is not installed",
            "install it, then try again",
        ) from None
    finally:
        sys.path = before
    return module


# --- The list of accepted files -------------------------------------------------------------------


def _list_path() -> Path | None:
    import platformdirs

    try:
        folder = os.environ.get("ATTNLM_CONFIG_DIR") or platformdirs.user_config_dir("attnlm")
        return Path(folder).expanduser() / "accepted-code.txt"
    except RuntimeError:  # the system does not know the user's home
        return None


def _read_list() -> str:
    """Return the list. Each line has the SHA-256 of a file, what may be called, and the file.

    What may be called is ANY_MODULE, a name, or the SHA-256 of a name and its arguments. Lines of
    an older list have no such word: any module.
    """
    with contextlib.suppress(OSError):
        return "" if (path := _list_path()) is None else path.read_text("utf-8", "replace")
    return ""


def _accepted_calls(sha256: str) -> set[str]:
    """Return what may be called of a file; empty if it may not run."""
    return _listed_calls(sha256) | _CALLS.get(sha256, set())


def _listed_calls(sha256: str) -> set[str]:
    lines = (line.split() for line in _read_list().split("\n"))
    listed = [words for words in lines if words[:1] == [sha256]]
    return {words[1] if len(words) > 2 else ANY_MODULE for words in listed}


def _append_to_list(sha256: str, call: str, name: str) -> None:
    """Add a line to the list. Where it can't be written, the call is allowed in this process."""
    path = _list_path()
    if path is None or call in _listed_calls(sha256):
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        gap = "\n" if _read_list()[-1:].strip() else ""
        with path.open("a", encoding="utf-8", errors="replace") as file:
            # The name in a run's folder may hold a line break, and so a line of its own.
            file.write(f"{gap}{sha256}  {call}  {'-'.join(name.split()) or '-'}\n")


# --- The source of classes and functions that were passed in Python -------------------------------


def passed_code(thing: Callable[..., Any]) -> OwnCode:
    """Return the code of a class or function that was passed in Python.

    Its source is kept with what it needs of its module: imports, other classes and functions, and
    plain constants. Raises UsageError if this source does not stand by itself.
    """
    name = getattr(thing, "__name__", None)
    if not isinstance(thing, type | FunctionType) or name is None:
        raise UsageError(f"{thing!r} is not a class or function", "pass a class, or FILE.py:NAME")
    if (source := getattr(thing, "__module__", "")).startswith("attnlm_own_"):
        sha256 = next(s for s, module in _MODULES.items() if module.__name__ == source)
        path = Path(str(_MODULES[sha256].__file__))
        return OwnCode(f"{path.name}:{name}", path, sha256)
    try:
        sources = list(dict.fromkeys(_collect_sources(thing, set())))
        content = "\n\n".join(["from __future__ import annotations", *sources]).encode() + b"\n"
        compile(content, name, "exec")
    except (OSError, SyntaxError, LookupError) as error:
        raise UsageError(
            f"the source of {name} cannot be kept by itself: {error}",
            "write it to a file, and pass FILE.py:NAME",
        ) from None
    sha256 = allow_call(content, name)
    _PASSED[sha256, name] = thing
    return OwnCode(f"{name.lower()}.py:{name}", Path(f"{name.lower()}.py"), sha256)


def _collect_sources(thing: Any, seen: set[str]) -> Iterator[str]:
    """Yield the sources that a class or function needs, and at last its own."""
    source, scope = _find_source(thing)
    seen.add(thing.__name__)
    for name in sorted(set(_globals_in(symtable.symtable(source, thing.__name__, "exec"))) - seen):
        if name not in scope:
            continue
        value = scope[name]
        origin = getattr(value, "__module__", None)
        real = getattr(value, "__qualname__", name)
        if isinstance(value, ModuleType):
            alias = "" if value.__name__ == name else f" as {name}"
            yield f"import {value.__name__}{alias}"
        elif isinstance(value, bool | int | float | str | tuple | None):
            yield f"{name} = {value!r}"
        elif isinstance(value, type | FunctionType) and origin == thing.__module__:
            yield from _collect_sources(value, seen)
        elif origin and getattr(sys.modules.get(origin), real, None) is value:
            yield f"from {origin} import {real} as {name}"
        else:
            raise LookupError(f"it needs {name}, which is neither imported nor plain")
    yield source


def _globals_in(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that code reads from its module; arguments and local names are left out."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name()
    for inner in table.get_children():
        yield from _globals_in(inner)


def _find_source(thing: Any) -> tuple[str, dict[str, Any]]:
    """Return the source of a class or function, also of a notebook's cell, and its globals."""
    is_function = isinstance(thing, FunctionType)
    methods = [thing] if is_function else [v for v in vars(thing).values() if inspect.isfunction(v)]
    own = [m for m in methods if m.__qualname__.rpartition(".")[0] in ("", thing.__qualname__)]
    own = [thing] if is_function else own
    if not own:
        raise LookupError("it has no method of its own")
    if free := [
        name for method in own for name in method.__code__.co_freevars if name != "__class__"
    ]:
        raise LookupError(f"it needs {free[0]} of the function around it")
    text = "".join(linecache.getlines(own[0].__code__.co_filename))
    definitions = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == thing.__name__
    ]
    if not definitions:
        raise OSError("its source was not found")
    last = definitions[-1]
    first_line = min([last.lineno, *(decorator.lineno for decorator in last.decorator_list)])
    lines = text.splitlines()[first_line - 1 : last.end_lineno]
    return textwrap.dedent("\n".join(lines)), own[0].__globals__


# --- Errors in own code ---------------------------------------------------------------------------

_FILES: set[str] = set()
"""the files that ran in this process"""


def files_that_ran() -> list[str]:
    """Return the names of the files of own code that ran in this process."""
    return sorted(Path(file).name for file in _FILES)


def own_traceback(error: BaseException) -> str | None:
    """Return the traceback of an error in own code, from its first frame there on.

    Frames of attnlm are left out. Return None for an error that arose elsewhere.
    """
    if isinstance(error, SyntaxError) and error.filename in _FILES:
        return "".join(traceback.format_exception_only(error))
    frames = traceback.extract_tb(error.__traceback__)
    first = next((i for i, frame in enumerate(frames) if frame.filename in _FILES), None)
    if first is None:
        return None
    package = str(Path(__file__).parents[1])
    own_frames = [frame for frame in frames[first:] if not frame.filename.startswith(package)]
    lines = traceback.format_list(own_frames) + traceback.format_exception_only(error)
    return "Traceback (most recent call last):\n" + "".join(lines)
