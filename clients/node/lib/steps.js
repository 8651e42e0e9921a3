/**
 * Steps: the columns of a Step as arrays of numbers, and one session's stream of them.
 *
 * Columns have their names in the protocol, in camelCase; those left out are empty.
 */
import { kindOf } from './checked.js';
import { errorOf } from './errors.js';

const INT64_COLUMN = /(sequenceIds|transferIds|forkParentIds|forkChildIds)$/i;

/** @param {Object<string, ArrayLike<number>>} items */
export function encodeColumns(items) {
  return Object.fromEntries(Object.entries(items).map(([name, values]) => {
    if (!Array.isArray(values) && !ArrayBuffer.isView(values)) {
      throw new TypeError(`${name}: an array of numbers, not ${kindOf(values)}`);
    }
    const is64 = INT64_COLUMN.test(name);
    const buffer = Buffer.alloc(values.length * (is64 ? 8 : 4));
    for (let i = 0; i < values.length; i += 1) {
      if (is64) buffer.writeBigInt64LE(BigInt(values[i]), 8 * i);
      else buffer.writeInt32LE(values[i], 4 * i);
    }
    return [name, buffer];
  }));
}

/** The same message with an array of numbers for each column. */
export function decodeColumns(answer) {
  return Object.fromEntries(Object.entries(answer).map(([name, value]) => {
    if (!Buffer.isBuffer(value)) return [name, value];
    const is64 = INT64_COLUMN.test(name);
    const numbers = Array.from({ length: value.length / (is64 ? 8 : 4) }, (_, i) => (
      is64 ? Number(value.readBigInt64LE(8 * i)) : value.readInt32LE(4 * i)
    ));
    return [name, numbers];
  }));
}

/** A StreamSteps call. One step is out at a time; a failed one ends the stream. */
export class StepStream {
  #call;
  #waiting = null;
  #failure = null;

  constructor(call) {
    this.#call = call;
    call.on('data', (answer) => this.#settle((waiting) => waiting.resolve(answer)));
    call.on('error', (error) => {
      this.#failure = errorOf(error);
      this.#settle((waiting) => waiting.reject(this.#failure));
    });
  }

  exchange(request) {
    if (this.#waiting) throw new Error('the step before has not been answered');
    return new Promise((resolve, reject) => {
      if (this.#failure) {
        reject(this.#failure);
        return;
      }
      this.#waiting = { resolve, reject };
      this.#call.write(request);
    });
  }

  end() {
    this.#call.end();
  }

  #settle(how) {
    const waiting = this.#waiting;
    this.#waiting = null;
    if (waiting) how(waiting);
  }
}
