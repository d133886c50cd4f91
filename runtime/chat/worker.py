"""The process that renders chat templates: one JSON request a line on stdin, one JSON answer a line on stdout.

A template is a program from a checkpoint. It runs in Jinja's sandbox, and because a sandbox bounds neither time nor
memory, in a process of its own with limits, which the parent kills when it takes too long. It ends when the parent
closes its pipe, and imports little, so that it starts quickly.

A request is {"template": text, "contexts": [variables, ...], "seconds": cap on CPU time, "characters": cap on a text};
the answer {"texts": [...]}, or {"error": kind, "message": text} of these kinds:
  syntax   it is no template               refused   the template called raise_exception
  failed   rendering raised something      size      a text grew past the cap          memory   past the memory cap
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
# An error message quotes what the template was given.
MESSAGE_CHARACTERS = 500


class Refused(jinja2.TemplateError):
    """The template's own objection to a conversation."""


class TooLong(Exception):
    """A text grew past the cap."""


class Generation(Extension):
    """{% generation %}: marks what the assistant says, for training. In rendering it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class has it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call block and not the bare body: what is set inside stays inside, as where training reads the marks.
        return nodes.CallBlock(self.call_method("_unchanged"), [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


class DictMaker:
    """`dict(...)` and `dict.fromkeys(...)`, without the class and what hangs on it."""

    def __call__(self, *arguments: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*arguments, **fields)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without names that begin with an underscore: Python gives those meanings of its own."""

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
    """What transformers gives its chat templates: whitespace rules, tags, filters and functions. `now` is the time."""

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
    """The text, piece by piece, so that a template without end stops at the cap. Raises TooLong."""
    pieces: list[str] = []
    left = characters
    for piece in template.generate(context):
        left -= len(piece)
        if left < 0:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


# Compiling takes longer than rendering, so the last templates are kept as code; a checkpoint has one to three.
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
    except Exception as error:  # a template may raise whatever Python can
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"[:MESSAGE_CHARACTERS]}


def limit_cpu(seconds: float) -> None:
    """Bound the CPU time from here on: were the parent gone, nobody else would stop an endless loop."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    # Whole seconds only, and one more, so that the parent's clock strikes first.
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def write(stream: BinaryIO, reply: Mapping[str, Any]) -> None:
    # Lone surrogates are passed through in both directions; whoever encodes the text refuses them.
    stream.write(json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    stream.flush()


def main() -> None:
    # Nothing that a template brings about may write into the answers.
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
            return  # what is left of this process may be short of anything


if __name__ == "__main__":
    main()
