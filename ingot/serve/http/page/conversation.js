// The conversation: what was said, and the request for the next answer.

import { Stopwatch, TextWriter, addTurn, keepingEnd } from "./answer.js";
import { h } from "./dom.js";

/** A chat by the model's template, or single completions of texts if `chats` is false. */
export class Conversation {
  #api;
  #log;
  #messages = [];
  #abort = null;
  chats = true;

  constructor(api, log) {
    this.#api = api;
    this.#log = log;
  }

  get running() {
    return this.#abort !== null;
  }

  /** Forget all turns. */
  clear() {
    this.stop();
    this.#messages = [];
    this.#log.replaceChildren();
  }

  stop() {
    this.#abort?.abort();
  }

  /** Send a text and show the answer. Returns the error if the server answers with one, else null.
   *
   * Reasoning is shown before the answer, in a quiet colour. A text without an answer is no part of the conversation.
   * `settings`: `system`, and `sampling` with fields of the request. */
  async send(text, { system, sampling }) {
    const abort = (this.#abort = new AbortController());
    const messages = this.#messages;
    const question = { role: "user", content: text };
    if (this.chats) addTurn(this.#log, "user", "You", text);
    const kind = this.chats ? ["assistant", "Model"] : ["completion", "Completion"];
    const { turn, words, facts } = addTurn(this.#log, ...kind);
    if (!this.chats) words.append(h("span", { class: "prompt" }, text));
    const thoughts = h("span", { class: "thoughts" });
    words.append(thoughts);
    const thinking = new TextWriter(this.#log, thoughts);
    const writer = new TextWriter(this.#log, words);
    const watch = new Stopwatch();
    const sent = system ? [{ role: "system", content: system }, ...messages, question] : [...messages, question];
    const [path, fields] = this.chats
      ? ["v1/chat/completions", { messages: sent }]
      : ["v1/completions", { prompt: text }];
    let usage = null;
    let reason = "";
    let failed = null;
    try {
      for await (const chunk of this.#api.stream(path, { ...fields, ...sampling }, abort.signal)) {
        const [choice] = chunk.choices;
        usage = chunk.usage ?? usage;
        if (!choice) continue;
        const piece = this.chats ? choice.delta.content : choice.text;
        const thought = choice.delta?.reasoning;
        if (thought || piece) watch.token();
        if (thought) thinking.add(thought);
        if (piece) {
          if (thinking.text && !writer.text) thinking.add("\n\n");
          writer.add(piece);
        }
        reason = choice.finish_reason ?? reason;
      }
    } catch (error) {
      if (error.name === "AbortError") reason = "abort";
      else failed = error;
    }
    thinking.flush();
    writer.flush();
    if (failed && !thinking.text && !writer.text) turn.remove();
    if (failed) addTurn(this.#log, "error", "Error", failed.message);
    else keepingEnd(this.#log, () => (facts.textContent = watch.facts(usage, reason)));
    const answer = { role: "assistant", content: writer.text };
    if (writer.text && messages === this.#messages) messages.push(question, answer);
    if (this.#abort === abort) this.#abort = null;
    return failed;
  }
}
