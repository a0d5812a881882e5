"""Reads the service's messages into records, and writes the few that go the other way."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any, TypeVar

from . import errors
from ._proto import boxwood_pb2 as pb
from .records import (
    Annotation,
    Capability,
    CaptureStatus,
    Column,
    CommandResult,
    Effect,
    EffectKind,
    Image,
    Info,
    Limits,
    Observation,
    Output,
    ProcessKind,
    ReplayedTurn,
    Table,
    Timings,
    TurnStatus,
    Verdict,
    Word,
)

W = TypeVar("W", bound=Word)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


def moment(at: datetime.datetime | None) -> int:
    """A time in nanoseconds since the epoch; 0 for none."""
    if at is None:
        return 0
    if at.tzinfo is None:
        raise errors.invalid(
            f"the time {at.isoformat()} names no zone", "datetime.now(timezone.utc), or a time's astimezone()"
        )
    return (at - _EPOCH) // datetime.timedelta(microseconds=1) * 1000


def _words(cls: type[W], enum: Any, prefix: str = "") -> dict[int, W]:
    """The words of an enumeration by their numbers."""
    return {
        number: cls[name[len(prefix) :]]
        for name, number in enum.items()
        if name[len(prefix) :] in cls.__members__
    }


# Read once: a node is read in every turn, and a look-up by name costs more than the rest of it.
_EFFECT_KINDS = _words(EffectKind, pb.Effect.Kind)
_VERDICTS = _words(Verdict, pb.Verdict, "VERDICT_")
_CAPTURES = _words(CaptureStatus, pb.CaptureStatus, "CAPTURE_STATUS_")
_PROCESS_KINDS = _words(ProcessKind, pb.ProcessKind, "PROCESS_KIND_")
_TURN_STATUSES = _words(TurnStatus, pb.TurnStatus, "TURN_STATUS_")


def observation(m: pb.Observation) -> Observation:
    """Reads an Observation message."""
    return Observation(
        stdout=Output(m.stdout, m.stdout_omitted, m.stdout_cut_at),
        stderr=Output(m.stderr, m.stderr_omitted, m.stderr_cut_at),
        exit_code=m.exit_code,
        signal=m.signal,
        oom_killed=m.oom_killed,
    )


def timings(m: pb.Timings) -> Timings:
    """Reads a Timings message."""
    return Timings(
        capture_wait=m.capture_wait_ns / 1e9,
        command=m.command_ns / 1e9,
        barrier=m.barrier_ns / 1e9,
        record=m.record_ns / 1e9,
        total=m.total_ns / 1e9,
        capture=m.capture_ns / 1e9,
    )


def replayed(items: Sequence[pb.ReplayedTurn]) -> tuple[ReplayedTurn, ...]:
    """Reads ReplayedTurn messages."""
    return tuple(ReplayedTurn(m.node_id, m.replay_id, m.same_output, m.same_exit) for m in items)


def command_result(m: pb.CommandResult) -> CommandResult:
    """Reads a CommandResult message."""
    return CommandResult(observation(m.observation), turn_status(m.status), m.wall_ns / 1e9)


def effects(items: Sequence[pb.Effect]) -> tuple[Effect, ...]:
    """Reads Effect messages."""
    return tuple(Effect(_EFFECT_KINDS.get(m.kind, EffectKind.UNKNOWN), m.subject, m.detail) for m in items)


def verdict(number: int) -> Verdict:
    """Reads a verdict."""
    return _VERDICTS.get(number, Verdict.UNKNOWN)


def capture_status(number: int) -> CaptureStatus:
    """Reads a capture status."""
    return _CAPTURES.get(number, CaptureStatus.UNKNOWN)


def process_kind(number: int) -> ProcessKind:
    """Reads a process kind."""
    return _PROCESS_KINDS.get(number, ProcessKind.UNKNOWN)


def turn_status(number: int) -> TurnStatus:
    """Reads a turn's status."""
    return _TURN_STATUSES.get(number, TurnStatus.UNKNOWN)


def image(m: pb.Image) -> Image:
    """Reads an Image message."""
    return Image(m.digest, tuple(m.names), tuple(m.layers), m.bytes, m.created_at, dict(m.env), m.cwd, m.user)


def limits(m: pb.Limits) -> Limits:
    """Reads a Limits message."""
    return Limits(m.memory_bytes, m.pids, m.cpu_millis / 1000, m.disk_bytes)


def limits_message(value: Limits | None) -> pb.Limits | None:
    """Writes a Limits message."""
    if value is None:
        return None
    return pb.Limits(
        memory_bytes=value.memory_bytes,
        pids=value.pids,
        cpu_millis=round(value.cpus * 1000),
        disk_bytes=value.disk_bytes,
    )


def info(m: pb.GetInfoResponse) -> Info:
    """Reads the answer of GetInfo."""
    known = {pb.Capability.YES: True, pb.Capability.NO: False}
    return Info(
        version=m.version,
        kernel=m.kernel,
        capabilities=tuple(Capability(c.name, known.get(c.state), c.detail) for c in m.capabilities),
        pool_bytes_total=m.pool_bytes_total,
        pool_bytes_used=m.pool_bytes_used,
        sandboxes=m.sandboxes,
        nodes=m.nodes,
        zygotes_ready=m.zygotes_ready,
        default_limits=limits(m.default_limits),
        lost_events=m.lost_events,
    )


def table(m: pb.Table) -> Table:
    """Reads a Table message."""
    columns = tuple(Column(c.name, c.type, c.description) for c in m.columns)
    return Table(m.name, m.description, m.rows, columns)


def annotation_message(node_id: str, note: Annotation) -> pb.NodeAnnotation:
    """Writes a NodeAnnotation message."""
    return pb.NodeAnnotation(
        node_id=node_id,
        rewards=note.rewards,
        value=note.value,
        visits=note.visits,
        labels=note.labels,
        policy_version=note.policy_version,
        payload=note.payload,
    )
