"""Checks that a plan can run: every type parses, every name is defined before use, every call fits its callee.

The compiled code of a region does not check its tensors. So this module compares its signature once with the types that
the plan promises, and the executor compares those types with the tensors.
"""

from collections.abc import Callable, Iterable, Mapping

from ingot.backends.table import BACKENDS, find_entry
from ingot.ir.artifact.plan import PLAN_FILE, Argument, BucketPlan, DType, Instruction, Plan, PlanFile, Plans, Ref
from ingot.ir.cache.memory import planned_states, state_memory
from ingot.ir.errors import ArtifactError, IngotError, ParseError, VerifyError
from ingot.ir.features import FEATURES, Ending, find_ending, find_input, step_inputs
from ingot.ir.mesh import Mesh, mesh_text, world_size
from ingot.ir.ops import OPS
from ingot.ir.ops.aten import ATEN
from ingot.ir.outputs import may_stand_for
from ingot.ir.parse import parse_ending, parse_type
from ingot.ir.plugins import load_user_ops
from ingot.ir.types import DTYPES, LOADED_DIMS

# Dims known when an artifact is loaded; the others come with each step.
LOAD_DIMS = frozenset({"R", *LOADED_DIMS})
_MAIN = "main"


def check_positions(file: PlanFile, mesh: Mesh) -> None:
    """Raise ArtifactError if a plan file does not have exactly one plan for each rank of `mesh`. A mesh is the
    arrangement of devices, such as tp=2, and a rank is one device in it."""
    if len(file.ranks) != world_size(mesh):
        on = f" on the mesh {mesh_text(mesh)}" if mesh else ""
        raise _error(f"it has positions for {len(file.ranks)} ranks", "ranks", f"{world_size(mesh)}{on}")
    for rank in range(len(file.ranks)):
        file.of(rank)
    if unused := [name for name in file.positions if name not in file.ranks]:
        raise _error(f"no rank has the position '{unused[0]}'", "positions", ", ".join(dict.fromkeys(file.ranks)))


def check_plans(plans: Plans) -> None:
    """Raise ArtifactError if an executor cannot run the plans of an artifact. There is one plan for each program, such
    as the model and its draft model.

    The plans must also agree on each weight, state or executable that they share. The error says where in plan.json.
    """
    if _MAIN not in plans.plans:
        raise _error("it has no entry 'main'", "plans", ", ".join(["main", *plans.plans]))
    if plans.round[:1] != (_MAIN,) or any(name not in plans.plans for name in plans.round):
        raise _error(
            f"a step runs {', '.join(plans.round) or 'nothing'}", "round", f"main, then {', '.join(plans.plans)}"
        )
    shared: dict[tuple[str, str], object] = {}
    for entry, plan in plans.plans.items():
        if plan.entry != entry:
            raise _error(f"the plan is for the entry '{plan.entry}'", f"plans, {entry}", f"a plan for '{entry}'")
        for kind in ("params", "states", "executables", "libraries"):
            for name, found in getattr(plan, kind).items():
                if (other := shared.setdefault((kind, name), found)) != found:
                    place = f"plans, {entry}, {kind}, {name}"
                    raise _error(f"it is {found}"[:200], place, f"{other}, as in another entry"[:200])
    for plan in plans.plans.values():
        check_plan(plan)


def check_plan(plan: Plan) -> None:
    """Raise ArtifactError if an executor cannot run the plan, because a type, name or call in it is wrong. The error
    says where in plan.json."""
    _check_names([*plan.params, *plan.states, *plan.inputs], PLAN_FILE)
    ending, features = _ending(plan)
    for name, text in plan.inputs.items():
        if (declared := find_input(name)) is None or not declared.known:
            known = ", ".join(one.name for one in step_inputs().values() if one.known)
            raise _error(f"no feature declares the input '{name}'", "inputs", known)
        if text != str(declared.type):
            raise _error(f"the input '{name}' is {text}", "inputs", str(declared.type))
    # Without the input, the plan would silently ignore a request's parameter. The last pipeline stage has the ending.
    last = plan.stage is None or plan.stage[0] == plan.stage[1] - 1
    for declared in (one for name in features for one in FEATURES[name].inputs if one.known):
        if last and declared.name not in plan.inputs:
            raise _error(f"the input '{declared.name}' is missing", "inputs", str(declared.type))
    # The inputs of a pipeline stage need not show all sizes of a step; the other stages send values of any size.
    step_dims = _dims(plan.inputs.values()) if plan.stage is None else frozenset(plan.dims)
    if "T" in step_dims and "T_tp" in plan.dims:
        step_dims |= {"T_tp"}  # follows from T and the mesh
    for name, text in plan.params.items():
        _check_type(text, f"params, {name}", frozenset())
    for name, state in plan.states.items():
        _check_type(state.type, f"states, {name}", LOAD_DIMS)
    for name, text in plan.outputs.items():
        _check_type(text, f"outputs, {name}", step_dims)
    for one in ending.outputs if last else ():
        if one.name not in plan.outputs or not one.fits(parse_type(plan.outputs[one.name])):
            raise _error(
                f"the output '{one.name}' is {plan.outputs.get(one.name, 'missing')}", "outputs", str(one.type)
            )
    for key, executable in plan.executables.items():
        if executable.id != key:
            raise _error(f"an executable's id is '{executable.id}'", f"executables, {key}", "the key itself")
        if not executable.files:
            raise _error("an executable has no files", f"executables, {key}", "at least one")
    for name, library in plan.libraries.items():
        if library.backend != name or not library.files:
            raise _error(f"a library is of '{library.backend}'", f"libraries, {name}", "its backend, with its files")
    if not plan.buckets:
        raise _error("the plan has no bucket class", "buckets", "at least one")
    for bucket in plan.buckets:
        _check_bucket(plan, bucket, step_dims)
    _check_memory(plan)


