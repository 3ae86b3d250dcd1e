# SPDX-License-Identifier: Apache-2.0
"""Optional frameworks: whether they are there, and one sentence when they are not."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

__all__ = ["is_installed", "require", "version_of"]


def is_installed(package: str) -> bool:
    """Tell whether a top-level package can be found; nothing is imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def version_of(distribution: str) -> str:
    """Return the version of an installed distribution, or "unknown"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def require(module: str, name: str, user: str) -> None:
    """Import a framework, or say in one sentence what is missing.

    Parameters
    ----------
    module : str
        What to import, e.g. "horovod.torch".
    name : str
        What people call it.
    user : str
        The module of ours that needs it.

    Raises
    ------
    ImportError
        If it is not installed, or does not fit what is.
    """
    package = module.split(".")[0]
    if not is_installed(package):
        raise ImportError(f"{user} needs {name}, which is not installed")
    try:
        importlib.import_module(module)
    except Exception as error:  # a library built for another torch fails in many ways
        text = str(error).strip().splitlines()
        raise ImportError(
            f"{user} needs {name}, but {module} {version_of(package)} cannot be imported with "
            f"torch {version_of('torch')} ({type(error).__name__}: {text[0] if text else ''}); "
            f"build it against the torch that is installed"
        ) from error
