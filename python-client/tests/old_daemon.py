"""A daemon of version 0.1: the fake, over the stubs of that version. Prints its socket, ends with its input.

In a process of its own: the two versions' descriptors can't be in one.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import golden_v01
import golden_v01.boxwood_pb2
import golden_v01.boxwood_pb2_grpc
import golden_v01.status_pb2

# The fake finds these stubs where it looks for the package's own.
package = types.ModuleType("boxwood")
package.__path__ = []
sys.modules["boxwood"] = package
sys.modules["boxwood._proto"] = golden_v01
for name in ("boxwood_pb2", "boxwood_pb2_grpc", "status_pb2"):
    sys.modules[f"boxwood._proto.{name}"] = sys.modules[f"golden_v01.{name}"]

from fakeserver import FakeDaemon  # noqa: E402 - after the stubs are in their place

daemon = FakeDaemon(Path(sys.argv[1])).start()
print(daemon.socket, flush=True)
sys.stdin.read()
daemon.stop()
