"""Fixtures for all tests: tiny models on disk, built once per session, and the bundled demo model.

Heavy libraries are imported inside functions, so that tests of the control plane start at once.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deadlines import TEST_TIMEOUT_S
from left_processes import kill_left, mark_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Tests must not use the network; transformers would, to look for files that a tiny model lacks.
os.environ["HF_HUB_OFFLINE"] = "1"
# OpenMP reads this when torch is imported. Its idle threads spin otherwise, also for a core that another process
# needs: on two busy cores 84 tests of paged attention took 134 s, and 5 s with sleeping threads.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ModelFactory = Callable[..., Path]
LogFactory = Callable[[str], list[str]]

END_OF_TEXT = "<|endoftext|>"

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "It was the best of times, it was the worst of times, it was the age of wisdom.",
    "A gathering of folded pages is called a quire; many quires make a book.",
    "What's past is prologue: twenty-seven ships, 1,024 sails and a naïve crew — all gone!",
]


# Files that start Ray run in the same process of pytest-xdist, and first: they take longest together.
RAY_GROUP = "ray"
# The next ones there: a minute of a core each, and more if the C++ ops are compiled for all instruction sets.
LONG = "tests/kernels/native/test_instruction_sets.py", "tests/worker/models/test_exactness.py"

MAX_ID_CHARS = 200

_MARK = pytest.StashKey[str]()
_LEFT = pytest.StashKey[list[str]]()
ONLY_FAILED_TESTS = "quire/only_failed_tests"  # in pytest's cache; make test-again reads it


def pytest_configure(config: pytest.Config) -> None:
    if mark := mark_run():
        config.stash[_MARK] = mark
        _remember(config, only_failed_tests=False)  # until the run ends
    # A shell starts background jobs with SIGINT ignored, and child processes would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _make_hypothesis_repeatable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a test as in one process: pytest-xdist appends its group, and no later run would know it as failed."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that gathers the reports knows the test by this name until then
    file = report.nodeid.partition("::")[0]
    report.nodeid = report.nodeid.removesuffix(f"@{file}").removesuffix(f"@{RAY_GROUP}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the processes that tests have left, and fail the run if there are any."""
    if (mark := session.config.stash.get(_MARK, None)) is None:
        return
    left = session.config.stash[_LEFT] = kill_left(mark)
    is_whole = session.exitstatus == pytest.ExitCode.TESTS_FAILED
    _remember(session.config, only_failed_tests=is_whole and not left)
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _remember(config: pytest.Config, *, only_failed_tests: bool) -> None:
    """Say whether a second run of the failed tests shows all that was wrong: not after a run that broke off."""
    if (cache := getattr(config, "cache", None)) is not None:
        cache.set(ONLY_FAILED_TESTS, only_failed_tests)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for process in config.stash.get(_LEFT, []):
        terminalreporter.line(f"a test left a process, which was killed: {process}", red=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    starts_ray = {_file_of(item) for item in items if item.get_closest_marker("cluster")}
    for item in items:
        if item.get_closest_marker("cluster") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
    if hasattr(config, "workerinput"):  # in a process of pytest-xdist
        groups = {item: RAY_GROUP if _file_of(item) in starts_ray else _file_of(item) for item in items}
        for item, group in groups.items():
            item.add_marker(pytest.mark.xdist_group(group))
        first = (RAY_GROUP, *LONG)
        items.sort(key=lambda item: first.index(groups[item]) if groups[item] in first else len(first))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own.

    A fixture whose value is an asynchronous context is entered there, and the test gets what it returns.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def run_test() -> None:
        arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
        async with AsyncExitStack() as contexts:
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await contexts.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    asyncio.run(run_test())
    return True


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name a long text by its beginning: some have megabytes, and each process would send the names of all tests."""
    if not isinstance(val, str | bytes) or len(val) <= MAX_ID_CHARS:
        return None
    return f"{argname} of {len(val)}, {val[:20]!r}"


def _file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # see collect_garbage_after_module
    # Without groups each process would start servers of its own, at the same time.
    if session.config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError(
            "pytest-xdist groups no tests with this version of pytest: see constraints.txt"
        )


def _make_hypothesis_repeatable() -> None:
    """Draw the same examples in each run, without deadlines, so that a new failure comes from a change.

    Hypothesis also draws constants that it finds in the modules loaded so far: they depend on the tests that happened
    to run before in the same process, so it must not look.
    """
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture.providers import HypothesisProvider
    from hypothesis.internal.constants_ast import Constants

    setattr(HypothesisProvider, "_local_constants", Constants())  # noqa: B010 (mypy knows a property)

    settings.register_profile(
        "repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="module")
def collect_garbage_after_module() -> Iterator[None]:
    """Collect garbage after each module: asyncio logs unretrieved exceptions when their futures are collected.

    In a later module the log would be attributed to that module's test. On Python 3.11 the traceback that asyncio
    logs also breaks an `ast.parse` during which the collection runs.

    The next collections do not walk what is left then, mostly the modules of torch and transformers: that takes 0.4 s
    of a core, and each closed model collects.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelFactory:
    """`make_model(kind="llama", seed=0, **overrides) -> Path`: a tiny random model directory with a tokenizer.

    A kind is a model type of transformers: llama, gemma2, gpt2 and so on. Overrides are fields of its
    configuration; `checkpoint` holds arguments of save_pretrained. The same arguments return the same directory:
    a test that changes a model must copy it first.
    """
    built: dict[str, Path] = {}

    def make(kind: str = "llama", seed: int = 0, **overrides: Any) -> Path:
        key = repr((kind, seed, sorted(overrides.items())))
        if key not in built:
            built[key] = _build_model(tmp_path_factory.mktemp(f"{kind}-{seed}-"), kind, seed, overrides)
        return built[key]

    return make


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The directory of the bundled demo model."""
    import quire.cluster.cli.demo

    folder = Path(quire.cluster.cli.demo.__file__).parent / "model"
    assert (folder / "config.json").is_file(), f"the bundled demo model is missing from {folder}"
    return folder


@pytest.fixture
def log_of() -> Iterator[LogFactory]:
    """`log_of("quire.worker.rank.actor")`: the list to which lines of a module's log are appended from now on.

    A line is `WARNING: the text`. Handlers of the program may drop repetitions of a line, which this list has.
    """
    with ExitStack() as stack:

        def listen(name: str) -> list[str]:
            lines: list[str] = []
            handler, logger = logging.Handler(), logging.getLogger(name)
            handler.emit = lambda record: lines.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
            stack.callback(logger.setLevel, logger.level)
            stack.callback(logger.removeHandler, handler)
            logger.setLevel(logging.DEBUG)
            logger.addHandler(handler)
            return lines

        yield listen


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Run C++ ops in two threads, without gradients. Skips the test if there is no C++ compiler."""
    import torch

    from quire.kernels.native.library import is_available

    if not is_available():
        pytest.skip("there is no C++ compiler")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)


