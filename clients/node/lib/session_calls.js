/** A session's calls about its pool as a whole: prefixes, blocks, events, stored logits, steps. */
import { checkedOptions, kindOf } from './checked.js';
import { LONGEST_TIMEOUT_MS } from './transport.js';
import { StepStream, decodeColumns, encodeColumns } from './steps.js';

/** Base of CacheSession. */
export class SessionCalls {
  #transport;
  #head;

  constructor(transport, opened) {
    this.#transport = transport;
    this.#head = { sessionId: opened.sessionId, epoch: opened.epoch };
    this.sessionId = opened.sessionId;
    this.epoch = opened.epoch;
    this.pool = opened.pool;
    this.stepId = 0; // the last one answered
  }

  /** Any unary method, with the session's id and epoch in its request. */
  call(method, request = {}) {
    return this.#transport.call(method, { ...this.#head, ...request });
  }

  /** Any method that answers with a stream, all of it. */
  collect(method, request) {
    return this.#transport.collect(method, { ...this.#head, ...request });
  }

  /** Any method that takes a stream. */
  send(method, requests) {
    return this.#transport.send(method, requests.map((request) => ({ ...this.#head, ...request })));
  }

  /**
   * Applies one iteration; see lib/steps.js for items and answer. A repeat of the same step is answered once.
   * @param {Object<string, ArrayLike<number>>} items
   * @param {number} [completedStepId] all device work up to it has finished; by default that of all earlier steps
   */
  async step(items, completedStepId = this.stepId) {
    return this.#answered(await this.#transport.call('Step', this.#stepRequest(items, completedStepId)));
  }

  /** The same on one stream, which costs half as much: an object with step(items, completedStepId) and end(). */
  streamSteps() {
    const stream = new StepStream(this.#transport.duplex('StreamSteps', LONGEST_TIMEOUT_MS));
    return {
      step: async (items, completedStepId = this.stepId) => (
        this.#answered(await stream.exchange(this.#transport.checked('StreamSteps', this.#stepRequest(items, completedStepId))))
      ),
      end: () => stream.end(),
    };
  }

  /** Leading tokens that are cached now, by tier, and their blocks on the device. */
  async matchPrefix(tokenIds, options = {}) {
    const { tenant } = checkedOptions(options, { tenant: '' });
    return this.call('MatchPrefix', { tokenIds, tenant });
  }

  /** Leading tokens that are cached now, by tier, and why what a start would take of them ends where it does. */
  async explainMatch(tokenIds, options = {}) {
    const { tenant } = checkedOptions(options, { tenant: '' });
    return this.call('ExplainMatch', { tokenIds, tenant });
  }

  /** Keeps the cached blocks of a prefix for a time: {pinId, numPinnedTokens}. */
  async pinPrefix(tokenIds, ttlMs, options = {}) {
    const { tenant } = checkedOptions(options, { tenant: '' });
    return this.call('PinPrefix', { tokenIds, ttlMs, tenant });
  }

  async unpinPrefix(pinId) {
    await this.call('UnpinPrefix', { pinId });
  }

  /**
   * Yields the blocks cached for the tenant, then every change of them; leaving the loop ends the watch.
   * @param {{tenant?: string, timeoutMs?: number, includeTokenIds?: boolean}} [options] includeTokenIds: of new blocks, as LE32
   */
  watchEvents(options = {}) {
    const known = { tenant: '', timeoutMs: LONGEST_TIMEOUT_MS, includeTokenIds: false };
    const { timeoutMs, ...fields } = checkedOptions(options, known);
    return this.#transport.stream('WatchEvents', this.#transport.checked('WatchEvents', { ...this.#head, ...fields }), timeoutMs);
  }

  /** Whether a prompt could start now, later or never. @param {object} [options] fields of CheckAdmissionRequest */
  checkAdmission(options = {}) {
    return this.call('CheckAdmission', options);
  }

  /** The state of one block, and the numbers of its holders. */
  getBlock(blockId) {
    return this.call('GetBlock', { blockId });
  }

  /** Sequences to preempt. @param {object} [options] policy, numBlocks or maxUtilization, as in SelectVictimsRequest */
  selectVictims(options = {}) {
    return this.call('SelectVictims', options);
  }

  clearPrefixCache() {
    return this.call('ClearPrefixCache');
  }

  /** @param {object} [options] one of numFreeBlocks, numBlocks and maxUtilization */
  evictBlocks(options = {}) {
    return this.call('EvictBlocks', options);
  }

  /** Frees blocks that nothing can use any more; the answer has their numbers. */
  collectGarbage() {
    return this.call('CollectGarbage');
  }

  /** @param {Float32Array} logits those that follow the first numTokens tokens, whole blocks of them */
  async storeLogits(sequenceId, numTokens, logits) {
    if (!(logits instanceof Float32Array)) throw new TypeError(`logits: a Float32Array, not ${kindOf(logits)}`);
    const bytes = Buffer.from(logits.buffer, logits.byteOffset, logits.byteLength);
    await this.call('StoreLogits', { sequenceId, numTokens, logits: bytes });
  }

  /** @returns {Promise<Float32Array>} what a start with a full hit promised */
  async readLogits(sequenceId) {
    const { logits } = await this.call('ReadLogits', { sequenceId });
    return Float32Array.from({ length: logits.length / 4 }, (_, i) => logits.readFloatLE(4 * i));
  }

  #stepRequest(items, completedStepId) {
    const ids = { stepId: this.stepId + 1, completedStepId };
    return { ...this.#head, ...ids, ...encodeColumns(items) };
  }

  #answered(answer) {
    this.stepId = answer.stepId;
    return decodeColumns(answer);
  }
}
