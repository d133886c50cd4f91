"""`LoRARequest`: the adapter of a request, in vLLM's form. Importing this imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRARequest:
    """The LoRA adapter of a request.

    lora_name     its name; one name means one folder
    lora_int_id   a number above 0 that identifies it; Ingot uses the name
    lora_path     the PEFT folder
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
