"""The command `quire`. Errors are one line on stderr; exit status 0, 1 (failed), 2 (wrong use), 130 (Ctrl-C).

Heavy modules are imported by the commands that need them, so that `quire --help` is quick.
"""

from __future__ import annotations

import re
import sys
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..proto.errors import ConfigError, InvalidRequest, QuireError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..proto.admin_pb2 import Replica
    from .client import Client

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130

# Some versions of typer bring their own click, and only this name of its errors is public in all.
_UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="quire",
    help="Serve large language models with tensor parallelism, and talk to the servers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Target = Annotated[str, typer.Option(help="The server, HOST:PORT.")]
TokenFile = Annotated[Path | None, typer.Option(help="File whose first token is sent with each call.")]
TlsCa = Annotated[
    Path | None, typer.Option(help="PEM file of the authority that signed the server's certificate.")
]


@app.callback()
def _quire() -> None:
    """Serve large language models with tensor parallelism, and talk to the servers."""


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="A Hugging Face model directory, or `demo` for the bundled model.")
    ],
    tensor_parallel_size: Annotated[int, typer.Option(help="Ranks that share each layer.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto.")] = "auto",
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0 lets the system choose.")
    ] = "127.0.0.1:50051",
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and answer together.")
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 16,
    kv_cache_memory: Annotated[
        str | None, typer.Option(help="KV memory a rank, for example 512MiB or 8GiB.")
    ] = None,
    num_kv_blocks: Annotated[int | None, typer.Option(help="KV blocks, instead of KV memory.")] = None,
    num_host_kv_blocks: Annotated[
        int, typer.Option(help="KV blocks of host memory a rank, for what is preempted or evicted.")
    ] = 0,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Tokens a step, prompts and answers together.")
    ] = 2048,
    max_queue_len: Annotated[
        int, typer.Option(help="Waiting requests beyond which new ones are refused.")
    ] = 4096,
    policy: Annotated[
        str, typer.Option(help="Who goes first: fcfs, priority, fair, shortest-prefill or longest-prefix.")
    ] = "fcfs",
    tenant_weight: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SHARE", help="A tenant's share of the policy fair. May be repeated."),
    ] = None,
    step_timeout_s: Annotated[float, typer.Option(help="A step that takes longer has a hung rank.")] = 60.0,
    seed: Annotated[int, typer.Option(help="Where seeds of requests without one are drawn from.")] = 0,
    prefix_caching: Annotated[
        bool, typer.Option(help="Keep KV of prompts for later ones that begin alike.")
    ] = True,
    batch_invariant: Annotated[
        bool, typer.Option(help="GPU attention that no other request in the batch changes by a bit.")
    ] = False,
    audit: Annotated[bool, typer.Option(help="Recount every KV block after each step.")] = False,
    insecure: Annotated[
        bool, typer.Option(help="Let other machines connect without TLS and a token.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file of the server's certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of its key.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="Tokens that callers may use, one a line: TOKEN or TENANT:TOKEN.")
    ] = None,
) -> None:
    """Serve a model until stopped.

    Example: `quire serve demo --tensor-parallel-size 2 --listen 127.0.0.1:0`
    """
    from .serve import ServeOptions
    from .serve import serve as run_server

    options = ServeOptions(
        model=model,
        served_model_name=served_model_name,
        tensor_parallel_size=tensor_parallel_size,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_cache_memory=None if kv_cache_memory is None else parse_num_bytes(kv_cache_memory),
        num_kv_blocks=num_kv_blocks,
        num_host_kv_blocks=num_host_kv_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_queue_len=max_queue_len,
        policy=policy,
        tenant_weights=tuple(map(parse_tenant_weight, tenant_weight or ())),
        step_timeout_s=step_timeout_s,
        seed=seed,
        prefix_caching=prefix_caching,
        batch_invariant=batch_invariant,
        audit=audit,
        listen=listen,
        insecure=insecure,
        tls_cert=tls_cert,
        tls_key=tls_key,
        token_file=token_file,
    )
    raise typer.Exit(run_server(options))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    target: Target = "127.0.0.1:50051",
    model: Annotated[str, typer.Option(help="Needed only where several are served.")] = "",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    min_tokens: Annotated[int, typer.Option(help="No end before this many tokens.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens that sum to this.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this share of the likeliest.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string. May be repeated.")] = None,
    timeout_s: Annotated[float | None, typer.Option(help="Give up after this many seconds.")] = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Stream a completion to the terminal. Ctrl-C ends the request.

    Example: `quire generate "It was a dark evening, and" --target 127.0.0.1:50051 --max-tokens 64`
    """
    from ..proto.sampling import SamplingParams
    from .events import Delta

    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=tuple(stop or ()),
    )
    with (
        _connect(target, token_file, tls_ca) as client,
        closing(client.generate_stream(prompt, params, model=model, timeout_s=timeout_s)) as events,
    ):
        for event in events:
            if isinstance(event, Delta):
                sys.stdout.write(event.text)
                sys.stdout.flush()
    sys.stdout.write("\n")


@app.command()
def status(target: Target = "127.0.0.1:50051", token_file: TokenFile = None, tls_ca: TlsCa = None) -> None:
    """Show replicas, ranks, KV use and queue. Exit status 1 when a replica is not ready.

    Example: `quire status --target 127.0.0.1:50051`
    """
    from rich.console import Console

    with _connect(target, token_file, tls_ca) as client:
        replicas = client.status()
    console = Console()
    for replica in replicas:
        for part in _describe(replica):
            console.print(part)
    if not all(replica.ready for replica in replicas):
        raise typer.Exit(FAILED)


def main() -> None:
    """The entry point: every error that quire or the user makes ends in one line."""
    try:
        status = app(standalone_mode=False)
    except _UsageError as error:
        _end(f"{error.format_message()} (see quire --help)", WRONG_USE)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    except InvalidRequest as error:
        _end(str(error), WRONG_USE)
    except QuireError as error:
        _end(str(error), FAILED)
    except BrokenPipeError:  # the reader of our output, `head` for example, has what it wanted
        sys.stderr.close()
        sys.exit(FAILED)
    sys.exit(status if isinstance(status, int) else 0)


def parse_num_bytes(text: str) -> int:
    """``512MiB``, ``8GB`` or plain bytes. Raises ConfigError on anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"amount of memory is {text!r}, must be like 512MiB, 8GB or 1000000")
    number, prefix, binary = match.groups()
    exponent = " KMGT".index(prefix.upper()) if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** exponent)


