"""A model and a loop of your own on an ID table that thaws in the last epoch, with prefetch."""

import torch

from thawline import LocalTable, Prefetcher, TableGroup

torch.manual_seed(0)
items, clicked = torch.randint(1, 1_000, (4_096, 20)), torch.rand(4_096).round()
table = LocalTable.random(1_000, 16, seed=0)  # row-wise Adagrad; row 0 is padding
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
adam = torch.optim.Adam(model.parameters())
prefetcher = Prefetcher(TableGroup({"item": table}), rows=lambda b: {"item": b[0].flatten()})

for epoch in range(3):
    table.freeze()
    if epoch == 2:
        table.thaw(reset_state=True)
    order = torch.randperm(len(items)).split(512)
    losses = []
    for step in prefetcher.steps((items[rows], clicked[rows]) for rows in order):
        rows = step.embeddings["item"].view(-1, 20, 16)
        scores = model(rows.mean(1)).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, step.batch[1])
        step.look_ahead()  # the next rows are read while this batch is in its backward
        adam.zero_grad()
        loss.backward()
        adam.step()
        step.apply()  # one sparse update of the rows
        losses.append(loss.item())
    print(
        f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}, table trains: {table.trainable}"
    )
