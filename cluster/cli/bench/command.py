"""`quire bench`."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ....proto.errors import ConfigError
from ....proto.options.option import select_options
from ...config.engine_options import EngineOptions, ModelReference
from ..connection import CLIENT_CERT, TlsCa, TokenFile
from ..help import Command, Group
from ..option_groups import with_options
from ..simulate import JsonFile

if TYPE_CHECKING:
    from ...client.client import AsyncClient
    from ...simulation.run import Targets
    from .load import LoadGenerator, Outcome
    from .measures import Measures

# A sweep doubles the rate until the server is saturated, at most so often, and then halves the interval so often.
_MOST_DOUBLINGS, _NUM_HALVINGS = 12, 3

bench = typer.Typer(cls=Group, help="Measure a server or an engine under load.")

InputTokens = Annotated[int, typer.Option(metavar="TOKENS", help="Mean length of new prompts.", min=1)]
OutputTokens = Annotated[int, typer.Option(metavar="TOKENS", help="Mean length of outputs.", min=1)]
Sigma = Annotated[
    float,
    typer.Option(
        help="Lengths are lognormal with this deviation of the logarithm; 0 for equal ones.", min=0.0
    ),
]
Requests = Annotated[int, typer.Option(metavar="REQUESTS", help="Requests, or sessions of --turns.", min=1)]
Seed = Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")]
HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with charts to FILE.")
]
TraceFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Send the requests of a trace when they are due; see `quire simulate`."
    ),
]


@dataclass(frozen=True)
class _Load:
    """The requests that are sent, apart from their rate."""

    requests: int
    warmup: int
    input_tokens: int
    output_tokens: int
    sigma: float
    burstiness: float
    turns: int
    think_s: float
    shared_tokens: int
    seed: int


@bench.command(cls=Command)
def serve(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="HOST:PORT of quire's gRPC interface, or the URL of a server with OpenAI's API, for aiperf.",
        ),
    ],
    rate: Annotated[
        float | None, typer.Option(metavar="PER-SECOND", help="Open loop: sessions per second.", min=1e-6)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="SESSIONS", help="Closed loop: sessions at once.", min=1)
    ] = None,
    trace: TraceFileOption = None,
    speed: Annotated[
        float,
        typer.Option(metavar="FACTOR", help="A trace's requests arrive this many times as fast.", min=1e-6),
    ] = 1.0,
    sweep: Annotated[
        bool,
        typer.Option("--sweep", help="Double the rate until the server is saturated, and narrow it down."),
    ] = False,
    burstiness: Annotated[
        float,
        typer.Option(help="Deviation of the gaps between arrivals over their mean; 1 for Poisson.", min=0.01),
    ] = 1.0,
    requests: Requests = 200,
    warmup: Annotated[int, typer.Option(metavar="REQUESTS", help="Sent before, and not counted.", min=0)] = 8,
    input_tokens: InputTokens = 512,
    output_tokens: OutputTokens = 128,
    sigma: Sigma = 0.0,
    turns: Annotated[
        int, typer.Option(help="Requests of a session; each prompt repeats what was said.", min=1)
    ] = 1,
    think_s: Annotated[float, typer.Option(help="Seconds from an answer to the next turn.", min=0.0)] = 0.0,
    shared_tokens: Annotated[
        int, typer.Option(metavar="TOKENS", help="Length of a beginning that all prompts share.", min=0)
    ] = 0,
    ttft_target: Annotated[float | None, typer.Option(metavar="SECONDS", help="Of good requests.")] = None,
    itl_target: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Mean time between the tokens of good requests.")
    ] = None,
    e2e_target: Annotated[float | None, typer.Option(metavar="SECONDS", help="Of good requests.")] = None,
    model: Annotated[str, typer.Option(help="Not needed if the server serves one.")] = "",
    tokenizer: Annotated[
        str,
        typer.Option(
            metavar="DIR|ORG/NAME", help="With which aiperf makes prompts; without, that of --model."
        ),
    ] = "",
    seed: Seed = 0,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
) -> None:
    """Send requests to a server, and report latencies, throughput and goodput.

    Latencies count from the time at which a request was to be sent, so a stalled server shows in all requests that
    it kept waiting.

    Example: `quire bench serve 127.0.0.1:50051 --rate 4 --requests 400 --html report.html`
    """
    from rich.console import Console

    from ...simulation.run import Targets
    from .report import print_report, write_json, write_page

    if sum(each is not None for each in (rate, concurrency, trace)) > 1:
        raise typer.BadParameter("--rate, --concurrency and --trace exclude each other")
    if sweep and (concurrency is not None or trace is not None):
        raise typer.BadParameter("--sweep varies --rate")
    load = _Load(
        requests, warmup, input_tokens, output_tokens, sigma, burstiness, turns, think_s, shared_tokens, seed
    )
    loads: list[Measures] = []
    targets = Targets(ttft_target, itl_target, e2e_target)
    if target.startswith(("http://", "https://")):
        # A token on aiperf's command line could be read by every user of the machine.
        unset = {"trace": trace, "tls-ca": tls_ca, "token-file": token_file}
        given = {"sweep": sweep} | {name: value is not None for name, value in unset.items()}
        _refuse_for_aiperf(given, load)
        points = [_measure_http(target, load, rate, concurrency, targets, model, tokenizer)]
    else:
        run = _GrpcRun(target, load, targets, model, token_file, tls_ca)
        if trace is not None:
            loads = asyncio.run(run.trace(trace, speed))
        elif sweep:
            loads = asyncio.run(run.sweep(rate or 1.0))
        else:
            loads = asyncio.run(run.single(rate, concurrency or 16))
        points = [each.figures() for each in loads]
    record = {"target": target, "date": time.strftime("%Y-%m-%d"), "load": vars(load), "points": points}
    print_report(Console(), points)
    if json_file is not None:
        write_json(json_file, record)
    if html_file is not None:
        write_page(html_file, f"Load on {target}", record, loads)


def _refuse_for_aiperf(given: Mapping[str, bool], load: _Load) -> None:
    """Raise BadParameter for options that quire's own load generator alone has."""
    only = vars(_Load(0, 0, 0, 0, sigma=0.0, burstiness=1.0, turns=1, think_s=0.0, shared_tokens=0, seed=0))
    names = [name for name, is_given in given.items() if is_given]
    for name in ("sigma", "burstiness", "turns", "think_s", "shared_tokens"):
        if getattr(load, name) != only[name]:
            names.append(name.replace("_", "-"))
    if names:
        raise typer.BadParameter(
            f"--{names[0]} is not passed to aiperf, which measures servers of OpenAI's API: leave it out, or give "
            "HOST:PORT of quire's gRPC interface"
        )


