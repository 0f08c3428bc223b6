"""Request: a validated and tokenized request, made by RequestChecker for the gateway and LLM."""

from __future__ import annotations

import functools
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from ....proto.block_tables import IntArray
from ....proto.codec import NO_INTS
from ....proto.coerce import BadWord
from ....proto.config import EngineConfig, PoolingConfig
from ....proto.digests import content_digest
from ....proto.errors import InvalidRequest
from ....proto.lora import LoraReference
from ....proto.media import MediaTensors
from ....proto.pooling import PoolingParams
from ....proto.sampling import DELIVERY, RANDOM_SEED, SamplingParams
from ....proto.stream import Recall, SequenceRequest, Submit
from ....proto.structured_outputs import OutputConstraint, StructuredOutputsParams
from ..chat_format.chat_format import OpenReasoning
from ..chat_format.output_parser import ChatOutputParser
from ..media.image_source import ImageProcessor
from .chat import Chat
from .chat_encoder import ChatEncoder, EncodedPrompt
from .chat_template import TemplateError
from .grammar_compiler import GrammarCompiler, LocalGrammarCompiler, with_server_defaults
from .json_values import check_text
from .prompt_images import WITHOUT_IMAGES, ImagePrompt, Images, PlacedImage, PromptImages
from .tokenizer import END_CHARS, LocalPromptEncoder, PromptEncoder, Tokenizer, no_text

MAX_NAME_CHARS = 256
# Longer texts are compared with the context before they are tokenized.
MAX_UNCHECKED_CHARS = 4096
# Last tokens of a prompt of token ids, which tell whether it ends in reasoning.
_NUM_END_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that are scored together, as the model's tokenizer joins them."""

    text: str
    pair: str

    def __len__(self) -> int:
        return len(self.text) + len(self.pair)


Prompt = str | Sequence[int] | Chat
# The prompt of a request, which a gateway may have made of two texts, or of a text and images.
AnyPrompt = Prompt | TextPair | ImagePrompt


@dataclass(frozen=True, slots=True)
class Request(SequenceRequest):
    """A valid request: the prompt is tokenized and fits, and every sampling parameter has a value.

    Attributes:
        new_parser: for a chat, returns a parser for one completion.
        media_tensors: digest of a MediaItem |-> its tensors, for replicas that ask for them.
    """

    new_parser: Callable[[], ChatOutputParser] | None = field(default=None, compare=False)
    media_tensors: Mapping[bytes, MediaTensors] = field(default_factory=dict, compare=False)

    @property
    def reports_logprobs(self) -> bool:
        """The scheduler reports log-probabilities of its tokens: requested, or needed to rank the sequences."""
        return self.sampling.logprobs is not None or self.sampling.is_ranked

    def submit_message(self, handle: int) -> Submit:
        """Return the message to the scheduler; sequence i gets the handle `handle` + i."""
        sampling = self.sampling
        if self.reports_logprobs and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        shared = {each.name: getattr(self, each.name) for each in fields(SequenceRequest)}
        return Submit(handle, **shared | {"sampling": sampling})

    @property
    def may_be_recalled(self) -> bool:
        """Return whether replicas keep what its output needs: they keep no log-probabilities, and no beams."""
        sampling = self.sampling
        has_logprobs = self.reports_logprobs or sampling.prompt_logprobs is not None
        return not has_logprobs and sampling.beam_width is None and self.pooling is None

    def recall_message(self, query_id: int) -> Recall:
        """Return the query for the tokens that a replica knows of the request."""
        return Recall(
            query_id,
            self.tenant,
            self.request_id,
            self.sampling.seed or 0,
            self.sampling.num_sequences,
            content_digest(self.prompt_token_ids, self.sampling, self.lora, self.media),
        )

    def resumed(self, index: int, token_ids: Sequence[int]) -> Request:
        """Return a request for the rest of sequence `index`, which has generated these tokens so far."""
        sampling = self.sampling
        rest = replace(
            sampling,
            n=1,
            best_of=None,
            seed=(sampling.seed or 0) + index,
            logprobs=0 if self.reports_logprobs and sampling.logprobs is None else sampling.logprobs,
        )
        return replace(self, sampling=rest, generated_token_ids=np.asarray(token_ids, dtype=np.int32))


