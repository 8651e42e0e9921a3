"""A gateway's Generate as the request of ours that means the same.

In its protocol a sampling field that is absent or 0 means none, not the model's default, which the gateway has learned by
GetModelInfo and put in itself. A default for which the protocol has no field applies. An absent max_tokens means as many as
fit. What this engine has none of is refused: no field is ignored in silence. Ids of a gateway are longer than ours may be, so a
digest stands for those.
"""

import hashlib
from collections.abc import Callable, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from kvkeeper.engine.v1 import engine_service_pb2 as own

from ...values.errors import InvalidField, NotImplementedYet

_MAX_ID_CHARS = 64
_ANY_OBJECT = '{"type": "object"}'
_MAX_INT32 = 2**31 - 1


def own_id(request_id: str) -> str:
    """The id under which a request of the gateway is known here."""
    return request_id if len(request_id) <= _MAX_ID_CHARS else hashlib.sha256(request_id.encode()).hexdigest()


def own_request(message: pb.GenerateRequest) -> own.GenerateRequest:
    """Ours, without the prompt. Raises InvalidField, NotImplementedYet."""
    _refuse_unknown(message)
    request = own.GenerateRequest(request_id=own_id(message.request_id), n=max(1, _int32(message.sampling_params.n, "n")))
    request.sampling.CopyFrom(own_sampling(message.sampling_params))
    return request


def fill_prompt(request: own.GenerateRequest, prompt: Sequence[int], max_len: int) -> None:
    """Put the prompt's tokens into ours, and as many new ones as fit where none are named. max_len: of the longest sequence."""
    request.token_ids.ids.extend(prompt)
    if not request.sampling.HasField("max_tokens"):
        request.sampling.max_tokens = max(1, max_len - len(prompt))


def require_only_rank(field: str, rank: int) -> None:
    """An engine is one rank of data parallelism, number 0. Raises InvalidField for another one."""
    if rank:
        raise InvalidField(f"{field}: 0, the only one, not {rank}", field=field, limit=0)


def own_sampling(params: pb.SamplingParams) -> own.SamplingParams:
    """Ours, with every field of the protocol that a model's defaults would fill. Raises InvalidField, NotImplementedYet."""
    if any(token_id < 0 for token_id in params.logit_bias):
        raise InvalidField("logit_bias: token ids of 0 or more", field="logit_bias", limit=0)
    if params.HasField("truncate_prompt_tokens"):
        raise NotImplementedYet("truncate_prompt_tokens: prompts are taken whole", feature="truncate_prompt_tokens")
    sampling = own.SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=_int32(params.top_k, "top_k"),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        min_tokens=_int32(params.min_tokens, "min_tokens"),
        logit_bias=params.logit_bias,
    )
    if params.HasField("max_tokens"):
        sampling.max_tokens = _int32(params.max_tokens, "max_tokens")
    if params.HasField("seed"):
        sampling.seed = params.seed
    if params.HasField("logprobs"):
        sampling.num_logprobs = params.logprobs
    if params.HasField("prompt_logprobs"):
        sampling.num_prompt_logprobs = params.prompt_logprobs
    if (kind := params.WhichOneof("constraint")) is not None:
        _constrain(sampling, params, kind)
    return sampling


def _constrain(sampling: own.SamplingParams, params: pb.SamplingParams, kind: str) -> None:
    if kind == "json_schema":
        sampling.json_schema = params.json_schema
    elif kind == "regex":
        sampling.regex = params.regex
    elif kind == "choice":
        sampling.choices.texts.extend(params.choice.choices)
    elif kind == "json_object" and params.json_object:
        sampling.json_schema = _ANY_OBJECT
    elif kind != "json_object":
        raise NotImplementedYet(f"{kind}: not served; json_schema, regex, choice and json_object are", feature=kind)


_UNKNOWN: dict[str, Callable[[pb.GenerateRequest], bool]] = {
    "mm_inputs": lambda message: message.HasField("mm_inputs") or bool(message.extra_mm_inputs),
    "media_refs": lambda message: message.HasField("media_refs"),
    "kv_transfer_params": lambda message: message.HasField("kv_transfer_params") or message.HasField("kv_transfer_params_json"),
}


def _refuse_unknown(message: pb.GenerateRequest) -> None:
    for name, is_there in _UNKNOWN.items():
        if is_there(message):
            raise NotImplementedYet(f"{name}: not served", feature=name)
    require_only_rank("data_parallel_rank", message.data_parallel_rank)
    if message.WhichOneof("input") is None:
        raise InvalidField("tokenized: a prompt is needed", field="tokenized")


def _int32(value: int, name: str) -> int:
    """Their numbers go up to 2^32, ours to 2^31. Raises InvalidField."""
    if value > _MAX_INT32:
        raise InvalidField(f"{name}: at most {_MAX_INT32}", field=name, limit=_MAX_INT32)
    return value
