"""A tokenizer as SentencePiece makes them: marked spaces, and a token for each byte."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

SPECIAL = "<unk>", "<s>", "</s>"
WORDS = "▁", "▁▁", "▁the", "▁cat", "▁sat", "s", "a", "the", ".", "é", "\N{REPLACEMENT CHARACTER}"
NUM_BYTES = 256


def save_byte_fallback_tokenizer(folder: Path, *, strips_space: bool = True) -> None:
    """Write the tokenizer's files into a folder.

    Args:
        strips_space: decoding leaves out the space at the beginning of a text, as for Llama 2; not so for Gemma.
    """
    scores = [(name, 0.0) for name in SPECIAL]
    scores += [(f"<0x{byte:02X}>", -10.0) for byte in range(NUM_BYTES)]
    scores += [(word, -1.0 - index / 10) for index, word in enumerate(WORDS)]
    backend = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if strips_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
