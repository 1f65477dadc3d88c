#!/usr/bin/env bash
# Trains in N processes on this machine.
#
#     launch/local.sh N --config FILE --workdir DIR [any flag of `cem train`]
#
# GPUs are divided evenly; on CPU every process has one device (JAX_NUM_CPU_DEVICES=k: k each).
# TERM or Ctrl-C stops all processes at the same step, with a checkpoint. One attempt;
# launch/README.md says when to rerun.
#
# CEM=path/to/cem    the command, if it is not on the PATH
# CEM_PORT=12345     a port of your choice
set -euo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: $0 N --config FILE --workdir DIR [flags of cem train]" >&2
    exit 2
fi
processes=$1
shift
cem=${CEM:-cem}
export CEM_COORDINATOR=127.0.0.1:${CEM_PORT:-$((20000 + $$ % 10000))}
export CEM_PROCESSES=$processes

# The GPUs, by index or as CUDA_VISIBLE_DEVICES names them: none if it is empty or -1.
gpus=()
if [[ ${JAX_PLATFORMS:-} != cpu ]]; then
    if [[ -v CUDA_VISIBLE_DEVICES ]]; then
        [[ $CUDA_VISIBLE_DEVICES == -1 ]] || IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
    elif command -v nvidia-smi >/dev/null; then
        mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
    fi
fi
share=$((${#gpus[@]} / processes))
if ((share * processes != ${#gpus[@]})); then
    echo "$0: ${#gpus[@]} GPUs do not divide over $processes processes" >&2
    exit 2
fi

pids=()
stopping=0
stop() {
    stopping=1
    kill -TERM "${pids[@]}" 2>/dev/null || true
}
trap stop INT TERM

for ((i = 0; i < processes && !stopping; i++)); do
    if ((share > 0)); then
        mine=("${gpus[@]:i*share:share}")
        CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${mine[*]}")
        export CUDA_VISIBLE_DEVICES
    fi
    CEM_PROCESS=$i "$cem" train "$@" &
    pids+=($!)
done
status=0
if ((stopping)); then
    status=143 # even if no process has started yet
    stop       # the last process may not have been in the list
fi

# The exit status is that of the first process that failed. The others end by themselves if they
# had joined; processes that still wait for it are stopped after a while.
failed_at=
while ((${#pids[@]})); do
    for i in "${!pids[@]}"; do
        kill -0 "${pids[i]}" 2>/dev/null && continue
        code=0
        wait "${pids[i]}" || code=$?
        unset "pids[i]"
        if ((code != 0 && status == 0)); then
            status=$code
            failed_at=$SECONDS
        fi
    done
    if [[ -n $failed_at ]] && ((stopping == 0 && SECONDS - failed_at > 15)); then
        stop
    fi
    sleep 0.2
done
exit "$status"
