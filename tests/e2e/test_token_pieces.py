"""What a client that shows tokens asks: those of a conversation, the bytes of each, and the model's chat template."""

import json

import pytest

from kvkeeper.client import AsyncEngineClient, Chat, GenerateOptions, KvkeeperError, Sampling
from kvkeeper.engine.v1 import engine_service_pb2 as pb
from kvkeeper.engine_service.compute.served_model import ServedModel
from kvkeeper.engine_service.model.demo_model import DEMO_MODEL_DIR
from kvkeeper.engine_service.outputs.conversation import Chat as EngineChat
from kvkeeper.engine_service.outputs.tokenizer import Tokenizer
from tests.support.processes.service_pair import Services

CHAT = Chat([{"role": "user", "content": "héllo 世界"}])


@pytest.fixture
async def client(world: Services, demo_model: ServedModel) -> AsyncEngineClient:
    await world.start_cache()
    return await world.client(await world.start_engine(demo_model, block_size=16))


async def test_a_conversation_has_the_tokens_that_generate_gives_it(client: AsyncEngineClient) -> None:
    ids = await client.tokenize(CHAT)
    assert list(ids) == Tokenizer.load(DEMO_MODEL_DIR).encode_chat(engine_chat())
    async with client.generate(CHAT, GenerateOptions(sampling=Sampling(max_tokens=1))) as generation:
        _ = [chunk async for chunk in generation]
        assert generation.usage is not None
        assert generation.usage.prompt_tokens == len(ids)


def engine_chat() -> EngineChat:
    return EngineChat([dict(message) for message in CHAT.messages])


async def test_pieces_are_the_bytes_of_the_text(client: AsyncEngineClient) -> None:
    text = "héllo 世界 🦊 x"
    ids = await client.tokenize(text)
    pieces = await client.pieces(ids)
    assert len(pieces) == len(ids)
    assert b"".join(pieces).decode() == text
    assert any(piece == b"\xc3" for piece in pieces), "one is a part of a character"


async def test_the_piece_of_a_control_token_is_its_name(client: AsyncEngineClient) -> None:
    (eos,) = (await client.model()).eos_token_ids
    assert await client.pieces([eos]) == (b"<|endoftext|>",)


async def test_the_chat_template_is_the_folders(client: AsyncEngineClient) -> None:
    settings = json.loads((DEMO_MODEL_DIR / "tokenizer_config.json").read_text())
    assert (await client.model()).chat_template == settings["chat_template"] != ""


async def test_what_cannot_be_asked_is_refused(client: AsyncEngineClient) -> None:
    for asked in (client.pieces([1] * 4097), client.pieces([1 << 20]), client.tokenize(Chat([]))):
        with pytest.raises(KvkeeperError) as error:
            await asked
        assert error.value.reason in ("INVALID_FIELD", "WRONG_TOKEN_ID")
    both = pb.TokenizeRequest(text="x", chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")]))
    with pytest.raises(KvkeeperError, match="not together"):
        await client._transport.call_by_name("Tokenize", both)
