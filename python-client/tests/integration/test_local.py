"""boxwood.local(): a daemon that is found or started, and what it is kept to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import boxwood

from .conftest import REPOSITORY, missing, small_root

pytestmark = pytest.mark.integration

PROGRAM = """
import os, sys, boxwood
client = boxwood.local({arguments}pool_size="2G")
image = client.images.import_(sys.argv[1], "boxwood-test/local:latest")
with client.create_tree(image=image) as tree:
    print(tree.sandbox.run("echo ran").stdout.text, end="")
    status = tree.sandbox.run("cat /proc/self/status").stdout.text.splitlines()
    print(*(line for line in status if line.startswith("Cpus_allowed_list")))
    print(tree.sandbox.run("bash -c 'x=$(seq 40000000)'; echo $?").stdout.text, end="")
again = boxwood.local({arguments})
assert again.address == client.address
print(client.address.removeprefix("unix:"), flush=True)
{then}
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    binary = Path(os.environ.get("BOXWOOD_BIN") or REPOSITORY / "bin" / "boxwood")
    if not binary.exists():
        missing(f"no {binary}")
    if os.geteuid() != 0:
        missing("starting a daemon needs root")
    small_root(tmp_path / "root")
    return {**os.environ, "BOXWOOD_BIN": str(binary), "BOXWOOD_ADDRESS": str(tmp_path / "none")}


def start(tmp_path: Path, environment: dict[str, str], arguments: str, then: str) -> subprocess.Popen[str]:
    program = PROGRAM.format(arguments=arguments, then=then)
    return subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "root")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def gone(path: str) -> None:
    """Waits until a daemon has put its socket away."""
    until, tick = time.monotonic() + 60, threading.Event()
    while os.path.exists(path):
        assert time.monotonic() < until, f"{path} is still there"
        tick.wait(0.05)


def test_it_is_started_confined_and_ended_at_exit(tmp_path: Path, environment: dict[str, str]) -> None:
    core = min(os.sched_getaffinity(0))
    arguments = f'cpus="{core}", memory="128M", '
    process = start(tmp_path, environment, arguments, "")
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    ran, cores, status, socket = out.split("\n")[:4]
    assert ran == "ran"
    assert cores.split() == ["Cpus_allowed_list:", str(core)]
    assert status != "0"  # 340 MB were not to be had within 128 MiB
    assert not Path(socket).parent.exists()


def test_it_ends_with_a_process_that_is_killed(tmp_path: Path, environment: dict[str, str]) -> None:
    """Its state is a folder that was named, which stays and can be used again."""
    state = tmp_path / "state"
    arguments = f"{str(state)!r}, "
    with start(tmp_path, environment, arguments, "import threading; threading.Event().wait()") as process:
        assert process.stdout is not None
        socket = [process.stdout.readline() for _ in range(4)][-1].strip()
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
    assert socket == str(state / "socket"), err
    gone(socket)
    second = start(tmp_path, environment, arguments, "print(len(client.trees()))")
    out, err = second.communicate(timeout=150)
    assert out.splitlines()[-1] == "2", err


def test_a_daemon_that_runs_is_taken(socket_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOXWOOD_ADDRESS", socket_path)
    monkeypatch.setenv("BOXWOOD_BIN", "/no/such/program")
    with boxwood.local() as client:
        assert client.address == f"unix:{socket_path}"


def test_wrong_flags_are_told_in_one_line(environment: dict[str, str]) -> None:
    program = (
        'import boxwood\ntry: boxwood.local(cpus="1000")\nexcept boxwood.ConnectionFailed as e: print(e)'
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    (line,) = done.stdout.splitlines()
    assert "no cores 1000" in line, done.stderr
