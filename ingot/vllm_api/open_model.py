"""Open the model that vLLM's arguments describe, with `ingot.LLM`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.ir.artifact.manifest_file import MANIFEST, device_of, is_artifact
from ingot.ir.errors import ArtifactError, OptionError
from ingot.serve.executor_backend import ON_THIS_HOST
from ingot.serve.find_artifact import find_artifact
from ingot.serve.llm import LLM
from ingot.serve.mesh_sizes import SIZES, with_mesh
from ingot.vllm_api.argument_meanings import MEANINGS
from ingot.vllm_api.engine_args import EngineArgs
from ingot.vllm_api.quantization import Quantization, read_quantization

# vLLM's names of dtypes, and the names in a manifest and of the option `dtype` of a compile.
_DTYPES = {"half": "float16", "float": "float32", "torch.float16": "float16", "torch.bfloat16": "bfloat16"} | {
    "torch.float32": "float32"
}
_IN_MANIFEST = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def open_model(args: EngineArgs) -> LLM:
    """Return the model that `args` describe, loaded. A checkpoint is compiled first if the compile cache lacks it.

    Raises IngotError if the model cannot be compiled or loaded, or if an argument disagrees with an artifact.
    """
    if args.tokenizer not in (None, args.model):
        raise _refused("tokenizer", args.tokenizer, str(args.model))
    if args.tokenizer_revision not in (None, args.revision):
        raise _refused("tokenizer_revision", args.tokenizer_revision, str(args.revision))
    compiled = is_artifact(args.model)
    quantization = None if args.quantization is None else read_quantization(args.quantization)
    if compiled and quantization is not None:
        made = f" --quantize {quantization.format}" if quantization.format else ""
        raise OptionError(
            f"quantization = {args.quantization!r} with an artifact, whose weights are stored already",
            where="EngineArgs.quantization",
            expected="None with an artifact",
            hint=f"compile the checkpoint with it: compile-model CHECKPOINT -o NAME.ingot{made}",
        )
    options = {} if compiled else _compile_options(args, quantization)
    sizes = {name: size for name in SIZES if (size := getattr(args, name)) != MEANINGS[name][0]}
    options = with_mesh(args.model, {**options, **sizes})
    path = find_artifact(args.model, options, quantization.methods if quantization else None)
    limits = _manifest(path)
    if compiled:
        dtype, own = _dtype(args), _IN_MANIFEST.get(str(limits["dtype"]))
        if dtype not in ("auto", own):
            raise _refused("dtype", args.dtype, f"'auto' or '{own}', as the artifact was compiled")
        if args.kv_cache_dtype != "auto":
            raise _refused("kv_cache_dtype", args.kv_cache_dtype, "'auto' with an artifact")
    if args.block_size not in (None, limits["page_size"]):
        raise _refused("block_size", args.block_size, f"{limits['page_size']}, as the artifact was compiled")
    if not isinstance(args.max_logprobs, int) or not 0 <= args.max_logprobs <= int(str(MEANINGS["max_logprobs"][0])):
        raise _refused("max_logprobs", args.max_logprobs, "0 to 20")
    return LLM(
        path,
        distributed_executor_backend=args.distributed_executor_backend or ON_THIS_HOST,
        memory=_memory(args, path),
        num_kv_pages=args.num_gpu_blocks_override,
        enable_chunked_prefill=args.enable_chunked_prefill is not False,
        enable_prefix_caching=args.enable_prefix_caching,
        disable_cascade_attn=bool(args.disable_cascade_attn),
        scheduling_policy=args.scheduling_policy,
        max_model_len=_length(args),
        max_num_seqs=_at_most(args, "max_num_seqs", limits["max_batch"]),
        max_num_batched_tokens=_at_most(args, "max_num_batched_tokens", limits["max_tokens"]),
        seed=0 if args.seed is None else args.seed,
        cuda_graphs="none" if args.enforce_eager else "idle",
        enable_lora=bool(args.enable_lora),
        max_cpu_loras=args.max_cpu_loras,
    )


# vLLM's names of KV caches that have other names here. Unknown names are refused by the compile.
_CACHES: Mapping[str, Mapping[str, str]] = {
    "fp8_e4m3": {"kv_cache_dtype": "fp8"},
    "fp8_per_token_head": {"kv_cache_dtype": "fp8", "kv_cache_scales": "token"},
    "int8_per_token_head": {"kv_cache_dtype": "int8", "kv_cache_scales": "token"},
}


def _compile_options(args: EngineArgs, quantization: Quantization | None) -> dict[str, Any]:
    """Return the options that a checkpoint is compiled with. They are arguments of `compile_model`."""
    options: dict[str, Any] = {}
    if args.revision is not None:
        options["revision"] = args.revision
    if _dtype(args) != "auto":
        options["dtype"] = _dtype(args)
    if quantization is not None and quantization.format is not None:
        options["quantize"] = quantization.format
    if args.kv_cache_dtype != "auto":
        options |= _CACHES.get(args.kv_cache_dtype, {"kv_cache_dtype": args.kv_cache_dtype})
    if _length(args) is not None:
        options["max_seq_len"] = args.max_model_len
    if args.enable_lora:
        options["max_loras"], options["max_lora_rank"] = (
            MEANINGS[name][0] if (value := getattr(args, name)) is None else value
            for name in ("max_loras", "max_lora_rank")
        )
    return options


def _dtype(args: EngineArgs) -> str:
    return _DTYPES.get(str(args.dtype), str(args.dtype))


def _length(args: EngineArgs) -> int | None:
    """Return the most tokens of a sequence; None for the model's own limit. vLLM's -1 means that too."""
    return None if args.max_model_len in (None, -1) else args.max_model_len


def _at_most(args: EngineArgs, name: str, compiled: Any) -> Any:
    """Return a limit of steps, lowered to what the artifact was compiled for. Smaller steps have equal results."""
    value = getattr(args, name)
    return min(value, compiled) if isinstance(value, int) and not isinstance(value, bool) else value


def _memory(args: EngineArgs, path: Path) -> int | None:
    """Return the most bytes for serving, as the share `gpu_memory_utilization` says. None: Ingot's default."""
    share = args.gpu_memory_utilization
    if share in (None, MEANINGS["gpu_memory_utilization"][0]):
        return None
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise _refused("gpu_memory_utilization", share, "a number above 0, at most 1")
    if device_of(path) != "cuda":
        return int(share * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    import torch

    return int(share * torch.cuda.mem_get_info()[1])


def _manifest(path: Path) -> dict[str, Any]:
    """Return the limits in an artifact's manifest. The engine checks them when it loads the artifact."""
    try:
        model = json.loads((path / MANIFEST).read_bytes())["model"]
        return {
            "dtype": model["dtype"],
            **{name: int(model[name]) for name in ("page_size", "max_batch", "max_tokens")},
        }
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ArtifactError(f"the manifest cannot be read: {error!r:.200}", where=str(path / MANIFEST)) from None


def _refused(name: str, value: object, expected: str) -> OptionError:
    return OptionError(
        f"{name} = {value!r:.80} is not supported",
        where=f"EngineArgs.{name}",
        expected=expected,
        hint=MEANINGS[name][1],
    )
