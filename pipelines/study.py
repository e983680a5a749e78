"""The study pipeline: recipes (or any grid of configs) x seeds, collected into one report."""

from typing import Any

from kfp import dsl

from components import arms, design, finish, gather, pretrain, study, trial, windows
from pipelines.bind import bind, pipeline_settings
from pipelines.profiles import Profile, load_profile
from pipelines.retrain import EXAMPLE_CONFIG

NAME = "thawline-study"
EXAMPLE_GRID = "finetune.recipe=co-train,frozen,freeze-until-last"


def build(profile: Profile | None = None) -> Any:
    """The pipeline for a profile; without one, for `local`.

    The trials are a loop within a loop over the distinct pretrainings, so that each gets the table
    that it starts from and no other. Inputs are named as those of `retrain`.
    """
    profile = profile or load_profile("local")
    trials = _trials(profile)

    @dsl.pipeline(name=NAME, pipeline_config=pipeline_settings(profile))
    def study_pipeline(
        config: str = EXAMPLE_CONFIG,
        step1_windows_finetune_days: int = -1,
        step1_windows_pretrain_days: int = -1,
        step2_pretrain: str = "",
        step2_pretrain_epochs: int = -1,
        step3_study_baseline: str = "",
        step3_study_grid: str = EXAMPLE_GRID,
        step3_study_seeds: str = "",
        step4_finetune_epochs: int = -1,
    ) -> None:
        """Sets recipes, or any values of config keys, against each other over several seeds.

        design, windows, pretrain once or for each seed, a trial (fine-tune and evaluate) for each
        arm and seed, and study, which pairs them by seed. Whatever happens, finish closes the
        MLflow runs.

        Args:
            config: The config as YAML text, or as JSON on one line. Whatever the inputs below set
                wins over it.
            step1_windows_finetune_days: Days of the fine-tuning window; -1 leaves it as in the
                config.
            step1_windows_pretrain_days: Days of the pretraining window; -1 leaves it as in the
                config.
            step2_pretrain: once, so that seeds share the pretrained rows, or each-seed; empty
                leaves it as in the config.
            step2_pretrain_epochs: Epochs of pretraining, 0 for a random table; -1 leaves it as in
                the config.
            step3_study_baseline: What arms are compared with, a value of the grid; empty leaves it
                as in the config, where the default is the first arm.
            step3_study_grid: Config keys and their values, with a semicolon between keys; empty
                leaves it as in the config.
            step3_study_seeds: Numbers with commas between them, such as 0,1,2; empty leaves them
                as in the config.
            step4_finetune_epochs: Epochs of fine-tuning; -1 leaves it as in the config.
        """
        closing = finish(config=config)
        with dsl.ExitHandler(closing, name="stages"):
            designed = design(
                config=config,
                windows_finetune_days=step1_windows_finetune_days,
                windows_pretrain_days=step1_windows_pretrain_days,
                pretrain_epochs=step2_pretrain_epochs,
                pretrain=step2_pretrain,
                grid=step3_study_grid,
                seeds=step3_study_seeds,
                baseline=step3_study_baseline,
                finetune_epochs=step4_finetune_epochs,
            )
            resolved = designed.outputs["config"]
            code_version = designed.outputs["code_version"]
            cut = windows(
                config=designed.outputs["windows_config"],
                source_version=designed.outputs["source_version"],
                code_version=code_version,
            )
            trials(
                config=resolved,
                tables=designed.outputs["tables"],
                data_version=cut.outputs["Output"],
                code_version=code_version,
                dataset=cut.outputs["dataset"],
            )
        cut.set_caching_options(True)
        for task in (designed, closing):
            task.set_caching_options(False)
        bind(designed, "start", profile)
        bind(cut, "windows", profile)
        bind(closing, "finish", profile)

    return study_pipeline


def _trials(profile: Profile) -> Any:
    """The trials of a study and their report, as a pipeline within the pipeline.

    In the pipeline itself, kfp's local runner would give a loop its own item in place of each
    output of a task before it; what a pipeline within takes arrives as it is.
    """

    @dsl.pipeline(name="trials")
    def trials(
        config: str,
        tables: list,
        data_version: str,
        code_version: str,
        dataset: dsl.Input[dsl.Dataset],
    ) -> None:
        with dsl.ParallelFor(tables, name="tables") as table:
            pretrained = pretrain(
                config=table,
                data_version=data_version,
                code_version=code_version,
                dataset=dataset,
            )
            listed = arms(config=config, table=table)
            with dsl.ParallelFor(listed.output, name="trials") as which:
                tried = trial(
                    config=config,
                    which=which,
                    data_version=data_version,
                    code_version=code_version,
                    dataset=dataset,
                    table=pretrained.outputs["table"],
                )
            gathered = gather(results=dsl.Collected(tried.outputs["result"]))
        collected = study(config=config, gathered=dsl.Collected(gathered.outputs["gathered"]))
        for task in (pretrained, tried):
            task.set_caching_options(True)
        for task in (listed, gathered, collected):
            task.set_caching_options(False)
        bind(pretrained, "pretrain", profile)
        bind(listed, "start", profile)
        bind(tried, "trial", profile)
        bind(gathered, "start", profile)
        bind(collected, "study", profile)

    return trials
