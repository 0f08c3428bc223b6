"""The choice of an instruction set, and the C++ ops in every set that this processor has or can emulate."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import emulated_tiles
import pytest
import torch
from emulated_tiles import emulated_sets
from torch import Tensor

from quire.kernels.activation import silu_and_mul
from quire.kernels.linear import linear, pack, pack_int8
from quire.kernels.native import instruction_sets
from quire.kernels.native.instruction_sets import (
    ALL_SETS,
    VARIABLE,
    choose,
    instruction_set,
    parse_features,
    supported_sets,
)
from quire.kernels.native.library import is_available
from quire.kernels.norm import rms_norm
from quire.kernels.paged_attention import paged_decode_attention

TESTS = Path(__file__).parents[2]
# The tests of C++ ops, which run once more for each set.
FILES = [
    "kernels/test_cpu_sampling.py",
    "kernels/test_decode_inputs.py",
    "kernels/test_elementwise.py",
    "kernels/test_fused_qk_norm_rope_kv_write.py",
    "kernels/test_latent_attention.py",
    "kernels/test_linear.py",
    "kernels/test_lora.py",
    "kernels/test_paged_attention.py",
    "kernels/test_packed_experts.py",
    "kernels/test_quantized_kv.py",
    "kernels/test_packed_quantized.py",
    "kernels/test_recurrence.py",
    "kernels/test_routing.py",
    "kernels/test_sparse_latent.py",
    "kernels/test_suffix_automaton.py",
    "kernels/native/test_library.py",
    "kernels/native/test_thread_pool.py",
]
# Those of the ops in SOURCES_WITH_TILES. Only these differ between a set and the same with emulated tiles.
FILES_WITH_TILES = [
    "kernels/test_linear.py",
    "kernels/test_packed_experts.py",
    "kernels/test_paged_attention.py",
    "kernels/test_quantized_kv.py",
]
SOURCES_WITH_TILES = {"attention.cpp", "experts.cpp", "linear.cpp"}
# Those of calls that run many ops, with whole models.
FILES_OF_MODELS = [
    "worker/models/test_batch_invariance.py",
    "worker/models/test_fused_decode.py",
    "worker/speculation/test_draft_heads.py",
    "worker/speculation/test_draft_model.py",
    "worker/comm/test_shared_memory.py",
]
# These do not depend on the set, and two of them start processes; "cpu" is Triton's interpreter.
OTHERS = (
    "ONE_DNN", "PLAIN", "reference", "triton", "[cpu-", "-cpu]", "workers_end_with_their_caller",
    "idle_workers_sleep", "caller_that_moves",
)  # fmt: skip
OF_EVERY_SET = "-k", " and ".join(f"not {name}" for name in OTHERS)
AVX2 = frozenset({"sse2", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}
# Relative to the largest number of an output, float32: sums of products, in different orders and with or without
# rounding between the multiplication and the addition.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("machine", "features", "chosen", "flags"),
    [
        ("x86_64", AMX, "amx", ["-mavx512f", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"]),
        ("x86_64", AMX - {"amx_bf16"}, "avx512+avx512_bf16", ["-mavx512f", "-mavx512bf16"]),
        ("x86_64", AVX512 | {"avx512_bf16"}, "avx512+avx512_bf16", ["-mavx512f", "-mavx512bf16"]),
        ("x86_64", AVX512, "avx512", ["-mavx512f"]),
        ("x86_64", AVX512 - {"avx512bw"}, "avx2", ["-mavx2", "-mfma"]),
        ("AMD64", AVX2, "avx2", ["-mavx2"]),
        ("x86_64", AVX2 - {"fma"}, "baseline", []),
        ("aarch64", {"asimd"}, "neon", []),
        ("arm64", frozenset(), "neon", []),
        ("riscv64", frozenset(), "baseline", []),
    ],
)
def test_fastest_set_of_the_processor_is_chosen(
    machine: str, features: frozenset[str], chosen: str, flags: list[str]
) -> None:
    choice = choose(None, machine, features)
    assert str(choice) == chosen
    assert set(flags) <= set(choice.flags)
    assert ("-mavx512bf16" in choice.flags) == ("avx512_bf16" in chosen or chosen == "amx")


def test_requested_set_is_chosen() -> None:
    assert choose("avx2", "x86_64", AVX512).name == "avx2"
    assert choose("baseline", "x86_64", AVX512).flags == ()


def test_set_that_the_processor_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="is 'avx512', which this processor lacks; it has avx2, baseline"):
        choose("avx512", "x86_64", AVX2)
    with pytest.raises(ValueError, match="is 'avx2', which this processor lacks; it has neon, baseline"):
        choose("avx2", "aarch64", {"asimd"})


def test_unknown_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="is 'sse9', must be one of amx, avx512, avx2, neon, baseline"):
        choose("sse9", "x86_64", AVX512)


def test_environment_selects_the_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "baseline")
    assert instruction_set().name == "baseline"
    monkeypatch.setenv(VARIABLE, "")
    assert instruction_set().name == supported_sets()[0]


def test_features_are_read_from_cpuinfo() -> None:
    text = "processor\t: 0\nflags\t\t: fpu sse2 avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    assert parse_features(text) == {"fpu", "sse2", "avx2"}
    assert parse_features("Features\t: fp asimd\n") == {"fp", "asimd"}
    assert parse_features("") == set()


def other_sets() -> list[str]:
    """Return the sets of this processor that this process does not use, and emulated tiles if it has none."""
    own = [name for name in supported_sets() if name != instruction_set().name]
    return own + (emulated_sets()[:1] if "amx" not in supported_sets() else [])


def one_run_each() -> list[Any]:
    """Return the other sets as parameters. No processor of this decade chooses the baseline: its run is slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name == "baseline")) for name in other_sets()]


