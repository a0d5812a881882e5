"""The tasks: a release goes through stages, in each of which one thing is broken and must be mended.

A task has STAGES stages, each of another one of eight kinds of damage to real files, in an order and with
names of its own. `advance.sh` looks at the stage that is open: if it is fit the next one is opened, else
it says what is wrong. So what is damaged in a stage can't be seen, nor mended, before those ahead of it
are done: each turn stands on the turns before it, and a tree can branch in the middle of a long way.

In a turn the agent runs one of ten commands in the open stage's folder, and then `advance.sh`, whose last
line is what it sees. Each kind is mended by one of the commands; one only looks, and one starts all over.
An episode has as many turns as there are stages. Its reward comes at its end, from a fresh sandbox that
gets the folder of finished stages alone (`grade.sh`): the share of stages that are done and fit.

Held-out tasks have orders and names that no training task has. A policy that reads the complaint, and not
the names, solves them.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import random
import tarfile
from pathlib import Path

import boxwood
import boxwood.aio

import plan

HERE = Path(__file__).resolve().parent / "task"
RELEASE = "/work/release"

# The damages and what mends each, by name; the two last mend nothing.
COMMANDS = {
    "mode": "chmod +x bin/*",
    "crlf": r"sed -i 's/\r$//' *.conf",
    "link": 'ln -sfn "$(ls -d releases/* | tail -n 1)" current',
    "lock": "rm -f run/*.lock",
    "port": "for f in *.conf; do grep -q ^port= $f || echo port=8080 >>$f; done",
    "pack": "for f in *.tar.gz; do tar -xzf $f; done",
    "sum": "sha256sum *.dat >manifest",
    "order": "sort -o index index",
    "look": "ls -R",
    "start over": "cd ..; rm -rf stage queue done; cp -a /work/origin/. .",
}
ACTIONS = tuple(COMMANDS)
KINDS = ACTIONS[:8]

TRAINING_NAMES = """
billing catalog gateway ledger mailer metrics orders parser payments profile quota renderer
reports router search session stock tickets tracker uploads users vault webhooks worker
""".split()  # noqa: SIM905
HELD_OUT_NAMES = """
archive audit backup broker calendar cart cluster comments console coupons digest export feeds
forum geo images import invoices labels locale media notes polls wiki
""".split()  # noqa: SIM905


@dataclasses.dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: Its name.
        stages: Kind and name of each stage, in order.
    """

    name: str
    stages: tuple[tuple[str, str], ...]

    @property
    def listing(self) -> str:
        """One line a stage: number, kind and name."""
        return "".join(f"{n} {kind} {name}\n" for n, (kind, name) in enumerate(self.stages, 1))

    def setup(self) -> list[boxwood.File | str]:
        """What makes its start state, for `create_tree`; the first stage is open then."""
        files: list[boxwood.File | str] = ["mkdir -p /work/origin/done /work/release"]
        files += [boxwood.File(f"/work/{f}", (HERE / f).read_bytes()) for f in ("fit.sh", "advance.sh")]
        for number, (kind, name) in enumerate(self.stages, 1):
            folder = f"/work/origin/queue/{number}"
            files.append(boxwood.File(f"{folder}/.stage", f"{number} {kind} {name}\n".encode()))
            files += [
                boxwood.File(f"{folder}/{path}", content) for path, content in damaged(kind, name).items()
            ]
            if kind == "link":
                files.append(f"ln -s releases/1.0 {folder}/current")
        return [*files, "cp -a /work/origin/. /work/release; bash /work/advance.sh || true"]

    def grader(self, fresh: boxwood.aio.Node | str) -> boxwood.Grader:
        """What grades it, in a fresh sandbox at a node that the agent has never been at."""
        return boxwood.Grader(
            ["bash", "-c", "bash /grading/grade.sh >/grading/reward"],
            node=fresh,
            paths=[f"{RELEASE}/done"],
            files=[
                ("/grading/fit.sh", (HERE / "fit.sh").read_bytes()),
                ("/grading/grade.sh", (HERE / "grade.sh").read_bytes()),
                ("/grading/stages", self.listing.encode()),
            ],
            rewards_file="/grading/reward",
            timeout=60,
        )

    @property
    def complaint(self) -> str:
        """What `advance.sh` says at the start: the task's prompt."""
        return complaint(1, *self.stages[0])


def command(action: int, seconds: float = 0.0) -> list[str]:
    """What is run in a turn; so many seconds longer than it takes."""
    wait = f"sleep {seconds:g}; " if seconds else ""
    # No login shell: its start files would be most of what a turn costs.
    return ["bash", "-c", f"{wait}cd {RELEASE}/stage; {COMMANDS[ACTIONS[action]]}; . /work/advance.sh"]


def complaint(number: int, kind: str, name: str) -> str:
    """What `advance.sh` says of a damaged stage; a test holds it against the script."""
    what = {
        "mode": f"bin/{name}: Permission denied",
        "crlf": f"{name}.conf: a line ends in a carriage return",
        "link": f"current: broken symbolic link, {name} is not found",
        "lock": f"run/{name}.lock: held by a process that is gone",
        "port": f"{name}.conf: no value for port",
        "pack": f"data/{name}.csv: No such file, only an archive",
        "sum": f"manifest: the digest of {name}.dat does not match",
        "order": f"index: entry {name} is out of order",
    }
    return f"stage {number}: {what[kind]}"


def damaged(kind: str, name: str) -> dict[str, bytes]:
    """The files of a stage, by path in its folder."""
    conf = f"name={name}\nlevel=info\n"
    return {
        "mode": {f"bin/{name}": f"#!/bin/sh\necho {name}\n".encode()},
        "crlf": {f"{name}.conf": (conf + "port=80\n").replace("\n", "\r\n").encode()},
        "link": {f"releases/2.0/{name}": b"2.0\n"},
        "lock": {f"run/{name}.lock": b"4711\n"},
        "port": {f"{name}.conf": conf.encode()},
        "pack": {f"{name}.tar.gz": _archive(f"data/{name}.csv", b"a,b\n1,2\n")},
        "sum": {f"{name}.dat": f"{name} 2\n".encode(), "manifest": b"0" * 64 + f"  {name}.dat\n".encode()},
        "order": {"index": f"zebra\n{name}\naardvark\n".encode()},
    }[kind]


def _archive(path: str, content: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo(path)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), mtime=0)  # the same bytes each time: set-ups are cached by them


def family() -> tuple[list[Task], list[Task]]:
    """The training tasks and the held-out ones; always the same."""
    source = random.Random(20)
    orders: set[tuple[str, ...]] = set()

    def make(name: str, names: list[str]) -> Task:
        order = tuple(source.sample(KINDS, plan.STAGES))
        while order in orders:
            order = tuple(source.sample(KINDS, plan.STAGES))
        orders.add(order)
        return Task(name, tuple(zip(order, source.sample(names, plan.STAGES), strict=True)))

    training = [make(f"training {i}", TRAINING_NAMES) for i in range(plan.TRAINING_TASKS)]
    return training, [make(f"held out {i}", HELD_OUT_NAMES) for i in range(plan.HELD_OUT_TASKS)]
