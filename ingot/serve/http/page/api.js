// Requests to this server, with the key that the reader has typed. The key is a variable and stored nowhere.

import { dataOf } from "./event_data.js";

/** A request that failed: `status` is the HTTP status, or 0 if there was no whole answer. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Api {
  #key = "";

  set key(key) {
    this.#key = key.trim();
  }

  /** The server's description of its model: the first card of /v1/models. */
  async model() {
    return (await (await this.#fetch("v1/models")).json()).data[0];
  }

  /** The metrics in Prometheus' text form. */
  async metrics() {
    return (await this.#fetch("metrics")).text();
  }

  /** Whether a request would be served now. */
  async ready() {
    try {
      await this.#fetch("ready");
      return true;
    } catch (error) {
      if (error.status === 503) return false;
      throw error;
    }
  }

  /** Yield the chunks of a streamed answer. Aborting `signal` ends the request, and raises its AbortError. */
  async *stream(path, body, signal) {
    const answer = await this.#fetch(path, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    for await (const data of dataOf(answer.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(0, chunk.error.message);
      yield chunk;
    }
    throw new ApiError(0, "the connection ended before the answer did");
  }

  async #fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.#key) headers.Authorization = `Bearer ${this.#key}`;
    let answer;
    try {
      answer = await fetch(new URL(path, document.baseURI), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "the server does not answer");
    }
    if (!answer.ok) throw new ApiError(answer.status, await messageOf(answer));
    return answer;
  }
}

/** The message of an error in OpenAI's form, or the status if a proxy has answered. */
async function messageOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the status of the answer is ${answer.status}`;
  }
}
