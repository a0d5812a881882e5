"""A client of version 0.1: its stubs and no more, through one session with the daemon at argv[1]."""

from __future__ import annotations

import sys

import grpc
from golden_v01 import boxwood_pb2 as pb
from golden_v01 import boxwood_pb2_grpc

options = [("grpc.default_authority", "localhost")]
with grpc.insecure_channel(f"unix:{sys.argv[1]}", options=options) as channel:
    stub = boxwood_pb2_grpc.BoxwoodStub(channel)  # type: ignore[no-untyped-call]
    made = stub.CreateTree(
        pb.CreateTreeRequest(image=sys.argv[2], with_sandbox=True, idempotency_key="k1"), timeout=60
    )
    command = pb.Command(shell=b"echo out; echo x > made")
    *_, last = stub.RunTurn(
        pb.RunTurnRequest(sandbox_id=made.sandbox.id, command=command, idempotency_key="k2"), timeout=60
    )
    node = last.result.node
    assert node.observation.stdout == b"out\n", node
    assert node.verdict == pb.VERDICT_FILES
    want = pb.ForkRequest.Want(node_id=node.id, count=2)
    children = list(stub.Fork(pb.ForkRequest(wants=[want], idempotency_key="k3"), timeout=60))
    assert all(child.HasField("sandbox") for child in children), children
    note = pb.NodeAnnotation(node_id=node.id, rewards={"reward": 1.0})
    stub.Annotate(pb.AnnotateRequest(annotations=[note], idempotency_key="k4"), timeout=60)
    listed = list(stub.ListNodes(pb.ListNodesRequest(tree_id=made.tree.id), timeout=60))
    assert {n.id for n in listed} == {made.root.id, node.id}
    stub.Release(pb.ReleaseRequest(sandbox_ids=[c.sandbox.id for c in children]), timeout=60)
    stub.CloseTree(pb.CloseTreeRequest(tree_id=made.tree.id, idempotency_key="k5"), timeout=60)
    code, trailers = None, {}
    try:
        stub.GetNode(pb.GetNodeRequest(node_id="none"), timeout=60, metadata=(("x-request-id", "r1"),))
    except grpc.RpcError as error:
        code, trailers = error.code(), dict(error.trailing_metadata())  # type: ignore[attr-defined]
    assert code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)
    assert "grpc-status-details-bin" in trailers
    print("done")
