"""LoRA adapters on one rank: their files, their parts in host memory, and their slots on the device."""
