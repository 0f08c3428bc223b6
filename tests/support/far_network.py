"""FarNetwork: a network namespace of its own, connected to this machine's by a virtual cable."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass


class NetworkNotPermitted(Exception):
    """This user may not make a network namespace, or a tool for it is missing."""


@dataclass(frozen=True, slots=True)
class FarNetwork:
    """A network namespace and its cable.

    Attributes:
        link: this end of the cable; also the name of the namespace.
        near_ip: address of this end.
        far_ip: address of the other end.
    """

    link: str
    near_ip: str
    far_ip: str

    @property
    def inside(self) -> list[str]:
        """Prefix of commands that run in the namespace."""
        return ["ip", "netns", "exec", self.link]

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Let no packet through; connections stay open."""
        with self._drop("1.0"):
            yield

    @contextmanager
    def lossy(self, share: float) -> Iterator[None]:
        """Lose this share of the packets that go in, each by chance."""
        with self._drop(str(share)):
            yield

    @contextmanager
    def slow(self, bits_per_s: int) -> Iterator[None]:
        """Let so many bits per second out of this end; the others wait for up to a second, then they are lost."""
        shaping = ["dev", self.link, "root"]
        limit = ["tbf", "rate", f"{bits_per_s}bit", "burst", "8kb", "latency", "1s"]
        run("tc", "qdisc", "add", *shaping, *limit)
        try:
            yield
        finally:
            run("tc", "qdisc", "del", *shaping)

    @contextmanager
    def _drop(self, share: str) -> Iterator[None]:
        """Drop this share of the packets in both directions, inside the namespace: the rules end with it."""
        by_chance = ["-m", "statistic", "--mode", "random", "--probability", share, "-j", "DROP"]
        rules = [["INPUT", "-i", "far", *by_chance], ["OUTPUT", "-o", "far", *by_chance]]
        with ExitStack() as stack:
            for rule in rules:
                run(*self.inside, "iptables", "--wait", "-A", *rule)
                stack.callback(run, *self.inside, "iptables", "--wait", "-D", *rule)
            yield


def open_network(stack: ExitStack, *, has_faults: bool = True) -> FarNetwork:
    """Create a network namespace, which ends with the stack. Raises NetworkNotPermitted.

    Args:
        has_faults: it can lose packets and be slow, for which kernels and images may lack the match `statistic` or
            the qdisc `tbf`.
    """
    name = f"quire{secrets.token_hex(3)}"
    subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(256)}"
    network = FarNetwork(name, f"{subnet}.1", f"{subnet}.2")
    try:
        run("ip", "netns", "add", name)
        stack.callback(run, "ip", "netns", "delete", name)
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "far", "netns", name)
        run("ip", "address", "add", f"{network.near_ip}/30", "dev", name)
        run("ip", "link", "set", name, "up")
        run(*network.inside, "ip", "address", "add", f"{network.far_ip}/30", "dev", "far")
        for device in ("far", "lo"):
            run(*network.inside, "ip", "link", "set", device, "up")
        if has_faults:
            with network.lossy(0.0), network.slow(10**9):
                pass
    except FileNotFoundError as error:
        raise NetworkNotPermitted(f"a network namespace takes iproute2 and iptables: {error}") from error
    except subprocess.CalledProcessError as error:
        problem = f"{' '.join(error.cmd)}: {error.stderr.strip()}"
        raise NetworkNotPermitted(f"no network namespace with losses can be made here: {problem}") from error
    return network


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
