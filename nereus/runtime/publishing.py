"""Are the newest weights where rollouts can get them, and if not, who sees to it?

Owner: the supervisor. Trainers push every new version on their own; here is what happens when nobody did or a push came
to nothing: at the start, after a loss, or with a relay that has died and come back empty. The relay is told again what
a version consists of, which drops what is half-pushed, and all trainers are asked to push.

Invariant (tests/virtual/test_losses.py): a version that the run needs becomes visible, or the run ends and says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog
from msgspec import Struct

from nereus.actors.names import RELAY
from nereus.bus.endpoint import Endpoint
from nereus.bus.messages import Manifest, Publish, VersionReady
from nereus.core.plan import PolicyVersion
from nereus.errors import NereusError
from nereus.transition.reshard import TensorSpec

MANIFEST_TIMEOUT_S = 30.0
MAX_TRIES = 4
"""How often one version is pushed at the supervisor's request."""

log = structlog.get_logger()


class Published(Struct, frozen=True):
    """A push at the supervisor's request is over; ``failure`` is empty if all of it has arrived."""

    version: PolicyVersion
    failure: str = ""


class Publishing:
    """The newest visible version, and the push that is under way or due."""

    def __init__(self, endpoint: Endpoint, *, timeout_s: float) -> None:
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self.visible: VersionReady | None = None
        """What the relay can lend; None before the first version and while there is no relay."""
        self.due = True
        """Whether the present version has to be pushed at the supervisor's request."""
        self.tensors: tuple[TensorSpec, ...] = ()
        self.tied: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None
        self._tries = 0

    @property
    def version(self) -> PolicyVersion:
        """The newest visible version; -1 if there is none."""
        return self.visible.version if self.visible else -1

    @property
    def busy(self) -> bool:
        return self._task is not None

    def know(self, tensors: Sequence[TensorSpec], tied: Mapping[str, str]) -> None:
        """Learn what a version consists of."""
        self.tensors, self.tied = tuple(tensors), dict(tied)

    def became_visible(self, ready: VersionReady) -> None:
        self.visible, self.due, self._tries = ready, False, 0

    def relay_lost(self) -> None:
        self.visible, self.due = None, True

    def failed(self, version: PolicyVersion) -> None:
        """A trainer's own push of ``version`` came to nothing."""
        if version > self.version:
            self.due = True

    def begin(self, version: PolicyVersion, trainers: Sequence[str], report: Callable[[Published], None]) -> None:
        """Have ``trainers`` push what they hold, which is ``version``."""
        assert self._task is None, "one push at a time"
        self._tries += 1

        async def publish() -> None:
            failure = ""
            try:
                manifest = Manifest(self.tensors, self.tied)
                await self._endpoint.request(RELAY, manifest, timeout_s=MANIFEST_TIMEOUT_S)
                pushes = (
                    self._endpoint.request(name, Publish(version), timeout_s=self._timeout_s) for name in trainers
                )
                results = await asyncio.gather(*pushes, return_exceptions=True)
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
            except (NereusError, TimeoutError) as error:
                failure = str(error)
            self._task = None
            report(Published(version, failure))

        self._task = asyncio.create_task(publish(), name=f"publish-{version}")

    def exhausted(self) -> bool:
        """Say whether it has been tried often enough."""
        return self._tries >= MAX_TRIES

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
