/** The one place that turns a gRPC failure into a KvkeeperError. */
import grpc from '@grpc/grpc-js';
import { decodeDetail } from './protos.js';

/** A call that failed. */
export class KvkeeperError extends Error {
  /**
   * @param {number} code a value of grpc.status
   * @param {string} reason a name of the protocol's ErrorReason without its prefix; empty when the transport failed
   * @param {string} message
   * @param {Object<string, string>} metadata what is needed to go on, for example expected_step_id or limit
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
  let reason = '';
  let metadata = {};
  let retryAfterMs = null;
  const [packed] = error.metadata?.get('grpc-status-details-bin') ?? [];
  for (const detail of packed ? decodeDetail('google.rpc.Status', packed).details : []) {
    const name = detail.type_url.split('/').at(-1);
    if (name === 'google.rpc.ErrorInfo') {
      ({ reason, metadata } = decodeDetail(name, detail.value));
    } else if (name === 'google.rpc.RetryInfo') {
      const delay = decodeDetail(name, detail.value).retry_delay;
      retryAfterMs = delay.seconds * 1000 + delay.nanos / 1e6;
    }
  }
  return new KvkeeperError(error.code, reason, error.details ?? error.message, metadata, retryAfterMs);
}
