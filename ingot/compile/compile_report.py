"""The result of a compile, as callers of `compile_model` get it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ingot.compile.numerics import NumericsReport
from ingot.ir.artifact.plan import Plans
from ingot.ir.artifact.quantization import QuantizationRecord
from ingot.passes.choose_layouts import SecondCopy
from ingot.rounding.check import RoundingCheck


@dataclass(frozen=True)
class CompileReport:
    """The result of a compile, as `compile_model` returns it.

    - `seconds`: the time of each phase
    - `regions`: the number of calls of regions (calls compiled together), over all bucket classes (ranges of step
      sizes)
    - `distinct_regions`: the number of different executables (compiled code) of regions
    - `cached_executables`: how many of these the cache had
    - `second_copies`: the weights that are stored in two layouts
    - `numerics`: None unless `check_numerics` was set
    - `origin`: the commit of a checkpoint on the hub, as "org/name@COMMIT"; "" for a local folder
    - `notes`: parts of the checkpoint that are ignored, or read differently from how they are written
    - `rounding`: the scores of the fusions; its `risks` were skipped
    - `quantization`: how weights were quantized with a calibration text; None without one
    - `dropped`: backends of other packages that failed and are left out, each with the reason; `notes` has them too
    - `tried`: whether code for such machines has ever run on one
    - `variants`: for several targets, the report of each by the name of the target. `output`, `build_id`,
      `request_key`, `seconds`, `weight_bytes` and `artifact_bytes` are then of the fat artifact, and all other fields
      of its first variant
    - `no_golden_run`: why the golden run, which `ingot verify` repeats, was skipped; "" if it ran
    """

    output: Path
    build_id: str
    request_key: str
    seconds: dict[str, float]
    regions: int
    distinct_regions: int
    cached_executables: int
    nodes_per_backend: dict[str, int]
    weight_bytes: int
    artifact_bytes: int
    plans: Plans
    second_copies: tuple[SecondCopy, ...] = ()
    numerics: NumericsReport | None = None
    no_golden_run: str = ""
    origin: str = ""
    notes: tuple[str, ...] = ()
    dropped: Mapping[str, str] = field(default_factory=dict)
    rounding: RoundingCheck = field(default_factory=lambda: RoundingCheck(()))
    quantization: QuantizationRecord | None = None
    tried: bool = True
    variants: Mapping[str, "CompileReport"] = field(default_factory=dict)
