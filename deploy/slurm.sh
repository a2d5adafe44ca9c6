#!/bin/bash
# One worker on each node of a SLURM job, the coordinator beside the first of them:
#
#   sbatch --nodes=4 deploy/slurm.sh examples/train/coordinator.py examples/train/experiments/gpt_4workers_1f1b.yaml
#
# The arguments are the script of the coordinator and its own arguments; --workers and --bind are added here. Python and
# TorchSlicer must be the same on all nodes (load a module or activate an environment before `sbatch`), and the working
# folder shared among them.
#SBATCH --job-name=torchslicer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -euo pipefail

script=${1:?usage: sbatch slurm.sh COORDINATOR_SCRIPT [ARGUMENT...]}
shift
port=$((50054 + SLURM_JOB_ID % 1000))
host=$(hostname)
num_workers=$SLURM_NNODES

# Certificates of this job, in a folder that only its user can read; they go with the job.
certs=$(pwd)/.torchslicer-$SLURM_JOB_ID
names=$(seq -s, -f 'worker-%03g' 0 $((num_workers - 1)))
workers=
finish() {
    if [ -n "$workers" ]; then kill "$workers" 2>/dev/null || true; fi
    rm -rf "$certs"
}
trap finish EXIT
torchslicer certs init --out "$certs" --workers "$names" --days 7 >/dev/null

export RUN_CERTS=$certs RUN_COORDINATOR=$host:$port
PYTHONPATH=$(cd "$(dirname "$script")" && pwd)${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
# shellcheck disable=SC2016  # the variables are those of each task
srun --ntasks="$num_workers" --ntasks-per-node=1 --overlap --kill-on-bad-exit=0 bash -c '
    name=$(printf "worker-%03d" "$SLURM_PROCID")
    exec torchslicer worker --coordinator "$RUN_COORDINATOR" --once --trust models --threads "$SLURM_CPUS_PER_TASK" \
        --tls-ca "$RUN_CERTS/ca.pem" --tls-cert "$RUN_CERTS/$name.pem" \
        --tls-key "$RUN_CERTS/$name.key"
' &
workers=$!

export TORCHSLICER_NETWORK__TLS="{\"ca\": \"$certs/ca.pem\", \"cert\": \"$certs/coordinator.pem\", \
    \"key\": \"$certs/coordinator.key\"}"
python "$script" "$@" --workers "$num_workers" --bind "0.0.0.0:$port"
