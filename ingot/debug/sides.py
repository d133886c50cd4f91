"""Read the programs that `ingot diff` compares: an artifact, a step of its compile, or a file of programs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.ir.diff.flat import flatten
from ingot.ir.errors import OptionError, ParseError, VerifyError
from ingot.ir.parse import parse_programs
from ingot.ir.program import Program, Stage
from ingot.runtime.loading.artifact import Artifact, open_artifact

ProgramKey = tuple[str, str | None]  # entry and bucket class (None before the split into classes)


@dataclass(frozen=True)
class Side:
    """One of the two things that `ingot diff` compares: an artifact, a step of its compile, or a file of programs.

    `label` names it in messages. `programs` maps (entry, bucket class) to programs. `artifact` is None unless a whole
    artifact is compared.
    """

    label: str
    programs: Mapping[ProgramKey, Program]
    artifact: Artifact | None = None


def read_side(text: str, variant: str | None = None) -> Side:
    """Read an argument of `ingot diff` and load the programs that it names.

    The argument is `ARTIFACT`, `ARTIFACT:PASS`, `ARTIFACT:STAGE`, or a file of programs. PASS selects the programs
    after that pass, and STAGE the programs at the end of that stage. `@` and a name may follow, as in
    `ARTIFACT:cse@decode`. The name selects a bucket class, an entry or a stage. `variant` is the variant of a fat
    artifact; None: this machine's. A file has none. Raises IngotError if the argument cannot be read.
    """
    path = Path(text)
    if path.is_dir():
        artifact = open_artifact(path, variant=variant)
        return Side(text, _by_key(_parsed(artifact.read_text("program.ir"), text)), artifact)
    if path.is_file():
        return Side(text, _by_key(_parsed(_read_file(path), text)))
    folder, colon, step = text.rpartition(":")
    if not colon or not Path(folder).is_dir():
        raise OptionError(
            f"'{text}' is neither an artifact nor a file of programs",
            expected="NAME.ingot, NAME.ingot:PASS, NAME.ingot:PASS@BUCKET, NAME.ingot:STAGE or NAME.ir",
        )
    name, _, which = step.partition("@")
    texts = _step_texts(open_artifact(folder, variant=variant), name)
    found = [
        (key, program)
        for key, one in texts.items()
        for program in _parsed(one, f"{text}, {key}")
        if _is_meant(program, key, which)
    ]
    if not found:
        raise OptionError(
            f"no program '{which}' after {name}", where=text, expected=", ".join(filter(None, texts)) or name
        )
    _check_one_step(text, name, which, found)
    return Side(text, _by_key([program for _, program in found]))


def _check_one_step(text: str, name: str, which: str, found: list[tuple[str, Program]]) -> None:
    """Raise OptionError if the pass `name` ran several times on one program, in different stages of the pipeline.

    `text` is the argument of `ingot diff`, and the error lists what to write instead. `which` is the part of the
    argument after the `@`. `found` has the titles and programs that it selects.
    """
    keys: dict[ProgramKey, list[str]] = {}
    for key, program in found:
        keys.setdefault(_key(program), []).append(key)
    if several := next((some for some in keys.values() if len(some) > 1), None):
        steps = [f"{name}@" + "@".join(filter(None, (which, key.split()[-1]))) for key in several]
        raise OptionError(
            f"'{name}' ran {len(several)} times, on the way to different stages",
            where=text,
            expected=" or ".join(steps),
        )


def _step_texts(artifact: Artifact, name: str) -> dict[str, str]:
    """Return the texts of an artifact's programs after a pass or at the end of a stage.

    `name` is the name of the pass or stage. Keys are bucket classes (ranges of step sizes), or entries such as `main`.
    """
    from ingot.cli.views.programs import texts_of_pass, texts_of_stage

    try:
        return texts_of_stage(artifact, name) if name.upper() in Stage.__members__ else texts_of_pass(artifact, name)
    except OptionError as error:
        raise OptionError(error.what, where=str(artifact.folder), expected=error.expected, hint=error.hint) from None


def _is_meant(program: Program, key: str, which: str) -> bool:
    known = {*key.replace("@", " ").split(), program.name, program.bucket.name if program.bucket else ""}
    return all(part in known for part in filter(None, which.split("@")))


def _read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path} cannot be read: {error}", expected="a file of programs in text form") from error


def _parsed(text: str, where: str) -> list[Program]:
    try:
        programs = parse_programs(text)
        for program in programs:
            flatten(program)  # report here, with the file's name, programs that no diff could read
    except (ParseError, VerifyError) as error:
        place = ", ".join(filter(None, (where, error.where)))
        raise ParseError(error.what, where=place, expected=error.expected, hint=error.hint) from error
    return programs


def _by_key(programs: list[Program]) -> dict[ProgramKey, Program]:
    return {_key(program): program for program in programs}


def _key(program: Program) -> ProgramKey:
    return program.name, program.bucket.name if program.bucket else None
