"""Where a run comes from: the versions and the commit of the code that made it, as tags."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess

from thawline import __version__


def origin_tags() -> dict[str, str]:
    """Tags `thawline.version`, `thawline.torch_version` and, where it is known, the git commit."""
    tags = {
        "thawline.version": __version__,
        "thawline.torch_version": importlib.metadata.version("torch"),
    }
    commit = git_commit()
    return {**tags, "thawline.git_commit": commit} if commit else tags


def git_commit() -> str:
    """`THAWLINE_GIT_COMMIT` (set in images, which hold no repository), else the cwd's commit.

    Empty where there is neither.
    """
    given = os.environ.get("THAWLINE_GIT_COMMIT", "")
    git = shutil.which("git")
    if given or git is None:
        return given
    try:
        asked = subprocess.run(  # noqa: S603
            [git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""
