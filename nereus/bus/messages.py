"""What do the processes of a run say to each other?

Every message is a frozen, tagged msgspec Struct; one union, ``Message``, is decoded with unknown fields forbidden and
with bounds on numbers and lengths. Token arrays, weights and activations are never fields: token arrays ride beside a
message as raw frames, weights move through shared memory or process groups. The plan epoch is not a field either: the
endpoint stamps it on the envelope of every message and fences by it (see ``endpoint.py``).

Invariant (tests/bus/test_codec.py): encoding is stable (golden bytes) and decoding garbage raises ``ProtocolError``.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from nereus.core.plan import Emu, Plan
from nereus.transition.primitive import Replica
from nereus.transition.reshard import Move, Piece, TensorSpec

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=1 << 20)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Checksum = Annotated[str, Meta(min_length=16, max_length=16)]
"""xxh3-64 as 16 hexadecimal digits."""
Json = Annotated[bytes, Meta(max_length=1 << 24)]
"""JSON text. Not ``msgspec.Raw``, which would be spliced verbatim into the MessagePack around it and break that."""


def _json_as_bytes(message: Struct, *fields: str) -> None:
    """Turn ``msgspec.Raw`` values into bytes."""
    for field in fields:
        value = getattr(message, field)
        if isinstance(value, msgspec.Raw):
            msgspec.structs.force_setattr(message, field, bytes(value))


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag=True, array_like=False):
    """Base of all messages: the tag is the class name."""


# Membership and liveness


class Hello(_Message, frozen=True, tag=True):
    """Worker -> supervisor, first message of an incarnation."""

    worker: Name
    incarnation: Name
    host: Name
    pid: Count
    service: Annotated[str, Meta(max_length=256)] = ""
    """Address on which this worker's own server endpoint listens (``tcp://127.0.0.1:port``); empty if it has none."""
    orphan: bool = False
    """Whether it has lived under an earlier supervisor of the run, and lost it."""
    epoch: Count = 0
    """The plan epoch that it has come to there."""
    stage: Annotated[str, Meta(max_length=256)] = ""
    """The model-stage of the unit that a slot hosts now; empty if it hosts none."""


class Welcome(_Message, frozen=True, tag=True):
    """Supervisor -> worker: admitted, to live in plan ``epoch``."""

    run_id: Name
    epoch: Count = 0


class Heartbeat(_Message, frozen=True, tag=True):
    """Both ways, when nothing else was sent for a heartbeat interval."""


class Ok(_Message, frozen=True, tag=True):
    """The reply to a request that has no other answer."""


class Refused(_Message, frozen=True, tag=True):
    """Reply: the request was not carried out, and why."""

    reason: Text


class Fault(_Message, frozen=True, tag=True):
    """Worker -> supervisor: something broke here; ``fatal`` means this process is about to leave."""

    where: Name
    reason: Text
    fatal: bool = True


class Shutdown(_Message, frozen=True, tag=True):
    """Supervisor -> worker: leave; exit code 0."""

    reason: Text = ""


class Admit(_Message, frozen=True, tag=True):
    """Operator -> supervisor: one more slot wants to join; the answer is ``Admitted``."""

    host: Name


class Admitted(_Message, frozen=True, tag=True):
    """Reply: come as this worker."""

    worker: Name
    attempt: Count


class DrainSlots(_Message, frozen=True, tag=True):
    """Operator -> supervisor: do without these slots, and let their processes leave."""

    slots: Annotated[tuple[Count, ...], Meta(min_length=1)]


# Placement


class Peer(Struct, frozen=True, forbid_unknown_fields=True):
    """Where another worker's server endpoint listens."""

    worker: Name
    address: Name


class Assign(_Message, frozen=True, tag=True):
    """Supervisor -> worker: become a slot of ``emu`` under ``plan``."""

    emu: Emu
    plan: Plan
    store: Annotated[str, Meta(max_length=256)] = ""
    """``host:port`` of the rendezvous store for process groups."""
    peers: tuple[Peer, ...] = ()
    """Servers this worker may need: the relay, the collector, the reward service."""
    source: Annotated[str, Meta(max_length=4096)] = ""
    """Folder to load state from: a model folder, or a committed checkpoint."""
    version: Count = 0
    """Policy version that ``source`` holds."""


class Ready(_Message, frozen=True, tag=True):
    """Worker -> supervisor: the assignment is done."""

    emu: Name
    seconds: Seconds = 0.0
    tensors: tuple[TensorSpec, ...] = ()
    """From trainers: every tensor of the model by global name (same on all ranks)."""
    tied: dict[str, str] = {}
    """From trainers: alias name -> the name that is stored."""
    note: Text = ""


