"""Puts a dump of the database into the object store, under the time at which it was made.

Runs in MLflow's image: `python3 upload.py FILE s3://BUCKET/PREFIX`. The bucket's own lifecycle
rules say for how long dumps are kept.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import boto3

if __name__ == "__main__":
    file, destination = Path(sys.argv[1]), urlsplit(sys.argv[2])
    key = f"{destination.path.strip('/')}/{datetime.now(UTC):%Y-%m-%dT%H-%M-%SZ}.dump"
    boto3.client("s3").upload_file(str(file), destination.netloc, key)
    sys.stdout.write(f"{file.stat().st_size:,} bytes to s3://{destination.netloc}/{key}\n")
