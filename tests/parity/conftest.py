"""What transformers says about the tiny checkpoints, computed once per worker."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from close_choices import choices_are_clear
from families import FAMILIES, weights
from hf_model import EAGER, class_of, fix_rotary_table
from run_seed import again, run_seed
from tiny import CHECKPOINTS
from tiny_checkpoint import PROMPT_LENGTHS, Tiny

NEW_TOKENS = 40
COMPARED = 32  # greedy tokens of each prompt, at least
# Of a prompt, until its greedy tokens and the positions that indexers choose are no close calls: nine of ten are not.
DRAWS = 12
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


def _model(tiny: Tiny, folder: Path) -> torch.nn.Module:
    """Transformers' model, loaded as its users load it; where it has no class, the family's oracle."""
    family = FAMILIES.get(tiny.config["model_type"])
    if family is not None and family.oracle is not None:
        config, max_seq_len = tiny.config, tiny.max_seq_len
        return family.oracle(config, weights(config, tiny.seed), torch.float32, max_seq_len).eval()
    model, loading = class_of(tiny.config).from_pretrained(
        folder, dtype=torch.float32, **EAGER, output_loading_info=True
    )
    assert not any(loading.values()), f"transformers made up or left out weights: {loading}"
    fix_rotary_table(model, tiny.max_seq_len)
    return model.eval()


def _reference(tiny: Tiny, folder: Path) -> Reference:
    model = _model(tiny, folder)
    answers = [_answer(model, tiny, length) for length in PROMPT_LENGTHS]
    with torch.no_grad():
        logprobs = [model(torch.tensor([answer.tokens])).logits[0].double().log_softmax(-1) for answer in answers]
    return Reference(
        tiny,
        prompts=[answer.tokens[:length] for answer, length in zip(answers, PROMPT_LENGTHS, strict=True)],
        sequences=[answer.tokens for answer in answers],
        logprobs=logprobs,
        decided=[answer.decided for answer in answers],
    )


@dataclass(frozen=True)
class _Answer:
    """A prompt with its greedy tokens, and how many of those come before the first close call."""

    tokens: list[int]
    decided: int


def _answer(model: Any, tiny: Tiny, length: int) -> _Answer:
    """A prompt of `length` random tokens, drawn until its answer is decided for COMPARED tokens."""
    draw = random.Random(f"{run_seed()} {tiny.name} {length}")
    for _ in range(DRAWS):
        prompt = [draw.randrange(tiny.config["vocab_size"]) for _ in range(length)]
        made, logits = _greedy(model, prompt)
        best = logits.topk(2).values
        close = (best[:, 0] - best[:, 1] < MARGIN).nonzero().flatten().tolist()
        decided = close[0] if close else NEW_TOKENS
        if decided >= COMPARED and choices_are_clear(model, made):
            return _Answer(made, decided)
    raise AssertionError(f"{tiny.name} gives too many close calls: {again(f'prompts of {length} tokens')}")


def _greedy(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """The prompt with its greedy tokens, and the logits [NEW_TOKENS, vocab] that chose them."""
    if not hasattr(model, "generate"):  # an oracle
        tokens, rows = [*prompt], []
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                rows.append(model(torch.tensor([tokens])).logits[0, -1])
                tokens.append(int(rows[-1].argmax()))
        return tokens, torch.stack(rows)
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
    return made.sequences[0].tolist(), torch.cat(made.logits)


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """By the checkpoint's name."""
    known: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in known:
            known[name] = _reference(CHECKPOINTS[name], checkpoint(name))
        return known[name]

    return get
