"""The steps of the demo; run.sh starts the daemon that they speak to."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import boxwood

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent
sys.path.insert(0, str(EXAMPLES))

from search_fix import search  # noqa: E402

RECORDED = EXAMPLES / "trajectories" / "wordfreq" / "trajectory.jsonl"


def title(text: str) -> None:
    print(f"\n== {text}", flush=True)


def cli(options: argparse.Namespace, *arguments: str) -> str:
    """Runs the command line, shows what it says, and gives it."""
    done = subprocess.run([options.boxwood, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, end="", flush=True)
    return done.stdout


def replay(client: boxwood.Client, options: argparse.Namespace) -> boxwood.Tree:
    """Replays the recorded rollout: every turn as recorded, most of them saved nothing."""
    title("replaying a recorded rollout")
    done = subprocess.run(
        [options.boxwood, "replay", str(RECORDED), "--image", options.image, "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if not lines or "tree" not in lines[-1]:
        sys.exit("demo: the replay did not run to its end")
    *turns, summary = lines
    for turn in turns:
        print(f"{turn['step']:4}  {turn['verdict']:8} {turn['command'].splitlines()[0][:80]}")
        if not turn["match"]:
            print(f"      differs: {turn['different']}")
    assert done.returncode == 0 and summary["matched"] == summary["compared"] == len(turns), (
        "a turn differs from its record"
    )
    assert summary["silent"] * 2 > len(turns), "most turns of this rollout change nothing"
    print(f"{len(turns)} turns as recorded; {summary['silent']} changed nothing and saved nothing")
    return client.tree(summary["tree"])


def fork_the_middle(client: boxwood.Client, tree: boxwood.Tree) -> None:
    """Forks a node that the rollout has long left into 8 independent sandboxes."""
    title("forking a node from the middle into 8 live sandboxes")
    rollout = sorted(tree.nodes(), key=lambda node: node.depth)
    middle, last = rollout[len(rollout) // 2], rollout[-1]
    cwd = "/work/wordfreq"
    with middle.fork(8, min_ready=8) as children:
        commits = set()
        for number, child in enumerate(children.ready):
            child.run(f"echo {number} > mine", cwd=cwd, check=True)
        for number, child in enumerate(children.ready):
            seen = child.run("cat mine; git log --oneline | wc -l", cwd=cwd, check=True).stdout.text.split()
            assert seen[0] == str(number), f"child {number} sees the file of another: {seen}"
            commits.add(seen[1])
    assert commits == {"1"}, f"the middle lies before the commits of the rollout: {commits}"
    with last.fork(1, min_ready=1) as children:
        count = children.ready[0].run("git log --oneline | wc -l", cwd=cwd, check=True).stdout.text.strip()
    assert count == "3", "the last node has all commits"
    print("8 children of one past node, each with files of its own; the rollout's end is as it was")


def numbers(client: boxwood.Client) -> None:
    """Prints what the tables say."""
    title("what it cost")
    turns = client.stats("turns")["verdict"].to_pylist()
    forks = sorted(
        row["ready_ns"] / 1e6
        for row in client.stats("forks").select(["ready_ns", "outcome"]).to_pylist()
        if row["outcome"] == "ok"
    )
    nodes = client.stats("nodes")["checkpoint_bytes"].to_pylist()
    silent = turns.count("none")
    kept = [size for size in nodes if size is not None]
    print(f"turns that saved nothing   {silent} of {len(turns)} ({100 * silent / len(turns):.0f} %)")
    print(
        f"fork, request to ready     median {statistics.median(forks):.1f} ms, p95 {forks[len(forks) * 95 // 100]:.1f} ms, {len(forks)} children, up to 9 at once"
    )
    mean = sum(kept) / max(1, len(kept))
    print(
        f"bytes kept                 {sum(kept) / 1e6:.2f} MB in {len(kept)} checkpoints of {len(nodes)} nodes;"
        f" a snapshot of that size for each node would be {mean * len(nodes) / 1e6:.2f} MB"
    )
    assert silent > 0 and forks and len(kept) < len(nodes)


def write_out(options: argparse.Namespace, trees: dict[str, boxwood.Tree]) -> None:
    """Writes tables and pictures, and reads them back."""
    title("tables and pictures")
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for table in ("turns", "nodes", "forks", "captures"):
        for ending in ("arrow", "parquet"):
            cli(options, "stats", table, "-o", str(out / f"{table}.{ending}"))
    import pyarrow as pa
    import pyarrow.parquet as pq

    for table in ("turns", "nodes", "forks", "captures"):
        arrow = pa.ipc.open_file(str(out / f"{table}.arrow")).read_all()
        assert arrow.num_rows > 0 and pq.read_table(out / f"{table}.parquet").num_rows == arrow.num_rows, (
            table
        )
    for name, tree in trees.items():
        picture = out / f"{name}.svg"
        cli(options, "tree", "show", tree.id, "--svg", str(picture))
        assert picture.stat().st_size > 1000 and "</svg>" in picture.read_text()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--boxwood", required=True)
    parser.add_argument("--image", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--short", action="store_true", help="leave the second replay and long listings out")
    options = parser.parse_args()
    with boxwood.connect(os.environ["BOXWOOD_ADDRESS"]) as client:
        recorded = replay(client, options)
        fork_the_middle(client, recorded)
        title("searching for the edits that mend a broken project")
        searched = search.main(client, options.image)
        if not options.short:
            title("the rollout's tree")
            cli(options, "tree", "show", recorded.id)
        title("the search's tree")
        cli(options, "tree", "show", searched.id)
        numbers(client)
        write_out(options, {"rollout": recorded, "search": searched})
    print("\nall as claimed", flush=True)


if __name__ == "__main__":
    main()
