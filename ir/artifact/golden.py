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
    """The facts of a machine that affect a run's bits, in addition to the artifact and its target.

    `processor` is the processor's name, `threads` the number of threads of torch's ops.
    """

    processor: str
    threads: Annotated[int, Field(ge=1, le=4096)]


class Row(_Record):
    """One row of logits in a golden run.

    `digest` is the SHA-256 of its bytes. `top` holds (token id, logit) of the largest logits. `token` is the sampled
    token; -1 if none could be sampled.
    """

    digest: Digest
    top: Annotated[tuple[tuple[Index, Logit], ...], Field(min_length=1)]
    token: Annotated[int, Field(ge=-1, lt=1 << 31)]


class StepResult(_Record):
    """The results of one step of a golden run: a row of logits for each of its tokens, in order.

    `bucket` is the name of the bucket class (range of step sizes) that ran the step.
    """

    bucket: str
    rows: tuple[Row, ...]


class EntryRun(_Record):
    """The golden run of one entry (program of the model).

    `backends` maps a bucket class to the backend of each of its instructions. `steps` are the results of each step.
    """

    backends: dict[str, tuple[str, ...]]
    steps: tuple[StepResult, ...]


class GoldenRun(_Record):
    """The contents of golden/run.json: requests, their schedule, and the results on one machine.

    `files` lists the files that the run read (the plan, weights, executables), with digests. `requests` are token ids.
    `schedule[i]` holds pairs (index of a request, count): step i runs the next `count` tokens of that request. Requests
    are teacher-forced: sampled tokens are recorded but not used. Pages come from a pool in an order permuted by `seed`.
    `entries` holds the results by entry of the model.
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
        """Return (index of the request, position in it) of each row of logits of the step with this index."""
        done = [0] * len(self.requests)
        for fed in self.schedule[:step]:
            for index, count in fed:
                done[index] += count
        return [(index, done[index] + i) for index, count in self.schedule[step] for i in range(count)]
