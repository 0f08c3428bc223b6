"""Bodies of /v1/embeddings, /classify, /score and /rerank, with the names of OpenAI, vLLM, Cohere and Jina."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

from pydantic import AliasChoices, ConfigDict, Field

from .....proto.errors import InvalidRequest
from .....proto.pooling import PoolingParams
from .....proto.sampling import SamplingParams
from ....text.requests.request import Prompt
from ...generation.generation import GenerationCall
from ...generation.pooled_calls import check_num_inputs
from .bounded import Entries, Prompts, TextOrObject, Texts
from .conversation import ConversationFields
from .peer_fields import REFUSED, UNSET, Refusal
from .request_model import RequestModel


class PoolingFields(RequestModel):
    """Fields that all these bodies have."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), populate_by_name=True)

    model: str | None = None
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep this many of the first tokens; -1 for the model's context."
    )
    use_activation: bool | None = Field(None, description="Normalize, or apply the classifier's activation.")
    add_special_tokens: bool = True
    user: str | None = Field(None, description="Has no effect; tenants come from tokens.")
    priority: int = Field(0, ge=-(2**31) + 1, lt=2**31, description="As in vLLM, lower runs first.")
    cache_salt: str = Field("", description="Prefixes are shared only with equal salts.")
    request_id: str = Field("", description="The id of the response; chosen if missing.")

    refused: ClassVar[dict[str, Refusal]] = REFUSED | {
        "truncation_side": ("the beginning of a prompt is kept", ("right",))
    }

    def pooling(self, dimensions: int | None = None) -> PoolingParams:
        """Return the settings. Raises InvalidRequest for a value that is not allowed."""
        use_activation = True if self.use_activation is None else self.use_activation
        return PoolingParams(dimensions, use_activation, self.truncate_prompt_tokens)

    def call(self, prompt: Prompt, pooling: PoolingParams) -> GenerationCall:
        """Return the call of a prompt, without its tenant."""
        return GenerationCall(
            prompt,
            SamplingParams(),
            model=self.model or "",
            priority=-self.priority,  # in quire.v1, higher runs first
            cache_salt=self.cache_salt,
            add_special_tokens=self.add_special_tokens,
            pooling=pooling,
        )


class PromptsBody(PoolingFields, ConversationFields):
    """A body with prompts, or with a conversation."""

    input: Prompts | None = Field(None, description="Text or token ids, or a list of these.")
    add_generation_prompt: bool = False

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts. Raises InvalidRequest if there are none or too many."""
        given = self.input
        if given is None:
            if self.messages is None:
                raise InvalidRequest("input", "is missing; give it, or messages")
            return [self.chat()]
        if self.messages is not None:
            raise InvalidRequest("input", "is given beside messages, must be one of the two")
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [given]
        check_num_inputs("input", len(given))
        return cast(list[Prompt], given)


class EmbeddingRequest(PromptsBody):
    """OpenAI's fields, and vLLM's beside them."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class PoolingRequest(EmbeddingRequest):
    """The fields of vLLM."""

    task: Literal["embed", "classify"] | None = Field(None, description="By default, what the model does.")


EmbeddingType = Literal["float", "base64", "binary", "ubinary"]


class CohereEmbedRequest(RequestModel):
    """The fields of Cohere's API, version 2."""

    model: str | None = None
    texts: Entries[str]
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = Field(
        None, description="Has no effect: put the instruction of a model before its texts."
    )
    embedding_types: Entries[EmbeddingType] | None = Field(None, description="By default, float.")
    output_dimension: int | None = None
    truncate: Literal["NONE", "END"] = Field("END", description="END keeps the first tokens of a long text.")
    max_tokens: int | None = Field(None, ge=1, description="Keep at most this many of the first tokens.")
    priority: int = Field(0, ge=-(2**31) + 1, lt=2**31, description="As in vLLM, lower runs first.")

    refused: ClassVar[dict[str, Refusal]] = REFUSED | {
        "images": ("the model reads text only", UNSET),
        "inputs": ("use texts", UNSET),
    }

    def as_embedding(self) -> EmbeddingRequest:
        """Return the same request with OpenAI's fields."""
        kept = self.max_tokens
        if kept is None and self.truncate == "END":
            kept = -1
        return EmbeddingRequest.model_validate(
            {
                "model": self.model,
                "input": self.texts,
                "dimensions": self.output_dimension,
                "truncate_prompt_tokens": kept,
                "priority": self.priority,
            }
        )


class ClassifyRequest(PromptsBody):
    """The fields of vLLM."""


class ScoreRequest(PoolingFields):
    """Two texts, or lists of them; the names are those of several releases of vLLM."""

    queries: Texts = Field(validation_alias=AliasChoices("queries", "text_1", "data_1"))
    documents: Texts = Field(validation_alias=AliasChoices("documents", "text_2", "data_2", "items"))
    instruction: str | None = Field(None, description="For models whose template has one.")

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The queries and the documents. Raises InvalidRequest if there are none or too many."""
        queries, documents = (
            [each] if isinstance(each, str) else each for each in (self.queries, self.documents)
        )
        check_num_inputs("queries", len(queries))
        check_num_inputs("documents", len(documents))
        return queries, documents


class RerankRequest(PoolingFields):
    """The fields of Cohere and Jina."""

    query: str
    documents: Entries[TextOrObject] = Field(description='Texts, or objects with a member "text".')
    top_n: int | None = Field(None, ge=0, description="Return the best ones only; 0 returns all.")
    return_documents: bool = True
    instruction: str | None = Field(None, description="For models whose template has one.")

    @property
    def texts(self) -> list[str]:
        """The documents' texts. Raises InvalidRequest if there are none or too many, or one has no text."""
        check_num_inputs("documents", len(self.documents))
        return [_text(index, document) for index, document in enumerate(self.documents)]


def _text(index: int, document: str | dict[str, Any]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"documents[{index}].text", "is missing, must be text")
    return text
