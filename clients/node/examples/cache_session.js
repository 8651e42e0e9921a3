/**
 * Drive the cache service alone, as an engine would: one session in which a sequence lives, is forked and released.
 *
 *     node cache_session.js [ADDRESS]
 *
 * The address is that of a cache service, which `kvkeeper cache` starts; the default is 127.0.0.1:7410. Nothing is computed here:
 * an engine would write the K and V of each reserved slot to the pool's memory before it commits the slot.
 */
import { CacheClient } from 'kvkeeper';

const SPEC = { // sessions with equal specs share one pool
  modelId: 'example',
  numLayers: 2,
  numKvHeads: 2,
  headDim: 4,
  kvDtype: 'KV_DTYPE_FLOAT32',
  blockSize: 4,
  layout: 'KV_LAYOUT_BLOCK_MAJOR',
};
const PROMPT = [11, 12, 13, 14, 15, 16];
const EXECUTOR = 'EXECUTOR_ENGINE'; // this program would copy the blocks itself
const [PARENT, CHILD, LATER] = [1, 2, 3]; // sequence ids, which the client chooses

const client = new CacheClient(process.argv[2]);
try {
  const session = await client.openSession(SPEC, { executor: EXECUTOR });
  console.log(`a pool of ${session.pool.numBlocks} blocks, ${session.pool.blockSize} tokens each`);

  // Step 1: start the prompt. The answer has its block table, with slots for all six tokens.
  await session.createSequence(PARENT, PROMPT);
  const started = await session.step({
    startSequenceIds: [PARENT], startMaxNewTokens: [PROMPT.length], startMaxHitTokens: [5],
  });
  console.log(`started with ${started.startNumHitTokens[0]} cached tokens and the blocks ${JSON.stringify(started.startBlockIds)}`);

  // Step 2: the prompt is computed and token 17 generated: commit six tokens, fork, and reserve a slot for the seventh.
  const forked = await session.step({
    commitSequenceIds: [PARENT],
    commitNumTokens: [6],
    commitNumNewTokens: [1],
    commitTokenIds: [17],
    forkParentIds: [PARENT],
    forkChildIds: [CHILD],
    forkNumTokens: [6],
    reserveSequenceIds: [PARENT],
    reserveMinTokens: [7],
    reserveMaxTokens: [7],
  });
  const copies = forked.copySourceBlockIds.map((source, index) => [source, forked.copyDestinationBlockIds[index]]);
  console.log(`forked; blocks to copy before they are written, source and destination: ${JSON.stringify(copies)}`);

  // Step 3: both are done.
  await session.step({ releaseSequenceIds: [PARENT, CHILD] });

  // What was committed stays cached: the same prompt finds its whole blocks.
  const numMatched = await session.createSequence(LATER, PROMPT);
  console.log(`the same prompt again: ${numMatched} of ${PROMPT.length} tokens are cached`);
  await session.step({ releaseSequenceIds: [LATER] });
  await session.close();
} finally {
  client.close();
}
