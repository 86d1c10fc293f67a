#!/usr/bin/env bash
# Split a file into parts FILE_part_aa, FILE_part_ab, ... with a SHA-256 manifest FILE.sha256.
# Works with bash 3.2 and the tools of Linux and macOS.
set -euo pipefail

usage() {
    cat <<'END'
usage: split_checkpoint.sh FILE [PARTS] [--force]

Splits FILE into PARTS parts of nearly equal size (default 2), FILE_part_aa, FILE_part_ab, ..., and writes FILE.sha256 with
the SHA-256 of FILE and of each part. FILE itself does not change.

  --force   overwrite existing parts and an existing manifest
  --help    print this text

Join them with restore_checkpoint.sh FILE.  To verify only the parts: sha256sum --ignore-missing -c FILE.sha256
END
}

die() {
    printf 'split_checkpoint.sh: error: %s\n' "$1" >&2
    exit 2
}

# sha256 < data: 64 hexadecimal digits. macOS has shasum in place of sha256sum.
sha256() {
    local line
    if command -v sha256sum >/dev/null; then line=$(sha256sum); else line=$(shasum -a 256); fi
    printf '%s' "${line:0:64}"
}

# suffix INDEX WIDTH: set `word` to the INDEXth (from 0) word of WIDTH letters: aa, ab, ...
suffix() {
    local letters=abcdefghijklmnopqrstuvwxyz index=$1 i
    word=''
    for ((i = 0; i < $2; i++)); do
        word=${letters:index % 26:1}$word
        index=$((index / 26))
    done
}

file='' parts='' force=0 only_names=0
for argument in "$@"; do
    if [[ $only_names == 0 && $argument == -* ]]; then
        case $argument in
            --force) force=1 ;;
            -h | --help) usage; exit 0 ;;
            --) only_names=1 ;;
            *) die "$argument: unknown flag; see --help" ;;
        esac
    elif [[ -z $file ]]; then file=$argument
    elif [[ -z $parts ]]; then parts=$argument
    else die "$argument: expected at most FILE [PARTS]; see --help"
    fi
done
[[ -n $file ]] || die 'FILE: expected the file to split; see --help'
parts=${parts:-2}
[[ $parts =~ ^[1-9][0-9]{0,8}$ ]] || die "PARTS: expected a whole number from 1 to 999999999, got $parts"
[[ $file != *$'\n'* ]] || die 'FILE: expected a name without a line break'
[[ $file != -* ]] || file=./$file
[[ -e $file ]] || die "$file: no such file"
[[ -f $file ]] || die "$file: expected a regular file"
[[ -r $file ]] || die "$file: cannot be read"

size=$(wc -c <"$file")
size=$((size))                                      # without the blanks of macOS's wc
((parts <= size)) || die "PARTS: expected at most $size, the size of $file in bytes, got $parts"
width=2
for ((limit = 676; limit < parts; limit *= 26)); do width=$((width + 1)); done

manifest=$file.sha256
names=()
for ((i = 0; i < parts; i++)); do
    suffix "$i" "$width"
    names+=("${file}_part_$word")
done
for name in "$manifest" "${names[@]}"; do
    [[ ! -d $name ]] || die "$name: is a folder; move it away"
    [[ $force == 1 || ! -e $name && ! -L $name ]] || die "$name: exists already; move it away or pass --force"
done

# Write all parts under hidden names first, so that a failure leaves nothing incomplete.
folder=$(dirname -- "$file")
work=$(mktemp -d "$folder/.split_checkpoint.XXXXXX" 2>/dev/null) || die "$folder: expected a folder that can be written"
trap 'rm -rf -- "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

whole=$(sha256 <"$file")
sums="$whole  ${file##*/}"$'\n'
written=()
start=0
for ((i = 0; i < parts; i++)); do
    length=$((size / parts + (i < size % parts)))
    written+=("$work/${names[i]##*/}")
    # tail may fail when head closes the pipe: the part's size, and the checksum below, are what is checked
    { tail -c "+$((start + 1))" "$file" 2>/dev/null || true; } | head -c "$length" 2>/dev/null >"${written[i]}" || true
    [[ -f ${written[i]} && $(($(wc -c <"${written[i]}"))) == "$length" ]] ||
        die "${names[i]}: cannot be written: free at least $length bytes in $folder"
    sums+="$(sha256 <"${written[i]}")  ${names[i]##*/}"$'\n'
    start=$((start + length))
done
[[ $(cat -- "${written[@]}" | sha256) == "$whole" ]] || die "$file: changed while it was split; try again"
{ printf '%s' "$sums" >"$work/manifest"; } 2>/dev/null || die "$manifest: cannot be written: free some space in $folder"

rm -f -- "$manifest"                                # never leave parts of two splits under one manifest
for ((i = 0; i < parts; i++)); do mv -f -- "${written[i]}" "${names[i]}"; done
mv -f -- "$work/manifest" "$manifest"
printf '%s: %s parts and %s\n' "$file" "$parts" "$manifest"
