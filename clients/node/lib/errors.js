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
  let reason = '';
  let metadata = {};
  let retryAfterMs = null;
  const [packed] = error.metadata?.get('grpc-status-details-bin') ?? [];
  for (const detail of packed ? decodeDetail('google.rpc.Status', packed).details : []) {
    const name = detail.typeUrl.split('/').at(-1);
    if (name === 'google.rpc.ErrorInfo') {
      ({ reason, metadata } = decodeDetail(name, detail.value));
    } else if (name === 'google.rpc.RetryInfo') {
      const delay = decodeDetail(name, detail.value).retryDelay;
      retryAfterMs = delay.seconds * 1000 + delay.nanos / 1e6;
    }
  }
  let message = error.details ?? error.message;
  const sizes = reason ? null : TOO_LARGE.exec(message);
  if (sizes) {
    const [byServer, requested, limit] = sizes.slice(1);
    const [what, taker] = byServer ? ['request', 'the service'] : ['answer', 'this client'];
    message = `the ${what} has ${requested} bytes, and ${taker} takes at most ${limit} at once`;
    metadata = { requested, limit };
  }
  return new KvkeeperError(error.code, reason, message, metadata, retryAfterMs);
}
