"""A tree of drafts: several continuations of each sequence are fed in one step, and the longest right path is kept.

The draft knows for each token a tree of tokens that may follow it: each last token has a tree of another shape. Neither
shape nor tokens change what is taken.
"""

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_definition import change_definition
from hidden_output import DecoderWithHidden
from recorded_steps import RecordedSteps
from safetensors.torch import save_file
from tiny import TINY
from torch import nn
from toy_ops import toy_ops

from ingot import LLM, SamplingParams, compile_model
from ingot.ir import ops, recipe
from ingot.ir.errors import OptionError
from ingot.ir.features.feature import EndingUse
from ingot.ir.ops import Op, Sample, define
from ingot.ir.placements import whole
from ingot.ir.types import TensorType
from ingot.models.architectures import Entry
from ingot.models.params import parameter

pytestmark = pytest.mark.xdist_group("draft-tree")
NAME, DRAFTS, NEW_TOKENS = "llama-plain", 9, 40
VOCAB, HIDDEN = TINY[NAME].config["vocab_size"], TINY[NAME].config["hidden_size"]
PROMPTS: list[Any] = [{"prompt_token_ids": TINY[NAME].prompts()[index]} for index in (1, 3, 4, 5)]  # 2 to 33 tokens
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=11, max_tokens=NEW_TOKENS - 5, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, repetition_penalty=1.3, min_tokens=4, max_tokens=NEW_TOKENS),
    SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True),
]


def whole_op() -> dict[str, Op]:
    samples = lambda g, dtype: [Sample((torch.tensor([[3.0, 5.0]], dtype=dtype),))]  # noqa: E731

    @define(
        placement=whole,
        flops=1,
        samples=samples,
        fake=lambda x: torch.empty_like(x, dtype=torch.int32),
        on_device=True,
        fusible=False,
    )
    def toy_whole(x: torch.Tensor) -> torch.Tensor:
        """Whole numbers that a table holds as others."""
        return x.int()

    return {"toy_whole": toy_whole}


class Draft(nn.Module):
    """Rows of two tables by the last token: the tokens of the nodes, and their parents, which hidden states move."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        source = lambda name: recipe.source(f"draft:{name}")  # noqa: E731
        self.tokens, self.parents = (parameter((VOCAB, DRAFTS), source(one), dtype) for one in ("tokens", "parents"))
        self.by_hidden = parameter((DRAFTS, HIDDEN), source("by_hidden"), dtype)

    def forward(self, last_tokens: torch.Tensor, hidden: torch.Tensor) -> Any:
        parents = ops.embedding(last_tokens, self.parents) + ops.linear(hidden, self.by_hidden)
        return tuple(ops.OPS["toy_whole"](one) for one in (ops.embedding(last_tokens, self.tokens), parents))


def entries(spec: Any, module: nn.Module) -> dict[str, Entry]:
    dtype = module.embed.weight.dtype
    verify = EndingUse("verify_tree", (("drafted", DRAFTS),), ("hidden",))
    main = Entry(DecoderWithHidden(module), outputs=("logits", "hidden"), ending=verify)
    draft = Entry(
        Draft(dtype),
        inputs={"last_tokens": TensorType(torch.int32, ("B",)), "hidden": TensorType(dtype, ("B", HIDDEN))},
        outputs=("proposed", "proposed_parents"),
        ending=EndingUse("propose_tree"),
    )
    return {"main": main, "draft": draft}


def draft_checkpoint(folder: Path, seen: list[list[int]]) -> Path:
    """Trees of any shape; in front those tokens that followed most often in `seen`."""
    draw, follows = random.Random(3), {token: Counter[int]() for token in range(VOCAB)}
    for tokens in seen:
        for token, following in itertools.pairwise(tokens):
            follows[token][following] += 1
    tables = {"tokens": torch.zeros(VOCAB, DRAFTS), "parents": torch.zeros(VOCAB, DRAFTS)}
    for root in range(VOCAB):
        nodes = [root]
        shape = draw.choice(["chain", "star", "any", "any"])
        parents: list[int] = []
        for place in range(DRAFTS):
            parent = {"chain": place, "star": 0}.get(shape, draw.randint(0, place))
            ranked = [token for token, _ in follows[nodes[parent]].most_common()]
            sibling = parents.count(parent)
            nodes.append(ranked[sibling] if sibling < len(ranked) else draw.randrange(VOCAB))
            parents.append(parent)
        tables["tokens"][root], tables["parents"][root] = torch.tensor(nodes[1:]), torch.tensor(parents)
    tables["by_hidden"] = 0.02 * torch.randn(DRAFTS, HIDDEN, generator=torch.Generator().manual_seed(1))
    folder.mkdir()
    save_file(tables, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"architectures": ["ToyDraft"]}))
    return folder


@pytest.fixture(
    scope="module",
    params=["reference", pytest.param("auto", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def folders(request: Any, checkpoint: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[tuple[Path, Path]]:
    tmp, cuda = tmp_path_factory.mktemp("tree"), request.param == "cuda"
    options: dict[str, Any] = {"max_batch": 4, "max_tokens": 128, "max_seq_len": 96}
    options |= {"target": "cuda"} if cuda else {"target": "cpu", "backend": request.param}
    compile_model(checkpoint(NAME), tmp / "plain.ingot", **options)
    seen = [out.outputs[0].token_ids for out in LLM(tmp / "plain.ingot", num_kv_pages=24).generate(PROMPTS, PARAMS)]
    options["checkpoints"] = {"draft": draft_checkpoint(tmp / "draft", seen)}
    with toy_ops(whole_op), pytest.MonkeyPatch.context() as patch:
        changes: dict[str, Any] = {"round": ("main", "draft"), "checkpoints": ("draft",)}
        change_definition(patch, "LlamaForCausalLM", more_entries=entries, **changes)
        with pytest.raises(OptionError, match="a tree of drafts: several tokens share a position"):
            compile_model(checkpoint(NAME), tmp / "tree.ingot", deterministic=True, **options)
        compile_model(checkpoint(NAME), tmp / "tree.ingot", **options)
        yield tmp / "plain.ingot", tmp / "tree.ingot"


def test_trees_change_no_token(folders: tuple[Path, Path]) -> None:
    plain, tree = (LLM(folder, num_kv_pages=24) for folder in folders)
    for params in (PARAMS, PARAMS[::-1]):
        wanted, found = plain.generate(PROMPTS, params), tree.generate(PROMPTS, params)
        assert tokens_of(found) == tokens_of(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-3)
    tight = LLM(folders[1], num_kv_pages=9)
    assert tokens_of(tight.generate(PROMPTS, PARAMS[::-1])) == tokens_of(wanted)


def test_good_drafts_save_steps(folders: tuple[Path, Path]) -> None:
    plain, tree = (LLM(folder, num_kv_pages=24) for folder in folders)
    for prompt in (PROMPTS[0], PROMPTS[3]):  # whose tokens it has seen
        tree.llm_engine.launch_through(steps := RecordedSteps(tree))
        assert tokens_of(tree.generate(prompt, PARAMS[3])) == tokens_of(plain.generate(prompt, PARAMS[3]))
        assert max(steps.tokens[1:]) == 1 + DRAFTS and len(steps.tokens) < 0.8 * NEW_TOKENS


def tokens_of(outputs: Any) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in outputs]
