#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every layer includes only the layers below it; run by ``./run check``.

Layers, lowest first: kernels, plugin, bindings, integration (Python). The rules:

- an include of ours names a file that exists and belongs to the same layer or a lower one; public
  headers are included as ``bitopk/...``, private ones from their own folder, the folder of their
  layer or the root of the tree;
- a public header includes no private one;
- Gloo is included only in ``plugin/src/gloo_*``, Highway and Eigen only in kernels, Python and
  pybind11 only in bindings;
- Python modules of the package import no framework at their top level, so that ``import bitopk``
  works with NumPy alone: only the modules named after a framework do, others inside functions.

``tests/`` may include anything.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("kernels", "plugin", "bindings")
SOURCE_SUFFIXES = {".h", ".cc", ".cu", ".cuh"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# Folders in which an include of ours is looked up, beside the folder of the file itself.
INCLUDE_ROOTS = ("kernels/include", "plugin/include", "kernels", ".")
GENERATED = {"bitopk/version.h": "plugin"}
# Prefix of an include of somebody else's header -> paths (from the root) that may have it.
FOREIGN = {
    "gloo/": ("plugin/src/gloo_",),
    "hwy/": ("kernels/",),
    "Eigen/": ("kernels/",),
    "pybind11/": ("bindings/",),
    "Python.h": ("bindings/",),
}
# Top-level import of a framework -> files (from integration/bitopk) that may have it.
FRAMEWORKS = {
    "torch": re.compile(r"^(torch|ddp|horovod)(\.py$|/)"),
    "horovod": re.compile(r"^horovod(\.py$|/)"),
    "mpi4py": re.compile(r"^$"),
    "matplotlib": re.compile(r"^$"),
}


def resolve(name: str, file: Path) -> Path | None:
    """Return the file of this tree that ``name`` means inside ``file``; None if it is not ours."""
    for folder in (file.parent, *(ROOT / root for root in INCLUDE_ROOTS)):
        candidate = (folder / name).resolve()
        if candidate.is_file() and candidate.is_relative_to(ROOT):
            return candidate
    return None


def check_include(file: Path, bracket: str, name: str) -> str | None:
    """Return what is wrong with one include of a file in a layer; None if nothing is."""
    path = file.relative_to(ROOT).as_posix()
    layer = path.split("/")[0]
    for prefix, allowed in FOREIGN.items():
        if name.startswith(prefix) and not path.startswith(allowed):
            return f"{name} may be included only in {', '.join(f'{p}*' for p in allowed)}"
    if name in GENERATED:
        target_layer, public = GENERATED[name], True
    else:
        target = resolve(name, file)
        if target is None:
            if bracket == '"' or name.startswith("bitopk/"):
                return f"{name} is no file of this tree (use <> for headers of others)"
            return None
        if bracket == "<" and not name.startswith("bitopk/"):
            return None  # a system header that has the name of one of our files
        target_path = target.relative_to(ROOT).as_posix()
        target_layer = target_path.split("/")[0]
        public = "/include/bitopk/" in target_path
        if public and not name.startswith("bitopk/"):
            return f"{target_path} is public: include it as bitopk/..."
    if target_layer not in LAYERS:
        return f"{name} belongs to {target_layer}, which is no layer"
    if LAYERS.index(target_layer) > LAYERS.index(layer):
        return f"{layer} may not include {target_layer} ({name})"
    if not public:
        if "/include/bitopk/" in path:
            return f"a public header may not include the private header {name}"
        if target_layer != layer:
            return f"{name} is private to {target_layer}"
    return None


def check_cxx(file: Path) -> list[str]:
    """Return the findings in one C++ file, as ``path:line: what``."""
    findings = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        match = INCLUDE.match(line)
        problem = match and check_include(file, match[1], match[2])
        if problem:
            findings.append(f"{file.relative_to(ROOT)}:{number}: {problem}")
    return findings


def top_level_imports(tree: ast.Module) -> list[tuple[int, str]]:
    """Return (line, module) of the absolute imports that run when the module is imported."""
    imports = []
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            imports.append((node.lineno, node.module))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            pending += node.orelse
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            pending += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
            ]
    return imports


def check_python(file: Path) -> list[str]:
    """Return the findings in one module of the package, as ``path:line: what``."""
    path = file.relative_to(ROOT / "integration/bitopk").as_posix()
    findings = []
    for line, module in top_level_imports(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        framework = module.split(".")[0]
        if framework in FRAMEWORKS and not FRAMEWORKS[framework].match(path):
            where = f"{file.relative_to(ROOT)}:{line}"
            findings.append(f"{where}: {framework} is optional: import it inside a function")
    return findings


def main() -> int:
    """Check the whole tree; return the exit status."""
    findings = []
    num_files = 0
    for layer in LAYERS:
        for file in sorted((ROOT / layer).rglob("*")):
            if file.suffix in SOURCE_SUFFIXES:
                findings += check_cxx(file)
                num_files += 1
    for file in sorted((ROOT / "integration/bitopk").rglob("*.py")):
        findings += check_python(file)
        num_files += 1
    for finding in findings:
        print(finding)
    print(f"check_includes: {num_files} files, {len(findings)} findings", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
