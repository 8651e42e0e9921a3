"""What transformers' generate finds by beam search, to be compared with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from kvkeeper.client import BeamSearch, GenerateOptions, OutputChunk, Sampling
from tests.support.models.tiny_models import quiet_transformers


@dataclass(frozen=True)
class Found:
    """One list: its tokens with the one that ended it, if one did, and the sum of their log probabilities."""

    token_ids: tuple[int, ...]
    logprob: float


@dataclass(frozen=True)
class SearchCase:
    """A search and its prompt."""

    prompt: tuple[int, ...]
    num_beams: int
    num_returned: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    eos_token_ids: tuple[int, ...] = ()  # sent as stop token ids
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    @property
    def options(self) -> GenerateOptions:
        sampling = Sampling(
            max_tokens=self.max_tokens,
            repetition_penalty=self.repetition_penalty,
            stop_token_ids=self.eos_token_ids,
            stop=self.stop,
            ignore_eos=True,
            bad_words_token_ids=self.bad_words,
            logit_bias=dict(self.bias),
            min_tokens=self.min_tokens,
        )
        beams = BeamSearch(self.num_beams, self.length_penalty, self.early_stopping)
        return GenerateOptions(n=self.num_returned, beam_search=beams, sampling=sampling)


def references(folder: Path, cases: Sequence[SearchCase]) -> list[list[Found]]:
    """One answer per case, the best list first; float32."""
    with quiet_transformers():
        dtype = torch.float32
        network = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()
        network.generation_config.eos_token_id = None
        tokenizer = None
        if any(case.stop for case in cases):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        return [_search(network, tokenizer, case) for case in cases]


def _search(network: Any, tokenizer: Any, case: SearchCase) -> list[Found]:
    prompt = torch.tensor([case.prompt])
    out = network.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        num_beams=case.num_beams,
        num_return_sequences=case.num_returned,
        max_new_tokens=case.max_tokens,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        eos_token_id=list(case.eos_token_ids) or None,
        repetition_penalty=case.repetition_penalty,
        bad_words_ids=[list(word) for word in case.bad_words] or None,
        sequence_bias={(token_id,): amount for token_id, amount in case.bias} or None,
        min_new_tokens=case.min_tokens or None,
        stop_strings=list(case.stop) or None,
        tokenizer=tokenizer,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for tokens, score in zip(out.sequences[:, len(case.prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = [token for token in tokens if token >= 0]  # behind the end of a list is -1, or its end again
        end = next((place + 1 for place, token in enumerate(tokens) if token in case.eos_token_ids), len(tokens))
        found.append(Found(tuple(tokens[:end]), score * end**case.length_penalty))
    return found


def check_told(case: SearchCase, chunks: Sequence[OutputChunk], expected: Sequence[Found]) -> None:
    """The same lists in the same order, with the same sums; what ended one is not told."""
    wanted = []
    for found in expected:
        is_ended = found.token_ids[-1] in case.eos_token_ids
        wanted.append((found.token_ids[:-1] if is_ended else found.token_ids, "stop" if is_ended else "length"))
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == wanted, case
    assert [chunk.index for chunk in chunks] == list(range(case.num_returned))
    for chunk, found in zip(chunks, expected, strict=True):
        assert chunk.cumulative_logprob is not None
        assert abs(chunk.cumulative_logprob - found.logprob) < 2e-4, case
