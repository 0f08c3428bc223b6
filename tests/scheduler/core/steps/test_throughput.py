import pytest

from quire.scheduler.core.steps.metrics import Throughput


def test_throughput_is_zero_at_first() -> None:
    assert Throughput().tokens_per_s == 0.0


def test_throughput_counts_overlapping_time_once() -> None:
    throughput = Throughput()
    for step in range(100):  # two in flight: each is planned a step before it can begin
        throughput.count_step(10, planned_at=0.1 * (step - 1), done_at=0.1 * (step + 1))
    assert throughput.tokens_per_s == pytest.approx(100, rel=0.02)


def test_throughput_ignores_idle_time() -> None:
    throughput = Throughput()
    throughput.count_step(50, planned_at=0.0, done_at=1.0)
    throughput.count_step(50, planned_at=1000.0, done_at=1001.0)
    assert throughput.tokens_per_s == pytest.approx(50)


def test_throughput_weights_recent_steps_most() -> None:
    throughput = Throughput()
    for second in range(60):
        throughput.count_step(10 if second < 30 else 1000, planned_at=second, done_at=second + 1)
    assert throughput.tokens_per_s > 950