def _measure_http(
    url: str,
    load: _Load,
    rate: float | None,
    concurrency: int | None,
    targets: "Targets",
    model: str,
    tokenizer: str,
) -> dict[str, Any]:
    from .targets import AiperfLoad, run_aiperf

    if not model:
        raise typer.BadParameter("--model is needed for a server of OpenAI's API")
    reference = ModelReference(tokenizer or model)
    at_once = None if rate is not None else concurrency or 16
    aiperf = AiperfLoad(
        model=model,
        tokenizer=reference.hub_id or str(reference.model_path),
        requests=load.requests,
        rate=rate,
        concurrency=at_once,
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
        warmup=load.warmup,
        seed=load.seed,
        targets=targets,
    )
    return run_aiperf(url, f"{rate:g}/s" if rate is not None else f"{at_once} at once", aiperf)


@contextmanager
def _progress(what: str, total: int | None) -> Iterator[Callable[["Outcome | None"], None]]:
    """Show how many requests, or runs, have ended while the block runs; yield the function that is told of each."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda outcome: progress.advance(task)


class _GrpcRun:
    """Loads on a quire server."""

    def __init__(
        self,
        target: str,
        load: _Load,
        targets: "Targets",
        model: str,
        token_file: Path | None,
        tls_ca: Path | None,
    ) -> None:
        self._target, self._load, self._targets, self._model = target, load, targets, model
        self._token_file, self._tls_ca = token_file, tls_ca

    async def single(self, rate: float | None, concurrency: int) -> "list[Measures]":
        """Run one load, open if there is a rate."""
        async with self._connect() as client:
            await self._warm_up(client)
            return [await self._measure(client, rate, concurrency)]

    async def sweep(self, rate: float) -> "list[Measures]":
        """Run loads of rising rates; return them by rate."""
        from .measures import is_saturated

        async with self._connect() as client:
            await self._warm_up(client)
            found: dict[float, Measures] = {}
            low = 0.0
            for _ in range(_MOST_DOUBLINGS):
                found[rate] = await self._measure(client, rate, 0)
                if is_saturated(found[rate]):
                    break
                low, rate = rate, 2 * rate
            high = rate
            for _ in range(_NUM_HALVINGS if low else 0):
                rate = (low + high) / 2
                found[rate] = await self._measure(client, rate, 0)
                low, high = (low, rate) if is_saturated(found[rate]) else (rate, high)
            return [found[rate] for rate in sorted(found)]

    async def trace(self, path: Path, speed: float) -> "list[Measures]":
        """Send the requests of a trace when they are due."""
        from ...simulation.traces import TraceFile
        from .load import sessions_of_trace
        from .measures import Measures

        async with self._connect() as client:
            await self._warm_up(client)
            requests = TraceFile(path, self._load.requests, speed)
            info = await self._model_info(client)
            fitting = (each for each in requests if each.num_tokens <= info.max_model_len)
            with _progress(path.name, self._load.requests) as on_end:
                generator = self._generator(client, on_end)
                outcomes = await generator.open_loop(sessions_of_trace(fitting, info.vocab_size))
            return [Measures(outcomes, self._targets, f"{path.name} x {speed:g}")]

    def _connect(self) -> "AsyncClient":
        from ...client.client import AsyncClient
        from ...client.wire.tokens import load_client_token

        token = None if self._token_file is None else load_client_token(self._token_file)
        cert = os.environ.get(CLIENT_CERT)
        return AsyncClient(self._target, token=token, tls_ca=self._tls_ca, tls_cert=cert)

    async def _model_info(self, client: "AsyncClient") -> Any:
        served = await client.models()
        found = [each for each in served if self._model in ("", each.name)]
        if len(found) != 1:
            names = ", ".join(each.name for each in served)
            raise ConfigError(
                f"model is {self._model!r}, must be one of those that the server serves: {names}"
            )
        return found[0]

    def _generator(
        self, client: "AsyncClient", on_end: "Callable[[Outcome], None]", max_prompt_tokens: int = 1 << 30
    ) -> "LoadGenerator":
        from .load import LoadGenerator
        from .targets import GrpcTarget

        return LoadGenerator(GrpcTarget(client, self._model), on_end, max_prompt_tokens)

    async def _warm_up(self, client: "AsyncClient") -> None:
        if self._load.warmup:
            with _progress("warming up", self._load.warmup) as on_end:
                await self._run(client, on_end, self._load.warmup, None, 4, self._load.seed + 1_000_003)

    async def _measure(self, client: "AsyncClient", rate: float | None, concurrency: int) -> "Measures":
        from .measures import Measures

        label = f"{concurrency} at once" if rate is None else f"{rate:g}/s"
        with _progress(label, self._load.requests * self._load.turns) as on_end:
            # Another rate has other prompts: none of them is cached.
            seed = self._load.seed if rate is None else self._load.seed + round(1000 * rate)
            outcomes = await self._run(client, on_end, self._load.requests, rate, concurrency, seed)
        return Measures(outcomes, self._targets, label)

    async def _run(
        self,
        client: "AsyncClient",
        on_end: "Callable[[Outcome], None]",
        requests: int,
        rate: float | None,
        concurrency: int,
        seed: int,
    ) -> "list[Outcome]":
        import numpy as np

        from .load import Lengths, draw_sessions

        load, info = self._load, await self._model_info(client)
        sessions = draw_sessions(
            np.random.default_rng(seed),
            Lengths(load.input_tokens, load.output_tokens, load.sigma),
            info.vocab_size,
            rate=rate,
            burstiness=load.burstiness,
            num_turns=load.turns,
            think_s=load.think_s,
            shared_tokens=load.shared_tokens,
        )
        generator = self._generator(client, on_end, info.max_model_len - load.output_tokens)
        if rate is None:
            return await generator.closed_loop(islice(sessions, requests), concurrency)
        return await generator.open_loop(islice(sessions, requests))


@bench.command(cls=Command)
@with_options(engine=(EngineOptions,))
def offline(
    model: Annotated[
        str, typer.Argument(help="A model directory, ORG/NAME on the Hugging Face Hub, or `demo`.")
    ],
    engine: dict[str, Any],
    requests: Requests = 64,
    input_tokens: InputTokens = 512,
    output_tokens: OutputTokens = 128,
    sigma: Sigma = 0.0,
    repeats: Annotated[
        int, typer.Option(help="Runs of all requests, after one that is not counted.", min=1)
    ] = 3,
    bench_seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Run requests through an engine in this process, all at once, and report its throughput.

    Example: `quire bench offline demo --requests 64 --input-tokens 128 --output-tokens 64`
    """
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from ....proto.sampling import SamplingParams
    from ...offline.llm import LLM
    from .load import Lengths, random_prompt
    from .report import write_json

    lengths, rng = Lengths(input_tokens, output_tokens, sigma), np.random.default_rng(bench_seed)
    llm = LLM(model, **select_options(EngineOptions, engine))
    rates: list[tuple[float, float]] = []
    with _progress(model, repeats + 1) as on_end:
        for _ in range(repeats + 1):
            drawn = [lengths.draw(rng) for _ in range(requests)]
            prompts = [random_prompt(rng, num_prompt, llm.config.model.vocab_size) for num_prompt, _ in drawn]
            params = [
                SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True, detokenize=False)
                for _, num_output in drawn
            ]
            began_at = time.perf_counter()
            outputs = llm.generate(prompts, params)
            wall_s = time.perf_counter() - began_at
            num_output = sum(len(each.outputs[0].token_ids) for each in outputs)
            rates.append((len(outputs) / wall_s, num_output / wall_s))
            on_end(None)
    llm.close()
    counted = np.array(rates[1:])
    figures = {
        name: {"median": float(np.median(column)), "least": float(column.min()), "most": float(column.max())}
        for name, column in zip(("requests_per_s", "output_tokens_per_s"), counted.T, strict=True)
    }
    table = Table("figure", "median", "least", "most")
    for name, row in figures.items():
        table.add_row(name.replace("_", " "), *(f"{row[key]:,.2f}" for key in ("median", "least", "most")))
    Console().print(table)
    if json_file is not None:
        record = {"model": model, "date": time.strftime("%Y-%m-%d"), "repeats": repeats, "figures": figures}
        write_json(json_file, record)
