"""Gateways without torch: transformers reads configurations and tokenizers without it as well."""

from __future__ import annotations

import os
import sys

from ...proto.model.transformers_spec import import_transformers

# transformers advises to install PyTorch when it does not find it.
_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def keep_torch_out() -> None:
    """Make torch unavailable to this process; does nothing if it is imported already.

    Describing a model and loading its tokenizer takes 1.2 s of processor time instead of 4.1 s: with torch,
    transformers 5.23 imports torch, its compiler and sympy for the configuration of a Llama.
    """
    if "torch" in sys.modules:
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    given = os.environ.get(_NO_ADVICE)
    os.environ[_NO_ADVICE] = "1"
    try:
        import_transformers()
    finally:
        if given is None:
            del os.environ[_NO_ADVICE]
        else:
            os.environ[_NO_ADVICE] = given
