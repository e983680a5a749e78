"""What `kubectl kustomize` makes of our own kustomizations, for machines without kubectl.

It knows the fields that they use and refuses others. `test_manifests.py` compares it with kubectl
where there is one. Names of config maps carry no hash here.
"""

import copy
from pathlib import Path

import yaml

CLUSTER_WIDE = {"Namespace", "ClusterTrainingRuntime"}
FIELDS = {
    "apiVersion",
    "kind",
    "namespace",
    "labels",
    "resources",
    "configMapGenerator",
    "generatorOptions",
    "patches",
    "images",
}


def render(folder: Path) -> list[dict]:
    """The manifests of a folder with a kustomization.yaml."""
    made = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    assert set(made) <= FIELDS, f"{folder}: {set(made) - FIELDS}"
    found = []
    for name in made.get("resources", []):
        place = (folder / name).resolve()
        documents = render(place) if place.is_dir() else yaml.safe_load_all(place.read_text())
        found += copy.deepcopy(list(documents))
    for generated in made.get("configMapGenerator", []):
        _generate(found, folder, generated)
    for patch in made.get("patches", []):
        _patch(found, patch)
    for manifest in found:
        _rename_images(manifest, made.get("images", []))
        if "namespace" in made:
            _place(manifest, made["namespace"])
        for labels in made.get("labels", []):
            manifest["metadata"].setdefault("labels", {}).update(labels["pairs"])
    return found


def _generate(found: list[dict], folder: Path, generated: dict) -> None:
    data = dict(line.split("=", 1) for line in generated.get("literals", []))
    for file in generated.get("files", []):
        key, _, path = file.rpartition("=")
        data[key or path] = (folder / path).read_text(encoding="utf-8")
    if generated.get("behavior") == "merge":
        (old,) = _matching(found, {"kind": "ConfigMap", "name": generated["name"]})
        old["data"].update(data)
        return
    metadata = {"name": generated["name"]}
    found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def _patch(found: list[dict], patch: dict) -> None:
    targets = _matching(found, patch["target"])
    assert targets, f"a patch of {patch['target']} finds nothing"
    for manifest in targets:
        for step in yaml.safe_load(patch["patch"]):
            assert step["op"] == "replace"
            *way, last = (part.replace("~1", "/") for part in step["path"].split("/")[1:])
            place = manifest
            for part in way:
                place = place[_key(place, part)]
            key = _key(place, last)
            assert isinstance(place, list) or key in place, f"{step['path']} is not there"
            place[key] = step["value"]


def _key(place: dict | list, part: str) -> str | int:
    return int(part) if isinstance(place, list) else part


def _matching(found: list[dict], target: dict) -> list[dict]:
    return [
        each
        for each in found
        if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])
    ]


def _place(manifest: dict, namespace: str) -> None:
    if manifest["kind"] == "Namespace":
        manifest["metadata"]["name"] = namespace
    elif manifest["kind"] not in CLUSTER_WIDE:
        manifest["metadata"]["namespace"] = namespace
    for subject in manifest.get("subjects", []):
        subject["namespace"] = namespace


def _rename_images(node: object, images: list[dict]) -> None:
    if isinstance(node, list):
        for each in node:
            _rename_images(each, images)
    elif isinstance(node, dict):
        for image in images:
            if str(node.get("image", "")).partition(":")[0] == image["name"]:
                node["image"] = f"{image['newName']}:{image['newTag']}"
        for each in node.values():
            _rename_images(each, images)
