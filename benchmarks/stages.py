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

from ingot import SamplingParams, compile_model
from ingot.ir.mesh import ranks
from ingot.runtime.engines.engine import Engine, EngineRequest
from ingot.runtime.loading.loader import Loaded, load_artifact
from ingot.serve.set_up import make_engine

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
    """Decode `tokens` tokens of `requests` requests, and return the share of the time that each stage computes.

    A CPU's time is the host's. On a GPU, events are recorded between which a stage computes: after it has received the
    values of a step, and before it sends its own. Exits if the artifact was compiled for one device.
    """
    loaded = load_artifact(artifact, capture="all", all_ranks=True, clock=True)
    leader, vocab = loaded.leader, loaded.limits.vocab_size
    if leader is None:
        raise SystemExit("the artifact was compiled for one device")
    engine = make_engine(
        loaded,
        max_num_seqs=None,
        max_num_batched_tokens=None,
        max_num_mixed_tokens=None,
        chunked_prefill=True,
        prefix_caching=None,
        cascade=True,
        policy="fcfs",
        seed=0,
    )
    assert isinstance(engine, Engine)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for index in range(requests):
        prompt = [(7 * index + place) % vocab for place in range(_PROMPT_TOKENS)]
        engine.add_requests([EngineRequest(f"{index}", {"prompt_token_ids": prompt}, params)])
    seen: set[str] = set()
    while len(seen) < requests:  # until all prompts are computed
        seen |= {output.request_id for output in engine.step()}
    before, began, steps, gained = busy(loaded), time.perf_counter_ns(), 0, 0
    while engine.has_unfinished():
        outputs = engine.step()
        if any(output.finished for output in outputs):
            break  # then steps become smaller
        steps, gained = steps + 1, gained + len(outputs)
    wall, after = time.perf_counter_ns() - began, busy(loaded)
    leader.close()
    stages = {rank.index: rank.stage for rank in ranks(loaded.context.mesh)}
    shares: dict[int, float] = {}
    for index, stage in stages.items():  # of a stage with several ranks, the least busy one
        shares[stage] = min(shares.get(stage, 1.0), (after[index] - before[index]) / wall)
    return {
        **{
            f"stage_{stage}_busy": Figure(value=share, unit="", what=f"{requests} requests: stage {stage} computes")
            for stage, share in shares.items()
        },
        "step": Figure(value=wall / steps / 1e9, unit="s", what="the mean time between two steps' tokens"),
        "decode": Figure(value=gained / wall * 1e9, unit="tokens/s", what="all requests together"),
    }


def busy(loaded: Loaded) -> dict[int, int]:
    """The nanoseconds that each rank has computed so far."""
    assert loaded.leader is not None
    return {0: loaded.executor.busy, **loaded.leader.busy}


if __name__ == "__main__":
    main()
