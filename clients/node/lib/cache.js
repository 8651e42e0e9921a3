/** The cache service: sessions, and their sequences one operation at a time; see session_calls.js for the rest. */
import grpc from '@grpc/grpc-js';
import { checkedOptions } from './checked.js';
import { KvkeeperError, errorOfStatus } from './errors.js';
import { Transport } from './transport.js';
import { CacheService } from './protos.js';
import { SessionCalls } from './session_calls.js';

/** Of the cache service's protocol; docs/api/protocol.md says what needs a new number. */
export const PROTOCOL_VERSION = 1;
const OLDEST_PROTOCOL_VERSION = 1; // that this client can speak

/** Throws where the service is too old. What it opened ends with its lease. */
export function requireSpoken(version, oldest = OLDEST_PROTOCOL_VERSION) {
  if (version < oldest) {
    const text = `the service speaks version ${version} of the protocol, and this client ${oldest} to ${PROTOCOL_VERSION}`;
    throw new KvkeeperError(
      grpc.status.FAILED_PRECONDITION, 'PROTOCOL_VERSION_UNSUPPORTED', `${text}: upgrade the cache service`,
    );
  }
}

/** One channel to a cache service. */
export class CacheClient {
  #transport;

  /**
   * @param {string} address host:port or unix:/path
   * @param {{timeoutMs?: number, retryMs?: number}} [options]
   */
  constructor(address = '127.0.0.1:7410', options = {}) {
    this.#transport = new Transport(CacheService, address, options);
  }

  /**
   * Opens a session on the pool of a KV spec (fields as in the protocol's KvSpec).
   * @param {object} spec
   * @param {{ttlMs?: number, clientName?: string, executor?: string}} [options] ttlMs 0 is the service's default lease
   * @returns {Promise<CacheSession>}
   */
  async openSession(spec, options = {}) {
    const { ttlMs, clientName, executor } = checkedOptions(options, {
      ttlMs: 0, clientName: '', executor: 'EXECUTOR_CACHE',
    });
    const opened = await this.#transport.call('OpenSession', {
      spec, executor, ttlMs, clientName, protocolVersion: PROTOCOL_VERSION,
    });
    requireSpoken(opened.protocolVersion || 1); // a service of before there were versions names none
    return new CacheSession(this.#transport, opened);
  }

  capabilities() {
    return this.#transport.call('GetCapabilities', {});
  }

  stats() {
    return this.#transport.call('GetStats', {});
  }

  checkInvariants() {
    return this.#transport.call('CheckInvariants', {});
  }

  close() {
    this.#transport.close();
  }
}

/** A lease on a pool. Every call renews it; renew() does in between. */
export class CacheSession extends SessionCalls {
  #transport;

  constructor(transport, opened) {
    super(transport, opened);
    this.#transport = transport;
  }

  renew() {
    return this.call('RenewSession');
  }

  close() {
    return this.call('CloseSession', { drained: true });
  }

  /**
   * Stores a prompt.
   * @param {number} sequenceId 1 to 2^53 - 1
   * @param {number[]} tokenIds
   * @param {{maxTokens?: number, tenant?: string, priority?: number, retention?: object, startNumber?: number,
   *   reuseHint?: string}} [options]
   *   retention: {numSinkTokens, numWindowTokens}; reuseHint: REUSE_HINT_NONE or REUSE_HINT_SOON, where one is known
   * @returns {Promise<number>} leading tokens that are cached now, for information
   */
  async createSequence(sequenceId, tokenIds, options = {}) {
    const given = checkedOptions(options, {
      maxTokens: 0,
      tenant: '',
      priority: 0,
      retention: undefined,
      startNumber: 0,
      reuseHint: 'REUSE_HINT_UNSPECIFIED',
    });
    const answer = await this.call('CreateSequence', { sequenceId, tokenIds, ...given });
    return answer.numMatchedTokens;
  }

  /**
   * Stores several prompts, in order. One that is refused leaves the others be.
   * @param {object[]} sequences fields of NewSequence: sequenceId, tokenIds and the options of createSequence
   * @returns {Promise<Array<object | KvkeeperError>>} of each {numMatchedTokens, startNumber}, or why it was refused
   */
  async createSequences(sequences) {
    const { results } = await this.call('CreateSequences', { sequences });
    return results.map(({ response, error }) => response ?? errorOfStatus(error));
  }

  /** Starts the sequence if it waits, and reserves slots up to an absolute length. */
  async extend(sequenceId, numTokens, options = {}) {
    const request = { sequenceId, numTokens, ...checkedOptions(options, { skipLookUp: false }) };
    return (await this.call('ExtendSequence', request)).sequence;
  }

