import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from components.factory import IMAGE
from thawline import __version__

ROOT = Path(__file__).parents[1]
FLAVOURS = ("cpu", "gpu")
FILES = (*FLAVOURS, "mlflow")
HADOLINT = Path(sys.executable).with_name("hadolint")


def pins(path):
    """Name -> version of a requirements file's pins."""
    lines = (ROOT / path).read_text().splitlines()
    found = (re.match(r"([\w.-]+)==([^\s\\]+)", line) for line in lines)
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def instructions(flavour):
    """The Dockerfile's instructions as `(WORD, rest)`, without comments, each on one line."""
    text = (ROOT / f"docker/{flavour}.Dockerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines()]


def asked_by(name):
    """What an installed package asks for; nothing where the other kind of machine has it."""
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def load(name):
    sys.path.insert(0, str(ROOT / "docker"))
    try:
        spec = importlib.util.spec_from_file_location(name, ROOT / f"docker/{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "docker"))
    return module


@pytest.fixture(scope="module")
def check():
    return load("check")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_pinned_packages_satisfy_pyproject_and_are_those_of_the_constraints(flavour):
    pinned, constraints = pins(f"docker/requirements-{flavour}.txt"), pins("constraints.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras[flavour], *extras["kubeflow"]]
    for requirement in map(Requirement, asked):
        version = pinned.get(canonicalize_name(requirement.name), "")
        assert version, f"{requirement} has no pin: make lock"
        assert requirement.specifier.contains(version), f"{requirement}, pinned {version}"
    common = pinned.keys() & constraints.keys()
    assert len(common) > 100
    assert {name: pinned[name] for name in common} == {name: constraints[name] for name in common}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_pins_hold_all_that_the_installed_packages_ask_for(flavour):
    pinned = pins(f"docker/requirements-{flavour}.txt")
    cuda_build = {"fbgemm-gpu"} if flavour == "cpu" else set()
    missing, seen, left = set(), set(), [("thawline", ("cpu", "kubeflow"))]
    while left:
        name, extras = left.pop()
        for text in asked_by(name):
            requirement = Requirement(text)
            marker, wanted = requirement.marker, canonicalize_name(requirement.name)
            if marker and not any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                continue
            if wanted not in pinned and wanted not in cuda_build:
                missing.add(wanted)
            if (wanted, *requirement.extras) not in seen and wanted != "fbgemm-gpu":
                seen.add((wanted, *requirement.extras))
                left.append((wanted, tuple(requirement.extras)))
    assert len(seen) > 100
    assert missing == ({"fbgemm-gpu-cpu"} if flavour == "gpu" else set())


@pytest.mark.parametrize("name", [*FILES, "build"])
def test_every_pin_has_a_hash_and_no_file_names_an_index(name):
    text = (ROOT / f"docker/requirements-{name}.txt").read_text()
    blocks = re.split(r"\n(?=\S)", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).strip())
    assert len(blocks) == len(pins(f"docker/requirements-{name}.txt"))
    for block in blocks:
        lines = block.split(" \\\n")
        assert re.fullmatch(r"[a-z0-9.-]+(\[[a-z0-9,-]+\])?==\S+( ; .+)?", lines[0]), lines[0]
        assert len(lines) > 1
        assert all(re.fullmatch(r"\s+--hash=sha256:[0-9a-f]{64}", line) for line in lines[1:])


def test_each_image_gets_its_own_build_of_torch_and_fbgemm():
    cpu, gpu = (pins(f"docker/requirements-{flavour}.txt") for flavour in FLAVOURS)
    assert Version(cpu["torch"]).local == "cpu"
    assert Version(gpu["torch"]).local is None
    assert Version(cpu["torch"]).public == gpu["torch"]
    assert "fbgemm-gpu" not in cpu
    assert cpu["fbgemm-gpu-cpu"] == gpu["fbgemm-gpu"]
    assert not [name for name in cpu if name.startswith(("nvidia-", "triton", "cuda-"))]
    common = cpu.keys() & gpu.keys() - {"torch"}
    assert {name: cpu[name] for name in common} == {name: gpu[name] for name in common}


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_base_is_pinned_by_a_dated_tag_and_a_digest(flavour):
    lines = instructions(flavour)
    base = next(rest for word, rest in lines if word == "ARG")
    assert re.fullmatch(r"BASE=debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}", base)
    stages = [rest for word, rest in lines if word == "FROM"]
    assert stages == ["scratch AS wheels", "${BASE} AS build", "${BASE}"]
    assert "latest" not in str(lines)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_last_stage_runs_as_a_numbered_user_and_takes_only_the_environment(flavour):
    lines = instructions(flavour)
    last = lines[max(i for i, (word, _) in enumerate(lines) if word == "FROM") :]
    words = dict(last)
    assert words["USER"] == "1000:0"
    assert words["COPY"] == "--from=build /opt/thawline /opt/thawline"
    assert [word for word, _ in last].count("COPY") == 1
    assert words["ENTRYPOINT"] == '["thawline"]'
    assert words["HEALTHCHECK"].endswith('CMD ["thawline", "--version"]')
    after = [word for word, _ in last[[word for word, _ in last].index("USER") :]]
    assert "RUN" not in after
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", words["LABEL"]))
    assert labels == {"title", "description", "licenses", "version", "revision", "created"}
    assert ("ENV", "THAWLINE_GIT_COMMIT=$GIT_COMMIT") in last


@pytest.mark.parametrize("flavour", FILES)
def test_no_build_argument_or_variable_is_a_secret_or_names_a_host(flavour):
    lines = instructions(flavour)
    assert "ADD" not in {word for word, _ in lines}
    given = " ".join(rest for word, rest in lines if word in ("ARG", "ENV"))
    assert not re.search(r"token|password|secret|index|https?:", given, re.IGNORECASE)


def test_every_package_is_installed_by_hash():
    text = re.sub(r"\\\n\s*", "", (ROOT / "docker/install.sh").read_text())
    installs = [
        line for line in text.splitlines() if re.search(r"pip (install|sync)|uv build", line)
    ]
    assert len(installs) == 4
    for line in installs:
        assert "--require-hashes" in line or "--no-index /wheel/*.whl" in line
    for flavour in FILES:
        runs = [rest for word, rest in instructions(flavour) if word == "RUN"]
        assert not [run for run in runs if re.search(r"\b(pip|uv)\b", run)]


def test_the_images_differ_in_their_packages_and_in_the_driver_that_they_ask_for():
    cpu, gpu = (set(instructions(flavour)) for flavour in FLAVOURS)
    texts = sorted(f"{word} {rest}" for word, rest in cpu ^ gpu)
    assert [text for text in texts if text.startswith("ARG")] == [
        "ARG TORCH_BACKEND=",
        "ARG TORCH_BACKEND=cpu",
    ]
    words = {text.split()[0] for text in texts}
    assert words == {"ARG", "COPY", "ENV", "LABEL", "RUN"}
    assert next(rest for word, rest in gpu - cpu if word == "ENV").endswith(
        "NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    )


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_build_is_sent_what_it_copies_and_nothing_else(flavour):
    sent = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for word, rest in instructions(flavour):
        if word == "COPY" and "--from" not in rest:
            copied |= set(rest.split()[:-1])
    requirements = {source for source in copied if "requirements" in source}
    assert copied - requirements == sent - {"docker/requirements-*.txt"}
    assert all((ROOT / source).exists() for source in copied)


def lint(path):
    return subprocess.run([HADOLINT, path], capture_output=True, text=True, check=False)


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint has no build for this machine")
@pytest.mark.parametrize("flavour", FILES)
def test_hadolint_finds_nothing_in_the_file_and_something_once_it_is_spoilt(flavour, tmp_path):
    path = ROOT / f"docker/{flavour}.Dockerfile"
    done = lint(path)
    assert (done.returncode, done.stdout) == (0, "")
    spoilt = tmp_path / "Dockerfile"
    spoilt.write_text(path.read_text().replace("USER 1000:0", "USER root"))
    assert "DL3002" in lint(spoilt).stdout


def test_the_tag_is_the_image_that_components_ask_for():
    arguments = load("images").build_arguments("cpu", None, None, None)
    tag = arguments[arguments.index("--tag") + 1]
    assert tag == IMAGE == f"thawline:{__version__}-cpu"


def test_the_mlflow_image_is_what_the_manifests_run_and_the_mlflow_that_the_stages_know():
    arguments = load("images").build_arguments("mlflow", None, None, None)
    tag = arguments[arguments.index("--tag") + 1]
    images = set(
        re.findall(
            r"image: (thawline-mlflow:\S+)",
            " ".join(path.read_text() for path in (ROOT / "k8s/mlflow").glob("*.yaml")),
        )
    )
    assert images == {tag} == {f"thawline-mlflow:{__version__}"}
    assert pins("docker/requirements-mlflow.txt")["mlflow"] == pins("constraints.txt")["mlflow"]
    words = dict(instructions("mlflow"))
    assert (words["USER"], words["ENTRYPOINT"]) == ("1000:0", '["mlflow"]')
    assert ("ARG", dict(instructions("cpu")[:1])["ARG"]) == instructions("mlflow")[0]


def test_a_folder_of_wheels_and_certificates_reach_the_build_without_a_trace_in_the_image():
    arguments = load("images").build_arguments("cpu", "mine:1", Path("/w"), Path("/c.crt"))
    assert "wheels=/w" in arguments
    assert "TORCH_BACKEND=" in arguments
    assert "id=certificates,src=/c.crt" in arguments
    assert "BASE=mine:1" in arguments


def test_the_check_finds_a_compiler_an_installer_and_a_key(check, tmp_path):
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/python3").touch()
    assert check.check_files(tmp_path) == "1 files"
    key = tmp_path / "srv" / "id"
    key.parent.mkdir()
    key.write_text("-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n")
    with pytest.raises(check.CheckError, match="secrets: srv/id"):
        check.check_files(tmp_path)
    key.unlink()
    (tmp_path / "site-packages/pip").mkdir(parents=True)
    (tmp_path / "usr/bin/gcc").touch()
    with pytest.raises(check.CheckError, match=r"tools: (usr/bin/gcc|site-packages/pip), \S+"):
        check.check_files(tmp_path)


def test_the_check_finds_a_file_that_a_run_wrote_outside_of_tmp(check, tmp_path):
    begun = time.time() - 1
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/cache").touch()
    assert check.check_untouched(tmp_path, begun) == "nothing outside /tmp"
    (tmp_path / "opt").mkdir()
    (tmp_path / "opt/cache").touch()
    with pytest.raises(check.CheckError, match="opt/cache"):
        check.check_untouched(tmp_path, begun)


def test_the_check_refuses_an_image_over_its_budget(check, tmp_path, monkeypatch):
    (tmp_path / "weights").write_bytes(bytes(3_000_000))
    assert check.check_size(tmp_path, "cpu").startswith("3 MB, packed 0 MB, budget 1,800 MB")
    monkeypatch.setitem(check.BUDGET_MB, "cpu", 2)
    with pytest.raises(check.CheckError, match="3 MB"):
        check.check_size(tmp_path, "cpu")


def test_a_failed_check_is_a_row_and_an_exit_status(check, capsys):
    table = check.Table()
    assert table.row("good", lambda: "fine")
    assert not table.row("bad", lambda: check.run("sh", "-c", "echo why >&2; exit 3"))
    assert table.failures == 1
    good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith("good")
    assert good.endswith("fine")
    assert "FAILED" in bad
    assert bad.endswith("status 3: why")