@dataclass(frozen=True)
class OtherSet:
    """A process that has used another set.

    Attributes:
        outputs: file of `compute_outputs` in that process.
        tests: its run of the kernels' tests.
    """

    name: str
    outputs: Path
    tests: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module", params=one_run_each())
def other_set(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OtherSet:
    """Run one process per set: to import torch takes 3 s."""
    if not is_available():
        pytest.skip("there is no C++ compiler")
    outputs = tmp_path_factory.mktemp(request.param) / "outputs.pt"
    files = FILES_WITH_TILES if request.param in emulated_sets() else FILES
    return OtherSet(request.param, outputs, run_tests(request.param, files, outputs, OF_EVERY_SET))


def run_tests(
    name: str, files: Sequence[str], outputs: Path, selection: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run files of tests in a process with another set, which writes `compute_outputs` to a file first."""
    command = [sys.executable, emulated_tiles.__file__, __file__, str(outputs)]
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
    paths = [str(TESTS / file) for file in files]
    environment = os.environ | {VARIABLE: name, "PYTHONPATH": str(TESTS.parent)}
    return subprocess.run(
        [*command, *options, *selection, *paths], env=environment, capture_output=True, text=True, timeout=850
    )


@pytest.mark.timeout(900)
def test_kernel_tests_pass_in_every_set(other_set: OtherSet) -> None:
    run = other_set.tests
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", other_sets())
@pytest.mark.skipif(not is_available(), reason="there is no C++ compiler")
def test_calls_of_many_ops_pass_in_every_set(name: str, tmp_path: Path) -> None:
    # Emulated tiles are unknown to the process that this test starts.
    left_out = ["of_other_kinds", "of_quantized_weights"] + ["killed_rank"] * (name in emulated_sets())
    selection = ["-k", " and ".join(f"not {each}" for each in left_out)]
    run = run_tests(name, FILES_OF_MODELS, tmp_path / "outputs.pt", selection)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


def test_files_with_cpp_ops_run_in_every_set() -> None:
    uses_ops = re.compile(r"kernels\.native\.library import|kernels\.native import ops|two_threads")
    found = {path for path in (TESTS / "kernels").rglob("test_*.py") if uses_ops.search(path.read_text())}
    assert found - {TESTS / name for name in FILES} == {
        Path(__file__),
        Path(__file__).with_name("test_memory.py"),
    }


def test_sources_with_tiles_have_their_files() -> None:
    includes = re.compile(r'#include "(matrix_tiles|tile_products)\.h"')
    found = {
        path.name
        for path in Path(instruction_sets.__file__).parent.glob("*.cpp")
        if includes.search(path.read_text())
    }
    assert found == SOURCES_WITH_TILES
    assert set(FILES_WITH_TILES) <= set(FILES)


def compute_outputs() -> dict[str, Tensor]:
    """Return outputs of the ops for fixed inputs: name |-> tensor."""
    torch.manual_seed(0)
    weight, codes = torch.randn(70, 96), torch.randint(-128, 128, (70, 96), dtype=torch.int8)
    packed, packed_int8 = pack(weight), pack_int8(codes, torch.rand(70))
    assert packed_int8 is not None
    x = torch.randn(19, 96)
    q, cache = torch.randn(2, 4, 32), torch.randn(9, 2, 2, 16, 32)
    tables, lens = torch.tensor([[1, 2, 3], [4, 5, 6]]).int(), torch.tensor([37, 5]).int()
    return {
        "linear": linear(x, packed),
        "linear of one token": linear(x[:1], packed),
        "int8 linear": linear(x, packed_int8),
        "silu_and_mul": silu_and_mul(x),
        "rms_norm": rms_norm(x, torch.randn(96), 1e-6),
        "paged_decode_attention": paged_decode_attention(q, cache, tables, lens, 0.2),
    }


@pytest.mark.timeout(900)
def test_results_of_all_sets_agree(other_set: OtherSet) -> None:
    """AVX2 and AVX-512 add the products of a linear layer in the same order, so those results have the same bits."""
    others, own = torch.load(other_set.outputs), compute_outputs()
    assert others.keys() == own.keys()
    have_fma = not {instruction_set().name, other_set.name} & {"baseline", "neon"}
    for name, expected in own.items():
        if have_fma and "linear" in name:
            assert torch.equal(others[name], expected), name
        tolerance = TOLERANCE * float(expected.abs().max())
        torch.testing.assert_close(others[name], expected, atol=tolerance, rtol=0)


def test_every_set_of_this_processor_is_known() -> None:
    assert set(supported_sets()) <= {each.name for each in ALL_SETS}
    assert "baseline" in supported_sets()


if __name__ == "__main__":
    torch.save(compute_outputs(), sys.argv[1])
    sys.exit(pytest.main(sys.argv[2:]))
