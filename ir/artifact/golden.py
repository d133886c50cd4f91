"""The golden run: a short run of an artifact on the compiling machine, which `ingot verify` repeats and compares.

This is the schema of golden/run.json. Its bits depend on one machine's arithmetic, so no identity of the artifact
includes the file.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ingot.ir.artifact.manifest import Digest, FileEntry

Count = Annotated[int, Field(ge=1, lt=1 << 31)]
Index = Annotated[int, Field(ge=0, lt=1 << 31)]
# JSON cannot represent numbers that are not finite.
Logit = Annotated[float, Field(allow_inf_nan=False)] | Literal["nan", "inf", "-inf"]


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Machine(_Record):
    """Properties of a machine that can change the bits of results, besides the artifact and its target.

    `processor` is the processor's name. `threads` is the number of threads of torch's ops.
    """

    processor: str
    threads: Annotated[int, Field(ge=1, le=4096)]


class Row(_Record):
    """One row of logits in a golden run, which is a short recorded run of a new artifact.

    digest  the SHA-256 of the row's bytes
    top     (token id, logit) of the largest logits
    token   the sampled token; -1 if none could be sampled
    """

    digest: Digest
    top: Annotated[tuple[tuple[Index, Logit], ...], Field(min_length=1)]
    token: Annotated[int, Field(ge=-1, lt=1 << 31)]


class StepResult(_Record):
    """The results of one step of a golden run, which is a short recorded run of a new artifact.

    `rows` holds a row of logits for each token, in order. `bucket` is the name of the bucket class (range of step
    sizes) that ran the step.
    """

    bucket: str
    rows: tuple[Row, ...]


class EntryRun(_Record):
    """The golden run of one entry. An entry is one program of the model, such as `main`.

    `backends` holds the backends of the instructions in order, by name of the bucket class (range of step sizes).
    `steps` holds the results of each step.
    """

    backends: dict[str, tuple[str, ...]]
    steps: tuple[StepResult, ...]


class GoldenRun(_Record):
    """The contents of golden/run.json: a short run of a new artifact, which `ingot verify` repeats and compares.

    machine   the machine that made the run
    files     the files that the run read (plan, weights, executables), with digests
    seed      permutes the order in which pages are used
    requests  the token ids of each request
    schedule  for each step, pairs (index of a request, number of its next tokens that the step runs)
    entries   the results of each entry (program of the model), by name

    Sampled tokens are recorded, but the tokens of each step come from `requests`.
    """

    machine: Machine
    files: tuple[FileEntry, ...]
    seed: int
    requests: Annotated[tuple[tuple[Index, ...], ...], Field(min_length=1)]
    schedule: Annotated[tuple[tuple[tuple[Index, Count], ...], ...], Field(min_length=1)]
    entries: Annotated[dict[str, EntryRun], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        done = [0] * len(self.requests)
        for number, fed in enumerate(self.schedule):
            indices = [index for index, _ in fed]
            if not fed or len(set(indices)) != len(indices) or max(indices) >= len(done):
                raise ValueError(f"step {number} has the requests {indices} of {len(done)}")
            for index, count in fed:
                done[index] += count
        if done != [len(request) for request in self.requests]:
            raise ValueError(f"the steps have {done} tokens of requests of {[len(one) for one in self.requests]}")
        fed_tokens = [sum(count for _, count in fed) for fed in self.schedule]
        for name, entry in self.entries.items():
            if (rows := [len(step.rows) for step in entry.steps]) != fed_tokens:
                raise ValueError(f"entry {name} has {rows} rows for steps of {fed_tokens} tokens")
        return self

    def places(self, step: int) -> list[tuple[int, int]]:
        """Return (index of the request, position in the request) for each row of logits of step number `step`."""
        done = [0] * len(self.requests)
        for fed in self.schedule[:step]:
            for index, count in fed:
                done[index] += count
        return [(index, done[index] + i) for index, count in self.schedule[step] for i in range(count)]
