"""`quire token`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..client.wire.tokens import Role, new_token


def token(
    tenant: Annotated[
        str | None,
        typer.Argument(help="Tenant of the calls that carry the token. Default: each call names its tenant."),
    ] = None,
    role: Annotated[list[Role], typer.Option(help="Permitted calls; may be repeated.")] = [Role.USER],  # noqa: B006
    append: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append the line to this token file, and print the token alone."),
    ] = None,
) -> None:
    """Make a bearer token: print it, and its line for the server's token file, which holds only a hash of it.

    The token itself is kept nowhere: give it to its holder now. A running server reads the file again by itself.

    Example: `quire token gold --append tokens > gold.token`
    """
    text, made = new_token(tenant, frozenset(role))
    print(text)
    if append is None:
        print(made.line())
        return
    with open(append, "a", opener=_private) as file:
        file.write(made.line() + "\n")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, mode=0o600)
