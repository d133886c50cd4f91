// The record of one pass: contract, matches, time, ops added and removed, and its refusals.

import { countTags } from "./code.js";
import { h } from "./dom.js";
import { bytes, plural, seconds } from "./format.js";

const NODES_SHOWN = 12; // maximum nodes per reason

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
    : [
        `leads to ${step.stage}`,
        step.numerics,
        plural(step.matches, "match", "matches"),
        seconds(step.seconds),
        step.peak_bytes && `process at most ${bytes(step.peak_bytes)}`,
      ].filter(Boolean);
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
    step.rewrites.length > 0 && rewrites(app, step),
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

/** A list that is made when it is opened, because a deep model's is long. */
function disclosed(kind, summary, make) {
  const details = h("details", { class: `disclosed ${kind}` }, h("summary", {}, summary));
  const fill = () => details.open && details.childElementCount === 1 && details.append(h("ul", {}, make()));
  details.addEventListener("toggle", fill);
  return details;
}

function nodeLinks(app, names) {
  return names.map((name) =>
    h("button", { type: "button", class: "link", onclick: () => app.select(name) }, `%${name}`),
  );
}

/** Each rewrite with its anchor value, and the values that it made and that still exist after the pass. */
function rewrites(app, step) {
  return disclosed("rewrites", plural(step.rewrites.length, "rewrite"), () =>
    step.rewrites.map(([anchor, made], number) =>
      h(
        "li",
        {},
        h(
          "span",
          { class: "nodes" },
          h("span", { class: "index" }, number),
          nodeLinks(app, [anchor]),
          made.length > 0 && "made",
          nodeLinks(app, made),
        ),
      ),
    ),
  );
}

/** Reasons with their nodes, the most frequent first. */
function refusals(app, step) {
  const byReason = Map.groupBy(step.refusals, ([, reason]) => reason);
  const reasons = [...byReason].sort(([, one], [, other]) => other.length - one.length);
  const title = `${plural(step.refusals.length, "refusal")}, ${plural(reasons.length, "reason")}`;
  return disclosed("refusals", title, () =>
    reasons.map(([reason, nodes]) =>
      h(
        "li",
        {},
        h("span", { class: "reason" }, h("b", {}, `${nodes.length} × `), reason),
        h(
          "span",
          { class: "nodes" },
          nodeLinks(
            app,
            nodes.slice(0, NODES_SHOWN).map(([node]) => node),
          ),
          nodes.length > NODES_SHOWN && ` and ${nodes.length - NODES_SHOWN} more`,
        ),
      ),
    ),
  );
}
