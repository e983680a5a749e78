"""The manifests under k8s/: rendered, held against Kubernetes' schemas, and against each other."""

import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from kubeflow_spark_api import models as spark
from kubeflow_trainer_api import models as trainer
from kustomize import render

K8S = Path(__file__).parent.parent / "k8s"
PLACES = ["mlflow", "runs", "trainjob", "spark", "overlays/local", "overlays/gpu"]
MODELS = {
    "ClusterTrainingRuntime": trainer.TrainerV1alpha1ClusterTrainingRuntime,
    "SparkApplication": spark.SparkV1beta2SparkApplication,
}
SECRETS = {
    "mlflow-server": {
        "postgres-password",
        "admin-password",
        "flask-secret-key",
        "basic_auth.ini",
    },
    "thawline-object-store": {"access-key", "secret-key"},
    "thawline-mlflow": {"username", "password"},
    "thawline-storage": None,
}
"""The secrets that a person creates, with their keys."""


def newest_versions(count):
    folder = resources.files(kubernetes_validate) / "kubernetes-json-schema"
    names = {re.match(r"v(\d+)\.(\d+)\.", each.name) for each in folder.iterdir()}
    versions = sorted((int(name[1]), int(name[2])) for name in names if name)
    return [f"{major}.{minor}" for major, minor in versions[-count:]]


@pytest.fixture(scope="module")
def rendered():
    return {place: render(K8S / place) for place in PLACES}


def walk(node):
    if isinstance(node, dict):
        yield node
        for each in node.values():
            yield from walk(each)
    elif isinstance(node, list):
        for each in node:
            yield from walk(each)


def pods(manifests):
    """Pairs of a manifest's name and its pod's spec."""
    for manifest in manifests:
        for node in walk(manifest.get("spec", {})):
            if "containers" in node:
                yield manifest["metadata"]["name"], node


def without_hashes(manifests):
    """Manifests by name, with the names of generated config maps cut to what they were given."""
    text = yaml.safe_dump_all(manifests)
    for manifest in manifests:
        name = manifest["metadata"]["name"]
        if manifest["kind"] == "ConfigMap" and re.search(r"-[a-z0-9]{10}$", name):
            text = text.replace(name, name[:-11])
    key = ("kind", "name", "namespace")
    found = list(yaml.safe_load_all(text))
    return {
        tuple(({"kind": each["kind"]} | each["metadata"]).get(k) for k in key): each
        for each in found
    }


@pytest.mark.parametrize("place", PLACES)
def test_our_rendering_is_kubectls(rendered, place):
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: our own rendering is not compared with it")
    made = subprocess.run(
        ["kubectl", "kustomize", str(K8S / place)], capture_output=True, text=True, check=True
    )
    assert without_hashes(list(yaml.safe_load_all(made.stdout))) == without_hashes(rendered[place])


@pytest.mark.parametrize("version", newest_versions(3))
def test_every_manifest_is_strictly_valid(rendered, version):
    seen = 0
    for place in PLACES:
        for manifest in rendered[place]:
            if manifest["kind"] not in MODELS:
                kubernetes_validate.validate(manifest, version, strict=True)
                seen += 1
    assert seen > 40


def test_a_misspelt_field_is_found(rendered):
    (quota,) = [each for each in rendered["overlays/gpu"] if each["kind"] == "ResourceQuota"]
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            quota | {"spec": {"herd": {}}}, newest_versions(1)[0], strict=True
        )


def lost(given, kept, way=""):
    """Paths of what a model did not take over."""
    if isinstance(given, dict):
        for key, value in given.items():
            if key not in kept:
                yield f"{way}.{key}"
            else:
                yield from lost(value, kept[key], f"{way}.{key}")
    elif isinstance(given, list):
        for index, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{way}[{index}]")
    elif given != kept:
        yield f"{way}: {given!r} became {kept!r}"


@pytest.mark.parametrize(
    ("place", "kind"), [("trainjob", "ClusterTrainingRuntime"), ("spark", "SparkApplication")]
)
def test_custom_resources_hold_only_what_their_models_know(rendered, place, kind):
    (manifest,) = [each for each in rendered[place] if each["kind"] == kind]
    assert list(lost(manifest, MODELS[kind].from_dict(manifest).to_dict())) == []
    manifest = manifest | {"spec": manifest["spec"] | {"unheardOf": 1}}
    assert list(lost(manifest, MODELS[kind].from_dict(manifest).to_dict())) == [".spec.unheardOf"]