  /** Appends tokenIds at firstTokenIdx, and declares K and V written up to an absolute length. */
  async commit(sequenceId, numTokens, firstTokenIdx = 0, tokenIds = []) {
    const request = { sequenceId, numTokens, firstTokenIdx, tokenIds };
    return (await this.call('CommitSequence', request)).sequence;
  }

  /** Makes a child that shares the parent's first tokens; 0 is all committed ones. */
  async fork(parentId, childId, numTokens = 0) {
    const request = { parentId, childId, numTokens };
    return (await this.call('ForkSequence', request)).sequence;
  }

  /** Cuts to an absolute length. */
  async truncate(sequenceId, numTokens) {
    return (await this.call('TruncateSequence', { sequenceId, numTokens })).sequence;
  }

  /** Gives the sequence's blocks back; how many nothing else holds. */
  async release(sequenceId) {
    return (await this.call('ReleaseSequence', { sequenceId })).numDroppedBlocks;
  }

  /** Changes what is given. @param {object} changes priority, retention, reuseHint: as in createSequence */
  async update(sequenceId, changes) {
    return (await this.call('UpdateSequence', { sequenceId, ...changes })).sequence;
  }

  /** Moves the sequence to the host tier. */
  async swapOut(sequenceId) {
    return (await this.call('SwapOutSequence', { sequenceId })).sequence;
  }

  /** Moves it back, all or nothing. */
  async swapIn(sequenceId) {
    return (await this.call('SwapInSequence', { sequenceId })).sequence;
  }

  /** What another session of the pool shows to take this running sequence; until then it is this session's. */
  async handOff(sequenceId) {
    return (await this.call('HandOffSequence', { sequenceId })).offer;
  }

  /** Takes a sequence that another session offers; it has this id from now on. No byte is copied. */
  async take(offer, sequenceId) {
    return (await this.call('TakeSequence', { offer, sequenceId })).sequence;
  }

  /** Ends the offer of a sequence. Fails with UNKNOWN_SEQUENCE where it was taken. */
  async withdraw(sequenceId) {
    await this.call('WithdrawHandOff', { sequenceId });
  }

  /** One sequence with its block table. */
  async get(sequenceId, options = {}) {
    const { includeTokens } = checkedOptions(options, { includeTokens: false });
    return (await this.call('GetSequence', { sequenceId, includeTokens })).sequence;
  }

  /** The session's sequences, without tables. */
  async list() {
    const rows = [];
    let token = '';
    do {
      const page = await this.#transport.call('ListSequences', {
        sessionId: this.sessionId, pageSize: 1000, pageToken: token,
      });
      rows.push(...page.sequences);
      token = page.nextPageToken;
    } while (token);
    return rows;
  }

  /**
   * Writes K and V into reserved, uncommitted slots.
   * @param {number} sequenceId
   * @param {{layerIdx: number, firstTokenIdx: number, key: Buffer, value: Buffer}[]} chunks each one layer and a run of
   *   tokens: [numTokens, numKvHeads, headDim] in the spec's dtype, or in the chunk's kvDtype, little-endian, at most 64 KiB
   */
  writeKv(sequenceId, chunks) {
    return this.send('WriteKv', chunks.map((chunk) => ({ sequenceId, ...chunk })));
  }

  /**
   * Reads K and V of committed tokens, layer by layer, in the spec's dtype or in kvDtype, which a spec with scales needs.
   * @returns {Promise<{layerIdx: number, firstTokenIdx: number, numTokens: number, key: Buffer, value: Buffer,
   *   kvDtype: string, storedKvDtype: string}[]>}
   */
  async readKv(sequenceId, options = {}) {
    const { firstTokenIdx, numTokens, layers, kvDtype } = checkedOptions(options, {
      firstTokenIdx: 0,
      numTokens: 0,
      layers: [],
      kvDtype: 'KV_DTYPE_UNSPECIFIED',
    });
    const chunks = await this.collect('ReadKv', {
      sequenceId,
      firstTokenIdx,
      numTokens,
      layerIdx: layers,
      kvDtype,
    });
    return chunks.map((chunk) => ({
      layerIdx: chunk.layerIdx,
      firstTokenIdx: chunk.firstTokenIdx,
      numTokens: chunk.numTokens,
      key: chunk.key,
      value: chunk.value,
      kvDtype: chunk.kvDtype,
      storedKvDtype: chunk.storedKvDtype,
    }));
  }
}
