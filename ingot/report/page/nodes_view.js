// Every node of a bucket class in a table that any column sorts: who computes it, what it costs, who declined it.

import { providerTag } from "./code.js";
import { h } from "./dom.js";
import { bucketName, bytes, count, plural } from "./format.js";
import { matcher } from "./search.js";

const FIELDS = ["step", "node", "provider", "refusals", "candidates", "flops", "bytes"];
const PORTION = 200; // rows made at once

const COLUMNS = [
  ["node", (row) => row.node],
  ["op", (row) => row.op],
  ["layer", (row) => row.layer],
  ["provider", (row) => row.provider],
  ["flops", (row) => row.flops],
  ["bytes", (row) => row.bytes],
  ["candidates", (row) => row.candidates.length],
  ["refusals", (row) => row.refusals.length],
];
const NUMBERS = new Set(["layer", "flops", "bytes", "candidates", "refusals"]);

/** Lists of reasons sort by their number, and read from the left. */
function figure(column) {
  return ["layer", "flops", "bytes"].includes(column) ? "figure" : null;
}

export function nodesView(app) {
  const rows = app.data.nodes.map((fields) => {
    const row = Object.fromEntries(FIELDS.map((field, at) => [field, fields[at]]));
    const { op = "", layer = null } = app.programs.at(row.step).nodes.get(row.node) ?? {};
    return { ...row, op, layer };
  });
  const steps = [...new Set(rows.map((row) => row.step))];
  if (!steps.length)
    return h("div", { class: "panel" }, h("p", { class: "quiet" }, "No pass chose providers in this artifact."));
  const columns = COLUMNS.filter(
    ([name, value]) => !["flops", "bytes", "candidates"].includes(name) || rows.some((row) => value(row)),
  );
  let view = { step: steps[0], filter: "", column: null, down: false, limit: PORTION };

  const body = h("tbody");
  const status = h("p", { class: "status", role: "status" });
  const more = h("button", { type: "button", class: "more", onclick: () => change({ limit: view.limit + PORTION }) });
  const heads = columns.map(([name]) =>
    h(
      "th",
      { scope: "col", class: figure(name) },
      h("button", { type: "button", class: "sort", onclick: () => sortBy(name) }, name),
    ),
  );

  function sortBy(name) {
    // Numbers begin with the largest, words with the first of the alphabet; again turns it round.
    change({ column: name, down: view.column === name ? !view.down : NUMBERS.has(name) && name !== "layer" });
  }

  function change(fields) {
    view = { limit: PORTION, ...view, ...("limit" in fields ? {} : { limit: PORTION }), ...fields };
    const matches = matcher(view.filter) ?? (() => true);
    const text = (row) => [row.node, row.op, row.provider, ...row.refusals].join(" ");
    const wanted = rows.filter((row) => row.step === view.step && matches(text(row), row.layer));
    const value = columns.find(([name]) => name === view.column)?.[1];
    if (value) wanted.sort((one, other) => compare(value(one), value(other), view.down));
    body.replaceChildren(...wanted.slice(0, view.limit).map((row) => tableRow(row)));
    heads.forEach((head, at) => {
      const sorted = columns[at][0] === view.column;
      head.setAttribute("aria-sort", sorted ? (view.down ? "descending" : "ascending") : "none");
    });
    const left = wanted.length - view.limit;
    more.hidden = left <= 0;
    more.textContent = `Show ${Math.min(PORTION, left)} more of ${left}`;
    status.textContent = plural(wanted.length, "node");
  }

  function tableRow(row) {
    const cells = {
      node: () =>
        h(
          "button",
          { type: "button", class: "link", onclick: () => app.select(row.node, row.step, true) },
          `%${row.node}`,
        ),
      op: () => row.op,
      layer: () => row.layer ?? "–",
      provider: () => providerTag(app, row.provider),
      flops: () => count(row.flops),
      bytes: () => (row.bytes === null ? "–" : bytes(row.bytes)),
      candidates: () => row.candidates.join("; ") || "–",
      refusals: () =>
        row.refusals.length
          ? h(
              "ul",
              { class: "reasons" },
              row.refusals.map((reason) => h("li", {}, reason)),
            )
          : "–",
    };
    return h(
      "tr",
      {},
      columns.map(([name]) => h("td", { "data-column": name, class: figure(name) }, cells[name]())),
    );
  }

  const bucket = h(
    "select",
    { "aria-label": "Bucket class" },
    steps.map((step) => h("option", { value: step }, bucketName(app.data.steps[step]))),
  );
  bucket.addEventListener("change", () => change({ step: Number(bucket.value) }));
  const filter = h("input", {
    type: "search",
    placeholder: "Filter",
    "aria-label": "Filter nodes",
    autocomplete: "off",
  });
  filter.addEventListener("input", () => change({ filter: filter.value }));
  change({});
  return h(
    "div",
    { class: "panel wide nodes" },
    h("div", { class: "controls" }, bucket, filter, status),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Nodes" },
      h("table", { class: "sortable" }, h("thead", {}, h("tr", {}, heads)), body),
    ),
    more,
  );
}

/** Words by the alphabet with numbers in them by size; what is not known comes last either way. */
function compare(one, other, down) {
  if (one === null || other === null) return (one === null) - (other === null);
  const order = typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true });
  return down ? -order : order;
}
