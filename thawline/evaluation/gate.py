"""The gate: whether a model may be registered, and why.

A rule passes where the data show that it is kept, fails where they show that it is broken, and is
undecided where they could show neither. With the interval of a difference this is a test of
non-inferiority: passed where the whole interval is on the right side of the bound, failed where it
is on the wrong one. `gate.min_auc` alone fails by the figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from thawline.config import Gate, GateRule
from thawline.errors import ConfigError, DataError
from thawline.evaluation.compare import Figures, Measured

Status = Literal["passed", "failed", "undecided"]

LABELS = {
    "auc": "AUC",
    "user_auc": "AUC by user",
    "request_auc": "AUC by request",
    "log_loss": "log loss",
    "normalized_entropy": "normalized entropy",
    "calibration": "calibration",
    "hit": "HIT",
    "ndcg": "NDCG",
    "mrr": "MRR",
}


class AuditFinding(Protocol):
    """The part of an audit's finding that a rule needs."""

    @property
    def name(self) -> str:
        """What was looked for."""

    @property
    def severity(self) -> str:
        """`error` is what rules are about."""

    @property
    def waived(self) -> bool:
        """Whether the config lets it pass."""


@dataclass(frozen=True)
class RuleResult:
    """What became of one rule."""

    name: str
    status: Status
    reason: str
    """A sentence."""
    value: float | None = None
    """The figure, or challenger minus champion."""
    low: float | None = None
    high: float | None = None
    """Ends of its interval."""
    bound: float | None = None


@dataclass(frozen=True)
class Decision:
    """The verdict on a model."""

    passed: bool
    rules: list[RuleResult]

    @property
    def reasons(self) -> list[str]:
        """A sentence a rule."""
        return [
            rule.reason if rule.status != "undecided" else f"undecided: {rule.reason}"
            for rule in self.rules
        ]

    def tree(self) -> dict[str, Any]:
        """What `evaluation.json` says under `gate`."""
        return {"passed": self.passed, "rules": [asdict(rule) for rule in self.rules]}


def decide(
    gate: Gate,
    metrics: Mapping[str, Mapping[str, Any]],
    actions: Sequence[str],
    *,
    figures: Mapping[str, Figures] | None = None,
    hit_at: int = 3,
    findings: Sequence[AuditFinding] = (),
    without: str | None = "there is no champion yet",
) -> Decision:
    """Applies `gate.min_auc` and the rules.

    Args:
        gate: The config's `gate` section.
        metrics: Metrics tree of each hold-out (see `metrics.holdout_metrics`).
        actions: The dataset's actions; the first is the primary one.
        figures: Of each hold-out, the challenger's and, where there is a champion, its own
            (`compare.measure`). Needed if there are rules on figures.
        hit_at: The k of `hit` and `ndcg`.
        findings: Of the dataset's audit.
        without: Why there is nothing to compare with; None where there is a champion.

    Raises:
        ConfigError: A rule on an action that the dataset does not have.
        DataError: A hold-out of a rule was not scored, or its metrics lack the primary action.
    """
    require_rules(gate, actions)
    floor = _least_auc(gate, metrics, actions)
    results = [floor]
    refused = floor.status == "failed"
    refused |= floor.status == "undecided" and gate.undecided == "refuse"
    for rule in gate.rules:
        if rule.audit is not None:
            result = _audit(rule, findings)
        else:
            holdout = rule.holdout or gate.holdout
            if holdout not in metrics:
                raise _not_scored(f"a rule's holdout is {holdout}", metrics)
            name = f"{rule.figure}@{hit_at}" if rule.figure in ("hit", "ndcg") else rule.figure
            key = (rule.action or actions[0], rule.slice, str(name))
            found = (figures or {}).get(holdout, {}).get(key)
            result = _figure(rule, key, holdout, found, without)
        results.append(result)
        undecided = (rule.undecided or gate.undecided) == "refuse"
        refused |= result.status == "failed" or (result.status == "undecided" and undecided)
    return Decision(not refused, results)


def require_rules(gate: Gate, actions: Sequence[str]) -> None:
    """Sees to it that rules are on actions that there are.

    Raises:
        ConfigError: One is not.
    """
    for place, rule in enumerate(gate.rules):
        if rule.action is not None and rule.action not in actions:
            raise ConfigError(
                f"gate.rules.{place}.action is {rule.action!r}, but the log's actions are "
                f"{', '.join(actions)}",
                "name one of them, or leave it out for the primary one",
            )


def primary_figures(
    gate: Gate, metrics: Mapping[str, Mapping[str, Any]], actions: Sequence[str]
) -> Mapping[str, Any]:
    """The primary action's pooled figures on the gate's hold-out; arguments as for `decide`.

    Raises:
        DataError: The gate's hold-out was not scored, or its metrics lack the primary action.
    """
    if gate.holdout not in metrics:
        raise _not_scored(f"gate.holdout is {gate.holdout}", metrics)
    pooled: Mapping[str, Mapping[str, Any]] = metrics[gate.holdout]["pooled"]
    primary = actions[0]
    if primary not in pooled:
        raise DataError(
            f"the metrics of {gate.holdout} hold {', '.join(pooled) or 'no action'}, "
            f"not the primary action {primary}",
            "evaluate the model with the dataset that it was fine-tuned on",
        )
    return pooled[primary]


def _not_scored(what: str, metrics: Mapping[str, Any]) -> DataError:
    return DataError(
        f"{what}, but only {', '.join(metrics) or 'nothing'} was scored",
        "set gate.holdout to a hold-out that the dataset holds",
    )


