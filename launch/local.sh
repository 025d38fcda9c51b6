#!/usr/bin/env bash
# Starts N processes of any entry point on this machine, connected by jax.distributed over loopback.

usage() {
  cat <<'HELP'
Usage: launch/local.sh N [--devices_per_process=D] MODULE [ARGUMENT ...]

Starts N processes of `python -m MODULE ARGUMENT ...` that form one JAX program, with D simulated CPU devices each
(default 1). Use it to try a multi-host run on one machine.

  launch/local.sh 2 --devices_per_process=2 cipo_jax.train --gin_file=configs/quickstart.gin --run_dir=runs/two

Every line of output starts with its process's number. SIGTERM and SIGINT (Ctrl-C) go to all processes. When one
process fails, the others get GRACE_S seconds to end and are then stopped. The exit code is the worst of all.

Environment:
  PYTHON         interpreter (default: python)
  JAX_PLATFORMS  default here: cpu
  GRACE_S        default: 20
HELP
}

fail() {
  echo "error: $1" >&2
  exit 2
}

case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  '') fail "the number of processes is missing; launch/local.sh --help shows the usage." ;;
esac
count=$1
shift
[[ $count =~ ^[1-9][0-9]*$ ]] || fail "the number of processes is '$count'; give a whole number from 1."
devices=1
while [[ ${1:-} == --* ]]; do
  case "$1" in
    --devices_per_process=*) devices=${1#*=} ;;
    *) fail "unknown option '$1'; options of the program come after the module's name." ;;
  esac
  shift
done
[[ $devices =~ ^[1-9][0-9]*$ ]] || fail "--devices_per_process=$devices; give a whole number from 1."
[[ $# -ge 1 ]] || fail "the module is missing, for example cipo_jax.train; launch/local.sh --help shows the usage."

python=${PYTHON:-python}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])') ||
  fail "the interpreter '$python' does not run; set PYTHON."

export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices"
export PYTHONUNBUFFERED=1
# XLA's thread pool has NPROC threads. Host callbacks of several simulated devices block threads that the others need,
# so fewer than two a device can deadlock.
threads=$(getconf _NPROCESSORS_ONLN)
for wanted in $((2 * devices)) "${NPROC:-0}"; do
  ((wanted > threads)) && threads=$wanted
done
export NPROC=$threads
export CIPO_COORDINATOR=127.0.0.1:$port CIPO_NUM_PROCESSES=$count

set -m # own process groups: without them bash lets background processes ignore SIGINT
pids=()
printers=()
pipes=$(mktemp -d)
for ((i = 0; i < count; i++)); do
  mkfifo "$pipes/$i"
  (trap '' INT TERM; exec sed -u "s/^/[$i] /" <"$pipes/$i") &
  printers+=($!)
  CIPO_PROCESS_ID=$i "$python" -m "$@" >"$pipes/$i" 2>&1 </dev/null &
  pids+=($!)
done

forward() {
  for pid in "${pids[@]}"; do
    kill -s "$1" "$pid" 2>/dev/null
  done
}
trap 'forward TERM' TERM
trap 'forward INT' INT

worst=0
running=$count
stopped=0 # 1: asked to end after a failure, 2: killed
failed_at= # seconds since the start; empty: no failure
codes=()
while ((running > 0)); do
  for ((i = 0; i < count; i++)); do
    [[ -n ${codes[i]:-} ]] && continue
    kill -0 "${pids[i]}" 2>/dev/null && continue
    wait "${pids[i]}"
    codes[i]=$?
    running=$((running - 1))
    # What a process made of our own signal says nothing about the run.
    if ((stopped == 0 && codes[i] > worst)); then worst=${codes[i]}; fi
    if [[ ${codes[i]} != 0 && -z $failed_at ]]; then failed_at=$SECONDS; fi
  done
  if [[ $running -gt 0 && -n $failed_at ]]; then
    grace=$((SECONDS - failed_at - ${GRACE_S:-20}))
    if ((stopped == 0 && grace >= 0)); then
      echo "A process failed with code $worst; stopping the other $running." >&2
      stopped=1
      forward TERM
    elif ((stopped == 1 && grace >= 10)); then
      stopped=2
      forward KILL
    fi
  fi
  ((running > 0)) && sleep 0.2
done
wait "${printers[@]}" 2>/dev/null
rm -rf "$pipes"
exit "$worst"
