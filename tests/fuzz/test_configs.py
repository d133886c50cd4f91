"""Random configurations of every family: each agrees with transformers through all passes, or is refused by name.

In float32 the logits are equal within the tolerance of parity; in 16 bits they are as near to float32 as transformers'
are. What is drawn depends on the commit: see `run_seed`.
"""

import random
from typing import Any

import pytest
import torch
from agreement import disagreement
from close_choices import choices_are_clear
from drawn import drawn
from families import weights
from hf_model import hf_model
from random_config import random_config
from run_seed import again, run_seed
from staged import CHUNK, LIMITS, staged, traced
from tiny import TINY

from ingot.ir.errors import IngotError
from ingot.ir.numerics.harness import InterpreterRun, load_params, teacher_forced
from ingot.models.architectures import read_spec

pytestmark = pytest.mark.one_in_file(3)

# By what every run can afford: one of each of ten families that the commit draws, and with --run-slow 25 of each, which
# makes 500.
DRAWS = 25
LENGTHS = (1, 17, 45)  # of the requests; windows are shorter than some, pages of 16 end inside two
TOLERANCE = 1e-4  # of a logit, for each unit of the largest

FAMILIES = {TINY[name].family: TINY[name].config for name in reversed(TINY)}


@pytest.mark.parametrize("family", drawn(10, FAMILIES))
def test_a_random_config_agrees(family: str) -> None:
    problem, refused = _problem(family, 0)
    assert problem is None, problem
    print(refused or "agrees")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_random_configs_agree(family: str) -> None:
    results = [_problem(family, number) for number in range(1, DRAWS)]
    problems = [problem for problem, _ in results if problem is not None]
    assert not problems, "\n\n".join(problems)
    refused = [reason for _, reason in results if reason]
    assert len(refused) <= DRAWS // 4, f"most must be served, but: {refused}"


def _problem(family: str, number: int) -> tuple[str | None, str]:
    """What is wrong with a drawn configuration, in words, and why it was refused, if it was."""
    draw = random.Random(f"{run_seed()} {family} {number}")
    known = FAMILIES[family]
    config = random_config(known["architectures"][0], known["model_type"], draw)
    try:
        error = _disagreement(config, draw)
    except IngotError as refusal:
        return (None if refusal.exit_code == 2 else f"{again(number)}\n{config}\n{refusal}"), str(refusal)
    except Exception as crash:
        crash.add_note(f"{again(number)}\n{config}")
        raise
    return (f"{again(number)}\n{config}\n{error}" if error else None), ""


def _disagreement(config: dict[str, Any], draw: random.Random) -> str | None:
    dtype = read_spec(config).dtype
    tensors = {name: tensor.to(dtype) for name, tensor in weights(config, draw.randrange(1 << 30)).items()}
    requests = [[draw.randrange(config["vocab_size"]) for _ in range(length)] for length in LENGTHS]
    found = _ours(config, tensors, requests)
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    if "index_topk" in config:  # rounding decides a close call: such a configuration says nothing
        model = hf_model(config, wide, torch.float32, LIMITS.max_seq_len)
        if not all(choices_are_clear(model, request) for request in requests):
            return None
    expected = _theirs(config, wide, torch.float32, requests)
    if not bool(expected.isfinite().all()):
        return "transformers' logits are not finite: the drawn configuration says nothing"
    if dtype == torch.float32:
        error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
        return None if error <= TOLERANCE else f"logits differ by {error:.2e} of the largest"
    return disagreement(found, expected, _theirs(config, tensors, dtype, requests), dtype)


def _ours(config: dict[str, Any], tensors: dict[str, torch.Tensor], requests: list[list[int]]) -> torch.Tensor:
    """Logits after the last pass, the requests served together in chunks."""
    model = traced(config, **{name: tensor.dtype for name, tensor in tensors.items()})
    program = staged(model)[0][-1].program
    run = InterpreterRun(program, load_params(program.params, tensors.__getitem__))
    return torch.cat(teacher_forced(program.input_types(), run, requests, chunk=CHUNK, seed=1))


def _theirs(
    config: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype, requests: list[list[int]]
) -> torch.Tensor:
    model = hf_model(config, tensors, dtype, LIMITS.max_seq_len)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([request])).logits[0].float() for request in requests])
