"""An adapter that is merged at compile time: the weights are those of a checkpoint that was merged by hand."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lora_folder import adapter_for, merged_by_hand, write_adapter
from tiny import compile_options

from ingot.compile.request import Request
from ingot.ir.errors import AdapterError
from ingot.ir.numerics.tolerances import compare

# q, k and v apart and as one tensor, [in, out], interleaved heads, gate and up as one tensor.
FAMILIES = ("llama-plain", "qwen3-plain", "phi3-long", "gpt2-tied", "gpt_neox-parallel", "falcon-new", "bloom-tied")


def request(folder: Path, name: str, **options: object) -> Request:
    limits = {key: value for key, value in compile_options(name).items() if key != "jobs"}
    return Request.read(folder, backend="reference", **{**limits, **options})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_those_of_peft(
    name: str, dtype: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    base = checkpoint(name)
    adapter = adapter_for(base, tmp_path / "adapter", dtype=getattr(torch, dtype))
    ours = request(base, name, adapter=adapter, dtype=dtype)
    theirs = request(merged_by_hand(base, adapter, tmp_path / "merged"), name, dtype=dtype)
    plain, wanted = request(base, name, dtype=dtype).trace().params, theirs.trace().params
    changed = 0
    for key, spec in ours.trace().params.items():
        found = spec.recipe.execute(ours.checkpoint.read)
        assert compare(found, wanted[key].recipe.execute(theirs.checkpoint.read), found.dtype) is None, key
        changed += spec.recipe != plain[key].recipe
        assert found.dtype is spec.type.dtype
    assert changed >= 4


def test_an_adapter_of_another_base_is_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    base = checkpoint("llama-plain")
    other = write_adapter(tmp_path / "other", {"model.layers.0.self_attn.q_proj": (512, 512)})
    with pytest.raises(AdapterError, match="make a matrix"):
        request(base, "llama-plain", adapter=other).trace()
    strange = write_adapter(tmp_path / "strange", {"transformer.h.0.attn.c_attn": (512, 512)})
    with pytest.raises(AdapterError, match="does not compute as a linear"):
        request(base, "llama-plain", adapter=strange).trace()


def test_the_identity_has_the_adapter(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    base = checkpoint("llama-plain")
    keys = {None: request(base, "llama-plain")}
    for seed in (1, 1, 2):
        adapter = adapter_for(base, tmp_path / f"adapter-{len(keys)}", ["q_proj"], seed=seed)
        keys[str(adapter)] = request(base, "llama-plain", adapter=adapter)
    plain, one, same, other = [each.key(each.trace()) for each in keys.values()]
    assert one == same and len({plain, one, other}) == 3  # the folder's path does not count
