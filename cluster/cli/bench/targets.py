"""Targets of a load: a quire server over gRPC, and servers of OpenAI's API through aiperf."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....proto.errors import ConfigError, QuireError
from ....proto.sampling import SamplingParams
from ...client.client import AsyncClient
from ...simulation.run import Targets
from ...text.requests.outputs import CompletionDelta

AIPERF = "aiperf"
# Its metrics |-> quire's names, and the factor to seconds.
_LATENCIES = {"time_to_first_token": "ttft_s", "inter_token_latency": "itl_s", "request_latency": "e2e_s"}
_UNITS_S = {"ms": 1e-3, "sec": 1.0, "s": 1.0, "us": 1e-6, "ns": 1e-9}


class GrpcTarget:
    """A quire server. Outputs have exactly the wanted number of tokens.

    Args:
        model: not needed if the server serves one.
    """

    def __init__(self, client: AsyncClient, model: str = "") -> None:
        self._client, self._model = client, model

    async def stream(self, token_ids: Sequence[int], num_output_tokens: int) -> AsyncIterator[Sequence[int]]:
        """See `Target`."""
        params = SamplingParams(
            max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        events = self._client.generate_stream(list(token_ids), params, model=self._model, resumable=False)
        try:
            async for event in events:
                if isinstance(event, CompletionDelta):
                    yield event.token_ids
        finally:
            await events.aclose()


@dataclass(frozen=True, slots=True)
class AiperfLoad:
    """The load that aiperf sends.

    Attributes:
        tokenizer: a directory, or a name on the Hugging Face Hub.
        rate: requests per second; None for `concurrency` at once.
        targets: latencies of requests that count as goodput.
    """

    model: str
    tokenizer: str
    requests: int
    rate: float | None
    concurrency: int | None
    input_tokens: int
    output_tokens: int
    warmup: int
    seed: int
    targets: Targets

    def command(self, url: str, folder: Path) -> list[str]:
        """Return the command that sends the load to a server of OpenAI's API and writes its figures to a folder."""
        load = (
            ["--concurrency", str(self.concurrency)]
            if self.rate is None
            else ["--request-rate", f"{self.rate:g}"]
        )
        latencies = zip(
            _LATENCIES, (self.targets.ttft_s, self.targets.itl_s, self.targets.e2e_s), strict=True
        )
        goodput = " ".join(f"{metric}:{1000 * bound:g}" for metric, bound in latencies if bound is not None)
        return [
            AIPERF, "profile", "--model", self.model, "--url", url, "--endpoint-type", "completions", "--streaming",
            *load,
            "--tokenizer", self.tokenizer,
            "--request-count", str(self.requests),
            "--warmup-request-count", str(self.warmup),
            "--synthetic-input-tokens-mean", str(self.input_tokens),
            "--synthetic-input-tokens-stddev", "0",
            "--output-tokens-mean", str(self.output_tokens),
            "--output-tokens-stddev", "0",
            "--extra-inputs", json.dumps({"ignore_eos": True, "min_tokens": self.output_tokens}),
            "--use-server-token-count",
            "--random-seed", str(self.seed),
            "--no-gpu-telemetry",
            "--output-artifact-dir", str(folder),
            *(["--goodput", goodput] if goodput else []),
        ]  # fmt: skip


def read_aiperf(folder: Path, label: str) -> dict[str, Any]:
    """Return the figures of a run of aiperf, under the names of `Measures.figures`.

    Raises:
        ConfigError: the folder has no result that can be read.
    """
    found = sorted(folder.rglob("profile_export_aiperf.json"))
    if not found:
        raise ConfigError(f"aiperf left no profile_export_aiperf.json in {folder}")
    try:
        record = json.loads(found[-1].read_text())
        figures: dict[str, Any] = {name: _latency(record[metric]) for metric, name in _LATENCIES.items()}
        num_failed = int(_value(record, "error_request_count"))
        requests_per_s = _value(record, "request_throughput")
        return figures | {
            "label": label,
            "requests": int(_value(record, "request_count")) + num_failed,
            "errors": {"reported by aiperf": num_failed} if num_failed else {},
            "requests_per_s": requests_per_s,
            "goodput_requests_per_s": _value(record, "goodput") if "goodput" in record else requests_per_s,
            "output_tokens_per_s": _value(record, "output_token_throughput"),
            "lateness_s": {"count": 0},
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{found[-1]} cannot be read: {error!r}") from error


def _latency(metric: Mapping[str, Any]) -> dict[str, Any]:
    factor, count = _UNITS_S[metric["unit"]], int(metric.get("count", 1))
    values = {name: factor * float(metric[name]) for name in ("p50", "p90", "p99")}
    return {"count": count, "mean": factor * float(metric["avg"]), **values}


def _value(record: Mapping[str, Any], metric: str) -> float:
    return float(record[metric]["avg"]) if metric in record else 0.0


def run_aiperf(url: str, label: str, load: AiperfLoad) -> dict[str, Any]:
    """Send a load with aiperf and return its figures.

    Raises:
        ConfigError: aiperf is not installed.
        QuireError: it failed.
    """
    if shutil.which(AIPERF) is None:
        raise ConfigError(
            f"{url} is measured by aiperf, which is not installed; install it into an environment of its own "
            "(`pipx install aiperf`), or give HOST:PORT of quire's gRPC interface"
        )
    with tempfile.TemporaryDirectory() as folder:
        # Its figures are read, and shown as those of quire's own generator.
        status = subprocess.run(load.command(url, Path(folder)), check=False, stdout=sys.stderr).returncode
        if status:
            raise QuireError(f"aiperf failed with exit status {status}; its messages are above")
        return read_aiperf(Path(folder), label)
