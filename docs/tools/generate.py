"""`make docs`: write docs/reference.md and docs/benchmarks.md, and the outputs of commands on the pages of docs/."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # the page of benchmarks reads results with their schema

from benchmark_page import benchmark_page
from pages import PageError, Run, Walk
from tables import reference

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
PAGES = ("life-of-a-token", "write-a-pass", "add-an-op", "add-a-backend", "add-a-model")
# Prose only: how it is built, and a page for each subject.
BUILT = (
    *("architecture", "glossary", "compiling", "gpu-kernels", "artifact", "serving", "http", "responses-and-messages"),
    *("tools", "structured-output", "operate", "replicas", "meshes", "looking-in", "using", "adapters"),
    "quantization",
    "quantizing",
    "export",
    "convert",
)


@contextmanager
def shell() -> Iterator[Run]:
    """Yield a function that runs commands, until the end of the block; see shell.py."""
    command = [sys.executable, str(Path(__file__).with_name("shell.py"))]
    # This checkout comes first, installed or not.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    # Pages run in a temporary folder of links to the checkout. Bytecode written through a link would name that folder.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdin is not None and process.stdout is not None

        def run(argv: list[str], folder: Path, path: list[str], stderr: bool) -> tuple[int, str]:
            request = {"argv": argv, "cwd": str(folder), "path": path, "stderr": stderr}
            print(json.dumps(request), file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())
            return answer["status"], answer["output"]

        try:
            yield run
        finally:
            process.kill()  # it has no data to save


def filled(page: str, run: Run) -> str:
    """Return the page with every output and excerpt up to date. Raises PageError."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        try:
            return Walk(ROOT, Path(folder), run).filled(text)
        except PageError as error:
            raise PageError(f"docs/{page}.md: {error}") from error


def main() -> None:
    benchmarks, plots = benchmark_page()
    texts = {"reference.md": reference(), "benchmarks.md": benchmarks, **plots}
    with shell() as run:
        texts |= {f"{page}.md": filled(page, run) for page in PAGES}
    for name, text in texts.items():
        file = DOCS / name
        file.parent.mkdir(exist_ok=True)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"wrote {file.relative_to(ROOT)}")


if __name__ == "__main__":
    try:
        main()
    except PageError as error:
        sys.exit(f"error: {error}")
