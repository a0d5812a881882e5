"""Turns: what a command answers, what a turn of several commands does, how one is broken off."""

from __future__ import annotations

import _thread
import threading
from pathlib import Path

import pytest

import boxwood
from boxwood import TurnStatus, Verdict

from fakeserver import FakeDaemon


def test_a_turn_becomes_a_node(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    turn = sandbox.run("echo out; echo err >&2; echo x > made", labels={"step": "1"}, payload=b"\0tokens")
    assert (turn.stdout, turn.stderr, turn.exit_code) == (b"out\n", b"err\n", 0)
    assert turn.text == "out\nerr\n"
    assert turn.ok
    assert not turn.timed_out
    assert turn.verdict is Verdict.FILES
    assert turn.verdict == "files"
    assert [(e.kind, e.path) for e in turn.effects] == [("file_created", "/made")]
    assert turn.node.parent_id == tree.root.id
    assert turn.node.labels == {"step": "1"}
    assert turn.node.payload() == b"\0tokens"
    assert sandbox.head_id == turn.node.id
    assert sandbox.head == turn.node
    assert turn.timings.total > 0
    assert turn.node.id in repr(turn)


def test_a_turn_without_effect_shares_its_parents_checkpoint(sandbox: boxwood.Sandbox) -> None:
    first = sandbox.run("echo x > made")
    second = sandbox.run("cat made")
    assert second.verdict is Verdict.NONE
    assert second.node.checkpoint_node_id == first.node.id
    assert first.node.checkpoint_id == second.node.checkpoint_id


def test_arguments_reach_the_command(sandbox: boxwood.Sandbox) -> None:
    argv = sandbox.run(["printf", "%s|", "a b", b"\xff"], output_limit=1000)
    assert argv.stdout == b"a b|\xff|"
    turn = sandbox.run("cat; echo $X; pwd", cwd="/work", env={"X": "y"}, stdin="in\n")
    lines = turn.stdout.text.splitlines()
    assert lines[:2] == ["in", "y"]
    assert lines[2].endswith("/work")


def test_failure_is_an_observation_unless_checked(sandbox: boxwood.Sandbox) -> None:
    turn = sandbox.run("echo why >&2; exit 3")
    assert turn.exit_code == 3
    assert not turn.ok
    with pytest.raises(boxwood.CommandFailed, match="exited with 3: why") as caught:
        sandbox.run("echo why >&2; exit 3", check=True)
    assert isinstance(caught.value.result, boxwood.Turn)
    assert caught.value.result.node.id == sandbox.head_id
    assert not isinstance(caught.value, boxwood.BoxwoodError)


def test_signals_and_deadlines_are_observations(sandbox: boxwood.Sandbox) -> None:
    killed = sandbox.run("kill -9 $$")
    assert (killed.exit_code, killed.signal) == (-1, 9)
    late = sandbox.run("sleep 60", timeout=0.1)
    assert late.timed_out
    assert late.status is TurnStatus.TIMED_OUT
    with pytest.raises(boxwood.CommandFailed, match="timed out"):
        sandbox.run("sleep 60", timeout=0.1, check=True)


def test_output_streams_while_the_command_runs(sandbox: boxwood.Sandbox, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    seen: list[bytes] = []

    def on_stdout(piece: bytes) -> None:
        seen.append(piece)
        gate.touch()  # the command ends only if its first line came before its end

    turn = sandbox.run(
        ["bash", "-c", 'echo first; while [ ! -e "$0" ]; do sleep 0.01; done; echo second', str(gate)],
        on_stdout=on_stdout,
        timeout=20,
    )
    assert turn.ok
    assert b"".join(seen) == b"first\nsecond\n" == turn.stdout


def test_output_that_is_not_text(sandbox: boxwood.Sandbox) -> None:
    turn = sandbox.run(r"printf 'a\xff\0b'")
    assert turn.stdout == b"a\xff\0b"
    assert turn.stdout.text == "a\ufffd\0b"
    assert turn.stdout.exact_text.encode("utf-8", "surrogateescape") == b"a\xff\0b"


def test_a_cut_is_stated(sandbox: boxwood.Sandbox) -> None:
    turn = sandbox.run("head -c 5000 /dev/zero | tr '\\0' x", output_limit=1000)
    assert len(turn.stdout) == 1000
    assert turn.stdout.omitted == 4000
    assert turn.stdout.text == "x" * 500 + "\n[... 4000 bytes left out ...]\n" + "x" * 500


def test_several_commands_are_one_turn(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    pieces: list[bytes] = []
    with sandbox.turn(labels={"kind": "edit"}) as t:
        t.write_file("/work/a", "alpha")
        assert t.read_file("/work/a") == b"alpha"
        result = t.exec("cat work/a", on_stdout=pieces.append)
        assert result.stdout == b"alpha"
        assert pieces == [b"alpha"]
        with pytest.raises(boxwood.CommandFailed):
            t.exec("false", check=True)
        with pytest.raises(boxwood.Busy) as busy:
            sandbox.run("true")
        assert busy.value.retryable
        assert isinstance(busy.value, boxwood.ClientError)
        with pytest.raises(boxwood.InvalidArgument, match="no result yet"):
            _ = t.node
    assert t.node.depth == 1
    assert t.node.action.steps == 3
    assert t.node.labels["kind"] == "edit"
    assert t.result.verdict is Verdict.FILES
    assert sandbox.head_id == t.node.id
    assert len(list(tree.nodes())) == 2
    with pytest.raises(boxwood.InvalidArgument, match="over"):
        t.exec("true")


def test_an_exception_cancels_the_turn(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    with pytest.raises(KeyError), sandbox.turn() as t:
        t.exec("echo x > work/a")
        raise KeyError("mine")
    (node,) = [n for n in tree.nodes() if not n.is_root]
    assert node.turn_status is TurnStatus.CANCELLED
    assert sandbox.run("true", busy_wait=10).ok  # it isn't busy any more


def test_a_callback_that_raises_cancels_the_turn(sandbox: boxwood.Sandbox, tree: boxwood.Tree) -> None:
    def stop(_: bytes) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        sandbox.run("echo x; exec sleep 60", on_stdout=stop)
    assert sandbox.run("true", busy_wait=10).ok
    statuses = [n.turn_status for n in tree.nodes() if not n.is_root]
    assert statuses.count(TurnStatus.COMPLETED) == 1


def test_keyboard_interrupt_cancels_the_turn(daemon: FakeDaemon, sandbox: boxwood.Sandbox) -> None:
    def interrupt() -> None:
        daemon.fake.started.wait(10)
        _thread.interrupt_main()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        sandbox.run("exec sleep 60")
    thread.join()
    assert daemon.fake.named("CancelTurn")
    assert sandbox.run("true", busy_wait=10).ok


def test_cancel_from_another_thread(daemon: FakeDaemon, sandbox: boxwood.Sandbox) -> None:
    turns: list[boxwood.Turn] = []
    thread = threading.Thread(target=lambda: turns.append(sandbox.run("exec sleep 60")))
    thread.start()
    assert daemon.fake.started.wait(10)
    assert sandbox.cancel()
    thread.join(20)
    assert turns[0].status is TurnStatus.CANCELLED
    assert not sandbox.cancel()


def test_busy_wait_waits(daemon: FakeDaemon, sandbox: boxwood.Sandbox, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    command = ["bash", "-c", 'while [ ! -e "$0" ]; do sleep 0.01; done', str(gate)]
    thread = threading.Thread(target=lambda: sandbox.run(command))
    thread.start()
    assert daemon.fake.started.wait(10)
    with pytest.raises(boxwood.Busy):
        sandbox.run("true")
    threading.Timer(0.05, gate.touch).start()
    assert sandbox.run("true", busy_wait=20).ok
    thread.join(20)


def test_wrong_arguments_are_refused_here(client: boxwood.Client, sandbox: boxwood.Sandbox) -> None:
    with pytest.raises(boxwood.InvalidArgument, match="ack"):
        sandbox.run("true", ack="soon")  # type: ignore[arg-type]
    with pytest.raises(boxwood.InvalidArgument, match="capture"):
        client.create_tree(image="any", capture="sometimes")  # type: ignore[arg-type]
