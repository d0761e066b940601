"""How do slots form process groups whose membership changes while they run?

Owner: each trainer slot. Every process initializes torch.distributed once, with a *null* default world: its rank is the
slot id, its size a constant, and any collective on it raises. Real groups are made directly over a rendezvous store and
registered, so they serve DeviceMesh and pipelining like groups made at start-up. The private torch API that
this takes is behind ``make_group`` and ``leave_group`` alone.

Invariants (tests/backends/test_groups.py): a name is used once per store (it carries the plan epoch); every wait is
bounded by the group's time-out; on a loopback store, gloo listens on loopback only.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from nereus.core.plan import POLICY_TRAINING, Emu, Plan, SlotId
from nereus.errors import TransitionError

WORLD_SLOTS = 4096
"""Size of the null default world: an upper bound of slot ids."""

_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_LOOPBACK_GLOO = "gloo_loopback"


class _NullGroup(dist.ProcessGroup):  # type: ignore[misc]
    """The default world: carries (slot id, WORLD_SLOTS); a collective on it is a bug and raises."""

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("collective on the default (null) process group: pass group= explicitly")

    allreduce = allgather = _allgather_base = broadcast = barrier = reduce = reduce_scatter = _refuse
    alltoall = alltoall_base = gather = scatter = send = recv = recv_anysource = _refuse
    allreduce_coalesced = allgather_into_tensor_coalesced = monitored_barrier = _refuse
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = _refuse

    def getBackendName(self) -> str:
        return "null"


def _null_group(_store: dist.Store, rank: int, size: int, _timeout: datetime.timedelta) -> _NullGroup:
    return _NullGroup(rank, size)


def _loopback_gloo(options: Any, _backend_options: Any) -> dist.ProcessGroup:
    """Make a gloo backend that listens on 127.0.0.1, whatever the host's name resolves to."""
    gloo = c10d.ProcessGroupGloo
    chosen = gloo._Options()
    chosen._devices = [gloo.create_device(hostname="127.0.0.1")]
    chosen._timeout = options.timeout
    return gloo(options.store, options.group_rank, options.group_size, chosen)


def join_world(slot: SlotId) -> None:
    """Become ``slot`` of the null default world; once per process, later calls must name the same slot."""
    if not 0 <= slot < WORLD_SLOTS:
        raise ValueError(f"slot {slot} is outside of 0..{WORLD_SLOTS - 1}")
    if dist.is_initialized():
        if dist.get_rank() != slot:
            raise ValueError(f"this process is slot {dist.get_rank()} and cannot become slot {slot}")
        return
    dist.Backend.register_backend("null", _null_group, devices=["cpu", "cuda"])
    dist.Backend.register_backend(_LOOPBACK_GLOO, _loopback_gloo, extended_api=True, devices=["cpu"])
    dist.init_process_group("null", store=dist.HashStore(), rank=slot, world_size=WORLD_SLOTS)


def connect_store(address: str, *, timeout_s: float) -> dist.TCPStore:
    """Connect to the rendezvous store at ``host:port``; ``TransitionError`` names the address if nobody answers."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"the store's address must be host:port, got {address!r}")
    try:
        return dist.TCPStore(
            host,
            int(port),
            is_master=False,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ConnectionError) as error:
        raise TransitionError(f"no rendezvous store answers at {address} within {timeout_s:g} s: {error}") from error


def make_group(
    store: dist.TCPStore, name: str, members: Sequence[SlotId], slot: SlotId, *, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Form the group ``name`` of the slots ``members`` (ranks in that order) and return it once all have joined.

    ``name`` must be new to the store. ``TransitionError`` if a member does not come within ``timeout_s``.
    """
    if slot not in members or len(set(members)) != len(members):
        raise ValueError(f"slot {slot} cannot form group {name} of slots {list(members)}")
    loopback = backend == "gloo" and store.host in _LOOPBACK_HOSTS
    began = time.monotonic()
    try:
        group, _ = c10d._new_process_group_helper(
            len(members),
            members.index(slot),
            list(members),
            _LOOPBACK_GLOO if loopback else backend,
            store,
            name,
            timeout=datetime.timedelta(seconds=timeout_s),
            group_desc=name,
        )
    except (RuntimeError, ConnectionError) as error:
        waited = time.monotonic() - began
        raise TransitionError(
            f"group {name} of slots {list(members)} did not form in {waited:.1f} s: {error}"
        ) from error
    c10d._world.pg_group_ranks[group] = {member: rank for rank, member in enumerate(members)}
    return group


