"""What the commands of `ingot bench` check before anything is loaded, and how they tell what they found."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from ingot.console import console, facts, json_text, print_json, print_table
from ingot.ir.errors import ArtifactError, OptionError, OutputError

if TYPE_CHECKING:
    from ingot.bench.engine import BenchEngine
    from ingot.bench.workload import Lengths
    from ingot.progress import OnProgress
    from ingot.runtime.artifact import Artifact

Dataset = Literal["random", "sharegpt"]
JsonFile = Annotated[str | None, Parameter(allow_leading_hyphen=True)]  # for "-"
_WARM_UP_TOKENS = 8  # of each output; a batch of them meets every size of decode step
_SHORTEST = 8  # tokens of a sequence that `sharegpt_lengths` can draw


def at_least(least: int, **options: int | None) -> None:
    """Raises OptionError for one that is below; None is left alone."""
    for name, value in options.items():
        if value is not None and value < least:
            raise _refused(name, value, f"{least} or more")


def positive(**options: float) -> None:
    """Raises OptionError for one that is no number above 0; infinity is one."""
    for name, value in options.items():
        if math.isnan(value) or value <= 0:
            raise _refused(name, f"{value:g}", "a number above 0")


def at_most(most: int, artifact: "Artifact", what: str, **options: int) -> None:
    """Raises OptionError when the options together ask for more than the artifact was compiled for."""
    if sum(options.values()) > most:
        asked = " and ".join(f"{_flag(name)} {value}" for name, value in options.items())
        raise OptionError(
            f"{asked}: too much for {artifact.manifest.name}",
            expected=f"at most {most}, the {what} that it was compiled for",
        )


def limit(artifact: "Artifact", name: str) -> int:
    """A limit that the artifact was compiled for. Raises ArtifactError where its manifest has none."""
    value = artifact.manifest.model.get(name)
    if type(value) is not int or value < 1:
        raise ArtifactError(f"{name} is {value!r:.80}", where="manifest.json, model", expected="a whole number above 0")
    return value


def lengths_of(
    artifact: "Artifact", dataset: Dataset, count: int, input_len: int, output_len: int, prefix_len: int, seed: int
) -> "list[Lengths]":
    """The lengths of `count` requests of a dataset, whose prompts begin with `prefix_len` tokens more. Raises
    OptionError for what the artifact cannot take."""
    from ingot.bench.workload import Lengths, equal_lengths, sharegpt_lengths

    longest = limit(artifact, "max_seq_len")
    what, prefix = "tokens of a sequence", {"prefix_len": prefix_len} if prefix_len else {}
    if dataset == "random":
        at_most(longest, artifact, what, input_len=input_len, output_len=output_len, **prefix)
        return equal_lengths(count, prefix_len + input_len, output_len)
    at_most(longest - _SHORTEST, artifact, f"{what} but {_SHORTEST}", **prefix)
    drawn = sharegpt_lengths(count, seed, longest - prefix_len)
    return [Lengths(prefix_len + one.prompt, one.output) for one in drawn]


def warm_up(
    engine: "BenchEngine", lengths: "Sequence[Lengths]", prefix_len: int, seed: int, progress: "OnProgress"
) -> None:
    """Serve some of the requests' like, so that what is made when it is first needed is there: other prompts, with
    another beginning. Their steps are forgotten."""
    from ingot.bench.drive import drive
    from ingot.bench.workload import Lengths, make_workload

    short = [Lengths(one.prompt, min(one.output, _WARM_UP_TOKENS)) for one in lengths[: engine.limits.max_batch]]
    progress("warm up", 0, len(short))
    run = drive(
        engine,
        make_workload(short, engine.tokens, seed - 1, shared_prefix=prefix_len),
        on_finished=lambda count: progress("warm up", count, len(short)),
    )
    engine.executor.steps.clear()
    if run.interrupted:
        raise KeyboardInterrupt


def check_file(json: str | None) -> None:
    """Raises OutputError where nothing could be written, before anything is measured."""
    if json in (None, "-"):
        return
    path = Path(str(json))
    if path.is_dir() or not path.parent.is_dir() or path.name.startswith("-"):
        raise OutputError(f"{path} cannot be written", where="--json", expected="a file in a folder that exists, or -")


def tell(json: str | None, answer: Mapping[str, Any], title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print the rows; or the JSON alone, where it is to go to stdout. Raises OutputError for a file that cannot be
    written."""
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


def step_rows(steps: "Mapping[str, Any]") -> "Iterator[tuple[str, str]]":
    """Where the time of the steps went."""
    yield "steps", f"{steps['steps']:,}, of them {steps['decode_steps']:,} of decoding alone"
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


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _refused(name: str, value: object, expected: str) -> OptionError:
    return OptionError(f"{_flag(name)} is {value}", expected=expected)
