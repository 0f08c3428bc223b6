"""A gateway with a fleet, without Ray, as clients and operators see it while replicas and controllers change."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_fleet import DirectController, FakeLauncher
from fakes import oracle

from benchmarks.in_memory import MemoryStore
from quire.cluster.client.client import AsyncClient
from quire.cluster.client.wire.status import DeploymentInfo, FleetEvent, FleetInfo, ReplicaInfo
from quire.cluster.client.wire.tokens import Role, Token, TokenSet
from quire.cluster.config.deployment import Deployment
from quire.cluster.config.engine_options import EngineOptions
from quire.cluster.fleet.controller.fleet import Fleet
from quire.cluster.fleet.controller.fleet_state import DeploymentEntry, FleetState, ReplicaEntry, ReplicaState
from quire.cluster.fleet.replica.record import ReplicaRecord
from quire.cluster.fleet.routing.subset import SUBSET_SIZE
from quire.cluster.gateway.access.security import Security
from quire.cluster.gateway.admin.services import GatewayServices
from quire.cluster.gateway.grpc.server import Gateway
from quire.cluster.gateway.routing.controller_sync import ControllerSync
from quire.cluster.gateway.routing.served_models import ServedModels
from quire.cluster.os_utils.watched_file import constant
from quire.cluster.text.requests.outputs import RequestOutput
from quire.proto.errors import (
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    PermissionDenied,
    ReplicaUnavailable,
)
from quire.proto.faults import Fault, FaultKind
from quire.proto.sampling import SamplingParams

DEADLINE_S = 60.0
PROMPT = list(range(2, 30))
PARAMS = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
EXPECTED = oracle(PROMPT, 30, stops=())
# Users that each send one request after the other.
NUM_USERS = 8


class ServedFleet:
    """A fleet, its gateway and a client of the gateway."""

    def __init__(
        self,
        fleet: Fleet,
        controller: DirectController,
        client: AsyncClient,
        target: str,
        model: Path,
        models: ServedModels,
    ) -> None:
        self.fleet = fleet
        self.models = models
        self.controller = controller
        self.client = client
        self.target = target
        self._model = model

    def deployment(self, **options: Any) -> Deployment:
        return Deployment.from_table(
            {
                "model": str(self._model),
                "served_model_name": "tiny",
                "device": "cpu",
                "drain_grace_s": 0.2,
                **options,
            }
        )

    async def generate(self, **options: Any) -> RequestOutput:
        return await self.client.generate(PROMPT, PARAMS, **options)

    async def until(self, holds: Callable[[FleetInfo], bool]) -> FleetInfo:
        async with asyncio.timeout(DEADLINE_S):
            while not holds(status := await self.client.fleet()):
                await asyncio.sleep(0.05)
        return status

    async def until_ready(self, num_replicas: int) -> FleetInfo:
        return await self.until(
            lambda status: sum(replica.ready for replica in status.replicas) == num_replicas
        )


@pytest.fixture
def serve(make_model: Callable[..., Path]) -> Callable[..., Any]:
    model = make_model("llama")

    @asynccontextmanager
    async def serving(
        launcher: FakeLauncher,
        security: Security | None = None,
        token: str | None = None,
        subset_size: int = SUBSET_SIZE,
    ) -> AsyncIterator[ServedFleet]:
        fleet = Fleet(launcher, MemoryStore(), tick_s=0.05, canary_timeout_s=DEADLINE_S)
        await fleet.recover()
        runner = asyncio.create_task(fleet.run())
        controller, models = DirectController(fleet), ServedModels()
        sync = ControllerSync(controller, models, subset_size=subset_size)
        gateway = Gateway(GatewayServices.compose(models, security=security, fleet=sync))
        sync.start()
        target = await gateway.start()
        try:
            async with AsyncClient(target, token=token) as client:
                yield ServedFleet(fleet, controller, client, target, model, models)
        finally:
            await gateway.stop(0)
            await sync.close()
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
            await fleet.close()

    return serving


def has_moved(output: RequestOutput) -> bool:
    return output.outputs[0].timings.num_moves > 0


async def test_two_models_are_served_by_name(
    launcher: FakeLauncher, serve: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "quire")
    async with serve(launcher) as served:
        with pytest.raises(ModelNotFound, match="no model is served here yet"):
            await served.generate()
        assert not await served.client.is_ready()
        await served.client.deploy(served.deployment())
        await served.client.deploy(
            served.deployment(served_model_name="other", min_replicas=2, max_replicas=2)
        )
        status = await served.until_ready(3)
        for model in ("tiny", "other"):
            summaries = [line for line in caplog.messages if f": {model}: LlamaForCausalLM in " in line]
            assert len(summaries) == 1
            assert "at most" in summaries[0]
        assert sorted((entry.model, entry.target_replicas) for entry in status.deployments) == [
            ("other", 2),
            ("tiny", 1),
        ]
        assert {replica.state for replica in status.replicas} == {"ready"}
        assert sorted(model.name for model in await served.client.models()) == ["other", "tiny"]
        assert await served.client.is_ready()
        for name in ("tiny", "other"):
            output = await served.generate(model=name)
            assert (output.model, output.outputs[0].token_ids) == (name, EXPECTED)
        with pytest.raises(InvalidRequest, match="'tiny' and 'other' are served"):
            await served.generate()
        with pytest.raises(ModelNotFound, match="'gpt' is not served here"):
            await served.generate(model="gpt")
        await served.client.delete("other")
        await served.until_ready(1)
        assert (await served.generate()).outputs[0].token_ids == EXPECTED
        with pytest.raises(ModelNotFound):
            await served.client.delete("other")


async def test_requests_continue_on_the_ranks_of_a_scheduler_that_ended(
    launcher: FakeLauncher, serve: Callable[..., Any]
) -> None:
    launcher.replaces_schedulers = True
    async with serve(launcher) as served:
        await served.client.deploy(served.deployment())
        await served.until_ready(1)
        ((replica_id, replica),) = launcher.launched.items()
        running = [asyncio.create_task(served.generate()) for _ in range(3)]
        replica.kill("its process died")
        outputs = [*await asyncio.gather(*running), await served.generate()]
        assert [output.outputs[0].token_ids for output in outputs] == 4 * [EXPECTED]
        assert list(launcher.launched) == [replica_id]
        assert launcher.launched[replica_id] is not replica
        assert launcher.removed == []


async def test_requests_survive_updates_drains_failures_and_controller_loss(
    launcher: FakeLauncher, serve: Callable[..., Any]
) -> None:
    """A rolling update, a drain, a failed replica and a controller outage under steady load."""
    async with serve(launcher) as served:
        await served.client.deploy(served.deployment(min_replicas=2, max_replicas=2))
        await served.until_ready(2)
        outputs: list[tuple[list[int], RequestOutput]] = []
        numbers, may_stop = itertools.count(), asyncio.Event()

        async def load() -> None:
            while not may_stop.is_set():
                # Each request has another beginning, so that no replica has it in its cache.
                turn, number = divmod(next(numbers), 26)
                prompt = [2 + number, 2 + turn % 26, *PROMPT]
                outputs.append((prompt, await served.client.generate(prompt, PARAMS)))

        async with asyncio.TaskGroup() as users:
            for _ in range(NUM_USERS):
                users.create_task(load())
            await update_drain_and_kill(served, launcher)
            async with asyncio.timeout(DEADLINE_S):  # the requests of the killed replica move
                while len(outputs) <= 50 or not any(has_moved(output) for _, output in outputs):
                    await asyncio.sleep(0.01)
            may_stop.set()
        for prompt, output in outputs:
            assert output.outputs[0].token_ids == oracle(prompt, 30, stops=())


async def update_drain_and_kill(served: ServedFleet, launcher: FakeLauncher) -> None:
    """Update two replicas, drain one, and kill one while the controller is away."""
    before = {replica.replica_id for replica in (await served.client.fleet()).replicas}
    await served.client.deploy(served.deployment(min_replicas=2, max_replicas=2, weights_version="2"))
    await served.until(
        lambda status: (
            sum(replica.ready for replica in status.replicas) == 2
            and not before & {replica.replica_id for replica in status.replicas if replica.ready}
        )
    )
    (drained, *_) = [each for each in (await served.client.fleet()).replicas if each.ready]
    assert await served.client.drain(drained.replica_id) == (drained.replica_id,)
    await served.until(
        lambda status: not any(r.ready for r in status.replicas if r.replica_id == drained.replica_id)
    )
    await served.until_ready(2)
    served.controller.fleet = None
    dead = next(each for each in (await served.client.fleet()).replicas if each.ready)
    launcher.launched[dead.replica_id].kill_in_step("rank 1 was killed")
    status = await served.until(lambda status: "away" in status.problem)
    assert len(status.replicas) > 0
    with pytest.raises(ReplicaUnavailable, match="away"):
        await served.client.drain(dead.replica_id)
    served.controller.fleet = served.fleet
    await served.until(lambda status: not status.problem)
    await served.until_ready(2)


async def test_operator_scales_a_model_and_watches_the_fleet(
    launcher: FakeLauncher, serve: Callable[..., Any]
) -> None:
    async with serve(launcher) as served:
        client, deployment = served.client, served.deployment()
        events = client.watch_events()
        await client.deploy(deployment)
        await served.until_ready(1)
        assert await client.set_scale("tiny", 2, 2) == (2, 2)
        await served.until_ready(2)
        assert await client.set_scale("tiny", min_replicas=1) == (1, 2)
        assert (await client.fleet()).deployments[0].version == deployment.version
        with pytest.raises(ModelNotFound):
            await client.set_scale("other", 1, 1)
        with pytest.raises(ConfigError, match="max_replicas"):
            await client.set_scale("tiny", 3, 2)
        with pytest.raises(InvalidRequest, match="waits for no other replica"):
            await client.undrain(next(iter(launcher.known())))
        (load,) = await client.load()
        assert load.num_ready_replicas == 2
        await client.delete("tiny")
        seen: list[FleetEvent] = []
        async with asyncio.timeout(DEADLINE_S):
            while not seen or not (isinstance(seen[-1].object, DeploymentInfo) and seen[-1].is_removed):
                seen.append(await anext(events))
        await events.aclose()
        bounds = [
            (each.object.min_replicas, each.object.max_replicas)
            for each in seen
            if isinstance(each.object, DeploymentInfo)
        ]
        assert (2, 2) in bounds
        assert bounds[-1] == (1, 2)
        ready = {
            each.object.replica_id
            for each in seen
            if isinstance(each.object, ReplicaInfo) and each.object.ready
        }
        assert len(ready) == 2


async def test_request_scales_a_model_from_zero(launcher: FakeLauncher, serve: Callable[..., Any]) -> None:
    async with serve(launcher) as served:
        await served.client.deploy(
            served.deployment(min_replicas=0, idle_timeout_s=0.5, down_delay_s=0.0, cooldown_s=0.0)
        )
        await served.until(lambda status: len(status.deployments) == 1)
        for _ in range(2):
            assert (await served.generate()).outputs[0].token_ids == EXPECTED
            await served.until(lambda status: not launcher.known())
            assert await served.client.is_ready()  # a request would start a replica


async def test_only_operators_see_and_change_the_fleet(
    launcher: FakeLauncher, serve: Callable[..., Any]
) -> None:
    operator = frozenset({Role.OPERATOR})
    security = Security(tokens=constant(TokenSet([Token.of("users"), Token.of("operators", roles=operator)])))
    async with (
        serve(launcher, security, "operators") as served,
        AsyncClient(served.target, token="users") as user,
    ):
        for call in (
            user.deploy(served.deployment()),
            user.delete("tiny"),
            user.drain("replica"),
            user.fleet(),
            user.status(),
            user.inject_fault(Fault(FaultKind.KILL), rank=0),
        ):
            with pytest.raises(PermissionDenied, match="needs a token with the role operator"):
                await call
        assert (await served.client.fleet()).deployments == ()
        await served.client.deploy(served.deployment())
        await served.until_ready(1)
        with pytest.raises(ConfigError, match=r"engine\.model is empty"):
            await served.client.deploy(Deployment(EngineOptions("", served_model_name="tiny")))
        with pytest.raises(InvalidRequest, match="none of the replicas and nodes"):
            await served.client.drain("nobody")


async def test_gateway_uses_a_subset_of_a_large_fleet_and_operates_all_of_it(
    launcher: FakeLauncher, serve: Callable[..., Any]
) -> None:
    async with serve(launcher, subset_size=2) as served:
        await served.client.deploy(served.deployment(min_replicas=4, max_replicas=4))
        await served.until_ready(4)
        pool = served.models.find("tiny").pool
        used, unused = set(pool.clients), set(pool.unused_ids)
        assert (len(used), len(unused)) == (2, 2)
        for cached in (False, True):
            status = await served.client.fleet(cached=cached)
            assert {each.replica_id for each in status.replicas if each.kv.num_blocks} == used | unused
        assert sorted(await served.client.flush_cache()) == sorted(used | unused)
        assert (await served.client.block_map(min(unused))).num_blocks > 0
        await served.client.pause()
        await served.until(lambda status: all(each.paused for each in status.replicas))
        await served.client.resume()
        for replica_id in used:  # both of its replicas are lost: it goes on with others
            launcher.launched[replica_id].kill("its process died")
        assert (await served.generate()).outputs[0].token_ids == EXPECTED
        await served.until(lambda status: len(pool.clients) == 2 and not used & set(pool.clients))


class ScriptedController:
    """A Controller that returns the states that a test puts into it, one after the other."""

    def __init__(self) -> None:
        self._states: asyncio.Queue[FleetState] = asyncio.Queue()
        self.num_watches = 0

    def put(
        self,
        version: str,
        *models: Deployment,
        replicas: Sequence[ReplicaEntry] = (),
        gateways: tuple[str, ...] | None = None,
    ) -> None:
        deployments = tuple(DeploymentEntry(model, 1) for model in models)
        self._states.put_nowait(FleetState(version, deployments, tuple(replicas), gateways=gateways))

    async def keys(self) -> None:
        return None

    async def watch(self, gateway_id: str, since: str, timeout_s: float) -> FleetState:
        self.num_watches += 1
        return await self._states.get()

    async def report(self, gateway_id: str, demand: Mapping[str, object]) -> None:
        pass


def ready_replica(replica_id: str, deployment: Deployment) -> ReplicaEntry:
    name, version = deployment.name, deployment.version
    record = ReplicaRecord(
        replica_id, name, version, "ipc:///nowhere/at-all", 64, "fake", ("node-0",) * 2, (1, 2)
    )
    return ReplicaEntry(replica_id, name, version, ReplicaState.READY, record=record)


async def test_new_replica_of_a_deleted_model_is_ignored(make_model: Callable[..., Path]) -> None:
    deployment = Deployment.from_table(
        {"model": str(make_model("llama")), "served_model_name": "tiny", "device": "cpu"}
    )
    controller, models = ScriptedController(), ServedModels()
    sync = ControllerSync(controller, models)  # type: ignore[arg-type]
    sync.start()
    try:
        controller.put("1", deployment, replicas=[ready_replica("a", deployment)])
        while "tiny" not in models:
            await models.wait_for_change()
        # The model is deleted while one of its replicas becomes ready and the other still serves.
        controller.put("2", replicas=[ready_replica(name, deployment) for name in "ab"])
        controller.put("3", deployment, replicas=[ready_replica("c", deployment)])
        while "tiny" in models:
            await models.wait_for_change()
        while "tiny" not in models:
            await models.wait_for_change()
        while controller.num_watches < 4:
            await asyncio.sleep(0.01)
        assert list(models.find("tiny").pool.clients) == ["c"]
        assert sync.describe().problem == ""
    finally:
        await sync.close()


async def test_failure_to_apply_a_state_is_reported_and_the_next_state_applied(
    make_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment.from_table({"model": str(make_model("llama")), "device": "cpu"})
    monkeypatch.setattr(
        "quire.cluster.gateway.routing.controller_sync.load_tokenizer",
        lambda model: dict[str, Any]()["unexpected"],
    )
    controller, models = ScriptedController(), ServedModels()
    sync = ControllerSync(controller, models)  # type: ignore[arg-type]
    sync.start()
    try:
        controller.put("1", deployment)
        while "cannot apply the fleet's state: KeyError('unexpected')" not in sync.describe().problem:
            await asyncio.sleep(0.01)
        monkeypatch.undo()
        controller.put("2", deployment)
        while deployment.name not in models:
            await models.wait_for_change()
    finally:
        await sync.close()
    assert "the fleet's state is out of date" in caplog.text


async def test_limits_are_those_of_the_replicas_wherever_they_run(make_model: Callable[..., Path]) -> None:
    """A deployment does not say that its nodes have no GPUs: the gateway took the limits of a large one."""
    deployment = Deployment.from_table({"model": str(make_model("llama")), "served_model_name": "tiny"})
    entry = ready_replica("a", deployment)
    assert entry.record is not None
    record = replace(entry.record, device="cpu", dtype="float32", max_num_seqs=7, max_num_batched_tokens=99)
    entry = replace(entry, record=record)
    controller, models = ScriptedController(), ServedModels()
    sync = ControllerSync(controller, models)  # type: ignore[arg-type]
    sync.start()
    try:
        controller.put("1", deployment, replicas=[entry])
        while "tiny" not in models or not models.find("tiny").pool.clients:
            await models.wait_for_change()
        config = models.find("tiny").config
        assert (config.parallel.device, config.model.dtype) == ("cpu", "float32")
        assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (7, 99)
        with pytest.raises(InvalidRequest, match="runs at most 7 at once"):
            models.find("tiny").checker.check([1], SamplingParams(beam_width=8))
    finally:
        await sync.close()


async def test_gateway_parts_from_replicas_that_others_use(make_model: Callable[..., Path]) -> None:
    """It learns that there are other gateways, and later that they are gone."""
    deployment = Deployment.from_table(
        {"model": str(make_model("llama")), "served_model_name": "tiny", "device": "cpu"}
    )
    controller, models = ScriptedController(), ServedModels()
    sync = ControllerSync(controller, models, subset_size=2)  # type: ignore[arg-type]
    sync.start()
    replicas = [ready_replica(f"replica-{number}", deployment) for number in range(40)]
    others = tuple(f"gateway-{number}" for number in range(19))
    try:
        for version, gateways in enumerate([(), others, (), ("gateway-0",), others]):
            controller.put(str(version), deployment, replicas=replicas, gateways=gateways)
            while controller.num_watches < version + 2:
                await asyncio.sleep(0.01)
            pool = models.find("tiny").pool
            num_used = len(pool.clients)
            assert sorted([*pool.clients, *pool.unused_ids]) == sorted(each.replica_id for each in replicas)
            if version == 0:
                assert num_used == 2
            elif version == 3:
                assert num_used == 40  # of two gateways, each uses all
            else:
                assert 0 < num_used < 20  # the last that was known of the others holds
    finally:
        await sync.close()
