"""The part of docs/benchmarks.md that compares engines on a GPU: a plot and a table for each question."""

import argparse
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bars import bars
from cold_start import PHASES
from markdown_table import table
from natural_order import natural_order
from peers import PEERS
from results import Figure, Result, gpu_result
from units import quantity

SHAPES = {
    "1b": "Llama 3.2 1B",
    "8b": "Llama 3.1 8B",
    "qwen3-0.6b": "Qwen3 0.6B",
    "qwen3-1.7b": "Qwen3 1.7B",
    "qwen3-32b": "Qwen3 32B",
    "gemma-3-4b": "Gemma 3 4B",
    "phi-2": "Phi-2",
    "gpt2-2.7b": "GPT-2 of 2.7 B",
    "falcon-7b": "Falcon 7B",
    "qwen3-30b-a3b": "Qwen3 30B-A3B",
    "gpt-oss-20b": "GPT-OSS 20B",
    "gpt-oss-120b": "GPT-OSS 120B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
}
HEAD = """\
All models have random weights of the published shape, in bfloat16. A name in parentheses is the format of quantized
weights, as (fp8), or marks a further run of the same model, as (load). With (tp2), two GPUs share each layer, and bytes
are those of one. Of quantized weights and of mixtures of experts, all engines read one checkpoint. Cells of other
engines end with how many times faster Ingot is; below 1 × the other engine is faster.
[Conditions](#conditions-on-{anchor}) lists command, date and versions of each row.
"""
DECODE = """\
One step of the whole engine, with scheduling and sampling, after prompts of 128 tokens: the time of long outputs minus
the time of short outputs, divided by the tokens between them. Mean contexts are {contexts}.
"""
BANDWIDTH = """\
A step reads each weight once, and the keys and values of the mean context. The last column compares its bandwidth with
a plain copy, which reads and writes at {copy}.
"""
EXPERTS = """\
A layer of a mixture reads the experts that the tokens of a step choose: means of steps recorded in Ingot, and what even
choices need. The table above counts the weights of these alone. GPT-OSS has its experts in MXFP4, as published.
"""
PROMPT = "The least time to the first token after a prompt of that many tokens, with nothing else running.\n"
THROUGHPUT = "Output tokens per second of requests that arrive at once.\n"
ARRIVALS = """\
Arrivals are random, with the given mean rate: {requests}. Goodput counts requests per second that {goodput}.
"""
PREFIX = "Load: {requests}.\n"
START = """\
A new process up to its first token. All files of the artifact are read before it starts. The other engines make up
random weights and read none. A first start has empty compiler caches; Ingot compiles once with `compile-model`.
"""
LOADING = "Phases of loading in Ingot's fastest start. Phases overlap.\n"
COMPILING = "Seconds of `compile-model`, which a first start of another engine includes.\n"
MEMORY = """\
The most host memory at a time in samples of every 20 ms, without pages of files. A page that several processes share
counts for each of them. A start's memory is the sum of three peaks: anonymous memory, shared memory and what torch's
allocator pins. These peaks may be at different moments, so the sum is an upper bound. `compile-model` starts up to as
many compiler processes as `-j` says, one per core by default.
"""
IDLE = "The share of the time between the ends of successive decode steps in which the GPU is idle, over all loads.\n"

_WAITS = {
    "ttft": "first token, mean",
    "ttft_p99": "first token, p99",
    "tpot": "later tokens, mean",
    "tpot_p99": "later tokens, p99",
}
_MEMORY = {
    "start_memory": "start to the first token",
    "start_anonymous": "of it: anonymous",
    "start_shared": "of it: shared",
    "start_pinned": "of it: pinned by torch",
    "compile_memory": "compile-model, anonymous",
    "compile_memory_process": "of one process of it",
    "compile_jobs": "compiler processes of it, at most (`-j`)",
    "artifact": "for comparison: all files of the artifact",
}
_COMPILES = ("compile", "compile_cached", "compile_few", "compile_per_few")
Plots = dict[str, str]
Columns = Mapping[str, str]  # names of figures, with their headings


@dataclass(frozen=True)
class Engine:
    """One engine's figures in a result: Ingot's without `name`, those of a version of a peer with one."""

    title: str
    prefix: str
    figures: Mapping[str, Figure]

    def figure(self, name: str) -> Figure | None:
        return self.figures.get(self.prefix + name)


