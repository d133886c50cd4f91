// Every node of a bucket class in a table that sorts by any column: its backend, its costs, and the refusals.

import { backendTag } from "./code.js";
import { h } from "./dom.js";
import { bytes, count, plural, seconds } from "./format.js";
import { matcher } from "./search.js";
import { bucketName } from "./step_names.js";

const FIELDS = "key name op layer backend region flops bytes seconds candidates refusals".split(" ");
const PORTION = 200; // rows made at once

/**
 * The columns: their sort keys and cells. Columns of `figure` are numbers; the largest comes first
 * with `down`. An `optional` column is shown only if a row has a value for it.
 */
function columnsOf(app) {
  const unknown = (value, text) => (value === null ? "–" : text(value));
  const list = (kind, values) =>
    values.length > 0
      ? h(
          "ul",
          { class: kind },
          values.map((value) => h("li", {}, value)),
        )
      : "–";
  return [
    { name: "node", value: (row) => row.name, cell: (row, step) => nodeLink(app, row, step) },
    { name: "op", value: (row) => row.op, cell: (row) => row.op },
    { name: "layer", value: (row) => row.layer, cell: (row) => unknown(row.layer, String), figure: true },
    { name: "backend", value: (row) => row.backend, cell: (row) => backendTag(app, row.backend) },
    { name: "flops", value: (row) => row.flops, cell: (row) => count(row.flops), figure: true, down: true },
    { name: "bytes", value: (row) => row.bytes, cell: (row) => unknown(row.bytes, bytes), figure: true, down: true },
    { name: "seconds", value: (row) => row.seconds, cell: (row) => seconds(row.seconds), figure: true, down: true },
    {
      name: "candidates",
      value: (row) => row.candidates.length,
      cell: (row) => list("claims", row.candidates),
      down: true,
    },
    { name: "refusals", value: (row) => row.refusals.length, cell: (row) => list("reasons", row.refusals), down: true },
  ].map((column) => ({ optional: column.down && column.name !== "refusals", ...column }));
}

function nodeLink(app, { key, name, region }, step) {
  return [
    h("button", { type: "button", class: "link", onclick: () => app.select(key, step, true) }, `%${name}`),
    region && h("span", { class: "quiet" }, `in %${region}`),
  ];
}

export function nodesView(app) {
  const tables = app.data.nodes.map((table) => ({
    ...table,
    rows: table.rows.map((fields) => Object.fromEntries(FIELDS.map((field, at) => [field, fields[at]]))),
  }));
  if (!tables.length)
    return h("div", { class: "panel" }, h("p", { class: "quiet" }, "No pass chose backends in this artifact."));
  const rows = tables.flatMap((table) => table.rows);
  const columns = columnsOf(app).filter(({ optional, value }) => !optional || rows.some((row) => value(row)));
  let view = { table: tables[0], filter: "", column: null, down: false, limit: PORTION };

  const body = h("tbody");
  const status = h("p", { class: "status", role: "status" });
  const basis = h("p", { class: "quiet" });
  const more = h("button", { type: "button", class: "more", onclick: () => change({ limit: view.limit + PORTION }) });
  const heads = columns.map((column) =>
    h(
      "th",
      { scope: "col", class: column.figure ? "figure" : null },
      h("button", { type: "button", class: "sort", onclick: () => sortBy(column) }, column.name),
    ),
  );

  /** Sort by a column; a second call reverses the order. */
  function sortBy(column) {
    change({ column, down: view.column === column ? !view.down : Boolean(column.down) });
  }

  function change(fields) {
    view = { ...view, limit: PORTION, ...fields };
    const matches = matcher(view.filter) ?? (() => true);
    const text = (row) => [row.name, row.op, row.backend, row.region, ...row.refusals].join(" ");
    const wanted = view.table.rows.filter((row) => matches(text(row), row.layer));
    if (view.column) wanted.sort((one, other) => compare(view.column.value(one), view.column.value(other), view.down));
    body.replaceChildren(...wanted.slice(0, view.limit).map(tableRow));
    heads.forEach((head, at) => {
      const sorted = columns[at] === view.column;
      head.setAttribute("aria-sort", sorted ? (view.down ? "descending" : "ascending") : "none");
    });
    const left = wanted.length - view.limit;
    more.hidden = left <= 0;
    more.textContent = `Show ${Math.min(PORTION, left)} more of ${left}`;
    status.textContent = [plural(wanted.length, "node"), ...totals(wanted)].join(", ");
    basis.textContent = view.table.basis;
  }

  function tableRow(row) {
    const cell = (column) =>
      h(
        "td",
        { "data-column": column.name, class: column.figure ? "figure" : null },
        column.cell(row, view.table.step),
      );
    return h("tr", { class: row.region ? "inside" : null }, columns.map(cell));
  }

  const bucket = h(
    "select",
    { "aria-label": "Bucket class" },
    tables.map(({ step }, at) => h("option", { value: at }, bucketName(app.data.steps[step]))),
  );
  bucket.addEventListener("change", () => change({ table: tables[Number(bucket.value)] }));
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
    h("div", { class: "controls" }, bucket, filter, basis, status),
    h(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Nodes" },
      h("table", { class: "sortable" }, h("thead", {}, h("tr", {}, heads)), body),
    ),
    more,
  );
}

/** The total costs of rows, with regions but without their inner calls; nothing if no costs are known. */
function totals(rows) {
  const whole = rows.filter((row) => !row.region);
  const sum = (field) => whole.reduce((total, row) => total + row[field], 0);
  return [sum("flops") > 0 && `${count(sum("flops"))} flops`, sum("bytes") > 0 && bytes(sum("bytes"))].filter(Boolean);
}

/** Sort words alphabetically, with numbers in them by size; unknown values come last in both orders. */
function compare(one, other, down) {
  if (one === null || other === null) return (one === null) - (other === null);
  const order = typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true });
  return down ? -order : order;
}
