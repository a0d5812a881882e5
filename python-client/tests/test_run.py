"""Runs and their attempts."""

from __future__ import annotations

import pickle

import pytest

import boxwood

from fakeserver import FakeDaemon


def test_a_new_attempt_ends_the_old(client: boxwood.Client, image: boxwood.Image) -> None:
    first = client.open_run("grpo")
    assert (first.attempt, first.released, first.adopted) == (1, 0, [])
    tree = first.client.create_tree(image=image)
    old = tree.sandbox
    old.run("true")
    with client.open_run("grpo", adopt=True) as second:
        assert second.attempt == 2
        (adopted,) = second.adopted
        assert adopted.id == old.id
        with pytest.raises(boxwood.FailedPrecondition) as late:
            old.run("true")
        assert late.value.reason == "attempt_superseded"
        assert adopted.run("echo on").text == "on\n"
        copy = pickle.loads(pickle.dumps(second.client))
        assert copy.tree(tree.id).id == tree.id  # its calls are of the run, too
        copy.close()
    old.released = True
    with pytest.raises(boxwood.FailedPrecondition):
        first.close()
    first.close()  # again: does nothing
    with pytest.raises(boxwood.BoxwoodError, match="closed"):
        second.client.trees()


def test_calls_say_what_run_they_are_of(daemon: FakeDaemon, client: boxwood.Client) -> None:
    run = client.open_run("grpo")
    daemon.fake.runs["grpo"] = 7
    client.trees()  # of no run
    with pytest.raises(boxwood.FailedPrecondition, match="newer attempt"):
        run.client.trees()
    with pytest.raises(boxwood.FailedPrecondition, match="newer attempt"):
        run.close()
