/** The life of a sequence against a live cache service, whose address is in KVKEEPER_CACHE_LISTEN. */
import assert from 'node:assert/strict';
import { after, before, test } from 'node:test';
import grpc from '@grpc/grpc-js';
import { CacheClient, KvkeeperError } from '../index.js';

const SPEC = {
  modelId: 'node-client-test',
  revision: '1',
  numLayers: 2,
  numKvHeads: 2,
  headDim: 4,
  kvDtype: 'KV_DTYPE_FLOAT32',
  blockSize: 4,
  layout: 'KV_LAYOUT_BLOCK_MAJOR',
};
const TOKEN_BYTES = SPEC.numKvHeads * SPEC.headDim * 4;
const PROMPT = [11, 12, 13, 14, 15, 16];

let client;
let session;

before(async () => {
  client = new CacheClient(process.env.KVKEEPER_CACHE_LISTEN);
  session = await client.openSession(SPEC, { clientName: 'node-test' });
});

after(async () => {
  await session.close();
  client.close();
});

/** Bytes that differ for every layer, token and side. */
function bytes(layerIdx, firstTokenIdx, numTokens, side) {
  const data = Buffer.alloc(numTokens * TOKEN_BYTES);
  for (let position = 0; position < data.length; position += 1) {
    data[position] = (layerIdx * 101 + side * 53 + firstTokenIdx * TOKEN_BYTES + position) % 251;
  }
  return data;
}

function chunk(layerIdx, firstTokenIdx, numTokens) {
  return {
    layerIdx,
    firstTokenIdx,
    key: bytes(layerIdx, firstTokenIdx, numTokens, 0),
    value: bytes(layerIdx, firstTokenIdx, numTokens, 1),
  };
}

/** K and V of each layer, chunks joined. */
function joined(chunks) {
  return [0, 1].map((layerIdx) => {
    const own = chunks.filter((part) => part.layerIdx === layerIdx);
    return {
      key: Buffer.concat(own.map((part) => part.key)),
      value: Buffer.concat(own.map((part) => part.value)),
    };
  });
}

const written = (numTokens) => [0, 1].map((layerIdx) => ({
  key: bytes(layerIdx, 0, numTokens, 0),
  value: bytes(layerIdx, 0, numTokens, 1),
}));

test('a sequence is created, extended, written, committed, forked, read back and released', async () => {
  assert.equal(await session.createSequence(1, PROMPT), 0);
  assert.equal((await session.get(1)).state, 'SEQUENCE_STATE_WAITING');

  const extended = await session.extend(1, 7);
  assert.equal(extended.state, 'SEQUENCE_STATE_RUNNING');
  assert.equal(extended.numReservedTokens >= 7, true);
  assert.equal(extended.blockTable.length, 2);
  assert.equal(extended.blockTable.includes(0), false);

  const sent = await session.writeKv(1, [chunk(0, 0, 6), chunk(1, 0, 2), chunk(1, 2, 4)]);
  assert.equal(sent.numChunks, 3);
  assert.equal(sent.numBytes, 2 * 2 * 6 * TOKEN_BYTES);
  assert.equal((await session.commit(1, 6)).numCommittedTokens, 6);
  assert.deepEqual(joined(await session.readKv(1)), written(6));

  const child = await session.fork(1, 2);
  assert.equal(child.numCommittedTokens, 6);
  assert.deepEqual(child.blockTable, (await session.get(1)).blockTable.slice(0, 2));

  // The child goes on alone: its partial block is copied first, the parent's stays as it was.
  await session.extend(2, 7);
  await session.writeKv(2, [chunk(0, 6, 1), chunk(1, 6, 1)]);
  assert.equal((await session.commit(2, 7, 6, [99])).numTokens, 7);
  assert.deepEqual(joined(await session.readKv(2)), written(7));
  assert.notEqual((await session.get(2)).blockTable[1], (await session.get(1)).blockTable[1]);
  assert.deepEqual(joined(await session.readKv(1)), written(6));
  assert.deepEqual((await session.get(2, { includeTokens: true })).tokenIds, [...PROMPT, 99]);

  assert.deepEqual((await session.list()).map((row) => row.sequenceId), [1, 2]);
  assert.equal((await session.truncate(2, 4)).numTokens, 4);
  const other = await client.openSession(SPEC);
  const taken = await other.take(await session.handOff(2), 7);
  assert.deepEqual([taken.sequenceId, taken.numCommittedTokens, taken.blockTable.length], [7, 4, 1]);
  await assert.rejects(session.withdraw(2), { reason: 'UNKNOWN_SEQUENCE' });
  await other.close();
  assert.equal((await session.handOff(1)).length, 16);
  await session.withdraw(1);
  await session.release(1);
  assert.deepEqual(await session.list(), []);

  // What was committed stays cached: the same prompt finds its whole blocks.
  assert.equal(await session.createSequence(3, PROMPT), 4);
  assert.equal((await session.extend(3, 6)).numHitTokens, 4);
  await session.release(3);
});

test('several sequences are created in one call, and one that is refused leaves the others be', async () => {
  const [first, again, refused, last] = await session.createSequences([
    { sequenceId: 11, tokenIds: PROMPT },
    { sequenceId: 11, tokenIds: PROMPT },
    { sequenceId: 12, tokenIds: PROMPT, maxTokens: 1 },
    { sequenceId: 13, tokenIds: [7, 8], priority: 3 },
  ]);
  assert.equal(again.startNumber, first.startNumber);
  assert.equal(refused instanceof KvkeeperError, true);
  assert.deepEqual([refused.code, refused.reason], [grpc.status.INVALID_ARGUMENT, 'INVALID_FIELD']);
  assert.equal(refused.metadata.field, 'max_tokens');
  assert.equal(last.startNumber > first.startNumber, true);
  assert.equal((await session.get(13)).priority, 3);
  for (const sequenceId of [11, 13]) await session.release(sequenceId);
});

test('a refusal says what is needed to go on', async () => {
  await assert.rejects(session.release(77), (error) => {
    assert.equal(error instanceof KvkeeperError, true);
    assert.equal(error.reason, 'UNKNOWN_SEQUENCE');
    assert.deepEqual(error.metadata, { sequence_id: '77' });
    return true;
  });
});

test('a service that is down is UNAVAILABLE without a reason', async () => {
  const nobody = new CacheClient('127.0.0.1:1', { retryMs: 0 });
  await assert.rejects(nobody.stats(), { name: 'KvkeeperError', code: 14, reason: '' });
  nobody.close();
});
