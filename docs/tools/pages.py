"""Pages with commands that are run, and with their real outputs and excerpts of files.

Three kinds of fenced block are filled; the rest of a page is unchanged:

- ```` ```console ````: lines that begin with `$ ` are run, in the order of the page, in a folder that looks like the
  repository's root. They may end in ` 2> /dev/null`, and in ` | ` and filters. Their output follows, or `…` alone if
  it is not shown. A command exits with 0, unless the line above the block is `<!-- status: N -->`.
- below `<!-- section: NAME -->`: the part of the last command's output below its line `== NAME ==`.
- below `<!-- lines: PATH: FIRST … LAST -->`: the lines of a file from the first that begins with FIRST to the next that
  begins with LAST, dedented; without ` … LAST`, only the first.
"""

import re
import shlex
import subprocess
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
NOT_SHOWN = "…"
# The line numbers of code from a file. A page shows the file alone, which changes less often than its lines.
_LINE_OF_CODE = re.compile(r"(?<=\.py):\d+\b")

# (command, folder, further entries of Python's path, include stderr) to (exit status, output).
Run = Callable[[list[str], Path, list[str], bool], tuple[int, str]]
_QUIET = " 2> /dev/null"


class PageError(Exception):
    """A command of a page ended with another status than the page says, or a reference is missing."""


@dataclass
class Walk:
    """One run of a page, as from a fresh clone; `folder` is the working folder, empty at first."""

    root: Path
    folder: Path
    run: Run
    printed: str = ""

    def __post_init__(self) -> None:
        for entry in self.root.iterdir():
            if entry.name not in ("build", ".git", ".venv"):
                (self.folder / entry.name).symlink_to(entry)
        self.site = self.folder / ".site"
        self.site.mkdir()
        self.path = [str(self.site)]

    def filled(self, text: str) -> str:
        """Return the page with every block filled. Raises PageError."""
        return _BLOCK.sub(self._block, text)

    def _block(self, found: re.Match[str]) -> str:
        mark, kind, body = found["mark"] or "", found["kind"], found["body"]
        topic, _, rest = mark.partition(": ")
        if kind == "console":
            body = "".join(self._commands(body, int(rest) if topic == "status" else 0))
        elif topic == "section":
            body = self._section(rest)
        elif topic == "lines":
            body = _lines(self.root, rest)
        above = f"<!-- {mark} -->\n" if mark else ""
        return f"{above}```{kind}\n{body}```"

    def _commands(self, body: str, wanted: int) -> Iterator[str]:
        """Yield the commands of a block, each with its output unless the page does not show it."""
        for command, shown in re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", body, re.M):
            status, printed = self._command(command.replace("\\\n", " "))
            self.printed = _LINE_OF_CODE.sub("", printed)
            if status != wanted:
                raise PageError(f"`{command}` ended with {status} and not {wanted}:\n{self.printed}")
            yield f"$ {command}\n" + (shown if shown.strip() == NOT_SHOWN else self.printed)

    def _command(self, command: str) -> tuple[int, str]:
        first, *filters = command.split(" | ")
        argv = shlex.split(first.removesuffix(_QUIET))
        if argv[:3] == ["pip", "install", "-e"]:
            self._install(self.folder / argv[3])
            return 0, ""
        if argv[0] in ("mkdir", "cp", "sed"):
            return subprocess.run(argv, cwd=self.folder).returncode, ""
        status, printed = self.run(argv, self.folder, self.path, not first.endswith(_QUIET))
        for one in filters:
            printed = subprocess.run(one, shell=True, input=printed, capture_output=True, text=True).stdout
        return status, printed

    def _install(self, package: Path) -> None:
        """Put a package on the path with its metadata, as an editable install does; replace an earlier install."""
        project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        info = self.site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = [
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in items.items())
            for group, items in project["entry-points"].items()
        ]
        (info / "entry_points.txt").write_text("\n".join(groups))
        self.path.insert(0, str(package))

    def _section(self, name: str) -> str:
        _, heading, rest = self.printed.partition(f"== {name} ==\n")
        if not heading:
            raise PageError(f"the last command printed no section '{name}':\n{self.printed}")
        return f"\n{rest}".partition("\n== ")[0].strip("\n") + "\n"


def _lines(root: Path, reference: str) -> str:
    """Return the lines that `PATH: FIRST … LAST` names."""
    path, _, span = reference.partition(": ")
    first, _, last = span.partition(" … ")
    if not (root / path).is_file():
        raise PageError(f"there is no file {path}")
    lines = (root / path).read_text(encoding="utf-8").splitlines(keepends=True)
    begin = next((i for i, line in enumerate(lines) if line.lstrip().startswith(first)), None)
    if begin is None:
        raise PageError(f"{path} has no line that begins with {first!r}")
    end = begin
    if last:
        after = (i for i in range(begin + 1, len(lines)) if lines[i].lstrip().startswith(last))
        if (end := next(after, -1)) < 0:
            raise PageError(f"{path} has no line after {first!r} that begins with {last!r}")
    return textwrap.dedent("".join(lines[begin : end + 1]))
