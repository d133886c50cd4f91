"""The rounding check of a traced model: a score for each fusion, computed with the model's own weights."""

import contextlib
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ingot.ir import ops
from ingot.ir.artifact.record import Numerics
from ingot.ir.ops import op_of
from ingot.ir.program import Model, Program
from ingot.passes.base import Pass, SkippedFusions
from ingot.rounding.forms import FORMS, FusedForm, Matmuls, compute, compute_exactly
from ingot.rounding.samples import TOKENS, Params, SampleValues
from ingot.rounding.score import score
from ingot.rounding.sites import Site, find_sites
from ingot.rounding.tensors import Read

# A score is the median of samples. Above 1, most of them break the contract. A compile skips a fusion above RISKY, with
# a margin on both sides. Measured with random weights: 846 healthy tiny checkpoints score up to 0.76; 162 wide ones
# with K gains of 96.5, K biases of 300 and outlier channels score up to 1.24; terms that cancel in float32 score above
# 40. K gains and biases make all errors large, and two orders of adding then differ by chance. Single samples reach
# 2.5; they are reported only.
RISKY, BROKEN = 2.0, 1.0


@dataclass(frozen=True)
class Score:
    """The rounding score of one pass at one site. A site is a group of calls that passes may fuse.

    - `name`: the pass
    - `entry`: the program
    - `part`: the part of the model, a value of `Part`
    - `layer`: its number; None outside layers
    - `score`: the error of the fused form as a multiple of the allowed error, the median of the samples
    - `largest`: the score of the worst sample
    - `tensor`: the checkpoint tensor that makes the scores large; "" if the verdict is "ok"
    - `origins`: the origins (source lines) of the calls at which the pass would begin the fusion
    """

    name: str
    entry: str
    part: str
    layer: int | None
    score: float
    largest: float
    tensor: str = ""
    origins: tuple[str, ...] = field(default=(), repr=False)

    @property
    def verdict(self) -> str:
        """Return "risk", "near" or "ok".

        With "risk", a compile skips the fusion. With "near", a compile makes the fusion, although a sample breaks the
        contract. With "ok", no sample breaks it.
        """
        return "risk" if self.score > RISKY else "near" if self.largest > BROKEN else "ok"

    @property
    def location(self) -> str:
        """Return the layer and the part, as in "layer 2, attention", and the program's name unless it is "main"."""
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return layer + self.part + ("" if self.entry == "main" else f" of {self.entry}")

    @property
    def reason(self) -> str:
        """Return the text that says why the pass skips the fusion. Traces show it."""
        return (
            f"with these weights the fused form may err {self.score:.1f} times as much as the contract for rounding "
            f"allows ({self.part}, {self.tensor})"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the score as JSON values. Infinity, which JSON lacks, becomes null."""
        return {
            "pass": self.name,
            "entry": self.entry,
            "layer": self.layer,
            "part": self.part,
            "score": self.score if self.score != float("inf") else None,
            "largest": self.largest if self.largest != float("inf") else None,
            "verdict": self.verdict,
            "tensor": self.tensor,
        }


@dataclass(frozen=True)
class RoundingCheck:
    """All scores of a model, in program order. `unscored` are sentences about calls and passes without a score."""

    scores: tuple[Score, ...]
    unscored: tuple[str, ...] = ()

    @property
    def risks(self) -> tuple[Score, ...]:
        return tuple(one for one in self.scores if one.verdict == "risk")

    def skipped(self) -> SkippedFusions:
        """Return the fusions that a compile skips, in the form that passes read.

        The result maps (program, pass) to {origin of a call: reason}. An origin is the source line of a call in the
        model's definition.
        """
        found: dict[tuple[str, str], dict[str, str]] = {}
        for one in self.risks:
            found.setdefault((one.entry, one.name), {}).update(dict.fromkeys(one.origins, one.reason))
        return found

    def decision(self) -> list[dict[str, Any]]:
        """Return the skipped fusions as JSON values without scores. They are a part of a compile's identity."""
        return [
            {"pass": one.name, "entry": one.entry, "location": one.location, "origins": list(one.origins)}
            for one in self.risks
        ]

    def to_json(self) -> dict[str, Any]:
        return {"scores": [one.to_json() for one in self.scores], "unscored": list(self.unscored)}


def check_rounding(model: Model, passes: Iterable[Pass], read: Read, folder: str = "") -> RoundingCheck:
    """Score the rounding errors of each fusion that `passes` may make in `model`.

    `read` returns checkpoint tensors by name. It reads gains and biases whole, and a few rows of larger tensors.
    `folder` is the checkpoint's folder for error messages, or "". Unless it is "", CheckpointError is raised for
    tensors with NaN or infinity, and for norms with all gains zero.
    """
    pipeline = list(passes)
    names = {one.name for one in pipeline}
    scores: list[Score] = []
    unscored: list[str] = []
    with torch.no_grad(), _one_thread():  # BLAS adds in an order that depends on its number of threads
        for program in model.entries.values():
            samples = SampleValues(program, read, folder)
            sites = find_sites(program)
            quantized = {site: name for site in sites if (name := samples.quantized(site))}
            for site in sites:
                if site not in quantized:
                    scores += _scores(site, names, samples, model.spec.dtype)
            unscored += _unscored(program, sites, list(quantized.values()))
    return RoundingCheck(tuple(scores), (*unscored, *_unscored_passes(pipeline)))


def _scores(site: Site, passes: Collection[str], samples: SampleValues, dtype: torch.dtype) -> Iterator[Score]:
    fusions = {name: origins for name, origins in site.passes().items() if name in passes}
    params = samples.params(site)
    found = _score_forms(site, [FORMS[name] for name in fusions], params, samples, dtype)
    causes: dict[FusedForm, str] = {}
    for name, origins in fusions.items():
        form = FORMS[name]
        median, largest = statistics.median(found[form]), max(found[form])
        if largest > BROKEN and form not in causes:
            causes[form] = _cause(site, form, params, samples, dtype)
        yield Score(name, site.entry, site.part.value, site.layer, median, largest, causes.get(form, ""), origins)


def _score_forms(
    site: Site, forms: Collection[FusedForm], params: Params, samples: SampleValues, dtype: torch.dtype
) -> dict[FusedForm, list[float]]:
    """Return the scores of the samples at a site (a group of calls that passes may fuse), by fused form.

    A form says how the fused calls round.
    """
    if not forms:
        return {}
    values = samples.values(site, params)
    exact, matmuls = compute_exactly(site, values)
    reordered: Matmuls = {}
    separate = compute(site, values, matmuls, reordered)
    found: dict[FusedForm, list[float]] = {}
    for form in dict.fromkeys(forms):
        fused = compute(site, values, matmuls, reordered, form) if form.differs(site) else separate
        triples = zip(separate.split(TOKENS), exact.split(TOKENS), fused.split(TOKENS), strict=True)
        found[form] = [score(*one, dtype) for one in triples]
    return found


def _cause(site: Site, form: FusedForm, params: Params, samples: SampleValues, dtype: torch.dtype) -> str:
    """Return the checkpoint tensor that makes a fusion risky, or "" if no param of the site can be replaced.

    A site is a group of calls that passes may fuse. Each of its params in turn is replaced by an ordinary tensor. The
    cause is the one whose replacement improves the worst sample most.
    """
    found: dict[str, float] = {}
    for node, tensor in params.items():
        if (ordinary := _ordinary(site, node, tensor)) is not None:
            changed = {**params, node: ordinary}
            found[samples.stored_name(node)] = max(_score_forms(site, [form], changed, samples, dtype)[form])
    return min(found, key=lambda one: found[one]) if found else ""


def _ordinary(site: Site, node: fx.Node, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor without risk, to replace a param of a site (a group of calls that passes may fuse).

    Gains become ones, and biases zeros. The outliers of a matrix are clipped, and its rows scaled to norm one. Return
    None for any other param, such as a table.
    """
    for call in (*([site.norm] if site.norm else []), *site.members):
        op = op_of(call.target)
        if op is None or node not in call.all_input_nodes:
            continue
        bound = op.bind(call.args, dict(call.kwargs))
        argument = next((name for name, value in bound.items() if value is node), "")
        if argument == "bias":
            return torch.zeros_like(tensor)
        if argument == "weight" and op is not ops.linear:
            return torch.ones_like(tensor)
        if argument == "weight":
            full = tensor.double()
            usual = full.abs().median(1, keepdim=True).values
            # Of normal numbers, one in 10^4 exceeds six medians.
            kept = full.clamp(-6 * usual, 6 * usual)
            rows: torch.Tensor = kept / kept.norm(dim=1, keepdim=True).clamp(min=1e-30)
            return rows.to(tensor.dtype)
    return None


def _unscored(program: Program, sites: Sequence[Site], quantized: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each kind of call of a program that has no score.

    A site is a group of calls that passes may fuse. `quantized` has a quantized param's name for each site that reads
    one.
    """
    if quantized:
        count = f"{len(quantized)} of {len(sites)} groups of calls"
        yield f"{program.name}: {count}, because their weights are quantized ({_kinds(quantized)})"
    scored = {node for site in sites for node in (*site.members, *([site.norm] if site.norm else []))}
    matrices = [
        str(one.target)
        for node in program.calls()
        if node not in scored and op_of(node.target) is not ops.embedding
        for one in node.all_input_nodes
        if one.op == "placeholder" and one.meta["kind"] == "param" and len(one.meta["type"].shape) > 1
    ]
    if matrices:
        yield f"{program.name}: {len(matrices)} matmuls that are in no scored group of calls ({_kinds(matrices)})"
    if not sites:
        yield f"{program.name}: no fusion that a score is defined for"


def _unscored_passes(passes: Iterable[Pass]) -> Iterator[str]:
    """Yield a sentence with the names of the passes that may change rounding and have no score."""
    names = dict.fromkeys(one.name for one in passes if one.numerics is not Numerics.EXACT and one.name not in FORMS)
    if names:
        yield f"passes without a score that may change rounding: {', '.join(names)}"


def _kinds(params: Iterable[str]) -> str:
    """Return the names of params, each once, with `*` in place of numbers."""
    return ", ".join(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in params))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
