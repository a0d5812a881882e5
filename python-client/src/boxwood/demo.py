"""A demonstration: ``python -m boxwood.demo`` grows a small tree and shows it.

It takes the daemon that runs, or starts one for itself (as root), and needs no image:
it makes one of this host's own shell and a few tools.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from . import stats
from ._local import local
from .client import Client
from .errors import BoxwoodError
from .node import Node
from .records import Image

IMAGE = "boxwood/demo:latest"
_SUM = "s=0; while read n; do ((s += n)); done < /work/numbers; echo $s"
_PROGRAMS = ("bash", "sh", "cat", "ls", "mkdir", "rm", "seq", "sleep")


def image(client: Client) -> Image:
    """An image of this host's shell and a few tools, imported once; enough to try things out.

    The daemon must see this host's files.
    """
    for known in client.images.list():
        if IMAGE in known.names:
            return known
    with tempfile.TemporaryDirectory(prefix="boxwood-demo-") as folder:
        _fill(Path(folder))
        return client.images.import_(folder, IMAGE)


def _fill(root: Path) -> None:
    for name in ("etc", "tmp", "proc", "dev", "sys", "run", "root", "usr/bin"):
        (root / name).mkdir(parents=True)
    root.chmod(0o755)
    (root / "tmp").chmod(0o1777)
    (root / "bin").symlink_to("usr/bin")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    wanted: set[str] = set()
    for program in _PROGRAMS:
        found = shutil.which(program)
        if found is None:
            continue
        shutil.copy2(os.path.realpath(found), root / "usr/bin" / program)
        listed = subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stdout
        wanted.update(word for word in listed.split() if word.startswith("/"))
    for library in wanted:
        target = root / library.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(os.path.realpath(library), target)


def run(client: Client, width: int, svg: str | None) -> None:
    """Grows a tree: a shared beginning, `width` branches, and of the best one as many again."""
    with client.create_tree(image=image(client), labels={"demo": "1"}) as tree:
        tree.sandbox.run("mkdir /work; seq 1 9 > /work/numbers", check=True)
        start = tree.sandbox.run("cat /work/numbers", check=True).node
        print(f"A shared beginning of {start.depth} turns, then {width} branches of it:\n")
        best: tuple[float, Node] = (0.0, start)
        for level in (1, 2):
            with start.fork(width, min_ready=1) as children:
                for number, child in enumerate(children.ready):
                    command = f"echo {number * level} >> /work/numbers; {_SUM}"
                    turn = child.run(command, check=True)
                    turn.node.annotate(reward=float(turn.stdout))
                    client.backup({turn.node: float(turn.stdout)}, rule="max")
                    if float(turn.stdout) >= best[0]:
                        best = float(turn.stdout), turn.node
            start = best[1]
        client.wait_captured(list(tree.nodes()))
        print(tree.show())
        saved = stats.turns_saved(client.stats("nodes", tree=tree)) if _has_pyarrow() else None
        print(f"\nThe best branch sums up to {best[0]:g}.")
        if saved is not None:
            print(
                f"{saved.run:g} turns were run where rollouts without forks would have run {saved.alone:g}."
            )
        if svg:
            tree.plot().save(svg)
            print(f"A picture of the tree is in {svg}.")


def _has_pyarrow() -> bool:
    try:
        stats.arrow()
    except BoxwoodError:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m boxwood.demo", description="Grows a small tree and shows it."
    )
    parser.add_argument("--width", type=int, default=3, help="branches at each fork (default 3)")
    parser.add_argument("--svg", help="write a picture of the tree to this file")
    options = parser.parse_args(arguments)
    try:
        with local(pool_size="4G") as client:
            print(f"Boxwood {client.info().version} at {client.address}\n")
            run(client, options.width, options.svg)
    except BoxwoodError as error:
        print(f"boxwood.demo: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
