"""Boxwood: run turns in sandboxes, fork any node of the tree into many live ones.

    import boxwood

    with boxwood.connect() as client, client.create_tree(image="debian:demo") as tree:
        turn = tree.sandbox.run("echo hello > /tmp/greeting")
        with turn.node.fork(8) as children:
            for child in children.ready:
                print(child.run("cat /tmp/greeting").text)

The words are those of the engine: a *turn* runs in a *sandbox* and becomes a
*node* of a *tree*; a *fork* makes live sandboxes that stand at a node. See
`boxwood.errors` for the exceptions.
"""

from . import aio, stats
from ._draw import Drawing
from ._local import local
from ._version import __version__
from .client import Client, connect
from .errors import (
    AgentError,
    AlreadyExists,
    BoxwoodError,
    Busy,
    Cancelled,
    ClientError,
    CommandFailed,
    ConnectionFailed,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    ForkError,
    InfrastructureError,
    InternalError,
    InvalidArgument,
    NodeWithheld,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
    UnsafeEntry,
    Unsupported,
)
from .fork import Children, Forks
from .grading import Evaluation, Grader
from .images import Images
from .node import Node
from .records import (
    Action,
    Annotation,
    Capability,
    CaptureStatus,
    Column,
    CommandResult,
    Effect,
    EffectKind,
    File,
    Image,
    ImportProgress,
    Info,
    Limits,
    Observation,
    Observed,
    Output,
    ProcessKind,
    Pruned,
    ReplayedTurn,
    Table,
    Timings,
    TurnStatus,
    Verdict,
    annotation,
)
from .run import Run
from .sandbox import Sandbox
from .session import Session
from .tree import Tree, TreeChange
from .turn import OpenTurn, Turn

__all__ = [
    "Action",
    "AgentError",
    "AlreadyExists",
    "Annotation",
    "BoxwoodError",
    "Busy",
    "Cancelled",
    "Capability",
    "CaptureStatus",
    "Children",
    "Client",
    "ClientError",
    "Column",
    "CommandFailed",
    "CommandResult",
    "ConnectionFailed",
    "DataLoss",
    "DeadlineExceeded",
    "Drawing",
    "Effect",
    "EffectKind",
    "Evaluation",
    "FailedPrecondition",
    "File",
    "ForkError",
    "Forks",
    "Grader",
    "Image",
    "Images",
    "ImportProgress",
    "Info",
    "InfrastructureError",
    "InternalError",
    "InvalidArgument",
    "Limits",
    "Node",
    "NodeWithheld",
    "NotFound",
    "Observation",
    "Observed",
    "OpenTurn",
    "Output",
    "PermissionDenied",
    "ProcessKind",
    "Pruned",
    "ReplayedTurn",
    "ResourceExhausted",
    "Run",
    "Sandbox",
    "Session",
    "Table",
    "Timings",
    "Tree",
    "TreeChange",
    "Turn",
    "TurnStatus",
    "Unavailable",
    "UnsafeEntry",
    "Unsupported",
    "Verdict",
    "__version__",
    "aio",
    "annotation",
    "connect",
    "local",
    "stats",
]
