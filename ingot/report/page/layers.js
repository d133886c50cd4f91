// A program as sections: its interface, what comes before the layers, the layers, what comes after, and regions.
// Layers with text equal up to names, and with equal changes in a step, are one section.

import { pieces } from "./program.js";
import { ranges } from "./format.js";

const INTERFACE = new Set(["dim", "mesh", "input", "state"]);

/** The nodes of a program, with removed ones in their old places; each entry has node, mark and hit. */
function entries(program, changes, hit) {
  const removed = Map.groupBy(changes.removed, (node) => node.after);
  const gone = (key) => (removed.get(key) ?? []).map((node) => ({ node, mark: "removed", hit: hit(node) }));
  const made = gone(null);
  for (const [key, node] of program.nodes) {
    made.push({ node, mark: changes.marks.get(key) ?? "", hit: hit(node) }, ...gone(key));
  }
  return made;
}

/** The text of entries, with every name replaced by its order, and the layer's own number by a sign. */
function shape(list, layer) {
  const order = new Map();
  const renamed = (name) => {
    if (!order.has(name)) order.set(name, order.size);
    return `%${order.get(name)}`;
  };
  const text = (value) =>
    pieces(value)
      .map((piece) => (piece.startsWith("%") ? renamed(piece.slice(1)) : piece.replaceAll(`.${layer}.`, ".#.")))
      .join("")
      .replace(`layer=${layer}`, "layer=#");
  return list
    .map(({ node, mark, hit }) =>
      [
        mark,
        hit,
        node.kind,
        renamed(node.name),
        node.op,
        text(node.text),
        node.type.replace(/<([\w.]+)>/g, (_, name) => `<${renamed(name)}>`),
        node.placement,
        node.backend,
        node.origin.replaceAll(/layer \d+/g, (each) => `layer ${Number(each.slice(6)) - layer}`),
      ].join("\t"),
    )
    .join("\n");
}

function section(id, title, members) {
  const counts = { added: 0, removed: 0, changed: 0 };
  let hits = 0;
  for (const { mark, hit } of members[0].entries) {
    if (mark) counts[mark] += 1;
    if (hit) hits += 1;
  }
  return { id, title, members, counts, hits };
}

/**
 * The sections of a program, each with one or more members, which are equal layers.
 * `hit` returns whether a search matches a node; layers are folded only if their matches are equal.
 */
export function sections(program, changes, hit) {
  const parts = new Map([
    ["interface", []],
    ["before", []],
  ]);
  const after = [];
  const regions = new Map();
  let layered = false;
  for (const entry of entries(program, changes, hit)) {
    const { kind, region, layer } = entry.node;
    if (region) regions.set(region, [...(regions.get(region) ?? []), entry]);
    else if (INTERFACE.has(kind) || (kind === "param" && layer === null)) parts.get("interface").push(entry);
    else if (layer !== null) {
      layered ||= kind === "call";
      if (!parts.has(layer)) parts.set(layer, []);
      parts.get(layer).push(entry);
    } else (layered ? after : parts.get("before")).push(entry);
  }
  const named = (id, title, list) => (list.length ? [section(id, title, [{ layer: null, entries: list }])] : []);
  const layers = [...parts].filter(([id]) => typeof id === "number").sort(([one], [other]) => one - other);
  const folded = Map.groupBy(layers, ([layer, list]) => shape(list, layer));
  return [
    ...named("interface", "Inputs, states and shared params", parts.get("interface")),
    ...named("before", layers.length ? "Before the layers" : "Nodes", parts.get("before")),
    ...[...folded.values()].map((members) =>
      section(
        `layer ${members[0][0]}`,
        `${members.length > 1 ? "Layers" : "Layer"} ${ranges(members.map(([layer]) => layer))}`,
        members.map(([layer, list]) => ({ layer, entries: list })),
      ),
    ),
    ...named("after", "After the layers", after),
    ...[...regions].flatMap(([name, list]) => named(`region ${name}`, `Region ${name}`, list)),
  ];
}
