"""Quantize the weights of a compile with a calibration text, or find the result of an earlier compile in the cache."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import fx

from ingot.compile.cache import cache_folder, locked
from ingot.frontend.checkpoint import Checkpoint
from ingot.ir.artifact.digest import digest_json
from ingot.ir.artifact.quantization import LayerChoice, QuantizationRecord
from ingot.ir.errors import CalibrationError
from ingot.ir.formats import Format
from ingot.ir.json_text import dump_json, parse_json
from ingot.ir.numerics.harness import step_inputs
from ingot.ir.program import Program, tensor_type
from ingot.ir.stored.calibrated import CalibratedWeights
from ingot.passes.quantize import AUTO, Quantize
from ingot.passes.select_linears import check_fit, weight_node
from ingot.quantizing.auto import find_sensitivity
from ingot.quantizing.calibrate import Calibration, Inputs, calibrate
from ingot.quantizing.options import QuantizeOptions
from ingot.quantizing.tensor_folder import TensorWriter, open_tensors
from ingot.quantizing.texts import CalibrationText

_RESULT = "calibration.json"
_WEIGHTS = TypeAdapter(CalibratedWeights)
OnDone = Callable[[int, int], None]


@dataclass(frozen=True)
class CalibrationResult:
    """The result of a calibration: what the pass quantize reads, its record, and its tensors as a checkpoint."""

    weights: CalibratedWeights
    record: QuantizationRecord
    tensors: Checkpoint


@dataclass(frozen=True)
class CalibrationJob:
    """A calibration to do.

    - `program`: the traced program `main`
    - `checkpoint`: has the weights
    - `quantize`: the pass with the options of the compile, which selects the linears
    """

    program: Program
    checkpoint: Checkpoint
    quantize: Quantize
    options: QuantizeOptions
    text: CalibrationText

    def checked(self) -> "CalibrationJob":
        """Return this job with as much of its text as fits into memory.

        Raises CalibrationError or OptionError if this program or text cannot be calibrated.
        """
        if "logits" not in self.program.outputs:
            raise CalibrationError(
                "a calibration measures logits, and the model computes none", where=f"program {self.program.name}"
            )
        selected = self.quantize.select(self.program).formats
        check_fit(selected)
        columns = max((tensor_type(weight_node(node)).bind({})[1] for node in selected), default=1)
        text = self.text.within(columns)
        text.check(columns)
        return replace(self, text=text)

    def result(self, identity: object, on_done: OnDone) -> CalibrationResult:
        """Return the result for a compile with this identity. It is computed unless the cache has it.

        `on_done` is called with the finished calls of the program and the total, in each run over the texts. Raises
        CalibrationError or OptionError.
        """
        job = self.checked()
        folder = cache_folder("calibrated")
        key = digest_json(identity)
        path = folder / key
        with locked(folder / f"{key}.lock"):
            if not (path / _RESULT).is_file():
                made = Path(tempfile.mkdtemp(prefix=f"{key}.", dir=folder))
                try:
                    document = job._run(made, on_done)
                    (made / _RESULT).write_text(dump_json(document), encoding="utf-8")
                    shutil.rmtree(path, ignore_errors=True)  # an interrupted compile left it
                    made.rename(path)
                finally:
                    shutil.rmtree(made, ignore_errors=True)
        found: Any = parse_json((path / _RESULT).read_bytes())
        record = QuantizationRecord.model_validate(found["record"])
        return CalibrationResult(_WEIGHTS.validate_python(found["weights"]), record, open_tensors(path))

    def _run(self, folder: Path, on_done: OnDone) -> dict[str, Any]:
        """Calibrate, write the tensors into `folder`, and return the rest of the result as JSON values."""
        selected = self.quantize.select(self.program).formats
        formats = {str(weight_node(node).target): format for node, format in selected.items()}
        choices: tuple[LayerChoice, ...] = ()
        if self.options.scheme == AUTO:
            found, choices = self._within_bound(selected, folder, on_done)
        else:
            found = self._calibrated(formats, folder, on_done)
        measured = found.measured
        record = QuantizationRecord(
            scheme=self.options.scheme,
            method=self.options.method,
            text=self.text.name,
            tokens=self.text.tokens,
            held_out=measured.tokens,
            kl=measured.kl,
            perplexity=measured.perplexity,
            reference=measured.reference,
            max_kl=self.options.max_kl,
            linears=found.linears,
            layers=choices,
        )
        return {"weights": _WEIGHTS.dump_python(found.weights, mode="json"), "record": record.model_dump(mode="json")}

    def _calibrated(self, formats: Mapping[str, Format], folder: Path, on_done: OnDone) -> Calibration:
        writer = TensorWriter(folder)
        found = calibrate(
            self.program,
            formats,
            self.options.method,
            self._inputs(self.text.sequences),
            self._inputs(self.text.held_out),
            self.checkpoint.read,
            writer.store,
            on_done,
        )
        writer.flush()
        return found

    def _within_bound(
        self, selected: Mapping[fx.Node, Format], folder: Path, on_done: OnDone
    ) -> tuple[Calibration, tuple[LayerChoice, ...]]:
        """Return the calibration with the fewest bytes whose measured KL divergence is at most `max_kl`.

        The search halves the range of steps (`Sensitivity.steps`) that may be needed. The last step keeps all numbers,
        so the bound can always be kept.
        """
        bound = self.options.max_kl
        assert bound is not None
        fixed = {str(weight_node(node).target): one for node, one in selected.items() if one.name != "plain"}
        free = [node for node in selected if str(weight_node(node).target) not in fixed]
        sequences = self._inputs(self.text.sequences)
        sensitivity = find_sensitivity(self.program, free, sequences, self.checkpoint.read, on_done)
        low, high = 0, len(sensitivity.steps())
        best: tuple[int, Calibration] | None = None
        tried = sensitivity.expected_steps(bound)
        while best is None or low < high:
            attempt = Path(tempfile.mkdtemp(dir=folder))
            found = self._calibrated({**fixed, **sensitivity.chosen(tried)}, attempt, on_done)
            if found.measured.kl <= bound:
                best, high = (tried, found), tried
                _replace_files(attempt, folder)
            else:
                low = tried + 1
                if low > high:
                    raise CalibrationError(
                        f"the formats of the overrides alone change the model by a KL divergence of "
                        f"{found.measured.kl:.3g} nats",
                        expected=f"at most {bound:.3g}, the option max_kl",
                        hint="leave overrides out, or allow more",
                    )
            shutil.rmtree(attempt, ignore_errors=True)
            tried = (low + high) // 2
        return best[1], sensitivity.choices(best[0])

    def _inputs(self, sequences: tuple[tuple[int, ...], ...]) -> list[Inputs]:
        types = self.program.input_types()
        return [step_inputs(types, [sequence])[0] for sequence in sequences]


def _replace_files(source: Path, folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()
    for file in source.glob("*.safetensors"):
        file.rename(folder / file.name)
