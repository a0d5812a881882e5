"""Turns of /bin/true through the Python client, verdict and durable node included."""

import argparse
import os
import threading
import time

import boxwood
from report import Spawner, conditions, emit, quantile

parser = argparse.ArgumentParser()
parser.add_argument("--image", required=True)
parser.add_argument("--spawn", required=True)
parser.add_argument("--long", action="store_true")
options = parser.parse_args()
rounds = 2000 if options.long else 300

with (
    boxwood.connect(os.environ["BOXWOOD_ADDRESS"]) as client,
    client.create_tree(image=options.image) as tree,
):
    where = conditions(client)
    spawner = Spawner(options.spawn)
    turns, spawns = [], []
    for number in range(rounds + 10):
        spawn = spawner.run()
        start = time.perf_counter()
        turn = tree.sandbox.run(["/bin/true"], check=True)
        took = (time.perf_counter() - start) * 1e3
        assert turn.verdict == "none" and turn.node.id
        if number >= 10:  # the first warm caches up
            turns.append(took)
            spawns.append(spawn)
    spawner.close()
    how = f"/bin/true through the Python client, interleaved with a spawn; {where}"
    emit(
        "turn",
        "spawn_ms.p50",
        quantile(spawns, 0.5),
        "ms",
        len(spawns),
        f"posix_spawn, exec and wait of /bin/true from a static C program; {where}",
    )
    emit("turn", "turn_ms.p50", quantile(turns, 0.5), "ms", len(turns), how)
    emit("turn", "turn_ms.p95", quantile(turns, 0.95), "ms", len(turns), how)
    emit("turn", "ratio_to_spawn.p50", quantile(turns, 0.5) / quantile(spawns, 0.5), "ratio", len(turns), how)

    # 64 sandboxes at once, each with a thread of its own.
    each = 50 if options.long else 15
    with tree.root.fork(64, min_ready=64) as children:
        gate = threading.Barrier(65)
        failures = []

        def walk(sandbox: boxwood.Sandbox) -> None:
            gate.wait()
            try:
                for _ in range(each):
                    sandbox.run(["/bin/true"], check=True)
            except Exception as error:  # reported below; the others go on
                failures.append(error)

        threads = [threading.Thread(target=walk, args=(child,)) for child in children.ready]
        for thread in threads:
            thread.start()
        gate.wait()
        start = time.perf_counter()
        for thread in threads:
            thread.join()
        took = time.perf_counter() - start
        if failures:
            raise failures[0]
    emit(
        "turn",
        "turn64.per_s",
        64 * each / took,
        "1/s",
        64 * each,
        f"64 sandboxes at once, one Python process with a thread each; {where}",
    )
