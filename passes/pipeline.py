"""The order in which passes run, and how the option `--passes` edits it."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ingot.ir.errors import OptionError, UnknownPassError
from ingot.ir.mesh import within_stage
from ingot.ir.plugins import load_user_pass, user_pass_names
from ingot.ir.program import Stage
from ingot.passes.absorb_latents import AbsorbLatents
from ingot.passes.adopt_quantized import AdoptQuantized
from ingot.passes.base import Pass, check_pass_class
from ingot.passes.choose_backends import ChooseBackends
from ingot.passes.choose_layouts import ChooseLayouts
from ingot.passes.cse import EliminateCommonSubexpressions
from ingot.passes.dequantize_linears import DequantizeLinears
from ingot.passes.emit_executables import EmitExecutables
from ingot.passes.expand_latents import ExpandLatents
from ingot.passes.form_regions import FormRegions
from ingot.passes.fuse_add_rms_norm import FuseAddRMSNorm
from ingot.passes.fuse_append_attention import FuseAppendAttention
from ingot.passes.fuse_qk_norm_rope import FuseQKNormRope
from ingot.passes.insert_adapters import InsertAdapters
from ingot.passes.insert_collectives import InsertCollectives
from ingot.passes.insert_ending import InsertEnding
from ingot.passes.insert_paged_kv import InsertPagedKV
from ingot.passes.make_plan import MakePlan
from ingot.passes.merge_linears import MergeLinears
from ingot.passes.narrow_logits import NarrowLogits
from ingot.passes.normalize import Normalize
from ingot.passes.quantize import Quantize
from ingot.passes.select_rows_early import SelectRowsEarly
from ingot.passes.separate_rounding import SeparateRounding
from ingot.passes.sequence_parallel import SequenceParallel
from ingot.passes.shard import Shard
from ingot.passes.split_add_rms_norm import SplitAddRMSNorm


@dataclass(frozen=True)
class Phase:
    """Passes that together bring a program to a stage, such as FUSED.

    A pass may be in several phases. The option `--passes` changes it in all of them.

    stage       the stage of the program after the phase
    passes      the passes, in order
    by_bucket   whether the passes run once for each bucket class (a range of step sizes); always true from LOWERED on
    """

    stage: Stage
    passes: tuple[Pass, ...]
    by_bucket: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_bucket", self.by_bucket or self.stage >= Stage.LOWERED)


PIPELINE = (
    Phase(Stage.NORMAL, (Normalize(), EliminateCommonSubexpressions())),
    Phase(Stage.CACHED, (AbsorbLatents(), InsertPagedKV(), InsertEnding())),
    Phase(Stage.FUSED, (MergeLinears(), FuseAddRMSNorm(), FuseQKNormRope(), EliminateCommonSubexpressions())),
    Phase(
        Stage.FUSED,
        # Choose layouts before the passes that make a linear's rows differ between classes.
        # Rows must be selected before the pass that leaves linears of selected rows.
        (
            *(SplitAddRMSNorm(), ChooseLayouts(), ExpandLatents(), SelectRowsEarly(), DequantizeLinears()),
            *(SeparateRounding(), FuseAppendAttention()),
        ),
        by_bucket=True,
    ),
    Phase(Stage.LOWERED, (ChooseBackends(), FormRegions(), NarrowLogits(), EmitExecutables())),
    Phase(Stage.PLANNED, (MakePlan(),)),
)

# The phase that is added for a mesh of more than one device, after stage QUANTIZED.
SHARDING = Phase(Stage.SHARDED, (Shard(), InsertCollectives()))

# Passes that run only if named, in the phase of the stage that they join. `max_loras` of a compile names
# insert-adapters, and a quantized checkpoint names adopt-quantized.
ON_REQUEST: Mapping[str, type[Pass]] = {
    AdoptQuantized.name: AdoptQuantized,
    Quantize.name: Quantize,
    InsertAdapters.name: InsertAdapters,
    SequenceParallel.name: SequenceParallel,
}

# Passes that may be left out of a correct compilation; later stages need the others.
OPTIONAL = frozenset(
    {
        "normalize",
        "cse",
        "merge-linears",
        "fuse-add-rms-norm",
        "fuse-qk-norm-rope",
        "fuse-append-attention",
        "split-add-rms-norm",
        "choose-layouts",
        "expand-latents",
        "select-rows-early",
        "dequantize-linears",
        "separate-rounding",
        "form-regions",
        "narrow-logits",
    }
)
# Passes that another option or the checkpoint adds, and that may be left out then.
_ADDED = frozenset({AdoptQuantized.name})


def pipeline_for(mesh: Mapping[str, int]) -> tuple[Phase, ...]:
    """Return the pipeline for a mesh of devices. `mesh` maps axis names to numbers of devices.

    Axes of one device are not in `mesh`, so an empty mapping means a single device. Pipeline stages shard nothing.
    """
    if not within_stage(mesh):
        return PIPELINE
    before = tuple(phase for phase in PIPELINE if phase.stage < Stage.SHARDED)
    return (*before, SHARDING, *PIPELINE[len(before) :])


def edit_pipeline(text: str, pipeline: tuple[Phase, ...] = PIPELINE) -> tuple[Phase, ...]:
    """Return the pipeline that `text` describes, the argument of `--passes`: "default,-cse,quantize{format=int8}".

    The first item is `default`. `-name` removes a pass. `name{option=value, …}` sets options of a pass, and adds the
    pass if it does not run by default. Such passes are `quantize` and passes of other packages. Raises OptionError for
    unknown names or options, for values of the wrong type, and for an option of a pass that is given twice.
    """
    items = _split(text)
    if not items or items[0] != "default":
        raise OptionError(f"'{text}'", where="--passes", expected="default,-name,name{option=value}")
    given: dict[str, set[str]] = {}  # the options of each pass
    for item in items[1:]:
        if item.startswith("-"):
            name = item[1:]
            _find(name, pipeline)
            if name not in OPTIONAL | _ADDED:
                raise OptionError(
                    f"pass '{name}' cannot be left out", where="--passes", expected=", ".join(sorted(OPTIONAL))
                )
            pipeline = tuple(
                replace(phase, passes=tuple(one for one in phase.passes if one.name != name)) for phase in pipeline
            )
        else:
            name, _, options = item.partition("{")
            pipeline = _with_requested(name, pipeline)
            changed = _with_options(_find(name, pipeline), options.removesuffix("}"), given.setdefault(name, set()))
            pipeline = tuple(
                replace(phase, passes=tuple(changed if one.name == name else one for one in phase.passes))
                for phase in pipeline
            )
    return pipeline


def _with_requested(name: str, pipeline: tuple[Phase, ...]) -> tuple[Phase, ...]:
    """Return the pipeline with the pass `name` added, if it is a known pass that does not run by default.

    Otherwise return the pipeline unchanged.
    """
    if any(one.name == name for phase in pipeline for one in phase.passes):
        return pipeline
    made = ON_REQUEST.get(name) or load_user_pass(name)
    if made is None:
        return pipeline
    one = check_pass_class(made, name)()
    if one.on_mesh and all(phase.stage is not Stage.SHARDED for phase in pipeline):
        raise OptionError(
            f"the pass '{name}' without tensor parallelism",
            where="--passes",
            expected="a mesh with tp of 2 or more",
            hint=f"add --mesh tp=2 (with its own sizes), or leave '{name}' out",
        )
    if not any(_takes(phase, one) for phase in pipeline):
        made_phase = Phase(one.joins, (), one.by_bucket)
        pipeline = tuple(sorted((*pipeline, made_phase), key=lambda phase: (phase.stage, phase.by_bucket)))
    joined = next(place for place, phase in enumerate(pipeline) if _takes(phase, one))
    return tuple(
        replace(phase, passes=_joined(phase.passes, one)) if place == joined else phase
        for place, phase in enumerate(pipeline)
    )


def _takes(phase: Phase, one: Pass) -> bool:
    """Return whether a pass that runs on request runs in `phase`."""
    return phase.stage is one.joins and (phase.by_bucket or not one.by_bucket)


def _joined(passes: tuple[Pass, ...], one: Pass) -> tuple[Pass, ...]:
    """Return the passes of a phase with `one` added, after the pass that it follows or else at the end."""
    place = next((place for place, other in enumerate(passes, 1) if other.name == one.follows), len(passes))
    return (*passes[:place], one, *passes[place:])


def _split(text: str) -> list[str]:
    """Return the items of the argument of `--passes`, split at commas outside braces.

    Raises OptionError if a brace is not closed.
    """
    items, depth, current = [], 0, ""
    for char in text:
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0:
            items.append(current.strip())
            current = ""
        else:
            current += char
    items.append(current.strip())
    if depth:
        raise OptionError(f"'{text}' has an open brace", where="--passes", expected="name{option=value}")
    return items


def _find(name: str, pipeline: tuple[Phase, ...]) -> Pass:
    known = {one.name: one for phase in pipeline for one in phase.passes}
    if name in ON_REQUEST and name not in known:
        raise OptionError(f"pass '{name}' does not run by default", where="--passes", hint=f"leave '-{name}' out")
    if name not in known:
        names = list(dict.fromkeys([*known, *ON_REQUEST, *user_pass_names()]))
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise UnknownPassError(
            name,
            where="--passes",
            expected=", ".join(names),
            hint=(f"the nearest is '{nearest[0]}'; " if nearest else "") + "or install the package that has the pass",
        )
    return known[name]


def _with_options(one: Pass, text: str, given: set[str]) -> Pass:
    """Return the pass with options from `text`, such as "format=int8, lm_head=true", and add their names to `given`.

    A value is JSON or plain text, with the type of the option's default. Raises OptionError for an unknown option, a
    value of another type, and an option that is in `given`.
    """
    fields = {field.name: field for field in dataclasses.fields(one)}  # type: ignore[arg-type]  # a dataclass
    changes: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value_text = (piece.strip() for piece in part.partition("="))
        if name not in fields or not equals:
            raise OptionError(
                f"pass '{one.name}' has no option '{name}'",
                where="--passes",
                expected=", ".join(fields) or "no options",
            )
        if name in given:
            raise OptionError(
                f"option '{name}' of pass '{one.name}' is given twice", where="--passes", expected="each option once"
            )
        try:
            value = json.loads(value_text)
        except json.JSONDecodeError:
            value = value_text
        current = getattr(one, name)
        if type(value) is not type(current):
            raise OptionError(
                f"option '{name}' of pass '{one.name}' is {value_text!r}",
                where="--passes",
                expected=f"a value like {json.dumps(current)}",
            )
        changes[name] = value
        given.add(name)
    return replace(one, **changes)  # type: ignore[type-var]
