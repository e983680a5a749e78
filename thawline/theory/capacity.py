"""What a table over many GPUs takes: memory, bytes between GPUs, time, and what prefetch hides.

Closed forms over the popularity of rows; nothing is measured here. Times are of an ideal machine
that runs at a stated share of its nominal rates, so take them for ratios first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from thawline.errors import ConfigError
from thawline.theory.popularity import Popularity
from thawline.theory.stability import largest_stable_step
from thawline.theory.staleness import stale_share

FLOAT, ID = 4, 8
"""Bytes."""

INTERCONNECTS = {
    "nvlink4": 450e9,
    "nvlink3": 300e9,
    "pcie5": 63e9,
    "pcie4": 31.5e9,
    "ib-ndr": 50e9,
    "ib-hdr": 25e9,
    "ethernet-100g": 12.5e9,
    "ethernet-25g": 3.125e9,
    "ethernet-10g": 1.25e9,
}
"""Nominal bytes a second and GPU in one direction, one port a GPU."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet."""

    float32: float
    """FLOP/s, without tensor cores, as PyTorch multiplies float32 by default."""
    bfloat16: float
    """FLOP/s, dense."""
    memory: float
    """Bytes."""
    memory_rate: float
    """Bytes a second."""


GPUS = {
    "h200": Gpu(67e12, 989e12, 141e9, 4.8e12),
    "h100": Gpu(67e12, 989e12, 80e9, 3.35e12),
    "a100": Gpu(19.5e12, 312e12, 80e9, 2.0e12),
    "l4": Gpu(30e12, 121e12, 24e9, 0.3e12),
}
STATE_FLOATS = {
    "row-wise-adagrad": (1, 0),
    "adagrad": (0, 1),
    "lazy-adam": (1, 2),
    "dense-adam": (1, 2),
    "sgd": (0, 0),
}
"""Floats of optimizer state: a row, and a coordinate."""


@dataclass(frozen=True)
class Machine:
    """GPUs, and how fast they compute and talk."""

    gpus: int
    flops: float
    """A GPU's nominal FLOP/s."""
    bandwidth: float
    """Bytes a second and GPU in one direction."""
    memory_rate: float
    """Bytes a second of a GPU's memory."""
    utilisation: float = 0.3
    """The share of `flops` that the network reaches."""
    network_share: float = 0.7
    """The share of `bandwidth` that an all-to-all or all-reduce reaches."""
    latency: float = 30e-6
    """Seconds of a collective before its first byte."""

    def __post_init__(self) -> None:
        rates = (self.flops, self.bandwidth, self.memory_rate)
        if self.gpus < 1 or min(rates) <= 0:
            raise ConfigError(
                f"a machine of {self.gpus} GPUs with rates {rates} cannot train",
                "give at least one GPU, and rates above 0",
            )
        if not (0 < self.utilisation <= 1 and 0 < self.network_share <= 1 and self.latency >= 0):
            raise ConfigError(
                f"utilisation is {self.utilisation:g}, the network's {self.network_share:g}, "
                f"the latency {self.latency:g}",
                "give shares within (0, 1] and a latency of at least 0",
            )

    @property
    def remote(self) -> float:
        """The share of a GPU's traffic that leaves it, where rows are spread evenly."""
        return (self.gpus - 1) / self.gpus

    def exchange(self, num_bytes: float) -> float:
        """Seconds of an all-to-all in which each GPU sends `num_bytes`, its own share included."""
        if self.gpus == 1:
            return 0.0
        return self.latency + self.remote * num_bytes / (self.bandwidth * self.network_share)

    def reduce(self, num_bytes: float) -> float:
        """Seconds of a ring all-reduce of `num_bytes`, which are sent and received twice."""
        return 2 * self.exchange(num_bytes)


