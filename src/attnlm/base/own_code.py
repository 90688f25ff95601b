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
import os
import symtable
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from attnlm.base import files
from attnlm.base.errors import AttnlmError, UsageError
from attnlm.base.heads import head_code, head_names, is_head
from attnlm.base.suggestions import suggestion

ANY_MODULE = "*"
"""in place of a name: any torch.nn.Module that the file defines"""


@dataclass(eq=False)
class _Source:
    """A file that was named, passed, received or run in this process."""

    content: bytes
    calls: set[str] = field(default_factory=set)
    """what may be called of it in this process: names, or ANY_MODULE"""
    module: ModuleType | None = None
    """None until it runs"""


_SOURCES: dict[str, _Source] = {}
"""by their SHA-256"""


class OwnCode(str):
    """The name of own code, as in `mine.py:Temperature`, with the path and hash of its file."""

    path: Path
    sha256: str
    passed: Callable[..., Any] | None = None
    """the class or function that was passed in Python; runs that are opened do without"""

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
        if self.sha256 in _SOURCES:
            return _SOURCES[self.sha256].content
        content = files.read_bytes(self.path)
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise AttnlmError(
                f"{self.path} has changed since the run began: its SHA-256 is another",
                f"restore the file, or name the original with `code`: {self.file}",
            )
        return content

    def load(self) -> Callable[..., Any]:
        """Return the class or function, after running its file once in this process.

        Raises CodeNotAcceptedError unless the file may run.
        """
        if self.passed is not None:
            return self.passed
        content = self.content()
        if not _accepted_calls(self.sha256):
            raise CodeNotAcceptedError(self)
        source = _SOURCES.setdefault(self.sha256, _Source(content))
        if source.module is None:
            source.module = _run_file(self.path, content, self.sha256)
        class_or_function = getattr(source.module, self.name, None)
        if not callable(class_or_function):
            home = source.module.__name__
            known = vars(source.module).items()
            names = [n for n, v in known if getattr(v, "__module__", None) == home]
            raise AttnlmError(
                f"{self.file} has no class or function called {self.name}",
                suggestion(self.name, names, f"it defines {', '.join(names) or 'none'}"),
            )
        return class_or_function  # type: ignore[no-any-return]

    def check_call(self, arguments: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the class or function. Raises CodeNotAcceptedError unless it may be called."""
        found = self.load()
        accepted = _accepted_calls(self.sha256)
        if self.passed or not accepted.isdisjoint((self.name, self._call(arguments))):
            return found
        from torch import nn

        is_module = isinstance(found, type) and issubclass(found, nn.Module)
        if ANY_MODULE in accepted and is_module and found.__module__ == _home_of(self.sha256):
            return found
        raise CodeNotAcceptedError(self, is_call=True)

    def _call(self, arguments: Mapping[str, Any]) -> str:
        """Return the SHA-256 of the name and the arguments."""
        call = json.dumps([self.name, dict(arguments)], sort_keys=True)
        return hashlib.sha256(call.encode()).hexdigest()

    def remember(self, arguments: Mapping[str, Any]) -> None:
        """Add this call to the list of what this user lets run."""
        _append_to_list(self.sha256, self._call(arguments), self.file)


class OwnCodeError(AttnlmError):
    """Raised when own code computes or returns what no run can use."""


class CodeNotAcceptedError(AttnlmError):
    """Raised when a run needs code that this user has neither trained with nor accepted."""

    def __init__(self, code: OwnCode, is_call: bool = False) -> None:
        self.accepts = f"{code.path}:{code.name}" if is_call else str(code.path)
        message = f"this run needs code of its own: {code.path} (sha256 {code.sha256})"
        if is_call:
            message = f"this run calls {code.name} of {code.path}, with which you have not trained"
        super().__init__(message, f"read it, then accept it: attnlm.accept_code({self.accepts!r})")


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
    _append_to_list(allow_call(content, name), name, Path(file).name)


def named_code(text: str) -> OwnCode:
    """Return the code that the user named, as in `mine.py:Temperature`, with a path to the file.

    A head of the library has a name of its own, such as `alibi`. The name of a class may be left
    out if the file has a single one. Raises UsageError if the text does not
    name code, AttnlmError if the file can't be read.
    """
    text = head_code(text) or text
    file, _, name = text.rpartition(":")
    if text.endswith(".py") and (path := Path(text).expanduser()).is_file():
        with contextlib.suppress(SyntaxError):
            parsed = ast.parse(files.read_bytes(path))
            classes = [node.name for node in parsed.body if isinstance(node, ast.ClassDef)]
            file, name = text, classes[0] if len(classes) == 1 else ""
    if not file.endswith(".py") or not name.isidentifier():
        hint = suggestion(text, head_names(), "write FILE.py:NAME, as in mine.py:MyHead")
        raise UsageError(f"{text!r} does not name code", hint)
    path = Path(file).expanduser().absolute()
    if not path.is_file():
        raise AttnlmError(f"there is no file {file}", "check the path; the name follows after `:`")
    sha256 = allow_call(files.read_bytes(path), name)
    return OwnCode(f"{path.name}:{name}", path, sha256)


def is_code_name(value: object) -> bool:
    """Return True for a text that can only be meant as the name of own code."""
    if not isinstance(value, str):
        return False
    return value.endswith(".py") or ".py:" in value or head_code(value) is not None


def allow_call(content: bytes, name: str) -> str:
    """Let a file run, and `name` of it be called, in this process; return the file's SHA-256."""
    sha256 = hashlib.sha256(content).hexdigest()
    _SOURCES.setdefault(sha256, _Source(content)).calls.add(name)
    return sha256


def _home_of(sha256: str) -> str:
    """Return the name of the module as which a file runs."""
    return f"attnlm_own_{sha256}"


def _run_file(path: Path, content: bytes, sha256: str) -> ModuleType:
    """Run a file as a module of its own, without its neighbours and the working directory."""
    module = ModuleType(_home_of(sha256))
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    _FILES.add(str(path))
    _RUNNING.append(path.name)
    before = sys.path
    sys.path = [entry for entry in before if entry not in ("", str(Path.cwd()), str(path.parent))]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            exec(compile(content, str(path), "exec", dont_inherit=True), vars(module))
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) and "relative import" not in str(error):
            raise
        raise AttnlmError(
            f"{path.name} imports {error.name or 'a file of its package'}, which is not installed: "
            "a run keeps one file",
            f"install it, or move what it needs of it into {path.name}",
        ) from None
    finally:
        sys.path = before
        _RUNNING.pop()
    return module


