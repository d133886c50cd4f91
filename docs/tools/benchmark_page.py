"""docs/benchmarks.md and its plots, made of benchmarks/results. Whoever imports this has benchmarks/ on the path."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bars import bars
from cold_start import PHASES
from kernel_page import kernel_section
from markdown_table import table
from natural_order import natural_order as _ordered
from peers import PEERS, Peer
from results import RESULTS, Figure, Result, gpu_result, read_result
from units import quantity

BENCHMARKS = RESULTS.parent
HEAD = """\
# Benchmarks

Made by `make docs` from the files in [benchmarks/results](../benchmarks/results), and compared with them by a test.
Each says on which machine, at which commit and on which day it was measured; what it takes to measure it again stands
at the top of its script. Times are the least of several tries, because other work on a machine only ever adds to them.
Absolute numbers hold for that machine alone: what counts is what was measured beside them in the same sitting, another
engine or a copy of the same bytes. A machine with a GPU shares its host's processors with others: what an engine's own
code takes on the host differs most between sittings.
"""
GPU = """\
`python benchmarks/gpu.py --shape {shape}{asked}`

Random weights of the published shape, in bfloat16. A decode step is a step of the whole engine, scheduling and sampling
included: the time of long outputs less that of short ones, over the tokens between them, behind prompts of 128 tokens.
Its bytes are the weights, each once, and the keys and values of the mean context. Requests that are given at once are
counted by the tokens that are made in a second. A start is that of a process up to its first token, with all files in
the page cache; the other engines make their weights up and read none. What they compile at their first start, Ingot
compiles once with `compile-model`.
"""
DECODED = """\
`python benchmarks/decode.py ARTIFACT --shape SHAPE`

