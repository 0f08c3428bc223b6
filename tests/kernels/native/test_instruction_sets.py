"""The choice of an instruction set, and the C++ ops in every set that this processor has."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels.activation import silu_and_mul
from quire.kernels.linear import linear, pack, pack_int8
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

TESTS = Path(__file__).parents[1]
# The tests of C++ ops, which run once more for each set.
FILES = [
    "test_cpu_sampling.py",
    "test_elementwise.py",
    "test_linear.py",
    "test_lora.py",
    "test_paged_attention.py",
    "test_quantized_kv.py",
    "test_quantized_panels.py",
    "native/test_library.py",
    "native/test_thread_pool.py",
]
AVX2 = frozenset({"sse2", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# Relative to the largest number of an output, float32: sums of products, in different orders and with or without
# rounding between the multiplication and the addition.
TOLERANCE = 1e-5


@pytest.mark.parametrize(
    ("machine", "features", "chosen", "flags"),
    [
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
    assert ("-mavx512bf16" in choice.flags) == ("avx512_bf16" in chosen)


def test_requested_set_is_chosen() -> None:
    assert choose("avx2", "x86_64", AVX512).name == "avx2"
    assert choose("baseline", "x86_64", AVX512).flags == ()


def test_set_that_the_processor_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="is 'avx512', which this processor lacks; it has avx2, baseline"):
        choose("avx512", "x86_64", AVX2)
    with pytest.raises(ValueError, match="is 'avx2', which this processor lacks; it has neon, baseline"):
        choose("avx2", "aarch64", {"asimd"})


def test_unknown_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="is 'sse9', must be one of avx512, avx2, neon, baseline"):
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
    """Return the sets of this processor, without the one that this process uses."""
    return [name for name in supported_sets() if name != instruction_set().name]


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


@pytest.fixture(scope="module", params=other_sets())
def other_set(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OtherSet:
    """Run one process per set: to import torch takes 3 s."""
    if not is_available():
        pytest.skip("there is no C++ compiler")
    outputs = tmp_path_factory.mktemp(request.param) / "outputs.pt"
    command = [sys.executable, __file__, str(outputs), "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
    # These do not depend on the set; two of them start processes.
    others = ("ONE_DNN", "PLAIN", "twin", "triton", "workers_end_with_their_caller", "idle_workers_sleep")
    command += ["-k", " and ".join(f"not {name}" for name in others)]
    files = [str(TESTS / name) for name in FILES]
    environment = os.environ | {VARIABLE: request.param}
    run = subprocess.run([*command, *files], env=environment, capture_output=True, text=True, timeout=850)
    return OtherSet(request.param, outputs, run)


@pytest.mark.timeout(900)
def test_kernel_tests_pass_in_every_set(other_set: OtherSet) -> None:
    run = other_set.tests
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]


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
    have_fma = {instruction_set().name, other_set.name} <= {"avx2", "avx512"}
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
