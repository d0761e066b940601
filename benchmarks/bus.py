"""How fast is the bus, beside bare pyzmq and a Ray actor?

    python benchmarks/bus.py [--json] [--seconds S]

Two processes on one machine. Round trips: bare asyncio pyzmq without CURVE (the floor that anybody gets), ours with
CURVE, credit, acknowledgements and typed messages, and a Ray actor call (benchmarks/peers/ray.sh installs Ray). Bare
and ours take turns in short rounds, so that noise hits both. Then messages a second with a window in flight, and the
sample plane: GB/s of raw frames through shared memory (same host) and through CURVE (what a remote host gets).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from nereus.bus.endpoint import Delivery, PeerGone
from nereus.bus.keys import ensure_keys, load_keys
from nereus.bus.loop import run
from nereus.bus.messages import Ok, Pull
from nereus.bus.session import Settings
from nereus.bus.zeromq import ZmqClient, ZmqServer

ROOT = Path(__file__).resolve().parents[1]
RAY_PYTHON = ROOT / ".venv-peers/ray/bin/python"
MESSAGE = Pull(7, "rollout-0")
BARE_BYTES = 64
FRAME_BYTES = 8 << 20
TARGETS = {"ratio": 1.5, "ray_factor": 4.0, "sample_plane_gb_s": 1.0}
RAY_CALL_S = 2.4e-3
"""A Ray actor call on two cores, measured earlier; used for the factor where Ray is not installed."""


# The other process


async def serve_bare() -> None:
    """Send back whatever comes, as anybody would write it with pyzmq and asyncio."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(f"tcp://127.0.0.1:{port}", flush=True)
    while True:
        parts = await socket.recv_multipart()
        if parts[1] == b"stop":
            break
        await socket.send_multipart(parts)
    socket.close()
    context.term()


async def serve_ours(folder: Path, settings: Settings, secure: bool) -> None:
    """Answer requests with Ok until the client leaves."""
    keys = load_keys(folder, "supervisor")
    server = await ZmqServer.bind("supervisor", keys=keys, settings=settings, secure=secure)
    print(server.address, flush=True)
    while True:
        event = await server.receive()
        if isinstance(event, Delivery) and event.token:
            await server.reply(event, Ok())
        elif isinstance(event, PeerGone):
            break
    await server.close()


# This process


@contextlib.contextmanager
def other(*arguments: str):  # type: ignore[no-untyped-def]
    """Start the other process and yield the address it listens on."""
    process = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        yield process.stdout.readline().strip()
        process.wait(10)
    finally:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def bare_client() -> AsyncIterator[zmq.asyncio.Socket]:
    with other("--serve", "bare") as address:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        yield socket
        await socket.send(b"stop")
        socket.close(1000)
        context.term()


@contextlib.asynccontextmanager
async def our_client(folder: Path, settings: Settings, *, secure: bool = True) -> AsyncIterator[ZmqClient]:
    arguments = ["--serve", "ours", "--folder", str(folder), "--shared", str(settings.shared_frame_bytes)]
    with other(*arguments, *([] if secure else ["--insecure"])) as address:
        client = await ZmqClient.connect(
            "rollout-0",
            server="supervisor",
            address=address,
            keys=load_keys(folder, "rollout-0"),
            settings=settings,
            secure=secure,
        )
        yield client
        await client.close()


