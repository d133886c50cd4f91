// Assemble the page.

import { Api } from "./api.js";
import { Conversation } from "./conversation.js";
import { startFigures } from "./figures.js";
import { count } from "./format.js";
import { startTheme } from "./theme.js";

const READY_MS = 500;
const MOST_TOKENS = 512; // of an answer, until the reader says otherwise
const part = (id) => document.getElementById(id);

/** The sampling fields that the reader has set. */
function sampling() {
  const set = ["temperature", "top_p", "max_tokens"].filter((name) => part(name).value !== "");
  return Object.fromEntries(set.map((name) => [name, Number(part(name).value)]));
}

function start() {
  startTheme(part("theme"));
  const api = new Api();
  const conversation = new Conversation(api, part("log"));
  const readFigures = startFigures(api, part("figures"), part("figures-state"));
  let connected = 0; // how often `connect` was called: a later call replaces an earlier one

  function show() {
    part("stop").hidden = !conversation.running;
    part("send").hidden = conversation.running;
  }

  /** Read the model's description, then wait until the server is ready. */
  async function connect() {
    const own = (connected += 1);
    try {
      const model = await api.model();
      if (own !== connected) return;
      conversation.chats = model.has_chat_template;
      part("model").textContent = document.title = model.id;
      for (const field of document.querySelectorAll(".for-chats")) field.hidden = !conversation.chats;
      part("text").placeholder = conversation.chats ? "Message" : "Text to continue (the model has no chat template)";
      part("text").setAttribute("aria-label", conversation.chats ? "Message" : "Text to continue");
      part("max_tokens").value ||= Math.min(MOST_TOKENS, Math.ceil(model.max_model_len / 4));
      for (const id of ["text", "send"]) part(id).disabled = false;
      const context = `${count(model.max_model_len)} tokens of context`;
      part("state").textContent = `starting · ${context}`;
      readFigures();
      while (!(await api.ready())) await new Promise((done) => setTimeout(done, READY_MS));
      if (own === connected) part("state").textContent = `ready · ${context}`;
    } catch (error) {
      if (own !== connected) return;
      part("state").textContent = error.status === 401 ? "needs an API key" : error.message;
      if (error.status === 401) part("settings").open = true;
      else setTimeout(connect, 4 * READY_MS);
    }
  }

  async function send() {
    const text = part("text").value;
    if (!text || part("send").disabled || conversation.running) return;
    part("text").value = "";
    const answer = conversation.send(text, { system: part("system").value.trim(), sampling: sampling() });
    show();
    const failed = await answer;
    show();
    if (failed && !part("text").value) part("text").value = text;
    if (failed && failed.status !== 400) connect();
  }

  part("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  part("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  part("stop").addEventListener("click", () => conversation.stop());
  part("new").addEventListener("click", () => {
    conversation.clear();
    part("text").focus();
  });
  part("fields").addEventListener("submit", (event) => event.preventDefault());
  part("key").addEventListener("change", () => {
    api.key = part("key").value;
    connect();
  });
  show();
  connect();
}

start();
