"""`quire models`."""


def models() -> None:
    """List the model architectures that quire serves: with layers of its own, or with those of transformers.

    A model with transformers' layers is compared with transformers' own output when it is loaded, and refused if they
    differ.

    Example: `quire models`
    """
    from rich.console import Console
    from rich.table import Table
    from transformers.utils import logging

    from ...worker.models.registry import FAMILIES
    from ...worker.models.transformers_spec import servable_architectures

    logging.set_verbosity_error()  # it warns of default configurations
    table = Table("architecture", "layers", "quantized")
    for architecture in FAMILIES:
        table.add_row(architecture, "quire", "yes")
    for architecture in sorted(set(servable_architectures()) - set(FAMILIES)):
        table.add_row(architecture, "transformers", "no")
    Console().print(table)
