#!/bin/sh
# Start a training run again until it is done.
set -u

usage() {
    cat <<'END'
usage: keep_training.sh FOLDER COMMAND [ARGUMENTS]

Runs COMMAND, which trains and saves its checkpoints in FOLDER, and starts it again if it ends with a status other than 0: it
resumes from the newest checkpoint. For example:

    keep_training.sh ckpt mpirun -n 4 python -m transformer.train -c ckpt

Gives up, with the status of COMMAND, after 3 runs in a row that saved no checkpoint, and if a signal of a user ended the run
(SIGHUP, SIGINT, SIGTERM). KEEP_TRAINING_PAUSE is the number of seconds between two runs (5).
END
}

if [ $# -lt 2 ]; then
    usage >&2
    exit 2
fi
folder=$1
shift
failures=0

while :; do
    before=$(ls "$folder"/*.safetensors 2>/dev/null)
    "$@"
    status=$?
    case $status in
        0 | 129 | 130 | 143) exit $status ;;
    esac
    if [ "$(ls "$folder"/*.safetensors 2>/dev/null)" = "$before" ]; then
        failures=$((failures + 1))
    else
        failures=0
    fi
    if [ $failures -ge 3 ]; then
        printf 'keep_training.sh: error: status %s, and the last 3 runs saved no checkpoint in %s; see their messages above\n' \
            $status "$folder" >&2
        exit $status
    fi
    printf 'keep_training.sh: status %s; starting again\n' $status >&2
    sleep "${KEEP_TRAINING_PAUSE:-5}"
done
