"""How do a run's processes come by the same job description, and by endpoints that fit together?"""

from __future__ import annotations

from pathlib import Path

import msgspec

from nereus.bus.endpoint import Endpoint
from nereus.bus.keys import load_keys
from nereus.bus.session import Settings
from nereus.bus.zeromq import ZmqClient, ZmqServer
from nereus.config import JobConfig
from nereus.runtime.folder import RunPaths

RESOLVED = "resolved.json"


def store_config(paths: RunPaths, config: JobConfig) -> None:
    """Write the resolved job description for the workers, before the first of them starts."""
    (paths.configs / RESOLVED).write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def load_config(paths: RunPaths) -> JobConfig:
    """Read what ``store_config`` has written."""
    return msgspec.json.decode((paths.configs / RESOLVED).read_bytes(), type=JobConfig)


def bus_settings(config: JobConfig) -> Settings:
    """Return the numbers that all endpoints of the run keep to."""
    bus = config.bus
    return Settings(
        window=bus.window,
        heartbeat_s=bus.heartbeat_s,
        liveness_s=bus.liveness_s,
        max_message_bytes=bus.max_message_bytes,
        connect_timeout_s=min(bus.start_timeout_s, 30.0),
    )


class Wire:
    """Opens the endpoints of one process under its own key; the ``Wiring`` of its actor."""

    def __init__(self, name: str, keys: Path, config: JobConfig) -> None:
        self._name = name
        self._keys = keys
        self._config = config

    async def serve(self, port: int = 0) -> ZmqServer:
        """Open this process's own server endpoint."""
        return await ZmqServer.bind(
            self._name,
            keys=load_keys(self._keys, self._name),
            host=self._config.bus.host,
            port=port,
            settings=bus_settings(self._config),
        )

    async def connect(self, server: str, address: str) -> Endpoint:
        return await self.client(server, address)

    async def client(self, server: str, address: str) -> ZmqClient:
        """Connect to another process's server endpoint."""
        return await ZmqClient.connect(
            self._name,
            server=server,
            address=address,
            keys=load_keys(self._keys, self._name),
            settings=bus_settings(self._config),
        )
