"""Where do process groups meet? A small process that holds torch's rendezvous store.

Owner: the supervisor, which imports no torch and therefore starts this beside itself:
``python -m nereus.backends.torch.store --host 127.0.0.1 --port 0`` prints one JSON line ``{"host": ..., "port": ...}``
and serves until its parent ends or it gets SIGTERM.

Invariants (tests/backends/test_groups.py): it listens on the given host only (torch's own store listens on all
interfaces, so it is handed a socket that is already bound); it dies with its parent.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import socket
import sys
from typing import NoReturn

from nereus.lifeline import die_with_parent

_KEY_TIMEOUT_S = 300.0


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``host`` alone."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(1024)
    return listener


def serve(host: str, port: int) -> NoReturn:
    """Hold the store, say where, and wait for a signal."""
    die_with_parent(signal.SIGTERM)
    try:
        listener = bind(host, port)
    except OSError as error:
        sys.stderr.write(f"the rendezvous store cannot listen on {host}:{port}: {error.strerror}\n")
        raise SystemExit(2) from error
    from torch.distributed import TCPStore

    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=_KEY_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.write(json.dumps({"host": host, "port": store.port}) + "\n")
    sys.stdout.flush()
    while True:
        signal.pause()


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold the rendezvous store of a run's process groups.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    serve(options.host, options.port)


if __name__ == "__main__":
    main()
