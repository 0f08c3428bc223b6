"""ClusterOptions: the options of a fleet's Ray cluster."""

from dataclasses import dataclass
from pathlib import Path

from .checks import one_of
from .option import option, validate_options
from .scaling_limits import FLEET


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """Facts about the Ray cluster that its fleet controller cannot find out. Raises ConfigError on a bad value."""

    autoscaling_config: Path | None = option(
        None,
        help="Configuration file of the cluster's autoscaler. Needed unless `ray up` started the cluster.",
        metavar="FILE",
        group=FLEET,
    )
    spot_notices: str | None = option(
        None,
        help="Cloud whose notices of spot interruption the nodes watch for, to drain in time.",
        check=one_of("aws", "gcp", "azure"),
        group=FLEET,
    )

    def __post_init__(self) -> None:
        validate_options(self)
