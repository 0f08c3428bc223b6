"""llama.cpp through its C API, with its server's loop: a batch has one token per decoding sequence, then prompts."""

from __future__ import annotations

import ctypes
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import Generate, Requests, parse_arguments, serve

MAX_SEQS = 64
MAX_BATCH_TOKENS, MICRO_BATCH_TOKENS = 2048, 512
CONTEXT_LEN = 32768
FLOAT32 = 0  # GGML_TYPE_F32, for keys and values as for the weights
LOG_ERROR = 4


@dataclass
class Sequence:
    """A running request."""

    index: int
    prompt: list[int]
    max_tokens: int
    position: int
    newest: int = 0
    num_generated: int = 0


class LlamaCpp:
    """A model with its own context."""

    def __init__(self, lib: Any, gguf: Path, threads: int) -> None:
        self._lib = lib
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = lib.llama_model_load_from_file(str(gguf).encode(), model_params)
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT_LEN, MAX_BATCH_TOKENS, MICRO_BATCH_TOKENS
        params.n_seq_max = MAX_SEQS
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = FLOAT32
        params.kv_unified = True
        params.flash_attn_type = 1
        self._context = lib.llama_init_from_model(model, params)
        if not model or not self._context:
            raise RuntimeError("the model did not load")
        self._memory = lib.llama_get_memory(self._context)
        self._sampler = lib.llama_sampler_init_greedy()
        self._batch = lib.llama_batch_init(MAX_BATCH_TOKENS, 0, 1)

    def generate(self, requests: Requests) -> list[int]:
        self._lib.llama_memory_clear(self._memory, False)
        shared = self._compute_shared_prefix(requests)
        waiting = [
            Sequence(index, prompt, length, shared) for index, (prompt, length) in enumerate(requests)
        ][::-1]
        free, lengths = list(range(MAX_SEQS))[::-1], [0] * len(requests)
        running: dict[int, Sequence] = {}
        while waiting or running:
            while waiting and free:
                slot = free.pop()
                running[slot] = waiting.pop()
                if shared and slot:
                    self._lib.llama_memory_seq_cp(self._memory, 0, slot, 0, shared)
            for slot, place in self._step(running):
                sequence = running[slot]
                sequence.newest = self._lib.llama_sampler_sample(self._sampler, self._context, place)
                sequence.num_generated += 1
                if sequence.num_generated == sequence.max_tokens:
                    self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)
                    lengths[sequence.index] = sequence.num_generated
                    free.append(slot)
                    del running[slot]
        return lengths

    def _step(self, running: dict[int, Sequence]) -> list[tuple[int, int]]:
        """Compute one batch; return (slot, index of its logits in the batch) of the sequences that sample."""
        self._batch.n_tokens = 0
        sampling = []
        decoding = {s for s, own in running.items() if own.position >= len(own.prompt)}
        for slot in decoding:
            sampling.append((slot, self._put(running[slot].newest, running[slot].position, slot, True)))
            running[slot].position += 1
        for slot, own in running.items():
            while own.position < len(own.prompt) and self._batch.n_tokens < MAX_BATCH_TOKENS:
                is_last = own.position == len(own.prompt) - 1
                place = self._put(own.prompt[own.position], own.position, slot, is_last)
                own.position += 1
                if is_last:
                    sampling.append((slot, place))
        self._compute()
        return sampling

    def _compute_shared_prefix(self, requests: Requests) -> int:
        """Compute the common prefix of all prompts once, in slot 0, and return its length.

        Returns 0 if there is one request, or if not all of them can run at once.
        """
        prompts = [prompt for prompt, _ in requests]
        shared = 0
        if 1 < len(prompts) <= MAX_SEQS:
            while all(len(p) > shared + 1 and p[shared] == prompts[0][shared] for p in prompts):
                shared += 1
        for start in range(0, shared, MAX_BATCH_TOKENS):
            self._batch.n_tokens = 0
            for position in range(start, min(shared, start + MAX_BATCH_TOKENS)):
                self._put(prompts[0][position], position, 0, False)
            self._compute()
        return shared

    def _put(self, token_id: int, position: int, slot: int, has_logits: bool) -> int:
        batch, place = self._batch, self._batch.n_tokens
        batch.token[place], batch.pos[place] = token_id, position
        batch.n_seq_id[place] = 1
        batch.seq_id[place][0] = slot
        batch.logits[place] = has_logits
        batch.n_tokens = place + 1
        return place

    def _compute(self) -> None:
        status = self._lib.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode ended with {status}")


def main() -> None:
    arguments = parse_arguments(__doc__)

    def load() -> Generate:
        import llama_cpp as lib
        from gguf_file import write_gguf

        @lib.llama_log_callback  # type: ignore[untyped-decorator]
        def log(level: int, text: bytes, _: object) -> None:
            if level >= LOG_ERROR:
                print(text.decode(errors="replace"), end="")

        lib.llama_log_set(log, ctypes.c_void_p(0))
        lib.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(Path(arguments.model_dir), path)
            engine = LlamaCpp(lib, path, arguments.threads)

        def generate(requests: Requests) -> list[int]:
            _ = log  # keeps the callback alive: the library holds no reference
            return engine.generate(requests)

        return generate

    serve(load)


if __name__ == "__main__":
    main()
