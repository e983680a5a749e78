"""Builds the images by docker or buildah, and checks them: `make image`, `make image-check`.

Needs the standard library only. What is checked lies in `check.py`, which needs buildah.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def version() -> str:
    """Thawline's version, from pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def git(*arguments: str) -> str:
    """What git says of this checkout; empty where there is no git or no repository."""
    if shutil.which("git") is None:
        return ""
    asked = subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() if asked.returncode == 0 else ""


def build_arguments(
    flavour: str, base: str | None, wheels: Path | None, certificates: Path | None
) -> list[str]:
    """Arguments of `docker build` and of `buildah build`, which agree on all of these.

    Args:
        flavour: `cpu`, `gpu` or `mlflow`.
        base: In the place of the pinned base image.
        wheels: A folder of wheels that come before the index's. It holds torch, so that PyTorch's
            own index is not asked.
        certificates: A bundle that the index's certificate is checked by, for a proxy that signs.
    """
    arguments = [
        "--file",
        f"docker/{flavour}.Dockerfile",
        "--tag",
        f"thawline-mlflow:{version()}"
        if flavour == "mlflow"
        else f"thawline:{version()}-{flavour}",
    ]
    values = {
        "VERSION": version(),
        "GIT_COMMIT": git("describe", "--match=", "--always", "--abbrev=40", "--dirty"),
        "CREATED": git("log", "-1", "--format=%cI"),
    }
    if base is not None:
        values["BASE"] = base
    if wheels is not None:
        values["TORCH_BACKEND"] = ""
        arguments += ["--build-context", f"wheels={wheels}"]
    if certificates is not None:
        arguments += ["--secret", f"id=certificates,src={certificates}"]
    for name, value in values.items():
        arguments += ["--build-arg", f"{name}={value}"]
    return [*arguments, "."]


def build(arguments: list[str]) -> int:
    """Builds by docker where its engine answers, else by buildah.

    Returns:
        The builder's exit status; 2 where there is no builder.
    """
    engine = shutil.which("docker") and subprocess.run(
        ["docker", "info"], capture_output=True, check=False
    )
    if engine and engine.returncode == 0:
        command = ["docker", "build"]
    elif shutil.which("buildah"):
        command = ["buildah", "build", "--format", "docker"]
    else:
        print("Neither a docker engine nor buildah is here; install one of them.", file=sys.stderr)
        return 2
    return subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode


def main() -> int:
    """Reads the command line and does what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["build", "check"])
    parser.add_argument("flavour", choices=["cpu", "gpu", "mlflow"])
    parser.add_argument("--base", help="an image in the place of the pinned base")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels, torch among them")
    parser.add_argument(
        "--certificates", type=Path, help="a bundle for a proxy that signs for the index"
    )
    parser.add_argument(
        "--keep", action="store_true", help="check: keep the built image and its base"
    )
    asked = parser.parse_args()
    if asked.action == "check":
        from check import check

        return check(asked.flavour, asked.base, asked.wheels, asked.certificates, keep=asked.keep)
    return build(build_arguments(asked.flavour, asked.base, asked.wheels, asked.certificates))


if __name__ == "__main__":
    sys.exit(main())
