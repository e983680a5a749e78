"""The retraining pipeline: from a click log to a registered model."""

from typing import Any

from kfp import dsl

from components import evaluate, finetune, finish, pretrain, register, start, windows
from pipelines.bind import bind, pipeline_settings, trainjob_text
from pipelines.profiles import Profile, load_profile

NAME = "thawline-retrain"
EXAMPLE_CONFIG = "simulate: {}"
"""The embedded example. On one line: kfp 2.17 writes a longer default to a file that is no YAML."""


def build(profile: Profile | None = None) -> Any:
    """The pipeline for a profile; without one, for `local`.

    Kubeflow sorts a pipeline's inputs by name wherever it shows them, so each name starts with the
    number of its step. An input left as it is changes nothing in the config.

    MLflow's parent run is no input of the stages: it differs in each run, so that nothing would
    ever come from the cache. The stages and the exit task, which may take no output of another
    task, find it by the id of the Kubeflow run, which they read from the environment.
    """
    profile = profile or load_profile("local")

    @dsl.pipeline(name=NAME, pipeline_config=pipeline_settings(profile))
    def retrain(
        config: str = EXAMPLE_CONFIG,
        seed: int = -1,
        step0_start_from_champion: bool = False,
        step1_windows_finetune_days: int = -1,
        step1_windows_pretrain_days: int = -1,
        step2_pretrain_epochs: int = -1,
        step3_finetune_epochs: int = -1,
        step3_finetune_recipe: str = "",
        step4_gate_min_auc: float = -1.0,
        step5_register_model_name: str = "",
    ) -> None:
        """Retrains a recommender from a click log and registers it if it passes the gate.

        start, windows, pretrain, finetune, evaluate, and where the gate is passed, register.
        Whatever happens, finish closes the MLflow runs.

        Args:
            config: The config as YAML text, or as JSON on one line, since the UI's form has no line
                breaks. Whatever the inputs below set wins over it.
            seed: Seed of everything random; -1 leaves it as in the config.
            step0_start_from_champion: Goes on from the registered champion: its catalog is
                extended and pretraining starts from its rows. While there is none, everything
                starts anew. false leaves it as in the config.
            step1_windows_finetune_days: Days of the fine-tuning window; -1 leaves it as in the
                config.
            step1_windows_pretrain_days: Days of the pretraining window; -1 leaves it as in the
                config.
            step2_pretrain_epochs: Epochs of pretraining, 0 for a random table; -1 leaves it as in
                the config.
            step3_finetune_epochs: Epochs of fine-tuning; -1 leaves it as in the config.
            step3_finetune_recipe: When the table trains: co-train, frozen, freeze-until-last,
                train-first or window(start, length); empty leaves it as in the config.
            step4_gate_min_auc: Least AUC of the primary action; -1 leaves it as in the config.
            step5_register_model_name: Name in the model registry; empty leaves it as in the
                config.
        """
        closing = finish(config=config)
        with dsl.ExitHandler(closing, name="stages"):
            started = start(
                config=config,
                seed=seed,
                start_from_champion=step0_start_from_champion,
                windows_finetune_days=step1_windows_finetune_days,
                windows_pretrain_days=step1_windows_pretrain_days,
                pretrain_epochs=step2_pretrain_epochs,
                finetune_recipe=step3_finetune_recipe,
                finetune_epochs=step3_finetune_epochs,
                gate_min_auc=step4_gate_min_auc,
                register_model_name=step5_register_model_name,
            )
            resolved = started.outputs["config"]
            code_version = started.outputs["code_version"]
            cut = windows(
                config=started.outputs["windows_config"],
                source_version=started.outputs["source_version"],
                code_version=code_version,
            )
            pretrained = pretrain(
                config=started.outputs["pretrain_config"],
                data_version=cut.outputs["Output"],
                code_version=code_version,
                dataset=cut.outputs["dataset"],
            )
            finetuned = finetune(
                config=started.outputs["finetune_config"],
                data_version=cut.outputs["Output"],
                code_version=code_version,
                dataset=cut.outputs["dataset"],
                table=pretrained.outputs["table"],
                trainjob=trainjob_text(profile),
            )
            evaluated = evaluate(
                config=resolved,
                dataset=cut.outputs["dataset"],
                model=finetuned.outputs["model"],
            )
            # kfp's local runner resolves a condition on an output only where it is called Output.
            with dsl.If(evaluated.outputs["Output"] == True, name="passed"):  # noqa: E712
                registered = register(
                    config=resolved,
                    model=finetuned.outputs["model"],
                    evaluation=evaluated.outputs["evaluation"],
                )
        for task in (cut, pretrained, finetuned):
            task.set_caching_options(True)
        for task in (started, evaluated, registered, closing):
            task.set_caching_options(False)
        bind(started, "start", profile)
        bind(cut, "windows", profile)
        bind(pretrained, "pretrain", profile)
        bind(finetuned, "finetune", profile)
        bind(evaluated, "evaluate", profile)
        bind(registered, "register", profile)
        bind(closing, "finish", profile)

    return retrain
