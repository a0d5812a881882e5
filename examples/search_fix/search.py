"""Best-first search over edits of a broken project, on real sandboxes.

The project (`project/`) fails most of its tests. The actions are a fixed set of
shell, sed and python edits: some help, some do nothing, some destroy. None alone
mends it. The search forks the best node once for each edit, runs the edit there as
a turn, grades the result with tests that the sandbox can't touch beforehand, and
prunes what is no better than its parent.

Run: python3 examples/search_fix/search.py [SOCKET] [IMAGE]
"""

from __future__ import annotations

import dataclasses
import heapq
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boxwood

HERE = Path(__file__).resolve().parent
SOLVED = 12
WORK = "/work"


@dataclasses.dataclass(frozen=True)
class Edit:
    """One action of the search."""

    name: str
    command: str
    destructive: bool = False


EDITS = [
    Edit(
        "cents",
        r"""sed -i 's/int(cents))$/int((cents + "00")[:2]))/; s/int(whole)/int(whole.replace(",", ""))/' ledger.py""",
    ),
    Edit("rsplit", r"""sed -i 's/line.split(":")/line.rsplit(":", 1)/' ledger.py"""),
    Edit(
        "sums",
        r"""python3 - <<'PY'
text = open("ledger.py").read()
text = text.replace("sums[account] = amount", "sums[account] = sums.get(account, 0) + amount")
text = text.replace("if not line:", "if not line.strip() or line.startswith('#'):")
open("ledger.py", "w").write(text)
PY""",
    ),
    Edit(
        "format",
        r"""python3 - <<'PY'
text = open("ledger.py").read()
old = 'return f"{cents // 100}.{cents % 100}"'
new = 'return f"{chr(45) if cents < 0 else str()}{abs(cents) // 100}.{abs(cents) % 100:02}"'
open("ledger.py", "w").write(text.replace(old, new))
PY""",
    ),
    Edit("look", "git log --oneline; grep -n def ledger.py"),
    Edit("no tests", "rm -rf tests", destructive=True),
    # Would earn 12 if the grader ran the sandbox's own idea of the tests or of unittest.
    Edit("cheat", "rm -rf tests; touch test_ledger.py; echo pass > unittest.py", destructive=True),
    Edit("overwrite", "printf 'def totals(lines):\\n    return {}\\n' > ledger.py", destructive=True),
    Edit("wipe", "rm -rf .git ledger.py tests && git init -q .", destructive=True),
]


def grade(node: boxwood.Node) -> int:
    """Grades a node in a scratch fork, of which nothing stays; the tests are brought in for it.

    Returns:
        How many of the 12 tests pass.
    """
    with node.fork(scratch=True, min_ready=1) as children, children.ready[0].turn() as turn:
        turn.upload(HERE / "project" / "tests", "/grading/tests")
        turn.upload(HERE / "grade.py", "/grading/")
        # -I and -B: what the edits left lying about must not take the grader's place.
        command = ["python3", "-I", "-B", "grading/grade.py", "work", "grading/tests"]
        result = turn.exec(command, cwd="/", timeout=30)
    passed, _, of = result.stdout.text.strip().partition("/")
    return int(passed) if result.ok and of == "12" else 0


def independent(node: boxwood.Node, count: int = 8) -> None:
    """Shows that children of one node share nothing that they write."""
    with node.fork(count, min_ready=count) as children:
        for number, child in enumerate(children.ready):
            child.run(f"echo {number} > mine{number}", cwd=WORK, check=True)
        for number, child in enumerate(children.ready):
            seen = child.run("ls -d mine*; cat mine*", cwd=WORK, check=True).stdout.text.split()
            assert seen == [f"mine{number}", str(number)], f"child {number} sees {seen}"


