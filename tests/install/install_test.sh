#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# install_test.sh CMAKE GENERATOR BUILD_DIR CXX: installs the build into an empty prefix, builds the program of
# tests/install/consumer against what was installed, once through find_package(bitopk) and once through pkg-config, and
# runs two ranks of each. CTest runs it as install_test.
set -euo pipefail

cmake="$1" build_dir="$3" cxx="$4"
# Perhaps there is no make on this machine, which is CMake's own choice.
export CMAKE_GENERATOR="$2"
consumer="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/consumer"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
# Nothing of this tree may be in sight of the consumer except through the installed package.
cp -r "$consumer" "$work/consumer"
cd "$work"

"$cmake" --install "$build_dir" --prefix "$work/built" --component development >/dev/null
# A package may be moved after it was installed.
mv "$work/built" "$work/prefix"

# run_two_ranks PROGRAM: two processes that meet through a folder; both must succeed.
run_two_ranks() {
  local program="$1" store status=0
  store="$(mktemp -d -p "$work")"
  timeout 60 "$program" 0 2 "$store" &
  local rank0=$!
  timeout 60 "$program" 1 2 "$store" || status=$?
  wait "$rank0" || status=$?
  return "$status"
}

echo "== find_package(bitopk)"
"$cmake" -S consumer -B by-cmake -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$cxx" \
  -DCMAKE_PREFIX_PATH="$work/prefix" >/dev/null
"$cmake" --build by-cmake
run_two_ranks by-cmake/consumer

echo "== pkg-config bitopk"
pc="$(find "$work/prefix" -name bitopk.pc)"
PKG_CONFIG_PATH="$(dirname "$pc")"
export PKG_CONFIG_PATH
read -r -a flags <<<"$(pkg-config --cflags --libs bitopk)"
"$cxx" -std=c++17 consumer/main.cc "${flags[@]}" -o by-pkg-config
run_two_ranks ./by-pkg-config

echo "== the version that pkg-config knows is the one that CMake accepts exactly"
"$cmake" -S consumer -B exact -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_PREFIX_PATH="$work/prefix" \
  -Dbitopk_exact_version="$(pkg-config --modversion bitopk)" >/dev/null
