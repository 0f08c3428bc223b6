"""Models of text alone that transformers has within models for images only."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModel, GenerationMixin, PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast


def causal_class(architecture: str, config_class: type[PreTrainedConfig]) -> Any:
    """Return a class of this name: transformers' text model of a configuration, and a head.

    Args:
        config_class: of a text model; that of the model that contains it has the same package.
    """
    base_class = AutoModel._model_mapping[config_class]
    whole_name = architecture.replace("ForCausalLM", "ForConditionalGeneration")
    module = __import__(base_class.__module__, fromlist=[whole_name])
    whole_class = getattr(module, whole_name)

    def init(self: Any, config: PreTrainedConfig) -> None:
        super(found, self).__init__(config)
        self.model = base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, input_ids: Any, **settings: Any) -> CausalLMOutputWithPast:
        settings.pop("return_dict", None)
        out = self.model(input_ids, **settings)
        return CausalLMOutputWithPast(
            logits=self.lm_head(out.last_hidden_state), past_key_values=out.past_key_values
        )

    found: Any = type(
        architecture,
        (base_class.__mro__[1], GenerationMixin),
        {
            "__init__": init,
            "forward": forward,
            "__module__": __name__,
            "config_class": config_class,
            "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
            "create_masks_for_generate": whole_class.__dict__["create_masks_for_generate"],
        },
    )
    return found