def parse_tenant_weight(text: str) -> tuple[str, float]:
    """``NAME=SHARE``. Raises ConfigError on anything else."""
    name, _, share = text.rpartition("=")
    with suppress(ValueError):
        if name:
            return name, float(share)
    raise ConfigError(f"tenant weight is {text!r}, must be NAME=SHARE, for example gold=3")


def _connect(target: str, token_file: Path | None, tls_ca: Path | None) -> Client:
    from .client import Client
    from .security import load_tokens

    token = None if token_file is None else load_tokens(token_file)[0].secret.decode()
    return Client(target, token=token, tls_ca=tls_ca)


def _describe(replica: Replica) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    state = Text("ready", "green") if replica.ready else Text(f"not ready: {replica.problem}", "red")
    title = Text.assemble(Text(replica.replica_id, "bold"), f"  {replica.model}  ", state)
    if not replica.num_steps and not replica.ranks:  # it did not answer
        return [title]
    ranks = Table("rank", "pid", "node", "device", "stage", title="Ranks", title_justify="left")
    for rank in replica.ranks:
        ranks.add_row(str(rank.rank), str(rank.pid), rank.node, rank.device, rank.stage)
    figures = Table.grid(padding=(0, 2))
    for name, value in _figures(replica):
        figures.add_row(Text(name, "dim"), value)
    return [title, ranks, figures]


def _figures(replica: Replica) -> list[tuple[str, str]]:
    kv, queue = replica.kv, replica.queue
    hit_rate = kv.prefix_hit_tokens / kv.prefix_query_tokens if kv.prefix_query_tokens else 0.0
    return [
        (
            "KV blocks",
            f"{kv.num_used_blocks} of {kv.num_blocks} used ({kv.num_used_tokens} tokens, {kv.block_size} a block), "
            f"{kv.num_cached_blocks} cached, {kv.peak_used_blocks} at peak",
        ),
        (
            "host blocks",
            f"{kv.num_used_host_blocks} of {kv.num_host_blocks} used, {kv.num_cached_host_blocks} cached, "
            f"{kv.num_swapped_blocks} blocks swapped so far",
        ),
        ("KV waste", f"{kv.mean_waste:.1%} of allocated slots, mean over all steps"),
        (
            "prefix cache",
            f"{kv.prefix_hit_tokens} of {kv.prefix_query_tokens} prompt tokens found ({hit_rate:.1%})",
        ),
        (
            "queue",
            f"{queue.num_waiting} waiting, {queue.num_running} running, {queue.num_finished} finished, "
            f"{queue.num_preemptions} preemptions",
        ),
        ("steps", f"{replica.num_steps} in {replica.uptime_s:.0f} s"),
    ]


def _end(message: str, exit_status: int) -> None:
    print(f"quire: {message}", file=sys.stderr)
    sys.exit(exit_status)