def _ending(plan: Plan) -> tuple[Ending, tuple[str, ...]]:
    """Return the ending of a plan, and the names of the features that it uses. The ending is the plan's last part, such
    as `sample`; a feature is, for example, "penalties". Raises ArtifactError if this version of Ingot does not know one
    of them."""
    try:
        use = parse_ending(plan.ending)
        if odd := [name for name in use.features if name not in FEATURES]:
            raise _error(f"the ending has the feature '{odd[0]}'", "ending", ", ".join(FEATURES))
        ending = find_ending(use.name)
        if odd := [name for name, _ in use.attributes if name not in ending.attributes]:
            known = ", ".join(ending.attributes) or "none"
            raise _error(f"the ending '{use.name}' has the attribute '{odd[0]}'", "ending", known)
        if odd := [name for name, value in use.attributes if type(value) is not type(ending.attributes[name])]:
            raise _error(f"the attribute '{odd[0]}' is of another type", "ending", repr(ending.attributes[odd[0]]))
        return ending, (*ending.features, *use.features)
    except ParseError as error:
        what = f"the ending '{plan.ending[:80]}' does not parse: {error.what}"
        raise _error(what, "ending", error.expected) from None
    except VerifyError as error:
        raise _error(error.what, "ending", error.expected) from None


def _check_memory(plan: Plan) -> None:
    """Raise ArtifactError if the memory sizes that the plan declares are wrong. The size of the KV cache is computed
    from them. They must match the types of the plan's states."""
    states = planned_states([plan])
    for name, one in states.items():
        if odd := [size for size in one.type.shape if isinstance(size, str) and size not in {*one.sizes, *LOADED_DIMS}]:
            raise _error(f"the state '{name}' has the dim {odd[0]}", "dims", f"a range for {odd[0]}")
    kept, slot, groups = state_memory(states)
    if plan.memory.states != kept:
        raise _error(f"states is {plan.memory.states}", "memory", f"{kept}, by its states and dims")
    if plan.memory.slot != slot:
        raise _error(f"slot is {plan.memory.slot}", "memory", f"{slot}, by its states and dims")
    for name in dict.fromkeys((*groups, *plan.memory.groups)):
        found, wanted = plan.memory.groups.get(name), groups.get(name)
        if found != wanted:
            raise _error(f"the group '{name}' is {found}", "memory", f"{wanted}, by its states and dims")
    for bucket in plan.buckets:
        if bucket.memory.peak >= len(bucket.instructions):
            where = f"bucket class {bucket.bucket.name}, memory"
            raise _error(f"the peak is at instruction {bucket.memory.peak}", where, f"below {len(bucket.instructions)}")