def _build_model(folder: Path, kind: str, seed: int, overrides: dict[str, Any]) -> Path:
    import torch
    import transformers
    from model_kinds import register_text_models

    register_text_models()
    tokenizer = _train_tokenizer()
    overrides = dict(overrides)
    how_to_save = overrides.pop("checkpoint", {})
    defaults: dict[str, Any] = TINY | {"vocab_size": len(tokenizer)} | _KIND_DEFAULTS.get(kind, {})
    for name in _KINDS_LACK.get(kind, ()):
        del defaults[name]
    tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(kind, **(defaults | tokens | overrides))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomize(model, seed)
    model.save_pretrained(folder, **how_to_save)
    tokenizer.save_pretrained(folder)
    return folder


_LATENT = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 48,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
_KIND_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 24, "sliding_window": 24, "attn_logit_softcapping": 3.0},
    "gemma3_text": {"query_pre_attn_scalar": 24, "sliding_window": 24, "sliding_window_pattern": 3},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"sliding_window": 11, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mimo_v2_flash": {
        "head_dim": 24,
        "v_head_dim": 16,
        "num_key_value_heads": 2,
        "sliding_window": 11,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
    },
    "glm4": {"rms_norm_eps": 1e-5},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_group": 4,
        "topk_group": 2,
        "use_qk_norm": True,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "minimax_m3_vl_text": {
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 40,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 48,
        "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_block_size": 16,
        "index_topk_blocks": 2,
        "swiglu_limit": 0.5,
    },
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    "exaone4": {"sliding_window": 11, "sliding_window_pattern": 2},
    "starcoder2": {"sliding_window": 11},
    "nemotron": {"norm_eps": 1e-5},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
    "deepseek_v2": _LATENT | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    "deepseek_v3": _LATENT | {"q_lora_rank": 40, "n_group": 4, "topk_group": 3},
    "deepseek_v32": _LATENT
    | {"q_lora_rank": 40, "n_group": 4, "topk_group": 3, "first_k_dense_replace": 1, "num_hidden_layers": 3}
    | {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 24},
    "glm_moe_dsa": _LATENT
    | {"q_lora_rank": 40, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 4}
    | {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 24}
    | {"indexer_types": ["full", "shared", "full", "shared"]},
    "glm4_moe_lite": _LATENT
    | {"q_lora_rank": 40, "mlp_layer_types": ["dense", "sparse", "sparse"], "n_group": 1, "topk_group": 1},
    "longcat_flash": {
        "num_layers": 2,
        "num_key_value_heads": 8,
        "kv_lora_rank": 48,
        "q_lora_rank": 40,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "ffn_hidden_size": 96,
        "n_routed_experts": 6,
        "zero_expert_num": 3,
        "moe_topk": 4,
        "expert_ffn_hidden_size": 32,
        "routed_scaling_factor": 2.0,
    },
    "mistral4": _LATENT
    | {
        "q_lora_rank": 40,
        "topk_group": 3,
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "minicpm3": {name: value for name, value in _LATENT.items() if "expert" not in name}
    | {"q_lora_rank": 40, "scale_emb": 6, "scale_depth": 1.4, "dim_model_base": 128},
    "axk1": _LATENT | {"q_lora_rank": 40, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "axk2": _LATENT
    | {
        "q_lora_rank": 40,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "topk_group": 3,
        "gated_norm_rank": 6,
    }
    | {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 24},
    "hy_v4": _LATENT
    | {
        "q_lora_rank": 40,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"],
        "topk_group": 3,
        "hc_mult": 3,
        "swiglu_limit": 0.5,
    }
    | {"index_topk": 12, "index_n_heads": 16, "index_head_dim": 24},
    "gemma4_unified_text": {
        "num_hidden_layers": 6,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "final_logit_softcapping": 5.0,
    },
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.5,
    },
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.9, 0.0, 0.0],
        "altup_num_inputs": 3,
        "laurel_rank": 6,
        "final_logit_softcapping": 5.0,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "vocab_size_per_layer_input": 400,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "sliding_window": 11,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "final_logit_softcapping": 5.0,
    },
    "llama4_text": {
        "intermediate_size": 48,
        "intermediate_size_mlp": 96,
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_layers": [0, 2],
        "attention_chunk_size": 20,
        "floor_scale": 16,
        "attn_scale": 0.5,
    },
    "gptj": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 512, "rotary_dim": 4},
    "codegen": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 512, "n_ctx": 512, "rotary_dim": 4},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "ctrl": {"n_embd": 64, "n_layer": 3, "n_head": 8, "n_positions": 512, "dff": 128},
    "dbrx": {"d_model": 64, "n_layers": 3, "n_heads": 8, "max_seq_len": 512},
}
# Fields of TINY that the configurations of these kinds lack, or that have other names there.
_RENAMED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_KINDS_LACK = (
    dict.fromkeys(("olmo", "olmoe", "phi3", "stablelm"), ("head_dim",))
    | dict.fromkeys(
        (
            "gpt2",
            "gptj",
            "codegen",
            "gpt_neox",
            "gpt_bigcode",
            "opt",
            "bloom",
            "falcon",
            "persimmon",
            "modernbert-decoder",
        ),
        ("head_dim", "num_key_value_heads"),
    )
    | {"longcat_flash": ("num_hidden_layers", "intermediate_size")}
    | dict.fromkeys(("ctrl", "dbrx"), (*_RENAMED, "head_dim", "num_key_value_heads"))
)


