"""Builds an image by buildah, looks into it and runs every stage's command in it.

No docker engine and no registry of images is needed: the base is made by debootstrap, from the same
packages as the pinned one, unless `--base` names an image that buildah can have. Needs root.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

from images import ROOT, build_arguments, version
from stage_commands import CONFIG, IMPORTS, KUBEFLOW_TASKS, STAGES

WORK = ROOT / "build" / "images"
BASE = "localhost/thawline-base:bookworm"
DISTRIBUTION = "bookworm"
BUDGET_MB = {"cpu": 1_800, "gpu": 8_000}
"""Most that an image may take unpacked."""

TOOLS = {
    *("gcc", "g++", "cc", "c++", "clang", "ld", "as", "make", "cmake", "ninja"),
    *("pip", "pip3", "uv", "git", "curl", "wget"),
}
SECRET_FILES = {".netrc", ".pypirc", "pip.conf", "uv.toml", ".env", ".git", "id_rsa", "id_ed25519"}
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/]")
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|INDEX_URL", re.IGNORECASE)
LABELS = ("title", "description", "licenses", "version", "revision", "created")


class CheckError(Exception):
    """A check that did not hold."""


def run(*command: str | Path, log: Path | None = None) -> str:
    """Runs a command and returns what it printed; with a `log`, that holds it as it comes.

    Raises:
        CheckError: It ended with another status than 0, or took more than half an hour.
    """
    with log.open("w") if log else nullcontext() as stream:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                stdout=stream or subprocess.PIPE,
                stderr=subprocess.STDOUT if stream else subprocess.PIPE,
                text=True,
                timeout=1800,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CheckError(f"{command[0]} took more than half an hour") from None
    printed = log.read_text() if log else done.stdout
    if done.returncode:
        lines = (done.stderr or printed).strip().splitlines()
        raise CheckError(f"status {done.returncode}: " + " | ".join(lines[-8:]))
    return printed


@cache
def storage_driver() -> str:
    """`overlay` where it mounts, else `vfs`, which copies every layer whole."""
    parts = [WORK / "overlay" / name for name in ("lower", "upper", "work", "merged")]
    for part in parts:
        part.mkdir(parents=True, exist_ok=True)
    lower, upper, work, merged = parts
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    try:
        run("mount", "-t", "overlay", "overlay", "-o", options, merged)
        run("umount", merged)
    except CheckError:
        return "vfs"
    finally:
        shutil.rmtree(WORK / "overlay", ignore_errors=True)
    return "overlay"


def buildah(*arguments: str | Path, log: Path | None = None) -> str:
    """Runs buildah on a store of its own."""
    store = ("--root", WORK / "store", "--runroot", WORK / "runtime")
    return run("buildah", *store, "--storage-driver", storage_driver(), *arguments, log=log)


def remove_store() -> None:
    """Removes the images; the overlay driver leaves its folder mounted on itself."""
    subprocess.run(["umount", "--quiet", WORK / "store" / "overlay"], check=False)
    for name in ("store", "runtime"):
        shutil.rmtree(WORK / name, ignore_errors=True)


def make_base() -> str:
    """Debian's smallest system, without the documents that the slim images leave out too."""
    folder = WORK / "base"
    sources = Path("/etc/apt/sources.list.d/debian.sources")
    text = sources.read_text() if sources.is_file() else ""
    mirror = re.findall(r"^URIs: *(\S+)", text, re.MULTILINE)[:1]
    run("debootstrap", "--variant=minbase", DISTRIBUTION, folder, *mirror, log=WORK / "base.log")
    if DISTRIBUTION in text:
        shutil.copy(sources, folder / "etc/apt/sources.list.d")
        (folder / "etc/apt/sources.list").unlink()
    for leftover in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"):
        shutil.rmtree(folder / leftover, ignore_errors=True)
    for fetched in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(folder / fetched)
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, folder, "/")
    buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(folder)
    return "by debootstrap"


