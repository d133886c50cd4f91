// What is recorded of one pass: contract, matches, time, ops more and fewer, and where it declined.

import { countTags } from "./code.js";
import { h } from "./dom.js";
import { plural, seconds } from "./format.js";

export function createPassView(app) {
  const element = h("section", { class: "pass-view", "aria-live": "polite" });
  const update = ({ step }) => element.replaceChildren(...content(app, step).flat().filter(Boolean));
  return { element, update };
}

function content(app, number) {
  const step = app.data.steps[number];
  const { counts } = app.programs.changes(number);
  const traced = step.before === null;
  const facts = traced
    ? ["what the model's definition says, before any pass"]
    : [`leads to ${step.stage}`, step.numerics, plural(step.matches, "match", "matches"), seconds(step.seconds)];
  const options = Object.entries(step.options ?? {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
  return [
    h(
      "h2",
      {},
      h("span", { class: "dot", "data-stage": step.stage }),
      step.name,
      step.entry !== "main" && h("span", { class: "tag" }, step.entry),
      step.bucket && h("span", { class: "tag" }, step.bucket),
      h("span", { class: "number" }, `${number} of ${app.data.steps.length - 1}`),
    ),
    h(
      "p",
      { class: "facts" },
      facts.map((fact) => h("span", {}, fact)),
      options.map((one) => h("code", {}, one)),
    ),
    !traced && h("p", { class: "ops" }, changesText(step, counts)),
    step.refusals.length > 0 && refusals(app, step),
  ];
}

function changesText(step, counts) {
  const tags = countTags(counts).filter(Boolean);
  if (!tags.length) return h("span", { class: "quiet" }, "The program stays as it was.");
  const ops = Object.entries(step.op_count_diff ?? {}).sort(([, one], [, other]) => other - one);
  return [
    h("span", { class: "counts" }, tags, h("span", { class: "quiet" }, "nodes")),
    ops.map(([op, by]) =>
      h("span", { class: `chip ${by > 0 ? "added" : "removed"}` }, `${by > 0 ? "+" : "−"}${Math.abs(by)} ${op}`),
    ),
  ];
}

/** Reasons with the nodes that they are about, the most frequent first. */
function refusals(app, step) {
  const reasons = [...Map.groupBy(step.refusals, ([, reason]) => reason)].sort(
    ([, one], [, other]) => other.length - one.length,
  );
  const listed = (nodes) =>
    nodes
      .slice(0, 12)
      .map(([node]) => h("button", { type: "button", class: "link", onclick: () => app.select(node) }, `%${node}`));
  return h(
    "details",
    { class: "refusals" },
    h("summary", {}, plural(step.refusals.length, "refusal"), `, ${plural(reasons.length, "reason")}`),
    h(
      "ul",
      {},
      reasons.map(([reason, nodes]) =>
        h(
          "li",
          {},
          h("span", { class: "reason" }, h("b", {}, `${nodes.length} × `), reason),
          h("span", { class: "nodes" }, listed(nodes), nodes.length > 12 && ` and ${nodes.length - 12} more`),
        ),
      ),
    ),
  );
}
