"""LoRARequest: an adapter as users of LLM name it."""

from __future__ import annotations

from dataclasses import dataclass

from ....proto.errors import InvalidRequest, InvalidType
from ....proto.lora import MAX_LORA_NAME_CHARS, MAX_LORA_PATH_CHARS, LoraReference


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter for a call of LLM, named as in vLLM.

    The engine reads the adapter when it is first used, and keeps the least recently used ones no longer than
    `max_cpu_loras` allows.

    Args:
        lora_name: its name in errors.
        lora_int_id: at least 1. Use another number, or another name, after the adapter's files have changed.
        lora_path: its directory, in PEFT's layout.

    Raises:
        InvalidRequest: a field is not allowed.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        for field, value, most in (
            ("lora_name", self.lora_name, MAX_LORA_NAME_CHARS),
            ("lora_path", self.lora_path, MAX_LORA_PATH_CHARS),
        ):
            if not isinstance(value, str):
                raise InvalidType(field, f"is of type {type(value).__name__}, must be text")
            if not 1 <= len(value) <= most:
                raise InvalidRequest(field, f"has {len(value)} characters, must have 1 to {most}")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int):
            raise InvalidType("lora_int_id", f"is {self.lora_int_id!r}, must be a whole number")
        if self.lora_int_id < 1:
            raise InvalidRequest("lora_int_id", f"is {self.lora_int_id}, must be at least 1")

    @property
    def reference(self) -> LoraReference:
        return LoraReference(self.lora_name, self.lora_path, str(self.lora_int_id))
