/** The one place that makes calls: one channel to one service, a deadline on each call, repeats of UNAVAILABLE. */
import { setTimeout as pause } from 'node:timers/promises';
import grpc from '@grpc/grpc-js';
import { errorOf } from './errors.js';

const CHANNEL_OPTIONS = {
  'grpc.max_receive_message_length': 64 << 20,
  'grpc.initial_reconnect_backoff_ms': 20,
  'grpc.max_reconnect_backoff_ms': 500,
  'grpc.enable_http_proxy': 0,
};
const FIRST_PAUSE_MS = 20;
const LONGEST_PAUSE_MS = 500;

export class Door {
  /**
   * @param {Function} Service a service of protos.js
   * @param {string} address host:port or unix:/path
   * @param {{timeoutMs?: number, retryMs?: number}} options bounds of a whole call, and of its repeats
   */
  constructor(Service, address, { timeoutMs = 10_000, retryMs = 3_000 } = {}) {
    this.client = new Service(address, grpc.credentials.createInsecure(), CHANNEL_OPTIONS);
    this.timeoutMs = timeoutMs;
    this.retryMs = retryMs;
  }

  close() {
    this.client.close();
  }

  /** The answer of a unary method. */
  call(method, request) {
    return this.#repeat((options) => new Promise((resolve, reject) => {
      this.client[method](request, options, settle(resolve, reject));
    }));
  }

  /** The answer of a method that takes a stream of requests. */
  send(method, requests) {
    return this.#repeat((options) => new Promise((resolve, reject) => {
      const call = this.client[method](options, settle(resolve, reject));
      for (const request of requests) call.write(request);
      call.end();
    }));
  }

  /** All answers of a server stream; a repeat starts it over. */
  collect(method, request) {
    return this.#repeat(async (options) => {
      const answers = [];
      for await (const answer of this.client[method](request, options)) answers.push(answer);
      return answers;
    });
  }

  /** Answers of a server stream as they come; leaving the loop cancels it. Not repeated: the caller has seen some. */
  async *stream(method, request, timeoutMs = this.timeoutMs) {
    const call = this.client[method](request, { deadline: Date.now() + timeoutMs });
    try {
      yield* call;
    } catch (error) {
      throw errorOf(error);
    } finally {
      call.cancel();
    }
  }

  /** The call of a method that streams both ways, which is its caller's to end. */
  duplex(method, timeoutMs) {
    return this.client[method]({ deadline: Date.now() + timeoutMs });
  }

  async #repeat(attempt) {
    const started = Date.now();
    const deadline = started + this.timeoutMs;
    for (let wait = FIRST_PAUSE_MS; ; wait = Math.min(2 * wait, LONGEST_PAUSE_MS)) {
      try {
        return await attempt({ deadline });
      } catch (failure) {
        const error = errorOf(failure);
        const next = error.retryAfterMs ?? wait;
        if (error.code !== grpc.status.UNAVAILABLE || Date.now() + next > started + this.retryMs) throw error;
        await pause(next);
      }
    }
  }
}

function settle(resolve, reject) {
  return (error, answer) => (error ? reject(error) : resolve(answer));
}
