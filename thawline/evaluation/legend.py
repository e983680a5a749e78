"""The words of the report's first screen that need a word: what they mean, where they are used."""

from __future__ import annotations

import re
from collections.abc import Iterable

MEANINGS = {
    "AUC": "how often a positive is scored above a negative; 0.5 is chance",
    "pooled": "over all candidates of a hold-out, whatever their tier",
    "head": "items that the fine-tuning window holds often; torso and tail ones are rarer, cold "
    "ones not in it at all",
    "oracle": "a scorer that knows the simulator's true probabilities: no model can do better",
    "champion": "the registered version that is in use",
    "undecided": "the data are too few to tell",
    "never_trained": "a scorer that only knows whether fine-tuning had a positive of the item",
    "item_age": "a scorer that only knows how long ago the item was first seen",
    "as_of_popularity": "a scorer that only knows how often the item was taken so far",
    "recent_popularity": "the same, of late: older positives count less",
}
"""What each word means, in the order of the legend; `head` stands for all tiers."""

SHOWN_AS = {"head": "head, torso, tail, cold"}


def legend(texts: Iterable[str]) -> dict[str, str]:
    """The words that some texts use, and what they mean.

    Args:
        texts: What the first screen says.
    """
    said = " ".join(texts)
    words = {word: SHOWN_AS.get(word, word) for word in MEANINGS}
    return {
        shown: MEANINGS[word]
        for word, shown in words.items()
        if any(re.search(rf"\b{part}\b", said) for part in shown.split(", "))
    }
