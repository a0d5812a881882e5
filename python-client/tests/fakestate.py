"""What the fake daemon knows: sandboxes as folders, turns as commands on this host.

A sandbox is a folder, a fork copies one, a command runs on this host with the
sandbox's folder as working folder; absolute paths of transfers are taken below
it. Faults can be put in: an error for a method's next call, before or after it
did its work.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import itertools
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import any_pb2

from boxwood._proto import boxwood_pb2 as pb
from boxwood._proto import status_pb2

CODES = {code.name: code for code in grpc.StatusCode}


class Fault(Exception):
    """An error that the fake answers with; without a detail it looks like grpc's own."""

    def __init__(self, code: str, message: str, detail: pb.Error | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.detail = code, message, detail


def fault(code: str, reason: str, message: str, **fields: Any) -> Fault:
    fields.setdefault("origin", pb.Error.ORIGIN_CLIENT)
    return Fault(code, message, pb.Error(reason=reason, **fields))


def digest_of(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = "link " + os.readlink(path)
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest() + oct(path.stat().st_mode)
        else:
            found[name] = "folder"
    return found


class Box:
    def __init__(self, message: pb.Sandbox, folder: Path, defaults: pb.Defaults) -> None:
        self.message, self.folder, self.defaults = message, folder, defaults
        self.busy = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.cancelled = threading.Event()
        self.turn: OpenTurn | None = None


class OpenTurn:
    def __init__(self, box: Box, before: dict[str, str]) -> None:
        self.box, self.before = box, before
        self.texts: list[bytes] = []
        self.last = pb.Observation()
        self.started = time.time_ns()


def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Puts faults in, answers repeated keys from the log, and sends errors with their details."""
    name = method.__name__

    @functools.wraps(method)
    def unary(self: State, request: Any, context: grpc.ServicerContext) -> Any:
        replies = list(stream(self, request, context))
        return replies[0] if replies else None

    @functools.wraps(method)
    def stream(self: State, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        self.saw(name, request, context)
        if name in self.stalled:
            self.stalling.set()
            self.unstalled.wait(30)
        try:
            planned = self.faults[name].popleft() if self.faults[name] else None
            if planned is not None and planned[1] == "before":
                raise planned[0]
            name_of_run, _, attempt = (
                dict(context.invocation_metadata()).get("x-boxwood-run", "").rpartition("/")
            )
            if name_of_run and self.runs.get(name_of_run) != int(attempt):
                raise fault(
                    "FAILED_PRECONDITION", "attempt_superseded", f"a newer attempt of {name_of_run} is open"
                )
            key = getattr(request, "idempotency_key", "")
            if key and key in self.log:
                old_request, old_replies = self.log[key]
                if old_request != request.SerializeToString(deterministic=True):
                    raise fault("FAILED_PRECONDITION", "key_reused", "the key was used with another request")
                yield from old_replies
                return
            replies = []
            result = method(self, request, context)
            for reply in result if name in STREAMS else [result]:
                replies.append(reply)
                if not (planned is not None and name not in STREAMS):
                    yield reply
                if planned is not None and planned[1] == len(replies):
                    raise planned[0]
            if key:
                self.log[key] = (request.SerializeToString(deterministic=True), replies)
            if planned is not None:
                raise planned[0]
        except Fault as failure:
            if failure.detail is not None:
                item = any_pb2.Any()
                detail = pb.Error()
                detail.CopyFrom(failure.detail)
                detail.request_id = detail.request_id or dict(context.invocation_metadata())["x-request-id"]
                item.Pack(detail)
                status = status_pb2.Status(
                    code=CODES[failure.code].value[0], message=failure.message, details=[item]
                )
                context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            context.abort(CODES[failure.code], failure.message)

    return stream if name in STREAMS else unary


STREAMS = {
    "ImportImage",
    "RunTurn",
    "Exec",
    "Download",
    "Fork",
    "ListNodes",
    "WatchTree",
    "ExportStats",
    "ExportTree",
}


class State:
    """What the fake knows, and what its calls have in common."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.numbers = itertools.count(1)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.images: dict[str, tuple[pb.Image, Path]] = {}
        self.trees: dict[str, pb.Tree] = {}
        self.defaults: dict[str, pb.Defaults] = {}
        self.nodes: dict[str, pb.Node] = {}
        self.snapshots: dict[str, Path] = {}
        self.payloads: dict[str, bytes] = {}
        self.boxes: dict[str, Box] = {}
        self.turns: dict[str, OpenTurn] = {}
        self.setups: dict[str, Path] = {}
        self.events: list[tuple[str, pb.TreeEvent]] = []
        self.log: dict[str, tuple[bytes, list[Any]]] = {}
        self.tables: dict[str, bytes] = {}
        self.runs: dict[str, int] = {}  # the newest attempt of each
        # For a method's next calls: the error, and when: "before", "after", or after how many messages.
        self.faults: dict[str, collections.deque[tuple[Fault, str | int]]] = collections.defaultdict(
            collections.deque
        )
        self.calls: list[tuple[str, Any, str, float]] = []
        # Calls that aren't answered until `unstalled`; `stalling` is set when one has come.
        self.stalled: set[str] = set()
        self.stalling, self.unstalled = threading.Event(), threading.Event()
        self.failing_children: dict[int, Fault] = {}
        self.started = threading.Event()  # a command runs

    # -- helpers

    def saw(self, name: str, request: Any, context: grpc.ServicerContext) -> None:
        metadata = dict(context.invocation_metadata())
        left = context.time_remaining()
        self.calls.append((name, request, metadata.get("x-request-id", ""), left if left is not None else -1))

    def named(self, name: str) -> list[tuple[str, Any, str, float]]:
        return [call for call in self.calls if call[0] == name]

    def id(self, prefix: str) -> str:
        return f"{prefix}_{next(self.numbers):06d}"

    def box(self, sandbox_id: str) -> Box:
        try:
            return self.boxes[sandbox_id]
        except KeyError:
            raise fault(
                "NOT_FOUND",
                "no_such_sandbox",
                f"there is no sandbox {sandbox_id!r}",
                hint="it may have ended",
            ) from None

    def get(self, node_id: str) -> pb.Node:
        try:
            return self.nodes[node_id]
        except KeyError:
            raise fault("NOT_FOUND", "no_such_node", f"there is no node {node_id!r}") from None

    def event(self, tree_id: str, **change: Any) -> int:
        with self.changed:
            index = len(self.events) + 1
            event = pb.TreeEvent(index=index)
            for name, value in change.items():
                if name == "removed_node_id":
                    event.removed_node_id = value
                else:
                    getattr(event, name).CopyFrom(value)
            self.events.append((tree_id, event))
            self.changed.notify_all()
            return index

    def snapshot(self, source: Path) -> Path:
        target = self.folder / self.id("snap")
        shutil.copytree(source, target, symlinks=True)
        return target

    def new_node(self, tree_id: str, parent: pb.Node | None, folder: Path, **fields: Any) -> pb.Node:
        with self.lock:
            node = pb.Node(id=self.id("nd"), tree_id=tree_id, capture=pb.CAPTURE_STATUS_CAPTURED, **fields)
            node.process_kind = pb.PROCESS_KIND_EMPTY
            if parent is not None:
                node.parent_id, node.depth = parent.id, parent.depth + 1
                node.ordinal = sum(n.parent_id == parent.id for n in self.nodes.values())
            if parent is not None and node.verdict == pb.VERDICT_NONE:
                self.snapshots[node.id] = self.snapshots[parent.id]
                node.checkpoint_id, node.checkpoint_node_id = parent.checkpoint_id, parent.checkpoint_node_id
            else:
                self.snapshots[node.id] = self.snapshot(folder)
                node.checkpoint_id, node.checkpoint_node_id = self.id("ck"), node.id
            self.nodes[node.id] = node
            node.modify_index = self.event(tree_id, node=node)
            self.trees[tree_id].node_count += 1
            return node

    def new_box(self, node: pb.Node, **fields: Any) -> Box:
        with self.lock:
            message = pb.Sandbox(
                id=self.id("sb"), tree_id=node.tree_id, head_id=node.id, generation=self.id("gn"), **fields
            )
            message.hostname = message.id.replace("_", "-")
            folder = self.snapshot(self.snapshots[node.id])
            box = self.boxes[message.id] = Box(message, folder, self.defaults[node.tree_id])
            return box

    def path(self, box: Box, path: str) -> Path:
        return box.folder / path.lstrip("/")

    def begin(self, sandbox_id: str, wait_ns: int) -> OpenTurn:
        box = self.box(sandbox_id)
        if not box.busy.acquire(timeout=wait_ns / 1e9):
            raise fault("ABORTED", "sandbox_busy", f"{sandbox_id} runs a turn", retryable=True)
        box.cancelled.clear()
        box.turn = OpenTurn(box, digest_of(box.folder))
        return box.turn

    def finish(self, turn: OpenTurn, status: Any, input: pb.NodeInput) -> pb.TurnResult:
        box = turn.box
        after = digest_of(box.folder)
        effects = [
            pb.Effect(kind=kind, subject=os.fsencode("/" + name))
            for name in sorted(turn.before.keys() | after.keys())
            for kind in [
                pb.Effect.FILE_CREATED
                if name not in turn.before
                else pb.Effect.FILE_DELETED
                if name not in after
                else pb.Effect.FILE_CHANGED
            ]
            if turn.before.get(name) != after.get(name)
        ]
        fields: dict[str, Any] = {
            "action": pb.Action(text=b"; ".join(turn.texts), steps=len(turn.texts)),
            "observation": turn.last,
            "turn_status": pb.TURN_STATUS_CANCELLED if box.cancelled.is_set() else status,
            "verdict": pb.VERDICT_FILES if effects else pb.VERDICT_NONE,
            "effects": effects[:16],
            "effect_count": len(effects),
            "labels": dict(input.labels),
            "policy_version": input.policy_version,
            "started_at": turn.started,
            "ended_at": time.time_ns(),
            "sandbox_id": box.message.id,
        }
        if box.message.scratch:
            node = pb.Node(**fields)
        else:
            node = self.new_node(box.message.tree_id, self.get(box.message.head_id), box.folder, **fields)
            box.message.head_id = node.id
            if input.payload:
                self.set_payload(node, input.payload)
        box.turn = None
        box.busy.release()
        return pb.TurnResult(node=node, timings=pb.Timings(total_ns=time.time_ns() - turn.started))

    def set_payload(self, node: pb.Node, payload: bytes) -> None:
        self.payloads[node.id] = payload
        node.payload_digest, node.payload_bytes = hashlib.sha256(payload).hexdigest(), len(payload)

    def execute(
        self, turn: OpenTurn, command: pb.Command, context: grpc.ServicerContext
    ) -> Iterator[pb.TurnEvent | int]:
        """Output as it comes; the last item is the turn's status."""
        box = turn.box
        turn.texts.append(command.shell or b" ".join(command.argv))
        argv = list(command.argv) or [b"bash", b"-c", command.shell]
        env = {**os.environ, **box.defaults.env, **command.env, "BOX": str(box.folder)}
        deadline = (command.deadline_ns or box.defaults.turn_deadline_ns or int(60e9)) / 1e9
        # A turn of the real daemon names no file on this side; nor does this one.
        cwd = self.path(box, command.cwd or box.defaults.cwd or "/")
        with subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as process:
            box.process = process
            self.started.set()

            def kill() -> None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

            timed_out = threading.Event()
            timer = threading.Timer(deadline, lambda: (timed_out.set(), kill()))
            timer.start()
            ended = threading.Event()

            def gone() -> None:  # also called when the call has ended as it should
                if not ended.is_set():
                    box.cancelled.set()
                    kill()

            context.add_callback(gone)
            if box.cancelled.is_set():
                kill()
            errors: list[bytes] = []
            assert process.stdin
            assert process.stdout
            assert process.stderr
            reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))  # type: ignore[union-attr]
            reader.start()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(command.stdin)
                process.stdin.close()
            out = b""
            while chunk := process.stdout.read1(65536):  # type: ignore[attr-defined]
                out += chunk
                yield pb.TurnEvent(stdout=chunk)
            reader.join()
            if errors[0]:
                yield pb.TurnEvent(stderr=errors[0])
            code = process.wait()
            ended.set()
            timer.cancel()
        box.process = None
        limit = command.output_limit or 65536
        turn.last = pb.Observation(
            stdout=out if len(out) <= limit else out[: limit // 2] + out[-(limit // 2) :],
            stdout_omitted=max(len(out) - limit, 0),
            stdout_cut_at=limit // 2,
            stderr=errors[0][:limit],
            exit_code=code if code >= 0 else -1,
            signal=max(-code, 0),
        )
        status = pb.TURN_STATUS_TIMED_OUT if timed_out.is_set() else pb.TURN_STATUS_COMPLETED
        yield int(pb.TURN_STATUS_CANCELLED if box.cancelled.is_set() else status)

    def open(self, turn_id: str) -> OpenTurn:
        turn = self.turns.get(turn_id)
        if turn is None or turn.box.turn is not turn:
            raise fault("FAILED_PRECONDITION", "turn_over", f"the turn {turn_id!r} is over")
        return turn

    @contextlib.contextmanager
    def within(self, sandbox_id: str, turn_id: str, text: str) -> Iterator[tuple[Box, dict[str, Any]]]:
        """A write inside an open turn, or as a turn of its own; fills in the reply's result."""
        reply: dict[str, Any] = {}
        turn = self.open(turn_id) if turn_id else self.begin(sandbox_id, 0)
        turn.texts.append(text.encode())
        try:
            yield turn.box, reply
        except BaseException:
            if not turn_id:
                turn.box.turn = None
                turn.box.busy.release()
            raise
        if not turn_id:
            reply["result"] = self.finish(turn, pb.TURN_STATUS_COMPLETED, pb.NodeInput())
