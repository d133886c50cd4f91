"""The data to repeat and examine a compile: the artifact, its request, the traced model, the weights."""

import random
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from ingot.compile.golden import read_golden
from ingot.compile.recorded_request import recorded_request
from ingot.compile.request import Request
from ingot.debug.bisect.programs.chain import Chain, chains
from ingot.debug.bisect.programs.params import Params
from ingot.debug.bisect.unjudged import refuse_unjudged
from ingot.ir import ops
from ingot.ir.artifact.manifest import GOLDEN
from ingot.ir.masks import CAUSAL, Mask
from ingot.ir.parse import parse_program
from ingot.ir.plugins import load_user_ops
from ingot.ir.program import Model, Program
from ingot.runtime.loading.artifact import Artifact, open_artifact

# Lengths below a page of 16 tokens, above one page, and above two. If the model has attention windows of up to WINDOW
# tokens, `prompts` adds a prompt that is longer than the window.
PROMPT_LENGTHS = (1, 17, 35, 23)
WINDOW = 128


@dataclass
class Case:
    """The data for bisecting one artifact: the artifact, the compile request that it records, and the traced model.

    `runs` counts the programs that have been interpreted so far.
    """

    artifact: Artifact
    request: Request
    model: Model
    runs: int = 0
    _read: dict[str, torch.Tensor] = field(default_factory=dict)

    @staticmethod
    def open(artifact: str | Path, checkpoint: str | Path | None = None) -> "Case":
        """Open an artifact for bisecting, and trace its model again.

        `checkpoint` is the folder of the checkpoint that the artifact was compiled from. It is needed only if that
        folder has moved.

        Raises IngotError if the artifact or checkpoint cannot be read. Raises OptionError if bisecting cannot compare
        the outputs of such a model.
        """
        load_user_ops()
        opened = open_artifact(artifact)
        request = recorded_request(opened, checkpoint)
        model = request.trace()
        if request.text is not None:
            request = request.calibrated(model, request.identity(model))
        for entry in model.entries.values():
            refuse_unjudged(entry, str(opened.folder))
        return Case(opened, request, model)

    @cached_property
    def chains(self) -> list[Chain]:
        return chains(self.artifact, self.request, self.model, self.final_programs)

    @cached_property
    def final_programs(self) -> list[Program]:
        """Read the programs after the last pass from the artifact. The artifact's plan (its instructions) was made from
        them.

        There is a program for each entry (such as `main` or a draft model) and each bucket class (a range of step
        sizes).
        """
        parts = re.split(r"(?m)^(?=program )", self.artifact.read_text("program.ir"))
        return [parse_program(part) for part in parts if part]

    def read(self, name: str) -> torch.Tensor:
        """Return the checkpoint tensor `name`. It is read from disk only once."""
        if name not in self._read:
            self._read[name] = self.request.checkpoint.read(name)
        return self._read[name]

    @cached_property
    def params(self) -> Params:
        return Params(self.read)

    def prompts(self, seed: int = 0) -> list[list[int]]:
        """Return random prompts, as token ids, to run programs on.

        Some prompts are longer than a cache page. One is longer than the model's attention window, if the window has at
        most WINDOW tokens. Another `seed` draws other tokens.
        """
        windows = [
            Mask.named(str(node.kwargs.get("mask", CAUSAL.name))).size
            for entry in self.model.entries.values()
            for node in entry.calls(ops.attention.overload)
        ]
        longest = max([window for window in windows if window <= WINDOW], default=0)
        lengths = [*PROMPT_LENGTHS, *([longest + 5] if longest + 5 > max(PROMPT_LENGTHS) else [])]
        # Leave room for the tokens that are generated after the prompt.
        most = max(1, self.request.limits.max_seq_len - 4)
        draw = random.Random(seed)
        vocab = self.request.spec.vocab_size
        return [[draw.randrange(vocab) for _ in range(min(length, most))] for length in sorted(lengths, reverse=True)]


def recorded_requests(artifact: Artifact, case: Case) -> list[list[int]]:
    """Return token sequences to run the artifact on: random prompts, then the requests of the golden run.

    The golden run is a short run that is recorded at the end of a compile, on a machine that can run the artifact. If
    there is none, only the random prompts are returned. Raises ArtifactError if the golden run is malformed.
    """
    if not (artifact.folder / GOLDEN).exists():
        return case.prompts()
    return [*case.prompts(), *map(list, read_golden(artifact).requests)]
