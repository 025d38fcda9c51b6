#!/usr/bin/env bash
#SBATCH --job-name=cipo_jax
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@300
#SBATCH --requeue
# Runs an entry point on the GPUs of one or more SLURM nodes, as one JAX program with a process per GPU.

usage() {
  cat <<'HELP'
Usage: sbatch [--nodes=N] [--gpus-per-node=G] [OPTION ...] launch/slurm_gpu.sh MODULE [ARGUMENT ...]

Runs `python -m MODULE ARGUMENT ...` once per GPU (8 a node unless --gpus-per-node says otherwise); the processes form one
JAX program. sbatch's own options (--partition, --time, --account, ..) come before the script's name.

  sbatch --nodes=2 --time=24:00:00 launch/slurm_gpu.sh cipo_jax.train \
    --gin_file=configs/experiments/cipo_qwen2_5_3b.gin --run_dir=runs/cipo_3b

Five minutes before the time limit SLURM sends SIGTERM: the run saves a checkpoint and ends, and the same command
continues it. Submit from the checkout; the run directory and the model must be on a file system that all nodes share.

Environment:
  PYTHON  interpreter (default: python)
HELP
}

fail() {
  echo "error: $1; launch/slurm_gpu.sh --help shows the usage." >&2
  exit 2
}

case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  '') fail "the module is missing, for example cipo_jax.train" ;;
  -*) fail "the module is missing before '$1'; options of the program come after the module's name" ;;
esac
[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is no SLURM job; submit it with sbatch, or use launch/local.sh on one machine"

export CIPO_DISTRIBUTED=auto PYTHONUNBUFFERED=1
exec srun --ntasks-per-node="${SLURM_GPUS_ON_NODE:-1}" --kill-on-bad-exit=1 --label "${PYTHON:-python}" -m "$@"