def _randomize(model: PreTrainedModel, seed: int) -> None:
    """Draw weights large enough that greedy decoding varies; the usual small ones repeat one token."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * std

    head_std = 2 / model.config.hidden_size**0.5
    is_gemma = model.config.model_type.startswith("gemma")
    norm_offset = 1.0 if is_gemma and not model.config.model_type.startswith(("gemma3n", "gemma4")) else 0.0
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            sharp = any(part in name for part in _SHARP)
            sharpness = 2.0 if sharp else 1.0
            if name.endswith(_FACTORS):
                weight.copy_(1 + normal(weight, 0.1))
            elif weight.ndim == 1 and name.endswith("weight"):
                weight.copy_(sharpness - norm_offset + normal(weight, 0.1))
            elif weight.ndim == 1:
                weight.copy_(normal(weight, 0.1))
            elif id(weight) in embeddings:
                weight.copy_(normal(weight, head_std if model.config.tie_word_embeddings else 0.05))
            elif "lm_head" in name or "embed_out" in name:
                weight.copy_(normal(weight, head_std))
            else:
                inputs = weight.shape[0] if model.config.model_type == "gpt2" else weight.shape[-1]
                weight.copy_(normal(weight, sharpness * inputs**-0.5))
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("correction_bias"):
                buffer.copy_(normal(buffer, 0.1))
            if name.endswith("balancing_biases"):
                buffer.copy_(normal(buffer, 0.1) - 1)
                buffer[-1] = -1  # as transformers makes it while it loads a model
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + normal(buffer, 0.1))
            if name.endswith("tid2eid"):  # the experts of each token id
                scores = torch.rand(len(buffer), model.config.n_routed_experts, generator=generator)
                buffer.copy_(scores.argsort(dim=1)[:, : buffer.shape[1]])


# Vectors that multiply others, and are about 1.
_FACTORS = ("hidden_states_scale", "residual_scale", "router_states_scale", ".temp")
# Weights that are drawn larger, so that attention concentrates on few tokens.
_SHARP = (
    "q_proj.",
    "q_b_proj.",
    "kv_b_proj.",
    "k_proj.",
    "q_norm.",
    "k_norm.",
    "c_attn.",
    "query_key_value.",
    "Wq.",
    "Wk.",
    "qkv_proj.",
)


@functools.cache
def _train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of at most 384 tokens, including the end-of-text token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)
