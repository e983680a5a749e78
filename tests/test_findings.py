from typing import Any

from thawline.evaluation.findings import across_epochs, chance, findings, summary, trivial


def tree(
    pooled: float | None,
    *,
    oracle: float | None = None,
    widths: dict[str, float] | None = None,
    requests: int = 100,
    scorers: dict[str, float | None] | None = None,
    **tiers: float | None,
) -> dict[str, Any]:
    """A metrics tree that holds AUCs of `save`; tiers that are not named are undefined.

    `widths` are those of the intervals, by slice.
    """
    names = ("head", "torso", "tail", "cold")
    ends = {
        name: {"save": {"auc": [0.5 - width / 2, 0.5 + width / 2]}}
        for name, width in (widths or {}).items()
    }
    return {
        "requests": requests,
        "intervals": widths and {"pooled": ends.pop("pooled", None), "tiers": ends},
        "pooled": {"save": {"auc": pooled}},
        "tiers": {name: {"save": {"auc": tiers.get(name)}} for name in names},
        "oracle": None if oracle is None else {"save": {"auc": oracle}},
        "trivial": scorers or {},
    }


def epochs(*trees: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"metrics": {"next": item}} for item in trees]


def texts(found: list[Any]) -> list[str]:
    return [item.text for item in found]


def test_pooled_up_while_a_warm_tier_falls_is_called_out() -> None:
    found = across_epochs(
        epochs(
            tree(0.70, head=0.75, torso=0.72, cold=0.50),
            tree(0.71, head=0.76, torso=0.69, cold=0.60),
        )
    )
    assert found[0].level == "warning"
    assert found[0].text == (
        "On next, from epoch 1 to 2, pooled save AUC rose from 0.7000 to 0.7100 while torso fell "
        "from 0.7200 to 0.6900: pooled and warm items point in opposite directions, so judge by "
        "the tiers."
    )


def test_pooled_down_while_warm_tiers_rise_is_called_out() -> None:
    found = across_epochs(epochs(tree(0.71, head=0.70, tail=0.6), tree(0.70, head=0.75, tail=0.65)))
    assert "pooled save AUC fell" in found[0].text
    assert "while head rose from 0.7000 to 0.7500 and tail rose" in found[0].text


def test_cold_items_alone_do_not_make_a_disagreement() -> None:
    assert (
        across_epochs(epochs(tree(0.70, head=0.7, cold=0.6), tree(0.72, head=0.72, cold=0.5))) == []
    )


def test_changes_below_the_least_one_are_not_spoken_of() -> None:
    assert across_epochs(epochs(tree(0.7000, head=0.7), tree(0.7019, head=0.6981))) == []


def test_the_widest_of_several_disagreements_is_told_once() -> None:
    found = across_epochs(
        epochs(tree(0.70, head=0.80), tree(0.71, head=0.79), tree(0.75, head=0.70))
    )
    told = [text for text in texts(found) if "opposite" in text]
    assert len(told) == 1
    assert "from epoch 1 to 3" in told[0]


def test_a_disagreement_within_the_noise_is_a_note_that_says_so() -> None:
    trees = [tree(0.70, head=0.75, tail=0.6), tree(0.71, head=0.74, tail=0.5)]
    # Epochs were scored on a quarter of the requests, so their intervals are twice as wide.
    final = tree(0.71, widths={"pooled": 0.008, "head": 0.02, "tail": 0.02}, requests=400)
    (found, fallen) = across_epochs(epochs(*trees), {"next": final})
    assert found.level == "warning"
    assert "noise" not in found.text
    assert fallen.level == "note"
    assert "noise" not in fallen.text
    wide = tree(0.71, widths={"pooled": 0.012, "head": 0.02, "tail": 0.02}, requests=400)
    (found, _) = across_epochs(epochs(*trees), {"next": wide})
    assert found.level == "note"
    assert found.text.endswith(
        "This may be noise: the 95 % intervals after an epoch are pooled \N{PLUS-MINUS SIGN}0.0120 "
        "and head \N{PLUS-MINUS SIGN}0.0200."
    )


