"""Findings of `quire doctor`: a good machine has none that matter, and each fault is named with a remedy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.cli.doctor.facts import MachineFacts, Space, machine_facts, read_cpu_quota, space_at
from quire.cluster.cli.doctor.findings import Verdict, examine
from quire.cluster.config.nvml import Gpu, GpuDriver
from quire.worker.rank.ops_state import LibraryState

GIB = 1 << 30
GOOD = MachineFacts(
    python="3.12.4",
    num_cores=16,
    cpu_quota=None,
    ops=LibraryState("avx512", Path("/ops.so"), is_prebuilt=True),
    memory_bytes=64 * GIB,
    shared_memory=Space("/dev/shm", 32 * GIB),
    temporary=Space("/tmp", 100 * GIB),
    cache=Space("/cache", 100 * GIB),
    models=Space("/models", 100 * GIB),
    max_files=65_536,
    max_processes=None,
    max_locked_bytes=None,
    driver=GpuDriver("570.1", (12, 8), (Gpu("H100", 80 * GIB, (9, 0)),) * 2),
    packages={"quire": "1", "torch": "2.13", "ray": "2.60", "transformers": "5.23", "triton": "3.7"},
    torch_cuda="12.8",
    nccl="2.27",
    libraries={"flashinfer": "0.6.18", "flash_attn": "3.0", "deep_gemm": "2.6.1", "fla": "0.5.2"},
)


def test_good_machine_has_no_finding_to_act_on() -> None:
    assert {finding.verdict for finding in examine(GOOD)} == {Verdict.OK}


@pytest.mark.parametrize(
    ("changes", "subject", "verdict"),
    [
        ({"python": "3.10.1"}, "Python", Verdict.FAILS),
        ({"packages": {"torch": "2.13"}}, "ray", Verdict.FAILS),
        ({"num_cores": 1}, "cores", Verdict.SLOW),
        ({"cpu_quota": 2.5}, "cores", Verdict.SLOW),
        ({"ops": LibraryState("baseline", Path("/ops.so"))}, "instruction set", Verdict.SLOW),
        ({"ops": LibraryState("avx2", problem="no C++ compiler")}, "C++ ops", Verdict.SLOW),
        ({"ops": LibraryState("avx2")}, "C++ ops", Verdict.NOTE),
        ({"memory_bytes": GIB}, "memory", Verdict.FAILS),
        ({"shared_memory": Space("/dev/shm", 64 << 20)}, "/dev/shm", Verdict.FAILS),
        ({"shared_memory": Space("/dev/shm", None)}, "/dev/shm", Verdict.FAILS),
        ({"temporary": Space("/tmp", GIB // 2)}, "temporary files", Verdict.FAILS),
        ({"models": Space("/models", 100 * GIB, is_writable=False)}, "models", Verdict.NOTE),
        ({"max_files": 1024}, "ulimit -n", Verdict.FAILS),
        ({"max_files": 8192}, "ulimit -n", Verdict.NOTE),
        ({"max_processes": 100}, "ulimit -u", Verdict.FAILS),
        ({"max_locked_bytes": 65_536, "has_infiniband": True}, "ulimit -l", Verdict.FAILS),
        ({"has_infiniband": True}, "NIXL", Verdict.NOTE),
        ({"packages": {**GOOD.packages, "nixl": "1.5.1"}}, "NIXL", Verdict.OK),
        ({"driver": None}, "GPUs", Verdict.NOTE),
        ({"driver": GpuDriver("1", (12, 8), (Gpu("T4", 16 * GIB, (7, 5)),))}, "GPU 0", Verdict.SLOW),
        ({"torch_cuda": ""}, "torch's CUDA", Verdict.FAILS),
        ({"torch_cuda": "13.0"}, "torch's CUDA", Verdict.FAILS),
        ({"packages": {**GOOD.packages, "triton": ""}}, "triton", Verdict.OK),
        ({"nccl": ""}, "NCCL", Verdict.FAILS),
        ({"taken_ports": {"http": "127.0.0.1:8000"}}, "HTTP port", Verdict.NOTE),
    ],
)
def test_fault_is_found_with_its_remedy(changes: dict[str, Any], subject: str, verdict: Verdict) -> None:
    (finding,) = [each for each in examine(replace(GOOD, **changes)) if each.subject == subject]
    assert finding.verdict == verdict
    if verdict in (Verdict.SLOW, Verdict.FAILS):
        assert finding.problem
        assert finding.remedy


def test_unwritable_cache_matters_only_without_a_library() -> None:
    cache = Space("/cache", 100 * GIB, is_writable=False)
    assert "cache" not in {each.subject for each in examine(replace(GOOD, cache=cache))}
    unbuilt = replace(GOOD, cache=cache, ops=LibraryState("avx2"))
    assert "cache" in {each.subject for each in examine(unbuilt)}


def test_this_machine_can_be_measured() -> None:
    facts = machine_facts()
    assert facts.num_cores >= 1
    assert facts.packages["torch"]
    assert examine(facts)


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("250000 100000", 2.5), ("", None), ("a b", None)]
)
def test_cpu_quota_is_read(tmp_path: Path, text: str, quota: float | None) -> None:
    file = tmp_path / "cpu.max"
    assert read_cpu_quota(file) is None
    file.write_text(text)
    assert read_cpu_quota(file) == quota


def test_space_of_a_missing_folder_is_that_of_its_parent(tmp_path: Path) -> None:
    space = space_at(tmp_path / "a" / "b")
    assert space.free_bytes == space_at(tmp_path).free_bytes
    assert space.is_writable


def test_libraries_of_kernels_are_named_with_what_computes_instead() -> None:
    driver = GpuDriver("570.1", (12, 8), (Gpu("B200", 180 * GIB, (10, 0)),))
    found = {
        each.subject: each for each in examine(replace(GOOD, driver=driver, libraries={"flash_attn": "3.0"}))
    }
    assert found["FlashInfer"].problem == "attention: quire's own kernels compute it"
    assert found["FlashAttention 3"].problem.startswith("not used: the GPU has compute capability 10.0")
