"""All classes of faults, and how one is drawn by seed: what is compiled, where the fault is, and that it shows."""

import json
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.errors import IngotError
from ingot.ir.program import ParamSpec, Program
from planted import in_definitions, in_kernels, in_passes, in_plans, in_recipes, in_regions, in_weights
from planted.fault import Fault, NoFault, Setup
from planted.models import DEEP, LAYERS, checkpoint
from planted.observe import Seen, serve, visible
from planted.where import where

_TRIES, _TRIES_EACH = 20, 8


@dataclass(frozen=True)
class Healthy:
    """A healthy compile of a setup, with all that faults are drawn from."""

    setup: Setup
    checkpoint: Path
    artifact: Path
    applications: list[in_passes.Application]
    seen: Seen

    @property
    def final(self) -> list[Program]:
        """The programs with a plan, one for each bucket class."""
        return [one.after for one in self.applications if one.record.name == "make-plan"]

    @property
    def params(self) -> Mapping[str, ParamSpec]:
        """Those that are resident."""
        return {name: spec for program in self.final for name, spec in program.params.items()}

    @property
    def all_params(self) -> Mapping[str, ParamSpec]:
        """Those that were there at any time: a step of a merged weight's recipe was a step of its parts' too."""
        programs = [self.applications[0].before, *(one.after for one in self.applications)]
        return {name: spec for program in programs for name, spec in program.params.items()}


def compile_healthy(setup: Setup, folder: Path) -> Healthy:
    recorder = in_passes.Recorder([])
    source = checkpoint(setup.model, folder)
    artifact = setup.compile(source, Path(tempfile.mkdtemp(dir=folder)) / "healthy.ingot", on_pass=recorder)
    return Healthy(setup, source, artifact, recorder.seen, serve(artifact))


def _in_pass(name: str) -> Callable[[Healthy, random.Random], Fault]:
    return lambda healthy, draw: in_passes.draw(name, healthy.setup, healthy.applications, draw)


def _in_kernel(backend: str) -> Callable[[Healthy, random.Random], Fault]:
    return lambda healthy, draw: in_kernels.draw(backend, healthy.setup, healthy.final, healthy.artifact, draw)


def _in_recipe(healthy: Healthy, draw: random.Random) -> Fault:
    opened = Checkpoint.open(healthy.checkpoint)
    return in_recipes.draw(healthy.setup, healthy.params, healthy.all_params, opened.read, draw)


_ANY = tuple(DEEP)
_REFERENCE = {"backend": "reference"}
# Steps of few tokens alone: kernels compute all of them, and nothing waits for a region compiler.
_KERNELS = {"backend": "auto", "max_batch": 8, "max_tokens": 16}
_REGIONS = {"backend": "auto"}
_MESH = {"backend": "reference", "mesh": {"tp": 2}}
_MESHED = ("llama", "llama-single", "llama-biased", "qwen3-grouped", "gemma2", "granite")
_INT8 = {"backend": "reference", "passes": "default,quantize{format=int8}"}
_GROUPS = {"backend": "reference", "passes": "default,quantize{format=int4_g32_asym}"}
_FUSED = {"backend": "reference", "passes": "default,fuse-qk-norm-rope{force=true}"}
_FORMATTED = ("llama", "qwen3", "qwen3-grouped", "gemma2")


@dataclass(frozen=True)
class Source:
    """Where faults of one sort come from: how often they are drawn, in what models, and how they are compiled."""

    draw: Callable[[Healthy, random.Random], Fault]
    share: int
    models: tuple[str, ...] = _ANY
    options: tuple[Mapping[str, object], ...] = (_REFERENCE,)
    dtypes: tuple[str, ...] = ("float32", "float32", "bfloat16")
    slow: bool = False  # waits for a region compiler where its cache is cold


