"""Measure decode attention on this GPU, and FlashInfer's if it is installed.

    python benchmarks/kernels/attention.py [--shape 8b] [--seconds 40] [--cache-dtype f8e4m3] [--json FILE]

A step has one token of each sequence, through `append_attention`: rotary embedding, cache write and attention, with the
tile sizes that a compile would choose. FlashInfer computes only the attention, and its plan is not timed. A CUDA graph
of each holds a sequence of calls over pages of random numbers in random order, different ones for each call: half a GB
of them, or 128 calls. The graphs take turns. Result buffers begin as NaN, and the last result is compared with the
reference. Bytes are those of the cached keys and values. Over 8-bit caches only Ingot's kernel is timed.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import benchmarks_path  # noqa: F401
import flashinfer_peer
import torch
from copy_bandwidth import copy_bandwidth
from device_times import Recorded, check, take_turns, this_machine
from kernel_figures import Call, Peak, finish, kernel_parser, measure_figures, slug
from random_checkpoint import SHAPES, Config

from ingot.backends.triton.lower.attention.choice import known_tiles
from ingot.backends.triton.lower.attention.problem import AUTO, DecodeProblem
from ingot.backends.triton.tune.attention import Mix, Steps, checked
from ingot.backends.triton.tune.device import Machine, Pool, captured

PAGE = 16
CLASSES = (1, 16, 32, 64, 512)  # maximum tokens of the bucket classes of decode steps
# Cached positions of each sequence, including the step's token.
CONTEXTS: dict[str, tuple[int, ...]] = {
    "1 x 32k": (32768,),
    "8 x 16k": (16384,) * 8,
    "32 x 16k": (16384,) * 32,
    "1 x 64k, 31 x 2k": (65536, *(2048,) * 31),
    "32 x 2k": (2048,) * 32,
    "32 x 512": (512,) * 32,
    "256 x 640": (640,) * 256,
    "1 x 32k, 99 x 512": (32768, *(512,) * 99),
    "8 x 2k": (2048,) * 8,
    "1 x 2k": (2048,),
    "1 x 512": (512,),
}


def problem_of(config: Config, sequences: int) -> DecodeProblem:
    """Return the sizes of decode attention in a model: heads, head size and batch size.

    `config` is the content of the model's config.json. Steps have `sequences` sequences.
    """
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tokens = next(tokens for tokens in CLASSES if sequences <= tokens)
    return DecodeProblem(kv_heads, heads // kv_heads, config["head_dim"], PAGE, "bf16", tokens, True)


def cached_bytes(problem: DecodeProblem, contexts: Sequence[int]) -> int:
    """Return the bytes of keys and values that one call reads.

    They are 2 x key heads x bytes of a head, for each cached position. `contexts` has the number of cached positions of
    each sequence.
    """
    return sum(contexts) * 2 * problem.kv_heads * problem.row_bytes


def ours(machine: Machine, steps: Steps) -> Recorded:
    """Capture a CUDA graph that calls Ingot's kernel once on each of several inputs. Return the graph.

    With several inputs, the data does not stay in the GPU's cache. The graph computes the first input last, and this
    result is checked. Raises RuntimeError if it is wrong.
    """
    inputs, expected = steps.inputs, steps.expected
    call = checked(machine, known_tiles(steps.problem, machine.sm)[0], steps)
    graph = captured(partial(call, given) for given in reversed(inputs))
    return check(Recorded(graph, len(inputs), (steps, call)), call.output, expected)


def flashinfers(steps: Steps) -> Recorded:
    """Capture a CUDA graph that calls FlashInfer's kernel once on each of several inputs. Return the graph.

    With several inputs, the data does not stay in the GPU's cache. The graph computes the first input last, and this
    result is checked. Raises RuntimeError if it is wrong.
    """
    inputs, expected = steps.inputs, steps.expected
    scratch = flashinfer_peer.workspace(inputs[0][0].device)
    made = [
        flashinfer_peer.decode_call(scratch, q, kv, page_table, steps.mix.contexts)
        for q, kv, page_table, *_ in reversed(inputs)
    ]
    launches = [launch for launch, _ in made]
    launches[-1]()  # keep the setup of a first call out of the recording
    return check(Recorded(captured(launches), len(made), (steps, made)), made[-1][1], expected)


def measure(
    machine: Machine, problem: DecodeProblem, contexts: tuple[int, ...], pool: Pool, peer: bool
) -> dict[str, list[float]]:
    """Return the seconds of one decode attention call in each round of measurement, by implementation.

    Keys are "triton" for Ingot's kernel and, with `peer`, "flashinfer". `contexts` has the number of cached positions
    of each sequence. Raises RuntimeError for wrong results.
    """
    steps = Steps(problem, Mix(contexts), pool)
    recorded = {"triton": ours(machine, steps)}  # run it first: its later writes repeat this one
    if peer:
        recorded["flashinfer"] = flashinfers(Steps(replace(problem, append=False), steps.mix, pool))
    return take_turns(recorded)


def main() -> None:
    parser = kernel_parser(__doc__ or "", 40.0)
    parser.add_argument("--cache-dtype", choices=(AUTO, "f8e4m3", "i8"), default=AUTO)
    options = parser.parse_args()
    config, machine = SHAPES[options.shape], this_machine()
    peer = flashinfer_peer.installed() and options.cache_dtype == AUTO
    if peer:
        flashinfer_peer.build("fa2", config["head_dim"], torch.bfloat16)  # decode on tensor cores uses this
    peak, pool = Peak(copy_bandwidth("cuda")), Pool()
    work = (
        (
            Call(slug(name), name, cached_bytes(problem, contexts)),
            partial(measure, machine, problem, contexts, pool, peer),
        )
        for name, contexts in CONTEXTS.items()
        for problem in [replace(problem_of(config, len(contexts)), cache_dtype=options.cache_dtype)]
    )
    figures, missing = measure_figures("attention", work, peak, options.seconds, ours="triton", peer="flashinfer")
    missing |= flashinfer_peer.missing("attention")
    finish(__file__, options, figures, missing)


if __name__ == "__main__":
    main()
