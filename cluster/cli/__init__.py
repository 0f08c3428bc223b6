"""The command `quire`. Errors are one line on stderr; exit status 0, 1 (failed), 2 (wrong use), 130 (Ctrl-C).

Each command has a file. Heavy modules are imported by the functions that need them, so that `quire --help` is fast.
"""

import sys
from typing import Annotated

import typer

from ...proto.errors import ConfigError, InvalidRequest, ModelLoadError, QuireError
from .batch.command import run_batch
from .chaos import chaos
from .chat import chat
from .deploy import delete, deploy, drain
from .doctor.command import doctor as doctor_command
from .download import download
from .engine import engine
from .exit_status import FAILED, INTERRUPTED, WRONG_USE
from .fit import fit
from .generate import generate
from .health import health
from .help import Command, Group
from .models import models
from .operate import events, flush_cache, scale, undrain
from .provision.command import down, up
from .serve.command import serve as serve_command
from .status import status
from .token import token
from .top import top
from .wrong_options import other_name_hint

# Some versions of typer bundle click. BadParameter is public in all of them; its base is click's UsageError.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

app = typer.Typer(name="quire", cls=Group, pretty_exceptions_enable=False)
for _command in (
    serve_command,
    download,
    models,
    fit,
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
app.add_typer(engine, name="engine")


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