def gpu_sections(results: Sequence[Result], plots: Plots) -> Iterator[str]:
    """Yield the sections of all results of one GPU, as lines; add plots by their paths in docs/."""
    device = device_of(results[0])
    steps = _columns(results, r"batch_(\d+)_step", "{} sequences")
    yield f"## Engines on {device}\n"
    yield HEAD.format(anchor=_anchor(device))
    yield from _decode(results, steps, device, plots)
    yield from _bandwidth(results)
    yield from _experts(results)
    prompts = _columns(results, r"prompt_(\d+)", "{} tokens")
    yield from _question("How long does prefill take?", PROMPT, results, prompts)
    at_once = {"throughput": "equal lengths", "spread_throughput": "spread lengths"}
    yield from _question("How many tokens per second at full load?", _throughput(results), results, at_once)
    yield from _arrivals(results)
    prefix = PREFIX.format(requests=_said(results, "prefix_ttft").partition(":")[0])
    shared = {f"prefix_{name}": heading for name, heading in _WAITS.items()} | {"prefix_throughput": "output"}
    yield from _question("How long do requests with a shared prefix take?", prefix, results, shared)
    yield from _starts(results)
    yield from _only_ingot("Which phases does a start have?", LOADING, results, _loads(results))
    compiles = {name: said for name in _COMPILES if (said := _said(results, name))}
    yield from _only_ingot("How long does compiling take?", COMPILING, results, compiles)
    yield from _only_ingot(
        "How much host memory do starting and compiling take?", MEMORY, map(_with_jobs, results), _MEMORY
    )
    yield from _only_ingot("How long is the GPU idle?", IDLE, results, {"decode_idle": "idle"})
    yield from _conditions(results, device)


def provenance(result: Result) -> str:
    machine = result.machine
    where = f"{machine.processor}, {machine.cores} cores, {quantity(machine.memory, 'B')}"
    if machine.gpu is not None:
        where = f"{machine.gpu}, driver {machine.driver}; {where}"
    peers = [(peer.name, version) for peer in PEERS.values() for version in peer.versions(result.figures)]
    versions = ", ".join(f"{name} {version}" for name, version in sorted([*result.versions.items(), *peers]))
    return f"{result.date}, commit {result.revision[:12]}{'+' * result.revision.endswith('+')}; {where}; {versions}."


def missing(result: Result) -> Iterator[str]:
    for part, reason in result.missing.items():
        shown = PEERS[part].title if part in PEERS else part.replace("_", " ")
        yield f"Not measured: {shown}. {reason}\n"


def device_of(result: Result) -> str:
    return result.machine.gpu or result.machine.processor


def shown(figure: Figure) -> str:
    return quantity(figure.value, figure.unit)


def sequences(count: str) -> str:
    return "1 sequence" if count == "1" else f"{count} sequences"


def label_of(result: Result) -> str:
    """The model, and in parentheses the name of a further run of it."""
    shape = str(result.settings["shape"])
    kind, _, name = result.name.partition("_")
    beyond = ""
    if kind in ("gpu", "decode"):
        beyond = name.removeprefix(gpu_result(shape).removeprefix("gpu_")).strip("_").replace("_", " ")
    return SHAPES[shape] + (f" ({beyond})" if beyond else "")


def engines_of(result: Result) -> Iterator[Engine]:
    yield Engine("Ingot", "", result.figures)
    for peer in PEERS.values():
        for version in peer.versions(result.figures):
            yield Engine(f"{peer.title} {version}", peer.figure(version, ""), result.figures)


def _columns(results: Sequence[Result], expression: str, heading: str) -> Columns:
    """Return the figures that match, by number, with headings."""
    names = natural_order({name for result in results for name in result.figures if re.fullmatch(expression, name)})
    numbers = {name: re.fullmatch(expression, name)[1] for name in names}  # type: ignore[index]  # all of them match
    return {
        name: "1 sequence" if heading.format(n) == "1 sequences" else heading.format(n) for name, n in numbers.items()
    }


def _said(results: Sequence[Result], expression: str) -> str:
    """Return the description of the first figure of Ingot's that matches."""
    found = (one.figures[name].what for one in results for name in one.figures if re.fullmatch(expression, name))
    return next(found, "")


def _throughput(results: Sequence[Result]) -> str:
    """Return the text on throughput, with the models of each number of requests."""
    models: dict[str, list[str]] = {}
    for result in results:
        if "throughput" in result.figures:
            requests = result.figures["throughput"].what.partition(",")[0]
            models.setdefault(requests, []).append(label_of(result))
    return THROUGHPUT + "".join(f"Equal lengths: {what} ({', '.join(of)}).\n" for what, of in models.items())


