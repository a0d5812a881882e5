"""What the daemon tells, as frozen records.

Times are integers in nanoseconds since the Unix epoch, durations are floats in
seconds, sizes are bytes. A value of an enumeration which this version of the
package doesn't know reads as ``UNKNOWN``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum


class Word(str, Enum):
    """A word of the service; compares equal to its lower-case name."""

    def __str__(self) -> str:
        return str(self.value)


class Verdict(Word):
    """What a turn changed that outlives it, in two halves."""

    NONE = "none"
    FILES = "files"
    PROCESS = "process"
    BOTH = "both"
    UNKNOWN = "unknown"


class CaptureStatus(Word):
    """How far a node's checkpoint is.

    ``recorded``: durable, capture pending. ``captured``: complete and checksummed.
    ``proven``: restored once and found equal. ``withheld``: can't be restored exactly.
    """

    RECORDED = "recorded"
    CAPTURED = "captured"
    PROVEN = "proven"
    WITHHELD = "withheld"
    UNKNOWN = "unknown"


class ProcessKind(Word):
    """The kind of saved process half."""

    EMPTY = "empty"
    SHELLS = "shells"
    DUMP = "dump"
    UNKNOWN = "unknown"


class TurnStatus(Word):
    """How a turn ended. ``lost``: its sandbox died in it."""

    COMPLETED = "completed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    LOST = "lost"
    UNKNOWN = "unknown"


class EffectKind(Word):
    """One kind of change that outlives a turn."""

    FILE_CREATED = "file_created"
    FILE_CHANGED = "file_changed"
    FILE_DELETED = "file_deleted"
    FILE_RENAMED = "file_renamed"
    FILE_METADATA = "file_metadata"
    PROCESS_SURVIVED = "process_survived"
    PROCESS_ENDED = "process_ended"
    PROCESS_CHANGED = "process_changed"
    KERNEL_OBJECT = "kernel_object"
    EXTERNAL = "external"
    UNKNOWN = "unknown"


class Output(bytes):
    r"""Bytes that came out of a sandbox; they need not be UTF-8.

    Attributes:
        omitted: How many bytes were cut out of the middle.
        cut_at: Where the cut lies; meaningful if `omitted` is not 0.
    """

    omitted: int
    cut_at: int

    def __new__(cls, data: bytes = b"", omitted: int = 0, cut_at: int = 0) -> Output:
        """Bytes, and where they were cut."""
        self = super().__new__(cls, data)
        self.omitted = omitted
        self.cut_at = cut_at
        return self

    @property
    def text(self) -> str:
        r"""As text to print or to give to a model.

        What isn't UTF-8 becomes U+FFFD, and a cut is marked by a line of its own.
        """
        if not self.omitted:
            return self.decode("utf-8", "replace")
        head, tail = self[: self.cut_at], self[self.cut_at :]
        mark = f"\n[... {self.omitted} bytes left out ...]\n"
        return head.decode("utf-8", "replace") + mark + tail.decode("utf-8", "replace")

    @property
    def exact_text(self) -> str:
        """As text which encodes back to the same bytes (errors="surrogateescape"); a cut isn't marked."""
        return self.decode("utf-8", "surrogateescape")


@dataclasses.dataclass(frozen=True)
class Effect:
    """One change that a turn made and that outlives it.

    Attributes:
        kind: What happened.
        subject: A path inside the sandbox, a command line, an object's name.
        detail: More, for a person.
    """

    kind: EffectKind
    subject: bytes
    detail: str = ""

    @property
    def path(self) -> str:
        """`subject` as text that encodes back to the same bytes (os.fsdecode)."""
        return self.subject.decode("utf-8", "surrogateescape")

    def __str__(self) -> str:
        return f"{self.kind} {self.subject.decode('utf-8', 'replace')}" + (
            f" ({self.detail})" if self.detail else ""
        )


@dataclasses.dataclass(frozen=True)
class Action:
    """What ran.

    Attributes:
        text: As a person would read it, bounded to 64 KiB.
        argv: The exact arguments if it was an argv, else empty.
        steps: How many commands and transfers the turn had.
    """

    text: str
    argv: tuple[bytes, ...] = ()
    steps: int = 1


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a command answered.

    Attributes:
        stdout: Head and tail of the output.
        stderr: Head and tail of the error output.
        exit_code: The exit code, or -1 if a signal ended it.
        signal: The signal that ended it, 0 if none.
        oom_killed: Whether it ran out of its sandbox's memory.
    """

    stdout: Output = Output()  # noqa: RUF009 - immutable
    stderr: Output = Output()  # noqa: RUF009
    exit_code: int = 0
    signal: int = 0
    oom_killed: bool = False


@dataclasses.dataclass(frozen=True)
class Timings:
    """Where a turn's time went, in seconds.

    Attributes:
        capture_wait: Waiting for this sandbox's earlier capture: the exposed delay.
        command: The command itself.
        barrier: Until everything that the kernel saw was counted.
        record: Making the node durable.
        total: All of it, as the daemon saw it.
        capture: ack="captured" only: from the node's record to its capture.
    """

    capture_wait: float = 0.0
    command: float = 0.0
    barrier: float = 0.0
    record: float = 0.0
    total: float = 0.0
    capture: float = 0.0


@dataclasses.dataclass(frozen=True)
class ReplayedTurn:
    """A turn that was run again for a child of a withheld node.

    Attributes:
        node_id: Whose turn it was.
        replay_id: The node that it made now; empty for a scratch child.
        same_output: Whether both streams were the same, byte for byte.
        same_exit: Whether each command ended with the same status, and each transfer as before.
    """

    node_id: str
    replay_id: str
    same_output: bool
    same_exit: bool


class Observed:
    """The short ways to an observation: what a `Turn` and a `CommandResult` share."""

    observation: Observation
    status: TurnStatus

    @property
    def stdout(self) -> Output:
        """The command's output: bytes, with `.text`."""
        return self.observation.stdout

    @property
    def stderr(self) -> Output:
        """The command's error output: bytes, with `.text`."""
        return self.observation.stderr

    @property
    def text(self) -> str:
        """Output, then error output, as text (see `Output.text`)."""
        out, err = self.stdout.text, self.stderr.text
        return out + ("\n" if out and err and not out.endswith("\n") else "") + err

    @property
    def exit_code(self) -> int:
        """The exit code, or -1 if a signal ended the command."""
        return self.observation.exit_code

    @property
    def signal(self) -> int:
        """The signal that ended the command, 0 if none."""
        return self.observation.signal

    @property
    def timed_out(self) -> bool:
        """Whether the deadline passed; everything that was started was killed."""
        return self.status is TurnStatus.TIMED_OUT

    @property
    def ok(self) -> bool:
        """Whether it ran to its end with exit code 0."""
        return self.status is TurnStatus.COMPLETED and self.exit_code == 0


