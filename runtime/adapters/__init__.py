"""LoRA adapters while serving: reading them, their slots on the device, and requests that wait for one."""
