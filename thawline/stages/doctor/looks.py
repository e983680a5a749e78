"""The table of what is looked at."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from thawline.config import Config
from thawline.stages.doctor import cluster, machine, servers, storage
from thawline.stages.doctor.cluster import Needs
from thawline.stages.doctor.findings import Look, Skipped
from thawline.stages.task import WORK_VARIABLE

SLOW_STORE = "see whether the store answers at all: a firewall or a wrong endpoint drops packets"
SLOW_SERVER = "look at the server's log and load; a firewall may drop packets to it"


def looks(
    config: Config,
    needs: Needs | None = None,
    *,
    namespace: str = "",
    written: Sequence[str] = (),
) -> list[Look]:
    """Everything that a run with this config needs.

    Args:
        config: Names folders, logs, servers and devices.
        needs: What the profile names in the cluster. None: no profile was named.
        namespace: Of the runs. Empty: the pod's, or that of the kubeconfig's context.
        written: Folders or URLs beside the config's own that stages will write to.
    """
    return [
        Look("python", machine.python),
        Look("packages", machine.packages),
        Look("torch", machine.torch_works, 120.0),
        Look("engine", partial(machine.engine, config), machine.ENGINE_SECONDS + 10),
        Look("gpu", partial(machine.gpu, config), 120.0, "check the driver: `nvidia-smi`"),
        *_storage(config, written),
        Look("mlflow", partial(servers.mlflow, config), 180.0, SLOW_SERVER),
        Look("kubeflow", servers.kubeflow, 20.0, SLOW_SERVER),
        *(cluster.looks(needs, namespace) if needs else [Look("cluster", _no_profile)]),
        Look("clock", partial(servers.clock, config), 30.0, SLOW_SERVER),
    ]


def _storage(config: Config, written: Sequence[str]) -> list[Look]:
    from thawline.data.storage import is_remote

    events, items = config.events, config.items
    folders = {
        "workdir": config.workdir,
        "finetune.checkpoint.folder": config.finetune.checkpoint.folder,
        WORK_VARIABLE: os.environ.get(WORK_VARIABLE),
    }
    folders |= {f"--write {each}": each for each in written}
    found = []
    for key, place in folders.items():
        if place and is_remote(place):
            found.append(Look(key, partial(storage.url, place), 60.0, SLOW_STORE))
        elif place:
            found.append(Look(key, partial(storage.folder, place, key), 30.0, SLOW_STORE))
    read = {"events.path": events.path, "events.truth": events.truth, "items.path": items.path}
    for key, value in read.items():
        places = [value] if isinstance(value, str) else value or []
        found += [
            Look(key, partial(storage.inputs, each, key), 60.0, SLOW_STORE) for each in places
        ]
    return found


def _no_profile() -> str:
    raise Skipped("no profile is named: --profile cpu looks for what it names in the cluster")
