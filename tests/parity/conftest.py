"""What transformers says about the tiny checkpoints, computed once per worker."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hf_model import fix_rotary_table
from tiny import CHECKPOINTS, Tiny

NEW_TOKENS = 40
MARGIN = 1e-3  # between the two most likely tokens: below it, which one wins is a matter of rounding


@dataclass(frozen=True)
class Reference:
    """`sequences` are the prompts with transformers' greedy tokens, `logprobs` f64[n, vocab] of every position of
    them, `decided` how many greedy tokens of each come before the first one whose margin is below MARGIN."""

    tiny: Tiny
    prompts: list[list[int]]
    sequences: list[list[int]]
    logprobs: list[torch.Tensor]
    decided: list[int]

    def greedy(self, index: int) -> list[int]:
        return self.sequences[index][len(self.prompts[index]) :]


def _reference(tiny: Tiny, folder: Path) -> Reference:
    import transformers

    kind = getattr(transformers, tiny.config["architectures"][0])
    model, loading = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), f"transformers made up or left out weights: {loading}"
    model.eval()
    fix_rotary_table(model, tiny.max_seq_len)
    sequences, logprobs, decided = [], [], []
    with torch.no_grad():
        for prompt in tiny.prompts():
            made = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = torch.stack([step[0].topk(2).values for step in made.logits])
            close = (best[:, 0] - best[:, 1] < MARGIN).nonzero().flatten().tolist()
            decided.append(close[0] if close else NEW_TOKENS)
            sequences.append(made.sequences[0].tolist())
            logprobs.append(model(made.sequences).logits[0].double().log_softmax(-1))
    return Reference(tiny, tiny.prompts(), sequences, logprobs, decided)


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """By the checkpoint's name."""
    known: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in known:
            known[name] = _reference(CHECKPOINTS[name], checkpoint(name))
        return known[name]

    return get
