"""The products of three decoders' steps, on the machine that the tables of tile sizes are for."""

from dataclasses import dataclass, replace

from ingot.backends.triton.lower.linear import padded_tokens
from ingot.backends.triton.lower.linear_choice import known_tiles
from ingot.backends.triton.lower.linear_problem import LinearProblem
from ingot.backends.triton.lower.linear_tiles import Tiles
from ingot.backends.triton.tune.device import Machine
from ingot.backends.triton.tune.linear_candidates import AnyTiles, stages_that_fit

MACHINE = Machine(sm=90, cores=132)


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

    def parts(self, tokens: int) -> dict[str, LinearProblem]:
        """The products of a layer and of the head, in a step of so many tokens, by name."""

        def part(columns: int, depth: int, result: str = "bf16", **around: bool) -> LinearProblem:
            return LinearProblem(columns, depth, padded_tokens(tokens), "bf16", result, **around)

        return {
            "qkv": part(self.qkv, self.hidden, norm=True),
            "o": part(self.hidden, self.heads, residual=True),
            "gate_up": part(self.ffn, self.hidden, gated=True, norm=True),
            "down": part(self.hidden, self.ffn, residual=True),
            "head": part(self.vocab, self.hidden, "f32", norm=True),
        }


# Llama-3.1-8B, Llama-3.2-1B and Qwen3-0.6B, by their config.json.
DECODERS = (
    Decoder("8b", 32, 4096, 6144, 4096, 14336, 128256),
    Decoder("1b", 16, 2048, 3072, 2048, 8192, 128256),
    Decoder("0.6b", 28, 1024, 4096, 2048, 3072, 151936),
)


def best_known(problem: LinearProblem) -> AnyTiles:
    """What the lowering takes by itself."""
    return known_tiles(problem.product(), problem.tokens, MACHINE.sm)[0]


def for_other_tokens(problem: LinearProblem, tiles: Tiles) -> Tiles:
    """The same tiles with as many stages as fit with more tokens."""
    most = stages_that_fit(problem, MACHINE, tiles.block_n, tiles.block_k, tiles.splits, 1)
    return replace(tiles, stages=min(tiles.stages, most))
