"""Reading gin configurations: search path, registration of configurables, and errors a person can act on.

Gin's own messages are correct but long and late. Every statement is therefore checked here first, with its file and
line, against the registered names; only a clean configuration reaches `gin`.
"""

import dataclasses
import difflib
import importlib
import inspect
import io
import logging
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from cipo_jax.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs"

# Every module of these packages is imported, so that a new reward, protocol or objective is one file and one gin line.
PACKAGES = (
    "data",
    "distributed",
    "evaluation",
    "learning",
    "models",
    "protocols",
    "retrieval",
    "rewards",
    "rollout",
    "scoring",
    "training",
)
EXTRAS = {"fastapi": "serve", "uvicorn": "serve", "bm25s": "bm25", "gguf": "gguf", "torch": "parity"}


def import_configurables() -> dict[str, ImportError]:
    """Imports every module of `PACKAGES`.

    Returns:
      The modules that could not be imported because an optional dependency is absent, with the error. A module of
      cipo_jax itself that is missing is not optional and raises.
    """
    failed = {}
    for package_name in PACKAGES:
        package = importlib.import_module(f"cipo_jax.{package_name}")
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            try:
                importlib.import_module(info.name)
            except ImportError as error:
                if (error.name or "cipo_jax").split(".")[0] == "cipo_jax":
                    raise
                failed[info.name] = error
    return failed


def parse(files: Sequence[str], bindings: Sequence[str] = ()) -> None:
    """Parses gin files and then bindings, checks them, and locks the configuration.

    A file named in `files` or in an `include` is looked for in the working directory, beside the files given, in the
    repository root and in its `configs/`.

    Args:
      files: gin files; a later one wins.
      bindings: single bindings such as `steps = 3`; they win over the files.

    Raises:
      UserError: An unreadable file, a syntax error, an unknown configurable, parameter, macro or reference, a
        `%gin.REQUIRED` that nothing replaced, or a binding of a macro that nothing uses.
    """
    absent = import_configurables()
    gin.clear_config()
    search = ["", *(str(Path(file).parent) for file in files), str(REPOSITORY), str(CONFIGS)]
    gin.config._LOCATION_PREFIXES[:] = search
    _Check(search, absent).run(files, bindings)
    silenced = logging.root.manager.disable
    logging.disable(logging.ERROR)  # gin logs an error for every place where an include is not
    try:
        gin.parse_config_files_and_bindings(list(files), list(bindings), skip_unknown=False)
    except Exception as error:  # a kind of mistake that the check above does not know
        raise UserError(f"The gin configuration cannot be used: {' '.join(str(error).split())}") from error
    finally:
        logging.disable(silenced)


def config_text() -> str:
    """The complete parsed configuration, in gin syntax and canonical order."""
    return gin.config_str(max_line_length=120)


def operative_config() -> str:
    """The parameters of every configurable called so far, defaults included, in gin syntax."""
    return gin.operative_config_str(max_line_length=120)


def original(error: BaseException) -> BaseException:
    """The exception itself where gin replaced it by a copy with a longer message and without its attributes."""
    inner = error.__context__
    while inner is not None and issubclass(type(error), type(inner)) and "In call to configurable" in str(error):
        error, inner = inner, inner.__context__
    return error


def as_user_error(error: BaseException) -> UserError | None:
    """The user's error behind an exception that came through gin, or None when it is the program's own."""
    text = str(error)
    if isinstance(error, UserError):
        return UserError(text.split("\n  In call to configurable")[0])
    if isinstance(error, RuntimeError) and (match := re.match(r"Required bindings for `(.+?)` .*?: \[(.*?)\]", text)):
        name, missing = match[1], [part.strip(" '\"") for part in match[2].split(",")]
        lines = ", ".join(f"`{name}.{parameter} = ...`" for parameter in missing)
        return UserError(f"{name} needs {_listing(missing)}; add {lines} to your gin file.")
    if isinstance(error, TypeError) and "required" in text:
        match = re.search(r"No values supplied by Gin or caller for arguments: \[(.*?)\]", text)
        called = re.search(r"In call to configurable '(.+?)'", text)
        if match and called:
            missing = [part.strip(" '\"") for part in match[1].split(",")]
            lines = ", ".join(f"`{called[1]}.{parameter} = ...`" for parameter in missing)
            return UserError(f"{called[1]} needs {_listing(missing)}; add {lines} to your gin file.")
    return None


def differences(there: str, here: str) -> dict[str, tuple[str | None, str | None]]:
    """Bindings that two texts of `config_text` give different values: `{name: (value there, value here)}`."""
    old, new = _bindings(there), _bindings(here)
    names = [*old, *(name for name in new if name not in old)]
    return {name: (old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name)}


