/** Prefixes, blocks, events and steps against a live cache service, whose address is in KVKEEPER_CACHE_LISTEN. */
import assert from 'node:assert/strict';
import { readFileSync, readdirSync } from 'node:fs';
import { after, before, test } from 'node:test';
import { CacheClient } from '../index.js';
import { CacheService } from '../lib/protos.js';

const SPEC = {
  model_id: 'node-client-calls',
  num_layers: 1,
  num_kv_heads: 1,
  head_dim: 4,
  kv_dtype: 'KV_DTYPE_FLOAT32',
  block_size: 4,
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
  assert.deepEqual([before.num_matched_tokens, before.end], [0, 'MATCH_END_NEVER_STORED']);
  const events = session.watchEvents();
  assert.equal((await events.next()).value.kind, 'EVENT_KIND_SNAPSHOT_END');

  await session.createSequence(1, PROMPT);
  await session.extend(1, 9);
  await session.commit(1, 9);
  const { value: stored } = await events.next();
  assert.deepEqual([stored.kind, stored.revision, stored.block_names.length], ['EVENT_KIND_STORED', 2, 2]);
  assert.deepEqual(stored.parent_names[1], stored.block_names[0]);

  const match = await session.matchPrefix(PROMPT);
  assert.equal(match.num_matched_tokens, 8);
  const block = await session.getBlock(match.block_ids[0]);
  assert.deepEqual([block.state, block.num_references, block.indexed], ['BLOCK_STATE_REFERENCED', 1, true]);
  assert.equal((await session.explainMatch(PROMPT)).end, 'MATCH_END_PARTIAL_BLOCK');
  assert.equal((await session.checkAdmission({ token_ids: PROMPT })).verdict, 'ADMISSION_VERDICT_NOW');

  const pin = await session.pinPrefix(PROMPT, 60_000);
  assert.equal(pin.num_pinned_tokens, 8);
  await session.release(1);
  const numFree = session.pool.num_blocks - 1;
  assert.equal((await session.evictBlocks({ num_free_blocks: numFree })).num_evicted_blocks, 0);
  await session.unpinPrefix(pin.pin_id);
  await assert.rejects(session.unpinPrefix(pin.pin_id), { reason: 'UNKNOWN_PIN' });
  assert.equal((await session.evictBlocks({ num_free_blocks: numFree })).num_evicted_blocks, 2);
  assert.equal((await events.next()).value.kind, 'EVENT_KIND_REMOVED');
  await events.return();
  assert.equal((await session.clearPrefixCache()).num_forgotten_blocks, 0);
  assert.deepEqual((await client.checkInvariants()).violations, []);
  await session.close();
});

test('steps go one by one and on a stream, numbers in and out', async () => {
  const session = await client.openSession(SPEC, { executor: 'EXECUTOR_ENGINE' });
  await session.createSequence(2 ** 40, PROMPT);
  const column = [2 ** 40];
  const started = await session.step({
    start_sequence_ids: column, start_max_new_tokens: [100], start_max_hit_tokens: [100],
  });
  assert.deepEqual([started.start_results, started.start_num_blocks], [[1], [3]]);
  assert.equal(started.start_block_ids.length, 3);

  const stream = session.streamSteps();
  const grown = await stream.step({
    commit_sequence_ids: column,
    commit_num_tokens: [9],
    commit_num_new_tokens: [1],
    commit_token_ids: [20],
    reserve_sequence_ids: Float64Array.from(column),
    reserve_min_tokens: [13],
    reserve_max_tokens: [13],
  });
  assert.deepEqual([grown.step_id, grown.reserve_num_reserved_tokens, grown.new_block_ids.length], [2, [13], 1]);
  assert.deepEqual((await session.get(column[0], { includeTokens: true })).token_ids, [...PROMPT, 20]);
  await assert.rejects(stream.step({ release_sequence_ids: [77] }), { reason: 'UNKNOWN_SEQUENCE' });
  await assert.rejects(stream.step({}), { reason: 'UNKNOWN_SEQUENCE' }); // a failed step ends the stream

  const again = session.streamSteps();
  await again.step({ release_sequence_ids: column });
  again.end();
  assert.equal(session.stepId, 3);
  assert.deepEqual(await session.list(), []);
  await session.close();
});

test('a sequence is changed, and the logits behind a prompt make it a hit whole', async () => {
  const session = await client.openSession({ ...SPEC, revision: 'logits' });
  const prompt = PROMPT.slice(0, 8);
  const retention = { num_sink_tokens: 4, num_window_tokens: 100 };
  await session.createSequence(1, prompt, { retention });
  await session.extend(1, 8);
  await session.commit(1, 8);
  const changed = await session.update(1, { priority: 7, retention: { ...retention, num_window_tokens: 90 } });
  assert.deepEqual([changed.priority, changed.retention.num_window_tokens], [7, 90]);
  assert.deepEqual((await session.selectVictims({ policy: 'VICTIM_POLICY_LRU' })).sequence_ids, [1]);
  await session.extend(1, 16); // two blocks more than the known tokens need
  const collected = await session.collectGarbage();
  assert.deepEqual([collected.num_trimmed_blocks, collected.num_freed_blocks], [2, 2]);
  const logits = Float32Array.from([1.5, -2.25, 0]);
  await session.storeLogits(1, 8, logits);
  await session.release(1);
  assert.equal((await session.explainMatch(prompt)).num_hit_tokens, 8);
  await session.close();

  const engine = await client.openSession({ ...SPEC, revision: 'logits' }, { executor: 'EXECUTOR_ENGINE' });
  await engine.createSequence(2, prompt);
  const started = await engine.step({ start_sequence_ids: [2], start_max_new_tokens: [1], start_max_hit_tokens: [8] });
  assert.deepEqual([started.start_num_hit_tokens, started.start_has_logits], [[8], [1]]);
  assert.deepEqual(await engine.readLogits(2), logits);
  await assert.rejects(engine.readLogits(3), { reason: 'UNKNOWN_SEQUENCE' });
  await engine.close();
});
