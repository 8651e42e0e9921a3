/** The cache service: calls about all of it, and sessions, which are in session.js. */
import grpc from '@grpc/grpc-js';
import { checkedOptions } from './checked.js';
import { KvkeeperError } from './errors.js';
import { Transport } from './transport.js';
import { CacheService } from './protos.js';
import { CacheSession } from './session.js';

/** Of the cache service's protocol; docs/api/protocol.md says what needs a new number. */
export const PROTOCOL_VERSION = 3;
const OLDEST_PROTOCOL_VERSION = 1; // that this client can speak
const OF_GROUP_SHAPES = 3; // an older service would take all groups for such of the spec's heads

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
    const least = spec.groups?.some((group) => group.numKvHeads || group.page) ? OF_GROUP_SHAPES : OLDEST_PROTOCOL_VERSION;
    requireSpoken(opened.protocolVersion || 1, least); // a service of before there were versions names none
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
