"""Statistics: the daemon's tables as Arrow, pandas or polars, and what one asks of them first.

    turns = client.stats("turns", tree=tree)
    print(boxwood.stats.skip_share(turns))
    print(boxwood.stats.fork_latency(client.stats("forks", tree=tree)))
    print(boxwood.stats.turns_saved(client.stats("nodes", tree=tree)))

The functions take a table in any of the three forms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from . import errors
from ._tar import ChunkReader

if TYPE_CHECKING:
    import pyarrow

Form = Literal["arrow", "pandas", "polars"]
Frame: TypeAlias = "Any"
"""A table as `pyarrow.Table`, `pandas.DataFrame` or `polars.DataFrame`."""


def arrow() -> Any:
    """Imports pyarrow, or says how to get it."""
    try:
        import pyarrow
        import pyarrow.ipc  # pyright: ignore[reportUnusedImport]
    except ImportError as problem:
        raise errors.unsupported(
            f"statistics as Arrow tables need pyarrow, which can't be imported: {problem}",
            'pip install "boxwood[arrow]", or take the bytes of Client.stats_chunks()',
        ) from None
    return pyarrow


def _module(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as problem:
        raise errors.unsupported(
            f"a table for {name} needs it, and it can't be imported: {problem}", f"pip install {name}"
        ) from None


def check(to: Form) -> None:
    """Refuses a form that can't be made here before any call is made."""
    if to not in ("arrow", "pandas", "polars"):
        raise errors.invalid(f'to must be "arrow", "pandas" or "polars", not {to!r}')
    if to == "polars":
        _module("polars")
        return
    arrow()
    if to == "pandas":
        _module("pandas")


def reader(chunks: Iterable[bytes]) -> pyarrow.RecordBatchReader:
    """Reads a stream of Arrow IPC bytes batch by batch, as they come."""
    pa = arrow()
    batches: pyarrow.RecordBatchReader = pa.ipc.open_stream(io.BufferedReader(ChunkReader(chunks), 1 << 20))
    return batches


def table(chunks: Iterable[bytes], to: Form = "arrow") -> Frame:
    """Reads all of a stream."""
    if to == "polars":  # reads it by itself, without pyarrow
        return _module("polars").read_ipc_stream(io.BytesIO(b"".join(chunks)))
    with contextlib.closing(reader(chunks)) as batches:
        whole: Any = batches.read_all()
    return whole.to_pandas() if to == "pandas" else whole


def _column(frame: Frame, name: str) -> list[Any]:
    column = frame[name]
    for method in ("to_pylist", "to_list"):  # pyarrow; pandas and polars
        if hasattr(column, method):
            values: list[Any] = getattr(column, method)()
            return values
    return list(column)


def skip_share(turns: Frame) -> float:
    """The share of turns, 0 to 1, that cost no capture: nothing had changed since the last one.

    Args:
        turns: Of the table ``turns``.

    Returns:
        NaN if there are none.
    """
    verdicts = _column(turns, "verdict")
    return sum(verdict == "none" for verdict in verdicts) / len(verdicts) if verdicts else math.nan


@dataclasses.dataclass(frozen=True)
class ForkLatency:
    """How long children took from the fork's arrival until they were ready, in seconds.

    Attributes:
        ready: How many became ready.
        failed: How many did not.
        p50: The median of those that did; NaN if none did.
        p95: 95 % took no longer.
        longest: The longest.
    """

    ready: int
    failed: int
    p50: float
    p95: float
    longest: float


def fork_latency(forks: Frame) -> ForkLatency:
    """How long children took; quantiles are values that occurred (nearest rank).

    Args:
        forks: Of the table ``forks``.
    """
    outcomes, took = _column(forks, "outcome"), _column(forks, "ready_ns")
    ready = sorted(
        nanoseconds / 1e9 for outcome, nanoseconds in zip(outcomes, took, strict=True) if outcome == "ok"
    )
    return ForkLatency(
        ready=len(ready),
        failed=len(outcomes) - len(ready),
        p50=_rank(ready, 0.5),
        p95=_rank(ready, 0.95),
        longest=ready[-1] if ready else math.nan,
    )