@dataclass(frozen=True)
class Table:
    """An ID table, split by rows."""

    popularity: Popularity
    dim: int
    optimizer: str = "row-wise-adagrad"
    bytes_per_value: int = FLOAT

    def weight_bytes(self, gpus: int) -> float:
        """Bytes of the rows on the fullest GPU."""
        return -(-self.popularity.rows // gpus) * self.dim * self.bytes_per_value

    def state_bytes(self, gpus: int) -> float:
        """Bytes of the optimizer's state on the fullest GPU.

        Raises:
            ConfigError: An optimizer that there is not.
        """
        if self.optimizer not in STATE_FLOATS:
            raise ConfigError(
                f"no optimizer {self.optimizer!r}", f"choose one of {', '.join(STATE_FLOATS)}"
            )
        row, coordinate = STATE_FLOATS[self.optimizer]
        return -(-self.popularity.rows // gpus) * (row + coordinate * self.dim) * FLOAT


@dataclass(frozen=True)
class Network:
    """The dense part, the same on every GPU (`thawline.model.cost` has its figures)."""

    parameters: int
    forward: float
    """FLOP a step."""
    backward: float
    """FLOP a step."""
    kept: float
    """Bytes of activations."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU."""

    weights: float
    state: float
    """Of the rows' optimizer."""
    buffers: float
    """Rows looked up, those in flight included, and their gradients."""
    activations: float
    network: float
    """Parameters, gradients and Adam's two moments."""

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.state + self.buffers + self.activations + self.network


@dataclass(frozen=True)
class Traffic:
    """Bytes that one GPU sends to others in a step, by exchange; it receives as many."""

    ids: float
    rows: float
    gradients: float
    """In a step in which the table trains; as many as `rows`."""
    network: float
    """Of the all-reduce."""


@dataclass(frozen=True)
class Times:
    """Seconds of the parts of a step."""

    lookup: float
    forward: float
    backward: float
    optimizer: float
    """The network's; its gradients' all-reduce included."""
    update: float
    """Of the rows: the gradients' all-to-all, and reading and writing rows and state."""
    hiding: float
    """What a lookup may hide behind."""

    @property
    def compute(self) -> float:
        """Forward, backward and the network's optimizer."""
        return self.forward + self.backward + self.optimizer

    def exposed(self, staleness: int) -> float:
        """What of a lookup is waited for: all of it if it starts when its batch is due."""
        return self.lookup if staleness == 0 else max(0.0, self.lookup - self.hiding)

    def step(self, staleness: int, *, trains: bool) -> float:
        """A whole step, of a table that trains or of one that is frozen."""
        return self.exposed(staleness) + self.compute + (self.update if trains else 0.0)


@dataclass(frozen=True)
class Plan:
    """What training a table by batches of `batch` requests a GPU takes."""

    distinct: float
    """Distinct rows that a GPU asks for in a step, on average."""
    memory: Memory
    traffic: Traffic
    times: Times
    stale: float
    """Share of lookups that miss a write."""
    largest_rate: float
    """Learning rate times curvature at which plain SGD on the hottest row stops to settle."""


def distinct_rows(popularity: Popularity, lookups: int) -> float:
    """Expected distinct rows among `lookups` independent draws.

    Row i is not drawn with probability (1 - p_i)^n, so the expectation is the sum over i of
    1 - (1 - p_i)^n.

    >>> round(distinct_rows(Popularity.zipf(rows=2, alpha=0), lookups=2), 2)
    1.5
    """
    with np.errstate(divide="ignore"):  # A single row has share 1.
        return popularity.total(lambda share: -np.expm1(lookups * np.log1p(-share)))


def make_plan(
    table: Table, network: Network, machine: Machine, *, lookups: int, staleness: int
) -> Plan:
    """Memory, bytes and seconds of a step.

    Row-wise sharding: each GPU holds rows / gpus rows, spread so that hot ones fall anywhere. Ids
    are deduplicated on each GPU before they travel, so a step asks for u = `distinct_rows` rows a
    GPU, of which the share (gpus - 1) / gpus lies elsewhere:

        bytes sent = remote u (8 for the id, 4 d for the row, 4 d for the gradient).

    A hot row is asked for once by each GPU, which is what keeps its owner's load near the mean.
    Rows travel in float32. A lookup is the all-to-all of ids, a read of the rows, and the
    all-to-all of rows; an update is the all-to-all of gradients, then a read and a write of rows
    and state (of the whole table for dense Adam).

    The lookup hides behind the backward and the network's optimizer. With several GPUs it ends
    before the network's all-reduce begins (two collectives at a time could wait for each other),
    and so hides behind the backward alone.

    Buffers: rows [n, d] of the present batch and of `staleness` in flight, their gradients [n, d],
    and what is sent and received, 3 [u, d].

    Args:
        table: The ID table.
        network: The dense part.
        machine: Where.
        lookups: n, rows that a GPU looks up in a step, padding left out.
        staleness: Updates that a lookup may miss.

    Raises:
        ConfigError: No lookups, a negative staleness or an unknown optimizer.
    """
    stale = stale_share(table.popularity, lookups * machine.gpus, staleness)
    distinct = distinct_rows(table.popularity, lookups)
    row, all_rows = FLOAT * table.dim, FLOAT * table.dim * lookups
    local = distinct * table.dim * table.bytes_per_value
    weights, state = table.weight_bytes(machine.gpus), table.state_bytes(machine.gpus)
    touched = 1.0
    if table.optimizer != "dense-adam":
        touched = min(1.0, distinct * machine.gpus / table.popularity.rows)
    dense = FLOAT * network.parameters
    rate = machine.flops * machine.utilisation
    backward = network.backward / rate
    adam = 7 * dense / machine.memory_rate  # Reads 4 tensors, writes 3.
    times = Times(
        lookup=machine.exchange(distinct * ID)
        + 2 * local / machine.memory_rate
        + machine.exchange(distinct * row),
        forward=network.forward / rate,
        backward=backward,
        optimizer=machine.reduce(dense) + adam,
        update=machine.exchange(distinct * row)
        + 2 * touched * (weights + state) / machine.memory_rate,
        hiding=backward + (adam if machine.gpus == 1 else 0.0),
    )
    return Plan(
        distinct=distinct,
        memory=Memory(
            weights=weights,
            state=state,
            buffers=(2 + staleness) * all_rows + 3 * distinct * row,
            activations=network.kept,
            network=4 * dense,
        ),
        traffic=Traffic(
            ids=machine.remote * distinct * ID,
            rows=machine.remote * distinct * row,
            gradients=machine.remote * distinct * row,
            network=2 * machine.remote * dense,
        ),
        times=times,
        stale=stale,
        largest_rate=largest_stable_step(staleness) / table.popularity.hottest,
    )
