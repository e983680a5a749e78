import dataclasses

import torch
from tensors import NUM_ROWS, make_batch, make_ranker, make_weight, widen_history


def score(ranker, batch, weight):
    ranker.eval()
    with torch.no_grad():
        return ranker(batch, {"item": weight[batch.rows]})


def test_padding_after_the_history_changes_no_score():
    ranker, batch, weight = make_ranker(), make_batch(), make_weight()

    plain = score(ranker, batch, weight)
    widened = score(ranker, widen_history(batch, 8), weight)

    torch.testing.assert_close(plain, widened, rtol=0, atol=1e-6)


def test_a_request_scores_the_same_alone_and_in_a_batch():
    ranker, batch, weight = make_ranker(), make_batch(), make_weight()
    alone = dataclasses.replace(
        batch, **{name: value[2:3] for name, value in batch.tensors().items()}
    )

    torch.testing.assert_close(
        score(ranker, batch, weight)[2:3], score(ranker, alone, weight), rtol=0, atol=1e-6
    )


def test_candidates_do_not_see_each_other():
    ranker, batch, weight = make_ranker(), make_batch(), make_weight()
    backwards = dataclasses.replace(batch, candidate_row=batch.candidate_row.flip(1))

    torch.testing.assert_close(
        score(ranker, batch, weight), score(ranker, backwards, weight).flip(1), rtol=0, atol=1e-6
    )


def test_an_empty_history_gives_finite_scores_that_depend_on_the_candidate():
    ranker, batch, weight = make_ranker(), make_batch(), make_weight()
    assert (batch.history_row[0] == 0).all()

    scores = score(ranker, batch, weight)[0]

    assert torch.isfinite(scores).all()
    assert scores[:, 0].unique().numel() == batch.candidate_row[0].unique().numel()


def test_the_order_age_and_actions_of_the_history_and_the_context_matter():
    ranker, batch, weight = make_ranker(), make_batch(), make_weight()
    plain = score(ranker, batch, weight)[-1]
    changes = {
        "history_row": batch.history_row.flip(1),
        "history_age": batch.history_age + 10,
        "history_action": 4 - batch.history_action.clamp(min=1),
        "context": (batch.context + 1) % 3,
    }

    for name, value in changes.items():
        changed = score(ranker, dataclasses.replace(batch, **{name: value}), weight)[-1]
        assert not torch.allclose(plain, changed, atol=1e-4), name


def test_padding_gets_no_gradient_and_real_rows_do():
    ranker, batch, weight = make_ranker(), make_batch(), make_weight()
    embeddings = weight[batch.rows].requires_grad_()

    ranker.loss(batch, {"item": embeddings}).total.backward()

    norms = embeddings.grad.norm(dim=1)
    assert (norms[batch.rows == 0] == 0).all()
    history = batch.rows[: batch.history_row.numel()] != 0
    assert (norms[: batch.history_row.numel()][history] > 0).all()
    valid = batch.candidate_mask.flatten()
    assert (norms[batch.history_row.numel() :][valid] > 0).all()


def test_the_total_is_the_weighted_sum_of_the_three_objectives():
    ranker, batch, weight = make_ranker(), make_batch(), make_weight()

    losses = ranker.loss(batch, {"item": weight[batch.rows]})

    expected = losses.head + 0.5 * losses.pairwise + 0.5 * losses.contrastive
    torch.testing.assert_close(losses.total, expected)
    assert min(losses.head, losses.pairwise, losses.contrastive) > 0


def test_a_request_without_a_positive_takes_no_part_in_the_contrastive_loss():
    ranker, weight = make_ranker(), make_weight()
    batch = make_batch()
    labels = batch.labels.clone()
    labels[2:] = 0
    few = dataclasses.replace(batch, labels=labels)
    moved = dataclasses.replace(few, context=(few.context + 1) % 3)
    moved.history_row[2:] = (few.history_row[2:] % (NUM_ROWS - 2)) + 2

    first = ranker.loss(few, {"item": weight[few.rows]}).contrastive
    second = ranker.loss(moved, {"item": weight[moved.rows]}).contrastive

    torch.testing.assert_close(first, second)
