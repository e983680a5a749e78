"""What a table needs, what is free, and the refusal in between."""

import pytest
import torch
from row_reference import NAMES

from thawline.errors import ConfigError
from thawline.tables import TableSize, make_optimizer, require_memory
from thawline.tables.memory import free_memory

UNLIMITED = "9223372036854771712"


def size(name="user", rows=200_000_000, dim=64, dtype=torch.float32, optimizer="row-wise-adagrad"):
    return TableSize(name, rows, dim, dtype, optimizer, anchored=False)


def machine(root, *, available_kb, groups=None, own=""):
    """A `/proc` and a `/sys`; `groups` are files of `/sys/fs/cgroup` by name."""
    files = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {available_kb} kB\nPages: 0\n"}
    files["proc/self/cgroup"] = own
    files |= {f"sys/fs/cgroup/{name}": text for name, text in (groups or {}).items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


@pytest.fixture
def free(monkeypatch):
    """Says how much memory is free."""

    def say(num_bytes):
        monkeypatch.setattr("thawline.tables.memory.free_memory", lambda device: num_bytes)

    return say


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_the_estimate_is_what_the_tensors_take(name, dtype, anchored):
    rows = torch.zeros(50, 6, dtype=dtype)
    state = make_optimizer(name, 50, 6).state_dict().values()
    tensors = [rows, *([rows.clone()] if anchored else []), *state]
    step = {torch.float32: 12, torch.bfloat16: 20}[dtype] if name == "dense-adam" else 0

    estimate = TableSize("user", 50, 6, dtype, name, anchored).num_bytes

    assert estimate == sum(tensor.nbytes for tensor in tensors) + step * 50 * 6


def test_an_estimate_of_the_largest_table_allocates_nothing():
    assert size(rows=10**12, optimizer="lazy-adam").num_bytes == 10**12 * (64 * 4 * 3 + 4)


def test_a_table_that_does_not_fit_is_refused_with_what_it_needs_and_what_is_free(free):
    free(21_300_000_000)

    with pytest.raises(ConfigError) as raised:
        require_memory([size()])

    assert raised.value.what == (
        "the table `user` of 200,000,000 rows x 64 (float32, row-wise-adagrad) needs 52.0 GB; "
        "21.3 GB of memory are free"
    )
    assert raised.value.remedy == (
        "give it fewer rows, a narrower dim, dtype bfloat16, or run on a machine with more memory"
    )


def test_the_remedy_names_a_smaller_optimizer_and_no_type_that_is_there_already(free):
    free(1_000_000)

    with pytest.raises(ConfigError) as raised:
        require_memory([size(dtype=torch.bfloat16, optimizer="dense-adam")])

    assert "the optimizer row-wise-adagrad" in raised.value.remedy
    assert "bfloat16" not in raised.value.remedy


def test_tables_must_fit_together_and_the_largest_is_named(free):
    small, large = size("author", rows=1_000), size("user", rows=10_000)
    free(large.num_bytes + small.num_bytes)
    require_memory([small, large])

    free(large.num_bytes + small.num_bytes - 1)
    with pytest.raises(
        ConfigError, match=r"`user` of 10,000 .* needs 2.6 MB and the other tables 260.0 kB"
    ):
        require_memory([small, large])


def test_the_processes_of_a_machine_must_fit_together(free):
    own = size("user", rows=10_000)
    free(4 * own.num_bytes)
    require_memory([own], processes=4)

    with pytest.raises(ConfigError, match=r"needs 2\.6 MB in each of 5 processes") as raised:
        require_memory([own], processes=5)
    assert raised.value.remedy.startswith("start fewer processes here, or give it fewer rows")
    assert "bfloat16" not in raised.value.remedy


def test_without_a_limit_what_the_machine_has_left_is_free(tmp_path):
    root = machine(
        tmp_path,
        available_kb=2_000,
        own="0::/\n4:memory:/here\n",
        groups={
            "memory.max": "max\n",
            "memory.current": "5\n",
            "memory.stat": "inactive_file 5\n",
            "memory/here/memory.stat": "total_inactive_file 5\n",
            "memory/here/memory.limit_in_bytes": UNLIMITED,
            "memory/here/memory.usage_in_bytes": "5\n",
        },
    )

    assert free_memory(root=root) == 2_000 * 1024


def test_a_limit_of_version_2_counts_and_so_does_one_above_it(tmp_path):
    groups = {
        "pod/memory.max": "900000\n",
        "pod/memory.current": "500000\n",
        "pod/memory.stat": "anon 1\ninactive_file 100000\n",
        "pod/main/memory.max": "800000\n",
        "pod/main/memory.current": "200000\n",
        "pod/main/memory.stat": "inactive_file 0\n",
    }

    root = machine(tmp_path, available_kb=2_000, own="0::/pod/main\n", groups=groups)

    assert free_memory(root=root) == 900_000 - 500_000 + 100_000


def test_a_limit_of_version_1_counts_even_if_the_path_is_the_hosts(tmp_path):
    groups = {
        "memory/memory.limit_in_bytes": "700000\n",
        "memory/memory.usage_in_bytes": "300000\n",
        "memory/memory.stat": "inactive_file 5\ntotal_inactive_file 50000\n",
    }
    own = "5:cpu,cpuacct:/kubepods/a\n4:memory:/kubepods/a/b\n"

    root = machine(tmp_path, available_kb=2_000, own=own, groups=groups)

    assert free_memory(root=root) == 450_000


def test_a_group_beyond_its_limit_has_nothing_free(tmp_path):
    groups = {
        "memory.max": "1000\n",
        "memory.current": "2000\n",
        "memory.stat": "inactive_file 7\n",
    }

    root = machine(tmp_path, available_kb=2_000, own="0::/\n", groups=groups)

    assert free_memory(root=root) == 0


def test_this_machine_has_some_memory_free():
    require_memory([size(rows=100, dim=4)])
    with pytest.raises(ConfigError, match="of memory are free"):
        require_memory([size(rows=10**12)])
