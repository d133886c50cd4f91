// One answer in the log: its text as it arrives, and its figures at the end. Text becomes text nodes, and never markup.

import { h } from "./dom.js";
import { plural, seconds } from "./format.js";

/** Add a turn to the log: `kind` is "user", "assistant", "completion" or "error"; `says` names the author. */
export function addTurn(log, kind, says, text = "") {
  const words = h("div", { class: "text" }, text);
  const facts = h("p", { class: "facts" });
  const alert = kind === "error" ? { role: "alert" } : {};
  const turn = h("article", { class: `turn ${kind}`, ...alert }, h("p", { class: "says" }, says), words, facts);
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return { turn, words, facts };
}

/** Writes text that arrives in pieces, once for each frame of the screen, and keeps the end of the log in view. */
export class TextWriter {
  #node = document.createTextNode("");
  #waiting = "";
  #frame = null;
  #log;
  text = "";

  constructor(log, words) {
    this.#log = log;
    words.append(this.#node);
  }

  add(piece) {
    this.text += piece;
    this.#waiting += piece;
    this.#frame ??= requestAnimationFrame(() => this.flush());
  }

  /** Write all pieces now. */
  flush() {
    cancelAnimationFrame(this.#frame);
    this.#frame = null;
    keepingEnd(this.#log, () => this.#node.appendData(this.#waiting));
    this.#waiting = "";
  }
}

/** Change the log. If its end is in view, it is in view afterwards too. */
export function keepingEnd(log, change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

const ENDS = { stop: "", length: "reached the limit of tokens", abort: "stopped" };

/** Measures an answer: the time to its first token, and its tokens per second. */
export class Stopwatch {
  #begin = performance.now();
  #first = null;
  #last = null;

  token() {
    this.#last = performance.now();
    this.#first ??= this.#last;
  }

  /** The figures as text. `usage` is null if the answer was stopped. */
  facts(usage, reason) {
    const parts = [];
    if (usage) parts.push(plural(usage.completion_tokens, "token"));
    if (this.#first !== null) parts.push(`first after ${seconds((this.#first - this.#begin) / 1000)}`);
    if (usage && usage.completion_tokens > 1 && this.#last > this.#first) {
      const rate = ((usage.completion_tokens - 1) * 1000) / (this.#last - this.#first);
      parts.push(`${rate.toPrecision(3)} tokens/s`);
    }
    parts.push(ENDS[reason] ?? reason);
    return parts.filter(Boolean).join(" · ");
  }
}
