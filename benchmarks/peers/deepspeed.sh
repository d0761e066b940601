#!/usr/bin/env bash
# Set up DeepSpeed 0.18 in its own environment, .venv-peers/deepspeed (about 1.5 GB; a few minutes, network-bound).
#
# Its operators are not built ahead (DS_BUILD_OPS=0): torch's own AdamW and gloo serve the CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-peers/deepspeed
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install --quiet torch==2.13.0 setuptools wheel
DS_BUILD_OPS=0 "$venv/bin/pip" install --quiet --no-build-isolation deepspeed
echo "ready: $venv"