def _rank(values: Sequence[float], share: float) -> float:
    return values[max(math.ceil(share * len(values)) - 1, 0)] if values else math.nan


def effective_branching(nodes: Frame) -> dict[str, float]:
    """For each tree, how many children a node has in the even tree of the same depth and as many nodes.

    That is the b with b + b**2 + ... + b**depth = nodes without the root (the effective
    branching factor of Russell and Norvig, "Artificial Intelligence", section 3.6.1):
    1 for a single rollout, 2 for a full binary tree.

    Args:
        nodes: Of the table ``nodes``.

    Returns:
        By tree; a tree of the root alone has 0.
    """
    count: dict[str, int] = {}
    deepest: dict[str, int] = {}
    for tree, depth in zip(_column(nodes, "tree"), _column(nodes, "depth"), strict=True):
        count[tree] = count.get(tree, 0) + (depth > 0)
        deepest[tree] = max(deepest.get(tree, 0), depth)
    return {tree: _branching(count[tree], deepest[tree]) for tree in count}


def _branching(nodes: int, depth: int) -> float:
    if depth == 0:
        return 0.0
    low, high = 0.0, float(nodes)
    for _ in range(200):  # halves until the doubles are neighbours
        middle = (low + high) / 2
        if _nodes_of(middle, depth, nodes) < nodes:
            low = middle
        else:
            high = middle
    return high


def _nodes_of(b: float, depth: int, enough: int) -> float:
    total, level = 0.0, 1.0
    for _ in range(depth):
        level *= b
        total += level
        if total >= enough:
            break
    return total


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a tree saved against rollouts that each run their whole path anew.

    Attributes:
        run: What was run: each node once.
        alone: What every leaf's path from the root costs by itself, summed.
        saved: `alone` without `run`.
        share: `saved` of `alone`, 0 to 1; 0 if nothing was run.
    """

    run: float
    alone: float
    saved: float
    share: float


def turns_saved(nodes: Frame) -> Saved:
    """How many turns the trees' shared prefixes saved.

    Args:
        nodes: Of the table ``nodes``, whole trees.
    """
    return _saved(nodes, None)


def tokens_saved(nodes: Frame, tokens: Mapping[str, float]) -> Saved:
    """How many tokens the trees' shared prefixes saved; `turns_saved` weighed by a turn's own tokens.

    Args:
        nodes: Of the table ``nodes``, whole trees.
        tokens: The tokens that were sampled for each node, by its id; 0 for what is missing.
    """
    return _saved(nodes, tokens)


def _saved(nodes: Frame, cost: Mapping[str, float] | None) -> Saved:
    # A root's parent is empty, None or, in pandas, NaN.
    parents = [parent if isinstance(parent, str) else "" for parent in _column(nodes, "parent")]
    ids = _column(nodes, "node")
    own: dict[str, float] = {}
    before: dict[str, str] = {}
    inner: set[str] = set()
    for node, parent in zip(ids, parents, strict=True):
        before[node] = parent
        inner.add(parent)
        own[node] = 0.0 if not parent else 1.0 if cost is None else float(cost.get(node, 0.0))
    path: dict[str, float] = {"": 0.0}
    for node in ids:
        # Parents first, without recursion: a tree may be thousands of turns deep.
        steps = [node]
        while (parent := before[steps[-1]]) not in path and parent in before:
            steps.append(parent)
        for step in reversed(steps):
            path[step] = path.get(before[step], 0.0) + own[step]
    run = sum(own.values())
    alone = sum(path[node] for node in ids if node not in inner)
    return Saved(run=run, alone=alone, saved=alone - run, share=(alone - run) / alone if alone else 0.0)
