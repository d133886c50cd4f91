// Keys: left and right go through passes, j and k or up and down through nodes, Enter opens, Escape closes, / searches.

import { move } from "./timeline.js";

const DOWN = new Set(["j", "ArrowDown"]);
const UP = new Set(["k", "ArrowUp"]);

export function startKeyboard(app, search) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (app.store.state.tab === "program" && handle(app, search, event)) event.preventDefault();
  });
}

function handle(app, search, event) {
  const { key, target } = event;
  if (key === "Escape") return escape(app, search, target);
  if (target === search) {
    if (key !== "Enter" && key !== "ArrowDown") return false;
    return focusStop(app, (stops) => stops.find((stop) => stop.dataset.stop.startsWith("node ")));
  }
  if (target.matches("input, select, textarea")) return false;
  if (key === "/") {
    search.focus();
    search.select();
  } else if (key === "ArrowLeft") move(app, -1);
  else if (key === "ArrowRight") move(app, 1);
  else if (DOWN.has(key)) return focusStop(app, (stops, at) => stops[at + 1]);
  else if (UP.has(key)) return focusStop(app, (stops, at) => (at < 0 ? stops.at(-1) : stops[at - 1]));
  else if (key === "Enter" && target.matches(".row")) target.click();
  else return false;
  return true;
}

/** Go to a node or card's title; `choose` receives all of them and the index of the focused one, or -1. */
function focusStop(app, choose) {
  const stops = [...app.program.querySelectorAll("[data-stop]")];
  const next = choose(stops, stops.indexOf(document.activeElement));
  if (!next) return true;
  next.focus();
  next.scrollIntoView({ block: "nearest" });
  return true;
}

/** Close the node, or else the search. */
function escape(app, search, target) {
  const { node, query } = app.store.state;
  if (target === search || node === null) {
    if (!query && target !== search) return false;
    search.value = "";
    search.blur();
    app.store.set({ query: "" });
  } else {
    app.store.set({ node: null });
    app.program.querySelector(`[data-stop="${CSS.escape(`node ${node}`)}"]`)?.focus({ preventScroll: true });
  }
  return true;
}
