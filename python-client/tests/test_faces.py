"""The two faces of the package: the same classes, methods, arguments and words."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import boxwood
import boxwood.aio

REPOSITORY = Path(__file__).resolve().parents[2]
CLASSES = [
    name
    for name in boxwood.aio.__all__
    if isinstance(getattr(boxwood.aio, name), type) and name not in ("Pending", "Forking")
]
# What one face calls differently from the other.
SPECIAL = {
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
}


def members(cls: type) -> dict[str, Any]:
    own = {name: value for name, value in vars(cls).items() if callable(value) or isinstance(value, property)}
    return {SPECIAL.get(name, name): value for name, value in own.items()}


def blocking(annotation: str) -> str:
    annotation = re.sub(r"Async(Iterator|Generator)", r"\1", annotation)
    return annotation.replace("Forking", "Children")


def signature(value: Any) -> tuple[list[tuple[str, Any, Any, str]], str]:
    function = value.fget if isinstance(value, property) else value
    found = inspect.signature(function)
    parameters = [(p.name, p.kind, p.default, blocking(str(p.annotation))) for p in found.parameters.values()]
    return parameters, blocking(str(found.return_annotation))


def test_every_class_has_its_twin() -> None:
    assert CLASSES
    assert set(boxwood.aio.__all__) - {"Pending", "Forking"} <= set(boxwood.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_the_same_members(name: str) -> None:
    aio, sync = members(getattr(boxwood.aio, name)), members(getattr(boxwood, name))
    assert set(aio) == set(sync)
    for member, value in aio.items():
        assert type(value) is type(sync[member]), member
        assert signature(value) == signature(sync[member]), member
        assert inspect.getdoc(value) == inspect.getdoc(sync[member]), member
    assert inspect.getdoc(getattr(boxwood.aio, name)) == inspect.getdoc(getattr(boxwood, name))


def test_connect_is_the_same() -> None:
    assert signature(boxwood.aio.connect) == signature(boxwood.connect)


def test_what_waits_is_awaited() -> None:
    """Nothing of the asyncio face blocks: all that makes a call is a coroutine or an async iterator."""
    waits = {
        "Client": {"info", "tree", "trees", "node", "sandbox", "sandboxes", "release", "fork", "annotate"}
        | {"backup", "wait_captured", "tables", "stats", "stats_reader", "close", "open_run", "import_tree"},
        "Sandbox": {"run", "read_file", "write_file", "upload", "download", "cancel", "rollback", "renew"}
        | {"release"},
        "Node": {"refresh", "parent", "children", "path", "annotate", "wait_captured", "payload", "prune"},
        "Tree": {"show", "close", "export"},
        "Run": {"close"},
        "OpenTurn": {"exec", "read_file", "write_file", "upload", "download"},
        "Images": {"import_", "list", "remove"},
        "Session": {"run", "interrupt", "close"},
        "Children": {"release"},
        "Forks": {"release"},
    }
    for name, methods in waits.items():
        for method in methods:
            assert inspect.iscoroutinefunction(getattr(getattr(boxwood.aio, name), method)), (name, method)
            assert not inspect.iscoroutinefunction(getattr(getattr(boxwood, name), method)), (name, method)


def test_the_blocking_face_is_what_the_generator_writes() -> None:
    generator = REPOSITORY / "scripts" / "gen-sync.py"
    if not (REPOSITORY / ".venv" / "bin" / "ruff").exists():
        pytest.skip("no .venv/bin/ruff beside the checkout, which formats what is written")
    done = subprocess.run([sys.executable, str(generator), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
