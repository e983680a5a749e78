"""Column mappings of well-known logs."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "feed": {
        "format": "parquet",
        "columns": {
            "user_id": "user_id",
            "item_id": "item_id",
            "timestamp": "timestamp",
            "request_id": "request_id",
            "position": "position",
        },
        "timestamp_unit": "auto",
        "actions": {"save": {"column": "save"}, "click": {"column": "click"}},
        "context": {"surface": "ctx_surface", "device": "ctx_device", "hour": "ctx_hour"},
    },
    "recbole": {
        "format": "csv",
        "separator": "\t",
        "columns": {
            "user_id": "user_id:token",
            "item_id": "item_id:token",
            "timestamp": "timestamp:float",
        },
        "timestamp_unit": "s",
        "actions": {"click": {}},
    },
    "movielens-csv": {
        "format": "csv",
        "separator": ",",
        "columns": {"user_id": "userId", "item_id": "movieId", "timestamp": "timestamp"},
        "timestamp_unit": "s",
        "actions": {"like": {"column": "rating", "at_least": 4.0}, "watch": {}},
    },
    "movielens-dat": {
        "format": "csv",
        "separator": "::",
        "header": ["user_id", "item_id", "rating", "timestamp"],
        "columns": {"user_id": "user_id", "item_id": "item_id", "timestamp": "timestamp"},
        "timestamp_unit": "s",
        "actions": {"like": {"column": "rating", "at_least": 4.0}, "watch": {}},
    },
    "movielens-100k": {
        "format": "csv",
        "separator": "\t",
        "header": ["user_id", "item_id", "rating", "timestamp"],
        "columns": {"user_id": "user_id", "item_id": "item_id", "timestamp": "timestamp"},
        "timestamp_unit": "s",
        "actions": {"like": {"column": "rating", "at_least": 4.0}, "watch": {}},
    },
}
"""Column mappings of well-known logs; any key beside `preset` overrides the preset's."""