async def round_trips(call: Callable[[], Awaitable[object]], seconds: float) -> list[float]:
    """Make calls one after the other for ``seconds``; return how long each took."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        await call()
        times.append(time.perf_counter() - start)
    return times


async def bare_round_trips(seconds: float, times: list[float]) -> None:
    async with bare_client() as socket:

        async def call() -> None:
            await socket.send(bytes(BARE_BYTES))
            await socket.recv()

        await round_trips(call, seconds / 4)
        times += await round_trips(call, seconds)


async def our_round_trips(folder: Path, seconds: float, times: list[float]) -> None:
    async with our_client(folder, Settings()) as client:

        async def call() -> None:
            await client.request("supervisor", MESSAGE, timeout_s=10)

        await round_trips(call, seconds / 4)
        times += await round_trips(call, seconds)


async def pipelined(folder: Path, seconds: float) -> float:
    """Return one-way messages a second, the window being the only brake."""
    async with our_client(folder, Settings()) as client:
        start = time.perf_counter()
        count = 0
        while time.perf_counter() < start + seconds:
            for _ in range(100):
                await client.send("supervisor", MESSAGE)
            count += 100
        await client.request("supervisor", MESSAGE, timeout_s=10)
        return count / (time.perf_counter() - start)


async def requests_in_flight(folder: Path, seconds: float, in_flight: int) -> float:
    """Return requests a second with ``in_flight`` of them waiting."""
    async with our_client(folder, Settings()) as client:
        end = time.perf_counter() + seconds

        async def ask() -> int:
            return len(await round_trips(lambda: client.request("supervisor", MESSAGE, timeout_s=10), seconds))

        counts = await asyncio.gather(*(ask() for _ in range(in_flight)))
        return sum(counts) / (seconds + time.perf_counter() - end)


async def sample_plane(folder: Path, seconds: float, settings: Settings, *, secure: bool = True) -> float:
    """Return GB/s of raw frames, four messages in flight, counted when the last is received."""
    frame = bytes(range(256)) * (FRAME_BYTES // 256)
    async with our_client(folder, settings, secure=secure) as client:

        async def ask() -> None:
            await client.request("supervisor", MESSAGE, [frame], timeout_s=60)

        async def stream(length_s: float) -> int:
            return len(await round_trips(ask, length_s))

        await asyncio.gather(*(stream(seconds / 4) for _ in range(4)))
        start = time.perf_counter()
        counts = await asyncio.gather(*(stream(seconds) for _ in range(4)))
        return sum(counts) * FRAME_BYTES / 1e9 / (time.perf_counter() - start)


def ray_round_trips(seconds: float) -> list[float]:
    """Time calls of a Ray actor; empty if Ray is not installed."""
    if not RAY_PYTHON.exists():
        return []
    script = ROOT / "benchmarks/peers/ray_calls.py"
    command = [str(RAY_PYTHON), str(script), str(seconds), str(BARE_BYTES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"the Ray calls failed: {done.stderr[-2000:]}")
    times: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return times


def percentile(times: list[float], share: float) -> float:
    return sorted(times)[int(share * (len(times) - 1))]


def measure(seconds: float, rounds: int) -> dict[str, float | None]:
    """Make all measurements."""
    bare: list[float] = []
    ours: list[float] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "keys"
        ensure_keys(folder, ["supervisor", "rollout-0"])
        for _ in range(rounds):
            asyncio.run(bare_round_trips(seconds / rounds, bare))
            run(our_round_trips(folder, seconds / rounds, ours))
        figures: dict[str, float | None] = {
            "bare_rtt_ms": 1e3 * statistics.median(bare),
            "bare_rtt_p99_ms": 1e3 * percentile(bare, 0.99),
            "curve_rtt_ms": 1e3 * statistics.median(ours),
            "curve_rtt_p99_ms": 1e3 * percentile(ours, 0.99),
            "ratio": statistics.median(ours) / statistics.median(bare),
            "messages_s": run(pipelined(folder, seconds)),
            "requests_in_flight_s": run(requests_in_flight(folder, seconds, 64)),
            "sample_plane_gb_s": run(sample_plane(folder, seconds, Settings())),
            "sample_plane_curve_gb_s": run(sample_plane(folder, seconds, Settings(shared_frame_bytes=0))),
            "sample_plane_plain_gb_s": run(sample_plane(folder, seconds, Settings(shared_frame_bytes=0), secure=False)),
        }
    ray_times = ray_round_trips(seconds)
    figures["ray_rtt_ms"] = 1e3 * statistics.median(ray_times) if ray_times else None
    ray_s = statistics.median(ray_times) if ray_times else RAY_CALL_S
    figures["ray_factor"] = ray_s / statistics.median(ours)
    return figures


def table(figures: dict[str, float | None]) -> str:
    def row(what: str, key: str, unit: str, target: str = "") -> str:
        value = figures[key]
        return f"{what:58s} {'-' if value is None else f'{value:,.3f}':>14s} {unit:6s} {target}"

    return "\n".join(
        [
            row("round trip, bare asyncio pyzmq without CURVE, median", "bare_rtt_ms", "ms"),
            row("round trip, bare asyncio pyzmq without CURVE, p99", "bare_rtt_p99_ms", "ms"),
            row("round trip, Nereus with CURVE, median", "curve_rtt_ms", "ms"),
            row("round trip, Nereus with CURVE, p99", "curve_rtt_p99_ms", "ms"),
            row("Nereus / bare", "ratio", "x", f"at most {TARGETS['ratio']}"),
            row(
                "round trip, Ray actor call, median",
                "ray_rtt_ms",
                "ms",
                "" if figures["ray_rtt_ms"] else "not installed: benchmarks/peers/ray.sh",
            ),
            row(
                "Ray / Nereus" if figures["ray_rtt_ms"] else f"Ray ({1e3 * RAY_CALL_S} ms, measured earlier) / Nereus",
                "ray_factor",
                "x",
                f"at least {TARGETS['ray_factor']}",
            ),
            row("one-way messages, window 64", "messages_s", "/s"),
            row("requests, 64 in flight", "requests_in_flight_s", "/s"),
            row(
                "8 MiB frames, same host (shared memory)",
                "sample_plane_gb_s",
                "GB/s",
                f"at least {TARGETS['sample_plane_gb_s']}",
            ),
            row("8 MiB frames over TCP with CURVE", "sample_plane_curve_gb_s", "GB/s"),
            row("8 MiB frames over TCP without CURVE", "sample_plane_plain_gb_s", "GB/s"),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object on the last line")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each measurement")
    parser.add_argument("--rounds", type=int, default=4, help="how often bare and ours take turns")
    parser.add_argument("--serve", choices=["bare", "ours"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shared", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--insecure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve == "bare":
        asyncio.run(serve_bare())
    elif given.serve == "ours":
        settings = msgspec.structs.replace(Settings(), shared_frame_bytes=given.shared)
        run(serve_ours(given.folder, settings, not given.insecure))
    else:
        figures = measure(given.seconds, given.rounds)
        print(table(figures))
        if given.json:
            print(json.dumps(figures))


if __name__ == "__main__":
    main()
