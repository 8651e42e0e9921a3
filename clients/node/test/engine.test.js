/** Generation against a live engine service, whose address is in KVKEEPER_ENGINE_LISTEN. */
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import { EngineClient, KvkeeperError } from '../index.js';

let client;

before(() => {
  client = new EngineClient(process.env.KVKEEPER_ENGINE_LISTEN);
});

after(() => client.close());

test('Generate streams text and ends with usage', async () => {
  const sampling = { max_tokens: 8, temperature: 0, ignore_eos: true };
  const pieces = [];
  for await (const piece of client.generate('def fibonacci(n):', { sampling })) pieces.push(piece);
  const ids = pieces.flatMap((piece) => piece.token_ids);
  assert.equal(ids.length, 8);
  assert.equal(pieces.at(-1).usage.new_tokens, 8);
  assert.equal(pieces.at(-1).usage.prompt_tokens, (await client.tokenize('def fibonacci(n):')).length);
  assert.deepEqual(
    pieces.map((piece) => piece.finish_reason).filter((reason) => reason !== 'FINISH_REASON_UNSPECIFIED'),
    ['FINISH_REASON_LENGTH'],
  );
});

test('leaving the loop ends the request', async () => {
  const earlier = (await client.stats()).num_cancelled_requests;
  const sampling = { max_tokens: 200, ignore_eos: true };
  for await (const piece of client.generate('x', { sampling })) {
    assert.equal(piece.index, 0);
    break;
  }
  let stats;
  do {
    stats = await client.stats();
  } while (stats.num_running_requests + stats.num_waiting_requests > 0);
  assert.equal(stats.num_cancelled_requests, earlier + 1);
});

test('a conversation and metadata are bounded by name', async () => {
  const take = async (options) => {
    for await (const piece of client.generate('x', { sampling: { max_tokens: 1 }, ...options })) assert.ok(piece);
  };
  await take({ sessionId: 's'.repeat(64), metadata: { user: 'ada' } });
  await assert.rejects(take({ sessionId: 's'.repeat(65) }), (error) => error.metadata.field === 'session_id');
  await assert.rejects(take({ metadata: { user: 'a'.repeat(257) } }), (error) => error.metadata.field === 'metadata');
});

test('a wrong sampling field is refused by name', async () => {
  const drain = async () => {
    for await (const piece of client.generate('x', { sampling: { top_p: 2 } })) assert.fail(piece);
  };
  await assert.rejects(drain(), (error) => error instanceof KvkeeperError && error.reason === 'INVALID_FIELD');
});
