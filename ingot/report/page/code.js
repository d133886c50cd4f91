// Program text with its names and strings marked.

import { h } from "./dom.js";
import { pieces } from "./program.js";

/** Text as spans; `link` makes the element of a name, by default a plain span. */
export function code(text, link = (name) => h("span", { class: "name" }, `%${name}`)) {
  return pieces(text).map((piece) => {
    if (piece.startsWith("%")) return link(piece.slice(1));
    return piece.startsWith('"') ? h("span", { class: "string" }, piece) : piece;
  });
}

/** An op's name, with a dimmer dialect. */
export function opName(op) {
  const dot = op.indexOf(".");
  return dot < 0
    ? h("b", {}, op)
    : [h("span", { class: "quiet" }, op.slice(0, dot + 1)), h("b", {}, op.slice(dot + 1))];
}

/** Split a list of arguments at the commas outside brackets and strings. */
export function splitArguments(text) {
  const parts = [];
  let depth = 0;
  let begin = 0;
  for (const { 0: found, index } of text.matchAll(/"(?:[^"\\]|\\.)*"|[()[\],]/g)) {
    if ("([".includes(found)) depth += 1;
    else if (")]".includes(found)) depth -= 1;
    else if (found === "," && depth === 0) {
      parts.push(text.slice(begin, index).trim());
      begin = index + 1;
    }
  }
  return text ? [...parts, text.slice(begin).trim()] : [];
}

/** Break a recipe that does not fit on one line at the arguments of its steps, indented by two blanks each. */
export function indented(text, width = 44) {
  if (text.length <= width) return text;
  const opened = text.indexOf("(");
  if (opened < 0 || !text.endsWith(")")) return text;
  const given = splitArguments(text.slice(opened + 1, -1));
  if (given.length === 1 && !given[0].includes("(")) return text;
  const inner = given.map((part) => indented(part, width - 2).replaceAll("\n", "\n  "));
  return `${text.slice(0, opened)}(\n  ${inner.join(",\n  ")}\n)`;
}

/** The backend of a node, in its own colour. */
export function backendTag(app, backend) {
  if (!backend) return null;
  return h("span", { class: "backend", "data-hue": app.backends.indexOf(backend) % 6 }, backend);
}

/** Additions, removals and changes as small coloured numbers; none if there are none. */
export function countTags({ added, removed, changed }) {
  return [
    added > 0 && h("span", { class: "count added", title: `${added} added` }, `+${added}`),
    removed > 0 && h("span", { class: "count removed", title: `${removed} removed` }, `−${removed}`),
    changed > 0 && h("span", { class: "count changed", title: `${changed} changed` }, `~${changed}`),
  ];
}
