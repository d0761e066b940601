#!/usr/bin/env bash
# Set up Ray 2.60 in its own environment, .venv-peers/ray (about 300 MB; a minute, network-bound).
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-peers/ray
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install --quiet ray==2.60.0
echo "ready: $venv"
