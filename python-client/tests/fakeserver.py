"""A daemon in small, for tests of the client: the service over `fakestate`."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import signal
import subprocess
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from boxwood._proto import boxwood_pb2 as pb
from boxwood._proto import boxwood_pb2_grpc

from fakestate import CODES, Fault, State, digest_of, fault, guarded

__all__ = ["FakeDaemon", "Fault", "fault"]


class Fake(State, boxwood_pb2_grpc.BoxwoodServicer):
    """The service."""

    @guarded
    def GetInfo(self, request: Any, context: Any) -> Any:
        return pb.GetInfoResponse(
            version="fake",
            kernel=os.uname().release,
            sandboxes=len(self.boxes),
            nodes=len(self.nodes),
            capabilities=[
                pb.Capability(name="btrfs", state=pb.Capability.YES),
                pb.Capability(name="criu", state=pb.Capability.UNKNOWN, detail="not tried"),
            ],
        )

    @guarded
    def ImportImage(self, request: Any, context: Any) -> Any:
        source = Path(request.path)
        if not source.is_dir():
            raise fault("INVALID_ARGUMENT", "bad_image", f"{source} is no image")
        yield pb.ImportImageEvent(step="reading", done_bytes=0, total_bytes=10)
        folder = self.snapshot(source)
        image = pb.Image(
            digest="sha256:" + hashlib.sha256(repr(digest_of(folder)).encode()).hexdigest(),
            names=[request.name or "image:latest"],
        )
        self.images[image.digest] = (image, folder)
        yield pb.ImportImageEvent(step="done", done_bytes=10, total_bytes=10, image=image)

    @guarded
    def ListImages(self, request: Any, context: Any) -> Any:
        return pb.ListImagesResponse(images=[image for image, _ in self.images.values()])

    def find_image(self, name: str) -> tuple[pb.Image, Path]:
        for image, folder in self.images.values():
            if name == image.digest or name in image.names:
                return image, folder
        raise fault("NOT_FOUND", "no_such_image", f"there is no image {name!r}", hint="boxwood image import")

    @guarded
    def RemoveImage(self, request: Any, context: Any) -> Any:
        image, _ = self.find_image(request.image)
        for tree in self.trees.values():
            if tree.image == image.digest:
                raise fault("FAILED_PRECONDITION", "image_in_use", f"tree {tree.id} stands on it")
        del self.images[image.digest]
        return pb.RemoveImageResponse(freed_bytes=1)

    @guarded
    def CreateTree(self, request: Any, context: Any) -> Any:
        if request.WhichOneof("start") == "image":
            image, folder = self.find_image(request.image)
            digest = image.digest
        else:
            node = self.get(request.node_id)
            folder, digest = self.snapshots[node.id], self.trees[node.tree_id].image
        key = digest + request.node_id + repr(list(request.setup))
        cached = key in self.setups
        if not cached:
            prepared = self.snapshot(folder)
            for step in request.setup:
                if step.WhichOneof("step") == "file":
                    target = prepared / step.file.path.lstrip("/")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(step.file.content)
                    target.chmod(step.file.mode or 0o644)
                else:
                    done = subprocess.run(["bash", "-c", step.command], cwd=prepared, capture_output=True)
                    if done.returncode:
                        raise fault("FAILED_PRECONDITION", "setup_failed", done.stderr.decode())
            self.setups[key] = prepared
        tree = pb.Tree(id=self.id("tr"), image=digest, labels=dict(request.labels), created_at=time.time_ns())
        self.trees[tree.id] = tree
        self.defaults[tree.id] = request.defaults
        root = self.new_node(tree.id, None, self.setups[key], turn_status=pb.TURN_STATUS_COMPLETED)
        tree.root_id = root.id
        reply = pb.CreateTreeResponse(tree=tree, root=root, setup_cached=cached)
        if request.with_sandbox:
            reply.sandbox.CopyFrom(self.new_box(root).message)
        return reply

    @guarded
    def CloseTree(self, request: Any, context: Any) -> Any:
        mine = [i for i, box in self.boxes.items() if box.message.tree_id == request.tree_id]
        for sandbox_id in mine:
            del self.boxes[sandbox_id]
        self.trees[request.tree_id].closed = True
        self.event(request.tree_id, tree=self.trees[request.tree_id])
        return pb.CloseTreeResponse(released=len(mine))

    @guarded
    def OpenRun(self, request: Any, context: Any) -> Any:
        self.runs[request.name] = self.runs.get(request.name, 0) + 1
        left = [box.message for box in self.boxes.values()]  # a fake has one run
        reply = pb.OpenRunResponse(attempt=self.runs[request.name])
        if request.adopt:
            reply.adopted.extend(left)
        else:
            reply.released = len(left)
            self.boxes.clear()
        return reply

    @guarded
    def CloseRun(self, request: Any, context: Any) -> Any:
        released = len(self.boxes)
        self.boxes.clear()
        return pb.CloseRunResponse(released=released)

    @guarded
    def ExportTree(self, request: Any, context: Any) -> Any:
        yield pb.ExportTreeChunk(data=b"archive of ")
        yield pb.ExportTreeChunk(data=f"{request.tree_id} {request.node_id}".encode())

    def ImportTree(self, requests: Any, context: Any) -> Any:
        return self._import(next(requests).start, (context, requests))

    def _import(self, start: Any, rest: Any) -> Any:
        context, requests = rest
        archive = b"".join(r.chunk for r in requests)

        def ImportTree(self: Fake, start: Any, context: Any) -> Any:
            if not archive.startswith(b"archive of "):
                raise fault("DATA_LOSS", "archive_damaged", "this is no archive of a tree")
            tree = pb.Tree()
            tree.CopyFrom(self.trees[archive.split()[2].decode()])
            if not start.new_ids:
                raise fault("ALREADY_EXISTS", "tree_exists", f"tree {tree.id} is here")
            tree.id = self.id("tr")
            self.trees[tree.id] = tree
            return pb.ImportTreeResponse(tree=tree, nodes=1)

        return guarded(ImportTree)(self, start, context)

    @guarded
    def ListTrees(self, request: Any, context: Any) -> Any:
        want = dict(request.labels).items()
        return pb.ListTreesResponse(trees=[t for t in self.trees.values() if want <= dict(t.labels).items()])

    @guarded
    def RunTurn(self, request: Any, context: Any) -> Any:
        turn = self.begin(request.sandbox_id, request.busy_wait_ns)
        status = 0
        try:
            for event in self.execute(turn, request.command, context):
                if isinstance(event, int):
                    status = event
                elif not request.result_only:
                    yield event
        except GeneratorExit:  # the client went away
            turn.box.cancelled.set()
            self.finish(turn, status, request.node)
            raise
        yield pb.TurnEvent(result=self.finish(turn, status, request.node))

    @guarded
    def BeginTurn(self, request: Any, context: Any) -> Any:
        turn_id = self.id("tn")
        self.turns[turn_id] = self.begin(request.sandbox_id, request.busy_wait_ns)
        return pb.BeginTurnResponse(turn_id=turn_id)

    @guarded
    def Exec(self, request: Any, context: Any) -> Any:
        turn = self.open(request.turn_id)
        for event in self.execute(turn, request.command, context):
            if isinstance(event, int):
                yield pb.TurnEvent(command=pb.CommandResult(observation=turn.last, status=event, wall_ns=1))
            elif not request.result_only:
                yield event

    @guarded
    def EndTurn(self, request: Any, context: Any) -> Any:
        return self.finish(self.open(request.turn_id), pb.TURN_STATUS_COMPLETED, request.node)

    @guarded
    def CancelTurn(self, request: Any, context: Any) -> Any:
        box = self.box(request.sandbox_id)
        if box.turn is None:
            return pb.CancelTurnResponse(was_running=False)
        box.cancelled.set()
        if box.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(box.process.pid, signal.SIGKILL)
        return pb.CancelTurnResponse(was_running=True)

    @guarded
    def ReadFile(self, request: Any, context: Any) -> Any:
        path = self.path(self.box(request.sandbox_id), request.path)
        if not path.is_file():
            raise fault("NOT_FOUND", "no_such_file", f"there is no file {request.path!r}")
        data = path.read_bytes()
        limit = min(request.limit or 4 << 20, 4 << 20)
        return pb.ReadFileResponse(
            content=data[request.offset : request.offset + limit], size=len(data), mode=path.stat().st_mode
        )

    @guarded
    def WriteFile(self, request: Any, context: Any) -> Any:
        with self.within(request.sandbox_id, request.turn_id, f"# write {request.path}") as (box, reply):
            path = self.path(box, request.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab" if request.append else "wb") as file:
                file.write(request.content)
            path.chmod(request.mode or 0o644)
        return pb.WriteFileResponse(**reply)

    def Upload(self, requests: Any, context: Any) -> Any:
        return self._upload(next(requests).start, (context, requests))

    def _upload(self, start: Any, rest: Any) -> Any:
        context, requests = rest
        chunks = [r.chunk for r in requests]

        def Upload(self: Fake, start: Any, context: Any) -> Any:
            data = io.BytesIO(b"".join(chunks))
            try:
                with tarfile.open(fileobj=data) as archive:
                    entries = len(archive.getmembers())
            except tarfile.ReadError as error:  # a stream that its client broke off can end as if it were whole
                raise fault("INVALID_ARGUMENT", "bad_archive", str(error)) from None
            data.seek(0)
            with self.within(start.sandbox_id, start.turn_id, f"# upload {start.path}") as (box, reply):
                with tarfile.open(fileobj=data) as archive:
                    target = self.path(box, start.path)
                    target.mkdir(parents=True, exist_ok=True)
                    archive.extractall(target, filter="tar")
                    reply["entries"] = entries
            return pb.UploadResponse(**reply)

        return guarded(Upload)(self, start, context)

    @guarded
    def Download(self, request: Any, context: Any) -> Any:
        path = self.path(self.box(request.sandbox_id), request.path)
        if not path.exists():
            raise fault("NOT_FOUND", "no_such_file", f"there is no {request.path!r}")
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as archive:
            archive.add(path, path.name)
        whole = data.getvalue()
        for at in range(0, len(whole), 700):  # odd pieces on purpose
            yield pb.DownloadResponse(chunk=whole[at : at + 700])

    @guarded
    def Fork(self, request: Any, context: Any) -> Any:
        ready = []
        results = []
        for want_number, want in enumerate(request.wants):
            if want.WhichOneof("from") == "node_id":
                node = self.get(want.node_id)
            else:
                node = self.get(self.box(want.sandbox_id).message.head_id)
            if node.capture == pb.CAPTURE_STATUS_WITHHELD:
                raise fault("FAILED_PRECONDITION", "node_withheld", f"{node.id}: {node.withheld_reason}")
            for child in reversed(range(want.count)):  # out of order on purpose
                failure = self.failing_children.get(child)
                if failure is not None and not request.replace_failed:
                    results.append(
                        pb.ForkResult(
                            want=want_number,
                            child=child,
                            error=failure.detail,
                            code=CODES[failure.code].value[0],
                            message=failure.message,
                        )
                    )
                    continue
                box = self.new_box(node, scratch=request.scratch, labels=dict(request.labels))
                ready.append(box)
                results.append(pb.ForkResult(want=want_number, child=child, sandbox=box.message, ready_ns=1))
        if len(ready) < request.min_ready:
            for box in ready:
                del self.boxes[box.message.id]
            raise fault(
                "RESOURCE_EXHAUSTED",
                "too_few_ready",
                f"{len(ready)} of {request.min_ready} children",
                retryable=True,
                retry_after_ns=int(5e8),
                origin=pb.Error.ORIGIN_INFRASTRUCTURE,
            )
        yield from results

    @guarded
    def Rollback(self, request: Any, context: Any) -> Any:
        box, node = self.box(request.sandbox_id), self.get(request.node_id)
        box.folder = self.snapshot(self.snapshots[node.id])
        box.message.head_id, box.message.generation = node.id, self.id("gn")
        return pb.RollbackResponse(sandbox=box.message)

    @guarded
    def Release(self, request: Any, context: Any) -> Any:
        found = [i for i in request.sandbox_ids if self.boxes.pop(i, None)]
        return pb.ReleaseResponse(released=len(found))

    @guarded
    def Renew(self, request: Any, context: Any) -> Any:
        for sandbox_id in request.sandbox_ids:
            self.box(sandbox_id).message.lease_until = time.time_ns() + request.lease_ns
        return pb.RenewResponse(sandboxes=[self.boxes[i].message for i in request.sandbox_ids])

    @guarded
    def ListSandboxes(self, request: Any, context: Any) -> Any:
        return pb.ListSandboxesResponse(
            sandboxes=[b.message for b in self.boxes.values() if request.tree_id in ("", b.message.tree_id)]
        )

    @guarded
    def WaitCaptured(self, request: Any, context: Any) -> Any:
        return pb.WaitCapturedResponse(nodes=[self.get(i) for i in reversed(request.node_ids)])

    @guarded
    def GetNode(self, request: Any, context: Any) -> Any:
        return self.get(request.node_id)

    def below(self, node_id: str) -> set[str]:
        found = {node_id}
        for node in sorted(self.nodes.values(), key=lambda n: n.depth):
            if node.parent_id in found:
                found.add(node.id)
        return found

    @guarded
    def ListNodes(self, request: Any, context: Any) -> Any:
        inside = self.below(request.under) if request.under else None
        parents = {n.parent_id for n in self.nodes.values()}
        known = "depth" in request.DESCRIPTOR.fields_by_name  # not in those of 0.1
        depth = request.depth if known and request.HasField("depth") else None
        count = 0
        for node in list(self.nodes.values()):
            if (
                node.tree_id != request.tree_id
                or (inside is not None and node.id not in inside)
                or (request.capture and node.capture not in request.capture)
                or (request.verdict and node.verdict not in request.verdict)
                or (depth is not None and node.depth != depth)
                or not dict(request.labels).items() <= dict(node.labels).items()
                or (request.leaves_only and node.id in parents)
            ):
                continue
            count += 1
            if request.limit and count > request.limit:
                return
            copy = pb.Node()
            copy.CopyFrom(node)
            if request.brief:
                copy.ClearField("observation")
                copy.ClearField("effects")
            yield copy

    @guarded
    def WatchTree(self, request: Any, context: Any) -> Any:
        after = request.after_index
        context.add_callback(self.wake)
        while context.is_active():
            with self.changed:
                new = [e for t, e in self.events if t == request.tree_id and e.index > after]
                if not new:
                    self.changed.wait(timeout=1)
            for event in new:
                after = event.index
                yield event

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()

    @guarded
    def Annotate(self, request: Any, context: Any) -> Any:
        index = 0
        for note in request.annotations:
            self.get(note.node_id)
        for note in request.annotations:
            node = self.get(note.node_id)
            for name, value in note.rewards.items():
                node.rewards[name] = value
            for name, label in note.labels.items():
                node.labels[name] = label
                if not label:
                    del node.labels[name]
            if note.HasField("value"):
                node.value = note.value
            if note.HasField("visits"):
                node.visits = note.visits
            if note.HasField("policy_version"):
                node.policy_version = note.policy_version
            if note.HasField("payload"):
                self.set_payload(node, note.payload)
            index = node.modify_index = self.event(node.tree_id, node=node)
        return pb.AnnotateResponse(index=index)

    @guarded
    def Backup(self, request: Any, context: Any) -> Any:
        changed = set()
        for item in request.items:
            node_id, value = item.node_id, item.value
            while node_id:
                node = self.get(node_id)
                node.visits += 1
                if request.rule == pb.BackupRequest.MEAN:
                    node.value += (value - node.value) / node.visits
                elif request.rule == pb.BackupRequest.MAX:
                    node.value = max(node.value, value)
                else:
                    node.value += value
                if request.rule == pb.BackupRequest.DISCOUNTED:
                    value *= request.discount
                changed.add(node_id)
                node_id = node.parent_id
        return pb.BackupResponse(nodes_changed=len(changed))

    @guarded
    def GetPayload(self, request: Any, context: Any) -> Any:
        return pb.GetPayloadResponse(
            payload=self.payloads.get(request.node_id, b""), digest=self.get(request.node_id).payload_digest
        )

    @guarded
    def Prune(self, request: Any, context: Any) -> Any:
        inside = self.below(self.get(request.node_id).id)
        if request.keep_node:
            inside.discard(request.node_id)
        for node_id in inside:
            if self.nodes[node_id].pinned:
                raise fault("FAILED_PRECONDITION", "node_pinned", f"{node_id} is pinned")
        standing = [i for i, b in self.boxes.items() if b.message.head_id in inside]
        if standing and not request.release_sandboxes:
            raise fault("FAILED_PRECONDITION", "node_in_use", f"sandbox {standing[0]} stands there")
        for sandbox_id in standing:
            del self.boxes[sandbox_id]
        if request.states_only:
            for node_id in inside:
                self.nodes[node_id].capture = pb.CAPTURE_STATUS_WITHHELD
                self.nodes[node_id].withheld_reason = "evicted by request"
            return pb.PruneResponse(
                nodes=len(inside), checkpoints=len(inside), freed_bytes=4096 * len(inside)
            )
        for node_id in inside:
            node = self.nodes.pop(node_id)
            self.event(node.tree_id, removed_node_id=node_id)
        return pb.PruneResponse(nodes=len(inside), checkpoints=len(inside), freed_bytes=4096 * len(inside))

    @guarded
    def Pin(self, request: Any, context: Any) -> Any:
        for node_id in request.node_ids:
            self.get(node_id).pinned = True
        return pb.PinResponse()

    @guarded
    def Unpin(self, request: Any, context: Any) -> Any:
        for node_id in request.node_ids:
            self.get(node_id).pinned = False
        return pb.UnpinResponse()

    @guarded
    def ExportStats(self, request: Any, context: Any) -> Any:
        if request.table not in self.tables:
            raise fault("NOT_FOUND", "no_such_table", f"there is no table {request.table!r}")
        data = self.tables[request.table]
        for at in range(0, len(data), 1000):
            yield pb.ExportStatsChunk(data=data[at : at + 1000])

    @guarded
    def ListTables(self, request: Any, context: Any) -> Any:
        columns = [pb.Column(name="node_id", type="string", description="the turn's node")]
        return pb.ListTablesResponse(
            tables=[
                pb.Table(name=name, description="a table", rows=3, columns=columns) for name in self.tables
            ]
        )


class FakeDaemon:
    """The fake on a unix socket; it can be stopped and started again with its state kept."""

    def __init__(self, folder: Path) -> None:
        self.socket = str(folder / "boxwood.sock")
        state = folder / "state"
        state.mkdir()
        self.fake = Fake(state)
        self._server: grpc.Server | None = None
        self._handlers = ThreadPoolExecutor(32)

    def start(self) -> FakeDaemon:
        limit = 16 << 20
        self._handlers = ThreadPoolExecutor(32)
        self._server = grpc.server(
            self._handlers,
            options=[("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)],
        )
        boxwood_pb2_grpc.add_BoxwoodServicer_to_server(self.fake, self._server)  # type: ignore[no-untyped-call]
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(0).wait(10)
            self._server = None
            # The calls are over, their handlers may not be, and write to the state.
            ending = threading.Thread(target=self._handlers.shutdown, daemon=True)
            ending.start()
            ending.join(30)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket)
