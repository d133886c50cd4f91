"""Quantized checkpoints as other libraries write them, and the float model that they stand for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from staged import LIMITS, logits_of, staged
from tiny_checkpoint import Tiny
from transformers import AutoModelForCausalLM

from ingot.compile.request import Request
from ingot.frontend.quantized.readers import find_reader
from ingot.frontend.quantized.stored import Logical, Stored
from ingot.frontend.safetensors_header import TensorInfo
from ingot.ir import ops
from ingot.ir.numerics.tolerances import compare
from ingot.ir.program import Program

Tensors = dict[str, torch.Tensor]
UP = "model.layers.0.mlp.up_proj"
# Takes a module's name and its weight. Returns what is stored for it, by the rest of the name, and the weight that this
# stands for, computed without Ingot. None: the weight is stored as floats.
Write = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor] | None]
# Rounds the input of a linear, computed without Ingot. It is given the module's name.
Round = Callable[[str, torch.Tensor], torch.Tensor]

PROMPTS = [[5, 17, 3, 60, 2, 41], [11], list(range(20))]
MODEL = Tiny(
    "llama-stored",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 256,
        "vocab_size": 151,
        "rms_norm_eps": 0.01,
        "rope_theta": 1000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 160,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    },
    seed=11,
)
LIMIT_OPTIONS = {"target": "cpu", "backend": "reference", "max_batch": 4, "max_tokens": 64, "max_seq_len": 96}


@dataclass(frozen=True)
class Written:
    """A quantized checkpoint, and the weights that it stands for by name."""

    folder: Path
    floats: Tensors

    def request(self, **options: Any) -> Request:
        return Request.read(self.folder, **{**LIMIT_OPTIONS, **options})

    def tensors(self) -> Tensors:
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors")

    def rewrite(self, edit: Callable[[Tensors], None], **fields: Any) -> "Written":
        """Change stored tensors, and fields of the quantization_config; None removes a field."""
        tensors = self.tensors()
        edit(tensors)
        save_file(tensors, self.folder / "model.safetensors")
        config = json.loads((self.folder / "config.json").read_text())
        made = {**config["quantization_config"], **fields}
        config["quantization_config"] = {name: value for name, value in made.items() if value is not None}
        (self.folder / "config.json").write_text(json.dumps(config))
        return self


def write_quantized(folder: Path, described: Mapping[str, Any], write: Write, **changes: Any) -> Written:
    """Write the model with its linears stored by `write`, and `described` as its quantization_config."""
    tensors = {}
    MODEL.write(folder, **{**changes, "quantization_config": dict(described)})
    from safetensors.torch import load_file

    floats = load_file(folder / "model.safetensors")
    for name, tensor in list(floats.items()):
        module = name.removesuffix(".weight")
        made = write(module, tensor) if tensor.dim() == 2 and "embed" not in name else None
        if made is None:
            tensors[name] = tensor
            continue
        parts, floats[name] = made
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Written(folder, floats)


def logical_of(config: Mapping[str, Any], tensors: Tensors) -> Logical:
    """Return the weights of a checkpoint with these tensors and this quantization_config. No file is written."""
    infos = {
        name: TensorInfo(name, tensor.dtype, tuple(tensor.shape), Path("model.safetensors"), 0, 0)
        for name, tensor in tensors.items()
    }
    reader = find_reader({"quantization_config": dict(config)}, "config.json")
    assert reader is not None
    return reader(Stored(infos, tensors.__getitem__, "m"))


def with_part(name: str, value: torch.Tensor | None) -> Callable[[Tensors], None]:
    """Return an edit of a checkpoint's tensors that stores one part of the linear UP anew, or deletes it for None."""

    def edit(tensors: Tensors) -> None:
        if value is None:
            del tensors[f"{UP}.{name}"]
        else:
            tensors[f"{UP}.{name}"] = value

    return edit


def not_the_head(write: Write) -> Write:
    return lambda module, weight: None if module == "lm_head" else write(module, weight)


def check_bits(written: Written, rtol: float = 0.0, atol: float = 0.0) -> Request:
    """Check that each weight is made bit by bit, and that no stored tensor is left over.

    With `rtol` or `atol`, elements may be off by as much.
    """
    request = written.request()
    request.trace()  # totality
    recipes = request.checkpoint.logical.recipes
    linears = [name for name, tensor in written.floats.items() if tensor.dim() == 2 and "embed" not in name]
    stored = written.tensors()
    assert set(recipes) == {name for name in linears if name not in stored or stored[name].dtype != torch.float32}
    for name, recipe in recipes.items():
        found, wanted = recipe.execute(request.checkpoint.read), written.floats[name]
        assert found.dtype == torch.float32 and found.shape == wanted.shape, name
        if rtol or atol:
            assert bool(((found - wanted).abs() <= atol + rtol * wanted.abs()).all()), name
        else:
            assert torch.equal(found, wanted.float()), name
    return request


def adopted(written: Written, **options: Any) -> tuple[Program, dict[str, Any]]:
    """The program after all fusions, and the records of its passes by name."""
    request = written.request(**options)
    steps, lowered = staged(request.trace(), request.pipeline(), LIMITS)
    return lowered.fused, {step.name: step.record for step in steps}


def formats_of(program: Program) -> set[str]:
    return {str(node.kwargs["format"]) for node in program.calls(ops.quant_linear.overload)}


def check_logits(
    written: Written, rounds: Round | None = None, factor: float = 20, rtol: float = 0.0, atol: float = 0.0
) -> Program:
    """Check every weight, and the logits in float64 against transformers with the weights that are stood for."""
    request = check_bits(written, rtol, atol)
    program, records = adopted(written)
    assert records["adopt-quantized"].matches == len(request.checkpoint.logical.recipes)
    found = logits_of(program, request.checkpoint.read, PROMPTS).exact
    expected = float_logits(written, rounds)
    problem = compare(found, expected, torch.float32, factor=factor)
    assert problem is None, problem
    return program


def float_logits(written: Written, rounds: Round | None = None) -> torch.Tensor:
    """Logits of transformers in float64, where `rounds` rounds the input of each quantized linear."""
    other = written.folder.parent / f"{written.folder.name}-floats"
    other.mkdir(exist_ok=True)
    config = json.loads((written.folder / "config.json").read_text())
    config.pop("quantization_config")
    (other / "config.json").write_text(json.dumps(config))
    floats = {name: tensor.float().contiguous() for name, tensor in written.floats.items()}
    save_file(floats, other / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float64, attn_implementation="eager")
    if rounds is not None:
        stored = written.tensors()
        for name, module in model.named_modules():
            plain = stored.get(f"{name}.weight")
            if isinstance(module, torch.nn.Linear) and (plain is None or plain.dtype != torch.float32):
                module.register_forward_pre_hook(lambda _, args, name=name: (rounds(name, args[0]),))
    with torch.no_grad():
        return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS])
