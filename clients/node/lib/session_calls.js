/** What a session asks of the pool as a whole: prefixes, blocks, events, stored logits, steps. */
import { StepStream, decodeColumns, encodeColumns } from './steps.js';

const LONGEST_TIMEOUT_MS = 86_400_000; // of what lasts as long as the session: every call has a deadline

/** Base of CacheSession. */
export class SessionCalls {
  #door;
  #head;

  constructor(door, opened) {
    this.#door = door;
    this.#head = { session_id: opened.session_id, epoch: opened.epoch };
    this.sessionId = opened.session_id;
    this.epoch = opened.epoch;
    this.pool = opened.pool;
    this.stepId = 0; // the last one answered
  }

  /** Any unary method, with the session's id and epoch in its request. */
  call(method, request = {}) {
    return this.#door.call(method, { ...this.#head, ...request });
  }

  /** Any method that answers with a stream, all of it. */
  collect(method, request) {
    return this.#door.collect(method, { ...this.#head, ...request });
  }

  /** Any method that takes a stream. */
  send(method, requests) {
    return this.#door.send(method, requests.map((request) => ({ ...this.#head, ...request })));
  }

  /**
   * Applies one iteration; see lib/steps.js for items and answer. A repeat of the same step is answered once.
   * @param {Object<string, ArrayLike<number>>} items
   * @param {number} [completedStepId] all device work up to it has finished; by default that of all earlier steps
   */
  async step(items, completedStepId = this.stepId) {
    return this.#answered(await this.#door.call('Step', this.#stepRequest(items, completedStepId)));
  }

  /** The same on one stream, which costs half as much: an object with step(items, completedStepId) and end(). */
  streamSteps() {
    const stream = new StepStream(this.#door.duplex('StreamSteps', LONGEST_TIMEOUT_MS));
    return {
      step: async (items, completedStepId = this.stepId) => (
        this.#answered(await stream.exchange(this.#stepRequest(items, completedStepId)))
      ),
      end: () => stream.end(),
    };
  }

  /** Leading tokens that are cached now, and their blocks. */
  matchPrefix(tokenIds, { tenant = '' } = {}) {
    return this.call('MatchPrefix', { token_ids: tokenIds, tenant });
  }

  /** Why the longest cached prefix ends where it does. */
  explainMatch(tokenIds, { tenant = '' } = {}) {
    return this.call('ExplainMatch', { token_ids: tokenIds, tenant });
  }

  /** Keeps the cached blocks of a prefix for a time: {pin_id, num_pinned_tokens}. */
  pinPrefix(tokenIds, ttlMs, { tenant = '' } = {}) {
    return this.call('PinPrefix', { token_ids: tokenIds, ttl_ms: ttlMs, tenant });
  }

  async unpinPrefix(pinId) {
    await this.call('UnpinPrefix', { pin_id: pinId });
  }

  /**
   * Yields what is cached for the tenant, then every change of it; leaving the loop ends the watch.
   * @param {{tenant?: string, timeoutMs?: number}} [options]
   */
  watchEvents({ tenant = '', timeoutMs = LONGEST_TIMEOUT_MS } = {}) {
    return this.#door.stream('WatchEvents', { ...this.#head, tenant }, timeoutMs);
  }

  /** Whether a prompt could start now, later or never. @param {object} [options] fields of CheckAdmissionRequest */
  checkAdmission(options = {}) {
    return this.call('CheckAdmission', options);
  }

  /** The state of one block, and who holds it in numbers. */
  getBlock(blockId) {
    return this.call('GetBlock', { block_id: blockId });
  }

  /** Sequences to preempt. @param {object} [options] policy, num_blocks or max_utilization, as in SelectVictimsRequest */
  selectVictims(options = {}) {
    return this.call('SelectVictims', options);
  }

  clearPrefixCache() {
    return this.call('ClearPrefixCache');
  }

  /** @param {object} [options] one of num_free_blocks, num_blocks and max_utilization */
  evictBlocks(options = {}) {
    return this.call('EvictBlocks', options);
  }

  /** Frees what nobody can use any more; says what it freed. */
  collectGarbage() {
    return this.call('CollectGarbage');
  }

  /** @param {Float32Array} logits those that follow the first numTokens tokens, whole blocks of them */
  async storeLogits(sequenceId, numTokens, logits) {
    const bytes = Buffer.from(logits.buffer, logits.byteOffset, logits.byteLength);
    await this.call('StoreLogits', { sequence_id: sequenceId, num_tokens: numTokens, logits: bytes });
  }

  /** @returns {Promise<Float32Array>} what a start with a full hit promised */
  async readLogits(sequenceId) {
    const { logits } = await this.call('ReadLogits', { sequence_id: sequenceId });
    return Float32Array.from({ length: logits.length / 4 }, (_, i) => logits.readFloatLE(4 * i));
  }

  #stepRequest(items, completedStepId) {
    const ids = { step_id: this.stepId + 1, completed_step_id: completedStepId };
    return { ...this.#head, ...ids, ...encodeColumns(items) };
  }

  #answered(answer) {
    this.stepId = answer.step_id;
    return decodeColumns(answer);
  }
}
