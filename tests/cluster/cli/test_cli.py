"""The command line: one line per error, and exit statuses."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from deadlines import PROGRAM_TIMEOUT_S
from serving import ServerFactory

import quire as package
from quire.cluster import cli
from quire.cluster.cli.exit_status import FAILED, INTERRUPTED, WRONG_USE
from quire.cluster.cli.generate import read_prompt
from quire.cluster.client.wire.tokens import Role, load_tokens
from quire.proto.errors import ConfigError, InvalidRequest
from quire.proto.options.values import parse_num_bytes


def quire(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Run the command; return exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["quire", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output, errors = capfd.readouterr()
    return int(ended.value.code or 0), output, errors


@pytest.mark.parametrize(
    "command", ["serve", "generate", "chat", "run-batch", "status", "top", "doctor", "chaos"]
)
def test_help_shows_an_example(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    status, output, _ = quire(monkeypatch, capfd, command, "--help")
    assert status == 0
    assert f"quire {command}" in output.partition("Example:")[2]


def test_token_prints_a_token_and_its_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "tokens"
    status, output, _ = quire(monkeypatch, capfd, "token", "gold", "--append", str(file))
    assert status == 0
    assert file.stat().st_mode & 0o777 == 0o600
    status, more, _ = quire(monkeypatch, capfd, "token", "--role", "operator", "--role", "metrics")
    secret, line = more.splitlines()
    file.write_text(file.read_text() + line)
    user, operator = (load_tokens(file).find(text.strip().encode()) for text in (output, secret))
    assert user is not None
    assert (user.tenant, user.roles) == ("gold", frozenset({Role.USER}))
    assert operator is not None
    assert (operator.tenant, operator.roles) == (None, frozenset({Role.OPERATOR, Role.METRICS}))


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["fly"], WRONG_USE, "No such command 'fly'"),
        (["status", "--fast"], WRONG_USE, "No such option"),
        (["generate"], WRONG_USE, "Missing argument"),
        (["generate", "x", "--max-tokens", "many"], WRONG_USE, "'--max-tokens'"),
        (["generate", "x", "--temperature", "-1"], WRONG_USE, "sampling.temperature: is -1.0"),
        (["generate", "x", "--logit-bias", "5"], WRONG_USE, "logit-bias: is '5', must be TOKEN_ID=VALUE"),
        (["generate", "x", "--n", "4", "--beam-width", "2"], WRONG_USE, "sampling.beam_width: is 2"),
        (["chat", "--top-p", "0"], WRONG_USE, "sampling.top_p: is 0.0"),
        (["serve", "/nowhere"], FAILED, "/nowhere: not a directory"),
        (["serve", "demo", "--listen", "here"], WRONG_USE, "listening address is 'here'"),
        (["serve", "demo", "--listen", "0.0.0.0:0"], WRONG_USE, "can be reached from other machines"),
        (["serve", "demo", "--kv-cache-memory", "lots"], WRONG_USE, "amount of memory is 'lots'"),
        (["serve", "demo", "--device", "cpu", "--tensor-parallel-size", "3"], WRONG_USE, "does not divide"),
        (["serve", "demo", "--policy", "lottery"], WRONG_USE, "policy is 'lottery', must be fcfs,"),
        (["serve", "demo", "--tp", "2"], WRONG_USE, "did you mean --tensor-parallel-size? (see quire serve"),
        (["run-batch", "/nowhere", "/tmp/out"], WRONG_USE, "/nowhere cannot be read"),
        (
            ["serve", "demo", "--tenant-weight", "gold"],
            WRONG_USE,
            "tenant weight is 'gold', must be like gold=3",
        ),
        (
            ["serve", "demo", "--policy", "fcfs", "--tenant-weight", "gold=3"],
            WRONG_USE,
            "shares of the policy fair",
        ),
        (["serve", "demo", "--num-host-kv-blocks", "-1"], WRONG_USE, "num_host_kv_blocks is -1"),
        (["serve", "demo", "--kv-cache-dtype", "int4"], WRONG_USE, "kv_cache_dtype is 'int4'"),
        (["chaos", "eat-rank"], WRONG_USE, "'kill-rank', 'stop-rank'"),
        (["chaos", "slow-rank", "--delay", "0"], WRONG_USE, "delay_s: is 0, must be more than 0"),
        (["status", "--token-file", "/nowhere"], WRONG_USE, "token file /nowhere cannot be read"),
    ],
)
def test_error_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    ended, output, errors = quire(monkeypatch, capfd, *arguments)
    assert (ended, output) == (status, "")
    assert errors.startswith("quire: ")
    assert message in errors
    assert len(errors.splitlines()) == 1


def test_all_problems_of_options_are_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--device", "cpu", "--tensor-parallel-size", "3", "--max-model-len", "100000"]
    memory = ["--kv-cache-memory", "1000TiB", "--listen", "here"]
    status, output, errors = quire(monkeypatch, capfd, "serve", "demo", *arguments, *memory)
    assert (status, output) == (WRONG_USE, "")
    problems = errors.splitlines()
    for problem, word in zip(
        problems, ("does not divide", "max_model_len", "1,024,000.0 GiB", "'here'"), strict=True
    ):
        assert problem.startswith("quire: ")
        assert word in problem


def test_checks_of_options_import_neither_torch_nor_ray() -> None:
    program = (
        "import sys\n"
        "from quire.cluster.cli import main\n"
        "sys.argv = ['quire', 'serve', 'demo', '--device', 'cpu', '--tensor-parallel-size', '3', '--no-http']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2\n"
        "heavy = {'torch', 'ray', 'transformers', 'fastapi'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PROGRAM_TIMEOUT_S)


def test_taken_port_names_the_next_free_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = "--listen", f"127.0.0.1:{port}", "--no-http"
        status, _, errors = quire(monkeypatch, capfd, "serve", "demo", *arguments)
    assert status == WRONG_USE
    (free,) = re.findall(r"choose another with --listen 127\.0\.0\.1:(\d+)", errors)
    assert port < int(free) <= port + 20


def test_command_alone_shows_help_and_version_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    status, output, errors = quire(monkeypatch, capfd)
    assert (status, errors) == (0, "")
    assert "Commands:" in output
    status, output, _ = quire(monkeypatch, capfd, "--version")
    assert (status, output) == (0, f"quire {package.__version__}\n")


@pytest.mark.parametrize("command", ["serve", "deploy", "generate", "fit"])
def test_help_of_a_narrow_terminal_shows_every_option_whole(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, output, _ = quire(monkeypatch, capfd, command, "--help")
    parameters = typer.main.get_command(cli.app).commands[command].params  # type: ignore[attr-defined]
    for name in (name for parameter in parameters for name in parameter.opts if name.startswith("--")):
        assert re.search(rf"{name}\b", output), name
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completes_commands_and_values(shell: str) -> None:
    def complete(words: str) -> str:
        variables = {
            "_QUIRE_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - 1),
            "_TYPER_COMPLETE_ARGS": words,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        command = [sys.executable, "-m", "quire"]
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S
        )
        return done.stdout

    assert "run-batch" in complete("quire run")
    assert "longest-prefix" in complete("quire serve demo --policy long")


def test_generate_reads_stdin() -> None:
    assert read_prompt(io.BytesIO("Es war ein düsterer Abend\n".encode())) == "Es war ein düsterer Abend"
    for content in (b"", b" \n", b"\xff\xfe"):
        with pytest.raises(InvalidRequest, match="stdin"):
            read_prompt(io.BytesIO(content))


def test_status_fails_without_a_server_at_the_target(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    status, _, errors = quire(monkeypatch, capfd, "status", "--target", "127.0.0.1:1")
    assert status == FAILED
    assert "127.0.0.1:1" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000000", 1_000_000), ("512MiB", 512 << 20), ("8GB", 8 * 10**9), ("1.5 gib", 3 << 29), ("2k", 2000)],
)
def test_parse_num_bytes_reads_units(text: str, num_bytes: int) -> None:
    assert parse_num_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1XB", "1 2"])
def test_parse_num_bytes_refuses_other_text(text: str) -> None:
    with pytest.raises(ConfigError, match="amount of memory"):
        parse_num_bytes(text)


async def run_quire(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "from quire.cluster.cli import main; main()",
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
    )


async def test_generate_and_status_against_a_server(serve: ServerFactory) -> None:
    async with serve(num_host_kv_blocks=24) as server:
        process = await run_quire(
            "generate", "The quick", "--target", server.target, "--max-tokens", "8", "--seed", "1"
        )
        output, errors = await asyncio.wait_for(process.communicate(), PROGRAM_TIMEOUT_S)
        assert process.returncode == 0
        assert re.fullmatch(
            rb"\d+ prompt tokens, 8 generated; first token after [\d.]+ s, all in [\d.]+ s, [\d.]+ tokens/s\n",
            errors,
        )
        assert len(output.decode()) > 1
        process = await run_quire("status", "--target", server.target, "--json")
        output, errors = await asyncio.wait_for(process.communicate(), PROGRAM_TIMEOUT_S)
        assert (process.returncode, errors) == (0, b"")
        state = json.loads(output)
        assert (state["healthy"], state["replicas"][0]["replica_id"]) == (True, "replica-0")
        process = await run_quire("status", "--target", server.target, COLUMNS="200")
        output, errors = await asyncio.wait_for(process.communicate(), PROGRAM_TIMEOUT_S)
        assert (process.returncode, errors) == (0, b"")
        for word in ("replica-0", "tiny", "ready", "rank", "KV blocks", "0 waiting"):
            assert word in output.decode()
        assert "0 of 24 used, 0 cached, 0 blocks swapped so far" in output.decode()
        assert re.search(r"0 of 6\d used", output.decode())
        process = await run_quire("generate", "x", "--target", server.target, "--model", "other")
        output, errors = await asyncio.wait_for(process.communicate(), PROGRAM_TIMEOUT_S)
        assert process.returncode == FAILED
        assert errors.decode() == "quire: model 'other' is not served here; 'tiny' is\n"


async def test_generate_prints_completions_logprobs_and_json(serve: ServerFactory) -> None:
    async with serve() as server:
        arguments = ["generate", "The quick", "--target", server.target, "--max-tokens", "4"]
        arguments += ["--seed", "1", "--ignore-eos", "--logprobs", "2", "--quiet"]

        async def ask(*more: str) -> str:
            process = await run_quire(*arguments, *more, COLUMNS="200")
            output, errors = await asyncio.wait_for(process.communicate(), PROGRAM_TIMEOUT_S)
            assert (process.returncode, errors) == (0, b"")
            return output.decode()

        plain, as_json = await asyncio.gather(
            ask("--n", "2", "--best-of", "3", "--prompt-logprobs", "1", "--priority", "2"),
            ask("--json", "--frequency-penalty", "1", "--logit-bias", "70=100", "--bad-word", "zz"),
        )
        assert re.search(r"^\[0\] ", plain, re.MULTILINE)
        assert re.search(r"^\[1\] ", plain, re.MULTILINE)
        for title in ("Prompt, from its second token on", "Completion 0", "Completion 1"):
            assert title in plain
        (output,) = json.loads(as_json)["outputs"]
        assert output["token_ids"] == [70] * 4
        ranks = [sorted(each["rank"] for each in entry.values()) for entry in output["logprobs"]]
        assert [each[:2] for each in ranks] == [[1, 2]] * 4  # then that of the token itself
        assert output["finish_reason"] == "length"


async def test_generate_streams_text_and_ctrl_c_aborts_the_request(serve: ServerFactory) -> None:
    async with serve() as server:
        server.brake.slow_down()
        arguments = ("--target", server.target, "--max-tokens", "400", "--ignore-eos", "--seed", "1")
        process = await run_quire("generate", "The quick", *arguments)
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.read(1), PROGRAM_TIMEOUT_S)
        server.brake.hold()
        assert server.replica.num_running == 1
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(process.communicate(), PROGRAM_TIMEOUT_S)
        assert (process.returncode, errors) == (INTERRUPTED, b"")
        async with asyncio.timeout(60):
            while server.replica.num_running:
                await asyncio.sleep(0.01)


def test_command_line_imports_no_heavy_module(tmp_path: Path) -> None:
    program = (
        "import sys, quire.cluster.cli\n"
        "heavy = {'torch', 'ray', 'transformers', 'grpc', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PROGRAM_TIMEOUT_S)
