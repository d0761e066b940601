#!/usr/bin/env bash
# Off-policy GRPO on one node under Slurm, through time limits and preemption.
#
#   sbatch launchers/slurm_async.sh JOB.toml [--dotted.key value ...]
#
# The run folder is named after the Slurm job, on the shared file system, so a job that was put back into the queue goes
# on where it stopped. Five minutes before the time limit, or when it is preempted, Slurm signals this script: the step is
# finished, a checkpoint is saved, and the job is queued again. A run that fails is not queued again.
#
# Outside of Slurm ("bash launchers/slurm_async.sh JOB.toml") it does the same for SIGTERM, without queueing: called again
# with the same NEREUS_RUN, it goes on.
#
#SBATCH --job-name=nereus
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#
# Settings, from the environment:
#   NEREUS_ROOT   the checkout (default: where sbatch was called, else the folder above this script)
#   NEREUS_RUN    the run folder (default: runs/slurm-JOBID below NEREUS_ROOT; outside of Slurm it must be named)
#   NEREUS_SLOTS  slots of the job (default: the node's GPUs if Slurm says how many, else what the job file says)
set -euo pipefail

if [ $# -eq 0 ]; then
    echo "slurm_async.sh: name a job file: sbatch launchers/slurm_async.sh JOB.toml [--dotted.key value ...]" >&2
    exit 2
fi
# Slurm runs a copy of this script from its spool folder, so the folder above it says nothing there.
root=${NEREUS_ROOT:-${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}}
if [ -z "${NEREUS_RUN:-}" ] && [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "slurm_async.sh: outside of Slurm, name the run folder: NEREUS_RUN=runs/mine bash $0 $*" >&2
    exit 2
fi
run=${NEREUS_RUN:-$root/runs/slurm-$SLURM_JOB_ID}
if [ ! -x "$root/.venv/bin/nereus" ] && ! command -v nereus > /dev/null; then
    echo "slurm_async.sh: no nereus in $root/.venv or on PATH; set NEREUS_ROOT to the checkout, or install it there" >&2
    exit 2
fi
PATH=$root/.venv/bin:$PATH
cd "$root"

slots=${NEREUS_SLOTS:-${SLURM_GPUS_ON_NODE:-}}
nereus run "$@" ${slots:+--cluster.slots "$slots"} --run-dir "$run" --resume=auto &
supervisor=$!

drained=no
drain() {
    drained=yes
    kill -TERM "$supervisor" 2> /dev/null || true
}
trap drain TERM INT

# "wait" returns early when a signal comes: it is the end of the run only when the process is gone.
code=0
while :; do
    wait "$supervisor" && code=0 || code=$?
    kill -0 "$supervisor" 2> /dev/null || break
done

state=$(sed -n 's/.*"state": *"\([a-z]*\)".*/\1/p' "$run/STATUS" 2> /dev/null || true)
echo "slurm_async.sh: the run in $run is ${state:-not begun} (exit code $code)"
if [ "$code" -eq 0 ] && [ "$drained" = yes ] && [ "$state" = stopped ] && [ -n "${SLURM_JOB_ID:-}" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
