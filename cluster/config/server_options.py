"""ServerOptions: the options of a gateway's server."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...proto.options.option import option, validate_options
from ...proto.options.values import bearer_token, not_negative_finite, one_of, positive_finite, web_origins

_option, _log_option = partial(option, group="Server"), partial(option, group="Logs and traces")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """An operator's choices for a gateway: its addresses, and who may call it."""

    listen: str = _option(
        "127.0.0.1:50051",
        help="Address of the gRPC server; with port 0 the system chooses one.",
        metavar="HOST:PORT",
    )
    http: str = _option(
        "127.0.0.1:8000",
        help="Address of the HTTP server, which speaks the protocols of OpenAI and Anthropic; with port 0 the system "
        "chooses one.",
        metavar="HOST:PORT",
    )
    no_http: bool = _option(False, help="Serve gRPC alone.")
    insecure: bool = _option(
        False, help="Allow an address that other machines can reach without TLS and tokens."
    )
    tls_cert: Path | None = _option(
        None,
        help="PEM file of the server's certificate chain. It is read again when it changes.",
        metavar="FILE",
    )
    tls_key: Path | None = _option(None, help="PEM file of its private key.", metavar="FILE")
    tls_client_ca: Path | None = _option(
        None,
        help="PEM file of the authorities one of which must have signed a client's certificate.",
        metavar="FILE",
    )
    api_key: str | None = _option(
        None,
        help="A bearer token of users, in addition to those of --token-file. Other users of the machine can read a "
        "command line, so prefer the variable, which may also be VLLM_API_KEY.",
        metavar="TOKEN",
        check=bearer_token,
    )
    token_file: Path | None = _option(
        None,
        help="File of the bearer tokens that callers must have one of, as lines of quire token. It is read again "
        "when it changes.",
        metavar="FILE",
    )
    tenants_file: Path | None = _option(
        None,
        help="TOML file of the tenants' limits and prefix pools. It is read again when it changes.",
        metavar="FILE",
    )

    allowed_origins: str | None = _option(
        None,
        help="Origins of web pages that may call the HTTP server (CORS), separated by commas; * for all. None by "
        "default.",
        metavar="ORIGINS",
        check=web_origins,
    )

    batch_dir: Path | None = _option(
        None,
        help="Directory of uploaded files and batches, of which /v1/files and /v1/batches keep at most 1 GiB per "
        "tenant. One gateway uses it at a time. Without it there are no batches.",
        metavar="DIR",
    )

    enable_chaos: bool = _option(False, help="Let operators cause failures with quire chaos. For game days.")

    allow_runtime_lora_updating: bool = _option(
        False,
        help="Serve /v1/load_lora_adapter and /v1/unload_lora_adapter, whose callers name files that ranks open.",
    )

    server_dev_mode: bool = _option(
        False,
        help="Serve /sleep, /wake_up, /pause, /resume, /update_weights, /reset_prefix_cache and /server_info, whose "
        "callers stop the engine, name files that ranks open, and see the configuration. For trainers.",
    )

    enable_auto_tool_choice: bool = _option(
        False, help="Accepted for the command lines of vLLM; tool calls need no switch."
    )

    max_connection_age_s: float | None = _option(
        None,
        help="Age at which gRPC connections are asked to end, so that a load balancer can spread their clients. "
        "Unlimited by default.",
        unit="seconds",
        check=positive_finite,
    )
    max_connection_age_grace_s: float = _option(
        60.0,
        help="Time that calls may go on after their connection has reached that age.",
        unit="seconds",
        check=not_negative_finite,
    )
    resume_window_s: float = _option(
        10.0,
        help="Time that a resumable request runs on after its connection broke.",
        unit="seconds",
        check=not_negative_finite,
    )
    retention_s: float = _option(
        60.0,
        help="Time that the output of a finished request with a request_id is kept, for calls that are repeated.",
        unit="seconds",
        check=not_negative_finite,
    )

    log_level: str = _log_option(
        "info",
        help="Least severe lines of quire in the log.",
        check=one_of("debug", "info", "warning", "error"),
    )
    log_format: str = _log_option(
        "text",
        help="Form of the log: readable lines, or one JSON object per line.",
        check=one_of("text", "json"),
    )
    log_requests: bool = _log_option(
        False, help="Log a line when a request begins, ends, moves or is refused, without its text."
    )
    otlp_traces_endpoint: str | None = _log_option(
        None,
        help="OTLP collector to which traces of requests are sent over gRPC. Needs the extra otel.",
        metavar="URL",
    )
    record_trace: str | None = _log_option(
        None,
        help="New file in which arrivals, lengths and shared prefixes of requests are recorded, without texts, for "
        "`quire replay`.",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        validate_options(self)
