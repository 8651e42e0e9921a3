/** What a client has of a request's output, so that another stream goes on behind it; and the engine that has the request. */
export class Received {
  requestId;
  address = ''; // of the engine that took the request over; empty: the client's own
  #outputs = new Map(); // by continuation

  constructor(requestId = '') {
    this.requestId = requestId;
  }

  /** A message has come. */
  add({ requestId, index, tokenIds, finishReason }) {
    this.requestId = requestId;
    const output = this.#outputs.get(index) ?? { index, numTokens: 0, hasEnded: false };
    output.numTokens += tokenIds.length;
    output.hasEnded ||= finishReason !== 'FINISH_REASON_UNSPECIFIED';
    this.#outputs.set(index, output);
  }

  /** The request goes on in another engine. @param {{address: string, request_id?: string}} metadata of REQUEST_MOVED */
  move(metadata) {
    this.address = metadata.address;
    this.requestId = metadata.request_id ?? this.requestId;
  }

  /** The request of StreamRequest for the rest. */
  rest() {
    return { requestId: this.requestId, received: [...this.#outputs.values()] };
  }
}
