#!/usr/bin/env bash
# Set up TRL 1.16 in its own environment, .venv-peers/trl (about 1.5 GB; a few minutes, network-bound).
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-peers/trl
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install --quiet torch==2.13.0
"$venv/bin/pip" install --quiet torch==2.13.0 trl==1.16.0 transformers==5.24.0
echo "ready: $venv"
