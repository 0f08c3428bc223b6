"""Tables of docs/benchmarks.md: functions from a file's figures to the lines of a Markdown table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Figures = dict[str, dict[str, Any]]

WORKLOADS = {
    "w1.output_tokens_per_s": "64 at once",
    "w2.output_tokens_per_s": "16 at once",
    "w5.output_tokens_per_s": "32, shared prefix",
    "w3.decode_tokens_per_s": "one stream",
    "w4.first_token_ms": "prompt (ms)",
}


def engines(settings: Mapping[str, Figures]) -> list[str]:
    """Settings and engines as rows, workloads as columns."""
    lines = table_header(["setting", "engine", *WORKLOADS.values()])
    for setting, figures in settings.items():
        for engine in dict.fromkeys(name.split(".")[1] for name in figures):
            cells = [_engine_cell(figures, engine, key) for key in WORKLOADS]
            lines.append(table_row([setting, engine.replace("_", "."), *cells]))
    return lines


def _engine_cell(figures: Figures, engine: str, workload: str) -> str:
    figure = figures.get(f"peers.{engine}.{workload}")
    if figure is not None:
        return number(figure["value"])
    failed = figures.get(f"peers.{engine}.{workload.split('.')[0]}.failed_after_s")
    return "" if failed is None else f"not finished in {failed['value']:.0f} s"


def chosen(**rows: str) -> Callable[[Figures], list[str]]:
    """A table of some figures; the keyword is the figure's name with `__` for dots, the value its label."""

    def table(figures: Figures) -> list[str]:
        lines = table_header(["measured", "value"])
        for key, label in rows.items():
            figure = figures[key.replace("__", ".")]
            lines.append(table_row([label, f"{number(figure['value'])} {figure['unit']}"]))
        return lines

    return table


def servers(**measures: str) -> Callable[[Figures], list[str]]:
    """A table with servers as rows and their figures as columns; the keywords are those of `chosen`."""

    def table(figures: Figures) -> list[str]:
        lines = table_header(["server", *measures.values()])
        for server in dict.fromkeys(tuple(name.split(".")[:2]) for name in figures):
            names = (".".join((*server, key.replace("__", "."))) for key in measures)
            cells = (number(figures[name]["value"]) if name in figures else "" for name in names)
            lines.append(table_row([server[1], *cells]))
        return lines

    return table


def compared(**rows: str) -> Callable[[Mapping[str, Figures]], list[str]]:
    """As `chosen`, with settings as columns."""

    def table(settings: Mapping[str, Figures]) -> list[str]:
        lines = table_header(["measured", *settings])
        for key, label in rows.items():
            found = [figures[key.replace("__", ".")] for figures in settings.values()]
            lines.append(table_row([label, *(f"{number(each['value'])} {each['unit']}" for each in found)]))
        return lines

    return table


def state_hits(figures: Figures) -> list[str]:
    """Traces and memory as rows, policies and splits as columns."""
    names = [name.removeprefix("state_memory.").split(".", 2) for name in figures]
    columns = list(dict.fromkeys(policy for *_, policy in names))
    lines = table_header(["trace", "blocks", *columns])
    for trace, blocks in dict.fromkeys((trace, blocks) for trace, blocks, _ in names):
        found = [figures.get(f"state_memory.{trace}.{blocks}.{policy}") for policy in columns]
        cells = ["" if figure is None else f"{number(figure['value'])} %" for figure in found]
        lines.append(table_row([trace.replace("_", " "), blocks, *cells]))
    return lines


def state_errors(figures: Figures) -> list[str]:
    """Kinds of models as rows, types of the model and of its states as columns."""
    names = [name.removeprefix("state_dtype.").split(".", 1) for name in figures]
    columns = list(dict.fromkeys(case for _, case in names))
    lines = table_header(["model type", *(case.replace(".", ", states in ") for case in columns)])
    for kind in dict.fromkeys(kind for kind, _ in names):
        lines.append(
            table_row([kind, *(number(figures[f"state_dtype.{kind}.{case}"]["value"]) for case in columns)])
        )
    return lines