# Samples


class GroupSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt to complete ``group_size`` times.

    ``group`` is the position in the global sample order: unique for the life of the run. ``attempt`` counts re-issues
    after a loss. Sample ``i`` of the group draws from the random stream ``(run seed, group, i)`` whatever the attempt
    or the place.
    """

    group: Count
    attempt: Count
    row: Count
    prompt: Json
    """JSON: a string, or a list of chat messages."""
    columns: Json
    """JSON object: the row's other columns, for the reward function."""

    def __post_init__(self) -> None:
        _json_as_bytes(self, "prompt", "columns")


class Peers(_Message, frozen=True, tag=True):
    """Supervisor -> worker: these servers have moved; talk to the new addresses from now on."""

    peers: tuple[Peer, ...]


class Grant(_Message, frozen=True, tag=True):
    """Supervisor -> rollout: credit to start these groups. The only flow control of generation."""

    groups: tuple[GroupSpec, ...]


class Release(_Message, frozen=True, tag=True):
    """Supervisor -> rollout: these groups are trained (or obsolete); their samples need not be kept any more."""

    groups: tuple[Count, ...]


class Sample(Struct, frozen=True, forbid_unknown_fields=True):
    """One completion, without its tokens."""

    tokens: Count
    reward: float | None
    finish: Name
    """``stop``, ``length`` or ``context``."""
    version_first: Count
    version_last: Count


class Group(_Message, frozen=True, tag=True):
    """Rollout -> collector, on the sample plane; four raw frames ride beside it.

    Frames: prompt tokens int32 ``[prompt_tokens]``; completion tokens int32, logprobs float32 and policy versions
    int32, each ``[sum of sample.tokens]``, samples one after the other.
    """

    group: Count
    attempt: Count
    row: Count
    rollout: Name
    prompt_tokens: Count
    samples: tuple[Sample, ...]
    generate_s: Seconds = 0.0
    reward_s: Seconds = 0.0
    reward_failures: dict[str, int] = {}
    """How often the reward function timed out, raised, or returned something that is not a number."""


class GroupAccepted(_Message, frozen=True, tag=True):
    """Collector -> supervisor: this group is held, complete and checked."""

    group: Count
    attempt: Count
    row: Count
    rollout: Name
    version_first: Count
    version_last: Count
    prompt_tokens: Count
    samples: tuple[Sample, ...]
    generate_s: Seconds = 0.0
    reward_s: Seconds = 0.0
    reward_failures: dict[str, int] = {}


class GroupFailed(_Message, frozen=True, tag=True):
    """Rollout -> supervisor: this group cannot be completed here; it will be re-issued or dropped with the reason."""

    group: Count
    attempt: Count
    reason: Text


# Reward service (request and reply between rollout and reward worker)


class Score(_Message, frozen=True, tag=True):
    """Rollout -> reward: score the completions of one group."""

    prompt: Json
    completions: tuple[Text, ...]
    columns: Json

    def __post_init__(self) -> None:
        _json_as_bytes(self, "prompt", "columns")


class Scored(_Message, frozen=True, tag=True):
    """Reward -> rollout: one reward per completion; ``None`` = not applicable or failed under policy ``none``."""

    rewards: tuple[float | None, ...]
    failures: dict[str, int] = {}


# Training


class GroupRef(Struct, frozen=True, forbid_unknown_fields=True):
    """One attempt at one group."""

    group: Count
    attempt: Count


class Train(_Message, frozen=True, tag=True):
    """Supervisor -> every trainer slot: make optimizer step ``step`` from ``groups``, in this order; then publish.

    The step consumes policy ``version`` and produces ``version + 1``.
    """

    step: Count
    version: Count
    groups: tuple[GroupRef, ...]


class StepReport(Struct, frozen=True, forbid_unknown_fields=True):
    """What one optimizer step looked like; seconds are wall time of the slowest slot."""

    step: Count
    version: Count
    seconds: Seconds
    tokens: Count
    """Prompt and completion tokens that were trained on, over all replicas."""
    metrics: dict[str, float] = {}
    """Names of experience.md; token metrics are already divided once by global counts. NaN is allowed only where a
    step was skipped."""
    skipped: bool = False
    """True if every rank skipped the update alike because a gradient was not finite."""
    peak_bytes: Count = 0
    """Of the fullest trainer slot."""
    operations: dict[str, float] = {}
    """Seconds by operation class (control/efficiency.py) on the slot that took longest; of collectives on the one that
    waited least. The optimizer's are those of the update that the report before was about."""


