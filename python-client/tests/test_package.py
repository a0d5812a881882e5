"""The wheel and the sdist: built, installed in a clean environment, imported there."""

from __future__ import annotations

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_build_and_install(tmp_path: Path, kind: str) -> None:
    run([sys.executable, "-m", "build", f"--{kind}", "--outdir", str(tmp_path), str(HERE)])
    (built,) = tmp_path.iterdir()
    if kind == "wheel":
        names = zipfile.ZipFile(built).namelist()
        assert "boxwood/py.typed" in names
        assert "boxwood/_proto/boxwood_pb2.pyi" in names
        assert not [n for n in names if n.startswith("tests")]
    run([sys.executable, "-m", "venv", str(tmp_path / "env")])
    python = str(tmp_path / "env" / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", str(built)])
    run([python, "-W", "error", "-c", "import boxwood; print(boxwood.__version__)"])


@pytest.mark.parametrize("name", ["trl", "verl", "skyrl"])
def test_an_adapter_names_what_it_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"boxwood.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install 'boxwood\[{name}\]'"):
        importlib.import_module(f"boxwood.integrations.{name}")


def run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
