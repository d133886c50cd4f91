"""Which tiny checkpoints there are, by name: whole ones, and cuts of one layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from families import FAMILIES
from tiny_checkpoint import Tiny
from tiny_families import FIRST, OTHERS

from ingot.models.architectures import ARCHITECTURES

_MORE = tuple(tiny for family in FAMILIES.values() for tiny in family.checkpoints)
TINY: Mapping[str, Tiny] = {tiny.name: tiny for tiny in (*FIRST, *OTHERS, *_MORE)}


def first_of(architecture: str) -> Tiny:
    """The first checkpoint of an architecture, or of another name for what the same reader reads."""
    read = ARCHITECTURES[architecture].read
    tiny = next(one for one in TINY.values() if ARCHITECTURES[one.config["architectures"][0]].read is read)
    return replace(tiny, config={**tiny.config, "architectures": [architecture]})


def _cut(tiny: Tiny) -> Tiny:
    """The first layer of a checkpoint, in sizes that all cuts share.

    What two families compute alike is then one executable. Each takes the compiler some seven seconds, whatever its
    size; and the region between two layers, which a cut lacks, repeats what stands in the others.
    """
    sizes = {"hidden_size": 84, "head_dim": 14, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 103, "vocab_size": 379, "num_hidden_layers": 1}
    if tiny.config["model_type"] in FAMILIES:
        sizes = {**FAMILIES[tiny.config["model_type"]].cut}
    config = {**tiny.config, **sizes}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:1]
    return replace(tiny, name=f"{tiny.family}-cut", config=config)


# One of each family but the first two, whose checkpoints are small enough to be compiled whole.
CUTS: Mapping[str, Tiny] = {
    f"{tiny.family}-cut": _cut(tiny)
    for tiny in reversed((*OTHERS, *_MORE))  # the first checkpoint of a family comes last and stays
    if tiny.family not in {whole.family for whole in FIRST}
}
CHECKPOINTS: Mapping[str, Tiny] = {**TINY, **CUTS}


def compile_options(name: str) -> dict[str, Any]:
    """What tests compile the checkpoint `name` with: equal limits make equal regions, which the cache has once."""
    limits = {"max_batch": 8, "max_tokens": 1024, "max_seq_len": CHECKPOINTS[name].max_seq_len}
    return {"target": "cpu", "jobs": 1, **limits}


# One checkpoint for each mechanism, for what every test run can afford; the others are for `--run-slow`.
QUICK = ("llama-biased", "qwen3-scaled", "gemma2-capped", "cohere-normed", "smollm3-nope", "phi3-long")
