"""The program of an artifact at the end, at a stage, and as a pass left it."""

from collections.abc import Mapping

from ingot.cli.console import print_program_text
from ingot.cli.views.filter import Filter, Shown, excerpt
from ingot.cli.views.lines import read_programs
from ingot.ir.artifact.trace import HOW_TO_GET, TraceEntry
from ingot.ir.errors import ArtifactError, OptionError
from ingot.runtime.artifact import Artifact

FINAL = "program.ir"
_TRACED = "TRACED"  # what the frontend hands over: no pass leads there
_PLANNED = "PLANNED"  # where every pipeline ends


def final_texts(artifact: Artifact) -> dict[str, str]:
    """The final programs of all entries and bucket classes, one behind the other."""
    return {"": artifact.read_text(FINAL)}


def texts_of_pass(artifact: Artifact, name: str) -> dict[str, str]:
    """The program after the pass `name`: by bucket class, "" when it ran once for all, and by the stage that it led to
    when it ran on the way to several. Raises OptionError."""
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
    """The program at the end of a stage: by bucket class, "" when it is one for all. Raises OptionError."""
    wanted = name.upper()
    if wanted == _PLANNED:  # of all bucket classes, one behind the other
        return final_texts(artifact)
    if not artifact.has_trace:
        raise ArtifactError(
            f"the artifact has no trace, and of its programs the final one only, of stage {_PLANNED}",
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
    apart = {run.entry for run in last.values() if run.bucket}  # the stage ends for each class apart
    last = {title: run for title, run in last.items() if run.bucket or run.entry not in apart}
    return {title: _with_stage(run.after_text, wanted) for title, run in last.items()}


def _where(run: TraceEntry) -> str:
    return run.title.partition("@")[2]


def _with_stage(text: str, stage: str) -> str:
    """A trace shows the program as its pass left it, maybe before the program was declared to be of the stage."""
    header, _, body = text.partition("\n")
    words = [f"stage={stage}" if word.startswith("stage=") else word for word in header.split(" ")]
    return " ".join(words) + "\n" + body


def excerpts(texts: Mapping[str, str], wanted: Filter) -> dict[str, list[Shown]]:
    """What the filter leaves of each text, empty ones left out. Raises OptionError when that is nothing."""
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
    """The programs, or what the filter leaves of them; on a terminal, what only helps to read it is dim."""
    if not wanted:
        for text in texts.values():
            print_program_text(text)
        return
    for lines in excerpts(texts, wanted).values():
        print_program_text("".join(f"{line.text}\n" for line in lines), dim=[not line.asked for line in lines])


def programs_json(texts: Mapping[str, str], wanted: Filter) -> dict[str, str]:
    """The same as JSON: texts by title."""
    if not wanted:
        return dict(texts)
    return {title: "".join(f"{line.text}\n" for line in lines) for title, lines in excerpts(texts, wanted).items()}