class StepDone(_Message, frozen=True, tag=True):
    """Trainer slot -> supervisor: the step is applied here. Only the lead slot's report is filled in."""

    report: StepReport
    emu: Name


class StepFailed(_Message, frozen=True, tag=True):
    """Trainer slot -> supervisor: the step came to nothing here; the slot has left its process groups and waits."""

    step: Count
    reason: Text
    peak_bytes: Count = 0
    """What the fullest moment would have taken, where that was more than the slot has."""


class Stand(_Message, frozen=True, tag=True):
    """Supervisor -> trainer slot, after a loss: how far have you come? The answer is ``Standing``."""

    describe: bool = False
    """Also say which tensors the model consists of, to a supervisor that has never heard of them."""


class Standing(_Message, frozen=True, tag=True):
    """Reply: the state of this slot between steps, or in one that failed."""

    step: Count
    """The step that comes next."""
    ready: bool
    """The update of that step is complete and could still be applied or forgotten."""
    torn: bool
    """Some updates of that step are applied and cannot be taken back."""
    replicas: tuple[Replica, ...]
    """What it holds a share of."""
    tensors: tuple[TensorSpec, ...] = ()
    """As in ``Ready``; only when asked for, like ``tied``."""
    tied: dict[str, str] = {}


class Recall(_Message, frozen=True, tag=True):
    """Supervisor -> trainer slot: let ``step`` be the next, with the update that is ready or without."""

    step: Count


# Weight synchronization


class Manifest(_Message, frozen=True, tag=True):
    """Supervisor -> relay: what a complete version consists of. Resets what is half-pushed."""

    tensors: tuple[TensorSpec, ...]
    tied: dict[str, str] = {}


class Publish(_Message, frozen=True, tag=True):
    """Supervisor -> every trainer slot: push the present weights as ``version``; answered when they are written."""

    version: Count


class PublishFailed(_Message, frozen=True, tag=True):
    """Trainer slot -> supervisor: this slot's pieces of ``version`` did not get through."""

    version: Count
    reason: Text


class PushBegin(_Message, frozen=True, tag=True):
    """Trainer slot -> relay: I am about to write my pieces of ``version``."""

    version: Count
    writer: Name


class PushInto(_Message, frozen=True, tag=True):
    """Relay -> trainer slot: write into this shared-memory file, each tensor at its offset."""

    version: Count
    path: Name
    offsets: dict[str, int]


class PushDone(_Message, frozen=True, tag=True):
    """Trainer slot -> relay: these pieces are written; checksums are xxh3-64 of each piece's contiguous bytes."""

    version: Count
    writer: Name
    pieces: tuple[Piece, ...]
    checksums: tuple[Checksum, ...]


class VersionReady(_Message, frozen=True, tag=True):
    """Relay -> supervisor: ``version`` is complete, verified and visible."""

    version: Count
    checksum: Name
    tensors: Count
    size_bytes: Count
    seconds: Seconds


class Switch(_Message, frozen=True, tag=True):
    """Supervisor -> rollout: ``version`` can be pulled; switch between two decode steps, then say WeightsLive."""

    version: Count


class Pull(_Message, frozen=True, tag=True):
    """Rollout -> relay: lend me the newest visible version (at least ``version``)."""

    version: Count
    reader: Name


class PullFrom(_Message, frozen=True, tag=True):
    """Relay -> rollout: read here; the relay does not reuse the file until PullDone or until the reader is gone."""

    version: Count
    path: Name
    offsets: dict[str, int]
    tensors: tuple[TensorSpec, ...]
    tied: dict[str, str]
    checksum: Name


class PullDone(_Message, frozen=True, tag=True):
    """Rollout -> relay: the loan ends."""

    version: Count
    reader: Name


class Generated(Struct, frozen=True, forbid_unknown_fields=True):
    """What a generation engine has done since it last told, and the memory that it takes."""

    decode_s: Seconds = 0.0
    decode_steps: Count = 0
    tokens: Count = 0
    """Drawn, in ``decode_steps`` forward passes over all live sequences."""
    cached_tokens: Count = 0
    """For each token drawn, the tokens that it saw: how many keys and values were read in each layer."""
    prefill_s: Seconds = 0.0
    prefill_tokens: Count = 0
    peak_bytes: Count = 0


class WeightsLive(_Message, frozen=True, tag=True):
    """Rollout -> supervisor: from the next token on, this unit samples from ``version``. The safe boundary."""

    version: Count
    checksum: Name
    seconds: Seconds
    interrupted: Count = 0
    """Sequences that were in flight at the switch."""
    generated: Generated = Generated()


