"""Self-influence: does the network read labels off rows that their own examples have written?"""

from __future__ import annotations

from thawline.config import Config
from thawline.data.manifest import TIERS
from thawline.study.experiments import parts
from thawline.study.experiments.base import (
    Changes,
    Experiment,
    Section,
    arms_of,
    changed,
    recipes_reach_tables,
)
from thawline.study.experiments.rates import AT_HIGH, rates_of
from thawline.study.experiments.reading import Reading, each, pairs, said
from thawline.study.statistics import Paired

EPOCHS = 3
"""The table trains in the first third, which is the first epoch."""
SHOWN = ("replay", "fresh")
FROZEN = "frozen"
COST = "cost of replayed labels"


def first(rate: str = "") -> str:
    """Name, without what is shown, of the arms whose table trains first."""
    return f"train-first{rate}"


def arm_name(recipe: str, shown: str) -> str:
    """Of the arm with a recipe (`first`, `FROZEN`) whose later epochs replay or show others."""
    return f"{recipe}, {shown}"


def cost_weights(rate: str = "") -> dict[str, float]:
    """Weights of the arms: what replay costs where the rows were written, less where not.

    Above 0 for a figure of which more is better, rows that remember cost something.
    """
    return {
        arm_name(first(rate), "fresh"): 1.0,
        arm_name(first(rate), "replay"): -1.0,
        arm_name(FROZEN, "fresh"): -1.0,
        arm_name(FROZEN, "replay"): 1.0,
    }


def _lay_out(config: Config) -> Config:
    shared: Changes = {"finetune.epochs": EPOCHS}
    arms: dict[str, Changes] = {}
    against, contrasts = {}, {}
    for rate, keys in rates_of(config).items():
        for shown in SHOWN:
            own = {"finetune.recipe": "train-first", "finetune.examples": shown}
            arms[arm_name(first(rate), shown)] = own | dict(keys)
        against[arm_name(first(rate), "replay")] = arm_name(first(rate), "fresh")
        contrasts[f"{COST}{rate}"] = cost_weights(rate)
    for shown in SHOWN:
        arms[arm_name(FROZEN, shown)] = {"finetune.recipe": FROZEN, "finetune.examples": shown}
    against[arm_name(FROZEN, "replay")] = arm_name(FROZEN, "fresh")
    return arms_of(
        changed(config, shared),
        arms,
        baseline=arm_name(FROZEN, "fresh"),
        against=against,
        contrasts=contrasts,
    )


def _sections(one: Reading) -> list[Section]:
    metric = one.facts["metric"]
    rates = [rate for rate in ("", AT_HIGH) if arm_name(first(rate), "replay") in one.arms]
    words = []
    for rate in rates:
        cost = pairs(one.sum_of(cost_weights(rate)))
        tail = pairs(one.sum_of(cost_weights(rate), "tail"))
        words.append(
            f"What replay costs{rate} because the rows were written by the same examples: "
            f"{said(cost, metric, contrast=True)} pooled, "
            f"{said(tail, metric, contrast=True)} on tail items."
        )
    words += [
        f"Replay against fresh examples, whatever the rows know: "
        f"{said(one.difference(arm_name(FROZEN, 'replay'), arm_name(FROZEN, 'fresh')), metric)} "
        "with a frozen table.",
        "Every arm takes the same steps, and both arms of a pair write the same rows in their "
        "first epoch. In the fresh arm, items that first come up later have rows that never "
        "trained, which hides some of the cost.",
    ]
    columns = [
        f"cost in {one.figure}",
        *(f"{part}{rate}" for rate in rates for part in (COST, "replay minus fresh")),
        "replay minus fresh, frozen",
    ]
    rows = [
        [
            piece,
            *(
                text
                for rate in rates
                for text in (
                    parts.mean_sd(pairs(one.sum_of(cost_weights(rate), piece))),
                    parts.mean_sd(_replay(one, first(rate), piece)),
                )
            ),
            parts.mean_sd(_replay(one, FROZEN, piece)),
        ]
        for piece in one.slices
    ]
    drift = [
        [
            f"train-first{rate}",
            *(parts.drift(one, arm_name(first(rate), "replay"), tier) for tier in TIERS),
        ]
        for rate in rates
    ]
    plots = parts.beside(
        *(
            parts.dots(
                {piece: pairs(one.sum_of(cost_weights(rate), piece)) for piece in one.slices},
                f"{COST}{rate}",
            )
            for rate in rates
        )
    )
    return [
        Section(
            "Labels that are read back",
            words,
            plots + parts.table(columns, rows) + parts.table(["drift of item rows", *TIERS], drift),
        )
    ]


def _replay(one: Reading, recipe: str, piece: str) -> Paired | None:
    return one.difference(arm_name(recipe, "replay"), arm_name(recipe, "fresh"), piece)


SELF_INFLUENCE = Experiment(
    name="self-influence",
    title="Rows that remember their examples",
    question="Does the network learn to read an example's label off the rows that the example "
    "wrote? The tables train in the first of three epochs and are frozen then; the later epochs "
    "replay the same third of the requests, or show others. The same difference with a table that "
    "never trained is taken off.",
    reported=(
        "The reproduction, at its high table learning rate: the difference of differences is "
        "+0.51 \N{PLUS-MINUS SIGN} 0.16 AUC points and +1.91 on tail items, with three seeds that "
        "agree.",
        "The reproduction, at its default rate: \N{MINUS SIGN}0.04 \N{PLUS-MINUS SIGN} 0.13, which "
        "is nothing: it takes a large write and a replay.",
        "The article holds that the table memorises repeated examples; it does not part that from "
        "other costs of repeating.",
    ),
    lay_out=_lay_out,
    needs=recipes_reach_tables,
    page=each(_sections),
)
