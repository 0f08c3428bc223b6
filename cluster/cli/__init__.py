"""The command `quire`. Errors are one line on stderr; exit status 0, 1 (failed), 2 (wrong use), 130 (Ctrl-C).

Each command has a file. Heavy modules are imported by the functions that need them, so that `quire --help` is fast.
"""

from __future__ import annotations

import sys

import typer

from ...proto.errors import InvalidRequest, QuireError
from .chat import chat
from .deploy import delete, deploy, drain
from .download import download
from .exit_status import FAILED, INTERRUPTED, WRONG_USE
from .fit import fit
from .generate import generate
from .health import health
from .models import models
from .operate import events, flush_cache, scale, undrain
from .serve import serve
from .status import status
from .token import token
from .top import top
from .up import down, up

# Some versions of typer bundle click. BadParameter is public in all of them; its base is click's UsageError.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="quire",
    help="Serve large language models with tensor parallelism, and send requests to the servers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for _command in (
    serve,
    download,
    models,
    fit,
    generate,
    chat,
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
):
    app.command()(_command)


@app.callback()
def _quire() -> None:
    """Serve large language models with tensor parallelism, and send requests to the servers."""


def main() -> None:
    """Run the command line; print each expected error as one line and exit with its status."""
    try:
        exit_status = app(standalone_mode=False)
    except _UsageError as error:
        _end(f"{error.format_message()} (see quire --help)", WRONG_USE)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except InvalidRequest as error:
        _end(str(error), WRONG_USE)
    except QuireError as error:
        _end(str(error), FAILED)
    except BrokenPipeError:  # the reader of the output, for example `head`, has closed it
        sys.stderr.close()
        sys.exit(FAILED)
    sys.exit(exit_status if isinstance(exit_status, int) else 0)


def _end(message: str, exit_status: int) -> None:
    print(f"quire: {message}", file=sys.stderr)
    sys.exit(exit_status)
