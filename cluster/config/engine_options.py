"""EngineOptions: the options of one replica's engine."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ...proto.options.option import validate_options, with_check
from ...proto.options.sections import (
    CacheOptions,
    ChatOptions,
    ImageOptions,
    LoraOptions,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    StructuredOutputsOptions,
    execution_option,
    model_option,
)
from ...proto.options.values import JSON_OBJECT, one_of
from ..text.chat_format.registry import AUTO, NONE, REASONING_FORMATS, TOOL_CALL_FORMATS
from .hub import is_model_id
from .speculative_options import check_speculative_config

DEMO_MODEL = "demo"
DEMO_MODEL_PATH = Path(__file__).parents[1] / "cli" / "demo" / "model"
# The EAGLE-3 head of the demo model and a smaller model that drafts for it, for `speculative_config`.
DEMO_HEAD, DEMO_DRAFT = "demo-eagle3", "demo-draft"
DEMO_HEAD_PATH = DEMO_MODEL_PATH.parent / "draft_head"
DEMO_DRAFT_PATH = DEMO_MODEL_PATH.parent / "draft_model"
# A model that answers questions about pictures of shapes and digits.
DEMO_VISION = "demo-vision"
DEMO_VISION_PATH = DEMO_MODEL_PATH.parent / "vision_model"
_BUNDLED = {
    DEMO_MODEL: DEMO_MODEL_PATH,
    DEMO_HEAD: DEMO_HEAD_PATH,
    DEMO_DRAFT: DEMO_DRAFT_PATH,
    DEMO_VISION: DEMO_VISION_PATH,
}


@dataclass(frozen=True)
class ModelReference:
    """The model that an operator names: a directory, one of the Hugging Face Hub, or a bundled one."""

    model: str

    _: KW_ONLY
    served_model_name: str | None = model_option(
        None, help="Name that clients use for the model. Default: ORG/NAME, or the name of its directory."
    )
    revision: str | None = model_option(
        None, help="Branch, tag or commit of a model on the Hugging Face Hub. Default: its main branch."
    )
    runner: str = model_option(
        "auto",
        help="Use of the model: generate text, pooling (embeddings, scores), or both; auto is pooling for "
        "checkpoints of sentence-transformers and those with a classification head.",
        check=one_of("auto", "generate", "pooling", "both"),
    )

    @property
    def name(self) -> str:
        """The name that clients use for the model."""
        if self.served_model_name or self.model in _BUNDLED:
            return self.served_model_name or self.model
        return self.hub_id or self.model_path.resolve().name

    @property
    def model_path(self) -> Path:
        """The model's directory, unless `hub_id` is set."""
        return _BUNDLED.get(self.model) or Path(self.model).expanduser()

    @property
    def hub_id(self) -> str:
        """ORG/NAME if the model is one on the hub; empty if it is a directory."""
        return self.model if is_model_id(self.model) and not self.model_path.exists() else ""


# Dataclasses have the fields of their last base first.
@dataclass(frozen=True, kw_only=True)
class EngineOptions(
    ImageOptions,
    LoraOptions,
    StructuredOutputsOptions,
    ChatOptions,
    SchedulerOptions,
    CacheOptions,
    ParallelOptions,
    ModelOptions,
    ModelReference,
):
    """An operator's choices for a replica's engine. `resolve` combines them with a machine and the model's files.

    Args:
        model: a Hugging Face model directory, ORG/NAME on the Hugging Face Hub, or a bundled model: ``demo``, or
            ``demo-vision``, which reads pictures.

    Raises:
        ConfigError: a value has the wrong type or is out of its range.
    """

    speculative_config: str | None = execution_option(
        None,
        help="Speculative decoding: a JSON object with method, num_speculative_tokens and settings of the method.",
        check=check_speculative_config,
        kind=JSON_OBJECT,
        metavar="JSON",
    )
    tool_call_parser: str = with_check(
        ChatOptions, "tool_call_parser", one_of(AUTO, NONE, *sorted(TOOL_CALL_FORMATS))
    )
    reasoning_parser: str = with_check(
        ChatOptions, "reasoning_parser", one_of(AUTO, NONE, *sorted(REASONING_FORMATS))
    )

    def __post_init__(self) -> None:
        validate_options(self)
