"""An ending that takes the most likely token and nothing else: requests that ask for more are refused, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_definition import change_definition
from toy_ops import toy_ops

from ingot import LLM, SamplingParams, compile_model
from ingot.ir.errors import RequestError
from ingot.ir.features import Ending, EndingUse, OpCall, Output, register_ending, step_inputs, unserved_params
from ingot.ir.features.registry import forget_ending
from ingot.ir.ops import Op, Sample, define
from ingot.ir.placements import whole
from ingot.ir.types import TensorType
from ingot.models.architectures import Entry

pytestmark = pytest.mark.xdist_group("unserved-params")

NAME = "llama-plain"
PROMPT: Any = {"prompt_token_ids": [5, 6, 7]}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
# What the host sees to: how many sequences, where they end, their text.
BY_HOST = {
    "n",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "truncate_prompt_tokens",
    "max_tokens",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
}
ASKED: dict[str, Any] = {
    "temperature": 0.7,
    "seed": 3,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.1,
    "typical_p": 0.5,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "min_tokens": 2,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [3, 4],
    "bad_words": ["x"],
    "structured_outputs": {"regex": "x"},
    "logprobs": 0,
    "prompt_logprobs": 1,
}


def argmax_op() -> dict[str, Op]:
    @define(
        placement=whole,
        flops=1,
        samples=lambda g, dtype: [Sample((torch.randn(3, 8, generator=g),))],
        fake=lambda logits: torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device),
        fusible=False,
    )
    def toy_most_likely(logits: torch.Tensor) -> torch.Tensor:
        """The place of the largest of a row, i32[L]."""
        return logits.argmax(-1).int()

    return {"toy_most_likely": toy_most_likely}


MOST_LIKELY = Ending(
    "toy-most-likely",
    needs=("logits",),
    features=("sequences",),
    calls=(
        OpCall("toy_most_likely", ("sampled",), {"logits": "choices"}),
        OpCall("advance", ("last_token", "position")),
    ),
    outputs=(Output("tokens", "sampled", TensorType(torch.int32, ("L",)), read=True),),
)


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[LLM]:
    output = tmp_path_factory.mktemp("most-likely") / "a.ingot"

    def entry(spec: Any, module: Any) -> dict[str, Entry]:
        return {"main": Entry(module, ending=EndingUse(MOST_LIKELY.name))}

    with toy_ops(argmax_op), pytest.MonkeyPatch.context() as patch:
        change_definition(patch, "LlamaForCausalLM", more_entries=entry)
        register_ending(MOST_LIKELY)
        try:
            compile_model(checkpoint(NAME), output, backend="reference", max_batch=2, max_tokens=32, max_seq_len=32)
            yield LLM(output, num_kv_pages=8)
        finally:
            forget_ending(MOST_LIKELY.name)


@pytest.mark.parametrize("name", ASKED)
def test_what_the_ending_does_not_take_is_refused(llm: LLM, name: str) -> None:
    # Filters and seeds have no effect on the most likely token: they count beside a temperature alone.
    drawn = {"temperature": 0.7} if name in ("seed", "top_k", "top_p", "min_p", "typical_p") else {}
    params = SamplingParams(**{**GREEDY, **drawn, name: ASKED[name]})
    engine = llm.llm_engine
    with pytest.raises(RequestError) as caught:
        llm.generate([PROMPT, PROMPT], [SamplingParams(**GREEDY), params])
    first = "seed" if name == "seed" else "temperature" if drawn else name
    assert f"SamplingParams.{first}" in str(caught.value) and "does not serve" in caught.value.what
    assert caught.value.expected and caught.value.hint
    assert not engine.has_unfinished() and engine.occupancy.waiting == 0


def test_what_has_no_effect_is_not_refused(llm: LLM) -> None:
    wanted = llm.generate(PROMPT, SamplingParams(**GREEDY))[0].outputs[0].token_ids
    idle = SamplingParams(**GREEDY, top_k=5, top_p=0.5, min_p=0.1, seed=3)
    assert llm.generate(PROMPT, idle)[0].outputs[0].token_ids == wanted and len(wanted) == 4


def test_every_sampling_parameter_is_served_by_the_host_or_by_an_input() -> None:
    params = [one.name for one in fields(SamplingParams)]
    served = {param.name for one in step_inputs().values() for param in one.serves}
    assert served == set(ASKED) == set(params) - BY_HOST
    assert {param.name for param in unserved_params([])} == served
    assert unserved_params(step_inputs()) == ()
    assert {param.name for param in unserved_params(set(step_inputs()) - {"count_rows", "banned"})} == {"min_tokens"}
