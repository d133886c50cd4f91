// Everything about one node: its origin, type and backend, its inputs and readers, and its history.

import { code, indented, opName, backendTag, splitArguments } from "./code.js";
import { button, h } from "./dom.js";
import { plural } from "./format.js";
import { lineText } from "./program.js";
import { stepName } from "./step_names.js";

const LISTED = 40; // maximum users shown; those of positions or masks would fill the page

export function createInspector(app) {
  const element = h("aside", { class: "inspector", "aria-label": "Node", hidden: true });
  const update = ({ step, node }) => {
    element.hidden = node === null;
    if (node !== null) element.replaceChildren(...content(app, step, node).flat(Infinity).filter(Boolean));
  };
  return { element, update };
}

function find(app, step, key) {
  const node = app.programs.at(step).nodes.get(key);
  const { marks, removed } = app.programs.changes(step);
  if (node) return { node, mark: marks.get(key) ?? "", shownAt: step };
  const gone = removed.find((one) => one.key === key);
  return gone ? { node: gone, mark: "removed", shownAt: app.programs.steps[step].before } : null;
}

function content(app, step, key) {
  const close = button("Close", { class: "icon close", onclick: () => app.store.set({ node: null }) }, "×");
  const found = find(app, step, key);
  const head = (mark) => h("header", {}, h("h2", {}, key), mark && h("span", { class: `count ${mark}` }, mark), close);
  const past = life(app, step, key);
  if (!found) return [head(""), h("p", { class: "quiet" }, "Not in the program after this pass."), past];
  const { node, mark, shownAt } = found;
  return [
    head(mark),
    facts(app, node),
    mark === "changed" && before(app, step, key),
    node.kind === "param" && node.text && block("Recipe", h("pre", {}, code(indented(node.text)))),
    node.kind === "call" && argumentsOf(app, shownAt, node),
    usersOf(app, shownAt, node),
    refusalsOf(app, step, node),
    past,
    block("Text", h("pre", { class: "line" }, code(lineText(node)))),
  ];
}

function block(title, ...children) {
  return h("section", {}, h("h3", {}, title), children);
}

function facts(app, node) {
  const kind = node.kind === "call" ? opName(node.op) : `${node.kind}${node.op && `, ${node.op}`}`;
  const rows = [
    [node.kind === "call" ? "op" : "kind", kind],
    ["type", node.type && h("code", {}, node.type)],
    ["placement", node.placement && h("code", {}, node.placement)],
    ["source", node.origin],
    ["layer", node.layer],
    ["region", node.region],
    ["backend", backendTag(app, node.backend)],
    [node.kind === "state" ? "group" : "", node.kind === "state" && node.text],
    [node.kind === "dim" ? "bounds" : "", node.kind === "dim" && node.text],
  ];
  return h(
    "dl",
    {},
    rows
      .filter(([name, value]) => name && value !== null && value !== "" && value !== false)
      .map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

function linkTo(app, step, region) {
  return (name) => {
    const target = app.programs.resolve(step, name, region);
    if (!target) return h("span", { class: "name" }, `%${name}`);
    return h("button", { type: "button", class: "link", onclick: () => app.select(target.key, step) }, `%${name}`);
  };
}

function argumentsOf(app, step, node) {
  if (!node.text) return null;
  const link = linkTo(app, step, node.region);
  const typeOf = (text) => (text.startsWith("%") ? app.programs.resolve(step, text.slice(1), node.region)?.type : "");
  const region = node.op.startsWith("region.") && node.op.slice("region.".length);
  return block(
    "Arguments",
    h(
      "ul",
      { class: "values" },
      splitArguments(node.text).map((text) =>
        h("li", {}, h("code", {}, code(text, link)), h("code", { class: "quiet" }, typeOf(text))),
      ),
    ),
    region &&
      h(
        "p",
        {},
        h(
          "button",
          { type: "button", class: "link", onclick: () => app.showRegion(region) },
          `body of region ${region}`,
        ),
      ),
  );
}

function usersOf(app, step, node) {
  const { users, results } = app.programs.users(step, node);
  if (!users.length && !results.length) return block("Users", h("p", { class: "quiet" }, "none"));
  return block(
    "Users",
    h(
      "ul",
      { class: "values" },
      users
        .slice(0, LISTED)
        .map((user) => h("li", {}, linkTo(app, step, node.region)(user.name), h("code", { class: "quiet" }, user.op))),
      users.length > LISTED && h("li", { class: "quiet" }, `and ${users.length - LISTED} more`),
      results.map((result) => h("li", {}, `${node.region ? "the region's" : "the program's"} result ${result}`)),
    ),
  );
}

/** The line as it was before the pass that changed it. */
function before(app, step, key) {
  const old = app.programs.at(app.programs.steps[step].before).nodes.get(key);
  return block("Before this pass", h("pre", { class: "line removed" }, code(lineText(old))));
}

function refusalsOf(app, step, node) {
  const reasons = app.programs
    .lineage(step)
    .flatMap((number) =>
      app.data.steps[number].refusals.filter(([name]) => name === node.name).map(([, reason]) => [number, reason]),
    );
  if (!reasons.length) return null;
  return block(
    plural(reasons.length, "refusal"),
    h(
      "ul",
      { class: "values" },
      reasons.map(([number, reason]) => h("li", {}, passLink(app, number), h("span", {}, reason))),
    ),
  );
}

function life(app, step, key) {
  const events = app.programs.life(step, key);
  if (!events.length) return null;
  return block(
    "Life",
    h(
      "ul",
      { class: "values" },
      events.map(([number, mark]) =>
        h(
          "li",
          { "aria-current": number === step ? "step" : null },
          h("span", { class: `count ${mark}` }, mark),
          passLink(app, number),
        ),
      ),
    ),
  );
}

function passLink(app, number) {
  return h(
    "button",
    { type: "button", class: "link", onclick: () => app.store.set({ step: number }) },
    stepName(app.data.steps[number]),
  );
}
