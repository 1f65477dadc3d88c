#!/usr/bin/env bash
# Trains on all workers of a Cloud TPU VM, over ssh.
#
#     launch/tpu-vm.sh NAME ZONE --config FILE --workdir DIR [any flag of `cem train`]
#
# Needs gcloud here, and on every worker this repository with its environment (TPU_DIRECTORY,
# default cem_jax in the home directory; `make install EXTRAS=tpu`). The workers find each other
# through the metadata server. --workdir must be shared by all: a mounted bucket or Filestore.
# Ctrl-C, TERM or a closed terminal (except under nohup) stops all workers at the same step, with a
# checkpoint.
set -euo pipefail

if [[ $# -lt 3 ]]; then
    echo "usage: $0 NAME ZONE --config FILE --workdir DIR [flags of cem train]" >&2
    exit 2
fi
name=$1 zone=$2
shift 2
directory=${TPU_DIRECTORY:-cem_jax}

set -m # a process group for each gcloud, so that Ctrl-C does not end it
on_all_workers() {
    gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command="$1" </dev/null
}

# Each worker retries unless the run is finished (0), the input is wrong (2) or a stop was requested
# here. A stop leaves a marker, which also counts between attempts, and ends the process whose id
# was written; the worker writes that id and then looks for the marker.
# shellcheck disable=SC2088 # the workers expand it; the rest is this launch's own
mark="~/.cem_train.$(date +%s)-$$"
flags=$(printf '%q ' "$@")
train="cd $(printf '%q' "$directory") || exit 2
for try in \$(seq 50); do
    if [ -e $mark.stop ]; then status=143; break; fi
    .venv/bin/cem train $flags & echo \$! > $mark.pid
    if [ -e $mark.stop ]; then kill -TERM \$!; fi
    wait \$!; status=\$?; rm -f $mark.pid
    case \$status in 0 | 2) break ;; esac
    if [ -e $mark.stop ]; then break; fi
    for second in \$(seq 10); do [ -e $mark.stop ] || sleep 1; done
done
rm -f $mark.stop
exit \$status"
halt="touch $mark.stop; (kill -TERM \$(cat $mark.pid)) 2>/dev/null; true"

# ssh does not pass signals on.
signals=0
# shellcheck disable=SC2329 # the trap calls it
stop() {
    signals=$((signals + 1))
    { on_all_workers "$halt" || echo "$0: could not reach the workers; try again" >&2; } &
}
trap stop HUP INT TERM
on_all_workers "$train" &
training=$!
while :; do
    before=$signals status=0
    wait "$training" || status=$?
    ((signals == before)) && break # otherwise a signal interrupted the wait, not the training
done
wait || true
exit "$status"
