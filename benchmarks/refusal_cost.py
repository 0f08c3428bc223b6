"""CPU time that a refused call costs the gateway and its caller, without a model.

    python -m benchmarks.refusal_cost --json benchmarks/results/refusal_cost.json

A stand-in for a replica refuses every request. ``asked`` calls have a longer deadline than those that the stand-in
says it would refuse as well, so that the gateway asks it about each call; ``remembered`` calls are refused by the
gateway. A gateway with the real services runs in a process of its own; the caller is this process. Calls are PAUSE_S
apart, as in `benchmarks.overload_server`: their code is no longer in the processor's caches then, and they cost twice
as much as calls one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import numpy as np
import psutil

from benchmarks.common import Figure, make_parser, report
from benchmarks.gateway import FIRST_ID, end, read_line, run_gateway, status
from benchmarks.overload_calls import PROMPT, Door, Outcome, grpc_door, http_door
from quire import AsyncClient, SamplingParams
from quire.cluster.client.wire.grpc_status import from_grpc_error
from quire.cluster.os_utils.event_loop import run_event_loop
from quire.proto import inference_pb2, inference_pb2_grpc
from quire.proto.errors import Overloaded, QuireError
from quire.proto.refusal import RefusalScope
from quire.proto.stream import Finish, FinishReason, StatusQuery, Submit, TokenBatch
from quire.scheduler.core.state.outbox import error_finish
from quire.scheduler.service.zmq_mailbox import ZmqMailbox

NUM_TOKENS = 128
# kind of call |-> its deadline in seconds
TIMEOUT_S = {"asked": 3.0, "remembered": 2.0}
NUM_WARM_UP = 50
PAUSE_S = 0.02
REFUSAL = Overloaded(
    "request cmpl-0123456789abcdef would wait 1.23 s and then take 2.34 s, and its deadline is in 3 s",
    retry_after_s=1.23,
    scope=RefusalScope(hold_s=3600.0, max_timeout_s=2.5),
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--calls", type=int, default=200, help="of each kind")
    parser.add_argument("--role", choices=("replica", "gateway"), help=argparse.SUPPRESS)
    parser.add_argument("--job", default="{}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "replica":
        refuse_all(**json.loads(arguments.job))
    elif arguments.role == "gateway":
        run_event_loop(run_gateway(**json.loads(arguments.job)))
    else:
        report(asyncio.run(measure(arguments.calls)), arguments.json)


def refuse_all(folder: str) -> None:
    """Serve a gateway with refusals; the canary, of one token, is answered."""
    mailbox = ZmqMailbox(f"ipc://{folder}/replica")
    print(mailbox.endpoint, flush=True)
    while True:
        for gateway, message in mailbox.receive(10.0):
            if isinstance(message, StatusQuery):
                mailbox.send(gateway, status(message.query_id))
            elif isinstance(message, Submit) and message.sampling.max_tokens == 1:
                done = Finish(message.handle, FinishReason.LENGTH, num_completion_tokens=1)
                token = np.array([message.handle], np.int32), np.array([FIRST_ID], np.int32)
                mailbox.send(gateway, TokenBatch(1, *token, finished=(done,)))
            elif isinstance(message, Submit):
                mailbox.send(gateway, TokenBatch(0, finished=(error_finish(message.handle, REFUSAL),)))


@asynccontextmanager
async def running_gateway() -> AsyncIterator[tuple[psutil.Process, str, str]]:
    """Run a gateway of the stand-in; yield its process, gRPC target and URL."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:
        processes = [start("replica", {"folder": folder})]
        try:
            address = read_line(processes[0])
            processes.append(start("gateway", {"address": address, "listen": "127.0.0.1:0", "reuse": False}))
            target, url = read_line(processes[1]).split()
            yield psutil.Process(processes[1].pid), target, url
        finally:
            for process in reversed(processes):
                end(process)


def start(role: str, job: dict[str, object]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.refusal_cost", "--role", role, "--job", json.dumps(job)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def grpc_stream_door(channel: grpc.aio.Channel) -> Door:
    """Return a sender of streaming calls, which are refused."""
    stub = inference_pb2_grpc.InferenceStub(channel)
    request = inference_pb2.GenerateRequest(
        text=PROMPT, sampling=inference_pb2.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    )

    async def send(timeout_s: float | None) -> Outcome:
        try:
            async for _ in stub.GenerateStream(request, timeout=timeout_s):
                pass
        except grpc.aio.AioRpcError as error:
            refusal = from_grpc_error(error, "the gateway")
            return 0, refusal.reason, refusal.retry_delay_s
        raise AssertionError("the stand-in refuses all calls")

    return send


def client_door(client: AsyncClient) -> Door:
    """Return a sender by quire's own client."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)

    async def send(timeout_s: float | None) -> Outcome:
        try:
            await client.generate(PROMPT, params, timeout_s=timeout_s, resumable=False)
        except QuireError as error:
            return 0, error.reason, error.retry_delay_s
        raise AssertionError("the stand-in refuses all calls")

    return send


async def measure(num_calls: int) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    async with AsyncExitStack() as stack:
        gateway, target, url = await stack.enter_async_context(running_gateway())
        client = await stack.enter_async_context(AsyncClient(target))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
        doors = {
            "grpc": grpc_door(channel, NUM_TOKENS),
            "grpc_stream": grpc_stream_door(channel),
            "client": client_door(client),
            "http": await stack.enter_async_context(http_door(url, "demo", NUM_TOKENS)),
        }
        for (name, door), (kind, timeout_s) in itertools.product(doors.items(), TIMEOUT_S.items()):
            await repeat(door, timeout_s, NUM_WARM_UP, 0.0)
            figures |= await measure_door(f"refusal.{name}.{kind}", gateway, door, timeout_s, num_calls)
    return figures


async def repeat(door: Door, timeout_s: float, num_calls: int, pause_s: float) -> None:
    for _ in range(num_calls):
        _, reason, retry_s = await door(timeout_s)
        assert reason == REFUSAL.reason, f"the call was not refused as overloaded: {reason}"
        assert retry_s, "the refusal names no delay"
        await asyncio.sleep(pause_s)


async def measure_door(
    name: str, gateway: psutil.Process, door: Door, timeout_s: float, num_calls: int
) -> dict[str, Figure]:
    caller_s, gateway_s = time.process_time(), _cpu_s(gateway)
    await repeat(door, timeout_s, num_calls, PAUSE_S)
    times = {"caller_ms": time.process_time() - caller_s, "gateway_ms": _cpu_s(gateway) - gateway_s}
    return {
        f"{name}.{key}": Figure(1e3 * spent / num_calls, "ms", "per call") for key, spent in times.items()
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main()