# Transitions: state moves between slots while the plan in force stays untouched, until Commit


class Lend(_Message, frozen=True, tag=True):
    """Supervisor -> trainer slot: make the pieces of ``moves`` readable; the answer is ``Lent``."""

    primitive: Name
    moves: tuple[Move, ...]
    """All of them leave this slot."""


class Place(Struct, frozen=True, forbid_unknown_fields=True):
    """Where elements lie in shared memory: the first at ``offset`` bytes of a file, ``strides`` in bytes.

    No path: the next in the loan's own file, row-major.
    """

    path: Annotated[str, Meta(max_length=64, pattern=r"^(/proc/[0-9]{1,10}/fd/[0-9]{1,10})?$")] = ""
    offset: Count = 0
    strides: Annotated[tuple[Count, ...], Meta(max_length=8)] = ()


class Receipt(Struct, frozen=True, forbid_unknown_fields=True):
    """What a slot lets others read.

    Each distinct piece of the moves once, in their order, every kind of state of a piece one after the other
    (``backends/api.py: STATE_KINDS``); ``checksums`` (transition/checksum.py) and ``places`` are in that order. Without
    ``places`` everything is in the loan's file, row-major and without gaps. ``counters`` are ``step``, ``updates`` and
    ``self_checked``: the same on all slots of one state.
    """

    size_bytes: Count
    checksums: tuple[Checksum, ...]
    counters: dict[str, int]
    places: tuple[Place, ...] = ()


class Lent(_Message, frozen=True, tag=True):
    """Reply: the pieces lie in this shared-memory file."""

    path: Name
    receipt: Receipt


class Loan(Struct, frozen=True, forbid_unknown_fields=True):
    """A file that slot ``lender`` has written for ``moves``: all that it was asked to lend, in that order."""

    lender: Count
    moves: tuple[Move, ...]
    path: Name
    receipt: Receipt


class Take(_Message, frozen=True, tag=True):
    """Supervisor -> slot: hold slot number ``index`` of ``replica``: what is not here comes from ``loans``."""

    primitive: Name
    replica: Replica
    index: Count
    model: Annotated[str, Meta(max_length=4096)]
    """Folder of the model's configuration, for a slot that knows nothing of it yet."""
    loans: tuple[Loan, ...]


class Return(_Message, frozen=True, tag=True):
    """Supervisor -> trainer slot: what was lent for this primitive has been read."""

    primitive: Name


class Vacate(_Message, frozen=True, tag=True):
    """Supervisor -> slot: give up the unit; what it was generating is lost."""


class Abandon(_Message, frozen=True, tag=True):
    """Supervisor -> trainer slot: the plan in force stays; forget what was taken."""

    reason: Text


class Commit(_Message, frozen=True, tag=True):
    """Supervisor -> every worker: ``plan`` is in force. Trainer slots train on with what they hold now."""

    plan: Plan
    store: Annotated[str, Meta(max_length=256)] = ""
    peers: tuple[Peer, ...] = ()


# Checkpoints


class Save(_Message, frozen=True, tag=True):
    """Supervisor -> every trainer slot: write your share of the state after ``step`` into ``folder``."""

    step: Count
    folder: Name


class Saved(_Message, frozen=True, tag=True):
    """Trainer slot -> supervisor: my file is written and fsynced; ``manifest`` is its JSON entry."""

    step: Count
    emu: Name
    manifest: Json

    def __post_init__(self) -> None:
        _json_as_bytes(self, "manifest")


class SaveFailed(_Message, frozen=True, tag=True):
    """Trainer slot -> supervisor: my share could not be written (a full disk); training can go on."""

    step: Count
    reason: Text


Message = (
    Hello
    | Welcome
    | Heartbeat
    | Ok
    | Refused
    | Fault
    | Shutdown
    | Admit
    | Admitted
    | DrainSlots
    | Assign
    | Ready
    | Peers
    | Grant
    | Release
    | Group
    | GroupAccepted
    | GroupFailed
    | Score
    | Scored
    | Train
    | StepDone
    | StepFailed
    | Stand
    | Standing
    | Recall
    | PublishFailed
    | Manifest
    | Publish
    | PushBegin
    | PushInto
    | PushDone
    | VersionReady
    | Switch
    | Pull
    | PullFrom
    | PullDone
    | WeightsLive
    | Lend
    | Lent
    | Take
    | Return
    | Vacate
    | Abandon
    | Commit
    | Save
    | Saved
    | SaveFailed
)