def _least_auc(
    gate: Gate, metrics: Mapping[str, Mapping[str, Any]], actions: Sequence[str]
) -> RuleResult:
    """`gate.min_auc`: a floor, below which no model passes, and above which one may be by chance.

    The figure alone refuses: on a small hold-out the interval would hold the floor for any model.
    Where there is an interval, it must be above the floor for the rule to be passed.
    """
    figures = primary_figures(gate, metrics, actions)
    value = figures["auc"]
    pooled = (metrics[gate.holdout].get("intervals") or {}).get("pooled") or {}
    low, high = (pooled.get(actions[0]) or {}).get("auc") or (None, None)
    between = "" if low is None else f" (95 % interval {low:.4f} to {high:.4f})"
    name = f"{actions[0]} AUC on {gate.holdout}"
    rule = f"{name} at least {gate.min_auc:g}"
    if value is None or not math.isfinite(value):
        why = (
            f"{name} is undefined: {figures.get('positives', 0)} positives among "
            f"{figures.get('candidates', 0)} candidates"
        )
        return RuleResult(rule, "failed", why, bound=gate.min_auc)
    least = f"gate.min_auc {gate.min_auc:g}"
    status: Status = "passed"
    if value < gate.min_auc:
        status, why = "failed", f"{_apart(value, gate.min_auc)}{between}, below {least}"
    elif low is not None and low < gate.min_auc:
        status = "undecided"
        why = f"{value:.4f}{between}: these data cannot tell whether it is at least {least}"
    else:
        why = f"{value:.4f}{between}, at least {least}"
    return RuleResult(rule, status, f"{name} is {why}", value, low, high, gate.min_auc)


def _audit(rule: GateRule, findings: Sequence[AuditFinding]) -> RuleResult:
    errors = [found for found in findings if found.severity == "error"]
    if rule.audit == "no_unwaived_errors":
        errors = [found for found in errors if not found.waived]
    name = str(rule.audit).replace("_", " ")
    if not errors:
        return RuleResult(f"audit: {name}", "passed", f"the audit has {name}")
    listed = ", ".join(found.name + (" (waived)" if found.waived else "") for found in errors)
    return RuleResult(
        f"audit: {name}",
        "failed",
        f"the audit found {listed}, so the figures cannot be trusted",
    )


def _figure(
    rule: GateRule,
    key: tuple[str, str, str],
    holdout: str,
    found: Measured | None,
    without: str | None,
) -> RuleResult:
    action, piece, figure = key
    label = f"{action} {LABELS[str(rule.figure)]}{figure[len(str(rule.figure)) :]}"
    where = holdout if piece == "pooled" else f"{piece} items of {holdout}"
    low_bound, high_bound, words = _bounds(rule)
    bound = rule.within or (low_bound if low_bound is not None else high_bound)
    name = f"{label} on {where} {words}"
    subject = f"{label} on {where}"
    if rule.against_champion and without is not None:
        return RuleResult(name, "passed", f"{subject}: {without}", bound=bound)
    if found is None:
        raise DataError(f"{subject} was not measured", "evaluate the model with this config's gate")
    if rule.against_champion:
        if len(found.values) < 2:
            why = f"{subject}: the champion does not predict {action}"
            return RuleResult(name, "undecided", why, bound=bound)
        value, interval = found.difference, found.difference_interval(rule.confidence)
    else:
        value, interval = found.value, found.interval(rule.confidence)
    if value is None:
        why = f"is undefined: {found.positives} positives among {found.candidates} candidates"
        return RuleResult(name, "undecided", f"{subject} {why}", bound=bound)
    said = f"{subject} is {found.value:.4f}"
    if rule.against_champion:
        said += f", the champion's {found.other:.4f}: a difference of {value:+.4f}"
    if interval is None:
        why = (
            f"{said}, but too few users are behind it for an interval ({found.positives} positives "
            f"among {found.candidates} candidates)"
        )
        return RuleResult(name, "undecided", why, value, bound=bound)
    low, high = interval
    ends = "{:+.4f} to {:+.4f}" if rule.against_champion else "{:.4f} to {:.4f}"
    said += f" ({100 * rule.confidence:g} % interval {ends.format(low, high)})"
    kept = (low_bound is None or low >= low_bound) and (high_bound is None or high <= high_bound)
    broken = (low_bound is not None and high < low_bound) or (
        high_bound is not None and low > high_bound
    )
    if kept:
        status: Status = "passed"
        said += f", {words}"
    elif broken:
        status = "failed"
        said += f", where it must be {words}"
    else:
        status = "undecided"
        said += f": these data cannot tell whether it is {words}"
        if rule.against_champion and found.smallest_effect is not None:
            said += (
                f" (the smallest difference that they could show is {found.smallest_effect:.4f})"
            )
    return RuleResult(name, status, said, value, low, high, bound)


def _bounds(rule: GateRule) -> tuple[float | None, float | None, str]:
    """The ends between which the value must be, and that in words."""
    if rule.within is not None:
        return 1 - rule.within, 1 + rule.within, f"within {rule.within:g} of 1"
    if rule.not_below is not None:
        return rule.not_below, None, f"not below {rule.not_below:+g}"
    if rule.not_above is not None:
        return None, rule.not_above, f"not above {rule.not_above:+g}"
    if rule.at_least is not None:
        return rule.at_least, None, f"at least {rule.at_least:g}"
    return None, rule.at_most, f"at most {rule.at_most:g}"


def _apart(value: float, limit: float) -> str:
    """`value` with as many digits as it takes to read as another number than `limit`."""
    for digits in range(4, 17):
        if round(value, digits) != round(limit, digits):
            return f"{value:.{digits}f}"
    return repr(value)
