"""The flags of `kvkeeper generate`, and the options that they make. A flag that is not given is not sent: the model decides."""

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path

from kvkeeper.cli.console.addresses import add_engine_flag, add_json_flag
from kvkeeper.cli.console.arguments import (
    bias,
    filled,
    json_list,
    json_object,
    json_schema,
    number,
    pair,
    seed,
    stop_text,
    token_list,
    utf8,
    whole,
)
from kvkeeper.client import BeamSearch, Chat, GenerateOptions, Retention, Sampling, Thought

_DEFAULT_SINK = 4  # tokens; models that were not trained with a sink of their own need so many (arXiv 2309.17453)

_SAMPLING_FLAGS = {
    "max_tokens": (whole, "most new tokens per continuation (default: 256, or what fits)"),
    "temperature": (number, "0 takes the likeliest token each time (default: the model's, else 1)"),
    "top_p": (number, "smallest set of tokens with this total probability; 1 is off (default: the model's, else off)"),
    "top_k": (whole, "most likely tokens kept; 0 is off (default: the model's, else off)"),
    "min_p": (number, "least probability relative to the likeliest token; 0 is off (default: the model's, else off)"),
    "repetition_penalty": (
        number,
        "on tokens that occurred before, at any temperature; 1 is off (default: the model's, else off)",
    ),
    "frequency_penalty": (number, "-2 to 2 (default: 0)"),
    "presence_penalty": (number, "-2 to 2 (default: 0)"),
    "min_tokens": (whole, "fewest new tokens before an end of sequence or a stop (default: 0)"),
    "seed": (seed, "seed of the random stream (default: a new one for each request)"),
}


_DRAWING = ("temperature", "top_p", "top_k", "min_p", "seed")  # flags that shape how tokens are drawn


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", type=utf8, help="text to continue; without it, or with -, stdin is read")
    parser.add_argument("--prompt-file", type=Path, metavar="PATH", help="read the prompt from a file")
    parser.add_argument("--chat", action="store_true", help="take the prompt as a user's message, in the model's chat template")
    parser.add_argument("--system", type=utf8, metavar="TEXT", help="system message of the conversation; implies --chat")
    _add_chat_flags(parser)
    _add_continuation_flags(parser)
    for name, (kind, text) in _SAMPLING_FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help=text)
    parser.add_argument(
        "--stop", action="append", default=[], type=stop_text, metavar="TEXT", help="text that ends the output; may be repeated"
    )
    _add_token_flags(parser)
    parser.add_argument("--ignore-eos", action="store_true", help="continue past the end-of-sequence token")
    parser.add_argument(
        "--json-schema", type=json_schema, metavar="FILE_OR_JSON", help="the output is a JSON value that this schema allows"
    )
    parser.add_argument("--regex", type=filled, metavar="PATTERN", help="the whole output matches this regular expression")
    parser.add_argument(
        "--choice", action="append", type=filled, metavar="TEXT", help="the output is one of these; may be repeated"
    )
    parser.add_argument(
        "--thought", nargs=2, metavar=("OPENS", "CLOSES"), help="a thought between these texts may come before such an output"
    )
    parser.add_argument(
        "--logprobs",
        type=whole,
        metavar="N",
        help="show log probabilities of each token and of the N likeliest in its place",
    )
    parser.add_argument("--priority", type=whole, metavar="X", default=0, help="larger is more important")
    parser.add_argument(
        "--timeout-ms",
        type=whole,
        metavar="MS",
        help="most time from arrival to the last token (default: none, as long as tokens come)",
    )
    _add_cache_flags(parser)
    parser.add_argument("--session-id", default="", type=utf8, metavar="NAME", help="conversation that the request belongs to")
    parser.add_argument(
        "--metadata", action="append", default=[], type=pair, metavar="KEY=VALUE", help="kept with the request; may be repeated"
    )
    parser.add_argument("--trace-endpoint", metavar="URL", help="OpenTelemetry collector that gets a trace of the request")
    add_engine_flag(parser)
    add_json_flag(parser)


def _add_chat_flags(parser: argparse.ArgumentParser) -> None:
    """What the chat template is given beside the messages; each of them implies --chat."""
    parser.add_argument(
        "--tools", type=json_list, metavar="FILE_OR_JSON", help="tools that the model may call, a list; implies --chat"
    )
    parser.add_argument(
        "--template-arguments", type=json_object, metavar="FILE_OR_JSON", help="variables of the template; implies --chat"
    )
    parser.add_argument(
        "--answer-begins", type=filled, metavar="TEXT", help="beginning of the answer, which is continued; implies --chat"
    )
    parser.add_argument(
        "--plain-user-text", action="store_true", help="what the prompt spells is no control token; implies --chat"
    )


def make_prompt(text: str, args: argparse.Namespace) -> str | Chat:
    """What the flags make of the prompt's text."""
    chat = (args.chat, args.system, args.tools, args.template_arguments, args.answer_begins, args.plain_user_text)
    if not any(given not in (None, False) for given in chat):
        return text
    said = {"system": args.system, "user": text, "assistant": args.answer_begins}
    return Chat(
        [{"role": role, "content": content} for role, content in said.items() if content is not None],
        tools=args.tools or (),
        template_arguments=args.template_arguments or {},
        continue_final_message=args.answer_begins is not None,
        plain_user_text=args.plain_user_text,
    )


