"""The daemon of the integration tests, for tests that run where one adapter's project is installed."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from typing import Any

import pytest
from integration.conftest import REPOSITORY, base_image, client, image, socket_path

__all__ = ["base_image", "client", "image", "socket_path"]


def same_signatures(ours: type, theirs: type, names: Iterable[str]) -> None:
    """Each of our methods takes what theirs takes: the same names in the same order, the same kinds and defaults."""
    for name in names:
        mine, wanted = getattr(ours, name), getattr(theirs, name)
        if isinstance(inspect.getattr_static(theirs, name), property):
            assert isinstance(inspect.getattr_static(ours, name), property), name
            continue
        assert inspect.iscoroutinefunction(mine) == inspect.iscoroutinefunction(wanted), name
        got, want = (list(inspect.signature(f).parameters.values()) for f in (mine, wanted))
        open_ended = {p.kind for p in want} & {
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        }
        if not open_ended:
            assert [(p.name, p.kind) for p in got[: len(want)]] == [(p.name, p.kind) for p in want], name
            assert [p.default for p in got[: len(want)]] == [p.default for p in want], name
        # What is ours beyond that must be optional.
        for extra in got[len(want) :]:
            assert extra.default is not extra.empty or extra.kind is extra.VAR_KEYWORD, (name, extra.name)


def pinned(package: str, version: str) -> None:
    """The adapter is checked against this version, and no other."""
    from importlib.metadata import version as installed

    assert installed(package) == version


def defined_by_the_page(section: str) -> dict[str, Any]:
    """What the example of a section of docs/python/adapters.md imports and defines; its calls aren't made."""
    page = (REPOSITORY / "docs" / "python" / "adapters.md").read_text()
    block = page.split(f"\n## {section}\n", 1)[1].split("```python\n", 1)[1].split("\n```", 1)[0]
    tree = ast.parse(block)
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    tree.body = [statement for statement in tree.body if isinstance(statement, kinds)]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(tree, section, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def address(socket_path: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("BOXWOOD_ADDRESS", socket_path)
