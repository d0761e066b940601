"""How does a slot's process become whatever unit the plan puts on it?

Owner: the worker process of a slot. It starts without a role; ``Assign`` names a unit, and the slot builds the actor
for its model-stage. A later ``Assign`` for another model-stage closes the old actor first, so a slot can change from
rollout to training without a new process. Backends are loaded by name: a slot pays only for the one that it uses.
"""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

from structlog.contextvars import bind_contextvars

from nereus.actors.host import Actor
from nereus.actors.rollout import RolloutActor
from nereus.actors.trainer import TrainerActor
from nereus.actors.wiring import Wiring
from nereus.bus.endpoint import Delivery, Endpoint, PeerGone
from nereus.bus.messages import Assign, Commit, Message, Ok, Refused, Switch, Take, Train, Vacate
from nereus.config import JobConfig
from nereus.core.plan import ModelStage, SlotId, Stage
from nereus.errors import ProtocolError

BACKENDS = {
    ("torch", Stage.TRAINING): ("nereus.backends.torch.train", "TorchTrainer"),
    ("torch", Stage.GENERATION): ("nereus.backends.torch.rollout", "TorchRollout"),
}
"""(backend name, stage) -> where its class lives; the class is called with the job's configuration and the slot."""

TEXT = "nereus.backends.text"
"""Where the rollout actor's codec lives."""

LATE = (
    "transformers.modeling_utils",
    "transformers.masking_utils",
    "transformers.modeling_layers",
    "transformers.generation.utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_python",
    "transformers.tokenization_utils_tokenizers",
)
"""What transformers imports only when a model or a tokenizer is first made: nearly as long as all the rest takes."""


def modules_for(config: JobConfig) -> tuple[str, ...]:
    """Return the modules that the slots of this job import, for a process that prepares theirs."""
    wanted = ((config.train.backend, Stage.TRAINING), (config.rollout.backend, Stage.GENERATION))
    backends = tuple(BACKENDS[key][0] for key in wanted if key in BACKENDS)
    return (TEXT, *backends, *(LATE if backends else ()))


def load_backend(name: str, stage: Stage, config: JobConfig, slot: SlotId) -> Any:
    """Import and construct a backend; ``ProtocolError`` names the ones that exist."""
    if (name, stage) not in BACKENDS:
        known = ", ".join(backend for backend, of in BACKENDS if of == stage)
        raise ProtocolError(f"there is no backend {name!r} for {stage.name.lower()}; known: {known}")
    module, attribute = BACKENDS[name, stage]
    return getattr(importlib.import_module(module), attribute)(config, slot)


class SlotActor:
    """The host of one slot's present unit."""

    def __init__(self, slot: SlotId, config: JobConfig, control: Endpoint, wiring: Wiring, transcripts: Path) -> None:
        self._slot = slot
        self._config = config
        self._control = control
        self._wiring = wiring
        self._transcripts = transcripts
        self._actor: Actor | None = None
        self._model_stage: ModelStage | None = None
        self._failed: asyncio.Queue[BaseException] = asyncio.Queue()
        self._watch: asyncio.Task[None] | None = None

    @property
    def stage(self) -> str:
        """The model-stage of the present unit; empty if there is none."""
        return str(self._model_stage) if self._model_stage else ""

    async def handle(self, delivery: Delivery) -> Message | None:
        self._bind_to_logs(delivery.message)
        match delivery.message:
            case Assign(emu, source=source) if emu.model_stage != self._model_stage:
                await self._become(emu.model_stage, source)
            case Take(replica=replica, model=model) if replica.model_stage != self._model_stage:
                await self._become(replica.model_stage, model)
            case Vacate():
                await self._vacate()
                return Ok()
            case Commit(plan) if all(emu.model_stage != self._model_stage for emu in plan.on(self._slot)):
                await self._vacate()
                return Ok()
        if self._actor is None:
            return Refused(f"slot {self._slot} has no unit yet")
        return await self._actor.handle(delivery)

    async def peer_gone(self, event: PeerGone) -> None:
        if self._actor is not None:
            await self._actor.peer_gone(event)

    async def background(self) -> None:
        raise await self._failed.get()

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._actor is not None:
            await self._actor.close()

    def _bind_to_logs(self, message: Message) -> None:
        """Let what this endpoint's handler logs from now on say for which unit, plan, step and version."""
        match message:
            case Assign(emu):
                bind_contextvars(emu=emu.id, epoch=self._control.epoch)
            case Commit(plan):
                units = ", ".join(emu.id for emu in plan.on(self._slot))
                bind_contextvars(emu=units or "idle", epoch=plan.epoch)
            case Train(step, version):
                bind_contextvars(step=step, version=version)
            case Switch(version):
                bind_contextvars(version=version)

    async def _vacate(self) -> None:
        """Give up the unit and its memory."""
        await self.close()
        self._actor = self._model_stage = self._watch = None

    async def _become(self, model_stage: ModelStage, source: str) -> None:
        await self._vacate()
        self._actor = await asyncio.to_thread(self._build, model_stage, Path(source))
        self._model_stage = model_stage
        self._watch = asyncio.create_task(self._guard(self._actor), name="guard")

    def _build(self, model_stage: ModelStage, source: Path) -> Actor:
        """Construct the actor; runs off the loop because importing a backend takes seconds."""
        if model_stage.stage is Stage.TRAINING:
            trainer = load_backend(self._config.train.backend, Stage.TRAINING, self._config, self._slot)
            return TrainerActor(trainer, self._slot, self._control, self._wiring)
        if model_stage.stage is Stage.GENERATION:
            engine = load_backend(self._config.rollout.backend, Stage.GENERATION, self._config, self._slot)
            codec = importlib.import_module(TEXT).ModelText(source, self._config)
            transcript = self._transcripts / f"slot-{self._slot}.jsonl"
            return RolloutActor(engine, codec, self._config, self._slot, self._control, self._wiring, transcript)
        raise ProtocolError(f"a slot cannot host {model_stage}")

    async def _guard(self, actor: Actor) -> None:
        try:
            await actor.background()
        except Exception as error:  # noqa: BLE001 - handed to background(), which ends the process with it
            self._failed.put_nowait(error)
