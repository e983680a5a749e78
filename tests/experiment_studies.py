"""Studies of experiments whose figures a test makes up."""

import re

from thawline.stages.study_report import study_facts
from thawline.study.comparison import compare_arms
from thawline.study.design import Design, dimensions_of
from thawline.study.experiments.reading import readings
from thawline.study.trials import tidy

SLICES = ("pooled", "head", "torso", "tail", "cold")
FIGURES = ("auc", "log_loss", "normalized_entropy", "positive_logit")


def found(experiment, config, value, failed=lambda arm, seed: None, after=None, drift=None):
    """What an experiment would find.

    Args:
        experiment: Is laid out for `config`.
        config: The user's.
        value: Gives a figure from (arm, seed, slice, figure's name).
        failed: The error of a trial from (arm, seed); None: it finished.
        after: Gives the AUC after an epoch, pooled, from (arm, seed, epoch). None: as `value`.
        drift: Gives the drift of item rows from (arm, tier). None: there is none.

    Returns:
        Facts, table and rows, as a page gets them.
    """
    design, results = Design.of(experiment.lay_out(config)), []
    for number, trial in enumerate(design.trials()):
        arm, seed = trial.arm.name, trial.seed
        own = {
            "trial": f"t{number}",
            "arm": arm,
            "seed": seed,
            "round": trial.epochs,
            "values": dict(trial.arm.values),
        }
        if error := failed(arm, seed):
            results.append(own | {"status": "failed", "error": error, "remedy": ""})
            continue
        slices = {
            piece: {"save": {figure: value(arm, seed, piece, figure) for figure in FIGURES}}
            for piece in SLICES
        }
        tree = {"requests": 100, "pooled": slices.pop("pooled"), "tiers": slices}
        epochs = [{"next": tree}] * trial.epochs
        if after is not None:
            epochs = [
                {"next": tree | {"pooled": {"save": {"auc": after(arm, seed, number)}}}}
                for number in range(1, trial.epochs + 1)
            ]
        if drift is not None:
            tiers = {tier: {"item": {"drift": drift(arm, tier)}} for tier in SLICES[1:]}
            training = {"requests": None, "pooled": {}, "tiers": tiers}
            own["training"] = {"epochs": [training] * trial.epochs, "final": training}
        results.append(
            own
            | {
                "status": "finished",
                "seconds": 1.0,
                "exported_epoch": trial.epochs,
                "actions": ["save"],
                "data_version": "v",
                "schedule": None,
                "epochs": epochs,
                "metrics": {"next": tree},
            }
        )
    facts = study_facts(design, results) | {"experiment": experiment.name}
    table = tidy(results, list(dimensions_of(design.study)))
    return facts, table, compare_arms(facts, table)


def reading(study):
    """The only combination of a study's grid."""
    facts, table, _ = study
    (one,) = readings(facts, table)
    return one


def rows_of(section, number=0):
    """The cells of one of a section's tables, by the name of each row."""
    table = re.findall(r"<table>.*?</table>", str(section.html), re.DOTALL)[number]
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</th>(.*?)</tr>", table)
    return {name: re.findall(r"<td>(.*?)</td>", cells) for name, cells in rows}
