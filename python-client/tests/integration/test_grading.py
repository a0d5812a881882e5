"""Grading on a real daemon, by Python graders and against agents that cheat."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import boxwood

from .conftest import REPOSITORY

pytestmark = pytest.mark.integration

TEST = b"""
import json, runpy, sys
add = runpy.run_path("/work/calc.py").get("add")
passed = sum(bool(add) and add(a, b) == a + b for a, b in [(1, 2), (0, 0), (-5, 3), (10, 5)])
json.dump({"reward": passed / 4, "lines": 1.5}, open("/grading/rewards.json", "w"))
"""
HONEST = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a\n"


def grader(image: str | None) -> boxwood.Grader:
    return boxwood.Grader(
        ["python3", "-I", "/grading/test.py"],
        image=image,
        paths=["/work/calc.py"] if image else [],
        files=[("/grading/test.py", TEST)],
        rewards_file="/grading/rewards.json",
        timeout=60,
    )


def test_an_honest_agent_is_graded(client: boxwood.Client, base_image: str) -> None:
    with client.create_tree(image=base_image, setup=["mkdir -p /work"]) as tree:
        for source, reward in [(HONEST, 1.0), (WRONG, 0.25)]:
            node = tree.sandbox.write_file("/work/calc.py", source).node
            for where in (base_image, None):
                found = node.evaluate(grader(where))
                assert found.rewards == {"reward": reward, "lines": 1.5}
                assert found.reward == reward
                assert (found.ok, found.problem, found.missing) == (True, "", ())
        assert len(list(tree.nodes())) == 3


def test_an_agent_that_cheats_earns_nothing(client: boxwood.Client, base_image: str) -> None:
    """It rewrites the tests, /usr/bin/python3, PATH and what the shell and python read at their start."""
    cheat = r"""
        mkdir -p /grading /root/.local /usr/local/bin
        echo '{"reward": 1}' > /grading/rewards.json
        echo 'import json; json.dump({"reward": 1}, open("/grading/rewards.json", "w"))' > /grading/test.py
        printf '#!/bin/sh\nmkdir -p /grading; echo "{\\"reward\\": 1}" > /grading/rewards.json\n' > /cheat
        chmod 755 /cheat
        echo 'PATH=/cheats:$PATH' | tee -a /etc/profile /root/.bashrc /root/.profile /etc/environment
        mkdir /cheats; cp /cheat /cheats/python3; cp /cheat /usr/local/bin/python3
        rm -f /usr/bin/python3; cp /cheat /usr/bin/python3
        rm -f /usr/bin/cat /bin/true; cp /cheat /bin/true
    """
    with client.create_tree(image=base_image, setup=["mkdir -p /work"]) as tree:
        tree.sandbox.write_file("/work/calc.py", WRONG)
        node = tree.sandbox.run(cheat).node
        assert node.verdict == "files"
        assert node.evaluate(grader(base_image)).rewards["reward"] == 0.25
        # So would an agent fare that isn't kept apart: this is why graders have an image.
        assert node.evaluate(grader(None)).reward == 1
        # Without any answer at all it is 0, and what is missing is said.
        empty = tree.sandbox.run("rm -rf /work", check=False).node
        found = empty.evaluate(grader(base_image))
        assert found.missing == ("/work/calc.py",)
        assert found.rewards == {}
        assert found.problem == "the grader wrote no /grading/rewards.json"


def test_the_command_grades(client: boxwood.Client, image: str, socket_path: str, tmp_path: Path) -> None:
    binary = os.environ.get("BOXWOOD_BIN") or REPOSITORY / "bin" / "boxwood"
    (tmp_path / "test.sh").write_text("read a < /work/answer; echo .$a > /rewards")
    with client.create_tree(image=image, setup=["mkdir -p /work"]) as tree:
        node = tree.sandbox.run("echo 75 > /work/answer; echo cheat > /rewards").node
        words = [binary, "--address", socket_path, "grade", node.id, "--image", image, "--annotate"]
        words += ["--path", "/work", "--file", f"/test.sh={tmp_path}/test.sh", "--rewards", "/rewards", "--"]
        done = subprocess.run([*words, "bash", "/test.sh"], capture_output=True, text=True, timeout=60)
        assert (done.stdout, done.returncode) == ("reward 0.75\n", 0), done.stderr
        assert node.refresh().rewards == {"reward": 0.75}


def test_a_prepared_node_grades(client: boxwood.Client, image: str) -> None:
    with (
        client.create_tree(
            image=image, setup=["mkdir /key; echo 42 > /key/answer"], with_sandbox=False
        ) as key,
        client.create_tree(image=image) as tree,
    ):
        node = tree.sandbox.run("mkdir -p /work; echo 42 > /work/answer").node
        by_node = boxwood.Grader(
            "read a < /work/answer; read b < /key/answer; [ $a = $b ]", node=key.root, paths=["/work"]
        )
        assert node.evaluate(by_node).rewards == {"reward": 1.0}
        slow = node.evaluate(boxwood.Grader("sleep 100", timeout=0.2))
        assert (slow.timed_out, slow.rewards) == (True, {})
    with pytest.raises(boxwood.InvalidArgument, match="not both"):
        boxwood.Grader("true", image="a", node="b")
