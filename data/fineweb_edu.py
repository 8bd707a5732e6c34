#!/usr/bin/env python3
"""FineWeb-Edu (Penedo et al. 2024, arXiv 2406.17557; ODC-By) to token shards for train_gdn.

    data/fineweb_edu.py all --config sample-100BT --out out/data --jobs 64

Or, with --from, any parquet, JSON lines or text. README.md beside this file has more.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import pipeline  # noqa: E402

DATASET = pipeline.Dataset(
    name="fineweb_edu",
    about="FineWeb-Edu, educational web pages in English, to token shards for train_gdn.",
    repo="HuggingFaceFW/fineweb-edu",
    configs={
        "sample-10BT": "sample/10BT/*.parquet",
        "sample-100BT": "sample/100BT/*.parquet",
        "sample-350BT": "sample/350BT/*.parquet",
        "default": "data/**.parquet",
    },
)

if __name__ == "__main__":
    sys.exit(pipeline.main(DATASET, sys.argv[1:]))
