/** The one place that turns a gRPC failure into a KvkeeperError. */
import grpc from '@grpc/grpc-js';
import { decodeDetail } from './protos.js';

// gRPC's own text; only where the service refused to receive does it begin with the word SERVER.
const TOO_LARGE = /(SERVER: )?Received message larger than max \((\d+) vs\.? (\d+)\)/;

/** A call that failed. */
export class KvkeeperError extends Error {
  /**
   * @param {number} code a value of grpc.status
   * @param {string} reason a name of the protocol's ErrorReason without its prefix; empty when the transport failed
   * @param {string} message
   * @param {Object<string, string>} metadata what the client needs to recover, for example expected_step_id or limit
   * @param {number | null} retryAfterMs when a repeat may succeed, where the service says so
   */
  constructor(code, reason, message, metadata = {}, retryAfterMs = null) {
    super(`${grpc.status[code]}${reason && ` ${reason}`}: ${message}`);
    this.name = 'KvkeeperError';
    this.code = code;
    this.reason = reason;
    this.metadata = metadata;
    this.retryAfterMs = retryAfterMs;
  }
}

/** @param {grpc.ServiceError} error */
export function errorOf(error) {
  if (error instanceof KvkeeperError) return error; // it could not be sent
  const [packed] = error.metadata?.get('grpc-status-details-bin') ?? [];
  const told = toldBy(packed ? decodeDetail('google.rpc.Status', packed).details : []);
  let message = error.details ?? error.message;
  const sizes = told.reason ? null : TOO_LARGE.exec(message);
  if (sizes) {
    const [byServer, requested, limit] = sizes.slice(1);
    const [what, taker] = byServer ? ['request', 'the service'] : ['answer', 'this client'];
    message = `the ${what} has ${requested} bytes, and ${taker} takes at most ${limit} at once`;
    told.metadata = { requested, limit };
    if (byServer) {
      // gRPC refused it before the service could, which says so of one that is not much too large.
      told.reason = 'INVALID_FIELD';
      told.metadata.field = 'request';
    }
  }
  return new KvkeeperError(error.code, told.reason, message, told.metadata, told.retryAfterMs);
}

/** @param {Buffer} packed a google.rpc.Status, as messages carry it */
export function errorOfStatus(packed) {
  const status = decodeDetail('google.rpc.Status', packed);
  const told = toldBy(status.details);
  return new KvkeeperError(status.code, told.reason, status.message, told.metadata, told.retryAfterMs);
}

function toldBy(details) {
  const told = { reason: '', metadata: {}, retryAfterMs: null };
  for (const detail of details) {
    const name = detail.typeUrl.split('/').at(-1);
    if (name === 'google.rpc.ErrorInfo') {
      const { reason, metadata } = decodeDetail(name, detail.value);
      Object.assign(told, { reason, metadata });
    } else if (name === 'google.rpc.RetryInfo') {
      const delay = decodeDetail(name, detail.value).retryDelay;
      told.retryAfterMs = delay.seconds * 1000 + delay.nanos / 1e6;
    }
  }
  return told;
}
