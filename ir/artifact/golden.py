"""The golden run: results of an artifact on the compiling machine, to be repeated where it is served.

This is the schema of golden/run.json. Its bits depend on one machine's arithmetic, so no identity includes the file.
`files` ties it to the files that ran.
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
    """The facts that affect bits besides the artifact and its target: the processor, and the threads of torch's ops."""

    processor: str
    threads: Annotated[int, Field(ge=1, le=4096)]


class Row(_Record):
    """One row of logits: the SHA-256 of its bytes, the largest logits with their token ids, and the sampled token."""

    digest: Digest
    top: Annotated[tuple[tuple[Index, Logit], ...], Field(min_length=1)]
    token: Annotated[int, Field(ge=-1, lt=1 << 31)]


class StepResult(_Record):
    """The results of a step: the bucket class that ran it, and a row for each of its tokens, in order."""

    bucket: str
    rows: tuple[Row, ...]


class EntryRun(_Record):
    """The run of one entry: the backend of each instruction by bucket class, and the results of each step."""

    backends: dict[str, tuple[str, ...]]
    steps: tuple[StepResult, ...]


class GoldenRun(_Record):
    """Requests, their schedule, and the results.

    `files` holds the files that a run reads (the plan, weights, executables), as they were. `requests` are token ids.
    For each pair in `schedule[i]`, step i runs that many more tokens of the request with that index. Requests are
    teacher-forced: sampled tokens are recorded but not used. Pages come from a pool permuted by `seed`.
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
        """Return the request and position of each row of a step."""
        done = [0] * len(self.requests)
        for fed in self.schedule[:step]:
            for index, count in fed:
                done[index] += count
        return [(index, done[index] + i) for index, count in self.schedule[step] for i in range(count)]
