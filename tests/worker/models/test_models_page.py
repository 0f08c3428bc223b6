"""docs/models.md follows the tests."""

from __future__ import annotations

from models_page import LAYOUTS, PAGE, architectures, tables
from quantized_models import SCHEMES

from quire.proto.model.registry import FAMILIES
from quire.proto.model.transformers_spec import list_architectures


def test_page_has_the_tables_of_the_tests() -> None:
    assert tables() in PAGE.read_text(), "run python tests/support/models_page.py"


def test_every_family_is_compared_with_transformers() -> None:
    """Some have no definition in the installed transformers, and are tested by others' names."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    assert FAMILIES.keys() & known <= architectures().keys()


def test_every_layout_has_a_row() -> None:
    assert {scheme.layout for scheme in SCHEMES.values()} == LAYOUTS.keys()


def test_every_listed_architecture_is_compared_with_transformers() -> None:
    """`quire models` lists what passes the checks before loading; what fails later has to fail these."""
    listed = {name for name, own in list_architectures().items() if not own.refusal}
    assert listed <= architectures().keys()
