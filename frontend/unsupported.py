"""Architectures without a definition: which one would fit the checkpoint, and code beside it that is not run."""

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

# Most models that others have built upon and renamed are Llamas: of definitions that fit alike it comes first.
_USUAL = "LlamaForCausalLM"


def name_code(config: Mapping[str, Any]) -> str:
    """The files of Python code that a config.json names, in one line; "" for none."""
    code = config.get("auto_map")
    named = code.values() if isinstance(code, dict) else ()
    modules = {one.rpartition("--")[2].rpartition(".")[0] for one in named if isinstance(one, str)}
    return name_files(f"{module}.py" for module in modules if module) if modules - {""} else ""


def refuse_unsupported(config: Mapping[str, Any], folder: str | Path) -> None:
    """Raises ConfigError where no definition has the architecture that a config.json names. It says which definitions
    its other fields and the tensors, where they are there, would fit."""
    source = str(Path(folder) / CONFIG)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str) or names[0] in ARCHITECTURES:
        return
    try:
        architecture_of(config, source)
    except ConfigError as error:
        hint = "; ".join(filter(None, (error.hint, _hint(config, source, _tensors(folder)))))
        if code := name_code(config):
            hint = f"it comes with code of its own ({code}), and Ingot runs none; {hint}"
        raise ConfigError(error.what, where=error.where, expected=error.expected, hint=hint) from None


def _tensors(folder: str | Path) -> Mapping[str, TensorInfo]:
    try:
        return read_tensors(Path(folder))
    except CheckpointError:  # malformed, or still on the hub
        return {}


def _hint(config: Mapping[str, Any], source: str, tensors: Mapping[str, TensorInfo]) -> str:
    """What to do; "" where nothing fits."""
    model_type = config.get("model_type")
    fits = sorted(_fits(config, source), key=lambda one: (one.family != model_type, one.architecture != _USUAL))
    if not tensors:
        named = [one.architecture for one in fits if one.family == model_type]
        found = f"its model_type '{model_type}' is that of '{named[0]}', which takes its configuration" if named else ""
    else:
        named = [one.architecture for one in fits if _fit(one, tensors)]
        found = f"the configuration and all {len(tensors)} tensors, by name and shape, fit {', '.join(named)}"
    if not named:
        return ""
    return (
        f"{found}. What its authors compute with them may be something else, so it is not taken for that. Where they "
        f'say that it is the same model, write "architectures": ["{named[0]}"] into config.json'
    )


def _fits(config: Mapping[str, Any], source: str) -> Iterator[ModelSpec]:
    """What the definitions that take the configuration read from it."""
    for name in ARCHITECTURES:
        with contextlib.suppress(ConfigError):
            yield read_spec({**config, "architectures": [name]}, source)


def _fit(spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> bool:
    """Every tensor is one of the definition's, of its shape, and every one of those is there."""
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
