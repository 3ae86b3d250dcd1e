#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# clang_tidy.sh BUILD_DIR JOBS: runs clang-tidy on every source of ours in BUILD_DIR/compile_commands.json, from the root
# of the tree. A file that passed is not looked at again until it, a header of ours, or the settings change.
set -euo pipefail

if [[ ${1:-} == --one ]]; then
  file="$2" stamp="$3" build_dir="$4"
  # What clang-tidy counts and suppresses goes to stderr; findings go to stdout.
  if clang-tidy --quiet -p "$build_dir" "$file" 2>"$stamp.log"; then
    rm -f "$stamp.log"
    touch "$stamp"
  else
    grep -E 'error:' "$stamp.log" || true
    exit 1
  fi
  exit 0
fi

build_dir="$1" jobs="$2"
stamps="$build_dir/clang-tidy"
mkdir -p "$stamps"
common="$({ clang-tidy --version; cat .clang-tidy CMakePresets.json
  find kernels plugin bindings tests -name '*.h' -print0 | sort -z | xargs -0 -r sha256sum; } | sha256sum)"
common="${common%% *}"

num_files=0
todo=()
while IFS= read -r file; do
  num_files=$((num_files + 1))
  key="$({ echo "$common $file"; cat "$file"; } | sha256sum)"
  stamp="$stamps/${key%% *}"
  [[ -f $stamp ]] || todo+=("$file" "$stamp" "$build_dir")
done < <(sed -n "s|^ *\"file\": \"$PWD/\(.*\)\".*|\1|p" "$build_dir/compile_commands.json" | sort -u)

echo "$num_files files, $((${#todo[@]} / 3)) to look at"
if [[ ${#todo[@]} -ne 0 ]]; then
  printf '%s\0' "${todo[@]}" | xargs -0 -n 3 -P "$jobs" "$0" --one
fi