def _bindings(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = None
    for line in text.splitlines():
        if line.startswith((" ", "\t")) and name is not None:
            found[name] = f"{found[name]} {line.strip()}".strip()
        elif " = " in line and not line.startswith("#"):
            name, value = line.split(" = ", 1)
            found[name] = value.removesuffix("\\").strip()
    return found


def describe(pattern: str = "") -> str:
    """The registered configurables whose name holds `pattern`, each with its parameters, defaults and summary."""
    blocks = []
    for selector, entry in sorted(_registry().items()):
        if selector.startswith("gin.") or pattern.lower() not in selector.lower():
            continue
        first = (inspect.getdoc(entry.wrapped) or "").strip().split("\n\n")[0].replace("\n", " ")
        lines = [f"{_short(selector)}  ({selector.rsplit('.', 1)[0]})", *([f"    {first}"] if first else [])]
        for name, parameter in _parameters(selector).items():
            given = parameter.default
            required = given is gin.REQUIRED or given is inspect.Parameter.empty
            default = "  (required)" if required else f" = {given!r}"
            lines.append(f"    .{name}{default}")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


@dataclasses.dataclass
class _Bound:
    value: Any
    references: list[tuple[str, str]]
    where: str
    from_flag: bool  # it came with --gin_binding and no file binds the same name


class _Delegate(config_parser.ParserDelegate):
    """Stands for gin's own objects while a statement is read, and remembers what it referred to."""

    def __init__(self):
        self.references: list[tuple[str, str]] = []

    def configurable_reference(self, scoped_name, evaluate):
        self.references.append(("configurable", scoped_name))
        return ("configurable", scoped_name)

    def macro(self, scoped_name):
        self.references.append(("macro", scoped_name))
        return ("macro", scoped_name)


class _Check:
    """Walks all statements in order, includes followed, and raises on the first mistake."""

    def __init__(self, search: Sequence[str], absent: Mapping[str, ImportError]):
        self.search = search
        self.absent = absent
        self.bound: dict[tuple[str, str, str], _Bound] = {}  # (scope, complete selector, parameter)
        self.macros: dict[str, _Bound] = {}
        self.including: list[Path] = []

    def run(self, files: Sequence[str], bindings: Sequence[str]) -> None:
        for file in files:
            self.file(file, "--gin_file")
        for binding in bindings:
            self.statements(io.StringIO(binding), lambda _, text=binding: f"--gin_binding '{text}'", from_flag=True)
        self.unknown_macros()
        self.unused_macros()  # before the next: the misspelt name may be the one that should have set it
        self.unset()

    def file(self, name: str, where: str) -> None:
        candidates = [Path(name)] if Path(name).is_absolute() else [Path(prefix) / name for prefix in self.search]
        path = next((path for path in candidates if path.is_file()), None)
        if path is None:
            known = [str(file.relative_to(CONFIGS)) for file in sorted(CONFIGS.rglob("*.gin"))]
            hint = _suggestion(name.removeprefix("configs/"), known)
            raise UserError(f"{where}: there is no gin file {name!r}{hint or '; check the path.'}")
        if path.resolve() in self.including:
            raise UserError(f"{where}: {name!r} includes itself; remove that include.")
        self.including.append(path.resolve())
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path}: the gin file cannot be read ({error}); check its permissions.") from error
        self.statements(io.StringIO(text), lambda line: f"{path}:{line}", from_flag=False)
        self.including.pop()

    def statements(self, stream: io.StringIO, locate, from_flag: bool) -> None:
        delegate = _Delegate()
        for statement in self.read(stream, delegate, locate):
            where = locate(statement.location.line_num)
            if isinstance(statement, config_parser.IncludeStatement):
                self.file(statement.filename, where)
            elif isinstance(statement, config_parser.ImportStatement):
                try:
                    importlib.import_module(statement.module)
                except ImportError as error:
                    raise UserError(f"{where}: cannot import {statement.module!r} ({error}).") from error
            elif isinstance(statement, config_parser.BlockDeclaration):
                self.selector(statement.selector, where)
            elif isinstance(statement, config_parser.BindingStatement):
                bound = _Bound(statement.value, list(delegate.references), where, from_flag)
                for kind, name in bound.references:
                    if kind == "configurable":
                        self.selector(name.rsplit("/", 1)[-1], where, reference=True)
                if statement.arg_name:
                    selector = self.selector(statement.selector, where, parameter=statement.arg_name)
                    self.parameter(selector, statement.selector, statement.arg_name, where)
                    self.bound[statement.scope or "", selector, statement.arg_name] = bound
                else:
                    macro = f"{statement.scope}/{statement.selector}" if statement.scope else statement.selector
                    bound.from_flag &= macro not in self.macros
                    self.macros[macro] = bound
            delegate.references.clear()

    @staticmethod
    def read(stream: io.StringIO, delegate: _Delegate, locate) -> Iterator:
        parser = config_parser.ConfigParser(stream, delegate)
        while True:
            try:
                statement = next(parser)
            except StopIteration:
                return
            except Exception as error:
                line = getattr(error, "lineno", None) or stream.getvalue()[: stream.tell()].count("\n") or 1
                written = (stream.getvalue().splitlines() or [""])[min(line, stream.getvalue().count("\n") + 1) - 1]
                reason = str(error.args[0] if error.args else error).split("\n")[0].rstrip(".")
                if "malformed node" in reason:
                    reason = "a value is a number, a quoted text, True, None, a list, a dict, @name or %name"
                raise UserError(
                    f"{locate(line)}: `{written.strip()}` is not gin ({reason}); a binding reads `name.parameter = "
                    "value`, with text in quotes."
                ) from error
            yield statement

    def selector(self, name: str, where: str, parameter: str = "", reference: bool = False) -> str:
        """The complete selector of `name`; an unknown or ambiguous one is the user's error."""
        registry = _registry()
        matches = gin.config._REGISTRY.matching_selectors(name)
        if len(matches) == 1:
            return matches[0]
        shown = f"@{name}" if reference else name
        if matches:
            raise UserError(f"{where}: {shown!r} is ambiguous; write one of {_listing(sorted(matches))}.")
        known = sorted({form for selector in registry for form in (_short(selector), selector)})
        hint = _suggestion(name, known) or _suggestion(name.rsplit(".", 1)[-1], known)
        if not hint and parameter:
            owners = [_short(selector) for selector in registry if parameter in _parameters(selector)]
            hint = f"; {parameter!r} is a parameter of {_listing(sorted(owners)[:4])}." if owners else ""
        if not hint and self.absent:
            needs = {
                f"pip install 'cipo_jax[{EXTRAS[package]}]'"
                for error in self.absent.values()
                if (package := (error.name or "").split(".")[0]) in EXTRAS
            }
            hint = f"; if it belongs to an optional part, {_listing(sorted(needs), 'or')}." if needs else ""
        raise UserError(f"{where}: nothing configurable is called {shown!r}{hint or '; --gin_names lists the names.'}")

    @staticmethod
    def parameter(selector: str, shown: str, name: str, where: str) -> None:
        entry = _registry()[selector]
        parameters = _parameters(selector)
        open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        if (open_ended or name in parameters) and not (
            (entry.allowlist and name not in entry.allowlist) or (entry.denylist and name in entry.denylist)
        ):
            return
        names = [key for key in parameters if not (entry.denylist and key in entry.denylist)]
        hint = _suggestion(name, names) or (f"; it has {_listing(names)}." if names else "; it has none.")
        raise UserError(f"{where}: {shown} has no parameter {name!r}{hint}")

    def named(self) -> list[tuple[str, _Bound]]:
        """Everything that is bound, with the name a person writes."""
        parameters = [
            (f"{scope}/{_short(selector)}.{parameter}" if scope else f"{_short(selector)}.{parameter}", bound)
            for (scope, selector, parameter), bound in self.bound.items()
        ]
        return [*self.macros.items(), *parameters]

    def unknown_macros(self) -> None:
        for name, bound in self.named():
            for kind, macro in bound.references:
                if kind == "macro" and macro not in self.macros and not _is_constant(macro):
                    hint = _suggestion(macro, self.macros) or f"; add `{macro} = ...` to your gin file."
                    raise UserError(f"{bound.where}: {name} uses %{macro}, which nothing defines{hint}")

    def unset(self) -> None:
        for name, bound in self.named():
            if bound.value == ("macro", "gin.REQUIRED"):
                raise UserError(
                    f"{bound.where}: {name} must be set (it is %gin.REQUIRED); add `{name} = ...` to your gin file or "
                    f"pass --gin_binding='{name} = ...'."
                )

    def unused_macros(self) -> None:
        # A part may define a name that this experiment does not use, so a file's macro is only taken for a misspelling
        # when it nearly equals one in use. A name that a person passed as a flag must have an effect.
        used = {
            macro
            for bound in [*self.macros.values(), *self.bound.values()]
            for kind, macro in bound.references
            if kind == "macro"
        }
        for name, bound in self.macros.items():
            if name in used:
                continue
            hint = _suggestion(name, used - {name}, cutoff=0.6 if bound.from_flag else 0.85)
            if hint or bound.from_flag:
                hint = hint or "; bind a parameter as `name.parameter = value` (--gin_names lists them)."
                raise UserError(f"{bound.where}: nothing in the configuration uses {name!r}{hint}")


def _registry() -> dict[str, Any]:
    return dict(gin.config._REGISTRY.items())


def _short(selector: str) -> str:
    return gin.config._REGISTRY.minimal_selector(selector)


def _is_constant(name: str) -> bool:
    return bool(gin.config._CONSTANTS.matching_selectors(name))


def _parameters(selector: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(_registry()[selector].wrapped).parameters
    except (TypeError, ValueError):
        return {}


def _suggestion(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def _listing(names: Sequence[str], last: str = "and") -> str:
    names = [str(name) for name in names]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}"
