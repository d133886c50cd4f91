// The views as tabs: one is shown; each is made on first use.

import { h } from "./dom.js";

/** `views` are [id, title, make]. */
export function createTabs(app, views) {
  const tabs = new Map();
  const panels = new Map();
  for (const [id, title, make] of views) {
    const panel = h("div", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, hidden: true });
    const tab = h(
      "button",
      {
        type: "button",
        role: "tab",
        id: `tab-${id}`,
        "aria-controls": panel.id,
        onclick: () => app.store.set({ tab: id }),
      },
      title,
    );
    tabs.set(id, tab);
    panels.set(id, { panel, make });
  }
  const list = h("div", { role: "tablist", "aria-label": "Views" }, [...tabs.values()]);
  list.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    const ids = [...tabs.keys()];
    const next = ids[(ids.indexOf(app.store.state.tab) + by + ids.length) % ids.length];
    app.store.set({ tab: next });
    tabs.get(next).focus();
    event.stopPropagation();
    event.preventDefault();
  });
  const update = ({ tab: shown }) => {
    for (const [id, tab] of tabs) {
      const { panel, make } = panels.get(id);
      tab.setAttribute("aria-selected", String(id === shown));
      tab.tabIndex = id === shown ? 0 : -1;
      panel.hidden = id !== shown;
      if (id === shown && !panel.hasChildNodes()) panel.append(make(app));
    }
  };
  return { list, panels: [...panels.values()].map(({ panel }) => panel), update };
}
