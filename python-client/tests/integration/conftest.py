"""A real daemon: the one of $BOXWOOD_SOCKET, or one that is started for the tests.

Without either the tests are skipped, and fail instead if BOXWOOD_REQUIRE=all.
BOXWOOD_IMAGE names an image with bash, coreutils, python3 and git; without it a
small root file system is made of this host's own programs, and the base image is
built where python3 and git are needed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import boxwood

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAMS = (
    "bash sh cat ls rm mv mkdir touch echo sleep head tr printf id stat env pwd chmod ln seq kill true false"
)


def missing(reason: str) -> None:
    if os.environ.get("BOXWOOD_REQUIRE") == "all":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def socket_path() -> Iterator[str]:
    if given := os.environ.get("BOXWOOD_SOCKET"):
        yield given
        return
    binary = Path(os.environ.get("BOXWOOD_BIN") or REPOSITORY / "bin" / "boxwood")
    if not binary.exists():
        missing(f"no daemon: neither $BOXWOOD_SOCKET nor {binary}")
    if os.geteuid() != 0:
        missing("starting a daemon needs root")
    folder = Path(tempfile.mkdtemp(prefix="bw-it-"))
    path = folder / "boxwood.sock"
    log = open(folder / "log", "wb")  # noqa: SIM115 - outlives this function's steps
    flags = {
        "--state": str(folder / "state"),
        "--socket": str(path),
        "--socket-group": "nogroup",
        "--cgroup": f"boxwood-it-{os.getpid()}",
        "--metrics": ":0",
        "--pool-size": "16G" if os.environ.get("LONG") else "4G",
    }
    process = subprocess.Popen(
        [str(binary), "serve", *(word for flag in flags.items() for word in flag)],
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        folder.chmod(0o755)
        wait_for_daemon(process, path, folder / "log")
        yield str(path)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            log.close()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_daemon(process: subprocess.Popen[bytes], path: Path, log: Path) -> None:
    """Asks until it answers; an end of the process or 60 s are a failure."""
    tick = threading.Event()
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            with boxwood.connect(str(path)) as client:
                client.info()
                return
        except boxwood.Unavailable:
            tick.wait(0.1)
    pytest.fail(f"the daemon did not come up:\n{log.read_text(errors='replace')[-4000:]}")


@pytest.fixture
def client(socket_path: str) -> Iterator[boxwood.Client]:
    with boxwood.connect(socket_path, timeout=60) as connected:
        yield connected


@pytest.fixture(scope="session")
def image(socket_path: str) -> str:
    if given := os.environ.get("BOXWOOD_IMAGE"):
        return given
    folder = Path(tempfile.mkdtemp(prefix="bw-root-"))
    try:
        small_root(folder)
        with boxwood.connect(socket_path) as client:
            client.images.import_(folder, "boxwood-test/small:latest")
    finally:
        shutil.rmtree(folder)
    return "boxwood-test/small:latest"


@pytest.fixture(scope="session")
def base_image(socket_path: str) -> str:
    """An image with python3 and git: the base image, built once and then cached."""
    if given := os.environ.get("BOXWOOD_IMAGE"):
        return given
    binary = Path(os.environ.get("BOXWOOD_BIN") or REPOSITORY / "bin" / "boxwood")
    if not binary.exists():
        missing(f"no {binary} to build the base image with, and no $BOXWOOD_IMAGE")
    cache = os.environ.get("BOXWOOD_CACHE") or str(REPOSITORY / ".cache" / "images")
    subprocess.run(
        [str(binary), "--address", socket_path, "image", "build-base", "--cache", cache],
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=250,
    )
    return "boxwood/base:latest"


def small_root(folder: Path) -> None:
    """This host's shell and tools with the libraries that they name; no python3, no git."""
    for name in ("etc", "tmp", "proc", "dev", "sys", "run", "root", "work", "var", "usr/bin"):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "tmp").chmod(0o1777)
    (folder / "bin").symlink_to("usr/bin")
    (folder / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534::/:/bin/sh\n")
    (folder / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    wanted = set()
    for program in PROGRAMS.split():
        found = shutil.which(program)
        if found is None:
            continue
        shutil.copy2(os.path.realpath(found), folder / "usr/bin" / program)
        for word in subprocess.run(["ldd", found], capture_output=True, text=True).stdout.split():
            if word.startswith("/"):
                wanted.add(word)
    for library in wanted:
        target = folder / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(os.path.realpath(library), target)


@pytest.fixture
def tree(client: boxwood.Client, image: str) -> Iterator[boxwood.Tree]:
    with client.create_tree(image=image, lease=600) as made:
        yield made


@pytest.fixture
def sandbox(tree: boxwood.Tree) -> boxwood.Sandbox:
    return tree.sandbox