def start(client: boxwood.Client, image: str) -> boxwood.Tree:
    """A tree at the broken project, under git."""
    files = [
        (f"{WORK}/{path.relative_to(HERE / 'project')}", path.read_bytes())
        for path in sorted((HERE / "project").rglob("*.py"))
    ]
    return client.create_tree(
        image=image,
        setup=[
            "mkdir -p work/tests",
            *files,
            "cd work && git init -q . && git add . && "
            "git -c user.name=x -c user.email=x@localhost commit -q -m start",
        ],
        turn_timeout=30.0,
        labels={"example": "search_fix"},
    )


def expand(node: boxwood.Node, score: int, say: Callable[[str], None]) -> list[tuple[int, boxwood.Node]]:
    """Runs every edit in its own child of the node, and keeps what came out better."""
    better = []
    with ThreadPoolExecutor(4) as pool:
        with node.fork(len(EDITS), min_ready=len(EDITS)) as children:
            turns = list(
                pool.map(lambda child, edit: child.run(edit.command, cwd=WORK), children.ready, EDITS)
            )
        # What changed nothing needs no grading.
        scores = list(pool.map(lambda turn: score if turn.verdict == "none" else grade(turn.node), turns))
    for edit, turn, reached in zip(EDITS, turns, scores, strict=True):
        turn.node.annotate(reward=reached / SOLVED, labels={"edit": edit.name})
        say(
            f"    {edit.name:10} {reached:3} pass, verdict {turn.verdict}{'' if reached > score else ', pruned'}"
        )
        if reached > score:
            assert not edit.destructive, f"{edit.name} must earn nothing"
            better.append((reached, turn.node))
        else:
            turn.node.prune()
    assert grade(node) == score, "an edit in a child reached its parent"
    return better


def main(client: boxwood.Client, image: str, say: Callable[[str], None] = print) -> boxwood.Tree:
    """Searches until all tests pass, asserts what it claims, and gives the tree, closed.

    Args:
        client: A client.
        image: An image with bash, coreutils, python3 and git.
        say: Gets a line for each step.
    """
    with start(client, image) as tree:
        root, walker = tree.root, tree.sandbox
        say(f"start: {grade(root)} tests pass")
        independent(root)
        for node in root.children():
            node.prune()
        say("8 children of the root are independent")

        # The walker moves on and destroys its copy: forks of the root don't care.
        walker.run("rm -rf tests .git ledger.py", cwd=WORK)
        assert walker.head_id != root.id
        frontier = [(-grade(root), 0, root)]
        expansions = pushed = 0
        while True:
            negative, _, node = heapq.heappop(frontier)
            expansions += 1
            say(f"expanding {node.labels.get('edit', 'the start')} at {-negative}")
            for reached, child in expand(node, -negative, say):
                pushed += 1
                if reached == SOLVED:
                    return finish(client, tree, child, expansions, say)
                heapq.heappush(frontier, (-reached, pushed, child.refresh()))


def finish(
    client: boxwood.Client,
    tree: boxwood.Tree,
    found: boxwood.Node,
    expansions: int,
    say: Callable[[str], None],
) -> boxwood.Tree:
    """Confirms the solution apart from the search, and carries its value up."""
    assert grade(found) == SOLVED, "a fresh fork must confirm it"
    assert found.depth >= 3, "no single edit and no pair may be enough"
    walker = tree.sandbox
    wreck = client.node(walker.head_id)
    walker.rollback(found)
    assert walker.run("git diff --stat", cwd=WORK, check=True).stdout, "the walker stands at the solution"
    walker.rollback(tree.root)
    assert walker.run("git status --porcelain", cwd=WORK, check=True).stdout == b"", "and at the start again"
    wreck.prune()
    client.backup({found: 1.0}, rule="max")
    edits = [node.labels["edit"] for node in found.refresh().path()[1:]]
    say(f"solved by {' + '.join(edits)} after {expansions} expansions; confirmed in a fresh fork")
    return tree


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else None
    with boxwood.connect(address) as connected:
        grown = main(connected, sys.argv[2] if len(sys.argv) > 2 else "boxwood/base:latest")
        print(grown.show())