def _check_bucket(plan: Plan, bucket: BucketPlan, step_dims: frozenset[str]) -> None:
    where = f"bucket class {bucket.bucket.name}"
    if bucket.ending > len(bucket.instructions):
        raise _error(f"the ending begins at instruction {bucket.ending}", where, f"at most {len(bucket.instructions)}")
    # An output may have the name of an input. It then replaces the input in the executor's table.
    _check_names([*plan.params, *plan.states, *(plan.inputs.keys() - plan.outputs.keys()), *bucket.values], where)
    for name, value in bucket.values.items():
        _check_type(value.type, f"{where}, values, {name}", step_dims | LOAD_DIMS)
    live = {**plan.inputs, **plan.params, **{name: state.type for name, state in plan.states.items()}}  # with types
    made: set[str] = set()
    received = _received(plan, bucket, where)
    for number, instruction in enumerate(bucket.instructions):
        for name in received.pop(number, ()):
            made.add(name)
            live[name] = bucket.values[name].type
        place = f"{where}, instruction {number} ({instruction.target[:80]})"
        for name in _reads(instruction):
            if name not in live:
                raise _error(f"'{name}' is read", place, "a value that was made before and not freed")
        if absent := [name for name in instruction.updates if name not in plan.states]:
            raise _error(f"'{absent[0]}' is updated", place, "a state")
        results = {name: bucket.values[name].type for name in instruction.results if name in bucket.values}
        if odd := [name for name in instruction.results if name and (name not in results or name in made)]:
            raise _error(f"the result is '{odd[0]}'", place, "one of the bucket's values, made once")
        if instruction.target.startswith("exe."):
            _check_executable(plan, instruction, live, results, place)
        else:
            _check_op(plan, instruction, place)
            if instruction.executable is not None:
                _check_compiled(plan, instruction, live, results, place)
        made.update(results)
        live.update(results)
        for name in instruction.frees:
            if name not in made or live.pop(name, None) is None:
                raise _error(f"'{name}' is freed", place, "a value that was made before and not freed")
    for name in received.pop(len(bucket.instructions), ()):  # a stage may have no instruction after the model
        made.add(name)
        live[name] = bucket.values[name].type
    for name, text in plan.outputs.items():
        if name not in made or name not in live or not may_stand_for(parse_type(live[name]), parse_type(text), name):
            raise _error(f"the output '{name}' is {live.get(name, 'not there')}", where, f"{text}, alive at the end")


def _received(plan: Plan, bucket: BucketPlan, where: str) -> dict[int, list[str]]:
    """Return the names of the values that a pipeline stage receives, by the instruction before which they arrive. Raise
    ArtifactError if they, or those that it sends, do not fit the plan."""
    if bucket.transfers is None:
        return {}
    index, count = plan.stage or (0, 1)
    for one in (*bucket.transfers.received, *bucket.transfers.sent):
        if one.name not in bucket.values or one.stage >= count or one.stage == index:
            raise _error(f"'{one.name}' is shared with stage {one.stage}", where, f"a value, and one of {count} stages")
    names = [one.name for one in bucket.transfers.received]
    if odd := [name for name, one in bucket.values.items() if (one.buffer == "received") is not (name in names)]:
        raise _error(f"the value '{odd[0]}' is {bucket.values[odd[0]].buffer}", where, "received if it is listed so")
    found: dict[int, list[str]] = {}
    for one in bucket.transfers.received:
        found.setdefault(0 if one.stage < index else bucket.ending, []).append(one.name)
    return found


def _check_executable(
    plan: Plan, instruction: Instruction, live: Mapping[str, str], results: Mapping[str, str], place: str
) -> None:
    executable = plan.executables.get(instruction.target.removeprefix("exe."))
    if executable is None:
        raise _error("the executable is unknown", place, ", ".join(plan.executables) or "there is none")
    if instruction.backend != executable.backend:
        raise _error(f"the backend is '{instruction.backend}'", place, executable.backend)
    given = tuple(live[arg.ref] if isinstance(arg, Ref) else repr(arg) for arg in instruction.args)
    if given != executable.inputs or instruction.kwargs or instruction.updates:
        raise _error(
            f"it is called with ({', '.join(given)})", place, f"({', '.join(executable.inputs)}), the signature"
        )
    taken = tuple(results[name] if name else None for name in instruction.results)
    if len(taken) != len(executable.outputs) or any(
        found not in (None, wanted) for found, wanted in zip(taken, executable.outputs, strict=True)
    ):
        raise _error(
            f"it yields ({', '.join(map(str, taken))})", place, f"({', '.join(executable.outputs)}), the signature"
        )


def _check_compiled(
    plan: Plan, instruction: Instruction, live: Mapping[str, str], results: Mapping[str, str], place: str
) -> None:
    """Raise ArtifactError if a call passes tensors of other types than its executable was compiled for.

    live      name -> type of each value that exists before the call
    results   name -> type of each result of the call
    place     names the instruction in the error
    """
    executable = plan.executables.get(str(instruction.executable))
    if executable is None or executable.backend != instruction.backend:
        found = "unknown" if executable is None else f"of '{executable.backend}'"
        raise _error(f"its executable is {found}", place, f"one of the backend '{instruction.backend}'")
    held = {**live, **{name: state.type for name, state in plan.states.items()}}
    given = tuple(held[arg.ref] for arg in instruction.args if isinstance(arg, Ref))
    if given != executable.inputs:
        raise _error(f"its tensors are ({', '.join(given)})", place, f"({', '.join(executable.inputs)})")
    taken = tuple(results[name] if name else None for name in instruction.results)
    if len(taken) != len(executable.outputs) or any(
        found not in (None, wanted) for found, wanted in zip(taken, executable.outputs, strict=True)
    ):
        raise _error(f"it yields ({', '.join(map(str, taken))})", place, f"({', '.join(executable.outputs)})")