Checkpoints of benchmarks/random_checkpoint.py: random weights of the published shape, in bfloat16. A step is measured
as above.
"""
_SHAPES = {
    "1b": "Llama 3.2 1B",
    "8b": "Llama 3.1 8B",
    "qwen3-0.6b": "Qwen3 0.6B",
    "qwen3-1.7b": "Qwen3 1.7B",
    "gemma-3-4b": "Gemma 3 4B",
    "phi-2": "Phi-2",
    "gpt2-2.7b": "GPT-2 of 2.7 B",
    "falcon-7b": "Falcon 7B",
}
# Options of gpu.py by what its results call them.
_ASKED = {"options": "compile", "load": "load"}
Plots = Mapping[str, str]


def benchmark_page() -> tuple[str, Plots]:
    """The text of docs/benchmarks.md, and its plots by their paths in docs/."""
    found = [read_result(path) for path in sorted(RESULTS.glob("*.json"))]
    return page(found)


def page(results: Sequence[Result]) -> tuple[str, Plots]:
    """The page of these results, those of GPUs first, and their kernels next."""
    plots: dict[str, str] = {}
    lines = [HEAD]
    decoded = [result for result in results if "shape" in result.settings and result.name.startswith("decode_")]
    for result in sorted(results, key=lambda one: (_kind(one), one.name)):
        if result in decoded:
            continue
        show = (_gpu, _kernels, _plain)[_kind(result)]
        lines += [*show(result, plots), ""]
    lines += [*_decoded(decoded), ""] if decoded else []
    return "\n".join(lines), plots


def _kind(result: Result) -> int:
    """By the benchmark that made it: gpu.py, gpu_kernels.py, or another."""
    beginnings = ("gpu_", "kernels_")
    return next((kind for kind, name in enumerate(beginnings) if result.name.startswith(name)), len(beginnings))


def _gpu(result: Result, plots: dict[str, str]) -> Iterator[str]:
    figures, shape = result.figures, str(result.settings["shape"])
    beyond = result.name.removeprefix(gpu_result(shape)).strip("_").replace("_", " ")
    yield f"## {_SHAPES[shape]}{f', {beyond},' if beyond else ''} on {_device(result)}\n"
    asked = "".join(f' --{name} "{result.settings[of]}"' for name, of in _ASKED.items() if result.settings.get(of))
    named = f" --name {result.name}" if beyond else ""
    yield GPU.format(shape=shape, asked=asked + named)
    yield from _plot(result, _step_groups(figures), "a decode step", plots)
    yield from _against_peers(figures)
    shares = [name for name in _ordered(figures) if name.endswith("_of_copy")]
    batches = [(name.removesuffix("_of_copy"), f"{figures[name].value:.1%}") for name in shares]
    if batches:
        yield from table(
            ("sequences", "weights", "keys and values", "bandwidth", "of a copy's"),
            (
                [batch.removeprefix("batch_"), *(_shown(figures[f"{batch}_{part}"]) for part in _TRAFFIC), share]
                for batch, share in batches
            ),
        )
        yield f"\nThe copy reads and writes {_shown(figures['copy'])}.\n"
    yield from _only_ours(
        "loading, in the best start", figures, [name for name in _ordered(figures) if name.startswith("load_")]
    )
    yield from _only_ours("serving", figures, [name for name in ("decode_idle",) if name in figures])
    yield from _only_ours("compile-model", figures, [name for name in _COMPILES if name in figures])
    yield from _missing(result)
    yield _provenance(result)


def _kernels(result: Result, plots: dict[str, str]) -> Iterator[str]:
    yield f"## Kernels of {_SHAPES[str(result.settings['shape'])]} on {_device(result)}\n"
    yield from kernel_section(result, plots)
    yield from _missing(result)
    yield _provenance(result)


def _decoded(results: Sequence[Result]) -> Iterator[str]:
    """Decode steps that decode.py measured of one shape each, in one table."""
    yield f"## Decode steps of other families on {_device(results[0])}\n"
    yield DECODED
    yield from table(
        ("", "sequences", "a decode step", "bandwidth", "of a copy's"),
        (
            [_SHAPES[str(result.settings["shape"])], batch, *cells]
            for result in results
            for batch, *cells in _decoded_rows(result.figures)
        ),
    )
    yield ""
    yield from dict.fromkeys(_provenance(result) for result in results)


def _decoded_rows(figures: Mapping[str, Figure]) -> Iterator[tuple[str, ...]]:
    for name in _ordered(figures):
        if (found := re.fullmatch(r"batch_(\d+)_step", name)) is not None:
            bandwidth, share = (figures[f"batch_{found[1]}_{part}"] for part in ("bandwidth", "of_copy"))
            yield found[1], _shown(figures[name]), _shown(bandwidth), f"{share.value:.1%}"


def _missing(result: Result) -> Iterator[str]:
    for part, reason in result.missing.items():
        shown = PEERS[part].title if part in PEERS else part.replace("_", " ")
        yield f"Not measured: {shown}. {reason}\n"


_WAITS = ("ttft", "ttft_p99", "tpot", "tpot_p99")
_COMPILES = ("compile", "compile_cached", "compile_few", "compile_per_few")
_TRAFFIC = ("weights", "cache", "bandwidth")


def _against_peers(figures: Mapping[str, Figure]) -> Iterator[str]:
    """What all engines were measured by, with the ratios; and a compile against the starts that compile."""
    steps = [name for name in _ordered(figures) if re.fullmatch(r"batch_\d+_step", name)]
    starts = ["first_token", *(f"first_token_{name}" for name in PHASES)]
    prompts = [name for name in _ordered(figures) if re.fullmatch(r"prompt_\d+", name)]
    names = (*steps, *prompts, *_served(figures), *starts)
    rows = [(figures[name].what, name, name) for name in names if name in figures]
    if "compile" in figures:
        rows.append(("compile-model, against the first start", "compile", "cold_first_token"))
    if not rows:
        return
    peers = _peers_of(figures)
    yield from table(
        ("", "Ingot", *(head for peer in peers for head in (_peer_head(peer, figures), "Ingot is faster by"))),
        (
            [what, _shown(figures[own]), *(cell for peer in peers for cell in _peer_cells(peer, figures, own, theirs))]
            for what, own, theirs in rows
        ),
    )
    yield ""


def _served(figures: Mapping[str, Figure]) -> Iterator[str]:
    """The figures of loads, in the order in which they were measured; each rate of arrivals has its own."""
    yield from ("throughput", "spread_throughput")
    for rate in dict.fromkeys(name.split("_")[1] for name in figures if name.startswith("arrivals_")):
        yield from (f"arrivals_{rate}_{name}" for name in (*_WAITS, "goodput"))
    yield from (f"prefix_{name}" for name in (*_WAITS, "throughput"))


def _peers_of(figures: Mapping[str, Figure]) -> list[Peer]:
    """Those that were measured."""
    return [peer for peer in PEERS.values() if peer.versions(figures)]


def _peer_head(peer: Peer, figures: Mapping[str, Figure]) -> str:
    return f"{peer.title} {' or '.join(peer.versions(figures))}"


def _peer_cells(peer: Peer, figures: Mapping[str, Figure], own: str, theirs: str) -> tuple[str, str]:
    """A peer's figure and how much better Ingot's is. Of several versions of the peer the best, which is then named."""
    best = peer.best(figures, theirs)
    if best is None:
        return "–", "–"
    version, found = best
    over, under = found.value, figures[own].value
    if found.more_is_better:
        over, under = under, over
    named = f" ({version})" if len(peer.versions(figures)) > 1 else ""
    return _shown(found) + named, f"{over / under:#.3g} ×" if under else "–"


def _only_ours(heading: str, figures: Mapping[str, Figure], names: Sequence[str]) -> Iterator[str]:
    if names:
        yield from table((heading, ""), ((figures[name].what, _shown(figures[name])) for name in names))
        yield ""


def _step_groups(figures: Mapping[str, Figure]) -> dict[str, list[tuple[str, float, str]]]:
    """By batch, the steps of all engines and what copying the same bytes would take."""
    groups = {}
    for name in _ordered(figures):
        if (found := re.fullmatch(r"batch_(\d+)_step", name)) is None:
            continue
        bars_of = [("Ingot", figures[name].value)]
        bars_of += [(peer.title, best[1].value) for peer in PEERS.values() if (best := peer.best(figures, name))]
        of_copy = figures.get(f"batch_{found[1]}_of_copy")
        if of_copy is not None:
            bars_of.append(("a copy of its bytes", figures[name].value * of_copy.value))
        groups[_sequences(found[1])] = [(label, value, quantity(value, "s")) for label, value in bars_of]
    return groups


def _plain(result: Result, plots: dict[str, str]) -> Iterator[str]:
    script = BENCHMARKS / f"{result.name}.py"
    yield f"## {_title(script)}\n"
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items() if value not in ("", None))
    yield f"`python benchmarks/{script.name}`, with {settings}.\n"
    yield from _plot(result, _engine_groups(result.figures), "a decode step", plots)
    figures = [(name, result.figures[name]) for name in _ordered(result.figures)]
    yield from table(("figure", "is", ""), ((f"`{name}`", figure.what, _shown(figure)) for name, figure in figures))
    yield ""
    yield _provenance(result)


def _engine_groups(figures: Mapping[str, Figure]) -> dict[str, list[tuple[str, float, str]]]:
    """By batch, the steps of the engines that decode_cpu.py compares."""
    groups: dict[str, list[tuple[str, float, str]]] = {}
    for name in _ordered(figures):
        found = re.fullmatch(r"batch_(\d+)_(ingot|transformers\w*)", name)
        if found is not None:
            value = figures[name].value
            label = {"ingot": "Ingot"}.get(found[2], found[2].replace("_", ", "))
            groups.setdefault(_sequences(found[1]), []).append((label, value, quantity(value, "s")))
    return groups


def _plot(
    result: Result, groups: Mapping[str, list[tuple[str, float, str]]], what: str, plots: dict[str, str]
) -> Iterator[str]:
    if groups:
        path = f"benchmarks/{result.name}.svg"
        title = f"{what[:1].upper()}{what[1:]}, {_device(result)}"
        plots[path] = bars(title, groups)
        yield f"![{title}]({path})\n"


def _provenance(result: Result) -> str:
    machine = result.machine
    where = f"{machine.processor}, {machine.cores} cores, {quantity(machine.memory, 'B')}"
    if machine.gpu is not None:
        where = f"{machine.gpu}, driver {machine.driver}; {where}"
    peers = [(peer.name, version) for peer in PEERS.values() for version in peer.versions(result.figures)]
    versions = ", ".join(f"{name} {version}" for name, version in sorted([*result.versions.items(), *peers]))
    return f"{result.date}, commit {result.revision[:12]}{'+' * result.revision.endswith('+')}; {where}; {versions}."


def _device(result: Result) -> str:
    return result.machine.gpu or result.machine.processor


def _title(script: Path) -> str:
    """The first sentence of a script's docstring."""
    text = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or script.stem
    return text.partition("\n")[0].rstrip(".")


def _sequences(count: str) -> str:
    return "1 sequence" if count == "1" else f"{count} sequences"


def _shown(figure: Figure) -> str:
    return quantity(figure.value, figure.unit)
