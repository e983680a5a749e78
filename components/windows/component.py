"""Cuts the log into a dataset: requests, pretraining sequences and the catalog."""

from kfp import dsl

from components.factory import component


@component
def windows(
    config: str,
    source_version: str,
    code_version: str,
    dataset: dsl.Output[dsl.Dataset],
) -> str:
    """Cuts the log into a dataset: requests, pretraining sequences and the catalog.

    Args:
        config: The resolved config, as YAML text: `windows_config` of `start`.
        source_version: What the log holds; not read, it keeps a cached dataset of an older log
            from being taken.
        code_version: What the stages run; not read, it is part of the cache's key.

    Returns:
        dataset: The dataset folder, with `manifest.json`.
        Output: The dataset's `data_version`: a hash of the log and the config it was cut by.
    """
    from thawline.config import parse_config
    from thawline.stages import windows as stage
    from thawline.stages.facts import size_of
    from thawline.tracking import pipeline

    parsed = parse_config(config)
    manifest = stage.run(parsed, dataset.path, parent_run_id=pipeline.find_parent(parsed))
    dataset.metadata["data_version"] = manifest.data_version
    dataset.metadata["actions"] = ", ".join(manifest.actions)
    dataset.metadata["items"] = manifest.num_items
    for split, count in manifest.requests.items():
        dataset.metadata[f"requests_{split}"] = count
    dataset.metadata["sequences"] = manifest.sequences["train"]
    for window in ("pretrain", "finetune", "test"):
        days = getattr(manifest, window)
        dataset.metadata[f"{window}_days"] = f"{days.start} to {days.end}"
    dataset.metadata["rejected"] = sum(manifest.rejected.values())
    dataset.metadata.update(size_of(dataset.path))
    return manifest.data_version