def leave_group(group: dist.ProcessGroup) -> None:
    """Abort what is pending in ``group`` and forget it; safe when members are dead.

    Its connections close with its last reference: every survivor of a broken group must leave it *and* let go of it at
    once, because that is what frees the others from waiting for this one.
    """
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # no backend for this device, or already aborted
            group._get_backend(torch.device(device)).abort()
    with contextlib.suppress(RuntimeError, ValueError, KeyError):  # already forgotten
        dist.destroy_process_group(group)


@dataclass(frozen=True)
class TrainerGroups:
    """The process groups of one trainer slot; None where it would be alone.

    ``everyone``: all trainer slots, on the host (gloo): batches and metrics. ``unit``: the slots of this EMU. ``tp``:
    those of one pipeline rank. ``pp``: those of one tp rank. ``dp``: those with the same coordinates in all EMUs.
    ``ends``: first and last pipeline rank of one tp rank, which share tied embeddings.
    """

    everyone: dist.ProcessGroup | None = None
    unit: dist.ProcessGroup | None = None
    tp: dist.ProcessGroup | None = None
    pp: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    ends: dist.ProcessGroup | None = None

    @property
    def within_unit(self) -> TrainerGroups:
        """Return those whose members are of one unit."""
        return replace(self, everyone=None, dp=None)

    @property
    def between_units(self) -> TrainerGroups:
        """Return those whose members change with the plan, whatever becomes of this unit."""
        return TrainerGroups(everyone=self.everyone, dp=self.dp)

    def leave(self) -> None:
        """Leave all groups; safe when members are dead."""
        for field in fields(self):
            if (group := getattr(self, field.name)) is not None:
                leave_group(group)


def trainer_members(emu: Emu, plan: Plan, slot: SlotId) -> dict[str, tuple[SlotId, ...]]:
    """Return the members of each group of ``TrainerGroups`` that ``slot`` of ``emu`` belongs to.

    All slots go through the kinds in this order and are in at most one group of each kind, so forming them in this
    order cannot deadlock.
    """
    units = plan.of(POLICY_TRAINING)
    tp, pp = emu.layout.tp, emu.layout.pp
    index = emu.slots.index(slot)
    pp_rank, tp_rank = emu.layout.coordinates(index)
    chain = tuple(emu.slots[rank * tp + tp_rank] for rank in range(pp))
    return {
        "everyone": tuple(member for unit in units for member in unit.slots),
        "unit": emu.slots,
        "tp": emu.slots[pp_rank * tp : (pp_rank + 1) * tp],
        "pp": chain,
        "dp": tuple(unit.slots[index] for unit in units),
        "ends": (chain[0], chain[-1]) if pp > 1 and slot in (chain[0], chain[-1]) else (slot,),
    }


def agree_to_keep(emu: Emu, plan: Plan, slot: SlotId, willing: bool, *, store: str, timeout_s: float) -> bool:
    """Say whether every slot of ``emu`` is willing to go on with the groups that the unit has already.

    ``TransitionError`` if one does not say so in time.
    """
    if len(emu.slots) == 1 or not store:
        return willing
    join_world(slot)
    client = connect_store(store, timeout_s=timeout_s)
    key = f"{plan.epoch}/training/keep/{emu.slots[0]}"
    client.set(f"{key}/{slot}", str(int(willing)))
    try:
        return all(client.get(f"{key}/{member}") == b"1" for member in emu.slots)
    except RuntimeError as error:
        raise TransitionError(f"not all of {emu.id} said whether they keep their groups: {error}") from error


def form_trainer_groups(
    emu: Emu,
    plan: Plan,
    slot: SlotId,
    *,
    store: str,
    transport: str,
    timeout_s: float,
    kept: TrainerGroups | None = None,
) -> TrainerGroups:
    """Form the groups of ``slot`` under ``plan``; a plan of one slot needs no store and forms none.

    Those of ``kept`` are there already: a unit that stays as it is keeps its own (``agree_to_keep``).
    """
    kept = kept or TrainerGroups()
    members = trainer_members(emu, plan, slot)
    wanted = {kind: of for kind, of in members.items() if len(of) > 1 and getattr(kept, kind) is None}
    if not wanted:
        return kept
    if not store:
        raise ValueError(f"{emu.id}: {len(members['everyone'])} slots need a rendezvous store, and none is named")
    join_world(slot)
    client = connect_store(store, timeout_s=timeout_s)
    formed: dict[str, dist.ProcessGroup] = {}
    try:
        for kind, of in wanted.items():
            # Groups of one kind are disjoint, so the first member tells them apart.
            name = f"{plan.epoch}/training/{kind}/{of[0]}x{len(of)}"
            backend = "gloo" if kind == "everyone" else transport
            formed[kind] = make_group(client, name, of, slot, backend=backend, timeout_s=timeout_s)
    except TransitionError:
        TrainerGroups(**formed).leave()
        raise
    return replace(kept, **formed)
