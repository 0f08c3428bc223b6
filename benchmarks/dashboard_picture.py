"""A picture of the dashboard's panels from a real run, without Grafana.

    python -m benchmarks.dashboard_picture docs/images/dashboard.png

Prometheus scrapes a server of the demo model under a load that rises and falls. matplotlib draws what Prometheus
returns for the expressions of examples/monitoring/dashboard.json, at the places that the panels have in Grafana's
grid. Needs Prometheus (Debian: prometheus) and the extra bench.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from quire.cluster.cli.demo.server import ServerProcess
from quire.cluster.gateway.metrics.dashboard import WIDTH, dashboard

START_TIMEOUT_S = 300.0
SCRAPE_S = 1
# Time over which rates are computed; Grafana takes at least four scrapes.
RATE_INTERVAL = "8s"
MAX_STREAMS = 24
WAVE_S = 40.0
# Height of the grid that is drawn: the rows about requests, scheduler and KV cache.
NUM_ROWS = 56
# Of a row of Grafana's grid, and of the picture, in inches.
ROW_INCHES, WIDTH_INCHES = 0.3, 16.0
STREAM = {"ignore_eos": True, "stream": True}
PROMPT = "It was a dark and stormy night. "


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("image", type=Path, help="PNG file to write")
    parser.add_argument("--seconds", type=float, default=80.0, help="length of the load")
    arguments = parser.parse_args()
    if shutil.which("prometheus") is None:
        parser.error("prometheus is not installed (Debian: prometheus)")
    with ServerProcess("demo", "--max-num-seqs", "16") as server:
        server.wait_ready(START_TIMEOUT_S)
        with prometheus(server.http_url) as api:
            began_at = time.time()
            asyncio.run(load(server.http_url, arguments.seconds))
            draw(arguments.image, read_panels(api, began_at, time.time()))


@contextmanager
def prometheus(url: str) -> Iterator[str]:
    """Run Prometheus, which scrapes the server; yield the URL of its API."""
    with (
        tempfile.TemporaryDirectory(prefix="quire-") as folder,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        scrape = {"job_name": "quire", "static_configs": [{"targets": [url.removeprefix("http://")]}]}
        config = {"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": [scrape]}
        (Path(folder) / "prometheus.yaml").write_text(json.dumps(config))  # JSON is YAML
        flags = [
            "--config.file=prometheus.yaml",
            "--storage.tsdb.path=data",
            f"--web.listen-address={address}",
        ]
        process = subprocess.Popen(["prometheus", *flags], cwd=folder, stderr=subprocess.DEVNULL)
        try:
            yield f"http://{address}/api/v1/"
        finally:
            process.kill()
            process.wait()


async def load(url: str, seconds: float) -> None:
    """Send streams, between none and MAX_STREAMS at a time, and a few requests that are refused."""
    draw_from, began_at = random.Random(1), time.monotonic()
    running: set[asyncio.Task[None]] = set()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=seconds, limits=limits) as client:
        while (elapsed_s := time.monotonic() - began_at) < seconds:
            wanted = MAX_STREAMS * (0.5 - 0.5 * math.cos(2 * math.pi * elapsed_s / WAVE_S))
            while len(running) < wanted:
                task = asyncio.create_task(complete(client, draw_from))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(0.25)
        for task in running:
            task.cancel()


async def complete(client: httpx.AsyncClient, draw_from: random.Random) -> None:
    # Half of the prompts begin alike, so that blocks are found in the prefix cache.
    start = PROMPT * 6 if draw_from.random() < 0.5 else f"{draw_from.random()} "
    prompt = start + PROMPT * draw_from.randrange(1, 8)
    temperature = -1.0 if draw_from.random() < 0.1 else 1.0  # -1: is refused
    body = {"prompt": prompt, "max_tokens": draw_from.randrange(16, 160), "temperature": temperature}
    with suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/completions", json=body | STREAM) as response:
            await response.aread()


@dataclass(frozen=True, slots=True)
class Series:
    """A line of a panel: seconds since the beginning, and values."""

    legend: str
    times: list[float]
    values: list[float]


def read_panels(api: str, began_at: float, ended_at: float) -> list[tuple[dict[str, Any], list[Series]]]:
    """Return each panel that is drawn, with its series."""
    found = []
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        if place["y"] + place["h"] <= NUM_ROWS:
            targets = panel.get("targets", [])
            series = [each for target in targets for each in read_series(api, target, began_at, ended_at)]
            found.append((panel, series))
    return found


def read_series(api: str, target: dict[str, Any], began_at: float, ended_at: float) -> Iterator[Series]:
    """Yield what Prometheus returns for an expression."""
    expression = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
    query = {
        "query": re.sub(r"\$(model_name|engine)", ".*", expression),
        "start": began_at,
        "end": ended_at,
        "step": SCRAPE_S,
    }
    with urllib.request.urlopen(f"{api}query_range?{urllib.parse.urlencode(query)}", timeout=60) as response:
        results = json.load(response)["data"]["result"]
    for result in results:
        legend = legend_of(target["legendFormat"], result["metric"])
        points = [(at - began_at, float(value)) for at, value in result["values"] if value != "NaN"]
        if points:
            yield Series(legend, [at for at, _ in points], [value for _, value in points])


def legend_of(form: str, labels: dict[str, str]) -> str:
    """Return the legend of a series, whose form may have ``{{label}}`` in it."""
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), form)


def draw(image: Path, panels: list[tuple[dict[str, Any], list[Series]]]) -> None:
    import matplotlib.pyplot as plt  # an extra

    plt.rcParams |= {"font.size": 7, "axes.spines.top": False, "axes.spines.right": False}
    height = NUM_ROWS * ROW_INCHES
    figure = plt.figure(figsize=(WIDTH_INCHES, height), facecolor="#f4f5f5")
    for panel, series in panels:
        place = panel["gridPos"]
        left, top = place["x"] / WIDTH, 1 - place["y"] / NUM_ROWS
        width, panel_height = place["w"] / WIDTH, place["h"] / NUM_ROWS
        if panel["type"] == "row":
            figure.text(
                left + 0.01, top - panel_height / 2, panel["title"], fontsize=10, weight="bold", va="center"
            )
            continue
        margins = (0.036, 0.030) if panel["type"] == "timeseries" else (0.004, 0.008)
        axes = figure.add_axes(
            (
                left + margins[0],
                top - panel_height + margins[1],
                width - margins[0] - 0.01,
                panel_height - margins[1] - 0.018,
            )
        )
        axes.set_title(panel["title"], fontsize=8, loc="left")
        draw_panel = draw_figure if panel["type"] == "stat" else draw_lines
        draw_panel(axes, panel, series)
    figure.savefig(image, dpi=90)


def draw_figure(axes: Any, panel: dict[str, Any], series: list[Series]) -> None:
    """Draw the highest value, since the last one is that of an idle server."""
    axes.set_axis_off()
    highest = max((value for each in series for value in each.values), default=math.nan)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    axes.text(
        0.5, 0.4, in_unit(highest, unit), fontsize=15, ha="center", va="center", transform=axes.transAxes
    )


def draw_lines(axes: Any, panel: dict[str, Any], series: list[Series]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    axes.set_facecolor("white")
    axes.grid(alpha=0.3)
    series = [each for each in series if any(each.values)] or series[:1]  # no legend for what did not happen
    if (
        series
        and defaults["custom"]["stacking"]["mode"] == "normal"
        and len({len(s.times) for s in series}) == 1
    ):
        labels = [each.legend for each in series]
        axes.stackplot(series[0].times, *[each.values for each in series], labels=labels, alpha=0.6)
    else:
        for each in series:
            axes.plot(each.times, each.values, linewidth=1, label=each.legend)
    axes.set_ylim(bottom=0, top=defaults.get("max"))
    axes.yaxis.set_major_formatter(lambda value, _: in_unit(value, defaults["unit"]))
    if series:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncol=4, frameon=False)
    else:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", transform=axes.transAxes, alpha=0.5)


def in_unit(value: float, unit: str) -> str:
    """Return a value as Grafana writes it in this unit."""
    if unit == "percentunit":
        return f"{100 * value:.0f} %"
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms"
    suffix = {"reqps": " req/s", "ops": " /s"}.get(unit, "")
    return f"{value:,.0f}{suffix}" if value >= 10 or value == int(value) else f"{value:.1f}{suffix}"


if __name__ == "__main__":
    main()
