/** Prefixes, blocks, events and steps against a live cache service, whose address is in KVKEEPER_CACHE_LISTEN. */
import assert from 'node:assert/strict';
import { readFileSync, readdirSync } from 'node:fs';
import { after, before, test } from 'node:test';
import { CacheClient } from '../index.js';
import { CacheService } from '../lib/protos.js';

const SPEC = {
  modelId: 'node-client-calls',
  numLayers: 1,
  numKvHeads: 1,
  headDim: 4,
  kvDtype: 'KV_DTYPE_FLOAT32',
  blockSize: 4,
  layout: 'KV_LAYOUT_BLOCK_MAJOR',
};
const PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19];

let client;

before(() => {
  client = new CacheClient(process.env.KVKEEPER_CACHE_LISTEN);
});

after(() => client.close());

test('every method of the protocol has its call', () => {
  const folder = new URL('../lib/', import.meta.url);
  const source = readdirSync(folder).map((name) => readFileSync(new URL(name, folder), 'utf8')).join('');
  assert.deepEqual(Object.keys(CacheService.service).filter((name) => !source.includes(`'${name}'`)), []);
});

test('a prefix is stored, explained, pinned, watched and cleared', async () => {
  const session = await client.openSession(SPEC);
  const before = await session.explainMatch(PROMPT);
  assert.deepEqual([before.numMatchedTokens, before.end], [0, 'MATCH_END_NEVER_STORED']);
  const events = session.watchEvents({ includeTokenIds: true });
  assert.equal((await events.next()).value.kind, 'EVENT_KIND_SNAPSHOT_END');

  await session.createSequence(1, PROMPT);
  await session.extend(1, 9);
  await session.commit(1, 9);
  const { value: stored } = await events.next();
  assert.deepEqual([stored.kind, stored.revision, stored.blockNames.length], ['EVENT_KIND_STORED', 2, 2]);
  assert.deepEqual(stored.parentNames[1], stored.blockNames[0]);
  assert.deepEqual(Array.from({ length: 8 }, (_, place) => stored.tokenIds.readInt32LE(4 * place)), PROMPT.slice(0, 8));

  const match = await session.matchPrefix(PROMPT);
  assert.equal(match.numMatchedTokens, 8);
  const block = await session.getBlock(match.blockIds[0]);
  assert.deepEqual([block.state, block.numReferences, block.indexed], ['BLOCK_STATE_REFERENCED', 1, true]);
  assert.equal((await session.explainMatch(PROMPT)).end, 'MATCH_END_PARTIAL_BLOCK');
  assert.equal((await session.checkAdmission({ tokenIds: PROMPT })).verdict, 'ADMISSION_VERDICT_NOW');

  const pin = await session.pinPrefix(PROMPT, 60_000);
  assert.equal(pin.numPinnedTokens, 8);
  await session.release(1);
  const numFree = session.pool.numBlocks - 1;
  assert.equal((await session.evictBlocks({ numFreeBlocks: numFree })).numEvictedBlocks, 0);
  await session.unpinPrefix(pin.pinId);
  await assert.rejects(session.unpinPrefix(pin.pinId), { reason: 'UNKNOWN_PIN' });
  const hint = { tokenIds: PROMPT, reuseHint: 'REUSE_HINT_SOON' };
  assert.deepEqual(await session.hintPrefixes([hint, { tokenIds: PROMPT, tenant: 'other' }]), [8, 0]);
  assert.equal((await session.getBlock(match.blockIds[1])).reuseHint, 'REUSE_HINT_SOON');
  assert.equal((await session.evictBlocks({ numFreeBlocks: numFree })).numEvictedBlocks, 2);
  assert.equal((await events.next()).value.kind, 'EVENT_KIND_REMOVED');
  await events.return();
  assert.equal((await session.clearPrefixCache()).numForgottenBlocks, 0);
  assert.deepEqual((await client.checkInvariants()).violations, []);
  await session.close();
});

test('steps go one by one and on a stream, numbers in and out', async () => {
  const session = await client.openSession(SPEC, { executor: 'EXECUTOR_ENGINE' });
  await session.createSequence(2 ** 40, PROMPT);
  const column = [2 ** 40];
  const started = await session.step({
    startSequenceIds: column, startMaxNewTokens: [100], startMaxHitTokens: [100],
  });
  assert.deepEqual([started.startResults, started.startNumBlocks], [[1], [3]]);
  assert.equal(started.startBlockIds.length, 3);

  const stream = session.streamSteps();
  const grown = await stream.step({
    commitSequenceIds: column,
    commitNumTokens: [9],
    commitNumNewTokens: [1],
    commitTokenIds: [20],
    reserveSequenceIds: Float64Array.from(column),
    reserveMinTokens: [13],
    reserveMaxTokens: [13],
  });
  assert.deepEqual([grown.stepId, grown.reserveNumReservedTokens, grown.newBlockIds.length], [2, [13], 1]);
  assert.deepEqual((await session.get(column[0], { includeTokens: true })).tokenIds, [...PROMPT, 20]);
  await assert.rejects(stream.step({ releaseSequenceIds: [77] }), { reason: 'UNKNOWN_SEQUENCE' });
  await assert.rejects(stream.step({}), { reason: 'UNKNOWN_SEQUENCE' }); // a failed step ends the stream

  const again = session.streamSteps();
  await again.step({ releaseSequenceIds: column });
  again.end();
  assert.equal(session.stepId, 3);
  assert.deepEqual(await session.list(), []);
  await session.close();
});

test('a sequence is changed, and the logits behind a prompt make it a hit whole', async () => {
  const session = await client.openSession({ ...SPEC, revision: 'logits' });
  const prompt = PROMPT.slice(0, 8);
  const retention = { numSinkTokens: 4, numWindowTokens: 100 };
  await session.createSequence(1, prompt, { retention, retainMs: 60_000 });
  await session.extend(1, 8);
  await session.commit(1, 8);
  assert.equal((await session.get(1)).reuseHint, 'REUSE_HINT_SOON');
  const changed = await session.update(1, {
    priority: 7,
    retention: { ...retention, numWindowTokens: 90 },
    reuseHint: 'REUSE_HINT_NONE',
  });
  assert.deepEqual([changed.priority, changed.retention.numWindowTokens], [7, 90]);
  assert.equal(changed.reuseHint, 'REUSE_HINT_NONE');
  assert.deepEqual((await session.selectVictims({ policy: 'VICTIM_POLICY_LRU' })).sequenceIds, [1]);
  await session.extend(1, 16); // two blocks more than the known tokens need
  const collected = await session.collectGarbage();
  assert.deepEqual([collected.numTrimmedBlocks, collected.numFreedBlocks], [2, 2]);
  const logits = Float32Array.from([1.5, -2.25, 0]);
  await session.storeLogits(1, 8, logits);
  await session.release(1);
  assert.equal((await session.explainMatch(prompt)).numHitTokens, 8);
  await session.close();

  const engine = await client.openSession({ ...SPEC, revision: 'logits' }, { executor: 'EXECUTOR_ENGINE' });
  await engine.createSequence(2, prompt);
  const started = await engine.step({ startSequenceIds: [2], startMaxNewTokens: [1], startMaxHitTokens: [8] });
  assert.deepEqual([started.startNumHitTokens, started.startHasLogits], [[8], [1]]);
  assert.deepEqual(await engine.readLogits(2), logits);
  await assert.rejects(engine.readLogits(3), { reason: 'UNKNOWN_SEQUENCE' });
  await engine.close();
});
