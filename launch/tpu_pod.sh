#!/usr/bin/env bash
# Starts an entry point on every host of a Cloud TPU slice, as one JAX program.

usage() {
  cat <<'HELP'
Usage: launch/tpu_pod.sh NAME [--zone=ZONE] [--project=PROJECT] [--dir=DIR] MODULE [ARGUMENT ...]
       launch/tpu_pod.sh NAME [--zone=ZONE] [--project=PROJECT] [--dir=DIR] --stop

Runs `python -m MODULE ARGUMENT ...` on every host of the TPU VM slice NAME (gcloud must be logged in), inside DIR, the
checkout of this project there (default: cipo_jax, relative to the home directory). JAX finds the other hosts by itself.
--stop sends SIGTERM to what was started: a training run saves a checkpoint and ends; the same command continues it.

Once per slice:
  gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all \
    --command='git clone REPOSITORY cipo_jax && cd cipo_jax && pip install -e . "jax[tpu]"'

Then, for example (every host answers the searches of its own trajectories, from its own index on port 8000):
  launch/tpu_pod.sh NAME --zone=ZONE cipo_jax.train \
    --gin_file=configs/experiments/cipo_qwen2_5_3b.gin --run_dir=/mnt/shared/cipo_3b

The run directory and the model must be on a file system that all hosts share. Whether an experiment fits a slice tells
  python -m cipo_jax.plan --gin_file=configs/experiments/cipo_qwen2_5_3b.gin --topology=v5e:4x4
on any machine.

Environment:
  PYTHON  interpreter on the hosts (default: python3)
HELP
}

fail() {
  echo "error: $1; launch/tpu_pod.sh --help shows the usage." >&2
  exit 2
}

case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  '' | -*) fail "the name of the TPU slice is missing" ;;
esac
name=$1
shift
dir=cipo_jax
stop=
options=()
while [[ ${1:-} == --* ]]; do
  case "$1" in
    --zone=* | --project=*) options+=("$1") ;;
    --dir=*) dir=${1#*=} ;;
    --stop) stop=1 ;;
    *) fail "unknown option '$1'; options of the program come after the module's name" ;;
  esac
  shift
done
command -v gcloud >/dev/null || fail "gcloud is not installed; see https://cloud.google.com/sdk"

if [[ -n $stop ]]; then
  [[ $# -eq 0 ]] || fail "--stop takes no module"
  command="kill -TERM \$(cat $(printf %q "$dir")/.launched)"
else
  [[ $# -ge 1 ]] || fail "the module is missing, for example cipo_jax.train"
  # `exec` keeps the process number that --stop signals.
  command="cd $(printf %q "$dir") && echo \$\$ >.launched && CIPO_DISTRIBUTED=auto PYTHONUNBUFFERED=1 exec"
  command+=" $(printf %q "${PYTHON:-python3}") -m$(printf ' %q' "$@")"
fi
exec gcloud compute tpus tpu-vm ssh "$name" "${options[@]}" --worker=all --command="$command"
