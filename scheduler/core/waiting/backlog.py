"""Backlog: the expected work of waiting sequences, summed so that the part before a new request is found at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ...sequences.sequence import Sequence
from .policy import service


@dataclass(frozen=True, slots=True)
class Job:
    """Expected work of a request, or of one waiting sequence and the children that are attached to it.

    Attributes:
        num_sequences: rows that it takes.
        num_prompt_tokens: known tokens to compute; the sequences share them.
        num_steps: expected further tokens of each sequence.
    """

    num_sequences: int
    num_prompt_tokens: int
    num_steps: float
    tenant: str = ""
    priority: int = 0

    @property
    def row_steps(self) -> float:
        return self.num_sequences * self.num_steps

    @property
    def num_kv_tokens(self) -> float:
        """Return the KV that it holds, averaged over its time."""
        return self.num_prompt_tokens + self.row_steps / 2


@dataclass(slots=True)
class Work:
    """Sum of jobs."""

    num_sequences: float = 0.0
    row_steps: float = 0.0
    num_prompt_tokens: float = 0.0
    num_kv_tokens: float = 0.0

    def add(self, job: Job, times: float = 1.0) -> None:
        """Add a job, or with `times` -1 remove it."""
        self.num_sequences += times * job.num_sequences
        self.row_steps += times * job.row_steps
        self.num_prompt_tokens += times * job.num_prompt_tokens
        self.num_kv_tokens += times * job.num_kv_tokens

    def add_share(self, other: Work, share: float = 1.0) -> None:
        """Add a share of another sum."""
        self.num_sequences += share * other.num_sequences
        self.row_steps += share * other.row_steps
        self.num_prompt_tokens += share * other.num_prompt_tokens
        self.num_kv_tokens += share * other.num_kv_tokens


class Counters(Protocol):
    """Virtual token counters of the fair policy."""

    def counter_of(self, tenant: str) -> float:
        """Return the tenant's counter, or the one that it would begin with."""
        ...

    def weight_of(self, tenant: str) -> float: ...


# policy |-> the class of a job; jobs of a lower or the same class go before it. `fair` has tenants for classes.
_CLASSES: Mapping[str, Callable[[Job], int]] = {
    "fcfs": lambda job: 0,
    "longest-prefix": lambda job: 0,
    "priority": lambda job: -job.priority,
    "shortest-prefill": lambda job: job.num_prompt_tokens.bit_length(),
}


class Backlog:
    """Waiting jobs by class.

    Args:
        policy: the order of admission.
        counters: of the fair policy; None for the others.
    """

    def __init__(self, policy: str, counters: Counters | None = None) -> None:
        self._counters = counters
        self._class_of: Callable[[Job], int | str]
        self._class_of = (lambda job: job.tenant) if counters is not None else _CLASSES[policy]
        self._resumed = Work()  # sequences that ran before go before all others
        self._classes: dict[int | str, Work] = {}
        self._jobs: dict[int, tuple[Job, Work]] = {}  # seq_id |-> its job, and the sum that has it

    def add(self, sequence: Sequence, num_steps: float) -> None:
        """Add a waiting sequence.

        Args:
            num_steps: expected number of its further tokens.
        """
        width = 1 + len(sequence.children) if sequence.beams is None else sequence.beams.search.width
        job = Job(width, len(sequence.token_ids), num_steps, sequence.tenant, sequence.priority)
        work = self._resumed if sequence.has_run else self._classes.setdefault(self._class_of(job), Work())
        work.add(job)
        self._jobs[sequence.seq_id] = job, work

    def job_of(self, sequence: Sequence) -> Job:
        """Return the job of a sequence that was added."""
        return self._jobs[sequence.seq_id][0]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was added."""
        job, work = self._jobs.pop(sequence.seq_id)
        work.add(job, -1.0)
        key = self._class_of(job)
        if work.num_sequences < 0.5 and self._classes.get(key) is work:
            del self._classes[key]  # with what rounding left

    def before(self, job: Job) -> Work:
        """Return the work that is computed before a new job."""
        work = Work()
        work.add_share(self._resumed)
        if self._counters is not None:
            self._add_fair_shares(work, job, self._counters)
            return work
        key = self._class_of(job)
        for other, waiting in self._classes.items():
            if other <= key:  # type: ignore[operator]  # all of them numbers
                work.add_share(waiting)
        return work

    def has_fair_share(self, tenant: str) -> bool:
        """Return whether a tenant has its share of the waiting work, or more: not one that others crowd out."""
        if self._counters is None or not self._classes:
            return True
        services = self._services(self._counters)
        return services.get(tenant, 0.0) >= sum(services.values()) / len(services)

    def largest_tenant(self) -> str:
        """Return the tenant with the most waiting work for its weight, under the fair policy; one must wait."""
        assert self._counters is not None, "the policy knows no tenants"
        services = self._services(self._counters)
        return max(services, key=lambda tenant: services[tenant])

    def _services(self, counters: Counters) -> dict[str, float]:
        """Return tenant |-> the virtual service of its waiting work."""
        tenants = ((str(tenant), work) for tenant, work in self._classes.items())
        return {tenant: _service(work, counters.weight_of(tenant)) for tenant, work in tenants}

    def _add_fair_shares(self, work: Work, job: Job, counters: Counters) -> None:
        """Add the tenant's own waiting work, and of each other tenant the part until its counter has caught up."""
        own = self._classes.get(job.tenant, Work())
        work.add_share(own)
        reaches = counters.counter_of(job.tenant) + _service(own, counters.weight_of(job.tenant))
        for tenant, waiting in self._classes.items():
            if tenant == job.tenant:
                continue
            assert isinstance(tenant, str)
            missing = reaches - counters.counter_of(tenant)
            amount = _service(waiting, counters.weight_of(tenant))
            if missing > 0:
                work.add_share(waiting, min(1.0, missing / amount))


def _service(work: Work, weight: float) -> float:
    return service(round(work.num_prompt_tokens), round(work.row_steps), weight)
