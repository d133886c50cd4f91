"""Depth: more layers are more calls of the same code, and the compiler itself stays quick and small."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import drawn
from safetensors.torch import save_file
from specs import specs
from staged import BUCKET, staged, traced

from ingot.compile.driver import compile_model
from ingot.ir.errors import ConfigError
from ingot.ir.text import print_region_body
from ingot.models.architectures import ARCHITECTURES, read_spec
from ingot.models.blocks.attention import AttentionSpec
from ingot.models.blocks.per_layer_embedding import PerLayerEmbeddingSpec

# What is promised of depth.
MOST_REGIONS = 4  # of layers that are all alike; each further kind of rotation adds one
MOST_TIMES_LONGER = 1.3
TRACE_SECONDS, TRACE_BYTES = 10, 1 << 30  # imports included
PIPELINE_SECONDS = 15


def _config(architecture: str, layers: int, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 160,
        "n_embd": 64,
        "n_layer": layers,
        "n_head": 4,
        "n_positions": 160,  # GPT-2's names
        "text_config": {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * layers},  # Gemma 3n's
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0] * layers,
        **changes,
    }


def _takes_the_sizes(architecture: str) -> bool:
    try:
        read_spec(_config(architecture, 8))
    except ConfigError:  # it has names of its own for sizes, or lists of what each layer is
        return False
    return True


@pytest.mark.parametrize("architecture", drawn(1, filter(_takes_the_sizes, ARCHITECTURES)))
def test_16_layers_need_no_more_code_than_8(architecture: str) -> None:
    texts = []
    for layers in (8, 16):  # kinds of layers take turns in periods of up to six
        model = traced(_config(architecture, layers))
        kinds = len({attention.rotary for attention in specs(model.spec.dims, AttentionSpec)})
        _, lowered = staged(model)
        program = lowered.programs[BUCKET.name]
        assert 1 < len(program.regions) <= MOST_REGIONS + kinds - 1
        bodies = {print_region_body(region.body) for region in program.regions.values()}
        # Embeddings for each layer are one tensor for all: its size and strides tell the depth.
        wide = sum(layers * one.width for one in specs(model.spec.dims, PerLayerEmbeddingSpec))
        texts.append({text.replace(f"{wide}", "wide") for text in bodies} if wide else bodies)
        assert program.plan is not None
        calls = [one for one in program.plan.buckets[0].instructions if one.target.startswith("exe.")]
        assert len(calls) == 1 + layers  # in front of the first attention and behind each, the head behind the last
    # The region in front of the first layer makes the embeddings of all layers, where there are such.
    assert len(texts[0]) == len(texts[1]) and len(texts[0] - texts[1]) <= bool(wide), (
        "a deeper model finds all its executables in the cache of a shallow one"
    )


# Trace and pipeline of Llama-3-70B's shape, in a process of its own, for its memory is measured.
_SCRIPT = """
import json, resource, sys, time
sys.path = {path!r}
import torch
from ingot.frontend.trace import Limits, trace
from ingot.compile.driver import compile_model
from ingot.models.architectures import read_spec
from staged import staged
spec, limits = read_spec({config!r}), Limits(max_seq_len=8192, max_batch=64, max_tokens=8192)
begin = time.process_time()
model = trace(spec, limits)
traced = time.process_time() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
begin = time.perf_counter()
steps, lowered = staged(model, limits=limits)
done = time.perf_counter()
regions = [len(program.regions) for program in lowered.programs.values()]
print(json.dumps(dict(trace=traced, bytes=peak, pipeline=done - begin, regions=regions)))
"""


@pytest.mark.slow
def test_a_70b_configuration_is_traced_in_seconds() -> None:
    config = _config(
        "LlamaForCausalLM",
        80,
        hidden_size=8192,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=28672,
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        torch_dtype="bfloat16",
    )
    script = _SCRIPT.format(path=sys.path, config=config)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        f"70 B: traced in {found['trace']:.1f} s and {found['bytes'] / 2**30:.2f} GiB (its imports included), "
        f"pipeline without compiling {found['pipeline']:.1f} s"
    )
    assert found["trace"] < TRACE_SECONDS and found["bytes"] < TRACE_BYTES
    assert found["pipeline"] < PIPELINE_SECONDS
    assert max(found["regions"]) <= MOST_REGIONS


def _checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    """Zeros: how long a compile takes does not depend on the weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = traced(config)
    sizes = {
        name: spec.type.bind({}) for spec in model.entries["main"].params.values() for name in spec.recipe.sources()
    }
    save_file({name: torch.zeros(size) for name, size in sizes.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_32_layers_compile_as_fast_as_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With real compilers and an empty cache each time, by the clock: other work on the machine shows, so the better of
    two attempts counts."""
    seconds: dict[int, float] = {}
    for attempt in range(2):
        for layers in (4, 32):
            folder = _checkpoint(tmp_path / f"checkpoint-{attempt}-{layers}", _config("LlamaForCausalLM", layers))
            for cache in ("INGOT_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
                monkeypatch.setenv(cache, str(tmp_path / f"{cache}-{attempt}-{layers}"))
            begin = time.perf_counter()
            report = compile_model(folder, tmp_path / f"{attempt}-{layers}.ingot", backend="inductor")
            seconds[layers] = min(seconds.get(layers, float("inf")), time.perf_counter() - begin)
            assert report.distinct_regions <= MOST_REGIONS and report.cached_executables == 0
            assert report.regions == layers + 1  # one after each attention, and one before the first
        ratio = seconds[32] / seconds[4]
        print(f"4 layers compile in {seconds[4]:.1f} s, 32 in {seconds[32]:.1f} s: {ratio:.2f} times as long")
        if ratio <= MOST_TIMES_LONGER:
            break
    assert ratio <= MOST_TIMES_LONGER
