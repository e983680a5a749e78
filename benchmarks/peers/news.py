"""The task of the news log, in plain numbers: what every contestant is told."""

from __future__ import annotations

from pathlib import Path

from .measure import measured

DAY_US = 86_400_000_000
END = 17_456 * DAY_US
"""2017-10-17 00:00 UTC, the end of the test window."""
FINETUNE = (END - 8 * DAY_US, END - DAY_US)
PRETRAIN = (END - 16 * DAY_US, END - DAY_US)
TEST = (END - DAY_US, END)
HISTORY = 50
SEQUENCE = 50
BUCKET_US = 15 * 60_000_000
HELD_OUT_BELOW = f"{int(0.05 * 16**12):012x}"
"""Users whose MD5 of `holdout:<id>` starts below this are held out."""
CONTEXT = {
    "device": "click_deviceGroup",
    "os": "click_os",
    "environment": "click_environment",
    "referrer": "click_referrer_type",
    "region": "click_region",
    "country": "click_country",
}
ROWS_PER_GROUP = 8_192
CONFIG = Path(__file__).parents[2] / "examples" / "news.yaml"

CHECKSUM = """
select count(*) as requests,
    bit_xor(hash(user_id::bigint, epoch_us(timestamp), held_out, candidate_row, history_row,
        history_action, {context}))::varchar as hash,
    round(sum(list_sum(history_age)) / 1e6, 2) as megahours
from read_parquet('{out}/requests/*/*.parquet', hive_partitioning = false)
"""
"""Equal for equal requests, in whatever order; takes `out` and the context columns."""


def build(log: str, out: str, share: str = "1.0") -> None:
    """The dataset of a share of the log's users, by the dataset stage."""
    from thawline.config import load_config
    from thawline.data.windows import build_dataset

    config = load_config(CONFIG, [f"events.path={log}", f"events.sample_users={share}"])
    Path(out).mkdir()
    with measured():
        build_dataset(config, Path(out))
