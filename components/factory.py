"""How a stage's function becomes a Kubeflow component."""

import os
from collections.abc import Callable
from typing import Any

from kfp import dsl

from thawline import __version__

IMAGE = os.environ.get("THAWLINE_IMAGE") or f"thawline:{__version__}-cpu"
"""Image of every component; THAWLINE_IMAGE replaces it when a pipeline is compiled."""
GPU_IMAGE = os.environ.get("THAWLINE_GPU_IMAGE") or f"thawline:{__version__}-gpu"
"""Image of the components that a profile gives a GPU; THAWLINE_GPU_IMAGE replaces it."""


def component(function: Callable[..., Any]) -> Any:
    """Makes a lightweight component that runs in our image and installs nothing when it starts.

    The image holds Thawline and kfp, so neither is fetched by each pod.
    """
    return dsl.component(
        function, base_image=IMAGE, packages_to_install=[], install_kfp_package=False
    )
