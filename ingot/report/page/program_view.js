// The program after the chosen pass: a card for each section, its nodes made when it is open.

import { code, countTags, opName, backendTag } from "./code.js";
import { button, h } from "./dom.js";
import { plural } from "./format.js";
import { sections } from "./layers.js";
import { lineText } from "./program.js";
import { matcher } from "./search.js";

const MARKS = { added: "+", removed: "−", changed: "~" };
const OPEN_AT_FIRST = 3; // cards with changes that open automatically

/** Whether a search matches a node; an empty search matches none. */
function wanted(query) {
  const matches = matcher(query);
  return (node) => matches !== null && matches(lineText(node), node.layer);
}

/** A name as a card of its layer shows it: without the layer, which is in the card's title. */
function within(layer, name) {
  const start = `layers.${layer}.`;
  return name.startsWith(start) ? name.slice(start.length) : name;
}

function what(node, layer) {
  if (node.kind === "param") return code(node.text);
  if (node.kind !== "call")
    return h("span", { class: "quiet" }, [node.kind, node.op, node.text].filter(Boolean).join(" "));
  const link = (name) => h("span", { class: "name" }, `%${within(layer, name)}`);
  return [opName(node.op), "(", code(node.text, link), ")"];
}

export function createProgramView(app) {
  const cards = h("div", { class: "cards" });
  const status = h("p", { class: "status", role: "status" });
  const element = h("section", { class: "program", "aria-label": "Program" }, status, cards);
  const opened = new Map(); // by section id: whether the reader opened or closed it
  const layers = new Map(); // by section id: the layer that it shows
  let shown = []; // the sections as drawn

  function draw({ step, query, node }) {
    const focused = document.activeElement?.dataset?.stop;
    const all = sections(app.programs.at(step), app.programs.changes(step), wanted(query));
    shown = query ? all.filter((section) => section.hits > 0) : all;
    const open = openSections(shown, query, node);
    cards.replaceChildren(...shown.map((section) => card(section, open.has(section.id), query, node)));
    status.replaceChildren(statusText(all, query));
    if (focused) cards.querySelector(`[data-stop="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  function statusText(all, query) {
    if (!query) return "";
    const hits = all.reduce((sum, section) => sum + section.hits * section.members.length, 0);
    return hits ? `${plural(hits, "node")} with “${query}”` : `No node with “${query}” after this pass.`;
  }

  function openSections(list, query, node) {
    const busy = list.filter(({ counts }) => counts.added + counts.removed + counts.changed > 0);
    const first = busy.length
      ? busy.slice(0, OPEN_AT_FIRST)
      : list.filter(({ id }) => id.startsWith("layer ")).slice(0, 1);
    const byItself = new Set(query ? list.map(({ id }) => id) : (first.length ? first : list).map(({ id }) => id));
    return new Set(
      list
        .filter((section) => opened.get(section.id) ?? (byItself.has(section.id) || holds(section, node) !== null))
        .map(({ id }) => id),
    );
  }

  /** The member of a section that contains a node; null if none does. */
  function holds(section, node) {
    if (!node) return null;
    const at = section.members.findIndex(({ entries }) => entries.some((entry) => entry.node.key === node));
    return at < 0 ? null : at;
  }

  function card(section, isOpen, query, selected) {
    const { id, title, members, counts } = section;
    const at = Math.min(layers.get(id) ?? 0, members.length - 1);
    const size = members[0].entries.length;
    const toggle = h(
      "button",
      {
        type: "button",
        class: "card-title",
        "data-stop": `card ${id}`,
        "aria-expanded": String(isOpen),
        onclick: () => {
          opened.set(id, !isOpen);
          draw(app.store.state);
        },
      },
      h("span", { class: "arrow" }),
      h("span", { class: "title" }, title),
      members.length > 1 && h("span", { class: "times" }, `× ${members.length}`),
      h("span", { class: "quiet size" }, plural(query ? section.hits : size, query ? "hit" : "node")),
      h("span", { class: "counts" }, countTags(counts)),
    );
    return h(
      "article",
      { class: "card", "data-section": id },
      h("h3", {}, toggle),
      isOpen && members.length > 1 && layerPicker(section, at),
      isOpen && rows(title, members[at], query, selected),
    );
  }

  /** A folded section shows one of its layers; this chooses which. */
  function layerPicker({ id, members }, at) {
    const choice = h(
      "select",
      { "aria-label": "Layer shown" },
      members.map(({ layer }, number) => h("option", { value: number, selected: number === at }, String(layer))),
    );
    const show = (number) => {
      layers.set(id, number);
      draw(app.store.state);
    };
    choice.addEventListener("change", () => show(Number(choice.value)));
    return h(
      "div",
      { class: "picker" },
      `${members.length} equal layers; shown is layer`,
      choice,
      button("Previous layer", { class: "icon", disabled: at === 0, onclick: () => show(at - 1) }, "‹"),
      button("Next layer", { class: "icon", disabled: at === members.length - 1, onclick: () => show(at + 1) }, "›"),
    );
  }

  /** The nodes of a card, with params after the nodes that use them. */
  function rows(title, { layer, entries }, query, selected) {
    const wantedEntries = entries.filter((entry) => !query || entry.hit);
    const isParam = ({ node }) => node.kind === "param";
    const params = wantedEntries.filter(isParam);
    const others = wantedEntries.filter((entry) => !isParam(entry));
    const all = [...others, ...params];
    const current = (all.find(({ node }) => node.key === selected) ?? all[0])?.node;
    const made = (list) => list.map((entry) => row(entry, layer, selected, entry.node === current));
    return h(
      "div",
      {
        class: `rows ${all.some(({ node }) => node.backend) ? "provided" : ""}`,
        role: "listbox",
        "aria-label": `Nodes: ${title}`,
      },
      made(others),
      params.length > 0 &&
        others.length > 0 &&
        h("div", { class: "divider", role: "presentation" }, plural(params.length, "param")),
      made(params),
    );
  }

  function row({ node, mark }, layer, selected, reachable) {
    const label = `${node.name}${mark ? `, ${mark}` : ""}`;
    return h(
      "div",
      {
        class: `row ${node.kind} ${mark}`,
        role: "option",
        tabindex: reachable ? 0 : -1,
        "aria-label": label,
        "aria-selected": String(node.key === selected),
        "data-stop": `node ${node.key}`,
        title: lineText(node),
        onclick: () => app.store.set({ node: node.key }),
      },
      h("span", { class: "mark", "aria-hidden": "true" }, MARKS[mark] ?? ""),
      h("span", { class: "node-name" }, within(layer, node.name)),
      h("span", { class: "what" }, what(node, layer)),
      h("span", { class: "type" }, node.type),
      h("span", { class: "who" }, backendTag(app, node.backend)),
    );
  }

  /** Open the section of a node, turn to its layer, and bring it into view. */
  function reveal(key) {
    for (const section of shown) {
      const at = holds(section, key);
      if (at === null) continue;
      const current = Math.min(layers.get(section.id) ?? 0, section.members.length - 1);
      const there = section.members[current].entries.some((entry) => entry.node.key === key);
      opened.set(section.id, true);
      if (!there) layers.set(section.id, at);
    }
    draw(app.store.state);
    cards.querySelector(`[data-stop="${CSS.escape(`node ${key}`)}"]`)?.scrollIntoView({ block: "nearest" });
  }

  function update(state, old) {
    if (old && state.query !== old.query) opened.clear();
    draw(state);
    if (state.node && state.node !== old?.node) reveal(state.node);
  }
  return { element, update };
}
