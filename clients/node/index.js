/**
 * Node client of kvkeeper: the cache service and the engine service.
 *
 * Every call has a deadline; UNAVAILABLE alone is repeated, with the same message. Failures are KvkeeperError.
 */
export { CacheClient } from './lib/cache.js';
export { CacheSession } from './lib/session.js';
export { EngineClient } from './lib/engine.js';
export { KvkeeperError } from './lib/errors.js';
