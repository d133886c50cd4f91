"""The process that renders chat templates: one JSON request per line on stdin, one JSON answer per line on stdout.

A template is a program from a checkpoint. It runs in Jinja's sandbox. The sandbox bounds neither time nor memory, so it
runs in a separate process with limits, which the parent kills if it takes too long. The process ends when the parent
closes its pipe, and imports little, so that it starts quickly.

A request is {"template": text, "contexts": [variables, ...], "seconds": cap on CPU time, "characters": cap on a text}.
The answer is {"texts": [...]}, or {"error": kind, "message": text} with one of these kinds:
  syntax   the template is invalid   refused   the template called raise_exception
  failed   rendering raised          size      a text exceeded the cap               memory   past the memory cap
"""

import datetime
import functools
import json
import math
import os
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Address space. Measured: an idle worker takes 25 MB, two renderings of four million characters 210 MB.
MEMORY_BYTES = 512 << 20
# An error message may quote the template's input, so it is cut to this length.
MESSAGE_CHARACTERS = 500


class Refused(jinja2.TemplateError):
    """Raised if a template calls `raise_exception`. Templates call it to refuse a conversation."""


class TooLong(Exception):
    """Raised if a rendered text has more characters than the request allows."""


class Generation(Extension):
    """The template tag {% generation %}, which marks the assistant's text for training. The text stays unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block, not the bare body, so that variables set inside are local, as in transformers.
        return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


class DictMaker:
    """Replaces Python's `dict` in templates. `dict(...)` and `dict.fromkeys(...)` work; other attributes of `dict` are
    hidden."""

    def __call__(self, *arguments: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*arguments, **fields)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace object, restricted: it refuses names that begin with an underscore. Such names have special
    meanings in Python."""

    def __init__(*arguments: Any, **fields: Any) -> None:  # `self` may be one of the fields
        self, *rest = arguments
        fields = dict(*rest, **fields)
        for name in fields:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {str(name)!r}")


def environment(now: datetime.datetime) -> ImmutableSandboxedEnvironment:
    """Return a sandboxed Jinja environment for chat templates. Its tags, filters, functions and handling of white space
    are those of transformers. `now` is the current time, for templates that print the date."""

    def raise_exception(message: object) -> None:
        raise Refused(str(message))

    def strftime_now(form: str) -> str:
        return now.strftime(form)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson  # Jinja's own escapes for HTML
    made.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": DictMaker(),
        "namespace": Namespace,
    }
    return made


def render(template: jinja2.Template, context: Mapping[str, Any], characters: int) -> str:
    """Return the text that the template makes from the variables in `context`. Raises TooLong at more than `characters`
    characters, so that an endless template stops."""
    pieces: list[str] = []
    left = characters
    for piece in template.generate(context):
        left -= len(piece)
        if left < 0:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


# Compiling takes longer than rendering, so the code of the last templates is cached; a checkpoint has one to three.
@functools.lru_cache(maxsize=8)
def code_of(source: str) -> Any:
    return environment(datetime.datetime.now()).compile(source)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        code = code_of(request["template"])
    except jinja2.TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"line {error.lineno}: {error.message}"}
    try:
        made = environment(datetime.datetime.now())  # one time for all contexts
        template = made.template_class.from_code(made, code, made.make_globals(None))
        return {"texts": [render(template, context, request["characters"]) for context in request["contexts"]]}
    except TooLong:
        return {"error": "size", "message": ""}
    except Refused as error:
        return {"error": "refused", "message": str(error.message)[:MESSAGE_CHARACTERS]}


def answers(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return answer(request)
    except MemoryError:
        return {"error": "memory", "message": ""}
    except Exception as error:  # a template may raise any Python exception
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]}


def limit_cpu(seconds: float) -> None:
    """Let the operating system kill this process after about `seconds` more of CPU time. This stops an endless loop if
    the parent process is gone and cannot kill it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    # Whole seconds, plus one, so that the parent's timeout comes first.
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def write(stream: BinaryIO, reply: Mapping[str, Any]) -> None:
    # Pass lone surrogates through in both directions; the code that encodes the text refuses them.
    stream.write(json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    stream.flush()


def main() -> None:
    # Output that a template causes must not mix with the answers.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    size = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no conversation on disk
    write(replies, {"ready": True})
    for line in sys.stdin.buffer:
        request = json.loads(line.decode("utf-8", "surrogatepass"))
        limit_cpu(request["seconds"])
        reply = answers(request)
        write(replies, reply)
        if reply.get("error") == "memory":
            return  # this process may be out of memory


if __name__ == "__main__":
    main()
