"""Bundled cluster files: Ray accepts them, and the checks find costly or insecure settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deadlines import PROGRAM_TIMEOUT_S

from quire.cluster import cli
from quire.cluster.cli.provision import ray_launcher
from quire.cluster.cli.provision.cluster_file import ClusterFile, example, instance_types
from quire.cluster.config.deployment import read_fleet_file
from quire.cluster.fleet.replica.placement import arrange, read_node_types
from quire.proto.errors import ConfigError, ReplicaUnavailable
from quire.proto.model.parallel_split import ParallelSplit

CLOUDS = ("aws", "gcp", "azure")
RAY_FILES = (*CLOUDS, "onprem")
PEM = "-----BEGIN CERTIFICATE-----\n"
FILES = {
    ".ray/auth_token": "token",
    "config/fleet.toml": '[[model]]\nmodel = "demo"\n',
    "config/tokens": "gold:secret-of-gold",
    "config/tls.crt": PEM,
    "config/tls.key": PEM,
}
PLACEHOLDER = re.compile(r"<[a-z][a-z-]*>")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home directory with the Ray token and the files that the examples mount."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def filled_in(name: str) -> str:
    return PLACEHOLDER.sub("filled-in", example(name))


def changed(name: str, old: str, new: str) -> str:
    text = filled_in(name)
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize("name", RAY_FILES)
def test_bundled_file_without_placeholders_has_no_problems(name: str, home: Path) -> None:
    assert ClusterFile.read(write(home, filled_in(name))).problems() == []


@pytest.mark.parametrize("name", CLOUDS)
def test_example_of_a_model_over_two_nodes_has_a_stage_on_each(name: str, home: Path) -> None:
    lines = example(name).split("docs/over_nodes.md", 1)[1].splitlines()[1:]
    fleet = home / "config" / "fleet.toml"
    fleet.write_text("".join(f"{line[4:]}\n" for line in lines if line.startswith("#   ")))
    (deployment,) = read_fleet_file(fleet)
    engine = deployment.engine
    split = ParallelSplit(engine.pipeline_parallel_size, engine.tensor_parallel_size, stage_sizes=(63, 63))
    bundles = [{"CPU": 1.0}, *[{"CPU": 1.0, "GPU": 1.0}] * split.num_ranks]
    arrangement = arrange(bundles, split, [], read_node_types(write(home, filled_in(name))))
    assert (arrangement.unit, len(arrangement.bundles)) == ("pipeline stage", 3)


@pytest.mark.parametrize("name", RAY_FILES)
def test_placeholder_is_refused_with_its_line(name: str, home: Path) -> None:
    text = example(name)
    lines = text.splitlines()
    first = next(
        n for n, line in enumerate(lines, 1) if PLACEHOLDER.search(line) and not line.startswith("#")
    )
    with pytest.raises(ConfigError, match=rf"line {first}: <[a-z-]+> is a placeholder, must be filled in"):
        ClusterFile.read(write(home, text))


def test_all_placeholders_are_named_at_once(home: Path) -> None:
    done = run_cli("up", str(write(home, example("aws"))), "--dry-run", home=home)
    assert done.returncode == 2
    names = set(PLACEHOLDER.findall(re.sub(r"^ *#.*$", "", example("aws"), flags=re.MULTILINE)))
    assert len(names) > 2
    assert {re.findall(r"<[a-z-]+>", line)[0] for line in done.stderr.splitlines()} == names


def test_manifest_for_kubernetes_names_kubectl(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"manifest for Kubernetes, .*kubectl apply -f .*cluster\.yaml"):
        ClusterFile.read(write(home, filled_in("kuberay")))


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        *((name, " \n", "is empty") for name in FILES),
        ("config/fleet.toml", "[[model]]\nmodle = 1\n", "with `model`"),
        ("config/tokens", "# none\n", "token"),
        ("config/tls.crt", "certificate", "is not a PEM file"),
    ],
)
def test_empty_or_malformed_file_of_the_gateway_is_a_problem(
    name: str, content: str, problem: str, home: Path
) -> None:
    (home / name).write_text(content)
    (found,) = ClusterFile.read(write(home, filled_in("onprem"))).problems()
    assert problem in found
    assert name.rpartition("/")[2] in found


@pytest.mark.parametrize("name", CLOUDS)
def test_cloud_file_has_two_gpu_types_on_demand_and_spot_and_a_head_without_gpus(
    name: str, home: Path
) -> None:
    cluster = ClusterFile.read(write(home, filled_in(name)))
    (head,) = [node for node in cluster.node_types if node.is_head]
    workers = [node for node in cluster.node_types if not node.is_head]
    assert head.instance is not None
    assert head.instance.gpus == 0
    assert not head.is_spot
    offers = {(node.machine, node.is_spot) for node in workers}
    machines = {machine for machine, _ in offers}
    assert len(machines) == 2
    assert offers == {(machine, is_spot) for machine in machines for is_spot in (False, True)}
    memories = {node.instance.gpu_memory for node in workers if node.instance is not None}
    assert len(memories) == 2
    assert all(node.min_workers == 0 < node.max_workers for node in workers)


@pytest.mark.parametrize("name", RAY_FILES)
def test_quire_is_installed_on_all_nodes_and_served_on_the_head_only(name: str, home: Path) -> None:
    config = ClusterFile.read(write(home, filled_in(name))).config
    assert config["docker"]["image"] == "filled-in"
    assert config["setup_commands"] == []
    (serve,) = [command for command in config["head_start_ray_commands"] if "quire serve" in command]
    assert not any("quire serve" in command for command in config["worker_start_ray_commands"])
    # Every option in the head's `quire serve` command exists.
    arguments = serve[serve.index("quire serve") :].partition(";")[0].split()[1:]
    known = {option for parameter in _parameters("serve") for option in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= known


@pytest.mark.parametrize("name", RAY_FILES)
def test_containers_share_ipc_lock_memory_and_see_network_devices(name: str, home: Path) -> None:
    config = ClusterFile.read(write(home, filled_in(name))).config
    docker = config["docker"]
    assert {"--ipc=host", "--ulimit memlock=-1:-1"} <= set(docker["run_options"])
    # Ray would add --shm-size, for a /dev/shm that the container does not have.
    assert docker["disable_shm_size_detection"] is True
    devices = {"--volume=/dev/infiniband:/dev/infiniband", "--device-cgroup-rule='c 231:* rmw'"}
    assert devices <= set(docker["worker_run_options"])
    assert not devices & set(docker["run_options"]) | devices & set(docker.get("head_run_options", ()))
    (start,) = [command for command in config["worker_start_ray_commands"] if "ray start" in command]
    assert "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1" in start


def test_aws_nodes_with_h100_have_efa_interfaces(home: Path) -> None:
    cluster = ClusterFile.read(write(home, filled_in("aws")))
    nodes = [node for node in cluster.node_types if node.machine == "p5.48xlarge"]
    assert len(nodes) == 2
    for node in nodes:
        (interface,) = node.node_config["NetworkInterfaces"]
        assert interface["InterfaceType"] == "efa"
        # Ray refuses subnets and groups beside interfaces, and interfaces without them.
        assert interface["SubnetId"] == "filled-in"
        assert interface["Groups"] == ["filled-in"]
        assert not {"SubnetIds", "SecurityGroupIds"} & node.node_config.keys()
    text = filled_in("aws").replace("Groups: *groups, ", "")
    problems = ClusterFile.read(write(home, text)).problems()
    assert any("ssh from everywhere" in problem for problem in problems)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("use_internal_ips: true", "use_internal_ips: false", "every node gets a public address"),
        ("SecurityGroupIds: *groups", "KeyName: key", "ssh from everywhere"),
        (
            "RAY_AUTH_MODE=token ray start --head",
            "ray start --head",
            "allows code from anyone",
        ),
        ("  ~/.ray/auth_token: ~/.ray/auth_token\n", "", "lacks ~/.ray/auth_token"),
        ("GPU: 4", "GPU: 8", "resources say GPU: 8, must be 4 for a g6.12xlarge"),
        ("CPU: 192, GPU: 8", "CPU: 96, GPU: 8", "resources say CPU: 96, must be 192 for a p5.48xlarge"),
        ("g6.12xlarge", "g6.13xlarge", "'g6.13xlarge' is not in quire's list"),
        ("ImageId: *image", "KeyName: key", "no image"),
        ("./config", "./nowhere", "./nowhere does not exist"),
        ("config/tokens", "config/other", "config/other does not exist"),
        ("--include-dashboard=false", "--dashboard-host=0.0.0.0", "exposes the dashboard"),
    ],
)
def test_costly_or_insecure_setting_is_a_problem(old: str, new: str, problem: str, home: Path) -> None:
    problems = ClusterFile.read(write(home, changed("aws", old, new))).problems()
    assert any(problem in found for found in problems), problems


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [", "is not YAML"),
        ("just words", "has no settings"),
        (changed("aws", "max_workers: 8", "max_worker: 8"), "max_worker"),
        (changed("aws", "head_node_type: head", "heads: head"), "heads"),
        (changed("aws", "min_workers: 0", "min_workers: none"), "min_workers"),
    ],
)
def test_file_that_ray_does_not_accept_is_refused_in_one_line(text: str, reason: str, home: Path) -> None:
    with pytest.raises(ConfigError, match=reason) as refusal:
        ClusterFile.read(write(home, text))
    assert "\n" not in str(refusal.value)


def test_every_instance_type_is_complete() -> None:
    for (provider, name), known in instance_types().items():
        assert provider in CLOUDS
        assert name
        assert known.cpus > 0
        assert known.memory > 0
        assert (known.gpus > 0) == bool(known.gpu) == (known.gpu_memory > 0)


def test_kubernetes_pods_request_the_gpus_in_their_names() -> None:
    cluster, service, policy = yaml.safe_load_all(filled_in("kuberay"))
    assert (cluster["kind"], service["kind"], policy["kind"]) == ("RayCluster", "Service", "NetworkPolicy")
    assert service["spec"]["type"] == cluster["spec"]["headGroupSpec"]["serviceType"] == "ClusterIP"
    for group in cluster["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        gpus = group["groupName"].rpartition("x")[2]
        assert container["resources"]["requests"]["nvidia.com/gpu"] == gpus
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert group["minReplicas"] == 0 < group["maxReplicas"]
    ray_head, gateway = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert "nvidia.com/gpu" not in ray_head["resources"]["limits"]
    assert gateway["readinessProbe"]["exec"]["command"][:2] == ["quire", "health"]
    pods = [
        ray_head,
        gateway,
        *(group["template"]["spec"]["containers"][0] for group in cluster["spec"]["workerGroupSpecs"]),
    ]
    for group in cluster["spec"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
        assert {"name": "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "value": "1"} in container["env"]
    assert all({"name": "RAY_AUTH_MODE", "value": "token"} in pod["env"] for pod in pods)
    assert service["spec"]["selector"]["ray.io/cluster"] == cluster["metadata"]["name"]
    assert policy["spec"]["podSelector"]["matchLabels"] == {"ray.io/cluster": cluster["metadata"]["name"]}


def run_cli(*arguments: str, home: Path, answer: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from quire.cluster.cli import main; main()", *arguments]
    environment = os.environ | {"HOME": str(home), "COLUMNS": "200"}
    return subprocess.run(
        command, env=environment, input=answer, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S
    )


def test_up_dry_run_prints_the_plan_only(home: Path) -> None:
    done = run_cli("up", str(write(home, filled_in("aws"))), "--dry-run", home=home)
    assert done.returncode == 0, done.stderr
    for said in ("4 x L4 24 GiB", "8 x H100 80 GiB", "spot", "us-west-2", "no public address", "quire serve"):
        assert said in done.stdout


def test_up_refuses_a_file_with_problems(home: Path) -> None:
    text = changed("aws", "use_internal_ips: true", "use_internal_ips: false")
    done = run_cli("up", str(write(home, text)), "--yes", home=home)
    assert done.returncode == 2
    assert "public address" in done.stdout
    assert "--ignore-problems" in done.stderr


def test_example_is_printed_and_unknown_example_is_refused(home: Path) -> None:
    assert run_cli("up", "--example", "gcp", home=home).stdout == example("gcp")
    assert "must be one of aws, gcp" in run_cli("up", "--example", "moon", home=home).stderr


def test_missing_cloud_library_is_named_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ray_launcher._SDKS, "aws", "no_such_library.at_all")
    with pytest.raises(ConfigError, match=re.escape("pip install 'quire[aws]'")):
        ray_launcher.check_sdk("aws")
    ray_launcher.check_sdk("local")


def test_up_and_down_run_ray_in_the_folder_of_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], Path]] = []

    def run(command: list[str], *, cwd: Path, check: bool) -> subprocess.CompletedProcess[str]:
        calls.append((command, cwd))
        return subprocess.CompletedProcess(command, 1 if "down" in command else 0)

    monkeypatch.setattr(subprocess, "run", run)
    cluster = ClusterFile.read(write(home, filled_in("onprem")))
    ray_launcher.run_ray("up", cluster)
    with pytest.raises(ReplicaUnavailable, match="`ray down` failed with exit status 1"):
        ray_launcher.run_ray("down", cluster)
    (up, folder), (down, _) = calls
    assert folder == home
    assert up[1:5] == ["-m", "ray.scripts.scripts", "up", "cluster.yaml"]
    assert down[3:] == ["down", "cluster.yaml", "--yes"]


def _parameters(command: str) -> list[Any]:
    import typer

    return list(typer.main.get_command(cli.app).commands[command].params)  # type: ignore[attr-defined]