def check_config(image: str, arguments: list[str]) -> str:
    """User, labels, commands and environment."""
    config = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
    if config["User"] != "1000:0":
        raise CheckError(f"the user is {config['User']!r}")
    labels = {name: config["Labels"].get(f"org.opencontainers.image.{name}") for name in LABELS}
    empty = [name for name, value in labels.items() if not value]
    if empty or f"GIT_COMMIT={labels['revision']}" not in arguments:
        raise CheckError(f"labels: empty are {empty}, the revision is {labels['revision']}")
    if config["Entrypoint"] != ["thawline"] or "Healthcheck" not in config:
        raise CheckError("the entry point or the health command is missing")
    secret = [entry for entry in config["Env"] if SECRET_NAME.search(entry)]
    if secret:
        raise CheckError(f"the environment holds {secret}")
    return f"user {config['User']}, revision {labels['revision'][:12]}"


def check_files(root: Path) -> str:
    """No tool that builds or fetches, no package of them, no secret."""
    tools, secrets, files = [], [], 0
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in ("proc", "sys", "dev")]
        for name in [*folders, *names]:
            path = Path(folder, name)
            if name in SECRET_FILES:
                secrets.append(path)
            if Path(folder).name in ("bin", "sbin") and name in TOOLS:
                tools.append(path)
            if Path(folder).name == "site-packages" and name in ("pip", "uv"):
                tools.append(path)
        for name in names:
            path = Path(folder, name)
            files += 1
            small = not path.is_symlink() and path.stat().st_size < 100_000
            if (
                small
                and path.suffix not in (".py", ".pyc")
                and PRIVATE_KEY.search(path.read_bytes())
            ):
                secrets.append(path)
    for found, what in ((tools, "tools"), (secrets, "secrets")):
        if found:
            raise CheckError(f"{what}: " + ", ".join(str(path.relative_to(root)) for path in found))
    return f"{files:,} files"


def check_size(root: Path, flavour: str) -> str:
    """Unpacked, and packed by gzip as a registry holds it."""
    unpacked = int(run("du", "--summarize", "--bytes", root).split()[0]) / 1e6
    pack = 'tar --create --directory "$0" . | gzip | wc --bytes'
    packed = int(run("sh", "-c", pack, root)) / 1e6
    detail = f"{unpacked:,.0f} MB, packed {packed:,.0f} MB, budget {BUDGET_MB[flavour]:,} MB"
    if unpacked > BUDGET_MB[flavour]:
        raise CheckError(detail)
    return detail


def in_container(container: str, user: str, log: str, *command: str) -> str:
    """Runs a command as a user in an empty folder that nobody may write to."""
    buildah(
        *("run", "--isolation", "chroot", "--network", "host", "--user", user),
        *("--workingdir", "/empty", "--volume", f"{WORK / 'out'}:/out:rw"),
        *("--env", "OMP_NUM_THREADS=1", container, *command),
        log=WORK / f"{log}.log",
    )
    return f"as {user}"


def check_untouched(root: Path, since: float) -> str:
    """Nothing but /tmp was written to: a read-only root would do."""
    ours = {"tmp", "out", "empty", "proc", "sys", "dev", "run"}
    mounted = {"hosts", "resolv.conf", "hostname"}
    written = []
    for folder, folders, names in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name not in ours]
        paths = [Path(folder, name) for name in names if name not in mounted]
        written += [path for path in paths if path.lstat().st_mtime > since]
    if written:
        raise CheckError(", ".join(str(path.relative_to(root)) for path in written[:5]))
    return "nothing outside /tmp"


def resolve(flavour: str) -> str:
    """Resolves the pins anew: they go together, and their hashes are the index's."""
    lines = (ROOT / f"docker/requirements-{flavour}.txt").read_text().splitlines(keepends=True)
    locked = [line for line in lines if not line.startswith("#")]
    asked, found = WORK / "pins.in", WORK / "pins.txt"
    asked.write_text("\n".join(re.findall(r"^[\w.-]+==[^\s\\]+", "".join(locked), re.MULTILINE)))
    found.unlink(missing_ok=True)
    uv = ROOT / ".venv/bin/uv"
    run(
        *(uv if uv.exists() else "uv", "pip", "compile", "--generate-hashes", "--no-header"),
        *("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"),
        *("--no-annotate", "--output-file", found, asked),
        log=WORK / "resolve.log",
    )
    if found.read_text() != "".join(locked):
        raise CheckError(f"{found.relative_to(ROOT)} differs from the committed file")
    return f"{len(asked.read_text().splitlines())} packages go together, hashes are the index's"


