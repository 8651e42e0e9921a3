/** A session of the cache service: its steps, its sequences one operation at a time, and its pool. */
import grpc from '@grpc/grpc-js';
import { checkedOptions, kindOf } from './checked.js';
import { KvkeeperError, errorOfStatus } from './errors.js';
import { LONGEST_TIMEOUT_MS } from './transport.js';
import { StepStream, decodeColumns, encodeColumns } from './steps.js';

const SCOPE = { tenant: '', adapter: '', cacheSalt: '' };

/** A lease on a pool. Every call renews it; renew() does in between. */
export class CacheSession {
  #transport;
  #head;
  #hasScopes;

  constructor(transport, opened) {
    this.#transport = transport;
    this.#head = { sessionId: opened.sessionId, epoch: opened.epoch };
    this.#hasScopes = opened.protocolVersion >= 2;
    this.sessionId = opened.sessionId;
    this.epoch = opened.epoch;
    this.pool = opened.pool;
    this.stepId = 0; // the last one whose answer has come
  }

  /** Any unary method, with the session's id and epoch in its request. */
  #call(method, request = {}) {
    this.#requireScopes(request, ...(request.sequences ?? request.hints ?? []));
    return this.#transport.call(method, { ...this.#head, ...request });
  }

  /** A service of before there were adapters and salts would take these prompts for those of the base model. */
  #requireScopes(...messages) {
    if (!this.#hasScopes && messages.some((message) => message?.adapter || message?.cacheSalt)) {
      const text = 'the service speaks version 1 of the protocol, without adapters and salts: upgrade the cache service';
      throw new KvkeeperError(grpc.status.FAILED_PRECONDITION, 'PROTOCOL_VERSION_UNSUPPORTED', text);
    }
  }

  /** Any method that returns a stream, all of it. */
  #collect(method, request) {
    return this.#transport.collect(method, { ...this.#head, ...request });
  }

  /** Any method that takes a stream. */
  #send(method, requests) {
    return this.#transport.send(method, requests.map((request) => ({ ...this.#head, ...request })));
  }

  /**
   * Applies one iteration; see lib/steps.js for items and answer. A step that is repeated is applied once.
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
    return this.#call('MatchPrefix', { tokenIds, ...checkedOptions(options, SCOPE) });
  }

  /** Leading tokens that are cached now, by tier, and why what a start would take of them ends where it does. */
  async explainMatch(tokenIds, options = {}) {
    return this.#call('ExplainMatch', { tokenIds, ...checkedOptions(options, SCOPE) });
  }

  /** Keeps the cached blocks of a prefix for a time: {pinId, numPinnedTokens}. */
  async pinPrefix(tokenIds, ttlMs, options = {}) {
    return this.#call('PinPrefix', { tokenIds, ttlMs, ...checkedOptions(options, SCOPE) });
  }

  async unpinPrefix(pinId) {
    await this.#call('UnpinPrefix', { pinId });
  }

  /** Says what is known of the next use of cached prefixes, each {tokenIds, tenant, reuseHint}. The cached tokens of each. */
  async hintPrefixes(hints) {
    return (await this.#call('HintPrefix', { hints })).numHintedTokens;
  }

  /**
   * Yields the blocks cached for the tenant, then every change of them; leaving the loop ends the watch.
   * @param {{tenant?: string, adapter?: string, cacheSalt?: string, timeoutMs?: number, includeTokenIds?: boolean}} [options]
   *   includeTokenIds: of new blocks, as LE32
   */
  watchEvents(options = {}) {
    const known = { ...SCOPE, timeoutMs: LONGEST_TIMEOUT_MS, includeTokenIds: false };
    const { timeoutMs, ...fields } = checkedOptions(options, known);
    this.#requireScopes(fields);
    return this.#transport.stream('WatchEvents', this.#transport.checked('WatchEvents', { ...this.#head, ...fields }), timeoutMs);
  }

  /** Whether a prompt could start now, later or never. @param {object} [options] fields of CheckAdmissionRequest */
  checkAdmission(options = {}) {
    return this.#call('CheckAdmission', options);
  }

  /** The state of one block, and the numbers of its holders. */
  getBlock(blockId) {
    return this.#call('GetBlock', { blockId });
  }

  /** Sequences to preempt. @param {object} [options] policy, numBlocks or maxUtilization, as in SelectVictimsRequest */
  selectVictims(options = {}) {
    return this.#call('SelectVictims', options);
  }

  clearPrefixCache() {
    return this.#call('ClearPrefixCache');
  }

  /** @param {object} [options] one of numFreeBlocks, numBlocks and maxUtilization */
  evictBlocks(options = {}) {
    return this.#call('EvictBlocks', options);
  }

  /** Frees blocks that nothing can use any more; the answer has their numbers. */
  collectGarbage() {
    return this.#call('CollectGarbage');
  }

  /** @param {Float32Array} logits those that follow the first numTokens tokens, whole blocks of them */
  async storeLogits(sequenceId, numTokens, logits) {
    if (!(logits instanceof Float32Array)) throw new TypeError(`logits: a Float32Array, not ${kindOf(logits)}`);
    const bytes = Buffer.from(logits.buffer, logits.byteOffset, logits.byteLength);
    await this.#call('StoreLogits', { sequenceId, numTokens, logits: bytes });
  }

  /** @returns {Promise<Float32Array>} what a start with a full hit promised */
  async readLogits(sequenceId) {
    const { logits } = await this.#call('ReadLogits', { sequenceId });
    return Float32Array.from({ length: logits.length / 4 }, (_, i) => logits.readFloatLE(4 * i));
  }

  renew() {
    return this.#call('RenewSession');
  }

  close() {
    return this.#call('CloseSession', { drained: true });
  }

  /**
   * Stores a prompt.
   * @param {number} sequenceId 1 to 2^53 - 1
   * @param {number[]} tokenIds
   * @param {{maxTokens?: number, tenant?: string, adapter?: string, cacheSalt?: string, priority?: number, retention?: object,
   *   startNumber?: number, reuseHint?: string, retainMs?: number}} [options]
   *   retention: {numSinkTokens, numWindowTokens}; reuseHint: REUSE_HINT_NONE or REUSE_HINT_SOON, where one is known;
   *   retainMs: within what time its next use is expected
   * @returns {Promise<number>} leading tokens that are cached now, for information
   */
  async createSequence(sequenceId, tokenIds, options = {}) {
    const given = checkedOptions(options, {
      maxTokens: 0,
      ...SCOPE,
      priority: 0,
      retention: undefined,
      startNumber: 0,
      reuseHint: 'REUSE_HINT_UNSPECIFIED',
      retainMs: 0,
    });
    const answer = await this.#call('CreateSequence', { sequenceId, tokenIds, ...given });
    return answer.numMatchedTokens;
  }

  /**
   * Stores several prompts, in order. One that is refused leaves the others be.
   * @param {object[]} sequences fields of NewSequence: sequenceId, tokenIds and the options of createSequence
   * @returns {Promise<Array<object | KvkeeperError>>} of each {numMatchedTokens, startNumber}, or why it was refused
   */
  async createSequences(sequences) {
    const { results } = await this.#call('CreateSequences', { sequences });
    return results.map(({ response, error }) => response ?? errorOfStatus(error));
  }

  /** Starts the sequence if it waits, and reserves slots up to an absolute length. */
  async extend(sequenceId, numTokens, options = {}) {
    const request = { sequenceId, numTokens, ...checkedOptions(options, { skipLookUp: false }) };
    return (await this.#call('ExtendSequence', request)).sequence;
  }

  /** Appends tokenIds at firstTokenIdx, and declares K and V written up to an absolute length. */
  async commit(sequenceId, numTokens, firstTokenIdx = 0, tokenIds = []) {
    return (await this.#call('CommitSequence', { sequenceId, numTokens, firstTokenIdx, tokenIds })).sequence;
  }

  /** Makes a child that shares the parent's first tokens; 0 is all committed ones. */
  async fork(parentId, childId, numTokens = 0) {
    return (await this.#call('ForkSequence', { parentId, childId, numTokens })).sequence;
  }

  /** Cuts to an absolute length. */
  async truncate(sequenceId, numTokens) {
    return (await this.#call('TruncateSequence', { sequenceId, numTokens })).sequence;
  }

  /** Gives the sequence's blocks back; how many nothing else holds. */
  async release(sequenceId) {
    return (await this.#call('ReleaseSequence', { sequenceId })).numDroppedBlocks;
  }

  /** Changes what is given. @param {object} changes priority, retention, reuseHint: as in createSequence */
  async update(sequenceId, changes) {
    return (await this.#call('UpdateSequence', { sequenceId, ...changes })).sequence;
  }

  /** Moves the sequence to the host tier. */
  async swapOut(sequenceId) {
    return (await this.#call('SwapOutSequence', { sequenceId })).sequence;
  }

  /** Moves it back, all or nothing. */
  async swapIn(sequenceId) {
    return (await this.#call('SwapInSequence', { sequenceId })).sequence;
  }

  /** What another session of the pool shows to take this running sequence; until then it is this session's. */
  async handOff(sequenceId) {
    return (await this.#call('HandOffSequence', { sequenceId })).offer;
  }

  /** Takes a sequence that another session offers; it has this id from now on. No byte is copied. */
  async take(offer, sequenceId) {
    return (await this.#call('TakeSequence', { offer, sequenceId })).sequence;
  }

  /** Ends the offer of a sequence. Fails with UNKNOWN_SEQUENCE where it was taken. */
  async withdraw(sequenceId) {
    await this.#call('WithdrawHandOff', { sequenceId });
  }

  /** One sequence with its block table. */
  async get(sequenceId, options = {}) {
    return (await this.#call('GetSequence', { sequenceId, ...checkedOptions(options, { includeTokens: false }) })).sequence;
  }

  /** The session's sequences, without tables. */
  async list() {
    return this.#transport.list('ListSequences', { sessionId: this.sessionId }, 'sequences');
  }

  /**
   * Writes K and V into reserved, uncommitted slots.
   * @param {number} sequenceId
   * @param {{layerIdx: number, firstTokenIdx: number, key: Buffer, value: Buffer}[]} chunks each one layer and a run of
   *   tokens: [numTokens, numKvHeads, headDim] in the spec's dtype, or in the chunk's kvDtype, little-endian, at most 64 KiB
   */
  writeKv(sequenceId, chunks) {
    return this.#send('WriteKv', chunks.map((chunk) => ({ sequenceId, ...chunk })));
  }

  /**
   * Reads K and V of committed tokens, layer by layer, in the spec's dtype or in kvDtype, which a spec with scales needs.
   * key and value are [numTokens, numKvHeads, headDim] each.
   * @returns {Promise<{layerIdx: number, firstTokenIdx: number, numTokens: number, key: Buffer, value: Buffer,
   *   kvDtype: string, storedKvDtype: string, numKvHeads: number, headDim: number}[]>}
   */
  async readKv(sequenceId, options = {}) {
    const { layers, ...fields } = checkedOptions(options, {
      firstTokenIdx: 0,
      numTokens: 0,
      layers: [],
      kvDtype: 'KV_DTYPE_UNSPECIFIED',
    });
    return this.#collect('ReadKv', { sequenceId, ...fields, layerIdx: layers });
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
