"""`quire doctor`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..exit_status import FAILED

_COLORS = {
    "ok": typer.colors.GREEN,
    "note": typer.colors.BLUE,
    "slow": typer.colors.YELLOW,
    "fails": typer.colors.RED,
}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Examine this machine: cores, memory, GPUs, limits, ports, versions; and say what will be slow or fail.

    The exit status is 1 if something will fail. Nothing is started or changed.

    Example: `quire doctor`
    """
    from dataclasses import asdict

    from .facts import machine_facts
    from .findings import Verdict, examine

    findings = examine(machine_facts())
    fails = any(finding.verdict is Verdict.FAILS for finding in findings)
    if as_json:
        print(json.dumps({"ok": not fails, "findings": [asdict(finding) for finding in findings]}, indent=2))
        raise typer.Exit(FAILED if fails else 0)
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        typer.secho(f"{finding.verdict:5}  ", fg=_COLORS[finding.verdict], nl=False)
        typer.echo(
            f"{finding.subject:{width}}  {finding.value}"
            + (f": {finding.problem}" if finding.problem else "")
        )
        if finding.remedy:
            typer.echo(f"{'':{width + 9}}-> {finding.remedy}")
    raise typer.Exit(FAILED if fails else 0)
