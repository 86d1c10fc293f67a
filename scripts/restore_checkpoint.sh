#!/usr/bin/env bash
# Join the parts that split_checkpoint.sh wrote, and verify them against their manifest.
# Works with bash 3.2 and the tools of Linux and macOS.
set -euo pipefail

usage() {
    cat <<'END'
usage: restore_checkpoint.sh FILE_OR_PREFIX_OR_MANIFEST [OUTPUT] [--force]

Joins FILE_part_aa, FILE_part_ab, ... as the manifest FILE.sha256 lists them. The first argument is FILE, a part,
their common prefix FILE_part_, or FILE.sha256. OUTPUT defaults to FILE. The result gets that name only after its SHA-256 was
verified. Missing and damaged parts are named.

  --force   overwrite an existing result
  --help    print this text
END
}

die() {
    printf 'restore_checkpoint.sh: error: %s\n' "$1" >&2
    exit 2
}

# sha256 < data: 64 hexadecimal digits. macOS has shasum in place of sha256sum.
sha256() {
    local line
    if command -v sha256sum >/dev/null; then line=$(sha256sum); else line=$(shasum -a 256); fi
    printf '%s' "${line:0:64}"
}

from='' output='' force=0 only_names=0
for argument in "$@"; do
    if [[ $only_names == 0 && $argument == -* ]]; then
        case $argument in
            --force) force=1 ;;
            -h | --help) usage; exit 0 ;;
            --) only_names=1 ;;
            *) die "$argument: unknown flag; see --help" ;;
        esac
    elif [[ -z $from ]]; then from=$argument
    elif [[ -z $output ]]; then output=$argument
    else die "$argument: expected at most FILE [OUTPUT]; see --help"
    fi
done
[[ -n $from ]] || die 'FILE: expected the file to restore, a part of it, or its manifest; see --help'
[[ $from != -* ]] || from=./$from

stem=$from
[[ $from =~ ^(.+)_part(_[a-z]*)?$ ]] && stem=${BASH_REMATCH[1]}
if [[ -f $from.sha256 ]]; then manifest=$from.sha256
elif [[ $from == *.sha256 && -f $from ]]; then manifest=$from
elif [[ -f $stem.sha256 ]]; then manifest=$stem.sha256
elif [[ $from == *.sha256 ]]; then die "$from: no such manifest"
else die "$stem.sha256: no such manifest; copy it from where split_checkpoint.sh wrote the parts"
fi
[[ -r $manifest ]] || die "$manifest: cannot be read"
folder=$(dirname -- "$manifest")

sums=() names=()
while IFS= read -r line || [[ -n $line ]]; do
    [[ $line =~ ^([0-9a-f]{64})\ [\ *]([^/]+)$ ]] ||
        die "$manifest: damaged manifest: expected lines of a SHA-256 and a file name"
    sums+=("${BASH_REMATCH[1]}")
    names+=("${BASH_REMATCH[2]}")
done < <(tr -d '\r\000' <"$manifest")
((${#names[@]} >= 2)) || die "$manifest: damaged manifest: expected a line for the file and one for each part"

output=${output:-$folder/${names[0]}}
[[ $output != -* ]] || output=./$output
[[ ! -d $output ]] || die "$output: is a folder; name a file"
[[ ! $output -ef $manifest ]] || die "$output: is the manifest; give another name"
[[ $force == 1 || ! -e $output && ! -L $output ]] || die "$output: exists already; move it away or pass --force"

missing='' damaged='' parts=()
for ((i = 1; i < ${#names[@]}; i++)); do
    part=$folder/${names[i]}
    parts+=("$part")
    [[ ! $output -ef $part ]] || die "$output: is one of the parts; give another name"
    if [[ ! -f $part || ! -r $part ]]; then missing+=" $part"
    elif [[ $(sha256 <"$part") != "${sums[i]}" ]]; then damaged+=" $part"
    fi
done
[[ -z $missing$damaged ]] ||
    die "${missing:+missing:$missing; }${damaged:+damaged:$damaged; }copy every part listed in $manifest again"

# A temporary file, so that nothing is written under the result's name before it is verified.
target=$(dirname -- "$output")
temporary=$(mktemp "$target/.restore_checkpoint.XXXXXX" 2>/dev/null) || die "$target: expected a folder that can be written"
trap 'rm -f -- "$temporary"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
cat -- "${parts[@]}" 2>/dev/null >"$temporary" || die "$output: cannot be written: free some space in $target"
[[ $(sha256 <"$temporary") == "${sums[0]}" ]] ||
    die "$output: the parts joined do not have the SHA-256 in $manifest; use parts and manifest of one split"
chmod "$(printf '%o' $((0666 & ~0$(umask))))" "$temporary"      # mktemp creates it private
mv -f -- "$temporary" "$output"
printf '%s: restored from %s parts\n' "$output" "${#parts[@]}"
