#!/usr/bin/env bash
# Draw the tensors that a training run saved: pictures, statistics and an interactive page, in one command.
# Works with bash 3.2 and the tools of Linux and macOS.
set -euo pipefail

usage() {
    cat <<'END'
usage: one_click_visualize.sh [LOGS [DRAW]] [FLAGS]

Draws the tensors in the folder LOGS into the folder DRAW: quick_analysis.png, tensor_stats.txt, index.html, and the folders
distributions, heatmaps, comparisons, statistics and attention_maps. LOGS defaults to $TENSOR_SAVE_DIR, else ./tensor_logs;
DRAW defaults to ./draw.

  FLAGS     flags of `python -m pyops inspect draw`, such as --steps 0:100:10 --layers 'encoder.*' --formats mxfp8,bf16
  --help    print this text

The Python used is $PYTHON, else the first one with all required packages: in an active virtual environment, of .venv
in the source tree, python3, python.
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
            (($# >= 2)) || die "$1: expected a value after it; see --help"
            flags+=("$1" "$2")
            shift ;;
        -*) die "$1: unknown flag; see --help" ;;
        '') die 'LOGS, DRAW: expected the name of a folder, got an empty one' ;;
        *)
            if [[ -z $logs ]]; then logs=$1
            elif [[ -z $draw ]]; then draw=$1
            else die "$1: expected at most LOGS, DRAW and flags; see --help"
            fi ;;
    esac
    shift
done
logs=${logs:-${TENSOR_SAVE_DIR:-./tensor_logs}}
draw=${draw:-./draw}
[[ -d $logs ]] || die "$logs: there is no such folder; name the folder with the saved tensors"

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
packages=(numpy cffi safetensors tqdm matplotlib)
has_packages() {
    "$1" -c 'import sys
from importlib.util import find_spec
sys.exit(sys.version_info < (3, 11) or not all(map(find_spec, sys.argv[1:])))' "${packages[@]}" 2>/dev/null
}

python=${PYTHON:-}
if [[ -z $python ]]; then
    first=
    for candidate in ${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python3"} "$root/.venv/bin/python3" python3 python; do
        command -v "$candidate" >/dev/null || continue
        if has_packages "$candidate"; then python=$candidate; break; fi
        first=${first:-$candidate}
    done
    [[ -n $python || -z $first ]] || die "no Python 3.11 or newer with ${packages[*]} was found; install them with \
'$first -m pip install ${packages[*]}', or name another Python with PYTHON=..."
    python=${python:-python3}
fi
command -v "$python" >/dev/null || die "$python: no such program; install Python 3.11 or newer, or name one with PYTHON=..."

# this tree's package takes precedence over an installed one, from any current folder
PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} exec "$python" -m pyops inspect draw --tensor-dir="$logs" --output-dir="$draw" ${flags[@]+"${flags[@]}"}
