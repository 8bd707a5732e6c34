"""The options of fineweb_edu.py and the like."""

import os

import prepare  # checks the packages

import splits
import textfiles

STAGES = ("fetch", "tokenize", "shuffle", "verify")


def parse_options(dataset, argv):
    number = prepare.number
    p = prepare.OneLineParser(
        prog=f"{dataset.name}.py",
        description=f"{dataset.about} Stages: fetch, tokenize, shuffle, verify; all runs the four. Run the same command "
        "again after a stop, a kill or an error: it goes on where it was.",
        epilog="Exit codes: 0 done, 2 wrong option, 3 a package or room on the disk is missing, 4 bad data, a failing "
        "disk or network, 6 out of memory, 70 internal, 130 stopped.",
        allow_abbrev=False,
    )
    default_config = next(iter(dataset.configs), None)
    add = p.add_argument
    add("stage", choices=STAGES + ("all",))
    if len(dataset.configs) > 1:
        sizes = ", ".join(dataset.configs)
        add(
            "--config",
            choices=list(dataset.configs),
            default=default_config,
            help=f"{sizes} (default {default_config})",
        )
    add(
        "--from",
        dest="inputs",
        nargs="+",
        metavar="PATH",
        help="take these files and folders instead of downloading: " + ", ".join(textfiles.KINDS),
    )
    add("--out", required=True, metavar="DIR", help="folder for everything, made if it is not there")
    add("--name", help="first part of the shards' names (default: the dataset and its config)")
    add("--tokenizer", default="llama2", metavar="FILE", help="a SentencePiece model, bytes, or llama2: downloaded (default)")
    add("--bytes", action="store_true", help="the same as --tokenizer bytes: a token is a byte, 256 is BOS")
    add(
        "--jobs",
        type=number(int, 1, 4096),
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that tokenize (default: all cores)",
    )
    add("--dry-run", action="store_true", help="say what is done, what is to do, the disk and the hours; write nothing")
    add("--force", action="store_true", help="start the stage and those after it again; whole downloads are kept")
    g = p.add_argument_group("what the shards hold")
    add = g.add_argument
    add(
        "--val-fraction",
        type=number(float, 0, 1, True),
        default=dataset.val_fraction,
        metavar="P",
        help=f"share of the documents for validation, by a hash of id or text (default {dataset.val_fraction:g})",
    )
    add(
        "--shard-tokens",
        type=number(int, 1, 10**12),
        default=10**9,
        metavar="N",
        help="in a shard (default 1000000000)",
    )
    add("--seed", type=number(int, 0, 2**63 - 1), default=dataset.seed, metavar="N", help="of the shuffle (default 1)")
    add("--text-field", default="text", metavar="NAME", help="field or column of the text (default text)")
    add("--id-field", default="id", metavar="NAME", help="field or column of the id (default id)")
    add("--separator", default=dataset.separator, metavar="TEXT", help="what stands between documents in .txt files")
    add("--skip-bad", action="store_true", help="leave out documents that cannot be read, and count them")
    g = p.add_argument_group("fetch")
    add = g.add_argument
    add("--revision", default="main", help="branch, tag or commit; its commit is recorded at the first fetch (main)")
    add("--downloads", type=number(int, 1, 64), default=4, metavar="N", help="files at a time (default 4)")
    add(
        "--retries",
        type=number(int, 0, 1000),
        default=10,
        metavar="N",
        help="attempts in a row without a new byte (default 10)",
    )
    g = p.add_argument_group("disk, memory, checks")
    add = g.add_argument
    add("--keep-tokens", action="store_true", help="keep the tokens that shuffle has used, for another --seed")
    add("--keep-free", type=number(float, 0, 10**9), default=1, metavar="GB", help="room to leave on the disk (1)")
    add(
        "--bucket-bytes",
        type=number(int, 1, 2**40),
        default=splits.BUCKET_BYTES,
        metavar="N",
        help="size of what shuffle sorts in memory (256 MiB)",
    )
    add(
        "--segment-bytes",
        type=number(int, 1, 2**50),
        default=4 << 30,
        metavar="N",
        help="size of the files of tokenize (4 GiB)",
    )
    add("--samples", type=number(int, 1, 10**6), default=100, metavar="N", help="documents that verify compares (100)")
    add("--shards-only", action="store_true", help="verify without the sources, which may be gone")
    o = p.parse_args(argv)
    o.bytes |= o.tokenizer == "bytes"  # as the trainer calls it
    o.config = getattr(o, "config", default_config)
    if not o.name:
        o.name = dataset.name + ("_" + o.config.removeprefix("sample-") if len(dataset.configs) > 1 else "")
        o.name = os.path.basename(os.path.abspath(o.inputs[0])).split(".")[0] if o.inputs else o.name
    textfiles.check_name_and_separator(p, o)
    return o
