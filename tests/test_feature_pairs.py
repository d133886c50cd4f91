"""Quantization, meshes, adapters, the prefix cache and deterministic mode: each pair works, or is refused by name.

A pair works if its tokens are those of an equivalent model: floats of the same numbers for quantized weights, weights
with the adapter merged by hand, one rank for a mesh, prompts that are computed for cached ones, and a batch of one for
deterministic mode. The ranks of a mesh are threads here, and run in the interpreter too.
"""

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lora_folder import adapter_for, merged_by_hand
from quantized_files import LIMIT_OPTIONS, MODEL
from safetensors.torch import load_file, save_file
from thread_ranks import generated, thread_engine

from ingot import LLM, LoRARequest, SamplingParams, compile_model
from ingot.ir.errors import OptionError
from ingot.ir.mesh import ranks
from ingot.ir.numerics.harness import MeshRun, teacher_forced
from ingot.ir.parse import parse_program
from ingot.runtime.loading.artifact import open_artifact
from ingot.runtime.loading.weights import map_weights

pytestmark = [pytest.mark.xdist_group("feature pairs"), pytest.mark.one_in_file(3)]

FEATURES = ("quantize", "mesh", "adapters", "prefix cache", "deterministic")
MESH = {"tp": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
# The first two share three pages of 16 tokens.
SHARED = [(7 * place + 3) % 150 for place in range(50)]
PROMPTS = [[*SHARED, 9, 8], [*SHARED, 31, 4, 77], [11], list(range(20))]

Answer = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Models:
    """A folder with checkpoints and adapters, and with artifacts of them, each compiled once."""

    folder: Path

    def artifact(self, checkpoint: str, *options: str) -> Path:
        """The artifact of a checkpoint, compiled with some of `OPTIONS`; "adapter" merges the first adapter."""
        output = self.folder / f"{'-'.join((checkpoint, *options))}.ingot"
        if not output.exists():
            made = {name: value for option in options for name, value in OPTIONS[option].items()}
            if "adapter" in options:
                made["adapter"] = self.folder / "a0"
            compile_model(self.folder / checkpoint, output, trace="none", jobs=1, **LIMIT_OPTIONS, **made)
        return output

    def adapter(self, number: int) -> LoRARequest:
        return LoRARequest(f"a{number}", number + 1, str(self.folder / f"a{number}"))


OPTIONS: dict[str, dict[str, Any]] = {
    "int8": {"quantize": "int8"},
    "int8_w8a8": {"quantize": "int8_w8a8"},
    "mesh": {"mesh": MESH},
    "loras": {"max_loras": 2, "max_lora_rank": 8},
    "adapter": {},
    "deterministic": {"deterministic": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The float checkpoint, and what int8 and adapters make of it, computed here without Ingot."""
    folder = tmp_path_factory.mktemp("pairs")
    MODEL.write(folder / "floats")
    for number in range(2):
        adapter_for(folder / "floats", folder / f"a{number}", seed=number, size=0.6)
    merged_by_hand(folder / "floats", folder / "a0", folder / "merged")
    for name in ("floats", "merged"):
        _round_to_int8(folder / name, folder / f"{name}-int8")
    merged_by_hand(folder / "floats-int8", folder / "a0", folder / "int8-merged")
    return Models(folder)


def _round_to_int8(checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint whose linears have the numbers that int8 stores, with a scale for each row. The head keeps
    its own."""
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if weight.dim() == 2 and ".layers." in name:
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round() * scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def answers(llm: LLM, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> list[Answer]:
    """The tokens of each prompt, and the log-probability of each."""
    found = []
    for output in llm.generate([{"prompt_token_ids": list(one)} for one in prompts], GREEDY, **options):
        (one,) = output.outputs
        assert one.logprobs is not None
        pairs = zip(one.logprobs, one.token_ids, strict=True)
        found.append((list(one.token_ids), [entry[token].logprob for entry, token in pairs]))
    return found


def tokens(found: Sequence[Answer]) -> list[list[int]]:
    return [one for one, _ in found]


def cached_answers(artifact: Path, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> list[Answer]:
    """As `answers`, of an engine whose cache has the prompts already."""
    llm = LLM(artifact)
    answers(llm, prompts, **options)
    found = answers(llm, prompts, **options)
    counts = llm.prefix_cache_stats
    assert counts.hits > 0, counts
    return found


def one_by_one(artifact: Path, prompts: Sequence[Sequence[int]] = PROMPTS, **options: Any) -> list[Answer]:
    """As `answers`, each prompt in a batch of its own, without the prefix cache."""
    llm, given = LLM(artifact, enable_prefix_caching=False), options.pop("lora_request", [None] * len(prompts))
    return [answers(llm, [prompt], lora_request=one, **options)[0] for prompt, one in zip(prompts, given, strict=True)]


def check_ranks(artifact: Path, wanted: Sequence[Answer]) -> None:
    """Check that ranks with their own weights choose the tokens of `wanted`, interpreted and served."""
    program = parse_program((artifact / "program.ir").read_text())
    assert program.mesh == MESH
    run = MeshRun(program, [map_weights(open_artifact(artifact), rank) for rank in ranks(MESH)])
    fed = [[*prompt, *one[:-1]] for prompt, one in zip(PROMPTS, tokens(wanted), strict=True)]
    logits = teacher_forced(program.input_types(), run, fed, chunk=16)
    chosen = [rows[len(prompt) - 1 :].argmax(-1).tolist() for rows, prompt in zip(logits, PROMPTS, strict=True)]
    assert chosen == tokens(wanted)
    with thread_engine(artifact, num_pages=40) as engine:
        assert served_tokens(engine) == tokens(wanted)


def served_tokens(engine: Any) -> list[list[int]]:
    return [list(one.token_ids) for one in generated(engine, PROMPTS, [GREEDY] * len(PROMPTS))]


def quantize_and_mesh(models: Models) -> None:
    check_ranks(models.artifact("floats", "int8", "mesh"), answers(LLM(models.artifact("floats-int8"))))


def quantize_and_adapters(models: Models) -> None:
    """While serving, an adapter is added to the rounded weights. At compile time, the sum is rounded."""
    served = LLM(models.artifact("floats", "int8", "loras"))
    plain, adapted = answers(served), answers(served, lora_request=models.adapter(0))
    assert tokens(plain) != tokens(adapted)
    assert tokens(plain) == tokens(answers(LLM(models.artifact("floats-int8"))))
    assert tokens(adapted) == tokens(answers(LLM(models.artifact("int8-merged"))))
    merged = models.artifact("floats", "int8", "adapter")
    assert tokens(answers(LLM(merged))) == tokens(answers(LLM(models.artifact("merged-int8"))))


def quantize_and_prefix_cache(models: Models) -> None:
    artifact = models.artifact("floats", "int8_w8a8", "deterministic")
    assert tokens(cached_answers(artifact)) == tokens(answers(LLM(artifact, enable_prefix_caching=False)))


def quantize_and_deterministic(models: Models) -> None:
    """With activations that are rounded too."""
    artifact = models.artifact("floats", "int8_w8a8", "deterministic")
    assert answers(LLM(artifact)) == one_by_one(artifact)
    assert tokens(answers(LLM(artifact))) == tokens(answers(LLM(models.artifact("floats", "int8_w8a8"))))


def mesh_and_adapters(models: Models) -> None:
    """A merged adapter is divided like the weight. Adapters while serving are refused."""
    check_ranks(models.artifact("floats", "adapter", "mesh"), answers(LLM(models.artifact("merged"))))
    with pytest.raises(OptionError, match="max_loras with a mesh"):
        models.artifact("floats", "loras", "mesh")


def mesh_and_prefix_cache(models: Models) -> None:
    """All ranks have the pages that rank 0's scheduler shares."""
    artifact = models.artifact("floats", "mesh", "deterministic")
    with thread_engine(artifact, num_pages=40, prefix_caching=False) as engine:
        computed = served_tokens(engine)
    with thread_engine(artifact, num_pages=40) as engine:
        served_tokens(engine)
        assert served_tokens(engine) == computed and engine.prefix_cache_stats.hits > 0


def mesh_and_deterministic(models: Models) -> None:
    check_ranks(models.artifact("floats", "mesh", "deterministic"), one_by_one(models.artifact("floats")))


def adapters_and_prefix_cache(models: Models) -> None:
    artifact = models.artifact("floats", "loras", "deterministic")
    given = [models.adapter(0), models.adapter(0), models.adapter(1), None]
    prompts = [PROMPTS[0]] * 4
    found = cached_answers(artifact, prompts, lora_request=given)
    assert found == answers(LLM(artifact, enable_prefix_caching=False), prompts, lora_request=given)
    assert tokens(found)[0] == tokens(found)[1] == tokens(answers(LLM(models.artifact("merged"))))[0]
    assert len({str(one) for one in found}) == 3, "pages are shared only with requests of the same adapter"


def adapters_and_deterministic(models: Models) -> None:
    artifact = models.artifact("floats", "loras", "deterministic")
    given = [models.adapter(0), None, models.adapter(1), models.adapter(0)]
    found = answers(LLM(artifact), lora_request=given)
    assert found == one_by_one(artifact, lora_request=given)
    merged, plain = answers(LLM(models.artifact("merged"))), answers(LLM(models.artifact("floats")))
    assert [tokens(found)[place] for place in (0, 1, 3)] == [tokens(merged)[0], tokens(plain)[1], tokens(merged)[3]]


def prefix_cache_and_deterministic(models: Models) -> None:
    """Equal bits, whether the cache has a prompt's pages or a step computes them."""
    artifact = models.artifact("floats", "loras", "deterministic")
    assert cached_answers(artifact) == one_by_one(artifact)


PAIRS: dict[tuple[str, str], Callable[[Models], None]] = {
    ("quantize", "mesh"): quantize_and_mesh,
    ("quantize", "adapters"): quantize_and_adapters,
    ("quantize", "prefix cache"): quantize_and_prefix_cache,
    ("quantize", "deterministic"): quantize_and_deterministic,
    ("mesh", "adapters"): mesh_and_adapters,
    ("mesh", "prefix cache"): mesh_and_prefix_cache,
    ("mesh", "deterministic"): mesh_and_deterministic,
    ("adapters", "prefix cache"): adapters_and_prefix_cache,
    ("adapters", "deterministic"): adapters_and_deterministic,
    ("prefix cache", "deterministic"): prefix_cache_and_deterministic,
}


@pytest.mark.parametrize("pair", list(itertools.combinations(FEATURES, 2)), ids=" x ".join)
def test_the_pair_works_or_is_refused(models: Models, pair: tuple[str, str]) -> None:
    PAIRS[pair](models)
