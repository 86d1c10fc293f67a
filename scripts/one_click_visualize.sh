#!/usr/bin/env bash
# Draw the tensors that a training run saved: pictures, statistics and an interactive page, in one command.
# Works with bash 3.2 and the tools of Linux and macOS.
set -euo pipefail

usage() {
    cat <<'END'
usage: one_click_visualize.sh [LOGS [DRAW]] [FLAGS]

Draws the tensors in the folder LOGS into the folder DRAW: quick_analysis.png, tensor_stats.txt, index.html, and the folders
distributions, heatmaps, comparisons, statistics and attention_maps. LOGS is ./tensor_logs unless said otherwise (or what
TENSOR_SAVE_DIR names), DRAW is ./draw.

  FLAGS     those of `python -m pyops inspect draw`, such as --steps 0:100:10 --layers 'encoder.*' --formats mxfp8,bf16
  --help    this text

The Python that runs is $PYTHON, else that of an active virtual environment, of .venv beside the scripts, or python3.
END
}

die() {
    printf 'one_click_visualize.sh: error: %s\n' "$1" >&2
    exit 2
}

logs='' draw='' flags=()
while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --*=* | --no-page) flags+=("$1") ;;
        --*)
            (($# >= 2)) || die "$1: want a value behind it; see --help"
            flags+=("$1" "$2")
            shift ;;
        -*) die "$1: unknown flag; see --help" ;;
        '') die 'LOGS, DRAW: want the name of a folder, got an empty one' ;;
        *)
            if [[ -z $logs ]]; then logs=$1
            elif [[ -z $draw ]]; then draw=$1
            else die "$1: want LOGS, DRAW and flags, and no more; see --help"
            fi ;;
    esac
    shift
done
logs=${logs:-${TENSOR_SAVE_DIR:-./tensor_logs}}
draw=${draw:-./draw}
[[ -d $logs ]] || die "$logs: there is no such folder; want the one that tensors were saved in"

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-}
if [[ -z $python ]]; then
    if [[ -n ${VIRTUAL_ENV:-} && -x $VIRTUAL_ENV/bin/python3 ]]; then python=$VIRTUAL_ENV/bin/python3
    elif [[ -x $root/.venv/bin/python3 ]]; then python=$root/.venv/bin/python3
    else python=python3
    fi
fi
command -v "$python" >/dev/null || die "$python: there is no such program; want Python 3.11 or newer, or name one with PYTHON=..."

# from anywhere: this tree's package comes before one that is installed
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m pyops inspect draw --tensor-dir="$logs" --output-dir="$draw" ${flags[@]+"${flags[@]}"}
