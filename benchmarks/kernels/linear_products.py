"""The products of three decoders' steps, and the tile sizes that are worth a try for each."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch

from ingot.backends.triton.lower.linear import padded_tokens
from ingot.backends.triton.lower.linear_choice import matvec_tiles, tiles
from ingot.backends.triton.lower.linear_tiles import MatvecTiles, Product, Tiles

DTYPE = torch.bfloat16
SHARED_MEMORY = 227 << 10  # of a block on compute capability 9.0 (CUDA C++ programming guide, table of capabilities)
SM, CORES = 90, 132


@dataclass(frozen=True)
class Part:
    """A product of a layer: its sizes, and what stands around it."""

    name: str
    columns: int
    depth: int
    gated: bool = False
    norm: bool = False
    residual: bool = False
    logits: bool = False

    @property
    def bytes(self) -> int:
        return self.columns * (2 if self.gated else 1) * self.depth * DTYPE.itemsize


@dataclass(frozen=True)
class Decoder:
    """The shapes of a decoder's step."""

    name: str
    layers: int
    hidden: int
    qkv: int
    heads: int  # all of them together
    ffn: int
    vocab: int

    def layer(self) -> tuple[Part, ...]:
        return (
            Part("qkv", self.qkv, self.hidden, norm=True),
            Part("o", self.hidden, self.heads, residual=True),
            Part("gate_up", self.ffn, self.hidden, gated=True, norm=True),
            Part("down", self.hidden, self.ffn, residual=True),
        )

    def head(self) -> Part:
        return Part("head", self.vocab, self.hidden, norm=True, logits=True)


# Llama-3.1-8B, Llama-3.2-1B and Qwen3-0.6B, by their config.json.
DECODERS = (
    Decoder("8b", 32, 4096, 6144, 4096, 14336, 128256),
    Decoder("1b", 16, 2048, 3072, 2048, 8192, 128256),
    Decoder("0.6b", 28, 1024, 4096, 2048, 3072, 151936),
)

Chosen = MatvecTiles | Tiles


def candidates(part: Part, tokens: int) -> list[Chosen]:
    found = _matvec_candidates(part) if tokens == 1 else _tile_candidates(part, padded_tokens(tokens))
    return list(dict.fromkeys(found))


def _matvec_candidates(part: Part) -> Iterator[MatvecTiles]:
    """Tiles that leave each thread 64 to 256 bytes of weights to hold, of 128 registers that four blocks leave it."""
    parts = 2 if part.gated else 1
    for block_k in (512, 1024, 2048, 4096):
        for warps in (4, 8):
            for held in (64, 128, 256):
                block_n = held * 32 * warps // (block_k * DTYPE.itemsize * parts)
                if block_k <= part.depth and 1 <= block_n <= 32:
                    yield MatvecTiles(block_n, block_k, warps)


def _tile_candidates(part: Part, tokens: int) -> Iterator[Tiles]:
    """Tiles that give each multiprocessor up to two programs, with room for one or two in its shared memory."""
    for block_n, splits, block_k, programs in product((16, 32, 64, 128), (1, 2, 4, 8), (128, 256), (1, 2)):
        blocks = -(-part.columns // block_n)
        crowded = blocks * splits > 2 * CORES
        if ((splits > 1 or block_n < 64) and crowded) or (block_n == 128 and part.gated):
            continue  # nothing gained: smaller tiles and more splits read x, or write sums, more often
        if blocks * splits < CORES // 3:
            continue
        stages = stages_that_fit(part, tokens, block_n, block_k, splits, programs)
        if stages < 2 or part.depth < splits * block_k:
            continue
        for lines in (0, 16):
            yield Tiles(block_n, block_k, splits, 4, stages, lines)


def stages_that_fit(part: Part, tokens: int, block_n: int, block_k: int, splits: int, programs: int) -> int:
    """Blocks on the way at once: as many as a program has, 8 at most, and what its share of shared memory holds."""
    block = (block_n * (2 if part.gated else 1) + tokens) * block_k * DTYPE.itemsize
    steps = -(-part.depth // (splits * block_k))
    return min(8, steps + 1, (SHARED_MEMORY // programs - 4096) // block)


def more_candidates(part: Part, tokens: int, chosen: Chosen) -> list[Chosen]:
    """The best tiles so far, with more or less of the weights fetched ahead into the cache, or by more threads."""
    more: list[Chosen] = [replace(chosen, lines=lines) for lines in (0, 4, 8, 32)]
    return [*more, replace(chosen, warps=12 - chosen.warps)] if tokens > 1 else more


def for_other_tokens(part: Part, tokens: int, chosen: Tiles) -> Tiles:
    """The same tiles with as many stages as fit with more tokens."""
    most = stages_that_fit(part, padded_tokens(tokens), chosen.block_n, chosen.block_k, chosen.splits, 1)
    return replace(chosen, stages=min(chosen.stages, most))


def best_known(part: Part, tokens: int) -> Chosen:
    """What the lowering takes by itself."""
    shape = Product(part.columns, part.depth, part.gated, DTYPE)
    return matvec_tiles(shape) if tokens == 1 else tiles(shape, padded_tokens(tokens), SM)
