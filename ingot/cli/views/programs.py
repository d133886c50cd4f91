"""Print an artifact's program: the final one, the one at the end of a stage, or the one after a pass."""

from collections.abc import Mapping

from ingot.cli.console import print_program_text
from ingot.cli.views.filter import Filter, Shown, excerpt
from ingot.cli.views.lines import read_programs
from ingot.ir.artifact.trace import HOW_TO_GET, TraceEntry
from ingot.ir.errors import ArtifactError, OptionError
from ingot.runtime.loading.artifact import Artifact

FINAL = "program.ir"
_TRACED = "TRACED"  # the frontend's result: no pass leads to it
_PLANNED = "PLANNED"  # the last stage of every pipeline


def final_texts(artifact: Artifact) -> dict[str, str]:
    """Return the text of the final programs as a dict with one item. Its key is "".

    The text holds the programs of all entries and bucket classes, one after another.
    """
    return {"": artifact.read_text(FINAL)}


def texts_of_pass(artifact: Artifact, name: str) -> dict[str, str]:
    """Return the text of each program after the pass `name`.

    Keys are bucket classes (ranges of step sizes), such as "decode". The key is "" if the pass ran once for all
    classes. If the pass ran in several stages, the key also has the stage. Raises OptionError if the pass did not run.
    """
    try:
        runs = artifact.trace.runs(name)
    except OptionError as error:
        raise OptionError(error.what, where="--pass", expected=error.expected, hint=error.hint) from None
    titles = [_where(run) for run in runs]
    return {
        title if titles.count(title) == 1 else f"{title} {run.stage}".strip(): run.after_text
        for title, run in zip(titles, runs, strict=True)
    }


def texts_of_stage(artifact: Artifact, name: str) -> dict[str, str]:
    """Return the text of each program at the end of the stage `name`, such as "FUSED".

    Keys are bucket classes (ranges of step sizes), such as "decode". The key is "" for a program of all classes. Raises
    OptionError for an unknown stage, and ArtifactError if the artifact has no trace.
    """
    wanted = name.upper()
    if wanted == _PLANNED:  # of all bucket classes, one after another
        return final_texts(artifact)
    if not artifact.has_trace:
        raise ArtifactError(
            f"the artifact has no trace, and only its final program, of stage {_PLANNED}",
            where=str(artifact.folder),
            hint=HOW_TO_GET,
        )
    runs = list(artifact.trace)
    stages = list(dict.fromkeys([_TRACED, *(run.stage for run in runs)]))
    if wanted not in stages:
        raise OptionError(f"no program reached a stage '{name}'", where="--stage", expected=", ".join(stages))
    if wanted == _TRACED:
        entries = dict.fromkeys(run.entry for run in runs)
        return {"" if entry == "main" else entry: artifact.trace.traced_text(entry) for entry in entries}
    last = {_where(run): run for run in runs if run.stage == wanted}
    split = {run.entry for run in last.values() if run.bucket}  # the stage ends separately for each class
    last = {title: run for title, run in last.items() if run.bucket or run.entry not in split}
    return {title: _with_stage(run.after_text, wanted) for title, run in last.items()}


def _where(run: TraceEntry) -> str:
    return run.title.partition("@")[2]


def _with_stage(text: str, stage: str) -> str:
    """Return the program's text with `stage` as the stage in its first line.

    In a trace, the last program of a stage may still have the stage before it.
    """
    header, _, body = text.partition("\n")
    words = [f"stage={stage}" if word.startswith("stage=") else word for word in header.split(" ")]
    return " ".join(words) + "\n" + body


def excerpts(texts: Mapping[str, str], wanted: Filter) -> dict[str, list[Shown]]:
    """Return the lines of each text that match the filter, with context. Keys are titles of programs.

    Titles without a matching line are left out. Raises OptionError if nothing matches.
    """
    programs = {title: read_programs(text) for title, text in texts.items()}
    wanted.check(program for several in programs.values() for program in several)
    found = {
        title: [shown for program in several for shown in excerpt(program, wanted)]
        for title, several in programs.items()
    }
    if not any(found.values()):
        raise OptionError("nothing matches", where=str(wanted), expected="lines that match all that is given")
    return {title: lines for title, lines in found.items() if lines}


def print_programs(texts: Mapping[str, str], wanted: Filter) -> None:
    """Print the texts of programs. With a filter, print only the matching lines with their context.

    On a terminal, context is dim.
    """
    if not wanted:
        for text in texts.values():
            print_program_text(text)
        return
    for lines in excerpts(texts, wanted).values():
        print_program_text("".join(f"{line.text}\n" for line in lines), dim=[not line.asked for line in lines])


def programs_json(texts: Mapping[str, str], wanted: Filter) -> dict[str, str]:
    """Return the texts of programs by title. With a filter, return only the matching lines with their context."""
    if not wanted:
        return dict(texts)
    return {title: "".join(f"{line.text}\n" for line in lines) for title, lines in excerpts(texts, wanted).items()}
