"""What a profile names in a cluster, by name: secrets, config maps, pull secrets, claims.

Of a secret the names of its keys are looked at, never what they hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from thawline.errors import ClusterError
from thawline.stages.doctor.findings import Look, Skipped

NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
RUNS = "kubeflow"
"""Where runs are on an installation without users."""
SECONDS = (5, 10)
"""For a connection, and for an answer."""
PULL_TYPES = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")


@dataclass(frozen=True)
class Needs:
    """Names that a cluster has to hold for a profile."""

    secrets: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Their keys by name."""
    config_maps: Mapping[str, Sequence[str]] = field(default_factory=dict)
    image_pull_secrets: Sequence[str] = ()
    claims: Sequence[str] = ()


class Namespace:
    """A namespace of the cluster that a pod is in, or that a kubeconfig names."""

    def __init__(self, name: str = "") -> None:
        """Calls nothing yet; an empty name is that of the pod or of the kubeconfig's context."""
        self._name = name
        self._unreached = False

    def version(self) -> str:
        """Where the cluster is, and its version."""
        core, name = self._reached
        return f"{core.api_client.configuration.host}, namespace {name}"

    def secret(self, name: str, keys: Sequence[str]) -> str:
        """Whether a secret has its keys."""
        found = self._read("secret", name, _create("secret generic", name, keys))
        return _with_keys("secret", name, set(found.data or {}), keys)

    def config_map(self, name: str, keys: Sequence[str]) -> str:
        """Whether a config map has its keys."""
        found = self._read("config_map", name, _create("configmap", name, keys))
        return _with_keys(
            "config map", name, {*(found.data or {}), *(found.binary_data or {})}, keys
        )

    def pull_secret(self, name: str) -> str:
        """Whether a secret is one that images are pulled with."""
        remedy = (
            f"kubectl create secret docker-registry {name} --docker-server=... "
            "--docker-username=... --docker-password=..."
        )
        found = self._read("secret", name, remedy)
        if found.type not in PULL_TYPES:
            raise ClusterError(f"the secret {name} is of the type {found.type}", remedy)
        return f"there, of the type {found.type}"

    def claim(self, name: str) -> str:
        """Whether a claim for a volume is there and has not lost it."""
        remedy = f"create the PersistentVolumeClaim {name} (docs/kubeflow.md)"
        found = self._read("persistent_volume_claim", name, remedy)
        if found.status.phase == "Lost":
            raise ClusterError(f"the claim {name} has lost its volume", remedy)
        return f"{found.status.phase}, {', '.join(found.spec.access_modes or ())}"

    @cached_property
    def _reached(self) -> tuple[Any, str]:
        """The client and the namespace; where there is none, it is asked for once."""
        if self._unreached:
            raise Skipped("there is no cluster to ask, see above")
        self._unreached = True
        reached = self._reach()
        self._unreached = False
        return reached

    def _reach(self) -> tuple[Any, str]:
        try:
            from kubernetes import client, config
            from urllib3 import Retry
            from urllib3.exceptions import HTTPError
        except ImportError as error:
            raise Skipped(f"the kubernetes client is not installed: {error}") from error
        settings = client.Configuration()
        try:
            if NAMESPACE.exists():
                config.load_incluster_config(client_configuration=settings)
                own = NAMESPACE.read_text(encoding="utf-8").strip()
            else:
                config.load_kube_config(client_configuration=settings)
                _, context = config.list_kube_config_contexts()
                own = context["context"].get("namespace", RUNS)
        except (config.ConfigException, OSError) as error:
            raise Skipped(f"no cluster is known here: {error}") from error
        settings.retries = Retry(0)
        core = client.CoreV1Api(client.ApiClient(settings))
        try:
            client.VersionApi(core.api_client).get_code(_request_timeout=SECONDS)
        except client.ApiException:
            # It answers; whether it lets this account in, the names will tell.
            pass
        except (HTTPError, OSError) as error:
            raise Skipped(f"the cluster at {settings.host} does not answer: {error}") from error
        return core, self._name or own

    def _read(self, kind: str, name: str, remedy: str) -> Any:
        core, namespace = self._reached
        from kubernetes import client
        from urllib3.exceptions import HTTPError

        words = kind.replace("_", " ")
        read: Callable[..., Any] = getattr(core, f"read_namespaced_{kind}")
        try:
            return read(name, namespace, _request_timeout=SECONDS)
        except client.ApiException as error:
            if error.status == 404:
                raise ClusterError(
                    f"the namespace {namespace} has no {words} {name}",
                    remedy.replace("kubectl", f"kubectl -n {namespace}", 1),
                ) from error
            if error.status == 403:
                raise Skipped(
                    f"this account may not read the {words} {name} in {namespace}"
                ) from error
            raise ClusterError(
                f"reading the {words} {name}: the cluster answers {error.status}: {_words(error)}",
                "log in to the cluster again"
                if error.status == 401
                else "look at the cluster and try again",
            ) from error
        except (HTTPError, OSError) as error:
            raise ClusterError(
                f"reading the {words} {name}: the cluster does not answer: {error}",
                "check the network and the API server and try again",
            ) from error


def looks(needs: Needs, namespace: str) -> list[Look]:
    """A look at the cluster and one at each name."""
    cluster = Namespace(namespace)
    found = [("cluster", cluster.version)]
    found += [
        (f"secret {name}", partial(cluster.secret, name, keys))
        for name, keys in needs.secrets.items()
    ]
    found += [
        (f"config map {name}", partial(cluster.config_map, name, keys))
        for name, keys in needs.config_maps.items()
    ]
    found += [
        (f"image pull secret {name}", partial(cluster.pull_secret, name))
        for name in needs.image_pull_secrets
    ]
    found += [(f"claim {name}", partial(cluster.claim, name)) for name in needs.claims]
    return [Look(name, function) for name, function in found]


def _with_keys(kind: str, name: str, there: set[str], keys: Sequence[str]) -> str:
    missing = [key for key in keys if key not in there]
    if missing:
        raise ClusterError(
            f"the {kind} {name} has no key {', '.join(missing)}",
            f"add it: kubectl edit {kind.replace(' ', '')} {name}",
        )
    return f"there, with {', '.join(keys) or 'no keys asked for'}"


def _create(kind: str, name: str, keys: Sequence[str]) -> str:
    literals = " ".join(f"--from-literal={key}=..." for key in keys)
    return f"kubectl create {kind} {name} {literals}".rstrip()


def _words(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)
