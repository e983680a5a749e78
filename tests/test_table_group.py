"""Several ID tables looked up and updated as one."""

import pytest
import torch

from thawline.errors import TrainingError
from thawline.tables import LocalTable, TableGroup, make_optimizer


def make_group():
    generator = torch.Generator().manual_seed(0)
    item = LocalTable(torch.randn(9, 4, generator=generator), learning_rate=0.1)
    user = LocalTable(
        torch.randn(5, 2, generator=generator),
        optimizer=make_optimizer("lazy-adam", 5, 2),
        learning_rate=0.3,
    )
    return TableGroup({"item": item, "user": user})


ROWS = {"item": torch.tensor([3, 3, 0, 8]), "user": torch.tensor([1, 4])}


def test_one_step_of_a_group_is_the_step_of_each_table():
    group, apart = make_group(), make_group().tables

    lookup = group.lookup(ROWS)
    embeddings = lookup.wait()
    sum((leaf**2).sum() for leaf in embeddings.values()).backward()
    lookup.apply({name: leaf.grad for name, leaf in embeddings.items()})

    for name, table in apart.items():
        alone = table.lookup(ROWS[name])
        assert torch.equal(alone.wait(), embeddings[name])
        alone.apply(2 * alone.wait().detach())
        assert torch.equal(group.tables[name].weight, table.weight)
        assert (table.weight != make_group().tables[name].weight).any()


def test_a_table_outside_the_loss_and_a_frozen_one_stay_as_they_are():
    group = make_group()
    before = {name: table.weight.clone() for name, table in group.tables.items()}
    lookup = group.lookup(ROWS)
    embeddings = lookup.wait()
    embeddings["item"].sum().backward()
    lookup.apply({name: leaf.grad for name, leaf in embeddings.items()})
    assert torch.equal(group.tables["user"].weight, before["user"])
    assert not torch.equal(group.tables["item"].weight, before["item"])

    group.tables["item"].freeze()
    frozen = group.tables["item"].weight.clone()
    lookup = group.lookup(ROWS)
    embeddings = lookup.wait()
    sum(leaf.sum() for leaf in embeddings.values()).backward()
    lookup.apply({name: leaf.grad for name, leaf in embeddings.items()})
    assert not embeddings["item"].requires_grad
    assert torch.equal(group.tables["item"].weight, frozen)
    assert not torch.equal(group.tables["user"].weight, before["user"])


def test_a_row_outside_its_table_is_named_with_the_table():
    with pytest.raises(TrainingError, match="`user`: row 5 is outside a table of 5 rows"):
        make_group().lookup(ROWS | {"user": torch.tensor([1, 5])})


@pytest.mark.parametrize("rows", [{"item": ROWS["item"]}, ROWS | {"author": torch.tensor([1])}, {}])
def test_rows_of_other_tables_are_refused(rows):
    with pytest.raises(TrainingError, match="in the tables `item`, `user`"):
        make_group().lookup(rows)


def test_a_gradient_of_a_table_that_was_not_looked_up_is_refused_before_any_row_moves():
    group = make_group()
    before = group.tables["item"].weight.clone()
    lookup = group.lookup(ROWS)

    with pytest.raises(TrainingError, match="`author`"):
        lookup.apply({"item": torch.ones(4, 4), "author": torch.ones(1, 2)})

    assert torch.equal(group.tables["item"].weight, before)