def check_not_running() -> None:
    """Raise UsageError if a file of own code runs now, which must define and not train."""
    if _RUNNING:
        raise UsageError(
            f"{_RUNNING[-1]} trains a model while it is loaded",
            "put the training under: if __name__ == '__main__'",
        )


_RUNNING: list[str] = []
"""the files that run now"""


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

    What may be called is ANY_MODULE, a name, or the SHA-256 of a name and its arguments. Two blanks
    separate the words.
    """
    with contextlib.suppress(OSError):
        return "" if (path := _list_path()) is None else path.read_text("utf-8", "replace")
    return ""


def _accepted_calls(sha256: str) -> set[str]:
    """Return what may be called of a file; empty if it may not run."""
    lines = (line.strip().split("  ") for line in _read_list().split("\n"))
    listed = {words[1] for words in lines if words[0] == sha256 and len(words) == 3}
    listed |= {ANY_MODULE} if is_head(sha256) else set()
    return listed | (_SOURCES[sha256].calls if sha256 in _SOURCES else set())


def _append_to_list(sha256: str, call: str, name: str) -> None:
    """Add a line to the list. Where it can't be written, the call is allowed in this process."""
    path, content = _list_path(), _read_list()
    if path is None or f"{sha256}  {call}  " in content:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        gap = "\n" if content[-1:].strip() else ""
        with path.open("a", encoding="utf-8", errors="replace") as file:
            # The name in a run's folder may hold a line break, and so a line of its own.
            file.write(f"{gap}{sha256}  {call}  {'-'.join(name.split()) or '-'}\n")


# --- The source of classes and functions that were passed in Python -------------------------------