def _rows(
    results: Iterable[Result], columns: Columns, cell: Callable[[Engine, str, Figure | None], str]
) -> list[list[str]]:
    """Return a row for each engine of each result that has one of the figures."""
    return [
        [label_of(result), engine.title, *(cell(engine, name, result.figures.get(name)) for name in columns)]
        for result in results
        for engine in engines_of(result)
        if any(engine.figure(name) for name in columns)
    ]


def cell_of(engine: Engine, name: str, own: Figure | None) -> str:
    """Return a figure; a peer's with how many times faster Ingot is."""
    found = engine.figure(name)
    if found is None:
        return "–"
    if not engine.prefix or own is None:
        return shown(found)
    over, under = (own.value, found.value) if found.more_is_better else (found.value, own.value)
    return f"{shown(found)}, {over / under:#.3g} ×" if under else shown(found)


def _question(heading: str, text: str, results: Iterable[Result], columns: Columns) -> Iterator[str]:
    """Yield a table with a row for each engine, without columns that no engine has."""
    rows = _rows(results, columns, cell_of)
    if not rows:
        return
    kept = [n for n, name in enumerate(columns) if any(row[2 + n] != "–" for row in rows)]
    headings = list(columns.values())
    yield f"### {heading}\n"
    yield text
    yield from table(
        ("model", "engine", *(headings[n] for n in kept)), ([*row[:2], *(row[2 + n] for n in kept)] for row in rows)
    )
    yield ""


def _decode(results: Sequence[Result], steps: Columns, device: str, plots: Plots) -> Iterator[str]:
    if not steps:
        return
    contexts = dict.fromkeys(
        f"{what.partition('mean context of ')[2]} ({sequences(name.split('_')[1])})"
        for name in steps
        for result in results
        if name in result.figures and "mean context of" in (what := result.figures[name].what)
    )
    yield "### How long does a decode step take?\n"
    for name, heading in steps.items():
        groups = {label_of(one): list(_bars(one.figures, name)) for one in results if name in one.figures}
        title = f"A decode step of {heading}, {device}"
        path = f"benchmarks/decode_{_anchor(device)}_{name.split('_')[1]}.svg"
        plots[path] = bars(title, groups)
        yield f"![{title}]({path})\n"
    yield DECODE.format(contexts=" and ".join(contexts) or "in the results")
    yield from table(("model", "engine", *steps.values()), _rows(results, steps, cell_of))
    yield ""


def _bars(figures: Mapping[str, Figure], name: str) -> Iterator[tuple[str, float, str]]:
    """Yield the step of each engine, of a peer's versions the best, and the time to copy the bytes of the step."""
    found = [("Ingot", figures[name].value)]
    found += [(peer.title, best[1].value) for peer in PEERS.values() if (best := peer.best(figures, name))]
    of_copy = figures.get(name.removesuffix("_step") + "_of_copy")
    if of_copy is not None:
        found.append(("a copy of its bytes", figures[name].value * of_copy.value))
    yield from ((label, value, quantity(value, "s")) for label, value in found)


def _bandwidth(results: Sequence[Result]) -> Iterator[str]:
    parts = ("weights", "cache", "bandwidth")
    rows = []
    for result in results:
        for name in natural_order(name for name in result.figures if re.fullmatch(r"batch_\d+_of_copy", name)):
            batch = name.removesuffix("_of_copy")
            own = [result.figures.get(f"{batch}_{part}") for part in parts]
            cells = [shown(figure) if figure else "–" for figure in own]
            rows.append([label_of(result), batch.removeprefix("batch_"), *cells, f"{result.figures[name].value:.1%}"])
    if rows:
        copies = [result.figures["copy"] for result in results if "copy" in result.figures]
        spread = [shown(one(copies, key=lambda figure: figure.value)) for one in (min, max)] if copies else []
        yield "### How much of the memory bandwidth does a decode step use?\n"
        yield BANDWIDTH.format(copy=" to ".join(dict.fromkeys(spread)) or "the rate in the results")
        yield from table(("model", "sequences", "weights", "keys and values", "bandwidth", "share of a copy"), rows)
        yield ""


def _experts(results: Sequence[Result]) -> Iterator[str]:
    rows = []
    for result in results:
        for name in natural_order(name for name in result.figures if re.fullmatch(r"batch_\d+_experts", name)):
            cells = [f"{result.figures[one].value:.1f}" for one in (name, f"{name}_even")]
            rows.append([label_of(result), name.split("_")[1], *cells])
    if rows:
        yield "### How many experts does a layer of a decode step read?\n"
        yield EXPERTS
        yield from table(("model", "sequences", "experts", "if choices are even"), rows)
        yield ""


