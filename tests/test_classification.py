from thawline.evaluation.classification import classify

ROC = {"fpr": [0.0, 0.1, 0.3, 1.0], "tpr": [0.0, 0.4, 0.8, 1.0], "threshold": [1, 0.6, 0.2, 0.1]}


def tree(roc, positives=10):
    return {
        "pooled": {"save": {"positives": positives, "candidates": 50}, "click": {}},
        "curves": {"save": {"roc": roc}},
    }


def test_counts_are_taken_where_as_many_are_called_positive_as_are():
    # Above 0.6 are 4 of 10 positives and 4 of 40 others, 8 in all; above 0.2 are 20.
    found = classify(tree(ROC))
    assert (found.action, found.chosen) == ("save", 0.6)
    assert found.confusion == [[36, 4], [6, 4]]
    # Of 30 positives, 24 are above 0.2, with 6 of 20 others.
    assert classify(tree(ROC, positives=30)).confusion == [[14, 6], [6, 24]]


def test_without_a_curve_there_is_nothing_to_count():
    assert classify(tree(None)) is None
    assert classify({"pooled": {}}) is None
    assert classify({"pooled": {"save": {}}}) is None
