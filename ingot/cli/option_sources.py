"""Options of a command that its command line leaves out: from variables of the environment, and from a YAML file."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path

from cyclopts import App, Argument, ArgumentCollection, Token

from ingot.ir.errors import OptionError

_CONFIG = "config"


class OptionSources:
    """Adds values to the arguments of a cyclopts command: variables first, then the file that `--config` names.

    prefix   of the variables: with "INGOT_SERVE_", INGOT_SERVE_MAX_QUEUE is --max-queue. Several values of an option
             are separated by commas. An empty variable has no effect.
    others   options that have no variable of this form, each with the hint for a reader that sets one

    A key of the file is the name of an option, or "model" and so on for an argument, with "-" or "_" between words. A
    value is a text, a number, a boolean, or a list of these. Raises OptionError for an unknown name or a bad file.
    """

    def __init__(self, prefix: str, others: Mapping[str, str]) -> None:
        self._prefix, self._others = prefix, others

    def __call__(self, _app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        by_name = {one.name.lstrip("-").lower(): one for one in arguments}
        given = {name for name, one in by_name.items() if one.tokens}  # on the command line
        variables = {*by_name} - self._others.keys()
        for name, text, source in self._of_environment(variables):
            if name not in given:
                given.add(name)
                _add(by_name[name], text.split(",") if _takes_several(by_name[name]) else [text], source)
        if by_name[_CONFIG].tokens:
            path = Path(by_name[_CONFIG].tokens[-1].value)
            for name, values, source in _of_file(path, by_name.keys()):
                if name not in given:
                    _add(by_name[name], values, source)

    def _of_environment(self, names: Collection[str]) -> Iterator[tuple[str, str, str]]:
        """Yield for each variable with the prefix: the name of its option, its value, and its own name."""
        for variable in sorted(os.environ):
            if not variable.startswith(self._prefix):
                continue
            name = variable.removeprefix(self._prefix).lower().replace("_", "-")
            if name not in names:
                raise OptionError(
                    f"the variable {variable} names no option",
                    expected=_close(name, names, lambda one: self._prefix + one.upper().replace("-", "_")),
                    hint=self._others.get(name, "unset it; a Kubernetes service may have set it, by its own name"),
                )
            if os.environ[variable]:
                yield name, os.environ[variable], variable


def _of_file(path: Path, names: Collection[str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield for each key of a YAML file: the name of its option, its values, and the file for messages."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise OptionError(f"--config {path} cannot be read: {error}", expected="a YAML file") from None
    if not isinstance(content, dict):
        raise OptionError(f"{path} is no mapping", expected="names of options and their values, as in `port: 8000`")
    seen: set[str] = set()
    for key, value in content.items():
        name = str(key).lower().replace("_", "-")
        if name in seen:
            raise OptionError(f"{name} is there twice, with '-' and with '_'", where=str(path), expected="one of them")
        seen.add(name)
        if name not in names or name == _CONFIG:
            raise OptionError(f"{str(key)[:80]!r} is no option", where=str(path), expected=_close(name, names, str))
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(one, str | int | float) for one in values):
            kind = "an empty list" if value == [] else f"a {type(value).__name__}"
            legal = "a text, a number, true or false, or a list of these"
            raise OptionError(f"{key} is {kind}", where=str(path), expected=legal)
        yield name, [str(one).lower() if isinstance(one, bool) else str(one) for one in values], str(path)


def _takes_several(argument: Argument) -> bool:
    return bool(argument.token_count()[1])


def _add(argument: Argument, values: list[str], source: str) -> None:
    """Add values to an argument. cyclopts converts them, and names `source` in its errors. Raises OptionError for
    several values of an option that takes one."""
    if len(values) > 1 and not _takes_several(argument):
        raise OptionError(f"{argument.name.lstrip('-')} is a list", where=source, expected="one value")
    for index, value in enumerate(values):
        argument.append(Token(keyword=argument.name, value=value.strip(), source=source, index=index))


def _close(name: str, names: Collection[str], spelled: Callable[[str], str]) -> str:
    """Return the names that resemble a wrong one, as `spelled` writes them for the reader."""
    close = get_close_matches(name, [one for one in names if one != _CONFIG], 3, 0.7)
    return ", ".join(map(spelled, close)) if close else "an option of `--help`"
