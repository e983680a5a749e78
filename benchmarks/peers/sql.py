"""The requests of the news log in hand-written DuckDB SQL.

Requests alone: no checks of the log, no sequences, no popularity, no manifest.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from .news import (
    CONTEXT,
    DAY_US,
    END,
    FINETUNE,
    HELD_OUT_BELOW,
    HISTORY,
    ROWS_PER_GROUP,
    TEST,
)

TIES = 2
"""Most clicks of a user in one millisecond in this log, which bounds the window's frame."""


def build(log: Path, out: Path) -> None:
    """Writes `requests/day=.../part-00000.parquet`."""
    connection = duckdb.connect(
        config={"memory_limit": "4GB", "temp_directory": str(out / "spill"), "threads": 2}
    )
    context = ", ".join(f"{column}::varchar as {name}" for name, column in CONTEXT.items())
    connection.execute(f"""
        create temp table events as
        select distinct on (user_id, item_id, t) * from (
            select user_id, click_article_id as item_id, click_timestamp * 1000 as t,
                substr(md5('holdout:' || user_id), 1, 12) < '{HELD_OUT_BELOW}' as held_out,
                {context}
            from read_parquet('{log}')
        ) where t < {END}
    """)
    connection.execute("""
        create temp table catalog as
        select item_id, row_number() over (order by min(t), item_id) + 1 as row
        from events group by item_id
    """)
    codes, joins = [], []
    for name in CONTEXT:
        connection.execute(f"""
            create temp table codes_{name} as
            select {name}, row_number() over (order by {name})::int as code from events
            where t >= {FINETUNE[0]} and t < {FINETUNE[1]} and not held_out and {name} is not null
            group by {name}
        """)
        codes.append(f"coalesce(codes_{name}.code, 0) as ctx_{name}")
        joins.append(f"left join codes_{name} using ({name})")
    connection.execute(f"""
        create temp table requests as
        with placed as (select * from events join catalog using (item_id)),
        lists as (
            select *, list({{'row': row, 't': t}}) over (
                partition by user_id order by t, row
                rows between {HISTORY + TIES - 1} preceding and 1 preceding
            ) as past
            from placed
        ),
        cut as (
            select *, coalesce(
                list_filter(past, lambda e: e.t < lists.t)[-{HISTORY}:], []
            ) as history
            from lists where t >= {FINETUNE[0]} and t < {TEST[1]}
        )
        select
            md5_number_lower(concat_ws('|', user_id, t, item_id)) >> 1 as request_id,
            user_id, make_timestamptz(t) as timestamp, held_out,
            list_transform(history, lambda e: e.row) as history_row,
            list_transform(history, lambda e: 1::tinyint) as history_action,
            list_transform(history, lambda e: ((t - e.t) / 3.6e9)::float) as history_age,
            [row] as candidate_row, [1::tinyint] as label_click, {", ".join(codes)}
        from cut {" ".join(joins)}
    """)
    for start in range(FINETUNE[0], TEST[1], DAY_US):
        folder = out / "requests" / f"day={start // DAY_US}"
        folder.mkdir(parents=True)
        connection.execute(f"""
            copy (
                select * from requests
                where timestamp >= make_timestamptz({start})
                    and timestamp < make_timestamptz({start + DAY_US})
                order by timestamp, request_id
            ) to '{folder}/part-00000.parquet'
            (format parquet, compression zstd, row_group_size {ROWS_PER_GROUP})
        """)
