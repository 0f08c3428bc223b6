"""Ranks in real processes, on one host and on two: tokens are transformers', also after ranks were killed.

Two hosts are two network and process namespaces, which takes the superuser.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from draft_heads import add_mtp, write_eagle3
from far_network import NetworkNotPermitted, open_network, run
from process_ranks import ProcessRanks
from ranked_driver import RankedDriver
from reference import Reference, prompts_of

from benchmarks.draft_lengths import fixed_lengths
from quire.cluster.config.engine_options import DEMO_HEAD_PATH, DEMO_MODEL_PATH, EngineOptions
from quire.cluster.config.machine import Machine
from quire.cluster.config.resolve import resolve
from quire.proto.config import EngineConfig, SpeculativeConfig
from quire.proto.errors import RankFailed
from quire.scheduler.kv.kv_tiers import KvTiers

NUM_BLOCKS, MAX_TOKENS = 96, 24
# Too few for two sequences of the longest prompts.
FEW_BLOCKS = 18
HOST = "127.0.0.1"
ALL_TO_ALL = {"enable_expert_parallel": True, "all2all_backend": "all_to_all"}


@dataclass(frozen=True)
class Case:
    """Ranks that share a model, and those of them on another host.

    Attributes:
        head: method of speculative decoding by a head, which the first stage has; empty for none.
    """

    kind: str
    pp: int
    tp: int
    far: tuple[int, ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    head: str = ""

    @property
    def num_blocks(self) -> int:
        """Return the blocks of each rank: groups that attend for their own sequences divide these."""
        return FEW_BLOCKS if "enable_dp_attention" in dict(self.settings) else NUM_BLOCKS

    def __str__(self) -> str:
        where = f", ranks {self.far} far" if self.far else ""
        others = [*dict(self.settings), *([self.head] if self.head else [])]
        return f"{self.kind}, {self.pp} x {self.tp}{where}{', '.join(['', *others])}"


# Groups of ranks attend each for sequences of its own, and tokens travel to the experts of all.
OWN_TOKENS = (*ALL_TO_ALL.items(), ("enable_dp_attention", True))
PAIRS = (*OWN_TOKENS, ("dp_attention_size", 2))
DRAFTS = (("speculative", SpeculativeConfig("ngram", 4)),)
CASES = [
    Case("llama", 3, 1, settings=DRAFTS),
    pytest.param(Case("llama", 4, 1, settings=DRAFTS), marks=pytest.mark.slow),
    pytest.param(Case("llama", 2, 2, far=(1, 2)), marks=pytest.mark.slow),
    pytest.param(Case("demo", 2, 1, head="eagle3"), marks=pytest.mark.slow),
    pytest.param(Case("llama", 2, 2, head="mtp"), marks=pytest.mark.slow),
    pytest.param(Case("llama", 3, 1, far=(1,), head="eagle3"), marks=pytest.mark.slow),
    pytest.param(Case("llama", 2, 2, far=(2, 3), head="eagle3"), marks=pytest.mark.slow),
    Case("qwen3_moe", 1, 2, settings=tuple(ALL_TO_ALL.items())),
    pytest.param(Case("llama", 2, 2), marks=pytest.mark.slow),
    pytest.param(Case("llama", 4, 1, far=(1, 3), settings=DRAFTS), marks=pytest.mark.slow),
    pytest.param(Case("qwen3_moe", 2, 2, settings=tuple(ALL_TO_ALL.items())), marks=pytest.mark.slow),
    pytest.param(Case("qwen3_moe", 1, 4, settings=tuple(ALL_TO_ALL.items())), marks=pytest.mark.slow),
    Case("deepseek_v3", 1, 4, settings=PAIRS),
    pytest.param(Case("deepseek_v3", 1, 4, far=(2, 3), settings=PAIRS), marks=pytest.mark.slow),
    pytest.param(Case("deepseek_v3", 1, 4, far=(1, 2), settings=PAIRS), marks=pytest.mark.slow),
    pytest.param(Case("deepseek_v3", 1, 4, settings=OWN_TOKENS), marks=pytest.mark.slow),
    pytest.param(Case("deepseek_v3", 1, 2, far=(1,), settings=OWN_TOKENS), marks=pytest.mark.slow),
    pytest.param(Case("deepseek_v3", 1, 2, settings=OWN_TOKENS), marks=pytest.mark.slow),
]


@contextmanager
def hosts(case: Case) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the address of the first host, and the prefix of the commands of each rank."""
    num_ranks = case.pp * case.tp
    with ExitStack() as stack:
        if not case.far:
            yield HOST, [[] for _ in range(num_ranks)]
            return
        try:
            network = open_network(stack, has_faults=False)
            far = [*network.inside, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
            run(*far, "true")
        except NetworkNotPermitted as error:
            pytest.skip(str(error))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this user may not make a process namespace: {error.stderr.strip()}")
        yield network.near_ip, [far if rank in case.far else [] for rank in range(num_ranks)]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def folder(case: Case, make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    if case.kind == "demo":
        return DEMO_MODEL_PATH
    found = make_model(case.kind, seed=7, num_hidden_layers=4)
    if case.head != "mtp":
        return found
    return add_mtp(found, tmp_path_factory.mktemp("mtp") / "model", mimo=False)


@pytest.fixture(autouse=True)
def all_steps_draft() -> Iterator[None]:
    """Let steps with a speculator draft, whatever this machine's times say."""
    with fixed_lengths(100):
        yield


@pytest.fixture(scope="module")
def ranks(
    case: Case, folder: Path, engine_config: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessRanks]:
    config = engine_config(
        folder, case.tp, pp=case.pp, block_size=4, num_blocks=case.num_blocks, max_num_seqs=4,
        max_num_batched_tokens=24, **dict(case.settings),
    )  # fmt: skip
    if case.head:
        config = replace(config, speculative=head_of(folder, case.head, tmp_path_factory.mktemp("head")))
    with hosts(case) as (address, prefixes), running(config, address, prefixes) as started:
        yield started


def head_of(model: Path, method: str, empty: Path) -> SpeculativeConfig:
    """Return the configuration of a head for a model; one of EAGLE-3 is written into an empty folder."""
    head = str(DEMO_HEAD_PATH) if model == DEMO_MODEL_PATH else None
    if method == "eagle3" and head is None:
        shape = json.loads((model / "config.json").read_text())
        head = str(write_eagle3(empty / method, shape["vocab_size"], num_layers=shape["num_hidden_layers"]))
    text = json.dumps({"method": method, "model": head, "num_speculative_tokens": 3})
    options = EngineOptions(
        str(model), device="cpu", speculative_config=text, dtype="float32", max_model_len=256
    )
    speculative = resolve(options, Machine(1, 0)).speculative
    assert speculative is not None
    return speculative


@contextmanager
def running(config: EngineConfig, address: str, prefixes: list[list[str]]) -> Iterator[ProcessRanks]:
    assert config.cache.num_kv_blocks is not None
    started = ProcessRanks(config, config.cache.num_kv_blocks, address, prefixes)
    try:
        started.start()
        yield started
    finally:
        started.close()


def open_driver(ranks: ProcessRanks, most_blocks: int = NUM_BLOCKS) -> RankedDriver:
    num_blocks = min(most_blocks, ranks.num_blocks)
    driver = RankedDriver(ranks.config.with_num_blocks(num_blocks), lambda plan: ranks.gather(0.0))
    driver.group = ranks  # type: ignore[assignment]
    return driver


def add_all(driver: RankedDriver, prompts: dict[int, list[int]]) -> None:
    for handle, prompt in prompts.items():
        driver.add(handle, prompt, max_tokens=MAX_TOKENS, ignore_eos=True)


def step_on(driver: RankedDriver, depth: int) -> None:
    while True:
        driver.step(depth=depth)


def test_tokens_are_those_of_transformers(ranks: ProcessRanks, folder: Path) -> None:
    """With chunked prefill and preemption."""
    driver, prompts = open_driver(ranks, 28), dict(enumerate(prompts_of([17, 22, 9, 13], seed=3)))
    add_all(driver, prompts)
    driver.finish(prompts, Reference(folder), MAX_TOKENS)
    stats = driver.scheduler.stats
    assert stats.num_drafts > 0 or ranks.config.speculative is None
    if folder == DEMO_MODEL_PATH:
        assert sum(stats.num_accepted) > 0.2 * stats.num_draft_tokens > 0
    if ranks.config.parallel.num_kv_partitions < len(prompts):  # otherwise each sequence has one to itself
        assert driver.scheduler.stats.num_preemptions > 0


def test_tokens_stay_after_a_rank_of_each_stage_is_killed(
    case: Case, ranks: ProcessRanks, folder: Path
) -> None:
    driver, prompts = open_driver(ranks), dict(enumerate(prompts_of([30, 5, 11], seed=5)))
    add_all(driver, prompts)
    for number, stage in enumerate(range(case.pp), 1):
        while min(map(len, driver.outputs.values())) < number * MAX_TOKENS // (2 * case.pp):
            driver.step(depth=case.pp + 1)
        killed = stage * case.tp + case.tp - 1
        ranks.kill(killed)
        with pytest.raises(RankFailed):
            step_on(driver, case.pp + 1)
        driver.scheduler.interrupt(RankFailed(killed, "killed", None), driver.now)
        ranks.replace(killed)
        driver.scheduler.resume(driver.scheduler.epoch + 1, KvTiers.NONE, has_new_ranks=True)
    driver.finish(prompts, Reference(folder), MAX_TOKENS)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_new_ranks_of_stages_read_the_blocks_of_those_before(
    tp: int, tmp_path: Path, make_model: Callable[..., Path], engine_config: Any
) -> None:
    """Stages have as many layers of the same shapes each: the files of one are not taken for those of another."""
    folder = make_model("llama", seed=7, num_hidden_layers=4)
    config = engine_config(
        folder, tp, pp=2, block_size=4, num_blocks=NUM_BLOCKS, max_num_seqs=4, num_host_blocks=NUM_BLOCKS
    )
    disk = {"kv_disk": f"{tmp_path / 'kv'}:64MiB", "kv_key": str(tmp_path / "key")}
    config = replace(config, cache=replace(config.cache, **disk))
    prompts, num_read = dict(enumerate(prompts_of([30, 21], seed=5))), []
    for _ in range(2):
        with running(config, HOST, [[] for _ in range(2 * tp)]) as ranks:
            driver = open_driver(ranks)
            driver.run()  # the ranks tell what they have
            add_all(driver, prompts)
            driver.finish(prompts, Reference(folder), MAX_TOKENS)
            driver.now += 1.0  # the machine is idle
            driver.run()
            stored = driver.scheduler.blocks.stored
            assert stored.is_settled
            num_read.append(stored.num_read_blocks)
    assert num_read == [0, 30 // 4 + 21 // 4]
