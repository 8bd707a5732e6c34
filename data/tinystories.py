#!/usr/bin/env python3
"""TinyStories (Eldan and Li 2023, arXiv 2305.07759) to token shards for train_gdn: about 2.1 million short stories.

data/tinystories.py all --out out/data
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import pipeline  # noqa: E402

DATASET = pipeline.Dataset(
    name="tinystories",
    about="TinyStories, short stories for children, to token shards for train_gdn.",
    repo="roneneldan/TinyStories",
    configs={"default": "data/train-*.parquet"},
    val_fraction=0.01,
)

if __name__ == "__main__":
    sys.exit(pipeline.main(DATASET, sys.argv[1:]))