def test_a_decline_is_noise_where_every_slice_that_fell_is_within_it() -> None:
    trees = [tree(0.74, tail=0.6), tree(0.72, tail=0.5)]
    some = tree(0.72, widths={"pooled": 0.06, "tail": 0.06})
    (found,) = across_epochs(epochs(*trees), {"next": some})
    assert found.level == "warning"
    both = tree(0.72, widths={"pooled": 0.06, "tail": 0.22})
    (found,) = across_epochs(epochs(*trees), {"next": both})
    assert found.level == "note"
    assert "may be noise" in found.text


def test_a_decline_names_the_best_epoch() -> None:
    found = across_epochs(epochs(tree(0.70), tree(0.74), tree(0.72)))
    assert texts(found) == [
        "On next, save AUC ended below its best: pooled 0.7200 (best 0.7400 after epoch 2)."
    ]


def test_undefined_figures_and_unscored_epochs_are_passed_over() -> None:
    assert across_epochs([]) == []
    assert across_epochs([{"metrics": {}}, {"metrics": {"next": tree(None, head=0.7)}}]) == []
    assert findings({"next": tree(None)}, epochs(tree(None), tree(0.7)), sampled=True) == []


def test_a_trivial_scorer_far_from_chance_warns_where_negatives_are_sampled() -> None:
    item = tree(0.9, scorers={"never_trained": 0.38, "item_age": 0.54, "as_of_popularity": None})
    found = trivial("next", item, sampled=True)
    assert len(found) == 1
    assert "the AUC of never_trained (0.3800) is more than 0.05 from 0.5" in found[0].text
    assert "negatives.popularity" in found[0].text


def test_a_trivial_scorer_may_know_something_about_impressions() -> None:
    assert trivial("next", tree(0.9, scorers={"as_of_popularity": 0.7}), sampled=False) == []


def test_a_model_that_a_trivial_scorer_beats_is_called_out() -> None:
    one = trivial("next", tree(0.65, scorers={"item_age": 0.3}), sampled=False)
    two = trivial(
        "next", tree(0.55, scorers={"item_age": 0.4, "as_of_popularity": 0.6}), sampled=False
    )

    assert texts(one) == [
        "On next, item_age (0.3000) tells positives from negatives better than the model (0.6500): "
        "farther from 0.5, whichever way."
    ]
    assert "item_age (0.4000) and as_of_popularity (0.6000) tell positives" in two[0].text


def test_a_trivial_scorer_within_the_noise_of_chance_beats_nothing() -> None:
    scorers = {"never_trained": 0.49, "as_of_popularity": 0.55}
    wide = tree(0.505, scorers=scorers, widths={"pooled": 0.06})
    (found,) = trivial("next", wide, sampled=False)
    assert "as_of_popularity (0.5500) tells" in found.text
    assert "never_trained" not in found.text


def test_an_auc_that_cannot_be_told_from_chance_warns() -> None:
    def with_ends(low: float, high: float) -> dict[str, Any]:
        item = tree(0.52, widths={"pooled": 0.1})
        item["intervals"]["pooled"]["save"]["auc"] = [low, high]
        return item

    assert texts(chance("next", with_ends(0.48, 0.56))) == [
        "On next, the save AUC (0.5200) cannot be told from chance: "
        "its 95 % interval is 0.4800 to 0.5600."
    ]
    (below,) = findings({"next": with_ends(0.40, 0.49)}, [], sampled=False)
    assert (below.level, "worse than chance" in below.text) == ("warning", True)
    assert chance("next", with_ends(0.51, 0.53)) == []
    assert chance("next", tree(0.52)) == []


def test_the_summary_sets_the_auc_beside_the_oracle() -> None:
    found = summary(
        {"next": tree(0.7, oracle=0.75), "other": tree(None)},
        3,
        recipe="co-train",
        data_version="abc",
    )
    assert found == [
        "Fine-tuned with the recipe co-train for 3 epochs on data version abc.",
        "On next (the days after training) the pooled save AUC is 0.7000, 0.0500 below the "
        "oracle's 0.7500.",
        "On other the pooled save AUC is undefined.",
    ]
