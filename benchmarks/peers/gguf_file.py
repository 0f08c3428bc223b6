"""Converts a model of a Hugging Face folder to GGUF with llama.cpp's own converter.

The vocabulary is left out: prompts are token ids, and the converter refuses tokenizers that it does not know.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

# Where benchmarks.peers.install puts the converter.
SOURCES = Path(sys.prefix) / "sources"


def write_gguf(model_dir: Path, out: Path) -> None:
    """Write the model as a GGUF file in float32.

    Raises:
        NotImplementedError: llama.cpp has no such model.
    """
    sys.path.insert(0, str(SOURCES))
    import conversion
    import gguf
    import torch

    fields = conversion.ModelBase.load_hparams(model_dir, False)
    # The older name, which some converters read.
    fields.setdefault("rotary_pct", (fields.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0))
    architecture = conversion.get_model_architecture(fields, conversion.ModelType.TEXT)
    converter: Any = conversion.get_model_class(architecture)

    class WithoutVocabulary(converter):  # type: ignore[misc]
        model_arch = converter.model_arch  # each class must state it
        no_mtp = True  # these models have no heads for drafts

        def set_vocab(self) -> None:
            self.gguf_writer.add_tokenizer_model("no_vocab")
            self.gguf_writer.add_vocab_size(fields["vocab_size"])

    with torch.inference_mode():
        WithoutVocabulary(model_dir, gguf.LlamaFileType.ALL_F32, out, hparams=fields).write()