@dataclasses.dataclass(frozen=True)
class CommandResult(Observed):
    """One command of a turn that has several.

    Attributes:
        observation: What it answered.
        status: How it ended.
        seconds: Wall time.
    """

    observation: Observation
    status: TurnStatus
    seconds: float

    def __repr__(self) -> str:
        how = str(self.status) if self.status is not TurnStatus.COMPLETED else f"exit {self.exit_code}"
        return f"<CommandResult {how}, {self.seconds * 1e3:.1f} ms>"


@dataclasses.dataclass(frozen=True)
class Limits:
    """A sandbox's limits; 0 means the daemon's default.

    Attributes:
        memory_bytes: Memory.
        pids: Processes and threads.
        cpus: Cores, such as 0.5.
        disk_bytes: What it may write.
    """

    memory_bytes: int = 0
    pids: int = 0
    cpus: float = 0.0
    disk_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class File:
    """A file that a tree's set-up writes.

    Attributes:
        path: Where, inside the sandbox.
        content: What, up to 4 MiB.
        mode: Permission bits.
    """

    path: str
    content: bytes
    mode: int = 0o644


@dataclasses.dataclass(frozen=True)
class Image:
    """A read-only root file system.

    Attributes:
        digest: sha256 over its layers and configuration.
        names: Its names, "name:tag".
        layers: The layers' diff ids, lowest first.
        bytes: Size.
        created_at: When it was imported, ns.
        env: Environment that its configuration names.
        cwd: Working folder that its configuration names.
        user: User that its configuration names.
    """

    digest: str
    names: tuple[str, ...]
    layers: tuple[str, ...]
    bytes: int
    created_at: int
    env: Mapping[str, str]
    cwd: str
    user: str

    def __repr__(self) -> str:
        return f"<Image {self.names[0] if self.names else self.digest[:19]} {self.bytes / 1e6:.1f} MB>"


@dataclasses.dataclass(frozen=True)
class ImportProgress:
    """How far an import is: `done` of `total` bytes of the step named; total is 0 if unknown."""

    step: str
    done: int
    total: int


@dataclasses.dataclass(frozen=True)
class Capability:
    """What a host can do: `available` is None if that could not be found out."""

    name: str
    available: bool | None
    detail: str


@dataclasses.dataclass(frozen=True)
class Info:
    """The host and its daemon.

    Attributes:
        version: The daemon's version.
        kernel: The kernel's release.
        capabilities: What the host can do.
        pool_bytes_total: Size of the pool.
        pool_bytes_used: Used of it.
        sandboxes: Live sandboxes.
        nodes: Nodes of all trees.
        zygotes_ready: Forks that would not have to wait.
        default_limits: Limits of a sandbox that names none.
        lost_events: Turns judged changed because events were lost.
    """

    version: str
    kernel: str
    capabilities: tuple[Capability, ...]
    pool_bytes_total: int
    pool_bytes_used: int
    sandboxes: int
    nodes: int
    zygotes_ready: int
    default_limits: Limits
    lost_events: int


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a statistics table."""

    name: str
    type: str
    description: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A statistics table: `Client.stats` reads it."""

    name: str
    description: str
    rows: int
    columns: tuple[Column, ...]


@dataclasses.dataclass(frozen=True)
class Pruned:
    """What a prune removed: nodes, checkpoints, bytes of the pool."""

    nodes: int
    checkpoints: int
    freed_bytes: int


@dataclasses.dataclass(frozen=True)
class Annotation:
    """What to set on a node; None or empty leaves as it is. See `Node.annotate`."""

    rewards: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    value: float | None = None
    visits: int | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    policy_version: str | None = None
    payload: bytes | None = None


def annotation(
    *,
    reward: float | None = None,
    rewards: Mapping[str, float] | None = None,
    value: float | None = None,
    visits: int | None = None,
    labels: Mapping[str, str] | None = None,
    policy_version: str | None = None,
    payload: bytes | None = None,
) -> Annotation:
    """Makes an annotation; `reward=x` is short for ``rewards={"reward": x}``."""
    named = dict(rewards or {})
    if reward is not None:
        named["reward"] = reward
    return Annotation(named, value, visits, dict(labels or {}), policy_version, payload)