class RequestChecker:
    """Validates and tokenizes requests for one replica configuration. Threads may share one.

    Args:
        image_processor: None for a model whose images are not read.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        prompt_encoder: PromptEncoder | None = None,
        grammar_compiler: GrammarCompiler | None = None,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._prompt_encoder = prompt_encoder or LocalPromptEncoder(tokenizer)
        self._grammar_compiler = grammar_compiler or LocalGrammarCompiler(config)
        self._images = PromptImages(config, image_processor)
        self._chat_encoder = ChatEncoder(
            config.chat, tokenizer, self._prompt_encoder, reads_images=self._images.is_read
        )
        # For requests without a seed. Makes runs of LLM with the same configuration reproducible.
        self._seeds = random.Random(config.model.seed)

    def check(
        self,
        prompt: AnyPrompt,
        sampling: SamplingParams,
        *,
        request_id: str = "",
        tenant: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str = "",
        prefix_pool: str = "",
        add_special_tokens: bool = True,
        lora: LoraReference | None = None,
        pooling: PoolingParams | None = None,
    ) -> Request:
        """Return the valid request, with a new id if it has none.

        Args:
            timeout_s: time left until the caller's deadline.
            cache_salt: prefix caching shares KV only between requests of the tenant with the same salt.
            prefix_pool: prefix caching shares KV with the other tenants of this pool; empty for none.
            add_special_tokens: add the tokenizer's special tokens to a text prompt. A chat template adds its own.
            lora: the adapter; None for the model alone.
            pooling: return the prompt's pooled vector; None to generate.

        Raises:
            InvalidRequest: a field is invalid; the error names it.
        """
        _check_names(request_id=request_id, tenant=tenant, cache_salt=cache_salt)
        self._check_task(pooling, lora)
        sampling = sampling.clone()  # its fields may have been set since it was checked
        if self._config.model.skip_tokenizer_init:
            sampling = _without_text(prompt, sampling)
        images = self._process_images(prompt, tenant, cache_salt, prefix_pool)
        if images.processed and pooling is not None:
            raise InvalidRequest("prompt", "has images, and only texts are pooled")
        encoded = self._encode_prompt(prompt, images, sampling, pooling, add_special_tokens)
        if encoded.needs_special_tokens:
            sampling = replace(sampling, skip_special_tokens=False)
        media = self._images.items(encoded.token_ids, images)
        if media and sampling.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "sampling.truncate_prompt_tokens", "is set, and prompts with images are not cut"
            )
        token_ids, max_new_tokens = self._fit(prompt, encoded, sampling, pooling, add_special_tokens)
        sampling = self._resolve_sampling(sampling, max_new_tokens)
        return Request(
            request_id or uuid.uuid4().hex,
            token_ids,
            sampling,
            tenant,
            priority,
            timeout_s,
            cache_salt.encode(),
            prefix_pool,
            new_parser=None if pooling is not None else encoded.new_parser,
            constraint=self._compile(encoded.constraint, encoded.reasoning, sampling, len(token_ids)),
            lora=lora,
            pooling=pooling,
            media=media,
            media_tensors=images.tensors,
        )

    def remote_images(self, prompt: AnyPrompt) -> list[PlacedImage]:
        """Return the images of a prompt whose files have to be fetched before it is checked.

        Raises:
            InvalidRequest: the conversation is invalid.
        """
        if not self.reads_images or not isinstance(prompt, Chat | ImagePrompt):
            return []
        if isinstance(prompt, ImagePrompt):
            placed = prompt.placed
        elif not prompt.may_have_images:
            return []
        else:
            prompt.check()
            placed = prompt.images
        remote = [each for each in placed if each[1].is_remote]
        if remote:
            self._images.check_count(placed)
        return remote

    @property
    def reads_images(self) -> bool:
        """Return whether prompts may have images."""
        return self._images.is_read

    @property
    def reads_videos(self) -> bool:
        """Return whether prompts may have videos."""
        return self._images.reads_videos

    def _process_images(self, prompt: AnyPrompt, tenant: str, salt: str, pool: str) -> Images:
        """Return the images of a prompt as the model reads them. Raises InvalidRequest."""
        if isinstance(prompt, Chat) and prompt.may_have_images:
            prompt.check()
            return self._images.process(prompt.images, prompt.image_settings, tenant, salt, pool)
        if isinstance(prompt, ImagePrompt):
            return self._images.process(prompt.placed, prompt.settings, tenant, salt, pool)
        return WITHOUT_IMAGES

    def _encode_prompt(
        self,
        prompt: AnyPrompt,
        images: Images,
        sampling: SamplingParams,
        pooling: PoolingParams | None,
        add_special_tokens: bool,
    ) -> EncodedPrompt:
        """Tokenize a prompt. Raises InvalidRequest if it is invalid, empty, or too long whatever its tokens are."""
        if isinstance(prompt, Chat):
            encoded = self._chat_encoder.encode(prompt, sampling.structured_outputs, images)
            if sampling.thinking_token_budget is not None and not encoded.can_reason:
                raise self._no_reasoning()
        else:
            truncates = sampling.truncate_prompt_tokens is not None or (
                pooling is not None and pooling.truncate_prompt_tokens is not None
            )
            if isinstance(prompt, str) and not truncates:
                self._check_length(prompt)
            token_ids = self._encode(prompt, add_special_tokens, images)
            reasoning = None
            if sampling.thinking_token_budget is not None:
                reasoning = self._reasoning_after(prompt, token_ids)
            encoded = EncodedPrompt(token_ids, sampling.structured_outputs, reasoning)
        if len(encoded.token_ids) == 0:
            raise InvalidRequest("prompt", "is empty, must have at least one token")
        return encoded

    def _fit(
        self,
        prompt: AnyPrompt,
        encoded: EncodedPrompt,
        sampling: SamplingParams,
        pooling: PoolingParams | None,
        add_special_tokens: bool,
    ) -> tuple[IntArray, int]:
        """Return the prompt, shortened as asked, and how many tokens may follow it.

        Raises:
            InvalidRequest: the prompt is too long.
        """
        token_ids = encoded.token_ids
        if (kept := sampling.truncate_prompt_tokens) is not None:
            if kept < 0:
                kept = max(1, self._config.max_servable_tokens - (sampling.max_tokens or 1))
            token_ids = token_ids[-kept:]
        if pooling is not None:  # one token follows, which is not sampled
            return self._fit_pooled(prompt, token_ids, pooling, add_special_tokens), 1
        return token_ids, self._max_new_tokens(len(token_ids))

    def token_ids(self, prompt: AnyPrompt, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, which may be empty or longer than the context.

        Raises:
            InvalidRequest: the text or the conversation is invalid.
        """
        if self._config.model.skip_tokenizer_init:
            _without_text(prompt, SamplingParams())
        images = self._process_images(prompt, "", "", "")
        if isinstance(prompt, Chat):
            token_ids = self._chat_encoder.encode(prompt, None, images).token_ids
        else:
            token_ids = self._encode(prompt, add_special_tokens, images)
        return [int(token_id) for token_id in token_ids]

    def _resolve_sampling(self, sampling: SamplingParams, max_new_tokens: int) -> SamplingParams:
        """Return the parameters with a value for each; checks those that depend on the model."""
        self.check_token_ids("sampling.stop_token_ids", sampling.stop_token_ids)
        self.check_token_ids("sampling.logit_bias", [token_id for token_id, _ in sampling.bias_pairs])
        self.check_token_ids("sampling.allowed_token_ids", sampling.allowed_token_ids or ())
        for index, text in enumerate(sampling.stop):
            check_text(f"sampling.stop[{index}]", text)
        self._check_beams(sampling.beam_width)
        self._check_extra_args(sampling)
        return replace(
            sampling,
            **sampling.defaulted_values(self._config.model.sampling_defaults),
            **DELIVERY,
            max_tokens=min(sampling.max_tokens or max_new_tokens, max_new_tokens),
            seed=self._seeds.getrandbits(63) if sampling.seed in (None, RANDOM_SEED) else sampling.seed,
            bad_words=self._bad_word_token_ids(sampling.bad_words),
            structured_outputs=None,  # `Request.constraint` is compiled from it
            logprobs=self._num_logprobs("logprobs", sampling.logprobs),
            prompt_logprobs=self._num_logprobs("prompt_logprobs", sampling.prompt_logprobs),
        )

    def _compile(
        self,
        constraint: StructuredOutputsParams | None,
        reasoning: OpenReasoning | None,
        sampling: SamplingParams,
        num_prompt_tokens: int,
    ) -> OutputConstraint | None:
        """Return the compiled constraint of the outputs. Raises InvalidRequest if it is not supported."""
        budget = None if reasoning is None else sampling.thinking_token_budget
        if constraint is None and budget is None:
            return None
        grammar = b""
        if constraint is not None:
            grammar = self._grammar_compiler.compile(with_server_defaults(constraint, self._config))
        compiled = OutputConstraint(num_prompt_tokens, grammar)
        if reasoning is None:
            return compiled
        end_tag = reasoning.end_tags[0]
        return replace(
            compiled,
            reasoning_starts=reasoning.start_tags,
            reasoning_ends=reasoning.end_tags,
            thinking_token_budget=budget,
            forced_end_ids=tuple(self._tokenizer.encode(end_tag, add_special_tokens=False)),
        )

    def _reasoning_after(self, prompt: AnyPrompt, token_ids: IntArray) -> OpenReasoning | None:
        """Return the reasoning that a text or token ids leave the model in, or that it may begin next.

        Raises:
            InvalidRequest: the model is not known to reason.
        """
        chat_format = self._chat_encoder.format_without_chat()
        if chat_format.reasoning is None:
            raise self._no_reasoning()
        if isinstance(prompt, str):
            return chat_format.open_reasoning(prompt[-END_CHARS:])
        end = token_ids[-_NUM_END_TOKENS:].tolist()
        return chat_format.open_reasoning(self._tokenizer.decode(end, skip_special_tokens=False))

    def _no_reasoning(self) -> InvalidRequest:
        name = self._config.model.name
        problem = (
            f"limits reasoning, and {name} is not known to reason; leave it out or set --reasoning-parser"
        )
        return InvalidRequest("sampling.thinking_token_budget", problem)

    def _num_logprobs(self, field: str, requested: int | None) -> int | None:
        """Return how many of the most likely tokens to report. Raises InvalidRequest if they are too many."""
        if requested is None:
            return None
        vocab_size, most = self._config.model.vocab_size, self._config.scheduler.max_logprobs
        count = vocab_size if requested < 0 else min(requested, vocab_size)
        if 0 <= most < count:
            asked = (
                f"{requested}, the whole vocabulary of {vocab_size} tokens" if requested < 0 else requested
            )
            problem = f"is {asked}, must be at most {most}, the server's max_logprobs"
            raise InvalidRequest(f"sampling.{field}", problem)
        return count

    def _bad_word_token_ids(self, words: Sequence[BadWord]) -> tuple[tuple[int, ...], ...]:
        """Return the distinct tokenizations of all words."""
        found: list[tuple[int, ...]] = []
        for index, word in enumerate(words):
            where = f"sampling.bad_words[{index}]"
            if isinstance(word, str):
                check_text(where, word)
                found += self._tokenizer.word_token_ids(word)
            else:
                self.check_token_ids(where, word)
                found.append(word)
        return tuple(dict.fromkeys(found))

    def _check_task(self, pooling: PoolingParams | None, lora: LoraReference | None) -> None:
        """Raise InvalidRequest if the model cannot do what is asked."""
        model = self._config.model
        if lora is not None and self._config.lora is None:
            raise InvalidRequest("lora_request", "names an adapter, and the engine runs without enable_lora")
        if pooling is None:
            if not model.generates:
                kind = "scores" if model.pooling is not None and model.pooling.classifies else "embeds"
                raise InvalidRequest("model", f"{model.name} {kind} prompts, and does not generate text")
            return
        if model.pooling is None:
            raise InvalidRequest(
                "model",
                f"{model.name} generates text, and does not embed or score; start it with --runner pooling, or both",
            )
        if pooling.dimensions is not None:
            self._check_dimensions(model.pooling, pooling.dimensions)

    def _check_dimensions(self, config: PoolingConfig, dimensions: int) -> None:
        if config.classifies:
            raise InvalidRequest("pooling.dimensions", "are of embeddings, and the model classifies")
        if config.dimensions and dimensions not in (*config.dimensions, config.embedding_size):
            allowed = ", ".join(map(str, config.dimensions))
            raise InvalidRequest("pooling.dimensions", f"are {dimensions}, must be one of {allowed}")
        if dimensions > config.embedding_size:
            problem = f"are {dimensions}, must be at most the model's {config.embedding_size}"
            raise InvalidRequest("pooling.dimensions", problem)

    def _fit_pooled(
        self, prompt: AnyPrompt, token_ids: IntArray, pooling: PoolingParams, add_special_tokens: bool
    ) -> IntArray:
        """Return the prompt, shortened as asked. Raises InvalidRequest if it is too long."""
        most = longest = self._config.max_servable_tokens
        if pooling.truncate_prompt_tokens is not None:
            asked = pooling.truncate_prompt_tokens
            most = longest if asked < 0 else min(asked, longest)
            if len(token_ids) > most:
                is_text = isinstance(prompt, str) and add_special_tokens
                num_end = min(self._tokenizer.num_end_tokens, most) if is_text else 0
                end = token_ids[len(token_ids) - num_end :]
                token_ids = np.concatenate([token_ids[: most - num_end], end])
        if len(token_ids) > longest:
            raise InvalidRequest(
                "prompt",
                f"has {len(token_ids)} tokens, must have at most {longest}; or set truncate_prompt_tokens",
            )
        return token_ids

    def _encode(
        self, prompt: str | Sequence[int] | TextPair | ImagePrompt, add_special_tokens: bool, images: Images
    ) -> IntArray:
        if isinstance(prompt, ImagePrompt):
            return self._encode_with_images(prompt, add_special_tokens, images)
        if isinstance(prompt, TextPair):
            check_text("prompt", prompt.text)
            check_text("prompt", prompt.pair)
            return self._prompt_encoder.encode_text(
                prompt.text, add_special_tokens=add_special_tokens, pair=prompt.pair
            )
        if isinstance(prompt, str):
            check_text("prompt", prompt)
            if not prompt:
                return NO_INTS
            return self._prompt_encoder.encode_text(prompt, add_special_tokens=add_special_tokens)
        self.check_token_ids("prompt", prompt)
        return np.asarray(prompt, dtype=np.int32)

    def _encode_with_images(self, prompt: ImagePrompt, add_special_tokens: bool, images: Images) -> IntArray:
        if isinstance(prompt.prompt, str):
            check_text("prompt", prompt.prompt)
            try:
                text = images.expansions.expand(prompt.prompt)
            except TemplateError as error:
                raise InvalidRequest("prompt", f"does not match its images: {error}") from error
            return self._prompt_encoder.encode_text(text, add_special_tokens=add_special_tokens)
        self.check_token_ids("prompt", prompt.prompt)
        encode = functools.partial(self._tokenizer.encode, add_special_tokens=False)
        return self._images.expand(np.asarray(prompt.prompt, dtype=np.int32), images, encode)

    def _check_length(self, text: str) -> None:
        """Refuse a text that is too long for the context however it is tokenized, without tokenizing it."""
        if len(text) <= MAX_UNCHECKED_CHARS:
            return
        num_tokens = self._config.max_servable_tokens
        max_chars = self._tokenizer.max_chars(num_tokens)
        if max_chars is not None and len(text) > max_chars:
            raise InvalidRequest(
                "prompt",
                f"has {len(text)} characters; {num_tokens} tokens of context hold {max_chars} at most",
            )

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest, which names the position, for an id that is not in the vocabulary."""
        vocab_size = self._config.model.vocab_size
        if len(token_ids) > _NUM_END_TOKENS and _are_between(token_ids, 0, vocab_size):
            return
        for position, token_id in enumerate(token_ids):
            # Accepts numpy's integers, refuses floats. A bool passes, since it is an int in Python.
            if not isinstance(token_id, int | np.integer) or not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"{field}[{position}]", f"is {token_id!r}, must be a token id from 0 to {vocab_size - 1}"
                )

    def _check_extra_args(self, sampling: SamplingParams) -> None:
        known = self._config.parallel.logits_processor_names
        for name, _ in sampling.extra_arg_pairs:
            if name not in known:
                served = (
                    f"must be of {', '.join(known)}" if known else "and the engine has no logits_processors"
                )
                raise InvalidRequest("sampling.extra_args", f"has the processor {name[:64]!r}, {served}")

    def _check_beams(self, width: int | None) -> None:
        most = self._config.scheduler.max_num_seqs
        if width is not None and width > most:
            raise InvalidRequest(
                "sampling.beam_width", f"is {width}, this replica runs at most {most} at once"
            )

    def _max_new_tokens(self, num_prompt_tokens: int) -> int:
        """Return how many tokens may follow the prompt. Raises InvalidRequest if none may."""
        config = self._config
        max_new_tokens = config.max_servable_tokens - num_prompt_tokens
        if max_new_tokens >= 1:
            return max_new_tokens
        if num_prompt_tokens >= config.model.max_model_len:
            limit = f"the context of {config.model.max_model_len} tokens"
        else:
            limit = f"the whole KV memory of {config.max_servable_tokens} tokens"
        raise InvalidRequest(
            "prompt", f"has {num_prompt_tokens} tokens, which leaves no room for an output in {limit}"
        )


def _without_text(prompt: AnyPrompt, sampling: SamplingParams) -> SamplingParams:
    """Return the sampling for an output without text. Raises InvalidRequest if a field needs a tokenizer."""
    if isinstance(prompt, str | Chat | TextPair) or (
        isinstance(prompt, ImagePrompt) and isinstance(prompt.prompt, str)
    ):
        raise no_text("prompt")
    if sampling.stop:
        raise no_text("sampling.stop")
    if sampling.structured_outputs is not None:
        raise no_text("sampling.structured_outputs")
    if sampling.thinking_token_budget is not None:
        raise no_text("sampling.thinking_token_budget")
    return replace(sampling, detokenize=False)


def _check_names(**names: str) -> None:
    """Raise InvalidRequest for a name that is too long or no text."""
    for field_name, name in names.items():
        if len(name) > MAX_NAME_CHARS:
            raise InvalidRequest(field_name, f"is {len(name)} characters, at most {MAX_NAME_CHARS}")
        check_text(field_name, name)


def _are_between(token_ids: Sequence[int], start: int, end: int) -> bool:
    """Return whether all are integers from `start` to `end` - 1."""
    try:
        array = np.asarray(token_ids)
    except (OverflowError, ValueError):
        return False
    return array.dtype.kind in "iu" and bool(array.min() >= start) and bool(array.max() < end)
