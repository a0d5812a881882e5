"""A fake daemon and a client of it for each test."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import boxwood

from fakeserver import FakeDaemon

# Adapters need projects that aren't installed here: `make test-adapters` runs them in environments of their own.
collect_ignore = [] if os.environ.get("BOXWOOD_ADAPTERS") else ["adapters"]


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    # Not tmp_path: a unix socket's path holds 107 bytes only.
    folder = Path(tempfile.mkdtemp(prefix="bw-"))
    running = FakeDaemon(folder).start()
    yield running
    running.stop()
    shutil.rmtree(folder)


@pytest.fixture
def client(daemon: FakeDaemon) -> Iterator[boxwood.Client]:
    with boxwood.connect(daemon.socket, timeout=20) as connected:
        yield connected
    gc.collect()  # a handle that nobody released warns here, and so fails the test that left it


@pytest.fixture
def image(client: boxwood.Client, tmp_path: Path) -> boxwood.Image:
    root = tmp_path / "root"
    (root / "work").mkdir(parents=True)
    (root / "work" / "start").write_text("start\n")
    return client.images.import_(root, "base:latest")


@pytest.fixture
def tree(client: boxwood.Client, image: boxwood.Image) -> Iterator[boxwood.Tree]:
    with client.create_tree(image=image) as made:
        yield made


@pytest.fixture
def sandbox(tree: boxwood.Tree) -> boxwood.Sandbox:
    return tree.sandbox
