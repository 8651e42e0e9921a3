/**
 * What a client shows a service, and how it knows the service: a token, a certificate, an authority. Files in PEM. What is not
 * given is taken from KVKEEPER_TOKEN_FILE, KVKEEPER_TLS_CA, KVKEEPER_TLS_CERT and KVKEEPER_TLS_KEY. A token goes over TLS, loopback
 * or a Unix socket, and nowhere else; its file is read anew for each call.
 */
import { readFileSync } from 'node:fs';
import net from 'node:net';
import grpc from '@grpc/grpc-js';
import { KvkeeperError } from './errors.js';

export class Credentials {
  #shown;
  #lastToken = '';

  /** @param {{token: string, tokenFile: string, tlsCa: string, tlsCert: string, tlsKey: string}} given empty: not given */
  constructor(given) {
    const { env } = process;
    this.#shown = {
      token: given.token,
      tokenFile: given.tokenFile || (given.token ? '' : env.KVKEEPER_TOKEN_FILE),
      tlsCa: given.tlsCa || env.KVKEEPER_TLS_CA,
      tlsCert: given.tlsCert || env.KVKEEPER_TLS_CERT,
      tlsKey: given.tlsKey || env.KVKEEPER_TLS_KEY,
    };
  }

  get hasToken() {
    return Boolean(this.#shown.token || this.#shown.tokenFile);
  }

  /** Of a channel to the address. Throws KvkeeperError for unusable files, and where a token would go in the clear. */
  channel(address) {
    const { tlsCa, tlsCert, tlsKey } = this.#shown;
    if (address.startsWith('unix:')) return grpc.credentials.createInsecure();
    if (!tlsCa) {
      if (tlsCert || tlsKey) throw refused('a certificate is shown over TLS alone: give tlsCa (KVKEEPER_TLS_CA), too');
      if (this.hasToken && !isLoopback(address)) {
        throw refused(`a token goes to ${address} over TLS alone: give tlsCa (KVKEEPER_TLS_CA), too`);
      }
      return grpc.credentials.createInsecure();
    }
    if (!tlsCert !== !tlsKey) throw refused('tlsCert and tlsKey go together');
    return grpc.credentials.createSsl(read(tlsCa), tlsKey ? read(tlsKey) : null, tlsCert ? read(tlsCert) : null);
  }

  /** Of a channel: they put the token into each call. */
  get interceptors() {
    if (!this.hasToken) return [];
    return [(options, nextCall) => new grpc.InterceptingCall(nextCall(options), {
      start: (metadata, listener, next) => {
        metadata.set('authorization', `Bearer ${this.#token()}`);
        next(metadata, listener);
      },
    })];
  }

  /** A file that is being written, or is gone, changes nothing once it was read: the token of before is shown until then. */
  #token() {
    if (this.#shown.token) return this.#shown.token;
    try {
      this.#lastToken = tokenIn(this.#shown.tokenFile);
    } catch (error) {
      if (!this.#lastToken) throw error;
    }
    return this.#lastToken;
  }
}

function tokenIn(path) {
  const token = read(path).toString().trim();
  if (!/^[!-~]{1,256}$/.test(token)) throw refused(`the token file ${path} holds one token and nothing else`);
  return token;
}

function isLoopback(address) {
  const host = address.slice(0, address.lastIndexOf(':')).replace(/^\[|\]$/g, '');
  return host === 'localhost' || host === '::1' || (net.isIPv4(host) && host.startsWith('127.'));
}

function read(path) {
  try {
    return readFileSync(path);
  } catch (error) {
    throw refused(`${path}: ${error.code}`);
  }
}

function refused(text) {
  return new KvkeeperError(grpc.status.UNAUTHENTICATED, 'CREDENTIALS', text);
}