_NORMED = ("llama", "llama-biased", "qwen2", "qwen3", "qwen3-grouped", "phi3", "granite")
SOURCES: Mapping[str, Source] = {
    "normalize": Source(_in_pass("normalize"), 10),
    "cse": Source(_in_pass("cse"), 14),
    "insert-paged-kv": Source(_in_pass("insert-paged-kv"), 22),
    "insert-ending": Source(_in_pass("insert-ending"), 16, dtypes=("float32",)),
    "merge-linears": Source(_in_pass("merge-linears"), 24),
    "fuse-add-rms-norm": Source(_in_pass("fuse-add-rms-norm"), 16, models=_NORMED),
    "fuse-qk-norm-rope": Source(_in_pass("fuse-qk-norm-rope"), 14, options=(_FUSED, _KERNELS)),
    "choose-layouts": Source(_in_pass("choose-layouts"), 8),
    "choose-backends": Source(_in_pass("choose-backends"), 8, options=(_REFERENCE, _KERNELS)),
    "form-regions": Source(_in_pass("form-regions"), 8, ("llama", "qwen3"), (_REGIONS,), ("float32",), slow=True),
    "regions": Source(
        lambda h, d: in_regions.draw(h.setup, h.final, d), 4, ("llama", "qwen3"), (_REGIONS,), ("float32",), slow=True
    ),
    "shard": Source(_in_pass("shard"), 6, _MESHED, (_MESH,), ("float32",)),
    "insert-collectives": Source(_in_pass("insert-collectives"), 6, _MESHED, (_MESH,), ("float32",)),
    "quantize": Source(_in_pass("quantize"), 8, _FORMATTED, (_INT8, _GROUPS), ("float32",)),
    "cpu": Source(_in_kernel("cpu"), 34, options=(_KERNELS,)),
    "reference": Source(_in_kernel("reference"), 20, options=(_REFERENCE, _REFERENCE, _INT8), models=_FORMATTED),
    "recipe": Source(_in_recipe, 24, options=(_REFERENCE, _REFERENCE, _KERNELS)),
    "recipe-quantized": Source(_in_recipe, 4, _FORMATTED, (_INT8, _GROUPS), ("float32",)),
    "recipe-mesh": Source(_in_recipe, 4, _MESHED, (_MESH,), ("float32",)),
    "weights": Source(lambda h, d: in_weights.draw(h.setup, h.artifact, d), 14),
    "plan": Source(lambda h, d: in_plans.draw(h.setup, h.final, d), 18, options=(_REFERENCE, _KERNELS)),
    "definition": Source(
        lambda h, d: in_definitions.draw(h.setup, h.checkpoint, h.applications[0].before, LAYERS, d),
        20,
        dtypes=("float32",),
    ),
}


@dataclass(frozen=True)
class Planted:
    """A fault that shows, its artifact, how it shows, and how many draws before it were no faults, by reason."""

    fault: Fault
    artifact: Path
    checkpoint: Path
    shows: str
    redrawn: tuple[str, ...]


def draw_fault(seed: str, folder: Path, sources: Mapping[str, Source] = SOURCES) -> Planted:
    """The fault of a seed; the same one every time. `folder` gets its checkpoint and artifacts."""
    draw = random.Random(seed)
    redrawn: list[str] = []
    name = draw.choices(list(sources), [source.share for source in sources.values()])[0]
    source = sources[name]
    for _ in range(_TRIES):
        options = {**draw.choice(source.options), "dtype": draw.choice(source.dtypes)}
        setup = Setup(draw.choice(source.models), options)
        try:
            healthy = compile_healthy(setup, folder)
        except IngotError as error:
            redrawn.append(f"does not compile: {error}")
            continue
        try:
            for _ in range(_TRIES_EACH):
                try:
                    return _planted(source.draw(healthy, random.Random(draw.random())), healthy, redrawn)
                except NoFault as reason:
                    redrawn.append(str(reason))
        finally:
            shutil.rmtree(healthy.artifact, ignore_errors=True)
    raise NoFault(f"{_TRIES} draws of {name} gave no fault: {json.dumps(redrawn[-3:])}")


def _planted(fault: Fault, healthy: Healthy, redrawn: list[str]) -> Planted:
    artifact = healthy.artifact.with_name("faulty.ingot")
    shutil.rmtree(artifact, ignore_errors=True)
    recorder = in_passes.Recorder([])
    try:
        fault.compile(healthy.checkpoint, artifact, on_pass=recorder)
        with fault.plant():
            seen = serve(artifact)
    except IngotError as error:
        # A fault that the compiler or the loader refuses never gets as far as wrong tokens.
        raise NoFault(f"{fault.name}: refused: {type(error).__name__}: {error}") from error
    if seen.crashed:
        raise NoFault(f"{fault.name}: a step fails: {seen.crashed}")
    shows = visible(healthy.seen, seen, str(fault.setup.options["dtype"]))
    if shows is None:
        raise NoFault(f"{fault.name}: nothing shows: {fault.truth.what}")
    place = where(healthy.artifact, healthy.applications, artifact, recorder.seen)
    assert place.fits(fault.truth), f"{fault.truth} is planted in {place}"
    return Planted(fault, artifact, healthy.checkpoint, shows, tuple(redrawn))
