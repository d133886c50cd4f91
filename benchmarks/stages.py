"""Measure how busy each pipeline stage of a mesh of CPU processes is, while requests decode.

    python benchmarks/stages.py [--stages 2] [--layers 4] [--width 1024] [--requests 64] [--tokens 48] [--json FILE]

The model is a Llama with random weights whose layers are equal and whose vocabulary is small, so that all stages take
equal time. A stage is busy while it computes, and not while it waits for values of other stages, for rank 0's order of
a step, or, on rank 0, while the host plans steps and takes tokens. The prompts are computed before the measurement.
"""

import argparse
import tempfile
import time
from pathlib import Path

from random_checkpoint import config_of, write_checkpoint
from results import Figure, add_json_option, report

from ingot import LLM, SamplingParams, compile_model

_PROMPT_TOKENS = 16
_VOCAB = 512
_HEAD_DIM = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("stages", 2), ("layers", 4), ("width", 1024), ("requests", 64), ("tokens", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backend", help="as of compile-model")
    add_json_option(parser)
    options = parser.parse_args()
    heads = options.width // _HEAD_DIM
    config = config_of(
        "1b",
        num_hidden_layers=options.layers,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=_HEAD_DIM,
        vocab_size=_VOCAB,
        bos_token_id=0,
        eos_token_id=1,
    )
    limits = {
        "max_batch": options.requests,
        "max_tokens": options.requests * _PROMPT_TOKENS,
        "max_seq_len": _PROMPT_TOKENS + options.tokens,
    }
    with tempfile.TemporaryDirectory(prefix="ingot-stages-") as folder:
        checkpoint = write_checkpoint(Path(folder) / "checkpoint", config)
        mesh = {"pp": options.stages}
        given = {} if options.backend is None else {"backend": options.backend}
        compile_model(checkpoint, Path(folder) / "model.ingot", mesh=mesh, target="cpu", **limits, **given)
        figures = measure(Path(folder) / "model.ingot", options.requests, options.tokens)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    report(__file__, options.json, settings, figures)


def measure(artifact: Path, requests: int, tokens: int) -> dict[str, Figure]:
    """Decode `tokens` tokens of `requests` requests, and return the share of the time that each stage computes."""
    llm = LLM(artifact)
    leader, engine = llm.loaded.leader, llm.llm_engine
    if leader is None:
        raise SystemExit("the artifact was compiled for one device")
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for index in range(requests):
        prompt = [(7 * index + place) % _VOCAB for place in range(_PROMPT_TOKENS)]
        engine.add_request(f"{index}", {"prompt_token_ids": prompt}, params)
    seen: set[str] = set()
    while len(seen) < requests:  # until all prompts are computed
        seen |= {output.request_id for output in engine.step()}
    before, began, steps, gained = busy(llm), time.perf_counter_ns(), 0, 0
    while engine.has_unfinished():
        outputs = engine.step()
        if any(output.finished for output in outputs):
            break  # then steps become smaller
        steps, gained = steps + 1, gained + len(outputs)
    wall, after = time.perf_counter_ns() - began, busy(llm)
    leader.close()
    shares = {f"stage_{index}_busy": (after[index] - before[index]) / wall for index in before}
    return {
        **{
            name: Figure(value=share, unit="", what="the share of the time in which it computes")
            for name, share in shares.items()
        },
        "step": Figure(value=wall / steps / 1e9, unit="s", what="the mean time between two steps' tokens"),
        "decode": Figure(value=gained / wall * 1e9, unit="tokens/s", what="all requests together"),
    }


def busy(llm: LLM) -> dict[int, int]:
    """The nanoseconds that each rank has computed so far."""
    leader = llm.loaded.leader
    assert leader is not None
    return {0: llm.loaded.executor.busy, **leader.busy}


if __name__ == "__main__":
    main()
