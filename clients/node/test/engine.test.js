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
  const sampling = { maxTokens: 8, temperature: 0, ignoreEos: true };
  const chunks = [];
  for await (const chunk of client.generate('def fibonacci(n):', { sampling })) chunks.push(chunk);
  const ids = chunks.flatMap((chunk) => chunk.tokenIds);
  assert.equal(ids.length, 8);
  assert.equal(chunks.at(-1).usage.newTokens, 8);
  assert.equal(chunks.at(-1).usage.promptTokens, (await client.tokenize('def fibonacci(n):')).length);
  assert.deepEqual(
    chunks.map((chunk) => chunk.finishReason).filter((reason) => reason !== null),
    ['length'],
  );
});

test('leaving the loop ends the request', async () => {
  const earlier = (await client.stats()).numCancelledRequests;
  const sampling = { maxTokens: 200, ignoreEos: true };
  for await (const chunk of client.generate('x', { sampling })) {
    assert.equal(chunk.index, 0);
    break;
  }
  let stats;
  do {
    stats = await client.stats();
  } while (stats.numRunningRequests + stats.numWaitingRequests > 0);
  assert.equal(stats.numCancelledRequests, earlier + 1);
});

test('a conversation and metadata are bounded by name', async () => {
  const take = async (options) => {
    for await (const chunk of client.generate('x', { sampling: { maxTokens: 1 }, ...options })) assert.ok(chunk);
  };
  await take({ sessionId: 's'.repeat(64), metadata: { user: 'ada' } });
  await assert.rejects(take({ sessionId: 's'.repeat(65) }), (error) => error.metadata.field === 'session_id');
  await assert.rejects(take({ cacheSalt: 's'.repeat(257) }), (error) => error.metadata.field === 'cache_salt');
  await assert.rejects(take({ metadata: { user: 'a'.repeat(257) } }), (error) => error.metadata.field === 'metadata');
});

test('what is said of single tokens takes effect', async () => {
  const sampling = { maxTokens: 4, temperature: 0, minTokens: 4, logitBias: { 20: 100, 21: 99 }, badWordsTokenIds: [[20, 20]] };
  const tokenIds = [];
  for await (const chunk of client.generate('x', { sampling })) tokenIds.push(...chunk.tokenIds);
  assert.deepEqual(tokenIds, [20, 21, 20, 21]);
});

test('a wrong sampling field is refused by name', async () => {
  const drain = async () => {
    for await (const chunk of client.generate('x', { sampling: { topP: 2 } })) assert.fail(chunk);
  };
  await assert.rejects(drain(), (error) => error instanceof KvkeeperError && error.reason === 'INVALID_FIELD');
});

test('token ids are a prompt, too, and text comes back from them', async () => {
  const ids = await client.tokenize('def fibonacci(n):');
  const sampling = { maxTokens: 2, temperature: 0, ignoreEos: true };
  const texts = [];
  for (const prompt of ['def fibonacci(n):', ids, Int32Array.from(ids)]) {
    let text = '';
    for await (const chunk of client.generate(prompt, { sampling })) text += chunk.text;
    texts.push(text);
  }
  assert.equal(new Set(texts).size, 1);
  assert.equal(await client.detokenize(ids), 'def fibonacci(n):');
  await assert.rejects(client.detokenize(ids, { keepSpecial: true }), /keepSpecial/);
});

test('a request is submitted, asked for, listed and cancelled', async () => {
  const sampling = { maxTokens: 4, temperature: 0, ignoreEos: true, numLogprobs: 1 };
  const id = await client.submit('x', { sampling, sessionId: 'talk', metadata: { user: 'ada' } });
  const done = await client.result(id, { waitMs: 60_000 });
  assert.deepEqual([done.state, done.usage.newTokens, done.error], ['completed', 4, null]);
  assert.deepEqual([done.request.sessionId, done.request.metadata], ['talk', { user: 'ada' }]);
  const [output] = done.outputs;
  assert.deepEqual([output.finishReason, output.tokenIds.length, output.logprobs.length], ['length', 4, 4]);
  await assert.rejects(client.cancel(id), { name: 'KvkeeperError', reason: 'UNKNOWN_REQUEST' });

  const long = await client.submit('x', { sampling: { maxTokens: 2000, ignoreEos: true }, requestId: 'long', sessionId: 'talk' });
  assert.equal(long, 'long');
  assert.deepEqual((await client.listRequests({ sessionId: 'talk' })).map((row) => row.requestId), ['long']);
  await client.cancel('long');
  assert.equal((await client.result('long', { waitMs: 60_000 })).state, 'cancelled');
});

test('a submitted request is followed, as often as one likes', async () => {
  const sampling = { maxTokens: 8, temperature: 0, ignoreEos: true };
  let wanted = '';
  for await (const chunk of client.generate('def fibonacci(n):', { sampling })) wanted += chunk.text;
  const id = await client.submit('def fibonacci(n):', { sampling });
  for (const count of [1, 2]) {
    let text = '';
    let usage = null;
    for await (const chunk of client.follow(id)) {
      text += chunk.text;
      usage = chunk.usage;
    }
    assert.deepEqual([count, text, usage.newTokens], [count, wanted, 8]);
  }
  const unknown = async () => {
    for await (const chunk of client.follow('nothing', { reconnectMs: 0 })) assert.fail(chunk);
  };
  await assert.rejects(unknown(), { name: 'KvkeeperError', reason: 'UNKNOWN_REQUEST' });
});

test('an output is one of the choices', async () => {
  let text = '';
  for await (const chunk of client.generate('x', { sampling: { choices: ['yes', 'no'] } })) text += chunk.text;
  assert.match(text, /^(yes|no)$/);
});

test('a conversation is rendered by the chat template of the model', async () => {
  const messages = [{ role: 'user', content: [{ type: 'text', text: 'hello' }] }];
  const sampling = { maxTokens: 3, temperature: 0 };
  const tokensOf = async (chunks) => {
    const ids = [];
    for await (const chunk of chunks) ids.push(...chunk.tokenIds);
    return ids;
  };
  const asked = await tokensOf(client.chat(messages, { sampling }));
  assert.deepEqual(asked, await tokensOf(client.generate('hello\n', { sampling })));
});

test('the model, the counts and the last iteration are told in camelCase', async () => {
  assert.equal((await client.model()).maxTokensPerSequence > 0, true);
  assert.equal((await client.stats()).numNewTokens > 0, true);
  assert.equal(typeof (await client.iterationPlan()).plan, 'string');
});

test('a prompt of 15 MB is refused with the limit', async () => {
  await assert.rejects(client.tokenize('x'.repeat(15e6)), (error) => Number(error.metadata.limit) > 1e6);
});
