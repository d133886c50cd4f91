"""Places of merged tensors: which rows each linear has, as weights and biases, transposed, sharded and quantized."""

from collections.abc import Callable

import pytest
import torch

from ingot.ir import recipe as r
from ingot.ir.errors import InternalError
from ingot.ir.formats import find_format
from ingot.ir.mesh import Rank
from ingot.ir.recipe import Recipe
from ingot.models.blocks.attention import AttentionNames
from ingot.models.params import Place

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 4, 6, 64
Q_SIZE, KV_SIZE, GROUP = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, HEADS // KV_HEADS
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(size, HIDDEN, generator=GENERATOR) for size in (Q_SIZE, KV_SIZE, KV_SIZE))


def by_groups() -> torch.Tensor:
    """[kv_heads, group + 2, head_dim] rows."""
    q, k, v = (x.view(KV_HEADS, -1, HEAD_DIM, HIDDEN) for x in (Q, K, V))
    return torch.cat([q, k, v], 1).view(-1, HIDDEN)


def in_turns() -> torch.Tensor:
    """[kv_heads, 2, head_dim] rows."""
    return torch.stack([x.view(KV_HEADS, HEAD_DIM, HIDDEN) for x in (K, V)], 1).view(-1, HIDDEN)


def in_blocks() -> torch.Tensor:
    """Two halves of the model, each with its rows of q, v and k."""
    halves = zip(*(x.chunk(2) for x in (Q, V, K)), strict=True)
    return torch.cat([torch.cat(half) for half in halves])


WAYS: dict[str, tuple[AttentionNames, dict[str, Callable[[], torch.Tensor]]]] = {
    "apart": (AttentionNames(), {"q_proj": lambda: Q, "k_proj": lambda: K, "v_proj": lambda: V}),
    "one after the other": (AttentionNames(merged="qkv"), {"qkv": lambda: torch.cat([Q, K, V])}),
    "by groups": (AttentionNames(merged="qkv", groups=KV_HEADS), {"qkv": by_groups}),
    "k and v in turns": (AttentionNames(merged_kv="kv", groups=KV_HEADS), {"q_proj": lambda: Q, "kv": in_turns}),
    "k and v one after the other": (
        AttentionNames(merged_kv="kv"),
        {"q_proj": lambda: Q, "kv": lambda: torch.cat([K, V])},
    ),
    "another order by blocks": (AttentionNames(merged="qkv", order="qvk", groups=2), {"qkv": in_blocks}),
}


def recipes(names: AttentionNames, make: Callable[[Place], Recipe], *, transposed: bool = False) -> list[Recipe]:
    place = Place("attn", torch.float32, transposed=transposed)
    return [make(one) for one in names.qkv(place, Q_SIZE, KV_SIZE, KV_SIZE)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_found(way: str, transposed: bool) -> None:
    names, tensors = WAYS[way]
    stored = {f"attn.{name}.weight": made().T if transposed else made() for name, made in tensors.items()}
    found = recipes(names, lambda place: place.matrix("weight"), transposed=transposed)
    for recipe, wanted in zip(found, (Q, K, V), strict=True):
        assert torch.equal(recipe.execute(stored.__getitem__), wanted)
    shapes: dict[str, tuple[int, ...]] = {}
    for recipe, wanted in zip(found, (Q, K, V), strict=True):
        for name, shape in recipe.source_shapes(tuple(wanted.shape)).items():
            shapes[name] = tuple(map(max, shape, shapes.get(name, shape)))
    assert shapes == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    # Merged again, as merge-linears does it.
    assert torch.equal(r.concat(found).execute(stored.__getitem__), torch.cat([Q, K, V]))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_biases_are_found(way: str, transposed: bool) -> None:
    names, tensors = WAYS[way]
    stored = {f"attn.{name}.bias": made()[:, 0] for name, made in tensors.items()}
    for recipe, wanted in zip(
        recipes(names, lambda place: place.source("bias"), transposed=transposed), (Q, K, V), strict=True
    ):
        assert torch.equal(recipe.execute(stored.__getitem__), wanted[:, 0])


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_has_its_heads(way: str) -> None:
    names, tensors = WAYS[way]
    stored = {f"attn.{name}.weight": made() for name, made in tensors.items()}
    sharded = [r.shard(one, "tp", 0) for one in recipes(names, lambda place: place.matrix("weight"))]
    merged = r.shard(r.concat([one.inputs[0] for one in sharded]), "tp", 0, (Q_SIZE, KV_SIZE, KV_SIZE))
    for index in range(2):
        rank, own = Rank(index, (("tp", index, 2),)), [x.chunk(2)[index] for x in (Q, K, V)]
        for recipe, wanted in zip(sharded, own, strict=True):
            assert torch.equal(recipe.for_rank(rank).execute(stored.__getitem__), wanted)
        assert torch.equal(merged.for_rank(rank).execute(stored.__getitem__), torch.cat(own))


@pytest.mark.parametrize("way", WAYS)
def test_parts_are_quantized_by_themselves(way: str) -> None:
    names, tensors = WAYS[way]
    stored = {f"attn.{name}.weight": made() for name, made in tensors.items()}
    for recipe, wanted in zip(recipes(names, lambda place: place.matrix("weight")), (Q, K, V), strict=True):
        own, plain = r.quantize(recipe, "int8_g32"), r.quantize(r.source("x"), "int8_g32")
        for part in find_format("int8_g32").parts:
            assert torch.equal(own[part].execute(stored.__getitem__), plain[part].execute(lambda _, x=wanted: x))


def test_rows_that_do_not_go_by_groups_are_refused() -> None:
    with pytest.raises(InternalError, match="10 rows of 'qkv' cannot be split into 4 groups"):
        Place("qkv", torch.float32).split(16, 10, 8, groups=4)