def _check_op(plan: Plan, instruction: Instruction, place: str) -> None:
    backends = (*(name for name, entry in BACKENDS.items() if entry.find_op or entry.collectives), *plan.libraries)
    if instruction.executable is None and instruction.backend not in backends and not _finds_ops(instruction.backend):
        raise _error(f"the backend is '{instruction.backend}'", place, " or ".join(backends))
    for name, argument in instruction.kwargs.items():
        if isinstance(argument, Ref):
            raise _error(f"the argument '{name}' refers to '{argument.ref}'", place, "a constant")
    for argument in (*instruction.args, *instruction.kwargs.values()):
        if isinstance(argument, DType) and argument.dtype not in DTYPES:
            raise _error(f"the dtype is '{argument.dtype}'", place, ", ".join(DTYPES))
    if instruction.target in ATEN:
        count, results = ATEN[instruction.target].given, 1
        if len(instruction.args) != count or instruction.kwargs or instruction.updates:
            raise _error(f"it has {len(instruction.args)} arguments", place, str(count))
    else:
        results = _check_arguments(instruction, place)
    if len(instruction.results) != results:
        raise _error(f"it yields {len(instruction.results)} values", place, str(results))


def _finds_ops(backend: str) -> bool:
    """Return whether a backend of another package has functions of ops that need no build."""
    entry = find_entry(backend)
    return entry is not None and entry.find_op is not None


def _check_arguments(instruction: Instruction, place: str) -> int:
    """Check a call's arguments against the signature of its op, and return how many values the op returns. Raises
    ArtifactError if they do not fit; `place` names the instruction in the error."""
    if instruction.target.startswith("ingot.") and instruction.target.removeprefix("ingot.") not in OPS:
        load_user_ops()
    op = OPS.get(instruction.target.removeprefix("ingot.")) if instruction.target.startswith("ingot.") else None
    if op is None:
        raise _error("the op is unknown", place, ", ".join(OPS))
    schema = op.overload._schema
    try:
        bound = op.bind(instruction.args, instruction.kwargs)
    except TypeError as error:
        raise _error(f"its arguments do not fit: {error}", place, str(schema)) from None
    for parameter in schema.arguments:
        if parameter.name in bound and not _fits(bound[parameter.name], str(parameter.type)):
            raise _error(
                f"the argument '{parameter.name}' is {bound[parameter.name]!r:.80}", place, f"a {parameter.type}"
            )
    updates = tuple(bound[name].ref for name in op.states)
    if instruction.updates != updates:
        raise _error(f"it updates ({', '.join(instruction.updates)})", place, f"({', '.join(updates)})")
    return len(schema.returns) - len(op.states)


_FITS: Mapping[str, Callable[[Argument], bool]] = {
    "Tensor": lambda arg: isinstance(arg, Ref),
    "Optional[Tensor]": lambda arg: arg is None or isinstance(arg, Ref),
    "int": lambda arg: isinstance(arg, int | DType) and not isinstance(arg, bool),  # a dtype is an int in a schema
    "float": lambda arg: isinstance(arg, int | float) and not isinstance(arg, bool),
    "bool": lambda arg: isinstance(arg, bool),
}


def _fits(argument: Argument, kind: str) -> bool:
    return _FITS[kind](argument) if kind in _FITS else not isinstance(argument, Ref)


def _reads(instruction: Instruction) -> Iterable[str]:
    return (arg.ref for arg in (*instruction.args, *instruction.kwargs.values()) if isinstance(arg, Ref))


def _check_names(names: list[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if not name or name in seen:
            raise _error(f"the name '{name}' is used twice", where, "unique names")
        seen.add(name)


def _check_type(text: str, where: str, dims: frozenset[str]) -> None:
    try:
        found = parse_type(text)
    except IngotError as error:
        raise _error(f"the type '{text[:80]}' does not parse: {error.what}", where, error.expected) from None
    if odd := [size for size in found.shape if isinstance(size, str) and size not in dims]:
        raise _error(f"the type {text} has the dim {odd[0]}", where, ", ".join(sorted(dims)) or "no dim")


def _dims(types: Iterable[str]) -> frozenset[str]:
    return frozenset(size for text in types for size in parse_type(text).shape if isinstance(size, str))


def _error(what: str, where: str, expected: str) -> ArtifactError:
    return ArtifactError(
        f"the plan cannot be run: {what}",
        where=f"{PLAN_FILE}, {where}",
        expected=expected,
        hint="compile the model again",
    )
