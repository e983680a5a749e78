from types import SimpleNamespace

import numpy as np

from thawline.evaluation.slices import MISSING, by_age, by_length, by_value, slicings

HOUR = 3_600_000_000


def test_the_commonest_values_of_a_context_come_first_and_missing_is_named() -> None:
    found = by_value(np.array([2, 0, 2, 3, 2, 0]), [MISSING, "tablet", "phone", "desk"])
    assert found.names == ["phone", MISSING, "desk"]
    assert found.codes.tolist() == [0, 1, 0, 2, 0, 1]
    assert found.by_request


def test_no_more_than_twenty_values_are_slices() -> None:
    codes = np.repeat(np.arange(1, 26), np.arange(25, 0, -1))
    found = by_value(codes, [MISSING, *(f"v{number}" for number in range(1, 26))])
    assert found.names == [f"v{number}" for number in range(1, 21)]
    assert found.codes[codes == 20].tolist() == [19] * 6
    assert set(found.codes[codes > 20].tolist()) == {-1}


def test_histories_are_cut_by_their_length() -> None:
    found = by_length(np.array([0, 4, 1, 19, 10, 500, 200]))
    assert found.names == ["0", "1 to 4", "10 to 19", "200 and more"]
    assert found.codes.tolist() == [0, 1, 1, 2, 2, 3, 3]


def test_items_are_cut_by_their_age_at_the_request() -> None:
    # Rows 2 and 3 were first seen at hours 0 and 99; row 1 is not in the catalog.
    found = by_age(
        np.array([2, 3, 2, 3, 1]),
        np.array([24, 99, 100, 100, 100]) * HOUR,
        np.array([0, 99]) * HOUR,
    )
    assert found.names == ["under 1 h", "1 h to 1 d", "1 d to 7 d"]
    assert found.codes.tolist() == [2, 0, 2, 1, -1]
    assert not found.by_request


def test_every_kind_of_slice_is_made_of_a_hold_out() -> None:
    day = 24 * HOUR
    scored = SimpleNamespace(
        context=np.array([[1, 0], [2, 1]]),
        day=np.array([0, day]).astype("datetime64[us]").astype("datetime64[D]"),
        history_length=np.array([3, 0]),
        row=np.array([2, 2, 2]),
        candidate_timestamp=np.array([0, 0, day]),
    )
    catalog = SimpleNamespace(first_seen=np.array([0]))
    found = slicings(scored, {"device": ["phone", "desk"], "page": ["home"]}, catalog)
    assert {kind: one.names for kind, one in found.items()} == {
        "context.device": ["phone", "desk"],
        "context.page": [MISSING, "home"],
        "day": ["1970-01-01", "1970-01-02"],
        "history_length": ["0", "1 to 4"],
        "item_age": ["under 1 h", "1 d to 7 d"],
    }
