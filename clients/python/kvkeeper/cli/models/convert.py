"""`kvkeeper convert`: a GGUF file as a folder that an engine serves."""

import argparse
import json
import shlex
from pathlib import Path

from kvkeeper.cli.console.addresses import add_json_flag
from kvkeeper.cli.console.problems import EXIT_FAILED, complain
from kvkeeper.cli.models.gguf import ConversionError, convert


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the model of a GGUF file as a Hugging Face folder, with its tokenizer and chat template; quantised weights are"
        " widened to bfloat16. What transformers reads can be converted; the engine says whether it serves it."
    )
    parser.add_argument("file", type=Path, metavar="FILE.gguf", help="the file to read")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to make, which must not exist")
    add_json_flag(parser)


def run(args: argparse.Namespace) -> int:
    try:
        convert(args.file, args.folder)
    except ConversionError as error:
        complain(str(error), reason="NOT_CONVERTED", is_json=args.json)
        return EXIT_FAILED
    if args.json:
        print(json.dumps({"folder": str(args.folder)}))
    else:
        print(f"converted; serve it with: kvkeeper up --model {shlex.quote(str(args.folder))}")
    return 0