@pytest.mark.parametrize("place", ["overlays/local", "overlays/gpu"])
def test_pods_run_as_little_as_they_can(rendered, place):
    seen = 0
    for name, pod in pods(rendered[place]):
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["automountServiceAccountToken"] is False, name
        for container in pod["containers"] + pod.get("initContainers", []):
            confined = container["securityContext"]
            assert confined["allowPrivilegeEscalation"] is False, name
            assert confined["capabilities"] == {"drop": ["ALL"]}, name
            assert re.search(r":[^:/]*\d[^:/]*$", container["image"]), container["image"]
            seen += 1
            if name != "thawline-torch":
                assert confined["readOnlyRootFilesystem"] is True, name
                assert "memory" in container["resources"]["requests"], name
                assert "memory" in container["resources"]["limits"], name
    assert seen >= 5


@pytest.mark.parametrize("place", ["overlays/local", "overlays/gpu"])
def test_what_serves_is_probed_and_found_by_its_service(rendered, place):
    manifests = rendered[place]
    serving = [each for each in manifests if each["kind"] in ("Deployment", "StatefulSet")]
    for manifest in serving:
        for container in manifest["spec"]["template"]["spec"]["containers"]:
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    for service in [each for each in manifests if each["kind"] == "Service"]:
        (port,) = service["spec"]["ports"]
        (pod,) = [
            each["spec"]["template"]
            for each in serving
            if each["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        ]
        names = [own["name"] for own in pod["spec"]["containers"][0]["ports"]]
        assert port["targetPort"] in names


@pytest.mark.parametrize("place", ["overlays/local", "overlays/gpu"])
def test_what_a_pod_refers_to_is_there_or_is_a_secret_that_a_person_creates(rendered, place):
    manifests = rendered[place]
    assert [each for each in manifests if each["kind"] == "Secret"] == []
    maps = {
        each["metadata"]["name"]: set(each["data"])
        for each in manifests
        if each["kind"] == "ConfigMap"
    }
    for node in walk(manifests):
        if "configMapKeyRef" in node:
            reference = node["configMapKeyRef"]
            assert reference.get("optional") or reference["key"] in maps[reference["name"]]
        if "secretKeyRef" in node:
            assert node["secretKeyRef"]["key"] in SECRETS[node["secretKeyRef"]["name"]]


def test_the_server_allows_the_address_that_the_runs_call(rendered):
    for place in ("overlays/local", "overlays/gpu"):
        maps = {
            each["metadata"]["name"]: each["data"]
            for each in rendered[place]
            if each["kind"] == "ConfigMap"
        }
        allowed = maps["mlflow-server"]["allowed-hosts"].split(",")
        host = urlsplit(maps["thawline-endpoints"]["mlflow-tracking-uri"])
        # MLflow matches the whole Host header, which holds the port.
        assert f"{host.hostname}:*" in allowed
        assert host.hostname in allowed
        name, namespace = host.hostname.split(".")
        (service,) = [
            each
            for each in rendered[place]
            if each["kind"] == "Service" and each["metadata"]["name"] == name
        ]
        assert service["metadata"]["namespace"] == namespace
        assert host.port == service["spec"]["ports"][0]["port"]


def test_the_profiles_find_their_maps_secrets_and_claim(rendered):
    profile = yaml.safe_load((K8S.parent / "pipelines/profiles/cpu.yaml").read_text())
    maps = {
        each["metadata"]["name"]: set(each["data"])
        for each in rendered["runs"]
        if each["kind"] == "ConfigMap"
    }
    for name, keys in profile["config_maps"].items():
        assert set(keys) <= maps[name]
    for name, keys in profile["secrets"].items():
        assert set(keys) <= SECRETS[name]
    claims = [
        e["metadata"]["name"] for e in rendered["runs"] if e["kind"] == "PersistentVolumeClaim"
    ]
    assert claims == [profile["work"]["claim"]]


def test_runs_may_do_no_more_than_their_tasks_take(rendered):
    (role,) = [each for each in rendered["runs"] if each["kind"] == "Role"]
    for rule in role["rules"]:
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
        if {"secrets", "configmaps"} & set(rule["resources"]):
            assert rule["resourceNames"]
    may = {(r, verb) for rule in role["rules"] for r in rule["resources"] for verb in rule["verbs"]}
    assert {("trainjobs", verb) for verb in ("create", "get", "list", "delete")} <= may
    assert {("pods", "list"), ("pods/log", "get")} <= may


def test_the_guide_creates_every_secret_with_its_keys():
    guide = (K8S.parent / "docs/cluster.md").read_text(encoding="utf-8")
    for name, keys in SECRETS.items():
        if keys is None:
            continue
        (command,) = re.findall(rf"create secret generic {name} (?:.*\\\n)*.*", guide)[:1]
        for key in keys:
            assert f"{key}=" in command, f"{name}: {key}"
