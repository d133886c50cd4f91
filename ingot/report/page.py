"""Build the HTML page of `ingot report` from its template, styles, scripts and data. The page makes no network
requests."""

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from ingot.cli.console import size_text
from ingot.report.data import Report
from ingot.report.lines import program_lines
from ingot.report.payload import compressed, report_value
from ingot.web import shared_files

STYLES = (
    "colours.css",
    "base.css",
    "passes.css",
    "program.css",
    "inspector.css",
    "panels.css",
    "narrow.css",
)
# One module each, in order: a module follows those that it imports.
MODULES = (
    "dom.js",
    "format.js",
    "step_names.js",
    "payload.js",
    "program.js",
    "layers.js",
    "store.js",
    "search.js",
    "code.js",
    "bars.js",
    "timeline.js",
    "pass_view.js",
    "program_view.js",
    "inspector.js",
    "time_view.js",
    "memory_view.js",
    "roofline.js",
    "step_view.js",
    "nodes_view.js",
    "tabs.js",
    "theme.js",
    "keyboard.js",
    "main.js",
)
_IMPORT = re.compile(r"^import \{[^}]*\} from \"[^\"]*\";\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)
_EXPORTED = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)


def report_page(report: Report) -> str:
    """Return the report as one HTML page that loads nothing else. Equal reports yield equal pages."""
    style, script = "".join(map(_read, STYLES)), joined_modules()
    return _filled(
        _read("page.html"),
        {
            "policy": _policy(style, script),
            "title": html.escape(report.title),
            "about": "".join(
                f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>" for name, text in _about(report)
            ),
            "build": html.escape(report.build_id),
            "style": style,
            "script": script,
            "payload": compressed(report_value(report)),
        },
    )


def joined_modules() -> str:
    """Return the page's JavaScript modules joined into one script.

    Each module keeps its own scope. Later modules see only its exports.
    """
    return "\n".join(_scoped(_read(name)) for name in MODULES)


def _scoped(module: str) -> str:
    body = _EXPORT.sub("", _IMPORT.sub("", module))
    exported = ", ".join(_EXPORTED.findall(module))
    if not exported:
        return f"{{\n{body}}}"
    return f"const {{ {exported} }} = (() => {{\n{body}return {{ {exported} }};\n}})();"


def _policy(style: str, script: str) -> str:
    """Return the page's content security policy. It allows only this style and this script, by their digests."""

    def digest(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = (
        "default-src 'none'",
        f"script-src {digest(script)}",
        f"style-src {digest(style)}",
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(rules)


def _about(report: Report) -> list[tuple[str, str]]:
    """Return the facts at the top of the page, as pairs (name, value)."""
    layers = {line.layer for line in program_lines(report.steps[0].text)} - {None} if report.steps else ()
    compile_s = sum(report.times.phases.values())
    return [
        ("dtype", str(report.model.get("dtype"))),
        ("layers", str(len(layers))),
        ("weights", size_text(report.resident.weights)),
        ("target", report.target),
        ("context", f"{report.model.get('max_seq_len')} tokens"),
        *([("compiled in", f"{compile_s:.1f} s")] if compile_s else []),
    ]


def _filled(template: str, values: Mapping[str, str]) -> str:
    """Return the template with each {{name}} replaced by the value of that name.

    Double braces inside values stay as they are.
    """
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


@cache
def _read(name: str) -> str:
    own = files("ingot.report").joinpath("page", name)
    return (own if own.is_file() else shared_files()[name]).read_text(encoding="utf-8")