class Table:
    """The rows of the report, printed as they come."""

    def __init__(self) -> None:
        self.failures = 0

    def row(self, name: str, check: Callable[[], str]) -> bool:
        """Runs one check; its row is what it returned, or why it failed."""
        begun = time.monotonic()
        try:
            passed, detail = True, check()
        except CheckError as failure:
            passed, detail = False, str(failure)
            self.failures += 1
        seconds = time.monotonic() - begun
        print(
            f"{name:<22} {'ok' if passed else 'FAILED':<7} {seconds:7.1f} s  {detail}", flush=True
        )
        return passed


@contextmanager
def container_of(image: str) -> Iterator[tuple[str, Path]]:
    """A container of the image and where its files lie."""
    container = buildah("from", "--pull-never", image).strip()
    root = Path(buildah("mount", container).strip())
    try:
        yield container, root
    finally:
        buildah("rm", container)


def run_stages(table: Table, container: str, root: Path) -> None:
    """Every stage's command, then two tasks as Kubeflow runs them, none as the image's own user."""
    out = WORK / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / "tiny.yaml").write_text(CONFIG)
    out.chmod(0o777)
    (root / "empty").mkdir(mode=0o555)
    begun = time.time()

    def inside(name: str, user: str, *command: str) -> bool:
        return table.row(name, lambda: in_container(container, user, name, *command))

    homeless = ("65534:65534", "env", "-u", "HOME")
    inside("health", *homeless, "thawline", "--version")
    inside("imports", *homeless, "python3", "-c", IMPORTS)
    for stage, arguments in STAGES.items():
        inside(stage, *homeless, "thawline", *arguments, "--config", "/out/tiny.yaml")
    # MLflow asks for the home of a user who has no entry in /etc/passwd: the image's HOME answers.
    inside("kubeflow-tasks", "12345:0", "python3", "-c", KUBEFLOW_TASKS)
    table.row("written", lambda: check_untouched(root, begun))


def check(
    flavour: str,
    base: str | None,
    wheels: Path | None,
    certificates: Path | None,
    *,
    keep: bool,
) -> int:
    """Builds an image, looks into it, runs the stages in it, and prints a row for each.

    Returns:
        0 where every row is ok, 1 where one is not, 2 where a tool is missing.
    """
    missing = [tool for tool in ("buildah", "debootstrap") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        print(
            f"image-check needs root and: apt-get install {' '.join(missing or ['nothing more'])}",
            file=sys.stderr,
        )
        return 2
    WORK.mkdir(parents=True, exist_ok=True)
    image = f"thawline:{version()}-{flavour}"
    arguments = build_arguments(flavour, base or BASE, wheels, certificates)
    builder = ("build", "--isolation", "chroot", "--network", "host", "--format", "docker")

    def build() -> str:
        layers = f"--layers={str(keep and storage_driver() == 'overlay').lower()}"
        buildah(*builder, layers, *arguments, log=WORK / "build.log")
        return image

    table = Table()
    try:
        table.row("resolve gpu", lambda: resolve("gpu"))
        if base is None and BASE not in buildah("images", "--format", "{{.Name}}:{{.Tag}}"):
            table.row("base", make_base)
        if table.row("build", build):
            table.row("config", lambda: check_config(image, arguments))
            with container_of(image) as (container, root):
                table.row("files", lambda: check_files(root))
                run_stages(table, container, root)
                table.row("size", lambda: check_size(root, flavour))
    finally:
        if not keep:
            remove_store()
    print(f"{table.failures} failed; logs in {WORK.relative_to(ROOT)}")
    return int(table.failures > 0)
