/** Requests that cannot be: refused with a TypeError before anything is sent. No service runs here. */
import assert from 'node:assert/strict';
import { readFileSync, readdirSync } from 'node:fs';
import { after, test } from 'node:test';
import { CacheClient, EngineClient } from '../index.js';
import { checkedMessage } from '../lib/checked.js';
import { errorOf } from '../lib/errors.js';
import { CacheService, EngineService, requestTypeOf } from '../lib/protos.js';
import { Received } from '../lib/received.js';

const client = new EngineClient('127.0.0.1:1', { retryMs: 0 });
after(() => client.close());

const GENERATE = requestTypeOf('/kvkeeper.engine.v1.EngineService/Generate');
const image = [{ type: 'image_url', image_url: { url: 'x' } }];

const WRONG = [
  ['x', { maxTokens: 4 }, /^maxTokens: no such field; there are requestId, /],
  ['x', { sampling: { max_tokens: 4 } }, /^sampling\.max_tokens: no such field; did you mean maxTokens\?$/],
  ['x', { timeout_ms: 4 }, /^timeout_ms: no such field; did you mean timeoutMs\?$/],
  ['x', { sampling: { maxTokens: '4' } }, /^sampling\.maxTokens: an integer, not a string$/],
  ['x', { sampling: { maxTokens: 4.5 } }, /^sampling\.maxTokens: an integer, not 4\.5$/],
  ['x', { sampling: { maxTokens: 2 ** 31 } }, /^sampling\.maxTokens: 2147483648 is beyond int32$/],
  ['x', { sampling: { temperature: '0' } }, /^sampling\.temperature: a number, not a string$/],
  ['x', { sampling: { ignoreEos: 1 } }, /^sampling\.ignoreEos: a boolean, not a number$/],
  ['x', { sampling: { stop: 'end' } }, /^sampling\.stop: an array, not a string$/],
  ['x', { sampling: { stop: ['a', 7] } }, /^sampling\.stop\[1\]: a string, not a number$/],
  ['x', { sampling: { seed: 2n ** 63n } }, /^sampling\.seed: 9223372036854775808 is beyond 64 bits$/],
  ['x', { sampling: { regex: 'a', choices: ['b'] } }, /^sampling\.constraint: regex or choices, not both$/],
  ['x', { sampling: { logitBias: { 5: '1' } } }, /^sampling\.logitBias\.5: a number, not a string$/],
  ['x', { sampling: { logitBias: { a: 1 } } }, /^sampling\.logitBias\.a, its key: an integer, not NaN$/],
  ['x', { sampling: { logitBias: { '-1': 1 } } }, /^sampling\.logitBias\.-1, its key: -1 is beyond uint32$/],
  ['x', { sampling: { badWordsTokenIds: [[1], [-1]] } }, /^sampling\.badWordsTokenIds\[1\]\.ids\[0\]: -1 is beyond uint32$/],
  ['x', { sampling: [] }, /^sampling: an object, not an array$/],
  ['x', { metadata: { user: 7 } }, /^metadata\.user: a string, not a number$/],
  ['x', { retention: { sink: 4 } }, /^retention\.sink: no such field; there are numSinkTokens, numWindowTokens$/],
  ['x', { text: 'y' }, /^text: the prompt is the first argument$/],
  ['x', 'y', /^options: an object, not a string$/],
  [7, {}, /^a prompt is text, .* not a number$/],
  [undefined, {}, /^a prompt is text, .* not undefined$/],
  [{ role: 'user', content: 'x' }, {}, /^a prompt is text, .* not an Object$/],
  [['a', 'b'], {}, /^a prompt is text, .*; this array has a string in it$/],
  [[1.5], {}, /^tokenIds\.ids\[0\]: an integer, not 1\.5$/],
  [[-1], {}, /^tokenIds\.ids\[0\]: -1 is beyond uint32$/],
  [[{ role: 'user' }], {}, /^messages\[0\]\.content: a string or an array of text parts, not undefined$/],
  [[{ content: 'x' }], {}, /^messages\[0\]\.role: a string, not undefined$/],
  [[{ role: 'user', content: 'x', names: 'ada' }], {}, /^messages\[0\]: a message has role, content, name, .*, and no names$/],
  [[{ role: 'user', content: 'x', name: 7 }], {}, /^chat\.messages\[0\]\.name: a string, not a number$/],
  [[{ role: 'assistant', tool_calls: [{ type: 'custom' }] }], {}, /^messages\[0\]\.tool_calls\[0\]: only calls \{type: 'function', /],
  [[{ role: 'assistant', tool_calls: [{ function: {  arguments: 7 } }] }], {}, /^chat\.messages\[0\]\.toolCalls\[0\]\.arguments: a string, /],
  [{ messages: [{ role: 'user', content: 'x' }], tool: [] }, {}, /^chat\.tool: no such field; there are messages, tools, /],
  [{ messages: [{ role: 'user', content: 'x' }], tools: 7 }, {}, /^chat\.tools: a string, not a number$/],
  [[{ role: 'user', content: image }], {}, /^messages\[0\]\.content\[0\]: only parts \{type: 'text', text: string\} are taken$/],
  [[{ role: 'user', content: 'x' }, 7], {}, /^messages\[1\]: an object with role and content, not a number$/],
];

for (const [prompt, options, message] of WRONG) {
  test(`refused: ${JSON.stringify([prompt, options], (_, item) => (typeof item === 'bigint' ? String(item) : item))}`, async () => {
    assert.throws(() => client.generate(prompt, options), { name: 'TypeError', message });
    await assert.rejects(client.submit(prompt, options), TypeError);
  });
}

test('a conversation is messages, not something else', () => {
  assert.throws(() => client.chat('hello'), { name: 'TypeError', message: 'messages: an array, not a string' });
  assert.throws(() => client.chat([]), { name: 'TypeError', message: 'messages: one message or more' });
  assert.throws(() => client.chat([1, 2]), { name: 'TypeError', message: 'messages[0]: an object, not a number' });
});

test('what is right goes through as it is', () => {
  const request = {
    chat: { messages: [{ role: 'user', content: 'x' }] },
    sampling: { maxTokens: 4, seed: 7n, stopTokenIds: Uint32Array.of(1, 2), topP: undefined, choices: { texts: ['a'] }, logitBias: { 5: -1.5 } },
    metadata: { user: 'ada' },
    n: null,
  };
  assert.deepEqual(checkedMessage(GENERATE, request), {
    chat: { messages: [{ role: 'user', content: 'x' }] },
    sampling: { maxTokens: 4, seed: '7', stopTokenIds: [1, 2], choices: { texts: ['a'] }, logitBias: { 5: -1.5 } },
    metadata: { user: 'ada' },
  });
});

test('options of every other call are held to what there is, too', async () => {
  const cache = new CacheClient('127.0.0.1:1', { retryMs: 0 });
  await assert.rejects(cache.openSession({ model_id: 'm' }), { message: 'spec.model_id: no such field; did you mean modelId?' });
  await assert.rejects(cache.openSession({}, { ttl: 5 }), /^TypeError: options\.ttl: no such field; there are ttlMs, /);
  await assert.rejects(cache.openSession({}, { executor: 'ME' }), /^TypeError: executor: one of EXECUTOR_UNSPECIFIED, /);
  await assert.rejects(cache.openSession({ numLayers: '2' }), /^TypeError: spec\.numLayers: an integer, not a string$/);
  await assert.rejects(client.result('r', { wait: 1 }), /^TypeError: options\.wait: no such field; there are waitMs$/);
  await assert.rejects(client.tokenize(7), /^TypeError: text: a string, not a number$/);
  assert.throws(() => new EngineClient('127.0.0.1:1', { timeout: 5 }), /^TypeError: options\.timeout: no such field; /);
  assert.throws(() => new EngineClient(7411), { message: 'address: a string, not a number' });
  cache.close();
});

test('a message that is too large is told with its limit', () => {
  const told = (details) => errorOf({ code: 8, details });
  const error = told('SERVER: Received message larger than max (15000012 vs. 4194304)');
  assert.equal(
    error.message,
    'RESOURCE_EXHAUSTED INVALID_FIELD: the request has 15000012 bytes, and the service takes at most 4194304 at once',
  );
  assert.deepEqual(error.metadata, { field: 'request', requested: '15000012', limit: '4194304' });
  assert.match(told('Received message larger than max (9 vs 4)').message, /the answer has 9 bytes, and this client takes at most 4 at once$/);
});

test('what is received tells where another stream goes on', () => {
  const received = new Received('a');
  received.add({ requestId: 'a', index: 1, tokenIds: [4, 5], finishReason: 'FINISH_REASON_UNSPECIFIED' });
  received.add({ requestId: 'a', index: 0, tokenIds: [], finishReason: 'FINISH_REASON_STOP' });
  received.add({ requestId: 'a', index: 1, tokenIds: [6], finishReason: 'FINISH_REASON_UNSPECIFIED' });
  assert.deepEqual(received.rest(), {
    requestId: 'a',
    received: [{ index: 1, numTokens: 3, hasEnded: false }, { index: 0, numTokens: 0, hasEnded: true }],
  });
  received.move({ address: 'unix:/b', request_id: 'c' });
  assert.deepEqual([received.address, received.rest().requestId], ['unix:/b', 'c']);
});

test('every method of the protocol for clients has its call', () => {
  const folder = new URL('../lib/', import.meta.url);
  const source = readdirSync(folder).map((name) => readFileSync(new URL(name, folder), 'utf8')).join('');
  const amongEngines = ['HandOver', 'ConfirmHandOver', 'Prefill'];
  const otherForm = ['GenerateMany']; // of Generate, for clients with very many streams
  const forClients = [...Object.keys(EngineService.service), ...Object.keys(CacheService.service)];
  assert.deepEqual(forClients.filter((name) => !amongEngines.includes(name) && !otherForm.includes(name) && !source.includes(`'${name}'`)), []);
});
