"""Checkpoints of Llama's architecture with random weights, of any size: what benchmarks compile."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Shape:
    """Sizes as a config.json names them; embeddings are tied. The defaults are Llama 3.2 1B's."""

    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 16
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    vocab_size: int = 128256

    def layer(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's tensors, by the names that they have in the layer."""
        key_values = self.hidden_size // self.num_attention_heads * self.num_key_value_heads
        return {
            "self_attn.q_proj": (self.hidden_size, self.hidden_size),
            "self_attn.k_proj": (key_values, self.hidden_size),
            "self_attn.v_proj": (key_values, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, self.hidden_size),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size),
            "input_layernorm": (self.hidden_size,),
            "post_attention_layernorm": (self.hidden_size,),
        }


def write_checkpoint(folder: Path, shape: Shape) -> Path:
    """A checkpoint folder of bfloat16 weights, normal with a deviation of 0.02 as models are initialized; norms too."""
    generator = torch.Generator().manual_seed(0)

    def weight(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    tensors = {
        "model.embed_tokens.weight": weight(shape.vocab_size, shape.hidden_size),
        "model.norm.weight": weight(shape.hidden_size),
    }
    for layer in range(shape.num_hidden_layers):
        tensors |= {f"model.layers.{layer}.{name}.weight": weight(*sizes) for name, sizes in shape.layer().items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **vars(shape),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
