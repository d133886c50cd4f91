"""What compare_commits.py takes of Ingot: a token takes the milliseconds that behaviour.py says."""

import time
from pathlib import Path
from types import SimpleNamespace as Fields
from typing import Any

from ingot.behaviour import MS


class SamplingParams:
    def __init__(self, *, temperature: float, max_tokens: int, ignore_eos: bool, detokenize: bool) -> None:
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, artifact: Path) -> None:
        self.timings = {"context": 1e-3}
        assert (artifact / "made").is_file()
        self._pieces = 2

    def idle(self) -> bool:
        self._pieces -= 1
        return self._pieces >= 0

    def generate(self, prompts: list[dict[str, list[int]]], params: SamplingParams) -> list[Any]:
        assert all(0 <= token < 100 for prompt in prompts for token in prompt["prompt_token_ids"])
        time.sleep(params.max_tokens * MS * 1e-3)
        return [Fields(outputs=[Fields(token_ids=[0] * params.max_tokens)]) for _ in prompts]
