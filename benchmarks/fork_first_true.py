"""From the request of a fork to the exit of its first command, as the Python client sees it."""

import argparse
import os
import time

import boxwood
from report import conditions, emit, quantile

parser = argparse.ArgumentParser()
parser.add_argument("--image", required=True)
parser.add_argument("--long", action="store_true")
options = parser.parse_args()

with (
    boxwood.connect(os.environ["BOXWOOD_ADDRESS"]) as client,
    client.create_tree(image=options.image) as tree,
):
    where = conditions(client)
    node = tree.sandbox.run(["/bin/touch", "/file"], ack="captured").node
    took = []
    for turn in range(500 if options.long else 40):
        start = time.perf_counter()
        with node.fork(1, min_ready=1) as children:
            children.ready[0].run(["/bin/true"], check=True)
            took.append((time.perf_counter() - start) * 1e3)
    took = took[3:]
    emit(
        "fork",
        "empty.first_true_ms.p50",
        quantile(took, 0.5),
        "ms",
        len(took),
        f"request to the first command's exit, Python client; {where}",
    )
