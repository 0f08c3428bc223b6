"""GatewayRegistry: which gateways follow the controller."""

from __future__ import annotations

from quire.cluster.fleet.controller.gateways import GONE_AFTER_S, GatewayRegistry


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_gateways_are_named_once_all_had_time_to_ask() -> None:
    clock = Clock()
    registry = GatewayRegistry(clock)
    with registry.following("b"), registry.following("a"):
        assert not registry.update()
        assert list(registry.ids) == []
        clock.now += GONE_AFTER_S
        assert registry.update()
        assert list(registry.ids) == ["a", "b"]
        assert not registry.update()


def test_gateway_that_asks_no_more_is_forgotten_after_a_while() -> None:
    clock = Clock()
    registry = GatewayRegistry(clock)
    with registry.following("stays"):
        with registry.following("ends"):
            clock.now += 10 * GONE_AFTER_S  # one call may wait for long
            registry.update()
            assert list(registry.ids) == ["ends", "stays"]
        clock.now += 0.9 * GONE_AFTER_S
        assert not registry.update()
        clock.now += 0.2 * GONE_AFTER_S
        assert registry.update()
        assert list(registry.ids) == ["stays"]
