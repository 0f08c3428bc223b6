"""InjectFault: refused unless the server permits it, and checked before anything is harmed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from recording_injector import RecordingInjector
from serving import ServerFactory

from quire import AsyncClient
from quire.cluster.gateway.admin.engine_control import inject_fault
from quire.proto import admin_pb2
from quire.proto.errors import ConfigError, InvalidRequest
from quire.proto.faults import Fault, FaultKind


async def test_faults_are_refused_by_default(serve: ServerFactory) -> None:
    async with serve() as server, AsyncClient(server.target) as client:
        with pytest.raises(ConfigError, match="--enable-chaos"):
            await client.inject_fault(Fault(FaultKind.KILL), rank=0)
        assert (await client.status())[0].ready


async def test_faults_reach_the_process_that_is_named(serve: ServerFactory) -> None:
    async with serve() as server:
        injector = RecordingInjector()
        services = replace(server.services, faults=injector)

        async def inject(**fields: Any) -> admin_pb2.InjectFaultResponse:
            return await inject_fault(services, admin_pb2.InjectFaultRequest(**fields))

        kinds = admin_pb2.FAULT_KIND_SLOW, admin_pb2.FAULT_KIND_KILL, admin_pb2.FAULT_KIND_EXCEPTION
        slow, kill, exception = kinds
        response = await inject(replica_id="rep", rank=1, kind=slow, delay_s=0.5, duration_s=2.0)
        assert (response.replica_id, response.pid) == ("replica-0", 4711)
        await inject(kind=kill)
        assert injector.injected == [
            ("replica-0", 1, Fault(FaultKind.SLOW, 0.5, 2.0)),
            ("replica-0", None, Fault(FaultKind.KILL)),
        ]
        for fields, problem in (
            ({"kind": exception}, "only ranks have"),
            ({"rank": 0}, "no kind of fault"),
            ({"rank": 0, "kind": slow, "delay_s": 1.0}, "duration_s"),
            ({"replica_id": "other", "kind": kill}, "there are replica-0"),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                await inject(**fields)
        assert len(injector.injected) == 2
