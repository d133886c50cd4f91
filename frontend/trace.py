"""Trace a ModelSpec to a Model: run the definition once on the meta device, without reading weights."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ingot.frontend.respelling import find_respelling
from ingot.frontend.tracer import Tracer
from ingot.ir.errors import ConfigError, InternalError, VerifyError
from ingot.ir.features import find_ending, find_feature, find_input, step_inputs
from ingot.ir.program import Model, ModelSpec, ParamSpec, Program, Stage
from ingot.ir.recipe import Recipe, cast
from ingot.ir.types import DTYPES, Dim, TensorType
from ingot.models.architectures import ARCHITECTURES, Entry
from ingot.models.params import declaration


@dataclass(frozen=True)
class Limits:
    """The largest steps that the model must run.

    max_seq_len   most tokens of a sequence
    max_batch     most sequences in a step
    max_tokens    most tokens in a step
    """

    max_seq_len: int
    max_batch: int
    max_tokens: int


def trace(spec: ModelSpec, limits: Limits, stored: dict[str, torch.dtype] | None = None) -> Model:
    """Trace the modules of a model, and return a Model with one program for each, `main` first.

    A draft model is an example of a further module. `stored` maps tensor names of the checkpoint to dtypes. If a
    parameter has another dtype than its stored tensor, a cast is added to its recipe (how it is made).
    """
    definition = ARCHITECTURES[spec.architecture].definition
    module, entries = build(spec, limits.max_seq_len)
    if unknown := [name for name in definition.round if name not in entries]:
        raise InternalError(
            f"a step of {spec.family} runs the unknown entry '{unknown[0]}'", expected=", ".join(entries)
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    own = [name for name in stored or () if ":" not in name]
    respelling = find_respelling(needed_tensors(entries.values()), own, definition.optional_prefix(spec.dims))
    programs = {
        name: _Entry(spec.family, name, entry, limits, respelling.names).program(names, stored or {})
        for name, entry in entries.items()
    }
    expected = {name: entry.expected_matches for name, entry in entries.items()}
    return Model(spec, programs, expected, definition.round, respelling.names)


def build(spec: ModelSpec, max_seq_len: int) -> tuple[nn.Module, dict[str, Entry]]:
    """Build the `nn.Module` of a model on the meta device.

    Return this module, and all modules to trace: program name -> Entry. This module is traced as the program `main`. A
    draft model is an example of a further one.
    """
    definition = ARCHITECTURES[spec.architecture].definition
    with torch.device("meta"):
        module = definition.build(spec.dims, spec.dtype, max_seq_len)
        return module, {"main": Entry(module), **definition.more_entries(spec.dims, module)}


def needed_tensors(entries: Iterable[Entry]) -> frozenset[str]:
    """Return the names of the checkpoint tensors from which the parameters of these entries are made.

    An entry is a module to trace to one program. Tensors of further checkpoints, named "ALIAS:NAME", are left out.
    """
    declared = [declaration(parameter) for entry in entries for parameter in entry.module.parameters()]
    names = frozenset().union(*(one.recipe.sources() for one in declared if one is not None))
    return frozenset(name for name in names if ":" not in name)


@dataclass(frozen=True)
class _Entry:
    """An entry to trace: a module that becomes one program of the model, such as `main`.

    family      name of the model family, for messages
    name        name of the program
    respelled   tensor name in the definition -> tensor name in the checkpoint, for names that differ
    """

    family: str
    name: str
    entry: Entry
    limits: Limits
    respelled: Mapping[str, str]

    @property
    def where(self) -> str:
        """Return the location for error messages: model family, program name, and where the module's class is."""
        module = type(self.entry.module)
        try:
            line = f", {inspect.getsourcefile(module)}:{inspect.getsourcelines(module)[1]}"
        except (OSError, TypeError):  # a class without a source file
            line = ""
        return f"definition {self.family}, entry {self.name}{line}"

    def param(self, called: str, parameter: nn.Parameter, stored: Mapping[str, torch.dtype]) -> ParamSpec:
        """Return the type, recipe and split over a mesh of one parameter of the module.

        `called` is the parameter's name in the module. `stored` maps checkpoint tensor names to dtypes. Raises
        ConfigError if the parameter has no recipe, which says how it is made from checkpoint tensors.
        """
        declared = declaration(parameter)
        if declared is None:
            raise ConfigError(
                f"the parameter '{called}' has no recipe",
                where=self.where,
                expected="parameters that ingot.models.params.parameter makes",
            )
        made, recipe = TensorType(parameter.dtype, tuple(parameter.shape)), declared.recipe
        if self.respelled:
            recipe = recipe.renamed(lambda name: self.respelled.get(name, name))
        return ParamSpec(made, _in_dtype(recipe, parameter.dtype, stored), split=declared.split)

    def program(self, names: Mapping[int, str], stored: Mapping[str, torch.dtype]) -> Program:
        """Trace the module and return its program.

        names    `id()` of each parameter of the model -> its name in programs. Any other parameter is named
                 "ENTRY.PARAMETER".
        stored   checkpoint tensor name -> dtype
        """
        module, inputs, outputs = self.entry.module, self.entry.inputs, self.entry.outputs
        self._check()
        bounds = {"T": self.limits.max_tokens, "L": self.limits.max_tokens, "B": self.limits.max_batch}
        used = dict.fromkeys(size for one in inputs.values() for size in one.shape if isinstance(size, str))
        dims = {name: Dim(name, 1, bounds[name]) for name in used}
        program = Program(self.name, Stage.TRACED, dims, self.entry.ending)
        tracer = Tracer(program, module, f"definition {self.family}, entry {self.name}")
        for called, parameter in module.named_parameters():
            name = names.get(id(parameter), f"{self.name}.{called}")
            tracer.add_param(parameter, name, self.param(called, parameter, stored))
        given = tracer.run(inputs)
        if len(given) != len(outputs):
            raise ConfigError(
                f"the module returns {len(given)} tensors, and {len(outputs)} outputs are declared",
                where=self.where,
                expected=f"one for each of {', '.join(outputs)}, in order",
            )
        program.set_outputs(dict(zip(outputs, given, strict=True)))
        program.remove_unused_params()  # an entry may use only a part of the model
        return program

    def _check(self) -> None:
        """Raise ConfigError if the declared inputs, outputs or ending of the module are wrong.

        The ending is the last part of the program, such as sampling. The host, or a call before the program, must fill
        each input. The module must return the outputs that the ending reads.
        """
        use = self.entry.ending
        try:
            ending = find_ending(use.name)
            features = [find_feature(name) for name in (*ending.features, *use.features)]
        except VerifyError as error:
            raise ConfigError(error.what, where=self.where, expected=error.expected) from None
        filled = {name for feature in features for call in feature.before for name in call.results}
        for name, value_type in self.entry.inputs.items():
            declared = find_input(name)
            if declared is None and name not in filled:
                raise ConfigError(
                    f"nothing fills the input '{name}'",
                    where=self.where,
                    expected="a step input of a feature, or a value that a feature of the ending reads",
                    hint=f"step inputs: {', '.join(step_inputs())}",
                )
            if declared is not None and declared.type != value_type:
                raise ConfigError(
                    f"the input '{name}' is {value_type}", where=self.where, expected=f"{declared.type}, as declared"
                )
        if missing := [name for name in ending.needs if name not in self.entry.outputs]:
            raise ConfigError(
                f"the ending '{ending.name}' needs the output '{missing[0]}'",
                where=self.where,
                expected=f"an entry that returns {', '.join(ending.needs)}; it returns {', '.join(self.entry.outputs)}",
            )


def _in_dtype(recipe: Recipe, dtype: torch.dtype, stored: Mapping[str, torch.dtype]) -> Recipe:
    return recipe if _dtype_of(recipe, dtype, stored) == dtype else cast(recipe, dtype)


def _dtype_of(recipe: Recipe, default: torch.dtype, stored: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return the dtype of the tensor that a recipe makes. A recipe is a chain of steps from checkpoint tensors.

    `stored` maps checkpoint tensor names to dtypes. The result is `default` for a recipe that reads no tensor, or
    only tensors that `stored` does not have.
    """
    if recipe.step == "source":
        return stored.get(str(recipe.attr("name")), default)
    if recipe.step == "cast":
        return DTYPES[str(recipe.attr("dtype"))]
    return _dtype_of(recipe.inputs[0], default, stored) if recipe.inputs else default
