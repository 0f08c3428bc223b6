"""`quire engine`: pauses, sleep and other weights of a running server's model."""

from __future__ import annotations

from typing import Annotated

import typer

from .connection import DEFAULT_TARGET, Target, TlsCa, TokenFile, connect
from .help import Command, Group

Model = Annotated[
    str, typer.Option("--model", help="Name that the model is served under; not needed for a single model.")
]
Mode = Annotated[
    str,
    typer.Option("--mode", help="Treatment of running requests: keep, wait or abort.", metavar="MODE"),
]

engine = typer.Typer(
    cls=Group, help="Pause a running server's model, free its memory, or change its weights."
)


@engine.command(cls=Command)
def pause(
    model: Model = "",
    mode: Mode = "keep",
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Hold the steps of a model's replicas; new requests wait.

    Example: `quire engine pause --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        client.pause(mode=mode, model=model)
    print("paused")


@engine.command(cls=Command)
def resume(
    model: Model = "",
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """End a pause.

    Example: `quire engine resume --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        client.resume(model=model)
    print("resumed")


@engine.command(cls=Command)
def sleep(
    model: Model = "",
    level: Annotated[
        int, typer.Option(help="1: waking reads the same weights again. 2: they are discarded.")
    ] = 1,
    mode: Mode = "keep",
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Free the memory of weights and KV cache; requests are refused until `quire engine wake-up`.

    Example: `quire engine sleep --level 1 --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        client.sleep(level, mode=mode, model=model)
    print("asleep")


@engine.command(cls=Command)
def wake_up(
    model: Model = "",
    tags: Annotated[
        list[str] | None,
        typer.Option(help="What wakes, weights or kv_cache; several may be given. All by default."),
    ] = None,
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """End a sleep. Requests are refused until weights and KV cache are awake.

    Example: `quire engine wake-up --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        client.wake_up(tags or (), model=model)
    print(f"awake: {', '.join(tags)}" if tags else "awake")


@engine.command(cls=Command)
def update_weights(
    path: Annotated[str, typer.Argument(help="Directory of safetensors files, on every node of the ranks.")],
    version: Annotated[
        str, typer.Option("--version", help="A new name of the weights, which answers report.")
    ],
    model: Model = "",
    mode: Mode = "keep",
    target: Target = DEFAULT_TARGET,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Replace the weights of a model's replicas by those of other files.

    Example: `quire engine update-weights /weights/step-1 --version step-1 --target 127.0.0.1:50051`
    """
    with connect(target, token_file, tls_ca) as client:
        client.update_weights(path, version=version, mode=mode, model=model)
    print(f"weights {version}")
