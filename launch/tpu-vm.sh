#!/usr/bin/env bash
# Trains on all workers of a Cloud TPU VM, over ssh.
#
#     launch/tpu-vm.sh NAME ZONE --config FILE --workdir DIR [any flag of `cem train`]
#
# Needs gcloud here, and on every worker this repository with its environment (TPU_DIRECTORY,
# default cem_jax in the home directory; `make install EXTRAS=tpu`). The workers find each other
# through the metadata server. --workdir must be shared by all: a mounted bucket or Filestore.
# Ctrl-C stops all workers at the same step, with a checkpoint.
set -euo pipefail

if [[ $# -lt 3 ]]; then
    echo "usage: $0 NAME ZONE --config FILE --workdir DIR [flags of cem train]" >&2
    exit 2
fi
name=$1 zone=$2
shift 2
directory=${TPU_DIRECTORY:-cem_jax}

on_all_workers() {
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1"
}

# Each worker tries again after a failure (1), an abort by JAX (134) or a kill (137), as all do when
# one fails. 2 means that another try would end the same way; 143 that it was asked to stop.
flags=$(printf '%q ' "$@")
train="cd $(printf '%q' "$directory") || exit 2
for try in \$(seq 50); do
    .venv/bin/cem train $flags & echo \$! > ~/.cem_train.pid
    wait \$!; status=\$?
    case \$status in 1 | 134 | 137) sleep 10 ;; *) break ;; esac
done
exit \$status"

# ssh does not pass signals on.
trap 'on_all_workers "kill -TERM \$(cat ~/.cem_train.pid)"' INT TERM
on_all_workers "$train" &
status=0
wait $! || status=$?
if ((status > 128)); then # the trap has run: wait for the checkpoint
    wait $! || status=$?
fi
exit "$status"
