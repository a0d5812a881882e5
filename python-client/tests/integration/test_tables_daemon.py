"""The daemon's own tables in every form, and what `boxwood.stats` says of them."""

from __future__ import annotations

from typing import Any

import pytest

import boxwood
from boxwood import stats

pytestmark = pytest.mark.integration


def test_every_table_in_every_form(client: boxwood.Client, tree: boxwood.Tree) -> None:
    first = tree.sandbox.run("echo x > /tmp/a").node
    with first.fork(4, min_ready=4) as children:
        for child in children.ready:
            child.run("cat /tmp/a", check=True)
    tables = [table.name for table in client.tables()]
    assert {"turns", "nodes", "forks", "captures"} <= set(tables)
    assert {"scheduler", "host"} <= set(tables)
    for name in ("scheduler", "host"):  # which are of no tree, and grow with each export
        assert len(client.stats(name, to="arrow")) <= len(client.stats(name, to="polars"))
        with pytest.raises(boxwood.InvalidArgument, match="of no tree"):
            client.stats(name, tree=tree)
    for name in set(tables) - {"scheduler", "host"}:
        sizes = set()
        to: Any
        for to in ("arrow", "pandas", "polars"):
            pytest.importorskip({"arrow": "pyarrow"}.get(to, to))
            sizes.add(len(client.stats(name, tree=tree, to=to)))
        assert len(sizes) == 1, name
    for to in ("arrow", "pandas", "polars"):
        assert stats.skip_share(client.stats("turns", tree=tree, to=to)) == 0.8
        nodes = client.stats("nodes", tree=tree, to=to)
        saved = stats.turns_saved(nodes)
        assert (saved.run, saved.alone, saved.saved) == (5, 8, 3)
        # b + b^2 = 5
        assert stats.effective_branching(nodes)[tree.id] == pytest.approx(1.7913, abs=1e-3)
        latency = stats.fork_latency(client.stats("forks", tree=tree, to=to))
        assert (latency.ready, latency.failed) == (5, 0)  # the tree's own sandbox is a fork of its root
        assert 0 < latency.p50 <= latency.p95 <= latency.longest < 60