def passed_code(thing: Callable[..., Any]) -> OwnCode:
    """Return the code of a class or function that was passed in Python.

    Its source is kept with the statements of its file, or of the notebook's cells so far, that it
    needs: imports, definitions, and assignments that don't use attnlm. Raises UsageError unless
    they run by themselves.
    """
    name = getattr(thing, "__name__", None)
    if not isinstance(thing, type | FunctionType) or name is None:
        raise UsageError(f"{thing!r} is not a class or function", "pass a class, or FILE.py:NAME")
    if (home := getattr(thing, "__module__", None) or "").startswith("attnlm_own_"):
        path = Path(str(sys.modules[home].__file__))
        return OwnCode(f"{path.name}:{name}", path, home.removeprefix("attnlm_own_"))
    module = sys.modules.get(home, ModuleType(""))
    try:
        if vars(module).get(name) is not thing:
            raise LookupError(f"at the top of its file or notebook, {name} is nothing or another")
        source, needed = _source_for(name, module)
        path = Path(vars(module).get("__file__") or "").absolute().with_name(f"{name.lower()}.py")
        code = OwnCode(f"{path.name}:{name}", path, allow_call(source.encode(), name))
        code.load()
        unknown = vars(module).keys() - vars(sys.modules[_home_of(code.sha256)]).keys()
        if missing := sorted(needed & unknown):
            raise LookupError(f"{_NOTHING} {missing[0]}")
    except AttnlmError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - own code may raise anything
        reason = repr(error) if isinstance(error, SystemExit) else error
        raise UsageError(
            f"the source of {name} cannot be kept by itself: {reason}",
            "write it to a file, and pass FILE.py:NAME",
        ) from None
    code.passed = thing
    return code


class _Statement(NamedTuple):
    """A statement of a module, and the module's names that it sets and reads."""

    node: ast.stmt
    text: str
    sets: set[str]
    reads: set[str]
    """also what its functions read when they are called"""


_NOTHING = "no import by name, definition or assignment without attnlm sets"
_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def _source_for(name: str, module: ModuleType) -> tuple[str, set[str]]:
    """Return the statements of a module that set a name or what it needs, and all these names."""
    statements = [*_statements(module)]
    homes = {
        n: str(getattr(v, "__name__" if isinstance(v, ModuleType) else "__module__", ""))
        for n in set[str]().union(*(s.reads for s in statements))
        if (v := vars(module).get(n)) is not None
    }
    foreign = {n for n, home in homes.items() if home.partition(".")[0] in ("attnlm", "IPython")}
    possible = [
        s for s in statements if isinstance(s.node, _DEFINITIONS) or s.reads.isdisjoint(foreign)
    ]
    needed: set[str] = set()
    found = {name}
    while found != needed:
        needed = found
        found = needed.union(*(s.reads for s in possible if not needed.isdisjoint(s.sets)))
    kept: list[str] = []
    lacking = set(needed)
    for s in reversed(possible):
        if not lacking.isdisjoint(s.sets):
            kept.insert(0, s.text)
            if isinstance(s.node, (*_DEFINITIONS, ast.Assign)):  # an earlier value is lost
                lacking -= s.sets
            lacking |= s.reads
    if not kept:
        raise LookupError(f"{_NOTHING} {name}")
    future = [s.text for s in possible if getattr(s.node, "module", "") == "__future__"]
    first = dict.fromkeys(future)
    return "\n\n".join([*first, *(text for text in kept if text not in first)]) + "\n", needed


def _statements(module: ModuleType) -> Iterator[_Statement]:
    """Yield the statements of a file, or of the cells of a notebook so far, oldest first."""
    is_notebook = "get_ipython" in vars(module)
    for text in vars(module)["In"] if is_notebook else [inspect.getsource(module)]:
        with contextlib.suppress(SyntaxError):  # in a cell that could not run
            for node in ast.parse(text).body:
                decorators = getattr(node, "decorator_list", [])
                node.lineno = min(part.lineno for part in (node, *decorators))
                source = ast.get_source_segment(text, node) or ""
                table = symtable.symtable(source, "", "exec")
                symbols = table.get_symbols()
                sets = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
                yield _Statement(node, source, sets, _names_read(table))


def _names_read(table: symtable.SymbolTable) -> set[str]:
    """Return the names of the module that some code reads, and its functions when called."""
    is_module = table.get_type() == "module"
    symbols = [s for s in table.get_symbols() if s.is_referenced()]
    names = {s.get_name() for s in symbols if is_module or s.is_global()}
    return names.union(*map(_names_read, table.get_children()))


# --- Errors in own code ---------------------------------------------------------------------------

_FILES: set[str] = set()
"""the files that ran in this process"""


def files_that_ran() -> list[str]:
    """Return the names of the files of own code that ran in this process."""
    return sorted({Path(file).name for file in _FILES})


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