def _add_continuation_flags(parser: argparse.ArgumentParser) -> None:
    """How many continuations there are, and how they are found."""
    parser.add_argument("--n", type=whole, metavar="N", help="continuations of the prompt, which is computed once (default: 1)")
    parser.add_argument(
        "--best-of",
        type=whole,
        metavar="X",
        help="compute X continuations, show the N likeliest at the end (default: N)",
    )
    parser.add_argument(
        "--beams", type=whole, metavar="X", help="search for the N likeliest continuations with X beams instead of sampling"
    )
    parser.add_argument(
        "--length-penalty", type=number, metavar="X", help="with --beams: above 0 favours longer continuations (default: 1)"
    )
    parser.add_argument("--early-stopping", action="store_true", help="with --beams: end when X continuations have ended")


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """What becomes of the KV, and whose it is."""
    parser.add_argument("--tenant", default="", type=utf8, metavar="NAME", help="tenant whose cache the prompt shares")
    parser.add_argument("--skip-look-up", action="store_true", help="do not take the prompt's KV from the cache")
    parser.add_argument(
        "--sink", type=whole, metavar="N", help="with --window: number of first tokens that are always kept (default: 4)"
    )
    parser.add_argument(
        "--window", type=whole, metavar="N", help="attend only to the sinks and the last N tokens (default: to all)"
    )
    parser.add_argument(
        "--reuse-hint",
        choices=("none", "soon"),
        default="",
        help="what is known of the next use of the KV: none, for a single question; soon, for a turn that comes for certain",
    )
    parser.add_argument(
        "--retain-ms",
        type=whole,
        default=0,
        metavar="MS",
        help="time within which the next turn is expected, which keeps its KV",
    )
    parser.add_argument("--cache-salt", default="", type=utf8, metavar="TEXT", help="share KV with prompts of this salt alone")


def _add_token_flags(parser: argparse.ArgumentParser) -> None:
    """What is said of single tokens."""
    several = partial(parser.add_argument, action="append", default=[])
    several("--logit-bias", type=bias, metavar="ID=X", help="added to a token's logit, -100 to 100; may be repeated")
    several("--bad-word", dest="bad_words", type=filled, metavar="TEXT", help="must not come in the output; may be repeated")
    several(
        "--bad-token-ids",
        dest="bad_words_token_ids",
        type=token_list,
        metavar="ID,ID",
        help="tokens that must not come one behind the other; may be repeated",
    )
    parser.add_argument(
        "--allowed-token-ids", type=token_list, default=[], metavar="ID,ID", help="the only tokens that may come (default: all)"
    )
    parser.add_argument("--keep-special-tokens", action="store_true", help="show the text of special tokens, too")


def wrong_together(args: argparse.Namespace) -> str | None:
    """Why these flags cannot be given together."""
    if args.beams is None and (args.length_penalty is not None or args.early_stopping):
        return "--length-penalty and --early-stopping go with --beams"
    drawing = next((name for name in _DRAWING if getattr(args, name) is not None), None)
    if args.beams is not None and drawing is not None:
        return f"--beams searches, and draws no tokens: leave out --{drawing.replace('_', '-')}"
    if args.sink is not None and args.window is None:
        return "--sink goes with --window"
    if args.prompt is not None and args.prompt_file is not None:
        return "give a prompt, or --prompt-file PATH, not both"
    if sum(constraint is not None for constraint in (args.json_schema, args.regex, args.choice)) > 1:
        return "give one of --json-schema, --regex and --choice"
    if args.thought is not None and all(one is None for one in (args.json_schema, args.regex, args.choice)):
        return "--thought goes with --json-schema, --regex or --choice"
    return None


def make_options(args: argparse.Namespace) -> GenerateOptions:
    chosen = {field.name: getattr(args, field.name) for field in fields(Sampling) if hasattr(args, field.name)}
    for name in ("stop", "bad_words", "bad_words_token_ids", "allowed_token_ids"):
        chosen[name] = tuple(getattr(args, name))
    chosen["logit_bias"], chosen["min_tokens"] = dict(args.logit_bias), args.min_tokens or 0
    chosen["choices"] = None if args.choice is None else tuple(args.choice)
    chosen["thought"] = None if args.thought is None else Thought(*args.thought)
    options = {field.name: getattr(args, field.name) for field in fields(GenerateOptions) if hasattr(args, field.name)}
    options["beam_search"] = None if args.beams is None else BeamSearch(args.beams, args.length_penalty, args.early_stopping)
    options["metadata"] = dict(args.metadata)
    return GenerateOptions(**options, retention=_retention(args), sampling=Sampling(**chosen, num_logprobs=args.logprobs))


def _retention(args: argparse.Namespace) -> Retention | None:
    if args.window is None:
        return None
    return Retention(_DEFAULT_SINK if args.sink is None else args.sink, args.window)
