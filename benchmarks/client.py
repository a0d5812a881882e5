"""What the Python client costs beside raw gRPC: calls a second and added latency, both faces, 1 and 256 at once.

The call is GetNode, which the daemon answers from memory: what is left is transport and
client. Raw is the same stub over a channel with the same options, and does no more than
the call. The two take turns in short rounds, so that whatever else the host does meets both.

Metrics, of which added_us may be below 0 where it drowns in noise:
    sync1.calls_per_s, sync1.raw_calls_per_s, sync1.added_us.p50, sync1.added_us.p95
    sync256.calls_per_s, async1.added_us.p50, async256.calls_per_s ...: the same of each face, 1 and 256 at once
    handles_1000.kib: memory of 1,000 sandboxes' handles
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import threading
import time
import tracemalloc
from collections.abc import Callable

import boxwood
import boxwood.aio
import grpc
import grpc.aio
from boxwood._channel import options as channel_options
from boxwood._proto import boxwood_pb2 as pb
from boxwood._proto import boxwood_pb2_grpc
from report import conditions, emit, quantile

parser = argparse.ArgumentParser()
parser.add_argument("--image", required=True)
parser.add_argument("--long", action="store_true")
options = parser.parse_args()
ROUNDS = 12 if options.long else 6
TARGET = "unix:" + os.environ["BOXWOOD_ADDRESS"]

Measured = tuple[list[float], float]


def blocking(call: Callable[[], object], at_once: int, each: int) -> Measured:
    """Latencies in ms, and seconds of all of it."""
    took: list[list[float]] = [[] for _ in range(at_once)]
    gate = threading.Barrier(at_once + 1)

    def work(mine: list[float]) -> None:
        gate.wait()
        for _ in range(each):
            start = time.perf_counter()
            call()
            mine.append((time.perf_counter() - start) * 1e3)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in took]
    for thread in threads:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return [ms for mine in took for ms in mine], time.perf_counter() - start


async def waiting(call: Callable[[], object], at_once: int, each: int) -> Measured:
    """The same in one loop."""
    took: list[float] = []

    async def work() -> None:
        for _ in range(each):
            start = time.perf_counter()
            await call()
            took.append((time.perf_counter() - start) * 1e3)

    start = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(at_once)))
    return took, time.perf_counter() - start


def report(name: str, raw: list[Measured], client: list[Measured], how: str) -> None:
    count = sum(len(ms) for ms, _ in client)
    for kind, rounds in (("raw_", raw), ("", client)):
        per_s = quantile([len(ms) / seconds for ms, seconds in rounds], 0.5)
        emit("client", f"{name}.{kind}calls_per_s", per_s, "1/s", count, how)
    # Each round against the one beside it.
    for label, q in (("p50", 0.5), ("p95", 0.95)):
        added = [quantile(c, q) - quantile(r, q) for (r, _), (c, _) in zip(raw, client, strict=True)]
        emit("client", f"{name}.added_us.{label}", quantile(added, 0.5) * 1e3, "us", count, how)


def sync_face(client: boxwood.Client, node_id: str, where: str) -> None:
    with grpc.insecure_channel(TARGET, options=channel_options(TARGET)) as channel:
        stub = boxwood_pb2_grpc.BoxwoodStub(channel)
        calls = (
            lambda: stub.GetNode(pb.GetNodeRequest(node_id=node_id), timeout=30),
            lambda: client.node(node_id),
        )
        for at_once, each in ((1, 400), (256, 6)):
            for call in calls:
                blocking(call, at_once, 5)
            pairs = [[blocking(call, at_once, each) for call in calls] for _ in range(ROUNDS)]
            how = f"GetNode, {at_once} threads at once, beside raw gRPC; {where}"
            report(f"sync{at_once}", [p[0] for p in pairs], [p[1] for p in pairs], how)


async def async_face(node_id: str, where: str) -> None:
    async with (
        boxwood.aio.connect(os.environ["BOXWOOD_ADDRESS"]) as client,
        grpc.aio.insecure_channel(TARGET, options=channel_options(TARGET)) as channel,
    ):
        stub = boxwood_pb2_grpc.BoxwoodStub(channel)
        calls = (
            lambda: stub.GetNode(pb.GetNodeRequest(node_id=node_id), timeout=30),
            lambda: client.node(node_id),
        )
        for at_once, each in ((1, 400), (256, 6)):
            for call in calls:
                await waiting(call, at_once, 5)
            pairs = [[await waiting(call, at_once, each) for call in calls] for _ in range(ROUNDS)]
            how = f"GetNode, {at_once} tasks at once in one loop, beside raw grpc.aio; {where}"
            report(f"async{at_once}", [p[0] for p in pairs], [p[1] for p in pairs], how)


def handles(client: boxwood.Client, tree: boxwood.Tree, where: str) -> None:
    count = 1000
    message = client._caller.unary("ListSandboxes", pb.ListSandboxesRequest(tree_id=tree.id)).sandboxes[0]
    wire = message.SerializeToString()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    # Each of a message of its own, as it comes from the wire.
    kept = [boxwood.Sandbox(client, pb.Sandbox.FromString(wire), owned=False) for _ in range(count)]
    gc.collect()
    kib = (tracemalloc.get_traced_memory()[0] - before) / 1024
    tracemalloc.stop()
    assert len(kept) == count
    emit("client", "handles_1000.kib", kib, "KiB", count, f"allocated by 1000 handles of sandboxes; {where}")


with (
    boxwood.connect(os.environ["BOXWOOD_ADDRESS"]) as client,
    client.create_tree(image=options.image) as tree,
):
    where = conditions(client)
    node_id = tree.sandbox.run(["/bin/true"], check=True).node.id
    sync_face(client, node_id, where)
    asyncio.run(async_face(node_id, where))
    handles(client, tree, where)
