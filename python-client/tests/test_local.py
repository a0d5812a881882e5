"""boxwood.local() where none can be started: one line says why."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import boxwood


def test_without_a_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOXWOOD_ADDRESS", str(tmp_path / "none"))
    monkeypatch.delenv("BOXWOOD_BIN", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(boxwood.Unsupported, match=r"no boxwood program in \$PATH"):
        boxwood.local()
    monkeypatch.setenv("BOXWOOD_BIN", "/no/such")
    with pytest.raises(boxwood.Unsupported, match="no boxwood program at /no/such"):
        boxwood.local()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_without_root(tmp_path: Path) -> None:
    program = (
        "import boxwood, os\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: boxwood.local()\n"
        "except boxwood.Unsupported as error: print(error)\n"
    )
    environment = {**os.environ, "BOXWOOD_ADDRESS": "/no/such/socket", "BOXWOOD_BIN": "/bin/true"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60
    )
    (line,) = done.stdout.splitlines()
    assert "starting one needs root" in line, done.stderr
