"""Backlog: the expected work of waiting sequences, summed so that the part before a new request is found at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ...sequences.sequence import Sequence
from .pace import Pace
from .policy import service


@dataclass(frozen=True, slots=True)
class Work:
    """Expected work of sequences.

    Attributes:
        num_prompt_tokens: known tokens to compute.
        row_steps: expected further tokens of all sequences.
    """

    num_sequences: float = 0
    num_prompt_tokens: float = 0
    row_steps: float = 0

    def plus(self, other: Work, share: float = 1) -> Work:
        """Return the sum with a share of other work."""
        return Work(
            self.num_sequences + share * other.num_sequences,
            self.num_prompt_tokens + share * other.num_prompt_tokens,
            self.row_steps + share * other.row_steps,
        )


@dataclass(frozen=True, slots=True)
class Job(Work):
    """A request, or one waiting sequence and the children that are attached to it, which share its prompt."""

    tenant: str = ""
    rank: int = 0

    @property
    def num_steps(self) -> float:
        """Return the expected further tokens of each sequence."""
        return self.row_steps / self.num_sequences


class Counters(Protocol):
    """Virtual token counters of the fair policy."""

    def counter_of(self, tenant: str) -> float:
        """Return the tenant's counter, or the one that it would begin with."""
        ...

    def weight_of(self, tenant: str) -> float: ...


# The class of sequences that ran before, which go before all others.
_RESUMED = -math.inf
# policy |-> the class of a job: a number, and those of a lower or the same one go before it; under `fair` its tenant.
_CLASSES: Mapping[str, Callable[[Job], float | str]] = {
    "fcfs": lambda job: 0,
    "longest-prefix": lambda job: 0,
    "priority": lambda job: job.rank,
    "shortest-prefill": lambda job: int(job.num_prompt_tokens).bit_length(),
    "fair": lambda job: job.tenant,
}


class Backlog:
    """Waiting jobs by class.

    Args:
        policy: the order of admission.
        pace: predicts the lengths of outputs.
        counters: of the fair policy; None for the others.

    Attributes:
        num_tokens: known tokens of all waiting sequences.
    """

    def __init__(self, policy: str, pace: Pace, counters: Counters | None = None) -> None:
        self._pace, self._counters = pace, counters
        self._class_of = _CLASSES[policy]
        self._classes: dict[float | str, Work] = {}
        self._jobs: dict[int, tuple[Job, float | str]] = {}  # seq_id |-> its job, and the class that has it
        self.num_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence."""
        width = 1 + len(sequence.children) if sequence.beams is None else sequence.beams.search.width
        num_tokens = len(sequence.token_ids)
        num_steps = self._pace.expect_tokens(
            sequence.max_len - num_tokens, may_stop=not sequence.ends_at_max_len
        )
        job = Job(width, num_tokens, width * num_steps, sequence.tenant, sequence.rank)
        key = _RESUMED if sequence.has_run else self._class_of(job)
        self._classes[key] = self._classes.get(key, Work()).plus(job)
        self._jobs[sequence.seq_id] = job, key
        self.num_tokens += num_tokens

    def job_of(self, sequence: Sequence) -> Job:
        """Return the job of a sequence that was added."""
        return self._jobs[sequence.seq_id][0]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was added."""
        job, key = self._jobs.pop(sequence.seq_id)
        self.num_tokens -= int(job.num_prompt_tokens)
        left = self._classes.pop(key).plus(job, -1)
        if left.num_sequences > 0.5:  # a class without jobs goes, with what rounding left
            self._classes[key] = left

    def before(self, job: Job) -> Work:
        """Return the work that is computed before a new job.

        Under the policy ``fair`` that is, of each tenant, the part until its counter has caught up with the job's.
        """
        shares: dict[float | str, float]
        if self._counters is None:
            own = self._class_of(job)
            shares = {key: float(key <= own) for key in self._classes}  # type: ignore[operator]
        else:
            services, counter_of = self._services(), self._counters.counter_of
            reaches = counter_of(job.tenant) + services.get(job.tenant, 0.0)
            shares = {
                tenant: min(max((reaches - counter_of(tenant)) / amount, 0.0), 1.0)
                for tenant, amount in services.items()
            }
        before = Work()
        for key, work in self._classes.items():
            before = before.plus(work, shares.get(key, 1.0))
        return before

    def has_fair_share(self, tenant: str) -> bool:
        """Return whether a tenant has its share of the waiting work, or more: not one that others crowd out."""
        services = self._services()
        return len(services) * services.get(tenant, 0.0) >= sum(services.values())

    def largest_tenant(self) -> str:
        """Return the tenant with the most waiting work for its weight, under the fair policy; one must wait."""
        services = self._services()
        return max(services, key=lambda tenant: services[tenant])

    def _services(self) -> dict[str, float]:
        """Return tenant |-> the virtual service of its waiting work; empty under other policies than ``fair``."""
        if self._counters is None:
            return {}
        return {
            key: service(round(work.num_prompt_tokens), round(work.row_steps), self._counters.weight_of(key))
            for key, work in self._classes.items()
            if isinstance(key, str)
        }
