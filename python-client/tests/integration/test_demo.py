"""The demonstration, as the documentation shows it, with the daemon that runs."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


def test_the_demo(socket_path: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "boxwood.demo", "--svg", str(tmp_path / "tree.svg")],
        env={**os.environ, "BOXWOOD_ADDRESS": socket_path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "8 turns were run where rollouts without forks would have run 18" in done.stdout
    assert "sums up to 51" in done.stdout
    picture = ElementTree.parse(tmp_path / "tree.svg").getroot()
    assert len(picture.findall("{http://www.w3.org/2000/svg}g")) == 9


def test_without_a_daemon_it_says_why(tmp_path: Path) -> None:
    environment = {**os.environ, "BOXWOOD_ADDRESS": str(tmp_path / "none"), "BOXWOOD_BIN": "/no/such"}
    done = subprocess.run(
        [sys.executable, "-m", "boxwood.demo"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no boxwood program at /no/such" in done.stderr
    assert len(done.stderr.splitlines()) == 1
