"""The matmuls in the steps of some decoders, and the GPU that the tables of tile sizes are for."""

from dataclasses import dataclass, replace

import benchmarks_path  # noqa: F401
from random_checkpoint import SHAPES

from ingot.backends.triton.lower.linear.choice import known_tiles
from ingot.backends.triton.lower.linear.problem import LinearProblem
from ingot.backends.triton.lower.linear.tiles import Tiles
from ingot.backends.triton.lower.sizes import padded_tokens
from ingot.backends.triton.tune.device import Machine
from ingot.backends.triton.tune.linear_candidates import AnyTiles, stages_that_fit

MACHINE = Machine(sm=90, cores=132)


@dataclass(frozen=True)
class Decoder:
    """The sizes of the matmuls of a decoder-only model.

    layers     the number of decoder layers
    hidden     the size of hidden states
    qkv        the elements of q, k and v together
    heads      the elements of all query heads together
    ffn        the size of the feed-forward block
    vocab      the size of the vocabulary
    gated      the feed-forward block has a gate, and Ingot's matmul kernels include the norm before them
    parallel   attention and the feed-forward block read the same norm, so one matmul computes q, k, v and feed-forward
    """

    name: str
    layers: int
    hidden: int
    qkv: int
    heads: int  # all heads together
    ffn: int
    vocab: int
    gated: bool = True
    parallel: bool = False

    @staticmethod
    def of(shape: str) -> "Decoder":
        """Return the matmul sizes of a model shape in random_checkpoint.py, such as "8b"."""
        config = SHAPES[shape]
        heads, kv_heads = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        sizes = (config["hidden_size"], heads + 2 * kv_heads, heads, config["intermediate_size"], config["vocab_size"])
        return Decoder(shape, config["num_hidden_layers"], *sizes)

    def parts(self, tokens: int) -> dict[str, LinearProblem]:
        """Return the matmuls of a step of `tokens` tokens, by name.

        They are the matmuls of one layer, such as "qkv" and "o", and of the output layer, "head".
        """

        def part(columns: int, depth: int, result: str = "bf16", **around: bool) -> LinearProblem:
            return LinearProblem(columns, depth, padded_tokens(tokens), "bf16", result, **around)

        o, down = part(self.hidden, self.heads, residual=True), part(self.hidden, self.ffn, residual=True)
        head = part(self.vocab, self.hidden, "f32", norm=self.gated)
        if self.parallel:
            return {"qkv": part(self.qkv + self.ffn, self.hidden), "o": o, "down": down, "head": head}
        qkv = part(self.qkv, self.hidden, norm=self.gated)
        up = {"gate_up": part(self.ffn, self.hidden, gated=True, norm=True)}
        if not self.gated:
            up = {"up": part(self.ffn, self.hidden)}
        return {"qkv": qkv, "o": o, **up, "down": down, "head": head}


DECODERS = (
    *map(Decoder.of, ("8b", "1b", "qwen3-0.6b")),
    # From the config.json of random_checkpoint.FAMILIES.
    Decoder("phi-2", 32, 2560, 7680, 2560, 10240, 51200, gated=False, parallel=True),
    Decoder("gpt2-2.7b", 32, 2560, 7680, 2560, 10240, 50257, gated=False),
    Decoder("falcon-7b", 32, 4544, 4672, 4544, 18176, 65024, gated=False, parallel=True),
)


def best_known(problem: LinearProblem) -> AnyTiles:
    """Return the tile sizes that Ingot's compiler would choose for a matmul on the GPU described by MACHINE."""
    return known_tiles(problem.product(), problem.tokens, MACHINE.sm)[0]


def for_other_tokens(problem: LinearProblem, tiles: Tiles) -> Tiles:
    """Adapt `tiles`, which were chosen for fewer tokens, to `problem`.

    The tile sizes stay equal. The number of pipeline stages is reduced until they fit into shared memory.
    """
    most = stages_that_fit(problem, MACHINE, tiles.block_n, tiles.block_k, tiles.splits, 1)
    return replace(tiles, stages=min(tiles.stages, most))
