"""Find the config.json fields that a model family's reader knows, from the reader's code.

The reader is the function that turns a config.json into a spec. It reads some fields only in some branches, such as a
window's size if windows are enabled. It knows all fields whose names are strings in its code, in any branch.
"""

import dis
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ingot.models import blocks
from ingot.models.config import ConfigReader

_NAME = re.compile(r"[A-Za-z_]\w*")
_ROOM = "ingot.models"


@cache
def known_fields(read: Callable[..., Any]) -> frozenset[str]:
    """Return the config.json fields that the function `read` may read: all strings in its code.

    Functions of ingot.models that it calls are searched too. Some strings are not fields, such as names of activations.
    No config.json has fields with these names.
    """
    found: set[str] = set()
    seen: set[FunctionType] = set()
    waiting = list(_functions(read, found))
    while waiting:
        function = waiting.pop()
        if function not in seen:
            seen.add(function)
            strings, called = _walk(function)
            found |= strings
            waiting += called
    return frozenset(found)


@cache
def spec_words() -> frozenset[str]:
    """Return the field names of all block specs, such as "head_dim".

    Code that reads configs may contain such a name as a keyword argument, not as a config field.
    """
    modules = [
        importlib.import_module(f"{blocks.__name__}.{one.name}") for one in pkgutil.iter_modules(blocks.__path__)
    ]
    specs = [one for module in modules for one in vars(module).values() if isinstance(one, type) and is_dataclass(one)]
    return frozenset(field.name for spec in specs for field in fields(spec))


def _functions(value: object, found: set[str]) -> Iterator[FunctionType]:
    """Yield the plain function that a call of `value` runs. Yield nothing if `value` is no function or method.

    For a `functools.partial`, also add the strings in its arguments to `found`.
    """
    if isinstance(value, partial):
        found.update(_strings([*value.args, *value.keywords.values()]))
        yield from _functions(value.func, found)
    elif isinstance(value, MethodType):
        yield from _functions(value.__func__, found)
    elif isinstance(value, FunctionType):
        yield value


@cache  # families share most of their functions
def _walk(function: FunctionType) -> tuple[frozenset[str], tuple[FunctionType, ...]]:
    """Return the strings in a function's code and argument defaults, and the functions of ingot.models it may call."""
    found = set(_strings([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]))
    called: list[FunctionType] = []
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        found.update(_strings([*_loaded(code)]))
        named = [function.__globals__.get(name) for name in code.co_names]
        rooms = [one for one in named if isinstance(one, ModuleType) and one.__name__.startswith(_ROOM)]
        values += [*named, *(getattr(room, name, None) for room in rooms for name in code.co_names)]
        for name in code.co_names:
            called += _functions(vars(ConfigReader).get(name), found)
    for value in values:
        found.update(_strings(value))
        for one in _functions(value, found):
            if one.__module__.startswith(_ROOM) or one.__module__ == function.__module__:
                called.append(one)
    return frozenset(found), tuple(called)


def _loaded(code: CodeType) -> Iterator[object]:
    """Yield the constants that compiled code loads, except docstrings and names of keyword arguments."""
    instructions = list(dis.get_instructions(code))
    for place, one in enumerate(instructions):
        if one.opname.startswith(("LOAD_CONST", "RETURN_CONST")):
            follows = instructions[place + 1].opname if place + 1 < len(instructions) else ""
            # From Python 3.13 on, the names of keyword arguments are loaded just before a call.
            if follows != "CALL_KW":
                yield one.argval


def _strings(value: object) -> Iterator[str]:
    """Yield the strings in a value that could be field names. Search mappings, lists, tuples and sets recursively."""
    if isinstance(value, str):
        if _NAME.fullmatch(value):
            yield value
    elif isinstance(value, Mapping):
        yield from _strings([*value.keys(), *value.values()])
    elif isinstance(value, tuple | list | set | frozenset):
        for item in value:
            yield from _strings(item)
