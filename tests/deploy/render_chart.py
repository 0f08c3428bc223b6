"""Helm and the schemas of Kubernetes, in an environment of their own.

    python render_chart.py CHART KUBERNETES_VERSION

reads a list of values from stdin, as JSON, and prints per entry the rendered objects, Helm's notes and complaints and
the problems that the schemas find; or {"error": "..."} if Helm refuses it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import yaml
from helm_python import Chart, lint
from helm_python.errors import HelmError

# Objects of operators; tests/deploy/custom_resources.json describes them.
_CUSTOM_GROUPS = ("ray.io/", "gateway.networking.k8s.io/", "inference.", "monitoring.coreos.com/", "keda.sh/")


def rendered(chart: Chart, path: str, values: dict[str, Any], version: str) -> dict[str, Any]:
    try:
        chart.validate_schema(values)
        manifests = chart.render(values, name="test", namespace="models")
    except HelmError as error:
        return {"error": str(error)}
    objects = [
        document
        for name, text in sorted(manifests.items())
        if not name.endswith("NOTES.txt")
        for document in yaml.safe_load_all(text)
        if document
    ]
    report = lint(path, values, strict=True, kube_version=f"v{version}.0")
    return {
        "objects": objects,
        "notes": next(text for name, text in manifests.items() if name.endswith("NOTES.txt")),
        "lint": [f"{each['path']}: {each['error']}" for each in report["messages"] if each["severity"] > 1],
        "problems": [problem for each in objects for problem in problems(each, version)],
    }


def problems(manifest: dict[str, Any], version: str) -> Iterator[str]:
    """Yield what the schema of Kubernetes has against an object, and against the pods of a RayCluster."""
    if manifest["kind"] == "RayCluster":
        for pod in pods_of(manifest):
            yield from problems({"apiVersion": "v1", "kind": "Pod", **pod}, version)
    if manifest["apiVersion"].startswith(_CUSTOM_GROUPS):
        return
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        place = ".".join(map(str, error.path))
        yield f"{manifest['kind']} {manifest['metadata'].get('name')}: {place}: {error.message}"


def pods_of(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    spec = cluster["spec"]
    return [group["template"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def main() -> None:
    path, version = sys.argv[1:]
    with Chart.load(path) as chart:
        print(json.dumps([rendered(chart, path, values, version) for values in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
