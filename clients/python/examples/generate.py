"""Continue a prompt with an engine: a stream of tokens first, then three continuations at once.

    python generate.py [ADDRESS]

The address is that of an engine service, which `kvkeeper up` starts; the default is 127.0.0.1:7411.
"""

import sys

from kvkeeper.client import EngineClient, GenerateOptions, KvkeeperError, Sampling, targets

PROMPT = "def fibonacci(n):  # the first n Fibonacci numbers, smallest first"


def main(address: str) -> None:
    with EngineClient(address) as client:
        # A stream. Leaving the loop, or the end of the `with` block, cancels the request.
        greedy = Sampling(max_tokens=16, temperature=0.0)
        with client.generate(PROMPT, GenerateOptions(sampling=greedy)) as chunks:
            for chunk in chunks:
                print(chunk.text, end="", flush=True)
        print()

        # Three continuations: the prompt is computed once, then forked. This prompt is in the cache already.
        sampled = Sampling(max_tokens=16, temperature=0.8, seed=7)
        texts = ["", "", ""]
        with client.generate(PROMPT, GenerateOptions(n=3, sampling=sampled)) as chunks:
            for chunk in chunks:
                texts[chunk.index] += chunk.text
        for text in texts:
            print(repr(text))
        usage = chunks.usage
        assert usage is not None, "a request that ends without an error tells its usage"
        print(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens came from the cache")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else targets.ENGINE)
    except KvkeeperError as error:
        sys.exit(str(error))
