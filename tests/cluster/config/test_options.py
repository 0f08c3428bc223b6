"""Every declared option agrees in its forms: command line, fleet file, environment, LLM's arguments and --help."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from quire import LLM
from quire.cluster import cli
from quire.cluster.cli.deploy import read_deployments
from quire.cluster.config.deployment import ClusterOptions, Deployment, ScalingLimits
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.server_options import ServerOptions
from quire.cluster.config.vllm_arguments import GROUP, VllmOptions
from quire.cluster.fleet.controller.spot import NOTICES
from quire.cluster.offline import loaded_model
from quire.cluster.offline.engine_arguments import OFFLINE_DEFAULTS, read_engine_options
from quire.proto.errors import ConfigError
from quire.proto.model.quantization import ONLINE_METHODS
from quire.proto.options.option import (
    Option,
    declared_options,
    option,
    read_environment,
    select_options,
    write_table,
)
from quire.proto.options.sections import ImageOptions
from quire.proto.options.values import (
    DIRECTORY_SIZE,
    FILE_NAME,
    FLAG,
    INTEGER,
    JSON_OBJECT,
    LORA_MODULES,
    NAMES,
    NUM_BYTES,
    NUMBER,
    PATH,
    PLACE_SIZE,
    TEXT,
    OneOf,
    bearer_token,
    check_target_modules,
    image_limits,
    media_domains,
    processor_names,
    web_origins,
    zmq_endpoint,
)
from quire.scheduler.core.queue.policy import ADMISSION_KEYS
from quire.worker.structured.compilation import AUTO, GUIDANCE, XGRAMMAR

MODEL_OWNERS = EngineOptions, ScalingLimits, Deployment
OWNERS = *MODEL_OWNERS, ServerOptions, ClusterOptions
OPTIONS = [
    pytest.param(owner, option, id=option.name)
    for owner in OWNERS
    for option in declared_options(owner).values()
]
MODEL_OPTIONS = [each for each in OPTIONS if each.values[0] in MODEL_OWNERS]
ENGINE_OPTIONS = [each for each in OPTIONS if each.values[0] is EngineOptions]


def sample(option: Option) -> tuple[Any, str]:
    """A value that is allowed and not the default, and the text for it."""
    if isinstance(option.check, OneOf):
        choice = option.check.choices[-1]
        return choice, choice
    if option.check is image_limits:
        return '{"image": 3}', '{"image": 3}'
    if option.kind is JSON_OBJECT:
        return '{"method": "ngram"}', '{"method": "ngram"}'
    if option.kind is LORA_MODULES:
        return (("sql", "/adapters/sql"), ("law", "/adapters/law")), "sql=/adapters/sql,law=/adapters/law"
    if option.kind.is_repeated:
        return (("gold", 2.5), ("CPU", 3.0)), "gold=2.5,CPU=3"
    if option.kind is FLAG:
        return not option.default, str(not option.default).lower()
    if option.kind is INTEGER:
        integer = (option.default or 4) * 2
        return integer, str(integer)
    if option.kind is NUMBER:
        number = (option.default or 10.0) / 4
        return number, str(number)
    if option.kind is NUM_BYTES:
        return 3 << 20, "3MiB"
    if option.kind is DIRECTORY_SIZE:
        return "/var/cache/kv:64000000000", "/var/cache/kv:64GB"
    if option.kind is PLACE_SIZE:
        return "s3://kv-blocks/of/llama:64000000000", "s3://kv-blocks/of/llama/:64GB"
    if option.kind is FILE_NAME:
        return "/etc/quire/kv.key", "/etc/quire/kv.key"
    if option.check is bearer_token:
        return "secret", "secret"
    if option.check is web_origins:
        return "https://example.com", "https://example.com"
    if option.check is zmq_endpoint:
        return "zmq://127.0.0.1:5557", "zmq://127.0.0.1:5557"
    if option.check in (processor_names, check_target_modules, media_domains):
        return "first,second", "first,second"
    return (Path("/some/text"), "/some/text") if option.kind is PATH else ("some text", "some text")


def on_command_line(option: Option) -> list[str]:
    flag = option.flag or "--" + option.name.replace("_", "-")
    value, text = sample(option)
    if option.kind is FLAG:
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [
        word for entry in (text.split(",") if option.kind.is_repeated else [text]) for word in (flag, entry)
    ]


def in_toml(option: Option) -> str:
    value, text = sample(option)
    if option.kind.is_repeated:
        return "{" + ", ".join(f"{name} = {entry!r}" for name, entry in value) + "}"
    return text if option.kind in (INTEGER, NUMBER, FLAG) else f"'{text}'"


@pytest.fixture(scope="module")
def command() -> Any:
    """Return the command line, which typer otherwise builds for each call, in 26 ms."""
    return typer.main.get_command(cli.app)


@pytest.fixture
def served(command: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Run `quire serve demo`, with a stub for the server, and return all options that reach the server, by name."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def run(*arguments: str) -> dict[str, Any]:
        reached: dict[str, Any] = {}

        def stub(configured: Any, *more: Any) -> int:
            (deployment,) = configured if isinstance(configured, tuple) else (Deployment(configured),)
            for part in (deployment.engine, deployment.limits, deployment, *more):
                if is_dataclass(part):  # not the address
                    reached.update({name: getattr(part, name) for name in declared_options(type(part))})
            return 0

        monkeypatch.setattr("quire.cluster.cli.serve.server_setup.set_up_server", lambda options: None)
        monkeypatch.setattr("quire.cluster.cli.serve.fleet.serve_fleet", stub)
        monkeypatch.setattr("quire.cluster.cli.serve.single_host.serve", stub)
        assert command.main(["serve", "demo", *arguments], prog_name="quire", standalone_mode=False) == 0
        return reached

    return run


@pytest.mark.parametrize(("owner", "option"), OPTIONS)
def test_command_line_sets_each_option(
    owner: type, option: Option, served: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--max-replicas", "9"] if option.name == "min_replicas" else []
    reached = served("--address", "auto", *on_command_line(option), *more)
    assert reached[option.name] == sample(option)[0]
    assert served("--address", "auto")[option.name] == option.default


@pytest.mark.parametrize(("owner", "option"), OPTIONS)
def test_environment_sets_each_option_and_command_line_wins(
    owner: type, option: Option, served: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    value, text = sample(option)
    assert read_environment({option.variable: text, "QUIRE_CACHE_DIR": "/x"}, owner) == {option.name: value}
    assert read_environment({option.variable: ""}, owner) == {}
    if option.name == "min_replicas":
        monkeypatch.setenv("QUIRE_MAX_REPLICAS", "9")
    monkeypatch.setenv(option.variable, text)
    assert served("--address", "auto")[option.name] == value
    if option.kind is NUMBER or option.kind is INTEGER:
        flag = "--" + option.name.replace("_", "-")
        assert served("--address", "auto", flag, str(option.default or 8))[option.name] == (
            option.default or 8
        )


@pytest.mark.parametrize(("owner", "option"), MODEL_OPTIONS)
def test_fleet_file_sets_each_option_of_a_model_and_wins_over_the_environment(
    owner: type, option: Option, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "fleet.toml"
    more = "max_replicas = 9\n" if option.name == "min_replicas" else ""
    path.write_text(f'[[model]]\nmodel = "demo"\n{more}{option.name} = {in_toml(option)}\n')
    monkeypatch.setenv("QUIRE_UNKNOWN", "not an option")
    if option.kind in (INTEGER, NUMBER):
        monkeypatch.setenv(option.variable, str(option.default or 8))
    (deployment,) = read_deployments(str(path), {})
    part = {EngineOptions: deployment.engine, ScalingLimits: deployment.limits, Deployment: deployment}[owner]
    assert getattr(part, option.name) == sample(option)[0]
    assert Deployment.from_json(deployment.to_json()) == deployment


@pytest.mark.parametrize(("owner", "option"), ENGINE_OPTIONS)
def test_llm_takes_each_engine_option(owner: type, option: Option) -> None:
    value, text = sample(option)
    assert getattr(read_engine_options("demo", {option.name: value}, {}), option.name) == value
    assert getattr(read_engine_options("demo", {}, {option.variable: text}), option.name) == value
    parameter = inspect.signature(LLM).parameters[option.name]
    assert parameter.annotation == option.annotation
    assert parameter.default == OFFLINE_DEFAULTS.get(option.name, option.default)


@pytest.mark.parametrize(("owner", "option"), OPTIONS)
def test_declaration_is_complete(owner: type, option: Option) -> None:
    value, _ = sample(option)
    assert option.help.endswith(".")
    assert option.group
    assert option.problem(option.default) is None
    assert option.read(option.default) == option.default
    assert option.read(value) == value != option.default
    if option.kind in (INTEGER, NUMBER) and option.name != "seed":
        assert option.check is not None
        assert option.unit
    if option.check is not None:
        assert option.problem(_not_allowed(option)) is not None


def _not_allowed(option: Option) -> Any:
    if option.kind in (TEXT, NAMES, JSON_OBJECT):
        return "x y"
    return (("", 1.0),) if option.kind.is_repeated else -2


def test_no_name_is_declared_twice() -> None:
    names = [name for owner in OWNERS for name in declared_options(owner)]
    assert len(names) == len(set(names))


def test_serve_help_shows_each_option_in_its_panel() -> None:
    command = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    shown = {parameter.name: parameter for parameter in command.params}
    for owner in (*OWNERS, VllmOptions):
        for name, declared in declared_options(owner).items():
            parameter = shown.pop(name)
            assert (parameter.help, parameter.rich_help_panel) == (declared.help, declared.group)
            assert parameter.default == (None if declared.kind.is_repeated else declared.default)
    assert set(shown) == {"model", "address"}
    output = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for panel in ("Model", "Execution", GROUP, "KV cache", "Scheduling", "Server", "Fleet"):
        assert f"\n{panel}:\n" in output


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("QUIRE_MAX_NUM_SEQS", "many", "QUIRE_MAX_NUM_SEQS is 'many', must be a whole number"),
        ("QUIRE_MAX_NUM_SEQS", "0", "QUIRE_MAX_NUM_SEQS is 0, must be above 0"),
        ("QUIRE_AUDIT", "maybe", "QUIRE_AUDIT is 'maybe', must be true or false"),
        ("QUIRE_POLICY", "lottery", "QUIRE_POLICY is 'lottery', must be fcfs,"),
        ("QUIRE_KV_CACHE_MEMORY", "lots", "QUIRE_KV_CACHE_MEMORY: amount of memory is 'lots'"),
        (
            "QUIRE_TENANT_WEIGHTS",
            "gold",
            "QUIRE_TENANT_WEIGHTS: tenant weight is 'gold', must be like gold=3",
        ),
    ],
)
def test_bad_environment_variable_is_named(variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_environment({variable: text}, EngineOptions)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seq": 4}, "there is no option 'max_num_seq' of LLM; did you mean 'max_num_seqs'?"),
        ({"max_num_seqs": "many"}, "max_num_seqs is 'many', must be a whole number"),
        ({"max_queue_len": None}, "max_queue_len is None, must be a whole number"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, must be above 0"),
    ],
)
def test_llm_refuses_bad_options(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **given)


def test_offline_engine_of_one_cpu_rank_has_one_step_in_flight(demo_model_dir: Path) -> None:
    """It shares a thread with the scheduler. On a GPU the host prepares a step while the device computes one."""
    steps = [
        loaded_model._resolve(read_engine_options("demo", given, environment)).scheduler.max_steps_in_flight
        for given, environment in (
            ({}, {}),
            ({"tensor_parallel_size": 2}, {}),
            ({"max_steps_in_flight": 2}, {}),
            ({}, {"QUIRE_MAX_STEPS_IN_FLIGHT": "2"}),
        )
    ]
    assert steps == [1, 2, 2, 2]


def test_offline_engine_of_one_gpu_has_two_steps_in_flight(
    demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "this", lambda: Machine(num_cores=2, num_gpus=1))
    assert loaded_model._resolve(read_engine_options("demo", {}, {})).scheduler.max_steps_in_flight == 2


def test_constructor_accepts_what_write_table_returns() -> None:
    engine = EngineOptions("demo", policy="fair", tenant_weights=(("gold", 3.0),), kv_cache_memory=1 << 20)
    table = write_table(engine)
    assert table["tenant_weights"] == {"gold": 3.0}
    assert EngineOptions("demo", **select_options(EngineOptions, table)) == engine
    assert write_table(ServerOptions(tls_key=Path("/key")))["tls_key"] == "/key"


def test_constructor_reports_all_problems() -> None:
    with pytest.raises(
        ConfigError, match="max_num_seqs is 0, must be above 0 and at most 16384; max_queue_len is -1"
    ):
        EngineOptions("demo", max_num_seqs=0, max_queue_len=-1)


def test_choices_are_those_of_the_code_behind_them() -> None:
    def choices(owner: type, name: str) -> set[str]:
        check = declared_options(owner)[name].check
        assert isinstance(check, OneOf)
        return set(check.choices)

    assert choices(EngineOptions, "policy") == {*ADMISSION_KEYS, "fair", "longest-prefix"}
    assert choices(EngineOptions, "quantization") == set(ONLINE_METHODS)
    assert choices(ClusterOptions, "spot_notices") == set(NOTICES)
    assert choices(EngineOptions, "structured_outputs_backend") == {AUTO, GUIDANCE, XGRAMMAR}


def test_declaration_with_a_text_annotation_is_refused() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Late:
        size: int = option(1, help="A size.", group="Panel")

    with pytest.raises(TypeError, match="must not import annotations from __future__"):
        declared_options(Late)


def test_fleet_file_of_the_guide_names_declared_options_only() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    known = {"model", *(name for owner in OWNERS for name in declared_options(owner))}
    (text,) = [part.partition("```")[0] for part in guide.split("```toml\n")[1:]]
    assert {name for table in tomllib.loads(text)["model"] for name in table} <= known


def test_limits_of_media_are_numbers_or_those_of_vllm() -> None:
    found = ImageOptions(
        limit_mm_per_prompt='{"image": 4, "video": {"count": 1, "num_frames": 64, "width": 9}}'
    )
    assert (found.max_count("image"), found.max_count("video"), found.max_frames) == (4, 1, 64)
    found = ImageOptions(limit_mm_per_prompt='{"video": 2}')
    assert (found.max_count("image"), found.max_count("video"), found.max_frames) == (999, 2, 128)
    for text, problem in (
        (
            '{"video": {"num_frames": 769}}',
            "num_frames of video is 769, must be a whole number from 0 to 768",
        ),
        ('{"video": {"count": true}}', "video is True, must be"),
        ('{"image": "4"}', "image is '4', must be"),
        ('{"sound": 1}', "has 'sound', must have image, video or audio"),
    ):
        assert problem in (image_limits("limits", text) or "")