def accuracy(settings: Mapping[str, Figures]) -> list[str]:
    """Errors of simulated runs, with workloads as rows."""
    columns = {
        "output_tokens_per_s": "throughput",
        "ttft.p50": "first token, p50",
        "ttft.p99": "first token, p99",
        "itl.p50": "between tokens, p50",
        "itl.p99": "between tokens, p99",
    }
    lines = table_header(["ranks", "workload", *columns.values()])
    for label, figures in settings.items():
        for name in figures:
            place = name.removesuffix(".output_tokens_per_s")
            if place != name:
                cells = [f"{figures[f'{place}.{key}']['value']:+.0%}" for key in columns]
                lines.append(table_row([label, place.rpartition(".")[2], *cells]))
    return lines


def speculation(figures: Figures) -> list[str]:
    """Methods, workloads and numbers of sequences that have drafts as rows."""
    columns = {"speedup": "speed-up", "acceptance": "accepted", "tokens_per_step": "tokens per step"}
    lines = table_header(["method", "workload", "sequences", *columns.values()])
    for name in figures:
        place = name.removesuffix(".speedup")
        if place != name and figures[f"{place}.acceptance"]["value"]:
            _, method, workload, size = place.split(".")
            cells = [number(figures[f"{place}.{key}"]["value"]) for key in columns]
            lines.append(table_row([method, workload, size, *cells]))
    return lines


def faults(figures: Figures) -> list[str]:
    """The outcome of requests under faults, and the recovery times of each kind of fault as a row."""
    totals = ("faults", "requests", "lost", "changed", "leaked")
    stated = ", ".join(f"{number(figures[f'chaos.{name}']['value'])} {name}" for name in totals)
    lines = [
        f"In all: {stated}.",
        "",
        *table_header(["fault", "times", "until answered, median (s)", "99 % (s)"]),
    ]
    for name, figure in figures.items():
        if name.startswith("chaos.recovery_s.") and name.endswith(".p50"):
            kind = name.removeprefix("chaos.recovery_s.").removesuffix(".p50")
            longest = figures[f"chaos.recovery_s.{kind}.p99"]["value"]
            count = figure["note"].removesuffix(" faults")
            lines.append(table_row([kind, count, number(figure["value"]), number(longest)]))
    return lines


# Of figures that have the engine behind the row.
_ENGINES = ("quire", "transformers", "llama_cpp")


def by_engine(column: str, **measures: str) -> Callable[[Figures], list[str]]:
    """A table of what was measured of several engines, behind slashes in the order of _ENGINES, or of none."""

    def table(figures: Figures) -> list[str]:
        lines = table_header([column, *measures.values()])
        places = [name.rpartition(".")[0] for name in figures if not name.endswith(".failed_after_s")]
        for row in dict.fromkeys(_without_engine(place) for place in places):
            cells = (_by_engine_cell(figures, row, key) for key in measures)
            lines.append(table_row([row.partition(".")[2], *cells]))
        return lines

    return table


def _by_engine_cell(figures: Figures, row: str, key: str) -> str:
    if (figure := figures.get(f"{row}.{key}")) is not None:
        return number(figure["value"])
    found = [figures.get(f"{row}.{engine}.{key}") for engine in _ENGINES]
    while found and found[-1] is None:
        found.pop()
    return " / ".join("-" if figure is None else number(figure["value"]) for figure in found)


def _without_engine(place: str) -> str:
    row, _, last = place.rpartition(".")
    return row if last in _ENGINES else place


def table_header(columns: list[str]) -> list[str]:
    """Return the first two lines of a Markdown table."""
    return [table_row(columns), table_row(["---"] * len(columns))]


def table_row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    """Four significant digits, without an exponent."""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "0" if float(text.replace(",", "")) == 0 else text