def _arrivals(results: Sequence[Result]) -> Iterator[str]:
    """Yield a row for each rate and engine."""
    names = {name for result in results for name in result.figures if re.fullmatch(r"arrivals_\w+_ttft", name)}
    columns = [*_WAITS, "goodput"]
    rows = []
    for result in results:
        for name in natural_order(names & result.figures.keys()):
            rate = name.split("_")[1]
            ours = {f"arrivals_{rate}_{column}": "" for column in columns}
            rows += [[row[0], rate, *row[1:]] for row in _rows([result], ours, cell_of)]
    if rows:
        yield "### How long do requests wait that arrive one by one?\n"
        requests = _said(results, r"arrivals_\w+_ttft").partition(",")[0]
        yield ARRIVALS.format(requests=requests, goodput=_said(results, r"arrivals_\w+_goodput").rpartition(": ")[2])
        yield from table(("model", "requests/s", "engine", *_WAITS.values(), "goodput"), rows)
        yield ""


def _starts(results: Sequence[Result]) -> Iterator[str]:
    """Yield starts with filled caches, and the first starts of engines that compile then."""
    headings = {"start": "starting Python", "import": "import", "load": "engine and weights", "prompt": "128 tokens"}
    names = {
        "first_token": "to the first token",
        **{f"first_token_{name}": headings.get(name, name) for name in PHASES},
    }
    rows = []
    for result in results:
        rows += _rows([result], names, cell_of)
        for engine in engines_of(result):
            cold = Engine(engine.title, engine.prefix + "cold_", engine.figures)
            if engine.prefix and cold.figure("first_token"):
                cells = [cell_of(cold, name, result.figures.get(name)) for name in names]
                rows.append([label_of(result), f"{engine.title}, first start", *cells])
    if rows:
        yield "### How long does a start take?\n"
        yield START
        yield from table(("model", "engine", *names.values()), rows)
        yield ""


def _loads(results: Sequence[Result]) -> Columns:
    names = natural_order({name for result in results for name in result.figures if name.startswith("load_")})
    return {name: name.removeprefix("load_").replace("_", " ") for name in names}


def _with_jobs(result: Result) -> Result:
    """Return a result with the most compiler processes as the figure "compile_jobs".

    A result without the memory of compiling is returned as it is.
    """
    if "compile_memory" not in result.figures:
        return result
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-j", "--jobs", type=int, default=result.machine.cores)
    asked, _ = parser.parse_known_args(shlex.split(str(result.settings.get("compile", ""))))
    jobs = Figure(value=asked.jobs, unit="", what="compiler processes, at most")
    return result.model_copy(update={"figures": {**result.figures, "compile_jobs": jobs}})


def _only_ingot(heading: str, text: str, results: Iterable[Result], names: Columns) -> Iterator[str]:
    """Yield a table of figures that only Ingot has: a column for each run."""
    having = [result for result in results if names.keys() & result.figures.keys()]
    if not having:
        return
    yield f"### {heading}\n"
    yield text
    rows = (
        [what, *(shown(found) if (found := one.figures.get(name)) else "–" for one in having)]
        for name, what in names.items()
        if any(name in one.figures for one in having)
    )
    yield from table(("", *(label_of(one) for one in having)), rows)
    yield ""


# Options of gpu.py by what its results call them.
_OPTIONS = {"options": "compile", "load": "load"}


def _conditions(results: Sequence[Result], device: str) -> Iterator[str]:
    yield f"### Conditions on {device}\n"
    yield "`benchmarks/random_checkpoint.py` makes the checkpoints of `benchmarks/decode.py`.\n"
    for result in results:
        yield f"- {label_of(result)}: `{_command(result)}`. {provenance(result)}"
    yield ""
    for result in results:
        yield from (f"{label_of(result)}: {line}" for line in missing(result))


def _command(result: Result) -> str:
    settings, shape = result.settings, result.settings["shape"]
    if not result.name.startswith("gpu_"):
        return f"python benchmarks/decode.py ARTIFACT --shape {shape}"
    asked = "".join(f' --{name} "{settings[of]}"' for name, of in _OPTIONS.items() if settings.get(of))
    format = str(settings["format"]) if "format" in settings else None
    if format is not None:
        asked = f" --format {format}{asked}"
    named = "" if result.name == gpu_result(str(shape), format) else f" --name {result.name}"
    return f"python benchmarks/gpu.py --shape {shape}{asked}{named}"


def _anchor(text: str) -> str:
    return re.sub(r"[^\w\- ]", "", text).lower().replace(" ", "-")
