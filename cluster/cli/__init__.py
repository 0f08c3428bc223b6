"""The command `quire`. Errors are one line on stderr; exit status 0, 1 (failed), 2 (wrong use), 130 (Ctrl-C).

Each command has a file. Heavy modules are imported by the functions that need them, so that `quire --help` is fast.
"""

import sys
from collections.abc import Mapping
from typing import Annotated

import typer

from ...proto.errors import ConfigError, InvalidRequest, ModelLoadError, QuireError
from .batch.command import run_batch
from .bench.command import bench
from .calibrate import calibrate
from .chat import chat
from .compile import compile_kernels
from .deploy import delete, deploy, drain
from .doctor.command import doctor as doctor_command
from .engine import engine
from .exit_status import FAILED, INTERRUPTED, WRONG_USE
from .fit import fit
from .generate import generate
from .help import Command, Group
from .models import download, models
from .operate import chaos, events, flush_cache, scale, undrain
from .plan import plan
from .provision.command import down, up
from .replay import replay
from .serve.command import fleet
from .serve.command import serve as serve_command
from .simulate import simulate
from .status import health, status
from .token import token
from .top import top

# Some versions of typer bundle click. BadParameter is public in all of them; its base is click's UsageError.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

app = typer.Typer(name="quire", cls=Group, pretty_exceptions_enable=False)
for _command in (
    serve_command,
    fleet,
    download,
    models,
    fit,
    simulate,
    plan,
    replay,
    calibrate,
    doctor_command,
    generate,
    chat,
    run_batch,
    status,
    top,
    health,
    token,
    up,
    down,
    deploy,
    drain,
    undrain,
    scale,
    flush_cache,
    events,
    delete,
    chaos,
):
    app.command(cls=Command)(_command)
app.command("compile", cls=Command)(compile_kernels)
app.add_typer(engine, name="engine")
app.add_typer(bench, name="bench")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from ... import __version__

        print(f"quire {__version__}")
        raise typer.Exit


@app.callback(cls=Group, invoke_without_command=True)
def _quire(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Serve large language models with tensor parallelism, and send requests to the servers."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command line; print each expected error as one line per problem and exit with its status."""
    try:
        exit_status = app(prog_name="quire", standalone_mode=False)
    except _UsageError as error:
        _end(_usage_problem(error), WRONG_USE)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except ModelLoadError as error:
        _end(str(error), FAILED)
    except (InvalidRequest, ConfigError) as error:
        _end("\n".join(getattr(error, "problems", ())) or str(error), WRONG_USE)
    except QuireError as error:
        _end(str(error), FAILED)
    except BrokenPipeError:  # the reader of the output, for example `head`, has closed it
        sys.stderr.close()
        sys.exit(FAILED)
    sys.exit(exit_status if isinstance(exit_status, int) else 0)


def _usage_problem(error: typer.BadParameter) -> str:
    command = getattr(getattr(error, "ctx", None), "command_path", "quire")
    hint = other_name_hint(str(getattr(error, "option_name", "")))
    return f"{error.format_message() if not hint else error.message}{hint} (see {command} --help)"


def _end(problems: str, exit_status: int) -> None:
    for problem in problems.splitlines():
        print(f"quire: {problem}", file=sys.stderr)
    sys.exit(exit_status)


# Option of SGLang, llama.cpp, TGI or a usual abbreviation |-> quire's.
_OTHER_NAMES: Mapping[str, str] = {
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "--num-shard": "--tensor-parallel-size",
    "--model-path": "MODEL, the first argument",
    "--model-id": "MODEL, the first argument",
    "--model": "MODEL, the first argument",
    "-m": "MODEL, the first argument",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-c": "--max-model-len",
    "--max-total-tokens": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--cuda-memory-fraction": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-np": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "--max-batch-prefill-tokens": "--max-num-batched-tokens",
    "--disable-cuda-graph": "--no-cuda-graphs",
    "--disable-radix-cache": "--no-prefix-caching",
    "--schedule-policy": "--policy",
    "--quantize": "--quantization",
    "--random-seed": "--seed",
    "--max-new-tokens": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--temp": "--temperature",
    "--url": "--target",
    "--address": "--target, or for `quire serve` the address of a Ray cluster",
}


def other_name_hint(option: str) -> str:
    """Return the words that name quire's option of another engine's name; empty if there is none."""
    name = _OTHER_NAMES.get(option)
    return "" if name is None else f"; did you mean {name}?"
