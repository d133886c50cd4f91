"""Print the results of `ingot bench`: rows of text, or JSON."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ingot.cli.console import console, facts, json_text, print_json, print_table
from ingot.ir.errors import OutputError


def report(json: str | None, answer: Mapping[str, Any], title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print the title and the rows of a result. Write its JSON object, `answer`, to the file `json` if one is given.

    If `json` is "-", print only the JSON object. Raises OutputError if the file cannot be written.
    """
    if json == "-":
        print_json(answer)
        return
    out = console()
    out.print(title, style="bold", markup=False, soft_wrap=True)
    print_table(out, facts(rows))
    if json is not None:
        try:
            Path(json).write_text(json_text(answer), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{json} cannot be written: {error.strerror}", where="--json") from error


def step_rows(steps: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield table rows that show what the time of the steps was spent on. A row is a name and a text.

    `steps` is the result of `step_metrics`.
    """
    yield "steps", f"{steps['steps']:,}, of them {steps['decode_steps']:,} with decode only"
    shares = ("launch_share", "launching steps"), ("wait_share", "waiting for them"), ("host_share", "the rest")
    yield "time of the host", ", ".join(f"{what} {share(steps[name])}" for name, what in shares)
    if steps["decode_idle_share"] is not None:
        yield "GPU idle in decoding", share(steps["decode_idle_share"])


def milliseconds(value: float) -> str:
    return f"{value:,.2f} ms"


def seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= 1 else milliseconds(value * 1e3)


def per_second(value: float, what: str, which: str = "") -> str:
    return f"{value:,.2f} {what}/s{which}"


def share(value: float) -> str:
    return f"{value:.1%}"
