"""Beam search for text: stop strings end lists as transformers' do, and the text ends before them."""

import asyncio

from kvkeeper.engine_service.compute.served_model import load_served_model
from kvkeeper.engine_service.config import EngineConfig
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from tests.support.processes.service_pair import Services
from tests.support.reference.beam_reference import SearchCase, references

PROMPTS = ("def fibonacci(n):", "class Stack:\n    def push(self, item):")
STOPS = (("(n)\n", "zzz"), ("(item)", ".push.", "self.push(self.push))"))


async def test_stop_strings_end_lists_and_are_not_told(world: Services) -> None:
    await world.start_cache(num_blocks=200, pool_memory=64 << 20)
    model = load_served_model(EngineConfig(model=str(DEMO_MODEL_DIR), progress=False, block_size=16))
    client = await world.client(await world.start_engine(model, block_size=16))
    prompts = [await client.tokenize(text) for text in PROMPTS]
    cases = [SearchCase(prompt, 4, 4, 20, stop=stops) for prompt, stops in zip(prompts, STOPS, strict=True)]
    expected = await asyncio.to_thread(references, DEMO_MODEL_DIR, cases)
    reasons = []
    for case, lists in zip(cases, expected, strict=True):
        chunks = [chunk async for chunk in client.generate(case.prompt, case.options)]
        assert [chunk.token_ids for chunk in chunks] == [found.token_ids for found in lists]
        for chunk, found in zip(chunks, lists, strict=True):
            assert chunk.cumulative_logprob is not None
            assert abs(chunk.cumulative_logprob - found.logprob) < 1e-3
            whole = await client.detokenize(chunk.token_ids)
            first = min((at for stop in case.stop if (at := whole.find(stop)) >= 0), default=None)
            assert chunk.text == whole[:first]
            assert (chunk.finish_reason == "stop") == (first is not None)
            reasons.append(chunk.finish_reason)
    assert {*reasons} == {"stop", "length"}, "or this test shows nothing"
