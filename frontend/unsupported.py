"""Refuse architectures without a definition. The error names definitions that fit, and code of the checkpoint that
Ingot does not run."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ingot.frontend.checkpoint_files import CONFIG, name_files
from ingot.frontend.respelling import Respelling, find_respelling
from ingot.frontend.safetensors_header import TensorInfo
from ingot.frontend.tensor_files import read_tensors
from ingot.frontend.totality import expected_shapes, unfit_tensors
from ingot.frontend.trace import build, needed_tensors
from ingot.ir.errors import CheckpointError, ConfigError
from ingot.ir.program import ModelSpec
from ingot.models.architectures import ARCHITECTURES, architecture_of, read_spec
from ingot.models.params import declaration

# Most renamed derivatives of models are Llamas, so of several definitions that fit, this one comes first.
_USUAL = "LlamaForCausalLM"


def name_code(config: Mapping[str, Any]) -> str:
    """Return the Python files that the `auto_map` of a config.json names, as one line; "" if there are none.

    They hold the checkpoint's own model code.
    """
    code = config.get("auto_map")
    named = code.values() if isinstance(code, dict) else ()
    modules = {one.rpartition("--")[2].rpartition(".")[0] for one in named if isinstance(one, str)}
    return name_files(f"{module}.py" for module in modules if module) if modules - {""} else ""


def refuse_unsupported(config: Mapping[str, Any], folder: str | Path) -> None:
    """Raise ConfigError if the architecture in a config.json is not supported.

    The error suggests supported architectures for which the config.json is valid. If `folder` has weights, these must
    fit the architecture too.
    """
    source = str(Path(folder) / CONFIG)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or names[0] in ARCHITECTURES:
        return
    try:
        architecture_of(config, source)
    except ConfigError as error:
        hint = "; ".join(filter(None, (error.hint, _hint(config, source, _tensors(folder)))))
        if code := name_code(config):
            hint = f"the checkpoint has its own code ({code}), which Ingot does not run; {hint}"
        raise ConfigError(error.what, where=error.where, expected=error.expected, hint=hint) from None


def _tensors(folder: str | Path) -> Mapping[str, TensorInfo]:
    try:
        return read_tensors(Path(folder))
    except CheckpointError:  # malformed, or still on the hub
        return {}


def _hint(config: Mapping[str, Any], source: str, tensors: Mapping[str, TensorInfo]) -> str:
    """Return a hint for the error about an unsupported architecture: which supported ones fit; "" if none does.

    An architecture fits if it accepts the config.json, and if its model needs `tensors` by name and shape. Without
    tensors, it must have the same `model_type`. `source` names the config.json in errors.
    """
    model_type = config.get("model_type")
    fits = sorted(_fits(config, source), key=lambda one: (one.family != model_type, one.architecture != _USUAL))
    if not tensors:
        named = [one.architecture for one in fits if one.family == model_type]
        found = f"'{named[0]}' has its model_type '{model_type}' and accepts its configuration" if named else ""
    else:
        named = [one.architecture for one in fits if _fit(one, tensors)]
        found = f"the configuration and all {len(tensors)} tensors, by name and shape, fit {', '.join(named)}"
    if not named:
        return ""
    return (
        f"{found}. The authors' model may still compute something else, so Ingot does not assume that it is the same. "
        f'If they say that it is, write "architectures": ["{named[0]}"] into config.json'
    )


def _fits(config: Mapping[str, Any], source: str) -> Iterator[ModelSpec]:
    """Yield the spec of the model for each supported architecture that accepts the config.json.

    `source` names the config.json in errors.
    """
    for name in ARCHITECTURES:
        with contextlib.suppress(ConfigError):
            yield read_spec({**config, "architectures": [name]}, source)


def _fit(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether tensors of a checkpoint fit a model: none is missing, extra, or of a wrong shape or dtype."""
    definition = ARCHITECTURES[spec.architecture].definition
    optional = definition.optional_prefix(spec.dims)
    _, entries = build(spec, spec.max_position)
    names = find_respelling(needed_tensors(entries.values()), tensors, optional).names
    made = [
        (one.recipe.renamed(lambda name: names.get(name, name)), tuple(parameter.shape))
        for entry in entries.values()
        for parameter in entry.module.parameters()
        if (one := declaration(parameter)) is not None
    ]
    consumed = frozenset().union(*(recipe.sources() for recipe, _ in made))
    spelled = Respelling.of(names, optional).spelled
    return not unfit_tensors(tensors, consumed, definition.ignored(spec.dims), expected_shapes(made), spelled=spelled)
