"""Errors after which a rank is replaced are told from those of a step."""

from __future__ import annotations

import pytest

from quire.worker.rank.lost_device import loses_device, step_failed

LOST = [
    "AcceleratorError: CUDA error: an illegal memory access was encountered",
    "AcceleratorError: CUDA error: device-side assert triggered",
    "AcceleratorError: CUDA error: uncorrectable ECC error encountered",
    "AcceleratorError: CUDA error: unspecified launch failure",
    "AcceleratorError: CUDA error: misaligned address",
    "AcceleratorError: CUDA error: unknown error",
    "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
    "RuntimeError: Triton Error [CUDA]: unspecified launch failure",
    "ConnectionError: all-reduce of rank 0 with the others of 2 failed: CUDA error: device-side assert triggered",
    "ConnectionError: all-reduce of rank 0 with the others of 2 failed: NCCL error in: a.cpp:1, unhandled cuda error",
    "RuntimeError: CUDA driver error: 719: unspecified launch failure",
]
STEP_ERRORS = [
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "AcceleratorError: CUDA error: invalid argument",
    "AcceleratorError: CUDA error: operation not permitted when stream is capturing",
    "RuntimeError: Triton Error [CUDA]: out of memory",
    "ConnectionError: all-reduce of rank 0 with the others of 2 failed: NCCL error: remote process exited",
    "IndexError: index out of range in self",
    "OSError: [Errno 524] Unknown error 524",
    "InjectedFault: an operator caused this exception",
]


@pytest.mark.parametrize("problem", LOST)
def test_rank_that_lost_its_device_has_no_step_error(problem: str) -> None:
    assert loses_device(problem)
    assert not step_failed(1, problem, 3, "forward").is_step_error


@pytest.mark.parametrize("problem", STEP_ERRORS)
def test_other_errors_are_step_errors(problem: str) -> None:
    assert not loses_device(problem)
    assert step_failed(1, problem, 3, "forward").is_step_error
