/**
 * The one place that makes calls: one channel to one service, requests checked against the protocol, a deadline on each call,
 * repeats of UNAVAILABLE.
 */
import { setTimeout as pause } from 'node:timers/promises';
import grpc from '@grpc/grpc-js';
import { checkedMessage, checkedOptions, kindOf } from './checked.js';
import { Credentials } from './credentials.js';
import { errorOf } from './errors.js';
import { requestTypeOf } from './protos.js';

export const LONGEST_TIMEOUT_MS = 86_400_000; // of long streams: every call has a deadline
export const { UNAVAILABLE } = grpc.status;

const CHANNEL_OPTIONS = {
  'grpc.max_receive_message_length': 64 << 20,
  'grpc.initial_reconnect_backoff_ms': 20,
  'grpc.max_reconnect_backoff_ms': 500,
  'grpc.enable_http_proxy': 0,
  // A long stream must end when its peer has gone or stopped: unanswered pings make it UNAVAILABLE.
  'grpc.keepalive_time_ms': 20_000,
  'grpc.keepalive_timeout_ms': 20_000,
};
const CREDENTIALS = { token: '', tokenFile: '', tlsCa: '', tlsCert: '', tlsKey: '' };
const FIRST_PAUSE_MS = 20;
const LONGEST_PAUSE_MS = 500;

export class Transport {
  /**
   * @param {Function} Service a service of protos.js
   * @param {string} address host:port or unix:/path
   * @param {{timeoutMs?: number, retryMs?: number, token?: string, tokenFile?: string, tlsCa?: string, tlsCert?: string,
   *   tlsKey?: string}} options bounds of a whole call, and of its repeats; and what is shown to the service, see credentials.js
   */
  constructor(Service, address, options = {}) {
    if (typeof address !== 'string') throw new TypeError(`address: a string, not ${kindOf(address)}`);
    const { timeoutMs, retryMs, ...shown } = checkedOptions(options, { timeoutMs: 10_000, retryMs: 3_000, ...CREDENTIALS });
    const credentials = new Credentials(shown);
    const channelOptions = { ...CHANNEL_OPTIONS, interceptors: credentials.interceptors };
    this.client = new Service(address, credentials.channel(address), channelOptions);
    this.service = Service.service;
    this.timeoutMs = timeoutMs;
    this.retryMs = retryMs;
  }

  /** The request as it may be sent. Throws TypeError. */
  checked(method, request) {
    return checkedMessage(requestTypeOf(this.service[method].path), request);
  }

  close() {
    this.client.close();
  }

  /** The answer of a unary method. */
  async call(method, request) {
    const message = this.checked(method, request);
    return this.#repeat((options) => new Promise((resolve, reject) => {
      this.client[method](message, options, settle(resolve, reject));
    }));
  }

  /** All rows of a unary method that lists them by pages. rows: their field in the answer. */
  async list(method, request, rows) {
    const found = [];
    let pageToken = '';
    do {
      const page = await this.call(method, { ...request, pageSize: 1000, pageToken });
      found.push(...page[rows]);
      pageToken = page.nextPageToken;
    } while (pageToken);
    return found;
  }

  /** The answer of a method that takes a stream of requests. */
  async send(method, requests) {
    const messages = requests.map((request) => this.checked(method, request));
    return this.#repeat((options) => new Promise((resolve, reject) => {
      const call = this.client[method](options, settle(resolve, reject));
      for (const message of messages) call.write(message);
      call.end();
    }));
  }

  /** All answers of a server stream; a repeat starts it over. */
  async collect(method, request) {
    const message = this.checked(method, request);
    return this.#repeat(async (options) => {
      const answers = [];
      for await (const answer of this.client[method](message, options)) answers.push(answer);
      return answers;
    });
  }

  /**
   * Answers of a server stream as they come; leaving the loop cancels it. Not repeated: the caller has seen
   * a part. The request is a checked one.
   */
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

  /** The call of a method that streams both ways. The caller ends it. */
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
        const hasMoved = error.reason === 'REQUEST_MOVED'; // another engine is to be asked
        if (error.code !== UNAVAILABLE || hasMoved || Date.now() + next > started + this.retryMs) throw error;
        await pause(next);
      }
    }
  }
}

function settle(resolve, reject) {
  return (error, answer) => (error ? reject(error) : resolve(answer));
}
