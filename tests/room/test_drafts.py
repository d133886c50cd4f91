"""Drafts and verification: a draft with a checkpoint of its own reads hidden states, and changes no token.

Each step feeds a sequence its last token and what the draft proposed behind it. `main` ends in `verify`, and leaves the
hidden state behind which the last token was taken; then `draft` proposes for the next step, from that and the token.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_definition import change_definition
from hand_step import hand_step
from hidden_output import DecoderWithHidden
from recorded_steps import RecordedSteps
from safetensors.torch import save_file
from tiny import TINY
from torch import nn
from toy_ops import toy_ops

from ingot import LLM, SamplingParams, bisect, compile_model
from ingot.cli.console import console
from ingot.cli.views.numerics import print_numerics
from ingot.ir import ops, recipe
from ingot.ir.errors import OptionError
from ingot.ir.features.feature import EndingUse
from ingot.ir.ops import Op, Sample, define
from ingot.ir.ops.penalties import GENERATED, IN_PROMPT
from ingot.ir.placements import whole
from ingot.ir.types import TensorType
from ingot.models.architectures import Entry
from ingot.models.params import parameter
from ingot.runtime.loading.loader import load_artifact
from ingot.runtime.steps.token_counts import Recount

pytestmark = [pytest.mark.xdist_group("drafts"), pytest.mark.one_in_file(3)]
NAME, DRAFTS, NEW_TOKENS = "llama-plain", 3, 24
VOCAB, HIDDEN = TINY[NAME].config["vocab_size"], TINY[NAME].config["hidden_size"]
PROMPTS: list[Any] = [{"prompt_token_ids": TINY[NAME].prompts()[index]} for index in (1, 4, 5)]  # 2, 17 and 33 tokens
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.7, top_k=20, seed=11, max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.3, min_tokens=4, logprobs=2, max_tokens=NEW_TOKENS),
]


def argmax_op() -> dict[str, Op]:
    samples = lambda g, dtype: [Sample((torch.randn(3, 8, generator=g),), {"parts": 2})]  # noqa: E731
    fake = lambda x, *, parts: torch.empty(x.shape[0], parts, dtype=torch.int32, device=x.device)  # noqa: E731

    @define(placement=whole, flops=1, samples=samples, fake=fake, on_device=True, fusible=False)
    def toy_argmax(x: torch.Tensor, *, parts: int) -> torch.Tensor:
        """The place of the largest of each of `parts` parts of a row, i32[B, parts]."""
        return x.view(x.shape[0], parts, -1).argmax(-1).int()

    return {"toy_argmax": toy_argmax}


class Draft(nn.Module):
    """For each of the next tokens, scores by the last token and by the hidden state."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.by_token = parameter((VOCAB, DRAFTS * VOCAB), recipe.source("draft:by_token"), dtype)
        self.by_hidden = parameter((DRAFTS * VOCAB, HIDDEN), recipe.source("draft:by_hidden"), dtype)

    def forward(self, last_tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        scores = ops.embedding(last_tokens, self.by_token) + ops.linear(hidden, self.by_hidden)
        return ops.OPS["toy_argmax"](scores, parts=DRAFTS)


def entries(spec: Any, module: nn.Module) -> dict[str, Entry]:
    dtype = module.embed.weight.dtype
    return {
        "main": Entry(
            DecoderWithHidden(module),
            outputs=("logits", "hidden"),
            ending=EndingUse("verify", (("drafted", DRAFTS),), ("hidden",)),
        ),
        "draft": Entry(
            Draft(dtype),
            inputs={"last_tokens": TensorType(torch.int32, ("B",)), "hidden": TensorType(dtype, ("B", HIDDEN))},
            outputs=("proposed",),
            ending=EndingUse("propose"),
        ),
    }


def draft_checkpoint(folder: Path, seen: list[list[int]]) -> Path:
    """A draft that has counted what followed each token in `seen`; hidden states decide where nothing did."""
    by_token = torch.zeros(VOCAB, DRAFTS, VOCAB)
    for tokens in seen:
        for place, token in enumerate(tokens):
            for ahead, following in enumerate(tokens[place + 1 : place + 1 + DRAFTS]):
                by_token[token, ahead, following] += 1
    folder.mkdir()
    by_hidden = 0.01 * torch.randn(DRAFTS * VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    save_file({"by_token": by_token.flatten(1).contiguous(), "by_hidden": by_hidden}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["ToyDraft"]}))
    return folder


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def folders(request: Any, checkpoint: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[tuple[Path, Path]]:
    tmp, cuda = tmp_path_factory.mktemp("drafts"), request.param == "cuda"
    limits = {"max_batch": 4, "max_tokens": 128, "max_seq_len": 128}
    options: dict[str, Any] = {"target": request.param, "deterministic": True, **limits}
    options |= {"backend": "auto", "dtype": "bfloat16"} if cuda else {"backend": "reference"}
    compile_model(checkpoint(NAME), tmp / "plain.ingot", **options)
    seen = [out.outputs[0].token_ids for out in LLM(tmp / "plain.ingot", num_kv_pages=24).generate(PROMPTS, PARAMS)]
    draft = draft_checkpoint(tmp / "draft", seen)
    with toy_ops(argmax_op), pytest.MonkeyPatch.context() as patch:
        changes: dict[str, Any] = {"round": ("main", "draft"), "checkpoints": ("draft",)}
        change_definition(patch, "LlamaForCausalLM", more_entries=entries, **changes)
        compile_model(checkpoint(NAME), tmp / "drafted.ingot", checkpoints={"draft": draft}, **options)
        yield tmp / "plain.ingot", tmp / "drafted.ingot"


def test_rows_are_counted_anew_once_in_a_step(folders: tuple[Path, Path]) -> None:
    """And not again in front of the draft, which would forget what `main` has counted of the step itself."""
    loaded = load_artifact(folders[1], num_pages=2)
    inputs = hand_step([[5, 6, 7]], [2], [1], [[0]])
    inputs.arrays["prompt_ends"][:] = 3
    inputs.recounts = (Recount(1, [3, 4], []),)
    loaded.round.launch(inputs).tokens()
    counts = loaded.executor.states["token_counts"][1].cpu()
    assert counts.nonzero().flatten().tolist() == [3, 4, 5, 6, 7]
    assert counts[3] == counts[5] == IN_PROMPT and counts[6] == GENERATED


def test_an_entry_that_proposes_is_not_measured(
    folders: tuple[Path, Path],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It reads what other entries leave in rows. The passes of `main` are measured all the same."""
    draft = draft_checkpoint(tmp_path / "draft", [])
    options: dict[str, Any] = {"max_batch": 4, "max_tokens": 64, "max_seq_len": 64, "backend": "reference"}
    where = {"output": tmp_path / "a.ingot", "checkpoints": {"draft": draft}, "check_numerics": True}
    report = compile_model(checkpoint(NAME), **where, **options).numerics
    assert report is not None and {one.entry for one in report.passes} == {"main"}
    assert {one.name for one in report.passes if one.changed} >= {"insert-paged-kv", "insert-ending"}
    assert report.unmeasured.keys() == {"draft"} == report.to_json()["unmeasured"].keys()
    print_numerics(console(), report)
    said = "not measured: the entry 'draft': its ending 'propose' reads last_tokens, hidden from rows"
    assert said in capsys.readouterr().out


def test_bisect_refuses_drafts(folders: tuple[Path, Path]) -> None:
    with pytest.raises(OptionError, match="'main' has the ending 'verify', which feeds up to 4 tokens") as caught:
        bisect(folders[1])
    assert caught.value.expected and "check_numerics" in caught.value.hint


def test_drafts_change_no_token(folders: tuple[Path, Path]) -> None:
    plain, drafted = (LLM(folder, num_kv_pages=24) for folder in folders)
    drafted.llm_engine.launch_through(several := RecordedSteps(drafted))
    for params in (PARAMS, PARAMS[::-1]):
        wanted, found = plain.generate(PROMPTS, params), drafted.generate(PROMPTS, params)
        assert [out.outputs for out in found] == [out.outputs for out in wanted]
    assert max(several.tokens[1:]) > 4, "no step has fed drafts"
    drafted.llm_engine.launch_through(alone := RecordedSteps(drafted))
    drafted.generate(PROMPTS[:1], GREEDY)
    assert len(alone.tokens) < NEW_TOKENS - 6, "drafts that were seen before are taken"
    tight = LLM(folders[1], num_kv_pages=9)
    assert [out.outputs for out in tight.generate(PROMPTS, PARAMS[::-1])] == [out.outputs for out in wanted]
