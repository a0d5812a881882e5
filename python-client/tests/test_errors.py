"""The exceptions: every code, whose failure, what they say, and pickling."""

from __future__ import annotations

import pickle
import re

import grpc
import pytest

import boxwood
from boxwood import errors
from boxwood._proto import boxwood_pb2 as pb

from fakeserver import FakeDaemon, Fault, fault

TABLE = [
    ("INVALID_ARGUMENT", boxwood.InvalidArgument, boxwood.ClientError),
    ("OUT_OF_RANGE", boxwood.InvalidArgument, boxwood.ClientError),
    ("NOT_FOUND", boxwood.NotFound, boxwood.ClientError),
    ("ALREADY_EXISTS", boxwood.AlreadyExists, boxwood.ClientError),
    ("FAILED_PRECONDITION", boxwood.FailedPrecondition, boxwood.ClientError),
    ("ABORTED", boxwood.Busy, boxwood.ClientError),
    ("RESOURCE_EXHAUSTED", boxwood.ResourceExhausted, boxwood.InfrastructureError),
    ("UNAVAILABLE", boxwood.Unavailable, boxwood.InfrastructureError),
    ("DEADLINE_EXCEEDED", boxwood.DeadlineExceeded, boxwood.InfrastructureError),
    ("CANCELLED", boxwood.Cancelled, boxwood.ClientError),
    ("DATA_LOSS", boxwood.DataLoss, boxwood.InfrastructureError),
    ("UNIMPLEMENTED", boxwood.Unsupported, boxwood.InfrastructureError),
    ("PERMISSION_DENIED", boxwood.PermissionDenied, boxwood.ClientError),
    ("UNAUTHENTICATED", boxwood.PermissionDenied, boxwood.ClientError),
    ("INTERNAL", boxwood.InternalError, boxwood.InfrastructureError),
    ("UNKNOWN", boxwood.InternalError, boxwood.InfrastructureError),
]
ORIGINS = {
    pb.Error.ORIGIN_CLIENT: boxwood.ClientError,
    pb.Error.ORIGIN_INFRASTRUCTURE: boxwood.InfrastructureError,
    pb.Error.ORIGIN_AGENT: boxwood.AgentError,
}


def test_the_table_has_every_code() -> None:
    assert {code for code, _, _ in TABLE} == {c.name for c in grpc.StatusCode} - {"OK"}
    documented = dict(re.findall(r"^([A-Z_]+)(?:, UNKNOWN)? +`(\w+)`", errors.__doc__ or "", re.M))
    documented["UNKNOWN"] = documented["INTERNAL"]
    assert documented == {code: cls.__name__ for code, cls, _ in TABLE}


@pytest.mark.parametrize(("code", "cls", "origin"), TABLE, ids=[row[0] for row in TABLE])
@pytest.mark.parametrize("detail_origin", [None, *ORIGINS])
def test_a_code_becomes_its_class(
    daemon: FakeDaemon,
    client: boxwood.Client,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    cls: type[boxwood.BoxwoodError],
    origin: type[boxwood.BoxwoodError],
    detail_origin: int | None,
) -> None:
    monkeypatch.setattr("boxwood._channel.RETRY_FOR", 0.0)
    client.info()  # connected: an UNAVAILABLE after this is no ConnectionFailed
    if detail_origin is None:
        failure = Fault(code, "it failed")
    else:
        origin = ORIGINS[detail_origin]  # type: ignore[index]
        failure = fault(
            code,
            "some_reason",
            "it failed",
            hint="do this",
            retryable=True,
            retry_after_ns=250_000_000,
            origin=detail_origin,
        )
    daemon.fake.faults["ListImages"].append((failure, "before"))
    with pytest.raises(cls) as caught:
        client.images.list()
    error = caught.value
    assert type(error).__name__ == cls.__name__
    assert isinstance(error, origin)
    assert sum(isinstance(error, kind) for kind in ORIGINS.values()) == 1
    assert error.code == code
    if (code, detail_origin) == ("UNIMPLEMENTED", None):  # what grpc itself says of a method it lacks
        assert "doesn't know ListImages" in error.message
    else:
        assert error.message == "it failed"
    assert error.request_id == daemon.fake.named("ListImages")[-1][2]
    assert error.request_id in str(error)
    if detail_origin is not None:
        assert (error.reason, error.hint, error.retryable, error.retry_after) == (
            "some_reason",
            "do this",
            True,
            0.25,
        )
        assert "do this" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_reasons_choose_subclasses_only_of_their_code() -> None:
    detail = pb.Error(reason="node_withheld", origin=pb.Error.ORIGIN_CLIENT)
    assert isinstance(errors.from_detail("FAILED_PRECONDITION", "m", detail), boxwood.NodeWithheld)
    assert not isinstance(errors.from_detail("NOT_FOUND", "m", detail), boxwood.NodeWithheld)


def test_a_code_of_a_later_grpc_is_internal() -> None:
    assert isinstance(errors.from_detail("NEW_CODE", "m", None), boxwood.InternalError)


def test_builtin_kin() -> None:
    assert issubclass(boxwood.DeadlineExceeded, TimeoutError)
    assert issubclass(boxwood.ConnectionFailed, ConnectionError)


def test_fork_error_and_command_failed_pickle(tree: boxwood.Tree, daemon: FakeDaemon) -> None:
    daemon.fake.failing_children[0] = fault("RESOURCE_EXHAUSTED", "pool_full", "no room")
    (failed,) = tree.root.fork(1).failed
    copy = pickle.loads(pickle.dumps(failed))
    assert (copy.child, copy.node_id, str(copy)) == (failed.child, failed.node_id, str(failed))
    assert type(copy.error) is type(failed.error)
    with pytest.raises(boxwood.CommandFailed) as caught:
        tree.sandbox.run("exit 2", check=True)
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.result.exit_code == 2
    tree.sandbox.released = True  # its handle travelled in the turn's node


def test_a_detail_that_cannot_be_read_does_not_hide_the_error() -> None:
    class Call(grpc.RpcError, grpc.Call):  # type: ignore[misc]
        def trailing_metadata(self) -> object:
            return (("grpc-status-details-bin", b"\xff\xff"),)

        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.NOT_FOUND

        def details(self) -> str:
            return "gone"

    Call.__abstractmethods__ = frozenset()
    error = errors.from_rpc(Call(), "r1")  # type: ignore[abstract]
    assert isinstance(error, boxwood.NotFound)
    assert error.message == "gone"
