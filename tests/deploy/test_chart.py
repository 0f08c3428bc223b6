"""The Helm chart: Helm renders and lints it, and the schemas of Kubernetes accept what comes out."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from quire.cluster.cli.provision.cluster_file import example
from quire.cluster.config.deployment import read_fleet_file
from quire.cluster.config.engine_options import EngineOptions
from quire.proto.options.option import declared_options

ROOT = Path(__file__).parents[2]
CHART = ROOT / "cluster" / "cli" / "provision" / "chart"
CUSTOM = json.loads(Path(__file__).with_name("custom_resources.json").read_text())
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
# name |-> the values that docs/kubernetes.md shows
DOCUMENTED: dict[str, dict[str, Any]] = {
    name: yaml.safe_load(text)
    for name, text in re.findall(r"```yaml\n# values: (\w+)\n(.*?)```", PAGE, re.DOTALL)
}
CASES: dict[str, dict[str, Any]] = {
    **DOCUMENTED,
    "smallest": {"insecure": True},
    "hub token": {"insecure": True, "hub": {"tokenSecret": "hub"}, "env": [{"name": "A", "value": "b"}]},
    "claims": {
        "insecure": True,
        "cache": {"claim": "cache"},
        "models": {"claim": "models"},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
    },
    "options": {"insecure": True, "gpus": 4, "options": {
        "tensor_parallel_size": 2, "target-use": 0.5, "max-num-seqs": 1000000, "prefix-caching": False,
        "dtype": "float16",
    }},
    "service": {
        "insecure": True,
        "service": {"type": "LoadBalancer", "httpPort": 80},
        "httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]},
    },
    "monitored": {"insecure": True, "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "bare": {
        "insecure": True,
        "replicas": 3,
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
}  # fmt: skip
FLEET = DOCUMENTED["fleet"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no security": ({}, "set tls.secret and auth.tokensSecret, or insecure"),
    "tls alone": ({"tls": {"secret": "x"}}, "set tls.secret and auth.tokensSecret"),
    "no fleet": ({**FLEET, "fleet": ""}, "needs fleet"),
    "no ray token": ({**FLEET, "ray": {**FLEET["ray"], "tokenSecret": ""}}, "needs ray.tokenSecret"),
    "no workers": ({**FLEET, "ray": {"tokenSecret": "t", "workerGroups": []}}, "needs ray.workerGroups"),
    "keda of a fleet": ({**FLEET, "keda": {"enabled": True}}, "a fleet scales its replicas itself"),
    "pool of a fleet": ({**FLEET, "inferencePool": {"enabled": True}}, "picks the replica itself"),
    "no picker": ({"insecure": True, "inferencePool": {"enabled": True}}, "needs endpointPicker.name"),
    "no gateway": ({"insecure": True, "httpRoute": {"enabled": True}}, "needs parentRefs"),
    "misspelled": ({"insecure": True, "replica": 2}, "replica"),
    "option of the chart": ({"insecure": True, "options": {"listen": "0.0.0.0:1"}}, "listen"),
    "wrong type": ({"insecure": True, "replicas": "two"}, "replicas"),
    "wrong mode": ({"insecure": True, "mode": "vm"}, "mode"),
}
Rendered = dict[str, Any]


def render(tools: Path, values: list[dict[str, Any]], version: str = "1.37") -> list[Rendered]:
    command = [str(tools / "python"), str(Path(__file__).with_name("render_chart.py")), str(CHART), version]
    done = subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    results: list[Rendered] = json.loads(done.stdout)
    return results


@pytest.fixture(scope="session")
def charts(tools: Path) -> dict[str, Rendered]:
    """case |-> what came out of its values."""
    results = render(tools, [*CASES.values(), *(values for values, _ in REFUSED.values())])
    return dict(zip([*CASES, *REFUSED], results, strict=True))


@pytest.fixture(scope="session")
def find(charts: dict[str, Rendered]) -> Callable[[str, str], Any]:
    """`find(case, kind)`: the only object of that kind."""

    def find(case: str, kind: str) -> Any:
        (found,) = [each for each in charts[case]["objects"] if each["kind"] == kind]
        return found

    return find


@pytest.mark.parametrize("case", CASES)
def test_values_render_to_valid_objects(charts: dict[str, Rendered], case: str) -> None:
    result = charts[case]
    assert result.get("error") is None
    assert result["problems"] == []
    assert result["lint"] == []
    assert "http" in result["notes"]
    for each in result["objects"]:
        if each["kind"] in CUSTOM:
            description = CUSTOM[each["kind"]]
            assert each["apiVersion"] == description["apiVersion"]
            jsonschema.validate(each["spec"], description["spec"])


@pytest.mark.parametrize("case", REFUSED)
def test_values_are_refused_with_the_reason(charts: dict[str, Rendered], case: str) -> None:
    assert REFUSED[case][1] in charts[case]["error"]


def test_oldest_supported_kubernetes_accepts_the_objects(tools: Path) -> None:
    (minimum,) = re.findall(r'kubeVersion: ">=(\d+\.\d+)', (CHART / "Chart.yaml").read_text())
    for result in render(tools, list(DOCUMENTED.values()), minimum):
        assert result["problems"] == []


def pods(charts: dict[str, Rendered], case: str) -> list[dict[str, Any]]:
    """Return the pod specs of a case."""
    specs = []
    for each in charts[case]["objects"]:
        if each["kind"] == "Deployment":
            specs.append(each["spec"]["template"]["spec"])
        if each["kind"] == "RayCluster":
            groups = each["spec"]["headGroupSpec"], *each["spec"]["workerGroupSpecs"]
            specs += [group["template"]["spec"] for group in groups]
    return specs


@pytest.mark.parametrize("case", CASES)
def test_containers_have_no_rights_and_a_read_only_root(charts: dict[str, Rendered], case: str) -> None:
    for pod in pods(charts, case):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert {"/tmp", "/dev/shm", "/var/cache/quire"} <= mounts.keys()
            assert set(mounts.values()) <= volumes


def test_pod_serves_its_model_with_its_options(find: Callable[[str, str], Any]) -> None:
    (container,) = find("pods", "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["args"][:3] == ["serve", "Qwen/Qwen3-8B", "--tensor-parallel-size=1"]
    assert {"--max-num-seqs=128", "--kv-cache-dtype=int8", "--token-file=/etc/quire/auth/tokens"} <= set(
        container["args"]
    )
    assert "--insecure" not in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["image"] == "registry.example/quire:cuda"
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/ready", "liveness": "/health", "readiness": "/ready",
    }  # fmt: skip
    assert {probe["scheme"] for probe in probes.values()} == {"HTTPS"}


def test_options_become_arguments_of_serve(find: Callable[[str, str], Any]) -> None:
    (container,) = find("options", "Deployment")["spec"]["template"]["spec"]["containers"]
    given = [each for each in container["args"] if each.startswith("--")]
    assert given[:5] == [
        "--dtype=float16",
        "--max-num-seqs=1000000",
        "--no-prefix-caching",
        "--target-use=0.5",
        "--tensor-parallel-size=2",
    ]
    known = declared_options(EngineOptions)
    for argument in given[:3]:
        assert argument.removeprefix("--").removeprefix("no-").partition("=")[0].replace("-", "_") in known


def test_every_object_belongs_to_the_release(charts: dict[str, Rendered]) -> None:
    for case in CASES:
        names = [(each["kind"], each["metadata"]["name"]) for each in charts[case]["objects"]]
        assert len(names) == len(set(names))
        assert all(name.startswith("test-quire") for _, name in names)
        labels = [each["metadata"]["labels"] for each in charts[case]["objects"]]
        assert all(each["app.kubernetes.io/instance"] == "test" for each in labels)


def test_selectors_select_the_serving_pods(find: Callable[[str, str], Any]) -> None:
    labels = find("pods", "Deployment")["spec"]["template"]["metadata"]["labels"]
    for case, kind, path in (
        ("pods", "Service", ("selector",)),
        ("pods", "PodDisruptionBudget", ("selector", "matchLabels")),
        ("gateway", "InferencePool", ("selector", "matchLabels")),
        ("pods", "NetworkPolicy", ("podSelector", "matchLabels")),
    ):
        selector = find(case, kind)["spec"]
        for key in path:
            selector = selector[key]
        assert selector.items() <= labels.items(), kind


def test_route_leads_to_the_pool_or_to_the_service(find: Callable[[str, str], Any]) -> None:
    (pool,) = find("gateway", "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert pool == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "test-quire"}
    (service,) = find("service", "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert service == {"name": "test-quire", "port": 80}


def test_keda_scales_on_metrics_that_quire_has(find: Callable[[str, str], Any]) -> None:
    scaled = find("pods", "ScaledObject")["spec"]
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    for trigger in scaled["triggers"]:
        for name in re.findall(r"vllm:\w+", trigger["metadata"]["query"]):
            assert f"`{name}`" in metrics
    # KEDA owns the number of pods.
    assert "replicas" not in find("pods", "Deployment")["spec"]


def test_fleet_has_a_gateway_and_its_fleet_file(find: Callable[[str, str], Any], tmp_path: Path) -> None:
    cluster = find("fleet", "RayCluster")["spec"]
    head, gateway = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert (head["name"], gateway["args"][:3]) == (
        "ray-head",
        ["serve", "/etc/quire/fleet/fleet.toml", "--address=127.0.0.1:6379"],
    )
    path = tmp_path / "fleet.toml"
    path.write_text(find("fleet", "ConfigMap")["data"]["fleet.toml"])
    assert [each.limits.max_replicas for each in read_fleet_file(path)] == [8]
    for group, spec in zip(cluster["workerGroupSpecs"], FLEET["ray"]["workerGroups"], strict=True):
        (worker,) = group["template"]["spec"]["containers"]
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(spec["gpus"])
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in worker["env"]
    h100 = cluster["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]
    assert h100["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
    assert h100["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]


def test_values_file_documents_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(defaults) == set(schema["properties"]) - {"global"}
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({**defaults, "insecure": True}, schema)


def test_schemas_accept_the_kuberay_manifest(tools: Path) -> None:
    manifest = re.sub(r"<[a-z][a-z-]*>", "filled-in", example("kuberay"))
    code = (
        "import json, sys, yaml; from render_chart import problems; "
        "print(json.dumps([line for each in yaml.safe_load_all(sys.stdin) for line in problems(each, '1.37')]))"
    )
    command = [str(tools / "python"), "-c", code]
    done = subprocess.run(
        command,
        input=manifest,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    cluster = next(each for each in yaml.safe_load_all(manifest) if each["kind"] == "RayCluster")
    jsonschema.validate(cluster["spec"], CUSTOM["RayCluster"]["spec"])
