"""What the Python benchmarks share: JSON lines, quantiles, the baseline's co-process."""

from __future__ import annotations

import json
import os
import platform
import subprocess

import boxwood


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[int(q * (len(values) - 1))]


def conditions(client: boxwood.Client) -> str:
    info = client.info()
    return f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, pool {info.pool_bytes_total >> 30} GiB, other load {os.getloadavg()[0]:.2f}"


def emit(bench: str, metric: str, value: float, unit: str, n: int, how: str) -> None:
    line = {"bench": bench, "metric": metric, "value": value, "unit": unit, "n": n, "conditions": how}
    print(json.dumps(line), flush=True)


class Spawner:
    """posix_spawn, exec and wait of /bin/true, on request."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def run(self) -> float:
        """One spawn in milliseconds."""
        self._process.stdin.write("1\n")
        return int(self._process.stdout.readline().split()[0]) / 1e6

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
