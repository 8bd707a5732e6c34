#!/usr/bin/env python3
"""tinyshakespeare (Karpathy 2015), 1.1 MB of plays, to token shards for train_gdn. A speech is a document.

data/tinyshakespeare.py all --out out/data --bytes
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import pipeline  # noqa: E402

COMMIT = "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"
DATASET = pipeline.Dataset(
    name="tinyshakespeare",
    about="tinyshakespeare, 1.1 MB of Shakespeare's plays, to token shards for train_gdn.",
    configs={},
    files=(
        (
            "input.txt",
            f"https://raw.githubusercontent.com/karpathy/char-rnn/{COMMIT}/data/tinyshakespeare/input.txt",
            1115394,
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        ),
    ),
    val_fraction=0.1,
    separator="\\n\\n",
)

if __name__ == "__main__":
    sys.exit(pipeline.main(DATASET, sys.argv[1:]))
